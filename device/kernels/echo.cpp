// echo: the reply is the request.
#include "send_back.h"

SERVAL_KERNEL(echo) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) send_back(block, q, msg);
}
