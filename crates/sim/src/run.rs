//! One run: a plan, executed step by step.
//!
//! Load, until the plan's turns are used up; quiet, until nothing is in flight; drain and
//! end. In every step the clock moves, the peers act, one worker turns and everything is checked.

mod links;

use std::panic::{AssertUnwindSafe, catch_unwind};

use engine::metrics::ServiceSnapshot;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Nic;

use crate::case::Case;
use crate::fault::{Fault, FaultCounts};
use crate::nic::{SimNic, SimSocket};
use crate::plan::Plan;
use crate::rng::Rng;
use crate::shared::lock;
use crate::socket_peer::SocketLoad;
use crate::trace::Trace;
use crate::world::World;
use crate::world::generations::Restart;

const MS: u64 = 1_000_000;
/// Time limit until all is quiet: a pipeline of requests that each time out, one after the other,
/// and the time-outs of backends and of clients that do not read.
const QUIET_NS_MAX: u64 = 600_000 * MS;

/// Rounds without an event after which nothing will happen any more.
const IDLE_ROUNDS_MAX: u32 = 200;

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Hash of all events.
    pub trace_hash: u64,
    /// Events in it.
    pub events: u64,
    /// Virtual time it took, in nanoseconds.
    pub took_ns: u64,
    /// The engine's counters at the end, by service.
    pub services: Vec<ServiceSnapshot>,
    /// How often each fault occurred.
    pub fault_counts: FaultCounts,
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The case that was run.
    pub case: Case,
    /// Time in nanoseconds of the run.
    pub at_ns: u64,
    /// Description.
    pub text: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { case, at_ns, text } = self;
        write!(f, "seed {} at {at_ns} ns: {text}", case.seed)
    }
}

impl Violation {
    /// The description without numbers: equal for two runs that break the same promise.
    pub fn kind(&self) -> String {
        let words = self.text.chars().filter(|c| !c.is_ascii_digit());
        words.take(40).collect()
    }

    /// The smallest case that breaks the same promise.
    pub fn shrink(&self) -> Self {
        let mut found = self.clone();
        self.case.shrink(|case| match simulate(case, false) {
            Err(other) if other.kind() == self.kind() => {
                found = other;
                true
            }
            _ => false,
        });
        found
    }
}

/// Runs a seed or a smaller case of it; a panic inside the engine is a violation.
pub fn simulate(case: impl Into<Case>, trace: bool) -> Result<Report, Violation> {
    simulate_with(case, trace, |nic| nic)
}

/// The same with a wrapper between the workers and their network (for tests of the checks).
pub fn simulate_with<N: Nic<Socket = SimSocket, Port = ()>>(
    case: impl Into<Case>,
    trace: bool,
    wrap: impl Fn(SimNic) -> N,
) -> Result<Report, Violation> {
    let case = case.into();
    let plan = case.plan();
    simulate_plan(plan, trace, wrap).map_err(|(at_ns, text)| Violation { case, at_ns, text })
}

/// Runs a plan that no seed has; an error is the time in nanoseconds and the description.
pub fn simulate_plan<N: Nic<Socket = SimSocket, Port = ()>>(
    plan: Plan,
    trace: bool,
    wrap: impl Fn(SimNic) -> N,
) -> Result<Report, (u64, String)> {
    let run = || Run::new(plan, trace, wrap).go();
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Err((0, format!("panicked: {}", text.unwrap_or_default())))
    })
}

/// A run in progress.
pub(crate) struct Run<N: Nic<Socket = SimSocket, Port = ()>> {
    pub(crate) plan: Plan,
    pub(crate) world: World<N>,
    pub(crate) rng: Rng,
}

impl<N: Nic<Socket = SimSocket, Port = ()>> Run<N> {
    fn new(mut plan: Plan, trace: bool, wrap: impl Fn(SimNic) -> N) -> Self {
        if trace {
            eprintln!("{plan:#?}");
        }
        let world = World::build(&plan.setup, wrap);
        let mut net = lock(&world.net);
        net.trace = Trace::new(trace);
        net.set_faults(plan.faults);
        drop(net);
        let rng = plan.rng.fork();
        Self { plan, world, rng }
    }

    fn go(mut self) -> Result<Report, (u64, String)> {
        match self.stages() {
            Ok(()) => Ok(self.report()),
            Err(text) => Err((self.world.now_ns(), text)),
        }
    }

    fn stages(&mut self) -> Result<(), String> {
        self.load()?;
        if self.plan.drain_at.is_none() {
            self.stop_requests();
            self.quiet()?;
            if self.plan.probe {
                self.probe()?;
            }
        }
        self.drain()
    }

