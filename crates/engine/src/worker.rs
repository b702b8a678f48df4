//! The worker: one thread, one [`Worker::turn`] after the other.
//!
//! A message goes down the turn once: inhale (the network and the other workers), route, drive (the
//! blocks), exhale (replies, housekeeping, backends, the network). There are no callbacks and no
//! locks; what cannot go on now (no credit, no room) stays where it is and is met again next turn.
//!
//! | step | where |
//! |---|---|
//! | readiness, one call | [`Worker::wait`] → [`Nic::poll`] |
//! | datagrams in | `endpoint/udp.rs` |
//! | streams in | `admit.rs` |
//! | shared-memory clients | `endpoint/shm.rs` |
//! | which mqueue | `service/dispatch.rs`, into the RX ring by `service/share.rs` |
//! | blocks | [`crate::accelerator::Blocks::drive`] |
//! | TX rings out, replies, order | `depart.rs`, `endpoint/tcp/connection.rs` |
//! | backends | `endpoint/backend.rs` |
//! | other workers | `endpoint/peer.rs` |
//! | services that come, change and go | `control/install.rs` |
//! | services whose clients wait for a new generation | `control/pause.rs` |

use std::sync::Arc;

use wire::DropReason;
use wire::admission::flow_hash;
use wire::nic::{Close, Event, Nic, RxBatch, StreamKey};
use wire::session::Origin;

use crate::control::message::MessageOf;
use crate::endpoint::peer::Link;
use crate::endpoint::ports::Port;
use crate::endpoint::shm::ShmClients;
use crate::endpoint::sources::Sources;
use crate::endpoint::tcp::connection::{Connections, Pool, Reading};
use crate::fabric::Fabric;
use crate::metrics::WorkerCounters;
use crate::service::ends::ShareMqueue;
use crate::service::share::{HEADS_READ, ServiceShare};
use crate::topology::{Polling, Replies};

/// How long an adaptive worker looks for work before it sleeps: about what two wake-ups cost, so that
/// spinning never costs a waiting neighbour on the same core more than sleeping would cost the client.
const SPIN_NS: u64 = 50_000;
/// How long it looks before it offers its core to others between two looks.
const YIELD_NS: u64 = 8_000;
/// Who gets its core back later than this has a busy neighbour on it.
const NEIGHBOUR_NS: u64 = 50_000;
/// For how long a busy neighbour is remembered.
const NEIGHBOUR_MEMORY_NS: u64 = 100_000_000;
/// Housekeeping happens once in this time.
const TICK_NS: u64 = 1_000_000;
/// Longest sleep.
const SLEEP_NS_MAX: u64 = 100_000_000;
/// Bytes of one read from a stream.
const READ_BYTES_MIN: usize = 16 << 10;
/// News for other workers that may wait before their list grows.
pub(crate) const PENDING_LOSSES: usize = 256;
/// Where requests come from: other workers, datagrams, memory clients, streams.
const SOURCES: u64 = 4;
/// A share of the connections looked at by each housekeeping for time-outs.
const SWEEP_PARTS: usize = 64;

/// What a stream key names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StreamOwner {
    Connection,
    Backend { share: u16, pool: u16, number: u16 },
    Client { share: u16, client: u32 },
}

