//! Waiting for runtimes that the engine starts.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::slot::FirstStart;
use crate::base::error::ServerError;

/// How often to check whether the start has been cancelled.
pub(super) const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long to wait for the others when one has failed: those of the same process have reported by then.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason of a runtime that reported nothing.
const NO_RESPONSE: &str = "its runtime did not respond";
/// The reason of a runtime that was not waited for because another one failed.
pub(super) const STILL_STARTING: &str = "its runtime was still starting when another one failed";

/// Why the wait ended without success.
pub(crate) enum StartFailure {
    /// These services' runtimes do not serve, and why; in the order of their reports, at least one.
    Failed(Vec<(String, String)>),
    /// These services' runtimes have not reported in time.
    Silent(Vec<String>),
    Cancelled,
}

impl StartFailure {
    /// The reason for each service whose runtime does not serve; empty if the start was cancelled.
    pub(crate) fn reasons(self) -> Vec<(String, String)> {
        match self {
            Self::Failed(reasons) => reasons,
            Self::Silent(services) => with_reason(services, NO_RESPONSE).collect(),
            Self::Cancelled => Vec::new(),
        }
    }
}

impl From<StartFailure> for ServerError {
    fn from(unready: StartFailure) -> Self {
        match unready {
            StartFailure::Failed(reasons) => {
                let (service, why) = reasons.into_iter().next().expect("at least one has failed");
                Self::Runtime { service, why }
            }
            StartFailure::Silent(services) => {
                Self::Runtime { service: services.join(", "), why: NO_RESPONSE.to_owned() }
            }
            StartFailure::Cancelled => Self::Cancelled,
        }
    }
}

fn with_reason(services: Vec<String>, why: &str) -> impl Iterator<Item = (String, String)> {
    services.into_iter().map(move |service| (service, why.to_owned()))
}

/// Runtimes that the engine is starting.
pub(crate) struct PendingStarts {
    pub(super) first: Receiver<FirstStart>,
    /// Maximum time between two reports.
    pub(super) timeout: Duration,
}

impl PendingStarts {
    /// Waits until all of them serve, or `cancelled` returns true. When one has failed, the others get a moment to
    /// report their own reasons.
    pub(crate) fn wait(self, cancelled: &mut dyn FnMut() -> bool) -> Result<(), StartFailure> {
        let mut deadline = Instant::now() + self.timeout;
        let mut silent: Vec<String> = Vec::new();
        let mut failed: Vec<(String, String)> = Vec::new();
        loop {
            match self.first.recv_timeout(CANCEL_POLL_INTERVAL) {
                Ok(FirstStart::Pending(service)) => silent.push(service),
                Ok(FirstStart::Result(service, told)) => {
                    silent.iter().position(|name| *name == service).map(|at| silent.remove(at));
                    match told {
                        Ok(()) if failed.is_empty() => deadline = Instant::now() + self.timeout,
                        Ok(()) => {}
                        Err(why) => {
                            deadline = deadline.min(Instant::now() + OTHERS_TIMEOUT);
                            failed.push((service, why));
                        }
                    }
                }
                // All have reported.
                Err(RecvTimeoutError::Disconnected) if failed.is_empty() => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(StartFailure::Failed(failed)),
                Err(RecvTimeoutError::Timeout) if cancelled() => {
                    return Err(StartFailure::Cancelled);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    silent.dedup();
                    if failed.is_empty() {
                        return Err(StartFailure::Silent(silent));
                    }
                    failed.extend(with_reason(silent, STILL_STARTING));
                    return Err(StartFailure::Failed(failed));
                }
            }
        }
    }
}
