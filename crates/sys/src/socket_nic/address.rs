//! Socket addresses between Rust and C.

use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{c_int, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};

use crate::os::zeroed;

/// Storage for an IPv4 or IPv6 socket address in the host kernel's form.
#[derive(Clone, Copy)]
pub(super) union RawAddress {
    family: sa_family_t,
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

/// The length to pass when the host kernel fills in a [`RawAddress`].
pub(super) const RAW_ADDRESS_LEN: socklen_t = size_of::<RawAddress>() as socklen_t;

impl RawAddress {
    /// An address of no family.
    pub(super) fn empty() -> Self {
        // SAFETY: all members are plain integers and byte arrays.
        unsafe { zeroed() }
    }

    /// The C form of `address` and its length.
    #[inline]
    pub(super) fn from_std(address: &SocketAddr) -> (Self, socklen_t) {
        let mut raw = Self::empty();
        match address {
            SocketAddr::V4(v4) => {
                raw.v4 = sockaddr_in {
                    sin_family: libc::AF_INET as sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: in_addr(*v4.ip()),
                    sin_zero: [0; 8],
                };
                (raw, size_of::<sockaddr_in>() as socklen_t)
            }
            SocketAddr::V6(v6) => {
                raw.v6 = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: in6_addr(*v6.ip()),
                    sin6_scope_id: v6.scope_id(),
                };
                (raw, size_of::<sockaddr_in6>() as socklen_t)
            }
        }
    }

    /// The address that the host kernel wrote; `None` for other families.
    #[inline]
    pub(super) fn to_std(self) -> Option<SocketAddr> {
        // SAFETY: every member starts with the family, and any bytes are a valid integer.
        let family = c_int::from(unsafe { self.family });
        match family {
            libc::AF_INET => {
                // SAFETY: plain integers; the family says which member was written.
                let v4 = unsafe { self.v4 };
                let ip = from_in_addr(v4.sin_addr);
                Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port))))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let v6 = unsafe { self.v6 };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                let address = SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id);
                Some(SocketAddr::V6(address))
            }
            _ => None,
        }
    }

    pub(super) fn as_ptr(&self) -> *const sockaddr {
        (&raw const *self).cast()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut sockaddr {
        (&raw mut *self).cast()
    }
}

pub(super) fn in_addr(ip: Ipv4Addr) -> libc::in_addr {
    libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) }
}

pub(super) fn from_in_addr(raw: libc::in_addr) -> Ipv4Addr {
    Ipv4Addr::from(raw.s_addr.to_ne_bytes())
}

pub(super) fn in6_addr(ip: Ipv6Addr) -> libc::in6_addr {
    libc::in6_addr { s6_addr: ip.octets() }
}

/// The protocol family of an address.
pub(super) fn family(ip: IpAddr) -> c_int {
    if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
}
