//! The peers of blocks' sockets: clients that send numbered bytes and expect them back, and servers that echo.

use std::collections::VecDeque;
use std::net::SocketAddr;

use wire::nic::{Close, PortIndex};

use crate::conn::ConnId;
use crate::conn::client_address;
use crate::fault::Fault;
use crate::net::{Network, PeerRead, Reachability};
use crate::rng::{Rng, mix};

/// How a client ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It sends everything, ends its direction, and reads everything.
    Orderly,
    /// It closes the connection after this many bytes.
    Close(u64),
    /// It resets the connection after this many bytes.
    Reset(u64),
    /// It stops reading after this many bytes.
    Deaf(u64),
    /// It sends nothing after this many bytes, and stays until the other side ends.
    Idle(u64),
}

/// What a client has found at the end of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The end, after all bytes.
    All,
    /// A reset.
    Reset,
    /// It has ended the connection itself.
    Left,
}

/// A client of a listener of blocks.
#[derive(Clone, Debug)]
pub struct SocketClient {
    conn: ConnId,
    seed: u64,
    total: u64,
    sent: u64,
    received: u64,
    ending: Ending,
    /// Whether what comes back is checked: not if the block may send anything.
    judged: bool,
    /// Whether the block may close the connection early.
    may_be_cut: bool,
    found: Option<Found>,
}

/// Byte `n` of a client's stream.
fn byte(seed: u64, n: u64) -> u8 {
    (mix(seed ^ (n / 8)) >> (8 * (n % 8))) as u8
}

/// The longest piece that a peer writes or reads at once.
const PIECE_BYTES: u64 = 2000;

impl SocketClient {
    /// Connects; it will send `total` bytes.
    pub fn connect(
        net: &mut Network,
        (peer, port): (SocketAddr, PortIndex),
        total: u64,
        ending: Ending,
    ) -> Self {
        let conn = net.connect(peer, port);
        let seed = u64::from(peer.port()) << 32 | conn as u64;
        Self {
            conn,
            seed,
            total,
            sent: 0,
            received: 0,
            ending,
            judged: true,
            may_be_cut: false,
            found: None,
        }
    }

    /// The same client of a block that may close connections early.
    pub fn of_hasty_block(self) -> Self {
        Self { may_be_cut: true, ..self }
    }

    /// The same client of a block that may send anything.
    pub fn of_hostile_block(self) -> Self {
        Self { judged: false, ..self }
    }

    /// Ends the connection, in order or not.
    pub fn end(&mut self, net: &mut Network, how: Close) {
        if self.found.is_none() {
            self.leave(net, how);
        }
    }

    /// How its connection has ended.
    pub fn found(&self) -> Option<Found> {
        self.found
    }

    /// Bytes that came back.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// One that is idle sends up to this many bytes now.
    pub fn send_up_to(&mut self, count: u64, net: &mut Network, rng: &mut Rng) {
        self.ending = Ending::Idle(count);
        let tries = count - self.sent;
        for _ in 0..tries {
            self.send(net, rng);
        }
    }

    /// From now on it reads, and ends in order.
    pub fn recover(&mut self) {
        self.ending = Ending::Orderly;
    }

    /// Sends and receives what can be.
    pub fn step(&mut self, net: &mut Network, rng: &mut Rng) {
        if self.found.is_some() {
            return;
        }
        self.send(net, rng);
        match self.ending {
            Ending::Close(after) if self.sent >= after => self.leave(net, Close::Graceful),
            Ending::Reset(after) if self.sent >= after => self.leave(net, Close::Reset),
            Ending::Deaf(after) if self.received >= after => {}
            _ => self.receive(net, rng),
        }
    }

