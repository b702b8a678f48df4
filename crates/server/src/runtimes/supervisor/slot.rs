//! Runtime slots, the regions of their generations, and the processes that the engine starts for them.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use accel::process::{RemoteBlocks, RemoteLink};
use accel::reason_name;
use engine::metrics::RuntimeMetrics;
use engine::topology::{
    Accelerator, AcceleratorKind, Confinement, DEFAULT_TENANT, DeviceSpec, Launch, STACK_KIB,
    Service, Topology,
};
use engine::{Attachment, BlockEnds, DrainBarrier};
use mqueue::abi::{reason, stop};
use mqueue::{MappedMemory, Words};
use sys::SharedMemory;
use sys::local::LocalSocket;
use sys::process::signal_name;
use sys::readiness::{WakeFd, WakeSender};
use wire::DropReason;
use wire::attach::FromEngine;

use super::copy_probe::CopyProbe;
use super::{POLL_INTERVAL, STOP_TIMEOUT};
use crate::runtimes::heartbeat::{HeartbeatGuard, HeartbeatWriter};
use crate::runtimes::region::{MadeRegion, make_region};
use crate::transfers::ServiceTransfers;
use runtime::HeartbeatMonitor;
use runtime::kernel_file::{self, KernelFile};
use runtime::kinds::{self, Kind};

/// The back-off before a runtime is started again; it doubles …
const BACK_OFF_MIN: Duration = Duration::from_millis(100);
/// … up to this …
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// … or this, if the engine does not start the process …
const BACK_OFF_EXTERNAL_MAX: Duration = Duration::from_secs(1);
/// … and is reset after a generation that lasted this long.
const BACK_OFF_RESET_AFTER: Duration = Duration::from_secs(10);
/// Maximum time between two checks of a region's words.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// How long to wait for an exit status.
const EXIT_STATUS_TIMEOUT: Duration = Duration::from_millis(100);

/// The region of one generation and what belongs to it.
pub(crate) struct RuntimeRegion {
    pub(super) generation: u64,
    pub(super) memory: Arc<SharedMemory>,
    pub(super) words: Words<MappedMemory>,
    pub(super) link: Arc<RemoteLink>,
    /// Sent with the offer.
    pub(super) wake_fd: WakeFd,
    pub(super) probe: Option<CopyProbe>,
    /// Dropped before the region.
    _heartbeat: HeartbeatGuard,
}

/// The task of a runtime slot: one accelerator of one version of a service.
pub(crate) struct RuntimeSpec {
    /// Slot of the service on the workers.
    pub(crate) slot: u16,
    /// The accelerator's position in the service's list.
    pub(crate) position: usize,
    pub(crate) service: Service,
    pub(crate) accelerator: Accelerator,
    pub(crate) workers: usize,
    /// Its kernel file, if it has one on this machine.
    pub(crate) file: Option<Arc<KernelFile>>,
    pub(crate) metrics: Arc<RuntimeMetrics>,
    /// Of the service's tenant.
    pub(crate) confinement: Confinement,
    /// Does the transfers of its blocks, if they ask for any.
    pub(crate) transfers: Option<Arc<ServiceTransfers>>,
}

impl RuntimeSpec {
    /// Who starts its runtimes, the heartbeat limit, and the processor.
    pub(crate) fn launch(&self) -> (&Launch, Duration, &DeviceSpec) {
        let AcceleratorKind::Process { launch, heartbeat_ms, device } = &self.accelerator.kind
        else {
            unreachable!("runtime slots are for accelerators with runtimes")
        };
        (launch, Duration::from_millis(*heartbeat_ms), device)
    }

    /// The device that its runtimes use exclusively; see [`kinds::Kind::exclusive_key`].
    pub(crate) fn exclusive_key(&self) -> Option<String> {
        kinds::exclusive_key(self.launch().2)
    }

    pub(super) fn blocks(&self) -> u32 {
        self.service.mqueues_on(self.position)
    }

    pub(super) fn kernel(&self) -> &str {
        self.service.kernel_on(self.position)
    }

