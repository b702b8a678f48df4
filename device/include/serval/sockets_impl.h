// Bodies of the functions declared and documented in sockets.h, and SERVAL_SOCKET_KERNEL.
//
// Waiting for anything is waiting for the next message of the engine in the socket mqueue: a completion or an event. Bytes are looked for in the
// rings first, so an event only ends a wait and is not stored. The leader writes the state; the other threads get results through tell().
#ifndef SERVAL_SOCKETS_IMPL_H
#define SERVAL_SOCKETS_IMPL_H

#ifndef SERVAL_SOCKETS_H
#error "include <serval/sockets.h>"
#endif

namespace serval {
namespace detail {

// The result of an accept or a connect: status, slot and generation in one word, which is never 0.
SERVAL_INLINE uint64_t pack_result(const serval_socket_message& message) {
    if (message.value != SERVAL_STATUS_OK) return message.value & 0xffu ? message.value & 0xffu : SERVAL_STATUS_RESET;
    return static_cast<uint64_t>(message.slot) << 8 | static_cast<uint64_t>(message.generation) << 32;
}

}  // namespace detail

SERVAL_INLINE uint64_t Sockets::tell(uint64_t value) {
    if (!SERVAL_CUDA) return value;
    detail::block_sync();
    if (detail::leader()) told_ = value;
    detail::block_sync();
    return told_;
}

inline SERVAL_DEVICE bool Sockets::open_stream(detail::StreamRing& ring, const detail::Place& place, unsigned kind, uint32_t index) {
    for (uint32_t i = 0; i < place.count; i++) {
        const uint64_t entry = place.layout.entry(uint64_t{place.first} + i);
        const detail::EntryName name = place.layout.name(uint64_t{place.first} + i);
        if (name.kind != kind || name.index != index || name.version != SERVAL_RING_VERSION_STREAM) continue;
        serval_stream_entry e;
        detail::fetch(e, place.layout.region + entry);
        const bool power_of_two = e.capacity != 0 && (e.capacity & (e.capacity - 1)) == 0;
        if (!power_of_two || e.capacity < SERVAL_STREAM_BYTES_MIN || e.capacity > SERVAL_STREAM_BYTES_MAX) return false;
        if (e.offset % SERVAL_LINE_BYTES || !detail::within(e.offset, SERVAL_STREAM_DATA + e.capacity, place.layout.size)) return false;
        ring.words = place.layout.region + e.offset;
        ring.capacity = e.capacity;
        return true;
    }
    return false;
}

// By the leader.
inline SERVAL_DEVICE bool Sockets::open(Block& block) {
    const serval_block_args& args = block.args_;
    detail::Place place;
    if (!detail::find_place(place, args, true)) return false;
    const unsigned number = place.mqueue_count;
    if (args.staging_bytes < 2ull * (number + 1) * args.staging_stride) return false;
    if (!channel_.open_rings(args, place, number, SERVAL_RING_SOCKET_RX, SERVAL_RING_SOCKET_TX, 0)) return false;
    slot_count_ = 0;
    for (uint32_t i = 0; i < place.count; i++) slot_count_ += place.layout.name(uint64_t{place.first} + i).kind == SERVAL_RING_STREAM_RX;
    if (slot_count_ == 0 || slot_count_ > SERVAL_SOCKET_SLOTS_MAX) return false;
    for (uint32_t i = 0; i < slot_count_; i++) {
        Slot& slot = slots_[i];
        if (!open_stream(slot.rx.ring, place, SERVAL_RING_STREAM_RX, i)) return false;
        if (!open_stream(slot.tx.ring, place, SERVAL_RING_STREAM_TX, i)) return false;
        slot.rx.restart();
        slot.tx.restart();
        slot.generation = 0;
        slot.shut = false;
    }
    for (unsigned i = 0; i < SERVAL_SOCKET_SPECS_MAX; i++) accept_tokens_[i] = accepted_[i] = 0;
    poll_from_ = 0;
    token_ = connect_token_ = connected_ = unwanted_ = 0;
    return true;
}

// By the leader: a completion; events are not stored.
inline SERVAL_DEVICE void Sockets::take(uint64_t token, const serval_socket_message& message) {
    if (message.op != SERVAL_SOCKET_DONE) return;
    const uint64_t result = detail::pack_result(message);
    const bool opened = message.value == SERVAL_STATUS_OK;
    if (opened && (message.slot >= slot_count_ || message.generation == 0)) return;
    if (opened) {
        Slot& slot = slots_[message.slot];
        slot.rx.restart();
        slot.tx.restart();
        slot.generation = message.generation;
        slot.shut = false;
    }
    if (token == connect_token_ && token) {
        connect_token_ = 0;
        connected_ = result;
        return;
    }
    for (unsigned i = 0; i < SERVAL_SOCKET_SPECS_MAX; i++) {
        if (accept_tokens_[i] != token || !token) continue;
        accept_tokens_[i] = 0;
        accepted_[i] = result;
        return;
    }
    if (opened) unwanted_ = result;
}

SERVAL_CALL bool Sockets::pump(Block& block, uint64_t deadline_ns, bool ends_on_drain) {
    const Message m = channel_.recv(block, SERVAL_WAIT_BACKEND, deadline_ns, ends_on_drain, false);
    if (!m) return false;
    if (detail::leader() && m.len_ == sizeof(serval_socket_message)) {
        serval_socket_message message;
        __builtin_memcpy(&message, m.data_, sizeof message);
        take(m.token_, message);
    }
    const uint64_t late = tell(unwanted_);
    if (late) {
        // An attempt that was given up has succeeded.
        if (detail::leader()) unwanted_ = 0;
        Socket socket = socket_of(late);
        end_slot(block, socket, SERVAL_SOCKET_CLOSE_RESET);
    }
    return true;
}

SERVAL_CALL bool Sockets::command(Block& block, uint64_t token, uint32_t op, uint32_t slot, uint32_t generation, uint32_t value) {
    detail::block_sync();
    if (detail::leader()) {
        const serval_socket_message message = {op, slot, generation, value};
        __builtin_memcpy(channel_.out_, &message, sizeof message);
    }
    detail::block_sync();
    const detail::Header h = {token, 0, 0, sizeof(serval_socket_message), SERVAL_KIND_MESSAGE, SERVAL_STATUS_OK, 0};
    return channel_.send(block, h, channel_.out_);
}

SERVAL_INLINE Sockets::Slot* Sockets::find(const Socket& socket) {
    detail::block_sync();  // writes before the call are complete
    Slot* slot = &slots_[socket.slot_];
    return socket.generation_ != 0 && slot->generation == socket.generation_ ? slot : nullptr;
}

SERVAL_INLINE Socket Sockets::socket_of(uint64_t found) {
    Socket socket;
    socket.sockets_ = this;
    socket.status_ = static_cast<Status>(found & 0xff);
    socket.slot_ = static_cast<uint32_t>(found >> 8) & 0xffffff;
    socket.generation_ = static_cast<uint32_t>(found >> 32);
    return socket;
}

// Whether there is a connection that no call has taken.
SERVAL_INLINE bool Sockets::has_accepted() const {
    uint64_t any = 0;
    for (unsigned i = 0; i < SERVAL_SOCKET_SPECS_MAX; i++) any |= accepted_[i];
    return any != 0;
}

// Why a wait ended without a message.
SERVAL_INLINE Status Sockets::waited(Block& block, uint64_t deadline_ns) const {
    if (block.broken() || deadline_ns == NO_DEADLINE) return DRAINING;
    return deadline_ns == detail::NOT_WAITING ? AGAIN : TIMEOUT;
}

SERVAL_CALL Status Sockets::end_slot(Block& block, Socket& socket, uint32_t how) {
    Slot* slot = find(socket);
    const uint32_t generation = socket.generation_;
    socket.generation_ = 0;
    socket.status_ = CLOSED;
    if (!slot) return CLOSED;
    detail::block_sync();
    if (detail::leader()) slot->generation = 0;
    return command(block, 0, SERVAL_SOCKET_CLOSE, socket.slot_, generation, how) ? OK : DRAINING;
}

inline SERVAL_DEVICE Socket Sockets::connect(Block& block, uint32_t index, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    detail::block_sync();
    if (detail::leader()) {
        connect_token_ = ++token_;
        connected_ = 0;
    }
    const uint64_t token = tell(connect_token_);
    if (!command(block, token, SERVAL_SOCKET_CONNECT, 0, 0, index)) return socket_of(DRAINING);
    for (;;) {
        const uint64_t found = tell(connected_);
        if (found) return socket_of(found);
        if (pump(block, deadline_ns, false)) continue;
        detail::block_sync();
        if (detail::leader()) connect_token_ = 0;
        return socket_of(waited(block, deadline_ns));
    }
}

inline SERVAL_DEVICE Socket Listener::accept_until(Block& block, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    Sockets& all = *sockets_;
    if (index_ >= SERVAL_SOCKET_SPECS_MAX) return all.socket_of(NOT_ALLOWED);
    for (;;) {
        const uint64_t found = all.tell(all.accepted_[index_]);
        if (found) {
            detail::block_sync();
            if (detail::leader()) all.accepted_[index_] = 0;
            return all.socket_of(found);
        }
        if (all.tell(all.accept_tokens_[index_]) == 0) {
            if (all.tell(block.ended())) return all.socket_of(DRAINING);
            if (detail::leader()) all.accept_tokens_[index_] = ++all.token_;
            const uint64_t token = all.tell(all.accept_tokens_[index_]);
            if (!all.command(block, token, SERVAL_SOCKET_ACCEPT, 0, 0, index_)) return all.socket_of(DRAINING);
        }
        if (all.pump(block, deadline_ns, true)) continue;
        // The command stays: the next accept gets its connection.
        return all.socket_of(all.tell(block.ended()) ? DRAINING : all.waited(block, deadline_ns));
    }
}

inline SERVAL_DEVICE int Sockets::poll(Block& block, const Socket* sockets, unsigned count, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    for (;;) {
        const uint32_t from = static_cast<uint32_t>(tell(poll_from_));
        for (unsigned k = 0; k < count; k++) {
            const unsigned i = (from + k) % count;
            Slot* slot = find(sockets[i]);
            if (!slot) continue;
            uint64_t ready = 0;
            if (detail::leader()) {
                detail::Look look = slot->rx.look();
                ready = look != detail::Look::NONE || slot->rx.ended(look) || look != detail::Look::NONE;
                if (ready) poll_from_ = i + 1;
            }
            if (tell(ready)) return static_cast<int>(i);
        }
        if (tell(has_accepted())) return static_cast<int>(count);
        if (!pump(block, deadline_ns, false)) return -1;
    }
}

inline SERVAL_DEVICE Io Socket::recv_until(Block& block, void* to, uint64_t max, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    if (!sockets_) return {CLOSED, 0};
    Sockets& all = *sockets_;
    Sockets::Slot* slot = all.find(*this);
    if (!slot) return {CLOSED, 0};
    if (max == 0) return {OK, 0};
    for (;;) {
        // How many bytes; if none, the status of the end and whether the ring is broken.
        uint64_t found = 0;
        if (detail::leader()) {
            detail::Look look = slot->rx.look();
            uint64_t end = 0;
            if (look == detail::Look::NONE) end = slot->rx.ended(look);
            const uint64_t count = slot->rx.head - slot->rx.tail;
            if (look == detail::Look::CORRUPT) found = 3;
            else if (look == detail::Look::FOUND) found = (count < max ? count : max) << 2;
            else if (end) found = (end & 0xff) << 2 | 1;
        }
        found = all.tell(found);
        if (found == 3) {
            if (detail::in_crew()) block.end(SERVAL_REASON_RING_CORRUPT);
            detail::block_sync();
            return {RESET, 0};
        }
        if (found & 1) return {static_cast<Status>(found >> 2), 0};
        if (found) {
            const uint64_t count = found >> 2;
            slot->rx.copy(static_cast<uint8_t*>(to), count);
            detail::block_sync();
            uint64_t is_due = 0;
            if (detail::leader()) {
                slot->rx.release(count);
                is_due = slot->rx.unheard >= slot->rx.ring.capacity / 2;
                if (is_due) slot->rx.unheard = 0;
            }
            if (all.tell(is_due)) all.command(block, 0, SERVAL_SOCKET_NOTIFY, slot_, generation_, 0);
            return {OK, count};
        }
        if (!all.pump(block, deadline_ns, false)) return {all.waited(block, deadline_ns), 0};
    }
}

inline SERVAL_DEVICE Io Socket::send_until(Block& block, const void* data, uint64_t max, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    if (!sockets_) return {CLOSED, 0};
    Sockets& all = *sockets_;
    Sockets::Slot* slot = all.find(*this);
    if (!slot || slot->shut) return {CLOSED, 0};
    if (max == 0) return {OK, 0};
    const uint8_t* from = static_cast<const uint8_t*>(data);
    for (;;) {
        uint64_t found = 0;
        if (detail::leader()) {
            const uint64_t refused = slot->tx.refused();
            const detail::Look look = slot->tx.reserve(max);
            const uint64_t room = slot->tx.known_room();
            if (look == detail::Look::CORRUPT) found = 3;
            else if (refused) found = (refused & 0xff) << 2 | 1;
            else if (look == detail::Look::FOUND) found = (room < max ? room : max) << 2;
        }
        found = all.tell(found);
        if (found == 3) {
            if (detail::in_crew()) block.end(SERVAL_REASON_RING_CORRUPT);
            detail::block_sync();
            return {RESET, 0};
        }
        if (found & 1) return {static_cast<Status>(found >> 2), 0};
        if (found) {
            const uint64_t count = found >> 2;
            slot->tx.write(from, count);
            detail::block_sync();
            if (detail::leader()) slot->tx.publish(from, count);
            const bool sent = all.command(block, 0, SERVAL_SOCKET_NOTIFY, slot_, generation_, 0);
            return {sent ? OK : DRAINING, count};
        }
        if (!all.pump(block, deadline_ns, false)) return {all.waited(block, deadline_ns), 0};
    }
}

inline SERVAL_DEVICE Status Socket::recv_all(Block& block, void* to, uint64_t bytes, uint64_t deadline_ns) {
    for (uint64_t done = 0; done < bytes;) {
        const Io io = recv_until(block, static_cast<uint8_t*>(to) + done, bytes - done, deadline_ns);
        if (!io) return io.status;
        done += io.bytes;
    }
    return OK;
}

inline SERVAL_DEVICE Status Socket::send_all(Block& block, const void* from, uint64_t bytes, uint64_t deadline_ns) {
    for (uint64_t done = 0; done < bytes;) {
        const Io io = send_until(block, static_cast<const uint8_t*>(from) + done, bytes - done, deadline_ns);
        if (!io) return io.status;
        done += io.bytes;
    }
    return OK;
}

inline SERVAL_DEVICE Status Socket::shutdown(Block& block) {
    if (!sockets_) return CLOSED;
    Sockets::Slot* slot = sockets_->find(*this);
    if (!slot || slot->shut) return CLOSED;
    detail::block_sync();
    if (detail::leader()) {
        slot->shut = true;
        slot->tx.end(SERVAL_STATUS_CLOSED);
    }
    return sockets_->command(block, 0, SERVAL_SOCKET_NOTIFY, slot_, generation_, 0) ? OK : DRAINING;
}

inline SERVAL_DEVICE Status Socket::close(Block& block) {
    return sockets_ ? sockets_->end_slot(block, *this, SERVAL_SOCKET_CLOSE_ORDERLY) : CLOSED;
}

inline SERVAL_DEVICE Status Socket::reset(Block& block) {
    return sockets_ ? sockets_->end_slot(block, *this, SERVAL_SOCKET_CLOSE_RESET) : CLOSED;
}

// What surrounds a kernel with sockets.
template <void (*KERNEL)(Block&, Mqueue&, Sockets&)>
SERVAL_DEVICE void run_with_sockets(Block& block, Mqueue& mqueue) {
#if SERVAL_CUDA
    __shared__ __align__(16) unsigned char memory[sizeof(Sockets)];
    Sockets& sockets = *reinterpret_cast<Sockets*>(memory);
    if (detail::leader() && !sockets.open(block)) block.reason_ = SERVAL_REASON_REFUSED;
    detail::block_sync();
    if (block.broken()) return;
    KERNEL(block, mqueue, sockets);
#else
    Sockets sockets;
    if (!sockets.open(block)) {
        block.reason_ = SERVAL_REASON_REFUSED;
        return;
    }
    KERNEL(block, mqueue, sockets);
    sockets.channel_.release_if(true);
#endif
}

}  // namespace serval

