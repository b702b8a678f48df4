//! Framings: the boundaries of messages on a byte stream.
//!
//! A TCP connection carries bytes, a service answers messages, and a framing converts between them. It applies to
//! streams only; a datagram is one message.
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
//! The caller keeps the bytes of a connection that do not belong to a taken message, and one [`ParseState`] for them.
//! After each read it calls the parser until that returns [`Parsed::Incomplete`]:
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
//!   goes on. Its data may follow as [`Parsed::Skipped`], however long they are.
//! * Bytes left when the peer closes its side are a truncated message: the grammars know no end but
//!   their own.
//!
//! # Adding a framing
//!
//! One file that implements the `Grammar` trait, with its tests, and one row in the table of `framings!` below.
//! Everything else uses the table: configuration and its errors, documents (`cargo xtask configuration` writes them),
//! property tests, fuzz targets, microbenchmarks, the simulator, the tests of the server. CONTRIBUTING.md has the steps.

mod error;
mod fixed;
mod grammar;
mod length;
mod line;
pub mod memcached;
mod raw;
mod sockperf;

pub use error::{FramingConfigError, FramingError, FramingParseError};
pub use grammar::{Alike, Delimits, Expects, Fence, ParseState, Parsed};
pub use memcached::{Assembly, Piece, UDP_HEADER_BYTES, UdpHeader};
pub use sockperf::SOCKPERF_HEADER_BYTES;

use grammar::{Grammar, OFFSET_MAX, Sizes, offset};
use std::fmt;
use std::str::FromStr;

use crate::error_reply::ErrorReply;

