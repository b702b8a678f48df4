//! Commands of blocks.

use mqueue::abi::status;
use sockets::{Command, End, State};
use wire::nic::{Close, Nic};

use super::{KernelSockets, of};
use crate::base::keys::SlotId;
use crate::base::turn::Turn;
use crate::service::services::Services;

/// Commands of one block that are taken in one turn.
const COMMANDS_MAX: usize = 256;

impl KernelSockets {
    /// Takes the commands that a block has written.
    pub(super) fn take_commands<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        block: u32,
    ) {
        let service = service as u16;
        let mut is_done = false;
        for _ in 0..COMMANDS_MAX {
            let Some(sockets) = self.of(service) else { return };
            let Some(share) = sockets.blocks.get_mut(block as usize) else { return };
            if share.dead {
                return;
            }
            let Some(command) = share.sockets.next_command() else {
                is_done = !share.sockets.is_behind();
                break;
            };
            turn.busy();
            self.take_socket_command(turn, service, block, command);
        }
        let Some(sockets) = self.of(service) else { return };
        if !is_done && !sockets.behind.contains(&block) {
            sockets.behind.push(block);
        }
        let share = &mut sockets.blocks[block as usize];
        sockets.counters.socket_bad_commands.add(share.sockets.take_bad());
        let corrupt = share.sockets.is_corrupt();
        sockets.note_written(block);
        if corrupt {
            // Housekeeping reports it and ends the block, as for the rings of messages.
            services[usize::from(service)].mqueues[block as usize].tx_corrupt = true;
            self.break_block(turn, service, block);
        }
    }

    fn take_socket_command<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        block: u32,
        command: Command,
    ) {
        match command {
            Command::Accept { token, socket } => {
                self.await_connection(service, block, token, socket)
            }
            Command::Connect { token, socket } => {
                self.connect_socket(turn, service, block, token, socket)
            }
            Command::Cancel { token } => self.cancel_command(turn, service, block, token),
            Command::NoEffect => {}
            Command::Notify { slot } => {
                let id = SlotId { service, block, slot: slot as u16 };
                self.list_to_read(id);
                self.list_to_write(id);
            }
            Command::Close { slot, reset } => {
                let id = SlotId { service, block, slot: slot as u16 };
                self.close_socket(turn, id, reset);
            }
        }
    }

    /// A block closes a slot: what it wrote is sent first, unless it resets the connection.
    fn close_socket<N: Nic>(&mut self, turn: &mut Turn<N>, id: SlotId, reset: bool) {
        let deadline_ns = turn.now_ns + turn.slow_client_ns;
        let Some(sockets) = self.of(id.service) else { return };
        let share = &mut sockets.blocks[id.block as usize];
        let slot = u32::from(id.slot);
        if share.sockets.slots()[slot as usize].state() == State::Dead {
            return self.free_slot(id);
        }
        if reset {
            return self.end_socket(turn, id, End::ResetByBlock, Close::Reset, true);
        }
        share.sockets.set_state(slot, State::Closing);
        share.connections[usize::from(id.slot)].deadline_ns = deadline_ns;
        self.list_to_read(id);
        self.list_to_write(id);
    }

    /// A block gives up an accept or a connect. If that is not complete yet it is now, and has no other effect.
    fn cancel_command<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, block: u32, token: u64) {
        let Some(sockets) = self.of(service) else { return };
        let share = &mut sockets.blocks[block as usize];
        if share.sockets.cancel_accept(token) {
            return share.sockets.refuse(token, status::TIMEOUT);
        }
        let Some(slot) = share.sockets.connecting(token) else { return };
        if mutants::on("connect_after_cancel") {
            return share.sockets.refuse(token, status::TIMEOUT);
        }
        let id = SlotId { service, block, slot: slot as u16 };
        self.end_socket(turn, id, End::ConnectTimeout, Close::Reset, false);
    }

    /// A block waits for a connection to a listener.
    fn await_connection(&mut self, service: u16, block: u32, token: u64, socket: u32) {
        let Self { by_slot, lists } = self;
        let Some(sockets) = of(by_slot, service) else { return };
        let share = &mut sockets.blocks[block as usize];
        if !sockets.specs[socket as usize].listens() {
            share.sockets.take_accept(socket);
            return share.sockets.refuse(token, status::NOT_ALLOWED);
        }
        // While the service leaves, the command waits until the block stops.
        if sockets.closed {
            return;
        }
        if let Some(port) = sockets.waiting[socket as usize].take() {
            lists.ports.push(port);
        }
    }

    /// A block has broken its rings, or has ended: its sockets are reset, and it gets no more.
    pub(crate) fn break_block<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, block: u32) {
        self.end_sockets(turn, service, block..block + 1, End::BlockEnded, true);
    }
}
