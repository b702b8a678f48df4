// Shared-memory ports: the handshake (protocol: crates/wire/src/handshake.rs) and the rings
// (crates/engine/src/endpoint/shm.rs). A client plays the accelerator's role in its region: it
// reads outcomes from the RX ring and writes requests to the TX ring, with the ring code of the
// device library.
//
// Programs in C link this file, so it must not need the C++ runtime.
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <serval/client.h>
#include <serval/join.h>

#include "burst/result.h"
#include "shm/handshake.h"
#include "unix/descriptors.h"

using serval::detail::Consumer;
using serval::detail::Look;
using serval::detail::Producer;

namespace {

// The largest region that is mapped, in bytes; an engine asks for far less.
constexpr uint64_t REGION_BYTES_MAX = 4ull << 30;
constexpr uint32_t TIMEOUT_MS = 5000;
// How long a wait polls before it sleeps, and the polls between two yields of the core.
constexpr uint64_t SPIN_NS = 50000;
constexpr unsigned LOOKS = 256;
// Unsuccessful calls between two checks that the engine is alive, each of which is a system call.
constexpr uint32_t IDLE_CALLS = 16384;
// Outcomes that are read before their slots are released, as a share of the ring.
constexpr uint32_t RELEASE_PARTS = 8;

struct Hello {
    uint64_t magic;
    uint32_t version, abi_version, depth, zero;
};
static_assert(sizeof(Hello) == SERVAL_HANDSHAKE_HELLO_BYTES, "as in handshake.rs");

struct Answer {
    uint64_t magic;
    uint32_t version, code, depth, request_bytes_max, reply_bytes_max, flags;
    char text[SERVAL_HANDSHAKE_ANSWER_BYTES_MAX - SERVAL_HANDSHAKE_ANSWER_BYTES];
};
static_assert(offsetof(Answer, text) == SERVAL_HANDSHAKE_ANSWER_BYTES, "as in handshake.rs");
enum : uint32_t { ACCEPTED = 0, REFUSED = 1, FLAG_ANSWERS = 1 };

// The file descriptors of an answer, in this order.
enum Descriptor { REGION, ENGINE_BELL, OWN_BELL, DESCRIPTORS };
static_assert(DESCRIPTORS == SERVAL_HANDSHAKE_DESCRIPTORS, "as in handshake.rs");

const uint32_t SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

struct serval_shm {
    Producer requests;
    Consumer replies;
    serval_shm_terms terms;
    // Requests without an outcome (services that answer).
    uint32_t under_way;
    // Consecutive calls without success.
    uint32_t idle_calls;
    // After the end: the first request that the engine did not take and that has not been reported
    // to the caller.
    uint64_t untaken;
    bool unshown;
    bool corrupt;
    // After the connection ended: the reason, as a sentence.
    char end[SERVAL_HANDSHAKE_ANSWER_BYTES_MAX];
    int socket;
    int descriptors[DESCRIPTORS];
    uint8_t* region;
    uint64_t region_bytes;

