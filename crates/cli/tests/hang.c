/*
 * hang PROGRAM ARGUMENTS: runs a program for which files hang as those of a network file system without its server do: reading, writing and
 * closing a file whose name begins with "hangs" does not return. A filter of system calls (seccomp) asks a second process
 * about each such call, and that one does not answer. Needs no privileges.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fail(const char *what) {
    perror(what);
    return 1;
}

/* Sends a descriptor, or receives one into it. */
static int pass(int socket, int *descriptor, int sends) {
    char byte = 0;
    struct iovec part = {&byte, 1};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    if (sends) {
        memcpy(CMSG_DATA(&control.header), descriptor, sizeof(int));
        return sendmsg(socket, &message, 0) == 1;
    }
    if (recvmsg(socket, &message, 0) != 1) return 0;
    memcpy(descriptor, CMSG_DATA(&control.header), sizeof(int));
    return 1;
}

static int hangs(const struct seccomp_notif *call) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/%u/fd/%d", call->pid, (int)call->data.args[0]);
    ssize_t len = readlink(link, path, sizeof path - 1);
    if (len <= 0) return 0;
    path[len] = 0;
    const char *name = strrchr(path, '/');
    return name && strncmp(name, "/hangs", 6) == 0;
}

/* Lets calls go on, but for those on files that hang. */
static void supervise(int listener) {
    for (;;) {
        struct seccomp_notif call;
        memset(&call, 0, sizeof call);
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call) != 0) {
            if (errno == EINTR || errno == ENOENT) continue;
            return;
        }
        if (hangs(&call)) continue;
        struct seccomp_notif_resp answer = {.id = call.id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
        ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
}

int main(int argc, char **argv) {
    int ends[2];
    if (argc < 2 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return fail("socketpair");
    pid_t child = fork();
    if (child < 0) return fail("fork");
    if (child == 0) {
        /* It ends with the program, and holds none of its pipes. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int descriptor = 0; descriptor < 3; descriptor++) close(descriptor);
        int listener;
        if (pass(ends[1], &listener, 0)) supervise(listener);
        return 0;
    }
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_preadv, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_pwritev, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_close, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
    };
    struct sock_fprog filter = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return fail("prctl");
    int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter);
    if (listener < 0) return fail("seccomp");
    if (!pass(ends[0], &listener, 1)) return fail("sendmsg");
    /* Closes itself: close is what the filter asks about. */
    execvp(argv[1], argv + 1);
    return fail(argv[1]);
}
