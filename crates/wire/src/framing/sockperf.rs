//! `sockperf`: the message header of the sockperf benchmark (github.com/mellanox/sockperf), version 3.
//!
//! ```text
//! 0               8       10              14
//! | sequence u64  | flags | length u32    | data ...      all in network byte order
//! ```
//!
//! The length counts the whole message including the header, and so does the kernel's payload: a reply is the request
//! with the client bit of the flags cleared. Bit 0 of the flags is set in messages of clients, bit 1 in messages that
//! request an answer: in the throughput modes only some messages, or none.

use super::{Expects, FramingConfigError, FramingError, Grammar, ParseState, Parsed, Sizes};

/// Length of the header, which is also the shortest message.
pub const SOCKPERF_HEADER_BYTES: usize = 14;

const FLAGS_LOW: usize = 9;
const LENGTH: usize = 10;
const FLAG_WANTS_REPLY: u8 = 1 << 1;

pub(super) struct Sockperf;

/// The length field of a header.
#[inline]
fn announced(header: &[u8; SOCKPERF_HEADER_BYTES]) -> usize {
    let [.., a, b, c, d] = *header;
    u32::from_be_bytes([a, b, c, d]) as usize
}

#[inline]
fn parse(buffer: &[u8], max: usize) -> Result<Parsed, FramingError> {
    let Some(header) = buffer.first_chunk::<SOCKPERF_HEADER_BYTES>() else {
        return Ok(Parsed::Incomplete { more: SOCKPERF_HEADER_BYTES - buffer.len() });
    };
    let len = announced(header);
    if len < SOCKPERF_HEADER_BYTES {
        return Err(FramingError::BadHeader);
    }
    if len > max {
        return Err(FramingError::TooLong);
    }
    if buffer.len() < len {
        return Ok(Parsed::Incomplete { more: len - buffer.len() });
    }
    let wants_reply = header[FLAGS_LOW] & FLAG_WANTS_REPLY != 0;
    let expects = if wants_reply { Expects::Reply } else { Expects::Nothing };
    Ok(Parsed::Message { consumed: len, start: 0, end: len, expects })
}

/// Appends a message whose header contains its actual length: any other length would desynchronize the stream.
#[inline]
fn encode(message: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
    match message.first_chunk::<SOCKPERF_HEADER_BYTES>() {
        Some(header) if announced(header) == message.len() => {
            out.extend_from_slice(message);
            Ok(())
        }
        _ => Err(FramingError::Unframable),
    }
}

impl Grammar for Sockperf {
    const WIRE: &'static str = "the header of the sockperf benchmark, 14 bytes with the length of the whole message, and its data";

    fn sample_request(&self, data: &[u8]) -> Vec<u8> {
        let len = (SOCKPERF_HEADER_BYTES + data.len()) as u32;
        let sequence = data.len() as u64;
        // From a client that wants a reply.
        [&sequence.to_be_bytes()[..], &[0, 1 | FLAG_WANTS_REPLY], &len.to_be_bytes(), data].concat()
    }

    fn malformed(&self, _max: usize) -> Vec<Vec<u8>> {
        // A length shorter than the header.
        vec![[&[1; 10][..], &[0, 0, 0, 3]].concat()]
    }

    fn check(&self, sizes: &Sizes) -> Result<(), FramingConfigError> {
        let each =
            [(sizes.request_key, sizes.request_max), (sizes.response_key, sizes.response_max)];
        for (key, max) in each {
            // A service without replies (0) is valid.
            if (1..SOCKPERF_HEADER_BYTES).contains(&max) {
                return Err(FramingConfigError::SockperfUnderHeader { key, max });
            }
        }
        Ok(())
    }

    fn request_bytes_max(&self, max: usize) -> usize {
        max.max(SOCKPERF_HEADER_BYTES)
    }

    #[inline]
    fn parse_request(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        parse(buffer, max)
    }

    #[inline]
    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        encode(reply, out)
    }

    #[inline]
    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        if request.get(FLAGS_LOW).is_some_and(|flags| flags & FLAG_WANTS_REPLY == 0) {
            return Err(FramingError::NotAnswered);
        }
        encode(request, out)
    }

    fn forward(
        &self,
        request: &[u8],
        expects: Expects,
        out: &mut Vec<u8>,
    ) -> Result<(), FramingError> {
        let flags = request.get(FLAGS_LOW).ok_or(FramingError::Unframable)?;
        if (flags & FLAG_WANTS_REPLY != 0) != (expects == Expects::Reply) {
            return Err(FramingError::Unframable);
        }
        encode(request, out)
    }

    #[inline]
    fn parse_response(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        parse(buffer, max).map(|parsed| match parsed {
            Parsed::Message { consumed, start, end, .. } => {
                Parsed::Message { consumed, start, end, expects: Expects::Nothing }
            }
            other => other,
        })
    }
}

