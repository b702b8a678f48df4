//! The threads of the workers: how they start, turn and end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::metrics::Metrics;
use engine::topology::Topology;
use engine::{Attachment, ControlMessage, PeerLinks, Worker, WorkerParts, peer_links};
use sys::OpenPort;
use sys::socket_nic::AcceptedSocket;
use wire::nic::Nic;

use super::{Server, ServerError, ServerFabric, watchdog};

/// How long a worker that stops waits for the others' last turns.
const LAST_TURNS_TIMEOUT: Duration = Duration::from_secs(1);
/// How often somebody who may give up is asked while workers start.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long workers of a start that failed may take to end before they are left behind; longer than they wait for each other.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(1500);
/// A start that takes this long is told, and again each time.
const READY_REPORT_INTERVAL: Duration = Duration::from_secs(30);
impl Server {
    /// Starts one thread per worker and waits until each is ready. Should that fail, no worker is waited for any more.
    pub(super) fn start_workers<
        N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static,
    >(
        &mut self,
        nics: Vec<N>,
        addresses: &[SocketAddr],
        regions: Vec<Vec<Vec<Attachment>>>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), ServerError> {
        let spawned = self.spawn_workers(nics, addresses, regions);
        let ready = spawned.and_then(|readiness| {
            (0..self.workers.len()).try_for_each(|_| wait_until_ready(&readiness, cancelled))
        });
        if ready.is_err() {
            self.abandon_workers();
        }
        ready
    }

    /// Returns where each worker tells once whether it is ready.
    fn spawn_workers<N: Nic<Socket = AcceptedSocket, Port = OpenPort> + Send + 'static>(
        &mut self,
        nics: Vec<N>,
        addresses: &[SocketAddr],
        regions: Vec<Vec<Vec<Attachment>>>,
    ) -> Result<mpsc::Receiver<Result<(), ServerError>>, ServerError> {
        let (ready, readiness) = mpsc::channel();
        let links = peer_links(nics.len(), &self.topology);
        let turning = Arc::new(());
        let mut regions: Vec<_> = regions.into_iter().map(Vec::into_iter).collect();
        for (index, (nic, links)) in nics.into_iter().zip(links).enumerate() {
            let own = regions.iter_mut().map(|of_service| of_service.next());
            let attachments = own.map(|share| share.expect("one for each worker")).collect();
            let start = WorkerStart {
                index,
                nic,
                links,
                attachments,
                topology: self.topology.clone(),
                addresses: addresses.to_vec(),
                metrics: self.metrics.clone(),
                fabric: self.fabric.clone(),
                turning: Turning(turning.clone()),
                watchdog: self.watchdog.shared(),
            };
            let ready = ready.clone();
            let thread = std::thread::Builder::new()
                .name(format!("serval-worker-{index}"))
                .spawn(move || start.run(ready))
                .map_err(ServerError::no_thread(&format!("worker-{index}")))?;
            self.workers.push(thread);
        }
        Ok(readiness)
    }

    /// Tells workers to stop, of which some may be inside a kernel and would be waited for without end: those end by
    /// themselves, or with the process.
    fn abandon_workers(&mut self) {
        self.watchdog.expect_the_end();
        self.fabric.post_to_all(|_| ControlMessage::Stop);
        let deadline = Instant::now() + ABANDON_TIMEOUT;
        while !self.workers.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(READY_POLL_INTERVAL);
        }
        self.workers.clear();
    }
}

/// Whether the next worker is ready. A kernel on its core may take long to come to its first receive, or never do.
fn wait_until_ready(
    readiness: &mpsc::Receiver<Result<(), ServerError>>,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<(), ServerError> {
    let mut runtime_metrics = Instant::now();
    loop {
        match readiness.recv_timeout(READY_POLL_INTERVAL) {
            Ok(word) => return word,
            Err(RecvTimeoutError::Timeout) if cancelled() => return Err(ServerError::Cancelled),
            Err(RecvTimeoutError::Timeout) if runtime_metrics.elapsed() < READY_REPORT_INTERVAL => {
            }
            Err(RecvTimeoutError::Timeout) => {
                runtime_metrics = Instant::now();
                tracing::warn!(
                    "still starting: a kernel on a worker's core has not come to its first receive"
                );
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(ServerError::Panicked);
            }
        }
    }
}

/// Everything a worker thread starts with.
struct WorkerStart<N> {
    index: usize,
    nic: N,
    links: PeerLinks,
    /// By service; their blocks are not started.
    attachments: Vec<Vec<Attachment>>,
    topology: Arc<Topology>,
    addresses: Vec<SocketAddr>,
    metrics: Metrics,
    fabric: Arc<ServerFabric>,
    turning: Turning,
    watchdog: Arc<watchdog::Shared>,
}

/// A worker that may still hand something to another: one reference for each.
struct Turning(Arc<()>);

impl Turning {
    /// Waits until no worker takes another turn, but not for one that is held up in a kernel.
    fn end(self) {
        let others = Arc::downgrade(&self.0);
        drop(self);
        let deadline = Instant::now() + LAST_TURNS_TIMEOUT;
        while others.strong_count() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl<N: Nic<Socket = AcceptedSocket, Port = OpenPort>> WorkerStart<N> {
    /// The worker thread: puts the worker together, reports, turns until told to stop. Returns
    /// whether a block hangs.
    fn run(self, ready: mpsc::Sender<Result<(), ServerError>>) -> bool {
        let Self {
            index,
            nic,
            links,
            mut attachments,
            topology,
            addresses,
            metrics,
            fabric,
            turning,
            watchdog,
        } = self;
        watchdog.enter(index);
        if let Some(core) = topology.engine.cores.get(index)
            && let Err(error) = sys::affinity::pin_current_thread(*core)
        {
            tracing::warn!(core, %error, "worker {index} is not pinned");
        }
        // Blocks on the worker's core are started here: a coroutine never changes threads.
        for (service, attachments) in topology.services.iter().zip(&mut attachments) {
            for attachment in attachments {
                if let Err(error) = attachment.blocks.start() {
                    // The main thread may be gone already: then nobody needs to know.
                    let _ = ready.send(Err(ServerError::of_blocks(service, error)));
                    return false;
                }
            }
        }
        let parts = WorkerParts { index, nic, addresses, attachments, links };
        let mut worker = Worker::new(parts, &topology, &metrics, fabric);
        worker.set_clock(sys::time::monotonic_ns);
        let _ = ready.send(Ok(()));
        // That another panics before it has told shows by the last of these being gone.
        drop(ready);
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
                worker.offered_core(from_ns, sys::time::monotonic_ns());
            }
            worker.wait(sleep_ns);
        }
        // What another worker handed over in its last turn is accounted for here as well.
        turning.end();
        worker.shutdown()
    }
}
