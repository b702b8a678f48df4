// The two ends of a ring: Consumer reads messages, Producer writes them. The layout, the protocols and the arena are
// explained in crates/mqueue/src/abi.rs, their correctness in ORDERING.md.
//
// Neither end trusts what it reads: a word is loaded once, checked, and the checked copy is used. A ring's description
// was checked when the block started (join.h) and is kept in private memory.
//
// Ordering edges (`RX_*` if the ring runs toward the accelerator, `TX_*` if it runs toward the engine; this library uses
// Consumer for RX rings and Producer for TX rings, its tests also act as the engine with the other halves):
//
// - PUBLISH: the producer's payload and header happen before the consumer's copy. `doorbell`: release store of the head,
//   acquire load of the head. `granule`: each unit is validated by its sequence; units are not ordered.
// - RELEASE: the consumer's copy happens before the producer's next write of the slot. `doorbell`: release store of the tail,
//   acquire load of the tail. `granule`: not needed; on CUDA, where a release waits for the bus, there is none.
#ifndef SERVAL_RING_H
#define SERVAL_RING_H

#include "abi.h"
#include "memory.h"

namespace serval {
namespace detail {

// A private copy of a slot's header, with the layout of the slot.
struct Header {
    uint64_t token;
    uint64_t tag;
    uint64_t arena_offset;
    uint32_t len;
    uint8_t kind;
    uint8_t status;
    uint16_t flags;

    // The header's last eight bytes.
    SERVAL_INLINE uint64_t pack() const {
        return len | static_cast<uint64_t>(kind) << 32 | static_cast<uint64_t>(status) << 40 |
               static_cast<uint64_t>(flags) << 48;
    }
    // The header's n-th four bytes.
    SERVAL_INLINE uint32_t word(unsigned n) const {
        const uint64_t pair = n < 2 ? token : n < 4 ? tag : n < 6 ? arena_offset : pack();
        return static_cast<uint32_t>(pair >> (n % 2 * 32));
    }
    SERVAL_INLINE void unpack(uint64_t word) {
        len = static_cast<uint32_t>(word);
        kind = static_cast<uint8_t>(word >> 32);
        status = static_cast<uint8_t>(word >> 40);
        flags = static_cast<uint16_t>(word >> 48);
    }
};
constexpr unsigned HEADER_BYTES = sizeof(serval_slot_header);
static_assert(sizeof(Header) == HEADER_BYTES, "a header is copied word by word");
constexpr unsigned HEADER_WORDS = HEADER_BYTES / 4;

// Units of a message of `len` payload bytes, and of a slot of `len` inline bytes.
template <class Granule>
SERVAL_INLINE unsigned units_for(unsigned len) {
    return (HEADER_BYTES + len + 4 * Granule::WORDS - 1) / (4 * Granule::WORDS);
}

// A validated, private description of a ring.
struct Ring {
    uint8_t* slots;
    uint64_t* head;
    uint64_t* tail;
    uint8_t* arena;
    uint64_t arena_bytes;
    uint32_t mask;   // depth - 1
    uint32_t shift;  // log2(depth)
    uint32_t stride;
    uint32_t inline_bytes;
    uint32_t len_max;
    uint8_t protocol;

    SERVAL_INLINE uint8_t* slot(uint64_t n) const { return slots + static_cast<uint64_t>(n & mask) * stride; }
    SERVAL_INLINE uint64_t depth() const { return static_cast<uint64_t>(mask) + 1; }

    // Is this header valid for a message, a drop or a bundle?
    SERVAL_INLINE bool accepts(const Header& h) const {
        if (h.kind - 1u >= 3u || h.len > len_max) return false;
        if (SERVAL_LIKELY(h.flags == 0)) return h.len <= inline_bytes;
        uint64_t room = (static_cast<uint64_t>(h.len) + 7) & ~uint64_t{7};
        return h.flags == SERVAL_FLAG_ARENA && arena_bytes > 0 && arena_bytes >= room && h.arena_offset % 8 == 0 &&
               h.arena_offset <= arena_bytes - room;
    }
};

#if SERVAL_CUDA
// 16-byte units per line.
constexpr unsigned LINE_UNITS16 = SERVAL_LINE_BYTES / Granule16::BYTES;
#endif

enum class Look : uint8_t { NONE, FOUND, CORRUPT };

// The reading end of a ring. Poll for a message, copy it, advance past it, in this order; release frees slots.
struct Consumer {
    Ring ring;
    uint64_t next;      // messages read
    uint64_t released;  // of those, messages whose slots were released
    uint64_t held_max;  // messages read whose slots may be held back while there is more to do
    uint64_t head;      // messages known to be published (doorbell)
    Header message;     // the message that look() found

