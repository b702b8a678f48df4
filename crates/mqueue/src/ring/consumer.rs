//! The reading end of a ring.

use super::{
    Counts, HEADER_BYTES, Head, Layout, Protocol, RingError, header_of, last_word, prefetch_slot,
};
use crate::abi::{RingEntry, SlotHeader, flags};
use crate::memory::{Memory, Ordering, Rows};
use crate::ring::granule;

/// The reading end of a ring.
///
/// [`Self::peek`] → [`Self::copy_out`] → [`Self::advance`] reads a message; [`Self::release`] returns
/// every slot read so far with one store.
pub struct Consumer<M: Memory> {
    pub(crate) memory: M,
    pub(super) layout: Layout,
    /// The producer's head as last seen (`doorbell`).
    head: u64,
    /// Messages read.
    pub(super) tail: u64,
    /// Messages released.
    released: u64,
    /// Longest payload stored in its slot.
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
    // Always inline: a header returned through memory is stored in parts and loaded as a whole,
    // which the processor cannot forward.
    #[inline(always)]
    pub fn peek(&mut self) -> Result<Option<SlotHeader>, RingError> {
        if self.tail - self.released == self.layout.depth {
            // Every slot was read and none released: the producer had no credit for a message published now.
            // So reading until the ring is empty terminates, whatever the peer does.
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

    // Never inline: if 16-byte units are atomic few rings have units of 8, and their code would slow down the others.
    #[inline(never)]
    fn granule8_header(&self) -> Option<[u64; 4]> {
        granule::read_header::<M, 1>(&self.memory, &self.layout, self.tail)
    }

    // Never inline, as granule8_header() is.
    #[inline(never)]
    fn granule8_payload(&self, payload: &mut [u8]) -> bool {
        granule::read_payload::<M, 1>(&self.memory, &self.layout, self.tail, payload)
    }

    /// Loads the head; returns whether there is a message.
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
                // Without an arena, even an empty arena payload is invalid.
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
    /// which must be exactly that long. False if part of it has not arrived yet (`granule`).
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

    /// How many messages from the one on whose header [`Self::peek`] just returned have its kind and its length, at most as many as
    /// there are `tags`, where their tags are written. They are in their slots. One, unless the ring is `doorbell`.
    #[inline]
    pub fn peek_alike(&mut self, first: &SlotHeader, tags: &mut [u64]) -> Result<u32, RingError> {
        let known = self.head.wrapping_sub(self.tail);
        if self.layout.protocol != Protocol::Doorbell || first.flags != 0 || tags.is_empty() {
            return Ok(1);
        }
        if known < tags.len() as u64 {
            self.look()?;
        }
        let shown = (self.head - self.tail).min(tags.len() as u64);
        tags[0] = first.tag;
        let head = Head { kind: first.kind, ..Head::default() };
        let word = last_word(first.len, &head, 0);
        let mut alike = 1;
        for slots in self.layout.slots(self.tail + 1, shown - 1) {
            let (from, end) = (alike, alike + slots.count);
            let slots = Rows { at: slots.at + 8, ..slots };
            let mut places = tags[from as usize..].iter_mut();
            self.memory.load_rows(slots, |_, [tag, _, last]: [u64; 3]| {
                // The status of a request has no meaning.
                let same = last & !(0xff << 40) == word;
                let Some(place) = places.next() else { return false };
                *place = tag;
                alike += u64::from(same);
                same
            });
            if alike < end {
                break;
            }
        }
        Ok(alike as u32)
    }

    /// Copies the payloads of the next `count` messages to other memory, `stride` bytes apart: what [`Self::peek_alike`] found, of `len` bytes
    /// each. Panics if they are not published or longer than a slot.
    #[inline]
    pub(crate) fn copy_alike(&self, count: u32, len: u32, (to, at, stride): (&M, u64, u64)) {
        let doorbell = self.layout.protocol == Protocol::Doorbell;
        let shown = doorbell && u64::from(count) <= self.head - self.tail;
        assert!(shown && u64::from(len) <= self.inline_max, "not what peek_alike() found");
        let mut at = at;
        for slots in self.layout.slots(self.tail, count.into()) {
            let rows = Rows { at, stride, count: slots.count };
            let from = (slots.at + HEADER_BYTES, slots.stride);
            to.copy_rows(rows, &self.memory, from, len.into());
            at += slots.count * stride;
        }
    }

    /// Skips `count` messages that [`Self::peek_alike`] found.
    #[inline]
    pub fn advance_by(&mut self, count: u32) {
        assert!(u64::from(count) <= self.head - self.tail, "there were fewer messages");
        self.tail += u64::from(count);
    }

    /// Skips the message that [`Self::peek`] returned, or the one whose header it refused.
    #[inline]
    pub fn advance(&mut self) {
        debug_assert!(
            self.layout.protocol != Protocol::Doorbell || self.tail < self.head,
            "there was no message"
        );
        self.tail += 1;
    }

    /// Returns every slot read so far to the producer. One store, however many slots. Returns whether there
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

    /// Returns the slots of all messages before message number `count`, which is at most [`Self::consumed`]: for a
    /// consumer that reads ahead of what it releases. Returns whether there were any.
    pub fn release_until(&mut self, count: u64) -> bool {
        assert!(count <= self.tail, "messages that were not read cannot be released");
        let any = count > self.released;
        if any {
            // EDGE RX_RELEASE TX_RELEASE HANDOVER (release half)
            self.memory.store(self.layout.tail_offset, count, Ordering::Release);
            self.released = count;
        }
        any
    }

    /// Messages released since the region was formatted.
    pub fn released(&self) -> u64 {
        self.released
    }

    /// Prefetches the slot `ahead` messages on from the producer's cache, if it is known to be published: a
    /// slot that is being written would only be taken away from its writer.
    #[inline]
    pub fn prefetch(&self, ahead: u64, bytes: u64) {
        let n = self.tail + ahead;
        if n < self.head {
            prefetch_slot(&self.memory, &self.layout, n, bytes, false);
        }
    }

    /// Prefetches the slot `ahead` messages on whether it is published or not: for a producer on the other side of a bus,
    /// whose caches are not affected.
    #[inline]
    pub fn prefetch_at(&self, ahead: u64, bytes: u64) {
        prefetch_slot(&self.memory, &self.layout, self.tail + ahead, bytes, false);
    }

    /// Whether the head word indicates waiting messages: a cheap read of the doorbell.
    #[inline]
    pub fn hinted(&self) -> bool {
        self.hint() != 0
    }

    /// The number of waiting messages according to the head word, which is not checked.
    #[inline]
    pub fn hint(&self) -> u64 {
        self.memory.load(self.layout.head_offset, Ordering::Relaxed).wrapping_sub(self.tail)
    }
}
