// Every header that a kernel may include with all compilers, and a use of each.
#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <array>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include <serval/kernel.h>

struct Pair {
    char first;
    uint32_t second;
};
static_assert(offsetof(Pair, second) == 4 && UINT32_MAX == 4294967295u, "a constant");
static_assert(std::is_same<std::uint8_t, uint8_t>::value && std::is_same<std::size_t, size_t>::value, "the same");
static_assert(std::numeric_limits<int>::max() == INT_MAX, "the same");

SERVAL_KERNEL(headers)(serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        assert(msg.len() > 1);
        auto reply = q.reply(block, msg, 16);
        if (block.rank() == 0) {
            const float root = sqrtf(2.0f) + std::sqrt(3.0f) + std::get<0>(std::array<float, 1>{4.0f});
            memcpy(reply.as<char>(), &root, sizeof root);
            std::memcpy(reply.as<char>() + 4, &root, sizeof root);
            __builtin_memcpy(reply.as<char>() + 8, &root, sizeof root);
            memset(reply.as<char>() + 12, 1, 4);
            if (msg.len() == 2) printf("%d\n", static_cast<int>(root));
        }
        q.send(block, reply);
    }
}
