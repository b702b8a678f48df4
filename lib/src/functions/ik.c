// See ik.h. A request is a line on a connection to the control socket, and so is its answer.
#define _GNU_SOURCE
#include "serval/ik.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "functions/ring.h"
#include "unix/descriptors.h"

// As crates/server/src/control/protocol.rs has them.
#define REQUEST_BYTES_MAX 16384
#define TEXT_BYTES_MAX 64
#define PATH_BYTES_MAX 4096
#define ANSWER_BYTES_MAX (1 << 20)
#define MODULE_BYTES_MAX (8 << 20)
#define ERROR_BYTES 1024
#ifndef PATIENCE_MS
#define PATIENCE_MS 90000
#endif
// Descriptors in an answer, at most.
#define FILES_MAX 2

struct ik {
    struct sockaddr_un server;
    int fd;     // the connection with which the function ends; -1: none
    int ended;  // 1: that connection was closed behind an error
    uint64_t id;
    int attached;
    char error[ERROR_BYTES];
    char* answer;          // ANSWER_BYTES_MAX + 1 bytes
    int files[FILES_MAX];  // that came with the answer
    int file_count;
};

static _Thread_local char create_error[ERROR_BYTES];

// Texts go into JSON as they are: quotes, backslashes and control characters are refused.
static int is_text(const char* text, size_t bytes_max) {
    size_t length = text ? strnlen(text, bytes_max + 1) : 0;
    if (length == 0 || length > bytes_max) return 0;
    for (; *text; text++)
        if (*text == '"' || *text == '\\' || (unsigned char)*text < 32 || *text == 127) return 0;
    return 1;
}

static int connect_to(const struct sockaddr_un* server) {
    // Connecting waits while many others do, and sending while the server reads nothing.
    struct timeval limit = {PATIENCE_MS / 1000, PATIENCE_MS % 1000 * 1000};
    int result, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return -errno;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0 ||
        connect(fd, (const struct sockaddr*)server, sizeof(*server)) < 0) {
        result = -errno;
        close(fd);
        return result;
    }
    return fd;
}

static int send_line(int fd, const char* line, size_t length, int file) {
    int result = serval_send_descriptors(fd, line, length, &file, file >= 0);
    return result == -EPIPE ? -ECONNRESET : result;
}

static void close_files(struct ik* ik) {
    while (ik->file_count > 0) close(ik->files[--ik->file_count]);
}

static ssize_t receive(struct ik* ik, int fd) {
    struct serval_descriptors arrived;
    ssize_t received = serval_receive_descriptors(fd, ik->answer, ANSWER_BYTES_MAX, 0, ik->files,
                                                  FILES_MAX, &arrived);
    ik->file_count = arrived.count < FILES_MAX ? (int)arrived.count : FILES_MAX;
    return received;
}

// Sends the line, with a file if there is one, and receives the answer, a string.
static int exchange(struct ik* ik, const char* line, size_t length, int file) {
    int fd = ik->ended ? -ECONNRESET : ik->fd >= 0 ? ik->fd : connect_to(&ik->server);
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    ssize_t received;
    int result, ready;
    if (fd < 0) return fd;
    result = send_line(fd, line, length, file);
    if (result == 0) {
        do ready = poll(&poll_fd, 1, PATIENCE_MS);
        while (ready < 0 && errno == EINTR);
        received = ready > 0 ? receive(ik, fd) : 0;
        if (ready == 0)
            result = -ETIMEDOUT;
        else if (ready < 0)
            result = -errno;
        else if (received < 0)
            result = (int)received;
        else if (received == 0)
            result = -ECONNRESET;
        else
            ik->answer[received] = '\0';
    }
    if (fd != ik->fd) {
        close(fd);
    } else if (result) {
        // A late answer would be taken for that of the next request.
        close(fd);
        ik->fd = -1;
        ik->ended = 1;
    }
    return result;
}

// The value of a key at the beginning of the answer's object, or of the object `registers` in it.
// Keys have no escapes; a text cannot be taken for a key, since a quote in it has a backslash
// before it.
static const char* value_of(const char* answer, const char* key) {
    char quoted[TEXT_BYTES_MAX + 8];
    const char* found;
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    found = strstr(answer, quoted);
    return found && (found[-1] == '{' || found[-1] == ',') ? found + strlen(quoted) : NULL;
}

static int number_of(const char* answer, const char* key, uint64_t* value) {
    const char* found = value_of(answer, key);
    char* end;
    if (!found) return -ENOENT;
    errno = 0;
    *value = strtoull(found, &end, 10);
    return errno || end == found || *found == '-' ? -EPROTO : 0;
}

