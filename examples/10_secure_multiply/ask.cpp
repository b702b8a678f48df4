// ask HOST PORT KEYFILE [--change|--replay] A [B]: asks the service for A times B, or for A times its constant, over UDP. Prints the product, or
// `no answer` if there is none within a second. --change changes a bit of the request in flight; --replay sends it once more after the answer.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "sealed.h"

namespace {

[[noreturn]] void fail(const char* what) {
    std::perror(what);
    std::exit(2);
}

// The product in an answer to the request with this nonce.
bool open_answer(sealed::Cipher& cipher, const uint8_t* nonce, const uint8_t* answer, ssize_t bytes, uint64_t& product) {
    uint8_t expected[sealed::NONCE_BYTES], tag[sealed::TAG_BYTES];
    memcpy(expected, nonce, sizeof expected);
    expected[3] |= 0x80;
    if (bytes != sealed::ANSWER_BYTES || memcmp(answer, expected, sizeof expected) != 0) return false;
    memcpy(tag, answer + sealed::NONCE_BYTES + sealed::PRODUCT_BYTES, sizeof tag);
    return cipher.run(expected, answer + sealed::NONCE_BYTES, sealed::PRODUCT_BYTES, reinterpret_cast<uint8_t*>(&product), tag);
}

}  // namespace

int main(int argc, char** argv) {
    const bool change = argc > 4 && strcmp(argv[4], "--change") == 0, replay = argc > 4 && strcmp(argv[4], "--replay") == 0;
    char** const given = argv + (change || replay ? 5 : 4);
    const long count = argv + argc - given;
    if (count != 1 && count != 2) {
        std::fputs("usage: ask HOST PORT KEYFILE [--change|--replay] A [B]\n", stderr);
        return 2;
    }
    uint8_t key[sealed::KEY_BYTES];
    if (!sealed::read_key(argv[3], key)) fail(argv[3]);
    sealed::Cipher seals(key, true), opens(key, false);
    uint32_t numbers[2] = {};
    for (long i = 0; i < count; i++) numbers[i] = uint32_t(std::strtoul(given[i], nullptr, 10));
    const uint32_t length = sealed::NUMBER_BYTES * uint32_t(count);

    // A client without a counter on disk begins at the clock: more than it has sent when it starts again.
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint32_t sender = 0;
    const uint64_t counter = uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
    uint8_t request[sealed::NONCE_BYTES + 2 * sealed::NUMBER_BYTES + sealed::TAG_BYTES];
    memcpy(request, &sender, sizeof sender);
    memcpy(request + sealed::COUNTER_AT, &counter, sizeof counter);
    uint8_t* text = request + sealed::NONCE_BYTES;
    if (!seals.run(request, reinterpret_cast<const uint8_t*>(numbers), length, text, text + length)) fail("seal");
    if (change) text[0] ^= 1;

    const int fd = socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(uint16_t(std::atoi(argv[2])));
    const timeval limit = {1, 0};
    if (fd < 0 || inet_pton(AF_INET, argv[1], &to.sin_addr) != 1 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit)) fail("socket");
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to)) fail("connect");
    uint8_t answer[64];
    uint64_t product;
    for (int left = replay ? 2 : 1; left > 0; left--) {
        const size_t bytes = sealed::NONCE_BYTES + length + sealed::TAG_BYTES;
        if (send(fd, request, bytes, 0) != ssize_t(bytes)) fail("send");
        if (!open_answer(opens, request, answer, recv(fd, answer, sizeof answer, 0), product)) {
            std::puts("no answer");
            return 0;
        }
    }
    std::printf("%llu\n", static_cast<unsigned long long>(product));
    return 0;
}
