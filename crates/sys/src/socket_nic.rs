//! One worker's network over kernel sockets.
//!
//! A [`SocketNic`] implements [`wire::nic::Nic`] with the calls that carry batches: `recvmmsg` and
//! `sendmmsg` with receive and segmentation offload for UDP, edge-triggered epoll with one `recv`
//! or `send` per ready connection for TCP. Nothing is allocated per message; descriptors are
//! non-blocking.
//!
//! # Several workers
//!
//! The first worker's NIC claims the ports ([`SocketNic::open`], which fails if any other process
//! listens there) and [`SocketNic::sibling`] opens one more NIC on the very same addresses for
//! every further worker. The host kernel spreads flows over them (`SO_REUSEPORT`).
//!
//! # What a poll costs
//!
//! A spinning worker (`sleep_ns == 0`) makes as few system calls as possible: every UDP port is
//! reported on every poll, since receiving *is* the readiness check. With more than two, those are in the epoll set that do not have
//! datagrams nearly every time (`socket_nic/watched.rs`). The set is polled every time while there is such a port or streams are active. Otherwise it is polled once per
//! [`QUIET_WORK_MAX`] units of other work, so that an idle TCP listener costs a busy UDP service
//! about one percent. A sleep ends on a datagram, a stream event, a new connection or a [`Waker`].
//!
//! # Descriptor exhaustion
//!
//! When `accept` finds no descriptor free, a reserved descriptor is closed to accept the connection
//! and reset it, so that clients learn at once and the backlog does not spin
//! ([`NicCounters::shed_connections`]).

mod address;
mod listen;
mod poller;
mod ports;
mod segment_batches;
mod streams;
mod udp_port;
mod udp_receive;
mod udp_send;
mod watched;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use libc::c_int;
use wire::nic::{
    Close, DatagramsRead, Event, LentStream, Nic, NicCounters, NicError, PortIndex, Read, RxBatch,
    SendOutcome, StreamKey, Transport, TxBatch, Written,
};

pub use listen::OpenError;
pub use poller::Waker;

use crate::local::{self, SocketFile};
use crate::os::{interrupted, own};
use address::{RAW_ADDRESS_LEN, RawAddress};
use listen::Claim;
use poller::{Poller, Source};
use streams::{Streams, reset_on_close};
use udp_port::{RECEIVE_TRIES_MAX, UdpPort};
use udp_receive::{Receiver, SLOTS, slots_after};
use udp_send::Sender;
use watched::WatchedPorts;

/// Polls after the last stream event during which the epoll set is consulted every time.
const ACTIVE_POLLS: u32 = 256;
/// Units of other work between two polls of a quiet epoll set; see the module's text.
pub const QUIET_WORK_MAX: u32 = 64;
/// Work of one received UDP buffer, in units of an empty poll (about 3 us against 0.3 us).
const WORK_PER_BUFFER: u32 = 8;
/// Maximum number of connections that one `accept` call sheds or skips.
const ACCEPT_TRIES_MAX: usize = 32;
/// Polls after which a listener that lacked descriptors is retried unconditionally.
const STALLED_POLLS: u32 = 1024;
/// The longest sleep while a listener lacks descriptors.
const STALLED_NS: u64 = 1_000_000;

/// One address to listen on. Displayed as `udp://127.0.0.1:9000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// UDP or TCP.
    pub transport: Transport,
    /// Address to bind; port 0 lets the host kernel choose (see [`SocketNic::local_addresses`]).
    pub address: SocketAddr,
}

impl fmt::Display for PortSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.transport {
            Transport::Udp => "udp",
            Transport::Tcp => "tcp",
        };
        write!(f, "{scheme}://{}", self.address)
    }
}

