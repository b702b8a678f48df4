// The kernel of both programs: answers every message with its bytes in reverse order.
#include <serval/kernel.h>

SERVAL_KERNEL(reverse) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, msg.len());
        if (reply)  // false: longer than max_reply_bytes
            for (unsigned i = block.rank(); i < msg.len(); i += block.size())
                reply.as<char>()[i] = msg.as<const char>()[msg.len() - 1 - i];
        q.send(block, reply);
    }
}
