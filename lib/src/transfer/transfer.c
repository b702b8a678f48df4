// The client side of the protocol of crates/transfer/src/service/message.rs.
#define _GNU_SOURCE
#include "serval/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "unix/descriptors.h"

enum {
    RANGE_BYTES = 16,
    HEAD_BYTES = 16,
    START_BYTES = 56,
    STAGE_BYTES = 8,
    KEY_BYTES = 32,
    LIMITS_BYTES = 12,
    PATTERN_BYTES_MAX = 512
};
enum {
    REQUEST_BYTES_MAX = START_BYTES + SV_STAGES_MAX * (STAGE_BYTES + 2 + PATTERN_BYTES_MAX) +
                        (SV_FILES_MAX - 1) * RANGE_BYTES
};
enum {
    ENDED_BYTES = 40,
    PROGRESS_BYTES = 32,
    REPORT_BYTES = 56,
    TEXT_BYTES_MAX = 166,
    REASON_MAX = 32
};
enum {
    ANSWER_BYTES_MAX =
        ENDED_BYTES + SV_STAGES_MAX * (REPORT_BYTES + 8 * SV_OFFSETS_MAX) + TEXT_BYTES_MAX
};
enum { START = 1, CANCEL = 3, PROGRESS = 4, SIGNAL = 6 };
enum { ENDED = 1 };
enum { IS_FILE = 1, IS_SOCKET = 2 };

// How long an engine may be silent before it is asked for progress, and again before it is given
// up.
enum { SILENCE_MS = 10000 };

// A result that arrived while another one was waited for.
struct queued {
    struct queued* next;
    sv_transfer_result result;
};

struct sv_transfers {
    int socket;
    uint64_t last_id;
    struct queued* first;
};

static void put(uint8_t* at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t* at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

int sv_transfers_open(const char* path, sv_transfers** transfers) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t len = path ? strlen(path) : 0;
    if (len == 0 || len >= sizeof address.sun_path) return -EINVAL;
    memcpy(address.sun_path, path, len + 1);
    sv_transfers* made = calloc(1, sizeof *made);
    if (!made) return -ENOMEM;
    made->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    // Connecting waits while many others do, and sending while the engine reads nothing: both not
    // longer than this.
    struct timeval limit = {SILENCE_MS / 1000, 0};
    if (made->socket < 0 ||
        setsockopt(made->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) < 0 ||
        connect(made->socket, (const struct sockaddr*)&address, sizeof address) < 0) {
        int error = errno;
        if (made->socket >= 0) close(made->socket);
        free(made);
        return -error;
    }
    *transfers = made;
    return 0;
}

void sv_transfers_close(sv_transfers* transfers) {
    if (!transfers) return;
    close(transfers->socket);
    while (transfers->first) {
        struct queued* next = transfers->first->next;
        free(transfers->first);
        transfers->first = next;
    }
    free(transfers);
}

int sv_transfers_fd(const sv_transfers* transfers) { return transfers->socket; }

// Sends one request, with `count` descriptors.
static int send_request(sv_transfers* transfers, uint8_t* request, size_t len,
                        const int* descriptors, size_t count) {
    memcpy(request, "SVT2", 4);
    return serval_send_descriptors(transfers->socket, request, len, descriptors, count);
}

_Static_assert(SV_FILES_MAX + 1 <= SERVAL_DESCRIPTORS_MAX, "the files of a source, and a sink");

// The codes that the option of a stage may have: from 1 to this one.
static uint32_t last_option(uint32_t kind) {
    switch (kind) {
        case SV_STAGE_DIGEST:
            return SV_DIGEST_LAST;
        case SV_STAGE_OPEN:
        case SV_STAGE_SEAL:
            return SV_CIPHER_LAST;
        case SV_STAGE_COMPRESS:
        case SV_STAGE_EXPAND:
            return SV_FORMAT_LAST;
        case SV_STAGE_SEARCH:
            return SV_SEARCH_LAST;
        default:
            return 0;
    }
}

