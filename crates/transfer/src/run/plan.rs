//! What a transfer does, without its descriptors, and the parts in which it can be done at the same time.

use crate::command::device::Device;
use crate::command::error::TransferError;
use crate::command::limits::{CHUNK_BYTES, CHUNKS_MAX, HEADER_BYTES, PAYLOAD_BYTES, RECORD_BYTES};
use crate::command::pipeline::{Command, WhenBlocked};
use crate::command::stage::{Cipher, StageSpec};
use crate::stages::buffer::BUFFER_BYTES;
use crate::stages::seal::{Header, begin_gcm};

/// Plain bytes of a chunk that is sealed in place.
const SEALED_CHUNK_PLAIN: usize = CHUNK_BYTES / RECORD_BYTES * PAYLOAD_BYTES;
/// A part of a transfer has as many bytes at least, so that its thread does not only start and end.
const PART_BYTES_MIN: u64 = 4 << 20;

/// The part of a [`Command`] that says what to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The kind of the source.
    pub source: Device,
    /// The kind of the sink.
    pub sink: Device,
    /// The first byte of the range in the source, if that is not a socket.
    pub from: u64,
    /// Length of the range. `None`: all that the socket receives, or to the end of a file whose length is not known.
    pub bytes: Option<u64>,
    /// Where the first byte goes in the sink, if that is not a socket.
    pub to: u64,
    /// What comes before the bytes of the source, a socket.
    pub head: Vec<u8>,
    /// The stages in their order.
    pub stages: Vec<StageSpec>,
    /// Whether it waits for sockets.
    pub when_blocked: WhenBlocked,
    /// Whether [`Devices::sync`](crate::Devices::sync) is called at the end.
    pub sync: bool,
    /// Which part of a sealed stream it makes; `None`: all of it.
    pub part: Option<StreamPart>,
    /// Whether ranges of the source go through its stages at the same time.
    pub cut: Cut,
    /// Parts in which it can be done at the same time.
    pub parts_max: usize,
}

/// A part of a sealed stream.
#[derive(Clone, Debug)]
pub struct StreamPart {
    /// That of the stream; only the first part has it.
    pub(crate) header: Header,
    /// The number of its first record.
    pub(crate) record: u64,
    /// It has the last record.
    pub(crate) ends: bool,
}

/// Whether a transfer takes ranges of its source through its stages at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// It does not.
    #[default]
    No,
    /// It can: it does nothing but search and compute digests that can be joined, and its sink drops what it gets.
    Can,
    /// It is one of these ranges.
    Range {
        /// Where it begins in the source's range.
        start: u64,
        /// No other follows.
        is_last: bool,
    },
}

fn is_seal_in_records(stage: &StageSpec) -> bool {
    matches!(stage, StageSpec::Seal(Cipher::Aes256Gcm, _))
}

impl Plan {
    /// Of a command, whose length has been made definite.
    pub(crate) fn of(command: &Command, bytes: Option<u64>) -> Self {
        // Offsets in several files count from the first byte of the first range.
        let from = if command.more.is_empty() { command.source.offset() } else { 0 };
        Self {
            source: command.source.device(),
            sink: command.sink.device(),
            from,
            bytes,
            to: command.sink.offset(),
            head: command.head.clone(),
            stages: command.stages.clone(),
            when_blocked: command.when_blocked,
            // Copies into an accelerator are asynchronous.
            sync: command.sync || command.sink.device() == Device::Accelerator,
            part: None,
            cut: Cut::No,
            parts_max: 1,
        }
    }
}

impl Plan {
    /// Parts of a transfer that can be done at the same time: `most` at most, and fewer of a short one.
    pub(crate) fn parts(&self, most: usize) -> Result<Vec<Self>, TransferError> {
        let most = most.min(self.parts_max).max(1);
        let bytes = self.bytes.unwrap_or(0);
        let count = (bytes / PART_BYTES_MIN).clamp(1, most as u64);
        if count == 1 {
            return Ok(vec![self.clone()]);
        }
        let seals = self.stages.last().is_some_and(is_seal_in_records);
        let chunk = if seals { SEALED_CHUNK_PLAIN } else { CHUNK_BYTES };
        let size = bytes.div_ceil(count).next_multiple_of(chunk as u64);
        let starts = (0..bytes.div_ceil(size)).map(|index| index * size);
        let header = if seals { Some(begin_gcm()?) } else { None };
        let part = |at: u64| {
            let record = at / PAYLOAD_BYTES as u64;
            let part = header.map(|header| StreamPart { header, record, ends: bytes - at <= size });
            let to = match (&part, at) {
                (Some(_), 1..) => HEADER_BYTES as u64 + record * RECORD_BYTES as u64,
                _ => at,
            };
            let cut = match self.cut {
                Cut::Can => Cut::Range { start: at, is_last: bytes - at <= size },
                _ => Cut::No,
            };
            let bytes = Some(size.min(bytes - at));
            Self { from: self.from + at, to: self.to + to, bytes, part, cut, ..self.clone() }
        };
        Ok(starts.map(part).collect())
    }

    /// Whether a file goes to a file through nothing but digests that can be joined and a seal in records, and its length is known:
    /// each chunk has its place there.
    pub(crate) fn has_places(&self) -> bool {
        let Some((last, before)) = self.stages.split_last() else { return false };
        let joins =
            |stage: &StageSpec| matches!(stage, StageSpec::Digest(kind) if kind.can_be_joined());
        (joins(last) || is_seal_in_records(last))
            && before.iter().all(joins)
            && [self.source, self.sink] == [Device::File; 2]
            && self.bytes.is_some()
    }

    /// Whether it has no stages, both ends have positions, and its length is known.
    pub(crate) fn is_plain(&self) -> bool {
        let have_positions = self.source.has_positions() && self.sink.has_positions();
        self.stages.is_empty() && have_positions && self.bytes.is_some()
    }

    /// Memory that the transfer holds at most.
    pub fn memory_bytes(&self) -> u64 {
        let transforms = self.stages.iter().filter(|stage| stage.transforms()).count();
        let chunks = ((CHUNKS_MAX + transforms) * BUFFER_BYTES) as u64;
        chunks + self.stages.iter().map(StageSpec::memory_bytes).sum::<u64>()
    }
}
