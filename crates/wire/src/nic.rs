//! The network interface of the engine: sockets behind one trait.
//!
//! A [`Nic`] belongs to one worker. It owns that worker's UDP ports, TCP listeners and connections and moves bytes in
//! batches; it never parses them. The worker calls it at fixed points of a turn: at most one [`Nic::poll`], one
//! [`Nic::recv`] and one [`Nic::send`] per UDP port and batch, one [`Nic::read`] and one [`Nic::write`] per ready
//! stream. `sys` implements it with kernel sockets, `sim` with a virtual network that loses, reorders and duplicates,
//! and middleware (tracing, capture, faults) is another `Nic` that wraps one.
//!
//! Streams are identified by a `u32` *key* that the worker chooses (an index into its own tables), so that an
//! implementation can return events without a look-up.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;

/// Index of a port in the worker's list of ports; the same on every worker.
pub type PortIndex = u16;
/// The worker's key of a stream: an accepted connection or a connection to a backend.
pub type StreamKey = u32;

/// Largest UDP payload over IPv4: 65 535 − 20 (IP) − 8 (UDP) bytes (RFC 768, RFC 791).
pub const UDP_PAYLOAD_MAX: usize = 65_507;

/// Receive buffers of a batch, and their size. A GRO buffer holds up to 64 KiB; the additional 17 lines place the
/// buffers' first lines, which are all used, in different cache sets.
const RX_SLOTS: usize = 64;
const RX_SLOT_BYTES: usize = 65_536 + 17 * 64;

/// Maximum number of datagrams of one GRO buffer: the number that a sender on the same machine may put into one GSO
/// batch, which arrives unchanged (`UDP_MAX_SEGMENTS` of Linux, 64 before 6.9 and 128 since, commit 1382e3b6a350).
/// Datagrams from a physical network are merged to at most 64 (`UDP_GRO_CNT_MAX`).
const GRO_DATAGRAMS_MAX: usize = 128;

/// One received datagram inside an [`RxBatch`].
#[derive(Clone, Copy, Debug)]
pub struct Datagram {
    /// Its sender.
    pub peer: SocketAddr,
    /// The address it was sent to, which is the source of replies. `None` when the port is bound to a single address.
    pub local: Option<IpAddr>,
    /// Offset of the payload in [`RxBatch::bytes`].
    pub offset: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// The host kernel truncated the datagram: it was larger than the buffer.
    pub truncated: bool,
    /// Number of the datagrams behind it that are known to be of the same [train](RxBatch::train), without gaps between their
    /// payloads. None of them is truncated or empty.
    pub followed_by: u8,
}

impl Datagram {
    /// Whether another one has the same sender and was sent to the same address.
    #[inline]
    fn is_of_sender(&self, other: &Self) -> bool {
        self.peer == other.peer && self.local == other.local
    }

    /// A datagram that was read from a stream, which has the addresses.
    pub fn of_stream(offset: usize, len: usize) -> Self {
        let unknown = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let (offset, len) = (offset as u32, len as u32);
        Self { peer: unknown, local: None, offset, len, truncated: false, followed_by: 0 }
    }
}

/// A batch of received datagrams and their buffer. It is reused.
#[derive(Debug)]
pub struct RxBatch {
    /// Payload storage, arranged by the implementation.
    pub bytes: Box<[u8]>,
    /// Datagrams received by the last [`Nic::recv`].
    pub items: Vec<Datagram>,
    /// Datagrams the host kernel discarded on this port since the previous call (SO_RXQ_OVFL).
    pub overflowed: u32,
}

impl RxBatch {
    /// A batch of at most `slots` receive buffers of `slot_bytes` each (a GRO buffer may carry many
    /// datagrams, so `items` can be longer than `slots`).
    pub fn new(slots: usize, slot_bytes: usize) -> Self {
        Self {
            bytes: vec![0; slots * slot_bytes].into_boxed_slice(),
            items: Vec::with_capacity(slots * GRO_DATAGRAMS_MAX),
            overflowed: 0,
        }
    }

