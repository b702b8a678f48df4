// Stream sockets of kernels: a block accepts and opens connections, and receives and sends bytes.
//
//     #include <serval/sockets.h>
//
//     SERVAL_SOCKET_KERNEL(sum) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
//         serval::Listener in = sockets.listen(0);                   // the service's first [[service.socket]]
//         while (serval::Socket s = in.accept(block)) {               // false when the service stops
//             SERVAL_SHARED uint32_t pair[2];
//             while (s.recv_all(block, pair, 8) == serval::OK) {
//                 if (block.rank() == 0) pair[0] += pair[1];
//                 s.send_all(block, pair, 4);
//             }
//             s.close(block);
//         }
//     }
//
// What a service's kernel may listen at and connect to is in its configuration; the kernel names these addresses by their order. The peers are
// ordinary TCP programs. All functions here are called by *all* threads of the block together, with the same arguments; memory to send is written
// by all threads before the call, and received bytes are visible to all threads after it. On CUDA that memory is private to the block: global
// or shared memory. A `Socket` is a small value that may be copied; one that was closed stays closed.
//
// Every call returns a status, and every wait may have a deadline. While the service drains, accept and connect return DRAINING, and open
// sockets go on until the peers end, or the service's time is over. Receiving from one that is idle then returns DRAINING: its peer has no more
// requests, and the block may send what it has and closes it. A kernel may also return then: its sockets are closed, and it is called again,
// until the service stops.
//
// A Listener, a Socket and Sockets belong to one block. A block has the number of sockets that the service's `sockets_per_block` says.
#ifndef SERVAL_SOCKETS_H
#define SERVAL_SOCKETS_H

#include "kernel.h"
#include "stream.h"

// Maximum number of sockets of a block on CUDA, where their state is in shared memory.
#ifndef SERVAL_SOCKET_SLOTS_MAX
#define SERVAL_SOCKET_SLOTS_MAX (SERVAL_CUDA ? 16 : SERVAL_SOCKETS_MAX)
#endif
// Maximum number of addresses of a service.
#define SERVAL_SOCKET_SPECS_MAX 16

namespace serval {

// How a call on a socket ended, beside OK, TIMEOUT, REFUSED and CLOSED of Status.
constexpr Status RESET = static_cast<Status>(SERVAL_STATUS_RESET);              // the connection broke, or was reset
constexpr Status NOT_ALLOWED = static_cast<Status>(SERVAL_STATUS_NOT_ALLOWED);  // no such address in the configuration
constexpr Status EXHAUSTED = static_cast<Status>(SERVAL_STATUS_EXHAUSTED);      // all sockets of the block are in use
constexpr Status AGAIN = static_cast<Status>(SERVAL_STATUS_AGAIN);              // the call would wait
constexpr Status DRAINING = static_cast<Status>(SERVAL_STATUS_DRAINING);        // the service stops; from a receive: this connection ends, so close it and accept on

// The result of a receive or a send: OK and how many bytes, at least 1 unless none were asked for; or why none.
struct Io {
    Status status;
    uint64_t bytes;
    SERVAL_INLINE explicit operator bool() const { return status == OK; }
};

class Sockets;

// A connection; false in a condition if there is none.
class Socket {
  public:
    SERVAL_INLINE Socket() : sockets_(nullptr), slot_(0), generation_(0), status_(CLOSED) {}
    SERVAL_INLINE explicit operator bool() const { return generation_ != 0; }
    // Why there is no connection: TIMEOUT, REFUSED, NOT_ALLOWED, EXHAUSTED, AGAIN or DRAINING.
    SERVAL_INLINE Status status() const { return status_; }

    // Receives at least one byte and at most `max`. CLOSED after the last byte of a peer that has ended its direction.
    SERVAL_INLINE Io recv(Block& block, void* to, uint64_t max) { return recv_until(block, to, max, NO_DEADLINE); }
    // As recv; AGAIN if there is nothing now.
    SERVAL_INLINE Io try_recv(Block& block, void* to, uint64_t max) { return recv_until(block, to, max, detail::NOT_WAITING); }
    // As recv; TIMEOUT if there was nothing before now_ns() reached `deadline_ns`.
    inline SERVAL_DEVICE Io recv_until(Block& block, void* to, uint64_t max, uint64_t deadline_ns);
    // Receives exactly `bytes` bytes. With another status than OK some may have been received.
    inline SERVAL_DEVICE Status recv_all(Block& block, void* to, uint64_t bytes, uint64_t deadline_ns = NO_DEADLINE);

    // Sends at least one byte and at most `max`: OK means that they are in the ring, not that the peer has them.
    SERVAL_INLINE Io send(Block& block, const void* from, uint64_t max) { return send_until(block, from, max, NO_DEADLINE); }
    SERVAL_INLINE Io try_send(Block& block, const void* from, uint64_t max) { return send_until(block, from, max, detail::NOT_WAITING); }
    inline SERVAL_DEVICE Io send_until(Block& block, const void* from, uint64_t max, uint64_t deadline_ns);
    // Sends all bytes. With another status than OK some may have been sent.
    inline SERVAL_DEVICE Status send_all(Block& block, const void* from, uint64_t bytes, uint64_t deadline_ns = NO_DEADLINE);

    // Bytes that were sent so far: where those of a transfer to this socket begin.
    inline SERVAL_DEVICE uint64_t position() const;

