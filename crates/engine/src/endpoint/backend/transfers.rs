//! Backends that are no servers: they move bytes between files, peers and the memory of blocks (`crate::base::transfers`).
//!
//! Every command is answered: one that is malformed or not allowed at once, others when the transfer has ended. At most `in_flight` transfers of an
//! mqueue are executed at a time; further commands wait in its ring. What a block that has ended had asked for is cancelled.

use mqueue::abi::{TransferDone, status, transfer_status};
use wire::nic::LentStream;

use super::{Backends, ClientMqueue};
use crate::base::transfers::{TransferOrder, TransferPlace, Transfers, refused};

/// The transfers of one client mqueue.
pub(super) struct BlockTransfers {
    executor: Box<dyn Transfers>,
    asked: Vec<Asked>,
    last: u64,
}

/// A transfer in flight.
struct Asked {
    number: u64,
    /// Of its command.
    tag: u64,
    /// Slot and lease of the socket that it writes to, if it is one of the block.
    socket: Option<(u16, u32)>,
}

/// A command whose sink is a socket of its block: the worker looks for the connection (`endpoint/sockets/lend.rs`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct SocketTransfer {
    pub(crate) client: u32,
    pub(crate) tag: u64,
    pub(crate) order: TransferOrder,
    /// It has waited in its ring until its time was over.
    pub(crate) is_late: bool,
}

/// A transfer to a socket of a block that has ended.
pub(crate) struct EndedTransfer {
    pub(crate) block: u32,
    pub(crate) slot: u16,
    pub(crate) lease: u32,
    pub(crate) done: TransferDone,
}

impl BlockTransfers {
    pub(super) fn new(executor: Box<dyn Transfers>) -> Self {
        Self { executor, asked: Vec::new(), last: 0 }
    }

