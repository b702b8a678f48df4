// The built-in kernels, and misbehave: their answers to valid and invalid requests.
#include <cmath>
#include <map>
#include <string>

#include "../kernels/builtin.cpp"
#include "misbehave.cpp"
#include "region.h"

using namespace testing;

namespace {

// One reply, or one drop.
struct Answer {
    uint8_t kind = 0, status = 0;
    uint64_t token = 0;
    std::vector<uint8_t> data;
};

uint64_t fake_now;
uint64_t fake_clock(void*) { return fake_now += 100; }

// Passes `requests` to a kernel, with tokens 0, 1, ..., and drains. `database` answers backend 0.
struct Service {
    Region region;
    Runner runner;
    std::function<std::string(const std::string& query, uint8_t& status)> database;
    std::vector<std::string> queries;

    static Shape shape(unsigned backends) {
        Shape s;
        s.depth = 32;
        s.inline_bytes = 1024;
        s.len_max = 1100;
        s.arena_bytes = 32768;
        s.backends = backends;
        return s;
    }
    explicit Service(unsigned backends = 0) : region(shape(backends)), runner(region) {}

    std::vector<Answer> ask(const char* kernel, const std::vector<std::vector<uint8_t>>& requests) {
        Producer rx = region.producer(0, false);
        Consumer tx = region.consumer(0, true);
        for (size_t i = 0; i < requests.size(); i++)
            if (!send(rx, message(i, static_cast<uint32_t>(requests[i].size())), requests[i].data())) std::abort();
        region.engine()->stop = SERVAL_STOP_DRAIN;
        Producer db_rx;
        Consumer db_tx;
        if (region.shape.backends) {
            db_rx = region.producer(1, false);
            db_tx = region.consumer(1, true);
        }
        std::vector<uint8_t> data;
        runner.waiting = [&](uint32_t why, uint64_t deadline) {
            if (why == SERVAL_WAIT_TIME && deadline != SERVAL_NO_DEADLINE) fake_now = deadline;
            if (why != SERVAL_WAIT_BACKEND || recv(db_tx, data) != Look::FOUND) return;
            queries.emplace_back(data.begin(), data.end());
            uint8_t status = SERVAL_STATUS_OK;
            std::string text = database(queries.back(), status);
            Header h = message(0, static_cast<uint32_t>(text.size()), SERVAL_KIND_MESSAGE, status);
            h.tag = db_tx.message.tag;
            send(db_rx, h, text.data());
        };
        if (!runner.run(kernel)) std::abort();
        std::vector<Answer> answers;
        while (recv(tx, data) == Look::FOUND) answers.push_back({tx.message.kind, tx.message.status, tx.message.token, data});
        return answers;
    }
};

std::vector<uint8_t> bytes(const std::string& text) { return std::vector<uint8_t>(text.begin(), text.end()); }

template <class T>
T value_at(const std::vector<uint8_t>& data, size_t at) {
    T v = T();
    if (at + sizeof v <= data.size()) std::memcpy(&v, data.data() + at, sizeof v);
    return v;
}

}  // namespace

TEST(echo_spin_and_delay_send_the_request_back) {
    for (const char* kernel : {"echo", "spin", "delay"}) {
        Service s;
        fake_now = 0;
        s.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
        s.runner.param("microseconds", 50);
        check::Random random(1);
        std::vector<std::vector<uint8_t>> requests;
        for (uint32_t len : {0u, 1u, 7u, 8u, 9u, 1024u, 1025u, 1100u}) {
            requests.emplace_back(len);
            random.fill(requests.back().data(), len);
        }
        auto answers = s.ask(kernel, requests);
        CHECK_EQ(answers.size(), requests.size());
        for (size_t i = 0; i < answers.size(); i++) {
            CHECK_EQ(answers[i].token, i);
            CHECK_EQ(answers[i].kind, SERVAL_KIND_MESSAGE);
            CHECK(answers[i].data == requests[i]);
        }
        // spin uses CPU time, delay waits, echo does neither.
        CHECK_EQ(fake_now >= 8 * 50000, kernel[0] != 'e');
        CHECK_EQ(s.runner.waits[SERVAL_WAIT_TIME], kernel[0] == 'd' ? 8 : 0);
    }
}

