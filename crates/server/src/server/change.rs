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

mod leave;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use engine::metrics::{AcceleratorLives, Metrics, ServiceMetrics};
use engine::topology::{AcceleratorKind, Launch, Listen, Service, Topology};
use engine::{ControlMessage, DrainBarrier, Leave, ServiceInstall, Switch};
use sys::{OpenPort, PortSpec, SocketOptions};
use wire::DropReason;
use wire::nic::PortIndex;

use runtime::kinds;

use super::files::KernelFiles;
use super::memory_ports::{Going, Held, NewPorts};
use super::plan::{Fate, Plan, Refusal};
use super::runtimes::{AttachDoors, Awaited, SeatStart, Unready};
use super::{Server, ServerError, tell_local_addresses};
pub(super) use leave::Burnt;

/// How long a change waits for workers.
pub(super) struct Patience {
    /// Until a worker has obeyed an order: it may be inside a long kernel.
    obeyed: Duration,
    /// Until what is left of a service has ended after its time was over.
    expired: Duration,
}

impl Default for Patience {
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
    Held,
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
    pub fate: Fate,
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
        self.settings.is_empty() && self.services.iter().all(|s| s.fate == Fate::Unchanged)
    }
}

/// Where a service of the topology is: its slot on the workers, and what it listens on.
pub(super) struct Place {
    pub(super) slot: u16,
    /// In the order of its `listen`.
    pub(super) ports: Vec<(PortIndex, SocketAddr)>,
    pub(super) metrics: Arc<ServiceMetrics>,
    /// Of its accelerators whose blocks run elsewhere.
    pub(super) lives: Vec<Arc<AcceleratorLives>>,
    /// Held, so that a file that is opened again can be compared.
    pub(super) files: KernelFiles,
}

/// Where the services of the start are; `addresses` are those of [`Topology::ports`], in order.
pub(super) fn places(
    topology: &Topology,
    addresses: &[SocketAddr],
    metrics: &Metrics,
) -> Vec<Place> {
    let mut ports = (0..).zip(addresses.iter().copied());
    let metrics = metrics.services();
    let services = topology.services.iter().zip(metrics.iter()).zip(0..);
    let place = |((service, metrics), slot): ((&Service, &Arc<ServiceMetrics>), u16)| Place {
        slot,
        ports: ports.by_ref().take(service.listen.len()).collect(),
        metrics: metrics.clone(),
        lives: Vec::new(),
        files: Vec::new(),
    };
    services.map(place).collect()
}

/// A service that is ready to be seated.
struct Prepared {
    /// Its place in the new topology.
    index: usize,
    place: Place,
    /// By worker.
    installs: Vec<ServiceInstall<OpenPort>>,
    /// Ports taken over from its former version.
    kept: Vec<PortIndex>,
    /// Runtimes that start before the switch, …
    beside: Vec<SeatStart>,
    /// … and those that come when the former version's are gone.
    after: Vec<SeatStart>,
}

/// A version of a service that leaves.
struct Leaver {
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
    after: Vec<SeatStart>,
}

impl Leaver {
    /// Whether it may be in a process that has the device of the seat.
    fn holds(&self, seat: &SeatStart) -> bool {
        let wanted = seat.post.exclusive_key();
        let of = |(device, tenant): &(String, String)| {
            wanted.as_ref() == Some(device) && seat.post.service.tenant == *tenant
        };
        matches!(seat.post.launch().0, Launch::Engine { .. }) && self.devices.iter().any(of)
    }
}

