// A library of another time: it has the interface, but another version.
#include <stdint.h>
extern "C" __attribute__((visibility("default"))) uint32_t serval_kernel_abi_version(void) { return 99; }
extern "C" __attribute__((visibility("default"))) const void* serval_kernel_list(void) { return nullptr; }
