//! The buffers of chunks, and where plain bytes are in them.

use std::io::IoSliceMut;
use std::ops::Range;

use crate::flow::{CHUNK_BYTES, SMALL_CHUNK_BYTES};
use crate::seal::{HEADER_BYTES, RECORD_BYTES};

/// Bytes of a buffer.
pub(crate) const BUFFER_BYTES: usize = CHUNK_BYTES + HEADER_BYTES;
const SMALL_BUFFER_BYTES: usize = SMALL_CHUNK_BYTES + HEADER_BYTES;
/// Free buffers that are kept.
const SPARE_BUFFERS: usize = 8;
/// As many small ones are two for each of 32 streams.
const SPARE_SMALL_BUFFERS: usize = 64;

/// Buffers that are reused.
#[derive(Default)]
pub struct Buffers {
    spare: Vec<Vec<u8>>,
    small: Vec<Vec<u8>>,
}

impl Buffers {
    pub(crate) fn take(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| vec![0; BUFFER_BYTES])
    }

    pub(crate) fn put(&mut self, buffer: Vec<u8>) {
        if buffer.len() == SMALL_BUFFER_BYTES {
            if self.small.len() < SPARE_SMALL_BUFFERS {
                self.small.push(buffer);
            }
        } else if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }

    pub(crate) fn take_small(&mut self) -> Vec<u8> {
        self.small.pop().unwrap_or_else(|| vec![0; SMALL_BUFFER_BYTES])
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
