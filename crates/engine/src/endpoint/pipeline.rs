//! A stream to a server: requests in flight, and answers in the order of the requests. Connections to backends and to upstream
//! servers have this in common.
//!
//! *Time-outs.* A request that times out keeps its place, so that its late answer is recognised. A stream that has such requests, and has
//! delivered no answer in time for long ([`patience_ns`]), is *behind*, and its owner closes it: otherwise a server that never
//! answers one request would stay one answer behind.
//!
//! *Back-off.* A connection attempt that fails is repeated after [`BACK_OFF_NS_MIN`], then after twice as long each time ([`BackOff`]).

use std::collections::VecDeque;

use wire::framing::{Framing, ParseState};
use wire::nic::{Nic, StreamKey, Written};

use crate::endpoint::tcp::connection::discard_written;

const BACK_OFF_NS_MIN: u64 = 10_000_000;
const BACK_OFF_NS_MAX: u64 = 1_000_000_000;
/// A connection attempt, or a server that is behind, has at least this long.
const PATIENCE_NS_MIN: u64 = 1_000_000_000;

/// How long a connection attempt, or a server that is behind, has.
pub(crate) fn patience_ns(timeout_ns: u64) -> u64 {
    (10 * timeout_ns).max(PATIENCE_NS_MIN)
}

/// When the next connection attempt may be made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BackOff {
    retry_ns: u64,
    wait_ns: u64,
}

impl BackOff {
    /// Whether a connection may be tried.
    pub(crate) fn may_try(&self, now_ns: u64) -> bool {
        now_ns >= self.retry_ns
    }

    /// An attempt has failed: the next one waits, twice as long each time.
    pub(crate) fn failed(&mut self, now_ns: u64) {
        if !self.may_try(now_ns) {
            // Of an attempt that began before another one failed.
            return;
        }
        self.wait_ns = (2 * self.wait_ns).clamp(BACK_OFF_NS_MIN, BACK_OFF_NS_MAX);
        self.retry_ns = now_ns + self.wait_ns;
    }

    /// An attempt has succeeded.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }
}

/// The bytes and the requests of one stream. `P` is what the owner knows of a request.
#[derive(Debug)]
pub(crate) struct Pipeline<P> {
    /// Requests that the host kernel has not taken, from `written`.
    pub(crate) output: Vec<u8>,
    written: usize,
    /// Bytes of an answer that is not complete.
    pub(crate) input: Vec<u8>,
    pub(crate) parser: ParseState,
    /// Requests in flight, in their order.
    pub(crate) places: VecDeque<P>,
    /// Of each of them.
    awaited: VecDeque<Awaited>,
    /// How many of them have timed out. They are the first ones.
    late: usize,
    /// Time of the first time-out since an answer came in time or no answer was due; 0: none.
    behind_since_ns: u64,
    /// The part of each request that its answer is compared with, in their order, from `marks_taken`.
    marks: Vec<u8>,
    marks_taken: usize,
}

/// What is known of an answer.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    /// When its request times out.
    deadline_ns: u64,
    mark_len: u32,
}

impl<P> Pipeline<P> {
    /// A stream without requests, with memory for this many.
    pub(crate) fn new(places: usize) -> Self {
        Self {
            output: Vec::new(),
            written: 0,
            input: Vec::new(),
            parser: ParseState::default(),
            places: VecDeque::with_capacity(places),
            awaited: VecDeque::with_capacity(places),
            late: 0,
            behind_since_ns: 0,
            marks: Vec::new(),
            marks_taken: 0,
        }
    }

    /// Forgets the bytes of a stream that has ended; the requests stay until they are taken.
    pub(crate) fn reset_buffers(&mut self) {
        self.output.clear();
        self.written = 0;
        self.input.clear();
        self.parser = ParseState::default();
        self.behind_since_ns = 0;
    }

    /// Bytes that the host kernel has not taken.
    pub(crate) fn unwritten(&self) -> usize {
        self.output.len() - self.written
    }

    /// Adds a request, which is in the output, with the mark of its answer. No request before it times out later.
    pub(crate) fn push(&mut self, place: P, mark: &[u8], deadline_ns: u64) {
        self.marks.extend_from_slice(mark);
        self.awaited.push_back(Awaited { deadline_ns, mark_len: mark.len() as u32 });
        self.places.push_back(place);
    }

