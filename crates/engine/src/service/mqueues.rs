//! Server mqueues of one worker, and the dispatcher's data about each.

use mqueue::{Consumer, MappedMemory, Producer};
use wire::session::Token;

use crate::base::accelerator::Blocks;

/// A server mqueue of this worker.
pub(crate) struct ServerMqueue {
    pub(crate) attachment: u16,
    pub(crate) block: u32,
    /// Its number in the region.
    pub(super) region_mqueue: u32,
    /// The accelerator wrote impossible ring words; housekeeping marks the mqueue as dead.
    pub(crate) tx_corrupt: bool,
    /// Listed in [`ServiceShare::blocked`].
    pub(crate) is_blocked: bool,
    /// Prefetch distance in messages for writing slots of its RX ring.
    pub(super) write_ahead: u64,
    pub(crate) rx: Producer<MappedMemory>,
    pub(crate) tx: Consumer<MappedMemory>,
    /// Receive time of the message in each RX slot; kept only where waits are limited.
    pub(super) arrivals: Box<[u64]>,
    /// Messages released by the kernel, as counted, or dropped unread (services without replies).
    pub(super) consumed: u64,
    /// The request that is sampled.
    pub(crate) sampled: Token,
    /// Messages of the completion of a bundle at the front of its TX ring that are done; the others found no room.
    pub(crate) completed: u64,
    /// Time at which its replies were last gathered, or it got a request while it had none; and the number of
    /// requests it then had left.
    pub(super) gathered_ns: u64,
    pub(super) left: u32,
}

impl ServerMqueue {
    /// Whether its oldest unread message has waited longer than this.
    pub(super) fn is_late(&mut self, now_ns: u64, queue_ns_max: u64) -> bool {
        let waits = self.rx.credit().is_ok() && self.rx.released() < self.rx.committed();
        let slot = (self.rx.released() % self.arrivals.len() as u64) as usize;
        waits && now_ns.saturating_sub(self.arrivals[slot]) > queue_ns_max
    }
}

/// The dispatcher's data about a server mqueue; separate from the rest, so that many fit a cache line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Requests in flight.
    pub(super) outstanding: u32,
    pub(crate) alive: bool,
    /// Not alive because its block does not run: an accelerator that has not attached, or is gone.
    pub(crate) absent: bool,
    /// Listed as an mqueue whose RX ring got messages.
    pub(super) rx_pending: bool,
    /// The oldest message in the RX ring has waited longer than the service allows.
    pub(super) late: bool,
    /// Its RX ring refused a message this turn although it has credit: unread messages whose requests have timed out
    /// fill the slots, or long ones the arena. Messages of this length find no room.
    pub(super) full_from: u32,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            outstanding: 0,
            alive: true,
            absent: false,
            rx_pending: false,
            late: false,
            full_from: NOT_FULL,
        }
    }
}

/// Prefetch distance in messages for writing slots of RX rings that another processor reads. Slots of a run are
/// adjacent, and a message takes less time than fetching a remote line.
const WRITE_AHEAD: u64 = 7;

/// Longer than any message.
pub(super) const NOT_FULL: u32 = u32::MAX;

impl Load {
    /// Of an mqueue whose block does not run.
    pub(super) fn absent() -> Self {
        Self { alive: false, absent: true, ..Self::default() }
    }

    /// Whether its RX ring has no room for a message of `len` bytes, as found in this turn.
    pub(super) fn is_full_for(&self, len: usize) -> bool {
        len >= self.full_from as usize
    }
}

/// See [`ServerMqueue::write_ahead`].
pub(super) fn write_ahead(blocks: &dyn Blocks) -> u64 {
    if blocks.runs_off_thread() { WRITE_AHEAD } else { 0 }
}

/// How many mqueues are alive.
pub(super) fn alive(loads: &[Load]) -> u32 {
    loads.iter().filter(|load| load.alive).count() as u32
}

/// An mqueue stands still if it has requests and has answered none of them for this long: its kernel hangs, or is so slow that
/// it does not matter how requests reach it.
const STILL_NS: u64 = 20_000_000;

/// Live mqueues that stand still or whose oldest message waits too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Still {
    pub(super) mqueues: u32,
    /// Requests in flight on them.
    pub(super) requests: u32,
}

impl Still {
    /// Counts them. `since_ns` says for each mqueue when it last answered a request, or got one while it had none.
    pub(super) fn count(since_ns: impl Iterator<Item = u64>, loads: &[Load], now_ns: u64) -> Self {
        let mut still = Self::default();
        for (since_ns, load) in since_ns.zip(loads) {
            let waits = now_ns.saturating_sub(since_ns) > STILL_NS;
            if load.alive && load.outstanding > 0 && (load.late || waits) {
                still.mqueues += 1;
                still.requests += load.outstanding;
            }
        }
        still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mqueues_with_requests_that_answer_none_stand_still() {
        let load = Load { outstanding: 5, ..Load::default() };
        let loads = [
            load,
            Load { outstanding: 7, ..load },
            Load { late: true, ..load },
            // It has none, late or not, or it is dead.
            Load { late: true, ..Load::default() },
            Load { alive: false, ..load },
        ];
        let still = |since_ns: [u64; 5], now_ns| {
            let Still { mqueues, requests } = Still::count(since_ns.into_iter(), &loads, now_ns);
            (mqueues, requests)
        };
        let now_ns = 3 * STILL_NS;
        assert_eq!(still([now_ns; 5], now_ns), (1, 5));
        assert_eq!(still([0, now_ns - STILL_NS, now_ns, 0, 0], now_ns), (2, 10));
        assert_eq!(still([0; 5], now_ns), (3, 17));
        assert_eq!(still([now_ns + 1; 5], now_ns), (1, 5));
    }
}
