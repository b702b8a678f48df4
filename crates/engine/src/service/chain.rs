//! Functions on the path of a service's messages: the seam that a chain of them is attached to.
//!
//! Each worker has a chain of its own for a service, or none. A chain sees a request once, on the worker that received it or on the one that has
//! the state of its functions (`owners.rs`), before it is dispatched; and a reply once, on the worker that owns the mqueue, before it is delivered. It sees batches: the requests of one
//! receive call, and the replies that one turn gathers. A request on a stream that waits after the chain has decided about it is
//! not shown again. One that waits in a shared-memory ring is: its client may have rewritten it meanwhile, so requests in such
//! rings are batches of one.
//!
//! The engine acts on the copy of a message that the chain has seen. Without a chain the cost is one branch a batch: admission is
//! compiled twice.

use std::collections::HashMap;
use std::sync::Arc;

use onpath::{
    Arranged, Chain, Command, CommandError, Direction, End, Link, Messages, Notice, Outcome, Peers,
    Reading, RequestId, Trace,
};
use wire::session::{EndpointKind, Origin, ReplyTo, Request};

use crate::base::arrival::Arrival;
use crate::service::owners::Owners;

/// Which chain of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChainPlace {
    /// The slot of its service.
    pub slot: u16,
    /// The backend on whose path it is, by its place; `None`: it is on the path of clients.
    pub backend: Option<u16>,
}

/// What is asked of a chain on one worker.
pub enum ChainRequest {
    /// Give it these functions, in this order. Without functions the service has no chain.
    Arrange(Vec<Arranged>),
    /// Do a command for the function with this id.
    Command(u64, Command),
    /// Trace the next messages, or none.
    Trace(Option<Box<Trace>>),
}

/// The answer to a [`ChainRequest`].
pub enum ChainReply {
    /// Functions that the chain no longer has. The receiver drops them.
    Arranged(Vec<Link>),
    /// The values of the function's registers, and its state.
    Command(Result<Reading, CommandError>),
    /// The trace before.
    Traced(Option<Box<Trace>>),
}

/// Requests on streams that wait after the chain has decided about them, and the bytes that functions have written for them.
const HELD_MAX: usize = 1 << 16;
const HELD_BYTES_MAX: usize = 4 << 20;

/// A request on a stream that waits.
struct Held {
    outcome: Outcome,
    /// What a function has written in its place.
    written: Option<Box<[u8]>>,
}

/// A request that the chain has seen, or is about to see.
struct Shown {
    arrival: Arrival,
    /// What a function wrote in its place when it was shown before.
    written: Option<Box<[u8]>>,
    /// It was acted on.
    done: bool,
    /// The worker whose functions see it, if that is another one.
    elsewhere: Option<u16>,
}

/// A reply that the chain is about to see. Its request has ended.
#[derive(Clone, Copy)]
pub(crate) struct ShownReply {
    pub(crate) request: Request,
    /// It is sampled, see `stages.rs`.
    pub(crate) sampled: bool,
}

/// What a service's chain hears of besides messages, see `notices.rs`.
#[derive(Default)]
pub(crate) struct Notices {
    /// A function wants to know.
    pub(crate) wanted: bool,
    /// What has happened while the chain was moved out.
    pub(super) missed: Vec<Notice>,
}

/// A chain that is attached, and the batch that it is shown.
pub(crate) struct Attached {
    chain: Chain,
    /// Requests, or replies: never both.
    messages: Messages,
    shown: Vec<Shown>,
    /// The next one of `shown` that a stream takes.
    next: usize,
    /// The one that the chain answered last.
    answered: usize,
    replies: Vec<ShownReply>,
    held: HashMap<(ReplyTo, u64), Held>,
    held_bytes: usize,
    owners: Owners,
}

