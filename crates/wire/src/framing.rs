//! Framings: where one message ends and the next begins on a byte stream.
//!
//! A TCP connection carries bytes, a service answers messages, and a framing says how the one
//! becomes the other. It applies to streams only; a datagram is a message by itself.
//!
//! | framing       | a message on the wire                                  | the payload             |
//! |---------------|--------------------------------------------------------|-------------------------|
//! | `raw`         | what one read returned                                 | the same bytes          |
//! | `fixed:N`     | N bytes                                                | the same bytes          |
//! | `length:u16`  | 2 bytes of length, then that many bytes                | without the length      |
//! | `length:u32`  | 4 bytes of length, then that many bytes                | without the length      |
//! | `sockperf`    | a 14-byte header whose length counts header and data   | header and data         |
//! | `line`        | bytes up to LF; a CR before it is dropped              | without the terminator  |
//! | `line-crlf`   | the same; what is written ends in CR LF                | without the terminator  |
//! | `memcached`   | one text or meta command, or one response              | all of it               |
//!
//! Every framing has two grammars. The *request* grammar is what a client of a service sends and a
//! backend receives; the *response* grammar is the other direction. A service therefore uses
//! [`Framing::parse_request`] and [`Framing::encode_reply`], a client mqueue (backend)
//! [`Framing::encode_request`] and [`Framing::parse_response`].
//!
//! # Parsing
//!
//! The caller keeps the bytes of a connection that no message has taken yet, and beside them one
//! [`ParseState`]. After each read it calls the parser until that answers [`Parsed::Incomplete`]:
//!
//! * The front of the buffer belongs to the state. Between two calls bytes may be added behind, and
//!   the `consumed` bytes of an answer must be taken off the front; nothing else may change. An answer
//!   that cannot be used yet, for want of credit, may be left and asked for again.
//! * The state remembers how far the front has been read, so a client that sends one byte at a time
//!   costs work in proportion to its bytes, not to their square.
//! * A message is at most `max_message_bytes` long: longer ones are refused as soon as that can be
//!   known, from a length field before any payload, in a line at the first byte too many. `Incomplete`
//!   is never the answer to a buffer of [`Framing::request_bytes_max`] (or
//!   [`Framing::response_bytes_max`]) bytes, so a buffer of that size never has to grow.
//! * An `Err` says that the stream cannot be understood any further. The caller sends the error reply
//!   of the protocol if it has one, counts [`FramingError::drop_reason`] and closes the connection.
//! * What can be refused without losing the place in the stream is [`Parsed::Refused`]; the connection
//!   goes on.
//! * Bytes left when the peer closes its side are a truncated message: the grammars know no end but
//!   their own.
//!
//! # Adding a framing
//!
//! One file that implements the `Grammar` trait, one variant of [`Framing`], its arm in `dispatch!`
//! and its name in `FromStr` and `Display`.

mod fixed;
mod length;
mod line;
mod memcached;
mod raw;
mod sockperf;

pub use memcached::{Assembly, Piece, UDP_HEADER_BYTES, UdpHeader};
pub use sockperf::SOCKPERF_HEADER_BYTES;

use crate::drop_reason::DropReason;
use std::fmt;
use std::str::FromStr;

/// A framing as configured: `raw`, `fixed:N`, `length:u16`, `length:u32`, `sockperf`, `line`,
/// `line-crlf` or `memcached`. See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Framing {
    /// A message is what one read returned, at most the maximum; the rest is the next message.
    Raw,
    /// Every request has this many bytes, from 1. Replies are written as produced.
    Fixed(u32),
    /// A length of two bytes in network byte order, not counting itself, then the message.
    LengthU16,
    /// A length of four bytes in network byte order, not counting itself, then the message.
    LengthU32,
    /// The header of the sockperf benchmark: u64 sequence, u16 flags, u32 length of the whole message.
    Sockperf,
    /// Text lines: LF or CR LF ends a request, and the reply ends as the client's lines do.
    Line,
    /// Text lines: LF or CR LF ends a request, CR LF a reply.
    LineCrLf,
    /// The memcached text protocol, classic and meta commands (memcached, doc/protocol.txt).
    Memcached,
}

