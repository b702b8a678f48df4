//! Detects workers that compute but serve nothing: a kernel on a worker's core (`placement = "worker"`) that does not
//! return stops every service of that worker.
//!
//! A thread compares two things ten times a second: the processor time of each worker's thread, and what the worker
//! publishes as it makes progress, its count of turns and the block that it resumes. A worker that computed for
//! [`STALLED_AFTER`] without a change of either is stalled. Wall-clock time does not count, so a worker without a
//! core is not reported. The thread also logs [`FirstDrops`].

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use accel::cpu::{Resuming, ResumingWord};
use engine::metrics::Metrics;
use sys::time::ThreadClock;

use super::first_drops::FirstDrops;

/// Processor time that a worker spends in one resume of a block, or in one turn without any, before it counts as
/// stalled.
const STALLED_AFTER: Duration = Duration::from_millis(700);
/// How often to check.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A worker that serves nothing, or has blocks that hang on accelerator threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stall {
    /// Its index.
    pub worker: usize,
    /// The kernel that does not return; empty where the worker has ended.
    pub kernel: String,
    /// The kernel's service.
    pub service: String,
    /// The service's accelerator.
    pub accelerator: String,
    /// The block.
    pub block: u32,
    /// Blocks on accelerator threads that hang; if there are any, the worker itself makes progress.
    pub hung_blocks: u64,
}

impl Stall {
    /// The problem, in one sentence without a full stop.
    pub fn reason(&self) -> String {
        let Self { worker, kernel, service, accelerator, block, hung_blocks } = self;
        if *hung_blocks > 0 {
            return format!(
                "{hung_blocks} blocks of worker {worker} hang on accelerator threads: their kernel did not return within hang_ms"
            );
        }
        if kernel.is_empty() {
            return format!("worker {worker} has ended: it panicked");
        }
        if service.is_empty() {
            return format!("worker {worker} computes without finishing a turn: {kernel}");
        }
        format!(
            "kernel {kernel:?} of service {service:?} on accelerator {accelerator:?} does not return (block {block}): \
             worker {worker} serves nothing meanwhile"
        )
    }
}

/// The workers that are stalled now; see [`crate::Server::stalls`].
#[derive(Debug, Default)]
pub struct Stalls(Mutex<Vec<Stall>>);

impl From<Vec<Stall>> for Stalls {
    fn from(stalls: Vec<Stall>) -> Self {
        Self(Mutex::new(stalls))
    }
}

impl Stalls {
    /// All of them.
    pub fn list(&self) -> Vec<Stall> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stall>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks of one service on one accelerator, as [`Resuming`] names them.
struct Named {
    tag: u32,
    slot: u16,
    kernel: String,
    service: String,
    accelerator: String,
}

#[derive(Default)]
struct State {
    /// By worker; those whose threads run.
    clocks: Vec<Option<ThreadClock>>,
    named: Vec<Named>,
    tags: u32,
    stop: bool,
}

/// What the thread shares with the server and its workers.
pub(crate) struct Watched {
    state: Mutex<State>,
    changed: Condvar,
    /// By worker.
    resuming: Vec<Arc<ResumingWord>>,
    metrics: Metrics,
    /// The workers are ending, and their threads with them.
    ending: AtomicBool,
    stalls: Arc<Stalls>,
}

impl Watched {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The calling thread is this worker.
    pub(crate) fn enter(&self, worker: usize) {
        // Without a clock this worker is never reported.
        self.lock().clocks[worker] = ThreadClock::of_this_thread().ok();
    }

    /// Where blocks of this service on the workers' cores publish that they are resumed, by worker.
    pub(crate) fn name(
        &self,
        slot: u16,
        (kernel, service, accelerator): (&str, &str, &str),
    ) -> Vec<Resuming> {
        let mut state = self.lock();
        state.tags += 1;
        let tag = state.tags;
        let (kernel, service) = (kernel.to_owned(), service.to_owned());
        state.named.push(Named { tag, slot, kernel, service, accelerator: accelerator.to_owned() });
        let of_worker = |word: &Arc<ResumingWord>| Resuming::new(word.clone(), tag);
        self.resuming.iter().map(of_worker).collect()
    }

