// Transfers between files, shared memory and sockets by a Serval engine of another process: the
// calling thread touches no byte.
//
//   file   -> [digest] -> [seal] -> socket                       sv_sendfile, sv_encrypted_sendfile
//   socket -> [digest]           -> file                         sv_recvfile
//   any    -> [open] -> [expand] -> [compress] -> [seal] -> any   sv_pipeline, with digests between
//
// The engine is `serval serve` with a [transfer] table in its configuration; docs/transfer.md
// describes it. Descriptors are passed to the engine, which uses them as they are: no flag, option
// or file position changes. While a transfer is in flight, the caller must not write to the same
// socket (or read from it, for sv_recvfile).
//
// Calls return 0, or a negative error number (-ECONNREFUSED: no engine at this path). How a
// transfer ended is in its result. A connection is for one thread at a time.
#ifndef SERVAL_TRANSFER_H
#define SERVAL_TRANSFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SV_TRANSFER_API __attribute__((visibility("default")))
#else
#define SV_TRANSFER_API
#endif

// A connection to an engine.
typedef struct sv_transfers sv_transfers;

// Digests (enum sv_digest) have 16 (MD5), 20 (SHA-1), 32 (SHA-256) or 4 bytes (CRC32C, big-endian).
// A stream sealed with AES-256-GCM (enum sv_cipher) that was changed or cut off does not open;
// AES-256-CTR notices no change. Formats of compressed data (enum sv_format) are RFC 1952, and
// Zstandard (RFC 8878) with windows of up to 8 MiB. A search (enum sv_search) looks for a text,
// anywhere, or for lines that match a regular expression (the syntax of the crate regex).
//
// Only the source can precede SV_STAGE_OPEN, and only the sink can follow SV_STAGE_SEAL. Bytes are
// expanded once at most, then compressed once at most. A search comes before SV_STAGE_COMPRESS.
#include "transfer_codes.h"

// No digest.
#define SV_DIGEST_NONE 0

// Stages of a transfer at most.
#define SV_STAGES_MAX 8

// Offsets that the result of a search has at most.
#define SV_OFFSETS_MAX 32

// Highest level of a compression. Those of Zstandard from 4 on take up to 24 MiB of
// transfer.memory_mib for each transfer.
#define SV_LEVEL_MAX 9

// One stage of sv_pipeline.
typedef struct sv_stage {
    uint32_t kind;        // enum sv_stage_kind
    uint32_t option;      // enum sv_digest, sv_cipher, sv_format or sv_search
    const uint8_t* key;   // 32 bytes for SV_STAGE_OPEN and SV_STAGE_SEAL, or NULL
    const char* pattern;  // SV_STAGE_SEARCH: 1 to 512 bytes, or NULL
    size_t pattern_bytes;
    uint64_t bytes_max;  // SV_STAGE_EXPAND: bytes that may come out; 0: 64 GiB
    // SV_STAGE_EXPAND: bytes out for each byte in, once a MiB has come out; 0: 100
    uint32_t ratio_max;
    // SV_STAGE_COMPRESS: 1 to SV_LEVEL_MAX; 0: 1 of gzip, 3 of Zstandard
    uint32_t level;
} sv_stage;

// The range reaches to the end of the file, or of the stream.
#define SV_TO_THE_END UINT64_MAX

// A part of a file.
typedef struct sv_range {
    int file;
    uint64_t offset;
    uint64_t bytes;  // or SV_TO_THE_END
} sv_range;

// Files of one source at most.
#define SV_FILES_MAX 8

// A transfer. Initialise it with SV_TRANSFER_DEFAULTS.
typedef struct sv_transfer {
    // first byte of the range in the file; of sv_pipeline, in the source if that is a file
    uint64_t offset;
    uint64_t bytes;        // length of the range, or SV_TO_THE_END
    uint32_t digest;       // enum sv_digest
    uint32_t stall_ms;     // longest time without progress; 0: 30 s
    uint32_t deadline_ms;  // longest time in all; 0: no limit while bytes move
    // not 0: end with a short count when the socket is full or empty; not with stages or two
    // sockets
    uint32_t no_wait;
    // not 0: succeed when what the file got is on its disk; not with a socket as sink
    uint32_t sync;
    // sv_pipeline: where the first byte goes in the sink, if that is a file
    uint64_t sink_offset;
    // sv_pipeline: files that follow the source in the stream, if that is a file
    const sv_range* more;
    uint32_t more_count;  // at most SV_FILES_MAX - 1
} sv_transfer;

#define SV_TRANSFER_DEFAULTS \
    { 0, SV_TO_THE_END, SV_DIGEST_NONE, 0, 0, 0, 0, 0, NULL, 0 }

// What a stage did.
typedef struct sv_stage_result {
    uint32_t kind;          // as in sv_stage
    uint32_t option;        // as in sv_stage
    uint32_t finished;      // not 0: all bytes went through it
    uint32_t digest_bytes;  // 0 but for a digest that finished
    uint64_t bytes;         // that went in
    uint64_t made;          // that came out
    uint8_t digest[32];
    uint64_t count;    // of a search that finished: how often
    uint32_t offsets;  // where the first ones begin, or their lines
    uint64_t offset[SV_OFFSETS_MAX];
} sv_stage_result;

