//! The other workers of the engine: requests that they hand over for mqueues of this one, and replies for clients of
//! theirs.
//!
//! The rings are in `base/links.rs`. Datagrams are answered by the worker that owns the mqueue, from its own socket on the same
//! port; only replies to clients that an endpoint knows by a key travel back.

use std::ops::Range;

use mqueue::{LoanError, abi};
use wire::DropReason;
use wire::nic::Nic;
use wire::session::{Origin, ReplyTo};

use crate::admit::servers::Servers;
use crate::admit::{Admitted, Batch, Waits};
use crate::base::arrival::{ANY, ANY_SHOWN, Arrival, Awaited, RETRY_BYTES, RETRY_NS, Seen};
use crate::base::links::{ENVELOPE_BYTES, Envelope, LinkIn};
use crate::base::turn::Turn;
use crate::depart::run::{Next, Run};
use crate::endpoint::{ClientEndpoint, Endpoint, HandedBack};
use crate::schedule::{Kind, Schedule};
use crate::service::services::Services;

/// The rings from the other workers to this one.
#[derive(Default)]
pub(crate) struct Peers {
    /// By worker and service; none from itself.
    links: Vec<Vec<Option<LinkIn>>>,
    /// How many there are.
    present: usize,
    /// Answers of functions to datagrams that were handed over to this worker: the request, and where the answer is in `answer_bytes`.
    answers: Vec<(Origin, u32, Range<usize>)>,
    answer_bytes: Vec<u8>,
}

impl Peers {
    /// A message was taken over from another worker, whose slots are about to be returned.
    fn taken_over<N: Nic>(turn: &mut Turn<N>, services: &mut Services, service: usize) {
        turn.busy();
        turn.set_settled(false);
        services[service].revoke_votes();
    }

    /// Takes the requests of one service that one worker handed over.
    fn take_requests<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        worker: usize,
        service: usize,
    ) {
        let Some(mut link) = self.links[worker][service].take() else { return };
        let mut message = std::mem::take(&mut turn.scratch);
        let mut batch = Batch::handed_over(service);
        let mut took = false;
        let mut left = schedule.batch_messages();
        while left > 0
            && turn.now_ns >= link.retry_ns
            && let Ok(Some(header)) = link.requests.peek()
        {
            let bytes = &mut message[..header.len as usize];
            let arrived = link.requests.copy_out(&header, bytes);
            debug_assert!(arrived, "doorbell rings hold whole messages");
            let (envelope, bytes) = bytes.split_at(ENVELOPE_BYTES);
            let envelope = Envelope::decode(envelope.try_into().expect("split there"));
            let mut message = Seen { bytes, received_len: envelope.received_len as usize };
            let mut arrival = Arrival {
                origin: envelope.origin,
                number: envelope.number,
                expects: envelope.expects,
                received_ns: header.tag,
                flow: 0,
                target: Some(envelope.mqueue),
            };
            let waits = Self::waits(turn, services, service, &arrival);
            let admitted = if envelope.mqueue == ANY_SHOWN {
                arrival.target = Some(ANY);
                self.admit_to_chain(
                    turn,
                    services,
                    servers,
                    schedule,
                    service,
                    (&arrival, &mut message, waits),
                )
            } else {
                batch.admit(turn, services, servers, &arrival, &mut message, waits)
            };
            match admitted {
                Admitted::Held => {
                    if header.len > RETRY_BYTES {
                        link.retry_ns = turn.now_ns + RETRY_NS;
                    }
                    break;
                }
                Admitted::Lost(reason) => Self::report_loss(turn, services, &envelope, reason),
                Admitted::Accepted | Admitted::Answered | Admitted::Consumed => {}
            }
            link.requests.advance();
            services[service].count_taken_over(turn.index);
            took = true;
            left -= 1;
        }
        turn.scratch = message;
        batch.end(services, schedule, Kind::Peer);
        if took {
            Self::taken_over(turn, services, service);
            link.release();
        }
        self.links[worker][service] = Some(link);
    }

    /// Admits a request whose state this worker has: its functions see it first. They may have been detached meanwhile.
    #[cold]
    fn admit_to_chain<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        service: usize,
        (arrival, message, waits): (&Arrival, &mut Seen<'_>, Waits),
    ) -> Admitted {
        let Some(chain) = services[service].chain.take() else {
            let mut batch = Batch::handed_over(service);
            let admitted = batch.admit(turn, services, servers, arrival, message, waits);
            batch.end(services, schedule, Kind::Peer);
            return admitted;
        };
        let mut batch = Batch::handed_to_owner(service, chain);
        let admitted = batch.admit(turn, services, servers, arrival, message, waits);
        let is_answered = services[service].is_answered(arrival.expects);
        match (admitted, arrival.origin) {
            (Admitted::Answered, Origin::Client(_)) if !is_answered => {
                services[service].count_consumed(1);
            }
            (Admitted::Answered, Origin::Client(to)) => {
                let awaited = Awaited { to, number: arrival.number, expects: arrival.expects };
                self.settle(turn, services, service, &awaited, Ok(batch.reply()));
            }
            (Admitted::Answered, origin @ Origin::Datagram { .. }) => {
                let from = self.answer_bytes.len();
                self.answer_bytes.extend_from_slice(batch.reply());
                let to = from..self.answer_bytes.len();
                self.answers.push((origin, message.received_len as u32, to));
            }
            // Its client gets no reply; one over TCP does not wait for it.
            (Admitted::Consumed, Origin::Client(to)) if is_answered => {
                let awaited = Awaited { to, number: arrival.number, expects: arrival.expects };
                self.settle(turn, services, service, &awaited, Err(DropReason::FunctionDrop));
            }
            _ => {}
        }
        batch.end(services, schedule, Kind::Peer);
        admitted
    }

    /// Tells the worker that received a request that it was lost, if its client waits for a reply.
    fn report_loss<N: Nic>(
        turn: &mut Turn<N>,
        services: &mut Services,
        envelope: &Envelope,
        reason: DropReason,
    ) {
        let share = &services[usize::from(envelope.service)];
        let Origin::Client(to) = envelope.origin else { return };
        if share.is_answered(envelope.expects) {
            let envelope = Envelope { mqueue: ANY, ..*envelope };
            turn.outbound.report_loss(to.worker, envelope, reason);
        }
    }

    /// Where a request without credit waits: that of a client with a key stays at the head of its ring, until its
    /// time is over.
    fn waits<N: Nic>(
        turn: &Turn<N>,
        services: &Services,
        service: usize,
        arrival: &Arrival,
    ) -> Waits {
        let share = &services[service];
        let waited_ns = turn.now_ns.saturating_sub(arrival.received_ns);
        if share.is_expired() {
            Waits::TooLong(DropReason::DrainTimeout)
        } else if waited_ns > share.timeout_ns {
            Waits::TooLong(DropReason::RequestTimeout)
        } else {
            match arrival.origin {
                Origin::Client(_) => Waits::InPlace,
                Origin::Datagram { .. } => Waits::Nowhere,
            }
        }
    }
}

