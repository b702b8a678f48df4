//! The cost of the hop through the `cpu` accelerator, without a network: publish into RX rings, drive
//! the blocks, gather from TX rings; 64-byte echo.
//!
//! `cargo run --release -p serval-accel --example hop [seconds per figure] [threads]`
//!
//! With `threads` the blocks run on one accelerator thread instead of the caller's. That thread never sleeps here:
//! without a second core the figures are meaningless.

use std::time::{Duration, Instant};

use accel::Kernel;
use accel::cpu::{CpuAccelerator, Options, ThreadBlocks, WorkerBlocks};
use engine::accelerator::Blocks;
use mqueue::abi::{kind, protocol};
use mqueue::{Consumer, HeapMapping, MappedMemory, MqueuePlan, Producer, RegionPlan, RingPlan};
use mqueue::{Head, Region};

const BYTES: usize = 64;

struct Bench {
    ends: Vec<(Producer<MappedMemory>, Consumer<MappedMemory>)>,
    blocks: Box<dyn Blocks>,
    _accelerator: Option<CpuAccelerator>,
    rang: Vec<u32>,
    /// Whether an mqueue is in `rang`.
    rung: Vec<bool>,
    touched: Vec<u32>,
    /// The next mqueue to get a run of messages.
    next: usize,
    sent: u64,
    outstanding: u64,
}

impl Bench {
    fn new(mqueues: u32, protocol: u8, threads: bool) -> Self {
        let ring = RingPlan { protocol, message_bytes_max: BYTES as u32, arena_bytes: 0 };
        let mqueue = MqueuePlan { depth: 64, rx: ring, tx: ring };
        let plan = RegionPlan::of_blocks(mqueues, &[mqueue], 1);
        let memory = HeapMapping::memory(plan.bytes().expect("a sound plan") as usize);
        let mut region = Region::format(memory.clone(), &plan).expect("a sound plan");
        let ends = (0..mqueues).map(|mqueue| region.engine_ends(mqueue)).collect();
        let kernel = Kernel::builtin("echo").expect("echo is built in");
        let all: Vec<u32> = (0..mqueues).collect();
        let mut options = Options::default();
        let (accelerator, blocks): (_, Box<dyn Blocks>) = if threads {
            options.spin = Duration::from_secs(3600);
            let started = ThreadBlocks::start(memory, &kernel, &[], &[all], 1, None, &options);
            let (accelerator, mut shares) = started.expect("it starts");
            (Some(accelerator), Box::new(shares.remove(0)))
        } else {
            let blocks = WorkerBlocks::start(memory, kernel, &[], &all, &options);
            (None, Box::new(blocks.expect("it starts")))
        };
        Self {
            ends,
            blocks,
            _accelerator: accelerator,
            rang: Vec::with_capacity(mqueues as usize),
            rung: vec![false; mqueues as usize],
            touched: Vec::with_capacity(mqueues as usize),
            next: 0,
            sent: 0,
            outstanding: 0,
        }
    }

    /// One turn: fill up to `window` in flight, in runs of `run` messages per mqueue, drive and gather.
    #[inline]
    fn turn(&mut self, window: u64, run: u64, payload: &mut [u8; BYTES]) {
        'fill: while self.outstanding < window {
            let mqueue = self.next;
            self.next = if mqueue + 1 == self.ends.len() { 0 } else { mqueue + 1 };
            if !std::mem::replace(&mut self.rung[mqueue], true) {
                self.rang.push(mqueue as u32);
            }
            for _ in 0..run.min(window - self.outstanding) {
                payload[..8].copy_from_slice(&self.sent.to_le_bytes());
                let head = Head { token: self.sent, kind: kind::MESSAGE, ..Head::default() };
                if self.ends[mqueue].0.push(head, payload).is_err() {
                    break 'fill;
                }
                self.sent += 1;
                self.outstanding += 1;
            }
        }
        for &mqueue in &self.rang {
            self.ends[mqueue as usize].0.publish();
            self.rung[mqueue as usize] = false;
        }
        self.touched.clear();
        self.blocks.drive(self.sent, &self.rang, &mut self.touched);
        self.rang.clear();
        let mut received = [0; BYTES];
        for &mqueue in &self.touched {
            let tx = &mut self.ends[mqueue as usize].1;
            while let Some(header) = tx.peek().expect("a sound header") {
                let payload = &mut received[..header.len as usize];
                if !tx.copy_out(&header, payload) {
                    break; // granule: still being written
                }
                assert_eq!(payload[..8], header.token.to_le_bytes(), "a reply to another request");
                tx.advance();
                self.outstanding -= 1;
            }
            tx.release();
        }
    }

    /// The fastest tenth of many short measurements: the cost of the hop on an otherwise idle core.
    fn nanoseconds_per_message(&mut self, window: u64, run: u64, time: Duration) -> f64 {
        let mut payload = [7; BYTES];
        let mut measured = Vec::new();
        let begin = Instant::now();
        while begin.elapsed() < time {
            let (start, before) = (Instant::now(), self.sent);
            while self.sent < before + 10_000 {
                self.turn(window, run, &mut payload);
            }
            measured.push(start.elapsed().as_nanos() as f64 / (self.sent - before) as f64);
        }
        measured.sort_by(f64::total_cmp);
        measured[measured.len() / 10]
    }
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(0.3);
    let time = Duration::from_secs_f64(seconds);
    let threads = std::env::args().nth(2).is_some_and(|argument| argument == "threads");
    println!(
        "ns per message (64 B echo): publish, drive, gather; with one in flight it is the round trip"
    );
    println!("mqueues protocol  one in flight  64 in flight  64, runs of 8  one each  60 each");
    for mqueues in [1, 28, 240] {
        for (name, protocol) in
            [("doorbell", protocol::DOORBELL), ("granule16", protocol::GRANULE16)]
        {
            let mut bench = Bench::new(mqueues, protocol, threads);
            let n = u64::from(mqueues);
            let plans = [(1, 1), (64, 1), (64, 8), (n, 1), (60 * n, 60)];
            let ns = plans.map(|(window, run)| bench.nanoseconds_per_message(window, run, time));
            let [a, b, c, d, e] = ns;
            println!("{mqueues:7} {name:9} {a:14.1} {b:13.1} {c:14.1} {d:9.1} {e:8.1}");
        }
    }
}
