//! A whole engine in one thread: real workers over the virtual network and model accelerators.
//!
//! [`World::build`] assembles what the server assembles over sockets and kernels:
//! regions, ends, links, fabric, workers. The owner of the world controls the schedule:
//! [`World::advance`] moves the clock, [`World::turn`] runs a turn of one worker. After every turn
//! [`World::check`] checks the engine's accounting.
//!
//! A worker that may sleep is not run until an event, the end of its sleep, or something that another
//! worker published for it (which would have woken it). The waking itself needs real threads and has
//! tests of its own.

pub mod change;
pub mod generations;
pub(crate) mod linked;
mod region;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use engine::metrics::{Metrics, ServiceMetrics, ServiceSnapshot};
use engine::stages::ObservationSnapshot;
use engine::tenants::Tenants;
use engine::topology::{Listen, Replies, Service, SocketAt, Topology};
use engine::{
    Attachment, ChainPlace, ChainReply, ChainRequest, ControlMessage, Fabric, ServiceInstall,
    ShmClient, Switch, Worker,
};
use mqueue::{MappedMemory, Words};
use onpath::{Arranged, Counters, Function, Link, OnFailure, Policy, StateKind};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Nic, Transport};

use crate::accelerator::{BackendRole, Model, ModelBlocks, Role, SeenTokens};
use crate::behaviour::Behaviour;
use crate::ledger::{Ledger, ServiceRules};
use crate::link::AcceleratorLink;
use crate::net::{LOCAL, Network, PortSite, SharedNetwork};
use crate::nic::{Message, SimNic, SimSocket};
use crate::rng::Rng;
use crate::shared::lock;
use crate::transfers::{Disk, TransferSetup};
use crate::world::change::Change;
use crate::world::linked::Linked;
use crate::world::region::{Part, prepare_region};

/// Slots for services that are added later.
const SPARE_SLOTS: usize = 8;

/// The components of a world.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The engine's topology; it passes [`Topology::check`]. Ports may not be 0.
    pub topology: Topology,
    /// For each service, how the blocks of its accelerators behave.
    pub behaviours: Vec<Behaviour>,
    /// For each service, whether its backends answer correctly.
    pub honest_backends: Vec<bool>,
    /// Initial count of every ring.
    pub ring_start: u64,
    /// Seed of all randomness below.
    pub seed: u64,
    /// Accelerators on another machine: service, and index in its list.
    pub links: Vec<(usize, usize)>,
    /// For each service, its transfers; may be shorter.
    pub transfers: Vec<TransferSetup>,
}

impl Setup {
    /// Sound accelerators, honest backends, proper clients.
    pub fn sound(topology: Topology) -> Self {
        let services = topology.services.len();
        Self {
            topology,
            behaviours: vec![Behaviour::default(); services],
            honest_backends: vec![true; services],
            ring_start: 0,
            seed: 1,
            links: Vec::new(),
            transfers: Vec::new(),
        }
    }

    fn rules(&self) -> Vec<ServiceRules> {
        let rules = |(index, service): (usize, &engine::topology::Service)| ServiceRules {
            framing: service.framing,
            error_reply: service.error_reply.clone(),
            dispatch: service.dispatch,
            mqueues: service.mqueues_total() as u32,
            judged: !self.behaviours[index].corrupts(),
            memory: !service.memory_ports.is_empty(),
            streams: service.listen.iter().any(|l| l.transport == Transport::Tcp),
        };
        self.topology.services.iter().enumerate().map(rules).collect()
    }

    /// What kernels of a service know of a backend that does transfers.
    pub(crate) fn disk(&self, service: usize, backend: &engine::topology::Backend) -> Option<Disk> {
        let setup = self.transfers.get(service).cloned().unwrap_or_default();
        let files = self.topology.services[service].files.clone();
        let memory_bytes = backend.memory_bytes;
        backend.does_transfers().then_some(Disk { setup, files, memory_bytes })
    }

