//! Loops over words that are compiled for several instruction sets, one of which is chosen when a sketch is made.
//!
//! The loops are plain Rust, which the compiler vectorises. Only the call of a loop that was compiled for instructions which not every machine
//! has is unsafe.
#![allow(unsafe_code)]

use super::hyperloglog::Words;

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
        let mut all = vec![Self(Set::Any)];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("bmi1") && has!("bmi2") && has!("lzcnt");
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
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,avx512f,avx512bw,avx512vl,avx512cd,avx512dq")]
fn add_avx512(words: Words, bytes: &[u8], registers: &mut [u8], floor: u8) {
    words.add(bytes, registers, floor);
}
