// delay: echoes the request after `params.microseconds`. Emulates a busy accelerator: the mqueue is occupied, the
// processor is not, so one host thread can emulate as many accelerators as it has blocks.
#include "send_back.h"

SERVAL_KERNEL(delay) (serval::Block& block, serval::Mqueue& q) {
    const double us = block.param("microseconds", 20);
    const uint64_t ns = us > 0 ? static_cast<uint64_t>((us < 1e7 ? us : 1e7) * 1000) : 0;
    while (auto msg = q.recv(block)) {
        block.sleep_until(block.now_ns() + ns);
        send_back(block, q, msg);
    }
}
