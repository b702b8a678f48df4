//! Checks whether a runtime's copy agent answers: once per generation, a few bytes are copied to the accelerator's buffer and back.
//!
//! A runtime without a copy agent (a program that attaches with an accelerator of its own) can still serve. One that writes
//! impossible words into its command rings cannot: its generation ends.

use std::time::{Duration, Instant};

use engine::commands::{
    Command, CommandRings, Commands, Completion, Outcome, SubmitError, WINDOW_BYTES,
};
use engine::metrics::RuntimeMetrics;
use mqueue::command::{Copy, Direction};
use mqueue::{MappedMemory, Memory};

/// Bytes that are copied; the window has room for them twice.
const PROBE_BYTES: usize = 256;
const _: () = assert!(2 * PROBE_BYTES as u64 <= WINDOW_BYTES);
/// Time limit of each copy.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The probe of one generation's region.
pub(in crate::server) struct CopyProbe {
    rings: CommandRings,
    memory: MappedMemory,
    /// Offset of the window in the region.
    window: u64,
    started: Instant,
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The runtime does not serve yet, or the probe has ended.
    Idle,
    ToBuffer,
    FromBuffer,
    /// The ring did not take a copy.
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
    pub(in crate::server) fn new(rings: CommandRings, memory: MappedMemory, window: u64) -> Self {
        Self { rings, memory, window, started: Instant::now(), step: Step::Idle }
    }

    /// The runtime serves: starts the first copy.
    pub(super) fn begin(&mut self) {
        self.started = Instant::now();
        self.memory.copy_in(self.window, &pattern());
        self.memory.copy_in(self.window + PROBE_BYTES as u64, &[0; PROBE_BYTES]);
        self.submit(Step::ToBuffer, Direction::ToBuffer, 0);
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
                });
            }
            Step::ToBuffer | Step::FromBuffer => {}
        }
        let mut done = Vec::new();
        self.rings.poll(self.now_ns(), &mut done, 1);
        let &Completion { outcome, .. } = done.first()?;
        if outcome == Outcome::Done && self.step == Step::ToBuffer {
            self.submit(Step::FromBuffer, Direction::FromBuffer, PROBE_BYTES as u64);
            return None;
        }
        self.step = Step::Idle;
        Some(match outcome {
            Outcome::Done if self.matches_pattern() => Ok(()),
            Outcome::Done => no_agent("the copied bytes differ"),
            Outcome::Timeout => no_agent("it did not complete a copy in time"),
            Outcome::Lost => Err(Failed::Corrupt),
            Outcome::Range | Outcome::Unknown => no_agent("it refused a copy"),
            Outcome::Failed => no_agent("a copy failed"),
        })
    }

    fn submit(&mut self, step: Step, direction: Direction, window_offset: u64) {
        let bytes = PROBE_BYTES as u64;
        let copy = Copy { direction, window_offset, buffer: 0, buffer_offset: 0, bytes };
        let deadline_ns = self.now_ns() + TIMEOUT.as_nanos() as u64;
        let submitted = self.rings.submit(0, &Command::Copy(copy), deadline_ns);
        self.step = submitted.map_or_else(Step::NotSubmitted, |_| step);
    }

    fn matches_pattern(&self) -> bool {
        let mut back = [0; PROBE_BYTES];
        self.memory.copy_out(self.window + PROBE_BYTES as u64, &mut back);
        back == pattern()
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

fn pattern() -> [u8; PROBE_BYTES] {
    std::array::from_fn(|at| (at as u8).wrapping_mul(37) ^ 0xa5)
}
