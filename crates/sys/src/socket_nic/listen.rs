//! Opening ports: detecting other owners of the address, sharing among workers, buffer sizes.
//!
//! Workers share a port by `SO_REUSEPORT`, but that option must not hide another program: a second
//! engine of the same user would silently receive half of the traffic. So the first worker binds
//! *without* it, which fails if the address is in use, and sets it afterwards; Linux lets later
//! sockets of the same user join a socket that acquired the option after its bind.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libc::c_int;
use wire::nic::Transport;

use super::address::{RAW_ADDRESS_LEN, RawAddress, family};
use super::{PortSpec, SocketOptions};
use crate::local::LocalError;
use crate::os::{check, int_option, own, set_option};

/// Why a port could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another socket is bound to the address.
    #[error(
        "{port} is already in use: stop the program that holds it (`ss -lnp 'sport = :{}'` names \
         it) or choose another port",
        port.address.port()
    )]
    AddressInUse {
        /// The port asked for.
        port: PortSpec,
    },
    /// The host has no such address.
    #[error(
        "{port}: this host has no address {}; `ip address` lists those it has",
        port.address.ip()
    )]
    NoSuchAddress {
        /// The port asked for.
        port: PortSpec,
    },
    /// A privileged port.
    #[error(
        "{port} is a privileged port: choose one above 1023, or run with CAP_NET_BIND_SERVICE \
         (`setcap cap_net_bind_service+ep` on the program)"
    )]
    NotPermitted {
        /// The port asked for.
        port: PortSpec,
    },
    /// The host kernel lacks the address family.
    #[error("{port}: this host kernel lacks the address family; listen on the other (IPv4, IPv6)")]
    NoSuchFamily {
        /// The port asked for.
        port: PortSpec,
    },
    /// A Unix socket.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// The process has no free descriptor.
    #[error("no free file descriptor for {what}: raise `ulimit -n`")]
    Exhausted {
        /// What it was for.
        what: String,
    },
    /// Any other error of the host kernel.
    #[error("{what}: {source}")]
    Host {
        /// The operation that failed.
        what: String,
        /// The error.
        source: io::Error,
    },
}

impl OpenError {
    pub(super) fn host(what: impl Into<String>, source: io::Error) -> Self {
        let what = what.into();
        match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Self::Exhausted { what },
            _ => Self::Host { what, source },
        }
    }

    fn port(port: PortSpec, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EADDRINUSE) => Self::AddressInUse { port },
            Some(libc::EADDRNOTAVAIL) => Self::NoSuchAddress { port },
            Some(libc::EACCES) => Self::NotPermitted { port },
            Some(libc::EAFNOSUPPORT) => Self::NoSuchFamily { port },
            _ => Self::host(format!("cannot listen on {port}"), source),
        }
    }
}

/// Whether a socket is the first on its address or joins the sockets of other workers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// No other socket may hold the address.
    First,
    /// A socket of this process already holds it.
    Joining,
}

/// A bound socket (listening, for TCP) and the address it got.
pub(super) fn open(
    port: PortSpec,
    claim: Claim,
    options: &SocketOptions,
) -> Result<(OwnedFd, SocketAddr), OpenError> {
    let opened = match port.transport {
        Transport::Udp => open_udp(port, claim, options),
        Transport::Tcp => open_tcp(port, claim, options),
    };
    opened.map_err(|source| OpenError::port(port, source))
}

/// A non-blocking socket for `address`.
pub(super) fn socket(address: SocketAddr, transport: Transport) -> io::Result<OwnedFd> {
    let kind = match transport {
        Transport::Udp => libc::SOCK_DGRAM,
        Transport::Tcp => libc::SOCK_STREAM,
    };
    // SAFETY: no pointers.
    own(unsafe {
        libc::socket(family(address.ip()), kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    })
}

fn open_udp(
    port: PortSpec,
    claim: Claim,
    options: &SocketOptions,
) -> io::Result<(OwnedFd, SocketAddr)> {
    let socket = socket(port.address, Transport::Udp)?;
    bind(socket.as_fd(), port.address, claim)?;
    set_buffers(socket.as_fd(), options);
    if port.address.ip().is_unspecified() {
        let (level, name) = match port.address.ip() {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTINFO),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
        };
        set_option::<c_int>(socket.as_fd(), level, name, 1)?;
    }
    // Every host kernel that has recvmmsg counts its drops. An emulator (qemu-user) or a sandbox between may not pass the
    // option on: then `socket_overflow` stays 0, which `serval doctor` reports as `drop-counts`.
    match set_option::<c_int>(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1) {
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {}
        other => other?,
    }
    let bound = local_address(socket.as_fd())?;
    Ok((socket, bound))
}

