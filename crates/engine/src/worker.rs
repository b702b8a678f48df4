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
//! | servers and peers of blocks and proxies | `endpoint/{backend,upstream,sockets,transfers}.rs` |
//! | once a millisecond | `housekeeping.rs` |
//! | installation, change and removal of services | `control/` |

use std::sync::Arc;

use wire::nic::{Event, Nic};

use crate::base::fabric::Fabric;
use crate::base::idle::Idle;
use crate::base::metrics::Metrics;
use crate::base::topology::{Limits, POLL_NS, Polling};
use crate::base::turn::Turn;
use crate::control::message::{ControlMessage, MessageOf};
use crate::endpoint::set::Endpoints;
use crate::housekeeping::Housekeeping;
use crate::schedule::Schedule;
use crate::service::services::Services;
use crate::service::share::ServiceShare;
use crate::state::State;

/// See the module documentation.
pub struct Worker<N: Nic> {
    /// For its mailbox.
    fabric: Arc<Fabric<MessageOf<N>>>,
    state: State<N>,
    housekeeping: Housekeeping,
    events: Vec<Event>,
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
        let endpoints = Endpoints::new::<N>(nic.rx_batch(), fabric.workers(), limits);
        let counters = metrics.of_worker(index).0;
        let others = fabric.clone();
        let hand_connection = Box::new(move |worker, accepted| {
            others.post_from_worker(worker, ControlMessage::Connection(accepted));
        });
        let (index, shared) = (index as u16, fabric.shared().clone());
        let turn = Turn::new(index, nic, shared, hand_connection, counters, limits.connections);
        Self {
            state: State {
                turn,
                services: Services::default(),
                endpoints,
                schedule: Schedule::new(index),
                idle: Idle::new(Polling::Block),
                stopped: false,
            },
            fabric,
            housekeeping: Housekeeping::default(),
            events: Vec::with_capacity(1024),
        }
    }

    /// Sets the clock, which is also the source of every turn's `now_ns`. With it the times of stages inside a turn
    /// are measured; without it their resolution is a turn.
    pub fn set_clock(&mut self, clock: impl Fn() -> u64 + Send + 'static) {
        self.state.turn.set_clock(Box::new(clock));
    }

    /// The turn's one readiness call; sleeps for `sleep_ns` at most.
    pub fn wait(&mut self, sleep_ns: u64) {
        let Self { fabric, state, events, .. } = self;
        let State { turn, services, endpoints, idle, .. } = state;
        if sleep_ns == 0 {
            return turn.nic.poll(0, events);
        }
        let clients = &mut endpoints.clients;
        let alone = turn.shared.workers() == 1 && clients.processes::<N>() == 0;
        if !alone {
            // Published state must not be older than the sleep, nor the state read from others.
            services.publish_credit(turn);
            turn.shared.set_asleep(turn.index);
            clients.set_parked::<N>(true);
        }
        let mail = !alone
            && !mutants::on("sleep_on_mail")
            && (fabric.mailbox(turn.index).len() > 0 || clients.is_hinted::<N>(services));
        if !mail {
            idle.set_slept();
            turn.counters.sleeps.one();
        }
        turn.nic.poll(if mail { 0 } else { sleep_ns }, events);
        if !alone {
            clients.set_parked::<N>(false);
            turn.shared.set_awake(turn.index);
            services.read_credit(turn);
        }
    }

    /// One pass over everything that [`Self::wait`] reported and everything that waited. `now_ns` never decreases.
    /// Returns whether there was work.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        self.begin_turn(now_ns);
        // Inhale.
        let Self { fabric, state, events, housekeeping } = self;
        let State { turn, services, endpoints, .. } = state;
        for event in events.iter() {
            endpoints.event(turn, services, *event);
        }
        state.drain_mailbox(fabric);
        let State { turn, services, endpoints, schedule, .. } = state;
        endpoints.receive(turn, services, schedule);
        // Accelerate.
        endpoints.before_drive(turn, services, schedule);
        services.drive(turn);
        // Exhale.
        endpoints.gather_all(turn, services, schedule);
        endpoints.exchange(turn, services, schedule);
        // Before the flush: its notifications are sent in this turn, since the worker may sleep after it.
        if housekeeping.is_due(now_ns) {
            self.run_housekeeping();
        }
        let State { turn, services, endpoints, .. } = &mut self.state;
        endpoints.flush(turn, services, true);
        for service in 0..services.len() {
            endpoints.clients.note_sent(turn, services, service);
        }
        self.end_turn()
    }

    /// Adds the time since the start of the last turn to the counter of that turn's state: every nanosecond of a
    /// running worker is in exactly one of the three counters, and no turn reads the clock for them.
    #[inline]
    fn begin_turn(&mut self, now_ns: u64) {
        let State { turn, services, endpoints, idle, schedule, .. } = &mut self.state;
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
        let elsewhere = |service| endpoints.servers.outstanding::<N>(service as u16);
        schedule.begin_turn(now_ns, turn.shared.tenants(), services, &elsewhere);
    }

    #[inline]
    fn end_turn(&mut self) -> bool {
        let State { turn: Turn { counters, worked, now_ns, .. }, idle, .. } = &mut self.state;
        counters.turns.one();
        if *worked {
            idle.set_worked(*now_ns);
            counters.busy_turns.one();
        }
        *worked
    }

    /// Once a millisecond.
    fn run_housekeeping(&mut self) {
        let Self { state, housekeeping, .. } = self;
        let State { turn, services, endpoints, .. } = state;
        housekeeping.run(turn, services, endpoints);
        services.ticked = true;
        state.check_leaving();
        (0..state.services.len()).for_each(|slot| state.check_paused(slot));
        let State { turn, services, endpoints, .. } = state;
        housekeeping.check_clients(turn, services, endpoints);
        let outstanding = state.outstanding();
        state.turn.counters.outstanding.set(outstanding);
        if state.turn.draining {
            state.report_settled();
        }
    }

    /// Requests in flight on this worker, and replies that have not been sent.
    pub fn outstanding(&self) -> u64 {
        self.state.outstanding()
    }

    /// Requests in flight of the service in a slot on this worker: counted from the tables and queues that hold them,
    /// not from the counters. Messages inside hand-over rings are counted on neither worker; see
    /// [`crate::metrics::ServiceCounters::handed_out`].
    pub fn outstanding_of(&self, service: usize) -> u64 {
        self.state.outstanding_of(service)
    }

    /// Bundles of the service in a slot on this worker that are in use, buffers of its pools that are, and how many of
    /// those buffers only hold messages that were received in place.
    pub fn bundles_of(&self, service: usize) -> (u32, u32, u32) {
        self.state.services.get(service).map_or((0, 0, 0), ServiceShare::bundles_in_use)
    }

    /// Bytes of the sockets of the service in a slot, to blocks and from them: the books of this worker as far as they
    /// are not in the service's counters yet, and the bytes in rings.
    pub fn socket_bytes_of(&self, service: usize) -> [(sockets::Books, u64); 2] {
        self.state.endpoints.servers.stream_bytes::<N>(service as u16)
    }

    /// Requests in flight of the service in a slot on each of this worker's mqueues, in their order in the service
    /// share; never more than the service's `slots`.
    pub fn outstanding_by_mqueue(&self, service: usize) -> impl Iterator<Item = u32> + '_ {
        let share = self.state.services.get(service);
        share.into_iter().flat_map(ServiceShare::outstanding_by_mqueue)
    }

    /// How long the worker may sleep now; 0: not at all.
    pub fn sleep_ns(&self, now_ns: u64) -> u64 {
        let State { turn, services, endpoints, schedule, idle, .. } = &self.state;
        let may = idle.may_sleep(now_ns, turn.worked);
        if !may || turn.draining || turn.outbound.has_losses() {
            return 0;
        }
        let elsewhere = |service| endpoints.servers.outstanding::<N>(service as u16);
        let shed_ns = schedule.wake_at(services, &elsewhere);
        let endpoints_ns = endpoints.wake_at::<N>(now_ns, services).min(shed_ns);
        let wake_ns = services.iter().map(|share| share.wake_at(now_ns, POLL_NS));
        let wake_ns = wake_ns.fold(endpoints_ns, u64::min);
        wake_ns.saturating_sub(now_ns).min(Idle::SLEEP_NS_MAX)
    }

    /// Whether an adaptive worker should yield its core to other threads: it spins, has found no work for a while,
    /// and the client it waits for may be queued on this core.
    pub fn should_yield(&self, now_ns: u64) -> bool {
        self.state.idle.should_yield(now_ns, self.state.turn.worked)
    }

    /// Reports how long it took to get the core back after a yield, see [`Self::should_yield`].
    pub fn yielded_core(&mut self, from_ns: u64, until_ns: u64) {
        self.state.idle.yielded_core(from_ns, until_ns);
    }

    /// Whether a block of this worker hangs or has hung.
    pub fn hung(&self) -> bool {
        self.housekeeping.hung()
    }

    /// The network, for tests and the simulator.
    pub fn nic(&mut self) -> &mut N {
        &mut self.state.turn.nic
    }

    /// Ends the worker: unanswered requests are dropped as `drain_timeout`, blocks are stopped and connections
    /// closed. Returns whether a block of this worker hangs.
    pub fn shutdown(&mut self) -> bool {
        self.state.shutdown();
        self.hung()
    }

    /// Whether it was asked to stop: it runs no further turn.
    pub fn is_stopped(&self) -> bool {
        self.state.stopped
    }
}

impl<N: Nic> Drop for Worker<N> {
    fn drop(&mut self) {
        // Also in a panic: the other workers keep running without this one.
        self.fabric.end_worker(self.state.turn.index);
        self.fabric.mailbox(self.state.turn.index).close();
    }
}