    // Called by the crew. FOUND: `message` is filled in and checked (except when the crew is the block and has it as `h`, below). With
    // the granule protocols the payload is then already in `to`, which has room for len_max rounded up to 8 bytes; with doorbell
    // only part of it. A message with missing units is NONE. On CUDA every thread of the crew also gets the header as `h`,
    // without a trip through memory, and only the first line of a granule message is fetched: complete() fetches the rest. A brief
    // poll uses less of the bus if there is no message, and another trip if there is one.
#if SERVAL_CUDA
    SERVAL_INLINE Look look(uint8_t* to, Header& h, bool brief) {
        if (ring.protocol == SERVAL_PROTOCOL_DOORBELL) return look_doorbell(to, h);
        const Spot at = spot();
        return brief && !at.peep<Granule8>() ? Look::NONE : judge(at, at.ask<Granule8>(), to, h);
    }

    // Where the next message will be, and how it is recognised: values that polls of a granule ring read in advance, constant until
    // `next` changes.
    struct Spot {
        const uint8_t* slot;
        uint32_t sequence;
        uint32_t stride;
        uint32_t len_max;

        // A unit that is missing.
        template <class Granule>
        SERVAL_INLINE Granule nothing() const {
            Granule unit = {};
            unit.sequence = ~sequence;
            return unit;
        }
        // Loads this thread's unit of the slot's first line: one poll reads one 128-byte line, one unit per lane, so that a short message
        // arrives with the poll that finds it.
        template <class Granule>
        SERVAL_INLINE Granule ask() const {
            const unsigned lane = crew_rank();
            Granule unit = nothing<Granule>();
            if (lane < LINE_UNITS<Granule> && lane * Granule::BYTES < stride) unit = Granule::load(slot + lane * Granule::BYTES);
            return unit;
        }
        // Is the header there?
        template <class Granule>
        SERVAL_INLINE bool has_begun(const Granule& unit) const {
            return crew_all(unit.sequence == sequence || crew_rank() * Granule::WORDS >= HEADER_WORDS);
        }
        // Is the first unit there? Reads a quarter of a line over the bus.
        template <class Granule>
        SERVAL_INLINE bool peep() const {
            return crew_first(crew_rank() == 0 && Granule::load(slot).sequence == sequence);
        }
    };
    SERVAL_INLINE Spot spot() const { return {ring.slot(next), static_cast<uint32_t>(next + 1), ring.stride, ring.len_max}; }

    // By the crew: as ask(), and threads that are idle for that line load the lines of the following messages: a trip then fetches up to
    // LINES messages, this thread's unit of message `next + crew_rank() / LINE_UNITS`.
    static constexpr unsigned LINES = CREW_SIZE / LINE_UNITS16;
    SERVAL_INLINE Granule16 ask_ahead() const {
        const unsigned line = crew_rank() / LINE_UNITS16, at = crew_rank() % LINE_UNITS16 * Granule16::BYTES;
        Granule16 unit = {};
        unit.sequence = ~static_cast<uint32_t>(next + 1);
        if (at < ring.stride) unit = Granule16::load(ring.slot(next + line) + at);
        return unit;
    }

