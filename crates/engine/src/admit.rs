//! Inhale: from the network and the other workers into RX rings.

use mqueue::abi::{self, SlotHeader};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer};
use wire::DropReason;
use wire::framing::{ErrorReply, Expects, Parsed};
use wire::nic::{Close, Nic, Read, StreamKey};
use wire::session::Origin;

use crate::control::message::{Accepted, ControlMessage};
use crate::endpoint::peer::{ANY, ENVELOPE_BYTES, Envelope};
use crate::endpoint::ports::NO_SERVICE;
use crate::endpoint::tcp::connection::{Connection, Outcome, Reading};
use crate::service::dispatch::Route;
use crate::service::share::ServiceShare;
use crate::worker::Worker;

/// Connections accepted from one listener in a turn.
const ACCEPT_MAX: usize = 32;

/// A request longer than this in bytes that found no credit, and is looked at again where it waits, is not copied again every
/// turn…
pub(crate) const RETRY_BYTES: u32 = 4096;
/// … but only after this long.
pub(crate) const RETRY_NS: u64 = 50_000;

/// Between two log lines about connections that were shed.
const SHED_REPORT_NS: u64 = 10_000_000_000;

/// A message on its way in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) origin: Origin,
    /// See [`wire::session::Request::number`].
    pub(crate) number: u64,
    pub(crate) expects: Expects,
    pub(crate) received_ns: u64,
    pub(crate) flow: u64,
    /// `Some`: handed over by another worker, for this mqueue or [`ANY`].
    pub(crate) target: Option<u32>,
}

/// The bytes of a message on its way in, wherever they are: whoever takes it copies them once.
pub(crate) trait Message {
    fn len(&self) -> usize;

    /// For whoever looks at them; what is taken afterwards is what was looked at.
    fn bytes(&mut self) -> &[u8];

    /// Copies them into a ring.
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError>;
}

impl Message for &[u8] {
    #[inline]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    #[inline]
    fn bytes(&mut self) -> &[u8] {
        self
    }

    #[inline(always)]
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError> {
        ring.push(head, self)
    }
}

/// The message that a doorbell ring shows, in its slot.
pub(crate) struct Shown<'a> {
    pub(crate) ring: &'a Consumer<MappedMemory>,
    pub(crate) header: SlotHeader,
    /// Room for it.
    pub(crate) scratch: &'a mut [u8],
    /// Its bytes are in `scratch`.
    pub(crate) copied: bool,
}

impl Message for Shown<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.header.len as usize
    }

    // Always inline: what it is called on is then nowhere in memory.
    #[inline(always)]
    fn bytes(&mut self) -> &[u8] {
        let bytes = &mut self.scratch[..self.header.len as usize];
        if !self.copied {
            let arrived = self.ring.copy_out(&self.header, bytes);
            debug_assert!(arrived, "doorbell rings pause whole messages");
            self.copied = true;
        }
        bytes
    }

    #[inline(always)]
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError> {
        if !self.copied && ring.push_from(head, self.ring, &self.header) {
            return Ok(());
        }
        ring.push(head, self.bytes())
    }
}

/// Why a message did not get into an mqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// For good.
    Drop(DropReason),
    /// For now: a stream keeps it, a datagram is dropped for this reason.
    Retry(DropReason),
}

impl<N: Nic> Worker<N> {
    /// Finds an mqueue for a message and writes it there, or hands it to the worker that owns it.
    // Always inline, and without a loop: what an arrival and a message say then goes to where it stays, not through memory,
    // and nothing is made ready that only other ways need.
    #[inline(always)]
    pub(crate) fn submit(
        &mut self,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        let share = &mut self.services[service];
        let len = message.len();
        if len > share.max_message_bytes {
            return Err(Refusal::Drop(DropReason::TooLong));
        }
        if arrival.target.is_none()
            && let Some(mqueue) = share.goes_on(len)
        {
            match share.accept(mqueue, arrival, message) {
                Ok(()) => return Ok(()),
                Err(reason) => {
                    if let Some(refusal) = share.refusal(mqueue, len, reason) {
                        return Err(refusal);
                    }
                }
            }
        }
        self.submit_anew(service, arrival, message)
    }

