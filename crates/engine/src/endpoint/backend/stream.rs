//! Backends over TCP: connections and the order of answers on them.
//!
//! The mqueues of one worker share `connections` connections. Answers are matched to requests in order. An answer
//! that does not fit its request, or without a request, ends the connection: all requests in flight on it are
//! answered with `PROTOCOL`, because one extra answer would shift all later ones. A request that times out is
//! answered with `TIMEOUT` at once but keeps its place: its late answer is consumed and counted, so the stream stays
//! synchronized. A connection whose backend stays behind is closed and reopened (`pipeline.rs`). If the backend has
//! answered on a connection that ended, the next one is opened at once. While the backend refuses connections, or
//! accepts and closes them without an answer, the worker backs off exponentially.
//!
//! *One connection per request*: there are `in_flight` of them, each with one place, opened for a request and closed
//! after its answer, at its time-out, or when the backend closes. They are closed with a reset, so that no port stays
//! in TIME_WAIT.

use std::ops::Range;

use mqueue::abi::status;
use wire::DropReason;
use wire::framing::{Framing, Parsed};
use wire::nic::{Close, Nic, Read, StreamKey, Transport, Written};

use super::{BackendPool, Backends, NO_KEY, Sending, refusal};
use crate::endpoint::pipeline::{BackOff, Pipeline, patience_ns};

/// One TCP connection to a backend.
pub(crate) struct BackendConnection {
    pub(crate) key: StreamKey,
    state: ConnectionState,
    back_off: BackOff,
    /// Whether a request was answered on it since it was opened.
    served: bool,
    pipeline: Pipeline<Place>,
    dirty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionState {
    Down,
    Connecting { deadline_ns: u64 },
    Up,
}

/// A request in flight: its place in the order of answers.
#[derive(Clone, Copy, Debug)]
struct Place {
    client: u32,
    /// Its number among the requests that functions have seen.
    number: u64,
    tag: u64,
    /// Its answer is discarded.
    given_up: bool,
    id: u64,
}

impl Place {
    fn request(&self) -> (u32, u64, u64) {
        (self.client, self.number, self.tag)
    }
}

impl BackendPool {
    /// Whether every connection is full. (If one is down and the others are full, only [`Self::choose`] can tell.)
    pub(super) fn is_full(&self) -> bool {
        let full = |c: &BackendConnection| c.pipeline.places.len() >= self.places_max();
        !self.connections.is_empty() && self.connections.iter().all(full)
    }

    /// Maximum number of requests in flight on one connection.
    fn places_max(&self) -> usize {
        if self.per_request { 1 } else { self.in_flight_max }
    }

    /// The connection for the next request: the least loaded one that is up or connecting; `Err(true)` when all are
    /// full, `Err(false)` when all are down.
    fn choose<N: Nic>(&mut self, nic: &mut N, now_ns: u64) -> Result<usize, bool> {
        if self.per_request {
            let ready = |c: &BackendConnection| c.is_down() && c.back_off.may_try(now_ns);
            let all_down = self.connections.iter().all(BackendConnection::is_down);
            return self.connections.iter().position(ready).ok_or(!all_down);
        }
        let attempt_ns = patience_ns(self.timeout_ns);
        for connection in &mut self.connections {
            if !connection.is_down() || !connection.back_off.may_try(now_ns) {
                continue;
            }
            match nic.connect(self.address, Transport::Tcp, connection.key) {
                Ok(()) => {
                    let deadline_ns = now_ns + attempt_ns;
                    connection.state = ConnectionState::Connecting { deadline_ns };
                }
                Err(_) => connection.back_off.failed(now_ns),
            }
        }
        if self.connections.iter().all(BackendConnection::is_down) {
            return Err(false);
        }
        let open = self.connections.iter().enumerate().filter(|(_, c)| !c.is_down());
        let free = open.filter(|(_, c)| c.pipeline.places.len() < self.in_flight_max);
        free.min_by_key(|(_, c)| c.pipeline.places.len()).map(|(i, _)| i).ok_or(true)
    }

    /// Sends a request with this client, number, tag and id, or returns why not.
    pub(super) fn send_on_stream<N: Nic>(
        &mut self,
        nic: &mut N,
        (client, number, tag): (u32, u64, u64),
        id: u64,
        payload: &[u8],
        now_ns: u64,
    ) -> Sending {
        let chosen = match self.choose(nic, now_ns) {
            Ok(chosen) => chosen,
            Err(true) => return Sending::Busy,
            Err(false) => return Sending::Failed(status::REFUSED),
        };
        let attempt_ns = patience_ns(self.timeout_ns);
        let connection = &mut self.connections[chosen];
        if let Err(error) = self.framing.encode_request(payload, &mut connection.pipeline.output) {
            return refusal(error);
        }
        if connection.is_down() {
            if nic.connect(self.address, Transport::Tcp, connection.key).is_err() {
                connection.reset_buffers();
                connection.back_off.failed(now_ns);
                return Sending::Failed(status::REFUSED);
            }
            connection.state = ConnectionState::Connecting { deadline_ns: now_ns + attempt_ns };
        }
        let place = Place { client, number, tag, given_up: false, id };
        connection.pipeline.push(place, self.framing.mark(payload), now_ns + self.timeout_ns);
        if !std::mem::replace(&mut connection.dirty, true) {
            self.dirty.push(chosen as u16);
        }
        Sending::Sent
    }

