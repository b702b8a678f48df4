//! The response grammar. See the parent module.

use super::{CRLF, KEY_BYTES_MAX, LINE_BYTES_MAX, Words, decimal};
use crate::framing::{Expects, FramingError, OFFSET_MAX, ParseState, Parsed, offset};

// Phases: the valid next lines, and the data block that is incomplete.
const START: u8 = 0;
const VALUES: u8 = 1;
const STATS: u8 = 2;
const ITEMS: u8 = 3;
const PREFIXES: u8 = 4;
/// The data block of a `VALUE` ends at `needed`; the list continues there.
const VALUE_BLOCK: u8 = 5;
/// The data block of a `VA` ends at `needed`, and with it the response.
const META_BLOCK: u8 = 6;

/// The result of parsing a response line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// The response ends here.
    Last,
    /// One element of the list of this phase.
    Element { phase: u8 },
    /// It is followed by a data block of `bytes` bytes and its CR LF.
    Block { bytes: usize, phase: u8 },
}

/// Parses one response at the front of `buffer`.
pub(super) fn parse(
    state: &mut ParseState,
    buffer: &[u8],
    max: usize,
) -> Result<Parsed, FramingError> {
    let max = max.min(OFFSET_MAX);
    loop {
        if let Some(incomplete) = state.missing(buffer) {
            return Ok(incomplete);
        }
        if matches!(state.phase, VALUE_BLOCK | META_BLOCK) {
            let end = (state.needed as usize).min(buffer.len());
            if !buffer[..end].ends_with(CRLF) {
                return Err(FramingError::BadDataBlock);
            }
            if state.phase == META_BLOCK {
                return Ok(whole(state, end));
            }
            begin_line(state, VALUES, end);
        }
        let start = (state.settled as usize).min(buffer.len());
        let Some(lf) = find_line(state, buffer, start, max)? else {
            return Ok(Parsed::Incomplete { more: 1 });
        };
        let text = buffer[start..lf].strip_suffix(b"\r").ok_or(FramingError::BadResponse)?;
        let consumed = lf + 1;
        match line(text, state.phase).ok_or(FramingError::BadResponse)? {
            Line::Last => return Ok(whole(state, consumed)),
            Line::Element { phase } => begin_line(state, phase, consumed),
            Line::Block { bytes, phase } => {
                let end = consumed.saturating_add(bytes).saturating_add(CRLF.len());
                if end > max {
                    return Err(FramingError::TooLong);
                }
                state.phase = phase;
                state.needed = offset(end);
            }
        }
    }
}

fn whole(state: &mut ParseState, consumed: usize) -> Parsed {
    *state = ParseState::default();
    Parsed::Message { consumed, start: 0, end: consumed, expects: Expects::Nothing }
}

fn begin_line(state: &mut ParseState, phase: u8, at: usize) {
    let at = offset(at);
    *state = ParseState { settled: at, scanned: at, needed: 0, phase };
}

/// The LF of the line that begins at `start`; `None` if it may still arrive.
fn find_line(
    state: &mut ParseState,
    buffer: &[u8],
    start: usize,
    max: usize,
) -> Result<Option<usize>, FramingError> {
    let limit = start.saturating_add(LINE_BYTES_MAX);
    let window = &buffer[..buffer.len().min(limit).min(max)];
    // A state of this stream has scanned everything before the line; a state of another stream may not.
    state.scanned = state.scanned.max(offset(start));
    let found = state.find_lf(window);
    if found.is_none() && window.len() >= max {
        return Err(FramingError::TooLong);
    }
    if found.is_none() && window.len() >= limit {
        return Err(FramingError::BadResponse);
    }
    Ok(found)
}

/// Accepts exactly one response.
pub(super) fn check(reply: &[u8]) -> Result<(), FramingError> {
    match parse(&mut ParseState::default(), reply, reply.len()) {
        Ok(Parsed::Message { consumed, .. }) if consumed == reply.len() => Ok(()),
        _ => Err(FramingError::Unframable),
    }
}