static void note_error(struct ik* ik, const char* text) {
    size_t length = 0;
    for (text++; *text && *text != '"' && length + 1 < sizeof(ik->error); text++) {
        if (*text == '\\' && text[1]) text++;
        ik->error[length++] = (unsigned char)*text < 32 ? '?' : *text;
    }
    ik->error[length] = '\0';
}

__attribute__((format(printf, 3, 4))) static int ask(struct ik* ik, int file, const char* format,
                                                     ...) {
    char line[REQUEST_BYTES_MAX];
    const char* error;
    va_list arguments;
    int length, result;
    va_start(arguments, format);
    length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    ik->error[0] = '\0';
    close_files(ik);
    if (length < 0 || length >= (int)sizeof(line)) return -EINVAL;
    result = exchange(ik, line, (size_t)length, file);
    if (result) return result;
    if (ik->answer[0] != '{') return -EPROTO;
    error = value_of(ik->answer, "error");
    if (error && *error == '"') {
        note_error(ik, error);
        return -EREMOTEIO;
    }
    return value_of(ik->answer, "result") ? 0 : -EPROTO;
}

static int write_all(int fd, const char* bytes, size_t count) {
    while (count > 0) {
        ssize_t written = write(fd, bytes, count);
        if (written < 0) return -errno;
        bytes += written;
        count -= (size_t)written;
    }
    return 0;
}

static int copy_sealed(int from, int to) {
    char bytes[16384];
    size_t copied = 0;
    for (;;) {
        ssize_t got = read(from, bytes, sizeof(bytes));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        copied += (size_t)got;
        if (copied > MODULE_BYTES_MAX) return -EFBIG;
        int result = write_all(to, bytes, (size_t)got);
        if (result) return result;
    }
    int seals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    return fcntl(to, F_ADD_SEALS, seals) < 0 ? -errno : 0;
}

// A sealed copy of a module: the server opens no files for other users.
static int sealed_copy(const char* path) {
    struct stat found;
    int result, copy, file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0) return -errno;
    result = fstat(file, &found) < 0 ? -errno : S_ISREG(found.st_mode) ? 0 : -EINVAL;
    copy = result ? result : memfd_create("serval:module", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (result == 0 && copy < 0) copy = -errno;
    if (copy >= 0) {
        result = copy_sealed(file, copy);
        if (result) {
            close(copy);
            copy = result;
        }
    }
    close(file);
    return copy;
}

static void free_ik(struct ik* ik) {
    close_files(ik);
    if (ik->fd >= 0) close(ik->fd);
    free(ik->answer);
    free(ik);
}

static int create(struct ik* ik, const char* function, const char* name,
                  const struct ik_attrs* attrs) {
    size_t length = strlen(function);
    int is_module = length > 5 && strcmp(function + length - 5, ".wasm") == 0;
    int file = is_module ? sealed_copy(function) : -1;
    char more[160 + TEXT_BYTES_MAX] = "";
    int result, at = 0;
    if (is_module && file < 0) return file;
    if (attrs->deadline_us) at = sprintf(more, ",\"deadline_us\":%u", attrs->deadline_us);
    if (attrs->memory_mib) at += sprintf(more + at, ",\"memory_mib\":%u", attrs->memory_mib);
    if (attrs->dictionary) at += sprintf(more + at, ",\"dictionary\":\"%s\"", attrs->dictionary);
    if (attrs->dictionary_kib) sprintf(more + at, ",\"dictionary_kib\":%u", attrs->dictionary_kib);
    ik->fd = attrs->keep ? -1 : connect_to(&ik->server);
    result = attrs->keep || ik->fd >= 0 ? 0 : ik->fd;
    if (result == 0)
        result =
            ask(ik, file,
                "{\"command\":\"functions\",\"do\":\"create\",\"name\":\"%s\",\"function\":\"%s\","
                "\"bound\":%s,\"on_failure\":\"%s\"%s}",
                name, function, attrs->keep ? "false" : "true",
                attrs->on_failure_open ? "open" : "closed", more);
    if (file >= 0) close(file);
    if (result) return result;
    return number_of(ik->answer, "id", &ik->id) ? -EPROTO : 0;
}