/// Whether a service is held until this runtime serves: what the engine starts comes soon; nobody knows when others attach.
fn is_held_for(start: &SeatStart) -> bool {
    matches!(start.post.launch().0, Launch::Engine { .. })
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
        self.take_back(give_up);
        let files = self.open_files(&wanted, &mut || give_up())?;
        let rebuilt = self.rebuilt(&wanted, &files);
        let names: Vec<&str> = rebuilt.iter().map(|(name, _)| name.as_str()).collect();
        let plan = Plan::new(&self.topology, &wanted, &names).map_err(ChangeError::Refused)?;
        let fates: Vec<Fate> = plan.services.iter().map(|(_, fate)| *fate).collect();
        if plan.is_empty() {
            return Ok(report(plan, &[], &[]));
        }
        for (service, file) in &rebuilt {
            tracing::info!("kernel {} changed: service {service} restarts with it", file.display());
        }
        let new = fates.iter().filter(|f| matches!(f, Fate::Added | Fate::Changed { .. })).count();
        let (running, most) = (self.places.len() + self.burnt.len(), self.fabric.services_max());
        if running + new > most {
            return Err(ChangeError::TooMany { wanted: running + new, most });
        }
        let doors = AttachDoors::open(&wanted, Some(&self.topology)).map_err(ServerError::from)?;
        let ports = NewPorts::open(&wanted, Some(&self.topology)).map_err(ServerError::from)?;
        let mut prepared = Vec::new();
        for (index, files) in files.into_iter().enumerate() {
            if fates[index] == Fate::Unchanged {
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
            .seat_all(&wanted, &mut prepared)
            .and_then(|()| self.start_beside(&doors, &mut prepared, give_up))
            .and_then(|()| self.hold_ports(&wanted, &plan, &ports));
        let held = match ready {
            Ok(held) => held,
            Err(error) => {
                self.undo_seated(&prepared);
                return Err(error);
            }
        };
        let limits = wanted.limits.clone();
        let leavers = self.switch(wanted, &plan, prepared, doors, held.as_ref());
        if let Some(held) = held {
            held.go_on(self.memory_ports(), ports, limits);
        }
        let outcomes = self.let_all_go(leavers, give_up);
        self.show();
        // They start beside each other.
        let mut outcomes: Vec<_> = outcomes.into_iter().map(|o| o.wait(give_up)).collect();
        // Others may begin anew with them, or without those that left.
        let drain = self.drain_time();
        let moving = self.runtimes.as_ref().map(|runtimes| runtimes.moving(drain));
        let moved = moving.map_or(Ok(()), |moving| moving.wait(&mut || give_up()));
        let failed = moved.err().map_or(Vec::new(), Unready::reasons);
        for (name, why) in failed {
            match outcomes.iter_mut().find(|outcome| outcome.name == name) {
                Some(outcome) => drop(outcome.not_started.get_or_insert(why)),
                None => outcomes.push(Outcome { not_started: Some(why), ..Outcome::of(name) }),
            }
        }
        Ok(report(plan, &outcomes, &rebuilt))
    }

    /// Lets go of the versions that leave, one after the other. Runtimes that waited for one come when nobody
    /// who may share its process is left on their device, those that begin together at once.
    fn let_all_go(&mut self, leavers: Vec<Leaver>, give_up: &dyn Fn() -> bool) -> Vec<Outcome> {
        let mut outcomes: Vec<Outcome> = Vec::new();
        let mut waiting: Vec<(usize, Vec<SeatStart>)> = Vec::new();
        let mut leavers = leavers.into_iter();
        while let Some(mut leaver) = leavers.next() {
            waiting.push((outcomes.len(), std::mem::take(&mut leaver.after)));
            outcomes.push(self.let_go(leaver, give_up));
            let left = leavers.as_slice();
            let held = |after: &[SeatStart]| after.iter().any(|s| left.iter().any(|l| l.holds(s)));
            let free: Vec<_> = waiting.extract_if(.., |(_, after)| !held(after)).collect();
            let (of, free): (Vec<_>, Vec<_>) =
                free.into_iter().filter(|(_, after)| !after.is_empty()).unzip();
            if let Some(runtimes) = self.runtimes.as_ref().filter(|_| !free.is_empty()) {
                let awaited = runtimes.seat_each(free, self.drain_time());
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
        others: &[Prepared],
    ) -> Result<Prepared, ServerError> {
        let service = &wanted.services[index];
        let workers = wanted.engine.workers;
        let slots = self.places.iter().chain(others.iter().map(|p| &p.place)).map(|p| p.slot);
        let slots: Vec<u16> = slots.chain(self.burnt.iter().map(|burnt| burnt.slot)).collect();
        let slot = (0..).find(|slot| !slots.contains(slot)).expect("there is room for it");
        let before = self.topology.services.iter().position(|s| s.name == service.name);
        let metrics = match before {
            Some(before) => self.places[before].metrics.clone(),
            None => Arc::new(ServiceMetrics::new(service.name.clone(), workers)),
        };
        let (ports, opened) = self.open_ports(service, before, workers, others)?;
        let told = before.map_or(Vec::new(), |before| self.places[before].lives.clone());
        let attached = match self.attach(slot, wanted, service, &files, &told) {
            Ok(attached) => attached,
            Err(error) => {
                self.forget(slot);
                return Err(error);
            }
        };
        let lives = attached.lives();
        let replaces = |seat: &SeatStart| {
            before.is_some_and(|before| seat.post.replaces(&self.topology, before))
        };
        let (after, beside) = attached.seats.into_iter().partition(replaces);
        let mut installs =
            ServiceInstall::for_workers(slot, service, &metrics, attached.of_workers);
        if !Vec::is_empty(&after) {
            installs.iter_mut().for_each(ServiceInstall::set_reconfiguring);
        }
        let drain_ns = wanted.engine.drain_ms * 1_000_000;
        for start in after.iter().filter(|start| is_held_for(start)) {
            installs
                .iter_mut()
                .for_each(|install| install.pause(start.post.place as u16, drain_ns));
        }
        for (port, of_workers) in opened {
            for (seat, open) in installs.iter_mut().zip(of_workers) {
                let listen = (service.listen[port].transport, open.address());
                seat.add_port(ports[port].0, listen, &wanted.limits, open);
            }
        }
        let old = before.map_or(&[][..], |before| &self.places[before].ports);
        let kept = ports.iter().map(|p| p.0).filter(|p| old.iter().any(|(o, _)| o == p)).collect();
        let place = Place { slot, ports, metrics, lives, files };
        Ok(Prepared { index, place, installs, kept, beside, after })
    }

    /// The ports of a service, and those of them that had to be opened: place in `listen`, one for each
    /// worker.
    #[expect(clippy::type_complexity, reason = "named above")]
    fn open_ports(
        &self,
        service: &Service,
        before: Option<usize>,
        workers: usize,
        others: &[Prepared],
    ) -> Result<(Vec<(PortIndex, SocketAddr)>, Vec<(usize, Vec<OpenPort>)>), ServerError> {
        let mut old: Vec<(Listen, (PortIndex, SocketAddr))> = Vec::new();
        if let Some(before) = before {
            let listens = self.topology.services[before].listen.iter().copied();
            old.extend(listens.zip(self.places[before].ports.iter().copied()));
        }
        let places = self.places.iter().chain(others.iter().map(|p| &p.place));
        let mut taken: Vec<PortIndex> = places.flat_map(|p| &p.ports).map(|port| port.0).collect();
        taken.extend(self.burnt.iter().flat_map(|burnt| &burnt.ports));
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
    fn seat_all(
        &mut self,
        wanted: &Topology,
        prepared: &mut [Prepared],
    ) -> Result<(), ChangeError> {
        let patience = self.patience.obeyed;
        for Prepared { index, installs, .. } in prepared {
            let (answer, answers) = mpsc::channel();
            for (worker, install) in (0..).zip(std::mem::take(installs)) {
                let install = ControlMessage::Install(Box::new(install), answer.clone());
                self.fabric.post(worker, install);
            }
            drop(answer);
            for _ in 0..self.fabric.workers() {
                let stuck = |_| ChangeError::Stuck(patience);
                let answer = answers.recv_timeout(patience).map_err(stuck)?;
                let service = &wanted.services[*index];
                answer.map_err(|error| ServerError::of_blocks(service, error))?;
            }
        }
        Ok(())
    }

    /// Starts the runtimes that need not wait for others to end, and waits until they serve.
    fn start_beside(
        &mut self,
        doors: &AttachDoors,
        prepared: &mut [Prepared],
        give_up: &dyn Fn() -> bool,
    ) -> Result<(), ChangeError> {
        let installs: Vec<_> = prepared.iter_mut().flat_map(|p| p.beside.drain(..)).collect();
        let waits = prepared.iter().any(|p| !p.after.is_empty());
        if installs.is_empty() && !waits && doors.is_empty() {
            return Ok(());
        }
        let awaited = self.runtimes()?.seat(installs, false);
        Ok(awaited.wait(&mut || give_up()).map_err(ServerError::from)?)
    }

    /// Nobody comes in by a shared-memory port until the workers have switched, and who must go is told why.
    fn hold_ports(
        &mut self,
        wanted: &Topology,
        plan: &Plan,
        new: &NewPorts,
    ) -> Result<Option<Held>, ChangeError> {
        if self.doorman.is_none() && new.is_empty() {
            return Ok(None);
        }
        let mut going = Vec::new();
        for (service, place) in self.topology.services.iter().zip(&self.places) {
            let (slot, name) = (place.slot, &service.name);
            let fate = plan.services.iter().find(|(of, _)| of == name).map(|(_, fate)| *fate);
            let why = match fate {
                Some(Fate::Removed) => format!("service {name:?} has been removed"),
                Some(Fate::Changed { keeps_memory_clients: false, .. }) => {
                    format!("service {name:?} takes other messages now: connect again")
                }
                Some(Fate::Changed { .. }) => {
                    let stays = |path: &PathBuf| wanted.memory_ports().any(|(_, p)| p == path);
                    let gone = service.memory_ports.iter().filter(|path| !stays(path));
                    going.extend(gone.map(|path| {
                        let url = crate::config::memory_url(path);
                        let why = format!("{url} is not a port of service {name:?} any more");
                        Going { slot, path: Some(path.clone()), why }
                    }));
                    continue;
                }
                _ => continue,
            };
            going.push(Going { slot, path: None, why });
        }
        self.doorman()?.hold(going).map(Some).ok_or(ChangeError::Held)
    }

    /// What was prepared and not seated goes.
    fn undo(&mut self, prepared: &[Prepared]) {
        for Prepared { place, .. } in prepared {
            self.forget(place.slot);
        }
    }

    /// What some workers may have seated goes.
    fn undo_seated(&mut self, prepared: &[Prepared]) {
        for Prepared { place, kept, .. } in prepared {
            let own = place.ports.iter().map(|p| p.0).filter(|port| !kept.contains(port));
            self.vacate(place.slot, &place.metrics, own.collect(), &|| false);
        }
        // Something of it may be left behind.
        self.show();
    }

    /// From here on the new topology runs.
    fn switch(
        &mut self,
        wanted: Topology,
        plan: &Plan,
        mut prepared: Vec<Prepared>,
        doors: AttachDoors,
        held: Option<&Held>,
    ) -> Vec<Leaver> {
        let old = std::mem::take(&mut self.places);
        let before = self.topology.clone();
        let mut leavers = Vec::new();
        tell_local_addresses(&self.fabric);
        let mut switch = Switch {
            leave: Vec::new(),
            lead: Vec::new(),
            stop: Vec::new(),
            limits: wanted.limits.clone(),
            polling: wanted.engine.polling,
        };
        for new in &prepared {
            switch.lead.extend(new.kept.iter().map(|port| (*port, new.place.slot)));
        }
        let mut places: Vec<Option<Place>> = wanted.services.iter().map(|_| None).collect();
        for (place, service) in old.into_iter().zip(&before.services) {
            let name = service.name.clone();
            let at = plan.services.iter().position(|(of, _)| *of == name).expect("all are in it");
            let mut successor = prepared.iter_mut().find(|new| new.index == at);
            if plan.services[at].1 == Fate::Unchanged {
                places[at] = Some(place);
                continue;
            }
            let after = successor.as_mut().map_or(Vec::new(), |new| std::mem::take(&mut new.after));
            if after.iter().any(is_held_for) {
                tracing::info!(
                    service = name,
                    "held: its next version begins when this one has ended"
                );
            }
            let kept = successor.as_ref().map_or(&[][..], |new| &new.kept);
            let ports = place.ports.iter().map(|p| p.0);
            let stopped: Vec<_> = ports.filter(|port| !kept.contains(port)).collect();
            switch.stop.extend(&stopped);
            let keeps = match plan.services[at].1 {
                Fate::Changed { keeps_connections, keeps_memory_clients } => {
                    (keeps_connections, keeps_memory_clients)
                }
                _ => (false, false),
            };
            let next = successor.as_ref().map(|new| new.place.slot);
            let barrier = DrainBarrier::default();
            switch.leave.push(Leave {
                slot: place.slot,
                successor: next.filter(|_| keeps.0),
                shm_successor: next.filter(|_| keeps.1),
                departing: held.map_or(Vec::new(), |held| held.going(place.slot)),
                barrier: barrier.clone(),
            });
            let dropped_before = place.metrics.snapshot().dropped(DropReason::DrainTimeout);
            let (slot, metrics) = (place.slot, place.metrics);
            let devices = devices_of(&before, service);
            leavers.push(Leaver {
                name,
                slot,
                metrics,
                barrier,
                dropped_before,
                stopped,
                devices,
                after,
            });
        }
        for new in prepared {
            places[new.index] = Some(new.place);
        }
        self.places = places.into_iter().map(|p| p.expect("each is old or new")).collect();
        self.topology = Arc::new(wanted);
        self.show();
        if let Some(runtimes) = &self.runtimes {
            let leaving = switch.leave.iter().map(|leave| leave.slot).collect();
            runtimes.change_doors(&self.topology, doors, leaving);
        }
        let (answer, answers) = mpsc::channel();
        let switch = Arc::new(switch);
        self.fabric.post_to_all(|_| ControlMessage::Switch(switch.clone(), answer.clone()));
        drop(answer);
        for _ in 0..self.fabric.workers() {
            if answers.recv_timeout(self.patience.obeyed).is_err() {
                // It switches when it comes back, and until then what leaves cannot be let go of.
                let stuck = ChangeError::Stuck(self.patience.obeyed);
                tracing::error!("{stuck}; it changes over when it comes back");
                break;
            }
        }
        leavers
    }
}

/// What became of a version that left.
struct Outcome {
    name: String,
    unanswered: u64,
    left_behind: bool,
    /// Runtimes of its successor.
    awaited: Option<Awaited>,
    not_started: Option<String>,
}

impl Outcome {
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

fn report(plan: Plan, outcomes: &[Outcome], rebuilt: &[(String, PathBuf)]) -> ChangeReport {
    let service = |(name, fate): (String, Fate)| {
        let outcome = outcomes.iter().find(|outcome| outcome.name == name);
        let rebuilt = rebuilt.iter().find(|(of, _)| *of == name);
        ServiceChange {
            fate,
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
