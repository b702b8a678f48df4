//! MurmurHash3 (Austin Appleby, public domain), in the two forms that sketches use. Numbers in bytes are least significant byte first, whatever the
//! machine does. It does not withstand a client that chooses its items to collide.

const C1: u64 = 0x87c3_7b91_1142_53d5;
const C2: u64 = 0x4cf5_ad43_2745_937f;
const C1_32: u32 = 0xcc9e_2d51;
const C2_32: u32 = 0x1b87_3593;

/// Factors of the finalizer for 64 bits.
pub(super) const FINISH64: [u64; 2] = [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53];
/// Its shift: each step changes bits that are below the first `FINISH64_KEPT` ones by bits above.
pub(super) const FINISH64_SHIFT: u32 = 33;
pub(super) const FINISH64_KEPT: u32 = FINISH64_SHIFT;

/// The finalizer for 64 bits: each bit of the result depends on each bit of the argument.
#[inline(always)]
pub fn finish64(mut h: u64) -> u64 {
    for factor in FINISH64 {
        h = (h ^ h >> FINISH64_SHIFT).wrapping_mul(factor);
    }
    finish64_last(h)
}

/// Its last step, which leaves the first [`FINISH64_KEPT`] bits as they are.
#[inline(always)]
pub(super) fn finish64_last(h: u64) -> u64 {
    h ^ h >> FINISH64_SHIFT
}

/// The finalizer for 32 bits.
#[inline(always)]
pub fn finish32(mut h: u32) -> u32 {
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// One word of the 32-bit form.
#[inline(always)]
pub fn word32(h: u32, word: u32) -> u32 {
    let k = word.wrapping_mul(C1_32).rotate_left(15).wrapping_mul(C2_32);
    (h ^ k).rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
}

/// MurmurHash3_x86_32.
pub fn murmur3_32(bytes: &[u8], seed: u32) -> u32 {
    let (words, tail) = bytes.as_chunks::<4>();
    let mut h = words.iter().fold(seed, |h, word| word32(h, u32::from_le_bytes(*word)));
    if !tail.is_empty() {
        let mut last = [0; 4];
        last[..tail.len()].copy_from_slice(tail);
        let k = u32::from_le_bytes(last);
        h ^= k.wrapping_mul(C1_32).rotate_left(15).wrapping_mul(C2_32);
    }
    finish32(h ^ bytes.len() as u32)
}

/// MurmurHash3_x64_128: its two halves.
pub fn murmur3_128(bytes: &[u8], seed: u32) -> (u64, u64) {
    let mix1 = |k: u64| k.wrapping_mul(C1).rotate_left(31).wrapping_mul(C2);
    let mix2 = |k: u64| k.wrapping_mul(C2).rotate_left(33).wrapping_mul(C1);
    let (mut h1, mut h2) = (u64::from(seed), u64::from(seed));
    let (blocks, tail) = bytes.as_chunks::<16>();
    for block in blocks {
        let both = u128::from_le_bytes(*block);
        h1 = (h1 ^ mix1(both as u64)).rotate_left(27).wrapping_add(h2);
        h1 = h1.wrapping_mul(5).wrapping_add(0x52dc_e729);
        h2 = (h2 ^ mix2((both >> 64) as u64)).rotate_left(31).wrapping_add(h1);
        h2 = h2.wrapping_mul(5).wrapping_add(0x3849_5ab5);
    }
    if !tail.is_empty() {
        let mut last = [0; 16];
        last[..tail.len()].copy_from_slice(tail);
        let both = u128::from_le_bytes(last);
        // Of zero it is zero.
        h1 ^= mix1(both as u64);
        h2 ^= mix2((both >> 64) as u64);
    }
    h1 ^= bytes.len() as u64;
    h2 ^= bytes.len() as u64;
    h1 = h1.wrapping_add(h2);
    h2 = h2.wrapping_add(h1);
    (h1, h2) = (finish64(h1), finish64(h2));
    h1 = h1.wrapping_add(h2);
    (h1, h2.wrapping_add(h1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SMHasher's verification: the hash of the hashes of 0, 01, 0102 ... with seeds 256, 255, 254 ...
    fn verification(hash: impl Fn(&[u8], u32) -> Vec<u8>) -> u32 {
        let key: Vec<u8> = (0..=255).collect();
        let hashes: Vec<u8> = (0..256).flat_map(|n| hash(&key[..n], 256 - n as u32)).collect();
        u32::from_le_bytes(*hash(&hashes, 0).first_chunk().unwrap())
    }

    #[test]
    fn it_is_murmurhash3() {
        let short = |bytes: &[u8], seed| murmur3_32(bytes, seed).to_le_bytes().to_vec();
        assert_eq!(verification(short), 0xb0f5_7ee3, "the value that SMHasher has for Murmur3A");
        let long = |bytes: &[u8], seed| {
            let (h1, h2) = murmur3_128(bytes, seed);
            [h1.to_le_bytes(), h2.to_le_bytes()].concat()
        };
        assert_eq!(verification(long), 0x6384_ba69, "the value that SMHasher has for Murmur3F");
    }
}
