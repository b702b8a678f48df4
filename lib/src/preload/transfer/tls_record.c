// The record protocol of TLS 1.2 with AEAD ciphers (RFC 5246, 5288, 7905) and of TLS 1.3 (RFC 8446,
// section 5).
//
//     TLS 1.2, GCM:      type, 3, 3, length | explicit nonce (8) | ciphertext | tag (16)
//     TLS 1.2, ChaCha20: type, 3, 3, length | ciphertext | tag (16)
//     TLS 1.3:           23, 3, 3, length | ciphertext of the bytes and their type (1) | tag (16)
#define _GNU_SOURCE
#include "preload/transfer/tls_record.h"

#include <dlfcn.h>
#include <linux/tls.h>
#include <string.h>

enum { HEADER = 5, TAG = 16, NONCE = 12, EXPLICIT = 8 };
// From openssl/evp.h.
enum { CTRL_SET_IV_BYTES = 0x9, CTRL_GET_TAG = 0x10 };

static void put_u64(uint8_t* to, uint64_t value) {
    for (int i = 7; i >= 0; i--, value >>= 8) to[i] = (uint8_t)value;
}

static uint64_t get_u64(const uint8_t* from) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value = value << 8 | from[i];
    return value;
}

bool tls_crypto_find(struct tls_crypto* crypto, void* library, const void* base) {
    struct {
        const char* name;
        void* place;
    } wanted[] = {
        {"EVP_CIPHER_CTX_new", &crypto->context_new},
        {"EVP_CIPHER_CTX_free", &crypto->context_free},
        {"EVP_CIPHER_CTX_ctrl", &crypto->context_ctrl},
        {"EVP_EncryptInit_ex", &crypto->init},
        {"EVP_EncryptUpdate", &crypto->update},
        {"EVP_EncryptFinal_ex", &crypto->final},
        {"EVP_aes_128_gcm", &crypto->aes_128_gcm},
        {"EVP_aes_256_gcm", &crypto->aes_256_gcm},
        {"EVP_chacha20_poly1305", &crypto->chacha20_poly1305},
    };
    unsigned long (*version)(void);
    *(void**)&version = dlsym(library, "OpenSSL_version_num");
    if (!version || version() >> 28 != 3) return false;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void* found = dlsym(library, wanted[i].name);
        Dl_info info;
        if (!found || !dladdr(found, &info) || info.dli_fbase != base) return false;
        memcpy(wanted[i].place, &found, sizeof found);
    }
    return true;
}

bool tls_keys_set(struct tls_keys* keys, const struct tls_crypto* crypto, const void* info,
                  size_t len) {
    union {
        struct tls_crypto_info info;
        struct tls12_crypto_info_aes_gcm_128 gcm_128;
        struct tls12_crypto_info_aes_gcm_256 gcm_256;
        struct tls12_crypto_info_chacha20_poly1305 chacha20;
    } copy;
    struct tls_keys made = {.crypto = crypto};
    const void* cipher = NULL;
    const uint8_t *key = NULL, *number = NULL;
    if (len < sizeof copy.info || len > sizeof copy) return false;
    memcpy(&copy, info, len);
    made.is_13 = copy.info.version == TLS_1_3_VERSION;
    if (!made.is_13 && copy.info.version != TLS_1_2_VERSION) goto out;
    // What both kinds of AES have: a salt of 4 bytes and 8 bytes after it, which are the first
    // explicit nonce of TLS 1.2.
    if (copy.info.cipher_type == TLS_CIPHER_AES_GCM_128 && len == sizeof copy.gcm_128) {
        cipher = crypto->aes_128_gcm();
        key = copy.gcm_128.key;
        number = copy.gcm_128.rec_seq;
        memcpy(made.iv, copy.gcm_128.salt, 4);
        memcpy(made.iv + 4, copy.gcm_128.iv, EXPLICIT);
        made.has_explicit_nonce = !made.is_13;
    } else if (copy.info.cipher_type == TLS_CIPHER_AES_GCM_256 && len == sizeof copy.gcm_256) {
        cipher = crypto->aes_256_gcm();
        key = copy.gcm_256.key;
        number = copy.gcm_256.rec_seq;
        memcpy(made.iv, copy.gcm_256.salt, 4);
        memcpy(made.iv + 4, copy.gcm_256.iv, EXPLICIT);
        made.has_explicit_nonce = !made.is_13;
    } else if (copy.info.cipher_type == TLS_CIPHER_CHACHA20_POLY1305 &&
               len == sizeof copy.chacha20) {
        cipher = crypto->chacha20_poly1305();
        key = copy.chacha20.key;
        number = copy.chacha20.rec_seq;
        memcpy(made.iv, copy.chacha20.iv, NONCE);
    }
    if (!cipher) goto out;
    made.number = get_u64(number);
    if (made.has_explicit_nonce) made.nonce_from = get_u64(made.iv + 4) - made.number;
    made.context = crypto->context_new();
    if (made.context && (crypto->init(made.context, cipher, NULL, NULL, NULL) != 1 ||
                         crypto->context_ctrl(made.context, CTRL_SET_IV_BYTES, NONCE, NULL) != 1 ||
                         crypto->init(made.context, NULL, NULL, key, NULL) != 1)) {
        crypto->context_free(made.context);
        made.context = NULL;
    }
out:
    explicit_bzero(&copy, sizeof copy);
    if (!made.context) return false;
    tls_keys_clear(keys);
    *keys = made;
    explicit_bzero(&made, sizeof made);
    return true;
}

