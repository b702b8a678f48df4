//! Loans: transfers write to connections of blocks.
//!
//! A loan names a slot, its lease, and how many bytes the block had written to the slot's ring before
//! it asked. The bytes of a connection are then those of the ring up to that position, those of the
//! transfer, and those of the ring behind the position. A worker that sees bytes behind the position
//! sees the command as well if it looks for it after them: a block publishes them in this order. So
//! the worker notes what is in the rings ([`KernelSockets::note_written`]), takes the commands of the
//! blocks, and sends what it has noted; it sends nothing while a command waits in its ring. What is
//! listed after it looked is sent in the next turn.
//!
//! A connection with a loan is in one of two states:
//!
//! | state | who writes | until |
//! |---|---|---|
//! | waits | the worker, up to the position | everything before it was sent; the loan is given up; the connection ends |
//! | lent | the transfer, through another descriptor ([`Nic::lend`]) | it is given back |
//!
//! Further loans of it wait behind that one. Meanwhile the worker reads the connection as always, and
//! a block that closes or shuts the socket ends it behind the transfers. The end of the connection
//! ends the transfer: the connection is reset for all descriptors. A transfer that fails resets the
//! connection: what the block sends behind it may be in the ring already, and the peer would take it
//! for the rest. A loan that is refused at once leaves the connection alone.

use std::collections::VecDeque;

use mqueue::BrokenRing;
use mqueue::abi::transfer_status;
use sockets::{End, State};
use wire::nic::{Close, LentStream, Nic};

use super::drain::Spoke;
use super::{BlockShare, KernelSockets};
use crate::base::keys::SlotId;
use crate::base::turn::Turn;

/// A transfer to a connection.
struct Loan {
    /// Chosen by the borrower.
    number: u64,
    /// Bytes of the ring that are sent before it.
    position: u64,
    /// It has begun.
    is_lent: bool,
    /// When it was asked for, or became the first.
    since_ns: u64,
}

/// The transfers to one connection, in their order.
#[derive(Default)]
pub(super) struct Loans(VecDeque<Loan>);

impl Loans {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// How far a loan has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoanState {
    /// Others come before it, or bytes of the ring. `first_since_ns`: since when it is the first.
    Waits { first_since_ns: Option<u64> },
    /// Everything before it was sent: it can begin.
    Ready,
    /// It has begun.
    Lent,
    /// The connection has ended.
    Gone,
}

/// Commands of a block for loans that are in its ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unread {
    #[default]
    None,
    /// They will be taken.
    Waiting,
    /// The block does not read its answers, so they may never be.
    Stuck,
}

impl KernelSockets {
    /// Notes what the blocks have written to the connections that are to be sent. Commands that a
    /// block published before that are seen by a caller that looks from now on.
    pub(crate) fn note_written(&mut self) {
        let Self { by_slot, lists } = self;
        for id in &lists.to_write {
            let Some(sockets) = super::of(by_slot, id.service) else { continue };
            let block = &mut sockets.blocks[id.block as usize];
            let slot = u32::from(id.slot);
            let state = block.sockets.slots()[slot as usize].state();
            if !matches!(state, State::Open | State::Closing) {
                continue;
            }
            // In this order: what was written before the end is in the ring.
            let is_shut = state == State::Closing || block.sockets.is_shut(slot);
            // A broken ring is found when its bytes are read.
            let Ok((_, written)) = block.sockets.send_positions(slot) else { continue };
            block.connections[usize::from(id.slot)].noted = Some(Noted { written, is_shut });
        }
    }

    /// The blocks whose connections are to be sent, with repetitions, by place in the list.
    pub(crate) fn writing(&self, at: usize) -> Option<(u16, u32)> {
        self.lists.to_write.get(at).map(|id| (id.service, id.block))
    }

    /// Whether commands of a block for loans wait in its ring.
    pub(crate) fn set_unread(&mut self, service: u16, block: u32, unread: Unread) {
        if let Some(block) = self.of(service).and_then(|of| of.blocks.get_mut(block as usize)) {
            (block.unread, block.has_borrower) = (unread, true);
        }
    }

    /// Asks for a loan of a slot's connection, behind this position of what its block writes.
    pub(crate) fn lend<N: Nic>(
        &mut self,
        turn: &Turn<N>,
        id: SlotId,
        lease: u32,
        (position, number): (u64, u64),
    ) -> Result<(), u32> {
        let sockets = self.of(id.service).ok_or(transfer_status::NOT_ALLOWED)?;
        let share = &mut sockets.blocks[id.block as usize];
        if share.dead || !share.sockets.is_leased_as(id.slot.into(), lease) {
            return Err(transfer_status::CLOSED);
        }
        let connection = &mut share.connections[usize::from(id.slot)];
        if connection.shut {
            return Err(transfer_status::CLOSED);
        }
        if connection.is_local {
            // Its peer could take a part for the whole.
            return Err(transfer_status::NOT_ALLOWED);
        }
        let (sent, written) =
            share.sockets.send_positions(id.slot.into()).map_err(|_| transfer_status::FAILED)?;
        let first = connection.loans.0.back().map_or(sent, |last| last.position);
        if !(first..=written).contains(&position) {
            return Err(transfer_status::RANGE);
        }
        let since_ns = turn.now_ns;
        connection.loans.0.push_back(Loan { number, position, is_lent: false, since_ns });
        self.list_to_write(id);
        Ok(())
    }

