// The records of a TLS connection, with a socket that takes any number of bytes, or none: `tls_test
// VERSION CIPHER SEED WIRE TOLD`. With an odd seed, messages of other types come between a call and
// its repetition. With the seeds 0 and 1 of each 4, libcrypto seals.
//
// Writes what has been sent to WIRE, and to TOLD what the program has been told that it has sent:
// for each call its type (1 byte), its length (4 bytes, little-endian) and its bytes. The keys are
// those of `info_of`, and the first record has number 250, so that more than its last byte changes.
#define _GNU_SOURCE
#include "preload/transfer/tls_stream.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tls.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: %s is not true (errno %d)\n", __FILE__, __LINE__, #condition, \
                    errno);                                                                       \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

enum { FILE_BYTES = 300001, CALLS = 400, AES_128 = 128, AES_256 = 256, CHACHA20 = 20 };

static uint64_t seed;
static bool is_mixed;
static FILE *wire, *told;
// What the socket does: a random part, all, or nothing.
static enum { SOME, ALL, NONE, ONE } room = SOME;
static struct tls_crypto crypto;
static uint8_t content[FILE_BYTES];
static int file;

static unsigned below(unsigned limit) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (unsigned)(seed >> 20) % limit;
}

static ssize_t fake_send(int fd, const void* bytes, size_t len, int flags) {
    (void)fd;
    (void)flags;
    size_t now = room == ALL     ? len
                 : room == NONE  ? 0
                 : room == ONE   ? 1
                 : below(4) == 0 ? 0
                 : below(3) == 0 ? len
                                 : 1 + below((unsigned)len);
    if (now == 0) {
        errno = EAGAIN;
        return -1;
    }
    CHECK(fwrite(bytes, 1, now, wire) == now);
    return (ssize_t)now;
}

static const struct tls_host host = {fake_send, preadv};

static void tell(uint8_t type, const uint8_t* bytes, size_t len) {
    uint8_t head[5] = {type, (uint8_t)len, (uint8_t)(len >> 8), (uint8_t)(len >> 16),
                       (uint8_t)(len >> 24)};
    CHECK(fwrite(head, 1, sizeof head, told) == sizeof head && fwrite(bytes, 1, len, told) == len);
}

union info {
    struct tls_crypto_info info;
    struct tls12_crypto_info_aes_gcm_128 aes_128;
    struct tls12_crypto_info_aes_gcm_256 aes_256;
    struct tls12_crypto_info_chacha20_poly1305 chacha20;
};

static size_t info_of(union info* info, int version, int cipher, uint64_t number) {
    memset(info, 0, sizeof *info);
    info->info.version = version == 13 ? TLS_1_3_VERSION : TLS_1_2_VERSION;
    uint8_t *key, *iv, *salt = NULL, *seq;
    size_t key_len = 32, iv_len = 8, len;
    if (cipher == AES_128) {
        info->info.cipher_type = TLS_CIPHER_AES_GCM_128;
        key = info->aes_128.key, iv = info->aes_128.iv, salt = info->aes_128.salt,
        seq = info->aes_128.rec_seq;
        key_len = 16, len = sizeof info->aes_128;
    } else if (cipher == AES_256) {
        info->info.cipher_type = TLS_CIPHER_AES_GCM_256;
        key = info->aes_256.key, iv = info->aes_256.iv, salt = info->aes_256.salt,
        seq = info->aes_256.rec_seq;
        len = sizeof info->aes_256;
    } else {
        info->info.cipher_type = TLS_CIPHER_CHACHA20_POLY1305;
        key = info->chacha20.key, iv = info->chacha20.iv, seq = info->chacha20.rec_seq;
        iv_len = 12, len = sizeof info->chacha20;
    }
    for (size_t i = 0; i < key_len; i++) key[i] = (uint8_t)(7 * i + 1);
    for (size_t i = 0; i < iv_len; i++) iv[i] = (uint8_t)(200 + i);
    for (size_t i = 0; salt && i < 4; i++) salt[i] = (uint8_t)(100 + i);
    for (int i = 0; i < 8; i++) seq[i] = (uint8_t)(number >> (56 - 8 * i));
    return len;
}

// A stream with keys.
static struct tls_stream* opened(int version, int cipher, uint64_t number) {
    static struct tls_stream stream;
    union info info;
    tls_stream_clear(&stream);
    size_t len = info_of(&info, version, cipher, number);
    CHECK(tls_stream_set_keys(&stream, &crypto, &info, len));
    return &stream;
}

