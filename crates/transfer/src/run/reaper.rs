//! Closes descriptors of other programs, and names files, on threads of its own.
//!
//! `close` can block: a socket with `SO_LINGER` waits for its peer, a file of a network file system is flushed. The threads that
//! execute transfers and those that serve callers must not wait for that, so they hand over what they would drop. A file system that does not
//! answer holds a thread that gives a file its name, too.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Threads at most; a further one starts while all others are busy. If as many calls of `close` block, later ones wait.
const THREADS_MAX: usize = 16;
/// A thread that had nothing to do for this long ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

type Task = Box<dyn FnOnce() + Send>;

/// Does what can block, such as dropping values, on other threads. A clone shares the threads.
#[derive(Clone, Default)]
pub(crate) struct Reaper(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    threads: usize,
    idle: usize,
}

impl Reaper {
    /// Drops a value soon; does not wait for it.
    pub(crate) fn discard(&self, value: impl Send + 'static) {
        self.run(move || drop(value));
    }

    /// Does this soon; does not wait for it.
    pub(crate) fn run(&self, task: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        state.tasks.push_back(Box::new(task));
        if state.tasks.len() > state.idle && state.threads < THREADS_MAX {
            let shared = self.0.clone();
            let builder = std::thread::Builder::new().name("serval-close".into());
            match builder.spawn(move || shared.run()) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads > 0 => {}
                Err(_) => {
                    // Without any thread it is done here, which may block, but leaks nothing.
                    let tasks = std::mem::take(&mut state.tasks);
                    drop(state);
                    tasks.into_iter().for_each(|task| task());
                    return;
                }
            }
        }
        drop(state);
        self.0.changed.notify_all();
    }

    /// Waits until everything has been done, at most this long.
    pub(crate) fn settle(&self, limit: Duration) {
        let is_busy = |state: &mut State| !state.tasks.is_empty() || state.idle < state.threads;
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
            if let Some(task) = state.tasks.pop_front() {
                drop(state);
                // A task that panics, which has been reported then, ends no thread: each is counted.
                let _ = catch_unwind(AssertUnwindSafe(task));
                state = self.lock();
                continue;
            }
            state.idle += 1;
            self.changed.notify_all();
            let began = Instant::now();
            while state.tasks.is_empty() && began.elapsed() < IDLE_MAX {
                let waited = self.changed.wait_timeout(state, IDLE_MAX);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            state.idle -= 1;
            if state.tasks.is_empty() {
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
    fn a_task_that_panics_takes_no_thread_along() {
        let reaper = Reaper::default();
        for _ in 0..=THREADS_MAX {
            reaper.run(|| panic!("a task fails, as this test wants it"));
        }
        let (kept, dropped) = mpsc::channel::<()>();
        reaper.discard(kept);
        assert!(
            dropped
                .recv_timeout(Duration::from_secs(60))
                .is_err_and(|why| why == mpsc::RecvTimeoutError::Disconnected)
        );
        reaper.settle(Duration::from_secs(60));
        let state = reaper.0.lock();
        assert!(state.tasks.is_empty() && state.idle == state.threads);
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
        assert!(state.tasks.is_empty() && state.idle == state.threads);
    }
}
