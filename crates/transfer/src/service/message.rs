//! The messages between a program and a transfer engine in another process, version 2.
//!
//! They travel over a Unix socket of type seqpacket, so each arrives whole. Integers are little-endian, reserved bytes are
//! zero, and every message has one encoding; anything else is refused.
//!
//! ```text
//! request (16 bytes; a start 56 and its stages)   answer (32 bytes; an end 40, its stages, text)
//!  0 u32  "SVT2"                                   0 u32  "SVT2"
//!  4 u16  kind: 1 start, 3 cancel, 4 progress,     4 u16  kind: 1 ended, 2 progress, 3 list
//!         5 list, 6 signal
//!  6 u16  flags: 1 return when blocked, 2 sync     6 u8   reason: 0 success, or a code
//!  8 u64  id, chosen by the caller                 7 u8   number of stages
//! 16 u64  offset in the source, if a file          8 u64  id
//! 24 u64  bytes; 2^64 - 1: to the end             16 u64  bytes read from the source
//! 32 u64  offset in the sink, if a file           24 u64  bytes that the sink has
//! 40 u32  stall time in ms; 0: the default        32 u32  error number (errno)
//! 44 u32  deadline in ms; 0: none                 36 u16  bytes of the text, at most 166
//! 48 u8   source: 1 file, 2 socket                38      reserved (2 bytes)
//! 49 u8   sink: 1 file, 2 socket                  40      stages, then the text (UTF-8)
//! 50 u8   number of stages, at most 8
//! 51 u8   further source files, at most 7
//! 52 u16  bytes received before, at most 16384
//! 54      reserved (2 bytes)
//! 56      stages; then u64 offset and u64 bytes
//!         of each further file; then the bytes
//!         that were received before
//!
//! stage of a request (8 bytes, and what follows)  stage of an answer (56 bytes, and what follows)
//!  0 u8   kind: `codes::stage`                     0 u8   kind, as in the request
//!  1 u8   digest, cipher, format or search,        1 u8   as in the request
//!         of the same file (`mqueue::codes`)       2 u8   1: all bytes went through it
//!  2 u16  bytes that follow                        3      reserved (1 byte)
//!  4 u8   level of a compression, else 0           4 u16  offsets that follow
//!  5      reserved (3 bytes)                       6      reserved (2 bytes)
//!                                                  8 u64  bytes that went in
//!                                                 16 u64  bytes that came out
//!  8      open and seal: the key (32 bytes);      24      digest, or u64 how often; zeros (to 32 bytes)
//!         expand: u64 bytes and u32 ratio at      56 u64  search: an offset, and so on
//!         most; search: u16 offsets at most,
//!         then the text or expression
//! ```
//!
//! list (16 bytes, entries, and queues)             entry (56 bytes)
//!  0 u32  "SVT2"                                   0 u64  id
//!  4 u16  kind: 3                                  8 u32  process
//!  6 u16  entries that follow, at most 512        12 u8   source, 13 u8 sink: as in a start
//!  8 u64  transfers in flight                     14 u8   1 queued, 2 running, 3 waiting for a socket
//!                                                 15 u8   number of stages
//!                                                 16 u64  bytes read, 24 u64 bytes that the sink has
//!                                                 32 u64  age in ms
//!                                                 40      two bytes for each stage: kind, option
//!
//! queues (8 bytes, and each)                       queue of a device (64 bytes)
//!  0 u16  queues that follow, at most 128          0 u8   1 file, 2 socket, 3 accelerator
//!  2      reserved (6 bytes)                       1      reserved (7 bytes)
//!                                                  8 u64  device number of a file system; 2^64 - 1: none
//!                                                 16 u64  steps queued, 24 u64 running
//!                                                 32 u64  transfers that wait for a socket
//!                                                 40 u64  bytes of the chunks of queued and running steps
//!                                                 48 u64  bytes taken so far, 56 u64 bytes given so far
//!
//! A start carries descriptors (SCM_RIGHTS): the source, further files, then the sink. It gets one answer of kind 1, when the
//! transfer ends. A cancel gets none of its own: its transfer ends. A program that closes the connection cancels its
//! transfers. A progress request is answered by kind 2, or not at all if its transfer has ended. A list has the transfers of all callers, whose
//! ids are their own, or those of its caller's user if that is another one than the engine's and root. A signal has id 0 and carries one descriptor, an eventfd with `EFD_NONBLOCK`, to which the engine adds 1 after each answer of
//! kind 1; it has no answer, and ends the connection if the program's user is neither the engine's nor root.

