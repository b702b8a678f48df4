// Estimates how many different items requests have had: the built-in function `hyperloglog` as a
// module, with hashes of 64 bits only. The states of both are the same. On a byte stream all items
// have one length, and go on from one chunk to the next; a worker may have CONNECTIONS_MAX
// connections.
//
// Flajolet et al., 2007; the estimator is algorithm 6 of Ertl, arXiv:1702.01284; the hash is
// MurmurHash3 (Appleby, public domain).
#include "serval_function.h"

SERVAL_FUNCTION

enum { ESTIMATE, ITEMS, SHORT, PRECISION, HASH_BITS, ITEM_BYTES, OFFSET, LENGTH, SEED, REGISTERS };

static const struct serval_register registers[] = {
    {"estimate", SERVAL_STATE},    {"items", SERVAL_SUM},
    {"short", SERVAL_SUM},         {"precision", SERVAL_SETTING},
    {"hash_bits", SERVAL_SETTING}, {"item_bytes", SERVAL_SETTING},
    {"offset", SERVAL_SETTING},    {"length", SERVAL_SETTING},
    {"seed", SERVAL_SETTING},      {0, 0},
};

static serval_u64 values[REGISTERS] = {[PRECISION] = 14, [HASH_BITS] = 64, [SEED] = 0xbaadf00d};

// What serval_state returns: a header and the registers of the sketch.
static struct {
    serval_u8 header[12];
    serval_u8 ranks[1 << 18];
} sketch;

enum { ITEM_BYTES_MAX = 64, CONNECTIONS_MAX = 8192 };

// What is kept of a connection between two chunks.
static struct rest {
    serval_u64 connection;  // 0: none
    serval_u32 to_skip;     // bytes at its beginning that are still to be skipped
    serval_u32 length;
    serval_u8 bytes[ITEM_BYTES_MAX];
} rests[CONNECTIONS_MAX];

