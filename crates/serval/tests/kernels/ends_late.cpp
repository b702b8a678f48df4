// Its process ends a while after it began to load this.
#include <unistd.h>

namespace {
struct Late {
    Late() {
        sleep(4);
        _exit(3);
    }
} late;
}  // namespace