impl Attached {
    /// A chain without functions. Messages have at most `message_bytes` or `reply_bytes` bytes.
    pub(crate) fn new(message_bytes: usize, reply_bytes: usize) -> Self {
        let longest = message_bytes.max(reply_bytes);
        Self {
            chain: Chain::default(),
            messages: Messages::new(longest, longest),
            shown: Vec::with_capacity(onpath::MESSAGES_MAX),
            next: 0,
            answered: 0,
            replies: Vec::with_capacity(onpath::MESSAGES_MAX),
            // Nothing grows later: a map that is at most half full reuses the places of removed entries.
            held: HashMap::with_capacity(2 * HELD_MAX),
            held_bytes: 0,
            owners: Owners::default(),
        }
    }

    /// The functions have changed: which of these workers have the states of requests, where this is `worker`.
    pub(crate) fn set_owners(&mut self, owners: Vec<u16>, worker: u16) {
        self.owners = Owners::new(self.chain.owner(), owners, worker);
    }

    /// Whether requests stay on the worker that has their state.
    pub(crate) fn is_owned(&self) -> bool {
        self.owners.are_used()
    }

    pub(crate) fn chain(&mut self) -> &mut Chain {
        &mut self.chain
    }

    pub(crate) fn messages(&self) -> &Messages {
        &self.messages
    }

    /// Adds a request to the batch. False: there is no room before the batch has been decided, acted on and cleared. A request
    /// about which the chain has decided before keeps that outcome.
    pub(crate) fn show(&mut self, arrival: &Arrival, request: &[u8]) -> bool {
        if !self.messages.has_room(request.len()) {
            return false;
        }
        let elsewhere = self.owners.elsewhere(arrival, request);
        let mut kept = None;
        let id = RequestId { origin: arrival.origin, number: arrival.number };
        match self.take_held(arrival) {
            _ if elsewhere.is_some() => {
                self.messages.push_decided(&id, request, Outcome::Pass, request.len(), false);
            }
            None => self.messages.push_of(&id, request),
            Some(Held { outcome, written }) => {
                let bytes = written.as_deref().unwrap_or(request);
                if !self.messages.has_room(bytes.len()) {
                    self.keep(arrival, Held { outcome, written });
                    return false;
                }
                self.messages.push_decided(&id, bytes, outcome, request.len(), written.is_some());
                kept = written;
            }
        }
        self.shown.push(Shown { arrival: *arrival, written: kept, done: false, elsewhere });
        true
    }

    /// The addresses of connected clients are found there.
    pub(crate) fn set_peers(&mut self, peers: Arc<dyn Peers>) {
        self.messages.set_peers(peers);
    }

    /// The chain decides about the batch.
    pub(crate) fn decide(&mut self, direction: Direction, clock: &dyn Fn() -> u64) {
        self.chain.decide(direction, &mut self.messages, clock);
    }

    /// How many requests are in the batch.
    pub(crate) fn shown(&self) -> usize {
        self.shown.len()
    }

    /// One of them.
    pub(crate) fn arrival(&self, index: usize) -> Arrival {
        self.shown[index].arrival
    }

    /// The worker whose functions see a request of the batch, if that is another one.
    pub(crate) fn elsewhere(&self, index: usize) -> Option<u16> {
        self.shown[index].elsewhere
    }

    /// Of a request of the batch that is answered, and whose end no other function is to hear of: its origin, its length when it came,
    /// and the answer.
    #[inline(always)]
    pub(crate) fn plain_answer(&self, index: usize) -> Option<(&Origin, usize, &[u8])> {
        let shown = self.shown.get(index)?;
        let heard = self.chain.wants_notices() && self.chain.len() > 1;
        let plain = shown.elsewhere.is_none() && !heard;
        (plain && self.messages.outcome(index) == Outcome::Reply).then(|| {
            let (received, reply) = (self.messages.shown_len(index), self.messages.bytes(index));
            (&shown.arrival.origin, received, reply)
        })
    }

