//! Throughput and latency of the rings on this machine: `cargo run --release -p serval-mqueue --example ring_rate`.
//!
//! Two threads pinned to two cores. One-way rates in million messages per second, by protocol and by
//! number of messages per `publish`, as best and median of several time slices (on a busy machine the
//! best slice is the meaningful one); the cost of a message when one core does
//! both sides, which is the instructions alone; rates of messages in bundles, where one thread does both sides; and the
//! round trip of one message. Every message is copied in and out and its number is checked.
//!
//! With `--json PROTOCOL DEPTH` it prints one figure instead: `{"rate":...}` with 64 messages per publish, for
//! the table of benchmarks.
//!
//! The depth matters: the lines of a shallow ring are still in the writer's L1 cache when the reader
//! accesses them and vice versa, which was several times slower than with deep rings on
//! the processors tried so far.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mqueue::abi::{Bundle, PoolEntry, kind, protocol};
use mqueue::{
    Buffer, BundleReplies, Consumer, Head, HeapMapping, LoanError, MappedMemory, MqueuePlan, Pool,
    Producer, Region, RegionPlan, ReplyArea, RingPlan,
};

const PAYLOAD_BYTES: usize = 64;
const DEPTHS: [u32; 3] = [256, 4096, 16_384];
const SLICES: usize = 11;

type Ends<A, B> = (A, B);
type Out = Producer<MappedMemory>;
type In = Consumer<MappedMemory>;

/// The engine's and the accelerator's ends of one mqueue.
fn mqueue(protocol: u8, depth: u32) -> (Ends<Out, In>, Ends<In, Out>) {
    let ring = RingPlan { protocol, message_bytes_max: PAYLOAD_BYTES as u32, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(1, &mqueues, 1);
    let memory = HeapMapping::memory(plan.bytes().expect("a good plan") as usize);
    let mut engine = Region::format(memory.clone(), &plan).expect("enough memory");
    let mut accelerator = Region::join(memory).expect("just formatted");
    (engine.engine_ends(0), accelerator.accelerator_ends(0))
}

fn pin(core: usize) {
    // SAFETY: cpu_set_t is a plain bit array, valid when zeroed; the calls read and write only it.
    let rc = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    assert_eq!(rc, 0, "cannot pin to core {core}");
}

fn head(n: u64) -> Head {
    Head { token: n, tag: 0, kind: kind::MESSAGE, status: 0 }
}

/// Copies the next message out, if there is one.
#[inline]
fn receive(rx: &mut In, payload: &mut [u8; PAYLOAD_BYTES]) -> Option<u64> {
    let header = rx.peek().expect("an honest peer")?;
    if header.len as usize != PAYLOAD_BYTES || !rx.copy_out(&header, payload) {
        return None;
    }
    rx.advance();
    Some(header.token)
}

/// Every word of a message's payload encodes its number, so that a torn message is detected.
fn payload_of(n: u64) -> [u8; PAYLOAD_BYTES] {
    let mut payload = [0; PAYLOAD_BYTES];
    for word in payload.chunks_exact_mut(8) {
        word.copy_from_slice(&n.to_le_bytes());
    }
    payload
}

/// Messages per second, one way.
fn rate(protocol: u8, depth: u32, batch: u64, seconds: f64, cores: (usize, usize)) -> f64 {
    let ((mut tx, _), (mut rx, _)) = mqueue(protocol, depth);
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
    let start = Instant::now();
    let messages = std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(cores.0);
            let mut n = 0;
            while n % 1024 != 0 || !stop.load(Ordering::Relaxed) {
                match tx.push(head(n), &payload_of(n)) {
                    Ok(()) => n += 1,
                    Err(LoanError::Full) => _ = tx.publish(),
                    Err(error) => panic!("{error}"),
                }
                if n % batch == 0 {
                    tx.publish();
                }
            }
            tx.publish();
            sent.store(n, Ordering::Release);
        });
        let receiver = scope.spawn(|| {
            pin(cores.1);
            let mut payload = [0; PAYLOAD_BYTES];
            let mut n = 0;
            loop {
                match receive(&mut rx, &mut payload) {
                    Some(token) => {
                        assert_eq!(token, n);
                        assert!(payload == payload_of(n), "message {n} arrived as {payload:?}");
                        n += 1;
                        if n % 64 == 0 {
                            rx.release();
                        }
                    }
                    None => {
                        rx.release();
                        if sent.load(Ordering::Acquire) == n {
                            return n;
                        }
                        std::hint::spin_loop();
                    }
                }
            }
        });
        std::thread::sleep(Duration::from_secs_f64(seconds));
        stop.store(true, Ordering::Relaxed);
        receiver.join().expect("the receiver")
    });
    messages as f64 / start.elapsed().as_secs_f64()
}

