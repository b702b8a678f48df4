//! The virtual network: one for all workers, clients and backends of a run.
//!
//! Everything in flight is in one queue ordered by arrival; [`Network::advance`] moves the clock
//! and delivers what is due. Datagrams are lost, duplicated, delayed by different times (and so reordered)
//! and truncated; streams are delayed in order. The engine's side is [`crate::nic::SimNic`]; the
//! peers' side is here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use wire::nic::{Close, PortIndex, StreamKey, Transport};

use crate::conn::{Conn, ConnId, Phase, Segment, Site};
use crate::fault::{Fault, FaultCounts};
use crate::ledger::{Ledger, Route};
use crate::rng::{Rng, mix};
use crate::trace::Trace;

/// Fault rates, per mille, and durations.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// A datagram is lost.
    pub lose: u32,
    /// A datagram arrives twice.
    pub duplicate: u32,
    /// A bit of a datagram to the engine changes.
    pub corrupt: u32,
    /// A datagram arrives truncated.
    pub truncate: u32,
    /// The host kernel refuses to send a datagram.
    pub refuse_send: u32,
    /// The host kernel has no room for datagrams now.
    pub full_send: u32,
    /// A read returns less than available.
    pub short_read: u32,
    /// A write takes less than it could, or nothing.
    pub short_write: u32,
    /// An event without a cause.
    pub spurious: u32,
    /// An event is reported later.
    pub late_event: u32,
    /// No descriptor is free.
    pub exhausted: u32,
    /// A reset destroys data that had arrived before it.
    pub reset_destroys: u32,
    /// Shortest and longest delay, in nanoseconds.
    pub delay_ns: (u64, u64),
    /// Capacity of a port in datagrams.
    pub socket_datagrams: usize,
    /// Capacity of a pipe in bytes.
    pub pipe_bytes: usize,
    /// Of links to accelerators.
    pub link: LinkFaults,
}

/// Fault rates of links, per thousand turns under load; `short` per thousand reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct LinkFaults {
    /// A read or a write moves less than it could, or nothing.
    pub short: u32,
    /// Nothing arrives for a while.
    pub stall: u32,
    /// The connection is cut.
    pub cut: u32,
    /// A bit changes.
    pub damage: u32,
    /// Nothing arrives any more.
    pub silence: u32,
    /// Shortest and longest delay, in nanoseconds.
    pub delay_ns: (u64, u64),
    /// Bytes in flight in one direction.
    pub pipe_bytes: usize,
    /// A link that is silent for this time is lost.
    pub heartbeat_ns: u64,
}

impl Default for LinkFaults {
    /// A perfect link.
    fn default() -> Self {
        Self {
            short: 0,
            stall: 0,
            cut: 0,
            damage: 0,
            silence: 0,
            delay_ns: (0, 0),
            pipe_bytes: 1 << 20,
            heartbeat_ns: 200_000_000,
        }
    }
}

impl Default for Faults {
    /// A perfect network.
    fn default() -> Self {
        Self {
            lose: 0,
            duplicate: 0,
            corrupt: 0,
            truncate: 0,
            refuse_send: 0,
            full_send: 0,
            short_read: 0,
            short_write: 0,
            spurious: 0,
            late_event: 0,
            exhausted: 0,
            reset_destroys: 0,
            delay_ns: (0, 0),
            socket_datagrams: usize::MAX,
            pipe_bytes: 1 << 20,
            link: LinkFaults::default(),
        }
    }
}

/// The addresses of the server's machine, besides loopback.
pub(crate) const LOCAL: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3)),
];

/// A listening address.
#[derive(Clone, Copy, Debug)]
pub struct PortSite {
    /// UDP or TCP.
    pub transport: Transport,
    /// Its address; unspecified: clients choose one of several.
    pub address: SocketAddr,
    /// The service behind it.
    pub service: usize,
    /// Maximum ratio of reply to request bytes over UDP; 0: no limit.
    pub reply_ratio: usize,
    /// Whether datagrams from ports below 1024 are served.
    pub privileged: bool,
    /// Its connections are for the service's blocks.
    pub is_socket: bool,
}