    /// The train that begins with a datagram of this batch, which is not truncated.
    #[inline]
    pub fn train(&self, first: usize) -> Train {
        let known = 1 + usize::from(self.items[first].followed_by);
        if known > 1 {
            Train { first, count: known, contiguous: true }
        } else {
            self.find_train(first)
        }
    }

    /// The first train of at least `least` datagrams, two or more, that begins at `from` or behind it. Trains that are
    /// shorter are skipped.
    #[inline]
    pub fn next_train(&self, mut from: usize, least: usize) -> Option<Train> {
        while let Some(window) = self.items.get(from..from + least) {
            if usize::from(window[0].followed_by) + 1 < least {
                // From the end: most windows of different senders take one comparison.
                let changes = |at: &usize| !window[*at].is_of_sender(&window[*at - 1]);
                if let Some(at) = (1..least).rev().find(changes) {
                    from += at;
                    continue;
                }
            }
            if window[0].truncated {
                from += 1;
                continue;
            }
            let train = self.train(from);
            if train.count >= least {
                return Some(train);
            }
            from += train.count;
        }
        None
    }

    /// The same where nothing is known about it.
    fn find_train(&self, first: usize) -> Train {
        let head = &self.items[first];
        let (mut count, mut contiguous) = (1, true);
        for next in &self.items[first + 1..] {
            let before = &self.items[first + count - 1];
            let alike = next.is_of_sender(head)
                && before.len == head.len
                && (1..=head.len).contains(&next.len)
                && !next.truncated;
            if !alike {
                break;
            }
            count += 1;
            contiguous &= next.offset == before.offset + before.len;
        }
        Train { first, count, contiguous }
    }

    /// The payload of one datagram of this batch.
    #[inline]
    pub fn payload(&self, datagram: &Datagram) -> &[u8] {
        &self.bytes[datagram.offset as usize..][..datagram.len as usize]
    }
}

/// Consecutive datagrams of a batch from one sender to one address. They have the same length; the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Train {
    /// Index of the first.
    pub first: usize,
    /// How many there are.
    pub count: usize,
    /// There are no gaps between their payloads.
    pub contiguous: bool,
}

/// One datagram to be sent, inside a [`TxBatch`].
#[derive(Clone, Copy, Debug)]
pub struct TxDatagram {
    /// Destination.
    pub peer: SocketAddr,
    /// Source address; `None` uses that of the port.
    pub local: Option<IpAddr>,
    /// Offset of the payload in [`TxBatch::bytes`].
    pub offset: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// More datagrams to its destination will follow, so it may wait for them if its batch [may
    /// defer](TxBatch::may_defer).
    pub more: bool,
}

/// Datagrams to be sent from one port, in order for each destination. Bounded: [`TxBatch::room_for`] returns whether
/// one more fits. Datagrams that the host kernel did not take stay for the next call.
#[derive(Debug)]
pub struct TxBatch {
    /// As long as it has ever been; room for all of `bytes_max` is reserved.
    bytes: Vec<u8>,
    bytes_max: usize,
    used: usize,
    items: Vec<TxDatagram>,
    sent: usize,
    items_max: usize,
    may_defer: bool,
    /// Number of waiting datagrams at the front that were [seen](Self::see).
    seen: usize,
    /// Buffer for payloads that are moved to the front, see [`Self::compact`].
    moving: Vec<u8>,
}

