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
    if (leader()) has_slot_ = false;
    if (!good) return block.end(SERVAL_REASON_RING_CORRUPT);
    if (leader()) {
        in_path_ = PATH_BUNDLE;
        rx_.next++;
#if SERVAL_CUDA
        block.received_from_++;
#else
        bundles_->since_ns = block.now_ns();
        rx_.release();
#endif
    }
    crew_sync();
}

// Called in step, with a slot that is no message, or a bundle open: hands out its next messages, as rx_.message, `given_` and `given_count_` say.
// What a function that is not inline returns by address would be in local memory on CUDA.
template <class B>
SERVAL_INLINE Found Channel::take_from_bundle(B& block, bool asks, Wish wish) {
    if (in_path_ != PATH_BUNDLE) {
        block_sync();  // every thread has read the path
        if (in_crew()) open_bundle(block);
        block_sync();
        if (in_path_ != PATH_BUNDLE) return Found::NOTHING;
    }
    Bundles& b = *bundles_;
    if (SERVAL_UNLIKELY(!b.has_more())) {
        block_sync();  // every thread has read the path
        if (in_crew()) block.publish_answers();
        if (leader()) in_path_ = rx_.ring.protocol;
        block_sync();
        return Found::RING;
    }
    // On CUDA reading the stop word is a trip over the bus.
    if (in_crew() && SERVAL_UNLIKELY(!SERVAL_CUDA || asks) && !block.ended()) {
        if (SERVAL_CUDA) block.watch_engine();
        if (!block.broken() && block.stop_word() >= SERVAL_STOP_NOW) block.end(SERVAL_REASON_STOPPED);
    }
    block_sync();
    if (block.ended()) return Found::NOTHING;
    const uint32_t i = b.given, len = b.len_of(i);
    const uint32_t room = wish.max == 1 ? 0 : round16(smaller(wish.reply_bytes == AS_REQUEST ? b.it.len : wish.reply_bytes, tx_.ring.len_max));
    // Messages of a batch have one length.
    uint32_t count = b.it.last_len == b.it.len || i + 1 == b.it.count ? b.it.count - i : b.it.count - 1 - i;
    count = smaller(count, wish.max);
#if SERVAL_CUDA
    if (i >= b.staged_end || (count > 1 && b.reply_room < room)) stage(i, room);
    count = smaller(count, b.staged_end - i);
    block_sync();  // every thread has read the values that change here
#else
    count = stage(i, count, room);
#endif
    if (leader()) {
        b.given = i + count;
        given_ = b.staged + (i - b.staged_first) * b.pitch();
        given_count_ = count;
        rx_.message = {b.token + i, 0, b.part_of(i, tx_.ring), len, SERVAL_KIND_MESSAGE, SERVAL_STATUS_OK, 0};
        if (!b.has_more() && b.answers_count == 0) in_path_ = rx_.ring.protocol;
#if SERVAL_CUDA
        block.received_from_ -= count;
#endif
    }
    block_sync();
    return Found::MESSAGE;
}

#if SERVAL_CUDA
// Called in step: fetches message `i` and as many of the following ones as there is room for in staging, with `room` bytes for a reply to each.
SERVAL_CALL void Channel::stage(uint32_t i, uint32_t room) {
    block_sync();  // every thread has read the values that change here
    if (leader()) bundles_->plan(i, room, in_);
    block_sync();
    bundles_->fetch();
}

// By the leader: decides what is fetched and where to.
SERVAL_CALL void Bundles::plan(uint32_t i, uint32_t room, uint8_t* in) {
    constexpr unsigned UNIT = Granule16::BYTES;
    const uint32_t bytes = pitch();
    stride = it.count == 1 ? bytes : it.stride;
    const uint64_t place = place_of(i);
    skew = place % UNIT;
    // Messages that are not in the order of staging pass through its end. Words are read there that begin in them.
    const bool straight = stride == bytes && skew == 0;
    const uint32_t margin = straight ? 0 : 4 * UNIT, per_message = bytes + room + (straight ? 0 : smaller(stride, area_bytes));
    uint32_t count = it.count - i;
    if (per_message) count = smaller(count, area_bytes < margin ? 0 : (area_bytes - margin) / per_message);
    staged = raw = area;
    reply_room = room;
    if (count == 0) {
        // One message, whose reply has a buffer of its own.
        count = 1;
        reply_room = 0;
        if (!straight) staged = in;
    } else if (!straight) {
        raw = area + (area_bytes - count * stride - 3 * UNIT) / UNIT * UNIT;
    }
    staged_first = i;
    staged_end = i + count;
    replies = area + count * bytes;
    source = pools.layout.region + place - skew;
    units = (skew + (count - 1) * stride + it.len + UNIT - 1) / UNIT;
}

