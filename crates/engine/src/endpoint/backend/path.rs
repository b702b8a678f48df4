//! Functions on the path between kernels and one backend.
//!
//! A chain sees a request of a kernel before it is framed, and its answer after the two were matched: both without framing. The first requests of
//! all client mqueues are one batch in each turn, and so are the answers that one read of a connection brings. Other requests and answers in datagrams are
//! shown alone.
//! For functions a client mqueue is a connection of this worker: its place in the worker's list is the key, and each of its requests has a number.
//!
//! Every request still has exactly one answer. What a function answers goes into the RX ring with status `OK`, and the backend is not asked.
//! A request that is dropped is answered with `REFUSED`, one whose answer is dropped with `PROTOCOL`; both are counted as
//! `backend_function`. Functions hear of a request that was shown, and whose answer is not: `Unsent` if it never left, else `Unknown`.

use onpath::{
    Arranged, Chain, Direction, End, Link, MESSAGES_MAX, Messages, Notice, Outcome, RequestId,
};
use wire::session::{EndpointKind, Origin, ReplyTo};

/// A request that the chain has let pass, until it is sent.
#[derive(Default)]
pub(super) struct Waiting {
    /// There is one: the one at the head of the TX ring.
    pub(super) is_one: bool,
    /// The request at the head of the TX ring is in the batch of the path.
    pub(super) is_gathered: bool,
    /// As functions have left it. The memory is used again.
    pub(super) bytes: Vec<u8>,
}

/// What becomes of a message that the chain has seen.
pub(super) enum Decided<'a> {
    /// It goes on like this.
    Passed(&'a [u8]),
    /// This is the answer to it.
    Answered(&'a [u8]),
    Dropped,
}

/// A message of the batch.
#[derive(Clone, Copy)]
pub(super) struct Gathered {
    /// Its client mqueue, and how often the block of that has ended.
    pub(super) client: (u32, u32),
    pub(super) number: u64,
    pub(super) tag: u64,
}

/// The chain of one backend on one worker.
pub(crate) struct BackendPath {
    chain: Chain,
    messages: Messages,
    /// Of each message.
    gathered: Vec<Gathered>,
    worker: u16,
    /// When it was last asked or told anything.
    now_ns: u64,
}

impl BackendPath {
    /// Without functions. Messages have at most this many bytes.
    pub(super) fn new(worker: u16, message_bytes: usize) -> Self {
        let messages = Messages::new(message_bytes, message_bytes);
        let gathered = Vec::with_capacity(MESSAGES_MAX);
        Self { chain: Chain::default(), messages, gathered, worker, now_ns: 0 }
    }

    pub(crate) fn chain(&mut self) -> &mut Chain {
        &mut self.chain
    }

    /// Gives it these functions, in this order; returns those that it no longer has.
    pub(super) fn arrange(&mut self, order: Vec<Arranged>) -> Vec<Link> {
        self.chain.arrange(order)
    }

    fn id(&self, (client, generation): (u32, u32), number: u64) -> RequestId {
        let (endpoint, worker) = (EndpointKind::Tcp, self.worker);
        let client = ReplyTo { endpoint, worker, key: client, generation };
        RequestId { origin: Origin::Client(client), number }
    }

    /// Whether a message of this length finds room in the batch; an empty one has room for the longest.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.messages.has_room(len)
    }

    /// Adds a message of `len` bytes that `fill` writes, unless it returns false. There must be room.
    pub(super) fn gather(
        &mut self,
        message: Gathered,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let id = self.id(message.client, message.number);
        let whole = self.messages.push_with(&id, len, fill);
        if whole {
            self.gathered.push(message);
        }
        whole
    }

    /// Shows the batch. Returns how many messages it has.
    pub(super) fn show(&mut self, direction: Direction, clock: &dyn Fn() -> u64) -> usize {
        if !self.gathered.is_empty() {
            self.chain.decide(direction, &mut self.messages, clock);
            self.now_ns = self.now_ns.max(self.messages.now_ns());
        }
        self.gathered.len()
    }

    /// What becomes of a message of the batch that was shown.
    pub(super) fn decided(&self, direction: Direction, at: usize) -> (Gathered, Decided<'_>) {
        let decided = match self.messages.outcome(at) {
            Outcome::Pass => Decided::Passed(self.messages.bytes(at)),
            Outcome::Reply => Decided::Answered(self.messages.bytes(at)),
            // An answer passes.
            Outcome::Steer(_) | Outcome::Deliver if direction == Direction::Replies => {
                Decided::Passed(self.messages.bytes(at))
            }
            // The ring of an application is the end of a request.
            Outcome::Deliver => Decided::Answered(&[]),
            // A backend has no mqueues.
            Outcome::Steer(_) | Outcome::Drop(_) => Decided::Dropped,
        };
        (self.gathered[at], decided)
    }

    /// The next batch begins.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
        self.gathered.clear();
    }

    /// No answer to a request that was shown will be.
    pub(super) fn ended(&mut self, client: (u32, u32), number: u64, end: End) {
        if self.chain.wants_notices() {
            let request = self.id(client, number);
            self.chain.notify(&Notice::Ended { request, end });
        }
    }

    /// A function has decided about a request alone: the others hear of it.
    pub(super) fn decided_alone(&mut self, client: (u32, u32), number: u64) {
        if self.chain.len() > 1 {
            self.ended(client, number, End::Unsent);
        }
    }

    /// The block of a client mqueue has ended, with all of its requests.
    pub(super) fn gone(&mut self, client: (u32, u32)) {
        if self.chain.wants_notices()
            && let Origin::Client(client) = self.id(client, 0).origin
        {
            self.chain.notify(&Notice::Gone { client, now_ns: self.now_ns });
        }
    }

    /// A millisecond is over.
    pub(super) fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        if self.chain.wants_notices() {
            self.chain.notify(&Notice::Tick { now_ns });
        }
    }
}