impl<N: Nic> ClientEndpoint<N> for Peers {
    fn new(workers: usize) -> Self {
        let links = (0..workers).map(|_| Vec::new()).collect();
        Self { links, ..Self::default() }
    }

    fn has_client(&self, to: &ReplyTo, worker: u16) -> bool {
        to.worker != worker
    }

    fn has_returned(&self) -> bool {
        self.present > 0
    }

    /// Sets or removes the link of one service to one worker.
    fn set_link(
        &mut self,
        worker: usize,
        service: usize,
        link: &mut Option<LinkIn>,
    ) -> Option<LinkIn> {
        let link = link.take();
        self.present += usize::from(link.is_some());
        let before = crate::base::links::replace(&mut self.links[worker], service, link);
        self.present -= usize::from(before.is_some());
        before
    }

    /// Whether the others seem to have sent something to this worker.
    fn is_hinted(&self, _: &Services) -> bool {
        self.links.iter().flatten().flatten().any(LinkIn::is_hinted)
    }

    /// The same for one service.
    fn is_hinted_for(&self, service: u16) -> bool {
        let of_service = |links: &Vec<Option<LinkIn>>| {
            let link = links.get(usize::from(service)).and_then(Option::as_ref);
            link.is_some_and(LinkIn::is_hinted)
        };
        self.links.iter().any(of_service)
    }

