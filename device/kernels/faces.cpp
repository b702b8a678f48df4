// faces: does this picture show the face stored in the database under this label?
//
// Request: 12-byte label, then 32x32 grey bytes. Reply: u32 verdict (0 no match, 1 match, 2 unknown label, 3 database
// unavailable), float32 distance, both little endian; the distance is 0 if nothing was compared. `params.threshold` is the
// largest distance of a match. The comparison is in models/faces.h.
//
// Backend 0 is a memcached database (1.6 or later), used through its meta commands: the request is a complete command with line
// end, and the answer is the complete response. Key: `face:` and the label as 24 hex digits. Value: the 1024 bytes of the
// picture. An answer that is neither that value nor a miss counts as an unavailable database.
//
// `mg KEY k v` returns the value with its key, as `get KEY` does, but memcached collects the answers to meta commands that
// arrive together and sends them with one call, while it makes one call per `get`: with dozens in flight that is most of
// its cost per request (counted with memcached 1.6.18, 64 in flight: one sendmsg for 16 requests instead of one for each).
#include <serval/kernel.h>

#include "../models/faces.h"

namespace serval_faces_kernel {

constexpr unsigned LABEL_BYTES = 12;
constexpr unsigned PICTURE_BYTES = 1024;
constexpr unsigned KEY_BYTES = 5 + 2 * LABEL_BYTES;
constexpr unsigned QUERY_BYTES = 3 + KEY_BYTES + 6;  // "mg KEY k v\r\n"
enum Verdict : uint32_t { NO_MATCH = 0, MATCH = 1, UNKNOWN = 2, UNAVAILABLE = 3 };
struct Answer {
    uint32_t verdict;
    float distance;
};

// Requests of one block that wait for the database at a time: the round trip through the engine takes longer than a few
// comparisons, and queries sent together are answered together.
constexpr unsigned AHEAD = 8;
struct Place {
    alignas(16) uint8_t picture[PICTURE_BYTES];
    char query[QUERY_BYTES];
};

// Writes the query for a label; each thread its share.
inline SERVAL_DEVICE void write_query(const serval::Block& block, const uint8_t* label, char* query) {
    for (unsigned i = block.rank(); i < QUERY_BYTES; i += block.size()) {
        const unsigned digit = i - 8;
        if (i < 8)
            query[i] = "mg face:"[i];
        else if (digit < 2 * LABEL_BYTES)
            query[i] = "0123456789abcdef"[(digit % 2 ? label[digit / 2] : label[digit / 2] >> 4) & 15];
        else
            query[i] = " k v\r\n"[digit - 2 * LABEL_BYTES];
    }
}

// Reads a response from the front.
struct Reader {
    const uint8_t* at;
    uint32_t left;

    SERVAL_DEVICE bool skip(const char* text, unsigned bytes) {
        if (left < bytes) return false;
        for (unsigned i = 0; i < bytes; i++)
            if (at[i] != static_cast<uint8_t>(text[i])) return false;
        at += bytes;
        left -= bytes;
        return true;
    }
};

// The picture in the response to `query`; null if there is none, see `verdict`.
inline SERVAL_DEVICE const uint8_t* read_response(const serval::Message& answer, const char* query, uint32_t& verdict) {
    verdict = UNAVAILABLE;
    if (answer.status() != serval::OK) return nullptr;
    Reader r = {answer.as<const uint8_t>(), answer.len()};
    if (r.skip("EN", 2)) {  // a miss, with or without its key
        const bool same = r.left == 2 || (r.skip(" k", 2) && r.skip(query + 3, KEY_BYTES));
        if (same && r.left == 2 && r.skip("\r\n", 2)) verdict = UNKNOWN;
        return nullptr;
    }
    if (!r.skip("VA 1024 k", 9) || !r.skip(query + 3, KEY_BYTES) || !r.skip("\r\n", 2) || r.left != PICTURE_BYTES + 2) return nullptr;
    const uint8_t* picture = r.at;
    r.at += PICTURE_BYTES;
    r.left -= PICTURE_BYTES;
    return r.skip("\r\n", 2) ? picture : nullptr;
}

inline SERVAL_DEVICE void reply_with(serval::Block& block, serval::Mqueue& q, const serval::Message& msg, const Answer& result) {
    auto reply = q.reply(block, msg, sizeof result);
    if (reply && block.rank() == 0) *reply.as<Answer>() = result;
    q.send(block, reply);
}

}  // namespace serval_faces_kernel

SERVAL_KERNEL(faces) (serval::Block& block, serval::Mqueue& q) {
    using namespace serval_faces_kernel;
    SERVAL_SHARED serval_faces::Scratch scratch;
    SERVAL_SHARED Place places[AHEAD];
    const float threshold = static_cast<float>(block.param("threshold", serval_faces::DEFAULT_THRESHOLD));
    serval::Message asked[AHEAD];  // the request for each entry of `places`; empty if the entry is free
    uint64_t tag = 0;
    unsigned waiting = 0;
    for (;;) {
        // Query the database for all available requests before waiting for its answers. An entry is free again once its answer arrived.
        const bool free = !asked[tag % AHEAD];
        if (waiting == 0 || free) {
            const serval::Message msg = waiting == 0 ? q.recv(block) : q.try_recv(block);
            if (msg && msg.len() != LABEL_BYTES + PICTURE_BYTES) {
                q.drop(block, msg, serval::BAD_LENGTH);
                continue;
            }
            if (msg) {
                Place& place = places[tag % AHEAD];
                write_query(block, msg.as<const uint8_t>(), place.query);
                for (unsigned i = block.rank(); i < PICTURE_BYTES; i += block.size())
                    place.picture[i] = msg.as<const uint8_t>()[LABEL_BYTES + i];
                if (q.backends() > 0 && q.backend(0).send(block, place.query, QUERY_BYTES, tag)) {
                    asked[tag++ % AHEAD] = msg;
                    waiting++;
                } else {
                    reply_with(block, q, msg, {UNAVAILABLE, 0});
                }
                continue;
            }
        }
        if (waiting == 0) break;
        const serval::Message answer = q.backend(0).recv(block);
        if (!answer) break;
        const unsigned number = unsigned(answer.tag() % AHEAD);
        if (!asked[number]) continue;
        const Place& place = places[number];
        Answer result = {UNAVAILABLE, 0};
        if (const uint8_t* stored = read_response(answer, place.query, result.verdict)) {
            auto face = serval_faces::verify(block.rank(), block.size(), [&] { block.sync(); }, place.picture, stored, threshold, scratch);
            result = {face.match ? MATCH : NO_MATCH, face.distance};
        }
        reply_with(block, q, asked[number], result);
        asked[number] = serval::Message();
        waiting--;
    }
}