    // By the crew: the result of look() for the loaded units. The work between the response and the message is kept short:
    // it is all that the library adds to a round trip.
    template <class Granule>
    SERVAL_INLINE Look judge(const Spot& at, const Granule& unit, uint8_t* to, Header& h) {
        const unsigned lane = crew_rank();
        // The number of valid units before the first invalid one.
        const unsigned ready = __ffs(~__ballot_sync(~0u, lane < LINE_UNITS<Granule> && unit.sequence == at.sequence)) - 1;
        h.unpack(header_pair(unit, 3));
        h.token = header_pair(unit, 0);
        h.tag = header_pair(unit, 1);
        // There is no arena, and no message longer than a slot. One branch for a complete, valid message.
        const bool has_header = ready * Granule::WORDS >= HEADER_WORDS;
        const bool is_sound = (h.kind - 1u < 3u) & (h.flags == 0) & (h.len <= at.len_max);
        const bool is_whole = (ready >= LINE_UNITS<Granule>) | (4 * ready * Granule::WORDS >= HEADER_BYTES + h.len);
        if (SERVAL_UNLIKELY(!(has_header & is_sound & is_whole))) {
            // A header is meaningful only if all its units are valid, and one of kind 0 was never written.
            return has_header && !is_sound && h.kind != 0 ? Look::CORRUPT : Look::NONE;
        }
        if (solo()) {
            // The polling threads have the header in registers. No branch: the lanes stay together.
#pragma unroll
            for (unsigned k = 0; k < Granule::WORDS; k++) {
                const uint32_t place = 4 * (lane * Granule::WORDS + k) - HEADER_BYTES;  // huge where the header is
                if (lane < LINE_UNITS<Granule> && place < h.len) private_store(to + place, unit.data[k]);
            }
        } else if (lane < LINE_UNITS<Granule>) {
            deliver(unit, lane, h.len, to);
        }
        crew_sync();
        return Look::FOUND;
    }

    // Called by the crew after FOUND, whose units were `unit`: fills in `message`.
    SERVAL_INLINE void keep_header(const Granule16& unit) {
        if (crew_rank() * Granule16::WORDS < HEADER_WORDS) deliver(unit, crew_rank(), 0, nullptr);
        crew_sync();
    }

    // Called by the crew after FOUND: is all of a message of `len` bytes fetched?
    SERVAL_INLINE bool complete(uint32_t len, uint8_t* to) {
        return ring.protocol == SERVAL_PROTOCOL_DOORBELL || in_line<Granule8>(len) || fetch_rest<Granule8>(len, to);
    }

    // Fetches the part of a granule message beyond the line that look() fetched, with many loads in flight at once. False while part of it
    // is not visible yet.
    template <class Granule>
    SERVAL_CALL bool fetch_rest(uint32_t len, uint8_t* to) {
        constexpr unsigned BATCH = 3;
        const uint8_t* slot = ring.slot(next);
        const uint32_t sequence = static_cast<uint32_t>(next + 1);
        const unsigned units = units_for<Granule>(len);
        bool complete = true;
        for (unsigned first = LINE_UNITS<Granule> + crew_rank(); first < units; first += BATCH * CREW_SIZE) {
            Granule batch[BATCH];
#pragma unroll
            for (unsigned k = 0; k < BATCH; k++)
                if (first + k * CREW_SIZE < units) batch[k] = Granule::load(slot + (first + k * CREW_SIZE) * Granule::BYTES);
#pragma unroll
            for (unsigned k = 0; k < BATCH; k++) {
                if (first + k * CREW_SIZE >= units) continue;
                complete = complete && batch[k].sequence == sequence;
                deliver(batch[k], first + k * CREW_SIZE, len, to);
            }
        }
        complete = crew_all(complete);
        crew_sync();
        return complete;
    }

    // Does this message end in the first line of its slot?
    template <class Granule>
    static SERVAL_INLINE bool in_line(uint32_t len) {
        return SERVAL_LIKELY(len <= 4 * Granule::WORDS * LINE_UNITS<Granule> - HEADER_BYTES);
    }
#else
    SERVAL_INLINE Look look(uint8_t* to) {
        if (ring.protocol == SERVAL_PROTOCOL_DOORBELL) return look_doorbell(to);
#if SERVAL_HAS_GRANULE16
        if (ring.protocol == SERVAL_PROTOCOL_GRANULE16) return look_granule<Granule16>(to);
#endif
        return look_granule<Granule8>(to);
    }
#endif

