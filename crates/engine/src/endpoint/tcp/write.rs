//! Streams out: outcomes in the order of their requests, one write to every connection with output, and the end of
//! connections.

use wire::DropReason;
use wire::error_reply::ErrorReply;
use wire::framing::Expects;
use wire::nic::{Close, Nic, StreamKey, Written};
use wire::session::{BundleRequests, Origin, ReplyTo};

use super::TcpConnections;
use super::connection::{Outcome, Reading};
use super::terms::ErrorBytes;
use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::turn::Turn;
use crate::service::bundle::table::Completion;
use crate::service::services::Services;

impl TcpConnections {
    /// A reply for a connection; its request is no longer in flight.
    pub(super) fn deliver_payload(
        &mut self,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        payload: &[u8],
    ) {
        let Awaited { to, number, expects } = *request;
        let share = &services[service];
        let connection = self.table.in_generation(to.key, to.generation);
        let Some(connection) = connection.filter(|connection| !connection.closing) else {
            return share.count_lost(DropReason::ClientGone, 1);
        };
        let framing = share.framing.as_client_writes(connection.crlf);
        if expects == Expects::ReplyOrNothing && payload.is_empty() {
            // The kernel sends no reply: nothing is sent, and the place in the order is complete.
            share.count_consumed(1);
            return self.record(services, to.key, number, Outcome::Nothing);
        }
        if connection.is_due(number) {
            let len = payload.len() as u32;
            let encode = |out: &mut Vec<u8>| framing.encode_reply(payload, out);
            let Self { table, pool, .. } = self;
            let replied = table.change(to.key, |c| c.reply_now(len, pool, encode));
            if replied.is_some_and(|replied| replied.is_err()) {
                share.count_lost(DropReason::ReplyUnframable, 1);
                return self.deliver_loss(services, service, request, DropReason::ReplyUnframable);
            }
            return self.recorded(services, to.key, service);
        }
        if self.table.early_bytes + payload.len() > self.limits.early_bytes {
            share.count_lost(DropReason::ReplyMemory, 1);
            return self.deliver_loss(services, service, request, DropReason::ReplyMemory);
        }
        let mut encoded = self.pool.take();
        if framing.encode_reply(payload, &mut encoded).is_err() {
            self.pool.give(encoded);
            share.count_lost(DropReason::ReplyUnframable, 1);
            return self.deliver_loss(services, service, request, DropReason::ReplyUnframable);
        }
        let outcome = Outcome::Reply { encoded, payload: payload.len() as u32 };
        self.record(services, to.key, number, outcome);
    }