/// Whether this is an address of a UDP port of the server.
pub(crate) fn is_own(ports: &[PortSite], source: SocketAddr) -> bool {
    let ip = source.ip();
    let here = ip.is_loopback() || LOCAL.contains(&ip);
    let mut udp = ports.iter().filter(|port| port.transport == Transport::Udp);
    udp.any(|port| {
        let listens = port.address.ip() == ip || port.address.ip().is_unspecified() && here;
        port.address.port() == source.port() && listens
    })
}

/// The result of a peer's read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerRead {
    /// Bytes (at least one), or a datagram.
    Bytes(Vec<u8>),
    /// Nothing available.
    Empty,
    /// The engine closed the connection in order.
    Closed,
    /// The engine reset the connection.
    Broken,
}

/// Result of connections to a backend's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reachability {
    /// Accepted after this long.
    Open { after_ns: u64 },
    /// Refused after this long.
    Refused { after_ns: u64 },
    /// Never answered.
    Silent,
    /// The host kernel refuses immediately.
    Unreachable,
}

/// A backend's address and its pending connections.
#[derive(Clone, Debug)]
pub struct BackendSite {
    /// Its address.
    pub address: SocketAddr,
    /// The result of the next connections.
    pub reachability: Reachability,
    /// Connections that the backend has not accepted.
    pub arrived: VecDeque<ConnId>,
    /// The service whose blocks connect to it.
    pub(crate) sockets_of: Option<usize>,
}

#[derive(Clone, Debug)]
enum InFlight {
    ToPort { route: Route, worker: usize, payload: Vec<u8>, truncated: bool },
    ToClient { route: Route, payload: Vec<u8> },
    Segment { conn: ConnId, up: bool, segment: Segment },
    Accepted { conn: ConnId },
    Refused { conn: ConnId },
}

#[derive(Debug, Default)]
pub(crate) struct WorkerPort {
    pub(crate) datagrams: VecDeque<(Route, Vec<u8>, bool)>,
    pub(crate) overflowed: u32,
    pub(crate) backlog: VecDeque<ConnId>,
    /// An edge that has not been reported to the engine.
    pub(crate) news: bool,
    pub(crate) stopped: bool,
    /// Arrivals are not reported for now.
    pub(crate) paused: bool,
    /// The last datagram to arrive, by the time it was sent.
    newest: u64,
}