    // Ends the sending direction: the peer reads the end after what was sent. Receiving goes on.
    inline SERVAL_DEVICE Status shutdown(Block& block);
    // Ends the socket without waiting; the engine sends what is left.
    inline SERVAL_DEVICE Status close(Block& block);
    // Ends the connection at once; what is left is lost.
    inline SERVAL_DEVICE Status reset(Block& block);

  private:
    friend class Sockets;
    friend class Listener;
    friend class Transfers;
    Sockets* sockets_;
    uint32_t slot_;
    uint32_t generation_;
    Status status_;
};

// An address where connections arrive.
class Listener {
  public:
    // The next connection. Without one: DRAINING, or NOT_ALLOWED if the service has no such listener.
    SERVAL_INLINE Socket accept(Block& block) { return accept_until(block, NO_DEADLINE); }
    // As accept; AGAIN if no connection waits.
    SERVAL_INLINE Socket try_accept(Block& block) { return accept_until(block, detail::NOT_WAITING); }
    // As accept; TIMEOUT if none came before now_ns() reached `deadline_ns`: then it waits for none until the next call.
    inline SERVAL_DEVICE Socket accept_until(Block& block, uint64_t deadline_ns);

  private:
    friend class Sockets;
    SERVAL_INLINE Listener(Sockets* sockets, uint32_t index) : sockets_(sockets), index_(index) {}
    Sockets* sockets_;
    uint32_t index_;
};

// All sockets of a block.
class Sockets {
  public:
    // The listener with this index among the service's sockets.
    SERVAL_INLINE Listener listen(uint32_t index) { return Listener(this, index); }
    // Connects to the peer with this index among the service's sockets. Without a connection: REFUSED, TIMEOUT (the service's request_timeout_ms,
    // or the deadline), EXHAUSTED, NOT_ALLOWED or DRAINING.
    inline SERVAL_DEVICE Socket connect(Block& block, uint32_t index, uint64_t deadline_ns = NO_DEADLINE);
    // The index of a socket among `count` that can be received from or has ended, each in turn; `count` if a listener at which try_accept found no
    // connection has one now, or will have none: call try_accept; -1 if there is neither before the deadline, or the service stops
    // immediately. Sockets without a connection are skipped.
    inline SERVAL_DEVICE int poll(Block& block, const Socket* sockets, unsigned count, uint64_t deadline_ns = NO_DEADLINE);
    // True once the service stops.
    SERVAL_INLINE bool ended(const Block& block) const { return block.ended(); }

  private:
    friend class Socket;
    friend class Listener;
    template <void (*KERNEL)(Block&, Mqueue&, Sockets&)>
    friend SERVAL_DEVICE void run_with_sockets(Block& block, Mqueue& mqueue);

    // One slot. Written by the leader.
    struct Slot {
        detail::StreamReader rx;
        detail::StreamWriter tx;
        uint32_t generation;  // 0: the block does not have it
        bool shut;
    };

    inline SERVAL_DEVICE bool open(Block& block);
    inline SERVAL_DEVICE bool open_stream(detail::StreamRing& ring, const detail::Place& place, unsigned kind, uint32_t index);
    // Calls `value` by the leader; the result is for all threads. It may change the state: no other thread reads it meanwhile.
    template <class F>
    SERVAL_INLINE uint64_t tell(F value);
    // By all threads: waits for a message of the engine until the deadline, and takes it. False: none came, or the block ends.
    SERVAL_CALL bool pump(Block& block, uint64_t deadline_ns, bool ends_on_drain);
    SERVAL_CALL bool command(Block& block, uint64_t token, uint32_t op, uint32_t slot, uint32_t generation, uint32_t value);
    inline SERVAL_DEVICE bool take(uint64_t token, const serval_socket_message& message);
    SERVAL_INLINE bool has_accepted() const;
    SERVAL_INLINE Slot* find(const Socket& socket);
    SERVAL_INLINE Socket socket_of(uint64_t found);
    SERVAL_CALL Status waited(Block& block, uint64_t deadline_ns);
    SERVAL_CALL bool is_stopped(Block& block);
    SERVAL_CALL Io corrupt(Block& block);
    inline SERVAL_DEVICE uint64_t find_ready(const Socket* sockets, unsigned count, unsigned from);
    SERVAL_CALL Status end_slot(Block& block, Socket& socket, uint32_t how);
    // By the leader: a stream has ended with this word. The result is for the other threads.
    SERVAL_INLINE uint64_t stream_ended(uint64_t word);
    // By all threads, after the kernel has returned: whether it is called again.
    SERVAL_CALL bool goes_on(Block& block);

    detail::Channel channel_;
    uint32_t slot_count_;
    uint32_t poll_from_;
    uint64_t told_;
    uint64_t token_;                                   // of the last command
    uint64_t connect_token_;                           // of the attempt that is waited for; 0: none
    uint64_t connected_;                               // its result
    uint64_t accept_tokens_[SERVAL_SOCKET_SPECS_MAX];  // of the accepts in flight; 0: none
    uint64_t accepted_[SERVAL_SOCKET_SPECS_MAX];       // their results, which no call has taken; 0: none
    uint64_t unwanted_;                                // a connection that came too late, as a result; 0: none
    bool is_drained_;                                  // a call of this run of the kernel returned DRAINING before the service stopped
    Slot slots_[SERVAL_SOCKET_SLOTS_MAX];
};

}  // namespace serval

#include "sockets_impl.h"

#endif
