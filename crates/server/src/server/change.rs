//! Changing what runs: from one topology to another without losing what is under way.
//!
//! What can fail comes first and touches nothing that runs: the [`Plan`] is made, regions are created,
//! kernels found, ports bound, accelerator threads started, and every worker takes its seat of the new
//! services. Runtimes in processes of their own are started too and waited for. Only then is everything switched,
//! and nothing can fail any more. Services that leave finish what they have accepted for up to `drain_ms`, and
//! are let go: their runtimes end.
//!
//! Two runtimes cannot be had beside each other where a device such as a GPU would have to take turns, or somebody else starts
//! them. There the next one comes when the last one is gone. Meanwhile the service is held (`engine/src/control/pause.rs`) if the
//! engine starts it, else requests are dropped as `reconfiguring`.
//!
//! Workers take the steps of a change from their mailboxes; see `engine/src/control/install.rs`. What a worker that a kernel
//! holds up may still have is given to nobody else, and shown as left behind until a change after it has come back.

mod departure;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use engine::metrics::{Metrics, RuntimeMetrics, ServiceMetrics};
use engine::topology::{AcceleratorKind, Launch, Listen, Service, Topology};
use engine::{ControlMessage, DrainBarrier, Leave, ServiceInstall, Switch};
use sys::{OpenPort, PortSpec, SocketOptions};
use wire::DropReason;
use wire::nic::PortIndex;

use runtime::kinds;

use super::kernel_files::KernelFiles;
use super::plan::{Plan, Refusal, ServiceAction};
use super::shm_acceptor::{Eviction, NewPorts, PausedAcceptor};
use super::supervisor::{AttachListeners, PendingStarts, PreparedRuntime, StartFailure};
use super::{Server, ServerError, tell_local_addresses};
pub(super) use departure::LeakedSlot;

/// How long a change waits for workers.
pub(super) struct Timeouts {
    /// Until a worker has obeyed an order: it may be inside a long kernel.
    obeyed: Duration,
    /// Until what is left of a service has ended after its time was over.
    expired: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { obeyed: Duration::from_secs(30), expired: Duration::from_secs(5) }
    }
}

/// Why nothing was changed. The message says it in full.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Some of it cannot change while the engine runs.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// Something new cannot be had.
    #[error(transparent)]
    Start(#[from] ServerError),
    /// There is no room for so many services.
    #[error(
        "{wanted} services at a time are more than the {most} that this engine has room for: restart \
         to apply it"
    )]
    TooMany {
        /// Services that would run, those that leave among them.
        wanted: usize,
        /// Most there can be.
        most: usize,
    },
    /// Who lets shared-memory clients in does not come back.
    #[error(
        "the shared-memory ports did not hold still: a region takes long to be made, reload again"
    )]
    ShmPortsBusy,
    /// A worker does not come back from a kernel.
    #[error("a worker did not answer within {} s: a kernel holds it up", .0.as_secs_f32())]
    Stuck(Duration),
}

fn list(refusals: &[Refusal]) -> String {
    refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("; ")
}

/// What a change came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeReport {
    /// Every service of the new topology in its order, then those that left.
    pub services: Vec<ServiceChange>,
    /// Keys of `[engine]` and `[limits]` with another value, and `accelerator` if there are others.
    pub settings: Vec<&'static str>,
}

/// What became of one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceChange {
    /// Its name.
    pub name: String,
    /// What was done.
    pub action: ServiceAction,
    /// Requests of the version that left which were not answered within `drain_ms`.
    pub unanswered: u64,
    /// Something of the version that left did not end and is left behind, or is still ending.
    pub left_behind: bool,
    /// Why a runtime that could only start after the change does not serve. It is tried again.
    pub not_started: Option<String>,
    /// The kernel file whose content is another one than that with which it ran.
    pub rebuilt: Option<PathBuf>,
}

impl ChangeReport {
    /// Whether nothing had to be done.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty()
            && self.services.iter().all(|s| s.action == ServiceAction::Unchanged)
    }
}

/// Where a service of the topology is: its slot on the workers, and what it listens on.
pub(super) struct ServiceSlot {
    pub(super) slot: u16,
    /// In the order of its `listen`.
    pub(super) ports: Vec<(PortIndex, SocketAddr)>,
    pub(super) metrics: Arc<ServiceMetrics>,
    /// Of its accelerators whose blocks run elsewhere.
    pub(super) runtime_metrics: Vec<Arc<RuntimeMetrics>>,
    /// Held, so that a file that is opened again can be compared.
    pub(super) files: KernelFiles,
}