    /// Starts a transfer, if there is room for one more.
    fn start(&mut self, tag: u64, order: &TransferOrder, socket: Option<LentStream>) -> bool {
        if !self.executor.start(self.last + 1, order, socket) {
            return false;
        }
        self.last += 1;
        let socket = match order.sink {
            TransferPlace::Socket { slot, lease, .. } => Some((slot, lease)),
            _ => None,
        };
        self.asked.push(Asked { number: self.last, tag, socket });
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
                if matches!(order.sink, TransferPlace::Socket { .. }) {
                    return self.to_sockets.push_back(SocketTransfer {
                        client,
                        tag,
                        order,
                        is_late: false,
                    });
                }
                if transfers.start(tag, &order, None) {
                    return self.note_transferring(client);
                }
                transfer_status::EXHAUSTED
            }
        };
        self.answer(client, tag, status::OK, &refused(why).to_bytes());
    }

    /// A command whose time is over in its ring. Whether its sink is a socket: then the worker answers it.
    pub(super) fn refuse_late_transfer(&mut self, client: u32, tag: u64, message: &[u8]) -> bool {
        let entry = &mut self.clients[client as usize];
        let memory_bytes = self.pools[usize::from(entry.backend)].memory_bytes;
        let order = TransferOrder::decode(message, &self.files, memory_bytes);
        let to_socket =
            order.ok().filter(|order| matches!(order.sink, TransferPlace::Socket { .. }));
        let Some(order) = to_socket else { return false };
        entry.in_flight += 1;
        self.to_sockets.push_back(SocketTransfer { client, tag, order, is_late: true });
        true
    }

    /// Whether commands of a block have waited for longer than they may, because it does not read its answers.
    pub(crate) fn is_stuck(&self, block: u32, now_ns: u64) -> bool {
        self.transfers_of(block).any(|client| {
            let entry = &self.clients[client as usize];
            let timeout_ns = self.pools[usize::from(entry.backend)].timeout_ns;
            entry.is_overdue(now_ns, timeout_ns) && entry.has_unread_answers()
        })
    }

    /// Whether commands of a block for transfers wait in its ring, and will be taken.
    pub(crate) fn awaits_transfers(&self, block: u32, now_ns: u64) -> bool {
        let mut clients = self.transfers_of(block);
        clients.any(|client| self.clients[client as usize].is_listed)
            && !self.is_stuck(block, now_ns)
    }

    fn note_transferring(&mut self, client: u32) {
        if !self.transferring.contains(&client) {
            self.transferring.push(client);
        }
    }

    /// Commands whose sinks are sockets, since the last call.
    pub(crate) fn take_socket_transfer(&mut self) -> Option<SocketTransfer> {
        self.to_sockets.pop_front()
    }

    /// Whether there are backends that do transfers.
    pub(crate) fn have_transfers(&self) -> bool {
        self.pools.iter().any(|pool| pool.memory_bytes > 0)
    }

    /// The client mqueues of a block for transfers. What it returns does not borrow from these backends.
    pub(crate) fn transfers_of(&self, block: u32) -> impl Iterator<Item = u32> + use<> {
        let count = self.pools.len() as u32;
        let mut doing = 0u64;
        for (at, pool) in self.pools.iter().enumerate() {
            doing |= u64::from(pool.memory_bytes > 0) << at;
        }
        (0..count).filter(move |at| doing & 1 << at != 0).map(move |at| block * count + at)
    }

    /// A client mqueue, for what its sockets need to know.
    pub(crate) fn client(&self, client: u32) -> &ClientMqueue {
        &self.clients[client as usize]
    }

    /// Whether a command that was asked for at `since_ns` has waited for its socket for too long.
    pub(crate) fn is_overdue(&self, transfer: &SocketTransfer, since_ns: u64, now_ns: u64) -> bool {
        let entry = &self.clients[transfer.client as usize];
        let timeout_ns = self.pools[usize::from(entry.backend)].timeout_ns;
        now_ns.saturating_sub(since_ns) >= timeout_ns
    }

    /// Starts a transfer to this connection, or answers that there are too many. Whether it has started.
    pub(crate) fn start_on_socket(
        &mut self,
        transfer: &SocketTransfer,
        socket: LentStream,
    ) -> bool {
        let SocketTransfer { client, tag, order, .. } = transfer;
        let entry = &mut self.clients[*client as usize];
        let transfers = entry.transfers.as_mut().filter(|_| entry.alive);
        if transfers.is_some_and(|transfers| transfers.start(*tag, order, Some(socket))) {
            self.note_transferring(*client);
            return true;
        }
        self.refuse_on_socket(transfer, transfer_status::EXHAUSTED);
        false
    }

    /// Answers a command whose transfer has not started.
    pub(crate) fn refuse_on_socket(&mut self, transfer: &SocketTransfer, why: u32) {
        let SocketTransfer { client, tag, .. } = *transfer;
        // What a block had asked for that is gone is forgotten.
        if self.clients[client as usize].alive {
            self.answer(client, tag, status::OK, &refused(why).to_bytes());
        }
    }

    /// Transfers to sockets that have ended, since the last call.
    pub(crate) fn take_ended_on_socket(&mut self) -> Option<EndedTransfer> {
        self.ended_on_sockets.pop_front()
    }

    /// Answers the commands whose transfers have ended.
    pub(crate) fn end_transfers(&mut self) {
        for at in (0..self.transferring.len()).rev() {
            let client = self.transferring[at];
            while let Some((Asked { tag, socket, .. }, done)) = self.next_done(client) {
                if let Some((slot, lease)) = socket {
                    let block = self.clients[client as usize].server;
                    self.ended_on_sockets.push_back(EndedTransfer { block, slot, lease, done });
                }
                self.answer(client, tag, status::OK, &done.to_bytes());
            }
            let transfers = &self.clients[client as usize].transfers;
            if transfers.as_ref().is_none_or(|transfers| transfers.asked.is_empty()) {
                self.transferring.swap_remove(at);
            }
        }
    }

    fn next_done(&mut self, client: u32) -> Option<(Asked, TransferDone)> {
        let transfers = self.clients[client as usize].transfers.as_mut()?;
        loop {
            let (number, done) = transfers.executor.next()?;
            let is_it =
                |asked: &Asked| asked.number == number || mutants::on("answer_another_transfer");
            let found = transfers.asked.iter().position(is_it);
            // An executor that repeats itself is not heard twice.
            if let Some(found) = found {
                return Some((transfers.asked.swap_remove(found), done));
            }
        }
    }

    /// Whether transfers are in flight.
    #[inline]
    pub(crate) fn has_transfers(&self) -> bool {
        !self.transferring.is_empty()
    }
}
