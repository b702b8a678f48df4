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
//! *Seats come and go with services* ([`Runtimes::seat`], [`Runtimes::change_doors`], [`Runtimes::leave`]). One whose service is about to leave
//! serves on until everything is answered, and has no next life; then its runtime is asked to end.

mod seat;
mod talk;
#[cfg(test)]
mod tests;
mod together;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::metrics::AcceleratorLives;
use engine::topology::{AcceleratorKind, Launch, Service, Topology};
use engine::{ControlMessage, RuntimeEvent};
use mqueue::abi::{state, stop};
use sys::SharedMemory;
use sys::local::{Bell, LocalError, LocalListener, wait_readable};
use wire::DropReason;
use wire::attach::{MESSAGE_BYTES_MAX, Ready, TOGETHER_MAX};

use super::ServerFabric;
use super::heart::Heart;
use super::lobby::Lobby;
use runtime::Pulse;
use seat::{Ending, First, Life, Seat, State, warn_of_shared_devices, word_of};
pub(super) use seat::{Post, SeatStart};
use together::Move;

/// How long a runtime that the engine started may take to say hello, and any runtime to get its blocks ready.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// How long to wait until memory is tried for again.
const MEMORY_PAUSE: Duration = Duration::from_secs(1);
/// How often to look at what has no descriptor: processes that end, regions that workers let go of.
const LEAVING_PAUSE: Duration = Duration::from_millis(10);
/// How often to ask whether the start is still wanted.
const WANTED_PAUSE: Duration = Duration::from_millis(20);
/// How long runtimes may take to end when the engine does.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(1);

/// How long the others are waited for when one has failed: those of one process have told by then.
const OTHERS_PATIENCE: Duration = Duration::from_secs(1);

/// Why a runtime of which nothing was heard does not serve.
pub(super) const SILENT: &str = "its runtime gives no sign of life";
/// Why one does not that others' failure let nobody wait for.
const STILL_STARTING: &str = "its runtime was still starting when another's had failed";

/// What the thread is told.
struct Call {
    bell: Bell,
    draining: AtomicBool,
    stop: AtomicBool,
    orders: Mutex<Vec<Order>>,
}

/// How seats and doors change.
enum Order {
    /// These come, each with who hears of its first start. Whether it is certain that they stay.
    Seat(Vec<(SeatStart, Sender<First>)>, bool),
    /// These doors are open from now on, and the seats in these slots have no next life;
    /// all others stay.
    ChangeDoors {
        names: Vec<(PathBuf, Arc<str>)>,
        new: AttachDoors,
        users: Vec<(String, String)>,
        leaving: Vec<u16>,
        drain: Duration,
    },
    /// The seats in this slot are given up; what comes along is dropped when they are gone.
    Leave(u16, Sender<()>),
    /// Who hears of the next start of those that change processes.
    Tell(Sender<First>),
}

/// Runs until it is dropped, which must be after the workers have ended.
pub(super) struct Runtimes {
    call: Arc<Call>,
    thread: Option<JoinHandle<()>>,
}

/// Why runtimes are not waited for any more.
pub(super) enum Unready {
    /// Those of these services do not serve, and why; in the order in which they told, one at least.
    Failed(Vec<(String, String)>),
    /// Those of these services have not told in time what became of them.
    Silent(Vec<String>),
    Cancelled,
}

impl Unready {
    /// By service why its runtime does not serve; of nobody if they are not wanted any more.
    pub(super) fn reasons(self) -> Vec<(String, String)> {
        match self {
            Self::Failed(reasons) => reasons,
            Self::Silent(services) => with_reason(services, SILENT).collect(),
            Self::Cancelled => Vec::new(),
        }
    }
}

fn with_reason(services: Vec<String>, why: &str) -> impl Iterator<Item = (String, String)> {
    services.into_iter().map(move |service| (service, why.to_owned()))
}

/// The paths where runtimes attach, open, with the names of their accelerators.
#[derive(Default)]
pub(super) struct AttachDoors(Vec<(Door, LocalListener)>);

