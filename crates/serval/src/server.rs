//! The server: puts an engine together from a [`Topology`] and runs it.
//!
//! Everything that can fail happens in [`Server::start`], in this order: ports are bound, regions
//! created and formatted, kernels found, accelerators started, workers put together. When it returns
//! `Ok`, every port is open and every block has reached its first `recv`. From then on the worker
//! threads alone handle messages; this side only counts, drains and stops.

mod heart;
mod lobby;
mod memory_ports;
mod runtimes;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use accel::Kernel;
use accel::cpu::{CpuAccelerator, Options as CpuOptions, ThreadBlocks, WorkerBlocks};
use engine::metrics::{AcceleratorLives, Metrics};
use engine::topology::{AcceleratorKind, CpuPlacement, Listen, Service, Topology, TopologyError};
use engine::{Attachment, BlockEnds, Fabric, Worker, WorkerLinks, WorkerParts, worker_links};
use mqueue::abi::stop;
use mqueue::{MappedMemory, Region, Words};
use sys::socket_nic::AcceptedSocket;
use sys::tap::TapFile;
use sys::{OpenPort, PortSpec, RegionOptions, SharedMemory, SocketNic, SocketOptions};
use wire::DropReason;
use wire::nic::Nic;

use heart::Heart;
use memory_ports::{Doorman, MemoryPorts};
use runtimes::{AttachDoors, Life, Runtimes, SeatStart};

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
    /// A thread could not be started or ended before it was ready.
    #[error("a worker thread did not start: {0}")]
    Thread(String),
}

/// What [`Server::shutdown`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Requests that were accepted and not answered within `drain_ms`.
    pub unanswered: u64,
    /// A block did not come back, or ended badly and could not be stopped.
    pub hung: bool,
}

impl ShutdownReport {
    /// Whether everything that was accepted was answered and everything stopped.
    pub fn is_clean(&self) -> bool {
        self.unanswered == 0 && !self.hung
    }
}

const RUN: u32 = 0;
const DRAIN: u32 = 1;
const STOP: u32 = 2;
/// How long a worker that stops waits for the others' last turns.
const STOPPED_TOGETHER: Duration = Duration::from_secs(1);

/// A running engine. Dropping it stops it without draining.
pub struct Server {
    topology: Arc<Topology>,
    addresses: Vec<SocketAddr>,
    metrics: Metrics,
    phase: Arc<AtomicU32>,
    fabric: Arc<Fabric<AcceptedSocket>>,
    workers: Vec<JoinHandle<bool>>,
    accelerators: Vec<CpuAccelerator>,
    /// (service, words) of every region.
    regions: Vec<(usize, Words<MappedMemory>)>,
    heart: Arc<Heart>,
    /// Runtimes in processes of their own; they end after the workers.
    runtimes: Option<Runtimes>,
    /// Lets shared-memory clients in; goes before the fabric's workers do.
    doorman: Option<Doorman>,
}

/// What is told of accelerators whose blocks run elsewhere, in the order of their seats.
fn lives(topology: &Topology) -> Vec<AcceleratorLives> {
    let of_service = |service: &Service| {
        let name = service.name.clone();
        let own = service.accelerators.iter().map(|index| &topology.accelerators[*index]);
        let elsewhere = own.filter(|a| matches!(a.kind, AcceleratorKind::Process { .. }));
        elsewhere.map(|a| AcceleratorLives::new(&name, &a.name)).collect::<Vec<_>>()
    };
    topology.services.iter().flat_map(of_service).collect()
}

/// One worker's share of one region.
enum Share {
    /// Blocks that run elsewhere.
    Elsewhere(Attachment),
    /// Blocks that the worker starts on its own thread.
    OnWorker { memory: MappedMemory, kernel: Arc<Kernel>, ends: Vec<BlockEnds> },
}

/// A region that was created and formatted.
struct MadeRegion {
    memory: Arc<SharedMemory>,
    words: Words<MappedMemory>,
    /// Per worker: the ends of its blocks' mqueues.
    ends: Vec<Vec<BlockEnds>>,
}

/// Creates and formats the region of one (service, accelerator, generation).
fn make_region(
    service: &Service,
    accelerator: &str,
    generation: u64,
    workers: usize,
) -> Result<MadeRegion, sys::MemoryError> {
    let plan = service.region_plan(generation);
    let bytes = plan.bytes().expect("the topology was checked") as usize;
    let name = format!("serval:{}:{accelerator}:{generation}", service.name);
    let memory = Arc::new(SharedMemory::create(&name, bytes, &RegionOptions::default())?);
    let mapped = MappedMemory::new(memory.clone());
    let mut region = Region::format(mapped, &plan).expect("memory of the planned size");
    let per_block = plan.mqueues.len() as u32;
    let mut ends: Vec<Vec<BlockEnds>> = (0..workers).map(|_| Vec::new()).collect();
    for block in 0..service.mqueues {
        let server = region.engine_ends(block * per_block);
        let clients = (1..per_block).map(|i| region.engine_ends(block * per_block + i));
        let entry = BlockEnds { block, server, clients: clients.collect() };
        ends[block as usize % workers].push(entry);
    }
    Ok(MadeRegion { memory, words: region.words(), ends })
}

