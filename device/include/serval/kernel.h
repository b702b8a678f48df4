// Serval kernels: the one header that a kernel includes.
//
// A kernel is a function that answers messages. It runs as many *blocks*; each block serves one server mqueue, the
// requests of many clients, and owns one client mqueue for each backend of the service:
//
//     #include <serval/kernel.h>
//
//     SERVAL_KERNEL(scale) (serval::Block& block, serval::Mqueue& q) {
//         while (auto msg = q.recv(block)) {                 // false when the service stops
//             if (msg.len() % 4) { q.drop(block, msg, serval::BAD_LENGTH); continue; }
//             auto reply = q.reply(block, msg, msg.len());
//             if (reply)                                     // false: longer than max_reply_bytes
//                 for (unsigned i = block.rank(); i < msg.len() / 4; i += block.size())
//                     reply.as<float>()[i] = 3.0f * msg.as<const float>()[i];
//             q.send(block, reply);                          // a reply that is too long is dropped and counted
//         }
//     }
//
// A kernel whose work for a message is short takes as many as arrived together: recv_many, reply_many and send_many instead of recv, reply and send.
//
// The same source is compiled twice. The host compiler makes a block one thread (`block.size() == 1`):
//     g++ -x c++ -std=c++17 -O3 -fPIC -shared -fvisibility=hidden -fno-exceptions -fno-rtti -fstack-clash-protection
// nvcc makes it a CUDA block of 32 to SERVAL_BLOCK_THREADS_MAX threads in one dimension:
//     nvcc -x cu -std=c++17 -arch=sm_80
//
// A kernel that needs at most a warp per message uses SERVAL_WARP_KERNEL instead. On the host it is the same; on CUDA
// each warp is a block, with an mqueue of its own (`block.size() == 32`), and up to SERVAL_WARPS_MAX of them share a CUDA block, so
// that more mqueues fit on a GPU. It has no SERVAL_SHARED variables, which all warps would share, and at most
// SERVAL_WARP_BACKENDS_MAX backends. There is no form for single threads: one thread needs eight loads to fetch what a warp fetches in
// one, and 32 mqueues of one warp would wait for each other.
//
// Rules. Every function below except Block::rank, size, now_ns and the accessors of Message and Reply must be called by *all*
// threads of the block together, with the same arguments. Messages and replies are in staging memory owned by the
// block: a pointer into a message is valid until the next receive on the same mqueue, one into a reply until it is sent. A
// kernel never gets a pointer into a ring. On CUDA a kernel is compiled twice, once for blocks of one warp, so labels in inline
// assembly must be inside braces. A host kernel must not throw, and must call recv, send or
// sleep_until regularly: until it does, nothing else runs on its thread.
#ifndef SERVAL_KERNEL_H
#define SERVAL_KERNEL_H

#include "bundle.h"
#include "heartbeat.h"
#include "join.h"
#include "sink.h"

// Maximum CUDA block size that kernels are compiled for, in threads.
#ifndef SERVAL_BLOCK_THREADS_MAX
#define SERVAL_BLOCK_THREADS_MAX 256
#endif
// The number of threads per multiprocessor to reserve registers for: with 768 threads each has 80. A kernel that needs more registers defines
// a smaller number before it includes this header.
#ifndef SERVAL_BLOCKS_MIN
#define SERVAL_BLOCKS_MIN (SERVAL_BLOCK_THREADS_MAX < 768 ? 768 / SERVAL_BLOCK_THREADS_MAX : 1)
#endif

// Maximum number of blocks of a SERVAL_WARP_KERNEL in a CUDA block, and of backends of each: their state is in shared memory.
#define SERVAL_WARPS_MAX 8
#define SERVAL_WARP_BACKENDS_MAX 2

