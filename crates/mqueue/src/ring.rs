//! Rings: one producer, one consumer, an array of slots between them.
//!
//! The layout is in [`crate::abi`]. This file owns the protocol, which has two ordering edges a ring
//! (RX is the ring toward the accelerator, TX the one from it):
//!
//! * `PUBLISH`: what the producer wrote into a slot is visible to a consumer that sees it published.
//!   `doorbell`: release store of the head, acquire load of the head. `granule`: none is needed, data
//!   and sequence travel in one single-copy atomic unit.
//! * `RELEASE`: what the consumer read from a slot it read before the producer overwrote it: release
//!   store of the tail, acquire load of the tail. (A GPU does without for `granule`, ORDERING.md.)
//!
//! A ring between two workers of the engine is the same ring; its edges are named `HANDOVER`.
//!
//! Invariants, checked on each side against the other:
//! 1. `tail ≤ head ≤ tail + depth`; both only grow.
//! 2. Only the producer stores the head and slot contents, only the consumer the tail.
//! 3. A message has a kind; its length is at most the ring's maximum; without ARENA at most the
//!    inline capacity; with ARENA it lies inside the arena.
//!
//! A peer that breaks 1 has made the ring unusable ([`RingError::Corrupt`]); one that breaks 3 has
//! spoilt one message ([`RingError::BadHeader`]). Either way the other side reads only memory of this
//! ring and copies before it looks.

use std::ops::Range;

use crate::abi::{RESTAMP_LAPS, RingEntry, SlotHeader, flags, protocol};
use crate::granule;
use crate::memory::{Memory, Ordering};

/// Bytes of a slot header.
pub const HEADER_BYTES: u64 = size_of::<SlotHeader>() as u64;

/// Bytes of a processor's cache line.
const LINE: u64 = 64;

/// What the peer did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A head or tail word is impossible; the ring cannot be used any more.
    #[error("a head or tail word is impossible")]
    Corrupt,
    /// The next message's header is impossible; [`Consumer::advance`] skips it.
    #[error("a message header is impossible")]
    BadHeader,
}

/// Why a message was not accepted by a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoanError {
    /// No free slot, or no room in the arena, until the consumer releases.
    #[error("the ring is full")]
    Full,
    /// Longer than the ring's maximum.
    #[error("the message is longer than the ring carries")]
    TooLong,
    /// The consumer wrote an impossible tail.
    #[error("a head or tail word is impossible")]
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
    /// The bits of a message's number that tell its lap modulo [`RESTAMP_LAPS`].
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

    /// Longest payload that lies in its slot.
    fn inline_max(&self) -> u64 {
        self.inline_bytes.min(self.message_bytes_max)
    }

    /// Whether the lap that message `n` is of stamps all units of its slots.
    #[inline]
    pub(crate) fn restamps(&self, n: u64) -> bool {
        n & self.restamp_mask == 0
    }

    /// Offset of the slot of message `n`.
    #[inline]
    pub(crate) fn slot(&self, n: u64) -> u64 {
        self.slots_offset + (n & (self.depth - 1)) * self.slot_stride
    }
}

/// Head and tail of a ring when an end of it is taken: read once and checked by [`crate::region`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) head: u64,
    pub(crate) tail: u64,
}

/// What a producer says about a message besides its payload.
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

/// The writing end of a ring.
///
/// [`Self::loan`] → [`Loan::write`] → [`Loan::commit`] puts a message into a slot; [`Self::publish`]
/// shows everything committed so far to the consumer with one store. With `granule` a message is on
/// its way as soon as it is written, and publishing only rings the doorbell.
pub struct Producer<M: Memory> {
    memory: M,
    layout: Layout,
    /// Messages committed.
    head: u64,
    /// Messages published (`doorbell`) or hinted (`granule`).
    published: u64,
    /// The consumer's tail as last seen.
    tail: u64,
    /// Payloads below this many bytes need nothing but a free slot.
    plain_end: u64,
    arena: Arena,
}

/// The producer's private book-keeping of its arena: positions count bytes ever allocated.
struct Arena {
    head: u64,
    tail: u64,
    /// Arena head after each slot's message, by slot. Empty without an arena.
    ends: Box<[u64]>,
}

