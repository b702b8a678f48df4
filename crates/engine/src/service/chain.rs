//! Functions on the path of a service's messages: the seam that a chain of them is attached to.
//!
//! Each worker has its own chain for a service, or none. A chain sees a request once, on the worker that received it,
//! before it is dispatched; and a reply once, on the worker that owns the mqueue, before it is delivered. A request
//! on a stream that waits for credit after the chain has passed it is not shown again. A request that waits in a
//! shared-memory ring is: its client may have rewritten it meanwhile. Without a chain the cost is one branch per
//! batch: admission is compiled twice.

use std::collections::HashMap;

use wire::session::{EndpointKind, Origin, ReplyTo};
use wire::{DropReason, DropScope};

use crate::service::arrival::Arrival;

/// What a chain does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is processed further.
    Pass,
    /// It is dropped for this reason; as `kernel_drop` if that reason does not end requests.
    Drop(DropReason),
    /// For a request: the chain has written its reply. For a reply: the bytes that the chain has written replace it.
    Reply,
    /// For a request: it goes to this mqueue of the service, by its number over all workers. A reply is delivered.
    Steer(u32),
}

impl Verdict {
    /// Replaces a drop reason that does not end requests.
    fn checked(self) -> Self {
        match self {
            Self::Drop(reason) if reason.scope() != DropScope::Request => {
                Self::Drop(DropReason::KernelDrop)
            }
            verdict => verdict,
        }
    }
}

/// Functions on the path, for one service on one worker.
pub trait Chain: Send {
    /// A request was received. `reply` is empty. A request of a shared-memory client that finds no credit is shown again when it is
    /// retried.
    fn request(&mut self, request: &[u8], reply: &mut Vec<u8>) -> Verdict;

    /// A reply is about to be delivered. `other` is empty.
    fn reply(&mut self, reply: &[u8], other: &mut Vec<u8>) -> Verdict;
}

/// Maximum number of requests on streams that wait for credit after the chain has passed them.
const HELD_MAX: usize = 1 << 16;

/// A chain that is attached.
pub(crate) struct Attached {
    chain: Box<dyn Chain>,
    /// Buffer for what the chain writes.
    written: Vec<u8>,
    /// Requests on streams that wait, with the mqueue they were steered to.
    held: HashMap<(ReplyTo, u64), Option<u32>>,
}

impl Attached {
    /// Replies have at most `reply_bytes`.
    pub(crate) fn new(chain: Box<dyn Chain>, reply_bytes: usize) -> Self {
        // The map never grows later: one that is at most half full reuses the places of removed entries.
        let held = HashMap::with_capacity(2 * HELD_MAX);
        Self { chain, written: Vec::with_capacity(reply_bytes), held }
    }

    pub(crate) fn detach(self) -> Box<dyn Chain> {
        self.chain
    }

    /// The chain's verdict on a reply, and the bytes it has written.
    pub(crate) fn reply(&mut self, reply: &[u8]) -> (Verdict, &[u8]) {
        self.written.clear();
        (self.chain.reply(reply, &mut self.written).checked(), &self.written)
    }
}

/// What admission does with a request before it is dispatched. Chosen once per batch.
pub(crate) trait Hooks: Sized {
    /// Whether there is a chain.
    const ATTACHED: bool;

    /// The verdict on a request.
    fn request(&mut self, arrival: &Arrival, request: &[u8]) -> Verdict;

    /// The reply that was written.
    fn written(&self) -> &[u8];

    /// A request that passed, or was steered, waits in its socket or ring and is retried.
    fn hold(&mut self, arrival: &Arrival, steered: Option<u32>);

    /// Ends the batch.
    fn into_chain(self) -> Option<Box<Attached>>;
}

/// No chain is attached, or the chain has seen these messages.
pub(crate) struct NoHooks;

impl Hooks for NoHooks {
    const ATTACHED: bool = false;

    #[inline(always)]
    fn request(&mut self, _: &Arrival, _: &[u8]) -> Verdict {
        Verdict::Pass
    }

    fn written(&self) -> &[u8] {
        &[]
    }

    #[inline(always)]
    fn hold(&mut self, _: &Arrival, _: Option<u32>) {}

    #[inline(always)]
    fn into_chain(self) -> Option<Box<Attached>> {
        None
    }
}

impl Hooks for Box<Attached> {
    const ATTACHED: bool = true;

    fn request(&mut self, arrival: &Arrival, request: &[u8]) -> Verdict {
        if let Origin::Client(to) = arrival.origin
            && let Some(steered) = self.held.remove(&(to, arrival.number))
        {
            return steered.map_or(Verdict::Pass, Verdict::Steer);
        }
        self.written.clear();
        self.chain.request(request, &mut self.written).checked()
    }

    fn written(&self) -> &[u8] {
        &self.written
    }

    fn hold(&mut self, arrival: &Arrival, steered: Option<u32>) {
        if self.held.len() >= HELD_MAX {
            // Nearly all entries are of clients that have gone; a request of one that has not is shown to the chain
            // twice.
            self.held.clear();
        }
        // A shared-memory client can rewrite a request that waits in its ring.
        if let Origin::Client(to) = arrival.origin
            && to.endpoint != EndpointKind::Shm
        {
            self.held.insert((to, arrival.number), steered);
        }
    }

    fn into_chain(self) -> Option<Box<Attached>> {
        Some(self)
    }
}
