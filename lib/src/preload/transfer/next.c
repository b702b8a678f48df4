#define _GNU_SOURCE
#include "preload/transfer/next.h"

#include <dlfcn.h>

struct next next;

__attribute__((constructor)) void next_find(void) {
#define FIND(name) *(void**)&next.name = dlsym(RTLD_NEXT, #name);
    NEXT_FUNCTIONS(FIND)
#undef FIND
}
