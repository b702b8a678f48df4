// The baseline of examples/10_secure_multiply: a server that makes a call into the isolated process for each request.
//
// The process outside has the socket. For each datagram it writes the request to a socket pair and waits for the answer, as a server that enters
// an enclave for each request. The child has the key, reads it before it isolates itself (strict seccomp: read, write and exit), and runs
// the code of the example. An empty answer means that the request was refused.
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../examples/10_secure_multiply/sealed.h"
#include "../baselines/udp.h"

namespace {

const char HELP[] =
    "usage: secure_call --key FILE [FLAGS]   a UDP server that calls an isolated process for each request\n"
    "  --key FILE         the key, 64 hexadecimal digits\n"
    "  --listen A:P       address and port; port 0 takes a free one (127.0.0.1:0)\n"
    "  --cores N,N        the core of the server, and that of the isolated process (not pinned)\n"
    "  --spin             both processes poll instead of sleeping; needs a core each\n";

constexpr uint32_t REQUEST_BYTES_MAX = 64;

// The isolated process: answers until the other side closes.
[[noreturn]] void serve_inside(int fd, const std::string& key_file, bool spin) {
    static uint8_t key[sealed::KEY_BYTES];
    if (!sealed::read_key(key_file.c_str(), key)) {
        std::fprintf(stderr, "secure_call: no key of 64 hexadecimal digits in %s\n", key_file.c_str());
        _exit(1);
    }
    static sealed::Multiplier multiplier(key);
    uint8_t request[REQUEST_BYTES_MAX] = {}, answer[sealed::ANSWER_BYTES];
    // OpenSSL allocates what it needs with the first message: counter 0 of sender 0, which no client uses.
    constexpr uint32_t BYTES = sealed::NONCE_BYTES + sealed::NUMBER_BYTES + sealed::TAG_BYTES;
    uint8_t* text = request + sealed::NONCE_BYTES;
    const bool first = sealed::Cipher(key, true).run(request, text, sealed::NUMBER_BYTES, text, text + sealed::NUMBER_BYTES);
    explicit_bzero(key, sizeof key);
    const uint8_t started = first && multiplier.answer(request, BYTES, answer) == sealed::Outcome::ANSWERED ? 1 : 0;
    if (prctl(PR_SET_DUMPABLE, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) || write(fd, &started, 1) != 1) _exit(1);
    for (;;) {
        const ssize_t bytes = read(fd, request, sizeof request);
        if (bytes < 0 && spin && errno == EAGAIN) {
            relax();
            continue;
        }
        if (bytes <= 0) break;
        const bool answered = multiplier.answer(request, uint32_t(bytes), answer) == sealed::Outcome::ANSWERED;
        // A refused request is answered with one byte: it is no answer to a client.
        if (write(fd, answer, answered ? sizeof answer : 1) <= 0) break;
    }
    syscall(SYS_exit, 0);
    __builtin_unreachable();
}

// The call: whether there is an answer.
bool call(int fd, const uint8_t* request, uint32_t bytes, uint8_t* answer, bool spin) {
    if (write(fd, request, bytes) != ssize_t(bytes)) fail("call the isolated process");
    for (;;) {
        const ssize_t count = read(fd, answer, sealed::ANSWER_BYTES);
        if (count > 0) return count == sealed::ANSWER_BYTES;
        if (count == 0 || (errno != EAGAIN && errno != EINTR)) fail("the isolated process has ended");
        if (spin) relax();
    }
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const std::string key_file = flags.text("--key", "");
    sockaddr_in address = address_of("--listen", flags.text("--listen", "127.0.0.1:0"));
    const auto cores = flags.cores("--cores");
    const bool spin = flags.on("--spin");
    flags.end();
    if (key_file.empty()) misused("--key is missing");
    stop_on_signals();
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | (spin ? SOCK_NONBLOCK : 0), 0, ends)) fail("make a socket pair");
    const pid_t inside = fork();
    if (inside < 0) fail("start the isolated process");
    if (inside == 0) {
        close(ends[0]);
        // Ctrl-C reaches both; the server ends this process by closing its end.
        signal(SIGINT, SIG_IGN);
        signal(SIGTERM, SIG_IGN);
        if (!cores.empty()) pin(cores[cores.size() > 1 ? 1 : 0]);
        serve_inside(ends[1], key_file, spin);
    }
    close(ends[1]);
    if (!cores.empty()) pin(cores[0]);
    uint8_t answer[sealed::ANSWER_BYTES] = {};
    for (ssize_t count; (count = read(ends[0], answer, 1)) != 1 || answer[0] != 1;) {
        if (count >= 0 || (errno != EAGAIN && errno != EINTR)) {
            std::fputs("secure_call: the isolated process did not start\n", stderr);
            return 1;
        }
        relax();
    }
    const int fd = udp_server(address, false);
    ready("secure_call", url("udp", address));
    Inbox inbox(64, REQUEST_BYTES_MAX, false);
    Outbox outbox(fd, 64, false);
    std::vector<uint8_t> answers(64 * sealed::ANSWER_BYTES);
    std::vector<Account> accounts(1);
    Turns turns(accounts[0]);
    while (going()) {
        const unsigned count = inbox.receive(fd, spin ? MSG_DONTWAIT : MSG_WAITFORONE);
        if (!spin) turns.woke();
        uint8_t* room = answers.data();
        for (unsigned i = 0; i < count; i++)
            inbox.each(i, [&](const sockaddr_in& peer, const uint8_t* message, uint32_t bytes) {
                if (bytes == 0 || !call(ends[0], message, bytes, room, spin)) return;
                outbox.add(peer, room, sealed::ANSWER_BYTES);
                room += sealed::ANSWER_BYTES;
            });
        accounts[0].messages += outbox.flush();
        turns.end(count > 0);
    }
    close(ends[0]);
    waitpid(inside, nullptr, 0);
    return report(accounts);
}