static int check_stage(const sv_stage* stage) {
    bool keyed = stage->kind == SV_STAGE_OPEN || stage->kind == SV_STAGE_SEAL;
    uint32_t most = last_option(stage->kind);
    bool searches = stage->kind == SV_STAGE_SEARCH;
    if (stage->level > (stage->kind == SV_STAGE_COMPRESS ? SV_LEVEL_MAX : 0)) return -EINVAL;
    if (searches != (stage->pattern != NULL)) return -EINVAL;
    if (searches && (stage->pattern_bytes == 0 || stage->pattern_bytes > PATTERN_BYTES_MAX))
        return -EINVAL;
    return stage->option >= 1 && stage->option <= most && keyed == (stage->key != NULL) ? 0
                                                                                        : -EINVAL;
}

// Returns the bytes of the stage.
static size_t put_stage(uint8_t* at, const sv_stage* stage) {
    size_t follows = 0;
    at[0] = (uint8_t)stage->kind;
    at[1] = (uint8_t)stage->option;
    if (stage->kind == SV_STAGE_COMPRESS)
        at[4] = (uint8_t)(stage->level ? stage->level : stage->option == SV_FORMAT_GZIP ? 1 : 3);
    if (stage->key) {
        follows = KEY_BYTES;
        memcpy(at + STAGE_BYTES, stage->key, KEY_BYTES);
    } else if (stage->kind == SV_STAGE_EXPAND) {
        follows = LIMITS_BYTES;
        put(at + STAGE_BYTES, stage->bytes_max ? stage->bytes_max : (uint64_t)64 << 30, 8);
        put(at + STAGE_BYTES + 8, stage->ratio_max ? stage->ratio_max : 100, 4);
    }
    if (stage->pattern) {
        follows = 2 + stage->pattern_bytes;
        put(at + STAGE_BYTES, SV_OFFSETS_MAX, 2);
        memcpy(at + STAGE_BYTES + 2, stage->pattern, stage->pattern_bytes);
    }
    put(at + 2, follows, 2);
    return STAGE_BYTES + follows;
}

struct ends {
    int source, sink;
    int source_kind, sink_kind;
    uint64_t from, to;
};

static int start(sv_transfers* transfers, const struct ends* ends, const sv_transfer* transfer,
                 const sv_stage* stages, unsigned count, uint64_t* id) {
    if (ends->source < 0 || ends->sink < 0) return -EBADF;
    if (transfer->more_count >= SV_FILES_MAX ||
        (transfer->more_count && ends->source_kind == IS_SOCKET))
        return -EINVAL;
    if (transfer->sync && ends->sink_kind == IS_SOCKET) return -EINVAL;
    if (count > SV_STAGES_MAX ||
        (transfer->no_wait && (count || ends->source_kind == ends->sink_kind)))
        return -EINVAL;
    uint8_t request[REQUEST_BYTES_MAX] = {0};
    *id = ++transfers->last_id;
    put(request + 4, START, 2);
    put(request + 6, (transfer->no_wait != 0) | (transfer->sync != 0) << 1, 2);
    put(request + 8, *id, 8);
    put(request + 16, ends->from, 8);
    put(request + 24, transfer->bytes, 8);
    put(request + 32, ends->to, 8);
    put(request + 40, transfer->stall_ms, 4);
    put(request + 44, transfer->deadline_ms, 4);
    request[48] = (uint8_t)ends->source_kind;
    request[49] = (uint8_t)ends->sink_kind;
    request[50] = (uint8_t)count;
    uint8_t* at = request + START_BYTES;
    int status = 0;
    for (unsigned i = 0; i < count && status == 0; i++) {
        status = check_stage(&stages[i]);
        if (status == 0) at += put_stage(at, &stages[i]);
    }
    request[51] = (uint8_t)transfer->more_count;
    int descriptors[SV_FILES_MAX + 1] = {ends->source};
    size_t descriptor_count = 1;
    for (uint32_t i = 0; i < transfer->more_count; i++) {
        const sv_range* range = &transfer->more[i];
        if (range->file < 0) status = -EBADF;
        descriptors[descriptor_count++] = range->file;
        put(at, range->offset, 8);
        put(at + 8, range->bytes, 8);
        at += RANGE_BYTES;
    }
    descriptors[descriptor_count++] = ends->sink;
    if (status == 0)
        status =
            send_request(transfers, request, (size_t)(at - request), descriptors, descriptor_count);
    explicit_bzero(request, sizeof request);
    return status;
}

static const sv_transfer defaults = SV_TRANSFER_DEFAULTS;

