//! How connections begin, and their time limits.

use mqueue::abi::status;
use sockets::{End, State};
use wire::nic::{Close, Event, Nic, NicError, PortIndex, Transport};

use super::KernelSockets;
use super::lend::Unread;
use crate::base::keys::SlotId;
use crate::base::topology::SocketAt;
use crate::base::turn::Turn;
use crate::service::services::Services;

/// Connections accepted from one listener in a turn.
const ACCEPT_MAX: usize = 32;

impl KernelSockets {
    /// Connections may wait at a listener: accepts as many as blocks of this worker wait for. Returns whether more may wait
    /// for which there are blocks.
    pub(crate) fn accept_sockets<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        port: PortIndex,
        socket: u16,
    ) -> bool {
        for _ in 0..ACCEPT_MAX {
            let draining = turn.draining;
            let Some(sockets) = self.of(service) else { return false };
            if draining || sockets.closed {
                return false;
            }
            let Some(block) = sockets.next_acceptor(socket.into()) else {
                sockets.waiting[usize::from(socket)] = Some(port);
                return false;
            };
            let Some((connection, _)) = turn.nic.accept(port) else { return false };
            turn.busy();
            self.adopt_socket(turn, service, block, socket.into(), connection);
        }
        true
    }

    fn adopt_socket<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        block: u32,
        socket: u32,
        connection: N::Socket,
    ) {
        let Turn { nic, now_ns, .. } = turn;
        let Some(sockets) = self.of(service) else { return };
        let Some(slot) = sockets.lease(block, State::Open) else { return };
        let share = &mut sockets.blocks[block as usize];
        let entry = &mut share.connections[slot as usize];
        if nic.adopt(connection, entry.key).is_err() {
            // Dropping the connection closed it. The block keeps waiting for another one.
            sockets.counters.socket_ends[End::NoDescriptor as usize].add(1);
            return share.sockets.free(slot);
        }
        let Some(token) = share.sockets.take_accept(socket) else { return };
        nic.keep_alive(entry.key);
        entry.begin(&sockets.specs[socket as usize]);
        entry.open(*now_ns);
        share.sockets.opened(slot, token);
        sockets.counters.sockets_opened.one();
        sockets.note_written(block);
        self.list_to_read(SlotId { service, block, slot: slot as u16 });
    }

    /// A block connects to a peer.
    pub(super) fn connect_socket<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        block: u32,
        token: u64,
        socket: u32,
    ) {
        let Turn { nic, now_ns, draining, .. } = turn;
        let Some(sockets) = self.of(service) else { return };
        let share = &mut sockets.blocks[block as usize];
        if sockets.specs[socket as usize].listens() {
            return share.sockets.refuse(token, status::NOT_ALLOWED);
        }
        if *draining || sockets.closed {
            return share.sockets.refuse(token, status::DRAINING);
        }
        let leased = sockets.lease(block, State::Connecting { token });
        let share = &mut sockets.blocks[block as usize];
        let Some(slot) = leased else {
            return share.sockets.refuse(token, status::EXHAUSTED);
        };
        let entry = &mut share.connections[slot as usize];
        entry.begin(&sockets.specs[socket as usize]);
        entry.deadline_ns = *now_ns + sockets.attempt_ns;
        let started = match &sockets.specs[socket as usize].at {
            SocketAt::Tcp(address) => nic.connect(*address, Transport::Tcp, entry.key),
            SocketAt::Unix(path) => nic.connect_local(path, entry.key),
        };
        if let Err(error) = started {
            let (end, status) = match error {
                NicError::Exhausted => (End::NoDescriptor, status::EXHAUSTED),
                NicError::Refused(_) => (End::Refused, status::REFUSED),
            };
            sockets.counters.socket_ends[end as usize].add(1);
            share.sockets.refuse(token, status);
            self.free_slot(SlotId { service, block, slot: slot as u16 });
        }
    }

    /// Something happened on the connection of a slot.
    pub(super) fn socket_event<N: Nic>(&mut self, turn: &mut Turn<N>, event: Event, id: SlotId) {
        let Turn { nic, now_ns, .. } = turn;
        let Some(sockets) = self.of(id.service) else { return };
        let Some(share) = sockets.blocks.get_mut(id.block as usize) else { return };
        let slot = u32::from(id.slot);
        let connection = &mut share.connections[usize::from(id.slot)];
        let state = share.sockets.slots()[slot as usize].state();
        match (event, state) {
            (_, State::Free | State::Dead) => {}
            (Event::Failed(_), State::Connecting { .. }) => {
                self.end_socket(turn, id, End::Refused, Close::Reset, false);
            }
            (Event::Failed(_), _) => {
                self.end_socket(turn, id, End::ResetByPeer, Close::Reset, false)
            }
            (Event::Writable(_), State::Connecting { token }) => {
                nic.keep_alive(connection.key);
                connection.open(*now_ns);
                share.sockets.opened(slot, token);
                sockets.counters.sockets_opened.one();
                sockets.note_written(id.block);
                self.list_to_read(id);
            }
            (Event::Writable(_), _) => {
                connection.writable = true;
                self.list_to_write(id);
            }
            (_, _) => {
                connection.readable = true;
                self.list_to_read(id);
            }
        }
    }

    /// Once a millisecond: ends attempts, closing sockets whose peer takes nothing, and idle connections, after their time; counts bytes. Looks at leased
    /// slots only.
    pub(super) fn expire_sockets<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &Services,
        service: u16,
    ) {
        let (now_ns, slow_client_ns) = (turn.now_ns, turn.slow_client_ns);
        let Some(sockets) = self.of(service) else { return };
        for at in (0..sockets.leasing.len()).rev() {
            let Some(sockets) = self.of(service) else { return };
            let block = sockets.leasing[at];
            let share = &mut sockets.blocks[block as usize];
            let mut leased = share.sockets.leased().peekable();
            if leased.peek().is_none() {
                share.listed = false;
                sockets.leasing.swap_remove(at);
                continue;
            }
            let drains = self.drains_sockets(turn, services, service, block);
            // One of them may be for a connection that seems to be idle.
            let awaits = self
                .of(service)
                .is_some_and(|of| of.blocks[block as usize].unread == Unread::Waiting);
            for slot in leased {
                let Some(sockets) = self.of(service) else { return };
                sockets.count_bytes(block, slot);
                let share = &sockets.blocks[block as usize];
                let connection = &share.connections[slot as usize];
                let is_late = connection.deadline_ns <= now_ns;
                let is_idle = connection.is_idle(now_ns) && !mutants::on("keep_idle_sockets");
                let id = SlotId { service, block, slot: slot as u16 };
                if !connection.loans.is_empty() {
                    continue;
                }
                match share.sockets.slots()[slot as usize].state() {
                    State::Connecting { .. } if is_late => {
                        self.end_socket(turn, id, End::ConnectTimeout, Close::Reset, false);
                    }
                    State::Closing if connection.is_quiet(now_ns, slow_client_ns, drains) => {
                        self.end_socket(turn, id, End::Closed, Close::Graceful, true);
                    }
                    State::Closing if is_late => {
                        let lingers = connection.lingers;
                        let end = if lingers { End::UnreadInput } else { End::SlowPeer };
                        self.end_socket(turn, id, end, Close::Reset, true);
                    }
                    State::Open if awaits => {}
                    State::Open if is_idle => {
                        self.end_socket(turn, id, End::Idle, Close::Reset, false)
                    }
                    State::Open if drains => self.dismiss_if_idle(turn, services, id),
                    _ => {}
                }
            }
        }
    }
}

impl super::Sockets {
    /// The block that gets the next connection to a listener: each in turn, among those that wait.
    fn next_acceptor(&mut self, socket: u32) -> Option<u32> {
        let count = self.blocks.len() as u32;
        let order = (self.next_block..count).chain(0..self.next_block);
        let waits = |number: &u32| {
            let block = &self.blocks[*number as usize];
            !block.dead && block.sockets.accepts(socket)
        };
        let found = order.into_iter().find(waits)?;
        self.next_block = (found + 1) % count;
        Some(found)
    }
}
