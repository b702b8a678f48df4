// spin: echoes the request after computing for `params.microseconds`. Emulates a kernel that keeps its processor busy.
#include "send_back.h"

SERVAL_KERNEL(spin) (serval::Block& block, serval::Mqueue& q) {
    const double us = block.param("microseconds", 20);
    const uint64_t ns = us > 0 ? static_cast<uint64_t>((us < 1e7 ? us : 1e7) * 1000) : 0;
    while (auto msg = q.recv(block)) {
        const uint64_t until = block.now_ns() + ns;
        while (block.now_ns() < until) {
        }
        send_back(block, q, msg);
    }
}