    /// No worker has blocks of this slot any more.
    pub(crate) fn forget(&self, slot: u16) {
        self.lock().named.retain(|named| named.slot != slot);
    }
}

/// The watchdog's thread; ends when dropped.
pub(crate) struct Watchdog {
    shared: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn start(workers: usize, metrics: Metrics) -> std::io::Result<Self> {
        let state = State { clocks: vec![None; workers], ..State::default() };
        let shared = Arc::new(Watched {
            state: Mutex::new(state),
            changed: Condvar::new(),
            resuming: (0..workers).map(|_| Arc::default()).collect(),
            metrics,
            ending: AtomicBool::new(false),
            stalls: Arc::default(),
        });
        let of_thread = shared.clone();
        let builder = std::thread::Builder::new().name("serval-watch".into());
        let thread = builder.spawn(move || watch(&of_thread))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn shared(&self) -> Arc<Watched> {
        self.shared.clone()
    }

    pub(crate) fn stalls(&self) -> Arc<Stalls> {
        self.shared.stalls.clone()
    }

    /// Threads of workers may end from now on.
    pub(crate) fn set_ending(&self) {
        self.shared.ending.store(true, Ordering::Relaxed);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

/// State of a worker when it last made progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LastProgress {
    turns: u64,
    resuming: u64,
    cpu: Duration,
}

impl LastProgress {
    /// Reads the current values; returns whether the worker has computed for long without progress.
    fn update(&mut self, now: Self) -> bool {
        if (now.turns, now.resuming) != (self.turns, self.resuming) {
            *self = now;
        }
        now.cpu.saturating_sub(self.cpu) >= STALLED_AFTER
    }
}

fn watch(shared: &Watched) {
    let counters: Vec<_> = shared.metrics.workers().collect();
    let mut seen = vec![LastProgress::default(); shared.resuming.len()];
    let mut first_drops = FirstDrops::default();
    let mut state = shared.lock();
    while !state.stop {
        let mut found = Vec::new();
        for (worker, seen) in seen.iter_mut().enumerate() {
            let Some(clock) = state.clocks[worker] else { continue };
            let Some(cpu) = clock.read() else {
                if !shared.ending.load(Ordering::Relaxed) {
                    found.push(stall(&state, worker, None));
                }
                continue;
            };
            let hung_blocks = counters[worker].hung_blocks.value();
            if hung_blocks > 0 {
                found.push(Stall { worker, hung_blocks, ..Stall::default() });
            }
            // The word is read first: a turn that ends in between counts as a change.
            let resuming = shared.resuming[worker].load();
            let now = LastProgress { turns: counters[worker].turns.value(), resuming, cpu };
            if seen.update(now) {
                found.push(stall(&state, worker, Some(resuming)));
            }
        }
        report(&mut shared.stalls.lock(), found);
        first_drops.report(&shared.metrics);
        let waited = shared.changed.wait_timeout(state, CHECK_INTERVAL);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn stall(state: &State, worker: usize, resuming: Option<u64>) -> Stall {
    let named = resuming.map(Resuming::parts);
    let (tag, block) = named.unwrap_or_default();
    let of = state.named.iter().find(|named| named.tag == tag);
    let text = |get: fn(&Named) -> &String| of.map_or(String::new(), |named| get(named).clone());
    Stall {
        worker,
        hung_blocks: 0,
        kernel: match (of, resuming) {
            (Some(named), _) => named.kernel.clone(),
            (None, Some(_)) => "not in a kernel".to_owned(),
            (None, None) => String::new(),
        },
        service: text(|named| &named.service),
        accelerator: text(|named| &named.accelerator),
        block,
    }
}

/// Logs every change, once.
fn report(known: &mut Vec<Stall>, found: Vec<Stall>) {
    for stall in found.iter().filter(|stall| !known.contains(stall)) {
        tracing::error!("{}", stall.reason());
    }
    for worker in recovered(known, &found) {
        tracing::warn!("worker {worker} is no longer stalled");
    }
    *known = found;
}

/// Workers that are no longer stalled. One with another number of hung blocks is not among them.
fn recovered(known: &[Stall], found: &[Stall]) -> BTreeSet<usize> {
    let is_found = |worker: &usize| found.iter().any(|stall| stall.worker == *worker);
    known.iter().map(|stall| stall.worker).filter(|worker| !is_found(worker)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(turns: u64, resuming: u64, cpu_ms: u64) -> LastProgress {
        LastProgress { turns, resuming, cpu: Duration::from_millis(cpu_ms) }
    }

    #[test]
    fn a_second_hung_block_is_not_a_recovery() {
        let hung = |worker, hung_blocks| Stall { worker, hung_blocks, ..Stall::default() };
        let known = [hung(0, 1), hung(1, 1)];
        assert!(recovered(&known, &[hung(0, 2), hung(1, 1)]).is_empty());
        assert_eq!(recovered(&known, &[hung(0, 2)]), [1].into());
        let also_stalled = [hung(0, 1), Stall { kernel: "spin".into(), ..Stall::default() }];
        assert_eq!(recovered(&also_stalled, &[]), [0].into(), "reported once");
    }

    #[test]
    fn only_processor_time_without_progress_counts() {
        let mut seen = LastProgress::default();
        assert!(!seen.update(at(1, 5, 5_000)), "it finishes turns");
        assert!(!seen.update(at(1, 5, 5_000)), "it sleeps, or has no core");
        assert!(!seen.update(at(1, 5, 5_699)));
        assert!(seen.update(at(1, 5, 5_700)));
        assert!(!seen.update(at(1, 6, 5_701)), "it has resumed the next block");
        assert!(!seen.update(at(2, 6, 6_400)), "it finishes turns again");
        assert!(seen.update(at(2, 6, 7_100)));
    }
}