/// Nanoseconds per message when one thread writes and reads batches of `batch`.
fn one_core(protocol: u8, batch: u64) -> f64 {
    let ((mut tx, _), (mut rx, _)) = mqueue(protocol, 64);
    let mut payload = [7; PAYLOAD_BYTES];
    let mut received = [0; PAYLOAD_BYTES];
    let rounds = 20_000;
    let start = Instant::now();
    for round in 0..rounds {
        for i in 0..batch {
            payload[..8].copy_from_slice(&u64::to_le_bytes(round * batch + i));
            tx.push(head(round * batch + i), &payload).expect("room");
        }
        tx.publish();
        for i in 0..batch {
            assert_eq!(receive(&mut rx, &mut received), Some(round * batch + i));
            assert_eq!(received[..8], (round * batch + i).to_le_bytes());
        }
        rx.release();
    }
    start.elapsed().as_nanos() as f64 / (rounds * batch) as f64
}

/// Median and best (the largest) of several measurements.
fn slices(measure: impl FnMut() -> f64) -> (f64, f64) {
    let mut all: Vec<f64> = std::iter::repeat_with(measure).take(SLICES).collect();
    all.sort_unstable_by(f64::total_cmp);
    (all[SLICES / 2], all[SLICES - 1])
}

/// Round trip times in nanoseconds, sorted.
fn round_trips(protocol: u8, count: usize, cores: (usize, usize)) -> Vec<u64> {
    let ((mut tx, mut back), (mut rx, mut reply)) = mqueue(protocol, 64);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            pin(cores.1);
            let mut payload = [0; PAYLOAD_BYTES];
            for n in 0..count as u64 {
                while receive(&mut rx, &mut payload).is_none() {
                    std::hint::spin_loop();
                }
                rx.release();
                reply.push(head(n), &payload).expect("room");
                reply.publish();
            }
        });
        let client = scope.spawn(move || {
            pin(cores.0);
            let mut payload = [1; PAYLOAD_BYTES];
            let mut times = Vec::with_capacity(count);
            for n in 0..count as u64 {
                let start = Instant::now();
                tx.push(head(n), &payload).expect("room");
                tx.publish();
                while receive(&mut back, &mut payload).is_none() {
                    std::hint::spin_loop();
                }
                back.release();
                times.push(start.elapsed().as_nanos() as u64);
            }
            times.sort_unstable();
            times
        });
        client.join().expect("the client")
    })
}

/// Messages of a bundle, and bundles in flight: 512 messages.
const BUNDLE_COUNT: u32 = 64;
const BUNDLES: usize = 8;

/// Bytes of messages and of their replies, and whether the messages are received in the pool.
#[derive(Clone, Copy)]
struct Bundled {
    message: u32,
    reply: u32,
    in_place: bool,
}

/// A bundle in flight, as the engine knows it.
struct Sent {
    token: u64,
    buffer: Buffer,
    /// Where the area for replies is in the buffer.
    area: u32,
}

/// Both sides of a ring with a pool, for one thread.
struct BundleBench {
    what: Bundled,
    memory: MappedMemory,
    pools: Vec<PoolEntry>,
    pool: Pool<MappedMemory>,
    engine: Ends<Out, In>,
    block: Ends<In, Out>,
    /// What one receive call brought, and what one send call sends.
    batch: Vec<u8>,
    replies: Vec<u8>,
}

