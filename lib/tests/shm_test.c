// Clients of a shared-memory port of an echo service. The first argument selects the test; the test
// that runs this program (crates/cli/tests/c_client.rs) plays the engine or starts one.
#define _GNU_SOURCE
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static serval_shm* connect_to(const char* path, uint32_t depth) {
    serval_shm_options options = {0};
    options.depth = depth;
    options.timeout_ms = 20000;
    serval_shm* client = NULL;
    CHECK_RESULT(serval_shm_connect(path, &options, &client), SERVAL_OK);
    CHECK(client != NULL);
    return client;
}

// Says how an attempt to connect ends: number, meaning, detail.
static void attempt(const char* path, uint32_t timeout_ms) {
    serval_shm_options options = {0};
    options.timeout_ms = timeout_ms;
    serval_shm* client = NULL;
    const int result = serval_shm_connect(path, &options, &client);
    CHECK((result == SERVAL_OK) == (client != NULL));
    printf("%d: %s: %s\n", result, serval_strerror(result),
           result == SERVAL_OK ? "" : serval_detail());
    serval_shm_close(client);
}

// The same as a user who may not.
static void attempt_as_nobody(const char* path) {
    if (geteuid() == 0)
        CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    else
        CHECK(chmod(path, 0) == 0);
    attempt(path, 5000);
}

// Waits for an outcome and says how that ends, first after one request.
static void one(const char* path) {
    serval_shm* client = connect_to(path, 0);
    uint8_t buffer[4096];
    serval_reply reply = {0};
    int result = serval_shm_send(client, 7, "hello", 5);
    if (result == SERVAL_OK) result = serval_shm_wait(client, serval_now_ns() + PATIENCE_NS);
    if (result == SERVAL_OK) result = serval_shm_recv(client, buffer, sizeof buffer, &reply);
    printf("%d: tag %llu, %u bytes, lost %u: %s\n", result, (unsigned long long)reply.tag,
           reply.len, reply.lost, reply.lost ? serval_drop_reason(reply.reason) : "-");
    // Every call on an unusable client fails.
    if (result == SERVAL_ERROR_CORRUPT) {
        CHECK_RESULT(serval_shm_recv(client, buffer, sizeof buffer, &reply), SERVAL_ERROR_CORRUPT);
        CHECK_RESULT(serval_shm_wait(client, 0), SERVAL_ERROR_CORRUPT);
        CHECK_RESULT(serval_shm_send(client, 8, "hello", 5), SERVAL_ERROR_CORRUPT);
    }
    serval_shm_close(client);
}

// `messages` requests of 8 to `bytes_max` bytes, `window` in flight; every reply is compared with
// its request.
static void load(const char* path, uint64_t messages, size_t bytes_max, uint32_t window) {
    serval_shm* client = connect_to(path, window);
    const serval_shm_terms terms = serval_shm_agreed(client);
    CHECK(terms.answers && terms.depth >= 1 && terms.request_bytes_max >= bytes_max &&
          terms.reply_bytes_max >= bytes_max);
    uint8_t* request = malloc(bytes_max);
    uint8_t* expected = malloc(bytes_max);
    // One byte more in front: replies have no alignment to rely on.
    uint8_t* buffer = (uint8_t*)malloc(bytes_max + 1) + 1;
    uint8_t* seen = calloc(messages, 1);
    CHECK(request && expected && seen);
    uint64_t sent = 0, received = 0;
    while (received < messages) {
        while (sent < messages) {
            const size_t len = 8 + sent * 13 % (bytes_max - 7);
            fill_message(request, len, sent);
            const int result = serval_shm_send(client, sent, request, len);
            if (result == SERVAL_FULL) break;
            CHECK_RESULT(result, SERVAL_OK);
            sent++;
        }
        CHECK_RESULT(serval_shm_wait(client, serval_now_ns() + PATIENCE_NS), SERVAL_OK);
        serval_reply reply;
        int result;
        while ((result = serval_shm_recv(client, buffer, bytes_max, &reply)) == SERVAL_OK) {
            CHECK(!reply.lost && reply.tag < sent && !seen[reply.tag]);
            seen[reply.tag] = 1;
            const size_t len = 8 + reply.tag * 13 % (bytes_max - 7);
            fill_message(expected, len, reply.tag);
            CHECK(reply.len == len && memcmp(buffer, expected, len) == 0);
            received++;
        }
        CHECK_RESULT(result, SERVAL_EMPTY);
        CHECK(serval_shm_under_way(client) == sent - received);
    }
    printf("%llu right\n", (unsigned long long)received);
    serval_shm_close(client);
    free(request);
    free(expected);
    free(buffer - 1);
    free(seen);
}

