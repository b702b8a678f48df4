//! The books of copies, in bytes: taken = delivered + dropped + outstanding.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Refused;

/// Counters of the copies that the engine requests from the runtimes of one accelerator. Several generations may write them.
#[derive(Debug, Default)]
pub struct CopyCounters {
    taken: AtomicU64,
    delivered: AtomicU64,
    dropped: AtomicU64,
    outstanding: AtomicU64,
    refused: [AtomicU64; Refused::COUNT],
}

/// Bytes of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyBytes {
    /// Of copies that were submitted.
    pub taken: u64,
    /// Of those that ended as done.
    pub delivered: u64,
    /// Of those that ended otherwise: refused by the runtime, failed, timed out, or lost with its rings.
    pub dropped: u64,
    /// Of those that have not ended.
    pub outstanding: u64,
}

impl CopyCounters {
    /// What was counted. Not of one instant while copies are submitted and end.
    pub fn bytes(&self) -> CopyBytes {
        CopyBytes {
            delivered: self.delivered.load(Ordering::Acquire),
            dropped: self.dropped.load(Ordering::Acquire),
            outstanding: self.outstanding.load(Ordering::Acquire),
            taken: self.taken.load(Ordering::Acquire),
        }
    }

    /// Copies that were refused before they were submitted, for this reason.
    pub fn refused(&self, why: Refused) -> u64 {
        self.refused[why.index()].load(Ordering::Relaxed)
    }

    pub(super) fn count_taken(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Release);
        self.outstanding.fetch_add(bytes, Ordering::Release);
    }

    pub(super) fn count_end(&self, bytes: u64, is_done: bool) {
        self.outstanding.fetch_sub(bytes, Ordering::Release);
        let end = if is_done { &self.delivered } else { &self.dropped };
        end.fetch_add(bytes, Ordering::Release);
    }

    pub(super) fn count_refused(&self, why: Refused) {
        self.refused[why.index()].fetch_add(1, Ordering::Relaxed);
    }
}
