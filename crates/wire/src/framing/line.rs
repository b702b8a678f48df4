//! `line` and `line-crlf`: text lines. A line ends in LF; a CR right before the LF is dropped; the
//! terminator is not part of the message. An empty line is an empty message.
//!
//! With `line` a reply ends like the last request line that the client sent before it, which is stored with
//! [`super::Framing::as_client_writes`], and a request to a backend ends in LF. With `line-crlf` everything the
//! engine sends ends in CR LF. A message whose last byte is a CR also ends in CR LF, because otherwise that byte
//! would be taken for a part of the terminator.
//!
//! The maximum counts the message without its terminator. A CR right after a message of maximum length is accepted
//! until the next byte decides.

use super::{Expects, FramingConfigError, FramingError, Grammar, ParseState, Parsed, Sizes};

const TERMINATOR: &[u8] = b"\r\n";

/// `CRLF`: everything that is sent ends in CR LF; otherwise in LF.
pub(super) struct Line<const CRLF: bool>;

#[inline]
fn parse(
    state: &mut ParseState,
    buffer: &[u8],
    max: usize,
    expects: Expects,
) -> Result<Parsed, FramingError> {
    let window = &buffer[..buffer.len().min(max.saturating_add(TERMINATOR.len()))];
    let Some(lf) = state.find_lf(window) else {
        let line = window.strip_suffix(b"\r").unwrap_or(window);
        if line.len() > max {
            return Err(FramingError::TooLong);
        }
        return Ok(Parsed::Incomplete { more: 1 });
    };
    let line = &window[..lf];
    let end = line.strip_suffix(b"\r").unwrap_or(line).len();
    if end > max {
        return Err(FramingError::TooLong);
    }
    *state = ParseState::default();
    Ok(Parsed::Message { consumed: lf + 1, start: 0, end, expects })
}

#[inline]
fn encode(payload: &[u8], crlf: bool, out: &mut Vec<u8>) -> Result<(), FramingError> {
    if crate::find_byte(b'\n', payload).is_some() {
        return Err(FramingError::Unframable);
    }
    out.extend_from_slice(payload);
    let crlf = crlf || payload.ends_with(b"\r");
    out.extend_from_slice(if crlf { TERMINATOR } else { b"\n" });
    Ok(())
}

impl<const CRLF: bool> Grammar for Line<CRLF> {
    const WIRE: &'static str = if CRLF {
        "like `line`, but everything that is sent ends in CR LF"
    } else {
        "up to a line feed (LF); a carriage return (CR) before it is dropped. Replies end as the client's own lines do, \
         LF or CR LF. Requests to a backend end in LF."
    };

    const WORDS: &'static [&'static str] = &["\r\n", "\n"];

    fn sample_request(&self, data: &[u8]) -> Vec<u8> {
        data.iter().copied().filter(|byte| *byte != b'\n').collect()
    }

    fn malformed(&self, max: usize) -> Vec<Vec<u8>> {
        vec![vec![b'x'; max.saturating_add(9)]]
    }

    fn check(&self, _sizes: &Sizes) -> Result<(), FramingConfigError> {
        Ok(())
    }

    fn request_bytes_max(&self, max: usize) -> usize {
        max.saturating_add(TERMINATOR.len())
    }

    #[inline]
    fn parse_request(
        &self,
        state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        parse(state, buffer, max, Expects::Reply)
    }

    #[inline]
    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        encode(reply, CRLF, out)
    }

    #[inline]
    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        encode(request, CRLF, out)
    }

    #[inline]
    fn parse_response(
        &self,
        state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        parse(state, buffer, max, Expects::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    fn request(buffer: &[u8], max: usize) -> Result<Parsed, FramingError> {
        Framing::Line.parse_request(&mut ParseState::default(), buffer, max)
    }

    fn message(consumed: usize, end: usize) -> Result<Parsed, FramingError> {
        Ok(Parsed::Message { consumed, start: 0, end, expects: Expects::Reply })
    }

    #[test]
    fn lf_ends_a_line_and_one_cr_before_it_is_dropped() {
        assert_eq!(request(b"abc\ndef\n", 8), message(4, 3));
        assert_eq!(request(b"abc\r\n", 8), message(5, 3));
        assert_eq!(request(b"abc\r\r\n", 8), message(6, 4));
        assert_eq!(request(b"a\rc\n", 8), message(4, 3));
        assert_eq!(request(b"\n", 8), message(1, 0));
        assert_eq!(request(b"\r\n", 8), message(2, 0));
        assert_eq!(request(b"", 8), Ok(Parsed::Incomplete { more: 1 }));
        assert_eq!(request(b"abc\r", 8), Ok(Parsed::Incomplete { more: 1 }));
    }

    #[test]
    fn the_maximum_counts_the_line_without_its_terminator() {
        assert_eq!(request(b"abcd\n", 4), message(5, 4));
        assert_eq!(request(b"abcd\r\n", 4), message(6, 4));
        assert_eq!(request(b"abcd\r", 4), Ok(Parsed::Incomplete { more: 1 }));
        assert_eq!(request(b"abcd\r\r\n", 4), Err(FramingError::TooLong));
        assert_eq!(request(b"abcde\n", 4), Err(FramingError::TooLong));
        assert_eq!(request(b"abcd\r\r", 4), Err(FramingError::TooLong));
    }

    #[test]
    fn an_endless_line_is_refused_at_the_first_byte_too_many() {
        let mut state = ParseState::default();
        for len in 0..=100 {
            let parsed = Framing::Line.parse_request(&mut state, &vec![b'a'; len], 100);
            assert_eq!(parsed, Ok(Parsed::Incomplete { more: 1 }), "{len}");
        }
        let parsed = Framing::Line.parse_request(&mut state, &[b'a'; 101], 100);
        assert_eq!(parsed, Err(FramingError::TooLong));
    }

    #[test]
    fn a_line_that_arrives_in_bytes_is_searched_once() {
        let mut state = ParseState::default();
        let line = [vec![b'a'; 1000], b"\nnext".to_vec()].concat();
        for len in 0..1001 {
            let parsed = Framing::Line.parse_request(&mut state, &line[..len], 4096).unwrap();
            assert_eq!(parsed, Parsed::Incomplete { more: 1 });
            assert_eq!(state.scanned as usize, len, "the search resumes where it stopped");
        }
        assert_eq!(Framing::Line.parse_request(&mut state, &line, 4096), message(1001, 1000));
        assert_eq!(state, ParseState::default());
    }

    #[test]
    fn written_messages_end_like_the_framing_and_contain_no_lf() {
        for (framing, written) in [
            (Framing::Line, &b"abc\nabc\r\r\n\n"[..]),
            (Framing::LineCrLf, b"abc\r\nabc\r\r\n\r\n"),
        ] {
            let mut out = Vec::new();
            framing.encode_reply(b"abc", &mut out).unwrap();
            framing.encode_reply(b"abc\r", &mut out).unwrap();
            assert_eq!(framing.encode_reply(b"a\nb", &mut out), Err(FramingError::Unframable));
            framing.encode_request(b"", &mut out).unwrap();
            assert_eq!(out, written, "{framing}");
        }
    }

    #[test]
    fn replies_end_like_the_clients_lines() {
        assert_eq!(Framing::Line.as_client_writes(false), Framing::Line);
        assert_eq!(Framing::Line.as_client_writes(true), Framing::LineCrLf);
        assert_eq!(Framing::LineCrLf.as_client_writes(false), Framing::LineCrLf);
        assert_eq!(Framing::Raw.as_client_writes(true), Framing::Raw);
    }
}