impl Arena {
    /// An arena nothing is known about but the ring's counts. Messages that are already in the ring
    /// may lie anywhere in it, so it counts as full until the last of them is released.
    fn new(layout: &Layout, counts: Counts) -> Self {
        if layout.arena_bytes == 0 {
            return Self { head: 0, tail: 0, ends: Box::new([]) };
        }
        let mut ends = vec![0; layout.depth as usize].into_boxed_slice();
        let mut head = 0;
        if counts.head != counts.tail {
            head = layout.arena_bytes;
            ends[((counts.head - 1) & (layout.depth - 1)) as usize] = head;
        }
        Self { head, tail: 0, ends }
    }

    /// Message `n` takes nothing of it.
    #[inline(always)]
    fn pass(&mut self, n: u64) {
        let slot = n as usize & self.ends.len().wrapping_sub(1);
        if let Some(end) = self.ends.get_mut(slot) {
            *end = self.head;
        }
    }
}

impl<M: Memory> Producer<M> {
    pub(crate) fn new(memory: M, entry: &RingEntry, counts: Counts) -> Self {
        let layout = Layout::of(entry);
        let Counts { head, tail } = counts;
        let arena = Arena::new(&layout, counts);
        let plain_end = layout.inline_max() + 1;
        Self { memory, layout, head, published: head, tail, plain_end, arena }
    }

    /// Messages committed since the region was formatted.
    pub fn committed(&self) -> u64 {
        self.head
    }

    /// Messages the consumer has released, as last seen by [`Self::credit`] or [`Self::loan`].
    pub fn released(&self) -> u64 {
        self.tail
    }

    /// Looks at the tail again and returns the free slots, in [0, depth].
    #[inline]
    pub fn credit(&mut self) -> Result<u32, RingError> {
        // EDGE RX_RELEASE TX_RELEASE HANDOVER (acquire half)
        let tail = self.memory.load(self.layout.tail_offset, Ordering::Acquire);
        if tail < self.tail || tail > self.head {
            return Err(RingError::Corrupt);
        }
        if tail != self.tail && !self.arena.ends.is_empty() {
            let last = (tail - 1) & (self.layout.depth - 1);
            // Never backwards: an older inline message may end before the arena was started afresh.
            self.arena.tail = self.arena.tail.max(self.arena.ends[last as usize]);
        }
        self.tail = tail;
        Ok((self.layout.depth - (self.head - tail)) as u32)
    }

    /// Looks at the tail again and returns how many more messages find room even if all are the longest, in
    /// [0, depth]: [`Self::push`] takes that many whatever the consumer does meanwhile.
    pub fn room(&mut self) -> Result<u32, RingError> {
        let slots = self.credit()?;
        let Layout { arena_bytes: bytes, message_bytes_max: longest, .. } = self.layout;
        if longest <= self.layout.inline_bytes {
            return Ok(slots);
        }
        let longest = longest.next_multiple_of(8);
        let free = bytes - (self.arena.head - self.arena.tail);
        // An empty arena starts afresh. A message that would cross the end skips less than its length.
        let crosses = free < bytes && self.arena.head % bytes + free > bytes;
        let sure = if crosses { free.saturating_sub(longest - 8) } else { free };
        Ok(slots.min((sure / longest) as u32))
    }