impl BundleBench {
    fn new(protocol: u8, what: Bundled) -> Self {
        let ring = RingPlan { protocol, message_bytes_max: 1024, arena_bytes: 0 };
        let mqueue = MqueuePlan { depth: 64, rx: ring, tx: ring };
        let plan = RegionPlan::of_blocks(1, &[mqueue], 1).with_pools(1, 4 << 20);
        let memory = HeapMapping::memory(plan.bytes().expect("a good plan") as usize);
        let mut engine = Region::format(memory.clone(), &plan).expect("enough memory");
        let mut accelerator = Region::join(memory.clone()).expect("just formatted");
        let batch = (0..BUNDLE_COUNT * what.message).map(|i| (i * 7 + i / 256) as u8).collect();
        let replies = vec![0; (BUNDLE_COUNT * what.reply) as usize];
        let (pools, pool) = (accelerator.pools().to_vec(), engine.engine_pool(0));
        let ends = (engine.engine_ends(0), accelerator.accelerator_ends(0));
        Self { what, memory, pools, pool, engine: ends.0, block: ends.1, batch, replies }
    }

    /// Takes the buffer for the next bundle, whose messages the host kernel or the engine puts into it.
    fn buffer(&mut self, token: u64) -> Sent {
        let area = (BUNDLE_COUNT * self.what.message).next_multiple_of(64);
        let bytes = area + BUNDLE_COUNT * self.what.reply.next_multiple_of(16);
        Sent { token, buffer: self.pool.take(bytes).expect("a pool that is large enough"), area }
    }

    fn send(&mut self, sent: &Sent) {
        if !self.what.in_place {
            self.pool.write(&sent.buffer, 0, &self.batch);
        }
        let (offset, len) = (sent.buffer.offset(), self.what.message);
        let bundle = Bundle {
            offset,
            reply_offset: offset + u64::from(sent.area),
            stride: len,
            count: BUNDLE_COUNT,
            len,
            last_len: len,
            reply_bytes: BUNDLE_COUNT * self.what.reply.next_multiple_of(16),
            pad: 0,
        };
        self.engine.0.push_bundle(sent.token, &bundle).expect("room");
    }

    /// The block copies and compares each message and writes its reply.
    fn serve(&mut self) {
        let (rx, tx) = &mut self.block;
        let mut message = vec![0; self.what.message as usize];
        while let Some(header) = rx.peek().expect("an honest peer") {
            let bundle = rx.bundle(&header).expect("a bundle").expect("whole");
            let bundle = bundle.check(header.token, &self.pools, 1024).expect("a good one");
            let mut replies = BundleReplies::new(&bundle);
            for (i, sent) in (0..).zip(self.batch.chunks_exact(self.what.message as usize)) {
                bundle.copy_out(&self.memory, i, &mut message);
                assert!(message == sent, "message {i}");
                assert!(replies.write(&self.memory, i, &message[..self.what.reply as usize]));
            }
            replies.publish(tx).expect("room");
            rx.advance();
        }
        rx.release();
        tx.publish();
    }

    /// Copies the replies of the next completion to where they are sent from, and frees the bundle.
    fn collect(&mut self, sent: Sent) {
        let header = self.engine.1.peek().expect("an honest peer").expect("published");
        assert_eq!((header.kind, header.token), (kind::BUNDLE, sent.token));
        let reply = self.engine.1.bundle_reply(&header).expect("a completion").expect("whole");
        let offset = sent.buffer.offset() + u64::from(sent.area);
        let bytes = BUNDLE_COUNT * self.what.reply.next_multiple_of(16);
        let replies = reply.check(ReplyArea { offset, bytes }, 1024).expect("good replies");
        let (len, stride) = (replies.len() as usize, replies.stride() as usize);
        if len == stride {
            let all = len * replies.count() as usize;
            self.pool.read(&sent.buffer, sent.area + replies.at(0), &mut self.replies[..all]);
        } else {
            for (k, to) in (0..replies.count()).zip(self.replies.chunks_exact_mut(len)) {
                self.pool.read(&sent.buffer, sent.area + replies.at(k), to);
            }
        }
        self.engine.1.advance();
        self.pool.give_back(sent.buffer);
    }

