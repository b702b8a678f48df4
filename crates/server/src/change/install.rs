//! The second step of a change: every worker installs the new services, and their runtimes start.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use engine::accelerator::StartError;
use engine::topology::{Service, Topology};
use engine::{ControlMessage, ServiceInstall};
use sys::OpenPort;
use wire::nic::PortIndex;

use super::ChangeError;
use super::departure::release_slot;
use super::prepare::PreparedService;
use crate::base::engine::Engine;
use crate::base::error::{ServerError, Stuck};
use crate::base::workers::Workers;
use crate::runtimes::Runtimes;
use crate::runtimes::supervisor::AttachListeners;

/// How often a start checks for cancellation while workers install.
const CANCEL_INTERVAL: Duration = Duration::from_millis(20);
/// A start that takes this long is logged, repeatedly.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);

/// The occasion of a change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// The first change. There are no running services: if it fails, the server ends and nothing is undone.
    Start,
    /// A change of a running engine.
    Reload,
}

/// Every worker installs its shares of the new services.
pub(super) fn all(
    engine: &Engine,
    workers: &mut Workers,
    wanted: &Topology,
    prepared: &mut [PreparedService],
    occasion: Occasion,
    give_up: &mut dyn FnMut() -> bool,
) -> Result<(), ChangeError> {
    for PreparedService { index, installs, .. } in prepared {
        let service = &wanted.services[*index];
        install(engine, workers, service, std::mem::take(installs), occasion, give_up)?;
    }
    Ok(())
}

/// Every worker installs its share of one service. If that fails at the start, it does not wait for the other
/// workers.
pub(crate) fn install(
    engine: &Engine,
    workers: &mut Workers,
    service: &Service,
    installs: Vec<ServiceInstall<OpenPort>>,
    occasion: Occasion,
    give_up: &mut dyn FnMut() -> bool,
) -> Result<(), ChangeError> {
    let (reply, replies) = mpsc::channel();
    for (worker, install) in (0..).zip(installs) {
        let install = ControlMessage::Install(Box::new(install), reply.clone());
        engine.fabric.post(worker, install);
    }
    drop(reply);
    let step = engine.timeouts.step;
    let mut next = || match occasion {
        Occasion::Reload => replies.recv_timeout(step).map_err(|_| ChangeError::Stuck(Stuck(step))),
        Occasion::Start => Ok(next_at_start(&replies, give_up)?),
    };
    let installed = (0..engine.fabric.workers())
        .try_for_each(|_| next()?.map_err(|error| ServerError::of_blocks(service, error).into()));
    if installed.is_err() && occasion == Occasion::Start {
        workers.abandon(engine);
    }
    installed
}

/// Starts the runtimes that do not have to wait for others to end, and waits until they serve.
pub(super) fn start_runtimes(
    runtimes: &mut Runtimes,
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
    let awaited = runtimes.supervisor_started()?.add(starts, occasion == Occasion::Start);
    Ok(awaited.wait(give_up).map_err(ServerError::from)?)
}

/// Releases what some workers may have installed.
pub(super) fn undo(engine: &mut Engine, runtimes: &mut Runtimes, prepared: &[PreparedService]) {
    for PreparedService { service_slot, kept, .. } in prepared {
        let is_kept = |port: &PortIndex| kept.iter().any(|(kept, _)| kept == port);
        let own = service_slot.port_indices().filter(|port| !is_kept(port)).collect();
        let (slot, metrics) = (service_slot.slot, &service_slot.metrics);
        release_slot(engine, runtimes, slot, metrics, own, &|| false);
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