    // Called by the block after FOUND: copies the part of the payload that look() did not fetch to `to`.
    SERVAL_INLINE void copy(uint8_t* to) const {
        if (ring.protocol != SERVAL_PROTOCOL_DOORBELL) return;
        const bool in_slot = SERVAL_LIKELY(message.flags == 0);
        const uint8_t* from = in_slot ? ring.slot(next) + HEADER_BYTES : ring.arena + message.arena_offset;
        const unsigned words = (message.len + 7) / 8;
#if !SERVAL_CUDA
        copy_words_out(to, reinterpret_cast<const uint64_t*>(from), words);
#else
        for (unsigned i = (in_slot ? FETCHED_WORDS : 0) + block_rank(); i < words; i += block_size())
            private_store(to + 8 * i, load_relaxed(reinterpret_cast<const uint64_t*>(from) + i));
#endif
    }

#if !SERVAL_CUDA
    // Copies the payload of the message that look() found in a doorbell ring to memory that may be unaligned and has no room
    // beyond its length. For programs that are not blocks.
    SERVAL_INLINE void copy_out(void* memory) const {
        auto* to = static_cast<uint8_t*>(memory);
        const uint8_t* slot = ring.slot(next) + HEADER_BYTES;
        const auto* from = reinterpret_cast<const uint64_t*>(message.flags ? ring.arena + message.arena_offset : slot);
        const unsigned words = message.len / 8, rest = message.len % 8;
        for (unsigned i = 0; i < words; i++) {
            const uint64_t word = load_relaxed(from + i);
            __builtin_memcpy(to + 8 * i, &word, 8);
        }
        if (rest) {
            const uint64_t word = load_relaxed(from + words);
            __builtin_memcpy(to + 8 * words, &word, rest);
        }
    }
#endif

    // Called by the leader once every thread has copied.
    SERVAL_INLINE void advance() { next++; }

    // Called by the leader: the producer may reuse the slots of all messages read.
    SERVAL_INLINE void release() {
        released = next;
        granule_barrier();
#if SERVAL_CUDA
        // A release waits until everything written before has crossed the bus.
        if (ring.protocol != SERVAL_PROTOCOL_DOORBELL) {
            // EDGE RX_RELEASE (release half): none is needed, the units that were read had the sequence of their message.
            store_relaxed(ring.tail, next);
            return;
        }
#endif
        // EDGE RX_RELEASE (release half)
        store_release(ring.tail, next);
    }

  private:
    // Payload words that look() fetches together with a doorbell header.
    static constexpr unsigned FETCHED_WORDS = SERVAL_CUDA ? CREW_SIZE - HEADER_BYTES / 8 : 0;

    // Is there a published message that was not read?
    SERVAL_INLINE Look look_head() {
        if (next == head) {
            // EDGE RX_PUBLISH (acquire half)
            uint64_t seen = crew_first(leader() ? load_acquire(ring.head) : 0);
            if (seen == next) return Look::NONE;
            if (SERVAL_UNLIKELY(seen - next > ring.depth())) return Look::CORRUPT;
            if (leader()) head = seen;
        }
        return Look::FOUND;
    }

#if SERVAL_CUDA
    // One trip for the header and a short payload: every lane loads a word.
    SERVAL_INLINE Look look_doorbell(uint8_t* to, Header& h) {
        const Look look = look_head();
        if (look != Look::FOUND) return look;
        const unsigned lane = crew_rank(), at = 8 * lane - HEADER_BYTES;
        uint64_t word = 0;
        if (8 * lane < HEADER_BYTES + ring.inline_bytes)
            word = load_relaxed(reinterpret_cast<const uint64_t*>(ring.slot(next)) + lane);
        auto lanes_word = [word](unsigned of) { return __shfl_sync(~0u, static_cast<unsigned long long>(word), of); };
        h.token = lanes_word(0);
        h.tag = lanes_word(1);
        h.arena_offset = lanes_word(2);
        h.unpack(lanes_word(3));
        if (lane < HEADER_BYTES / 8) private_store(reinterpret_cast<uint64_t*>(&message) + lane, word);
        if (lane >= HEADER_BYTES / 8 && h.flags == 0 && h.len <= ring.inline_bytes && at < h.len) private_store(to + at, word);
        crew_sync();
        return ring.accepts(h) ? Look::FOUND : Look::CORRUPT;
    }

    template <class Granule>
    static constexpr unsigned LINE_UNITS = SERVAL_LINE_BYTES / Granule::BYTES;

    // The header's n-th eight bytes, from the lanes that have them.
    template <class Granule>
    static SERVAL_INLINE uint64_t header_pair(const Granule& unit, unsigned n) {
        auto word = [&unit](unsigned i) { return __shfl_sync(~0u, unit.data[i % Granule::WORDS], i / Granule::WORDS); };
        const uint32_t low = word(2 * n);
        return low | static_cast<uint64_t>(word(2 * n + 1)) << 32;
    }