    fn send(&mut self, net: &mut Network, rng: &mut Rng) {
        let most = match self.ending {
            Ending::Idle(most) => most.min(self.total),
            _ => self.total,
        };
        let count = rng.between(1, PIECE_BYTES).min(most - self.sent);
        if count == 0 {
            return;
        }
        let bytes: Vec<u8> = (self.sent..self.sent + count).map(|n| byte(self.seed, n)).collect();
        self.sent += net.peer_write(self.conn, &bytes) as u64;
        if self.sent == self.total {
            net.peer_shutdown(self.conn);
        }
    }

    fn receive(&mut self, net: &mut Network, rng: &mut Rng) {
        match net.peer_read(self.conn, rng.between(1, PIECE_BYTES) as usize) {
            PeerRead::Empty => {}
            PeerRead::Broken => self.found = Some(Found::Reset),
            PeerRead::Bytes(bytes) => {
                let from = self.received;
                self.received += bytes.len() as u64;
                let right = bytes.iter().zip(from..).all(|(is, n)| *is == byte(self.seed, n));
                let (conn, sent) = (self.conn, self.sent);
                net.ledger.must(!self.judged || right && self.received <= sent, || {
                    format!("connection {conn} sent {sent} bytes and got others from {from} on")
                });
            }
            PeerRead::Closed => {
                let Self { conn, received, total, .. } = *self;
                let whole = received == total || self.may_be_cut;
                net.ledger.must(!self.judged || whole, || {
                    format!("connection {conn} ended in order after {received} of {total} bytes")
                });
                net.peer_close(self.conn, Close::Graceful);
                self.found = Some(Found::All);
            }
        }
    }

    fn leave(&mut self, net: &mut Network, how: Close) {
        net.peer_close(self.conn, how);
        self.found = Some(Found::Left);
    }
}

/// A server to which blocks connect; it echoes.
#[derive(Clone, Debug)]
pub struct EchoServer {
    /// Its place among the backends of the network.
    backend: usize,
    /// It refuses connections from now on, ignores them, or takes them again; per mille of the steps.
    pub doors: u32,
    conns: Vec<Echo>,
}

#[derive(Clone, Debug)]
struct Echo {
    conn: ConnId,
    held: VecDeque<u8>,
    ended: bool,
}

impl EchoServer {
    /// The server at this place.
    pub fn new(backend: usize) -> Self {
        Self { backend, doors: 0, conns: Vec::new() }
    }

    /// From now on it can be reached.
    pub fn recover(&mut self, net: &mut Network) {
        self.doors = 0;
        net.set_reachability(self.backend, Reachability::Open { after_ns: 1000 });
    }

    fn change_reachability(&self, net: &mut Network, rng: &mut Rng) {
        let after_ns = rng.between(1_000, 2_000_000);
        let reachability = match rng.below(6) {
            0 => Reachability::Refused { after_ns },
            1 => Reachability::Silent,
            2 => Reachability::Unreachable,
            _ => Reachability::Open { after_ns },
        };
        if !matches!(reachability, Reachability::Open { .. }) {
            net.fault_counts.one(Fault::SocketDoor);
        }
        net.set_reachability(self.backend, reachability);
    }

    /// Accepts, receives and sends.
    pub fn step(&mut self, net: &mut Network, rng: &mut Rng) {
        if rng.chance(self.doors) {
            self.change_reachability(net, rng);
        }
        while let Some(conn) = net.take_arrived(self.backend) {
            self.conns.push(Echo { conn, held: VecDeque::new(), ended: false });
        }
        self.conns.retain_mut(|echo| echo.step(net, rng));
    }
}

impl Echo {
    /// Returns whether it goes on.
    fn step(&mut self, net: &mut Network, rng: &mut Rng) -> bool {
        if self.held.len() < PIECE_BYTES as usize && !self.ended {
            match net.peer_read(self.conn, rng.between(1, PIECE_BYTES) as usize) {
                PeerRead::Empty => {}
                PeerRead::Bytes(bytes) => self.held.extend(bytes),
                PeerRead::Closed => self.ended = true,
                PeerRead::Broken => return false,
            }
        }
        let count = net.peer_write(self.conn, self.held.make_contiguous());
        self.held.drain(..count);
        let over = self.ended && self.held.is_empty();
        if over {
            net.peer_close(self.conn, Close::Graceful);
        }
        !over
    }
}

