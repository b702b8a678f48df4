//! Bundles in flight: runs of requests of one client that travel as one.
//!
//! A bundle has one entry for all its messages, and consecutive tokens. Two bitmaps say what is left of it: the
//! messages that await an outcome, and the messages that the accelerator may still read. They differ after a time-out:
//! the outcome of the request is decided, but the buffer of the bundle may not be used again before the accelerator has
//! ended each message, or its generation has ended.

use std::ops::Range;

use super::{NIL, Origin, Request, Token};
use crate::framing::Expects;

/// Maximum number of messages of a bundle.
pub const BUNDLE_MAX: u32 = 64;
/// Number of low bits of a token that number a message of its bundle.
const MESSAGE_BITS: u32 = BUNDLE_MAX.ilog2();
/// The bit of a token's index that marks a message of a bundle.
const MARK: u32 = 1 << 31;
/// Maximum number of entries: with all of them, the tokens with the highest index stay unused.
const CAPACITY_MAX: u32 = (MARK >> MESSAGE_BITS) - 1;

/// The requests of one client that travel as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BundleRequests {
    /// The destination of the replies.
    pub origin: Origin,
    /// See [`Request::number`]: of the first message. The others are consecutive, unless
    /// [`Sessions::set_numbers`](super::Sessions::set_numbers) says otherwise.
    pub number: u64,
    /// See [`Request::mqueue`].
    pub mqueue: u32,
    /// Number of messages, in [1, [`BUNDLE_MAX`]].
    pub count: u32,
    /// Payload bytes of each message but the last.
    pub len: u32,
    /// Payload bytes of the last message.
    pub last_len: u32,
    /// See [`Request::received_ns`].
    pub received_ns: u64,
    /// See [`Request::expects`].
    pub expects: Expects,
    /// Where the area for its replies begins in its buffer.
    pub reply_at: u32,
    /// Bytes of that area.
    pub reply_bytes: u32,
}

impl BundleRequests {
    /// Payload bytes of a message.
    #[inline]
    pub fn len_of(&self, message: u32) -> u32 {
        if message + 1 == self.count { self.last_len } else { self.len }
    }

    /// One message as a request of its own.
    fn request(&self, message: u32, number: u64) -> Request {
        let Self { origin, mqueue, received_ns, expects, .. } = *self;
        Request { origin, number, mqueue, len: self.len_of(message), received_ns, expects }
    }
}

/// A bundle in flight.
#[derive(Clone, Debug)]
pub struct BundleEntry {
    generation: u32,
    pub(super) sender: u32,
    /// Messages that await an outcome.
    live: u64,
    /// Messages that the accelerator has not ended.
    held: u64,
    /// How many times its buffer is in use for replies that leave.
    leaving: u32,
    requests: BundleRequests,
    /// Whether the numbers of its requests are listed.
    listed: bool,
    /// Neighbours in order of issue; `next` also links the free list.
    previous: u32,
    next: u32,
}

impl BundleEntry {
    /// Its requests, as they were issued.
    #[inline]
    pub fn requests(&self) -> &BundleRequests {
        &self.requests
    }

    /// Messages that await an outcome: a bit for each.
    #[inline]
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Messages that the accelerator has not ended: a bit for each.
    #[inline]
    pub fn held(&self) -> u64 {
        self.held
    }
}

/// The bits of the first `count` messages, which are at least one.
#[inline]
fn bits_of(count: u32) -> u64 {
    u64::MAX >> (BUNDLE_MAX - count)
}

impl Token {
    /// Whether it is one of a message of a bundle.
    #[inline]
    pub fn is_of_bundle(self) -> bool {
        self.0 as u32 & MARK != 0
    }

    /// The number of its message in a bundle.
    #[inline]
    pub fn message(self) -> u32 {
        self.0 as u32 % BUNDLE_MAX
    }

