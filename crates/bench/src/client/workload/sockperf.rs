//! Messages of the sockperf benchmark in its ping-pong mode.

use wire::framing::SOCKPERF_HEADER_BYTES;

use super::{Echo, Workload};

/// From a client (bit 0), requesting an answer (bit 1).
const PING: u16 = 0b11;
/// The answer: the client bit is cleared.
const PONG: u16 = 0b10;

/// Messages with sockperf's header: sequence number u64, flags u16, length u32, in network byte order.
#[derive(Clone, Debug)]
pub struct Sockperf {
    len_bytes: usize,
    data: Echo,
    expected: Vec<u8>,
}

impl Sockperf {
    /// Messages of this length, header included; at least the header.
    pub fn new(len_bytes: usize) -> Self {
        let len_bytes = len_bytes.max(SOCKPERF_HEADER_BYTES);
        let data = Echo::new(len_bytes - SOCKPERF_HEADER_BYTES);
        Self { len_bytes, data, expected: Vec::with_capacity(len_bytes) }
    }

    fn fill(&mut self, index: u64, flags: u16, into: &mut Vec<u8>) {
        into.extend_from_slice(&index.to_be_bytes());
        into.extend_from_slice(&flags.to_be_bytes());
        into.extend_from_slice(&(self.len_bytes as u32).to_be_bytes());
        self.data.request(index, into);
    }
}

impl Workload for Sockperf {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.fill(index, PING, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let mut expected = std::mem::take(&mut self.expected);
        expected.clear();
        self.fill(index, PONG, &mut expected);
        let right = reply == expected.as_slice();
        self.expected = expected;
        right
    }

    fn has_identity(&self) -> bool {
        true
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        reply.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::framing::{Expects, Framing, ParseState, Parsed};

    #[test]
    fn requests_are_pings_and_only_pongs_are_answers() {
        for len in [0, 14, 15, 64, 1400] {
            let mut sockperf = Sockperf::new(len);
            let mut message = Vec::new();
            sockperf.request(77, &mut message);
            let bytes = len.max(SOCKPERF_HEADER_BYTES);
            let parsed =
                Framing::Sockperf.parse_request(&mut ParseState::default(), &message, 65_536);
            let whole =
                Parsed::Message { consumed: bytes, start: 0, end: bytes, expects: Expects::Reply };
            assert_eq!(parsed, Ok(whole));
            assert!(!sockperf.accepts(77, &message), "a ping is not a pong");
            message[9] &= !1;
            super::super::tests::identity_survives(&mut sockperf, 77, &message);
        }
    }
}
