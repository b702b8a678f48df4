//! SHA-256 of one stream, and of two, with the SHA instructions.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::__m128i;

use super::{BLOCK_BYTES, LANES_MAX, States};

/// FIPS 180-4, 4.2.2.
#[rustfmt::skip]
pub(super) const K: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

pub(super) fn has_instructions() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("sha") && has!("sse4.1") && has!("ssse3")
}

pub(super) fn with_instructions(state: &mut [u32; 8], blocks: &[u8]) {
    let mut states = [*state];
    // SAFETY: the way is made only if the processor has the instructions, and the place has as many blocks.
    unsafe { streams(&mut states, &mut [blocks.as_ptr()], blocks.len() / BLOCK_BYTES) };
    *state = states[0];
}

/// Two streams at a time.
///
/// # Safety
/// The processor has the instructions; the first two places have this number of blocks.
pub(super) unsafe fn pair(
    states: &mut States<8>,
    places: &mut [*const u8; LANES_MAX],
    blocks: usize,
) {
    let mut two = [0, 1].map(|lane| std::array::from_fn(|word| states[word][lane]));
    let mut from = [places[0], places[1]];
    // SAFETY: as the caller promises.
    unsafe { streams(&mut two, &mut from, blocks) };
    for (lane, state) in two.iter().enumerate() {
        (0..8).for_each(|word| states[word][lane] = state[word]);
    }
}

/// Blocks of `N` streams with the SHA instructions. The steps of the streams alternate, so one does not wait for the other.
///
/// # Safety
/// The processor has the instructions; each place has `blocks` blocks.
#[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
unsafe fn streams<const N: usize>(
    states: &mut [[u32; 8]; N],
    places: &mut [*const u8; N],
    blocks: usize,
) {
    use std::arch::x86_64::*;
    let set = |s: &[u32; 8], [a, b, c, d]: [usize; 4]| {
        _mm_set_epi32(s[a] as i32, s[b] as i32, s[c] as i32, s[d] as i32)
    };
    // The instructions want the words in this order.
    let mut abef: [__m128i; N] = std::array::from_fn(|n| set(&states[n], [0, 1, 4, 5]));
    let mut cdgh: [__m128i; N] = std::array::from_fn(|n| set(&states[n], [2, 3, 6, 7]));
    for _ in 0..blocks {
        // SAFETY: the places have another block.
        unsafe { block(&mut abef, &mut cdgh, places) };
        for place in &mut *places {
            // SAFETY: at most the end of what the place has.
            *place = unsafe { place.add(BLOCK_BYTES) };
        }
    }
    for n in 0..N {
        let (mut x, mut y) = ([0u32; 4], [0u32; 4]);
        // SAFETY: four words each.
        unsafe {
            _mm_storeu_si128(x.as_mut_ptr().cast(), abef[n]);
            _mm_storeu_si128(y.as_mut_ptr().cast(), cdgh[n]);
        }
        states[n] = [x[3], x[2], y[3], y[2], x[1], x[0], y[1], y[0]];
    }
}

/// One block of each stream.
///
/// # Safety
/// As of [`streams`].
#[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
#[inline]
unsafe fn block<const N: usize>(
    abef: &mut [__m128i; N],
    cdgh: &mut [__m128i; N],
    places: &[*const u8; N],
) {
    use std::arch::x86_64::*;
    let swap = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
    let (before_abef, before_cdgh) = (*abef, *cdgh);
    let mut w = [[_mm_setzero_si128(); 4]; N];
    for (words, place) in w.iter_mut().zip(places) {
        for (part, word) in words.iter_mut().enumerate() {
            // SAFETY: the place has a block.
            let loaded = unsafe { _mm_loadu_si128(place.add(part * 16).cast()) };
            *word = _mm_shuffle_epi8(loaded, swap);
        }
    }
    for four in 0..16 {
        // SAFETY: 16 times four words.
        let k = unsafe { _mm_loadu_si128(K.as_ptr().add(4 * four).cast()) };
        for n in 0..N {
            rounds(&mut abef[n], &mut cdgh[n], &mut w[n], four, k);
        }
    }
    for n in 0..N {
        abef[n] = _mm_add_epi32(abef[n], before_abef[n]);
        cdgh[n] = _mm_add_epi32(cdgh[n], before_cdgh[n]);
    }
}

/// Four rounds of one stream, and the words of the rounds that are sixteen later.
#[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
#[inline]
fn rounds(abef: &mut __m128i, cdgh: &mut __m128i, w: &mut [__m128i; 4], four: usize, k: __m128i) {
    use std::arch::x86_64::*;
    let now = w[four % 4];
    let added = _mm_add_epi32(now, k);
    *cdgh = _mm_sha256rnds2_epu32(*cdgh, *abef, added);
    *abef = _mm_sha256rnds2_epu32(*abef, *cdgh, _mm_shuffle_epi32::<0x0e>(added));
    if four < 12 {
        let [next, last] = [w[(four + 1) % 4], w[(four + 3) % 4]];
        let seven = _mm_alignr_epi8::<4>(last, w[(four + 2) % 4]);
        let sum = _mm_add_epi32(_mm_sha256msg1_epu32(now, next), seven);
        w[four % 4] = _mm_sha256msg2_epu32(sum, last);
    }
}
