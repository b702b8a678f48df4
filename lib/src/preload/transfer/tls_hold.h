// Small data of a TLS connection that waits in the kernel for what the program sends next.
#pragma once

#include "preload/transfer/tls_table.h"

// Whether a call of so few bytes may wait: the thread is in a loop of events, and comes back to a
// call that lets it go.
bool tls_hold_may(struct tls_connection* connection, int fd, size_t bytes);
// The program holds packets of a connection back itself.
void tls_hold_never(int fd);
// A call on a descriptor begins: what waits on another one goes.
void tls_hold_begin(int fd);
// It has sent: its last bytes wait, or none do.
void tls_hold_end(int fd, bool waits);
// A descriptor is closed, which sends what waits.
void tls_hold_closed(int fd);
