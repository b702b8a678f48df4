// Transfers through the C library: `transfer_test SOCKET FOLDER`. Prints one line at the end; ends
// with 1 at the first difference.
#define _GNU_SOURCE
#include <serval/transfer.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: %s is not true\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

enum { BYTES = 1000003 };
static unsigned char content[BYTES];
static const uint8_t key[32] = {1, 2, 3};

struct reader {
    pthread_t thread;
    int socket;
    size_t len;
    unsigned char* got;
};

static void* read_all(void* argument) {
    struct reader* reader = argument;
    for (;;) {
        ssize_t got = read(reader->socket, reader->got + reader->len, 2 * BYTES - reader->len);
        if (got <= 0) break;
        reader->len += (size_t)got;
    }
    close(reader->socket);
    return NULL;
}

// A socket whose bytes another thread collects.
static int pair(struct reader* reader) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    *reader = (struct reader){.socket = ends[1], .got = malloc(2 * BYTES)};
    CHECK(reader->got && pthread_create(&reader->thread, NULL, read_all, reader) == 0);
    return ends[0];
}

static void finish(struct reader* reader, int socket) {
    close(socket);
    pthread_join(reader->thread, NULL);
}

static int make_file(const char* folder, const char* name, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0 && write(file, content, bytes) == (ssize_t)bytes);
    return file;
}

static void sends(sv_transfers* transfers, const char* folder) {
    int file = make_file(folder, "source", BYTES);
    struct reader reader;
    int out = pair(&reader);
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    transfer.digest = SV_DIGEST_CRC32C;
    transfer.offset = 3;
    CHECK(sv_sendfile(transfers, out, file, &transfer, &result) == 0);
    CHECK(result.error == 0 && result.written == BYTES - 3 && result.digest_bytes == 4 &&
          result.text[0] == 0);
    finish(&reader, out);
    CHECK(reader.len == BYTES - 3 && memcmp(reader.got, content + 3, reader.len) == 0);
    free(reader.got);

    out = pair(&reader);
    CHECK(sv_encrypted_sendfile(transfers, out, file, NULL, key, &result) == 0);
    CHECK(result.error == 0 && result.read == BYTES && result.written > BYTES);
    finish(&reader, out);
    CHECK(reader.len == result.written && memcmp(reader.got, "SERVSEAL", 8) == 0);
    free(reader.got);
    close(file);
}

static void receives(sv_transfers* transfers, const char* folder) {
    int file = make_file(folder, "sink", 0);
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK(write(ends[1], content, 5000) == 5000);
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    transfer.bytes = 4000;
    transfer.digest = SV_DIGEST_SHA256;
    CHECK(sv_recvfile(transfers, file, ends[0], &transfer, &result) == 0);
    CHECK(result.error == 0 && result.written == 4000 && result.digest_bytes == 32);
    unsigned char got[5000];
    CHECK(pread(file, got, sizeof got, 0) == 4000 && memcmp(got, content, 4000) == 0);
    CHECK(read(ends[0], got, sizeof got) == 1000 && memcmp(got, content + 4000, 1000) == 0);
    close(ends[0]);
    close(ends[1]);
    close(file);
}

