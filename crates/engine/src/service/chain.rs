//! Functions on the path of a service's messages: the seam that a chain of them is attached to.
//!
//! Each worker has a chain of its own for a service, or none. A chain sees a request once, on the worker that received it, before it is
//! dispatched; and a reply once, on the worker that owns the mqueue, before it is delivered. A request on a stream that waits for credit
//! after the chain has let it pass is not shown again. One that waits in a shared-memory ring is: its client may have rewritten it
//! meanwhile. Without a chain the cost is one branch a batch: admission is compiled twice.

use std::collections::HashMap;

use wire::session::{EndpointKind, Origin, ReplyTo};
use wire::{DropReason, DropScope};

use crate::service::arrival::Arrival;

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on.
    Pass,
    /// It is dropped for this reason; `kernel_drop` if that is no reason why a request ends.
    Drop(DropReason),
    /// A request: the chain has written its reply. A reply: what the chain has written takes its place.
    Reply,
    /// A request goes to this mqueue of the service, by its number over all workers. A reply goes on.
    Steer(u32),
}

impl Verdict {
    /// Drops only for reasons why requests end.
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

/// Requests on streams that wait for credit after the chain has let them pass.
const HELD_MAX: usize = 1 << 16;

/// A chain that is attached.
pub(crate) struct Attached {
    chain: Box<dyn Chain>,
    /// What it has written.
    written: Vec<u8>,
    /// Requests on streams that wait, and where they were steered.
    held: HashMap<(ReplyTo, u64), Option<u32>>,
}

impl Attached {
    /// Replies have at most `reply_bytes`.
    pub(crate) fn new(chain: Box<dyn Chain>, reply_bytes: usize) -> Self {
        // Nothing grows later: a map that is at most half full reuses the places of removed entries.
        let held = HashMap::with_capacity(2 * HELD_MAX);
        Self { chain, written: Vec::with_capacity(reply_bytes), held }
    }

    pub(crate) fn detach(self) -> Box<dyn Chain> {
        self.chain
    }

    /// What the chain says of a reply, and what it has written.
    pub(crate) fn reply(&mut self, reply: &[u8]) -> (Verdict, &[u8]) {
        self.written.clear();
        (self.chain.reply(reply, &mut self.written).checked(), &self.written)
    }
}

/// What admission does with a request before it is dispatched. Chosen once a batch.
pub(crate) trait Hooks: Sized {
    /// Whether there is a chain.
    const ATTACHED: bool;

    /// What becomes of a request.
    fn request(&mut self, arrival: &Arrival, request: &[u8]) -> Verdict;

    /// The reply that was written.
    fn written(&self) -> &[u8];

    /// A request that passed, or was steered, waits where it is and is retried.
    fn hold(&mut self, arrival: &Arrival, steered: Option<u32>);

    /// The batch ends.
    fn into_chain(self) -> Option<Box<Attached>>;
}

/// No chain is attached, or it has seen these messages.
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
            // Of clients that have gone, nearly all: one that is left is looked at twice.
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
