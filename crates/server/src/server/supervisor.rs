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

mod handshake;
mod sharing;
mod slot;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::metrics::RuntimeMetrics;
use engine::topology::{AcceleratorKind, Launch, Service, Topology};
use engine::{ControlMessage, RuntimeEvent};
use mqueue::abi::{state, stop};
use sys::SharedMemory;
use sys::local::{Bell, LocalError, LocalListener, wait_readable};
use wire::DropReason;
use wire::attach::{MESSAGE_BYTES_MAX, Ready, TOGETHER_MAX};

use super::ServerFabric;
use super::handshake_queue::HandshakeQueue;
use super::heartbeat::HeartbeatWriter;
use runtime::HeartbeatMonitor;
use sharing::Regroup;
use slot::{
    EndCause, FirstStart, RuntimeRegion, RuntimeSlot, State, reason_label, warn_of_shared_devices,
};
pub(super) use slot::{PreparedRuntime, RuntimeSpec};

/// How long a runtime that the engine started may take to say hello, and any runtime to get its blocks ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait until memory is tried for again.
const MEMORY_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look at what has no descriptor: processes that end, regions that workers let go of.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How often to ask whether the start is still wanted.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long runtimes may take to end when the engine does.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the others are waited for when one has failed: those of one process have told by then.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a runtime of which nothing was heard does not serve.
pub(super) const NO_SIGN_OF_LIFE: &str = "its runtime gives no sign of life";
/// Why one does not that others' failure let nobody wait for.
const STILL_STARTING: &str = "its runtime was still starting when another's had failed";

