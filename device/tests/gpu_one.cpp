// Echo without batches: messages of bundles one by one.
#include "../kernels/send_back.h"

SERVAL_KERNEL(gpu_one) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) send_back(block, q, msg);
}