TEST(a_request_longer_than_a_reply_may_be_is_dropped) {
    for (const char* kernel : {"echo", "scale"}) {
        Service s;
        s.region.entry(0, true)->inline_bytes = 16;
        s.region.entry(0, true)->message_bytes_max = 16;
        auto answers = s.ask(kernel, {std::vector<uint8_t>(20), std::vector<uint8_t>(16)});
        CHECK_EQ(answers.size(), 2);
        CHECK_EQ(answers[0].kind, SERVAL_KIND_DROP);
        CHECK_EQ(answers[0].status, SERVAL_STATUS_TOO_LONG);
        CHECK_EQ(answers[1].kind, SERVAL_KIND_MESSAGE);
    }
}

TEST(scale_multiplies_by_three) {
    Service s;
    std::vector<float> in = {0, 1, -2.5f, 1e30f};
    std::vector<uint8_t> request(16);
    std::memcpy(request.data(), in.data(), 16);
    auto answers = s.ask("scale", {request, bytes("abc"), {}});
    CHECK_EQ(answers.size(), 3);
    CHECK_EQ(answers[0].data.size(), 16);
    for (size_t i = 0; i < 4; i++) CHECK(value_at<float>(answers[0].data, 4 * i) == 3.0f * in[i]);
    CHECK_EQ(answers[1].kind, SERVAL_KIND_DROP);
    CHECK_EQ(answers[1].status, SERVAL_STATUS_BAD_LENGTH);
    CHECK_EQ(answers[2].kind, SERVAL_KIND_MESSAGE);
}

namespace {
std::vector<uint8_t> sockperf_message(uint8_t flags, uint32_t claimed, uint32_t len) {
    std::vector<uint8_t> m(len);
    check::Random(len).fill(m.data(), len);
    if (len < 14) return m;
    m[8] = 0;
    m[9] = flags;
    for (unsigned i = 0; i < 4; i++) m[10 + i] = static_cast<uint8_t>(claimed >> (24 - 8 * i));
    return m;
}
}  // namespace

TEST(sockperf_answers_pings_and_swallows_the_rest) {
    Service s;
    struct Case {
        uint8_t flags;
        uint32_t claimed, len;
        uint8_t status;  // of a drop
        bool dropped;
    };
    const Case cases[] = {{3, 14, 14, SERVAL_STATUS_OK, false},
                          {3, 64, 64, SERVAL_STATUS_OK, false},
                          {3, 1100, 1100, SERVAL_STATUS_OK, false},
                          {1, 64, 64, SERVAL_STATUS_OK, true},
                          {7, 64, 64, SERVAL_STATUS_OK, true},
                          {2, 64, 64, SERVAL_STATUS_REJECTED, true},
                          {0, 64, 64, SERVAL_STATUS_REJECTED, true},
                          {3, 63, 64, SERVAL_STATUS_BAD_LENGTH, true},
                          {3, 0x40000000, 64, SERVAL_STATUS_BAD_LENGTH, true},
                          {3, 13, 13, SERVAL_STATUS_BAD_LENGTH, true},
                          {3, 0, 0, SERVAL_STATUS_BAD_LENGTH, true}};
    std::vector<std::vector<uint8_t>> requests;
    for (const Case& k : cases) requests.push_back(sockperf_message(k.flags, k.claimed, k.len));
    auto answers = s.ask("sockperf", requests);
    CHECK_EQ(answers.size(), requests.size());
    for (size_t i = 0; i < answers.size(); i++) {
        CHECK_EQ(answers[i].kind, cases[i].dropped ? SERVAL_KIND_DROP : SERVAL_KIND_MESSAGE);
        CHECK_EQ(answers[i].status, cases[i].status);
        if (cases[i].dropped) continue;
        std::vector<uint8_t> want = requests[i];
        want[9] = 2;  // the client bit is cleared, still a pong
        CHECK(answers[i].data == want);
    }
}

