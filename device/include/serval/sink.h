// The sink: where a kernel writes a reply that is too long to send.
//
// The length of such a reply may be anything that 32 bits hold, and may come from a client, so that neither a fault nor memory of that
// length will do. The sink is a range of addresses longer than any length. All of it is one small piece of memory that is mapped again and
// again. Who writes there overwrites what was written before; nobody reads it, and nothing of it is sent.
#ifndef SERVAL_SINK_H
#define SERVAL_SINK_H

#include "abi.h"
#include "platform.h"

#if !SERVAL_CUDA
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace serval {
namespace detail {

// Bytes that a kernel may write past a length when it writes in units: of 16 bytes at most.
constexpr uint64_t SINK_UNIT_BYTES = 16;

// May a kernel write a reply of `len` bytes to the sink?
SERVAL_INLINE bool fits_sink(const serval_block_args& args, uint32_t len) {
    return args.sink != 0 && args.sink_bytes >= SINK_UNIT_BYTES && len <= args.sink_bytes - SINK_UNIT_BYTES;
}

#if !SERVAL_CUDA

// The physical memory of a sink, and its addresses: more than a length can say.
constexpr uint64_t SINK_PIECE_BYTES = uint64_t{16} << 20;
constexpr uint64_t SINK_BYTES = (uint64_t{1} << 32) + SINK_PIECE_BYTES;

// Maps the piece at all of a sink's addresses: the memory at `piece` once more, which mremap(2) does with an old size of 0, or the file.
inline bool fill_sink(void* at, void* piece, int file) {
    for (uint64_t offset = 0; offset < SINK_BYTES; offset += SINK_PIECE_BYTES) {
        void* const to = static_cast<uint8_t*>(at) + offset;
        void* const made = file < 0 ? mremap(piece, 0, SINK_PIECE_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to)
                                    : mmap(to, SINK_PIECE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
        if (made == MAP_FAILED) return false;
    }
    // A core file has no use for it.
    madvise(at, SINK_BYTES, MADV_DONTDUMP);
    return true;
}

// Maps a sink; null when the host kernel refuses, errno says why. The memory has no file, whose size may be limited (RLIMIT_FSIZE), except
// where an emulator of processors (qemu-user) does not map memory twice.
inline void* map_sink() {
    void* at = mmap(nullptr, SINK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    void* const piece = mmap(nullptr, SINK_PIECE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool done = piece != MAP_FAILED && fill_sink(at, piece, -1);
    if (piece != MAP_FAILED) munmap(piece, SINK_PIECE_BYTES);
    if (!done) {
        const int file = memfd_create("serval-sink", MFD_CLOEXEC);
        done = file >= 0 && ftruncate(file, SINK_PIECE_BYTES) == 0 && fill_sink(at, nullptr, file);
        const int why = errno;
        if (file >= 0) close(file);
        if (!done) munmap(at, SINK_BYTES);
        errno = why;
    }
    return done ? at : nullptr;
}

// The sink of this library, once it was needed. Hidden, and weak instead of inline: see `first_kernel`.
__attribute__((weak, visibility("hidden"))) void* host_sink = nullptr;

// The sink of this library, which stays; null when the host kernel refuses it, errno says why.
inline void* provide_host_sink() {
    void* sink = __atomic_load_n(&host_sink, __ATOMIC_ACQUIRE);
    if (sink) return sink;
    void* const made = map_sink();
    if (!made || __atomic_compare_exchange_n(&host_sink, &sink, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return made;
    munmap(made, SINK_BYTES);  // another thread was first
    return sink;
}

// Completes the arguments of a block whose runtime gave it no sink for every length.
inline bool provide_sink(serval_block_args& args) {
    if (fits_sink(args, ~uint32_t{0})) return true;
    args.sink = reinterpret_cast<uint64_t>(provide_host_sink());
    args.sink_bytes = args.sink ? SINK_BYTES : 0;
    return args.sink != 0;
}

#endif

}  // namespace detail
}  // namespace serval

#endif
