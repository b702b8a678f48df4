//! The control side of accelerators whose blocks run in processes of their own: one thread that starts
//! runtimes or lets them attach, watches them, and gives their place to the next one when they end.
//!
//! A *seat* is the place of one runtime: one accelerator of one service. It always has the region of
//! the life that runs or comes next; what workers have to know of it they are told as [`LifeNews`].
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

mod seat;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::metrics::AcceleratorLives;
use engine::topology::{AcceleratorKind, Launch, Topology};
use engine::{Fabric, LifeNews};
use mqueue::abi::{ABI_VERSION, state, stop};
use sys::SharedMemory;
use sys::local::{Bell, LocalError, LocalListener, LocalSocket, wait_readable};
use sys::socket_nic::AcceptedSocket;
use wire::DropReason;
use wire::attach::{FromEngine, FromRuntime, Hello, MESSAGE_BYTES_MAX, Offer, Ready};

use super::heart::Heart;
use super::lobby::{Arrived, Lobby, check_user};
use crate::runtime::Pulse;
use seat::{Ending, Seat, State, absolute, word_of};
pub(super) use seat::{Life, SeatStart};

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

/// What the thread is told.
struct Call {
    bell: Bell,
    draining: AtomicBool,
    stop: AtomicBool,
}

/// Runs until it is dropped, which must be after the workers have ended.
pub(super) struct Runtimes {
    call: Arc<Call>,
    thread: Option<JoinHandle<()>>,
    /// What became of the first runtime of each seat whose runtimes the engine starts.
    first: mpsc::Receiver<(usize, Result<(), String>)>,
    launched: usize,
}

/// Why runtimes are not waited for any more.
pub(super) enum Unready {
    /// That of this service does not serve, and why.
    Failed(usize, String),
    Cancelled,
}

/// The paths where runtimes attach, open; nobody is let in before [`Runtimes::start`].
pub(super) struct AttachDoors(Vec<(Door, LocalListener)>);

impl AttachDoors {
    pub(super) fn open(topology: &Topology) -> Result<Self, LocalError> {
        let mut doors = Vec::new();
        for (index, accelerator) in topology.accelerators.iter().enumerate() {
            if let AcceleratorKind::Process { launch: Launch::External { attach }, .. } =
                &accelerator.kind
            {
                doors.push((Door::Accelerator(index), LocalListener::bind(attach)?));
            }
        }
        Ok(Self(doors))
    }
}

/// Processes that share a GPU wait for each other's turns on it, which last for milliseconds.
fn warn_of_shared_gpus(seats: &[Seat], topology: &Topology) {
    let mut by_gpu: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for seat in seats.iter().filter(|seat| seat.is_launched()) {
        if let Some(gpu) = seat.gpu {
            by_gpu.entry(gpu).or_default().push(&topology.services[seat.service].name);
        }
    }
    for (gpu, services) in by_gpu.into_iter().filter(|(_, services)| services.len() > 1) {
        let services = services.join(", ");
        tracing::warn!(
            gpu,
            services,
            "these services share a GPU: it gives each turns of milliseconds; give each a GPU of its own"
        );
    }
}

