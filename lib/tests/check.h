// What the test programs share. A check that fails says where and ends the program with 1.
#ifndef SERVAL_CLIENT_CHECK_H
#define SERVAL_CLIENT_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <serval/client.h>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: not so: %s\n  last detail: %s\n", __FILE__, __LINE__, \
                    #condition, serval_detail());                                         \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

#define CHECK_RESULT(call, expected)                                                         \
    do {                                                                                     \
        const int check_result = (call);                                                     \
        if (check_result != (expected)) {                                                    \
            fprintf(stderr, "%s:%d: %s is %d (%s), not %s\n  last detail: %s\n", __FILE__,   \
                    __LINE__, #call, check_result, serval_strerror(check_result), #expected, \
                    serval_detail());                                                        \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

// Longest that anything may take.
#define PATIENCE_NS 30000000000ull

// Fills `bytes` with what message `number` carries: its number (as far as it fits), then bytes that
// depend on it.
static inline void fill_message(uint8_t* bytes, size_t len, uint64_t number) {
    for (size_t i = 0; i < len; i++)
        bytes[i] = (uint8_t)(i < 8 ? number >> (8 * i) : number * 7 + i * 31 + (i >> 8));
}

static inline uint64_t number_of(const uint8_t* bytes) {
    uint64_t number = 0;
    for (size_t i = 0; i < 8; i++) number |= (uint64_t)bytes[i] << (8 * i);
    return number;
}

static inline uint64_t number_argument(char** arguments, int index) {
    return strtoull(arguments[index], NULL, 10);
}

#endif
