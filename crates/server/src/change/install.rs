//! The second step of a change: every worker installs the new services, and their runtimes start.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use engine::accelerator::StartError;
use engine::topology::{Service, Topology};
use engine::{ControlMessage, ServiceInstall};
use sys::OpenPort;
use wire::nic::PortIndex;

use super::prepare::PreparedService;
use super::{ChangeError, Occasion};
use crate::base::error::ServerError;
use crate::runtimes::supervisor::AttachListeners;
use crate::server::Server;

/// How often a start checks for cancellation while workers install.
const CANCEL_INTERVAL: Duration = Duration::from_millis(20);
/// A start that takes this long is logged, repeatedly.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);

impl Server {
    /// Every worker installs its shares of the new services.
    pub(super) fn install_all(
        &mut self,
        wanted: &Topology,
        prepared: &mut [PreparedService],
        occasion: Occasion,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChangeError> {
        for PreparedService { index, installs, .. } in prepared {
            let service = &wanted.services[*index];
            self.install(service, std::mem::take(installs), occasion, give_up)?;
        }
        Ok(())
    }

    /// Every worker installs its share of one service. If that fails at the start, it does not wait for the other
    /// workers.
    pub(crate) fn install(
        &mut self,
        service: &Service,
        installs: Vec<ServiceInstall<OpenPort>>,
        occasion: Occasion,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChangeError> {
        let (reply, replies) = mpsc::channel();
        for (worker, install) in (0..).zip(installs) {
            let install = ControlMessage::Install(Box::new(install), reply.clone());
            self.fabric.post(worker, install);
        }
        drop(reply);
        let step = self.timeouts.step;
        let mut next = || match occasion {
            Occasion::Reload => replies.recv_timeout(step).map_err(|_| ChangeError::Stuck(step)),
            Occasion::Start => Ok(next_at_start(&replies, give_up)?),
        };
        let installed = (0..self.fabric.workers()).try_for_each(|_| {
            next()?.map_err(|error| ServerError::of_blocks(service, error).into())
        });
        if installed.is_err() && occasion == Occasion::Start {
            self.abandon_workers();
        }
        installed
    }

    /// Starts the runtimes that do not have to wait for others to end, and waits until they serve.
    pub(super) fn start_runtimes(
        &mut self,
        listeners: &AttachListeners,
        prepared: &mut [PreparedService],
        occasion: Occasion,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChangeError> {
        let starts: Vec<_> = prepared.iter_mut().flat_map(|p| p.before_switch.drain(..)).collect();
        let waits = prepared.iter().any(|p| !p.after_departure.is_empty());
        if starts.is_empty() && !waits && listeners.is_empty() {
            return Ok(());
        }
        // A start is not undone, so its runtimes may share processes at once.
        let awaited = self.supervisor()?.add(starts, occasion == Occasion::Start);
        Ok(awaited.wait(give_up).map_err(ServerError::from)?)
    }

    /// Releases what some workers may have installed.
    pub(super) fn undo_installed(&mut self, prepared: &[PreparedService]) {
        for PreparedService { service_slot, kept, .. } in prepared {
            let is_kept = |port: &PortIndex| kept.iter().any(|(kept, _)| kept == port);
            let own = service_slot.port_indices().filter(|port| !is_kept(port));
            self.release_slot(service_slot.slot, &service_slot.metrics, own.collect(), &|| false);
        }
        // Some slots may remain leaked.
        self.publish_metrics();
    }
}

/// The next worker's answer. A kernel on its core may take long to reach its first receive, or may never reach it.
fn next_at_start(
    replies: &Receiver<Result<(), StartError>>,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Result<(), StartError>, ServerError> {
    let mut logged = Instant::now();
    loop {
        match replies.recv_timeout(CANCEL_INTERVAL) {
            Ok(installed) => return Ok(installed),
            Err(RecvTimeoutError::Timeout) if cancelled() => return Err(ServerError::Cancelled),
            Err(RecvTimeoutError::Timeout) if logged.elapsed() < REPORT_INTERVAL => {}
            Err(RecvTimeoutError::Timeout) => {
                logged = Instant::now();
                tracing::warn!(
                    "still starting: a kernel on a worker's core has not reached its first receive"
                );
            }
            // A worker that panics closes its mailbox, and with it the reply channel.
            Err(RecvTimeoutError::Disconnected) => return Err(ServerError::Panicked),
        }
    }
}