    /// The copy that is sent with an offer: a runtime that the engine starts runs the file that the engine has
    /// checked, even if the file was rebuilt or damaged since.
    pub(super) fn copy(&self) -> Option<BorrowedFd<'_>> {
        let launched = matches!(self.launch().0, Launch::Engine { .. });
        self.file.as_ref().filter(|_| launched).map(|file| file.copy().as_fd())
    }

    /// Whether its runtime can start only after that of the running version has ended: both need the same device, or
    /// an external runtime changes from one to the other.
    pub(crate) fn replaces(&self, running: &Topology, service: usize) -> bool {
        let (launch, key) = (self.launch().0, self.exclusive_key());
        let running_on = running.services[service].accelerators.iter();
        running_on.map(|index| &running.accelerators[*index]).any(|accelerator| {
            let AcceleratorKind::Process { launch: old, device, .. } = &accelerator.kind else {
                return false;
            };
            match (launch, old) {
                (Launch::External { .. }, Launch::External { .. }) => {
                    accelerator.name == self.accelerator.name
                }
                (Launch::Engine { .. }, Launch::Engine { .. }) => {
                    key.is_some() && key == kinds::exclusive_key(device)
                }
                _ => false,
            }
        })
    }
}

impl RuntimeRegion {
    /// Creates the region of a generation; also returns each worker's share.
    pub(crate) fn make(
        spec: &RuntimeSpec,
        generation: u64,
        heartbeat_writer: &HeartbeatWriter,
    ) -> Result<(Self, Vec<Attachment>), sys::MemoryError> {
        let RuntimeSpec { service, position, accelerator, workers, metrics, transfers, .. } = spec;
        let MadeRegion { memory, words, ends, pools, commands } = make_region(
            service,
            (*position, accelerator),
            generation,
            *workers,
            transfers.as_deref(),
        )?;
        let mapped = MappedMemory::new(memory.clone());
        let probe = commands.map(|(rings, staging)| {
            CopyProbe::new(rings.counted_in(metrics.copies.clone()), mapped, staging)
        });
        let (pull, wake_fd) = WakeSender::new().map_err(|source| sys::MemoryError::Host {
            call: "socketpair for the region",
            len_bytes: memory.len_bytes(),
            source,
        })?;
        let link = RemoteLink::new(move || pull.wake());
        let share = |(ends, pool): (Vec<BlockEnds>, _)| {
            let own = ends.iter().flat_map(BlockEnds::mqueues).collect();
            let blocks = RemoteBlocks::new(words.clone(), own, link.clone());
            Attachment { blocks: Box::new(blocks), ends, pool }
        };
        let shares = ends.into_iter().zip(pools).map(share).collect();
        let heartbeat = heartbeat_writer.add(words.clone());
        Ok((
            Self { generation, memory, words, link, wake_fd, probe, _heartbeat: heartbeat },
            shares,
        ))
    }
}

/// A runtime slot with the region of its first generation, as prepared by the server.
pub(crate) struct PreparedRuntime {
    pub(crate) spec: RuntimeSpec,
    pub(crate) region: RuntimeRegion,
}

impl PreparedRuntime {
    /// Creates the first region; also returns each worker's share.
    pub(crate) fn make(
        spec: RuntimeSpec,
        heartbeat_writer: &HeartbeatWriter,
    ) -> Result<(Self, Vec<Attachment>), sys::MemoryError> {
        // Generations of the service's previous version count as well.
        let (region, shares) =
            RuntimeRegion::make(&spec, spec.metrics.next_generation(), heartbeat_writer)?;
        Ok((Self { spec, region }, shares))
    }
}

/// The state of a runtime slot; see the documentation of [`super`].
pub(super) enum State {
    Vacant,
    /// Its process was started and has not sent its hello.
    Expected {
        until: Instant,
    },
    Starting {
        socket: Arc<LocalSocket>,
        until: Instant,
    },
    Serving {
        socket: Arc<LocalSocket>,
        since: Instant,
        monitor: HeartbeatMonitor,
    },
    /// Its runtime is asked to end, then killed; then `_stopped` is dropped.
    Stopping {
        socket: Option<Arc<LocalSocket>>,
        until: Instant,
        _stopped: Option<Sender<()>>,
    },
}

/// The first start of a runtime, with the name of its service.
pub(super) enum FirstStart {
    /// It is awaited.
    Pending(String),
    /// It serves, or why not.
    Result(String, Result<(), String>),
}

/// A planned end of a generation: its service accepts no requests meanwhile, see `engine/src/control/pause.rs`.
pub(super) struct Pause {
    /// Complete when all accepted requests have been answered.
    pub(super) barrier: DrainBarrier,
    /// The generation ends at this time in any case.
    pub(super) until: Instant,
    /// Whether the planned end is still needed.
    pub(super) wanted: bool,
}

