//! The workers' votes while a service leaves or is paused: a worker votes when nothing of the service is outstanding
//! on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum time that clients of a paused service wait for the next generation, counted from the end of the last one.
pub const PAUSE_NS: u64 = 10_000_000_000;

/// How many workers have nothing outstanding of a service that leaves or is paused.
#[derive(Clone, Debug, Default)]
pub struct DrainBarrier(Arc<AtomicUsize>);

impl DrainBarrier {
    /// Whether all of `workers` have nothing outstanding. A worker that takes over a message from another one revokes
    /// its vote first, so once true this stays true.
    pub fn is_complete(&self, workers: usize) -> bool {
        self.0.load(Ordering::Acquire) == workers
    }
}

/// A worker's vote that it has nothing outstanding, which it may revoke.
pub(crate) struct DrainVote {
    barrier: DrainBarrier,
    given: bool,
}

impl DrainVote {
    /// A vote that is not given yet.
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

/// One reason why a service share takes no new requests.
pub(crate) struct Pause {
    pub(crate) accelerator: u16,
    /// Time limit for accepted requests.
    pub(crate) drain_ns: u64,
    /// Time at which it ends at the latest. `None` before the switch, because it is unknown how long the other
    /// services of the change take.
    pub(crate) until_ns: Option<u64>,
    pub(crate) vote: DrainVote,
}

impl Pause {
    pub(crate) fn has_begun(&self) -> bool {
        self.until_ns.is_some()
    }
}