/// Clients of one listener, one after the other, in a run.
#[derive(Clone, Debug)]
pub struct SocketLoad {
    /// The service.
    pub service: usize,
    /// Its listener.
    pub port: PortIndex,
    /// How many clients are to come.
    pub left: u32,
    /// Most of them at a time.
    pub at_once: usize,
    /// The most bytes that one sends.
    pub bytes_max: u64,
    /// Shortest and longest time between two steps, in nanoseconds.
    pub pause_ns: (u64, u64),
    /// One that stops reading, per mille.
    pub deaf: u32,
    /// One that closes or resets its connection, per mille.
    pub leaves: u32,
    /// Whether blocks send back what they get.
    pub judged: bool,
    /// Whether blocks may close connections early.
    pub may_be_cut: bool,
    /// When the next step is.
    pub next_ns: u64,
    /// Randomness of its own.
    pub rng: Rng,
    clients: Vec<SocketClient>,
    in_order: u32,
}

impl SocketLoad {
    /// No clients yet; change what the plan is about.
    pub fn new(service: usize, port: PortIndex, rng: Rng) -> Self {
        Self {
            service,
            port,
            left: 0,
            at_once: 4,
            bytes_max: 20_000,
            pause_ns: (0, 0),
            deaf: 0,
            leaves: 0,
            judged: true,
            may_be_cut: false,
            next_ns: 0,
            rng,
            clients: Vec::new(),
            in_order: 0,
        }
    }

    /// Clients that got all their bytes back.
    pub fn in_order(&self) -> u32 {
        self.in_order
    }

    /// When the next step is; never, if there are no clients.
    pub fn due_ns(&self) -> u64 {
        if self.left == 0 && self.clients.is_empty() { u64::MAX } else { self.next_ns }
    }

    /// No more clients come; those that are there read, and end in order.
    pub fn stop(&mut self) {
        self.left = 0;
        self.clients.iter_mut().for_each(SocketClient::recover);
    }

    /// All clients leave.
    pub fn leave(&mut self, net: &mut Network) {
        self.left = 0;
        self.clients.iter_mut().for_each(|client| client.end(net, Close::Reset));
        self.clients.clear();
    }

    /// Clients that have not ended.
    pub fn open(&self) -> usize {
        self.clients.len()
    }

    /// One client may come, and all do what they can.
    pub fn step(&mut self, net: &mut Network, next_id: &mut u32) {
        if net.now_ns() < self.due_ns() {
            return;
        }
        self.next_ns = net.now_ns() + self.rng.between(self.pause_ns.0, self.pause_ns.1);
        if self.left > 0 && self.clients.len() < self.at_once && !net.ending {
            self.left -= 1;
            self.come(net, next_id);
        }
        for client in &mut self.clients {
            client.step(net, &mut self.rng);
        }
        for client in self.clients.extract_if(.., |client| client.found().is_some()) {
            self.in_order += u32::from(client.found() == Some(Found::All));
        }
    }

    fn come(&mut self, net: &mut Network, next_id: &mut u32) {
        let total = self.rng.between(1, self.bytes_max);
        let after = self.rng.below(total);
        let ending = match () {
            () if net.fault_counts.occurs(&mut self.rng, Fault::SocketDeaf, self.deaf) => {
                Ending::Deaf(after)
            }
            () if net.fault_counts.occurs(&mut self.rng, Fault::SocketLeave, self.leaves) => {
                self.rng.pick(&[Ending::Close(after), Ending::Reset(after)])
            }
            () => Ending::Orderly,
        };
        let peer = client_address(*next_id);
        *next_id += 1;
        let client = SocketClient::connect(net, (peer, self.port), total, ending);
        let Self { judged, may_be_cut, .. } = *self;
        self.clients.push(SocketClient { judged, may_be_cut, ..client });
    }
}
