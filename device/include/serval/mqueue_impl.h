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
#if SERVAL_CUDA
    channel_.lines_ = lines_;
    // Staging beyond that of the mqueues is for bundles.
    const uint64_t mqueues = place.mqueue_count + (detail::find_ring(place, SERVAL_RING_SOCKET_RX, 0) != 0);
    const uint64_t area = 2 * mqueues * args.staging_stride;
    const uint64_t area_bytes = args.staging_bytes < area ? 0 : (args.staging_bytes - area) / 16 * 16;
    bundles_.area = reinterpret_cast<uint8_t*>(args.staging) + area;
    bundles_.area_bytes = static_cast<uint32_t>(area_bytes < 1u << 30 ? area_bytes : 1u << 30);
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
    }
    return true;
}

inline SERVAL_DEVICE void Mqueue::close() {
    channel_.release_if(true);
    for (unsigned i = 0; i < backend_count_; i++) backends_[i].channel_.release_if(true);
}

SERVAL_INLINE Message Mqueue::take(Block& block, uint64_t deadline_ns) {
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
    return channel_.recv(block, SERVAL_WAIT_RX, deadline_ns, true, is_due);
#else
    Message m = channel_.recv(block, SERVAL_WAIT_RX, deadline_ns, true, false);
    if (m) block.count(block.received_, &block.words_->received);
    return m;
#endif
}

SERVAL_INLINE Message Mqueue::recv(Block& block) { return take(block, NO_DEADLINE); }
SERVAL_INLINE Message Mqueue::try_recv(Block& block) { return take(block, detail::NOT_WAITING); }
SERVAL_INLINE Message Mqueue::recv_until(Block& block, uint64_t deadline_ns) {
    return take(block, deadline_ns == detail::NOT_WAITING ? 1 : deadline_ns);
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

SERVAL_INLINE Reply Mqueue::reply([[maybe_unused]] Block& block, const Message& msg, uint32_t len) {
    Reply r;
    r.token_ = msg.token_;
    r.part_ = msg.part_;
    r.len_ = len;
    r.live_ = true;
    uint8_t* const out = channel_.out_;
    const uint32_t out_bytes = channel_.out_bytes_;
    if (SERVAL_UNLIKELY(len > channel_.tx_.ring.len_max)) {
#if SERVAL_CUDA
        if (!detail::fits_sink(block.args_, len)) exit(block);
#endif
        r.data_ = reinterpret_cast<uint8_t*>(block.args_.sink);
        return r;
    }
    r.data_ = out;
    r.fits_ = true;
    const uint32_t room = detail::round8(len);
    detail::block_sync();
#if SERVAL_CUDA
#pragma unroll 1
#endif
    for (uint32_t at = 8 * detail::block_rank() + detail::clear_pieces(out, room); at < room; at += 8 * detail::block_size())
        detail::private_store(out + at, uint64_t{0});
    if (detail::leader() && room + 8 <= out_bytes) detail::private_store(out + room, detail::GUARD);
    detail::block_sync();
    return r;
}

SERVAL_INLINE bool Mqueue::send(Block& block, Reply& reply) {
    detail::block_sync();  // every thread has written its part
    if (SERVAL_UNLIKELY(reply.part_)) {
        const bool live = reply.live_;
        reply.live_ = false;
        return send_of_bundle(block, reply.token_, reply.part_, reply.data_, reply.len_, reply.fits_, live);
    }
    const detail::Header h = {reply.token_, 0, 0, reply.len_, SERVAL_KIND_MESSAGE, SERVAL_STATUS_OK, 0};
    const uint32_t room = detail::round8(reply.len_);
#if SERVAL_CUDA
    // The loads of the short path are in flight while the guard word is checked.
    const bool is_short = reply.fits_ && channel_.is_short(h);
    detail::Producer::Draft draft = {};
    if (is_short && detail::in_crew()) draft = channel_.tx_.draft(h, reply.data_);
#endif
    const bool intact = !reply.fits_ || room + 8 > channel_.out_bytes_ ||
                        detail::private_load<uint64_t>(reply.data_ + room) == detail::GUARD;
    if (SERVAL_UNLIKELY(!reply.live_ || !intact)) {
        if (detail::in_crew()) block.end(SERVAL_REASON_CONTRACT);
        detail::block_sync();
        return false;
    }
    reply.live_ = false;
    if (SERVAL_UNLIKELY(!reply.fits_)) return send_drop(block, reply.token_, 0, TOO_LONG);
#if SERVAL_CUDA
    const bool sent = is_short ? channel_.tell_block(detail::in_crew() && channel_.send_short(block, h, draft))
                               : channel_.transmit(block, h, reply.data_);
#else
    const bool sent = channel_.send(block, h, reply.data_);
#endif
    if (SERVAL_UNLIKELY(!sent)) return false;
    if (!SERVAL_CUDA) block.count(block.sent_, &block.words_->sent);
    return true;
}

// As send(), apart from the registers of single messages.
template <class B>
SERVAL_APART bool Mqueue::send_of_bundle(B& block, uint64_t token, uint32_t part, const uint8_t* data, uint32_t len, bool fits, bool live) {
    const uint32_t room = detail::round8(len);
    const bool intact = !fits || room + 8 > channel_.out_bytes_ || detail::private_load<uint64_t>(data + room) == detail::GUARD;
    if (!live || !intact) {
        if (detail::in_crew()) block.end(SERVAL_REASON_CONTRACT);
        detail::block_sync();
        return false;
    }
    return fits ? channel_.answer(block, token, part, data, len) : send_drop(block, token, part, TOO_LONG);
}

SERVAL_INLINE bool Mqueue::drop(Block& block, const Message& msg, Status reason) {
    return send_drop(block, msg.token_, msg.part_, reason);
}

SERVAL_CALL bool Mqueue::send_drop(Block& block, uint64_t token, uint32_t part, Status reason) {
    detail::block_sync();
    // EDGE BUNDLE_RETURN (release half)
    if (SERVAL_UNLIKELY(part) && channel_.tx_.ring.protocol != SERVAL_PROTOCOL_DOORBELL) detail::fence_release();
    detail::Header h = {token, 0, 0, 0, SERVAL_KIND_DROP, reason, 0};
    if (!channel_.send(block, h, channel_.out_)) return false;
    if (detail::leader()) {
        block.count(block.dropped_, &block.words_->dropped);
        const uint32_t i = token % SERVAL_BUNDLE_MAX;
        if (SERVAL_UNLIKELY(part) && bundles_.is_current(token - i)) bundles_.finish(i);
    }
    return true;
}

}  // namespace serval

#endif