void tls_keys_clear(struct tls_keys* keys) {
    // libcrypto overwrites the key.
    if (keys->context) keys->crypto->context_free(keys->context);
    explicit_bzero(keys, sizeof *keys);
}

size_t tls_head_bytes(const struct tls_keys* keys) {
    return HEADER + (keys->has_explicit_nonce ? EXPLICIT : 0);
}

size_t tls_tail_bytes(const struct tls_keys* keys) { return TAG + (keys->is_13 ? 1 : 0); }

// The tag goes behind the bytes and, in TLS 1.3, their type.
static bool seal(struct tls_keys* keys, const uint8_t* nonce, const uint8_t* more, size_t more_len,
                 const uint8_t* type, const uint8_t* plain, size_t len, uint8_t* to) {
    const struct tls_crypto* crypto = keys->crypto;
    int made;
    if (crypto->init(keys->context, NULL, NULL, NULL, nonce) != 1 ||
        crypto->update(keys->context, NULL, &made, more, (int)more_len) != 1)
        return false;
    if (len > 0 &&
        (crypto->update(keys->context, to, &made, plain, (int)len) != 1 || made != (int)len))
        return false;
    to += len;
    if (type && (crypto->update(keys->context, to, &made, type, 1) != 1 || made != 1)) return false;
    if (type) to++;
    return crypto->final(keys->context, to, &made) == 1 && made == 0 &&
           crypto->context_ctrl(keys->context, CTRL_GET_TAG, TAG, to) == 1;
}

size_t tls_seal(struct tls_keys* keys, uint8_t type, const uint8_t* plain, size_t len,
                uint8_t* record) {
    // A number is used once. The last one is not used, so that none can follow it.
    if (!keys->context || len > TLS_PLAIN_MAX || keys->number == UINT64_MAX) return 0;
    size_t head = tls_head_bytes(keys), body = head - HEADER + len + tls_tail_bytes(keys);
    uint8_t* to = record + head;
    record[0] = keys->is_13 ? TLS_DATA : type;
    record[1] = record[2] = 3;
    record[3] = (uint8_t)(body >> 8);
    record[4] = (uint8_t)body;
    uint8_t nonce[NONCE], more[13];
    memcpy(nonce, keys->iv, NONCE);
    if (keys->has_explicit_nonce) {
        put_u64(nonce + 4, keys->nonce_from + keys->number);
        memcpy(record + HEADER, nonce + 4, EXPLICIT);
    } else {
        put_u64(nonce + 4, get_u64(nonce + 4) ^ keys->number);
    }
    size_t more_len = HEADER;
    if (keys->is_13) {
        memcpy(more, record, HEADER);
    } else {
        put_u64(more, keys->number);
        memcpy(more + 8, record, 3);
        more[11] = (uint8_t)(len >> 8);
        more[12] = (uint8_t)len;
        more_len = sizeof more;
    }
    if (!seal(keys, nonce, more, more_len, keys->is_13 ? &type : NULL, plain, len, to)) {
        explicit_bzero(record, HEADER + body);
        return 0;
    }
    keys->number++;
    return HEADER + body;
}
