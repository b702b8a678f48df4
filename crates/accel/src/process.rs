//! The `process` accelerator: blocks in a process of their own, which maps only its own region of the
//! engine's memory.
//!
//! *The engine's side* is [`RemoteBlocks`]: it polls the heads of the region's TX rings, and wakes the
//! runtime if the runtime has announced that it sleeps. The control side keeps track of which runtimes live and
//! why one ended. An engine whose requests are with a runtime never sleeps, so the
//! runtime does not wake it. The same code serves runtimes of any kind.
//!
//! *The runtime's side* is [`HostBlocks`]: threads that run `cpu` blocks as coroutines and poll the
//! region's RX heads themselves. An idle thread spins, then sleeps.
//!
//! EDGE PARK: the engine publishes, then checks whether the runtime sleeps. The runtime's half is in `sleepers.rs`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use engine::accelerator::Blocks;
use engine::topology::ParamValue;
use mqueue::abi::{feature, reason, stop};
use mqueue::{MappedMemory, Region, Words};

use crate::cpu::{Clock, Options, Watch, WorkerBlocks, pin};
use crate::sleepers::{Sleeper, Sleepers};
use crate::{AccelError, Kernel};

/// Longest sleep of a thread, after which it checks the stop word by itself.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// For a deadline nearer than this the thread stays awake: the host kernel's timers are coarser.
const AWAKE_NS: u64 = 60_000;
/// An idle thread yields its core after polling for this long.
const YIELD_NS: u64 = 8_000;
/// Time limit for every block to get to its first wait.
const START_MAX: Duration = Duration::from_secs(30);

/// One worker's share of the blocks that a runtime in another process runs.
pub struct RemoteBlocks {
    words: Words<MappedMemory>,
    /// The worker's mqueues, numbered as in the region.
    mqueues: Box<[u32]>,
    link: Arc<RemoteLink>,
}

/// State shared by the workers and the control side for one generation of a runtime.
pub struct RemoteLink {
    /// Wakes the runtime; never blocks, whatever the runtime does.
    ring: Box<dyn Fn() + Send + Sync>,
    condemned: AtomicBool,
}

impl RemoteLink {
    /// `ring` wakes the runtime.
    pub fn new(ring: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { ring: Box::new(ring), condemned: AtomicBool::new(false) })
    }

    /// Whether a worker found invalid words in the region.
    pub fn condemned(&self) -> bool {
        self.condemned.load(Ordering::Relaxed)
    }

    /// Wakes the runtime to check the stop word.
    pub fn wake(&self) {
        (self.ring)();
    }
}

impl RemoteBlocks {
    /// The share that consists of these mqueues.
    pub fn new(words: Words<MappedMemory>, mqueues: Box<[u32]>, link: Arc<RemoteLink>) -> Self {
        Self { words, mqueues, link }
    }
}

// Called through a table: compiled here, where messages are optimised for, not in the crate that makes the table.
impl Blocks for RemoteBlocks {
    #[inline(never)]
    fn drive(&mut self, _now_ns: u64, rang: &[u32], touched: &mut Vec<u32>) {
        // EDGE PARK (waker half)
        if !rang.is_empty() && self.words.accelerator_parked() {
            self.link.wake();
        }
        self.words.tx_waiting_among(&self.mqueues, touched);
    }

    #[inline(never)]
    fn wake_at(&self) -> u64 {
        u64::MAX
    }

    #[inline(never)]
    fn runs_off_thread(&self) -> bool {
        true
    }

    #[inline(never)]
    fn present(&self) -> bool {
        false
    }

    #[inline(never)]
    fn takes_bundles(&self) -> bool {
        self.words.accelerator_features() & feature::BUNDLES != 0
    }

    #[inline(never)]
    fn disable_block(&mut self, _block: u32) {
        self.link.condemned.store(true, Ordering::Relaxed);
    }

    #[inline(never)]
    fn ended(&mut self, _into: &mut Vec<(u32, u64)>) {}
}

/// How a runtime runs `cpu` blocks.
pub struct HostOptions {
    /// The service's name in messages.
    pub service: String,
    /// Threads, in [1, blocks].
    pub threads: usize,
    /// Cores to pin them to; empty: not pinned.
    pub cores: Vec<usize>,
    /// Stack of each block in bytes, as in [`crate::cpu::Options::stack_bytes`].
    pub stack_bytes: usize,
    /// How long an idle thread polls before it sleeps.
    pub spin: Duration,
    /// As in [`Sleepers::new`].
    pub sleep: Box<dyn Fn(Duration) + Send + Sync>,
    /// A block that did not yield for this long hangs, and all blocks of its thread with it; must be longer
    /// than a block's turn takes: 64 messages.
    pub hung_after: Duration,
}

