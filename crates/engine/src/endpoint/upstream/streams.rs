//! The connections of a proxy over TCP: one to the upstream server for each client connection.
//!
//! A connection is opened with the first request of its client. Requests go out as the client sent them, in their order, and answers are matched in
//! that order, and compared with the request where the framing can (`framing.rs`). A request that times out keeps its place, so
//! that its late answer is recognised.
//!
//! *Requests that may stay unanswered* (memcached's `noreply` and quiet commands) are followed by a request of the proxy's own that is
//! always answered ([`Framing::fence`](wire::framing::Framing::fence)): what comes before that answer belongs to the client's
//! request. Servers answer even `noreply` commands when they go wrong, and nothing else would tell such an answer from the next one.
//!
//! *Back-pressure.* A client is not read while [`OUTPUT_MAX`] bytes wait for the server, and the server is not read while as many wait for
//! the client.

use std::collections::VecDeque;

use wire::framing::Expects;
use wire::nic::StreamKey;
use wire::session::{Origin, ReplyTo, Request};

use crate::endpoint::pipeline::Pipeline;

/// Bytes that wait for the server, or for the client, before the other side is no longer read.
pub(super) const OUTPUT_MAX: usize = 256 << 10;
const BACK_OFF_NS_MIN: u64 = 10_000_000;
const BACK_OFF_NS_MAX: u64 = 1_000_000_000;
/// A connection attempt, or a server that is behind, has at least this long.
const PATIENCE_NS_MIN: u64 = 1_000_000_000;
/// A share of the connections looked at by each housekeeping for time-outs.
const SWEEP_PARTS: usize = 32;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The client's number of it.
    pub(super) number: u64,
    pub(super) expects: Expects,
    pub(super) deadline_ns: u64,
    pub(super) len: u32,
    /// It is followed by a fence.
    pub(super) fenced: bool,
    /// It has ended: it was answered, and its fence is waited for, or it has timed out.
    pub(super) ended: bool,
    /// It has timed out.
    pub(super) late: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Connecting { deadline_ns: u64 },
    Up,
}

/// A connection to the upstream server.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) client: ReplyTo,
    pub(super) key: StreamKey,
    pub(super) state: State,
    pub(super) pipeline: Pipeline<Place>,
    /// It is among those that can be read.
    pub(super) is_ready: bool,
    /// It is among those that are to be written.
    pub(super) is_dirty: bool,
    /// The client waits until less is unwritten.
    pub(super) holds_client: bool,
    /// It broke.
    pub(super) failed: bool,
    /// Since when the oldest request has been late; 0: it is not.
    pub(super) behind_since_ns: u64,
}

impl Stream {
    pub(super) fn new(client: ReplyTo, key: StreamKey, deadline_ns: u64) -> Self {
        Self {
            client,
            key,
            state: State::Connecting { deadline_ns },
            pipeline: Pipeline::new(0),
            is_ready: false,
            is_dirty: false,
            holds_client: false,
            failed: false,
            behind_since_ns: 0,
        }
    }

    /// The client's request in a place, for the books.
    pub(super) fn request(&self, place: &Place, now_ns: u64) -> Request {
        Request {
            origin: Origin::Client(self.client),
            number: place.number,
            mqueue: 0,
            len: place.len,
            received_ns: now_ns,
            expects: place.expects,
        }
    }

    /// Ends the oldest request whose time is over, unless it has ended; it keeps its place.
    pub(super) fn expire(&mut self, now_ns: u64) -> Option<Place> {
        let due = |place: &&mut Place| place.deadline_ns <= now_ns && !place.late;
        // Deadlines grow along the line, so those that are late come first.
        let first = self.pipeline.places.iter_mut().find(|place| !place.late);
        let place = first.filter(due)?;
        let before = *place;
        (place.ended, place.late) = (true, true);
        if self.behind_since_ns == 0 {
            self.behind_since_ns = now_ns.max(1);
        }
        Some(before)
    }

    /// Takes all requests that have not ended.
    pub(super) fn take_places(&mut self) -> VecDeque<Place> {
        let mut places = std::mem::take(&mut self.pipeline.places);
        places.retain(|place| !place.ended);
        places
    }
}

/// The connections of one proxy on one worker, by the key of the client's.
#[derive(Debug, Default)]
pub(super) struct Streams {
    by_client: Vec<Option<Box<Stream>>>,
    /// Requests in flight.
    in_flight: u64,
    /// No connection is tried before.
    retry_ns: u64,
    back_off_ns: u64,
    sweep_at: usize,
}

impl Streams {
    /// Requests in flight.
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub(super) fn get(&mut self, client: u32) -> Option<&mut Stream> {
        self.by_client.get_mut(client as usize)?.as_deref_mut()
    }

    /// A connection, and the number of requests in flight on all of them.
    pub(super) fn with(&mut self, client: u32) -> Option<(&mut u64, &mut Stream)> {
        let stream = self.by_client.get_mut(client as usize)?.as_deref_mut()?;
        Some((&mut self.in_flight, stream))
    }

    pub(super) fn insert(&mut self, stream: Stream) {
        let place = stream.client.key as usize;
        if self.by_client.len() <= place {
            self.by_client.resize_with(place + 1, || None);
        }
        self.by_client[place] = Some(Box::new(stream));
    }

    /// Takes a connection out; its requests are no longer in flight.
    pub(super) fn remove(&mut self, client: u32) -> Option<Box<Stream>> {
        let stream = self.by_client.get_mut(client as usize)?.take()?;
        let in_flight = stream.pipeline.places.iter().filter(|place| !place.ended).count();
        self.in_flight -= in_flight as u64;
        Some(stream)
    }

    /// The keys of all clients that may have a connection.
    pub(super) fn clients(&self) -> std::ops::Range<u32> {
        0..self.by_client.len() as u32
    }

    /// Those that the next housekeeping looks at.
    pub(super) fn next_part(&mut self) -> std::ops::Range<u32> {
        let count = self.by_client.len();
        let first = if self.sweep_at >= count { 0 } else { self.sweep_at };
        self.sweep_at = first + count.div_ceil(SWEEP_PARTS);
        first as u32..self.sweep_at.min(count) as u32
    }

    /// Whether a connection may be tried.
    pub(super) fn may_connect(&self, now_ns: u64) -> bool {
        now_ns >= self.retry_ns
    }

    /// An attempt has failed: the next one waits, twice as long each time.
    pub(super) fn back_off(&mut self, now_ns: u64) {
        if now_ns < self.retry_ns {
            // Of an attempt that began before another one failed.
            return;
        }
        self.back_off_ns = (2 * self.back_off_ns).clamp(BACK_OFF_NS_MIN, BACK_OFF_NS_MAX);
        self.retry_ns = now_ns + self.back_off_ns;
    }

    /// An attempt has succeeded.
    pub(super) fn reset_back_off(&mut self) {
        (self.retry_ns, self.back_off_ns) = (0, 0);
    }
}

/// How long an attempt, or a server that is behind, has.
pub(super) fn patience_ns(timeout_ns: u64) -> u64 {
    (10 * timeout_ns).max(PATIENCE_NS_MIN)
}