mod list;

use std::os::fd::OwnedFd;
use std::time::Duration;

use mqueue::codes::reason;

pub use list::{LISTED_MAX, Listed, QUEUES_MAX};

use crate::command::compression::{Compression, ExpandLimits};
use crate::command::device::Device;
use crate::command::error::TransferError;
use crate::command::key::Key;
use crate::command::limits::{
    FILES_MAX, HEAD_MAX, OFFSETS_MAX, PATTERN_BYTES_MAX, STAGES_MAX, STALL_DEFAULT,
};
use crate::command::pipeline::{Command, FileRange, Place, WhenBlocked};
use crate::command::report::{Report, StageReport};
use crate::command::stage::{DigestValue, Found, SearchSpec, StageKind, StageSpec};
use crate::engine::DeviceQueue;

/// Bytes of the longest request.
pub const REQUEST_BYTES_MAX: usize = START_BYTES
    + STAGES_MAX * (STAGE_BYTES + 2 + PATTERN_BYTES_MAX)
    + (FILES_MAX - 1) * 16
    + HEAD_MAX;
/// Bytes of the longest answer.
pub const ANSWER_BYTES_MAX: usize =
    ENDED_BYTES + STAGES_MAX * (REPORT_BYTES + 8 * OFFSETS_MAX as usize) + TEXT_BYTES_MAX;

const MAGIC: [u8; 4] = *b"SVT2";
const HEAD_BYTES: usize = 16;
const START_BYTES: usize = 56;
const STAGE_BYTES: usize = 8;
const KEY_BYTES: usize = 32;
const LIMITS_BYTES: usize = 12;
const PROGRESS_BYTES: usize = 32;
const ENDED_BYTES: usize = 40;
const REPORT_BYTES: usize = 56;
const TEXT_BYTES_MAX: usize = 166;
const RETURN_WHEN_BLOCKED: u16 = 1;
const SYNC: u16 = 2;
const TO_THE_END: u64 = u64::MAX;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Start a transfer; comes with descriptors.
    Start {
        /// The caller's number for it.
        id: u64,
        /// What to do.
        start: StartRequest,
    },
    /// End a transfer.
    Cancel(u64),
    /// Ask how far a transfer is.
    Progress(u64),
    /// Ask for the transfers in flight.
    List,
    /// Count ends in an eventfd, which comes with it.
    Signal,
}

/// A [`Command`] without its descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartRequest {
    /// What the source is.
    pub source: Device,
    /// What the sink is.
    pub sink: Device,
    /// The first byte of the range in the source; 0 of a socket.
    pub from: u64,
    /// Length of the range; `None`: to the end.
    pub bytes: Option<u64>,
    /// Offset and length of each file that follows the source.
    pub more: Vec<(u64, Option<u64>)>,
    /// What has been received from the source before.
    pub head: Vec<u8>,
    /// Where the first byte goes in the sink; 0 of a socket.
    pub to: u64,
    /// The stages; their order has not been checked.
    pub stages: Vec<StageSpec>,
    /// How long nothing may move, in milliseconds; 0: the default.
    pub stall_ms: u32,
    /// How long it may take, in milliseconds; 0: as long as it moves.
    pub deadline_ms: u32,
    /// Whether it waits for the socket.
    pub when_blocked: WhenBlocked,
    /// Whether the sink, a file, is synced at the end.
    pub sync: bool,
}

