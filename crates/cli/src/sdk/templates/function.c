// Answers `ping`, drops requests that are longer than a limit, and counts both.
#include "serval_function.h"

SERVAL_FUNCTION

enum { PINGS, DROPPED, LONGEST, REGISTERS };

static const struct serval_register registers[] = {
    {"pings", SERVAL_SUM},
    {"dropped", SERVAL_SUM},
    {"longest", SERVAL_SETTING},
    {0, 0},
};

static serval_u64 values[REGISTERS] = {[LONGEST] = 1024};

static int is_ping(const struct serval_message* message) {
  const serval_u8* p = message->payload;
  return message->length == 4 && p[0] == 'p' && p[1] == 'i' && p[2] == 'n' && p[3] == 'g';
}

int SERVAL_EXPORT(serval_requests)(struct serval_message* messages, serval_u32 count,
                                   serval_u8* scratch, serval_u32 scratch_bytes) {
  (void)scratch, (void)scratch_bytes;
  for (serval_u32 i = 0; i < count; i++) {
    struct serval_message* message = &messages[i];
    if (is_ping(message)) {
      values[PINGS]++;
      message->verdict = SERVAL_REPLY;
      message->written = (const serval_u8*)"pong";
      message->written_length = 4;
    } else if (message->length > values[LONGEST]) {
      values[DROPPED]++;
      message->verdict = SERVAL_DROP;
    }
  }
  return 0;
}

const struct serval_register* SERVAL_EXPORT(serval_registers)(void) { return registers; }

serval_u64 SERVAL_EXPORT(serval_read)(serval_u32 index) {
  return index < REGISTERS ? values[index] : 0;
}

void SERVAL_EXPORT(serval_reset)(void) { values[PINGS] = values[DROPPED] = 0; }

int SERVAL_EXPORT(serval_write)(serval_u32 index, serval_u64 value) {
  if (index != LONGEST) return -1;
  values[LONGEST] = value;
  return 0;
}
