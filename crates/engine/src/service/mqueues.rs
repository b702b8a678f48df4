//! Server mqueues of one worker, and what the dispatcher wants to know of each.

use mqueue::{Consumer, MappedMemory, Producer};
use wire::session::Token;

use crate::accelerator::Blocks;

/// A server mqueue of this worker.
pub(crate) struct ServerMqueue {
    pub(crate) attachment: u16,
    pub(crate) block: u32,
    /// Its number in the region.
    pub(super) region_mqueue: u32,
    /// The accelerator wrote impossible ring words; housekeeping buries the mqueue.
    pub(crate) tx_corrupt: bool,
    /// Listed in [`ServiceShare::blocked`].
    pub(crate) is_blocked: bool,
    /// How many messages ahead slots of its RX ring are fetched for writing.
    pub(super) write_ahead: u64,
    pub(crate) rx: Producer<MappedMemory>,
    pub(crate) tx: Consumer<MappedMemory>,
    /// When the message in each RX slot was received; kept only where waits are limited.
    pub(super) arrivals: Box<[u64]>,
    /// Messages released by the kernel, as counted, or given up unread (services without replies).
    pub(super) consumed: u64,
    /// The request whose way is being measured.
    pub(crate) sampled: Token,
    /// When its replies were last gathered, or it got a request while it had none; how many it then had left.
    pub(super) gathered_ns: u64,
    pub(super) left: u32,
}

impl ServerMqueue {
    /// Whether its oldest unread message waits for longer than this.
    pub(super) fn is_late(&mut self, now_ns: u64, queue_ns_max: u64) -> bool {
        let waits = self.rx.credit().is_ok() && self.rx.released() < self.rx.committed();
        let slot = (self.rx.released() % self.arrivals.len() as u64) as usize;
        waits && now_ns.saturating_sub(self.arrivals[slot]) > queue_ns_max
    }
}

/// What the dispatcher wants to know of a server mqueue; apart from the rest, so that many fit a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Requests under way.
    pub(super) outstanding: u32,
    pub(crate) alive: bool,
    /// Not alive because nobody runs its block: an accelerator that has not attached, or is gone.
    pub(crate) absent: bool,
    /// In the attachment's list of mqueues whose RX ring got messages.
    pub(super) rx_pending: bool,
    /// The oldest message in the RX ring waits longer than the service allows.
    pub(super) late: bool,
    /// Its RX ring refused a message this turn although it has credit: unread messages whose requests
    /// have timed out fill the slots, or long ones the arena. What is this long finds no room.
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

/// How many messages ahead slots of RX rings are fetched for writing where another processor reads them. Those of a run lie
/// one behind the other, and a message takes less than a line that was far away.
const WRITE_AHEAD: u64 = 7;

/// No message is this long.
pub(super) const NOT_FULL: u32 = u32::MAX;

impl Load {
    /// Of an mqueue whose block nobody runs.
    pub(super) fn absent() -> Self {
        Self { alive: false, absent: true, ..Self::default() }
    }

    /// Whether its RX ring has no room for a message of `len` bytes, as found out this turn.
    pub(super) fn is_full_for(&self, len: usize) -> bool {
        len >= self.full_from as usize
    }
}

/// See [`ServerMqueue::write_ahead`].
pub(super) fn write_ahead(blocks: &dyn Blocks) -> u64 {
    if blocks.elsewhere() { WRITE_AHEAD } else { 0 }
}

/// How many mqueues are alive.
pub(super) fn alive(loads: &[Load]) -> u32 {
    loads.iter().filter(|load| load.alive).count() as u32
}
