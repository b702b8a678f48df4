// Kernels as people write them first: they look at no reply before they write to it.
#include <serval/kernel.h>

// Reads through a null pointer when it is asked to ('!'), else the reply is the request.
SERVAL_KERNEL(crashes) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        const uint8_t* volatile nowhere = nullptr;
        auto reply = q.reply(block, msg, msg.len());
        for (unsigned i = 0; reply && i < msg.len(); i++) reply.as<uint8_t>()[i] = msg.as<const uint8_t>()[i];
        if (msg.len() && *msg.as<const uint8_t>() == '!') *reply.as<uint8_t>() = *nowhere;
        q.send(block, reply);
    }
}

// The reply is twice the request.
SERVAL_KERNEL(twice) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 2 * msg.len());
        for (unsigned i = block.rank(); i < 2 * msg.len(); i += block.size())
            reply.as<uint8_t>()[i] = msg.as<const uint8_t>()[i % msg.len()];
        q.send(block, reply);
    }
}

// The kernel that README.md showed first.
SERVAL_KERNEL(thrice) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        if (msg.len() % 4) { q.drop(block, msg, serval::BAD_LENGTH); continue; }
        auto reply = q.reply(block, msg, msg.len());
        for (unsigned i = block.rank(); i < msg.len() / 4; i += block.size())
            reply.as<float>()[i] = 3.0f * msg.as<const float>()[i];
        q.send(block, reply);
    }
}
