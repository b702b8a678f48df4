//! A connection with the engine's buffering, which checks the contract of the parsers at every step. Shared by the
//! property tests and the fuzz targets.

use wire::framing::{Delimits, Expects, Framing, FramingError, ParseState, Parsed};

/// The grammar to parse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Request,
    Response,
}

/// What the parser took from the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Message { payload: Vec<u8>, expects: Expects },
    Refused { bytes: Vec<u8>, error: FramingError, silent: bool },
}

/// State of the stream after its last byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Waiting { unread: Vec<u8> },
    Broken(FramingError),
    Quit,
}

/// All events of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transcript {
    pub(crate) events: Vec<Event>,
    pub(crate) end: End,
}

impl Transcript {
    /// The concatenated payloads: all that `raw` promises.
    pub(crate) fn payload(&self) -> Vec<u8> {
        let payload = |event: &Event| match event {
            Event::Message { payload, .. } => payload.clone(),
            Event::Refused { .. } => Vec::new(),
        };
        self.events.iter().flat_map(payload).collect()
    }
}

/// One direction of a connection: bytes that are not taken yet, and the parser's state.
struct Stream {
    framing: Framing,
    side: Side,
    max: usize,
    state: ParseState,
    buffer: Vec<u8>,
    /// The parser has reported that it needs at least this many bytes.
    promised: usize,
    /// Data of a refused message come next.
    skipping: bool,
    events: Vec<Event>,
}

impl Stream {
    fn bytes_max(&self) -> usize {
        match self.side {
            Side::Request => self.framing.request_bytes_max(self.max),
            Side::Response => self.framing.response_bytes_max(self.max),
        }
    }

    fn parse(&mut self) -> Result<Parsed, FramingError> {
        let Self { framing, state, buffer, max, .. } = self;
        let before = *state;
        let parse = |state: &mut ParseState| match self.side {
            Side::Request => framing.parse_request(state, buffer, *max),
            Side::Response => framing.parse_response(state, buffer, *max),
        };
        let parsed = parse(state);
        // Parsing the same bytes again gives the same result, from any state; but for data of a refused message, which only the
        // state knows.
        let is_skipping = self.skipping;
        if parsed.is_ok() {
            assert_eq!(parse(&mut before.clone()), parsed);
        }
        self.skipping = match parsed {
            Ok(Parsed::Refused { .. } | Parsed::Skipped { .. }) => *state != ParseState::default(),
            _ => is_skipping,
        };
        if !is_skipping {
            assert!(!matches!(parsed, Ok(Parsed::Skipped { .. })));
            if parsed.is_ok() && !self.skipping {
                assert_eq!(parse(&mut state.clone()), parsed);
            }
            assert_eq!(parse(&mut ParseState::default()).map(relaxed), parsed.map(relaxed));
        }
        parsed
    }

    /// Takes everything complete from the buffer. `Some` when the stream has ended.
    fn drain(&mut self) -> Option<End> {
        loop {
            let unread = self.buffer.len();
            let parsed = self.parse();
            if unread < self.promised {
                assert!(
                    matches!(parsed, Ok(Parsed::Incomplete { .. })),
                    "{parsed:?}: hint too high"
                );
            }
            match parsed {
                Err(error) => return Some(End::Broken(error)),
                Ok(Parsed::Incomplete { more }) => {
                    assert!(more >= 1);
                    assert!(unread < self.bytes_max(), "{unread} bytes and no decision");
                    self.promised = unread + more;
                    return None;
                }
                Ok(Parsed::Message { consumed, start, end, expects }) => {
                    assert!(start <= end && end <= consumed && end - start <= self.max);
                    assert!(self.side == Side::Request || expects == Expects::Nothing);
                    let payload = self.buffer[start..end].to_vec();
                    self.take(consumed);
                    self.events.push(Event::Message { payload, expects });
                }
                Ok(Parsed::Refused { consumed, error, silent }) => {
                    assert_eq!(self.side, Side::Request);
                    assert!(self.framing.error_reply(error.into()).is_some());
                    let bytes = self.take(consumed);
                    self.events.push(Event::Refused { bytes, error, silent });
                }
                Ok(Parsed::Skipped { consumed }) => {
                    assert_eq!(self.side, Side::Request);
                    assert!(consumed >= 1 && consumed <= self.buffer.len());
                    self.buffer.drain(..consumed);
                    self.promised = 0;
                }
                Ok(Parsed::Quit { consumed }) => {
                    assert_eq!(self.side, Side::Request);
                    self.take(consumed);
                    return Some(End::Quit);
                }
            }
        }
    }

    fn take(&mut self, consumed: usize) -> Vec<u8> {
        assert!(consumed >= 1 && consumed <= self.buffer.len());
        assert!(consumed <= self.bytes_max());
        assert!(self.skipping || self.state == ParseState::default());
        self.promised = 0;
        self.buffer.drain(..consumed).collect()
    }
}

/// Parsing the same bytes with a new state may know less about the number of missing bytes, and gives the same result
/// otherwise.
fn relaxed(parsed: Parsed) -> Parsed {
    match parsed {
        Parsed::Incomplete { .. } => Parsed::Incomplete { more: 1 },
        other => other,
    }
}

/// Feeds `chunks` to a parser. With `bounded`, the receive buffer has exactly the documented size, and longer chunks
/// are read in parts.
pub(crate) fn converse<'a>(
    framing: Framing,
    side: Side,
    max: usize,
    chunks: impl IntoIterator<Item = &'a [u8]>,
    bounded: bool,
) -> Transcript {
    let mut stream = Stream {
        framing,
        side,
        max,
        state: ParseState::default(),
        buffer: Vec::new(),
        promised: 0,
        skipping: false,
        events: Vec::new(),
    };
    for mut chunk in chunks {
        while !chunk.is_empty() {
            let room = stream.bytes_max() - stream.buffer.len().min(stream.bytes_max());
            let (read, rest) =
                chunk.split_at(if bounded { room.min(chunk.len()) } else { chunk.len() });
            assert!(!read.is_empty(), "a full buffer and no decision");
            chunk = rest;
            stream.buffer.extend_from_slice(read);
            if let Some(end) = stream.drain() {
                return Transcript { events: stream.events, end };
            }
        }
    }
    Transcript { events: stream.events, end: End::Waiting { unread: stream.buffer } }
}

/// The stream in one piece and in chunks must give the same messages.
pub(crate) fn check_split(
    framing: Framing,
    side: Side,
    max: usize,
    stream: &[u8],
    sizes: &[usize],
) {
    let whole = converse(framing, side, max, [stream], false);
    let mut rest = stream;
    let mut chunks = Vec::new();
    let mut sizes = sizes.iter().cycle();
    while !rest.is_empty() {
        let size = sizes.next().map_or(1, |size| (*size).clamp(1, rest.len()));
        let (chunk, tail) = rest.split_at(size);
        chunks.push(chunk);
        rest = tail;
    }
    let split = converse(framing, side, max, chunks, true);
    if framing.delimits() == Delimits::Nothing {
        // The boundaries depend on the reads; the bytes do not.
        assert_eq!(split.payload(), whole.payload());
        assert_eq!(split.payload(), stream);
    } else {
        assert_eq!(split, whole, "{framing} {side:?} max {max}");
    }
}