    /// Backend addresses of all services, in order, with the addresses of upstream servers; then the addresses to which blocks connect.
    pub fn backend_addresses(&self) -> Vec<SocketAddr> {
        let services = &self.topology.services;
        let backends =
            services.iter().flat_map(|s| s.backends.iter().map(|b| b.address).chain(s.upstream));
        backends.chain(services.iter().flat_map(connected)).collect()
    }

    fn network(&self, rng: Rng) -> Network {
        let limit = self.topology.limits.udp_reply_ratio;
        let port = |(service, listen, is_socket): (usize, Listen, bool)| PortSite {
            transport: listen.transport,
            address: listen.address,
            service,
            // The default: 3 off loopback, none on it.
            reply_ratio: limit.unwrap_or(if listen.address.ip().is_loopback() { 0 } else { 3 })
                as usize,
            privileged: self
                .topology
                .limits
                .udp_privileged_sources
                .unwrap_or(listen.address.ip().is_loopback()),
            is_socket,
        };
        let services = self.topology.services.iter().enumerate();
        let ports = services.flat_map(|(index, service)| {
            service.ports().map(move |(listen, socket)| (index, listen, socket.is_some()))
        });
        let ports = ports.map(port).collect();
        let ledger = Ledger::new(self.rules());
        let workers = self.topology.engine.workers;
        let mut net = Network::new(workers, ports, self.backend_addresses(), ledger, rng);
        net.set_socket_peers(self.socket_peers());
        net
    }

    /// Places of the peers of blocks in [`Self::backend_addresses`], with their services.
    pub(crate) fn socket_peers(&self) -> Vec<(usize, usize)> {
        let services = self.topology.services.iter().enumerate();
        let owners = services.flat_map(|(index, service)| connected(service).map(move |_| index));
        let owners: Vec<_> = owners.collect();
        (self.backend_addresses().len() - owners.len()..).zip(owners).collect()
    }
}

/// Addresses to which a service's blocks connect.
fn connected(service: &Service) -> impl Iterator<Item = SocketAddr> + '_ {
    service.sockets.iter().filter_map(|socket| match socket.at {
        SocketAt::Tcp(address) if !socket.listens() => Some(address),
        _ => None,
    })
}

/// See the module's text.
pub struct World<N: Nic<Socket = SimSocket, Port = ()>> {
    /// The network, with its clock and ledger.
    pub net: SharedNetwork,
    /// The engine's counters.
    pub metrics: Metrics,
    /// The workers.
    pub workers: Vec<Worker<N>>,
    /// The model accelerators of all services and workers.
    pub models: Vec<Arc<Mutex<Model>>>,
    /// Worker and service of each model.
    pub(crate) model_owners: Vec<(usize, usize)>,
    /// Blocks of generations that have ended.
    pub(crate) retired: Vec<Arc<Mutex<Model>>>,
    /// Of the latest region.
    pub(crate) generation: u64,
    /// Slot of each model.
    pub(crate) model_slots: Vec<u16>,
    /// Slots of each service: the last one gets requests, the others are draining.
    pub(crate) slots: Vec<Vec<u16>>,
    pub(crate) change: Option<Change>,
    pub(crate) setup: Setup,
    pub(crate) rng: Rng,
    pub(crate) topology: Topology,
    pub(crate) fabric: Arc<Fabric<Message>>,
    pub(crate) words: Vec<Words<MappedMemory>>,
    pub(crate) links: Vec<Linked>,
    /// Links of generations that have ended.
    pub(crate) retired_links: Vec<AcceleratorLink>,
    /// Until when each worker sleeps unless something happens; 0: it does not.
    asleep_until_ns: Vec<u64>,
    /// By worker: it was woken since its last turn.
    woken: Vec<Arc<AtomicBool>>,
    /// The engine's counters by service.
    pub(crate) services: Arc<[Arc<ServiceMetrics>]>,
    /// The last checked state, by worker and service.
    books: Vec<Vec<Option<Page>>>,
}

