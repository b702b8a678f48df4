//! One slot: the lease of it, its stream rings, and the books of its bytes.

use std::ops::AddAssign;

use mqueue::{BrokenRing, ByteReader, ByteWriter, Memory};

/// Who uses a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No one.
    Free,
    /// The engine, for a connection attempt of the block with this command number.
    Connecting {
        /// The number of the command.
        token: u64,
    },
    /// The block; the connection exists.
    Open,
    /// The block; the connection has ended.
    Dead,
    /// The engine, to send what the block had written before it closed the slot, and until the peer has ended.
    Closing,
}

/// A direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the peer to the block.
    Receive,
    /// From the block to the peer.
    Send,
}

/// Bytes of one direction of one slot: `taken = delivered + dropped + outstanding`. They grow over all leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// Received from the peer; written by the block.
    pub taken: u64,
    /// Read by the block; accepted by the host kernel.
    pub delivered: u64,
    /// Neither, when the socket ended.
    pub dropped: u64,
}

impl Books {
    /// Bytes in the ring.
    pub fn outstanding(&self) -> u64 {
        self.taken - self.delivered - self.dropped
    }

    /// What was added to them since they were `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            taken: self.taken - earlier.taken,
            delivered: self.delivered - earlier.delivered,
            dropped: self.dropped - earlier.dropped,
        }
    }
}

impl AddAssign for Books {
    fn add_assign(&mut self, other: Self) {
        self.taken += other.taken;
        self.delivered += other.delivered;
        self.dropped += other.dropped;
    }
}

/// See the module documentation.
pub struct Slot<M> {
    pub(crate) state: State,
    pub(crate) generation: u32,
    /// Bytes to the block, and from it.
    pub(crate) rx: ByteWriter<M>,
    pub(crate) tx: ByteReader<M>,
    pub(crate) received: Books,
    pub(crate) sent: Books,
    /// Positions of the rings up to which the books of this lease go.
    rx_noted: u64,
    tx_noted: u64,
    /// Bytes taken from the block since it got an event.
    pub(crate) taken_since_event: u64,
    /// The number of the last event's message, if the block may not have read it.
    pub(crate) event: Option<u64>,
    /// The block gets no byte after those in the ring.
    has_received_all: bool,
}

impl<M: Memory> Slot<M> {
    pub(crate) fn new(rx: ByteWriter<M>, tx: ByteReader<M>) -> Self {
        Self {
            state: State::Free,
            generation: 0,
            rx,
            tx,
            received: Books::default(),
            sent: Books::default(),
            rx_noted: 0,
            tx_noted: 0,
            taken_since_event: 0,
            event: None,
            has_received_all: false,
        }
    }

    /// Who uses it.
    pub fn state(&self) -> State {
        self.state
    }

    /// The current lease, or the last one.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The books of one direction.
    pub fn books(&self, direction: Direction) -> Books {
        match direction {
            Direction::Receive => self.received,
            Direction::Send => self.sent,
        }
    }

    /// Bytes in the ring according to the positions of its ends, which the books do not use.
    pub fn in_ring(&self, direction: Direction) -> u64 {
        match (self.state, direction) {
            (State::Free, _) => 0,
            (_, Direction::Receive) => self.rx.position() - self.rx_noted,
            (_, Direction::Send) => self.tx_noted - self.tx.position(),
        }
    }

    /// A new lease: empty rings.
    pub(crate) fn begin(&mut self, state: State) {
        self.generation = self.generation.wrapping_add(1).max(1);
        self.state = state;
        self.rx.restart();
        self.tx.restart();
        (self.rx_noted, self.tx_noted) = (0, 0);
        self.taken_since_event = 0;
        self.has_received_all = false;
    }

    /// The lease has ended: what is in the rings is dropped.
    pub(crate) fn finish(&mut self) {
        // A ring that the block has broken counts as it was seen last.
        let _ = self.note_received();
        let _ = self.note_sent();
        self.received.dropped += self.received.outstanding();
        if !mutants::on("drop_unsent_silently") {
            self.sent.dropped += self.sent.outstanding();
        }
        self.state = State::Free;
    }

    /// The block gets no byte after those in the ring, for this reason. The first one stays.
    pub(crate) fn finish_receiving(&mut self, status: u8) {
        if !std::mem::replace(&mut self.has_received_all, true) {
            self.rx.set_end(status.into());
        }
    }

    /// Counts what the block has read.
    pub(crate) fn note_received(&mut self) -> Result<(), BrokenRing> {
        let taken = self.rx.taken()?;
        self.received.delivered += taken - self.rx_noted;
        self.rx_noted = taken;
        Ok(())
    }

    /// Counts what the block has written; returns how much waits.
    pub(crate) fn note_sent(&mut self) -> Result<usize, BrokenRing> {
        let waits = self.tx.available()?;
        let written = self.tx.position() + waits as u64;
        self.sent.taken += written - self.tx_noted;
        self.tx_noted = written;
        Ok(waits)
    }
}