    /// The index of its bundle's entry, below the capacity of the table if the token is one of its.
    #[inline]
    pub fn bundle(self) -> u32 {
        (self.0 as u32 & !MARK) >> MESSAGE_BITS
    }
}

/// The bundles in flight of a table.
#[derive(Clone, Debug)]
pub(super) struct Bundles {
    entries: Box<[BundleEntry]>,
    /// Of each entry: the numbers of its requests, if they are listed.
    numbers: Box<[[u64; BUNDLE_MAX as usize]]>,
    free: u32,
    pub(super) oldest: u32,
    newest: u32,
    /// Entries in use.
    used: u32,
}

impl Bundles {
    pub(super) fn new(capacity: u32, first_generation: u32) -> Self {
        let capacity = capacity.min(CAPACITY_MAX);
        let entry = |index: u32| BundleEntry {
            generation: first_generation,
            sender: 0,
            live: 0,
            held: 0,
            leaving: 0,
            requests: BundleRequests {
                origin: Origin::Client(super::ReplyTo::NONE),
                number: 0,
                mqueue: 0,
                count: 1,
                len: 0,
                last_len: 0,
                received_ns: 0,
                expects: Expects::Nothing,
                reply_at: 0,
                reply_bytes: 0,
            },
            listed: false,
            previous: NIL,
            next: if index + 1 < capacity { index + 1 } else { NIL },
        };
        Self {
            entries: (0..capacity).map(entry).collect(),
            numbers: vec![[0; BUNDLE_MAX as usize]; capacity as usize].into(),
            free: if capacity > 0 { 0 } else { NIL },
            oldest: NIL,
            newest: NIL,
            used: 0,
        }
    }

    /// Entries in use.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Issues the tokens of a bundle; returns that of its first message. `None` if no entry is free.
    pub(super) fn issue(&mut self, requests: &BundleRequests, sender: u32) -> Option<Token> {
        assert!((1..=BUNDLE_MAX).contains(&requests.count), "a bundle of {}", requests.count);
        let index = self.free;
        if index == NIL {
            return None;
        }
        let newest = self.newest;
        let entry = &mut self.entries[index as usize];
        self.free = entry.next;
        entry.sender = sender;
        (entry.live, entry.held) = (bits_of(requests.count), bits_of(requests.count));
        entry.requests = *requests;
        entry.listed = false;
        (entry.previous, entry.next) = (newest, NIL);
        let token = Token::new(MARK | index << MESSAGE_BITS, entry.generation);
        match newest {
            NIL => self.oldest = index,
            newest => self.entries[newest as usize].next = index,
        }
        self.newest = index;
        self.used += 1;
        Some(token)
    }

    /// The bundle of a token that was issued for `mqueue`, and its index.
    #[inline]
    pub(super) fn find(&self, token: Token, mqueue: u32) -> Option<(u32, &BundleEntry)> {
        let index = token.bundle();
        let entry = self.entries.get(index as usize).filter(|_| token.is_of_bundle())?;
        let here = entry.requests.mqueue == mqueue || mutants::on("forget_mqueue_of_bundle");
        let found = entry.held != 0 && entry.generation == token.generation() && here;
        found.then_some((index, entry))
    }

    pub(super) fn entry(&self, index: u32) -> &BundleEntry {
        &self.entries[index as usize]
    }

    /// Lists the numbers of the requests of a bundle.
    #[inline]
    pub(super) fn list(&mut self, index: u32, numbers: &[u64]) {
        let entry = &mut self.entries[index as usize];
        assert_eq!(numbers.len(), entry.requests.count as usize, "a number for each");
        entry.listed = true;
        self.numbers[index as usize][..numbers.len()].copy_from_slice(numbers);
    }

    /// The numbers of the requests of a bundle, if they are listed.
    #[inline]
    pub(super) fn listed(&self, index: u32) -> Option<&[u64]> {
        let entry = &self.entries[index as usize];
        let numbers = &self.numbers[index as usize][..entry.requests.count as usize];
        entry.listed.then_some(numbers)
    }