/// The part of a service's account that a worker's turn may change.
#[derive(PartialEq)]
struct Page {
    counted: ServiceSnapshot,
    held: u64,
}

/// A service's regions, divided among the workers.
pub(crate) struct PreparedService {
    pub(crate) words: Vec<Words<MappedMemory>>,
    /// By worker.
    pub(crate) attachments: Vec<Vec<Attachment>>,
    /// By worker.
    pub(crate) models: Vec<Vec<Arc<Mutex<Model>>>>,
    /// With the accelerator of each.
    pub(crate) links: Vec<(usize, AcceleratorLink)>,
}

pub(crate) fn prepare_service(
    setup: &Setup,
    service: usize,
    net: &SharedNetwork,
    rng: &mut Rng,
) -> PreparedService {
    let workers = setup.topology.engine.workers;
    let tokens: Vec<SeenTokens> = (0..workers).map(|_| SeenTokens::default()).collect();
    let mut out = PreparedService {
        words: Vec::new(),
        attachments: (0..workers).map(|_| Vec::new()).collect(),
        models: (0..workers).map(|_| Vec::new()).collect(),
        links: Vec::new(),
    };
    for accelerator in 0..setup.topology.services[service].accelerators.len() {
        let divided = prepare_region(setup, service, accelerator, 1, rng);
        out.words.push(divided.words.clone());
        out.links.extend(divided.link.map(|link| (accelerator, link)));
        let role = role(setup, service, accelerator);
        for (worker, part) in divided.parts.into_iter().enumerate() {
            let Part { ends, shares, pool, heads } = part;
            let region =
                (divided.memory.clone(), divided.entries.clone(), divided.pool_entries.clone());
            let world = (net.clone(), tokens[worker].clone(), rng.fork());
            let behaviour = setup.placed(setup.behaviours[service], service, accelerator);
            let model = Model::new(role.clone(), behaviour, region, shares, world);
            let model = Arc::new(Mutex::new(model));
            out.models[worker].push(model.clone());
            let blocks = Box::new(ModelBlocks { model, heads });
            out.attachments[worker].push(Attachment { blocks, ends, pool });
        }
    }
    out
}

/// The change from an empty topology: installs all services, and switches to them.
fn start<N: Nic<Socket = SimSocket, Port = ()>>(
    workers: &mut [Worker<N>],
    fabric: &Fabric<Message>,
    installs: Vec<Vec<ServiceInstall<()>>>,
    topology: &Topology,
) {
    let (reply, installed) = mpsc::channel();
    for of_workers in installs {
        for (worker, install) in (0..).zip(of_workers) {
            fabric.post(worker, ControlMessage::Install(Box::new(install), reply.clone()));
        }
    }
    drop(reply);
    workers.iter_mut().for_each(|worker| _ = worker.turn(0));
    installed.iter().for_each(|installed| installed.expect("model blocks start"));
    let switch = Arc::new(Switch::new(topology.limits.clone(), topology.engine.polling));
    fabric.post_to_all(|_| ControlMessage::Switch(switch.clone(), mpsc::channel().0));
    workers.iter_mut().for_each(|worker| _ = worker.turn(0));
}

