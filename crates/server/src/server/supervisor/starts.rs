//! Waiting for runtimes that the engine starts.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::slot::FirstStart;

/// How often to ask whether the start is still wanted.
pub(super) const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the others are waited for when one has failed: those of one process have told by then.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a runtime of which nothing was heard does not serve.
pub(in crate::server) const NO_SIGN_OF_LIFE: &str = "its runtime gives no sign of life";
/// Why one does not that others' failure let nobody wait for.
pub(super) const STILL_STARTING: &str = "its runtime was still starting when another's had failed";

/// Why runtimes are not waited for any more.
pub(in crate::server) enum StartFailure {
    /// Those of these services do not serve, and why; in the order in which they told, one at least.
    Failed(Vec<(String, String)>),
    /// Those of these services have not told in time what became of them.
    Silent(Vec<String>),
    Cancelled,
}

impl StartFailure {
    /// By service why its runtime does not serve; of nobody if they are not wanted any more.
    pub(in crate::server) fn reasons(self) -> Vec<(String, String)> {
        match self {
            Self::Failed(reasons) => reasons,
            Self::Silent(services) => with_reason(services, NO_SIGN_OF_LIFE).collect(),
            Self::Cancelled => Vec::new(),
        }
    }
}

fn with_reason(services: Vec<String>, why: &str) -> impl Iterator<Item = (String, String)> {
    services.into_iter().map(move |service| (service, why.to_owned()))
}

/// Runtimes that the engine starts, on their way.
pub(in crate::server) struct PendingStarts {
    pub(super) first: Receiver<FirstStart>,
    /// Most time between two signs of life.
    pub(super) timeout: Duration,
}

impl PendingStarts {
    /// Waits until each of them serves, or until `cancelled` says so. When one has failed, the others are given a moment
    /// to tell their own reasons.
    pub(in crate::server) fn wait(
        self,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), StartFailure> {
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
                // Each has told.
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
