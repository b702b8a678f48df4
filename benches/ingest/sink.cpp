// sink: receives, and that is all. For services that answer nothing.
#include <serval/kernel.h>

SERVAL_KERNEL(sink) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
    }
}
