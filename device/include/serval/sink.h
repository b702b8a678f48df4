// The sink: memory to which a kernel writes a reply that is too long to send.
//
// The length of such a reply may be any 32-bit number, possibly chosen by a client, so neither a fault nor an allocation of that
// length is acceptable. The sink is an address range longer than any length. All of it maps the same small piece of memory
// repeatedly. Writes overwrite each other; the content is never read or sent.
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

// Bytes that a kernel may write past a length if it writes in units of at most 16 bytes.
constexpr uint64_t SINK_UNIT_BYTES = 16;

// May a kernel write a reply of `len` bytes to the sink?
SERVAL_INLINE bool fits_sink(const serval_block_args& args, uint32_t len) {
    return args.sink != 0 && args.sink_bytes >= SINK_UNIT_BYTES && len <= args.sink_bytes - SINK_UNIT_BYTES;
}

#if !SERVAL_CUDA

// The physical memory of a sink, and its address range, which exceeds any length.
constexpr uint64_t SINK_PIECE_BYTES = uint64_t{16} << 20;
constexpr uint64_t SINK_BYTES = (uint64_t{1} << 32) + SINK_PIECE_BYTES;

// Maps the piece at all of a sink's addresses: the memory at `piece` again, which mremap(2) does with an old size of 0, or the file.
inline bool fill_sink(void* at, void* piece, int file) {
    for (uint64_t offset = 0; offset < SINK_BYTES; offset += SINK_PIECE_BYTES) {
        void* const to = static_cast<uint8_t*>(at) + offset;
        void* const made = file < 0 ? mremap(piece, 0, SINK_PIECE_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to)
                                    : mmap(to, SINK_PIECE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
        if (made == MAP_FAILED) return false;
    }
    // Excluded from core files.
    madvise(at, SINK_BYTES, MADV_DONTDUMP);
    return true;
}

// Maps a sink; null if the host kernel refuses, see errno. The memory has no file, whose size may be limited (RLIMIT_FSIZE), except
// under a processor emulator (qemu-user), which cannot map anonymous memory twice.
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

// The sink of this library, never unmapped; null if the host kernel refuses it, see errno.
inline void* provide_host_sink() {
    void* sink = __atomic_load_n(&host_sink, __ATOMIC_ACQUIRE);
    if (sink) return sink;
    void* const made = map_sink();
    if (!made || __atomic_compare_exchange_n(&host_sink, &sink, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return made;
    munmap(made, SINK_BYTES);  // another thread was first
    return sink;
}

// Completes the arguments of a block whose runtime provided no sink.
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
