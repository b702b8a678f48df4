//! A file that a transfer brings to the memory of a GPU and back, without a GPU: with the fake driver (`kernels/fake_driver.cpp`).

mod common;
mod fake;

use std::io::{Read as _, Seek as _, Write as _};

use accel::cuda::{Gpu, StagedArray};
use fake::driver;
use transfer::command::accelerator::{SLOT_BYTES, SLOTS};
use transfer::{AcceleratorMemory, DigestKind, Engine, Limits, Source};

#[test]
fn a_file_goes_to_the_memory_of_a_gpu_and_back() {
    let (library, _) = driver("transfer");
    let plain: Vec<u8> =
        (0..9_000_003_u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    let gpu = Gpu::open_for_copies(0, Some(&library)).unwrap();
    let lanes = StagedArray::lanes(gpu, plain.len() + 100, 3, SLOTS, SLOT_BYTES).unwrap();
    let memory = AcceleratorMemory::with_lanes(lanes);
    let engine = Engine::start(Limits::default()).unwrap();
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(&plain).unwrap();
    // Without stages: several lanes at a time.
    let into = Source::file(source.try_clone().unwrap(), 0, None).accelerator(memory.clone(), 100);
    let into = engine.submit(into).unwrap().wait();
    assert_eq!((into.result, into.report.written), (Ok(()), plain.len() as u64));
    let digested = Source::file(source, 0, None).digest(DigestKind::Sha256);
    let digested = digested.file(tempfile::tempfile().unwrap(), 0);
    let digested = engine.submit(digested).unwrap().wait().report;

    let mut sink = tempfile::tempfile().unwrap();
    let from = Source::accelerator(memory, 100, None).digest(DigestKind::Sha256);
    let from = engine.submit(from.file(sink.try_clone().unwrap(), 0)).unwrap().wait();
    assert_eq!(from.result, Ok(()));
    assert_eq!(from.report.digest(), digested.digest());
    let mut back = Vec::new();
    sink.rewind().unwrap();
    sink.read_to_end(&mut back).unwrap();
    assert!(back == plain);
}