    /// [`Self::submit`] where no run goes on.
    #[inline(never)]
    fn submit_anew(
        &mut self,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        let share = &mut self.services[service];
        let len = message.len();
        loop {
            let looked_at = if share.dispatcher.needs_key() { message.bytes() } else { &[] };
            let route = share.route(looked_at, len, arrival.flow, arrival.target);
            let there = match route {
                Route::Local(mqueue) => {
                    let Err(reason) = share.accept(mqueue, arrival, message) else { return Ok(()) };
                    match share.refusal(mqueue, len, reason) {
                        Some(refusal) => return Err(refusal),
                        None => continue,
                    }
                }
                Route::Shed(reason) => {
                    return Err(match share.shed_reason(reason) {
                        DropReason::NoCredit => Refusal::Retry(DropReason::NoCredit),
                        reason => Refusal::Drop(reason),
                    });
                }
                Route::AnyOf { worker } => (worker, ANY),
                Route::Remote { worker, mqueue } => (worker, mqueue),
            };
            return self.hand_over(service, arrival, message.bytes(), there);
        }
    }

    /// A message for an mqueue of another worker.
    #[cold]
    fn hand_over(
        &mut self,
        service: usize,
        arrival: &Arrival,
        payload: &[u8],
        (worker, mqueue): (u32, u32),
    ) -> Result<(), Refusal> {
        let Arrival { expects, origin, number, .. } = *arrival;
        let envelope = Envelope { service: service as u16, mqueue, expects, origin, number };
        let Some(link) = &mut self.links[worker as usize][service] else {
            return Err(Refusal::Retry(DropReason::HandoverFull));
        };
        match link.request(&envelope, arrival.received_ns, payload, &mut self.envelope) {
            Ok(()) => {
                let share = &mut self.services[service];
                share.counters.handed_out.one();
                let credit = &mut share.other_credit[worker as usize];
                *credit = credit.saturating_sub(1);
                Ok(())
            }
            Err(LoanError::Full) => Err(Refusal::Retry(DropReason::HandoverFull)),
            Err(_) => Err(Refusal::Drop(DropReason::TooLong)),
        }
    }

    /// Takes the replies that other workers hand back: they only need room on a connection.
    pub(crate) fn take_replies(&mut self) {
        for worker in 0..self.links.len() {
            self.take_from(worker, Self::take_reply);
        }
    }

    /// Takes the requests that other workers handed over, each round those of another one first.
    pub(crate) fn take_handed_over(&mut self, round: usize) {
        let count = self.links.len();
        let first = round % count;
        for worker in (first..count).chain(0..first) {
            self.take_from(worker, Self::take_request);
        }
    }

    /// All that `take` takes of what another worker has for this one.
    fn take_from(&mut self, worker: usize, take: impl Fn(&mut Self, usize, usize) -> bool) {
        for service in 0..self.links[worker].len() {
            let mut took = false;
            while take(self, worker, service) {
                took = true;
            }
            if took {
                self.busy();
                self.set_settled(false);
                self.services[service].revoke_votes();
                if let Some(link) = &mut self.links[worker][service] {
                    link.replies_in.release();
                    link.requests_in.release();
                }
            }
        }
    }

    fn take_reply(&mut self, worker: usize, service: usize) -> bool {
        let Some(link) = &mut self.links[worker][service] else { return false };
        let Ok(Some(header)) = link.replies_in.peek() else { return false };
        let mut message = std::mem::take(&mut self.scratch);
        let bytes = &mut message[..header.len as usize];
        let arrived = link.replies_in.copy_out(&header, bytes);
        debug_assert!(arrived, "doorbell rings pause whole messages");
        link.replies_in.advance();
        let (envelope, payload) = bytes.split_at(ENVELOPE_BYTES);
        let envelope = Envelope::decode(envelope.try_into().expect("split there"));
        if header.kind == abi::kind::DROP {
            // Written by a worker of this process, so the code is known.
            let reason = DropReason::from_code(header.status).unwrap_or(DropReason::MqueueDead);
            self.settle_lost(service, &envelope.origin, envelope.number, envelope.expects, reason);
        } else {
            self.services[service].counters.replies_handed_in.one();
            self.deliver(service, &envelope.origin, envelope.number, envelope.expects, payload);
        }
        self.scratch = message;
        true
    }

