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
//! *Back-pressure.* A client is not read while [`OUTPUT_MAX`] bytes wait for the server, or [`PLACES_MAX`] requests are in flight or late.
//! The server is not read while [`OUTPUT_MAX`] bytes wait for the client.
//!
//! *The end of a client.* When a client sends nothing more, its connection stays until the server's host has taken all its requests, and those
//! that may stay unanswered have ended.

use wire::framing::Expects;
use wire::nic::StreamKey;
use wire::session::{Origin, ReplyTo, Request};

use crate::endpoint::held::Waiter;
use crate::endpoint::pipeline::{BackOff, Pipeline};

/// Bytes that wait for the server, or for the client, before the other side is no longer read.
pub(super) const OUTPUT_MAX: usize = 256 << 10;
/// Requests in flight on one connection, and late ones, before the client is no longer read.
const PLACES_MAX: usize = 4096;
/// A share of the connections looked at by each housekeeping for time-outs.
const SWEEP_PARTS: usize = 32;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The client's number of it.
    pub(super) number: u64,
    pub(super) expects: Expects,
    pub(super) len: u32,
    /// It is followed by a fence.
    pub(super) fenced: bool,
    /// It has ended: it was answered, and its fence is waited for, or it has timed out.
    pub(super) ended: bool,
}

/// How far a byte stream without messages has come, see `relay.rs`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Relay {
    /// The client sends nothing more.
    pub(super) client_ended: bool,
    /// The server does not.
    pub(super) server_ended: bool,
    /// The server has been told, behind all bytes.
    pub(super) told_server: bool,
    /// The client has.
    pub(super) told_client: bool,
    /// The server is read again when the client has taken what waits for it.
    pub(super) holds_server: bool,
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
    /// The client waits until there is [room](Self::has_room).
    pub(super) holds_client: bool,
    /// The client sends nothing more, and its connection closes when nothing is [pending](Self::is_pending).
    pub(super) delays_close: bool,
    /// Requests in the output that get no answer and no fence: they end when the output has been written.
    pub(super) unanswered: u64,
    /// It broke.
    pub(super) failed: bool,
    /// Of a byte stream without messages.
    pub(super) relay: Relay,
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
            delays_close: false,
            unanswered: 0,
            failed: false,
            relay: Relay::default(),
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

    /// Ends the next request whose time is over, unless it has ended; it keeps its place.
    pub(super) fn expire(&mut self, now_ns: u64) -> Option<Place> {
        let place = self.pipeline.expire(now_ns)?;
        let before = *place;
        place.ended = true;
        Some(before)
    }

    /// Whether the client may send another request.
    pub(super) fn has_room(&self) -> bool {
        self.pipeline.unwritten() < OUTPUT_MAX && self.pipeline.places.len() < PLACES_MAX
    }

    /// Whether requests have not been written, or may still be answered.
    pub(super) fn is_pending(&self) -> bool {
        self.pipeline.unwritten() > 0 || self.pipeline.timely() > 0
    }

    /// Whether the client's connection has something to do that it waited for.
    pub(super) fn resumes_client(&mut self) -> bool {
        let resumes = self.holds_client && self.has_room();
        self.holds_client &= !resumes;
        let closes = self.delays_close && !self.is_pending();
        self.delays_close &= !closes;
        resumes || closes
    }

    /// Requests in flight.
    pub(super) fn in_flight(&self) -> u64 {
        let places = self.pipeline.places.iter().filter(|place| !place.ended).count();
        places as u64 + self.unanswered
    }
}

/// The connections of one proxy on one worker, by the key of the client's.
#[derive(Debug, Default)]
pub(super) struct Streams {
    by_client: Vec<Option<Box<Stream>>>,
    /// Requests in flight.
    in_flight: u64,
    /// Of attempts for all clients.
    pub(super) back_off: BackOff,
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

    /// Whether a connection of this client is listed as one that may be read.
    pub(super) fn is_held(&mut self, (client, generation): Waiter) -> bool {
        let stream = self.get(client).filter(|stream| stream.client.generation == generation);
        stream.is_some_and(|stream| stream.is_ready)
    }

    /// A connection, and the number of requests in flight on all of them.
    pub(super) fn with(&mut self, client: u32) -> Option<(&mut u64, &mut Stream)> {
        let stream = self.by_client.get_mut(client as usize)?.as_deref_mut()?;
        Some((&mut self.in_flight, stream))
    }

    pub(super) fn insert(&mut self, stream: Stream) {
        self.put(Box::new(stream));
    }

    /// Adds one with requests in flight.
    pub(super) fn put(&mut self, stream: Box<Stream>) {
        self.in_flight += stream.in_flight();
        let place = stream.client.key as usize;
        if self.by_client.len() <= place {
            self.by_client.resize_with(place + 1, || None);
        }
        self.by_client[place] = Some(stream);
    }

    /// Takes a connection out; its requests are no longer in flight.
    pub(super) fn remove(&mut self, client: u32) -> Option<Box<Stream>> {
        let stream = self.by_client.get_mut(client as usize)?.take()?;
        self.in_flight -= stream.in_flight();
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
}

#[cfg(test)]
mod tests {
    use wire::nic::StreamKey;
    use wire::session::EndpointKind;

    use super::*;

    fn stream() -> Stream {
        let client = ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key: 0, generation: 0 };
        Stream::new(client, StreamKey::default(), 0)
    }

    fn place(number: u64) -> Place {
        Place { number, expects: Expects::Nothing, len: 1, fenced: true, ended: false }
    }

    #[test]
    fn a_late_place_is_not_in_flight_and_does_not_delay_the_close() {
        let mut stream = stream();
        (0..2).for_each(|number| stream.pipeline.push(place(number), b"", 10 * (number + 1)));
        assert_eq!(stream.expire(15).map(|place| (place.number, place.ended)), Some((0, false)));
        assert_eq!((stream.in_flight(), stream.is_pending()), (1, true));
        assert!(stream.expire(15).is_none() && stream.expire(25).is_some());
        // Its answer may never come.
        assert_eq!((stream.in_flight(), stream.is_pending()), (0, false));
    }

    #[test]
    fn too_many_places_hold_the_client_until_one_is_taken() {
        let mut stream = stream();
        for number in 0..PLACES_MAX as u64 {
            assert!(stream.has_room());
            stream.pipeline.push(place(number), b"", 1);
        }
        assert!(!stream.has_room());
        stream.holds_client = true;
        assert!(!stream.resumes_client());
        stream.pipeline.pop();
        assert!(stream.resumes_client() && !stream.holds_client);
    }
}