/// One runtime; see the documentation of [`super`].
pub(super) struct RuntimeSlot {
    pub(super) spec: RuntimeSpec,
    pub(super) generation: u64,
    /// The region of `generation`; `None` while memory for it cannot be allocated.
    pub(super) region: Option<RuntimeRegion>,
    pub(super) state: State,
    pub(super) child: Option<Child>,
    /// The number of the process that was started for it; 0: none was.
    pub(super) process: u64,
    /// Starting it together with others failed; that is not tried again before one of them is added, changed or
    /// removed.
    pub(super) unshared: bool,
    /// At the last start its process was lost before it served.
    pub(super) lost_at_start: bool,
    /// When to start a process, or to create the next region.
    pub(super) next_try: Option<Instant>,
    pub(super) back_off: Duration,
    /// Where the result of the first start is reported.
    pub(super) first: Option<Sender<FirstStart>>,
    /// Its service is being removed: there is no next generation.
    pub(super) retiring: bool,
    /// The change that added it can no longer be undone.
    pub(super) committed: bool,
    /// Its generation is about to end as planned.
    pub(super) pause: Option<Pause>,
    /// It ended to start in another process, and has not started yet.
    pub(super) regrouping: bool,
    /// Regions of runtime slots that were removed; its process uses them until it ends.
    pub(super) inherited: Vec<RuntimeRegion>,
}

impl RuntimeSlot {
    /// `first` gets the result of the first start if the engine starts its runtimes.
    pub(super) fn new(start: PreparedRuntime, first: &Sender<FirstStart>, committed: bool) -> Self {
        let PreparedRuntime { spec, region } = start;
        let launched = matches!(spec.launch().0, Launch::Engine { .. });
        let mut runtime = Self {
            generation: region.generation,
            spec,
            region: Some(region),
            state: State::Vacant,
            child: None,
            process: 0,
            unshared: false,
            lost_at_start: false,
            next_try: launched.then(Instant::now),
            back_off: BACK_OFF_MIN,
            first: None,
            retiring: false,
            committed,
            pause: None,
            regrouping: false,
            inherited: Vec::new(),
        };
        if launched && !kinds::is_elsewhere(runtime.spec.launch().2) {
            runtime.report_start_to(first);
        }
        runtime
    }

    /// `first` gets the result of its next start.
    pub(super) fn report_start_to(&mut self, first: &Sender<FirstStart>) {
        // The server may have stopped waiting already.
        let _ = first.send(FirstStart::Pending(self.spec.service.name.clone()));
        self.first = Some(first.clone());
    }

    pub(super) fn is_launched(&self) -> bool {
        matches!(self.spec.launch().0, Launch::Engine { .. })
    }

    pub(super) fn exclusive_key(&self) -> Option<String> {
        self.spec.exclusive_key()
    }

    pub(super) fn heartbeat(&self) -> Duration {
        self.spec.launch().1
    }

    pub(super) fn socket(&self) -> Option<&LocalSocket> {
        match &self.state {
            State::Starting { socket, .. } | State::Serving { socket, .. } => Some(socket),
            State::Stopping { socket, .. } => socket.as_deref(),
            State::Vacant | State::Expected { .. } => None,
        }
    }

    /// When the next check is due.
    pub(super) fn due(&self) -> Option<Instant> {
        let step = match &self.state {
            State::Vacant => None,
            State::Expected { until } | State::Starting { until, .. } => Some(*until),
            State::Serving { .. } => {
                Some(Instant::now() + (self.heartbeat() / 4).min(CHECK_INTERVAL))
            }
            State::Stopping { .. } => Some(Instant::now() + POLL_INTERVAL),
        };
        step.into_iter().chain(self.next_try).min()
    }

    /// Whether one process can run both: a device such as a GPU runs processes in time slices of milliseconds, while
    /// blocks of one process run concurrently. Tenants never share a process.
    pub(super) fn can_share_process(&self, other: &Self) -> bool {
        let may = |runtime: &Self| !runtime.unshared && !runtime.retiring;
        may(self) && may(other) && self.shares_device(other)
    }

    /// Whether both use the same device for the same tenant, so that one process could run them.
    pub(super) fn shares_device(&self, other: &Self) -> bool {
        let spec = |runtime: &Self| {
            (runtime.spec.accelerator.clone(), runtime.spec.service.tenant.clone())
        };
        self.is_launched() && self.exclusive_key().is_some() && spec(self) == spec(other)
    }

    /// Time limit of its blocks for one message.
    pub(super) fn hang_ms(&self) -> u64 {
        self.spec.service.hang_ms_on(self.spec.position)
    }

