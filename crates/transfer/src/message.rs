//! The messages between a program and a transfer engine in another process, version 1.
//!
//! They travel over a Unix socket of type seqpacket, so each arrives whole. Integers are little-endian, reserved bytes are
//! zero, and every message has one encoding; anything else is refused.
//!
//! ```text
//! request (80 bytes)                          answer (256 bytes)
//!  0 u32  "SVT1"                               0 u32  "SVT1"
//!  4 u16  kind: 1 send, 2 receive,             4 u16  kind: 1 ended, 2 progress
//!         3 cancel, 4 progress                 6 u8   reason: 0 success, or a code
//!  6 u16  flags: 1 return when blocked         7 u8   digest, as in the request
//!  8 u64  id, chosen by the caller             8 u64  id
//! 16 u64  offset in the file                  16 u64  bytes read from the source
//! 24 u64  bytes; 2^64 - 1: to the end         24 u64  bytes that the sink has
//! 32 u32  stall time in ms; 0: the default    32 u32  error number (errno)
//! 36 u32  deadline in ms; 0: none             36 u32  reserved
//! 40 u8   digest: 0 none, 1 MD5,              40      digest (32 bytes)
//!         2 SHA-256, 3 CRC32C                 72 u64  bytes through the digest
//! 41 u8   seal: 0 none, 1 AES-256-GCM         80 u64  bytes through the seal
//! 42      reserved (6 bytes)                  88 u16  bytes of the text
//! 48      key (32 bytes)                      90      text (166 bytes, UTF-8)
//! ```
//!
//! A send or receive request carries two descriptors (SCM_RIGHTS): the file, then the socket. It gets one answer of kind 1, when the
//! transfer ends. A cancel gets none of its own: its transfer ends. A program that closes the connection cancels its
//! transfers. A progress request is answered by kind 2, or not at all if its transfer has ended.

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::error::TransferError;
use crate::flow::{Report, StageReport};
use crate::pipeline::{Command, Direction, STALL_DEFAULT, WhenBlocked};
use crate::stage::{DigestKind, DigestValue, Key};

/// Bytes of a request.
pub const REQUEST_BYTES: usize = 80;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 256;

const MAGIC: [u8; 4] = *b"SVT1";
const RETURN_WHEN_BLOCKED: u16 = 1;
const TO_THE_END: u64 = u64::MAX;
const TEXT_AT: usize = 90;
const TEXT_BYTES_MAX: usize = ANSWER_BYTES - TEXT_AT;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Start a transfer; comes with two descriptors.
    Start {
        /// The caller's number for it.
        id: u64,
        /// What to do.
        order: Order,
    },
    /// End a transfer.
    Cancel(u64),
    /// Ask how far a transfer is.
    Progress(u64),
}

/// A [`Command`] without its descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Where the bytes go.
    pub direction: Direction,
    /// The first byte of the range in the file.
    pub offset: u64,
    /// Length of the range; `None`: to the end.
    pub bytes: Option<u64>,
    /// The digest.
    pub digest: Option<DigestKind>,
    /// The key of the seal.
    pub seal: Option<Key>,
    /// How long nothing may move, in milliseconds; 0: the default.
    pub stall_ms: u32,
    /// How long it may take, in milliseconds; 0: as long as it moves.
    pub deadline_ms: u32,
    /// Whether it waits for the socket.
    pub when_blocked: WhenBlocked,
}

impl Order {
    /// The order of a command.
    pub fn of(command: &Command) -> Self {
        let ms = |limit: Duration| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1);
        Self {
            direction: command.direction,
            offset: command.offset,
            bytes: command.bytes.filter(|bytes| *bytes != TO_THE_END),
            digest: command.digest,
            seal: command.seal.clone(),
            stall_ms: if command.stall == STALL_DEFAULT { 0 } else { ms(command.stall) },
            deadline_ms: command.deadline.map_or(0, ms),
            when_blocked: command.when_blocked,
        }
    }

    /// The command with these descriptors.
    pub fn command(self, file: OwnedFd, socket: OwnedFd) -> Command {
        let ms = |ms: u32| Duration::from_millis(ms.into());
        Command {
            direction: self.direction,
            file,
            socket,
            offset: self.offset,
            bytes: self.bytes,
            digest: self.digest,
            seal: self.seal,
            stall: if self.stall_ms == 0 { STALL_DEFAULT } else { ms(self.stall_ms) },
            deadline: (self.deadline_ms != 0).then(|| ms(self.deadline_ms)),
            when_blocked: self.when_blocked,
        }
    }
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// It has another length.
    #[error("the message has another length than version 1 of the protocol")]
    Length,
    /// It does not begin with `SVT1`.
    #[error("the message is not of version 1 of the protocol: use matching builds")]
    Version,
    /// A field has a value without a meaning.
    #[error("a field of the message has a value without a meaning: {0}")]
    Field(&'static str),
}

