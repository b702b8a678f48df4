/*
 * The baseline of sealed transfers: a loop of pread, OpenSSL's AES-256-GCM and send in one thread, as a careful server does it.
 * One context, in place, the key set once; records and nonces as in docs/transfer.md, and a buffer of `bytes` for each record.
 *
 *   seal_openssl FILE PORT BYTES ROUNDS    prints seconds and CPU seconds of each round
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/evp.h>
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

enum { HEADER = 48, TAG = 16 };

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void send_all(int socket, const unsigned char *bytes, size_t count) {
    while (count > 0) {
        ssize_t sent = send(socket, bytes, count, MSG_NOSIGNAL);
        CHECK(sent > 0);
        bytes += sent;
        count -= (size_t)sent;
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 5);
    int file = open(argv[1], O_RDONLY);
    CHECK(file >= 0);
    struct stat found;
    CHECK(fstat(file, &found) == 0);
    size_t payload = (size_t)atol(argv[3]) - TAG;
    unsigned char *buffer = malloc(HEADER + payload + TAG);
    unsigned char key[32] = {1};
    for (int round = 0; round < atoi(argv[4]); round++) {
        int out = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        CHECK(connect(out, (struct sockaddr *)&to, sizeof to) == 0);
        int one = 1;
        CHECK(setsockopt(out, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
        double began = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
        CHECK(EVP_EncryptInit_ex(context, EVP_aes_256_gcm(), NULL, key, NULL) == 1);
        size_t start = HEADER;
        uint64_t record = 0;
        for (off_t at = 0; at < found.st_size; record++) {
            size_t want = (size_t)(found.st_size - at) < payload ? (size_t)(found.st_size - at) : payload;
            ssize_t got = pread(file, buffer + start, want, at);
            CHECK(got > 0);
            at += got;
            unsigned char nonce[12] = {0, 0, 0, at == found.st_size};
            for (int i = 0; i < 8; i++) nonce[4 + i] = (unsigned char)(record >> (56 - 8 * i));
            int len;
            CHECK(EVP_EncryptInit_ex(context, NULL, NULL, NULL, nonce) == 1);
            CHECK(EVP_EncryptUpdate(context, buffer + start, &len, buffer + start, (int)got) == 1);
            CHECK(EVP_EncryptFinal_ex(context, buffer + start + got, &len) == 1);
            CHECK(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, TAG, buffer + start + got) == 1);
            send_all(out, buffer, start + (size_t)got + TAG);
            start = 0;
        }
        EVP_CIPHER_CTX_free(context);
        CHECK(shutdown(out, SHUT_WR) == 0);
        char end;
        CHECK(read(out, &end, 1) == 0);
        printf("%.6f %.6f\n", seconds(CLOCK_MONOTONIC) - began, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
        close(out);
    }
    return 0;
}
