/* What the files of the library for LD_PRELOAD that replace functions of libc share. */
#pragma once

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))
/* The next definition of a function, which is libc's. */
#define NEXT(name) \
    ({ \
        static _Atomic(void *) next_place_; \
        void *next_found_ = atomic_load_explicit(&next_place_, memory_order_relaxed); \
        if (!next_found_) { \
            next_found_ = dlsym(RTLD_NEXT, #name); \
            atomic_store_explicit(&next_place_, next_found_, memory_order_relaxed); \
        } \
        __typeof__(&name) next_function_; \
        *(void **)&next_function_ = next_found_; \
        next_function_; \
    })