    // Stores the words of unit `i` to their destination, the header's into `message`; none beyond `len` rounded up to 4.
    template <class Granule>
    SERVAL_INLINE void deliver(const Granule& unit, unsigned i, uint32_t len, uint8_t* to) {
#pragma unroll
        for (unsigned k = 0; k < Granule::WORDS; k++) {
            const unsigned n = i * Granule::WORDS + k, at = 4 * (n - HEADER_WORDS);
            uint8_t* place = n < HEADER_WORDS ? reinterpret_cast<uint8_t*>(&message) + 4 * n : to + at;
            if (n < HEADER_WORDS || at < len) private_store(place, unit.data[k]);
        }
    }

#else
    SERVAL_INLINE Look look_doorbell(uint8_t*) {
        const Look look = look_head();
        if (look != Look::FOUND) return look;
        const uint64_t* slot = reinterpret_cast<const uint64_t*>(ring.slot(next));
        message.token = load_relaxed(slot);
        message.tag = load_relaxed(slot + 1);
        message.arena_offset = load_relaxed(slot + 2);
        message.unpack(load_relaxed(slot + 3));
        return SERVAL_LIKELY(ring.accepts(message)) ? Look::FOUND : Look::CORRUPT;
    }

    template <class Granule>
    SERVAL_INLINE Look look_granule(uint8_t* to) {
        constexpr unsigned HEADER_UNITS = (HEADER_WORDS + Granule::WORDS - 1) / Granule::WORDS;
        const uint8_t* slot = ring.slot(next);
        const uint32_t sequence = static_cast<uint32_t>(next + 1);

        uint32_t word[HEADER_UNITS * Granule::WORDS];
        for (unsigned i = 0; i < HEADER_UNITS; i++) {
            // EDGE RX_PUBLISH (acquire half): the unit validates itself.
            Granule unit = Granule::load(slot + i * Granule::BYTES);
            if (unit.sequence != sequence) return Look::NONE;
            for (unsigned k = 0; k < Granule::WORDS; k++) word[i * Granule::WORDS + k] = unit.data[k];
        }
        Header h;
        if (!unpack_words(word, h)) return Look::NONE;
        if (SERVAL_UNLIKELY(!ring.accepts(h) || h.flags != 0)) return Look::CORRUPT;

        // Payload words that share a unit with the header, then whole units, then the last one.
        for (unsigned k = HEADER_WORDS; k < HEADER_UNITS * Granule::WORDS; k++)
            if (4 * (k - HEADER_WORDS) < h.len) private_store(to + 4 * (k - HEADER_WORDS), word[k]);
        const unsigned units = units_for<Granule>(h.len);
        for (unsigned i = HEADER_UNITS; i < units; i++) {
            Granule unit = Granule::load(slot + i * Granule::BYTES);
            if (SERVAL_UNLIKELY(unit.sequence != sequence)) return Look::NONE;
            deliver(unit, i, h.len, to);
        }
        message = h;
        return Look::FOUND;
    }

    // False for kind 0: memory that was never written is not a message, whatever its sequence.
    static SERVAL_INLINE bool unpack_words(const uint32_t* word, Header& h) {
        h.token = word[0] | static_cast<uint64_t>(word[1]) << 32;
        h.tag = word[2] | static_cast<uint64_t>(word[3]) << 32;
        h.arena_offset = word[4] | static_cast<uint64_t>(word[5]) << 32;
        h.unpack(word[6] | static_cast<uint64_t>(word[7]) << 32);
        return h.kind != 0;
    }

