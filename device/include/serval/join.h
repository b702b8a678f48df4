// Joining a region: validation by a block, and its private copy of the ring descriptions.
//
// The directory, not the position of an entry, identifies a ring. Entries of unknown kinds are skipped, unless they are
// marked as required.
//
// The directory is constant once formatted, but it is in shared memory: addresses are computed from a copy, and every number in it is
// checked against the mapping.
#ifndef SERVAL_JOIN_H
#define SERVAL_JOIN_H

#include "ring.h"

namespace serval {
namespace detail {

// Is [offset, offset + bytes) inside a region of `size` bytes?
SERVAL_INLINE bool within(uint64_t offset, uint64_t bytes, uint64_t size) {
    return bytes <= size && offset <= size - bytes;
}

// Copies a constant structure out of the region.
template <class T>
inline SERVAL_DEVICE void fetch(T& to, const uint8_t* from) {
    static_assert(sizeof(T) % 8 == 0, "copied word by word");
    for (unsigned i = 0; i < sizeof(T); i += 8)
        private_store(reinterpret_cast<uint8_t*>(&to) + i, load_relaxed(reinterpret_cast<const uint64_t*>(from + i)));
}

// Bytes of a slot of this protocol; 0 for a protocol that this machine does not support.
inline SERVAL_DEVICE uint64_t slot_bytes(unsigned protocol, unsigned inline_bytes) {
    switch (protocol) {
        case SERVAL_PROTOCOL_DOORBELL:
            return HEADER_BYTES + inline_bytes;
        case SERVAL_PROTOCOL_GRANULE8:
            return units_for<Granule8>(inline_bytes) * uint64_t{Granule8::BYTES};
#if SERVAL_HAS_GRANULE16
        case SERVAL_PROTOCOL_GRANULE16:
            return granule16_supported() ? units_for<Granule16>(inline_bytes) * uint64_t{Granule16::BYTES} : 0;
#endif
        default:
            return 0;
    }
}

// The identification of an entry: the first bytes, common to all kinds.
struct EntryName {
    uint16_t kind, version;
    uint32_t flags, block, index;
};
static_assert(sizeof(EntryName) == 16 && offsetof(serval_directory_entry, index) == 12, "the first part of an entry");
static_assert(sizeof(serval_directory_entry) == sizeof(serval_ring_entry) && offsetof(serval_ring_entry, index) == 12,
              "entries have one size and one first part");

// Is it the entry of an mqueue's ring, in a version that this library supports?
inline SERVAL_DEVICE bool is_of_mqueue(const EntryName& name) {
    return name.kind >= SERVAL_RING_SERVER_RX && name.kind <= SERVAL_RING_CLIENT_TX && name.version == SERVAL_RING_VERSION_MQUEUE;
}
inline SERVAL_DEVICE bool is_of_server(const EntryName& name) { return name.kind <= SERVAL_RING_SERVER_TX; }
inline SERVAL_DEVICE bool is_rx(const EntryName& name) {
    return name.kind == SERVAL_RING_SERVER_RX || name.kind == SERVAL_RING_CLIENT_RX;
}

// Is it the entry of a ring of sockets, in a version that this library supports? Only kernels with sockets take them.
inline SERVAL_DEVICE bool is_of_sockets(const EntryName& name) {
    if (name.kind == SERVAL_RING_SOCKET_RX || name.kind == SERVAL_RING_SOCKET_TX) return name.version == SERVAL_RING_VERSION_MQUEUE;
    return (name.kind == SERVAL_RING_STREAM_RX || name.kind == SERVAL_RING_STREAM_TX) && name.version == SERVAL_RING_VERSION_STREAM;
}

// Is it the entry of a pool, in a version that this library supports? It belongs to no block.
inline SERVAL_DEVICE bool is_pool(const EntryName& name) {
    return name.kind == SERVAL_RING_POOL && name.version == SERVAL_RING_VERSION_POOL && name.block == static_cast<uint32_t>(SERVAL_NO_BLOCK);
}

// Must this library refuse the region, because the entry is required, and unknown or not taken?
inline SERVAL_DEVICE bool is_refused(const EntryName& name, bool takes_sockets = false) {
    const bool is_taken = is_of_mqueue(name) || is_pool(name) || (takes_sockets && is_of_sockets(name));
    return !is_taken && (name.flags & SERVAL_RING_REQUIRED) != 0;
}

// Fills in `ring` from the directory's entry; false if this block cannot serve the entry.
inline SERVAL_DEVICE bool open_ring(Ring& ring, uint8_t* region, uint64_t size, uint64_t entry_offset, unsigned kind) {
    serval_ring_entry e;
    fetch(e, region + entry_offset);
    bool power_of_two = e.depth != 0 && (e.depth & (e.depth - 1)) == 0;
    if (e.kind != kind || e.version != SERVAL_RING_VERSION_MQUEUE || !power_of_two || e.depth > SERVAL_DEPTH_MAX) return false;
    // At most the size of staging for the longest message: inline payloads are fetched before their length is checked.
    if (e.inline_bytes > ((static_cast<uint64_t>(e.message_bytes_max) + 7) & ~uint64_t{7})) return false;
    if (e.inline_bytes < 8 || e.inline_bytes > SERVAL_INLINE_BYTES_MAX || e.inline_bytes % 8) return false;
    if (e.message_bytes_max == 0 || e.message_bytes_max > SERVAL_MESSAGE_BYTES_MAX) return false;
    uint64_t needed = slot_bytes(e.protocol, e.inline_bytes);
    if (needed == 0 || e.slot_stride < needed || e.slot_stride % 64 || e.slots_offset % 64) return false;
    if (!within(e.slots_offset, static_cast<uint64_t>(e.depth) * e.slot_stride, size)) return false;
    if (e.head_offset % 8 || !within(e.head_offset, 8, size) || e.tail_offset % 8 || !within(e.tail_offset, 8, size))
        return false;
    if (e.arena_offset % 8 || e.arena_bytes % 8 || !within(e.arena_offset, e.arena_bytes, size)) return false;
    if (e.message_bytes_max > e.inline_bytes) {
        // Longer messages need an arena that holds at least one of them.
        uint64_t room = (static_cast<uint64_t>(e.message_bytes_max) + 7) & ~uint64_t{7};
        if (e.protocol != SERVAL_PROTOCOL_DOORBELL || e.arena_bytes < room) return false;
    }
    ring.slots = region + e.slots_offset;
    ring.head = reinterpret_cast<uint64_t*>(region + e.head_offset);
    ring.tail = reinterpret_cast<uint64_t*>(region + e.tail_offset);
    ring.arena = region + e.arena_offset;
    ring.arena_bytes = e.arena_bytes;
    ring.mask = e.depth - 1;
    for (ring.shift = 0; 1u << ring.shift < e.depth;) ring.shift++;
    ring.stride = e.slot_stride;
    ring.inline_bytes = e.inline_bytes;
    ring.len_max = e.message_bytes_max;
    ring.protocol = e.protocol;
    return true;
}

// A consumer continues at the tail: messages already in the ring are served. It holds back at most a quarter of the ring, counted in
// longest messages if these fill an arena before the slots.
inline SERVAL_DEVICE bool open_consumer(Consumer& c) {
    c.held_max = (c.ring.depth() + 3) / 4;
    if (c.ring.len_max > c.ring.inline_bytes) {
        const uint64_t fit = c.ring.arena_bytes / c.ring.len_max / 4;
        if (fit < c.held_max) c.held_max = fit;
    }
    c.next = load_relaxed(c.ring.tail);
    c.released = c.head = c.next;
    return true;
}

// A producer continues at the head. With an arena it cannot know which parts are still unread, so its ring must
// be empty.
inline SERVAL_DEVICE bool open_producer(Producer& p) {
    p.next = load_relaxed(p.ring.head);
    // EDGE TX_RELEASE (acquire half)
    p.tail = load_acquire(p.ring.tail);
    p.place_end = p.place_room = 0;
    p.use.first = p.use.count = 0;
    p.use.cursor = p.use.used = 0;
    if (p.next - p.tail > p.ring.depth()) return false;
    return p.ring.len_max <= p.ring.inline_bytes || p.next == p.tail;
}

// Locations of the arrays of a region.
struct Layout {
    uint8_t* region;
    uint64_t size;
    uint64_t blocks;
    uint64_t directory;
    uint32_t block_count;
    uint32_t ring_count;

