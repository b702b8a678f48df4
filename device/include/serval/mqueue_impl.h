// Bodies of the functions of backends and server mqueues, which are declared and documented in kernel.h.
#ifndef SERVAL_MQUEUE_IMPL_H
#define SERVAL_MQUEUE_IMPL_H

#ifndef SERVAL_KERNEL_H
#error "include <serval/kernel.h>"
#endif

namespace serval {

// Backend

inline SERVAL_DEVICE bool Backend::send(Block& block, const void* data, uint32_t len, uint64_t tag) {
    if (len > channel_.tx_.ring.len_max) return false;
    const uint8_t* from = static_cast<const uint8_t*>(data);
#if SERVAL_CUDA
    // Through staging, where it is aligned and padded.
    detail::block_sync();
    for (uint32_t i = detail::block_rank(); i < len; i += detail::block_size()) channel_.out_[i] = from[i];
    from = channel_.out_;
    detail::block_sync();
#endif
    detail::Header h = {0, tag, 0, len, SERVAL_KIND_MESSAGE, SERVAL_STATUS_OK, 0};
    if (!channel_.send(block, h, from)) return false;
    if (detail::leader()) outstanding_++;
    return true;
}

inline SERVAL_DEVICE Message Backend::recv_until(Block& block, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    if (SERVAL_UNLIKELY(outstanding() == 0) && deadline_ns == NO_DEADLINE) {
        if (detail::in_crew() && !block.ended()) block.end(block.stop_word() == SERVAL_STOP_RUN ? SERVAL_REASON_CONTRACT : SERVAL_REASON_STOPPED);
        detail::block_sync();
        return Message();
    }
    if (detail::in_crew()) block.publish_answers();
    Message m = channel_.recv(block, SERVAL_WAIT_BACKEND, deadline_ns, false, false);
    if (m && detail::leader() && outstanding_) outstanding_--;
    return m;
}

inline SERVAL_DEVICE Message Backend::recv(Block& block) { return recv_until(block, NO_DEADLINE); }

inline SERVAL_DEVICE Message Backend::try_recv(Block& block) { return recv_until(block, detail::NOT_WAITING); }

// Mqueue

inline SERVAL_DEVICE bool Mqueue::open([[maybe_unused]] Block& block, const serval_block_args& args, const detail::Place& place,
                                        Backend* backends) {
    backends_ = backends;
    backend_count_ = place.mqueue_count - 1;
    if (!channel_.open(args, place, 0)) return false;
    if (bundles_.open(place.layout)) channel_.bundles_ = &bundles_;
    // Staging beyond that of the mqueues is for bundles.
    const uint64_t mqueues = place.mqueue_count + (detail::find_ring(place, SERVAL_RING_SOCKET_RX, 0) != 0);
    const uint64_t area = 2 * mqueues * args.staging_stride;
    const uint64_t area_bytes = args.staging_bytes < area ? 0 : (args.staging_bytes - area) / 16 * 16;
    bundles_.area = reinterpret_cast<uint8_t*>(args.staging) + area;
    bundles_.area_bytes = static_cast<uint32_t>(area_bytes < 1u << 30 ? area_bytes : 1u << 30);
#if SERVAL_CUDA
    channel_.lines_ = lines_;
    // Room for the longest message, wherever it begins.
    if (channel_.bundles_ && area_bytes < detail::round16(channel_.rx_.ring.len_max) + 32) return false;
    block.received_of_ = &channel_.rx_.next;
    block.sent_of_ = &channel_.tx_.next;
    block.received_from_ = channel_.rx_.next;
    block.sent_from_ = channel_.tx_.next;
#endif
    for (unsigned i = 0; i < backend_count_; i++) {
        if (!backends_[i].channel_.open(args, place, 1 + i)) return false;
        backends_[i].outstanding_ = 0;
        if (!detail::find_staging(place, i, backends_[i].memory_, backends_[i].memory_bytes_)) return false;
    }
    return true;
}

inline SERVAL_DEVICE void Mqueue::close() {
    channel_.release_if(true);
    for (unsigned i = 0; i < backend_count_; i++) backends_[i].channel_.release_if(true);
}

SERVAL_INLINE uint32_t Mqueue::take(Block& block, uint64_t deadline_ns, detail::Wish wish, Message& m) {
    if (detail::in_crew()) block.charge();
#if SERVAL_CUDA
    // The warps of a block arrive one after the other: the crew decides.
    bool is_due = false;
    if (detail::in_crew()) {
        is_due = block.counts_are_due();
        if (SERVAL_UNLIKELY(is_due)) {
            detail::crew_sync();  // all threads have read the previous value
            if (detail::leader()) block.publish_counts_in_time();
        }
    }
    return channel_.recv(block, SERVAL_WAIT_RX, deadline_ns, true, is_due, wish, m);
#else
    const uint32_t count = channel_.recv(block, SERVAL_WAIT_RX, deadline_ns, true, false, wish, m);
    if (count) block.count(block.received_, &block.words_->received, count);
    return count;
#endif
}

SERVAL_INLINE Message Mqueue::recv(Block& block) {
    Message m;
    take(block, NO_DEADLINE, {1, 0}, m);
    return m;
}
SERVAL_INLINE Message Mqueue::try_recv(Block& block) {
    Message m;
    take(block, detail::NOT_WAITING, {1, 0}, m);
    return m;
}
SERVAL_INLINE Message Mqueue::recv_until(Block& block, uint64_t deadline_ns) {
    Message m;
    take(block, deadline_ns == detail::NOT_WAITING ? 1 : deadline_ns, {1, 0}, m);
    return m;
}

SERVAL_INLINE Messages Mqueue::recv_many(Block& block, uint32_t max, uint32_t reply_bytes) {
    Message m;
    Messages all;
    all.count_ = take(block, NO_DEADLINE, {max ? max : 1, reply_bytes}, m);
    all.data_ = m.data_;
    all.token_ = m.token_;
    all.len_ = m.len_;
    all.part_ = m.part_;
    all.step_ = detail::round16(channel_.tx_.ring.len_max) / detail::PART_UNIT;
    all.room_ = reply_bytes == AS_REQUEST ? m.len_ : reply_bytes;
    return all;
}

#if SERVAL_CUDA
// By all threads: ends the block if the kernel cannot continue.
template <class B>
SERVAL_RARE void Mqueue::exit(B& block) {
    detail::block_sync();
    if (detail::in_crew()) {
        block.end(SERVAL_REASON_CONTRACT);
        block.publish_answers();
    }
    detail::block_sync();
    if (detail::leader()) {
        close();
        block.finish();
    }
    asm volatile("exit;");
}
#endif

// Zeroes `bytes` bytes at `data` for replies, with a guard word behind them if there is room below `limit`.
SERVAL_INLINE void Mqueue::prepare(uint8_t* data, uint32_t bytes, uint32_t limit) {
    detail::block_sync();
#if SERVAL_CUDA
#pragma unroll 1
#endif
    for (uint32_t at = 8 * detail::block_rank() + detail::clear_pieces(data, bytes); at < bytes; at += 8 * detail::block_size())
        detail::private_store(data + at, uint64_t{0});
    if (detail::leader() && bytes + 8 <= limit) detail::private_store(data + bytes, detail::GUARD);
    detail::block_sync();
}

// Where replies that are too long are written.
SERVAL_INLINE uint8_t* Mqueue::sink(Block& block, [[maybe_unused]] uint32_t len) {
#if SERVAL_CUDA
    if (!detail::fits_sink(block.args_, len)) exit(block);
#endif
    return reinterpret_cast<uint8_t*>(block.args_.sink);
}

SERVAL_INLINE Reply Mqueue::reply(Block& block, const Message& msg, uint32_t len) {
    Reply r;
    r.token_ = msg.token_;
    r.part_ = msg.part_;
    r.len_ = len;
    r.live_ = true;
    uint8_t* const out = channel_.out_;
    const uint32_t out_bytes = channel_.out_bytes_;
    if (SERVAL_UNLIKELY(len > channel_.tx_.ring.len_max)) {
        r.data_ = sink(block, len);
        return r;
    }
    r.data_ = out;
    r.fits_ = true;
    prepare(out, detail::round8(len), out_bytes);
    return r;
}

SERVAL_INLINE Replies Mqueue::reply_many(Block& block, const Messages& batch, uint32_t len) {
    Replies r;
    r.token_ = batch.token_;
    r.part_ = batch.part_;
    r.step_ = batch.step_;
    r.len_ = len;
    r.count_ = batch.count_;
    r.live_ = true;
    if (SERVAL_UNLIKELY(len > channel_.tx_.ring.len_max || len > batch.room_)) {
        r.data_ = sink(block, len);
        return r;
    }
    r.fits_ = true;
    r.data_ = channel_.out_;
    if (r.count_ > 1) {
        r.data_ = bundles_.replies;
        // Another receive may have used the staging of an earlier batch.
        r.live_ = batch.data_ == channel_.given_ && batch.token_ == channel_.rx_.message.token && r.count_ <= channel_.given_count_;
        if (!r.live_) r.count_ = 1, r.data_ = channel_.out_;
    }
    prepare(r.data_, r.count_ * detail::round16(len), limit(r.data_, r.count_));
    return r;
}

// Bytes from `data` to the end of the staging of `count` replies.
SERVAL_INLINE uint32_t Mqueue::limit(const uint8_t* data, uint32_t count) const {
    return count > 1 ? bundles_.area_bytes - static_cast<uint32_t>(data - bundles_.area) : channel_.out_bytes_;
}

SERVAL_INLINE bool Mqueue::send(Block& block, Reply& reply) {
    Replies now;
    now.data_ = reply.data_;
    now.token_ = reply.token_;
    now.len_ = reply.len_;
    now.count_ = 1;
    now.part_ = reply.part_;
    now.live_ = reply.live_;
    now.fits_ = reply.fits_;
    reply.live_ = false;
    return finish(block, now, detail::round8(now.len_));
}

SERVAL_INLINE bool Mqueue::send_many(Block& block, Replies& replies) {
    const Replies now = replies;
    replies.live_ = false;
    return finish(block, now, now.count_ * detail::round16(now.len_));
}

// Sends the replies in the first `bytes` bytes at their place.
SERVAL_INLINE bool Mqueue::finish(Block& block, const Replies& r, uint32_t bytes) {
    detail::block_sync();  // every thread has written its part
    const detail::Header h = {r.token_, 0, 0, r.len_, SERVAL_KIND_MESSAGE, SERVAL_STATUS_OK, 0};
#if SERVAL_CUDA
    // The loads of the short path are in flight while the guard word is checked.
    const bool is_short = r.fits_ && r.part_ == 0 && channel_.is_short(h);
    detail::Producer::Draft draft = {};
    if (is_short && detail::in_crew()) draft = channel_.tx_.draft(h, r.data_);
#endif
    const bool intact = !r.fits_ || bytes + 8 > limit(r.data_, r.count_) || detail::private_load<uint64_t>(r.data_ + bytes) == detail::GUARD;
    if (SERVAL_UNLIKELY(!r.live_ || !intact)) {
        if (detail::in_crew()) block.end(SERVAL_REASON_CONTRACT);
        detail::block_sync();
        return false;
    }
    if (SERVAL_UNLIKELY(!r.fits_)) return send_drops(block, r.token_, r.part_, r.step_, r.count_, TOO_LONG);
#if SERVAL_CUDA
    if (SERVAL_LIKELY(is_short)) return channel_.tell_block(detail::in_crew() && channel_.send_short(block, h, draft));
#endif
    if (SERVAL_UNLIKELY(r.part_)) return channel_.answer(block, r.token_, r.part_, r.data_, r.len_, r.count_);
    if (SERVAL_UNLIKELY(!channel_.transmit(block, h, r.data_))) return false;
    if (!SERVAL_CUDA) block.count(block.sent_, &block.words_->sent);
    return true;
}

SERVAL_INLINE bool Mqueue::drop_many(Block& block, const Messages& batch, Status reason) {
    return send_drops(block, batch.token_, batch.part_, batch.step_, batch.count_, reason);
}

SERVAL_INLINE bool Mqueue::drop(Block& block, const Message& msg, Status reason) {
    return send_drops(block, msg.token_, msg.part_, 0, 1, reason);
}

// A slot for each of `count` messages, whose parts are `step` apart.
SERVAL_CALL bool Mqueue::send_drops(Block& block, uint64_t token, uint32_t part, uint32_t step, uint32_t count, Status reason) {
    for (; count > 0; count--, token++, part += step) {
        detail::block_sync();
        // EDGE BUNDLE_RETURN (release half)
        if (SERVAL_UNLIKELY(part) && channel_.tx_.ring.protocol != SERVAL_PROTOCOL_DOORBELL) detail::fence_release();
        const detail::Header h = {token, 0, 0, 0, SERVAL_KIND_DROP, reason, 0};
        if (!channel_.transmit(block, h, channel_.out_)) return false;
        if (detail::leader()) {
            block.count(block.dropped_, &block.words_->dropped);
            const uint32_t i = token % SERVAL_BUNDLE_MAX;
            if (SERVAL_UNLIKELY(part) && bundles_.is_current(token - i)) bundles_.finish(i, 1);
        }
    }
    return true;
}

}  // namespace serval

#endif