/// Where the services of the start are; `addresses` are those of [`Topology::ports`], in order.
pub(super) fn service_slots(
    topology: &Topology,
    addresses: &[SocketAddr],
    metrics: &Metrics,
) -> Vec<ServiceSlot> {
    let mut ports = (0..).zip(addresses.iter().copied());
    let metrics = metrics.services();
    let services = topology.services.iter().zip(metrics.iter()).zip(0..);
    let service_slot =
        |((service, metrics), slot): ((&Service, &Arc<ServiceMetrics>), u16)| ServiceSlot {
            slot,
            ports: ports.by_ref().take(service.listen.len()).collect(),
            metrics: metrics.clone(),
            runtime_metrics: Vec::new(),
            files: Vec::new(),
        };
    services.map(service_slot).collect()
}

/// A service that is ready to be seated.
struct PreparedService {
    /// Its place in the new topology.
    index: usize,
    service_slot: ServiceSlot,
    /// By worker.
    installs: Vec<ServiceInstall<OpenPort>>,
    /// Ports taken over from its former version.
    kept: Vec<PortIndex>,
    /// Runtimes that start before the switch, …
    before_switch: Vec<PreparedRuntime>,
    /// … and those that come when the former version's are gone.
    after_departure: Vec<PreparedRuntime>,
}

/// A version of a service that leaves.
struct DepartingService {
    name: String,
    slot: u16,
    metrics: Arc<ServiceMetrics>,
    barrier: DrainBarrier,
    dropped_before: u64,
    /// Ports that no successor keeps.
    stopped: Vec<PortIndex>,
    /// Devices that it has, by [`kinds::Kind::exclusive_key`], and for whom.
    devices: Vec<(String, String)>,
    /// Runtimes of its successor that wait for its own to end.
    after_departure: Vec<PreparedRuntime>,
}

impl DepartingService {
    /// Whether it may be in a process that has the device of the seat.
    fn holds(&self, runtime: &PreparedRuntime) -> bool {
        let wanted = runtime.spec.exclusive_key();
        let of = |(device, tenant): &(String, String)| {
            wanted.as_ref() == Some(device) && runtime.spec.service.tenant == *tenant
        };
        matches!(runtime.spec.launch().0, Launch::Engine { .. }) && self.devices.iter().any(of)
    }
}

/// Whether a service is held until this runtime serves: what the engine starts comes soon; nobody knows when others attach.
fn pauses_service(start: &PreparedRuntime) -> bool {
    matches!(start.spec.launch().0, Launch::Engine { .. })
}

/// The devices that a service is on, and for whom.
fn devices_of(topology: &Topology, service: &Service) -> Vec<(String, String)> {
    let device = |index: &usize| match &topology.accelerators[*index].kind {
        AcceleratorKind::Process { launch: Launch::Engine { .. }, device, .. } => {
            kinds::exclusive_key(device).map(|key| (key, service.tenant.clone()))
        }
        _ => None,
    };
    service.accelerators.iter().filter_map(device).collect()
}

