/*
 * Transfers between files and sockets by a Serval engine of another process: the calling thread touches no byte.
 *
 *   file   -> [digest] -> [seal] -> socket     sv_sendfile, sv_encrypted_sendfile
 *   socket -> [digest]           -> file       sv_recvfile
 *
 * The engine is `serval serve` with a [transfer] table in its configuration; docs/transfer.md describes it. Descriptors are
 * passed to the engine, which uses them as they are: no flag, option or file position changes. While a transfer is in flight, the caller
 * must not write to the same socket (or read from it, for sv_recvfile).
 *
 * Calls return 0, or a negative error number (-ECONNREFUSED: no engine at this path). How a transfer ended is in its result.
 * A connection is for one thread at a time.
 */
#ifndef SERVAL_TRANSFER_H
#define SERVAL_TRANSFER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SV_TRANSFER_API __attribute__((visibility("default")))
#else
#define SV_TRANSFER_API
#endif

/* A connection to an engine. */
typedef struct sv_transfers sv_transfers;

/* Digests of the plain bytes: 16, 32 and 4 bytes (CRC32C is big-endian). */
enum sv_digest { SV_DIGEST_NONE = 0, SV_DIGEST_MD5 = 1, SV_DIGEST_SHA256 = 2, SV_DIGEST_CRC32C = 3 };

/* The range reaches to the end of the file, or of the stream. */
#define SV_TO_THE_END UINT64_MAX

/* A transfer. Initialise it with SV_TRANSFER_DEFAULTS. */
typedef struct sv_transfer {
    uint64_t offset;      /* first byte of the range in the file */
    uint64_t bytes;       /* length of the range, or SV_TO_THE_END */
    uint32_t digest;      /* enum sv_digest */
    uint32_t stall_ms;    /* longest time without progress; 0: 30 s */
    uint32_t deadline_ms; /* longest time in all; 0: no limit while bytes move */
    uint32_t no_wait;     /* not 0: end with a short count when the socket is full or empty; not with digest or key */
} sv_transfer;

#define SV_TRANSFER_DEFAULTS { 0, SV_TO_THE_END, SV_DIGEST_NONE, 0, 0, 0 }

/* How a transfer ended. */
typedef struct sv_transfer_result {
    uint64_t id;           /* the number that the start returned */
    int32_t error;         /* 0, or an error number such as ENOSPC, EPIPE, ECONNRESET, ETIMEDOUT, ECANCELED */
    uint32_t reason;       /* 0, or the code of the reason (docs/transfer.md lists them in this order, from 1) */
    uint64_t read;         /* bytes taken from the source */
    uint64_t written;      /* bytes that the sink has; exact, also after an error */
    uint32_t digest_bytes; /* 0 without a digest, and after an error */
    uint8_t digest[32];
    char text[168]; /* one sentence about the error, or empty */
} sv_transfer_result;

/* Connects to the engine whose transfer.socket is this path. */
SV_TRANSFER_API int sv_transfers_open(const char *path, sv_transfers **transfers);

/* Cancels the transfers in flight. */
SV_TRANSFER_API void sv_transfers_close(sv_transfers *transfers);

/* A descriptor to poll for POLLIN: sv_transfers_next has a result. */
SV_TRANSFER_API int sv_transfers_fd(const sv_transfers *transfers);

/* Start a transfer, and return at once. The result comes from sv_transfers_next. */
SV_TRANSFER_API int sv_sendfile_start(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer, uint64_t *id);
SV_TRANSFER_API int sv_encrypted_sendfile_start(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer,
                                                const uint8_t key[32], uint64_t *id);
SV_TRANSFER_API int sv_recvfile_start(sv_transfers *transfers, int file, int socket, const sv_transfer *transfer, uint64_t *id);

/*
 * The next result, in the order in which transfers end. Waits at most timeout_ms (-1: no limit) and returns -EAGAIN if
 * there is none, -EPIPE if the engine has closed the connection, -EINTR after a signal, -ECONNREFUSED if it
 * refused the connection (result->text says why).
 */
SV_TRANSFER_API int sv_transfers_next(sv_transfers *transfers, int timeout_ms, sv_transfer_result *result);

/* Ends a transfer early. Its result says how many bytes it moved. */
SV_TRANSFER_API int sv_transfers_cancel(sv_transfers *transfers, uint64_t id);

/*
 * Start a transfer and wait for its end. A signal cancels it: the result has error ECANCELED and the bytes that were moved. An engine
 * that does not answer for 20 s is given up with -ETIMEDOUT: the connection is shut down, which cancels its transfers once the engine
 * runs again, so close it and do not continue the stream on that socket. Returns 0 also if result->error is not 0.
 */
SV_TRANSFER_API int sv_sendfile(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer, sv_transfer_result *result);
SV_TRANSFER_API int sv_encrypted_sendfile(sv_transfers *transfers, int socket, int file, const sv_transfer *transfer,
                                          const uint8_t key[32], sv_transfer_result *result);
SV_TRANSFER_API int sv_recvfile(sv_transfers *transfers, int file, int socket, const sv_transfer *transfer, sv_transfer_result *result);

#ifdef __cplusplus
}
#endif
#endif
