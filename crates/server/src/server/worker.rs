//! The threads of the workers: start, loop and end.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::metrics::Metrics;
use engine::topology::Limits;
use engine::{ControlMessage, Worker};
use sys::OpenPort;
use sys::socket_nic::AcceptedSocket;
use wire::nic::Nic;

use super::{Server, ServerError, ServerFabric, watchdog};

/// How long a worker that stops waits for the others' last turns.
const LAST_TURNS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long workers of a failed start may take to end before they are no longer waited for; longer than they wait for
/// each other.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval of checks whether they have ended.
const ABANDON_INTERVAL: Duration = Duration::from_millis(20);

impl Server {
    /// Starts one thread per worker. The workers have no services.
    pub(super) fn spawn_workers<
        N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static,
    >(
        &mut self,
        nics: Vec<N>,
    ) -> Result<(), ServerError> {
        let turning = Arc::new(());
        for (index, nic) in nics.into_iter().enumerate() {
            let worker = WorkerThread {
                index,
                nic,
                core: self.topology.engine.cores.get(index).copied(),
                limits: self.topology.limits.clone(),
                metrics: self.metrics.clone(),
                fabric: self.fabric.clone(),
                turning: RunningWorker(turning.clone()),
                watchdog: self.watchdog.shared(),
            };
            let thread = std::thread::Builder::new()
                .name(format!("serval-worker-{index}"))
                .spawn(move || worker.run())
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
    pub(super) fn abandon_workers(&mut self) {
        self.watchdog.set_ending();
        self.fabric.post_to_all(|_| ControlMessage::Stop);
        let deadline = Instant::now() + ABANDON_TIMEOUT;
        while !self.workers.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(ABANDON_INTERVAL);
        }
        self.workers.clear();
    }
}

/// The arguments of a worker thread.
struct WorkerThread<N> {
    index: usize,
    nic: N,
    core: Option<usize>,
    limits: Limits,
    metrics: Metrics,
    fabric: Arc<ServerFabric>,
    turning: RunningWorker,
    watchdog: Arc<watchdog::Shared>,
}

/// A worker that may still hand a message to another one: one reference for each.
struct RunningWorker(Arc<()>);

impl RunningWorker {
    /// Waits until no worker runs another turn, with a limit for those that are inside a kernel.
    fn end(self) {
        let others = Arc::downgrade(&self.0);
        drop(self);
        let deadline = Instant::now() + LAST_TURNS_TIMEOUT;
        while others.strong_count() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl<N: Nic<Socket = AcceptedSocket, Port = OpenPort>> WorkerThread<N> {
    /// Runs turns until the worker is stopped. Returns whether a block hangs.
    fn run(self) -> bool {
        let Self { index, nic, core, limits, metrics, fabric, turning, watchdog } = self;
        watchdog.enter(index);
        if let Some(core) = core
            && let Err(error) = sys::affinity::pin_current_thread(core)
        {
            tracing::warn!(core, %error, "worker {index} is not pinned");
        }
        let mut worker = Worker::new(index, nic, &limits, &metrics, fabric);
        worker.set_clock(sys::time::monotonic_ns);
        loop {
            let now_ns = sys::time::monotonic_ns();
            worker.turn(now_ns);
            if worker.is_stopped() {
                break;
            }
            let sleep_ns = worker.sleep_ns(now_ns);
            if sleep_ns == 0 && worker.should_yield(now_ns) {
                let from_ns = sys::time::monotonic_ns();
                std::thread::yield_now();
                worker.yielded_core(from_ns, sys::time::monotonic_ns());
            }
            worker.wait(sleep_ns);
        }
        // Messages that another worker handed over in its last turn are accounted for here as well.
        turning.end();
        worker.shutdown()
    }
}