int ik_create(const char* server, const char* function, const char* name,
              const struct ik_attrs* attrs, struct ik** ik) {
    static const struct ik_attrs defaults;
    struct ik* made;
    int result;
    create_error[0] = '\0';
    if (!ik || !is_text(function, PATH_BYTES_MAX) || !is_text(name, TEXT_BYTES_MAX)) return -EINVAL;
    if (attrs && attrs->dictionary && !is_text(attrs->dictionary, TEXT_BYTES_MAX)) return -EINVAL;
    if (!server || !*server || strlen(server) >= sizeof(made->server.sun_path)) return -EINVAL;
    made = calloc(1, sizeof(*made));
    if (made) made->answer = malloc(ANSWER_BYTES_MAX + 1);
    if (!made || !made->answer) {
        free(made);
        return -ENOMEM;
    }
    made->fd = -1;
    made->server.sun_family = AF_UNIX;
    strcpy(made->server.sun_path, server);
    result = create(made, function, name, attrs ? attrs : &defaults);
    if (result) {
        memcpy(create_error, made->error, sizeof(create_error));
        free_ik(made);
        return result;
    }
    *ik = made;
    return 0;
}

static int attach(struct ik* ik, const char* service, const char* place) {
    int result;
    if (!ik || !is_text(service, TEXT_BYTES_MAX)) return -EINVAL;
    if (ik->attached) return -EALREADY;
    result = ask(ik, -1,
                 "{\"command\":\"functions\",\"do\":\"attach\",\"id\":%llu,\"service\":\"%s\"%s}",
                 (unsigned long long)ik->id, service, place);
    if (result == 0) ik->attached = 1;
    return result;
}

int ik_attach(struct ik* ik, const char* service) { return attach(ik, service, ""); }

int ik_attach_at(struct ik* ik, const char* service, enum ik_place place, const char* neighbour) {
    char text[TEXT_BYTES_MAX + 32];
    if (!is_text(neighbour, TEXT_BYTES_MAX) || (place != IK_BEFORE && place != IK_AFTER))
        return -EINVAL;
    snprintf(text, sizeof(text), ",\"%s\":\"%s\"", place == IK_BEFORE ? "before" : "after",
             neighbour);
    return attach(ik, service, text);
}

int custom_ring_create(struct ik* ik, uint32_t entries, uint32_t message_bytes,
                       struct custom_ring** ring) {
    int result;
    if (!ik || !ring) return -EINVAL;
    result = ask(ik, -1,
                 "{\"command\":\"functions\",\"do\":\"ring\",\"id\":%llu,\"entries\":%u,"
                 "\"message_bytes\":%u}",
                 (unsigned long long)ik->id, entries, message_bytes);
    if (result) return result;
    if (ik->file_count != FILES_MAX) return -EPROTO;
    ik->file_count = 0;
    return serval_ring_open(ik->files[0], ik->files[1], ring);
}

int ik_command(struct ik* ik, enum ik_operation operation, const char* reg, uint64_t* value) {
    const char* registers;
    int result;
    if (!ik || !value || !is_text(reg, TEXT_BYTES_MAX)) return -EINVAL;
    if (!ik->attached) return -ENOTCONN;
    if (operation == IK_WRITE)
        result = ask(ik, -1,
                     "{\"command\":\"functions\",\"do\":\"write\",\"id\":%llu,\"register\":\"%s\","
                     "\"value\":%llu}",
                     (unsigned long long)ik->id, reg, (unsigned long long)*value);
    else if (operation == IK_READ || operation == IK_RESET)
        result = ask(ik, -1, "{\"command\":\"functions\",\"do\":\"%s\",\"id\":%llu}",
                     operation == IK_READ ? "read" : "reset", (unsigned long long)ik->id);
    else
        return -EINVAL;
    if (result) return result;
    registers = value_of(ik->answer, "registers");
    return registers ? number_of(registers, reg, value) : -EPROTO;
}

int ik_detach(struct ik* ik) {
    int result;
    if (!ik) return -EINVAL;
    if (!ik->attached) return -ENOTCONN;
    result = ask(ik, -1, "{\"command\":\"functions\",\"do\":\"detach\",\"id\":%llu}",
                 (unsigned long long)ik->id);
    if (result == 0) ik->attached = 0;
    return result;
}

int ik_destroy(struct ik* ik) {
    int result = 0, destroyed;
    if (!ik) return 0;
    if (ik->attached) result = ik_detach(ik);
    destroyed = ask(ik, -1, "{\"command\":\"functions\",\"do\":\"destroy\",\"id\":%llu}",
                    (unsigned long long)ik->id);
    free_ik(ik);
    return result ? result : destroyed;
}

int ik_release(struct ik* ik) {
    if (ik && (ik->fd >= 0 || ik->ended)) return ik_destroy(ik);
    if (ik) free_ik(ik);
    return 0;
}

uint64_t ik_id(const struct ik* ik) { return ik ? ik->id : 0; }

const char* ik_error(const struct ik* ik) { return ik ? ik->error : create_error; }