impl Server {
    /// Goes over to another topology, all of it or nothing. Returns when what left is gone; `give_up` is
    /// asked meanwhile whether to stop waiting for that, since the whole engine is about to end.
    pub fn change(
        &mut self,
        wanted: Topology,
        give_up: &dyn Fn() -> bool,
    ) -> Result<ChangeReport, ChangeError> {
        wanted.check().map_err(ServerError::from)?;
        self.reclaim_leaked(give_up);
        let files = self.open_files(&wanted, &mut || give_up())?;
        let rebuilt = self.rebuilt(&wanted, &files);
        let names: Vec<&str> = rebuilt.iter().map(|(name, _)| name.as_str()).collect();
        let plan = Plan::new(&self.topology, &wanted, &names).map_err(ChangeError::Refused)?;
        let actions: Vec<ServiceAction> = plan.services.iter().map(|(_, action)| *action).collect();
        if plan.is_empty() {
            return Ok(report(plan, &[], &[]));
        }
        for (service, file) in &rebuilt {
            tracing::info!("kernel {} changed: service {service} restarts with it", file.display());
        }
        let new = actions
            .iter()
            .filter(|f| matches!(f, ServiceAction::Added | ServiceAction::Changed { .. }))
            .count();
        let (running, most) =
            (self.service_slots.len() + self.leaked.len(), self.fabric.services_max());
        if running + new > most {
            return Err(ChangeError::TooMany { wanted: running + new, most });
        }
        let listeners =
            AttachListeners::open(&wanted, Some(&self.topology)).map_err(ServerError::from)?;
        let ports = NewPorts::open(&wanted, Some(&self.topology)).map_err(ServerError::from)?;
        let mut prepared = Vec::new();
        for (index, files) in files.into_iter().enumerate() {
            if actions[index] == ServiceAction::Unchanged {
                continue;
            }
            match self.prepare(&wanted, index, files, &prepared) {
                Ok(next) => prepared.push(next),
                Err(error) => {
                    self.undo(&prepared);
                    return Err(error.into());
                }
            }
        }
        let ready = self
            .install_all(&wanted, &mut prepared)
            .and_then(|()| self.start_before_switch(&listeners, &mut prepared, give_up))
            .and_then(|()| self.pause_shm_ports(&wanted, &plan, &ports));
        let paused = match ready {
            Ok(paused) => paused,
            Err(error) => {
                self.undo_installed(&prepared);
                return Err(error);
            }
        };
        let limits = wanted.limits.clone();
        let departing = self.switch(wanted, &plan, prepared, listeners, paused.as_ref());
        if let Some(paused) = paused {
            paused.resume(self.memory_ports(), ports, limits);
        }
        let outcomes = self.remove_all(departing, give_up);
        self.publish_metrics();
        // They start beside each other.
        let mut outcomes: Vec<_> = outcomes.into_iter().map(|o| o.wait(give_up)).collect();
        // Others may begin anew with them, or without those that left.
        let drain = self.drain_time();
        let regrouping = self.supervisor.as_ref().map(|runtimes| runtimes.regrouping(drain));
        let moved = regrouping.map_or(Ok(()), |regrouping| regrouping.wait(&mut || give_up()));
        let failed = moved.err().map_or(Vec::new(), StartFailure::reasons);
        for (name, why) in failed {
            match outcomes.iter_mut().find(|outcome| outcome.name == name) {
                Some(outcome) => drop(outcome.not_started.get_or_insert(why)),
                None => outcomes.push(DepartureOutcome {
                    not_started: Some(why),
                    ..DepartureOutcome::of(name)
                }),
            }
        }
        Ok(report(plan, &outcomes, &rebuilt))
    }

    /// Lets go of the versions that leave, one after the other. Runtimes that waited for one come when nobody
    /// who may share its process is left on their device, those that begin together at once.
    fn remove_all(
        &mut self,
        departing: Vec<DepartingService>,
        give_up: &dyn Fn() -> bool,
    ) -> Vec<DepartureOutcome> {
        let mut outcomes: Vec<DepartureOutcome> = Vec::new();
        let mut waiting: Vec<(usize, Vec<PreparedRuntime>)> = Vec::new();
        let mut departing = departing.into_iter();
        while let Some(mut departing_service) = departing.next() {
            waiting.push((outcomes.len(), std::mem::take(&mut departing_service.after_departure)));
            outcomes.push(self.remove_service(departing_service, give_up));
            let left = departing.as_slice();
            let paused = |after_departure: &[PreparedRuntime]| {
                after_departure.iter().any(|s| left.iter().any(|l| l.holds(s)))
            };
            let free: Vec<_> =
                waiting.extract_if(.., |(_, after_departure)| !paused(after_departure)).collect();
            let (of, free): (Vec<_>, Vec<_>) =
                free.into_iter().filter(|(_, after_departure)| !after_departure.is_empty()).unzip();
            if let Some(runtimes) = self.supervisor.as_ref().filter(|_| !free.is_empty()) {
                let awaited = runtimes.add_each(free, self.drain_time());
                for (of, awaited) in of.into_iter().zip(awaited) {
                    outcomes[of].awaited = Some(awaited);
                }
            }
        }
        outcomes
    }

