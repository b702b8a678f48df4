// send_file: answers requests on connections with files, through transfers to those connections.
//
// A request is u32 file, u32 how, u64 offset, u64 bytes, u64 before. The answer is `before` bytes "B", the bytes of the file, 16 bytes "A" that the
// kernel has sent while the transfer ran, and u32 status, u32 0, u64 written. `how`: 1 from the memory, which begins with "memory"; 2 to a socket that
// was closed before; 4 close without the last 16 bytes; 8 reset at once.
#include <serval/kernel_transfers.h>

namespace {

struct Request {
    uint32_t file, how;
    uint64_t offset, bytes, before;
};
struct Ended {
    uint32_t status, zero;
    uint64_t written;
};

}  // namespace

SERVAL_SOCKET_KERNEL(send_file) (serval::Block& block, serval::Mqueue& q, serval::Sockets& sockets) {
    SERVAL_SHARED Request request;
    SERVAL_SHARED Ended ended;
    SERVAL_SHARED uint8_t text[512];
    serval::Transfers disk(q.backend(0));
    serval::Listener in = sockets.listen(0);
    serval::Socket old;
    for (unsigned i = block.rank(); i < 512; i += block.size()) text[i] = i < 256 ? 'B' : 'A';
    for (unsigned i = block.rank(); i < 6; i += block.size()) disk.memory()[i] = static_cast<uint8_t>("memory"[i]);
    block.sync();
    while (serval::Socket s = in.accept(block)) {
        while (s.recv_all(block, &request, sizeof request) == serval::OK) {
            const Request r = request;
            for (uint64_t left = r.before; left;) {
                const uint64_t count = left < 256 ? left : 256;
                if (s.send_all(block, text, count) != serval::OK) break;
                left -= count;
            }
            const serval::Socket& to = r.how & 2 ? old : s;
            const auto file = static_cast<uint16_t>(r.file);
            if (!disk.start(block, r.how & 1 ? disk.send_memory(r.offset, r.bytes, to) : disk.send_file(file, r.offset, r.bytes, to))) return;
            if (r.how & 8) s.reset(block);
            s.send_all(block, text + 256, 16);
            const auto done = disk.next(block);
            if (block.rank() == 0) ended = {done.status, 0, done.written};
            block.sync();
            if (r.how & 4) break;
            s.send_all(block, &ended, sizeof ended);
        }
        old = s;
        s.close(block);
    }
}