/// How to open sockets.
#[derive(Clone, Debug)]
pub struct SocketOptions {
    /// Receive buffer to ask for per UDP socket, in bytes as the host kernel counts (book-keeping
    /// included: about 0.8 KiB for a small datagram). Capped by `net.core.rmem_max` for processes
    /// without CAP_NET_ADMIN.
    pub receive_buffer_bytes: usize,
    /// Send buffer to ask for per UDP socket; likewise capped by `net.core.wmem_max`.
    pub send_buffer_bytes: usize,
    /// Connections waiting to be accepted, per listener; capped by `net.core.somaxconn`.
    pub backlog: c_int,
    /// Receive batches of datagrams as one buffer if the host kernel can (`UDP_GRO`).
    pub receive_offload: bool,
    /// Send batches of datagrams as one message if the host kernel can (`UDP_SEGMENT`).
    pub segmentation_offload: bool,
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self {
            receive_buffer_bytes: 8 << 20,
            send_buffer_bytes: 8 << 20,
            backlog: 4096,
            receive_offload: true,
            segmentation_offload: true,
        }
    }
}

/// An accepted TCP connection that has not been adopted by a worker yet.
#[derive(Debug)]
pub struct AcceptedSocket(OwnedFd);

impl AcceptedSocket {
    /// Its addresses on this side and on the peer's.
    pub fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        let stream = std::net::TcpStream::from(self.0.try_clone()?);
        Ok((stream.local_addr()?, stream.peer_addr()?))
    }
}

struct TcpPort {
    /// `None` after [`Nic::stop_listening`].
    listener: Option<OwnedFd>,
    /// Of a Unix socket: its file, which is removed when no worker listens there.
    file: Option<Arc<SocketFile>>,
    /// Connections are pending although the last `accept` returned none; there will be no further edge.
    stalled: bool,
}

enum Port {
    Udp(UdpPort),
    Tcp(TcpPort),
    /// Closed; its index is free.
    Closed,
}

/// An open port that has not been added to a worker's NIC yet.
#[derive(Debug)]
pub struct OpenPort {
    socket: OwnedFd,
    /// Port 0 resolved. Of a Unix socket: the [unnamed address](UNNAMED).
    spec: PortSpec,
    /// Of a Unix socket.
    file: Option<Arc<SocketFile>>,
}

/// What stands for the address of a Unix socket.
const UNNAMED: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

impl OpenPort {
    /// Claims a port for this process, once for each of `workers`. Fails if another socket, of any
    /// process, holds it.
    pub fn open_all(
        spec: PortSpec,
        workers: usize,
        options: &SocketOptions,
    ) -> Result<Vec<Self>, OpenError> {
        let mut ports = vec![Self::open(spec, Claim::First, options)?];
        while ports.len() < workers {
            ports.push(Self::open(ports[0].spec, Claim::Joining, options)?);
        }
        Ok(ports)
    }

    /// The same with one listening TCP socket that all workers share: each connection goes to the worker that accepts it first.
    pub fn open_shared(
        spec: PortSpec,
        workers: usize,
        options: &SocketOptions,
    ) -> Result<Vec<Self>, OpenError> {
        Self::open(spec, Claim::First, options)?.share(workers)
    }

    /// The same with a Unix stream socket, for processes of this user (mode 0600). Its file is removed when no worker listens.
    pub fn open_local(
        path: &Path,
        workers: usize,
        options: &SocketOptions,
    ) -> Result<Vec<Self>, OpenError> {
        let (socket, file) = local::listen(path, libc::SOCK_STREAM, options.backlog)?;
        let spec = PortSpec { transport: Transport::Tcp, address: UNNAMED };
        Self { socket, spec, file: Some(Arc::new(file)) }.share(workers)
    }

    /// This port, once for each worker.
    fn share(self, workers: usize) -> Result<Vec<Self>, OpenError> {
        let mut ports = vec![self];
        while ports.len() < workers {
            let Self { socket, spec, file } = &ports[0];
            let socket = socket
                .try_clone()
                .map_err(|error| OpenError::host("cannot share a listener", error))?;
            ports.push(Self { socket, spec: *spec, file: file.clone() });
        }
        Ok(ports)
    }

    fn open(spec: PortSpec, claim: Claim, options: &SocketOptions) -> Result<Self, OpenError> {
        let (socket, address) = listen::open(spec, claim, options)?;
        Ok(Self { socket, spec: PortSpec { address, ..spec }, file: None })
    }

