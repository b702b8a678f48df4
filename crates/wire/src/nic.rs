//! The network as the engine sees it: sockets behind one trait.
//!
//! A [`Nic`] belongs to one worker. It owns that worker's UDP ports, TCP listeners and connections
//! and moves bytes in batches; it never parses them. The worker calls it at fixed places of a turn:
//! at most one [`Nic::poll`], one [`Nic::recv`] and one [`Nic::send`] per UDP port and batch, one
//! [`Nic::read`] and one [`Nic::write`] per ready stream. `sys` implements it over kernel sockets,
//! `sim` over a virtual network that loses, reorders and duplicates, and middleware (tracing,
//! capture, faults) is just another `Nic` around one.
//!
//! Streams are named by a `u32` *key* the worker chooses (an index into its own tables), so that an
//! implementation can hand events back without a look-up.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;

/// Index of a port in the worker's list of ports; the same on every worker.
pub type PortIndex = u16;
/// The worker's name for a stream: an accepted connection or a connection to a backend.
pub type StreamKey = u32;

/// Largest UDP payload over IPv4: 65 535 − 20 (IP) − 8 (UDP) bytes (RFC 768, RFC 791).
pub const UDP_PAYLOAD_MAX: usize = 65_507;

/// Receive buffers of a batch, and their size. A GRO buffer holds up to 64 KiB; the 17 lines more keep the
/// buffers' first lines, which all are used, out of each other's cache sets.
const RX_SLOTS: usize = 64;
const RX_SLOT_BYTES: usize = 65_536 + 17 * 64;

/// Most datagrams of one GRO buffer: what a sender on the same machine may put into one train, which arrives as it left
/// (`UDP_MAX_SEGMENTS` of Linux, 64 before 6.9 and 128 since, commit 1382e3b6a350). What came over a wire is gathered to
/// at most 64 (`UDP_GRO_CNT_MAX`).
const GRO_DATAGRAMS_MAX: usize = 128;

/// One received datagram inside an [`RxBatch`].
#[derive(Clone, Copy, Debug)]
pub struct Datagram {
    /// Who sent it.
    pub peer: SocketAddr,
    /// The address it was sent to; replies leave from there. `None` when the port is bound to a
    /// single address, which then is the answer.
    pub local: Option<IpAddr>,
    /// Offset of the payload in [`RxBatch::bytes`].
    pub offset: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// The host kernel cut the datagram: it was larger than the buffer.
    pub truncated: bool,
}

impl Datagram {
    /// One that was read from a stream: its addresses are the stream's.
    pub fn of_stream(offset: usize, len: usize) -> Self {
        let nobody = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let (offset, len) = (offset as u32, len as u32);
        Self { peer: nobody, local: None, offset, len, truncated: false }
    }
}

/// A batch of received datagrams and the buffer that holds them. Reused for ever.
#[derive(Debug)]
pub struct RxBatch {
    /// Payload storage; the implementation decides the arrangement.
    pub bytes: Box<[u8]>,
    /// What was received by the last [`Nic::recv`].
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

    /// The payload of one datagram of this batch.
    #[inline]
    pub fn payload(&self, datagram: &Datagram) -> &[u8] {
        &self.bytes[datagram.offset as usize..][..datagram.len as usize]
    }
}

/// One datagram to be sent, inside a [`TxBatch`].
#[derive(Clone, Copy, Debug)]
pub struct TxDatagram {
    /// Whom to send to.
    pub peer: SocketAddr,
    /// The source address to use; `None` leaves it to the port's own binding.
    pub local: Option<IpAddr>,
    /// Offset of the payload in [`TxBatch::bytes`].
    pub offset: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// More for its destination is on its way, so it may wait for that where its batch [is patient](TxBatch::may_defer).
    pub more: bool,
}

/// Datagrams waiting to leave one port, each destination's in order. Bounded: [`TxBatch::room_for`] says whether one
/// more fits. What the host kernel did not take stays for the next call.
#[derive(Debug)]
pub struct TxBatch {
    /// As long as it ever had to be; room for all of `bytes_max` is reserved.
    bytes: Vec<u8>,
    bytes_max: usize,
    used: usize,
    items: Vec<TxDatagram>,
    sent: usize,
    items_max: usize,
    may_defer: bool,
    /// Of those that wait, so many from the front were [seen](Self::see).
    seen: usize,
    /// Payloads on their way to the front, see [`Self::compact`].
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

    /// Appends a datagram of `len` bytes that `fill` writes, every one of them. The caller has asked
    /// [`Self::room_for`].
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

