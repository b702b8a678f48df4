// The CUDA build of the library on a GPU: host code that acts as the engine, kernels built by nvcc. Needs only the driver, which it
// loads itself. Usage: gpu_test DIRECTORY [CASE], with DIRECTORY/NAME.cubin for each kernel.
//
// Every kernel here ends by itself when something goes wrong: by the stop word, or by the heartbeat when this program dies.
#include <dlfcn.h>

#include <chrono>
#include <string>
#include <thread>

#include "../models/faces.h"
#include "../models/lenet.h"
#include "region.h"

using namespace testing;
using serval::detail::load_acquire;
using serval::detail::store_release;

namespace {

// The part of the driver interface that is used here.
struct Driver {
    int (*init)(unsigned);
    int (*device_get)(int*, int);
    int (*primary_retain)(void**, int);
    int (*set_current)(void*);
    int (*module_load)(void**, const char*);
    int (*get_function)(void**, void*, const char*);
    int (*host_register)(void*, size_t, unsigned);
    int (*host_unregister)(void*);
    int (*device_pointer)(uint64_t*, void*, unsigned);
    int (*alloc)(uint64_t*, size_t);
    int (*free)(uint64_t);
    int (*copy_in)(uint64_t, const void*, size_t);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*synchronize)();

    template <class F>
    static void find(void* library, F& f, const char* name) {
        f = reinterpret_cast<F>(dlsym(library, name));
        if (!f) die(name, -1);
    }
    static void die(const char* what, int code) {
        std::printf("%s: %d\n", what, code);
        std::fflush(stdout);
        std::_Exit(2);
    }
    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) die("this test needs a GPU: no libcuda.so.1", 0);
        find(library, init, "cuInit");
        find(library, device_get, "cuDeviceGet");
        find(library, primary_retain, "cuDevicePrimaryCtxRetain");
        find(library, set_current, "cuCtxSetCurrent");
        find(library, module_load, "cuModuleLoad");
        find(library, get_function, "cuModuleGetFunction");
        find(library, host_register, "cuMemHostRegister_v2");
        find(library, host_unregister, "cuMemHostUnregister");
        find(library, device_pointer, "cuMemHostGetDevicePointer_v2");
        find(library, alloc, "cuMemAlloc_v2");
        find(library, free, "cuMemFree_v2");
        find(library, copy_in, "cuMemcpyHtoD_v2");
        find(library, launch, "cuLaunchKernel");
        find(library, synchronize, "cuCtxSynchronize");
        int device = 0;
        void* context = nullptr;
        check("cuInit", init(0));
        check("cuDeviceGet", device_get(&device, 0));
        check("cuDevicePrimaryCtxRetain", primary_retain(&context, device));
        check("cuCtxSetCurrent", set_current(context));
    }
    static void check(const char* what, int code) {
        if (code != 0) die(what, code);
    }
};

Driver* driver;
std::string directory, suffix;

uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

// A service on the GPU: every block of a region runs one kernel.
struct Service {
    Region region;
    std::vector<serval_param> params;
    uint64_t arguments = 0, staging = 0, parameters = 0;
    std::vector<Producer> rx;
    std::vector<Consumer> tx;
    uint64_t give_up_at;
    uint64_t bundle_staging = 0;  // of each block, if there are pools

    explicit Service(const Shape& s) : region(s), give_up_at(now_ns() + 60000000000u) {
        Driver::check("cuMemHostRegister", driver->host_register(region.base, region.bytes, 2));
        for (unsigned i = 0; i < s.blocks; i++) {
            rx.push_back(region.producer(i * Region::mqueues_of_block(s), false));
            tx.push_back(region.consumer(i * Region::mqueues_of_block(s), true));
        }
    }
    ~Service() {
        stop(SERVAL_STOP_NOW);
        join();
        driver->host_unregister(region.base);
        driver->free(arguments);
        driver->free(staging);
        driver->free(parameters);
    }
    void param(const char* name, double value) {
        serval_param p = {};
        std::memcpy(p.name, name, std::strlen(name));
        p.value = value;
        params.push_back(p);
    }

