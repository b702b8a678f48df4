// A call makes records in a buffer and sends them, a batch at a time. When the socket has no more
// room, records of which no byte has been sent are forgotten, with their numbers; of a record that
// has been sent in part the rest is kept. A call reports whole records only, so the program comes
// back with the bytes of that one when the socket has room: its rest is sent first, then the bytes
// count as sent. So nothing waits in this process that the program believes to be sent, and no
// thread is needed that sends it later.
#define _GNU_SOURCE
#include "preload/transfer/tls_stream.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

// A batch is in the caches of a core from the copy out of the page cache to the copy into the
// socket. The first one of a call is small, because the socket may have little room.
enum { BATCH_RECORDS = 16, FIRST_RECORDS = 2 };
// As Linux: a call transfers at most this number of bytes.
#define BYTES_MAX ((size_t)0x7ffff000)

// The bytes of a call: parts of memory, or a range of a file.
struct source {
    const struct iovec* parts;
    size_t count, at;
    size_t left;
    int file;
    off_t offset;
};

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static pthread_key_t buffer_key;
static bool has_key;

static void prepare(void) { has_key = pthread_key_create(&buffer_key, free) == 0; }

// The thread's buffer for a batch.
static uint8_t* buffer(void) {
    pthread_once(&prepared, prepare);
    if (!has_key) return NULL;
    uint8_t* found = pthread_getspecific(buffer_key);
    if (found) return found;
    found = malloc(BATCH_RECORDS * TLS_RECORD_MAX);
    if (found && pthread_setspecific(buffer_key, found) != 0) {
        free(found);
        found = NULL;
    }
    return found;
}

static void forget(uint8_t** bytes, size_t len) {
    if (*bytes) explicit_bzero(*bytes, len);
    free(*bytes);
    *bytes = NULL;
}

static void forget_owed(struct tls_stream* stream) {
    forget(&stream->owed_bytes, stream->owed);
    stream->owed = 0;
}

static void forget_message(struct tls_stream* stream) {
    forget(&stream->owed_message, stream->owed_message_bytes);
    stream->owed_message_bytes = 0;
}

static ssize_t fail(int error) {
    errno = error;
    return -1;
}

static ssize_t broken(struct tls_stream* stream) {
    stream->broken = true;
    return fail(EIO);
}

void tls_stream_clear(struct tls_stream* stream) {
    tls_keys_clear(&stream->keys);
    forget_owed(stream);
    forget_message(stream);
    free(stream->rest);
    memset(stream, 0, sizeof *stream);
}

bool tls_stream_set_keys(struct tls_stream* stream, const struct tls_crypto* crypto,
                         const void* info, size_t len) {
    if (stream->broken || stream->rest || !tls_keys_set(&stream->keys, crypto, info, len))
        return false;
    stream->wants_keys = false;
    return true;
}

// Copies bytes of the parts, which stay where they are.
static void copy_parts(const struct source* source, uint8_t* to, size_t len) {
    size_t at = source->at;
    for (const struct iovec* part = source->parts; len > 0; part++, at = 0) {
        size_t now = part->iov_len - at < len ? part->iov_len - at : len;
        if (now == 0) continue;
        memcpy(to, (const uint8_t*)part->iov_base + at, now);
        to += now;
        len -= now;
    }
}

static void skip(struct source* source, size_t len) {
    source->left -= len;
    source->offset += (off_t)len;
    if (source->file >= 0) return;
    source->at += len;
    while (source->count > 0 && source->at >= source->parts->iov_len) {
        source->at -= source->parts->iov_len;
        source->parts++;
        source->count--;
    }
}

static bool waits_for_room(int fd, int flags) {
    int now = fcntl(fd, F_GETFL);
    return !(flags & MSG_DONTWAIT) && now >= 0 && !(now & O_NONBLOCK);
}

