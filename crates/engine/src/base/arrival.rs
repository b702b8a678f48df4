//! Incoming messages, and why one is not accepted by an mqueue.

use mqueue::abi::SlotHeader;
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer};
use wire::DropReason;
use wire::framing::Expects;
use wire::session::{Origin, ReplyTo};

/// "Any mqueue of the service": the target of a request without a fixed mqueue.
pub(crate) const ANY: u32 = u32::MAX;

/// The same for a request that functions of the worker that takes it over see first.
pub(crate) const ANY_SHOWN: u32 = u32::MAX - 1;

/// An incoming message.
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

    /// How many bytes the client sent, before functions rewrote the message: replies are limited by them.
    #[inline(always)]
    fn received_len(&self) -> usize {
        self.len()
    }

    /// For inspection; later calls use the same bytes.
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

/// A message that the chain of this worker or of another one has seen, and maybe rewritten.
pub(crate) struct Seen<'a> {
    pub(crate) bytes: &'a [u8],
    /// How many bytes the client sent.
    pub(crate) received_len: usize,
}

/// The same message, where its bytes are needed anyway.
pub(crate) fn seen(message: &mut impl Message) -> Seen<'_> {
    let received_len = message.received_len();
    Seen { bytes: message.bytes(), received_len }
}

impl Message for Seen<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.bytes.len()
    }

    #[inline]
    fn received_len(&self) -> usize {
        self.received_len
    }

    #[inline]
    fn bytes(&mut self) -> &[u8] {
        self.bytes
    }

    #[inline(always)]
    fn push(&mut self, ring: &mut Producer<MappedMemory>, head: Head) -> Result<(), LoanError> {
        ring.push(head, self.bytes)
    }
}

/// The first message of a doorbell ring, in its slot.
pub(crate) struct Shown<'a> {
    pub(crate) ring: &'a Consumer<MappedMemory>,
    pub(crate) header: SlotHeader,
    /// Buffer for it.
    pub(crate) scratch: &'a mut [u8],
    /// Its bytes have been copied to `scratch`.
    pub(crate) copied: bool,
}

impl Message for Shown<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.header.len as usize
    }

    // Always inline: the receiver then stays in registers.
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

/// Why an mqueue did not accept a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Permanent.
    Drop(DropReason),
    /// Temporary: a stream keeps the message, a datagram is dropped for this reason.
    Retry(DropReason),
}

/// A request whose client gets the outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    /// The client, which belongs to this worker.
    pub(crate) to: ReplyTo,
    /// See [`wire::session::Request::number`].
    pub(crate) number: u64,
    pub(crate) expects: Expects,
}

/// A request longer than this many bytes that found no credit, and is tried again where it waits, is not copied again
/// every turn…
pub(crate) const RETRY_BYTES: u32 = 4096;
/// … but only after this time.
pub(crate) const RETRY_NS: u64 = 50_000;
