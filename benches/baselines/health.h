// Checks that this machine is fit for measuring: E on one core, a plain client on another, 64 messages in flight.
//
// On an idle 2-core machine of the kind the targets were set on, E answers 280 to 360 thousand messages of 64 bytes per second.
// A slower machine is busy, or of a different kind: a table measured on it is void.
#ifndef SERVAL_BASELINES_HEALTH_H
#define SERVAL_BASELINES_HEALTH_H

#include <sys/wait.h>
#include <unistd.h>

#include "udp.h"

constexpr double HEALTHY_RATE = 280'000;

// Keeps `WINDOW` messages in flight to a server; returns the rate of correct answers.
inline double closed_loop_rate(const sockaddr_in& server, double seconds) {
    constexpr unsigned WINDOW = 64, BYTES = 64;
    sockaddr_in any = {};
    any.sin_family = AF_INET;
    const int fd = bound_socket(SOCK_DGRAM, any);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&server), sizeof server)) fail("connect");
    uint8_t buffers[WINDOW][BYTES];
    iovec vectors[WINDOW];
    mmsghdr headers[WINDOW] = {};
    for (unsigned i = 0; i < WINDOW; i++) {
        memset(buffers[i], int(i + 1), BYTES);
        vectors[i] = {buffers[i], BYTES};
        headers[i].msg_hdr.msg_iov = &vectors[i];
        headers[i].msg_hdr.msg_iovlen = 1;
    }
    uint64_t right = 0, last_answer = now_ns();
    const uint64_t warm = last_answer + 500'000'000, end = warm + uint64_t(seconds * 1e9);
    unsigned to_send = WINDOW;
    for (uint64_t now = last_answer; now < end; now = now_ns()) {
        if (to_send && sendmmsg(fd, headers, to_send, 0) != int(to_send)) fail("send");
        const int got = recvmmsg(fd, headers, WINDOW, MSG_DONTWAIT, nullptr);
        to_send = got > 0 ? unsigned(got) : 0;
        for (unsigned i = 0; i < to_send; i++)
            if (now >= warm && headers[i].msg_len == BYTES && buffers[i][0] == buffers[i][BYTES - 1]) right++;
        if (to_send) last_answer = now;
        // A datagram was lost: refill the window.
        if (now - last_answer > 100'000'000) to_send = WINDOW, last_answer = now;
    }
    close(fd);
    return double(right) / seconds;
}

// Runs `serve` in a separate process and measures it. Prints one JSON object; returns 0 if the machine is fit, else 1.
template <class Serve>
int judge_health(Serve serve) {
    const auto cores = allowed_cores();
    if (cores.size() < 2) {
        std::fputs("--health needs two cores: one for the server, one for the client\n", stderr);
        return 1;
    }
    int channel[2];
    if (pipe(channel)) fail("make a pipe");
    std::fflush(stdout);
    const pid_t server = fork();
    if (server < 0) fail("start a process");
    if (server == 0) {
        dup2(channel[1], STDOUT_FILENO);
        close(channel[0]);
        close(channel[1]);
        stop_on_signals();
        pin(cores.front());
        std::exit(serve());
    }
    close(channel[1]);
    FILE* said = fdopen(channel[0], "r");
    char line[256];
    if (!said || !std::fgets(line, sizeof line, said) || !std::strstr(line, "udp://")) fail("read the server's ready line");
    std::string at = std::strstr(line, "udp://") + 6;
    at.resize(at.find('\n'));
    pin(cores.back());
    const double rate = closed_loop_rate(address_of("the server", at), 2);
    kill(server, SIGTERM);
    waitpid(server, nullptr, 0);
    const bool fit = rate >= HEALTHY_RATE;
    std::printf("{\"rate\":%.0f,\"least\":%.0f,\"fit\":%s}\n", rate, HEALTHY_RATE, fit ? "true" : "false");
    if (!fit) std::fprintf(stderr, "E answers %.0f k/s, expected at least %.0f: measurements on this machine are void\n", rate / 1e3, HEALTHY_RATE / 1e3);
    return fit ? 0 : 1;
}

#endif
