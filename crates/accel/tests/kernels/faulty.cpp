// Kernels with the mistakes that the host runtime must survive.
#include <serval/kernel.h>

#include "../../../../device/tests/param_text.cpp"
#include "as_asked.h"

// Writes behind its last staging buffer when it is asked to ('!'), else echoes the first byte.
SERVAL_KERNEL(overrun) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        const uint8_t first = msg.len() ? *msg.as<const uint8_t>() : 0;
        auto reply = q.reply(block, msg, msg.len());
        if (msg.len()) *reply.as<uint8_t>() = first;
        volatile uint8_t* end = reply.as<uint8_t>() + (msg.len() + 63) / 64 * 64;
        if (first == '!') *end = 1;
        q.send(block, reply);
    }
}

// Ignores the stop of the service.
SERVAL_KERNEL(stubborn) (serval::Block& block, serval::Mqueue& q) {
    for (;;) (void)q.recv(block);
}

// Ends before it has received anything.
SERVAL_KERNEL(early) (serval::Block&, serval::Mqueue&) {}

// Asks its backend before the first request, and replies to requests with its answer.
SERVAL_KERNEL(ask_first) (serval::Block& block, serval::Mqueue& q) {
    q.backend(0).send(block, "hello", 5, 77);
    auto answer = q.backend(0).recv(block);
    const uint8_t told = answer && answer.len() && answer.tag() == 77 ? *answer.as<const uint8_t>() : 0;
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 1);
        *reply.as<uint8_t>() = told;
        q.send(block, reply);
    }
}

// Uses 40 KiB of stack in a frame of its own.
static __attribute__((noinline)) uint8_t deep(uint8_t value) {
    volatile uint8_t large[40 << 10];
    for (unsigned i = 0; i < sizeof large; i += 512) large[i] = value;
    return large[sizeof large - 512];
}
SERVAL_KERNEL(deep_stack) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 1);
        *reply.as<uint8_t>() = deep(msg.len() ? *msg.as<const uint8_t>() : 0);
        q.send(block, reply);
    }
}