impl AttachDoors {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of `wanted` that `running` does not have.
    pub(super) fn open(wanted: &Topology, running: Option<&Topology>) -> Result<Self, LocalError> {
        let mut doors = Vec::new();
        for (path, name) in attach_paths(wanted) {
            if !running.is_some_and(|running| attach_paths(running).any(|(of, _)| of == path)) {
                doors.push((Door::Accelerator(name.into()), LocalListener::bind(path)?));
            }
        }
        Ok(Self(doors))
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
fn users(topology: &Topology) -> Vec<(String, String)> {
    let of = |service: &Service| {
        let names = service.accelerators.iter().map(|index| &topology.accelerators[*index].name);
        names.map(|name| (name.clone(), service.name.clone())).collect::<Vec<_>>()
    };
    topology.services.iter().flat_map(of).collect()
}

/// Runtimes that the engine starts, on their way.
pub(super) struct Awaited {
    first: Receiver<First>,
    /// Most time between two signs of life.
    patience: Duration,
}

impl Awaited {
    /// Waits until each of them serves, or until `cancelled` says so. When one has failed, the others are given a moment
    /// to tell their own reasons.
    pub(super) fn wait(self, cancelled: &mut dyn FnMut() -> bool) -> Result<(), Unready> {
        let mut deadline = Instant::now() + self.patience;
        let mut silent: Vec<String> = Vec::new();
        let mut failed: Vec<(String, String)> = Vec::new();
        loop {
            match self.first.recv_timeout(WANTED_PAUSE) {
                Ok(First::Awaited(service)) => silent.push(service),
                Ok(First::Told(service, told)) => {
                    silent.iter().position(|name| *name == service).map(|at| silent.remove(at));
                    match told {
                        Ok(()) if failed.is_empty() => deadline = Instant::now() + self.patience,
                        Ok(()) => {}
                        Err(why) => {
                            deadline = deadline.min(Instant::now() + OTHERS_PATIENCE);
                            failed.push((service, why));
                        }
                    }
                }
                // Each has told.
                Err(RecvTimeoutError::Disconnected) if failed.is_empty() => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(Unready::Failed(failed)),
                Err(RecvTimeoutError::Timeout) if cancelled() => return Err(Unready::Cancelled),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    silent.dedup();
                    if failed.is_empty() {
                        return Err(Unready::Silent(silent));
                    }
                    failed.extend(with_reason(silent, STILL_STARTING));
                    return Err(Unready::Failed(failed));
                }
            }
        }
    }
}

impl Runtimes {
    /// Starts the thread; it has neither seats nor doors.
    pub(super) fn start(fabric: Arc<ServerFabric>, heart: Arc<Heart>) -> std::io::Result<Self> {
        let call = Arc::new(Call {
            bell: Bell::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            orders: Mutex::default(),
        });
        let mut desk = Desk {
            lobby: Lobby::new(MESSAGE_BYTES_MAX),
            seats: BTreeMap::new(),
            seated: 0,
            users: Vec::new(),
            fabric,
            heart,
            call: call.clone(),
            leaving: Vec::new(),
            dying: Vec::new(),
            processes: 0,
            moves: Vec::new(),
            drain: Duration::ZERO,
        };
        let builder = std::thread::Builder::new().name("serval-runtimes".into());
        let thread = builder.spawn(move || desk.run())?;
        Ok(Self { call, thread: Some(thread) })
    }

    fn order(&self, order: Order) {
        self.call.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.call.bell.ring();
    }

    /// Seats come; the workers have their lanes. Those whose runtimes the engine starts are to be waited for.
    /// Seats that are not `settled` may yet be undone: they touch nobody else's process until the doors change.
    pub(super) fn seat(&self, seats: Vec<SeatStart>, settled: bool) -> Awaited {
        let (tell, first) = mpsc::channel();
        let seats = seats.into_iter().map(|seat| (seat, tell.clone())).collect();
        self.order(Order::Seat(seats, settled));
        Awaited { first, patience: 2 * START_PATIENCE }
    }

    /// Seats of several services come at once, so that those that can share a process begin in one. Whose process
    /// they are to share may be held for `drain` before.
    pub(super) fn seat_each(&self, services: Vec<Vec<SeatStart>>, drain: Duration) -> Vec<Awaited> {
        let (mut seats, mut awaited) = (Vec::new(), Vec::new());
        for service in services {
            let (tell, first) = mpsc::channel();
            seats.extend(service.into_iter().map(|seat| (seat, tell.clone())));
            awaited.push(Awaited { first, patience: 2 * START_PATIENCE + drain });
        }
        self.order(Order::Seat(seats, true));
        awaited
    }

    /// Those that change processes, until they serve again. They may be held for `drain` before.
    pub(super) fn moving(&self, drain: Duration) -> Awaited {
        let (tell, first) = mpsc::channel();
        self.order(Order::Tell(tell));
        Awaited { first, patience: 2 * START_PATIENCE + drain }
    }

