// pages: an HTTP server that has one page. The kernel accepts connections, reads requests and writes the head of each answer; the file goes from the
// page cache to the connection without it.
#include <serval/kernel_transfers.h>

SERVAL_SOCKET_KERNEL(pages) (serval::Block& block, serval::Mqueue& q, serval::Sockets& sockets) {
    SERVAL_SHARED uint8_t request[512];
    SERVAL_SHARED uint8_t head[32];
    const char text[] = "HTTP/1.0 200 OK\r\n\r\n";
    for (unsigned i = block.rank(); i < sizeof text - 1; i += block.size()) head[i] = static_cast<uint8_t>(text[i]);
    serval::Transfers disk(q.backend(0));
    serval::Listener in = sockets.listen(0);
    while (serval::Socket s = in.accept(block)) {
        uint64_t got = 0;
        bool is_whole = false;
        // Until the empty line behind the request.
        while (!is_whole && got < sizeof request) {
            const serval::Io io = s.recv_until(block, request + got, sizeof request - got, block.now_ns() + 5000000000);
            if (!io) break;
            got += io.bytes;
            for (uint64_t i = 3; i < got; i++)
                is_whole |= request[i - 3] == '\r' && request[i - 2] == '\n' && request[i - 1] == '\r' && request[i] == '\n';
        }
        if (is_whole && s.send_all(block, head, sizeof text - 1) == serval::OK)
            disk.run(block, disk.send_file(0, 0, serval::TransferCommand::ALL, s));
        s.close(block);
    }
}
