//! The streams of one worker: accepted TCP connections and connections to backends, by key.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use libc::c_int;
use wire::nic::{Close, Event, NicError, Read, StreamKey, Transport, Written};

use super::SocketOptions;
use super::address::RawAddress;
use super::listen::{local_address, set_buffers, socket};
use super::ports;
use super::udp_send::Segmentation;
use crate::descriptors;
use crate::os::{check, check_size, int_option, interrupted, set_option};

/// Keys are indices into a table, so they are bounded.
pub(super) const KEY_MAX: StreamKey = 1 << 20;
/// Bytes of unread input that a graceful close discards; see [`Streams::close`].
const DISCARD_BYTES_MAX: usize = 1 << 20;

/// A peer that is gone is noticed two minutes after the last byte: it is asked after 60 s, and then every 10 s, six times.
const KEEP_ALIVE: [(c_int, c_int, c_int); 4] = [
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 60),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 6),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
];

pub(super) struct Stream {
    socket: OwnedFd,
    pub(super) transport: Transport,
    /// Of a UDP socket.
    port: u16,
    /// A [`wire::nic::Nic::connect`] whose result has not been reported.
    pub(super) connecting: bool,
    /// The last write was short; only then is a `Writable` event reported.
    pub(super) wants_room: bool,
    /// The peer will send nothing more (FIN or reset): there will be no further read edge.
    pub(super) hung_up: bool,
    /// A `Readable` event is pending, see [`Streams::take_owed`].
    owed: bool,
    /// A UDP socket that is read and written in batches.
    batches: Option<Box<Segmentation>>,
    /// Someone else may have a descriptor of it.
    lent: bool,
}

impl Stream {
    /// The result of a connection attempt, once epoll has reported the stream.
    pub(super) fn failed(&self) -> bool {
        let error = int_option(self.socket.as_fd(), libc::SOL_SOCKET, libc::SO_ERROR);
        !matches!(error, Ok(0))
    }

    /// The socket and the state of a UDP stream that is used in batches. The first use makes it one.
    pub(super) fn batches(
        &mut self,
        options: &SocketOptions,
    ) -> Option<(BorrowedFd<'_>, &mut Segmentation)> {
        if self.transport != Transport::Udp {
            return None;
        }
        let (socket, batches) = (&self.socket, &mut self.batches);
        let segmentation = batches.get_or_insert_with(|| {
            // Without it each datagram comes by itself.
            let gro = c_int::from(options.receive_offload);
            let _ = set_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, gro);
            Box::new(Segmentation::new(options.segmentation_offload))
        });
        Some((socket.as_fd(), segmentation))
    }

    /// Whether data that arrived before an error can still be read.
    pub(super) fn holds_input(&self) -> bool {
        let mut bytes: c_int = 0;
        // SAFETY: FIONREAD writes one integer, which outlives the call.
        let asked =
            check(unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) });
        asked.is_ok() && bytes > 0
    }
}

/// Number of UDP sockets in a row that get distinct ports: a datagram for a closed socket must not reach the next
/// one, even if nothing was expected there.
const RECENT_PORTS: usize = 1024;
/// Sockets kept open because they got a recent or reserved port, until one gets another port.
const PASSED_MAX: usize = 8;

pub(super) struct Streams {
    table: Vec<Option<Stream>>,
    pub(super) open: usize,
    /// Ports of the most recent UDP sockets, as a circular buffer.
    recent_ports: Vec<u16>,
    oldest_port: usize,
    /// Streams that may have a pending `Readable` event.
    owed: Vec<StreamKey>,
}

/// Streams for which there is room at the start: those that come and go allocate nothing. The host kernel gives the memory when it is used.
const ROOM: usize = 16_384;

impl Default for Streams {
    fn default() -> Self {
        Self {
            table: Vec::with_capacity(ROOM),
            open: 0,
            recent_ports: Vec::new(),
            oldest_port: 0,
            owed: Vec::with_capacity(ROOM),
        }
    }
}