    /// Asks for a slot for a payload of `len` bytes. Dropping the loan before it is written gives it
    /// back unused.
    #[inline]
    pub fn loan(&mut self, len: usize) -> Result<Loan<'_, M>, LoanError> {
        let len = len as u64;
        if len > self.layout.message_bytes_max {
            return Err(LoanError::TooLong);
        }
        if self.head - self.tail == self.layout.depth
            && self.credit().map_err(|_| LoanError::Corrupt)? == 0
        {
            return Err(LoanError::Full);
        }
        let mut arena_at = None;
        if len > self.layout.inline_bytes {
            if self.layout.arena_bytes == 0 {
                return Err(LoanError::TooLong);
            }
            arena_at = self.arena_place(len);
            if arena_at.is_none() {
                self.credit().map_err(|_| LoanError::Corrupt)?;
                arena_at = self.arena_place(len);
            }
            if arena_at.is_none() {
                return Err(LoanError::Full);
            }
        }
        Ok(Loan { producer: self, len: len as u32, arena_at, written: false })
    }

    /// Where in the arena's life a payload of `len` bytes would start, if there is room.
    fn arena_place(&self, len: u64) -> Option<u64> {
        let bytes = self.layout.arena_bytes;
        let need = len.next_multiple_of(8);
        let mut at = self.arena.head;
        if self.arena.tail == self.arena.head {
            // Empty: start afresh, so that a payload as long as the arena always fits.
            at = at.next_multiple_of(bytes);
            return (need <= bytes).then_some(at);
        }
        let offset = at % bytes;
        if offset + need > bytes {
            at += bytes - offset;
        }
        (at + need - self.arena.tail <= bytes).then_some(at)
    }

    /// Hints that messages of up to `bytes` follow soon: fetches the slot `ahead` messages on from
    /// wherever its lines are now (the consumer's cache). A slot that is not free is left alone.
    #[inline]
    pub fn prefetch(&self, ahead: u64, bytes: u64) {
        let n = self.head + ahead;
        if n - self.tail < self.layout.depth {
            prefetch_slot(&self.memory, &self.layout, n, bytes, true);
        }
    }

    /// Copies a whole message in: loan, write, commit. [`Self::publish`] must follow.
    // Always inline: a head that is passed through memory is stored in parts and loaded as a whole,
    // which the processor cannot forward.
    #[inline(always)]
    pub fn push(&mut self, head: Head, payload: &[u8]) -> Result<(), LoanError> {
        // A length that the word has no room for is refused before the word is used.
        let last = last_word(payload.len() as u32, &head, 0);
        self.push_words(head.token, head.tag, last, payload)
    }

    /// [`Self::push`] with as many arguments as there are registers for.
    // Always inline: a payload whose length the compiler knows is copied without a loop.
    #[inline(always)]
    fn push_words(
        &mut self,
        token: u64,
        tag: u64,
        last: u64,
        payload: &[u8],
    ) -> Result<(), LoanError> {
        let depth = self.layout.depth + u64::from(mutants::on("overrun_ring"));
        if payload.len() as u64 >= self.plain_end || self.head - self.tail >= depth {
            return self.push_loan(token, tag, last, payload);
        }
        let words = [token, tag, 0, last];
        let (memory, layout, n) = (&self.memory, &self.layout, self.head);
        match layout.protocol {
            Protocol::Doorbell => memory.store_slot(layout.slot(n), words, payload),
            Protocol::Granule8 => granule::write::<M, 1>(memory, layout, n, words, payload),
            Protocol::Granule16 => granule::write::<M, 3>(memory, layout, n, words, payload),
        }
        self.arena.pass(n);
        self.head += 1;
        Ok(())
    }

    #[inline(never)]
    fn push_loan(
        &mut self,
        token: u64,
        tag: u64,
        last: u64,
        payload: &[u8],
    ) -> Result<(), LoanError> {
        let mut loan = self.loan(payload.len())?;
        loan.write(
            Head { token, tag, kind: (last >> 32) as u8, status: (last >> 40) as u8 },
            payload,
        );
        loan.commit();
        Ok(())
    }

    /// Copies the message whose header `from` just showed into a slot, under another head, without a
    /// buffer between. False when both rings are `granule`, either needs an arena, part of the message has not
    /// arrived, or no slot is free as far as is known: [`Consumer::copy_out`] and [`Self::push`] do it then.
    /// The header was read once and checked; payload that a hostile producer changes meanwhile arrives changed.
    // Always inline, as push() is, down to the copies of the kinds of rings that there mostly are.
    #[inline(always)]
    #[must_use]
    pub fn push_from(&mut self, head: Head, from: &Consumer<M>, header: &SlotHeader) -> bool {
        let len = u64::from(header.len);
        let full = self.head - self.tail == self.layout.depth;
        if header.flags != 0 || len >= self.plain_end || full {
            return false;
        }
        let words = [head.token, head.tag, 0, last_word(header.len, &head, 0)];
        let whole = match (self.layout.protocol, from.layout.protocol) {
            (Protocol::Doorbell, Protocol::Granule16) => {
                self.units_to_doorbell::<3>(words, from, len)
            }
            (Protocol::Granule16, Protocol::Doorbell) => {
                self.doorbell_to_units::<3>(words, from, len)
            }
            _ => self.push_from_others((head.token, head.tag), words[3], from, len),
        };
        if whole {
            self.arena.pass(self.head);
            self.head += 1;
        }
        whole
    }

    /// Fills the next slot for [`Self::push_from`] where rings are of other kinds. False when part of the message has not
    /// arrived, and for two of `granule`.
    #[inline(never)]
    fn push_from_others(
        &self,
        (token, tag): (u64, u64),
        last: u64,
        from: &Consumer<M>,
        len: u64,
    ) -> bool {
        let words = [token, tag, 0, last];
        match (self.layout.protocol, from.layout.protocol) {
            (Protocol::Doorbell, Protocol::Doorbell) => {
                let (to, slot) = (&self.memory, self.layout.slot(self.head));
                let from_at = from.layout.slot(from.tail) + HEADER_BYTES;
                to.copy_from(slot + HEADER_BYTES, &from.memory, from_at, len);
                to.store_words(slot, words);
                true
            }
            (Protocol::Doorbell, _) => self.units_to_doorbell::<1>(words, from, len),
            (_, Protocol::Doorbell) => self.doorbell_to_units::<1>(words, from, len),
            _ => false,
        }
    }

    /// Fills the next slot of a `doorbell` ring for [`Self::push_from`]. False when part of the message has not
    /// arrived.
    #[inline(always)]
    fn units_to_doorbell<const WORDS: usize>(
        &self,
        words: [u64; 4],
        from: &Consumer<M>,
        len: u64,
    ) -> bool {
        let slot = self.layout.slot(self.head);
        let message = (&from.memory, &from.layout, from.tail);
        let at = slot + HEADER_BYTES;
        let whole = granule::copy_payload::<M, WORDS>(message, &self.memory, at, len);
        if whole {
            self.memory.store_words(slot, words);
        }
        whole
    }

    /// Fills the next slot of a `granule` ring from a `doorbell` ring for [`Self::push_from`].
    #[inline(always)]
    fn doorbell_to_units<const WORDS: usize>(
        &self,
        words: [u64; 4],
        from: &Consumer<M>,
        len: u64,
    ) -> bool {
        let payload = (&from.memory, from.layout.slot(from.tail) + HEADER_BYTES);
        let to = (&self.memory, &self.layout, self.head);
        granule::write_from::<M, WORDS>(to, words, payload, len);
        true
    }

    /// Shows the consumer everything committed so far. One store, however many messages. Says whether there
    /// were any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let any = self.published != self.head;
        if any {
            let weak = mutants::on("publish_unordered");
            let order = if weak { Ordering::Relaxed } else { Ordering::Release };
            // EDGE RX_PUBLISH TX_PUBLISH HANDOVER (release half)
            self.memory.store(self.layout.head_offset, self.head, order);
            self.published = self.head;
        }
        any
    }
}

