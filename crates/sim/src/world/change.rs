//! Adding, changing and removing services of a running world, as the control side of a server does it.
//!
//! A change has steps (`engine/src/control/install.rs`): every worker installs the new service, then every worker
//! switches, then the old version is released everywhere once all have voted. Within a step each worker gets
//! its message when the test calls [`World::follow`], and acts in its next turn.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use engine::accelerator::StartError;
use engine::topology::Service;
use engine::{ControlMessage, Detached, DrainBarrier, Leave, RuntimeEvent, ServiceInstall, Switch};
use wire::DropReason;
use wire::nic::{Nic, PortIndex};

use super::{World, prepare_service};
use crate::net::Network;
use crate::nic::SimSocket;
use crate::rng::Rng;
use crate::shared::lock;
use crate::world::linked::Linked;

/// What the next version of a service takes over.
#[derive(Clone, Copy, Debug)]
pub struct Keeps {
    /// Connections.
    pub connections: bool,
    /// Shared-memory clients.
    pub memory_clients: bool,
    /// Or only those whose port stays, which half of them came by.
    pub memory_ports: bool,
}

impl Keeps {
    /// All or nothing.
    pub fn all(keeps: bool) -> Self {
        Self { connections: keeps, memory_clients: keeps, memory_ports: true }
    }
}

/// A change in progress.
pub(crate) struct Change {
    service: usize,
    /// The service exists afterwards.
    comes: bool,
    /// Shared-memory ports that do not stay.
    closes_ports: bool,
    /// By worker, until it is posted.
    installs: Vec<Option<ServiceInstall<()>>>,
    /// By worker.
    progress: Vec<Progress>,
    switch: Switch,
    /// Workers that have switched.
    switched: Vec<bool>,
    barrier: DrainBarrier,
    /// The old slot, if any, and the workers that have released it.
    leaves: Option<u16>,
    released: Vec<bool>,
    /// When the rest is dropped, and the workers that have done so.
    expires_ns: u64,
    expired: Vec<bool>,
}

/// The last message to a worker, until it has answered.
#[derive(Default)]
enum Progress {
    #[default]
    Idle,
    Installs(Receiver<Result<(), StartError>>),
    Switches(Receiver<()>),
    Releases(Receiver<Detached>),
}

impl Change {
    /// Takes the answers that have come; whether a worker has answered everything.
    fn collect(&mut self) {
        for (worker, progress) in self.progress.iter_mut().enumerate() {
            let answered = match progress {
                Progress::Idle => false,
                Progress::Installs(replies) => replies.try_recv().is_ok_and(|installed| {
                    installed.expect("model blocks start");
                    true
                }),
                Progress::Switches(replies) => {
                    self.switched[worker] |= replies.try_recv().is_ok();
                    self.switched[worker]
                }
                Progress::Releases(replies) => {
                    self.released[worker] |= replies.try_recv().is_ok();
                    self.released[worker]
                }
            };
            if answered {
                *progress = Progress::Idle;
            }
        }
    }

    fn is_installed(&self) -> bool {
        let installs = |progress: &Progress| matches!(progress, Progress::Installs(_));
        self.installs.iter().all(Option::is_none) && !self.progress.iter().any(installs)
    }

    /// Some workers have been asked to switch.
    fn switches(&self) -> bool {
        let switches = |progress: &Progress| matches!(progress, Progress::Switches(_));
        self.switched.contains(&true) || self.progress.iter().any(switches)
    }

    /// Some workers have been asked to let go.
    fn releases(&self) -> bool {
        let releases = |progress: &Progress| matches!(progress, Progress::Releases(_));
        self.released.contains(&true) || self.progress.iter().any(releases)
    }
}

impl<N: Nic<Socket = SimSocket, Port = ()>> World<N> {
    /// Starts to remove a service. What it has not answered after `drain_ns` is dropped.
    pub fn remove(&mut self, service: usize, drain_ns: u64) {
        self.begin(service, None, drain_ns);
    }

    /// Starts to add a service, or to replace the running one by another version. Its
    /// ports are those of the setup; clients move over according to `keeps`.
    pub fn put(&mut self, spec: Service, service: usize, keeps: Keeps, drain_ns: u64) {
        self.topology.services[service] = spec.clone();
        self.setup.topology.services[service] = spec;
        self.begin(service, Some(keeps), drain_ns);
    }

