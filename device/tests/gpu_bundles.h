// Bundles on a GPU: a part of gpu_test.cpp.
namespace {

// The engine's half of bundles for a block of `echo`: few buffers, each of which is used again as soon as its messages have ended.
struct BundleStream {
    static constexpr unsigned BUFFERS = 2;
    static constexpr uint64_t BUFFER_BYTES = 65536;
    struct Buffer {
        uint64_t token = 0, left = 0;  // messages that have not ended
        serval_bundle d = {};
    } buffers[BUFFERS];
    uint64_t memory, bundles, sent = 0, ended = 0, single = 0, messages = 0, wrong = 0;
    check::Random random{7};
    bool reversed;  // the slot is published before the messages, intentionally

    static uint8_t byte_of(uint64_t token, uint64_t i) { return static_cast<uint8_t>(token * 37 + (token >> 6) * 11 + i * 7); }

    // Messages in the first half of the buffer, replies in the second.
    bool push(Service& s, unsigned block, unsigned at) {
        const bool one_by_one = s.region.shape.protocol != SERVAL_PROTOCOL_DOORBELL;
        Buffer& buffer = buffers[at];
        serval_bundle d = {};
        d.count = static_cast<uint32_t>(1 + random.below(SERVAL_BUNDLE_MAX));
        d.len = static_cast<uint32_t>(random.below(random.below(3) ? 70 : s.region.shape.len_max + 1));
        d.last_len = random.below(3) ? d.len : static_cast<uint32_t>(random.below(d.len + 1));
        d.stride = d.len + static_cast<uint32_t>(random.below(2) * random.below(40));
        d.offset = memory + at * BUFFER_BYTES;
        d.reply_offset = d.offset + BUFFER_BYTES / 2;
        d.reply_bytes = static_cast<uint32_t>(d.count * align(s.region.shape.len_max, 16));
        const uint64_t token = (sent + 1) * SERVAL_BUNDLE_MAX;
        const auto write = [&] {
            uint8_t* to = s.region.base + d.offset;
            for (uint32_t i = 0; i < d.count; i++, to += d.stride)
                for (uint32_t k = 0; k < (i + 1 == d.count ? d.last_len : d.len); k++) to[k] = byte_of(token + i, k);
        };
        if (!reversed) write();
        if (one_by_one) serval::detail::fence_release();
        if (!send(s.rx[block], message(token, sizeof d, SERVAL_KIND_BUNDLE), &d)) return false;
        if (reversed) {
            for (const uint64_t until = now_ns() + 20000; now_ns() < until;) {
            }
            write();
        }
        buffer = {token, d.count == 64 ? ~uint64_t{0} : (uint64_t{1} << d.count) - 1, d};
        sent++;
        return true;
    }
    // A message that came alone: its token is odd and has no bundle.
    bool push_single(Service& s, unsigned block) {
        std::vector<uint8_t> data(random.below(65));
        for (size_t k = 0; k < data.size(); k++) data[k] = byte_of(single, k);
        if (!send(s.rx[block], message(single << 32 | 1, static_cast<uint32_t>(data.size())), data.data())) return false;
        single++;
        return true;
    }
    void take(Service& s, const Header& h, const std::vector<uint8_t>& data) {
        if (h.kind == SERVAL_KIND_MESSAGE) {
            for (size_t k = 0; k < data.size(); k++) wrong += data[k] != byte_of(h.token >> 32, k);
            messages++;
            return;
        }
        if (s.region.shape.protocol != SERVAL_PROTOCOL_DOORBELL) serval::detail::fence_acquire();
        serval_bundle_reply r = {};
        Buffer* buffer = buffers[0].token == h.token ? &buffers[0] : &buffers[1];
        if (h.kind != SERVAL_KIND_BUNDLE || data.size() != sizeof r || buffer->token != h.token) {
            wrong++;
            return;
        }
        std::memcpy(&r, data.data(), sizeof r);
        const serval_bundle& d = buffer->d;
        if (r.answered == 0 || r.answered & ~buffer->left) wrong++;
        for (uint64_t i = 0, at = r.offset; i < d.count; i++) {
            if (!(r.answered >> i & 1)) continue;
            if (at < d.reply_offset || at + r.len > d.reply_offset + d.reply_bytes || r.len != (i + 1 == d.count ? d.last_len : d.len)) {
                wrong++;
                return;
            }
            for (uint32_t k = 0; k < r.len; k++) wrong += s.region.base[at + k] != byte_of(h.token + i, k);
            at += r.stride;
            messages++;
        }
        buffer->left &= ~r.answered;
        ended += buffer->left == 0;
    }
};

// Bundles and single messages through a kernel that echoes; the number of bytes and headers that were wrong.
uint64_t bundle_storm(const char* kernel, const Shape& shape, unsigned threads, uint64_t staging, uint64_t bundles, bool reversed = false) {
    Service s(shape);
    s.bundle_staging = staging;
    s.start(kernel, threads);
    std::vector<BundleStream> streams(shape.blocks);
    for (unsigned i = 0; i < shape.blocks; i++) {
        streams[i].memory = s.region.pool_entry(0)->offset + i * BundleStream::BUFFERS * BundleStream::BUFFER_BYTES;
        streams[i].bundles = bundles;
        streams[i].random = check::Random(i + 1);
        streams[i].reversed = reversed;
    }
    std::vector<uint8_t> data;
    uint64_t wrong = 0, done = 0;
    while (done < shape.blocks && s.alive()) {
        done = wrong = 0;
        for (unsigned i = 0; i < shape.blocks; i++) {
            BundleStream& t = streams[i];
            for (unsigned at = 0; at < BundleStream::BUFFERS && t.sent < bundles; at++) {
                if (t.buffers[at].left) continue;
                if (t.random.below(4) == 0) t.push_single(s, i);
                if (!t.push(s, i, at)) break;
            }
            Look look;
            while ((look = recv(s.tx[i], data)) == Look::FOUND) t.take(s, s.tx[i].message, data);
            if (look == Look::CORRUPT) t.wrong++;
            wrong += t.wrong;
            done += t.ended == bundles;
        }
        if (wrong && !reversed) break;
    }
    s.stop(SERVAL_STOP_DRAIN);
    s.join();
    for (unsigned i = 0; i < shape.blocks; i++) {
        BundleStream& t = streams[i];
        while (recv(s.tx[i], data) == Look::FOUND) t.take(s, s.tx[i].message, data);
        if (!reversed) wrong += t.wrong != 0 || t.ended != bundles || s.region.block(i)->received != t.messages || s.region.block(i)->sent != t.messages;
    }
    return wrong;
}

Shape with_pool(unsigned protocol, unsigned blocks) {
    Shape s = shape_of(protocol, blocks);
    s.inline_bytes = s.len_max = 400;
    s.pools = 1;
    s.pool_bytes = blocks * BundleStream::BUFFERS * BundleStream::BUFFER_BYTES;
    return s;
}

}  // namespace

