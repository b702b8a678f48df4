// lenet.h and faces.h in a plain loop on one core: the upper bound for a service.
#include <chrono>

#include "../faces.h"
#include "../lenet.h"
#include "support.h"

namespace {

// Best of several short rounds, in calls per second: on a shared machine the other rounds measure the neighbours.
template <class Call>
double rate(Call call) {
    using Clock = std::chrono::steady_clock;
    double best = 0;
    for (int round = 0; round < 7; ++round) {
        unsigned calls = 0;
        const auto start = Clock::now();
        std::chrono::duration<double> spent{};
        while (spent.count() < 0.1) {
            for (int i = 0; i < 100; ++i) call(calls++);
            spent = Clock::now() - start;
        }
        if (calls / spent.count() > best) best = calls / spent.count();
    }
    return best;
}

void report(const char* what, double per_second) {
    std::printf("%-24s %9.0f /s %8.2f us\n", what, per_second, 1e6 / per_second);
}

}  // namespace

int main(int, char** argv) {
    const std::string folder = argv[1];
    const Records digits(folder + "/digits_heldout.bin", "SVDIGIT1", 1 + serval_lenet::INPUT_BYTES);
    const Records faces(folder + "/faces_demo.bin", "SVFACES1", 12 + 2048, true);
    static serval_lenet::Scratch lenet_scratch;
    static serval_faces::Scratch faces_scratch;
    volatile float keep = 0;

    using serval_lenet::host::Isa;
    const struct {
        Isa isa;
        const char* name;
    } variants[] = {{Isa::baseline, "lenet baseline"}, {Isa::avx2, "lenet avx2"}, {Isa::avx512, "lenet avx512"}};
    for (const auto& variant : variants)
        if (variant.isa <= serval_lenet::host::detect())
            report(variant.name, rate([&](unsigned i) {
                       float logits[serval_lenet::CLASSES];
                       serval_lenet::host::infer_with(variant.isa, digits[i % digits.count] + 1, logits, lenet_scratch);
                       keep = logits[0];
                   }));
    report("faces verify", rate([&](unsigned i) {
               const uint8_t* probe = faces[i % faces.count] + 12 + 1024;
               const uint8_t* stored = faces[i * 7 % faces.count] + 12;
               keep = serval_faces::verify(0, 1, [] {}, probe, stored, 800.0f, faces_scratch).distance;
           }));
}
