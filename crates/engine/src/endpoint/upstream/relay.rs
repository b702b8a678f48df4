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

use super::UpstreamBatch;
use super::streams::{State, Stream};
use crate::base::topology::CHUNK_BYTES;
use crate::endpoint::set::Endpoints;
use crate::schedule::{Kind, Schedule, Taken};
use crate::turn::Turn;

/// Whether a client's connection can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relayed {
    /// Yes.
    Ready,
    /// Not before the server has taken what waits for it.
    Waits,
    /// The server refuses the connection.
    Refused,
}

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

impl<N: Nic> Turn<N> {
    /// Before a client's connection is read: it has one to the server.
    pub(crate) fn begin_relay(&mut self, service: usize, client: &ReplyTo) -> Relayed {
        if self.stream(service, client.key).is_none_or(|stream| stream.client != *client)
            && let Err(reason) = self.open_stream(service, client)
        {
            let share = &self.services[service];
            share.count_received(1);
            share.count_lost(reason, 1);
            return Relayed::Refused;
        }
        let Some(stream) = self.stream(service, client.key) else { return Relayed::Refused };
        stream.holds_client = stream.pipeline.unwritten() > 0;
        if stream.holds_client { Relayed::Waits } else { Relayed::Ready }
    }

    /// Passes a chunk of a client on, which is counted as received. What the server's host does not take waits. Returns why it is lost.
    pub(crate) fn relay_to_server(
        &mut self,
        service: usize,
        client: StreamKey,
        chunk: &[u8],
    ) -> Option<DropReason> {
        let Self { services, nic, .. } = self;
        let share = &mut services[service];
        let streams = share.upstream.as_deref_mut().map(|upstream| &mut upstream.streams);
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
    pub(crate) fn end_relay_input(&mut self, service: usize, client: StreamKey) {
        let share = &mut self.services[service];
        let streams = share.upstream.as_deref_mut().map(|upstream| &mut upstream.streams);
        if let Some(stream) = streams.and_then(|streams| streams.get(client)) {
            stream.relay.client_ended = true;
            stream.finish(&mut self.nic);
        }
    }

    /// Everything that waited for a client has been written to it. Returns whether both connections have ended.
    pub(crate) fn relay_taken(&mut self, service: usize, client: StreamKey) -> bool {
        let Self { services, nic, upstream: batch, .. } = self;
        let streams = services[service].upstream.as_deref_mut().map(|of| &mut of.streams);
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

    /// Whether a client's connection, and the one to the server, have ended as they should.
    pub(crate) fn is_relay_finished(&mut self, service: usize, client: StreamKey) -> bool {
        self.stream(service, client).is_some_and(|stream| stream.is_finished())
    }

    /// Connections of one version of a service go on with the next one.
    pub(crate) fn move_relays(&mut self, from: u16, to: u16) {
        let Self { services, stream_keys, upstream: batch, .. } = self;
        if !services[usize::from(from)].relays_streams() {
            return;
        }
        let Some(mut next) = services[usize::from(to)].upstream.take() else { return };
        // They are listed again below.
        batch.held.take_all(from).for_each(drop);
        let former = services[usize::from(from)].upstream.as_deref_mut();
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
        services[usize::from(to)].upstream = Some(next);
    }
}

impl Endpoints {
    /// Reads a connection to an upstream server, and passes what it brings on to the client. `was_released`: it has waited for its tenant.
    pub(super) fn gather_relay<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        schedule: &mut Schedule,
        (service, client, was_released): (usize, StreamKey, bool),
        scratch: &mut [u8],
    ) {
        let Some(stream) = turn.stream(service, client) else { return };
        let (to, key, is_up) = (stream.client, stream.key, stream.state == State::Up);
        let failed = stream.failed;
        if failed && !is_up {
            return self.end_relay(turn, service, &to, DropReason::UpstreamRefused);
        }
        if stream.relay.server_ended {
            // Told again, or it broke afterwards.
            if failed {
                self.end_relay(turn, service, &to, DropReason::UpstreamRefused);
            }
            return;
        }
        if self.tcp.unsent_of(&to) > 0 {
            stream.relay.holds_server = true;
            return;
        }
        if !schedule.allows(service as u16, Kind::Servers) {
            stream.is_ready = true;
            let Turn { services, upstream: batch, .. } = turn;
            let streams = services[service].upstream.as_deref_mut();
            let Some(streams) = streams.map(|upstream| &mut upstream.streams) else { return };
            let is_held = |waiter| streams.is_held(waiter);
            batch.held.hold(service as u16, (client, to.generation), was_released, is_held);
            return;
        }
        match turn.nic.read(key, &mut scratch[..CHUNK_BYTES]) {
            Read::Empty => {}
            Read::Broken => self.end_relay(turn, service, &to, DropReason::UpstreamRefused),
            // A host reports a reset once. If a write was told of it, reads find only an end.
            Read::Closed if failed => {
                self.end_relay(turn, service, &to, DropReason::UpstreamRefused);
            }
            Read::Closed => {
                if let Some(stream) = turn.stream(service, client) {
                    stream.relay.server_ended = true;
                }
                self.tcp.relay_written(turn, client);
            }
            Read::Bytes(count) => {
                turn.busy();
                self.relay_back(turn, schedule, (service, &to), &scratch[..count]);
                if count == CHUNK_BYTES {
                    let Turn { services, upstream: batch, .. } = turn;
                    let upstream = services[service].upstream.as_deref_mut();
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
        schedule: &mut Schedule,
        (service, to): (usize, &ReplyTo),
        chunk: &[u8],
    ) {
        let number = self.tcp.take_number(to);
        let share = &mut turn.services[service];
        share.count_received(1);
        let Some(mut chain) = share.chain.take() else {
            let taken = Taken { messages: 1, bytes: chunk.len() as u64, function_ns: 0 };
            schedule.charge(service, Kind::Servers, taken);
            return self.tcp.relay_to_client(turn, to, chunk);
        };
        let request = RequestId { origin: Origin::Client(*to), number };
        let (outcome, bytes) =
            chain.decide_chunk(Direction::Replies, &request, chunk, &|| turn.clock_ns());
        let lost = match outcome {
            Outcome::Drop(reason) => Some(reason),
            Outcome::Pass | Outcome::Reply | Outcome::Deliver | Outcome::Steer(_) => {
                self.tcp.relay_to_client(turn, to, bytes);
                None
            }
        };
        chain.clear_chunk();
        let share = &mut turn.services[service];
        share.chain = Some(chain);
        let function_ns = share.take_function_ns();
        let taken = Taken { messages: 1, bytes: chunk.len() as u64, function_ns };
        schedule.charge(service, Kind::Servers, taken);
        if let Some(reason) = lost {
            share.count_lost(reason, 1);
            self.tcp.close_connection(turn, to.key, Close::Reset);
        }
    }

    /// The connection to the upstream server has ended before its time: so does the client's.
    pub(super) fn end_relay<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        to: &ReplyTo,
        reason: DropReason,
    ) {
        let now_ns = turn.now_ns;
        let Some(stream) = turn.take_stream(service, to.key) else { return };
        let share = &mut turn.services[service];
        share.count_lost(reason, stream.unanswered);
        if stream.state != State::Up {
            share.count_received(1);
            share.count_lost(reason, 1);
            if let Some(upstream) = share.upstream.as_deref_mut() {
                upstream.streams.back_off.failed(now_ns);
            }
        }
        self.tcp.end_relayed(turn, to, reason);
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
