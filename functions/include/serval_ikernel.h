// NICA's calls for functions on the path, over the control socket of a Serval server (docs/functions.md).
//
// An ikernel of NICA (Eran et al., USENIX ATC 2019) is here a function on the path of a service's messages. ik_create describes one, ik_attach
// attaches it to a service of a running server, ik_command reads and writes its registers on all workers, ik_detach and ik_destroy remove
// it. NICA attaches to a socket; here the service takes its place.
//
// Every call returns 0, or a negative errno: -EINVAL for an argument that cannot be, -ENOMEM, -ECONNREFUSED and others if the server cannot be
// reached, -ETIMEDOUT if it does not answer in 90 s, -EPROTO if the answer is no answer, -EREMOTEIO if the server refuses. ik_error returns the
// server's sentence. An ikernel is used by one thread at a time.
#ifndef SERVAL_IKERNEL_H
#define SERVAL_IKERNEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ik;

// What differs from the defaults of `[[service.function]]`; 0 is the default.
struct ik_attrs {
  int on_failure_open;   // 1: messages pass while the function does not work; 0: they are dropped
  uint32_t deadline_us;  // 1 to 1000000
  uint32_t memory_mib;   // 1 to 1024; of a module
};

// Describes a function: a built-in one, or the absolute path of a module, which ends in .wasm. `server` is the path of the control socket,
// `name` the function's name in the chain of its service. Nothing is sent. `attrs` may be a null pointer.
int ik_create(const char* server, const char* function, const char* name,
              const struct ik_attrs* attrs, struct ik** ik);

// Attaches it to a service, in place of the function with its name, or at the end of the chain. -EALREADY: it is attached.
int ik_attach(struct ik* ik, const char* service);

enum ik_operation {
  IK_READ,   // reads the register into *value
  IK_WRITE,  // writes *value, then reads the register into it
  IK_RESET,  // resets all registers that are no settings, then reads the register into *value
};

// Commands a function that is attached; the values of all workers are merged. -ENOENT: it has no such register. -ENOTCONN: it is not attached.
int ik_command(struct ik* ik, enum ik_operation operation, const char* reg, uint64_t* value);

// Detaches it. -ENOTCONN: it is not attached.
int ik_detach(struct ik* ik);

// Detaches it if it is attached, and frees it, also after an error. A null pointer is ignored.
int ik_destroy(struct ik* ik);

// The server's sentence about the last call that returned -EREMOTEIO; otherwise an empty string. Valid until the next call.
const char* ik_error(const struct ik* ik);

#ifdef __cplusplus
}
#endif

#endif
