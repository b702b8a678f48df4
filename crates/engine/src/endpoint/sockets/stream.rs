//! Bytes from connections into rings, and from rings to connections.

use sockets::{End, State};
use wire::nic::{Close, Nic, Read, Written};

use super::{AWAKE_NS, SlotId};
use crate::turn::Turn;

impl<N: Nic> Turn<N> {
    /// Before the blocks are driven: reads each connection that may have bytes once.
    pub(crate) fn receive_sockets(&mut self) {
        if self.socket_lists.to_read.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut self.socket_lists.spare);
        let mut listed = std::mem::replace(&mut self.socket_lists.to_read, spare);
        for id in listed.drain(..) {
            self.receive_socket(id);
        }
        self.socket_lists.spare = listed;
    }

    fn receive_socket(&mut self, id: SlotId) {
        let Self { services, nic, now_ns, scratch, .. } = self;
        let Some(sockets) = services[usize::from(id.service)].sockets.as_deref_mut() else {
            return;
        };
        let share = &mut sockets.blocks[id.block as usize];
        let slot = u32::from(id.slot);
        let connection = &mut share.connections[usize::from(id.slot)];
        connection.listed_to_read = false;
        let state = share.sockets.slots()[slot as usize].state();
        if state != State::Open || !connection.readable || connection.received_all {
            return;
        }
        let Ok(room) = share.sockets.room(slot) else {
            return self.break_block(id.service, id.block);
        };
        let room = room.min(scratch.len());
        if room == 0 {
            // The block notifies the engine when it has read half of the ring.
            return;
        }
        let mut is_broken = false;
        match nic.read(connection.key, &mut scratch[..room]) {
            Read::Bytes(count) => {
                // A short read leaves nothing behind.
                connection.readable = count == room;
                is_broken = share.sockets.receive(slot, &scratch[..count]).is_err();
            }
            Read::Empty => connection.readable = false,
            Read::Closed => {
                (connection.readable, connection.received_all) = (false, true);
                share.sockets.finish_receiving(slot);
            }
            Read::Broken => return self.end_socket(id, End::ResetByPeer, Close::Reset, false),
        }
        let again = connection.readable;
        sockets.awake_until_ns = *now_ns + AWAKE_NS;
        sockets.note_written(id.block);
        self.busy();
        if is_broken {
            self.break_block(id.service, id.block);
        } else if again {
            self.list_to_read(id);
        }
    }

    /// After the blocks were driven: sends what they wrote, with one write for each connection.
    pub(crate) fn send_sockets(&mut self) {
        for service in 0..self.services.len() as u16 {
            if let Some(sockets) = self.sockets(service).filter(|sockets| !sockets.owed.is_empty())
            {
                sockets.send_owed();
            }
        }
        if self.socket_lists.to_write.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut self.socket_lists.spare);
        let mut listed = std::mem::replace(&mut self.socket_lists.to_write, spare);
        for id in listed.drain(..) {
            self.send_socket(id);
        }
        self.socket_lists.spare = listed;
    }

    fn send_socket(&mut self, id: SlotId) {
        let Self { services, nic, now_ns, scratch, slow_client_ns, .. } = self;
        let Some(sockets) = services[usize::from(id.service)].sockets.as_deref_mut() else {
            return;
        };
        let share = &mut sockets.blocks[id.block as usize];
        let slot = u32::from(id.slot);
        let connection = &mut share.connections[usize::from(id.slot)];
        connection.listed_to_write = false;
        let state = share.sockets.slots()[slot as usize].state();
        if !matches!(state, State::Open | State::Closing) {
            return;
        }
        // In this order: what was written before the end is in the ring.
        let is_shut = state == State::Closing || share.sockets.is_shut(slot);
        let Ok(count) = share.sockets.peek(slot, scratch) else {
            return self.break_block(id.service, id.block);
        };
        let mut left = count;
        if count > 0 && connection.writable {
            match nic.write(connection.key, &scratch[..count]) {
                Written::Bytes(sent) => {
                    share.sockets.sent(slot, sent);
                    left -= sent;
                    connection.writable = sent == count;
                    if state == State::Closing {
                        connection.deadline_ns = *now_ns + *slow_client_ns;
                    }
                }
                Written::Full => connection.writable = false,
                Written::Broken => {
                    let frees = state == State::Closing;
                    return self.end_socket(id, End::ResetByPeer, Close::Reset, frees);
                }
            }
        }
        let again = left == 0 && count == scratch.len();
        if left == 0 && !again && is_shut {
            if state == State::Closing {
                return self.end_socket(id, End::Closed, Close::Graceful, true);
            }
            if !std::mem::replace(&mut connection.shut, true) {
                nic.shutdown(connection.key);
            }
        }
        sockets.note_written(id.block);
        if count > 0 {
            self.busy();
        }
        if again {
            self.list_to_write(id);
        }
    }
}
