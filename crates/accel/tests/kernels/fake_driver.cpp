// A GPU driver without a GPU: the functions that the cuda accelerator uses, with host threads as blocks. Its behaviour is selected by
// its file's name, so that each test can load a copy of its own, or by the environment variable FAKE_GPU (an event "after a while"
// occurs once, when the file named after " when " exists):
//
//   small      two multiprocessors with room for one block each
//   full       no memory can be allocated
//   unpinned   the host does not pin memory
//   taken      another process has the GPU
//   faulty     kernels fault after a while
//   silent     blocks never begin
//   tardy      blocks of the second kernel that is started never begin
//   narrow     kernels have 64 threads at most
//   beside     there is a second GPU, which drives a display
//   ecc        the GPU's memory fails after a while
//   prohibited, exclusive   the GPU is in that compute mode
//   display    the GPU drives one
//   stuck      copies never end
//   agentless  the first stream, which is the copy agent's, cannot be created
//   aged       of compute capability 7.0
//   alien      kernels have no mark of this region ABI
//   unmapped   the driver maps no memory: a sink is as long as its memory
//   managed    memory is managed
//   foreign    memory belongs to another context than the primary one
//   second     memory is that of a second GPU
//
// It enforces the rules of callers, and ends a process that breaks one with a sentence. No call may wait for a running
// kernel. A kernel must get the most shared memory (cuda/occupancy.rs) before any query about its blocks and any launch.
// Copies to the GPU must be complete before a kernel starts: here they complete when they are waited for, no earlier.
// Memory and streams must not be released while a copy is in flight.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../../../device/kernels/builtin.cpp"
#include "../../../../device/tests/param_text.cpp"
#include "as_asked.h"

// Sends its backend twice as many requests as permitted, reads no answer, and computes for `params.microseconds`.
SERVAL_KERNEL(asks_and_computes) (serval::Block& block, serval::Mqueue& q) {
    const uint64_t ns = static_cast<uint64_t>(block.param("microseconds", 0) * 1000);
    while (auto msg = q.recv(block)) {
        for (int i = 0; i < 4; i++) q.backend(0).send(block, msg.as<uint8_t>(), msg.len(), 0);
        const uint64_t until = block.now_ns() + ns;
        while (block.now_ns() < until) {
        }
        while (q.backend(0).outstanding()) q.backend(0).recv(block);
        send_back(block, q, msg);
    }
}

#define EXPORT extern "C" __attribute__((visibility("default"))) int

namespace {

enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, UNAVAILABLE = 46, INVALID_CONTEXT = 201, ECC_UNCORRECTABLE = 214 };
enum { NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
constexpr int GRANULE = 4096;
constexpr int PREFERRED_SHARED_CARVEOUT = 9;  // a function attribute

bool asked_for(const char* what) {
    Dl_info self;
    const char* asked = getenv("FAKE_GPU");
    if (asked && strstr(asked, what)) return true;
    return dladdr(reinterpret_cast<void*>(&asked_for), &self) && strstr(strrchr(self.dli_fname, '/'), what);
}

// Programs with groups of ranks call from several threads.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
struct Lock {
    Lock() { pthread_mutex_lock(&mutex); }
    ~Lock() { pthread_mutex_unlock(&mutex); }
};

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    Copy* next;
};

// Host memory that is registered: copies from and to it are DMA, which no kernel holds up.
struct Registered {
    const char* base;
    size_t bytes;
    Registered* next;
};
Registered* registered = nullptr;

bool is_registered(const void* at, size_t bytes) {
    const uint64_t address = reinterpret_cast<uint64_t>(at);
    for (const Registered* r = registered; r; r = r->next) {
        const uint64_t base = reinterpret_cast<uint64_t>(r->base);
        if (address >= base && address - base <= r->bytes && bytes <= r->bytes - (address - base)) return true;
    }
    return false;
}

// Memory of the GPU.
struct Memory {
    char* base;
    size_t bytes;
    Memory* next;
};
Memory* memories = nullptr;

