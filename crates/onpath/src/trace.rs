//! What the next messages of a chain meet: which functions, what each decides, and how long the call took. All memory is reserved before.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wire::DropReason;

use crate::function::Direction;
use crate::messages::{Messages, Outcome};
use crate::spec::FUNCTIONS_MAX;

/// Messages of a trace, at most.
pub const TRACED_MAX: usize = 100;

/// What a function decided about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on.
    Pass,
    /// It goes on with other bytes.
    Rewrite,
    /// It goes to this mqueue.
    Steer(u32),
    /// It is answered.
    Reply,
    /// It is in the ring of an application.
    Deliver,
    /// It is dropped.
    Drop(DropReason),
}

/// A function that a message met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The id of the function's link.
    pub link: u64,
    /// What it decided.
    pub verdict: Verdict,
    /// Messages that it was shown with this one.
    pub batch: u32,
    /// How long that took, in nanoseconds.
    pub took_ns: u64,
}

/// A message of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traced {
    /// Its direction.
    pub direction: Direction,
    /// Its length when it came.
    pub bytes: u32,
    /// When the chain was shown it.
    pub at_ns: u64,
    /// The functions that it met.
    pub steps: Vec<Step>,
}

/// A message of the batch before a function is shown it.
#[derive(Clone, Copy)]
struct Before {
    index: usize,
    entry: usize,
    open: bool,
    place: (u32, u32),
    outcome: Outcome,
}

/// The next messages of a chain on one worker.
pub struct Trace {
    entries: Vec<Traced>,
    used: usize,
    recorded: Arc<AtomicUsize>,
    batch: Vec<Before>,
}

impl Trace {
    /// A trace of `count` messages, at most [`TRACED_MAX`]. It counts in `recorded` those that are complete.
    pub fn new(count: usize, recorded: Arc<AtomicUsize>) -> Self {
        let count = count.min(TRACED_MAX);
        let entry = |_| Traced {
            direction: Direction::Requests,
            bytes: 0,
            at_ns: 0,
            steps: Vec::with_capacity(FUNCTIONS_MAX),
        };
        let entries = (0..count).map(entry).collect();
        Self { entries, used: 0, recorded, batch: Vec::with_capacity(count) }
    }

    /// Whether it wants more messages.
    pub(crate) fn wants_more(&self) -> bool {
        self.used < self.entries.len()
    }

    /// A batch begins. Its first messages are traced.
    pub(crate) fn begin(&mut self, direction: Direction, messages: &Messages, now_ns: u64) {
        self.batch.clear();
        let open = (0..messages.len()).filter(|index| messages.is_open(*index));
        for index in open.take(self.entries.len() - self.used) {
            let entry = &mut self.entries[self.used];
            (entry.direction, entry.at_ns) = (direction, now_ns);
            entry.bytes = messages.bytes(index).len() as u32;
            let (place, outcome) = (messages.place(index), messages.outcome(index));
            self.batch.push(Before { index, entry: self.used, open: true, place, outcome });
            self.used += 1;
        }
    }

    /// A function has been shown the batch.
    pub(crate) fn step(&mut self, link: u64, batch: usize, took_ns: u64, messages: &Messages) {
        for before in self.batch.iter_mut().filter(|before| before.open) {
            let (place, outcome) = (messages.place(before.index), messages.outcome(before.index));
            before.open = messages.is_open(before.index);
            let verdict = match outcome {
                Outcome::Drop(reason) => Verdict::Drop(reason),
                Outcome::Reply => Verdict::Reply,
                Outcome::Deliver => Verdict::Deliver,
                Outcome::Steer(to) if outcome != before.outcome => Verdict::Steer(to),
                _ if place != before.place => Verdict::Rewrite,
                _ => Verdict::Pass,
            };
            (before.place, before.outcome) = (place, outcome);
            let steps = &mut self.entries[before.entry].steps;
            if steps.len() < FUNCTIONS_MAX {
                steps.push(Step { link, verdict, batch: batch as u32, took_ns });
            }
        }
    }

    /// The batch ends.
    pub(crate) fn end(&mut self) {
        self.recorded.store(self.used, Ordering::Release);
    }

    /// What was recorded.
    pub fn into_entries(mut self) -> Vec<Traced> {
        self.entries.truncate(self.used);
        self.entries
    }
}