/// How far the parser has read the front of a connection's buffer. Starts as `default()`; belongs to
/// one direction of one connection; is back at its default whenever a message has been taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParseState {
    /// Offset of the line or part under examination; everything before it is valid.
    settled: u32,
    /// No line ending lies in `settled..scanned`.
    scanned: u32,
    /// Nothing can be decided before the buffer has this many bytes.
    needed: u32,
    /// Where in its grammar the parser stands; the grammar's own numbering, 0 at the start.
    phase: u8,
}

/// What the parser found at the front of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Parsed {
    /// Not a whole message yet.
    Incomplete {
        /// At least this many more bytes (from 1) are needed before anything can be decided.
        more: usize,
    },
    /// A whole message: its payload is `buffer[start..end]`.
    Message {
        /// Bytes to take off the front of the buffer.
        consumed: usize,
        /// Start of the payload.
        start: usize,
        /// End of the payload, at most `consumed`.
        end: usize,
        /// Whether the sender waits for a reply; `Nothing` for every response.
        expects: Expects,
    },
    /// Not a message: the framing refuses it and answers by itself with
    /// `error_reply(error.into())`, in the order of the replies. The connection goes on.
    Refused {
        /// Bytes to take off the front of the buffer, at least 1.
        consumed: usize,
        /// Why.
        error: FramingError,
    },
    /// The client asks to end the connection: send what is owed, then close. Later bytes are ignored.
    Quit {
        /// Bytes to take off the front of the buffer, at least 1.
        consumed: usize,
    },
}

/// Whether a request will be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expects {
    /// Exactly one reply.
    Reply,
    /// None: a reply would be taken for the answer to a later request. The request is finished once
    /// the kernel has it.
    Nothing,
    /// The kernel decides (memcached's quiet meta commands are silent about the nominal outcome). The
    /// request keeps its place in the order of replies until the kernel sends a reply, sends an empty
    /// reply, or drops it; the latter two put nothing on the wire. The client finds the end of what
    /// it asked by a command that always answers, `mn`.
    ReplyOrNothing,
}

/// Why bytes or a payload do not fit the framing. The data path's error: small and `Copy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FramingError {
    /// The message is, or is announced to be, longer than the maximum.
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
    /// A memcached data block does not end in CR LF where its length says.
    #[error("the memcached data block does not end where its length says")]
    BadDataBlock,
    /// memcached: a backend's answer, or a kernel's reply, is not a response of the protocol.
    #[error("the bytes are not a memcached response")]
    BadResponse,
    /// The payload cannot be carried: it holds the terminator, disagrees with its own header or with
    /// the fixed size, exceeds the length field, or is not exactly one command or response.
    #[error("the framing cannot carry this payload")]
    Unframable,
    /// A request to a backend that may stay unanswered (`noreply`, quiet) or whose answer has no end:
    /// every later answer would be matched to the wrong request.
    #[error("the request does not make the backend answer exactly once")]
    NotAnswered,
}

/// What an error reply tells the client. See [`Framing::error_reply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorReply {
    /// No such command.
    UnknownCommand,
    /// The request is malformed.
    BadCommand,
    /// The data of the request does not have the announced length.
    BadDataBlock,
    /// The request is too long.
    TooLong,
    /// The service has no room for the request now.
    OutOfCapacity,
    /// The request was accepted but its reply did not come in time.
    Timeout,
    /// The request was accepted and then lost or refused for another reason.
    Failed,
}

/// A framing that cannot work with the configured sizes.
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

/// A framing name that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown framing `{0}`: write raw, fixed:N (N bytes, from 1), length:u16, length:u32, sockperf, line, line-crlf or memcached"
)]
pub struct FramingParseError(String);

/// One framing: two grammars, each parsed on one side and written on the other. See the module's
/// text for the contract of the parsers; the other methods are described at [`Framing`].
trait Grammar {
    /// Refuses sizes with which the framing cannot work; the keys are named in the error.
    fn check(&self, sizes: &Sizes) -> Result<(), FramingConfigError>;

    /// The most bytes a request with a payload of `max` bytes takes on the wire.
    fn request_bytes_max(&self, max: usize) -> usize;

    /// The most bytes a response with a payload of `max` bytes takes on the wire.
    fn response_bytes_max(&self, max: usize) -> usize {
        self.request_bytes_max(max)
    }