impl StartRequest {
    /// The request of a command.
    pub fn of(command: &Command) -> Self {
        let ms = |limit: Duration| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1);
        Self {
            source: command.source.device(),
            sink: command.sink.device(),
            from: command.source.offset(),
            bytes: command.bytes.filter(|bytes| *bytes != TO_THE_END),
            more: command.more.iter().map(|range| (range.offset, range.bytes)).collect(),
            head: command.head.clone(),
            to: command.sink.offset(),
            stages: command.stages.clone(),
            stall_ms: if command.stall == STALL_DEFAULT { 0 } else { ms(command.stall) },
            deadline_ms: command.deadline.map_or(0, ms),
            when_blocked: command.when_blocked,
            sync: command.sync,
        }
    }

    /// The command with these descriptors, or they themselves if they are not as many as it needs.
    pub fn command(self, descriptors: Vec<OwnedFd>) -> Result<Command, Vec<OwnedFd>> {
        if descriptors.len() != 2 + self.more.len() {
            return Err(descriptors);
        }
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().expect("they have been counted");
        let ms = |ms: u32| Duration::from_millis(ms.into());
        let place = |device, descriptor, offset| match device {
            Device::Socket => Place::Socket(descriptor),
            // A message does not name memory of an accelerator.
            Device::File | Device::Accelerator => Place::File(descriptor, offset),
        };
        let source = place(self.source, next(), self.from);
        let more = self.more.into_iter();
        let more = more.map(|(offset, bytes)| FileRange { file: next(), offset, bytes }).collect();
        Ok(Command {
            source,
            more,
            head: self.head,
            sink: place(self.sink, next(), self.to),
            bytes: self.bytes,
            stages: self.stages,
            stall: if self.stall_ms == 0 { STALL_DEFAULT } else { ms(self.stall_ms) },
            deadline: (self.deadline_ms != 0).then(|| ms(self.deadline_ms)),
            when_blocked: self.when_blocked,
            sync: self.sync,
        })
    }
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// It has another length.
    #[error("the message has another length than its kind in version 2 of the protocol")]
    Length,
    /// It does not begin with `SVT2`.
    #[error("the message is not of version 2 of the protocol: use matching builds")]
    Version,
    /// A field has a value without a meaning.
    #[error("a field of the message has a value without a meaning: {0}")]
    Field(&'static str),
}

/// What has not been read of a message. Every read checks the length.
struct Rest<'m>(&'m [u8]);

impl<'m> Rest<'m> {
    fn bytes(&mut self, count: usize) -> Result<&'m [u8], MessageError> {
        let (now, later) = self.0.split_at_checked(count).ok_or(MessageError::Length)?;
        self.0 = later;
        Ok(now)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        Ok(self.bytes(N)?.try_into().expect("as long as asked for"))
    }

    fn u8(&mut self) -> Result<u8, MessageError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, MessageError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, MessageError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        self.array().map(u64::from_le_bytes)
    }

    fn reserved(&mut self, count: usize) -> Result<(), MessageError> {
        let is_zero = self.bytes(count)?.iter().all(|byte| *byte == 0);
        if is_zero { Ok(()) } else { Err(MessageError::Field("reserved")) }
    }

    fn magic(&mut self) -> Result<(), MessageError> {
        if self.array()? == MAGIC { Ok(()) } else { Err(MessageError::Version) }
    }

    fn end(&self) -> Result<(), MessageError> {
        if self.0.is_empty() { Ok(()) } else { Err(MessageError::Length) }
    }

    fn key(&mut self) -> Result<Key, MessageError> {
        Key::of(self.bytes(KEY_BYTES)?).ok_or(MessageError::Field("key"))
    }

    fn device(&mut self, what: &'static str) -> Result<Device, MessageError> {
        match self.u8()? {
            1 => Ok(Device::File),
            2 => Ok(Device::Socket),
            _ => Err(MessageError::Field(what)),
        }
    }

    /// Two bytes: what a stage does, and with what.
    fn kind(&mut self) -> Result<StageKind, MessageError> {
        StageKind::coded([self.u8()?, self.u8()?]).ok_or(MessageError::Field("stage"))
    }
}

fn device_code(device: Device) -> u8 {
    match device {
        Device::File => 1,
        Device::Socket => 2,
        Device::Accelerator => 3,
    }
}

