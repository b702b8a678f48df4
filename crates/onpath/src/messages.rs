//! A batch: messages in one piece of memory, and what functions have decided about each.

use std::net::SocketAddr;
use std::sync::Arc;

use wire::session::{EndpointKind, Origin, ReplyTo};
use wire::{DropReason, DropScope};

/// Which request a message is, or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// The client that sent it. A connection's key and generation together never name another connection.
    pub origin: Origin,
    /// Its number on its connection, from 0. Datagrams have none: 0.
    pub number: u64,
}

/// Finds the addresses of clients that are connected.
pub trait Peers: Send + Sync {
    /// The address from which a client has connected; `None` if the connection has ended, and of clients over shared memory.
    fn peer(&self, client: &ReplyTo) -> Option<SocketAddr>;
}

/// Messages in a batch, at most.
pub const MESSAGES_MAX: usize = 1024;

/// Bytes of messages in a batch that there is always room for.
pub const SHOWN_BYTES_MIN: usize = 256 << 10;

/// Bytes that functions may write in a batch, at least; more if a single message may be longer. There is room for replies that grow by a key
/// each.
const WRITTEN_BYTES_MIN: usize = 576 << 10;

/// The request of a message that was added without one.
const UNKNOWN: RequestId = RequestId {
    origin: Origin::Client(ReplyTo {
        endpoint: EndpointKind::Tcp,
        worker: u16::MAX,
        key: u32::MAX,
        generation: u32::MAX,
    }),
    number: 0,
};

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It goes on, with the bytes that it has now.
    Pass,
    /// It is dropped for this reason, which is one why requests end.
    Drop(DropReason),
    /// A request: its bytes now are the reply to its client.
    Reply,
    /// A request goes to this mqueue of the service, numbered over all workers.
    Steer(u32),
    /// A request is in the ring of an application, which is its end. A reply passes.
    Deliver,
}

/// How many messages functions have decided about, by decision, and how many they have rewritten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Dropped messages.
    pub dropped: u64,
    /// Answered requests.
    pub replied: u64,
    /// Steered requests.
    pub steered: u64,
    /// Messages with other bytes than before.
    pub rewritten: u64,
    /// Requests for the ring of an application.
    pub delivered: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    start: u32,
    len: u32,
    shown_len: u32,
    outcome: Outcome,
    /// Functions may still decide about it.
    open: bool,
    /// Its bytes are not those with which it came.
    written: bool,
    /// It would be open, and is not shown at present.
    aside: bool,
    /// The last call that decided about it.
    call: u32,
}

/// A batch before a call.
#[derive(Clone, Copy, Default)]
struct Mark {
    used: usize,
    open: usize,
    tally: Tally,
}

/// The messages of a batch. Indices count from 0, in the order of arrival. All memory is reserved when it is made.
pub struct Messages {
    /// All of the memory. What is behind the used part is of earlier batches.
    bytes: Box<[u8]>,
    used: usize,
    entries: Vec<Entry>,
    /// Of each entry.
    requests: Vec<RequestId>,
    /// Finds those of connected clients, if there is something that knows them.
    peers: Option<Arc<dyn Peers>>,
    now_ns: u64,
    /// They are chunks of byte streams.
    chunks: bool,
    open: usize,
    tally: Tally,
    shown_bytes_max: usize,
    /// Bytes of `bytes` that are shown messages.
    shown_bytes: usize,
    written_len_max: usize,
    /// Calls of functions for this batch, and the state before the last one: entries that it has changed, and the rest.
    call: u32,
    changed: Vec<(u32, Entry)>,
    mark: Mark,
}

impl Messages {
    /// Messages have up to `message_bytes` bytes; those that functions write have up to `written_bytes`.
    pub fn new(message_bytes: usize, written_bytes: usize) -> Self {
        let shown_bytes_max = SHOWN_BYTES_MIN.max(message_bytes);
        Self {
            bytes: vec![0; Self::bytes_max(message_bytes, written_bytes)].into(),
            used: 0,
            entries: Vec::with_capacity(MESSAGES_MAX),
            requests: Vec::with_capacity(MESSAGES_MAX),
            peers: None,
            now_ns: 0,
            chunks: false,
            open: 0,
            tally: Tally::default(),
            shown_bytes_max,
            shown_bytes: 0,
            written_len_max: written_bytes,
            call: 0,
            changed: Vec::with_capacity(MESSAGES_MAX),
            mark: Mark::default(),
        }
    }