    // `rows` of more than one: a kernel of warps, with this many in a CUDA block.
    void start(const std::string& kernel, unsigned threads, bool shared_staging = true, uint32_t abi_version = SERVAL_ABI_VERSION,
               unsigned rows = 1) {
        void *module = nullptr, *function = nullptr;
        Driver::check("cuModuleLoad", driver->module_load(&module, (directory + "/" + kernel + suffix).c_str()));
        Driver::check("cuModuleGetFunction", driver->get_function(&function, module, ("serval_kernel_" + kernel).c_str()));
        const Shape& s = region.shape;
        const unsigned mqueues = Region::mqueues_of_block(s);
        const uint64_t stride = align(s.len_max, 64), per_block = 2 * mqueues * stride + (s.pools ? bundle_staging : 0);
        const unsigned blocks = (s.blocks + rows - 1) / rows;
        uint64_t base = 0;
        Driver::check("cuMemHostGetDevicePointer", driver->device_pointer(&base, region.base, 0));
        Driver::check("cuMemAlloc", driver->alloc(&staging, per_block * s.blocks));
        Driver::check("cuMemAlloc", driver->alloc(&parameters, 4096));
        Driver::check("cuMemAlloc", driver->alloc(&arguments, sizeof(serval_block_args) * blocks * rows));
        std::vector<serval_block_args> all(blocks * rows);
        for (unsigned i = 0; i < all.size(); i++) {
            serval_block_args& a = all[i];
            a.abi_version = abi_version;
            a.block = i;
            a.param_count = static_cast<uint32_t>(params.size());
            a.staging_stride = static_cast<uint32_t>(stride);
            a.ring_first = 2 * mqueues * i;
            a.ring_count = 2 * (mqueues + s.sockets);
            a.region = base;
            a.region_bytes = region.bytes;
            a.params = parameters;
            a.staging = staging + i * per_block;
            a.staging_bytes = per_block;
        }
        if (!params.empty()) Driver::check("cuMemcpyHtoD", driver->copy_in(parameters, params.data(), params.size() * sizeof params[0]));
        Driver::check("cuMemcpyHtoD", driver->copy_in(arguments, all.data(), all.size() * sizeof all[0]));
        void* values[] = {&arguments};
        const unsigned dynamic = shared_staging && rows * per_block <= 16384 ? static_cast<unsigned>(rows * per_block) : 0;
        Driver::check("cuLaunchKernel", driver->launch(function, blocks, 1, 1, threads, rows, 1, dynamic, nullptr, values, nullptr));
    }
    // Called in every loop: updates the heartbeat, and ends a test that hangs.
    bool alive() {
        uint64_t* beat = &region.engine()->heartbeat;
        // EDGE HEARTBEAT (release half)
        store_release(beat, *beat + 1);
        if (now_ns() < give_up_at) return true;
        check::fail(__FILE__, __LINE__, "an answer within a minute");
        stop(SERVAL_STOP_NOW);
        return false;
    }
    void stop(uint64_t how) {
        // EDGE STOP (release half)
        store_release(&region.engine()->stop, how);
    }
    void join() { Driver::check("cuCtxSynchronize", driver->synchronize()); }

    // Sends to a block and waits for the answer.
    bool ask(unsigned block, const void* data, uint32_t len, std::vector<uint8_t>& answer) {
        if (!send(rx[block], message(7, len), data)) return false;
        while (alive()) {
            Look look = recv(tx[block], answer);
            if (look == Look::FOUND) return true;
            if (look == Look::CORRUPT) return check::fail(__FILE__, __LINE__, "a reply the ring may carry");
        }
        return false;
    }
};

const char* const NAMES[] = {"", "doorbell", "granule8", "granule16"};

Shape shape_of(unsigned protocol, unsigned blocks) {
    Shape s;
    s.protocol = protocol;
    s.blocks = blocks;
    s.depth = 16;
    s.inline_bytes = s.len_max = SERVAL_INLINE_BYTES_MAX;
    return s;
}

