//! Admission: counts an incoming message and finds its mqueue.
//!
//! An endpoint opens a [`Batch`] for the messages of one receive call, admits them one after the other, and ends it.
//! The batch counts messages and losses; the endpoint gets the result of each message and reports it to the client.
//!
//! If a chain of functions is attached to the service, it sees the messages here. [`Batch`] is
//! compiled for both cases. An endpoint that has the messages of a batch before it admits them
//! shows them to the chain together ([`Batch::show`], [`Batch::decide`]). Any other message is
//! shown alone, when it is admitted.

pub(crate) mod servers;

use mqueue::LoanError;
use onpath::{Direction, Outcome};
use wire::DropReason;
use wire::framing::memcached::is_request;
use wire::nic::Nic;
use wire::session::Origin;

use self::servers::Servers;
use crate::base::arrival::{ANY, ANY_SHOWN, Arrival, Message, Refusal, Seen, seen};
use crate::base::links::Envelope;
use crate::base::turn::Turn;
use crate::schedule::{Kind, Schedule, Taken};
use crate::service::bundle::messages::{Datagrams, Messages};
use crate::service::bundle::table::NoBundle;
use crate::service::chain::{Attached, Hooks, NoHooks};
use crate::service::dispatch::Route;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// What happens with a message that finds no credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// It is dropped: datagrams.
    Nowhere,
    /// It stays in its socket or ring, and the endpoint offers it again.
    InPlace,
    /// Its waiting time is over: it is dropped for this reason.
    TooLong(DropReason),
}

/// The result of admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admitted {
    /// It is in an mqueue, or in flight to another worker.
    Accepted,
    /// There is no credit. The message stays where it is, and was not counted.
    Held,
    /// It was received and dropped for this reason, which is counted.
    Lost(DropReason),
    /// It was received, and the chain has written the reply; see [`Batch::reply`].
    Answered,
    /// It was received, and is in the ring of an application: there is no reply.
    Consumed,
}

impl Admitted {
    /// The reason for a client to which each request without a reply is reported.
    pub(crate) fn loss(self) -> Option<DropReason> {
        match self {
            Self::Lost(reason) => Some(reason),
            Self::Consumed => Some(DropReason::FunctionDrop),
            _ => None,
        }
    }
}

/// The messages that one receive call brought for one service.
pub(crate) struct Batch<H: Hooks> {
    service: usize,
    hooks: H,
    /// Another worker received the messages.
    handed_over: bool,
    messages: u64,
    bytes: u64,
    /// Number of messages that are already counted.
    counted: u64,
}

impl Batch<NoHooks> {
    /// Messages that another worker received and counted; its chain has seen them.
    pub(crate) fn handed_over(service: usize) -> Self {
        Self { handed_over: true, ..Self::of_clients(service, NoHooks) }
    }
}

impl Batch<Box<Attached>> {
    /// Messages that another worker received and counted, which this worker's chain sees.
    pub(crate) fn handed_to_owner(service: usize, chain: Box<Attached>) -> Self {
        Self { handed_over: true, ..Self::of_clients(service, chain) }
    }
}

impl<H: Hooks> Batch<H> {
    /// A batch of client messages.
    #[inline]
    pub(crate) fn of_clients(service: usize, hooks: H) -> Self {
        Self { service, hooks, handed_over: false, messages: 0, bytes: 0, counted: 0 }
    }

