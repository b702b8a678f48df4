// TCP with messages of a fixed size on one thread: epoll, one read and one write for each ready connection.
#ifndef SERVAL_BASELINES_TCP_H
#define SERVAL_BASELINES_TCP_H

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "functions.h"
#include "udp.h"

constexpr uint32_t FRAME_BYTES_MAX = 65536;
constexpr size_t READ_BYTES = 256 << 10;

struct Connection {
    int fd;
    std::vector<uint8_t> rest;    // the beginning of a message
    std::vector<uint8_t> unsent;  // output the socket did not accept; until it is sent, nothing is read
};

class TcpServer {
  public:
    TcpServer(sockaddr_in address, uint32_t frame) : frame(frame), input(READ_BYTES + frame), out(READ_BYTES / frame * OUT_BYTES + OUT_BYTES * 2) {
        listener = bound_socket(SOCK_STREAM | SOCK_NONBLOCK, address);
        if (listen(listener, 1024)) fail("listen");
        poll = epoll_create1(EPOLL_CLOEXEC);
        if (poll < 0) fail("make an epoll set");
        watch(EPOLL_CTL_ADD, listener, EPOLLIN, nullptr);
        ready("echo", url("tcp", address));
    }
    // One turn; returns whether there was work.
    template <class Function>
    bool turn(int wait_ms, Function& function, Account& account, Turns& turns) {
        epoll_event events[64];
        const int count = epoll_wait(poll, events, 64, wait_ms);
        if (wait_ms) turns.woke();
        for (int i = 0; i < count; i++) {
            auto* connection = static_cast<Connection*>(events[i].data.ptr);
            if (!connection) {
                admit();
            } else if (!(connection->unsent.empty() ? answer(*connection, function, account) : send(*connection))) {
                close(connection->fd);
                delete connection;
            }
        }
        return count > 0;
    }

  private:
    void watch(int operation, int fd, uint32_t events, Connection* connection) {
        epoll_event event = {};
        event.events = events;
        event.data.ptr = connection;
        if (epoll_ctl(poll, operation, fd, &event)) fail("watch a socket");
    }
    void admit() {
        for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
            set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "set TCP_NODELAY");
            watch(EPOLL_CTL_ADD, fd, EPOLLIN, new Connection{fd, {}, {}});
        }
    }
    // Answers the messages of one read; returns whether the connection continues. Replies are joined in `input` or `out`, in
    // order: an in-place reply has the length of its message.
    template <class Function>
    bool answer(Connection& c, Function& function, Account& account) {
        const size_t kept = c.rest.size();
        memcpy(input.data(), c.rest.data(), kept);
        const ssize_t got = read(c.fd, input.data() + kept, READ_BYTES);
        if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
        const size_t bytes = kept + size_t(got);
        uint8_t *at = input.data(), *room = out.data(), *replies = nullptr;
        size_t reply_bytes = 0;
        for (; at + frame <= input.data() + bytes; at += frame) {
            const Reply reply = function(at, frame, room);
            if (!reply.at) return false;  // the function does not accept this frame length
            if (reply.at == room) room += reply.bytes;
            if (!replies) replies = reply.at;
            reply_bytes += reply.bytes;
            account.messages++;
        }
        c.rest.assign(at, input.data() + bytes);
        if (!reply_bytes) return true;
        const ssize_t sent = write(c.fd, replies, reply_bytes);
        if (sent < 0 && errno != EAGAIN) return false;
        const size_t taken = sent > 0 ? size_t(sent) : 0;
        if (taken < reply_bytes) {
            c.unsent.assign(replies + taken, replies + reply_bytes);
            watch(EPOLL_CTL_MOD, c.fd, EPOLLOUT, &c);
        }
        return true;
    }
    bool send(Connection& c) {
        const ssize_t sent = write(c.fd, c.unsent.data(), c.unsent.size());
        if (sent < 0) return errno == EAGAIN || errno == EINTR;
        c.unsent.erase(c.unsent.begin(), c.unsent.begin() + sent);
        if (c.unsent.empty()) watch(EPOLL_CTL_MOD, c.fd, EPOLLIN, &c);
        return true;
    }

    const uint32_t frame;
    int listener, poll;
    std::vector<uint8_t> input, out;
};

template <class Function>
int serve_tcp(const sockaddr_in& address, uint32_t frame, bool blocking, Function function) {
    TcpServer server(address, frame);
    std::vector<Account> accounts(1);
    Turns turns(accounts[0]);
    while (going()) {
        const bool worked = server.turn(blocking ? 100 : 0, function, accounts[0], turns);
        turns.end(worked);
    }
    return report(accounts);
}

#endif