TEST(lenet_answers_with_digit_and_logits) {
    Service s;
    check::Random random(5);
    std::vector<std::vector<uint8_t>> requests;
    for (int i = 0; i < 4; i++) {
        requests.emplace_back(784);
        random.fill(requests.back().data(), 784);
    }
    requests.emplace_back(783);
    requests.emplace_back(785);
    // The same picture with a number behind it.
    requests.push_back(requests[0]);
    for (uint8_t i = 1; i <= 8; i++) requests.back().push_back(i);
    auto answers = s.ask("lenet", requests);
    CHECK_EQ(answers.size(), 7);
    static serval_lenet::Scratch scratch;
    for (int i = 0; i < 4; i++) {
        const std::vector<uint8_t>& a = answers[i].data;
        CHECK_EQ(a.size(), 44);
        float logits[10];
        serval_lenet::infer(0, 1, [] {}, requests[i].data(), logits, scratch);
        CHECK(std::memcmp(a.data() + 4, logits, sizeof logits) == 0);
        CHECK_EQ(a[0], serval_lenet::digit(logits));
        CHECK_EQ(a[1] | a[2] | a[3], 0);
    }
    for (int i = 4; i < 6; i++) CHECK_EQ(answers[i].status, SERVAL_STATUS_BAD_LENGTH);
    std::vector<uint8_t> numbered = answers[0].data;
    for (uint8_t i = 1; i <= 8; i++) numbered.push_back(i);
    CHECK(answers[6].data == numbered);
}

TEST(faces_asks_the_database) {
    Service s(1);
    check::Random random(3);
    std::string face(1024, '\0'), other(1024, '\0');
    random.fill(&face[0], 1024);
    random.fill(&other[0], 1024);
    const std::string label = "\x01\x23\x45\x67\x89\xab\xcd\xef\xff\x10\x20\x30";
    const std::string key = "face:0123456789abcdefff102030";
    const std::string head = "VA 1024 k" + key + "\r\n", tail = "\r\n";

    struct Case {
        const char* what;
        std::string response;
        uint8_t status;
        uint32_t verdict;
    };
    const std::vector<Case> cases = {
        {"match", head + face + tail, 0, 1},
        {"no match", head + other + tail, 0, 0},
        {"miss", "EN k" + key + "\r\n", 0, 2},
        {"bare miss", "EN\r\n", 0, 2},
        {"other miss", "EN kface:0123456789abcdefff102031\r\n", 0, 3},
        {"cut miss", "EN k" + key, 0, 3},
        {"timeout", "", SERVAL_STATUS_TIMEOUT, 3},
        {"refused", "EN\r\n", SERVAL_STATUS_REFUSED, 3},
        {"error", "SERVER_ERROR out of memory\r\n", 0, 3},
        {"empty", "", 0, 3},
        {"cut", (head + face + tail).substr(0, 1000), 0, 3},
        {"no end", head + face, 0, 3},
        {"wrong end", head + face + "\n\r", 0, 3},
        {"more", head + face + tail + "EN\r\n", 0, 3},
        {"other key", "VA 1024 kface:0123456789abcdefff102031\r\n" + face + tail, 0, 3},
        {"no key", "VA 1024\r\n" + face + tail, 0, 3},
        {"short value", "VA 1023 k" + key + "\r\n" + face.substr(1) + tail, 0, 3},
        {"huge value", "VA 4294968320 k" + key + "\r\n" + face + tail, 0, 3},
        {"no length", "VA k" + key + "\r\n" + face + tail, 0, 3},
    };
    std::vector<std::vector<uint8_t>> requests;
    for (size_t i = 0; i < cases.size(); i++) requests.push_back(bytes(label + face));
    size_t asked = 0;
    s.database = [&](const std::string& query, uint8_t& status) {
        if (query != "mg " + key + " k v\r\n") check::fail(__FILE__, __LINE__, "the query names the label");
        status = cases[asked].status;
        return cases[asked++].response;
    };
    auto answers = s.ask("faces", requests);
    CHECK_EQ(asked, cases.size());
    CHECK_EQ(answers.size(), requests.size());
    for (size_t i = 0; i < cases.size(); i++) {
        CHECK_EQ(answers[i].data.size(), 8);
        if (value_at<uint32_t>(answers[i].data, 0) != cases[i].verdict) {
            check::fail(__FILE__, __LINE__, cases[i].what);
            std::printf("    verdict %u\n", value_at<uint32_t>(answers[i].data, 0));
        }
        float distance = value_at<float>(answers[i].data, 4);
        CHECK(cases[i].verdict == 0 ? distance > serval_faces::DEFAULT_THRESHOLD : distance == 0.0f);
    }
    Service refusing(1);
    answers = refusing.ask("faces", {bytes(label + face.substr(1))});
    CHECK_EQ(answers.size(), 1);
    CHECK_EQ(answers[0].status, SERVAL_STATUS_BAD_LENGTH);
}