// A file to shared memory, sealed and opened on the way, and a stream that was changed.
static void pipes(sv_transfers* transfers, const char* folder) {
    int file = make_file(folder, "source", BYTES), sealed = make_file(folder, "sealed", 0);
    int memory = memfd_create("opened", MFD_CLOEXEC);
    CHECK(memory >= 0);
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    const sv_stage seal[] = {{.kind = SV_STAGE_DIGEST, .option = SV_DIGEST_SHA1},
                             {.kind = SV_STAGE_SEAL, .option = SV_CIPHER_AES_256_GCM, .key = key}};
    CHECK(sv_pipeline(transfers, file, sealed, NULL, seal, 2, &result) == 0);
    CHECK(result.error == 0 && result.read == BYTES && result.stages == 2 &&
          result.digest_bytes == 20);
    CHECK(result.stage[1].kind == SV_STAGE_SEAL && result.stage[1].bytes == BYTES &&
          result.stage[1].made == result.written);
    uint8_t digest[20];
    memcpy(digest, result.digest, sizeof digest);

    const sv_stage open[] = {{.kind = SV_STAGE_OPEN, .option = SV_CIPHER_AES_256_GCM, .key = key},
                             {.kind = SV_STAGE_DIGEST, .option = SV_DIGEST_SHA1}};
    transfer.sink_offset = 7;
    CHECK(sv_pipeline(transfers, sealed, memory, &transfer, open, 2, &result) == 0);
    CHECK(result.error == 0 && result.written == BYTES &&
          memcmp(result.digest, digest, sizeof digest) == 0);
    unsigned char* got = malloc(BYTES);
    CHECK(got && pread(memory, got, BYTES, 7) == BYTES && memcmp(got, content, BYTES) == 0);
    free(got);

    unsigned char changed;
    CHECK(pread(sealed, &changed, 1, 100) == 1);
    changed ^= 1;
    CHECK(pwrite(sealed, &changed, 1, 100) == 1);
    CHECK(sv_pipeline(transfers, sealed, memory, &transfer, open, 2, &result) == 0);
    CHECK(result.error == EBADMSG && result.written == 0 && result.digest_bytes == 0 &&
          strstr(result.text, "record 0"));

    const sv_stage wrong[] = {{.kind = SV_STAGE_SEAL, .option = SV_CIPHER_AES_256_CTR, .key = key},
                              {.kind = SV_STAGE_DIGEST, .option = SV_DIGEST_MD5}};
    CHECK(sv_pipeline(transfers, file, memory, NULL, wrong, 2, &result) == 0);
    CHECK(result.error == EINVAL && strstr(result.text, "only the sink can follow a seal"));
    const sv_stage keyless = {.kind = SV_STAGE_SEAL, .option = SV_CIPHER_AES_256_CTR};
    CHECK(sv_pipeline(transfers, file, memory, NULL, &keyless, 1, &result) == -EINVAL);

    // Compressed to a file, and expanded again.
    CHECK(ftruncate(sealed, 0) == 0 && ftruncate(memory, 0) == 0);
    const sv_stage zip = {.kind = SV_STAGE_COMPRESS, .option = SV_FORMAT_GZIP};
    CHECK(sv_pipeline(transfers, file, sealed, NULL, &zip, 1, &result) == 0 && result.error == 0 &&
          result.written > 18);
    sv_stage expand = {.kind = SV_STAGE_EXPAND, .option = SV_FORMAT_GZIP};
    CHECK(sv_pipeline(transfers, sealed, memory, NULL, &expand, 1, &result) == 0);
    CHECK(result.error == 0 && result.written == BYTES && result.stage[0].made == BYTES);
    expand.bytes_max = BYTES - 1;
    CHECK(sv_pipeline(transfers, sealed, memory, NULL, &expand, 1, &result) == 0);
    CHECK(result.error == EBADMSG && strstr(result.text, "expands to more bytes"));
    const sv_stage wrong_format = {.kind = SV_STAGE_COMPRESS, .option = 3};
    CHECK(sv_pipeline(transfers, file, memory, NULL, &wrong_format, 1, &result) == -EINVAL);

    // Searched on the way.
    CHECK(pwrite(file, "\nneedle, needle\n", 16, 5000) == 16 &&
          pwrite(file, "needle", 6, 700000) == 6);
    const sv_stage search[] = {
        {.kind = SV_STAGE_SEARCH,
         .option = SV_SEARCH_TEXT,
         .pattern = "needle",
         .pattern_bytes = 6},
        {.kind = SV_STAGE_SEARCH,
         .option = SV_SEARCH_LINES,
         .pattern = "^ne+dle,",
         .pattern_bytes = 8},
    };
    CHECK(sv_pipeline(transfers, file, memory, NULL, search, 2, &result) == 0 && result.error == 0);
    CHECK(result.stage[0].count == 3 && result.stage[0].offsets == 3 &&
          result.stage[0].offset[2] == 700000);
    CHECK(result.stage[1].count == 1 && result.stage[1].offset[0] == 5001);
    const sv_stage endless = {
        .kind = SV_STAGE_SEARCH, .option = SV_SEARCH_LINES, .pattern = "(", .pattern_bytes = 1};
    CHECK(sv_pipeline(transfers, file, memory, NULL, &endless, 1, &result) == 0 &&
          result.error == EINVAL);
    CHECK(strcmp(result.text, "the pattern cannot be used: unclosed group") == 0);
    close(file);
    close(sealed);
    close(memory);
}