impl Request {
    /// Reads a request.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut rest = Rest(bytes);
        rest.magic()?;
        let (kind, flags, id) = (rest.u16()?, rest.u16()?, rest.u64()?);
        if kind == 1 {
            return Ok(Self::Start { id, start: decode_start(rest, flags)? });
        }
        if flags != 0 {
            return Err(MessageError::Field("flags"));
        }
        rest.end()?;
        match kind {
            3 => Ok(Self::Cancel(id)),
            4 => Ok(Self::Progress(id)),
            5 if id == 0 => Ok(Self::List),
            6 if id == 0 => Ok(Self::Signal),
            _ => Err(MessageError::Field("kind")),
        }
    }

    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, id, start) = match self {
            Self::Start { id, start } => (1u16, *id, Some(start)),
            Self::Cancel(id) => (3, *id, None),
            Self::Progress(id) => (4, *id, None),
            Self::List => (5, 0, None),
            Self::Signal => (6, 0, None),
        };
        let flags = start.map_or(0, |start| {
            let returns = start.when_blocked == WhenBlocked::Return;
            u16::from(returns) * RETURN_WHEN_BLOCKED + u16::from(start.sync) * SYNC
        });
        // No part of a key stays in memory that a longer vector has left.
        let mut bytes = Vec::with_capacity(REQUEST_BYTES_MAX);
        bytes.extend(MAGIC);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        debug_assert_eq!(bytes.len(), HEAD_BYTES);
        if let Some(start) = start {
            encode_start(start, &mut bytes);
        }
        bytes
    }
}

fn decode_start(mut rest: Rest<'_>, flags: u16) -> Result<StartRequest, MessageError> {
    if flags & !(RETURN_WHEN_BLOCKED | SYNC) != 0 {
        return Err(MessageError::Field("flags"));
    }
    let sync = flags & SYNC != 0;
    let returns = flags & RETURN_WHEN_BLOCKED != 0;
    let when_blocked = if returns { WhenBlocked::Return } else { WhenBlocked::Wait };
    let (from, bytes, to) = (rest.u64()?, rest.u64()?, rest.u64()?);
    let (stall_ms, deadline_ms) = (rest.u32()?, rest.u32()?);
    let (source, sink) = (rest.device("source")?, rest.device("sink")?);
    let (count, more) = (usize::from(rest.u8()?), usize::from(rest.u8()?));
    let head = usize::from(rest.u16()?);
    rest.reserved(2)?;
    if more >= FILES_MAX || (more > 0 && source == Device::Socket) {
        return Err(MessageError::Field("files"));
    }
    if (source == Device::Socket && from != 0) || (sink == Device::Socket && to != 0) {
        return Err(MessageError::Field("offset"));
    }
    if head > HEAD_MAX || (head > 0 && (source != Device::Socket || returns)) {
        return Err(MessageError::Field("head"));
    }
    if count > STAGES_MAX {
        return Err(MessageError::Field("stages"));
    }
    if (returns && (count > 0 || source == sink)) || (sync && sink == Device::Socket) {
        return Err(MessageError::Field("flags"));
    }
    let stages = (0..count).map(|_| decode_stage(&mut rest)).collect::<Result<_, _>>()?;
    let definite = |bytes| Some(bytes).filter(|bytes| *bytes != TO_THE_END);
    let range = |_| Ok((rest.u64()?, definite(rest.u64()?)));
    let more = (0..more).map(range).collect::<Result<_, _>>()?;
    let head = rest.bytes(head)?.to_vec();
    rest.end()?;
    let bytes = definite(bytes);
    let start = StartRequest {
        source,
        sink,
        from,
        bytes,
        more,
        head,
        to,
        stages,
        stall_ms,
        deadline_ms,
        when_blocked,
        sync,
    };
    Ok(start)
}

fn decode_stage(rest: &mut Rest<'_>) -> Result<StageSpec, MessageError> {
    let (kind, follows) = (rest.kind()?, usize::from(rest.u16()?));
    let level = rest.u8()?;
    rest.reserved(3)?;
    if level != 0 && !matches!(kind, StageKind::Compress(_)) {
        return Err(MessageError::Field("level"));
    }
    let needed = match kind {
        StageKind::Search(_) => follows.clamp(3, 2 + PATTERN_BYTES_MAX),
        StageKind::Digest(_) | StageKind::Compress(_) => 0,
        StageKind::Open(_) | StageKind::Seal(_) => KEY_BYTES,
        StageKind::Expand(_) => LIMITS_BYTES,
        // Only of an engine in this process.
        _ => return Err(MessageError::Field("stage")),
    };
    if follows != needed {
        return Err(MessageError::Field("stage"));
    }
    let mut follows = Rest(rest.bytes(follows)?);
    Ok(match kind {
        StageKind::Digest(kind) => StageSpec::Digest(kind),
        StageKind::Compress(format) => {
            let how = Compression::new(format, level).ok_or(MessageError::Field("level"))?;
            StageSpec::Compress(how)
        }
        StageKind::Open(cipher) => StageSpec::Open(cipher, follows.key()?),
        StageKind::Seal(cipher) => StageSpec::Seal(cipher, follows.key()?),
        StageKind::Search(kind) => {
            let offsets = follows.u16()?;
            if offsets > OFFSETS_MAX {
                return Err(MessageError::Field("offsets"));
            }
            StageSpec::Search(SearchSpec { kind, pattern: follows.0.to_vec(), offsets })
        }
        StageKind::Expand(format) => {
            let limits = ExpandLimits { bytes: follows.u64()?, ratio: follows.u32()? };
            StageSpec::Expand(format, limits)
        }
        _ => unreachable!("they were refused above"),
    })
}