/// A slot that the producer may fill: once. See [`Producer`].
pub struct Loan<'a, M: Memory> {
    producer: &'a mut Producer<M>,
    len: u32,
    arena_at: Option<u64>,
    written: bool,
}

impl<M: Memory> Loan<'_, M> {
    /// Writes header and payload. Panics when the payload's length is not the one loaned, and on a
    /// second call.
    #[inline]
    pub fn write(&mut self, head: Head, payload: &[u8]) {
        assert_eq!(payload.len(), self.len as usize, "the loan was for another length");
        assert!(!self.written, "a loan is written once");
        self.written = true;
        let layout = &self.producer.layout;
        let memory = &self.producer.memory;
        let n = self.producer.head;
        let (flags, arena_offset) = match self.arena_at {
            Some(at) => (flags::ARENA, at % layout.arena_bytes),
            None => (0, 0),
        };
        let words = [head.token, head.tag, arena_offset, last_word(self.len, &head, flags)];
        match layout.protocol {
            Protocol::Doorbell => {
                let slot = layout.slot(n);
                memory.store_words(slot, words);
                match self.arena_at {
                    Some(_) => memory.copy_in(layout.arena_offset + arena_offset, payload),
                    None => memory.copy_in(slot + HEADER_BYTES, payload),
                }
                return;
            }
            Protocol::Granule8 => granule::write::<M, 1>(memory, layout, n, words, payload),
            Protocol::Granule16 => granule::write::<M, 3>(memory, layout, n, words, payload),
        }
        // The consumer may have the message by now: the slot is used up, whatever becomes of the loan.
        self.producer.head += 1;
    }

    /// Makes the slot part of the ring; the consumer sees it after [`Producer::publish`] (with
    /// `granule` it may see it earlier). Panics when nothing was written.
    #[inline]
    pub fn commit(self) {
        let Loan { producer, len, arena_at, written } = self;
        assert!(written, "a slot that was never written holds an older message");
        if producer.layout.protocol != Protocol::Doorbell {
            return;
        }
        if let Some(at) = arena_at {
            if producer.arena.tail == producer.arena.head {
                producer.arena.tail = at;
            }
            producer.arena.head = at + u64::from(len).next_multiple_of(8);
        }
        producer.arena.pass(producer.head);
        producer.head += 1;
    }
}

