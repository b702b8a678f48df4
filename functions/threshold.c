// Drops requests whose number is outside of limits, and keeps statistics: the built-in function
// `threshold` as a module.
//
// The number is an unsigned 32-bit one, most significant byte first, at an offset of the payload. A
// request that is too short to have one is dropped.
#include "serval_function.h"

SERVAL_FUNCTION

enum { MIN, MAX, COUNT, SUM, DROPPED, SHORT, OFFSET, LOW, HIGH, REGISTERS };

#define LARGEST 0xffffffffull

static const struct serval_register registers[] = {
    {"min", SERVAL_MIN},        {"max", SERVAL_MAX},
    {"count", SERVAL_SUM},      {"sum", SERVAL_SUM},
    {"dropped", SERVAL_SUM},    {"short", SERVAL_SUM},
    {"offset", SERVAL_SETTING}, {"low", SERVAL_SETTING},
    {"high", SERVAL_SETTING},   {0, 0},
};

static serval_u64 values[REGISTERS] = {[MIN] = LARGEST, [OFFSET] = 14, [HIGH] = LARGEST};

int SERVAL_EXPORT(serval_requests)(struct serval_message* messages, serval_u32 count,
                                   serval_u8* scratch, serval_u32 scratch_bytes) {
    (void)scratch;
    (void)scratch_bytes;
    serval_u64 offset = values[OFFSET], low = values[LOW], high = values[HIGH];
    for (serval_u32 i = 0; i < count; i++) {
        if (messages[i].length < offset + 4) {
            values[SHORT]++;
            messages[i].verdict = SERVAL_DROP;
            continue;
        }
        serval_u64 number = serval_big_endian(messages[i].payload + offset);
        if (number < values[MIN]) values[MIN] = number;
        if (number > values[MAX]) values[MAX] = number;
        values[COUNT]++;
        values[SUM] += number;
        if (number < low || number > high) {
            values[DROPPED]++;
            messages[i].verdict = SERVAL_DROP;
        }
    }
    return 0;
}

const struct serval_register* SERVAL_EXPORT(serval_registers)(void) { return registers; }

serval_u64 SERVAL_EXPORT(serval_read)(serval_u32 index) {
    return index < REGISTERS ? values[index] : 0;
}

void SERVAL_EXPORT(serval_reset)(void) {
    for (serval_u32 i = 0; i < OFFSET; i++) values[i] = i == MIN ? LARGEST : 0;
}

int SERVAL_EXPORT(serval_write)(serval_u32 index, serval_u64 value) {
    if (index < OFFSET || index >= REGISTERS || value > LARGEST) return -1;
    values[index] = value;
    return 0;
}
