//! Supervises accelerators whose blocks run in runtime processes: one thread starts runtimes or lets them attach,
//! monitors them, and replaces them when they end.
//!
//! A *runtime slot* ([`RuntimeSlot`](slot::RuntimeSlot)) is for one runtime: one accelerator of one service. It
//! always has the region of the current or the next generation. Workers are notified by
//! [`RuntimeEvent`](engine::RuntimeEvent)s. The messages are those of [`wire::attach`].
//!
//! ```text
//!   vacant ── hello, offer ──> starting ── ready ──> serving
//!     ^                           |                     |   bye, connection closed, no heartbeat,
//!     └── new region, next generation <─────────────────┘   impossible ring words, unexpected message
//! ```
//!
//! *Everything a runtime does is hostile.* An unexpected message ends its generation; each step has a deadline;
//! workers check everything it writes into its region. The end of a generation affects only its requests in flight. A
//! runtime that the engine started is killed when its generation ends, and restarted after a back-off that doubles
//! until a generation has lasted. For external runtimes, the next region is created after such a back-off, which
//! bounds the cost of a peer that repeatedly takes offers and disconnects.
//!
//! *Runtime slots on one exclusive device, such as a GPU, share a process*, which the engine starts for all that wait
//! for one at that time. They have one connection, and start and end together. When the service of one is removed,
//! the others restart once all removed ones have drained. A new one first starts in its own process, so that undoing
//! the change affects no other service; when the change is committed, all of them restart together, at most
//! [`TOGETHER_MAX`](wire::attach::TOGETHER_MAX). If that is refused, or their process is lost twice before it serves,
//! they run separately until one of them is added, changed or removed. Before a generation ends for a change of
//! others its service is *paused* (`engine/src/control/pause.rs`): the generation ends when all accepted requests
//! have been answered, or the drain time is over.
//!
//! *Runtime slots are added and removed with services* ([`Supervisor::add`], [`Supervisor::set_listeners`],
//! [`Supervisor::leave`]). If its service is being removed, a runtime serves until all requests are answered, has no
//! next generation, and is then asked to end.

mod copy_probe;
mod handshake;
mod sharing;
mod slot;
mod starts;
mod state;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::topology::{AcceleratorKind, Launch, Service, Topology};
use sys::local::{LocalError, LocalListener};
use sys::readiness::WakeFd;

use crate::base::handshake_queue::HandshakePeer;
use crate::runtimes::heartbeat::HeartbeatWriter;
use slot::FirstStart;
pub(crate) use slot::{PreparedRuntime, RuntimeSpec};
use starts::CANCEL_POLL_INTERVAL;
pub(crate) use starts::{PendingStarts, StartFailure};
use state::SupervisorState;
use worker::WorkerFabric;

/// How long a runtime that the engine started may take to send its hello, and any runtime to get its blocks ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait before another try to allocate a region.
const MEMORY_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to check what has no descriptor: processes that end, regions that workers release.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Paths of kernels that are looked up at the same time.
const LOOK_UPS_MAX: usize = 8;
/// How long runtimes may take to end when the engine ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Shared by the server and the thread.
struct Shared {
    wake_fd: WakeFd,
    draining: AtomicBool,
    stop: AtomicBool,
    commands: Mutex<Vec<Command>>,
    /// Paths that are being looked up.
    look_ups: AtomicUsize,
}

impl Shared {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            wake_fd: WakeFd::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            commands: Mutex::default(),
            look_ups: AtomicUsize::new(0),
        })
    }

    fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.wake_fd.wake();
    }
}

/// The place of a path that is being looked up, one of [`LOOK_UPS_MAX`].
struct LookUp(Arc<Shared>);

impl LookUp {
    fn begin(shared: &Arc<Shared>) -> Option<Self> {
        let place = Self(shared.clone());
        let before = shared.look_ups.fetch_add(1, Ordering::Relaxed);
        (before < LOOK_UPS_MAX).then_some(place)
    }
}

