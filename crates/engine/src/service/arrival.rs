//! Messages on their way in, and why one does not get into an mqueue.

use mqueue::abi::SlotHeader;
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer};
use wire::DropReason;
use wire::framing::Expects;
use wire::session::{Origin, ReplyTo};

/// "Any mqueue of the service": the target of a request that is bound to none.
pub(crate) const ANY: u32 = u32::MAX;

/// A message on its way in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) origin: Origin,
    /// See [`wire::session::Request::number`].
    pub(crate) number: u64,
    pub(crate) expects: Expects,
    pub(crate) received_ns: u64,
    pub(crate) flow: u64,
    /// `Some`: handed over by another worker, for this mqueue or [`ANY`].
    pub(crate) target: Option<u32>,
}

/// The bytes of an incoming message, in any memory: they are copied once.
pub(crate) trait Message {
    fn len(&self) -> usize;

    /// For inspection; the bytes taken afterwards are those inspected.
    fn bytes(&mut self) -> &[u8];

    /// Copies them into a ring.
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError>;
}

impl Message for &[u8] {
    #[inline]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    #[inline]
    fn bytes(&mut self) -> &[u8] {
        self
    }

    #[inline(always)]
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError> {
        ring.push(head, self)
    }
}

/// The message that a doorbell ring shows, in its slot.
pub(crate) struct Shown<'a> {
    pub(crate) ring: &'a Consumer<MappedMemory>,
    pub(crate) header: SlotHeader,
    /// Room for it.
    pub(crate) scratch: &'a mut [u8],
    /// Its bytes are in `scratch`.
    pub(crate) copied: bool,
}

impl Message for Shown<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.header.len as usize
    }

    // Always inline: what it is called on is then nowhere in memory.
    #[inline(always)]
    fn bytes(&mut self) -> &[u8] {
        let bytes = &mut self.scratch[..self.header.len as usize];
        if !self.copied {
            let arrived = self.ring.copy_out(&self.header, bytes);
            debug_assert!(arrived, "doorbell rings hold whole messages");
            self.copied = true;
        }
        bytes
    }

    #[inline(always)]
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError> {
        if !self.copied && ring.push_from(head, self.ring, &self.header) {
            return Ok(());
        }
        ring.push(head, self.bytes())
    }
}

/// Why a message did not get into an mqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// For good.
    Drop(DropReason),
    /// For now: a stream keeps it, a datagram is dropped for this reason.
    Retry(DropReason),
}

/// A request of a client that gets its outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    /// The client, which belongs to this worker.
    pub(crate) to: ReplyTo,
    /// See [`wire::session::Request::number`].
    pub(crate) number: u64,
    pub(crate) expects: Expects,
}

/// A request longer than this in bytes that found no credit, and is looked at again where it waits, is not copied again every
/// turn…
pub(crate) const RETRY_BYTES: u32 = 4096;
/// … but only after this long.
pub(crate) const RETRY_NS: u64 = 50_000;
