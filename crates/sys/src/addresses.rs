//! The addresses of this machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::os::check;

/// The addresses of all interfaces as they are now, each once.
pub fn local_addresses() -> io::Result<Vec<IpAddr>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` outlives the call.
    check(unsafe { libc::getifaddrs(&raw mut first) })?;
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the C library made a list of valid entries, which nobody changes and which lives until it is freed below.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: an address begins with its family, wherever it lies.
        let family = unsafe { (&raw const (*entry.ifa_addr).sa_family).read_unaligned() };
        let address: IpAddr = match i32::from(family) {
            libc::AF_INET => {
                let raw = entry.ifa_addr.cast::<libc::sockaddr_in>();
                // SAFETY: an address of this family has this length; it is copied, wherever it lies.
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
    // SAFETY: the list is the C library's, freed once; what was found was copied.
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
        // Sends nothing. Where there is no way out there is loopback at least.
        let reached = ["192.0.2.1:9", "127.0.0.1:9"].iter().any(|to| socket.connect(to).is_ok());
        assert!(reached);
        let own = socket.local_addr().unwrap().ip();
        assert!(found.contains(&own), "{own} is not among {found:?}");
    }
}