fn encode_start(start: &StartRequest, bytes: &mut Vec<u8>) {
    for value in [start.from, start.bytes.unwrap_or(TO_THE_END), start.to] {
        bytes.extend(value.to_le_bytes());
    }
    bytes.extend(start.stall_ms.to_le_bytes());
    bytes.extend(start.deadline_ms.to_le_bytes());
    let stages = &start.stages;
    debug_assert!(stages.len() <= STAGES_MAX, "the client has checked them");
    bytes.extend([device_code(start.source), device_code(start.sink), stages.len() as u8]);
    debug_assert!(start.head.len() <= HEAD_MAX, "the client has checked it");
    bytes.extend([start.more.len() as u8]);
    bytes.extend((start.head.len() as u16).to_le_bytes());
    bytes.extend([0; 2]);
    for stage in stages {
        bytes.extend(stage.kind().codes());
        let mut follow = |parts: &[&[u8]]| {
            let len: usize = parts.iter().map(|part| part.len()).sum();
            bytes.extend((len as u16).to_le_bytes());
            let level = if let StageSpec::Compress(how) = stage { how.level() } else { 0 };
            bytes.extend([level, 0, 0, 0]);
            parts.iter().for_each(|part| bytes.extend(*part));
        };
        match stage {
            StageSpec::Open(_, key) | StageSpec::Seal(_, key) => follow(&[key.bytes()]),
            StageSpec::Search(search) => {
                follow(&[&search.offsets.to_le_bytes(), &search.pattern]);
            }
            StageSpec::Expand(_, limits) => {
                follow(&[&limits.bytes.to_le_bytes(), &limits.ratio.to_le_bytes()]);
            }
            // Without parameters, or only of an engine in this process: the client refuses these before.
            _ => follow(&[]),
        }
    }
    for (offset, len) in &start.more {
        bytes.extend(offset.to_le_bytes());
        bytes.extend(len.unwrap_or(TO_THE_END).to_le_bytes());
    }
    bytes.extend(&start.head);
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A transfer has ended.
    Ended {
        /// The caller's number.
        id: u64,
        /// Why it ended early, if it did.
        result: Result<(), RemoteError>,
        /// What it did.
        report: Report,
    },
    /// How far a transfer is.
    Progress {
        /// The caller's number.
        id: u64,
        /// Bytes read from the source.
        read: u64,
        /// Bytes that the sink has.
        written: u64,
    },
    /// The transfers in flight.
    List {
        /// How many there are.
        total: u64,
        /// The first of them, at most [`LISTED_MAX`].
        entries: Vec<Listed>,
        /// What devices do for them, and for transfers of the engine's own process.
        queues: Vec<DeviceQueue>,
    },
}

/// A [`TransferError`] of an engine in another process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct RemoteError {
    /// [`TransferError::code`].
    pub code: u8,
    /// [`TransferError::errno`].
    pub errno: i32,
    /// One sentence. Control characters have been replaced.
    pub text: String,
}

impl RemoteError {
    /// The reason as metrics name it.
    pub fn name(&self) -> &'static str {
        reason::TABLE.name(self.code)
    }
}

impl From<&TransferError> for RemoteError {
    fn from(error: &TransferError) -> Self {
        Self { code: error.code(), errno: error.errno(), text: error.to_string() }
    }
}