fn open_tcp(
    port: PortSpec,
    claim: Claim,
    options: &SocketOptions,
) -> io::Result<(OwnedFd, SocketAddr)> {
    let socket = socket(port.address, Transport::Tcp)?;
    // Connections of a previous run in TIME_WAIT must not block a restart; a listener still does.
    set_option::<c_int>(socket.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    bind(socket.as_fd(), port.address, claim)?;
    // Inherited by accepted sockets: saves a call per connection.
    set_option::<c_int>(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    // SAFETY: no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), options.backlog) })?;
    let bound = local_address(socket.as_fd())?;
    Ok((socket, bound))
}

fn bind(socket: BorrowedFd<'_>, address: SocketAddr, claim: Claim) -> io::Result<()> {
    if address.is_ipv6() {
        // So that 0.0.0.0 and [::] can both be bound and peers keep their own family.
        set_option::<c_int>(socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
    }
    let share = || set_option::<c_int>(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
    if claim == Claim::Joining {
        share()?;
    }
    let (raw, len) = RawAddress::from_std(&address);
    // SAFETY: `raw` holds `len` initialised bytes of a socket address and outlives the call.
    check(unsafe { libc::bind(socket.as_raw_fd(), raw.as_ptr(), len) })?;
    if claim == Claim::First {
        share()?;
    }
    Ok(())
}

/// Requests large buffers. Without CAP_NET_ADMIN the host kernel caps them at
/// `net.core.{r,w}mem_max`.
pub(super) fn set_buffers(socket: BorrowedFd<'_>, options: &SocketOptions) {
    for (forced, capped, bytes) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, options.receive_buffer_bytes),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, options.send_buffer_bytes),
    ] {
        // The host kernel doubles the value, for its book-keeping.
        let bytes = c_int::try_from(bytes / 2).unwrap_or(c_int::MAX / 2);
        // Best effort: a smaller buffer drops earlier, and its drops are counted.
        let _ = set_option::<c_int>(socket, libc::SOL_SOCKET, forced, bytes)
            .or_else(|_| set_option::<c_int>(socket, libc::SOL_SOCKET, capped, bytes));
    }
}

/// The receive and send buffer sizes in force, in bytes, book-keeping included.
pub(super) fn buffers(socket: BorrowedFd<'_>) -> (usize, usize) {
    let read = |name| int_option(socket, libc::SOL_SOCKET, name).unwrap_or(0) as usize;
    (read(libc::SO_RCVBUF), read(libc::SO_SNDBUF))
}

pub(super) fn local_address(socket: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    let mut len = RAW_ADDRESS_LEN;
    // SAFETY: `raw` has room for `len` bytes and both outlive the call.
    check(unsafe { libc::getsockname(socket.as_raw_fd(), raw.as_mut_ptr(), &raw mut len) })?;
    raw.to_std().ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Datagrams that the host kernel dropped on this socket since it was opened, modulo 2^32.
pub(super) fn drops(socket: BorrowedFd<'_>) -> Option<u32> {
    const SO_MEMINFO: c_int = 55;
    const SK_MEMINFO_DROPS: usize = 8;
    let mut counts = [0u32; SK_MEMINFO_DROPS + 1];
    let mut len = size_of_val(&counts) as libc::socklen_t;
    let pointer = counts.as_mut_ptr().cast();
    // SAFETY: `pointer` and `len` describe `counts`, which outlives the call.
    check(unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_MEMINFO, pointer, &raw mut len)
    })
    .ok()?;
    (len as usize == size_of_val(&counts)).then_some(counts[SK_MEMINFO_DROPS])
}
