// The runtime's side of the attach protocol (crates/wire/src/attach.rs), like
// crates/runtime/src/lib.rs.
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <serval/attach.h>
#include <serval/join.h>

#include "attach/protocol.h"
#include "unix/descriptors.h"

namespace serval {
namespace {

constexpr uint64_t MS = 1000000;
constexpr uint32_t LOOK_MS = 250;
// Staging of a block for messages of bundles, or more if a message is longer.
constexpr uint64_t BUNDLE_STAGING = 8192;
constexpr unsigned SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000 * MS + static_cast<uint64_t>(now.tv_nsec);
}

// Waits until the socket is readable, for at most this long. A signal may end the wait early.
bool readable(int socket, uint64_t ns) {
    pollfd file = {socket, POLLIN, 0};
    const uint64_t ms = (ns + MS - 1) / MS;
    return poll(&file, 1, ms > 60000 ? 60000 : static_cast<int>(ms)) > 0;
}

// A message under construction; the limits of all fields together fit.
struct Writer {
    uint8_t bytes[SERVAL_ATTACH_MESSAGE_BYTES_MAX];
    size_t len = 0;

    explicit Writer(uint32_t code) {
        number(SERVAL_ATTACH_MAGIC, 8);
        number(SERVAL_ATTACH_VERSION, 4);
        number(code, 4);
    }
    void number(uint64_t value, unsigned size) {
        for (unsigned i = 0; i < size; i++) bytes[len++] = static_cast<uint8_t>(value >> (8 * i));
    }
    // At most `most` bytes of a text, ending at a whole character.
    void text(const char* text, size_t most) {
        size_t count = strnlen(text, most + 1);
        if (count > most)
            for (count = most; count > 0 && (static_cast<uint8_t>(text[count]) & 0xc0) == 0x80;)
                count--;
        number(count, 2);
        memcpy(bytes + len, text, count);
        len += count;
    }
};

// True if these bytes are UTF-8 without a zero byte.
bool is_text(const uint8_t* at, size_t len) {
    for (size_t i = 0; i < len;) {
        const uint8_t first = at[i++];
        if (first == 0) return false;
        if (first < 0x80) continue;
        const unsigned more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
        if (first < 0xc2 || first > 0xf4 || len - i < more) return false;
        uint32_t code = first & (0x3fu >> more);
        for (unsigned k = 0; k < more; k++, i++) {
            if ((at[i] & 0xc0) != 0x80) return false;
            code = code << 6 | (at[i] & 0x3f);
        }
        const uint32_t least = more == 3 ? 0x10000 : more == 2 ? 0x800 : 0x80;
        if (code < least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    }
    return true;
}

// The rest of a received message. After the first invalid field, all fields read as zero.
struct Reader {
    const uint8_t* at;
    size_t left;
    const char* wrong = nullptr;

    const uint8_t* take(size_t count) {
        if (wrong || count > left) {
            if (!wrong) wrong = "it ends too early";
            return nullptr;
        }
        const uint8_t* taken = at;
        at += count;
        left -= count;
        return taken;
    }
    uint64_t number(unsigned size) {
        const uint8_t* bytes = take(size);
        uint64_t value = 0;
        for (unsigned i = 0; bytes && i < size; i++)
            value |= static_cast<uint64_t>(bytes[i]) << (8 * i);
        return value;
    }
    uint32_t u32() { return static_cast<uint32_t>(number(4)); }
    // A text of at most `most` bytes; `to` has room for it and a zero byte.
    void text(char* to, size_t most) {
        const size_t len = number(2);
        if (!wrong && len > most) wrong = "a text is too long";
        const uint8_t* bytes = take(len);
        if (bytes && !is_text(bytes, len)) {
            wrong = "a text is not UTF-8";
            bytes = nullptr;
        }
        if (bytes) memcpy(to, bytes, len);
        to[bytes ? len : 0] = 0;
    }
};

// A sentence from the engine without control characters, for terminals and logs.
void plain(char* to, size_t room, const uint8_t* from, size_t len) {
    size_t count = len < room - 1 ? len : room - 1;
    for (size_t i = 0; i < count; i++)
        to[i] = from[i] < 0x20 || from[i] >= 0x7f ? '?' : static_cast<char>(from[i]);
    to[count] = 0;
}

struct Head {
    uint64_t magic;
    uint32_t version, code;
};

// Reads the header. False: `why` has the reason.
bool open_message(Reader& reader, size_t len, Head& head, char (&why)[160]) {
    head = {reader.number(8), reader.u32(), reader.u32()};
    if (reader.wrong || head.magic != SERVAL_ATTACH_MAGIC) {
        snprintf(why, sizeof why, "the other side does not speak Serval's attach protocol");
    } else if (head.version != SERVAL_ATTACH_VERSION && head.code != SERVAL_ATTACH_REFUSE) {
        snprintf(why, sizeof why,
                 "the other side speaks version %u of the attach protocol, this one %u: use "
                 "matching builds",
                 head.version, SERVAL_ATTACH_VERSION);
    } else if (len > SERVAL_ATTACH_MESSAGE_BYTES_MAX) {
        snprintf(why, sizeof why,
                 "a message of the attach protocol is impossible: longer than any message");
    } else {
        return true;
    }
    return false;
}

}  // namespace

// The words of a ring at one moment.
struct Runtime::Ring {
    uint64_t head, tail, depth;
};

// Checked offsets of the words of an mqueue's RX and TX rings. Depth 0: not described yet.
struct Runtime::Mqueue {
    uint64_t head[2], tail[2];
    uint32_t depth[2];
};

// The entries of a block in the directory, and its mqueues.
struct Runtime::Block {
    uint32_t ring_first, ring_count;
    uint32_t mqueue_first, mqueue_count;
};

// The last observed state of a block, and how long it has not changed.
struct Runtime::Watch {
    uint64_t waiting;
    // Changes whenever the block makes progress.
    uint64_t moved[5];
    uint64_t still_ns;
};

uint64_t* Runtime::own_word(uint64_t field) const {
    return reinterpret_cast<uint64_t*>(region_ + SERVAL_ACCELERATOR_WORDS_OFFSET + field);
}
uint64_t* Runtime::engine_word(uint64_t field) const {
    return reinterpret_cast<uint64_t*>(region_ + SERVAL_ENGINE_WORDS_OFFSET + field);
}
uint64_t Runtime::block_word(uint32_t block, uint64_t field) const {
    const uint64_t line = blocks_offset_ + uint64_t{block} * sizeof(serval_block_words);
    // EDGE STATE (acquire half)
    return detail::load_acquire(reinterpret_cast<uint64_t*>(region_ + line + field));
}

bool Runtime::fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why_, sizeof why_, format, arguments);
    va_end(arguments);
    return false;
}

