/*
 * The baselines of transfers: loops of pread, OpenSSL and send, and of recv, OpenSSL and pwrite, as a careful server does it. One
 * context for each stream, in place, the key set once; records as in docs/transfer.md, and a buffer of BYTES for each record. The key is that of
 * all streams, so the nonces of each stream begin at a random number: a key and a nonce must not be used twice.
 *
 *   seal FILE PORT BYTES ROUNDS              the file through AES-256-GCM to a socket
 *   seal-file FILE SINK BYTES ROUNDS         the same to a file or to shared memory, which is overwritten
 *   small FILE PORT ROUNDS                   a file of one record at a time, each opened, until the peer has answered with one byte
 *   receive DIGEST STREAMS LENGTH SINK BYTES ROUNDS
 *            a thread for each stream: LENGTH bytes from a socket through a digest (md5, sha1, sha256 or none) to the file SINK.NUMBER
 *
 * Each round prints seconds, CPU seconds and, of `receive`, the digests in the order of the numbers with which peers begin.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            perror(#condition); \
            exit(1); \
        } \
    } while (0)

enum { HEADER = 48, TAG = 16, STREAMS_MAX = 64 };

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int connected(const char *port) {
    int out = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(connect(out, (struct sockaddr *)&to, sizeof to) == 0);
    CHECK(setsockopt(out, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    return out;
}

static void put_all(int sink, int is_file, const unsigned char *bytes, size_t count, off_t at) {
    while (count > 0) {
        ssize_t put = is_file ? pwrite(sink, bytes, count, at) : send(sink, bytes, count, MSG_NOSIGNAL);
        CHECK(put > 0);
        bytes += put;
        count -= (size_t)put;
        at += put;
    }
}

static EVP_CIPHER_CTX *cipher(void) {
    unsigned char key[32] = {1};
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    CHECK(EVP_EncryptInit_ex(context, EVP_aes_256_gcm(), NULL, key, NULL) == 1);
    return context;
}

/* Seals all of a file, in records of `payload` bytes and a tag. */
static void seal(int file, int sink, int is_file, unsigned char *buffer, size_t payload) {
    struct stat found;
    CHECK(fstat(file, &found) == 0);
    EVP_CIPHER_CTX *context = cipher();
    size_t start = HEADER;
    off_t written = 0;
    unsigned char nonce[12];
    CHECK(RAND_bytes(nonce, sizeof nonce) == 1);
    memcpy(buffer + HEADER - sizeof nonce, nonce, sizeof nonce);
    for (off_t at = 0; at < found.st_size;) {
        size_t want = (size_t)(found.st_size - at) < payload ? (size_t)(found.st_size - at) : payload;
        ssize_t got = pread(file, buffer + start, want, at);
        CHECK(got > 0);
        at += got;
        for (int i = 11; i >= 4 && ++nonce[i] == 0; i--) continue;
        int len;
        CHECK(EVP_EncryptInit_ex(context, NULL, NULL, NULL, nonce) == 1);
        CHECK(EVP_EncryptUpdate(context, buffer + start, &len, buffer + start, (int)got) == 1);
        CHECK(EVP_EncryptFinal_ex(context, buffer + start + got, &len) == 1);
        CHECK(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, TAG, buffer + start + got) == 1);
        put_all(sink, is_file, buffer, start + (size_t)got + TAG, written);
        written += (off_t)start + got + TAG;
        start = 0;
    }
    EVP_CIPHER_CTX_free(context);
}