    fn parse_request(
        &self,
        state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError>;

    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError>;

    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError>;

    fn parse_response(
        &self,
        state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError>;

    /// See [`Framing::mark`].
    fn mark<'a>(&self, _request: &'a [u8]) -> &'a [u8] {
        &[]
    }

    /// See [`Framing::fits`].
    fn fits(&self, _mark: &[u8], _response: &[u8]) -> bool {
        true
    }

    /// The protocol's own way to report an error.
    fn error_reply(&self, _what: ErrorReply) -> Option<&'static [u8]> {
        None
    }
}

/// The two maxima a framing is checked against, with the configuration keys they come from.
struct Sizes {
    request_key: &'static str,
    request_max: usize,
    response_key: &'static str,
    response_max: usize,
    /// Whether this is a backend's framing, where the engine parses the responses.
    backend: bool,
}

/// Evaluates `$body` with `$grammar` bound to the grammar of `$framing`: static dispatch, so that the
/// short framings are inlined into the caller's loop.
macro_rules! dispatch {
    ($framing:expr, $grammar:ident => $body:expr) => {
        match $framing {
            Framing::Raw => {
                let $grammar = raw::Raw;
                $body
            }
            Framing::Fixed(size) => {
                let $grammar = fixed::Fixed(size);
                $body
            }
            Framing::LengthU16 => {
                let $grammar = length::Length::<2>;
                $body
            }
            Framing::LengthU32 => {
                let $grammar = length::Length::<4>;
                $body
            }
            Framing::Sockperf => {
                let $grammar = sockperf::Sockperf;
                $body
            }
            Framing::Line => {
                let $grammar = line::Line::<false>;
                $body
            }
            Framing::LineCrLf => {
                let $grammar = line::Line::<true>;
                $body
            }
            Framing::Memcached => {
                let $grammar = memcached::Memcached;
                $body
            }
        }
    };
}

impl Framing {
    /// Refuses a service whose `max_message_bytes` or `max_reply_bytes` contradict its framing.
    pub fn check(
        self,
        max_message_bytes: usize,
        max_reply_bytes: usize,
    ) -> Result<(), FramingConfigError> {
        self.check_sizes(&Sizes {
            request_key: "max_message_bytes",
            request_max: max_message_bytes,
            response_key: "max_reply_bytes",
            response_max: max_reply_bytes,
            backend: false,
        })
    }

    /// Refuses a backend whose framing contradicts the sizes of its client mqueues: a kernel sends it
    /// requests of at most the service's `max_reply_bytes` and receives responses of at most
    /// `max_message_bytes`, since both travel through the same rings as the service's own messages.
    pub fn check_backend(
        self,
        max_message_bytes: usize,
        max_reply_bytes: usize,
    ) -> Result<(), FramingConfigError> {
        self.check_sizes(&Sizes {
            request_key: "max_reply_bytes",
            request_max: max_reply_bytes,
            response_key: "max_message_bytes",
            response_max: max_message_bytes,
            backend: true,
        })
    }

    fn check_sizes(self, sizes: &Sizes) -> Result<(), FramingConfigError> {
        if sizes.request_max == 0 {
            return Err(FramingConfigError::Zero { key: sizes.request_key });
        }
        if sizes.backend && sizes.response_max == 0 {
            return Err(FramingConfigError::Zero { key: sizes.response_key });
        }
        dispatch!(self, grammar => grammar.check(sizes))
    }

    /// The most bytes one request takes on the wire when its payload has at most `max_message_bytes`:
    /// the size of a connection's receive buffer. [`Self::parse_request`] never answers `Incomplete`
    /// to a buffer this full.
    pub fn request_bytes_max(self, max_message_bytes: usize) -> usize {
        dispatch!(self, grammar => grammar.request_bytes_max(max_message_bytes))
    }

    /// As [`Self::request_bytes_max`], for [`Self::parse_response`].
    pub fn response_bytes_max(self, max_response_bytes: usize) -> usize {
        dispatch!(self, grammar => grammar.response_bytes_max(max_response_bytes))
    }

