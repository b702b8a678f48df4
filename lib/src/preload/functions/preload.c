// libserval_functions_preload.so: with LD_PRELOAD, an unmodified server takes its place behind a
// proxy of an engine, whose functions see its messages.
//
// With `proxy_protocol` what comes from the proxy begins with a header that has the client's
// address, which is taken off here: accept, getpeername, recvfrom and recvmsg show that address,
// and what the program sends there goes to the proxy (preload_datagrams.c).
//
// The program binds the address at which the proxy listens, as always. In its place the socket gets
// the address to which the proxy forwards
// (`upstream`), and getsockname reports the one that was asked for. It is the program's own socket:
// reads, writes, time-outs, poll, epoll, dup and fork are those of the host kernel. What is
// replaced is found by the address of a socket and not by its number, so a program that was started
// by exec with the socket open goes on as it was.
//
// SERVAL_BEHIND has the addresses, as `serval fn run` writes them: "udp ADDRESS PORT ADDRESS PORT
// HEADER;tcp ...", the first those of the proxy; HEADER is 1 with `proxy_protocol`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "preload/functions/preload.h"

enum { RULES_MAX = 64, RULES_BYTES_MAX = 16384 };
// Connections whose clients are remembered. Of more, those that were accepted first have the
// address of the proxy.
enum { CONNECTIONS_MAX = 16384, NEAR = 4 };
// How long a header may take that the proxy sends with the connection.
enum { HEADER_MS = 1000 };

// Who is at the other end of a connection: found by the proxy's address, which is another one for
// each.
struct connection {
    struct place proxy;
    struct ends ends;
    unsigned long number;
};

typedef int bind_function(int, const struct sockaddr*, socklen_t);
typedef int accept_function(int, struct sockaddr*, socklen_t*, int);
typedef int name_function(int, struct sockaddr*, socklen_t*);

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static bind_function* next_bind;
static name_function* next_getsockname;
static accept_function* next_accept4;
static name_function* next_getpeername;
static int (*next_listen)(int, int);
static struct rule rules[RULES_MAX];
static struct connection connections[CONNECTIONS_MAX];
static unsigned long accepted;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static size_t rule_count;

static bool parse_place(const char* host, unsigned port, struct place* place) {
    struct in_addr short_host;
    place->port = htons((in_port_t)port);
    if (inet_pton(AF_INET, host, &short_host) == 1) {
        memset(&place->host, 0, sizeof(place->host));
        place->host.s6_addr[10] = place->host.s6_addr[11] = 0xff;
        memcpy(place->host.s6_addr + 12, &short_host, sizeof(short_host));
        return true;
    }
    return inet_pton(AF_INET6, host, &place->host) == 1;
}

static void parse_rules(const char* text) {
    static char copy[RULES_BYTES_MAX];
    char *rest = copy, *line, transport[4], asked[INET6_ADDRSTRLEN], given[INET6_ADDRSTRLEN];
    unsigned asked_port, given_port, has_header;
    if (strlen(text) >= sizeof(copy)) return;
    strcpy(copy, text);
    while ((line = strsep(&rest, ";")) != NULL && rule_count < RULES_MAX) {
        struct rule* rule = &rules[rule_count];
        if (sscanf(line, "%3s %45s %u %45s %u %u", transport, asked, &asked_port, given,
                   &given_port, &has_header) != 6)
            continue;
        rule->has_header = has_header != 0;
        rule->type = strcmp(transport, "udp") == 0 ? SOCK_DGRAM : SOCK_STREAM;
        if (asked_port == 0 || asked_port > 65535 || given_port == 0 || given_port > 65535)
            continue;
        if (parse_place(asked, asked_port, &rule->asked) &&
            parse_place(given, given_port, &rule->given))
            rule_count++;
    }
}

static void unlock_in_child(void) { pthread_mutex_init(&guard, NULL); }

static void prepare(void) {
    // A copy: programs such as nginx replace their environment.
    const char* text = getenv("SERVAL_BEHIND");
    next_bind = (bind_function*)dlsym(RTLD_NEXT, "bind");
    next_getsockname = (name_function*)dlsym(RTLD_NEXT, "getsockname");
    next_getpeername = (name_function*)dlsym(RTLD_NEXT, "getpeername");
    next_listen = (int (*)(int, int))dlsym(RTLD_NEXT, "listen");
    next_accept4 = (accept_function*)dlsym(RTLD_NEXT, "accept4");
    // Another thread may hold the lock when the program forks.
    pthread_atfork(NULL, NULL, unlock_in_child);
    if (text) parse_rules(text);
}

