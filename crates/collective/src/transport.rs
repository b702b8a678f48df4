//! What a call needs from the connections to the other ranks.

use std::time::{Duration, Instant};

use crate::error::Loss;
use crate::frame::Notice;

/// Longest sleep of a rank that waits; whatever it waits for ends it early.
pub(crate) const SLEEP_MAX: Duration = Duration::from_millis(50);

/// How long a rank looks again at once, and how long it lets others run in between; then it sleeps. The first is longer than a
/// rank at work makes another one wait.
const ALONE: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_micros(200);
/// The same if this machine has more ranks than cores.
const CROWDED_YIELD: Duration = Duration::from_micros(20);
/// As many waits in a row in which others ran at each yield, for about the time that ranks look alone, are no accident: the other rank
/// runs on this core. If no other program wants to run, the host's scheduler returns sooner.
const SHARED_WAITS: u32 = 4;
const SHARED_RUN: std::ops::Range<Duration> = Duration::from_micros(1)..Duration::from_micros(200);
/// Looks for a movement between two looks at the clock; a short call needs none.
const LOOKS: u32 = 16;
/// Waits with more time between them are no row.
const ROW_PAUSE: Duration = Duration::from_micros(500);
/// After as many waits it has to be shown once more.
const WAITS_PER_TRIAL: u32 = 64;

/// How a rank waits before it sleeps.
///
/// Two ranks may share a core although another one is idle. Then each has to let the other one run, and at once: if both stay
/// runnable, the host's scheduler moves one of them, but not if each sleeps while the other one runs.
#[derive(Clone, Debug)]
pub(crate) struct Spin {
    is_crowded: bool,
    /// The shortest and the longest time for which others ran at a yield of this wait.
    runs: Option<[Duration; 2]>,
    /// When the last of them began, and in the last wait that showed a shared core.
    began: Instant,
    shown: Instant,
    /// Waits in a row that show a shared core.
    shared: u32,
    waits: u32,
}

impl Spin {
    /// For a machine with this many ranks.
    pub(crate) fn of(ranks: usize) -> Self {
        // A rank that may use one core says nothing about the others: each may be pinned to its own.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let now = Instant::now();
        Self {
            is_crowded: cores > 1 && ranks > cores,
            runs: None,
            began: now,
            shown: now,
            shared: 0,
            waits: 0,
        }
    }

    /// As [`Transport::looks`].
    pub(crate) fn looks(&self) -> u32 {
        match self.is_crowded || self.shares_core() {
            true => 0,
            false => LOOKS,
        }
    }

    /// Whether to look again at once, after this time without a movement.
    pub(crate) fn spins(&mut self, waited: Duration) -> bool {
        if waited.is_zero() {
            self.begin();
        }
        if waited >= if self.is_crowded { CROWDED_YIELD } else { YIELD } {
            return false;
        }
        let alone = if self.shares_core() { Duration::ZERO } else { ALONE };
        if self.is_crowded {
            std::thread::yield_now();
        } else if waited >= alone {
            self.began = Instant::now();
            std::thread::yield_now();
            let run = self.began.elapsed();
            let [shortest, longest] = self.runs.unwrap_or([run; 2]);
            self.runs = Some([shortest.min(run), longest.max(run)]);
        }
        true
    }

    /// Another wait; the one before has ended.
    fn begin(&mut self) {
        let runs = self.runs.take();
        let is_shared = runs.is_some_and(|runs| runs.iter().all(|run| SHARED_RUN.contains(run)));
        self.shared = match is_shared {
            false => 0,
            true if self.began - self.shown > ROW_PAUSE => 1,
            true => self.shared.saturating_add(1),
        };
        if is_shared {
            self.shown = self.began;
        }
        self.waits = self.waits.wrapping_add(1);
        if self.waits.is_multiple_of(WAITS_PER_TRIAL) {
            // One more wait has to show it, a long one.
            self.shared = self.shared.min(SHARED_WAITS - 1);
        }
    }

    fn shares_core(&self) -> bool {
        self.shared >= SHARED_WAITS
    }
}

/// One stream of bytes to each other rank and one from it, in order and without loss.
pub trait Transport {
    /// Sends as much of `head` followed by `body` as the stream takes now; returns the number of bytes, 0 for none. `is_long`:
    /// the transfer is ([`crate::frame::is_long`]).
    fn send(&mut self, peer: usize, head: &[u8], body: &[u8], is_long: bool)
    -> Result<usize, Loss>;

    /// Receives what has arrived, as far as it fits; returns the number of bytes, 0 for none. Never asks for bytes of the next
    /// frame. If all earlier results are multiples of 8, the length of `into` is one too, or `into` ends the frame.
    /// `is_bulk`: the bytes follow the header of a long transfer; the header itself is asked for without them.
    fn receive(&mut self, peer: usize, into: &mut [u8], is_bulk: bool) -> Result<usize, Loss>;

    /// Wakes the ranks that sleep until something moves that has moved by now. Comes before each wait and at the end of a call.
    fn wake(&mut self) {}

    /// How many looks for a movement in vain come before a wait.
    fn looks(&self) -> u32 {
        0
    }

    /// Waits until something may have moved, at most `limit`; returns early at any time. `waited`: for how long nothing has moved
    /// before. Fails if another rank has ended, or has ended the group.
    fn wait(&mut self, wants: &Wants, waited: Duration, limit: Duration) -> Result<(), Loss>;

    /// Tells all other ranks why this one ends, as far as that is possible without waiting.
    fn end(&mut self, notice: Notice);
}

/// For which ranks a call waits; a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// It waits for bytes from them.
    pub receive: u8,
    /// It waits for room for bytes to them.
    pub send: u8,
}

impl Wants {
    /// One rank of those it waits for, the receiving ones first.
    pub fn first(self) -> Option<usize> {
        let bits = if self.receive != 0 { self.receive } else { self.send };
        (bits != 0).then(|| bits.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wait in which others ran for this long at each yield.
    fn wait(spin: &mut Spin, run: Duration) {
        (spin.runs, spin.began) = (Some([run; 2]), Instant::now());
        spin.shown = spin.began;
        spin.begin();
    }

    #[test]
    fn short_runs_in_a_row_show_a_shared_core_until_a_wait_shows_none() {
        let short = Duration::from_micros(30);
        let mut spin = Spin::of(1);
        assert_eq!(spin.looks(), LOOKS);
        for _ in 0..SHARED_WAITS {
            assert!(!spin.shares_core());
            wait(&mut spin, short);
        }
        assert!(spin.shares_core());
        assert_eq!(spin.looks(), 0);
        // Another program ran, or none did.
        for run in [Duration::from_millis(3), Duration::from_nanos(300)] {
            wait(&mut spin, run);
            assert!(!spin.shares_core(), "{run:?}");
            (0..SHARED_WAITS).for_each(|_| wait(&mut spin, short));
            assert!(spin.shares_core());
        }
        // After a while it has to be shown once more.
        let mut waits = 0;
        while spin.shares_core() {
            wait(&mut spin, short);
            waits += 1;
            assert!(waits <= WAITS_PER_TRIAL);
        }
        wait(&mut spin, short);
        assert!(spin.shares_core());
    }
}
