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
mod prepare;
mod report;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use engine::metrics::{Metrics, RuntimeMetrics, ServiceMetrics};
use engine::topology::{AcceleratorKind, Launch, Service, Topology};
use engine::{ControlMessage, DrainBarrier, Leave, Switch};
use wire::DropReason;
use wire::nic::PortIndex;

use runtime::kinds;

use super::kernel_files::KernelFiles;
use super::plan::{Plan, Refusal, ServiceAction};
use super::shm_acceptor::{NewPorts, PausedAcceptor};
use super::supervisor::{AttachListeners, PendingStarts, PreparedRuntime, StartFailure};
use super::{Server, ServerError, tell_local_addresses};
pub(super) use departure::LeakedSlot;
use prepare::PreparedService;
use report::report;
pub use report::{ChangeReport, ServiceChange};

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