    /// Bytes of a batch of such messages with what functions have written, at most.
    pub fn bytes_max(message_bytes: usize, written_bytes: usize) -> usize {
        SHOWN_BYTES_MIN.max(message_bytes) + WRITTEN_BYTES_MIN.max(written_bytes)
    }

    /// The addresses of connected clients are found there, in this batch and all later ones.
    pub fn set_peers(&mut self, peers: Arc<dyn Peers>) {
        self.peers = Some(peers);
    }

    /// The messages of this batch are chunks of byte streams: each continues the one before of its [client](RequestId) and direction.
    pub fn set_chunks(&mut self) {
        self.chunks = true;
    }

    /// Whether they are. If not, each is a message of its own.
    pub fn are_chunks(&self) -> bool {
        self.chunks
    }

    /// Whether a message of this length finds room; an empty batch has room for the longest.
    #[inline]
    pub fn has_room(&self, len: usize) -> bool {
        self.entries.len() < MESSAGES_MAX
            && self.shown_bytes + len <= self.shown_bytes_max
            && self.used + len <= self.bytes.len()
    }

    /// Adds a message of `len` bytes, all of which `fill` writes, unless it returns false. There must be room.
    pub fn push_with(
        &mut self,
        request: &RequestId,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        assert!(self.has_room(len), "the caller asks first");
        let start = self.used;
        if !fill(&mut self.bytes[start..start + len]) {
            return false;
        }
        self.add(request, len, Outcome::Pass, true);
        true
    }

    /// Adds a message. There must be room.
    pub fn push(&mut self, message: &[u8]) {
        self.push_of(&UNKNOWN, message);
    }

    /// Adds a message that is this request, or answers it. There must be room.
    #[inline]
    pub fn push_of(&mut self, request: &RequestId, message: &[u8]) {
        assert!(self.has_room(message.len()), "the caller asks first");
        self.bytes[self.used..][..message.len()].copy_from_slice(message);
        self.add(request, message.len(), Outcome::Pass, true);
    }

    /// Adds a message about which functions have decided before: they are not asked again. It came with `shown_len` bytes; `written`
    /// are others that they wrote. There must be room.
    pub fn push_decided(
        &mut self,
        request: &RequestId,
        bytes: &[u8],
        outcome: Outcome,
        shown_len: usize,
        written: bool,
    ) {
        assert!(self.has_room(bytes.len()), "the caller asks first");
        self.bytes[self.used..][..bytes.len()].copy_from_slice(bytes);
        self.add(request, bytes.len(), outcome, false);
        let entry = self.entries.last_mut().expect("it was added");
        (entry.shown_len, entry.written) = (shown_len as u32, written);
    }

    /// A message whose bytes are the next ones of the memory.
    #[inline]
    fn add(&mut self, request: &RequestId, len: usize, outcome: Outcome, open: bool) {
        self.requests.push(*request);
        let (start, len) = (self.used as u32, len as u32);
        self.used += len as usize;
        let (shown_len, call) = (len, self.call);
        let (written, aside) = (false, false);
        self.entries.push(Entry { start, len, shown_len, outcome, open, written, aside, call });
        self.shown_bytes += len as usize;
        self.open += usize::from(open);
    }

    /// Forgets all messages.
    pub fn clear(&mut self) {
        self.used = 0;
        self.entries.clear();
        self.requests.clear();
        self.shown_bytes = 0;
        self.chunks = false;
        self.open = 0;
        self.call = 0;
    }

    /// A call of a function begins at this time: [`Self::undo`] goes back to here.
    pub(crate) fn begin_call(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.changed.clear();
        self.call += 1;
        self.mark = Mark { used: self.used, open: self.open, tally: self.tally };
    }