#[derive(Debug, Default)]
pub(crate) struct WorkerSide {
    pub(crate) ports: Vec<WorkerPort>,
    pub(crate) streams: BTreeMap<StreamKey, ConnId>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Network {
    pub(crate) now_ns: u64,
    pub(crate) rng: Rng,
    pub(crate) faults: Faults,
    pub(crate) ports: Vec<PortSite>,
    pub(crate) workers: Vec<WorkerSide>,
    pub(crate) conns: Vec<Conn>,
    backends: Vec<BackendSite>,
    /// Questions to backends that have a number.
    questions: u32,
    flight: BTreeMap<(u64, u64), InFlight>,
    launched: u64,
    pub(crate) muted: bool,
    /// The engine is draining: it may close any connection.
    pub(crate) ending: bool,
    /// Connected shared-memory clients, with their services.
    pub(crate) memory_clients: BTreeMap<u32, usize>,
    /// Those that a change has disconnected.
    pub(crate) sent_away: BTreeSet<u32>,
    /// Several workers ended before everything was answered.
    pub(crate) cut_off: bool,
    /// How long the last poll was allowed to sleep.
    pub(crate) asked_sleep_ns: u64,
    inboxes: BTreeMap<SocketAddr, VecDeque<(Route, Vec<u8>)>>,
    /// Datagrams in all of them.
    unread_datagrams: usize,
    /// What crossed the engine's boundary.
    pub ledger: Ledger,
    /// What happened.
    pub trace: Trace,
    /// Faults of the whole run.
    pub fault_counts: FaultCounts,
}

/// The network as all parts hold it. One thread uses it; the lock is there for `Send`.
pub type SharedNetwork = Arc<Mutex<Network>>;

impl Network {
    /// A network between `workers` workers and their peers.
    pub fn new(
        workers: usize,
        ports: Vec<PortSite>,
        backends: Vec<SocketAddr>,
        ledger: Ledger,
        rng: Rng,
    ) -> Self {
        let closed = || WorkerPort { stopped: true, ..WorkerPort::default() };
        let side = |_| WorkerSide {
            ports: ports.iter().map(|_| closed()).collect(),
            streams: BTreeMap::new(),
        };
        let site = |address| BackendSite {
            address,
            reachability: Reachability::Open { after_ns: 0 },
            arrived: VecDeque::new(),
            sockets_of: None,
        };
        Self {
            now_ns: 0,
            rng,
            faults: Faults::default(),
            workers: (0..workers).map(side).collect(),
            ports,
            conns: Vec::new(),
            backends: backends.into_iter().map(site).collect(),
            questions: 0,
            flight: BTreeMap::new(),
            launched: 0,
            muted: false,
            ending: false,
            memory_clients: BTreeMap::new(),
            sent_away: BTreeSet::new(),
            cut_off: false,
            asked_sleep_ns: 0,
            inboxes: BTreeMap::new(),
            unread_datagrams: 0,
            ledger,
            trace: Trace::default(),
            fault_counts: FaultCounts::default(),
        }
    }

    /// The clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Changes the faults.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Changes the result of connections to a backend.
    pub fn set_reachability(&mut self, backend: usize, reachability: Reachability) {
        self.backends[backend].reachability = reachability;
    }

    /// The service whose blocks have this connection.
    pub(crate) fn socket_service(&self, id: ConnId) -> Option<usize> {
        match self.conns[id].site {
            Site::Client { port, .. } => {
                let port = &self.ports[usize::from(port)];
                port.is_socket.then_some(port.service)
            }
            Site::Backend(site) => self.backends[site].sockets_of,
        }
    }

    /// The backends at these places are peers of a service's blocks.
    pub(crate) fn set_socket_peers(&mut self, places: impl IntoIterator<Item = (usize, usize)>) {
        for (place, service) in places {
            self.backends[place].sockets_of = Some(service);
        }
    }

    /// A listening address.
    pub fn port(&self, port: PortIndex) -> PortSite {
        self.ports[port as usize]
    }

    /// When the next thing arrives.
    pub fn next_due_ns(&self) -> Option<u64> {
        self.flight.keys().next().map(|(due_ns, _)| *due_ns)
    }

    /// Suppresses all events (`true`) or stops doing so; returns the number of events so far.
    pub(crate) fn mute(&mut self, muted: bool) -> u64 {
        self.muted = muted;
        self.trace.events()
    }

    /// Whether a worker would find an event.
    pub fn has_events(&self, worker: usize) -> bool {
        let side = &self.workers[worker];
        let stream = |conn: &ConnId| {
            let conn = &self.conns[*conn];
            conn.readable || conn.writable || conn.failed
        };
        side.ports.iter().any(|port| port.news && !port.paused) || side.streams.values().any(stream)
    }

    fn launch(&mut self, due_ns: u64, in_flight: InFlight) {
        self.launched += 1;
        self.flight.insert((due_ns, self.launched), in_flight);
    }

    fn delay_ns(&mut self) -> u64 {
        let (low, high) = self.faults.delay_ns;
        self.rng.between(low, high)
    }

