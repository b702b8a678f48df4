//! The request grammars: no panic, no unbounded buffer, the same messages however the stream is cut, and
//! what is written is read.
#![no_main]

mod case;

libfuzzer_sys::fuzz_target!(|input: &[u8]| case::run(case::Side::Request, input));