Step Runtime::over(const char* why) {
    fail("%s", why);
    return step_ = Step::OVER;
}

bool Runtime::send(const void* bytes, uint64_t len) {
    ssize_t sent;
    while ((sent = ::send(socket_, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 &&
           errno == EINTR) {
    }
    return sent == static_cast<ssize_t>(len) || fail("the engine is gone: %s", strerror(errno));
}

// ---- joining

bool Runtime::join(const char* path, const Wish& wish) {
    if (used_) return fail("a Runtime is one life: make another one to join again");
    used_ = true;
    const uint64_t deadline_ns = now_ns() + wish.timeout_ms * MS;
    return meet(path, deadline_ns) && introduce(wish) &&
           receive_offer(deadline_ns, wish.timeout_ms);
}

bool Runtime::meet(const char* path, uint64_t deadline_ns) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const size_t len = strlen(path);
    if (len == 0 || len >= sizeof address.sun_path)
        return fail("\"%s\" cannot name a socket: a path of 1 to %zu bytes can", path,
                    sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, len);
    socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ < 0) return fail("no socket: %s", strerror(errno));
    while (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) {
        // A full backlog is temporary.
        const bool again = (errno == EAGAIN || errno == EINTR) && now_ns() < deadline_ns;
        if (!again) return fail("no engine listens at \"%s\": %s", path, strerror(errno));
        usleep(1000);
    }
    // A peer that passes memory must already have the rights of this process.
    ucred peer = {};
    socklen_t size = sizeof peer;
    if (getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
        return fail("no credentials: %s", strerror(errno));
    if (peer.uid != geteuid() && peer.uid != 0)
        return fail(
            "the engine at \"%s\" is of user %u: a runtime of user %u serves one of its own user "
            "or of root",
            path, peer.uid, geteuid());
    return true;
}

bool Runtime::introduce(const Wish& wish) {
    Writer hello(SERVAL_ATTACH_HELLO);
    hello.number(SERVAL_ABI_VERSION, 4);
    hello.number(static_cast<uint32_t>(getpid()), 4);
    hello.text(wish.kind, SERVAL_ATTACH_NAME_BYTES_MAX);
    hello.text(wish.service, SERVAL_ATTACH_NAME_BYTES_MAX);
    hello.text(wish.kernel, SERVAL_ATTACH_KERNEL_BYTES_MAX);
    return send(hello.bytes, hello.len);
}

bool Runtime::receive_offer(uint64_t deadline_ns, uint32_t timeout_ms) {
    uint8_t bytes[SERVAL_ATTACH_MESSAGE_BYTES_MAX + 1];
    int descriptors[SERVAL_ATTACH_DESCRIPTORS] = {-1, -1};
    serval_descriptors arrived;
    ssize_t got;
    for (;;) {
        got = serval_receive_descriptors(socket_, bytes, sizeof bytes, MSG_DONTWAIT, descriptors,
                                         SERVAL_ATTACH_DESCRIPTORS, &arrived);
        if (got >= 0 || (got != -EAGAIN && got != -EINTR)) break;
        const uint64_t now = now_ns();
        if (now >= deadline_ns)
            return fail("the engine is gone: it gave no answer for %u ms", timeout_ms);
        readable(socket_, deadline_ns - now);
    }
    if (got < 0) return fail("the engine is gone: %s", strerror(static_cast<int>(-got)));
    file_ = descriptors[0];
    bell_ = descriptors[1];
    if (got == 0) return fail("the engine is gone: it closed the connection");
    if (!read_offer(bytes, static_cast<size_t>(got))) return false;
    if (arrived.count != SERVAL_ATTACH_DESCRIPTORS || arrived.is_cut)
        return fail("the engine's offer cannot be used: it came without the %u descriptors",
                    SERVAL_ATTACH_DESCRIPTORS);
    return map(region_bytes_);
}

bool Runtime::read_offer(const uint8_t* bytes, uint64_t len) {
    Reader reader = {bytes, len};
    Head head;
    char why[160];
    if (!open_message(reader, len, head, why))
        return fail("the engine's offer cannot be used: %s", why);
    if (head.code == SERVAL_ATTACH_REFUSE) {
        char text[SERVAL_ATTACH_TEXT_BYTES_MAX + 1];
        plain(text, sizeof text, reader.at, reader.left);
        return fail("the engine refuses: %s", text);
    }
    if (head.code == SERVAL_ATTACH_STOP) return fail("the engine is gone: it is stopping");
    if (head.code != SERVAL_ATTACH_OFFER)
        return fail("the engine's offer cannot be used: an engine does not say this");
    generation_ = reader.number(8);
    region_bytes_ = reader.number(8);
    blocks_ = reader.u32();
    heartbeat_ms_ = reader.u32();
    reader.text(service_, SERVAL_ATTACH_NAME_BYTES_MAX);
    reader.text(accelerator_, SERVAL_ATTACH_NAME_BYTES_MAX);
    reader.text(kernel_, SERVAL_ATTACH_KERNEL_BYTES_MAX);
    param_count_ = reader.u32();
    if (!reader.wrong && param_count_ > SERVAL_PARAMS_MAX) reader.wrong = "too many parameters";
    params_bytes_ = param_count_ * sizeof(serval_param);
    uint8_t* bytes_of_params = reinterpret_cast<uint8_t*>(params_);
    for (uint32_t i = 0; i < param_count_ && !reader.wrong; i++) {
        serval_param param = {};
        reader.text(reinterpret_cast<char*>(param.name), SERVAL_ATTACH_PARAM_NAME_BYTES_MAX);
        uint64_t value = reader.number(8);
        if (value == SERVAL_PARAM_TEXT) {
            char* text = reinterpret_cast<char*>(bytes_of_params) + params_bytes_;
            reader.text(text, SERVAL_PARAM_TEXT_BYTES_MAX);
            const uint64_t bytes_of_text = strlen(text);
            value |= bytes_of_text << 32 | params_bytes_;
            params_bytes_ += bytes_of_text + 1;
        } else if (value >> 48 == SERVAL_PARAM_TEXT >> 48) {
            reader.wrong = "a parameter has no value";
        }
        memcpy(&param.value, &value, sizeof value);
        memcpy(bytes_of_params + i * sizeof param, &param, sizeof param);
    }
    if (!reader.wrong && reader.left) reader.wrong = "it goes on after its end";
    if (reader.wrong)
        return fail(
            "the engine's offer cannot be used: a message of the attach protocol is impossible: %s",
            reader.wrong);
    if (heartbeat_ms_ == 0) heartbeat_ms_ = 1;
    return true;
}

// Maps the received descriptor, if no process can shrink it.
bool Runtime::map(uint64_t region_bytes_said) {
    const char* refused = "the engine's offer cannot be used: the memory is not a region:";
    const int seals = fcntl(file_, F_GET_SEALS);
    if (seals < 0) return fail("%s it is not a memfd", refused);
    if ((static_cast<unsigned>(seals) & SEALS) != SEALS)
        return fail("%s its length is not sealed, so it could shrink", refused);
    struct stat status;
    struct statfs system;
    if (fstat(file_, &status) < 0 || fstatfs(file_, &system) < 0)
        return fail("%s %s", refused, strerror(errno));
    // The creator of such memory could punch holes into it, and an access to a hole ends the
    // process.
    if (system.f_type == HUGETLBFS_MAGIC) return fail("%s it is made of hugetlb pages", refused);
    const uint64_t bytes = status.st_size > 0 ? static_cast<uint64_t>(status.st_size) : 0;
    if (bytes == 0 || bytes % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)))
        return fail("%s it has %llu bytes, which is no number of pages", refused,
                    static_cast<unsigned long long>(bytes));
    if (bytes > region_bytes_said)
        return fail("%s it has %llu bytes, over the limit of %llu", refused,
                    static_cast<unsigned long long>(bytes),
                    static_cast<unsigned long long>(region_bytes_said));
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, 0);
    if (at == MAP_FAILED) return fail("the region cannot be mapped: %s", strerror(errno));
    region_ = static_cast<uint8_t*>(at);
    mapped_bytes_ = bytes;
    return take_region(bytes);
}

