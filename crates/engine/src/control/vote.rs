//! What a worker votes on while a service leaves or is paused: that it has nothing left of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many workers have nothing left of a service that leaves or is paused.
#[derive(Clone, Debug, Default)]
pub struct DrainBarrier(Arc<AtomicUsize>);

impl DrainBarrier {
    /// Whether all of `workers` have nothing left. A worker that takes something over from another one revokes its vote
    /// first, so this stays true once it is true.
    pub fn is_complete(&self, workers: usize) -> bool {
        self.0.load(Ordering::Acquire) == workers
    }
}

/// A worker's vote that it has nothing left, which it may revoke.
pub(crate) struct DrainVote {
    barrier: DrainBarrier,
    given: bool,
}

impl DrainVote {
    /// Not given yet.
    pub(crate) fn new(barrier: DrainBarrier) -> Self {
        Self { barrier, given: false }
    }

    pub(crate) fn is_given(&self) -> bool {
        self.given
    }

    pub(crate) fn set(&mut self, given: bool) {
        if std::mem::replace(&mut self.given, given) != given {
            match given {
                true => self.barrier.0.fetch_add(1, Ordering::Release),
                false => self.barrier.0.fetch_sub(1, Ordering::Release),
            };
        }
    }
}

/// The state of a service share that leaves.
pub(crate) struct Leaving {
    pub(crate) vote: DrainVote,
    /// Its drain time is over.
    pub(crate) expired: bool,
}

/// One reason why a service share takes nothing in.
pub(crate) struct Pause {
    pub(super) accelerator: u16,
    /// How long accepted requests may take.
    pub(super) drain_ns: u64,
    /// It ends by then. `None` before the switch, because it is unknown how long the other services of the change take.
    pub(super) until_ns: Option<u64>,
    pub(crate) vote: DrainVote,
}

impl Pause {
    pub(super) fn has_begun(&self) -> bool {
        self.until_ns.is_some()
    }
}
