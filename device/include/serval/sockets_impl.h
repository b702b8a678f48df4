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

// The status of a stream that has ended with this word, which is not 0.
SERVAL_INLINE uint64_t end_status(uint64_t word) {
    return word == SERVAL_STATUS_CLOSED || word == SERVAL_STATUS_DRAINING ? word : SERVAL_STATUS_RESET;
}

// From a kernel that returned because the service drains to its next call.
constexpr uint64_t AGAIN_NS = 10000000;

// What the leader found in a stream ring, as a word for the other threads.
constexpr uint64_t STREAM_EMPTY = 0, STREAM_CORRUPT = 3;
SERVAL_INLINE uint64_t stream_bytes(uint64_t count, uint64_t max) { return (count < max ? count : max) << 2; }
SERVAL_INLINE uint64_t stream_end(uint64_t word) { return end_status(word) << 2 | 1; }

}  // namespace detail

template <class F>
SERVAL_INLINE uint64_t Sockets::tell(F value) {
#if SERVAL_CUDA
    detail::block_sync();
    if (detail::leader()) told_ = value();
    detail::block_sync();
    return told_;
#else
    return value();
#endif
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
    is_drained_ = false;
    return true;
}

// By the leader: a completion; events are not stored. False if it gives the block a slot that does not exist, or that it has.
inline SERVAL_DEVICE bool Sockets::take(uint64_t token, const serval_socket_message& message) {
    if (message.op != SERVAL_SOCKET_DONE) return true;
    const uint64_t result = detail::pack_result(message);
    const bool opened = message.value == SERVAL_STATUS_OK;
    if (message.value == SERVAL_STATUS_DRAINING) is_drained_ = true;
    if (opened) {
        is_drained_ = false;
        if (message.slot >= slot_count_ || message.generation == 0) return false;
        Slot& slot = slots_[message.slot];
        if (slot.generation != 0) return false;
        slot.rx.restart();
        slot.tx.restart();
        slot.generation = message.generation;
        slot.shut = false;
    }
    if (token == connect_token_ && token) {
        connect_token_ = 0;
        connected_ = result;
        return true;
    }
    for (unsigned i = 0; i < SERVAL_SOCKET_SPECS_MAX; i++) {
        if (accept_tokens_[i] != token || !token) continue;
        accept_tokens_[i] = 0;
        // One that was given up is no result: the next call asks again.
        if (message.value != SERVAL_STATUS_TIMEOUT) accepted_[i] = result;
        return true;
    }
    if (opened) unwanted_ = result;
    return true;
}

