//! The `cuda` accelerator on a real GPU, with this program as the engine. Fails where there is none.
//!
//! ```text
//! gpu hop                what a queue hop costs: 64 B echo, one message in flight
//! gpu rate               messages a second through many mqueues, every word checked
//! gpu litmus [SECONDS]   short rings, every protocol, each message checked word by word, for this long each
//! gpu refuse             what must be refused is refused
//! gpu fault IMAGE        a kernel that faults, from a fatbin or cubin, is told
//! gpu hang               a kernel that does not come back is told
//! ```
//!
//! `tools/gpu/check` runs all of it. `--json` after the first word prints a line of JSON for each figure.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use accel::AccelError;
use accel::cuda::{CudaAccelerator, Gpu, Options, Service};
use mqueue::abi::{kind, protocol, reason, stop};
use mqueue::{
    Consumer, Head, HeapMapping, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan,
    Words,
};

const PROTOCOLS: [(&str, u8); 3] = [
    ("granule16", protocol::GRANULE16),
    ("granule8", protocol::GRANULE8),
    ("doorbell", protocol::DOORBELL),
];
const BYTES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(30);

type Ends = (Producer<MappedMemory>, Consumer<MappedMemory>);

/// A service on the GPU, and the engine's side of it.
struct Running {
    words: Words<MappedMemory>,
    ends: Vec<Ends>,
    accelerator: CudaAccelerator,
}

fn plan(mqueues: u32, depth: u32, protocol: u8, bytes: usize) -> RegionPlan {
    let ring = RingPlan { protocol, message_bytes_max: bytes as u32, arena_bytes: 0 };
    let mqueues_of_a_block = vec![MqueuePlan { depth, rx: ring, tx: ring }];
    RegionPlan { block_count: mqueues, mqueues: mqueues_of_a_block, generation: 1, start: 0 }
}

fn start(plan: &RegionPlan, kernel: &str, params: &[(&str, f64)]) -> Result<Running, AccelError> {
    let region = HeapMapping::memory(plan.bytes().expect("a sound plan") as usize);
    let mut formatted = Region::format(region.clone(), plan).expect("a sound plan");
    let ends = (0..plan.block_count).map(|mqueue| formatted.engine_ends(mqueue)).collect();
    let words = formatted.words();
    let params = params.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    let service = Service { region, kernel: kernel.to_owned(), params, threads: None };
    let options = Options { hung_after: Duration::from_secs(2), ..Options::default() };
    let accelerator = Gpu::open(0, None)?.start(&[service], options)?;
    Ok(Running { words, ends, accelerator })
}

impl Running {
    /// Ends the blocks and looks why they ended.
    fn stop(mut self) {
        self.words.set_stop(stop::DRAIN);
        assert!(self.accelerator.join(PATIENCE).expect("a sound GPU"), "blocks did not end");
        let mut ended = Vec::new();
        self.accelerator.poll(&mut ended).expect("a sound GPU");
        assert_eq!(ended.len(), self.ends.len());
        assert!(ended.iter().all(|end| end.reason == reason::STOPPED), "{ended:?}");
    }
}

/// Every word tells mqueue, number and place.
fn payload_of(mqueue: usize, n: u64, payload: &mut [u8]) {
    let seed = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((mqueue as u64) << 48);
    for (at, word) in payload.chunks_mut(8).enumerate() {
        let bytes = seed.wrapping_add(at as u64).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

/// Length of message `n` where at most `bytes` fit: one size for figures, all sizes otherwise.
fn len_of(bytes: usize, n: u64) -> usize {
    if bytes == BYTES { BYTES } else { (n.wrapping_mul(2_654_435_761) >> 7) as usize % (bytes + 1) }
}

/// One mqueue's traffic: as much in flight as fits, each reply checked.
struct Traffic<'a> {
    mqueue: usize,
    ends: &'a mut Ends,
    sent: u64,
    received: u64,
    bytes: usize,
}

impl Traffic<'_> {
    /// Sends as much as there is room for.
    fn fill(&mut self, payload: &mut [u8; 1024]) {
        loop {
            let len = len_of(self.bytes, self.sent);
            payload_of(self.mqueue, self.sent, &mut payload[..len]);
            let head = Head { token: self.sent, kind: kind::MESSAGE, ..Head::default() };
            if self.ends.0.push(head, &payload[..len]).is_err() {
                return;
            }
            self.sent += 1;
        }
    }

    fn turn(&mut self, filling: bool) {
        let (mut payload, mut expected) = ([0; 1024], [0; 1024]);
        let before = self.sent;
        if filling {
            self.fill(&mut payload);
        }
        if self.sent != before {
            self.ends.0.publish();
        }
        let tx = &mut self.ends.1;
        while let Some(header) = tx.peek().expect("a sound header") {
            let received = &mut payload[..header.len as usize];
            if !tx.copy_out(&header, received) {
                break; // still on its way
            }
            let (mqueue, n) = (self.mqueue, self.received);
            assert_eq!(header.token, n, "mqueue {mqueue}: replies come in order");
            let len = len_of(self.bytes, n);
            payload_of(mqueue, n, &mut expected[..len]);
            assert!(received == &expected[..len], "mqueue {mqueue}: message {n} came back changed");
            tx.advance();
            self.received += 1;
        }
        tx.release();
    }
}