// The stages that the fields of a transfer name, and a seal.
static unsigned stages_of(const sv_transfer* transfer, const uint8_t* key, sv_stage* stages) {
    unsigned count = 0;
    if (transfer->digest)
        stages[count++] = (sv_stage){.kind = SV_STAGE_DIGEST, .option = transfer->digest};
    if (key)
        stages[count++] =
            (sv_stage){.kind = SV_STAGE_SEAL, .option = SV_CIPHER_AES_256_GCM, .key = key};
    return count;
}

static int send_file(sv_transfers* transfers, int socket, int file, const sv_transfer* transfer,
                     const uint8_t* key, uint64_t* id) {
    if (!transfer) transfer = &defaults;
    sv_stage stages[2];
    unsigned count = stages_of(transfer, key, stages);
    struct ends ends = {file, socket, IS_FILE, IS_SOCKET, transfer->offset, 0};
    return start(transfers, &ends, transfer, stages, count, id);
}

int sv_sendfile_start(sv_transfers* transfers, int socket, int file, const sv_transfer* transfer,
                      uint64_t* id) {
    return send_file(transfers, socket, file, transfer, NULL, id);
}

int sv_encrypted_sendfile_start(sv_transfers* transfers, int socket, int file,
                                const sv_transfer* transfer, const uint8_t key[32], uint64_t* id) {
    if (!key) return -EINVAL;
    return send_file(transfers, socket, file, transfer, key, id);
}

int sv_recvfile_start(sv_transfers* transfers, int file, int socket, const sv_transfer* transfer,
                      uint64_t* id) {
    if (!transfer) transfer = &defaults;
    sv_stage stages[2];
    unsigned count = stages_of(transfer, NULL, stages);
    struct ends ends = {socket, file, IS_SOCKET, IS_FILE, 0, transfer->offset};
    return start(transfers, &ends, transfer, stages, count, id);
}

// A negative error number, or what the descriptor is.
static int kind_of(int descriptor) {
    struct stat found;
    if (fstat(descriptor, &found) < 0) return -errno;
    return S_ISSOCK(found.st_mode) ? IS_SOCKET : IS_FILE;
}

int sv_pipeline_start(sv_transfers* transfers, int source, int sink, const sv_transfer* transfer,
                      const sv_stage* stages, unsigned count, uint64_t* id) {
    if (!transfer) transfer = &defaults;
    if (transfer->digest) return -EINVAL;
    struct ends ends = {
        source, sink, kind_of(source), kind_of(sink), transfer->offset, transfer->sink_offset};
    if (ends.source_kind < 0) return ends.source_kind;
    if (ends.sink_kind < 0) return ends.sink_kind;
    if ((ends.source_kind == IS_SOCKET && ends.from) || (ends.sink_kind == IS_SOCKET && ends.to))
        return -EINVAL;
    return start(transfers, &ends, transfer, stages, count, id);
}

static int ask(sv_transfers* transfers, int kind, uint64_t id, const int* descriptor) {
    uint8_t request[HEAD_BYTES] = {0};
    put(request + 4, (uint64_t)kind, 2);
    put(request + 8, id, 8);
    return send_request(transfers, request, sizeof request, descriptor, descriptor ? 1 : 0);
}

// Whether a write to it adds to a count and never waits.
static bool is_counter(int descriptor) {
    char own[32], kind[32];
    snprintf(own, sizeof own, "/proc/self/fd/%d", descriptor);
    ssize_t len = readlink(own, kind, sizeof kind - 1);
    if (len < 0) return false;
    kind[len] = 0;
    int flags = fcntl(descriptor, F_GETFL);
    return strcmp(kind, "anon_inode:[eventfd]") == 0 && flags >= 0 && (flags & O_NONBLOCK);
}

int sv_transfers_signal(sv_transfers* transfers, int eventfd) {
    if (!is_counter(eventfd)) return -EINVAL;
    struct ucred engine;
    socklen_t len = sizeof engine;
    if (getsockopt(transfers->socket, SOL_SOCKET, SO_PEERCRED, &engine, &len) < 0) return -errno;
    if (geteuid() != 0 && engine.uid != geteuid()) return -EPERM;
    return ask(transfers, SIGNAL, 0, &eventfd);
}

int sv_transfers_cancel(sv_transfers* transfers, uint64_t id) {
    return ask(transfers, CANCEL, id, NULL);
}