// Compares the region with the offer, and stores the values that are used later.
bool Runtime::take_region(uint64_t mapped_bytes) {
    detail::Layout layout;
    serval_region_header header;
    if (mapped_bytes < sizeof header)
        return fail("the engine's offer cannot be used: this is not a Serval region");
    detail::fetch(header, region_);
    if (header.magic == SERVAL_REGION_MAGIC && header.abi_version != SERVAL_ABI_VERSION)
        return fail(
            "the engine's offer cannot be used: the region has ABI version %u, this library speaks "
            "%u: use matching builds",
            header.abi_version, SERVAL_ABI_VERSION);
    if (!detail::find_layout(layout, reinterpret_cast<uint64_t>(region_), mapped_bytes))
        return fail("the engine's offer cannot be used: this is not a Serval region");
    if (header.generation != generation_ || layout.block_count != blocks_)
        return fail("the engine's offer cannot be used: the region is of another life");
    region_bytes_ = layout.size;
    blocks_offset_ = layout.blocks;
    watches_ = static_cast<Watch*>(calloc(blocks_, sizeof *watches_));
    rings_of_ = static_cast<Block*>(calloc(blocks_, sizeof *rings_of_));
    if (!watches_ || !rings_of_) return fail("no memory for %u blocks", blocks_);
    if (!read_directory(layout)) return false;
    step_ = Step::SERVING;
    return true;
}

