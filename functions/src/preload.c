/*
 * libserval_functions_preload.so: with LD_PRELOAD, an unmodified server takes its place behind a proxy of an engine, whose functions see its messages.
 *
 * The program binds the address at which the proxy listens, as always. In its place the socket gets the address to which the proxy forwards
 * (`upstream`), and getsockname reports the one that was asked for. It is the program's own socket: reads, writes, time-outs, poll, epoll, dup and
 * fork are those of the host kernel. What is replaced is found by the address of a socket and not by its number, so a program that was
 * started by exec with the socket open goes on as it was.
 *
 * SERVAL_BEHIND has the addresses, as `serval fn run` writes them: "udp ADDRESS PORT ADDRESS PORT;tcp ...", the first those of the proxy.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define PUBLIC __attribute__((visibility("default")))

enum { PLACES_MAX = 64, RULES_BYTES_MAX = 16384 };

/* An address. IPv4 is mapped into IPv6, so that there is one form of each. */
struct place {
    struct in6_addr host;
    in_port_t port;
};

/* What is bound in place of what. */
struct rule {
    int type;
    struct place asked, given;
    /* The program has asked for all addresses. */
    atomic_bool asked_all;
};

typedef int bind_function(int, const struct sockaddr *, socklen_t);
typedef int name_function(int, struct sockaddr *, socklen_t *);

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static bind_function *next_bind;
static name_function *next_getsockname;
static struct rule rules[PLACES_MAX];
static size_t rule_count;

static bool parse_place(const char *host, unsigned port, struct place *place) {
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

static void parse_rules(const char *text) {
    static char copy[RULES_BYTES_MAX];
    char *rest = copy, *line, transport[4], asked[INET6_ADDRSTRLEN], given[INET6_ADDRSTRLEN];
    unsigned asked_port, given_port;
    if (strlen(text) >= sizeof(copy)) return;
    strcpy(copy, text);
    while ((line = strsep(&rest, ";")) != NULL && rule_count < PLACES_MAX) {
        struct rule *rule = &rules[rule_count];
        if (sscanf(line, "%3s %45s %u %45s %u", transport, asked, &asked_port, given, &given_port) != 5) continue;
        rule->type = strcmp(transport, "udp") == 0 ? SOCK_DGRAM : SOCK_STREAM;
        if (asked_port == 0 || asked_port > 65535 || given_port == 0 || given_port > 65535) continue;
        if (parse_place(asked, asked_port, &rule->asked) && parse_place(given, given_port, &rule->given)) rule_count++;
    }
}

static void prepare(void) {
    /* A copy: programs such as nginx replace their environment. */
    const char *text = getenv("SERVAL_BEHIND");
    next_bind = (bind_function *)dlsym(RTLD_NEXT, "bind");
    next_getsockname = (name_function *)dlsym(RTLD_NEXT, "getsockname");
    if (text) parse_rules(text);
}

__attribute__((constructor)) static void load(void) {
    pthread_once(&prepared, prepare);
}

/* The form of rules of an address. False: it is no IP address. */
static bool place_of(const struct sockaddr *address, socklen_t length, struct place *place) {
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

/* Writes an address in the form of a socket's family. Returns its length; 0: the family has no form for it. */
static socklen_t address_of(const struct place *place, int family, struct sockaddr_storage *address) {
    memset(address, 0, sizeof(*address));
    if (family == AF_INET) {
        struct sockaddr_in *in = (struct sockaddr_in *)address;
        if (!IN6_IS_ADDR_V4MAPPED(&place->host)) return 0;
        in->sin_family = AF_INET;
        memcpy(&in->sin_addr, place->host.s6_addr + 12, sizeof(in->sin_addr));
        in->sin_port = place->port;
        return sizeof(*in);
    }
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)address;
    in6->sin6_family = AF_INET6;
    in6->sin6_addr = place->host;
    in6->sin6_port = place->port;
    return sizeof(*in6);
}

static bool is_any(const struct in6_addr *host) {
    static const unsigned char mapped[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0};
    return IN6_IS_ADDR_UNSPECIFIED(host) || memcmp(host->s6_addr, mapped, sizeof(mapped)) == 0;
}

static bool is_same(const struct place *a, const struct place *b) {
    return a->port == b->port && IN6_ARE_ADDR_EQUAL(&a->host, &b->host);
}

static int option_of(int fd, int option) {
    int value = -1;
    socklen_t length = sizeof(value);
    return getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 ? value : -1;
}

PUBLIC int bind(int fd, const struct sockaddr *address, socklen_t length) {
    struct sockaddr_storage given;
    struct place asked;
    pthread_once(&prepared, prepare);
    if (!next_bind) {
        errno = ENOSYS;
        return -1;
    }
    if (!place_of(address, length, &asked)) return next_bind(fd, address, length);
    for (size_t at = 0; at < rule_count; at++) {
        struct rule *rule = &rules[at];
        bool all = is_any(&asked.host);
        if (rule->asked.port != asked.port) continue;
        if (!all && !is_any(&rule->asked.host) && !is_same(&rule->asked, &asked)) continue;
        if (option_of(fd, SO_TYPE) != rule->type) continue;
        length = address_of(&rule->given, option_of(fd, SO_DOMAIN), &given);
        if (length == 0) {
            errno = EADDRNOTAVAIL;
            return -1;
        }
        atomic_store_explicit(&rule->asked_all, all, memory_order_relaxed);
        return next_bind(fd, (struct sockaddr *)&given, length);
    }
    return next_bind(fd, address, length);
}

PUBLIC int getsockname(int fd, struct sockaddr *restrict address, socklen_t *restrict length) {
    struct sockaddr_storage own, shown;
    socklen_t own_length = sizeof(own);
    struct place place;
    pthread_once(&prepared, prepare);
    if (!next_getsockname) {
        errno = ENOSYS;
        return -1;
    }
    if (rule_count == 0 || !address || !length || next_getsockname(fd, (struct sockaddr *)&own, &own_length) != 0 ||
        !place_of((struct sockaddr *)&own, own_length, &place))
        return next_getsockname(fd, address, length);
    for (size_t at = 0; at < rule_count; at++) {
        struct rule *rule = &rules[at];
        struct place asked = rule->asked;
        if (!is_same(&rule->given, &place) || option_of(fd, SO_TYPE) != rule->type) continue;
        /* A connection has one address. */
        if (atomic_load_explicit(&rule->asked_all, memory_order_relaxed) &&
            (rule->type == SOCK_DGRAM || option_of(fd, SO_ACCEPTCONN) == 1))
            memset(asked.host.s6_addr + (own.ss_family == AF_INET ? 12 : 0), 0, own.ss_family == AF_INET ? 4 : 16);
        own_length = address_of(&asked, own.ss_family, &shown);
        if (own_length == 0) break;
        memcpy(address, &shown, *length < own_length ? *length : own_length);
        *length = own_length;
        return 0;
    }
    return next_getsockname(fd, address, length);
}