impl TxBatch {
    /// A batch of at most `items_max` datagrams and `bytes_max` bytes.
    pub fn new(items_max: usize, bytes_max: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(bytes_max),
            bytes_max,
            used: 0,
            items: Vec::with_capacity(items_max),
            sent: 0,
            items_max,
            may_defer: false,
            seen: 0,
            moving: Vec::with_capacity(bytes_max),
        }
    }

    /// Whether a datagram of `len` bytes still fits.
    #[inline]
    pub fn room_for(&self, len: usize) -> bool {
        self.items.len() < self.items_max && len <= self.bytes_max - self.used
    }

    /// Appends a datagram of `len` bytes, all of which `fill` writes. The caller has checked [`Self::room_for`].
    #[inline]
    pub fn push(
        &mut self,
        peer: SocketAddr,
        local: Option<IpAddr>,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) {
        self.push_if(peer, local, len, |bytes| {
            fill(bytes);
            true
        });
    }

    /// Like [`Self::push`], but appends nothing if `fill` returns that it could not write. Returns the result of
    /// `fill`.
    // Always inline: then addresses are not copied again, and a payload of known length is not copied by a loop.
    #[inline(always)]
    pub fn push_if(
        &mut self,
        peer: SocketAddr,
        local: Option<IpAddr>,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        debug_assert!(self.room_for(len));
        let offset = self.used;
        if self.bytes.len() < offset + len {
            self.bytes.resize(offset + len, 0);
        }
        let filled = fill(&mut self.bytes[offset..offset + len]);
        if filled {
            self.used += len;
            let (offset, len) = (offset as u32, len as u32);
            self.items.push(TxDatagram { peer, local, offset, len, more: false });
        }
        filled
    }

    /// How many datagrams of `len` bytes still fit.
    #[inline]
    pub fn room_for_many(&self, len: usize) -> usize {
        let items = self.items_max - self.items.len();
        items.min((self.bytes_max - self.used).checked_div(len).unwrap_or(items))
    }

    /// Appends `count` datagrams of `len` bytes to one destination, whose payloads `fill` writes one behind the other.
    /// `more`: further ones will follow. The caller has checked [`Self::room_for_many`].
    pub fn push_many(
        &mut self,
        (peer, local): (SocketAddr, Option<IpAddr>),
        (len, count): (usize, usize),
        more: bool,
        fill: impl FnOnce(&mut [u8]),
    ) {
        debug_assert!(count <= self.room_for_many(len));
        let (begin, end) = (self.used, self.used + len * count);
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        fill(&mut self.bytes[begin..end]);
        self.used = end;
        let item = TxDatagram { peer, local, offset: begin as u32, len: len as u32, more };
        let places = (0..count as u32).map(|n| begin as u32 + n * len as u32);
        self.items.extend(places.map(|offset| TxDatagram { offset, ..item }));
    }

    /// More datagrams to the destination of the last one will follow.
    #[inline]
    pub fn more_follows(&mut self) {
        if let Some(last) = self.items.last_mut() {
            last.more = true;
        }
    }

    /// Sets whether datagrams that may wait for [more](TxDatagram::more) may stay in the next [`Nic::send`].
    pub fn set_may_defer(&mut self, may_defer: bool) {
        self.may_defer = may_defer;
    }

    /// Whether datagrams that may wait for [more](TxDatagram::more) may stay.
    #[inline]
    pub fn may_defer(&self) -> bool {
        self.may_defer
    }

    /// Datagrams not sent yet, in the order in which they will be sent.
    #[inline]
    pub fn waiting(&self) -> &[TxDatagram] {
        &self.items[self.sent..]
    }

    /// Datagrams not sent yet, for an implementation that sends them in another order; the order for each destination
    /// must be preserved.
    #[inline]
    pub fn waiting_mut(&mut self) -> &mut [TxDatagram] {
        &mut self.items[self.sent..]
    }

    /// Marks all waiting datagrams as seen and returns those that were not seen before: a caller that inspects each
    /// datagram once gets it here, even if it waits for several calls.
    pub fn see(&mut self) -> Range<usize> {
        let waiting = self.waiting().len();
        std::mem::replace(&mut self.seen, waiting)..waiting
    }

    /// The payload of one datagram.
    #[inline]
    pub fn payload(&self, departure: &TxDatagram) -> &[u8] {
        &self.bytes[departure.offset as usize..][..departure.len as usize]
    }

    /// All payload storage.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether nothing waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.sent == self.items.len()
    }

    /// Removes the payloads of sent datagrams in front of waiting ones, once they are as many: so no more are moved
    /// than were sent. Without it a batch that never empties would become full. Offsets of datagrams change.
    pub fn compact(&mut self) {
        if self.sent < self.waiting().len() {
            return;
        }
        self.items.drain(..std::mem::take(&mut self.sent));
        self.moving.clear();
        for item in &mut self.items {
            let payload = &self.bytes[item.offset as usize..][..item.len as usize];
            item.offset = self.moving.len() as u32;
            self.moving.extend_from_slice(payload);
        }
        self.used = self.moving.len();
        self.bytes[..self.used].copy_from_slice(&self.moving);
    }

    /// The implementation reports that the first `count` waiting datagrams are finished.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        self.sent += count;
        self.seen = self.seen.saturating_sub(count);
        debug_assert!(self.sent <= self.items.len());
        if self.sent == self.items.len() {
            self.items.clear();
            self.used = 0;
            self.sent = 0;
        }
    }
}

