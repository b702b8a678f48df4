// sink: only receives. For services without replies.
#include <serval/kernel.h>

SERVAL_KERNEL(sink) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
    }
}