impl Server {
    /// Starts everything; see the module's text.
    pub fn start(topology: Topology) -> Result<Self, ServerError> {
        Self::start_on(topology, |nic, _| nic)
    }

    /// The same with a tap on every worker's network.
    pub fn start_tapped(topology: Topology, tap: &TapFile) -> Result<Self, ServerError> {
        Self::start_on(topology, |nic, addresses| tap.attach(nic, addresses))
    }

    /// `wrap` makes a worker's network from its sockets and the addresses of its ports.
    fn start_on<N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static>(
        topology: Topology,
        wrap: impl Fn(SocketNic, Vec<SocketAddr>) -> N,
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
        let memory_ports = MemoryPorts::open(&topology)?;
        let attach_doors = AttachDoors::open(&topology)?;
        let nic_wakers: Vec<sys::Waker> = nics.iter().map(SocketNic::waker).collect();
        let wakers = nic_wakers
            .iter()
            .cloned()
            .map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
        let fabric = Fabric::new(wakers.collect(), topology.services.len());
        let names = topology.services.iter().map(|s| s.name.clone());
        let mut server = Self {
            metrics: Metrics::new(worker_count, names).with_lives(lives(&topology)),
            phase: Arc::new(AtomicU32::new(RUN)),
            fabric,
            addresses,
            workers: Vec::new(),
            accelerators: Vec::new(),
            regions: Vec::new(),
            heart: Arc::new(Heart::start().map_err(|e| ServerError::Thread(e.to_string()))?),
            runtimes: None,
            doorman: None,
            topology: topology.clone(),
        };
        // From here on dropping `server` stops what has been started.
        let (mut regions, mut seats) = (Vec::new(), Vec::new());
        for service in 0..topology.services.len() {
            let mut of_service = Vec::new();
            for place in 0..topology.services[service].accelerators.len() {
                let (shares, seat) = server.prepare_region(service, place)?;
                of_service.push(shares);
                seats.extend(seat);
            }
            regions.push(of_service);
        }
        let addresses = server.addresses.clone();
        let nics = nics.into_iter().map(|nic| wrap(nic, addresses.clone())).collect();
        server.start_workers(nics, regions)?;
        server.start_runtimes(attach_doors, seats)?;
        let doorman = memory_ports.serve(topology, server.fabric.clone(), nic_wakers);
        server.doorman = doorman.map_err(|e| ServerError::Thread(e.to_string()))?;
        Ok(server)
    }

    /// Makes the region of one (service, accelerator) and starts its threads, if any. Returns each worker's
    /// share, and the seat of a runtime that runs the blocks elsewhere.
    fn prepare_region(
        &mut self,
        service_index: usize,
        place: usize,
    ) -> Result<(Vec<Share>, Option<SeatStart>), ServerError> {
        let topology = self.topology.clone();
        let service = &topology.services[service_index];
        let accelerator_index = service.accelerators[place];
        let accelerator = &topology.accelerators[accelerator_index];
        let memory_error = |source| ServerError::Memory { service: service.name.clone(), source };
        let placement = match &accelerator.kind {
            AcceleratorKind::Cpu { placement } => placement,
            AcceleratorKind::Process { .. } => {
                let of = (service_index, accelerator_index);
                let (life, shares) =
                    Life::make(&topology, of, 1, &self.heart).map_err(memory_error)?;
                let (service, accelerator) = of;
                let seat = SeatStart { service, place, accelerator, life };
                return Ok((shares.into_iter().map(Share::Elsewhere).collect(), Some(seat)));
            }
        };
        let accelerator_error =
            |source| ServerError::Accelerator { service: service.name.clone(), source };
        let kernel = Kernel::find(&service.kernel).map_err(|e| accelerator_error(e.into()))?;
        let workers = topology.engine.workers;
        let MadeRegion { memory, words, ends } =
            make_region(service, &accelerator.name, 1, workers).map_err(memory_error)?;
        let memory = MappedMemory::new(memory);
        self.heart.add(words.clone());
        self.regions.push((service_index, words));
        let shares = match placement {
            CpuPlacement::Worker => {
                let share =
                    |ends| Share::OnWorker { memory: memory.clone(), kernel: kernel.clone(), ends };
                ends.into_iter().map(share).collect()
            }
            CpuPlacement::Threads { threads, cores } => {
                let own = |ends: &Vec<BlockEnds>| ends.iter().map(|e| e.block).collect();
                let by_worker: Vec<Vec<u32>> = ends.iter().map(own).collect();
                let cores = (!cores.is_empty()).then_some(cores.as_slice());
                let (running, blocks) = ThreadBlocks::start(
                    memory,
                    &kernel,
                    &service.params,
                    &by_worker,
                    *threads,
                    cores,
                    &CpuOptions::default(),
                )
                .map_err(accelerator_error)?;
                self.accelerators.push(running);
                let share = |(blocks, ends)| {
                    Share::Elsewhere(Attachment { blocks: Box::new(blocks), ends })
                };
                blocks.into_iter().zip(ends).map(share).collect()
            }
        };
        Ok((shares, None))
    }

