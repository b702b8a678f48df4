//! One connection of the virtual network: two pipes between the engine and a model peer.
//!
//! Both directions carry bytes (TCP) or datagrams (a connected UDP socket to a backend) with delay,
//! in order, through a bounded pipe. The engine's end reports edges; see [`wire::nic::Event`].

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use wire::nic::{Close, StreamKey, Transport};

use crate::message::ReplyStream;
use crate::shared::lock;

/// Identifier of a connection; never reused.
pub type ConnId = usize;

/// Addresses of model clients: distinct ports, some of them over IPv6.
pub fn client_address(number: u32) -> SocketAddr {
    let high = (number >> 14) as u8;
    let ip = match number % 4 {
        0 => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, high.into()]),
        _ => IpAddr::from([198, 51, 100, high]),
    };
    SocketAddr::new(ip, 1024 + (number & 0x3fff) as u16)
}

/// A unit of transfer in a pipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Bytes, or one datagram.
    Bytes(Vec<u8>),
    /// End of the stream.
    Fin,
    /// The connection is broken.
    Reset,
}

/// One direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pipe {
    /// Bytes the reader may read.
    pub(crate) ready: VecDeque<u8>,
    /// Datagrams the reader may read.
    pub(crate) datagrams: VecDeque<Vec<u8>>,
    /// Bytes in flight.
    pub(crate) in_flight: usize,
    /// The writer has finished; the reader has or will have all data.
    pub(crate) finished: bool,
    /// The end arrived.
    pub(crate) ended: bool,
    /// A reset arrived.
    pub(crate) broken: bool,
    /// A call has reported the reset. As on a host, the next read finds the end of the stream.
    pub(crate) told_broken: bool,
    /// The reader is gone: arriving data is answered with a reset.
    pub(crate) abandoned: bool,
    /// Nothing may arrive before this.
    pub(crate) last_due_ns: u64,
}

impl Pipe {
    /// Whether a read would return something new.
    pub(crate) fn has_input(&self) -> bool {
        !self.ready.is_empty() || !self.datagrams.is_empty() || self.ended || self.broken
    }

    /// Takes up to `max` bytes.
    pub(crate) fn take(&mut self, max: usize) -> Vec<u8> {
        let count = self.ready.len().min(max);
        let (first, second) = self.ready.as_slices();
        let of_first = count.min(first.len());
        let taken = [&first[..of_first], &second[..count - of_first]].concat();
        self.ready.drain(..count);
        taken
    }
}

/// The kind of peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// A client, by this port and worker.
    Client { port: u16, worker: usize },
    /// A backend, by its index.
    Backend(usize),
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The backend has not answered yet.
    Connecting,
    /// Established.
    Up,
}

/// A connection. See the module's text.
#[derive(Clone, Debug)]
pub(crate) struct Conn {
    pub(crate) transport: Transport,
    pub(crate) site: Site,
    pub(crate) peer: SocketAddr,
    pub(crate) phase: Phase,
    /// From the peer to the engine.
    pub(crate) up: Pipe,
    /// From the engine to the peer.
    pub(crate) down: Pipe,
    /// The engine's identifier for it: (worker, key).
    pub(crate) key: Option<(usize, StreamKey)>,
    /// Edges that have not been reported to the engine.
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) failed: bool,
    /// A write of the engine was short, and it waits for an edge.
    pub(crate) wants_room: bool,
    /// Bytes of an incomplete reply, for the ledger.
    pub(crate) tail: ReplyStream,
    /// How the engine ended it.
    pub(crate) closed: Option<Close>,
    /// The peer closed it completely (not only its sending side).
    pub(crate) peer_closed: bool,
    /// What was written through a handle that was lent.
    pub(crate) lent: Option<Lent>,
}

/// A handle of a connection that the engine lends ([`wire::nic::Nic::lend`]). The network takes what was written before it does anything else on
/// the connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lent(Arc<Mutex<LentBytes>>);

#[derive(Debug, Default)]
struct LentBytes {
    written: Vec<u8>,
    /// The connection has ended.
    broken: bool,
}

impl Lent {
    /// Writes; false: the connection has ended.
    pub(crate) fn write(&self, bytes: &[u8]) -> bool {
        let mut state = lock(&self.0);
        if !state.broken {
            state.written.extend_from_slice(bytes);
        }
        !state.broken
    }

    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.0).written)
    }

    fn break_off(&self) {
        lock(&self.0).broken = true;
    }
}

impl Conn {
    pub(crate) fn new(transport: Transport, site: Site, peer: SocketAddr, phase: Phase) -> Self {
        Self {
            transport,
            site,
            peer,
            phase,
            up: Pipe::default(),
            down: Pipe::default(),
            key: None,
            readable: false,
            writable: false,
            failed: false,
            wants_room: false,
            tail: ReplyStream::default(),
            closed: None,
            peer_closed: false,
            lent: None,
        }
    }

    /// Bytes that were written through a handle.
    pub(crate) fn take_lent(&mut self) -> Vec<u8> {
        self.lent.as_ref().map(Lent::take).unwrap_or_default()
    }

    /// Nothing more can be written through handles.
    pub(crate) fn break_lent(&mut self) {
        if let Some(lent) = self.lent.take() {
            lent.break_off();
        }
    }
}
