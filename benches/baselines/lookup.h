// One connection to memcached for looking up pictures, several at a time.
//
// Queries are collected until `flush`, which sends them with one write: as `get` commands of up to `keys` keys each (memcached
// answers the keys of a command in order, omits missing ones and ends with END). A connection that fails, or
// has not answered within the time-out, is closed: its queries are answered UNAVAILABLE. It is reopened, at
// first after 10 ms, then with a back-off of up to 1 s.
#ifndef SERVAL_BASELINES_LOOKUP_H
#define SERVAL_BASELINES_LOOKUP_H

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include "pictures.h"
#include "udp.h"

using serval_faces::LABEL_BYTES;
using serval_faces::PICTURE_BYTES;

struct Found {
    enum What : uint32_t { VALUE, MISS, UNAVAILABLE } what;
    const uint8_t* picture;
};

constexpr unsigned KEY_BYTES = 5 + 2 * LABEL_BYTES;  // face: and the label in hexadecimal
constexpr unsigned QUESTIONS_MAX = 4096;             // in flight on one connection

class Lookup {
  public:
    Lookup(const sockaddr_in& address, uint64_t timeout_ns, unsigned keys)
        : address(address), timeout_ns(timeout_ns), keys(keys), questions(QUESTIONS_MAX), input(1 << 18) {}
    ~Lookup() {
        if (fd >= 0) close(fd);
    }
    Lookup(const Lookup&) = delete;

    uint32_t pending() const { return asked - answered; }
    int descriptor() const { return fd; }
    bool unsent() const { return written < output.size(); }

    // Queries a label's picture; false: there is no connection, or too many queries are in flight.
    bool ask(uint32_t id, const uint8_t* label, uint64_t now) {
        if (pending() == QUESTIONS_MAX || !connected(now)) return false;
        Question& question = questions[asked++ % QUESTIONS_MAX];
        question.id = id;
        question.asked_ns = now;
        question.last = true;
        memcpy(question.key, "face:", 5);
        for (unsigned i = 0; i < 2 * LABEL_BYTES; i++)
            question.key[5 + i] = "0123456789abcdef"[(i % 2 ? label[i / 2] : label[i / 2] >> 4) & 15];
        if (in_command == 0)
            output += "get ";
        else {
            questions[(asked - 2) % QUESTIONS_MAX].last = false;
            output += ' ';
        }
        output.append(question.key, KEY_BYTES);
        if (++in_command == keys) end_command();
        return true;
    }
    // Sends the collected queries.
    template <class Answer>
    void flush(Answer answer) {
        if (in_command) end_command();
        while (unsent()) {
            const ssize_t sent = send(fd, output.data() + written, output.size() - written, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0 && errno == EAGAIN) return;
            if (sent < 0) return give_up(answer);
            written += size_t(sent);
        }
        output.clear();
        written = 0;
    }
    // Reads once, waiting if `wait`, and calls `answer(id, found)` for every answered query. Returns whether
    // anything was read.
    template <class Answer>
    bool receive(bool wait, Answer answer) {
        const ssize_t got = recv(fd, input.data() + filled, input.size() - filled, wait ? 0 : MSG_DONTWAIT);
        if (got < 0 && (errno == EINTR || (errno == EAGAIN && !wait))) return false;
        if (got <= 0) {
            give_up(answer);
            return true;
        }
        filled += size_t(got);
        back_off_ns = FIRST_BACK_OFF_NS;
        if (!parse(answer)) give_up(answer);
        return true;
    }
    // Closes the connection if an answer is overdue.
    template <class Answer>
    void expire(uint64_t now, Answer answer) {
        if (pending() && now - questions[answered % QUESTIONS_MAX].asked_ns > timeout_ns) give_up(answer);
    }

  private:
    static constexpr size_t VALUE_BYTES = 6 + KEY_BYTES;
    static constexpr uint64_t FIRST_BACK_OFF_NS = 10'000'000, LAST_BACK_OFF_NS = 1'000'000'000;
    struct Question {
        uint64_t asked_ns;
        uint32_t id;
        bool last;  // of its command: END follows
        char key[KEY_BYTES];
    };