    /// As [`Self::push`], unless `fill` says that it could not: then nothing is appended. Returns what
    /// `fill` says.
    // Always inline: addresses are not copied on the way, and a payload of a known length not by a loop.
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

    /// More for the destination of the last datagram is on its way.
    #[inline]
    pub fn more_follows(&mut self) {
        if let Some(last) = self.items.last_mut() {
            last.more = true;
        }
    }

    /// Says whether what may wait for [more](TxDatagram::more) may stay behind in the next [`Nic::send`].
    pub fn set_may_defer(&mut self, may_defer: bool) {
        self.may_defer = may_defer;
    }

    /// Whether what may wait for [more](TxDatagram::more) may stay behind.
    #[inline]
    pub fn may_defer(&self) -> bool {
        self.may_defer
    }

    /// Datagrams not sent yet, in the order in which they will leave if nobody changes it.
    #[inline]
    pub fn waiting(&self) -> &[TxDatagram] {
        &self.items[self.sent..]
    }

    /// Datagrams not sent yet, for an implementation that sends them in another order: each
    /// destination's must keep theirs.
    #[inline]
    pub fn waiting_mut(&mut self) -> &mut [TxDatagram] {
        &mut self.items[self.sent..]
    }

    /// Takes note of all that wait now and returns those that were not seen before: whoever looks at each once finds it here, may it
    /// wait for several calls.
    pub fn see(&mut self) -> Range<usize> {
        let waiting = self.waiting().len();
        std::mem::replace(&mut self.seen, waiting)..waiting
    }

    /// The payload of one departure.
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

    /// Takes back the room of datagrams that have left before others that stay, once they are as many: so no more are moved
    /// than have left. Without it a batch that never empties is full some day. Offsets of departures change.
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

    /// The implementation reports that the first `count` waiting datagrams are done with.
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

/// What one [`Nic::send`] achieved. `sent + refused` datagrams left the batch, `kept` could have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOutcome {
    /// Datagrams the host kernel accepted.
    pub sent: usize,
    /// Datagrams the host kernel refused for good; they are gone.
    pub refused: usize,
    /// Datagrams that wait for more in a patient batch. Others that are still there found no room.
    pub kept: usize,
    /// [`Nic::write_datagrams`]: the peer's host has refused an earlier datagram (ICMP).
    pub bounced: bool,
}

/// What one [`Nic::read_datagrams`] found, besides the datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramsRead {
    /// More may be waiting.
    pub more: bool,
    /// The peer's host has refused an earlier datagram (ICMP). The stream can still be used.
    pub bounced: bool,
}

/// What one [`Nic::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This many bytes were read (more than 0). For a datagram stream: one datagram, which may be
    /// empty; `into` must have room for [`UDP_PAYLOAD_MAX`] bytes or the rest is lost.
    Bytes(usize),
    /// Nothing now; a [`Event::Readable`] will say when there is more.
    Empty,
    /// The peer closed its sending side; everything it sent has been read.
    Closed,
    /// The connection is broken (reset, refused, timed out).
    Broken,
}

/// What one [`Nic::write`] achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// This many bytes were taken (possibly 0 of 0).
    Bytes(usize),
    /// No room now; a [`Event::Writable`] will say when there is.
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
}

/// What a stream to a backend is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A byte stream.
    Tcp,
    /// A connected UDP socket: one write is one datagram, one read is one datagram.
    Udp,
}

/// What [`Nic::poll`] reports. Readiness is edge-triggered: after an event the worker uses the
/// stream until `Empty` or `Full`, and only then expects another event. On a byte stream, a read or
/// write that moved less than it could have counts as `Empty` or `Full`. New connections come after
/// the events of streams, so that a key freed by one and given to the other meets no stale event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A UDP port may have datagrams.
    Datagrams(PortIndex),
    /// A TCP listener may have connections to accept.
    Connections(PortIndex),
    /// A stream can be read (or is closed, which reading tells).
    Readable(StreamKey),
    /// A stream can be written; for [`Nic::connect`], the attempt succeeded.
    Writable(StreamKey),
    /// A stream failed (a refused [`Nic::connect`], a reset).
    Failed(StreamKey),
}

/// What went on below a [`Nic`] since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Connections accepted and reset at once because no descriptor was free.
    pub shed_connections: u64,
    /// Trains the host kernel refused, which were then sent one by one.
    pub segmentation_fallbacks: u64,
    /// Looks at the epoll set.
    pub epoll_calls: u64,
    /// Packets that a tap around the NIC saw and could not keep.
    pub tap_dropped: u64,
}

