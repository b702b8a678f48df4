//! Stateless decisions of admission and dispatch: the maximum size of a reply to an unverified source, and the mqueue
//! of a flow or a key.
//!
//! # Hashes
//!
//! Flows and keys are hashed with XXH3-64, seed 0 (Yann Collet, xxHash specification, "XXH3"), over a byte string
//! defined here. The values are a contract: the same flow or key is assigned to the same mqueue on every worker,
//! machine and build, so a service can be restarted, or spread over several engines, without moving its keys. The
//! hash is not a protection: a client that chooses keys or ports can aim at one mqueue; credits limit the damage.

use crate::drop_reason::DropReason;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use twox_hash::XxHash3_64;

/// Whether a reply may be sent to a UDP source that could be forged: it may have at most `ratio` times
/// the bytes of its request, so that the service cannot be used to amplify an attack (RFC 8085, 3.8
/// and RFC 9000, 8.1, which sets the ratio to 3). A ratio of 0 is no limit.
#[inline]
pub const fn reply_allowed(request_bytes: usize, reply_bytes: usize, ratio: u32) -> bool {
    ratio == 0 || reply_bytes as u64 <= (request_bytes as u64).saturating_mul(ratio as u64)
}

/// Hash of a flow: the sender's address and port, and the local port. An IPv4 address and its IPv6-mapped form (RFC
/// 4291, 2.5.5.2) are the same flow; flow labels and scopes are ignored.
///
/// The input has 20 bytes: the IPv6 address, the peer's port, the local port, all in network byte order.
pub fn flow_hash(peer: SocketAddr, local_port: u16) -> u64 {
    let address = match peer.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    let mut bytes = [0; 20];
    bytes[..16].copy_from_slice(&address.octets());
    bytes[16..18].copy_from_slice(&peer.port().to_be_bytes());
    bytes[18..].copy_from_slice(&local_port.to_be_bytes());
    XxHash3_64::oneshot(&bytes)
}

/// Hash of a key's bytes.
#[inline]
pub fn key_hash(key: &[u8]) -> u64 {
    XxHash3_64::oneshot(key)
}

/// The mqueue of a hash, of `count` mqueues (from 1): the integer part of `hash / 2⁶⁴ × count`.
#[inline]
pub const fn bucket(hash: u64, count: u32) -> u32 {
    ((hash as u128 * count as u128) >> u64::BITS) as u32
}

/// The position of the key in a message: `OFFSET:LENGTH` in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyRange {
    offset: u32,
    len: u32,
}

/// Why a key range is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyRangeError {
    /// Not two numbers.
    #[error("key `{0}` is not a byte range: write \"OFFSET:LENGTH\", such as \"0:12\"")]
    Syntax(String),
    /// A key of no bytes, which would send every message to one mqueue.
    #[error("key `{0}` has no bytes: give a LENGTH from 1")]
    Empty(String),
    /// No message is long enough.
    #[error("key {range} ends after max_message_bytes = {max}: every message would be too short")]
    OverMaximum {
        /// The range.
        range: KeyRange,
        /// `max_message_bytes`.
        max: usize,
    },
}

impl KeyRange {
    /// The offset behind the key's last byte: the shortest message that has a key.
    pub const fn end(self) -> usize {
        self.offset as usize + self.len as usize
    }

    /// Rejects a range that no message of a service can contain.
    pub const fn check(self, max_message_bytes: usize) -> Result<(), KeyRangeError> {
        if self.end() > max_message_bytes {
            return Err(KeyRangeError::OverMaximum { range: self, max: max_message_bytes });
        }
        Ok(())
    }

    /// The key of a message, or the reason to drop a message that ends before its key.
    #[inline]
    pub fn of(self, message: &[u8]) -> Result<&[u8], DropReason> {
        message.get(self.offset as usize..self.end()).ok_or(DropReason::TooShort)
    }
}

impl FromStr for KeyRange {
    type Err = KeyRangeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // `parse` alone would also accept a sign.
        let number = |digits: &str| {
            digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u32>().ok())?
        };
        let range = text.split_once(':').and_then(|(offset, len)| {
            let (offset, len) = (number(offset)?, number(len)?);
            // `end` must not overflow on a 32-bit host either.
            offset.checked_add(len).map(|_| Self { offset, len })
        });
        match range {
            None => Err(KeyRangeError::Syntax(text.to_owned())),
            Some(Self { len: 0, .. }) => Err(KeyRangeError::Empty(text.to_owned())),
            Some(range) => Ok(range),
        }
    }
}

impl std::fmt::Display for KeyRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.offset, self.len)
    }
}

/// The bits of an IPv6 address that its network has: a host chooses the others as it likes (RFC 4291, RFC 8981), so all of one network count as one.
const HOST_BITS: u32 = 64;

