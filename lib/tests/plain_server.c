// A server that knows nothing of Serval: plain_server PORT HOW [UDP TCP [CONNECTION]] echoes
// datagrams and what comes over connections. "?" is answered with the addresses that it sees: of
// its socket, of the connection, and of the client. HOW: plain; dup, fork and exec serve from a
// copy of the sockets. With later it executes itself when a connection says "!", which goes on with
// "again". With pktinfo "?" in a datagram is answered with the address to which it was sent. It
// binds all addresses, with exec 127.0.0.1. With parts it serves datagrams only, of IPv4 and IPv6,
// and receives each in several buffers of 100 bytes together; what is longer is answered with its
// length and its first bytes.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void text_of(const struct sockaddr_in* address, char* text, size_t bytes) {
    char host[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &address->sin_addr, host, sizeof(host));
    snprintf(text, bytes, "%s:%d", host, ntohs(address->sin_port));
}

static size_t answer(int fd, const struct sockaddr_in* client, char* message, size_t length,
                     size_t bytes) {
    struct sockaddr_in own;
    socklen_t own_length = sizeof(own);
    char own_text[64], client_text[64];
    if (length != 1 || message[0] != '?') return length;
    if (getsockname(fd, (struct sockaddr*)&own, &own_length) < 0 || own_length != sizeof(own))
        exit(3);
    text_of(&own, own_text, sizeof(own_text));
    text_of(client, client_text, sizeof(client_text));
    return (size_t)snprintf(message, bytes, "%s %s\n", own_text, client_text);
}

// The next datagram, and the address to which it was sent.
static ssize_t receive(int fd, char* message, size_t bytes, struct sockaddr_in* client,
                       struct in_addr* to) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(struct in_pktinfo))];
    } control;
    struct iovec part = {message, bytes};
    struct msghdr datagram = {
        .msg_name = client, .msg_namelen = sizeof(*client), .msg_iov = &part, .msg_iovlen = 1};
    datagram.msg_control = &control, datagram.msg_controllen = sizeof(control);
    ssize_t length = recvmsg(fd, &datagram, 0);
    to->s_addr = 0;
    for (struct cmsghdr* at = CMSG_FIRSTHDR(&datagram); length >= 0 && at;
         at = CMSG_NXTHDR(&datagram, at))
        if (at->cmsg_level == IPPROTO_IP && at->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo info;
            memcpy(&info, CMSG_DATA(at), sizeof(info));
            *to = info.ipi_addr;
        }
    return length;
}

// The sockets go on in a new program.
static void execute(char** argv, const char* how, int udp, int tcp, int connection) {
    char numbers[3][16];
    sprintf(numbers[0], "%d", udp), sprintf(numbers[1], "%d", tcp),
        sprintf(numbers[2], "%d", connection);
    execl(argv[0], argv[0], argv[1], how, numbers[0], numbers[1],
          connection < 0 ? NULL : numbers[2], NULL);
}

static int open_at(int type, const char* port, in_addr_t host) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    int one = 1, fd = socket(AF_INET, type, 0);
    at.sin_addr.s_addr = htonl(host);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (struct sockaddr*)&at, sizeof(at)) < 0) {
        perror("bind");
        exit(2);
    }
    return fd;
}

static int serve_parts(const char* port) {
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)atoi(port))};
    int none = 0, fd = socket(AF_INET6, SOCK_DGRAM, 0);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &none, sizeof(none));
    if (bind(fd, (struct sockaddr*)&at, sizeof(at)) < 0) return 2;
    for (;;) {
        char message[100], reply[200];
        struct sockaddr_in6 client;
        struct iovec parts[] = {{message, 1},
                                {message + 1, 0},
                                {message + 1, 9},
                                {message + 10, 40},
                                {message + 50, 50}};
        struct msghdr datagram = {
            .msg_name = &client, .msg_namelen = sizeof(client), .msg_iov = parts, .msg_iovlen = 5};
        ssize_t length = recvmsg(fd, &datagram, MSG_TRUNC);
        if (length < 0) continue;
        size_t have = (size_t)length < sizeof(message) ? (size_t)length : sizeof(message), head = 0;
        if (datagram.msg_flags & MSG_TRUNC) head = (size_t)sprintf(reply, "%zd ", length);
        memcpy(reply + head, message, have);
        sendto(fd, reply, head + have, 0, (struct sockaddr*)&client, datagram.msg_namelen);
    }
}

