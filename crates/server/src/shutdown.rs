//! How a server stops: it drains, then stops everything; every wait has a limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::ControlMessage;
use engine::metrics::ServiceMetrics;
use wire::DropReason;

use crate::server::Server;

/// How long workers may take to stop after a drain. Only one whose kernel does not return needs it.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a stop may take in total after a drain.
const STOP_TIMEOUT: Duration = Duration::from_millis(4000);

/// The result of [`Server::shutdown`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Requests that were accepted and not answered within `drain_ms`, or that timed out (`request_timeout_ms`)
    /// during the drain.
    pub unanswered: u64,
    /// A block did not return, or ended with an error and could not be stopped.
    pub hung: bool,
}

impl ShutdownReport {
    /// Whether all accepted requests were answered and everything stopped.
    pub fn is_clean(&self) -> bool {
        self.unanswered == 0 && !self.hung
    }
}

impl Server {
    /// Accepts no new requests, answers the accepted ones (for at most `drain_ms`), and stops everything. Returns
    /// within `drain_ms` and five seconds; a worker whose kernel does not return is left running.
    pub fn shutdown(self) -> ShutdownReport {
        self.shutdown_until(&|| false)
    }

    /// As [`Self::shutdown`], but the drain ends as soon as `is_hastened`: what is unanswered then is dropped, as it is
    /// after `drain_ms`. If nothing is, the report is clean.
    pub fn shutdown_until(mut self, is_hastened: &dyn Fn() -> bool) -> ShutdownReport {
        let timeout = Duration::from_millis(self.engine.topology.engine.drain_ms);
        let mut deadline = Instant::now() + timeout;
        let before = self.unanswered();
        self.memory_ports.stop_listening();
        if let Some(supervisor) = self.runtimes.supervisor() {
            supervisor.drain();
        }
        self.engine.fabric.post_to_all(|_| ControlMessage::Drain);
        while !self.engine.fabric.all_settled() && Instant::now() < deadline {
            if is_hastened() {
                deadline = Instant::now();
            }
            self.engine.fabric.wake_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        let hung = self.stop(deadline);
        ShutdownReport { unanswered: self.unanswered() - before, hung }
    }

    /// Number of requests of all services that were dropped by a drain or a time-out.
    fn unanswered(&self) -> u64 {
        let leaked = self.engine.leaked.iter().map(|leaked| &leaked.metrics);
        let mut all: Vec<_> = self.engine.slots.iter().map(|p| &p.metrics).chain(leaked).collect();
        // A version that is being removed may share its counters with its successor.
        all.sort_by_key(|metrics| Arc::as_ptr(metrics));
        all.dedup_by_key(|metrics| Arc::as_ptr(metrics));
        let given_up = [DropReason::DrainTimeout, DropReason::RequestTimeout];
        let of = |metrics: &&Arc<ServiceMetrics>| {
            let snapshot = metrics.snapshot();
            given_up.map(|reason| snapshot.dropped(reason)).iter().sum::<u64>()
        };
        all.iter().map(of).sum()
    }

    /// Stops the workers, then the accelerators, within a few seconds after `drained`. Returns whether something hangs.
    fn stop(&mut self, drained: Instant) -> bool {
        self.workers.begin_stop(&self.engine);
        let hung = self.workers.join(drained + WORKERS_TIMEOUT);
        self.runtimes.stop(drained + STOP_TIMEOUT) | hung
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.workers.is_empty() || !self.runtimes.is_empty() {
            self.stop(Instant::now());
        }
    }
}
