//! The `cuda` accelerator on a real GPU, with this program as the engine. Fails if there is no GPU.
//!
//! ```text
//! gpu hop                cost of a queue hop: 64 B echo, one message in flight
//! gpu rate               messages per second through many mqueues, every word checked
//! gpu litmus [SECONDS]   short rings, every protocol, each message checked word by word, for this long each
//! gpu refuse             checks that invalid services are refused
//! gpu fault IMAGE        checks that a kernel that faults, from a fatbin or cubin, is reported
//! gpu hang               checks that a kernel that hangs is reported
//! gpu idle IMAGE         cost that polling by waiting blocks adds for a working one; IMAGE has device/tests/gpu_looks.cpp
//! gpu lines IMAGE        cache lines per second between a GPU and host threads; IMAGE has device/tests/gpu_lines.cpp
//! ```
//!
//! `tools/gpu/check` runs all of it. `--json` prints a line of JSON for each figure. Further options: `--kernel FILE:NAME`
//! instead of the built-in echo, `--protocol NAME`, `--bytes`, `--mqueues`, `--threads`, `--depth`, `--ms` with numbers,
//! `--pages huge|ordinary` for pages of 2 MiB, which an engine uses if it can, or 4 KiB, and for a rate the way in which a thread
//! processes its mqueues (`--ahead`, `--messages`, `--in-flight`, `--together`, `--next`). Threads are pinned to cores.

mod probes;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use accel::AccelError;
use accel::cuda::{CudaAccelerator, Gpu, Options, Service};
use mqueue::abi::{SlotHeader, kind, protocol, reason, stop};
use mqueue::{
    Consumer, Head, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan, Words,
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
    RegionPlan::of_blocks(mqueues, &[MqueuePlan { depth, rx: ring, tx: ring }], 1)
}

/// The `echo` kernel to measure: the built-in one, or that of `--kernel`.
fn echo() -> String {
    option("--kernel").unwrap_or_else(|| "echo".to_owned())
}

/// The argument after `name`.
fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|word| word != name).nth(1)
}

/// Whether regions use pages of 2 MiB.
fn huge_pages() -> bool {
    match option("--pages").as_deref() {
        None | Some("huge") => true,
        Some("ordinary") => false,
        Some(other) => panic!("--pages must be huge or ordinary, not {other}"),
    }
}

/// Pins this thread to the n-th of the cores that this process may use.
fn pin(n: usize) {
    // SAFETY: any bits are a valid cpu_set_t; the calls access nothing else.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set), 0);
        let count = libc::CPU_COUNT(&set) as usize;
        let cores = (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set));
        let core = cores.cycle().nth(n % count).expect("a core");
        libc::CPU_ZERO(&mut set);
        libc::CPU_SET(core, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set), 0);
    }
}

/// The service to start, and its options.
struct Start<'a> {
    kernel: &'a str,
    params: &'a [(&'a str, f64)],
    /// Memory of the region; none for the engine's default.
    memory: Option<MappedMemory>,
    threads: Option<u32>,
}

impl Start<'_> {
    fn run(self, plan: &RegionPlan) -> Result<Running, AccelError> {
        let bytes = plan.bytes().expect("a sound plan") as usize;
        let huge = huge_pages();
        let region = self.memory.unwrap_or_else(|| probes::pages(bytes, huge));
        let mut formatted = Region::format(region.clone(), plan).expect("a sound plan");
        let ends = (0..plan.block_count).map(|mqueue| formatted.engine_ends(mqueue)).collect();
        let words = formatted.words();
        let params =
            self.params.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        let kernel = self.kernel.to_owned();
        let service = Service {
            name: kernel.clone(),
            region,
            kernel,
            file: None,
            params,
            threads: self.threads,
        };
        let hung_after = Duration::from_secs(2);
        let options = Options { hung_after, ..Options::default() };
        let accelerator = Gpu::open(0, None)?.start(&[service], options)?;
        Ok(Running { words, ends, accelerator })
    }
}

fn start(plan: &RegionPlan, kernel: &str, params: &[(&str, f64)]) -> Result<Running, AccelError> {
    Start { kernel, params, memory: None, threads: None }.run(plan)
}

impl Running {
    /// Ends the blocks and checks their reasons.
    fn stop(mut self) {
        self.words.set_stop(stop::DRAIN);
        assert!(self.accelerator.join(PATIENCE).expect("a sound GPU"), "blocks did not end");
        let mut ended = Vec::new();
        self.accelerator.poll(&mut ended).expect("a sound GPU");
        assert_eq!(ended.len(), self.ends.len());
        assert!(ended.iter().all(|end| end.reason == reason::STOPPED), "{ended:?}");
    }
}