// Reads the mqueues of each block and the offsets of their words. The directory is in shared
// memory, so each entry is copied and the copy is checked; a peer that changes it meanwhile changes
// mqueues inside the region only.
bool Runtime::read_directory(const detail::Layout& layout) {
    const char* const impossible =
        "the engine's offer cannot be used: the region's directory is impossible";
    for (uint32_t i = 0; i < layout.ring_count; i++) {
        const detail::EntryName name = layout.name(i);
        if (detail::is_refused(name))
            return fail(
                "the engine's offer cannot be used: ring %u of the region's directory is of kind "
                "%u, version %u, which the region "
                "requires and this library does not know: use matching builds",
                i, unsigned{name.kind}, unsigned{name.version});
        const bool is_mqueues = detail::is_of_mqueue(name);
        if (name.block == SERVAL_NO_BLOCK && !is_mqueues) continue;
        if (name.block >= blocks_) return fail("%s", impossible);
        Block& block = rings_of_[name.block];
        if (block.ring_count == 0) block.ring_first = i;
        if (block.ring_first + block.ring_count != i) return fail("%s", impossible);
        block.ring_count++;
        if (is_mqueues && detail::is_rx(name)) block.mqueue_count++;
    }
    uint32_t count = 0, most = 0;
    for (uint32_t i = 0; i < blocks_; i++) {
        Block& block = rings_of_[i];
        if (block.mqueue_count == 0 || block.mqueue_count > 1 + SERVAL_BACKENDS_MAX)
            return fail("%s", impossible);
        block.mqueue_first = count;
        count += block.mqueue_count;
        if (block.mqueue_count > most) most = block.mqueue_count;
    }
    mqueues_ = static_cast<Mqueue*>(calloc(count, sizeof *mqueues_));
    if (!mqueues_) return fail("no memory for %u mqueues", count);
    uint64_t longest = 0;
    for (uint32_t i = 0; i < layout.ring_count; i++) {
        serval_ring_entry entry;
        detail::fetch(entry, layout.region + layout.entry(i));
        const detail::EntryName name = {entry.kind, entry.version, entry.flags, entry.block,
                                        entry.index};
        if (!detail::is_of_mqueue(name)) continue;
        const uint64_t place = detail::is_of_server(name) ? 0 : uint64_t{1} + name.index;
        if (name.block >= blocks_ || place >= rings_of_[name.block].mqueue_count)
            return fail("%s", impossible);
        Mqueue& mqueue = mqueues_[rings_of_[name.block].mqueue_first + place];
        const unsigned tx = detail::is_rx(name) ? 0 : 1;
        const bool words =
            entry.head_offset % 8 == 0 && detail::within(entry.head_offset, 8, layout.size) &&
            entry.tail_offset % 8 == 0 && detail::within(entry.tail_offset, 8, layout.size);
        if (mqueue.depth[tx] != 0 || entry.depth == 0 || !words ||
            entry.message_bytes_max > SERVAL_MESSAGE_BYTES_MAX)
            return fail("%s", impossible);
        mqueue.head[tx] = entry.head_offset;
        mqueue.tail[tx] = entry.tail_offset;
        mqueue.depth[tx] = entry.depth;
        if (entry.message_bytes_max > longest) longest = entry.message_bytes_max;
    }
    for (uint32_t i = 0; i < count; i++)
        if (mqueues_[i].depth[0] == 0 || mqueues_[i].depth[1] == 0) return fail("%s", impossible);
    // Includes the word after a reply that detects a write past its end.
    staging_stride_ = static_cast<uint32_t>(((longest + 7) / 8 * 8 + 8 + 63) / 64 * 64);
    staging_bytes_ = 2ull * most * staging_stride_;
    // Blocks on a GPU fetch messages of bundles there, many at once.
    detail::Pools pools;
    if (pools.open(layout))
        staging_bytes_ +=
            longest + 64 < BUNDLE_STAGING ? BUNDLE_STAGING : (longest + 64 + 15) / 16 * 16;
    return true;
}

