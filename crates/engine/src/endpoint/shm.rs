//! Shared-memory ports: clients on this machine that communicate with a worker through a ring instead of a socket.
//!
//! A client has a region of its own with one block and one mqueue, in which it has the role of the *accelerator*: its
//! requests are in the TX ring, its replies in the RX ring. So the rings, their ordering edges and their checks are
//! those of every region. A slot is a message: there is no framing. The header's `tag` is the client's identifier of
//! a request and is returned with the outcome; outcomes may be in any order. A request that is lost is answered with
//! a slot of kind DROP whose status is the [`DropReason`]'s code; a service without replies sends nothing.
//!
//! *Flow control.* A request that finds no credit stays in its ring, as do requests for whose replies there would be
//! no slot: the worker takes a request only while `requests in flight + replies unread < depth`. A client that does
//! not read its replies is not served.
//!
//! *Removed ports.* Requests in the rings of the port's clients end as `draining`, with an outcome as far as there is
//! room for one. Requests that stay in a ring when its client is closed were not received: the client's library finds
//! them by the ring's tail, and reports them as lost.
//!
//! *Everything a client writes is hostile.* Impossible ring words or headers close that client, count as
//! `bad_framing`, and affect no other client. Requests in flight of a closed client end as `client_gone` when their
//! replies arrive.
//!
//! Listening, the handshake and the detection of ended client processes are outside the engine: the control side
//! posts [`ShmAttached`](crate::ControlMessage::ShmAttached) and [`ShmGone`](crate::ControlMessage::ShmGone). A
//! worker reads the head word of each of its clients once a turn; before it sleeps it sets a flag in every client's
//! region (edge PARK), and clients then wake it through the network's readiness call.

mod arrivals;
mod requests;

use mqueue::abi::{SlotHeader, kind, stop};
use mqueue::{Consumer, Head, LoanError, MappedMemory, RingError};
use wire::DropReason;
use wire::nic::Nic;
use wire::session::{BUNDLE_MAX, EndpointKind, Origin, ReplyTo};

use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::process::ShmClient;
use crate::base::turn::Turn;
use crate::depart::run::{Next, Run};
use crate::endpoint::{ClientEndpoint, Endpoint};
use crate::schedule::{Kind, Schedule};
use crate::service::bundle::table::Completion;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// Requests taken from one client in a turn, one by one, and if they can go as bundles.
const BUDGET: u32 = 64;
const BUDGET_BUNDLES: u32 = 128;
/// Bytes after which no further request is taken from one client in a turn.
const BUDGET_BYTES: u64 = 256 << 10;
/// Interval at which a client is checked again whose requests wait for it to read replies: it does not ring for that.
const ROOM_NS: u64 = 1_000_000;
/// Bytes of a request that are prefetched.
const SHORT_BYTES: u64 = 64;
/// Prefetch distance in messages: slots are fetched from the client's cache.
const AHEAD: u64 = 8;

/// A client of this worker.
struct ActiveClient {
    client: ShmClient,
    /// Whether each of its requests gets an outcome.
    answers: bool,
    /// Requests without an outcome.
    outstanding: u32,
    /// It wrote impossible words; closed at the next visit.
    broken: bool,
    /// A request waits in its ring until it reads replies.
    no_room: bool,
    /// Time of the next try of a long request that found no credit.
    retry_ns: u64,
    /// Listed in [`ShmClients::dirty`].
    dirty: bool,
    /// Place for the tags of requests that become a bundle.
    tags: [u64; BUNDLE_MAX as usize],
}

impl ActiveClient {
    /// Number of requests that may be taken so that every outcome has a slot, at most `budget`.
    #[inline]
    fn room(&mut self, budget: u32) -> Result<u32, RingError> {
        if !self.answers {
            return Ok(budget);
        }
        let ShmClient { depth, replies, .. } = &mut self.client;
        let unread = (replies.committed() - replies.released()) as u32;
        if *depth - unread >= self.outstanding.saturating_add(budget) {
            return Ok(budget);
        }
        Ok(replies.credit()?.saturating_sub(self.outstanding).min(budget))
    }
}

#[derive(Default)]
struct Entry {
    /// Generation of this entry.
    generation: u32,
    /// Boxed, so that a visit moves a pointer.
    active: Option<Box<ActiveClient>>,
}