/// Every word encodes mqueue, number and position: the first one is this, the others count up from it.
#[inline]
fn first_word(mqueue: usize, n: u64) -> u64 {
    (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((mqueue as u64) << 48)
}

#[inline]
fn payload_of(mqueue: usize, n: u64, payload: &mut [u8]) {
    let first = first_word(mqueue, n);
    if let Ok(payload) = <&mut [u8; BYTES]>::try_from(&mut *payload) {
        return fill_words(first, payload); // of a known length, which compilers like
    }
    fill_words(first, payload);
}

#[inline(always)]
fn fill_words(first: u64, payload: &mut [u8]) {
    let (whole, rest) = payload.as_chunks_mut::<8>();
    let last = first.wrapping_add(whole.len() as u64).to_le_bytes();
    for (at, word) in whole.iter_mut().enumerate() {
        *word = first.wrapping_add(at as u64).to_le_bytes();
    }
    rest.iter_mut().zip(last).for_each(|(byte, value)| *byte = value);
}

/// Whether every byte is as [`payload_of`] writes it.
#[inline]
fn is_payload_of(mqueue: usize, n: u64, payload: &[u8]) -> bool {
    let first = first_word(mqueue, n);
    if let Ok(payload) = <&[u8; BYTES]>::try_from(payload) {
        return has_words(first, payload);
    }
    has_words(first, payload)
}

#[inline(always)]
fn has_words(first: u64, payload: &[u8]) -> bool {
    let (whole, rest) = payload.as_chunks::<8>();
    let last = first.wrapping_add(whole.len() as u64).to_le_bytes();
    let mut wrong = 0;
    for (at, word) in whole.iter().enumerate() {
        wrong |= u64::from_le_bytes(*word) ^ first.wrapping_add(at as u64);
    }
    wrong == 0 && rest.iter().zip(last).all(|(byte, value)| *byte == value)
}

/// Length of message `n` if at most `bytes` fit, in buffers of `MAX`: one size for measurements, which compilers copy
/// without a loop, all sizes otherwise.
#[inline(always)]
fn len_of<const MAX: usize>(bytes: usize, n: u64) -> usize {
    if MAX == BYTES { BYTES } else { (n.wrapping_mul(2_654_435_761) >> 7) as usize % (bytes + 1) }
}

/// Messages written before the first of them is sent, or read before the first is checked: data that was just
/// stored in pieces of one size is slow to load in pieces of another.
const BATCH: usize = 8;

/// A thread's buffers for writing and reading messages of up to `MAX` bytes.
struct Buffers<const MAX: usize> {
    sent: [[u8; MAX]; BATCH],
    received: [[u8; MAX]; BATCH],
}

/// One mqueue's traffic: as many messages in flight as fit, each reply checked.
struct Traffic<'a, const MAX: usize> {
    mqueue: usize,
    ends: &'a mut Ends,
    sent: u64,
    received: u64,
    bytes: usize,
    in_flight: u64,
    next: u64,
}

impl<const MAX: usize> Traffic<'_, MAX> {
    /// Sends while there is room.
    #[inline]
    fn fill(&mut self, buffers: &mut Buffers<MAX>) {
        let (mqueue, bytes, next) = (self.mqueue, self.bytes, self.next);
        loop {
            let room = (self.in_flight - (self.sent - self.received)).min(BATCH as u64);
            let numbers = self.sent..self.sent + room;
            for (n, payload) in numbers.clone().zip(&mut buffers.sent) {
                payload_of(mqueue, n, &mut payload[..len_of::<MAX>(bytes, n)]);
            }
            for (n, payload) in numbers.zip(&buffers.sent) {
                let head = Head { token: n, kind: kind::MESSAGE, ..Head::default() };
                if self.ends.0.push(head, &payload[..len_of::<MAX>(bytes, n)]).is_err() {
                    return;
                }
                if next > 0 {
                    self.ends.0.prefetch(next, bytes as u64);
                }
                self.sent += 1;
            }
            if room < BATCH as u64 {
                return;
            }
        }
    }

    /// Takes the available replies.
    #[inline]
    fn drain(&mut self, buffers: &mut Buffers<MAX>) {
        let (mqueue, bytes, next) = (self.mqueue, self.bytes, self.next);
        let tx = &mut self.ends.1;
        loop {
            let mut count = 0;
            for (n, received) in (self.received..).zip(&mut buffers.received) {
                let Some(header) = tx.peek().expect("a sound header") else { break };
                let len = len_of::<MAX>(bytes, n);
                if header.token != n || header.len as usize != len {
                    wrong_header(mqueue, n, header);
                }
                if !tx.copy_out(&header, &mut received[..len]) {
                    break; // partially visible
                }
                tx.advance();
                if next > 0 {
                    tx.prefetch_at(next, bytes as u64);
                }
                count += 1;
            }
            for (n, received) in (self.received..).zip(&buffers.received[..count]) {
                let right = is_payload_of(mqueue, n, &received[..len_of::<MAX>(bytes, n)]);
                assert!(right, "mqueue {mqueue}: message {n} came back changed");
            }
            self.received += count as u64;
            if count < BATCH {
                return;
            }
        }
    }

    /// Publishes the sent messages and releases the replies.
    #[inline]
    fn publish(&mut self) {
        self.ends.0.publish();
        self.ends.1.release();
    }

    /// Prefetches the lines that the next turn will access from wherever the GPU has left them.
    #[inline]
    fn prefetch(&self, messages: u64) {
        for ahead in 0..messages {
            self.ends.1.prefetch_at(ahead, self.bytes as u64);
            self.ends.0.prefetch(ahead, self.bytes as u64);
        }
    }
}