/// The reading end of a ring.
///
/// [`Self::peek`] → [`Self::copy_out`] → [`Self::advance`] reads a message; [`Self::release`] returns
/// every slot read so far with one store.
pub struct Consumer<M: Memory> {
    memory: M,
    layout: Layout,
    /// The producer's head as last seen (`doorbell`).
    head: u64,
    /// Messages read.
    tail: u64,
    /// Messages released.
    released: u64,
    /// Longest payload that lies in its slot.
    inline_max: u64,
}

impl<M: Memory> Consumer<M> {
    pub(crate) fn new(memory: M, entry: &RingEntry, counts: Counts) -> Self {
        let layout = Layout::of(entry);
        let (tail, inline_max) = (counts.tail, layout.inline_max());
        Self { memory, layout, head: tail, tail, released: tail, inline_max }
    }

    /// Messages read since the region was formatted.
    pub fn consumed(&self) -> u64 {
        self.tail
    }

    /// The header of the next message, if one is published. Nothing is consumed. At most `depth`
    /// messages can be read between two calls of [`Self::release`].
    // Always inline: a header that is returned through memory is stored in parts and loaded as a whole,
    // which the processor cannot forward.
    #[inline(always)]
    pub fn peek(&mut self) -> Result<Option<SlotHeader>, RingError> {
        if self.tail - self.released == self.layout.depth {
            // Every slot was read and none given back: what a producer shows now it had no credit for.
            // So whoever reads until there is nothing left comes to an end, whatever the peer does.
            return Ok(None);
        }
        let header = match self.layout.protocol {
            Protocol::Doorbell => {
                if self.head == self.tail && !self.look()? {
                    return Ok(None);
                }
                header_of(self.memory.load_words(self.layout.slot(self.tail)))
            }
            _ => match self.granule_header() {
                Some(words) => header_of(words),
                None => return Ok(None),
            },
        };
        self.check(&header)?;
        Ok(Some(header))
    }

    // Inline as peek() is.
    #[inline(always)]
    fn granule_header(&self) -> Option<[u64; 4]> {
        if self.layout.protocol == Protocol::Granule8 {
            self.granule8_header()
        } else {
            granule::read_header::<M, 3>(&self.memory, &self.layout, self.tail)
        }
    }

    // Never inline: where 16-byte units are atomic few rings have units of 8, and what reads them would burden the others.
    #[inline(never)]
    fn granule8_header(&self) -> Option<[u64; 4]> {
        granule::read_header::<M, 1>(&self.memory, &self.layout, self.tail)
    }

    // Never inline, as granule8_header() is.
    #[inline(never)]
    fn granule8_payload(&self, payload: &mut [u8]) -> bool {
        granule::read_payload::<M, 1>(&self.memory, &self.layout, self.tail, payload)
    }

    /// Loads the head; whether there is a message.
    #[inline]
    fn look(&mut self) -> Result<bool, RingError> {
        // EDGE RX_PUBLISH TX_PUBLISH HANDOVER (acquire half)
        let head = self.memory.load(self.layout.head_offset, Ordering::Acquire);
        let impossible = head < self.head || head - self.released > self.layout.depth;
        if impossible && !mutants::on("believe_head") {
            return Err(RingError::Corrupt);
        }
        self.head = head;
        Ok(head != self.tail)
    }

    #[inline]
    fn check(&self, header: &SlotHeader) -> Result<(), RingError> {
        let plain = header.flags == 0 && u64::from(header.len) <= self.inline_max;
        if plain && header.kind != 0 { Ok(()) } else { self.check_closely(header) }
    }

