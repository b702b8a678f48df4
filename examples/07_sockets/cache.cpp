// cache: for every line that a client sends, the value that memcached has for it as a key. The kernel has a connection to each client, and one of its
// own to memcached, which it opens again when it has ended.
#include <serval/sockets.h>

namespace {

constexpr unsigned LINE_BYTES = 250;  // the longest key of memcached
constexpr unsigned ANSWER_BYTES = 4096;

// Whether `text` begins with `start`.
SERVAL_DEVICE bool begins(const char* text, unsigned bytes, const char* start) {
    unsigned i = 0;
    while (start[i] && i < bytes && text[i] == start[i]) i++;
    return !start[i];
}

SERVAL_DEVICE unsigned append(char* to, unsigned at, const char* text) {
    while (*text) to[at++] = *text++;
    return at;
}

// Reads a line without its end. Its length, or -1 at the end of the stream or if it is too long.
SERVAL_DEVICE int read_line(serval::Block& block, serval::Socket& s, char* to, unsigned max, uint64_t deadline_ns) {
    for (unsigned at = 0; at < max; at++) {
        if (s.recv_all(block, to + at, 1, deadline_ns) != serval::OK) return -1;
        if (to[at] == '\n') return static_cast<int>(at && to[at - 1] == '\r' ? at - 1 : at);
    }
    return -1;
}

// Asks memcached for a key: the answer's length, or -1 if there is no answer.
SERVAL_DEVICE int ask(serval::Block& block, serval::Socket& db, const char* key, unsigned bytes, char* answer) {
    const uint64_t deadline_ns = block.now_ns() + 1000000000u;
    if (db.send_all(block, "get ", 4, deadline_ns) != serval::OK || db.send_all(block, key, bytes, deadline_ns) != serval::OK ||
        db.send_all(block, "\r\n", 2, deadline_ns) != serval::OK)
        return -1;
    char line[LINE_BYTES + 32];
    int length = 0;
    for (bool is_value = false;;) {
        const int count = is_value ? read_line(block, db, answer, ANSWER_BYTES, deadline_ns)
                                   : read_line(block, db, line, sizeof line, deadline_ns);
        if (count < 0) return -1;
        if (is_value) length = count;
        else if (begins(line, static_cast<unsigned>(count), "END")) return length;
        is_value = !is_value && begins(line, static_cast<unsigned>(count), "VALUE ");
    }
}

}  // namespace

SERVAL_SOCKET_KERNEL(cache) (serval::Block& block, serval::Mqueue&, serval::Sockets& sockets) {
    serval::Listener in = sockets.listen(0);
    serval::Socket db;
    while (serval::Socket client = in.accept(block)) {
        char key[LINE_BYTES + 2], answer[ANSWER_BYTES + 2];
        for (int bytes; (bytes = read_line(block, client, key, sizeof key, serval::NO_DEADLINE)) >= 0;) {
            if (!db) db = sockets.connect(block, 1);
            int length = db ? ask(block, db, key, static_cast<unsigned>(bytes), answer) : -1;
            // A connection that has ended since the last line is opened again, once.
            if (length < 0 && db) {
                db.reset(block);
                db = sockets.connect(block, 1);
                length = db ? ask(block, db, key, static_cast<unsigned>(bytes), answer) : -1;
            }
            if (length < 0) {
                db.reset(block);
                length = static_cast<int>(append(answer, 0, "unavailable"));
            } else if (length == 0) {
                length = static_cast<int>(append(answer, 0, "unknown"));
            }
            answer[length] = '\n';
            if (client.send_all(block, answer, static_cast<uint64_t>(length) + 1) != serval::OK) break;
        }
        client.close(block);
    }
}