    /// Moves the clock and delivers what is due by then.
    pub fn advance(&mut self, now_ns: u64) {
        while let Some((&(due_ns, serial), _)) = self.flight.first_key_value() {
            if due_ns > now_ns {
                break;
            }
            self.now_ns = self.now_ns.max(due_ns);
            let in_flight = self.flight.remove(&(due_ns, serial)).expect("just seen");
            self.arrive(serial, in_flight);
        }
        self.now_ns = now_ns;
    }

    /// Whether `fault` occurs now.
    pub(crate) fn occurs(&mut self, fault: Fault, per_mille: u32) -> bool {
        self.fault_counts.occurs(&mut self.rng, fault, per_mille)
    }

    fn arrive(&mut self, serial: u64, in_flight: InFlight) {
        match in_flight {
            InFlight::ToPort { route, worker, payload, truncated } => {
                let limit = self.faults.socket_datagrams;
                let port = &mut self.workers[worker].ports[route.port as usize];
                if port.stopped {
                    return;
                }
                port.news = true;
                if serial < port.newest {
                    self.fault_counts.one(Fault::Reorder);
                }
                port.newest = port.newest.max(serial);
                if port.datagrams.len() >= limit {
                    self.fault_counts.one(Fault::SocketFull);
                    port.overflowed += 1;
                } else {
                    port.datagrams.push_back((route, payload, truncated));
                }
            }
            InFlight::ToClient { route, payload } => {
                self.unread_datagrams += 1;
                self.inboxes.entry(route.peer).or_default().push_back((route, payload));
            }
            InFlight::Segment { conn, up, segment } => self.arrive_segment(conn, up, segment),
            InFlight::Accepted { conn } => {
                let entry = &mut self.conns[conn];
                if entry.key.is_none() {
                    return;
                }
                entry.phase = Phase::Up;
                entry.writable = true;
                let Site::Backend(site) = entry.site else { return };
                self.backends[site].arrived.push_back(conn);
            }
            InFlight::Refused { conn } => self.conns[conn].failed = self.conns[conn].key.is_some(),
        }
    }

    fn arrive_segment(&mut self, id: ConnId, up: bool, segment: Segment) {
        let destroys = segment == Segment::Reset
            && self.occurs(Fault::ResetDestroys, self.faults.reset_destroys);
        let conn = &mut self.conns[id];
        let pipe = if up { &mut conn.up } else { &mut conn.down };
        match segment {
            Segment::Bytes(bytes) => {
                pipe.in_flight -= bytes.len();
                if pipe.abandoned {
                    if conn.transport == Transport::Tcp {
                        self.send_segment(id, !up, Segment::Reset);
                    }
                    return;
                }
                match conn.transport {
                    Transport::Tcp => pipe.ready.extend(bytes),
                    Transport::Udp => pipe.datagrams.push_back(bytes),
                }
            }
            Segment::Fin => pipe.ended = true,
            Segment::Reset => {
                pipe.broken = true;
                if destroys {
                    pipe.ready.clear();
                }
                // A reset ends both directions.
                let back = if up { &mut conn.down } else { &mut conn.up };
                back.finished = true;
            }
        }
        if up && conn.key.is_some() {
            // As on a host: with nothing left to read a reset is an event of its own.
            conn.failed |= conn.up.broken && conn.up.ready.is_empty();
            conn.readable = true;
            conn.writable |= conn.up.broken && conn.wants_room;
        }
    }

    /// Sends a segment; nothing follows the last one.
    pub(crate) fn send_segment(&mut self, id: ConnId, up: bool, segment: Segment) {
        let delay_ns = self.delay_ns();
        let now_ns = self.now_ns;
        let conn = &mut self.conns[id];
        let pipe = if up { &mut conn.up } else { &mut conn.down };
        if pipe.finished && segment != Segment::Reset {
            return;
        }
        pipe.last_due_ns = pipe.last_due_ns.max(now_ns + delay_ns);
        let due_ns = pipe.last_due_ns;
        match &segment {
            Segment::Bytes(bytes) => pipe.in_flight += bytes.len(),
            Segment::Fin | Segment::Reset => pipe.finished = true,
        }
        self.launch(due_ns, InFlight::Segment { conn: id, up, segment });
    }

