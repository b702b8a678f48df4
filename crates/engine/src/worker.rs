//! The worker: one thread that runs [`Worker::turn`] in a loop.
//!
//! A message passes the turn once: inhale (the network and the other workers), dispatch, drive (the blocks), exhale
//! (replies, housekeeping, backends, the network). There are no callbacks and no locks; a message that cannot be
//! processed now (no credit, no room) stays where it is and is tried again next turn.
//!
//! | step | where |
//! |---|---|
//! | readiness, one call | [`Worker::wait`] → [`Nic::poll`] |
//! | requests in | `endpoint/{udp,tcp,shm,peer}.rs`, as `schedule.rs` allows |
//! | counted in, dispatched | `admit.rs`, `service/dispatch.rs`, into the RX ring by `service/share.rs` |
//! | blocks | [`crate::base::accelerator::Blocks::drive`] |
//! | TX rings out | `depart.rs`, to the endpoints |
//! | backends | `endpoint/backend.rs` |
//! | upstream servers of proxies | `endpoint/upstream.rs` |
//! | sockets of kernels | `endpoint/sockets.rs` |
//! | once a millisecond | `housekeeping.rs` |
//! | installation, change and removal of services | `control/` |

use std::sync::Arc;

use wire::nic::{Close, Event, Nic};

use crate::base::fabric::Fabric;
use crate::base::idle::Idle;
use crate::base::keys::{StreamKeys, StreamOwner};
use crate::base::metrics::Metrics;
use crate::base::topology::{Limits, Polling};
use crate::control::message::{ControlMessage, MessageOf};
use crate::endpoint::set::Endpoints;
use crate::housekeeping::Housekeeping;
use crate::schedule::Schedule;
use crate::service::share::ServiceShare;
use crate::turn::Turn;
use crate::turn::scratch_bytes;

/// Interval at which a worker checks sources that do not wake it.
const POLL_NS: u64 = 1_000_000;

/// See the module documentation.
pub struct Worker<N: Nic> {
    /// For its mailbox.
    pub(crate) fabric: Arc<Fabric<MessageOf<N>>>,
    pub(crate) turn: Turn<N>,
    pub(crate) endpoints: Endpoints,
    pub(crate) schedule: Schedule,
    pub(crate) idle: Idle,
    pub(crate) housekeeping: Housekeeping,
    events: Vec<Event>,
    /// It runs no further turn.
    pub(crate) stopped: bool,
}

impl<N: Nic> Worker<N> {
    /// A worker without services: they are added by [`ControlMessage::Install`](crate::ControlMessage::Install) and
    /// [`Switch`](crate::ControlMessage::Switch). `limits.connections` is fixed, the other limits are valid until the
    /// first switch. Allocates the memory of the message path.
    pub fn new(
        index: usize,
        nic: N,
        limits: &Limits,
        metrics: &Metrics,
        fabric: Arc<Fabric<MessageOf<N>>>,
    ) -> Self {
        let endpoints = Endpoints::new(nic.rx_batch(), fabric.workers(), limits);
        let counters = metrics.of_worker(index).0;
        let others = fabric.clone();
        let hand_connection = Box::new(move |worker, accepted| {
            others.post_from_worker(worker, ControlMessage::Connection(accepted));
        });
        let shared = fabric.shared().clone();
        Self {
            turn: Turn::new(
                index as u16,
                nic,
                shared,
                hand_connection,
                counters,
                StreamKeys::new(limits.connections),
                scratch_bytes([]),
            ),
            fabric,
            endpoints,
            schedule: Schedule::new(index as u16),
            idle: Idle::new(Polling::Block),
            housekeeping: Housekeeping::default(),
            events: Vec::with_capacity(1024),
            stopped: false,
        }
    }

    /// Sets the clock, which is also the source of every turn's `now_ns`. With it the times of stages inside a turn
    /// are measured; without it their resolution is a turn.
    pub fn set_clock(&mut self, clock: impl Fn() -> u64 + Send + 'static) {
        self.turn.set_clock(Box::new(clock));
    }

