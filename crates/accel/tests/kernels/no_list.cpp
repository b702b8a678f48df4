// Half a kernel library.
#include <serval/abi.h>
extern "C" __attribute__((visibility("default"))) uint32_t serval_kernel_abi_version(void) { return SERVAL_ABI_VERSION; }