// What every call says at its limits.
static void limits(const char* path) {
    serval_shm* client = connect_to(path, 4);
    const serval_shm_terms terms = serval_shm_agreed(client);
    CHECK(terms.depth == 4);
    uint8_t* message = calloc(1, terms.request_bytes_max + 1u);
    CHECK(message != NULL);
    CHECK_RESULT(serval_shm_send(client, 1, message, terms.request_bytes_max + 1u),
                 SERVAL_ERROR_TOO_LONG);
    serval_reply reply = {0};
    CHECK_RESULT(serval_shm_recv(client, message, 8, &reply), SERVAL_EMPTY);
    CHECK_RESULT(serval_shm_wait(client, 0), SERVAL_EMPTY);
    const uint64_t before = serval_now_ns();
    CHECK_RESULT(serval_shm_wait(client, before + 2000000), SERVAL_EMPTY);
    CHECK(serval_now_ns() >= before + 2000000);
    // Requests that were not flushed stay here; so four and no more fit.
    for (uint64_t tag = 0; tag < 4; tag++)
        CHECK_RESULT(serval_shm_send(client, tag, "0123456789", 10), SERVAL_OK);
    CHECK_RESULT(serval_shm_send(client, 4, "0123456789", 10), SERVAL_FULL);
    CHECK(serval_shm_under_way(client) == 4);
    serval_shm_flush(client);
    for (uint64_t n = 0; n < 4; n++) {
        CHECK_RESULT(serval_shm_wait(client, serval_now_ns() + PATIENCE_NS), SERVAL_OK);
        CHECK_RESULT(serval_shm_recv(client, message, 9, &reply), SERVAL_ERROR_BUFFER);
        CHECK(reply.len == 10 && serval_shm_under_way(client) == 4 - n);
        CHECK_RESULT(serval_shm_recv(client, message, 10, &reply), SERVAL_OK);
        CHECK(reply.len == 10 && memcmp(message, "0123456789", 10) == 0);
    }
    CHECK(serval_shm_under_way(client) == 0);
    // The empty message is one.
    CHECK_RESULT(serval_shm_send(client, 99, NULL, 0), SERVAL_OK);
    CHECK_RESULT(serval_shm_wait(client, serval_now_ns() + PATIENCE_NS), SERVAL_OK);
    CHECK_RESULT(serval_shm_recv(client, NULL, 0, &reply), SERVAL_OK);
    CHECK(reply.tag == 99 && reply.len == 0 && !reply.lost);
    serval_shm_close(client);
    free(message);
    serval_shm_close(NULL);

    client = (serval_shm*)&reply;
    CHECK_RESULT(serval_shm_connect(NULL, NULL, &client), SERVAL_ERROR_ARGUMENT);
    CHECK(client == NULL);
    CHECK_RESULT(serval_shm_connect(path, NULL, NULL), SERVAL_ERROR_ARGUMENT);
    CHECK_RESULT(serval_shm_connect("relative", NULL, &client), SERVAL_ERROR_ARGUMENT);
    serval_shm_options options = {0};
    options.depth = 16385;
    CHECK_RESULT(serval_shm_connect(path, &options, &client), SERVAL_ERROR_ARGUMENT);
    CHECK(strstr(serval_detail(), "16384") != NULL);
    CHECK(strcmp(serval_drop_reason(0), "socket_overflow") == 0 &&
          strcmp(serval_drop_reason(60000), "other") == 0);
    for (int result = -1; result < 40; result++) CHECK(serval_strerror(result)[0] != '\0');
    printf("limits right\n");
}

