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

mod tx_batch;

use std::any::Any;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

pub use self::tx_batch::{GSO_DATAGRAMS_MAX, SharedBytes, TxBatch, TxItem};

/// Index of a port in the worker's list of ports; the same on every worker.
pub type PortIndex = u16;
/// The worker's key of a stream: an accepted connection or a connection to a backend.
pub type StreamKey = u32;

/// A handle of a stream for someone else, see [`Nic::lend`]: an `OwnedFd` of a host kernel, or what stands for it in another network.
pub type LentStream = Box<dyn Any + Send>;

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
    /// The most receive buffers that the next [`Nic::recv`] should fill.
    pub most_buffers: u32,
    /// Number of receive buffers, and their size.
    slots: usize,
    slot_bytes: usize,
    /// Memory that is lent to the first receive buffers.
    lent: Option<Arc<dyn SharedBytes>>,
    places: Vec<Place>,
    /// How many of them the last call has used; see [`Self::use_lent`].
    in_place: usize,
}

/// What is lent to a receive buffer.
#[derive(Clone, Copy, Debug)]
struct Place {
    at: u64,
    len: u32,
    /// What the buffer has from this offset of [`RxBatch::bytes`] on was copied there.
    copied_from: u32,
}

impl RxBatch {
    /// A batch of at most `slots` receive buffers of `slot_bytes` each (a GRO buffer may carry many
    /// datagrams, so `items` can be longer than `slots`).
    pub fn new(slots: usize, slot_bytes: usize) -> Self {
        Self {
            bytes: vec![0; slots * slot_bytes].into_boxed_slice(),
            items: Vec::with_capacity(slots * GRO_DATAGRAMS_MAX),
            overflowed: 0,
            most_buffers: u32::MAX,
            slots,
            slot_bytes,
            lent: None,
            places: Vec::with_capacity(slots),
            in_place: 0,
        }
    }

    /// Size of a receive buffer.
    #[inline]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Lends `len` bytes of memory, from `at` on, to the next receive buffer: the first bytes that it gets may be written there, and the
    /// others behind their place in [`Self::bytes`]. Others may write that memory at any time: what arrived is known from `items`. False
    /// if no buffer is left. [`Self::end_loan`] ends it.
    pub fn lend(&mut self, memory: &Arc<dyn SharedBytes>, at: u64, len: u32) -> bool {
        let fits = self.places.len() < self.slots && len as usize <= self.slot_bytes;
        if fits {
            if !self.lent.as_ref().is_some_and(|lent| Arc::ptr_eq(lent, memory)) {
                assert!(self.places.is_empty(), "the memory of a loan is one");
                self.lent = Some(memory.clone());
            }
            self.places.push(Place { at, len, copied_from: u32::MAX });
        }
        fits
    }

    /// The memory is no longer lent.
    pub fn end_loan(&mut self) {
        self.places.clear();
        self.in_place = 0;
    }

    /// [`Self::end_loan`], and the memory is not kept mapped any longer.
    pub fn forget_lent(&mut self) {
        self.end_loan();
        self.lent = None;
    }

    /// An implementation that receives into lent memory, of at most this many buffers, calls this first. Returns how many have some.
    pub fn use_lent(&mut self, most: usize) -> usize {
        self.in_place = self.places.len().min(most);
        self.in_place
    }

    /// What is lent to a receive buffer, which others may write at any time.
    #[inline]
    pub fn lent_to(&self, slot: usize) -> &[AtomicU8] {
        match (self.places.get(slot), &self.lent) {
            (Some(place), Some(lent)) => lent.cells(place.at, place.len as usize),
            _ => &[],
        }
    }

    /// Writes bytes as if a receive buffer had got them: for an implementation without a host kernel.
    pub fn fill(&mut self, slot: usize, received: &[u8]) {
        let begin = slot * self.slot_bytes;
        let mut skip = 0;
        if let (Some(place), Some(lent)) = (self.places[..self.in_place].get(slot), &self.lent) {
            skip = received.len().min(place.len as usize);
            lent.copy_in(place.at, &received[..skip]);
        }
        self.bytes[begin + skip..][..received.len() - skip].copy_from_slice(&received[skip..]);
    }