// Keeps `flight` messages of random sizes in flight on every block; each must return complete and in order.
void echo_storm(const Shape& shape, unsigned threads, bool shared_staging, uint64_t count) {
    Service s(shape);
    s.start("echo", threads, shared_staging);
    struct Stream {
        check::Random sent{0}, expected{0};
        uint64_t pushed = 0, popped = 0;
    };
    std::vector<Stream> streams(shape.blocks);
    for (unsigned i = 0; i < shape.blocks; i++) streams[i].sent = streams[i].expected = check::Random(i + 1);
    std::vector<uint8_t> data, answer;
    uint64_t wrong = 0, done = 0;
    auto make = [&](check::Random& random) {
        data.resize(random.below(random.below(3) ? 65 : shape.len_max + 1));
        random.fill(data.data(), data.size());
    };
    while (done < shape.blocks && s.alive()) {
        for (unsigned i = 0; i < shape.blocks; i++) {
            Stream& t = streams[i];
            while (t.pushed < count) {
                check::Random before = t.sent;
                make(t.sent);
                if (!send(s.rx[i], message(t.pushed, static_cast<uint32_t>(data.size())), data.data())) {
                    t.sent = before;
                    break;
                }
                t.pushed++;
            }
            Look look;
            while ((look = recv(s.tx[i], answer)) == Look::FOUND) {
                make(t.expected);
                if (s.tx[i].message.token != t.popped || answer != data) wrong++;
                if (++t.popped == count) done++;
            }
            if (look == Look::CORRUPT) wrong++;
        }
        if (wrong) break;
    }
    s.stop(SERVAL_STOP_DRAIN);
    s.join();
    CHECK_EQ(wrong, 0);
    CHECK_EQ(done, shape.blocks);
    for (unsigned i = 0; i < shape.blocks; i++) {
        CHECK_EQ(s.region.block(i)->state, SERVAL_STATE_ENDED);
        CHECK_EQ(s.region.block(i)->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(s.region.block(i)->received, count);
        CHECK_EQ(s.region.block(i)->sent, count);
    }
}

}  // namespace

#include "gpu_bundles.h"

TEST(gpu_echo_returns_every_message) {
    for (unsigned protocol : PROTOCOLS) {
        for (unsigned threads : {32u, 128u, 256u}) echo_storm(shape_of(protocol, 20), threads, threads != 128, 3000);
        Shape wrap = shape_of(protocol, 4);
        wrap.start = (uint64_t{1} << 32) - 1000;
        echo_storm(wrap, 64, true, 3000);
    }
    Shape arena = shape_of(SERVAL_PROTOCOL_DOORBELL, 8);
    arena.inline_bytes = 64;
    arena.len_max = 20000;
    arena.arena_bytes = 65536;
    echo_storm(arena, 256, false, 2000);
}

TEST(gpu_round_trip_times) {
    for (unsigned n = 0; n < 2 * std::size(PROTOCOLS); n++) {
        const unsigned protocol = PROTOCOLS[n / 2];
        const char* const kernel = n % 2 ? "gpu_one" : "echo";
        Service s(shape_of(protocol, 1));
        s.start(kernel, 32);
        std::vector<uint8_t> data(64, 3), answer;
        std::vector<uint64_t> times;
        for (int i = 0; i < 20000; i++) {
            uint64_t from = now_ns();
            if (!s.ask(0, data.data(), 64, answer)) break;
            times.push_back(now_ns() - from);
            CHECK(answer == data);
        }
        s.stop(SERVAL_STOP_NOW);
        s.join();
        CHECK_EQ(times.size(), 20000);
        std::sort(times.begin(), times.end());
        std::printf("%s, %s, 64 bytes: round trip p50 %.2f us, p99 %.2f us\n", kernel, NAMES[protocol], 1e-3 * static_cast<double>(times[10000]),
                    1e-3 * static_cast<double>(times[19800]));
    }
}