    /// Admits one message.
    #[inline(always)]
    pub(crate) fn admit<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        arrival: &Arrival,
        message: &mut impl Message,
        waits: Waits,
    ) -> Admitted {
        if H::ATTACHED {
            return self.admit_with_chain(turn, services, servers, arrival, message, waits);
        }
        let submitted =
            services.submit(turn, servers, self.service, arrival, message, self.handed_over);
        self.admitted(services, message.len(), submitted, waits)
    }

    /// Admits the first of these messages as one bundle; returns how many. What is not admitted was not counted.
    #[inline(never)]
    pub(crate) fn admit_bundle(
        &mut self,
        services: &mut Services,
        arrival: &Arrival,
        messages: &impl Messages,
    ) -> Result<usize, NoBundle> {
        let count = services[self.service].accept_bundle(arrival, messages)?;
        Ok(self.bundle_admitted(messages, count))
    }

    /// The same for datagrams that were received in place.
    #[inline(never)]
    pub(crate) fn admit_in_place(
        &mut self,
        services: &mut Services,
        arrival: &Arrival,
        datagrams: &Datagrams<'_>,
    ) -> Result<usize, NoBundle> {
        let count = services[self.service].accept_in_place(arrival, datagrams)?;
        Ok(self.bundle_admitted(datagrams, count))
    }

    fn bundle_admitted(&mut self, messages: &impl Messages, count: u32) -> usize {
        self.messages += u64::from(count);
        let (len, last_len) = (messages.len_of(0), messages.len_of(count - 1));
        self.bytes += u64::from(count - 1) * u64::from(len) + u64::from(last_len);
        count as usize
    }

    /// Counts one message according to the result of its submission.
    #[inline(always)]
    fn admitted(
        &mut self,
        services: &Services,
        len: usize,
        submitted: Result<(), Refusal>,
        waits: Waits,
    ) -> Admitted {
        let reason = match submitted {
            Ok(()) => {
                self.messages += 1;
                self.bytes += len as u64;
                return Admitted::Accepted;
            }
            Err(Refusal::Drop(reason)) => reason,
            Err(Refusal::Retry(reason)) => match waits {
                Waits::InPlace => {
                    self.messages += u64::from(mutants::on("count_twice"));
                    return Admitted::Held;
                }
                Waits::Nowhere if mutants::on("shed_silently") => {
                    self.messages += 1;
                    return Admitted::Lost(reason);
                }
                Waits::Nowhere => reason,
                Waits::TooLong(reason) => reason,
            },
        };
        self.refuse(services, len as u64, reason);
        Admitted::Lost(reason)
    }

    /// Adds a message to those that the chain sees together. False: there is no room before those were admitted and
    /// [`Self::clear`] was called.
    pub(crate) fn show(&mut self, arrival: &Arrival, message: &[u8]) -> bool {
        self.hooks.attached().is_none_or(|chain| chain.show(arrival, message))
    }

    /// The chain decides about the messages that were shown.
    pub(crate) fn decide<N: Nic>(&mut self, turn: &Turn<N>) {
        if let Some(chain) = self.hooks.attached() {
            chain.decide(Direction::Requests, &|| turn.clock_ns());
        }
    }

    /// Messages that were shown.
    pub(crate) fn shown(&mut self) -> usize {
        self.hooks.attached().map_or(0, |chain| chain.shown())
    }

    /// How long one of them was when it came.
    pub(crate) fn shown_len(&mut self, index: usize) -> usize {
        self.hooks.attached().map_or(0, |chain| chain.messages().shown_len(index))
    }

    /// Forgets the messages that were shown.
    pub(crate) fn clear(&mut self) {
        if let Some(chain) = self.hooks.attached() {
            chain.clear();
        }
    }

    /// [`Self::admit`] with a chain, which sees the message first.
    #[inline(never)]
    fn admit_with_chain<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        arrival: &Arrival,
        message: &mut impl Message,
        waits: Waits,
    ) -> Admitted {
        let Some(chain) = self.hooks.attached() else { return Admitted::Held };
        let index = chain.find(arrival, message.bytes(), &|| turn.clock_ns());
        self.admit_shown(turn, services, servers, index, waits).0
    }

    /// Takes in a message that was shown, which must be neither kept nor rewritten meanwhile: it is the one that the chain has seen.
    pub(crate) fn admit_shown<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        index: usize,
        waits: Waits,
    ) -> (Admitted, Arrival) {
        let chain = self.hooks.attached().expect("only a chain is shown messages");
        let mut arrival = chain.arrival(index);
        let len = chain.messages().shown_len(index);
        let bytes = chain.messages().bytes(index);
        let mut message = Seen { bytes, received_len: len };
        if chain.is_owned() {
            // Its functions see the reply on this worker.
            arrival.target = Some(ANY);
        }
        let there = chain.elsewhere(index);
        let submitted = match chain.messages().outcome(index) {
            _ if there.is_some() => {
                services.hand_to_owner(turn, self.service, &arrival, &message, there)
            }
            Outcome::Pass
                if chain.messages().is_written(index)
                    && matches!(arrival.origin, Origin::Datagram { .. })
                    && services[self.service].checks_datagrams()
                    && !is_request(bytes) =>
            {
                // What the client sent is a request; a function has replaced it.
                Err(Refusal::Drop(DropReason::FunctionFailed))
            }
            Outcome::Pass => services.submit(
                turn,
                servers,
                self.service,
                &arrival,
                &mut message,
                self.handed_over,
            ),
            Outcome::Steer(to) => services.submit_to(
                turn,
                servers,
                self.service,
                &arrival,
                &mut message,
                (to, self.handed_over),
            ),
            Outcome::Drop(reason) => Err(Refusal::Drop(reason)),
            Outcome::Deliver => {
                chain.set_done(index);
                chain.set_unsent(index);
                self.messages += 1;
                self.bytes += len as u64;
                self.count_now(services);
                services[self.service].count_consumed(1);
                return (Admitted::Consumed, arrival);
            }
            Outcome::Reply if bytes.len() > services[self.service].max_reply_bytes => {
                Err(Refusal::Drop(DropReason::ReplyTooLong))
            }
            Outcome::Reply => {
                chain.set_answered(index);
                self.messages += 1;
                self.bytes += len as u64;
                // The endpoint counts the reply before the batch ends.
                self.count_now(services);
                return (Admitted::Answered, arrival);
            }
        };
        let admitted = self.admitted(services, len, submitted, waits);
        if admitted != Admitted::Held
            && let Some(chain) = self.hooks.attached()
        {
            chain.set_done(index);
            if admitted != Admitted::Accepted {
                chain.set_unsent(index);
            }
        }
        (admitted, arrival)
    }

    /// If a message that was shown is answered, and nothing else need be known of that: its origin, how long it was when it came, and
    /// the answer. [`Self::set_answered`] takes it in.
    #[inline(always)]
    pub(crate) fn answer(&mut self, index: usize) -> Option<(&Origin, usize, &[u8])> {
        let chain: &Attached = self.hooks.attached()?;
        chain.plain_answer(index)
    }

    /// An [answer](Self::answer) leaves. It is to be [counted](Self::count_now) before anything is sent.
    #[inline(always)]
    pub(crate) fn set_answered(&mut self, index: usize, received: usize) {
        if let Some(chain) = self.hooks.attached() {
            chain.set_done(index);
        }
        self.messages += 1;
        self.bytes += received as u64;
    }

    /// The reply to the message that was answered last.
    pub(crate) fn reply(&mut self) -> &[u8] {
        self.hooks.attached().map_or(&[], |chain| chain.answer())
    }

    /// Adds payload bytes that were admitted.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts a message that is received and not admitted.
    // Always inline, as `count` is; otherwise the counters would be written to memory for every message.
    #[inline(always)]
    pub(crate) fn refuse(&mut self, services: &Services, bytes: u64, reason: DropReason) {
        self.messages += 1;
        self.bytes += bytes;
        self.count_now(services);
        services[self.service].count_lost(reason, 1);
    }

    /// Bytes were received that belong to no message.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Counts the messages so far before the end of one of them is counted: no snapshot may show more ends than
    /// requests.
    #[inline(always)]
    pub(crate) fn count_now(&mut self, services: &Services) {
        if !mutants::on("count_received_last") {
            let messages = std::mem::take(&mut self.messages);
            Self::count(&services[self.service], self.handed_over, messages);
            self.counted += messages;
        }
    }

    #[inline(always)]
    fn count(share: &ServiceShare, handed_over: bool, messages: u64) {
        match handed_over {
            true => share.counters.handed_in.add(messages),
            false => share.count_received(messages),
        }
    }

    /// Writes the batch's counts to the counters.
    #[inline]
    pub(crate) fn end(self, services: &mut Services, schedule: &mut Schedule, from: Kind) {
        let share = &mut services[self.service];
        Self::count(share, self.handed_over, self.messages);
        let mut function_ns = 0;
        if H::ATTACHED {
            share.chain = self.hooks.into_chain();
            function_ns = share.take_function_ns();
        }
        if !self.handed_over {
            share.count_received_bytes(self.bytes);
        }
        let messages = self.messages + self.counted;
        schedule.charge(self.service, from, Taken { messages, bytes: self.bytes, function_ns });
    }
}

