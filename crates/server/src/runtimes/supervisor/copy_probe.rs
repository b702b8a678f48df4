//! Checks whether a runtime's copy agent answers: once per generation, it describes its buffers, and a few bytes are copied to the end of the
//! first one and back, by address.
//!
//! A runtime without a copy agent (a program that attaches with an accelerator of its own) can still serve. One that writes
//! impossible words into its command rings cannot: its generation ends.

use std::time::{Duration, Instant};

use engine::commands::{
    AddressCopy, Command, CommandRings, Commands, Completion, Outcome, STAGING_BYTES, SubmitError,
};
use engine::metrics::RuntimeMetrics;
use mqueue::command::Direction;
use mqueue::{MappedMemory, Memory};

/// Bytes that are copied; the staging has room for them twice.
const PROBE_BYTES: usize = 256;
const _: () = assert!(2 * PROBE_BYTES as u64 <= STAGING_BYTES);
/// Further buffers of a runtime are not registered.
const BUFFERS_MAX: u32 = 16;
/// Time limit of each command.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The probe of one generation's region.
pub(crate) struct CopyProbe {
    rings: CommandRings,
    memory: MappedMemory,
    /// Offset of the staging in the region.
    staging: u64,
    started: Instant,
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The runtime does not serve yet, or the probe has ended.
    Idle,
    /// The buffer of this number is described.
    Describe(u32),
    ToBuffer,
    FromBuffer,
    /// The ring did not take a command.
    NotSubmitted(SubmitError),
}

/// Why the probe failed.
enum Failed {
    /// The command rings contain impossible words.
    Corrupt,
    /// Another cause, for which only the copy agent is unavailable.
    NoAgent(&'static str),
}

impl CopyProbe {
    pub(crate) fn new(rings: CommandRings, memory: MappedMemory, staging: u64) -> Self {
        Self { rings, memory, staging, started: Instant::now(), step: Step::Idle }
    }

    /// The runtime serves: starts the first command.
    pub(super) fn begin(&mut self) {
        self.started = Instant::now();
        self.memory.copy_in(self.staging, &pattern());
        self.memory.copy_in(self.staging + PROBE_BYTES as u64, &[0; PROBE_BYTES]);
        self.submit(Step::Describe(0), &Command::Describe(0));
    }

    /// Polls for completions, and reports the result when the probe has ended. Returns false if the command rings contain
    /// impossible words.
    pub(super) fn check(&mut self, metrics: &RuntimeMetrics, generation: u64) -> bool {
        let Some(result) = self.poll() else { return true };
        let RuntimeMetrics { service, accelerator, .. } = metrics;
        match result {
            Ok(()) => metrics.copy_agent_answers(generation),
            Err(Failed::Corrupt) => return false,
            Err(Failed::NoAgent(why)) => {
                tracing::info!(service, accelerator, generation, "no copy agent answers: {why}");
            }
        }
        true
    }

    /// Polls for completions. Returns the result once, when the probe has ended.
    fn poll(&mut self) -> Option<Result<(), Failed>> {
        let no_agent = |why| Err(Failed::NoAgent(why));
        match self.step {
            Step::Idle => return None,
            Step::NotSubmitted(error) => {
                self.step = Step::Idle;
                return Some(match error {
                    SubmitError::Unusable => Err(Failed::Corrupt),
                    SubmitError::Full => no_agent("its command ring is full"),
                    SubmitError::Refused(_) => no_agent("its first buffer is too short"),
                });
            }
            Step::Describe(_) | Step::ToBuffer | Step::FromBuffer => {}
        }
        let mut done = Vec::new();
        self.rings.poll(self.now_ns(), &mut done, 1);
        let &Completion { outcome, .. } = done.first()?;
        match (self.step, outcome) {
            (Step::Describe(n), Outcome::Done) if n + 1 < BUFFERS_MAX => {
                self.submit(Step::Describe(n + 1), &Command::Describe(n + 1));
                return None;
            }
            // The buffer before this one was the last.
            (Step::Describe(1..), Outcome::Done | Outcome::Range) => {
                self.copy(Step::ToBuffer, Direction::ToBuffer, 0);
                return None;
            }
            (Step::ToBuffer, Outcome::Done) => {
                self.copy(Step::FromBuffer, Direction::FromBuffer, PROBE_BYTES as u64);
                return None;
            }
            _ => {}
        }
        self.step = Step::Idle;
        Some(match outcome {
            Outcome::Done if self.matches_pattern() => Ok(()),
            Outcome::Done => no_agent("the copied bytes differ"),
            Outcome::Timeout => no_agent("it did not complete a command in time"),
            Outcome::Lost => Err(Failed::Corrupt),
            Outcome::Range | Outcome::Unknown => no_agent("it refused a command"),
            Outcome::Failed => no_agent("a command failed"),
        })
    }

    fn copy(&mut self, step: Step, direction: Direction, staging_offset: u64) {
        let bytes = PROBE_BYTES as u64;
        let buffer = self.rings.buffer(0, 0).expect("it was described");
        // A buffer that is too short is refused.
        let address = (buffer.address + buffer.bytes).saturating_sub(bytes);
        let copy = AddressCopy { direction, staging_offset, address, bytes };
        self.submit(step, &Command::CopyAt(copy));
    }

    fn submit(&mut self, step: Step, command: &Command) {
        let deadline_ns = self.now_ns() + TIMEOUT.as_nanos() as u64;
        let submitted = self.rings.submit(0, command, deadline_ns);
        self.step = submitted.map_or_else(Step::NotSubmitted, |_| step);
    }

    fn matches_pattern(&self) -> bool {
        let mut back = [0; PROBE_BYTES];
        self.memory.copy_out(self.staging + PROBE_BYTES as u64, &mut back);
        back == pattern()
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

fn pattern() -> [u8; PROBE_BYTES] {
    std::array::from_fn(|at| (at as u8).wrapping_mul(37) ^ 0xa5)
}
