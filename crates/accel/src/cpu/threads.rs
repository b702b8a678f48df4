//! Placement `threads`: blocks run on threads of the accelerator, each with a scheduler of its own.
//!
//! Worker and thread communicate through the region's rings; in addition they share a [`Link`]: doorbells for both
//! directions and the list of blocks that ended. An idle thread spins for a while, then sleeps;
//! `drive` wakes it.
//!
//! EDGE PARK: the thread announces that it sleeps, then checks its doorbells once more; the worker rings,
//! then checks whether the thread sleeps. A full fence between the two on both sides: at least one of them
//! sees the other.
//!
//! The workers detect a thread that is stuck in a block ([`Watch`]). All its blocks are
//! reported hung; the thread is abandoned, because its state is unknown, and exits if it ever
//! returns.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use engine::accelerator::Blocks;
use engine::topology::ParamValue;
use mqueue::abi::{reason, stop};
use mqueue::{Doorbells, Listener, MappedMemory, ParkWord, Region, Words};

use super::scheduler::{Observer, Scheduler, check_blocks};
use super::watch::Watch;
use super::{Options, pin};
use crate::{AccelError, Kernel};

/// Longest sleep, after which the thread checks the stop word by itself.
const SLEEP_MAX: Duration = Duration::from_millis(250);
/// For a deadline nearer than this the thread stays awake: the host kernel's timers are coarser.
const AWAKE_NS: u64 = 60_000;
/// An idle thread yields its core after polling for this long: there may be more threads than cores.
const YIELD_NS: u64 = 8_000;
/// If the engine's heartbeat stops for this long, an idle thread resumes its blocks to check it.
const HEARTBEAT_NS: u64 = 1_000_000_000;
/// Time limit for every block to get to its first wait.
const START_MAX: Duration = Duration::from_secs(30);

/// State that a thread publishes.
#[derive(Default)]
struct ThreadState {
    handle: OnceLock<Thread>,
    /// It sleeps, or is about to.
    parked: ParkWord,
    /// Inside a run of its scheduler.
    busy: AtomicBool,
    /// Number of resumes.
    progress: AtomicU64,
    /// Reported hung: it must not serve any more.
    condemned: AtomicBool,
}

impl ThreadState {
    fn wake(&self) {
        if let Some(thread) = self.handle.get().filter(|_| !mutants::on("sleep_through")) {
            thread.unpark();
        }
    }
}

/// State shared by a worker and a thread.
struct Link {
    thread: Arc<ThreadState>,
    /// The worker's blocks on the thread.
    blocks: Box<[u32]>,
    /// Their mqueues; doorbells are indexed by the position in this list.
    mqueues: Box<[u32]>,
    /// Written by the worker: messages in RX rings.
    rang: Doorbells,
    /// Written by the thread: messages in TX rings.
    touched: Doorbells,
    ended: Mutex<Vec<(u32, u64)>>,
    /// Set after an entry was added to `ended`.
    has_ended: AtomicBool,
}

/// The threads of a `cpu` accelerator.
pub struct CpuAccelerator {
    words: Words<MappedMemory>,
    threads: Vec<RunningThread>,
}

struct RunningThread {
    state: Arc<ThreadState>,
    blocks: Vec<u32>,
    join: JoinHandle<()>,
}

/// One worker's share of the blocks on accelerator threads.
pub struct ThreadBlocks {
    words: Words<MappedMemory>,
    links: Vec<WorkerLink>,
    /// By mqueue of the region: link and position in its list.
    places: Box<[(u16, u32)]>,
    stop: u64,
    hung_after_ns: u64,
}

struct WorkerLink {
    link: Arc<Link>,
    touched: Listener,
    watch: Watch,
    /// Rang in this drive.
    rang: bool,
    /// Its thread hangs.
    dead: bool,
    /// Not reported yet.
    hung: bool,
}

const NOWHERE: (u16, u32) = (u16::MAX, 0);

