// See ik.h: the application's side of a custom ring. It plays the accelerator's role in a region
// with a block for each worker: it reads the RX rings, with the ring code of the device library
// (crates/server/src/functions/ring.rs has the other side).
//
// Programs in C link this file, so it must not need the C++ runtime.
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <serval/ik.h>
#include <serval/join.h>

#include "functions/ring.h"

using serval::detail::Consumer;
using serval::detail::Look;

namespace {

// The largest region that is mapped, in bytes.
constexpr uint64_t REGION_BYTES_MAX = 1ull << 30;
// Messages that are read before their places are given back, as a share of the ring.
constexpr uint32_t RELEASE_PARTS = 4;
constexpr uint64_t HAS_ADDRESS = 1ull << 48;
const uint32_t SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

struct custom_ring {
    uint8_t* region;
    uint64_t region_bytes;
    int bell;
    uint32_t workers;
    uint32_t next;
    Consumer* rings;  // by worker
};

namespace {

// Maps the descriptor, if no process can shrink it. Returns 0 or a negative errno.
int map(custom_ring* ring, int file) {
    const int seals = fcntl(file, F_GET_SEALS);
    struct stat status;
    struct statfs system;
    if (seals < 0 || (static_cast<uint32_t>(seals) & SEALS) != SEALS) return -EPROTO;
    if (fstat(file, &status) < 0 || fstatfs(file, &system) < 0) return -errno;
    // The creator of hugetlb pages could punch holes into them, and an access to a hole ends the
    // process.
    if (system.f_type == HUGETLBFS_MAGIC || status.st_size <= 0) return -EPROTO;
    const uint64_t bytes = static_cast<uint64_t>(status.st_size);
    if (bytes > REGION_BYTES_MAX) return -EPROTO;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (at == MAP_FAILED) return -errno;
    ring->region = static_cast<uint8_t*>(at);
    ring->region_bytes = bytes;
    return 0;
}

// Finds the RX ring of each block: their entries follow each other in the order of the blocks.
int take_rings(custom_ring* ring) {
    serval_region_header header;
    serval::detail::Place place = {};
    serval::detail::Layout& layout = place.layout;
    if (ring->region_bytes < sizeof header) return -EPROTO;
    serval::detail::fetch(header, ring->region);
    if (header.magic != SERVAL_REGION_MAGIC || header.abi_version != SERVAL_ABI_VERSION)
        return -EPROTO;
    if (!serval::detail::find_layout(layout, reinterpret_cast<uint64_t>(ring->region),
                                     ring->region_bytes))
        return -EPROTO;
    ring->workers = layout.block_count;
    if (ring->workers == 0 || layout.ring_count % ring->workers) return -EPROTO;
    ring->rings = static_cast<Consumer*>(calloc(ring->workers, sizeof(Consumer)));
    if (!ring->rings) return -ENOMEM;
    place.count = layout.ring_count / ring->workers;
    for (uint32_t worker = 0; worker < ring->workers; worker++) {
        place.first = worker * place.count;
        if (serval::detail::count_mqueues(layout, worker, place.first, place.count) != 1)
            return -EPROTO;
        Consumer& consumer = ring->rings[worker];
        const uint64_t entry = serval::detail::find_ring(place, SERVAL_RING_SERVER_RX, 0);
        if (entry == 0 ||
            !serval::detail::open_ring(consumer.ring, layout.region, layout.size, entry,
                                       SERVAL_RING_SERVER_RX) ||
            consumer.ring.protocol != SERVAL_PROTOCOL_DOORBELL ||
            !serval::detail::open_consumer(consumer))
            return -EPROTO;
    }
    return 0;
}

void give_back(Consumer& ring) {
    if (ring.released != ring.next) ring.release();
}

Look look(Consumer& ring) {
    const Look found = ring.look(nullptr);
    // An application gets no bundles.
    return found == Look::FOUND && ring.message.kind != SERVAL_KIND_MESSAGE ? Look::CORRUPT : found;
}

void set_parked(custom_ring* ring, bool parked) {
    auto* word = reinterpret_cast<uint64_t*>(ring->region + SERVAL_ACCELERATOR_WORDS_OFFSET +
                                             offsetof(serval_accelerator_words, parked));
    serval::detail::store_relaxed(word, parked);
    // EDGE PARK (sleeper half)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

bool is_any(custom_ring* ring) {
    for (uint32_t worker = 0; worker < ring->workers; worker++)
        if (look(ring->rings[worker]) != Look::NONE) return true;
    return false;
}

int64_t now_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ll + now.tv_nsec / 1000000;
}

}  // namespace

int serval_ring_open(int region, int bell, custom_ring** ring) {
    auto* made = static_cast<custom_ring*>(calloc(1, sizeof(custom_ring)));
    int result = made ? map(made, region) : -ENOMEM;
    close(region);
    if (made) made->bell = bell;
    if (!made) close(bell);
    if (result == 0) result = take_rings(made);
    if (result) {
        custom_ring_destroy(made);
        return result;
    }
    *ring = made;
    return 0;
}

int custom_ring_read(custom_ring* ring, void* buffer, size_t capacity,
                     custom_ring_message* message) {
    if (!ring || !buffer || !message) return -EINVAL;
    for (uint32_t tries = 0; tries < ring->workers; tries++) {
        const uint32_t worker = ring->next;
        Consumer& of = ring->rings[worker];
        const Look found = look(of);
        if (found == Look::CORRUPT) return -EBADMSG;
        if (found == Look::NONE) {
            give_back(of);
            ring->next = (worker + 1) % ring->workers;
            continue;
        }
        *message = {};
        message->length = of.message.len;
        if (message->length > capacity) return -EMSGSIZE;
        message->number = of.message.token;
        message->worker = worker;
        if (of.message.tag & HAS_ADDRESS) {
            message->has_client = 1;
            message->client_port = static_cast<uint16_t>(of.message.tag >> 32);
            message->client_ipv4 = static_cast<uint32_t>(of.message.tag);
        }
        of.copy_out(buffer);
        of.advance();
        if ((of.next - of.released) * RELEASE_PARTS >= of.ring.depth()) of.release();
        ring->next = (worker + 1) % ring->workers;
        return 0;
    }
    return -EAGAIN;
}

int custom_ring_wait(custom_ring* ring, int timeout_ms) {
    if (!ring) return -EINVAL;
    const int64_t deadline = now_ms() + timeout_ms;
    bool found = is_any(ring);
    while (!found) {
        set_parked(ring, true);
        // Either the worker sees that this side sleeps, or its message is seen here.
        found = is_any(ring);
        const int64_t left = deadline - now_ms();
        if (!found && (timeout_ms < 0 || left > 0)) {
            pollfd file = {ring->bell, POLLIN, 0};
            poll(&file, 1, timeout_ms < 0 ? -1 : static_cast<int>(left));
            uint8_t rings[512];
            while (read(ring->bell, rings, sizeof rings) < 0 && errno == EINTR) {
            }
            found = is_any(ring);
        }
        set_parked(ring, false);
        if (!found && timeout_ms >= 0 && left <= 0) return -ETIMEDOUT;
    }
    return 0;
}

void custom_ring_destroy(custom_ring* ring) {
    if (!ring) return;
    if (ring->region) munmap(ring->region, ring->region_bytes);
    if (ring->bell >= 0) close(ring->bell);
    free(ring->rings);
    free(ring);
}