namespace serval {

// The outcome of a request to a backend, or the reason why a kernel drops a message.
enum Status : uint8_t {
    OK = SERVAL_STATUS_OK,                  // drop: no error, and no reply is wanted
    TIMEOUT = SERVAL_STATUS_TIMEOUT,        // backend: no answer in time
    REFUSED = SERVAL_STATUS_REFUSED,        // backend: could not be reached
    CLOSED = SERVAL_STATUS_CLOSED,          // backend: the connection ended before the answer
    PROTOCOL = SERVAL_STATUS_PROTOCOL,      // backend: the answer breaks its framing
    TOO_LONG = SERVAL_STATUS_TOO_LONG,      // exceeds the mqueue's maximum
    BAD_LENGTH = SERVAL_STATUS_BAD_LENGTH,  // drop: the message has a length the kernel does not accept
    REJECTED = SERVAL_STATUS_REJECTED,      // drop: any other reason
};

// The length of replies, if it is that of their requests.
constexpr uint32_t AS_REQUEST = ~0u;

// No deadline.
constexpr uint64_t NO_DEADLINE = SERVAL_NO_DEADLINE;

class Block;
class Mqueue;
class Backend;
class Transfers;  // kernel_transfers.h
class Sockets;  // sockets.h
class Listener;
class Socket;
namespace detail {
class Channel;
struct Inspector;  // defined by tests that break the rules intentionally
template <void (*KERNEL)(Block&, Mqueue&), unsigned WARPS, bool SOCKETS>
SERVAL_DEVICE void run_block(const serval_block_args* args);
}  // namespace detail
template <void (*KERNEL)(Block&, Mqueue&, Sockets&)>
SERVAL_DEVICE void run_with_sockets(Block& block, Mqueue& mqueue);

// Where a request comes from.
struct Peer {
    uint8_t address[16];  // in network byte order; of IPv4 the first four bytes
    uint16_t port;
    uint16_t family;  // 4 or 6; 0: unknown, as over shared memory, or if the connection has ended
};
// Bytes in front of a request of a service with `peer_address = true`.
constexpr uint32_t PEER_BYTES = 32;

// A received message; false in a condition if there is none.
class Message {
  public:
    SERVAL_INLINE explicit operator bool() const { return data_ != nullptr; }
    // Payload bytes, in [0, max_message_bytes].
    SERVAL_INLINE uint32_t len() const { return len_; }
    // The payload, 16-byte aligned. Bytes beyond len() have no meaning.
    template <class T>
    SERVAL_INLINE const T* as() const {
        return reinterpret_cast<const T*>(data_);
    }
    // Only with `peer_address = true`: where the request comes from, and the request itself, 16-byte aligned, without that address. as() and len()
    // are of both together.
    SERVAL_INLINE Peer peer() const {
        Peer peer = {};
        if (len_ < PEER_BYTES) return peer;
        for (unsigned i = 0; i < 16; i++) peer.address[i] = data_[i];
        peer.port = static_cast<uint16_t>(data_[16] | data_[17] << 8);
        peer.family = static_cast<uint16_t>(data_[18] | data_[19] << 8);
        return peer;
    }
    template <class T>
    SERVAL_INLINE const T* request() const {
        return reinterpret_cast<const T*>(data_ + PEER_BYTES);
    }
    SERVAL_INLINE uint32_t request_len() const { return len_ < PEER_BYTES ? 0 : len_ - PEER_BYTES; }
    // Backend answers: OK, TIMEOUT, REFUSED, CLOSED, PROTOCOL or TOO_LONG. The payload is valid only with OK.
    SERVAL_INLINE Status status() const { return static_cast<Status>(status_); }
    // Backend answers: the tag of the request.
    SERVAL_INLINE uint64_t tag() const { return tag_; }

  private:
    friend class Messages;
    friend class Mqueue;
    friend class Sockets;
    friend class detail::Channel;
    friend struct detail::Inspector;
    const uint8_t* data_ = nullptr;
    uint64_t token_ = 0;
    uint64_t tag_ = 0;
    uint32_t len_ = 0;
    uint32_t part_ = 0;  // of a bundle: the message's part of the area for replies; 0 if it came alone
    uint8_t status_ = OK;
};

// A reply under construction: zeroed staging of exactly len() bytes. False in a condition if the length exceeds the mqueue's
// maximum: as() then points to a *sink* of len() bytes. Writing to a sink is harmless; its content is undefined and never sent,
// and sending the reply drops the request as TOO_LONG. Check the reply if filling it in takes time: a length may come from a client.
class Reply {
  public:
    SERVAL_INLINE explicit operator bool() const { return fits_; }
    SERVAL_INLINE uint32_t len() const { return len_; }
    // Memory of len() bytes, 16-byte aligned.
    template <class T>
    SERVAL_INLINE T* as() const {
        return reinterpret_cast<T*>(data_);
    }

