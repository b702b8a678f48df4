// A service with two backends: one does transfers, the other one is a server. A request's first byte is the number of the one that does
// transfers. The kernel reads the first 8 bytes of file 0 into its memory, and sends them to the server. The reply is the server's answer.
#include <serval/kernel_transfers.h>

SERVAL_KERNEL(transfer_beside) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        const uint32_t number = msg.len() == 1 && *msg.as<const uint8_t>() == 1;
        serval::Transfers disk(q.backend(number));
        serval::Backend& other = q.backend(1 - number);
        const auto done = disk.run(block, disk.from_file(0, 0, 8));
        uint32_t answered = 0;
        uint8_t answer[8] = {0};
        if (done && other.send(block, disk.memory(), 8, 1)) {
            const serval::Message got = other.recv(block);
            answered = got && got.status() == serval::OK && got.len() == 8 ? 8 : 0;
            for (uint32_t i = 0; i < answered; i++) answer[i] = got.as<const uint8_t>()[i];
        }
        auto reply = q.reply(block, msg, answered);
        if (reply && block.rank() == 0)
            for (uint32_t i = 0; i < answered; i++) reply.as<uint8_t>()[i] = answer[i];
        q.send(block, reply);
    }
}
