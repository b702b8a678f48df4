// A Runtime is one life: ends with code 0 when joining a second time is refused, also after
// leave(). Needs no engine.
#include <stdio.h>
#include <string.h>

#include <serval/attach.h>

int main() {
    serval::Runtime runtime;
    if (runtime.join("/nowhere/acc0") || !strstr(runtime.why(), "no engine listens")) return 1;
    runtime.leave();
    if (runtime.join("/nowhere/acc0") || !strstr(runtime.why(), "one life")) {
        printf("%s\n", runtime.why());
        return 1;
    }
    return 0;
}
