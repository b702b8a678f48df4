// Results with a sentence: what fails on the control path says why.
#ifndef SERVAL_CLIENT_RESULT_H
#define SERVAL_CLIENT_RESULT_H

#include <serval/client.h>

#ifdef __cplusplus
extern "C" {
#endif

// Remembers the sentence for serval_detail() and returns `result`.
__attribute__((format(printf, 2, 3), visibility("hidden"))) int serval_fail(int result,
                                                                            const char* format,
                                                                            ...);

// Milliseconds until the deadline for poll(), rounded up: 0 when it has passed, -1 for
// SERVAL_FOREVER.
__attribute__((visibility("hidden"))) int serval_poll_ms(uint64_t deadline_ns);

#ifdef __cplusplus
}
#endif

#endif
