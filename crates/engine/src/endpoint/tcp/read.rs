//! Streams in: one read from every connection with data, its framing, and one batch of requests.

use wire::DropReason;
use wire::framing::{Expects, FramingError, Parsed};
use wire::nic::{Close, Nic, Read, StreamKey};
use wire::session::{BUNDLE_MAX, Origin};

use super::TcpConnections;
use super::connection::{Outcome, Reading};
use super::terms::ErrorBytes;
use crate::admit::servers::Servers;
use crate::admit::{Admitted, Batch, Waits};
use crate::base::arrival::{Arrival, Awaited};
use crate::base::turn::Turn;
use crate::endpoint::held::Waiter;
use crate::schedule::{Kind, Schedule};
use crate::service::bundle::messages::Stream;
use crate::service::bundle::table::NoBundle;
use crate::service::chain::{Hooks, NoHooks};
use crate::service::services::Services;

/// Bytes of one read from a stream, at least.
const READ_BYTES_MIN: usize = 16 << 10;

/// What becomes of a connection that was listed.
pub(super) enum Next {
    /// It stays listed.
    Again,
    /// It waits for the tenant of this service.
    Hold(u16),
    Done,
}

impl Next {
    pub(super) fn again_if(stays: bool) -> Self {
        if stays { Self::Again } else { Self::Done }
    }
}