impl Services {
    /// Finds an mqueue for a message and writes it there, or hands it to the worker that owns it. One that was handed over to this worker
    /// was below its tenant's limits when it was received.
    // Always inline, and without a loop: the fields of the arrival and the message then stay in registers, and
    // nothing is set up that only rare paths need.
    #[inline(always)]
    fn submit<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        servers: &mut impl Servers<N>,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
        handed_over: bool,
    ) -> Result<(), Refusal> {
        let share = &mut self[service];
        let len = message.len();
        if len >= share.takes_below
            && let Some(refusal) = share.takes_not(turn.index, len, handed_over)
        {
            return Err(refusal);
        }
        if arrival.target.is_none()
            && let Some(mqueue) = share.continues_run(len)
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
        self.submit_elsewhere(turn, servers, service, arrival, message)
    }

    /// [`Self::submit`] for messages that do not continue a run.
    #[inline(never)]
    fn submit_elsewhere<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        servers: &mut impl Servers<N>,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        let share = &mut self[service];
        if share.is_proxy() {
            return servers.submit(turn, self, service, arrival, message);
        }
        let len = message.len();
        loop {
            let inspected = if share.dispatcher.needs_key() { message.bytes() } else { &[] };
            let route = share.route(inspected, len, arrival.flow, arrival.target);
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
            return self.hand_over(turn, service, arrival, &seen(message), there);
        }
    }

    /// Submits a message to one mqueue of the service.
    fn submit_to<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        servers: &mut impl Servers<N>,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
        (mqueue, handed_over): (u32, bool),
    ) -> Result<(), Refusal> {
        let share = &mut self[service];
        let located = share.dispatcher.locate(mqueue);
        // It is asked about there.
        if let Some((worker, mqueue)) = located
            && worker == u32::from(turn.index)
        {
            let arrival = Arrival { target: Some(mqueue), ..*arrival };
            return self.submit(turn, servers, service, &arrival, message, handed_over);
        }
        if message.len() >= share.takes_below
            && let Some(refusal) = share.takes_not(turn.index, message.len(), handed_over)
        {
            return Err(refusal);
        }
        match located {
            None => Err(Refusal::Drop(DropReason::MqueueDead)),
            // The reply of another worker's mqueue would miss the functions.
            Some(_) if arrival.target.is_some() => Err(Refusal::Drop(DropReason::MqueueDead)),
            Some(there) => self.hand_over(turn, service, arrival, &seen(message), there),
        }
    }

    /// Hands a message over to the worker that has the state of the functions.
    #[cold]
    fn hand_to_owner<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        arrival: &Arrival,
        message: &Seen<'_>,
        owner: Option<u16>,
    ) -> Result<(), Refusal> {
        let share = &mut self[service];
        if message.bytes.len() >= share.takes_below
            && let Some(refusal) = share.takes_not(turn.index, message.bytes.len(), false)
        {
            return Err(refusal);
        }
        let Arrival { expects, origin, number, .. } = *arrival;
        let (slot, received_len) = (service as u16, message.received_len as u32);
        let envelope =
            Envelope { service: slot, mqueue: ANY_SHOWN, expects, origin, number, received_len };
        let owner = owner.unwrap_or(turn.index);
        match turn.outbound.request(owner, &envelope, arrival.received_ns, message.bytes) {
            Ok(()) => {
                self[service].count_handed_out(turn.index);
                Ok(())
            }
            Err(LoanError::Full) => Err(Refusal::Retry(DropReason::HandoverFull)),
            Err(_) => Err(Refusal::Drop(DropReason::TooLong)),
        }
    }

    /// Hands a message over to another worker, for an mqueue of that worker.
    #[cold]
    fn hand_over<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        arrival: &Arrival,
        message: &Seen<'_>,
        (worker, mqueue): (u32, u32),
    ) -> Result<(), Refusal> {
        let Arrival { expects, origin, number, .. } = *arrival;
        let (slot, received_len) = (service as u16, message.received_len as u32);
        let envelope = Envelope { service: slot, mqueue, expects, origin, number, received_len };
        match turn.outbound.request(worker as u16, &envelope, arrival.received_ns, message.bytes) {
            Ok(()) => {
                let share = &mut self[service];
                share.count_handed_out(turn.index);
                let credit = &mut share.other_credit[worker as usize];
                *credit = credit.saturating_sub(1);
                Ok(())
            }
            Err(LoanError::Full) => Err(Refusal::Retry(DropReason::HandoverFull)),
            Err(_) => Err(Refusal::Drop(DropReason::TooLong)),
        }
    }
}
