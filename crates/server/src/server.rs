//! The server: builds an engine from a [`Topology`] and runs it.
//!
//! [`Server::start`] starts workers without services, and makes the first change, from an empty topology to the
//! configured one (`change.rs`): it opens kernel files, binds ports, creates regions, starts accelerators,
//! installs services on the workers and waits for runtimes. When it returns `Ok`, every port is open and every block
//! has reached its first `recv`. From then on only the worker threads process messages; the threads here count,
//! change services ([`Server::change`]), drain and stop.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use accel::cpu::CpuAccelerator;
use engine::Fabric;
use engine::metrics::Metrics;
use engine::topology::{Backend, Listen, Service, Tenant, Topology};
use sys::tap::TapFile;
use sys::{SocketNic, SocketOptions};
use worker::{Network, WorkerFabric};

use crate::base::error::ServerError;
use crate::base::watchdog::{Stalls, Watchdog};
use crate::change::local_addresses::LocalAddresses;
use crate::change::{LeakedSlot, ServiceSlot, Timeouts};
use crate::functions::Functions;
use crate::runtimes::OpenRegion;
use crate::runtimes::heartbeat::HeartbeatWriter;
use crate::runtimes::supervisor::Supervisor;
use crate::shm_acceptor::{MemoryPort, ShmAcceptor};
use crate::transfers::ServiceTransfers;

/// Number of services besides those of the start for which there is room. During a change both versions count.
const SERVICES_SPARE: usize = 256;

/// A running engine. Dropping it stops it without draining.
pub struct Server {
    pub(crate) topology: Arc<Topology>,
    /// By service.
    pub(crate) service_slots: Vec<ServiceSlot>,
    pub(crate) leaked: Vec<LeakedSlot>,
    pub(crate) functions: Functions,
    pub(crate) local_addresses: LocalAddresses,
    pub(crate) timeouts: Timeouts,
    pub(crate) metrics: Metrics,
    pub(crate) fabric: Arc<WorkerFabric>,
    pub(crate) workers: Vec<JoinHandle<bool>>,
    /// With the slots of their services.
    pub(crate) accelerators: Vec<(u16, CpuAccelerator)>,
    pub(crate) regions: Vec<OpenRegion>,
    pub(crate) heartbeat_writer: Arc<HeartbeatWriter>,
    pub(crate) watchdog: Watchdog,
    /// Runtimes in processes of their own; they end after the workers.
    pub(crate) supervisor: Option<Supervisor>,
    /// By worker.
    pub(crate) wakers: Vec<sys::Waker>,
    /// Accepts shared-memory clients; dropped before the fabric's workers.
    pub(crate) shm_acceptor: Option<ShmAcceptor>,
    /// Does transfers of kernels; started when the first service asks for it.
    pub(crate) transfers: Option<Arc<transfer::Engine>>,
}

impl Server {
    /// Starts everything; see the module documentation.
    pub fn start(topology: Topology) -> Result<Self, ServerError> {
        Self::start_unless(topology, None, None, &mut || false)
    }

