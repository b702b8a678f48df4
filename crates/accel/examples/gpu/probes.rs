//! Limits of the bus and the host: measurements behind the figures of docs/gpu.md. `tools/gpu/idle` runs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use accel::AccelError;
use mqueue::abi::{kind, protocol};
use mqueue::{Head, MappedMemory, Mapping, Memory, MqueuePlan, Region, RegionPlan, RingPlan};

use super::{BYTES, PATIENCE, Running, Start, is_payload_of, numbers, payload_of, pin, plan};

const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The host's cache line, whatever alignment mqueues use.
const HOST_LINE: u64 = 64;

/// Zeroed memory on pages of 4 KiB, or of 2 MiB if the host kernel has some.
struct Pages {
    /// The mapping, and the part of it that is used.
    mapped: *mut u8,
    mapped_bytes: usize,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: owned memory without a Rust reference to it; accesses are atomic by the Mapping contract.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}
// SAFETY: mapped until drop, aligned to 2 MiB, never moved.
unsafe impl Mapping for Pages {
    fn base(&self) -> *mut u8 {
        self.base
    }
    fn len_bytes(&self) -> usize {
        self.bytes
    }
}

impl Pages {
    fn new(bytes: usize, huge: bool) -> Self {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let mapped_bytes = bytes + HUGE_PAGE_BYTES;
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at any address.
        let mapped = unsafe {
            libc::mmap(std::ptr::null_mut(), mapped_bytes, access, flags, -1, 0).cast::<u8>()
        };
        assert!(mapped.cast() != libc::MAP_FAILED, "no memory");
        let skip = mapped.align_offset(HUGE_PAGE_BYTES);
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: inside the new mapping; every page is touched before it has another user.
        let base = unsafe {
            let base = mapped.add(skip);
            libc::madvise(base.cast(), bytes, advice);
            base.write_bytes(0, bytes);
            base
        };
        Self { mapped, mapped_bytes, base, bytes }
    }

    /// The share of it on huge pages, as the host kernel reports it.
    fn huge_share(&self) -> f64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let mut huge_kib = 0;
        let mut inside = false;
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some((from, to)) = first.split_once('-') {
                let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
                inside =
                    number(from) < self.base.addr() + self.bytes && number(to) > self.base.addr();
            } else if inside && first == "AnonHugePages:" {
                huge_kib += words.next().and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0);
            }
        }
        (huge_kib << 10) as f64 / self.bytes as f64
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is no longer used, by the Mapping contract.
        unsafe { libc::munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}

/// Memory for a region, with every page faulted in.
pub(super) fn pages(bytes: usize, huge: bool) -> MappedMemory {
    MappedMemory::new(Arc::new(Pages::new(bytes, huge)))
}

/// How blocks poll for messages.
struct Manner {
    name: &'static str,
    /// Poll only the first unit; none for the library's own strategy.
    units: Option<bool>,
    rest_ns: u32,
}

/// One request in flight through one of many mqueues in turn, while the blocks of all others poll with a given strategy.
pub(super) fn idle(image: &str, json: bool) -> Result<(), AccelError> {
    pin(0);
    let mut manners = vec![Manner { name: "library", units: None, rest_ns: 0 }];
    for rest in numbers("--rests", &[0, 250, 500, 1000, 2000]) {
        for (name, units) in [("line", true), ("unit", false)].map(|(name, line)| (name, !line)) {
            manners.push(Manner { name, units: Some(units), rest_ns: rest as u32 });
        }
    }
    for mqueues in numbers("--mqueues", &[1, 28, 60, 120, 240, 264]) {
        for huge in [true, false] {
            // The effect of pages shows when no block pauses.
            for manner in manners.iter().filter(|manner| huge || manner.rest_ns == 0) {
                let (times, share) = round_trips(image, mqueues as u32, huge, manner)?;
                let at =
                    |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1e3;
                let (p50, p99, max) = (at(0.5), at(0.99), at(1.0));
                let Manner { name, rest_ns, .. } = manner;
                if json {
                    println!(
                        "{{\"figure\":\"idle\",\"mqueues\":{mqueues},\"manner\":\"{name}\",\"rest_ns\":{rest_ns},\"huge_pages\":{share:.2},\"p50_us\":{p50},\"p99_us\":{p99},\"max_us\":{max}}}"
                    );
                } else {
                    println!(
                        "idle, {mqueues:3} mqueues, {name:7}, rest {rest_ns:4} ns, {:3.0} % on 2 MiB pages: p50 {p50:6.2} us, p99 {p99:7.2} us, max {max:7.1} us",
                        100.0 * share
                    );
                }
            }
        }
    }
    Ok(())
}