// Reads the report of a stage, which has at most `left` bytes. Returns its bytes, or a negative
// error number.
static int read_report(const uint8_t* at, size_t left, sv_stage_result* stage) {
    static const uint8_t digest_bytes[] = {0, 16, 32, 4, 20};
    if (left < REPORT_BYTES) return -EPROTO;
    stage->kind = at[0];
    stage->option = at[1];
    stage->finished = at[2];
    stage->bytes = get(at + 8, 8);
    stage->made = get(at + 16, 8);
    stage->offsets = (uint32_t)get(at + 4, 2);
    if (stage->offsets > SV_OFFSETS_MAX || left < REPORT_BYTES + 8 * stage->offsets) return -EPROTO;
    for (uint32_t i = 0; i < stage->offsets; i++)
        stage->offset[i] = get(at + REPORT_BYTES + 8 * i, 8);
    if (stage->finished && stage->kind == SV_STAGE_DIGEST) {
        if (stage->option >= sizeof digest_bytes) return -EPROTO;
        stage->digest_bytes = digest_bytes[stage->option];
        memcpy(stage->digest, at + 24, stage->digest_bytes);
    } else if (stage->finished && stage->kind == SV_STAGE_SEARCH) {
        stage->count = get(at + 24, 8);
    }
    return (int)(REPORT_BYTES + 8 * stage->offsets);
}

// Reads an answer. 0: a result; 1: an answer about progress; else a negative error number.
static int read_answer(sv_transfers* transfers, sv_transfer_result* result) {
    uint8_t answer[ANSWER_BYTES_MAX + 1];
    ssize_t len = recv(transfers->socket, answer, sizeof answer, MSG_DONTWAIT);
    if (len < 0) return errno == ECONNRESET ? -EPIPE : -errno;
    if (len == 0) return -EPIPE;
    if (len < PROGRESS_BYTES || memcmp(answer, "SVT2", 4) != 0) return -EPROTO;
    if (get(answer + 4, 2) != ENDED) return 1;
    if (len < ENDED_BYTES) return -EPROTO;
    size_t text = get(answer + 36, 2), stages = answer[7];
    if (answer[6] > REASON_MAX || stages > SV_STAGES_MAX || text > TEXT_BYTES_MAX) return -EPROTO;
    memset(result, 0, sizeof *result);
    result->reason = answer[6];
    result->id = get(answer + 8, 8);
    result->read = get(answer + 16, 8);
    result->written = get(answer + 24, 8);
    result->error = (int32_t)get(answer + 32, 4);
    result->stages = (uint32_t)stages;
    size_t at = ENDED_BYTES;
    for (size_t i = 0; i < stages; i++) {
        sv_stage_result* stage = &result->stage[i];
        int bytes = read_report(answer + at, (size_t)len - at, stage);
        if (bytes < 0) return bytes;
        at += (size_t)bytes;
        if (result->digest_bytes == 0) {
            result->digest_bytes = stage->digest_bytes;
            memcpy(result->digest, stage->digest, sizeof result->digest);
        }
    }
    if (result->reason != 0 && result->error == 0) return -EPROTO;
    if ((size_t)len != at + text) return -EPROTO;
    memcpy(result->text, answer + at, text);
    return result->id == 0 ? -ECONNREFUSED : 0;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Waits for a message: 0, -EAGAIN after timeout_ms, or -EINTR.
static int wait_readable(const sv_transfers* transfers, int timeout_ms) {
    struct pollfd entry = {transfers->socket, POLLIN, 0};
    int ready = poll(&entry, 1, timeout_ms);
    if (ready < 0) return -errno;
    return ready == 0 ? -EAGAIN : 0;
}

int sv_transfers_next(sv_transfers* transfers, int timeout_ms, sv_transfer_result* result) {
    if (transfers->first) {
        struct queued* first = transfers->first;
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
        // Answers about progress do not prolong the wait.
        int64_t left = timeout_ms > 0 ? end - now_ms() : timeout_ms;
        status = wait_readable(transfers, timeout_ms > 0 && left < 0 ? 0 : (int)left);
        if (status < 0) return status;
    }
}

int sv_transfers_dispatch(sv_transfers* transfers, int timeout_ms, sv_transfer_done done,
                          void* user) {
    sv_transfer_result result;
    int count = 0;
    for (;;) {
        int status = sv_transfers_next(transfers, count ? 0 : timeout_ms, &result);
        // An error after a result comes again with the next call.
        if (status != 0) return count ? count : status;
        done(user, &result);
        count++;
    }
}

// Appends a result of another transfer.
static int keep(sv_transfers* transfers, const sv_transfer_result* result) {
    struct queued* made = malloc(sizeof *made);
    if (!made) return -ENOMEM;
    *made = (struct queued){NULL, *result};
    struct queued** last = &transfers->first;
    while (*last) last = &(*last)->next;
    *last = made;
    return 0;
}

static int finish(sv_transfers* transfers, uint64_t id, sv_transfer_result* result) {
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
                // The engine cancels the transfer when it sees the end of the connection.
                shutdown(transfers->socket, SHUT_RDWR);
                return -ETIMEDOUT;
            }
            asked = true;
            status = ask(transfers, PROGRESS, id, NULL);
        }
        if (status < 0 && status != -EAGAIN) return status;
    }
}