    /// The place of a request in the batch. One that is not in it becomes a batch of its own.
    pub(crate) fn find(
        &mut self,
        arrival: &Arrival,
        request: &[u8],
        clock: &dyn Fn() -> u64,
    ) -> usize {
        if let Some(shown) = self.shown.get(self.next)
            && (shown.arrival.origin, shown.arrival.number) == (arrival.origin, arrival.number)
        {
            self.next += 1;
            return self.next - 1;
        }
        self.clear();
        let shown = self.show(arrival, request);
        debug_assert!(shown, "an empty batch has room for any message");
        self.decide(Direction::Requests, clock);
        self.next = 1;
        0
    }

    /// A request of the batch has been acted on.
    pub(crate) fn set_done(&mut self, index: usize) {
        self.shown[index].done = true;
    }

    /// A request of the batch is not sent. A function that decided that alone knows it.
    pub(crate) fn set_unsent(&mut self, index: usize) {
        let passed = self.messages.outcome(index) == Outcome::Pass;
        if self.chain.wants_notices() && (passed || self.chain.len() > 1) {
            let request = *self.messages.request(index);
            self.chain.notify(&Notice::Ended { request, end: End::Unsent });
        }
    }

    /// A request of the batch is answered by the chain.
    pub(crate) fn set_answered(&mut self, index: usize) {
        self.set_done(index);
        self.set_unsent(index);
        self.answered = index;
    }

    /// The reply to the request that was answered last.
    pub(crate) fn answer(&self) -> &[u8] {
        self.messages.bytes(self.answered)
    }

    /// The batch ends. Requests of streams that were not acted on wait where they are, and are not shown again.
    pub(crate) fn clear(&mut self) {
        for index in 0..self.shown.len() {
            let Shown { arrival, ref mut written, done, elsewhere } = self.shown[index];
            if !done && elsewhere.is_none() {
                let bytes = self.messages.bytes(index);
                let outcome = self.messages.outcome(index);
                // Of one that waits again these are the same bytes.
                let before = written.take();
                let written =
                    before.or_else(|| self.messages.is_written(index).then(|| bytes.into()));
                self.keep(&arrival, Held { outcome, written });
            }
        }
        self.shown.clear();
        self.next = 0;
        self.messages.clear();
    }

    fn take_held(&mut self, arrival: &Arrival) -> Option<Held> {
        let Origin::Client(to) = arrival.origin else { return None };
        let held = self.held.remove(&(to, arrival.number))?;
        self.held_bytes -= held.written.as_ref().map_or(0, |bytes| bytes.len());
        Some(held)
    }

    /// A client has gone, and `next` is the number of its next request that would have been accepted.
    pub(crate) fn forget(&mut self, client: &ReplyTo, next: u64) {
        // Those that wait were shown in one batch.
        for number in next..next + onpath::MESSAGES_MAX as u64 {
            if self.held.is_empty() {
                return;
            }
            if let Some(held) = self.held.remove(&(*client, number)) {
                self.held_bytes -= held.written.map_or(0, |bytes| bytes.len());
            }
        }
    }

    fn keep(&mut self, arrival: &Arrival, held: Held) {
        let bytes = held.written.as_ref().map_or(0, |bytes| bytes.len());
        if self.held.len() >= HELD_MAX || self.held_bytes + bytes > HELD_BYTES_MAX {
            // Of clients that have gone, nearly all: one that is left is shown twice.
            self.held.clear();
            self.held_bytes = 0;
        }
        // A shared-memory client can rewrite a request that waits in its ring.
        if let Origin::Client(to) = arrival.origin
            && to.endpoint != EndpointKind::Shm
        {
            self.held.insert((to, arrival.number), held);
            self.held_bytes += bytes;
        }
    }

    /// The chain decides about a chunk of a byte stream. Its bytes are then those of message 0, until the next batch begins.
    pub(crate) fn decide_chunk(
        &mut self,
        direction: Direction,
        request: &RequestId,
        chunk: &[u8],
        clock: &dyn Fn() -> u64,
    ) -> (Outcome, &[u8]) {
        self.messages.clear();
        self.messages.push_of(request, chunk);
        self.messages.set_chunks();
        self.decide(direction, clock);
        (self.messages.outcome(0), self.messages.bytes(0))
    }

