// Messages that carry file descriptors over a Unix socket (SCM_RIGHTS).
#ifndef SERVAL_UNIX_DESCRIPTORS_H
#define SERVAL_UNIX_DESCRIPTORS_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

// Descriptors of a message at most.
#define SERVAL_DESCRIPTORS_MAX 9

// The descriptors that a message brought.
struct serval_descriptors {
    // Those for which the caller had room are open, and have close-on-exec. Further ones are
    // closed, and counted.
    unsigned count;
    // Not 0: the message, or its descriptors, did not fit.
    int is_cut;
};

// Sends a message with `count` descriptors. Returns 0 or a negative errno.
__attribute__((visibility("hidden"))) int serval_send_descriptors(int socket, const void* bytes,
                                                                  size_t len,
                                                                  const int* descriptors,
                                                                  size_t count);

// Receives a message, and up to `most` descriptors. `flags` are those of recvmsg. Returns the
// bytes of the message, 0 at the end of the connection, or a negative errno.
__attribute__((visibility("hidden"))) ssize_t serval_receive_descriptors(
    int socket, void* bytes, size_t len, int flags, int* descriptors, unsigned most,
    struct serval_descriptors* arrived);

#ifdef __cplusplus
}
#endif

#endif