    /// How far a loan has got.
    pub(crate) fn loan(&mut self, id: SlotId, lease: u32, number: u64) -> LoanState {
        let Some(block) = self.leased(id, lease) else { return LoanState::Gone };
        let sent = block.sockets.send_positions(id.slot.into()).map(|(sent, _)| sent);
        let loans = &block.connections[usize::from(id.slot)].loans.0;
        match loans.iter().position(|loan| loan.number == number) {
            None => LoanState::Gone,
            Some(0) if loans[0].is_lent => LoanState::Lent,
            Some(0) if sent.is_ok_and(|sent| sent == loans[0].position) => LoanState::Ready,
            Some(0) => LoanState::Waits { first_since_ns: Some(loans[0].since_ns) },
            Some(_) => LoanState::Waits { first_since_ns: None },
        }
    }

    /// Begins the first loan of a connection, which is [ready](LoanState::Ready). `None`: no
    /// descriptor is free.
    pub(crate) fn begin_loan<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        id: SlotId,
    ) -> Option<LentStream> {
        let sockets = self.of(id.service)?;
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        let lent = turn.nic.lend(connection.key)?;
        connection.loans.0.front_mut()?.is_lent = true;
        turn.busy();
        Some(lent)
    }

    /// The transfer of the first loan has ended: the next one, or the worker, writes.
    pub(crate) fn give_back<N: Nic>(
        &mut self,
        turn: &Turn<N>,
        id: SlotId,
        (lease, number): (u32, u64),
    ) {
        let (now_ns, deadline_ns) = (turn.now_ns, turn.now_ns + turn.slow_client_ns);
        let Some(block) = self.leased(id, lease) else { return };
        let connection = &mut block.connections[usize::from(id.slot)];
        let first = connection.loans.0.front();
        if !first.is_some_and(|loan| loan.is_lent && loan.number == number) {
            return;
        }
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

    /// A loan has failed, or its command is lost: the connection is reset.
    pub(crate) fn break_loan<N: Nic>(&mut self, turn: &mut Turn<N>, id: SlotId, lease: u32) {
        let Some(block) = self.leased(id, lease) else { return };
        let state = block.sockets.slots()[usize::from(id.slot)].state();
        self.end_socket(turn, id, End::TransferFailed, Close::Reset, state == State::Closing);
    }

    /// The block of a slot, if the slot has this lease.
    fn leased(&mut self, id: SlotId, lease: u32) -> Option<&mut BlockShare> {
        let block = self.block_of(id)?;
        block.sockets.is_leased_as(id.slot.into(), lease).then_some(block)
    }

    /// How many bytes of a connection's ring may be sent now; `None`: it is left alone now.
    pub(super) fn sendable<N: Nic>(
        &mut self,
        turn: &Turn<N>,
        id: SlotId,
        noted: Option<Noted>,
    ) -> Result<Option<usize>, BrokenRing> {
        let Some(block) = self.block_of(id) else { return Ok(None) };
        let slot = u32::from(id.slot);
        if !matches!(block.sockets.slots()[slot as usize].state(), State::Open | State::Closing) {
            return Ok(None);
        }
        let (sent, written) = block.sockets.send_positions(slot)?;
        let keeps_order = !mutants::on("overtake_command");
        let is_unknown = block.has_borrower && noted.is_none() && keeps_order;
        let written = noted.map_or(written, |noted| noted.written.max(sent));
        let is_behind = block.unread != Unread::None && keeps_order;
        let most = match block.connections[usize::from(id.slot)].loans.0.front() {
            Some(loan) if loan.is_lent && !mutants::on("write_while_lent") => return Ok(None),
            // Listed since the worker looked: a command may have come before what is in the ring now.
            _ if is_unknown => {
                self.list_to_write(id);
                return Ok(None);
            }
            Some(loan) if !loan.is_lent => written.min(loan.position),
            None if is_behind => {
                self.hold(turn, id);
                return Ok(None);
            }
            _ => written,
        };
        Ok(Some((most - sent) as usize))
    }

    /// A connection waits for commands of its block to be taken. Its own limits of time begin again,
    /// unless the block does not read its answers.
    fn hold<N: Nic>(&mut self, turn: &Turn<N>, id: SlotId) {
        let (now_ns, deadline_ns) = (turn.now_ns, turn.now_ns + turn.slow_client_ns);
        if let Some(block) = self.block_of(id).filter(|block| block.unread != Unread::Stuck) {
            let connection = &mut block.connections[usize::from(id.slot)];
            (connection.active_ns, connection.deadline_ns) = (now_ns, deadline_ns);
        }
        self.list_to_write(id);
    }
}

/// What a block had written to a connection when the worker looked, before it took commands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noted {
    written: u64,
    /// It writes nothing more.
    pub(super) is_shut: bool,
}
