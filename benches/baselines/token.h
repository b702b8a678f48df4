// What a CoAP server does to authenticate a request as `coap-auth` of Serval does: the token in a CBOR map, a JSON Web Token signed with
// HS256, its signature and its times. OpenSSL has the hash; the key is set up once.
#ifndef SERVAL_BASELINES_TOKEN_H
#define SERVAL_BASELINES_TOKEN_H

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>

#include "contract.h"

// A part of a message.
struct Text {
    const uint8_t* at = nullptr;
    size_t bytes = 0;
    bool is(const char* word) const { return bytes == std::strlen(word) && !std::memcmp(at, word, bytes); }
};

// Reads the head of a CBOR item of definite length: its type, and its argument.
inline bool cbor_head(Text& rest, unsigned& major, uint64_t& argument) {
    if (!rest.bytes) return false;
    major = rest.at[0] >> 5, argument = rest.at[0] & 31;
    rest.at++, rest.bytes--;
    if (argument < 24) return true;
    if (argument > 27) return false;
    const size_t size = size_t(1) << (argument - 24);
    if (rest.bytes < size) return false;
    argument = 0;
    for (size_t i = 0; i < size; i++) argument = argument << 8 | rest.at[i];
    rest.at += size, rest.bytes -= size;
    return true;
}

// A text or bytes.
inline bool cbor_text(Text& rest, Text& text) {
    unsigned major;
    uint64_t bytes;
    if (!cbor_head(rest, major, bytes) || (major != 2 && major != 3) || bytes > rest.bytes) return false;
    text = {rest.at, size_t(bytes)};
    rest.at += bytes, rest.bytes -= bytes;
    return true;
}

// The value of "token" in a map of texts.
inline bool token_of(Text payload, Text& token) {
    unsigned major;
    uint64_t pairs;
    bool found = false;
    if (!cbor_head(payload, major, pairs) || major != 5) return false;
    for (; pairs; pairs--) {
        Text key, value;
        if (!cbor_text(payload, key) || !cbor_text(payload, value)) return false;
        if (!key.is("token")) continue;
        if (found) return false;
        found = true, token = value;
    }
    return found && !payload.bytes;
}

// Decodes base64url without padding.
inline bool decode(Text text, uint8_t* into, size_t room, size_t& bytes) {
    static const std::vector<int8_t> values = [] {
        std::vector<int8_t> made(256, -1);
        const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        for (int i = 0; i < 64; i++) made[uint8_t(letters[i])] = int8_t(i);
        return made;
    }();
    bytes = text.bytes / 4 * 3 + (text.bytes % 4 ? text.bytes % 4 - 1 : 0);
    if (text.bytes % 4 == 1 || bytes > room) return false;
    uint32_t bits = 0;
    unsigned count = 0;
    for (size_t i = 0; i < text.bytes; i++) {
        const int value = values[text.at[i]];
        if (value < 0) return false;
        bits = bits << 6 | unsigned(value), count += 6;
        if (count >= 8) count -= 8, *into++ = uint8_t(bits >> count);
    }
    return !(bits & ((1u << count) - 1));
}

// The number of a claim in a body of a flat JSON object; -1: it has none.
inline int64_t claim(const char* body, const char* name) {
    const char* at = std::strstr(body, name);
    return at ? std::strtoll(at + std::strlen(name), nullptr, 10) : -1;
}

class Verifier {
  public:
    explicit Verifier(const std::string& key) {
        size_t bytes = 0;
        uint8_t decoded[512];
        if (!decode({reinterpret_cast<const uint8_t*>(key.data()), key.size()}, decoded, sizeof decoded, bytes)) misused("--key is not in base64url");
        char digest[] = "SHA256";
        const OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0), OSSL_PARAM_construct_end()};
        EVP_MAC* mac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
        context = mac ? EVP_MAC_CTX_new(mac) : nullptr;
        if (!context || !EVP_MAC_init(context, decoded, bytes, params)) fail("set up the key");
    }

    // Whether a request with this payload may pass.
    bool accepts(Text payload) {
        Text token;
        return token_of(payload, token) && verify(token);
    }

  private:
    bool verify(Text token) {
        // {"alg":"HS256","typ":"JWT"}
        static const char HEADER[] = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.";
        const size_t header = sizeof HEADER - 1;
        if (token.bytes < header + 44 || std::memcmp(token.at, HEADER, header)) return false;
        const size_t signed_bytes = token.bytes - 44;
        if (token.at[signed_bytes] != '.') return false;
        uint8_t given[32], computed[32];
        size_t bytes = 0;
        if (!decode({token.at + signed_bytes + 1, 43}, given, sizeof given, bytes)) return false;
        // Without a key it begins again with the one that it has.
        if (!EVP_MAC_init(context, nullptr, 0, nullptr) || !EVP_MAC_update(context, token.at, signed_bytes) ||
            !EVP_MAC_final(context, computed, &bytes, sizeof computed))
            return false;
        if (CRYPTO_memcmp(given, computed, sizeof given)) return false;
        char body[2049];
        if (!decode({token.at + header, signed_bytes - header}, reinterpret_cast<uint8_t*>(body), sizeof body - 1, bytes)) return false;
        body[bytes] = 0;
        const int64_t expires = claim(body, "\"exp\":"), not_before = claim(body, "\"nbf\":"), issued = claim(body, "\"iat\":");
        timespec now;
        clock_gettime(CLOCK_REALTIME_COARSE, &now);
        return (expires < 0 || now.tv_sec < expires + LEEWAY_S) && not_before <= now.tv_sec + LEEWAY_S && issued <= now.tv_sec + LEEWAY_S;
    }

    static constexpr int64_t LEEWAY_S = 60;
    EVP_MAC_CTX* context;
};

#endif
