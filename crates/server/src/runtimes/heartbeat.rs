//! The heartbeat of an engine: one thread that advances a word in every region.
//!
//! Blocks outside the workers end on their own when it does not advance for seconds (reason `ENGINE_LOST`), so that
//! nothing spins on an accelerator for a process that has ended. It has its own thread, because a worker may be
//! inside a long kernel, and because blocks may already run while other services are being started.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mqueue::{MappedMemory, Words};

/// Time between two heartbeats; an engine counts as lost after seconds without one.
const INTERVAL: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct State {
    /// Regions, with their numbers.
    regions: Vec<(u64, Words<MappedMemory>)>,
    added: u64,
    count: u64,
    stop: bool,
}

/// Writes heartbeats until it is dropped.
pub(crate) struct HeartbeatWriter {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl HeartbeatWriter {
    pub(crate) fn start() -> std::io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let of_thread = shared.clone();
        let builder = std::thread::Builder::new().name("serval-heartbeat".into());
        let thread = builder.spawn(move || run(&of_thread))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Adds a region; its heartbeat stops when the returned guard is dropped.
    pub(crate) fn add(&self, words: Words<MappedMemory>) -> HeartbeatGuard {
        let mut state = self.shared.lock();
        state.added += 1;
        let number = state.added;
        state.regions.push((number, words));
        self.shared.changed.notify_one();
        HeartbeatGuard { shared: self.shared.clone(), number }
    }
}

/// Keeps the heartbeat of one region running; dropping it stops it.
pub(crate) struct HeartbeatGuard {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for HeartbeatGuard {
    fn drop(&mut self) {
        self.shared.lock().regions.retain(|(of, _)| *of != self.number);
    }
}

fn run(shared: &Shared) {
    let mut state = shared.lock();
    while !state.stop {
        state.count += 1;
        for (_, words) in &state.regions {
            words.set_engine_heartbeat(state.count);
        }
        let waited = shared.changed.wait_timeout(state, INTERVAL);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Drop for HeartbeatWriter {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}
