//! `raw`: no framing. A message is the result of one read.
//!
//! TCP does not preserve the boundaries of the sender's writes, so this suits request-response clients with one
//! request in flight, and streams whose kernel does not depend on boundaries. A read of more than the maximum is not
//! an error: it is split at the maximum and the rest is the next message. No byte is lost or reordered.

use super::{
    Delimits, Expects, FramingConfigError, FramingError, Grammar, ParseState, Parsed, Sizes,
};

pub(super) struct Raw;

#[inline]
fn parse(buffer: &[u8], max: usize, expects: Expects) -> Result<Parsed, FramingError> {
    if buffer.is_empty() {
        return Ok(Parsed::Incomplete { more: 1 });
    }
    if max == 0 {
        return Err(FramingError::TooLong);
    }
    let end = buffer.len().min(max);
    Ok(Parsed::Message { consumed: end, start: 0, end, expects })
}

impl Grammar for Raw {
    const WIRE: &'static str = "what one read of the connection returned, cut at `max_message_bytes`. TCP is a stream: \
        two requests sent together may arrive as one message, and one request as several chunks. Use `raw` for \
        clients that send one short request and wait, or for kernels that accept a stream of chunks. A proxy passes the bytes on as they come \
        ([proxy.md](proxy.md#byte-streams)).";

    const DELIMITS: Delimits = Delimits::Nothing;

    fn sample_request(&self, data: &[u8]) -> Vec<u8> {
        if data.is_empty() { vec![0] } else { data.to_vec() }
    }

    fn malformed(&self, _max: usize) -> Vec<Vec<u8>> {
        Vec::new()
    }

    fn check(&self, _sizes: &Sizes) -> Result<(), FramingConfigError> {
        Ok(())
    }

    fn request_bytes_max(&self, max: usize) -> usize {
        max
    }

    #[inline]
    fn parse_request(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        parse(buffer, max, Expects::Reply)
    }

    #[inline]
    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        out.extend_from_slice(reply);
        Ok(())
    }

    #[inline]
    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        // An empty request cannot be answered.
        if request.is_empty() {
            return Err(FramingError::NotAnswered);
        }
        out.extend_from_slice(request);
        Ok(())
    }

    #[inline]
    fn parse_response(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        parse(buffer, max, Expects::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    fn request(buffer: &[u8], max: usize) -> Result<Parsed, FramingError> {
        Framing::Raw.parse_request(&mut ParseState::default(), buffer, max)
    }

    #[test]
    fn a_read_is_a_message() {
        assert_eq!(request(b"", 8), Ok(Parsed::Incomplete { more: 1 }));
        for len in 1..=8 {
            let whole =
                Parsed::Message { consumed: len, start: 0, end: len, expects: Expects::Reply };
            assert_eq!(request(&b"abcdefgh"[..len], 8), Ok(whole));
        }
    }

    #[test]
    fn a_longer_read_is_cut_at_the_maximum() {
        let first = Parsed::Message { consumed: 3, start: 0, end: 3, expects: Expects::Reply };
        assert_eq!(request(b"abcdefgh", 3), Ok(first));
    }

    #[test]
    fn a_maximum_of_0_is_an_error_and_not_an_endless_loop() {
        assert_eq!(request(b"a", 0), Err(FramingError::TooLong));
    }

    #[test]
    fn payloads_are_written_as_produced() {
        let mut out = b"<".to_vec();
        Framing::Raw.encode_reply(b"abc", &mut out).unwrap();
        Framing::Raw.encode_reply(b"", &mut out).unwrap();
        Framing::Raw.encode_request(b"de", &mut out).unwrap();
        assert_eq!(out, b"<abcde");
        assert_eq!(Framing::Raw.encode_request(b"", &mut out), Err(FramingError::NotAnswered));
    }
}
