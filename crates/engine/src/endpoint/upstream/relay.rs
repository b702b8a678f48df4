//! Byte streams without messages: a proxy over TCP with `framing = "raw"`.
//!
//! Each client connection has one to the server, which is opened when the client connects: the server may speak first. What one side sends goes
//! to the other as it comes, in *chunks* of one read each. A chain of functions sees each chunk as a message: those of the client as requests,
//! those of the server as replies.
//!
//! | a function decides | the chunk |
//! |---|---|
//! | pass, rewrite | goes on, with the bytes that it has then |
//! | drop | is dropped, and both connections are reset: bytes cannot be missing in a stream |
//! | reply, to the client's | goes back to the client |
//! | deliver, of the client's | is in the ring of an application, and does not go on |
//! | steer, of the client's | `mqueue_dead`, as drop: a proxy has no mqueues |
//!
//! *Back-pressure.* A chunk is written at once. What the other side's host does not take waits here, and its sender is not read
//! before all of it has been taken: at most one chunk waits in each direction. While a function's reply to a client waits for that client, the client is
//! not read either: besides a chunk of the server at most one reply waits.
//!
//! *Ends.* When one side ends its sending direction, the other side gets that end behind the last byte, and may go on sending. When
//! both have ended, both connections are closed. A reset, a time-out, and a chunk that is dropped reset both connections: a
//! part of a stream must not look like all of it.
//!
//! *The books.* A chunk counts as a request: of the client as consumed when the server's host has taken it, of the server as replied when
//! the client's host has. A connection that the server refuses counts as one that is dropped as `upstream_refused`.
//!
//! *Drain.* Connections go on until they end, or the drain time is over.

use onpath::{Direction, Outcome, RequestId};
use wire::DropReason;
use wire::nic::{Close, Nic, Read, StreamKey, Written};
use wire::session::{Origin, ReplyTo};

use super::streams::{State, Stream};
use super::{UpstreamBatch, Upstreams, of};
use crate::admit::servers::Relayed;
use crate::base::topology::CHUNK_BYTES;
use crate::base::turn::Turn;
use crate::endpoint::clients::Clients;
use crate::schedule::{Kind, Schedule, Taken};
use crate::service::services::Services;

impl Stream {
    /// Tells the server that the client sends nothing more, if that is so and everything before has been written.
    fn finish<N: Nic>(&mut self, nic: &mut N) {
        let relay = &mut self.relay;
        let is_due = relay.client_ended && !relay.told_server && self.pipeline.unwritten() == 0;
        if is_due && self.state == State::Up {
            relay.told_server = true;
            nic.shutdown(self.key);
        }
    }

    /// Whether both sides have ended and know it of each other.
    pub(super) fn is_finished(&self) -> bool {
        self.relay.told_server && self.relay.told_client
    }

    /// A relayed connection can be written: whether there is something to do.
    pub(super) fn relay_writable(&self) -> bool {
        self.relay.client_ended && !self.relay.told_server
    }
}