TEST(gpu_message_rates) {
    for (unsigned protocol : PROTOCOLS) {
        for (unsigned blocks : {1u, 128u}) {
            Shape shape = shape_of(protocol, blocks);
            shape.inline_bytes = shape.len_max = 64;
            Service s(shape);
            s.start("echo", 32);
            std::vector<uint8_t> data(64, 3), answer(64);
            uint64_t popped = 0;
            const uint64_t from = now_ns(), until = from + 500000000;
            while (now_ns() < until && s.alive())
                for (unsigned i = 0; i < blocks; i++) {
                    while (send(s.rx[i], message(1, 64), data.data())) {
                    }
                    while (s.tx[i].look(answer.data()) == Look::FOUND) {
                        s.tx[i].copy(answer.data());
                        s.tx[i].advance();
                        s.tx[i].release();
                        popped++;
                    }
                }
            std::printf("%s, 64 bytes, %u blocks: %.2f M messages/s\n", NAMES[protocol], blocks,
                        static_cast<double>(popped) / static_cast<double>(now_ns() - from) * 1e3);
            s.stop(SERVAL_STOP_NOW);
            s.join();
            CHECK(popped > 1000);
        }
    }
}

TEST(gpu_kernels_end_with_the_engine) {
    Shape shape = shape_of(SERVAL_PROTOCOL_GRANULE16, 3);
    Service s(shape);
    s.start("echo", 64);
    std::vector<uint8_t> answer;
    CHECK(s.ask(1, "hello", 5, answer));
    const uint64_t from = now_ns();
    s.join();  // no heartbeat from here on
    const uint64_t took = now_ns() - from;
    for (unsigned i = 0; i < 3; i++) CHECK_EQ(s.region.block(i)->reason, SERVAL_REASON_ENGINE_LOST);
    CHECK(took > 4000000000u && took < 20000000000u);
}

// No single wait of these kernels is long enough to read the stop word or the heartbeat.
TEST(gpu_kernels_of_short_waits_end_with_the_engine) {
    for (double wait : {0.0, 20000.0, 1000000.0}) {
        for (uint64_t how : {uint64_t{SERVAL_STOP_DRAIN}, uint64_t{SERVAL_STOP_NOW}, uint64_t{SERVAL_STOP_RUN}}) {
            Service s(shape_of(SERVAL_PROTOCOL_GRANULE16, 2));
            s.param("wait", wait);
            s.start("impatient", 64);
            std::vector<uint8_t> answer;
            CHECK(s.ask(1, "hello", 5, answer));  // one message: no round number
            const uint64_t from = now_ns();
            if (how != SERVAL_STOP_RUN) s.stop(how);
            s.join();  // no heartbeat from here on
            const uint64_t took = now_ns() - from;
            const bool lost = how == SERVAL_STOP_RUN;
            for (unsigned i = 0; i < 2; i++)
                CHECK_EQ(s.region.block(i)->reason, lost ? SERVAL_REASON_ENGINE_LOST : SERVAL_REASON_STOPPED);
            CHECK(lost ? took > 4000000000u && took < 20000000000u : took < 4000000000u);
        }
    }
}

TEST(gpu_kernels_wait_for_credit_and_give_up) {
    Shape shape = shape_of(SERVAL_PROTOCOL_DOORBELL, 1);
    Service s(shape);
    s.start("echo", 32);
    // The engine never takes a reply: the block ends up waiting for TX credit.
    uint64_t pushed = 0;
    const uint64_t until = now_ns() + 200000000;
    while (now_ns() < until && s.alive())
        if (send(s.rx[0], message(pushed, 1), "x")) pushed++;
    CHECK_EQ(pushed, 16 + 1 + 16);
    s.stop(SERVAL_STOP_NOW);
    s.join();
    CHECK_EQ(s.region.block()->reason, SERVAL_REASON_STOPPED);
    CHECK_EQ(s.region.block()->sent, 16);
}

