// param_text: each reply is the text of the parameter `text`, or "-" without one, followed by the parameter `n` as one digit.
#ifndef SERVAL_TEST_PARAM_TEXT
#define SERVAL_TEST_PARAM_TEXT

#include <serval/kernel.h>

SERVAL_KERNEL(param_text) (serval::Block& block, serval::Mqueue& q) {
    const char* text = block.param_text("text", "-");
    const double n = block.param("n", 0);
    uint32_t len = 0;
    while (text[len]) len++;
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, len + 1);
        if (reply && block.rank() == 0) {
            for (uint32_t i = 0; i < len; i++) reply.as<uint8_t>()[i] = static_cast<uint8_t>(text[i]);
            reply.as<uint8_t>()[len] = static_cast<uint8_t>('0' + static_cast<int>(n));
        }
        q.send(block, reply);
    }
}

#endif