macro_rules! framings {
    ($d:tt $( $(#[doc = $doc:literal])+ $variant:ident $(($parameter:ident: $type:ty))? = $name:literal, $grammar:expr; )+) => {
        /// A framing as configured. See the module documentation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Framing { $( $(#[doc = $doc])+ $variant $(($type))?, )+ }

        impl Framing {
            /// Every framing, those with a parameter for messages of 64 bytes.
            pub const ALL: &'static [Self] =
                &[ $( Self::$variant $(({ let $parameter = EXAMPLE; $parameter }))? ),+ ];

            /// The name in documents: `fixed:N` for every N.
            pub const fn form(self) -> &'static str {
                match self { $( Self::$variant { .. } => $name, )+ }
            }

            /// The same framing for messages of `bytes`, if it has that parameter.
            pub const fn with_parameter(self, bytes: u32) -> Self {
                match self {
                    $( Self::$variant { .. } => Self::$variant $(({ let $parameter = bytes; $parameter }))?, )+
                }
            }

            /// The parameter, if the framing has one.
            const fn parameter(self) -> Option<u32> {
                match self {
                    $( Self::$variant $(($parameter))? => {
                        #[allow(unused_mut, unused_assignments)]
                        let mut parameter = None;
                        $( parameter = Some($parameter); )?
                        parameter
                    } )+
                }
            }
        }

        /// Evaluates `$body` with `$grammar` bound to the grammar of `$framing`: static dispatch, so that the
        /// short framings are inlined into the caller's loop.
        macro_rules! dispatch {
            ($d framing:expr, $d name:ident => $d body:expr) => {
                match $d framing {
                    $( Framing::$variant $(($parameter))? => {
                        let $d name = $grammar;
                        $d body
                    } )+
                }
            };
        }
    };
}

/// Message length of the framings in [`Framing::ALL`] that have one as a parameter.
const EXAMPLE: u32 = 64;

// Fuzz corpora know framings by their place here: new ones stand at the end. The simulator knows them by name.
framings! { $
    /// A message is the result of one read, at most the maximum; the rest is the next message.
    Raw = "raw", raw::Raw;
    /// Every request has this many bytes, from 1. Replies are written as produced.
    Fixed(bytes: u32) = "fixed:N", fixed::Fixed(bytes);
    /// A length of two bytes in network byte order, not counting itself, then the message.
    LengthU16 = "length:u16", length::Length::<2>;
    /// A length of four bytes in network byte order, not counting itself, then the message.
    LengthU32 = "length:u32", length::Length::<4>;
    /// The header of the sockperf benchmark: u64 sequence, u16 flags, u32 length of the whole message.
    Sockperf = "sockperf", sockperf::Sockperf;
    /// Text lines: LF or CR LF ends a request, and the reply ends like the client's lines.
    Line = "line", line::Line::<false>;
    /// Text lines: LF or CR LF ends a request, CR LF a reply.
    LineCrLf = "line-crlf", line::Line::<true>;
    /// The memcached text protocol, classic and meta commands (memcached, doc/protocol.txt).
    Memcached = "memcached", memcached::Memcached;
}

impl Framing {
    /// Rejects a service whose `max_message_bytes` or `max_reply_bytes` contradict its framing.
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

    /// Rejects a backend whose framing contradicts the sizes of its client mqueues: a kernel sends it requests of at
    /// most the service's `max_reply_bytes` and receives responses of at most `max_message_bytes`, since both use the
    /// same rings as the service's own messages.
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

    /// Maximum length of one request on the wire if its payload has at most `max_message_bytes`: the size of a
    /// connection's receive buffer. [`Self::parse_request`] never returns `Incomplete` for a buffer of this size.
    pub fn request_bytes_max(self, max_message_bytes: usize) -> usize {
        dispatch!(self, grammar => grammar.request_bytes_max(max_message_bytes))
    }

    /// Like [`Self::request_bytes_max`], for [`Self::parse_response`].
    pub fn response_bytes_max(self, max_response_bytes: usize) -> usize {
        dispatch!(self, grammar => grammar.response_bytes_max(max_response_bytes))
    }

    /// Service side: parses one request at the front of `buffer`. `max_message_bytes` is at least 1 and the same in
    /// every call for a connection. See the module documentation for the contract.
    #[inline]
    pub fn parse_request(
        self,
        state: &mut ParseState,
        buffer: &[u8],
        max_message_bytes: usize,
    ) -> Result<Parsed, FramingError> {
        dispatch!(self, grammar => grammar.parse_request(state, buffer, max_message_bytes))
    }

    /// Service side: requests of one length at the front of `buffer`, at most `most`, which [`Self::parse_request`] would take one by one.
    /// Each expects a reply. `None`: there are not two, or this framing has to take each by itself.
    #[inline]
    pub fn requests_alike(
        self,
        buffer: &[u8],
        max_message_bytes: usize,
        most: usize,
    ) -> Option<Alike> {
        dispatch!(self, grammar => grammar.requests_alike(buffer, max_message_bytes, most))
    }

    /// Service side: appends a kernel's reply to `out` in wire format. On an error `out` is unchanged.
    #[inline]
    pub fn encode_reply(self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        dispatch!(self, grammar => grammar.encode_reply(reply, out))
    }

    /// Whether [`Self::encode_reply`] appends the bytes of any reply and nothing else.
    #[inline]
    pub const fn replies_are_plain(self) -> bool {
        matches!(self, Self::Raw | Self::Fixed(_))
    }

    /// The framing of replies to a client whose last request line ended in CR LF, or did not.
    #[inline]
    pub const fn as_client_writes(self, crlf: bool) -> Self {
        match (self, crlf) {
            (Self::Line, true) => Self::LineCrLf,
            (framing, _) => framing,
        }
    }

    /// The bytes that report an error to a client, complete in wire format; `None` if the protocol has no error
    /// replies and the connection must be closed.
    pub fn error_reply(self, what: ErrorReply) -> Option<&'static [u8]> {
        dispatch!(self, grammar => grammar.error_reply(what))
    }

    /// Backend side: appends a client's request to `out` as it goes on the wire: any one request, also one that the backend may
    /// leave unanswered, but one that `expects` what the client's request does. On an error `out` is unchanged.
    #[inline]
    pub fn forward(
        self,
        request: &[u8],
        expects: Expects,
        out: &mut Vec<u8>,
    ) -> Result<(), FramingError> {
        dispatch!(self, grammar => grammar.forward(request, expects, out))
    }

    /// Backend side: a request that is always answered. Sent behind one that may be left unanswered, its answer tells
    /// that no other comes. `None` where servers never answer requests that expect nothing.
    pub fn fence(self) -> Option<Fence> {
        dispatch!(self, grammar => grammar.fence())
    }

    /// Backend side: appends a kernel's request to `out` as it goes on the wire. The payload must be
    /// exactly one request that the backend answers exactly once. On an error `out` is unchanged.
    #[inline]
    pub fn encode_request(self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        dispatch!(self, grammar => grammar.encode_request(request, out))
    }

    /// Backend side: parses one response at the front of `buffer`. Returns `Incomplete` or `Message` only: any other
    /// bytes end the backend's connection. No framing needs to know the request: the responses to requests that
    /// [`Self::encode_request`] accepts have recognizable ends.
    #[inline]
    pub fn parse_response(
        self,
        state: &mut ParseState,
        buffer: &[u8],
        max_response_bytes: usize,
    ) -> Result<Parsed, FramingError> {
        dispatch!(self, grammar => grammar.parse_response(state, buffer, max_response_bytes))
    }

    /// Backend side: the part of a request that [`Self::fits`] compares with its response; empty if the framing has
    /// none. `request` was accepted by [`Self::encode_request`].
    #[inline]
    pub fn mark(self, request: &[u8]) -> &[u8] {
        dispatch!(self, grammar => grammar.mark(request))
    }

    /// Backend side: whether a response can be the answer to the request with this mark. `response` is a payload from
    /// [`Self::parse_response`].
    #[inline]
    pub fn fits(self, mark: &[u8], response: &[u8]) -> bool {
        dispatch!(self, grammar => grammar.fits(mark, response))
    }
}

