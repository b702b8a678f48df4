//! The server: builds an engine from a [`Topology`] and runs it.
//!
//! [`Server::start`] starts workers without services, and makes the first change, from an empty topology to the
//! configured one (`change.rs`): it opens kernel files, binds ports, creates regions, starts accelerators,
//! installs services on the workers and waits for runtimes. When it returns `Ok`, every port is open and every block
//! has reached its first `recv`. From then on only the worker threads process messages; the threads here count,
//! change services ([`Server::change`]), drain and stop.
//!
//! Each part owns its state and gets the [`Engine`] for what it does with the workers: functions on paths ([`Functions`]), accelerators
//! (`runtimes.rs`), transfers of kernels (`transfers.rs`), shared-memory ports (`shm_acceptor.rs`). What has to happen in several of them
//! together is here, in `change.rs` and in `shutdown.rs`.

use std::sync::Arc;

use engine::metrics::Metrics;
use engine::topology::{Listen, Tenant, Topology};
use sys::tap::TapFile;

use crate::base::caller::Caller;
use crate::base::engine::Engine;
use crate::base::error::ServerError;
use crate::base::watchdog::Stalls;
use crate::base::workers::{Nics, Workers};
use crate::functions::Functions;
use crate::runtimes::Runtimes;
use crate::shm_acceptor::MemoryPorts;
use crate::tenants::{self, TenantError};
use crate::transfers::Transfers;

/// Number of services besides those of the start for which there is room. During a change both versions count.
const SERVICES_SPARE: usize = 256;

/// A running engine. Dropping it stops it without draining.
pub struct Server {
    /// What is done with the workers.
    pub engine: Engine,
    /// The functions on the paths of its services.
    pub functions: Functions,
    pub(crate) runtimes: Runtimes,
    pub(crate) workers: Workers,
    /// Dropped before the fabric's workers.
    pub(crate) memory_ports: MemoryPorts,
    pub(crate) transfers: Transfers,
}

impl Server {
    /// A server whose workers run without services, with an optional tap on every worker's network, and the engine that does
    /// transfers of kernels, if it exists already.
    pub(crate) fn without_services(
        topology: &Topology,
        tap: Option<&TapFile>,
        transfers: Option<&Arc<transfer::Engine>>,
    ) -> Result<Self, ServerError> {
        let worker_count = topology.engine.workers;
        let nics = Nics::open(worker_count)?;
        let fabric = nics.fabric(topology.services.len() + SERVICES_SPARE);
        let engine = Engine::new(topology, fabric.clone(), Metrics::new(worker_count, []));
        let workers = Workers::new(&engine)?;
        let mut server = Self {
            functions: Functions::new(),
            runtimes: Runtimes::new(fabric, workers.watched())?,
            memory_ports: MemoryPorts::new(nics.wakers()),
            transfers: Transfers::new(transfers.cloned()),
            engine,
            workers,
        };
        // From here on dropping `server` stops everything started so far.
        server.workers.start(&server.engine, nics, tap)?;
        Ok(server)
    }

    /// Publishes the metrics of the current services, functions and tenants only.
    pub(crate) fn publish_metrics(&self) {
        self.engine.publish_services();
        self.functions.publish_metrics(&self.engine);
        self.engine.metrics.set_tenants(tenants::metrics(&self.engine));
        self.transfers.set_tenants(&self.engine.topology.tenants);
    }

    /// Adds a tenant, or changes one. Functions of users that it has no longer end; returns how many.
    pub fn put_tenant(
        &mut self,
        caller: Caller,
        tenant: Tenant,
        is_new: bool,
    ) -> Result<usize, TenantError> {
        tenants::put(&mut self.engine, caller, tenant, is_new)?;
        self.publish_metrics();
        Ok(self.functions.end_without_right(&self.engine))
    }

    /// Removes a tenant without services.
    pub fn remove_tenant(&mut self, caller: Caller, name: &str) -> Result<(), TenantError> {
        tenants::remove(&mut self.engine, caller, name)?;
        self.publish_metrics();
        Ok(())
    }

    /// The current topology.
    pub fn topology(&self) -> &Topology {
        &self.engine.topology
    }

    /// Every listening address with the index of its service; port 0 is resolved.
    pub fn addresses(&self) -> Vec<(usize, Listen)> {
        self.engine.addresses()
    }

    /// The engine's counters.
    pub fn metrics(&self) -> Metrics {
        self.engine.metrics.clone()
    }

    /// The counters of transfers of kernels, if one was ever asked for.
    pub fn transfer_counters(&self) -> Option<Arc<transfer::Counters>> {
        self.transfers.counters()
    }

    /// Workers that serve nothing, because a kernel on their core does not return.
    pub fn stalls(&self) -> Arc<Stalls> {
        self.workers.stalls()
    }

    /// Requests that each block of a service has received, from the blocks' status lines: accelerators in order,
    /// blocks in order, without those in other processes.
    pub fn received_by_block(&self, service: usize) -> Vec<u64> {
        self.runtimes.received_by_block(self.engine.slots[service].slot)
    }

    /// Number of blocks of a service that have received a request.
    pub fn busy_blocks(&self, service: usize) -> usize {
        self.received_by_block(service).iter().filter(|n| **n > 0).count()
    }
}