// Each buffer is used again at once, and every byte is checked: a litmus test of RX_BUNDLE, TX_BUNDLE and BUNDLE_RETURN.
TEST(gpu_bundles_return_every_message) {
    for (unsigned protocol : PROTOCOLS) {
        for (unsigned threads : {32u, 128u, 256u}) {
            // The second is too small for most bundles, and the third is in the GPU's memory.
            for (uint64_t staging : {uint64_t{8192}, uint64_t{512}, uint64_t{65536}})
                for (const char* kernel : {"echo", "gpu_one"}) CHECK_EQ(bundle_storm(kernel, with_pool(protocol, 12), threads, staging, 1000), 0);
        }
    }
    for (const char* kernel : {"echo", "gpu_one"}) CHECK(bundle_storm(kernel, with_pool(SERVAL_PROTOCOL_GRANULE16, 2), 32, 8192, 50, true) > 0);
}

TEST(gpu_bundles_need_staging) {
    Service s(with_pool(SERVAL_PROTOCOL_GRANULE16, 2));
    s.bundle_staging = 400;
    s.start("echo", 32);
    s.join();
    CHECK_EQ(s.region.block(1)->reason, SERVAL_REASON_REFUSED);
}

// The rate of bundles of 32 messages, two of which are in flight for each block.
void bundle_rate(const char* kernel, unsigned protocol, unsigned blocks, uint32_t len) {
    Shape shape = with_pool(protocol, blocks);
    shape.inline_bytes = shape.len_max = len;
    Service s(shape);
    s.bundle_staging = 8192;
    s.start(kernel, 32);
    std::vector<uint64_t> left(2 * blocks);
    std::vector<uint8_t> answer(align(len, 64));
    uint64_t popped = 0, completions = 0;
    const uint64_t from = now_ns(), until = from + 500000000;
    while (now_ns() < until && s.alive())
        for (unsigned i = 0; i < blocks; i++) {
            for (unsigned at = 0; at < 2; at++) {
                if (left[2 * i + at]) continue;
                const uint64_t memory = s.region.pool_entry(0)->offset + (2 * i + at) * BundleStream::BUFFER_BYTES;
                const serval_bundle d = {memory, memory + BundleStream::BUFFER_BYTES / 2, len, 32, len, len, 32 * static_cast<uint32_t>(align(len, 16)), 0};
                serval::detail::fence_release();
                if (send(s.rx[i], message((1 + at) * SERVAL_BUNDLE_MAX, sizeof d, SERVAL_KIND_BUNDLE), &d)) left[2 * i + at] = 32;
            }
            while (s.tx[i].look(answer.data()) == Look::FOUND) {
                s.tx[i].copy(answer.data());
                serval_bundle_reply r;
                std::memcpy(&r, answer.data(), sizeof r);
                const uint64_t at = s.tx[i].message.token / SERVAL_BUNDLE_MAX - 1;
                s.tx[i].advance();
                s.tx[i].release();
                if (at > 1) return (void)check::fail(__FILE__, __LINE__, "a token that was sent");
                left[2 * i + at] -= static_cast<uint64_t>(__builtin_popcountll(r.answered));
                popped += static_cast<uint64_t>(__builtin_popcountll(r.answered));
                completions++;
            }
        }
    std::printf("%s, %s, bundles of 32, %u bytes, %u blocks: %.2f M messages/s, %.1f a completion\n", kernel, NAMES[protocol], len, blocks,
                static_cast<double>(popped) / static_cast<double>(now_ns() - from) * 1e3, static_cast<double>(popped) / static_cast<double>(completions + !completions));
    s.stop(SERVAL_STOP_NOW);
    s.join();
    CHECK(popped > 1000);
}

