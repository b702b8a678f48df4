//! The copy agent: copies between a region's staging and the memory of an accelerator, as the engine commands.
//!
//! The engine cannot reach an accelerator's own memory, and the kernels are persistent, so the runtime copies. One thread of
//! the runtime ([`CopyThread`]) polls the command rings of its regions. Every number of a command is checked on a private copy before memory
//! is touched; a wrong number produces an error status. A [`Copier`] moves the bytes: the processor for blocks on host cores ([`HostCopier`]),
//! the copy engines for a GPU (`cuda/copier.rs`). While blocks run, the agent neither allocates nor synchronises.
//!
//! Blocks in the engine's own process need no ring: [`DirectCommands`] executes a command when it is submitted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use engine::commands::{Buffers, Command, Commands, Completion, Outcome, SubmitError};
use mqueue::abi::command_status;
use mqueue::command::{BufferRange, CommandReceiver, Copy, Direction, Done, Request};
use mqueue::{HeapMapping, LoanError, MappedMemory, Memory, Region};

use crate::AccelError;
use crate::cpu::Clock;

/// Size of the buffer that a runtime registers for copies.
pub const BUFFER_BYTES: usize = 64 << 10;
/// The address of a buffer on host cores, which have no address space of an accelerator.
pub const HOST_ADDRESS: u64 = 1 << 40;
/// A copy that has not ended after this time has failed.
const COPY_NS_MAX: u64 = 5_000_000_000;
/// An idle thread polls without pauses for this time, ...
const SPIN_NS: u64 = 50_000;
/// ... then with pauses that double from the minimum to the maximum.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// A thread that has not ended this long after it was stopped hangs in its copier.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The accelerator or its driver failed; copies are no longer possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFailed;

/// Moves bytes between a region and the registered buffers of an accelerator. One copy at a time.
pub trait Copier: Send {
    /// The addresses of the buffer with this number, where the accelerator's code finds it; `None` for an unknown number.
    fn buffer(&self, buffer: u32) -> Option<BufferRange>;

    /// Starts a copy whose numbers were checked. `staging_offset` is the offset of the staging in the region. Must not wait.
    fn begin(&mut self, copy: &Copy, staging_offset: u64) -> Result<(), CopyFailed>;

    /// Whether the copy has ended. Must not wait.
    fn is_done(&mut self) -> Result<bool, CopyFailed>;
}

/// Copies by the processor, to and from one buffer in this process.
pub struct HostCopier {
    region: MappedMemory,
    buffer: MappedMemory,
}

impl HostCopier {
    /// With a buffer of `bytes`, which is number 0.
    pub fn new(region: MappedMemory, bytes: usize) -> Self {
        Self { region, buffer: HeapMapping::memory(bytes) }
    }
}

impl Copier for HostCopier {
    fn buffer(&self, buffer: u32) -> Option<BufferRange> {
        let range = BufferRange { address: HOST_ADDRESS, bytes: self.buffer.len_bytes() };
        (buffer == 0).then_some(range)
    }

    fn begin(&mut self, copy: &Copy, staging_offset: u64) -> Result<(), CopyFailed> {
        let (near, far) = (staging_offset + copy.staging_offset, copy.buffer_offset);
        match copy.direction {
            Direction::ToBuffer => self.buffer.copy_from(far, &self.region, near, copy.bytes),
            Direction::FromBuffer => self.region.copy_from(near, &self.buffer, far, copy.bytes),
        }
        Ok(())
    }

    fn is_done(&mut self) -> Result<bool, CopyFailed> {
        Ok(true)
    }
}

/// The runtime's side of one pair of command rings.
pub struct CopyAgent {
    receiver: CommandReceiver<MappedMemory>,
    staging: (u64, u64),
    copier: Box<dyn Copier>,
    /// Number of the command in progress, and its deadline.
    in_progress: Option<(u64, u64)>,
    /// A completion for which the ring had no room.
    pending: Option<Done>,
    /// The copier failed: no further copy is started.
    failed: bool,
    /// The engine made the rings unusable.
    unusable: bool,
}