void preload_prepare(void) { pthread_once(&prepared, prepare); }

__attribute__((constructor)) static void load(void) { preload_prepare(); }

// The form of rules of an address. False: it is no IP address.
bool place_of(const struct sockaddr* address, socklen_t length, struct place* place) {
    sa_family_t family;
    if (!address || length < (socklen_t)sizeof(family)) return false;
    memcpy(&family, address, sizeof(family));
    if (family == AF_INET && length >= (socklen_t)sizeof(struct sockaddr_in)) {
        struct sockaddr_in in;
        memcpy(&in, address, sizeof(in));
        memset(&place->host, 0, sizeof(place->host));
        place->host.s6_addr[10] = place->host.s6_addr[11] = 0xff;
        memcpy(place->host.s6_addr + 12, &in.sin_addr, sizeof(in.sin_addr));
        place->port = in.sin_port;
        return true;
    }
    if (family == AF_INET6 && length >= (socklen_t)sizeof(struct sockaddr_in6)) {
        struct sockaddr_in6 in6;
        memcpy(&in6, address, sizeof(in6));
        place->host = in6.sin6_addr;
        place->port = in6.sin6_port;
        return true;
    }
    return false;
}

socklen_t address_of(const struct place* place, int family, struct sockaddr_storage* address) {
    memset(address, 0, sizeof(*address));
    if (family == AF_INET) {
        struct sockaddr_in* in = (struct sockaddr_in*)address;
        if (!IN6_IS_ADDR_V4MAPPED(&place->host)) return 0;
        in->sin_family = AF_INET;
        memcpy(&in->sin_addr, place->host.s6_addr + 12, sizeof(in->sin_addr));
        in->sin_port = place->port;
        return sizeof(*in);
    }
    struct sockaddr_in6* in6 = (struct sockaddr_in6*)address;
    in6->sin6_family = AF_INET6;
    in6->sin6_addr = place->host;
    in6->sin6_port = place->port;
    return sizeof(*in6);
}

void show_address(const struct place* place, int family, struct sockaddr* address,
                  socklen_t* length) {
    struct sockaddr_storage shown;
    socklen_t own_length = address_of(place, family, &shown);
    if (!address || !length || own_length == 0) return;
    memcpy(address, &shown, *length < own_length ? *length : own_length);
    *length = own_length;
}

bool is_any(const struct in6_addr* host) {
    static const unsigned char mapped[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0};
    return IN6_IS_ADDR_UNSPECIFIED(host) || memcmp(host->s6_addr, mapped, sizeof(mapped)) == 0;
}

static bool is_same(const struct place* a, const struct place* b) {
    return a->port == b->port && IN6_ARE_ADDR_EQUAL(&a->host, &b->host);
}

static int option_of(int fd, int option) {
    int value = -1;
    socklen_t length = sizeof(value);
    return getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 ? value : -1;
}

// Lets the host kernel drop datagrams without a header, so that poll does not report what recvmsg
// will not show.
static void filter_datagrams(int fd) {
    // Behind the header of UDP, 8 bytes; a load beyond the end drops.
    static struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 8 + HEADER_BYTES_V4 - 1),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 8),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x0d0a0d0a, 0, 9),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 12),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x000d0a51, 0, 7),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 16),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x5549540a, 0, 5),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 20),
        // PROXY over UDP, with addresses of IPv4 or IPv6.
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x21120000 | (HEADER_BYTES_V4 - FIXED_BYTES), 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x21220000 | (HEADER_BYTES_MAX - FIXED_BYTES), 0, 2),
        BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 8 + HEADER_BYTES_MAX - 1),
        BPF_STMT(BPF_RET | BPF_K, 0xffffffff),
        BPF_STMT(BPF_RET | BPF_K, 0),
    };
    struct sock_fprog program = {sizeof(code) / sizeof(*code), code};
    // Without it they are dropped by recvmsg.
    setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
}

