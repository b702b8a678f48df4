//! The PROXY protocol, version 2 (HAProxy): a header with the addresses of a client, before what a proxy forwards for it.
//!
//! A connection begins with one, and each datagram does. All headers have the same length: shorter addresses are filled up with a NOOP, which
//! receivers skip.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::nic::Transport;

/// Length of a header.
pub const PROXY_HEADER_BYTES: usize = 52;
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Before the addresses.
const FIXED_BYTES: usize = 16;
/// Version 2, and the command PROXY.
const VERSION_AND_COMMAND: u8 = 0x21;
const NOOP: u8 = 0x04;

/// The header of what `client` sent to `server`.
pub fn proxy_header(
    transport: Transport,
    client: SocketAddr,
    server: SocketAddr,
) -> [u8; PROXY_HEADER_BYTES] {
    let mut header = [0; PROXY_HEADER_BYTES];
    header[..12].copy_from_slice(SIGNATURE);
    header[12] = VERSION_AND_COMMAND;
    let transport = match transport {
        Transport::Tcp => 1,
        Transport::Udp => 2,
    };
    header[15] = (PROXY_HEADER_BYTES - FIXED_BYTES) as u8;
    let mut at = FIXED_BYTES;
    let mut put = |bytes: &[u8]| {
        header[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
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
    let left = PROXY_HEADER_BYTES - at;
    if left > 0 {
        header[at] = NOOP;
        header[at + 2] = (left - 3) as u8;
    }
    header[13] = family << 4 | transport;
    header
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
        assert_eq!(tcp[12..16], [0x21, 0x11, 0, 36]);
        assert_eq!(tcp[16..28], [10, 1, 2, 3, 192, 168, 0, 9, 1, 2, 1, 187]);
        assert_eq!((tcp[28..31].to_vec(), &tcp[31..]), (vec![4, 0, 21], &[0; 21][..]));
        let udp = header(Transport::Udp, "[2001:db8::1]:258", "10.0.0.1:53");
        assert_eq!(udp[12..16], [0x21, 0x22, 0, 36]);
        assert_eq!(udp[16..20], [0x20, 0x01, 0x0d, 0xb8]);
        assert_eq!(udp[42..], [0xff, 0xff, 10, 0, 0, 1, 1, 2, 0, 53]);
    }
}
