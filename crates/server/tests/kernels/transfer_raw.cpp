// Sends each request unchanged to the first backend, which does transfers, and answers with its answer: u8 status, then the payload. A test's
// requests thus are the commands of a kernel that writes whatever it likes. A request that begins with "P" puts its other bytes into the block's
// memory, "G" is answered with the memory's first bytes, and "B" with u32 number of further requests sends the rest that many times.
#include <serval/kernel_transfers.h>

SERVAL_KERNEL(transfer_raw) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED uint8_t copy[256];
    serval::Backend& backend = q.backend(0);
    serval::Transfers disk(backend);
    while (auto msg = q.recv(block)) {
        const uint32_t len = msg.len() < sizeof copy ? msg.len() : sizeof copy;
        for (uint32_t i = block.rank(); i < len; i += block.size()) copy[i] = msg.as<const uint8_t>()[i];
        block.sync();
        if (len > 0 && (copy[0] == 'P' || copy[0] == 'G')) {
            if (block.rank() == 0)
                for (uint32_t i = 1; copy[0] == 'P' && i < len; i++) disk.memory()[i - 1] = copy[i];
            auto reply = q.reply(block, msg, 128);
            if (reply && block.rank() == 0)
                for (uint32_t i = 0; i < 128; i++) reply.as<uint8_t>()[i] = disk.memory()[i];
            q.send(block, reply);
            continue;
        }
        uint32_t times = 1, from = 0, good = 0;
        if (len >= 8 && copy[0] == 'B') {
            times = copy[4];
            from = 8;
        }
        uint32_t sent = 0, received = 0;
        uint8_t answer[65] = {255};
        uint32_t answered = 1;
        while (received < times) {
            if (sent < times && sent - received < 8) {
                if (!backend.send(block, copy + from, len - from, sent)) break;
                sent++;
                continue;
            }
            const serval::Message got = backend.recv(block);
            if (!got) break;
            received++;
            answer[0] = got.status();
            answered = 1 + (got.len() < 64 ? got.len() : 64);
            for (uint32_t i = 1; i < answered; i++) answer[i] = got.as<const uint8_t>()[i - 1];
            good += got.status() == serval::OK && got.len() == sizeof(serval_transfer_done) && answer[1] == SERVAL_TRANSFER_OK;
        }
        const uint32_t bytes = from ? 4 : answered;
        auto reply = q.reply(block, msg, bytes);
        if (reply && block.rank() == 0)
            for (uint32_t i = 0; i < bytes; i++) reply.as<uint8_t>()[i] = from ? static_cast<uint8_t>(good >> 8 * i) : answer[i];
        q.send(block, reply);
    }
}
