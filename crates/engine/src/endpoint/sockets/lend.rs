//! Connections of blocks to which transfers write: a block sends a file, or its memory, through a socket of its own.
//!
//! The command names a slot, its lease, and how many bytes the block had written to the slot's ring before. The bytes of a connection are then
//! those of the ring up to that position, those of the transfer, and those of the ring behind the position. A worker that sees bytes behind the
//! position sees the command, too, if it looks for it after them: a block publishes them in this order. So it takes the commands of the block
//! before it sends bytes that it has seen, and sends none while a command waits in its ring ([`Turn::sendable`]).
//!
//! A connection with a transfer is in one of two states:
//!
//! | state | who writes | until |
//! |---|---|---|
//! | waits | the worker, up to the position | everything before it was sent; the command's time is over; the connection ends |
//! | lent | the transfer, through another descriptor ([`Nic::lend`]) | it has ended |
//!
//! Further transfers to it wait behind that one. Meanwhile the worker reads the connection as always, and a block that closes or shuts the socket
//! ends it behind the transfers. The end of the connection ends the transfer: the connection is reset for all descriptors. A transfer that
//! fails resets the connection: what the block sends behind it may be in the ring already, and the peer would take it for the rest. A command that is
//! refused at once leaves the connection alone.

use std::collections::VecDeque;

use mqueue::BrokenRing;
use mqueue::abi::transfer_status;
use sockets::{End, State};
use wire::nic::{Close, Nic};

use super::BlockShare;
use super::drain::Spoke;
use crate::base::keys::SlotId;
use crate::base::transfers::TransferPlace;
use crate::depart::take_backend_requests;
use crate::endpoint::backend::SocketTransfer;
use crate::service::share::ServiceShare;
use crate::turn::Turn;

/// A transfer to a connection.
pub(super) struct Loan {
    transfer: SocketTransfer,
    /// Bytes of the ring that are sent before it.
    position: u64,
    /// It has begun.
    is_lent: bool,
    since_ns: u64,
}

/// The transfers to one connection, in their order.
#[derive(Default)]
pub(super) struct Loans(VecDeque<Loan>);

impl Loans {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those that have not begun.
    fn waiting(&self) -> impl Iterator<Item = &Loan> {
        self.0.iter().filter(|loan| !loan.is_lent)
    }
}

impl<N: Nic> Turn<N> {
    /// Takes the commands of blocks for transfers to their sockets.
    pub(crate) fn take_socket_transfers(&mut self, service: u16) {
        while let Some(transfer) =
            self.services[usize::from(service)].backends.take_socket_transfer()
        {
            if transfer.is_late {
                self.refuse_late(service, transfer);
            } else if let Err(why) = self.begin_loan(service, transfer) {
                self.services[usize::from(service)].backends.refuse_on_socket(&transfer, why);
            }
        }
    }