    // Stores the payload words of unit `i`; none beyond `len` rounded up to 4.
    template <class Granule>
    static SERVAL_INLINE void deliver(const Granule& unit, unsigned i, uint32_t len, uint8_t* to) {
        const unsigned word = i * Granule::WORDS;
        if (SERVAL_LIKELY(word >= HEADER_WORDS && 4 * (word + Granule::WORDS - HEADER_WORDS) <= len)) {
            for (unsigned k = 0; k < Granule::WORDS; k++) private_store(to + 4 * (word + k - HEADER_WORDS), unit.data[k]);
            return;
        }
        for (unsigned k = 0; k < Granule::WORDS; k++)
            if (word + k >= HEADER_WORDS && 4 * (word + k - HEADER_WORDS) < len)
                private_store(to + 4 * (word + k - HEADER_WORDS), unit.data[k]);
    }
#endif
};

// Arena space that a producer waits for: in the order of sending, so that space is reclaimed from the front. A message beyond
// the last entry joins it, which only delays the reclamation of its space.
struct ArenaUse {
    static constexpr unsigned ENTRIES = 16;
    uint64_t after[ENTRIES];  // space is free once the tail has reached this value
    uint64_t bytes[ENTRIES];
    uint32_t first;
    uint32_t count;
    uint64_t cursor;  // offset of the next payload
    uint64_t used;
};

// The writing end of a ring. Begin, reserve until there is room, write, publish, in this order. To publish several messages
// with one store, commit each and then call show().
struct Producer {
    Ring ring;
    uint64_t next;        // messages committed
    uint64_t tail;        // slots known to be released
    Header message;       // in progress
    uint64_t place_end;   // where its payload ends in the arena
    uint64_t place_room;  // arena bytes it uses, including a skipped end; 0 for an inline payload
    ArenaUse use;

    // Called by the leader: starts a message with this header. This end sets arena offset and flags.
    SERVAL_INLINE void begin(const Header& h) {
        message = h;
        place_room = 0;
    }

    // Called by the leader. FOUND: there is a slot, and arena space, for the message. Its length must be at most len_max.
    SERVAL_INLINE Look reserve() {
        if (SERVAL_UNLIKELY(next - tail >= ring.depth())) {
            Look look = refresh();
            if (look != Look::FOUND) return look;
        }
        return SERVAL_LIKELY(message.len <= ring.inline_bytes) ? Look::FOUND : reserve_arena(message.len);
    }

    // Called by the block: writes the message with its payload `data`, the same for every thread. The host reads nothing beyond its
    // length; on CUDA `data` is 8-byte aligned and readable up to a multiple of 8 bytes.
    SERVAL_INLINE void write(const uint8_t* data) const { write(data, block_size()); }
    // The same, called by the first `threads` threads of the block, at least a warp.
    SERVAL_INLINE void write(const uint8_t* data, unsigned threads) const {
        if (ring.protocol == SERVAL_PROTOCOL_DOORBELL) return write_doorbell(data, threads);
#if SERVAL_HAS_GRANULE16
        if (ring.protocol == SERVAL_PROTOCOL_GRANULE16) return write_granule<Granule16>(data, threads);
#endif
        write_granule<Granule8>(data, threads);
    }

#if SERVAL_CUDA
    // Is half of the credit used, according to the last known tail? Only for granule rings: the tail of others needs an ordered load.
    SERVAL_INLINE bool is_low() const {
        return static_cast<uint32_t>(next - tail) > ring.mask / 2 && ring.protocol != SERVAL_PROTOCOL_DOORBELL;
    }
    SERVAL_INLINE uint64_t ask_tail() const {
        // EDGE TX_RELEASE (acquire half): of granule rings, which need no order.
        return load_relaxed(ring.tail);
    }
    // Called by the leader of a granule ring with the result of ask_tail(). Invalid values are left for reserve() to detect.
    SERVAL_INLINE void learn_tail(uint64_t seen) {
        if (next - seen <= ring.depth()) tail = seen;
    }