// Asks until the engine ends, with a sleep for each outcome or without any; prints "serving" after
// the first outcome.
static void until_closed(const char* path, int sleeps) {
    serval_shm* client = connect_to(path, 64);
    uint64_t received = 0;
    int result = SERVAL_OK;
    while (result <= SERVAL_FULL) {
        result = serval_shm_send(client, 1, "ping", 4);
        if (result == SERVAL_OK) continue;
        if (result > SERVAL_FULL) break;
        serval_shm_flush(client);
        if (sleeps) result = serval_shm_wait(client, SERVAL_FOREVER);
        if (result > SERVAL_FULL) break;
        uint8_t buffer[8];
        serval_reply reply;
        result = serval_shm_recv(client, buffer, sizeof buffer, &reply);
        if (result == SERVAL_OK && ++received == 10000) {
            printf("serving\n");
            fflush(stdout);
        }
    }
    CHECK_RESULT(result, SERVAL_ERROR_CLOSED);
    // And again: what is left is received, then it stays closed.
    do {
        serval_reply reply;
        uint8_t buffer[8];
        result = serval_shm_recv(client, buffer, sizeof buffer, &reply);
    } while (result <= SERVAL_FULL);
    CHECK_RESULT(result, SERVAL_ERROR_CLOSED);
    CHECK_RESULT(serval_shm_wait(client, SERVAL_FOREVER), SERVAL_ERROR_CLOSED);
    printf("closed: %s\n", serval_detail());
    serval_shm_close(client);
}

// Sends 100 requests, and five more that the engine does not see, and says "sent". Counts what
// becomes of them when the port goes.
static void port_goes(const char* path) {
    serval_shm* client = connect_to(path, 128);
    uint8_t seen[105] = {0};
    unsigned answered = 0, refused = 0;
    for (uint64_t tag = 0; tag < 105; tag++) {
        CHECK_RESULT(serval_shm_send(client, tag, "ping", 4), SERVAL_OK);
        if (tag == 99) serval_shm_flush(client);
    }
    printf("sent\n");
    fflush(stdout);
    int result = SERVAL_OK;
    while (result <= SERVAL_FULL) {
        uint8_t buffer[8];
        serval_reply reply;
        result = serval_shm_recv(client, buffer, sizeof buffer, &reply);
        if (result != SERVAL_OK) continue;
        CHECK(reply.tag < 105 && !seen[reply.tag]++);
        if (reply.lost) CHECK(strcmp(serval_drop_reason(reply.reason), "draining") == 0);
        (*(reply.lost ? &refused : &answered))++;
    }
    CHECK_RESULT(result, SERVAL_ERROR_CLOSED);
    CHECK_RESULT(serval_shm_send(client, 0, "ping", 4), SERVAL_ERROR_CLOSED);
    CHECK(serval_shm_under_way(client) == 0);
    printf("%u answered, %u refused\n", answered, refused);
    serval_shm_close(client);
}

int main(int count, char** arguments) {
    // Whatever goes wrong, this program ends.
    alarm(600);
    CHECK(count >= 3);
    const char* test = arguments[1];
    const char* path = arguments[2];
    if (strcmp(test, "attempt") == 0 && count == 4)
        attempt(path, (uint32_t)number_argument(arguments, 3));
    else if (strcmp(test, "attempt-as-other-user") == 0)
        attempt_as_nobody(path);
    else if (strcmp(test, "one") == 0)
        one(path);
    else if (strcmp(test, "load") == 0 && count == 6)
        load(path, number_argument(arguments, 3), number_argument(arguments, 4),
             (uint32_t)number_argument(arguments, 5));
    else if (strcmp(test, "limits") == 0)
        limits(path);
    else if (strcmp(test, "port-goes") == 0)
        port_goes(path);
    else if (strcmp(test, "until-closed") == 0 && count == 4)
        until_closed(path, strcmp(arguments[3], "sleep") == 0);
    else
        CHECK(!"a known test with its arguments");
    return 0;
}