    /// Nothing of a chunk is needed any longer.
    pub(crate) fn clear_chunk(&mut self) {
        self.messages.clear();
    }

    /// Whether there is room for a reply.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.messages.has_room(len)
    }

    /// Adds a reply to the batch, which `copy` writes, unless it returns false.
    pub(crate) fn show_reply(
        &mut self,
        reply: ShownReply,
        len: usize,
        copy: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let Request { origin, number, .. } = reply.request;
        let copied = self.messages.push_with(&RequestId { origin, number }, len, copy);
        if copied {
            self.replies.push(reply);
        }
        copied
    }

    /// How many replies are in the batch.
    pub(crate) fn shown_replies(&self) -> usize {
        self.replies.len()
    }

    /// A reply of the batch.
    pub(crate) fn shown_reply(&self, index: usize) -> ShownReply {
        self.replies[index]
    }

    /// The batch of replies ends.
    pub(crate) fn clear_replies(&mut self) {
        self.replies.clear();
        self.messages.clear();
    }
}

/// Whether the batch that admission works on belongs to a chain. Chosen once a batch.
pub(crate) trait Hooks: Sized {
    /// Whether there is a chain.
    const ATTACHED: bool;

    /// The chain.
    fn attached(&mut self) -> Option<&mut Attached>;

    /// Ends the batch.
    fn into_chain(self) -> Option<Box<Attached>>;
}

/// No chain is attached, or the chain has seen these messages.
pub(crate) struct NoHooks;

impl Hooks for NoHooks {
    const ATTACHED: bool = false;

    #[inline(always)]
    fn attached(&mut self) -> Option<&mut Attached> {
        None
    }

    #[inline(always)]
    fn into_chain(self) -> Option<Box<Attached>> {
        None
    }
}

impl Hooks for Box<Attached> {
    const ATTACHED: bool = true;

    fn attached(&mut self) -> Option<&mut Attached> {
        Some(self)
    }

    fn into_chain(mut self) -> Option<Box<Attached>> {
        self.clear();
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use onpath::{Counters, Failure, Function, OnFailure, Policy};
    use wire::framing::Expects;

    use super::*;

    struct Rewrites;

    impl Function for Rewrites {
        fn decide(&mut self, _: Direction, messages: &mut Messages) -> Result<(), Failure> {
            (0..messages.len()).for_each(|index| messages.rewrite(index, b"written"));
            Ok(())
        }
    }

    #[test]
    fn what_waits_is_kept_without_a_copy_until_its_client_has_gone() {
        let mut attached = Attached::new(64, 64);
        let policy = Policy { on_failure: OnFailure::Open, deadline_ns: 1 };
        let link = Link::new(1, Box::new(Rewrites), policy, Arc::<Counters>::default());
        attached.chain().arrange(vec![Arranged::New(link)]);
        let client = ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key: 3, generation: 1 };
        let arrival = |number| Arrival {
            origin: Origin::Client(client),
            number,
            expects: Expects::Reply,
            received_ns: 0,
            flow: 0,
            target: None,
        };
        let mut places = Vec::new();
        for _ in 0..3 {
            assert!(attached.show(&arrival(7), b"request") && attached.show(&arrival(8), b""));
            attached.decide(Direction::Requests, &|| 0);
            attached.clear();
            let written = attached.held[&(client, 7)].written.as_deref().unwrap();
            assert_eq!(written, b"written");
            places.push(written.as_ptr());
        }
        assert!(places[0] == places[1] && places[1] == places[2]);
        assert_eq!((attached.held.len(), attached.held_bytes), (2, 14));
        attached.forget(&ReplyTo { generation: 2, ..client }, 7);
        assert_eq!(attached.held.len(), 2, "another client");
        attached.forget(&client, 8);
        assert_eq!((attached.held.len(), attached.held_bytes), (1, 7));
        attached.forget(&client, 7);
        assert_eq!((attached.held.len(), attached.held_bytes), (0, 0));
    }
}
