//! Loops over words that are compiled for several instruction sets, one of which is chosen when a sketch is made.
//!
//! The loops are plain Rust, which the compiler vectorises, and one that names its AVX-512 instructions. Unsafe are the calls of loops that were
//! compiled for instructions which not every machine has, and that a vector is taken for its bytes.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::hash::{FINISH64, FINISH64_SHIFT};
#[cfg(target_arch = "x86_64")]
use super::words::Wanted;
use super::words::Words;

/// Which instructions the loops use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instructions(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// Those that every machine has.
    Any,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Instructions {
    /// Those that this machine has, the best ones first.
    pub fn all() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there are no others"))]
        let mut all = vec![Self(Set::Any)];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let bits = has!("bmi1") && has!("bmi2") && has!("lzcnt") && has!("popcnt");
            let avx2 = bits && has!("avx2");
            if avx2 {
                all.insert(0, Self(Set::Avx2));
            }
            let wide = has!("avx512f") && has!("avx512bw") && has!("avx512vl");
            if avx2 && wide && has!("avx512cd") && has!("avx512dq") {
                all.insert(0, Self(Set::Avx512));
            }
        }
        all
    }

    /// The best ones of this machine.
    pub fn best() -> Self {
        Self::all()[0]
    }

    /// [`Words::add`].
    pub(super) fn add(self, words: Words, bytes: &[u8], registers: &mut [u8], floor: u8) {
        match self.0 {
            Set::Any => words.add(bytes, registers, floor),
            // SAFETY: only `all` makes this value, if the machine has these instructions.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { add_avx2(words, bytes, registers, floor) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { add_avx512(words, bytes, registers, floor) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt")]
fn add_avx2(words: Words, bytes: &[u8], registers: &mut [u8], floor: u8) {
    words.add(bytes, registers, floor);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(
    enable = "avx2,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512cd,avx512dq"
)]
fn add_avx512(words: Words, bytes: &[u8], registers: &mut [u8], floor: u8) {
    let done = match words.wanted(floor) {
        Some(wanted) => add_wanted(wanted, bytes, registers),
        None => 0,
    };
    words.add(&bytes[done..], registers, floor);
}

/// Words in a vector.
#[cfg(target_arch = "x86_64")]
const LANES: usize = 8;
/// Vectors between two looks at how many words were found.
#[cfg(target_arch = "x86_64")]
const VECTORS: usize = 4;
/// Words that are collected, before they are looked at one by one.
#[cfg(target_arch = "x86_64")]
const FOUND: usize = 256;

/// Adds the words of whole blocks, and returns their bytes. A word that changes no register costs the calculation of its hash and nothing else, and
/// no branch depends on whether it does.
#[cfg(target_arch = "x86_64")]
#[target_feature(
    enable = "avx2,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512cd,avx512dq"
)]
fn add_wanted(wanted: Wanted, bytes: &[u8], registers: &mut [u8]) -> usize {
    use std::arch::x86_64::{
        __m512i, _mm512_add_epi64, _mm512_maskz_compress_epi64, _mm512_mullo_epi64,
        _mm512_set1_epi64, _mm512_srli_epi64, _mm512_testn_epi64_mask, _mm512_xor_si512,
    };
    const BLOCK: usize = VECTORS * LANES * 8;
    let all = |value: u64| _mm512_set1_epi64(value as i64);
    let (key, zeros, factors) = (all(wanted.key), all(wanted.zeros), FINISH64.map(all));
    let mut found = [0u64; FOUND + LANES];
    let mut count = 0;
    let (blocks, _) = bytes.as_chunks::<BLOCK>();
    for block in blocks {
        for vector in block.as_chunks::<{ LANES * 8 }>().0 {
            // SAFETY: both are 64 bytes, and all of their values are valid.
            let words = unsafe { std::mem::transmute::<[u8; LANES * 8], __m512i>(*vector) };
            let mut hash = _mm512_add_epi64(words, key);
            for factor in factors {
                let shifted = _mm512_srli_epi64::<FINISH64_SHIFT>(hash);
                hash = _mm512_mullo_epi64(_mm512_xor_si512(hash, shifted), factor);
            }
            let above = _mm512_testn_epi64_mask(hash, zeros);
            let kept = _mm512_maskz_compress_epi64(above, hash);
            // SAFETY: as above.
            let kept = unsafe { std::mem::transmute::<__m512i, [u64; LANES]>(kept) };
            found[count..count + LANES].copy_from_slice(&kept);
            count += above.count_ones() as usize;
        }
        if count > FOUND - VECTORS * LANES {
            found[..count].iter().for_each(|hash| wanted.raise(*hash, registers));
            count = 0;
        }
    }
    found[..count].iter().for_each(|hash| wanted.raise(*hash, registers));
    blocks.len() * BLOCK
}