// By the block: fetches what was planned, with many loads in flight at once.
SERVAL_CALL void Bundles::fetch() const {
    const uint32_t step = block_size() * Granule16::BYTES, end = units * Granule16::BYTES;
    const uint8_t* const from = source;
    uint8_t* const to = raw;
    if (is_shared(to)) {
        for (uint32_t at = block_rank() * Granule16::BYTES; at < end; at += step) copy_async(to + at, from + at);
        wait_for_copies();
    } else {
        for (uint32_t at = block_rank() * Granule16::BYTES; at < end; at += step) private_store(to + at, Granule16::load(from + at));
    }
    block_sync();
    if (staged == raw) return;
    // Copies it to where each message begins at a multiple of 16 bytes.
    const uint32_t words = pitch() / 8, all = (staged_end - staged_first) * words;
    for (uint32_t k = block_rank(); k < all; k += block_size()) {
        const uint32_t at = skew + k / words * stride + k % words * 8, shift = at % 8 * 8;
        const uint8_t* const from = raw + at / 8 * 8;
        uint64_t value = private_load<uint64_t>(from) >> shift;
        if (shift) value |= private_load<uint64_t>(from + 8) << (64 - shift);
        private_store(staged + k * 8, value);
    }
    block_sync();
}
#else
// Copies `count` messages from `i` on, or as many as there is room for in staging, with `room` bytes for a reply to each. Returns how many.
inline uint32_t Channel::stage(uint32_t i, uint32_t count, uint32_t room) {
    Bundles& b = *bundles_;
    const uint32_t stride = b.it.stride, pitch = b.pitch();
    const uint8_t* const from = b.pools.layout.region + b.place_of(i);
    if (count > 1 && pitch + room) count = smaller(count, b.area_bytes / (pitch + room));
    b.staged_first = i;
    if (count <= 1) {
        b.staged = in_;
        copy_bytes_out(in_, from, b.len_of(i));
        return 1;
    }
    b.staged = b.area;
    b.replies = b.area + count * pitch;
    b.reply_room = room;
    if (stride == pitch && b.it.offset % 16 == 0) {
        // Whole units of 16 bytes, which the pool has.
        copy_words_out(b.area, reinterpret_cast<const uint64_t*>(from), count * pitch / 8);
    } else {
        for (uint32_t k = 0; k < count; k++) copy_bytes_out(b.area + k * pitch, from + k * uint64_t{stride}, b.it.len);
    }
    return count;
}
#endif

// Called in step: the replies to `count` messages of a bundle, of `len` bytes each, at `data` in a distance of whole units of 16 bytes. `part` is that of the
// first message.
template <class B>
SERVAL_APART bool Channel::answer(B& block, uint64_t token, uint32_t part, const uint8_t* data, uint32_t len, uint32_t count) {
    Bundles& b = *bundles_;
    const uint32_t i = token % SERVAL_BUNDLE_MAX;
    const uint64_t first_token = token - i, bits = Bundles::bits(i, count);
    const bool current = b.is_current(first_token);
    // A second reply is the engine's to refuse; it must not overwrite the reply of another message.
    if (current && (b.done & bits)) len = 0;
    const uint32_t pitch = round16(len), part_bytes = round16(tx_.ring.len_max);
    const bool ascends = current && i >= b.expected;
    const uint64_t at = ascends && i == b.expected ? b.cursor : static_cast<uint64_t>(part) * PART_UNIT;
    const bool extends = b.answers_count != 0 && b.answers_token == first_token && b.answers.len == len && b.answers.answered >> i == 0 &&
                         at == b.answers.offset + static_cast<uint64_t>(b.answers_count) * b.answers.stride && (count == 1 || b.answers.stride == pitch);
    const bool publishes = b.answers_count != 0 && !extends;
    // The rest of the bundle may follow.
    bool waits = current && b.has_more();
    block_sync();  // every thread has read the values that change here
    if (publishes && !tell_block(in_crew() && publish_answers(block))) return false;
    write_replies(b.pools.layout.region + at, data, len, count);
    block_sync();
    if (leader()) {
        if (!extends) {
            b.answers.offset = at;
            b.answers.len = len;
            b.answers.stride = ascends || count > 1 ? pitch : part_bytes;
            b.answers_token = first_token;
            out_path_ = PATH_BUNDLE;
            block.answering_ = this;
#if SERVAL_CUDA
            b.answers_since = static_cast<uint32_t>(clock64());
#endif
        }
        b.answers.answered |= bits;
        b.answers_count += count;
        if (ascends) {
            b.cursor = at + count * pitch;
            b.expected = i + count;
#if SERVAL_CUDA
            waits = waits && static_cast<uint32_t>(clock64()) - b.answers_since < BUNDLE_PATIENCE_CYCLES;
#else
            const uint32_t passed = i + count;
            if ((passed & i) == 0) b.slow = block.now_ns() - b.since_ns > BUNDLE_PATIENCE_NS * passed;
            waits = waits && !b.slow;
#endif
        }
        if (current) b.finish(i, count);
    }
    if (in_crew()) waits = crew_first(waits);
    return tell_block(!in_crew() || waits || publish_answers(block));
}

// Called in step: writes `count` replies of `len` bytes to the area. On the host only their bytes are read; on CUDA `data` is readable up to
// whole units.
SERVAL_INLINE void Channel::write_replies(uint8_t* to, const uint8_t* data, uint32_t len, uint32_t count) {
    const uint32_t bytes = count * round16(len);
#if SERVAL_CUDA
    // What a unit has beyond the reply is not read by the engine.
    for (uint32_t at = block_rank() * Granule16::BYTES; at < bytes; at += block_size() * Granule16::BYTES)
        private_load<Granule16>(data + at).store(to + at);
#else
    const uint32_t exact = bytes - (round16(len) - len);
    uint64_t* const word = reinterpret_cast<uint64_t*>(to);
    copy_words_in(word, data, exact / 8);
    if (exact % 8) store_relaxed(word + exact / 8, private_bytes(data + exact / 8 * 8, exact % 8));
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