    // Entry `ring`, which must be below ring_count.
    SERVAL_INLINE uint64_t entry(uint64_t ring) const { return directory + ring * sizeof(serval_directory_entry); }
    inline SERVAL_DEVICE EntryName name(uint64_t ring) const {
        EntryName name;
        fetch(name, region + entry(ring));
        return name;
    }
};

// Reads the header. False if this is not a region of this version.
inline SERVAL_DEVICE bool find_layout(Layout& layout, uint64_t region, uint64_t bytes) {
    layout.region = reinterpret_cast<uint8_t*>(region);
    if (region == 0 || region % SERVAL_LINE_BYTES || bytes < SERVAL_BLOCKS_OFFSET) return false;
    serval_region_header h;
    fetch(h, layout.region);
    if (h.magic != SERVAL_REGION_MAGIC || h.abi_version != SERVAL_ABI_VERSION || h.region_bytes > bytes) return false;
    if (h.block_count == 0 || h.block_count > SERVAL_BLOCKS_MAX || h.ring_count == 0 || h.ring_count > SERVAL_RINGS_MAX) return false;
    if (h.blocks_offset % 64 || h.directory_offset % 64) return false;
    if (!within(h.blocks_offset, h.block_count * sizeof(serval_block_words), h.region_bytes)) return false;
    if (!within(h.directory_offset, h.ring_count * sizeof(serval_directory_entry), h.region_bytes)) return false;
    layout.size = h.region_bytes;
    layout.blocks = h.blocks_offset;
    layout.directory = h.directory_offset;
    layout.block_count = h.block_count;
    layout.ring_count = h.ring_count;
    return true;
}

// The pools of a region. A block gets bundles from few of them, mostly from one, so that this one is kept in private memory, and the directory
// is read again for another one: the entries that belong to no block are its last ones.
struct Pools {
    Layout layout;
    // The last pool that was needed.
    uint64_t offset, bytes;

