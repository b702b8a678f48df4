/* The client side of the protocol of crates/transfer/src/message.rs. */
#define _GNU_SOURCE
#include "serval/transfer.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_BYTES = 80, ANSWER_BYTES = 256, TEXT_AT = 90, TEXT_BYTES_MAX = ANSWER_BYTES - TEXT_AT, REASON_MAX = 22 };
enum { SEND = 1, RECEIVE = 2, CANCEL = 3, PROGRESS = 4 };
enum { ENDED = 1 };

/* How long an engine may be silent before it is asked for progress, and again before it is given up. */
enum { SILENCE_MS = 10000 };

/* A result that arrived while another one was waited for. */
struct queued {
    struct queued *next;
    sv_transfer_result result;
};

struct sv_transfers {
    int socket;
    uint64_t last_id;
    struct queued *first;
};

static void put(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

int sv_transfers_open(const char *path, sv_transfers **transfers) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t len = path ? strlen(path) : 0;
    if (len == 0 || len >= sizeof address.sun_path) return -EINVAL;
    memcpy(address.sun_path, path, len + 1);
    sv_transfers *made = calloc(1, sizeof *made);
    if (!made) return -ENOMEM;
    made->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    /* Connecting waits while many others do, and sending while the engine reads nothing: both not longer than this. */
    struct timeval limit = {SILENCE_MS / 1000, 0};
    if (made->socket < 0 || setsockopt(made->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) < 0 ||
        connect(made->socket, (const struct sockaddr *)&address, sizeof address) < 0) {
        int error = errno;
        if (made->socket >= 0) close(made->socket);
        free(made);
        return -error;
    }
    *transfers = made;
    return 0;
}

void sv_transfers_close(sv_transfers *transfers) {
    if (!transfers) return;
    close(transfers->socket);
    while (transfers->first) {
        struct queued *next = transfers->first->next;
        free(transfers->first);
        transfers->first = next;
    }
    free(transfers);
}

int sv_transfers_fd(const sv_transfers *transfers) {
    return transfers->socket;
}

