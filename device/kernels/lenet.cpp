// lenet: classifies handwritten digits. Request: 784 bytes, 28x28 grey. Reply: u8 digit, 3 zero bytes, 10 float32 little
// endian logits. The network is in models/lenet.h.
#include <serval/kernel.h>

#include "../models/lenet.h"

SERVAL_KERNEL(lenet) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED serval_lenet::Scratch scratch;
    while (auto msg = q.recv(block)) {
        if (msg.len() != serval_lenet::INPUT_BYTES) {
            q.drop(block, msg, serval::BAD_LENGTH);
            continue;
        }
        auto reply = q.reply(block, msg, serval_lenet::OUTPUT_BYTES);
        if (reply) {
            float* logits = reply.as<float>() + 1;
            serval_lenet::infer(block.rank(), block.size(), [&] { block.sync(); }, msg.as<const uint8_t>(), logits, scratch);
            if (block.rank() == 0) reply.as<uint8_t>()[0] = serval_lenet::digit(logits);
        }
        q.send(block, reply);
    }
}
