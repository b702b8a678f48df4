// E: one thread, batched socket calls, the function called in place: the minimum of a UDP server, without any hand-over. On
// several cores: one such thread each, which share only the port.
//
// A turn: one recvmmsg, the function on every message in place, one sendmmsg. --gso receives batches of datagrams (UDP_GRO) and
// sends the replies to one client in batches (UDP_SEGMENT). --tcp serves TCP instead: one epoll call, one read and one write per
// ready connection, messages of a fixed size.
#include <thread>

#include "functions.h"
#include "health.h"
#include "tcp.h"
#include "udp.h"

namespace {

const char HELP[] =
    "usage: echo [FLAGS]   a UDP (or TCP) server that calls a function in place\n"
    "  --handler F        echo, lenet, scale, sockperf or spin:MICROSECONDS (echo)\n"
    "  --listen A:P       address and port; port 0 takes a free one (127.0.0.1:0)\n"
    "  --core N,N,...     a thread with a socket of its own on each of these cores (one thread, not pinned); TCP has one\n"
    "  --batch N          datagrams a call, 1..1024 (64)\n"
    "  --max-bytes N      longest message, 1..65507 (2048)\n"
    "  --gso              GRO receive, GSO send\n"
    "  --blocking         sleep while idle instead of spinning\n"
    "  --tcp              serve TCP; --frame N is the length of a message (what the function wants)\n"
    "  --health           measure this server with 64 messages in flight and report whether the machine is fit for measuring\n";

struct Options {
    sockaddr_in address;
    unsigned batch;
    uint32_t bytes_max;
    bool gso, blocking;
    std::vector<int> cores;
};

// One thread.
template <class Function>
void serve_socket(int fd, const Options& options, Function& function, Account& account) {
    Inbox inbox(options.batch, options.bytes_max, options.gso);
    Outbox outbox(fd, options.batch, options.gso);
    // Room for a reply to every message of one call; a batch has at most 65507 messages of one byte, and the only
    // function that uses the room refuses messages shorter than 784.
    std::vector<uint8_t> out(size_t(options.batch) * (options.gso ? 65536 / serval_lenet::INPUT_BYTES + 1 : 1) * OUT_BYTES);
    Turns turns(account);
    while (going()) {
        const unsigned count = inbox.receive(fd, options.blocking ? MSG_WAITFORONE : MSG_DONTWAIT);
        if (options.blocking) turns.woke();
        uint8_t* room = out.data();
        for (unsigned i = 0; i < count; i++)
            inbox.each(i, [&](const sockaddr_in& peer, uint8_t* message, uint32_t bytes) {
                const Reply reply = function(message, bytes, room);
                if (reply.at == room) room += reply.bytes;
                if (reply.at) outbox.add(peer, reply.at, reply.bytes);
            });
        account.messages += outbox.flush();
        turns.end(count > 0);
    }
}

// `make` creates a function object for each thread.
template <class Make>
int serve_udp(const Options& options, Make make) {
    const size_t count = std::max<size_t>(1, options.cores.size());
    sockaddr_in address = options.address;
    const std::vector<int> sockets = udp_servers(address, options.gso, count);
    std::vector<Account> accounts(count);
    std::vector<std::thread> others;
    const auto serve = [&](size_t i) {
        if (!options.cores.empty()) pin(options.cores[i]);
        auto function = make();
        serve_socket(sockets[i], options, function, accounts[i]);
    };
    ready("echo", url("udp", address));
    for (size_t i = 1; i < count; i++) others.emplace_back(serve, i);
    serve(0);
    for (auto& other : others) other.join();
    return report(accounts);
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const std::string handler = flags.text("--handler", "echo");
    Options options;
    options.address = address_of("--listen", flags.text("--listen", "127.0.0.1:0"));
    options.batch = unsigned(flags.number("--batch", 64, 1, 1024));
    options.bytes_max = uint32_t(flags.number("--max-bytes", 2048, 1, DATAGRAM_BYTES_MAX));
    options.gso = flags.on("--gso");
    options.blocking = flags.on("--blocking");
    options.cores = flags.cores("--core");
    const bool tcp = flags.on("--tcp"), health = flags.on("--health");
    const uint32_t frame = uint32_t(flags.number("--frame", handler == "lenet" ? serval_lenet::INPUT_BYTES : 64, 1, FRAME_BYTES_MAX));
    flags.end();
    if (tcp && options.cores.size() > 1) misused("--tcp runs on one core");
    if (tcp && options.gso) misused("--gso is for UDP");
    if (tcp && handler == "sockperf") misused("--tcp needs messages of a fixed size; sockperf's messages contain their size");
    if (health) options.cores.clear();  // it chooses them
    if (health) return judge_health([&] { return serve_udp(options, [] { return Echo{}; }); });
    stop_on_signals();
    return with_function(handler, [&](auto make) {
        if (!tcp) return serve_udp(options, make);
        if (!options.cores.empty()) pin(options.cores[0]);
        return serve_tcp(options.address, frame, options.blocking, make());
    });
}