impl ThreadBlocks {
    /// Starts `threads` threads that share all blocks of `blocks_by_worker` evenly, each on one of
    /// `cores` if given. On return every block has run up to its first wait. The result has one
    /// [`ThreadBlocks`] per worker.
    pub fn start(
        region: MappedMemory,
        kernel: &Arc<Kernel>,
        params: &[(String, ParamValue)],
        blocks_by_worker: &[Vec<u32>],
        threads: usize,
        cores: Option<&[usize]>,
        options: &Options,
    ) -> Result<(CpuAccelerator, Vec<Self>), AccelError> {
        let joined = Region::join(region.clone())?;
        let owned: Vec<(usize, u32)> = blocks_by_worker
            .iter()
            .enumerate()
            .flat_map(|(worker, blocks)| blocks.iter().map(move |&block| (worker, block)))
            .collect();
        let all: Vec<u32> = owned.iter().map(|(_, block)| *block).collect();
        check_blocks(&all, joined.block_count())?;
        let max = joined.block_count() as u64;
        if threads == 0 || threads as u64 > max {
            let value = threads as u64;
            return Err(AccelError::Range { what: "threads", value, min: 1, max });
        }
        let words = joined.words();
        let mut workers: Vec<Self> =
            blocks_by_worker.iter().map(|_| Self::without_links(&joined, options)).collect();
        let (report, reports) = mpsc::channel();
        let mut accelerator = CpuAccelerator { words: words.clone(), threads: Vec::new() };
        for number in 0..threads {
            // Neighbours in the list belong to the same worker, so a thread has links to few workers.
            let share = number * owned.len() / threads..(number + 1) * owned.len() / threads;
            let state = Arc::new(ThreadState::default());
            let links = link(&mut workers, &owned[share.clone()], &joined, &state);
            let runner = Runner {
                region: region.clone(),
                kernel: Arc::clone(kernel),
                params: params.to_vec(),
                blocks: all[share.clone()].to_vec(),
                core: cores
                    .filter(|cores| !cores.is_empty())
                    .map(|cores| cores[number % cores.len()]),
                options: options.clone(),
                state: Arc::clone(&state),
                links,
                report: report.clone(),
            };
            let join = thread::Builder::new()
                .name(format!("cpu-{number}"))
                .spawn(move || runner.run())
                .map_err(|error| AccelError::Os { what: "start an accelerator thread", error })?;
            let blocks = all[share].to_vec();
            accelerator.threads.push(RunningThread { state, blocks, join });
        }
        drop(report);
        for _ in 0..threads {
            reports.recv_timeout(START_MAX).unwrap_or_else(|_| {
                Err(AccelError::Silent {
                    kernel: kernel.name().to_owned(),
                    seconds: START_MAX.as_secs(),
                })
            })?;
        }
        Ok((accelerator, workers))
    }

    fn without_links(region: &Region<MappedMemory>, options: &Options) -> Self {
        let words = region.words();
        Self {
            links: Vec::new(),
            places: vec![NOWHERE; region.mqueue_count() as usize].into_boxed_slice(),
            stop: words.stop(),
            words,
            hung_after_ns: options.hung_after.as_nanos() as u64,
        }
    }
}

