//! Bytes from connections into rings, and from rings to connections.

use sockets::{Direction, End, State};
use wire::nic::{Close, Nic, Read, Written};

use super::drain::{Departure, Spoke};
use super::{AWAKE_NS, KernelSockets};
use crate::base::keys::SlotId;
use crate::base::turn::Turn;
use crate::schedule::{Kind, Schedule, Taken};
use crate::service::services::Services;

/// Bytes that a worker moves in each direction in one turn, about; connections that are left are first in the next one.
const TURN_BYTES: usize = 1 << 20;

impl KernelSockets {
    /// Whether the tenant of a connection has its turn.
    #[inline(always)]
    fn has_turn<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        schedule: &mut Schedule,
        id: SlotId,
    ) -> bool {
        let has_it =
            schedule.allows(id.service, Kind::Sockets) || mutants::on("sockets_out_of_turn");
        if !has_it {
            self.postpone(turn, id);
        }
        has_it
    }

    /// A connection waits for its tenant's turn. It is not its peer that is slow or silent: its limits of time begin again.
    #[cold]
    fn postpone<N: Nic>(&mut self, turn: &mut Turn<N>, id: SlotId) {
        let (now_ns, deadline_ns) = (turn.now_ns, turn.now_ns + turn.slow_client_ns);
        let Some(block) = self.block_of(id) else { return };
        let is_closing = block.sockets.slots()[usize::from(id.slot)].state() == State::Closing;
        let connection = &mut block.connections[usize::from(id.slot)];
        connection.active_ns = now_ns;
        // One that lingers waits for its peer alone.
        if is_closing && !connection.lingers {
            connection.deadline_ns = deadline_ns;
        }
    }

    /// Before the blocks are driven: reads each connection that may have bytes once, as the schedule allows.
    pub(crate) fn receive_sockets<N: Nic>(&mut self, turn: &mut Turn<N>, schedule: &mut Schedule) {
        if self.lists.to_read.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut self.lists.spare);
        let mut listed = std::mem::replace(&mut self.lists.to_read, spare);
        let (mut left, mut again) = (TURN_BYTES, 0);
        for id in listed.drain(..) {
            if left == 0 || !self.has_turn(turn, schedule, id) {
                self.lists.to_read.push(id);
                continue;
            }
            let bytes = self.receive_socket(turn, id);
            let taken = Taken { messages: 1, bytes: bytes as u64, function_ns: 0 };
            schedule.charge(id.service.into(), Kind::Sockets, taken);
            left = left.saturating_sub(bytes);
            again = self.lists.to_read.len();
        }
        self.lists.to_read.rotate_left(again);
        self.lists.spare = listed;
    }

    /// Returns how many bytes were received.
    fn receive_socket<N: Nic>(&mut self, turn: &mut Turn<N>, id: SlotId) -> usize {
        let Turn { nic, now_ns, scratch, .. } = turn;
        let Some(sockets) = self.of(id.service) else {
            return 0;
        };
        let share = &mut sockets.blocks[id.block as usize];
        let slot = u32::from(id.slot);
        let connection = &mut share.connections[usize::from(id.slot)];
        connection.listed_to_read = false;
        let state = share.sockets.slots()[slot as usize].state();
        if state == State::Closing {
            return self.drop_input(turn, id);
        }
        let is_over = connection.received_all || connection.departure == Departure::Told;
        if state != State::Open || !connection.readable || is_over {
            return 0;
        }
        let Ok(room) = share.sockets.room(slot) else {
            self.break_block(turn, id.service, id.block);
            return 0;
        };
        let room = room.min(scratch.len());
        if room == 0 {
            // The block notifies the engine when it has read half of the ring.
            return 0;
        }
        let (mut is_broken, mut received) = (false, 0);
        match nic.read(connection.key, &mut scratch[..room]) {
            Read::Bytes(count) => {
                // A short read leaves nothing behind.
                (connection.readable, received) = (count == room, count);
                (connection.active_ns, connection.spoke) = (*now_ns, Spoke::Peer);
                is_broken = share.sockets.receive(slot, &scratch[..count]).is_err();
            }
            Read::Empty => connection.readable = false,
            Read::Closed => {
                (connection.readable, connection.received_all) = (false, true);
                share.sockets.finish_receiving(slot);
            }
            Read::Broken => {
                self.end_socket(turn, id, End::ResetByPeer, Close::Reset, false);
                return 0;
            }
        }
        let again = connection.readable;
        sockets.awake_until_ns = *now_ns + AWAKE_NS;
        sockets.note_written(id.block);
        turn.busy();
        if is_broken {
            self.break_block(turn, id.service, id.block);
        } else if again {
            self.list_to_read(id);
        }
        received
    }

    /// After the blocks were driven: sends what they wrote, with one write for each connection, as the schedule allows.
    pub(crate) fn send_sockets<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
        for service in 0..self.by_slot.len() as u16 {
            if let Some(sockets) = self.of(service).filter(|sockets| !sockets.owed.is_empty()) {
                sockets.send_owed();
            }
            let behind = self.of(service).map_or(0, |sockets| sockets.behind.len());
            for _ in 0..behind {
                let Some(sockets) = self.of(service) else { break };
                let block = sockets.behind.remove(0);
                self.take_commands(turn, services, service.into(), block);
            }
        }
        if self.lists.to_write.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut self.lists.spare);
        let mut listed = std::mem::replace(&mut self.lists.to_write, spare);
        let (mut left, mut again) = (TURN_BYTES, 0);
        for id in listed.drain(..) {
            if left == 0 || !self.has_turn(turn, schedule, id) {
                self.lists.to_write.push(id);
                continue;
            }
            let bytes = self.send_socket(turn, services, id);
            let taken = Taken { messages: 1, bytes: bytes as u64, function_ns: 0 };
            schedule.charge(id.service.into(), Kind::Sockets, taken);
            left = left.saturating_sub(bytes);
            again = self.lists.to_write.len();
        }
        self.lists.to_write.rotate_left(again);
        self.lists.spare = listed;
    }

    /// Returns how many bytes were sent.
    fn send_socket<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        id: SlotId,
    ) -> usize {
        let Some(sockets) = self.of(id.service) else { return 0 };
        let connection = &mut sockets.blocks[id.block as usize].connections[usize::from(id.slot)];
        connection.listed_to_write = false;
        let noted = connection.noted.take();
        let slot = u32::from(id.slot);
        let block = &sockets.blocks[id.block as usize].sockets;
        let is_closing = block.slots()[slot as usize].state() == State::Closing;
        let is_shut = noted.map_or(is_closing || block.is_shut(slot), |noted| noted.is_shut);
        let most = match self.sendable(turn, id, noted) {
            Ok(Some(most)) => most,
            Ok(None) => return 0,
            Err(_) => {
                self.break_block(turn, id.service, id.block);
                return 0;
            }
        };
        let Turn { nic, now_ns, scratch, slow_client_ns, .. } = turn;
        let Some(sockets) = self.of(id.service) else {
            return 0;
        };
        let share = &mut sockets.blocks[id.block as usize];
        let connection = &mut share.connections[usize::from(id.slot)];
        let state = share.sockets.slots()[slot as usize].state();
        if !matches!(state, State::Open | State::Closing) {
            return 0;
        }
        // What cannot be written is counted, and not copied.
        let takes = connection.writable && !connection.shut;
        let room = if takes { scratch.len().min(most) } else { 0 };
        let Ok(count) = share.sockets.peek(slot, &mut scratch[..room]) else {
            self.break_block(turn, id.service, id.block);
            return 0;
        };
        let in_ring = share.sockets.slots()[slot as usize].in_ring(Direction::Send);
        if connection.shut && state == State::Open && in_ring > 0 {
            // Bytes after the block's own end: they are not sent, and nothing else would end this connection.
            self.end_socket(turn, id, End::ResetByBlock, Close::Reset, false);
            return 0;
        }
        if !connection.writable {
            return 0;
        }
        let mut left = count;
        if count > 0 {
            match nic.write(connection.key, &scratch[..count]) {
                Written::Bytes(sent) => {
                    share.sockets.sent(slot, sent);
                    (connection.active_ns, connection.spoke) = (*now_ns, Spoke::Block);
                    left -= sent;
                    connection.writable = sent == count;
                    if state == State::Closing {
                        connection.deadline_ns = *now_ns + *slow_client_ns;
                    }
                }
                Written::Full => connection.writable = false,
                Written::Broken => {
                    let frees = state == State::Closing;
                    self.end_socket(turn, id, End::ResetByPeer, Close::Reset, frees);
                    return 0;
                }
            }
        }
        // Bytes that came meanwhile, and what transfers have to be sent before.
        let is_more = takes && in_ring > count as u64 || !connection.loans.is_empty();
        let again = left == 0 && (count == scratch.len() || is_more);
        if left == 0 && !again && is_shut {
            if state == State::Closing {
                self.linger(turn, services, id);
                return count;
            }
            if !std::mem::replace(&mut connection.shut, true) {
                nic.shutdown(connection.key);
            }
        }
        sockets.note_written(id.block);
        if count > 0 {
            turn.busy();
        }
        if again {
            self.list_to_write(id);
        }
        count - left
    }
}
