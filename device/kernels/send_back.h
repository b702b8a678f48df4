// Replies with the requests themselves; used by several kernels.
#ifndef SERVAL_KERNELS_SEND_BACK_H
#define SERVAL_KERNELS_SEND_BACK_H

#include <serval/kernel.h>

// A request longer than the maximum reply is dropped as TOO_LONG.
SERVAL_INLINE bool send_back(serval::Block& block, serval::Mqueue& q, const serval::Message& msg) {
    auto reply = q.reply(block, msg, msg.len());
    if (reply)
        for (unsigned i = block.rank(); i < (msg.len() + 7) / 8; i += block.size())
            reply.as<uint64_t>()[i] = msg.as<const uint64_t>()[i];
    return q.send(block, reply);
}

// Messages of a batch lie side by side, like their replies: they are copied as one piece. A message that came alone takes the
// shorter path of reply and send, which saves a hop 0.1 us on a GPU.
SERVAL_INLINE bool send_back(serval::Block& block, serval::Mqueue& q, const serval::Messages& batch) {
    if (batch.count() == 1) return send_back(block, q, batch[0]);
    auto replies = q.reply_many(block, batch, batch.len());
    if (replies)
        for (unsigned i = block.rank(); i < batch.count() * batch.stride() / 8; i += block.size())
            replies.as<uint64_t>(0)[i] = batch.as<const uint64_t>(0)[i];
    return q.send_many(block, replies);
}

#endif
