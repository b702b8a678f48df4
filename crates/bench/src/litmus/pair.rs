//! Two processes and their shared memory: a formatted region, followed by words for synchronization.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqueue::abi::{INLINE_BYTES_MAX, LINE_BYTES, protocol};
use mqueue::memory::{Memory, Ordering, unit16_is_atomic};
use mqueue::{MappedMemory, MqueuePlan, Region, RegionPlan, RingPlan, Words};
use sys::{MemoryError, RegionOptions, SharedMemory};

/// Time after which the other process is assumed to have ended.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Most memory that the second process maps.
const REGION_BYTES_MAX: usize = 64 << 20;
/// Reads of a word before the core is yielded.
const SPINS: u32 = 2000;

/// Why the tests could not run.
#[derive(Debug, thiserror::Error)]
pub enum LitmusError {
    /// Shared memory cannot be created.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory has the wrong content.
    #[error("the two processes do not match: {0}; use one build")]
    Region(String),
    /// The second process could not be started.
    #[error("cannot start a second process: {0}")]
    Start(std::io::Error),
    /// The other process does not answer.
    #[error(
        "the other process does not answer: it ended or was stopped; look at its messages above"
    )]
    Gone,
    /// The ends of a ring contradict each other: worse than a wrong message.
    #[error("a ring between two honest processes became unusable: {0}")]
    Ring(&'static str),
}

// Mqueues of the region. Their rings are short, so that every slot is reused all the time.
pub(super) const DOORBELL: u32 = 0;
pub(super) const ARENA: u32 = 1;
pub(super) const GRANULE8: u32 = 2;
pub(super) const GRANULE16: u32 = 3;
pub(super) const STOP: u32 = 4;
pub(super) const ENGINE_PARK: u32 = 5;
pub(super) const ACCELERATOR_PARK: u32 = 6;
pub(super) const RUNG: u32 = 7;

/// Longest message of each ring; the arena's is longer than a slot.
pub(super) const MESSAGE_BYTES_MAX: u32 = 61;
pub(super) const ARENA_MESSAGE_BYTES_MAX: u32 = 2012;
const _: () = assert!(ARENA_MESSAGE_BYTES_MAX > INLINE_BYTES_MAX);

fn plan() -> RegionPlan {
    let ring = |protocol, message_bytes_max, arena_bytes| {
        let ring = RingPlan { protocol, message_bytes_max, arena_bytes };
        MqueuePlan { depth: 4, rx: ring, tx: ring }
    };
    // Without 16-byte accesses the ring exists, and its test uses 8-byte units again.
    let widest = if unit16_is_atomic() { protocol::GRANULE16 } else { protocol::GRANULE8 };
    let mqueues = vec![
        ring(protocol::DOORBELL, MESSAGE_BYTES_MAX, 0),
        ring(protocol::DOORBELL, ARENA_MESSAGE_BYTES_MAX, 5504),
        ring(protocol::GRANULE8, MESSAGE_BYTES_MAX, 0),
        ring(widest, MESSAGE_BYTES_MAX, 0),
        ring(protocol::DOORBELL, 8, 0),
        ring(protocol::DOORBELL, 8, 0),
        ring(protocol::DOORBELL, 8, 0),
        ring(protocol::DOORBELL, 8, 0),
    ];
    RegionPlan::of_blocks(1, &mqueues, 1)
}

/// A region that is formatted and joined in every round, inside the window.
pub(super) fn small_plan(generation: u64) -> RegionPlan {
    let ring = RingPlan { protocol: protocol::DOORBELL, message_bytes_max: 8, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth: 1, rx: ring, tx: ring }];
    RegionPlan::of_blocks(1, &mqueues, generation)
}

/// Part of the shared memory as a separate memory, after region and words.
#[derive(Clone)]
pub(super) struct Window {
    memory: MappedMemory,
    at: u64,
}

/// More than the small region needs.
const WINDOW_BYTES: u64 = 4096;

impl Memory for Window {
    fn len_bytes(&self) -> u64 {
        WINDOW_BYTES
    }