    /// Starts a process for it, in which a block hangs after `hang_ms`; returns the connection to it.
    pub(super) fn launch(&mut self, hang_ms: u64) -> std::io::Result<LocalSocket> {
        let (Launch::Engine { program, threads, cores, stack_kib }, _, device) = self.spec.launch()
        else {
            unreachable!("only these are started by the engine")
        };
        let (ours, theirs) = LocalSocket::pair()?;
        // This link starts the running program even if its file has been replaced.
        let own = Path::new("/proc/self/exe");
        let mut command = Command::new(program.as_deref().unwrap_or(own));
        command.args(["attach", "--inherited", "--hang-ms", &hang_ms.to_string()]);
        if self.spec.service.tenant != DEFAULT_TENANT {
            // The kernels of tenants may run as the engine's user.
            sys::isolation::forbid_inspection()?;
            if device.kind == DeviceSpec::host().kind {
                command.arg("--isolated");
                let Confinement { user, namespaces, .. } = &self.spec.confinement;
                if !namespaces.is_empty() {
                    command.args(["--namespaces", &namespaces.join(",")]);
                }
                sys::isolation::start_without_rights(&mut command, *user, !namespaces.is_empty());
            }
        }
        if *threads > 0 {
            command.args(["--threads", &threads.to_string()]);
        }
        command.args(["--kind", device.kind]);
        for (key, value) in &device.settings {
            command.args(["--option", &format!("{key}={value}")]);
        }
        for (key, value) in &device.texts {
            command.args(["--option", &format!("{key}={value}")]);
        }
        if !cores.is_empty() {
            let cores: Vec<String> = cores.iter().map(usize::to_string).collect();
            command.args(["--cores", &cores.join(",")]);
        }
        if *stack_kib != STACK_KIB {
            command.args(["--stack-kib", &stack_kib.to_string()]);
        }
        // What its kernels print goes where the log goes; standard output may be read by a program.
        let errors = std::io::stderr().as_fd().try_clone_to_owned()?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::from(errors));
        self.child = Some(command.spawn().map_err(|error| match self.spec.confinement.user {
            Some(user) if error.kind() == ErrorKind::PermissionDenied => {
                let why = "only an engine that runs as root can start processes of other users";
                std::io::Error::new(error.kind(), format!("as user {user}: {error}; {why}"))
            }
            _ => error,
        })?);
        Ok(ours)
    }

    /// Asks the runtime to end; `gone` is dropped when it has.
    pub(super) fn begin_stop(&mut self, gone: Option<Sender<()>>) {
        let socket = match std::mem::replace(&mut self.state, State::Vacant) {
            State::Serving { socket, .. } => {
                self.spec.metrics.end(self.generation, "changed");
                Some(socket)
            }
            State::Starting { socket, .. } => Some(socket),
            State::Stopping { socket, .. } => socket,
            State::Vacant | State::Expected { .. } => None,
        };
        if let (Some(socket), Some(region)) = (&socket, &self.region) {
            for region in self.inherited.iter().chain([region]) {
                region.words.set_stop(stop::DRAIN);
                region.link.wake();
            }
            let drain_ms = STOP_TIMEOUT.as_millis() as u32 / 2;
            // It may have ended.
            let _ = socket.send(&FromEngine::Stop { drain_ms }.encode(), &[]);
        }
        self.next_try = None;
        self.state =
            State::Stopping { socket, until: Instant::now() + STOP_TIMEOUT, _stopped: gone };
    }

    /// Whether its runtime has ended after [`Self::begin_stop`]. It is killed when its time is over, or if it has no
    /// connection.
    pub(super) fn has_stopped(&mut self) -> bool {
        let State::Stopping { socket, until, .. } = &mut self.state else { return false };
        if socket.is_some() && Instant::now() >= *until {
            let RuntimeMetrics { service, accelerator, .. } = &*self.spec.metrics;
            tracing::warn!(service, accelerator, "a runtime did not end when it was asked to");
            // Blocks that still run read it in the region; their process notices the closed connection.
            if let Some(region) = &self.region {
                region.words.set_stop(stop::NOW);
                region.link.wake();
            }
            *socket = None;
        }
        match &mut self.child {
            None => socket.is_none(),
            Some(child) => {
                if socket.is_none() {
                    // It may have ended already.
                    let _ = child.kill();
                }
                !matches!(child.try_wait(), Ok(None))
            }
        }
    }

    /// The generation has ended: the time until the next one. A `planned` end does not increase the back-off.
    pub(super) fn next_back_off(&mut self, lasted: Duration, planned: bool) -> Duration {
        if planned {
            return BACK_OFF_MIN;
        }
        if lasted >= BACK_OFF_RESET_AFTER {
            self.back_off = BACK_OFF_MIN;
        }
        let pause = self.back_off;
        let max = if self.is_launched() { BACK_OFF_MAX } else { BACK_OFF_EXTERNAL_MAX };
        self.back_off = (2 * pause).min(max);
        pause
    }

    /// How a process ended that closed its connection without a message.
    pub(super) fn exit_text(&mut self) -> String {
        let deadline = Instant::now() + EXIT_STATUS_TIMEOUT;
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

/// Processes that share a device such as a GPU wait for each other's time slices, which last milliseconds.
pub(super) fn warn_of_shared_devices(runtimes: &BTreeMap<u64, RuntimeSlot>) {
    let mut by_device: BTreeMap<String, Vec<&RuntimeSlot>> = BTreeMap::new();
    for runtime in runtimes.values().filter(|runtime| runtime.is_launched() && !runtime.retiring) {
        if let Some(device) = runtime.exclusive_key() {
            by_device.entry(device).or_default().push(runtime);
        }
    }
    let apart = |runtimes: &Vec<&RuntimeSlot>| {
        runtimes.iter().any(|runtime| !runtime.can_share_process(runtimes[0]))
    };
    for (device, runtimes) in
        by_device.into_iter().filter(|(_, runtimes)| runtimes.len() > 1 && apart(runtimes))
    {
        let names = runtimes.iter().map(|runtime| runtime.spec.service.name.as_str());
        let services = names.collect::<Vec<_>>().join(", ");
        let noun =
            kinds::find(runtimes[0].spec.launch().2.kind).map_or("device", Kind::device_noun);
        tracing::warn!(
            device,
            services,
            "processes of several tenants or accelerators, or of services that did not start together, share a {noun}: \
             it gives each turns of milliseconds; give each a {noun} of its own"
        );
    }
}

/// Why a generation ended.
#[derive(Clone)]
pub(super) struct EndCause {
    /// One word, for metrics.
    pub(super) label: &'static str,
    /// For requests that were in flight.
    pub(super) reason: DropReason,
    /// One sentence for the log.
    pub(super) text: String,
    /// Whether the runtime reported it.
    pub(super) reported: bool,
}

impl EndCause {
    pub(super) fn lost(word: &'static str, text: impl Into<String>) -> Self {
        Self {
            label: word,
            reason: DropReason::AcceleratorLost,
            text: text.into(),
            reported: false,
        }
    }

    /// The runtime reported why it ends.
    pub(super) fn reported(word: &'static str, text: String) -> Self {
        Self { reported: true, ..Self::lost(word, text) }
    }

    /// The set of services that share its process changes.
    pub(super) fn reconfigured(text: &str) -> Self {
        let reason = DropReason::Reconfiguring;
        Self { label: "reconfigured", reason, text: text.to_owned(), reported: false }
    }
}

/// Whether a kernel is one of a file.
pub(super) fn names_file(kernel: &str) -> bool {
    kernel_file::named(kernel).is_some()
}

/// Whether the kernel of a service is the one that a runtime names by another path. Waits for the file systems of both.
pub(super) fn is_same_kernel(configured: &str, named: &str) -> bool {
    let file = |kernel| {
        let (path, name) = kernel_file::named(kernel)?;
        Some((path.canonicalize().ok()?, name.map(str::to_owned)))
    };
    file(configured).is_some_and(|kernel| file(named) == Some(kernel))
}

/// A kernel's path for a process with another working directory.
pub(super) fn absolute(kernel: &str) -> String {
    if !kernel.contains('/') {
        return kernel.to_owned();
    }
    let path = std::path::absolute(kernel);
    path.map_or_else(|_| kernel.to_owned(), |path| path.to_string_lossy().into_owned())
}

/// A reason of the region ABI as one word, for metrics.
pub(super) fn reason_label(reason: u64) -> &'static str {
    match reason {
        reason::STOPPED => "stopped",
        reason::ENGINE_LOST => "engine_lost",
        reason::RING_CORRUPT => "ring_corrupt",
        reason::CONTRACT => "contract",
        reason::DEVICE_FAILED => "device_failed",
        reason::LINK_LOST => "link_lost",
        other => reason_name(other),
    }
}

pub(super) fn status_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("its process ended with code {code}"),
        (None, Some(signal)) => {
            format!("its process was ended by signal {signal} ({})", signal_name(signal))
        }
        (None, None) => "its process ended".into(),
    }
}
