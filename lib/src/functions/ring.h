// Between ik.c and ring.cpp.
#ifndef SERVAL_FUNCTIONS_RING_H
#define SERVAL_FUNCTIONS_RING_H

#include "serval/ik.h"

#ifdef __cplusplus
extern "C" {
#endif

// Opens a ring with the descriptors that the server sent, and takes them. Returns 0 or a negative
// errno.
__attribute__((visibility("hidden"))) int serval_ring_open(int region, int bell,
                                                           struct custom_ring** ring);

#ifdef __cplusplus
}
#endif

#endif
