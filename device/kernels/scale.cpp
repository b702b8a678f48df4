// scale: float32 little endian numbers, each multiplied by three.
#include <serval/kernel.h>

SERVAL_WARP_KERNEL(scale) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        if (msg.len() % 4) {
            q.drop(block, msg, serval::BAD_LENGTH);
            continue;
        }
        auto reply = q.reply(block, msg, msg.len());
        if (reply)
            for (unsigned i = block.rank(); i < msg.len() / 4; i += block.size())
                reply.as<float>()[i] = 3.0f * msg.as<const float>()[i];
        q.send(block, reply);
    }
}