/// The result of one [`Nic::send`]. `sent + refused` datagrams left the batch; `kept` could have been sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOutcome {
    /// Datagrams the host kernel accepted.
    pub sent: usize,
    /// Datagrams the host kernel refused for good; they are gone.
    pub refused: usize,
    /// Datagrams that wait for more in a deferring batch. Others that remain found no room.
    pub kept: usize,
    /// [`Nic::write_datagrams`]: the peer's host has refused an earlier datagram (ICMP).
    pub bounced: bool,
}

/// The result of one [`Nic::read_datagrams`], besides the datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramsRead {
    /// More may be waiting.
    pub more: bool,
    /// The peer's host has refused an earlier datagram (ICMP). The stream can still be used.
    pub bounced: bool,
}

/// The result of one [`Nic::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This many bytes were read (more than 0). For a datagram stream: one datagram, which may be
    /// empty; `into` must have room for [`UDP_PAYLOAD_MAX`] bytes or the rest is lost.
    Bytes(usize),
    /// Nothing at present; an [`Event::Readable`] will report more data.
    Empty,
    /// The peer closed its sending side; everything it sent has been read.
    Closed,
    /// The connection is broken (reset, refused, timed out).
    Broken,
}

/// The result of one [`Nic::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// This many bytes were taken (possibly 0 of 0).
    Bytes(usize),
    /// No room at present; an [`Event::Writable`] will report room.
    Full,
    /// The connection is broken.
    Broken,
}

/// How to end a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// FIN after what was written.
    Graceful,
    /// RST at once.
    Reset,
    /// Of a [`Transport::Udp`] stream to which answers may still come: no stream of this process gets its port for this many
    /// nanoseconds.
    ReservePort {
        /// From now on.
        ns: u64,
    },
}

/// The transport of a stream to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A byte stream: a TCP connection, or a connection of Unix stream sockets.
    Tcp,
    /// A connected UDP socket: one write is one datagram, one read is one datagram.
    Udp,
}

/// An event of [`Nic::poll`]. Readiness is edge-triggered: after an event the worker uses the stream until `Empty` or
/// `Full`, and only then expects another event. On a byte stream, a read or write that moved less than it could have
/// counts as `Empty` or `Full`. New connections come after the events of streams, so that a key that is freed by one
/// and reused by the other gets no stale event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A UDP port may have datagrams.
    Datagrams(PortIndex),
    /// A TCP listener may have connections to accept.
    Connections(PortIndex),
    /// A stream can be read (or is closed, which a read returns).
    Readable(StreamKey),
    /// A stream can be written; for [`Nic::connect`], the attempt succeeded.
    Writable(StreamKey),
    /// A stream failed (a refused [`Nic::connect`], a reset).
    Failed(StreamKey),
}

/// Counters of a [`Nic`] since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Connections accepted and reset at once because no descriptor was free.
    pub shed_connections: u64,
    /// GSO batches the host kernel refused, whose datagrams were then sent one by one.
    pub segmentation_fallbacks: u64,
    /// Checks of the epoll set.
    pub epoll_calls: u64,
    /// Packets that a tap around the NIC saw and could not store.
    pub tap_dropped: u64,
}

/// One worker's network. See the module documentation.
pub trait Nic {
    /// An accepted connection in flight to the worker that will own it.
    type Socket: Send + 'static;
    /// An open port in flight to its worker.
    type Port: Send + 'static;