/// Echoes through all mqueues for `time`, with the engine's ends on `threads` threads. Returns messages a
/// second and how many there were.
fn storm(plan: &RegionPlan, threads: usize, time: Duration) -> Result<(f64, u64), AccelError> {
    let bytes = plan.mqueues[0].rx.message_bytes_max as usize;
    let mut running = start(plan, "echo", &[])?;
    let words = running.words.clone();
    let share = running.ends.len().div_ceil(threads);
    let begin = Instant::now();
    let messages = std::thread::scope(|scope| {
        let workers: Vec<_> = (running.ends.chunks_mut(share).enumerate())
            .map(|(worker, ends)| {
                let (words, first) = (words.clone(), worker * share);
                scope.spawn(move || {
                    let traffic = |(at, ends)| Traffic {
                        mqueue: first + at,
                        ends,
                        sent: 0,
                        received: 0,
                        bytes,
                    };
                    let mut all: Vec<Traffic<'_>> =
                        ends.iter_mut().enumerate().map(traffic).collect();
                    while begin.elapsed() < time {
                        for _ in 0..16 {
                            all.iter_mut().for_each(|one| one.turn(true));
                        }
                        if worker == 0 {
                            words.set_engine_heartbeat(words.engine_heartbeat() + 1);
                        }
                    }
                    let late = Instant::now();
                    while all.iter().any(|one| one.received < one.sent) {
                        all.iter_mut().for_each(|one| one.turn(false));
                        assert!(late.elapsed() < PATIENCE, "replies are missing");
                    }
                    all.iter().map(|one| one.received).sum::<u64>()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no wrong reply")).sum::<u64>()
    });
    let seconds = begin.elapsed().as_secs_f64();
    running.stop();
    Ok((messages as f64 / seconds, messages))
}

fn hop(json: bool) -> Result<(), AccelError> {
    for (name, protocol) in PROTOCOLS {
        for bytes in [BYTES, 1024] {
            let mut running = start(&plan(1, 64, protocol, 1024), "echo", &[])?;
            let (rx, tx) = &mut running.ends[0];
            let (mut payload, mut received) = (vec![0; bytes], vec![0; bytes]);
            let mut times = Vec::new();
            for n in 0..200_000u64 {
                payload_of(0, n, &mut payload);
                let head = Head { token: n, kind: kind::MESSAGE, ..Head::default() };
                let begin = Instant::now();
                rx.push(head, &payload).expect("an empty ring");
                rx.publish();
                loop {
                    if let Some(header) = tx.peek().expect("a sound header")
                        && tx.copy_out(&header, &mut received)
                    {
                        break;
                    }
                    if n % 1024 == 0 {
                        running.words.set_engine_heartbeat(n);
                    }
                    std::hint::spin_loop();
                }
                times.push(begin.elapsed().as_nanos() as u64);
                tx.advance();
                tx.release();
                assert!(received == payload, "message {n} came back changed");
            }
            running.stop();
            times.sort_unstable();
            let at = |share: f64| times[(times.len() as f64 * share) as usize] as f64 / 1e3;
            let (p50, p99, min) = (at(0.5), at(0.99), at(0.0));
            if json {
                println!(
                    "{{\"figure\":\"hop\",\"protocol\":\"{name}\",\"bytes\":{bytes},\"p50_us\":{p50},\"p99_us\":{p99},\"min_us\":{min}}}"
                );
            } else {
                println!(
                    "hop, {name:9}, {bytes:4} B: p50 {p50:.2} us, p99 {p99:.2} us, min {min:.2} us"
                );
            }
        }
    }
    Ok(())
}

fn rate(json: bool) -> Result<(), AccelError> {
    for (name, protocol) in PROTOCOLS {
        for mqueues in [1, 28, 132, 264, 528] {
            for threads in [1, 4] {
                if threads > mqueues as usize {
                    continue;
                }
                let time = Duration::from_millis(700);
                let (rate, _) = storm(&plan(mqueues, 64, protocol, BYTES), threads, time)?;
                if json {
                    println!(
                        "{{\"figure\":\"rate\",\"protocol\":\"{name}\",\"mqueues\":{mqueues},\"threads\":{threads},\"per_second\":{rate:.0}}}"
                    );
                } else {
                    println!(
                        "rate, {name:9}, {mqueues:3} mqueues, {threads} threads: {:7.2} M/s, every word checked",
                        rate / 1e6
                    );
                }
            }
        }
    }
    Ok(())
}

fn litmus(seconds: f64, json: bool) -> Result<(), AccelError> {
    for (name, protocol) in PROTOCOLS {
        for (mqueues, depth, bytes) in [(1, 2, BYTES), (64, 4, BYTES), (64, 4, 1000), (264, 2, 200)]
        {
            let plan = plan(mqueues, depth, protocol, bytes);
            let (_, rounds) =
                storm(&plan, 4.min(mqueues as usize), Duration::from_secs_f64(seconds))?;
            if json {
                println!(
                    "{{\"figure\":\"litmus\",\"protocol\":\"{name}\",\"mqueues\":{mqueues},\"slots\":{depth},\"bytes\":{bytes},\"rounds\":{rounds},\"wrong\":0}}"
                );
            } else {
                println!(
                    "litmus, {name:9}, {mqueues:3} mqueues of {depth} slots, {bytes:4} B: {rounds} messages, none wrong"
                );
            }
        }
    }
    Ok(())
}

fn refuse() -> Result<(), AccelError> {
    let refused = |what: &str, result: Result<Running, AccelError>, part: &str| {
        let error = result.err().unwrap_or_else(|| panic!("{what} is not refused")).to_string();
        assert!(error.contains(part), "{what}: {error}");
        println!("{what}: {error}");
    };
    let doorbell = protocol::DOORBELL;
    refused("4096 blocks", start(&plan(4096, 2, doorbell, 64), "lenet", &[]), "do not all fit");
    refused(
        "no such kernel",
        start(&plan(1, 2, doorbell, 64), "nonsense", &[]),
        "no CUDA kernel `nonsense`",
    );
    let error = Gpu::open(99, None).err().expect("there are fewer").to_string();
    println!("GPU 99: {error}");
    Ok(())
}

/// A kernel that faults when it gets a message: the fault is told within the patience.
fn fault(image: &str) -> Result<(), AccelError> {
    let mut running = start(&plan(2, 2, protocol::DOORBELL, 64), image, &[])?;
    running.ends[0]
        .0
        .push(Head { kind: kind::MESSAGE, ..Head::default() }, b"x")
        .expect("an empty ring");
    running.ends[0].0.publish();
    let begin = Instant::now();
    loop {
        if let Err(error) = running.accelerator.poll(&mut Vec::new()) {
            println!("after {} ms: {error}", begin.elapsed().as_millis());
            return Ok(());
        }
        assert!(begin.elapsed() < PATIENCE, "the fault is not told");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A kernel that does not come back for longer than it may. This process then ends with the kernel running.
fn hang() -> Result<(), AccelError> {
    let spin = [("microseconds", 1e7)];
    let mut running = start(&plan(2, 2, protocol::DOORBELL, 64), "spin", &spin)?;
    for _ in 0..2 {
        running.ends[1]
            .0
            .push(Head { kind: kind::MESSAGE, ..Head::default() }, b"x")
            .expect("room");
    }
    running.ends[1].0.publish();
    let (mut ended, begin) = (Vec::new(), Instant::now());
    while ended.is_empty() {
        running.accelerator.poll(&mut ended).expect("a sound GPU");
        running.words.set_engine_heartbeat(begin.elapsed().as_millis() as u64);
        assert!(begin.elapsed() < PATIENCE, "the block is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((ended[0].block, ended[0].reason), (1, reason::HUNG));
    println!("after {} ms: block 1 hangs", begin.elapsed().as_millis());
    Ok(())
}

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let json = words.iter().any(|word| word == "--json");
    words.retain(|word| word != "--json");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["hop"] => hop(json),
        ["rate"] => rate(json),
        ["litmus"] => litmus(3.0, json),
        ["litmus", seconds] => litmus(seconds.parse().expect("seconds"), json),
        ["refuse"] => refuse(),
        ["fault", image] => fault(image),
        ["hang"] => hang(),
        _ => {
            eprintln!("usage: gpu hop|rate|litmus [SECONDS]|refuse|fault IMAGE|hang [--json]");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
