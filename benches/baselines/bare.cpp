// A function in a plain loop on one core: an upper bound for any server that computes it on that core.
//
// Every call has a different input (the committed pictures in turn; messages of a pool that is larger than
// the L1 cache) and its result is used. Prints one JSON object.
#include "functions.h"
#include "pictures.h"

namespace {

const char HELP[] =
    "usage: bare [FLAGS]   calls a function repeatedly on one core\n"
    "  --function F       lenet, faces or echo (lenet)\n"
    "  --seconds N        duration, 1..600 (2)\n"
    "  --bytes N          echo: length of a message, 1..65507 (64)\n"
    "  --core N           run on this core (not pinned)\n";

// Keeps the compiler from optimising `value` away.
template <class T>
void use(T const& value) {
    asm volatile("" : : "g"(&value) : "memory");
}

// Calls `call(i)` for `seconds` after a tenth of that; prints the rate.
template <class Call>
int measure(const std::string& name, long seconds, Call call) {
    uint64_t calls = 0;
    const auto run = [&](uint64_t ns) {
        const uint64_t start = now_ns(), first = calls;
        uint64_t now = start;
        for (; now - start < ns && going(); now = now_ns())
            for (int i = 0; i < 64; i++) call(calls++);
        return double(now - start) / double(calls - first);
    };
    run(uint64_t(seconds) * 100'000'000);
    const double ns = run(uint64_t(seconds) * 1'000'000'000);
    std::printf("{\"function\":\"%s\",\"rate\":%.1f,\"ns_per_call\":%.2f}\n", name.c_str(), 1e9 / ns, ns);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const std::vector<std::string> names = {"lenet", "faces", "echo"};
    enum { LENET, FACES, ECHO };
    const size_t function = flags.choice("--function", names);
    const long seconds = flags.number("--seconds", 2, 1, 600);
    const uint32_t bytes = uint32_t(flags.number("--bytes", 64, 1, 65507));
    const auto cores = flags.cores("--core");
    flags.end();
    if (cores.size() > 1) misused("--core takes one core");
    stop_on_signals();
    if (!cores.empty()) pin(cores[0]);
    if (function == LENET) {
        Pictures digits(MODELS "/digits_heldout.bin", "SVDIGIT1", 1 + serval_lenet::INPUT_BYTES);
        LeNet lenet;
        uint8_t out[OUT_BYTES];
        return measure(names[function], seconds, [&](uint64_t i) {
            use(lenet(digits.record(i % digits.count) + 1, serval_lenet::INPUT_BYTES, out));
            use(out);
        });
    }
    if (function == FACES) {
        Pictures faces(MODELS "/faces_demo.bin", "SVFACES1", 12 + 2048, true);
        serval_faces::Scratch scratch;
        return measure(names[function], seconds, [&](uint64_t i) {
            const uint8_t* stored = faces.record(i % faces.count) + 12;
            const uint8_t* probe = faces.record(i * 7 % faces.count) + 12 + 1024;
            use(serval_faces::verify(0, 1, [] {}, probe, stored, serval_faces::DEFAULT_THRESHOLD, scratch));
        });
    }
    // A message is at a different address each time and is copied to its reply, as a kernel does.
    const uint64_t pool = (1 << 20) / bytes;
    std::vector<uint8_t> messages(pool * bytes, 1), replies(pool * bytes);
    return measure(names[function], seconds, [&](uint64_t i) {
        uint8_t* reply = replies.data() + i % pool * bytes;
        memcpy(reply, messages.data() + i % pool * bytes, bytes);
        use(*reply);
    });
}
