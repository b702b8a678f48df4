// secure_multiply: multiplies numbers that arrive sealed, and answers sealed (sealed.h has the messages). The key is read from the file that
// SECURE_MULTIPLY_KEY names (secure_multiply.key without it) by the process that runs this kernel, which is isolated; the engine never has it.
//
// A message of another length is dropped as BAD_LENGTH; one that does not open, or was answered before, as REJECTED. Both are counted, and
// get no answer. Without a usable key the kernel returns, which ends its process with a reason.
#include <serval/kernel.h>

#include <mutex>

#include "sealed.h"

namespace {

// One for all blocks of the process: a replay may arrive at another block than the request.
struct Shared {
    std::mutex lock;
    sealed::Multiplier* multiplier = nullptr;
};
Shared shared;

// Called with the lock.
bool has_key() {
    if (shared.multiplier) return true;
    const char* path = std::getenv("SECURE_MULTIPLY_KEY");
    if (!path) path = "secure_multiply.key";
    uint8_t key[sealed::KEY_BYTES];
    if (!sealed::read_key(path, key)) {
        std::fprintf(stderr, "secure_multiply: no key of 64 hexadecimal digits in %s\n", path);
        return false;
    }
    shared.multiplier = new sealed::Multiplier(key);
    explicit_bzero(key, sizeof key);
    return bool(*shared.multiplier);
}

}  // namespace

SERVAL_KERNEL(secure_multiply) (serval::Block& block, serval::Mqueue& q) {
    {
        const std::lock_guard<std::mutex> guard(shared.lock);
        if (!has_key()) return;
    }
    while (auto msg = q.recv(block)) {
        uint8_t answer[sealed::ANSWER_BYTES];
        sealed::Outcome outcome;
        {
            const std::lock_guard<std::mutex> guard(shared.lock);
            outcome = shared.multiplier->answer(msg.as<uint8_t>(), msg.len(), answer);
        }
        if (outcome != sealed::Outcome::ANSWERED) {
            q.drop(block, msg, outcome == sealed::Outcome::BAD_LENGTH ? serval::BAD_LENGTH : serval::REJECTED);
            continue;
        }
        auto reply = q.reply(block, msg, sealed::ANSWER_BYTES);
        if (reply) memcpy(reply.as<uint8_t>(), answer, sizeof answer);
        q.send(block, reply);
    }
}
