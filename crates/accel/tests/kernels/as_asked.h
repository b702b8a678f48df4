// A kernel whose reply has the length that its client requests, and which does not check that reply.
#ifndef AS_ASKED_H
#define AS_ASKED_H

#include <serval/kernel.h>

// Request: u32 length. Reply: that many bytes, with the request's bytes 4 to 7 at every 64 KiB and at the end.
SERVAL_KERNEL(as_asked) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        if (msg.len() != 8) {
            q.drop(block, msg, serval::BAD_LENGTH);
            continue;
        }
        const uint32_t len = *msg.as<const uint32_t>(), mark = msg.as<const uint32_t>()[1];
        auto reply = q.reply(block, msg, len);
        for (uint64_t at = 0; at + 4 <= len; at += 65536) reply.as<uint32_t>()[at / 4] = mark;
        if (len >= 4) reply.as<uint32_t>()[(uint64_t{len} + 3) / 4 - 1] = mark;
        q.send(block, reply);
    }
}

#endif