  private:
    friend class Mqueue;
    uint8_t* data_ = nullptr;
    uint64_t token_ = 0;
    uint32_t len_ = 0;
    uint32_t part_ = 0;  // as in Message
    bool live_ = false;  // not sent yet
    bool fits_ = false;  // within the mqueue's maximum; if not, `data_` is the sink
};

// Received messages of one length, side by side; false in a condition if there are none.
class Messages {
  public:
    SERVAL_INLINE explicit operator bool() const { return count_ != 0; }
    SERVAL_INLINE uint32_t count() const { return count_; }
    // Payload bytes of each.
    SERVAL_INLINE uint32_t len() const { return len_; }
    // Bytes from one message to the next: len() rounded up to 16.
    SERVAL_INLINE uint32_t stride() const { return detail::round16(len_); }
    // The payload of message `i`, in [0, count()); 16-byte aligned.
    template <class T>
    SERVAL_INLINE const T* as(uint32_t i) const {
        return reinterpret_cast<const T*>(data_ + i * stride());
    }
    // Message `i`, for reply(), send() and drop().
    SERVAL_INLINE Message operator[](uint32_t i) const {
        Message m;
        m.data_ = data_ + i * stride();
        m.token_ = token_ + i;
        m.len_ = len_;
        m.part_ = part_ + i * step_;
        return m;
    }

  private:
    friend class Mqueue;
    const uint8_t* data_ = nullptr;
    uint64_t token_ = 0;  // of the first
    uint32_t len_ = 0, count_ = 0;
    uint32_t part_ = 0, step_ = 0;  // as in Message: of the first, and its distance to the next
    uint32_t room_ = 0;             // for each reply
};

// Replies to all messages of a batch, of one length, under construction. As Reply.
class Replies {
  public:
    SERVAL_INLINE explicit operator bool() const { return fits_; }
    SERVAL_INLINE uint32_t count() const { return count_; }
    SERVAL_INLINE uint32_t len() const { return len_; }
    // Bytes from one reply to the next: len() rounded up to 16. In a sink 0.
    SERVAL_INLINE uint32_t stride() const { return fits_ ? detail::round16(len_) : 0; }
    // Memory for reply `i`, 16-byte aligned.
    template <class T>
    SERVAL_INLINE T* as(uint32_t i) const {
        return reinterpret_cast<T*>(data_ + i * stride());
    }

  private:
    friend class Mqueue;
    uint8_t* data_ = nullptr;
    uint64_t token_ = 0;
    uint32_t len_ = 0, count_ = 0;
    uint32_t part_ = 0, step_ = 0;        // as in Messages
    bool live_ = false, fits_ = false;  // as in Reply
};

// The threads that serve one mqueue.
class Block {
  public:
    // Index of this thread, in [0, size()).
    SERVAL_INLINE unsigned rank() const { return detail::block_rank(); }
    // Threads of the block; 1 on the host.
    SERVAL_INLINE unsigned size() const { return detail::block_size(); }
    // Barrier for all threads; writes made before it are visible to all threads afterwards.
    SERVAL_INLINE void sync() const { detail::block_sync(); }
    // Index of this block, in [0, block count of the service).
    SERVAL_INLINE uint32_t index() const { return args_.block; }
    // Nanoseconds of a monotonic clock. On CUDA the device's global timer.
    SERVAL_INLINE uint64_t now_ns() const;
    // Waits until now_ns() reaches `deadline_ns`, or until an immediate stop of the service.
    inline SERVAL_DEVICE void sleep_until(uint64_t deadline_ns);
    // The value of a parameter of the service (`params`), or `otherwise`; NaN if it is a text. Read parameters once, before the first recv.
    inline SERVAL_DEVICE double param(const char* name, double otherwise) const;
    // The text of a parameter, of at most SERVAL_PARAM_TEXT_BYTES_MAX bytes and a zero byte, or `otherwise` if the service has no such text.
    // It stays where it is as long as the block runs.
    inline SERVAL_DEVICE const char* param_text(const char* name, const char* otherwise) const;

  private:
    friend class Mqueue;
    friend class Backend;
    friend class Sockets;
    friend class Listener;
    friend class Socket;
    template <void (*KERNEL)(Block&, Mqueue&, Sockets&)>
    friend SERVAL_DEVICE void run_with_sockets(Block& block, Mqueue& mqueue);
    friend class detail::Channel;
    friend struct detail::Inspector;
    template <void (*KERNEL)(Block&, Mqueue&), unsigned WARPS, bool SOCKETS>
    friend SERVAL_DEVICE void detail::run_block(const serval_block_args* args);

    inline SERVAL_DEVICE const serval_param* find_param(const char* name) const;
    inline SERVAL_DEVICE void open(const serval_block_args& args, const detail::Place& place);
    inline SERVAL_DEVICE void ready();
    inline SERVAL_DEVICE void finish();
    inline SERVAL_DEVICE void refuse();

