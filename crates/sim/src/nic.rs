//! The engine's side of the virtual network: [`SimNic`], one for each worker.
//!
//! It behaves in the least helpful way that the contract of [`wire::nic::Nic`] allows: edges are reported once, late, in
//! any order, and sometimes without a cause; reads and writes move less than they could (and an
//! edge follows, as the contract promises).

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use engine::ControlMessage;
use wire::nic::{
    Close, Datagram, Event, LentStream, Nic, NicError, PortIndex, Read, RxBatch, SendOutcome,
    StreamKey, Transport, TxBatch, TxItem, Written,
};

use crate::conn::{ConnId, Phase, Segment, Site};
use crate::fault::Fault;
use crate::ledger::{Intake, Route};
use crate::net::{Network, PortSite, SharedNetwork, is_own};
use crate::shared::lock;

/// Maximum number of datagrams per receive, and of receive buffers.
const BATCH_MAX: u64 = 64;
/// Bytes of a receive buffer: one datagram, or a GRO batch.
const BUFFER_BYTES: usize = 16 << 10;

/// One worker's network.
pub struct SimNic {
    worker: usize,
    net: SharedNetwork,
}

/// What the workers of a world are asked.
pub type Message = ControlMessage<SimSocket, ()>;

/// An accepted connection that no worker has adopted yet. Dropping it resets the connection.
pub struct SimSocket {
    conn: Option<ConnId>,
    net: SharedNetwork,
}

impl Drop for SimSocket {
    fn drop(&mut self) {
        if let Some(conn) = self.conn {
            lock(&self.net).engine_close(conn, Close::Reset);
        }
    }
}

impl SimNic {
    /// The network of worker `worker`.
    pub fn new(worker: usize, net: SharedNetwork) -> Self {
        Self { worker, net }
    }

    /// The network of all workers.
    pub fn network(&self) -> &SharedNetwork {
        &self.net
    }
}

/// In a patient batch, moves items to destinations with more to come to the end. Returns their number.
fn keep_what_waits(batch: &mut TxBatch) -> usize {
    if !batch.may_defer() {
        return 0;
    }
    let waiting = batch.waiting_mut();
    let last: HashMap<_, _> = waiting.iter().map(|d| ((d.peer, d.local), d.more)).collect();
    let waits = |d: &TxItem| last[&(d.peer, d.local)];
    waiting.sort_by_key(waits);
    waiting.iter().filter(|d| waits(d)).count()
}

/// How many of the datagrams that wait fit into one GRO batch: they have one sender and one length, and the last may be shorter.
fn merged(waiting: &VecDeque<(Route, Vec<u8>, bool)>) -> usize {
    let Some((route, first, _)) = waiting.front() else { return 0 };
    let fit = BUFFER_BYTES.checked_div(first.len()).unwrap_or(1);
    let (mut count, mut ended) = (0, false);
    for (from, payload, truncated) in waiting.iter().take(fit) {
        let fits = (1..=first.len()).contains(&payload.len());
        if ended || from != route || !fits || *truncated {
            break;
        }
        ended = payload.len() < first.len();
        count += 1;
    }
    count.max(1)
}

impl Network {
    fn exhausted_occurs(&mut self) -> bool {
        self.occurs(Fault::Exhausted, self.faults.exhausted)
    }

    fn collect_events(&mut self, worker: usize, events: &mut Vec<Event>) {
        if self.muted {
            return;
        }
        let Self { workers, conns, rng, faults, fault_counts, .. } = self;
        for (key, id) in &workers[worker].streams {
            let conn = &mut conns[*id];
            if rng.chance(faults.late_event) {
                if conn.readable || conn.writable || conn.failed {
                    fault_counts.one(Fault::LateEvent);
                }
                continue;
            }
            if std::mem::take(&mut conn.failed) {
                events.push(Event::Failed(*key));
                continue;
            }
            if conn.phase == Phase::Connecting {
                continue;
            }
            if std::mem::take(&mut conn.readable)
                || fault_counts.occurs(rng, Fault::Spurious, faults.spurious)
            {
                events.push(Event::Readable(*key));
            }
            if std::mem::take(&mut conn.writable)
                || fault_counts.occurs(rng, Fault::Spurious, faults.spurious)
            {
                events.push(Event::Writable(*key));
            }
        }
        let mut connections = Vec::new();
        for (index, port) in workers[worker].ports.iter_mut().enumerate() {
            if port.stopped || port.paused || rng.chance(faults.late_event) {
                continue;
            }
            if std::mem::take(&mut port.news)
                || fault_counts.occurs(rng, Fault::Spurious, faults.spurious)
            {
                match self.ports[index].transport {
                    Transport::Udp => events.push(Event::Datagrams(index as PortIndex)),
                    Transport::Tcp => connections.push(Event::Connections(index as PortIndex)),
                }
            }
        }
        rng.shuffle(events);
        for event in &*events {
            if let Event::Readable(key) | Event::Writable(key) | Event::Failed(key) = *event {
                let kind = match event {
                    Event::Readable(_) => 0,
                    Event::Writable(_) => 1,
                    _ => 2,
                };
                let id = workers[worker].streams[&key] as u64;
                self.trace.note(self.now_ns, "event", &[id, kind, worker as u64]);
            }
        }
        rng.shuffle(&mut connections);
        events.append(&mut connections);
    }