    /// Service side: looks for one request at the front of `buffer`. `max_message_bytes` is at least 1
    /// and the same in every call for a connection. See the module's text for the contract.
    #[inline]
    pub fn parse_request(
        self,
        state: &mut ParseState,
        buffer: &[u8],
        max_message_bytes: usize,
    ) -> Result<Parsed, FramingError> {
        dispatch!(self, grammar => grammar.parse_request(state, buffer, max_message_bytes))
    }

    /// Service side: appends a kernel's reply to `out` as it goes on the wire. On an error `out` is
    /// unchanged.
    #[inline]
    pub fn encode_reply(self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        dispatch!(self, grammar => grammar.encode_reply(reply, out))
    }

    /// The framing of replies to a client whose last request line ended in CR LF, or did not.
    #[inline]
    pub const fn as_client_writes(self, crlf: bool) -> Self {
        match (self, crlf) {
            (Self::Line, true) => Self::LineCrLf,
            (framing, _) => framing,
        }
    }

    /// The bytes that report an error to a client, complete as they go on the wire; `None` where the
    /// protocol has no way to say it, and only closing the connection is left.
    pub fn error_reply(self, what: ErrorReply) -> Option<&'static [u8]> {
        dispatch!(self, grammar => grammar.error_reply(what))
    }

    /// Backend side: appends a kernel's request to `out` as it goes on the wire. The payload must be
    /// exactly one request that the backend answers exactly once. On an error `out` is unchanged.
    #[inline]
    pub fn encode_request(self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        dispatch!(self, grammar => grammar.encode_request(request, out))
    }

    /// Backend side: looks for one response at the front of `buffer`. Answers `Incomplete` or
    /// `Message` only: what a backend sends is either right or the end of its connection. No framing
    /// needs to know the request, the responses to what [`Self::encode_request`] lets through tell
    /// where they end.
    #[inline]
    pub fn parse_response(
        self,
        state: &mut ParseState,
        buffer: &[u8],
        max_response_bytes: usize,
    ) -> Result<Parsed, FramingError> {
        dispatch!(self, grammar => grammar.parse_response(state, buffer, max_response_bytes))
    }

    /// Backend side: the part of a request that [`Self::fits`] compares with its response; nothing where
    /// the framing says nothing about that. `request` is what [`Self::encode_request`] has accepted.
    #[inline]
    pub fn mark(self, request: &[u8]) -> &[u8] {
        dispatch!(self, grammar => grammar.mark(request))
    }

    /// Backend side: whether a response can be the answer to the request with this mark. `response` is a
    /// payload that [`Self::parse_response`] found.
    #[inline]
    pub fn fits(self, mark: &[u8], response: &[u8]) -> bool {
        dispatch!(self, grammar => grammar.fits(mark, response))
    }
}

impl FromStr for Framing {
    type Err = FramingParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let framing = match text {
            "raw" => Self::Raw,
            "length:u16" => Self::LengthU16,
            "length:u32" => Self::LengthU32,
            "sockperf" => Self::Sockperf,
            "line" => Self::Line,
            "line-crlf" => Self::LineCrLf,
            "memcached" => Self::Memcached,
            _ => text
                .strip_prefix("fixed:")
                // `parse` alone would also take a sign.
                .filter(|size| size.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|size| size.parse().ok())
                .filter(|size| *size > 0)
                .map(Self::Fixed)
                .ok_or_else(|| FramingParseError(text.to_owned()))?,
        };
        Ok(framing)
    }
}

impl fmt::Display for Framing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw => f.write_str("raw"),
            Self::Fixed(size) => write!(f, "fixed:{size}"),
            Self::LengthU16 => f.write_str("length:u16"),
            Self::LengthU32 => f.write_str("length:u32"),
            Self::Sockperf => f.write_str("sockperf"),
            Self::Line => f.write_str("line"),
            Self::LineCrLf => f.write_str("line-crlf"),
            Self::Memcached => f.write_str("memcached"),
        }
    }
}

impl FramingError {
    /// The reason to count for a client's stream, or for a reply that could not be encoded.
    pub const fn drop_reason(self) -> DropReason {
        match self {
            Self::TooLong => DropReason::TooLong,
            Self::BadResponse | Self::Unframable => DropReason::ReplyUnframable,
            Self::BadHeader
            | Self::UnknownCommand
            | Self::BadCommand
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
            FramingError::BadDataBlock => Self::BadDataBlock,
            FramingError::BadResponse | FramingError::Unframable | FramingError::NotAnswered => {
                Self::Failed
            }
        }
    }
}

