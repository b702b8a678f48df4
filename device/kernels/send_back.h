// Replies with the request itself; used by several kernels.
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

#endif