    void end_command() {
        output += "\r\n";
        in_command = 0;
    }
    bool connected(uint64_t now) {
        if (fd >= 0) return true;
        if (now < retry_ns) return false;
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) fail("open a socket");
        const long ms = std::max<long>(1, long(timeout_ns / 1'000'000));
        int error = 0;
        socklen_t length = sizeof error;
        pollfd opening = {fd, POLLOUT, 0};
        const bool up = (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
                         (errno == EINPROGRESS && ::poll(&opening, 1, int(ms)) == 1 &&
                          getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0));
        if (!up) {
            close_and_wait(now);
            return false;
        }
        if (fcntl(fd, F_SETFL, 0)) fail("make a socket wait");
        set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "set TCP_NODELAY");
        limit_waiting(fd, ms);
        return true;
    }
    void close_and_wait(uint64_t now) {
        close(fd);
        fd = -1;
        retry_ns = now + back_off_ns;
        back_off_ns = std::min(2 * back_off_ns, LAST_BACK_OFF_NS);
        output.clear();
        written = filled = in_command = 0;
        at_end = false;
    }
    template <class Answer>
    void give_up(Answer& answer) {
        while (pending()) answer(questions[answered++ % QUESTIONS_MAX].id, Found{Found::UNAVAILABLE, nullptr});
        close_and_wait(now_ns());
    }

    // Parses complete values and ENDs at the front of the input; false: not an answer to these queries.
    template <class Answer>
    bool parse(Answer& answer) {
        size_t at = 0;
        while (at < filled) {
            const char* text = reinterpret_cast<const char*>(input.data()) + at;
            const auto* line_end = static_cast<const char*>(memchr(text, '\n', std::min<size_t>(filled - at, 128)));
            if (!line_end) {
                if (filled - at >= 128) return false;
                break;
            }
            const size_t line = size_t(line_end - text) + 1;
            if (line == 5 && !memcmp(text, "END\r\n", 5)) {
                if (!at_end && !pending()) return false;
                while (!at_end) settle({Found::MISS, nullptr}, answer);
                at_end = false;
                at += line;
                continue;
            }
            if (at_end || !pending() || line < VALUE_BYTES + 5 || memcmp(text, "VALUE ", 6)) return false;
            unsigned bytes = PICTURE_BYTES;
            if ((line != VALUE_BYTES + 9 || memcmp(text + VALUE_BYTES, " 0 1024\r\n", 9)) &&
                (std::sscanf(text + VALUE_BYTES, "%*u %u", &bytes) != 1 || bytes > input.size() / 2))
                return false;
            if (filled - at < line + bytes + 2) break;
            // The earlier keys of the command are not in the database.
            while (memcmp(questions[answered % QUESTIONS_MAX].key, text + 6, KEY_BYTES)) {
                settle({Found::MISS, nullptr}, answer);
                if (at_end) return false;
            }
            settle({bytes == PICTURE_BYTES ? Found::VALUE : Found::UNAVAILABLE, input.data() + at + line}, answer);
            at += line + bytes + 2;
        }
        memmove(input.data(), input.data() + at, filled - at);
        filled -= at;
        return true;
    }
    template <class Answer>
    void settle(const Found& found, Answer& answer) {
        const Question& question = questions[answered++ % QUESTIONS_MAX];
        at_end = question.last;
        answer(question.id, found);
    }

    const sockaddr_in address;
    const uint64_t timeout_ns;
    const unsigned keys;
    int fd = -1;
    bool at_end = false;  // the last key of a command has its answer, END follows
    uint64_t retry_ns = 0, back_off_ns = FIRST_BACK_OFF_NS;
    uint32_t asked = 0, answered = 0, in_command = 0;
    std::vector<Question> questions;
    std::string output;
    size_t written = 0, filled = 0;
    std::vector<uint8_t> input;
};

#endif
