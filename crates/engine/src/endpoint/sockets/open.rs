//! How connections begin, and their time limits.

use mqueue::abi::status;
use sockets::{End, State};
use wire::nic::{Close, Event, Nic, NicError, PortIndex, Transport};

use crate::base::keys::SlotId;
use crate::base::topology::SocketAt;
use crate::turn::Turn;

/// Connections accepted from one listener in a turn.
const ACCEPT_MAX: usize = 32;

impl<N: Nic> Turn<N> {
    /// Connections may wait at a listener: accepts as many as blocks of this worker wait for. Returns whether more may wait
    /// for which there are blocks.
    pub(crate) fn accept_sockets(&mut self, service: u16, port: PortIndex, socket: u16) -> bool {
        for _ in 0..ACCEPT_MAX {
            let draining = self.draining;
            let Some(sockets) = self.sockets(service) else { return false };
            if draining || sockets.closed {
                return false;
            }
            let Some(block) = sockets.next_acceptor(socket.into()) else {
                sockets.waiting[usize::from(socket)] = Some(port);
                return false;
            };
            let Some((connection, _)) = self.nic.accept(port) else { return false };
            self.busy();
            self.adopt_socket(service, block, socket.into(), connection);
        }
        true
    }

    fn adopt_socket(&mut self, service: u16, block: u32, socket: u32, connection: N::Socket) {
        let Self { services, nic, now_ns, .. } = self;
        let Some(sockets) = services[usize::from(service)].sockets.as_deref_mut() else { return };
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
    pub(super) fn connect_socket(&mut self, service: u16, block: u32, token: u64, socket: u32) {
        let Self { services, nic, now_ns, draining, .. } = self;
        let Some(sockets) = services[usize::from(service)].sockets.as_deref_mut() else { return };
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
    pub(crate) fn socket_event(&mut self, event: Event, id: SlotId) {
        let Self { services, nic, now_ns, .. } = self;
        let Some(share) = services.get_mut(usize::from(id.service)) else { return };
        let Some(sockets) = share.sockets.as_deref_mut() else { return };
        let Some(share) = sockets.blocks.get_mut(id.block as usize) else { return };
        let slot = u32::from(id.slot);
        let connection = &mut share.connections[usize::from(id.slot)];
        let state = share.sockets.slots()[slot as usize].state();
        match (event, state) {
            (_, State::Free | State::Dead) => {}
            (Event::Failed(_), State::Connecting { .. }) => {
                self.end_socket(id, End::Refused, Close::Reset, false);
            }
            (Event::Failed(_), _) => self.end_socket(id, End::ResetByPeer, Close::Reset, false),
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
    pub(crate) fn expire_sockets(&mut self, service: usize) {
        let Self { now_ns, slow_client_ns, .. } = *self;
        let service = service as u16;
        let Some(sockets) = self.sockets(service) else { return };
        for at in (0..sockets.leasing.len()).rev() {
            let Some(sockets) = self.sockets(service) else { return };
            let block = sockets.leasing[at];
            let share = &mut sockets.blocks[block as usize];
            let mut leased = share.sockets.leased().peekable();
            if leased.peek().is_none() {
                share.listed = false;
                sockets.leasing.swap_remove(at);
                continue;
            }
            let drains = self.drains_sockets(service, block);
            // One of them may be for a connection that seems to be idle.
            let awaits = self.awaits_transfers(service, block);
            for slot in leased {
                let Some(sockets) = self.sockets(service) else { return };
                sockets.count_bytes(block, slot);
                let share = &sockets.blocks[block as usize];
                let connection = &share.connections[slot as usize];
                let is_late = connection.deadline_ns <= now_ns;
                let is_idle = connection.is_idle(now_ns) && !mutants::on("keep_idle_sockets");
                let id = SlotId { service, block, slot: slot as u16 };
                if !connection.loans.is_empty() {
                    self.expire_loans(id);
                    continue;
                }
                match share.sockets.slots()[slot as usize].state() {
                    State::Connecting { .. } if is_late => {
                        self.end_socket(id, End::ConnectTimeout, Close::Reset, false);
                    }
                    State::Closing if connection.is_quiet(now_ns, slow_client_ns, drains) => {
                        self.end_socket(id, End::Closed, Close::Graceful, true);
                    }
                    State::Closing if is_late => {
                        let lingers = connection.lingers;
                        let end = if lingers { End::UnreadInput } else { End::SlowPeer };
                        self.end_socket(id, end, Close::Reset, true);
                    }
                    State::Open if awaits => {}
                    State::Open if is_idle => self.end_socket(id, End::Idle, Close::Reset, false),
                    State::Open if drains => self.dismiss_if_idle(id),
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
