//! Synthetic packets: IP, UDP and TCP headers around a payload.
//!
//! The tap sees payloads and addresses, not packets: it derives headers from them (RFC 791, 8200,
//! 768, 9293), with correct lengths and checksums. TCP sequence numbers start at 1 in each direction, and
//! segments acknowledge everything seen so far; windows, options and retransmissions are not known.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Longest headers of a packet: IPv6 and TCP.
pub(super) const HEADERS_MAX: usize = 40 + 20;
/// Longest payload put into one TCP segment.
pub(super) const SEGMENT_BYTES_MAX: usize = 32 << 10;

const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;

/// TCP flags (RFC 9293, section 3.1).
pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;

/// The transport header.
#[derive(Clone, Copy, Debug)]
pub(super) enum Transport {
    Udp,
    Tcp { flags: u8, sequence: u32, acknowledged: u32 },
}

/// The headers of one packet in wire format.
#[derive(Debug)]
pub(super) struct Headers {
    bytes: [u8; HEADERS_MAX],
    len: usize,
}

impl Headers {
    /// Headers for `payload` from `source` to `target`.
    pub(super) fn new(
        source: SocketAddr,
        target: SocketAddr,
        transport: Transport,
        payload: &[u8],
    ) -> Self {
        let mut headers = Self { bytes: [0; HEADERS_MAX], len: 0 };
        let (transport_len, protocol) = match transport {
            Transport::Udp => (8, PROTOCOL_UDP),
            Transport::Tcp { .. } => (20, PROTOCOL_TCP),
        };
        let rest = (transport_len + payload.len()) as u16;
        let pseudo = headers.push_ip(source.ip(), target.ip(), protocol, rest);
        let start = headers.len;
        headers.push(&source.port().to_be_bytes());
        headers.push(&target.port().to_be_bytes());
        let checksum_at = match transport {
            Transport::Udp => {
                headers.push(&rest.to_be_bytes());
                headers.push(&[0; 2]);
                start + 6
            }
            Transport::Tcp { flags, sequence, acknowledged } => {
                headers.push(&sequence.to_be_bytes());
                headers.push(&acknowledged.to_be_bytes());
                headers.push(&[5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
                start + 16
            }
        };
        let sum = pseudo + sum_of(&headers.bytes[start..headers.len]) + sum_of(payload);
        let checksum = match (transport, fold(sum)) {
            // A UDP checksum of 0 means that there is none.
            (Transport::Udp, 0) => 0xffff,
            (_, checksum) => checksum,
        };
        headers.bytes[checksum_at..checksum_at + 2].copy_from_slice(&checksum.to_be_bytes());
        headers
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// The IP header; returns the sum of the pseudo-header for the checksum behind it.
    fn push_ip(&mut self, source: IpAddr, target: IpAddr, protocol: u8, rest: u16) -> u64 {
        let below = u64::from(protocol) + u64::from(rest);
        match (source.to_canonical(), target.to_canonical()) {
            (IpAddr::V4(source), IpAddr::V4(target)) => {
                self.push(&[0x45, 0]);
                self.push(&(20 + rest).to_be_bytes());
                // No identification, "don't fragment", 64 hops, checksum below.
                self.push(&[0, 0, 0x40, 0, 64, protocol, 0, 0]);
                self.push(&source.octets());
                self.push(&target.octets());
                let checksum = fold(sum_of(&self.bytes[..20]));
                self.bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
                below + sum_of(&source.octets()) + sum_of(&target.octets())
            }
            (source, target) => {
                let octets = |ip| match ip {
                    IpAddr::V4(ip) if ip == Ipv4Addr::UNSPECIFIED => [0; 16],
                    IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                    IpAddr::V6(ip) => ip.octets(),
                };
                let (source, target) = (octets(source), octets(target));
                self.push(&[0x60, 0, 0, 0]);
                self.push(&rest.to_be_bytes());
                self.push(&[protocol, 64]);
                self.push(&source);
                self.push(&target);
                below + sum_of(&source) + sum_of(&target)
            }
        }
    }
}

/// The sum of 16-bit words of the Internet checksum (RFC 1071), not folded.
fn sum_of(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(2);
    let last = words.remainder().first().map_or(0, |byte| u64::from(*byte) << 8);
    last + words.map(|w| u64::from(u16::from_be_bytes([w[0], w[1]]))).sum::<u64>()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_rfc_1071() {
        // The example of section 3 of the RFC.
        let sum = sum_of(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(fold(sum), !0xddf2);
        assert_eq!(sum_of(&[1, 2, 3]), 0x0102 + 0x0300);
    }
}
