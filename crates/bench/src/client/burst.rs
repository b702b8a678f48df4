//! The UDP client with many requests in flight on a few sockets, in GSO batches.
//!
//! Requests are sent in batches from each socket; datagrams of equal length form a GSO batch, which passes the host
//! kernel's stack once, and GRO batches of replies are read at once. A reply is matched by its identity, which is the
//! number of its request: requests in flight are in a table, at their number modulo its size. A number whose place is
//! still in use is skipped.
//!
//! Without identities, replies are matched in the order of the requests of their socket. A lost one makes all later
//! ones of its socket wrong, so the first time-out ends everything in flight there, and the socket only reads until late
//! replies have arrived: all of them, or as long as a time-out. A reply that comes later still, while nothing is in flight, is a duplicate
//! only if all requests of the socket have been answered.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ops::Range;

use sys::time::monotonic_ns;
use sys::{PortSpec, SocketNic, SocketOptions};
use wire::nic::{Nic as _, RxBatch, Transport, TxBatch};

use super::{BURST_WINDOW_MAX, Burst, ClientError, Load, Outcome, Pace, Tally, Workload};

/// Datagrams of one send: sixteen full GSO batches.
const BATCH_ITEMS: usize = 1024;
/// Bytes of one send.
const BATCH_BYTES: usize = 1 << 20;
/// Buffers of one receive call, and their size, which must hold a GRO batch.
const RECEIVE_SLOTS: usize = 64;
const GRO_BYTES: usize = 1 << 16;
/// Maximum number of receive calls on one socket before the others are read.
const READS_MAX: usize = 16;
/// Datagrams of a GSO batch (UDP_MAX_SEGMENTS of the first host kernel that supported it).
const GSO_BATCH_MAX: usize = 64;
/// Most sockets.
const SOCKETS_MAX: usize = 1024;
/// Receive and send buffer of a socket, in bytes as counted by the host kernel.
const BUFFER_BYTES: usize = 4 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Waiting,
    Answered,
    Lost,
}

/// A request in the table.
#[derive(Clone, Copy)]
struct Entry {
    index: u64,
    due_ns: u64,
    sent_ns: u64,
    socket: u16,
    state: State,
}

/// State of one socket.
struct Socket {
    batch: TxBatch,
    /// Its share of the window, and how much of it is in flight.
    depth: usize,
    in_flight: usize,
    /// Closed loop: nothing is sent before there is room for this many.
    train: usize,
    /// Most that are sent together.
    train_max: usize,
    /// Without identities: its requests in flight, oldest first.
    order: VecDeque<u64>,
    /// Without identities: nothing is sent until then.
    waits_until_ns: u64,
    /// Without identities: requests that were given up and have not been answered yet.
    owed: usize,
}

pub(super) struct Run<'w> {
    nic: SocketNic,
    address: SocketAddr,
    received: RxBatch,
    sockets: Vec<Socket>,
    entries: Vec<Entry>,
    /// Number of the next request.
    next: u64,
    /// No request with a lower number is in flight.
    oldest: u64,
    identity: bool,
    tally: Tally,
    workload: &'w mut dyn Workload,
    request: Vec<u8>,
}

/// The local address from which datagrams to `address` are sent.
fn source(address: SocketAddr) -> std::io::Result<SocketAddr> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let probe = UdpSocket::bind(any)?;
    probe.connect(address)?;
    let mut source = probe.local_addr()?;
    source.set_port(0);
    Ok(source)
}