impl Upstreams {
    /// Before a client's connection is read: it has one to the server.
    pub(super) fn begin_relayed<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: &ReplyTo,
    ) -> Relayed {
        if self.stream(service, client.key).is_none_or(|stream| stream.client != *client)
            && let Err(reason) = self.open_stream(turn, services, service, client)
        {
            let share = &services[service];
            share.count_received(1);
            share.count_lost(reason, 1);
            return Relayed::Refused;
        }
        let Some(stream) = self.stream(service, client.key) else { return Relayed::Refused };
        stream.holds_client = stream.pipeline.unwritten() > 0;
        if stream.holds_client { Relayed::Waits } else { Relayed::Ready }
    }

    /// Passes a chunk of a client on, which is counted as received. What the server's host does not take waits. Returns why it is lost.
    pub(super) fn pass_on<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
        chunk: &[u8],
    ) -> Option<DropReason> {
        let Turn { nic, .. } = turn;
        let share = &mut services[service];
        let streams = of(&mut self.by_slot, service).map(|upstream| &mut upstream.streams);
        let Some((in_flight, stream)) = streams.and_then(|streams| streams.with(client)) else {
            return Some(DropReason::UpstreamRefused);
        };
        let mut taken = 0;
        if stream.state == State::Up && stream.pipeline.unwritten() == 0 {
            match if chunk.is_empty() { Written::Bytes(0) } else { nic.write(stream.key, chunk) } {
                Written::Bytes(count) => taken = count,
                Written::Full => {}
                Written::Broken => return Some(DropReason::UpstreamRefused),
            }
            if taken == chunk.len() {
                share.count_consumed(1);
                return None;
            }
        }
        stream.pipeline.output.extend_from_slice(&chunk[taken..]);
        stream.unanswered += 1;
        *in_flight += 1;
        None
    }

    /// A client sends nothing more.
    pub(super) fn end_input<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        client: StreamKey,
    ) {
        let streams = of(&mut self.by_slot, service).map(|upstream| &mut upstream.streams);
        if let Some(stream) = streams.and_then(|streams| streams.get(client)) {
            stream.relay.client_ended = true;
            stream.finish(&mut turn.nic);
        }
    }

    /// Everything that waited for a client has been written to it. Returns whether both connections have ended.
    pub(super) fn taken_by_client<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        client: StreamKey,
    ) -> bool {
        let Self { by_slot, batch } = self;
        let Turn { nic, .. } = turn;
        let streams = of(by_slot, service).map(|of| &mut of.streams);
        let Some(stream) = streams.and_then(|streams| streams.get(client)) else { return false };
        let relay = &mut stream.relay;
        if std::mem::take(&mut relay.holds_server) {
            batch.list_stream(service as u16, client, stream);
        }
        let relay = &mut stream.relay;
        if relay.server_ended && !relay.told_client {
            relay.told_client = true;
            nic.shutdown(client);
        }
        stream.is_finished()
    }

    /// Connections of one version of a service go on with the next one.
    pub(super) fn move_relays<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &Services,
        from: u16,
        to: u16,
    ) {
        let Self { by_slot, batch } = self;
        let Turn { stream_keys, .. } = turn;
        if !services[usize::from(from)].relays_streams() {
            return;
        }
        let next = by_slot.get_mut(usize::from(to)).and_then(Option::take);
        let Some(mut next) = next else { return };
        // They are listed again below.
        batch.held.take_all(from).for_each(drop);
        let former = of(by_slot, usize::from(from));
        let former = former.map(|upstream| &mut upstream.streams);
        let moved: Vec<Box<Stream>> = former.map_or_else(Vec::new, |streams| {
            streams.clients().filter_map(|client| streams.remove(client)).collect()
        });
        for mut stream in moved {
            stream_keys.set_upstream(stream.key, to);
            let client = stream.client.key;
            // Lists name it by its former service: those entries find nothing.
            if std::mem::take(&mut stream.is_ready) {
                batch.list_stream(to, client, &mut stream);
            }
            if stream.is_dirty {
                batch.to_write.push((to, client));
            }
            next.streams.put(stream);
        }
        by_slot[usize::from(to)] = Some(next);
    }
}

