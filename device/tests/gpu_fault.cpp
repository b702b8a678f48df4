// A kernel that faults on a GPU at its first message: it writes to an unmapped address.
#include <serval/kernel.h>

SERVAL_KERNEL(gpu_fault) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        *reinterpret_cast<volatile uint32_t*>(uintptr_t{64}) = msg.len();
        q.drop(block, msg, serval::REJECTED);
    }
}
