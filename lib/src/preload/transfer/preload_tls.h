// The calls of a program on its TLS connections.
#pragma once

#include <stdbool.h>
#include <sys/types.h>

// From here on the library takes over what OpenSSL asks of the kernel. `verbose`: it reports that
// on standard error, at the first connection of a process.
void tls_start(bool verbose);
// sendfile on a TLS connection. False: the descriptor is none.
bool tls_sendfile(int out, int in, off_t* offset, size_t count, ssize_t* sent);
