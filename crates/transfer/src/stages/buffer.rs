//! The buffers of chunks, and where plain bytes are in them.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::command::limits::{CHUNK_BYTES, HEADER_BYTES, RECORD_BYTES, SMALL_CHUNK_BYTES};

/// Bytes of a buffer.
pub(crate) const BUFFER_BYTES: usize = CHUNK_BYTES + HEADER_BYTES;
const SMALL_BUFFER_BYTES: usize = SMALL_CHUNK_BYTES + HEADER_BYTES;
/// Free buffers that a thread keeps for itself: they are in the caches of its core.
const SPARE_BUFFERS: usize = 4;
const SPARE_SMALL_BUFFERS: usize = 32;
/// Free buffers that all threads share: as many as this number of threads keep.
const SHARED_THREADS: usize = 4;

/// Buffers that are reused.
#[derive(Default)]
pub struct Buffers {
    spare: Spare,
    shared: SharedBuffers,
}

/// Free buffers of all threads of an engine: one thread reads a chunk and another one sends it, so buffers go from thread to thread.
#[derive(Clone, Default)]
pub(crate) struct SharedBuffers(Arc<Mutex<Spare>>);

#[derive(Default)]
struct Spare {
    buffers: Vec<Vec<u8>>,
    small: Vec<Vec<u8>>,
}

impl Spare {
    /// Returns the buffer if there are enough: `times` as many as a thread keeps.
    fn put(&mut self, buffer: Vec<u8>, times: usize) -> Option<Vec<u8>> {
        let (kept, most) = match buffer.len() {
            SMALL_BUFFER_BYTES => (&mut self.small, SPARE_SMALL_BUFFERS),
            _ => (&mut self.buffers, SPARE_BUFFERS),
        };
        if kept.len() >= most * times {
            return Some(buffer);
        }
        kept.push(buffer);
        None
    }
}

impl SharedBuffers {
    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffers of a thread.
    pub(crate) fn of_thread(&self) -> Buffers {
        Buffers { spare: Spare::default(), shared: self.clone() }
    }
}

impl Buffers {
    pub(crate) fn take(&mut self) -> Vec<u8> {
        let shared = || self.shared.spare().buffers.pop();
        self.spare.buffers.pop().or_else(shared).unwrap_or_else(|| vec![0; BUFFER_BYTES])
    }

    pub(crate) fn put(&mut self, buffer: Vec<u8>) {
        if let Some(buffer) = self.spare.put(buffer, 1) {
            // Freed when the lock is free.
            let surplus = self.shared.spare().put(buffer, SHARED_THREADS);
            drop(surplus);
        }
    }

    pub(crate) fn take_small(&mut self) -> Vec<u8> {
        let shared = || self.shared.spare().small.pop();
        self.spare.small.pop().or_else(shared).unwrap_or_else(|| vec![0; SMALL_BUFFER_BYTES])
    }
}

/// Where the plain bytes of a chunk are in its buffer: records one after the other, each with its tag.
pub(crate) struct Layout {
    pub(crate) start: usize,
    /// Plain bytes of a record.
    pub(crate) payload: usize,
    /// Bytes of a record.
    pub(crate) record: usize,
}

impl Layout {
    /// Pieces of this many plain bytes.
    pub(crate) fn pieces(&self, plain: usize) -> usize {
        plain.div_ceil(self.payload)
    }

    /// The place of a piece.
    pub(crate) fn piece(&self, number: usize, plain: usize) -> Option<Range<usize>> {
        let len = plain.checked_sub(number * self.payload)?.min(self.payload);
        let start = self.start + number * self.record;
        (len > 0).then_some(start..start + len)
    }

    /// The places of plain bytes `from` to `to`.
    pub(crate) fn parts<'b>(
        &self,
        buffer: &'b mut [u8],
        from: usize,
        to: usize,
    ) -> Vec<IoSliceMut<'b>> {
        let mut parts = Vec::with_capacity(CHUNK_BYTES / RECORD_BYTES);
        let (mut rest, mut at) = (&mut buffer[self.start..], 0);
        while at < to {
            let (record, later) = rest.split_at_mut(self.record.min(rest.len()));
            rest = later;
            let len = self.payload.min(to - at);
            let skipped = from.saturating_sub(at).min(len);
            if skipped < len {
                parts.push(IoSliceMut::new(&mut record[skipped..len]));
            }
            at += len;
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_go_from_thread_to_thread_and_not_all_are_kept() {
        let shared = SharedBuffers::default();
        let (mut sends, mut reads) = (shared.of_thread(), shared.of_thread());
        for (of, kept) in [(BUFFER_BYTES, SPARE_BUFFERS), (SMALL_BUFFER_BYTES, SPARE_SMALL_BUFFERS)]
        {
            let all = kept * (1 + SHARED_THREADS);
            for _ in 0..all + 3 {
                let mut buffer = vec![0; of];
                buffer[of - 1] = 1;
                sends.put(buffer);
            }
            let take = |from: &mut Buffers| {
                let buffer = if of == BUFFER_BYTES { from.take() } else { from.take_small() };
                assert_eq!(buffer.len(), of);
                buffer[of - 1] == 1
            };
            // What the other thread does not keep, this one gets, and then new ones.
            let used: Vec<bool> = (0..all).map(|_| take(&mut reads)).collect();
            assert_eq!(used.iter().filter(|used| **used).count(), kept * SHARED_THREADS);
            assert!((0..kept).all(|_| take(&mut sends)) && !take(&mut sends));
        }
    }
}
