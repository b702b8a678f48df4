//! The thread of a worker: the engine's turn on the sockets of the host kernel, in a loop.
//!
//! The turn is generic over the network, so it is compiled where the network is named, which is here: this crate is optimised in every
//! profile, and the crates that start a worker, which are control path, need not be.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::metrics::Metrics;
use engine::topology::Limits;
use engine::{ControlMessage, Fabric, Worker};
use sys::socket_nic::AcceptedSocket;
use sys::tap::Tap;
use sys::{OpenPort, SocketNic};
use wire::nic::Nic;

/// How long a worker that stops waits for the others' last turns.
const LAST_TURNS_TIMEOUT: Duration = Duration::from_secs(1);

/// What the workers of one engine share.
pub type WorkerFabric = Fabric<ControlMessage<AcceptedSocket, OpenPort>>;

/// The network of a worker.
pub enum Network {
    /// Sockets of the host kernel.
    Sockets(SocketNic),
    /// The same, with every packet recorded.
    Tapped(Tap<SocketNic>),
}

/// What a worker's thread is started with.
pub struct WorkerThread {
    /// Its number, from 0.
    pub index: usize,
    /// Its network.
    pub network: Network,
    /// The core to which it is pinned, if any.
    pub core: Option<usize>,
    /// Limits of the engine.
    pub limits: Limits,
    /// Counters of the engine.
    pub metrics: Metrics,
    /// What it shares with the other workers.
    pub fabric: Arc<WorkerFabric>,
    /// Its part of the workers that still run.
    pub turning: RunningWorker,
}

/// A worker that may still hand a message to another one: the workers of an engine have clones of one value.
#[derive(Clone, Default)]
pub struct RunningWorker(Arc<()>);

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

impl WorkerThread {
    /// Runs turns on the calling thread until the worker is stopped. Returns whether a block hangs.
    pub fn run(self) -> bool {
        let Self { index, network, core, limits, metrics, fabric, turning } = self;
        if let Some(core) = core
            && let Err(error) = sys::affinity::pin_current_thread(core)
        {
            tracing::warn!(core, %error, "worker {index} is not pinned");
        }
        match network {
            Network::Sockets(nic) => {
                turns(Worker::new(index, nic, &limits, &metrics, fabric), turning)
            }
            Network::Tapped(nic) => {
                turns(Worker::new(index, nic, &limits, &metrics, fabric), turning)
            }
        }
    }
}

fn turns<N: Nic<Socket = AcceptedSocket, Port = OpenPort>>(
    mut worker: Worker<N>,
    turning: RunningWorker,
) -> bool {
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