    /// Starts one thread per worker and waits until each is ready.
    fn start_workers<N: Nic<Socket = AcceptedSocket> + Send + 'static>(
        &mut self,
        nics: Vec<N>,
        regions: Vec<Vec<Vec<Share>>>,
    ) -> Result<(), ServerError> {
        let (ready, readiness) = mpsc::channel();
        let links = worker_links(nics.len(), &self.topology);
        let turning = Arc::new(());
        let mut regions: Vec<Vec<_>> = regions
            .into_iter()
            .map(|of_service| of_service.into_iter().map(Vec::into_iter).collect())
            .collect();
        for (index, (nic, links)) in nics.into_iter().zip(links).enumerate() {
            let mut shares = Vec::new();
            for of_service in &mut regions {
                let own = |region: &mut std::vec::IntoIter<Share>| region.next();
                let own = of_service.iter_mut().map(own);
                shares.push(own.map(|share| share.expect("one for each worker")).collect());
            }
            let start = WorkerStart {
                index,
                nic,
                links,
                shares,
                topology: self.topology.clone(),
                addresses: self.addresses.clone(),
                metrics: self.metrics.clone(),
                fabric: self.fabric.clone(),
                phase: self.phase.clone(),
                turning: Turning(turning.clone()),
            };
            let ready = ready.clone();
            let thread = std::thread::Builder::new()
                .name(format!("serval-worker-{index}"))
                .spawn(move || start.run(&ready))
                .map_err(|e| ServerError::Thread(e.to_string()))?;
            self.workers.push(thread);
        }
        drop(ready);
        for _ in 0..self.workers.len() {
            let ended = |_| ServerError::Thread("it ended early; see the log".into());
            readiness.recv().map_err(ended)??;
        }
        Ok(())
    }

    /// Starts the control side of runtimes and waits for those that the engine starts.
    fn start_runtimes(
        &mut self,
        doors: AttachDoors,
        seats: Vec<SeatStart>,
    ) -> Result<(), ServerError> {
        let (topology, fabric) = (self.topology.clone(), self.fabric.clone());
        let (heart, lives) = (self.heart.clone(), &self.metrics.lives);
        let started = Runtimes::start(doors, seats, topology, fabric, heart, lives);
        self.runtimes = started.map_err(|e| ServerError::Thread(e.to_string()))?;
        let Some(runtimes) = &mut self.runtimes else { return Ok(()) };
        runtimes.wait_ready().map_err(|(service, why)| {
            let service = self.topology.services[service].name.clone();
            ServerError::Runtime { service, why }
        })
    }

    /// The topology that runs.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Every listening address with the index of its service; port 0 is resolved.
    pub fn addresses(&self) -> Vec<(usize, Listen)> {
        let resolved = self.topology.ports().zip(&self.addresses);
        let with = |((service, listen), address): ((usize, Listen), &SocketAddr)| {
            (service, Listen { address: *address, ..listen })
        };
        resolved.map(with).collect()
    }

    /// The engine's counters.
    pub fn metrics(&self) -> Metrics {
        self.metrics.clone()
    }

    /// Requests that each block of a service has received, from the blocks' status lines: accelerators
    /// in order, blocks in order; those that run in processes of their own are left out.
    pub fn received_by_block(&self, service: usize) -> Vec<u64> {
        let of_service = self.regions.iter().filter(|(of, _)| *of == service);
        let blocks = self.topology.services[service].mqueues;
        of_service.flat_map(|(_, w)| (0..blocks).map(|b| w.block(b).received)).collect()
    }

    /// Blocks of a service that have received anything.
    pub fn busy_blocks(&self, service: usize) -> usize {
        self.received_by_block(service).iter().filter(|n| **n > 0).count()
    }

    /// Accepts nothing new, answers what was accepted (for at most `drain_ms`), stops everything.
    pub fn shutdown(mut self) -> ShutdownReport {
        let patience = Duration::from_millis(self.topology.engine.drain_ms);
        let deadline = Instant::now() + patience;
        if let Some(doorman) = &self.doorman {
            doorman.stop_listening();
        }
        if let Some(runtimes) = &self.runtimes {
            runtimes.drain();
        }
        self.phase.store(DRAIN, Ordering::Relaxed);
        while !self.fabric.all_settled() && Instant::now() < deadline {
            self.fabric.wake_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        let hung = self.stop();
        let unanswered = (0..self.topology.services.len())
            .map(|service| self.metrics.service(service).dropped(DropReason::DrainTimeout))
            .sum();
        ShutdownReport { unanswered, hung }
    }

    /// Stops the workers, then the accelerator threads. Returns whether something hangs.
    fn stop(&mut self) -> bool {
        self.phase.store(STOP, Ordering::Relaxed);
        self.fabric.wake_all();
        let mut hung = false;
        for worker in self.workers.drain(..) {
            hung |= worker.join().unwrap_or(true);
        }
        // Asks the runtimes to end, then makes them.
        self.runtimes = None;
        for accelerator in self.accelerators.drain(..) {
            accelerator.stop(stop::NOW);
            let left = accelerator.join(Duration::from_secs(1));
            if !left.is_empty() {
                tracing::error!(blocks = ?left, "blocks did not end; their threads are left behind");
                hung = true;
            }
        }
        hung
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.workers.is_empty() || !self.accelerators.is_empty() || self.runtimes.is_some() {
            self.stop();
        }
    }
}