    fn receive(&mut self, worker: usize, index: PortIndex, batch: &mut RxBatch) -> bool {
        let most = self.rng.between(1, BATCH_MAX).min(batch.most_buffers.into()) as usize;
        let PortSite { service, privileged, .. } = self.ports[index as usize];
        let port = &mut self.workers[worker].ports[index as usize];
        if port.stopped {
            return false;
        }
        batch.overflowed = std::mem::take(&mut port.overflowed);
        self.ledger.overflow(service, batch.overflowed.into());
        batch.use_lent(BATCH_MAX as usize);
        // The host kernel merges datagrams, or not.
        let merges = most.is_multiple_of(2);
        for slot in 0..BATCH_MAX as usize {
            let datagrams = &mut port.datagrams;
            let left = most - batch.items.len();
            let count = if merges { merged(datagrams) } else { datagrams.len().min(1) }.min(left);
            if count == 0 {
                break;
            }
            let mut received = Vec::new();
            for (at, (route, payload, truncated)) in datagrams.drain(..count).enumerate() {
                batch.items.push(Datagram {
                    peer: route.peer,
                    local: route.local,
                    offset: (slot * BUFFER_BYTES + received.len()) as u32,
                    len: payload.len() as u32,
                    truncated,
                    followed_by: (count - 1 - at) as u8,
                });
                received.extend_from_slice(&payload);
                let intake = match () {
                    () if truncated => Intake::Truncated,
                    () if route.peer.port() < 1024 && !privileged => Intake::Privileged,
                    () if is_own(&self.ports, route.peer) => Intake::OwnSource,
                    () => Intake::Request,
                };
                self.ledger.datagram_in(service, route, &payload, intake);
            }
            batch.fill(slot, &received);
        }
        !port.datagrams.is_empty()
    }

    fn transmit(&mut self, index: PortIndex, batch: &mut TxBatch) -> SendOutcome {
        let PortSite { service, reply_ratio, .. } = self.ports[index as usize];
        batch.detach();
        let mut outcome = SendOutcome { kept: keep_what_waits(batch), ..SendOutcome::default() };
        while batch.waiting().len() > outcome.kept {
            let departure = batch.waiting()[0];
            if self.occurs(Fault::FullSend, self.faults.full_send) {
                break;
            }
            if self.occurs(Fault::RefuseSend, self.faults.refuse_send) {
                outcome.refused += 1;
                batch.advance(1);
                continue;
            }
            let route = Route { peer: departure.peer, port: index, local: departure.local };
            let payload = batch.payload(&departure).to_vec();
            batch.advance(1);
            outcome.sent += 1;
            self.trace.note(self.now_ns, "reply", &[service as u64, route.peer.port().into()]);
            self.ledger.datagram_out(service, route, &payload, reply_ratio);
            self.depart(route, payload);
        }
        outcome
    }

    fn read_stream(&mut self, id: ConnId, into: &mut [u8]) -> Read {
        let short = self.rng.chance(self.faults.short_read);
        let conn = &mut self.conns[id];
        if let Some(datagram) = conn.up.datagrams.pop_front() {
            let len = datagram.len().min(into.len());
            into[..len].copy_from_slice(&datagram[..len]);
            return Read::Bytes(len);
        }
        let there = conn.up.ready.len().min(into.len());
        if there > 0 {
            let count = if short { self.rng.between(1, there as u64) as usize } else { there };
            if count < there {
                self.fault_counts.one(Fault::ShortRead);
            }
            let bytes = conn.up.take(count);
            into[..count].copy_from_slice(&bytes);
            if let Some(service) = self.socket_service(id) {
                self.ledger.socket_in(service, count as u64);
            }
            let conn = &mut self.conns[id];
            // The engine takes a short read as the end of the available data.
            conn.readable |= count < into.len() && conn.up.has_input();
            return Read::Bytes(count);
        }
        let tells = conn.up.broken && !std::mem::replace(&mut conn.up.told_broken, true);
        match () {
            () if tells || conn.up.broken && conn.transport == Transport::Udp => Read::Broken,
            () if conn.up.broken || conn.up.ended => Read::Closed,
            () => Read::Empty,
        }
    }

