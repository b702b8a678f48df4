//! The trait of a framing, and the types of its parsers.

use super::{FramingConfigError, FramingError};
use crate::error_reply::ErrorReply;

/// One framing: two grammars, each parsed on one side and written on the other. See the documentation of [`super`]
/// for the contract of the parsers; the other methods are described at [`Framing`].
pub(super) trait Grammar {
    /// Rejects invalid sizes; the keys are named in the error.
    fn check(&self, sizes: &Sizes) -> Result<(), FramingConfigError>;

    /// Maximum length on the wire of a request with a payload of `max` bytes.
    fn request_bytes_max(&self, max: usize) -> usize;

    /// Maximum length on the wire of a response with a payload of `max` bytes.
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

    /// See [`Framing::requests_alike`].
    fn requests_alike(&self, _buffer: &[u8], _max: usize, _most: usize) -> Option<Alike> {
        None
    }

    /// See [`Framing::forward`].
    fn forward(
        &self,
        request: &[u8],
        _expects: Expects,
        out: &mut Vec<u8>,
    ) -> Result<(), FramingError> {
        self.encode_request(request, out)
    }

    /// See [`Framing::fence`].
    fn fence(&self) -> Option<Fence> {
        None
    }

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

    // The following is for documents and tests only, not for the data path.

    /// The wire format of a message, in Markdown.
    const WIRE: &'static str;

    /// See [`Framing::delimits`](super::Framing::delimits).
    const DELIMITS: Delimits = Delimits::Both;

    /// See [`Framing::words`](super::Framing::words).
    const WORDS: &'static [&'static str] = &[];

    /// See [`Framing::sample_request`](super::Framing::sample_request).
    fn sample_request(&self, data: &[u8]) -> Vec<u8> {
        data.to_vec()
    }

    /// See [`Framing::sample_reply`](super::Framing::sample_reply).
    fn sample_reply(&self, data: &[u8]) -> Vec<u8> {
        self.sample_request(data)
    }

    /// See [`Framing::malformed`](super::Framing::malformed).
    fn malformed(&self, max: usize) -> Vec<Vec<u8>>;
}

/// The two maxima that a framing is checked against, with their configuration keys.
pub(super) struct Sizes {
    pub(super) request_key: &'static str,
    pub(super) request_max: usize,
    pub(super) response_key: &'static str,
    pub(super) response_max: usize,
    /// Whether this is a backend's framing, whose responses the engine parses.
    pub(super) backend: bool,
}

/// Messages of one length at the front of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alike {
    /// How many, at least two.
    pub count: usize,
    /// Bytes in front of each payload.
    pub prefix: usize,
    /// Bytes of each payload, not 0.
    pub len: usize,
}

impl Alike {
    /// At most `most` messages, of which there are `count`.
    pub(super) fn of(count: usize, most: usize, prefix: usize, len: usize) -> Option<Self> {
        let count = count.min(most);
        (count >= 2 && len > 0).then_some(Self { count, prefix, len })
    }
}

/// Which messages of a stream are delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delimits {
    /// Requests and replies.
    Both,
    /// Requests only: replies are sent as the kernel produced them.
    Requests,
    /// Neither.
    Nothing,
}

/// A request that is always answered, and its answer: both as they are on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The request.
    pub request: &'static [u8],
    /// The answer.
    pub response: &'static [u8],
}

/// How far the parser has read the front of a connection's buffer. Starts as `default()`; belongs to
/// one direction of one connection; is back at its default whenever a message has been taken, unless data of a refused one are to be
/// skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParseState {
    /// Offset of the line or part under examination; everything before it is valid.
    pub(super) settled: u32,
    /// There is no line ending in `settled..scanned`.
    pub(super) scanned: u32,
    /// The buffer must have at least this many bytes before the parser can continue.
    pub(super) needed: u32,
    /// State of the grammar, in its own numbering, 0 at the start.
    pub(super) phase: u8,
}

/// The result of parsing the front of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Parsed {
    /// An incomplete message.
    Incomplete {
        /// At least this many more bytes (from 1) are needed before the parser can continue.
        more: usize,
    },
    /// A complete message: its payload is `buffer[start..end]`.
    Message {
        /// Bytes to remove from the front of the buffer.
        consumed: usize,
        /// Start of the payload.
        start: usize,
        /// End of the payload, at most `consumed`.
        end: usize,
        /// Whether the sender waits for a reply; `Nothing` for every response.
        expects: Expects,
    },
    /// Not a message: the framing rejects it and answers with `error_reply(error.into())`, in the order of the
    /// replies. The connection continues.
    Refused {
        /// Bytes to remove from the front of the buffer, at least 1.
        consumed: usize,
        /// The error.
        error: FramingError,
        /// The client asked for no answer, also none to errors: it gets none.
        silent: bool,
    },
    /// A part of the data of a message that was refused. Nothing is answered.
    Skipped {
        /// Bytes to remove from the front of the buffer, at least 1.
        consumed: usize,
    },
    /// The client asks to close the connection: send the replies that are due, then close. Later bytes are ignored.
    Quit {
        /// Bytes to remove from the front of the buffer, at least 1.
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
    /// The kernel decides (memcached's quiet meta commands suppress the nominal outcome). The request keeps its place
    /// in the order of replies until the kernel sends a reply, sends an empty reply, or drops it; in the latter two
    /// cases nothing is sent. The client finds the end of its requests with a command that is always answered, `mn`.
    ReplyOrNothing,
}

impl ParseState {
    /// Finds the LF that ends the line under examination, reading each byte once over all calls.
    pub(super) fn find_lf(&mut self, window: &[u8]) -> Option<usize> {
        let from = (self.scanned as usize).min(window.len());
        let found = crate::find_byte(b'\n', &window[from..]).map(|at| from + at);
        self.scanned = offset(found.unwrap_or(window.len()));
        found
    }

    /// Number of missing bytes according to an earlier call; `None` when they have arrived.
    pub(super) fn missing(&self, buffer: &[u8]) -> Option<Parsed> {
        let more = (self.needed as usize).saturating_sub(buffer.len());
        (more > 0).then_some(Parsed::Incomplete { more })
    }
}

/// The largest offset in a [`ParseState`], far above the largest message.
pub(super) const OFFSET_MAX: usize = u32::MAX as usize;

/// A buffer offset as the state stores it; a larger one only reduces what the state remembers.
pub(super) fn offset(at: usize) -> u32 {
    at.min(OFFSET_MAX) as u32
}