    // By the crew: the stop word. On CUDA, where reading it is a trip over the bus, it is read only if `turn` is due, otherwise the
    // result is RUN.
    SERVAL_INLINE uint64_t poll_engine(uint64_t turn);
    SERVAL_INLINE bool engine_words_due(uint64_t turn) const;
    SERVAL_INLINE bool engine_words_due(uint64_t from, uint64_t to) const;
    // By the crew, on CUDA, at intervals: the heartbeat, and the counts.
    SERVAL_CALL void watch_engine();
    SERVAL_INLINE bool heartbeat_due(uint64_t from, uint64_t to) const;
    SERVAL_INLINE bool is_due(uint64_t from, uint64_t to, uint32_t every, uint32_t offset) const;
    // By the crew: the stop word, and everything published before it.
    SERVAL_INLINE uint64_t stop_word();
    // By the crew: waits briefly, on the host until the runtime resumes the block.
    SERVAL_INLINE void pause(uint32_t why, uint64_t deadline_ns, unsigned tries);
    SERVAL_INLINE void charge();
    SERVAL_INLINE void end(uint64_t reason);
    SERVAL_INLINE bool ended() const { return reason_ != SERVAL_REASON_NONE; }
    // Ended for a reason after which nothing can be sent.
    SERVAL_INLINE bool broken() const { return reason_ > SERVAL_REASON_STOPPED; }
    inline SERVAL_DEVICE void check_heartbeat();
    // By the crew, before it waits: replies that wait for the rest of their bundle are published.
    SERVAL_INLINE void publish_answers();
    SERVAL_INLINE void count(uint64_t& counter, uint64_t* word, uint64_t by = 1);
    inline SERVAL_DEVICE void publish_counts();
#if SERVAL_CUDA
    SERVAL_CALL void rest(unsigned tries);
    SERVAL_INLINE bool counts_are_due() const;
    SERVAL_CALL void publish_counts_in_time();
    uint32_t sleeps_;        // clock reads by sleeps
    uint32_t published_at_;  // upper bits of the multiprocessor's clock at the last publication
    // The counters of server mqueue messages, and their initial values; null before there is an mqueue.
    const uint64_t *received_of_, *sent_of_;
    uint64_t received_from_, sent_from_;
#endif

    serval_block_args args_;
    serval_engine_words* engine_;
    serval_block_words* words_;
    uint64_t reason_;
    uint64_t budget_left_;
    uint64_t received_, sent_, dropped_;
    detail::Channel* answering_;  // has a completion in progress; null if none has
    detail::HeartbeatMonitor heartbeat_;
};

namespace detail {

// An mqueue's two rings and its staging: common to server and client mqueues.
class Channel {
  private:
    friend class serval::Mqueue;
    friend class serval::Backend;
    friend class serval::Block;
    friend class serval::Sockets;
    template <void (*KERNEL)(Block&, Mqueue&, Sockets&)>
    friend SERVAL_DEVICE void serval::run_with_sockets(Block& block, Mqueue& mqueue);
    friend struct Inspector;

