//! Datagrams that leave the engine.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use super::UDP_PAYLOAD_MAX;

/// Maximum number of datagrams that the host kernel takes as one message (UDP_MAX_SEGMENTS of its first version).
pub const GSO_DATAGRAMS_MAX: usize = 64;

/// Memory that others may write at any time, and that stays mapped as long as a value refers to it. Datagrams leave it, or arrive
/// there, without a copy. Nothing is decided by its bytes.
pub trait SharedBytes: fmt::Debug + Send + Sync {
    /// `len` bytes from `at` on. Panics if the memory does not have them.
    fn cells(&self, at: u64, len: usize) -> &[AtomicU8];
    /// Copies bytes from `at` on, as they are at that moment.
    fn copy_out(&self, at: u64, into: &mut [u8]);
    /// Copies bytes in, from `at` on, which is a multiple of 8. The rest of the last word is overwritten.
    fn copy_in(&self, at: u64, from: &[u8]);
}

/// Datagrams to be sent to one destination, inside a [`TxBatch`]: one, or several of the same length without gaps between their
/// payloads.
#[derive(Clone, Copy, Debug)]
pub struct TxItem {
    /// Destination.
    pub peer: SocketAddr,
    /// Source address; `None` uses that of the port.
    pub local: Option<IpAddr>,
    /// Offset of the payloads in [`TxBatch::bytes`]. Room there is kept also for payloads that are [elsewhere](Self::lent_at).
    pub offset: u32,
    /// Length of each payload in bytes.
    pub len: u32,
    /// How many datagrams: from 1 to [`GSO_DATAGRAMS_MAX`], which are one message for the host kernel if it segments.
    pub count: u16,
    /// More datagrams to its destination will follow, so it may wait for them if its batch [may
    /// defer](TxBatch::may_defer).
    pub more: bool,
    /// The payloads are at this offset of the [lent memory](TxBatch::lent), not in the batch's own.
    pub lent_at: Option<NonZero<u64>>,
}

impl TxItem {
    /// Bytes of all its payloads.
    #[inline]
    pub fn bytes(&self) -> usize {
        usize::from(self.count) * self.len as usize
    }

    /// The datagram `number`, as an item of its own.
    #[inline]
    pub fn datagram(&self, number: u16) -> Self {
        let mut item = Self { count: 1, ..*self };
        item.skip(number);
        item
    }

    /// Moves the payloads' place beyond the first datagrams.
    #[inline]
    fn skip(&mut self, datagrams: u16) {
        let bytes = u32::from(datagrams) * self.len;
        self.offset += bytes;
        self.lent_at = self.lent_at.map(|at| at.saturating_add(bytes.into()));
    }
}

/// Datagrams to be sent from one port, in order for each destination. Bounded: [`TxBatch::room_for`] returns whether
/// one more fits. Datagrams that the host kernel did not take stay for the next call.
#[derive(Debug)]
pub struct TxBatch {
    /// As long as it has ever been; room for all of `bytes_max` is reserved.
    bytes: Vec<u8>,
    bytes_max: usize,
    used: usize,
    items: Vec<TxItem>,
    /// Items at the front that are finished.
    sent: usize,
    items_max: usize,
    /// Datagrams that wait.
    datagrams: usize,
    may_defer: bool,
    /// Number of waiting items at the front that were [seen](Self::see).
    seen: usize,
    /// Buffer for payloads that are moved to the front, see [`Self::compact`].
    moving: Vec<u8>,
    /// Memory of the payloads that are not in `bytes`, of `lent_items` items.
    lent: Option<Arc<dyn SharedBytes>>,
    lent_items: usize,
}

