//! Rings: one producer, one consumer, an array of slots between them.
//!
//! The layout is in [`crate::abi`]. This file owns the protocol, which has two ordering edges per ring
//! (RX is the ring toward the accelerator, TX the one from it):
//!
//! * `PUBLISH`: the producer's writes to a slot are visible to a consumer that sees it published.
//!   `doorbell`: release store of the head, acquire load of the head. `granule`: none is needed, data
//!   and sequence are in one single-copy atomic unit.
//! * `RELEASE`: the consumer's reads of a slot happen before the producer overwrites it: release
//!   store of the tail, acquire load of the tail. (A GPU does not need it for `granule`, ORDERING.md.)
//!
//! A ring between two workers of the engine is the same ring; its edges are named `HANDOVER`.
//!
//! Invariants, checked on each side against the other:
//! 1. `tail ≤ head ≤ tail + depth`; both only grow.
//! 2. Only the producer stores the head and slot contents, only the consumer the tail.
//! 3. A message has a kind; its length is at most the ring's maximum; without ARENA at most the
//!    inline capacity; with ARENA it is inside the arena.
//!
//! A peer that breaks 1 has made the ring unusable ([`RingError::Corrupt`]); one that breaks 3 has
//! corrupted one message ([`RingError::BadHeader`]). In both cases the other side reads only memory of this
//! ring and copies before it checks.

mod consumer;
mod granule;
mod producer;

use std::ops::Range;

pub use consumer::Consumer;
pub use producer::{Loan, Producer};

use crate::abi::{RESTAMP_LAPS, RingEntry, SlotHeader, protocol};
use crate::memory::strings::{self, HEADER_BYTES};
use crate::memory::{Memory, Rows};

/// Bytes of a processor's cache line.
const LINE: u64 = 64;

/// An error of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A head or tail word is invalid; the ring cannot be used any more.
    #[error("a head or tail word is invalid")]
    Corrupt,
    /// The next message's header is invalid; [`Consumer::advance`] skips it.
    #[error("a message header is invalid")]
    BadHeader,
}

/// Why a message was not accepted by a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoanError {
    /// No free slot, or no room in the arena, until the consumer releases.
    #[error("the ring is full")]
    Full,
    /// Longer than the ring's maximum.
    #[error("the message exceeds the ring's maximum length")]
    TooLong,
    /// The consumer wrote an invalid tail.
    #[error("a head or tail word is invalid")]
    Corrupt,
}

/// How the slots of one ring are arranged and published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Doorbell,
    Granule8,
    Granule16,
}

/// A checked directory entry, in the form the ring code uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    protocol: Protocol,
    pub(crate) depth: u64,
    /// The bits of a message's number that give its lap modulo [`RESTAMP_LAPS`].
    restamp_mask: u64,
    slot_stride: u64,
    /// Bytes of header and payload that a line holds.
    line_bytes: u64,
    pub(crate) inline_bytes: u64,
    message_bytes_max: u64,
    slots_offset: u64,
    head_offset: u64,
    tail_offset: u64,
    arena_offset: u64,
    arena_bytes: u64,
}

impl Layout {
    /// `entry` was checked by [`crate::region`].
    pub(crate) fn of(entry: &RingEntry) -> Self {
        let (protocol, line_bytes) = match entry.protocol {
            protocol::GRANULE8 => (Protocol::Granule8, LINE / 2),
            protocol::GRANULE16 => (Protocol::Granule16, LINE / 4 * 3),
            _ => (Protocol::Doorbell, LINE),
        };
        Self {
            protocol,
            line_bytes,
            depth: entry.depth.into(),
            restamp_mask: (RESTAMP_LAPS - 1) * u64::from(entry.depth),
            slot_stride: entry.slot_stride.into(),
            inline_bytes: entry.inline_bytes.into(),
            message_bytes_max: entry.message_bytes_max.into(),
            slots_offset: entry.slots_offset,
            head_offset: entry.head_offset,
            tail_offset: entry.tail_offset,
            arena_offset: entry.arena_offset,
            arena_bytes: entry.arena_bytes,
        }
    }

    /// Longest payload stored in its slot.
    fn inline_max(&self) -> u64 {
        self.inline_bytes.min(self.message_bytes_max)
    }