    inline SERVAL_DEVICE bool open(const serval_block_args& args, const Place& place, unsigned i);
    inline SERVAL_DEVICE bool open_rings(const serval_block_args& args, const Place& place, unsigned i, unsigned rx_kind, unsigned tx_kind,
                                         uint32_t index);
    SERVAL_INLINE Message recv(Block& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, bool asks);
    SERVAL_INLINE uint32_t recv(Block& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, bool asks, Wish wish, Message& m);
    template <class B>
    SERVAL_APART Found recv_other(B& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, bool asks, Wish wish);
    SERVAL_CALL bool await(Block& block, uint32_t why, uint64_t deadline_ns, bool ends_on_drain, Header& h, unsigned tries, bool asks_first);
    SERVAL_INLINE bool send(Block& block, const Header& h, const uint8_t* data);
    SERVAL_CALL bool transmit(Block& block, Header h, const uint8_t* data);
#if SERVAL_CUDA
    SERVAL_INLINE bool send_short(Block& block, const Header& h, const Producer::Draft& draft);
    // Is it eligible for the short path? The crew does all of it.
    SERVAL_INLINE bool is_short(const Header& h) const {
        return SERVAL_LIKELY(out_path_ == SERVAL_PROTOCOL_GRANULE16 && units_for<Granule16>(h.len) <= CREW_SIZE);
    }
#endif
#if SERVAL_CUDA
    SERVAL_INLINE bool find(Block& block, uint64_t deadline_ns, bool ends_on_drain, Header& h, bool asks);
    SERVAL_CALL unsigned settle(Block& block, uint64_t deadline_ns, bool ends_on_drain, bool nonsense, bool found, bool asks,
                                unsigned before, unsigned tries);
#endif
    SERVAL_INLINE Look reserve();
    SERVAL_CALL bool await_credit(Block& block);
    template <class B>
    SERVAL_RARE bool wait_for_credit(B& block, Look look);
    struct Standstill;
    SERVAL_INLINE bool waits_for_itself(Standstill& last, uint64_t now_ns) const;
    SERVAL_INLINE bool tell_block(bool value);
    SERVAL_INLINE void release_if(bool idle);
#if SERVAL_CUDA
    SERVAL_INLINE void release_when_due();
#endif
    SERVAL_INLINE bool each_slot_counts() const;
    template <class B>
    SERVAL_INLINE void open_bundle(B& block);
    template <class B>
    SERVAL_INLINE Found take_from_bundle(B& block, bool asks, Wish wish);
    template <class B>
    SERVAL_APART bool answer(B& block, uint64_t token, uint32_t part, const uint8_t* data, uint32_t len, uint32_t count);
    template <class B>
    SERVAL_APART bool publish_answers(B& block);
    SERVAL_INLINE void write_replies(uint8_t* to, const uint8_t* data, uint32_t len, uint32_t count);
#if SERVAL_CUDA
    SERVAL_CALL void stage(uint32_t i, uint32_t room);
#else
    inline uint32_t stage(uint32_t i, uint32_t count, uint32_t room);
#endif

    Consumer rx_;
    Producer tx_;
    uint8_t* in_;
    uint8_t* out_;
    uint32_t out_bytes_;
    uint32_t polls_;  // polls by receives with a time limit; for a granule16 ring on CUDA, unsuccessful ones
#if SERVAL_CUDA
    uint32_t brief_from_;  // unsuccessful polls after which polls are brief
    Granule16* lines_;     // lines of later messages that a poll fetched as well; null if there is no room
    uint32_t kept_first_;  // number of the first of those messages
    uint32_t kept_count_;
    uint32_t asked_;  // number of the message at which the engine's words were last read
    bool pays_;       // the last message was found at once: polling for more of them pays off
#endif
    bool is_server_;
    bool go_;            // the crew's result for the block
    bool has_slot_;      // a slot was found that is no message
    uint8_t in_path_;    // the protocol of RX; PATH_BUNDLE while a bundle has more messages
    uint8_t out_path_;   // the protocol of TX; PATH_BUNDLE while a completion is in progress, which any other message must follow
    Bundles* bundles_;   // null if there are none
    // What a receive has found that is not of the short path, beside rx_.message.
    const uint8_t* given_;
    uint32_t given_count_;
};

}  // namespace detail

// A client mqueue: requests to one backend of the service, and its answers. Every request is answered: by the backend, or
// by the engine with a status that gives the reason.
class Backend {
  public:
    // Sends `len` bytes at `data`, private memory visible to all threads, with any alignment. Waits for room. False, and nothing was sent,
    // if `len` exceeds the mqueue's maximum or the service stops immediately. The tag is returned with the answer. Room for an answer is
    // reserved before its request leaves: a block that keeps sending without receiving, until answers fill the ring, would wait for itself,
    // which breaks its contract (as many as the service has `slots`; for answers that do not fit a slot, as many as the arena holds: this
    // is detected after ten seconds without progress). The block ends.
    inline SERVAL_DEVICE bool send(Block& block, const void* data, uint32_t len, uint64_t tag);
    // The next answer. Nothing if the service stops immediately; a drain still waits for outstanding answers. Waiting
    // without an outstanding request breaks the contract, unless the service stops: the block ends.
    inline SERVAL_DEVICE Message recv(Block& block);
    // As recv, but also returns nothing if no answer is available yet, or no request is outstanding.
    inline SERVAL_DEVICE Message try_recv(Block& block);
    // As try_recv, but waits for an answer until now_ns() reaches `deadline_ns`.
    inline SERVAL_DEVICE Message recv_until(Block& block, uint64_t deadline_ns);
    // Requests whose answers have not been received.
    SERVAL_INLINE uint64_t outstanding() const {
        detail::block_sync();  // other threads may already be in the next send or receive
        return outstanding_;
    }

