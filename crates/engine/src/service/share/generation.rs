//! Generations of a service share's accelerators: their blocks end, get new rings, and run again.

use wire::DropReason;

use crate::service::bundle::pool_memory::memory_of;
use crate::service::ends::{Attachment, BlockEnds, OtherEnds, share_mqueues};
use crate::service::mqueues::{Load, write_ahead};
use crate::service::share::{AcceleratorShare, ServiceShare};

impl ServiceShare {
    /// The accelerator's blocks do not run any more. Its requests have been ended, so nothing of this generation is
    /// in flight.
    pub(crate) fn detach_accelerator(&mut self, accelerator: usize) {
        let mqueues = self.mqueues_of(accelerator);
        for mqueue in mqueues {
            self.loads[mqueue as usize] = Load::absent();
        }
        self.count_living();
        self.accelerators[accelerator].rx_pending.clear();
        self.forget_bundles(accelerator);
        self.unsample_ended();
    }

    /// Replaces the rings of an accelerator with those of its next generation.
    /// Returns the ends of those that are not the share's.
    pub(crate) fn replace_rings(
        &mut self,
        accelerator: usize,
        attachment: Attachment,
    ) -> Vec<OtherEnds> {
        let mqueues = self.mqueues_of(accelerator);
        let Attachment { blocks, ends, pool } = attachment;
        assert_eq!(ends.len(), mqueues.len(), "every generation has the same blocks");
        let table = share_mqueues(&ends, mqueues.start);
        let mut others = Vec::with_capacity(ends.len());
        for (mqueue, ends) in mqueues.zip(ends) {
            let entry = &mut self.mqueues[mqueue as usize];
            assert_eq!(entry.block, ends.block, "every generation has the same blocks");
            entry.tx_corrupt = false;
            entry.write_ahead = write_ahead(&*blocks);
            entry.consumed = ends.server.rx.released();
            entry.region_mqueue = ends.server.mqueue;
            (entry.rx, entry.tx) = (ends.server.rx, ends.server.tx);
            entry.left = 0;
            let BlockEnds { clients, sockets, .. } = ends;
            others.push(OtherEnds::new(mqueue, clients, sockets));
        }
        let drive = &mut self.accelerators[accelerator];
        drive.blocks = blocks;
        (drive.pool_memory, drive.pool) = (memory_of(pool.as_deref()), pool);
        drive.share_mqueues = table;
        drive.rx_pending.clear();
        others
    }

    /// The blocks of an accelerator run: its mqueues take requests.
    pub(crate) fn mark_present(&mut self, accelerator: usize) {
        self.dispatcher.set_absent_reason(DropReason::NoAccelerator);
        for mqueue in self.mqueues_of(accelerator) {
            self.loads[mqueue as usize] = Load::default();
        }
        self.count_living();
        let AcceleratorShare { blocks, pool, .. } = &mut self.accelerators[accelerator];
        if !blocks.takes_bundles() {
            // Nothing of this generation is in flight.
            *pool = None;
        }
        self.bundles.set_possible(self.accelerators.iter().any(|a| a.pool.is_some()));
    }
}
