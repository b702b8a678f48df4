//! Tokens: identifiers of requests in flight.
//!
//! An accelerator identifies a request by a 64-bit token only: an index into this table (low half) and the entry's
//! generation (high half). The client's address never leaves the engine, so an accelerator cannot forge a
//! destination; and since the generation changes whenever an entry is reused, a late or second reply matches no
//! request. A token is valid only on the mqueue it was issued for.
//!
//! Requests of a table have the same time-out, so the oldest is the first to expire: entries form a doubly linked
//! list in order of issue. (One that another worker handed over was received before it is issued here; it may expire
//! late by the duration of the hand-over, which is at most a time-out.) Every operation is O(1), except the pass that
//! ends the requests of dead mqueues; nothing is allocated after [`Sessions::new`].
//!
//! Requests that travel as one, see `session/bundles.rs`, have entries of their own and are marked in the index
//! of their tokens.

mod bundles;

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use self::bundles::Bundles;
pub use self::bundles::{BUNDLE_MAX, BundleEntry, BundleRequests};

use crate::framing::Expects;
use crate::nic::PortIndex;

/// The destination of a reply. [`Request::number`] says which request of the client it answers.
// Fields that differ between requests of one client are not in here: an endpoint that receives several in a row
// creates this once, and it is copied with wide instructions. A field that was stored just before, next to others of
// the same word, would stall such a copy until all older stores are in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A datagram: to its sender, from the port and address it was sent to.
    Datagram {
        /// The port that received it.
        port: PortIndex,
        /// Its sender.
        peer: SocketAddr,
        /// The address it was sent to, if the port is bound to several.
        local: Option<IpAddr>,
    },
    /// Any other client: identified by a key in an endpoint of some worker.
    Client(ReplyTo),
}

/// Endpoints whose clients have keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndpointKind {
    /// TCP connections.
    Tcp,
    /// Shared-memory clients.
    Shm,
}

/// A client of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplyTo {
    /// The endpoint.
    pub endpoint: EndpointKind,
    /// The worker that the client belongs to.
    pub worker: u16,
    /// That worker's key for it in the endpoint.
    pub key: u32,
    /// Generation of the key: keys are reused.
    pub generation: u32,
}

impl ReplyTo {
    /// No client: the value of an unused entry.
    const NONE: Self = Self { endpoint: EndpointKind::Tcp, worker: 0, key: 0, generation: 0 };
}

/// A request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The destination of the reply.
    pub origin: Origin,
    /// Its number among the client's requests: the position among the requests of a connection, from 0; a
    /// shared-memory client's own identifier (its slot's tag), which is returned with the outcome; 0 for a datagram.
    pub number: u64,
    /// The mqueue (the owner's numbering) it was dispatched to.
    pub mqueue: u32,
    /// Payload bytes of the request as its client sent it.
    pub len: u32,
    /// Time of reception, in nanoseconds of the worker's clock.
    pub received_ns: u64,
    /// Whether the client waits for a reply.
    pub expects: Expects,
}

/// The engine's identifier of a request, as in slot headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    #[inline]
    fn new(index: u32, generation: u32) -> Self {
        Self(u64::from(index) | u64::from(generation) << 32)
    }
    #[inline]
    fn index(self) -> usize {
        self.0 as u32 as usize
    }
    #[inline]
    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

const NIL: u32 = u32::MAX;

/// Minimum and maximum number of request counters by sender. There are four for each request that may be in flight,
/// up to the maximum: then few senders share one. Senders that share one look like one sender with more requests in
/// flight, by chance or on purpose.
const SENDERS_MIN: u32 = 1 << 10;
const SENDERS_MAX: u32 = 1 << 16;

