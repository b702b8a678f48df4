// hold: answers with what came. While the file that SERVAL_TEST_HOLD names is there, it computes and does not come back.
#include <serval/kernel.h>
#include <stdlib.h>
#include <unistd.h>

SERVAL_KERNEL(hold) (serval::Block& block, serval::Mqueue& q) {
    const char* file = getenv("SERVAL_TEST_HOLD");
    while (auto msg = q.recv(block)) {
        while (file && access(file, F_OK) == 0) {
        }
        auto reply = q.reply(block, msg, msg.len());
        if (!reply) continue;
        for (uint32_t i = 0; i < msg.len(); i++) reply.as<uint8_t>()[i] = msg.as<uint8_t>()[i];
        q.send(block, reply);
    }
}
