// A region for tests, and the engine's side of it. Has the format of crates/mqueue, with one addition: the counters may
// start at any value, as if that many messages had passed.
#ifndef SERVAL_TESTS_REGION_H
#define SERVAL_TESTS_REGION_H

#include <serval/kernel.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <vector>

#include "check.h"

namespace testing {

using serval::detail::Consumer;
using serval::detail::Header;
using serval::detail::Look;
using serval::detail::Producer;

// The protocols that this machine supports.
constexpr unsigned PROTOCOLS[] = {SERVAL_PROTOCOL_DOORBELL, SERVAL_PROTOCOL_GRANULE8,
#if SERVAL_HAS_GRANULE16
                                  SERVAL_PROTOCOL_GRANULE16
#endif
};
constexpr unsigned GRANULES[] = {SERVAL_PROTOCOL_GRANULE8,
#if SERVAL_HAS_GRANULE16
                                 SERVAL_PROTOCOL_GRANULE16
#endif
};

struct Shape {
    unsigned protocol = SERVAL_PROTOCOL_DOORBELL;
    unsigned depth = 8;
    unsigned inline_bytes = 256;
    unsigned len_max = 256;
    uint64_t arena_bytes = 0;
    unsigned blocks = 1;
    unsigned backends = 0;
    unsigned sockets = 0;  // slots of the block, of which there is one then
    uint64_t stream_bytes = 4096;
    unsigned pools = 0;
    uint64_t pool_bytes = 65536;
    uint64_t start = 0;  // messages that have passed in every ring
};

inline uint64_t align(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

class Region {
  public:
    explicit Region(const Shape& s) : shape(s) {
        const unsigned per_block = mqueues_of_block(s), mqueues = s.blocks * per_block;
        const uint64_t stride = align(serval::detail::slot_bytes(s.protocol, s.inline_bytes), 64);
        uint64_t at = SERVAL_BLOCKS_OFFSET + s.blocks * sizeof(serval_block_words);
        const uint64_t directory = at;
        at = align(at + (2 * (mqueues + s.sockets) + s.pools) * sizeof(serval_ring_entry), 128);
        uint64_t words[4];
        for (uint64_t& w : words) {
            w = at;
            at = align(at + 8 * mqueues, 128);
        }
        std::vector<serval_ring_entry> entries;
        for (unsigned q = 0; q < mqueues; q++) {
            for (unsigned tx = 0; tx < 2; tx++) {
                serval_ring_entry e = {};
                const bool server = q % per_block == 0, socket = s.sockets && q + 1 == mqueues;
                e.kind = server ? (tx ? SERVAL_RING_SERVER_TX : SERVAL_RING_SERVER_RX)
                         : socket ? (tx ? SERVAL_RING_SOCKET_TX : SERVAL_RING_SOCKET_RX)
                                  : (tx ? SERVAL_RING_CLIENT_TX : SERVAL_RING_CLIENT_RX);
                e.version = SERVAL_RING_VERSION_MQUEUE;
                e.flags = SERVAL_RING_REQUIRED;
                e.block = q / per_block;
                e.index = server || socket ? 0 : q % per_block - 1;
                e.protocol = static_cast<uint8_t>(s.protocol);
                e.placement = SERVAL_PLACEMENT_HOST;
                e.mqueue = q;
                e.depth = s.depth;
                e.slot_stride = static_cast<uint32_t>(stride);
                e.inline_bytes = s.inline_bytes;
                e.message_bytes_max = s.len_max;
                e.slots_offset = at;
                at = align(at + s.depth * stride, 128);
                e.head_offset = words[tx ? 3 : 0] + 8 * q;  // rx heads, tx heads
                e.tail_offset = words[tx ? 1 : 2] + 8 * q;  // tx tails, rx tails
                if (s.arena_bytes) {
                    e.arena_offset = at;
                    e.arena_bytes = s.arena_bytes;
                    at = align(at + s.arena_bytes, 128);
                }
                e.offset = e.slots_offset;
                e.bytes = at - e.offset;
                entries.push_back(e);
            }
        }
        std::vector<serval_stream_entry> streams;
        for (unsigned i = 0; i < 2 * s.sockets; i++) {
            serval_stream_entry e = {};
            e.kind = i % 2 ? SERVAL_RING_STREAM_TX : SERVAL_RING_STREAM_RX;
            e.version = SERVAL_RING_VERSION_STREAM;
            e.flags = SERVAL_RING_REQUIRED;
            e.index = i / 2;
            e.offset = at;
            e.bytes = SERVAL_STREAM_DATA + s.stream_bytes;
            e.capacity = s.stream_bytes;
            at = align(at + e.bytes, 128);
            streams.push_back(e);
        }
        // At the end, so that an access beyond the last one is outside the region.
        std::vector<serval_pool_entry> pools;
        for (unsigned i = 0; i < s.pools; i++) {
            serval_pool_entry e = {};
            e.kind = SERVAL_RING_POOL;
            e.version = SERVAL_RING_VERSION_POOL;
            e.block = static_cast<uint32_t>(SERVAL_NO_BLOCK);
            e.index = i;
            e.offset = align(at, SERVAL_POOL_ALIGN);
            e.bytes = s.pool_bytes;
            at = e.offset + e.bytes;
            pools.push_back(e);
        }
        bytes = align(at, 4096);
        base = static_cast<uint8_t*>(std::aligned_alloc(4096, bytes));
        std::memset(base, 0, bytes);
        serval_region_header h = {};
        h.magic = SERVAL_REGION_MAGIC;
        h.abi_version = SERVAL_ABI_VERSION;
        h.header_bytes = sizeof h;
        h.region_bytes = bytes;
        h.generation = 1;
        h.block_count = s.blocks;
        h.mqueue_count = mqueues;
        h.ring_count = 2 * (mqueues + s.sockets) + s.pools;
        h.blocks_offset = SERVAL_BLOCKS_OFFSET;
        h.directory_offset = directory;
        h.rx_heads_offset = words[0];
        h.tx_tails_offset = words[1];
        h.rx_tails_offset = words[2];
        h.tx_heads_offset = words[3];
        std::memcpy(base, &h, sizeof h);
        std::memcpy(base + directory, entries.data(), entries.size() * sizeof entries[0]);
        if (s.sockets) std::memcpy(base + directory + entries.size() * sizeof entries[0], streams.data(), streams.size() * sizeof streams[0]);
        if (s.pools) std::memcpy(pool_entry(0), pools.data(), pools.size() * sizeof pools[0]);
        for (const serval_ring_entry& e : entries) age(e);
    }
    ~Region() { std::free(base); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    serval_region_header* header() { return reinterpret_cast<serval_region_header*>(base); }
    serval_engine_words* engine() { return reinterpret_cast<serval_engine_words*>(base + SERVAL_ENGINE_WORDS_OFFSET); }
    serval_block_words* block(unsigned i = 0) {
        return reinterpret_cast<serval_block_words*>(base + SERVAL_BLOCKS_OFFSET) + i;
    }
    serval_ring_entry* entry(unsigned mqueue, bool tx) {
        return reinterpret_cast<serval_ring_entry*>(base + header()->directory_offset) + 2 * mqueue + tx;
    }
    serval_stream_entry* stream_entry(unsigned slot, bool tx) {
        return reinterpret_cast<serval_stream_entry*>(base + header()->directory_offset) + 2 * (header()->mqueue_count + slot) + tx;
    }
    serval_pool_entry* pool_entry(unsigned i) {
        return reinterpret_cast<serval_pool_entry*>(base + header()->directory_offset) + header()->ring_count - shape.pools + i;
    }
    // A word of a stream ring, for example SERVAL_STREAM_HEAD, or its data.
    uint8_t* stream(unsigned slot, bool tx, unsigned at) { return base + stream_entry(slot, tx)->offset + at; }
    uint64_t* stream_word(unsigned slot, bool tx, unsigned at) { return reinterpret_cast<uint64_t*>(stream(slot, tx, at)); }
    uint64_t* head(unsigned mqueue, bool tx) { return reinterpret_cast<uint64_t*>(base + entry(mqueue, tx)->head_offset); }
    uint64_t* tail(unsigned mqueue, bool tx) { return reinterpret_cast<uint64_t*>(base + entry(mqueue, tx)->tail_offset); }
    uint8_t* slot(unsigned mqueue, bool tx, uint64_t n) {
        const serval_ring_entry* e = entry(mqueue, tx);
        return base + e->slots_offset + n % e->depth * e->slot_stride;
    }

    // An end of a ring, for the side that the test acts as.
    Producer producer(unsigned mqueue, bool tx) {
        Producer p;
        if (!open(p.ring, mqueue, tx) || !serval::detail::open_producer(p)) std::abort();
        return p;
    }
    Consumer consumer(unsigned mqueue, bool tx) {
        Consumer c;
        if (!open(c.ring, mqueue, tx)) std::abort();
        serval::detail::open_consumer(c);
        return c;
    }

    static unsigned mqueues_of_block(const Shape& s) { return 1 + s.backends + (s.sockets ? 1 : 0); }

    Shape shape;
    uint8_t* base;
    uint64_t bytes;

  private:
    bool open(serval::detail::Ring& ring, unsigned mqueue, bool tx) {
        return serval::detail::open_ring(ring, base, bytes, static_cast<uint64_t>(reinterpret_cast<uint8_t*>(entry(mqueue, tx)) - base),
                                         entry(mqueue, tx)->kind);
    }

    // Gives every unit of every slot the sequence of the last message that used the slot before `start`.
    void age(const serval_ring_entry& e) {
        *reinterpret_cast<uint64_t*>(base + e.head_offset) = shape.start;
        *reinterpret_cast<uint64_t*>(base + e.tail_offset) = shape.start;
        if (e.protocol == SERVAL_PROTOCOL_DOORBELL || shape.start < e.depth) return;
        const unsigned unit = e.protocol == SERVAL_PROTOCOL_GRANULE8 ? 8 : 16;
        for (uint64_t n = shape.start - e.depth; n < shape.start; n++) {
            uint8_t* slot = base + e.slots_offset + n % e.depth * e.slot_stride;
            for (unsigned at = 0; at + unit <= e.slot_stride; at += unit) {
                uint32_t sequence = static_cast<uint32_t>(n + 1);
                std::memset(slot + at, 0xee, unit);
                std::memcpy(slot + at + unit - 4, &sequence, 4);
            }
        }
    }
};

inline Header message(uint64_t token, uint32_t len, uint8_t kind = SERVAL_KIND_MESSAGE, uint8_t status = SERVAL_STATUS_OK) {
    return {token, 0, 0, len, kind, status, 0};
}

// Whether a message of `len` bytes could be sent.
inline Look room(Producer& p, uint32_t len) {
    p.begin(message(0, len));
    return p.reserve();
}

// Sends if there is room.
inline bool send(Producer& p, const Header& h, const void* data) {
    p.begin(h);
    if (p.reserve() != Look::FOUND) return false;
    p.write(static_cast<const uint8_t*>(data));
    p.publish();
    return true;
}

// Receives if there is a message; the header is in c.message.
inline Look recv(Consumer& c, std::vector<uint8_t>& data) {
    data.assign((c.ring.len_max + 7) / 8 * 8, 0xaa);
    Look look = c.look(data.data());
    if (look != Look::FOUND) return look;
    c.copy(data.data());
    c.advance();
    c.release();
    data.resize(c.message.len);
    return look;
}

// Runs kernels of this program on a region. `waiting` acts as the engine: it is called whenever the block waits.
class Runner {
  public:
    // `area`: bytes of staging for bundles, a multiple of 64.
    explicit Runner(Region& r, unsigned block = 0, uint64_t area = 0) : region(r) {
        const unsigned stride = static_cast<unsigned>(align(r.shape.len_max, 64));
        const unsigned mqueues = Region::mqueues_of_block(r.shape);
        staging_bytes = 2ull * mqueues * stride + area;
        staging = static_cast<uint8_t*>(std::aligned_alloc(64, staging_bytes));
        std::memset(staging, 0x77, staging_bytes);
        args.abi_version = SERVAL_ABI_VERSION;
        args.block = block;
        args.staging_stride = stride;
        args.ring_first = 2 * mqueues * block;
        args.ring_count = 2 * (mqueues + r.shape.sockets);
        args.region = reinterpret_cast<uint64_t>(r.base);
        args.region_bytes = r.bytes;
        args.staging = reinterpret_cast<uint64_t>(staging);
        args.staging_bytes = staging_bytes;
        args.wait = reinterpret_cast<uint64_t>(&Runner::wait);
        args.wait_self = reinterpret_cast<uint64_t>(this);
    }
    ~Runner() { std::free(staging); }
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;

    void param(const char* name, double value) {
        serval_param p = {};
        std::memcpy(p.name, name, std::min(std::strlen(name), sizeof p.name - 1));
        p.value = value;
        params.push_back(p);
        args.params = reinterpret_cast<uint64_t>(params.data());
        args.param_count = static_cast<uint32_t>(params.size());
    }

    // False if this program has no such kernel.
    bool run(const char* name) {
        for (const serval_kernel_entry* e = serval_kernel_list(); e; e = reinterpret_cast<const serval_kernel_entry*>(e->next)) {
            if (std::strcmp(reinterpret_cast<const char*>(e->name), name) != 0) continue;
            reinterpret_cast<void (*)(const serval_block_args*)>(e->entry)(&args);
            return true;
        }
        return false;
    }

    Region& region;
    serval_block_args args = {};
    std::vector<serval_param> params;
    std::function<void(uint32_t why, uint64_t deadline_ns)> waiting;
    uint8_t* staging;
    uint64_t staging_bytes;
    unsigned waits[5] = {};

  private:
    static void wait(void* self, uint32_t why, uint64_t deadline_ns) {
        Runner* r = static_cast<Runner*>(self);
        r->waits[why]++;
        r->waiting(why, deadline_ns);
    }
};

}  // namespace testing

#endif