// ---- serving

serval_block_args Runtime::block_args(uint32_t n) const {
    serval_block_args args = {};
    args.abi_version = SERVAL_ABI_VERSION;
    args.block = n;
    args.param_count = param_count_;
    args.staging_stride = staging_stride_;
    args.ring_first = rings_of_[n].ring_first;
    args.ring_count = rings_of_[n].ring_count;
    args.region = reinterpret_cast<uint64_t>(region_);
    args.region_bytes = region_bytes_;
    args.params = param_count_ ? reinterpret_cast<uint64_t>(params_) : 0;
    args.staging_bytes = staging_bytes_;
    return args;
}

bool Runtime::starting() const {
    for (uint32_t i = 0; i < blocks_; i++)
        if (block_word(i, offsetof(serval_block_words, state)) == SERVAL_STATE_ABSENT) return true;
    return false;
}

bool Runtime::ended() const {
    for (uint32_t i = 0; i < blocks_; i++)
        if (block_word(i, offsetof(serval_block_words, state)) != SERVAL_STATE_ENDED) return false;
    return true;
}

Runtime::Ring Runtime::read_ring(const Mqueue& mqueue, bool tx) const {
    const auto load = [this](uint64_t offset) {
        return detail::load_relaxed(reinterpret_cast<uint64_t*>(region_ + offset));
    };
    return {load(mqueue.head[tx]), load(mqueue.tail[tx]), mqueue.depth[tx]};
}