impl CopyAgent {
    /// Joins a region and takes the runtime's ends of its first pair of command rings; `None` if there is none.
    pub fn join(
        memory: &MappedMemory,
        copier: Box<dyn Copier>,
    ) -> Result<Option<Self>, AccelError> {
        let mut region = Region::join(memory.clone())?;
        if region.command_rings() == 0 {
            return Ok(None);
        }
        let (receiver, staging) = (region.command_receiver(0), region.staging(0));
        Ok(Some(Self {
            receiver,
            staging,
            copier,
            in_progress: None,
            pending: None,
            failed: false,
            unusable: false,
        }))
    }

    /// Continues the copy in progress, or starts the next command. Returns whether there was progress. Never waits.
    pub fn step(&mut self, now_ns: u64) -> bool {
        if self.unusable {
            return false;
        }
        if let Some(done) = self.pending {
            return self.complete(done);
        }
        if let Some((number, deadline_ns)) = self.in_progress {
            let status = match self.copier.is_done() {
                Ok(true) => command_status::OK,
                Ok(false) if now_ns < deadline_ns => return false,
                Ok(false) => command_status::TIMEOUT,
                Err(CopyFailed) => command_status::FAILED,
            };
            self.in_progress = None;
            // A copy that did not end may still use the buffer.
            self.failed = status != command_status::OK;
            return self.complete(Done::of(number, status));
        }
        match self.receiver.command() {
            Ok(None) => false,
            Ok(Some((number, Ok(Request::Copy(copy))))) => match self.begin(&copy) {
                Ok(()) => {
                    self.in_progress = Some((number, now_ns.saturating_add(COPY_NS_MAX)));
                    true
                }
                Err(status) => self.complete(Done::of(number, status)),
            },
            Ok(Some((number, Ok(Request::Describe(buffer))))) => {
                let range = self.copier.buffer(buffer);
                let status =
                    if range.is_some() { command_status::OK } else { command_status::RANGE };
                self.complete(Done { number, status, range })
            }
            Ok(Some((number, Err(status)))) => self.complete(Done::of(number, status)),
            Err(_) => self.give_up(),
        }
    }

    /// Whether a copy is in progress.
    fn is_busy(&self) -> bool {
        self.in_progress.is_some()
    }

    fn begin(&mut self, copy: &Copy) -> Result<(), u8> {
        if self.failed {
            return Err(command_status::FAILED);
        }
        let begun = begin(&mut *self.copier, copy, self.staging);
        self.failed = begun == Err(command_status::FAILED);
        begun
    }

    /// The engine wrote impossible words: its rings are not read again.
    fn give_up(&mut self) -> bool {
        tracing::warn!("the copy agent ends: its command rings contain impossible words");
        self.unusable = true;
        false
    }

    fn complete(&mut self, done: Done) -> bool {
        self.pending = None;
        match self.receiver.complete(&done) {
            Ok(()) => true,
            Err(LoanError::Full) => {
                self.pending = Some(done);
                false
            }
            Err(LoanError::TooLong | LoanError::Corrupt) => self.give_up(),
        }
    }
}

/// Starts a copy if it stays inside staging and buffer. The error is the status of the command.
fn begin(copier: &mut dyn Copier, copy: &Copy, (offset, bytes): (u64, u64)) -> Result<(), u8> {
    let buffer = copier.buffer(copy.buffer).ok_or(command_status::RANGE)?;
    if !copy.fits(bytes, buffer.bytes) {
        return Err(command_status::RANGE);
    }
    copier.begin(copy, offset).map_err(|CopyFailed| command_status::FAILED)
}

/// The thread that runs the copy agents of a runtime. It is stopped when this is dropped.
pub struct CopyThread {
    stop: Arc<AtomicBool>,
    join: Option<JoinHandle<()>>,
}

impl CopyThread {
    /// Starts it for those of the agents that exist. Services are served without an agent that cannot start.
    pub fn serve(
        agents: impl IntoIterator<Item = Result<Option<CopyAgent>, AccelError>>,
    ) -> Option<Self> {
        let warn = |error: &AccelError| tracing::warn!("there is no copy agent: {error}");
        let agents = agents.into_iter().filter_map(|agent| agent.inspect_err(warn).ok().flatten());
        let agents: Vec<CopyAgent> = agents.collect();
        if agents.is_empty() { None } else { Self::start(agents).inspect_err(warn).ok() }
    }