const Memory* memory_at(uint64_t address) {
    for (const Memory* m = memories; m; m = m->next) {
        const uint64_t base = reinterpret_cast<uint64_t>(m->base);
        if (address >= base && address - base < m->bytes) return m;
    }
    return nullptr;
}

struct Stream {
    Stream* after = nullptr;  // its copies come first
    int running = 0;   // blocks
    int queries = 0;
    Copy* copies = nullptr;  // in flight
};

int running = 0;      // blocks of all streams
int launches = 0;
int copying = 0;      // copies in flight, of all streams
int allocations = 0;  // with regions, modules and streams
int contexts = 0;     // retained

[[noreturn]] void broken(const char* function, const char* how) {
    fprintf(stderr, "%s %s\n", function, how);
    _exit(70);
}

void rule(const char* function) {
    if (__atomic_load_n(&running, __ATOMIC_ACQUIRE) != 0) broken(function, "would wait for a kernel that is running");
}

// The same for calls that release what a copy in flight may use.
void rule_of_release(const char* function) {
    rule(function);
    if (__atomic_load_n(&copying, __ATOMIC_ACQUIRE) != 0) broken(function, "came while a copy was in flight");
}

// An event after what its stream has been given.
struct Event {
    Stream* after = nullptr;
};

struct Function {
    uintptr_t entry;
    Function* next;
    int carveout = -1;
};

struct Module {
    Function* functions = nullptr;
};

// Kernels that run beside each other must all have the setting; one that runs alone may have it.
void prefers_shared_memory_beside_others(const Function* of) {
    static bool all_told = true;
    const bool beside = __atomic_load_n(&running, __ATOMIC_ACQUIRE) != 0;
    all_told = (all_told || !beside) && of->carveout == 100;
    if (beside && !all_told) broken("cuLaunchKernel", "came beside a kernel before both preferred shared memory");
}

struct Block {
    void (*entry)(const serval_block_args*);
    serval_block_args args;
    Stream* stream;
};

// A fault lasts: every later query, of any stream, finds it.
bool after_a_while(Stream* stream) {
    static bool faulted = false;
    const char* asked = getenv("FAKE_GPU");
    const char* file = asked ? strstr(asked, " when ") : nullptr;
    if (file ? unlink(file + strlen(" when ")) == 0 : stream->queries++ > 200) __atomic_store_n(&faulted, true, __ATOMIC_RELAXED);
    return __atomic_load_n(&faulted, __ATOMIC_RELAXED);
}

void pause(void*, uint32_t, uint64_t) { usleep(50); }

void* run(void* given) {
    Block* block = static_cast<Block*>(given);
    void* staging = nullptr;
    if (block->args.staging == 0) {
        // The launch's shared memory.
        if (posix_memalign(&staging, 64, block->args.staging_bytes)) abort();
        block->args.staging = reinterpret_cast<uint64_t>(staging);
    }
    block->args.wait = reinterpret_cast<uint64_t>(&pause);
    block->entry(&block->args);
    __atomic_fetch_sub(&running, 1, __ATOMIC_RELEASE);
    // The last access to the stream: a thread that sees that nothing runs on it may destroy it.
    __atomic_fetch_sub(&block->stream->running, 1, __ATOMIC_RELEASE);
    free(staging);
    delete block;
    return nullptr;
}

}  // namespace

