//! Two threads, one at each end of a ring, at full speed: a litmus test of the edges on this
//! processor. Every byte of every message is compared.
//!
//! It can detect tearing, stale payloads, slots overwritten too early, lost or repeated messages. It
//! cannot detect reorderings that this processor never performs (x86-64 keeps stores in order).

mod support;

use std::time::{Duration, Instant};

use mqueue::LoanError;
use support::{Choose, Numbers, Shape, fill, head, ring, shapes};

/// Minimum number of messages, however short the time.
const MESSAGES_MIN: u64 = if cfg!(miri) { 12 } else { 50 };

/// The batching of one run.
#[derive(Clone, Copy, Debug)]
struct Habits {
    depth: u32,
    /// Messages between publishes.
    batch: u64,
    /// Messages between releases.
    release: u64,
}

const HABITS: [Habits; 5] = [
    Habits { depth: 1, batch: 1, release: 1 },
    Habits { depth: 2, batch: 1, release: 1 },
    Habits { depth: 8, batch: 3, release: 5 },
    Habits { depth: 64, batch: 16, release: 1 },
    Habits { depth: 256, batch: 1, release: 64 },
];

/// Length of message `n`: both sides know it.
fn len_of(n: u64, shape: Shape) -> usize {
    let mut numbers = Numbers(n.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1);
    let max = u64::from(shape.message_bytes_max);
    let longest = if numbers.below(8) == 0 { max } else { max.min(100) };
    numbers.below(longest + 1) as usize
}

/// Sends messages until the time is up; returns how many.
fn hammer(shape: Shape, habits: Habits, start: u64, time: Duration) -> u64 {
    let ring = ring(shape, habits.depth, start);
    let (mut producer, mut consumer) = (ring.producer, ring.consumer);
    let (last, of_last) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let begin = Instant::now();
            let mut payload = vec![0; shape.message_bytes_max as usize];
            let mut n = start;
            while begin.elapsed() < time || n < start + MESSAGES_MIN {
                let payload = &mut payload[..len_of(n, shape)];
                fill(n, payload);
                match producer.push(head(n), payload) {
                    Ok(()) => n += 1,
                    Err(error) => {
                        assert_eq!(error, LoanError::Full);
                        producer.publish();
                        std::thread::yield_now();
                        continue;
                    }
                }
                if n % habits.batch == 0 {
                    producer.publish();
                }
            }
            producer.publish();
            last.send(n).unwrap();
        });
        let mut received = vec![0; shape.message_bytes_max as usize];
        let mut expected = received.clone();
        let mut n = start;
        let mut end = u64::MAX;
        while n < end {
            let Some(header) = consumer.peek().unwrap() else {
                end = of_last.try_recv().unwrap_or(end);
                consumer.release();
                std::thread::yield_now();
                continue;
            };
            let len = len_of(n, shape);
            assert_eq!(header.len as usize, len, "message {n}");
            let sent = head(n);
            let found = (header.token, header.tag, header.kind, header.status);
            assert_eq!(found, (sent.token, sent.tag, sent.kind, sent.status), "message {n}");
            while !consumer.copy_out(&header, &mut received[..len]) {
                std::hint::spin_loop();
            }
            fill(n, &mut expected[..len]);
            assert_eq!(received[..len], expected[..len], "message {n}");
            consumer.advance();
            n += 1;
            if n % habits.release == 0 {
                consumer.release();
            }
        }
        n - start
    })
}

#[test]
fn messages_survive_two_threads() {
    // One second per protocol, over all batchings.
    let time = Duration::from_secs(1) / HABITS.len() as u32;
    let time = if cfg!(miri) { Duration::ZERO } else { time };
    for shape in shapes() {
        for (i, habits) in HABITS.into_iter().enumerate() {
            let start = [0, (1 << 32) - 1000, (1 << 31) - 1000][i % 3];
            let messages = hammer(shape, habits, start, time);
            assert!(messages >= MESSAGES_MIN, "{} {habits:?}: {messages} messages", shape.name);
        }
    }
}

/// Frames of many lengths through a stream of bytes that is smaller than some of them.
#[test]
fn streams_survive_two_threads() {
    const CAPACITY: u64 = 1024;
    const FRAMES: u64 = if cfg!(miri) { 40 } else { 30_000 };
    let len_of = |n: u64| (n * 37 % 3000) as usize / if cfg!(miri) { 10 } else { 1 };
    let memory = mqueue::HeapMapping::memory(mqueue::byte_ring_bytes(CAPACITY) as usize);
    let mut writer = mqueue::ByteWriter::new(memory.clone(), 0, CAPACITY);
    let mut reader = mqueue::ByteReader::new(memory, 0, CAPACITY);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0..FRAMES {
                let mut frame = vec![0; len_of(n)];
                fill(n, &mut frame);
                let mut sent = 0;
                while sent < frame.len() {
                    match writer.write(&[], &frame[sent..]).unwrap() {
                        0 => std::thread::yield_now(),
                        count => sent += count,
                    }
                }
            }
            writer.set_end(3);
        });
        for n in 0..FRAMES {
            let mut frame = vec![0; len_of(n)];
            let mut got = 0;
            while got < frame.len() {
                match reader.read(&mut frame[got..]).unwrap() {
                    0 => std::thread::yield_now(),
                    count => got += count,
                }
            }
            let mut expected = vec![0; frame.len()];
            fill(n, &mut expected);
            assert!(frame == expected, "frame {n}");
        }
        while reader.ended().unwrap() != Some(3) {
            std::thread::yield_now();
        }
    });
}