    /// Starts it.
    pub fn start(mut agents: Vec<CopyAgent>) -> Result<Self, AccelError> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let join = thread::Builder::new()
            .name("copy-agent".into())
            .spawn(move || run(&mut agents, &stopped))
            .map_err(|error| AccelError::Os { what: "start the copy agent", error })?;
        Ok(Self { stop, join: Some(join) })
    }

    /// Stops it. Returns whether it has ended within `timeout`. Otherwise it is abandoned, with the agents: what their copiers use but do
    /// not own must not be released.
    #[must_use]
    pub fn stop(mut self, timeout: Duration) -> bool {
        self.end(timeout)
    }

    fn end(&mut self, timeout: Duration) -> bool {
        let Some(join) = self.join.take() else { return true };
        self.stop.store(true, Ordering::Relaxed);
        join.thread().unpark();
        let deadline = Instant::now() + timeout;
        while !join.is_finished() {
            if Instant::now() >= deadline {
                tracing::warn!("the copy agent hangs in a copy and is abandoned");
                return false;
            }
            thread::sleep(PAUSE_MIN);
        }
        // A panic of the agent affects only the agent; the blocks continue.
        let _ = join.join();
        true
    }
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        self.end(STOP_TIMEOUT);
    }
}

fn run(agents: &mut [CopyAgent], stop: &AtomicBool) {
    let (mut idle_since_ns, mut pause) = (None, PAUSE_MIN);
    while !stop.load(Ordering::Relaxed) {
        let now_ns = Clock::Monotonic.now();
        let steps = agents.iter_mut().filter_map(|agent| agent.step(now_ns).then_some(())).count();
        if steps > 0 {
            (idle_since_ns, pause) = (None, PAUSE_MIN);
            continue;
        }
        if now_ns - *idle_since_ns.get_or_insert(now_ns) < SPIN_NS {
            thread::yield_now();
            continue;
        }
        thread::park_timeout(pause);
        let busy = agents.iter().any(CopyAgent::is_busy);
        pause = if busy { PAUSE_MIN } else { (2 * pause).min(PAUSE_MAX) };
    }
}

/// Commands to an accelerator in this process: executed when they are submitted.
pub struct DirectCommands<C> {
    copier: C,
    staging: (u64, u64),
    buffers: Buffers,
    done: Vec<Completion>,
    last_number: u64,
}

impl<C: Copier> DirectCommands<C> {
    /// The staging is its offset in the region and its size.
    pub fn new(copier: C, staging: (u64, u64)) -> Self {
        Self { copier, staging, buffers: Buffers::default(), done: Vec::new(), last_number: 0 }
    }

    fn copy(&mut self, copy: &Copy) -> Outcome {
        match begin(&mut self.copier, copy, self.staging) {
            Ok(()) if self.copier.is_done() == Ok(true) => Outcome::Done,
            Err(command_status::RANGE) => Outcome::Range,
            _ => Outcome::Failed,
        }
    }
}

impl<C: Copier> Commands for DirectCommands<C> {
    fn submit(&mut self, ring: u32, command: &Command, _: u64) -> Result<u64, SubmitError> {
        if ring != 0 {
            return Err(SubmitError::Unusable);
        }
        if self.done.len() == engine::commands::COMMANDS_IN_FLIGHT as usize {
            return Err(SubmitError::Full);
        }
        let outcome = match command {
            Command::Copy(copy) => self.copy(copy),
            Command::CopyAt(copy) => {
                let copies: Vec<Copy> = self.buffers.copies(0, self.staging.1, copy)?.collect();
                let mut outcomes = copies.iter().map(|copy| self.copy(copy));
                outcomes.find(|outcome| *outcome != Outcome::Done).unwrap_or(Outcome::Done)
            }
            Command::Describe(buffer) => match self.copier.buffer(*buffer) {
                Some(range) if self.buffers.register(0, *buffer, range).is_ok() => Outcome::Done,
                _ => Outcome::Range,
            },
        };
        self.last_number += 1;
        self.done.push(Completion { number: self.last_number, outcome });
        Ok(self.last_number)
    }

    fn poll(&mut self, _: u64, done: &mut Vec<Completion>, budget: usize) {
        done.extend(self.done.drain(..budget.min(self.done.len())));
    }
}
