// Allocates the memory of the first GPU down to the last MiB, prints how much is left, and holds it for a minute: emulates another program,
// for tools/gpu/check. Needs only the driver, which it loads itself.
#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace {

template <class F>
void find(void* library, F& f, const char* name) {
    f = reinterpret_cast<F>(dlsym(library, name));
    if (f) return;
    std::printf("no %s\n", name);
    _exit(2);
}

}  // namespace

int main() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return std::printf("this needs a GPU: no libcuda.so.1\n"), 2;
    int (*init)(unsigned), (*device_get)(int*, int), (*retain)(void**, int), (*set_current)(void*);
    int (*alloc)(uint64_t*, size_t), (*memory)(size_t*, size_t*);
    find(library, init, "cuInit");
    find(library, device_get, "cuDeviceGet");
    find(library, retain, "cuDevicePrimaryCtxRetain");
    find(library, set_current, "cuCtxSetCurrent");
    find(library, alloc, "cuMemAlloc_v2");
    find(library, memory, "cuMemGetInfo_v2");
    int device = 0;
    void* context = nullptr;
    const int failed = init(0) || device_get(&device, 0) || retain(&context, device) || set_current(context);
    if (failed) return std::printf("the GPU cannot be used\n"), 2;
    // All available memory, in smaller and smaller pieces.
    uint64_t taken = 0;
    for (size_t piece = size_t{64} << 30; piece >= size_t{1} << 20; piece /= 2)
        while (alloc(&taken, piece) == 0) {
        }
    size_t left = 0, all = 0;
    memory(&left, &all);
    std::printf("%zu MiB left\n", left >> 20);
    std::fflush(stdout);
    sleep(60);
    return 0;
}