/// One worker's network. See the module's text.
pub trait Nic {
    /// An accepted connection on its way to the worker that will own it.
    type Socket: Send + 'static;
    /// An open port on its way to its worker.
    type Port: Send + 'static;

    /// Collects events into `events` (cleared first). Sleeps at most `sleep_ns` when there are none
    /// (0: does not sleep). What wakes it early besides the network is the implementation's business.
    fn poll(&mut self, sleep_ns: u64, events: &mut Vec<Event>);

    /// A batch for [`Self::recv`], of the size and arrangement that suit it.
    fn rx_batch(&self) -> RxBatch {
        RxBatch::new(RX_SLOTS, RX_SLOT_BYTES)
    }

    /// Receives what is waiting on a UDP port into `batch` (cleared first), in one call. Returns
    /// whether more may be waiting.
    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool;

    /// Sends what `batch` holds from a UDP port, each destination's datagrams in order, and advances it past what
    /// is done with. Of a patient batch it may keep what waits for [more](TxDatagram::more).
    fn send(&mut self, port: PortIndex, batch: &mut TxBatch) -> SendOutcome;

    /// Accepts one connection from a TCP listener; `None` when none waits.
    fn accept(&mut self, port: PortIndex) -> Option<(Self::Socket, SocketAddr)>;

    /// Takes an accepted connection under the name `key`. `Err` gives it up (and closes it).
    fn adopt(&mut self, socket: Self::Socket, key: StreamKey) -> Result<(), NicError>;

    /// Starts connecting to a backend under the name `key`; [`Event::Writable`] or
    /// [`Event::Failed`] follows. A [`Transport::Udp`] stream is writable at once; no event says so.
    fn connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> Result<(), NicError>;

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

    /// Ends a stream; the key is free afterwards. Unknown keys are ignored.
    fn close(&mut self, key: StreamKey, how: Close);

    /// Takes an open port under the name `index`, which is free. `Err` gives it up (and closes it).
    fn add_port(&mut self, index: PortIndex, port: Self::Port) -> Result<(), NicError>;

    /// Stops listening on one port: no further connection is accepted, datagrams are no longer read.
    /// What waits in a [`TxBatch`] can still be sent.
    fn stop_port(&mut self, index: PortIndex);

    /// Lets a port be, or takes it up again. What comes to one that is held waits in the host kernel: datagrams are not
    /// reported and end no sleep; each connection that arrives at a listener may still be reported, and end one, once. With
    /// `false` the worker looks by itself. Ports that are stopped or unknown are ignored.
    fn pause_port(&mut self, index: PortIndex, paused: bool);

    /// Closes a port; the index is free afterwards. One that is unknown is ignored.
    fn close_port(&mut self, index: PortIndex);

    /// Stops listening everywhere, as [`Self::stop_port`] does on one port.
    fn stop_listening(&mut self);

    /// What went on so far; asked about once a millisecond. A NIC that counts nothing says so.
    fn counters(&self) -> NicCounters {
        NicCounters::default()
    }
}

/// Why a control operation of a [`Nic`] failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NicError {
    /// The host kernel refused; the text is its own.
    #[error("{0}")]
    Refused(String),
    /// No file descriptor or table entry is free.
    #[error("no free descriptor: raise `ulimit -n` or lower limits.connections")]
    Exhausted,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch in which something always stays takes as many datagrams as one that empties, and each leaves as it came.
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
                assert_eq!(batch.payload(departure), [seen; 5], "each is seen once");
                seen += 1;
            }
            assert_eq!(seen, pushed);
            // One departure in eight stays, the last; as the first of the next call it leaves with the others.
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
    fn what_stays_out_of_order_is_moved_as_it_lies() {
        let mut batch = TxBatch::new(8, 64);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        for n in 0..6u8 {
            batch.push(peer, None, usize::from(n) + 1, |bytes| bytes.fill(n));
        }
        batch.waiting_mut().reverse();
        batch.advance(2);
        // Fewer have left than stay: nothing is moved yet.
        batch.compact();
        assert!(!batch.room_for(64 - 20), "what has left still takes its room");
        batch.advance(1);
        batch.compact();
        let stay: Vec<_> = batch.waiting().iter().map(|d| batch.payload(d).to_vec()).collect();
        assert_eq!(stay, [vec![2; 3], vec![1; 2], vec![0; 1]]);
        assert!(batch.room_for(64 - 6) && !batch.room_for(64 - 5));
    }
}
