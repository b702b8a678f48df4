//! Streams of bytes: the BYTES edges, and PARK on both sides of a stream.

use std::rc::Rc;

use loom::sync::Notify;
use loom::thread;
use mqueue::{ByteReader, ByteWriter, byte_ring_bytes};

use super::*;

const CAPACITY: u64 = 8;
const HEAD: u64 = 0;
const TAIL: u64 = 128;
const SLEEPS: [u64; 2] = [256, 384];
const DATA: u64 = 512;

fn memory(weak: Weak) -> LoomMemory {
    let [reader, writer] = SLEEPS;
    let kinds = Kinds {
        atomic: [HEAD, TAIL, reader, writer].map(word).to_vec(),
        owned: std::iter::once(DATA..DATA + CAPACITY).collect(),
    };
    LoomMemory::new(byte_ring_bytes(CAPACITY), &kinds, weak)
}

fn bytes(n: u8) -> [u8; 8] {
    [n + 1; 8]
}

/// Two frames through a ring that holds one.
fn stream(weak: Weak) -> impl Fn() + Sync + Send {
    move || {
        let memory = memory(weak);
        let mut writer = ByteWriter::new(memory.clone(), 0, CAPACITY);
        let mut reader = ByteReader::new(memory, 0, CAPACITY);
        let writing = thread::spawn(move || {
            for n in 0..2 {
                while writer.write(&[], &bytes(n)).unwrap() == 0 {
                    thread::yield_now();
                }
            }
        });
        for n in 0..2 {
            let mut got = [0; 8];
            while reader.read(&mut got).unwrap() == 0 {
                thread::yield_now();
            }
            assert_eq!(got, bytes(n), "the payload");
        }
        writing.join().unwrap();
    }
}

/// The same with sides that sleep: a missed wake-up is a deadlock.
fn sleepers(weak: Weak) -> impl Fn() + Sync + Send {
    move || {
        let memory = memory(weak);
        let mut writer = ByteWriter::new(memory.clone(), 0, CAPACITY);
        let mut reader = ByteReader::new(memory, 0, CAPACITY);
        let bells = [Rc::new(Notify::new()), Rc::new(Notify::new())];
        let [for_reader, for_writer] = bells.clone();
        let writing = thread::spawn(move || {
            for n in 0..2 {
                while writer.write(&[], &bytes(n)).unwrap() == 0 {
                    writer.set_sleeping(true);
                    if writer.room().unwrap() == 0 {
                        for_writer.wait();
                    }
                    writer.set_sleeping(false);
                }
                if writer.reader_sleeps() {
                    for_reader.notify();
                }
            }
        });
        let [for_reader, for_writer] = bells;
        for _ in 0..2 {
            while reader.read(&mut [0; 8]).unwrap() == 0 {
                reader.set_sleeping(true);
                if reader.available().unwrap() == 0 {
                    for_reader.wait();
                }
                reader.set_sleeping(false);
            }
            if reader.writer_sleeps() {
                for_writer.notify();
            }
        }
        writing.join().unwrap();
    }
}

holds! {
    bytes_arrive: stream(Weak::Nothing);
    sides_of_a_stream_sleep: sleepers(Weak::Nothing);
}

fails! {
    bytes_without_publish_release: stream(Weak::Release(HEAD)), "Causality violation";
    bytes_without_publish_acquire: stream(Weak::Acquire(HEAD)), "Causality violation";
    bytes_without_release_release: stream(Weak::Release(TAIL)), "Causality violation";
    bytes_without_release_acquire: stream(Weak::Acquire(TAIL)), "Causality violation";
    stream_sleep_without_fence: sleepers(Weak::Fence), "deadlock";
}