    /// One message of a bundle as a request of its own.
    pub(super) fn request(&self, index: u32, message: u32) -> Request {
        let requests = &self.entry(index).requests;
        let consecutive = requests.number.wrapping_add(message.into());
        let listed = self.listed(index).map(|numbers| numbers[message as usize]);
        requests.request(message, listed.unwrap_or(consecutive))
    }

    /// The accelerator has ended these messages. Returns those that awaited an outcome, and whether its buffer is no longer in
    /// use.
    #[inline]
    pub(super) fn end(&mut self, index: u32, messages: u64) -> (u64, bool) {
        let entry = &mut self.entries[index as usize];
        let awaited = entry.live & messages;
        entry.held &= !messages;
        let returns =
            entry.held == 0 && (entry.leaving == 0 || mutants::on("return_buffer_while_it_leaves"));
        self.decide(index, awaited);
        if returns {
            self.free(index);
        }
        (awaited, returns)
    }

    /// Replies leave from the buffer of a bundle that is in use: it stays so until [`Self::release`].
    #[inline]
    pub(super) fn hold(&mut self, index: u32) {
        self.entries[index as usize].leaving += 1;
    }

    /// The replies have left. Returns whether the buffer is no longer in use. Without [`Self::hold`] before it, nothing happens.
    #[inline]
    pub(super) fn release(&mut self, index: u32) -> bool {
        let entry = &mut self.entries[index as usize];
        if entry.leaving == 0 {
            return false;
        }
        entry.leaving -= 1;
        let returns = entry.leaving == 0 && entry.held == 0;
        if returns {
            self.free(index);
        }
        returns
    }

    /// The outcome of these messages, which await one, is decided.
    #[inline]
    fn decide(&mut self, index: u32, messages: u64) {
        let entry = &mut self.entries[index as usize];
        debug_assert_eq!(messages & !entry.live, 0);
        let awaited = entry.live;
        entry.live &= !messages;
        if awaited != 0 && entry.live == 0 {
            let (previous, next) = (entry.previous, entry.next);
            match previous {
                NIL => self.oldest = next,
                previous => self.entries[previous as usize].next = next,
            }
            match next {
                NIL => self.newest = previous,
                next => self.entries[next as usize].previous = previous,
            }
        }
    }

    /// Decides the outcome of the first message that awaits one.
    pub(super) fn decide_next(&mut self, index: u32) -> Request {
        let message = self.entries[index as usize].live.trailing_zeros();
        let request = self.request(index, message);
        self.decide(index, 1 << message);
        request
    }

    /// The next entry in order of issue.
    pub(super) fn after(&self, index: u32) -> u32 {
        self.entries[index as usize].next
    }

    /// Frees an entry that no list contains.
    fn free(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        debug_assert_eq!((entry.live, entry.held), (0, 0));
        entry.leaving = 0;
        let reuse = mutants::on("reuse_token_of_bundle");
        entry.generation = entry.generation.wrapping_add(u32::from(!reuse));
        entry.next = std::mem::replace(&mut self.free, index);
        self.used -= 1;
    }

    /// Forgets the bundles of these mqueues, all of whose outcomes are decided and replies have left: nothing reads them any more.
    pub(super) fn forget(&mut self, mqueues: &Range<u32>, mut each: impl FnMut(u32)) {
        for index in 0..self.entries.len() as u32 {
            let entry = &mut self.entries[index as usize];
            if entry.held != 0 && mqueues.contains(&entry.requests.mqueue) {
                assert_eq!(entry.live, 0, "a request of an ended generation has no outcome");
                assert_eq!(
                    entry.leaving, 0,
                    "replies leave from the memory of an ended generation"
                );
                entry.held = 0;
                self.free(index);
                each(index);
            }
        }
    }
}
