//! What a call needs from the connections to the other ranks.

use std::time::Duration;

use crate::error::Loss;
use crate::frame::Notice;

/// Longest sleep of a rank that waits; whatever it waits for ends it early.
pub(crate) const SLEEP_MAX: Duration = Duration::from_millis(100);

/// How a rank waits before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// The other ranks need this core.
    is_crowded: bool,
}

impl Spin {
    /// For a machine with this many ranks.
    pub(crate) fn of(ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let is_crowded = ranks > cores;
        Self { limit: Duration::from_micros(if is_crowded { 20 } else { 200 }), is_crowded }
    }

    /// Whether to look again at once, after this time without a movement.
    pub(crate) fn spins(self, waited: Duration) -> bool {
        let spins = waited < self.limit;
        if spins && self.is_crowded {
            std::thread::yield_now();
        } else if spins {
            std::hint::spin_loop();
        }
        spins
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