impl TxBatch {
    /// A batch of at most `items_max` items and `bytes_max` bytes.
    pub fn new(items_max: usize, bytes_max: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(bytes_max),
            bytes_max,
            used: 0,
            items: Vec::with_capacity(items_max),
            sent: 0,
            items_max,
            datagrams: 0,
            may_defer: false,
            seen: 0,
            moving: Vec::with_capacity(bytes_max),
            lent: None,
            lent_items: 0,
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
            self.datagrams += 1;
            let (offset, len) = (offset as u32, len as u32);
            self.items.push(TxItem {
                peer,
                local,
                offset,
                len,
                count: 1,
                more: false,
                lent_at: None,
            });
        }
        filled
    }

    /// Appends a datagram, to the last item if it is one more of its kind. The caller has checked [`Self::room_for`].
    #[inline]
    pub fn push_alike(&mut self, peer: &SocketAddr, local: &Option<IpAddr>, payload: &[u8]) {
        let len = payload.len();
        let bytes_max = self.bytes_max.min(UDP_PAYLOAD_MAX);
        // Neither one that was looked at, nor one that waits for more.
        if let Some(last) = self.items[self.sent + self.seen..].last_mut()
            && last.len as usize == len
            && len > 0
            && usize::from(last.count) < GSO_DATAGRAMS_MAX
            && !last.more
            && last.lent_at.is_none()
            && last.offset as usize + last.bytes() == self.used
            && last.bytes() + len <= bytes_max
            && last.peer == *peer
            && last.local == *local
        {
            last.count += 1;
            self.datagrams += 1;
            let end = self.used + len;
            if self.bytes.len() < end {
                self.bytes.resize(end, 0);
            }
            self.bytes[self.used..end].copy_from_slice(payload);
            self.used = end;
        } else {
            self.push(*peer, *local, len, |bytes| bytes.copy_from_slice(payload));
        }
    }

    /// How many datagrams of `len` bytes still fit as one item. Empty datagrams are items of their own.
    #[inline]
    pub fn room_for_many(&self, len: usize) -> usize {
        if self.items.len() >= self.items_max {
            return 0;
        }
        let room = (self.bytes_max - self.used).min(UDP_PAYLOAD_MAX);
        room.checked_div(len).unwrap_or(1).min(GSO_DATAGRAMS_MAX)
    }

    /// Appends `count` datagrams of `len` bytes to one destination, whose payloads `fill` writes one behind the other.
    /// `more`: further ones will follow. The caller has checked [`Self::room_for_many`].
    pub fn push_many(
        &mut self,
        to: (SocketAddr, Option<IpAddr>),
        (len, count): (usize, usize),
        more: bool,
        fill: impl FnOnce(&mut [u8]),
    ) {
        let (begin, end) = (self.used, self.used + len * count);
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        fill(&mut self.bytes[begin..end]);
        self.push_item(to, (len, count), more, None);
    }

    /// The same for payloads at `at` of memory that others may write, which are not copied. False, and nothing is appended, while
    /// payloads of other memory wait. [`Self::detach`] ends the loan.
    #[inline]
    pub fn push_lent(
        &mut self,
        to: (SocketAddr, Option<IpAddr>),
        (len, count): (usize, usize),
        more: bool,
        memory: &Arc<dyn SharedBytes>,
        at: NonZero<u64>,
    ) -> bool {
        if !self.lent.as_ref().is_some_and(|lent| Arc::ptr_eq(lent, memory)) {
            if self.lent_items > 0 {
                return false;
            }
            self.lent = Some(memory.clone());
        }
        self.lent_items += 1;
        self.push_item(to, (len, count), more, Some(at));
        true
    }

    #[inline]
    fn push_item(
        &mut self,
        (peer, local): (SocketAddr, Option<IpAddr>),
        (len, count): (usize, usize),
        more: bool,
        lent_at: Option<NonZero<u64>>,
    ) {
        debug_assert!((1..=self.room_for_many(len)).contains(&count));
        let (offset, len, count) = (self.used as u32, len as u32, count as u16);
        let item = TxItem { peer, local, offset, len, count, more, lent_at };
        self.used += item.bytes();
        self.datagrams += usize::from(count);
        self.items.push(item);
    }

    /// More datagrams to the destination of the last one will follow.
    #[inline]
    pub fn more_follows(&mut self) {
        if let Some(last) = self.items.last_mut() {
            last.more = true;
        }
    }

    /// Sets whether datagrams that may wait for [more](TxItem::more) may stay in the next [`super::Nic::send`].
    pub fn set_may_defer(&mut self, may_defer: bool) {
        self.may_defer = may_defer;
    }

    /// Whether datagrams that may wait for [more](TxItem::more) may stay.
    #[inline]
    pub fn may_defer(&self) -> bool {
        self.may_defer
    }

    /// What was not sent yet, in the order in which it will be sent.
    #[inline]
    pub fn waiting(&self) -> &[TxItem] {
        &self.items[self.sent..]
    }

    /// The same for an implementation that sends in another order; the order for each destination must be preserved.
    #[inline]
    pub fn waiting_mut(&mut self) -> &mut [TxItem] {
        &mut self.items[self.sent..]
    }

    /// Number of datagrams that were not sent yet.
    #[inline]
    pub fn waiting_datagrams(&self) -> usize {
        self.datagrams
    }

    /// Marks all waiting items as seen and returns those that were not seen before: a caller that inspects each
    /// datagram once gets it here, even if it waits for several calls.
    pub fn see(&mut self) -> Range<usize> {
        let waiting = self.waiting().len();
        std::mem::replace(&mut self.seen, waiting)..waiting
    }

    /// The datagrams of an item with their payloads, which are in the batch's own memory.
    pub fn datagrams_of(&self, item: &TxItem) -> impl Iterator<Item = (TxItem, &[u8])> {
        let datagrams = (0..item.count).map({
            let item = *item;
            move |number| item.datagram(number)
        });
        datagrams.map(|datagram| (datagram, self.payload(&datagram)))
    }

    /// The payload of an item's first datagram, which is in the batch's own memory.
    #[inline]
    pub fn payload(&self, item: &TxItem) -> &[u8] {
        debug_assert!(item.lent_at.is_none());
        &self.bytes[item.offset as usize..][..item.len as usize]
    }

    /// The batch's own memory.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of the lent memory, which others may write at any time. Panics if it does not have them.
    #[inline]
    pub fn lent(&self, at: NonZero<u64>, len: usize) -> &[AtomicU8] {
        self.lent.as_ref().expect("an item is lent").cells(at.get(), len)
    }

    /// Whether the payloads of items that wait may be in lent memory.
    #[inline]
    pub fn has_lent(&self) -> bool {
        self.lent_items > 0
    }

    /// Copies the payloads of waiting items from the lent memory, which is no longer used then.
    pub fn detach(&mut self) {
        if std::mem::take(&mut self.lent_items) == 0 {
            return;
        }
        let Some(lent) = &self.lent else { return };
        if self.bytes.len() < self.used {
            self.bytes.resize(self.used, 0);
        }
        for item in &mut self.items[self.sent..] {
            if let Some(at) = item.lent_at.take() {
                let payloads = &mut self.bytes[item.offset as usize..][..item.bytes()];
                lent.copy_out(at.get(), payloads);
            }
        }
    }

    /// [`Self::detach`], and the memory is not kept mapped any longer.
    pub fn forget_lent(&mut self) {
        self.detach();
        self.lent = None;
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
        self.detach();
        self.items.drain(..std::mem::take(&mut self.sent));
        self.moving.clear();
        for item in &mut self.items {
            let payloads = &self.bytes[item.offset as usize..][..item.bytes()];
            item.offset = self.moving.len() as u32;
            self.moving.extend_from_slice(payloads);
        }
        self.used = self.moving.len();
        self.bytes[..self.used].copy_from_slice(&self.moving);
    }

    /// The implementation reports that the first `count` waiting datagrams are finished.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.datagrams);
        self.datagrams -= count;
        if self.datagrams == 0 {
            self.items.clear();
            (self.used, self.sent, self.seen) = (0, 0, 0);
            return;
        }
        let mut left = count;
        while left > 0 {
            let item = &mut self.items[self.sent];
            let these = usize::from(item.count);
            if left < these {
                item.skip(left as u16);
                item.count -= left as u16;
                return;
            }
            left -= these;
            self.sent += 1;
            self.seen = self.seen.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

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

    /// What every datagram that waits has: its payload, and whether more follow.
    fn waiting(batch: &TxBatch) -> Vec<(Vec<u8>, bool)> {
        let datagrams = batch.waiting().iter().flat_map(|item| batch.datagrams_of(item));
        datagrams.map(|(datagram, payload)| (payload.to_vec(), datagram.more)).collect()
    }

    #[test]
    fn many_datagrams_are_one_item_and_leave_one_by_one() {
        let peer = SocketAddr::from(([127, 0, 0, 1], 9));
        let mut batch = TxBatch::new(8, 64);
        batch.push(peer, None, 4, |bytes| bytes.fill(1));
        assert_eq!(batch.room_for_many(20), 3);
        batch.push_many((peer, None), (20, 3), true, |bytes| {
            bytes.chunks_mut(20).zip(2..).for_each(|(bytes, n)| bytes.fill(n));
        });
        assert_eq!((batch.room_for_many(1), batch.room_for_many(0)), (0, 1));
        let expected =
            [(vec![1; 4], false), (vec![2; 20], true), (vec![3; 20], true), (vec![4; 20], true)];
        for sent in 0..4 {
            assert_eq!(batch.waiting_datagrams(), 4 - sent);
            assert_eq!(waiting(&batch), expected[sent..]);
            batch.advance(1);
        }
        assert!(batch.is_empty() && batch.room_for(64));
        assert_eq!(TxBatch::new(8, 1 << 20).room_for_many(1), GSO_DATAGRAMS_MAX);
        assert_eq!(TxBatch::new(8, 1 << 20).room_for_many(30_000), 2, "one message has 64 KiB");
    }

    #[test]
    fn a_datagram_like_the_last_one_joins_its_item() {
        let to = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let here = Some(IpAddr::from([127, 0, 0, 1]));
        let mut batch = TxBatch::new(1024, 1 << 20);
        let mut expected = Vec::new();
        let mut push = |batch: &mut TxBatch, port: u16, local, len: usize| {
            let payload = vec![expected.len() as u8; len];
            batch.push_alike(&to(port), &local, &payload);
            expected.push((payload, false));
            batch.waiting().iter().map(|item| item.count).collect::<Vec<_>>()
        };
        assert_eq!(push(&mut batch, 1, None, 8), [1]);
        assert_eq!(push(&mut batch, 1, None, 8), [2]);
        assert_eq!(push(&mut batch, 1, None, 7), [2, 1], "of another length");
        assert_eq!(push(&mut batch, 2, None, 7), [2, 1, 1], "to another client");
        assert_eq!(push(&mut batch, 2, here, 7), [2, 1, 1, 1], "from another address");
        assert_eq!(push(&mut batch, 2, here, 7), [2, 1, 1, 2]);
        assert_eq!(batch.see(), 0..4);
        assert_eq!(push(&mut batch, 2, here, 7), [2, 1, 1, 2, 1], "behind one that was looked at");
        batch.more_follows();
        assert_eq!(
            push(&mut batch, 2, here, 7),
            [2, 1, 1, 2, 1, 1],
            "behind one that waits for more"
        );
        for _ in 0..GSO_DATAGRAMS_MAX - 1 {
            push(&mut batch, 2, here, 7);
        }
        assert_eq!(push(&mut batch, 2, here, 7), [2, 1, 1, 2, 1, 64, 1], "one message has 64");
        assert_eq!(push(&mut batch, 3, None, 0)[6..], [1, 1]);
        assert_eq!(push(&mut batch, 3, None, 0)[6..], [1, 1, 1], "empty");
        assert_eq!(push(&mut batch, 3, None, 40_000)[8..], [1, 1]);
        assert_eq!(push(&mut batch, 3, None, 40_000)[8..], [1, 1, 1], "one message has 64 KiB");
        expected[6].1 = true;
        assert_eq!(batch.waiting_datagrams(), expected.len());
        assert_eq!(waiting(&batch), expected);
    }

    /// Memory that a test writes.
    #[derive(Debug)]
    struct Cells(Box<[AtomicU8]>);

    impl SharedBytes for Cells {
        fn cells(&self, at: u64, len: usize) -> &[AtomicU8] {
            &self.0[at as usize..][..len]
        }
        fn copy_out(&self, at: u64, into: &mut [u8]) {
            let from = self.cells(at, into.len());
            into.iter_mut().zip(from).for_each(|(byte, cell)| *byte = cell.load(Ordering::Relaxed));
        }
        fn copy_in(&self, at: u64, from: &[u8]) {
            let to = self.cells(at, from.len());
            to.iter().zip(from).for_each(|(cell, byte)| cell.store(*byte, Ordering::Relaxed));
        }
    }

    #[test]
    fn lent_payloads_are_read_late_and_copied_when_the_loan_ends() {
        let peer = SocketAddr::from(([127, 0, 0, 1], 9));
        let memories = [0, 1].map(|_| -> Arc<dyn SharedBytes> {
            Arc::new(Cells((0..128).map(|_| AtomicU8::new(0)).collect()))
        });
        let at = NonZero::new(64).expect("not 0");
        let mut batch = TxBatch::new(8, 64);
        batch.push(peer, None, 4, |bytes| bytes.fill(9));
        assert!(batch.push_lent((peer, None), (8, 3), true, &memories[0], at));
        assert!(!batch.push_lent((peer, None), (8, 1), true, &memories[1], at), "other memory");
        assert_eq!(batch.room_for_many(1), 36, "its room is kept");
        batch.push_many((peer, None), (2, 2), false, |bytes| bytes.fill(7));
        // One datagram of it leaves, then the memory is written.
        batch.advance(2);
        let item = batch.waiting()[0];
        assert_eq!((item.count, item.lent_at.map(NonZero::get)), (2, Some(72)));
        assert_eq!(batch.lent(item.lent_at.expect("it is lent"), 16).len(), 16);
        memories[0].copy_in(72, &[5; 16]);
        assert!(batch.has_lent());
        batch.detach();
        assert!(!batch.has_lent());
        memories[0].copy_in(72, &[6; 16]);
        let expected =
            [(vec![5; 8], true), (vec![5; 8], true), (vec![7; 2], false), (vec![7; 2], false)];
        assert_eq!(waiting(&batch), expected);
        assert!(batch.push_lent((peer, None), (8, 1), true, &memories[1], at));
        batch.forget_lent();
        assert_eq!(memories.map(|memory| Arc::strong_count(&memory)), [1, 1]);
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