    /// Makes everything that a service of the new topology needs.
    fn prepare(
        &mut self,
        wanted: &Topology,
        index: usize,
        files: KernelFiles,
        others: &[PreparedService],
    ) -> Result<PreparedService, ServerError> {
        let service = &wanted.services[index];
        let workers = wanted.engine.workers;
        let slots =
            self.service_slots.iter().chain(others.iter().map(|p| &p.service_slot)).map(|p| p.slot);
        let slots: Vec<u16> = slots.chain(self.leaked.iter().map(|leaked| leaked.slot)).collect();
        let slot = (0..).find(|slot| !slots.contains(slot)).expect("there is room for it");
        let before = self.topology.services.iter().position(|s| s.name == service.name);
        let metrics = match before {
            Some(before) => self.service_slots[before].metrics.clone(),
            None => Arc::new(ServiceMetrics::new(service.name.clone(), workers)),
        };
        let (ports, opened) = self.open_ports(service, before, workers, others)?;
        let runtime_metrics =
            before.map_or(Vec::new(), |before| self.service_slots[before].runtime_metrics.clone());
        let attached = match self.attach(slot, wanted, service, &files, &runtime_metrics) {
            Ok(attached) => attached,
            Err(error) => {
                self.forget(slot);
                return Err(error);
            }
        };
        let runtime_metrics = attached.runtime_metrics();
        let replaces = |runtime: &PreparedRuntime| {
            before.is_some_and(|before| runtime.spec.replaces(&self.topology, before))
        };
        let (after_departure, before_switch) = attached.runtimes.into_iter().partition(replaces);
        let mut installs =
            ServiceInstall::for_workers(slot, service, &metrics, attached.of_workers);
        if !Vec::is_empty(&after_departure) {
            installs.iter_mut().for_each(ServiceInstall::set_reconfiguring);
        }
        let drain_ns = wanted.engine.drain_ms * 1_000_000;
        for start in after_departure.iter().filter(|start| pauses_service(start)) {
            installs
                .iter_mut()
                .for_each(|install| install.pause(start.spec.position as u16, drain_ns));
        }
        for (port, of_workers) in opened {
            for (runtime, open) in installs.iter_mut().zip(of_workers) {
                let listen = (service.listen[port].transport, open.address());
                runtime.add_port(ports[port].0, listen, &wanted.limits, open);
            }
        }
        let old = before.map_or(&[][..], |before| &self.service_slots[before].ports);
        let kept = ports.iter().map(|p| p.0).filter(|p| old.iter().any(|(o, _)| o == p)).collect();
        let service_slot = ServiceSlot { slot, ports, metrics, runtime_metrics, files };
        Ok(PreparedService { index, service_slot, installs, kept, before_switch, after_departure })
    }

    /// The ports of a service, and those of them that had to be opened: place in `listen`, one for each
    /// worker.
    #[expect(clippy::type_complexity, reason = "named above")]
    fn open_ports(
        &self,
        service: &Service,
        before: Option<usize>,
        workers: usize,
        others: &[PreparedService],
    ) -> Result<(Vec<(PortIndex, SocketAddr)>, Vec<(usize, Vec<OpenPort>)>), ServerError> {
        let mut old: Vec<(Listen, (PortIndex, SocketAddr))> = Vec::new();
        if let Some(before) = before {
            let listens = self.topology.services[before].listen.iter().copied();
            old.extend(listens.zip(self.service_slots[before].ports.iter().copied()));
        }
        let service_slots = self.service_slots.iter().chain(others.iter().map(|p| &p.service_slot));
        let mut taken: Vec<PortIndex> =
            service_slots.flat_map(|p| &p.ports).map(|port| port.0).collect();
        taken.extend(self.leaked.iter().flat_map(|leaked| &leaked.ports));
        let (mut ports, mut opened) = (Vec::new(), Vec::new());
        for (number, listen) in service.listen.iter().enumerate() {
            if let Some(found) = old.iter().position(|(other, _)| other == listen) {
                ports.push(old.swap_remove(found).1);
                continue;
            }
            let spec = PortSpec { transport: listen.transport, address: listen.address };
            let open = OpenPort::open_all(spec, workers, &SocketOptions::default())?;
            let index = (0..).find(|index| !taken.contains(index)).expect("65536 are enough");
            taken.push(index);
            ports.push((index, open[0].address()));
            opened.push((number, open));
        }
        Ok((ports, opened))
    }

    /// Every worker takes its installs.
    fn install_all(
        &mut self,
        wanted: &Topology,
        prepared: &mut [PreparedService],
    ) -> Result<(), ChangeError> {
        let timeout = self.timeouts.obeyed;
        for PreparedService { index, installs, .. } in prepared {
            let (answer, answers) = mpsc::channel();
            for (worker, install) in (0..).zip(std::mem::take(installs)) {
                let install = ControlMessage::Install(Box::new(install), answer.clone());
                self.fabric.post(worker, install);
            }
            drop(answer);
            for _ in 0..self.fabric.workers() {
                let stuck = |_| ChangeError::Stuck(timeout);
                let answer = answers.recv_timeout(timeout).map_err(stuck)?;
                let service = &wanted.services[*index];
                answer.map_err(|error| ServerError::of_blocks(service, error))?;
            }
        }
        Ok(())
    }

