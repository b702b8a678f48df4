//! See the library's text.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| serval_fuzz::control::message(input));
