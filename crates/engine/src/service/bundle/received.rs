//! Buffers of a pool that GRO batches are received in: those in use, and how many the next receive call is likely to need. See
//! `service/share/in_place.rs`.

use mqueue::Buffer;
use mqueue::abi::BUNDLE_ALIGN;
use wire::nic::{RxBatch, Train};

/// Marks a bundle whose messages were copied.
pub(in crate::service) const NOT_IN_PLACE: u32 = u32::MAX;
/// A bundle begins at a multiple of [`BUNDLE_ALIGN`], so only a multiple of some number of messages can be split off a GRO batch: at most
/// this.
const UNIT_MAX: u32 = 8;

/// How many messages of `len` bytes, which is not 0, end at a multiple of [`BUNDLE_ALIGN`].
#[inline]
pub(in crate::service) fn unit_of(len: u32) -> u32 {
    (BUNDLE_ALIGN as u32) >> len.trailing_zeros().min(BUNDLE_ALIGN.ilog2())
}

/// What the next receive call of a port is likely to bring: as much as the last one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected {
    /// GRO batches that are worth buffers.
    batches: usize,
    /// Bytes of the longest.
    bytes: usize,
    /// Receive calls since then that brought nothing.
    empty: u8,
}

/// After this many receive calls that brought nothing, no buffers are lent any more: lending costs some 20 ns a buffer.
const EMPTY_MAX: u8 = 16;

impl Expected {
    /// Batches, and the bytes of the longest.
    #[inline]
    pub(in crate::service) fn batches(self) -> (usize, usize) {
        (self.batches, self.bytes)
    }

    /// Whether it is any.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.batches > 0
    }

    /// What is expected after a receive call that brought `datagrams`.
    #[inline]
    pub(crate) fn after(self, datagrams: usize, brought: Self) -> Self {
        match self.empty.saturating_add(1) {
            _ if datagrams > 0 => brought,
            EMPTY_MAX.. => Self::default(),
            empty => Self { empty, ..self },
        }
    }

    /// A GRO batch begins with this datagram. It is worth a buffer of its own from `least` bytes on.
    #[inline]
    pub(crate) fn add(&mut self, rx: &RxBatch, train: Train, least: usize) {
        let (first, last) = (&rx.items[train.first], &rx.items[train.first + train.count - 1]);
        let begins = (first.offset as usize).checked_rem(rx.slot_bytes()) == Some(0);
        let bytes = (last.offset + last.len - first.offset) as usize;
        let unit = unit_of(first.len);
        let splits = unit <= UNIT_MAX && train.count >= 2 * unit as usize;
        if begins && train.contiguous && bytes >= least && splits {
            self.batches += 1;
            self.bytes = self.bytes.max(bytes);
        }
    }
}

/// Buffers that datagrams were received in.
pub(in crate::service) struct Received {
    entries: Box<[Entry]>,
    free: Vec<u32>,
    /// By receive buffer of the call in progress: the entry of what is lent to it.
    lent: Vec<u32>,
}

struct Entry {
    buffer: Option<Buffer>,
    /// Bundles, and the receive call.
    users: u32,
}

impl Received {
    pub(in crate::service) fn new(buffers: u32) -> Self {
        Self {
            entries: (0..buffers).map(|_| Entry { buffer: None, users: 0 }).collect(),
            free: (0..buffers).rev().collect(),
            lent: Vec::with_capacity(buffers as usize),
        }
    }

    /// Buffers in use.
    pub(in crate::service) fn in_use(&self) -> u32 {
        (self.entries.len() - self.free.len()) as u32
    }

    /// One bundle more uses a buffer.
    #[inline]
    pub(in crate::service) fn share(&mut self, number: u32) {
        self.entries[number as usize].users += 1;
    }

    /// One bundle less uses it. Returns it if nothing does.
    #[inline]
    pub(in crate::service) fn release(&mut self, number: u32) -> Option<Buffer> {
        let entry = &mut self.entries[number as usize];
        entry.users -= 1;
        if entry.users > 0 && !mutants::on("return_received_early") {
            return None;
        }
        self.free.push(number);
        entry.buffer.take()
    }

    /// Puts a buffer of the pool into use. The caller lends it to the receive call.
    #[inline]
    pub(in crate::service) fn keep(&mut self, number: u32, buffer: Buffer) {
        self.entries[number as usize] = Entry { buffer: Some(buffer), users: 1 };
        self.lent.push(number);
    }

    /// A free entry; [`Self::keep`] or [`Self::put_back`] follows.
    #[inline]
    pub(in crate::service) fn take_entry(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// An entry was not used.
    pub(in crate::service) fn put_back(&mut self, number: u32) {
        self.free.push(number);
    }

    /// What is lent to a receive buffer of the call in progress: its entry, and where it begins in the region.
    #[inline]
    pub(in crate::service) fn lent_to(&self, slot: usize) -> Option<(u32, u64)> {
        let number = *self.lent.get(slot)?;
        Some((number, self.entries[number as usize].buffer.as_ref()?.offset()))
    }

    /// The loan that was made last, which ends: its entry.
    pub(in crate::service) fn end_last_loan(&mut self) -> Option<u32> {
        self.lent.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_expected_is_forgotten_after_some_empty_receives() {
        let some = Expected { batches: 3, bytes: 9000, empty: 0 };
        let none = Expected::default();
        let mut expected = none.after(5, some);
        for _ in 1..EMPTY_MAX {
            assert!(expected.any());
            expected = expected.after(0, none);
        }
        assert!(expected.any() && !expected.after(0, none).any());
        assert!(!expected.after(1, none).any() && none.after(1, some).any());
    }

    #[test]
    fn a_unit_ends_where_a_bundle_may_begin() {
        for len in 1..3000u32 {
            let unit = unit_of(len);
            assert_eq!(u64::from(unit * len) % BUNDLE_ALIGN, 0);
            assert!((1..unit).all(|fewer| u64::from(fewer * len) % BUNDLE_ALIGN != 0));
        }
        assert_eq!([64, 784, 100, 1].map(unit_of), [1, 4, 16, 64]);
    }
}