    /// Whether bytes of a datagram are in lent memory; [`Self::payload`] is not its payload then.
    #[inline]
    pub fn is_in_place(&self, datagram: &Datagram) -> bool {
        self.place_of(datagram).is_some()
    }

    /// The receive buffer of a datagram that is wholly in lent memory, its offset there, and how many bytes from there on are lent.
    #[inline]
    pub fn place_in_lent(&self, datagram: &Datagram) -> Option<(usize, u32, u32)> {
        let (slot, at, len) = self.place_of(datagram)?;
        (datagram.len <= len - at).then_some((slot, at, len - at))
    }

    #[inline]
    fn place_of(&self, datagram: &Datagram) -> Option<(usize, u32, u32)> {
        if self.in_place == 0 {
            return None;
        }
        let slot = datagram.offset as usize / self.slot_bytes;
        let place = self.places[..self.in_place].get(slot)?;
        let at = datagram.offset - (slot * self.slot_bytes) as u32;
        let lent = at < place.len && datagram.offset < place.copied_from;
        lent.then_some((slot, at, place.len))
    }

    /// Copies these datagrams out of lent memory, with the others behind them in the same receive buffer. What counts is the copy.
    #[inline]
    pub fn copy_from_lent(&mut self, datagrams: Range<usize>) {
        if self.in_place > 0 {
            datagrams.for_each(|first| self.copy_rest(first));
        }
    }

    /// Copies a datagram, and those behind it in the same receive buffer.
    fn copy_rest(&mut self, first: usize) {
        let datagram = self.items[first];
        let Some((slot, at, len)) = self.place_of(&datagram) else { return };
        let Some(lent) = &self.lent else { return };
        let end = self.items[first..]
            .iter()
            .take_while(|next| next.offset as usize / self.slot_bytes == slot)
            .last()
            .map_or(0, |last| last.offset + last.len - (datagram.offset - at));
        let bytes = end.min(len).saturating_sub(at) as usize;
        let into = &mut self.bytes[datagram.offset as usize..][..bytes];
        let place = &mut self.places[slot];
        lent.copy_out(place.at + u64::from(at), into);
        place.copied_from = datagram.offset;
    }

    /// Copies everything that was received out of lent memory.
    pub fn detach(&mut self) {
        self.copy_from_lent(0..self.items.len());
        self.in_place = 0;
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

    /// The first train of at least `least` datagrams, two or more, that begins at `from` or behind it. Shorter ones
    /// are skipped.
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

    /// The payload of one datagram of this batch, which is not [in lent memory](Self::is_in_place).
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

/// The result of one [`Nic::send`]. `sent + refused` datagrams left the batch; `kept` could have been sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOutcome {
    /// Datagrams the host kernel accepted.
    pub sent: usize,
    /// Datagrams the host kernel refused for good; they are gone.
    pub refused: usize,
    /// Items that wait for more in a deferring batch. Others that remain found no room.
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
    /// A UDP port may have datagrams. It may be reported again without new ones, while it has some or now and then.
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

    /// Receives waiting datagrams of a UDP port into `batch` (items cleared first), in one call. Returns whether more may
    /// be waiting. An implementation that does not [use](RxBatch::use_lent) lent memory leaves it alone.
    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool;

    /// Sends the datagrams of `batch` from a UDP port, in order for each destination, and advances it past the
    /// finished ones. If the batch may defer, datagrams that wait for [more](TxItem::more) may be kept.
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

    /// The addresses of an accepted [`Transport::Tcp`] stream: that of the peer, and its own.
    fn stream_addresses(&self, _key: StreamKey) -> Option<(SocketAddr, SocketAddr)> {
        None
    }

    /// Ends the sending direction of a [`Transport::Tcp`] stream: the peer reads an end after what was written. The stream can
    /// still be read.
    fn shutdown(&mut self, key: StreamKey);

    /// Another handle of a [`Transport::Tcp`] stream, for someone else who writes to it; this side writes nothing until that has ended. A
    /// stream that was lent and is closed with [`Close::Reset`] is reset at once, although the other handle is still open. `None`: it cannot be
    /// lent now.
    fn lend(&mut self, _key: StreamKey) -> Option<LentStream> {
        None
    }

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
            // Some came as one buffer.
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
}