    uint64_t* engine_word(size_t field) const {
        return reinterpret_cast<uint64_t*>(region + SERVAL_ENGINE_WORDS_OFFSET + field);
    }
    uint64_t* own_word(size_t field) const {
        return reinterpret_cast<uint64_t*>(region + SERVAL_ACCELERATOR_WORDS_OFFSET + field);
    }
};

namespace {

// ---- connecting

int system_error(const char* call) {
    return serval_fail(SERVAL_ERROR_SYSTEM, "%s: %s", call, strerror(errno));
}

int foreign() {
    return serval_fail(SERVAL_ERROR_PROTOCOL,
                       "the other side does not speak Serval's shared-memory handshake");
}

int connect_error(const char* path) {
    const char* why = strerror(errno);
    if (errno == EACCES || errno == EPERM)
        return serval_fail(SERVAL_ERROR_PERMISSION,
                           "cannot connect to %s: %s; run as the user of the engine", path, why);
    if (errno == ENOENT || errno == ECONNREFUSED || errno == ENOTDIR || errno == EPROTOTYPE)
        return serval_fail(SERVAL_ERROR_CONNECT,
                           "no server listens at %s: %s; is the server running?", path, why);
    return serval_fail(SERVAL_ERROR_SYSTEM, "connect to %s: %s", path, why);
}

int silent(uint32_t timeout_ms) {
    return serval_fail(SERVAL_ERROR_SILENT, "the engine did not answer the handshake within %u ms",
                       timeout_ms);
}

int meet(serval_shm* client, const char* path, uint32_t timeout_ms, uint64_t deadline_ns) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const size_t len = strlen(path);
    if (path[0] != '/' || len >= sizeof address.sun_path)
        return serval_fail(SERVAL_ERROR_ARGUMENT,
                           "\"%s\" cannot name a port: an absolute path of at most %zu bytes can",
                           path, sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, len);
    client->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (client->socket < 0) return system_error("socket");
    while (connect(client->socket, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) {
        // A full backlog is temporary.
        if (errno != EAGAIN && errno != EINTR) return connect_error(path);
        if (serval_now_ns() >= deadline_ns) return silent(timeout_ms);
        usleep(1000);
    }
    return SERVAL_OK;
}

// Receives the answer with its file descriptors. Other descriptors are closed.
int receive_answer(serval_shm* client, Answer* answer, size_t* len) {
    serval_descriptors arrived;
    const ssize_t got =
        serval_receive_descriptors(client->socket, answer, sizeof *answer, MSG_DONTWAIT,
                                   client->descriptors, DESCRIPTORS, &arrived);
    if (got == -EAGAIN || got == -EINTR) return SERVAL_EMPTY;
    if (got < 0 && got != -ECONNRESET) {
        errno = static_cast<int>(-got);
        return system_error("recvmsg");
    }
    *len = got < 0 ? 0 : static_cast<size_t>(got);
    if (*len == 0)
        return serval_fail(SERVAL_ERROR_CLOSED,
                           "the engine closed the connection without an answer; is it draining?");
    if (arrived.is_cut || *len < SERVAL_HANDSHAKE_ANSWER_BYTES ||
        answer->magic != SERVAL_HANDSHAKE_MAGIC)
        return foreign();
    if (answer->code == REFUSED) return SERVAL_OK;
    if (answer->version != SERVAL_HANDSHAKE_VERSION)
        return serval_fail(
            SERVAL_ERROR_PROTOCOL,
            "the engine speaks version %u of the shared-memory handshake, this library %u: use "
            "matching builds",
            answer->version, SERVAL_HANDSHAKE_VERSION);
    return answer->code == ACCEPTED && arrived.count == DESCRIPTORS ? int(SERVAL_OK) : foreign();
}

int shake_hands(serval_shm* client, uint32_t depth, uint32_t timeout_ms, uint64_t deadline_ns) {
    const Hello hello = {SERVAL_HANDSHAKE_MAGIC, SERVAL_HANDSHAKE_VERSION, SERVAL_ABI_VERSION,
                         depth, 0};
    // A new connection has room for one short message. If the engine refused the connection before
    // the hello, its answer can be read.
    if (send(client->socket, &hello, sizeof hello, MSG_NOSIGNAL) < 0 && errno != EPIPE)
        return system_error("send");
    Answer answer = {};
    size_t len = 0;
    for (;;) {
        const int result = receive_answer(client, &answer, &len);
        if (result == SERVAL_OK) break;
        if (result != SERVAL_EMPTY) return result;
        if (serval_now_ns() >= deadline_ns) return silent(timeout_ms);
        pollfd file = {client->socket, POLLIN, 0};
        poll(&file, 1, serval_poll_ms(deadline_ns));
    }
    if (answer.code == REFUSED)
        return serval_fail(SERVAL_ERROR_REFUSED, "the engine refuses the connection: %.*s",
                           static_cast<int>(len - SERVAL_HANDSHAKE_ANSWER_BYTES), answer.text);
    client->terms = {answer.depth, answer.request_bytes_max, answer.reply_bytes_max,
                     answer.flags & FLAG_ANSWERS};
    return SERVAL_OK;
}

int unusable(const char* why) {
    return serval_fail(SERVAL_ERROR_REGION, "the region that the engine passed cannot be used: %s",
                       why);
}

// Maps the received descriptor, if no process can shrink it.
int map(serval_shm* client) {
    const int file = client->descriptors[REGION];
    const int seals = fcntl(file, F_GET_SEALS);
    if (seals < 0 || (static_cast<uint32_t>(seals) & SEALS) != SEALS)
        return unusable("its length is not sealed, so it could shrink");
    struct stat status;
    struct statfs system;
    if (fstat(file, &status) < 0 || fstatfs(file, &system) < 0) return system_error("fstat");
    // The creator of such memory could punch holes into it, and an access to a hole ends the
    // process.
    if (system.f_type == HUGETLBFS_MAGIC) return unusable("it is made of hugetlb pages");
    const uint64_t bytes = static_cast<uint64_t>(status.st_size);
    if (status.st_size <= 0 || bytes > REGION_BYTES_MAX) return unusable("its size is impossible");
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (at == MAP_FAILED) return system_error("mmap of the region");
    client->region = static_cast<uint8_t*>(at);
    client->region_bytes = bytes;
    return SERVAL_OK;
}

int take_rings(serval_shm* client) {
    serval_region_header header;
    if (client->region_bytes < sizeof header) return unusable("it is shorter than a header");
    serval::detail::fetch(header, client->region);
    if (header.magic == SERVAL_REGION_MAGIC && header.abi_version != SERVAL_ABI_VERSION)
        return serval_fail(SERVAL_ERROR_REGION,
                           "the region that the engine passed has ABI version %u, this library "
                           "speaks %u: use matching builds",
                           header.abi_version, SERVAL_ABI_VERSION);
    serval::detail::Place place = {};
    serval::detail::Layout& layout = place.layout;
    if (!serval::detail::find_layout(layout, reinterpret_cast<uint64_t>(client->region),
                                     client->region_bytes))
        return unusable("its header is impossible");
    place.count = layout.ring_count;
    for (uint32_t i = 0; i < place.count; i++) {
        const serval::detail::EntryName name = layout.name(i);
        if (serval::detail::is_refused(name))
            return serval_fail(SERVAL_ERROR_REGION,
                               "ring %u of the region that the engine passed is of kind %u, "
                               "version %u, which the region requires and this "
                               "library does not know: use matching builds",
                               i, unsigned{name.kind}, unsigned{name.version});
    }
    if (layout.block_count != 1 || serval::detail::count_mqueues(layout, 0, 0, place.count) != 1)
        return unusable("it is not the one that was agreed on");
    auto& in = client->replies.ring;
    auto& out = client->requests.ring;
    const uint64_t rx_entry = serval::detail::find_ring(place, SERVAL_RING_SERVER_RX, 0);
    const uint64_t tx_entry = serval::detail::find_ring(place, SERVAL_RING_SERVER_TX, 0);
    if (rx_entry == 0 || tx_entry == 0 ||
        !serval::detail::open_ring(in, layout.region, layout.size, rx_entry,
                                   SERVAL_RING_SERVER_RX) ||
        !serval::detail::open_ring(out, layout.region, layout.size, tx_entry,
                                   SERVAL_RING_SERVER_TX))
        return unusable("its directory is impossible");
    if (!serval::detail::open_consumer(client->replies) ||
        !serval::detail::open_producer(client->requests))
        return unusable("its rings are in use");
    const serval_shm_terms& terms = client->terms;
    const bool agreed = in.depth() == terms.depth && out.depth() == terms.depth &&
                        out.len_max == terms.request_bytes_max &&
                        in.len_max == terms.reply_bytes_max;
    if (!agreed || in.protocol != SERVAL_PROTOCOL_DOORBELL ||
        out.protocol != SERVAL_PROTOCOL_DOORBELL)
        return unusable("it is not the one that was agreed on");
    return SERVAL_OK;
}

// ---- connected

// True if the engine has ended the connection: one system call.
bool is_closed(const serval_shm* client) {
    if (client->end[0]) return true;
    pollfd file = {client->socket, POLLIN, 0};
    return poll(&file, 1, 0) > 0;
}

// Stores the reason of the engine for the end of the connection, if it gave one. It can be read
// only once.
int end_of(serval_shm* client) {
    if (!client->end[0]) {
        Answer answer = {};
        // There is no room for file descriptors, so the host kernel closes any.
        const ssize_t got = recv(client->socket, &answer, sizeof answer, MSG_DONTWAIT);
        const ssize_t said = got - static_cast<ssize_t>(SERVAL_HANDSHAKE_ANSWER_BYTES);
        if (said > 0 && answer.magic == SERVAL_HANDSHAKE_MAGIC && answer.code == REFUSED)
            snprintf(client->end, sizeof client->end, "the engine has ended the connection: %.*s",
                     static_cast<int>(said), answer.text);
        else
            snprintf(client->end, sizeof client->end,
                     "the engine has closed the connection without a reason; is it draining?");
    }
    return serval_fail(SERVAL_ERROR_CLOSED, "%s", client->end);
}

// Checks from time to time, after unsuccessful calls, whether the engine has ended.
bool is_closed_now_and_then(serval_shm* client) {
    if (SERVAL_LIKELY(++client->idle_calls < IDLE_CALLS)) return false;
    client->idle_calls = 0;
    return is_closed(client);
}

void ring(int bell) {
    const uint64_t one = 1;
    // If the wake-up socket is full, enough wake-ups are pending, or its owner is gone.
    while (write(bell, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void silence(int bell) {
    // More than the socket holds by default, at one byte per wake-up; further bytes cause one more
    // poll.
    uint8_t rings[512];
    while (read(bell, rings, sizeof rings) < 0 && errno == EINTR) {
    }
}

// Releases the slots of outcomes that were read.
void give_back(Consumer& replies) {
    if (replies.released != replies.next) replies.release();
}

SERVAL_INLINE Look look(serval_shm* client) {
    if (SERVAL_UNLIKELY(client->corrupt)) return Look::CORRUPT;
    const Look found = client->replies.look(nullptr);
    // A client gets no bundles.
    const bool corrupt =
        found == Look::CORRUPT ||
        (found == Look::FOUND && client->replies.message.kind == SERVAL_KIND_BUNDLE);
    if (SERVAL_UNLIKELY(corrupt)) client->corrupt = true;
    return corrupt ? Look::CORRUPT : found;
}

void set_parked(serval_shm* client, bool parked) {
    serval::detail::store_relaxed(client->own_word(offsetof(serval_accelerator_words, parked)),
                                  parked);
    // EDGE PARK (sleeper half)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// Sleeps until the engine sends a wake-up, ends, or the deadline; true if it has ended.
bool sleep_until(serval_shm* client, uint64_t deadline_ns) {
    if (client->end[0]) return true;
    pollfd files[2] = {{client->descriptors[OWN_BELL], POLLIN, 0}, {client->socket, POLLIN, 0}};
    if (poll(files, 2, serval_poll_ms(deadline_ns)) <= 0) return false;
    if (files[0].revents) silence(client->descriptors[OWN_BELL]);
    return files[1].revents != 0;
}

// The codes of the drop reasons.
enum : uint8_t {
#define CODE(code, name) DROP_##name = code,
    SERVAL_DROP_REASONS(CODE)
#undef CODE
};

// After the end: true if there are requests that the engine has not taken.
bool has_untaken(serval_shm* client) {
    if (!client->terms.answers || client->under_way == 0) return false;
    const Producer& requests = client->requests;
    // The engine does not store it again. The slots below it are not read here.
    const uint64_t tail = serval::detail::load_relaxed(requests.ring.tail);
    if (requests.next - tail > requests.ring.depth()) return false;
    if (client->untaken < tail) client->untaken = tail;
    return client->untaken != requests.next;
}

// The next of these requests.
void take_untaken(serval_shm* client, serval_reply* reply) {
    const auto* header =
        reinterpret_cast<const uint64_t*>(client->requests.ring.slot(client->untaken));
    reply->tag = serval::detail::load_relaxed(header + 1);
    reply->len = 0;
    reply->lost = 1;
    reply->reason = DROP_draining;
    client->untaken++;
    client->under_way--;
}

}  // namespace

int serval_shm_connect(const char* path, const serval_shm_options* options, serval_shm** client) {
    if (!client)
        return serval_fail(SERVAL_ERROR_ARGUMENT,
                           "there is nowhere to put the client: `client` is NULL");
    *client = nullptr;
    if (!path) return serval_fail(SERVAL_ERROR_ARGUMENT, "the path is NULL");
    const serval_shm_options wishes = options ? *options : serval_shm_options{};
    if (wishes.depth > SERVAL_DEPTH_MAX)
        return serval_fail(SERVAL_ERROR_ARGUMENT, "depth is %u, the most is %u", wishes.depth,
                           SERVAL_DEPTH_MAX);
    auto* made = static_cast<serval_shm*>(calloc(1, sizeof(serval_shm)));
    if (!made) return system_error("no memory for a client");
    made->socket = -1;
    for (int& descriptor : made->descriptors) descriptor = -1;
    const uint32_t timeout_ms = wishes.timeout_ms ? wishes.timeout_ms : TIMEOUT_MS;
    const uint64_t deadline_ns = serval_now_ns() + timeout_ms * 1000000ull;
    int result = meet(made, path, timeout_ms, deadline_ns);
    if (result == SERVAL_OK) result = shake_hands(made, wishes.depth, timeout_ms, deadline_ns);
    if (result == SERVAL_OK) result = map(made);
    if (result == SERVAL_OK) result = take_rings(made);
    if (result != SERVAL_OK) {
        serval_shm_close(made);
        return result;
    }
    *client = made;
    return SERVAL_OK;
}

serval_shm_terms serval_shm_agreed(const serval_shm* client) { return client->terms; }

uint32_t serval_shm_under_way(const serval_shm* client) { return client->under_way; }

int serval_shm_send(serval_shm* client, uint64_t tag, const void* request, size_t len) {
    if (SERVAL_UNLIKELY(len > client->terms.request_bytes_max)) return SERVAL_ERROR_TOO_LONG;
    if (SERVAL_UNLIKELY(client->corrupt)) return SERVAL_ERROR_CORRUPT;
    if (SERVAL_UNLIKELY(client->end[0])) return end_of(client);
    if (client->under_way == client->terms.depth)
        return is_closed_now_and_then(client) ? end_of(client) : int(SERVAL_FULL);
    client->requests.begin({0, tag, 0, static_cast<uint32_t>(len), SERVAL_KIND_MESSAGE, 0, 0});
    switch (client->requests.reserve()) {
        case Look::FOUND:
            break;
        case Look::NONE:
            return is_closed_now_and_then(client) ? end_of(client) : int(SERVAL_FULL);
        case Look::CORRUPT:
            client->corrupt = true;
            return SERVAL_ERROR_CORRUPT;
    }
    client->requests.write(static_cast<const uint8_t*>(request));
    client->requests.commit();
    client->unshown = true;
    if (client->terms.answers) client->under_way++;
    return SERVAL_OK;
}

void serval_shm_flush(serval_shm* client) {
    if (!client->unshown) return;
    client->unshown = false;
    client->requests.show();
    // EDGE PARK (waker half)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (serval::detail::load_relaxed(client->engine_word(offsetof(serval_engine_words, parked))) !=
        0)
        ring(client->descriptors[ENGINE_BELL]);
}

int serval_shm_recv(serval_shm* client, void* buffer, size_t capacity, serval_reply* reply) {
    Look found = look(client);
    if (found == Look::NONE) {
        give_back(client->replies);
        if (SERVAL_LIKELY(!client->end[0] && !is_closed_now_and_then(client))) return SERVAL_EMPTY;
        // Outcomes that were written before the end are received before the end is reported.
        found = look(client);
        if (found == Look::NONE) {
            const int ended = end_of(client);
            if (!has_untaken(client)) return ended;
            take_untaken(client, reply);
            return SERVAL_OK;
        }
    }
    if (SERVAL_UNLIKELY(found == Look::CORRUPT)) return SERVAL_ERROR_CORRUPT;
    Consumer& replies = client->replies;
    const auto& message = replies.message;
    const bool lost = message.kind != SERVAL_KIND_MESSAGE;
    reply->tag = message.tag;
    reply->len = lost ? 0 : message.len;
    reply->lost = lost;
    reply->reason = lost ? message.status : 0;
    if (SERVAL_UNLIKELY(reply->len > capacity)) return SERVAL_ERROR_BUFFER;
    if (!lost) replies.copy_out(buffer);
    replies.advance();
    client->idle_calls = 0;
    if (client->under_way) client->under_way--;
    if ((replies.next - replies.released) * RELEASE_PARTS > client->terms.depth) replies.release();
    return SERVAL_OK;
}

int serval_shm_wait(serval_shm* client, uint64_t deadline_ns) {
    serval_shm_flush(client);
    Look found = look(client);
    if (found == Look::NONE) give_back(client->replies);
    const uint64_t spin_until = serval_now_ns() + SPIN_NS;
    while (found == Look::NONE &&
           serval_now_ns() < (spin_until < deadline_ns ? spin_until : deadline_ns)) {
        for (unsigned i = 0; i < LOOKS && found == Look::NONE; i++) found = look(client);
        if (found == Look::NONE) sched_yield();
    }
    while (found == Look::NONE) {
        set_parked(client, true);
        found = look(client);
        const bool in_time = serval_now_ns() < deadline_ns;
        // The end of the engine is reported even without time to wait.
        const bool ended = found == Look::NONE && sleep_until(client, deadline_ns);
        set_parked(client, false);
        // Outcomes that were written before the end are received before the end is reported.
        if (found == Look::NONE) found = look(client);
        if (found != Look::NONE) break;
        if (ended) {
            const int result = end_of(client);
            return has_untaken(client) ? int(SERVAL_OK) : result;
        }
        if (!in_time) return SERVAL_EMPTY;
    }
    return found == Look::FOUND ? SERVAL_OK : SERVAL_ERROR_CORRUPT;
}

void serval_shm_close(serval_shm* client) {
    if (!client) return;
    if (client->region) munmap(client->region, client->region_bytes);
    for (int descriptor : client->descriptors)
        if (descriptor >= 0) close(descriptor);
    if (client->socket >= 0) close(client->socket);
    free(client);
}

const char* serval_drop_reason(unsigned reason) {
    switch (reason) {
#define NAME(code, name) \
    case code:           \
        return #name;
        SERVAL_DROP_REASONS(NAME)
#undef NAME
        default:
            return "other";
    }
}
