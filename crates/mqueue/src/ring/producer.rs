//! The writing end of a ring.

use super::{
    Counts, HEADER_BYTES, Head, LINE, Layout, LoanError, Protocol, RingError, last_word,
    prefetch_slot,
};
use crate::abi::{RingEntry, SlotHeader, flags};
use crate::memory::{Memory, Ordering, Rows};
use crate::ring::Consumer;
use crate::ring::granule;

/// The writing end of a ring.
///
/// [`Self::loan`] → [`Loan::write`] → [`Loan::commit`] puts a message into a slot; [`Self::publish`]
/// makes everything committed so far visible to the consumer with one store. With `granule` a message is
/// visible as soon as it is written, and publishing only rings the doorbell.
pub struct Producer<M: Memory> {
    memory: M,
    layout: Layout,
    /// Messages committed.
    head: u64,
    /// Messages published (`doorbell`) or hinted (`granule`).
    published: u64,
    /// The consumer's tail as last seen.
    tail: u64,
    /// Payloads below this many bytes need only a free slot.
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
    /// An arena of which only the ring's counts are known. Messages that are already in the ring
    /// may be anywhere in it, so it counts as full until the last of them is released.
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

    /// Message `n` uses none of it.
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

    #[inline]
    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// Messages committed since the region was formatted.
    pub fn committed(&self) -> u64 {
        self.head
    }

    /// Messages the consumer has released, as last seen by [`Self::credit`] or [`Self::loan`].
    pub fn released(&self) -> u64 {
        self.tail
    }

    /// Reads the tail again and returns the number of free slots, in [0, depth].
    #[inline]
    pub fn credit(&mut self) -> Result<u32, RingError> {
        // EDGE RX_RELEASE TX_RELEASE HANDOVER (acquire half)
        let tail = self.memory.load(self.layout.tail_offset, Ordering::Acquire);
        if tail < self.tail || tail > self.head {
            return Err(RingError::Corrupt);
        }
        if tail != self.tail && !self.arena.ends.is_empty() {
            let last = (tail - 1) & (self.layout.depth - 1);
            // Never backwards: an older inline message may end before the arena was reset.
            self.arena.tail = self.arena.tail.max(self.arena.ends[last as usize]);
        }
        self.tail = tail;
        Ok((self.layout.depth - (self.head - tail)) as u32)
    }

    /// Reads the tail again and returns how many more messages fit even if all are the longest, in
    /// [0, depth]: [`Self::push`] takes that many whatever the consumer does meanwhile.
    pub fn room(&mut self) -> Result<u32, RingError> {
        let slots = self.credit()?;
        let Layout { arena_bytes: bytes, message_bytes_max: longest, .. } = self.layout;
        if longest <= self.layout.inline_bytes {
            return Ok(slots);
        }
        let longest = longest.next_multiple_of(8);
        let free = bytes - (self.arena.head - self.arena.tail);
        // An empty arena is reset. A message that would cross the end skips less than its length.
        let crosses = free < bytes && self.arena.head % bytes + free > bytes;
        let sure = if crosses { free.saturating_sub(longest - 8) } else { free };
        Ok(slots.min((sure / longest) as u32))
    }

    /// Requests a slot for a payload of `len` bytes. Dropping the loan before it is written returns it
    /// unused.
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

    /// The position in the arena at which a payload of `len` bytes would start, if there is room.
    fn arena_place(&self, len: u64) -> Option<u64> {
        let bytes = self.layout.arena_bytes;
        let need = len.next_multiple_of(8);
        let mut at = self.arena.head;
        if self.arena.tail == self.arena.head {
            // Empty: reset, so that a payload as long as the arena always fits.
            at = at.next_multiple_of(bytes);
            return (need <= bytes).then_some(at);
        }
        let offset = at % bytes;
        if offset + need > bytes {
            at += bytes - offset;
        }
        (at + need - self.arena.tail <= bytes).then_some(at)
    }

    /// Hints that messages of up to `bytes` follow soon: prefetches the slot `ahead` messages on from
    /// wherever its lines are now (the consumer's cache). A slot that is not free is skipped.
    #[inline]
    pub fn prefetch(&self, ahead: u64, bytes: u64) {
        let n = self.head + ahead;
        if n - self.tail < self.layout.depth {
            prefetch_slot(&self.memory, &self.layout, n, bytes, true);
        }
    }

