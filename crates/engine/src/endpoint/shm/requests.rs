//! Requests of a client: read from its ring, admitted, and answered or refused.

use super::{AHEAD, ActiveClient, BUDGET, BUDGET_BUNDLES, BUDGET_BYTES, SHORT_BYTES, Stop};
use crate::admit::servers::Servers;
use crate::admit::{Admitted, Batch, Waits};
use crate::base::arrival::{Arrival, RETRY_BYTES, RETRY_NS, Shown};
use crate::base::process::ShmClient;
use crate::base::turn::Turn;
use crate::schedule::{Kind, Schedule};
use crate::service::bundle::messages::Slots;
use crate::service::bundle::table::NoBundle;
use crate::service::chain::{Hooks, NoHooks};
use crate::service::services::Services;
use crate::service::share::ServiceShare;
use mqueue::Head;
use mqueue::abi::{SlotHeader, kind};
use wire::DropReason;
use wire::admission::key_hash;
use wire::framing::Expects;
use wire::nic::Nic;
use wire::session::{BUNDLE_MAX, EndpointKind, Origin, ReplyTo};

impl ActiveClient {
    /// Takes up to a budget of a client's requests. `dirty` lists clients with unpublished replies.
    pub(super) fn take_requests<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        (index, generation): (u32, u32),
        dirty: &mut Vec<u32>,
    ) -> (u32, Stop) {
        if turn.now_ns < self.retry_ns {
            return (0, Stop::Enough);
        }
        let service = self.client.service as usize;
        let share = &mut services[service];
        if turn.draining || share.leaving.is_some() {
            return self.refuse_requests(services, service, index, dirty);
        }
        if share.is_paused() {
            return (0, Stop::Enough);
        }
        match share.chain.take() {
            None => self.admit_requests(
                turn,
                services,
                servers,
                schedule,
                ((index, generation), NoHooks),
                dirty,
            ),
            Some(chain) => self.admit_requests(
                turn,
                services,
                servers,
                schedule,
                ((index, generation), chain),
                dirty,
            ),
        }
    }

    fn admit_requests<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        ((index, generation), hooks): ((u32, u32), H),
        dirty: &mut Vec<u32>,
    ) -> (u32, Stop) {
        let service = self.client.service as usize;
        let share = &mut services[service];
        let bundles = !H::ATTACHED && share.has_bundles();
        let budget = if bundles { BUDGET_BUNDLES } else { BUDGET };
        let budget = budget.min(schedule.batch_messages());
        let Ok(room) = self.room(budget) else {
            share.chain = hooks.into_chain();
            return (0, Stop::Broken);
        };
        self.no_room = room == 0;
        let waiting = self.client.requests.hint().min(room.into());
        let flow = match share.dispatcher.needs_flow() {
            true => key_hash(&self.client.id.to_le_bytes()),
            false => 0,
        };
        let to =
            ReplyTo { endpoint: EndpointKind::Shm, worker: turn.index, key: index, generation };
        let mut arrival = Arrival {
            origin: Origin::Client(to),
            number: 0,
            expects: Expects::Reply,
            received_ns: turn.now_ns,
            flow,
            target: None,
        };
        let has_bundles = share.begin_burst(waiting as usize, turn.now_ns) && bundles;
        let from = if has_bundles { share.bundles_from() } else { usize::MAX };
        // Up to here, no messages go as bundles.
        let mut singles_until = if waiting >= from as u64 { 0 } else { u32::MAX };
        let mut batch = Batch::of_clients(service, hooks);
        let mut scratch = std::mem::take(&mut turn.scratch);
        let mut taken = 0;
        let mut stop = Stop::Enough;
        if waiting > 1 && matches!(self.client.requests.peek(), Ok(Some(_))) {
            // The other requests are prefetched while those before them are submitted.
            for ahead in 1..waiting.min(AHEAD) {
                self.client.requests.prefetch(ahead, SHORT_BYTES);
            }
        }
        while taken < room && batch.bytes() < BUDGET_BYTES {
            let header = match self.client.requests.peek() {
                Ok(Some(header)) if header.kind == kind::MESSAGE => header,
                Ok(None) => break,
                Ok(Some(_)) | Err(_) => {
                    stop = Stop::Broken;
                    break;
                }
            };
            arrival.number = header.tag;
            if taken >= singles_until {
                let bundle = (&header, from, room - taken);
                match self.take_bundle(services, &mut batch, &arrival, bundle) {
                    Ok(count) => {
                        taken += count;
                        continue;
                    }
                    Err(singles) => singles_until = taken.saturating_add(singles),
                }
            }
            self.client.requests.prefetch(AHEAD, header.len.into());
            // A ring's longest message is that of the service, and the scratch space is at least as large.
            let ring = &self.client.requests;
            let mut message = Shown { ring, header, scratch: &mut scratch, copied: false };
            let admitted =
                batch.admit(turn, services, servers, &arrival, &mut message, Waits::InPlace);
            if admitted == Admitted::Held {
                if header.len > RETRY_BYTES {
                    self.retry_ns = turn.now_ns + RETRY_NS;
                }
                break;
            }
            self.client.requests.advance();
            taken += 1;
            if self.answers {
                self.outstanding += 1;
            }
            if let Some(reason) = admitted.loss() {
                self.report_loss(index, header.tag, reason, dirty);
            }
            if H::ATTACHED && admitted == Admitted::Answered {
                self.answer(&services[service], (index, header.tag), batch.reply(), dirty);
            }
        }
        turn.scratch = scratch;
        batch.end(services, schedule, Kind::Shm);
        (taken, stop)
    }

    /// Takes messages from the one with this header on as one bundle, if at least `from` are alike, and `most` at most. Returns how many; `Err`: this
    /// many have to go as single messages.
    #[inline(never)]
    fn take_bundle<H: Hooks>(
        &mut self,
        services: &mut Services,
        batch: &mut Batch<H>,
        arrival: &Arrival,
        (header, from, most): (&SlotHeader, usize, u32),
    ) -> Result<u32, u32> {
        // Those behind it are looked at for the next one.
        let run = services[self.client.service as usize].dispatcher.bundle_run();
        if (run as usize) < from {
            return Err(u32::MAX);
        }
        let Self { client: ShmClient { requests: ring, .. }, tags, .. } = self;
        // A head that is impossible is found again where it matters.
        let most = BUNDLE_MAX.min(run).min(most) as usize;
        let alike = ring.peek_alike(header, &mut tags[..most]).unwrap_or(1);
        if (alike as usize) < from || header.len == 0 {
            return Err(alike);
        }
        let messages = Slots { ring, len: header.len, tags: &tags[..alike as usize] };
        let count = batch.admit_bundle(services, arrival, &messages).map_err(|why| match why {
            NoBundle::SingleFirst => 1,
            NoBundle::Singles => alike,
        })? as u32;
        self.client.requests.advance_by(count);
        // Each is answered.
        self.outstanding += count;
        Ok(count)
    }

    /// The service or the client's port is removed, so the requests in the client's ring end as `draining`, as far as
    /// there is room for the outcomes. The rest stays in the ring: the client can tell that it was not taken.
    #[cold]
    pub(super) fn refuse_requests(
        &mut self,
        services: &mut Services,
        service: usize,
        index: u32,
        dirty: &mut Vec<u32>,
    ) -> (u32, Stop) {
        let Ok(room) = self.room(BUDGET) else { return (0, Stop::Broken) };
        self.no_room = room == 0;
        let share = &services[service];
        let mut taken = 0;
        while taken < room && !self.broken && !mutants::on("leave_requests_in_ring") {
            let header = match self.client.requests.peek() {
                Ok(Some(header)) if header.kind == kind::MESSAGE => header,
                Ok(None) => break,
                Ok(Some(_)) | Err(_) => return (taken, Stop::Broken),
            };
            self.client.requests.advance();
            taken += 1;
            self.outstanding += u32::from(self.answers);
            share.count_received(1);
            share.count_received_bytes(header.len.into());
            share.count_lost(DropReason::Draining, 1);
            self.report_loss(index, header.tag, DropReason::Draining, dirty);
        }
        (taken, Stop::Enough)
    }

    /// The outcome of a request that the service's chain has answered.
    #[cold]
    fn answer(
        &mut self,
        share: &ServiceShare,
        (index, tag): (u32, u64),
        reply: &[u8],
        dirty: &mut Vec<u32>,
    ) {
        if !self.answers {
            return share.count_consumed(1);
        }
        let head = Head { token: 0, tag, kind: kind::MESSAGE, status: 0 };
        if self.client.replies.push(head, reply).is_err() {
            // There is a slot, so it is too long, or the client corrupted its ring.
            share.count_lost(DropReason::ReplyTooLong, 1);
            return self.report_loss(index, tag, DropReason::ReplyTooLong, dirty);
        }
        self.outstanding -= 1;
        share.count_replied(1);
        share.count_replied_bytes(reply.len() as u64);
        if !std::mem::replace(&mut self.dirty, true) {
            dirty.push(index);
        }
    }

    /// The outcome of a request that was not accepted by an mqueue.
    #[cold]
    fn report_loss(&mut self, index: u32, tag: u64, why: DropReason, dirty: &mut Vec<u32>) {
        if !self.answers {
            return;
        }
        self.outstanding -= 1;
        let head = Head { token: 0, tag, kind: kind::DROP, status: why.code() };
        // There is a slot, and a drop needs no more than that.
        self.broken |= self.client.replies.push(head, &[]).is_err();
        if !std::mem::replace(&mut self.dirty, true) {
            dirty.push(index);
        }
    }
}
