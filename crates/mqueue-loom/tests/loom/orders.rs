//! Atomics for code of other crates, whose stores or loads a model can make relaxed.

use std::cell::Cell;
pub(super) use std::sync::atomic::Ordering;

/// The accesses that are made relaxed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Relaxed {
    Nothing,
    Stores,
    Loads,
}

thread_local! {
    /// Of the model that runs: loom runs all its threads on the thread of the test.
    static RELAXED: Cell<Relaxed> = const { Cell::new(Relaxed::Nothing) };
}

/// A model begins.
pub(super) fn begin(relaxed: Relaxed) {
    RELAXED.set(relaxed);
}

/// Another thread has to do something first.
pub(super) fn spin_loop() {
    loom::thread::yield_now();
}

/// What they take for the atomics of the standard library.
pub(super) struct AtomicU64(loom::sync::atomic::AtomicU64);

fn load_order(order: Ordering) -> Ordering {
    if RELAXED.get() == Relaxed::Loads { Ordering::Relaxed } else { order }
}

/// Of what stores, or does both.
fn store_order(order: Ordering) -> Ordering {
    match (RELAXED.get(), order) {
        (Relaxed::Stores, Ordering::AcqRel) => Ordering::Acquire,
        (Relaxed::Stores, _) => Ordering::Relaxed,
        (Relaxed::Loads, Ordering::AcqRel) => Ordering::Release,
        (_, order) => order,
    }
}

impl AtomicU64 {
    pub(super) fn new(value: u64) -> Self {
        Self(loom::sync::atomic::AtomicU64::new(value))
    }

    pub(super) fn load(&self, order: Ordering) -> u64 {
        self.0.load(load_order(order))
    }

    pub(super) fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, store_order(order));
    }

    pub(super) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, store_order(order))
    }

    pub(super) fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, store_order(order))
    }

    pub(super) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_max(value, store_order(order))
    }

    pub(super) fn fetch_min(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_min(value, store_order(order))
    }

    pub(super) fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        done: Ordering,
        failed: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, store_order(done), load_order(failed))
    }
}
