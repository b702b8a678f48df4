//! What a worker needs to install a service, prepared by another thread.

use onpath::{Arranged, Link};
use wire::DropReason;
use wire::nic::PortIndex;

use crate::base::links::{ServiceLinks, links};
use crate::base::metrics::ServiceMetrics;
use crate::base::topology::{Limits, Listen, Service};
use crate::base::turn::scratch_bytes;
use crate::endpoint::clients::NewPort;
use crate::endpoint::port::Port;
use crate::endpoint::servers::Parts;
use crate::endpoint::tcp::terms::Terms;
use crate::service::ends::Attachment;
use crate::service::share::ServiceShare;

/// One worker's share of a new service; see `control/install.rs`.
pub struct ServiceInstall<P> {
    pub(super) slot: u16,
    pub(super) share: ServiceShare,
    pub(super) parts: Parts,
    pub(super) terms: Terms,
    pub(super) links: ServiceLinks,
    pub(super) ports: Vec<(PortIndex, NewPort, P)>,
    pub(super) scratch: Vec<u8>,
    /// Accelerators for which the service is paused, and the drain time of their last generation, in nanoseconds.
    pub(super) awaited: Vec<(u16, u64)>,
}

impl<P> ServiceInstall<P> {
    /// The shares of all workers, in order, in `slot`. `attachments` belong to them; their blocks start when the
    /// worker installs the share. Ports are added with [`Self::add_port`].
    pub fn for_workers(
        slot: u16,
        service: &Service,
        metrics: &ServiceMetrics,
        attachments: Vec<Vec<Attachment>>,
    ) -> Vec<Self> {
        let workers = attachments.len();
        let workers_parts = attachments.into_iter().zip(links(workers, service)).enumerate();
        let install = |(worker, (attachments, links))| {
            let (counters, observed) = metrics.of_worker(worker);
            let mut ends = Vec::new();
            let metrics = (counters.clone(), observed);
            let of = (worker as u32, workers as u32);
            let share = ServiceShare::new(service, of, attachments, &mut ends, metrics);
            Self {
                slot,
                share,
                parts: Parts::new(service, worker as u16, &mut ends, &counters),
                terms: Terms::new(service),
                links,
                ports: Vec::new(),
                scratch: vec![0; scratch_bytes([service])],
                awaited: Vec::new(),
            }
        };
        workers_parts.map(install).collect()
    }

    /// Its accelerators start when those of the service's previous version have ended: requests that arrive before
    /// that are dropped as `reconfiguring`.
    pub fn set_reconfiguring(&mut self) {
        self.share.dispatcher.set_absent_reason(DropReason::Reconfiguring);
    }

    /// The service is paused from the switch until this accelerator's first generation starts. The last generation of
    /// the previous version ends within `drain_ns`. See `control/pause.rs`.
    pub fn pause(&mut self, accelerator: u16, drain_ns: u64) {
        self.awaited.push((accelerator, drain_ns));
    }

    /// The service has these functions from the start, on the path of its clients' messages or of those to a backend.
    pub fn set_functions(&mut self, backend: Option<u16>, functions: Vec<Link>) {
        let functions = functions.into_iter().map(Arranged::New).collect();
        match backend {
            None => drop(self.share.arrange_chain(functions)),
            Some(backend) => self.parts.set_path(backend, functions),
        }
    }

    /// Adds an open port under an index that no other port has. `address` is where it listens; its connections are for this
    /// socket of the blocks, if one is given.
    pub fn add_port(
        &mut self,
        index: PortIndex,
        (Listen { transport, address }, socket): (Listen, Option<u16>),
        limits: &Limits,
        port: P,
    ) {
        let mut listener = Port::new_paused(self.slot, transport, address);
        listener.socket = socket;
        let entry = NewPort::new(listener, limits);
        self.ports.push((index, entry, port));
    }
}
