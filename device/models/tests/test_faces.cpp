// faces.h against the float64 reference of tools/train/make_faces.py, and its threshold on the demo's pictures.
#include <cmath>

#include "../faces.h"
#include "support.h"

using namespace serval_faces;

namespace {

constexpr double TOLERANCE = 0.004;  // 1024 terms rounded to 2^-19, times 4

void poison(Scratch& scratch) { memset(&scratch, 0xff, sizeof scratch); }

// One thread through the public function, both pictures at the end of their pages.
float alone(const uint8_t* probe, const uint8_t* stored) {
    static Guarded guarded_probe(PICTURE_BYTES), guarded_stored(PICTURE_BYTES);
    static Scratch scratch;
    poison(scratch);
    memcpy(guarded_probe.data(), probe, PICTURE_BYTES);
    memcpy(guarded_stored.data(), stored, PICTURE_BYTES);
    return verify(0, 1, [] {}, guarded_probe.data(), guarded_stored.data(), DEFAULT_THRESHOLD, scratch).distance;
}

void codes_and_distances(const Records& golden) {
    double worst = 0;
    for (uint32_t i = 0; i < golden.count; ++i) {
        const uint8_t *probe = golden[i], *stored = probe + PICTURE_BYTES, *codes = stored + PICTURE_BYTES;
        double reference;
        memcpy(&reference, codes + PICTURE_BYTES, sizeof reference);

        Scratch scratch;
        uint8_t by_vector[PICTURE_BYTES], by_thread[PICTURE_BYTES];
        host::encode(probe, scratch.padded, by_vector);
        shared::encode(0, 1, probe, by_thread);
        for (unsigned y = 0; y < SIDE; ++y)
            for (unsigned x = 0; x < SIDE; ++x) {
                const unsigned at = detail::place(x, y), code = codes[y * SIDE + x];
                CHECK(by_vector[at] == code && by_thread[at] == code, "pair %u, pixel (%u, %u)", i, x, y);
            }

        const float distance = alone(probe, stored);
        worst = std::fmax(worst, std::fabs(distance - reference));
        CHECK(std::fabs(distance - reference) <= TOLERANCE, "pair %u: %g, reference %g", i, distance, reference);
        CHECK(distance == alone(stored, probe), "pair %u is not symmetric", i);
        CHECK(alone(probe, probe) == 0.0f, "pair %u is not at distance 0 from itself", i);
        poison(scratch);
        CHECK(distance == shared::distance(0, 1, [] {}, probe, stored, scratch), "pair %u: cooperative form differs", i);
    }
    std::printf("faces: %u pairs, worst error of the distance %.4f\n", golden.count, worst);
}

void threads_agree_with_one(const Records& golden) {
    for (unsigned size : {2u, 3u, 31u, 33u, 128u, 300u}) {
        static Scratch scratch;
        poison(scratch);
        for (uint32_t i = 0; i < golden.count; i += size < 100 ? 3 : 8) {
            const uint8_t *probe = golden[i], *stored = probe + PICTURE_BYTES;
            const float expected = alone(probe, stored);
            std::vector<Result> seen(size);
            block(size, [&](unsigned rank, auto sync) {
                for (int again = 0; again < 2; ++again)  // twice, so that reuse of the scratch is raced as well
                    seen[rank] = verify(rank, size, sync, probe, stored, DEFAULT_THRESHOLD, scratch);
            });
            for (unsigned rank = 0; rank < size; ++rank)
                CHECK(seen[rank].distance == expected && seen[rank].match == (expected <= DEFAULT_THRESHOLD),
                      "pair %u, thread %u of %u", i, rank, size);
        }
    }
    std::printf("faces blocks of 2..300 threads: the same bits as one thread\n");
}

void threshold_separates_the_demo_faces(const Records& faces) {
    constexpr unsigned STORED = LABEL_BYTES, SECOND = LABEL_BYTES + PICTURE_BYTES;
    float farthest_same = 0, nearest_other = MAX_DISTANCE;
    for (uint32_t i = 0; i < faces.count; ++i)
        for (uint32_t j = 0; j < faces.count; ++j) {
            const float distance = alone(faces[i] + SECOND, faces[j] + STORED);
            float& bound = i == j ? farthest_same : nearest_other;
            bound = i == j ? std::fmax(bound, distance) : std::fmin(bound, distance);
            CHECK(i == j || memcmp(faces[i], faces[j], LABEL_BYTES), "faces %u and %u share a label", i, j);
        }
    std::printf("faces demo: %u people, same face within %.0f, others from %.0f\n", faces.count, farthest_same, nearest_other);
    CHECK(farthest_same <= DEFAULT_THRESHOLD && nearest_other > DEFAULT_THRESHOLD, "the default threshold does not separate");
}

void threshold_is_inclusive() {
    static const uint8_t flat[PICTURE_BYTES] = {};
    uint8_t board[PICTURE_BYTES];
    for (unsigned i = 0; i < PICTURE_BYTES; ++i) board[i] = (i % SIDE + i / SIDE) % 2;
    Scratch scratch;
    const float far = alone(flat, board);
    CHECK(far > 0 && verify(0, 1, [] {}, flat, board, far, scratch).match, "equal to the threshold is a match");
    CHECK(!verify(0, 1, [] {}, flat, board, std::nextafter(far, 0.0f), scratch).match, "above the threshold is not");
    CHECK(!verify(0, 1, [] {}, flat, flat, NAN, scratch).match, "no threshold, no match");
}

}  // namespace

int main(int, char** argv) {
    const std::string folder = argv[1];
    const Records golden(folder + "/faces_golden.bin", "SVLBPCHI", 3 * PICTURE_BYTES + 8);
    const Records faces(folder + "/faces_demo.bin", "SVFACES1", LABEL_BYTES + 2 * PICTURE_BYTES, true);
    codes_and_distances(golden);
    threads_agree_with_one(golden);
    threshold_separates_the_demo_faces(faces);
    threshold_is_inclusive();
}