    /// From now on runtimes attach where `wanted` says: `new` doors open, those it does not name close. The seats
    /// in the slots `leaving` have no next life.
    pub(super) fn change_doors(&self, wanted: &Topology, new: AttachDoors, leaving: Vec<u16>) {
        let names = attach_paths(wanted).map(|(path, name)| (path.to_owned(), name.into()));
        let (names, users) = (names.collect(), users(wanted));
        let drain = Duration::from_millis(wanted.engine.drain_ms);
        self.order(Order::ChangeDoors { names, new, users, leaving, drain });
    }

    /// Ends the runtimes of the service in a slot, which has nothing left for them. Returns whether all of
    /// them are gone; who shares their process may be held for `drain` before.
    pub(super) fn leave(&self, slot: u16, drain: Duration, give_up: &dyn Fn() -> bool) -> bool {
        let (tell, gone) = mpsc::channel();
        self.order(Order::Leave(slot, tell));
        let deadline = Instant::now() + 2 * GOODBYE_PATIENCE + Duration::from_secs(1) + drain;
        while Instant::now() < deadline {
            match gone.recv_timeout(WANTED_PAUSE) {
                Err(RecvTimeoutError::Disconnected) => return true,
                _ if give_up() => return false,
                _ => {}
            }
        }
        false
    }