    /// Sends what was written through the handle of a connection.
    fn send_lent(&mut self, id: ConnId) {
        let conn = &mut self.conns[id];
        if conn.up.broken || conn.peer_closed {
            return conn.break_lent();
        }
        let bytes = conn.take_lent();
        if !bytes.is_empty() {
            self.send_segment(id, false, Segment::Bytes(bytes));
        }
    }

    /// The same for all connections of a worker.
    fn send_all_lent(&mut self, worker: usize) {
        let streams: Vec<ConnId> = self.workers[worker].streams.values().copied().collect();
        for id in streams {
            if self.conns[id].lent.is_some() {
                self.send_lent(id);
            }
        }
    }

    fn write_stream(&mut self, id: ConnId, bytes: &[u8]) -> Written {
        let short = self.rng.chance(self.faults.short_write);
        let limit = self.faults.pipe_bytes;
        let conn = &mut self.conns[id];
        if conn.up.broken {
            conn.up.told_broken = true;
            return Written::Broken;
        }
        if conn.transport == Transport::Udp {
            return self.write_datagram(id, bytes, short);
        }
        let room = limit.saturating_sub(conn.down.ready.len() + conn.down.in_flight);
        if room < bytes.len() {
            self.fault_counts.one(Fault::SmallPipe);
        }
        if room == 0 {
            conn.wants_room = true;
            return Written::Full;
        }
        let most = bytes.len().min(room);
        let count = if short { self.rng.below(most as u64 + 1) as usize } else { most };
        if count < most {
            self.fault_counts.one(Fault::ShortWrite);
        }
        if count < bytes.len() {
            // Room that exists already is reported immediately; other room when it appears.
            conn.wants_room = count == room;
            conn.writable |= count < room;
        }
        if count == 0 && !bytes.is_empty() {
            return Written::Full;
        }
        if count > 0 {
            if let Some(service) = self.socket_service(id) {
                self.ledger.socket_out(service, count as u64);
            } else if let Site::Client { port, .. } = self.conns[id].site {
                let conn = &mut self.conns[id];
                let service = self.ports[port as usize].service;
                self.ledger.stream_out(service, &mut conn.tail, &bytes[..count]);
            }
            self.send_segment(id, false, Segment::Bytes(bytes[..count].to_vec()));
        }
        Written::Bytes(count)
    }

    fn write_datagram(&mut self, id: ConnId, bytes: &[u8], full: bool) -> Written {
        if full {
            self.conns[id].writable = true;
            return Written::Full;
        }
        match self.takes_datagrams(id) {
            Some(true) if !self.occurs(Fault::Lose, self.faults.lose) => {
                self.send_segment(id, false, Segment::Bytes(bytes.to_vec()));
            }
            Some(false) => self.bounce(id),
            _ => {}
        }
        Written::Bytes(bytes.len())
    }
}

impl Nic for SimNic {
    type Socket = SimSocket;
    /// The network knows all ports in advance; this one starts to listen.
    type Port = ();

    /// Never sleeps: the world controls time.
    fn poll(&mut self, sleep_ns: u64, events: &mut Vec<Event>) {
        events.clear();
        let mut net = lock(&self.net);
        net.asked_sleep_ns = sleep_ns;
        net.send_all_lent(self.worker);
        net.collect_events(self.worker, events);
    }

    fn rx_batch(&self) -> RxBatch {
        RxBatch::new(BATCH_MAX as usize, BUFFER_BYTES)
    }

    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool {
        batch.items.clear();
        batch.overflowed = 0;
        lock(&self.net).receive(self.worker, port, batch)
    }

    fn send(&mut self, port: PortIndex, batch: &mut TxBatch) -> SendOutcome {
        lock(&self.net).transmit(port, batch)
    }

    fn accept(&mut self, port: PortIndex) -> Option<(SimSocket, SocketAddr)> {
        let mut net = lock(&self.net);
        if net.backlog(port, self.worker).is_empty() {
            return None;
        }
        let exhausted = net.exhausted_occurs();
        if exhausted {
            // Retried at a later poll, as for a listener that lacks descriptors.
            net.workers[self.worker].ports[port as usize].news = true;
            return None;
        }
        let conn = net.backlog(port, self.worker).pop_front()?;
        let peer = net.conns[conn].peer;
        drop(net);
        Some((SimSocket { conn: Some(conn), net: self.net.clone() }, peer))
    }