/// What the thread is told.
struct Shared {
    bell: Bell,
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

/// Why runtimes are not waited for any more.
pub(super) enum StartFailure {
    /// Those of these services do not serve, and why; in the order in which they told, one at least.
    Failed(Vec<(String, String)>),
    /// Those of these services have not told in time what became of them.
    Silent(Vec<String>),
    Cancelled,
}

impl StartFailure {
    /// By service why its runtime does not serve; of nobody if they are not wanted any more.
    pub(super) fn reasons(self) -> Vec<(String, String)> {
        match self {
            Self::Failed(reasons) => reasons,
            Self::Silent(services) => with_reason(services, NO_SIGN_OF_LIFE).collect(),
            Self::Cancelled => Vec::new(),
        }
    }
}

fn with_reason(services: Vec<String>, why: &str) -> impl Iterator<Item = (String, String)> {
    services.into_iter().map(move |service| (service, why.to_owned()))
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

/// Runtimes that the engine starts, on their way.
pub(super) struct PendingStarts {
    first: Receiver<FirstStart>,
    /// Most time between two signs of life.
    timeout: Duration,
}

impl PendingStarts {
    /// Waits until each of them serves, or until `cancelled` says so. When one has failed, the others are given a moment
    /// to tell their own reasons.
    pub(super) fn wait(self, cancelled: &mut dyn FnMut() -> bool) -> Result<(), StartFailure> {
        let mut deadline = Instant::now() + self.timeout;
        let mut silent: Vec<String> = Vec::new();
        let mut failed: Vec<(String, String)> = Vec::new();
        loop {
            match self.first.recv_timeout(CANCEL_POLL_INTERVAL) {
                Ok(FirstStart::Pending(service)) => silent.push(service),
                Ok(FirstStart::Result(service, told)) => {
                    silent.iter().position(|name| *name == service).map(|at| silent.remove(at));
                    match told {
                        Ok(()) if failed.is_empty() => deadline = Instant::now() + self.timeout,
                        Ok(()) => {}
                        Err(why) => {
                            deadline = deadline.min(Instant::now() + OTHERS_TIMEOUT);
                            failed.push((service, why));
                        }
                    }
                }
                // Each has told.
                Err(RecvTimeoutError::Disconnected) if failed.is_empty() => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(StartFailure::Failed(failed)),
                Err(RecvTimeoutError::Timeout) if cancelled() => {
                    return Err(StartFailure::Cancelled);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    silent.dedup();
                    if failed.is_empty() {
                        return Err(StartFailure::Silent(silent));
                    }
                    failed.extend(with_reason(silent, STILL_STARTING));
                    return Err(StartFailure::Failed(failed));
                }
            }
        }
    }
}

impl Supervisor {
    /// Starts the thread; it has neither seats nor doors.
    pub(super) fn start(
        fabric: Arc<ServerFabric>,
        heartbeat_writer: Arc<HeartbeatWriter>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            bell: Bell::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            commands: Mutex::default(),
        });
        let mut state = SupervisorState {
            handshakes: HandshakeQueue::new(MESSAGE_BYTES_MAX),
            runtimes: BTreeMap::new(),
            created: 0,
            service_accelerators: Vec::new(),
            fabric,
            heartbeat_writer,
            shared: shared.clone(),
            retired: Vec::new(),
            killed: Vec::new(),
            processes: 0,
            regroups: Vec::new(),
            drain: Duration::ZERO,
        };
        let builder = std::thread::Builder::new().name("serval-runtimes".into());
        let thread = builder.spawn(move || state.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn command(&self, command: Command) {
        self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.shared.bell.ring();
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
        self.shared.bell.ring();
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
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

/// A process that was killed.
struct KilledProcess {
    child: Child,
    /// What it has until it is gone …
    device: Option<String>,
    /// … or until it is not waited for any more.
    until: Instant,
}

/// The thread's state.
struct SupervisorState {
    handshakes: HandshakeQueue<PeerOrigin>,
    /// By number, in the order in which they came.
    runtimes: BTreeMap<u64, RuntimeSlot>,
    /// How many there have been.
    created: u64,
    /// See [`service_accelerators`]; of the topology that runs.
    service_accelerators: Vec<(String, String)>,
    fabric: Arc<ServerFabric>,
    heartbeat_writer: Arc<HeartbeatWriter>,
    shared: Arc<Shared>,
    /// Regions of lives that ended, until the workers have let go of them.
    retired: Vec<Arc<SharedMemory>>,
    /// Processes that were killed, until they are gone.
    killed: Vec<KilledProcess>,
    /// Processes that were started.
    processes: u64,
    /// Planned ends of lives that wait until what was accepted has been answered …
    regroups: Vec<Regroup>,
    /// … and for no longer than this.
    drain: Duration,
}

impl SupervisorState {
    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            if self.draining() {
                self.handshakes.close();
            }
            self.run_commands();
            self.check_all();
            self.wait_and_dispatch();
        }
        self.shutdown();
    }

    /// Does what was ordered, in order.
    fn run_commands(&mut self) {
        let commands = std::mem::take(
            &mut *self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner),
        );
        for command in commands {
            match command {
                Command::Add(starts, committed) => {
                    for (start, first) in starts {
                        self.created += 1;
                        self.runtimes
                            .insert(self.created, RuntimeSlot::new(start, &first, committed));
                        if committed {
                            self.retry_sharing(self.created);
                        }
                    }
                    warn_of_shared_devices(&self.runtimes);
                }
                Command::SetListeners { names, new, service_accelerators, leaving, drain } => {
                    (self.service_accelerators, self.drain) = (service_accelerators, drain);
                    let name = |path: &Path| {
                        let found = names.iter().find(|(of, _)| of == path)?;
                        Some(PeerOrigin::AttachPath(found.1.clone()))
                    };
                    self.handshakes.set_listeners(name, new.0);
                    for runtime in
                        self.runtimes.values_mut().filter(|s| leaving.contains(&s.spec.slot))
                    {
                        (runtime.retiring, runtime.next_try) = (true, None);
                    }
                    self.commit();
                }
                Command::Remove(slot, gone) => self.leave(slot, gone),
                Command::NotifyRegrouped(tell) => {
                    self.run_regroups();
                    let regroups =
                        |s: &&mut RuntimeSlot| (s.regrouping || s.pause.is_some()) && !s.retiring;
                    for runtime in self.runtimes.values_mut().filter(regroups) {
                        if runtime.first.is_none() {
                            runtime.report_start_to(&tell);
                        }
                    }
                }
            }
        }
    }

    fn runtime(&mut self, id: u64) -> &mut RuntimeSlot {
        self.runtimes.get_mut(&id).expect("only seats that are there are named")
    }

    fn draining(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
    }

    /// What is due by time.
    fn check_all(&mut self) {
        // Unmaps those that nobody else holds any more.
        self.retired.retain(|memory| Arc::strong_count(memory) > 1);
        self.killed.retain_mut(|killed| matches!(killed.child.try_wait(), Ok(None)));
        // First who leaves: it is waited for, and making the regions of others takes its time.
        for id in self.runtimes.keys().copied().collect::<Vec<_>>() {
            if self.runtime(id).has_stopped() {
                self.remove(id);
            }
        }
        self.run_regroups();
        for id in self.runtimes.keys().copied().collect::<Vec<_>>() {
            self.check(id);
        }
    }

    fn wait_and_dispatch(&mut self) {
        let mut files: Vec<BorrowedFd<'_>> = vec![self.shared.bell.as_fd()];
        let spoken = self.runtimes.iter().filter(|(_, runtime)| runtime.socket().is_some());
        let spoken: Vec<u64> = spoken.map(|(id, _)| *id).collect();
        files.extend(self.runtimes.values().filter_map(|s| Some(s.socket()?.as_fd())));
        files.extend(self.handshakes.descriptors());
        let leaving =
            !self.retired.is_empty() || !self.killed.is_empty() || !self.regroups.is_empty();
        let pause = leaving.then(|| Instant::now() + POLL_INTERVAL);
        let due = self
            .runtimes
            .values()
            .filter_map(RuntimeSlot::due)
            .chain(self.handshakes.next_deadline())
            .chain(pause)
            .min();
        let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
        let ready = wait_readable(&files, timeout);
        let (bell, rest) = ready.split_at(1);
        let (runtimes, handshakes) = rest.split_at(spoken.len());
        if bell[0] {
            self.shared.bell.silence();
        }
        for (runtime, _) in spoken.into_iter().zip(runtimes).filter(|(_, ready)| **ready) {
            self.on_message(runtime);
        }
        for arrived in self.handshakes.poll(handshakes) {
            self.on_hello(arrived);
        }
    }

    /// What is due for a seat by time.
    fn check(&mut self, id: u64) {
        let now = Instant::now();
        let draining = self.draining();
        let due = self.runtimes[&id].next_try.is_some_and(|due| due <= now);
        let held = due && (self.device_is_held(id) || self.join_is_pending(id));
        let runtime = self.runtime(id);
        if due {
            runtime.next_try = held.then(|| now + POLL_INTERVAL);
            if held {
                return;
            }
            if runtime.region.is_none() {
                self.prepare_region(id);
            } else if !draining && runtime.is_launched() && matches!(runtime.state, State::Vacant) {
                self.launch(id);
            }
            return;
        }
        let seconds = START_TIMEOUT.as_secs();
        let cause = match &mut runtime.state {
            State::Expected { until } if now >= *until => {
                EndCause::lost("silent", format!("it did not say hello within {seconds} s"))
            }
            State::Starting { until, .. } if now >= *until => {
                EndCause::lost("silent", format!("its blocks were not ready within {seconds} s"))
            }
            State::Serving { monitor, .. } => {
                let Some(region) = &runtime.region else { return };
                if region.link.condemned() {
                    EndCause::lost("ring_corrupt", "it wrote impossible words into its region")
                } else if monitor.lost(region.words.accelerator_heartbeat()) {
                    let ms = runtime.spec.launch().1.as_millis();
                    let reason = DropReason::AcceleratorStalled;
                    let text = format!("it stood still for {ms} ms");
                    EndCause { label: "stalled", reason, text, reported: false }
                } else if let Some(block) = (0..runtime.spec.blocks())
                    .find(|b| region.words.block_state(*b) == state::ENDED)
                {
                    let why = reason_label(region.words.block(block).reason);
                    EndCause::lost(why, format!("block {block} ended ({why})"))
                } else {
                    return;
                }
            }
            _ => return,
        };
        self.end_group(id, cause);
    }

    /// A seat that was given up is empty.
    fn remove(&mut self, id: u64) {
        self.retire_region(id);
        // Dropping it tells who waits for that.
        self.runtimes.remove(&id);
    }

    /// Starts a process for a seat and for those that wait for one and go with it.
    fn launch(&mut self, id: u64) {
        self.processes += 1;
        let (process, until) = (self.processes, Instant::now() + START_TIMEOUT);
        let leader = &self.runtimes[&id];
        let joins = |(at, runtime): &(&u64, &RuntimeSlot)| {
            let waits =
                matches!(runtime.state, State::Vacant) && runtime.committed == leader.committed;
            **at != id && waits && runtime.can_share_process(leader)
        };
        let others = self.runtimes.iter().filter(joins).map(|(at, _)| *at);
        let mut others: Vec<u64> = others.take(TOGETHER_MAX as usize - 1).collect();
        others.retain(|at| {
            if self.runtimes[at].region.is_none() {
                self.prepare_region(*at);
            }
            self.runtimes[at].region.is_some()
        });
        let all = others.iter().chain([&id]);
        let hang_ms = all.map(|at| self.runtimes[at].hang_ms()).max().expect("one at least");
        for at in others.into_iter().chain([id]) {
            let runtime = self.runtime(at);
            (runtime.process, runtime.next_try) = (process, None);
            runtime.state = State::Expected { until };
        }
        match self.runtime(id).launch(hang_ms) {
            Ok(socket) => self.handshakes.add(PeerOrigin::Launched(id, process), socket, until),
            Err(error) => {
                let text = format!("its process cannot be started: {error}");
                self.end_group(id, EndCause::lost("not_started", text));
            }
        }
    }

    /// The blocks of a seat run, and of those that go with it.
    fn on_ready(&mut self, id: u64, ready: Ready) -> Result<(), String> {
        let group = self.group(id);
        let starting = matches!(self.runtimes[&id].state, State::Starting { .. });
        let first = self.runtimes[&group[0]].generation;
        let blocks: u32 = group.iter().map(|at| self.runtimes[at].spec.blocks()).sum();
        if !starting || (ready.generation, ready.blocks) != (first, blocks) {
            return Err("it was ready for something else".into());
        }
        group.iter().for_each(|at| self.mark_serving(*at));
        self.plan_join(id);
        for at in group {
            // One that leaves may have been given up meanwhile.
            let Some(runtime) = self.runtimes.get_mut(&at) else { continue };
            // One that is to share a process serves when that runs.
            let serves = matches!(runtime.state, State::Serving { .. }) && runtime.pause.is_none();
            if let Some(first) = runtime.first.take_if(|_| serves) {
                // The server may have given up already.
                let _ = first.send(FirstStart::Result(runtime.spec.service.name.clone(), Ok(())));
            }
        }
        Ok(())
    }

    fn mark_serving(&mut self, id: u64) {
        let fabric = self.fabric.clone();
        let runtime = self.runtime(id);
        let (State::Starting { socket, .. }, Some(region)) = (&runtime.state, &runtime.region)
        else {
            unreachable!("all that go together are as far")
        };
        let socket = socket.clone();
        let monitor =
            HeartbeatMonitor::new(runtime.heartbeat(), region.words.accelerator_heartbeat());
        runtime.state = State::Serving { socket, since: Instant::now(), monitor };
        runtime.spec.metrics.begin(runtime.generation);
        let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
        let started = || RuntimeEvent::Started { service, accelerator };
        fabric.post_to_all(|_| ControlMessage::Runtime(started()));
        let RuntimeMetrics { service, accelerator, .. } = &*runtime.spec.metrics;
        tracing::info!(service, accelerator, generation = runtime.generation, "a runtime serves");
        (runtime.regrouping, runtime.lost_at_start) = (false, false);
    }

    /// A life ends, or does not come to begin, and with it those that go with it.
    fn end_group(&mut self, id: u64, cause: EndCause) {
        let group = self.group(id);
        if group.len() > 1 && matches!(self.runtimes[&id].state, State::Starting { .. }) {
            self.on_group_start_failed(&group, &cause);
        }
        for at in group {
            self.end_generation(at, cause.clone());
        }
    }

    /// Requests get their reason, the process goes, the seat gets the next life's region.
    fn end_generation(&mut self, id: u64, cause: EndCause) {
        let fabric = self.fabric.clone();
        let runtime = self.runtime(id);
        let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
        let before = std::mem::replace(&mut runtime.state, State::Vacant);
        let mut lasted = Duration::ZERO;
        if let State::Serving { since, .. } = &before {
            lasted = since.elapsed();
            let reason = cause.reason;
            let ended = || RuntimeEvent::Ended { service, accelerator, reason };
            fabric.post_to_all(|_| ControlMessage::Runtime(ended()));
        }
        runtime.spec.metrics.end(runtime.generation, cause.label);
        runtime.process = 0;
        if let State::Serving { socket, .. } | State::Starting { socket, .. } = &before {
            // Blocks that still run somewhere hear of it in the region, their process by the connection's end.
            if let Some(region) = &runtime.region {
                region.words.set_stop(stop::NOW);
                region.link.ring();
            }
            socket.shut_down();
        }
        let planned = cause.reason == DropReason::Reconfiguring;
        let next_try = (!runtime.retiring).then(|| runtime.next_back_off(lasted, planned));
        runtime.next_try = next_try.map(|pause| Instant::now() + pause);
        let RuntimeMetrics { service, accelerator, .. } = &*runtime.spec.metrics;
        let next_try_ms = next_try.map(|pause| pause.as_millis());
        let (generation, text) = (runtime.generation, &cause.text);
        tracing::warn!(service, accelerator, generation, next_try_ms, "a runtime ended: {text}");
        (runtime.regrouping, runtime.pause) = (planned, None);
        let regrouping = runtime.regrouping;
        if let Some(first) = runtime.first.take_if(|_| !regrouping) {
            let _ =
                first.send(FirstStart::Result(runtime.spec.service.name.clone(), Err(cause.text)));
        }
        let (launched, retiring, device) =
            (runtime.is_launched(), runtime.retiring, runtime.exclusive_key());
        if let Some(mut child) = runtime.child.take() {
            // It may have ended already.
            let _ = child.kill();
            self.killed.push(KilledProcess { child, device, until: Instant::now() + STOP_TIMEOUT });
        }
        // Whoever was offered the region may have written into it; before that it is as good as new.
        if !matches!(before, State::Vacant | State::Expected { .. }) {
            self.retire_region(id);
            // Who changes processes gets its region when it is its turn: somebody may wait for one that leaves.
            if launched && !retiring && !regrouping {
                self.prepare_region(id);
            }
        }
    }

    /// Lets go of the region of a life that ended.
    fn retire_region(&mut self, id: u64) {
        let runtime = self.runtime(id);
        let inherited = std::mem::take(&mut runtime.inherited);
        let Some(region) = runtime.region.take() else { return };
        self.retired.extend(inherited.into_iter().chain([region]).map(|region| region.memory));
    }

    /// Makes the region of a seat's next life and gives it to the workers.
    fn prepare_region(&mut self, id: u64) {
        let (fabric, heartbeat_writer) = (self.fabric.clone(), self.heartbeat_writer.clone());
        let runtime = self.runtime(id);
        runtime.generation = runtime.spec.metrics.next_generation();
        match RuntimeRegion::make(&runtime.spec, runtime.generation, &heartbeat_writer) {
            Ok((region, shares)) => {
                runtime.region = Some(region);
                if runtime.is_launched() && runtime.next_try.is_none() {
                    runtime.next_try = Some(Instant::now());
                }
                let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
                for (worker, attachment) in shares.into_iter().enumerate() {
                    let replaced = RuntimeEvent::RingsReplaced { service, accelerator, attachment };
                    fabric.post(worker as u16, ControlMessage::Runtime(replaced));
                }
            }
            Err(error) => {
                let RuntimeMetrics { service, accelerator, .. } = &*runtime.spec.metrics;
                tracing::error!(service, accelerator, "the next runtime's region: {error}");
                runtime.next_try = Some(Instant::now() + MEMORY_RETRY_INTERVAL);
            }
        }
    }

    /// The engine ends: every runtime is asked to, then made to.
    fn shutdown(&mut self) {
        self.handshakes.close();
        // Whoever was to begin anew or to leave ends with all others, and once.
        self.regroups.clear();
        for runtime in self.runtimes.values_mut() {
            runtime.begin_stop(None);
        }
        let deadline = Instant::now() + 2 * STOP_TIMEOUT;
        self.check_all();
        while !self.runtimes.is_empty() && Instant::now() < deadline {
            self.wait_and_dispatch();
            self.check_all();
        }
        let children = self.runtimes.values_mut().filter_map(|runtime| runtime.child.take());
        let killed = self.killed.drain(..).map(|killed| killed.child);
        let mut children: Vec<Child> = children.chain(killed).collect();
        for child in &mut children {
            // It may have ended already.
            let _ = child.kill();
        }
        wait_for_exits(&mut children, 2 * STOP_TIMEOUT);
        for child in children {
            let process = child.id();
            tracing::warn!(
                process,
                "a runtime was killed and has not ended: it is left to the host kernel"
            );
        }
    }
}

/// Waits until all of these processes have ended, at most for `limit`; those that have not are left in the list. One
/// that was killed ends when the host kernel lets it, which a driver may put off for as long as it likes.
fn wait_for_exits(children: &mut Vec<Child>, limit: Duration) {
    let deadline = Instant::now() + limit;
    loop {
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        if children.is_empty() || Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