    fn take_request(&mut self, worker: usize, service: usize) -> bool {
        let Some(link) = &mut self.links[worker][service] else { return false };
        let Ok(Some(header)) = link.requests_in.peek() else { return false };
        if self.now_ns < link.retry_ns {
            return false;
        }
        let mut message = std::mem::take(&mut self.scratch);
        let bytes = &mut message[..header.len as usize];
        let arrived = link.requests_in.copy_out(&header, bytes);
        debug_assert!(arrived, "doorbell rings pause whole messages");
        let (envelope, mut payload) = bytes.split_at(ENVELOPE_BYTES);
        let envelope = Envelope::decode(envelope.try_into().expect("split there"));
        let arrival = Arrival {
            origin: envelope.origin,
            number: envelope.number,
            expects: envelope.expects,
            received_ns: header.tag,
            flow: 0,
            target: Some(envelope.mqueue),
        };
        let waited_ns = self.now_ns.saturating_sub(header.tag);
        let overdue = waited_ns > self.services[service].timeout_ns;
        let outcome = match self.submit(service, &arrival, &mut payload) {
            // A stream's or memory client's request waits at the head of this ring until there is credit or no time.
            Err(Refusal::Retry(_)) if self.services[service].is_expired() => {
                Err(Some(DropReason::DrainTimeout))
            }
            Err(Refusal::Retry(_)) if overdue => Err(Some(DropReason::RequestTimeout)),
            Err(Refusal::Retry(reason)) => match envelope.origin {
                Origin::Stream { .. } | Origin::Memory { .. } => Err(None),
                Origin::Datagram { .. } => Err(Some(reason)),
            },
            Err(Refusal::Drop(reason)) => Err(Some(reason)),
            Ok(()) => Ok(()),
        };
        self.scratch = message;
        let Some(link) = &mut self.links[worker][service] else { return false };
        if outcome == Err(None) {
            if header.len > RETRY_BYTES {
                link.retry_ns = self.now_ns + RETRY_NS;
            }
            return false;
        }
        link.requests_in.advance();
        self.services[service].counters.handed_in.one();
        if let Err(Some(reason)) = outcome {
            self.drop_request(service, &envelope.origin, envelope.number, envelope.expects, reason);
        }
        true
    }

    /// The end of a drain: what other workers handed over and nobody took is dropped.
    pub(crate) fn discard_handed_over(&mut self) {
        for link in self.links.iter_mut().flatten().flatten() {
            for (ring, replies) in [(&mut link.replies_in, true), (&mut link.requests_in, false)] {
                while let Ok(Some(header)) = ring.peek() {
                    let mut envelope = [0; ENVELOPE_BYTES];
                    let bytes = &mut self.scratch[..header.len as usize];
                    let arrived = ring.copy_out(&header, bytes);
                    debug_assert!(arrived, "doorbell rings pause whole messages");
                    envelope.copy_from_slice(&bytes[..ENVELOPE_BYTES]);
                    ring.advance();
                    let service = Envelope::decode(&envelope).service as usize;
                    let counters = &self.services[service].counters;
                    match (replies, header.kind) {
                        (true, abi::kind::DROP) => continue,
                        (true, _) => counters.replies_handed_in.one(),
                        (false, _) => counters.handed_in.one(),
                    }
                    counters.drop_one(DropReason::DrainTimeout);
                }
                ring.release();
            }
        }
    }

    pub(crate) fn accept_connections(&mut self, port: u16) {
        for _ in 0..ACCEPT_MAX {
            if self.draining {
                return;
            }
            let Some((socket, peer)) = self.nic.accept(port) else { return };
            self.busy();
            let service = self.ports[port as usize].service as usize;
            if self.fabric.connections() >= self.connections_max as usize {
                // Dropping the socket closes it.
                self.services[service].counters.drop_one(DropReason::ConnectionLimit);
                continue;
            }
            let worker = self.fabric.assign_connection(self.index);
            let accepted = Accepted { port, socket, peer };
            if worker == self.index {
                self.adopt_connection(accepted);
            } else {
                self.fabric.post_from_worker(worker, ControlMessage::Connection(accepted));
            }
        }
        self.ports[port as usize].ready = true;
    }