impl Answer {
    /// Reads an answer.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut rest = Rest(bytes);
        rest.magic()?;
        let kind = rest.u16()?;
        if kind == 3 {
            let count = usize::from(rest.u16()?);
            let total = rest.u64()?;
            if count > LISTED_MAX || (count as u64) > total {
                return Err(MessageError::Field("entries"));
            }
            let entries =
                (0..count).map(|_| Listed::decode(&mut rest)).collect::<Result<_, _>>()?;
            let queues = list::decode_queues(&mut rest)?;
            rest.end()?;
            return Ok(Self::List { total, entries, queues });
        }
        let (code, count) = (rest.u8()?, usize::from(rest.u8()?));
        let (id, read, written) = (rest.u64()?, rest.u64()?, rest.u64()?);
        match kind {
            1 => {}
            2 if (code, count) == (0, 0) => {
                rest.end()?;
                return Ok(Self::Progress { id, read, written });
            }
            2 => return Err(MessageError::Field("reserved")),
            _ => return Err(MessageError::Field("kind")),
        }
        let (errno, text_bytes) = (rest.u32()? as i32, usize::from(rest.u16()?));
        rest.reserved(2)?;
        if count > STAGES_MAX || text_bytes > TEXT_BYTES_MAX {
            return Err(MessageError::Field("length"));
        }
        let stages = (0..count).map(|_| decode_report(&mut rest)).collect::<Result<_, _>>()?;
        let text = std::str::from_utf8(rest.bytes(text_bytes)?);
        let text = text.map_err(|_| MessageError::Field("text"))?;
        rest.end()?;
        let result = match code {
            0 if errno == 0 && text.is_empty() => Ok(()),
            1.. if reason::TABLE.numbered(code).is_some() => {
                if text.chars().any(char::is_control) {
                    return Err(MessageError::Field("text"));
                }
                Err(RemoteError { code, errno, text: text.to_owned() })
            }
            _ => return Err(MessageError::Field("reason")),
        };
        Ok(Self::Ended { id, result, report: Report { read, written, stages } })
    }

    /// Writes it. A text that is too long is cut.
    pub fn encode(&self) -> Vec<u8> {
        if let Self::List { total, entries, queues } = self {
            let mut bytes = Vec::with_capacity(HEAD_BYTES + entries.len() * list::LISTED_BYTES);
            bytes.extend(MAGIC);
            bytes.extend(3u16.to_le_bytes());
            bytes.extend((entries.len() as u16).to_le_bytes());
            bytes.extend(total.to_le_bytes());
            entries.iter().for_each(|entry| entry.encode(&mut bytes));
            list::encode_queues(queues, &mut bytes);
            return bytes;
        }
        let (kind, code, stages, id, read, written) = match self {
            Self::Ended { id, report, result } => {
                let code = result.as_ref().err().map_or(0, |error| error.code);
                (1u16, code, report.stages.as_slice(), *id, report.read, report.written)
            }
            Self::Progress { id, read, written } => (2, 0, &[][..], *id, *read, *written),
            Self::List { .. } => unreachable!("it has been encoded"),
        };
        let mut bytes = Vec::with_capacity(ANSWER_BYTES_MAX);
        bytes.extend(MAGIC);
        bytes.extend(kind.to_le_bytes());
        bytes.extend([code, stages.len() as u8]);
        for value in [id, read, written] {
            bytes.extend(value.to_le_bytes());
        }
        debug_assert_eq!(bytes.len(), PROGRESS_BYTES);
        let Self::Ended { result, .. } = self else { return bytes };
        let (errno, text) =
            result.as_ref().err().map_or((0, ""), |error| (error.errno, error.text.as_str()));
        let mut len = text.len().min(TEXT_BYTES_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        bytes.extend(errno.to_le_bytes());
        bytes.extend((len as u16).to_le_bytes());
        bytes.extend([0; 2]);
        debug_assert_eq!(bytes.len(), ENDED_BYTES);
        stages.iter().for_each(|stage| encode_report(stage, &mut bytes));
        bytes.extend(&text.as_bytes()[..len]);
        bytes
    }
}

