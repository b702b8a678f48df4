#define _GNU_SOURCE
#include "burst/result.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>

static _Thread_local char detail[512];

int serval_fail(int result, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    // A sentence that is too long is truncated.
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    return result;
}

const char* serval_detail(void) { return detail; }

const char* serval_strerror(int result) {
    switch (result) {
        case SERVAL_OK:
            return "success";
        case SERVAL_EMPTY:
            return "nothing has arrived";
        case SERVAL_FULL:
            return "no room for more until something is received";
        case SERVAL_ERROR_ARGUMENT:
            return "an argument is outside its range";
        case SERVAL_ERROR_CONNECT:
            return "no server listens at the address";
        case SERVAL_ERROR_PERMISSION:
            return "this user may not connect to the port";
        case SERVAL_ERROR_REFUSED:
            return "the engine refuses the connection";
        case SERVAL_ERROR_PROTOCOL:
            return "the server at the address is not an engine, or uses another protocol version";
        case SERVAL_ERROR_SILENT:
            return "the engine did not answer the handshake in time";
        case SERVAL_ERROR_REGION:
            return "the shared memory that the engine passed cannot be used";
        case SERVAL_ERROR_TOO_LONG:
            return "the message is longer than the service takes";
        case SERVAL_ERROR_BUFFER:
            return "the reply does not fit the buffer";
        case SERVAL_ERROR_CLOSED:
            return "the engine has ended or closed the connection";
        case SERVAL_ERROR_CORRUPT:
            return "the rings hold impossible words: connect again";
        case SERVAL_ERROR_SYSTEM:
            return "the host kernel refused a call";
        default:
            return "no result of this library";
    }
}

uint64_t serval_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int serval_poll_ms(uint64_t deadline_ns) {
    if (deadline_ns == SERVAL_FOREVER) return -1;
    const uint64_t now = serval_now_ns();
    if (deadline_ns <= now) return 0;
    const uint64_t ms = (deadline_ns - now + 999999) / 1000000;
    // A long wait ends early, and the caller checks the clock again.
    return ms > 60000 ? 60000 : (int)ms;
}