int main(int argc, char** argv) {
    if (argc != 3 && argc != 5 && argc != 6) return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (strcmp(argv[2], "parts") == 0) return serve_parts(argv[1]);
    in_addr_t host = strcmp(argv[2], "exec") == 0 ? INADDR_LOOPBACK : INADDR_ANY;
    int udp = argc > 3 ? atoi(argv[3]) : open_at(SOCK_DGRAM, argv[1], host);
    int tcp = argc > 3 ? atoi(argv[4]) : open_at(SOCK_STREAM, argv[1], host);
    if (argc == 3 && listen(tcp, 16) < 0) return 2;
    if (strcmp(argv[2], "dup") == 0) {
        int first[] = {udp, tcp};
        udp = dup(udp), tcp = dup(tcp);
        close(first[0]), close(first[1]);
    }
    if (strcmp(argv[2], "exec") == 0) {
        execute(argv, "plain", udp, tcp, -1);
        return 2;
    }
    if (strcmp(argv[2], "fork") == 0) {
        pid_t child = fork();
        if (child > 0) return waitpid(child, NULL, 0) == child ? 0 : 1;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    int pktinfo = strcmp(argv[2], "pktinfo") == 0, one = 1;
    if (pktinfo && setsockopt(udp, IPPROTO_IP, IP_PKTINFO, &one, sizeof(one)) < 0) return 2;
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = udp};
    epoll_ctl(set, EPOLL_CTL_ADD, udp, &event);
    event.data.fd = tcp;
    epoll_ctl(set, EPOLL_CTL_ADD, tcp, &event);
    if (argc == 6) {
        event.data.fd = atoi(argv[5]);
        epoll_ctl(set, EPOLL_CTL_ADD, event.data.fd, &event);
        send(event.data.fd, "again\n", 6, MSG_NOSIGNAL);
    }
    for (;;) {
        char message[65536];
        struct sockaddr_in client;
        socklen_t client_length = sizeof(client);
        ssize_t length;
        if (epoll_wait(set, &event, 1, -1) != 1) continue;
        int fd = event.data.fd;
        if (fd == udp) {
            struct in_addr to;
            if (pktinfo)
                length = receive(udp, message, sizeof(message), &client, &to);
            else
                length = recvfrom(udp, message, sizeof(message), 0, (struct sockaddr*)&client,
                                  &client_length);
            if (length < 0) continue;
            size_t reply = (size_t)length;
            if (!pktinfo)
                reply = answer(udp, &client, message, reply, sizeof(message));
            else if (reply == 1 && message[0] == '?')
                reply = (size_t)sprintf(message, "%s\n", inet_ntoa(to));
            sendto(udp, message, reply, 0, (struct sockaddr*)&client, client_length);
        } else if (fd == tcp) {
            event.data.fd = accept(tcp, (struct sockaddr*)&client, &client_length);
            if (event.data.fd >= 0) epoll_ctl(set, EPOLL_CTL_ADD, event.data.fd, &event);
        } else {
            length = recv(fd, message, sizeof(message), 0);
            if (length <= 0 || getpeername(fd, (struct sockaddr*)&client, &client_length) < 0) {
                close(fd);
                continue;
            }
            // Lines: "!" executes, "?" asks.
            if (length == 2 && message[0] == '!' && strcmp(argv[2], "later") == 0) {
                execute(argv, "plain", udp, tcp, fd);
                return 2;
            }
            if (length == 2 && message[0] == '?')
                length = (ssize_t)answer(fd, &client, message, 1, sizeof(message));
            send(fd, message, (size_t)length, MSG_NOSIGNAL);
        }
    }
}