    /// Takes the replies that other workers hand back, and delivers them with `settle`: they only need room at a
    /// client.
    fn take_replies(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        mut settle: impl FnMut(&mut Turn<N>, &mut Services, HandedBack<'_>),
    ) {
        if self.present == 0 {
            return;
        }
        let mut message = std::mem::take(&mut turn.scratch);
        for links in &mut self.links {
            for (service, link) in links.iter_mut().enumerate() {
                let Some(link) = link.as_mut().filter(|link| link.replies.hinted()) else {
                    continue;
                };
                let mut took = false;
                while let Ok(Some(header)) = link.replies.peek() {
                    let bytes = &mut message[..header.len as usize];
                    let arrived = link.replies.copy_out(&header, bytes);
                    debug_assert!(arrived, "doorbell rings hold whole messages");
                    link.replies.advance();
                    took = true;
                    let (envelope, payload) = bytes.split_at(ENVELOPE_BYTES);
                    let envelope = Envelope::decode(envelope.try_into().expect("split there"));
                    let outcome = if header.kind == abi::kind::DROP {
                        // Written by a worker of this process, so the code is valid.
                        Err(DropReason::from_code(header.status).unwrap_or(DropReason::MqueueDead))
                    } else {
                        services[service].counters.replies_handed_in.one();
                        Ok(payload)
                    };
                    if let Some(request) = envelope.awaited() {
                        settle(turn, services, HandedBack { service, request, outcome });
                    }
                }
                if took {
                    Self::taken_over(turn, services, service);
                    link.release();
                }
            }
        }
        turn.scratch = message;
    }

    /// Answers of functions to datagrams that were handed over, one by one.
    fn take_answers(&mut self, answer: &mut dyn FnMut(&Origin, u32, &[u8])) {
        for (origin, len, bytes) in self.answers.drain(..) {
            answer(&origin, len, &self.answer_bytes[bytes]);
        }
        self.answer_bytes.clear();
    }

    /// Whether there are some.
    #[inline]
    fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// The end of a drain: drops handed-over requests that were not taken.
    fn discard(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        for link in self.links.iter_mut().flatten().flatten() {
            for (ring, replies) in [(&mut link.replies, true), (&mut link.requests, false)] {
                while let Ok(Some(header)) = ring.peek() {
                    let bytes = &mut turn.scratch[..header.len as usize];
                    let arrived = ring.copy_out(&header, bytes);
                    debug_assert!(arrived, "doorbell rings hold whole messages");
                    let envelope = bytes[..ENVELOPE_BYTES].try_into().expect("its length");
                    let service = usize::from(Envelope::decode(envelope).service);
                    ring.advance();
                    let share = &services[service];
                    match (replies, header.kind) {
                        (true, abi::kind::DROP) => continue,
                        (true, _) => share.counters.replies_handed_in.one(),
                        (false, _) => {
                            share.counters.handed_in.one();
                            share.count_taken_over(turn.index);
                        }
                    }
                    share.count_lost(DropReason::DrainTimeout, 1);
                }
                ring.release();
            }
        }
    }
}

impl<N: Nic> Endpoint<N> for Peers {
    /// Takes all handed-over requests that find credit; in each round another worker is the first.
    fn receive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
        if self.present == 0 {
            return;
        }
        let count = self.links.len();
        let first = schedule.round() % count;
        for worker in (first..count).chain(0..first) {
            for service in 0..self.links[worker].len() {
                let Some(link) = &self.links[worker][service] else { continue };
                if link.requests.hinted() && schedule.allows(service as u16, Kind::Peer) {
                    self.take_requests(turn, services, servers, schedule, worker, service);
                }
            }
        }
    }

    /// Replies for clients of other workers go back to them.
    #[inline(never)]
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next {
        let request = *services[run.service].sessions.found(run.token());
        let Origin::Client(to) = request.origin else { return Next::Reply };
        let awaited = Awaited { to, number: request.number, expects: request.expects };
        let envelope = Envelope::of_client(run.service, &awaited);
        let mut scratch = std::mem::take(&mut turn.scratch);
        let handed = match run.copy_out(&services[run.service], &mut scratch) {
            Some(payload) => turn.outbound.reply(to.worker, &envelope, Ok(payload)),
            None => Err(LoanError::Full),
        };
        turn.scratch = scratch;
        let share = &mut services[run.service];
        match handed {
            Ok(()) => {
                share.end_request(run.token(), &request, true);
                share.counters.replies_handed_out.one();
            }
            Err(LoanError::Full) => return run.block(share),
            Err(_) => {
                share.end_request(run.token(), &request, false);
                share.count_dropped_request(DropReason::ReplyTooLong);
                turn.outbound.report_loss(to.worker, envelope, DropReason::ReplyTooLong);
            }
        }
        run.advance(&mut services[run.service]);
        run.next_after_others(turn, services)
    }

    fn settle(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    ) {
        let envelope = Envelope::of_client(service, request);
        let worker = request.to.worker;
        let payload = match outcome {
            Ok(payload) => payload,
            Err(reason) => return turn.outbound.report_loss(worker, envelope, reason),
        };
        let share = &services[service];
        match turn.outbound.reply(worker, &envelope, Ok(payload)) {
            Ok(()) => share.counters.replies_handed_out.one(),
            Err(error) => {
                let reason = match error {
                    LoanError::TooLong => DropReason::ReplyTooLong,
                    _ => DropReason::ReplyMemory,
                };
                share.count_dropped_request(reason);
                turn.outbound.report_loss(worker, envelope, reason);
            }
        }
    }

    fn flush(&mut self, turn: &mut Turn<N>, _: &mut Services, _: &mut impl Servers<N>, _: bool) {
        let Turn { outbound, shared, .. } = turn;
        outbound.publish(|worker| shared.wake(worker));
    }
}