PUBLIC int bind(int fd, const struct sockaddr* address, socklen_t length) {
    struct sockaddr_storage given;
    struct place asked;
    preload_prepare();
    if (!next_bind) {
        errno = ENOSYS;
        return -1;
    }
    if (!place_of(address, length, &asked)) return next_bind(fd, address, length);
    for (size_t at = 0; at < rule_count; at++) {
        struct rule* rule = &rules[at];
        bool all = is_any(&asked.host);
        if (rule->asked.port != asked.port) continue;
        if (!all && !is_any(&rule->asked.host) && !is_same(&rule->asked, &asked)) continue;
        if (option_of(fd, SO_TYPE) != rule->type) continue;
        length = address_of(&rule->given, option_of(fd, SO_DOMAIN), &given);
        if (length == 0) {
            errno = EADDRNOTAVAIL;
            return -1;
        }
        if (rule->has_header && rule->type == SOCK_DGRAM) filter_datagrams(fd);
        atomic_store_explicit(&rule->asked_all, all, memory_order_relaxed);
        return next_bind(fd, (struct sockaddr*)&given, length);
    }
    return next_bind(fd, address, length);
}

struct rule* rule_of(int fd, int* family) {
    struct sockaddr_storage own;
    socklen_t length = sizeof(own);
    struct place place;
    preload_prepare();
    if (rule_count == 0 || !next_getsockname ||
        next_getsockname(fd, (struct sockaddr*)&own, &length) != 0 ||
        !place_of((struct sockaddr*)&own, length, &place))
        return NULL;
    *family = own.ss_family;
    for (size_t at = 0; at < rule_count; at++)
        if (is_same(&rules[at].given, &place) && option_of(fd, SO_TYPE) == rules[at].type)
            return &rules[at];
    return NULL;
}

bool has_headers(void) {
    preload_prepare();
    for (size_t at = 0; at < rule_count; at++)
        if (rules[at].has_header) return true;
    return false;
}

size_t parse_header(const unsigned char* header, int type, struct ends* ends) {
    static const unsigned char signature[] = "\r\n\r\n\0\r\nQUIT\n\x21";
    int transport = type == SOCK_DGRAM ? 2 : 1;
    if (memcmp(header, signature, 13) != 0 || header[14] != 0) return 0;
    struct place* const places[] = {&ends->client, &ends->server};
    if (header[13] == (0x10 | transport) && header[15] == HEADER_BYTES_V4 - FIXED_BYTES) {
        for (size_t at = 0; at < 2; at++) {
            struct sockaddr_in in = {.sin_family = AF_INET};
            memcpy(&in.sin_addr, header + 16 + 4 * at, 4);
            memcpy(&in.sin_port, header + 24 + 2 * at, 2);
            if (!place_of((struct sockaddr*)&in, sizeof(in), places[at])) return 0;
        }
        return HEADER_BYTES_V4;
    }
    if (header[13] != (0x20 | transport) || header[15] != HEADER_BYTES_MAX - FIXED_BYTES) return 0;
    for (size_t at = 0; at < 2; at++) {
        memcpy(&places[at]->host, header + 16 + 16 * at, 16);
        memcpy(&places[at]->port, header + 48 + 2 * at, 2);
    }
    return HEADER_BYTES_MAX;
}

static struct connection* near_of(const struct place* proxy) {
    return &connections[ntohs(proxy->port) % (CONNECTIONS_MAX / NEAR) * NEAR];
}

static void remember(const struct place* proxy, const struct ends* ends) {
    pthread_mutex_lock(&guard);
    struct connection *near = near_of(proxy), *found = near;
    for (size_t at = 0; at < NEAR; at++) {
        if (near[at].number < found->number) found = &near[at];
        if (near[at].number != 0 && is_same(&near[at].proxy, proxy)) {
            found = &near[at];
            break;
        }
    }
    *found = (struct connection){*proxy, *ends, ++accepted};
    pthread_mutex_unlock(&guard);
}