// How a transfer ended.
typedef struct sv_transfer_result {
    uint64_t id;  // the number that the start returned
    // 0, or an error number such as ENOSPC, EPIPE, ECONNRESET, ETIMEDOUT, ECANCELED
    int32_t error;
    // 0, or the code of the reason: enum sv_reason
    uint32_t reason;
    uint64_t read;     // bytes taken from the source
    uint64_t written;  // bytes that the sink has; exact, also after an error
    // of the first digest; 0 without one, and after an error
    uint32_t digest_bytes;
    uint8_t digest[32];
    char text[168];   // one sentence about the error, or empty
    uint32_t stages;  // of the transfer, in their order
    sv_stage_result stage[SV_STAGES_MAX];
} sv_transfer_result;

// Connects to the engine whose transfer.socket is this path.
SV_TRANSFER_API int sv_transfers_open(const char* path, sv_transfers** transfers);

// Cancels the transfers in flight.
SV_TRANSFER_API void sv_transfers_close(sv_transfers* transfers);

// A descriptor to poll for POLLIN: sv_transfers_next has a result.
SV_TRANSFER_API int sv_transfers_fd(const sv_transfers* transfers);

// Lets the engine add 1 to an eventfd for each result of this connection, when sv_transfers_next
// has it; also for those that a call below waits for. A program with a loop of its own can give one
// eventfd to several connections. It replaces an earlier one, which may count transfers that have
// been started before. The caller may close it. -EINVAL: it is no eventfd, or was made without
// EFD_NONBLOCK. -EPERM: the engine runs as another user, and this program not as root; then poll
// sv_transfers_fd.
SV_TRANSFER_API int sv_transfers_signal(sv_transfers* transfers, int eventfd);

// Start a transfer, and return at once. The result comes from sv_transfers_next.
SV_TRANSFER_API int sv_sendfile_start(sv_transfers* transfers, int socket, int file,
                                      const sv_transfer* transfer, uint64_t* id);
SV_TRANSFER_API int sv_encrypted_sendfile_start(sv_transfers* transfers, int socket, int file,
                                                const sv_transfer* transfer, const uint8_t key[32],
                                                uint64_t* id);
SV_TRANSFER_API int sv_recvfile_start(sv_transfers* transfers, int file, int socket,
                                      const sv_transfer* transfer, uint64_t* id);

// From a file, shared memory (memfd_create, shm_open) or a connected stream socket through up to
// SV_STAGES_MAX stages to another one. -EINVAL: a stage has a value without a meaning. A wrong
// order of stages is a result with error EINVAL and the reason in its text.
SV_TRANSFER_API int sv_pipeline_start(sv_transfers* transfers, int source, int sink,
                                      const sv_transfer* transfer, const sv_stage* stages,
                                      unsigned count, uint64_t* id);

// The next result, in the order in which transfers end. Waits at most timeout_ms (-1: no limit) and
// returns -EAGAIN if there is none, -EPIPE if the engine has closed the connection, -EINTR after a
// signal, -ECONNREFUSED if it refused the connection (result->text says why).
SV_TRANSFER_API int sv_transfers_next(sv_transfers* transfers, int timeout_ms,
                                      sv_transfer_result* result);

// Called with a result, which it may keep a copy of. It may start and cancel transfers, and must
// not close the connection.
typedef void (*sv_transfer_done)(void* user, const sv_transfer_result* result);

// Calls `done` for each result that is there, after waiting for the first one as sv_transfers_next
// does: with sv_transfers_fd in an event loop (timeout_ms 0), or in a loop of its own (-1). Returns
// how many results there were, or the error number of sv_transfers_next if there was none.
SV_TRANSFER_API int sv_transfers_dispatch(sv_transfers* transfers, int timeout_ms,
                                          sv_transfer_done done, void* user);

// Ends a transfer early. Its result says how many bytes it moved.
SV_TRANSFER_API int sv_transfers_cancel(sv_transfers* transfers, uint64_t id);

// Start a transfer and wait for its end. A signal cancels it: the result has error ECANCELED and
// the bytes that were moved. An engine that does not answer for 20 s is given up with -ETIMEDOUT:
// the connection is shut down, which cancels its transfers once the engine runs again, so close it
// and do not continue the stream on that socket. Returns 0 also if result->error is not 0.
SV_TRANSFER_API int sv_sendfile(sv_transfers* transfers, int socket, int file,
                                const sv_transfer* transfer, sv_transfer_result* result);
SV_TRANSFER_API int sv_encrypted_sendfile(sv_transfers* transfers, int socket, int file,
                                          const sv_transfer* transfer, const uint8_t key[32],
                                          sv_transfer_result* result);
SV_TRANSFER_API int sv_recvfile(sv_transfers* transfers, int file, int socket,
                                const sv_transfer* transfer, sv_transfer_result* result);
SV_TRANSFER_API int sv_pipeline(sv_transfers* transfers, int source, int sink,
                                const sv_transfer* transfer, const sv_stage* stages, unsigned count,
                                sv_transfer_result* result);

// A file that is whole, or absent. sv_file_create returns a descriptor of an empty file without a
// name in the folder of `path`: it goes away with its last descriptor, also after kill -9. After a
// transfer to it has succeeded, sv_file_commit gives it the name `path`. Without `replace` it fails
// with -EEXIST if the name is in use; with it a file of that name is replaced. `sync`: return when
// the name is on the disk. -EOPNOTSUPP: the file system has no files without a name.
SV_TRANSFER_API int sv_file_create(const char* path);
SV_TRANSFER_API int sv_file_commit(int file, const char* path, int replace, int sync);

#ifdef __cplusplus
}
#endif
#endif
