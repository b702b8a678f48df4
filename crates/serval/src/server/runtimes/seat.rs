//! Seats: the places of runtimes, their lives' regions, and the processes that the engine starts for them.

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel::process::{RemoteBlocks, RemoteLink};
use accel::reason_name;
use engine::Attachment;
use engine::metrics::AcceleratorLives;
use engine::topology::{AcceleratorKind, Launch, Topology};
use mqueue::abi::reason;
use mqueue::{MappedMemory, Words};
use sys::SharedMemory;
use sys::local::{Bell, BellPull, LocalSocket};
use wire::DropReason;

use super::START_PATIENCE;
use crate::runtime::Pulse;
use crate::server::heart::Heart;
use crate::server::{MadeRegion, make_region};

/// The pause before a runtime is started again; it doubles …
const BACK_OFF_MIN: Duration = Duration::from_millis(100);
/// … up to this …
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// … or this, where nobody has to start a process for it …
const BACK_OFF_EXTERNAL_MAX: Duration = Duration::from_secs(1);
/// … and begins anew after a life that lasted this long.
const LASTING: Duration = Duration::from_secs(10);
/// Most time between two looks at a life's words.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// How long an exit status is waited for.
const STATUS_PAUSE: Duration = Duration::from_millis(100);

/// One life's region and what belongs to it.
pub(in crate::server) struct Life {
    pub(super) generation: u64,
    pub(super) memory: Arc<SharedMemory>,
    pub(super) words: Words<MappedMemory>,
    pub(super) link: Arc<RemoteLink>,
    /// Goes with the offer.
    pub(super) bell: Bell,
    pub(super) blocks: u32,
    /// Its number with the heart.
    pub(super) beat: u64,
}

impl Life {
    /// Makes the region of a life; the accelerator is named by its place in the service's list. The second
    /// part has each worker's share.
    pub(in crate::server) fn make(
        topology: &Topology,
        (service, place): (usize, usize),
        generation: u64,
        heart: &Heart,
    ) -> Result<(Self, Vec<Attachment>), sys::MemoryError> {
        let service = &topology.services[service];
        let accelerator = &topology.accelerators[service.accelerators[place]].name;
        let workers = topology.engine.workers;
        let MadeRegion { memory, words, ends } =
            make_region(service, (place, accelerator), generation, workers)?;
        let (pull, bell) = BellPull::new().map_err(|source| sys::MemoryError::Host {
            call: "socketpair for the region",
            len_bytes: memory.len_bytes(),
            source,
        })?;
        let link = RemoteLink::new(move || pull.ring());
        let per_block = 1 + service.backends.len() as u32;
        let share = |ends: Vec<engine::BlockEnds>| {
            let own = ends.iter().map(|e| e.block);
            let blocks = RemoteBlocks::new(words.clone(), own, per_block, link.clone());
            Attachment { blocks: Box::new(blocks), ends }
        };
        let shares = ends.into_iter().map(share).collect();
        let beat = heart.add(words.clone());
        let blocks = service.mqueues_on(place);
        Ok((Self { generation, memory, words, link, bell, blocks, beat }, shares))
    }
}

/// A seat as the server prepared it.
pub(in crate::server) struct SeatStart {
    pub(in crate::server) service: usize,
    /// The accelerator's place in the service's list.
    pub(in crate::server) place: usize,
    pub(in crate::server) accelerator: usize,
    pub(in crate::server) life: Life,
}

/// Where a seat stands; see the text of [`super`].
pub(super) enum State {
    Vacant,
    /// Its process was started and has not said hello.
    Expected {
        until: Instant,
    },
    Starting {
        socket: LocalSocket,
        until: Instant,
    },
    Serving {
        socket: LocalSocket,
        since: Instant,
        pulse: Pulse,
    },
}

/// The place of one runtime; see the text of [`super`].
pub(super) struct Seat {
    pub(super) service: usize,
    pub(super) place: usize,
    pub(super) accelerator: usize,
    pub(super) launch: Launch,
    pub(super) gpu: Option<u32>,
    pub(super) heartbeat: Duration,
    pub(super) generation: u64,
    /// Of `generation`; `None` while there is no memory for it.
    pub(super) life: Option<Life>,
    pub(super) state: State,
    pub(super) child: Option<Child>,
    /// Processes that were started for it.
    pub(super) launches: u64,
    /// When to start a process, or to make the next life's region.
    pub(super) next_try: Option<Instant>,
    pub(super) back_off: Duration,
    pub(super) told: Arc<AcceleratorLives>,
    /// Whether the first start is still waited for.
    pub(super) first: bool,
}