impl Upstreams {
    /// Reads a connection to an upstream server, and passes what it brings on to the client. `was_released`: it has waited for its tenant.
    pub(super) fn gather_relay<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        schedule: &mut Schedule,
        (service, client, was_released): (usize, StreamKey, bool),
        scratch: &mut [u8],
    ) {
        let Some(stream) = self.stream(service, client) else { return };
        let (to, key, is_up) = (stream.client, stream.key, stream.state == State::Up);
        let failed = stream.failed;
        if failed && !is_up {
            return self.end_relay(
                turn,
                services,
                clients,
                service,
                &to,
                DropReason::UpstreamRefused,
            );
        }
        if stream.relay.server_ended {
            // Told again, or it broke afterwards.
            if failed {
                self.end_relay(turn, services, clients, service, &to, DropReason::UpstreamRefused);
            }
            return;
        }
        if clients.tcp.unsent_of(&to) > 0 {
            stream.relay.holds_server = true;
            return;
        }
        if !schedule.allows(service as u16, Kind::Servers) {
            stream.is_ready = true;
            let Self { by_slot, batch } = self;
            let streams = of(by_slot, service);
            let Some(streams) = streams.map(|upstream| &mut upstream.streams) else { return };
            let is_held = |waiter| streams.is_held(waiter);
            batch.held.hold(service as u16, (client, to.generation), was_released, is_held);
            return;
        }
        match turn.nic.read(key, &mut scratch[..CHUNK_BYTES]) {
            Read::Empty => {}
            Read::Broken => {
                self.end_relay(turn, services, clients, service, &to, DropReason::UpstreamRefused)
            }
            // A host reports a reset once. If a write was told of it, reads find only an end.
            Read::Closed if failed => {
                self.end_relay(turn, services, clients, service, &to, DropReason::UpstreamRefused);
            }
            Read::Closed => {
                if let Some(stream) = self.stream(service, client) {
                    stream.relay.server_ended = true;
                }
                clients.tcp.relay_written(turn, services, self, client);
            }
            Read::Bytes(count) => {
                turn.busy();
                self.relay_back(
                    turn,
                    services,
                    clients,
                    schedule,
                    (service, &to),
                    &scratch[..count],
                );
                if count == CHUNK_BYTES {
                    let Self { by_slot, batch } = self;
                    let upstream = of(by_slot, service);
                    if let Some(stream) = upstream.and_then(|of| of.streams.get(client)) {
                        batch.list_stream(service as u16, client, stream);
                    }
                }
            }
        }
    }

    /// Shows the chain a chunk of the server, and passes it on.
    fn relay_back<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        schedule: &mut Schedule,
        (service, to): (usize, &ReplyTo),
        chunk: &[u8],
    ) {
        let number = clients.tcp.take_number(to);
        let share = &mut services[service];
        share.count_received(1);
        let Some(mut chain) = share.chain.take() else {
            let taken = Taken { messages: 1, bytes: chunk.len() as u64, function_ns: 0 };
            schedule.charge(service, Kind::Servers, taken);
            return clients.tcp.relay_to_client(turn, services, self, to, chunk);
        };
        let request = RequestId { origin: Origin::Client(*to), number };
        let (outcome, bytes) =
            chain.decide_chunk(Direction::Replies, &request, chunk, &|| turn.clock_ns());
        let lost = match outcome {
            Outcome::Drop(reason) => Some(reason),
            Outcome::Pass | Outcome::Reply | Outcome::Deliver | Outcome::Steer(_) => {
                clients.tcp.relay_to_client(turn, services, self, to, bytes);
                None
            }
        };
        chain.clear_chunk();
        let share = &mut services[service];
        share.chain = Some(chain);
        let function_ns = share.take_function_ns();
        let taken = Taken { messages: 1, bytes: chunk.len() as u64, function_ns };
        schedule.charge(service, Kind::Servers, taken);
        if let Some(reason) = lost {
            share.count_lost(reason, 1);
            clients.tcp.close_connection(turn, services, self, to.key, Close::Reset);
        }
    }

    /// The connection to the upstream server has ended before its time: so does the client's.
    pub(super) fn end_relay<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        to: &ReplyTo,
        reason: DropReason,
    ) {
        let now_ns = turn.now_ns;
        let Some(stream) = self.take_stream(turn, services, service, to.key) else { return };
        let share = &mut services[service];
        share.count_lost(reason, stream.unanswered);
        if stream.state != State::Up {
            share.count_received(1);
            share.count_lost(reason, 1);
            if let Some(upstream) = of(&mut self.by_slot, service) {
                upstream.streams.back_off.failed(now_ns);
            }
        }
        clients.tcp.end_relayed(turn, services, self, to, reason);
    }
}

impl UpstreamBatch {
    /// What a relayed connection has to do after a write.
    pub(super) fn relay_written<N: Nic>(&mut self, nic: &mut N, stream: &mut Stream) {
        stream.finish(nic);
        if stream.is_finished() || stream.holds_client && stream.pipeline.unwritten() == 0 {
            stream.holds_client = false;
            self.resumed.push(stream.client.key);
        }
    }
}
