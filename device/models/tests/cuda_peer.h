// The host forms of lenet.h and faces.h for the CUDA test; nvcc must not compile them itself.
#ifndef SERVAL_MODELS_TESTS_CUDA_PEER_H
#define SERVAL_MODELS_TESTS_CUDA_PEER_H

#include <cstdint>

namespace peer {
bool fused();  // true if this CPU multiplies and adds with one rounding, as a GPU does
void logits(const uint8_t* image, float* out);
float distance(const uint8_t* probe, const uint8_t* stored);
}  // namespace peer

#endif
