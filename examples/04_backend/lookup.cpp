// lookup: returns the value that memcached has for a key.
//
// A request is the key. The reply is a line of text:
//     found VALUE
//     unknown                 memcached has no value for this key
//     unavailable: WHY        memcached could not be asked, or gave no answer; WHY is the status from the engine,
//                             `error` if memcached answered with an error, or `not asked` without a backend or when the service ends
//     not a key               memcached's keys have 1 to 250 bytes, none of them a space or a control character
//
// This is the simplest form: a block asks, and waits for the answer before it takes its next request; other blocks continue meanwhile.
// device/kernels/faces.cpp keeps several backend requests of a block in flight.
#include <serval/kernel.h>

namespace {

constexpr uint32_t KEY_BYTES_MAX = 250;

// A client's key becomes part of a command: a space or a line end in it would change the command.
inline SERVAL_DEVICE bool is_key(const serval::Message& msg) {
    if (msg.len() < 1 || msg.len() > KEY_BYTES_MAX) return false;
    for (uint32_t i = 0; i < msg.len(); i++) {
        const uint8_t byte = msg.as<uint8_t>()[i];
        if (byte <= ' ' || byte == 127) return false;
    }
    return true;
}

inline SERVAL_DEVICE uint32_t length_of(const char* text) {
    uint32_t bytes = 0;
    while (text[bytes]) bytes++;
    return bytes;
}

inline SERVAL_DEVICE bool starts(const serval::Message& answer, const char* text) {
    for (uint32_t i = 0; text[i]; i++)
        if (i >= answer.len() || answer.as<char>()[i] != text[i]) return false;
    return true;
}

// Writes `get KEY`, each thread its share, and returns the length. A backend with this framing needs a whole command, including its line end.
inline SERVAL_DEVICE uint32_t write_query(const serval::Block& block, const serval::Message& key, char* query) {
    const uint32_t end = 4 + key.len();
    for (uint32_t i = block.rank(); i < end + 2; i += block.size())
        query[i] = i < 4 ? "get "[i] : i < end ? key.as<char>()[i - 4] : "\r\n"[i - end];
    return end + 2;
}

// Replies with a text, followed by a value.
inline SERVAL_DEVICE void reply_with(serval::Block& block, serval::Mqueue& q, const serval::Message& msg, const char* text,
                                     const char* value = nullptr, uint32_t value_bytes = 0) {
    const uint32_t text_bytes = length_of(text);
    auto reply = q.reply(block, msg, text_bytes + value_bytes);
    if (reply)
        for (uint32_t i = block.rank(); i < reply.len(); i += block.size())
            reply.as<char>()[i] = i < text_bytes ? text[i] : value[i - text_bytes];
    q.send(block, reply);
}

// Every request to a backend gets an answer; if the backend gives none, the engine answers with the cause.
inline SERVAL_DEVICE const char* unavailable(serval::Status status) {
    switch (status) {
        case serval::TIMEOUT: return "unavailable: timeout";    // no answer within timeout_ms
        case serval::REFUSED: return "unavailable: refused";    // no server listens there
        case serval::CLOSED: return "unavailable: closed";      // it ended while the request was in flight
        case serval::TOO_LONG: return "unavailable: too long";  // the answer exceeds max_message_bytes of the backend
        default: return "unavailable: protocol";                // it does not use memcached's protocol
    }
}

// Replies with memcached's answer: `VALUE KEY FLAGS BYTES`, the value and `END`, a line each, or `END` alone. The engine's framing
// delivers whole answers, so nothing is missing. An error of memcached (SERVER_ERROR ...) is an answer as well.
inline SERVAL_DEVICE void reply_with_answer(serval::Block& block, serval::Mqueue& q, const serval::Message& msg, const serval::Message& answer) {
    constexpr uint32_t END_BYTES = 7;  // "\r\nEND\r\n"
    if (starts(answer, "END\r\n")) return reply_with(block, q, msg, "unknown");
    if (!starts(answer, "VALUE ")) return reply_with(block, q, msg, "unavailable: error");
    uint32_t value = 0;
    while (value < answer.len() && answer.as<char>()[value] != '\n') value++;
    value++;
    if (answer.len() < value + END_BYTES) return reply_with(block, q, msg, "unavailable: error");
    reply_with(block, q, msg, "found ", answer.as<char>() + value, answer.len() - value - END_BYTES);
}

}  // namespace

SERVAL_KERNEL(lookup) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED char query[KEY_BYTES_MAX + 6];
    while (auto msg = q.recv(block)) {
        if (!is_key(msg)) {
            reply_with(block, q, msg, "not a key");
            continue;
        }
        const uint32_t query_bytes = write_query(block, msg, query);
        // The tag, here 0, is returned with the answer: a kernel with several requests in flight uses it to match them.
        if (q.backends() == 0 || !q.backend(0).send(block, query, query_bytes, 0)) {
            reply_with(block, q, msg, "unavailable: not asked");  // the configuration has no backend, or the service ends
            continue;
        }
        const serval::Message answer = q.backend(0).recv(block);
        if (!answer) break;  // the service ends at once
        if (answer.status() == serval::OK)
            reply_with_answer(block, q, msg, answer);
        else
            reply_with(block, q, msg, unavailable(answer.status()));
    }
}
