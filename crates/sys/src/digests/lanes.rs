//! MD5 in the lanes of AVX-512 and AVX2, SHA-256 in those of AVX-512: one stream in each lane.
#![cfg(target_arch = "x86_64")]

use std::arch::is_x86_feature_detected as has;
use std::arch::x86_64::*;

use super::md5::md5_rounds;
use super::{BLOCK_BYTES, LANES_MAX, States, md5, sha256};

pub(super) fn has_avx2() -> bool {
    has!("avx2")
}

pub(super) fn has_avx512() -> bool {
    has!("avx512f") && has!("avx512bw")
}

/// Words of 32 bits, one in each lane.
///
/// # Safety
/// All functions are inlined into one that enables what they need; the places of a block have 64 bytes.
trait Lanes: Copy {
    /// How many there are.
    const COUNT: usize;
    /// The same word in each.
    unsafe fn all(word: u32) -> Self;
    /// The first `COUNT` words.
    unsafe fn load(words: &[u32; LANES_MAX]) -> Self;
    unsafe fn store(self, words: &mut [u32; LANES_MAX]);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn xor(self, b: Self, c: Self) -> Self;
    /// Bit by bit `b` where this is 1, else `c`.
    unsafe fn choose(self, b: Self, c: Self) -> Self;
    /// `c ^ (self | !d)`.
    unsafe fn md5_i(self, c: Self, d: Self) -> Self;
    /// To the left; `RIGHT` is 32 - `LEFT`.
    unsafe fn rotate<const LEFT: i32, const RIGHT: i32>(self) -> Self;
    /// The 16 words of a block of each place.
    unsafe fn block(places: &[*const u8; LANES_MAX]) -> [Self; 16];
}

impl Lanes for __m512i {
    const COUNT: usize = 16;
    #[inline(always)]
    unsafe fn all(word: u32) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn load(words: &[u32; LANES_MAX]) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, words: &mut [u32; LANES_MAX]) {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_add_epi32(self, other) }
    }
    #[inline(always)]
    unsafe fn xor(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_ternarylogic_epi32::<0x96>(self, b, c) }
    }
    #[inline(always)]
    unsafe fn choose(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_ternarylogic_epi32::<0xca>(self, b, c) }
    }
    #[inline(always)]
    unsafe fn md5_i(self, c: Self, d: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_ternarylogic_epi32::<0x39>(self, c, d) }
    }
    #[inline(always)]
    unsafe fn rotate<const LEFT: i32, const RIGHT: i32>(self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_rol_epi32::<LEFT>(self) }
    }
    #[inline(always)]
    unsafe fn block(places: &[*const u8; LANES_MAX]) -> [Self; 16] {
        // SAFETY: the caller enables the features, and the places have the bytes.
        unsafe {
            // No closure: it would not have the features, and its instructions would be calls.
            let mut rows = [_mm512_setzero_si512(); 16];
            for (row, place) in rows.iter_mut().zip(places) {
                *row = _mm512_loadu_si512(place.cast());
            }
            let mut pairs = rows;
            for n in 0..8 {
                pairs[2 * n] = _mm512_unpacklo_epi32(rows[2 * n], rows[2 * n + 1]);
                pairs[2 * n + 1] = _mm512_unpackhi_epi32(rows[2 * n], rows[2 * n + 1]);
            }
            // The word 4 b + j of four rows in the quarter b of fours[4 n + j].
            let mut fours = pairs;
            for n in (0..16).step_by(4) {
                fours[n] = _mm512_unpacklo_epi64(pairs[n], pairs[n + 2]);
                fours[n + 1] = _mm512_unpackhi_epi64(pairs[n], pairs[n + 2]);
                fours[n + 2] = _mm512_unpacklo_epi64(pairs[n + 1], pairs[n + 3]);
                fours[n + 3] = _mm512_unpackhi_epi64(pairs[n + 1], pairs[n + 3]);
            }
            let mut words = fours;
            for j in 0..4 {
                let even = _mm512_shuffle_i32x4::<0x88>(fours[j], fours[4 + j]);
                let odd = _mm512_shuffle_i32x4::<0xdd>(fours[j], fours[4 + j]);
                let even_of_others = _mm512_shuffle_i32x4::<0x88>(fours[8 + j], fours[12 + j]);
                let odd_of_others = _mm512_shuffle_i32x4::<0xdd>(fours[8 + j], fours[12 + j]);
                words[j] = _mm512_shuffle_i32x4::<0x88>(even, even_of_others);
                words[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd, odd_of_others);
                words[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even, even_of_others);
                words[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_of_others);
            }
            words
        }
    }
}