// A file that is whole, or absent.
static void makes_whole_files(sv_transfers* transfers, const char* folder) {
    int source = make_file(folder, "source", BYTES);
    char path[4096];
    snprintf(path, sizeof path, "%s/whole", folder);
    for (int replace = 0; replace < 2; replace++) {
        int file = sv_file_create(path);
        CHECK(file >= 0 && (access(path, F_OK) == 0) == (replace == 1));
        sv_transfer transfer = SV_TRANSFER_DEFAULTS;
        transfer.sync = 1;
        sv_transfer_result result;
        CHECK(sv_pipeline(transfers, source, file, &transfer, NULL, 0, &result) == 0);
        CHECK(result.error == 0 && result.written == BYTES);
        CHECK(sv_file_commit(file, path, replace, 1) == 0 && access(path, F_OK) == 0);
        close(file);
    }
    int other = sv_file_create(path);
    CHECK(other >= 0 && sv_file_commit(other, path, 0, 0) == -EEXIST);
    close(other);
    CHECK(unlink(path) == 0);

    // Several files are one stream.
    const sv_range more[] = {{source, 5, 100}, {source, BYTES - 3, SV_TO_THE_END}};
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    transfer.bytes = 7;
    transfer.more = more;
    transfer.more_count = 2;
    int joined = sv_file_create(path);
    unsigned char got[200];
    CHECK(joined >= 0 && sv_pipeline(transfers, source, joined, &transfer, NULL, 0, &result) == 0 &&
          result.error == 0);
    CHECK(pread(joined, got, sizeof got, 0) == 110 && memcmp(got, content, 7) == 0);
    CHECK(memcmp(got + 7, content + 5, 100) == 0 && memcmp(got + 107, content + BYTES - 3, 3) == 0);
    transfer.more_count = SV_FILES_MAX;
    CHECK(sv_pipeline(transfers, source, joined, &transfer, NULL, 0, &result) == -EINVAL);
    close(joined);
    CHECK(sv_file_create("/nowhere/file") == -ENOENT);
    close(source);
}

struct called {
    unsigned times;
    uint64_t id;
    int error;
};

static void note_result(void* user, const sv_transfer_result* result) {
    struct called* called = user;
    called->times++;
    called->id = result->id;
    called->error = result->error;
}

// A higher level is shorter, and expands to the same.
static void compresses_at_levels(sv_transfers* transfers, const char* folder) {
    int file = make_file(folder, "source", BYTES), packed = make_file(folder, "packed", 0),
        back = make_file(folder, "back", 0);
    uint64_t bytes[2];
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    sv_stage stage = {.kind = SV_STAGE_COMPRESS, .option = SV_FORMAT_ZSTD};
    for (unsigned i = 0; i < 2; i++) {
        stage.level = i ? SV_LEVEL_MAX : 0;
        CHECK(sv_pipeline(transfers, file, packed, &transfer, &stage, 1, &result) == 0 &&
              result.error == 0);
        bytes[i] = result.written;
    }
    CHECK(bytes[1] <= bytes[0]);
    transfer.bytes = bytes[1];
    sv_stage expand = {.kind = SV_STAGE_EXPAND, .option = SV_FORMAT_ZSTD, .ratio_max = 100000};
    CHECK(sv_pipeline(transfers, packed, back, &transfer, &expand, 1, &result) == 0 &&
          result.error == 0 && result.written == BYTES);
    stage.level = SV_LEVEL_MAX + 1;
    CHECK(sv_pipeline(transfers, file, packed, &transfer, &stage, 1, &result) == -EINVAL);
    expand.level = 1;
    CHECK(sv_pipeline(transfers, packed, back, &transfer, &expand, 1, &result) == -EINVAL);
    close(file);
    close(packed);
    close(back);
}

// Two transfers at once: one ends, the other one waits for its peer until it is cancelled.
static void runs_asynchronously(sv_transfers* transfers, const char* folder) {
    int file = make_file(folder, "source", BYTES), sink = make_file(folder, "sink", 0);
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK(write(ends[1], content, 10) == 10);
    struct reader reader;
    int out = pair(&reader);
    uint64_t waits, sends;
    CHECK(sv_recvfile_start(transfers, sink, ends[0], NULL, &waits) == 0);
    CHECK(sv_sendfile_start(transfers, out, file, NULL, &sends) == 0 && sends != waits);
    sv_transfer_result result;
    struct pollfd entry = {sv_transfers_fd(transfers), POLLIN, 0};
    CHECK(poll(&entry, 1, -1) == 1);
    struct called called = {0, 0, -1};
    CHECK(sv_transfers_dispatch(transfers, 0, note_result, &called) == 1);
    CHECK(called.times == 1 && called.id == sends && called.error == 0);
    CHECK(sv_transfers_dispatch(transfers, 0, note_result, &called) == -EAGAIN &&
          called.times == 1);
    CHECK(sv_transfers_next(transfers, 0, &result) == -EAGAIN);
    // A blocking call keeps the result of the other transfer.
    unsigned char got[10];
    while (pread(sink, got, sizeof got, 0) != 10) usleep(1000);
    CHECK(sv_transfers_cancel(transfers, waits) == 0);
    CHECK(sv_sendfile(transfers, out, file, NULL, &result) == 0 && result.error == 0);
    CHECK(sv_transfers_next(transfers, -1, &result) == 0 && result.id == waits);
    CHECK(result.error == ECANCELED && result.written == 10 && result.text[0]);
    finish(&reader, out);
    CHECK(reader.len == 2 * BYTES);
    free(reader.got);
    close(ends[0]);
    close(ends[1]);
    close(file);
    close(sink);
}

