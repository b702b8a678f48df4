// Kernels for the tests of backends and of the memcached framing.
#include <serval/kernel.h>

// relay: whatever comes goes to backend 0. The reply is the status of the answer in one byte, then the answer. 254 means that
// the request did not leave, 255 that the answer carried another tag than the request: both would be bugs of the engine.
SERVAL_KERNEL(relay) (serval::Block& block, serval::Mqueue& q) {
    uint64_t tag = 0;
    while (auto msg = q.recv(block)) {
        uint8_t status = 254;
        const uint8_t* data = nullptr;
        uint32_t len = 0;
        if (q.backends() > 0 && q.backend(0).send(block, msg.as<uint8_t>(), msg.len(), ++tag)) {
            serval::Message answer = q.backend(0).recv(block);
            if (!answer) break;
            status = answer.tag() == tag ? answer.status() : 255;
            if (answer.status() == serval::OK) {
                data = answer.as<uint8_t>();
                len = answer.len();
            }
        }
        auto reply = q.reply(block, msg, 1 + len);
        if (reply && block.rank() == 0) {
            reply.as<uint8_t>()[0] = status;
            for (uint32_t i = 0; i < len; i++) reply.as<uint8_t>()[1 + i] = data[i];
        }
        q.send(block, reply);
    }
}

// tell: answers what comes, and then sends it to backend 0 without a client.
SERVAL_KERNEL(tell) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 0);
        q.send(block, reply);
        if (!q.backend(0).send(block, msg.as<uint8_t>(), msg.len(), 1)) break;
        if (!q.backend(0).recv(block)) break;
    }
}

namespace {

bool starts(const serval::Message& msg, const char* text) {
    for (uint32_t i = 0; text[i]; i++)
        if (i >= msg.len() || msg.as<char>()[i] != text[i]) return false;
    return true;
}

void answer(serval::Block& block, serval::Mqueue& q, const serval::Message& msg, const char* text) {
    uint32_t len = 0;
    while (text[len]) len++;
    auto reply = q.reply(block, msg, len);
    if (reply && block.rank() == 0)
        for (uint32_t i = 0; i < len; i++) reply.as<char>()[i] = text[i];
    q.send(block, reply);
}

}  // namespace

// store: a memcached that keeps nothing, with an answer of every kind. Keys that begin with `slow` take 20 ms.
SERVAL_KERNEL(store) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        if (starts(msg, "get slow")) block.sleep_until(block.now_ns() + 20000000);
        if (starts(msg, "get ")) answer(block, q, msg, "END\r\n");
        else if (starts(msg, "set ")) answer(block, q, msg, "STORED\r\n");
        else if (starts(msg, "mn")) answer(block, q, msg, "MN\r\n");
        else if (starts(msg, "version")) answer(block, q, msg, "VERSION of the kernel's\r\n");
        else if (starts(msg, "mg ")) answer(block, q, msg, "");               // quiet: the miss is not told
        else if (starts(msg, "md ")) q.drop(block, msg, serval::REJECTED);    // quiet: nor is the success
        else if (starts(msg, "delete ")) q.drop(block, msg, serval::REJECTED);
        else if (starts(msg, "touch ")) answer(block, q, msg, "not a response");
        // Anything else is never answered.
    }
}
