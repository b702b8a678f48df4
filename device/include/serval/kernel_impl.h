// Bodies of the functions declared and documented in kernel.h: of a block, and of the two rings of an mqueue. Those of mqueues and backends are in
// mqueue_impl.h.
#ifndef SERVAL_KERNEL_IMPL_H
#define SERVAL_KERNEL_IMPL_H

#ifndef SERVAL_KERNEL_H
#error "include <serval/kernel.h>"
#endif

namespace serval {
namespace detail {

// A guard word after a reply: a kernel that wrote too far has changed it.
constexpr uint64_t GUARD = 0x5e57a1d0c0ffee5eu;

constexpr uint64_t NOT_WAITING = 0;

// A block on CUDA polls this often for a message before it does anything else, about 40 us.
constexpr unsigned LOOKS = 30;
// After this many unsuccessful polls, and the rest of the current LOOKS, the block counts as waiting, which it publishes; if many blocks
// wait, its polls become brief and only detect that a message is there: every poll is a read over the bus, and a few hundred blocks that
// poll whole lines use half of its bandwidth.
constexpr unsigned LONG_TRIES = 64;
// The blocks of a service with at most this many keep polling whole lines: an eighth of the bus at most.
constexpr unsigned BLOCKS_OF_WHOLE_LOOKS = 64;
// After this many unsuccessful polls it pauses between polls.
constexpr unsigned RESTLESS_TRIES = 1024;

// On CUDA a block reads the engine's words once in this many polls, about every five milliseconds. All blocks read the same line, and the
// bus delivers one line to one reader at a time, a microsecond each: when each block read it with every 64th poll, the limit for any number
// of blocks was 57 million messages per second, and a few hundred waiting blocks delayed each other by hundreds of
// microseconds.
constexpr unsigned ENGINE_TRIES = 4096;
// Offset in polls between the turns of a block and of the next one; half of it is the offset from the first poll of a wait:
// polls are counted from the start of a wait, and a message that arrives with the first one would always wait for the engine's words.
constexpr unsigned APART_TRIES = 16;

// On CUDA a block publishes its counts each time 2 to this power cycles have passed: about every half second, far more often than the
// runtime's time limit for a block without progress.
constexpr unsigned PUBLISH_CYCLES_LOG = 30;

// A wait for room in a client mqueue checks once in this many tries whether the block waits for itself ...
constexpr unsigned STANDSTILL_TRIES = 64;
// ... and, where only the engine can know how many answers have room, assumes so after this long without progress.
constexpr uint64_t STANDSTILL_NS = 10000000000u;

// Bits of the length of a message, which is at most SERVAL_MESSAGE_BYTES_MAX.
SERVAL_INLINE uint32_t round8(uint32_t bytes) { return (bytes + 7) & ~7u; }

}  // namespace detail

// Block

SERVAL_INLINE uint64_t Block::now_ns() const {
#if !SERVAL_CUDA
    if (args_.now)
        return reinterpret_cast<uint64_t (*)(void*)>(args_.now)(reinterpret_cast<void*>(args_.wait_self));
#endif
    return detail::clock_ns();
}

inline SERVAL_DEVICE void Block::sleep_until(uint64_t deadline_ns) {
    detail::block_sync();  // no thread still reads why the block ended
    if (detail::in_crew()) {
        for (unsigned tries = 0;; tries++) {
            // All threads of the crew must take the same branch here.
            if (detail::crew_first(now_ns() >= deadline_ns || broken())) break;
#if SERVAL_CUDA
            const uint64_t turn = detail::crew_first(detail::leader() ? sleeps_++ : 0);  // across sleeps: many are short
#else
            const uint64_t turn = tries;
#endif
            if (poll_engine(turn) >= SERVAL_STOP_NOW) break;
            publish_answers();
            pause(SERVAL_WAIT_TIME, deadline_ns, tries);
        }
    }
    detail::block_sync();
}

inline SERVAL_DEVICE const serval_param* Block::find_param(const char* name) const {
    const serval_param* params = reinterpret_cast<const serval_param*>(args_.params);
    for (uint32_t i = 0; i < args_.param_count; i++) {
        unsigned k = 0;
        while (k < sizeof(params[i].name) && params[i].name[k] == static_cast<uint8_t>(name[k]) && name[k]) k++;
        if (k < sizeof(params[i].name) && params[i].name[k] == 0 && name[k] == 0) return params + i;
    }
    return nullptr;
}

inline SERVAL_DEVICE double Block::param(const char* name, double otherwise) const {
    const serval_param* param = find_param(name);
    return param ? param->value : otherwise;
}

inline SERVAL_DEVICE const char* Block::param_text(const char* name, const char* otherwise) const {
    const serval_param* param = find_param(name);
    if (!param) return otherwise;
    uint64_t bits;
    __builtin_memcpy(&bits, &param->value, sizeof bits);
    if (bits >> 48 != SERVAL_PARAM_TEXT >> 48) return otherwise;
    return reinterpret_cast<const char*>(args_.params + static_cast<uint32_t>(bits));
}

inline SERVAL_DEVICE void Block::open(const serval_block_args& args, const detail::Place& place) {
    args_ = args;
    engine_ = reinterpret_cast<serval_engine_words*>(place.layout.region + SERVAL_ENGINE_WORDS_OFFSET);
    words_ = place.words;
    reason_ = SERVAL_REASON_NONE;
    if (args_.budget == 0) args_.budget = ~uint64_t{0};
    budget_left_ = args_.budget;
    received_ = sent_ = dropped_ = 0;
    answering_ = nullptr;
    heartbeat_ = {};
#if SERVAL_CUDA
    published_at_ = 0;
    sleeps_ = 0;
    received_of_ = nullptr;
#endif
}

inline SERVAL_DEVICE void Block::ready() { detail::store_release(&words_->state, SERVAL_STATE_READY); }

// EDGE STATE (release half): the reason and the counts are final when the state says ENDED.
inline SERVAL_DEVICE void Block::finish() {
    // EDGE STOP (acquire half)
    if (!ended()) reason_ = detail::load_acquire(&engine_->stop) != SERVAL_STOP_RUN ? SERVAL_REASON_STOPPED : SERVAL_REASON_RETURNED;
    publish_counts();
    detail::store_relaxed(&words_->reason, reason_);
    detail::store_release(&words_->state, SERVAL_STATE_ENDED);
}

inline SERVAL_DEVICE void Block::refuse() {
    reason_ = SERVAL_REASON_REFUSED;
    finish();
}

// Is a read of the engine's words due in [from, to)? Blocks take turns.
SERVAL_INLINE bool Block::engine_words_due(uint64_t from, uint64_t to) const { return is_due(from, to, detail::ENGINE_TRIES, 0); }
SERVAL_INLINE bool Block::engine_words_due(uint64_t turn) const { return engine_words_due(turn, turn + 1); }
SERVAL_INLINE bool Block::heartbeat_due(uint64_t from, uint64_t to) const {
    return is_due(from, to, 4 * detail::ENGINE_TRIES, detail::ENGINE_TRIES / 2);
}
// Is this block's own multiple of `every` in [from, to)?
SERVAL_INLINE bool Block::is_due(uint64_t from, uint64_t to, uint32_t every, uint32_t offset) const {
    const uint32_t shift = detail::APART_TRIES * args_.block + detail::APART_TRIES / 2 + offset;
    const uint32_t passed = (static_cast<uint32_t>(to) - 1 + shift) % every;
    return passed < static_cast<uint32_t>(to - from);
}

SERVAL_INLINE uint64_t Block::poll_engine(uint64_t turn) {
    if (SERVAL_CUDA && heartbeat_due(turn, turn + 1)) watch_engine();
    return !SERVAL_CUDA || engine_words_due(turn) ? stop_word() : SERVAL_STOP_RUN;
}

SERVAL_CALL void Block::watch_engine() {
    detail::crew_sync();  // no thread still reads the reason
    if (detail::leader()) {
        check_heartbeat();
        publish_counts();
    }
    detail::crew_sync();
}

SERVAL_INLINE uint64_t Block::stop_word() {
    // EDGE STOP (acquire half)
    return detail::crew_first(detail::leader() ? detail::load_acquire(&engine_->stop) : 0);
}

SERVAL_INLINE void Block::pause(uint32_t why, uint64_t deadline_ns, unsigned tries) {
#if SERVAL_CUDA
    (void)why;
    (void)deadline_ns;
    if (detail::leader() && tries >= detail::LONG_TRIES) rest(tries);
    detail::crew_sync();
#else
    // A wait for messages alone checks from its second turn on: for a busy block the messages are a sign of life. A kernel with short
    // waits, or none, never gets there.
    if (tries || deadline_ns != NO_DEADLINE) check_heartbeat();
    if (broken()) return;
    reinterpret_cast<void (*)(void*, uint32_t, uint64_t)>(args_.wait)(reinterpret_cast<void*>(args_.wait_self), why,
                                                                      deadline_ns);
    budget_left_ = args_.budget;
#endif
}

#if SERVAL_CUDA
// By the leader, once a wait is not short any more: an idle block leaves the bus to others.
SERVAL_CALL void Block::rest(unsigned tries) {
    if (tries == detail::LONG_TRIES) publish_counts();
    if (tries >= detail::RESTLESS_TRIES) detail::rest_ns(tries >= 65536 ? 1000 : 100);
}
#endif

// Yields the thread to its other blocks after `budget` receives without a wait.
SERVAL_INLINE void Block::charge() {
#if !SERVAL_CUDA
    if (SERVAL_UNLIKELY(budget_left_ == 0)) {
        publish_answers();
        pause(SERVAL_WAIT_BUDGET, detail::NOT_WAITING, 0);
    }
    budget_left_--;
#endif
}

// By the crew. The first reason is kept, but a fault overrides a stop.
SERVAL_INLINE void Block::end(uint64_t reason) {
    const bool keep = broken();
    detail::crew_sync();
    if (detail::leader() && !keep) reason_ = reason;
    detail::crew_sync();
}

inline SERVAL_DEVICE void Block::check_heartbeat() {
    if (heartbeat_.is_lost(engine_, [this] { return now_ns(); }) && !broken()) reason_ = SERVAL_REASON_ENGINE_LOST;
}

SERVAL_INLINE void Block::publish_answers() {
    if (SERVAL_UNLIKELY(answering_ != nullptr)) answering_->publish_answers(*this);
}

// By the leader. On the host every count is published at once. On CUDA, where each costs a trip over the bus, most of them can be derived
// from the rings: they are published when idle, when the engine's words are read, and at intervals.
SERVAL_INLINE void Block::count(uint64_t& counter, uint64_t* word, uint64_t by) {
    counter += by;
    if (!SERVAL_CUDA) detail::store_relaxed(word, counter);
}

inline SERVAL_DEVICE void Block::publish_counts() {
#if SERVAL_CUDA
    // Messages sent are replies and drops.
    if (received_of_) {
        received_ = *received_of_ - received_from_;
        sent_ = *sent_of_ - sent_from_ - dropped_;
    }
#endif
    detail::store_relaxed(&words_->received, received_);
    detail::store_relaxed(&words_->sent, sent_);
    detail::store_relaxed(&words_->dropped, dropped_);
}

#if SERVAL_CUDA
// By the crew: were the counts last published long ago? A block that sends nothing and rarely releases slots would look hung without
// this. If the clock jumps, because the block moved to another multiprocessor, the counts are published once too often.
SERVAL_INLINE bool Block::counts_are_due() const {
    return !detail::crew_all(static_cast<uint32_t>(clock64() >> detail::PUBLISH_CYCLES_LOG) == published_at_);
}

// By the leader.
SERVAL_CALL void Block::publish_counts_in_time() {
    published_at_ = static_cast<uint32_t>(clock64() >> detail::PUBLISH_CYCLES_LOG);
    publish_counts();
}
#endif

// Channel

namespace detail {

inline SERVAL_DEVICE bool Channel::open(const serval_block_args& args, const Place& place, unsigned i) {
    const bool server = i == 0;
    const unsigned rx_kind = server ? SERVAL_RING_SERVER_RX : SERVAL_RING_CLIENT_RX;
    const unsigned tx_kind = server ? SERVAL_RING_SERVER_TX : SERVAL_RING_CLIENT_TX;
    return open_rings(args, place, i, rx_kind, tx_kind, server ? 0 : i - 1);
}

// The rings of these kinds, as number `i` of the block's mqueues.
inline SERVAL_DEVICE bool Channel::open_rings(const serval_block_args& args, const Place& place, unsigned i, unsigned rx_kind, unsigned tx_kind,
                                              uint32_t index) {
    const uint64_t rx_entry = find_ring(place, rx_kind, index), tx_entry = find_ring(place, tx_kind, index);
    if (rx_entry == 0 || tx_entry == 0) return false;
    const Layout& layout = place.layout;
    if (!open_ring(rx_.ring, layout.region, layout.size, rx_entry, rx_kind)) return false;
    if (!open_ring(tx_.ring, layout.region, layout.size, tx_entry, tx_kind)) return false;
    if (round8(rx_.ring.len_max) > args.staging_stride || round8(tx_.ring.len_max) > args.staging_stride) return false;
    in_ = reinterpret_cast<uint8_t*>(args.staging) + static_cast<uint64_t>(2 * i) * args.staging_stride;
    out_ = in_ + args.staging_stride;
    out_bytes_ = args.staging_stride;
    is_server_ = i == 0;
    in_path_ = rx_.ring.protocol;
    out_path_ = tx_.ring.protocol;
    bundles_ = nullptr;
    has_slot_ = false;
    given_ = nullptr;
    given_count_ = 0;
    polls_ = 0;
#if SERVAL_CUDA
    brief_from_ = layout.block_count <= BLOCKS_OF_WHOLE_LOOKS ? ~0u : LONG_TRIES;
    lines_ = nullptr;
    kept_first_ = kept_count_ = 0;
    asked_ = static_cast<uint32_t>(~uint64_t{0});
    pays_ = false;
#endif
    open_consumer(rx_);
    return open_producer(tx_);
}

// By the leader: releases slots of RX. On the host a release is cheap and done immediately. On CUDA it uses the bus, with doorbell rings
// for about as long as a message travels, so it is deferred: until a quarter of the ring can be released, or there is
// nothing else to do.
SERVAL_INLINE void Channel::release_if(bool idle) {
    const uint64_t held = rx_.next - rx_.released;
    if (held != 0 && (idle || held >= rx_.held_max)) rx_.release();
}
#if SERVAL_CUDA
// By the crew: release_if(false) by the leader. All threads call it, so that they stay together; the result is valid for the leader only.
SERVAL_INLINE void Channel::release_when_due() {
    if (SERVAL_UNLIKELY(rx_.next - rx_.released >= rx_.held_max) && leader()) rx_.release();
}
#endif

// In a ring so short that each slot counts, a slot is released when the message has been answered; in others with the next receive, after
// whose poll the cost is hidden.
SERVAL_INLINE bool Channel::each_slot_counts() const { return SERVAL_UNLIKELY(rx_.held_max == 1); }

#if SERVAL_CUDA
// By the crew: true when a message of a granule16 ring was found completely; `h` is its header then. Work that is not needed for a message is
// in settle(): consecutive polls, and a reply and the next poll, should be close together.
//
// While messages are found at once, polls go further: the threads that are idle for the message's line request the lines of the
// following messages, and these lines are kept. A unit with its message's sequence stays valid until that message is read; other units
// are ignored, and their slots are polled again.
SERVAL_INLINE bool Channel::find(Block& block, uint64_t deadline_ns, bool ends_on_drain, Header& h, bool asks) {
    if (SERVAL_UNLIKELY(block.ended() && (block.broken() || ends_on_drain))) return false;
    release_when_due();
    // The shared memory that a message needs is read at once, and not after branches.
    uint8_t* const in = in_;
    Granule16* const lines = lines_;
    const uint32_t number = static_cast<uint32_t>(rx_.next), line = number - kept_first_;
    const Consumer::Spot spot = rx_.spot();
    bool is_kept = line < kept_count_, goes_far = pays_;
    // The engine's words are also read while messages keep arriving.
    asks = asks | (block.engine_words_due(number) & (number != asked_));
    for (unsigned tries = 0, settled = 0;;) {
        Granule16 unit;
        if (is_kept) {
            unit = lines[line * LINE_UNITS16 + crew_rank() % LINE_UNITS16];
        } else if (goes_far) {
            unit = rx_.ask_ahead();
            tries++;
        } else {
            unsigned looks = deadline_ns == NO_DEADLINE && tries < RESTLESS_TRIES ? LOOKS : 1;
            if (SERVAL_LIKELY(tries < brief_from_)) {
                unit = spot.ask<Granule16>();
                tries++;
                while (!spot.has_begun(unit) && --looks) {
                    // If credit runs out, a reply costs a trip over the bus: it is refreshed once together with a poll.
                    const bool low = looks == LOOKS - 1 && tx_.is_low();
                    const uint64_t seen = low ? tx_.ask_tail() : 0;
                    unit = spot.ask<Granule16>();
                    tries++;
                    if (low && leader()) tx_.learn_tail(seen);
                }
            } else {
                bool is_there;
                do {
                    is_there = spot.peep<Granule16>();
                    tries++;
                } while (!is_there && --looks);
                unit = is_there ? spot.ask<Granule16>() : spot.nothing<Granule16>();
            }
        }
        const Look look = rx_.judge(spot, unit, in, h);
        const bool found = look == Look::FOUND && h.kind == SERVAL_KIND_MESSAGE;
        if (SERVAL_LIKELY(found && !asks) && (Consumer::in_line<Granule16>(h.len) || rx_.fetch_rest<Granule16>(h.len, in))) {
            if (is_kept) return true;
            if (goes_far) {
                if (crew_rank() >= LINE_UNITS16) lines[crew_rank() - LINE_UNITS16] = unit;
                if (leader()) kept_first_ = number + 1, kept_count_ = Consumer::LINES - 1;
            }
            if (leader()) pays_ = lines && tries <= 1;
            return true;
        }
        if (SERVAL_UNLIKELY(look == Look::FOUND && !found && !asks)) {
            rx_.keep_header(unit);
            if (leader()) has_slot_ = true;
            crew_sync();
            return false;
        }
        // A partially visible short message will most likely be complete at the next poll, and nothing should delay that.
        if (!is_kept && (look != Look::NONE || asks || tries >= LOOKS || deadline_ns != NO_DEADLINE)) {
            tries = settled = settle(block, deadline_ns, ends_on_drain, look == Look::CORRUPT, look == Look::FOUND, asks, settled, tries);
            if (tries == 0) return false;
            asks = false;
        }
        is_kept = goes_far = false;
    }
}

// By the crew, when find() has no message to pass on: the number of polls so far, or 0 if polling ends. There may have been an invalid message,
// or one that has to wait: it is partially visible, or the engine's words are due.
SERVAL_CALL unsigned Channel::settle(Block& block, uint64_t deadline_ns, bool ends_on_drain, bool nonsense, bool found, bool asks,
                                     unsigned before, unsigned tries) {
    if (nonsense) {
        block.end(SERVAL_REASON_RING_CORRUPT);
        return 0;
    }
    crew_sync();  // all threads have read the values that change here
    if (leader()) {
        kept_count_ = 0;
        pays_ = false;
        if (asks) asked_ = static_cast<uint32_t>(rx_.next);
    }
    // The polls of a kernel that only tries, or waits briefly, are counted across receives, per mqueue, because only a poll of
    // this mqueue ends it when the service drains.
    uint64_t from = before, to = tries;
    if (deadline_ns != NO_DEADLINE) from = crew_first(leader() ? polls_++ : 0), to = from + 1;
    if (asks || block.heartbeat_due(from, to)) {
        block.watch_engine();
        if (block.broken()) return 0;
    }
    const uint64_t stop = asks || block.engine_words_due(from, to) ? block.stop_word() : SERVAL_STOP_RUN;
    if (stop >= SERVAL_STOP_NOW) {
        block.end(SERVAL_REASON_STOPPED);
        return 0;
    }
    // Only a ring that is empty after the stop word was read contains no earlier message.
    if (stop != SERVAL_STOP_RUN && ends_on_drain && !rx_.spot().peep<Granule16>()) {
        block.end(SERVAL_REASON_STOPPED);
        return 0;
    }
    const bool over = deadline_ns != NO_DEADLINE && (deadline_ns == NOT_WAITING || crew_first(block.now_ns() >= deadline_ns));
    if (leader() && (over || tries >= LOOKS)) release_if(true);
    if (over && !found) return 0;
    if (leader() && before < LONG_TRIES && tries >= LONG_TRIES) block.publish_counts();
    if (leader() && tries >= RESTLESS_TRIES) block.rest(tries);
    crew_sync();
    return tries < 1u << 31 ? tries : 1u << 30;
}
#endif

// By the crew: true when a message was found; `h` is its header then. `tries` is the number of unsuccessful polls before.
SERVAL_CALL bool Channel::await(Block& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, Header& h, unsigned tries,
                                [[maybe_unused]] bool asks_first) {
    if (SERVAL_UNLIKELY(block.ended() && (block.broken() || ends_on_drain))) return false;
    if (leader()) release_if(false);
    uint64_t stop = SERVAL_STOP_RUN;
    uint8_t* const in = in_;
#if SERVAL_CUDA
    constexpr unsigned STOP_RANK = CREW_SIZE - 1;
#endif
    for (;; tries++) {
        // The engine's words are also read while messages keep arriving, and for a kernel that only tries or waits briefly: its
        // polls are counted across receives, per mqueue, because only a poll of this mqueue ends it when the service drains.
        uint64_t turn = tries ? tries : rx_.next;
        if (SERVAL_CUDA && deadline_ns != NO_DEADLINE) turn = crew_first(leader() ? polls_++ : 0);
#if SERVAL_CUDA
        // Over the bus a thread without a unit to load reads the stop word beside the poll; the two are not ordered.
        const bool is_first = asks_first && tries == 0;
        if (is_first || block.heartbeat_due(turn, turn + 1)) {
            block.watch_engine();
            if (block.broken()) return false;
        }
        const bool asks = is_first || block.engine_words_due(turn);
        uint64_t wish = 0;
        if (crew_rank() == STOP_RANK && asks) wish = load_relaxed(&block.engine_->stop);
        const Look look = rx_.look(in, h, tries >= brief_from_);
        if (SERVAL_LIKELY(look == Look::FOUND && h.kind == SERVAL_KIND_MESSAGE && !asks)) return true;
        if (asks && SERVAL_UNLIKELY(__shfl_sync(~0u, static_cast<unsigned long long>(wish), STOP_RANK) != stop)) {
            // The stop word changed: only a ring that is empty after it was read contains no earlier message.
            stop = block.stop_word();
            if (stop < SERVAL_STOP_NOW && look == Look::NONE) continue;
        }
#else
        // Read before the ring: a message that is not visible after the stop word was read was never sent.
        stop = block.poll_engine(turn);
#endif
        if (SERVAL_UNLIKELY(stop >= SERVAL_STOP_NOW)) {
            block.end(SERVAL_REASON_STOPPED);
            return false;
        }
#if !SERVAL_CUDA
        const Look look = rx_.look(in);
#endif
        if (SERVAL_LIKELY(look == Look::FOUND && h.kind == SERVAL_KIND_MESSAGE)) return true;
        if (SERVAL_UNLIKELY(look == Look::CORRUPT)) {
            block.end(SERVAL_REASON_RING_CORRUPT);
            return false;
        }
        if (SERVAL_UNLIKELY(look == Look::FOUND)) {
#if SERVAL_CUDA
            if (!rx_.complete(h.len, in)) continue;
            if (leader()) rx_.message = h;
#endif
            if (leader()) has_slot_ = true;
            crew_sync();
            return false;
        }
        if (SERVAL_UNLIKELY(stop != SERVAL_STOP_RUN) && ends_on_drain) {
            block.end(SERVAL_REASON_STOPPED);
            return false;
        }
        const bool over = deadline_ns != NO_DEADLINE && (deadline_ns == NOT_WAITING || crew_first(block.now_ns() >= deadline_ns));
        if (leader() && (over || tries == 8)) release_if(true);
        if (over) return false;
        block.pause(why, deadline_ns, tries);
        if (SERVAL_UNLIKELY(block.broken())) return false;
    }
}

// The crew's result for the whole block, which has been in step since the previous result.
SERVAL_INLINE bool Channel::tell_block(bool value) {
    if (solo()) return value;
    if (leader()) go_ = value;
    block_sync();
    return go_;
}

// The next message, as `m`, or more with consecutive tokens: how many. They are valid until the next call. On CUDA the short path of granule16 is inlined into the
// kernel: a call costs as much as the rest of it.
SERVAL_INLINE uint32_t Channel::recv(Block& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, bool asks, Wish wish, Message& m) {
    block_sync();  // every thread has finished with the previous message
    for (;;) {
        const auto deliver = [&](const Header& h) {
            m.data_ = in_;
            m.token_ = h.token;
            m.tag_ = h.tag;
            m.len_ = h.len;
            m.status_ = h.status;
            m.part_ = 0;
        };
#if SERVAL_CUDA
        if (SERVAL_LIKELY(in_path_ == SERVAL_PROTOCOL_GRANULE16)) {
            // Read in advance.
            const uint64_t number = rx_.next;
            Header h = {};
            bool found = false;
            if (in_crew()) found = find(block, deadline_ns, ends_on_drain, h, asks);
            if (SERVAL_LIKELY(tell_block(found))) {
                if (!solo()) h = rx_.message;
                if (leader()) rx_.next = number + 1;
                deliver(h);
                return 1;
            }
            if (!has_slot_) return 0;
        }
#else
        if (SERVAL_LIKELY(in_path_ != PATH_BUNDLE)) {
            if (SERVAL_LIKELY(await(block, why, deadline_ns, ends_on_drain, rx_.message, 0, asks))) {
                rx_.copy(in_);
                rx_.advance();
                rx_.release();
                deliver(rx_.message);
                return 1;
            }
            if (!has_slot_) return 0;
        }
#endif
        const Found found = recv_other(block, why, deadline_ns, ends_on_drain, asks, wish);
        if (found == Found::NOTHING) return 0;
        if (found == Found::MESSAGE) break;
    }
    const Header& h = rx_.message;
    m.data_ = given_;
    m.token_ = h.token;
    m.tag_ = h.tag;
    m.len_ = h.len;
    m.status_ = h.status;
    m.part_ = static_cast<uint32_t>(h.arena_offset);
    return given_count_;
}

SERVAL_INLINE Message Channel::recv(Block& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, bool asks) {
    Message m;
    recv(block, why, deadline_ns, ends_on_drain, asks, {1, 0}, m);
    return m;
}

// Called in step: messages of bundles and, on CUDA, of rings without a short path.
template <class B>
SERVAL_APART Found Channel::recv_other(B& block, [[maybe_unused]] uint32_t why, [[maybe_unused]] uint64_t deadline_ns, [[maybe_unused]] bool ends_on_drain, bool asks,
                                       Wish wish) {
#if SERVAL_CUDA
    if (in_path_ != PATH_BUNDLE && in_path_ != SERVAL_PROTOCOL_GRANULE16) {
        bool found = false;
        if (in_crew()) {
            // Repeated while a partially visible message is found.
            Header h = {};
            unsigned tries = 0;
            do {
                found = await(block, why, deadline_ns, ends_on_drain, h, tries++, asks);
            } while (SERVAL_UNLIKELY(found && !rx_.complete(h.len, in_)));
            if (solo() && found && leader()) rx_.message = h;
        }
        if (SERVAL_LIKELY(tell_block(found))) {
            rx_.copy(in_);
            block_sync();
            if (leader()) {
                rx_.next++;
                rx_.message.arena_offset = 0;
                given_ = in_;
                given_count_ = 1;
            }
            block_sync();
            return Found::MESSAGE;
        }
        if (!has_slot_) return Found::NOTHING;
    }
#endif
    return take_from_bundle(block, asks, wish);
}

// The last observation of a wait for room.
struct Channel::Standstill {
    uint64_t taken = 0, answers = 0;
    uint64_t since_ns = 0;  // 0: there was progress
};

// By the leader, in a wait for room: does the block wait for itself? The engine takes no request without room for its answer, and room
// appears only when the block receives answers, which it does not do while it waits here.
SERVAL_INLINE bool Channel::waits_for_itself(Standstill& last, uint64_t now_ns) const {
    if (is_server_) return false;  // a reply has its room reserved
    const uint64_t answers = load_relaxed(rx_.ring.head), taken = load_relaxed(tx_.ring.tail);
    const uint64_t unread = answers - rx_.next;
    if (unread >= rx_.ring.depth()) return true;
    if (!rx_.ring.arena_bytes) return false;
    // The engine knows how many answers in an arena have room: there may be fewer unread ones. It takes no more, and has answered those it took.
    if (unread == 0 || taken != answers || taken != last.taken || answers != last.answers || !last.since_ns) {
        last = {taken, answers, now_ns};
        return false;
    }
    return now_ns - last.since_ns >= STANDSTILL_NS;
}

// By the crew: whether there is room for the current message.
SERVAL_INLINE Look Channel::reserve() { return static_cast<Look>(crew_first(leader() ? static_cast<uint64_t>(tx_.reserve()) : 0)); }

// By the crew: true if the message may be written.
SERVAL_CALL bool Channel::await_credit(Block& block) {
    if (SERVAL_UNLIKELY(block.broken())) return false;
    const Look look = reserve();
    return SERVAL_LIKELY(look == Look::FOUND) || wait_for_credit(block, look);
}

// By the crew, if there is no room.
template <class B>
SERVAL_RARE bool Channel::wait_for_credit(B& block, Look look) {
    Standstill last;
    for (unsigned tries = 0; look != Look::FOUND; tries++) {
        if (look == Look::CORRUPT) {
            block.end(SERVAL_REASON_RING_CORRUPT);
            return false;
        }
        if (leader()) release_if(true);
        if (block.poll_engine(tries + 1) >= SERVAL_STOP_NOW) {
            block.end(SERVAL_REASON_STOPPED);
            return false;
        }
        if (tries % STANDSTILL_TRIES == STANDSTILL_TRIES - 1 && crew_first(leader() && waits_for_itself(last, block.now_ns()))) {
            block.end(SERVAL_REASON_CONTRACT);
            return false;
        }
        block.pause(SERVAL_WAIT_TX, NO_DEADLINE, tries);
        if (block.broken()) return false;
        look = reserve();
    }
    return true;
}

// Called in step: sends any message, with the whole block taking part.
SERVAL_CALL bool Channel::transmit(Block& block, Header h, const uint8_t* data) {
    if (SERVAL_UNLIKELY(out_path_ == PATH_BUNDLE) && !tell_block(in_crew() && publish_answers(block))) return false;
    if (leader()) tx_.begin(h);
    block_sync();
    if (!tell_block(in_crew() && await_credit(block))) return false;
    tx_.write(data);
    block_sync();
    if (leader()) {
        tx_.publish();
        if (each_slot_counts()) release_if(false);
    }
    return true;
}

#if SERVAL_CUDA
// By the crew: sends a message that can be written immediately.
SERVAL_INLINE bool Channel::send_short(Block& block, const Header& h, const Producer::Draft& draft) {
    const bool gives_back = each_slot_counts();  // read early
    if (SERVAL_UNLIKELY(!draft.has_slot)) {
        if (leader()) tx_.begin(h);
        crew_sync();
        if (!await_credit(block)) return false;
    }
    tx_.send(draft, h.len);
    crew_sync();
    if (SERVAL_UNLIKELY(gives_back) && leader()) release_if(false);
    return true;
}
#endif

// Called in step: writes of other threads to `data` are complete.
SERVAL_INLINE bool Channel::send(Block& block, const Header& h, const uint8_t* data) {
#if SERVAL_CUDA
    if (is_short(h)) return tell_block(in_crew() && send_short(block, h, tx_.draft(h, data)));
#endif
    return transmit(block, h, data);
}

}  // namespace detail

}  // namespace serval

#endif
