// echo: the reply is the request.
#include "send_back.h"

SERVAL_KERNEL(echo) (serval::Block& block, serval::Mqueue& q) {
    while (auto batch = q.recv_many(block)) send_back(block, q, batch);
}