TEST(gpu_bundle_rates) {
    for (const char* kernel : {"echo", "gpu_one"})
        for (unsigned protocol : PROTOCOLS)
            for (unsigned blocks : {1u, 128u})
                for (uint32_t len : {64u, 784u}) bundle_rate(kernel, protocol, blocks, len);
}

// The time from a bundle to its last reply.
TEST(gpu_bundle_round_trip_times) {
    for (const char* kernel : {"echo", "gpu_one"}) {
        for (unsigned protocol : PROTOCOLS) {
            for (uint32_t count : {1u, 8u, 32u, 64u}) {
                const uint32_t len = 64;
                Shape shape = with_pool(protocol, 1);
                shape.inline_bytes = shape.len_max = len;
                Service s(shape);
                s.bundle_staging = 8192;
                s.start(kernel, 32);
                std::vector<uint64_t> times;
                std::vector<uint8_t> answer(64);
                const uint64_t memory = s.region.pool_entry(0)->offset;
                const serval_bundle d = {memory, memory + BundleStream::BUFFER_BYTES / 2, len, count, len, len, count * len, 0};
                for (int n = 0; n < 5000; n++) {
                    const uint64_t from = now_ns();
                    serval::detail::fence_release();
                    CHECK(send(s.rx[0], message(SERVAL_BUNDLE_MAX, sizeof d, SERVAL_KIND_BUNDLE), &d));
                    for (uint32_t done = 0; done < count && s.alive();) {
                        if (recv(s.tx[0], answer) != Look::FOUND) continue;
                        serval_bundle_reply r;
                        std::memcpy(&r, answer.data(), sizeof r);
                        done += static_cast<uint32_t>(__builtin_popcountll(r.answered));
                    }
                    times.push_back(now_ns() - from);
                }
                s.stop(SERVAL_STOP_NOW);
                s.join();
                std::sort(times.begin(), times.end());
                std::printf("%s, %s, a bundle of %u, %u bytes: p50 %.2f us, p99 %.2f us\n", kernel, NAMES[protocol], count, len, 1e-3 * static_cast<double>(times[2500]),
                            1e-3 * static_cast<double>(times[4950]));
            }
        }
    }
}