impl Streams {
    /// Starts connecting; the socket is not in an epoll set yet. A UDP socket gets a port that is not [reserved](ports), and
    /// if possible none that a recent one had. Also returns the port.
    pub(super) fn start(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        options: &SocketOptions,
    ) -> io::Result<(OwnedFd, u16)> {
        let mut socket = connect(to, transport, options)?;
        if transport == Transport::Tcp {
            return Ok((socket, 0));
        }
        let mut passed: [Option<OwnedFd>; PASSED_MAX] = Default::default();
        let mut port = local_address(socket.as_fd())?.port();
        for held in &mut passed {
            if !self.recent_ports.contains(&port) && !ports::is_reserved(port) {
                break;
            }
            *held = Some(std::mem::replace(&mut socket, connect(to, transport, options)?));
            port = local_address(socket.as_fd())?.port();
        }
        if ports::is_reserved(port) {
            return Err(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL));
        }
        if self.recent_ports.len() < RECENT_PORTS {
            self.recent_ports.push(port);
        } else {
            self.recent_ports[self.oldest_port] = port;
            self.oldest_port = (self.oldest_port + 1) % RECENT_PORTS;
        }
        Ok((socket, port))
    }

    pub(super) fn stream_mut(&mut self, key: StreamKey) -> Option<&mut Stream> {
        self.table.get_mut(key as usize)?.as_mut()
    }

    /// Whether a stream may be added under `key`.
    pub(super) fn check_free(&self, key: StreamKey) -> Result<(), NicError> {
        if key >= KEY_MAX {
            return Err(NicError::Refused(format!("stream key {key} is over {}", KEY_MAX - 1)));
        }
        if self.table.get(key as usize).is_some_and(Option::is_some) {
            return Err(NicError::Refused(format!("stream key {key} is in use")));
        }
        Ok(())
    }

    /// Adds an accepted connection or one that [`connect`] started. The key is free.
    pub(super) fn insert(
        &mut self,
        key: StreamKey,
        (socket, port): (OwnedFd, u16),
        transport: Transport,
        connecting: bool,
    ) -> BorrowedFd<'_> {
        let index = key as usize;
        if self.table.len() <= index {
            self.table.resize_with((index + 1).next_power_of_two(), || None);
        }
        self.open += 1;
        // Each stream may be listed: listing allocates nothing.
        self.owed.reserve(self.open.saturating_sub(self.owed.len()));
        let stream = Stream {
            socket,
            transport,
            port,
            connecting,
            wants_room: false,
            hung_up: false,
            owed: false,
            batches: None,
            lent: false,
        };
        self.table[index].insert(stream).socket.as_fd()
    }

    pub(super) fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read {
        let Some(Some(stream)) = self.table.get_mut(key as usize) else {
            return Read::Broken;
        };
        if into.is_empty() {
            return Read::Empty;
        }
        loop {
            // SAFETY: pointer and length describe `into`, which is borrowed for the call.
            let got = check_size(unsafe {
                libc::recv(stream.socket.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), 0)
            });
            return match got {
                Ok(0) if stream.transport == Transport::Tcp => Read::Closed,
                Ok(len) => {
                    // A worker may take a short read for an empty stream. After the last byte comes the
                    // end of the stream, for which epoll reports no further edge.
                    if len < into.len() && stream.hung_up && !stream.owed {
                        stream.owed = true;
                        self.owed.push(key);
                    }
                    Read::Bytes(len)
                }
                Err(error) if interrupted(&error) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Read::Empty,
                Err(_) => Read::Broken,
            };
        }
    }

    pub(super) fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written {
        let Some(stream) = self.stream_mut(key) else {
            return Written::Broken;
        };
        if bytes.is_empty() && stream.transport == Transport::Tcp {
            return Written::Bytes(0);
        }
        loop {
            // SAFETY: pointer and length describe `bytes`, which is borrowed for the call.
            let sent = check_size(unsafe {
                libc::send(
                    stream.socket.as_raw_fd(),
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    libc::MSG_NOSIGNAL,
                )
            });
            return match sent {
                Ok(len) => {
                    stream.wants_room = len < bytes.len();
                    Written::Bytes(len)
                }
                Err(error) if interrupted(&error) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    stream.wants_room = true;
                    Written::Full
                }
                Err(_) => Written::Broken,
            };
        }
    }

    /// Whether [`Self::take_owed`] has events to report.
    pub(super) fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Reports the streams whose end has not been read yet after a short read.
    pub(super) fn take_owed(&mut self, events: &mut Vec<Event>) {
        for key in self.owed.drain(..) {
            // The stream may be closed and its key reused: a new stream has no pending event.
            let stream = self.table[key as usize].as_mut().filter(|stream| stream.owed);
            if let Some(stream) = stream {
                stream.owed = false;
                events.push(Event::Readable(key));
            }
        }
    }

    /// Asks the peer of an idle TCP stream whether it is still there.
    /// Of the peer, and its own.
    pub(super) fn addresses(&self, key: StreamKey) -> Option<(SocketAddr, SocketAddr)> {
        let stream = self.table.get(key as usize)?.as_ref()?;
        let socket = TcpStream::from(stream.socket.try_clone().ok()?);
        Some((socket.peer_addr().ok()?, socket.local_addr().ok()?))
    }

    pub(super) fn keep_alive(&mut self, key: StreamKey) {
        let Some(stream) = self.stream_mut(key) else { return };
        for (level, name, value) in KEEP_ALIVE {
            // Unix sockets have no such options: the host kernel knows when their peer is gone.
            let _ = set_option::<c_int>(stream.socket.as_fd(), level, name, value);
        }
    }

    /// Ends the sending direction of a TCP stream.
    pub(super) fn shutdown(&mut self, key: StreamKey) {
        if let Some(stream) = self.stream_mut(key) {
            // If this fails, the connection has ended, which the next read returns.
            // SAFETY: no pointers.
            let _ = check(unsafe { libc::shutdown(stream.socket.as_raw_fd(), libc::SHUT_WR) });
        }
    }

    /// Another descriptor of a TCP stream.
    pub(super) fn lend(&mut self, key: StreamKey) -> Option<OwnedFd> {
        let stream = self.stream_mut(key).filter(|stream| stream.transport == Transport::Tcp)?;
        let socket = stream.socket.try_clone().ok()?;
        stream.lent = true;
        Some(socket)
    }

    /// A stream of which someone else may have a descriptor.
    pub(super) fn lent(&self, key: StreamKey) -> Option<BorrowedFd<'_>> {
        let stream = self.table.get(key as usize)?.as_ref().filter(|stream| stream.lent)?;
        Some(stream.socket.as_fd())
    }

    /// Closes a stream. The host kernel answers a close with unread input by RST, which can destroy a
    /// reply in flight; so a graceful close first discards the input received so far.
    pub(super) fn close(&mut self, key: StreamKey, how: Close) {
        let Some(stream) = self.table.get_mut(key as usize).and_then(Option::take) else {
            return;
        };
        self.open -= 1;
        if stream.transport == Transport::Udp {
            if let Close::ReservePort { ns } = how {
                // Before the port is free.
                ports::reserve(stream.port, ns);
            }
            return;
        }
        match how {
            Close::Graceful => {
                if stream.lent {
                    // The other descriptor may be closed later.
                    // SAFETY: no pointers.
                    let _ = unsafe { libc::shutdown(stream.socket.as_raw_fd(), libc::SHUT_WR) };
                }
                // A Unix socket fails instead: there a close with unread input destroys nothing that was sent.
                // SAFETY: with MSG_TRUNC a TCP receive discards data and never writes to the buffer.
                let _ = unsafe {
                    libc::recv(
                        stream.socket.as_raw_fd(),
                        ptr::null_mut(),
                        DISCARD_BYTES_MAX,
                        libc::MSG_TRUNC,
                    )
                };
            }
            Close::Reset | Close::ReservePort { .. } => {
                reset_on_close(stream.socket.as_fd());
                if stream.lent {
                    descriptors::disconnect(stream.socket.as_fd());
                }
            }
        }
    }
}

