//! New connections: accepted by one worker, adopted by the one with the fewest.

use wire::DropReason;
use wire::admission::flow_hash;
use wire::nic::{Nic, PortIndex, Transport};

use super::TcpConnections;
use crate::admit::servers::Servers;
use crate::base::fabric::Accepted;
use crate::base::turn::Turn;
use crate::endpoint::port::Port;
use crate::service::services::Services;

/// Connections accepted from one listener in a turn.
const ACCEPT_MAX: usize = 32;

impl TcpConnections {
    /// Adds a port.
    pub(crate) fn place(&mut self, index: PortIndex, port: Port) {
        self.make_room_for(index);
        self.listeners[usize::from(index)] = port;
    }

    /// Makes room for a port with this index.
    pub(crate) fn make_room_for(&mut self, index: PortIndex) {
        while self.listeners.len() <= usize::from(index) {
            self.listeners.push(Port::vacant(Transport::Tcp));
        }
    }

    /// The ports.
    pub(crate) fn listeners_mut(&mut self) -> impl Iterator<Item = (usize, &mut Port)> {
        // The caller may make one of them ready.
        self.is_accepting = true;
        self.listeners.iter_mut().enumerate().filter(|(_, port)| !port.is_vacant())
    }

    /// Closes the ports of a service.
    pub(crate) fn close_ports<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) {
        for (index, port) in self.listeners.iter_mut().enumerate() {
            if port.is_of(service) {
                turn.nic.close_port(index as PortIndex);
                *port = Port::vacant(Transport::Tcp);
            }
        }
    }

    /// Accepts connections from every port that may have some; in each round another one is the first.
    pub(super) fn accept<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        round: usize,
    ) {
        let count = self.listeners.len();
        let first = round % count.max(1);
        for index in (first..count).chain(0..first) {
            let port = &mut self.listeners[index];
            if port.is_readable() {
                port.ready = false;
                let Port { service, socket, .. } = *port;
                match socket {
                    None => self.accept_from(turn, services, index),
                    Some(socket) => {
                        let more =
                            servers.accept(turn, services, service, index as PortIndex, socket);
                        self.listeners[index].ready = more;
                    }
                }
            }
        }
        // Paused ports are ready again when their pause ends.
        self.is_accepting = self.listeners.iter().any(Port::is_readable);
    }

    fn accept_from<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services, index: usize) {
        let service = usize::from(self.listeners[index].service);
        for _ in 0..ACCEPT_MAX {
            if turn.draining {
                return;
            }
            let Some((socket, peer)) = turn.nic.accept(index as PortIndex) else { return };
            turn.busy();
            if turn.shared.connections() >= self.limits.connections as usize {
                // Dropping the socket closes it.
                services[service].count_lost(DropReason::ConnectionLimit, 1);
                continue;
            }
            let worker = turn.shared.assign_connection(turn.index);
            let accepted = Accepted { port: index as PortIndex, socket, peer };
            if worker == turn.index {
                self.adopt(turn, services, accepted);
            } else {
                (turn.hand_connection)(worker, accepted);
            }
        }
        self.listeners[index].ready = true;
    }

    /// Takes over a connection that was accepted for this worker.
    pub(crate) fn adopt<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        accepted: Accepted<N::Socket>,
    ) {
        let Accepted { port, socket, peer } = accepted;
        // The port may have left meanwhile.
        let port = self.listeners.get(usize::from(port)).copied();
        let Port { service, address, .. } = port.unwrap_or(Port::vacant(Transport::Tcp));
        let share = services.get(usize::from(service));
        let Some(share) = share.filter(|share| share.leaving.is_none() && !turn.draining) else {
            // Its service is leaving or has left, so no limit is to blame; dropping the socket closes it.
            return turn.shared.release_connection(turn.index);
        };
        // Workers that accept at the same moment may exceed the engine's limit by a few. A worker's own limit is
        // strict, because the keys behind its connections belong to its backends.
        if self.table.open_count() >= self.limits.connections as usize {
            // Dropping the socket closes it.
            return Self::refuse(turn, services, service, DropReason::ConnectionLimit);
        }
        if share.owner.as_ref().is_some_and(|owner| !owner.take_connection()) {
            return Self::refuse(turn, services, service, DropReason::TenantConnections);
        }
        let key = self.table.open(service, share.ordered, self.limits.pipelined, turn.now_ns);
        // Adding to a list allocates nothing.
        let entries = self.table.len();
        self.to_read.reserve(entries.saturating_sub(self.to_read.len()));
        self.to_write.reserve((2 * entries).saturating_sub(self.to_write.len()));
        if turn.nic.adopt(socket, key).is_err() {
            self.table.close(key, &mut self.pool);
            services[usize::from(service)].end_connection();
            return Self::refuse(turn, services, service, DropReason::ConnectionLimit);
        }
        let connection = self.table.at(key).expect("just opened");
        connection.flow = flow_hash(peer, address.port());
        if let Some(addresses) = turn.shared.addresses_of(turn.index) {
            addresses.set(key, connection.generation, peer);
        }
        connection.readable = true;
        services[usize::from(service)].counters.connections_accepted.one();
        self.list_to_read(key);
    }

    /// Releases a connection that was assigned to this worker and is not adopted.
    fn refuse<N: Nic>(turn: &Turn<N>, services: &Services, service: u16, reason: DropReason) {
        turn.shared.release_connection(turn.index);
        services[usize::from(service)].count_lost(reason, 1);
    }
}