// Sends bytes, of which a socket that waits for room takes all: a signal or a limit of time cuts a
// call short, but only a call that sends nothing reports it. Returns how many were sent, and if not
// all, errno.
static size_t send_all(const struct tls_host* host, int fd, const uint8_t* bytes, size_t len,
                       int flags) {
    size_t done = 0;
    while (done < len) {
        ssize_t sent = host->send(fd, bytes + done, len - done, flags);
        if (sent < 0) break;
        done += (size_t)sent;
        if (done < len && (sent == 0 || !waits_for_room(fd, flags))) {
            errno = EAGAIN;
            break;
        }
    }
    return done;
}

// Sends what is left of a record. False: errno says why not all of it.
static bool send_rest(struct tls_stream* stream, const struct tls_host* host, int fd, int flags) {
    if (!stream->rest) return true;
    stream->rest_at += send_all(host, fd, stream->rest + stream->rest_at,
                                stream->rest_bytes - stream->rest_at, flags);
    if (stream->rest_at < stream->rest_bytes) return false;
    free(stream->rest);
    stream->rest = NULL;
    return true;
}

// Keeps the rest of a record. False: there is no memory for it, so the stream ends here.
static bool keep_rest(struct tls_stream* stream, const uint8_t* rest, size_t len) {
    stream->rest = malloc(len);
    if (!stream->rest) {
        stream->broken = true;
        return false;
    }
    memcpy(stream->rest, rest, len);
    stream->rest_at = 0;
    stream->rest_bytes = len;
    return true;
}

// The program has to repeat the next bytes of the source.
static bool owe(struct tls_stream* stream, const struct source* source, size_t len) {
    if (source->file >= 0) {
        struct stat found;
        if (fstat(source->file, &found) < 0) return false;
        stream->owed_device = found.st_dev;
        stream->owed_inode = found.st_ino;
        stream->owed_offset = source->offset;
    } else {
        stream->owed_bytes = malloc(len);
        if (!stream->owed_bytes) return false;
        copy_parts(source, stream->owed_bytes, len);
    }
    stream->owed = len;
    return true;
}

// Takes what the program has repeated. False: it has written something else.
static bool take_owed(struct tls_stream* stream, struct source* source, size_t* taken) {
    size_t len = stream->owed < source->left ? stream->owed : source->left;
    *taken = 0;
    if (len == 0) return true;
    if ((source->file >= 0) != !stream->owed_bytes) return false;
    if (source->file >= 0) {
        struct stat found;
        if (fstat(source->file, &found) < 0 || found.st_dev != stream->owed_device ||
            found.st_ino != stream->owed_inode || source->offset != stream->owed_offset)
            return false;
        stream->owed_offset += (off_t)len;
    } else {
        uint8_t copy[TLS_PLAIN_MAX];
        copy_parts(source, copy, len);
        bool same = memcmp(copy, stream->owed_bytes, len) == 0;
        explicit_bzero(copy, len);
        if (!same) return false;
        memmove(stream->owed_bytes, stream->owed_bytes + len, stream->owed - len);
        explicit_bzero(stream->owed_bytes + stream->owed - len, len);
    }
    skip(source, len);
    *taken = len;
    if (len == stream->owed) {
        forget_owed(stream);
    } else {
        stream->owed -= len;
    }
    return true;
}

// Puts the plain bytes of up to `records` records where they are in the buffer. Returns their
// number; 0: the file has ended; -1: errno.
static ssize_t fill(const struct tls_stream* stream, const struct tls_host* host,
                    const struct source* source, uint8_t* room, size_t stride, size_t records) {
    size_t head = tls_head_bytes(&stream->keys),
           want = source->left < records * TLS_PLAIN_MAX ? source->left : records * TLS_PLAIN_MAX;
    struct iovec places[BATCH_RECORDS];
    int count = 0;
    for (size_t at = 0; at < want; at += TLS_PLAIN_MAX, count++) {
        places[count].iov_base = room + (size_t)count * stride + head;
        places[count].iov_len = want - at < TLS_PLAIN_MAX ? want - at : TLS_PLAIN_MAX;
    }
    if (source->file >= 0) return host->preadv(source->file, places, count, source->offset);
    struct source ahead = *source;
    for (int i = 0; i < count; i++) {
        copy_parts(&ahead, places[i].iov_base, places[i].iov_len);
        skip(&ahead, places[i].iov_len);
    }
    return (ssize_t)want;
}