impl TcpConnections {
    /// One read from every connection that may have data; another try for those that wait.
    pub(super) fn read_connections<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
        if schedule.is_new_round() && self.to_read.len() > 1 {
            self.to_read.rotate_left(1);
        }
        let mut listed = std::mem::take(&mut self.to_read);
        // Of those that were held, as many as may have their turn in this one, in the order in which they came.
        let others = listed.len();
        let allows = |service| schedule.allows(service, Kind::Tcp);
        self.held.release(allows, |_, waiter| listed.push(waiter));
        let released = listed.len() - others;
        listed.rotate_right(released);
        let mut kept = 0;
        for index in 0..listed.len() {
            let waiter = listed[index];
            match self.read(turn, services, servers, schedule, waiter) {
                Next::Again => {
                    listed[kept] = waiter;
                    kept += 1;
                }
                Next::Hold(service) => {
                    let is_open = |(key, generation)| {
                        let found = self.table.in_generation(key, generation);
                        found.is_some_and(|connection| connection.service == service)
                    };
                    self.held.hold(service, waiter, index < released, is_open);
                }
                Next::Done => {
                    // Not the next client's with this key, which is listed for itself.
                    if let Some(connection) = self.table.in_generation(waiter.0, waiter.1) {
                        connection.listed = false;
                    }
                }
            }
        }
        self.held.end_turn(|service| schedule.is_shed(service, Kind::Tcp));
        listed.truncate(kept);
        // Connections listed meanwhile (none at present) follow.
        listed.append(&mut self.to_read);
        self.to_read = listed;
    }

    /// Reads a connection, unless its tenant has to wait.
    fn read<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        (key, generation): Waiter,
    ) -> Next {
        let Some(connection) = self.table.in_generation(key, generation) else {
            return Next::Done;
        };
        let service = usize::from(connection.service);
        if services[service].is_paused() && connection.reading != Reading::Ended {
            // It is listed again when the pause ends.
            return Next::Done;
        }
        if connection.reading != Reading::Ended && !schedule.allows(connection.service, Kind::Tcp) {
            return Next::Hold(connection.service);
        }
        if services[service].relays_streams() {
            return self.read_relayed(turn, services, servers, schedule, key);
        }
        Next::again_if(self.read_now(turn, services, servers, schedule, key))
    }

    /// Returns whether the connection stays listed.
    fn read_now<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        key: StreamKey,
    ) -> bool {
        let Some(connection) = self.table.at(key) else { return false };
        let service = usize::from(connection.service);
        if connection.reading == Reading::Stalled {
            connection.reading = Reading::Open;
            let input = std::mem::take(&mut connection.input);
            let taken = self.take_messages(turn, services, servers, schedule, key, &input);
            self.keep_input(key, input, taken);
        }
        let Some(connection) = self.table.at(key) else { return false };
        match connection.reading {
            // A message that waits for credit is tried every turn. A message that waits for a place in the window is
            // listed again by the write that frees a place, and the worker may sleep meanwhile.
            Reading::Stalled => {
                return connection.may_take() && !servers.holds_client(service, key);
            }
            Reading::Ended => {
                self.close_if_done(turn, services, servers, key);
                return false;
            }
            Reading::Open if !connection.readable => return false,
            Reading::Open => {}
        }
        let mut scratch = std::mem::take(&mut turn.scratch);
        let share = &services[service];
        let longest = share.framing.request_bytes_max(share.max_message_bytes);
        let bytes_max = longest.clamp(READ_BYTES_MIN, scratch.len());
        let read = turn.nic.read(key, &mut scratch[..bytes_max]);
        let stays = match read {
            Read::Bytes(count) => {
                let fills_buffer = count == bytes_max;
                self.take_bytes(
                    turn,
                    services,
                    servers,
                    schedule,
                    key,
                    (&scratch[..count], fills_buffer),
                )
            }
            Read::Empty => {
                connection.readable = false;
                false
            }
            Read::Closed => {
                connection.reading = Reading::Ended;
                self.close_if_done(turn, services, servers, key);
                false
            }
            Read::Broken => {
                self.close_connection(turn, services, servers, key, Close::Reset);
                false
            }
        };
        turn.scratch = scratch;
        stays
    }

    /// Processes the bytes of one read. Returns whether the connection stays listed.
    fn take_bytes<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        key: StreamKey,
        (bytes, fills_buffer): (&[u8], bool),
    ) -> bool {
        self.parse(turn, services, servers, schedule, key, bytes);
        let Some(connection) = self.table.at(key) else { return false };
        // A short read has emptied the socket: an event will report more data.
        connection.readable = fills_buffer && !mutants::on("read_once");
        match connection.reading {
            Reading::Open => connection.readable,
            Reading::Stalled => {
                connection.readable = true;
                true
            }
            Reading::Ended => {
                self.close_if_done(turn, services, servers, key);
                false
            }
        }
    }

    /// Parses new bytes, after those kept from earlier reads.
    fn parse<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        key: StreamKey,
        fresh: &[u8],
    ) {
        turn.busy();
        let connection = self.table.at(key).expect("the caller looked");
        if connection.input.is_empty() {
            let taken = self.take_messages(turn, services, servers, schedule, key, fresh);
            let Some(connection) = self.table.at(key) else { return };
            if taken < fresh.len() && connection.reading != Reading::Ended {
                connection.input = self.pool.take();
                connection.input.extend_from_slice(&fresh[taken..]);
            }
        } else {
            let mut input = std::mem::take(&mut connection.input);
            input.extend_from_slice(fresh);
            let taken = self.take_messages(turn, services, servers, schedule, key, &input);
            self.keep_input(key, input, taken);
        }
    }

    fn keep_input(&mut self, key: StreamKey, mut input: Vec<u8>, taken: usize) {
        input.drain(..taken);
        match self.table.at(key) {
            Some(connection) if connection.reading != Reading::Ended => {
                connection.input = input;
                connection.trim_input(&mut self.pool);
            }
            _ => self.pool.give(input),
        }
    }

    /// Takes messages from the front of `bytes`, as one batch, until the bytes are used up, incomplete, or have to
    /// wait. Returns the number of bytes that are finished.
    fn take_messages<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        key: StreamKey,
        bytes: &[u8],
    ) -> usize {
        let Some(connection) = self.table.at(key) else { return 0 };
        let service = usize::from(connection.service);
        match services[service].chain.take() {
            None => self.admit_messages(
                turn,
                services,
                servers,
                schedule,
                Batch::of_clients(service, NoHooks),
                (key, bytes),
            ),
            Some(chain) => self.admit_messages(
                turn,
                services,
                servers,
                schedule,
                Batch::of_clients(service, chain),
                (key, bytes),
            ),
        }
    }

    fn admit_messages<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        mut batch: Batch<H>,
        (key, bytes): (StreamKey, &[u8]),
    ) -> usize {
        let mut taken = 0;
        if !H::ATTACHED {
            self.prepare_bundles(turn, services, key, bytes);
        }
        loop {
            let shown = if H::ATTACHED {
                self.show(turn, services, &mut batch, key, &bytes[taken..])
            } else {
                0
            };
            // The number of messages that go one by one before bundles are tried again.
            let mut singles = if H::ATTACHED { usize::MAX } else { 0 };
            let mut count = 0;
            loop {
                if singles == 0 {
                    let (bundled, next) =
                        self.take_bundles(turn, services, &mut batch, key, &bytes[taken..]);
                    taken += bundled;
                    singles = next;
                }
                let Some(consumed) =
                    self.take_next(turn, services, servers, &mut batch, key, &bytes[taken..])
                else {
                    break;
                };
                taken += consumed;
                singles -= 1;
                if H::ATTACHED {
                    count += 1;
                    if count == shown {
                        break;
                    }
                }
            }
            if !H::ATTACHED || shown == 0 || count < shown {
                break;
            }
            batch.clear();
        }
        batch.end(services, schedule, Kind::Tcp);
        taken
    }

    /// Messages of one length at the front of `bytes` are dispatched as a burst if they can go as bundles.
    #[inline]
    fn prepare_bundles<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        key: StreamKey,
        bytes: &[u8],
    ) {
        let Some(connection) = self.table.at(key) else { return };
        let share = &mut services[usize::from(connection.service)];
        if !share.has_bundles() {
            return;
        }
        let most = connection.places() as usize;
        let alike = share.framing.requests_alike(bytes, share.max_message_bytes, most);
        // A burst in any case: its bundles may not be as long as those of the one before.
        share.begin_burst(alike.map_or(1, |alike| alike.count), turn.now_ns);
    }

    /// Takes messages of one length from the front of `rest` as bundles, as long as they can go as such. Returns how many bytes they have,
    /// and how many messages, at least one, have to go one by one before this is worth another try.
    #[inline]
    fn take_bundles<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        batch: &mut Batch<H>,
        key: StreamKey,
        rest: &[u8],
    ) -> (usize, usize) {
        let mut taken = 0;
        loop {
            let Some(connection) = self.table.at(key) else { return (taken, 1) };
            let share = &services[usize::from(connection.service)];
            let from = share.bundles_from();
            let has_bundles = share.has_bundles() && share.dispatcher.has_bundles();
            if connection.reading != Reading::Open || !has_bundles {
                return (taken, usize::MAX);
            }
            // Those behind a bundle are looked at for the next one.
            let run = share.dispatcher.bundle_run().min(BUNDLE_MAX);
            let most = connection.places().min(run.into()) as usize;
            let bytes = &rest[taken..];
            let alike = share.framing.requests_alike(bytes, share.max_message_bytes, most);
            let Some(alike) = alike else { return (taken, 1) };
            if alike.count < from {
                return (taken, alike.count);
            }
            let arrival = connection.arrival(turn.index, key, turn.now_ns);
            match batch.admit_bundle(services, &arrival, &Stream { bytes, alike }) {
                Ok(count) => {
                    connection.last_message_ns = turn.now_ns;
                    connection.take_many(count as u32);
                    taken += count * (alike.prefix + alike.len);
                }
                Err(NoBundle::SingleFirst) => return (taken, 1),
                Err(NoBundle::Singles) => return (taken, alike.count),
            }
        }
    }

    /// Shows the chain the messages at the front of `rest` that the connection may take now, before it takes them. Returns how often
    /// [`Self::take_next`] finds something among them; 0 if the next one has to wait.
    fn show<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        batch: &mut Batch<H>,
        key: StreamKey,
        mut rest: &[u8],
    ) -> usize {
        let Some(connection) = self.table.at(key) else { return 0 };
        if connection.reading != Reading::Open {
            return 0;
        }
        let share = &services[usize::from(connection.service)];
        let mut parser = connection.parser;
        let mut arrival = connection.arrival(turn.index, key, turn.now_ns);
        let mut count = 0;
        while count < connection.places() && !rest.is_empty() {
            match share.framing.parse_request(&mut parser, rest, share.max_message_bytes) {
                Ok(Parsed::Message { consumed, start, end, expects }) => {
                    arrival.expects = expects;
                    if !batch.show(&arrival, &rest[start..end]) {
                        break;
                    }
                    rest = &rest[consumed..];
                }
                Ok(Parsed::Refused { consumed, .. }) => rest = &rest[consumed..],
                Ok(Parsed::Skipped { consumed }) => {
                    // A part of a message moves: the connection is not idle.
                    connection.last_message_ns = turn.now_ns;
                    rest = &rest[consumed..];
                    continue;
                }
                Ok(Parsed::Incomplete { .. } | Parsed::Quit { .. }) | Err(_) => break,
            }
            arrival.number += 1;
            count += 1;
        }
        batch.decide(turn);
        count as usize
    }

    /// Takes the first message of `rest`. `None`: it stays there.
    fn take_next<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        batch: &mut Batch<H>,
        key: StreamKey,
        rest: &[u8],
    ) -> Option<usize> {
        let connection = self.table.at(key)?;
        if connection.reading != Reading::Open || rest.is_empty() {
            return None;
        }
        if !connection.may_take() {
            connection.reading = Reading::Stalled;
            return None;
        }
        let share = &services[usize::from(connection.service)];
        let before = connection.parser;
        let max = share.max_message_bytes;
        match share.framing.parse_request(&mut connection.parser, rest, max) {
            Ok(Parsed::Incomplete { .. }) => None,
            Ok(Parsed::Skipped { consumed }) => {
                batch.skip(consumed as u64);
                // The chain has been shown what follows, and not these bytes.
                let next = self.take_next(turn, services, servers, batch, key, &rest[consumed..]);
                Some(consumed + next.unwrap_or(0))
            }
            Ok(Parsed::Message { consumed, start, end, expects }) => {
                connection.crlf = consumed - end == b"\r\n".len();
                if self.take_message(
                    turn,
                    services,
                    servers,
                    batch,
                    key,
                    (&rest[start..end], expects),
                ) {
                    return Some(consumed);
                }
                // It waits, and is parsed again later.
                if let Some(connection) = self.table.at(key) {
                    connection.parser = before;
                    connection.reading = Reading::Stalled;
                }
                None
            }
            Ok(Parsed::Refused { consumed, error, silent }) => {
                let sequence = connection.take();
                let (service, crlf) = (usize::from(connection.service), connection.crlf);
                count_refused(services, batch, service, error);
                let outcome = match silent {
                    true => Outcome::Nothing,
                    false => self.loss_outcome(services, service, crlf, error.into()),
                };
                self.record(services, key, sequence, outcome);
                Some(consumed)
            }
            Ok(Parsed::Quit { consumed }) => {
                connection.reading = Reading::Ended;
                Some(consumed)
            }
            Err(error) => {
                self.refuse_stream(services, batch, key, error);
                None
            }
        }
    }

    /// Ends a stream that cannot be parsed any further: the error reply, in its place, then the close.
    fn refuse_stream<H: Hooks>(
        &mut self,
        services: &mut Services,
        batch: &mut Batch<H>,
        key: StreamKey,
        error: FramingError,
    ) {
        let connection = self.table.at(key).expect("the caller looked");
        let service = usize::from(connection.service);
        count_refused(services, batch, service, error);
        connection.reading = Reading::Ended;
        let (sequence, crlf) = (connection.take(), connection.crlf);
        let framing = services[service].framing;
        let last = self.terms[service].error_reply(framing, crlf, error.into());
        self.record(services, key, sequence, Outcome::Close(last.unwrap_or(ErrorBytes::NONE)));
    }

    /// Admits one message of a connection. False: it has to wait.
    fn take_message<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        batch: &mut Batch<H>,
        key: StreamKey,
        (mut payload, expects): (&[u8], Expects),
    ) -> bool {
        let connection = self.table.at(key).expect("the caller looked");
        let service = usize::from(connection.service);
        let arrival = Arrival { expects, ..connection.arrival(turn.index, key, turn.now_ns) };
        let Origin::Client(to) = arrival.origin else { return true };
        let admitted = batch.admit(turn, services, servers, &arrival, &mut payload, Waits::InPlace);
        if admitted == Admitted::Held {
            return false;
        }
        connection.last_message_ns = turn.now_ns;
        let number = connection.take();
        let request = Awaited { to, number, expects };
        let is_answered = services[service].is_answered(expects);
        match admitted {
            // Its place in the order of replies is already empty, whatever the result.
            _ if !is_answered => {
                if H::ATTACHED && admitted == Admitted::Answered {
                    services[service].count_consumed(1);
                }
                self.record(services, key, number, Outcome::Nothing);
            }
            Admitted::Lost(reason) => self.deliver_loss(services, service, &request, reason),
            Admitted::Answered => {
                self.deliver_payload(services, service, &request, batch.reply());
            }
            Admitted::Consumed => self.record(services, key, number, Outcome::Nothing),
            Admitted::Accepted | Admitted::Held => {}
        }
        true
    }

    /// Draining one service, or all: complete messages that wait for credit are dropped, everything else is not read.
    pub(super) fn stop_reading<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: Option<u16>,
    ) {
        for key in 0..self.table.len() as StreamKey {
            let Some(connection) = self.table.at(key) else { continue };
            if service.is_some_and(|of| connection.service != of) {
                continue;
            }
            let share = &services[usize::from(connection.service)];
            if share.relays_streams() {
                // It has no messages: it goes on until it ends, or the drain time is over.
                continue;
            }
            connection.reading = Reading::Ended;
            let input = std::mem::take(&mut connection.input);
            let (parser, max) = (&mut connection.parser, share.max_message_bytes);
            let mut rest = &input[..];
            while let Ok(Parsed::Message { consumed, .. }) =
                share.framing.parse_request(parser, rest, max)
            {
                rest = &rest[consumed.max(1).min(rest.len())..];
                share.count_received(1);
                share.count_lost(DropReason::Draining, 1);
                if rest.is_empty() {
                    break;
                }
            }
            self.pool.give(input);
            self.close_if_done(turn, services, servers, key);
        }
    }
}

/// Counts bytes that are refused.
fn count_refused<H: Hooks>(
    services: &Services,
    batch: &mut Batch<H>,
    service: usize,
    error: FramingError,
) {
    match error.drop_reason() {
        // The message was recognized as complete: it counts as received.
        DropReason::TooLong => batch.refuse(services, 0, DropReason::TooLong),
        _ => services[service].count_lost(DropReason::BadFraming, 1),
    }
}