    fn load(&self, at: u64, order: Ordering) -> u64 {
        self.memory.load(self.at + at, order)
    }

    fn store(&self, at: u64, value: u64, order: Ordering) {
        self.memory.store(self.at + at, value, order);
    }
}

/// Words after the region, one line each.
#[derive(Clone, Copy)]
pub(super) enum Word {
    /// Synchronizations of the first process.
    First,
    /// Synchronizations of the second one.
    Second,
    /// Number of rounds, then whether there is another one.
    Wanted,
    /// The reader has seen enough.
    Enough,
    /// The second process's rounds and outcomes.
    Rounds,
    Seen,
    /// The outcome of a round, for the other side to check.
    Result,
    /// Free for the tests.
    X,
    Y,
}

const WORDS: u64 = 9;

/// Rounds, and the number of outcomes that were looked for.
pub(super) type Counts = (u64, u64);

/// One side of a test.
pub(super) type Run = fn(&mut Side, Limit) -> Result<Counts, LitmusError>;

/// The end of a test. The second process has no limit of its own: it is notified.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) rounds: u64,
    until: Instant,
}

impl Limit {
    /// For this many rounds, from now on.
    fn of(rounds: u64) -> Self {
        Self { rounds, until: Instant::now() + super::time_for(rounds) }
    }

    /// Whether there is another round after `done` ones. Reads the clock at intervals.
    pub(super) fn continues(&self, done: u64) -> bool {
        done < self.rounds && (done % 64 != 0 || Instant::now() < self.until)
    }

    /// Whether the time is up.
    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }
}

/// One of the two processes.
pub(super) struct Side {
    pub(super) memory: MappedMemory,
    pub(super) region: Region<MappedMemory>,
    pub(super) words: Words<MappedMemory>,
    /// The first process is the engine's side, the second the accelerator's.
    pub(super) first: bool,
    lab: u64,
    met: u64,
    /// For pauses of different lengths.
    noise: u64,
}

impl Side {
    fn new(memory: MappedMemory, region: Region<MappedMemory>, first: bool) -> Self {
        let lab = region.bytes().next_multiple_of(LINE_BYTES);
        let words = region.words();
        Self { memory, region, words, first, lab, met: 0, noise: 1 + u64::from(first) }
    }

    pub(super) fn at(&self, word: Word) -> u64 {
        self.lab + word as u64 * LINE_BYTES
    }

    pub(super) fn window(&self) -> Window {
        Window { memory: self.memory.clone(), at: self.lab + WORDS * LINE_BYTES }
    }

    pub(super) fn load(&self, word: Word, order: Ordering) -> u64 {
        self.memory.load(self.at(word), order)
    }

    pub(super) fn store(&self, word: Word, value: u64, order: Ordering) {
        self.memory.store(self.at(word), value, order);
    }

    /// Waits for the other side. Stores of either before are seen by the other afterwards.
    pub(super) fn meet(&mut self) -> Result<(), LitmusError> {
        self.met += 1;
        let (own, other) =
            if self.first { (Word::First, Word::Second) } else { (Word::Second, Word::First) };
        self.store(own, self.met, Ordering::Release);
        let mut wait = Wait::default();
        while self.load(other, Ordering::Acquire) < self.met {
            wait.a_moment()?;
        }
        Ok(())
    }

    /// A pause of 0 to 15 reads, so that the sides meet in all orders.
    pub(super) fn jitter(&mut self) {
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        for _ in 0..self.noise >> 60 {
            std::hint::spin_loop();
        }
    }

    /// The first process decides whether there is another round; both get the result.
    pub(super) fn next_round(&mut self, limit: Limit, done: u64) -> Result<bool, LitmusError> {
        if self.first {
            self.store(Word::Wanted, limit.continues(done).into(), Ordering::Relaxed);
        }
        self.meet()?;
        Ok(self.load(Word::Wanted, Ordering::Relaxed) != 0)
    }

