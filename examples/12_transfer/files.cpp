// files: reads ranges of files into the block's memory, and answers with their digests.
//
// A request is u32 file, u32 pad, u64 offset, u64 bytes, little-endian. The reply is u32 status (SERVAL_TRANSFER_*), u32 sum of the bytes as the
// kernel sees them in its memory, u64 bytes, and 32 bytes of SHA-256. A file is named by its order in the configuration. The kernel believes
// no request: the engine checks file, range and memory, and answers with a status.
#include <serval/kernel_transfers.h>

namespace {

struct Request {
    uint32_t file, pad;
    uint64_t offset, bytes;
};
struct Answer {
    uint32_t status, sum;
    uint64_t bytes;
    uint8_t digest[32];
};

}  // namespace

SERVAL_KERNEL(files) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED uint32_t sum;
    serval::Transfers disk(q.backend(0));
    while (auto msg = q.recv(block)) {
        if (msg.len() != sizeof(Request)) {
            q.drop(block, msg, serval::BAD_LENGTH);
            continue;
        }
        const Request request = *msg.as<const Request>();
        const auto number = static_cast<uint16_t>(request.file < 0xffff ? request.file : 0xffff);
        const auto command = disk.from_file(number, request.offset, request.bytes).with_digest(SERVAL_TRANSFER_SHA256);
        const auto done = disk.run(block, command);
        block.sync();
        if (block.rank() == 0) {
            sum = 0;
            for (uint64_t i = 0; i < done.written && i < disk.memory_bytes(); i++) sum += disk.memory()[i];
        }
        block.sync();
        auto reply = q.reply(block, msg, sizeof(Answer));
        if (reply && block.rank() == 0) {
            Answer& answer = *reply.as<Answer>();
            answer.status = done.status;
            answer.sum = sum;
            answer.bytes = done.written;
            for (unsigned i = 0; i < 32; i++) answer.digest[i] = done.digest[i];
        }
        q.send(block, reply);
    }
}
