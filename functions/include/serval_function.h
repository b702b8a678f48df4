// The binary interface between Serval and a function on the path of messages (docs/functions.md).
//
// A function is a WebAssembly core module that imports nothing but what is declared here, compiled
// for wasm32:
//
//   clang --target=wasm32 -O2 -nostdlib -Wl,--no-entry -I FOLDER_OF_THIS_FILE -o mine.wasm mine.c
//
// `serval fn new mine` makes a project for it. serval_function.rs is the same for Rust.
//
// Each worker of the engine has an instance of its own. The engine calls it once for a batch of
// messages, which are in a window of the module's memory that the engine adds when the instance
// starts. A call ends within the function's deadline, or the instance is ended. After a trap, a
// missed deadline, a return value other than 0 or a wrong descriptor the instance is replaced by a
// new one.
#ifndef SERVAL_FUNCTION_H
#define SERVAL_FUNCTION_H

#ifdef __cplusplus
#define _Static_assert static_assert
extern "C" {
#endif

typedef unsigned char serval_u8;
typedef unsigned int serval_u32;
typedef unsigned long long serval_u64;

// The version of this interface: the major one, and the minor one shifted by 16 bits. A module of
// version X.Y works with engines of version X.Y and those with a later minor version.
#define SERVAL_FUNCTION_ABI (1 | 2 << 16)

// What becomes of a message.
enum serval_verdict {
    SERVAL_PASS = 0,  // it goes on: the value of every descriptor before the call
    SERVAL_DROP = 1,  // it is dropped as function_drop
    // a request is answered with `written`; a reply is replaced by it
    SERVAL_REPLY = 2,
    SERVAL_REWRITE = 3,  // `written` takes its place
    // a request goes to the mqueue with the number `argument`, over all workers
    SERVAL_STEER = 4,
    // a request goes into the ring of the application that made the function (serval/ik.h); a reply
    // passes
    SERVAL_DELIVER = 5,
};

// The descriptor of a message. The function writes all fields but `payload` and `length`, which it
// may read. Before that `argument` and `written_length` are for serval_connection.
struct serval_message {
    const serval_u8* payload;
    serval_u32 length;  // bytes
    serval_u32 verdict;
    serval_u32 argument;
    // anywhere in the module's memory, valid until the call returns
    const serval_u8* written;
    // bytes, at most the service's longest message or reply
    serval_u32 written_length;
};

_Static_assert(sizeof(struct serval_message) == 24, "compile for wasm32");

// How the values of a register on several workers become one.
enum serval_merge {
    SERVAL_SUM = 0,      // the sum, modulo 2^64
    SERVAL_MIN = 1,      // the least
    SERVAL_MAX = 2,      // the greatest
    SERVAL_SETTING = 3,  // commands and params write it on every worker
    // read from an instance into which the states of all workers were merged
    SERVAL_STATE = 4,
};

// A value that `serval fn command` reads. The name has 1 to 31 lower-case letters, digits and `_`.
struct serval_register {
    const char* name;
    serval_u32 merge;
};

// What a function has besides registers, such as a sketch: bytes of the module's memory, at most
// 512 KiB.
struct serval_state {
    const serval_u8* bytes;
    serval_u32 length;
};

#define SERVAL_EXPORT(name) __attribute__((export_name(#name), used)) name

// Defines the version of the interface. Every module has it once.
#define SERVAL_FUNCTION \
    int SERVAL_EXPORT(serval_abi)(void) { return SERVAL_FUNCTION_ABI; }

int serval_abi(void);

// What a module exports. `scratch` are `scratch_bytes` bytes that the function may use for what it
// writes; they are valid until the call returns. 0: done.
int serval_requests(struct serval_message* messages, serval_u32 count, serval_u8* scratch,
                    serval_u32 scratch_bytes);
// Optional: without it replies pass, and no call is made for them.
int serval_replies(struct serval_message* messages, serval_u32 count, serval_u8* scratch,
                   serval_u32 scratch_bytes);
// Optional, together: the registers, at most 64, followed by one without a name; the value of one;
// back to the first values.
const struct serval_register* serval_registers(void);
serval_u64 serval_read(serval_u32 index);
void serval_reset(void);
// With settings: 0, or anything else if the value cannot be used.
int serval_write(serval_u32 index, serval_u64 value);

// Optional, together: the state, valid until the next call; adds the state of another instance with
// the same settings, 0 if it is one.
const struct serval_state* serval_state(void);
int serval_merge(const serval_u8* state, serval_u32 length);

#ifdef __cplusplus
}
#endif

// The connection of a message that is a chunk of a byte stream: a number that no other connection
// of this worker has. 0: it is no chunk. Before the function writes the descriptor. Since 1.1.
static inline serval_u64 serval_connection(const struct serval_message* message) {
    return message->argument | (serval_u64)message->written_length << 32;
}

// The dictionary that the function names in the configuration: functions of one owner share it, on
// all workers, and it stays when they are replaced. Keys have up to 64 bytes, values up to 192.
// Since 1.1; a module that imports none of these needs no dictionary.
#ifdef __wasm__
#define SERVAL_IMPORT(name) __attribute__((import_module("serval"), import_name(#name)))
#ifdef __cplusplus
extern "C" {
#endif
// The length of the value, of which up to `room` bytes are copied; -1: there is no such key.
int serval_dictionary_get(const void* key, serval_u32 key_length, void* value, serval_u32 room)
    SERVAL_IMPORT(dictionary_get);
// 0; -1: it is full; -2: the key or the value is too long; -3: another worker was interrupted while
// it wrote at the same place.
int serval_dictionary_set(const void* key, serval_u32 key_length, const void* value,
                          serval_u32 value_length) SERVAL_IMPORT(dictionary_set);
// 0; -1: there is no such key; -3: as for set.
int serval_dictionary_delete(const void* key, serval_u32 key_length)
    SERVAL_IMPORT(dictionary_delete);

// The time at which the call for this batch began, in nanoseconds of the engine's monotonic clock;
// it has no relation to the time of day. Since 1.2.
serval_u64 serval_now(void) SERVAL_IMPORT(now);

// The client that sent a message, or that gets it.
struct serval_peer {
    serval_u8 address[16];  // in network byte order; of IPv4 the first four bytes
    unsigned short port;
    // 4 or 6; 0: unknown, as over shared memory, or if the connection has ended
    unsigned short family;
};
// Writes it; returns the family. `message` is a descriptor of the running call. Since 1.2.
int serval_peer(const struct serval_message* message, struct serval_peer* peer) SERVAL_IMPORT(peer);
#ifdef __cplusplus
}
#endif
#endif

// The number in the bytes at `at`, most significant byte first.
static inline serval_u32 serval_big_endian(const serval_u8* at) {
    return (serval_u32)at[0] << 24 | (serval_u32)at[1] << 16 | (serval_u32)at[2] << 8 | at[3];
}

#endif