    /// One test, on the second process.
    pub(super) fn run(&mut self, test: Run) -> Result<(), LitmusError> {
        self.meet()?;
        let rounds = self.load(Word::Wanted, Ordering::Relaxed);
        let limit = Limit::of(rounds);
        self.meet()?;
        let (rounds, seen) = test(self, limit)?;
        self.store(Word::Rounds, rounds, Ordering::Relaxed);
        self.store(Word::Seen, seen, Ordering::Relaxed);
        self.meet()
    }
}

/// Waits for another process, yielding the core, with a limit.
#[derive(Default)]
pub(super) struct Wait {
    spins: u32,
    since: Option<Instant>,
}

impl Wait {
    pub(super) fn a_moment(&mut self) -> Result<(), LitmusError> {
        self.spins += 1;
        if self.spins < SPINS {
            std::hint::spin_loop();
            return Ok(());
        }
        self.spins = SPINS / 2;
        std::thread::yield_now();
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > TIMEOUT { Err(LitmusError::Gone) } else { Ok(()) }
    }
}

/// The first process, and the second one that it started.
pub(super) struct Pair {
    side: Side,
    child: Child,
}

impl Pair {
    pub(super) fn start(mut peer: Command) -> Result<Self, LitmusError> {
        let plan = plan();
        let unsound = |error: &dyn std::fmt::Display| LitmusError::Region(error.to_string());
        let bytes = plan.bytes().map_err(|e| unsound(&e))?;
        let bytes = bytes + (WORDS + 1) * LINE_BYTES + WINDOW_BYTES;
        let shared =
            SharedMemory::create("serval:litmus", bytes as usize, &RegionOptions::default())?;
        let file = shared.fd().try_clone_to_owned().map_err(LitmusError::Start)?;
        let memory = MappedMemory::new(Arc::new(shared));
        let region = Region::format(memory.clone(), &plan).map_err(|e| unsound(&e))?;
        peer.stdin(Stdio::from(file)).stdout(Stdio::null());
        let child = peer.spawn().map_err(LitmusError::Start)?;
        // After that: a process inherits the cores of its parent.
        stay_on(0);
        Ok(Self { side: Side::new(memory, region, true), child })
    }

    /// One test on both sides; the rounds of the side that counts them, the outcomes of both.
    pub(super) fn run(&mut self, rounds: u64, test: Run) -> Result<Counts, LitmusError> {
        let side = &mut self.side;
        side.store(Word::Wanted, rounds, Ordering::Relaxed);
        for word in [Word::Enough, Word::Result, Word::X, Word::Y] {
            side.store(word, 0, Ordering::Relaxed);
        }
        side.memory.store(side.at(Word::X) + 8, 0, Ordering::Relaxed);
        side.meet()?;
        side.meet()?;
        let (own_rounds, own_seen) = test(side, Limit::of(rounds))?;
        side.meet()?;
        let rounds = own_rounds.max(side.load(Word::Rounds, Ordering::Relaxed));
        Ok((rounds, own_seen + side.load(Word::Seen, Ordering::Relaxed)))
    }

    /// The second process ends on its own after the last test.
    pub(super) fn finish(mut self) -> Result<(), LitmusError> {
        let status = self.child.wait().map_err(LitmusError::Start)?;
        if status.success() { Ok(()) } else { Err(LitmusError::Gone) }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // After `finish` the process has ended; otherwise a test has failed and the other side waits.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The second process's side.
pub(super) fn second(region: OwnedFd) -> Result<Side, LitmusError> {
    let shared = SharedMemory::open(region, REGION_BYTES_MAX, false)?;
    let memory = MappedMemory::new(Arc::new(shared));
    let region = Region::join(memory.clone()).map_err(|e| LitmusError::Region(e.to_string()))?;
    if region.entries().len() != plan().rings.len() {
        return Err(LitmusError::Region("another number of rings".to_owned()));
    }
    stay_on(1);
    Ok(Side::new(memory, region, false))
}

/// Keeps this process on its own core, if there are enough.
fn stay_on(index: usize) {
    if let Ok(cores) = sys::affinity::allowed_cores()
        && let [core] = cores.get(index..=index).unwrap_or_default()
    {
        // Best effort: on one core together they are slow, which the controls show.
        let _ = sys::affinity::pin_current_thread(*core);
    }
}
