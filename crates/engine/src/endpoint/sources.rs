//! Sources of datagrams that are not answered.
//!
//! The source of a datagram can be forged. If it is a UDP port of this server, the answer is a request to that port,
//! and two services could answer each other endlessly. Therefore such datagrams are dropped as `looped_source`. A
//! source is one of this server's ports if a UDP port of it has that number and listens on that address: the address
//! itself, or any address of this machine, in any network namespace with ports. The control side passes the list of
//! those; loopback addresses and the destination address of the datagram always count as addresses of this machine.
//!
//! Ports below 1024 of other machines also belong to programs that answer any datagram. Datagrams from them are
//! dropped as `privileged_source`, unless the port is configured to serve them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use wire::DropReason;

use crate::base::topology::Limits;

/// The first port number that needs no privilege.
const UNPRIVILEGED: u16 = 1024;

/// The lowest source port that a port serves.
pub(crate) fn lowest_source(limits: &Limits, on_loopback: bool) -> u16 {
    let all = limits.udp_privileged_sources.unwrap_or(on_loopback);
    if all { 0 } else { UNPRIVILEGED }
}

/// Size of the bit set of port numbers.
const MARKS: usize = 4096;

/// What a worker knows about its server's UDP ports.
pub(crate) struct Sources {
    /// Bit `n` is set if the number of one of them is `n` modulo [`MARKS`]. Most datagrams need no other check.
    marks: [u64; MARKS / 64],
    own: Vec<(u16, IpAddr)>,
    /// The addresses of this machine.
    here: Arc<[IpAddr]>,
}

impl Sources {
    pub(crate) fn new(own: Vec<SocketAddr>, here: Arc<[IpAddr]>) -> Self {
        let mut marks = [0; MARKS / 64];
        for own in &own {
            marks[usize::from(own.port()) % MARKS / 64] |= 1 << (own.port() % 64);
        }
        let own = own.into_iter().map(|own| (own.port(), own.ip())).collect();
        Self { marks, own, here }
    }

    /// Why a datagram from `peer`, sent to `local` (`None`: to its port's only address), is dropped.
    #[inline]
    pub(crate) fn refuse(
        &self,
        peer: SocketAddr,
        local: Option<IpAddr>,
        lowest: u16,
    ) -> Option<DropReason> {
        let number = peer.port();
        if number < lowest {
            return Some(DropReason::PrivilegedSource);
        }
        let marked = self.marks[usize::from(number) % MARKS / 64] >> (number % 64) & 1 != 0;
        (marked && self.is_own(peer, local) && !mutants::on("answer_own_ports"))
            .then_some(DropReason::LoopedSource)
    }

    #[cold]
    fn is_own(&self, peer: SocketAddr, local: Option<IpAddr>) -> bool {
        let port = peer.port();
        self.own.iter().any(|(number, ip)| *number == port && self.listens(*ip, peer.ip(), local))
    }

    /// Whether a port at `own` receives datagrams to `ip`.
    fn listens(&self, own: IpAddr, ip: IpAddr, local: Option<IpAddr>) -> bool {
        let is_here = || ip.is_loopback() || local == Some(ip) || self.here.contains(&ip);
        own == ip || own.is_unspecified() && own.is_ipv4() == ip.is_ipv4() && is_here()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_ports_are_distinguished_from_others() {
        let own = ["10.1.0.1:7000", "0.0.0.0:7064", "[::]:53", "[fd00::1]:7000"];
        let here = ["10.1.0.1", "10.2.0.1", "fd00::2"].map(|ip| ip.parse().unwrap());
        let own = own.map(|own| own.parse().unwrap()).to_vec();
        let sources = Sources::new(own, here.into());
        let loops = |peer: &str, local: Option<&str>| {
            let local = local.map(|ip| ip.parse().unwrap());
            let refused = sources.refuse(peer.parse().unwrap(), local, 0);
            assert!(refused.is_none_or(|reason| reason == DropReason::LoopedSource), "{refused:?}");
            refused.is_some()
        };
        for peer in [
            "10.1.0.1:7000",
            "10.1.0.1:7064",
            "10.2.0.1:7064",
            "127.0.0.1:7064",
            "127.9.9.9:7064",
            "[::1]:53",
            "[fd00::2]:53",
            "[fd00::1]:7000",
        ] {
            assert!(loops(peer, None), "{peer}");
        }
        for peer in [
            // A port that listens on another address only, of another family, or of another number.
            "10.2.0.1:7000",
            "127.0.0.1:7000",
            "127.0.0.1:53",
            "[fd00::2]:7064",
            "10.1.0.1:11160",
            "10.1.0.1:7001",
            // An address of another machine.
            "10.3.0.1:7064",
            "10.3.0.1:7000",
            "[fd00::3]:53",
        ] {
            assert!(!loops(peer, None), "{peer}");
        }
        // An address that this machine got recently.
        assert!(loops("10.4.0.1:7064", Some("10.4.0.1")));
        assert!(!loops("10.4.0.2:7064", Some("10.4.0.1")));
    }

    #[test]
    fn privileged_ports_are_served_if_configured() {
        let peer = |port| SocketAddr::from(([10, 3, 0, 1], port));
        let sources = Sources::new(Vec::new(), [].into());
        let mut limits = Limits::default();
        for (asked, on_loopback, served) in [
            (None, true, true),
            (None, false, false),
            (Some(true), false, true),
            (Some(false), true, false),
        ] {
            limits.udp_privileged_sources = asked;
            let lowest = lowest_source(&limits, on_loopback);
            let refused = (!served).then_some(DropReason::PrivilegedSource);
            assert_eq!(sources.refuse(peer(1023), None, lowest), refused);
            assert_eq!(sources.refuse(peer(1024), None, lowest), None);
        }
    }
}
