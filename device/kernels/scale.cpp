// scale: float32 little endian numbers, each multiplied by three.
#include <serval/kernel.h>

SERVAL_WARP_KERNEL(scale) (serval::Block& block, serval::Mqueue& q) {
    while (auto batch = q.recv_many(block)) {
        if (batch.len() % 4) {
            q.drop_many(block, batch, serval::BAD_LENGTH);
            continue;
        }
        auto replies = q.reply_many(block, batch, batch.len());
        // Messages and replies of one length lie alike, and what is between them does not matter.
        if (replies)
            for (unsigned i = block.rank(); i < batch.count() * batch.stride() / 4; i += block.size())
                replies.as<float>(0)[i] = 3.0f * batch.as<const float>(0)[i];
        q.send_many(block, replies);
    }
}
