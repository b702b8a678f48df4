//! `fixed:N`: every request has N bytes.
//!
//! A service's replies are sent as the kernel produced them, with any length that its clients expect: `lenet` answers
//! 784 bytes with 44. For a backend the engine must find the end of responses itself, so request and response both
//! have N bytes.

use super::{
    Alike, Delimits, Expects, FramingConfigError, FramingError, Grammar, ParseState, Parsed, Sizes,
};

pub(super) struct Fixed(pub(super) u32);

impl Fixed {
    #[inline]
    fn parse(&self, buffer: &[u8], max: usize, expects: Expects) -> Result<Parsed, FramingError> {
        let size = self.0 as usize;
        if size > max {
            return Err(FramingError::TooLong);
        }
        // `check` rejects `fixed:0`; here it must only not cause an endless loop of empty messages.
        if size == 0 {
            return Err(FramingError::Unframable);
        }
        if buffer.len() < size {
            return Ok(Parsed::Incomplete { more: size - buffer.len() });
        }
        Ok(Parsed::Message { consumed: size, start: 0, end: size, expects })
    }
}

impl Grammar for Fixed {
    const WIRE: &'static str = "N bytes; replies are sent unchanged";

    const DELIMITS: Delimits = Delimits::Requests;

    fn sample_request(&self, data: &[u8]) -> Vec<u8> {
        let mut message = data.to_vec();
        message.resize(self.0 as usize, 0);
        message
    }

    fn malformed(&self, _max: usize) -> Vec<Vec<u8>> {
        Vec::new()
    }

    fn check(&self, sizes: &Sizes) -> Result<(), FramingConfigError> {
        let Self(size) = *self;
        if size == 0 {
            return Err(FramingConfigError::FixedZero);
        }
        let over = |max: usize| size as usize > max;
        let refuse = |key, max| Err(FramingConfigError::FixedOverMaximum { size, key, max });
        if over(sizes.request_max) {
            return refuse(sizes.request_key, sizes.request_max);
        }
        if sizes.backend && over(sizes.response_max) {
            return refuse(sizes.response_key, sizes.response_max);
        }
        Ok(())
    }

    fn request_bytes_max(&self, _max: usize) -> usize {
        self.0 as usize
    }

    #[inline]
    fn parse_request(
        &self,
        _state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<Parsed, FramingError> {
        self.parse(buffer, max, Expects::Reply)
    }

    #[inline]
    fn requests_alike(&self, buffer: &[u8], max: usize, most: usize) -> Option<Alike> {
        let size = self.0 as usize;
        let count = buffer.len().checked_div(size)?;
        if size <= max { Alike::of(count, most, 0, size) } else { None }
    }

    #[inline]
    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        out.extend_from_slice(reply);
        Ok(())
    }

    #[inline]
    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        if request.len() != self.0 as usize {
            return Err(FramingError::Unframable);
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
        self.parse(buffer, max, Expects::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    fn request(size: u32, buffer: &[u8], max: usize) -> Result<Parsed, FramingError> {
        Framing::Fixed(size).parse_request(&mut ParseState::default(), buffer, max)
    }

    #[test]
    fn a_message_is_n_bytes() {
        let whole = Parsed::Message { consumed: 4, start: 0, end: 4, expects: Expects::Reply };
        assert_eq!(request(4, b"", 4), Ok(Parsed::Incomplete { more: 4 }));
        assert_eq!(request(4, b"abc", 4), Ok(Parsed::Incomplete { more: 1 }));
        assert_eq!(request(4, b"abcd", 4), Ok(whole));
        assert_eq!(request(4, b"abcde", 4), Ok(whole));
    }

    #[test]
    fn invalid_sizes_are_errors_and_not_an_endless_loop() {
        assert_eq!(request(4, b"", 3), Err(FramingError::TooLong));
        assert_eq!(request(0, b"abc", 3), Err(FramingError::Unframable));
    }

    #[test]
    fn replies_are_written_as_produced_and_requests_have_n_bytes() {
        let mut out = Vec::new();
        Framing::Fixed(4).encode_reply(b"of any length", &mut out).unwrap();
        assert_eq!(out, b"of any length");
        out.clear();
        Framing::Fixed(4).encode_request(b"abcd", &mut out).unwrap();
        for wrong in [&b""[..], b"abc", b"abcde"] {
            assert_eq!(
                Framing::Fixed(4).encode_request(wrong, &mut out),
                Err(FramingError::Unframable)
            );
        }
        assert_eq!(out, b"abcd");
    }
}