    /// The request of a connection for one request has ended.
    fn end_request<N: Nic>(&mut self, nic: &mut N, number: usize) {
        let connection = &mut self.connections[number];
        nic.close(connection.key, Close::Reset);
        connection.reset_buffers();
        connection.state = ConnectionState::Down;
    }
}

impl BackendConnection {
    /// A connection that is down, with room for this many requests in flight.
    pub(super) fn new(places: usize) -> Self {
        Self {
            key: NO_KEY,
            state: ConnectionState::Down,
            back_off: BackOff::default(),
            served: false,
            pipeline: Pipeline::new(places),
            dirty: false,
        }
    }

    /// Answers to the requests of these client mqueues will be discarded.
    pub(super) fn drop_outstanding(&mut self, clients: &Range<u32>) {
        for place in &mut self.pipeline.places {
            place.given_up |= clients.contains(&place.client);
        }
    }

    fn is_down(&self) -> bool {
        self.state == ConnectionState::Down
    }

    fn reset_buffers(&mut self) {
        self.pipeline.reset_buffers();
        self.served = false;
    }

    /// Whether an answer with this id can belong to the first place.
    fn fits(&self, framing: Framing, id: Option<u64>, answer: &[u8]) -> bool {
        let Some(place) = self.pipeline.places.front() else { return false };
        mutants::on("ignore_key") || id == Some(place.id) && self.pipeline.fits(framing, answer)
    }
}

impl Backends {
    /// A backend connection can be read.
    pub(crate) fn read_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        pool: usize,
        number: usize,
        (now_ns, clock): (u64, &dyn Fn() -> u64),
        scratch: &mut [u8],
    ) {
        loop {
            let connection = &mut self.pools[pool].connections[number];
            match nic.read(connection.key, scratch) {
                Read::Bytes(count) => {
                    // Bytes that complete a message are parsed in the buffer they were read into.
                    let mut input = std::mem::take(&mut connection.pipeline.input);
                    let (read, fresh) = (&scratch[..count], input.is_empty());
                    if !fresh {
                        input.extend_from_slice(read);
                    }
                    let whole = if fresh { read } else { &input };
                    let taken = self.take_backend_answers(pool, number, whole, clock);
                    let served = self.pools[pool].connections[number].served;
                    if let Ok(taken) = taken
                        && self.pools[pool].per_request
                        && served
                    {
                        if taken < whole.len() {
                            self.counters.drop_one(DropReason::BackendUnasked);
                        }
                        return self.pools[pool].end_request(nic, number);
                    }
                    let connection = &mut self.pools[pool].connections[number];
                    match taken {
                        Ok(taken) => connection.pipeline.keep(input, read, fresh, taken),
                        Err((status, reason)) => {
                            self.counters.drop_one(reason);
                            return self.fail_backend(nic, pool, number, status, now_ns);
                        }
                    }
                    if count < scratch.len() {
                        return;
                    }
                }
                Read::Empty => return,
                Read::Closed | Read::Broken => {
                    return self.fail_backend(nic, pool, number, status::CLOSED, now_ns);
                }
            }
        }
    }

    /// Parses the bytes that were read and answers the blocks; functions see all of the answers at a time. Returns the number of parsed
    /// bytes, or `Err` if the connection must be closed.
    fn take_backend_answers(
        &mut self,
        pool: usize,
        number: usize,
        input: &[u8],
        clock: &dyn Fn() -> u64,
    ) -> Result<usize, (u8, DropReason)> {
        let taken = self.parse_backend_answers(pool, number, input, clock);
        self.show_answers(pool, clock);
        taken
    }

    fn parse_backend_answers(
        &mut self,
        pool: usize,
        number: usize,
        input: &[u8],
        clock: &dyn Fn() -> u64,
    ) -> Result<usize, (u8, DropReason)> {
        let mut taken = 0;
        loop {
            let entry = &mut self.pools[pool];
            let (framing, max, matching) = (entry.framing, entry.max_message_bytes, entry.matching);
            let connection = &mut entry.connections[number];
            let rest = &input[taken..];
            if rest.is_empty() || entry.per_request && connection.served {
                return Ok(taken);
            }
            let (consumed, payload) =
                match framing.parse_response(&mut connection.pipeline.parser, rest, max) {
                    Ok(Parsed::Incomplete { .. }) => return Ok(taken),
                    Ok(Parsed::Message { consumed, start, end, .. }) => {
                        (consumed, &rest[start..end])
                    }
                    Ok(_) => return Err((status::PROTOCOL, DropReason::BackendProtocol)),
                    Err(error) => {
                        let reason = error.backend_drop_reason();
                        let too_long = reason == DropReason::BackendTooLong;
                        let status = if too_long { status::TOO_LONG } else { status::PROTOCOL };
                        return Err((status, reason));
                    }
                };
            taken += consumed;
            let id = matching.map_or(Some(0), |id| id.of(payload));
            let fits = connection.fits(framing, id, payload);
            if !connection.pipeline.places.is_empty() && !fits {
                return Err((status::PROTOCOL, DropReason::BackendMismatch));
            }
            let Some(place) = connection.pipeline.pop() else {
                return Err((status::PROTOCOL, DropReason::BackendUnasked));
            };
            if place.given_up && !mutants::on("answer_backend_twice") {
                self.counters.drop_one(DropReason::BackendLate);
            } else {
                self.gather_answer(place.request(), payload, clock);
            }
            let connection = &mut self.pools[pool].connections[number];
            connection.served = true;
            connection.back_off.succeeded();
        }
    }

