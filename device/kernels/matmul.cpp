// matmul: a server that multiplies matrices over stream sockets (GPUnet, OSDI 2014, section 6).
//
// On the wire, little endian; a connection carries any number of requests, one after the other:
//     request   u32 n, in [1, 512]; matrix A: n*n float32 by rows; matrix B: n*n float32 by rows
//     answer    C = A B: n*n float32 by rows
// A request with another n ends the connection. So does one that is not complete, or whose answer is not taken, five seconds after its start.
//
// A block works on one request at a time, for up to 16 connections. Each product is a sum in the order of the index, so that answers do not depend on the
// number of threads. An answer leaves in parts: the engine sends rows while the block computes the next ones.
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
// Requests after which a block with a connection looks for new ones.
constexpr unsigned MATMUL_TURNS = 16;

#if SERVAL_CUDA
// A, B and C of each block.
constexpr unsigned MATMUL_BLOCKS = 64;
__device__ __align__(16) float matmul_memory[MATMUL_BLOCKS][3][MATMUL_MAX * MATMUL_MAX];

// A tile of C has this many rows and columns; it is the sum of products of slabs of A and B, of this many columns and rows. A worker computes
// 8 rows and 4 columns of it in registers.
constexpr unsigned MATMUL_ROWS = 64, MATMUL_COLUMNS = 128, MATMUL_SLAB = 16;
constexpr unsigned MATMUL_WORKER_ROWS = 8, MATMUL_WORKER_COLUMNS = 4;
constexpr unsigned MATMUL_WORKERS = MATMUL_ROWS / MATMUL_WORKER_ROWS * (MATMUL_COLUMNS / MATMUL_WORKER_COLUMNS);

// Slabs of A and B. Rows are apart so that the loads of a warp use all banks.
struct MatmulSlabs {
    float a[MATMUL_ROWS][MATMUL_SLAB + 4];
    float b[MATMUL_SLAB][MATMUL_COLUMNS + 4];
};

// Copies 4 or 16 bytes to shared memory without a register; zeros if `is_there` is false.
template <unsigned BYTES>
inline SERVAL_DEVICE void matmul_fetch(float* to, const float* from, bool is_there) {
    const uint32_t bytes = is_there ? BYTES : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" : : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(bytes) : "memory");
}

// Starts to fetch the rows [row, row + ROWS) and columns [column, column + COLUMNS) of a matrix, with zeros beyond its end.
template <unsigned ROWS, unsigned COLUMNS>
inline SERVAL_DEVICE void matmul_fetch_part(serval::Block& block, float (&to)[ROWS][COLUMNS + 4], const float* from, unsigned n, unsigned row, unsigned column) {
    if (n % 4 == 0) {
        for (unsigned i = block.rank(); i < ROWS * COLUMNS / 4; i += block.size()) {
            const unsigned r = i / (COLUMNS / 4), s = i % (COLUMNS / 4) * 4;
            const bool is_there = row + r < n && column + s < n;
            matmul_fetch<16>(&to[r][s], is_there ? from + (row + r) * n + column + s : from, is_there);
        }
    } else {
        for (unsigned i = block.rank(); i < ROWS * COLUMNS; i += block.size()) {
            const unsigned r = i / COLUMNS, s = i % COLUMNS;
            const bool is_there = row + r < n && column + s < n;
            matmul_fetch<4>(&to[r][s], is_there ? from + (row + r) * n + column + s : from, is_there);
        }
    }
}

// Starts to fetch the slabs at `k` for the tile at `row` and `column`.
inline SERVAL_DEVICE void matmul_fetch_slabs(serval::Block& block, MatmulSlabs& slabs, const float* a, const float* b, unsigned n, unsigned row, unsigned column,
                                             unsigned k) {
    matmul_fetch_part<MATMUL_ROWS, MATMUL_SLAB>(block, slabs.a, a, n, row, k);
    matmul_fetch_part<MATMUL_SLAB, MATMUL_COLUMNS>(block, slabs.b, b, n, k, column);
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// Adds the product of two slabs to a worker's sums: rows y, y + 2 and so on, columns from x on.
inline SERVAL_DEVICE void matmul_slabs(const MatmulSlabs& slabs, unsigned y, unsigned x, float (&sum)[MATMUL_WORKER_ROWS][MATMUL_WORKER_COLUMNS]) {
#pragma unroll
    for (unsigned k = 0; k < MATMUL_SLAB; k += 4) {
        float4 left[MATMUL_WORKER_ROWS], right[4];
#pragma unroll
        for (unsigned i = 0; i < 4; i++) right[i] = *reinterpret_cast<const float4*>(&slabs.b[k + i][x]);
#pragma unroll
        for (unsigned r = 0; r < MATMUL_WORKER_ROWS; r++) left[r] = *reinterpret_cast<const float4*>(&slabs.a[y + 2 * r][k]);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
#pragma unroll
            for (unsigned r = 0; r < MATMUL_WORKER_ROWS; r++) {
                const float factor = i == 0 ? left[r].x : i == 1 ? left[r].y : i == 2 ? left[r].z : left[r].w;
                sum[r][0] = fmaf(factor, right[i].x, sum[r][0]);
                sum[r][1] = fmaf(factor, right[i].y, sum[r][1]);
                sum[r][2] = fmaf(factor, right[i].z, sum[r][2]);
                sum[r][3] = fmaf(factor, right[i].w, sum[r][3]);
            }
        }
    }
}