/// The blocks of a region on threads of this process.
pub struct HostBlocks {
    words: Words<MappedMemory>,
    threads: Vec<HostThread>,
    shared: Arc<Shared>,
    hung_after_ns: u64,
}

struct HostThread {
    blocks: Vec<u32>,
    turn: Arc<Turn>,
    watch: Watch,
    join: JoinHandle<()>,
}

/// A thread's state for its watcher.
#[derive(Default)]
struct Turn {
    /// It is inside its blocks.
    busy: AtomicBool,
    /// Number of resumes.
    progress: AtomicU64,
}

/// State shared by the threads.
struct Shared {
    sleepers: Sleepers,
    /// Blocks that ended, and their reasons.
    ended: Mutex<Vec<(u32, u64)>>,
}

impl HostBlocks {
    /// Starts all blocks of the region. On return each has run up to its first wait.
    pub fn start(
        memory: &MappedMemory,
        kernel: &Arc<Kernel>,
        params: &[(String, ParamValue)],
        options: HostOptions,
    ) -> Result<Self, AccelError> {
        let region = Region::join(memory.clone())?;
        let count = region.block_count();
        let threads = options.threads;
        if !(1..=count as usize).contains(&threads) {
            let (value, max) = (threads as u64, u64::from(count));
            return Err(AccelError::Range { what: "threads", value, min: 1, max });
        }
        let words = region.words();
        let sleepers = Sleepers::new(words.clone(), options.sleep);
        let shared = Arc::new(Shared { sleepers, ended: Mutex::default() });
        let (report, reports) = mpsc::channel();
        let hung_after_ns = options.hung_after.as_nanos() as u64;
        let mut host = Self { words: words.clone(), threads: Vec::new(), shared, hung_after_ns };
        for number in 0..threads {
            let at = |number: usize| (number * count as usize / threads) as u32;
            let blocks: Vec<u32> = (at(number)..at(number + 1)).collect();
            let turn = Arc::<Turn>::default();
            let runner = Runner {
                memory: memory.clone(),
                words: words.clone(),
                mqueues: blocks.iter().flat_map(|b| region.mqueues_of(*b)).copied().collect(),
                kernel: kernel.clone(),
                service: options.service.clone(),
                stack_bytes: options.stack_bytes,
                spin: options.spin,
                params: params.to_vec(),
                blocks: blocks.clone(),
                core: (!options.cores.is_empty())
                    .then(|| options.cores[number % options.cores.len()]),
                turn: turn.clone(),
                shared: host.shared.clone(),
            };
            let report = report.clone();
            let join = thread::Builder::new()
                .name(format!("cpu-{number}"))
                .spawn(move || runner.run(&report))
                .map_err(|error| AccelError::Os { what: "start an accelerator thread", error })?;
            host.threads.push(HostThread { blocks, turn, watch: Watch::default(), join });
        }
        drop(report);
        for _ in 0..threads {
            reports.recv_timeout(START_MAX).unwrap_or_else(|_| {
                let kernel = kernel.name().to_owned();
                Err(AccelError::Silent { kernel, seconds: START_MAX.as_secs() })
            })?;
        }
        Ok(host)
    }

    /// Whether all blocks serve; otherwise a reason, one of [`mqueue::abi::reason`], and a sentence.
    /// To be called several times per `hung_after`.
    pub fn health(&mut self) -> Result<(), (u64, String)> {
        let ended = lock(&self.shared.ended);
        // Read last: blocks that ended because of it are in the list only after it was set.
        let asked = self.words.stop() != stop::RUN;
        if let Some((block, why)) = ended.iter().find(|(_, why)| !asked || *why != reason::STOPPED)
        {
            return Err((*why, reason::of_block(*block, *why)));
        }
        let now_ns = Clock::Monotonic.now();
        for thread in &mut self.threads {
            let progress = thread.turn.progress.load(Ordering::Relaxed);
            let busy = thread.turn.busy.load(Ordering::Relaxed);
            if thread.watch.look(now_ns, self.hung_after_ns, busy, progress) {
                let blocks = &thread.blocks;
                let text = match blocks.as_slice() {
                    [block] => format!("block {block} hangs"),
                    blocks => format!("blocks {blocks:?} share a thread that hangs"),
                };
                return Err((reason::HUNG, text));
            }
        }
        Ok(())
    }

