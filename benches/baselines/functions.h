// The functions that the baselines serve. Their code is the same as, or included by, Serval's kernels.
//
// A function gets a message and may modify it; `out` has room for OUT_BYTES. It returns the address and length of the reply;
// null if there is none (a message of a wrong length).
#ifndef SERVAL_BASELINES_FUNCTIONS_H
#define SERVAL_BASELINES_FUNCTIONS_H

#include "../../device/models/lenet.h"
#include "contract.h"

constexpr uint32_t OUT_BYTES = 64;

struct Reply {
    uint8_t* at;
    uint32_t bytes;
};

struct Echo {
    Reply operator()(uint8_t* message, uint32_t bytes, uint8_t*) { return {message, bytes}; }
};

// Computes for a given time, then echoes.
struct Spin {
    uint64_t ns;
    Reply operator()(uint8_t* message, uint32_t bytes, uint8_t*) {
        for (const uint64_t until = now_ns() + ns; now_ns() < until;) {
        }
        return {message, bytes};
    }
};

struct Scale {
    Reply operator()(uint8_t* message, uint32_t bytes, uint8_t*) {
        if (bytes % 4) return {nullptr, 0};
        for (uint32_t i = 0; i < bytes; i += 4) {
            float value;
            memcpy(&value, message + i, 4);
            value *= 3.0f;
            memcpy(message + i, &value, 4);
        }
        return {message, bytes};
    }
};

struct LeNet {
    serval_lenet::Scratch scratch;
    Reply operator()(uint8_t* message, uint32_t bytes, uint8_t* out) {
        static_assert(serval_lenet::OUTPUT_BYTES + serval_lenet::NUMBER_BYTES <= OUT_BYTES);
        const bool is_numbered = bytes == serval_lenet::INPUT_BYTES + serval_lenet::NUMBER_BYTES;
        if (bytes != serval_lenet::INPUT_BYTES && !is_numbered) return {nullptr, 0};
        float logits[serval_lenet::CLASSES];
        serval_lenet::infer(0, 1, [] {}, message, logits, scratch);
        memset(out, 0, 4);
        out[0] = serval_lenet::digit(logits);
        memcpy(out + 4, logits, sizeof logits);
        if (!is_numbered) return {out, serval_lenet::OUTPUT_BYTES};
        memcpy(out + serval_lenet::OUTPUT_BYTES, message + serval_lenet::INPUT_BYTES, serval_lenet::NUMBER_BYTES);
        return {out, serval_lenet::OUTPUT_BYTES + serval_lenet::NUMBER_BYTES};
    }
};

// Like sockperf's own server: a client's message that requests an answer is returned without the client mark.
struct Sockperf {
    Reply operator()(uint8_t* message, uint32_t bytes, uint8_t*) {
        const uint8_t* m = message;
        if (bytes < 14 || (uint32_t{m[10]} << 24 | uint32_t{m[11]} << 16 | uint32_t{m[12]} << 8 | m[13]) != bytes) return {nullptr, 0};
        if ((m[9] & 7) != 3) return {nullptr, 0};
        message[9] &= 0xfe;
        return {message, bytes};
    }
};

constexpr const char* FUNCTION_NAMES = "echo, lenet, scale, sockperf or spin:MICROSECONDS";

// Calls `serve` with a factory for the named function: each thread has its own.
template <class Serve>
int with_function(const std::string& name, Serve serve) {
    if (name == "echo") return serve([] { return Echo{}; });
    if (name == "lenet") return serve([] { return LeNet{}; });
    if (name == "scale") return serve([] { return Scale{}; });
    if (name == "sockperf") return serve([] { return Sockperf{}; });
    if (name.rfind("spin:", 0) == 0) {
        const uint64_t ns = uint64_t(Flags::parse("--handler spin", name.substr(5), 0, 10'000'000)) * 1000;
        return serve([ns] { return Spin{ns}; });
    }
    misused("--handler is " + std::string(FUNCTION_NAMES) + ", not `" + name + "`");
}

#endif
