//! What a service share keeps about its bundles, in the engine's memory.

use mqueue::abi::{BUNDLE_ALIGN, BUNDLE_MAX, Bundle};
use mqueue::{Buffer, CheckedReplies, MappedMemory, Pool};
use wire::session::Token;

use crate::base::topology::{Bundles, Service};
use crate::service::bundle::choice::BundleChoice;
use crate::service::bundle::received::{NOT_IN_PLACE, Received};
use crate::service::bundle::run::{Handled, SHORTEST};

/// Largest buffer of a pool.
pub(in crate::service) const BUFFER_BYTES_MAX: usize =
    mqueue::pool::BUFFER_BYTES[mqueue::pool::BUFFER_BYTES.len() - 1] as usize;
/// Messages start at multiples of this unless they were received without gaps.
pub(in crate::service) const MESSAGE_ALIGN: usize = 16;
/// Bytes of the largest payload of a slot of a bundle.
pub(crate) const DESCRIPTOR_BYTES: usize = size_of::<Bundle>();

/// What a service share knows about its bundles.
pub(crate) struct ShareBundles {
    /// Number of requests of one length from which on they go as bundles; `u32::MAX`: none does.
    pub(in crate::service) from: u32,
    /// The same while blocks take bundles.
    wanted: u32,
    /// All that are long enough go as bundles.
    pub(in crate::service) forced: bool,
    /// Blocks run on other processors than the worker's.
    pub(in crate::service) off_thread: bool,
    /// Whether the others do, and how long they are.
    pub(in crate::service) choice: BundleChoice,
    /// How long the engine takes for a message.
    pub(in crate::service) handled: Handled,
    /// Bytes of the area for one reply.
    pub(in crate::service) reply_stride: usize,
    /// The buffer of each entry of the table of requests.
    buffers: Box<[Option<Buffer>]>,
    /// Buffers that datagrams were received in.
    pub(in crate::service) received: Received,
    /// Of each entry of the table of requests: in which of them its messages are, or [`NOT_IN_PLACE`].
    received_in: Box<[u32]>,
}

/// The messages of a bundle that is about to be written into a ring.
pub(in crate::service) struct NewBundle {
    /// Of the first, in the region.
    pub(in crate::service) offset: u64,
    pub(in crate::service) stride: u32,
    pub(in crate::service) count: u32,
    pub(in crate::service) len: u32,
    pub(in crate::service) last_len: u32,
    /// The buffer that they were received in, if they were not copied.
    pub(in crate::service) received_in: u32,
}

impl ShareBundles {
    /// Of a service whose pools have this number of buffers.
    pub(crate) fn new(service: &Service, buffers: u32, off_thread: bool) -> Self {
        let wanted = match service.bundles {
            _ if buffers == 0 || !service.may_bundle() => u32::MAX,
            Bundles::Never => u32::MAX,
            Bundles::Auto => SHORTEST,
            Bundles::Always => 2,
        };
        Self {
            from: wanted,
            wanted,
            forced: service.bundles == Bundles::Always,
            off_thread,
            choice: BundleChoice::new(),
            handled: Handled::new(),
            reply_stride: (service.max_reply_bytes as usize).next_multiple_of(MESSAGE_ALIGN),
            buffers: (0..buffers).map(|_| None).collect(),
            received: Received::new(buffers),
            received_in: vec![NOT_IN_PLACE; buffers as usize].into(),
        }
    }

    /// The buffer of a bundle in use.
    #[inline]
    pub(in crate::service) fn buffer(&self, token: Token) -> Option<&Buffer> {
        self.buffers[token.bundle() as usize].as_ref()
    }

    /// The buffers of a new bundle.
    #[inline]
    pub(in crate::service) fn keep(&mut self, token: Token, buffer: Buffer, received_in: u32) {
        let bundle = token.bundle() as usize;
        self.buffers[bundle] = Some(buffer);
        self.received_in[bundle] = received_in;
        if received_in != NOT_IN_PLACE {
            self.received.share(received_in);
        }
    }

    /// The buffers that a bundle no longer uses, which nothing else does.
    #[inline]
    pub(in crate::service) fn take(&mut self, token: Token) -> (Option<Buffer>, Option<Buffer>) {
        let bundle = token.bundle() as usize;
        let received = match std::mem::replace(&mut self.received_in[bundle], NOT_IN_PLACE) {
            NOT_IN_PLACE => None,
            number => self.received.release(number),
        };
        (self.buffers[bundle].take(), received)
    }

    /// The pool of a bundle has ended, and its buffers with it.
    pub(in crate::service) fn forget(&mut self, bundle: u32) {
        let bundle = bundle as usize;
        self.buffers[bundle] = None;
        match std::mem::replace(&mut self.received_in[bundle], NOT_IN_PLACE) {
            NOT_IN_PLACE => {}
            number => _ = self.received.release(number),
        }
    }

    /// Whether the blocks of any accelerator take bundles.
    pub(in crate::service) fn set_possible(&mut self, possible: bool) {
        self.from = if possible { self.wanted } else { u32::MAX };
    }

    /// How many messages of `stride` bytes, and replies, a buffer of `bytes` has room for.
    pub(in crate::service) fn fit(&self, bytes: usize, stride: usize) -> u32 {
        // The area for replies starts at a line of its own.
        let fit = bytes.saturating_sub(LINE) / (stride + self.reply_stride);
        fit.min(BUNDLE_MAX as usize) as u32
    }

    /// For how many replies a buffer of `bytes` has room.
    pub(in crate::service) fn fit_replies(&self, bytes: usize) -> u32 {
        let fit = bytes.checked_div(self.reply_stride).unwrap_or(usize::MAX);
        fit.min(BUNDLE_MAX as usize) as u32
    }
}

/// Alignment of the area for replies in a buffer.
pub(in crate::service) const LINE: usize = BUNDLE_ALIGN as usize;

/// All buffers of a pool.
pub(crate) fn buffers_of(pool: Option<&Pool<MappedMemory>>) -> u32 {
    pool.map_or(0, |pool| pool.buffers().iter().map(|(all, _)| all).sum())
}

/// The replies of a completion that await delivery.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) token: Token,
    pub(crate) replies: CheckedReplies,
    /// Where the area for replies begins in the bundle's buffer.
    pub(crate) area_at: u32,
    /// Messages to deliver: a bit for each. Their requests are in flight.
    pub(crate) messages: u64,
}

impl Completion {
    /// The number of a message's reply among those of the completion.
    #[inline]
    pub(crate) fn place_of(&self, message: u32) -> u32 {
        (self.replies.answered() & ((1 << message) - 1)).count_ones()
    }

    /// Where reply number `place` is in the bundle's buffer.
    #[inline]
    pub(crate) fn at(&self, place: u32) -> u32 {
        self.area_at + self.replies.at(place)
    }
}

/// Why no bundle was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoBundle {
    /// The next message has to be a single one; then bundles can go on.
    SingleFirst,
    /// All of these messages have to be single ones.
    Singles,
}
