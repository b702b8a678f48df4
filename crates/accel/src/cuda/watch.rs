//! Notices blocks that have messages and do nothing.
//!
//! A block on a GPU cannot be looked into and cannot be ended from outside. What can be seen: requests
//! that lie in its RX ring while none of its words moves. A block that waits for room in its TX ring, or for
//! a backend, which may take longer than anything here, is not to blame for that.

use std::time::{Duration, Instant};

/// What a block's words say at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Requests in the RX ring: published and not released.
    pub(super) waiting: u64,
    /// A backend has not answered it yet.
    pub(super) asks: bool,
    /// Free slots of the TX ring.
    pub(super) credit: u64,
    /// Anything that moves when the block does.
    pub(super) moved: [u64; 5],
}

/// What is remembered of one block.
pub(super) struct Watch {
    last: Look,
    since: Instant,
}

impl Watch {
    pub(super) fn new(now: Instant) -> Self {
        Self { last: Look::default(), since: now }
    }

    /// Whether the block has done nothing for `limit`, although it could.
    pub(super) fn is_hung(&mut self, look: Look, now: Instant, limit: Duration) -> bool {
        let idle = look.waiting == 0 || look.asks || look.credit == 0;
        if idle || self.last.waiting == 0 || look.moved != self.last.moved {
            self.since = now;
        }
        self.last = look;
        now.duration_since(self.since) >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn look(waiting: u64, credit: u64, received: u64) -> Look {
        Look { waiting, asks: false, credit, moved: [received, 0, 0, 0, 0] }
    }

    #[test]
    fn only_a_block_that_could_work_and_does_not_hangs() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut watch = Watch::new(start);
        // Nothing to do, however long.
        assert!(!watch.is_hung(look(0, 8, 5), at(100), LIMIT));
        // Work came just now: the time before does not count.
        assert!(!watch.is_hung(look(1, 8, 5), at(200), LIMIT));
        assert!(!watch.is_hung(look(1, 8, 5), at(209), LIMIT));
        assert!(watch.is_hung(look(1, 8, 5), at(210), LIMIT));
        // It moves again.
        assert!(!watch.is_hung(look(1, 8, 6), at(211), LIMIT));
        // Nobody takes its replies.
        assert!(!watch.is_hung(look(9, 0, 6), at(300), LIMIT));
        assert!(!watch.is_hung(look(9, 1, 6), at(301), LIMIT));
        assert!(watch.is_hung(look(9, 1, 6), at(310), LIMIT));
        // It waits for a backend.
        let asks = Look { asks: true, ..look(9, 8, 6) };
        assert!(!watch.is_hung(asks, at(400), LIMIT));
        assert!(!watch.is_hung(look(9, 8, 6), at(409), LIMIT));
        assert!(watch.is_hung(look(9, 8, 6), at(410), LIMIT));
    }
    /// A block of a service without replies gives slots back for a quarter of its ring at a time, and tells its counts
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
                let look = Look { waiting: DEPTH, asks: false, credit: 8, moved };
                watch.is_hung(look, start + Duration::from_millis(ms), LIMIT)
            })
        };
        assert!(!hangs(1_000));
        assert!(hangs(u64::MAX));
    }
}
