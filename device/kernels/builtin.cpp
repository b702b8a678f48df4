// The built-in kernels as one translation unit: in a static link, no registration can be left out.
#include "aes256_ctr.cpp"
#include "delay.cpp"
#include "echo.cpp"
#include "faces.cpp"
#include "lenet.cpp"
#include "matmul.cpp"
#include "scale.cpp"
#include "sockperf.cpp"
#include "spin.cpp"
#include "stream_echo.cpp"

#if !SERVAL_CUDA
// For a runtime in this program: the sink of all its blocks, for kernels of any library. Null on failure, see errno.
extern "C" void* serval_sink(uint64_t* bytes) {
    *bytes = serval::detail::SINK_BYTES;
    return serval::detail::provide_host_sink();
}
#endif