// Seals the bytes that are in the buffer. Returns the length of all records; 0: none can be sent.
static size_t seal_all(struct tls_stream* stream, uint8_t* room, size_t stride, size_t bytes) {
    size_t head = tls_head_bytes(&stream->keys), sealed = 0;
    for (size_t at = 0, index = 0; at < bytes; at += TLS_PLAIN_MAX, index++) {
        size_t len = bytes - at < TLS_PLAIN_MAX ? bytes - at : TLS_PLAIN_MAX;
        uint8_t* record = room + index * stride;
        size_t made = tls_seal(&stream->keys, TLS_DATA, record + head, len, record);
        if (made == 0) {
            explicit_bzero(room, BATCH_RECORDS * TLS_RECORD_MAX);
            return 0;
        }
        sealed += made;
    }
    return sealed;
}

// Sends a batch. Returns the plain bytes of the records that were sent whole. `*error`: why not all
// were.
static size_t send_batch(struct tls_stream* stream, const struct tls_host* host, int fd, int flags,
                         const struct source* source, const uint8_t* room, size_t stride,
                         size_t sealed, size_t bytes, int* error) {
    ssize_t result = host->send(fd, room, sealed, flags);
    *error = 0;
    if (result >= 0 && (size_t)result == sealed) return bytes;
    *error = result < 0 ? errno : EAGAIN;
    size_t sent = result < 0 ? 0 : (size_t)result,
           records = (bytes + TLS_PLAIN_MAX - 1) / TLS_PLAIN_MAX, whole = sent / stride;
    if (sent > whole * stride && waits_for_room(fd, flags)) {
        // The call ends here, as the host's has, but behind a record.
        size_t end = (whole + 1) * stride < sealed ? (whole + 1) * stride : sealed;
        sent += send_all(host, fd, room + sent, end - sent, flags);
        *error = sent < end ? errno : EINTR;
        if (sent == sealed) return bytes;
        whole = sent / stride;
    }
    size_t in_part = sent - whole * stride, done = whole * TLS_PLAIN_MAX;
    // A number whose record has not left this process is free.
    stream->keys.number -= records - whole - (in_part > 0);
    if (in_part == 0) return done;
    struct source ahead = *source;
    skip(&ahead, done);
    size_t len = bytes - done < TLS_PLAIN_MAX ? bytes - done : TLS_PLAIN_MAX,
           end = whole + 1 == records ? sealed : (whole + 1) * stride;
    if (!keep_rest(stream, room + sent, end - sent) || !owe(stream, &ahead, len)) {
        stream->broken = true;
        *error = EIO;
    }
    return done;
}

static ssize_t put(struct tls_stream* stream, const struct tls_host* host, int fd, int flags,
                   struct source* source) {
    if (stream->broken || stream->wants_keys) return fail(EIO);
    if (source->left > BYTES_MAX) source->left = BYTES_MAX;
    if (source->left == 0) return 0;
    if (!send_rest(stream, host, fd, flags)) return -1;
    size_t done;
    if (!take_owed(stream, source, &done)) return broken(stream);
    uint8_t* room = buffer();
    if (!room) return done ? (ssize_t)done : fail(ENOMEM);
    size_t stride = tls_head_bytes(&stream->keys) + TLS_PLAIN_MAX + tls_tail_bytes(&stream->keys),
           records = FIRST_RECORDS;
    int error = 0;
    while (source->left > 0 && error == 0) {
        ssize_t bytes = fill(stream, host, source, room, stride, records);
        if (bytes < 0) error = errno == ESPIPE ? EINVAL : errno;
        if (bytes <= 0) break;
        size_t sealed = seal_all(stream, room, stride, (size_t)bytes);
        if (sealed == 0) {
            stream->broken = true;
            error = EIO;
            break;
        }
        size_t sent = send_batch(stream, host, fd, flags, source, room, stride, sealed,
                                 (size_t)bytes, &error);
        skip(source, sent);
        done += sent;
        if (records < BATCH_RECORDS) records *= 2;
    }
    return done || !error ? (ssize_t)done : fail(error);
}