    /// Takes an accepted connection, perhaps from another worker.
    pub(crate) fn adopt_connection(&mut self, accepted: Accepted<N::Socket>) {
        let Accepted { port, socket, peer } = accepted;
        // The port may have left meanwhile.
        let service = self.ports.get(usize::from(port)).map_or(NO_SERVICE, |port| port.service);
        let leaves = |share: &ServiceShare| share.leaving.is_some();
        if self.draining || self.services.get(usize::from(service)).is_none_or(leaves) {
            // Its service goes or has gone meanwhile, which no limit is to blame for; dropping the socket closes it.
            return self.fabric.release_connection(self.index);
        }
        let share = &self.services[service as usize];
        let (ordered, now_ns) = (share.ordered, self.now_ns);
        // Workers that accept at the same moment may pass the engine's limit by a few; no worker may,
        // for the keys behind its connections belong to its backends.
        if self.connections.open_count() >= self.connections_max as usize {
            // Dropping the socket closes it.
            return self.refuse_connection(service);
        }
        let key = self.connections.open(service, ordered, self.pipelined, now_ns);
        // Each may be listed, and while it is written listed once more: listing allocates nothing.
        let entries = self.connections.len();
        self.to_read.reserve(entries.saturating_sub(self.to_read.len()));
        self.to_write.reserve((2 * entries).saturating_sub(self.to_write.len()));
        if self.nic.adopt(socket, key).is_err() {
            self.connections.close(key, &mut self.pool);
            return self.refuse_connection(service);
        }
        let number = self.ports[port as usize].number;
        let connection = self.connections.at(key).expect("just opened");
        connection.flow = wire::admission::flow_hash(peer, number);
        connection.readable = true;
        self.services[service as usize].counters.connections_accepted.one();
        self.list_to_read(key);
    }

    /// Takes over what the network counts itself, and says now and then that it turned clients away.
    pub(crate) fn take_counts_below(&mut self) {
        let below = self.nic.counters();
        let shed = below.shed_connections - self.counters.shed_connections.value();
        self.counters.set_below(&below);
        if shed > 0 && self.now_ns >= self.shed_report_ns {
            self.shed_report_ns = self.now_ns + SHED_REPORT_NS;
            tracing::warn!(
                shed = below.shed_connections,
                "no descriptor is free, so connections are reset: raise `ulimit -n` or lower \
                 limits.connections"
            );
        }
    }

    /// A connection that was seated here is not adopted.
    fn refuse_connection(&mut self, service: u16) {
        self.fabric.release_connection(self.index);
        self.services[service as usize].counters.drop_one(DropReason::ConnectionLimit);
    }

    /// One read from every connection that may have bytes; one more try for those that wait.
    pub(crate) fn read_streams(&mut self) {
        let mut listed = std::mem::take(&mut self.to_read);
        let mut kept = 0;
        for index in 0..listed.len() {
            let key = listed[index];
            if self.read_stream(key) {
                listed[kept] = key;
                kept += 1;
            } else if let Some(connection) = self.connections.at(key) {
                connection.listed = false;
            }
        }
        listed.truncate(kept);
        // Connections listed meanwhile (none today) follow.
        listed.append(&mut self.to_read);
        self.to_read = listed;
    }

    /// Whether the connection stays listed.
    fn read_stream(&mut self, key: StreamKey) -> bool {
        let Some(connection) = self.connections.at(key) else { return false };
        let service = connection.service as usize;
        if self.services[service].is_paused() && connection.reading != Reading::Ended {
            // It is listed again when the pause ends.
            return false;
        }
        if connection.reading == Reading::Stalled {
            connection.reading = Reading::Open;
            let input = std::mem::take(&mut connection.input);
            let taken = self.take_messages(key, &input);
            self.keep_input(key, input, taken);
        }
        let Some(connection) = self.connections.at(key) else { return false };
        match connection.reading {
            // Waiting for credit: looked at every turn. Waiting for a place in its window: write_stream
            // lists it again when one becomes free, and the worker may sleep meanwhile.
            Reading::Stalled => return connection.may_take(),
            Reading::Ended => {
                self.close_if_done(key);
                return false;
            }
            Reading::Open if !connection.readable => return false,
            Reading::Open => {}
        }
        let bytes_max = self.read_bytes(service);
        let mut scratch = std::mem::take(&mut self.scratch);
        let read = self.nic.read(key, &mut scratch[..bytes_max]);
        let stays = self.take_read(key, read, &scratch, bytes_max);
        self.scratch = scratch;
        stays
    }

