// lenet: classifies handwritten digits. Request: 784 bytes, 28x28 grey. Reply: u8 digit, 3 zero bytes, 10 float32 little
// endian logits. A request of 792 bytes ends with 8 bytes of the client's choice, such as a number, and so does its reply of 52. The
// network is in models/lenet.h.
#include <serval/kernel.h>

#include "../models/lenet.h"

// Pictures whose replies are sent together: no reply waits for many others.
constexpr unsigned MESSAGES = 4;

SERVAL_KERNEL(lenet) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED serval_lenet::Scratch scratch;
    while (auto batch = q.recv_many(block, MESSAGES, serval_lenet::OUTPUT_BYTES + serval_lenet::NUMBER_BYTES)) {
        const bool is_numbered = batch.len() == serval_lenet::INPUT_BYTES + serval_lenet::NUMBER_BYTES;
        if (batch.len() != serval_lenet::INPUT_BYTES && !is_numbered) {
            q.drop_many(block, batch, serval::BAD_LENGTH);
            continue;
        }
        auto replies = q.reply_many(block, batch, serval_lenet::OUTPUT_BYTES + (is_numbered ? serval_lenet::NUMBER_BYTES : 0));
        for (unsigned i = 0; replies && i < batch.count(); i++) {
            float* logits = replies.as<float>(i) + 1;
            serval_lenet::infer(block.rank(), block.size(), [&] { block.sync(); }, batch.as<const uint8_t>(i), logits, scratch);
            if (block.rank() == 0) replies.as<uint8_t>(i)[0] = serval_lenet::digit(logits);
            for (unsigned k = block.rank(); is_numbered && k < serval_lenet::NUMBER_BYTES; k += block.size())
                replies.as<uint8_t>(i)[serval_lenet::OUTPUT_BYTES + k] = batch.as<const uint8_t>(i)[serval_lenet::INPUT_BYTES + k];
        }
        q.send_many(block, replies);
    }
}
