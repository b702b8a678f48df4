//! A service share that leaves or is paused: see `control/drain.rs` and `control/pause.rs`.

use crate::service::share::ServiceShare;
use crate::service::vote::{PAUSE_NS, Pause};

impl ServiceShare {
    /// Whether the slot is free.
    pub(crate) fn is_vacant(&self) -> bool {
        self.accelerators.is_empty() && !self.is_proxy()
    }

    /// Whether it leaves and has not voted. Such shares are checked once a millisecond.
    pub(crate) fn is_leaving_busy(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| !leaving.vote.is_given())
    }

    /// Revokes its votes, because it took over a message from another worker.
    pub(crate) fn revoke_votes(&mut self) {
        let leaving = self.leaving.iter_mut().map(|leaving| &mut leaving.vote);
        for vote in leaving.chain(self.pauses.iter_mut().map(|pause| &mut pause.vote)) {
            vote.set(false);
        }
    }

    /// Whether it takes no new requests.
    #[inline]
    pub(crate) fn is_paused(&self) -> bool {
        !self.pauses.is_empty()
    }

    /// Whether it is paused for the accelerator of this block, whose generation is about to end.
    pub(crate) fn is_block_paused(&self, block: u32) -> bool {
        let of_block = self.mqueues.get(block as usize).map(|mqueue| mqueue.attachment);
        self.pauses.iter().any(|pause| Some(pause.accelerator) == of_block)
    }

    /// The generation of an accelerator has ended: the time limit for the next one starts.
    pub(crate) fn await_next_generation(&mut self, accelerator: u16, now_ns: u64) {
        let of_it = |pause: &&mut Pause| pause.accelerator == accelerator && pause.has_begun();
        for pause in self.pauses.iter_mut().filter(of_it) {
            pause.until_ns = Some(now_ns + PAUSE_NS);
        }
    }
}
