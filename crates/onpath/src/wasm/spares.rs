//! Spare instances: a thread of each module makes them, so that a restart takes a finished one, and the thread that calls an instance neither starts
//! nor frees any.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use super::running::{Running, START_TICKS, Start};
use crate::function::Failure;
use crate::spec::INSTANCES;

/// Spares of an instance: one for the other messages of a batch that failed, and one for those behind the message that made it fail.
const SPARES: usize = INSTANCES - 1;
/// The version of the settings of an instance that is gone.
const GONE: u64 = u64::MAX;

/// The thread that makes spares of one module.
#[derive(Default)]
pub(super) struct Maker(Mutex<Option<(mpsc::Sender<Job>, JoinHandle<()>)>>);

enum Job {
    Make(Order),
    Free(Box<Running>),
}

struct Order {
    start: Start,
    settings: Vec<Option<u64>>,
    version: u64,
    /// The version that the instance has now: an order of another one is skipped.
    current: Arc<AtomicU64>,
    to: mpsc::Sender<Made>,
}

struct Made {
    version: u64,
    running: Result<Running, Failure>,
}

impl Maker {
    /// A sender of orders. The thread starts with the first one.
    fn orders(&self) -> Result<mpsc::Sender<Job>, String> {
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((orders, _)) = &*thread {
            return Ok(orders.clone());
        }
        let (orders, received) = mpsc::channel();
        let builder = std::thread::Builder::new().name("serval-spares".into());
        let started = builder.spawn(move || received.into_iter().for_each(Job::done));
        let started = started.map_err(|error| format!("a thread cannot be started: {error}"))?;
        *thread = Some((orders.clone(), started));
        Ok(orders)
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        let thread = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((orders, thread)) = thread {
            // All instances are gone: what they have ordered is skipped, and a start has a limit.
            drop(orders);
            let _ = thread.join();
        }
    }
}

impl Job {
    fn done(self) {
        let order = match self {
            Self::Make(order) => order,
            Self::Free(running) => return drop(running),
        };
        let Order { start, settings, version, current, to } = order;
        if current.load(Ordering::Relaxed) == version {
            let running = start.run(START_TICKS, &settings).map(|(running, _)| running);
            // The instance may be gone meanwhile.
            let _ = to.send(Made { version, running: running.map_err(Failure) });
        }
    }
}

/// The spares of one instance.
pub(super) struct Spares {
    orders: mpsc::Sender<Job>,
    made: mpsc::Receiver<Made>,
    to: mpsc::Sender<Made>,
    /// Changes with the settings.
    current: Arc<AtomicU64>,
    /// Spares with the present settings that were ordered and not taken.
    ordered: usize,
}

impl Spares {
    pub(super) fn new(maker: &Maker) -> Result<Self, String> {
        let (to, made) = mpsc::channel();
        Ok(Self { orders: maker.orders()?, made, to, current: Arc::default(), ordered: 0 })
    }

    /// Orders those that are missing.
    pub(super) fn order(&mut self, start: &Start, settings: &[Option<u64>]) {
        while self.ordered < SPARES {
            let version = self.current.load(Ordering::Relaxed);
            let order = Order {
                start: start.clone(),
                settings: settings.to_vec(),
                version,
                current: Arc::clone(&self.current),
                to: self.to.clone(),
            };
            self.give(Job::Make(order));
            self.ordered += 1;
        }
    }

    /// The settings have changed: spares that were made or ordered before are not used.
    pub(super) fn outdate(&mut self) {
        self.current.fetch_add(1, Ordering::Relaxed);
        self.ordered = 0;
        while let Ok(made) = self.made.try_recv() {
            made.running.into_iter().for_each(|running| self.free(running));
        }
    }

    /// A spare, or why it could not be made. `None`: it is not ready.
    pub(super) fn take(&mut self) -> Option<Result<Running, Failure>> {
        while let Ok(Made { version, running }) = self.made.try_recv() {
            if version == self.current.load(Ordering::Relaxed) {
                self.ordered -= 1;
                return Some(running);
            }
            running.into_iter().for_each(|running| self.free(running));
        }
        None
    }

    /// Frees an instance.
    pub(super) fn free(&self, running: Running) {
        self.give(Job::Free(Box::new(running)));
    }

    fn give(&self, job: Job) {
        // The thread ends after the last instance.
        let _ = self.orders.send(job);
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        self.current.store(GONE, Ordering::Relaxed);
    }
}
