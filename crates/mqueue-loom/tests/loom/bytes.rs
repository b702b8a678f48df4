//! Streams of bytes: the BYTES edges, and PARK on both sides of a stream.
//!
//! The data of frames of whole words are cells. A word that is written again with more bytes while its first bytes are read is an atomic
//! word, and the model compares the bytes.

use std::rc::Rc;

use loom::sync::Notify;
use loom::thread;
use mqueue::abi::status;
use mqueue::abi::stream_word::{DATA, HEAD, HEAD_END, TAIL, TAIL_END};
use mqueue::{ByteReader, ByteWriter, byte_ring_bytes};

use super::*;

const CAPACITY: u64 = 8;
const SLEEPS: [u64; 2] = [256, 384];

fn memory(weak: Weak) -> LoomMemory {
    let [reader, writer] = SLEEPS;
    let kinds = Kinds {
        atomic: [HEAD, HEAD_END, TAIL, TAIL_END, reader, writer].map(word).to_vec(),
        owned: std::iter::once(DATA..DATA + CAPACITY).collect(),
    };
    LoomMemory::new(byte_ring_bytes(CAPACITY), &kinds, weak)
}

/// Memory whose data is accessed by both sides at the same time.
fn dense_memory(weak: Weak) -> LoomMemory {
    let mut atomic = [HEAD, HEAD_END, TAIL, TAIL_END].map(word).to_vec();
    atomic.push(DATA..DATA + CAPACITY);
    LoomMemory::new(byte_ring_bytes(CAPACITY), &Kinds { atomic, owned: Vec::new() }, weak)
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

const CLOSED: u64 = status::CLOSED as u64;
const RESET: u64 = status::RESET as u64;

/// Bytes of one word written in two parts, the second while the first may be read, then into the same word again.
fn dense_stream(weak: Weak) -> impl Fn() + Sync + Send {
    move || {
        let memory = dense_memory(weak);
        let mut writer = ByteWriter::new(memory.clone(), 0, CAPACITY);
        let mut reader = ByteReader::new(memory, 0, CAPACITY);
        let writing = thread::spawn(move || {
            for (first, len) in [(1, 3), (4, 5), (9, 2)] {
                let bytes: Vec<u8> = (first..first + len).collect();
                let mut sent = 0;
                while sent < bytes.len() {
                    match writer.write(&[], &bytes[sent..]).unwrap() {
                        0 => thread::yield_now(),
                        count => sent += count,
                    }
                }
            }
        });
        let mut got = 0;
        while got < 10 {
            let mut bytes = [0; 4];
            match reader.read(&mut bytes).unwrap() {
                0 => thread::yield_now(),
                count => {
                    let expected = [1, 2, 3, 4].map(|at| at + got as u8);
                    assert_eq!(bytes[..count], expected[..count], "the bytes");
                    got += count;
                }
            }
        }
        writing.join().unwrap();
    }
}

/// A writer ends after a few bytes: the reader that sees the end sees all of them.
fn ending(weak: Weak) -> impl Fn() + Sync + Send {
    move || {
        let memory = memory(weak);
        let mut writer = ByteWriter::new(memory.clone(), 0, CAPACITY);
        let mut reader = ByteReader::new(memory, 0, CAPACITY);
        let writing = thread::spawn(move || {
            assert_eq!(writer.write(&[], &bytes(0)), Ok(8));
            writer.set_end(CLOSED);
        });
        let mut got = 0;
        let end = loop {
            match reader.read(&mut [0; 8]).unwrap() {
                0 => match reader.ended().unwrap() {
                    Some(end) => break end,
                    None => thread::yield_now(),
                },
                count => got += count,
            }
        };
        assert_eq!((got, end), (8, CLOSED), "bytes before the end");
        writing.join().unwrap();
    }
}

/// A reader ends after it has taken a few bytes: the writer that sees the end knows how many.
fn refusing(weak: Weak) -> impl Fn() + Sync + Send {
    move || {
        let memory = memory(weak);
        let mut writer = ByteWriter::new(memory.clone(), 0, CAPACITY);
        let mut reader = ByteReader::new(memory, 0, CAPACITY);
        writer.write(&[], &bytes(0)).unwrap();
        let reading = thread::spawn(move || {
            assert_eq!(reader.read(&mut [0; 8]), Ok(8));
            reader.set_end(RESET);
        });
        while writer.reader_end() == 0 {
            thread::yield_now();
        }
        assert_eq!((writer.reader_end(), writer.taken()), (RESET, Ok(8)), "bytes before the end");
        reading.join().unwrap();
    }
}

/// Two frames with sides that sleep: a missed wake-up is a deadlock.
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
    bytes_of_a_word_arrive: dense_stream(Weak::Nothing);
    a_stream_ends_after_its_bytes: ending(Weak::Nothing);
    a_reader_ends_after_its_bytes: refusing(Weak::Nothing);
    sides_of_a_stream_sleep: sleepers(Weak::Nothing);
}

fails! {
    bytes_without_publish_release: stream(Weak::Release(HEAD)), "Causality violation";
    bytes_without_publish_acquire: stream(Weak::Acquire(HEAD)), "Causality violation";
    bytes_without_release_release: stream(Weak::Release(TAIL)), "Causality violation";
    bytes_without_release_acquire: stream(Weak::Acquire(TAIL)), "Causality violation";
    word_without_publish_release: dense_stream(Weak::Release(HEAD)), "the bytes";
    word_without_publish_acquire: dense_stream(Weak::Acquire(HEAD)), "the bytes";
    end_without_release: ending(Weak::Release(HEAD_END)), "bytes before the end";
    end_without_acquire: ending(Weak::Acquire(HEAD_END)), "bytes before the end";
    reader_end_without_release: refusing(Weak::Release(TAIL_END)), "bytes before the end";
    reader_end_without_acquire: refusing(Weak::Acquire(TAIL_END)), "bytes before the end";
    stream_sleep_without_fence: sleepers(Weak::Fence), "deadlock";
}
