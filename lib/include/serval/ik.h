// Calls with the names that NICA's have, for functions on the path, over the control socket of a
// Serval server (docs/functions.md).
//
// An ikernel of NICA (Eran et al., USENIX ATC 2019) is here a function on the path of a service's
// messages. ik_create creates one in the server, ik_attach attaches it to a service, ik_command
// reads and writes its registers on all workers, ik_detach and ik_destroy remove it. NICA attaches
// to a socket of the application; here a service takes its place, and registers have names.
// docs/functions.md lists what differs.
//
// Every call returns 0, or a negative errno: -EINVAL for an argument that cannot be, -ENOMEM,
// -ECONNREFUSED and others if the server cannot be reached, -ECONNRESET if it has ended, -ETIMEDOUT
// if it does not answer in 90 s, -EPROTO if the answer is no answer, -EREMOTEIO if the server
// refuses; ik_error returns its sentence. An ikernel is used by one thread at a time.
//
// The function belongs to the user of the process. It ends with the process, unless `keep` is set.
// Without `keep` it also ends after -ECONNRESET, -ETIMEDOUT or another error of the connection:
// that is closed, every later call returns -ECONNRESET, and ik_destroy frees `ik`.
#ifndef SERVAL_IK_H
#define SERVAL_IK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SERVAL_IK_API __attribute__((visibility("default")))
#else
#define SERVAL_IK_API
#endif

struct ik;

// What differs from the defaults of `[[service.function]]`; 0 is the default.
struct ik_attrs {
    // 1: messages pass while the function does not work; 0: they are dropped
    int on_failure_open;
    uint32_t deadline_us;  // 1 to 1000000
    uint32_t memory_mib;   // 1 to 1024; of a module
    // 1: it stays when the process ends, until it is destroyed (`serval fn destroy NAME`)
    int keep;
    // the dictionary of a module: functions of this user that name the same one share it; a null
    // pointer: none
    const char* dictionary;
    uint32_t dictionary_kib;  // 16 to 65536
};

// Creates a function: a built-in one, or the absolute path of a module, which ends in .wasm and is
// read here. It is attached to nothing, and costs the server's workers nothing. `server` is the
// path of the control socket, `name` the function's name, which no other one has that this user has
// created. `attrs` may be a null pointer. After -EREMOTEIO ik_error(NULL) returns the server's
// sentence.
SERVAL_IK_API int ik_create(const char* server, const char* function, const char* name,
                            const struct ik_attrs* attrs, struct ik** ik);

// Attaches it to a service, at the end of its chain. -EALREADY: it is attached.
SERVAL_IK_API int ik_attach(struct ik* ik, const char* service);

enum ik_place { IK_BEFORE, IK_AFTER };

// The same, before or behind the function of the chain that is called `neighbour`.
SERVAL_IK_API int ik_attach_at(struct ik* ik, const char* service, enum ik_place place,
                               const char* neighbour);

enum ik_operation {
    IK_READ,   // reads the register into *value
    IK_WRITE,  // writes *value, then reads the register into it
    // resets all registers that are no settings, then reads the register into *value
    IK_RESET,
};

// Commands a function that is attached; the values of all workers are merged. -ENOENT: it has no
// such register. -ENOTCONN: it is not attached.
SERVAL_IK_API int ik_command(struct ik* ik, enum ik_operation operation, const char* reg,
                             uint64_t* value);

// Detaches it. It can be attached again, with the settings that it has. -ENOTCONN: it is not
// attached.
SERVAL_IK_API int ik_detach(struct ik* ik);

// Detaches it if it is attached, destroys it, and frees `ik`, also after an error. A null pointer
// is ignored.
SERVAL_IK_API int ik_destroy(struct ik* ik);

// Frees `ik` and leaves the function as it is, if it was created with `keep`; otherwise as
// ik_destroy.
SERVAL_IK_API int ik_release(struct ik* ik);

// The number by which the server knows it. No other function gets it.
SERVAL_IK_API uint64_t ik_id(const struct ik* ik);

// The server's sentence about the last call that returned -EREMOTEIO; otherwise an empty string.
// Valid until the next call. With a null pointer: about the last ik_create of this thread.
SERVAL_IK_API const char* ik_error(const struct ik* ik);

// Custom rings: requests that the function delivers are in memory that this process shares with the
// server, and reading one is no system call. Each worker of the server has a ring, in which its
// requests stay in order.

struct custom_ring;

struct custom_ring_message {
    uint32_t length;  // bytes
    uint32_t worker;  // the worker that received it
    // its number on this worker, from 0; those that are missing found no room, and were dropped as
    // ring_full
    uint64_t number;
    // 1: it was a datagram over IPv4, from this address in the byte order of the processor
    int has_client;
    uint16_t client_port;
    uint32_t client_ipv4;
};

// Gives a function, which is not attached, a ring with `entries` places for each worker, a power of
// two up to 16384, for requests of up to `message_bytes`. It replaces the one that the function
// has. The ring must be destroyed by its owner, before or after the ikernel.
SERVAL_IK_API int custom_ring_create(struct ik* ik, uint32_t entries, uint32_t message_bytes,
                                     struct custom_ring** ring);

// Reads a request, of one worker after the other, and gives its place back now or later: a quarter
// of the ring at a time, and all of them when there is no other request. -EAGAIN: there is none.
// -EMSGSIZE: it is longer than `capacity`, and stays where it is; message->length says how long it
// is. -EBADMSG: the ring is broken. A ring is used by one thread at a time.
SERVAL_IK_API int custom_ring_read(struct custom_ring* ring, void* buffer, size_t capacity,
                                   struct custom_ring_message* message);

// Sleeps until there is a request, at most `timeout_ms` (-1: without a limit). -ETIMEDOUT.
SERVAL_IK_API int custom_ring_wait(struct custom_ring* ring, int timeout_ms);

// Gives the memory back. What the function delivers later is dropped as ring_full when the ring is
// full. A null pointer is ignored.
SERVAL_IK_API void custom_ring_destroy(struct custom_ring* ring);

#ifdef __cplusplus
}
#endif

#endif