    /// The same, with an optional tap on every worker's network, and the engine that does transfers of kernels, if it exists already. Runtimes in other processes may take long to start:
    /// meanwhile `cancelled` is called many times a second; if it returns true, the start is given up.
    pub fn start_unless(
        topology: Topology,
        tap: Option<&TapFile>,
        transfers: Option<&Arc<transfer::Engine>>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Self, ServerError> {
        topology.check()?;
        let worker_count = topology.engine.workers;
        let open = |_| SocketNic::open(&[], SocketOptions::default());
        let nics: Vec<SocketNic> = (0..worker_count).map(open).collect::<Result<_, _>>()?;
        let nic_wakers: Vec<sys::Waker> = nics.iter().map(SocketNic::waker).collect();
        let wakers = nic_wakers
            .iter()
            .cloned()
            .map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
        let fabric = Fabric::new(wakers.collect(), topology.services.len() + SERVICES_SPARE);
        let metrics = Metrics::new(worker_count, []);
        let watchdog = Watchdog::start(worker_count, metrics.clone())
            .map_err(ServerError::no_thread("watch"))?;
        let (accelerators, services) = (Vec::new(), Vec::new());
        let mut server = Self {
            topology: Arc::new(Topology { accelerators, services, ..topology.clone() }),
            service_slots: Vec::new(),
            leaked: Vec::new(),
            functions: Functions::new(),
            local_addresses: LocalAddresses::default(),
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
            transfers: transfers.cloned(),
        };
        // From here on dropping `server` stops everything started so far.
        let network = |nic| match tap {
            Some(tap) => Network::Tapped(tap.attach(nic, Vec::new())),
            None => Network::Sockets(nic),
        };
        server.spawn_workers(nics.into_iter().map(network).collect())?;
        server.first_change(topology, cancelled)?;
        Ok(server)
    }

    /// The supervisor of runtimes, which is started when it is first needed.
    pub(crate) fn supervisor(&mut self) -> Result<&Supervisor, ServerError> {
        if self.supervisor.is_none() {
            let started = Supervisor::start(self.fabric.clone(), self.heartbeat_writer.clone());
            self.supervisor = Some(started.map_err(ServerError::no_thread("runtimes"))?);
        }
        Ok(self.supervisor.as_ref().expect("it is started above"))
    }

    /// What does the transfers of a service's kernels, if they ask for any.
    pub(crate) fn transfers_of(
        &mut self,
        service: &Service,
    ) -> Result<Option<Arc<ServiceTransfers>>, ServerError> {
        if !service.backends.iter().any(Backend::does_transfers) {
            return Ok(None);
        }
        if self.transfers.is_none() {
            let started = transfer::Engine::start(transfer::Limits::default());
            self.transfers = Some(Arc::new(started.map_err(ServerError::no_thread("transfer"))?));
        }
        let engine = self.transfers.as_ref().expect("it is started above");
        ServiceTransfers::start(service, engine).map(Some)
    }

    /// The counters of transfers of kernels, if one was ever asked for.
    pub fn transfer_counters(&self) -> Option<Arc<transfer::Counters>> {
        self.transfers.as_ref().map(|engine| engine.counters())
    }

    /// The acceptor of shared-memory clients, which is started with the first port.
    pub(crate) fn shm_acceptor(&mut self) -> Result<&ShmAcceptor, ServerError> {
        if self.shm_acceptor.is_none() {
            let (limits, wakers) = (self.topology.limits.clone(), self.wakers.clone());
            let started = ShmAcceptor::start(limits, self.fabric.clone(), wakers);
            self.shm_acceptor = Some(started.map_err(ServerError::no_thread("memory-ports"))?);
        }
        Ok(self.shm_acceptor.as_ref().expect("it is started above"))
    }

    /// The shared-memory ports of the current services.
    pub(crate) fn memory_ports(&self) -> Vec<MemoryPort> {
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

    /// Publishes the metrics of the current services only.
    pub(crate) fn publish_metrics(&self) {
        let services = self.service_slots.iter().map(|of| of.metrics.clone());
        let runtime_metrics =
            self.service_slots.iter().flat_map(|of| of.runtime_metrics.iter().cloned());
        let left_behind = self.leaked.iter().map(|leaked| leaked.metrics.name().to_owned());
        self.metrics.set_running(
            services.collect(),
            runtime_metrics.collect(),
            left_behind.collect(),
        );
        self.metrics.set_functions(self.function_metrics());
        self.metrics.set_tenants(self.tenant_metrics());
        self.tell_tenants();
    }

    /// The transfer engine knows the current tenants.
    pub(crate) fn tell_tenants(&self) {
        let Some(engine) = &self.transfers else { return };
        let share = |tenant: &Tenant| transfer::TenantShare {
            name: tenant.name.clone(),
            weight: tenant.weight,
            users: tenant.users.clone(),
        };
        engine.set_tenants(self.topology.tenants.iter().map(share).collect());
    }

    /// The current topology.
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

    /// Requests that each block of a service has received, from the blocks' status lines: accelerators in order,
    /// blocks in order, without those in other processes.
    pub fn received_by_block(&self, service: usize) -> Vec<u64> {
        let slot = self.service_slots[service].slot;
        let of_service = self.regions.iter().filter(|region| region.slot == slot);
        of_service.flat_map(|r| (0..r.blocks).map(|b| r.words.block(b).received)).collect()
    }

    /// Number of blocks of a service that have received a request.
    pub fn busy_blocks(&self, service: usize) -> usize {
        self.received_by_block(service).iter().filter(|n| **n > 0).count()
    }
}
