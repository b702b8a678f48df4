// Transfers that kernels ask for: bytes move between files, peers and memory of the block, and no thread of the kernel copies any.
//
//     #include <serval/kernel_transfers.h>
//
//     SERVAL_KERNEL(checksum) (serval::Block& block, serval::Mqueue& q) {
//         serval::Transfers disk(q.backend(0));                          // the backend with connect = "transfer"
//         while (auto msg = q.recv(block)) {
//             auto done = disk.run(block, disk.from_file(0, 0, 4096).with_digest(SERVAL_TRANSFER_SHA256));
//             auto reply = q.reply(block, msg, done.digest_bytes);       // 4096 bytes of the first [[service.file]] are in disk.memory()
//             ...
//
// What a transfer may use is in the configuration: files and peers, which a kernel names by their order, and `memory_bytes` of memory for each
// block. Only the block and its transfers use that memory: what a transfer has written is visible when its result has been received, and
// what it is to read must be written by all threads before it starts.
//
// All functions here but the accessors are called by *all* threads of the block together, with the same arguments. Not in a SERVAL_WARP_KERNEL.
#ifndef SERVAL_KERNEL_TRANSFERS_H
#define SERVAL_KERNEL_TRANSFERS_H

#include "kernel.h"
#include "sockets.h"

namespace serval {

// A transfer to be started: a source and a sink, and stages between them.
struct TransferCommand : serval_transfer_command {
    // To the end of the file, or of what a peer sends.
    static constexpr uint64_t ALL = ~uint64_t{0};

    SERVAL_INLINE TransferCommand(uint8_t from, uint16_t from_number, uint64_t from_offset, uint8_t to, uint16_t to_number, uint64_t to_offset,
                                  uint64_t count)
        : serval_transfer_command{from, to, SERVAL_TRANSFER_NO_DIGEST, 0, from_number, to_number, from_offset, to_offset, count, 0, {0, 0, 0}} {}

    // With a digest of the plain bytes: SERVAL_TRANSFER_MD5, SHA256, CRC32C or SHA1.
    SERVAL_INLINE TransferCommand with_digest(uint8_t kind) const {
        TransferCommand c = *this;
        c.digest = kind;
        return c;
    }
    // With stages: SERVAL_TRANSFER_OPEN, EXPAND_GZIP, EXPAND_ZSTD, COMPRESS_GZIP, COMPRESS_ZSTD and SEAL, or several of them.
    SERVAL_INLINE TransferCommand with_stages(uint8_t which) const {
        TransferCommand c = *this;
        c.stages = static_cast<uint8_t>(c.stages | which);
        return c;
    }
};

// How a transfer ended. False in a condition if it did not move all bytes.
struct TransferResult : serval_transfer_done {
    // With which it was started.
    uint64_t tag;
    SERVAL_INLINE explicit operator bool() const { return status == SERVAL_TRANSFER_OK; }
};

// The transfers of a block. `status` of a result is one of SERVAL_TRANSFER_*; FAILED also if the engine does not answer, or the service stops.
class Transfers {
  public:
    // Of a backend that does transfers.
    SERVAL_INLINE explicit Transfers(Backend& backend) : backend_(&backend) {}
    // The block's memory. Null if the backend is a server.
    SERVAL_INLINE uint8_t* memory() const { return backend_->memory_; }
    SERVAL_INLINE uint64_t memory_bytes() const { return backend_->memory_bytes_; }
    // Transfers whose results were not received.
    SERVAL_INLINE uint64_t outstanding() const { return backend_->outstanding(); }

