//! The PROXY protocol, version 2 (HAProxy): a header with the addresses of a client, before what a proxy forwards for it.
//!
//! A connection begins with one, and each datagram does. A header has the two addresses and nothing else: some receivers read no TLVs.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Deref;

use crate::nic::Transport;

/// Length of a header with addresses of IPv4 and of IPv6.
pub const PROXY_HEADER_BYTES_V4: usize = FIXED_BYTES + 2 * 4 + 2 * 2;
/// As [`PROXY_HEADER_BYTES_V4`].
pub const PROXY_HEADER_BYTES_V6: usize = FIXED_BYTES + 2 * 16 + 2 * 2;
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Before the addresses.
const FIXED_BYTES: usize = 16;
/// Version 2, and the command PROXY.
const VERSION_AND_COMMAND: u8 = 0x21;

/// A header: its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyHeader {
    bytes: [u8; PROXY_HEADER_BYTES_V6],
    len: u8,
}

impl Deref for ProxyHeader {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }
}

/// The header of what `client` sent to `server`. If one of them has an address of IPv4 and the other one of IPv6, the former is mapped.
pub fn proxy_header(transport: Transport, client: SocketAddr, server: SocketAddr) -> ProxyHeader {
    let mut bytes = [0; PROXY_HEADER_BYTES_V6];
    bytes[..12].copy_from_slice(SIGNATURE);
    bytes[12] = VERSION_AND_COMMAND;
    let transport = match transport {
        Transport::Tcp => 1,
        Transport::Udp => 2,
    };
    let mut at = FIXED_BYTES;
    let mut put = |part: &[u8]| {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    let family = match (client.ip(), server.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            put(&from.octets());
            put(&to.octets());
            1
        }
        (from, to) => {
            put(&wide(from).octets());
            put(&wide(to).octets());
            2
        }
    };
    put(&client.port().to_be_bytes());
    put(&server.port().to_be_bytes());
    bytes[13] = family << 4 | transport;
    bytes[15] = (at - FIXED_BYTES) as u8;
    ProxyHeader { bytes, len: at as u8 }
}

fn wide(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the specification has it (haproxy 2.8, doc/proxy-protocol.txt, section 2.2).
    #[test]
    fn headers_are_those_of_the_specification() {
        let header = |transport, from: &str, to: &str| {
            proxy_header(transport, from.parse().unwrap(), to.parse().unwrap())
        };
        let signature = [0x0d, 0x0a, 0x0d, 0x0a, 0x00, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a];
        let tcp = header(Transport::Tcp, "10.1.2.3:258", "192.168.0.9:443");
        assert_eq!(tcp[..12], signature);
        assert_eq!(tcp[12..16], [0x21, 0x11, 0, 12]);
        assert_eq!(tcp[16..], [10, 1, 2, 3, 192, 168, 0, 9, 1, 2, 1, 187]);
        let udp = header(Transport::Udp, "[2001:db8::1]:258", "10.0.0.1:53");
        assert_eq!(udp[12..16], [0x21, 0x22, 0, 36]);
        assert_eq!(udp[16..20], [0x20, 0x01, 0x0d, 0xb8]);
        assert_eq!(udp[42..], [0xff, 0xff, 10, 0, 0, 1, 1, 2, 0, 53]);
        assert_eq!((tcp.len(), udp.len()), (PROXY_HEADER_BYTES_V4, PROXY_HEADER_BYTES_V6));
        for (client, server) in [("10.1.2.3:1", "10.1.2.4:2"), ("[::1]:1", "[::2]:2")] {
            for transport in [Transport::Tcp, Transport::Udp] {
                let header = header(transport, client, server);
                let length = usize::from(u16::from_be_bytes([header[14], header[15]]));
                assert_eq!(header.len(), 16 + length, "nothing follows the addresses");
            }
        }
    }
}
