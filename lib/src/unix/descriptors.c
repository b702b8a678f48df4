#define _GNU_SOURCE
#include "unix/descriptors.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// Room for one more than are expected, so that a message with too many is noticed.
union control {
    struct cmsghdr header;
    char room[CMSG_SPACE((SERVAL_DESCRIPTORS_MAX + 1) * sizeof(int))];
};

int serval_send_descriptors(int socket, const void* bytes, size_t len, const int* descriptors,
                            size_t count) {
    struct iovec part = {(void*)bytes, len};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    union control control;
    memset(&control, 0, sizeof control);
    if (count > SERVAL_DESCRIPTORS_MAX) return -EINVAL;
    if (count) {
        message.msg_control = control.room;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(header), descriptors, count * sizeof(int));
    }
    ssize_t sent;
    do sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

ssize_t serval_receive_descriptors(int socket, void* bytes, size_t len, int flags, int* descriptors,
                                   unsigned most, struct serval_descriptors* arrived) {
    struct iovec part = {bytes, len};
    union control control;
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.room,
                             .msg_controllen = sizeof control.room};
    *arrived = (struct serval_descriptors){0, 0};
    ssize_t got = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    if (got < 0) return -errno;
    arrived->is_cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    for (struct cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++, arrived->count++) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(c) + i * sizeof descriptor, sizeof descriptor);
            if (arrived->count < most)
                descriptors[arrived->count] = descriptor;
            else
                close(descriptor);
        }
    }
    return got;
}
