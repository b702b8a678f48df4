// misbehave: a kernel that breaks its contract intentionally, to test that everything else survives it. It echoes `after`
// messages and then acts as `mode` says, for each message:
//
//   0 behaves correctly (echoes)
//   1 answers twice
//   2 answers with tokens of other requests: random ones, and the right index with a wrong generation
//   3 answers with a length beyond the ring's maximum
//   4 answers with a header of random bytes
//   5 fills its TX slots with random bytes and publishes them
//   6 writes random values to its TX head
//   7 writes random values to its RX tail
//   8 returns
//   9 never returns from its code (for half a minute on CUDA, where nothing could end it)
//  10 takes messages and never answers
//  11 answers with an arena payload outside the arena
//  12 fills the TX ring and overruns it, without waiting for credit
//  13 overwrites its own status words with random values
//  14 sends to its first backend without end and receives no answer
//  15 waits for an answer of its first backend without a request
//
// Modes 3 to 7, 11, 12 write to the region bypassing the library, as broken or hostile accelerator code would.
#include <serval/kernel.h>

namespace serval {
namespace detail {

enum Mode : unsigned {
    BEHAVE = 0,
    TWICE = 1,
    FORGE = 2,
    TOO_LONG_LENGTH = 3,
    RANDOM_HEADER = 4,
    RANDOM_SLOTS = 5,
    RANDOM_HEAD = 6,
    RANDOM_TAIL = 7,
    RETURN = 8,
    HANG = 9,
    SILENT = 10,
    ARENA_OUTSIDE = 11,
    OVERRUN = 12,
    STATUS_WORDS = 13,
    FLOOD = 14,
    WAIT_FOR_NOTHING = 15,
};

struct Inspector {
    uint64_t random = 88172645463325252u;
    SERVAL_DEVICE uint64_t next() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }

    static SERVAL_DEVICE Producer& tx(Mqueue& q) { return q.channel_.tx_; }

    // Publishes a message with this header; its `len` is not checked.
    SERVAL_DEVICE void publish(Mqueue& q, Header h) {
        Producer& p = q.channel_.tx_;
        if (leader()) {
            uint8_t* slot = p.ring.slot(p.next);
            const uint32_t sequence = static_cast<uint32_t>(p.next + 1);
            // Every unit of the slot is made valid, so that only the header is wrong.
            if (p.ring.protocol == SERVAL_PROTOCOL_GRANULE8) {
                for (unsigned i = 0; i < units_for<Granule8>(p.ring.inline_bytes); i++)
                    Granule8{{i < 8 ? h.word(i) : 0}, sequence}.store(slot + 8 * i);
#if SERVAL_HAS_GRANULE16
            } else if (p.ring.protocol == SERVAL_PROTOCOL_GRANULE16) {
                for (unsigned i = 0; i < units_for<Granule16>(p.ring.inline_bytes); i++)
                    Granule16{{word(h, 3 * i), word(h, 3 * i + 1), word(h, 3 * i + 2)}, sequence}.store(slot + 16 * i);
#endif
            } else {
                uint64_t* to = reinterpret_cast<uint64_t*>(slot);
                store_relaxed(to, h.token);
                store_relaxed(to + 1, h.tag);
                store_relaxed(to + 2, h.arena_offset);
                store_relaxed(to + 3, h.pack());
            }
            p.next++;
            // EDGE TX_PUBLISH (release half)
            store_release(p.ring.head, p.next);
        }
        block_sync();
    }
    static SERVAL_DEVICE uint32_t word(const Header& h, unsigned n) { return n < HEADER_WORDS ? h.word(n) : 0; }

    SERVAL_DEVICE Header reply_to(const Message& msg) {
        return {msg.token_, 0, 0, 0, SERVAL_KIND_MESSAGE, SERVAL_STATUS_OK, 0};
    }

    SERVAL_DEVICE void misbehave(unsigned mode, Block& block, Mqueue& q, const Message& msg) {
        Ring& tx_ring = tx(q).ring;
        Header h = reply_to(msg);
        switch (mode) {
            case TWICE:
                publish(q, h);
                publish(q, h);
                break;
            case FORGE:
                h.token = next();
                publish(q, h);
                h.token = msg.token_ ^ (uint64_t{1} << 32);
                publish(q, h);
                break;
            case TOO_LONG_LENGTH:
                h.len = next() % 2 ? ~0u : tx_ring.len_max + 1;
                publish(q, h);
                break;
            case RANDOM_HEADER:
                h.token = next();
                h.tag = next();
                h.arena_offset = next();
                h.unpack(next());
                publish(q, h);
                break;
            case ARENA_OUTSIDE:
                h.len = tx_ring.len_max;
                h.flags = SERVAL_FLAG_ARENA;
                h.arena_offset = next() % 2 ? ~uint64_t{7} : tx_ring.arena_bytes;
                publish(q, h);
                break;
            case OVERRUN:
                for (uint64_t i = 0; i < 3 * tx_ring.depth(); i++) publish(q, h);
                break;
            default:
                if (leader()) scribble(mode, block, q);
                block_sync();
        }
    }

    SERVAL_DEVICE void scribble(unsigned mode, Block& block, Mqueue& q) {
        Producer& p = tx(q);
        if (mode == RANDOM_SLOTS) {
            uint64_t* words = reinterpret_cast<uint64_t*>(p.ring.slots);
            for (uint64_t i = 0; i < p.ring.depth() * p.ring.stride / 8; i++) store_relaxed(words + i, next());
            p.next++;
            // EDGE TX_PUBLISH (release half)
            store_release(p.ring.head, p.next);
        } else if (mode == RANDOM_HEAD) {
            store_relaxed(p.ring.head, next());
        } else if (mode == RANDOM_TAIL) {
            store_relaxed(q.channel_.rx_.ring.tail, next());
        } else if (mode == STATUS_WORDS) {
            uint64_t* words = reinterpret_cast<uint64_t*>(block.words_);
            for (unsigned i = 0; i < sizeof(serval_block_words) / 8; i++) store_relaxed(words + i, next());
        }
    }
};

}  // namespace detail
}  // namespace serval

SERVAL_KERNEL(misbehave) (serval::Block& block, serval::Mqueue& q) {
    using serval::detail::Inspector;
    const unsigned mode = static_cast<unsigned>(block.param("mode", 0));
    const double after = block.param("after", 0);
    Inspector inspector;
    double seen = 0;
    while (auto msg = q.recv(block)) {
        if (mode == serval::detail::BEHAVE || seen++ < after) {
            auto reply = q.reply(block, msg, msg.len());
            if (reply)
                for (unsigned i = block.rank(); i < msg.len(); i += block.size())
                    reply.as<uint8_t>()[i] = msg.as<const uint8_t>()[i];
            q.send(block, reply);
            continue;
        }
        if (mode == serval::detail::RETURN) return;
        if (mode == serval::detail::SILENT) continue;
        if (mode == serval::detail::FLOOD)
            while (q.backends() && q.backend(0).send(block, msg.as<uint8_t>(), msg.len(), 0)) {
            }
        if (mode == serval::detail::WAIT_FOR_NOTHING && q.backends()) q.backend(0).recv(block);
        const uint64_t since = block.now_ns();
        while (mode == serval::detail::HANG)
            if (block.now_ns() - since > 30000000000u && SERVAL_CUDA) return;
        inspector.misbehave(mode, block, q, msg);
    }
}
