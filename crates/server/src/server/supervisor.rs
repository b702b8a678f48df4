//! The control side of accelerators whose blocks run in processes of their own: one thread that starts
//! runtimes or lets them attach, watches them, and gives their place to the next one when they end.
//!
//! A *seat* is the place of one runtime: one accelerator of one service. It always has the region of
//! the life that runs or comes next; what workers have to know of it they are told as [`RuntimeEvent`].
//! Messages of the conversation are [`wire::attach`]'s.
//!
//! ```text
//!   vacant ── hello, offer ──▶ starting ── ready ──▶ serving
//!     ▲                           │                     │   goodbye, end of the connection, no beat,
//!     └── new region, next generation ◀─────────────────┘   impossible words, a message out of order
//! ```
//!
//! *Everything a runtime does is hostile.* Whatever it says at the wrong time ends its life; each step
//! has a deadline; what it writes into its region is the workers' to check. A life that ends takes nothing
//! with it but the requests that were with it. A runtime that the engine started is killed when its
//! life ends, and started again after a pause that doubles until a life has lasted. Where runtimes attach
//! by themselves, the next life's region is made after such a pause: whoever takes offers and leaves, over and over,
//! costs no more than that.
//!
//! *Seats on one device, such as a GPU, share a process*, which the engine starts for those that wait for one at that time. They have one
//! connection, begin together and end together, whichever of them gave the reason. One whose service leaves ends the
//! life of those that stay, once all that leave have answered. One that comes begins in a process of its own, which
//! costs nobody anything should the change be undone; when it is certain, all of them begin anew together, no more than
//! [`TOGETHER_MAX`]. Should that be refused, or their process be lost twice before it serves, they go on alone until
//! one of them comes, changes or leaves. Before a life ends for a change of others its service is *held*
//! (`engine/src/control/pause.rs`): it ends when all that was accepted has been answered, or the drain time is over.
//!
//! *Seats come and go with services* ([`Supervisor::runtime`], [`Supervisor::set_listeners`], [`Supervisor::leave`]). One whose service is about to leave
//! serves on until everything is answered, and has no next life; then its runtime is asked to end.

mod copy_probe;
mod handshake;
mod sharing;
mod slot;
mod starts;
mod state;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::topology::{AcceleratorKind, Launch, Service, Topology};
use sys::local::{LocalError, LocalListener, WakeFd};

use super::ServerFabric;
use super::heartbeat::HeartbeatWriter;
use slot::FirstStart;
pub(super) use slot::{PreparedRuntime, RuntimeSpec};
use starts::CANCEL_POLL_INTERVAL;
pub(super) use starts::{NO_SIGN_OF_LIFE, PendingStarts, StartFailure};
use state::SupervisorState;

/// How long a runtime that the engine started may take to say hello, and any runtime to get its blocks ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait until memory is tried for again.
const MEMORY_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look at what has no descriptor: processes that end, regions that workers let go of.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long runtimes may take to end when the engine does.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// What the thread is told.
struct Shared {
    wake_fd: WakeFd,
    draining: AtomicBool,
    stop: AtomicBool,
    commands: Mutex<Vec<Command>>,
}

/// How seats and doors change.
enum Command {
    /// These come, each with who hears of its first start. Whether it is certain that they stay.
    Add(Vec<(PreparedRuntime, Sender<FirstStart>)>, bool),
    /// These doors are open from now on, and the seats in these slots have no next life;
    /// all others stay.
    SetListeners {
        names: Vec<(PathBuf, Arc<str>)>,
        new: AttachListeners,
        service_accelerators: Vec<(String, String)>,
        leaving: Vec<u16>,
        drain: Duration,
    },
    /// The seats in this slot are given up; what comes along is dropped when they are gone.
    Remove(u16, Sender<()>),
    /// Who hears of the next start of those that change processes.
    NotifyRegrouped(Sender<FirstStart>),
}

/// Runs until it is dropped, which must be after the workers have ended.
pub(super) struct Supervisor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The paths where runtimes attach, open, with the names of their accelerators.
#[derive(Default)]
pub(super) struct AttachListeners(Vec<(PeerOrigin, LocalListener)>);