impl Lanes for __m256i {
    const COUNT: usize = 8;
    #[inline(always)]
    unsafe fn all(word: u32) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm256_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn load(words: &[u32; LANES_MAX]) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, words: &mut [u32; LANES_MAX]) {
        // SAFETY: the caller enables the features.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm256_add_epi32(self, other) }
    }
    #[inline(always)]
    unsafe fn xor(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm256_xor_si256(_mm256_xor_si256(self, b), c) }
    }
    #[inline(always)]
    unsafe fn choose(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm256_xor_si256(c, _mm256_and_si256(self, _mm256_xor_si256(b, c))) }
    }
    #[inline(always)]
    unsafe fn md5_i(self, c: Self, d: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe {
            let not_d = _mm256_xor_si256(d, _mm256_set1_epi32(-1));
            _mm256_xor_si256(c, _mm256_or_si256(self, not_d))
        }
    }
    #[inline(always)]
    unsafe fn rotate<const LEFT: i32, const RIGHT: i32>(self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe {
            _mm256_or_si256(_mm256_slli_epi32::<LEFT>(self), _mm256_srli_epi32::<RIGHT>(self))
        }
    }
    #[inline(always)]
    unsafe fn block(places: &[*const u8; LANES_MAX]) -> [Self; 16] {
        // SAFETY: the caller enables the features, and the places have the bytes.
        unsafe {
            let mut words = [_mm256_setzero_si256(); 16];
            for half in 0..2 {
                let mut rows = [_mm256_setzero_si256(); 8];
                for (row, place) in rows.iter_mut().zip(places) {
                    *row = _mm256_loadu_si256(place.add(32 * half).cast());
                }
                let mut pairs = rows;
                for n in 0..4 {
                    pairs[2 * n] = _mm256_unpacklo_epi32(rows[2 * n], rows[2 * n + 1]);
                    pairs[2 * n + 1] = _mm256_unpackhi_epi32(rows[2 * n], rows[2 * n + 1]);
                }
                let mut fours = pairs;
                for n in (0..8).step_by(4) {
                    fours[n] = _mm256_unpacklo_epi64(pairs[n], pairs[n + 2]);
                    fours[n + 1] = _mm256_unpackhi_epi64(pairs[n], pairs[n + 2]);
                    fours[n + 2] = _mm256_unpacklo_epi64(pairs[n + 1], pairs[n + 3]);
                    fours[n + 3] = _mm256_unpackhi_epi64(pairs[n + 1], pairs[n + 3]);
                }
                for j in 0..4 {
                    let (first, second) = (fours[j], fours[4 + j]);
                    words[8 * half + j] = _mm256_permute2x128_si256::<0x20>(first, second);
                    words[8 * half + 4 + j] = _mm256_permute2x128_si256::<0x31>(first, second);
                }
            }
            words
        }
    }
}

/// MD5: `blocks` blocks of each place.
#[inline(always)]
unsafe fn md5<L: Lanes>(
    states: &mut States<4>,
    places: &mut [*const u8; LANES_MAX],
    blocks: usize,
) {
    // SAFETY: the caller enables the features, and the places have the bytes.
    unsafe {
        let [mut a, mut b, mut c, mut d] =
            [L::load(&states[0]), L::load(&states[1]), L::load(&states[2]), L::load(&states[3])];
        for _ in 0..blocks {
            let words = L::block(places);
            for place in &mut places[..L::COUNT] {
                *place = place.add(BLOCK_BYTES);
            }
            let before = [a, b, c, d];
            macro_rules! of {
                (f $b:ident $c:ident $d:ident) => {
                    $b.choose($c, $d)
                };
                (g $b:ident $c:ident $d:ident) => {
                    $d.choose($b, $c)
                };
                (h $b:ident $c:ident $d:ident) => {
                    $b.xor($c, $d)
                };
                (i $b:ident $c:ident $d:ident) => {
                    $b.md5_i($c, $d)
                };
            }
            macro_rules! step {
                ($f:ident $a:ident $b:ident $c:ident $d:ident $k:expr, $m:literal, $s:literal) => {
                    $a = $a.add(words[$m].add(L::all(md5::K[$k]))).add(of!($f $b $c $d));
                    $a = $a.rotate::<$s, { 32 - $s }>().add($b);
                };
            }
            macro_rules! four {
                ($f:ident $k:literal; $m0:literal $m1:literal $m2:literal $m3:literal; $s0:literal $s1:literal $s2:literal $s3:literal) => {
                    step!($f a b c d $k, $m0, $s0);
                    step!($f d a b c $k + 1, $m1, $s1);
                    step!($f c d a b $k + 2, $m2, $s2);
                    step!($f b c d a $k + 3, $m3, $s3);
                };
            }
            md5_rounds!(four);
            a = a.add(before[0]);
            b = b.add(before[1]);
            c = c.add(before[2]);
            d = d.add(before[3]);
        }
        for (word, lanes) in [a, b, c, d].into_iter().enumerate() {
            lanes.store(&mut states[word]);
        }
    }
}

/// What SHA-256 needs besides. AVX2 has it not: where it is the widest, the SHA instructions are faster.
trait ShaLanes: Lanes {
    /// What two of three have.
    unsafe fn majority(self, b: Self, c: Self) -> Self;
    unsafe fn shift_right<const COUNT: u32>(self) -> Self;
    /// The bytes of each word in the other order.
    unsafe fn swap(self) -> Self;
}

