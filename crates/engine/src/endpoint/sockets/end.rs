//! The ends of connections, and the lists of slots with something to do.

use std::ops::Range;

use mqueue::abi::status;
use sockets::{End, State};
use wire::nic::{Close, Nic};

use super::lend::Loans;
use super::{KernelSockets, of};
use crate::base::keys::SlotId;
use crate::base::turn::Turn;

impl KernelSockets {
    pub(super) fn list_to_read(&mut self, id: SlotId) {
        let Self { by_slot, lists } = self;
        let Some(sockets) = of(by_slot, id.service) else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        if !std::mem::replace(&mut connection.listed_to_read, true) {
            lists.to_read.push(id);
        }
    }

    pub(super) fn list_to_write(&mut self, id: SlotId) {
        let Self { by_slot, lists } = self;
        let Some(sockets) = of(by_slot, id.service) else { return };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        if !std::mem::replace(&mut connection.listed_to_write, true) {
            lists.to_write.push(id);
        }
    }

    /// Ends the connection of a slot. The block keeps the slot until it closes it, unless it has done so or `frees`.
    pub(super) fn end_socket<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        id: SlotId,
        end: End,
        how: Close,
        frees: bool,
    ) {
        let Turn { nic, .. } = turn;
        let Some(sockets) = self.of(id.service) else {
            return;
        };
        let block = &mut sockets.blocks[id.block as usize];
        let slot = u32::from(id.slot);
        // A transfer that has begun ends by itself.
        block.connections[usize::from(id.slot)].loans = Loans::default();
        let state = block.sockets.slots()[slot as usize].state();
        if state == State::Free {
            return;
        }
        if state != State::Dead {
            nic.close(block.connections[usize::from(id.slot)].key, how);
            sockets.counters.socket_ends[end as usize].add(1);
            let was_open = !matches!(state, State::Connecting { .. });
            sockets.counters.sockets_closed.add(was_open.into());
        }
        match state {
            State::Open if !frees => block.sockets.end(slot, status_of(end)),
            State::Connecting { token } if !frees => {
                let status = match end {
                    End::ConnectTimeout => status::TIMEOUT,
                    End::DrainTimeout => status::DRAINING,
                    End::NoDescriptor => status::EXHAUSTED,
                    _ => status::REFUSED,
                };
                block.sockets.refuse(token, status);
                self.free_slot(id);
            }
            State::Dead if !frees => {}
            _ => self.free_slot(id),
        }
        if let Some(sockets) = self.of(id.service) {
            sockets.note_written(id.block);
        }
    }

    /// A slot can be leased again: connections may wait for it.
    pub(super) fn free_slot(&mut self, id: SlotId) {
        let Self { by_slot, lists } = self;
        let Some(sockets) = of(by_slot, id.service) else { return };
        let block = &mut sockets.blocks[id.block as usize];
        block.sockets.free(id.slot.into());
        sockets.count_bytes(id.block, id.slot.into());
        let block = &mut sockets.blocks[id.block as usize];
        for (waiting, socket) in sockets.waiting.iter_mut().zip(0..) {
            if waiting.is_some() && block.sockets.accepts(socket) {
                lists.ports.extend(waiting.take());
            }
        }
    }

    /// Ends all sockets of these blocks. If it `frees` their slots, the blocks are gone: they get no more.
    pub(crate) fn end_sockets<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        blocks: Range<u32>,
        end: End,
        frees: bool,
    ) {
        for block in blocks {
            let Some(sockets) = self.of(service) else { return };
            let Some(share) = sockets.blocks.get_mut(block as usize) else { return };
            let slots = share.connections.len() as u16;
            if frees {
                share.dead = !mutants::on("accept_for_gone_blocks");
                sockets.owed.retain(|owed| *owed != block);
            }
            for slot in 0..slots {
                self.end_socket(turn, SlotId { service, slot, block }, end, Close::Reset, frees);
            }
        }
    }

    /// The service ends: what is in rings is dropped.
    pub(crate) fn release_sockets<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) {
        self.end_sockets(turn, service, 0..u32::MAX, End::DrainTimeout, true);
    }
}

/// The status that a block gets for a connection that this end ended.
fn status_of(end: End) -> u8 {
    if end == End::DrainTimeout { status::DRAINING } else { status::RESET }
}