// The tile of C at `row` and `column`, by all threads of the block. One slab is fetched while the one before is multiplied.
inline SERVAL_DEVICE void matmul_tile(serval::Block& block, const float* a, const float* b, float* c, unsigned n, unsigned row, unsigned column) {
    __shared__ MatmulSlabs slabs[2];
    // Blocks of fewer threads than workers compute a part of the tile after the other.
    for (unsigned first = 0; first < MATMUL_WORKERS; first += block.size()) {
        // A warp has 16 rows and 64 columns; a worker every second of these rows, so that the two rows of a load are in different banks.
        const unsigned worker = first + block.rank(), warp = worker / 32, lane = worker % 32;
        const unsigned y = warp / 2 * (2 * MATMUL_WORKER_ROWS) + lane / 16, x = (warp % 2 * 16 + lane % 16) * MATMUL_WORKER_COLUMNS;
        const bool works = worker < MATMUL_WORKERS;
        float sum[MATMUL_WORKER_ROWS][MATMUL_WORKER_COLUMNS] = {};
        block.sync();
        matmul_fetch_slabs(block, slabs[0], a, b, n, row, column, 0);
        for (unsigned k = 0, turn = 0; k < n; k += MATMUL_SLAB, turn ^= 1) {
            asm volatile("cp.async.wait_all;" : : : "memory");
            block.sync();
            if (k + MATMUL_SLAB < n) matmul_fetch_slabs(block, slabs[turn ^ 1], a, b, n, row, column, k + MATMUL_SLAB);
            if (works) matmul_slabs(slabs[turn], y, x, sum);
        }
        if (!works) continue;
#pragma unroll
        for (unsigned r = 0; r < MATMUL_WORKER_ROWS; r++) {
            const unsigned at = row + y + 2 * r;
            if (at >= n || column + x >= n) continue;
            float* const to = c + at * n + column + x;
            if (n % 4 == 0) {
                *reinterpret_cast<float4*>(to) = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
            } else {
#pragma unroll
                for (unsigned s = 0; s < MATMUL_WORKER_COLUMNS; s++)
                    if (column + x + s < n) to[s] = sum[r][s];
            }
        }
    }
}
#else
constexpr unsigned MATMUL_SLAB = 32;
#endif

// Rows of C that are computed and sent at a time.
inline SERVAL_DEVICE unsigned matmul_part(unsigned n) {
#if SERVAL_CUDA
    // About 128 KiB: a part costs the engine a write.
    constexpr unsigned NUMBERS = 32768;
    const unsigned tiles = NUMBERS / (n * MATMUL_ROWS);
    return (tiles ? tiles : 1) * MATMUL_ROWS;
#else
    return n;
#endif
}

// The rows [row, end) of C = A B, by all threads of the block.
inline SERVAL_DEVICE void multiply(serval::Block& block, const float* a, const float* b, float* c, unsigned n, unsigned row, unsigned end) {
#if SERVAL_CUDA
    for (; row < end; row += MATMUL_ROWS)
        for (unsigned column = 0; column < n; column += MATMUL_COLUMNS) matmul_tile(block, a, b, c, n, row, column);
    block.sync();
#else
    (void)block;
    for (unsigned i = row * n; i < end * n; i++) c[i] = 0.0f;
    for (unsigned k0 = 0; k0 < n; k0 += MATMUL_SLAB) {
        const unsigned k1 = k0 + MATMUL_SLAB < n ? k0 + MATMUL_SLAB : n;
        for (unsigned i = row; i < end; i++) {
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
    const unsigned part = matmul_part(size);
    for (unsigned row = 0; row < size; row += part) {
        const unsigned end = row + part < size ? row + part : size;
        multiply(block, a, b, c, size, row, end);
        if (s.send_all(block, c + static_cast<size_t>(row) * size, uint64_t{4} * (end - row) * size, deadline) != serval::OK) return false;
    }
    return true;
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
    bool looks = true;
    for (unsigned turns = 1;; turns++) {
        // Looking for connections is a trip over the bus, so it is not part of each turn. Without a connection it waits for one.
        for (looks = looks || turns % MATMUL_TURNS == 0; looks && count < MATMUL_CONNECTIONS;) {
            serval::Socket next = count ? in.try_accept(block) : in.accept(block);
            looks = static_cast<bool>(next);
            if (next) open[count++] = next;
        }
        if (count == 0) break;
        const int ready = sockets.poll(block, open, count);
        if (ready < 0) break;
        looks = static_cast<unsigned>(ready) == count;  // a connection waits
        if (looks) continue;
        if (serve(block, open[ready], memory, &n)) continue;
        open[ready].close(block);
        open[ready] = open[--count];
        open[count] = serval::Socket();
        looks = true;
    }
#if !SERVAL_CUDA
    std::free(memory);
#endif
}