/// Everything a worker thread starts with.
struct WorkerStart<N> {
    index: usize,
    nic: N,
    links: WorkerLinks,
    shares: Vec<Vec<Share>>,
    topology: Arc<Topology>,
    addresses: Vec<SocketAddr>,
    metrics: Metrics,
    fabric: Arc<Fabric<AcceptedSocket>>,
    phase: Arc<AtomicU32>,
    turning: Turning,
}

/// A worker that may still hand something to another: one reference for each.
struct Turning(Arc<()>);

impl Turning {
    /// Waits until no worker takes another turn, but not for one that is held up in a kernel.
    fn end(self) {
        let others = Arc::downgrade(&self.0);
        drop(self);
        let deadline = Instant::now() + STOPPED_TOGETHER;
        while others.strong_count() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl<N: Nic<Socket = AcceptedSocket>> WorkerStart<N> {
    /// The worker thread: puts the worker together, reports, turns until told to stop. Returns
    /// whether a block hangs.
    fn run(self, ready: &mpsc::Sender<Result<(), ServerError>>) -> bool {
        let Self {
            index,
            nic,
            links,
            shares,
            topology,
            addresses,
            metrics,
            fabric,
            phase,
            turning,
        } = self;
        if let Some(core) = topology.engine.cores.get(index)
            && let Err(error) = sys::affinity::pin_current_thread(*core)
        {
            tracing::warn!(core, %error, "worker {index} is not pinned");
        }
        // Blocks on the worker's core are started here: a coroutine never changes threads.
        let mut attachments = Vec::new();
        for (service, shares) in topology.services.iter().zip(shares) {
            let mut of_service = Vec::new();
            for share in shares {
                let (memory, kernel, ends) = match share {
                    Share::Elsewhere(attachment) => {
                        of_service.push(attachment);
                        continue;
                    }
                    Share::OnWorker { memory, kernel, ends } => (memory, kernel, ends),
                };
                let own: Vec<u32> = ends.iter().map(|e| e.block).collect();
                let options = CpuOptions::default();
                let blocks: Box<dyn engine::accelerator::Blocks> =
                    match WorkerBlocks::start(memory, kernel, &service.params, &own, &options) {
                        Ok(blocks) => Box::new(blocks),
                        Err(source) => {
                            let service = service.name.clone();
                            let error = ServerError::Accelerator { service, source };
                            // The main thread may be gone already: then nobody needs to know.
                            let _ = ready.send(Err(error));
                            return false;
                        }
                    };
                of_service.push(Attachment { blocks, ends });
            }
            attachments.push(of_service);
        }
        let parts = WorkerParts { index, nic, addresses, attachments, links };
        let mut worker = Worker::new(parts, &topology, &metrics, fabric);
        worker.set_clock(sys::time::monotonic_ns);
        let _ = ready.send(Ok(()));
        loop {
            let now_ns = sys::time::monotonic_ns();
            worker.turn(now_ns);
            match phase.load(Ordering::Relaxed) {
                RUN => {}
                DRAIN => worker.begin_drain(),
                _ => break,
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
        worker.finish()
    }
}
