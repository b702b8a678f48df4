//! The server: puts an engine together from a [`Topology`] and runs it.
//!
//! Everything that can fail happens in [`Server::start`], in this order: ports are bound, regions
//! created and formatted, kernels found, accelerators started, workers put together. When it returns
//! `Ok`, every port is open and every block has reached its first `recv`. From then on the worker
//! threads alone handle messages; this side only counts, changes what runs ([`Server::change`]), drains and
//! stops.

mod change;
mod handshake_queue;
mod heartbeat;
mod kernel_files;
mod plan;
mod region;
mod shm_acceptor;
mod shutdown;
mod supervisor;
#[cfg(test)]
mod tests;
mod watchdog;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use accel::cpu::{CpuAccelerator, Options as CpuOptions, ThreadBlocks, WorkerBlocks};
use accel::{AccelError, Kernel};
use engine::accelerator::{Blocks, StartError};
use engine::metrics::{Metrics, RuntimeMetrics};
use engine::topology::{AcceleratorKind, CpuPlacement, Listen, Service, Topology, TopologyError};
use engine::{
    Attachment, BlockEnds, ControlMessage, Fabric, PeerLinks, Worker, WorkerParts, peer_links,
};
use mqueue::{MappedMemory, Words};
use sys::socket_nic::AcceptedSocket;
use sys::tap::TapFile;
use sys::{OpenPort, PortSpec, SharedMemory, SocketNic, SocketOptions};
use wire::nic::{Nic, NicError};

use runtime::kernel_file::{self, KernelFile};

pub use change::{ChangeError, ChangeReport, ServiceChange};
pub use plan::{Refusal, ServiceAction};
use shutdown::BLOCKS_TIMEOUT;
pub use shutdown::ShutdownReport;
pub use watchdog::{Stall, Stalls};

use change::{LeakedSlot, ServiceSlot, Timeouts};
use heartbeat::{HeartbeatGuard, HeartbeatWriter};
use kernel_files::{KernelFiles, kernel_files};
use region::{MadeRegion, make_region};
use shm_acceptor::{MemoryPort, NewPorts, ShmAcceptor};
use supervisor::{
    AttachListeners, NO_SIGN_OF_LIFE, PreparedRuntime, RuntimeSpec, StartFailure, Supervisor,
};
use watchdog::Watchdog;

/// Why a server did not start. The message is one sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The topology cannot work.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A port cannot be opened.
    #[error(transparent)]
    Open(#[from] sys::OpenError),
    /// A shared-memory port, or the path of an accelerator, cannot be opened.
    #[error(transparent)]
    MemoryPort(#[from] sys::local::LocalError),
    /// A region cannot be created.
    #[error("service {service:?}: {source}")]
    Memory {
        /// The service whose region it is.
        service: String,
        /// Why.
        source: sys::MemoryError,
    },
    /// A kernel cannot be used, or an accelerator did not start.
    #[error("service {service:?}: {source}")]
    Accelerator {
        /// The service.
        service: String,
        /// Why.
        source: accel::AccelError,
    },
    /// A runtime that the engine starts did not come to serve.
    #[error("service {service:?}: its runtime did not start: {why}")]
    Runtime {
        /// The service.
        service: String,
        /// Why.
        why: String,
    },
    /// The start was not wanted any more.
    #[error("stopped before it was ready")]
    Cancelled,
    /// A worker cannot take a service in.
    #[error("service {service:?}: a worker cannot take it in: {why}")]
    Install {
        /// The service.
        service: String,
        /// Why, and what to do.
        why: String,
    },
    /// A thread, a worker's or one beside them, cannot be started.
    #[error(
        "thread {name} cannot be started: {source}: raise `ulimit -u` and the control group's \
         `pids.max` if threads are short, `ulimit -n` if descriptors are"
    )]
    Thread {
        /// Its name.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// A worker ended before it was ready.
    #[error("a worker thread ended while it started: it panicked, report what it said before this")]
    Panicked,
    /// Who lets shared-memory clients in does not answer.
    #[error("the shared-memory ports did not open in time: the host is overloaded, start again")]
    MemoryPortsLate,
}