    // A message of at most CREW_SIZE units before a thread of the crew writes it: all values that a send reads, read at once.
    struct Draft {
        Granule16 unit;
        uint8_t* slot;
        uint64_t* head;
        uint64_t number;
        bool has_slot;
        bool restamps;
    };
    // `data` as for write(), and readable for 4 bytes even without payload. Lanes hold different words: no branch, so
    // that they stay together, and the values to choose from are computed first.
    SERVAL_INLINE Draft draft(const Header& h, const uint8_t* data) const {
        constexpr unsigned WORDS = Granule16::WORDS;
        const unsigned lane = crew_rank();
        Draft d;
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) {
            const uint32_t at = 4 * (lane * WORDS + k) - HEADER_BYTES;  // for the header: huge, or negative as a signed number
            const uint32_t here = private_load<uint32_t>(data + (at < h.len ? at : 0));
            // Bytes of this word beyond the payload become zeros. A shift by 32 bits or more clears all of it.
            const int beyond = max(static_cast<int>(at + 4 - h.len), 0);
            const uint32_t payload = here & __funnelshift_rc(~0u, 0, 8 * beyond);
            const uint32_t first = h.word(k), second = h.word(WORDS + k), third = k < HEADER_WORDS % WORDS ? h.word(2 * WORDS + k) : payload;
            d.unit.data[k] = lane == 0 ? first : lane == 1 ? second : lane == 2 ? third : payload;
        }
        d.slot = ring.slot(next);
        d.head = ring.head;
        d.number = next;
        d.has_slot = next - tail < ring.depth();
        d.restamps = restamps();
        d.unit.sequence = static_cast<uint32_t>(next + 1);
        return d;
    }
    // Called by the crew if there is a slot, without begin and reserve: writes and publishes the message, as write() and publish() do.
    SERVAL_INLINE void send(const Draft& d, uint32_t len) {
        // EDGE TX_PUBLISH (release half): the unit validates itself.
        if (4 * Granule16::WORDS * crew_rank() < HEADER_BYTES + len) d.unit.store(d.slot + crew_rank() * Granule16::BYTES);
        if (SERVAL_UNLIKELY(d.restamps)) stamp<Granule16>(d.slot, units_for<Granule16>(len));
        crew_sync();
        if (leader()) {
            next = d.number + 1;
            // EDGE TX_PUBLISH (release half): for listeners of doorbells
            store_relaxed(d.head, d.number + 1);
        }
    }
#endif

    // Called by the leader once every thread has written: the next message may begin, show() must follow.
    SERVAL_INLINE void commit() {
        if (place_room) take_arena();
        next++;
#if !SERVAL_CUDA
        const uint8_t* slot = ring.slot(next);
        for (unsigned at = 0; at < 128; at += 64) __builtin_prefetch(slot + at, 1);
#endif
    }

    // Called by the leader: makes every committed message visible to the consumer.
    SERVAL_INLINE void show() {
        if (ring.protocol == SERVAL_PROTOCOL_DOORBELL) {
            // EDGE TX_PUBLISH (release half)
            store_release(ring.head, next);
        } else {
            // The consumer does not need the head, the units were published one by one. But on the host other readers use heads to find the
            // rings to poll, and must see the head only after its units.
            granule_barrier();
            // EDGE TX_PUBLISH (release half): for listeners of doorbells
            if (SERVAL_CUDA)
                store_relaxed(ring.head, next);
            else
                store_release(ring.head, next);
        }
    }

    SERVAL_INLINE void publish() {
        commit();
        show();
    }

  private:
    // Reads the tail again. FOUND: a slot is free.
    SERVAL_INLINE Look refresh() {
        // EDGE TX_RELEASE (acquire half)
        uint64_t seen = load_acquire(ring.tail);
        if (SERVAL_UNLIKELY(next - seen > ring.depth())) return Look::CORRUPT;
        tail = seen;
        return next - seen < ring.depth() ? Look::FOUND : Look::NONE;
    }

    inline SERVAL_DEVICE Look reserve_arena(uint32_t len) {
        uint64_t room = (static_cast<uint64_t>(len) + 7) & ~uint64_t{7};
        for (bool fresh = false;; fresh = true) {
            while (use.count && static_cast<int64_t>(tail - use.after[use.first]) >= 0) {
                use.used -= use.bytes[use.first];
                use.first = (use.first + 1) % ArenaUse::ENTRIES;
                use.count--;
            }
            if (use.used == 0) use.cursor = 0;
            bool wraps = use.cursor + room > ring.arena_bytes;
            uint64_t skip = wraps ? ring.arena_bytes - use.cursor : 0;
            if (use.used + skip + room <= ring.arena_bytes) {
                message.arena_offset = wraps ? 0 : use.cursor;
                message.flags = SERVAL_FLAG_ARENA;
                place_end = message.arena_offset + room;
                place_room = skip + room;
                return Look::FOUND;
            }
            if (fresh) return Look::NONE;
            Look look = refresh();
            if (look != Look::FOUND) return look;
        }
    }