    fn adopt(&mut self, mut socket: SimSocket, key: StreamKey) -> Result<(), NicError> {
        let mut net = lock(&self.net);
        if net.exhausted_occurs() {
            // The socket is dropped after the lock.
            drop(net);
            return Err(NicError::Exhausted);
        }
        let id = socket.conn.take().expect("adopted once");
        let before = net.workers[self.worker].streams.insert(key, id);
        assert_eq!(before, None, "worker {} adopts under a key in use", self.worker);
        let conn = &mut net.conns[id];
        conn.key = Some((self.worker, key));
        conn.readable = conn.up.has_input();
        let Site::Client { port, .. } = conn.site else { unreachable!("clients are accepted") };
        let now_ns = net.now_ns;
        let circumstances = [id as u64, port.into(), self.worker as u64, key.into()];
        net.trace.note(now_ns, "adopt", &circumstances);
        Ok(())
    }

    fn connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> Result<(), NicError> {
        let mut net = lock(&self.net);
        if net.exhausted_occurs() {
            return Err(NicError::Exhausted);
        }
        let Some(id) = net.start_connect(to, transport, (self.worker, key)) else {
            return Err(NicError::Refused("unreachable".into()));
        };
        let before = net.workers[self.worker].streams.insert(key, id);
        assert_eq!(before, None, "worker {} connects under a key in use", self.worker);
        Ok(())
    }

    fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read {
        let mut net = lock(&self.net);
        let Some(id) = net.workers[self.worker].streams.get(&key).copied() else {
            panic!("worker {} reads the unknown stream {key}", self.worker)
        };
        let read = net.read_stream(id, into);
        let count = if let Read::Bytes(count) = read { count } else { 0 };
        let now_ns = net.now_ns;
        net.trace.note(now_ns, "read", &[id as u64, count as u64]);
        read
    }

    fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written {
        let mut net = lock(&self.net);
        let Some(id) = net.workers[self.worker].streams.get(&key).copied() else {
            panic!("worker {} writes the unknown stream {key}", self.worker)
        };
        net.send_lent(id);
        let written = net.write_stream(id, bytes);
        let count = if let Written::Bytes(count) = written { count } else { 0 };
        let now_ns = net.now_ns;
        net.trace.note(now_ns, "write", &[id as u64, count as u64]);
        written
    }

    fn lend(&mut self, key: StreamKey) -> Option<LentStream> {
        let mut net = lock(&self.net);
        if net.exhausted_occurs() {
            return None;
        }
        let id = *net.workers[self.worker].streams.get(&key)?;
        let now_ns = net.now_ns;
        net.trace.note(now_ns, "lend", &[id as u64]);
        net.send_lent(id);
        let lent = net.conns[id].lent.get_or_insert_default().clone();
        if net.conns[id].up.broken {
            net.conns[id].break_lent();
        }
        Some(Box::new(lent))
    }

    fn shutdown(&mut self, key: StreamKey) {
        let mut net = lock(&self.net);
        let Some(id) = net.workers[self.worker].streams.get(&key).copied() else { return };
        let now_ns = net.now_ns;
        net.trace.note(now_ns, "shutdown", &[id as u64]);
        net.send_lent(id);
        net.engine_shutdown(id);
    }

    fn close(&mut self, key: StreamKey, how: Close) {
        let mut net = lock(&self.net);
        let Some(id) = net.workers[self.worker].streams.remove(&key) else { return };
        let now_ns = net.now_ns;
        net.trace.note(now_ns, "close", &[id as u64, u64::from(how == Close::Reset)]);
        net.send_lent(id);
        net.conns[id].break_lent();
        net.engine_close(id, how);
    }

    fn add_port(&mut self, index: PortIndex, (): ()) -> Result<(), NicError> {
        let mut net = lock(&self.net);
        let port = &mut net.workers[self.worker].ports[usize::from(index)];
        assert!(port.stopped, "worker {} opens port {index} twice", self.worker);
        (port.stopped, port.paused, port.news) = (false, false, true);
        Ok(())
    }

    fn stop_port(&mut self, index: PortIndex) {
        let mut net = lock(&self.net);
        let port = &mut net.workers[self.worker].ports[usize::from(index)];
        port.stopped = true;
        port.news = false;
        port.datagrams.clear();
        if net.listeners(index, self.worker).all(|entry| entry.stopped) {
            for id in std::mem::take(net.backlog(index, self.worker)) {
                net.engine_close(id, Close::Reset);
            }
        }
    }

    fn pause_port(&mut self, index: PortIndex, paused: bool) {
        let mut net = lock(&self.net);
        net.workers[self.worker].ports[usize::from(index)].paused = paused;
    }

    fn close_port(&mut self, index: PortIndex) {
        self.stop_port(index);
    }

    fn stop_listening(&mut self) {
        let ports = lock(&self.net).workers[self.worker].ports.len();
        (0..ports).for_each(|index| self.stop_port(index as PortIndex));
    }
}