    // From file `file` to the block's memory, and back. Offsets in the memory count from its beginning.
    SERVAL_INLINE TransferCommand from_file(uint16_t file, uint64_t offset, uint64_t bytes, uint64_t at = 0) const {
        return TransferCommand(SERVAL_TRANSFER_FILE, file, offset, SERVAL_TRANSFER_MEMORY, 0, at, bytes);
    }
    SERVAL_INLINE TransferCommand to_file(uint16_t file, uint64_t offset, uint64_t bytes, uint64_t at = 0) const {
        return TransferCommand(SERVAL_TRANSFER_MEMORY, 0, at, SERVAL_TRANSFER_FILE, file, offset, bytes);
    }
    // From a file to a new connection to peer `peer`, which ends with the transfer; from the memory to one, and from one to the memory.
    SERVAL_INLINE TransferCommand send_file(uint16_t file, uint64_t offset, uint64_t bytes, uint16_t peer) const {
        return TransferCommand(SERVAL_TRANSFER_FILE, file, offset, SERVAL_TRANSFER_CONNECTION, peer, 0, bytes);
    }
    SERVAL_INLINE TransferCommand send_memory(uint64_t at, uint64_t bytes, uint16_t peer) const {
        return TransferCommand(SERVAL_TRANSFER_MEMORY, 0, at, SERVAL_TRANSFER_CONNECTION, peer, 0, bytes);
    }
    // From a file, or the memory, to a socket of the block, which stays open. The peer gets what was sent to the socket before, the bytes of the transfer,
    // and what is sent later, in this order; sending goes on at once, and a close takes effect behind it. A transfer that fails resets the connection,
    // unless its command is refused at once: BAD_COMMAND, NOT_ALLOWED, RANGE, CLOSED.
    SERVAL_INLINE TransferCommand send_file(uint16_t file, uint64_t offset, uint64_t bytes, const Socket& socket) const {
        return to_socket(TransferCommand(SERVAL_TRANSFER_FILE, file, offset, SERVAL_TRANSFER_SOCKET, 0, 0, bytes), socket);
    }
    SERVAL_INLINE TransferCommand send_memory(uint64_t at, uint64_t bytes, const Socket& socket) const {
        return to_socket(TransferCommand(SERVAL_TRANSFER_MEMORY, 0, at, SERVAL_TRANSFER_SOCKET, 0, 0, bytes), socket);
    }
    SERVAL_INLINE TransferCommand receive(uint16_t peer, uint64_t bytes, uint64_t at = 0) const {
        return TransferCommand(SERVAL_TRANSFER_CONNECTION, peer, 0, SERVAL_TRANSFER_MEMORY, 0, at, bytes);
    }
    // From a file to another one.
    SERVAL_INLINE TransferCommand copy_file(uint16_t from, uint64_t offset, uint64_t bytes, uint16_t to, uint64_t to_offset) const {
        return TransferCommand(SERVAL_TRANSFER_FILE, from, offset, SERVAL_TRANSFER_FILE, to, to_offset, bytes);
    }

    // Starts a transfer; its result has this tag. Waits for room. False if the service stops immediately. As many as `in_flight` of the
    // backend run at a time, and further ones wait.
    SERVAL_INLINE bool start(Block& block, const TransferCommand& command, uint64_t tag = 0) {
        SERVAL_SHARED uint64_t words[sizeof(serval_transfer_command) / 8];
        static_assert(sizeof(serval_transfer_command) % 8 == 0, "copied word by word");
        const auto* from = reinterpret_cast<const uint8_t*>(static_cast<const serval_transfer_command*>(&command));
        block.sync();
        auto* to = reinterpret_cast<uint8_t*>(words);
        for (unsigned i = block.rank(); i < sizeof(serval_transfer_command); i += block.size()) to[i] = from[i];
        block.sync();
        return backend_->send(block, words, sizeof(serval_transfer_command), tag);
    }
    // The next result. Results come in the order in which transfers end.
    SERVAL_INLINE TransferResult next(Block& block) { return result(backend_->recv(block)); }
    // Starts a transfer and waits for its result; no others may be outstanding.
    SERVAL_INLINE TransferResult run(Block& block, const TransferCommand& command) {
        return start(block, command) ? next(block) : result(Message());
    }

  private:
    SERVAL_INLINE static TransferCommand to_socket(TransferCommand command, const Socket& socket) {
        command.sink_file = static_cast<uint16_t>(socket.slot_);
        // No slot has the lease of a socket that there is not: the engine answers CLOSED.
        command.lease = socket ? socket.generation_ : UINT32_MAX;
        command.sink_offset = socket.position();
        return command;
    }

    SERVAL_INLINE static TransferResult result(const Message& answer) {
        TransferResult r{{SERVAL_TRANSFER_FAILED, 0, 0, 0, {}, 0}, answer ? answer.tag() : 0};
        if (!answer) return r;
        if (answer.status() == TIMEOUT) r.status = SERVAL_TRANSFER_TIMEOUT;
        if (answer.status() != OK || answer.len() != sizeof(serval_transfer_done)) return r;
        static_cast<serval_transfer_done&>(r) = *answer.as<const serval_transfer_done>();
        return r;
    }

    Backend* backend_;
};

}  // namespace serval

#endif