/// Distributes the senders of datagrams. A sender to two ports of a service counts as two: each port sends its own
/// replies.
#[inline]
fn spread(port: PortIndex, peer: &SocketAddr) -> u64 {
    let address = match peer.ip() {
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => (ip.to_bits() as u64) ^ (ip.to_bits() >> 64) as u64,
    };
    let ports = u64::from(peer.port()) << 32 | u64::from(port) << 48;
    (address ^ ports).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The counter of a sender in a table of `senders` counters.
#[inline(always)]
fn counter_of(counters: u32, origin: &Origin) -> u32 {
    let others = counters - 1;
    match origin {
        Origin::Datagram { port, peer, .. } => {
            (spread(*port, peer) >> (64 - others.ilog2())) as u32
        }
        _ => others,
    }
}

/// Progress of a pass over the requests in flight; see [`Sessions::pass`].
#[derive(Debug)]
pub struct Pass {
    at: u32,
    bundle: u32,
}

#[derive(Clone, Debug)]
struct Entry {
    generation: u32,
    /// Index of its sender's counter; the last one counts all requests that are not datagrams.
    sender: u32,
    /// Whether `request` is in flight.
    live: bool,
    request: Request,
    /// Neighbours in order of issue; `next` also links the free list.
    previous: u32,
    next: u32,
}

/// A bounded table of requests in flight. See the module documentation.
#[derive(Clone, Debug)]
pub struct Sessions {
    entries: Box<[Entry]>,
    free: u32,
    oldest: u32,
    newest: u32,
    live: u32,
    /// Number of requests in flight by sender.
    of_senders: Box<[u32]>,
    bundles: Bundles,
}

impl Sessions {
    /// A table of `capacity` entries whose generations start at `first_generation` (a new generation of an
    /// accelerator starts after the old one's, so that no old token matches).
    pub fn new(capacity: u32, first_generation: u32) -> Self {
        assert!(capacity < 1 << 31, "the index of a token marks bundles by its highest bit");
        let senders =
            capacity.saturating_mul(4).clamp(SENDERS_MIN, SENDERS_MAX).next_power_of_two();
        let entry = |index: u32| Entry {
            generation: first_generation,
            sender: 0,
            live: false,
            request: Request {
                origin: Origin::Client(ReplyTo::NONE),
                number: 0,
                mqueue: 0,
                len: 0,
                received_ns: 0,
                expects: Expects::Nothing,
            },
            previous: NIL,
            next: if index + 1 < capacity { index + 1 } else { NIL },
        };
        Self {
            entries: (0..capacity).map(entry).collect(),
            free: if capacity > 0 { 0 } else { NIL },
            oldest: NIL,
            newest: NIL,
            live: 0,
            of_senders: vec![0; senders as usize + 1].into(),
            bundles: Bundles::new(0, first_generation),
        }
    }

    /// The same with room for `bundles` bundles, whose generations start at `first_generation`.
    pub fn with_bundles(self, capacity: u32, first_generation: u32) -> Self {
        assert_eq!(self.live, 0, "tokens are in use");
        Self { bundles: Bundles::new(capacity, first_generation), ..self }
    }

    /// Number of requests in flight.
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Issues a token; `None` when the table is full.
    // Always inline, and field by field: the request is then written in place, not created elsewhere and copied.
    #[inline(always)]
    pub fn issue(&mut self, request: Request) -> Option<Token> {
        let Request { origin, number, mqueue, len, received_ns, expects } = request;
        let index = self.free;
        if index == NIL {
            return None;
        }
        let newest = self.newest;
        let entry = &mut self.entries[index as usize];
        self.free = entry.next;
        entry.live = true;
        entry.request.origin = origin;
        entry.request.number = number;
        entry.request.mqueue = mqueue;
        entry.request.len = len;
        entry.request.received_ns = received_ns;
        entry.request.expects = expects;
        entry.sender = counter_of(self.of_senders.len() as u32, &entry.request.origin);
        self.of_senders[entry.sender as usize] += 1;
        entry.previous = newest;
        entry.next = NIL;
        let token = Token::new(index, entry.generation);
        match newest {
            NIL => self.oldest = index,
            newest => self.entries[newest as usize].next = index,
        }
        self.newest = index;
        self.live += 1;
        Some(token)
    }

    /// The request of a token, if it is in flight on `mqueue`. The token stays valid.
    #[inline]
    pub fn find(&self, token: Token, mqueue: u32) -> Option<&Request> {
        let entry = self.entries.get(token.index())?;
        let here = entry.request.mqueue == mqueue || mutants::on("forget_mqueue");
        let found = entry.live && entry.generation == token.generation() && here;
        found.then_some(&entry.request)
    }

    /// The request that [`Self::find`] has just found for a token.
    #[inline]
    pub fn found(&self, token: Token) -> &Request {
        let entry = &self.entries[token.index()];
        debug_assert!(entry.live && entry.generation == token.generation());
        &entry.request
    }

    /// Whether the sender of a datagram that [`Self::find`] has just found has other requests in flight, or seems to.
    #[inline]
    pub fn has_others(&self, token: Token) -> bool {
        let sender = self.entries[token.index()].sender;
        self.of_senders[sender as usize] > 1
    }

    /// Ends the request of a token, if it is in flight on `mqueue`.
    #[inline]
    pub fn end(&mut self, token: Token, mqueue: u32) -> Option<Request> {
        self.find(token, mqueue)?;
        Some(self.remove(token.index() as u32))
    }

    /// Ends the request that [`Self::find`] has just found for a token.
    #[inline]
    pub fn end_found(&mut self, token: Token) {
        debug_assert_eq!(self.entries[token.index()].generation, token.generation());
        self.unlink(token.index() as u32);
    }

    /// Issues the tokens of a bundle, which are consecutive; returns the first. `None` if no entry is free.
    pub fn issue_bundle(&mut self, requests: &BundleRequests) -> Option<Token> {
        let sender = counter_of(self.of_senders.len() as u32, &requests.origin);
        let token = self.bundles.issue(requests, sender)?;
        self.of_senders[sender as usize] += requests.count;
        self.live += requests.count;
        Some(token)
    }

    /// The bundle that a token belongs to, if it was issued for `mqueue` and the accelerator has not ended all of it.
    #[inline]
    pub fn find_bundle(&self, token: Token, mqueue: u32) -> Option<&BundleEntry> {
        self.bundles.find(token, mqueue).map(|(_, bundle)| bundle)
    }

    /// The requests of a bundle that was just issued have these numbers, see [`Request::number`], instead of consecutive ones.
    #[inline]
    pub fn set_numbers(&mut self, token: Token, numbers: &[u64]) {
        self.bundles.list(token.bundle(), numbers);
    }

    /// The numbers of the requests of a bundle that [`Self::find_bundle`] has just found, if they are listed.
    #[inline]
    pub fn numbers_of(&self, token: Token) -> Option<&[u64]> {
        self.bundles.listed(token.bundle())
    }

    /// A message of a bundle, as a request of its own; `None` if [`Self::find_bundle`] does not find the bundle of the token, or it has
    /// no such message.
    pub fn find_message(&self, token: Token, mqueue: u32, message: u32) -> Option<Request> {
        let (index, bundle) = self.bundles.find(token, mqueue)?;
        (message < bundle.requests().count).then(|| self.bundles.request(index, message))
    }

    /// The accelerator has ended these messages of a bundle that [`Self::find_bundle`] finds: a bit for each. Returns
    /// those that awaited an outcome, and whether its buffer is no longer in use.
    #[inline]
    pub fn end_of_bundle(&mut self, token: Token, mqueue: u32, messages: u64) -> (u64, bool) {
        let Some((index, bundle)) = self.bundles.find(token, mqueue) else { return (0, false) };
        let sender = bundle.sender;
        let (awaited, returns) = self.bundles.end(index, messages);
        self.count_decided(sender, awaited.count_ones());
        (awaited, returns)
    }

    /// Replies leave from the buffer of a bundle that [`Self::find_bundle`] finds: it stays in use until
    /// [`Self::release_bundle`], also if the accelerator ends all of its messages.
    #[inline]
    pub fn hold_bundle(&mut self, token: Token) {
        self.bundles.hold(token.bundle());
    }

    /// The replies have left. Returns whether the buffer is no longer in use.
    #[inline]
    pub fn release_bundle(&mut self, token: Token) -> bool {
        self.bundles.release(token.bundle())
    }

    /// Whether the sender of a bundle has other requests in flight than these messages of it, or seems to.
    #[inline]
    pub fn has_others_than(&self, bundle: &BundleEntry, messages: u64) -> bool {
        let these = (bundle.live() & messages).count_ones();
        self.of_senders[bundle.sender as usize] > these
    }

    /// The generation of these mqueues has ended, and so have their requests: the buffers of their bundles are gone.
    /// `each` gets their [indices](Token::bundle).
    pub fn forget_bundles(&mut self, mqueues: &Range<u32>, each: impl FnMut(u32)) {
        self.bundles.forget(mqueues, each);
    }

    /// Number of bundles whose buffers are in use.
    pub fn bundles(&self) -> u32 {
        self.bundles.used()
    }

    /// Outcomes of requests of a bundle have been decided.
    #[inline]
    fn count_decided(&mut self, sender: u32, requests: u32) {
        self.of_senders[sender as usize] -= requests;
        self.live -= requests;
    }

    /// Ends the oldest request if it was received before `before_ns`. The buffer of a bundle stays in use.
    #[inline]
    pub fn expire(&mut self, before_ns: u64) -> Option<Request> {
        if self.bundles.oldest != NIL {
            return self.expire_among_bundles(before_ns);
        }
        (self.oldest_ns()? < before_ns).then(|| self.remove(self.oldest))
    }

    /// [`Self::expire`] while bundles await outcomes.
    #[cold]
    fn expire_among_bundles(&mut self, before_ns: u64) -> Option<Request> {
        let oldest = self.bundles.oldest;
        let oldest_ns = self.bundles.entry(oldest).requests().received_ns;
        if self.oldest_ns().is_some_and(|single_ns| single_ns <= oldest_ns) {
            return (self.oldest_ns()? < before_ns).then(|| self.remove(self.oldest));
        }
        (oldest_ns < before_ns).then(|| self.decide_next(oldest))
    }

    /// Ends the first request of a bundle that awaits an outcome.
    fn decide_next(&mut self, index: u32) -> Request {
        self.count_decided(self.bundles.entry(index).sender, 1);
        self.bundles.decide_next(index)
    }

    /// Starts a pass over the requests in flight, for [`Self::end_next`].
    pub fn pass(&self) -> Pass {
        Pass { at: self.oldest, bundle: self.bundles.oldest }
    }

    /// Ends the next request of a pass whose mqueue is `dead`, the oldest first, those of bundles last. A whole pass is
    /// O(live), independent of the number of requests it ends; nothing else may end requests meanwhile.
    pub fn end_next(&mut self, pass: &mut Pass, dead: impl Fn(u32) -> bool) -> Option<Request> {
        while pass.at != NIL {
            let index = pass.at;
            let entry = &self.entries[index as usize];
            pass.at = entry.next;
            if dead(entry.request.mqueue) {
                return Some(self.remove(index));
            }
        }
        while pass.bundle != NIL {
            let index = pass.bundle;
            let bundle = self.bundles.entry(index);
            let last = bundle.live().is_power_of_two();
            let dead = dead(bundle.requests().mqueue);
            if last || !dead {
                pass.bundle = self.bundles.after(index);
            }
            if dead {
                return Some(self.decide_next(index));
            }
        }
        None
    }

    /// Reception time of the oldest request.
    fn oldest_ns(&self) -> Option<u64> {
        Some(self.entries.get(self.oldest as usize)?.request.received_ns)
    }

    fn remove(&mut self, index: u32) -> Request {
        let request = self.entries[index as usize].request;
        self.unlink(index);
        request
    }

    /// Frees a live entry.
    #[inline(always)]
    fn unlink(&mut self, index: u32) {
        let free = self.free;
        let entry = &mut self.entries[index as usize];
        debug_assert!(entry.live);
        entry.live = false;
        self.of_senders[entry.sender as usize] -= 1;
        // A token is never issued twice before 2³² uses of its entry.
        entry.generation = entry.generation.wrapping_add(u32::from(!mutants::on("reuse_token")));
        let (previous, next) = (entry.previous, entry.next);
        entry.next = free;
        self.free = index;
        match previous {
            NIL => self.oldest = next,
            previous => self.entries[previous as usize].next = next,
        }
        match next {
            NIL => self.newest = previous,
            next => self.entries[next as usize].previous = previous,
        }
        self.live -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(mqueue: u32, received_ns: u64) -> Request {
        let peer = "127.0.0.1:9".parse().unwrap();
        let origin = Origin::Datagram { port: 0, peer, local: None };
        Request { origin, number: 0, mqueue, len: 1, received_ns, expects: Expects::Reply }
    }

    #[test]
    fn a_token_ends_once_and_only_on_its_mqueue() {
        let mut sessions = Sessions::new(4, 7);
        let token = sessions.issue(request(2, 10)).unwrap();
        assert_eq!(sessions.end(token, 1), None);
        assert_eq!(sessions.end(token, 2).unwrap().received_ns, 10);
        assert_eq!(sessions.end(token, 2), None);
        let again = sessions.issue(request(2, 11)).unwrap();
        assert_ne!(again, token);
        assert_eq!(sessions.find(token, 2), None);
        assert_eq!(sessions.end(Token(u64::MAX), 2), None);
    }

    #[test]
    fn a_sender_has_others_while_they_are_in_flight() {
        let mut sessions = Sessions::new(8, 0);
        let from = |port| {
            let peer = (std::net::Ipv4Addr::LOCALHOST, port).into();
            let origin = Origin::Datagram { port: 0, peer, local: None };
            Request { origin, ..request(0, u64::from(port)) }
        };
        let one = sessions.issue(from(7)).unwrap();
        let alone = sessions.issue(from(9)).unwrap();
        assert!(!sessions.has_others(alone) && !sessions.has_others(one));
        let other = sessions.issue(from(7)).unwrap();
        assert!(!sessions.has_others(alone) && sessions.has_others(one));
        sessions.end_found(other);
        assert!(!sessions.has_others(one));
        let Origin::Datagram { peer, local, .. } = from(9).origin else { unreachable!() };
        let origin = Origin::Datagram { port: 1, peer, local };
        let elsewhere = sessions.issue(Request { origin, ..from(9) }).unwrap();
        assert!(!sessions.has_others(alone), "replies of another port are not sent by this one");
        sessions.end_found(elsewhere);
        // For every way in which requests end.
        let last = sessions.issue(from(7)).unwrap();
        assert!(sessions.has_others(last));
        assert_eq!(sessions.expire(8).unwrap().received_ns, 7);
        assert!(!sessions.has_others(last));
        sessions.issue(Request { mqueue: 1, ..from(7) }).unwrap();
        assert!(sessions.has_others(last));
        let mut pass = sessions.pass();
        assert!(sessions.end_next(&mut pass, |mqueue| mqueue == 1).is_some());
        assert!(!sessions.has_others(last));
    }

    #[test]
    fn full_table_refuses_and_the_oldest_expires_first() {
        let mut sessions = Sessions::new(3, 0);
        let tokens: Vec<_> = (0..3).map(|i| sessions.issue(request(0, i)).unwrap()).collect();
        assert_eq!(sessions.issue(request(0, 9)), None);
        sessions.end(tokens[1], 0).unwrap();
        assert_eq!(sessions.expire(0), None);
        assert_eq!(sessions.expire(5).unwrap().received_ns, 0);
        assert_eq!(sessions.expire(5).unwrap().received_ns, 2);
        assert_eq!(sessions.expire(5), None);
        assert_eq!(sessions.live(), 0);
        for round in 0..10 {
            assert!(sessions.issue(request(1, round)).is_some());
            let mut pass = sessions.pass();
            assert!(sessions.end_next(&mut pass, |mqueue| mqueue == 0).is_none());
            let mut pass = sessions.pass();
            assert!(sessions.end_next(&mut pass, |mqueue| mqueue == 1).is_some());
        }
    }

    #[test]
    fn one_pass_visits_each_request_once_and_ends_those_of_dead_mqueues() {
        let mut sessions = Sessions::new(300, 0);
        let tokens: Vec<_> =
            (0..300).map(|i| sessions.issue(request(i % 5, i.into())).unwrap()).collect();
        let looked = std::cell::Cell::new(0);
        let dead = |mqueue: u32| {
            looked.set(looked.get() + 1);
            mqueue == 1 || mqueue == 3
        };
        let mut pass = sessions.pass();
        let mut ended = Vec::new();
        while let Some(request) = sessions.end_next(&mut pass, dead) {
            ended.push(request.received_ns);
        }
        let expected: Vec<u64> = (0..300).filter(|i| [1, 3].contains(&(i % 5))).collect();
        assert_eq!((ended, looked.get(), sessions.live()), (expected, 300, 180));
        for (i, token) in (0..).zip(tokens) {
            assert_eq!(sessions.find(token, i % 5).is_some(), ![1, 3].contains(&(i % 5)));
        }
        assert!((0..120).all(|i| sessions.issue(request(9, 300 + i)).is_some()));
        let expired = std::iter::from_fn(|| sessions.expire(u64::MAX));
        assert!(expired.map(|r| r.received_ns).is_sorted());
    }
}