TEST(gpu_blocks_refuse_and_notice_corruption) {
    {
        Service s(shape_of(SERVAL_PROTOCOL_DOORBELL, 2));
        s.start("echo", 32, true, SERVAL_ABI_VERSION + 1);
        s.join();
        CHECK_EQ(s.region.block(1)->reason, SERVAL_REASON_REFUSED);
    }
    {
        Service s(shape_of(SERVAL_PROTOCOL_DOORBELL, 2));
        s.start("echo", 48);  // not whole warps
        s.join();
        CHECK_EQ(s.region.block(0)->reason, SERVAL_REASON_REFUSED);
    }
    for (unsigned protocol : PROTOCOLS) {
        Service s(shape_of(protocol, 1));
        s.start("echo", 32);
        Header h = message(1, 0, 9);
        CHECK(send(s.rx[0], h, nullptr));
        s.join();
        CHECK_EQ(s.region.block(0)->reason, SERVAL_REASON_RING_CORRUPT);
    }
    for (unsigned mode : {8u, 13u}) {
        Service s(shape_of(SERVAL_PROTOCOL_GRANULE16, 1));
        s.param("mode", mode);
        s.start("misbehave", 32);
        CHECK(send(s.rx[0], message(1, 0), nullptr));
        while (s.alive() && load_acquire(s.region.tail(0, false)) == 0) {
        }
        s.stop(SERVAL_STOP_NOW);
        s.join();
        if (mode == 8) CHECK_EQ(s.region.block()->state, SERVAL_STATE_ENDED);
    }
}

// The engine's half of gpu_words.cpp.
constexpr uint64_t LAST = uint64_t{1} << 62;

struct Watched {
    uint64_t looks, early;
};

// Stores words as fast as possible for `seconds`, while every block watches.
Watched store_words(bool beats, bool control, double seconds) {
    Service s(shape_of(SERVAL_PROTOCOL_DOORBELL, 64));
    uint64_t* data = reinterpret_cast<uint64_t*>(s.region.slot(0, false, 0));
    uint64_t* word = beats ? &s.region.engine()->heartbeat : &s.region.engine()->stop;
    s.param("mode", beats);
    s.param("control", control);
    s.param("data", static_cast<double>(reinterpret_cast<uint8_t*>(data) - s.region.base));
    s.start("gpu_words", 32);
    const uint64_t until = now_ns() + static_cast<uint64_t>(1e9 * seconds);
    for (uint64_t n = 1; n % 1024 != 0 || now_ns() < until; n++) {
        for (unsigned line = 0; line < 4; line++) serval::detail::store_relaxed(data + 16 * line, n);
        // EDGE STOP (release half)
        // EDGE HEARTBEAT (release half)
        store_release(word, n);
    }
    store_release(word, LAST);
    if (beats) s.stop(SERVAL_STOP_NOW);
    s.join();
    Watched all = {0, 0};
    for (unsigned i = 0; i < s.region.shape.blocks; i++) {
        all.looks += s.region.block(i)->sent;
        all.early += s.region.block(i)->dropped;
    }
    return all;
}

// Blocks that end and become ready again, each change recorded for `seconds`.
Watched note_states(bool control, double seconds) {
    Service s(shape_of(SERVAL_PROTOCOL_DOORBELL, 64));
    s.param("mode", 2);
    s.param("control", control);
    s.start("gpu_words", 32);
    std::vector<uint64_t> noted(s.region.shape.blocks);
    const uint64_t until = now_ns() + static_cast<uint64_t>(1e9 * seconds);
    Watched all = {0, 0};
    while (now_ns() < until) {
        for (unsigned i = 0; i < noted.size(); i++) {
            serval_block_words* words = s.region.block(i);
            const bool ends = noted[i] % 2 != 0;
            // EDGE STATE (acquire half)
            if (load_acquire(&words->state) != (ends ? SERVAL_STATE_ENDED : SERVAL_STATE_READY)) continue;
            noted[i]++;
            if (ends) {
                const uint64_t n = noted[i] / 2;
                all.looks++;
                for (const uint64_t* word : {&words->reason, &words->sent, &words->dropped})
                    if (serval::detail::load_relaxed(word) != n) {
                        all.early++;
                        break;
                    }
            }
            serval::detail::store_relaxed(reinterpret_cast<uint64_t*>(s.region.slot(i, false, 0)), noted[i]);
        }
    }
    for (unsigned i = 0; i < noted.size(); i++)
        serval::detail::store_relaxed(reinterpret_cast<uint64_t*>(s.region.slot(i, false, 0)), LAST);
    s.stop(SERVAL_STOP_NOW);
    s.join();
    return all;
}