/* Sends one request, with two descriptors if `file` is not -1. */
static int send_request(sv_transfers *transfers, uint8_t *request, int file, int socket) {
    memcpy(request, "SVT1", 4);
    struct iovec part = {request, REQUEST_BYTES};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(2 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (file != -1) {
        int descriptors[2] = {file, socket};
        message.msg_control = control.room;
        message.msg_controllen = sizeof control.room;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof descriptors);
        memcpy(CMSG_DATA(header), descriptors, sizeof descriptors);
    }
    ssize_t sent;
    do sent = sendmsg(transfers->socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

static int start(sv_transfers *transfers, int kind, int file, int socket, const sv_transfer *transfer, const uint8_t *key,
                 uint64_t *id) {
    static const sv_transfer defaults = SV_TRANSFER_DEFAULTS;
    if (!transfer) transfer = &defaults;
    if (file < 0 || socket < 0) return -EBADF;
    if (transfer->digest > SV_DIGEST_CRC32C || (transfer->no_wait && (transfer->digest || key))) return -EINVAL;
    uint8_t request[REQUEST_BYTES] = {0};
    *id = ++transfers->last_id;
    put(request + 4, (uint64_t)kind, 2);
    put(request + 6, transfer->no_wait != 0, 2);
    put(request + 8, *id, 8);
    put(request + 16, transfer->offset, 8);
    put(request + 24, transfer->bytes, 8);
    put(request + 32, transfer->stall_ms, 4);
    put(request + 36, transfer->deadline_ms, 4);
    request[40] = (uint8_t)transfer->digest;
    if (key) {
        request[41] = 1;
        memcpy(request + 48, key, 32);
    }
    int status = send_request(transfers, request, file, socket);
    explicit_bzero(request, sizeof request);
    return status;
}

int sv_sendfile_start(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer, uint64_t *id) {
    return start(transfers, SEND, file, socket, transfer, NULL, id);
}

int sv_encrypted_sendfile_start(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer, const uint8_t key[32],
                                uint64_t *id) {
    if (!key) return -EINVAL;
    return start(transfers, SEND, file, socket, transfer, key, id);
}

int sv_recvfile_start(sv_transfers *transfers, int file, int socket, const sv_transfer *transfer, uint64_t *id) {
    return start(transfers, RECEIVE, file, socket, transfer, NULL, id);
}

static int ask(sv_transfers *transfers, int kind, uint64_t id) {
    uint8_t request[REQUEST_BYTES] = {0};
    put(request + 4, (uint64_t)kind, 2);
    put(request + 8, id, 8);
    return send_request(transfers, request, -1, -1);
}

int sv_transfers_cancel(sv_transfers *transfers, uint64_t id) {
    return ask(transfers, CANCEL, id);
}

/* Reads an answer. 0: a result; 1: an answer about progress; else a negative error number. */
static int read_answer(sv_transfers *transfers, sv_transfer_result *result) {
    uint8_t answer[ANSWER_BYTES + 1];
    ssize_t len = recv(transfers->socket, answer, sizeof answer, MSG_DONTWAIT);
    if (len < 0) return errno == ECONNRESET ? -EPIPE : -errno;
    if (len == 0) return -EPIPE;
    if (len != ANSWER_BYTES || memcmp(answer, "SVT1", 4) != 0) return -EPROTO;
    if (get(answer + 4, 2) != ENDED) return 1;
    static const uint8_t digest_bytes[] = {0, 16, 32, 4};
    size_t text = get(answer + 88, 2);
    if (answer[6] > REASON_MAX || answer[7] >= sizeof digest_bytes || text > TEXT_BYTES_MAX) return -EPROTO;
    memset(result, 0, sizeof *result);
    result->reason = answer[6];
    result->id = get(answer + 8, 8);
    result->read = get(answer + 16, 8);
    result->written = get(answer + 24, 8);
    result->error = (int32_t)get(answer + 32, 4);
    if (result->reason == 0) {
        result->digest_bytes = digest_bytes[answer[7]];
        memcpy(result->digest, answer + 40, result->digest_bytes);
    } else if (result->error == 0) {
        return -EPROTO;
    }
    memcpy(result->text, answer + TEXT_AT, text);
    return result->id == 0 ? -ECONNREFUSED : 0;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Waits for a message: 0, -EAGAIN after timeout_ms, or -EINTR. */
static int wait_readable(const sv_transfers *transfers, int timeout_ms) {
    struct pollfd entry = {transfers->socket, POLLIN, 0};
    int ready = poll(&entry, 1, timeout_ms);
    if (ready < 0) return -errno;
    return ready == 0 ? -EAGAIN : 0;
}

int sv_transfers_next(sv_transfers *transfers, int timeout_ms, sv_transfer_result *result) {
    if (transfers->first) {
        struct queued *first = transfers->first;
        *result = first->result;
        transfers->first = first->next;
        free(first);
        return 0;
    }
    int64_t end = timeout_ms > 0 ? now_ms() + timeout_ms : 0;
    for (;;) {
        int status = read_answer(transfers, result);
        if (status <= 0 && status != -EAGAIN) return status;
        if (status == 1) continue;
        /* Answers about progress do not prolong the wait. */
        int64_t left = timeout_ms > 0 ? end - now_ms() : timeout_ms;
        status = wait_readable(transfers, timeout_ms > 0 && left < 0 ? 0 : (int)left);
        if (status < 0) return status;
    }
}

/* Appends a result of another transfer. */
static int keep(sv_transfers *transfers, const sv_transfer_result *result) {
    struct queued *made = malloc(sizeof *made);
    if (!made) return -ENOMEM;
    *made = (struct queued){NULL, *result};
    struct queued **last = &transfers->first;
    while (*last) last = &(*last)->next;
    *last = made;
    return 0;
}

static int finish(sv_transfers *transfers, uint64_t id, sv_transfer_result *result) {
    bool asked = false;
    for (;;) {
        int status = read_answer(transfers, result);
        if (status == 0) {
            if (result->id == id) return 0;
            status = keep(transfers, result);
            if (status < 0) return status;
        } else if (status < 0 && status != -EAGAIN) {
            return status;
        }
        if (status >= 0) {
            asked = false;
            continue;
        }
        status = wait_readable(transfers, SILENCE_MS);
        if (status == -EINTR) {
            status = sv_transfers_cancel(transfers, id);
        } else if (status == -EAGAIN) {
            if (asked) {
                /* The engine cancels the transfer when it sees the end of the connection. */
                shutdown(transfers->socket, SHUT_RDWR);
                return -ETIMEDOUT;
            }
            asked = true;
            status = ask(transfers, PROGRESS, id);
        }
        if (status < 0 && status != -EAGAIN) return status;
    }
}

int sv_sendfile(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer, sv_transfer_result *result) {
    uint64_t id;
    int status = sv_sendfile_start(transfers, socket, file, transfer, &id);
    return status < 0 ? status : finish(transfers, id, result);
}

int sv_encrypted_sendfile(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer, const uint8_t key[32],
                          sv_transfer_result *result) {
    uint64_t id;
    int status = sv_encrypted_sendfile_start(transfers, socket, file, transfer, key, &id);
    return status < 0 ? status : finish(transfers, id, result);
}

int sv_recvfile(sv_transfers *transfers, int file, int socket, const sv_transfer *transfer, sv_transfer_result *result) {
    uint64_t id;
    int status = sv_recvfile_start(transfers, file, socket, transfer, &id);
    return status < 0 ? status : finish(transfers, id, result);
}