impl Framing {
    /// [`Self::ALL`], those with a parameter for messages of `bytes`.
    pub fn all(bytes: u32) -> impl Iterator<Item = Self> + Clone {
        Self::ALL.iter().map(move |framing| framing.with_parameter(bytes))
    }

    /// The valid names, as part of a sentence.
    pub fn choices() -> String {
        let choice = |framing: &Self| match framing.parameter() {
            Some(_) => format!("{} (N bytes, from 1)", framing.form()),
            None => framing.form().to_owned(),
        };
        let all: Vec<_> = Self::ALL.iter().map(choice).collect();
        let (last, others) = all.split_last().expect("there are framings");
        format!("{} or {last}", others.join(", "))
    }

    /// The wire format of a message in Markdown: a cell of docs/configuration.md.
    pub fn wire(self) -> &'static str {
        dispatch!(self, grammar => wire_of(&grammar))
    }

    /// Which messages of a stream are delimited.
    pub fn delimits(self) -> Delimits {
        dispatch!(self, grammar => delimits_of(&grammar))
    }

    /// Words of the protocol, for a fuzzer.
    pub fn words(self) -> &'static [&'static str] {
        dispatch!(self, grammar => words_of(&grammar))
    }

    /// For tests: a request of about the same length, made from any bytes, that expects a reply and that
    /// [`Self::encode_request`] accepts.
    pub fn sample_request(self, data: &[u8]) -> Vec<u8> {
        dispatch!(self, grammar => grammar.sample_request(data))
    }

    /// For tests: a reply, made from any bytes, that [`Self::encode_reply`] accepts and [`Self::parse_response`]
    /// parses.
    pub fn sample_reply(self, data: &[u8]) -> Vec<u8> {
        dispatch!(self, grammar => grammar.sample_reply(data))
    }

    /// For tests: an invalid stream of requests, if messages have at most `max` bytes. `None` where any bytes are a
    /// message.
    pub fn malformed(self, max: usize) -> Vec<Vec<u8>> {
        dispatch!(self, grammar => grammar.malformed(max))
    }
}