/// Makes the next close send RST and leave no TIME_WAIT state.
pub(super) fn reset_on_close(socket: BorrowedFd<'_>) {
    // If this fails, FIN is sent instead of RST.
    let _ = descriptors::reset_on_close(socket, true);
}

fn connect(to: SocketAddr, transport: Transport, options: &SocketOptions) -> io::Result<OwnedFd> {
    let socket = socket(to, transport)?;
    match transport {
        Transport::Tcp => {
            set_option::<c_int>(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        }
        Transport::Udp => set_buffers(socket.as_fd(), options),
    }
    let (raw, len) = RawAddress::from_std(&to);
    // SAFETY: `raw` holds `len` initialised bytes and outlives the call.
    match check(unsafe { libc::connect(socket.as_raw_fd(), raw.as_ptr(), len) }) {
        Ok(_) => Ok(socket),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => {
            Ok(socket)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// The host kernel alone would usually reuse the port of an earlier one.
    #[test]
    fn recent_ports_are_not_given_again() {
        let there = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (mut streams, options) = (Streams::default(), SocketOptions::default());
        let mut ports = Vec::new();
        for _ in 0..3 * RECENT_PORTS {
            let (_socket, port) = streams.start(there, Transport::Udp, &options).unwrap();
            let recent = &ports[ports.len().saturating_sub(RECENT_PORTS)..];
            assert!(!recent.contains(&port), "{port} again");
            ports.push(port);
        }
    }
    /// However many sockets come between, and on whichever worker.
    #[test]
    fn a_reserved_port_is_not_given_before_its_time() {
        let there = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let options = SocketOptions::default();
        let mut workers = [Streams::default(), Streams::default()];
        let mut reserved = Vec::new();
        for key in 0..200 {
            let started = workers[0].start(there, Transport::Udp, &options).unwrap();
            reserved.push(started.1);
            workers[0].insert(key, started, Transport::Udp, false);
            workers[0].close(key, Close::ReservePort { ns: 3_600_000_000_000 });
        }
        for round in 0..20_000 {
            let Ok((_, port)) = workers[round % 2].start(there, Transport::Udp, &options) else {
                continue;
            };
            assert!(!reserved.contains(&port), "{port} again");
        }
        // It can be had again when the time is over.
        ports::reserve(reserved[0], 0);
        assert!(!ports::is_reserved(reserved[0]) && ports::is_reserved(reserved[1]));
    }
}
