//! The threads of the workers: start and end. Their loop is in the crate `serval-worker`.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::ControlMessage;
use worker::{Network, RunningWorker, WorkerThread};

use crate::base::error::ServerError;
use crate::server::Server;

/// How long workers of a failed start may take to end before they are no longer waited for; longer than they wait for
/// each other.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval of checks whether they have ended.
const ABANDON_INTERVAL: Duration = Duration::from_millis(20);

impl Server {
    /// Starts one thread per worker. The workers have no services.
    pub(crate) fn spawn_workers(&mut self, networks: Vec<Network>) -> Result<(), ServerError> {
        let turning = RunningWorker::default();
        for (index, network) in networks.into_iter().enumerate() {
            let worker = WorkerThread {
                index,
                network,
                core: self.topology.engine.cores.get(index).copied(),
                limits: self.topology.limits.clone(),
                metrics: self.metrics.clone(),
                fabric: self.fabric.clone(),
                turning: turning.clone(),
            };
            let watchdog = self.watchdog.shared();
            let thread = std::thread::Builder::new()
                .name(format!("serval-worker-{index}"))
                .spawn(move || {
                    watchdog.enter(index);
                    worker.run()
                })
                .map_err(ServerError::no_thread(&format!("worker-{index}")));
            match thread {
                Ok(thread) => self.workers.push(thread),
                Err(error) => {
                    self.abandon_workers();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Stops the workers of a failed start. One that is inside a kernel may never end: its thread runs until the
    /// process ends.
    pub(crate) fn abandon_workers(&mut self) {
        self.watchdog.set_ending();
        self.fabric.post_to_all(|_| ControlMessage::Stop);
        let deadline = Instant::now() + ABANDON_TIMEOUT;
        while !self.workers.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(ABANDON_INTERVAL);
        }
        self.workers.clear();
    }
}