    // The clients' side.

    /// A client sends a datagram; returns the route a reply must take.
    pub fn send_datagram(
        &mut self,
        peer: SocketAddr,
        port: PortIndex,
        local: IpAddr,
        payload: &[u8],
    ) {
        let route = self.route(peer, port, local);
        let service = self.ports[port as usize].service;
        self.trace.note(self.now_ns, "ask", &[service as u64, peer.port().into()]);
        let copies = 1 + u32::from(self.occurs(Fault::Duplicate, self.faults.duplicate));
        for _ in 0..copies {
            if self.occurs(Fault::Lose, self.faults.lose) {
                continue;
            }
            let truncated = self.occurs(Fault::Truncate, self.faults.truncate);
            let mut payload = payload[..payload.len() / if truncated { 2 } else { 1 }].to_vec();
            if !payload.is_empty() && self.occurs(Fault::Corrupt, self.faults.corrupt) {
                let bit = self.rng.below(8 * payload.len() as u64) as usize;
                payload[bit / 8] ^= 1 << (bit % 8);
            }
            let worker = self.worker_of(peer, port);
            let due_ns = self.now_ns + self.delay_ns();
            self.launch(due_ns, InFlight::ToPort { route, worker, payload, truncated });
        }
    }

    /// An address that a UDP port of the server has.
    pub fn own_source(&self, rng: &mut Rng) -> SocketAddr {
        let udp = self.ports.iter().filter(|port| port.transport == Transport::Udp);
        let mut source = rng.pick(&udp.map(|port| port.address).collect::<Vec<_>>());
        if source.ip().is_unspecified() {
            source.set_ip(rng.pick(&[[127, 0, 0, 1].into(), LOCAL[0], LOCAL[1], LOCAL[2]]));
        }
        source
    }

    /// The route of a datagram that `peer` sends to `port` at `local`.
    pub fn route(&self, peer: SocketAddr, port: PortIndex, local: IpAddr) -> Route {
        let several = self.ports[port as usize].address.ip().is_unspecified();
        Route { peer, port, local: several.then_some(local) }
    }

    /// A datagram that arrived at a client: the route it took, and its payload.
    pub fn take_datagram(&mut self, peer: SocketAddr) -> Option<(Route, Vec<u8>)> {
        if self.unread_datagrams == 0 {
            return None;
        }
        let taken = self.inboxes.get_mut(&peer)?.pop_front();
        self.unread_datagrams -= usize::from(taken.is_some());
        taken
    }

    /// The worker whose socket the host kernel chooses for a flow.
    pub fn worker_of(&self, peer: SocketAddr, port: PortIndex) -> usize {
        let flow = mix(u64::from(peer.port()) << 16 | u64::from(port));
        (flow % self.workers.len() as u64) as usize
    }

    pub(crate) fn depart(&mut self, route: Route, payload: Vec<u8>) {
        if self.occurs(Fault::Lose, self.faults.lose) {
            return;
        }
        let copies = 1 + u32::from(self.occurs(Fault::Duplicate, self.faults.duplicate));
        for _ in 0..copies {
            let due_ns = self.now_ns + self.delay_ns();
            self.launch(due_ns, InFlight::ToClient { route, payload: payload.clone() });
        }
    }

    /// A client connects to a TCP port. Whether it is listening shows later.
    pub fn connect(&mut self, peer: SocketAddr, port: PortIndex) -> ConnId {
        let worker = self.worker_of(peer, port);
        let id = self.conns.len();
        let site = Site::Client { port, worker };
        self.conns.push(Conn::new(Transport::Tcp, site, peer, Phase::Up));
        self.trace.note(self.now_ns, "connect", &[id as u64, port.into(), worker as u64]);
        let listens = self.listeners(port, worker).any(|entry| !entry.stopped);
        if listens {
            self.listeners(port, worker).for_each(|entry| entry.news |= !entry.stopped);
            self.backlog(port, worker).push_back(id);
        } else {
            self.send_segment(id, false, Segment::Reset);
        }
        id
    }

