//! Where the idle threads of a runtime sleep. The first one waits for the engine's wake-up, the others for the first.
//!
//! EDGE PARK: a thread announces that it sleeps, then checks its rings once more; the engine publishes, then
//! checks whether the runtime sleeps. A full fence between the two on both sides: at least one of them
//! sees the other. All threads of a runtime share one word, so they write it under a lock, only
//! before and after a sleep.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mqueue::{MappedMemory, Words};

/// See the module's text.
pub struct Sleepers {
    words: Words<MappedMemory>,
    sleep: Box<dyn Fn(Duration) + Send + Sync>,
    state: Mutex<Asleep>,
    woken: Condvar,
}

#[derive(Default)]
struct Asleep {
    count: usize,
    /// A thread waits for the engine's wake-up.
    listening: bool,
    /// Number of wake-ups.
    wakes: u64,
}

impl Sleepers {
    /// Sleepers of the region with these words. `sleep` waits until the engine wakes the runtime, for at most the time
    /// given, and clears the wake-up.
    pub fn new(words: Words<MappedMemory>, sleep: Box<dyn Fn(Duration) + Send + Sync>) -> Self {
        Self { words, sleep, state: Mutex::default(), woken: Condvar::new() }
    }

    /// Sleeps until the engine wakes the runtime, for at most `limit`, unless a last check with `has_work` finds work.
    /// That is a message in a ring of this thread, or a changed stop word. May return early.
    pub fn sleep(&self, limit: Duration, has_work: impl Fn() -> bool) {
        let mut state = lock(&self.state);
        // EDGE PARK (sleeper half)
        self.words.set_accelerator_parked(true);
        if has_work() {
            if state.count == 0 {
                self.words.set_accelerator_parked(false);
            }
            return;
        }
        state.count += 1;
        if state.listening {
            let wakes = state.wakes;
            let same = |state: &mut Asleep| state.wakes == wakes;
            let waited = self.woken.wait_timeout_while(state, limit, same);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        } else {
            state.listening = true;
            drop(state);
            (self.sleep)(limit);
            state = lock(&self.state);
            state.listening = false;
            state.wakes += 1;
            self.woken.notify_all();
        }
        state.count -= 1;
        if state.count == 0 {
            self.words.set_accelerator_parked(false);
        }
    }

    /// Wakes the threads that wait for the first one, which wakes when its time is up.
    pub fn wake_all(&self) {
        lock(&self.state).wakes += 1;
        self.woken.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