fn decode_report(rest: &mut Rest<'_>) -> Result<StageReport, MessageError> {
    let kind = rest.kind()?;
    let finished = match rest.u8()? {
        0 => false,
        1 => true,
        _ => return Err(MessageError::Field("stage")),
    };
    rest.reserved(1)?;
    let offsets = rest.u16()?;
    rest.reserved(2)?;
    let (bytes, made, value) = (rest.u64()?, rest.u64()?, rest.array::<32>()?);
    let (mut digest, mut found) = (None, None);
    match kind {
        StageKind::Digest(kind) if finished && offsets == 0 => {
            digest = Some(DigestValue::decode(kind, value).ok_or(MessageError::Field("digest"))?);
        }
        StageKind::Search(_) if finished && offsets <= OFFSETS_MAX => {
            let mut value = Rest(&value);
            let count = value.u64()?;
            value.reserved(24)?;
            let offsets = (0..offsets).map(|_| rest.u64()).collect::<Result<_, _>>()?;
            found = Some(Found { count, offsets, edges: None });
        }
        _ if value == [0; 32] && offsets == 0 => {}
        _ => return Err(MessageError::Field("digest")),
    }
    Ok(StageReport { kind, bytes, made, finished, digest, found })
}

fn encode_report(stage: &StageReport, bytes: &mut Vec<u8>) {
    bytes.extend(stage.kind.codes());
    let found = stage.found.as_ref();
    let offsets = found.map_or(&[][..], |found| &found.offsets);
    bytes.extend([stage.finished.into(), 0]);
    bytes.extend((offsets.len() as u16).to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend(stage.bytes.to_le_bytes());
    bytes.extend(stage.made.to_le_bytes());
    let mut value = [0; 32];
    if let Some(digest) = &stage.digest {
        value[..digest.bytes().len()].copy_from_slice(digest.bytes());
    }
    if let Some(found) = found {
        value[..8].copy_from_slice(&found.count.to_le_bytes());
    }
    bytes.extend(value);
    offsets.iter().for_each(|offset| bytes.extend(offset.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::compression::Format;
    use crate::command::stage::{Cipher, DigestKind, SearchKind};
    use crate::engine::counters::DeviceLoad;
    use crate::engine::scoreboard::Activity;
    use proptest::prelude::*;

    fn stage() -> impl Strategy<Value = StageSpec> {
        let digest = prop::sample::select(DigestKind::ALL.to_vec());
        let cipher = || prop::sample::select(Cipher::ALL.to_vec());
        let format = || prop::sample::select(Format::ALL.to_vec());
        prop_oneof![
            digest.prop_map(StageSpec::Digest),
            (cipher(), any::<[u8; 32]>())
                .prop_map(|(cipher, key)| StageSpec::Open(cipher, Key::new(key))),
            (cipher(), any::<[u8; 32]>())
                .prop_map(|(cipher, key)| StageSpec::Seal(cipher, Key::new(key))),
            (
                prop::sample::select(SearchKind::ALL.to_vec()),
                prop::collection::vec(any::<u8>(), 1..=PATTERN_BYTES_MAX),
                0..=OFFSETS_MAX,
            )
                .prop_map(|(kind, pattern, offsets)| {
                    StageSpec::Search(SearchSpec { kind, pattern, offsets })
                }),
            (format(), 1..=9u8).prop_map(|(format, level)| {
                StageSpec::Compress(Compression::new(format, level).unwrap())
            }),
            (format(), any::<u64>(), any::<u32>()).prop_map(|(format, bytes, ratio)| {
                StageSpec::Expand(format, ExpandLimits { bytes, ratio })
            }),
        ]
    }

    fn start() -> impl Strategy<Value = StartRequest> {
        let device = || prop::sample::select(vec![Device::File, Device::Socket]);
        let stages = prop::collection::vec(stage(), 0..=STAGES_MAX);
        let limits = (any::<u32>(), any::<u32>(), any::<bool>(), any::<bool>());
        let range = (any::<u64>(), prop::option::of(0..u64::MAX), any::<u64>());
        let length = || prop::option::of(0..u64::MAX);
        let more = prop::collection::vec((any::<u64>(), length()), 0..FILES_MAX);
        let head = prop_oneof![Just(0), 0..100usize, Just(HEAD_MAX)];
        (device(), device(), range, (more, head), stages, limits).prop_map(
            |(
                source,
                sink,
                (from, bytes, to),
                (mut more, head),
                stages,
                (stall_ms, deadline_ms, returns, sync),
            )| {
                more.truncate(if source == Device::File { FILES_MAX } else { 0 });
                let returns = returns && stages.is_empty() && source != sink;
                StartRequest {
                    source,
                    sink,
                    from: if source == Device::File { from } else { 0 },
                    bytes,
                    more,
                    head: vec![7; if source == Device::Socket && !returns { head } else { 0 }],
                    to: if sink == Device::File { to } else { 0 },
                    stages,
                    stall_ms,
                    deadline_ms,
                    when_blocked: if returns { WhenBlocked::Return } else { WhenBlocked::Wait },
                    sync: sync && sink == Device::File,
                }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn requests_are_decoded_as_encoded(id: u64, start in start()) {
            let request = Request::Start { id, start };
            let encoded = request.encode();
            prop_assert!(encoded.len() <= REQUEST_BYTES_MAX);
            prop_assert_eq!(Request::decode(&encoded), Ok(request));
            prop_assert_eq!(Request::decode(&encoded[..encoded.len() - 1]), Err(MessageError::Length));
            for request in [Request::Cancel(id), Request::Progress(id), Request::List, Request::Signal] {
                prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
            }
        }

        #[test]
        fn a_changed_request_is_refused_or_means_what_it_says(start in start(), at: prop::sample::Index, value: u8) {
            let mut request = Request::Start { id: 7, start }.encode();
            let at = at.index(request.len());
            request[at] = value;
            if let Ok(decoded) = Request::decode(&request) {
                prop_assert_eq!(decoded.encode(), request);
            }
        }
    }

    #[test]
    fn answers_are_decoded_as_encoded() {
        let error = RemoteError::from(&TransferError::Stalled(5));
        let stage = |kind, digest: Option<DigestValue>| StageReport {
            kind,
            bytes: 9,
            made: 8,
            finished: digest.is_some(),
            digest,
            found: None,
        };
        let seal = StageKind::Seal(Cipher::Aes256Gcm);
        let report = Report { read: 9, written: 7, stages: vec![stage(seal, None)] };
        let failed = Answer::Ended { id: 3, result: Err(error), report: report.clone() };
        assert_eq!(Answer::decode(&failed.encode()), Ok(failed.clone()));
        let digest = DigestValue::decode(DigestKind::Md5, {
            let mut value = [0; 32];
            value[..16].fill(0xab);
            value
        });
        let mut stages = vec![stage(StageKind::Digest(DigestKind::Md5), digest); STAGES_MAX];
        let offsets = (0..u64::from(OFFSETS_MAX)).collect();
        stages[1] = StageReport {
            finished: true,
            found: Some(Found { count: 5000, offsets, edges: None }),
            ..stage(StageKind::Search(SearchKind::Lines), None)
        };
        let ended = Answer::Ended { id: 4, result: Ok(()), report: Report { stages, ..report } };
        assert_eq!(Answer::decode(&ended.encode()), Ok(ended));
        let progress = Answer::Progress { id: 1, read: 2, written: 3 };
        assert_eq!(Answer::decode(&progress.encode()), Ok(progress));
        let entry = Listed {
            id: 7,
            process: 8,
            source: Device::Socket,
            sink: Device::File,
            activity: Activity::Waiting,
            read: 9,
            written: 10,
            age_ms: 11,
            stages: vec![seal, StageKind::Digest(DigestKind::Sha1)],
        };
        let load = DeviceLoad {
            device: Device::File,
            queued: 1,
            running: 2,
            bytes_in_flight: 3,
            taken: 4,
            given: 5,
        };
        let queue = |block| DeviceQueue { block, load, waiting: 6 };
        let queues = vec![queue(Some(7)), queue(None)];
        let list = Answer::List { total: 3, entries: vec![entry; 2], queues };
        assert_eq!(list.encode().len(), HEAD_BYTES + 2 * 56 + 8 + 2 * 64);
        assert_eq!(Answer::decode(&list.encode()), Ok(list));
        let mut controls = failed.encode();
        *controls.last_mut().unwrap() = 0x1b;
        assert_eq!(Answer::decode(&controls), Err(MessageError::Field("text")));
        let text = "é".repeat(TEXT_BYTES_MAX);
        let long = RemoteError { code: 1, errno: 1, text };
        let long = Answer::Ended { id: 1, result: Err(long), report: Report::default() }.encode();
        assert!(Answer::decode(&long).is_ok() && long.len() == ENDED_BYTES + TEXT_BYTES_MAX);
    }
}
