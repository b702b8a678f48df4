//! The addresses of this machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::os::check;

/// The current addresses of all interfaces, without duplicates.
pub fn local_addresses() -> io::Result<Vec<IpAddr>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` outlives the call.
    check(unsafe { libc::getifaddrs(&raw mut first) })?;
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the C library returned a list of valid entries; nothing else accesses it until it is freed below.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: every socket address starts with its family; the read is unaligned.
        let family = unsafe { (&raw const (*entry.ifa_addr).sa_family).read_unaligned() };
        let address: IpAddr = match i32::from(family) {
            libc::AF_INET => {
                let raw = entry.ifa_addr.cast::<libc::sockaddr_in>();
                // SAFETY: an address of this family has this length; it is copied with an unaligned read.
                Ipv4Addr::from(unsafe { raw.read_unaligned() }.sin_addr.s_addr.to_ne_bytes()).into()
            }
            libc::AF_INET6 => {
                let raw = entry.ifa_addr.cast::<libc::sockaddr_in6>();
                // SAFETY: as above.
                Ipv6Addr::from(unsafe { raw.read_unaligned() }.sin6_addr.s6_addr).into()
            }
            _ => continue,
        };
        if !found.contains(&address) {
            found.push(address);
        }
    }
    // SAFETY: the list belongs to the C library and is freed once; the results were copied.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_that_packets_leave_from_is_one_of_them() {
        let found = local_addresses().unwrap();
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        // Sends nothing. Without a route, loopback is still there.
        let reached = ["192.0.2.1:9", "127.0.0.1:9"].iter().any(|to| socket.connect(to).is_ok());
        assert!(reached);
        let own = socket.local_addr().unwrap().ip();
        assert!(found.contains(&own), "{own} is not among {found:?}");
    }
}