impl Seat {
    pub(super) fn new(start: SeatStart, told: Arc<AcceleratorLives>, topology: &Topology) -> Self {
        let SeatStart { service, place, accelerator, life } = start;
        let AcceleratorKind::Process { launch, heartbeat_ms, gpu } =
            topology.accelerators[accelerator].kind.clone()
        else {
            unreachable!("seats are of accelerators whose blocks run elsewhere")
        };
        let launched = matches!(launch, Launch::Engine { .. });
        Self {
            service,
            place,
            accelerator,
            launch,
            gpu,
            heartbeat: Duration::from_millis(heartbeat_ms),
            generation: life.generation,
            life: Some(life),
            state: State::Vacant,
            child: None,
            launches: 0,
            next_try: launched.then(Instant::now),
            back_off: BACK_OFF_MIN,
            told,
            first: launched,
        }
    }

    pub(super) fn is_launched(&self) -> bool {
        matches!(self.launch, Launch::Engine { .. })
    }

    pub(super) fn socket(&self) -> Option<&LocalSocket> {
        match &self.state {
            State::Starting { socket, .. } | State::Serving { socket, .. } => Some(socket),
            _ => None,
        }
    }

    /// When something is due.
    pub(super) fn due(&self) -> Option<Instant> {
        let step = match &self.state {
            State::Vacant => None,
            State::Expected { until } | State::Starting { until, .. } => Some(*until),
            State::Serving { .. } => Some(Instant::now() + (self.heartbeat / 4).min(LOOK_PAUSE)),
        };
        step.into_iter().chain(self.next_try).min()
    }

    /// Starts its process; returns the way to it, and how long it may take to say hello.
    pub(super) fn launch(&mut self) -> std::io::Result<(LocalSocket, Instant)> {
        let Launch::Engine { program, threads, cores } = &self.launch else {
            unreachable!("only these are started by the engine")
        };
        let (ours, theirs) = LocalSocket::pair()?;
        // Through the link even a program that was replaced meanwhile starts as itself.
        let own = Path::new("/proc/self/exe");
        let mut command = Command::new(program.as_deref().unwrap_or(own));
        command.args(["attach", "--inherited"]);
        if *threads > 0 {
            command.args(["--threads", &threads.to_string()]);
        }
        if let Some(gpu) = self.gpu {
            command.args(["--gpu", &gpu.to_string()]);
        }
        if !cores.is_empty() {
            let cores: Vec<String> = cores.iter().map(usize::to_string).collect();
            command.args(["--cores", &cores.join(",")]);
        }
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        self.child = Some(command.spawn()?);
        self.launches += 1;
        let until = Instant::now() + START_PATIENCE;
        self.state = State::Expected { until };
        Ok((ours, until))
    }

    /// The life that was served, if one was, is over: how long to wait until the next one.
    pub(super) fn pause(&mut self, lasted: Duration) -> Duration {
        if lasted >= LASTING {
            self.back_off = BACK_OFF_MIN;
        }
        let pause = self.back_off;
        let max = if self.is_launched() { BACK_OFF_MAX } else { BACK_OFF_EXTERNAL_MAX };
        self.back_off = (2 * pause).min(max);
        pause
    }

    /// How a process that closed its connection without a word ended.
    pub(super) fn exit_text(&mut self) -> String {
        let deadline = Instant::now() + STATUS_PAUSE;
        let Some(child) = &mut self.child else {
            return "it closed its connection".into();
        };
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return status_text(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => return "it closed its connection".into(),
            }
        }
    }
}

/// Why a life ended.
pub(super) struct Ending {
    /// In a word, for metrics.
    pub(super) word: &'static str,
    /// For requests that were with it.
    pub(super) reason: DropReason,
    /// For people.
    pub(super) text: String,
}

impl Ending {
    pub(super) fn lost(word: &'static str, text: impl Into<String>) -> Self {
        Self { word, reason: DropReason::AcceleratorLost, text: text.into() }
    }
}

/// A kernel as a process with another working directory finds it.
pub(super) fn absolute(kernel: &str) -> String {
    if !kernel.contains('/') {
        return kernel.to_owned();
    }
    let path = std::path::absolute(kernel);
    path.map_or_else(|_| kernel.to_owned(), |path| path.to_string_lossy().into_owned())
}

/// A reason of the region ABI in a word, for metrics.
pub(super) fn word_of(reason: u64) -> &'static str {
    match reason {
        reason::STOPPED => "stopped",
        reason::ENGINE_LOST => "engine_lost",
        reason::RING_CORRUPT => "ring_corrupt",
        reason::CONTRACT => "contract",
        other => reason_name(other),
    }
}

pub(super) fn status_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("its process ended with code {code}"),
        (None, Some(signal)) => format!("its process was killed by signal {signal}"),
        (None, None) => "its process ended".into(),
    }
}