impl Request {
    /// Reads a request.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let bytes: &[u8; REQUEST_BYTES] = bytes.try_into().map_err(|_| MessageError::Length)?;
        check_magic(bytes)?;
        let (kind, flags, id) = (u16_at(bytes, 4), u16_at(bytes, 6), u64_at(bytes, 8));
        let direction = match kind {
            1 => Direction::Send,
            2 => Direction::Receive,
            3 | 4 if bytes[16..].iter().any(|byte| *byte != 0) || flags != 0 => {
                return Err(MessageError::Field("reserved"));
            }
            3 => return Ok(Self::Cancel(id)),
            4 => return Ok(Self::Progress(id)),
            _ => return Err(MessageError::Field("kind")),
        };
        let when_blocked = match flags {
            0 => WhenBlocked::Wait,
            RETURN_WHEN_BLOCKED => WhenBlocked::Return,
            _ => return Err(MessageError::Field("flags")),
        };
        let digest = digest_kind(bytes[40])?;
        let key = &bytes[48..];
        let seal = match bytes[41] {
            0 if key == [0; 32] => None,
            1 if direction == Direction::Send => Key::parse(key),
            _ => return Err(MessageError::Field("seal")),
        };
        if bytes[42..48] != [0; 6] {
            return Err(MessageError::Field("reserved"));
        }
        if when_blocked == WhenBlocked::Return && (digest.is_some() || seal.is_some()) {
            return Err(MessageError::Field("flags"));
        }
        let order = Order {
            direction,
            offset: u64_at(bytes, 16),
            bytes: Some(u64_at(bytes, 24)).filter(|bytes| *bytes != TO_THE_END),
            digest,
            seal,
            stall_ms: u32_at(bytes, 32),
            deadline_ms: u32_at(bytes, 36),
            when_blocked,
        };
        Ok(Self::Start { id, order })
    }

    /// Writes it.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        let (kind, id) = match self {
            Self::Start { id, order } if order.direction == Direction::Send => (1u16, *id),
            Self::Start { id, .. } => (2, *id),
            Self::Cancel(id) => (3, *id),
            Self::Progress(id) => (4, *id),
        };
        bytes[4..6].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        let Self::Start { order, .. } = self else { return bytes };
        if order.when_blocked == WhenBlocked::Return {
            bytes[6..8].copy_from_slice(&RETURN_WHEN_BLOCKED.to_le_bytes());
        }
        bytes[16..24].copy_from_slice(&order.offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&order.bytes.unwrap_or(TO_THE_END).to_le_bytes());
        bytes[32..36].copy_from_slice(&order.stall_ms.to_le_bytes());
        bytes[36..40].copy_from_slice(&order.deadline_ms.to_le_bytes());
        bytes[40] = digest_code(order.digest);
        if let Some(key) = &order.seal {
            bytes[41] = 1;
            bytes[48..].copy_from_slice(key.bytes());
        }
        bytes
    }
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
        TransferError::NAMES[usize::from(self.code) - 1]
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
        let bytes: &[u8; ANSWER_BYTES] = bytes.try_into().map_err(|_| MessageError::Length)?;
        check_magic(bytes)?;
        let (id, read, written) = (u64_at(bytes, 8), u64_at(bytes, 16), u64_at(bytes, 24));
        match u16_at(bytes, 4) {
            1 => {}
            2 if bytes[6..8] == [0; 2] && bytes[32..].iter().all(|byte| *byte == 0) => {
                return Ok(Self::Progress { id, read, written });
            }
            2 => return Err(MessageError::Field("reserved")),
            _ => return Err(MessageError::Field("kind")),
        }
        let (code, kind, errno) = (bytes[6], digest_kind(bytes[7])?, u32_at(bytes, 32) as i32);
        let text_bytes = usize::from(u16_at(bytes, 88));
        if bytes[36..40] != [0; 4] || text_bytes > TEXT_BYTES_MAX {
            return Err(MessageError::Field("text"));
        }
        let (text, rest) = bytes[TEXT_AT..].split_at(text_bytes);
        if rest.iter().any(|byte| *byte != 0) {
            return Err(MessageError::Field("reserved"));
        }
        let text = std::str::from_utf8(text).map_err(|_| MessageError::Field("text"))?;
        let result = match code {
            0 if errno == 0 && text.is_empty() => Ok(()),
            1.. if usize::from(code) <= TransferError::NAMES.len() => {
                if text.chars().any(char::is_control) {
                    return Err(MessageError::Field("text"));
                }
                Err(RemoteError { code, errno, text: text.to_owned() })
            }
            _ => return Err(MessageError::Field("reason")),
        };
        let mut report = Report { read, written, ..Report::default() };
        let value: [u8; 32] = bytes[40..72].try_into().expect("32 bytes");
        match kind.filter(|_| code == 0) {
            Some(kind) => {
                let digest = DigestValue::decode(kind, value);
                report.digest = Some(digest.ok_or(MessageError::Field("digest"))?);
            }
            None if value == [0; 32] => {}
            None => return Err(MessageError::Field("digest")),
        }
        let (digested, sealed) = (u64_at(bytes, 72), u64_at(bytes, 80));
        match kind {
            Some(kind) => report.stages.push(StageReport { name: kind.name(), bytes: digested }),
            None if digested == 0 => {}
            None => return Err(MessageError::Field("stages")),
        }
        // An empty sealed stream is not told apart from one without a seal.
        if sealed > 0 {
            report.stages.push(StageReport { name: SEAL, bytes: sealed });
        }
        Ok(Self::Ended { id, result, report })
    }

    /// Writes it. A text that is too long is cut.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        let (kind, id, read, written) = match self {
            Self::Ended { id, report, .. } => (1u16, *id, report.read, report.written),
            Self::Progress { id, read, written } => (2, *id, *read, *written),
        };
        bytes[4..6].copy_from_slice(&kind.to_le_bytes());
        for (at, value) in [(8, id), (16, read), (24, written)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let Self::Ended { result, report, .. } = self else { return bytes };
        for stage in &report.stages {
            let at = if stage.name == SEAL { 80 } else { 72 };
            bytes[at..at + 8].copy_from_slice(&stage.bytes.to_le_bytes());
            if stage.name != SEAL {
                bytes[7] = digest_code(DigestKind::named(stage.name));
            }
        }
        if let Some(digest) = &report.digest {
            bytes[40..40 + digest.bytes().len()].copy_from_slice(digest.bytes());
        }
        if let Err(error) = result {
            bytes[6] = error.code;
            bytes[32..36].copy_from_slice(&error.errno.to_le_bytes());
            let mut len = error.text.len().min(TEXT_BYTES_MAX);
            while !error.text.is_char_boundary(len) {
                len -= 1;
            }
            bytes[88..90].copy_from_slice(&(len as u16).to_le_bytes());
            bytes[TEXT_AT..TEXT_AT + len].copy_from_slice(&error.text.as_bytes()[..len]);
        }
        bytes
    }
}

