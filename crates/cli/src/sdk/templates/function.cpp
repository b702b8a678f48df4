// Answers `ping`, drops requests that are longer than a limit, and counts both.
#include "serval_function.h"

SERVAL_FUNCTION

namespace {

enum { PINGS, DROPPED, LONGEST, REGISTERS };

constexpr serval_register registers[] = {
    {"pings", SERVAL_SUM},
    {"dropped", SERVAL_SUM},
    {"longest", SERVAL_SETTING},
    {nullptr, 0},
};

serval_u64 values[REGISTERS] = {0, 0, 1024};

bool is(const serval_message& message, const char* text, serval_u32 length) {
  if (message.length != length) return false;
  for (serval_u32 i = 0; i < length; i++)
    if (message.payload[i] != static_cast<serval_u8>(text[i])) return false;
  return true;
}

}  // namespace

int SERVAL_EXPORT(serval_requests)(serval_message* messages, serval_u32 count, serval_u8*,
                                   serval_u32) {
  for (serval_u32 i = 0; i < count; i++) {
    serval_message& message = messages[i];
    if (is(message, "ping", 4)) {
      values[PINGS]++;
      message.verdict = SERVAL_REPLY;
      message.written = reinterpret_cast<const serval_u8*>("pong");
      message.written_length = 4;
    } else if (message.length > values[LONGEST]) {
      values[DROPPED]++;
      message.verdict = SERVAL_DROP;
    }
  }
  return 0;
}

const serval_register* SERVAL_EXPORT(serval_registers)() { return registers; }

serval_u64 SERVAL_EXPORT(serval_read)(serval_u32 index) {
  return index < REGISTERS ? values[index] : 0;
}

void SERVAL_EXPORT(serval_reset)() { values[PINGS] = values[DROPPED] = 0; }

int SERVAL_EXPORT(serval_write)(serval_u32 index, serval_u64 value) {
  if (index != LONGEST) return -1;
  values[LONGEST] = value;
  return 0;
}