// True if a block has work and everything that it needs to do it. The rules are those of
// crates/accel/src/cuda/watch.rs.
bool Runtime::could_work(uint32_t block, Watch& now) const {
    const Mqueue* const mqueue = mqueues_ + rings_of_[block].mqueue_first;
    const Ring rx = read_ring(*mqueue, false), tx = read_ring(*mqueue, true);
    now.waiting = rx.head - rx.tail;
    now.moved[0] = rx.tail;
    now.moved[1] = tx.head;
    now.moved[2] = block_word(block, offsetof(serval_block_words, received));
    now.moved[3] = block_word(block, offsetof(serval_block_words, sent));
    now.moved[4] = block_word(block, offsetof(serval_block_words, dropped));
    if (block_word(block, offsetof(serval_block_words, state)) == SERVAL_STATE_ENDED) return false;
    // The engine answers every backend request that it has taken, at the latest by a time-out, and
    // can take those whose answers have room.
    for (uint32_t client = 1; client < rings_of_[block].mqueue_count; client++) {
        const Ring answers = read_ring(mqueue[client], false),
                   questions = read_ring(mqueue[client], true);
        const bool can_take =
            questions.head != questions.tail && answers.head - answers.tail < answers.depth;
        if (questions.tail > answers.head || can_take) return false;
    }
    return now.waiting > 0 && tx.head - tx.tail < tx.depth;
}

uint32_t Runtime::hung(uint32_t limit_ms) {
    if (!region_) return blocks_;
    const uint64_t limit_ns = limit_ms * MS, now_at = now_ns();
    // As in look(): a process that was itself stopped blames no block.
    uint64_t passed = watched_ns_ ? now_at - watched_ns_ : 0;
    if (passed > limit_ns / 2) passed = limit_ns / 2;
    watched_ns_ = now_at;
    uint32_t first = blocks_;
    for (uint32_t block = 0; block < blocks_; block++) {
        Watch& before = watches_[block];
        Watch now = {};
        const bool could = could_work(block, now);
        const bool still =
            could && before.waiting > 0 && memcmp(now.moved, before.moved, sizeof now.moved) == 0;
        now.still_ns = still ? before.still_ns + passed : 0;
        before = now;
        if (now.still_ns >= limit_ns && still && first == blocks_) first = block;
    }
    return first;
}

