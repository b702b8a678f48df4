//! How a server stops: it drains, then stops everything; every wait has a limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::ControlMessage;
use engine::metrics::ServiceMetrics;
use mqueue::abi::stop;
use wire::DropReason;

use crate::server::Server;

/// How long workers may take to stop after a drain. Only one whose kernel does not return needs it.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a stop may take in total after a drain.
const STOP_TIMEOUT: Duration = Duration::from_millis(4000);
/// How long accelerator threads may take to end: only one that is not scheduled, or has a block that hangs, takes
/// this long.
pub(crate) const BLOCKS_TIMEOUT: Duration = Duration::from_secs(5);

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
        let timeout = Duration::from_millis(self.topology.engine.drain_ms);
        let mut deadline = Instant::now() + timeout;
        let before = self.unanswered();
        if let Some(shm_acceptor) = &self.shm_acceptor {
            shm_acceptor.stop_listening();
        }
        if let Some(supervisor) = &self.supervisor {
            supervisor.drain();
        }
        self.fabric.post_to_all(|_| ControlMessage::Drain);
        while !self.fabric.all_settled() && Instant::now() < deadline {
            if is_hastened() {
                deadline = Instant::now();
            }
            self.fabric.wake_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        let hung = self.stop(deadline);
        ShutdownReport { unanswered: self.unanswered() - before, hung }
    }

    /// Number of requests of all services that were dropped by a drain or a time-out.
    fn unanswered(&self) -> u64 {
        let leaked = self.leaked.iter().map(|leaked| &leaked.metrics);
        let mut all: Vec<_> = self.service_slots.iter().map(|p| &p.metrics).chain(leaked).collect();
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

    /// Stops the workers, then the accelerator threads, within a few seconds after `drained`. Returns whether something hangs.
    pub(crate) fn stop(&mut self, drained: Instant) -> bool {
        self.watchdog.set_ending();
        self.fabric.post_to_all(|_| ControlMessage::Stop);
        let mut hung = self.join_workers(drained + WORKERS_TIMEOUT);
        // Asks the runtimes to end, then kills them.
        self.supervisor = None;
        for (_, accelerator) in &self.accelerators {
            accelerator.stop(stop::NOW);
        }
        let deadline = drained + STOP_TIMEOUT;
        for (_, accelerator) in self.accelerators.drain(..) {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = accelerator.join(left.clamp(Duration::from_millis(100), BLOCKS_TIMEOUT));
            if !left.is_empty() {
                tracing::error!(blocks = ?left, "blocks did not end; their threads are left behind");
                hung = true;
            }
        }
        hung
    }

    /// Waits for the workers to end; those whose kernels do not return are left behind. Returns whether something
    /// hangs.
    fn join_workers(&mut self, deadline: Instant) -> bool {
        let mut hung = false;
        for (index, worker) in self.workers.drain(..).enumerate() {
            while !worker.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_micros(200));
            }
            if worker.is_finished() {
                hung |= worker.join().unwrap_or(true);
                continue;
            }
            let stall = self.watchdog.stalls().list().into_iter().find(|s| s.worker == index);
            let why =
                stall.map_or("it is inside a kernel or the host kernel".into(), |s| s.reason());
            tracing::error!("worker {index} does not stop, its thread is left behind: {why}");
            hung = true;
        }
        hung
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.workers.is_empty() || !self.accelerators.is_empty() || self.supervisor.is_some() {
            self.stop(Instant::now());
        }
    }
}