SERVAL_CALL bool Sockets::pump(Block& block, uint64_t deadline_ns, bool ends_on_drain) {
    if (detail::in_crew()) block.publish_answers();
    const Message m = channel_.recv(block, SERVAL_WAIT_BACKEND, deadline_ns, ends_on_drain, false);
    if (!m) return false;
    // A connection that came too late; 0: none, 1: the engine has broken its side.
    const uint64_t late = tell([&]() -> uint64_t {
        unwanted_ = 0;
        bool intact = true;
        if (m.len_ == sizeof(serval_socket_message)) {
            serval_socket_message message;
            __builtin_memcpy(&message, m.data_, sizeof message);
            intact = take(m.token_, message);
        }
        // At once: the engine sends no further event of a slot before.
        channel_.release_if(true);
        return intact ? unwanted_ : 1;
    });
    if (late == 1) {
        if (detail::in_crew()) block.end(SERVAL_REASON_RING_CORRUPT);
        detail::block_sync();
        return false;
    }
    if (late) {
        // An attempt that was given up has succeeded.
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
        // The engine that gets the command sees the positions that were stored before it, or would wait for the next one: granules are not ordered.
        // EDGE TX_PUBLISH (release half)
        if (channel_.tx_.ring.protocol != SERVAL_PROTOCOL_DOORBELL) detail::fence_release();
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

// By the leader: whether an accept has ended whose result no call has taken.
SERVAL_INLINE bool Sockets::has_accepted() const {
    uint64_t any = 0;
    for (unsigned i = 0; i < SERVAL_SOCKET_SPECS_MAX; i++) any |= accepted_[i];
    return any != 0;
}

// By all threads: why a wait ended without a message.
SERVAL_CALL Status Sockets::waited(Block& block, uint64_t deadline_ns) {
    if (block.broken() || deadline_ns == NO_DEADLINE) return DRAINING;
    // A block that has noticed a drain does not know whether the stop has become immediate.
    uint64_t stop = SERVAL_STOP_RUN;
    if (block.ended() && detail::in_crew()) stop = block.stop_word();
    if (tell([&] { return stop; }) >= SERVAL_STOP_NOW) return DRAINING;
    return deadline_ns == detail::NOT_WAITING ? AGAIN : TIMEOUT;
}

// By all threads, for calls that find something without waiting: whether the service stops immediately.
SERVAL_CALL bool Sockets::is_stopped(Block& block) {
    bool stopped = false;
    if (detail::in_crew()) {
        const uint64_t turn = detail::crew_first(detail::leader() ? channel_.polls_++ : 0);
        if (block.poll_engine(turn) >= SERVAL_STOP_NOW) block.end(SERVAL_REASON_STOPPED), stopped = true;
        stopped = stopped || block.broken();
    }
    return tell([&]() -> uint64_t { return stopped; });
}

// By all threads: a stream ring has impossible words.
SERVAL_CALL Io Sockets::corrupt(Block& block) {
    if (detail::in_crew()) block.end(SERVAL_REASON_RING_CORRUPT);
    detail::block_sync();
    return {RESET, 0};
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

SERVAL_INLINE uint64_t Sockets::stream_ended(uint64_t word) {
    if (word == SERVAL_STATUS_DRAINING) is_drained_ = true;
    return detail::stream_end(word);
}

// A kernel that returns because a call returned DRAINING has not failed: the stop is on the way, or the engine has given it up, as a restart that
// is put off. So its sockets are closed, and it begins again: then it waits for a connection, as after its start, until the service stops.
SERVAL_CALL bool Sockets::goes_on(Block& block) {
    const bool is_drained = tell([&]() -> uint64_t { return is_drained_ && !block.ended(); });
    if (!is_drained) return false;
    for (uint32_t i = 0; i < slot_count_; i++) {
        const uint64_t generation = tell([&]() -> uint64_t { return slots_[i].generation; });
        Socket socket = socket_of(generation << 32 | static_cast<uint64_t>(i) << 8);
        if (generation) end_slot(block, socket, SERVAL_SOCKET_CLOSE_ORDERLY);
    }
    tell([&]() -> uint64_t { return is_drained_ = false; });
    // One that connects before it waits would ask without a pause.
    block.sleep_until(block.now_ns() + detail::AGAIN_NS);
    return !is_stopped(block);
}

inline SERVAL_DEVICE Socket Sockets::connect(Block& block, uint32_t index, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    const uint64_t token = tell([&] {
        connected_ = 0;
        return connect_token_ = ++token_;
    });
    if (!command(block, token, SERVAL_SOCKET_CONNECT, 0, 0, index)) return socket_of(DRAINING);
    for (;;) {
        const uint64_t found = tell([&] { return connected_; });
        if (found) return socket_of(found);
        if (pump(block, deadline_ns, false)) continue;
        detail::block_sync();
        if (detail::leader()) connect_token_ = 0;
        const Status why = waited(block, deadline_ns);
        // If it is complete meanwhile, the connection is unwanted.
        if (why == TIMEOUT) command(block, token, SERVAL_SOCKET_CANCEL, 0, 0, 0);
        return socket_of(why);
    }
}

inline SERVAL_DEVICE Socket Listener::accept_until(Block& block, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    Sockets& all = *sockets_;
    if (index_ >= SERVAL_SOCKET_SPECS_MAX) return all.socket_of(NOT_ALLOWED);
    for (;;) {
        const uint64_t found = all.tell([&] {
            const uint64_t result = all.accepted_[index_];
            all.accepted_[index_] = 0;
            return result;
        });
        if (found) return all.socket_of(found);
        // The token of a new command; 0 if one is in flight.
        const uint64_t token = all.tell([&]() -> uint64_t {
            if (all.accept_tokens_[index_] != 0 || block.ended()) return 0;
            return all.accept_tokens_[index_] = ++all.token_;
        });
        if (token && !all.command(block, token, SERVAL_SOCKET_ACCEPT, 0, 0, index_)) return all.socket_of(DRAINING);
        if (all.pump(block, deadline_ns, true)) continue;
        const Status why = block.ended() ? DRAINING : all.waited(block, deadline_ns);
        // After AGAIN the command stays: the next call gets its connection. After TIMEOUT a connection goes to a block that waits;
        // if this one has got it meanwhile, it is for the next call.
        const uint64_t late = why == TIMEOUT ? all.tell([&] { return all.accept_tokens_[index_]; }) : 0;
        if (late) all.command(block, late, SERVAL_SOCKET_CANCEL, 0, 0, 0);
        return all.socket_of(why);
    }
}

// By the crew: of `count` sockets from number `from` on, the number of the first that is ready, plus 1; 0 if none is. Its threads look side by side.
inline SERVAL_DEVICE uint64_t Sockets::find_ready(const Socket* sockets, unsigned count, unsigned from) {
    for (unsigned first = 0; first < count; first += detail::CREW_SIZE) {
        const unsigned k = first + detail::crew_rank();
        bool is_ready = false;
        if (k < count) {
            const Socket& socket = sockets[(from + k) % count];
            Slot& slot = slots_[socket.slot_];
            is_ready = socket.generation_ != 0 && slot.generation == socket.generation_ && slot.rx.is_ready();
        }
#if SERVAL_CUDA
        const unsigned found = __ballot_sync(~0u, is_ready);
        detail::crew_sync();
        if (found) return 1 + (from + first + static_cast<unsigned>(__ffs(static_cast<int>(found))) - 1) % count;
#else
        if (is_ready) return 1 + (from + first) % count;
#endif
    }
    return 0;
}

inline SERVAL_DEVICE int Sockets::poll(Block& block, const Socket* sockets, unsigned count, uint64_t deadline_ns) {
    if (detail::in_crew()) block.charge();
    for (;;) {
        const unsigned from = static_cast<unsigned>(tell([&]() -> uint64_t { return poll_from_; }));
        uint64_t ready = 0;
        if (detail::in_crew()) ready = find_ready(sockets, count, from);
        ready = tell([&]() -> uint64_t {
            if (ready) poll_from_ = static_cast<uint32_t>(ready);
            return ready ? ready : has_accepted() ? count + 1 : 0;
        });
        if (ready) return is_stopped(block) ? -1 : static_cast<int>(ready - 1);
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
        const uint64_t found = all.tell([&]() -> uint64_t {
            uint64_t end;
            const detail::Look look = slot->rx.look(end);
            if (look == detail::Look::CORRUPT) return detail::STREAM_CORRUPT;
            if (look == detail::Look::FOUND) return detail::stream_bytes(slot->rx.head - slot->rx.tail, max);
            return end ? all.stream_ended(end) : detail::STREAM_EMPTY;
        });
        if (found == detail::STREAM_CORRUPT) return all.corrupt(block);
        if (found & 1) return {static_cast<Status>(found >> 2), 0};
        if (found) {
            const uint64_t count = found >> 2;
            slot->rx.copy(static_cast<uint8_t*>(to), count);
            const bool is_due = all.tell([&]() -> uint64_t {
                slot->rx.take(count);
                if (slot->rx.unheard < slot->rx.ring.capacity / 2) return false;
                slot->rx.unheard = 0;
                return true;
            });
            // The other threads do not wait for it.
            if (detail::leader()) slot->rx.release();
            if (is_due) all.command(block, 0, SERVAL_SOCKET_NOTIFY, slot_, generation_, 0);
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
        const uint64_t found = all.tell([&]() -> uint64_t {
            uint64_t refused;
            const detail::Look look = slot->tx.reserve(max, refused);
            if (look == detail::Look::CORRUPT) return detail::STREAM_CORRUPT;
            if (refused) return all.stream_ended(refused);
            return look == detail::Look::FOUND ? detail::stream_bytes(slot->tx.known_room(), max) : detail::STREAM_EMPTY;
        });
        if (found == detail::STREAM_CORRUPT) return all.corrupt(block);
        if (found & 1) return {static_cast<Status>(found >> 2), 0};
        if (found) {
            const uint64_t count = found >> 2;
            // What is not published can still be given up.
            uint64_t refused = SERVAL_CUDA && detail::leader() ? slot->tx.peek_refused() : 0;
            const uint64_t last = slot->tx.write(from, count);
            refused = all.tell([&]() -> uint64_t {
                if (SERVAL_UNLIKELY(refused != 0)) return all.stream_ended(slot->tx.refused());
                slot->tx.publish(count, last);
                return 0;
            });
            if (refused) return {static_cast<Status>(refused >> 2), 0};
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

inline SERVAL_DEVICE uint64_t Socket::position() const {
    const Sockets::Slot* slot = sockets_ ? sockets_->find(*this) : nullptr;
    return slot ? slot->tx.head : 0;
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
    do {
        KERNEL(block, mqueue, sockets);
    } while (sockets.goes_on(block));
    detail::block_sync();
    if (detail::leader()) sockets.channel_.release_if(true);
#else
    Sockets sockets;
    if (!sockets.open(block)) {
        block.reason_ = SERVAL_REASON_REFUSED;
        return;
    }
    do {
        KERNEL(block, mqueue, sockets);
    } while (sockets.goes_on(block));
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
