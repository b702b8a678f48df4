//! Closes descriptors of other programs on threads of its own.
//!
//! `close` can block: a socket with `SO_LINGER` waits for its peer, a file of a network file system is flushed. The threads that
//! execute transfers and those that serve callers must not wait for that, so they hand over what they would drop.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Threads at most; a further one starts while all others are busy. If as many calls of `close` block, later ones wait.
const THREADS_MAX: usize = 16;
/// A thread that had nothing to do for this long ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

type Value = Box<dyn Any + Send>;

/// Drops values on other threads. A clone shares the threads.
#[derive(Clone, Default)]
pub(crate) struct Reaper(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    values: VecDeque<Value>,
    threads: usize,
    idle: usize,
}

impl Reaper {
    /// Drops a value soon; does not wait for it.
    pub(crate) fn discard(&self, value: impl Send + 'static) {
        let mut state = self.0.lock();
        state.values.push_back(Box::new(value));
        if state.values.len() > state.idle && state.threads < THREADS_MAX {
            let shared = self.0.clone();
            let builder = std::thread::Builder::new().name("serval-close".into());
            match builder.spawn(move || shared.run()) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads > 0 => {}
                Err(_) => {
                    // Without any thread the value is dropped here, which may block, but leaks nothing.
                    let values = std::mem::take(&mut state.values);
                    drop(state);
                    drop(values);
                    return;
                }
            }
        }
        drop(state);
        self.0.changed.notify_all();
    }

    /// Waits until everything has been dropped, at most this long.
    pub(crate) fn settle(&self, limit: Duration) {
        let is_busy = |state: &mut State| !state.values.is_empty() || state.idle < state.threads;
        let waited = self.0.changed.wait_timeout_while(self.0.lock(), limit, is_busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(value) = state.values.pop_front() {
                drop(state);
                drop(value);
                state = self.lock();
                continue;
            }
            state.idle += 1;
            self.changed.notify_all();
            let began = Instant::now();
            while state.values.is_empty() && began.elapsed() < IDLE_MAX {
                let waited = self.changed.wait_timeout(state, IDLE_MAX);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            state.idle -= 1;
            if state.values.is_empty() {
                state.threads -= 1;
                self.changed.notify_all();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Its drop waits until the channel is closed.
    struct Blocks(mpsc::Receiver<()>);

    impl Drop for Blocks {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn a_value_whose_drop_blocks_delays_no_other() {
        let reaper = Reaper::default();
        let (release, blocked) = mpsc::channel();
        reaper.discard(Blocks(blocked));
        let (kept, dropped) = mpsc::channel::<()>();
        reaper.discard(kept);
        // The receiver ends when the sender has been dropped.
        assert!(dropped.recv().is_err());
        reaper.settle(Duration::ZERO);
        drop(release);
        reaper.settle(Duration::from_secs(60));
        let state = reaper.0.lock();
        assert!(state.values.is_empty() && state.idle == state.threads);
    }
}