impl Drop for LookUp {
    fn drop(&mut self) {
        self.0.look_ups.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A change of runtime slots or listeners.
enum Command {
    /// Adds runtime slots, each with the channel for the result of its first start; whether the change that brings
    /// them is committed.
    Add(Vec<(PreparedRuntime, Sender<FirstStart>)>, bool),
    /// Sets the listeners; runtime slots of the services in `leaving` have no next generation, the others stay.
    SetListeners {
        names: Vec<(PathBuf, Arc<str>)>,
        new: AttachListeners,
        service_accelerators: Vec<(String, String)>,
        leaving: Vec<u16>,
        drain: Duration,
    },
    /// Removes the runtime slots of the service in this slot; the sender is dropped when they are gone.
    Remove(u16, Sender<()>),
    /// Reports the next start of runtimes that change processes.
    NotifyRegrouped(Sender<FirstStart>),
    /// The path by which a peer names its kernel was looked up: these kernels are of the same file.
    Compared(HandshakePeer<PeerOrigin>, Vec<String>),
}

/// Runs until it is dropped, which must be after the workers have ended.
pub(crate) struct Supervisor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The listeners where runtimes attach, with the names of their accelerators.
#[derive(Default)]
pub(crate) struct AttachListeners(Vec<(PeerOrigin, LocalListener)>);

impl AttachListeners {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The listeners of `wanted` that `running` does not have.
    pub(crate) fn open(wanted: &Topology, running: Option<&Topology>) -> Result<Self, LocalError> {
        let mut listeners = Vec::new();
        for (path, name) in attach_paths(wanted) {
            if !running.is_some_and(|running| attach_paths(running).any(|(of, _)| of == path)) {
                listeners.push((PeerOrigin::AttachPath(name.into()), LocalListener::bind(path)?));
            }
        }
        Ok(Self(listeners))
    }
}

/// The paths where runtimes attach, and their accelerators.
fn attach_paths(topology: &Topology) -> impl Iterator<Item = (&Path, &str)> {
    topology.accelerators.iter().filter_map(|accelerator| match &accelerator.kind {
        AcceleratorKind::Process { launch: Launch::External { attach }, .. } => {
            Some((attach.as_path(), accelerator.name.as_str()))
        }
        _ => None,
    })
}

/// Each accelerator with each service that uses it, by name.
fn service_accelerators(topology: &Topology) -> Vec<(String, String)> {
    let of = |service: &Service| {
        let names = service.accelerators.iter().map(|index| &topology.accelerators[*index].name);
        names.map(|name| (name.clone(), service.name.clone())).collect::<Vec<_>>()
    };
    topology.services.iter().flat_map(of).collect()
}

impl Supervisor {
    /// Starts the thread, without runtime slots and listeners.
    pub(crate) fn start(
        fabric: Arc<WorkerFabric>,
        heartbeat_writer: Arc<HeartbeatWriter>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        let mut state = SupervisorState::new(fabric, heartbeat_writer, shared.clone());
        let builder = std::thread::Builder::new().name("serval-runtimes".into());
        let thread = builder.spawn(move || state.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn command(&self, command: Command) {
        self.shared.command(command);
    }

    /// Adds runtime slots, whose rings the workers have already. The result waits for those that the engine starts.
    /// As long as they are not `committed` they do not affect processes of other services.
    pub(crate) fn add(&self, runtimes: Vec<PreparedRuntime>, committed: bool) -> PendingStarts {
        let (tell, first) = mpsc::channel();
        let runtimes = runtimes.into_iter().map(|runtime| (runtime, tell.clone())).collect();
        self.command(Command::Add(runtimes, committed));
        PendingStarts { first, timeout: 2 * START_TIMEOUT }
    }

    /// Adds the runtime slots of several services at once, so that those that can share a process start in one. A
    /// running process that they are to join may be paused for `drain` before.
    pub(crate) fn add_each(
        &self,
        services: Vec<Vec<PreparedRuntime>>,
        drain: Duration,
    ) -> Vec<PendingStarts> {
        let (mut runtimes, mut awaited) = (Vec::new(), Vec::new());
        for service in services {
            let (tell, first) = mpsc::channel();
            runtimes.extend(service.into_iter().map(|runtime| (runtime, tell.clone())));
            awaited.push(PendingStarts { first, timeout: 2 * START_TIMEOUT + drain });
        }
        self.command(Command::Add(runtimes, true));
        awaited
    }

    /// Waits for runtimes that change processes, until they serve again. They may be paused for `drain` before.
    pub(crate) fn regrouping(&self, drain: Duration) -> PendingStarts {
        let (tell, first) = mpsc::channel();
        self.command(Command::NotifyRegrouped(tell));
        PendingStarts { first, timeout: 2 * START_TIMEOUT + drain }
    }

    /// Sets the attach listeners to those of `wanted`: opens `new` ones, closes those that it does not contain.
    /// Runtime slots of the services in the slots `leaving` have no next generation.
    pub(crate) fn set_listeners(&self, wanted: &Topology, new: AttachListeners, leaving: Vec<u16>) {
        let names = attach_paths(wanted).map(|(path, name)| (path.to_owned(), name.into()));
        let (names, service_accelerators) = (names.collect(), service_accelerators(wanted));
        let drain = Duration::from_millis(wanted.engine.drain_ms);
        self.command(Command::SetListeners { names, new, service_accelerators, leaving, drain });
    }

    /// Ends the runtimes of the service in a slot, which has nothing outstanding. Returns whether all of them have
    /// ended; services that share their process may be paused for `drain` before.
    pub(crate) fn leave(&self, slot: u16, drain: Duration, give_up: &dyn Fn() -> bool) -> bool {
        let (tell, gone) = mpsc::channel();
        self.command(Command::Remove(slot, tell));
        let deadline = Instant::now() + 2 * STOP_TIMEOUT + Duration::from_secs(1) + drain;
        while Instant::now() < deadline {
            match gone.recv_timeout(CANCEL_POLL_INTERVAL) {
                Err(RecvTimeoutError::Disconnected) => return true,
                _ if give_up() => return false,
                _ => {}
            }
        }
        false
    }

    /// No runtime is accepted or started any more; those that serve continue.
    pub(crate) fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
        self.shared.wake_fd.wake();
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.wake_fd.wake();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

/// How a peer connected.
#[derive(Clone)]
enum PeerOrigin {
    /// Through the attach path of the accelerator of this name.
    AttachPath(Arc<str>),
    /// As the process with this number, which was started for this runtime slot.
    Launched(u64, u64),
}