impl From<StartFailure> for ServerError {
    fn from(unready: StartFailure) -> Self {
        match unready {
            StartFailure::Failed(reasons) => {
                let (service, why) = reasons.into_iter().next().expect("one at least has failed");
                Self::Runtime { service, why }
            }
            StartFailure::Silent(services) => {
                Self::Runtime { service: services.join(", "), why: NO_SIGN_OF_LIFE.to_owned() }
            }
            StartFailure::Cancelled => Self::Cancelled,
        }
    }
}

impl ServerError {
    /// Blocks did not start.
    fn of_blocks(service: &Service, error: StartError) -> Self {
        let service = service.name.clone();
        match error.downcast::<AccelError>() {
            Ok(source) => Self::Accelerator { service, source: *source },
            Err(error) => Self::Install { service, why: install_error_text(&error) },
        }
    }

    fn no_thread(name: &str) -> impl Fn(std::io::Error) -> Self {
        let name = format!("serval-{name}");
        move |source| Self::Thread { name: name.clone(), source }
    }
}

fn install_error_text(error: &StartError) -> String {
    match error.downcast_ref::<NicError>() {
        // What is left when descriptors are not short.
        Some(NicError::Refused(text)) => {
            format!("the host kernel does not watch its port ({text}): free memory, then reload")
        }
        _ => error.to_string(),
    }
}

/// How long a worker that stops waits for the others' last turns.
const LAST_TURNS_TIMEOUT: Duration = Duration::from_secs(1);
/// How often somebody who may give up is asked while workers start.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long workers of a start that failed may take to end before they are left behind; longer than they wait for each other.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(1500);
/// A start that takes this long is told, and again each time.
const READY_REPORT_INTERVAL: Duration = Duration::from_secs(30);
/// Services there is room for besides those of the start. While services change, both versions count.
const SERVICES_SPARE: usize = 256;

/// The fabric of workers over sockets.
type ServerFabric = Fabric<ControlMessage<AcceptedSocket, OpenPort>>;

/// A running engine. Dropping it stops it without draining.
pub struct Server {
    topology: Arc<Topology>,
    /// By service.
    service_slots: Vec<ServiceSlot>,
    leaked: Vec<LeakedSlot>,
    timeouts: Timeouts,
    metrics: Metrics,
    fabric: Arc<ServerFabric>,
    workers: Vec<JoinHandle<bool>>,
    /// With the slots of their services.
    accelerators: Vec<(u16, CpuAccelerator)>,
    regions: Vec<OpenRegion>,
    heartbeat_writer: Arc<HeartbeatWriter>,
    watchdog: Watchdog,
    /// Runtimes in processes of their own; they end after the workers.
    supervisor: Option<Supervisor>,
    /// By worker.
    wakers: Vec<sys::Waker>,
    /// Lets shared-memory clients in; goes before the fabric's workers do.
    shm_acceptor: Option<ShmAcceptor>,
}

/// A region of a `cpu` accelerator.
struct OpenRegion {
    /// Slot of its service.
    slot: u16,
    words: Words<MappedMemory>,
    blocks: u32,
    _heartbeat: HeartbeatGuard,
    /// Held here so that no worker drops the last reference: unmapping takes long.
    _memory: Arc<SharedMemory>,
}

/// What runs a version of a service.
struct Attached {
    /// By worker: its share of each accelerator's region.
    of_workers: Vec<Vec<Attachment>>,
    /// Of accelerators whose blocks run elsewhere.
    runtimes: Vec<PreparedRuntime>,
}

impl Attached {
    /// What is told of the accelerators whose blocks run elsewhere.
    fn runtime_metrics(&self) -> Vec<Arc<RuntimeMetrics>> {
        self.runtimes.iter().map(|runtime| runtime.spec.metrics.clone()).collect()
    }
}