bool Runtime::ready() {
    // Blocks of the device library take bundles.
    detail::store_release(own_word(offsetof(serval_accelerator_words, features)),
                          SERVAL_FEATURE_BUNDLES);
    // EDGE STATE (release half)
    detail::store_release(own_word(offsetof(serval_accelerator_words, state)), SERVAL_STATE_READY);
    // EDGE HEARTBEAT (release half)
    detail::store_release(own_word(offsetof(serval_accelerator_words, heartbeat)), ++beats_);
    Writer message(SERVAL_ATTACH_READY);
    message.number(generation_, 8);
    message.number(blocks_, 4);
    if (send(message.bytes, message.len)) return true;
    step_ = Step::OVER;
    return false;
}

Step Runtime::look(uint32_t timeout_ms) {
    if (step_ == Step::OVER) return step_;
    uint32_t pause = heartbeat_ms_ / 4 < LOOK_MS ? heartbeat_ms_ / 4 : LOOK_MS;
    if (timeout_ms < pause) pause = timeout_ms;
    const bool heard = readable(socket_, pause * MS);
    // EDGE HEARTBEAT (release half)
    detail::store_release(own_word(offsetof(serval_accelerator_words, heartbeat)), ++beats_);
    if (heard && hear() == Step::OVER) return step_;
    const uint64_t now = now_ns();
    if (step_ == Step::DRAINING && now >= drain_until_ns_)
        return over("the time for draining is up");
    const auto* engine = reinterpret_cast<const serval_engine_words*>(engine_word(0));
    // EDGE HEARTBEAT (acquire half): in heartbeat.h, shared with the kernels
    return engine_heartbeat_.is_lost(engine, now_ns)
               ? over("the engine is gone: its heartbeat stands still")
               : step_;
}

// Reads one message if there is one.
Step Runtime::hear() {
    uint8_t bytes[SERVAL_ATTACH_MESSAGE_BYTES_MAX + 1];
    const ssize_t got = recv(socket_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return step_;
    if (got <= 0) return over("the engine is gone: it closed the connection");
    Reader reader = {bytes, static_cast<size_t>(got)};
    Head head;
    char why[160];
    if (!open_message(reader, reader.left, head, why)) return over(why);
    const uint64_t drain_ms = reader.u32();
    if (head.code != SERVAL_ATTACH_STOP || reader.wrong || reader.left)
        return over("the engine says what an engine does not say");
    // A second call has no effect.
    if (step_ == Step::SERVING) drain_until_ns_ = now_ns() + drain_ms * MS;
    fail("the engine stops");
    return step_ = Step::DRAINING;
}

void Runtime::stop_blocks() {
    if (!region_) return;
    uint64_t* stop = engine_word(offsetof(serval_engine_words, stop));
    // EDGE STOP (release half)
    if (detail::load_relaxed(stop) != SERVAL_STOP_NOW) detail::store_release(stop, SERVAL_STOP_NOW);
}

void Runtime::leave(uint64_t reason, const char* text) {
    if (region_) {
        stop_blocks();
        detail::store_release(own_word(offsetof(serval_accelerator_words, reason)), reason);
        // EDGE STATE (release half)
        detail::store_release(own_word(offsetof(serval_accelerator_words, state)),
                              SERVAL_STATE_ENDED);
        Writer bye(SERVAL_ATTACH_BYE);
        bye.number(reason, 8);
        bye.text(text, SERVAL_ATTACH_TEXT_BYTES_MAX);
        // The engine may be gone: then no message is needed. The reason of the end stays as it is.
        if (::send(socket_, bye.bytes, bye.len, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) errno = 0;
        munmap(region_, mapped_bytes_);
        region_ = nullptr;
        free(watches_);
        free(rings_of_);
        free(mqueues_);
        watches_ = nullptr;
        rings_of_ = nullptr;
        mqueues_ = nullptr;
    }
    int* const files[] = {&socket_, &file_, &bell_};
    for (int* file : files) {
        if (*file >= 0) close(*file);
        *file = -1;
    }
    step_ = Step::OVER;
}

Runtime::~Runtime() { leave(); }

}  // namespace serval