// A kernel with stream sockets: its function has the block's Sockets as its third parameter. On CUDA a block is a CUDA block.
#if SERVAL_CUDA

#define SERVAL_SOCKET_KERNEL(NAME)                                                                             \
    static __device__ void serval_user_##NAME(serval::Block&, serval::Mqueue&, serval::Sockets&);              \
    SERVAL_ABI_MARK(SERVAL_ABI_NUMBER, _##NAME)                                                                \
    extern "C" __global__ void __launch_bounds__(SERVAL_BLOCK_THREADS_MAX, SERVAL_BLOCKS_MIN)                  \
        serval_kernel_##NAME(const serval_block_args* blocks) {                                                \
        serval::detail::run_sized<serval::run_with_sockets<serval_user_##NAME>, true>(blocks + blockIdx.x);    \
    }                                                                                                          \
    static __device__ void serval_user_##NAME

#else

#define SERVAL_SOCKET_KERNEL(NAME)                                                                             \
    static void serval_user_##NAME(serval::Block&, serval::Mqueue&, serval::Sockets&);                         \
    static serval::detail::Registration serval_registration_##NAME(                                            \
        #NAME, serval::detail::run_block<serval::run_with_sockets<serval_user_##NAME>, 1, true>);               \
    static void serval_user_##NAME

#endif

#endif
