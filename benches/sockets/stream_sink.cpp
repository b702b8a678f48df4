// stream_sink: receives up to 1 MiB at a time until the peer's end, then sends how many bytes that were (u64 little endian). 256 bytes of each receive, the first
// and the last among them, are compared with what benches/sockets/peer.c sends; if one differs, the count is 2^64 - 1.
#include <serval/sockets.h>

#if SERVAL_CUDA
constexpr unsigned SINK_BLOCKS = 64;
__device__ __align__(128) unsigned char sink_memory[SINK_BLOCKS][1 << 20];
#else
#include <cstdlib>
#endif

SERVAL_SOCKET_KERNEL(stream_sink) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
    SERVAL_SHARED uint64_t count[1];
    SERVAL_SHARED bool is_wrong;
    constexpr unsigned SAMPLES = 256;
    constexpr uint64_t BYTES = 1 << 20;
#if SERVAL_CUDA
    if (block.index() >= SINK_BLOCKS) return;
    unsigned char* const bytes = sink_memory[block.index()];
#else
    unsigned char* const bytes = static_cast<unsigned char*>(std::malloc(BYTES));
#endif
    serval::Listener in = sockets.listen(0);
    while (serval::Socket s = in.accept(block)) {
        uint64_t sum = 0;
        if (block.rank() == 0) is_wrong = false;
        block.sync();
        while (const serval::Io io = s.recv(block, bytes, BYTES)) {
            for (unsigned i = block.rank(); i < SAMPLES; i += block.size()) {
                const uint64_t at = i * (io.bytes - 1) / (SAMPLES - 1), position = (sum + at) % BYTES;
                if (bytes[at] != static_cast<unsigned char>(position * 7 + (position >> 8))) is_wrong = true;
            }
            sum += io.bytes;
        }
        block.sync();
        if (block.rank() == 0) count[0] = is_wrong ? ~uint64_t{0} : sum;
        s.send_all(block, count, sizeof(uint64_t));
        s.close(block);
    }
#if !SERVAL_CUDA
    std::free(bytes);
#endif
}