/// What an address says about its host: of IPv6 the first 64 bits, and an IPv4 address whole, also within one of IPv6.
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> HOST_BITS << HOST_BITS))
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_limited_by_the_ratio() {
        assert!(reply_allowed(64, 192, 3));
        assert!(!reply_allowed(64, 193, 3));
        assert!(reply_allowed(0, 0, 3));
        assert!(!reply_allowed(0, 1, 3));
        assert!(reply_allowed(0, usize::MAX, 0));
        assert!(reply_allowed(usize::MAX, usize::MAX, u32::MAX));
    }

    /// Values computed with the reference implementation in C: if this test fails, keys move between mqueues.
    #[test]
    fn hashes_never_change() {
        assert_eq!(key_hash(b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(key_hash(b"a"), 0xe6c6_32b6_1e96_4e1f);
        assert_eq!(key_hash(b"face:000000000000000000000000"), FACE_KEY);
        assert_eq!(key_hash(&[7; 250]), LONG_KEY);
        assert_eq!(flow_hash("192.0.2.1:4242".parse().unwrap(), 9000), FLOW_V4);
        assert_eq!(flow_hash("[2001:db8::1]:4242".parse().unwrap(), 9000), FLOW_V6);
    }

    const FACE_KEY: u64 = 0xc6c0_b5b9_4a08_659c;
    const LONG_KEY: u64 = 0xf4ac_0440_c068_b592;
    const FLOW_V4: u64 = 0x35d0_a399_81a7_1bfe;
    const FLOW_V6: u64 = 0xc688_7c5e_5650_171e;

    #[test]
    fn a_flow_is_address_and_both_ports() {
        let hash = |peer: &str, port| flow_hash(peer.parse().unwrap(), port);
        let flow = hash("192.0.2.1:4242", 9000);
        assert_eq!(flow, hash("[::ffff:192.0.2.1]:4242", 9000));
        for other in [
            hash("192.0.2.2:4242", 9000),
            hash("192.0.2.1:4243", 9000),
            hash("192.0.2.1:4242", 9001),
            hash("192.0.2.1:9000", 4242),
        ] {
            assert_ne!(flow, other);
        }
    }

    #[test]
    fn consecutive_ports_and_keys_spread_over_any_number_of_mqueues() {
        // Miri interprets every step of the hash.
        let counts: &[u32] = if cfg!(miri) { &[3] } else { &[1, 2, 3, 7, 64, 240] };
        let flows: u32 = if cfg!(miri) { 300 } else { 24_000 };
        for &count in counts {
            let mut by_port = vec![0u32; count as usize];
            let mut by_key = by_port.clone();
            for i in 0..flows {
                let peer = SocketAddr::from(([127, 0, 0, 1], 32_768 + i as u16));
                by_port[bucket(flow_hash(peer, 9000), count) as usize] += 1;
                by_key[bucket(key_hash(&i.to_le_bytes()), count) as usize] += 1;
            }
            let fair = flows / count;
            for load in by_port.into_iter().chain(by_key) {
                assert!((fair / 2..=fair * 2).contains(&load), "{load} of {fair} with {count}");
            }
        }
    }

    #[test]
    fn buckets_stay_in_range() {
        assert_eq!(bucket(0, 5), 0);
        assert_eq!(bucket(u64::MAX, 5), 4);
        assert_eq!(bucket(u64::MAX, 1), 0);
        assert_eq!(bucket(u64::MAX, u32::MAX), u32::MAX - 1);
    }

    #[test]
    fn a_key_range_is_read_and_written() {
        let range: KeyRange = "4:12".parse().unwrap();
        assert_eq!((range.end(), range.to_string()), (16, "4:12".to_owned()));
        assert_eq!(range.check(16), Ok(()));
        assert_eq!(range.check(15), Err(KeyRangeError::OverMaximum { range, max: 15 }));
        for wrong in
            ["", ":", "4", "4:", ":4", "a:4", "-1:4", "+1:4", "1:2:3", "4294967295:1", " 1:2"]
        {
            let error = wrong.parse::<KeyRange>().unwrap_err();
            assert_eq!(error, KeyRangeError::Syntax(wrong.to_owned()));
        }
        assert_eq!("4:0".parse::<KeyRange>(), Err(KeyRangeError::Empty("4:0".to_owned())));
    }

    #[test]
    fn a_message_that_ends_before_its_key_is_too_short() {
        let range: KeyRange = "2:3".parse().unwrap();
        assert_eq!(range.of(b"abcdef"), Ok(&b"cde"[..]));
        assert_eq!(range.of(b"abcde"), Ok(&b"cde"[..]));
        for short in [&b""[..], b"a", b"ab", b"abcd"] {
            assert_eq!(range.of(short), Err(DropReason::TooShort));
        }
    }
}
