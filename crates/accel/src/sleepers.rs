//! Where the idle threads of a runtime sleep. One of them waits for the engine's wake-up: it *listens*. It wakes those for which there
//! are messages, and no others.
//!
//! EDGE PARK: a thread announces that it sleeps, then checks its rings once more; the engine publishes, then
//! checks whether the runtime sleeps. A full fence between the two on both sides: at least one of them
//! sees the other. All threads of a runtime share one word, so they write it under a lock, only
//! before and after a sleep.
//!
//! A wake-up stays signalled until a thread listens, and a thread that stops listening first looks at the rings of all sleepers, so none is lost
//! between two listeners. While threads sleep, one of them listens or has been woken to do so: each thread that leaves checks this.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mqueue::{MappedMemory, Words};

/// See the module's text.
pub struct Sleepers {
    words: Words<MappedMemory>,
    sleep: Box<dyn Fn(Duration) + Send + Sync>,
    state: Mutex<Asleep>,
}

#[derive(Default)]
struct Asleep {
    /// Threads that sleep, with the one that listens.
    count: usize,
    /// A thread waits for the engine's wake-up.
    listening: bool,
    /// The others.
    others: Vec<Arc<Sleeper>>,
}

/// One thread, while it sleeps. Its words are written under the lock.
#[derive(Default)]
pub struct Sleeper {
    /// Its mqueues, and how far it has read the head of each; empty: every wake-up is for this thread.
    seen: Box<[(u32, AtomicU64)]>,
    /// The stop word that it has seen.
    stop: AtomicU64,
    /// It is to look again.
    woken: AtomicBool,
    changed: Condvar,
}

impl Sleeper {
    /// A thread that reads the requests of these mqueues.
    pub fn new(mqueues: impl IntoIterator<Item = u32>) -> Arc<Self> {
        let seen = mqueues.into_iter().map(|mqueue| (mqueue, AtomicU64::new(0))).collect();
        Arc::new(Self { seen, ..Self::default() })
    }

    fn has_work(&self, words: &Words<MappedMemory>) -> bool {
        let moved = |(mqueue, head): &(u32, AtomicU64)| {
            words.rx_head(*mqueue) != head.load(Ordering::Relaxed)
        };
        self.seen.is_empty()
            || words.stop() != self.stop.load(Ordering::Relaxed)
            || self.seen.iter().any(moved)
    }

    fn wake(&self) {
        self.woken.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }
}

impl Sleepers {
    /// Sleepers of the region with these words. `sleep` waits until the engine wakes the runtime, for at most the time
    /// given, and clears the wake-up.
    pub fn new(words: Words<MappedMemory>, sleep: Box<dyn Fn(Duration) + Send + Sync>) -> Self {
        Self { words, sleep, state: Mutex::default() }
    }

    /// Sleeps until the engine wakes the runtime, for at most `limit`, unless a last check with `has_work` finds work.
    /// That is a message in a ring of this thread, or a changed stop word.
    pub fn sleep(&self, limit: Duration, has_work: impl Fn() -> bool) {
        self.sleep_as(&Arc::default(), &[], limit, has_work);
    }

    /// As [`Self::sleep`], for a thread that says which mqueues it reads: wake-ups for others leave it asleep. `seen` are the heads up to which
    /// it has read them, in the order of [`Sleeper::new`].
    pub fn sleep_as(
        &self,
        sleeper: &Arc<Sleeper>,
        seen: &[(u32, u64)],
        limit: Duration,
        has_work: impl Fn() -> bool,
    ) {
        let until = Instant::now() + limit;
        let asked = self.words.stop();
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
        sleeper.stop.store(asked, Ordering::Relaxed);
        for ((_, head), (_, seen)) in sleeper.seen.iter().zip(seen) {
            head.store(*seen, Ordering::Relaxed);
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = if state.listening {
                self.rest(state, sleeper, left)
            } else {
                self.listen(state, left)
            };
            if has_work() {
                break;
            }
        }
        state.count -= 1;
        if state.count == 0 {
            self.words.set_accelerator_parked(false);
        } else if !state.listening
            && let Some(next) = state.others.last()
        {
            next.wake();
        }
    }

    /// Waits for the engine's wake-up, then wakes the threads that it is for.
    fn listen<'a>(
        &'a self,
        mut state: MutexGuard<'a, Asleep>,
        limit: Duration,
    ) -> MutexGuard<'a, Asleep> {
        state.listening = true;
        drop(state);
        (self.sleep)(limit);
        let mut state = lock(&self.state);
        state.listening = false;
        state
            .others
            .iter()
            .filter(|other| other.has_work(&self.words))
            .for_each(|other| other.wake());
        state
    }

    /// Waits to be woken.
    fn rest<'a>(
        &'a self,
        mut state: MutexGuard<'a, Asleep>,
        sleeper: &Arc<Sleeper>,
        limit: Duration,
    ) -> MutexGuard<'a, Asleep> {
        sleeper.woken.store(false, Ordering::Relaxed);
        state.others.push(sleeper.clone());
        let waits = |_: &mut Asleep| !sleeper.woken.load(Ordering::Relaxed);
        let waited = sleeper.changed.wait_timeout_while(state, limit, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.others.retain(|other| !Arc::ptr_eq(other, sleeper));
        state
    }

    /// Makes the threads that do not listen look again; the one that listens does when its time is up.
    pub fn wake_all(&self) {
        lock(&self.state).others.iter().for_each(|other| other.wake());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
