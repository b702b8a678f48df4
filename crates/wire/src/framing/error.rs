//! Errors in bytes, payloads, sizes and names, and the replies to clients.

use super::Framing;
use crate::drop_reason::DropReason;

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

macro_rules! command_errors {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $text:literal; )+) => {
        /// What is wrong with a command line of memcached, where memcached 1.6.18 has words for it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum CommandError { $( $(#[doc = $doc])+ $variant, )+ }

        impl CommandError {
            /// All of them.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The error line.
            pub const fn reply(self) -> &'static [u8] {
                match self { $( Self::$variant => concat!("CLIENT_ERROR ", $text, "\r\n").as_bytes(), )+ }
            }
        }
    };
}

command_errors! {
    /// The expiry time of `touch`, `gat` and `gats`, or the delay of `flush_all`.
    Exptime = "invalid exptime argument";
    /// The amount of `incr` and `decr`.
    Delta = "invalid numeric delta argument";
    /// What follows the key of `delete`.
    Delete = "bad command line format.  Usage: delete <key> [noreply]";
    /// Too many flags of `mg`.
    MetaGetFlags = "options flags are too long";
    /// Too many flags of another meta command.
    MetaFlags = "options flags too long";
    /// A flag twice.
    DuplicateFlag = "duplicate flag";
    /// An unknown flag.
    InvalidFlag = "invalid flag";
    /// One of these, of `md` and `ma`.
    AnyFlag = "invalid or duplicate flag";
    /// A key that is not in base64.
    Key = "error decoding key";
    /// The number of a flag.
    FlagValue = "bad token in command line format";
    /// The length of a mode.
    ModeLength = "incorrect length for M token";
    /// The mode of `ms`.
    SetMode = "invalid mode for ms M token";
    /// The mode of `ma`.
    ArithmeticMode = "invalid mode for ma M token";
    /// The first value of `ma`.
    Initial = "invalid numeric initial value";
    /// The amount of `ma`.
    DeltaValue = "invalid numeric delta value";
    /// The length of an opaque.
    Opaque = "opaque token too long";
}

impl From<CommandError> for FramingError {
    fn from(error: CommandError) -> Self {
        Self::Command(error)
    }
}

/// The content of an error reply. See [`Framing::error_reply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorReply {
    /// The request is malformed, with the words of memcached.
    Command(CommandError),
    /// No such command.
    UnknownCommand,
    /// The request is malformed.
    BadCommand,
    /// The data of the request does not have the announced length.
    BadDataBlock,
    /// The request is too long.
    TooLong,
    /// The service has no room for the request at present.
    OutOfCapacity,
    /// The request was accepted but its reply did not arrive in time.
    Timeout,
    /// The request was accepted and then lost or refused for another reason.
    Failed,
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