    /// The address it listens on; of a Unix socket 0.0.0.0:0.
    pub fn address(&self) -> SocketAddr {
        self.spec.address
    }
}

/// One worker's sockets. See the module's text.
pub struct SocketNic {
    ports: Vec<Port>,
    specs: Vec<PortSpec>,
    options: Arc<SocketOptions>,
    poller: Poller,
    watched: WatchedPorts,
    streams: Streams,
    receiver: Receiver,
    sender: Sender,
    /// Closed and reopened when descriptors run out.
    reserve: Option<OwnedFd>,
    listening: bool,
    active_polls: u32,
    quiet_work: u32,
    stalled_polls: u32,
    counters: NicCounters,
}

impl SocketNic {
    /// Claims `ports` for this process. Fails if another socket, of any process, holds one of them.
    pub fn open(ports: &[PortSpec], options: SocketOptions) -> Result<Self, OpenError> {
        Self::open_as(ports, Claim::First, Arc::new(options))
    }

    /// A NIC for another worker, on the same addresses.
    pub fn sibling(&self) -> Result<Self, OpenError> {
        Self::open_as(&self.specs, Claim::Joining, Arc::clone(&self.options))
    }

    /// The addresses bound, in the order of the ports given to [`Self::open`].
    pub fn local_addresses(&self) -> Vec<SocketAddr> {
        self.specs.iter().map(|spec| spec.address).collect()
    }

    /// Ends this NIC's sleeps, from any thread.
    pub fn waker(&self) -> Waker {
        self.poller.waker()
    }

    /// Receive and send buffer sizes in force on a UDP port, in bytes; `None` for other ports.
    pub fn effective_buffers(&self, port: PortIndex) -> Option<(usize, usize)> {
        match self.ports.get(usize::from(port))? {
            Port::Udp(udp) => Some(listen::buffers(udp.socket.as_fd())),
            Port::Tcp(_) | Port::Closed => None,
        }
    }

    fn open_as(
        specs: &[PortSpec],
        claim: Claim,
        options: Arc<SocketOptions>,
    ) -> Result<Self, OpenError> {
        let poller = Poller::new().map_err(|error| OpenError::host("epoll", error))?;
        let reserve = reserve_descriptor().map_err(|error| OpenError::host("a reserve", error))?;
        let mut nic = Self {
            ports: Vec::with_capacity(specs.len()),
            specs: Vec::with_capacity(specs.len()),
            options,
            poller,
            watched: WatchedPorts::default(),
            streams: Streams::default(),
            receiver: Receiver::new(),
            sender: Sender::new(),
            reserve: Some(reserve),
            listening: false,
            active_polls: ACTIVE_POLLS,
            quiet_work: 0,
            stalled_polls: 0,
            counters: NicCounters::default(),
        };
        for spec in specs {
            let index = nic.ports.len() as PortIndex;
            let port = OpenPort::open(*spec, claim, &nic.options)?;
            nic.install(index, port).map_err(|error| OpenError::host("epoll", error))?;
        }
        Ok(nic)
    }

    fn install(&mut self, index: PortIndex, port: OpenPort) -> io::Result<()> {
        let OpenPort { socket, spec, file } = port;
        let port = match spec.transport {
            Transport::Udp => Port::Udp(UdpPort::new(socket, &self.options)),
            Transport::Tcp => {
                self.poller.watch(socket.as_fd(), Source::Listener(index))?;
                self.active_polls = ACTIVE_POLLS;
                Port::Tcp(TcpPort { listener: Some(socket), file, stalled: false })
            }
        };
        let place = usize::from(index);
        while self.ports.len() <= place {
            self.ports.push(Port::Closed);
            self.specs.push(spec);
        }
        self.ports[place] = port;
        self.specs[place] = spec;
        self.watched.add(index, &mut self.ports, &mut self.poller);
        self.update_listening();
        Ok(())
    }