impl ShaLanes for __m512i {
    #[inline(always)]
    unsafe fn majority(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_ternarylogic_epi32::<0xe8>(self, b, c) }
    }
    #[inline(always)]
    unsafe fn shift_right<const COUNT: u32>(self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_srli_epi32::<COUNT>(self) }
    }
    #[inline(always)]
    unsafe fn swap(self) -> Self {
        // SAFETY: the caller enables the features.
        unsafe {
            let [a, b, c, d] = [0x0c0d_0e0f, 0x0809_0a0b, 0x0405_0607, 0x0001_0203];
            _mm512_shuffle_epi8(self, _mm512_set4_epi32(a, b, c, d))
        }
    }
}

/// SHA-256: `blocks` blocks of each place.
#[inline(always)]
unsafe fn sha256<L: ShaLanes>(
    states: &mut States<8>,
    places: &mut [*const u8; LANES_MAX],
    blocks: usize,
) {
    // SAFETY: the caller enables the features, and the places have the bytes.
    unsafe {
        let mut state: [L; 8] = [
            L::load(&states[0]),
            L::load(&states[1]),
            L::load(&states[2]),
            L::load(&states[3]),
            L::load(&states[4]),
            L::load(&states[5]),
            L::load(&states[6]),
            L::load(&states[7]),
        ];
        for _ in 0..blocks {
            let mut w = L::block(places);
            for place in &mut places[..L::COUNT] {
                *place = place.add(BLOCK_BYTES);
            }
            for word in &mut w {
                *word = word.swap();
            }
            let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
            macro_rules! round {
                ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident $g:ident $h:ident $at:expr, $k:expr) => {
                    let s1 = $e.rotate::<26, 6>().xor($e.rotate::<21, 11>(), $e.rotate::<7, 25>());
                    let t1 =
                        $h.add(s1).add($e.choose($f, $g)).add(w[$at].add(L::all(sha256::K[$k])));
                    let s0 = $a.rotate::<30, 2>().xor($a.rotate::<19, 13>(), $a.rotate::<10, 22>());
                    $d = $d.add(t1);
                    $h = t1.add(s0).add($a.majority($b, $c));
                };
            }
            macro_rules! next {
                ($at:expr) => {
                    let (x, y) = (w[($at + 1) % 16], w[($at + 14) % 16]);
                    let s0 = x.rotate::<25, 7>().xor(x.rotate::<14, 18>(), x.shift_right::<3>());
                    let s1 = y.rotate::<15, 17>().xor(y.rotate::<13, 19>(), y.shift_right::<10>());
                    w[$at] = w[$at].add(s0).add(w[($at + 9) % 16]).add(s1);
                };
            }
            macro_rules! eight {
                ($from:expr, $k:expr) => {
                    round!(a b c d e f g h $from, $k + $from);
                    round!(h a b c d e f g $from + 1, $k + $from + 1);
                    round!(g h a b c d e f $from + 2, $k + $from + 2);
                    round!(f g h a b c d e $from + 3, $k + $from + 3);
                    round!(e f g h a b c d $from + 4, $k + $from + 4);
                    round!(d e f g h a b c $from + 5, $k + $from + 5);
                    round!(c d e f g h a b $from + 6, $k + $from + 6);
                    round!(b c d e f g h a $from + 7, $k + $from + 7);
                };
            }
            eight!(0, 0);
            eight!(8, 0);
            for k in [16, 32, 48] {
                next!(0);
                next!(1);
                next!(2);
                next!(3);
                next!(4);
                next!(5);
                next!(6);
                next!(7);
                eight!(0, k);
                next!(8);
                next!(9);
                next!(10);
                next!(11);
                next!(12);
                next!(13);
                next!(14);
                next!(15);
                eight!(8, k);
            }
            let after = [a, b, c, d, e, f, g, h];
            for (word, more) in state.iter_mut().zip(after) {
                *word = word.add(more);
            }
        }
        for (word, lanes) in state.into_iter().enumerate() {
            lanes.store(&mut states[word]);
        }
    }
}

macro_rules! pass {
    ($name:ident, $of:ident, $lanes:ty, $words:literal, $features:literal) => {
        /// A pass over all lanes.
        ///
        /// # Safety
        /// The processor has the features; each place has this number of blocks.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(
            states: &mut States<$words>,
            places: &mut [*const u8; LANES_MAX],
            blocks: usize,
        ) {
            // SAFETY: as the caller promises.
            unsafe { $of::<$lanes>(states, places, blocks) }
        }
    };
}
pass!(md5_avx512, md5, __m512i, 4, "avx512f,avx512bw");
pass!(md5_avx2, md5, __m256i, 4, "avx2");
pass!(sha256_avx512, sha256, __m512i, 8, "avx512f,avx512bw");