/// See the module's text.
pub struct Worker<N: Nic> {
    pub(crate) index: u16,
    pub(crate) nic: N,
    pub(crate) now_ns: u64,
    pub(crate) ports: Vec<Port>,
    pub(crate) sources: Sources,
    pub(crate) services: Vec<ServiceShare>,
    pub(crate) connections: Connections,
    pub(crate) pool: Pool,
    pub(crate) memory: ShmClients,
    /// By worker and service; none to itself.
    pub(crate) links: Vec<Vec<Option<Link>>>,
    pub(crate) fabric: Arc<Fabric<MessageOf<N>>>,
    pub(crate) counters: Arc<WorkerCounters>,
    pub(crate) connections_max: u32,
    pub(crate) pipelined: u32,
    pub(crate) idle_ns: u64,
    pub(crate) slow_client_ns: u64,
    pub(crate) early_bytes_max: usize,
    /// Connections with something to read or parse, and those with something to write.
    pub(crate) to_read: Vec<StreamKey>,
    pub(crate) to_write: Vec<StreamKey>,
    /// News for other workers that found no room: (worker, envelope, reason).
    pub(crate) pending_losses: Vec<(u16, crate::endpoint::peer::Envelope, DropReason)>,
    pub(crate) rx: RxBatch,
    pub(crate) scratch: Vec<u8>,
    pub(crate) envelope: Vec<u8>,
    pub(crate) draining: bool,
    /// See [`Self::set_clock`].
    pub(crate) clock: Option<Box<dyn Fn() -> u64 + Send>>,
    /// By stream key, behind those of connections.
    pub(crate) owners: Vec<StreamOwner>,
    /// Places in `owners` that are free.
    pub(crate) free_keys: Vec<u32>,
    pub(crate) events: Vec<Event>,
    pub(crate) polling: Polling,
    pub(crate) work: bool,
    /// It went to sleep after the last turn.
    pub(crate) slept: bool,
    pub(crate) idle_since_ns: u64,
    pub(crate) neighbour_until_ns: u64,
    pub(crate) next_tick_ns: u64,
    pub(crate) sweep_at: usize,
    /// Before this it says no more about connections that were shed.
    pub(crate) shed_report_ns: u64,
    pub(crate) ended: Vec<(u32, u64)>,
    pub(crate) hung: bool,
    pub(crate) settled: bool,
    /// It takes no further turn.
    pub(crate) stopped: bool,
}

impl<N: Nic> Worker<N> {
    /// The clock that `now_ns` of every turn comes from. With it the times of stages inside a turn are
    /// measured; without it they are known to a turn.
    pub fn set_clock(&mut self, clock: impl Fn() -> u64 + Send + 'static) {
        self.clock = Some(Box::new(clock));
    }

    /// The turn's one readiness call; sleeps at most `sleep_ns`.
    pub fn wait(&mut self, sleep_ns: u64) {
        if sleep_ns == 0 {
            return self.nic.poll(0, &mut self.events);
        }
        let alone = self.fabric.workers() == 1 && self.memory.is_empty();
        if !alone {
            // What the others know must not be older than the sleep, nor what this worker knows of them.
            self.publish_credit();
            self.fabric.fall_asleep(self.index);
            self.memory.set_parked(true);
        }
        let mail = !alone
            && !mutants::on("sleep_on_mail")
            && (self.fabric.mailbox(self.index).len() > 0
                || self.links_hinted()
                || self.memory.hinted(|of| self.services[usize::from(of)].is_paused()));
        if !mail {
            self.slept = true;
            self.counters.sleeps.one();
        }
        self.nic.poll(if mail { 0 } else { sleep_ns }, &mut self.events);
        if !alone {
            self.memory.set_parked(false);
            self.fabric.awake(self.index);
            self.read_credit();
        }
    }

    /// Tells the other workers how many requests this one still takes, by service.
    fn publish_credit(&self) {
        (0..self.services.len()).for_each(|share| self.publish_credit_of(share));
    }

    pub(crate) fn publish_credit_of(&self, share: usize) {
        self.fabric.publish_credit(self.index, share as u16, self.services[share].free_credit());
    }

    /// Takes note of what the others told.
    pub(crate) fn read_credit(&mut self) {
        for (number, share) in self.services.iter_mut().enumerate() {
            for worker in (0..self.fabric.workers()).filter(|w| *w != self.index as usize) {
                share.other_credit[worker] = self.fabric.credit_of(worker, number);
            }
        }
    }

    fn links_hinted(&self) -> bool {
        self.links
            .iter()
            .flatten()
            .flatten()
            .any(|l| l.requests_in.hinted() || l.replies_in.hinted())
    }