    fn update_listening(&mut self) {
        let listens = |port: &Port| matches!(port, Port::Tcp(tcp) if tcp.listener.is_some());
        self.listening = self.ports.iter().any(listens);
    }

    /// Whether a spinning poll should poll the epoll set.
    fn streams_due(&mut self) -> bool {
        if self.streams.open == 0 && !self.listening {
            return false;
        }
        if self.active_polls > 0 || self.watched.is_empty() {
            self.active_polls = self.active_polls.saturating_sub(1);
            return true;
        }
        self.quiet_work += 1;
        self.quiet_work >= QUIET_WORK_MAX
    }

    /// Translates `count` collected epoll events. New connections come last, so that a key closed
    /// and reused by one of them in the same turn cannot get an event of its former stream.
    fn translate(&mut self, count: usize, slept: bool, events: &mut Vec<Event>) {
        self.counters.epoll_calls += 1;
        self.quiet_work = 0;
        let (mut of_streams, mut listeners) = (0, 0);
        for position in 0..count {
            match self.poller.event(position) {
                (Source::Stream(key) | Source::DatagramStream(key), bits) => {
                    let before = events.len();
                    self.stream_events(key, bits, events);
                    of_streams += events.len() - before;
                }
                (Source::Listener(_), _) => listeners += 1,
                (Source::Datagrams(port), _) => events.push(Event::Datagrams(port)),
                (Source::Waker, _) if slept => self.poller.consume_wake(),
                (Source::Waker | Source::WakeFd, _) => {}
            }
        }
        if listeners > 0 {
            for position in 0..count {
                if let (Source::Listener(port), _) = self.poller.event(position) {
                    events.push(Event::Connections(port));
                }
            }
        }
        if of_streams + listeners > 0 {
            self.active_polls = ACTIVE_POLLS;
        }
    }

    fn stream_events(&mut self, key: StreamKey, bits: c_int, events: &mut Vec<Event>) {
        let Some(stream) = self.streams.stream_mut(key) else {
            return;
        };
        let broken = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
        if stream.connecting {
            if broken && stream.failed() {
                events.push(Event::Failed(key));
                return;
            }
            if bits & libc::EPOLLOUT == 0 {
                return;
            }
            stream.connecting = false;
            stream.wants_room = true;
        }
        stream.hung_up |= broken || bits & libc::EPOLLRDHUP != 0;
        // Data that arrived before a reset is read first; reading then reports the reset.
        if bits & libc::EPOLLERR != 0 && !stream.holds_input() {
            events.push(Event::Failed(key));
            return;
        }
        if bits & libc::EPOLLIN != 0 || broken {
            events.push(Event::Readable(key));
        }
        if stream.wants_room && (bits & libc::EPOLLOUT != 0 || broken) {
            stream.wants_room = false;
            events.push(Event::Writable(key));
        }
    }

    /// Reports listeners again whose backlog could not be emptied for lack of descriptors.
    fn retry_stalled(&mut self, slept: bool, events: &mut Vec<Event>) {
        if self.stalled_polls == 0 {
            return;
        }
        self.stalled_polls -= 1;
        if self.stalled_polls > 0 && !slept {
            return;
        }
        self.stalled_polls = 0;
        if self.reserve.is_none() {
            self.reserve = reserve_descriptor().ok();
        }
        for (index, port) in self.ports.iter_mut().enumerate() {
            if let Port::Tcp(TcpPort { stalled, listener: Some(_), .. }) = port
                && std::mem::take(stalled)
            {
                events.push(Event::Connections(index as PortIndex));
            }
        }
    }