    /// The ports of workers that a connection may reach: of sockets all of them, because they share one listener.
    pub(crate) fn listeners(
        &mut self,
        port: PortIndex,
        worker: usize,
    ) -> impl Iterator<Item = &mut WorkerPort> {
        let shared = self.ports[usize::from(port)].is_socket;
        let workers = if shared { 0..self.workers.len() } else { worker..worker + 1 };
        self.workers[workers].iter_mut().map(move |side| &mut side.ports[usize::from(port)])
    }

    /// Connections that wait at a port.
    pub(crate) fn backlog(&mut self, port: PortIndex, worker: usize) -> &mut VecDeque<ConnId> {
        let first = self.listeners(port, worker).next();
        &mut first.expect("there are workers").backlog
    }

    // Any peer's side.

    /// A peer writes; returns how many bytes the pipe took.
    pub fn peer_write(&mut self, id: ConnId, bytes: &[u8]) -> usize {
        let limit = self.faults.pipe_bytes;
        let conn = &mut self.conns[id];
        if conn.up.finished {
            return 0;
        }
        if conn.transport == Transport::Udp {
            let lost = self.occurs(Fault::Lose, self.faults.lose);
            if !lost {
                self.send_segment(id, true, Segment::Bytes(bytes.to_vec()));
            }
            return bytes.len();
        }
        let room = limit.saturating_sub(conn.up.ready.len() + conn.up.in_flight);
        let count = bytes.len().min(room);
        if count < bytes.len() {
            self.fault_counts.one(Fault::SmallPipe);
        }
        if count > 0 {
            self.send_segment(id, true, Segment::Bytes(bytes[..count].to_vec()));
        }
        count
    }

    /// A peer reads up to `max` bytes, or one datagram.
    pub fn peer_read(&mut self, id: ConnId, max: usize) -> PeerRead {
        let conn = &mut self.conns[id];
        if !conn.down.has_input() {
            return PeerRead::Empty;
        }
        if let Some(datagram) = conn.down.datagrams.pop_front() {
            return PeerRead::Bytes(datagram);
        }
        let bytes = conn.down.take(max);
        if !bytes.is_empty() {
            if conn.wants_room && conn.key.is_some() {
                conn.wants_room = false;
                conn.writable = true;
            }
            return PeerRead::Bytes(bytes);
        }
        match () {
            () if conn.down.broken => PeerRead::Broken,
            () if conn.down.ended => PeerRead::Closed,
            () => PeerRead::Empty,
        }
    }

    /// A peer closes its sending side; it still reads.
    pub fn peer_shutdown(&mut self, id: ConnId) {
        self.trace.note(self.now_ns, "shut", &[id as u64]);
        self.send_segment(id, true, Segment::Fin);
    }

    /// A peer closes or resets the connection.
    pub fn peer_close(&mut self, id: ConnId, how: Close) {
        let conn = &mut self.conns[id];
        if std::mem::replace(&mut conn.peer_closed, true) {
            return;
        }
        self.trace.note(self.now_ns, "leave", &[id as u64, u64::from(how == Close::Reset)]);
        conn.down.abandoned = true;
        let unread = !conn.down.ready.is_empty();
        let reset = how == Close::Reset || unread;
        self.send_segment(id, true, if reset { Segment::Reset } else { Segment::Fin });
    }

    /// A connection of a service's client on which the engine has left something unread.
    pub fn unread(&self, service: usize) -> Option<ConnId> {
        let of_service = |conn: &Conn| match conn.site {
            Site::Client { port, .. } => self.ports[port as usize].service == service,
            Site::Backend(_) => false,
        };
        let unread = |conn: &Conn| {
            of_service(conn) && conn.key.is_some() && conn.closed.is_none() && conn.up.has_input()
        };
        self.conns.iter().position(unread)
    }