impl From<DropReason> for ErrorReply {
    /// What to tell the client of a request that was lost for `reason`.
    fn from(reason: DropReason) -> Self {
        match reason {
            DropReason::TooLong => Self::TooLong,
            DropReason::BadFraming | DropReason::TooShort | DropReason::BadLength => {
                Self::BadCommand
            }
            DropReason::RequestTimeout => Self::Timeout,
            DropReason::NoCredit
            | DropReason::NoAccelerator
            | DropReason::QueueTime
            | DropReason::HandoverFull
            | DropReason::ReplyMemory
            | DropReason::Draining => Self::OutOfCapacity,
            _ => Self::Failed,
        }
    }
}

impl ParseState {
    /// Finds the LF that ends the line under examination, looking at each byte once over all calls.
    fn find_lf(&mut self, window: &[u8]) -> Option<usize> {
        let from = (self.scanned as usize).min(window.len());
        let found = memchr::memchr(b'\n', &window[from..]).map(|at| from + at);
        self.scanned = offset(found.unwrap_or(window.len()));
        found
    }

    /// The bytes still missing to what an earlier call found necessary; `None` when they are there.
    fn missing(&self, buffer: &[u8]) -> Option<Parsed> {
        let more = (self.needed as usize).saturating_sub(buffer.len());
        (more > 0).then_some(Parsed::Incomplete { more })
    }
}

/// The largest offset that a [`ParseState`] holds, far above the largest message.
const OFFSET_MAX: usize = u32::MAX as usize;