static void some_message(struct tls_stream* stream) {
    static uint8_t bytes[TLS_PLAIN_MAX];
    uint8_t type = below(2) ? 21 : 22;
    size_t len = below(8) == 0 ? TLS_PLAIN_MAX : 1 + below(300), cut = below((unsigned)len);
    for (size_t i = 0; i < len; i++) bytes[i] = (uint8_t)below(20);
    struct iovec parts[3] = {{bytes, cut}, {NULL, 0}, {bytes + cut, len - cut}};
    ssize_t sent;
    while ((sent = tls_stream_message(stream, &host, -1, type, parts, 3, 0)) < 0)
        CHECK(errno == EAGAIN);
    CHECK((size_t)sent == len);
    tell(type, bytes, len);
}

// A call until all of its bytes are reported; what is repeated may be less, with a message before
// it, or in other parts.
static void some_data(struct tls_stream* stream) {
    size_t at = below(FILE_BYTES - 1), len = below(3) == 0 ? below(300) : below(100000);
    bool from_file = below(2), has_offset = below(2);
    if (len > FILE_BYTES - at) len = FILE_BYTES - at;
    for (int tries = 0; len > 0; tries++) {
        size_t now = below(4) == 0 ? 1 + below((unsigned)len) : len, cut = below((unsigned)now);
        struct iovec parts[4] = {
            {content + at, 0}, {content + at, cut}, {NULL, 0}, {content + at + cut, now - cut}};
        off_t offset = (off_t)at;
        CHECK(lseek(file, has_offset ? 5 : offset, SEEK_SET) >= 0);
        ssize_t sent =
            from_file
                ? tls_stream_sendfile(stream, &host, -1, file, has_offset ? &offset : NULL, now)
                : tls_stream_write(stream, &host, -1, parts, 4, below(2) ? MSG_DONTWAIT : 0);
        if (sent < 0) CHECK(errno == EAGAIN || errno == EINTR);
        size_t done = sent < 0 ? 0 : (size_t)sent;
        CHECK(done <= now && sent != 0);
        if (from_file)
            CHECK(has_offset ? offset == (off_t)(at + done) && lseek(file, 0, SEEK_CUR) == 5
                             : lseek(file, 0, SEEK_CUR) == (off_t)(at + done));
        if (done > 0) tell(TLS_DATA, content + at, done);
        at += done;
        len -= done;
        if (is_mixed && below(3) == 0) some_message(stream);
    }
}

