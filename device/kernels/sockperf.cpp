// sockperf: answers the stock sockperf client (3.x) in its ping-pong, under-load and throughput modes.
//
// A message starts with 14 bytes in network byte order: sequence number u64, flags u16, length of the whole message u32. Flag
// bits: 1 sent by a client, 2 requests an answer (pong), 4 warm-up. As in sockperf's own server, a client message that requests an
// answer and is not a warm-up is returned with the client bit cleared; other client messages get no reply and count as consumed.
// Messages that no client sends are dropped as REJECTED, messages with a wrong length as BAD_LENGTH.
#include <serval/kernel.h>

namespace serval_sockperf {
constexpr uint32_t HEADER_BYTES = 14;
constexpr uint8_t CLIENT = 1, PONG = 2, WARM_UP = 4;
}  // namespace serval_sockperf

SERVAL_KERNEL(sockperf) (serval::Block& block, serval::Mqueue& q) {
    using namespace serval_sockperf;
    while (auto msg = q.recv(block)) {
        const uint8_t* head = msg.as<const uint8_t>();
        const uint32_t len = msg.len();
        if (len < HEADER_BYTES ||
            (uint32_t{head[10]} << 24 | uint32_t{head[11]} << 16 | uint32_t{head[12]} << 8 | head[13]) != len) {
            q.drop(block, msg, serval::BAD_LENGTH);
            continue;
        }
        if ((head[9] & (CLIENT | PONG | WARM_UP)) != (CLIENT | PONG)) {
            q.drop(block, msg, head[9] & CLIENT ? serval::OK : serval::REJECTED);
            continue;
        }
        auto reply = q.reply(block, msg, len);
        if (reply)
            for (unsigned i = block.rank(); i < (len + 7) / 8; i += block.size()) {
                uint64_t word = msg.as<const uint64_t>()[i];
                if (i == 1) word &= ~(uint64_t{CLIENT} << 8);  // byte 9, the low byte of the flags
                reply.as<uint64_t>()[i] = word;
            }
        q.send(block, reply);
    }
}