/// A buffer offset as the state stores it; a larger one only lets the state remember less.
fn offset(at: usize) -> u32 {
    at.min(OFFSET_MAX) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Framing; 8] = [
        Framing::Raw,
        Framing::Fixed(784),
        Framing::LengthU16,
        Framing::LengthU32,
        Framing::Sockperf,
        Framing::Line,
        Framing::LineCrLf,
        Framing::Memcached,
    ];

    #[test]
    fn names_are_read_as_they_are_written() {
        for framing in ALL {
            assert_eq!(framing.to_string().parse(), Ok(framing));
        }
    }

    #[test]
    fn a_wrong_name_is_told_what_would_be_right() {
        for name in [
            "",
            "Raw",
            "fixed",
            "fixed:",
            "fixed:0",
            "fixed:+4",
            "fixed:-1",
            "fixed:4294967296",
            "length",
            "length:u64",
            "line ",
        ] {
            let error = name.parse::<Framing>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}`")), "{error}");
            assert!(error.contains("fixed:N") && error.contains("memcached"), "{error}");
        }
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_fix() {
        use FramingConfigError as E;
        let message = "max_message_bytes";
        let reply = "max_reply_bytes";
        assert_eq!(Framing::LengthU16.check(65_535, 65_535), Ok(()));
        assert_eq!(
            Framing::LengthU16.check(65_536, 1),
            Err(E::LengthU16 { key: message, max: 65_536 })
        );
        assert_eq!(
            Framing::LengthU16.check(1, 65_536),
            Err(E::LengthU16 { key: reply, max: 65_536 })
        );
        assert_eq!(Framing::LengthU32.check(8 << 20, 8 << 20), Ok(()));
        assert_eq!(Framing::Fixed(784).check(784, 1), Ok(()));
        assert_eq!(
            Framing::Fixed(784).check(783, 4096),
            Err(E::FixedOverMaximum { size: 784, key: message, max: 783 })
        );
        assert_eq!(Framing::Fixed(0).check(784, 1), Err(E::FixedZero));
        assert_eq!(Framing::Sockperf.check(14, 14), Ok(()));
        assert_eq!(Framing::Sockperf.check(14, 0), Ok(()));
        assert_eq!(
            Framing::Sockperf.check(13, 14),
            Err(E::SockperfUnderHeader { key: message, max: 13 })
        );
        assert_eq!(
            Framing::Sockperf.check(14, 13),
            Err(E::SockperfUnderHeader { key: reply, max: 13 })
        );
        for framing in ALL {
            assert_eq!(framing.check(0, 1024), Err(E::Zero { key: message }));
            assert_eq!(framing.check(1024, 1024), Ok(()));
        }
        let text = Framing::Fixed(784).check(512, 1).unwrap_err().to_string();
        assert!(text.contains("raise max_message_bytes to at least 784"), "{text}");
    }

    #[test]
    fn a_backend_is_checked_in_both_directions() {
        use FramingConfigError as E;
        assert_eq!(Framing::Fixed(64).check_backend(64, 64), Ok(()));
        assert_eq!(
            Framing::Fixed(64).check_backend(63, 64),
            Err(E::FixedOverMaximum { size: 64, key: "max_message_bytes", max: 63 })
        );
        assert_eq!(
            Framing::Fixed(64).check_backend(64, 63),
            Err(E::FixedOverMaximum { size: 64, key: "max_reply_bytes", max: 63 })
        );
        assert_eq!(Framing::Raw.check_backend(0, 64), Err(E::Zero { key: "max_message_bytes" }));
        assert_eq!(Framing::Raw.check_backend(64, 0), Err(E::Zero { key: "max_reply_bytes" }));
        assert_eq!(
            Framing::LengthU16.check_backend(70_000, 64),
            Err(E::LengthU16 { key: "max_message_bytes", max: 70_000 })
        );
    }

    #[test]
    fn only_memcached_can_report_errors() {
        let all = [
            ErrorReply::UnknownCommand,
            ErrorReply::BadCommand,
            ErrorReply::BadDataBlock,
            ErrorReply::TooLong,
            ErrorReply::OutOfCapacity,
            ErrorReply::Timeout,
            ErrorReply::Failed,
        ];
        for what in all {
            for framing in ALL {
                let reply = framing.error_reply(what);
                assert_eq!(reply.is_some(), framing == Framing::Memcached, "{framing} {what:?}");
                // What the framing says itself must be a reply of its own grammar.
                if let Some(reply) = reply {
                    framing.encode_reply(reply, &mut Vec::new()).unwrap();
                }
            }
        }
    }

    #[test]
    fn every_error_has_its_reasons_and_its_reply() {
        use {DropReason as D, ErrorReply as R, FramingError as E};
        let table = [
            (E::TooLong, D::TooLong, D::BackendTooLong, R::TooLong),
            (E::BadHeader, D::BadFraming, D::BackendProtocol, R::BadCommand),
            (E::UnknownCommand, D::BadFraming, D::BackendProtocol, R::UnknownCommand),
            (E::BadCommand, D::BadFraming, D::BackendProtocol, R::BadCommand),
            (E::BadDataBlock, D::BadFraming, D::BackendProtocol, R::BadDataBlock),
            (E::BadResponse, D::ReplyUnframable, D::BackendProtocol, R::Failed),
            (E::Unframable, D::ReplyUnframable, D::BackendProtocol, R::Failed),
            (E::NotAnswered, D::BadFraming, D::BackendProtocol, R::Failed),
        ];
        for (error, client, backend, reply) in table {
            assert_eq!(error.drop_reason(), client, "{error}");
            assert_eq!(error.backend_drop_reason(), backend, "{error}");
            assert_eq!(ErrorReply::from(error), reply, "{error}");
        }
    }

    #[test]
    fn a_client_is_told_whether_to_change_its_request_or_to_come_back() {
        use {DropReason as D, ErrorReply as R};
        for (reason, reply) in [
            (D::TooLong, R::TooLong),
            (D::BadFraming, R::BadCommand),
            (D::BadLength, R::BadCommand),
            (D::TooShort, R::BadCommand),
            (D::NoCredit, R::OutOfCapacity),
            (D::NoAccelerator, R::OutOfCapacity),
            (D::Draining, R::OutOfCapacity),
            (D::RequestTimeout, R::Timeout),
            (D::KernelDrop, R::Failed),
            (D::ReplyUnframable, R::Failed),
        ] {
            assert_eq!(ErrorReply::from(reason), reply, "{}", reason.name());
        }
        assert_eq!(
            Framing::Memcached.error_reply(R::Timeout),
            Some(&b"SERVER_ERROR timed out\r\n"[..])
        );
    }

    #[test]
    fn the_state_stays_small() {
        assert!(size_of::<ParseState>() <= 16);
        assert!(size_of::<FramingError>() == 1);
    }
}