/// The shared-memory clients of one worker.
#[derive(Default)]
pub(crate) struct ShmClients {
    entries: Vec<Entry>,
    /// Entries in use, unordered.
    open: Vec<u32>,
    /// Clients with unpublished replies.
    dirty: Vec<u32>,
}

/// The client of a reply has gone, or must be closed.
struct Gone;

impl ShmClients {
    fn insert(&mut self, client: ShmClient, answers: bool) -> u32 {
        let free = self.entries.iter().position(|entry| entry.active.is_none());
        let index = free.unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.entries.len() - 1
        });
        self.entries[index].active = Some(Box::new(ActiveClient {
            client,
            answers,
            outstanding: 0,
            broken: false,
            no_room: false,
            retry_ns: 0,
            dirty: false,
            tags: [0; BUNDLE_MAX as usize],
        }));
        self.open.push(index as u32);
        // Each may be listed: adding to a list allocates nothing.
        self.dirty.reserve(self.open.len().saturating_sub(self.dirty.len()));
        index as u32
    }

    /// Frees an entry; a reply that names the old generation finds no client.
    fn remove(&mut self, index: u32) -> Option<Box<ActiveClient>> {
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.open.retain(|open| *open != index);
        self.dirty.retain(|dirty| *dirty != index);
        entry.active.take()
    }

    fn active(&self) -> impl Iterator<Item = &ActiveClient> {
        self.open.iter().filter_map(|index| self.entries[*index as usize].active.as_deref())
    }

    fn at(&mut self, index: u32) -> Option<&mut ActiveClient> {
        self.entries.get_mut(index as usize)?.active.as_deref_mut()
    }

    /// Whether a request waits for its client to read replies.
    fn waits_for_room(&self) -> bool {
        self.active().any(|s| s.no_room)
    }

    /// Writes the outcome of a request into its client's ring; [`Self::publish`] must follow.
    fn reply(
        &mut self,
        index: u32,
        generation: u32,
        tag: u64,
        outcome: Result<&[u8], DropReason>,
    ) -> Result<Result<(), LoanError>, Gone> {
        let entry = self.entries.get_mut(index as usize).ok_or(Gone)?;
        if entry.generation != generation && !mutants::on("forget_client") {
            return Err(Gone);
        }
        let active = entry.active.as_deref_mut().filter(|s| !s.broken).ok_or(Gone)?;
        let (kind, status) = match outcome {
            Ok(_) => (kind::MESSAGE, 0),
            Err(reason) => (kind::DROP, reason.code()),
        };
        let head = Head { token: 0, tag, kind, status };
        match active.client.replies.push(head, outcome.unwrap_or(&[])) {
            Ok(()) => {}
            Err(LoanError::Corrupt) => {
                active.broken = true;
                return Err(Gone);
            }
            Err(error) => return Ok(Err(error)),
        }
        active.outstanding = active.outstanding.saturating_sub(1);
        if !active.dirty {
            active.dirty = true;
            self.dirty.push(index);
        }
        Ok(Ok(()))
    }

    /// Copies a reply from its TX ring to its client's ring, if that is the only work to do.
    // Always inline: called at one place, once per reply.
    #[inline(always)]
    fn relay(
        &mut self,
        (index, generation, tag): (u32, u32, u64),
        from: &Consumer<MappedMemory>,
        header: &SlotHeader,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(index as usize) else { return false };
        let Some(active) = entry.active.as_deref_mut() else { return false };
        let other = entry.generation != generation && !mutants::on("forget_client");
        if other || active.broken {
            return false;
        }
        let replies = &mut active.client.replies;
        replies.prefetch(AHEAD, header.len.into());
        let head = Head { token: 0, tag, kind: kind::MESSAGE, status: 0 };
        if !replies.push_from(head, from, header) {
            return false;
        }
        active.outstanding = active.outstanding.saturating_sub(1);
        if !active.dirty {
            active.dirty = true;
            self.dirty.push(index);
        }
        true
    }

    /// Publishes the turn's replies to the clients, and wakes those that sleep.
    fn publish(&mut self) {
        for index in self.dirty.drain(..) {
            let Some(active) = &mut self.entries[index as usize].active else { continue };
            active.dirty = false;
            active.client.replies.publish();
            if active.client.words.accelerator_parked() {
                active.client.peer.wake();
            }
        }
    }
}

