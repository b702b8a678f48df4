//! TCP: requests to upstream servers, their answers, and the ends of connections.

use wire::DropReason;
use wire::framing::{Expects, Parsed};
use wire::nic::{Close, Event, Nic, NicError, Read, Transport, Written};
use wire::proxy_protocol::proxy_header;
use wire::session::{Origin, ReplyTo};

use super::streams::{OUTPUT_MAX, Place, State, Stream};
use super::{Upstreams, of};
use crate::admit::servers::Servers;
use crate::base::arrival::{Arrival, Awaited, Refusal};
use crate::base::keys::StreamOwner;
use crate::base::turn::Turn;
use crate::depart::{Depart, Destinations};
use crate::endpoint::clients::Clients;
use crate::endpoint::pipeline::patience_ns;
use crate::schedule::{Kind, Schedule};
use crate::service::services::Services;

impl Upstreams {
    /// Puts a request of a client's connection into the output of its connection to the upstream server.
    pub(super) fn submit_to_stream<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        arrival: &Arrival,
        client: &ReplyTo,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        if self.stream(service, client.key).is_none_or(|stream| stream.client != *client) {
            self.open_stream(turn, services, service, client).map_err(Refusal::Drop)?;
        }
        let Self { by_slot, batch } = self;
        let Turn { now_ns, .. } = turn;
        let share = &mut services[service];
        let (framing, timeout_ns) = (share.framing, share.timeout_ns);
        let streams = of(by_slot, service).map(|upstream| &mut upstream.streams);
        let Some((streams, stream)) = streams.and_then(|streams| streams.with(client.key)) else {
            return Err(Refusal::Drop(DropReason::UpstreamRefused));
        };
        if !stream.has_room() {
            stream.holds_client = true;
            return Err(Refusal::Retry(DropReason::NoCredit));
        }
        if framing.forward(payload, arrival.expects, &mut stream.pipeline.output).is_err() {
            // What the client sent is a request; a function has replaced it, by no request or by one that is answered otherwise.
            return Err(Refusal::Drop(DropReason::FunctionFailed));
        }
        let fence = if arrival.expects == Expects::Reply { None } else { framing.fence() };
        if let Some(fence) = fence {
            stream.pipeline.output.extend_from_slice(fence.request);
        }
        if arrival.expects == Expects::Reply || fence.is_some() {
            let place = Place {
                number: arrival.number,
                expects: arrival.expects,
                len: payload.len() as u32,
                fenced: fence.is_some(),
                ended: false,
            };
            stream.pipeline.push(place, framing.mark(payload), *now_ns + timeout_ns);
        } else {
            stream.unanswered += 1;
        }
        *streams += 1;
        if !std::mem::replace(&mut stream.is_dirty, true) {
            batch.to_write.push((service as u16, client.key));
        }
        share.counters.accepted.one();
        Ok(())
    }

    /// Connections to upstream servers that may be read: first those that have waited for their tenant, as many as may have their turn in this
    /// one, and how many these are.
    fn take_ready_streams(&mut self, schedule: &mut Schedule) -> (Vec<(u16, u32)>, usize) {
        let Self { by_slot, batch } = self;
        let spare = std::mem::take(&mut batch.spare_streams);
        let mut ready = std::mem::replace(&mut batch.ready_streams, spare);
        let others = ready.len();
        let allows = |service| schedule.allows(service, Kind::Servers);
        batch.held.release(allows, |service, waiter| {
            let upstream = of(by_slot, usize::from(service));
            if upstream.is_some_and(|upstream| upstream.streams.is_held(waiter)) {
                ready.push((service, waiter.0));
            }
        });
        let released = ready.len() - others;
        ready.rotate_right(released);
        (ready, released)
    }

    /// The connection to the upstream server that belongs to a client's connection.
    pub(super) fn stream(&mut self, service: usize, client: u32) -> Option<&mut Stream> {
        of(&mut self.by_slot, service)?.streams.get(client)
    }

    /// Requests in flight on the connections of a service.
    fn stream_requests(&self, service: usize) -> u64 {
        let upstream = self.by_slot.get(service).and_then(Option::as_ref);
        upstream.map_or(0, |upstream| upstream.streams.in_flight())
    }

    pub(super) fn open_stream<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: &ReplyTo,
    ) -> Result<(), DropReason> {
        // Of a former client with the same key, whose service was another version of this one.
        Servers::close_stream(self, turn, services, service, client.key);
        let Self { by_slot, batch } = self;
        let Turn { nic, stream_keys, now_ns, .. } = turn;
        let share = &mut services[service];
        let patience_ns = patience_ns(share.timeout_ns);
        let Some(upstream) = of(by_slot, service) else {
            return Err(DropReason::UpstreamRefused);
        };
        if !upstream.streams.back_off.may_try(*now_ns) {
            return Err(DropReason::UpstreamRefused);
        }
        let mut header = None;
        if upstream.header_with.is_some() {
            let (peer, own) = nic.stream_addresses(client.key).ok_or(DropReason::ClientGone)?;
            header = Some(proxy_header(Transport::Tcp, peer, own));
        }
        let owner = StreamOwner::Upstream { service: service as u16, client: client.key };
        let key = stream_keys.issue(owner);
        if let Err(error) = nic.connect(upstream.address, Transport::Tcp, key) {
            stream_keys.free(key);
            return Err(match error {
                NicError::Exhausted => DropReason::UpstreamFlows,
                NicError::Refused(_) => {
                    upstream.streams.back_off.failed(*now_ns);
                    DropReason::UpstreamRefused
                }
            });
        }
        let mut stream = Stream::new(*client, key, *now_ns + patience_ns);
        if let Some(header) = header {
            stream.pipeline.output.extend_from_slice(&header);
        }
        upstream.streams.insert(stream);
        batch.stream_opened();
        Ok(())
    }

    /// Closes the connection to the server and takes it out of the table. Its requests are no longer in flight.
    pub(super) fn take_stream<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: u32,
    ) -> Option<Box<Stream>> {
        let Self { by_slot, batch } = self;
        let Turn { nic, stream_keys, now_ns, .. } = turn;
        let share = &mut services[service];
        let stream = of(by_slot, service)?.streams.remove(client)?;
        share.tell_gone(stream.client, *now_ns);
        batch.streams -= 1;
        let done = match share.relays_streams() {
            true => stream.is_finished(),
            false => stream.pipeline.places.is_empty() && stream.pipeline.unwritten() == 0,
        };
        nic.close(stream.key, if done { Close::Graceful } else { Close::Reset });
        stream_keys.free(stream.key);
        Some(stream)
    }

    /// Something happened on a connection to an upstream server.
    pub(super) fn stream_event(&mut self, event: Event, service: u16, client: u32) {
        let Self { by_slot, batch } = self;
        let Some(upstream) = of(by_slot, service.into()) else { return };
        let Some(stream) = upstream.streams.get(client) else { return };
        if matches!(event, Event::Writable(_)) {
            let connected = stream.state != State::Up;
            stream.state = State::Up;
            let writes = stream.pipeline.unwritten() > 0 || stream.relay_writable();
            if writes && !std::mem::replace(&mut stream.is_dirty, true) {
                batch.to_write.push((service, client));
            }
            if connected {
                upstream.streams.back_off.succeeded();
            }
            return;
        }
        stream.failed |= matches!(event, Event::Failed(_));
        batch.list_stream(service, client, stream);
    }

    /// Writes the output of each connection that has some, with one write each.
    pub(super) fn write_streams<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        let Self { by_slot, batch } = self;
        let Turn { nic, .. } = turn;
        let mut listed = std::mem::take(&mut batch.to_write);
        for (service, client) in listed.drain(..) {
            let share = &mut services[usize::from(service)];
            let relays = share.relays_streams();
            let streams = of(by_slot, service.into()).map(|upstream| &mut upstream.streams);
            let Some((in_flight, stream)) = streams.and_then(|streams| streams.with(client)) else {
                continue;
            };
            stream.is_dirty = false;
            // Written when the attempt succeeds; dropped with its requests when it fails.
            let writes = stream.pipeline.unwritten() > 0 || stream.relay_writable();
            if stream.state != State::Up || !writes {
                continue;
            }
            if stream.pipeline.write(nic, stream.key) == Written::Broken {
                stream.failed = true;
                batch.list_stream(service, client, stream);
            }
            let mut consumed = 0;
            if stream.pipeline.unwritten() == 0 {
                consumed = std::mem::take(&mut stream.unanswered);
                *in_flight -= consumed;
            }
            if relays {
                batch.relay_written(nic, stream);
            } else if stream.resumes_client() {
                batch.resumed.push(client);
            }
            share.count_consumed(consumed);
        }
        batch.to_write = listed;
    }
}

