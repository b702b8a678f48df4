// Kernels as people write them first: they look at no reply before they write to it.
#include <serval/kernel.h>

#include <signal.h>

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

static __attribute__((noinline)) unsigned deeper(volatile unsigned* above, unsigned depth) {
    volatile unsigned here[64];
    here[depth % 64] = *above + depth;
    return depth ? deeper(here, depth - 1) + here[depth % 64] : 0;
}

// Crashes in the way that it is asked for, else the reply is the request.
SERVAL_KERNEL(crashes_variously) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        const char how = msg.len() ? *msg.as<const char>() : 0;
        volatile unsigned zero = 0;
        unsigned made = 0;
        if (how == 'a') made = *reinterpret_cast<volatile unsigned*>(uintptr_t{zero} + 64);
        if (how == 'i') __builtin_trap();
        if (how == 'd') made = deeper(&zero, 600);  // 150 KiB and more
        if (how == 's') made = deeper(&zero, 1u << 20);
        if (how == 'f') raise(SIGFPE);
        auto reply = q.reply(block, msg, msg.len());
        for (unsigned i = 0; reply && i < msg.len(); i++) reply.as<uint8_t>()[i] = msg.as<const uint8_t>()[i] + (made & zero);
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