    /// A command waited in its ring until its time was over: what the block has sent behind it must not go out.
    fn refuse_late(&mut self, service: u16, transfer: SocketTransfer) {
        let share = &mut self.services[usize::from(service)];
        let block = share.backends.client(transfer.client).server;
        share.backends.refuse_on_socket(&transfer, transfer_status::TIMEOUT);
        let TransferPlace::Socket { slot, lease, .. } = transfer.order.sink else { return };
        let id = SlotId { service, block, slot };
        let is_its = |block: &mut BlockShare| block.sockets.is_leased_as(slot.into(), lease);
        if share.block_of(id).is_some_and(is_its) {
            self.fail_loan(id);
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
        if connection.is_local {
            // Its peer could take a part for the whole.
            return Err(transfer_status::NOT_ALLOWED);
        }
        let (sent, written) =
            share.sockets.send_positions(slot.into()).map_err(|_| transfer_status::FAILED)?;
        let first = connection.loans.0.back().map_or(sent, |last| last.position);
        if !(first..=written).contains(&position) {
            return Err(transfer_status::RANGE);
        }
        let loan = Loan { transfer, position, is_lent: false, since_ns: *now_ns };
        connection.loans.0.push_back(loan);
        self.list_to_write(SlotId { service, block, slot });
        Ok(())
    }

    /// How many bytes of a connection's ring may be sent now; `None`: it is left alone now.
    pub(super) fn sendable(&mut self, id: SlotId) -> Result<Option<usize>, BrokenRing> {
        let share = &mut self.services[usize::from(id.service)];
        if !share.backends.have_transfers() {
            return Ok(Some(usize::MAX));
        }
        let Some(block) = share.block_of(id) else { return Ok(None) };
        let slot = u32::from(id.slot);
        if !matches!(block.sockets.slots()[slot as usize].state(), State::Open | State::Closing) {
            return Ok(None);
        }
        let (sent, written) = block.sockets.send_positions(slot)?;
        let is_behind = !mutants::on("overtake_command") && self.take_transfers_of(id);
        let Some(block) = self.services[usize::from(id.service)].block_of(id) else {
            return Ok(None);
        };
        let most = match block.connections[usize::from(id.slot)].loans.0.front() {
            Some(loan) if loan.is_lent && !mutants::on("write_while_lent") => return Ok(None),
            Some(loan) if !loan.is_lent && loan.position == sent => {
                self.lend(id);
                return Ok(None);
            }
            Some(loan) if !loan.is_lent => written.min(loan.position),
            None if is_behind => {
                self.hold(id);
                return Ok(None);
            }
            _ => written,
        };
        Ok(Some((most - sent) as usize))
    }

    /// A connection waits for commands of its block to be taken. Its own limits of time begin again, unless the block does not read its answers.
    fn hold(&mut self, id: SlotId) {
        let (now_ns, deadline_ns) = (self.now_ns, self.now_ns + self.slow_client_ns);
        let share = &mut self.services[usize::from(id.service)];
        let is_stuck = share.backends.is_stuck(id.block, now_ns);
        if let Some(block) = share.block_of(id).filter(|_| !is_stuck) {
            let connection = &mut block.connections[usize::from(id.slot)];
            (connection.active_ns, connection.deadline_ns) = (now_ns, deadline_ns);
        }
        self.list_to_write(id);
    }

    /// Whether commands of a block for transfers wait to be taken: nothing tells yet to which connection they are.
    pub(super) fn awaits_transfers(&self, service: u16, block: u32) -> bool {
        self.services[usize::from(service)].backends.awaits_transfers(block, self.now_ns)
    }

    /// Takes what a block has asked of transfers by now. Whether some of it waits in a ring.
    fn take_transfers_of(&mut self, id: SlotId) -> bool {
        let mut waits = false;
        for client in self.services[usize::from(id.service)].backends.transfers_of(id.block) {
            take_backend_requests(self, id.service.into(), client);
            waits |= self.services[usize::from(id.service)].backends.client(client).is_listed;
        }
        waits
    }

    /// Everything before the first transfer of a connection was sent: it begins.
    fn lend(&mut self, id: SlotId) {
        let Self { services, nic, .. } = self;
        let share = &mut services[usize::from(id.service)];
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        let Some(loan) = connection.loans.0.front_mut() else { return };
        match nic.lend(connection.key) {
            Some(socket) => {
                loan.is_lent = share.backends.start_on_socket(&loan.transfer, socket);
            }
            None => share.backends.refuse_on_socket(&loan.transfer, transfer_status::EXHAUSTED),
        }
        if !loan.is_lent {
            // Its command has an answer.
            connection.loans.0.pop_front();
            self.fail_loan(id);
        }
        self.busy();
    }

    /// A transfer to a connection has ended, and the next one, or the worker, writes.
    fn end_loan(&mut self, id: SlotId) {
        let (now_ns, deadline_ns) = (self.now_ns, self.now_ns + self.slow_client_ns);
        let Some(block) = self.services[usize::from(id.service)].block_of(id) else { return };
        let connection = &mut block.connections[usize::from(id.slot)];
        connection.loans.0.pop_front();
        if let Some(next) = connection.loans.0.front_mut() {
            next.since_ns = now_ns;
        }
        // Events were passed over meanwhile.
        (connection.writable, connection.active_ns) = (true, now_ns);
        connection.spoke = Spoke::Block;
        connection.deadline_ns = deadline_ns;
        self.list_to_write(id);
    }

    /// A transfer to a connection has failed, and its command has an answer.
    fn fail_loan(&mut self, id: SlotId) {
        let Some(block) = self.services[usize::from(id.service)].block_of(id) else { return };
        let state = block.sockets.slots()[usize::from(id.slot)].state();
        self.end_socket(id, End::TransferFailed, Close::Reset, state == State::Closing);
    }

    /// The connection of a slot ends, and what it was to carry with it. A transfer that has begun ends by itself.
    pub(super) fn cancel_loans(&mut self, id: SlotId, why: u32) {
        let share = &mut self.services[usize::from(id.service)];
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        let loans = std::mem::take(&mut connection.loans);
        for loan in loans.waiting() {
            share.backends.refuse_on_socket(&loan.transfer, why);
        }
    }

    /// Gives up the first transfer of a connection, if it has waited for too long for the bytes before it to be sent.
    pub(super) fn expire_loans(&mut self, id: SlotId) {
        let now_ns = self.now_ns;
        let share = &mut self.services[usize::from(id.service)];
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let connection = &sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        let is_late = |loan: &Loan| {
            !loan.is_lent && share.backends.is_overdue(&loan.transfer, loan.since_ns, now_ns)
        };
        if connection.loans.0.front().is_some_and(is_late) {
            self.cancel_loans(id, transfer_status::TIMEOUT);
            self.fail_loan(id);
        }
    }

    /// Takes connections back whose transfers have ended.
    pub(super) fn end_loans(&mut self, service: u16) {
        while let Some(ended) = self.services[usize::from(service)].backends.take_ended_on_socket()
        {
            let id = SlotId { service, block: ended.block, slot: ended.slot };
            let Some(block) = self.services[usize::from(service)].block_of(id) else { return };
            let is_its = block.sockets.is_leased_as(ended.slot.into(), ended.lease);
            let first = block.connections[usize::from(ended.slot)].loans.0.front();
            if !is_its || !first.is_some_and(|loan| loan.is_lent) {
                continue;
            }
            match ended.done.status {
                transfer_status::OK => self.end_loan(id),
                _ => self.fail_loan(id),
            }
        }
    }
}

impl ServiceShare {
    /// The block of a slot.
    pub(super) fn block_of(&mut self, id: SlotId) -> Option<&mut BlockShare> {
        self.sockets.as_deref_mut()?.blocks.get_mut(id.block as usize)
    }
}