/// Workers drop datagrams whose source is a port of this server; see `engine/src/endpoint/sources.rs`.
fn tell_local_addresses(fabric: &ServerFabric) {
    match sys::addresses::local_addresses() {
        Ok(addresses) => fabric.set_local_addresses(addresses),
        Err(error) => tracing::warn!(
            %error,
            "cannot list this machine's addresses: datagrams whose source is a port of this server are dropped only \
             where that port listens on one address, or the source is the address they were sent to"
        ),
    }
}

impl Server {
    /// Starts everything; see the module's text.
    pub fn start(topology: Topology) -> Result<Self, ServerError> {
        Self::start_unless(topology, None, &mut || false)
    }

    /// The same with a tap on every worker's network, if one is given. Runtimes of other processes may take long to
    /// start: while they are waited for, `cancelled` is asked many times a second whether to give up.
    pub fn start_unless(
        topology: Topology,
        tap: Option<&TapFile>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Self, ServerError> {
        match tap {
            Some(tap) => {
                Self::start_on(topology, |nic, addresses| tap.attach(nic, addresses), cancelled)
            }
            None => Self::start_on(topology, |nic, _| nic, cancelled),
        }
    }

    /// `wrap` makes a worker's network from its sockets and the addresses of its ports.
    fn start_on<N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static>(
        topology: Topology,
        wrap: impl Fn(SocketNic, Vec<SocketAddr>) -> N,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Self, ServerError> {
        topology.check()?;
        let topology = Arc::new(topology);
        let worker_count = topology.engine.workers;
        let specs: Vec<PortSpec> = topology
            .ports()
            .map(|(_, l)| PortSpec { transport: l.transport, address: l.address })
            .collect();
        let first = SocketNic::open(&specs, SocketOptions::default())?;
        let addresses = first.local_addresses();
        let mut nics = vec![first];
        while nics.len() < worker_count {
            nics.push(nics[0].sibling()?);
        }
        let memory_ports = NewPorts::open(&topology, None)?;
        let attach_listeners = AttachListeners::open(&topology, None)?;
        let nic_wakers: Vec<sys::Waker> = nics.iter().map(SocketNic::waker).collect();
        let wakers = nic_wakers
            .iter()
            .cloned()
            .map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
        let fabric = Fabric::new(wakers.collect(), topology.services.len() + SERVICES_SPARE);
        tell_local_addresses(&fabric);
        let names = topology.services.iter().map(|s| s.name.clone());
        let metrics = Metrics::new(worker_count, names);
        let watchdog = Watchdog::start(worker_count, metrics.clone())
            .map_err(ServerError::no_thread("watch"))?;
        let mut server = Self {
            service_slots: change::service_slots(&topology, &addresses, &metrics),
            leaked: Vec::new(),
            timeouts: Timeouts::default(),
            metrics,
            fabric,
            workers: Vec::new(),
            accelerators: Vec::new(),
            regions: Vec::new(),
            heartbeat_writer: Arc::new(
                HeartbeatWriter::start().map_err(ServerError::no_thread("heartbeat"))?,
            ),
            watchdog,
            supervisor: None,
            wakers: nic_wakers,
            shm_acceptor: None,
            topology: topology.clone(),
        };
        // From here on dropping `server` stops what has been started.
        let (mut regions, mut runtimes) = (Vec::new(), Vec::new());
        for (slot, service) in (0..).zip(&topology.services) {
            let files = kernel_files(&topology, service, cancelled)?;
            let attached = server.attach(slot, &topology, service, &files, &[])?;
            let service_slot = &mut server.service_slots[usize::from(slot)];
            (service_slot.runtime_metrics, service_slot.files) =
                (attached.runtime_metrics(), files);
            regions.push(attached.of_workers);
            runtimes.extend(attached.runtimes);
        }
        server.publish_metrics();
        let nics = nics.into_iter().map(|nic| wrap(nic, addresses.clone())).collect();
        server.start_workers(nics, &addresses, regions, cancelled)?;
        server.start_runtimes(attach_listeners, runtimes, cancelled)?;
        if !memory_ports.is_empty() {
            let paused = server.shm_acceptor()?.pause(Vec::new());
            let (ports, limits) = (server.memory_ports(), server.topology.limits.clone());
            paused.ok_or(ServerError::MemoryPortsLate)?.resume(ports, memory_ports, limits);
        }
        Ok(server)
    }

    /// Makes the regions of a service in `slot`, one for each of its accelerators, and starts their threads, if
    /// any. `files` are its kernel files; `runtime_metrics` is of the lives of its former version.
    fn attach(
        &mut self,
        slot: u16,
        topology: &Topology,
        service: &Service,
        files: &KernelFiles,
        runtime_metrics: &[Arc<RuntimeMetrics>],
    ) -> Result<Attached, ServerError> {
        let workers = topology.engine.workers;
        let of_workers = (0..workers).map(|_| Vec::new()).collect();
        let mut attached = Attached { of_workers, runtimes: Vec::new() };
        for (position, index) in service.accelerators.iter().enumerate() {
            let accelerator = &topology.accelerators[*index];
            let name = &accelerator.name;
            let shares = match &accelerator.kind {
                AcceleratorKind::Cpu { placement, stack_kib } => self.attach_cpu(
                    slot,
                    service,
                    (position, name),
                    files[position].as_deref(),
                    (placement, *stack_kib),
                )?,
                AcceleratorKind::Process { .. } => {
                    let of_it = |known: &&Arc<RuntimeMetrics>| known.accelerator == *name;
                    let known = runtime_metrics.iter().find(of_it).cloned();
                    let metrics =
                        known.unwrap_or_else(|| RuntimeMetrics::new(&service.name, name).into());
                    let accelerator = accelerator.clone();
                    let file = files[position].clone();
                    let spec = {
                        let service = service.clone();
                        RuntimeSpec { slot, position, service, accelerator, workers, file, metrics }
                    };
                    let made = PreparedRuntime::make(spec, &self.heartbeat_writer);
                    let (runtime, shares) = made.map_err(|source| ServerError::Memory {
                        service: service.name.clone(),
                        source,
                    })?;
                    attached.runtimes.push(runtime);
                    shares
                }
            };
            for (own, share) in attached.of_workers.iter_mut().zip(shares) {
                own.push(share);
            }
        }
        Ok(attached)
    }

    /// Makes the region of a service in `slot` on one `cpu` accelerator, and what runs its blocks. Blocks on
    /// the workers' cores are ready to be started there. Returns each worker's share.
    fn attach_cpu(
        &mut self,
        slot: u16,
        service: &Service,
        (position, accelerator): (usize, &str),
        file: Option<&KernelFile>,
        (placement, stack_kib): (&CpuPlacement, usize),
    ) -> Result<Vec<Attachment>, ServerError> {
        let accelerator_error =
            |source| ServerError::Accelerator { service: service.name.clone(), source };
        let kernel = service.kernel_on(position);
        let kernel = match file {
            Some(file) => file.load(kernel_file::named(kernel).and_then(|(_, name)| name)),
            None => Kernel::builtin(kernel),
        };
        let kernel = kernel.map_err(|e| accelerator_error(e.into()))?;
        let workers = self.topology.engine.workers;
        let made = make_region(service, (position, accelerator), 1, workers);
        let MadeRegion { memory, words, ends } =
            made.map_err(|source| ServerError::Memory { service: service.name.clone(), source })?;
        let heartbeat = self.heartbeat_writer.add(words.clone());
        let (blocks, memory_held) = (service.mqueues_on(position), memory.clone());
        self.regions.push(OpenRegion {
            slot,
            words,
            blocks,
            _heartbeat: heartbeat,
            _memory: memory_held,
        });
        let memory = MappedMemory::new(memory);
        let own = |ends: &Vec<BlockEnds>| ends.iter().map(|e| e.block).collect();
        let by_worker: Vec<Vec<u32>> = ends.iter().map(own).collect();
        let options = CpuOptions {
            service: service.name.clone(),
            stack_bytes: stack_kib << 10,
            hung_after: Duration::from_millis(service.hang_ms_on(position)),
            ..CpuOptions::default()
        };
        let mut blocks: Vec<Box<dyn Blocks>> = Vec::new();
        match placement {
            CpuPlacement::Worker => {
                let names = (kernel.name(), service.name.as_str(), accelerator);
                let shown = self.watchdog.name(slot, names);
                for (own, resuming) in by_worker.iter().zip(shown) {
                    let (memory, kernel) = (memory.clone(), kernel.clone());
                    let prepared =
                        WorkerBlocks::prepare(memory, kernel, &service.params, own, &options);
                    let mut prepared = prepared.map_err(accelerator_error)?;
                    prepared.show(resuming);
                    blocks.push(Box::new(prepared));
                }
            }
            CpuPlacement::Threads { threads, cores } => {
                let cores = (!cores.is_empty()).then_some(cores.as_slice());
                let (running, of_workers) = ThreadBlocks::start(
                    memory,
                    &kernel,
                    &service.params,
                    &by_worker,
                    *threads,
                    cores,
                    &options,
                )
                .map_err(accelerator_error)?;
                self.accelerators.push((slot, running));
                blocks.extend(of_workers.into_iter().map(|b| Box::new(b) as Box<dyn Blocks>));
            }
        }
        let attachment = |(blocks, ends)| Attachment { blocks, ends };
        Ok(blocks.into_iter().zip(ends).map(attachment).collect())
    }

    /// Starts one thread per worker and waits until each is ready. Should that fail, no worker is waited for any more.
    fn start_workers<N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static>(
        &mut self,
        nics: Vec<N>,
        addresses: &[SocketAddr],
        regions: Vec<Vec<Vec<Attachment>>>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), ServerError> {
        let spawned = self.spawn_workers(nics, addresses, regions);
        let ready = spawned.and_then(|readiness| {
            (0..self.workers.len()).try_for_each(|_| wait_until_ready(&readiness, cancelled))
        });
        if ready.is_err() {
            self.abandon_workers();
        }
        ready
    }

    /// Returns where each worker tells once whether it is ready.
    fn spawn_workers<N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static>(
        &mut self,
        nics: Vec<N>,
        addresses: &[SocketAddr],
        regions: Vec<Vec<Vec<Attachment>>>,
    ) -> Result<mpsc::Receiver<Result<(), ServerError>>, ServerError> {
        let (ready, readiness) = mpsc::channel();
        let links = peer_links(nics.len(), &self.topology);
        let turning = Arc::new(());
        let mut regions: Vec<_> = regions.into_iter().map(Vec::into_iter).collect();
        for (index, (nic, links)) in nics.into_iter().zip(links).enumerate() {
            let own = regions.iter_mut().map(|of_service| of_service.next());
            let attachments = own.map(|share| share.expect("one for each worker")).collect();
            let start = WorkerStart {
                index,
                nic,
                links,
                attachments,
                topology: self.topology.clone(),
                addresses: addresses.to_vec(),
                metrics: self.metrics.clone(),
                fabric: self.fabric.clone(),
                turning: Turning(turning.clone()),
                watchdog: self.watchdog.shared(),
            };
            let ready = ready.clone();
            let thread = std::thread::Builder::new()
                .name(format!("serval-worker-{index}"))
                .spawn(move || start.run(ready))
                .map_err(ServerError::no_thread(&format!("worker-{index}")))?;
            self.workers.push(thread);
        }
        Ok(readiness)
    }

    /// Tells workers to stop, of which some may be inside a kernel and would be waited for without end: those end by
    /// themselves, or with the process.
    fn abandon_workers(&mut self) {
        self.watchdog.expect_the_end();
        self.fabric.post_to_all(|_| ControlMessage::Stop);
        let deadline = Instant::now() + ABANDON_TIMEOUT;
        while !self.workers.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(READY_POLL_INTERVAL);
        }
        self.workers.clear();
    }

    /// Opens the doors of runtimes that attach and waits for those that the engine starts.
    fn start_runtimes(
        &mut self,
        listeners: AttachListeners,
        runtimes: Vec<PreparedRuntime>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), ServerError> {
        if runtimes.is_empty() && listeners.is_empty() {
            return Ok(());
        }
        let topology = self.topology.clone();
        let supervisor = self.supervisor()?;
        // First the runtimes: a peer may be connecting to a listener already.
        let starts = supervisor.add(runtimes, true);
        supervisor.set_listeners(&topology, listeners, Vec::new());
        Ok(starts.wait(cancelled)?)
    }

    /// The control side of runtimes; it runs once there is something for it to do.
    fn supervisor(&mut self) -> Result<&Supervisor, ServerError> {
        if self.supervisor.is_none() {
            let started = Supervisor::start(self.fabric.clone(), self.heartbeat_writer.clone());
            self.supervisor = Some(started.map_err(ServerError::no_thread("runtimes"))?);
        }
        Ok(self.supervisor.as_ref().expect("it is started above"))
    }

    /// Who lets shared-memory clients in; it runs once there is a port.
    fn shm_acceptor(&mut self) -> Result<&ShmAcceptor, ServerError> {
        if self.shm_acceptor.is_none() {
            let (limits, wakers) = (self.topology.limits.clone(), self.wakers.clone());
            let started = ShmAcceptor::start(limits, self.fabric.clone(), wakers);
            self.shm_acceptor = Some(started.map_err(ServerError::no_thread("memory-ports"))?);
        }
        Ok(self.shm_acceptor.as_ref().expect("it is started above"))
    }

    /// The shared-memory ports of the services that run.
    fn memory_ports(&self) -> Vec<MemoryPort> {
        let mut ports = Vec::new();
        for (service, service_slot) in self.topology.services.iter().zip(&self.service_slots) {
            let of = Arc::new(service.clone());
            ports.extend(service.memory_ports.iter().map(|path| MemoryPort {
                path: path.as_path().into(),
                slot: service_slot.slot,
                service: of.clone(),
            }));
        }
        ports
    }

    /// What is counted of the services that run is shown, and of no others.
    fn publish_metrics(&self) {
        let services = self.service_slots.iter().map(|of| of.metrics.clone());
        let runtime_metrics =
            self.service_slots.iter().flat_map(|of| of.runtime_metrics.iter().cloned());
        let left_behind = self.leaked.iter().map(|leaked| leaked.metrics.name().to_owned());
        self.metrics.set_running(
            services.collect(),
            runtime_metrics.collect(),
            left_behind.collect(),
        );
    }

    /// The topology that runs.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Every listening address with the index of its service; port 0 is resolved.
    pub fn addresses(&self) -> Vec<(usize, Listen)> {
        let addresses =
            self.service_slots.iter().flat_map(|p| p.ports.iter().map(|(_, address)| *address));
        let with = |((service, listen), address): ((usize, Listen), SocketAddr)| {
            (service, Listen { address, ..listen })
        };
        self.topology.ports().zip(addresses).map(with).collect()
    }

    /// The engine's counters.
    pub fn metrics(&self) -> Metrics {
        self.metrics.clone()
    }

    /// Workers that serve nothing, because a kernel on their core does not return.
    pub fn stalls(&self) -> Arc<Stalls> {
        self.watchdog.stalls()
    }

    /// Requests that each block of a service has received, from the blocks' status lines: accelerators
    /// in order, blocks in order; those that run in processes of their own are left out.
    pub fn received_by_block(&self, service: usize) -> Vec<u64> {
        let slot = self.service_slots[service].slot;
        let of_service = self.regions.iter().filter(|region| region.slot == slot);
        of_service.flat_map(|r| (0..r.blocks).map(|b| r.words.block(b).received)).collect()
    }

    /// Blocks of a service that have received anything.
    pub fn busy_blocks(&self, service: usize) -> usize {
        self.received_by_block(service).iter().filter(|n| **n > 0).count()
    }
}

/// Whether the next worker is ready. A kernel on its core may take long to come to its first receive, or never do.
fn wait_until_ready(
    readiness: &mpsc::Receiver<Result<(), ServerError>>,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<(), ServerError> {
    let mut runtime_metrics = Instant::now();
    loop {
        match readiness.recv_timeout(READY_POLL_INTERVAL) {
            Ok(word) => return word,
            Err(RecvTimeoutError::Timeout) if cancelled() => return Err(ServerError::Cancelled),
            Err(RecvTimeoutError::Timeout) if runtime_metrics.elapsed() < READY_REPORT_INTERVAL => {
            }
            Err(RecvTimeoutError::Timeout) => {
                runtime_metrics = Instant::now();
                tracing::warn!(
                    "still starting: a kernel on a worker's core has not come to its first receive"
                );
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(ServerError::Panicked);
            }
        }
    }
}

/// Everything a worker thread starts with.
struct WorkerStart<N> {
    index: usize,
    nic: N,
    links: PeerLinks,
    /// By service; their blocks are not started.
    attachments: Vec<Vec<Attachment>>,
    topology: Arc<Topology>,
    addresses: Vec<SocketAddr>,
    metrics: Metrics,
    fabric: Arc<ServerFabric>,
    turning: Turning,
    watchdog: Arc<watchdog::Shared>,
}

/// A worker that may still hand something to another: one reference for each.
struct Turning(Arc<()>);

impl Turning {
    /// Waits until no worker takes another turn, but not for one that is held up in a kernel.
    fn end(self) {
        let others = Arc::downgrade(&self.0);
        drop(self);
        let deadline = Instant::now() + LAST_TURNS_TIMEOUT;
        while others.strong_count() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl<N: Nic<Socket = AcceptedSocket, Port = OpenPort>> WorkerStart<N> {
    /// The worker thread: puts the worker together, reports, turns until told to stop. Returns
    /// whether a block hangs.
    fn run(self, ready: mpsc::Sender<Result<(), ServerError>>) -> bool {
        let Self {
            index,
            nic,
            links,
            mut attachments,
            topology,
            addresses,
            metrics,
            fabric,
            turning,
            watchdog,
        } = self;
        watchdog.enter(index);
        if let Some(core) = topology.engine.cores.get(index)
            && let Err(error) = sys::affinity::pin_current_thread(*core)
        {
            tracing::warn!(core, %error, "worker {index} is not pinned");
        }
        // Blocks on the worker's core are started here: a coroutine never changes threads.
        for (service, attachments) in topology.services.iter().zip(&mut attachments) {
            for attachment in attachments {
                if let Err(error) = attachment.blocks.start() {
                    // The main thread may be gone already: then nobody needs to know.
                    let _ = ready.send(Err(ServerError::of_blocks(service, error)));
                    return false;
                }
            }
        }
        let parts = WorkerParts { index, nic, addresses, attachments, links };
        let mut worker = Worker::new(parts, &topology, &metrics, fabric);
        worker.set_clock(sys::time::monotonic_ns);
        let _ = ready.send(Ok(()));
        // That another panics before it has told shows by the last of these being gone.
        drop(ready);
        loop {
            let now_ns = sys::time::monotonic_ns();
            worker.turn(now_ns);
            if worker.is_stopped() {
                break;
            }
            let sleep_ns = worker.sleep_ns(now_ns);
            if sleep_ns == 0 && worker.should_yield(now_ns) {
                let from_ns = sys::time::monotonic_ns();
                std::thread::yield_now();
                worker.offered_core(from_ns, sys::time::monotonic_ns());
            }
            worker.wait(sleep_ns);
        }
        // What another worker handed over in its last turn is accounted for here as well.
        turning.end();
        worker.shutdown()
    }
}