    /// Writes replies of a completion to their connection, those that are due as one piece. Returns the messages that have an outcome; the others have
    /// to be delivered one by one.
    pub(crate) fn deliver_bundle<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        mqueue: u32,
        completion: &Completion,
    ) -> u64 {
        let share = &mut services[service];
        let Some(bundle) = share.sessions.find_bundle(completion.token, mqueue) else { return 0 };
        let BundleRequests { origin, number, .. } = *bundle.requests();
        let Origin::Client(to) = origin else { return 0 };
        let len = completion.replies.len();
        let mut decided = 0_u64;
        while decided != completion.messages {
            let left = completion.messages & !decided;
            let first = left.trailing_zeros();
            let count = (left >> first).trailing_ones();
            let connection = self.table.in_generation(to.key, to.generation);
            let Some(connection) = connection.filter(|c| !c.closing) else { break };
            if !connection.is_due(number.wrapping_add(first.into())) {
                break;
            }
            let framing = share.framing.as_client_writes(connection.crlf);
            let replies = (mqueue, completion, completion.place_of(first));
            let scratch = &mut turn.scratch;
            let encode =
                |out: &mut Vec<u8>| share.encode_replies(replies, count, framing, (out, scratch));
            let Self { table, pool, .. } = self;
            let replied = table.change(to.key, |c| c.reply_many((count, len), pool, encode));
            let Some(Ok(())) = replied else { break };
            decided |= (u64::MAX >> (64 - count)) << first;
        }
        share.end_messages(completion.token, mqueue, decided);
        if decided != 0 {
            self.recorded(services, to.key, service);
        }
        decided
    }

    /// What a client gets for a request that is lost: the error reply of the protocol or of the service, or the end of the connection.
    pub(super) fn loss_outcome(
        &self,
        services: &Services,
        service: usize,
        crlf: bool,
        what: ErrorReply,
    ) -> Outcome {
        let framing = services[service].framing;
        match self.terms[service].error_reply(framing, crlf, what) {
            Some(bytes) => Outcome::Error(bytes),
            None => Outcome::Close(ErrorBytes::NONE),
        }
    }

    /// A request of a connection was lost, and counted.
    pub(super) fn deliver_loss(
        &mut self,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        reason: DropReason,
    ) {
        let Awaited { to, number, expects } = *request;
        let kernel_choice = matches!(reason, DropReason::KernelDrop | DropReason::BadLength);
        let connection = self.table.in_generation(to.key, to.generation);
        let Some(connection) = connection.filter(|connection| !connection.closing) else { return };
        let crlf = connection.crlf;
        let outcome = if expects == Expects::ReplyOrNothing && kernel_choice {
            Outcome::Nothing
        } else {
            self.loss_outcome(services, service, crlf, reason.error_reply())
        };
        self.record(services, to.key, number, outcome);
    }

    /// A client's connection ends after the replies to what it has asked.
    pub(crate) fn end_after_replies(&mut self, services: &mut Services, to: &ReplyTo) {
        let connection = self.table.in_generation(to.key, to.generation);
        let Some(connection) = connection.filter(|connection| !connection.closing) else { return };
        connection.reading = Reading::Ended;
        let sequence = connection.take();
        self.record(services, to.key, sequence, Outcome::Close(ErrorBytes::NONE));
    }

    /// Bytes that wait for a client.
    pub(crate) fn unsent_of(&mut self, to: &ReplyTo) -> usize {
        let connection = self.table.in_generation(to.key, to.generation);
        connection.map_or(0, |connection| connection.unsent().len())
    }

    /// A connection whose requests found no room may be read again.
    pub(crate) fn readable_again(&mut self, key: StreamKey) {
        self.list_to_read(key);
    }

    /// Records an outcome on a connection.
    pub(super) fn record(
        &mut self,
        services: &mut Services,
        key: StreamKey,
        sequence: u64,
        outcome: Outcome,
    ) {
        let Some(connection) = self.table.at(key) else { return };
        let service = usize::from(connection.service);
        let Self { table, pool, .. } = self;
        table.change(key, |c| c.settle(sequence, outcome, pool));
        self.recorded(services, key, service);
    }

    /// After an outcome: the connection may have bytes to write, a free place, or may have to be closed.
    fn recorded(&mut self, services: &Services, key: StreamKey, service: usize) {
        let connection = self.table.at(key).expect("the caller looked");
        services[service].count_lost(DropReason::ClientGone, connection.take_lost());
        self.list_to_write(key);
    }

    /// One write.
    pub(super) fn write<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        key: StreamKey,
    ) {
        let Some(connection) = self.table.at(key) else { return };
        connection.dirty = false;
        let service = usize::from(connection.service);
        let unsent = connection.unsent();
        if !unsent.is_empty() || connection.owed_replies() > 0 {
            // A reply may have no bytes at all (`raw`, `fixed`): it is sent when it is due.
            let nothing = unsent.is_empty();
            match if nothing { Written::Bytes(0) } else { turn.nic.write(key, unsent) } {
                Written::Bytes(count) => {
                    let partial = count < unsent.len();
                    connection.blocked_since_ns = if partial { turn.now_ns.max(1) } else { 0 };
                    connection.last_message_ns = turn.now_ns;
                    let Self { table, pool, .. } = self;
                    let sent = table.change(key, |c| c.sent(count, pool)).unwrap_or_default();
                    let share = &services[service];
                    share.count_replied(sent.replies);
                    share.count_replied_bytes(sent.payload);
                    if count > 0 && partial {
                        // The host kernel may take the rest at once; if not, `Full` in the next turn ends this.
                        self.list_to_write(key);
                    }
                }
                Written::Full => {
                    if connection.blocked_since_ns == 0 {
                        connection.blocked_since_ns = turn.now_ns.max(1);
                    }
                }
                Written::Broken => {
                    return self.close_connection(turn, services, servers, key, Close::Reset);
                }
            }
        }
        self.close_if_done(turn, services, servers, key);
        // A message that waits may now have a place.
        if self.table.at(key).is_some_and(|c| c.reading == Reading::Stalled) {
            self.list_to_read(key);
        }
    }

    /// Closes a connection whose client sends nothing more and has no reply due.
    pub(super) fn close_if_done<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        key: StreamKey,
    ) {
        let Some(connection) = self.table.at(key) else { return };
        if services[usize::from(connection.service)].relays_streams() {
            return self.relay_written(turn, services, servers, key);
        }
        let flushed = connection.unsent().is_empty() || mutants::on("close_unflushed");
        let ended = connection.reading == Reading::Ended && connection.unsettled() == 0;
        if !flushed || !(connection.closing || ended) {
            return;
        }
        let (closing, service) = (connection.closing, usize::from(connection.service));
        // Commands without an answer go to an upstream server even if what follows them cannot be parsed. Where there are none, a
        // lost request without an error reply ends the connection at once.
        let at_once = closing && services[service].framing.fence().is_none();
        if at_once || !servers.delays_close(service, key) {
            self.close_connection(turn, services, servers, key, Close::Graceful);
        }
    }

    /// Closes a connection; replies that were ready are lost as `client_gone`. Requests in flight end when their
    /// replies arrive and find no client.
    pub(crate) fn close_connection<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        key: StreamKey,
        how: Close,
    ) {
        self.end_connection(turn, services, servers, key, how, DropReason::ClientGone);
    }

    /// Closes a connection whose waiting replies are lost for `reason`.
    pub(super) fn end_connection<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        key: StreamKey,
        how: Close,
        reason: DropReason,
    ) {
        let Some(connection) = self.table.at(key) else { return };
        let service = usize::from(connection.service);
        let relays = services[service].relays_streams();
        let is_whole =
            connection.unsent().is_empty() && (!relays || servers.is_relay_finished(service, key));
        let how = if is_whole { how } else { Close::Reset };
        let next = connection.arrival(turn.index, key, turn.now_ns);
        if let (Some(chain), Origin::Client(client)) =
            (services[service].chain.as_deref_mut(), next.origin)
        {
            chain.forget(&client, next.number);
        }
        if let Origin::Client(client) = next.origin {
            services[service].tell_gone(client, turn.now_ns);
        }
        if services[service].is_proxy() {
            servers.close_stream(turn, services, service, key);
        }
        let lost = self.table.close(key, &mut self.pool);
        turn.nic.close(key, how);
        turn.shared.release_connection(turn.index);
        let share = &services[service];
        share.end_connection();
        share.counters.connections_closed.one();
        share.count_lost(reason, lost);
    }
}