    fn listener(&self, port: PortIndex) -> Option<BorrowedFd<'_>> {
        match self.ports.get(usize::from(port))? {
            Port::Tcp(tcp) => tcp.listener.as_ref().map(AsFd::as_fd),
            Port::Udp(_) | Port::Closed => None,
        }
    }

    /// Records that connections may be pending although `accept` returned none.
    fn stall(&mut self, port: PortIndex) {
        if let Some(Port::Tcp(tcp)) = self.ports.get_mut(usize::from(port)) {
            tcp.stalled = true;
            self.stalled_polls = STALLED_POLLS;
        }
    }

    /// Accepts one connection with the reserved descriptor and resets it. False if none was pending
    /// or the reserve is empty.
    fn shed_connection(&mut self, port: PortIndex) -> bool {
        if self.reserve.take().is_none() {
            return false;
        }
        let shed = self.listener(port).and_then(|listener| accept(listener).ok());
        let found = shed.is_some();
        if let Some((socket, _)) = shed {
            reset_on_close(socket.as_fd());
            self.counters.shed_connections += 1;
        }
        self.reserve = reserve_descriptor().ok();
        found
    }

    fn start_connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> io::Result<()> {
        let started = self.streams.start(to, transport, &self.options)?;
        self.add_stream(started, transport, key, transport == Transport::Tcp)
    }

    fn add_stream(
        &mut self,
        socket: (OwnedFd, u16),
        transport: Transport,
        key: StreamKey,
        connecting: bool,
    ) -> io::Result<()> {
        let socket = self.streams.insert(key, socket, transport, connecting);
        let source = match transport {
            Transport::Tcp => Source::Stream(key),
            Transport::Udp => Source::DatagramStream(key),
        };
        if let Err(error) = self.poller.watch(socket, source) {
            self.streams.close(key, Close::Reset);
            return Err(error);
        }
        self.active_polls = ACTIVE_POLLS;
        Ok(())
    }
}

impl Nic for SocketNic {
    type Socket = AcceptedSocket;
    type Port = OpenPort;

    fn poll(&mut self, sleep_ns: u64, events: &mut Vec<Event>) {
        events.clear();
        let slept = sleep_ns > 0 && !self.streams.owes();
        self.streams.take_owed(events);
        if slept {
            self.watched.begin_sleep();
            let stalled = self.stalled_polls > 0;
            let spins = stalled && mutants::on("spin_without_descriptors");
            let stalled_ns = if spins { 0 } else { STALLED_NS };
            let sleep_ns = if stalled { sleep_ns.min(stalled_ns) } else { sleep_ns };
            let asked = self.watched.asked();
            let count = self.poller.sleep(sleep_ns, |position| {
                events.push(Event::Datagrams(asked[position]));
            });
            self.translate(count, true, events);
        } else {
            self.watched.begin_poll(&self.ports, events);
            if self.watched.has_set() || self.streams_due() {
                let count = self.poller.collect();
                self.translate(count, false, events);
            }
            events.extend(self.watched.asked().iter().map(|&port| Event::Datagrams(port)));
        }
        self.retry_stalled(slept, events);
    }

    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool {
        batch.items.clear();
        batch.overflowed = 0;
        let Some(Port::Udp(udp)) = self.ports.get_mut(usize::from(port)) else {
            return false;
        };
        if udp.stopped || batch.bytes.len() < SLOTS {
            return false;
        }
        let asked = udp.slots;
        let used = udp.receive(&mut self.receiver, batch);
        udp.slots = slots_after(used, batch.items.len());
        let of = (port, &mut udp.watch, udp.socket.as_fd());
        let most = asked.min(batch.most_buffers as usize);
        if self.watched.note_received(of, &mut self.poller, (used, most, batch.items.len())) {
            udp.check_drops(batch);
        }
        self.quiet_work = self.quiet_work.saturating_add(used as u32 * WORK_PER_BUFFER);
        used == most
    }

    fn send(&mut self, port: PortIndex, batch: &mut TxBatch) -> SendOutcome {
        match self.ports.get_mut(usize::from(port)) {
            Some(Port::Udp(udp)) => {
                self.sender.send(udp.socket.as_fd(), batch, &mut udp.segmentation)
            }
            _ => SendOutcome::default(),
        }
    }