    /// The call failed: nothing that it decided has an effect.
    pub(crate) fn undo(&mut self) {
        for (index, before) in self.changed.drain(..) {
            self.entries[index as usize] = before;
        }
        (self.used, self.open, self.tally) = (self.mark.used, self.mark.open, self.mark.tally);
    }

    /// An open message is not shown until [`Self::bring_back`].
    pub(crate) fn set_aside(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        if entry.open {
            (entry.open, entry.aside) = (false, true);
            self.open -= 1;
        }
    }

    /// A message that was set aside is open again; whether it was.
    pub(crate) fn bring_back(&mut self, index: usize) -> bool {
        let entry = &mut self.entries[index];
        let aside = std::mem::take(&mut entry.aside);
        entry.open |= aside;
        self.open += usize::from(aside);
        aside
    }

    /// The running call decides about a message, which is open.
    #[inline]
    fn change(&mut self, index: usize) -> &mut Entry {
        let entry = &mut self.entries[index];
        if entry.call != self.call {
            self.changed.push((index as u32, *entry));
            entry.call = self.call;
        }
        entry
    }

    /// Messages in the batch.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Messages about which no function has decided for good.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Bytes of these messages.
    pub fn open_bytes(&self) -> u64 {
        let open = self.entries.iter().filter(|entry| entry.open);
        open.map(|entry| u64::from(entry.len)).sum()
    }

    /// Whether functions may still decide about a message.
    #[inline]
    pub fn is_open(&self, index: usize) -> bool {
        self.entries[index].open
    }

    /// The bytes of a message as they are now.
    #[inline]
    pub fn bytes(&self, index: usize) -> &[u8] {
        let Entry { start, len, .. } = self.entries[index];
        &self.bytes[start as usize..][..len as usize]
    }

    /// The request that a message is, or answers.
    #[inline]
    pub fn request(&self, index: usize) -> &RequestId {
        &self.requests[index]
    }

    /// The address from which the client sent the request that a message is, or answers. `None`: it is no client over UDP or TCP, or its connection
    /// has ended. Of connected clients it is looked up: ask once for each message.
    pub fn peer(&self, index: usize) -> Option<SocketAddr> {
        match &self.requests[index].origin {
            Origin::Datagram { peer, .. } => Some(*peer),
            Origin::Client(to) if to.endpoint == EndpointKind::Tcp => self.peers.as_ref()?.peer(to),
            Origin::Client(_) => None,
        }
    }

    /// The time at which the call began, in nanoseconds of a monotonic clock.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Whether a function has replaced its bytes.
    pub fn is_written(&self, index: usize) -> bool {
        self.entries[index].written
    }

    /// How many bytes a message had when it came.
    #[inline]
    pub fn shown_len(&self, index: usize) -> usize {
        self.entries[index].shown_len as usize
    }

    /// What becomes of a message.
    #[inline]
    pub fn outcome(&self, index: usize) -> Outcome {
        self.entries[index].outcome
    }

    /// Where the bytes of a message are in [`Self::memory`].
    pub fn place(&self, index: usize) -> (u32, u32) {
        (self.entries[index].start, self.entries[index].len)
    }