// Two connections count in one eventfd.
static void counts(sv_transfers* transfers, const char* path, const char* folder) {
    int counter = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), waits = eventfd(0, EFD_CLOEXEC);
    int file = make_file(folder, "source", BYTES), sink = make_file(folder, "sink", 0);
    CHECK(counter >= 0 && waits >= 0);
    CHECK(sv_transfers_signal(transfers, waits) == -EINVAL);
    CHECK(sv_transfers_signal(transfers, file) == -EINVAL);
    CHECK(sv_transfers_signal(transfers, -1) == -EINVAL);
    sv_transfers* other;
    CHECK(sv_transfers_open(path, &other) == 0);
    CHECK(sv_transfers_signal(transfers, counter) == 0 && sv_transfers_signal(other, counter) == 0);
    uint64_t id, count, seen = 0;
    CHECK(sv_pipeline_start(transfers, file, sink, NULL, NULL, 0, &id) == 0);
    sv_transfer_result result;
    CHECK(sv_pipeline(other, file, sink, NULL, NULL, 0, &result) == 0 && result.error == 0);
    while (seen < 2) {
        struct pollfd entry = {counter, POLLIN, 0};
        CHECK(poll(&entry, 1, -1) == 1 && read(counter, &count, sizeof count) == sizeof count);
        seen += count;
    }
    CHECK(seen == 2 && sv_transfers_next(transfers, 0, &result) == 0 && result.id == id &&
          result.error == 0);
    CHECK(sv_transfers_next(other, 0, &result) == -EAGAIN);
    CHECK(read(counter, &count, sizeof count) < 0 && errno == EAGAIN);
    sv_transfers_close(other);
    close(counter);
    close(waits);
    close(file);
    close(sink);
}

static void refuses(sv_transfers* transfers, const char* folder) {
    int file = make_file(folder, "source", 10);
    int ends[2];
    CHECK(pipe(ends) == 0);
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    CHECK(sv_sendfile(transfers, ends[1], file, NULL, &result) == 0);
    CHECK(result.error == EINVAL &&
          strcmp(result.text,
                 "the sink is a pipe: it has to be a connected stream socket (TCP or Unix)") == 0);
    CHECK(sv_sendfile(transfers, -1, file, NULL, &result) == -EBADF);
    CHECK(sv_encrypted_sendfile(transfers, ends[1], file, NULL, NULL, &result) == -EINVAL);
    transfer.no_wait = 1;
    transfer.digest = SV_DIGEST_MD5;
    CHECK(sv_sendfile(transfers, ends[1], file, &transfer, &result) == -EINVAL);
    close(ends[0]);
    close(ends[1]);
    // The number of a closed descriptor.
    CHECK(sv_sendfile(transfers, ends[1], file, NULL, &result) == -EBADF);
    close(file);
    sv_transfers* none;
    CHECK(sv_transfers_open("/nowhere/engine", &none) == -ENOENT);
    CHECK(sv_transfers_open("", &none) == -EINVAL);
}

static void leaves_nothing(const char* path, const char* folder) {
    int file = make_file(folder, "source", 100);
    for (int round = 0; round < 200; round++) {
        sv_transfers* transfers;
        CHECK(sv_transfers_open(path, &transfers) == 0);
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        uint64_t id;
        CHECK(sv_recvfile_start(transfers, file, ends[0], NULL, &id) == 0);
        sv_transfers_close(transfers);
        close(ends[0]);
        close(ends[1]);
    }
    // A descriptor that leaked would have a higher number.
    int last = dup(file);
    CHECK(last < 20);
    close(last);
    close(file);
}

int main(int argc, char** argv) {
    CHECK(argc == 3);
    for (size_t at = 0; at < BYTES; at++) content[at] = (unsigned char)(at * 31 ^ at >> 8);
    sv_transfers* transfers;
    int opened = sv_transfers_open(argv[1], &transfers);
    if (opened != 0) {
        printf("no engine: %s\n", strerror(-opened));
        return 0;
    }
    sends(transfers, argv[2]);
    receives(transfers, argv[2]);
    pipes(transfers, argv[2]);
    makes_whole_files(transfers, argv[2]);
    runs_asynchronously(transfers, argv[2]);
    compresses_at_levels(transfers, argv[2]);
    counts(transfers, argv[1], argv[2]);
    refuses(transfers, argv[2]);
    sv_transfers_close(transfers);
    leaves_nothing(argv[1], argv[2]);
    printf("ok\n");
    return 0;
}