static void refuses(int version, int cipher) {
    struct tls_stream* stream = opened(version, cipher, 0);
    struct iovec part = {content, 1000}, other = {content + 1, 1000};
    off_t offset = 0;
    // Other bytes than those whose record has been sent in part.
    for (int way = 0; way < 4; way++) {
        stream = opened(version, cipher, 0);
        room = ONE;
        bool from_file = way & 1, then_file = way & 2;
        CHECK((from_file ? tls_stream_sendfile(stream, &host, -1, file, &offset, 1000)
                         : tls_stream_write(stream, &host, -1, &part, 1, MSG_DONTWAIT)) < 0);
        CHECK(offset == 0 && stream->rest);
        union info info;
        size_t len = info_of(&info, version, cipher, 0);
        CHECK(!tls_stream_set_keys(stream, &crypto, &info, len));
        room = ALL;
        off_t from = 1;
        for (int again = 0; again < 2; again++) {
            CHECK((then_file ? tls_stream_sendfile(stream, &host, -1, file, &from, 1000)
                             : tls_stream_write(stream, &host, -1, &other, 1, 0)) < 0);
            CHECK(errno == EIO);
        }
        CHECK(tls_stream_message(stream, &host, -1, 21, &part, 1, 0) < 0 && errno == EIO);
    }
    // The last numbers.
    stream = opened(version, cipher, UINT64_MAX - 2);
    struct iovec two = {content, TLS_PLAIN_MAX + 1};
    CHECK(tls_stream_write(stream, &host, -1, &two, 1, 0) == (ssize_t)two.iov_len);
    CHECK(tls_stream_write(stream, &host, -1, &part, 1, 0) < 0 && errno == EIO);
    // After KeyUpdate there must be new keys.
    stream = opened(version, cipher, 0);
    struct iovec update = {(uint8_t[]){24, 0, 0, 1, 0}, 5};
    CHECK(tls_stream_message(stream, &host, -1, TLS_HANDSHAKE, &update, 1, 0) == 5);
    if (version == 13) {
        CHECK(tls_stream_write(stream, &host, -1, &part, 1, 0) < 0 && errno == EIO);
        union info info;
        size_t len = info_of(&info, version, cipher, 0);
        CHECK(tls_stream_set_keys(stream, &crypto, &info, len) && stream->keys.number == 0);
    }
    CHECK(tls_stream_write(stream, &host, -1, &part, 1, 0) == 1000);
    // What cannot be sent.
    CHECK(tls_stream_write(stream, &host, -1, NULL, 0, 0) == 0);
    CHECK(tls_stream_message(stream, &host, -1, 21, NULL, 0, 0) < 0 && errno == EINVAL);
    CHECK(tls_stream_message(stream, &host, -1, 21, &two, 1, 0) < 0 && errno == EMSGSIZE);
    offset = -1;
    CHECK(tls_stream_sendfile(stream, &host, -1, file, &offset, 1) < 0 && errno == EINVAL);
    offset = FILE_BYTES;
    CHECK(tls_stream_sendfile(stream, &host, -1, file, &offset, 1) == 0 && offset == FILE_BYTES);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(tls_stream_sendfile(stream, &host, -1, pipes[0], NULL, 1) < 0 && errno == EINVAL);
    close(pipes[0]);
    close(pipes[1]);
    offset = 0;
    int nothing = open("/dev/null", O_WRONLY);
    CHECK(tls_stream_sendfile(stream, &host, -1, nothing, &offset, 1) < 0 && errno == EBADF);
    close(nothing);
    // A socket without room, and numbers that were not used.
    room = NONE;
    uint64_t number = stream->keys.number;
    CHECK(tls_stream_write(stream, &host, -1, &two, 1, 0) < 0 && errno == EAGAIN &&
          stream->keys.number == number && !stream->rest);
    CHECK(tls_stream_message(stream, &host, -1, 21, &part, 1, 0) < 0 && errno == EAGAIN &&
          stream->keys.number == number);
    room = ALL;
    // Keys that are not known.
    union info info;
    size_t len = info_of(&info, version, cipher, 0);
    CHECK(!tls_stream_set_keys(stream, &crypto, &info, len - 1) &&
          !tls_stream_set_keys(stream, &crypto, &info, 0));
    info.info.version = 0x0302;
    CHECK(!tls_stream_set_keys(stream, &crypto, &info, len));
    len = info_of(&info, version, cipher, 0);
    info.info.cipher_type = TLS_CIPHER_AES_CCM_128;
    CHECK(!tls_stream_set_keys(stream, &crypto, &info, len));
    CHECK(tls_stream_write(stream, &host, -1, &part, 1, 0) == 1000);
    tls_stream_clear(stream);
    CHECK(tls_stream_write(stream, &host, -1, &part, 1, 0) < 0 && errno == EIO);
}

// For a caller that has the function.
static bool find(void* library, const char* function) {
    Dl_info info;
    CHECK(dladdr(dlsym(library, function), &info));
    return tls_crypto_find(&crypto, library, info.dli_fbase);
}

int main(int argc, char** argv) {
    CHECK(argc == 6);
    int version = atoi(argv[1]), cipher = atoi(argv[2]);
    unsigned long long number = strtoull(argv[3], NULL, 10);
    is_mixed = number & 1;
    seed = number * 0x9e3779b97f4a7c15 + 1;
    void* library = dlopen("libcrypto.so.3", RTLD_NOW);
    CHECK(library && find(library, "OpenSSL_version_num"));
    void* other = dlopen("libc.so.6", RTLD_NOW);
    CHECK(other && !find(other, "write"));
    // A library that needs libcrypto is not libcrypto.
    void* user = dlopen("libssl.so.3", RTLD_NOW);
    CHECK(user && !find(user, "SSL_new") && dlsym(user, "EVP_EncryptUpdate"));
    CHECK(find(library, "OpenSSL_version_num"));
    file = memfd_create("file", MFD_CLOEXEC);
    for (size_t i = 0; i < FILE_BYTES; i++) content[i] = (uint8_t)below(256);
    CHECK(write(file, content, FILE_BYTES) == FILE_BYTES);
    wire = fopen("/dev/null", "w");
    refuses(version, cipher);
    fclose(wire);
    wire = fopen(argv[4], "w");
    told = fopen(argv[5], "w");
    CHECK(wire && told);
    room = SOME;
    struct tls_stream* stream = opened(version, cipher, 250);
    for (int call = 0; call < CALLS; call++) {
        if (below(4) == 0)
            some_message(stream);
        else
            some_data(stream);
    }
    CHECK(!stream->rest && stream->owed == 0 && !stream->owed_message);
    tls_stream_clear(stream);
    CHECK(fclose(wire) == 0 && fclose(told) == 0);
    puts("ok");
    return 0;
}