    inline SERVAL_DEVICE void take_arena() {
        use.cursor = place_end;
        use.used += place_room;
        unsigned slot = (use.first + use.count) % ArenaUse::ENTRIES;
        if (use.count == ArenaUse::ENTRIES) {
            slot = (use.first + use.count - 1) % ArenaUse::ENTRIES;
            use.bytes[slot] += place_room;
        } else {
            use.bytes[slot] = place_room;
            use.count++;
        }
        use.after[slot] = next + 1;
    }

    SERVAL_INLINE void write_doorbell(const uint8_t* data, [[maybe_unused]] unsigned threads) const {
        uint8_t* slot = ring.slot(next);
        const uint32_t len = message.len, words = len / 8;
        if (leader()) {
            uint64_t* word = reinterpret_cast<uint64_t*>(slot);
            store_relaxed(word, message.token);
            store_relaxed(word + 1, message.tag);
            store_relaxed(word + 2, message.arena_offset);
            store_relaxed(word + 3, message.pack());
        }
        uint64_t* to = reinterpret_cast<uint64_t*>(message.flags ? ring.arena + message.arena_offset : slot + HEADER_BYTES);
#if !SERVAL_CUDA
        copy_words_in(to, data, words);
#else
        for (unsigned i = block_rank(); i < words; i += threads) store_relaxed(to + i, private_load<uint64_t>(data + 8 * i));
#endif
        // The last word is padded with zeros.
        if (len % 8 && leader()) store_relaxed(to + words, private_bytes(data + 8 * words, len % 8));
    }

    template <class Granule>
    SERVAL_INLINE void write_granule(const uint8_t* data, unsigned threads) const {
        uint8_t* slot = ring.slot(next);
        const uint32_t sequence = static_cast<uint32_t>(next + 1), len = message.len;
        const unsigned units = units_for<Granule>(restamps() ? ring.inline_bytes : len);
        for (unsigned i = block_rank(); i < units; i += threads) {
            Granule unit;
            unit.sequence = sequence;
            const unsigned first = i * Granule::WORDS;
            if (!SERVAL_CUDA && SERVAL_LIKELY(first >= HEADER_WORDS && 4 * (first + Granule::WORDS - HEADER_WORDS) <= len)) {
                for (unsigned k = 0; k < Granule::WORDS; k++)
                    unit.data[k] = private_load<uint32_t>(data + 4 * (first + k - HEADER_WORDS));
            } else {
                for (unsigned k = 0; k < Granule::WORDS; k++) unit.data[k] = string_word(data, len, first + k);
            }
            // EDGE TX_PUBLISH (release half): the unit validates itself.
            unit.store(slot + i * Granule::BYTES);
        }
    }

    // In some laps every unit is rewritten, so that an old sequence cannot become valid again.
    SERVAL_INLINE bool restamps() const { return (next >> ring.shift) % SERVAL_RESTAMP_LAPS == 0; }

#if SERVAL_CUDA
    // By the crew: writes the sequence of a slot's units from `first` on.
    template <class Granule>
    SERVAL_CALL void stamp(uint8_t* slot, unsigned first) const {
        Granule unit = {};
        unit.sequence = static_cast<uint32_t>(next + 1);
        for (unsigned i = first + crew_rank(); i < units_for<Granule>(ring.inline_bytes); i += CREW_SIZE)
            unit.store(slot + i * Granule::BYTES);
    }
#endif

    // The n-th word of header and payload, zero beyond the end.
    SERVAL_INLINE uint32_t string_word(const uint8_t* data, uint32_t len, unsigned n) const {
        const uint32_t at = 4 * (n - HEADER_WORDS);
#if SERVAL_CUDA
        // Lanes hold different words: no branch, so that they stay together.
        const uint32_t beyond = n < HEADER_WORDS || at + 4 <= len ? 0 : at + 4 - len;
        const uint8_t* from = n < HEADER_WORDS ? reinterpret_cast<const uint8_t*>(&message) + 4 * n : data + at;
        return beyond < 4 ? private_load<uint32_t>(from) & ~0u >> 8 * beyond : 0;
#else
        if (n < HEADER_WORDS) return message.word(n);
        if (at + 4 <= len) return private_load<uint32_t>(data + at);
        return at < len ? static_cast<uint32_t>(private_bytes(data + at, len - at)) : 0;
#endif
    }
};

}  // namespace detail
}  // namespace serval

#endif