    fn accept(&mut self, port: PortIndex) -> Option<(AcceptedSocket, SocketAddr)> {
        for _ in 0..ACCEPT_TRIES_MAX {
            match accept(self.listener(port)?) {
                Ok((socket, peer)) => return Some((AcceptedSocket(socket), peer)),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return None,
                    Some(libc::EMFILE | libc::ENFILE) if self.shed_connection(port) => {}
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => break,
                    // The connection died in the backlog (accept(2) lists the errors); try the next
                    // one.
                    _ => {}
                },
            }
        }
        self.stall(port);
        None
    }

    fn adopt(&mut self, socket: AcceptedSocket, key: StreamKey) -> Result<(), NicError> {
        self.streams.check_free(key)?;
        self.add_stream((socket.0, 0), Transport::Tcp, key, false).map_err(nic_error)
    }

    fn connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> Result<(), NicError> {
        self.streams.check_free(key)?;
        self.start_connect(to, transport, key).map_err(nic_error)
    }

    fn connect_local(&mut self, path: &Path, key: StreamKey) -> Result<(), NicError> {
        self.streams.check_free(key)?;
        let socket = local::connect_stream(path).map_err(|error| match error.kind() {
            // The listener's queue is full.
            io::ErrorKind::WouldBlock => NicError::Refused(error.to_string()),
            _ => nic_error(error),
        })?;
        self.add_stream((socket, 0), Transport::Tcp, key, true).map_err(nic_error)
    }

    fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read {
        self.streams.read(key, into)
    }

    fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written {
        self.streams.write(key, bytes)
    }

    fn read_datagrams(&mut self, key: StreamKey, batch: &mut RxBatch) -> DatagramsRead {
        let Self { streams, receiver, options, .. } = self;
        batch.items.clear();
        batch.overflowed = 0;
        let mut read = DatagramsRead::default();
        let Some((socket, _)) = streams.stream_mut(key).and_then(|s| s.batches(options)) else {
            return read;
        };
        for _ in 0..RECEIVE_TRIES_MAX {
            match receiver.receive(socket, SLOTS, batch) {
                Ok(received) => {
                    read.more = received.slots == SLOTS;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // A pending socket error, cleared by returning it, or an interruption.
                Err(error) => read.bounced |= !interrupted(&error),
            }
        }
        read
    }

    fn write_datagrams(
        &mut self,
        key: StreamKey,
        batch: &mut TxBatch,
        count: usize,
    ) -> SendOutcome {
        let Self { streams, sender, options, .. } = self;
        match streams.stream_mut(key).and_then(|stream| stream.batches(options)) {
            Some((socket, segmentation)) => {
                sender.send_connected(socket, batch, segmentation, count)
            }
            None => SendOutcome::default(),
        }
    }

    fn stream_addresses(&self, key: StreamKey) -> Option<(SocketAddr, SocketAddr)> {
        self.streams.addresses(key)
    }

    fn keep_alive(&mut self, key: StreamKey) {
        self.streams.keep_alive(key);
    }

    fn shutdown(&mut self, key: StreamKey) {
        self.streams.shutdown(key);
    }

    fn lend(&mut self, key: StreamKey) -> Option<LentStream> {
        Some(Box::new(self.streams.lend(key)?))
    }

    fn close(&mut self, key: StreamKey, how: Close) {
        if let Some(socket) = self.streams.lent(key) {
            // The other descriptor would keep it in the set, and its events would be those of the next stream with this key.
            self.poller.forget(socket);
        }
        self.streams.close(key, how);
        // A descriptor is free: retry a listener that lacked one at the next poll.
        self.stalled_polls = self.stalled_polls.min(1);
    }

    fn add_port(&mut self, index: PortIndex, port: OpenPort) -> Result<(), NicError> {
        self.install(index, port).map_err(nic_error)
    }

    fn stop_port(&mut self, index: PortIndex) {
        match self.ports.get_mut(usize::from(index)) {
            // Kept open: replies are still sent from it.
            Some(Port::Udp(udp)) => udp.stopped = true,
            Some(Port::Tcp(tcp)) => (tcp.listener, tcp.file) = (None, None),
            Some(Port::Closed) | None => return,
        }
        self.watched.remove(index, &mut self.ports, &mut self.poller);
        self.update_listening();
    }

    fn pause_port(&mut self, index: PortIndex, paused: bool) {
        // A listener's edge is reported once, and the worker remembers it.
        let Some(Port::Udp(udp)) = self.ports.get(usize::from(index)) else { return };
        if paused || udp.stopped {
            self.watched.remove(index, &mut self.ports, &mut self.poller);
        } else {
            self.watched.add(index, &mut self.ports, &mut self.poller);
        }
    }

    fn close_port(&mut self, index: PortIndex) {
        self.stop_port(index);
        if let Some(Port::Udp(udp)) = self.ports.get(usize::from(index)) {
            // A worker's counters must not decrease.
            self.counters.segmentation_fallbacks += udp.segmentation.fallbacks;
        }
        if let Some(port) = self.ports.get_mut(usize::from(index)) {
            *port = Port::Closed;
        }
    }

    fn stop_listening(&mut self) {
        (0..self.ports.len()).for_each(|index| self.stop_port(index as PortIndex));
    }

    fn counters(&self) -> NicCounters {
        let fallbacks = self.ports.iter().map(|port| match port {
            Port::Udp(udp) => udp.segmentation.fallbacks,
            Port::Tcp(_) | Port::Closed => 0,
        });
        let before = self.counters.segmentation_fallbacks;
        let sum = before + fallbacks.sum::<u64>();
        NicCounters { segmentation_fallbacks: sum, ..self.counters }
    }
}