    fn take_read(&mut self, key: StreamKey, read: Read, bytes: &[u8], bytes_max: usize) -> bool {
        let Some(connection) = self.connections.at(key) else { return false };
        match read {
            Read::Bytes(count) => {
                self.work_on(key, &bytes[..count]);
                let Some(connection) = self.connections.at(key) else { return false };
                // A short read has emptied the socket: an event will tell when there is more.
                connection.readable = count == bytes_max && !mutants::on("read_once");
                match connection.reading {
                    Reading::Open => connection.readable,
                    Reading::Stalled => {
                        connection.readable = true;
                        true
                    }
                    Reading::Ended => {
                        self.close_if_done(key);
                        false
                    }
                }
            }
            Read::Empty => {
                connection.readable = false;
                false
            }
            Read::Closed => {
                connection.reading = Reading::Ended;
                self.close_if_done(key);
                false
            }
            Read::Broken => {
                self.close_connection(key, Close::Reset);
                false
            }
        }
    }

    /// Parses fresh bytes, behind those that are kept from earlier reads.
    fn work_on(&mut self, key: StreamKey, fresh: &[u8]) {
        self.busy();
        let connection = self.connections.at(key).expect("the caller looked");
        if connection.input.is_empty() {
            let taken = self.take_messages(key, fresh);
            let Some(connection) = self.connections.at(key) else { return };
            if taken < fresh.len() && connection.reading != Reading::Ended {
                connection.input = self.pool.take();
                connection.input.extend_from_slice(&fresh[taken..]);
            }
        } else {
            let mut input = std::mem::take(&mut connection.input);
            input.extend_from_slice(fresh);
            let taken = self.take_messages(key, &input);
            self.keep_input(key, input, taken);
        }
    }

    fn keep_input(&mut self, key: StreamKey, mut input: Vec<u8>, taken: usize) {
        input.drain(..taken);
        match self.connections.at(key) {
            Some(connection) if connection.reading != Reading::Ended => {
                connection.input = input;
                connection.trim_input(&mut self.pool);
            }
            _ => self.pool.give(input),
        }
    }

    /// Takes messages off the front of `bytes` until they are used up, incomplete, or have to wait.
    /// Returns how many bytes are done with.
    fn take_messages(&mut self, key: StreamKey, bytes: &[u8]) -> usize {
        let mut taken = 0;
        loop {
            let Some(connection) = self.connections.at(key) else { return taken };
            if connection.reading != Reading::Open || taken == bytes.len() {
                return taken;
            }
            if !connection.may_take() {
                connection.reading = Reading::Stalled;
                return taken;
            }
            let service = connection.service as usize;
            let share = &self.services[service];
            let rest = &bytes[taken..];
            let before = connection.parser;
            match share.framing.parse_request(&mut connection.parser, rest, share.max_message_bytes)
            {
                Ok(Parsed::Incomplete { .. }) => return taken,
                Ok(Parsed::Message { consumed, start, end, expects }) => {
                    connection.crlf = consumed - end == b"\r\n".len();
                    if !self.take_message(key, &rest[start..end], expects) {
                        // Held: parsed again when its turn comes.
                        if let Some(connection) = self.connections.at(key) {
                            connection.parser = before;
                            connection.reading = Reading::Stalled;
                        }
                        return taken;
                    }
                    taken += consumed;
                }
                Ok(Parsed::Refused { consumed, error }) => {
                    taken += consumed;
                    share.counters.drop_one(DropReason::BadFraming);
                    let sequence = connection.take();
                    let outcome = match share.framing.error_reply(error.into()) {
                        Some(bytes) => Outcome::Error(bytes),
                        None => Outcome::Close(b""),
                    };
                    self.settle(key, sequence, outcome);
                }
                Ok(Parsed::Quit { consumed }) => {
                    taken += consumed;
                    connection.reading = Reading::Ended;
                }
                Err(error) => {
                    self.refuse_stream(key, error);
                    return taken;
                }
            }
        }
    }