    /// How the engine ended a connection, if it has.
    pub fn closed(&self, id: ConnId) -> Option<Close> {
        self.conns[id].closed
    }

    /// Whether the engine has closed the connection or never took it.
    pub fn is_over(&self, id: ConnId) -> bool {
        let conn = &self.conns[id];
        conn.closed.is_some() || conn.down.broken
    }

    // The backends' side.

    /// A unique number for a backend request.
    pub fn number_question(&mut self) -> u32 {
        self.questions += 1;
        self.questions
    }

    /// A connection that reached a backend since the last call.
    pub fn take_arrived(&mut self, backend: usize) -> Option<ConnId> {
        self.backends[backend].arrived.pop_front()
    }

    /// Starts a connection from the engine to `to`.
    pub(crate) fn start_connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        owner: (usize, StreamKey),
    ) -> Option<ConnId> {
        let site = self.backends.iter().position(|b| b.address == to);
        let site = site.expect("the topology names only backends of this network");
        let reachability = self.backends[site].reachability;
        if reachability == Reachability::Unreachable {
            return None;
        }
        let id = self.conns.len();
        let phase = if transport == Transport::Udp { Phase::Up } else { Phase::Connecting };
        let mut conn = Conn::new(transport, Site::Backend(site), to, phase);
        conn.key = Some(owner);
        conn.writable = transport == Transport::Udp;
        self.conns.push(conn);
        self.trace.note(self.now_ns, "dial", &[id as u64, site as u64]);
        match (transport, reachability) {
            (Transport::Udp, Reachability::Open { .. }) => {
                self.backends[site].arrived.push_back(id)
            }
            (Transport::Udp, _)
            | (Transport::Tcp, Reachability::Silent | Reachability::Unreachable) => {}
            (Transport::Tcp, Reachability::Open { after_ns }) => {
                self.launch(self.now_ns + after_ns, InFlight::Accepted { conn: id });
            }
            (Transport::Tcp, Reachability::Refused { after_ns }) => {
                self.launch(self.now_ns + after_ns, InFlight::Refused { conn: id });
            }
        }
        Some(id)
    }

    /// A datagram for a missing backend: its host reports an error.
    pub(crate) fn bounce(&mut self, id: ConnId) {
        self.send_segment(id, true, Segment::Reset);
    }

    /// Whether a backend's address takes datagrams.
    pub(crate) fn takes_datagrams(&self, id: ConnId) -> Option<bool> {
        let Site::Backend(site) = self.conns[id].site else { return None };
        match self.backends[site].reachability {
            Reachability::Open { .. } => Some(true),
            Reachability::Refused { .. } => Some(false),
            Reachability::Silent | Reachability::Unreachable => None,
        }
    }

    /// The engine's side sends nothing more.
    pub(crate) fn engine_shutdown(&mut self, id: ConnId) {
        if self.conns[id].phase == Phase::Up {
            self.send_segment(id, false, Segment::Fin);
        }
    }

    /// The engine's side closes the connection.
    pub(crate) fn engine_close(&mut self, id: ConnId, how: Close) {
        let conn = &mut self.conns[id];
        conn.key = None;
        conn.readable = false;
        conn.writable = false;
        conn.failed = false;
        let first = conn.closed.is_none();
        conn.closed.get_or_insert(how);
        conn.up.abandoned = true;
        // As on a host: closing with bytes unread resets.
        let reset = how == Close::Reset || !conn.up.ready.is_empty();
        conn.up.ready.clear();
        if first && conn.transport == Transport::Tcp && conn.phase == Phase::Up {
            self.send_segment(id, false, if reset { Segment::Reset } else { Segment::Fin });
        }
    }
}