// The ends of a connection whose header has been read.
static bool ends_of(int fd, struct ends* ends) {
    struct sockaddr_storage peer;
    socklen_t length = sizeof(peer);
    struct place proxy;
    bool found = false;
    if (!next_getpeername || next_getpeername(fd, (struct sockaddr*)&peer, &length) != 0 ||
        !place_of((struct sockaddr*)&peer, length, &proxy))
        return false;
    pthread_mutex_lock(&guard);
    struct connection* near = near_of(&proxy);
    for (size_t at = 0; at < NEAR && !found; at++) {
        found = near[at].number != 0 && is_same(&near[at].proxy, &proxy);
        if (found) *ends = near[at].ends;
    }
    pthread_mutex_unlock(&guard);
    return found;
}

PUBLIC int getsockname(int fd, struct sockaddr* restrict address, socklen_t* restrict length) {
    int family;
    struct rule* rule = rule_of(fd, &family);
    struct ends ends;
    if (!next_getsockname) {
        errno = ENOSYS;
        return -1;
    }
    if (!rule || !address || !length) return next_getsockname(fd, address, length);
    struct place asked = rule->asked;
    // A connection has one address.
    if (rule->type == SOCK_DGRAM || option_of(fd, SO_ACCEPTCONN) == 1) {
        if (atomic_load_explicit(&rule->asked_all, memory_order_relaxed))
            memset(asked.host.s6_addr + (family == AF_INET ? 12 : 0), 0,
                   family == AF_INET ? 4 : 16);
    } else if (rule->has_header && ends_of(fd, &ends)) {
        asked = ends.server;
    }
    show_address(&asked, family, address, length);
    return 0;
}

PUBLIC int getpeername(int fd, struct sockaddr* restrict address, socklen_t* restrict length) {
    int family;
    struct rule* rule = rule_of(fd, &family);
    struct ends ends;
    if (!next_getpeername) {
        errno = ENOSYS;
        return -1;
    }
    if (!rule || !rule->has_header || rule->type != SOCK_STREAM || !address || !length ||
        !ends_of(fd, &ends))
        return next_getpeername(fd, address, length);
    show_address(&ends.client, family, address, length);
    return 0;
}

// Reads the header of a connection, which comes with it, and nothing behind it.
static bool read_header(int fd, struct ends* ends) {
    unsigned char header[HEADER_BYTES_MAX];
    size_t length = 0, whole = HEADER_BYTES_V4;
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    while (length < whole) {
        int polled = poll(&ready, 1, HEADER_MS);
        if (polled < 0 && errno == EINTR) continue;
        if (polled <= 0) return false;
        // Not by a call of this library.
        ssize_t got = read(fd, header + length, whole - length);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got <= 0) return false;
        length += (size_t)got;
        // Both lengths are greater than that of the fixed part.
        if (length >= FIXED_BYTES && header[15] == HEADER_BYTES_MAX - FIXED_BYTES)
            whole = HEADER_BYTES_MAX;
    }
    return parse_header(header, SOCK_STREAM, ends) == whole;
}

PUBLIC int accept4(int fd, struct sockaddr* restrict address, socklen_t* restrict length,
                   int flags) {
    struct sockaddr_storage peer;
    socklen_t peer_length = sizeof(peer);
    struct place proxy;
    struct ends ends;
    int family;
    struct rule* rule = rule_of(fd, &family);
    if (!next_accept4) {
        errno = ENOSYS;
        return -1;
    }
    if (!rule || !rule->has_header) return next_accept4(fd, address, length, flags);
    int connection = next_accept4(fd, (struct sockaddr*)&peer, &peer_length, flags);
    if (connection < 0) return connection;
    if (!place_of((struct sockaddr*)&peer, peer_length, &proxy) ||
        !read_header(connection, &ends)) {
        // It does not come from the proxy.
        close(connection);
        errno = ECONNABORTED;
        return -1;
    }
    remember(&proxy, &ends);
    show_address(&ends.client, family, address, length);
    return connection;
}

PUBLIC int accept(int fd, struct sockaddr* restrict address, socklen_t* restrict length) {
    return accept4(fd, address, length, 0);
}

PUBLIC int listen(int fd, int backlog) {
    int family, seconds = 1;
    struct rule* rule = rule_of(fd, &family);
    if (!next_listen) {
        errno = ENOSYS;
        return -1;
    }
    // A connection is shown when its header has come, so that accept does not wait for it.
    if (rule && rule->has_header)
        setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof(seconds));
    return next_listen(fd, backlog);
}