EXPORT cuInit(unsigned) { return SUCCESS; }
EXPORT cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
EXPORT cuDeviceGetCount(int* count) { return *count = asked_for("beside") || asked_for("second") ? 2 : 1, SUCCESS; }
EXPORT cuDeviceGet(int* device, int index) { return *device = index, SUCCESS; }
EXPORT cuDeviceGetName(char* name, int bytes, int) { return snprintf(name, static_cast<size_t>(bytes), "fake GPU"), SUCCESS; }
EXPORT cuDeviceGetPCIBusId(char* id, int bytes, int) { return snprintf(id, static_cast<size_t>(bytes), "0000:65:00.0"), SUCCESS; }
EXPORT cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{1} << 30, SUCCESS; }
EXPORT cuDeviceGetAttribute(int* value, int attribute, int device) {
    switch (attribute) {
        case 16: *value = asked_for("small") ? 2 : 8; break;
        case 17: *value = device == 1 || asked_for("display"); break;
        case 19: *value = 1; break;
        case 102: *value = !asked_for("unmapped"); break;
        case 20: *value = asked_for("prohibited") ? 2 : asked_for("exclusive") ? 3 : 0; break;
        case 75: *value = asked_for("aged") ? 7 : 9; break;
        default: *value = 0;
    }
    return SUCCESS;
}
EXPORT cuDevicePrimaryCtxRetain(uintptr_t* context, int) {
    *context = 1;
    if (asked_for("taken")) return UNAVAILABLE;
    const Lock lock;
    return contexts++, SUCCESS;
}
EXPORT cuDevicePrimaryCtxRelease_v2(int) {
    rule("cuDevicePrimaryCtxRelease");
    const Lock lock;
    if (--contexts == 0 && allocations != 0) {
        fprintf(stderr, "%d things were not given back\n", allocations);
        _exit(71);
    }
    return SUCCESS;
}
static thread_local uintptr_t current = 0;
EXPORT cuCtxSetCurrent(uintptr_t context) { return current = context, SUCCESS; }
EXPORT cuCtxGetCurrent(uintptr_t* context) { return *context = current, SUCCESS; }
EXPORT cuModuleLoadData(Module** module, const void*) {
    rule("cuModuleLoadData");
    allocations++;
    return *module = new Module, SUCCESS;
}
EXPORT cuModuleUnload(Module* module) {
    rule("cuModuleUnload");
    while (Function* function = module->functions) {
        module->functions = function->next;
        delete function;
    }
    delete module;
    return allocations--, SUCCESS;
}
EXPORT cuModuleGetFunction(Function** function, Module* module, const char* name) {
    auto found = [&](uintptr_t entry) { return *function = module->functions = new Function{entry, module->functions}, SUCCESS; };
    // What all kernels of this region ABI have beside them, and those of warps.
    char mark[32];
    snprintf(mark, sizeof mark, "serval_abi_%u_", SERVAL_ABI_VERSION);
    if (!strncmp(name, mark, strlen(mark))) return asked_for("alien") ? NOT_FOUND : found(0);
    if (!strncmp(name, "serval_warps_", 13)) return strcmp(name + 13, "scale") ? NOT_FOUND : found(0);
    for (const serval_kernel_entry* e = serval_kernel_list(); e; e = reinterpret_cast<const serval_kernel_entry*>(e->next))
        if (!strcmp(reinterpret_cast<const char*>(e->name), name + strlen("serval_kernel_"))) return found(e->entry);
    return NOT_FOUND;
}
EXPORT cuFuncLoad(Function*) { return rule("cuFuncLoad"), SUCCESS; }
EXPORT cuFuncGetAttribute(int* value, int attribute, Function*) {
    return *value = attribute != 0 ? 0 : asked_for("narrow") ? 64 : 256, SUCCESS;
}
EXPORT cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (attribute != PREFERRED_SHARED_CARVEOUT) return INVALID;
    return function->carveout = value, SUCCESS;
}
EXPORT cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int, size_t) {
    return *blocks = asked_for("small") ? 1 : 32, SUCCESS;
}
EXPORT cuMemHostRegister_v2(void* base, size_t bytes, unsigned) {
    if (asked_for("unpinned")) return OUT_OF_MEMORY;
    const Lock lock;
    registered = new Registered{static_cast<const char*>(base), bytes, registered};
    return rule("cuMemHostRegister"), allocations++, SUCCESS;
}
EXPORT cuMemHostUnregister(void* base) {
    const Lock lock;
    for (Registered** at = &registered; *at; at = &(*at)->next) {
        Registered* const found = *at;
        if (found->base != base) continue;
        *at = found->next;
        delete found;
        break;
    }
    return rule_of_release("cuMemHostUnregister"), allocations--, SUCCESS;
}
EXPORT cuMemHostGetDevicePointer_v2(uint64_t* address, void* base, unsigned) { return *address = reinterpret_cast<uint64_t>(base), SUCCESS; }
EXPORT cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    rule("cuMemAlloc");
    void* memory = nullptr;
    if (asked_for("full") || posix_memalign(&memory, GRANULE, bytes)) return OUT_OF_MEMORY;
    const Lock lock;
    allocations++;
    memories = new Memory{static_cast<char*>(memory), bytes, memories};
    return *address = reinterpret_cast<uint64_t>(memory), SUCCESS;
}
EXPORT cuMemFree_v2(uint64_t address) {
    rule_of_release("cuMemFree");
    const Lock lock;
    for (Memory** at = &memories; *at; at = &(*at)->next) {
        Memory* const found = *at;
        if (reinterpret_cast<uint64_t>(found->base) != address) continue;
        *at = found->next;
        free(found->base);
        delete found;
        return allocations--, SUCCESS;
    }
    return INVALID;
}
EXPORT cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
    if (current == 0) return INVALID_CONTEXT;
    const Lock lock;
    const Memory* memory = memory_at(address);
    if (!memory) return NOT_FOUND;
    *base = reinterpret_cast<uint64_t>(memory->base);
    return *bytes = memory->bytes, SUCCESS;
}
EXPORT cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    const Lock lock;
    const bool is_ours = memory_at(address) != nullptr;
    if (!is_ours && !is_registered(reinterpret_cast<void*>(address), 1)) return INVALID;
    switch (attribute) {
        case 1: *static_cast<uintptr_t*>(value) = asked_for("foreign") ? 2 : 1; break;
        case 2: *static_cast<unsigned*>(value) = is_ours ? 2 : 1; break;
        case 8: *static_cast<unsigned*>(value) = asked_for("managed"); break;
        case 9: *static_cast<int*>(value) = asked_for("second"); break;
        default: return INVALID;
    }
    return SUCCESS;
}
// Memory that is mapped, at as many addresses as the caller likes.
EXPORT cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { return *bytes = size_t{2} << 20, SUCCESS; }
EXPORT cuMemCreate(uint64_t* handle, size_t bytes, const void*, unsigned long long) {
    rule("cuMemCreate");
    const int file = asked_for("full") ? -1 : memfd_create("fake GPU", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return OUT_OF_MEMORY;
    return allocations++, *handle = static_cast<uint64_t>(file), SUCCESS;
}
EXPORT cuMemRelease(uint64_t handle) { return rule("cuMemRelease"), close(static_cast<int>(handle)), allocations--, SUCCESS; }
EXPORT cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, unsigned long long) {
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    return allocations++, *address = reinterpret_cast<uint64_t>(at), SUCCESS;
}
EXPORT cuMemAddressFree(uint64_t address, size_t bytes) {
    return rule("cuMemAddressFree"), munmap(reinterpret_cast<void*>(address), bytes), allocations--, SUCCESS;
}
EXPORT cuMemMap(uint64_t address, size_t bytes, size_t, uint64_t handle, unsigned long long) {
    rule("cuMemMap");
    void* at = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), 0);
    return at == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