    fn check_closely(&self, header: &SlotHeader) -> Result<(), RingError> {
        let len = u64::from(header.len);
        let layout = &self.layout;
        let fits = match header.flags {
            0 => len <= layout.inline_bytes,
            flags::ARENA => {
                // Not even an empty payload lies in an arena that is none.
                layout.protocol == Protocol::Doorbell
                    && layout.arena_bytes > 0
                    && header.arena_offset % 8 == 0
                    && header.arena_offset.checked_add(len).is_some_and(|e| e <= layout.arena_bytes)
            }
            _ => false,
        };
        let fits = fits && len <= layout.message_bytes_max && header.kind != 0;
        if fits || mutants::on("believe_header") { Ok(()) } else { Err(RingError::BadHeader) }
    }

    /// Copies the payload of the message whose header [`Self::peek`] just returned into `payload`,
    /// which must be exactly that long. False when part of it has not arrived yet (`granule`).
    // Always inline, as push_words() is.
    #[inline(always)]
    #[must_use]
    pub fn copy_out(&self, header: &SlotHeader, payload: &mut [u8]) -> bool {
        assert_eq!(payload.len(), header.len as usize, "the payload has another length");
        match self.layout.protocol {
            Protocol::Doorbell => {
                let at = if header.flags & flags::ARENA != 0 {
                    self.layout.arena_offset + header.arena_offset
                } else {
                    self.layout.slot(self.tail) + HEADER_BYTES
                };
                self.memory.copy_out(at, payload);
                true
            }
            _ => self.granule_payload(payload),
        }
    }

    // Always inline, as push_words() is.
    #[inline(always)]
    fn granule_payload(&self, payload: &mut [u8]) -> bool {
        if self.layout.protocol == Protocol::Granule8 {
            self.granule8_payload(payload)
        } else {
            granule::read_payload::<M, 3>(&self.memory, &self.layout, self.tail, payload)
        }
    }

    /// Done with the message [`Self::peek`] showed, or with the one whose header it refused.
    #[inline]
    pub fn advance(&mut self) {
        debug_assert!(
            self.layout.protocol != Protocol::Doorbell || self.tail < self.head,
            "there was no message"
        );
        self.tail += 1;
    }

    /// Returns every slot read so far to the producer. One store, however many slots. Says whether there
    /// were any.
    #[inline]
    pub fn release(&mut self) -> bool {
        let any = self.released != self.tail;
        if any {
            if !mutants::on("skip_release") {
                // EDGE RX_RELEASE TX_RELEASE HANDOVER (release half)
                self.memory.store(self.layout.tail_offset, self.tail, Ordering::Release);
            }
            self.released = self.tail;
        }
        any
    }

    /// Fetches the slot `ahead` messages on from the producer's cache, if it is known to be published: a
    /// slot that is being written would only be taken away from its writer.
    #[inline]
    pub fn prefetch(&self, ahead: u64, bytes: u64) {
        let n = self.tail + ahead;
        if n < self.head {
            prefetch_slot(&self.memory, &self.layout, n, bytes, false);
        }
    }

    /// Fetches the slot `ahead` messages on whether it is published or not: for a producer beyond a bus, from
    /// whose caches nothing is taken.
    #[inline]
    pub fn prefetch_at(&self, ahead: u64, bytes: u64) {
        prefetch_slot(&self.memory, &self.layout, self.tail + ahead, bytes, false);
    }

    /// Whether the head word says that something is waiting: a cheap look at the doorbell.
    #[inline]
    pub fn hinted(&self) -> bool {
        self.hint() != 0
    }

    /// How many messages are waiting if the head word tells the truth, which nothing has checked.
    #[inline]
    pub fn hint(&self) -> u64 {
        self.memory.load(self.layout.head_offset, Ordering::Relaxed).wrapping_sub(self.tail)
    }
}

/// The lines of a slot that hold the header and the first `bytes` of a payload: slots are aligned to a line.
#[inline(always)]
fn prefetch_slot<M: Memory>(memory: &M, layout: &Layout, n: u64, bytes: u64, for_write: bool) {
    /// Without a loop. Longer messages have more to do than to count lines.
    const FEW: u64 = 4;
    let slot = layout.slot(n);
    // A longer payload lies in the arena.
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

/// Most lines of a slot that are fetched: a message of a kilobyte and a half in units of 16 bytes. More are the processor's own business.
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
        protocol::GRANULE8 => Some(granule::slot_bytes(1, inline_bytes)),
        protocol::GRANULE16 => Some(granule::slot_bytes(3, inline_bytes)),
        _ => None,
    }
}