    /// Whether every block has ended.
    pub fn ended(&self) -> bool {
        self.threads.iter().all(|thread| thread.join.is_finished())
    }

    /// Ends the blocks: first by a drain for up to `limit`, then immediately. Returns those that
    /// hang; their threads are abandoned.
    pub fn stop(mut self, limit: Duration) -> Vec<u32> {
        self.end(limit)
    }

    fn end(&mut self, limit: Duration) -> Vec<u32> {
        if self.words.stop() == stop::RUN {
            self.words.set_stop(stop::NOW);
        }
        self.shared.sleepers.wake_all();
        if !self.wait(limit) {
            self.words.set_stop(stop::NOW);
            self.shared.sleepers.wake_all();
            self.wait(Duration::from_secs(1));
        }
        let left = self.threads.drain(..).filter(|thread| !thread.join.is_finished());
        left.flat_map(|thread| thread.blocks).collect()
    }

    fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.ended() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        self.ended()
    }
}

impl Drop for HostBlocks {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The arguments of a thread.
struct Runner {
    memory: MappedMemory,
    words: Words<MappedMemory>,
    mqueues: Vec<u32>,
    kernel: Arc<Kernel>,
    service: String,
    stack_bytes: usize,
    spin: Duration,
    params: Vec<(String, ParamValue)>,
    blocks: Vec<u32>,
    core: Option<usize>,
    turn: Arc<Turn>,
    shared: Arc<Shared>,
}

impl Runner {
    fn run(self, report: &mpsc::Sender<Result<(), AccelError>>) {
        let options = Options {
            service: self.service.clone(),
            stack_bytes: self.stack_bytes,
            ..Options::default()
        };
        let pinned = self.core.map_or(Ok(()), pin);
        let started = pinned.and_then(|()| {
            let (memory, kernel) = (self.memory.clone(), self.kernel.clone());
            WorkerBlocks::start(memory, kernel, &self.params, &self.blocks, &options)
        });
        match started {
            Ok(blocks) => {
                if report.send(Ok(())).is_ok() {
                    self.serve(blocks);
                }
            }
            Err(error) => {
                // If the receiver is gone, the start has been given up.
                let _ = report.send(Err(error));
            }
        }
    }

    fn serve(&self, mut blocks: WorkerBlocks) {
        // A head is not 0 once something was published, so messages from before the start are found.
        let mut seen: Vec<(u32, u64)> = self.mqueues.iter().map(|mqueue| (*mqueue, 0)).collect();
        let sleeper = Sleeper::new(self.mqueues.iter().copied());
        let (mut rang, mut ended) = (Vec::new(), Vec::new());
        let mut idle_since_ns = None;
        while blocks.running() > 0 {
            let now_ns = Clock::Monotonic.now();
            rang.clear();
            for (mqueue, head) in &mut seen {
                let found = self.words.rx_head(*mqueue);
                if std::mem::replace(head, found) != found {
                    rang.push(*mqueue);
                }
            }
            // A stop word counts as new until the blocks, which started earlier, have seen it.
            if rang.is_empty() && blocks.wake_at() > now_ns && !blocks.stop_changed() {
                let since_ns = *idle_since_ns.get_or_insert(now_ns);
                self.idle(now_ns, since_ns, &blocks, &sleeper, &seen);
                continue;
            }
            idle_since_ns = None;
            self.turn.busy.store(true, Ordering::Relaxed);
            blocks.drive_counted(now_ns, &rang, &self.turn.progress);
            self.turn.busy.store(false, Ordering::Relaxed);
            blocks.ended(&mut ended);
            if !ended.is_empty() {
                lock(&self.shared.ended).append(&mut ended);
            }
        }
    }

    /// When idle: spin, then yield the core, then sleep.
    fn idle(
        &self,
        now_ns: u64,
        since_ns: u64,
        blocks: &WorkerBlocks,
        sleeper: &Arc<Sleeper>,
        seen: &[(u32, u64)],
    ) {
        let left_ns = blocks.wake_at() - now_ns;
        if now_ns - since_ns < YIELD_NS {
            return std::hint::spin_loop();
        }
        if now_ns - since_ns < self.spin.as_nanos() as u64 || left_ns <= AWAKE_NS {
            return thread::yield_now();
        }
        let has_work = || {
            blocks.stop_changed()
                || seen.iter().any(|(mqueue, head)| self.words.rx_head(*mqueue) != *head)
        };
        let limit = SLEEP_MAX.min(Duration::from_nanos(left_ns - AWAKE_NS));
        self.shared.sleepers.sleep_as(sleeper, seen, limit, has_work);
    }
}