impl<N: Nic<Socket = SimSocket, Port = ()>> World<N> {
    /// Assembles everything; `wrap` may wrap a worker's network.
    pub fn build(setup: &Setup, wrap: impl Fn(SimNic) -> N) -> Self {
        let topology = setup.topology.clone();
        topology.check().expect("a topology that works");
        let mut rng = Rng::new(setup.seed);
        let net = Arc::new(Mutex::new(setup.network(rng.fork())));
        let workers = topology.engine.workers;
        let services = topology.services.len();
        let mut models = Vec::new();
        let mut model_owners = Vec::new();
        let mut model_slots = Vec::new();
        let (mut words, mut links) = (Vec::new(), Vec::new());
        let metrics = Metrics::new(workers, topology.services.iter().map(|s| s.name.clone()));
        let mut ports = 0..;
        let mut installs = Vec::new();
        for (service, spec) in topology.services.iter().enumerate() {
            let shared = prepare_service(setup, service, &net, &mut rng);
            words.extend(shared.words);
            links.extend(Linked::of(service, service as u16, shared.links));
            for (worker, of_worker) in shared.models.into_iter().enumerate() {
                model_owners.extend(of_worker.iter().map(|_| (worker, service)));
                model_slots.extend(of_worker.iter().map(|_| service as u16));
                models.extend(of_worker);
            }
            let (slot, counters) = (service as u16, &metrics.services()[service]);
            let mut of_workers =
                ServiceInstall::for_workers(slot, spec, counters, shared.attachments);
            for listen in spec.ports() {
                let port = ports.next().expect("a number for every port");
                for install in &mut of_workers {
                    install.add_port(port, listen, &topology.limits, ());
                }
            }
            installs.push(of_workers);
        }
        let woken: Vec<Arc<AtomicBool>> = (0..workers).map(|_| Arc::default()).collect();
        let waker = |woken: Arc<AtomicBool>| move || woken.store(true, Ordering::Relaxed);
        let wakers = woken.iter().cloned();
        let wakers = wakers.map(|woken| Box::new(waker(woken)) as Box<dyn Fn() + Send + Sync>);
        let fabric = Fabric::new(wakers.collect(), services + SPARE_SLOTS);
        fabric.set_local_addresses(LOCAL.to_vec());
        fabric.tenants().set(&topology.tenants, |_| false);
        let build = |index| {
            let nic = wrap(SimNic::new(index, net.clone()));
            Worker::new(index, nic, &topology.limits, &metrics, fabric.clone())
        };
        let mut all: Vec<Worker<N>> = (0..workers).map(build).collect();
        start(&mut all, &fabric, installs, &topology);
        Self {
            workers: all,
            net,
            models,
            model_owners,
            retired: Vec::new(),
            generation: 1,
            model_slots,
            slots: (0..services).map(|service| vec![service as u16]).collect(),
            change: None,
            setup: setup.clone(),
            rng,
            fabric,
            words,
            links,
            retired_links: Vec::new(),
            asleep_until_ns: vec![0; workers],
            woken,
            books: (0..workers).map(|_| (0..services).map(|_| None).collect()).collect(),
            services: metrics.services(),
            metrics,
            topology,
        }
    }

    /// The clock.
    pub fn now_ns(&self) -> u64 {
        lock(&self.net).now_ns()
    }

    /// The topology that runs.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The tenants, whose weights and limits may change at any time.
    pub fn tenants(&self) -> &Tenants {
        self.fabric.tenants()
    }

    /// Moves the clock, delivers what is due, also over links, runs remote accelerators.
    pub fn advance(&mut self, by_ns: u64) {
        let now_ns = self.now_ns() + by_ns;
        lock(&self.net).advance(now_ns);
        self.advance_links(now_ns);
        for model in self.models.iter().chain(&self.retired) {
            let mut model = lock(model);
            if model.is_remote() {
                model.step(now_ns);
            }
        }
        for transfers in &self.setup.transfers {
            lock(&transfers.books).now_ns = self.now_ns();
        }
    }

    /// Whether a worker has a reason to run.
    pub fn is_awake(&mut self, worker: usize) -> bool {
        self.asleep_until_ns[worker] <= self.now_ns()
            || self.woken[worker].load(Ordering::Relaxed)
            || lock(&self.net).has_events(worker)
            || !self.would_sleep(worker)
    }

    /// Whether a waiting worker sleeps: messages that other workers published keep it awake. (Those
    /// that publish while it sleeps wake it, with the same effect.)
    fn would_sleep(&mut self, worker: usize) -> bool {
        lock(&self.net).mute(true);
        self.workers[worker].wait(1);
        let mut net = lock(&self.net);
        net.mute(false);
        net.asked_sleep_ns > 0
    }

