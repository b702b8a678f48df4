// Multiplication of sealed numbers: what the isolated process does with a message. The kernel (multiply.cpp), the client (ask.cpp) and the
// baseline (benches/secure/secure_call.cpp) include it.
//
//     request  nonce 12 | ciphertext 4 or 8 | tag 16     plaintext: a number, or two (u32, little-endian)
//     answer   nonce 12 | ciphertext 8      | tag 16     plaintext: the product (u64, little-endian); one number is multiplied by FACTOR
//
// AES-256-GCM of OpenSSL's libcrypto, without additional data. A nonce is the number of a sender (u32, little-endian, below SENDERS) and a
// counter (u64, little-endian) that the sender increases with every request. The answer's nonce is the request's with the highest bit of the
// sender's number set, so the two directions never share one.
//
// Replays. An opened request is answered once: for each sender there is a window of the last WINDOW counters. What was seen, or lies before
// the window, is refused. Windows end with the process. A request that is replayed to its successor gets the bytes of its first answer once
// more, because an answer depends on nothing but its request: no nonce is ever used for two plaintexts, and a replay tells nothing new.
#ifndef SECURE_MULTIPLY_SEALED_H
#define SECURE_MULTIPLY_SEALED_H

#include <openssl/evp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace sealed {

constexpr uint32_t KEY_BYTES = 32, NONCE_BYTES = 12, TAG_BYTES = 16, COUNTER_AT = 4;
constexpr uint32_t NUMBER_BYTES = 4, PRODUCT_BYTES = 8;
constexpr uint32_t ANSWER_BYTES = NONCE_BYTES + PRODUCT_BYTES + TAG_BYTES;
constexpr uint32_t SENDERS = 1024, WINDOW = 1024, FACTOR = 3;
constexpr uint32_t ANSWERS = 0x8000'0000;

// The key is 64 hexadecimal digits in a file.
inline bool read_key(const char* path, uint8_t (&key)[KEY_BYTES]) {
    char text[2 * KEY_BYTES + 1] = {};
    std::FILE* file = std::fopen(path, "re");
    if (!file) return false;
    // No copy of the key stays behind in a buffer of the C library.
    std::setvbuf(file, nullptr, _IONBF, 0);
    bool whole = std::fread(text, 1, 2 * KEY_BYTES, file) == 2 * KEY_BYTES;
    std::fclose(file);
    for (uint32_t i = 0; whole && i < KEY_BYTES; i++) {
        unsigned byte = 0;
        int used = 0;
        whole = std::sscanf(text + 2 * i, "%2x%n", &byte, &used) == 1 && used == 2;
        key[i] = uint8_t(byte);
    }
    explicit_bzero(text, sizeof text);
    return whole;
}

// An AES-256-GCM key that seals or opens.
class Cipher {
  public:
    Cipher(const uint8_t (&key)[KEY_BYTES], bool seals) : context(EVP_CIPHER_CTX_new()), seals(seals) {
        ready = context && EVP_CipherInit_ex(context, EVP_aes_256_gcm(), nullptr, key, nullptr, seals) == 1;
    }
    Cipher(const Cipher&) = delete;
    ~Cipher() { EVP_CIPHER_CTX_free(context); }  // clears the key
    explicit operator bool() const { return ready; }
    // `tag` is written by a cipher that seals, and checked by one that opens.
    bool run(const uint8_t* nonce, const uint8_t* from, uint32_t bytes, uint8_t* to, uint8_t* tag) {
        int done = 0, rest = 0;
        if (!ready || EVP_CipherInit_ex(context, nullptr, nullptr, nullptr, nonce, -1) != 1) return false;
        if (EVP_CipherUpdate(context, to, &done, from, int(bytes)) != 1) return false;
        if (!seals && EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, TAG_BYTES, tag) != 1) return false;
        if (EVP_CipherFinal_ex(context, to + done, &rest) != 1) return false;
        return !seals || EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_GET_TAG, TAG_BYTES, tag) == 1;
    }

  private:
    EVP_CIPHER_CTX* const context;
    const bool seals;
    bool ready;
};

// Which counters of a sender were answered.
class Window {
  public:
    // Whether `counter` is new; it is seen from then on.
    bool take(uint64_t counter) {
        if (counter > newest) {
            const uint64_t steps = counter - newest;
            for (uint64_t i = 1; i <= (steps < WINDOW ? steps : WINDOW); i++) word(newest + i) &= ~bit(newest + i);
            newest = counter;
        }
        if (newest - counter >= WINDOW || (word(counter) & bit(counter))) return false;
        word(counter) |= bit(counter);
        return true;
    }

  private:
    uint64_t& word(uint64_t counter) { return words[counter % WINDOW / 64]; }
    static uint64_t bit(uint64_t counter) { return uint64_t{1} << counter % 64; }
    uint64_t newest = 0;
    uint64_t words[WINDOW / 64] = {};
};

enum class Outcome { ANSWERED, BAD_LENGTH, FORGED, REPLAYED };

// All windows of a process; one thread at a time uses them.
class Multiplier {
  public:
    explicit Multiplier(const uint8_t (&key)[KEY_BYTES]) : opens(key, false), seals(key, true) {}
    explicit operator bool() const { return opens && seals; }
    Outcome answer(const uint8_t* request, uint32_t bytes, uint8_t (&answer)[ANSWER_BYTES]) {
        constexpr uint32_t ONE = NONCE_BYTES + NUMBER_BYTES + TAG_BYTES, TWO = ONE + NUMBER_BYTES;
        if (bytes != ONE && bytes != TWO) return Outcome::BAD_LENGTH;
        const uint32_t length = bytes - NONCE_BYTES - TAG_BYTES;
        uint32_t sender, numbers[2] = {0, FACTOR};
        uint64_t counter;
        memcpy(&sender, request, sizeof sender);
        memcpy(&counter, request + COUNTER_AT, sizeof counter);
        if (sender >= SENDERS) return Outcome::FORGED;
        uint8_t tag[TAG_BYTES];
        memcpy(tag, request + NONCE_BYTES + length, TAG_BYTES);
        if (!opens.run(request, request + NONCE_BYTES, length, reinterpret_cast<uint8_t*>(numbers), tag)) return Outcome::FORGED;
        // Only holders of the key get here.
        if (!windows[sender].take(counter)) return Outcome::REPLAYED;
        const uint64_t product = uint64_t{numbers[0]} * numbers[1];
        memcpy(answer, request, NONCE_BYTES);
        sender |= ANSWERS;
        memcpy(answer, &sender, sizeof sender);
        uint8_t* to = answer + NONCE_BYTES;
        const bool sealed = seals.run(answer, reinterpret_cast<const uint8_t*>(&product), PRODUCT_BYTES, to, to + PRODUCT_BYTES);
        return sealed ? Outcome::ANSWERED : Outcome::FORGED;
    }

  private:
    Cipher opens, seals;
    Window windows[SENDERS];
};

}  // namespace sealed

#endif