/// Parses one line, without its terminator, in the given phase; `None` if it is invalid there.
fn line(text: &[u8], phase: u8) -> Option<Line> {
    let mut arguments = Words(text);
    let word = arguments.next()?;
    // `Words` skips spaces, but no response begins with one.
    if !text.starts_with(word) {
        return None;
    }
    let element = |of| (phase == START || phase == of).then_some(Line::Element { phase: of });
    match word {
        b"VALUE" if matches!(phase, START | VALUES) => value(arguments),
        b"STAT" => element(STATS),
        b"ITEM" => element(ITEMS),
        b"PREFIX" => element(PREFIXES),
        b"END" => alone(arguments),
        b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR" => Some(Line::Last),
        _ if phase != START => None,
        b"STORED" | b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND" | b"DELETED" | b"TOUCHED" | b"OK"
        | b"RESET" | b"MN" => alone(arguments),
        // memcached 1.6 returns the flags `k` and `O` with a miss too: `EN kKEY`.
        b"EN" | b"HD" | b"NF" | b"NS" | b"EX" => Some(Line::Last),
        b"ME" | b"VERSION" => arguments.next().map(|_| Line::Last),
        b"VA" => Some(Line::Block { bytes: decimal(arguments.next()?)?, phase: META_BLOCK }),
        _ => number(word).and_then(|()| alone(arguments)),
    }
}

fn alone<'a>(mut rest: impl Iterator<Item = &'a [u8]>) -> Option<Line> {
    rest.next().is_none().then_some(Line::Last)
}

/// KEY FLAGS BYTES [CAS]
fn value<'a>(mut words: impl Iterator<Item = &'a [u8]>) -> Option<Line> {
    words.next().filter(|key| key.len() <= KEY_BYTES_MAX)?;
    let _flags = words.next()?;
    let bytes = decimal(words.next()?)?;
    let _cas = words.next();
    words.next().is_none().then_some(Line::Block { bytes, phase: VALUE_BLOCK })
}

