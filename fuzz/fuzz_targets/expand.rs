//! The target is implemented and described in `fuzz/src/lib.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| serval_fuzz::transfer::compressed(input));
