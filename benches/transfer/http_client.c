/*
 * Asks a server of HTTP for one file again and again, on several connections that stay open, and compares every byte:
 * `http_client PORT NAME FILE CONNECTIONS SECONDS [CIPHER]`. FILE has the bytes that NAME is to have. With CIPHER, such as
 * TLS_AES_256_GCM_SHA384, the connections are those of TLS 1.3; the server is not authenticated. Prints a line of JSON.
 * `http_client certificate FILE` writes a new key and a certificate for the server.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS_MAX = 256, ROOM = 256 << 10, HEAD_MAX = 4096, TIMES_MAX = 1 << 20 };

static const uint8_t *expected;
static size_t bytes;
static char request[512];
static int port;
static uint64_t end_ns;
/* NULL: the connections are plain. */
static SSL_CTX *tls;

struct connection {
    pthread_t thread;
    uint64_t count, times, heads_alone;
    uint64_t *took;
};

static void fail(const char *what) {
    fprintf(stderr, "http_client: ");
    perror(what);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* A socket, with TLS above it or not. */
struct stream {
    int socket;
    SSL *tls;
};

static ssize_t take(const struct stream *stream, void *room, size_t len) {
    return stream->tls ? SSL_read(stream->tls, room, (int)len) : recv(stream->socket, room, len, 0);
}

static ssize_t give(const struct stream *stream, const char *text, size_t len) {
    return stream->tls ? SSL_write(stream->tls, text, (int)len) : send(stream->socket, text, len, MSG_NOSIGNAL);
}

static void fail_tls(const char *what) {
    fprintf(stderr, "http_client: %s: ", what);
    ERR_print_errors_fp(stderr);
    exit(1);
}

/* The answer to one request: its head, and exactly the expected bytes. Returns whether the head came alone: with TLS, as a record of its own. */
static int take_answer(const struct stream *stream, uint8_t *room) {
    size_t len = 0, head = 0;
    while (!head) {
        ssize_t now = take(stream, room + len, ROOM - 1 - len);
        if (now <= 0) fail("the head of an answer");
        len += (size_t)now;
        uint8_t *found = memmem(room, len, "\r\n\r\n", 4);
        if (found) head = (size_t)(found - room) + 4;
        else if (len > HEAD_MAX) fail("the head of an answer is too long");
    }
    room[head - 1] = '\0';
    const char *length = strcasestr((char *)room, "\nContent-Length:");
    if (strncmp((char *)room, "HTTP/1.1 200 ", 13) != 0 || !length || strtoull(length + 16, NULL, 10) != bytes) fail("not the file's length");
    size_t done = len - head;
    if (done > bytes || memcmp(room + head, expected, done) != 0) fail("other bytes than the file's");
    while (done < bytes) {
        size_t want = bytes - done < ROOM ? bytes - done : ROOM;
        ssize_t now = take(stream, room, want);
        if (now <= 0) fail("the body of an answer");
        if (memcmp(room, expected + done, (size_t)now) != 0) fail("other bytes than the file's");
        done += (size_t)now;
    }
    return len == head;
}

static void *run(void *argument) {
    struct connection *connection = argument;
    int one = 1, made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (made < 0 || connect(made, (struct sockaddr *)&address, sizeof address) < 0) fail("connecting");
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct stream stream = {made, NULL};
    if (tls) {
        stream.tls = SSL_new(tls);
        if (!stream.tls || SSL_set_fd(stream.tls, made) != 1 || SSL_connect(stream.tls) != 1) fail_tls("the handshake");
    }
    uint8_t *room = malloc(ROOM);
    connection->took = malloc(TIMES_MAX * sizeof *connection->took);
    if (!room || !connection->took) fail("memory");
    /* One at least, however late the thread starts. */
    uint64_t began = now_ns();
    do {
        if (give(&stream, request, strlen(request)) != (ssize_t)strlen(request)) fail("sending a request");
        connection->heads_alone += (uint64_t)take_answer(&stream, room);
        uint64_t ended = now_ns();
        if (connection->times < TIMES_MAX) connection->took[connection->times++] = ended - began;
        connection->count++;
        began = ended;
    } while (began < end_ns);
    SSL_free(stream.tls);
    close(made);
    free(room);
    return NULL;
}

static int in_order(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

static int make_certificate(const char *name) {
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *made = X509_new();
    FILE *file = fopen(name, "w");
    if (!file) fail(name);
    if (!key || !made || !X509_set_version(made, 2) || !ASN1_INTEGER_set(X509_get_serialNumber(made), 1) ||
        !X509_gmtime_adj(X509_getm_notBefore(made), 0) || !X509_gmtime_adj(X509_getm_notAfter(made), 86400) || !X509_set_pubkey(made, key) ||
        !X509_NAME_add_entry_by_txt(X509_get_subject_name(made), "CN", MBSTRING_ASC, (const unsigned char *)"localhost", -1, -1, 0) ||
        !X509_set_issuer_name(made, X509_get_subject_name(made)) || !X509_sign(made, key, EVP_sha256()) ||
        !PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL) || !PEM_write_X509(file, made) || fclose(file) != 0)
        fail_tls("a certificate");
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "certificate") == 0) return make_certificate(argv[2]);
    if (argc != 6 && argc != 7) return fprintf(stderr, "usage: http_client PORT NAME FILE CONNECTIONS SECONDS [CIPHER]\n"), 2;
    port = atoi(argv[1]);
    int count = atoi(argv[4]);
    if (count < 1 || count > CONNECTIONS_MAX) return fprintf(stderr, "1 to %d connections\n", CONNECTIONS_MAX), 2;
    snprintf(request, sizeof request, "GET /%s HTTP/1.1\r\nHost: test\r\n\r\n", argv[2]);
    struct stat found;
    int file = open(argv[3], O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &found) < 0 || found.st_size == 0) fail(argv[3]);
    bytes = (size_t)found.st_size;
    expected = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
    if (expected == MAP_FAILED) fail("mmap");
    if (argc == 7) {
        tls = SSL_CTX_new(TLS_client_method());
        if (!tls || !SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION) || !SSL_CTX_set_ciphersuites(tls, argv[6])) fail_tls(argv[6]);
        /* Many records with each call, so that the client is not what is measured. */
        SSL_CTX_set_read_ahead(tls, 1);
        SSL_CTX_set_default_read_buffer_len(tls, ROOM);
    }
    static struct connection connections[CONNECTIONS_MAX];
    uint64_t began = now_ns();
    end_ns = began + (uint64_t)(atof(argv[5]) * 1e9);
    for (int i = 0; i < count; i++)
        if (pthread_create(&connections[i].thread, NULL, run, &connections[i]) != 0) fail("a thread");
    uint64_t requests = 0, times = 0, heads_alone = 0;
    for (int i = 0; i < count; i++) {
        pthread_join(connections[i].thread, NULL);
        requests += connections[i].count;
        heads_alone += connections[i].heads_alone;
        times += connections[i].times;
    }
    double seconds = (double)(now_ns() - began) / 1e9;
    uint64_t *took = malloc(times * sizeof *took + 1), at = 0;
    if (!took) fail("memory");
    for (int i = 0; i < count; i++)
        for (uint64_t j = 0; j < connections[i].times; j++) took[at++] = connections[i].took[j];
    qsort(took, times, sizeof *took, in_order);
    printf("{\"requests\":%llu,\"heads_alone\":%llu,\"seconds\":%.6f,\"p50_us\":%.1f,\"p99_us\":%.1f}\n", (unsigned long long)requests,
           (unsigned long long)heads_alone, seconds, (double)took[times / 2] / 1e3, (double)took[times - 1 - times / 100] / 1e3);
    return 0;
}