impl<'w> Run<'w> {
    pub(super) fn new(
        address: SocketAddr,
        burst: &Burst,
        load: &Load,
        workload: &'w mut dyn Workload,
    ) -> Result<Self, ClientError> {
        let mut tally = Tally::new(load, BURST_WINDOW_MAX)?;
        let count = burst.sockets;
        if count == 0 || count > load.window.min(SOCKETS_MAX) {
            return Err(ClientError::Connections(count, load.window.min(SOCKETS_MAX)));
        }
        let failed = |error: String| ClientError::Socket(address, error);
        let from = source(address).map_err(|error| failed(error.to_string()))?;
        let ports = vec![PortSpec { transport: Transport::Udp, address: from }; count];
        let options = SocketOptions {
            receive_buffer_bytes: BUFFER_BYTES,
            send_buffer_bytes: BUFFER_BYTES,
            receive_offload: burst.offload,
            segmentation_offload: burst.offload,
            ..SocketOptions::default()
        };
        let nic = SocketNic::open(&ports, options).map_err(|error| failed(error.to_string()))?;
        let slot_bytes = if burst.offload { GRO_BYTES } else { load.reply_bytes_max.max(1) };
        let in_trains = burst.offload && load.pace == Pace::Closed;
        let socket = |i| {
            let depth = load.window / count + usize::from(i < load.window % count);
            let train = match load.train {
                Some(train) => train.clamp(1, depth.max(1)),
                None if in_trains => GSO_BATCH_MAX.min(depth.div_ceil(4)),
                None => 1,
            };
            Socket {
                batch: TxBatch::new(BATCH_ITEMS, BATCH_BYTES),
                depth,
                train,
                train_max: load.train.map_or(BATCH_ITEMS, |_| train),
                in_flight: 0,
                order: VecDeque::new(),
                waits_until_ns: 0,
                owed: 0,
            }
        };
        let sockets = (0..count).map(socket).collect();
        let free = Entry { index: 0, due_ns: 0, sent_ns: 0, socket: 0, state: State::Free };
        tally.begin(load);
        Ok(Self {
            nic,
            address,
            received: RxBatch::new(RECEIVE_SLOTS, slot_bytes),
            sockets,
            entries: vec![free; (4 * load.window).next_power_of_two()],
            next: 0,
            oldest: 0,
            identity: workload.has_identity(),
            tally,
            workload,
            request: Vec::new(),
        })
    }

    pub(super) fn run(mut self) -> Result<Outcome, ClientError> {
        loop {
            let mut found = false;
            for at in 0..self.sockets.len() {
                let Socket { in_flight, waits_until_ns, .. } = self.sockets[at];
                if in_flight > 0 || waits_until_ns > 0 {
                    found |= self.receive(at);
                }
                found |= self.ask(at)?;
            }
            let now_ns = monotonic_ns();
            if self.tally.search_is_due(now_ns) {
                self.search(now_ns);
            }
            if self.tally.turn(found, now_ns) {
                // Duplicates may follow the last reply.
                for at in 0..self.sockets.len() {
                    self.receive(at);
                }
                return Ok(self.tally.finish());
            }
            self.tally.idle(found);
        }
    }

    /// Sends what may be sent now from one socket. Returns whether anything was sent.
    fn ask(&mut self, at: usize) -> Result<bool, ClientError> {
        let now_ns = monotonic_ns();
        let socket = &mut self.sockets[at];
        if socket.depth - socket.in_flight >= socket.train && now_ns >= socket.waits_until_ns {
            socket.waits_until_ns = 0;
            let depth = socket.depth.min(socket.in_flight + socket.train_max);
            while socket.in_flight < depth {
                let mask = self.entries.len() as u64 - 1;
                while self.entries[(self.next & mask) as usize].state == State::Waiting {
                    self.next += 1;
                }
                self.request.clear();
                self.workload.request(self.next, &mut self.request);
                if !socket.batch.room_for(self.request.len()) {
                    break;
                }
                let Some((_, due_ns)) = self.tally.next(now_ns) else { break };
                let entry = Entry {
                    index: self.next,
                    due_ns,
                    sent_ns: now_ns,
                    socket: at as u16,
                    state: State::Waiting,
                };
                self.entries[(self.next & mask) as usize] = entry;
                if !self.identity {
                    socket.order.push_back(self.next);
                }
                let fill = |into: &mut [u8]| into.copy_from_slice(&self.request);
                socket.batch.push(self.address, None, self.request.len(), fill);
                socket.in_flight += 1;
                self.next += 1;
            }
        }
        if socket.batch.is_empty() {
            return Ok(false);
        }
        let sent = self.nic.send(at as u16, &mut socket.batch);
        if sent.refused > 0 {
            let why = std::io::Error::other("the host kernel refused it");
            return Err(ClientError::Send(self.address, self.request.len(), why));
        }
        Ok(sent.sent > 0)
    }

