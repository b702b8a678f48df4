//! Errors in bytes, payloads, sizes and names.

use super::Framing;
use crate::drop_reason::DropReason;
use crate::error_reply::{CommandError, ErrorReply};

/// Why bytes or a payload do not fit the framing. The data path's error: small and `Copy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FramingError {
    /// The message is, or is declared to be, longer than the maximum.
    #[error("the message is longer than its configured maximum")]
    TooLong,
    /// A header contradicts itself (a sockperf length shorter than the header).
    #[error("the message header contradicts itself")]
    BadHeader,
    /// memcached: no such command.
    #[error("the memcached command is not known")]
    UnknownCommand,
    /// memcached: the command line is malformed.
    #[error("the memcached command line is malformed")]
    BadCommand,
    /// memcached: the command line is malformed, for which the protocol has a text of its own.
    #[error("the memcached command line is malformed")]
    Command(CommandError),
    /// A memcached data block does not end in CR LF where its length says.
    #[error("the memcached data block does not end where its length says")]
    BadDataBlock,
    /// memcached: a backend's answer, or a kernel's reply, is not a response of the protocol.
    #[error("the bytes are not a memcached response")]
    BadResponse,
    /// The payload cannot be sent: it contains the terminator, contradicts its own header or the fixed size, exceeds
    /// the length field, or is not exactly one command or response.
    #[error("the framing cannot carry this payload")]
    Unframable,
    /// A request to a backend that may have no answer (`noreply`, quiet) or an answer without an end: every later
    /// answer would be matched to the wrong request.
    #[error("the request does not make the backend answer exactly once")]
    NotAnswered,
}

impl From<CommandError> for FramingError {
    fn from(error: CommandError) -> Self {
        Self::Command(error)
    }
}

/// A framing that contradicts the configured sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FramingConfigError {
    /// No message could ever arrive.
    #[error("{key} is 0: give the length of the longest message in bytes, from 1")]
    Zero {
        /// The configuration key.
        key: &'static str,
    },
    /// `fixed:0`.
    #[error("framing fixed:0 carries no bytes: give the message length, from fixed:1")]
    FixedZero,
    /// Every message would be over the maximum.
    #[error(
        "messages of framing fixed:{size} exceed {key} = {max}: raise {key} to at least {size}"
    )]
    FixedOverMaximum {
        /// N of `fixed:N`.
        size: u32,
        /// The configuration key.
        key: &'static str,
        /// Its value.
        max: usize,
    },
    /// The length field cannot count to the maximum.
    #[error(
        "framing length:u16 carries at most 65535 bytes but {key} = {max}: lower {key} or use length:u32"
    )]
    LengthU16 {
        /// The configuration key.
        key: &'static str,
        /// Its value.
        max: usize,
    },
    /// Not even the header fits.
    #[error(
        "a sockperf message has at least 14 bytes but {key} = {max}: raise {key} to at least 14"
    )]
    SockperfUnderHeader {
        /// The configuration key.
        key: &'static str,
        /// Its value.
        max: usize,
    },
}

/// An unknown framing name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown framing `{0}`: write {choices}", choices = Framing::choices())]
pub struct FramingParseError(pub(super) String);

impl FramingError {
    /// The reason to count for a client's stream, or for a reply that could not be encoded.
    pub const fn drop_reason(self) -> DropReason {
        match self {
            Self::TooLong => DropReason::TooLong,
            Self::BadResponse | Self::Unframable => DropReason::ReplyUnframable,
            Self::BadHeader
            | Self::UnknownCommand
            | Self::BadCommand
            | Self::Command(_)
            | Self::BadDataBlock
            | Self::NotAnswered => DropReason::BadFraming,
        }
    }

    /// The reason to count for a backend's stream, or for a request to it that could not be encoded.
    pub const fn backend_drop_reason(self) -> DropReason {
        match self {
            Self::TooLong => DropReason::BackendTooLong,
            _ => DropReason::BackendProtocol,
        }
    }
}

impl From<FramingError> for ErrorReply {
    fn from(error: FramingError) -> Self {
        match error {
            FramingError::TooLong => Self::TooLong,
            FramingError::UnknownCommand => Self::UnknownCommand,
            FramingError::BadHeader | FramingError::BadCommand => Self::BadCommand,
            FramingError::Command(error) => Self::Command(error),
            FramingError::BadDataBlock => Self::BadDataBlock,
            FramingError::BadResponse | FramingError::Unframable | FramingError::NotAnswered => {
                Self::Failed
            }
        }
    }
}