EXPORT cuMemUnmap(uint64_t, size_t) { return rule("cuMemUnmap"), SUCCESS; }
EXPORT cuMemSetAccess(uint64_t address, size_t bytes, const void*, size_t) {
    return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) ? INVALID : SUCCESS;
}
static int begin_copy(Stream* stream, void* to, const void* from, size_t bytes) {
    const Lock lock;
    stream->copies = new Copy{to, from, bytes, stream->copies};
    return __atomic_fetch_add(&copying, 1, __ATOMIC_RELAXED), SUCCESS;
}
static void end_copies(Stream* stream) {
    const Lock lock;
    if (Stream* first = stream->after) {
        stream->after = nullptr;
        while (Copy* copy = first->copies) {
            memcpy(copy->to, copy->from, copy->bytes);
            first->copies = copy->next;
            delete copy;
            __atomic_fetch_sub(&copying, 1, __ATOMIC_RELAXED);
        }
    }
    while (Copy* copy = stream->copies) {
        memcpy(copy->to, copy->from, copy->bytes);
        stream->copies = copy->next;
        delete copy;
        __atomic_fetch_sub(&copying, 1, __ATOMIC_RELAXED);
    }
}
EXPORT cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    if (!is_registered(from, bytes) || stream->running) rule("cuMemcpyHtoDAsync");
    return begin_copy(stream, reinterpret_cast<void*>(to), from, bytes);
}
EXPORT cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    if (!is_registered(to, bytes) || stream->running) rule("cuMemcpyDtoHAsync");
    return begin_copy(stream, to, reinterpret_cast<void*>(from), bytes);
}
EXPORT cuStreamSynchronize(Stream* stream) { return rule("cuStreamSynchronize"), end_copies(stream), SUCCESS; }
EXPORT cuStreamCreate(Stream** stream, unsigned) {
    static bool first = true;
    const bool fails = first && asked_for("agentless");
    first = false;
    if (fails) return OUT_OF_MEMORY;
    const Lock lock;
    return allocations++, *stream = new Stream, SUCCESS;
}
EXPORT cuStreamDestroy_v2(Stream* stream) {
    rule_of_release("cuStreamDestroy");
    const Lock lock;
    return delete stream, allocations--, SUCCESS;
}
EXPORT cuEventCreate(Event** event, unsigned) {
    const Lock lock;
    return allocations++, *event = new Event, SUCCESS;
}
// The default streams have nothing to do.
EXPORT cuEventRecord(Event* event, Stream* stream) {
    return event->after = reinterpret_cast<uintptr_t>(stream) <= 2 ? nullptr : stream, SUCCESS;
}
EXPORT cuEventDestroy_v2(Event* event) {
    const Lock lock;
    return delete event, allocations--, SUCCESS;
}
EXPORT cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    const Lock lock;
    return stream->after = event->after, SUCCESS;
}
EXPORT cuStreamQuery(Stream* stream) {
    if (asked_for("faulty") && after_a_while(stream)) return ILLEGAL_ADDRESS;
    if (asked_for("ecc") && after_a_while(stream)) return ECC_UNCORRECTABLE;
    if (stream->copies) return asked_for("stuck") ? NOT_READY : (end_copies(stream), NOT_READY);
    return __atomic_load_n(&stream->running, __ATOMIC_ACQUIRE) ? NOT_READY : SUCCESS;
}
EXPORT cuLaunchKernel(Function* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned rows, unsigned, unsigned, Stream* stream,
                      void** arguments, void**) {
    prefers_shared_memory_beside_others(function);
    if (copying != 0) broken("cuLaunchKernel", "came while a copy was in flight");
    bool begins = !asked_for("silent") && (launches++ == 0 || !asked_for("tardy"));
    const serval_block_args* args = *static_cast<const serval_block_args**>(arguments[0]);
    for (unsigned i = 0; i < blocks * rows; i++) {
        // Blocks that began before may be ending.
        __atomic_fetch_add(&stream->running, 1, __ATOMIC_RELEASE);
        __atomic_fetch_add(&running, 1, __ATOMIC_RELEASE);
        if (!begins) continue;
        pthread_t thread;
        Block* block = new Block{reinterpret_cast<void (*)(const serval_block_args*)>(function->entry), args[i], stream};
        if (pthread_create(&thread, nullptr, run, block)) abort();
        pthread_detach(thread);
    }
    return SUCCESS;
}
EXPORT cuGetErrorName(int code, const char** text) {
    *text = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == UNAVAILABLE     ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
            : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == ECC_UNCORRECTABLE ? "CUDA_ERROR_ECC_UNCORRECTABLE"
                                      : nullptr;
    return *text ? SUCCESS : INVALID;
}
EXPORT cuGetErrorString(int code, const char** text) { return cuGetErrorName(code, text); }