    /// Stops all clients' requests.
    fn stop_requests(&mut self) {
        for client in &mut self.plan.stream_clients {
            client.stop_requests();
        }
        for client in &mut self.plan.datagram_clients {
            client.left = 0;
        }
        for client in &mut self.plan.memory_clients {
            client.stop_requests();
        }
        self.plan.socket_loads.iter_mut().for_each(SocketLoad::stop);
    }

    fn load(&mut self) -> Result<(), String> {
        let turns = match self.plan.drain_at {
            Some(at) if at < self.plan.turns => {
                lock(&self.world.net).fault_counts.one(Fault::EarlyDrain);
                at
            }
            _ => self.plan.turns,
        };
        if self.plan.setup.ring_start > 0 {
            lock(&self.world.net).fault_counts.one(Fault::RingWrap);
        }
        for turn in 0..turns {
            self.begin_changes(turn);
            self.spoil_links();
            let (low, high) = self.plan.stride_ns;
            let mut stride_ns = self.rng.between(low, high);
            if self.plan.pause_one_in < u64::MAX && self.rng.below(self.plan.pause_one_in) == 0 {
                stride_ns += self.rng.below(5 * MS);
                lock(&self.world.net).fault_counts.one(Fault::Pause);
            }
            self.world.advance(stride_ns);
            self.peers();
            let worker = self.rng.below(self.world.workers.len() as u64) as usize;
            if !self.world.is_changed() && self.rng.chance(300) {
                self.world.follow(worker);
            }
            if self.rng.chance(self.plan.late_messages) {
                lock(&self.world.net).fault_counts.one(Fault::LateMessage);
                self.world.post_late_message(worker, &mut self.rng);
            }
            if self.world.is_awake(worker) {
                self.world.turn(worker);
                self.world.check_turn(worker)?;
            } else if self.world.is_changed() {
                self.skip_idle_time();
            }
        }
        self.check_drops()
    }

    /// Accelerators restart, services are replaced: one such change at a time.
    fn begin_changes(&mut self, turn: u32) {
        let Self { plan, world, .. } = self;
        for number in 0..plan.restarts.len() {
            let Restart { service, accelerator, .. } = plan.restarts[number];
            let waits = plan.restarts[number].due.is_none() && plan.restarts[number].turn <= turn;
            let others = plan.restarts.iter().any(|r| r.is_of(service, accelerator));
            let fails = others || world.link_fails(service, accelerator);
            if waits && !fails && world.is_changed() {
                plan.restarts[number].begin(world);
            }
        }
        let restarts = plan.restarts.iter().any(|r| r.is_in_progress());
        if !world.is_changed() || restarts || world.any_link_fails() {
            return;
        }
        let due = plan.reloads.iter_mut().find(|r| !r.begun && r.turn <= turn);
        if let Some(reload) = due {
            reload.begun = true;
            lock(&world.net).fault_counts.one(Fault::Reload);
            let mut spec = world.topology().services[reload.service].clone();
            spec.slots = reload.slots;
            world.put(spec, reload.service, reload.keeps, reload.drain_ns);
        }
    }

    /// Skips time in which everything waits.
    fn skip_idle_time(&mut self) {
        let Some(wake_ns) = self.world.first_wake_ns() else { return };
        let models = self.world.models.iter().map(|m| lock(m).remote_due_ns());
        let due_ns = models.fold(wake_ns.min(self.peers_due_ns()), u64::min);
        let now_ns = self.world.now_ns();
        self.world.advance(due_ns.saturating_sub(now_ns));
    }

    /// Time of the next action of a peer or the next arrival.
    pub(crate) fn peers_due_ns(&self) -> u64 {
        let clients = self.plan.datagram_clients.iter().map(|c| c.due_ns());
        let streams = self.plan.stream_clients.iter().map(|c| c.due_ns());
        let memory = self.plan.memory_clients.iter().map(|c| c.due_ns());
        let connections = self.plan.restarts.iter().map(|r| r.due_ns());
        let sockets = self.plan.socket_loads.iter().map(|load| load.due_ns());
        let backends = self.plan.backends.iter().map(|b| b.due_ns());
        let net_ns = lock(&self.world.net).next_due_ns().unwrap_or(u64::MAX);
        clients
            .chain(streams)
            .chain(memory)
            .chain(connections)
            .chain(sockets)
            .chain(backends)
            .fold(net_ns, u64::min)
    }

