// matmul: a server that multiplies matrices over stream sockets (GPUnet, OSDI 2014, section 6).
//
// On the wire, little endian; a connection carries any number of requests, one after the other:
//     request   u32 n, in [1, 512]; matrix A: n*n float32 by rows; matrix B: n*n float32 by rows
//     answer    C = A B: n*n float32 by rows
// A request with another n ends the connection. So does one that is not complete, or whose answer is not taken, five seconds after its start.
//
// A block works on one request at a time, for up to 16 connections. Each product is a sum in the order of the index, so that answers do not depend on the
// number of threads.
#if defined(__CUDACC__) && !defined(SERVAL_KERNEL_H)
#define SERVAL_BLOCKS_MIN 2  // the sums of a tile need registers
#endif
#include <serval/sockets.h>

#if !SERVAL_CUDA
#include <cstdlib>
#endif

namespace {

constexpr unsigned MATMUL_MAX = 512;
constexpr unsigned MATMUL_CONNECTIONS = 16;
constexpr uint64_t MATMUL_NS = 5000000000u;
// Rows and columns of a tile of C, rows of a tile of B.
constexpr unsigned MATMUL_TILE = 32;

#if SERVAL_CUDA
// A, B and C of each block.
constexpr unsigned MATMUL_BLOCKS = 64;
__device__ float matmul_memory[MATMUL_BLOCKS][3][MATMUL_MAX * MATMUL_MAX];
#endif

// C = A B by all threads of the block.
inline SERVAL_DEVICE void multiply(serval::Block& block, const float* a, const float* b, float* c, unsigned n) {
#if SERVAL_CUDA
    // Each thread has four rows of one column of a tile: a float of B is used four times.
    constexpr unsigned T = MATMUL_TILE;
    __shared__ float of_a[T][T + 1], of_b[T][T + 1];
    const unsigned threads = block.size();
    for (unsigned row = 0; row < n; row += T) {
        for (unsigned column = 0; column < n; column += T) {
            for (unsigned first = 0; first < T * T / 4; first += threads) {
                // Tiles that more threads than a quarter of the elements share need one pass; fewer threads need several.
                const unsigned at = first + block.rank();
                const unsigned x = at % T, y = 4 * (at / T);
                float sum[4] = {0, 0, 0, 0};
                for (unsigned k = 0; k < n; k += T) {
                    block.sync();
                    for (unsigned i = block.rank(); i < T * T; i += threads) {
                        const unsigned r = i / T, s = i % T;
                        of_a[r][s] = row + r < n && k + s < n ? a[(row + r) * n + k + s] : 0.0f;
                        of_b[r][s] = k + r < n && column + s < n ? b[(k + r) * n + column + s] : 0.0f;
                    }
                    block.sync();
                    if (at < T * T / 4)
                        for (unsigned i = 0; i < T; i++)
                            for (unsigned j = 0; j < 4; j++) sum[j] = fmaf(of_a[y + j][i], of_b[i][x], sum[j]);
                }
                if (at < T * T / 4)
                    for (unsigned j = 0; j < 4; j++)
                        if (row + y + j < n && column + x < n) c[(row + y + j) * n + column + x] = sum[j];
            }
        }
    }
    block.sync();
#else
    (void)block;
    for (unsigned i = 0; i < n * n; i++) c[i] = 0.0f;
    for (unsigned k0 = 0; k0 < n; k0 += MATMUL_TILE) {
        const unsigned k1 = k0 + MATMUL_TILE < n ? k0 + MATMUL_TILE : n;
        for (unsigned i = 0; i < n; i++) {
            float* to = c + static_cast<size_t>(i) * n;
            for (unsigned k = k0; k < k1; k++) {
                const float factor = a[static_cast<size_t>(i) * n + k];
                const float* from = b + static_cast<size_t>(k) * n;
                for (unsigned j = 0; j < n; j++) to[j] += factor * from[j];
            }
        }
    }
#endif
}

// Serves one request; returns whether the connection goes on.
inline SERVAL_DEVICE bool serve(serval::Block& block, serval::Socket& s, float* const memory, uint32_t* n) {
    // Other connections wait meanwhile: a peer has no longer than this.
    const uint64_t deadline = block.now_ns() + MATMUL_NS;
    if (s.recv_all(block, n, 4, deadline) != serval::OK) return false;
    const uint32_t size = *n;
    if (size == 0 || size > MATMUL_MAX) return false;
    const uint64_t bytes = uint64_t{4} * size * size;
    float* const a = memory;
    float* const b = a + MATMUL_MAX * MATMUL_MAX;
    float* const c = b + MATMUL_MAX * MATMUL_MAX;
    if (s.recv_all(block, a, bytes, deadline) != serval::OK || s.recv_all(block, b, bytes, deadline) != serval::OK) return false;
    multiply(block, a, b, c, size);
    return s.send_all(block, c, bytes, deadline) == serval::OK;
}

}  // namespace

SERVAL_SOCKET_KERNEL(matmul) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
    SERVAL_SHARED uint32_t n;
#if SERVAL_CUDA
    if (block.index() >= MATMUL_BLOCKS) return;
    float* const memory = matmul_memory[block.index()][0];
#else
    float* const memory = static_cast<float*>(std::malloc(3 * sizeof(float) * MATMUL_MAX * MATMUL_MAX));
    if (!memory) return;
#endif
    serval::Listener in = sockets.listen(0);
    serval::Socket open[MATMUL_CONNECTIONS];
    unsigned count = 0;
    for (;;) {
        if (count < MATMUL_CONNECTIONS) {
            // Without a connection it waits for one.
            serval::Socket next = count ? in.try_accept(block) : in.accept(block);
            if (next) open[count++] = next;
        }
        if (count == 0) break;
        const int ready = sockets.poll(block, open, count);
        if (ready < 0) break;
        if (static_cast<unsigned>(ready) == count) continue;  // try_accept
        if (serve(block, open[ready], memory, &n)) continue;
        open[ready].close(block);
        open[ready] = open[--count];
        open[count] = serval::Socket();
    }
#if !SERVAL_CUDA
    std::free(memory);
#endif
}
