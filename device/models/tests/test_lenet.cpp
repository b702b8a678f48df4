// lenet.h against the float64 reference of tools/train/train_lenet.py, in every form that this CPU supports.
#include <cmath>

#include "../lenet.h"
#include "support.h"

using namespace serval_lenet;
using host::Isa;

namespace {

struct Variant {
    Isa isa;
    const char* name;
};
const Variant VARIANTS[] = {{Isa::baseline, "baseline"}, {Isa::avx2, "avx2"}, {Isa::avx512, "avx512"}};

struct Logits {
    float at[CLASSES];
    bool operator==(const Logits& other) const { return !memcmp(at, other.at, sizeof at); }
};

// Scratch as a previous user may have left it: full of NaNs.
void poison(Scratch& scratch) { memset(&scratch, 0xff, sizeof scratch); }

// Runs `form(image, logits, scratch)` with image and logits at the end of their pages.
template <class Form>
Logits run(const uint8_t* image, Form form) {
    static Guarded guarded_image(INPUT_BYTES), guarded_logits(sizeof(Logits));
    static Scratch scratch;
    poison(scratch);
    memcpy(guarded_image.data(), image, INPUT_BYTES);
    form(guarded_image.data(), reinterpret_cast<float*>(guarded_logits.data()), scratch);
    Logits logits;
    memcpy(&logits, guarded_logits.data(), sizeof logits);
    return logits;
}

Logits run_isa(Isa isa, const uint8_t* image) {
    return run(image, [isa](const uint8_t* in, float* out, Scratch& s) { host::infer_with(isa, in, out, s); });
}

Logits run_shared_alone(const uint8_t* image) {
    return run(image, [](const uint8_t* in, float* out, Scratch& s) { shared::infer(0, 1, [] {}, in, out, s); });
}

double worst_error(const Logits& logits, const double* reference) {
    double worst = 0;
    for (unsigned i = 0; i < CLASSES; ++i)
        worst = std::fmax(worst, std::fabs(logits.at[i] - reference[i]) / std::fmax(1, std::fabs(reference[i])));
    return worst;
}

unsigned reference_digit(const double* reference) {
    unsigned best = 0;
    for (unsigned i = 1; i < CLASSES; ++i)
        if (reference[i] > reference[best]) best = i;
    return best;
}

template <class Form>
void against_reference(const char* name, const Records& golden, Form form) {
    double worst = 0;
    for (uint32_t i = 0; i < golden.count; ++i) {
        double reference[CLASSES];
        memcpy(reference, golden[i] + INPUT_BYTES, sizeof reference);
        const Logits logits = form(golden[i]);
        const double error = worst_error(logits, reference);
        CHECK(error < 1e-4, "%s: picture %u is off by %g", name, i, error);
        CHECK(digit(logits.at) == reference_digit(reference), "%s: picture %u is another digit", name, i);
        worst = std::fmax(worst, error);
    }
    std::printf("lenet %s: %u pictures, worst relative error %.1e\n", name, golden.count, worst);
}

void every_variant(const Records& golden) {
    against_reference("shared", golden, run_shared_alone);
    const Isa best = host::detect();
    for (const Variant& variant : VARIANTS) {
        if (variant.isa > best) {
            std::printf("lenet %s: NOT CHECKED, this CPU does not support it\n", variant.name);
            continue;
        }
        against_reference(variant.name, golden, [&](const uint8_t* image) { return run_isa(variant.isa, image); });
    }
    for (uint32_t i = 0; i < golden.count; ++i)
        CHECK(run_shared_alone(golden[i]) == run_isa(Isa::baseline, golden[i]), "picture %u differs by form", i);
    if (best == Isa::avx512)
        for (uint32_t i = 0; i < golden.count; ++i)
            CHECK(run_isa(Isa::avx2, golden[i]) == run_isa(Isa::avx512, golden[i]), "picture %u differs by vector width", i);
}

void infer_chooses_the_best(const Records& golden) {
    for (uint32_t i = 0; i < golden.count; ++i) {
        const Logits chosen = run(golden[i], [](const uint8_t* in, float* out, Scratch& s) { infer(0, 1, [] {}, in, out, s); });
        CHECK(chosen == run_isa(host::detect(), golden[i]), "picture %u", i);
    }
}

void threads_agree_with_one(const Records& golden) {
    for (unsigned size : {2u, 3u, 32u, 100u, 128u, 199u, 200u, 256u}) {
        static Scratch scratch;
        poison(scratch);
        for (uint32_t i = 0; i < golden.count; i += size < 100 ? 5 : 23) {
            const Logits alone = run_shared_alone(golden[i]);
            Logits together;
            std::vector<Logits> seen(size);
            block(size, [&](unsigned rank, auto sync) {
                infer(rank, size, sync, golden[i], together.at, scratch);
                seen[rank] = together;  // every thread may read all logits on return
            });
            for (unsigned rank = 0; rank < size; ++rank)
                CHECK(seen[rank] == alone, "picture %u, thread %u of %u", i, rank, size);
        }
    }
    std::printf("lenet blocks of 2..256 threads: the same bits as one thread\n");
}

void held_out_digits_are_recognised(const Records& digits) {
    unsigned right = 0;
    for (uint32_t i = 0; i < digits.count; ++i)
        right += digit(run_isa(host::detect(), digits[i] + 1).at) == digits[i][0];
    std::printf("lenet held-out digits: %u of %u right\n", right, digits.count);
    CHECK(right >= 0.985 * digits.count, "the weights are worse than documented");
}

void digit_takes_the_first_of_equals() {
    const float none[CLASSES] = {}, two[CLASSES] = {-1, 0, 3, 0, 0, 3, 0, 0, 0, 1}, last[CLASSES] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    CHECK(digit(none) == 0 && digit(two) == 2 && digit(last) == 9, "%u %u %u", digit(none), digit(two), digit(last));
}

}  // namespace

int main(int, char** argv) {
    const std::string folder = argv[1];
    const Records golden(folder + "/lenet_golden.bin", "SVLENET1", INPUT_BYTES + 8 * CLASSES);
    const Records digits(folder + "/digits_heldout.bin", "SVDIGIT1", 1 + INPUT_BYTES);
    every_variant(golden);
    infer_chooses_the_best(golden);
    threads_agree_with_one(golden);
    held_out_digits_are_recognised(digits);
    digit_takes_the_first_of_equals();
}