  private:
    friend class Mqueue;
    friend class Transfers;
    detail::Channel channel_;
    uint64_t outstanding_;
    // Of a backend that does transfers: memory that they may name.
    uint8_t* memory_;
    uint64_t memory_bytes_;
};

// A server mqueue: the requests of many clients, and the replies to them.
class Mqueue {
  public:
    // The next request. Nothing if the service stops; when it drains, after the last pending request.
    SERVAL_INLINE Message recv(Block& block);
    // As recv, but also returns nothing if no request is available; ended() distinguishes the two.
    SERVAL_INLINE Message try_recv(Block& block);
    // As recv, but returns nothing if no request arrived until now_ns() reached `deadline_ns`.
    SERVAL_INLINE Message recv_until(Block& block, uint64_t deadline_ns);
    // The next requests of one length, at least one: as many of a bundle as there is room for, at most `max`, or one that came alone. Room for
    // replies of at most `reply_bytes` each is reserved. The messages are valid until the next receive.
    SERVAL_INLINE Messages recv_many(Block& block, uint32_t max = SERVAL_BUNDLE_MAX, uint32_t reply_bytes = AS_REQUEST);
    // True once the service stops: a receive returned nothing, and all later ones will.
    SERVAL_INLINE bool ended(const Block& block) const { return block.ended(); }

    // Zeroed staging for a reply of `len` bytes to `msg`, or a sink if that exceeds the mqueue's maximum. There is one staging buffer: send
    // the reply before starting the next one.
    SERVAL_INLINE Reply reply(Block& block, const Message& msg, uint32_t len);
    // Sends the reply to the client that sent the request. Waits for room. False, and nothing was sent, if the service stops immediately.
    // Sending a reply twice, or writing past its end, breaks the kernel's contract: the block ends.
    SERVAL_INLINE bool send(Block& block, Reply& reply);
    // As reply(), for the messages of the last recv_many, and for at most as many bytes as it reserved.
    SERVAL_INLINE Replies reply_many(Block& block, const Messages& batch, uint32_t len);
    // As send(): all of them, mostly with one completion.
    SERVAL_INLINE bool send_many(Block& block, Replies& replies);
    // As drop(), for each message.
    SERVAL_INLINE bool drop_many(Block& block, const Messages& batch, Status reason);
    // Ends a request without a reply. Reasons: BAD_LENGTH, REJECTED; OK if the protocol wants no reply: the request then counts as
    // consumed instead of dropped.
    SERVAL_INLINE bool drop(Block& block, const Message& msg, Status reason);

    // Client mqueues of this block.
    SERVAL_INLINE unsigned backends() const { return backend_count_; }
    // The client mqueue of backend `i`, in [0, backends()), in the order of the configuration.
    SERVAL_INLINE Backend& backend(unsigned i) { return backends_[i]; }

  private:
    friend struct detail::Inspector;
    template <void (*KERNEL)(Block&, Mqueue&), unsigned WARPS, bool SOCKETS>
    friend SERVAL_DEVICE void detail::run_block(const serval_block_args* args);

    inline SERVAL_DEVICE bool open(Block& block, const serval_block_args& args, const detail::Place& place, Backend* backends);
    inline SERVAL_DEVICE void close();
    SERVAL_INLINE uint32_t take(Block& block, uint64_t deadline_ns, detail::Wish wish, Message& m);
    SERVAL_INLINE void prepare(uint8_t* data, uint32_t bytes, uint32_t limit);
    SERVAL_INLINE uint8_t* sink(Block& block, uint32_t len);
    SERVAL_INLINE uint32_t limit(const uint8_t* data, uint32_t count) const;
    SERVAL_INLINE bool finish(Block& block, const Replies& r, uint32_t bytes);
    SERVAL_CALL bool send_drops(Block& block, uint64_t token, uint32_t part, uint32_t step, uint32_t count, Status reason);
#if SERVAL_CUDA
    template <class B>
    SERVAL_RARE void exit(B& block);
#endif

    detail::Channel channel_;
    detail::Bundles bundles_;
#if SERVAL_CUDA
    detail::Granule16 lines_[(detail::Consumer::LINES - 1) * detail::LINE_UNITS16];
#endif
    Backend* backends_;
    unsigned backend_count_;
};

}  // namespace serval

#include "kernel_impl.h"
#include "bundle_impl.h"
#include "mqueue_impl.h"
#include "entry.h"

#endif