    /// When the first sleeper wakes by itself, if all sleep.
    pub fn first_wake_ns(&mut self) -> Option<u64> {
        let all = (0..self.workers.len()).all(|w| !self.is_awake(w));
        if all { self.asleep_until_ns.iter().min().copied() } else { None }
    }

    /// One worker waits for events and turns; returns whether there was work.
    pub fn turn(&mut self, worker: usize) -> bool {
        let now_ns = self.now_ns();
        let slept = self.asleep_until_ns[worker] > 0;
        self.woken[worker].store(false, Ordering::Relaxed);
        let entry = &mut self.workers[worker];
        // The sleep, if any, is over.
        entry.wait(u64::from(slept));
        let busy = entry.turn(now_ns);
        let sleep_ns = entry.sleep_ns(now_ns);
        lock(&self.net).trace.note(now_ns, "turn", &[worker as u64, busy.into(), sleep_ns]);
        let sleeps = sleep_ns > 0 && self.would_sleep(worker);
        self.asleep_until_ns[worker] = if sleeps { now_ns + sleep_ns } else { 0 };
        if sleeps {
            self.check_sleep(worker, sleep_ns);
        }
        busy
    }

    /// A worker may sleep only if it has no work meanwhile.
    fn check_sleep(&mut self, worker: usize, sleep_ns: u64) {
        let now_ns = self.now_ns();
        let services = 0..self.topology.services.len();
        let in_flight: u32 = services.map(|s| self.by_mqueue(worker, s).sum::<u32>()).sum();
        // The blocks of an old version have no owner once the worker has released them.
        let serves = |m: &usize| {
            let (of, service) = self.model_owners[*m];
            of == worker && self.slots[service].last() == Some(&self.model_slots[*m])
        };
        let models = (0..self.models.len()).filter(serves);
        let wake_ns = models.map(|m| lock(&self.models[m]).wake_ns()).min().unwrap_or(u64::MAX);
        // Another turn without new input: work that it finds, or reports to others, was left over.
        let others: Vec<usize> = (0..self.workers.len()).filter(|w| *w != worker).collect();
        let quiet: Vec<usize> = others.into_iter().filter(|w| self.would_sleep(*w)).collect();
        let events = lock(&self.net).mute(true);
        self.workers[worker].wait(0);
        let busy = self.workers[worker].turn(now_ns);
        let left_over = lock(&self.net).mute(false) > events
            || busy
            || quiet.into_iter().any(|w| !self.would_sleep(w));
        if in_flight > 0 || now_ns + sleep_ns > wake_ns || left_over {
            lock(&self.net).ledger.violate(|| {
                format!(
                    "worker {worker} would sleep {sleep_ns} ns with {in_flight} requests in flight, \
                     blocks to wake at {wake_ns}, work left over: {left_over}"
                )
            });
        }
    }

    /// Every worker turns once, `rounds` times, `by_ns` apart; checks after each.
    pub fn run(&mut self, rounds: usize, by_ns: u64) {
        for _ in 0..rounds {
            self.advance(by_ns);
            for worker in 0..self.workers.len() {
                self.turn(worker);
            }
            if let Err(violation) = self.check() {
                panic!("{violation}");
            }
        }
    }

    /// Whether the engine keeps its promises at this moment.
    pub fn check(&mut self) -> Result<(), String> {
        for service in 0..self.topology.services.len() {
            self.check_service(service)?;
            self.check_sockets(service);
        }
        self.check_ledger()
    }

    /// The same after a turn of one worker, if it held before: the state that the turn did not touch is unchanged.
    pub fn check_turn(&mut self, worker: usize) -> Result<(), String> {
        for service in 0..self.topology.services.len() {
            let page = Page {
                counted: self.services[service].counted_by(worker),
                held: self.held(worker, service),
            };
            let last = &mut self.books[worker][service];
            let audited = lock(&self.net).ledger.is_audited(service);
            if !audited || last.as_ref() != Some(&page) {
                *last = Some(page);
                self.check_service(service)?;
            }
            self.check_sockets(service);
        }
        self.check_ledger()
    }

