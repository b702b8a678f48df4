//! Admission: where a message is counted in, and finds its mqueue.
//!
//! An endpoint opens a [`Batch`] for what one receive call brought, admits its messages one after the other, and ends it. The batch
//! counts them, and those that are lost; the endpoint only learns what became of each, for the client to hear of it.

use mqueue::LoanError;
use wire::DropReason;
use wire::nic::Nic;

use crate::endpoint::peer::links::Envelope;
use crate::schedule::{Kind, Schedule};
use crate::service::arrival::{ANY, Arrival, Message, Refusal};
use crate::service::dispatch::Route;
use crate::service::share::ServiceShare;
use crate::turn::Turn;

/// Where a message waits that finds no credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Nowhere: it is dropped. Of datagrams.
    Nowhere,
    /// Where it is: the endpoint offers it again.
    InPlace,
    /// It has waited as long as it may, and is dropped for this reason.
    TooLong(DropReason),
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admitted {
    /// It is in an mqueue, or on its way to another worker's.
    Accepted,
    /// There is no credit: it waits where it is, and was not counted.
    Held,
    /// It was received and dropped for this reason, which is counted.
    Lost(DropReason),
}

/// The messages that one receive call brought for one service.
pub(crate) struct Batch {
    service: usize,
    /// Another worker received them.
    handed_over: bool,
    messages: u64,
    bytes: u64,
    /// Messages that are counted already.
    counted: u64,
}

impl Batch {
    /// About so many messages of clients follow.
    #[inline]
    pub(crate) fn of_burst<N: Nic>(turn: &mut Turn<N>, service: usize, messages: usize) -> Self {
        turn.services[service].dispatcher.burst(messages);
        Self::of_clients(service)
    }

    /// Messages of clients, nobody knows how many.
    #[inline]
    pub(crate) fn of_clients(service: usize) -> Self {
        Self { service, handed_over: false, messages: 0, bytes: 0, counted: 0 }
    }

    /// Messages that another worker received and counted.
    pub(crate) fn handed_over(service: usize) -> Self {
        Self { handed_over: true, ..Self::of_clients(service) }
    }

    /// Takes one message in.
    #[inline(always)]
    pub(crate) fn admit<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        arrival: &Arrival,
        message: &mut impl Message,
        waits: Waits,
    ) -> Admitted {
        let reason = match turn.submit(self.service, arrival, message) {
            Ok(()) => {
                self.messages += 1;
                self.bytes += message.len() as u64;
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
        self.refuse(turn, message.len() as u64, reason);
        Admitted::Lost(reason)
    }

    /// Counts a message that is received and not admitted.
    #[inline]
    pub(crate) fn refuse<N: Nic>(&mut self, turn: &mut Turn<N>, bytes: u64, reason: DropReason) {
        self.messages += 1;
        self.bytes += bytes;
        let share = &turn.services[self.service];
        // Nobody may see more drops than requests.
        if !mutants::on("count_received_last") {
            let messages = std::mem::take(&mut self.messages);
            Self::count(share, self.handed_over, messages);
            self.counted += messages;
        }
        share.count_lost(reason, 1);
    }

    #[inline]
    fn count(share: &ServiceShare, handed_over: bool, messages: u64) {
        match handed_over {
            true => share.counters.handed_in.add(messages),
            false => share.count_received(messages),
        }
    }

    /// Counts what was taken in.
    #[inline]
    pub(crate) fn end<N: Nic>(self, turn: &mut Turn<N>, schedule: &mut Schedule, from: Kind) {
        let share = &turn.services[self.service];
        Self::count(share, self.handed_over, self.messages);
        if !self.handed_over {
            share.count_received_bytes(self.bytes);
        }
        schedule.charge(self.service, from, self.messages + self.counted, self.bytes);
    }
}

impl<N: Nic> Turn<N> {
    /// Finds an mqueue for a message and writes it there, or hands it to the worker that owns it.
    // Always inline, and without a loop: what an arrival and a message say then goes to where it stays, not through memory,
    // and nothing is made ready that only other ways need.
    #[inline(always)]
    fn submit(
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
        self.submit_elsewhere(service, arrival, message)
    }

    /// [`Self::submit`] where no run goes on.
    #[inline(never)]
    fn submit_elsewhere(
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
        match self.outbound.request(worker as u16, &envelope, arrival.received_ns, payload) {
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
}
