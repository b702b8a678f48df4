// lenet.h and faces.h on a GPU against the host forms: the same bits for any number of threads. Then the rate of one GPU
// in a plain loop over pictures in its memory.
#include <cmath>

#include "../faces.h"
#include "../lenet.h"
#include "cuda_peer.h"
#include "support.h"

#define CUDA(call)                                                                        \
    do {                                                                                  \
        const cudaError_t error = (call);                                                 \
        CHECK(error == cudaSuccess, "%s", cudaGetErrorString(error));                      \
    } while (0)

namespace {

__global__ void infer_all(const uint8_t* images, unsigned count, unsigned total, float* logits) {
    __shared__ serval_lenet::Scratch scratch;
    for (unsigned i = blockIdx.x; i < total; i += gridDim.x)
        serval_lenet::infer(threadIdx.x, blockDim.x, [] { __syncthreads(); }, images + i % count * serval_lenet::INPUT_BYTES,
                            logits + i % count * serval_lenet::CLASSES, scratch);
}

__global__ void verify_all(const uint8_t* pairs, unsigned count, unsigned total, serval_faces::Result* results) {
    __shared__ serval_faces::Scratch scratch;
    for (unsigned i = blockIdx.x; i < total; i += gridDim.x) {
        const uint8_t* probe = pairs + i % count * 2 * serval_faces::PICTURE_BYTES;
        const auto result = serval_faces::verify(threadIdx.x, blockDim.x, [] { __syncthreads(); }, probe,
                                                 probe + serval_faces::PICTURE_BYTES, serval_faces::DEFAULT_THRESHOLD, scratch);
        if (threadIdx.x == blockDim.x - 1) results[i % count] = result;
    }
}

template <class T>
T* device_array(const std::vector<T>& values) {
    T* array;
    CUDA(cudaMalloc(&array, values.size() * sizeof(T)));
    CUDA(cudaMemcpy(array, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return array;
}

template <class T>
std::vector<T> fetch(const T* array, size_t count) {
    std::vector<T> values(count);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(values.data(), array, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

template <class Launch>
double seconds(Launch launch) {
    cudaEvent_t start, end;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
    launch();
    CUDA(cudaEventRecord(start));
    launch();
    CUDA(cudaEventRecord(end));
    CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CUDA(cudaEventElapsedTime(&ms, start, end));
    return ms / 1e3;
}

void lenet(const Records& golden) {
    std::vector<uint8_t> images;
    for (uint32_t i = 0; i < golden.count; ++i) images.insert(images.end(), golden[i], golden[i] + serval_lenet::INPUT_BYTES);
    const uint8_t* on_gpu = device_array(images);
    float* logits = device_array(std::vector<float>(golden.count * serval_lenet::CLASSES));
    for (unsigned threads : {1u, 32u, 96u, 128u, 199u, 256u, 512u, 1024u}) {
        CUDA(cudaMemset(logits, 0xff, golden.count * serval_lenet::CLASSES * 4));
        infer_all<<<7, threads>>>(on_gpu, golden.count, golden.count, logits);
        CUDA(cudaGetLastError());
        const auto got = fetch(logits, golden.count * serval_lenet::CLASSES);
        for (uint32_t i = 0; i < golden.count; ++i) {
            float expected[serval_lenet::CLASSES];
            peer::logits(golden[i], expected);
            for (unsigned k = 0; k < serval_lenet::CLASSES; ++k) {
                const float value = got[i * serval_lenet::CLASSES + k], bound = 1e-4f * std::fmax(1.0f, std::fabs(expected[k]));
                CHECK(peer::fused() ? value == expected[k] : std::fabs(value - expected[k]) <= bound,
                      "picture %u, logit %u, %u threads: %.9g, host %.9g", i, k, threads, value, expected[k]);
            }
        }
    }
    std::printf("lenet on the GPU: %u pictures, blocks of 1..1024 threads, %s\n", golden.count,
                peer::fused() ? "the same bits as the host" : "within 1e-4 of the host");
    for (unsigned threads : {64u, 128u, 256u})
        for (unsigned blocks : {1u, 132u, 528u}) {
            const unsigned total = 2000 * blocks;
            const double s = seconds([&] { infer_all<<<blocks, threads>>>(on_gpu, golden.count, total, logits); });
            std::printf("  %4u blocks of %3u: %10.0f /s, %6.2f us a picture and block\n", blocks, threads, total / s, s / 2000 * 1e6);
        }
}

void faces(const Records& golden) {
    std::vector<uint8_t> pairs;
    for (uint32_t i = 0; i < golden.count; ++i) pairs.insert(pairs.end(), golden[i], golden[i] + 2 * serval_faces::PICTURE_BYTES);
    const uint8_t* on_gpu = device_array(pairs);
    auto* results = device_array(std::vector<serval_faces::Result>(golden.count));
    for (unsigned threads : {1u, 31u, 32u, 33u, 128u, 256u, 1024u}) {
        CUDA(cudaMemset(results, 0xff, golden.count * sizeof(serval_faces::Result)));
        verify_all<<<3, threads>>>(on_gpu, golden.count, golden.count, results);
        CUDA(cudaGetLastError());
        const auto got = fetch(results, golden.count);
        for (uint32_t i = 0; i < golden.count; ++i) {
            const float expected = peer::distance(golden[i], golden[i] + serval_faces::PICTURE_BYTES);
            CHECK(got[i].distance == expected && got[i].match == (expected <= serval_faces::DEFAULT_THRESHOLD),
                  "pair %u, %u threads: %.9g, host %.9g", i, threads, got[i].distance, expected);
        }
    }
    std::printf("faces on the GPU: %u pairs, blocks of 1..1024 threads, the same bits as the host\n", golden.count);
    for (unsigned threads : {64u, 128u, 256u})
        for (unsigned blocks : {1u, 132u, 528u}) {
            const unsigned total = 2000 * blocks;
            const double s = seconds([&] { verify_all<<<blocks, threads>>>(on_gpu, golden.count, total, results); });
            std::printf("  %4u blocks of %3u: %10.0f /s, %6.2f us a pair and block\n", blocks, threads, total / s, s / 2000 * 1e6);
        }
}

}  // namespace

int main(int, char** argv) {
    const std::string folder = argv[1];
    lenet(Records(folder + "/lenet_golden.bin", "SVLENET1", serval_lenet::INPUT_BYTES + 8 * serval_lenet::CLASSES));
    faces(Records(folder + "/faces_golden.bin", "SVLBPCHI", 3 * serval_faces::PICTURE_BYTES + 8));
}