    fn check_ledger(&self) -> Result<(), String> {
        match lock(&self.net).ledger.violation() {
            Some(violation) => Err(violation.to_owned()),
            None => Ok(()),
        }
    }

    fn check_service(&mut self, service: usize) -> Result<(), String> {
        let counted = self.services[service].snapshot();
        let in_flight = self.held_by_all(service) + crossing(&counted);
        let ended = counted.replied + counted.consumed + counted.dropped_requests();
        if counted.received != ended + in_flight {
            return Err(format!(
                "service {service}: received {} is not {} replied + {} consumed + {} dropped + \
                 {in_flight} in flight ({counted:?})",
                counted.received,
                counted.replied,
                counted.consumed,
                counted.dropped_requests()
            ));
        }
        let spec = &self.topology.services[service];
        for index in 0..self.workers.len() {
            for (mqueue, outstanding) in self.by_mqueue(index, service).enumerate() {
                if outstanding > spec.slots {
                    return Err(format!(
                        "mqueue {mqueue} of service {service} on worker {index} has {outstanding} \
                         requests in {} slots",
                        spec.slots
                    ));
                }
            }
        }
        check_stages(&self.services[service].observed(), spec.replies)
            .map_err(|error| format!("service {service}: {error}"))?;
        let datagrams_only = spec.listen.iter().all(|l| l.transport == Transport::Udp);
        lock(&self.net).ledger.audit(service, &counted, datagrams_only);
        Ok(())
    }

