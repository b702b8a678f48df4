// stream_echo: accepts connections at the service's first socket, and sends back every byte. A block serves as many connections at a time as
// it has sockets, up to 16. When the peer ends its direction, the connection closes after the last byte. A peer that does not take its bytes
// makes the others wait, for at most five seconds: then its connection is closed.
#include <serval/sockets.h>

SERVAL_SOCKET_KERNEL(stream_echo) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
    constexpr unsigned CONNECTIONS = 16;
    constexpr unsigned BYTES = 16384;
    constexpr unsigned TURNS = 16;  // receives after which a block with a connection looks for new ones
    constexpr uint64_t TAKE_NS = 5000000000u;
    SERVAL_SHARED unsigned char bytes[BYTES];
    serval::Listener in = sockets.listen(0);
    serval::Socket open[CONNECTIONS];
    unsigned count = 0;
    bool looks = true;
    for (unsigned turns = 1;; turns++) {
        // Looking for connections is a trip over the bus, so it is not part of each turn. Without a connection it waits for one.
        for (looks = looks || turns % TURNS == 0; looks && count < CONNECTIONS;) {
            serval::Socket next = count ? in.try_accept(block) : in.accept(block);
            looks = static_cast<bool>(next);
            if (next) open[count++] = next;
        }
        if (count == 0) break;
        const int ready = sockets.poll(block, open, count);
        if (ready < 0) break;
        looks = static_cast<unsigned>(ready) == count;  // a connection waits
        if (looks) continue;
        serval::Socket& s = open[ready];
        const serval::Io io = s.try_recv(block, bytes, BYTES);
        if (io ? s.send_all(block, bytes, io.bytes, block.now_ns() + TAKE_NS) == serval::OK : io.status == serval::AGAIN) continue;
        s.close(block);
        s = open[--count];
        open[count] = serval::Socket();
        looks = true;
    }
}