    /// One pass: everything that [`Self::wait`] reported, everything that waited. `now_ns` never
    /// runs backwards. Returns whether there was anything to do.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        self.account_time(now_ns);
        self.now_ns = now_ns;
        self.work = false;
        // Inhale.
        self.sort_events();
        self.drain_mailbox();
        self.take_replies();
        self.take_requests_in();
        // Accelerate.
        for share in &mut self.services {
            self.work |= share.accelerators.iter().any(|d| !d.rx_pending.is_empty());
            // A clock is read only for a message that is followed, see `stages.rs`.
            let clock_ns = || self.clock.as_ref().map_or(now_ns, |clock| clock());
            if share.awaits_release() {
                share.look(clock_ns());
                share.drive(now_ns);
                share.look(clock_ns());
            } else {
                share.drive(now_ns);
            }
        }
        // Exhale.
        for share in 0..self.services.len() {
            self.gather(share);
        }
        // Keep house, before the flush: what it has to tell leaves with this turn, for the worker may
        // sleep after it.
        if now_ns >= self.next_tick_ns {
            self.next_tick_ns = now_ns + TICK_NS;
            self.housekeeping();
        }
        self.flush(true);
        for share in 0..self.services.len() {
            self.note_sent(share);
        }
        self.counters.turns.one();
        if self.work {
            self.idle_since_ns = now_ns;
            self.counters.busy_turns.one();
        }
        self.work
    }

    /// Whoever comes first gets the credit there is. So each source is first in one of four turns, and each of its ports,
    /// connections, clients or workers in a whole round of these: a flood from the one does not keep the others out.
    fn take_requests_in(&mut self) {
        let turn = self.counters.turns.value() % SOURCES;
        if turn == 0 && self.to_read.len() > 1 {
            self.to_read.rotate_left(1);
        }
        let round = (self.counters.turns.value() / SOURCES) as usize;
        for step in 0..SOURCES {
            match (turn + step) % SOURCES {
                0 => self.take_handed_over(round),
                1 => self.receive_datagrams(round),
                2 => self.read_shm_clients(round),
                _ => self.read_streams(),
            }
        }
    }

    /// The time since the last turn began belongs to what that turn was: every nanosecond of a running
    /// worker is in exactly one of the three counters, and no turn reads the clock for them.
    #[inline]
    fn account_time(&mut self, now_ns: u64) {
        if self.counters.turns.value() == 0 {
            return;
        }
        let passed_ns = now_ns - self.now_ns;
        let counters = &*self.counters;
        let spent = match (self.work, std::mem::take(&mut self.slept)) {
            (true, _) => &counters.busy_ns,
            (false, false) => &counters.idle_ns,
            (false, true) => &counters.sleep_ns,
        };
        spent.add(passed_ns);
    }

    /// Something happened this turn: the worker stays awake.
    pub(crate) fn busy(&mut self) {
        self.work = true;
    }

    fn sort_events(&mut self) {
        for index in 0..self.events.len() {
            match self.events[index] {
                Event::Datagrams(port) | Event::Connections(port) => {
                    self.ports[port as usize].ready = true;
                }
                Event::Readable(key) => self.stream_readable(key),
                Event::Writable(key) => self.stream_writable(key),
                Event::Failed(key) => self.stream_failed(key),
            }
        }
    }

    fn owner(&self, key: StreamKey) -> StreamOwner {
        match key.checked_sub(self.connections_max) {
            None => StreamOwner::Connection,
            Some(backend) => self.owners[backend as usize],
        }
    }

    fn stream_readable(&mut self, key: StreamKey) {
        match self.owner(key) {
            StreamOwner::Connection => {
                if let Some(connection) = self.connections.at(key) {
                    connection.readable = true;
                    self.list_to_read(key);
                }
            }
            StreamOwner::Backend { share, pool, number } => {
                let (pool, number) = (pool.into(), number.into());
                let share = &mut self.services[share as usize];
                share.read_backend(&mut self.nic, pool, number, self.now_ns, &mut self.scratch);
                self.work = true;
            }
            StreamOwner::Client { share, client } => {
                let share = &mut self.services[share as usize];
                share.read_datagram_backend(&mut self.nic, client, &mut self.scratch);
                self.work = true;
            }
        }
    }

    fn stream_writable(&mut self, key: StreamKey) {
        match self.owner(key) {
            StreamOwner::Connection => self.list_to_write(key),
            StreamOwner::Backend { share, pool, number } => {
                self.services[share as usize].backend_writable(pool.into(), number.into());
            }
            StreamOwner::Client { .. } => {}
        }
    }

    fn stream_failed(&mut self, key: StreamKey) {
        match self.owner(key) {
            StreamOwner::Connection => self.close_connection(key, Close::Reset),
            StreamOwner::Backend { share, pool, number } => {
                let (pool, number) = (pool.into(), number.into());
                let closed = mqueue::abi::status::CLOSED;
                let share = &mut self.services[share as usize];
                share.fail_backend(&mut self.nic, pool, number, closed, self.now_ns);
            }
            StreamOwner::Client { share, client } => {
                self.services[share as usize].fail_datagram_backend(&mut self.nic, client);
            }
        }
    }

    pub(crate) fn list_to_read(&mut self, key: StreamKey) {
        let Some(connection) = self.connections.at(key) else { return };
        if !std::mem::replace(&mut connection.listed, true) {
            self.to_read.push(key);
        }
    }

    pub(crate) fn list_to_write(&mut self, key: StreamKey) {
        let Some(connection) = self.connections.at(key) else { return };
        if !std::mem::replace(&mut connection.dirty, true) {
            self.to_write.push(key);
        }
    }

    /// Empties the TX rings that may hold something: those the blocks touched, those left over.
    fn gather(&mut self, share: usize) {
        self.services[share].take_blocked();
        for index in 0..self.services[share].retried.len() {
            let mqueue = self.services[share].retried[index];
            let shown = self.services[share].shown(mqueue);
            self.gather_replies(share, mqueue, shown);
        }
        for index in 0..self.services[share].retried_clients.len() {
            self.take_backend_requests(share, self.services[share].retried_clients[index]);
        }
        for drive in 0..self.services[share].accelerators.len() {
            let count = self.services[share].accelerators[drive].tx_pending.len();
            for first in (0..count).step_by(HEADS_READ) {
                let shown = self.services[share].read_heads(drive, first);
                for (index, shown) in (first..count).zip(shown) {
                    self.services[share].fetch_ahead(drive, index);
                    match self.services[share].tx_pending(drive, index) {
                        ShareMqueue::Server(mqueue) => self.gather_replies(share, mqueue, shown),
                        ShareMqueue::Client(client) => self.take_backend_requests(share, client),
                        ShareMqueue::Foreign => {}
                    }
                }
            }
        }
        if self.services[share].replies == Replies::None {
            self.services[share].count_consumed(self.now_ns);
        }
    }

    fn take_backend_requests(&mut self, share: usize, client: u32) {
        let share = &mut self.services[share];
        share.take_backend_requests(&mut self.nic, client, self.now_ns, &mut self.scratch);
    }

    /// Once a millisecond: time-outs, deaths, heartbeats, hints.
    fn housekeeping(&mut self) {
        self.retry_losses();
        for share in 0..self.services.len() {
            self.expire_requests(share);
            let Self { services, nic, now_ns, .. } = self;
            services[share].expire_backends(nic, *now_ns);
            services[share].look_for_late(*now_ns);
            services[share].unsample_ended();
            if services[share].leaving.is_none() {
                services[share].observe_depth();
            }
            self.reap_dead_mqueues(share);
        }
        if self.fabric.workers() > 1 {
            self.publish_credit();
            self.read_credit();
        }
        self.check_leaving();
        (0..self.services.len()).for_each(|slot| self.check_paused(slot));
        self.sweep_connections();
        let connections = self.connections.open_count() + self.memory.len();
        self.counters.connections.set(connections as u64);
        self.counters.outstanding.set(self.outstanding());
        self.take_counts_below();
        if self.draining {
            self.report_settled();
        }
    }

    fn expire_requests(&mut self, share: usize) {
        let before_ns = self.now_ns.saturating_sub(self.services[share].timeout_ns);
        while let Some(request) = self.services[share].sessions.expire(before_ns) {
            if !mutants::on("leak_credit") {
                self.services[share].ended(request.mqueue);
            }
            self.drop_request(
                share,
                &request.origin,
                request.number,
                request.expects,
                DropReason::RequestTimeout,
            );
        }
    }

    /// Ends the requests of mqueues whose block ended, hangs, or wrote impossible words.
    fn reap_dead_mqueues(&mut self, share: usize) {
        let mut died = false;
        for drive in 0..self.services[share].accelerators.len() {
            let mut ended = std::mem::take(&mut self.ended);
            self.services[share].accelerators[drive].blocks.ended(&mut ended);
            for (block, reason) in ended.drain(..) {
                let found = self.services[share]
                    .mqueues
                    .iter()
                    .position(|m| usize::from(m.attachment) == drive && m.block == block);
                if reason == mqueue::abi::reason::HUNG {
                    self.hung = true;
                    self.services[share].hung_blocks += 1;
                    self.count_hung_blocks();
                }
                let orderly = self.draining && reason == mqueue::abi::reason::STOPPED;
                if let (Some(mqueue), false) = (found, orderly) {
                    // One that was stopped: another worker has let go of the service already.
                    if reason != mqueue::abi::reason::STOPPED {
                        tracing::error!(
                            service = &*self.services[share].name,
                            kernel = self.services[share].kernels.get(drive).map(|name| &**name),
                            block,
                            reason = mqueue::abi::reason::name(reason),
                            "a block ended; its mqueue is dead"
                        );
                    }
                    died |= self.services[share].mark_dead(mqueue as u32);
                }
            }
            self.ended = ended;
        }
        for mqueue in 0..self.services[share].mqueues.len() {
            let entry = &self.services[share].mqueues[mqueue];
            if self.services[share].loads[mqueue].alive && entry.tx_corrupt {
                tracing::error!(
                    service = &*self.services[share].name,
                    block = entry.block,
                    "an accelerator wrote impossible ring words; the mqueue is dead"
                );
                let (drive, block) = (usize::from(entry.attachment), entry.block);
                self.services[share].accelerators[drive].blocks.condemn(block);
                died |= self.services[share].mark_dead(mqueue as u32);
            }
        }
        if died {
            self.end_requests_of_dead_mqueues(share, DropReason::MqueueDead);
        }
    }

    /// After a block began to hang, or a service with such blocks has gone.
    pub(crate) fn count_hung_blocks(&self) {
        self.counters.hung_blocks.set(self.services.iter().map(|share| share.hung_blocks).sum());
    }

    /// After [`ServiceShare::kill`]: what is under way on mqueues that are not alive ends for `reason`. That is
    /// what was on those just killed; the others have nothing.
    pub(crate) fn end_requests_of_dead_mqueues(&mut self, share: usize, reason: DropReason) {
        let mut pass = self.services[share].sessions.pass();
        loop {
            let ServiceShare { sessions, loads, .. } = &mut self.services[share];
            let dead = |mqueue: u32| !loads[mqueue as usize].alive;
            let Some(request) = sessions.end_next(&mut pass, dead) else { break };
            self.drop_request(share, &request.origin, request.number, request.expects, reason);
        }
        let share = &mut self.services[share];
        for mqueue in 0..share.mqueues.len() as u32 {
            if share.loads[mqueue as usize].alive {
                continue;
            }
            let unread = share.drop_unread(mqueue);
            if share.replies == Replies::None {
                share.counters.drop_many(reason, unread);
            }
            // Where nobody runs the block that has been done, and its clients may be those of the next generation already.
            if !share.loads[mqueue as usize].absent {
                share.drop_backend_requests_of(mqueue..mqueue + 1, &mut self.nic);
            }
        }
    }

    /// Looks at a part of the connections for clients that idle or do not read.
    fn sweep_connections(&mut self) {
        let part = self.connections.len().div_ceil(SWEEP_PARTS);
        for _ in 0..part {
            if self.sweep_at >= self.connections.len() {
                self.sweep_at = 0;
            }
            let key = self.sweep_at as StreamKey;
            self.sweep_at += 1;
            let now_ns = self.now_ns;
            let (idle_ns, slow_ns) = (self.idle_ns, self.slow_client_ns);
            let Some(connection) = self.connections.at(key) else { continue };
            let service = connection.service;
            let blocked = connection.blocked_since_ns;
            if blocked != 0 && now_ns.saturating_sub(blocked) > slow_ns {
                self.end_connection(key, Close::Reset, DropReason::SlowClient);
            } else if connection.unsettled() == 0
                && connection.reading != Reading::Stalled
                && !self.services[usize::from(service)].is_paused()
                && now_ns.saturating_sub(connection.last_message_ns) > idle_ns
            {
                self.services[service as usize].counters.drop_one(DropReason::IdleTimeout);
                self.close_connection(key, Close::Graceful);
            }
        }
    }

    /// Requests under way on this worker, and replies that have not left it.
    pub fn outstanding(&self) -> u64 {
        (0..self.services.len()).map(|share| self.outstanding_of(share)).sum()
    }

    /// Requests of the service in a slot that are under way on this worker: counted from the tables and queues that hold
    /// them, not from the counters. Messages inside hand-over rings are on nobody's account; see
    /// [`crate::metrics::ServiceCounters::handed_out`].
    pub fn outstanding_of(&self, service: usize) -> u64 {
        let Some(share) = self.services.get(service) else { return 0 };
        let ports = self.ports.iter().filter(|p| usize::from(p.service) == service);
        let datagrams: usize = ports.map(|p| p.tx.waiting().len()).sum();
        share.under_way() + self.connections.replies_waiting(service as u16) + datagrams as u64
    }

    /// Requests of the service in a slot under way on each of this worker's mqueues, in service share order; never more
    /// than the service's `slots`.
    pub fn outstanding_by_mqueue(&self, service: usize) -> impl Iterator<Item = u32> + '_ {
        self.services.get(service).into_iter().flat_map(ServiceShare::outstanding_by_mqueue)
    }

    /// How long the worker may sleep now; 0: not at all.
    pub fn sleep_ns(&self, now_ns: u64) -> u64 {
        let may = match self.polling {
            Polling::Spin => false,
            Polling::Block => !self.work,
            Polling::Adaptive => {
                let spun = now_ns.saturating_sub(self.idle_since_ns) > SPIN_NS;
                !self.work && (spun || now_ns < self.neighbour_until_ns)
            }
        };
        let leftover = self.draining
            || !self.to_read.is_empty()
            || !self.to_write.is_empty()
            || !self.pending_losses.is_empty()
            || self.ports.iter().any(|p| p.ready && !p.paused || !p.tx.is_empty());
        if !may || leftover {
            return 0;
        }
        let mut sleep_ns = SLEEP_NS_MAX;
        for share in &self.services {
            if share.is_leaving_busy() || share.is_paused() {
                sleep_ns = sleep_ns.min(TICK_NS);
            }
            let under_way = share.under_way() > 0 && !mutants::on("sleep_on_requests");
            if under_way || !share.blocked.is_empty() || !share.blocked_clients.is_empty() {
                return 0;
            }
            if share.backend_in_flight() {
                sleep_ns = sleep_ns.min(TICK_NS);
            }
            for drive in &share.accelerators {
                if !drive.rx_pending.is_empty() {
                    return 0;
                }
                if drive.blocks.elsewhere() && !share.backends.is_empty() {
                    // A block may ask a backend when no request is under way.
                    sleep_ns = sleep_ns.min(TICK_NS);
                }
                sleep_ns = sleep_ns.min(drive.blocks.wake_at().saturating_sub(now_ns));
            }
        }
        if self.connections.open_count() > 0 {
            sleep_ns = sleep_ns.min(SLEEP_NS_MAX / 4);
        }
        if self.memory.waits_for_room() {
            // The client that makes room does not ring for it.
            sleep_ns = sleep_ns.min(TICK_NS);
        }
        sleep_ns
    }

    /// Whether an adaptive worker should offer its core to whoever waits for it: it spins, has found
    /// nothing for a while, and the client it waits for may be queued on this very core.
    pub fn should_yield(&self, now_ns: u64) -> bool {
        self.polling != Polling::Spin
            && !self.work
            && now_ns.saturating_sub(self.idle_since_ns) > YIELD_NS
    }

    /// Tells how long it took to get the core back after it was offered. With a busy neighbour on the
    /// core a sleeping worker is served sooner than a spinning one: the host kernel lets whoever is
    /// woken go first, and makes whoever spins wait for its slice. For a while the worker sleeps as
    /// soon as it has nothing to do.
    pub fn offered_core(&mut self, from_ns: u64, until_ns: u64) {
        if until_ns.saturating_sub(from_ns) > NEIGHBOUR_NS {
            self.neighbour_until_ns = until_ns + NEIGHBOUR_MEMORY_NS;
        }
    }

    /// The hash of a datagram's flow, where the service's dispatch wants it.
    pub(crate) fn flow_of(&self, share: usize, origin: &Origin) -> u64 {
        match origin {
            Origin::Datagram { peer, port, .. } if self.services[share].dispatcher.needs_flow() => {
                flow_hash(*peer, self.ports[*port as usize].number)
            }
            _ => 0,
        }
    }

    pub(crate) fn read_bytes(&self, share: usize) -> usize {
        let share = &self.services[share];
        let longest = share.framing.request_bytes_max(share.max_message_bytes);
        longest.clamp(READ_BYTES_MIN, self.scratch.len())
    }

    /// The network, for tests and the simulator.
    pub fn nic(&mut self) -> &mut N {
        &mut self.nic
    }
}