    /// The bytes of all messages, and what functions have written, without gaps.
    pub fn memory(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Decisions so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    #[inline]
    fn close(&mut self, index: usize, outcome: Outcome) -> bool {
        if !self.entries[index].open {
            return false;
        }
        let entry = self.change(index);
        (entry.open, entry.outcome) = (false, outcome);
        self.open -= 1;
        true
    }

    /// Puts an open request into the ring of the function's application.
    pub fn deliver(&mut self, index: usize) {
        if self.close(index, Outcome::Deliver) {
            self.tally.delivered += 1;
        }
    }

    /// Lets `put` put the requests into a ring that the running call delivers; those for which it returns false are dropped as `ring_full`.
    pub(crate) fn put_delivered(&mut self, mut put: impl FnMut(&[u8], &RequestId) -> bool) {
        for (index, _) in &self.changed {
            let entry = &mut self.entries[*index as usize];
            if entry.outcome == Outcome::Deliver {
                let bytes = &self.bytes[entry.start as usize..][..entry.len as usize];
                if !put(bytes, &self.requests[*index as usize]) {
                    entry.outcome = Outcome::Drop(DropReason::RingFull);
                }
            }
        }
    }

    /// Drops an open message. A reason that does not end requests is replaced by `function_drop`.
    pub fn drop(&mut self, index: usize, reason: DropReason) {
        let ends = reason.scope() == DropScope::Request;
        let reason = if ends { reason } else { DropReason::FunctionDrop };
        if self.close(index, Outcome::Drop(reason)) {
            self.tally.dropped += 1;
        }
    }

    /// Answers an open request with these bytes. If there is no room for them it is dropped as `reply_too_long` or `reply_memory`.
    pub fn reply(&mut self, index: usize, reply: &[u8]) {
        self.reply_with(index, reply.len(), |_, bytes| bytes.copy_from_slice(reply));
    }

    /// The same with a reply of `len` bytes, all of which `fill` writes. It gets the request as well.
    #[inline]
    pub fn reply_with(&mut self, index: usize, len: usize, fill: impl FnOnce(&[u8], &mut [u8])) {
        if self.is_open(index) && self.write(index, len, fill) {
            self.close(index, Outcome::Reply);
            self.tally.replied += 1;
        }
    }

    /// How many bytes a function may write for one message at present.
    pub fn room(&self) -> usize {
        self.written_len_max.min(self.bytes.len() - self.used)
    }

    /// Answers an open request with the bytes that it has. If a reply must not have so many it is dropped as `reply_too_long`.
    pub fn reply_same(&mut self, index: usize) {
        if self.entries[index].len as usize > self.written_len_max {
            self.drop(index, DropReason::ReplyTooLong);
        } else if self.close(index, Outcome::Reply) {
            self.tally.replied += 1;
        }
    }

    /// Replaces the bytes of an open message, which stays open. If there is no room for them it is dropped as
    /// `reply_too_long` or `reply_memory`.
    pub fn rewrite(&mut self, index: usize, bytes: &[u8]) {
        let fill = |_: &[u8], into: &mut [u8]| into.copy_from_slice(bytes);
        if self.is_open(index) && self.write(index, bytes.len(), fill) {
            self.tally.rewritten += 1;
        }
    }

    /// The same with `len` bytes, all of which `fill` writes. It gets the message as well.
    pub fn rewrite_with(&mut self, index: usize, len: usize, fill: impl FnOnce(&[u8], &mut [u8])) {
        if self.is_open(index) && self.write(index, len, fill) {
            self.tally.rewritten += 1;
        }
    }

    /// The most bytes that a function may write for one message.
    pub fn written_max(&self) -> usize {
        self.written_len_max
    }

    /// Sends an open request to this mqueue, unless a later function decides otherwise. A reply goes to its client all the same.
    pub fn steer(&mut self, index: usize, mqueue: u32) {
        if self.is_open(index) {
            self.change(index).outcome = Outcome::Steer(mqueue);
            self.tally.steered += 1;
        }
    }

    #[inline]
    fn write(&mut self, index: usize, len: usize, fill: impl FnOnce(&[u8], &mut [u8])) -> bool {
        let room = self.bytes.len() - self.used;
        if len > self.written_len_max || len > room {
            let long = len > self.written_len_max;
            let reason = if long { DropReason::ReplyTooLong } else { DropReason::ReplyMemory };
            self.drop(index, reason);
            return false;
        }
        let Entry { start: former, len: former_len, .. } = self.entries[index];
        let (before, free) = self.bytes.split_at_mut(self.used);
        fill(&before[former as usize..][..former_len as usize], &mut free[..len]);
        let start = self.used as u32;
        self.used += len;
        let entry = self.change(index);
        (entry.start, entry.len, entry.written) = (start, len as u32, true);
        true
    }
}