    /// No runtime is let in or started any more; those that serve go on.
    pub(super) fn drain(&self) {
        self.call.draining.store(true, Ordering::Relaxed);
        self.call.bell.ring();
    }
}

impl Drop for Runtimes {
    fn drop(&mut self) {
        self.call.stop.store(true, Ordering::Relaxed);
        self.call.bell.ring();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

/// How somebody came in.
#[derive(Clone)]
enum Door {
    /// By the path of the accelerator of this name.
    Accelerator(Arc<str>),
    /// As the process of this number, which was started for a seat.
    Seat(u64, u64),
}

/// A process that was killed.
struct Dying {
    child: Child,
    /// What it has until it is gone …
    device: Option<String>,
    /// … or until it is not waited for any more.
    until: Instant,
}

/// The thread's state.
struct Desk {
    lobby: Lobby<Door>,
    /// By number, in the order in which they came.
    seats: BTreeMap<u64, Seat>,
    /// How many there have been.
    seated: u64,
    /// See [`users`]; of the topology that runs.
    users: Vec<(String, String)>,
    fabric: Arc<ServerFabric>,
    heart: Arc<Heart>,
    call: Arc<Call>,
    /// Regions of lives that ended, until the workers have let go of them.
    leaving: Vec<Arc<SharedMemory>>,
    /// Processes that were killed, until they are gone.
    dying: Vec<Dying>,
    /// Processes that were started.
    processes: u64,
    /// Planned ends of lives that wait until what was accepted has been answered …
    moves: Vec<Move>,
    /// … and for no longer than this.
    drain: Duration,
}

impl Desk {
    fn run(&mut self) {
        while !self.call.stop.load(Ordering::Relaxed) {
            if self.draining() {
                self.lobby.close();
            }
            self.obey();
            self.look_after_all();
            self.wait_and_see();
        }
        self.say_goodbye();
    }

    /// Does what was ordered, in order.
    fn obey(&mut self) {
        let orders =
            std::mem::take(&mut *self.call.orders.lock().unwrap_or_else(PoisonError::into_inner));
        for order in orders {
            match order {
                Order::Seat(starts, settled) => {
                    for (start, first) in starts {
                        self.seated += 1;
                        self.seats.insert(self.seated, Seat::new(start, &first, settled));
                        if settled {
                            self.try_together_again(self.seated);
                        }
                    }
                    warn_of_shared_devices(&self.seats);
                }
                Order::ChangeDoors { names, new, users, leaving, drain } => {
                    (self.users, self.drain) = (users, drain);
                    let name = |path: &Path| {
                        let found = names.iter().find(|(of, _)| of == path)?;
                        Some(Door::Accelerator(found.1.clone()))
                    };
                    self.lobby.change_doors(name, new.0);
                    for seat in self.seats.values_mut().filter(|s| leaving.contains(&s.post.slot)) {
                        (seat.last, seat.next_try) = (true, None);
                    }
                    self.settle();
                }
                Order::Leave(slot, gone) => self.leave(slot, gone),
                Order::Tell(tell) => {
                    self.move_on();
                    let moves = |s: &&mut Seat| (s.moving || s.hold.is_some()) && !s.last;
                    for seat in self.seats.values_mut().filter(moves) {
                        if seat.first.is_none() {
                            seat.is_awaited(&tell);
                        }
                    }
                }
            }
        }
    }

    fn seat(&mut self, id: u64) -> &mut Seat {
        self.seats.get_mut(&id).expect("only seats that are there are named")
    }

    fn draining(&self) -> bool {
        self.call.draining.load(Ordering::Relaxed)
    }

    /// What is due by time.
    fn look_after_all(&mut self) {
        // Unmaps those that nobody else holds any more.
        self.leaving.retain(|memory| Arc::strong_count(memory) > 1);
        self.dying.retain_mut(|dying| matches!(dying.child.try_wait(), Ok(None)));
        // First who leaves: it is waited for, and making the regions of others takes its time.
        for id in self.seats.keys().copied().collect::<Vec<_>>() {
            if self.seat(id).has_left() {
                self.remove(id);
            }
        }
        self.move_on();
        for id in self.seats.keys().copied().collect::<Vec<_>>() {
            self.look_after(id);
        }
    }

    fn wait_and_see(&mut self) {
        let mut files: Vec<BorrowedFd<'_>> = vec![self.call.bell.as_fd()];
        let spoken = self.seats.iter().filter(|(_, seat)| seat.socket().is_some());
        let spoken: Vec<u64> = spoken.map(|(id, _)| *id).collect();
        files.extend(self.seats.values().filter_map(|s| Some(s.socket()?.as_fd())));
        files.extend(self.lobby.files());
        let leaving = !self.leaving.is_empty() || !self.dying.is_empty() || !self.moves.is_empty();
        let pause = leaving.then(|| Instant::now() + LEAVING_PAUSE);
        let due =
            self.seats.values().filter_map(Seat::due).chain(self.lobby.until()).chain(pause).min();
        let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
        let ready = wait_readable(&files, timeout);
        let (bell, rest) = ready.split_at(1);
        let (seats, lobby) = rest.split_at(spoken.len());
        if bell[0] {
            self.call.bell.silence();
        }
        for (seat, _) in spoken.into_iter().zip(seats).filter(|(_, ready)| **ready) {
            self.hear(seat);
        }
        for arrived in self.lobby.look(lobby) {
            self.meet(arrived);
        }
    }

    /// What is due for a seat by time.
    fn look_after(&mut self, id: u64) {
        let now = Instant::now();
        let draining = self.draining();
        let due = self.seats[&id].next_try.is_some_and(|due| due <= now);
        let held = due && (self.device_is_held(id) || self.others_come_along(id));
        let seat = self.seat(id);
        if due {
            seat.next_try = held.then(|| now + LEAVING_PAUSE);
            if held {
                return;
            }
            if seat.life.is_none() {
                self.prepare(id);
            } else if !draining && seat.is_launched() && matches!(seat.state, State::Vacant) {
                self.launch(id);
            }
            return;
        }
        let seconds = START_PATIENCE.as_secs();
        let ending = match &mut seat.state {
            State::Expected { until } if now >= *until => {
                Ending::lost("silent", format!("it did not say hello within {seconds} s"))
            }
            State::Starting { until, .. } if now >= *until => {
                Ending::lost("silent", format!("its blocks were not ready within {seconds} s"))
            }
            State::Serving { pulse, .. } => {
                let Some(life) = &seat.life else { return };
                if life.link.condemned() {
                    Ending::lost("ring_corrupt", "it wrote impossible words into its region")
                } else if pulse.lost(life.words.accelerator_heartbeat()) {
                    let ms = seat.post.launch().1.as_millis();
                    let reason = DropReason::AcceleratorStalled;
                    let text = format!("it stood still for {ms} ms");
                    Ending { word: "stalled", reason, text, told: false }
                } else if let Some(block) =
                    (0..seat.post.blocks()).find(|b| life.words.block_state(*b) == state::ENDED)
                {
                    let why = word_of(life.words.block(block).reason);
                    Ending::lost(why, format!("block {block} ended ({why})"))
                } else {
                    return;
                }
            }
            _ => return,
        };
        self.end(id, ending);
    }

    /// A seat that was given up is empty.
    fn remove(&mut self, id: u64) {
        self.retire(id);
        // Dropping it tells who waits for that.
        self.seats.remove(&id);
    }

    /// Starts a process for a seat and for those that wait for one and go with it.
    fn launch(&mut self, id: u64) {
        self.processes += 1;
        let (process, until) = (self.processes, Instant::now() + START_PATIENCE);
        let leader = &self.seats[&id];
        let joins = |(at, seat): &(&u64, &Seat)| {
            let waits = matches!(seat.state, State::Vacant) && seat.settled == leader.settled;
            **at != id && waits && seat.goes_with(leader)
        };
        let others = self.seats.iter().filter(joins).map(|(at, _)| *at);
        let mut others: Vec<u64> = others.take(TOGETHER_MAX as usize - 1).collect();
        others.retain(|at| {
            if self.seats[at].life.is_none() {
                self.prepare(*at);
            }
            self.seats[at].life.is_some()
        });
        let all = others.iter().chain([&id]);
        let hang_ms = all.map(|at| self.seats[at].hang_ms()).max().expect("one at least");
        for at in others.into_iter().chain([id]) {
            let seat = self.seat(at);
            (seat.process, seat.next_try) = (process, None);
            seat.state = State::Expected { until };
        }
        match self.seat(id).launch(hang_ms) {
            Ok(socket) => self.lobby.expect(Door::Seat(id, process), socket, until),
            Err(error) => {
                let text = format!("its process cannot be started: {error}");
                self.end(id, Ending::lost("not_started", text));
            }
        }
    }

    /// The blocks of a seat run, and of those that go with it.
    fn begin(&mut self, id: u64, ready: Ready) -> Result<(), String> {
        let together = self.together(id);
        let starting = matches!(self.seats[&id].state, State::Starting { .. });
        let first = self.seats[&together[0]].generation;
        let blocks: u32 = together.iter().map(|at| self.seats[at].post.blocks()).sum();
        if !starting || (ready.generation, ready.blocks) != (first, blocks) {
            return Err("it was ready for something else".into());
        }
        together.iter().for_each(|at| self.begin_one(*at));
        self.bring_together(id);
        for at in together {
            // One that leaves may have been given up meanwhile.
            let Some(seat) = self.seats.get_mut(&at) else { continue };
            // One that is to share a process serves when that runs.
            let serves = matches!(seat.state, State::Serving { .. }) && seat.hold.is_none();
            if let Some(first) = seat.first.take_if(|_| serves) {
                // The server may have given up already.
                let _ = first.send(First::Told(seat.post.service.name.clone(), Ok(())));
            }
        }
        Ok(())
    }

    fn begin_one(&mut self, id: u64) {
        let fabric = self.fabric.clone();
        let seat = self.seat(id);
        let (State::Starting { socket, .. }, Some(life)) = (&seat.state, &seat.life) else {
            unreachable!("all that go together are as far")
        };
        let socket = socket.clone();
        let pulse = Pulse::new(seat.heartbeat(), life.words.accelerator_heartbeat());
        seat.state = State::Serving { socket, since: Instant::now(), pulse };
        seat.post.told.begin(seat.generation);
        let (service, accelerator) = (seat.post.slot, seat.post.place as u16);
        let started = || RuntimeEvent::Started { service, accelerator };
        fabric.post_to_all(|_| ControlMessage::Runtime(started()));
        let AcceleratorLives { service, accelerator, .. } = &*seat.post.told;
        tracing::info!(service, accelerator, generation = seat.generation, "a runtime serves");
        (seat.moving, seat.lost_at_start) = (false, false);
    }

    /// A life ends, or does not come to begin, and with it those that go with it.
    fn end(&mut self, id: u64, ending: Ending) {
        let together = self.together(id);
        if together.len() > 1 && matches!(self.seats[&id].state, State::Starting { .. }) {
            self.did_not_start(&together, &ending);
        }
        for at in together {
            self.end_one(at, ending.clone());
        }
    }

    /// Requests get their reason, the process goes, the seat gets the next life's region.
    fn end_one(&mut self, id: u64, ending: Ending) {
        let fabric = self.fabric.clone();
        let seat = self.seat(id);
        let (service, accelerator) = (seat.post.slot, seat.post.place as u16);
        let before = std::mem::replace(&mut seat.state, State::Vacant);
        let mut lasted = Duration::ZERO;
        if let State::Serving { since, .. } = &before {
            lasted = since.elapsed();
            let reason = ending.reason;
            let ended = || RuntimeEvent::Ended { service, accelerator, reason };
            fabric.post_to_all(|_| ControlMessage::Runtime(ended()));
        }
        seat.post.told.end(seat.generation, ending.word);
        seat.process = 0;
        if let State::Serving { socket, .. } | State::Starting { socket, .. } = &before {
            // Blocks that still run somewhere hear of it in the region, their process by the connection's end.
            if let Some(life) = &seat.life {
                life.words.set_stop(stop::NOW);
                life.link.ring();
            }
            socket.shut_down();
        }
        let planned = ending.reason == DropReason::Reconfiguring;
        let next_try = (!seat.last).then(|| seat.pause(lasted, planned));
        seat.next_try = next_try.map(|pause| Instant::now() + pause);
        let AcceleratorLives { service, accelerator, .. } = &*seat.post.told;
        let next_try_ms = next_try.map(|pause| pause.as_millis());
        let (generation, text) = (seat.generation, &ending.text);
        tracing::warn!(service, accelerator, generation, next_try_ms, "a runtime ended: {text}");
        (seat.moving, seat.hold) = (planned, None);
        let moving = seat.moving;
        if let Some(first) = seat.first.take_if(|_| !moving) {
            let _ = first.send(First::Told(seat.post.service.name.clone(), Err(ending.text)));
        }
        let (launched, last, device) = (seat.is_launched(), seat.last, seat.exclusive_key());
        if let Some(mut child) = seat.child.take() {
            // It may have ended already.
            let _ = child.kill();
            self.dying.push(Dying { child, device, until: Instant::now() + GOODBYE_PATIENCE });
        }
        // Whoever was offered the region may have written into it; before that it is as good as new.
        if !matches!(before, State::Vacant | State::Expected { .. }) {
            self.retire(id);
            // Who changes processes gets its region when it is its turn: somebody may wait for one that leaves.
            if launched && !last && !moving {
                self.prepare(id);
            }
        }
    }

    /// Lets go of the region of a life that ended.
    fn retire(&mut self, id: u64) {
        let seat = self.seat(id);
        let inherited = std::mem::take(&mut seat.inherited);
        let Some(life) = seat.life.take() else { return };
        self.leaving.extend(inherited.into_iter().chain([life]).map(|life| life.memory));
    }

    /// Makes the region of a seat's next life and gives it to the workers.
    fn prepare(&mut self, id: u64) {
        let (fabric, heart) = (self.fabric.clone(), self.heart.clone());
        let seat = self.seat(id);
        seat.generation = seat.post.told.next_generation();
        match Life::make(&seat.post, seat.generation, &heart) {
            Ok((life, shares)) => {
                seat.life = Some(life);
                if seat.is_launched() && seat.next_try.is_none() {
                    seat.next_try = Some(Instant::now());
                }
                let (service, accelerator) = (seat.post.slot, seat.post.place as u16);
                for (worker, attachment) in shares.into_iter().enumerate() {
                    let replaced = RuntimeEvent::RingsReplaced { service, accelerator, attachment };
                    fabric.post(worker as u16, ControlMessage::Runtime(replaced));
                }
            }
            Err(error) => {
                let AcceleratorLives { service, accelerator, .. } = &*seat.post.told;
                tracing::error!(service, accelerator, "the next runtime's region: {error}");
                seat.next_try = Some(Instant::now() + MEMORY_PAUSE);
            }
        }
    }

    /// The engine ends: every runtime is asked to, then made to.
    fn say_goodbye(&mut self) {
        self.lobby.close();
        // Whoever was to begin anew or to leave ends with all others, and once.
        self.moves.clear();
        for seat in self.seats.values_mut() {
            seat.part(None);
        }
        let deadline = Instant::now() + 2 * GOODBYE_PATIENCE;
        self.look_after_all();
        while !self.seats.is_empty() && Instant::now() < deadline {
            self.wait_and_see();
            self.look_after_all();
        }
        let children = self.seats.values_mut().filter_map(|seat| seat.child.take());
        let dying = self.dying.drain(..).map(|dying| dying.child);
        let mut children: Vec<Child> = children.chain(dying).collect();
        for child in &mut children {
            // It may have ended already.
            let _ = child.kill();
        }
        await_ends(&mut children, 2 * GOODBYE_PATIENCE);
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
fn await_ends(children: &mut Vec<Child>, limit: Duration) {
    let deadline = Instant::now() + limit;
    loop {
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        if children.is_empty() || Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(LEAVING_PAUSE);
    }
}
