// Its process ends a while after its block began, before the first receive.
#include <serval/kernel.h>
#include <unistd.h>

SERVAL_KERNEL(ends_late)(serval::Block&, serval::Mqueue&) {
    sleep(4);
    _exit(3);
}