static serval_u64 finish(serval_u64 h) {
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

static serval_u64 rotate(serval_u64 x, int bits) { return x << bits | x >> (64 - bits); }

// The number in up to eight bytes, least significant byte first.
static serval_u64 number(const serval_u8* at, serval_u32 bytes) {
    serval_u64 x = 0;
    for (serval_u32 i = 0; i < bytes; i++) x |= (serval_u64)at[i] << 8 * i;
    return x;
}

// The first half of MurmurHash3_x64_128.
static serval_u64 murmur(const serval_u8* at, serval_u32 length, serval_u64 seed) {
    const serval_u64 c1 = 0x87c37b91114253d5ull, c2 = 0x4cf5ad432745937full;
    serval_u64 h1 = seed, h2 = seed;
    serval_u32 rest = length;
    for (; rest >= 16; rest -= 16, at += 16) {
        h1 ^= rotate(number(at, 8) * c1, 31) * c2;
        h1 = (rotate(h1, 27) + h2) * 5 + 0x52dce729;
        h2 ^= rotate(number(at + 8, 8) * c2, 33) * c1;
        h2 = (rotate(h2, 31) + h1) * 5 + 0x38495ab5;
    }
    if (rest > 8) h2 ^= rotate(number(at + 8, rest - 8) * c2, 33) * c1;
    h1 ^= rotate(number(at, rest < 8 ? rest : 8) * c1, 31) * c2;
    h1 ^= length;
    h2 ^= length;
    h1 += h2;
    h2 += h1;
    return finish(h1) + finish(h2);
}

static void add(serval_u64 hash) {
    serval_u32 precision = (serval_u32)values[PRECISION];
    serval_u64 rest = hash << precision | 1ull << (precision - 1);
    serval_u8* rank = &sketch.ranks[hash >> (64 - precision)];
    serval_u8 found = (serval_u8)(__builtin_clzll(rest) + 1);
    if (found > *rank) *rank = found;
}

// Adds items of one length, or words.
static void add_items(const serval_u8* at, serval_u32 bytes, serval_u32 item) {
    serval_u32 word = (serval_u32)values[ITEM_BYTES];
    serval_u64 key = finish(values[SEED] | (serval_u64)word << 32);
    for (; bytes >= item; bytes -= item, at += item, values[ITEMS]++)
        add(word ? finish(number(at, word) + key) : murmur(at, item, values[SEED]));
}

static void keep(struct rest* rest, const serval_u8* at, serval_u32 bytes) {
    // Without a library there is no memcpy, which the compiler would make of this loop.
    volatile serval_u8* to = rest->bytes + rest->length;
    for (serval_u32 i = 0; i < bytes; i++) to[i] = at[i];
    rest->length += bytes;
}

static void add_chunk(serval_u64 connection, const serval_u8* at, serval_u32 bytes) {
    serval_u64 item = values[ITEM_BYTES] ? values[ITEM_BYTES] : values[LENGTH];
    // The lower half of the number is that of a place, which a worker uses again when a connection
    // is closed.
    serval_u32 place = (serval_u32)connection - 1;
    if (item < 1 || item > ITEM_BYTES_MAX || place >= CONNECTIONS_MAX) {
        values[SHORT]++;
        return;
    }
    struct rest* rest = &rests[place];
    if (rest->connection != connection) {
        rest->connection = connection;
        rest->to_skip = (serval_u32)values[OFFSET];
        rest->length = 0;
    }
    serval_u32 skipped = bytes < rest->to_skip ? bytes : rest->to_skip;
    rest->to_skip -= skipped;
    at += skipped;
    bytes -= skipped;
    if (rest->length) {
        serval_u32 missing = (serval_u32)item - rest->length;
        serval_u32 taken = bytes < missing ? bytes : missing;
        keep(rest, at, taken);
        at += taken;
        bytes -= taken;
        if (rest->length < item) return;
        add_items(rest->bytes, (serval_u32)item, (serval_u32)item);
        rest->length = 0;
    }
    serval_u32 whole = bytes / (serval_u32)item * (serval_u32)item;
    add_items(at, whole, (serval_u32)item);
    keep(rest, at + whole, bytes - whole);
}

int SERVAL_EXPORT(serval_requests)(struct serval_message* messages, serval_u32 count,
                                   serval_u8* scratch, serval_u32 scratch_bytes) {
    (void)scratch;
    (void)scratch_bytes;
    serval_u64 offset = values[OFFSET], length = values[LENGTH];
    serval_u32 word = (serval_u32)values[ITEM_BYTES];
    for (serval_u32 i = 0; i < count; i++) {
        serval_u64 connection = serval_connection(&messages[i]);
        if (connection) {
            add_chunk(connection, messages[i].payload, messages[i].length);
            continue;
        }
        if (messages[i].length < offset + length) {
            values[SHORT]++;
            continue;
        }
        const serval_u8* at = messages[i].payload + offset;
        serval_u32 bytes = length ? (serval_u32)length : messages[i].length - (serval_u32)offset;
        if (word) {
            add_items(at, bytes, word);
            continue;
        }
        add(murmur(at, bytes, values[SEED]));
        values[ITEMS]++;
    }
    return 0;
}

static double sigma(double x) {
    double z = x, y = 1, before;
    do {
        x *= x;
        before = z;
        z += x * y;
        y += y;
    } while (z != before);
    return z;
}

static double tau(double x) {
    if (x == 0 || x == 1) return 0;
    double z = 1 - x, y = 1, before;
    do {
        x = __builtin_sqrt(x);
        before = z;
        y *= 0.5;
        z -= (1 - x) * (1 - x) * y;
    } while (z != before);
    return z / 3;
}

static serval_u64 estimate(void) {
    static serval_u32 counts[64];
    serval_u32 size = 1u << values[PRECISION], q = 64 - (serval_u32)values[PRECISION];
    double m = size;
    for (volatile serval_u32* at = counts; at < counts + 64; at++) *at = 0;
    for (serval_u32 i = 0; i < size; i++) counts[sketch.ranks[i]]++;
    if (counts[0] == size) return 0;
    double z = m * tau(1 - counts[q + 1] / m);
    for (serval_u32 k = q; k >= 1; k--) z = 0.5 * (z + counts[k]);
    z += m * sigma(counts[0] / m);
    double few = 1 + 1.079 / m * (1 - counts[0] / m);
    return (serval_u64)(m * m / (2 * 0.693147180559945309417 * z * few) + 0.5);
}

const struct serval_register* SERVAL_EXPORT(serval_registers)(void) { return registers; }

serval_u64 SERVAL_EXPORT(serval_read)(serval_u32 index) {
    if (index == ESTIMATE) return estimate();
    return index < REGISTERS ? values[index] : 0;
}

void SERVAL_EXPORT(serval_reset)(void) {
    values[ITEMS] = values[SHORT] = 0;
    // Without a library there is no memset, which the compiler would make of this loop.
    for (volatile serval_u8* at = sketch.ranks; at < sketch.ranks + sizeof sketch.ranks; at++)
        *at = 0;
}

int SERVAL_EXPORT(serval_write)(serval_u32 index, serval_u64 value) {
    switch (index) {
        case PRECISION:
            if (value < 4 || value > 18) return -1;
            break;
        case HASH_BITS:
            if (value != 64) return -1;
            break;
        case ITEM_BYTES:
            if (value != 0 && value != 4 && value != 8) return -1;
            break;
        default:
            if (index < OFFSET || index >= REGISTERS || value > 0xffffffffull) return -1;
    }
    if (values[index] == value) return 0;
    values[index] = value;
    serval_reset();
    // The next chunk of each connection begins with an item, behind what is skipped.
    for (serval_u32 i = 0; i < CONNECTIONS_MAX; i++)
        *(volatile serval_u64*)&rests[i].connection = 0;
    return 0;
}

const struct serval_state* SERVAL_EXPORT(serval_state)(void) {
    static struct serval_state state;
    const serval_u8 header[8] = {
        'S', 'H', 'L', 'L', 1, (serval_u8)values[PRECISION], 64, (serval_u8)values[ITEM_BYTES]};
    for (int i = 0; i < 8; i++) sketch.header[i] = header[i];
    for (int i = 0; i < 4; i++) sketch.header[8 + i] = (serval_u8)(values[SEED] >> 8 * i);
    state.bytes = sketch.header;
    state.length = sizeof sketch.header + (1u << values[PRECISION]);
    return &state;
}

int SERVAL_EXPORT(serval_merge)(const serval_u8* other, serval_u32 length) {
    const struct serval_state* own = serval_state();
    if (length != own->length) return -1;
    for (int i = 0; i < 12; i++)
        if (other[i] != sketch.header[i]) return -1;
    for (serval_u32 i = 12; i < length; i++)
        if (other[i] > 65 - values[PRECISION]) return -1;
    for (serval_u32 i = 12; i < length; i++)
        if (other[i] > sketch.ranks[i - 12]) sketch.ranks[i - 12] = other[i];
    return 0;
}
