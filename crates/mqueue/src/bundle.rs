//! Bundles: descriptors in slots of a server mqueue, and the checks of both sides. [`crate::abi`] has the format.
//!
//! Neither side believes the other. A block checks a [`Bundle`] against the region's pools, the engine checks a [`BundleReply`] against
//! the area that it gave the bundle, which it knows from its own memory. Each check is one function, and its result is the only
//! way to the memory: [`CheckedBundle`], [`CheckedReplies`].

use crate::abi::*;
use crate::memory::Memory;
use crate::ring::{Consumer, Head, LoanError, Producer, RingError};

/// Replies of a library start at multiples of this.
const REPLY_ALIGN: u64 = 16;

impl Bundle {
    /// Checks a bundle from the region's pools in a ring whose longest message has `longest` bytes.
    pub fn check(&self, token: u64, pools: &[PoolEntry], longest: u32) -> Option<CheckedBundle> {
        let Self { offset, reply_offset, stride, count, len, last_len, reply_bytes, pad: _ } =
            *self;
        let shape = (1..=BUNDLE_MAX).contains(&count)
            && last_len <= len
            && len <= longest
            && len <= stride
            && offset % BUNDLE_ALIGN == 0
            && reply_offset % BUNDLE_ALIGN == 0;
        if !shape && !mutants::on("believe_bundle") {
            return None;
        }
        let bytes = u64::from(count - 1) * u64::from(stride) + u64::from(len);
        let within = |pool: &&PoolEntry| {
            is_within(offset, bytes, pool.offset, pool.bytes)
                && is_within(reply_offset, reply_bytes.into(), pool.offset, pool.bytes)
        };
        pools.iter().find(within)?;
        Some(CheckedBundle { token, bundle: *self })
    }
}

/// Whether [at, at + bytes) lies in [offset, offset + size), which does not overflow.
#[inline]
fn is_within(at: u64, bytes: u64, offset: u64, size: u64) -> bool {
    at.checked_sub(offset).is_some_and(|skip| skip <= size && bytes <= size - skip)
}

/// A bundle whose messages and area for replies lie in a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedBundle {
    token: u64,
    bundle: Bundle,
}

impl CheckedBundle {
    /// Messages.
    pub fn count(&self) -> u32 {
        self.bundle.count
    }

    /// The token of message `i`.
    pub fn token(&self, i: u32) -> u64 {
        self.token.wrapping_add(i.into())
    }

    /// Bytes of message `i`.
    pub fn len(&self, i: u32) -> u32 {
        if i + 1 == self.bundle.count { self.bundle.last_len } else { self.bundle.len }
    }

    /// Copies message `i`, of [`Self::len`] bytes, out of the region.
    #[inline]
    pub fn copy_out<M: Memory>(&self, memory: &M, i: u32, message: &mut [u8]) {
        assert!(i < self.bundle.count, "beyond the bundle");
        assert_eq!(message.len(), self.len(i) as usize, "the message has another length");
        let at = self.bundle.offset + u64::from(i) * u64::from(self.bundle.stride);
        memory.copy_out_unaligned(at, message);
    }
}

/// The block's replies to one bundle, before they are published: consecutive replies of the same length go into one completion.
#[derive(Clone, Debug)]
pub struct BundleReplies {
    token: u64,
    count: u32,
    /// Where the next reply goes, and the end of the area.
    next: u64,
    end: u64,
    /// What is not published yet: nothing if no bit is set.
    unpublished: BundleReply,
}

impl BundleReplies {
    /// Of a bundle that was just received.
    pub fn new(bundle: &CheckedBundle) -> Self {
        let CheckedBundle { token, bundle } = bundle;
        let next = bundle.reply_offset;
        let unpublished = BundleReply { answered: 0, offset: 0, len: 0, stride: 0 };
        let end = next + u64::from(bundle.reply_bytes);
        Self { token: *token, count: bundle.count, next, end, unpublished }
    }

    /// Whether replies were written and not published.
    pub fn any(&self) -> bool {
        self.unpublished.answered != 0
    }

    /// Whether a reply of `len` bytes to message `i` can be in the same completion as those before it.
    pub fn continues(&self, i: u32, len: u32) -> bool {
        let BundleReply { answered, len: before, .. } = self.unpublished;
        answered == 0 || len == before && answered >> i == 0
    }

    /// Writes the reply to message `i` behind those before it. False if the area has no room for it. [`Self::publish`]
    /// must have been called if it does not continue the last one.
    #[inline]
    pub fn write<M: Memory>(&mut self, memory: &M, i: u32, reply: &[u8]) -> bool {
        assert!(i < self.count, "beyond the bundle");
        let len = reply.len() as u32;
        assert!(self.continues(i, len), "another completion");
        let stride = (reply.len() as u64).next_multiple_of(REPLY_ALIGN);
        if stride > self.end - self.next {
            return false;
        }
        if self.unpublished.answered == 0 {
            let (offset, stride) = (self.next, stride as u32);
            self.unpublished = BundleReply { answered: 0, offset, len, stride };
        }
        memory.copy_in(self.next, reply);
        self.next += stride;
        self.unpublished.answered |= 1 << i;
        true
    }