    /// Requests in flight on each of a worker's mqueues of a service, in the share that gets new ones.
    fn by_mqueue(&self, worker: usize, service: usize) -> impl Iterator<Item = u32> + '_ {
        let slot = self.slots[service].last();
        slot.into_iter().flat_map(move |s| self.workers[worker].outstanding_by_mqueue((*s).into()))
    }

    /// Requests of a service in one worker's tables.
    fn held(&self, worker: usize, service: usize) -> u64 {
        let worker = &self.workers[worker];
        self.slots[service].iter().map(|slot| worker.outstanding_of((*slot).into())).sum()
    }

    fn held_by_all(&self, service: usize) -> u64 {
        (0..self.workers.len()).map(|worker| self.held(worker, service)).sum()
    }

    /// Requests of a service without an outcome, by the tables that hold them.
    pub fn in_flight(&self, service: usize) -> u64 {
        self.held_by_all(service) + crossing(&self.services[service].snapshot())
    }

    /// Lost messages of a service for one reason.
    pub fn dropped(&self, service: usize, reason: DropReason) -> u64 {
        self.services[service].snapshot().dropped(reason)
    }

    /// Asks something of the chain of a service, or of one of its backends, on one worker, which answers in its next turn.
    pub fn ask_chain(
        &self,
        worker: usize,
        (service, backend): (usize, Option<u16>),
        request: ChainRequest,
    ) -> mpsc::Receiver<ChainReply> {
        let slot = *self.slots[service].last().expect("every service has a slot");
        let (reply, replies) = mpsc::channel();
        let place = ChainPlace { slot, backend };
        self.fabric.post(worker as u16, ControlMessage::Chain(place, request, reply));
        replies
    }

    /// Gives a service on one worker these functions, from its next turn on. Each has a deadline of a second.
    pub fn set_functions(
        &self,
        worker: usize,
        service: usize,
        functions: Vec<(Box<dyn Function>, OnFailure)>,
    ) -> Vec<Arc<Counters>> {
        self.set_functions_of(worker, (service, None), functions)
    }

    /// The same on the path to a backend of the service, if one is named.
    pub fn set_functions_of(
        &self,
        worker: usize,
        (service, backend): (usize, Option<u16>),
        functions: Vec<(Box<dyn Function>, OnFailure)>,
    ) -> Vec<Arc<Counters>> {
        self.set_functions_with(worker, (service, backend), StateKind::Mergeable, functions)
    }

    /// The same, with states of this kind.
    pub fn set_functions_with(
        &self,
        worker: usize,
        (service, backend): (usize, Option<u16>),
        state: StateKind,
        functions: Vec<(Box<dyn Function>, OnFailure)>,
    ) -> Vec<Arc<Counters>> {
        let counters: Vec<_> = functions.iter().map(|_| Arc::<Counters>::default()).collect();
        let links = functions.into_iter().zip(&counters).zip(0..);
        let order = links.map(|(((function, on_failure), counters), id)| {
            let policy = Policy { on_failure, deadline_ns: 1_000_000_000 };
            let link = Link::new(id, function, policy, Arc::clone(counters));
            Arranged::New(link.with_state(state))
        });
        self.ask_chain(worker, (service, backend), ChainRequest::Arrange(order.collect()));
        counters
    }

    /// A worker gets a shared-memory client at its next turn.
    pub fn attach_shm_client(&self, client: ShmClient) {
        let worker = self.fabric.assign_shm_client();
        self.fabric.post(worker, ControlMessage::ShmAttached(Box::new(client)));
    }

    /// Every worker learns that this shared-memory client is gone.
    pub fn detach_shm_client(&self, id: u64) {
        let workers = 0..self.workers.len() as u16;
        workers.for_each(|worker| self.fabric.post(worker, ControlMessage::ShmGone(id)));
    }

    /// A worker stops accepting, from its next turn on.
    pub fn drain_worker(&self, worker: usize) {
        self.fabric.post(worker as u16, ControlMessage::Drain);
    }

    /// Every worker stops accepting.
    pub fn begin_drain(&mut self) {
        (0..self.workers.len()).for_each(|worker| self.drain_worker(worker));
    }

    /// Whether every draining worker has answered everything.
    pub fn all_settled(&self) -> bool {
        self.fabric.all_settled()
    }

    /// Ends every worker. None turns afterwards.
    pub fn finish(&mut self) -> bool {
        let mut hung = false;
        for worker in &mut self.workers {
            hung |= worker.shutdown();
        }
        for words in &self.words {
            words.set_stop(mqueue::abi::stop::NOW);
        }
        hung
    }

    /// What must hold after [`Self::finish`]: nothing is in flight.
    pub fn check_finished(&mut self) -> Result<(), String> {
        self.check()?;
        for service in 0..self.topology.services.len() {
            let in_flight = self.in_flight(service);
            if in_flight != 0 {
                return Err(format!("service {service}: {in_flight} in flight after the end"));
            }
            if let Some(left) = self.open_sockets(service) {
                return Err(format!("service {service} after the end: {left}"));
            }
        }
        Ok(())
    }

    /// Whether blocks that no longer read keep messages that are not missed: those of a service
    /// without replies.
    pub(crate) fn keeps_unread(&self, service: usize) -> bool {
        let of_service =
            self.models.iter().zip(&self.model_owners).filter(|(_, seat)| seat.1 == service);
        let stopped =
            of_service.flat_map(|(model, _)| lock(model).stopped()).any(|stopped| stopped);
        stopped && self.topology.services[service].replies == Replies::None
    }

    /// Every mqueue of a worker has all its credit, but for those.
    fn check_credit_returned(&self, service: usize, worker: usize) -> Result<(), String> {
        let none = self.topology.services[service].replies == Replies::None;
        let models = self.models.iter().zip(&self.model_owners);
        let models = models.filter(|(_, seat)| **seat == (worker, service));
        let stopped: Vec<bool> = models.flat_map(|(model, _)| lock(model).stopped()).collect();
        let held: Vec<u32> = self.by_mqueue(worker, service).collect();
        let lost =
            held.iter().zip(&stopped).any(|(held, stopped)| *held > 0 && !(none && *stopped));
        if lost {
            return Err(format!(
                "all is quiet, but worker {worker} holds credit of service {service}: {held:?}"
            ));
        }
        Ok(())
    }

    /// What must hold once all has been quiet: nothing is in flight, all credit has been returned.
    pub fn check_quiet(&mut self) -> Result<(), String> {
        self.check()?;
        for service in 0..self.topology.services.len() {
            for worker in 0..self.workers.len() {
                self.check_credit_returned(service, worker)?;
            }
            if self.keeps_unread(service) {
                continue;
            }
            let in_flight = self.in_flight(service);
            if in_flight > 0 {
                return Err(format!("all is quiet, but {in_flight} of service {service} are not"));
            }
        }
        match self.models.iter().find_map(|m| lock(m).unfinished()) {
            Some(unfinished) => Err(format!("all is quiet, but {unfinished} are not finished")),
            None => self.check_pools(),
        }
    }

    /// When all is quiet, every buffer is in its pool, except those that blocks have never returned.
    fn check_pools(&self) -> Result<(), String> {
        for (worker, (service, slot)) in self.shares() {
            let (bundles, taken, received) = self.workers[worker].bundles_of(slot);
            if bundles + received != taken {
                return Err(format!("{bundles} bundles of service {service} have {taken} buffers"));
            }
            if taken > 0 && self.setup.behaviours[service].ends_all() {
                return Err(format!(
                    "all is quiet, but {taken} buffers of service {service} are not free"
                ));
            }
        }
        Ok(())
    }

    /// Every worker with each service and its slots.
    fn shares(&self) -> impl Iterator<Item = (usize, (usize, usize))> + '_ {
        (0..self.workers.len()).flat_map(|worker| {
            let slots = self.slots.iter().enumerate();
            slots.flat_map(move |(service, slots)| {
                slots.iter().map(move |slot| (worker, (service, usize::from(*slot))))
            })
        })
    }
}