    /// Reads one socket. Returns whether anything had arrived.
    fn receive(&mut self, at: usize) -> bool {
        let mut found = false;
        // A server that sends without end must not keep the loop here.
        for _ in 0..READS_MAX {
            let more = self.nic.recv(at as u16, &mut self.received);
            let now_ns = monotonic_ns();
            found |= !self.received.items.is_empty();
            let items = std::mem::take(&mut self.received.items);
            let address = self.address;
            for datagram in items.iter().filter(|datagram| datagram.peer == address) {
                let range = datagram.offset as usize..(datagram.offset + datagram.len) as usize;
                self.reply(at, range, now_ns);
            }
            self.received.items = items;
            if !more {
                break;
            }
        }
        found
    }

    /// A reply is in `received`.
    fn reply(&mut self, at: usize, range: Range<usize>, now_ns: u64) {
        let reply = &self.received.bytes[range];
        let outcome = &mut self.tally.outcome;
        let socket = &mut self.sockets[at];
        let index = if self.identity {
            self.workload.identify(reply)
        } else if let Some(index) = socket.order.pop_front() {
            Some(index)
        } else if socket.owed > 0 {
            outcome.late += 1;
            socket.owed -= 1;
            if socket.owed == 0 {
                socket.waits_until_ns = 0;
            }
            return;
        } else {
            outcome.duplicated += 1;
            return;
        };
        // An unknown number: a damaged reply.
        let Some(index) = index.filter(|index| *index < self.next) else {
            outcome.wrong += 1;
            return;
        };
        let mask = self.entries.len() as u64 - 1;
        let entry = &mut self.entries[(index & mask) as usize];
        let right = self.workload.accepts(index, reply);
        match entry.state {
            State::Waiting if entry.index == index => {
                entry.state = State::Answered;
                self.sockets[usize::from(entry.socket)].in_flight -= 1;
                self.tally.reply(right, entry.due_ns, now_ns);
            }
            _ if !right => outcome.wrong += 1,
            State::Answered if entry.index == index => outcome.duplicated += 1,
            State::Lost if entry.index == index => {
                entry.state = State::Answered;
                outcome.late += 1;
            }
            // So old that its place has been reused.
            _ => outcome.late += 1,
        }
    }

    /// Gives up requests that have timed out.
    fn search(&mut self, now_ns: u64) {
        let mask = self.entries.len() as u64 - 1;
        while self.oldest < self.next {
            let entry = self.entries[(self.oldest & mask) as usize];
            if entry.index == self.oldest && entry.state == State::Waiting {
                if !self.tally.is_late(entry.sent_ns, now_ns) {
                    break;
                }
                self.give_up(entry, now_ns);
            }
            self.oldest += 1;
        }
    }

    fn give_up(&mut self, entry: Entry, now_ns: u64) {
        let mask = self.entries.len() as u64 - 1;
        let socket = &mut self.sockets[usize::from(entry.socket)];
        let mut lost = vec![entry.index];
        if !self.identity {
            lost = std::mem::take(&mut socket.order).into();
            socket.waits_until_ns = now_ns + self.tally.timeout_ns();
            socket.owed += lost.len();
        }
        for index in lost {
            let entry = &mut self.entries[(index & mask) as usize];
            entry.state = State::Lost;
            socket.in_flight -= 1;
            self.tally.lose(entry.due_ns, now_ns);
        }
    }
}