    /// Million messages per second: of the engine's part alone, messages in and replies out, and of both sides.
    fn run(&mut self, turns: u64) -> (f64, f64) {
        let (start, mut engine) = (Instant::now(), Duration::ZERO);
        for turn in 0..turns {
            let token = |i: usize| (turn * BUNDLES as u64 + i as u64) << 6;
            let mut sent: Vec<Sent> = Vec::with_capacity(BUNDLES);
            let mut before = Instant::now();
            for i in 0..BUNDLES {
                let bundle = self.buffer(token(i));
                if self.what.in_place {
                    // What the host kernel would do.
                    engine += before.elapsed();
                    self.pool.write(&bundle.buffer, 0, &self.batch);
                    before = Instant::now();
                }
                self.send(&bundle);
                sent.push(bundle);
            }
            self.engine.0.publish();
            engine += before.elapsed();
            self.serve();
            let before = Instant::now();
            for bundle in sent {
                self.collect(bundle);
            }
            self.engine.1.release();
            engine += before.elapsed();
            let whole = self.batch.chunks_exact(self.what.message as usize);
            for (reply, sent) in self.replies.chunks_exact(self.what.reply as usize).zip(whole) {
                assert!(reply == &sent[..self.what.reply as usize], "a reply");
            }
        }
        let messages = (turns * BUNDLES as u64 * u64::from(BUNDLE_COUNT)) as f64 / 1e6;
        (messages / engine.as_secs_f64(), messages / start.elapsed().as_secs_f64())
    }
}

/// The rows of bundles: rates of one thread.
fn print_bundles(name: &str, protocol: u8) {
    for (text, message, reply, in_place) in [
        ("64 -> 64 B, copied", 64, 64, false),
        ("784 -> 44 B, copied", 784, 44, false),
        ("784 -> 44 B, received in place", 784, 44, true),
    ] {
        let mut bench = BundleBench::new(protocol, Bundled { message, reply, in_place });
        let mut both = Vec::new();
        let (median, best) = slices(|| {
            let (engine, all) = bench.run(500);
            both.push(all);
            engine
        });
        let all = both.into_iter().fold(0.0, f64::max);
        println!(
            "{name:9} bundles, {text}: engine's part {median:.1} M msg/s, best {best:.1}; with the block's best {all:.1}"
        );
    }
}

/// The protocols that this machine supports.
fn protocols() -> Vec<(&'static str, u8)> {
    let mut protocols = vec![("doorbell", protocol::DOORBELL), ("granule8", protocol::GRANULE8)];
    if mqueue::memory::unit16_is_atomic() {
        protocols.push(("granule16", protocol::GRANULE16));
    }
    protocols
}

/// One rate as JSON: the best and the median of several slices of a tenth of a second.
fn json(arguments: &[String]) -> Result<(), String> {
    let [name, depth, cores @ ..] = arguments else {
        return Err("give a protocol, a depth and perhaps two cores".to_owned());
    };
    let cores: Vec<usize> = cores.iter().filter_map(|core| core.parse().ok()).collect();
    let cores = if let [from, to] = cores[..] { (from, to) } else { (0, 1) };
    let known = protocols();
    let found = known.iter().find(|(known, _)| known == name);
    let (_, protocol) = found.ok_or_else(|| format!("no protocol {name} here, only {known:?}"))?;
    let depth: u32 = depth.parse().map_err(|_| format!("{depth} is not a depth"))?;
    let (median, best) = slices(|| rate(*protocol, depth, 64, 0.1, cores));
    println!("{{\"rate\":{median:.0},\"best_rate\":{best:.0}}}");
    Ok(())
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "--json") {
        if let Err(what) = json(&words[1..]) {
            eprintln!("ring_rate: {what}");
            std::process::exit(2);
        }
        return;
    }
    let mut arguments = words.iter().map(|a| a.parse::<f64>().expect("a number"));
    let seconds = arguments.next().unwrap_or(0.1);
    let mut core = |default: f64| arguments.next().unwrap_or(default) as usize;
    let cores = (core(0.0), core(1.0));

    println!("{PAYLOAD_BYTES} B payload, cores {cores:?}");
    for (name, protocol) in protocols() {
        for depth in DEPTHS {
            for batch in [1, 16, 64] {
                let measure = || rate(protocol, depth, batch, seconds, cores) / 1e6;
                let (median, best) = slices(measure);
                print!("{name:9} depth {depth:5}, publish every {batch:2}: ");
                println!("{median:6.1} M msg/s, best {best:6.1}");
            }
        }
        let (median, best) = slices(|| -one_core(protocol, 16));
        println!("{name:9} on one core: {:.1} ns a message, best {:.1}", -median, -best);
        print_bundles(name, protocol);
        let times = round_trips(protocol, 200_000, cores);
        let quantile = |q: f64| times[(times.len() as f64 * q) as usize];
        println!("{name:9} round trip: p50 {} ns, p99 {} ns", quantile(0.5), quantile(0.99));
    }
}