    /// Starts the runtimes that need not wait for others to end, and waits until they serve.
    fn start_before_switch(
        &mut self,
        listeners: &AttachListeners,
        prepared: &mut [PreparedService],
        give_up: &dyn Fn() -> bool,
    ) -> Result<(), ChangeError> {
        let installs: Vec<_> =
            prepared.iter_mut().flat_map(|p| p.before_switch.drain(..)).collect();
        let waits = prepared.iter().any(|p| !p.after_departure.is_empty());
        if installs.is_empty() && !waits && listeners.is_empty() {
            return Ok(());
        }
        let awaited = self.supervisor()?.add(installs, false);
        Ok(awaited.wait(&mut || give_up()).map_err(ServerError::from)?)
    }

    /// Nobody comes in by a shared-memory port until the workers have switched, and who must go is told why.
    fn pause_shm_ports(
        &mut self,
        wanted: &Topology,
        plan: &Plan,
        new: &NewPorts,
    ) -> Result<Option<PausedAcceptor>, ChangeError> {
        if self.shm_acceptor.is_none() && new.is_empty() {
            return Ok(None);
        }
        let mut evictions = Vec::new();
        for (service, service_slot) in self.topology.services.iter().zip(&self.service_slots) {
            let (slot, name) = (service_slot.slot, &service.name);
            let action = plan.services.iter().find(|(of, _)| of == name).map(|(_, action)| *action);
            let why = match action {
                Some(ServiceAction::Removed) => format!("service {name:?} has been removed"),
                Some(ServiceAction::Changed { keeps_memory_clients: false, .. }) => {
                    format!("service {name:?} takes other messages now: connect again")
                }
                Some(ServiceAction::Changed { .. }) => {
                    let stays = |path: &PathBuf| wanted.memory_ports().any(|(_, p)| p == path);
                    let gone = service.memory_ports.iter().filter(|path| !stays(path));
                    evictions.extend(gone.map(|path| {
                        let url = crate::config::memory_url(path);
                        let why = format!("{url} is not a port of service {name:?} any more");
                        Eviction { slot, path: Some(path.clone()), why }
                    }));
                    continue;
                }
                _ => continue,
            };
            evictions.push(Eviction { slot, path: None, why });
        }
        self.shm_acceptor()?.pause(evictions).map(Some).ok_or(ChangeError::ShmPortsBusy)
    }

    /// What was prepared and not seated goes.
    fn undo(&mut self, prepared: &[PreparedService]) {
        for PreparedService { service_slot, .. } in prepared {
            self.forget(service_slot.slot);
        }
    }

    /// What some workers may have seated goes.
    fn undo_installed(&mut self, prepared: &[PreparedService]) {
        for PreparedService { service_slot, kept, .. } in prepared {
            let own = service_slot.ports.iter().map(|p| p.0).filter(|port| !kept.contains(port));
            self.release_slot(service_slot.slot, &service_slot.metrics, own.collect(), &|| false);
        }
        // Something of it may be left behind.
        self.publish_metrics();
    }