fn wire_of<G: Grammar>(_: &G) -> &'static str {
    G::WIRE
}

fn delimits_of<G: Grammar>(_: &G) -> Delimits {
    G::DELIMITS
}

fn words_of<G: Grammar>(_: &G) -> &'static [&'static str] {
    G::WORDS
}

impl FromStr for Framing {
    type Err = FramingParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = |framing: &Self| match framing.parameter() {
            None => (text == framing.form()).then_some(*framing),
            Some(_) => text
                .strip_prefix(framing.form().strip_suffix('N')?)
                // `parse` alone would also accept a sign.
                .filter(|bytes| bytes.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|bytes| bytes.parse().ok())
                .filter(|bytes| *bytes > 0)
                .map(|bytes| framing.with_parameter(bytes)),
        };
        Self::ALL.iter().find_map(read).ok_or_else(|| FramingParseError(text.to_owned()))
    }
}

impl fmt::Display for Framing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parameter() {
            None => f.write_str(self.form()),
            Some(bytes) => write!(f, "{}{bytes}", self.form().trim_end_matches('N')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drop_reason::DropReason;
    use crate::error_reply::CommandError;

    #[test]
    fn samples_of_every_framing_are_valid_and_malformed_ones_are_not() {
        for framing in Framing::all(784) {
            assert!(!framing.wire().is_empty() && !framing.wire().contains('|'), "{framing}");
            assert!(Framing::choices().contains(framing.form()), "{framing}");
            for bytes in framing.malformed(4096) {
                let parsed = framing.parse_request(&mut ParseState::default(), &bytes, 4096);
                assert!(
                    matches!(parsed, Err(_) | Ok(Parsed::Refused { .. })),
                    "{framing} {parsed:?}"
                );
            }
            assert_eq!(
                framing.malformed(4096).is_empty(),
                matches!(framing, Framing::Raw | Framing::Fixed(_))
            );
        }
        assert_eq!(Framing::Raw.delimits(), Delimits::Nothing);
        assert_eq!(Framing::Fixed(1).delimits(), Delimits::Requests);
        assert_eq!(Framing::Line.delimits(), Delimits::Both);
    }

    #[test]
    fn the_table_of_the_documentation_has_every_framing() {
        let rows =
            include_str!("framing.rs").lines().filter_map(|line| line.strip_prefix("//! | `"));
        let names: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
        let all: Vec<&str> = Framing::ALL.iter().map(|framing| framing.form()).collect();
        assert_eq!(names, all);
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for framing in Framing::all(784) {
            assert_eq!(framing.to_string().parse(), Ok(framing));
        }
    }

    #[test]
    fn the_error_for_a_wrong_name_lists_valid_ones() {
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
        for framing in Framing::all(784) {
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
            ErrorReply::Command(CommandError::Delete),
            ErrorReply::UnknownCommand,
            ErrorReply::BadCommand,
            ErrorReply::BadDataBlock,
            ErrorReply::TooLong,
            ErrorReply::OutOfCapacity,
            ErrorReply::Timeout,
            ErrorReply::Failed,
        ];
        for what in all {
            for framing in Framing::all(784) {
                let reply = framing.error_reply(what);
                assert_eq!(reply.is_some(), framing == Framing::Memcached, "{framing} {what:?}");
                // Text that the framing itself sends must be a reply of its own grammar.
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
            (
                E::Command(CommandError::Key),
                D::BadFraming,
                D::BackendProtocol,
                R::Command(CommandError::Key),
            ),
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
    fn error_replies_distinguish_client_errors_from_temporary_ones() {
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
            assert_eq!(reason.error_reply(), reply, "{}", reason.name());
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