/// Creates the links of one thread with the workers of its blocks.
fn link(
    workers: &mut [ThreadBlocks],
    owned: &[(usize, u32)],
    region: &Region<MappedMemory>,
    state: &Arc<ThreadState>,
) -> Vec<Arc<Link>> {
    let mut links = Vec::new();
    for run in owned.chunk_by(|a, b| a.0 == b.0) {
        let worker = &mut workers[run[0].0];
        let blocks: Box<[u32]> = run.iter().map(|(_, block)| *block).collect();
        let mqueues: Box<[u32]> =
            blocks.iter().flat_map(|block| region.mqueues_of(*block)).copied().collect();
        for (place, &mqueue) in mqueues.iter().enumerate() {
            worker.places[mqueue as usize] = (worker.links.len() as u16, place as u32);
        }
        let touched = Listener::new(&mqueues, |mqueue| worker.words.tx_head(mqueue));
        let link = Arc::new(Link {
            thread: Arc::clone(state),
            rang: Doorbells::new(mqueues.len()),
            touched: Doorbells::new(mqueues.len()),
            blocks,
            mqueues,
            ended: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        worker.links.push(WorkerLink {
            link: Arc::clone(&link),
            touched,
            watch: Watch::default(),
            rang: false,
            dead: false,
            hung: false,
        });
        links.push(link);
    }
    links
}

// Called through a table: compiled here, where messages are optimised for, not in the crate that makes the table.
impl Blocks for ThreadBlocks {
    #[inline(never)]
    fn runs_off_thread(&self) -> bool {
        true
    }

    #[inline(never)]
    fn drive(&mut self, now_ns: u64, rang: &[u32], touched: &mut Vec<u32>) {
        for &mqueue in rang {
            let (link, place) = self.places.get(mqueue as usize).copied().unwrap_or(NOWHERE);
            if let Some(worker_link) = self.links.get_mut(usize::from(link)) {
                worker_link.link.rang.ring(place);
                worker_link.rang = true;
            }
        }
        let stop = self.words.stop();
        let stopping = std::mem::replace(&mut self.stop, stop) != stop;
        if !rang.is_empty() || stopping {
            for link in &mut self.links {
                let rang = std::mem::replace(&mut link.rang, false);
                let thread = &link.link.thread;
                if (rang || stopping) && thread.parked.sleeps() {
                    thread.wake();
                }
            }
        }
        for link in &mut self.links {
            if !link.dead {
                let head = |mqueue| self.words.tx_head(mqueue);
                link.touched.collect(&link.link.touched, head, touched);
                link.watch(now_ns, self.hung_after_ns);
            }
        }
    }

    #[inline(never)]
    fn wake_at(&self) -> u64 {
        // The threads handle their deadlines themselves.
        u64::MAX
    }

    #[inline(never)]
    fn ended(&mut self, into: &mut Vec<(u32, u64)>) {
        for link in &mut self.links {
            if link.link.has_ended.load(Ordering::Acquire) {
                link.take_ended(into);
            }
            if std::mem::replace(&mut link.hung, false) {
                link.report_hung(&self.words, into);
            }
        }
    }
}

impl WorkerLink {
    #[inline]
    fn watch(&mut self, now_ns: u64, hung_after_ns: u64) {
        if !self.watch.is_due(now_ns) {
            return;
        }
        let thread = &self.link.thread;
        let progress = thread.progress.load(Ordering::Relaxed);
        let busy = thread.busy.load(Ordering::Relaxed);
        if self.watch.look(now_ns, hung_after_ns, busy, progress) {
            thread.condemned.store(true, Ordering::Release);
            self.dead = true;
            self.hung = true;
        }
    }

    #[cold]
    fn take_ended(&mut self, into: &mut Vec<(u32, u64)>) {
        // The flag first: entries added after it was cleared set it again.
        self.link.has_ended.store(false, Ordering::Relaxed);
        let mut ended = lock(&self.link.ended);
        // The blocks of a dead thread have already been reported.
        if !self.dead || self.hung {
            into.append(&mut ended);
        }
    }

    #[cold]
    fn report_hung(&self, words: &Words<MappedMemory>, into: &mut Vec<(u32, u64)>) {
        for &block in &self.link.blocks {
            if words.block_state(block) != mqueue::abi::state::ENDED {
                into.push((block, reason::HUNG));
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The arguments of a thread.
struct Runner {
    region: MappedMemory,
    kernel: Arc<Kernel>,
    params: Vec<(String, ParamValue)>,
    blocks: Vec<u32>,
    core: Option<usize>,
    options: Options,
    state: Arc<ThreadState>,
    links: Vec<Arc<Link>>,
    report: mpsc::Sender<Result<(), AccelError>>,
}

impl Runner {
    fn run(self) {
        let _ = self.state.handle.set(thread::current());
        let started = match self.core {
            Some(core) => pin(core),
            None => Ok(()),
        };
        let started = started.and_then(|()| {
            let region = self.region.clone();
            let kernel = Arc::clone(&self.kernel);
            let mut scheduler =
                Scheduler::prepare(region, kernel, &self.params, &self.blocks, &self.options)?;
            scheduler.begin()?;
            Ok(scheduler)
        });
        match started {
            Ok(scheduler) => {
                if self.report.send(Ok(())).is_ok() {
                    Server::new(self, scheduler).serve();
                }
            }
            Err(error) => {
                let _ = self.report.send(Err(error));
            }
        }
    }
}

/// The loop of a thread.
struct Server {
    words: Words<MappedMemory>,
    options: Options,
    observer: ThreadObserver,
    rang: Box<[Listener]>,
    scheduler: Scheduler,
    heartbeat: u64,
    heartbeat_at: u64,
}

struct ThreadObserver {
    state: Arc<ThreadState>,
    links: Vec<Arc<Link>>,
    /// By mqueue of the region: link and position in its list.
    places: Box<[(u16, u32)]>,
    progress: u64,
}

impl Observer for ThreadObserver {
    #[inline]
    fn resuming(&mut self, _block: u32) {
        self.progress += 1;
        self.state.progress.store(self.progress, Ordering::Relaxed);
    }

    #[inline]
    fn touched(&mut self, mqueue: u32) {
        let (link, place) = self.places[mqueue as usize];
        self.links[usize::from(link)].touched.ring(place);
    }
}

impl Server {
    fn new(runner: Runner, scheduler: Scheduler) -> Self {
        let words = scheduler.words();
        let mut places = Vec::new();
        for (number, link) in runner.links.iter().enumerate() {
            for (place, &mqueue) in link.mqueues.iter().enumerate() {
                places.resize(places.len().max(mqueue as usize + 1), NOWHERE);
                places[mqueue as usize] = (number as u16, place as u32);
            }
        }
        // Head 0 and count 0 of the doorbells: messages published earlier are found.
        let rang = runner.links.iter().map(|link| Listener::new(&link.mqueues, |_| 0)).collect();
        let observer = ThreadObserver {
            state: runner.state,
            links: runner.links,
            places: places.into_boxed_slice(),
            progress: 0,
        };
        let (heartbeat, heartbeat_at) = (words.engine_heartbeat(), runner.options.clock.now());
        Self { words, options: runner.options, observer, rang, scheduler, heartbeat, heartbeat_at }
    }

    fn serve(mut self) {
        let mut rang = Vec::new();
        let mut idle_since = None;
        while self.scheduler.running() > 0 {
            let now = self.options.clock.now();
            rang.clear();
            for (listener, link) in self.rang.iter_mut().zip(&self.observer.links) {
                listener.collect(&link.rang, |mqueue| self.words.rx_head(mqueue), &mut rang);
            }
            if rang.is_empty() && self.scheduler.due_at() > now && !self.scheduler.stop_changed() {
                self.idle(now, *idle_since.get_or_insert(now));
                continue;
            }
            idle_since = None;
            self.observer.state.busy.store(true, Ordering::Relaxed);
            self.scheduler.run(now, &rang, &mut self.observer);
            self.observer.state.busy.store(false, Ordering::Relaxed);
            if !self.scheduler.ended().is_empty() {
                self.tell_ended();
            }
            if self.observer.state.condemned.load(Ordering::Acquire) {
                // Its mqueues are dead. Stopping the blocks would stop those of other threads.
                std::mem::forget(self.scheduler);
                return;
            }
        }
    }

    /// When idle: spin, then yield the core, then sleep.
    fn idle(&mut self, now: u64, since: u64) {
        if now - since < (self.options.spin.as_nanos() as u64).min(YIELD_NS) {
            return std::hint::spin_loop();
        }
        if now - since < self.options.spin.as_nanos() as u64 {
            return thread::yield_now();
        }
        self.check_heartbeat(now);
        let left = self.scheduler.due_at().saturating_sub(now);
        if left <= AWAKE_NS {
            return thread::yield_now();
        }
        let parked = &self.observer.state.parked;
        parked.set(true);
        let links = self.observer.links.iter();
        let rung = self.rang.iter().zip(links).any(|(listener, link)| listener.rung(&link.rang));
        if !rung && !self.scheduler.stop_changed() {
            thread::park_timeout(SLEEP_MAX.min(Duration::from_nanos(left - AWAKE_NS)));
        }
        parked.set(false);
    }

    /// Waiting blocks cannot notice that the engine is gone: they are resumed to check.
    fn check_heartbeat(&mut self, now: u64) {
        if now - self.heartbeat_at < HEARTBEAT_NS {
            return;
        }
        self.heartbeat_at = now;
        let heartbeat = self.words.engine_heartbeat();
        if std::mem::replace(&mut self.heartbeat, heartbeat) == heartbeat {
            self.scheduler.resume_all();
        }
    }

    #[cold]
    fn tell_ended(&mut self) {
        for &(block, reason) in self.scheduler.ended().iter() {
            let link = self.observer.links.iter().find(|link| link.blocks.contains(&block));
            let link = link.expect("each block belongs to a worker");
            lock(&link.ended).push((block, reason));
            link.has_ended.store(true, Ordering::Release);
        }
        self.scheduler.ended().clear();
    }
}

impl CpuAccelerator {
    /// Asks every block to end: `how` is [`DRAIN`](stop::DRAIN) or [`NOW`](stop::NOW).
    pub fn stop(&self, how: u64) {
        self.words.set_stop(how);
        for thread in &self.threads {
            thread.state.wake();
        }
    }

    /// Threads that have not ended.
    pub fn running(&self) -> usize {
        self.threads.iter().filter(|thread| !thread.join.is_finished()).count()
    }

    /// Waits for the threads to end, after [`Self::stop`]. Returns the blocks of those that did not end within
    /// `limit`; their threads are abandoned, with all memory they may use.
    pub fn join(mut self, limit: Duration) -> Vec<u32> {
        self.wait(limit)
    }

    fn wait(&mut self, limit: Duration) -> Vec<u32> {
        let deadline = Instant::now() + limit;
        while self.running() > 0 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        let mut hung = Vec::new();
        for thread in self.threads.drain(..) {
            if !thread.join.is_finished() {
                hung.extend(thread.blocks);
            } else if thread.join.join().is_err() {
                tracing::error!("an accelerator thread panicked");
            }
        }
        hung
    }
}

impl Drop for CpuAccelerator {
    /// Stops the blocks immediately and waits up to a second for their threads.
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.stop(stop::NOW);
            let hung = self.wait(Duration::from_secs(1));
            if !hung.is_empty() {
                tracing::warn!(blocks = ?hung, "accelerator threads did not end and are abandoned");
            }
        }
    }
}