/// The round-trip times of requests in nanoseconds, sorted, and the share of the region on huge pages.
fn round_trips(
    image: &str,
    mqueues: u32,
    huge: bool,
    manner: &Manner,
) -> Result<(Vec<u64>, f64), AccelError> {
    let plan = plan(mqueues, 64, protocol::GRANULE16, BYTES);
    let pages = Arc::new(Pages::new(plan.bytes().expect("a sound plan") as usize, huge));
    let share = pages.huge_share();
    let units = manner.units.map(|units| {
        [("units", f64::from(u8::from(units))), ("rest_ns", f64::from(manner.rest_ns))]
    });
    let mut running = Start {
        kernel: units.map_or("echo", |_| image),
        params: units.as_ref().map_or(&[], |params| params.as_slice()),
        memory: Some(MappedMemory::new(pages)),
        threads: Some(32),
    }
    .run(&plan)?;
    let (mut sent, mut received) = ([0; BYTES], [0; BYTES]);
    let (mut times, begin) = (Vec::new(), Instant::now());
    let time = Duration::from_millis(numbers("--ms", &[300])[0]);
    for n in 0.. {
        if n % 64 == 0 {
            running.words.set_engine_heartbeat(n + 1);
            if begin.elapsed() >= time {
                break;
            }
        }
        // In turn, so that each block has waited for a full round.
        let mqueue = (n % u64::from(mqueues)) as usize;
        payload_of(mqueue, n, &mut sent);
        let (rx, tx) = &mut running.ends[mqueue];
        let asked = Instant::now();
        let head = Head { token: n, kind: kind::MESSAGE, ..Head::default() };
        rx.push(head, &sent).expect("an empty ring");
        rx.publish();
        loop {
            tx.prefetch_at(0, BYTES as u64);
            if let Some(header) = tx.peek().expect("a sound header")
                && tx.copy_out(&header, &mut received)
            {
                assert_eq!(header.token, n, "mqueue {mqueue}: another reply");
                break;
            }
            if asked.elapsed() > Duration::from_millis(100) {
                running.words.set_engine_heartbeat(asked.elapsed().as_nanos() as u64);
                assert!(asked.elapsed() < PATIENCE, "mqueue {mqueue}: no reply to {n}");
            }
            std::hint::spin_loop();
        }
        times.push(asked.elapsed().as_nanos() as u64);
        assert!(is_payload_of(mqueue, n, &received), "message {n} came back changed");
        tx.advance();
        tx.release();
    }
    running.stop();
    times.sort_unstable();
    Ok((times, share))
}

/// The direction of the lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The GPU has written them, the host reads.
    Read,
    /// The GPU has read them, the host writes.
    Write,
}