/// Why a visit to a client ended.
enum Stop {
    /// Nothing more to take at present.
    Enough,
    /// The client wrote impossible words.
    Broken,
}

impl ShmClients {
    fn visit<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        index: u32,
    ) {
        let Entry { generation, active } = &mut self.entries[index as usize];
        let Some(active) = active.as_deref_mut() else { return };
        let key = (index, *generation);
        let (taken, stop) =
            active.take_requests(turn, services, servers, schedule, key, &mut self.dirty);
        if taken > 0 {
            active.client.requests.release();
            turn.busy();
        }
        active.broken |= matches!(stop, Stop::Broken);
    }

    #[cold]
    fn close_corrupt<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        for index in 0..self.entries.len() as u32 {
            let Some(active) = self.at(index).filter(|s| s.broken) else { continue };
            let (id, service) = (active.client.id, active.client.service as usize);
            tracing::warn!(client = id, service, "a shared-memory client broke its rings: closed");
            services[service].count_lost(DropReason::BadFraming, 1);
            self.close(turn, services, index);
        }
    }

    /// Closes a client of a removed port: every request in its ring gets an outcome, as far as there is room.
    fn drain<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services, index: u32) {
        let Self { entries, dirty, .. } = self;
        if let Some(active) = entries[index as usize].active.as_deref_mut() {
            let mut refused = 0;
            while refused < active.client.depth && !active.broken {
                let service = active.client.service as usize;
                let (taken, stop) = active.refuse_requests(services, service, index, dirty);
                active.client.requests.release();
                if taken == 0 || matches!(stop, Stop::Broken) {
                    break;
                }
                refused += taken;
            }
        }
        self.close(turn, services, index);
    }
}

impl<N: Nic> ClientEndpoint<N> for ShmClients {
    fn new(_: usize) -> Self {
        Self::default()
    }

    fn has_client(&self, to: &ReplyTo, worker: u16) -> bool {
        to.worker == worker && to.endpoint == EndpointKind::Shm
    }

    fn connections(&self) -> usize {
        self.open.len()
    }

    fn attach(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        client: &mut Option<ShmClient>,
    ) {
        if let Some(client) = client.take() {
            self.adopt(turn, services, client);
        }
    }

    fn detach(&mut self, turn: &mut Turn<N>, services: &mut Services, id: u64) {
        self.remove_client(turn, services, id);
    }

    /// Whether a client's request can be taken now: the last check before a sleep.
    fn is_hinted(&self, services: &Services) -> bool {
        let held = |of: u16| services[usize::from(of)].is_held();
        let waits = |s: &ActiveClient| s.no_room || held(s.client.service);
        self.active().any(|s| s.broken || (s.client.requests.hinted() && !waits(s)))
    }

    /// Clients of one service.
    fn of_service(&self, service: u16) -> usize {
        self.active().filter(|s| s.client.service == service).count()
    }

    /// Moves the clients of one service to another with the same message layout, except those that are to be closed.
    fn move_processes(&mut self, from: u16, to: u16, departing: &[u64]) {
        let active = self.entries.iter_mut().filter_map(|entry| entry.active.as_deref_mut());
        let moves =
            |s: &&mut ActiveClient| s.client.service == from && !departing.contains(&s.client.id);
        for active in active.filter(moves) {
            active.client.service = to;
        }
    }

    /// See [`Words::set_parked`].
    fn set_parked(&self, parked: bool) {
        for active in self.active() {
            active.client.words.set_parked(parked);
        }
    }