TEST(gpu_words_publish) {
    const char* const edges[] = {"STOP", "HEARTBEAT", "STATE"};
    for (unsigned edge = 0; edge < 3; edge++) {
        for (bool control : {false, true}) {
            const double seconds = control ? 0.5 : 3;
            const Watched seen = edge == 2 ? note_states(control, seconds) : store_words(edge == 1, control, seconds);
            std::printf("%s%s: %llu polls, %llu saw the word before the data it publishes\n", edges[edge],
                        control ? ", reversed" : "", static_cast<unsigned long long>(seen.looks),
                        static_cast<unsigned long long>(seen.early));
            CHECK(seen.looks > 100000);
            CHECK(control ? seen.early > 0 : seen.early == 0);
        }
    }
}

TEST(gpu_small_kernels_answer_right) {
    std::vector<uint8_t> answer;
    {
        Service s(shape_of(SERVAL_PROTOCOL_GRANULE16, 1));
        s.start("scale", 32);
        float in[50];
        for (int i = 0; i < 50; i++) in[i] = static_cast<float>(i) - 20;
        CHECK(s.ask(0, in, sizeof in, answer));
        CHECK_EQ(answer.size(), sizeof in);
        for (int i = 0; i < 50; i++) CHECK(reinterpret_cast<float*>(answer.data())[i] == 3 * in[i]);
        CHECK(s.ask(0, in, 3, answer));
        CHECK_EQ(s.tx[0].message.status, SERVAL_STATUS_BAD_LENGTH);
        s.stop(SERVAL_STOP_NOW);
        s.join();
        CHECK_EQ(s.region.block()->dropped, 1);
    }
    for (const char* kernel : {"delay", "spin"}) {
        Service s(shape_of(SERVAL_PROTOCOL_DOORBELL, 1));
        s.param("microseconds", 2000);
        s.start(kernel, 64);
        const uint64_t from = now_ns();
        CHECK(s.ask(0, "hello", 5, answer));
        CHECK(now_ns() - from > 1900000);
        s.stop(SERVAL_STOP_NOW);
        s.join();
    }
    {
        Service s(shape_of(SERVAL_PROTOCOL_GRANULE8, 1));
        s.start("sockperf", 32);
        uint8_t ping[40] = {0, 0, 0, 0, 0, 0, 0, 9, 0, 3, 0, 0, 0, 40};
        CHECK(s.ask(0, ping, sizeof ping, answer));
        ping[9] = 2;
        CHECK(answer == std::vector<uint8_t>(ping, ping + 40));
        s.stop(SERVAL_STOP_NOW);
        s.join();
    }
}

// Eight warps in a CUDA block, each a block with an mqueue of its own; the last CUDA block has surplus warps.
TEST(gpu_warps_are_blocks) {
    for (unsigned protocol : PROTOCOLS) {
        for (unsigned rows : {1u, 3u, 8u}) {
            Service s(shape_of(protocol, 20));
            s.start("scale", 32, rows == 3, SERVAL_ABI_VERSION, rows);
            std::vector<uint8_t> answer;
            for (unsigned n = 0; n < 200; n++) {
                float in[20], expected[20];
                for (unsigned i = 0; i < 20; i++) expected[i] = 3 * (in[i] = static_cast<float>(100 * n + i));
                CHECK(s.ask(n % 20, in, n % 21 * 4, answer));
                CHECK(answer.size() == n % 21 * 4 && !std::memcmp(answer.data(), expected, answer.size()));
            }
            s.stop(SERVAL_STOP_DRAIN);
            s.join();
            for (unsigned i = 0; i < 20; i++) CHECK_EQ(s.region.block(i)->sent, 10);
        }
    }
    Service wide(shape_of(SERVAL_PROTOCOL_DOORBELL, 1));
    wide.start("scale", 64);
    wide.join();
    CHECK_EQ(wide.region.block()->reason, SERVAL_REASON_REFUSED);
}