    /// A backend connection ended: every block that waits on it is notified. The oldest request gets `first`, the
    /// others `CLOSED`; all of them `PROTOCOL` if that is `first`, and `REFUSED` if the connection was never up.
    pub(crate) fn fail_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        pool: usize,
        number: usize,
        first: u8,
        now_ns: u64,
    ) {
        let connection = &mut self.pools[pool].connections[number];
        if connection.is_down() {
            return;
        }
        let was_up = connection.state == ConnectionState::Up;
        // A server may close an idle connection, or one that it does not read: the next request opens another.
        let serves = was_up && (connection.served || first == status::TOO_LONG);
        nic.close(connection.key, Close::Reset);
        connection.reset_buffers();
        connection.state = ConnectionState::Down;
        if !serves {
            connection.back_off.failed(now_ns);
        }
        self.counters.backend_failures.one();
        let (mut status, others) = match (was_up, first) {
            (false, _) => (status::REFUSED, status::REFUSED),
            (true, status::PROTOCOL) => (status::PROTOCOL, status::PROTOCOL),
            (true, first) => (first, status::CLOSED),
        };
        while let Some(place) = self.pools[pool].connections[number].pipeline.pop() {
            if !place.given_up {
                self.fail_sent(place.request(), status);
            }
            status = others;
        }
    }

    /// A backend connection can be written: an attempt succeeded, or the socket has room again.
    pub(crate) fn backend_writable(&mut self, pool: usize, number: usize) {
        let entry = &mut self.pools[pool];
        let connection = &mut entry.connections[number];
        if matches!(connection.state, ConnectionState::Connecting { .. }) {
            connection.state = ConnectionState::Up;
        }
        if !connection.dirty && connection.pipeline.unwritten() > 0 {
            connection.dirty = true;
            entry.dirty.push(number as u16);
        }
    }

    /// Writes the pending output of each connection, with one write each.
    pub(crate) fn flush_backends<N: Nic>(&mut self, nic: &mut N, now_ns: u64) {
        for pool in 0..self.pools.len() {
            while let Some(number) = self.pools[pool].dirty.pop() {
                let connection = &mut self.pools[pool].connections[number as usize];
                connection.dirty = false;
                if connection.state != ConnectionState::Up {
                    // Written when the attempt succeeds; dropped with its requests when it fails.
                    continue;
                }
                if connection.pipeline.write(nic, connection.key) == Written::Broken {
                    self.fail_backend(nic, pool, number.into(), status::CLOSED, now_ns);
                }
            }
        }
    }

    /// Times out requests and connection attempts.
    pub(super) fn expire_streams<N: Nic>(&mut self, nic: &mut N, now_ns: u64) {
        for pool in 0..self.pools.len() {
            let patience_ns = patience_ns(self.pools[pool].timeout_ns);
            for number in 0..self.pools[pool].connections.len() {
                let connection = &self.pools[pool].connections[number];
                if self.pools[pool].per_request {
                    self.expire_request(nic, pool, number, now_ns);
                    continue;
                }
                let overdue = match connection.state {
                    ConnectionState::Down => continue,
                    ConnectionState::Connecting { deadline_ns } => deadline_ns <= now_ns,
                    ConnectionState::Up => connection.pipeline.is_behind(now_ns, patience_ns),
                };
                if overdue {
                    self.fail_backend(nic, pool, number, status::CLOSED, now_ns);
                    continue;
                }
                while let pipeline = &mut self.pools[pool].connections[number].pipeline
                    && let Some(place) = pipeline.expire(now_ns)
                {
                    let (request, given_up) = (place.request(), place.given_up);
                    place.given_up = true;
                    if mutants::on("forget_late_answer") {
                        pipeline.pop();
                    }
                    if !given_up {
                        self.counters.backend_timeouts.one();
                        self.fail_sent(request, status::TIMEOUT);
                    }
                }
            }
        }
    }

    /// The same for a connection with one request: its time-out ends both.
    fn expire_request<N: Nic>(&mut self, nic: &mut N, pool: usize, number: usize, now_ns: u64) {
        let connection = &mut self.pools[pool].connections[number];
        let due = connection.pipeline.is_due(now_ns);
        let Some(place) = due.then(|| connection.pipeline.pop()).flatten() else { return };
        self.pools[pool].end_request(nic, number);
        if !place.given_up {
            self.counters.backend_timeouts.one();
            self.fail_sent(place.request(), status::TIMEOUT);
        }
    }
}
