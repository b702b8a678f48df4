// A TCP stream through a proxy: how many bytes a second a command passes on from one connection to a server.
//
// It starts the command on the server's core, with {upstream} replaced by the address of a server of its own that reads and discards, connects to the first
// tcp:// address that the command prints, and sends as fast as it can. What arrives is compared with what was sent, in parts.
#include <arpa/inet.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

const char USAGE[] = "usage: stream SERVER_CORE CLIENT_CORE[,CLIENT_CORE...] SECONDS COMMAND...\n";
constexpr size_t PERIOD = 4 << 20, PART = 256 << 10, COMPARED = 64;

pid_t child = -1;

[[noreturn]] void die(const char* what) {
    fprintf(stderr, "stream: %s: %s\n", what, strerror(errno));
    if (child > 0) kill(child, SIGKILL);
    exit(1);
}

void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    if (sched_setaffinity(0, sizeof cores, &cores)) die("sched_setaffinity");
}

sockaddr_in loopback(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

int new_socket() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) die("socket");
    return fd;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    return at == text.npos ? text : text.replace(at, from.size(), to);
}

// Starts the command; its standard output.
FILE* start(char** command, int core, const std::string& upstream) {
    std::vector<std::string> words;
    for (; *command; command++) words.push_back(replaced(*command, "{upstream}", upstream));
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    int out[2];
    if (pipe(out)) die("pipe");
    child = fork();
    if (child < 0) die("fork");
    if (child == 0) {
        pin(core);
        dup2(out[1], STDOUT_FILENO);
        close(out[0]);
        close(out[1]);
        execvp(pointers[0], pointers.data());
        die(pointers[0]);
    }
    close(out[1]);
    return fdopen(out[0], "r");
}

uint16_t port_of(FILE* out) {
    char line[4096];
    while (fgets(line, sizeof line, out)) {
        const char* url = strstr(line, "tcp://127.0.0.1:");
        if (url) return uint16_t(atoi(url + strlen("tcp://127.0.0.1:")));
    }
    errno = 0;
    die("the command ended before it printed a tcp:// address");
}

// Bytes in which no word of eight is like another one near it.
std::vector<uint8_t> content() {
    std::vector<uint8_t> bytes(PERIOD);
    uint64_t state = 0x9e3779b97f4a7c15;
    for (size_t at = 0; at < PERIOD; at += 8) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        memcpy(&bytes[at], &state, 8);
    }
    return bytes;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) return fputs(USAGE, stderr), 2;
    signal(SIGPIPE, SIG_IGN);
    const int server_core = atoi(argv[1]), sender_core = atoi(argv[2]);
    const char* comma = strchr(argv[2], ',');
    const int sink_core = comma ? atoi(comma + 1) : sender_core;
    const double seconds = atof(argv[3]);
    if (!(seconds > 0)) return fputs(USAGE, stderr), 2;
    const int listener = new_socket();
    sockaddr_in address = loopback(0);
    socklen_t length = sizeof address;
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), length)) die("bind");
    if (listen(listener, 8)) die("listen");
    if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length)) die("getsockname");
    FILE* out = start(argv + 4, server_core, "127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
    address = loopback(port_of(out));
    const int client = new_socket();
    if (connect(client, reinterpret_cast<sockaddr*>(&address), sizeof address)) die("connect");
    const int server = accept(listener, nullptr, nullptr);
    if (server < 0) die("accept");

    const std::vector<uint8_t> sent = content();
    std::atomic<uint64_t> received{0};
    std::atomic<bool> ends{false}, wrong{false};
    std::thread sender([&] {
        pin(sender_core);
        for (size_t at = 0; !ends;) {
            const ssize_t count = send(client, &sent[at], std::min(PART, PERIOD - at), MSG_NOSIGNAL);
            if (count < 0) break;
            at = (at + size_t(count)) % PERIOD;
        }
        shutdown(client, SHUT_WR);
    });
    std::thread sink([&] {
        pin(sink_core);
        std::vector<uint8_t> got(PART);
        uint64_t total = 0;
        for (;;) {
            const ssize_t count = recv(server, got.data(), PART, 0);
            if (count <= 0) break;
            const size_t at = total % PERIOD;
            if (memcmp(got.data(), &sent[at], std::min({COMPARED, size_t(count), PERIOD - at}))) wrong = true;
            total += uint64_t(count);
            received.store(total, std::memory_order_relaxed);
        }
        shutdown(server, SHUT_WR);
    });
    using Clock = std::chrono::steady_clock;
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds / 4));
    const uint64_t before = received;
    const auto begin = Clock::now();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    const uint64_t count = received - before;
    const double took = std::chrono::duration<double>(Clock::now() - begin).count();
    ends = true;
    sender.join();
    sink.join();
    kill(child, SIGTERM);
    int status = 0;
    waitpid(child, &status, 0);
    errno = 0;
    if (wrong) die("other bytes arrived than were sent");
    if (count == 0) die("nothing arrived");
    printf("{\"bytes_per_s\":%.0f,\"seconds\":%.3f}\n", double(count) / took, took);
    return 0;
}