const _: () = assert!(LENGTH + size_of::<u32>() == SOCKPERF_HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    /// As recorded from `sockperf ping-pong --tcp -m 32`, version 3.7: the first 16 of 32 bytes.
    const PING: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 1, 0, 3, 0, 0, 0, 32, 0xd4, 0xab];
    /// As recorded from `sockperf throughput --tcp -m 64`: the first 16 of 64 bytes.
    const FLOOD: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 64, 0x96, 0x8f];

    fn padded(start: [u8; 16], len: usize) -> Vec<u8> {
        let mut message = start.to_vec();
        message.resize(len, 0x5a);
        message
    }

    fn with_length(len: u32) -> Vec<u8> {
        let mut message = PING[..LENGTH].to_vec();
        message.extend_from_slice(&len.to_be_bytes());
        message
    }

    fn request(buffer: &[u8], max: usize) -> Result<Parsed, FramingError> {
        Framing::Sockperf.parse_request(&mut ParseState::default(), buffer, max)
    }

    #[test]
    fn recorded_messages_are_understood() {
        let ping = Parsed::Message { consumed: 32, start: 0, end: 32, expects: Expects::Reply };
        assert_eq!(request(&padded(PING, 32), 64), Ok(ping));
        let flood = Parsed::Message { consumed: 64, start: 0, end: 64, expects: Expects::Nothing };
        assert_eq!(request(&padded(FLOOD, 65), 64), Ok(flood));
    }

    #[test]
    fn the_number_of_missing_bytes_is_returned() {
        assert_eq!(request(b"", 64), Ok(Parsed::Incomplete { more: 14 }));
        assert_eq!(request(&PING[..13], 64), Ok(Parsed::Incomplete { more: 1 }));
        assert_eq!(request(&PING, 64), Ok(Parsed::Incomplete { more: 16 }));
    }

    #[test]
    fn lengths_outside_header_and_maximum_are_refused() {
        for len in [0, 1, 13] {
            assert_eq!(request(&with_length(len), 64), Err(FramingError::BadHeader));
        }
        for len in [65, u32::MAX] {
            assert_eq!(request(&with_length(len), 64), Err(FramingError::TooLong));
        }
        let bare = Parsed::Message { consumed: 14, start: 0, end: 14, expects: Expects::Reply };
        assert_eq!(request(&with_length(14), 14), Ok(bare));
    }

    #[test]
    fn a_reply_must_carry_its_own_length() {
        let mut out = Vec::new();
        let pong = padded(PING, 32);
        Framing::Sockperf.encode_reply(&pong, &mut out).unwrap();
        assert_eq!(out, pong);
        for wrong in [&b""[..], &pong[..13], &pong[..31], &padded(PING, 33)] {
            assert_eq!(
                Framing::Sockperf.encode_reply(wrong, &mut out),
                Err(FramingError::Unframable)
            );
        }
        assert_eq!(out, pong);
    }

    #[test]
    fn a_request_to_a_backend_must_want_an_answer() {
        let mut out = Vec::new();
        assert_eq!(
            Framing::Sockperf.encode_request(&padded(FLOOD, 64), &mut out),
            Err(FramingError::NotAnswered)
        );
        assert!(out.is_empty());
        // A proxy passes it on as its client sent it.
        assert_eq!(
            Framing::Sockperf.forward(&padded(FLOOD, 64), Expects::Nothing, &mut out),
            Ok(())
        );
        assert_eq!(std::mem::take(&mut out), padded(FLOOD, 64));
        for (message, expects) in
            [(padded(FLOOD, 64), Expects::Reply), (padded(PING, 32), Expects::Nothing)]
        {
            assert!(Framing::Sockperf.forward(&message, expects, &mut out).is_err());
        }
        Framing::Sockperf.encode_request(&padded(PING, 32), &mut out).unwrap();
        let mut state = ParseState::default();
        let response = Framing::Sockperf.parse_response(&mut state, &out, 32);
        let pong = Parsed::Message { consumed: 32, start: 0, end: 32, expects: Expects::Nothing };
        assert_eq!(response, Ok(pong));
    }
}