// The parts with bytes, and their sum. False: it is more than a call can have.
static bool sum(const struct iovec* parts, size_t count, size_t* bytes) {
    *bytes = 0;
    for (size_t i = 0; i < count; i++)
        if (parts[i].iov_len > (size_t)SSIZE_MAX - *bytes)
            return false;
        else
            *bytes += parts[i].iov_len;
    return true;
}

ssize_t tls_stream_write(struct tls_stream* stream, const struct tls_host* host, int fd,
                         const struct iovec* parts, size_t count, int flags) {
    struct source source = {.parts = parts, .count = count, .file = -1};
    if (!sum(parts, count, &source.left)) return fail(EINVAL);
    skip(&source, 0);
    return put(stream, host, fd, flags, &source);
}

ssize_t tls_stream_sendfile(struct tls_stream* stream, const struct tls_host* host, int fd,
                            int file, off_t* offset, size_t bytes) {
    struct source source = {
        .file = file, .left = bytes, .offset = offset ? *offset : lseek(file, 0, SEEK_CUR)};
    if (source.offset < 0) return fail(offset ? EINVAL : errno == ESPIPE ? EINVAL : errno);
    ssize_t done = put(stream, host, fd, 0, &source);
    if (done > 0 && offset) *offset += done;
    if (done > 0 && !offset) lseek(file, done, SEEK_CUR);
    return done;
}

ssize_t tls_stream_message(struct tls_stream* stream, const struct tls_host* host, int fd,
                           uint8_t type, const struct iovec* parts, size_t count, int flags) {
    struct source source = {.parts = parts, .count = count, .file = -1};
    if (!sum(parts, count, &source.left) || source.left == 0) return fail(EINVAL);
    if (source.left > TLS_PLAIN_MAX) return fail(EMSGSIZE);
    if (stream->broken || stream->wants_keys) return fail(EIO);
    if (!send_rest(stream, host, fd, flags)) return -1;
    size_t len = source.left;
    skip(&source, 0);
    uint8_t *plain = malloc(len), *room = buffer();
    if (!plain || !room) {
        free(plain);
        return fail(ENOMEM);
    }
    copy_parts(&source, plain, len);
    bool is_repeated = stream->owed_message && stream->owed_type == type &&
                       stream->owed_message_bytes == len &&
                       memcmp(stream->owed_message, plain, len) == 0;
    forget_message(stream);
    ssize_t result = (ssize_t)len;
    if (!is_repeated) {
        size_t sealed = tls_seal(&stream->keys, type, plain, len, room);
        size_t sent = sealed == 0 ? 0 : send_all(host, fd, room, sealed, flags);
        if (sealed == 0) {
            result = broken(stream);
        } else if (sent == 0) {
            result = -1;
            stream->keys.number--;
        } else if (sent < sealed) {
            result = -1;
            if (!keep_rest(stream, room + sent, sealed - sent)) errno = EIO;
            stream->owed_message = plain;
            stream->owed_message_bytes = len;
            stream->owed_type = type;
            plain = NULL;
        }
    }
    // A message KeyUpdate (RFC 8446, section 4.6.3): what follows has other keys.
    if (result > 0 && stream->keys.is_13 && type == TLS_HANDSHAKE && plain[0] == 24)
        stream->wants_keys = true;
    int error = errno;
    if (plain) forget(&plain, len);
    errno = error;
    return result;
}