TEST(faces_obeys_its_threshold_and_needs_a_backend) {
    std::string face(1024, '\0');
    check::Random(9).fill(&face[0], 1024);
    Service none;
    auto answers = none.ask("faces", {bytes(std::string(12, 'x') + face)});
    CHECK_EQ(answers.size(), 1);
    CHECK_EQ(value_at<uint32_t>(answers[0].data, 0), 3);
    Service s(1);
    s.runner.param("threshold", -1);  // even the same face is too far away
    s.database = [&](const std::string& query, uint8_t&) {
        return "VA 1024 k" + query.substr(3, 29) + "\r\n" + face + "\r\n";
    };
    answers = s.ask("faces", {bytes(std::string(12, 'x') + face)});
    CHECK_EQ(value_at<uint32_t>(answers[0].data, 0), 0);
}

TEST(misbehave_does_what_its_mode_says) {
    using serval::detail::Mode;
    const std::vector<std::vector<uint8_t>> requests(4, bytes("request"));
    for (unsigned mode = 0; mode <= 13; mode++) {
        if (mode == serval::detail::HANG) continue;
        for (unsigned protocol : PROTOCOLS) {
            Shape shape;
            shape.protocol = protocol;
            Region region(shape);
            Runner runner(region);
            runner.param("mode", mode);
            runner.param("after", 1);
            runner.waiting = [&](uint32_t, uint64_t) { region.engine()->stop = SERVAL_STOP_NOW; };
            Producer rx = region.producer(0, false);
            Consumer tx = region.consumer(0, true);
            for (size_t i = 0; i < 3; i++) CHECK(send(rx, message(i, 7), "request"));
            region.engine()->stop = SERVAL_STOP_DRAIN;
            CHECK(runner.run("misbehave"));
            std::vector<uint8_t> data;
            std::vector<uint64_t> tokens;
            Look look;
            while (tokens.size() < 100 && (look = recv(tx, data)) == Look::FOUND) tokens.push_back(tx.message.token);
            const uint64_t head = *region.head(0, true), tail = *region.tail(0, false), state = region.block()->state;
            switch (mode) {
                case serval::detail::BEHAVE:
                    CHECK(tokens == (std::vector<uint64_t>{0, 1, 2}));
                    break;
                case serval::detail::TWICE:
                    CHECK(tokens == (std::vector<uint64_t>{0, 1, 1, 2, 2}));
                    break;
                case serval::detail::FORGE:
                    CHECK_EQ(tokens.size(), 5);
                    CHECK(tokens[1] > 2 && tokens[3] > 2);
                    CHECK_EQ(tokens[2], 1 | uint64_t{1} << 32);
                    break;
                case serval::detail::TOO_LONG_LENGTH:
                case serval::detail::RANDOM_HEADER:
                case serval::detail::ARENA_OUTSIDE:
                    CHECK_EQ(head, 3);
                    CHECK(look == Look::CORRUPT);
                    break;
                case serval::detail::RANDOM_SLOTS:
                    CHECK_EQ(head, 3);
                    CHECK(look == (protocol == SERVAL_PROTOCOL_DOORBELL ? Look::CORRUPT : Look::NONE));
                    break;
                case serval::detail::RANDOM_HEAD:
                    CHECK(head > 1000);
                    break;
                case serval::detail::RANDOM_TAIL:
                    CHECK(tail > 1000);
                    break;
                case serval::detail::RETURN:
                    CHECK_EQ(tail, 2);
                    CHECK_EQ(state, SERVAL_STATE_ENDED);
                    break;
                case serval::detail::SILENT:
                    CHECK_EQ(tail, 3);
                    CHECK_EQ(tokens.size(), 1);
                    break;
                case serval::detail::OVERRUN:
                    CHECK_EQ(head, 1 + 2 * 3 * 8);
                    break;
                case serval::detail::STATUS_WORDS:
                    CHECK(region.block()->reserved[0] != 0);
                    break;
            }
        }
    }
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