    /// Collects events into `events` (cleared first). Sleeps at most `sleep_ns` when there are none (0: does not
    /// sleep). The implementation defines what else wakes it early.
    fn poll(&mut self, sleep_ns: u64, events: &mut Vec<Event>);

    /// A batch for [`Self::recv`], with a suitable size and arrangement.
    fn rx_batch(&self) -> RxBatch {
        RxBatch::new(RX_SLOTS, RX_SLOT_BYTES)
    }

    /// Receives waiting datagrams of a UDP port into `batch` (cleared first), in one call. Returns whether more may
    /// be waiting.
    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool;

    /// Sends the datagrams of `batch` from a UDP port, in order for each destination, and advances it past the
    /// finished ones. If the batch may defer, datagrams that wait for [more](TxDatagram::more) may be kept.
    fn send(&mut self, port: PortIndex, batch: &mut TxBatch) -> SendOutcome;

    /// Accepts one connection from a TCP listener; `None` when none waits.
    fn accept(&mut self, port: PortIndex) -> Option<(Self::Socket, SocketAddr)>;

    /// Adopts an accepted connection with this `key`. On `Err` it is closed.
    fn adopt(&mut self, socket: Self::Socket, key: StreamKey) -> Result<(), NicError>;

    /// Starts connecting to a backend with this `key`; [`Event::Writable`] or [`Event::Failed`] follows. A
    /// [`Transport::Udp`] stream is writable at once, without an event.
    fn connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> Result<(), NicError>;

    /// The same for a Unix stream socket, which is a [`Transport::Tcp`] stream from then on. A network without Unix sockets refuses.
    fn connect_local(&mut self, path: &Path, key: StreamKey) -> Result<(), NicError> {
        let _ = key;
        Err(NicError::Refused(format!("no Unix socket {path:?} in this network")))
    }

    /// Reads once from a stream.
    fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read;

    /// Writes once to a stream.
    fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written;

    /// Reads what waits on a [`Transport::Udp`] stream into `batch` (cleared first); the items name no addresses. A stream is
    /// read in this way only, or by [`Self::read`] only.
    fn read_datagrams(&mut self, key: StreamKey, batch: &mut RxBatch) -> DatagramsRead {
        batch.items.clear();
        batch.overflowed = 0;
        let mut offset = 0;
        while batch.bytes.len() - offset >= UDP_PAYLOAD_MAX {
            match self.read(key, &mut batch.bytes[offset..][..UDP_PAYLOAD_MAX]) {
                Read::Bytes(len) => {
                    batch.items.push(Datagram::of_stream(offset, len));
                    offset += len;
                }
                Read::Empty => return DatagramsRead::default(),
                Read::Closed | Read::Broken => return DatagramsRead { more: true, bounced: true },
            }
        }
        DatagramsRead { more: true, bounced: false }
    }

    /// Sends the first `count` datagrams that wait in `batch` to the peer of a [`Transport::Udp`] stream, whatever addresses they
    /// name, in order, and advances it past what is done with. Those of them that stay found no room.
    fn write_datagrams(
        &mut self,
        key: StreamKey,
        batch: &mut TxBatch,
        count: usize,
    ) -> SendOutcome {
        let mut outcome = SendOutcome::default();
        while outcome.sent + outcome.refused < count {
            let Some(datagram) = batch.waiting().first().copied() else { break };
            match self.write(key, batch.payload(&datagram)) {
                Written::Bytes(_) => outcome.sent += 1,
                Written::Full => break,
                Written::Broken if !outcome.bounced => {
                    outcome.bounced = true;
                    continue;
                }
                Written::Broken => outcome.refused += 1,
            }
            batch.advance(1);
        }
        outcome
    }

    /// The host kernel asks the peer of an idle [`Transport::Tcp`] stream whether it is still there, and reports [`Event::Failed`] if it
    /// does not answer. A network without such a test does nothing.
    fn keep_alive(&mut self, _key: StreamKey) {}

    /// Ends the sending direction of a [`Transport::Tcp`] stream: the peer reads an end after what was written. The stream can
    /// still be read.
    fn shutdown(&mut self, key: StreamKey);