impl Upstreams {
    /// Reads each connection to an upstream server that may have bytes, once.
    pub(super) fn gather_streams<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        schedule: &mut Schedule,
    ) {
        for index in 0..self.batch.resumed.len() {
            clients.tcp.readable_again(self.batch.resumed[index]);
        }
        self.batch.resumed.clear();
        let (mut ready, released) = self.take_ready_streams(schedule);
        let mut scratch = std::mem::take(&mut turn.scratch);
        for (index, (service, client)) in ready.iter().copied().enumerate() {
            let slot = usize::from(service);
            let Some(stream) = self.stream(slot, client) else { continue };
            if !std::mem::take(&mut stream.is_ready) {
                // Of a connection that was closed, whose client's key another one has.
                continue;
            }
            let (to, key) = (stream.client, stream.key);
            if services[slot].relays_streams() {
                let relay = (slot, client, index < released);
                self.gather_relay(turn, services, clients, schedule, relay, &mut scratch);
                continue;
            }
            let Some(stream) = self.stream(slot, client) else { continue };
            if stream.failed && stream.state != State::Up {
                self.end_stream(turn, services, clients, slot, client, DropReason::UpstreamRefused);
                continue;
            }
            if clients.tcp.unsent_of(&to) >= OUTPUT_MAX {
                stream.is_ready = true;
                self.batch.waiting.push((service, client));
                continue;
            }
            turn.busy();
            match turn.nic.read(key, &mut scratch) {
                Read::Empty => {}
                Read::Closed | Read::Broken => {
                    self.end_stream(
                        turn,
                        services,
                        clients,
                        slot,
                        client,
                        DropReason::UpstreamRefused,
                    );
                }
                Read::Bytes(count) => {
                    let more = count == scratch.len();
                    let before = self.stream_requests(slot);
                    self.take_stream_bytes(
                        turn,
                        services,
                        clients,
                        slot,
                        client,
                        &scratch[..count],
                    );
                    if schedule.is_shared() {
                        let ended = before.saturating_sub(self.stream_requests(slot));
                        schedule.charge_replies(slot, ended, 0);
                    }
                    if more {
                        self.stream_event(Event::Readable(key), service, client);
                    }
                }
            }
        }
        turn.scratch = scratch;
        for (service, _) in ready.iter().copied() {
            clients.deliver_shown(turn, services, self, service.into());
        }
        ready.clear();
        self.batch.spare_streams = ready;
        self.batch.held.end_turn(|service| schedule.is_shed(service, Kind::Servers));
    }

    /// Servers whose clients have taken enough of what waited for them are read again.
    pub(super) fn resume_streams(&mut self, clients: &mut Clients) {
        if !self.batch.waits_for_clients() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.batch.waiting);
        waiting.retain(|(service, client)| {
            let stream = self.stream(usize::from(*service), *client);
            let Some(to) = stream.filter(|stream| stream.is_ready).map(|s| s.client) else {
                return false;
            };
            let waits = clients.tcp.unsent_of(&to) >= OUTPUT_MAX;
            if !waits {
                self.batch.ready_streams.push((*service, *client));
            }
            waits
        });
        self.batch.waiting = waiting;
    }

    /// Parses the bytes of one read.
    fn take_stream_bytes<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        client: u32,
        read: &[u8],
    ) {
        let Some(stream) = self.stream(service, client) else { return };
        // Bytes that complete an answer are parsed in the buffer they were read into.
        let mut input = std::mem::take(&mut stream.pipeline.input);
        let fresh = input.is_empty();
        if !fresh {
            input.extend_from_slice(read);
        }
        let taken = self.take_stream_answers(
            turn,
            services,
            clients,
            service,
            client,
            if fresh { read } else { &input },
        );
        match taken {
            Ok(taken) => {
                if let Some(stream) = self.stream(service, client) {
                    stream.pipeline.keep(input, read, fresh, taken);
                    if stream.resumes_client() {
                        clients.tcp.readable_again(client);
                    }
                }
            }
            Err(reason) => {
                services[service].count_lost(reason, 1);
                self.end_stream(
                    turn,
                    services,
                    clients,
                    service,
                    client,
                    DropReason::UpstreamRefused,
                );
            }
        }
    }

    /// Takes the answers at the front of `input`. Returns how many bytes that took, or why the connection cannot go on.
    fn take_stream_answers<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        client: u32,
        input: &[u8],
    ) -> Result<usize, DropReason> {
        let mut taken = 0;
        while taken < input.len() {
            let now_ns = turn.now_ns;
            let share = &mut services[service];
            let notifies = share.notices.wanted;
            let (framing, max) = (share.framing, share.max_reply_bytes);
            let streams = of(&mut self.by_slot, service).map(|upstream| &mut upstream.streams);
            let Some((in_flight, stream)) = streams.and_then(|streams| streams.with(client)) else {
                return Ok(taken);
            };
            let rest = &input[taken..];
            let (consumed, answer) =
                match framing.parse_response(&mut stream.pipeline.parser, rest, max) {
                    Ok(Parsed::Incomplete { .. }) => return Ok(taken),
                    Ok(Parsed::Message { consumed, start, end, .. }) => {
                        (consumed, &rest[start..end])
                    }
                    Ok(_) => return Err(DropReason::BackendProtocol),
                    Err(error) => return Err(error.backend_drop_reason()),
                };
            taken += consumed;
            let Some(place) = stream.pipeline.places.front().copied() else {
                return Err(DropReason::BackendUnasked);
            };
            let fence = if place.fenced { framing.fence() } else { None };
            let is_fence = fence.is_some_and(|fence| fence.response == answer);
            if !is_fence && !stream.pipeline.fits(framing, answer) {
                return Err(DropReason::BackendMismatch);
            }
            let (request, late) = (stream.request(&place, now_ns), stream.pipeline.is_late());
            if place.fenced && !is_fence {
                stream.pipeline.places[0].ended = true;
            } else {
                stream.pipeline.pop();
            }
            *in_flight -= u64::from(!place.ended);
            if notifies && (is_fence || place.ended && !place.fenced) {
                share.tell_done(request.origin, request.number);
            }
            match (is_fence, place.ended) {
                (true, true) => {}
                (false, true) if late => share.count_lost(DropReason::BackendLate, 1),
                (false, true) => share.count_lost(DropReason::BackendUnasked, 1),
                // The client asked for no answer, and gets none.
                (_, false) if place.expects == Expects::Nothing => {
                    share.count_consumed(1);
                    share.count_lost(DropReason::BackendUnasked, u64::from(!is_fence));
                }
                (true, false) => {
                    let Origin::Client(to) = request.origin else { return Ok(taken) };
                    let (number, expects) = (place.number, place.expects);
                    clients.settle(
                        turn,
                        services,
                        service,
                        &Awaited { to, number, expects },
                        Ok(&[]),
                    );
                }
                (false, false) => {
                    self.take_answer(turn, services, clients, service, &request, answer)
                }
            }
        }
        Ok(taken)
    }

    /// The connection to the upstream server has ended: its requests in flight are dropped for this reason. If the server had
    /// accepted the connection, the client's ends too, after its replies.
    pub(super) fn end_stream<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        client: u32,
        reason: DropReason,
    ) {
        let now_ns = turn.now_ns;
        let Some(to) = self.stream(service, client).map(|stream| stream.client) else { return };
        if services[service].relays_streams() {
            return self.end_relay(turn, services, clients, service, &to, reason);
        }
        // What it answered before comes first.
        clients.deliver_shown(turn, services, self, service);
        let Some(mut stream) = self.take_stream(turn, services, service, client) else { return };
        let was_up = stream.state == State::Up;
        if let Some(upstream) = of(&mut self.by_slot, service)
            && !was_up
        {
            upstream.streams.back_off.failed(now_ns);
        }
        services[service].count_lost(reason, stream.unanswered);
        while let Some(place) = stream.pipeline.pop() {
            if place.ended {
                continue;
            }
            let request = stream.request(&place, now_ns);
            clients.drop_request(turn, services, service, &request, reason);
        }
        if was_up {
            clients.tcp.end_after_replies(services, &stream.client);
        }
        if stream.holds_client || stream.delays_close {
            clients.tcp.readable_again(client);
        }
    }

    /// Once a millisecond, for a part of the connections: time-outs.
    pub(super) fn expire_streams<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
    ) {
        let now_ns = turn.now_ns;
        let patience_ns = patience_ns(services[service].timeout_ns);
        let upstream = of(&mut self.by_slot, service);
        let Some(part) = upstream.map(|upstream| upstream.streams.next_part()) else { return };
        for client in part {
            while let Some(place) = self.stream(service, client).and_then(|s| s.expire(now_ns)) {
                if place.ended {
                    continue;
                }
                let Some(upstream) = of(&mut self.by_slot, service) else { return };
                let Some((in_flight, stream)) = upstream.streams.with(client) else { break };
                *in_flight -= 1;
                let request = stream.request(&place, now_ns);
                clients.drop_request(turn, services, service, &request, DropReason::RequestTimeout);
            }
            let Some(stream) = self.stream(service, client) else { continue };
            let resumes = stream.resumes_client();
            let is_behind = stream.pipeline.is_behind(now_ns, patience_ns);
            let refused =
                matches!(stream.state, State::Connecting { deadline_ns } if deadline_ns <= now_ns);
            if resumes {
                clients.tcp.readable_again(client);
            }
            if is_behind || refused {
                self.end_stream(
                    turn,
                    services,
                    clients,
                    service,
                    client,
                    DropReason::UpstreamRefused,
                );
            }
        }
    }

    /// Gives up everything that is in flight to the upstream server of a service.
    pub(super) fn drop_all<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        reason: DropReason,
    ) {
        self.drop_flow_requests(services, service, reason);
        let upstream = of(&mut self.by_slot, service);
        let Some(keys) = upstream.map(|upstream| upstream.streams.clients()) else { return };
        for client in keys {
            self.end_stream(turn, services, clients, service, client, reason);
        }
    }
}
