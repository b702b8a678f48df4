//! Backends that are no servers: they move bytes between files, peers and the memory of blocks (`crate::transfers`).
//!
//! Every command is answered: one that is malformed or not allowed at once, others when the transfer has ended. At most `in_flight` transfers of an
//! mqueue are executed at a time; further commands wait in its ring. What a block that has ended had asked for is cancelled.

use mqueue::abi::{status, transfer_status};

use super::Backends;
use crate::transfers::{TransferOrder, Transfers, refused};

/// The transfers of one client mqueue.
pub(super) struct BlockTransfers {
    executor: Box<dyn Transfers>,
    /// Those in flight: their numbers, and the tags of their commands.
    asked: Vec<(u64, u64)>,
    last: u64,
}

impl BlockTransfers {
    pub(super) fn new(executor: Box<dyn Transfers>) -> Self {
        Self { executor, asked: Vec::new(), last: 0 }
    }

    /// Starts a transfer, if there is room for one more.
    fn start(&mut self, tag: u64, order: &TransferOrder) -> bool {
        if !self.executor.start(self.last + 1, order) {
            return false;
        }
        self.last += 1;
        self.asked.push((self.last, tag));
        true
    }
}

impl Backends {
    /// Starts the transfer that a block asks for, or answers why not.
    pub(super) fn take_transfer(&mut self, client: u32, tag: u64, message: &[u8]) {
        let Self { clients, pools, files, counters, .. } = self;
        let entry = &mut clients[client as usize];
        let pool = &pools[usize::from(entry.backend)];
        counters.backend_sent.one();
        entry.in_flight += 1;
        let order = TransferOrder::decode(message, files, pool.memory_bytes);
        let why = match (order, &mut entry.transfers) {
            (Err(status), _) => status,
            // The blocks run where no transfer reaches their memory.
            (Ok(_), None) => transfer_status::NOT_ALLOWED,
            (Ok(order), Some(transfers)) => {
                transfers.asked.reserve(pool.in_flight_max.saturating_sub(transfers.asked.len()));
                if transfers.start(tag, &order) {
                    if !self.transferring.contains(&client) {
                        self.transferring.push(client);
                    }
                    return;
                }
                transfer_status::EXHAUSTED
            }
        };
        self.answer(client, tag, status::OK, &refused(why).to_bytes());
    }

    /// Answers the commands whose transfers have ended.
    pub(crate) fn end_transfers(&mut self) {
        for at in (0..self.transferring.len()).rev() {
            let client = self.transferring[at];
            while let Some((tag, done)) = self.next_done(client) {
                self.answer(client, tag, status::OK, &done.to_bytes());
            }
            let transfers = &self.clients[client as usize].transfers;
            if transfers.as_ref().is_none_or(|transfers| transfers.asked.is_empty()) {
                self.transferring.swap_remove(at);
            }
        }
    }

    fn next_done(&mut self, client: u32) -> Option<(u64, mqueue::abi::TransferDone)> {
        let transfers = self.clients[client as usize].transfers.as_mut()?;
        loop {
            let (number, done) = transfers.executor.next()?;
            let is_it = |(asked, _): &(u64, u64)| {
                *asked == number || mutants::on("answer_another_transfer")
            };
            let found = transfers.asked.iter().position(is_it);
            // An executor that repeats itself is not heard twice.
            if let Some(found) = found {
                return Some((transfers.asked.swap_remove(found).1, done));
            }
        }
    }

    /// Whether transfers are in flight.
    #[inline]
    pub(crate) fn has_transfers(&self) -> bool {
        !self.transferring.is_empty()
    }
}
