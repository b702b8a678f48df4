//! The engine of a running server: its topology, the slots of the services on the workers, and the way to the workers.
//!
//! Whatever a part of the server does with the workers, it does through this.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine::metrics::Metrics;
use engine::topology::{Listen, Service, Tenant, Topology};
use worker::WorkerFabric;

use super::local_addresses::LocalAddresses;
use super::slots::{LeakedSlot, ServiceSlot};

/// How long a change waits for workers.
pub(crate) struct Timeouts {
    /// Until a worker has taken a step: it may be inside a long kernel.
    pub(crate) step: Duration,
    /// Until a service has ended after its drain time.
    pub(crate) expiry: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { step: Duration::from_secs(30), expiry: Duration::from_secs(5) }
    }
}

/// See the module's text.
pub struct Engine {
    pub(crate) topology: Arc<Topology>,
    /// By service.
    pub(crate) slots: Vec<ServiceSlot>,
    pub(crate) leaked: Vec<LeakedSlot>,
    pub(crate) fabric: Arc<WorkerFabric>,
    pub(crate) metrics: Metrics,
    pub(crate) timeouts: Timeouts,
    local_addresses: LocalAddresses,
}

impl Engine {
    /// An engine without services and accelerators.
    pub(crate) fn new(topology: &Topology, fabric: Arc<WorkerFabric>, metrics: Metrics) -> Self {
        let (accelerators, services) = (Vec::new(), Vec::new());
        Self {
            topology: Arc::new(Topology { accelerators, services, ..topology.clone() }),
            slots: Vec::new(),
            leaked: Vec::new(),
            fabric,
            metrics,
            timeouts: Timeouts::default(),
            local_addresses: LocalAddresses::default(),
        }
    }

    /// The services with their slots.
    pub(crate) fn services(&self) -> impl Iterator<Item = (&Service, &ServiceSlot)> {
        self.topology.services.iter().zip(&self.slots)
    }

    /// The index of a service.
    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        self.topology.services.iter().position(|service| service.name == name)
    }

    /// The settings of a tenant.
    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.topology.tenants.iter().find(|tenant| tenant.name == name)
    }

    /// Every listening address with the index of its service; port 0 is resolved.
    pub(crate) fn addresses(&self) -> Vec<(usize, Listen)> {
        let addresses = self.slots.iter().flat_map(|of| of.ports.iter().map(|(_, at)| *at));
        let with = |((service, listen), address): ((usize, Listen), SocketAddr)| {
            (service, Listen { address, ..listen })
        };
        self.topology.ports().zip(addresses).map(with).collect()
    }

    /// The time limit for accepted requests.
    pub(crate) fn drain_time(&self) -> Duration {
        Duration::from_millis(self.topology.engine.drain_ms)
    }

    /// Workers learn the addresses of this machine and of the namespaces that a topology uses.
    pub(crate) fn refresh_addresses(&mut self, wanted: &Topology) {
        self.fabric.set_local_addresses(self.local_addresses.refresh(wanted));
    }

    /// Publishes the metrics of the current services only.
    pub(crate) fn publish_services(&self) {
        let services = self.slots.iter().map(|of| of.metrics.clone());
        let runtimes = self.slots.iter().flat_map(|of| of.runtime_metrics.iter().cloned());
        let left_behind = self.leaked.iter().map(|leaked| leaked.metrics.name().to_owned());
        self.metrics.set_running(services.collect(), runtimes.collect(), left_behind.collect());
    }
}