/// Separate, and by value: a header that is printed where it is checked would be kept in memory each time.
#[cold]
fn wrong_header(mqueue: usize, n: u64, header: SlotHeader) -> ! {
    panic!("mqueue {mqueue}: message {n} came back as {header:?}")
}

/// How a thread processes its mqueues.
#[derive(Clone, Copy)]
struct Manner {
    /// Mqueues that a thread prefetches, and messages of each.
    ahead: usize,
    messages: u64,
    /// Distance in messages at which a slot is prefetched before it is read or written; 0 leaves that to the processor, which
    /// recognises consecutive slots.
    next: u64,
    /// Maximum number of unanswered messages of an mqueue.
    in_flight: u64,
    /// Mqueues whose words are published together: eight share a line, which a polling GPU takes from the cache.
    together: usize,
}

impl Manner {
    fn of(depth: u32) -> Self {
        let number = |name, otherwise| {
            option(name).map_or(otherwise, |word| word.parse().expect("a number"))
        };
        let depth = u64::from(depth);
        Self {
            ahead: number("--ahead", 8) as usize,
            messages: number("--messages", 2),
            next: number("--next", 0),
            in_flight: number("--in-flight", depth).min(depth),
            together: (number("--together", 32) as usize).max(1),
        }
    }
}

/// Processes all mqueues in turn for `time`, then until everything is answered. Returns the number of replies.
fn work<const MAX: usize>(
    all: &mut [Traffic<'_, MAX>],
    time: Duration,
    manner: Manner,
    mut beat: impl FnMut(),
) -> u64 {
    let mut buffers = Buffers { sent: [[0; MAX]; BATCH], received: [[0; MAX]; BATCH] };
    let begin = Instant::now();
    while begin.elapsed() < time {
        for _ in 0..16 {
            for at in 0..all.len() {
                let next = at + manner.ahead;
                let next = if next < all.len() { next } else { next % all.len() };
                all[next].prefetch(manner.messages);
                all[at].drain(&mut buffers);
                all[at].fill(&mut buffers);
                if (at + 1) % manner.together == 0 || at + 1 == all.len() {
                    let first = at - at % manner.together;
                    all[first..=at].iter_mut().for_each(Traffic::publish);
                }
            }
        }
        beat();
    }
    let late = Instant::now();
    while all.iter().any(|one| one.received < one.sent) {
        for one in &mut *all {
            one.drain(&mut buffers);
            one.publish();
        }
        assert!(late.elapsed() < PATIENCE, "replies are missing");
    }
    all.iter().map(|one| one.received).sum()
}

/// Echoes through all mqueues for `time`, with the engine's ends on `threads` threads. Returns messages per
/// second and their number.
fn storm(plan: &RegionPlan, threads: usize, time: Duration) -> Result<(f64, u64), AccelError> {
    match plan.rings[0].messages.message_bytes_max as usize {
        BYTES => storm_of::<BYTES>(plan, threads, time),
        _ => storm_of::<1024>(plan, threads, time),
    }
}

fn storm_of<const MAX: usize>(
    plan: &RegionPlan,
    threads: usize,
    time: Duration,
) -> Result<(f64, u64), AccelError> {
    let bytes = plan.rings[0].messages.message_bytes_max as usize;
    let mut running = start(plan, &echo(), &[])?;
    let words = running.words.clone();
    let share = running.ends.len().div_ceil(threads);
    let manner = Manner::of(plan.rings[0].depth);
    let begin = Instant::now();
    let messages = std::thread::scope(|scope| {
        let workers: Vec<_> = (running.ends.chunks_mut(share).enumerate())
            .map(|(worker, ends)| {
                let (words, first) = (words.clone(), worker * share);
                scope.spawn(move || {
                    pin(worker);
                    let traffic = |(at, ends)| Traffic {
                        mqueue: first + at,
                        ends,
                        sent: 0,
                        received: 0,
                        bytes,
                        in_flight: manner.in_flight,
                        next: manner.next,
                    };
                    let mut all: Vec<Traffic<'_, MAX>> =
                        ends.iter_mut().enumerate().map(traffic).collect();
                    work(&mut all, time, manner, || {
                        if worker == 0 {
                            words.set_engine_heartbeat(words.engine_heartbeat() + 1);
                        }
                    })
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no wrong reply")).sum::<u64>()
    });
    let seconds = begin.elapsed().as_secs_f64();
    running.stop();
    Ok((messages as f64 / seconds, messages))
}

/// The comma-separated numbers after `name` among the arguments, or `otherwise`.
fn numbers(name: &str, otherwise: &[u64]) -> Vec<u64> {
    let given = |word: String| word.split(',').map(|one| one.parse().expect("a number")).collect();
    option(name).map_or_else(|| otherwise.to_vec(), given)
}

/// All protocols, or the one given by `--protocol`.
fn protocols() -> impl Iterator<Item = (&'static str, u8)> {
    let wanted = option("--protocol");
    PROTOCOLS.into_iter().filter(move |(name, _)| wanted.as_ref().is_none_or(|w| w == name))
}

fn hop(json: bool) -> Result<(), AccelError> {
    pin(0);
    let fetch = numbers("--fetch", &[1])[0];
    for (name, protocol) in protocols() {
        for bytes in numbers("--bytes", &[BYTES as u64, 1024]) {
            let bytes = bytes as usize;
            let mut running = start(&plan(1, 64, protocol, 1024), &echo(), &[])?;
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
                    // A message of two lines is prefetched in one trip.
                    if fetch != 0 {
                        tx.prefetch_at(0, bytes as u64);
                    }
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
                    "{{\"figure\":\"hop\",\"protocol\":\"{name}\",\"bytes\":{bytes},\"p50_us\":{p50},\"p99_us\":{p99},\"min_us\":{min},\"p50_ns\":{:.0},\"p99_ns\":{:.0}}}",
                    p50 * 1e3,
                    p99 * 1e3
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
    let depth = numbers("--depth", &[64])[0] as u32;
    for (name, protocol) in protocols() {
        for mqueues in numbers("--mqueues", &[1, 28, 132, 264, 528]) {
            for threads in numbers("--threads", &[1, 4]) {
                if threads > mqueues {
                    continue;
                }
                let time = Duration::from_millis(numbers("--ms", &[700])[0]);
                let plan = plan(mqueues as u32, depth, protocol, BYTES);
                let (rate, _) = storm(&plan, threads as usize, time)?;
                if json {
                    println!(
                        "{{\"figure\":\"rate\",\"protocol\":\"{name}\",\"mqueues\":{mqueues},\"threads\":{threads},\"rate\":{rate:.0}}}"
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

/// A kernel that faults at its first message: the fault is reported in time.
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
        assert!(begin.elapsed() < PATIENCE, "the fault is not reported");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A kernel that hangs for longer than permitted. This process then ends while the kernel runs.
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
        assert!(begin.elapsed() < PATIENCE, "the hung block is not reported");
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
    words.truncate(words.iter().position(|word| word.starts_with("--")).unwrap_or(words.len()));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["hop"] => hop(json),
        ["rate"] => rate(json),
        ["litmus"] => litmus(3.0, json),
        ["litmus", seconds] => litmus(seconds.parse().expect("seconds"), json),
        ["refuse"] => refuse(),
        ["fault", image] => fault(image),
        ["hang"] => hang(),
        ["idle", image] => probes::idle(image, json),
        ["lines", image] => probes::lines(image, json),
        _ => {
            eprintln!(
                "usage: gpu hop|rate|litmus [SECONDS]|refuse|fault IMAGE|hang|idle IMAGE|lines IMAGE [--json]"
            );
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