    /// Puts a completion of the replies that were not published into the ring, if there are any; [`Producer::publish`] must
    /// follow. If the ring is full they stay unpublished.
    pub fn publish<M: Memory>(&mut self, tx: &mut Producer<M>) -> Result<(), LoanError> {
        if self.any() {
            tx.push_bundle_reply(self.token, &self.unpublished)?;
            self.unpublished.answered = 0;
        }
        Ok(())
    }
}

/// The area for replies that the engine gave a bundle: as the engine knows it, not as the region says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyArea {
    /// Offset in the region.
    pub offset: u64,
    /// Bytes.
    pub bytes: u32,
}

impl BundleReply {
    /// Checks a completion of a bundle that has this area, in a ring whose longest reply has `longest` bytes. The bits of
    /// `answered` are for the caller to check.
    #[inline]
    pub fn check(&self, area: ReplyArea, longest: u32) -> Option<CheckedReplies> {
        let Self { answered, offset, len, stride } = *self;
        let others = u64::from(answered.count_ones().checked_sub(1)?);
        let bytes = others * u64::from(stride) + u64::from(len);
        let good = len <= longest
            && len <= stride
            && is_within(offset, bytes, area.offset, area.bytes.into());
        if good || mutants::on("believe_replies") {
            Some(CheckedReplies { reply: *self, at: offset.wrapping_sub(area.offset) as u32 })
        } else {
            None
        }
    }
}

/// Replies that lie in the area of their bundle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedReplies {
    reply: BundleReply,
    /// Where the first is in the area.
    at: u32,
}

impl CheckedReplies {
    /// Bit `i` is set if message `i` is answered, whether such a message exists or not.
    pub fn answered(&self) -> u64 {
        self.reply.answered
    }

    /// How many replies there are.
    pub fn count(&self) -> u32 {
        self.reply.answered.count_ones()
    }

    /// Bytes of each reply.
    pub fn len(&self) -> u32 {
        self.reply.len
    }

    /// Whether the replies have no bytes.
    pub fn is_empty(&self) -> bool {
        self.reply.len == 0
    }

    /// Distance between replies in bytes; at least their length.
    pub fn stride(&self) -> u32 {
        self.reply.stride
    }

    /// Where reply number `k` is in the area.
    #[inline]
    pub fn at(&self, k: u32) -> u32 {
        assert!(k < self.count(), "beyond the completion");
        self.at + k * self.reply.stride
    }
}

impl<M: Memory> Producer<M> {
    /// Puts a bundle into the ring, whose messages were written to the pool before. [`Self::publish`] must follow.
    #[inline]
    pub fn push_bundle(&mut self, token: u64, bundle: &Bundle) -> Result<(), LoanError> {
        if !mutants::on("bundle_unordered") {
            // EDGE RX_BUNDLE (release half): before the stores of the slot, whose units are not ordered.
            self.memory().release_fence();
        }
        self.push(Head { token, kind: kind::BUNDLE, ..Head::default() }, &bundle.to_bytes())
    }

    /// Puts a completion into the ring, whose replies were written to the pool before. [`Self::publish`] must follow.
    #[inline]
    pub fn push_bundle_reply(&mut self, token: u64, reply: &BundleReply) -> Result<(), LoanError> {
        // EDGE TX_BUNDLE BUNDLE_RETURN (release half): before the stores of the slot, whose units are not ordered.
        self.memory().release_fence();
        self.push(Head { token, kind: kind::BUNDLE, ..Head::default() }, &reply.to_bytes())
    }

    /// Ends a message of a bundle without a reply. [`Self::publish`] must follow.
    pub fn push_bundle_drop(&mut self, token: u64, status: u8) -> Result<(), LoanError> {
        // EDGE BUNDLE_RETURN (release half): the message was read before the stores of the slot.
        self.memory().release_fence();
        self.push(Head { token, kind: kind::DROP, status, ..Head::default() }, &[])
    }
}

impl<M: Memory> Consumer<M> {
    /// The descriptor in the slot of kind BUNDLE whose header [`Self::peek`] just returned: of an RX ring. `None` if part of it has not
    /// arrived yet (`granule`); a slot that holds no descriptor is an invalid one. Nothing in it was checked.
    #[inline]
    pub fn bundle(&self, header: &SlotHeader) -> Result<Option<Bundle>, RingError> {
        let descriptor = self.descriptor(header)?;
        // EDGE RX_BUNDLE (acquire half): before the messages are read.
        self.memory.acquire_fence();
        Ok(descriptor.map(Bundle::from_bytes))
    }

    /// The same of a TX ring.
    #[inline]
    pub fn bundle_reply(&self, header: &SlotHeader) -> Result<Option<BundleReply>, RingError> {
        let descriptor = self.descriptor(header)?;
        // EDGE TX_BUNDLE (acquire half): before the replies are read.
        self.memory.acquire_fence();
        Ok(descriptor.map(BundleReply::from_bytes))
    }

    /// The payload of a slot of kind BUNDLE, which is not in an arena.
    #[inline(always)]
    fn descriptor<const N: usize>(
        &self,
        header: &SlotHeader,
    ) -> Result<Option<[u8; N]>, RingError> {
        if header.len as usize != N || header.flags != 0 {
            return Err(RingError::BadHeader);
        }
        let mut bytes = [0; N];
        Ok(self.copy_out(header, &mut bytes).then_some(bytes))
    }
}