impl AttachListeners {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of `wanted` that `running` does not have.
    pub(super) fn open(wanted: &Topology, running: Option<&Topology>) -> Result<Self, LocalError> {
        let mut listeners = Vec::new();
        for (path, name) in attach_paths(wanted) {
            if !running.is_some_and(|running| attach_paths(running).any(|(of, _)| of == path)) {
                listeners.push((PeerOrigin::AttachPath(name.into()), LocalListener::bind(path)?));
            }
        }
        Ok(Self(listeners))
    }
}

/// Where runtimes attach, and the accelerators they are for.
fn attach_paths(topology: &Topology) -> impl Iterator<Item = (&Path, &str)> {
    topology.accelerators.iter().filter_map(|accelerator| match &accelerator.kind {
        AcceleratorKind::Process { launch: Launch::External { attach }, .. } => {
            Some((attach.as_path(), accelerator.name.as_str()))
        }
        _ => None,
    })
}

/// Accelerators, each with a service that it is for, by name.
fn service_accelerators(topology: &Topology) -> Vec<(String, String)> {
    let of = |service: &Service| {
        let names = service.accelerators.iter().map(|index| &topology.accelerators[*index].name);
        names.map(|name| (name.clone(), service.name.clone())).collect::<Vec<_>>()
    };
    topology.services.iter().flat_map(of).collect()
}

impl Supervisor {
    /// Starts the thread; it has neither seats nor doors.
    pub(super) fn start(
        fabric: Arc<ServerFabric>,
        heartbeat_writer: Arc<HeartbeatWriter>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            wake_fd: WakeFd::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            commands: Mutex::default(),
        });
        let mut state = SupervisorState::new(fabric, heartbeat_writer, shared.clone());
        let builder = std::thread::Builder::new().name("serval-runtimes".into());
        let thread = builder.spawn(move || state.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn command(&self, command: Command) {
        self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.shared.wake_fd.wake();
    }

    /// Seats come; the workers have their lanes. Those whose runtimes the engine starts are to be waited for.
    /// Seats that are not `committed` may yet be undone: they touch nobody else's process until the doors change.
    pub(super) fn add(&self, runtimes: Vec<PreparedRuntime>, committed: bool) -> PendingStarts {
        let (tell, first) = mpsc::channel();
        let runtimes = runtimes.into_iter().map(|runtime| (runtime, tell.clone())).collect();
        self.command(Command::Add(runtimes, committed));
        PendingStarts { first, timeout: 2 * START_TIMEOUT }
    }

    /// Seats of several services come at once, so that those that can share a process begin in one. Whose process
    /// they are to share may be held for `drain` before.
    pub(super) fn add_each(
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

    /// Those that change processes, until they serve again. They may be held for `drain` before.
    pub(super) fn regrouping(&self, drain: Duration) -> PendingStarts {
        let (tell, first) = mpsc::channel();
        self.command(Command::NotifyRegrouped(tell));
        PendingStarts { first, timeout: 2 * START_TIMEOUT + drain }
    }

    /// From now on runtimes attach where `wanted` says: `new` doors open, those it does not name close. The seats
    /// in the slots `leaving` have no next life.
    pub(super) fn set_listeners(&self, wanted: &Topology, new: AttachListeners, leaving: Vec<u16>) {
        let names = attach_paths(wanted).map(|(path, name)| (path.to_owned(), name.into()));
        let (names, service_accelerators) = (names.collect(), service_accelerators(wanted));
        let drain = Duration::from_millis(wanted.engine.drain_ms);
        self.command(Command::SetListeners { names, new, service_accelerators, leaving, drain });
    }

    /// Ends the runtimes of the service in a slot, which has nothing left for them. Returns whether all of
    /// them are gone; who shares their process may be held for `drain` before.
    pub(super) fn leave(&self, slot: u16, drain: Duration, give_up: &dyn Fn() -> bool) -> bool {
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

    /// No runtime is let in or started any more; those that serve go on.
    pub(super) fn drain(&self) {
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

/// How somebody came in.
#[derive(Clone)]
enum PeerOrigin {
    /// By the path of the accelerator of this name.
    AttachPath(Arc<str>),
    /// As the process of this number, which was started for a seat.
    Launched(u64, u64),
}
