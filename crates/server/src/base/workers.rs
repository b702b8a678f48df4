//! The threads of the workers: start and end. Their loop is in the crate `serval-worker`.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::{ControlMessage, Fabric};
use sys::tap::TapFile;
use sys::{SocketNic, SocketOptions, Waker};
use worker::{Network, RunningWorker, WorkerFabric, WorkerThread};

use super::engine::Engine;
use super::error::ServerError;
use super::watchdog::{Stalls, Watchdog, Watched};

/// How long workers of a failed start may take to end before they are no longer waited for; longer than they wait for
/// each other.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval of checks whether they have ended.
const ABANDON_INTERVAL: Duration = Duration::from_millis(20);

/// The networks of workers that have not started.
pub(crate) struct Nics(Vec<SocketNic>);

impl Nics {
    /// Opens one for each worker.
    pub(crate) fn open(workers: usize) -> Result<Self, ServerError> {
        let open = |_| SocketNic::open(&[], SocketOptions::default());
        Ok(Self((0..workers).map(open).collect::<Result<_, _>>()?))
    }

    /// What wakes the workers, in their order.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.0.iter().map(SocketNic::waker).collect()
    }

    /// The way to the workers, which has room for this number of services.
    pub(crate) fn fabric(&self, services_max: usize) -> Arc<WorkerFabric> {
        let wakers = self.wakers().into_iter();
        let wakers =
            wakers.map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
        Fabric::new(wakers.collect(), services_max)
    }
}

/// The workers of an engine.
pub(crate) struct Workers {
    threads: Vec<JoinHandle<bool>>,
    watchdog: Watchdog,
}

impl Workers {
    /// Starts the watchdog; there are no threads of workers yet.
    pub(crate) fn new(engine: &Engine) -> Result<Self, ServerError> {
        let watchdog = Watchdog::start(engine.fabric.workers(), engine.metrics.clone());
        let watchdog = watchdog.map_err(ServerError::no_thread("watch"))?;
        Ok(Self { threads: Vec::new(), watchdog })
    }

    /// Starts one thread per worker. The workers have no services.
    pub(crate) fn start(
        &mut self,
        engine: &Engine,
        nics: Nics,
        tap: Option<&TapFile>,
    ) -> Result<(), ServerError> {
        let turning = RunningWorker::default();
        for (index, nic) in nics.0.into_iter().enumerate() {
            let network = match tap {
                Some(tap) => Network::Tapped(tap.attach(nic, Vec::new())),
                None => Network::Sockets(nic),
            };
            let worker = WorkerThread {
                index,
                network,
                core: engine.topology.engine.cores.get(index).copied(),
                limits: engine.topology.limits.clone(),
                metrics: engine.metrics.clone(),
                fabric: engine.fabric.clone(),
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
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    self.abandon(engine);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Stops the workers of a failed start. One that is inside a kernel may never end: its thread runs until the
    /// process ends.
    pub(crate) fn abandon(&mut self, engine: &Engine) {
        self.begin_stop(engine);
        let deadline = Instant::now() + ABANDON_TIMEOUT;
        while !self.threads.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(ABANDON_INTERVAL);
        }
        self.threads.clear();
    }

    /// Asks the workers to end.
    pub(crate) fn begin_stop(&self, engine: &Engine) {
        self.watchdog.set_ending();
        engine.fabric.post_to_all(|_| ControlMessage::Stop);
    }

    /// Waits for the workers to end; those whose kernels do not return are left behind. Returns whether something
    /// hangs.
    pub(crate) fn join(&mut self, deadline: Instant) -> bool {
        let mut hung = false;
        for (index, worker) in self.threads.drain(..).enumerate() {
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

    /// Whether no thread runs.
    pub(crate) fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Where blocks on the workers' cores publish that they are resumed.
    pub(crate) fn watched(&self) -> Arc<Watched> {
        self.watchdog.shared()
    }

    /// Workers that serve nothing, because a kernel on their core does not return.
    pub(crate) fn stalls(&self) -> Arc<Stalls> {
        self.watchdog.stalls()
    }
}