TEST(gpu_lenet_agrees_with_the_host) {
    static serval_lenet::Scratch scratch;
    for (unsigned threads : {32u, 256u}) {
        Service s(shape_of(SERVAL_PROTOCOL_DOORBELL, 1));
        s.start("lenet", threads);
        std::vector<uint8_t> image(784), answer;
        check::Random random(threads);
        for (int n = 0; n < 50; n++) {
            random.fill(image.data(), image.size());
            CHECK(s.ask(0, image.data(), 784, answer));
            CHECK_EQ(answer.size(), 44);
            float host[10], gpu[10];
            serval_lenet::infer(0, 1, [] {}, image.data(), host, scratch);
            std::memcpy(gpu, answer.data() + 4, sizeof gpu);
            for (int i = 0; i < 10; i++) CHECK(host[i] - gpu[i] < 1e-3f && gpu[i] - host[i] < 1e-3f);
            CHECK_EQ(answer[0], serval_lenet::digit(gpu));
        }
        s.stop(SERVAL_STOP_NOW);
        s.join();
    }
}

TEST(gpu_faces_asks_its_backend) {
    static serval_faces::Scratch scratch;
    // Requests and answers in slots, as the engine has them, and in arenas.
    for (unsigned inline_bytes : {SERVAL_INLINE_BYTES_MAX, 1024u}) {
        Shape shape = shape_of(SERVAL_PROTOCOL_DOORBELL, 2);
        shape.backends = 1;
        if (inline_bytes < 1100) {
            shape.inline_bytes = inline_bytes;
            shape.len_max = 1100;
            shape.arena_bytes = 16384;
        }
        Service s(shape);
        s.start("faces", 256);
        Producer db_rx = s.region.producer(3, false);  // of the second block
        Consumer db_tx = s.region.consumer(3, true);
        check::Random random(4);
        std::string face(1024, '\0'), stored(1024, '\0');
        std::vector<uint8_t> query, answer;
        for (int n = 0; n < 20; n++) {
            random.fill(&face[0], 1024);
            stored = face;
            for (int i = 0; i < n * 20; i++) stored[random.below(1024)] = static_cast<char>(random.next());
            std::string request = "label-label-" + face;
            CHECK(send(s.rx[1], message(1, 1036), request.data()));
            while (s.alive() && recv(db_tx, query) != Look::FOUND) {
            }
            CHECK_EQ(query.size(), 38);
            std::string key(query.begin() + 3, query.end() - 6);
            CHECK(key == "face:6c6162656c2d6c6162656c2d");
            std::string text = n == 7 ? "EN\r\n" : "VA 1024 k" + key + "\r\n" + stored + "\r\n";
            Header h = message(0, static_cast<uint32_t>(text.size()));
            h.tag = db_tx.message.tag;
            CHECK(send(db_rx, h, text.data()));
            while (s.alive() && recv(s.tx[1], answer) != Look::FOUND) {
            }
            CHECK_EQ(answer.size(), 8);
            uint32_t verdict;
            float distance;
            std::memcpy(&verdict, answer.data(), 4);
            std::memcpy(&distance, answer.data() + 4, 4);
            auto want = serval_faces::verify(0, 1, [] {}, reinterpret_cast<const uint8_t*>(face.data()),
                                             reinterpret_cast<const uint8_t*>(stored.data()), serval_faces::DEFAULT_THRESHOLD, scratch);
            CHECK_EQ(verdict, n == 7 ? 2 : want.match ? 1 : 0);
            CHECK(distance == (n == 7 ? 0 : want.distance));
        }
        s.stop(SERVAL_STOP_DRAIN);
        s.join();
        CHECK_EQ(s.region.block(1)->sent, 20);
    }
}

#include "gpu_sockets.h"

int main(int argc, char** argv) {
    if (argc < 3) return std::printf("usage: gpu_test DIRECTORY ARCH [CASE]\n"), 2;
    directory = argv[1];
    suffix = std::string(".") + argv[2] + ".cubin";
    Driver d;
    driver = &d;
    return check::run_all(argc - 2, argv + 2);
}