    /// Takes the oldest request: it was answered, or the stream has ended.
    pub(crate) fn pop(&mut self) -> Option<P> {
        let place = self.places.pop_front()?;
        self.marks_taken += self.awaited.pop_front().map_or(0, |awaited| awaited.mark_len as usize);
        if !self.is_late() || self.places.is_empty() {
            self.behind_since_ns = 0;
        }
        self.late = self.late.saturating_sub(1);
        if self.places.is_empty() {
            self.marks.clear();
            self.marks_taken = 0;
        } else {
            discard_written(&mut self.marks, &mut self.marks_taken);
        }
        Some(place)
    }

    /// Whether the time of the oldest request is over.
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        self.awaited.front().is_some_and(|awaited| awaited.deadline_ns <= now_ns)
    }

    /// The next request that has timed out. It becomes late, and keeps its place.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Option<&mut P> {
        // Deadlines are in order, so those that are late come first.
        self.awaited.get(self.late).filter(|awaited| awaited.deadline_ns <= now_ns)?;
        self.late += 1;
        if self.behind_since_ns == 0 {
            self.behind_since_ns = now_ns.max(1);
        }
        self.places.get_mut(self.late - 1)
    }

    /// Whether the oldest request is late.
    pub(crate) fn is_late(&self) -> bool {
        self.late > 0
    }

    /// Requests that have not timed out.
    pub(crate) fn timely(&self) -> usize {
        self.places.len() - self.late
    }

    /// Whether the server has been behind for too long.
    pub(crate) fn is_behind(&self, now_ns: u64, patience_ns: u64) -> bool {
        self.behind_since_ns != 0 && self.behind_since_ns + patience_ns <= now_ns
    }

    /// Whether an answer can belong to the oldest request.
    pub(crate) fn fits(&self, framing: Framing, answer: &[u8]) -> bool {
        let len = self.awaited.front().map_or(0, |awaited| awaited.mark_len as usize);
        framing.fits(&self.marks[self.marks_taken..][..len], answer)
    }

    /// One write.
    pub(crate) fn write<N: Nic>(&mut self, nic: &mut N, key: StreamKey) -> Written {
        let outcome = nic.write(key, &self.output[self.written..]);
        if let Written::Bytes(count) = outcome {
            self.written += count;
            if self.written == self.output.len() {
                self.output.clear();
                self.written = 0;
            } else {
                discard_written(&mut self.output, &mut self.written);
            }
        }
        outcome
    }

    /// Keeps the bytes behind the first `taken` of those that were read: `read`, behind `input` (empty if `fresh`).
    pub(crate) fn keep(&mut self, mut input: Vec<u8>, read: &[u8], fresh: bool, taken: usize) {
        match fresh {
            true => input.extend_from_slice(&read[taken..]),
            false => drop(input.drain(..taken)),
        }
        self.input = input;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_requests_are_the_first_ones_and_keep_their_places() {
        let mut pipeline = Pipeline::new(0);
        for number in 0..4 {
            pipeline.push(number, b"mark", 10 * (number + 1));
        }
        assert_eq!((pipeline.is_due(9), pipeline.expire(9)), (false, None));
        assert_eq!((pipeline.is_due(25), pipeline.expire(25)), (true, Some(&mut 0)));
        assert_eq!(pipeline.pop(), Some(0));
        assert_eq!(pipeline.expire(25), Some(&mut 1));
        assert_eq!(pipeline.expire(25), None);
        assert_eq!((pipeline.is_late(), pipeline.timely()), (true, 2));
        // Late since 25.
        assert!(!pipeline.is_behind(124, 100) && pipeline.is_behind(125, 100));
        assert_eq!(pipeline.pop(), Some(1));
        assert!(pipeline.is_behind(125, 100), "that answer was late");
        assert_eq!(pipeline.pop(), Some(2));
        assert!(!pipeline.is_behind(125, 100) && !pipeline.is_late(), "this one came in time");
        assert_eq!(pipeline.expire(40), Some(&mut 3));
        assert_eq!((pipeline.pop(), pipeline.pop()), (Some(3), None));
        assert!(!pipeline.is_behind(1000, 100) && pipeline.marks.is_empty(), "nothing is due");
    }

    #[test]
    fn attempts_wait_longer_each_time() {
        let mut back_off = BackOff::default();
        assert!(back_off.may_try(0));
        let mut now_ns = 0;
        for wait_ms in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
            back_off.failed(now_ns);
            // Another attempt, which began before.
            back_off.failed(now_ns + 1);
            now_ns += wait_ms * 1_000_000;
            assert!(!back_off.may_try(now_ns - 1) && back_off.may_try(now_ns), "{wait_ms}");
        }
        back_off.succeeded();
        assert!(back_off.may_try(0));
    }
}