    /// Pauses the new service until [`World::resume_blocks`] reports that its first accelerator runs.
    pub fn hold_new_version(&mut self, drain_ns: u64) {
        let change = self.change.as_mut().expect("a change has begun");
        change.installs.iter_mut().flatten().for_each(|install| install.pause(0, drain_ns));
    }

    /// Posts a message about a service, an accelerator or a client that has left or never was there. The worker ignores it.
    pub fn post_late_message(&self, worker: usize, rng: &mut Rng) {
        let live: Vec<u16> = self.slots.iter().flatten().copied().collect();
        let free: Vec<u16> = (0..live.len() as u16 + 2).filter(|s| !live.contains(s)).collect();
        let (free, live) = (rng.pick(&free), rng.pick(&live));
        // Either the service has left, or it never had this accelerator.
        let (service, accelerator) = if rng.chance(500) { (free, 0) } else { (live, 9) };
        let reason = DropReason::AcceleratorLost;
        let (drain_ns, barrier) = (1, DrainBarrier::default());
        let message = match rng.below(8) {
            0 => ControlMessage::Expire(free),
            1 => ControlMessage::Release(u16::MAX, mpsc::channel().0),
            2 => ControlMessage::ShmGone(u64::MAX - rng.below(9)),
            // It is not leaving: its time cannot be over.
            3 if self.is_changed() => ControlMessage::Expire(live),
            4 => ControlMessage::Runtime(RuntimeEvent::Started { service, accelerator }),
            5 => ControlMessage::Runtime(RuntimeEvent::Ended { service, accelerator, reason }),
            6 => ControlMessage::Runtime(RuntimeEvent::Resumed { service, accelerator }),
            _ => ControlMessage::Runtime(RuntimeEvent::Paused {
                service,
                accelerator,
                drain_ns,
                barrier,
            }),
        };
        self.fabric.post(worker as u16, message);
    }

    /// Whether every worker serves the state after the last change; the old version may still be draining.
    pub fn is_switched(&self) -> bool {
        self.change.as_ref().is_none_or(|change| change.switched.iter().all(|done| *done))
    }

    /// The engine is about to end: the old version is not waited for, and not released.
    pub fn abandon_change(&mut self) {
        assert!(self.is_switched(), "the change is complete on no worker or on all");
        self.change = None;
    }

    /// The slot for new shared-memory clients of a service. There is none while the workers switch one
    /// after the other, or if the service does not exist.
    pub fn shm_slot(&self, service: usize) -> Option<u16> {
        match &self.change {
            Some(change) if !self.is_switched() && change.switches() => None,
            Some(change) if change.service == service && !self.is_switched() => change.leaves,
            Some(change) if change.service == service && !change.comes => None,
            _ => self.slots[service].last().copied(),
        }
    }

    /// Whether the last change is complete.
    pub fn is_changed(&self) -> bool {
        self.change.is_none()
    }

    fn begin(&mut self, service: usize, next: Option<Keeps>, drain_ns: u64) {
        assert!(self.change.is_none(), "one change after the other");
        let workers = self.workers.len();
        let old = self.slots[service].last().copied();
        let before = self.topology.services[..service].iter();
        let first = before.map(|earlier| earlier.ports().count()).sum::<usize>() as PortIndex;
        let listens: Vec<_> = self.topology.services[service].ports().collect();
        let ports: Vec<PortIndex> = (first..).take(listens.len()).collect();
        let mut installs: Vec<Option<ServiceInstall<()>>> = (0..workers).map(|_| None).collect();
        let (mut successor, mut shm_successor) = (None, None);
        if let Some(keeps) = next {
            let taken: Vec<u16> = self.slots.iter().flatten().copied().collect();
            let slot = (0..).find(|slot| !taken.contains(slot)).expect("there is always one more");
            installs = self.prepare(service, slot);
            successor = keeps.connections.then_some(slot);
            shm_successor = keeps.memory_clients.then_some(slot);
            self.slots[service].push(slot);
            if old.is_none() {
                for install in installs.iter_mut().flatten() {
                    for (port, listen) in ports.iter().zip(&listens) {
                        install.add_port(*port, *listen, &self.topology.limits, ());
                    }
                }
            }
        }
        let barrier = DrainBarrier::default();
        let leave = old.map(|slot| Leave {
            slot,
            successor,
            shm_successor,
            // The clients at the time when the first worker switches.
            departing: Vec::new(),
            barrier: barrier.clone(),
        });
        let new = if next.is_some() { self.slots[service].last().copied() } else { None };
        let lead = new.filter(|_| old.is_some());
        self.change = Some(Change {
            service,
            comes: next.is_some(),
            closes_ports: next.is_some_and(|keeps| !keeps.memory_ports),
            installs,
            progress: (0..workers).map(|_| Progress::default()).collect(),
            switch: Switch {
                leave: leave.into_iter().collect(),
                lead: lead.map_or(Vec::new(), |slot| {
                    let sockets = listens.iter().map(|(_, socket)| *socket);
                    ports.iter().zip(sockets).map(|(port, socket)| (*port, slot, socket)).collect()
                }),
                stop: if next.is_some() { Vec::new() } else { ports },
                limits: self.topology.limits.clone(),
                polling: self.topology.engine.polling,
            },
            switched: vec![false; workers],
            barrier,
            leaves: old,
            released: vec![old.is_none(); workers],
            expires_ns: self.now_ns() + drain_ns,
            expired: vec![old.is_none(); workers],
        });
    }