    /// The turn's one readiness call; sleeps for `sleep_ns` at most.
    pub fn wait(&mut self, sleep_ns: u64) {
        let Self { fabric, turn, endpoints, events, .. } = self;
        if sleep_ns == 0 {
            return turn.nic.poll(0, events);
        }
        let alone = turn.shared.workers() == 1 && endpoints.shm.is_empty();
        if !alone {
            // Published state must not be older than the sleep, nor the state read from others.
            turn.publish_credit();
            turn.shared.set_asleep(turn.index);
            endpoints.shm.set_parked(true);
        }
        let mail = !alone
            && !mutants::on("sleep_on_mail")
            && (fabric.mailbox(turn.index).len() > 0
                || endpoints.peers.is_hinted()
                || endpoints.shm.hinted(|of| turn.services[usize::from(of)].is_held()));
        if !mail {
            self.idle.set_slept();
            turn.counters.sleeps.one();
        }
        turn.nic.poll(if mail { 0 } else { sleep_ns }, events);
        if !alone {
            endpoints.shm.set_parked(false);
            turn.shared.set_awake(turn.index);
            turn.read_credit();
        }
    }

    /// One pass over everything that [`Self::wait`] reported and everything that waited. `now_ns` never decreases.
    /// Returns whether there was work.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        self.begin_turn(now_ns);
        // Inhale.
        self.sort_events();
        self.drain_mailbox();
        let Self { turn, endpoints, schedule, .. } = self;
        endpoints.take_replies(turn);
        endpoints.receive(turn, schedule);
        if turn.socket_lists.is_used() {
            turn.receive_sockets(schedule);
        }
        // Accelerate.
        turn.drive();
        // Exhale.
        let all = std::mem::take(&mut turn.ticked) || !schedule.is_shared();
        for service in 0..turn.services.len() {
            if all || !turn.services[service].is_proxy() {
                endpoints.gather(turn, schedule, service);
            }
        }
        if turn.upstream.is_used() {
            endpoints.exchange_upstream(turn, schedule);
        }
        if turn.socket_lists.is_used() {
            turn.send_sockets(schedule);
            endpoints.listen_for_sockets(turn);
        }
        // Before the flush: its notifications are sent in this turn, since the worker may sleep after it.
        if self.housekeeping.is_due(now_ns) {
            self.run_housekeeping();
        }
        let Self { turn, endpoints, .. } = self;
        endpoints.flush(turn, true);
        turn.flush_backends();
        for service in 0..turn.services.len() {
            endpoints.note_sent(turn, service);
        }
        self.end_turn()
    }

    /// Adds the time since the start of the last turn to the counter of that turn's state: every nanosecond of a
    /// running worker is in exactly one of the three counters, and no turn reads the clock for them.
    #[inline]
    fn begin_turn(&mut self, now_ns: u64) {
        let Self { turn, idle, schedule, .. } = self;
        if turn.counters.turns.value() > 0 {
            let counters = &*turn.counters;
            let spent = match (turn.worked, idle.take_slept()) {
                (true, _) => &counters.busy_ns,
                (false, false) => &counters.idle_ns,
                (false, true) => &counters.sleep_ns,
            };
            spent.add(now_ns - turn.now_ns);
        }
        (turn.now_ns, turn.worked) = (now_ns, false);
        let Turn { shared, services, .. } = turn;
        schedule.begin_turn(now_ns, shared.tenants(), services);
    }

    #[inline]
    fn end_turn(&mut self) -> bool {
        let Turn { counters, worked, now_ns, .. } = &self.turn;
        counters.turns.one();
        if *worked {
            self.idle.set_worked(*now_ns);
            counters.busy_turns.one();
        }
        *worked
    }

    /// Once a millisecond.
    fn run_housekeeping(&mut self) {
        let Self { turn, endpoints, housekeeping, .. } = self;
        housekeeping.run(turn, endpoints);
        turn.ticked = true;
        self.check_leaving();
        (0..self.turn.services.len()).for_each(|slot| self.check_paused(slot));
        let Self { turn, endpoints, housekeeping, .. } = self;
        housekeeping.check_clients(turn, endpoints);
        let outstanding = self.outstanding();
        self.turn.counters.outstanding.set(outstanding);
        if self.turn.draining {
            self.report_settled();
        }
    }

    fn sort_events(&mut self) {
        for index in 0..self.events.len() {
            match self.events[index] {
                Event::Datagrams(port) => self.endpoints.udp.set_ready(port),
                Event::Connections(port) => self.endpoints.tcp.set_ready(port),
                event @ (Event::Readable(key) | Event::Writable(key) | Event::Failed(key)) => {
                    self.stream_event(event, self.turn.stream_keys.owner(key));
                }
            }
        }
    }

    fn stream_event(&mut self, event: Event, owner: StreamOwner) {
        let Self { turn, endpoints, .. } = self;
        match (owner, event) {
            (_, Event::Datagrams(_) | Event::Connections(_)) => {}
            (StreamOwner::Connection, Event::Readable(key)) => endpoints.tcp.readable(key),
            (StreamOwner::Connection, Event::Writable(key)) => endpoints.tcp.writable(key),
            (StreamOwner::Connection, Event::Failed(key)) => {
                endpoints.tcp.close_connection(turn, key, Close::Reset);
            }
            (StreamOwner::Backend { service, pool, number }, event) => {
                turn.backend_event(event, service.into(), (pool.into(), number.into()));
            }
            (StreamOwner::Mqueue { service, client }, event) => {
                turn.datagram_backend_event(event, service.into(), client);
            }
            (StreamOwner::Flow { service, flow }, event) => turn.flow_event(event, service, flow),
            (StreamOwner::Upstream { service, client }, event) => {
                turn.stream_event(event, service, client);
            }
            (StreamOwner::Socket(id), event) => turn.socket_event(event, id),
        }
    }

    /// Requests in flight on this worker, and replies that have not been sent.
    pub fn outstanding(&self) -> u64 {
        (0..self.turn.services.len()).map(|service| self.outstanding_of(service)).sum()
    }

    /// Requests in flight of the service in a slot on this worker: counted from the tables and queues that hold them,
    /// not from the counters. Messages inside hand-over rings are counted on neither worker; see
    /// [`crate::base::metrics::ServiceCounters::handed_out`].
    pub fn outstanding_of(&self, service: usize) -> u64 {
        let Some(share) = self.turn.services.get(service) else { return 0 };
        share.in_flight() + self.endpoints.outstanding::<N>(service as u16)
    }

    /// Bundles of the service in a slot on this worker that are in use, buffers of its pools that are, and how many of those buffers
    /// only hold messages that were received in place.
    pub fn bundles_of(&self, service: usize) -> (u32, u32, u32) {
        self.turn.services.get(service).map_or((0, 0, 0), ServiceShare::bundles_in_use)
    }

    /// Bytes of the sockets of the service in a slot, to blocks and from them: the books of this worker as far as they are not in the
    /// service's counters yet, and the bytes in rings.
    pub fn socket_bytes_of(&self, service: usize) -> [(sockets::Books, u64); 2] {
        let share = self.turn.services.get(service);
        let sockets = share.and_then(|share| share.sockets.as_ref());
        sockets.map_or_else(Default::default, |sockets| sockets.bytes())
    }

    /// Requests in flight of the service in a slot on each of this worker's mqueues, in service share order; never
    /// more than the service's `slots`.
    pub fn outstanding_by_mqueue(&self, service: usize) -> impl Iterator<Item = u32> + '_ {
        let share = self.turn.services.get(service);
        share.into_iter().flat_map(ServiceShare::outstanding_by_mqueue)
    }

    /// How long the worker may sleep now; 0: not at all.
    pub fn sleep_ns(&self, now_ns: u64) -> u64 {
        let turn = &self.turn;
        let may = self.idle.may_sleep(now_ns, turn.worked);
        if !may
            || turn.draining
            || turn.outbound.has_losses()
            || turn.upstream.is_ready()
            || turn.socket_lists.is_ready()
        {
            return 0;
        }
        let shed_ns = self.schedule.wake_at(&turn.services);
        let endpoints_ns = self.endpoints.wake_at::<N>(now_ns).min(shed_ns);
        // A client that takes what waits for it ends no sleep of its own.
        let waits = turn.upstream.waits_for_clients();
        let endpoints_ns = if waits { endpoints_ns.min(now_ns + POLL_NS) } else { endpoints_ns };
        let wake_ns = turn.services.iter().map(|share| share.wake_at(now_ns, POLL_NS));
        let wake_ns = wake_ns.fold(endpoints_ns, u64::min);
        wake_ns.saturating_sub(now_ns).min(Idle::SLEEP_NS_MAX)
    }

    /// Whether an adaptive worker should yield its core to other threads: it spins, has found no work for a while,
    /// and the client it waits for may be queued on this core.
    pub fn should_yield(&self, now_ns: u64) -> bool {
        self.idle.should_yield(now_ns, self.turn.worked)
    }

    /// Reports how long it took to get the core back after a yield, see [`Self::should_yield`].
    pub fn yielded_core(&mut self, from_ns: u64, until_ns: u64) {
        self.idle.yielded_core(from_ns, until_ns);
    }

    /// Whether a block of this worker hangs or has hung.
    pub fn hung(&self) -> bool {
        self.housekeeping.hung()
    }

    /// The network, for tests and the simulator.
    pub fn nic(&mut self) -> &mut N {
        &mut self.turn.nic
    }
}
