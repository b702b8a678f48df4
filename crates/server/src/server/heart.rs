//! The heartbeat of an engine: one thread that advances a word in every region.
//!
//! Blocks outside the workers end by themselves when it stands still for seconds (reason
//! `ENGINE_LOST`): nothing may spin on an accelerator for a process that is gone. The beat has a
//! thread of its own, because a worker may be inside a long kernel, and because blocks can already
//! run while other services are still being started.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mqueue::{MappedMemory, Words};

/// Time between two beats; an engine counts as lost after seconds of silence.
const BEAT: Duration = Duration::from_millis(500);

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
    /// With their numbers.
    regions: Vec<(u64, Words<MappedMemory>)>,
    added: u64,
    beats: u64,
    stop: bool,
}

/// Beats until it is dropped.
pub(super) struct Heart {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    pub(super) fn start() -> std::io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let beating = shared.clone();
        let builder = std::thread::Builder::new().name("serval-heartbeat".into());
        let thread = builder.spawn(move || beat(&beating))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// From now on this region's heartbeat advances too, until what is returned is dropped.
    pub(super) fn add(&self, words: Words<MappedMemory>) -> Beat {
        let mut state = self.shared.lock();
        state.added += 1;
        let number = state.added;
        state.regions.push((number, words));
        self.shared.changed.notify_one();
        Beat { shared: self.shared.clone(), number }
    }
}

/// A region's heartbeat; it stands still once this is dropped.
pub(super) struct Beat {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.shared.lock().regions.retain(|(of, _)| *of != self.number);
    }
}

fn beat(shared: &Shared) {
    let mut state = shared.lock();
    while !state.stop {
        state.beats += 1;
        for (_, words) in &state.regions {
            words.set_engine_heartbeat(state.beats);
        }
        let waited = shared.changed.wait_timeout(state, BEAT);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}