    /// A stream that cannot be understood any further: the protocol's error reply, in its turn, then
    /// the end.
    fn refuse_stream(&mut self, key: StreamKey, error: wire::framing::FramingError) {
        let connection = self.connections.at(key).expect("the caller looked");
        let share = &self.services[connection.service as usize];
        match error.drop_reason() {
            // The message was recognised, and it is one: it counts as received.
            DropReason::TooLong => {
                share.counters.received.one();
                share.counters.drop_one(DropReason::TooLong);
            }
            _ => share.counters.drop_one(DropReason::BadFraming),
        }
        connection.reading = Reading::Ended;
        let last = share.framing.error_reply(error.into()).unwrap_or_default();
        let sequence = connection.take();
        self.settle(key, sequence, Outcome::Close(last));
    }

    /// Submits one message of a connection. False: it has to wait.
    fn take_message(&mut self, key: StreamKey, mut payload: &[u8], expects: Expects) -> bool {
        let connection = self.connections.at(key).expect("the caller looked");
        let service = connection.service as usize;
        let origin = Origin::Stream { worker: self.index, key, generation: connection.generation };
        let arrival = Arrival {
            origin,
            number: connection.next(),
            expects,
            received_ns: self.now_ns,
            flow: connection.flow,
            target: None,
        };
        let refusal = match self.submit(service, &arrival, &mut payload) {
            Err(Refusal::Retry(_)) => {
                let held_counts = u64::from(mutants::on("count_twice"));
                self.services[service].counters.received.add(held_counts);
                return false;
            }
            Err(Refusal::Drop(reason)) => Some(reason),
            Ok(()) => None,
        };
        let now_ns = self.now_ns;
        let replies = self.services[service].replies;
        let counters = &self.services[service].counters;
        counters.received.one();
        counters.received_bytes.add(payload.len() as u64);
        let connection = self.connections.at(key).expect("submit does not close");
        connection.last_message_ns = now_ns;
        let sequence = connection.take();
        let silent = expects == Expects::Nothing || replies == crate::topology::Replies::None;
        if silent {
            // Its place in the order of replies is already empty, whatever becomes of it.
            self.settle(key, sequence, Outcome::Nothing);
        }
        if let Some(reason) = refusal {
            self.services[service].counters.drop_one(reason);
            if !silent {
                self.settle_lost(service, &origin, sequence, expects, reason);
            }
        }
        true
    }

    /// Draining one service, or all: whole messages that wait for credit are dropped, everything else is
    /// not read.
    pub(crate) fn stop_reading(&mut self, service: Option<u16>) {
        for key in 0..self.connections.len() as StreamKey {
            let of_service = |c: &&mut Connection| service.is_none_or(|of| c.service == of);
            let Some(connection) = self.connections.at(key).filter(of_service) else { continue };
            let share = &self.services[connection.service as usize];
            connection.reading = Reading::Ended;
            let input = std::mem::take(&mut connection.input);
            let (parser, max) = (&mut connection.parser, share.max_message_bytes);
            let mut rest = &input[..];
            while let Ok(Parsed::Message { consumed, .. }) =
                share.framing.parse_request(parser, rest, max)
            {
                rest = &rest[consumed.max(1).min(rest.len())..];
                share.counters.received.one();
                share.counters.drop_one(DropReason::Draining);
                if rest.is_empty() {
                    break;
                }
            }
            self.pool.give(input);
            self.close_if_done(key);
        }
    }

    /// The protocol's error reply to a lost request, or the end of the connection.
    pub(crate) fn outcome_of_loss(&self, service: usize, reason: DropReason) -> Outcome {
        match self.services[service].framing.error_reply(ErrorReply::from(reason)) {
            Some(bytes) => Outcome::Error(bytes),
            None => Outcome::Close(b""),
        }
    }
}
