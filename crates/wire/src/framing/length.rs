//! `length:u16` and `length:u32`: a length in network byte order, not counting itself, followed by that many bytes.
//! Replies have the same format. A length of 0 is an empty message.

use super::{Alike, Expects, FramingConfigError, FramingError, Grammar, ParseState, Parsed, Sizes};

/// A length field of `FIELD` bytes: 2 or 4.
pub(super) struct Length<const FIELD: usize>;

impl<const FIELD: usize> Length<FIELD> {
    #[inline]
    fn parse(buffer: &[u8], max: usize, expects: Expects) -> Result<Parsed, FramingError> {
        let Some(field) = buffer.first_chunk::<FIELD>() else {
            return Ok(Parsed::Incomplete { more: FIELD - buffer.len() });
        };
        let len = field.iter().fold(0, |len, byte| (len << 8) + u32::from(*byte)) as usize;
        if len > max {
            return Err(FramingError::TooLong);
        }
        let end = FIELD + len;
        if buffer.len() < end {
            return Ok(Parsed::Incomplete { more: end - buffer.len() });
        }
        Ok(Parsed::Message { consumed: end, start: FIELD, end, expects })
    }

    #[inline]
    fn encode(payload: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        let len = u32::try_from(payload.len()).map_err(|_| FramingError::Unframable)?;
        let field = len.to_be_bytes();
        let (high, low) = field.split_at(field.len() - FIELD);
        if high.iter().any(|byte| *byte != 0) {
            return Err(FramingError::Unframable);
        }
        out.extend_from_slice(low);
        out.extend_from_slice(payload);
        Ok(())
    }
}

impl<const FIELD: usize> Grammar for Length<FIELD> {
    const WIRE: &'static str = match FIELD {
        2 => {
            "a length of 2 bytes in network byte order, not counting itself, followed by the message"
        }
        _ => {
            "a length of 4 bytes in network byte order, not counting itself, followed by the message"
        }
    };

    fn malformed(&self, _max: usize) -> Vec<Vec<u8>> {
        vec![vec![0xff; 9]]
    }

    fn check(&self, sizes: &Sizes) -> Result<(), FramingConfigError> {
        let each =
            [(sizes.request_key, sizes.request_max), (sizes.response_key, sizes.response_max)];
        for (key, max) in each {
            if FIELD == 2 && max > usize::from(u16::MAX) {
                return Err(FramingConfigError::LengthU16 { key, max });
            }
        }
        Ok(())
    }

    fn request_bytes_max(&self, max: usize) -> usize {
        max.saturating_add(FIELD)
    }

    #[inline]
    fn parse_request(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        Self::parse(buffer, max, Expects::Reply)
    }

    #[inline]
    fn requests_alike(&self, buffer: &[u8], max: usize, most: usize) -> Option<Alike> {
        let field = buffer.first_chunk::<FIELD>()?;
        let len = field.iter().fold(0, |len, byte| (len << 8) + u32::from(*byte)) as usize;
        if len == 0 || len > max {
            return None;
        }
        let messages = buffer.chunks_exact(FIELD + len).take(most);
        let count = messages.take_while(|message| message.first_chunk() == Some(field)).count();
        Alike::of(count, most, FIELD, len)
    }

    #[inline]
    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        Self::encode(reply, out)
    }

    #[inline]
    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        Self::encode(request, out)
    }

    #[inline]
    fn parse_response(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        Self::parse(buffer, max, Expects::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    fn request(framing: Framing, buffer: &[u8], max: usize) -> Result<Parsed, FramingError> {
        framing.parse_request(&mut ParseState::default(), buffer, max)
    }

    #[test]
    fn the_length_is_in_network_byte_order_and_does_not_count_itself() {
        let message = |consumed, start| {
            Ok(Parsed::Message { consumed, start, end: consumed, expects: Expects::Reply })
        };
        assert_eq!(request(Framing::LengthU16, b"\x00\x03abcd", 9), message(5, 2));
        assert_eq!(request(Framing::LengthU32, b"\x00\x00\x00\x03abcd", 9), message(7, 4));
        assert_eq!(request(Framing::LengthU16, b"\x00\x00abc", 9), message(2, 2));
        let mut long = vec![7; 2 + 0x0102];
        long[..2].copy_from_slice(b"\x01\x02");
        assert_eq!(request(Framing::LengthU16, &long, 0x0102), message(0x0104, 2));
    }

    #[test]
    fn the_number_of_missing_bytes_is_returned() {
        let incomplete = |more| Ok(Parsed::Incomplete { more });
        assert_eq!(request(Framing::LengthU32, b"", 9), incomplete(4));
        assert_eq!(request(Framing::LengthU32, b"\x00\x00\x00", 9), incomplete(1));
        assert_eq!(request(Framing::LengthU32, b"\x00\x00\x00\x03", 9), incomplete(3));
        assert_eq!(request(Framing::LengthU32, b"\x00\x00\x00\x03ab", 9), incomplete(1));
    }

    #[test]
    fn too_long_messages_are_refused_by_their_length_field() {
        assert_eq!(request(Framing::LengthU16, b"\x00\x0a", 9), Err(FramingError::TooLong));
        assert_eq!(request(Framing::LengthU32, b"\xff\xff\xff\xff", 9), Err(FramingError::TooLong));
        assert_eq!(request(Framing::LengthU32, b"\x00\x00\x00\x0a", 9), Err(FramingError::TooLong));
    }

    #[test]
    fn replies_and_requests_carry_their_length() {
        let mut out = Vec::new();
        Framing::LengthU16.encode_reply(b"abc", &mut out).unwrap();
        Framing::LengthU32.encode_request(b"", &mut out).unwrap();
        Framing::LengthU32.encode_reply(b"z", &mut out).unwrap();
        assert_eq!(out, b"\x00\x03abc\x00\x00\x00\x00\x00\x00\x00\x01z");
    }

    #[test]
    fn a_payload_beyond_the_length_field_is_refused() {
        let mut out = Vec::new();
        assert_eq!(
            Framing::LengthU16.encode_reply(&vec![0; 65_536], &mut out),
            Err(FramingError::Unframable)
        );
        assert!(out.is_empty());
        Framing::LengthU16.encode_reply(&vec![0; 65_535], &mut out).unwrap();
        assert_eq!((out.len(), &out[..2]), (65_537, &b"\xff\xff"[..]));
    }
}
