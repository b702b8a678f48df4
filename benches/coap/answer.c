// The application of the CoAP benchmark as a function of the service, behind coap-auth: answers each request with 2.05 and "done", as the
// servers with which it is compared do. `make -C benches/baselines coap-module` compiles it; clang is not needed otherwise.
#include "serval_function.h"

SERVAL_FUNCTION

enum { HEADER_BYTES = 4, TOKEN_BYTES_MAX = 8, ANSWER_BYTES = HEADER_BYTES + TOKEN_BYTES_MAX + 5 };

static serval_u8 answers[1024][ANSWER_BYTES];

int SERVAL_EXPORT(serval_requests)(struct serval_message* messages, serval_u32 count,
                                   serval_u8* scratch, serval_u32 scratch_bytes) {
  (void)scratch;
  (void)scratch_bytes;
  for (serval_u32 i = 0; i < count; i++) {
    const serval_u8* request = messages[i].payload;
    serval_u8* answer = answers[i];
    serval_u32 token = messages[i].length < HEADER_BYTES ? 15 : request[0] & 15, at = HEADER_BYTES + token;
    // Acknowledgements and resets, which coap-auth passes.
    if (token > TOKEN_BYTES_MAX || messages[i].length < at || request[0] & 0x20) {
      messages[i].verdict = SERVAL_DROP;
      continue;
    }
    // Confirmable: an acknowledgement with the response; else a response of its own.
    answer[0] = (serval_u8)(0x40 | (request[0] & 0x10 ? 0x10 : 0x20) | token);
    answer[1] = 0x45;
    for (serval_u32 b = 2; b < at; b++) answer[b] = request[b];
    answer[at] = 0xff;
    answer[at + 1] = 'd', answer[at + 2] = 'o', answer[at + 3] = 'n', answer[at + 4] = 'e';
    messages[i].verdict = SERVAL_REPLY;
    messages[i].written = answer;
    messages[i].written_length = at + 5;
  }
  return 0;
}