/// Cache lines per second that host threads read after the GPU wrote them, and write after it read them, by prefetch distance.
pub(super) fn lines(image: &str, json: bool) -> Result<(), AccelError> {
    const BLOCKS: u32 = 64;
    for kib in numbers("--kib", &[1024, 16384]) {
        let share = (kib << 10) / u64::from(BLOCKS);
        let ring =
            RingPlan { protocol: protocol::DOORBELL, message_bytes_max: 64, arena_bytes: share };
        let mqueue = MqueuePlan { depth: 4, rx: ring, tx: ring };
        let plan = RegionPlan::of_blocks(BLOCKS, &[mqueue], 1);
        let huge = super::huge_pages();
        let pages = Arc::new(Pages::new(plan.bytes().expect("a sound plan") as usize, huge));
        let memory = MappedMemory::new(pages);
        let mut running =
            Start { kernel: image, params: &[], memory: Some(memory.clone()), threads: Some(256) }
                .run(&plan)?;
        let entries = Region::join(memory.clone()).expect("a sound region").entries().to_vec();
        for (way, name) in [(Way::Read, "read"), (Way::Write, "write")] {
            let arenas: Vec<u64> = (entries.iter().skip(usize::from(way == Way::Read)).step_by(2))
                .map(|entry| entry.arena_offset)
                .collect();
            for threads in numbers("--threads", &[1, 2, 4]) {
                for ahead in numbers("--ahead", &[0, 4, 8, 16, 32, 64]) {
                    let rate =
                        pass(&mut running, &memory, &arenas, share, way, threads as usize, ahead);
                    if json {
                        println!(
                            "{{\"figure\":\"lines\",\"way\":\"{name}\",\"kib\":{kib},\"threads\":{threads},\"ahead\":{ahead},\"per_second\":{rate:.0}}}"
                        );
                    } else {
                        println!(
                            "lines, host {name:5}s {kib:4} KiB, {threads} threads, {ahead:2} ahead: {:7.1} M/s",
                            rate / 1e6
                        );
                    }
                }
            }
        }
        running.stop();
    }
    Ok(())
}

/// Lets the GPU and then the threads access all arenas, repeatedly; lines per second of all threads together, from the median of all times.
fn pass(
    running: &mut Running,
    memory: &MappedMemory,
    arenas: &[u64],
    bytes: u64,
    way: Way,
    threads: usize,
    ahead: u64,
) -> f64 {
    let mut passes: Vec<Duration> = Vec::new();
    let begin = Instant::now();
    for round in 1.. {
        for (rx, _) in &mut running.ends {
            let head = Head { kind: kind::MESSAGE, ..Head::default() };
            let asked: &[u8] = if way == Way::Read { &[] } else { &[0; 8] };
            rx.push(head, asked).expect("an empty ring");
            rx.publish();
        }
        for (_, tx) in &mut running.ends {
            let asked = Instant::now();
            while tx.peek().expect("a sound header").is_none() {
                assert!(asked.elapsed() < PATIENCE, "a block does not answer");
            }
            tx.advance();
            tx.release();
        }
        running.words.set_engine_heartbeat(running.words.engine_heartbeat() + 1);
        let times: Vec<Duration> = std::thread::scope(|scope| {
            let shares = arenas.chunks(arenas.len().div_ceil(threads)).enumerate();
            let workers: Vec<_> = shares
                .map(|(worker, share)| {
                    scope.spawn(move || {
                        pin(worker);
                        go_over(memory, share, bytes, way, ahead, round)
                    })
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().expect("the thread does not panic"))
                .collect()
        });
        passes.push(times.into_iter().max().expect("a thread"));
        if begin.elapsed() > Duration::from_millis(200) {
            break;
        }
    }
    passes.sort_unstable();
    let lines = arenas.len() as u64 * bytes / HOST_LINE;
    lines as f64 / passes[passes.len() / 2].as_secs_f64()
}

/// Reads or writes every line once; returns the time it took.
fn go_over(
    memory: &MappedMemory,
    arenas: &[u64],
    bytes: u64,
    way: Way,
    ahead: u64,
    round: u64,
) -> Duration {
    use mqueue::memory::Ordering::Relaxed;
    let begin = Instant::now();
    let mut all = 0;
    for &arena in arenas {
        for at in (0..bytes).step_by(HOST_LINE as usize) {
            if ahead > 0 && at + ahead * HOST_LINE < bytes {
                memory.prefetch(arena + at + ahead * HOST_LINE, way == Way::Write);
            }
            match way {
                Way::Read => all ^= memory.load(arena + at, Relaxed),
                Way::Write => (0..HOST_LINE)
                    .step_by(8)
                    .for_each(|word| memory.store(arena + at + word, round, Relaxed)),
            }
        }
    }
    std::hint::black_box(all);
    begin.elapsed()
}
