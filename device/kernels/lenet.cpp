// lenet: classifies handwritten digits. Request: 784 bytes, 28x28 grey. Reply: u8 digit, 3 zero bytes, 10 float32 little
// endian logits. The network is in models/lenet.h.
#include <serval/kernel.h>

#include "../models/lenet.h"

// Pictures whose replies are sent together: no reply waits for many others.
constexpr unsigned MESSAGES = 4;

SERVAL_KERNEL(lenet) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED serval_lenet::Scratch scratch;
    while (auto batch = q.recv_many(block, MESSAGES, serval_lenet::OUTPUT_BYTES)) {
        if (batch.len() != serval_lenet::INPUT_BYTES) {
            q.drop_many(block, batch, serval::BAD_LENGTH);
            continue;
        }
        auto replies = q.reply_many(block, batch, serval_lenet::OUTPUT_BYTES);
        for (unsigned i = 0; replies && i < batch.count(); i++) {
            float* logits = replies.as<float>(i) + 1;
            serval_lenet::infer(block.rank(), block.size(), [&] { block.sync(); }, batch.as<const uint8_t>(i), logits, scratch);
            if (block.rank() == 0) replies.as<uint8_t>(i)[0] = serval_lenet::digit(logits);
        }
        q.send_many(block, replies);
    }
}
