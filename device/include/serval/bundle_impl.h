// Bundles: the part of an mqueue's channel that hands out their messages and collects their replies. The concepts are in bundle.h.
#ifndef SERVAL_BUNDLE_IMPL_H
#define SERVAL_BUNDLE_IMPL_H

#ifndef SERVAL_KERNEL_H
#error "include <serval/kernel.h>"
#endif

namespace serval {
namespace detail {

// By the crew, after a slot was found that is no message: opens a bundle, or ends the block.
template <class B>
SERVAL_INLINE void Channel::open_bundle(B& block) {
    const Header& h = rx_.message;
    bool good = bundles_ && h.kind == SERVAL_KIND_BUNDLE && h.flags == 0 && h.len == sizeof(serval_bundle);
    if (good) {
        if (!SERVAL_CUDA) rx_.copy(in_);
        // EDGE RX_BUNDLE (acquire half): with doorbells the head was loaded in this order.
        if (rx_.ring.protocol != SERVAL_PROTOCOL_DOORBELL) fence_acquire();
        good = crew_first(leader() && bundles_->accept(h.token, in_, rx_.ring, tx_.ring));
    }
    if (!good) {
        if (leader()) in_path_ = rx_.ring.protocol;
        return block.end(SERVAL_REASON_RING_CORRUPT);
    }
    if (leader()) {
        bundles_->since_ns = block.now_ns();
        in_path_ = PATH_BUNDLE;
        rx_.next++;
#if SERVAL_CUDA
        block.received_from_++;
#else
        rx_.release();
#endif
    }
    crew_sync();
}

// Called in step, with a slot that is no message, or a bundle open: its next message, or false if the ring is next or the block has ended. A message that is returned by a function that is not
// inline would be in local memory on CUDA, also if it comes from a ring: so this function is inline.
SERVAL_INLINE bool Channel::take_from_bundle(Block& block, Message& m) {
    if (!next_of_bundle(block)) return false;
    m.data_ = in_;
    m.token_ = bundles_->given_token;
    m.len_ = bundles_->given_len;
    m.part_ = bundles_->given_part;
    return true;
}

// Called in step: the next message is in staging. False if there is none, or the service stops immediately.
template <class B>
SERVAL_APART bool Channel::next_of_bundle(B& block) {
    if (in_path_ == PATH_SLOT) {
        block_sync();  // every thread has read the path
        if (in_crew()) open_bundle(block);
        block_sync();
        if (in_path_ != PATH_BUNDLE) return false;
    }
    Bundles& b = *bundles_;
    if (!b.has_more()) {
        leave_bundle(block);
        return false;
    }
    // On CUDA reading the stop word is a trip over the bus.
    if (!SERVAL_CUDA || b.slow) {
        bool goes = true;
        if (in_crew() && (block.ended() || block.stop_word() >= SERVAL_STOP_NOW)) {
            block.end(SERVAL_REASON_STOPPED);
            goes = false;
        }
        if (!tell_block(goes)) return false;
    }
    const uint32_t i = b.given, len = b.len_of(i);
#if SERVAL_CUDA
    if (i >= b.staged) stage_bundle(i);
    copy_staged(b.place_of(i), len);
#else
    copy_bytes_out(in_, b.pools.layout.region + b.place_of(i), len);
#endif
    block_sync();  // every thread has read the values that change here
    if (leader()) {
        b.given = i + 1;
        b.given_token = b.token + i;
        b.given_len = len;
        b.given_part = b.part_of(i, tx_.ring);
#if SERVAL_CUDA
        block.received_from_--;
#endif
    }
    block_sync();
    return true;
}

#if SERVAL_CUDA
// Called in step: fetches message `i` and as many of the following ones as there is room for, with many loads in flight at once. The registers
// of a larger batch would be taken from single messages.
inline SERVAL_DEVICE void Channel::stage_bundle(uint32_t i) {
    constexpr unsigned UNIT = Granule16::BYTES, BATCH = 4;
    Bundles& b = *bundles_;
    const uint64_t place = b.place_of(i), from = place / UNIT * UNIT;
    const uint32_t stride = b.it.stride, skew = static_cast<uint32_t>(place - from), rest = b.it.count - i;
    const uint32_t fit = stride ? 1 + (b.area_bytes - skew - b.it.len) / stride : rest;
    const uint32_t count = fit < rest ? fit : rest;
    const uint32_t units = (skew + (count - 1) * stride + b.len_of(i + count - 1) + UNIT - 1) / UNIT;
    const uint8_t* source = b.pools.layout.region + from;
    for (uint32_t first = block_rank(); first < units; first += BATCH * block_size()) {
        Granule16 batch[BATCH];
#pragma unroll
        for (unsigned k = 0; k < BATCH; k++)
            if (first + k * block_size() < units) batch[k] = Granule16::load(source + (first + k * block_size()) * UNIT);
#pragma unroll
        for (unsigned k = 0; k < BATCH; k++)
            if (first + k * block_size() < units) private_store(b.area + (first + k * block_size()) * UNIT, batch[k]);
    }
    block_sync();
    if (leader()) {
        b.staged = i + count;
        b.staged_from = from;
    }
    block_sync();
}

// Called in step: copies a message that was fetched to where a kernel reads it.
inline SERVAL_DEVICE void Channel::copy_staged(uint64_t place, uint32_t len) {
    const unsigned skew = place % 8, shift = 8 * skew;
    const uint8_t* words = bundles_->area + (place - skew - bundles_->staged_from);
    for (uint32_t at = 8 * block_rank(); at < len; at += 8 * block_size()) {
        uint64_t value = private_load<uint64_t>(words + at) >> shift;
        if (skew && at + 8 - skew < len) value |= private_load<uint64_t>(words + at + 8) << (64 - shift);
        private_store(in_ + at, value);
    }
}
#endif

// Called in step, once every message of the bundle is handed out: receives poll the ring again.
template <class B>
SERVAL_INLINE void Channel::leave_bundle(B& block) {
    block_sync();
    if (in_crew()) {
        block.publish_answers();
        if (leader()) in_path_ = rx_.ring.protocol;
    }
    block_sync();
}

// Called in step: the reply to the message of a bundle, whose part of the area begins at `part`.
template <class B>
SERVAL_INLINE bool Channel::answer(B& block, uint64_t token, uint32_t part, const uint8_t* data, uint32_t len) {
    Bundles& b = *bundles_;
    const uint32_t i = token % SERVAL_BUNDLE_MAX;
    const uint64_t first_token = token - i;
    const bool current = b.is_current(first_token);
    // A second reply is the engine's to refuse; it must not overwrite the reply of another message.
    if (current && (b.done >> i & 1)) len = 0;
    const bool appends = current && i == b.expected;
    const uint64_t at = appends ? b.cursor : static_cast<uint64_t>(part) * PART_UNIT;
    const bool extends = b.answers_count != 0 && b.answers_token == first_token && b.answers.len == len && b.answers.answered >> i == 0 &&
                         at == b.answers.offset + static_cast<uint64_t>(b.answers_count) * b.answers.stride;
    const bool publishes = b.answers_count != 0 && !extends;
    block_sync();  // every thread has read the values that change here
    if (publishes && !tell_block(in_crew() && publish_answers(block))) return false;
    write_reply(b.pools.layout.region + at, data, len);
    block_sync();
    if (leader()) {
        if (!extends) {
            const bool ascends = current && i >= b.expected;
            b.answers.offset = at;
            b.answers.len = len;
            b.answers.stride = ascends ? round16(len) : round16(tx_.ring.len_max);
            b.answers_token = first_token;
            out_path_ = PATH_BUNDLE;
            block.answering_ = this;
        }
        b.answers.answered |= uint64_t{1} << i;
        b.answers_count++;
        if (current && i >= b.expected) {
            b.cursor = at + round16(len);
            b.expected = i + 1;
            if (((i + 1) & i) == 0) b.slow = block.now_ns() - b.since_ns > BUNDLE_PATIENCE_NS * (i + 1);
        }
        if (current) b.finish(i);
    }
    crew_sync();
    if (!in_crew()) return tell_block(true);
    return tell_block((!b.slow && !(current && i + 1 == b.it.count)) || publish_answers(block));
}

// Called in step: writes `len` bytes, which on CUDA are readable up to a multiple of 8, to the area.
SERVAL_INLINE void Channel::write_reply(uint8_t* to, const uint8_t* data, uint32_t len) {
#if SERVAL_CUDA
    const uint32_t units = len / Granule16::BYTES, words = len / 8;
    for (uint32_t i = block_rank(); i < units; i += block_size())
        private_load<Granule16>(data + i * Granule16::BYTES).store(to + i * Granule16::BYTES);
    uint64_t* const word = reinterpret_cast<uint64_t*>(to);
    if (leader() && words % 2) store_relaxed(word + words - 1, private_load<uint64_t>(data + 8 * (words - 1)));
    if (leader() && len % 8) store_relaxed(word + words, private_bytes(data + 8 * words, len % 8));
#else
    uint64_t* const word = reinterpret_cast<uint64_t*>(to);
    copy_words_in(word, data, len / 8);
    if (len % 8) store_relaxed(word + len / 8, private_bytes(data + len / 8 * 8, len % 8));
#endif
}

// By the crew: publishes the completion in progress. False if the service stops before there is room for it.
template <class B>
SERVAL_APART bool Channel::publish_answers(B& block) {
    Bundles& b = *bundles_;
    const Header h = {b.answers_token, 0, 0, sizeof b.answers, SERVAL_KIND_BUNDLE, SERVAL_STATUS_OK, 0};
    const uint8_t* const payload = reinterpret_cast<const uint8_t*>(&b.answers);
    const uint64_t count = b.answers_count;
    crew_sync();
    if (leader()) tx_.begin(h);
    crew_sync();
    // A block that broke its contract still publishes what it has answered, if there is room.
    const bool sent = block.broken() ? reserve() == Look::FOUND : await_credit(block);
    if (sent) {
        // EDGE TX_BUNDLE (release half): with doorbells the head is stored in this order.
        // EDGE BUNDLE_RETURN (release half)
        if (tx_.ring.protocol != SERVAL_PROTOCOL_DOORBELL) fence_release();
        tx_.write(payload, CREW_SIZE);
        crew_sync();
        if (leader()) {
            tx_.publish();
            if (each_slot_counts()) release_if(false);
#if SERVAL_CUDA
            block.sent_from_ += 1 - count;
#else
            block.count(block.sent_, &block.words_->sent, count);
#endif
        }
    }
    crew_sync();
    if (leader()) {
        b.answers.answered = 0;
        b.answers_count = 0;
        out_path_ = tx_.ring.protocol;
        if (!b.has_more()) in_path_ = rx_.ring.protocol;
        block.answering_ = nullptr;
    }
    crew_sync();
    return sent;
}

}  // namespace detail
}  // namespace serval

#endif
