// What the files of libserval_functions_preload.so share.
#ifndef SERVAL_PRELOAD_H
#define SERVAL_PRELOAD_H

#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>

#define PUBLIC __attribute__((visibility("default")))

// An address. IPv4 is mapped into IPv6, so that there is one form of each.
struct place {
    struct in6_addr host;
    in_port_t port;
};

// What is bound in place of what.
struct rule {
    int type;
    struct place asked, given;
    // What comes from the proxy begins with a header of the PROXY protocol.
    bool has_header;
    // The program has asked for all addresses.
    atomic_bool asked_all;
};

// The addresses of a header: of the client, and that to which it sent.
struct ends {
    struct place client, server;
};

// The length of a header before its addresses, and with those of IPv4 and of IPv6: see
// crates/wire/src/proxy_protocol.rs.
enum { FIXED_BYTES = 16, HEADER_BYTES_V4 = 28, HEADER_BYTES_MAX = 52 };

void preload_prepare(void);
// Whether a rule has headers: without one, calls for messages are those of libc.
bool has_headers(void);
// The rule of a socket with this address of its own; NULL: none.
struct rule* rule_of(int fd, int* family);
bool place_of(const struct sockaddr* address, socklen_t length, struct place* place);
// Writes an address in the form of a socket's family. Returns its length; 0: the family has no form
// for it.
socklen_t address_of(const struct place* place, int family, struct sockaddr_storage* address);
// Writes an address where a call wants it, which may have less room.
void show_address(const struct place* place, int family, struct sockaddr* address,
                  socklen_t* length);
bool is_any(const struct in6_addr* host);
// The length of a header of which at least HEADER_BYTES_V4 bytes were read: the other bytes have to
// be there if it is longer. 0: it is none.
size_t parse_header(const unsigned char* header, int type, struct ends* ends);

#endif
