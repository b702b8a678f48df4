//! Connections of clients whose bytes go to an upstream server as they come: see `endpoint/upstream/relay.rs`.

use onpath::{Direction, Outcome, RequestId};
use wire::DropReason;
use wire::nic::{Close, Nic, Read, StreamKey, Written};
use wire::session::{Origin, ReplyTo};

use super::TcpConnections;
use super::connection::Reading;
use super::read::Next;
use crate::admit::servers::{Relayed, Servers};
use crate::base::topology::CHUNK_BYTES;
use crate::base::turn::Turn;
use crate::schedule::{Kind, Schedule, Taken};
use crate::service::services::Services;

impl TcpConnections {
    /// Reads a connection once.
    pub(super) fn read_relayed<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        key: StreamKey,
    ) -> Next {
        let Some(connection) = self.table.at(key) else { return Next::Done };
        let service = usize::from(connection.service);
        if connection.reading == Reading::Ended {
            self.close_finished_relay(turn, services, servers, key);
            return Next::Done;
        }
        if connection.reading == Reading::Stalled {
            if !connection.unsent().is_empty() {
                // The write that empties it lists the connection again.
                return Next::Done;
            }
            connection.reading = Reading::Open;
        }
        let arrival = connection.arrival(turn.index, key, turn.now_ns);
        let Origin::Client(to) = arrival.origin else { return Next::Done };
        match servers.begin_relay(turn, services, service, &to) {
            Relayed::Ready => {}
            Relayed::Waits => return Next::Done,
            Relayed::Refused => {
                self.close_connection(turn, services, servers, key, Close::Reset);
                return Next::Done;
            }
        }
        let Some(connection) = self.table.at(key) else { return Next::Done };
        if !connection.readable {
            return Next::Done;
        }
        if services[service].refuses_chunk(turn.index) {
            return Next::Hold(connection.service);
        }
        let mut scratch = std::mem::take(&mut turn.scratch);
        let stays = match turn.nic.read(key, &mut scratch[..CHUNK_BYTES]) {
            Read::Bytes(count) => {
                connection.readable = count == CHUNK_BYTES;
                connection.last_message_ns = turn.now_ns;
                let number = connection.take_chunk();
                let stays = connection.readable;
                turn.busy();
                let request = RequestId { origin: arrival.origin, number };
                let passed = self.relay_chunk(
                    turn,
                    services,
                    servers,
                    schedule,
                    (service, &to),
                    (&request, &scratch[..count]),
                );
                passed && stays
            }
            Read::Empty => {
                connection.readable = false;
                false
            }
            Read::Closed => {
                connection.reading = Reading::Ended;
                servers.end_relay_input(turn, service, key);
                self.close_finished_relay(turn, services, servers, key);
                false
            }
            Read::Broken => {
                self.close_connection(turn, services, servers, key, Close::Reset);
                false
            }
        };
        turn.scratch = scratch;
        Next::again_if(stays)
    }

    /// Shows the chain a chunk of the client, and passes it on. False: the connection is closed.
    fn relay_chunk<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        (service, to): (usize, &ReplyTo),
        (request, chunk): (&RequestId, &[u8]),
    ) -> bool {
        let share = &mut services[service];
        share.count_received(1);
        share.count_received_bytes(chunk.len() as u64);
        let mut function_ns = 0;
        let lost = match share.chain.take() {
            None => servers.relay_to_server(turn, services, service, to.key, chunk),
            Some(mut chain) => {
                let (outcome, bytes) =
                    chain.decide_chunk(Direction::Requests, request, chunk, &|| turn.clock_ns());
                let lost = match outcome {
                    Outcome::Pass => {
                        servers.relay_to_server(turn, services, service, to.key, bytes)
                    }
                    Outcome::Reply => {
                        self.relay_to_client(turn, services, servers, to, bytes);
                        self.stall_unsent(to);
                        None
                    }
                    Outcome::Deliver => {
                        services[service].count_consumed(1);
                        None
                    }
                    Outcome::Steer(_) => Some(DropReason::MqueueDead),
                    Outcome::Drop(reason) => Some(reason),
                };
                chain.clear_chunk();
                let share = &mut services[service];
                share.chain = Some(chain);
                function_ns = share.take_function_ns();
                lost
            }
        };
        let taken = Taken { messages: 1, bytes: chunk.len() as u64, function_ns };
        schedule.charge(service, Kind::Tcp, taken);
        if let Some(reason) = lost {
            services[service].count_lost(reason, 1);
            self.close_connection(turn, services, servers, to.key, Close::Reset);
        }
        lost.is_none() && self.table.in_generation(to.key, to.generation).is_some()
    }

    /// The number of the next chunk on a client's connection.
    pub(crate) fn take_number(&mut self, to: &ReplyTo) -> u64 {
        let connection = self.table.in_generation(to.key, to.generation);
        connection.map_or(0, |connection| connection.take_chunk())
    }

    /// Writes bytes to a client, which count as one reply. What its host does not take waits.
    pub(crate) fn relay_to_client<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        to: &ReplyTo,
        bytes: &[u8],
    ) {
        let Some(connection) = self.table.in_generation(to.key, to.generation) else { return };
        let share = &services[usize::from(connection.service)];
        connection.last_message_ns = turn.now_ns;
        let mut taken = 0;
        if connection.unsent().is_empty() {
            match if bytes.is_empty() { Written::Bytes(0) } else { turn.nic.write(to.key, bytes) } {
                Written::Bytes(count) => taken = count,
                Written::Full => {}
                Written::Broken => {
                    share.count_lost(DropReason::ClientGone, 1);
                    return self.close_connection(turn, services, servers, to.key, Close::Reset);
                }
            }
            if taken == bytes.len() {
                share.count_replied(1);
                share.count_replied_bytes(bytes.len() as u64);
                return;
            }
            connection.blocked_since_ns = turn.now_ns.max(1);
        }
        let Self { table, pool, .. } = self;
        table.change(to.key, |c| c.relay(&bytes[taken..], bytes.len() as u32, pool));
    }

    /// A client whose own chunks are answered is not read while such a reply waits for it: it would fill the memory of the engine. What
    /// only the server has sent does not hold the client's chunks.
    fn stall_unsent(&mut self, to: &ReplyTo) {
        let connection = self.table.in_generation(to.key, to.generation);
        if let Some(connection) = connection.filter(|connection| !connection.unsent().is_empty()) {
            connection.reading = Reading::Stalled;
        }
    }

    /// Everything that waited for a client may have been written: its server is read again, or it gets the end that the server has sent.
    pub(crate) fn relay_written<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        key: StreamKey,
    ) {
        let Some(connection) = self.table.at(key) else { return };
        let service = usize::from(connection.service);
        if connection.unsent().is_empty() && servers.relay_taken(turn, service, key) {
            self.close_connection(turn, services, servers, key, Close::Graceful);
        }
    }

    /// Closes a connection if both sides have ended.
    pub(super) fn close_finished_relay<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        key: StreamKey,
    ) {
        let Some(connection) = self.table.at(key) else { return };
        let service = usize::from(connection.service);
        if servers.is_relay_finished(service, key) {
            self.close_connection(turn, services, servers, key, Close::Graceful);
        }
    }

    /// The connection to the server has ended before its time.
    pub(crate) fn end_relayed<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        to: &ReplyTo,
        reason: DropReason,
    ) {
        if self.table.in_generation(to.key, to.generation).is_some() {
            self.end_connection(turn, services, servers, to.key, Close::Reset, reason);
        }
    }
}