const SEAL: &str = "aes-256-gcm";

fn check_magic(bytes: &[u8]) -> Result<(), MessageError> {
    if bytes.starts_with(&MAGIC) { Ok(()) } else { Err(MessageError::Version) }
}

fn digest_kind(code: u8) -> Result<Option<DigestKind>, MessageError> {
    match code {
        0 => Ok(None),
        1..=3 => Ok(Some(DigestKind::ALL[usize::from(code) - 1])),
        _ => Err(MessageError::Field("digest")),
    }
}

fn digest_code(kind: Option<DigestKind>) -> u8 {
    kind.map_or(0, |kind| kind as u8 + 1)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order() -> impl Strategy<Value = Order> {
        let digest = prop::option::of(prop::sample::select(DigestKind::ALL.to_vec()));
        let seal = prop::option::of(any::<[u8; 32]>());
        let numbers = (any::<u64>(), prop::option::of(0..u64::MAX), any::<u32>(), any::<u32>());
        (any::<bool>(), numbers, digest, seal, any::<bool>()).prop_map(
            |(sends, (offset, bytes, stall_ms, deadline_ms), digest, seal, returns)| {
                let seal = seal.filter(|_| sends).map(Key::new);
                let returns = returns && digest.is_none() && seal.is_none();
                Order {
                    direction: if sends { Direction::Send } else { Direction::Receive },
                    offset,
                    bytes,
                    digest,
                    seal,
                    stall_ms,
                    deadline_ms,
                    when_blocked: if returns { WhenBlocked::Return } else { WhenBlocked::Wait },
                }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn requests_are_decoded_as_encoded(id: u64, order in order()) {
            let request = Request::Start { id, order };
            prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
            prop_assert_eq!(Request::decode(&Request::Cancel(id).encode()), Ok(Request::Cancel(id)));
        }

        #[test]
        fn garbage_is_refused_or_means_what_it_says(mut bytes: [u8; 32], at in 0..REQUEST_BYTES, value: u8) {
            bytes[..4].copy_from_slice(&MAGIC);
            let mut request = Request::Cancel(7).encode();
            request[..32].copy_from_slice(&bytes);
            request[at] = value;
            if let Ok(decoded) = Request::decode(&request) {
                prop_assert_eq!(decoded.encode(), request);
            }
        }
    }

    #[test]
    fn answers_are_decoded_as_encoded() {
        let error = RemoteError::from(&TransferError::Stalled(5));
        let report = Report { read: 9, written: 7, ..Report::default() };
        let failed = Answer::Ended { id: 3, result: Err(error), report: report.clone() };
        assert_eq!(Answer::decode(&failed.encode()), Ok(failed.clone()));
        let digest = DigestValue::decode(DigestKind::Md5, {
            let mut value = [0; 32];
            value[..16].fill(0xab);
            value
        });
        let stages =
            vec![StageReport { name: "md5", bytes: 9 }, StageReport { name: SEAL, bytes: 9 }];
        let report = Report { digest, stages, ..report };
        let ended = Answer::Ended { id: 4, result: Ok(()), report };
        assert_eq!(Answer::decode(&ended.encode()), Ok(ended));
        let progress = Answer::Progress { id: 1, read: 2, written: 3 };
        assert_eq!(Answer::decode(&progress.encode()), Ok(progress));
        let mut controls = failed.encode();
        controls[TEXT_AT] = 0x1b;
        assert_eq!(Answer::decode(&controls), Err(MessageError::Field("text")));
    }
}
