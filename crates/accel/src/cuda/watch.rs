//! Detects blocks that have messages and make no progress.
//!
//! A block on a GPU can neither be inspected nor ended from outside. Visible are requests
//! in its RX ring while none of its words changes. A block that waits for room in its TX ring, or for
//! a backend, which may take arbitrarily long, is not hung.

use std::time::{Duration, Instant};

/// A block's words at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Requests in the RX ring: published and not released.
    pub(super) waiting: u64,
    /// The engine owes it the answer of a backend.
    pub(super) owed: bool,
    /// Free slots of the TX ring.
    pub(super) credit: u64,
    /// Words that change when the block makes progress.
    pub(super) moved: [u64; 5],
}

/// The state kept for one block.
pub(super) struct Watch {
    last: Look,
    looked: Instant,
    /// How long it made no progress, although it could.
    still: Duration,
}

impl Watch {
    pub(super) fn new(now: Instant) -> Self {
        Self { last: Look::default(), looked: now, still: Duration::ZERO }
    }

    /// Whether the block made no progress for `limit`, although it could.
    pub(super) fn is_hung(&mut self, look: Look, now: Instant, limit: Duration) -> bool {
        // A watcher that was stopped itself must not blame the block: a suspended machine says nothing about it.
        let passed = now.duration_since(self.looked).min(limit / 4);
        let idle = look.waiting == 0 || look.owed || look.credit == 0;
        let moves = self.last.waiting == 0 || look.moved != self.last.moved;
        self.still = if idle || moves { Duration::ZERO } else { self.still + passed };
        (self.last, self.looked) = (look, now);
        self.still >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn look(waiting: u64, credit: u64, received: u64) -> Look {
        Look { waiting, owed: false, credit, moved: [received, 0, 0, 0, 0] }
    }

    /// Checks each second, while the block stays in this state; whether it hangs.
    fn stays(watch: &mut Watch, look: Look, seconds: u64) -> bool {
        (0..seconds).any(|_| watch.is_hung(look, watch.looked + Duration::from_secs(1), LIMIT))
    }

    #[test]
    fn only_a_block_that_could_work_and_does_not_hangs() {
        let mut watch = Watch::new(Instant::now());
        // Idle, however long.
        assert!(!stays(&mut watch, look(0, 8, 5), 100));
        // Work has just arrived: the time before does not count.
        assert!(!stays(&mut watch, look(1, 8, 5), 10));
        assert!(stays(&mut watch, look(1, 8, 5), 1));
        // It makes progress again.
        assert!(!stays(&mut watch, look(1, 8, 6), 1));
        // Its replies are not taken.
        assert!(!stays(&mut watch, look(9, 0, 6), 100));
        assert!(!stays(&mut watch, look(9, 1, 6), 9));
        assert!(stays(&mut watch, look(9, 1, 6), 1));
        // It waits for a backend.
        assert!(!stays(&mut watch, Look { owed: true, ..look(9, 8, 6) }, 100));
        assert!(!stays(&mut watch, look(9, 8, 6), 9));
        assert!(stays(&mut watch, look(9, 8, 6), 1));
    }

    #[test]
    fn a_watcher_that_was_stopped_blames_no_block() {
        let mut watch = Watch::new(Instant::now());
        assert!(!stays(&mut watch, look(1, 8, 5), 5));
        let later = watch.looked + Duration::from_secs(3600);
        assert!(!watch.is_hung(look(1, 8, 5), later, LIMIT));
        assert!(!stays(&mut watch, look(1, 8, 5), 3));
        assert!(stays(&mut watch, look(1, 8, 5), 1));
    }

    /// A block of a service without replies releases slots for a quarter of its ring at a time, and publishes its counts
    /// about once a second.
    #[test]
    fn a_block_that_sends_nothing_is_slow_and_does_not_hang() {
        const DEPTH: u64 = 1024;
        let start = Instant::now();
        let hangs = |told_every_ms: u64| {
            let (mut watch, mut told) = (Watch::new(start), (0, 0));
            // A message takes 100 ms, so a quarter of the ring 25 s.
            (0..60_000).step_by(100).any(|ms| {
                let taken = ms / 100;
                if ms - told.0 >= told_every_ms {
                    told = (ms, taken);
                }
                let released = taken - taken % (DEPTH / 4);
                let moved = [released, 0, told.1, 0, 0];
                let look = Look { waiting: DEPTH, owed: false, credit: 8, moved };
                watch.is_hung(look, start + Duration::from_millis(ms), LIMIT)
            })
        };
        assert!(!hangs(1_000));
        assert!(hangs(u64::MAX));
    }
}
