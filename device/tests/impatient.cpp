// impatient: a kernel that never waits for long, to test that it still ends with its engine. It echoes; between messages it
// polls continuously, with waits of `wait` nanoseconds, or none if that is 0.
#include <serval/kernel.h>

SERVAL_KERNEL(impatient) (serval::Block& block, serval::Mqueue& q) {
    const uint64_t wait = static_cast<uint64_t>(block.param("wait", 0));
    while (!q.ended(block)) {
        auto msg = wait ? q.recv_until(block, block.now_ns() + wait) : q.try_recv(block);
        if (!msg) continue;
        auto reply = q.reply(block, msg, msg.len());
        for (unsigned i = block.rank(); i < msg.len(); i += block.size()) reply.as<uint8_t>()[i] = msg.as<const uint8_t>()[i];
        q.send(block, reply);
    }
}
