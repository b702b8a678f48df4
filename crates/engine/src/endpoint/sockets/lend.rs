//! Connections of blocks to which transfers write: a block sends a file, or its memory, through a socket of its own.
//!
//! The command names a slot, its lease, and how many bytes the block had written to the slot's ring before. The bytes of a connection are then
//! those of the ring up to that position, those of the transfer, and those of the ring behind the position, whatever the worker sees first
//! of the two rings. So a connection with a transfer is in one of two states:
//!
//! | state | who writes | until |
//! |---|---|---|
//! | waits | the worker, up to the position | everything before it was sent; the command's time is over; the connection ends |
//! | lent | the transfer, through another descriptor ([`Nic::lend`]) | it has ended |
//!
//! Meanwhile the worker reads the connection as always, and a block that closes or shuts the socket ends it behind the transfer. The end of the
//! connection ends the transfer: the connection is reset for all descriptors. A transfer that fails when it has written a part ends the
//! connection, because the peer would take what follows for the rest.

use mqueue::abi::transfer_status;
use sockets::{End, State};
use wire::nic::{Close, Nic};

use super::SlotId;
use crate::endpoint::backend::SocketTransfer;
use crate::transfers::TransferPlace;
use crate::turn::Turn;

/// A transfer to a connection.
pub(super) struct Loan {
    transfer: SocketTransfer,
    /// Bytes of the ring that are sent before it.
    position: u64,
    /// It has begun.
    pub(super) is_lent: bool,
    since_ns: u64,
}

impl Loan {
    /// How many more bytes of the ring are sent first.
    pub(super) fn before(&self, sent: u64) -> u64 {
        self.position - sent
    }
}

impl<N: Nic> Turn<N> {
    /// Takes the commands of blocks for transfers to their sockets.
    pub(crate) fn take_socket_transfers(&mut self, service: u16) {
        while let Some(transfer) =
            self.services[usize::from(service)].backends.take_socket_transfer()
        {
            if let Err(why) = self.begin_loan(service, transfer) {
                self.services[usize::from(service)].backends.refuse_on_socket(&transfer, why);
            }
        }
    }

    fn begin_loan(&mut self, service: u16, transfer: SocketTransfer) -> Result<(), u32> {
        let TransferPlace::Socket { slot, lease, position } = transfer.order.sink else {
            return Err(transfer_status::BAD_COMMAND);
        };
        let Self { services, now_ns, .. } = self;
        let share = &mut services[usize::from(service)];
        let block = share.backends.client(transfer.client).server;
        let sockets = share.sockets.as_deref_mut().ok_or(transfer_status::NOT_ALLOWED)?;
        let share = &mut sockets.blocks[block as usize];
        if share.dead || !share.sockets.is_leased_as(slot.into(), lease) {
            return Err(transfer_status::CLOSED);
        }
        let connection = &mut share.connections[usize::from(slot)];
        if connection.shut {
            return Err(transfer_status::CLOSED);
        }
        if connection.loan.is_some() {
            return Err(transfer_status::EXHAUSTED);
        }
        let (sent, written) =
            share.sockets.send_positions(slot.into()).map_err(|_| transfer_status::FAILED)?;
        if !(sent..=written).contains(&position) {
            return Err(transfer_status::RANGE);
        }
        connection.loan = Some(Loan { transfer, position, is_lent: false, since_ns: *now_ns });
        self.list_to_write(SlotId { service, block, slot });
        Ok(())
    }

    /// Everything before a transfer was sent: it begins.
    pub(super) fn lend(&mut self, id: SlotId) {
        let Self { services, nic, .. } = self;
        let share = &mut services[usize::from(id.service)];
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        let Some(loan) = &mut connection.loan else { return };
        let started = match nic.lend(connection.key) {
            Some(socket) => share.backends.start_on_socket(&loan.transfer, socket),
            None => {
                share.backends.refuse_on_socket(&loan.transfer, transfer_status::EXHAUSTED);
                false
            }
        };
        loan.is_lent = started;
        if !started {
            self.end_loan(id);
        }
        self.busy();
    }

    /// The worker writes to a connection again.
    fn end_loan(&mut self, id: SlotId) {
        let deadline_ns = self.now_ns + self.slow_client_ns;
        let now_ns = self.now_ns;
        let Some(sockets) = self.sockets(id.service) else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        connection.loan = None;
        // Events were not heeded meanwhile.
        (connection.writable, connection.active_ns) = (true, now_ns);
        connection.deadline_ns = deadline_ns;
        self.list_to_write(id);
    }

    /// The connection of a slot ends, and what it was to carry with it. A transfer that has begun ends by itself.
    pub(super) fn cancel_loan(&mut self, id: SlotId, why: u32) {
        let share = &mut self.services[usize::from(id.service)];
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        if let Some(loan) = connection.loan.take_if(|loan| !loan.is_lent) {
            share.backends.refuse_on_socket(&loan.transfer, why);
        }
    }

    /// Gives up a transfer that has waited for its connection for too long. Whether there was one.
    pub(super) fn expire_loan(&mut self, id: SlotId) {
        let now_ns = self.now_ns;
        let share = &mut self.services[usize::from(id.service)];
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        let Some(loan) = connection.loan.as_ref().filter(|loan| !loan.is_lent) else { return };
        if share.backends.is_overdue(&loan.transfer, loan.since_ns, now_ns) {
            let writable = connection.writable;
            self.cancel_loan(id, transfer_status::TIMEOUT);
            self.end_loan(id);
            if let Some(sockets) = self.sockets(id.service) {
                let block = &mut sockets.blocks[id.block as usize];
                block.connections[usize::from(id.slot)].writable = writable;
            }
        }
    }

    /// Takes connections back whose transfers have ended.
    pub(super) fn end_loans(&mut self, service: u16) {
        while let Some(ended) = self.services[usize::from(service)].backends.take_ended_on_socket()
        {
            let id = SlotId { service, block: ended.block, slot: ended.slot };
            let Some(sockets) = self.sockets(service) else { return };
            let share = &sockets.blocks[ended.block as usize];
            let slot = u32::from(ended.slot);
            if !share.sockets.is_leased_as(slot, ended.lease)
                || share.connections[usize::from(ended.slot)].loan.is_none()
            {
                continue;
            }
            let frees = share.sockets.slots()[slot as usize].state() == State::Closing;
            self.end_loan(id);
            if ended.done.status != transfer_status::OK && ended.done.written > 0 {
                self.end_socket(id, End::TransferFailed, Close::Reset, frees);
            }
        }
    }
}
