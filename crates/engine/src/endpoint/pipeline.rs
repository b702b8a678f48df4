//! A stream to a server: requests in flight, and answers in the order of the requests. Connections to backends and to upstream
//! servers have this in common.

use std::collections::VecDeque;

use wire::framing::{Framing, ParseState};
use wire::nic::{Nic, StreamKey, Written};

use crate::endpoint::tcp::connection::discard_written;

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
    /// The part of each request that its answer is compared with, in their order, from `marks_taken`; and their lengths.
    marks: Vec<u8>,
    marks_taken: usize,
    mark_lens: VecDeque<u32>,
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
            marks: Vec::new(),
            marks_taken: 0,
            mark_lens: VecDeque::with_capacity(places),
        }
    }

    /// Forgets the bytes of a stream that has ended; the requests stay until they are taken.
    pub(crate) fn reset_buffers(&mut self) {
        self.output.clear();
        self.written = 0;
        self.input.clear();
        self.parser = ParseState::default();
    }

    /// Bytes that the host kernel has not taken.
    pub(crate) fn unwritten(&self) -> usize {
        self.output.len() - self.written
    }

    /// Adds a request, which is in the output, with the mark of its answer.
    pub(crate) fn push(&mut self, place: P, mark: &[u8]) {
        self.marks.extend_from_slice(mark);
        self.mark_lens.push_back(mark.len() as u32);
        self.places.push_back(place);
    }

    /// Takes the oldest request.
    pub(crate) fn pop(&mut self) -> Option<P> {
        let place = self.places.pop_front()?;
        self.marks_taken += self.mark_lens.pop_front().unwrap_or(0) as usize;
        if self.places.is_empty() {
            self.marks.clear();
            self.marks_taken = 0;
        } else {
            discard_written(&mut self.marks, &mut self.marks_taken);
        }
        Some(place)
    }

    /// Whether an answer can belong to the oldest request.
    pub(crate) fn fits(&self, framing: Framing, answer: &[u8]) -> bool {
        let len = self.mark_lens.front().map_or(0, |len| *len as usize);
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