    /// Ends a stream; the key is free afterwards. Unknown keys are ignored.
    fn close(&mut self, key: StreamKey, how: Close);

    /// Adds an open port with this `index`, which is free. On `Err` it is closed.
    fn add_port(&mut self, index: PortIndex, port: Self::Port) -> Result<(), NicError>;

    /// Stops listening on one port: no further connection is accepted, datagrams are no longer read. Datagrams in a
    /// [`TxBatch`] can still be sent.
    fn stop_port(&mut self, index: PortIndex);

    /// Pauses or resumes a port. Arrivals at a paused port wait in the host kernel: datagrams are not reported and
    /// end no sleep; each connection that arrives at a listener may be reported, and end a sleep, once. After `false`
    /// the worker checks the port itself. Ports that are stopped or unknown are ignored.
    fn pause_port(&mut self, index: PortIndex, paused: bool);

    /// Closes a port; the index is free afterwards. An unknown one is ignored.
    fn close_port(&mut self, index: PortIndex);

    /// Stops listening everywhere, as [`Self::stop_port`] does on one port.
    fn stop_listening(&mut self);

    /// The current counters; read about once a millisecond. By default all are 0.
    fn counters(&self) -> NicCounters {
        NicCounters::default()
    }
}

/// Why a control operation of a [`Nic`] failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NicError {
    /// The host kernel refused; the text is its error.
    #[error("{0}")]
    Refused(String),
    /// No file descriptor or table entry is free.
    #[error("no free descriptor: raise `ulimit -n` or lower limits.connections")]
    Exhausted,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next train is the one that a look at each datagram finds.
    #[test]
    fn trains_are_found_among_single_datagrams() {
        let mut random = 1u32;
        let mut draw = |below: u32| {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            random % below
        };
        let mut found = [0; 2];
        for _ in 0..2000 {
            let mut rx = RxBatch::new(1, 64);
            let count = 1 + draw(24) as usize;
            let senders = 1 + draw(4);
            for _ in 0..count {
                rx.items.push(Datagram {
                    peer: SocketAddr::from(([127, 0, 0, 1], 1 + draw(senders) as u16)),
                    truncated: draw(20) == 0,
                    ..Datagram::of_stream(draw(2) as usize, [8, 8, 8, 8, 4, 0][draw(6) as usize])
                });
            }
            // Some trains came as one buffer.
            let mut first = 0;
            while first < count {
                let train = rx.train(first).count;
                if !rx.items[first].truncated && draw(2) == 0 {
                    for at in 0..train {
                        rx.items[first + at].followed_by = (train - 1 - at) as u8;
                    }
                }
                first += train;
            }
            for least in 2..6 {
                let (mut at, mut from) = (0, 0);
                while at < count {
                    let train = rx.train(at);
                    let skipped = rx.items[at].truncated || train.count < least;
                    if !skipped {
                        assert_eq!(rx.next_train(from, least), Some(train), "{:?}", rx.items);
                        from = at + train.count;
                    }
                    found[usize::from(skipped)] += 1;
                    at += if rx.items[at].truncated { 1 } else { train.count };
                }
                assert_eq!(rx.next_train(from, least), None, "{:?}", rx.items);
            }
        }
        assert!(found.iter().all(|found| *found > 1000), "{found:?}");
    }

    /// A batch that never empties takes as many datagrams as one that empties, and sends them unchanged.
    #[test]
    fn a_batch_that_never_empties_has_room_again() {
        let mut batch = TxBatch::new(8, 64);
        let peer = |n: u8| SocketAddr::from(([127, 0, 0, 1], u16::from(n) + 1));
        let (mut pushed, mut left, mut seen) = (0u8, 0u8, 0u8);
        while pushed < 200 {
            while batch.room_for(5) && pushed - left < 8 {
                batch.push(peer(pushed), None, 5, |bytes| bytes.fill(pushed));
                pushed += 1;
            }
            let unseen = batch.see();
            for departure in &batch.waiting()[unseen] {
                assert_eq!(batch.payload(departure), [seen; 5], "each datagram is seen once");
                seen += 1;
            }
            assert_eq!(seen, pushed);
            // One in eight datagrams stays, the last one; in the next call it is sent first.
            let leaving = batch.waiting().len() - 1;
            assert!(leaving > 0, "{pushed} came, {left} left, and there is no room");
            for departure in &batch.waiting()[..leaving] {
                assert_eq!(batch.payload(departure), [left; 5]);
                assert_eq!(departure.peer, peer(left));
                left += 1;
            }
            batch.advance(leaving);
            batch.compact();
            assert_eq!(batch.waiting().len(), 1);
            assert_eq!(batch.payload(&batch.waiting()[0]), [left; 5]);
        }
    }

    #[test]
    fn a_train_is_found_whether_its_length_is_known_or_not() {
        let mut batch = RxBatch::new(1, 1024);
        let mut add = |port: u16, offset: u32, len: u32, truncated: bool| {
            let peer = ([127, 0, 0, 1], port).into();
            batch.items.push(Datagram {
                peer,
                local: None,
                offset,
                len,
                truncated,
                followed_by: 0,
            });
        };
        // Two of one length and a shorter one; one of another client; with a gap; truncated; empty.
        for (port, offset, len, truncated) in [
            (1, 0, 10, false),
            (1, 10, 10, false),
            (1, 20, 9, false),
            (1, 29, 9, false),
            (2, 38, 9, false),
            (2, 50, 9, false),
            (2, 59, 9, true),
            (2, 68, 9, false),
            (2, 77, 0, false),
            (2, 77, 0, false),
        ] {
            add(port, offset, len, truncated);
        }
        let train = |batch: &RxBatch, first| {
            let Train { count, contiguous, .. } = batch.train(first);
            (count, contiguous)
        };
        assert_eq!(train(&batch, 0), (3, true));
        assert_eq!(train(&batch, 1), (2, true));
        assert_eq!(train(&batch, 2), (2, true));
        assert_eq!(train(&batch, 3), (1, true));
        assert_eq!(train(&batch, 4), (2, false));
        assert_eq!([7, 8, 9].map(|first| train(&batch, first)), [(1, true); 3]);
        batch.items[0].followed_by = 1;
        assert_eq!(train(&batch, 0), (2, true), "as the receiver says");
    }

    #[test]
    fn many_datagrams_are_appended_at_once() {
        let peer = SocketAddr::from(([127, 0, 0, 1], 9));
        let mut batch = TxBatch::new(8, 64);
        batch.push(peer, None, 4, |bytes| bytes.fill(1));
        assert_eq!(batch.room_for_many(20), 3);
        batch.push_many((peer, None), (20, 3), true, |bytes| {
            bytes.chunks_mut(20).zip(2..).for_each(|(bytes, n)| bytes.fill(n));
        });
        assert_eq!((batch.room_for_many(1), batch.room_for_many(0)), (0, 4));
        let sent: Vec<_> =
            batch.waiting().iter().map(|d| (batch.payload(d).to_vec(), d.more)).collect();
        let expected =
            [(vec![1; 4], false), (vec![2; 20], true), (vec![3; 20], true), (vec![4; 20], true)];
        assert_eq!(sent, expected);
    }

    #[test]
    fn remaining_datagrams_are_moved_in_their_order() {
        let mut batch = TxBatch::new(8, 64);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        for n in 0..6u8 {
            batch.push(peer, None, usize::from(n) + 1, |bytes| bytes.fill(n));
        }
        batch.waiting_mut().reverse();
        batch.advance(2);
        // Fewer were sent than remain: nothing is moved yet.
        batch.compact();
        assert!(!batch.room_for(64 - 20), "sent datagrams still occupy their room");
        batch.advance(1);
        batch.compact();
        let stay: Vec<_> = batch.waiting().iter().map(|d| batch.payload(d).to_vec()).collect();
        assert_eq!(stay, [vec![2; 3], vec![1; 2], vec![0; 1]]);
        assert!(batch.room_for(64 - 6) && !batch.room_for(64 - 5));
    }
}