/// The new value after `incr` or `decr`: 64 bits in decimal.
fn number(word: &[u8]) -> Option<()> {
    (word.len() <= 20 && word.iter().all(u8::is_ascii_digit)).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    fn response(buffer: &[u8]) -> Result<Parsed, FramingError> {
        parse(&mut ParseState::default(), buffer, 1 << 20)
    }

    fn message(len: usize) -> Result<Parsed, FramingError> {
        Ok(Parsed::Message { consumed: len, start: 0, end: len, expects: Expects::Nothing })
    }

    /// Recorded from memcached 1.6.18, or built according to its documentation.
    const RESPONSES: &[&str] = &[
        "STORED\r\n",
        "NOT_STORED\r\n",
        "EXISTS\r\n",
        "NOT_FOUND\r\n",
        "DELETED\r\n",
        "TOUCHED\r\n",
        "OK\r\n",
        "RESET\r\n",
        "END\r\n",
        "EN\r\n",
        "EN kface:01 Oab\r\n",
        "MN\r\n",
        "HD\r\n",
        "HD t90 O123\r\n",
        "NF\r\n",
        "6\r\n",
        "18446744073709551615\r\n",
        "VERSION 1.6.18\r\n",
        "ERROR\r\n",
        "NS\r\n",
        "EX\r\n",
        "CLIENT_ERROR bad command line format\r\n",
        "SERVER_ERROR object too large for cache\r\n",
        "ME a exp=-1 la=0 cas=5 fetch=yes cls=1 size=63\r\n",
        "VA 3\r\nabc\r\n",
        "VA 3 s3 t-1 ka O123\r\nabc\r\n",
        "VA 0 W\r\n\r\n",
        "VA 4\r\n\r\n\r\n\r\n",
        "VALUE a 0 3\r\nabc\r\nEND\r\n",
        "VALUE a 0 3 5\r\nabc\r\nEND\r\n",
        "VALUE a 0 0\r\n\r\nVALUE b 4294967295 5\r\nEND\r\n\r\nEND\r\n",
        "STAT pid 7\r\nSTAT inter \r\nSTAT version 1.6.18\r\nEND\r\n",
        "ITEM a [3 b; 0 s]\r\nEND\r\n",
        "PREFIX a get 1 hit 1 set 1 del 0\r\nEND\r\n",
        "VALUE a 0 1\r\nx\r\nSERVER_ERROR out of memory writing get response\r\n",
    ];

    #[test]
    fn the_end_of_every_response_is_found() {
        for text in RESPONSES {
            let bytes = text.as_bytes();
            assert_eq!(response(&[bytes, b"END\r\n"].concat()), message(bytes.len()), "{text:?}");
            for cut in 0..bytes.len() {
                let parsed = response(&bytes[..cut]);
                assert!(matches!(parsed, Ok(Parsed::Incomplete { .. })), "{text:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn a_response_that_arrives_in_bytes_is_read_once() {
        for text in RESPONSES {
            let bytes = text.as_bytes();
            let mut state = ParseState::default();
            let mut progress = 0;
            for cut in 0..bytes.len() {
                let parsed = parse(&mut state, &bytes[..cut], 4096);
                assert!(matches!(parsed, Ok(Parsed::Incomplete { .. })), "{text:?}");
                assert!(state.scanned as usize >= progress, "{text:?} goes back");
                progress = state.scanned as usize;
            }
            assert_eq!(parse(&mut state, bytes, 4096), message(bytes.len()));
            assert_eq!(state, ParseState::default());
        }
    }

    #[test]
    fn garbage_is_recognized_at_the_end_of_its_line() {
        let key = format!("VALUE {} 0 3\r\n", "k".repeat(251));
        for text in [
            "\r\n",
            " END\r\n",
            "END \rx\r\n",
            "STORED\n",
            "stored\r\n",
            "STORED x\r\n",
            "GARBAGE\r\n",
            "HTTP/1.1 400 Bad Request\r\n",
            "-1\r\n",
            "1 2\r\n",
            "184467440737095516150\r\n",
            "0x1\r\n",
            "VALUE\r\n",
            "VALUE a 0\r\n",
            "VALUE a 0 x\r\n",
            "VALUE a 0 -3\r\n",
            "VALUE a 0 3 5 6\r\n",
            "VA\r\n",
            "VA x\r\n",
            "VA -1\r\n",
            "VERSION\r\n",
            "ME\r\n",
            "MN x\r\n",
            &key,
            "VALUE a 0 1\r\nx\r\nSTAT a b\r\n",
            "VALUE a 0 1\r\nx\r\nSTORED\r\n",
            "VALUE a 0 1\r\nx\r\n7\r\n",
            "VALUE a 0 1\r\nx\r\nVA 1\r\nx\r\n",
            "STAT a b\r\nVALUE a 0 1\r\n",
            "STAT a b\r\nITEM a\r\n",
            "ITEM a\r\nPREFIX a\r\n",
            "PREFIX a\r\nEN\r\n",
            "\0\r\n",
            "\u{ff}\r\n",
        ] {
            assert_eq!(response(text.as_bytes()), Err(FramingError::BadResponse), "{text:?}");
        }
    }

    #[test]
    fn a_block_of_another_length_is_refused() {
        for text in [
            "VALUE a 0 3\r\nabcd\r\n",
            "VALUE a 0 3\r\nab\r\nE",
            "VA 3\r\nabcd\r\n",
            "VA 0\r\nabcd",
        ] {
            assert_eq!(response(text.as_bytes()), Err(FramingError::BadDataBlock), "{text:?}");
        }
    }

    #[test]
    fn too_long_responses_are_refused_by_their_value_line() {
        let too_long = Err(FramingError::TooLong);
        let at = |text: &str, max| parse(&mut ParseState::default(), text.as_bytes(), max);
        assert_eq!(at("VALUE a 0 1000\r\n", 1000), too_long);
        assert_eq!(at("VA 9999999999\r\n", 1 << 20), too_long);
        assert_eq!(at("VALUE a 0 3\r\nabc\r\nEND\r\n", 22), too_long);
        assert_eq!(at("VALUE a 0 3\r\nabc\r\nEND\r\n", 23), message(23));
        assert_eq!(at("STORED\r\n", 7), too_long);
    }

    #[test]
    fn lines_and_lists_without_end_are_refused_at_their_limit() {
        let mut state = ParseState::default();
        let line = vec![b'7'; 2048];
        let parsed = parse(&mut state, &line[..2047], 1 << 20);
        assert_eq!(parsed, Ok(Parsed::Incomplete { more: 1 }));
        assert_eq!(parse(&mut state, &line, 1 << 20), Err(FramingError::BadResponse));

        let list = b"STAT a b\r\n".repeat(10);
        assert_eq!(response(&list), Ok(Parsed::Incomplete { more: 1 }));
        let parsed = parse(&mut ParseState::default(), &list, 100);
        assert_eq!(parsed, Err(FramingError::TooLong));
    }

    #[test]
    fn a_kernels_reply_is_exactly_one_response() {
        let mut out = Vec::new();
        for text in RESPONSES {
            out.clear();
            Framing::Memcached.encode_reply(text.as_bytes(), &mut out).unwrap();
            assert_eq!(out, text.as_bytes());
        }
        out.clear();
        for wrong in [
            "",
            "END",
            "END\n",
            "END\r\nEND\r\n",
            "VALUE a 0 3\r\nabc\r\n",
            "VALUE a 0 3\r\nab\r\nEND\r\n",
            "VA 3\r\nabc",
            "abc",
            "STORED\r\n\r\n",
        ] {
            let result = Framing::Memcached.encode_reply(wrong.as_bytes(), &mut out);
            assert_eq!(result, Err(FramingError::Unframable), "{wrong:?}");
        }
        assert!(out.is_empty());
    }
}