    /// Copies a whole message in: loan, write, commit. [`Self::publish`] must follow.
    // Always inline: a head passed through memory is stored in parts and loaded as a whole,
    // which the processor cannot forward.
    #[inline(always)]
    pub fn push(&mut self, head: Head, payload: &[u8]) -> Result<(), LoanError> {
        // A length that exceeds its field is refused before the field is used.
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

    /// Copies the message whose header `from` just returned into a slot, under another head, without an
    /// intermediate buffer. False if both rings are `granule`, either needs an arena, part of the message has not
    /// arrived, or no slot is known to be free: then use [`Consumer::copy_out`] and [`Self::push`].
    /// The header was read once and checked; payload that a hostile producer changes meanwhile arrives changed.
    // Always inline, as push() is, including the copies for the most common kinds of rings.
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

    /// Fills the next slot for [`Self::push_from`] if the rings are of other kinds. False if part of the message has not
    /// arrived, and for two `granule` rings.
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

    /// Fills the next slot of a `doorbell` ring for [`Self::push_from`]. False if part of the message has not
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

    /// Puts messages of `len` bytes with these tags into the ring, whose payloads lie in other memory from byte `at` on, `stride` bytes
    /// apart. Payloads that are changed there meanwhile arrive changed. Returns how many: fewer if there are fewer free slots; none if the ring is not
    /// `doorbell` or they need an arena.
    #[inline]
    pub(crate) fn push_alike(
        &mut self,
        head: Head,
        tags: &[u64],
        (from, at, stride): (&M, u64, u64),
        len: u32,
    ) -> Result<u32, LoanError> {
        /// Slots ahead that are taken from the consumer's cache.
        const AHEAD: u64 = 8;
        if self.layout.protocol != Protocol::Doorbell || u64::from(len) >= self.plain_end {
            return Ok(0);
        }
        let wanted = tags.len() as u64;
        if self.layout.depth - (self.head - self.tail) < wanted {
            self.credit().map_err(|_| LoanError::Corrupt)?;
        }
        let count = wanted.min(self.layout.depth - (self.head - self.tail));
        let last = last_word(len, &head, 0);
        let lines = (HEADER_BYTES + u64::from(len)).div_ceil(LINE);
        let (mut at, mut tags) = (at, tags);
        for slots in self.layout.slots(self.head, count) {
            let mut first = 0;
            while first < slots.count {
                let next = Rows { at: slots.at + first * slots.stride, ..slots };
                let these = Rows { count: AHEAD.min(slots.count - first), ..next };
                for slot in these.count..(slots.count - first).min(2 * AHEAD) {
                    let ahead = next.at + slot * slots.stride;
                    self.memory.prefetch(ahead, true);
                    // Most have one line or two.
                    if lines > 1 {
                        self.memory.prefetch(ahead + LINE, true);
                        (2..lines).for_each(|n| self.memory.prefetch(ahead + n * LINE, true));
                    }
                }
                let payloads = Rows { at: these.at + HEADER_BYTES, ..these };
                self.memory.copy_rows(payloads, from, (at, stride), len.into());
                let (of_these, rest) = tags.split_at(these.count as usize);
                self.memory.store_rows(these, |row| [head.token, of_these[row as usize], 0, last]);
                at += these.count * stride;
                tags = rest;
                first += AHEAD;
            }
        }
        if !self.arena.ends.is_empty() {
            (0..count).for_each(|ahead| self.arena.pass(self.head + ahead));
        }
        self.head += count;
        Ok(count as u32)
    }

    /// Makes everything committed so far visible to the consumer. One store, however many messages. Returns whether there
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

/// A slot that the producer may fill once. See [`Producer`].
pub struct Loan<'a, M: Memory> {
    producer: &'a mut Producer<M>,
    len: u32,
    arena_at: Option<u64>,
    written: bool,
}

impl<M: Memory> Loan<'_, M> {
    /// Writes header and payload. Panics if the payload's length is not the one loaned, and on a
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
        // The consumer may have the message by now: the slot is used up, whatever happens to the loan.
        self.producer.head += 1;
    }

    /// Makes the slot part of the ring; the consumer sees it after [`Producer::publish`] (with
    /// `granule` possibly earlier). Panics if nothing was written.
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