    /// Each worker's shares of the service as it is now, in a new region.
    fn prepare(&mut self, service: usize, slot: u16) -> Vec<Option<ServiceInstall<()>>> {
        let shared = prepare_service(&self.setup, service, &self.net, &mut self.rng);
        self.words.extend(shared.words);
        self.links.extend(Linked::of(service, slot, shared.links));
        for (worker, models) in shared.models.into_iter().enumerate() {
            for model in models {
                self.models.push(model);
                self.model_owners.push((worker, service));
                self.model_slots.push(slot);
            }
        }
        let spec = &self.topology.services[service];
        let metrics = self.metrics.services()[service].clone();
        ServiceInstall::for_workers(slot, spec, &metrics, shared.attachments)
            .into_iter()
            .map(Some)
            .collect()
    }

    /// Posts a worker's next step of the change, unless it has not answered yet or others have to act first.
    pub fn follow(&mut self, worker: usize) {
        let (now_ns, workers) = (self.now_ns(), self.workers.len());
        let Some(mut change) = self.change.take() else { return };
        change.collect();
        let post = |message| self.fabric.post(worker as u16, message);
        if !matches!(change.progress[worker], Progress::Idle) {
        } else if let Some(install) = change.installs[worker].take() {
            let (reply, replies) = mpsc::channel();
            change.progress[worker] = Progress::Installs(replies);
            post(ControlMessage::Install(Box::new(install), reply));
        } else if change.is_installed() && !change.switched[worker] {
            if !change.switches() {
                send_away(&mut lock(&self.net), &mut self.rng, &mut change);
            }
            let (reply, replies) = mpsc::channel();
            change.progress[worker] = Progress::Switches(replies);
            post(ControlMessage::Switch(Arc::new(change.switch.clone()), reply));
        } else if let Some(slot) = change.leaves
            && change.switched.iter().all(|done| *done)
        {
            if change.barrier.is_complete(workers) || change.releases() {
                if !change.released[worker] {
                    let (reply, replies) = mpsc::channel();
                    change.progress[worker] = Progress::Releases(replies);
                    post(ControlMessage::Release(slot, reply));
                }
            } else if now_ns >= change.expires_ns
                && !std::mem::replace(&mut change.expired[worker], true)
            {
                post(ControlMessage::Expire(slot));
            }
        }
        let done = change.switched.iter().all(|d| *d) && change.released.iter().all(|d| *d);
        if !done {
            self.change = Some(change);
            return;
        }
        if let Some(slot) = change.leaves {
            self.slots[change.service].retain(|of| *of != slot);
            self.links.retain(|linked| (linked.service, linked.slot) != (change.service, slot));
            for index in (0..self.models.len()).rev() {
                if self.model_slots[index] == slot {
                    self.models.remove(index);
                    self.model_owners.remove(index);
                    self.model_slots.remove(index);
                }
            }
        }
    }
}

/// No shared-memory client connects until all workers have switched; existing ones stay or are disconnected.
fn send_away(net: &mut Network, rng: &mut Rng, change: &mut Change) {
    let Some(leave) = change.switch.leave.first_mut() else { return };
    let here = net.memory_clients.iter().filter(|(_, service)| **service == change.service);
    let mut going: Vec<u32> = here.map(|(id, _)| *id).collect();
    if leave.shm_successor.is_some() {
        going.retain(|_| change.closes_ports && rng.chance(500));
        leave.departing = going.iter().map(|id| u64::from(*id)).collect();
    }
    net.sent_away.extend(going);
}
