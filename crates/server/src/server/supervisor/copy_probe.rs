//! Checks whether a runtime's copy agent answers: once per generation, a few bytes are copied to the accelerator's buffer and back.
//!
//! A runtime without a copy agent (a program that attaches with an accelerator of its own) can still serve.

use std::time::{Duration, Instant};

use engine::commands::{Command, CommandRings, Commands, Completion, Outcome};
use engine::metrics::RuntimeMetrics;
use mqueue::command::{Copy, Direction};
use mqueue::{MappedMemory, Memory};

/// Bytes that are copied; the window has room for them twice.
const PROBE_BYTES: usize = 256;
/// Size of the window.
pub(in crate::server) const WINDOW_BYTES: u64 = 4096;
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

    /// Polls for completions, and reports the result when the probe has ended.
    pub(super) fn check(&mut self, metrics: &RuntimeMetrics, generation: u64) {
        let Some(result) = self.poll() else { return };
        let RuntimeMetrics { service, accelerator, .. } = metrics;
        match result {
            Ok(()) => metrics.copy_agent_answers(generation),
            Err(why) => {
                tracing::info!(service, accelerator, generation, "no copy agent answers: {why}");
            }
        }
    }

    /// Polls for completions. Returns the result once, when the probe has ended.
    fn poll(&mut self) -> Option<Result<(), &'static str>> {
        if self.step == Step::Idle {
            return None;
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
            Outcome::Done => self.compare(),
            Outcome::Timeout => Err("it did not complete a copy in time"),
            Outcome::Lost => Err("it wrote impossible words into its command ring"),
            Outcome::Range | Outcome::Unknown => Err("it refused a copy"),
            Outcome::Failed => Err("a copy failed"),
        })
    }

    fn submit(&mut self, step: Step, direction: Direction, window_offset: u64) {
        let bytes = PROBE_BYTES as u64;
        let copy = Copy { direction, window_offset, buffer: 0, buffer_offset: 0, bytes };
        let deadline_ns = self.now_ns() + TIMEOUT.as_nanos() as u64;
        // If the ring cannot be used, only the probe ends.
        let submitted = self.rings.submit(0, &Command::Copy(copy), deadline_ns);
        self.step = if submitted.is_ok() { step } else { Step::Idle };
    }

    fn compare(&self) -> Result<(), &'static str> {
        let mut back = [0; PROBE_BYTES];
        self.memory.copy_out(self.window + PROBE_BYTES as u64, &mut back);
        if back == pattern() { Ok(()) } else { Err("a copy came back changed") }
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

fn pattern() -> [u8; PROBE_BYTES] {
    std::array::from_fn(|at| (at as u8).wrapping_mul(37) ^ 0xa5)
}