    /// Writes the replies of a completion into the ring of their client. Returns the messages that have an outcome; the others have to be
    /// delivered one by one.
    fn deliver_bundle(
        &mut self,
        share: &mut ServiceShare,
        mqueue: u32,
        completion: &Completion,
        to: &ReplyTo,
    ) -> u64 {
        let Some(entry) = self.entries.get_mut(to.key as usize) else { return 0 };
        let other = entry.generation != to.generation && !mutants::on("forget_client");
        let active = entry.active.as_deref_mut().filter(|active| !active.broken && !other);
        let Some(active) = active else { return 0 };
        let Some(numbers) = share.sessions.numbers_of(completion.token) else { return 0 };
        let mut decided = 0_u64;
        while decided != completion.messages {
            let left = completion.messages & !decided;
            let first = left.trailing_zeros();
            let count = (left >> first).trailing_ones();
            let tags = &numbers[first as usize..][..count as usize];
            let replies = (mqueue, completion, completion.place_of(first));
            let written = share.push_replies(replies, &mut active.client.replies, tags);
            active.broken |= written.is_err();
            let written = written.unwrap_or(0);
            if written > 0 {
                decided |= (u64::MAX >> (64 - written)) << first;
            }
            if written < count {
                break;
            }
        }
        let count = decided.count_ones();
        active.outstanding = active.outstanding.saturating_sub(count);
        if count > 0 && !std::mem::replace(&mut active.dirty, true) {
            self.dirty.push(to.key);
        }
        share.end_messages(completion.token, mqueue, decided);
        share.count_replied(count.into());
        share.count_replied_bytes(u64::from(count) * u64::from(completion.replies.len()));
        decided
    }

    /// Closes the clients of a leaving service once every request of theirs has its outcome.
    fn close_leaving(&mut self, turn: &mut Turn<N>, services: &mut Services, service: u16) {
        for index in 0..self.entries.len() as u32 {
            let done = |s: &&mut ActiveClient| s.client.service == service && s.outstanding == 0;
            if self.at(index).as_ref().is_some_and(done) {
                self.drain(turn, services, index);
            }
        }
    }

    /// Shutdown: every client has its outcomes in its ring, and its connection is closed.
    fn close_all(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        for index in 0..self.entries.len() as u32 {
            if self.entries[index as usize].active.is_some() {
                self.drain(turn, services, index);
            }
        }
    }
}

impl<N: Nic> Endpoint<N> for ShmClients {
    /// Takes a budget of requests from every client with requests; in each round another client is the first.
    #[inline]
    fn receive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
        if self.open.is_empty() {
            return;
        }
        let (round, count) = (schedule.round(), self.open.len());
        let mut broken = false;
        for step in 0..count {
            let index = self.open[(round + step) % count];
            let active = self.at(index).expect("it is open");
            if active.client.requests.hinted()
                && !active.broken
                && schedule.allows(active.client.service, Kind::Shm)
            {
                self.visit(turn, services, servers, schedule, index);
            }
            broken |= self.at(index).is_some_and(|s| s.broken);
        }
        if broken {
            self.close_corrupt(turn, services);
        }
    }

    // Always inline: most replies take this path.
    #[inline(always)]
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next {
        loop {
            let token = run.token();
            let share = &mut services[run.service];
            let request = share.sessions.found(token);
            let Origin::Client(to) = &request.origin else { return Next::Reply };
            if to.endpoint != EndpointKind::Shm || to.worker != turn.index {
                return Next::Reply;
            }
            let ring = &share.mqueues[run.mqueue as usize].tx;
            if self.relay((to.key, to.generation, request.number), ring, &run.header) {
                share.end_answered(token, run.mqueue);
                share.count_replied(1);
                share.count_replied_bytes(run.header.len.into());
            } else if !self.deliver_copy(turn, services, run) {
                return run.block(&mut services[run.service]);
            }
            run.advance(&mut services[run.service]);
            match run.next(turn, services) {
                Next::Reply => {}
                next => return next,
            }
        }
    }

    fn settle(
        &mut self,
        _: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    ) {
        let ReplyTo { key, generation, .. } = request.to;
        let written = self.reply(key, generation, request.number, outcome);
        let share = &services[service];
        let is_overwritten = match (written, outcome) {
            (Ok(Ok(())), Ok(payload)) => {
                share.count_replied(1);
                share.count_replied_bytes(payload.len() as u64);
                false
            }
            (Err(Gone), Ok(_)) => {
                share.count_lost(DropReason::ClientGone, 1);
                false
            }
            (Ok(Err(error)), Ok(_)) => {
                let reason = match error {
                    LoanError::TooLong => DropReason::ReplyTooLong,
                    _ => DropReason::ReplyMemory,
                };
                share.count_lost(reason, 1);
                matches!(self.reply(key, generation, request.number, Err(reason)), Ok(Err(_)))
            }
            // There was a slot for the outcome and a loss needs no more than that.
            (Ok(Err(_)), Err(_)) => true,
            (Ok(Ok(())) | Err(Gone), Err(_)) => false,
        };
        if is_overwritten && let Some(active) = self.at(key) {
            // By the client.
            active.broken = true;
        }
    }

    /// Publishes the turn's replies to the clients.
    fn flush(&mut self, _: &mut Turn<N>, _: &mut Services, _: &mut impl Servers<N>, _: bool) {
        self.publish();
    }

    /// Marks the clients: nothing more is read from them.
    fn leave(
        &mut self,
        _: &mut Turn<N>,
        _: &mut Services,
        _: &mut impl Servers<N>,
        service: Option<u16>,
    ) {
        for active in self.active().filter(|s| service.is_none_or(|of| s.client.service == of)) {
            active.client.words.set_stop(stop::DRAIN);
        }
    }

    fn wake_at(&self, now_ns: u64, _: &Services) -> u64 {
        if self.waits_for_room() { now_ns + ROOM_NS } else { u64::MAX }
    }
}