    // Has the region a pool?
    inline SERVAL_DEVICE bool open(const Layout& of) {
        layout = of;
        offset = bytes = 0;
        return find([](const Pools&) { return true; });
    }

    // Do both ranges lie in the memory of one pool?
    inline SERVAL_DEVICE bool hold(uint64_t first, uint64_t first_bytes, uint64_t second, uint64_t second_bytes) {
        const auto holds = [=](const Pools& pool) { return pool.has(first, first_bytes) && pool.has(second, second_bytes); };
        return holds(*this) || find(holds);
    }

  private:
    inline SERVAL_DEVICE bool has(uint64_t at, uint64_t count) const { return at >= offset && within(at - offset, count, bytes); }

    // Takes the first pool that `suits`. Its numbers are checked: those in the directory may have been overwritten.
    template <class F>
    inline SERVAL_DEVICE bool find(F suits) {
        for (uint32_t i = layout.ring_count; i-- > 0;) {
            const EntryName name = layout.name(i);
            if (name.block != static_cast<uint32_t>(SERVAL_NO_BLOCK)) break;
            if (!is_pool(name)) continue;
            serval_pool_entry e;
            fetch(e, layout.region + layout.entry(i));
            if (e.offset < SERVAL_BLOCKS_OFFSET || e.offset % SERVAL_POOL_ALIGN || !within(e.offset, e.bytes, layout.size)) continue;
            offset = e.offset;
            bytes = e.bytes;
            if (suits(*this)) return true;
        }
        return false;
    }
};

// The block's part of the region.
struct Place {
    Layout layout;
    // Its entries in the directory.
    uint32_t first, count;
    // Number of its mqueues; 0 if its entries cannot be used.
    uint32_t mqueue_count;
    serval_block_words* words;
};

// Number of server and client mqueues that the block's entries describe; 0 if a required one is unknown, if one belongs to another block, or if
// they cannot form mqueues. Opening the mqueues checks that each has both rings.
inline SERVAL_DEVICE uint32_t count_mqueues(const Layout& layout, uint32_t block, uint32_t first, uint32_t count,
                                            bool takes_sockets = false) {
    if (!within(first, count, layout.ring_count)) return 0;
    uint32_t rings = 0;
    for (uint32_t i = 0; i < count; i++) {
        const EntryName name = layout.name(uint64_t{first} + i);
        const bool is_known = is_of_mqueue(name) || (takes_sockets && is_of_sockets(name));
        if (is_refused(name, takes_sockets) || (is_known && name.block != block)) return 0;
        rings += is_of_mqueue(name);
    }
    return rings % 2 == 0 && rings / 2 <= 1 + SERVAL_BACKENDS_MAX ? rings / 2 : 0;
}

// The offset of the block's entry of this kind and index; 0 if there is none.
inline SERVAL_DEVICE uint64_t find_ring(const Place& place, unsigned kind, uint32_t index) {
    for (uint32_t i = 0; i < place.count; i++) {
        const EntryName name = place.layout.name(uint64_t{place.first} + i);
        if (name.kind == kind && name.index == index && (is_of_mqueue(name) || is_of_sockets(name))) return place.layout.entry(uint64_t{place.first} + i);
    }
    return 0;
}

// The memory for transfers of a client mqueue; none if it is to a server. False if it is outside the region.
inline SERVAL_DEVICE bool find_staging(const Place& place, uint32_t backend, uint8_t*& memory, uint64_t& bytes) {
    memory = nullptr;
    bytes = 0;
    const uint64_t entry = find_ring(place, SERVAL_RING_CLIENT_TX, backend);
    if (entry == 0) return false;
    serval_ring_entry e;
    fetch(e, place.layout.region + entry);
    if (e.staging_bytes == 0) return true;
    if (e.staging_offset < SERVAL_BLOCKS_OFFSET || e.staging_offset % SERVAL_LINE_BYTES ||
        !within(e.staging_offset, e.staging_bytes, place.layout.size))
        return false;
    memory = place.layout.region + e.staging_offset;
    bytes = e.staging_bytes;
    return true;
}

// Finds the block's words and entries. False if the region is too broken to report why the block refuses.
inline SERVAL_DEVICE bool find_place(Place& place, const serval_block_args& args, bool takes_sockets = false) {
    if (!find_layout(place.layout, args.region, args.region_bytes) || args.block >= place.layout.block_count) return false;
    place.first = args.ring_first;
    place.count = args.ring_count;
    place.mqueue_count = count_mqueues(place.layout, args.block, place.first, place.count, takes_sockets);
    place.words = reinterpret_cast<serval_block_words*>(place.layout.region + place.layout.blocks) + args.block;
    return true;
}

// Does this library support the arguments, and is there enough staging memory?
inline SERVAL_DEVICE bool suits(const Place& place, const serval_block_args& args) {
    if (args.abi_version != SERVAL_ABI_VERSION) return false;
    if (args.param_count > SERVAL_PARAMS_MAX || (args.param_count && (args.params == 0 || args.params % 8))) return false;
    if (args.staging == 0 || args.staging % 16 || args.staging_stride == 0 || args.staging_stride % 64) return false;
    if (place.mqueue_count == 0 || args.staging_bytes < 2ull * place.mqueue_count * args.staging_stride) return false;
    return SERVAL_CUDA || args.wait != 0;
}

#if SERVAL_CUDA
// Is the CUDA block one block of the service, or at most `warps` of them, one per warp?
inline SERVAL_DEVICE bool suits_launch(unsigned warps) {
    if (blockDim.y > warps || blockDim.z != 1) return false;
    return warps == 1 ? blockDim.x >= CREW_SIZE && blockDim.x % CREW_SIZE == 0 : blockDim.x == CREW_SIZE;
}
#endif

}  // namespace detail
}  // namespace serval

#endif
