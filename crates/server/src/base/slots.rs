//! Slots of services on the workers.
//!
//! A worker that is inside a long kernel releases a slot when the kernel returns. Until then the slot is *leaked*: neither the slot nor
//! its ports are reused. The next change reclaims them if all workers have released them by then.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use engine::metrics::{RuntimeMetrics, ServiceMetrics};
use engine::{Detached, DrainBarrier};
use runtime::kernel_file::KernelFile;
use wire::nic::PortIndex;

/// The kernel files of one service, by the accelerator's position in its list.
pub(crate) type KernelFiles = Vec<Option<Arc<KernelFile>>>;

/// A service of the topology: its slot on the workers, and its ports.
pub(crate) struct ServiceSlot {
    pub(crate) slot: u16,
    /// In the order of its `listen`.
    pub(crate) ports: Vec<(PortIndex, SocketAddr)>,
    /// In the order of its Unix sockets.
    pub(crate) unix_ports: Vec<PortIndex>,
    pub(crate) metrics: Arc<ServiceMetrics>,
    /// Metrics of its accelerators whose blocks run in runtimes.
    pub(crate) runtime_metrics: Vec<Arc<RuntimeMetrics>>,
    /// Kept open for a comparison with files that are opened later.
    pub(crate) files: KernelFiles,
}

impl ServiceSlot {
    /// All of its ports.
    pub(crate) fn port_indices(&self) -> impl Iterator<Item = PortIndex> + '_ {
        self.ports.iter().map(|port| port.0).chain(self.unix_ports.iter().copied())
    }
}

/// A slot that is still in use although its service has left or is leaving.
pub(crate) struct LeakedSlot {
    pub(crate) slot: u16,
    pub(crate) metrics: Arc<ServiceMetrics>,
    /// Ports that the workers may still have.
    pub(crate) ports: Vec<PortIndex>,
    pub(crate) holder: Holder,
}

/// What still uses a leaked slot.
pub(crate) enum Holder {
    /// Workers that have not voted.
    Unsettled(DrainBarrier),
    /// Workers that have not released it; whether its runtimes have ended.
    Unreleased(Releasing, bool),
    /// Runtimes or accelerator threads that did not end; no longer waited for.
    Running,
}

/// Workers that were asked to release a slot.
pub(crate) struct Releasing {
    answers: Receiver<Detached>,
    missing: usize,
}

impl Releasing {
    /// `workers` of them answer.
    pub(crate) fn new(answers: Receiver<Detached>, workers: usize) -> Self {
        Self { answers, missing: workers }
    }

    /// Whether all have released it; each may take this long. What they return is freed here.
    pub(crate) fn is_complete(&mut self, timeout: Duration) -> bool {
        while self.missing > 0 && self.answers.recv_timeout(timeout).is_ok() {
            self.missing -= 1;
        }
        self.missing == 0
    }
}