    /// Whether all units of slots are rewritten in the lap of message `n`.
    #[inline]
    pub(crate) fn restamps(&self, n: u64) -> bool {
        n & self.restamp_mask == 0
    }

    /// The slots of `count` messages from `n` on: to the end of the ring, and from its beginning on.
    #[inline]
    pub(crate) fn slots(&self, n: u64, count: u64) -> [Rows; 2] {
        let first = count.min(self.depth - (n & (self.depth - 1)));
        [(n, first), (n + first, count - first)].map(|(n, count)| Rows {
            at: self.slot(n),
            stride: self.slot_stride,
            count,
        })
    }

    /// Offset of the slot of message `n`.
    #[inline]
    pub(crate) fn slot(&self, n: u64) -> u64 {
        self.slots_offset + (n & (self.depth - 1)) * self.slot_stride
    }
}

/// Head and tail of a ring when one of its ends is taken: read once and checked by [`crate::region`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) head: u64,
    pub(crate) tail: u64,
}

/// The producer's part of a message header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// See [`SlotHeader::token`].
    pub token: u64,
    /// See [`SlotHeader::tag`].
    pub tag: u64,
    /// See [`SlotHeader::kind`].
    pub kind: u8,
    /// See [`SlotHeader::status`].
    pub status: u8,
}

#[inline]
fn last_word(len: u32, head: &Head, flags: u16) -> u64 {
    u64::from(len)
        | u64::from(head.kind) << 32
        | u64::from(head.status) << 40
        | u64::from(flags) << 48
}

#[inline]
fn header_of(words: [u64; 4]) -> SlotHeader {
    SlotHeader {
        token: words[0],
        tag: words[1],
        arena_offset: words[2],
        len: words[3] as u32,
        kind: (words[3] >> 32) as u8,
        status: (words[3] >> 40) as u8,
        flags: (words[3] >> 48) as u16,
    }
}

/// The lines of a slot that hold the header and the first `bytes` of a payload: slots are aligned to a line.
#[inline(always)]
fn prefetch_slot<M: Memory>(memory: &M, layout: &Layout, n: u64, bytes: u64, for_write: bool) {
    /// Without a loop. For longer messages the cost of a loop does not matter.
    const FEW: u64 = 4;
    let slot = layout.slot(n);
    // A longer payload is in the arena.
    let string = HEADER_BYTES + if bytes > layout.inline_bytes { 0 } else { bytes };
    for line in 0..FEW {
        if string > line * layout.line_bytes {
            memory.prefetch(slot + line * LINE, for_write);
        }
    }
    if string > FEW * layout.line_bytes {
        prefetch_lines(memory, FEW..string.div_ceil(layout.line_bytes), slot, for_write);
    }
}

/// Maximum number of lines of a slot to prefetch: a message of a kilobyte and a half in units of 16 bytes. The hardware prefetcher handles more.
const LINES_MAX: u64 = 33;

#[inline(never)]
fn prefetch_lines<M: Memory>(memory: &M, lines: Range<u64>, slot: u64, for_write: bool) {
    for line in lines.start..lines.end.min(LINES_MAX) {
        memory.prefetch(slot + line * LINE, for_write);
    }
}

/// Prepares the slots of a ring that starts from `start`.
pub(crate) fn format_slots<M: Memory>(memory: &M, entry: &RingEntry, start: u64) {
    let layout = Layout::of(entry);
    match layout.protocol {
        Protocol::Granule8 if start != 0 => granule::format::<M, 1>(memory, &layout, start),
        Protocol::Granule16 if start != 0 => granule::format::<M, 3>(memory, &layout, start),
        _ => {}
    }
}

/// Bytes of one slot under a protocol (before rounding to the stride), or `None` if it is unknown.
pub(crate) fn slot_bytes(protocol: u8, inline_bytes: u64) -> Option<u64> {
    match protocol {
        protocol::DOORBELL => Some(HEADER_BYTES + inline_bytes),
        protocol::GRANULE8 => Some(strings::slot_bytes(1, inline_bytes)),
        protocol::GRANULE16 => Some(strings::slot_bytes(3, inline_bytes)),
        _ => None,
    }
}
