//! Two threads, one at each end of a ring, at full speed: a litmus test of the edges on this
//! processor. Every byte of every message is compared.
//!
//! It can detect tearing, stale payloads, slots overwritten too early, lost or repeated messages. It
//! cannot detect reorderings that this processor never performs (x86-64 keeps stores in order).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::support::{Choose, Numbers, Shape, fill, head, ring, shapes};
use mqueue::abi::{Bundle, kind, status};
use mqueue::{
    Buffer, BundleReplies, HeapMapping, LoanError, MqueuePlan, Region, RegionPlan, ReplyArea,
    RingPlan,
};

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

/// Longest message and reply of a bundle.
const BUNDLED_MAX: u32 = 200;
/// Small buffers of the pool: bundles in flight.
const BUFFERS: usize = 2;

/// A bundle in flight, as the engine knows it.
struct Sent {
    token: u64,
    count: u32,
    buffer: Buffer,
    /// Where the area for replies is in the buffer.
    area: u32,
    /// Messages that the block has not ended.
    left: u64,
}

/// Whether a thread has failed: the other one would not end.
#[derive(Default)]
struct Over(AtomicBool);

impl Over {
    fn wait(&self) {
        assert!(!self.0.load(Relaxed), "the other thread has failed");
        std::thread::yield_now();
    }
}

struct Guard<'a>(&'a Over);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.0.store(true, Relaxed);
        }
    }
}

/// Bundles between two threads, in buffers that are used again as soon as the block has ended their messages.
fn hammer_bundles(protocol: u8, bundles: u64) {
    let ring = RingPlan { protocol, message_bytes_max: BUNDLED_MAX, arena_bytes: 0 };
    let mqueue = MqueuePlan { depth: 16, rx: ring, tx: ring };
    let plan = RegionPlan::of_blocks(1, &[mqueue], 1).with_pools(1, BUFFERS as u64 * 4096);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut engine = Region::format(memory.clone(), &plan).unwrap();
    let mut accelerator = Region::join(memory.clone()).unwrap();
    let (mut request, mut replies_in) = engine.engine_ends(0);
    let (mut requests_in, mut reply) = accelerator.accelerator_ends(0);
    let pools = accelerator.pools().to_vec();
    let mut pool = engine.engine_pool(0);
    let len_of = |token: u64| (token % 7 * 9) as usize;
    let reply_len = |token: u64| (token % 3 * 11 + 1) as usize;
    let over = Over::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _guard = Guard(&over);
            let (mut message, mut expected) = ([0; 64], [0; 64]);
            for n in 0..bundles {
                let (header, bundle) = loop {
                    if let Some(header) = requests_in.peek().unwrap()
                        && let Some(bundle) = requests_in.bundle(&header).unwrap()
                    {
                        break (header, bundle);
                    }
                    over.wait();
                };
                assert_eq!((header.kind, header.token), (kind::BUNDLE, n << 6));
                requests_in.advance();
                requests_in.release();
                let bundle =
                    bundle.check(header.token, &pools, BUNDLED_MAX).expect("a good bundle");
                let mut replies = BundleReplies::new(&bundle);
                for i in 0..bundle.count() {
                    let token = bundle.token(i);
                    let len = bundle.len(i) as usize;
                    bundle.copy_out(&memory, i, &mut message[..len]);
                    fill(token, &mut expected[..len]);
                    assert_eq!(message[..len], expected[..len], "message {i} of bundle {n}");
                    if token % 5 == 0 {
                        while reply.push_bundle_drop(token, status::REJECTED).is_err() {
                            over.wait();
                        }
                    } else {
                        let len = reply_len(token);
                        while !replies.continues(i, len as u32)
                            && replies.publish(&mut reply).is_err()
                        {
                            over.wait();
                        }
                        fill(!token, &mut message[..len]);
                        assert!(replies.write(&memory, i, &message[..len]));
                    }
                    reply.publish();
                }
                while replies.publish(&mut reply).is_err() {
                    over.wait();
                }
                reply.publish();
            }
        });
        let _guard = Guard(&over);
        let mut sent: Vec<Sent> = Vec::with_capacity(BUFFERS);
        let mut next = 0;
        while next < bundles || !sent.is_empty() {
            if let Some(buffer) = (next < bundles).then(|| pool.take(4096)).flatten() {
                let count = 1 + (next % 30) as u32;
                let (len, token) = (len_of(next), next << 6);
                let mut messages = vec![0; count as usize * len];
                for (i, message) in messages.chunks_exact_mut(len.max(1)).enumerate() {
                    fill(token + i as u64, message);
                }
                pool.write(&buffer, 0, &messages);
                let area = (messages.len() as u32).next_multiple_of(64);
                let (offset, reply_offset) = (buffer.offset(), buffer.offset() + u64::from(area));
                let (stride, reply_bytes, len) = (len as u32, 32 * count, len as u32);
                let bundle = Bundle {
                    offset,
                    reply_offset,
                    stride,
                    count,
                    len,
                    last_len: len,
                    reply_bytes,
                    pad: 0,
                };
                request.push_bundle(token, &bundle).expect("deeper than the pool");
                request.publish();
                sent.push(Sent { token, count, buffer, area, left: u64::MAX >> (64 - count) });
                next += 1;
            }
            let Some(header) = replies_in.peek().unwrap() else {
                over.wait();
                continue;
            };
            let at = sent
                .iter()
                .position(|s| header.token.wrapping_sub(s.token) < u64::from(s.count))
                .expect("in flight");
            let bundle = &mut sent[at];
            let mut ended = 1 << (header.token - bundle.token);
            if header.kind == kind::BUNDLE {
                let Some(descriptor) = replies_in.bundle_reply(&header).unwrap() else { continue };
                let offset = bundle.buffer.offset() + u64::from(bundle.area);
                let area = ReplyArea { offset, bytes: 32 * bundle.count };
                let replies = descriptor.check(area, BUNDLED_MAX).expect("good replies");
                ended = replies.answered();
                let mut tokens = (0..64).filter(|i| ended >> i & 1 == 1).map(|i| bundle.token + i);
                for k in 0..replies.count() {
                    let token = tokens.next().expect("as many as replies");
                    let (mut got, mut expected) =
                        (vec![0; replies.len() as usize], vec![0; reply_len(token)]);
                    pool.read(&bundle.buffer, bundle.area + replies.at(k), &mut got);
                    fill(!token, &mut expected);
                    assert_eq!(got, expected, "the reply to {token}");
                }
            }
            assert_eq!(bundle.left & ended, ended, "messages end once");
            bundle.left &= !ended;
            replies_in.advance();
            replies_in.release();
            if bundle.left == 0 {
                pool.give_back(sent.swap_remove(at).buffer);
            }
        }
    });
    assert!(pool.is_whole());
}

#[test]
fn bundles_survive_two_threads() {
    for shape in shapes().into_iter().filter(|shape| shape.arena_bytes == 0) {
        hammer_bundles(shape.protocol, if cfg!(miri) { 4 } else { 3000 });
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