    fn peers(&mut self) {
        self.reconnect();
        for restart in &mut self.plan.restarts {
            restart.step(&mut self.world);
        }
        let mut net = lock(&self.world.net);
        for backend in &mut self.plan.backends {
            backend.step(&mut net);
        }
        for client in &mut self.plan.datagram_clients {
            client.step(&mut net);
        }
        for client in &mut self.plan.stream_clients {
            client.step(&mut net, &mut self.plan.next_id);
        }
        for load in &mut self.plan.socket_loads {
            load.step(&mut net, &mut self.plan.next_id);
        }
        for server in &mut self.plan.socket_servers {
            server.step(&mut net, &mut self.plan.socket_rng);
        }
        let topology = self.world.topology();
        for client in &mut self.plan.memory_clients {
            let spec = &topology.services[client.service];
            let slot = self.world.shm_slot(client.service);
            let reachability = (&*self.world.fabric, spec, topology.limits.connections, slot);
            client.step(&mut net, reachability, &mut self.plan.next_id);
            if self.world.is_changed() && !net.ending {
                client.check_sent_away(&mut net);
            }
        }
    }

    /// One turn of every worker, in random order, `by_ns` later. Returns whether anything happened.
    pub(crate) fn round(&mut self, by_ns: u64) -> Result<bool, String> {
        let events = lock(&self.world.net).trace.events();
        self.world.advance(by_ns);
        self.peers();
        let mut order: Vec<usize> = (0..self.world.workers.len()).collect();
        self.rng.shuffle(&mut order);
        for worker in order {
            if !self.world.is_changed() && self.rng.chance(500) {
                self.world.follow(worker);
            }
            self.world.turn(worker);
            self.world.check_turn(worker)?;
        }
        let events = lock(&self.world.net).trace.events() - events;
        Ok(events > self.world.workers.len() as u64)
    }

    /// Waits until nothing is in flight; then everything must have been returned.
    fn quiet(&mut self) -> Result<(), String> {
        for client in &mut self.plan.stream_clients {
            if client.behaviour.read_max > 0 {
                client.behaviour.read_max = client.behaviour.read_max.max(1 << 16);
            }
            client.behaviour.write_max = client.behaviour.write_max.max(1 << 16);
            client.behaviour.pause_ns = (0, MS);
        }
        let end_ns = self.world.now_ns() + QUIET_NS_MAX;
        let (mut quiet_rounds, mut idle_rounds) = (0, 0);
        while quiet_rounds < 20 && self.world.now_ns() < end_ns {
            // While nothing moves, something waits for a time-out.
            let stride_ns = if idle_rounds < 50 { 2 * MS } else { 200 * MS };
            let by_ns = self.rng.between(MS / 10, stride_ns);
            idle_rounds = if self.round(by_ns)? { 0 } else { idle_rounds + 1 };
            // A stuck service leaves its streams unread permanently.
            let patient = idle_rounds < IDLE_ROUNDS_MAX;
            let in_flight = !self.world.is_changed()
                || self.plan.restarts.iter().any(|r| r.is_in_progress())
                || lock(&self.world.net).next_due_ns().is_some()
                || patient && self.check_unread().is_err()
                || patient && self.plan.stream_clients.iter().any(|c| c.has_more())
                || patient && self.check_sockets().is_err()
                || self.world.any_link_fails()
                || patient && self.world.check_links().is_err()
                || self.world.check_quiet().is_err();
            quiet_rounds = if in_flight { 0 } else { quiet_rounds + 1 };
        }
        self.world.check_quiet()?;
        self.check_drops()?;
        self.check_unread()?;
        self.check_sockets()?;
        self.world.check_links()?;
        self.check_unanswered()
    }

    /// The connections of a sound service's blocks have ended.
    fn check_sockets(&self) -> Result<(), String> {
        for load in self.plan.socket_loads.iter().filter(|load| self.plan.sound[load.service]) {
            let (service, open) = (load.service, load.open());
            if open > 0 {
                return Err(format!(
                    "all is quiet, but {open} clients of sockets of {service} wait"
                ));
            }
            if let Some(left) = self.world.open_sockets(service) {
                return Err(format!("all is quiet, but service {service} has {left}"));
            }
        }
        Ok(())
    }

    /// Nothing was lost without a cause.
    fn check_drops(&self) -> Result<(), String> {
        for service in 0..self.plan.sound.len() {
            let counted = self.world.metrics.service(service);
            let now_ns = self.world.now_ns();
            if let Some(reason) = self.plan.impossible(service, &counted, now_ns) {
                let sound = self.plan.sound[service];
                return Err(format!(
                    "service {service} (sound: {sound}) has no cause for {}: {counted:?}",
                    reason.name()
                ));
            }
        }
        Ok(())
    }