/// Messages inside hand-over rings.
fn crossing(counted: &ServiceSnapshot) -> u64 {
    (counted.handed_out - counted.handed_in)
        + (counted.replies_handed_out - counted.replies_handed_in)
}

/// Every sampled message is in the histograms of all its stages, and they add up to its total time.
fn check_stages(observed: &ObservationSnapshot, replies: Replies) -> Result<(), String> {
    let ObservationSnapshot { stages, total, .. } = observed;
    let ends = if replies == Replies::None { 0 } else { total.count() };
    let expected = [total.count(), total.count(), ends, ends];
    let counts = [0, 1, 2, 3].map(|stage: usize| stages[stage].count());
    let sum_ns: u64 = stages.iter().map(|stage| stage.sum_ns).sum();
    if counts != expected || sum_ns != total.sum_ns {
        return Err(format!(
            "stages hold {counts:?} messages and {sum_ns} ns, the total {} and {} ns",
            total.count(),
            total.sum_ns
        ));
    }
    Ok(())
}

fn role(setup: &Setup, service: usize, accelerator: usize) -> Role {
    let spec = &setup.topology.services[service];
    let backend = |spec: &engine::topology::Backend| BackendRole {
        framing: spec.framing,
        max_message_bytes: spec.max_message_bytes as usize,
        honest: setup.honest_backends[service] || is_matched(spec),
        disk: setup.disk(service, spec),
    };
    Role {
        service,
        accelerator,
        first_mqueue: (0..accelerator).map(|place| spec.mqueues_on(place)).sum(),
        framing: spec.framing,
        replies: spec.replies,
        backends: spec.backends.iter().map(backend).collect(),
        sockets: spec.sockets.iter().map(|socket| socket.listens()).collect(),
    }
}

/// Whether the engine matches a backend's answers with the requests.
fn is_matched(spec: &engine::topology::Backend) -> bool {
    spec.framing == Framing::Memcached || spec.matching.is_some()
}