int sv_sendfile(sv_transfers* transfers, int socket, int file, const sv_transfer* transfer,
                sv_transfer_result* result) {
    uint64_t id;
    int status = sv_sendfile_start(transfers, socket, file, transfer, &id);
    return status < 0 ? status : finish(transfers, id, result);
}

int sv_encrypted_sendfile(sv_transfers* transfers, int socket, int file,
                          const sv_transfer* transfer, const uint8_t key[32],
                          sv_transfer_result* result) {
    uint64_t id;
    int status = sv_encrypted_sendfile_start(transfers, socket, file, transfer, key, &id);
    return status < 0 ? status : finish(transfers, id, result);
}

int sv_recvfile(sv_transfers* transfers, int file, int socket, const sv_transfer* transfer,
                sv_transfer_result* result) {
    uint64_t id;
    int status = sv_recvfile_start(transfers, file, socket, transfer, &id);
    return status < 0 ? status : finish(transfers, id, result);
}

int sv_pipeline(sv_transfers* transfers, int source, int sink, const sv_transfer* transfer,
                const sv_stage* stages, unsigned count, sv_transfer_result* result) {
    uint64_t id;
    int status = sv_pipeline_start(transfers, source, sink, transfer, stages, count, &id);
    return status < 0 ? status : finish(transfers, id, result);
}

// The folder of a path, in `room`.
static int folder_of(const char* path, char* room, size_t bytes) {
    size_t len = strlen(path);
    if (len == 0 || len >= bytes) return -ENAMETOOLONG;
    memcpy(room, path, len + 1);
    char* folder = dirname(room);
    memmove(room, folder, strlen(folder) + 1);
    return 0;
}

int sv_file_create(const char* path) {
    char folder[4096];
    int status = folder_of(path, folder, sizeof folder);
    if (status < 0) return status;
    int file = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
    // What file systems without such files say.
    if (file < 0) return errno == EISDIR ? -EOPNOTSUPP : -errno;
    return file;
}

static int name_file(int file, const char* path) {
    char own[32];
    snprintf(own, sizeof own, "/proc/self/fd/%d", file);
    return linkat(AT_FDCWD, own, AT_FDCWD, path, AT_SYMLINK_FOLLOW) < 0 ? -errno : 0;
}

// A link replaces nothing, a rename does.
static int replace_file(int file, const char* path, const char* folder) {
    for (int attempt = 0; attempt < 16; attempt++) {
        uint64_t number;
        if (getrandom(&number, sizeof number, 0) != sizeof number) return -EIO;
        char hidden[4096 + 32];
        snprintf(hidden, sizeof hidden, "%s/.%016llx.part", folder, (unsigned long long)number);
        int status = name_file(file, hidden);
        if (status == -EEXIST) continue;
        if (status < 0) return status;
        if (rename(hidden, path) == 0) return 0;
        status = -errno;
        unlink(hidden);
        return status;
    }
    return -EEXIST;
}

int sv_file_commit(int file, const char* path, int replace, int sync) {
    char folder[4096];
    int status = folder_of(path, folder, sizeof folder);
    if (status < 0) return status;
    status = replace ? replace_file(file, path, folder) : name_file(file, path);
    if (status < 0 || !sync) return status;
    int opened = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (opened < 0) return -errno;
    if (fsync(opened) < 0) status = -errno;
    close(opened);
    return status;
}