    /// A sound service has read everything that its clients sent.
    fn check_unread(&mut self) -> Result<(), String> {
        let Self { plan, world, .. } = self;
        for client in plan.memory_clients.iter_mut().filter(|c| plan.sound[c.service]) {
            let (service, owed) = (client.service, client.owed(false));
            if owed > 0 {
                return Err(format!(
                    "all is quiet, but service {service} owes a memory client {owed} outcomes"
                ));
            }
        }
        for service in (0..plan.sound.len()).filter(|s| plan.sound[*s]) {
            if let Some(conn) = lock(&world.net).unread(service) {
                return Err(format!("all is quiet, but service {service} leaves {conn} unread"));
            }
        }
        Ok(())
    }

    /// A service that lost nothing owes nothing.
    fn check_unanswered(&self) -> Result<(), String> {
        for service in 0..self.plan.sound.len() {
            let counted = self.world.metrics.service(service);
            let intake =
                [DropReason::BadFraming, DropReason::ConnectionLimit, DropReason::IdleTimeout];
            let lost = counted.dropped_requests()
                + intake.iter().map(|reason| counted.dropped(*reason)).sum::<u64>();
            // A connection that moved may have been closed with unread input; behind the messages that a stuck block of a
            // service without replies keeps, streams stay unread.
            if lost > 0 || self.plan.is_reloaded(service) || self.world.keeps_unread(service) {
                continue;
            }
            for client in self.plan.stream_clients.iter().filter(|c| c.service == service) {
                // The content of an unread stream, and the optional replies, are unknown.
                let unclear = client.behaviour.read_max == 0
                    || !client.judged
                    || client.request_mix.framing == Framing::Raw;
                let owed = client.owed() as u64 + client.unanswered;
                if owed > 0 && !unclear && client.request_mix.silent == 0 {
                    return Err(format!(
                        "service {service} lost nothing, but a client is owed {owed}: {counted:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Drains, ends, lets the clients read the rest, checks that nothing is left.
    fn drain(&mut self) -> Result<(), String> {
        lock(&self.world.net).ending = true;
        let cut = self.plan.drain_cuts_reload;
        while !(self.world.is_changed() || cut && self.world.is_switched()) {
            let by_ns = self.rng.between(0, MS);
            self.round(by_ns)?;
        }
        if !self.world.is_changed() {
            lock(&self.world.net).fault_counts.one(Fault::CutReload);
            self.world.abandon_change();
        }
        let end_ns = self.world.now_ns() + self.plan.drain_ns;
        let mut draining = vec![false; self.world.workers.len()];
        loop {
            // Workers learn of it one after the other.
            for (worker, draining) in draining.iter_mut().enumerate() {
                if !*draining && self.rng.chance(300) {
                    *draining = true;
                    self.world.drain_worker(worker);
                }
            }
            // Every worker turns once after it has learned of it.
            let all = draining.iter().all(|d| *d);
            let by_ns = self.rng.between(0, MS);
            self.round(by_ns)?;
            if all && (self.world.all_settled() || self.world.now_ns() >= end_ns) {
                break;
            }
        }
        let settled = self.world.all_settled();
        lock(&self.world.net).cut_off = !settled && self.world.workers.len() > 1;
        let timed_out =
            |world: &World<N>, service| world.dropped(service, DropReason::DrainTimeout);
        let services = 0..self.plan.sound.len();
        let before: Vec<u64> = services.map(|s| timed_out(&self.world, s)).collect();
        self.world.finish();
        self.world.check_finished()?;
        if settled {
            for (service, before) in before.into_iter().enumerate() {
                let lost = timed_out(&self.world, service) - before;
                if lost > 0 {
                    return Err(format!(
                        "all workers had settled, then service {service} lost {lost}"
                    ));
                }
            }
        }
        for _ in 0..100 {
            self.world.advance(MS);
            self.peers();
        }
        if !self.plan.memory_clients.iter().all(|c| c.is_gone()) {
            return Err("the workers have ended, but a memory client is connected".into());
        }
        self.world.check_finished()
    }

    fn report(&self) -> Report {
        let net = lock(&self.world.net);
        let mut trace = net.trace.clone();
        let services: Vec<_> =
            (0..self.plan.sound.len()).map(|s| self.world.metrics.service(s)).collect();
        for service in &services {
            trace.note(net.now_ns(), "end", &service.drops);
            trace.note(net.now_ns(), "end", &[service.received, service.replied, service.consumed]);
        }
        Report {
            trace_hash: trace.hash(),
            events: trace.events(),
            took_ns: net.now_ns(),
            services,
            fault_counts: net.fault_counts.clone(),
        }
    }
}
