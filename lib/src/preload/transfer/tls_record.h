// TLS records of one direction of a connection. They are sealed with the libcrypto that the program
// has loaded.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// RFC 8446 and RFC 5246: the most plain bytes of a record, and the most bytes that a record adds to
// them: a header, a nonce or a type, a tag.
#define TLS_PLAIN_MAX ((size_t)16384)
#define TLS_ADDED_MAX ((size_t)5 + 8 + 16)
#define TLS_RECORD_MAX (TLS_PLAIN_MAX + TLS_ADDED_MAX)

enum { TLS_HANDSHAKE = 22, TLS_DATA = 23 };

// The functions of libcrypto 3. Their types are opaque here, so no header of OpenSSL is needed.
struct tls_crypto {
    void* (*context_new)(void);
    void (*context_free)(void*);
    int (*context_ctrl)(void*, int, int, void*);
    int (*init)(void*, const void*, void*, const unsigned char*, const unsigned char*);
    int (*update)(void*, unsigned char*, int*, const unsigned char*, int);
    int (*final)(void*, unsigned char*, int*);
    const void* (*aes_128_gcm)(void);
    const void* (*aes_256_gcm)(void);
    const void* (*chacha20_poly1305)(void);
};

struct tls_keys {
    const struct tls_crypto* crypto;
    // Has the key.
    void* context;
    bool is_13, has_explicit_nonce;
    uint8_t iv[12];
    // Of the next record.
    uint64_t number;
    // The nonce that a record carries is its number plus this.
    uint64_t nonce_from;
};

// Finds the functions in a loaded library (a handle of dlopen, and its address), and not in those
// that it needs. False: it is no libcrypto 3.
bool tls_crypto_find(struct tls_crypto* crypto, void* library, const void* base);
// Takes what setsockopt(SOL_TLS, TLS_TX) gets. False: the version, the cipher or the length is
// unknown; `keys` is as it was.
bool tls_keys_set(struct tls_keys* keys, const struct tls_crypto* crypto, const void* info,
                  size_t len);
void tls_keys_clear(struct tls_keys* keys);
// The bytes of a record before its plain bytes, and after them.
size_t tls_head_bytes(const struct tls_keys* keys);
size_t tls_tail_bytes(const struct tls_keys* keys);
// Makes the next record of up to TLS_PLAIN_MAX bytes. `plain` is anywhere, or already at its place
// in the record, tls_head_bytes behind its begin. Returns the length of the record; 0: it cannot be
// sealed, and no byte of it may be sent.
size_t tls_seal(struct tls_keys* keys, uint8_t type, const uint8_t* plain, size_t len,
                uint8_t* record);