static void seal_rounds(char **arguments, int is_file) {
    int file = open(arguments[0], O_RDONLY);
    CHECK(file >= 0);
    size_t payload = (size_t)atol(arguments[2]) - TAG;
    unsigned char *buffer = malloc(HEADER + payload + TAG);
    for (int round = 0; round < atoi(arguments[3]); round++) {
        int sink = is_file ? open(arguments[1], O_WRONLY) : connected(arguments[1]);
        CHECK(sink >= 0);
        double began = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        seal(file, sink, is_file, buffer, payload);
        char end;
        if (!is_file) CHECK(shutdown(sink, SHUT_WR) == 0 && read(sink, &end, 1) == 0);
        printf("%.6f %.6f\n", seconds(CLOCK_MONOTONIC) - began, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
        close(sink);
    }
}

static void small_rounds(char **arguments) {
    int sink = connected(arguments[1]);
    unsigned char buffer[HEADER + 65536];
    for (int round = 0; round < atoi(arguments[2]); round++) {
        double began = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        int file = open(arguments[0], O_RDONLY);
        CHECK(file >= 0);
        seal(file, sink, 0, buffer, sizeof buffer - HEADER - TAG);
        close(file);
        char answer;
        CHECK(read(sink, &answer, 1) == 1);
        printf("%.9f %.9f\n", seconds(CLOCK_MONOTONIC) - began, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    }
}

struct stream {
    int socket, sink;
    size_t bytes, buffer_bytes;
    const EVP_MD *kind;
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned digest_bytes;
};

static void *receive(void *argument) {
    struct stream *stream = argument;
    unsigned char *buffer = malloc(stream->buffer_bytes);
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    if (stream->kind) CHECK(EVP_DigestInit_ex(context, stream->kind, NULL) == 1);
    for (size_t at = 0; at < stream->bytes;) {
        size_t want = stream->bytes - at < stream->buffer_bytes ? stream->bytes - at : stream->buffer_bytes;
        ssize_t got = recv(stream->socket, buffer, want, 0);
        CHECK(got > 0);
        if (stream->kind) CHECK(EVP_DigestUpdate(context, buffer, (size_t)got) == 1);
        put_all(stream->sink, 1, buffer, (size_t)got, (off_t)at);
        at += (size_t)got;
    }
    if (stream->kind) CHECK(EVP_DigestFinal_ex(context, stream->digest, &stream->digest_bytes) == 1);
    EVP_MD_CTX_free(context);
    free(buffer);
    return NULL;
}

static void receive_rounds(char **arguments) {
    int count = atoi(arguments[1]), listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(count > 0 && count <= STREAMS_MAX);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    CHECK(bind(listener, (struct sockaddr *)&at, len) == 0 && listen(listener, STREAMS_MAX) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&at, &len) == 0);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    for (int round = 0; round < atoi(arguments[5]); round++) {
        struct stream streams[STREAMS_MAX];
        pthread_t threads[STREAMS_MAX];
        for (int i = 0; i < count; i++) {
            int from = accept(listener, NULL, NULL);
            unsigned char number;
            CHECK(from >= 0 && read(from, &number, 1) == 1 && number < count);
            char path[4096];
            snprintf(path, sizeof path, "%s.%d", arguments[3], number);
            const EVP_MD *kind = strcmp(arguments[0], "none") == 0 ? NULL : EVP_get_digestbyname(arguments[0]);
            streams[number] = (struct stream){.socket = from, .sink = open(path, O_WRONLY), .kind = kind};
            CHECK(streams[number].sink >= 0);
            streams[number].bytes = (size_t)atol(arguments[2]);
            streams[number].buffer_bytes = (size_t)atol(arguments[4]);
        }
        double began = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        for (int i = 0; i < count; i++) CHECK(write(streams[i].socket, "g", 1) == 1);
        for (int i = 1; i < count; i++) CHECK(pthread_create(&threads[i], NULL, receive, &streams[i]) == 0);
        receive(&streams[0]);
        for (int i = 1; i < count; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        printf("%.6f %.6f", seconds(CLOCK_MONOTONIC) - began, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
        for (int i = 0; i < count; i++) {
            printf(" ");
            for (unsigned b = 0; b < streams[i].digest_bytes; b++) printf("%02x", streams[i].digest[b]);
            close(streams[i].socket);
            close(streams[i].sink);
        }
        printf("\n");
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "seal") == 0 && argc == 6) seal_rounds(argv + 2, 0);
    else if (strcmp(what, "seal-file") == 0 && argc == 6) seal_rounds(argv + 2, 1);
    else if (strcmp(what, "small") == 0 && argc == 5) small_rounds(argv + 2);
    else if (strcmp(what, "receive") == 0 && argc == 8) receive_rounds(argv + 2);
    else return fprintf(stderr, "usage: the comment of loops_openssl.c\n"), 2;
    return 0;
}