    /// From here on the new topology runs.
    fn switch(
        &mut self,
        wanted: Topology,
        plan: &Plan,
        mut prepared: Vec<PreparedService>,
        listeners: AttachListeners,
        paused: Option<&PausedAcceptor>,
    ) -> Vec<DepartingService> {
        let old = std::mem::take(&mut self.service_slots);
        let before = self.topology.clone();
        let mut departing = Vec::new();
        tell_local_addresses(&self.fabric);
        let mut switch = Switch {
            leave: Vec::new(),
            lead: Vec::new(),
            stop: Vec::new(),
            limits: wanted.limits.clone(),
            polling: wanted.engine.polling,
        };
        for new in &prepared {
            switch.lead.extend(new.kept.iter().map(|port| (*port, new.service_slot.slot)));
        }
        let mut service_slots: Vec<Option<ServiceSlot>> =
            wanted.services.iter().map(|_| None).collect();
        for (service_slot, service) in old.into_iter().zip(&before.services) {
            let name = service.name.clone();
            let at = plan.services.iter().position(|(of, _)| *of == name).expect("all are in it");
            let mut successor = prepared.iter_mut().find(|new| new.index == at);
            if plan.services[at].1 == ServiceAction::Unchanged {
                service_slots[at] = Some(service_slot);
                continue;
            }
            let after_departure = successor
                .as_mut()
                .map_or(Vec::new(), |new| std::mem::take(&mut new.after_departure));
            if after_departure.iter().any(pauses_service) {
                tracing::info!(
                    service = name,
                    "held: its next version begins when this one has ended"
                );
            }
            let kept = successor.as_ref().map_or(&[][..], |new| &new.kept);
            let ports = service_slot.ports.iter().map(|p| p.0);
            let stopped: Vec<_> = ports.filter(|port| !kept.contains(port)).collect();
            switch.stop.extend(&stopped);
            let keeps = match plan.services[at].1 {
                ServiceAction::Changed { keeps_connections, keeps_memory_clients } => {
                    (keeps_connections, keeps_memory_clients)
                }
                _ => (false, false),
            };
            let next = successor.as_ref().map(|new| new.service_slot.slot);
            let barrier = DrainBarrier::default();
            switch.leave.push(Leave {
                slot: service_slot.slot,
                successor: next.filter(|_| keeps.0),
                shm_successor: next.filter(|_| keeps.1),
                departing: paused.map_or(Vec::new(), |paused| paused.departing(service_slot.slot)),
                barrier: barrier.clone(),
            });
            let dropped_before = service_slot.metrics.snapshot().dropped(DropReason::DrainTimeout);
            let (slot, metrics) = (service_slot.slot, service_slot.metrics);
            let devices = devices_of(&before, service);
            departing.push(DepartingService {
                name,
                slot,
                metrics,
                barrier,
                dropped_before,
                stopped,
                devices,
                after_departure,
            });
        }
        for new in prepared {
            service_slots[new.index] = Some(new.service_slot);
        }
        self.service_slots =
            service_slots.into_iter().map(|p| p.expect("each is old or new")).collect();
        self.topology = Arc::new(wanted);
        self.publish_metrics();
        if let Some(runtimes) = &self.supervisor {
            let leaving = switch.leave.iter().map(|leave| leave.slot).collect();
            runtimes.set_listeners(&self.topology, listeners, leaving);
        }
        let (answer, answers) = mpsc::channel();
        let switch = Arc::new(switch);
        self.fabric.post_to_all(|_| ControlMessage::Switch(switch.clone(), answer.clone()));
        drop(answer);
        for _ in 0..self.fabric.workers() {
            if answers.recv_timeout(self.timeouts.obeyed).is_err() {
                // It switches when it comes back, and until then what leaves cannot be let go of.
                let stuck = ChangeError::Stuck(self.timeouts.obeyed);
                tracing::error!("{stuck}; it changes over when it comes back");
                break;
            }
        }
        departing
    }
}

/// What became of a version that left.
struct DepartureOutcome {
    name: String,
    unanswered: u64,
    left_behind: bool,
    /// Runtimes of its successor.
    awaited: Option<PendingStarts>,
    not_started: Option<String>,
}

impl DepartureOutcome {
    fn of(name: String) -> Self {
        Self { name, unanswered: 0, left_behind: false, awaited: None, not_started: None }
    }

    /// Waits until the runtimes serve, or do not come to.
    fn wait(mut self, give_up: &dyn Fn() -> bool) -> Self {
        let waited = self.awaited.take().map_or(Ok(()), |awaited| awaited.wait(&mut || give_up()));
        if let Err(unready) = waited {
            let mut reasons: Vec<_> = unready.reasons().into_iter().map(|(_, why)| why).collect();
            // On several accelerators it may have several reasons.
            reasons.dedup();
            self.not_started = (!reasons.is_empty()).then(|| reasons.join("; "));
        }
        self
    }
}

fn report(
    plan: Plan,
    outcomes: &[DepartureOutcome],
    rebuilt: &[(String, PathBuf)],
) -> ChangeReport {
    let service = |(name, action): (String, ServiceAction)| {
        let outcome = outcomes.iter().find(|outcome| outcome.name == name);
        let rebuilt = rebuilt.iter().find(|(of, _)| *of == name);
        ServiceChange {
            action,
            rebuilt: rebuilt.map(|(_, file)| file.clone()),
            unanswered: outcome.map_or(0, |o| o.unanswered),
            left_behind: outcome.is_some_and(|o| o.left_behind),
            not_started: outcome.and_then(|o| o.not_started.clone()),
            name,
        }
    };
    let services = plan.services.into_iter().map(service).collect();
    ChangeReport { services, settings: plan.settings }
}