impl ShmClients {
    /// Delivers a reply that cannot be copied from ring to ring, or whose client is gone. False: it has not arrived
    /// completely.
    #[inline(never)]
    fn deliver_copy<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        run: &Run,
    ) -> bool {
        let mut scratch = std::mem::take(&mut turn.scratch);
        let share = &mut services[run.service];
        let payload = run.copy_out(share, &mut scratch);
        if let Some(payload) = payload {
            let request = *share.sessions.found(run.token());
            share.end_request(run.token(), &request, true);
            if let Origin::Client(to) = request.origin {
                let awaited = Awaited { to, number: request.number, expects: request.expects };
                self.settle(turn, services, run.service, &awaited, Ok(payload));
            }
        }
        let arrived = payload.is_some();
        turn.scratch = scratch;
        arrived
    }
}

#[cfg(test)]
mod tests {
    use mqueue::{Head, HeapMapping, MqueuePlan, Region, RegionPlan, RingPlan};

    use super::*;
    use crate::base::process::ShmPeer;

    struct NoPeer;

    impl ShmPeer for NoPeer {
        fn wake(&self) {}
    }

    fn region() -> (Region<MappedMemory>, Region<MappedMemory>) {
        let ring = RingPlan::doorbell(64, 0);
        let mqueues = vec![MqueuePlan { depth: 4, rx: ring, tx: ring }];
        let plan = RegionPlan::of_blocks(1, &mqueues, 1);
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        let near = Region::format(memory.clone(), &plan).unwrap();
        (near, Region::join(memory).unwrap())
    }

    fn client(id: u64) -> (ShmClient, Consumer<MappedMemory>) {
        let (mut near, mut far) = region();
        let words = near.words();
        let (replies, requests) = near.engine_ends(0);
        let peer = Box::new(NoPeer);
        let client = ShmClient { id, service: 0, depth: 4, replies, requests, words, peer };
        (client, far.accelerator_ends(0).0)
    }

    #[test]
    fn a_reply_for_a_client_that_left_is_dropped() {
        let mut clients = ShmClients::default();
        clients.insert(client(1).0, true);
        let old = clients.entries[0].generation;
        assert!(clients.remove(0).is_some());
        let (next, mut heard) = client(2);
        clients.insert(next, true);
        assert!(clients.reply(0, old, 7, Ok(b"private")).is_err());
        assert!(clients.reply(0, old, 8, Err(DropReason::RequestTimeout)).is_err());
        // The same from ring to ring.
        let (mut near, mut far) = region();
        let mut kernel = far.accelerator_ends(0).1;
        let mut ring = near.engine_ends(0).1;
        kernel.push(Head { kind: kind::MESSAGE, ..Head::default() }, b"private").unwrap();
        kernel.publish();
        let header = ring.peek().unwrap().expect("it is published");
        assert!(!clients.relay((0, old, 9), &ring, &header));
        clients.publish();
        assert_eq!(heard.peek(), Ok(None));
        let new = clients.entries[0].generation;
        assert!(clients.relay((0, new, 10), &ring, &header));
        clients.publish();
        assert_eq!(heard.peek().unwrap().map(|header| header.tag), Some(10));
    }
}