impl Runtimes {
    /// Starts the thread; `None` when there is nothing for it to do.
    pub(super) fn start(
        doors: AttachDoors,
        seats: Vec<SeatStart>,
        topology: Arc<Topology>,
        fabric: Arc<Fabric<AcceptedSocket>>,
        heart: Arc<Heart>,
        lives: &[Arc<AcceleratorLives>],
    ) -> std::io::Result<Option<Self>> {
        if seats.is_empty() && doors.0.is_empty() {
            return Ok(None);
        }
        let call = Arc::new(Call {
            bell: Bell::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let (tell_first, first) = mpsc::channel();
        let seats: Vec<Seat> =
            seats.into_iter().zip(lives).map(|(s, l)| Seat::new(s, l.clone(), &topology)).collect();
        let launched = seats.iter().filter(|seat| seat.is_launched()).count();
        warn_of_shared_gpus(&seats, &topology);
        let mut desk = Desk {
            lobby: Lobby::new(doors.0, MESSAGE_BYTES_MAX),
            seats,
            topology,
            fabric,
            heart,
            call: call.clone(),
            leaving: Vec::new(),
            dying: Vec::new(),
            tell_first,
        };
        let builder = std::thread::Builder::new().name("serval-runtimes".into());
        let thread = builder.spawn(move || desk.run())?;
        Ok(Some(Self { call, thread: Some(thread), first, launched }))
    }

    /// Waits until every runtime that the engine starts serves, or until `cancelled` says so.
    pub(super) fn wait_ready(
        &mut self,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), Unready> {
        let mut deadline = Instant::now() + 2 * START_PATIENCE;
        while self.launched > 0 {
            match self.first.recv_timeout(WANTED_PAUSE) {
                Ok((_, Ok(()))) => {
                    self.launched -= 1;
                    deadline = Instant::now() + 2 * START_PATIENCE;
                }
                Ok((service, Err(why))) => return Err(Unready::Failed(service, why)),
                Err(_) if cancelled() => return Err(Unready::Cancelled),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(_) => {
                    let why = "its runtime gives no sign of life".to_owned();
                    return Err(Unready::Failed(0, why));
                }
            }
        }
        Ok(())
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
#[derive(Clone, Copy)]
enum Door {
    /// By the path of an accelerator.
    Accelerator(usize),
    /// As the process that was started for a seat, and how many were before it.
    Seat(usize, u64),
}

/// The thread's state.
struct Desk {
    lobby: Lobby<Door>,
    seats: Vec<Seat>,
    topology: Arc<Topology>,
    fabric: Arc<Fabric<AcceptedSocket>>,
    heart: Arc<Heart>,
    call: Arc<Call>,
    /// Regions of lives that ended, until the workers have let go of them.
    leaving: Vec<Arc<SharedMemory>>,
    /// Processes that were killed, until they are gone.
    dying: Vec<Child>,
    tell_first: mpsc::Sender<(usize, Result<(), String>)>,
}

impl Desk {
    fn run(&mut self) {
        while !self.call.stop.load(Ordering::Relaxed) {
            if self.draining() {
                self.lobby.close();
            }
            self.wait_and_see();
        }
        self.say_goodbye();
    }

    fn draining(&self) -> bool {
        self.call.draining.load(Ordering::Relaxed)
    }

    fn wait_and_see(&mut self) {
        // Unmaps those that nobody else holds any more.
        self.leaving.retain(|memory| Arc::strong_count(memory) > 1);
        self.dying.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        for seat in 0..self.seats.len() {
            self.look_after(seat);
        }
        let mut files: Vec<BorrowedFd<'_>> = vec![self.call.bell.as_fd()];
        let spoken: Vec<usize> =
            (0..self.seats.len()).filter(|i| self.seats[*i].socket().is_some()).collect();
        files.extend(self.seats.iter().filter_map(|s| Some(s.socket()?.as_fd())));
        files.extend(self.lobby.files());
        let leaving = !self.leaving.is_empty() || !self.dying.is_empty();
        let pause = leaving.then(|| Instant::now() + LEAVING_PAUSE);
        let due =
            self.seats.iter().filter_map(Seat::due).chain(self.lobby.until()).chain(pause).min();
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
    fn look_after(&mut self, index: usize) {
        let now = Instant::now();
        let draining = self.draining();
        let seat = &mut self.seats[index];
        if seat.next_try.is_some_and(|due| due <= now) {
            seat.next_try = None;
            if seat.life.is_none() {
                self.prepare(index);
            } else if !draining {
                self.launch(index);
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
                    let ms = seat.heartbeat.as_millis();
                    let reason = DropReason::AcceleratorStalled;
                    Ending { word: "stalled", reason, text: format!("it stood still for {ms} ms") }
                } else if let Some(block) =
                    (0..life.blocks).find(|b| life.words.block_state(*b) == state::ENDED)
                {
                    let why = word_of(life.words.block(block).reason);
                    Ending::lost(why, format!("block {block} ended ({why})"))
                } else {
                    return;
                }
            }
            _ => return,
        };
        self.end(index, ending);
    }

    /// Starts a seat's process.
    fn launch(&mut self, index: usize) {
        match self.seats[index].launch() {
            Ok((socket, until)) => {
                let door = Door::Seat(index, self.seats[index].launches);
                self.lobby.expect(door, socket, until);
            }
            Err(error) => {
                let text = format!("its process cannot be started: {error}");
                self.end(index, Ending::lost("not_started", text));
            }
        }
    }

    /// Somebody said hello.
    fn meet(&mut self, arrived: Arrived<Door>) {
        let Arrived { door, socket, hello } = arrived;
        if let Door::Seat(index, launch) = door {
            let seat = &self.seats[index];
            if launch != seat.launches || !matches!(seat.state, State::Expected { .. }) {
                // Of a process that was given up.
                return;
            }
            if hello.is_empty() {
                let text = self.seats[index].exit_text();
                return self.end(index, Ending::lost("lost", text));
            }
        } else if hello.is_empty() {
            return;
        }
        let offered = check_user(&socket).and_then(|()| {
            let hello = match FromRuntime::decode(&hello) {
                Ok(FromRuntime::Hello(hello)) => hello,
                Ok(_) => return Err("a runtime says hello first".to_owned()),
                Err(error) => return Err(error.to_string()),
            };
            if hello.abi_version != ABI_VERSION {
                let theirs = hello.abi_version;
                return Err(format!(
                    "the engine speaks region ABI {ABI_VERSION}, the runtime {theirs}: use matching builds"
                ));
            }
            let index = match door {
                Door::Seat(index, _) => index,
                Door::Accelerator(accelerator) => self.choose(accelerator, &hello)?,
            };
            Ok((index, hello))
        });
        match offered {
            Ok((index, hello)) => self.offer(index, socket, &hello),
            Err(why) => {
                tracing::warn!(why, "a runtime is refused");
                // If it does not listen to the answer it has gone already.
                let _ = socket.send(&FromEngine::Refuse(why.clone()).encode(), &[]);
                if let Door::Seat(index, _) = door {
                    self.end(index, Ending::lost("refused", why));
                }
            }
        }
    }

    /// The seat for a runtime that came by the path of an accelerator; why there is none.
    fn choose(&self, accelerator: usize, hello: &Hello) -> Result<usize, String> {
        let name = &self.topology.accelerators[accelerator].name;
        let service_of = |seat: &Seat| &self.topology.services[seat.service];
        let of_it: Vec<(usize, &Seat)> =
            self.seats.iter().enumerate().filter(|(_, s)| s.accelerator == accelerator).collect();
        if of_it.is_empty() {
            return Err(format!("no service uses accelerator {name:?}"));
        }
        let kernel_of = |seat: &Seat| service_of(seat).kernel_on(seat.place);
        let list = |of: &dyn Fn(&Seat) -> String| {
            of_it.iter().map(|(_, seat)| of(seat)).collect::<Vec<_>>().join(", ")
        };
        let services = || list(&|seat| service_of(seat).name.clone());
        let wanted =
            |seat: &Seat| hello.service.is_empty() || service_of(seat).name == hello.service;
        let mut fitting = of_it.iter().filter(|(_, seat)| wanted(seat)).peekable();
        if fitting.peek().is_none() {
            let (wish, known) = (&hello.service, services());
            return Err(format!("accelerator {name:?} has no service {wish:?}: it has {known}"));
        }
        let runs = |seat: &Seat| hello.kernel.is_empty() || kernel_of(seat) == hello.kernel;
        let mut fitting = fitting.filter(|(_, seat)| runs(seat)).peekable();
        if fitting.peek().is_none() {
            let (wish, known) = (&hello.kernel, list(&|seat| kernel_of(seat).to_owned()));
            return Err(format!(
                "no service of accelerator {name:?} runs kernel {wish:?}: they run {known}"
            ));
        }
        let free = |seat: &Seat| matches!(seat.state, State::Vacant) && seat.life.is_some();
        let fitting: Vec<_> = fitting.collect();
        let found = fitting.iter().find(|(_, seat)| free(seat)).map(|(index, _)| *index);
        let soon = fitting.iter().any(|(_, seat)| matches!(seat.state, State::Vacant));
        found.ok_or_else(|| match services() {
            _ if soon => {
                format!(
                    "a runtime of accelerator {name:?} has just ended: its place is free again soon"
                )
            }
            services => {
                format!("accelerator {name:?} has a runtime for each of its services: {services}")
            }
        })
    }

    fn offer(&mut self, index: usize, socket: LocalSocket, hello: &Hello) {
        let seat = &mut self.seats[index];
        let service = &self.topology.services[seat.service];
        let accelerator = self.topology.accelerators[seat.accelerator].name.clone();
        let Some(life) = &seat.life else {
            return self.end(index, Ending::lost("no_memory", "there is no memory for its region"));
        };
        let offer = Offer {
            generation: life.generation,
            region_bytes: life.memory.len_bytes() as u64,
            blocks: life.blocks,
            heartbeat_ms: seat.heartbeat.as_millis() as u32,
            service: service.name.clone(),
            accelerator,
            kernel: absolute(service.kernel_on(seat.place)),
            params: service.params.clone(),
        };
        let Hello { kind, process, .. } = hello;
        tracing::debug!(
            kind,
            process,
            service = service.name,
            generation = life.generation,
            "a runtime attaches"
        );
        let descriptors = [life.memory.fd(), life.bell.as_fd()];
        let sent = socket.send(&FromEngine::Offer(offer).encode(), &descriptors);
        seat.state = State::Starting { socket, until: Instant::now() + START_PATIENCE };
        if let Err(error) = sent {
            self.end(index, Ending::lost("lost", format!("it did not take its offer: {error}")));
        }
    }

    /// A runtime said something, or its connection has ended.
    fn hear(&mut self, index: usize) {
        let seat = &mut self.seats[index];
        let Some(socket) = seat.socket() else { return };
        let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
        let len = match socket.receive(&mut bytes) {
            Ok(None) => return,
            Ok(Some(len)) => len,
            Err(_) => 0,
        };
        if len == 0 {
            let text = self.seats[index].exit_text();
            return self.end(index, Ending::lost("lost", text));
        }
        let ending = match FromRuntime::decode(&bytes[..len]) {
            Ok(FromRuntime::Ready(ready)) => match self.begin(index, ready) {
                Ok(()) => return,
                Err(text) => Ending::lost("protocol", text),
            },
            Ok(FromRuntime::Bye(bye)) => {
                let word = word_of(bye.reason);
                let text = if bye.text.is_empty() { word.to_owned() } else { bye.text };
                Ending::lost(word, text)
            }
            Ok(FromRuntime::Hello(_)) => Ending::lost("protocol", "it said hello twice"),
            Err(error) => Ending::lost("protocol", error.to_string()),
        };
        self.end(index, ending);
    }

    /// The blocks of a seat run.
    fn begin(&mut self, index: usize, ready: Ready) -> Result<(), String> {
        let seat = &mut self.seats[index];
        let Some(life) = &seat.life else { return Err("it has no region".into()) };
        let vacant = State::Vacant;
        let socket = match std::mem::replace(&mut seat.state, vacant) {
            State::Starting { socket, .. }
                if (ready.generation, ready.blocks) == (life.generation, life.blocks) =>
            {
                socket
            }
            other => {
                seat.state = other;
                return Err("it was ready for something else".into());
            }
        };
        let pulse = Pulse::new(seat.heartbeat, life.words.accelerator_heartbeat());
        seat.state = State::Serving { socket, since: Instant::now(), pulse };
        seat.told.begin(seat.generation);
        let (service, accelerator) = (seat.service as u16, seat.place as u16);
        for worker in 0..self.fabric.workers() as u16 {
            self.fabric.tell_life(worker, LifeNews::Began { service, accelerator });
        }
        let AcceleratorLives { service, accelerator, .. } = &*seat.told;
        tracing::info!(service, accelerator, generation = seat.generation, "a runtime serves");
        if std::mem::take(&mut seat.first) {
            // The server may have given up already.
            let _ = self.tell_first.send((seat.service, Ok(())));
        }
        Ok(())
    }

    /// A life ends, or does not come to begin: requests get their reason, the process goes, the seat gets
    /// the next life's region.
    fn end(&mut self, index: usize, ending: Ending) {
        let workers = self.fabric.workers() as u16;
        let seat = &mut self.seats[index];
        let (service, accelerator) = (seat.service as u16, seat.place as u16);
        let before = std::mem::replace(&mut seat.state, State::Vacant);
        let mut lasted = Duration::ZERO;
        if let State::Serving { since, .. } = &before {
            lasted = since.elapsed();
            let reason = ending.reason;
            for worker in 0..workers {
                let news = LifeNews::Ended { service, accelerator, reason };
                self.fabric.tell_life(worker, news);
            }
        }
        seat.told.end(ending.word);
        if let State::Serving { socket, .. } | State::Starting { socket, .. } = &before {
            // Blocks that still run somewhere hear of it in the region, their process by the connection's end.
            if let Some(life) = &seat.life {
                life.words.set_stop(stop::NOW);
                life.link.ring();
            }
            socket.shut_down();
        }
        if let Some(mut child) = seat.child.take() {
            // It may have ended already.
            let _ = child.kill();
            self.dying.push(child);
        }
        seat.next_try = Some(Instant::now() + seat.pause(lasted));
        let AcceleratorLives { service, accelerator, .. } = &*seat.told;
        let next_try_ms =
            seat.next_try.map(|at| at.saturating_duration_since(Instant::now()).as_millis());
        let (generation, text) = (seat.generation, &ending.text);
        tracing::warn!(service, accelerator, generation, next_try_ms, "a runtime ended: {text}");
        if std::mem::take(&mut seat.first) {
            let _ = self.tell_first.send((seat.service, Err(ending.text)));
        }
        // Whoever was offered the region may have written into it; before that it is as good as new.
        if !matches!(before, State::Vacant | State::Expected { .. }) {
            self.retire(index);
            if self.seats[index].is_launched() {
                self.prepare(index);
            }
        }
    }

    /// Lets go of the region of a life that ended.
    fn retire(&mut self, index: usize) {
        let Some(life) = self.seats[index].life.take() else { return };
        self.heart.remove(life.beat);
        self.leaving.push(life.memory);
        self.seats[index].generation += 1;
    }

    /// Makes the region of a seat's next life and gives it to the workers.
    fn prepare(&mut self, index: usize) {
        let seat = &mut self.seats[index];
        let of = (seat.service, seat.place);
        match Life::make(&self.topology, of, seat.generation, &self.heart) {
            Ok((life, shares)) => {
                seat.life = Some(life);
                if seat.is_launched() && seat.next_try.is_none() {
                    seat.next_try = Some(Instant::now());
                }
                let (service, accelerator) = (seat.service as u16, seat.place as u16);
                for (worker, attachment) in shares.into_iter().enumerate() {
                    let news = LifeNews::Next { service, accelerator, attachment };
                    self.fabric.tell_life(worker as u16, news);
                }
            }
            Err(error) => {
                let AcceleratorLives { service, accelerator, .. } = &*seat.told;
                tracing::error!(service, accelerator, "the next runtime's region: {error}");
                seat.next_try = Some(Instant::now() + MEMORY_PAUSE);
            }
        }
    }

    /// The engine ends: every runtime is asked to, then made to.
    fn say_goodbye(&mut self) {
        self.lobby.close();
        let drain_ms = GOODBYE_PATIENCE.as_millis() as u32 / 2;
        for seat in &self.seats {
            if let (Some(socket), Some(life)) = (seat.socket(), &seat.life) {
                life.words.set_stop(stop::DRAIN);
                life.link.ring();
                // It may be gone.
                let _ = socket.send(&FromEngine::Stop { drain_ms }.encode(), &[]);
            }
        }
        let deadline = Instant::now() + GOODBYE_PATIENCE;
        let mut waiting: VecDeque<&mut Seat> = self.seats.iter_mut().collect();
        while let Some(seat) = waiting.pop_front() {
            let gone = match (&mut seat.child, &seat.state) {
                (Some(child), _) => !matches!(child.try_wait(), Ok(None)),
                (None, State::Serving { socket, .. } | State::Starting { socket, .. }) => {
                    let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
                    matches!(socket.receive(&mut bytes), Ok(Some(_)) | Err(_))
                }
                (None, _) => true,
            };
            if gone {
                continue;
            }
            if Instant::now() >= deadline {
                let AcceleratorLives { service, accelerator, .. } = &*seat.told;
                tracing::warn!(service, accelerator, "a runtime did not end when it was told to");
                continue;
            }
            waiting.push_back(seat);
            std::thread::sleep(Duration::from_millis(1));
        }
        let children = self.seats.iter_mut().filter_map(|seat| seat.child.take());
        for mut child in children.chain(self.dying.drain(..)) {
            // What was killed ends as soon as the host kernel lets it.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