fn accept(listener: BorrowedFd<'_>) -> io::Result<(OwnedFd, SocketAddr)> {
    let mut peer = RawAddress::empty();
    loop {
        let mut len = RAW_ADDRESS_LEN;
        // SAFETY: `peer` has room for `len` bytes and both outlive the call.
        let accepted = own(unsafe {
            libc::accept4(
                listener.as_raw_fd(),
                peer.as_mut_ptr(),
                &raw mut len,
                libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            )
        });
        match accepted {
            // A peer of a Unix socket has no address of these families.
            Ok(socket) => return Ok((socket, peer.to_std().unwrap_or(UNNAMED))),
            Err(error) if interrupted(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// A placeholder descriptor, closed when one is needed.
fn reserve_descriptor() -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })
}

fn nic_error(error: io::Error) -> NicError {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::EADDRNOTAVAIL | libc::EAGAIN) => {
            NicError::Exhausted
        }
        _ => NicError::Refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;
    use crate::os::int_option;

    #[test]
    fn accepted_connections_send_without_delay() {
        let address = "127.0.0.1:0".parse().unwrap();
        let port = PortSpec { transport: Transport::Tcp, address };
        let mut nic = SocketNic::open(&[port], SocketOptions::default()).unwrap();
        let _client = TcpStream::connect(nic.local_addresses()[0]).unwrap();
        let (socket, _) = nic.accept(0).unwrap();
        let nodelay = int_option(socket.0.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY).unwrap();
        assert_eq!(nodelay, 1, "inherited from the listener");
    }

    #[test]
    fn the_peer_of_an_idle_connection_is_asked_whether_it_is_there() {
        let address = "127.0.0.1:0".parse().unwrap();
        let port = PortSpec { transport: Transport::Tcp, address };
        let mut nic = SocketNic::open(&[port], SocketOptions::default()).unwrap();
        let _client = TcpStream::connect(nic.local_addresses()[0]).unwrap();
        let (socket, _) = nic.accept(0).unwrap();
        let same = socket.0.try_clone().unwrap();
        let option = |level, name| int_option(same.as_fd(), level, name).unwrap();
        nic.adopt(socket, 7).unwrap();
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_KEEPALIVE), 0);
        nic.keep_alive(7);
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_KEEPALIVE), 1);
        let times = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT];
        assert_eq!(times.map(|name| option(libc::IPPROTO_TCP, name)), [60, 10, 6]);
        // One that has ended.
        nic.keep_alive(8);
    }
}
