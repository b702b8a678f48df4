// stream_sink: receives up to 1 MiB at a time until the peer's end, then sends how many bytes that were (u64 little endian).
#include <serval/sockets.h>

#if SERVAL_CUDA
constexpr unsigned SINK_BLOCKS = 64;
__device__ unsigned char sink_memory[SINK_BLOCKS][1 << 20];
#else
#include <cstdlib>
#endif

SERVAL_SOCKET_KERNEL(stream_sink) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
    SERVAL_SHARED uint64_t count[1];
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
        while (const serval::Io io = s.recv(block, bytes, BYTES)) sum += io.bytes;
        if (block.rank() == 0) count[0] = sum;
        s.send_all(block, count, sizeof(uint64_t));
        s.close(block);
    }
#if !SERVAL_CUDA
    std::free(bytes);
#endif
}
