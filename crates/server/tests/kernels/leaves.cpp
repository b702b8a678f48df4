// leaves: echoes one connection after the other, and returns as soon as one ends because the service drains.
#include <serval/sockets.h>

SERVAL_SOCKET_KERNEL(leaves) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
    SERVAL_SHARED uint8_t bytes[64];
    serval::Listener in = sockets.listen(0);
    while (serval::Socket s = in.accept(block)) {
        for (;;) {
            const serval::Io io = s.recv(block, bytes, sizeof bytes);
            if (io.status == serval::DRAINING) return;
            if (!io || s.send_all(block, bytes, io.bytes) != serval::OK) break;
        }
        s.close(block);
    }
}
