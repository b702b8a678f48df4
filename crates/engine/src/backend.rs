//! Backends: client mqueues and the connections behind them.
//!
//! A block sends requests through a client mqueue's TX ring and gets exactly one answer for each in
//! its RX ring, with the request's tag and a status: ok, or why not. The engine takes a request only
//! when the RX ring has room for its answer, however long it is; others wait where they are.
//!
//! *TCP*: the mqueues of one worker share `connections` connections. Answers are matched to requests in
//! order, and compared with them where the framing can (memcached: by key). An answer that does not fit,
//! or that no request waits for, ends the connection: all in flight on it are answered with `PROTOCOL`,
//! because one answer too many would shift every later one. A request that times out is answered with
//! `TIMEOUT` at once but keeps its place: when its late answer comes it is consumed and counted. A connection that
//! has owed answers for long and gave none in time is closed and opened anew: a backend that left one
//! request unanswered would otherwise be one answer behind for ever. Whoever has answered on a connection
//! that ended is asked on a new one at once; with exponential back-off while the backend refuses, or
//! accepts and ends without an answer.
//!
//! *UDP*: every client mqueue has a socket of its own and one request in flight (datagrams carry no
//! order to match by). A time-out closes the socket: a late answer finds nobody.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;

use mqueue::abi::{self, status};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, RingError};
use wire::DropReason;
use wire::framing::{Framing, FramingError, ParseState, Parsed};
use wire::nic::{Close, Nic, Read, StreamKey, Transport, Written};

use crate::connection::forget_written;
use crate::lane::Lane;
use crate::topology::Backend;

/// Datagrams read from one backend socket at a time.
const DATAGRAMS_MAX: usize = 32;
const BACK_OFF_NS_MIN: u64 = 10_000_000;
const BACK_OFF_NS_MAX: u64 = 1_000_000_000;
/// A connection attempt, or a given-up place at the head of a stream, lasts at least this long.
const PATIENCE_NS_MIN: u64 = 1_000_000_000;

/// Streams are named when their service is seated.
const NO_KEY: StreamKey = StreamKey::MAX;

/// One client mqueue of this worker.
pub(crate) struct ClientMqueue {
    /// Lane number of the block's server mqueue.
    pub(crate) server: u32,
    pub(crate) backend: u16,
    rx: Producer<MappedMemory>,
    tx: Consumer<MappedMemory>,
    rang: bool,
    alive: bool,
    /// Requests taken whose answer is not in the RX ring yet.
    in_flight: u32,
    /// Since when the request at the head of the TX ring cannot be taken; 0 when it can.
    blocked_since_ns: u64,
    /// It is among those that the next turn looks at again.
    pub(crate) is_listed: bool,
    pub(crate) key: StreamKey,
    datagram: DatagramState,
}

#[derive(Clone, Copy, Debug)]
enum DatagramState {
    Closed,
    Idle,
    Waiting { tag: u64, deadline_ns: u64 },
}

impl ClientMqueue {
    pub(crate) fn new(
        server: u32,
        backend: u16,
        rx: Producer<MappedMemory>,
        tx: Consumer<MappedMemory>,
    ) -> Self {
        Self {
            server,
            backend,
            rx,
            tx,
            rang: false,
            alive: true,
            in_flight: 0,
            blocked_since_ns: 0,
            is_listed: false,
            key: NO_KEY,
            datagram: DatagramState::Closed,
        }
    }

    /// Takes the rings of the accelerator's next life; nothing of the last one is left.
    pub(crate) fn renew(&mut self, rx: Producer<MappedMemory>, tx: Consumer<MappedMemory>) {
        (self.rx, self.tx) = (rx, tx);
        (self.rang, self.alive) = (false, true);
        (self.in_flight, self.blocked_since_ns) = (0, 0);
    }

    /// Whether its first request cannot be taken and has been waiting for longer than `timeout_ns`.
    fn is_overdue(&self, now_ns: u64, timeout_ns: u64) -> bool {
        self.blocked_since_ns != 0 && now_ns.saturating_sub(self.blocked_since_ns) > timeout_ns
    }

    /// Marks the RX ring as rung; whether it already was.
    pub(crate) fn rang(&mut self) -> bool {
        std::mem::replace(&mut self.rang, true)
    }

    pub(crate) fn publish(&mut self) {
        self.rx.publish();
        self.rang = false;
    }
}

/// The connections of one backend on this worker.
pub(crate) struct BackendPool {
    address: SocketAddr,
    transport: Transport,
    framing: Framing,
    timeout_ns: u64,
    in_flight_max: usize,
    max_message_bytes: usize,
    pub(crate) connections: Vec<BackendConnection>,
    dirty: Vec<u16>,
}

/// One TCP connection to a backend.
pub(crate) struct BackendConnection {
    pub(crate) key: StreamKey,
    state: ConnectionState,
    back_off_ns: u64,
    /// A request was answered on it since it was opened.
    served: bool,
    output: Vec<u8>,
    written: usize,
    input: Vec<u8>,
    parser: ParseState,
    places: VecDeque<Place>,
    /// What the answers to the places are compared with, in their order, from `marks_taken`.
    marks: Vec<u8>,
    marks_taken: usize,
    /// When the first place was given up since an answer came in time or nothing was owed; 0: none.
    behind_since_ns: u64,
    dirty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionState {
    Down { retry_ns: u64 },
    Connecting { deadline_ns: u64 },
    Up,
}

/// A request in flight: its place in the order of answers.
#[derive(Clone, Copy, Debug)]
struct Place {
    client: u32,
    tag: u64,
    deadline_ns: u64,
    given_up: bool,
    mark_bytes: u32,
}

impl BackendPool {
    pub(crate) fn new(backend: &Backend) -> Self {
        let tcp = backend.transport == Transport::Tcp;
        let count = if tcp { backend.connections } else { 0 };
        let connection = |_| BackendConnection {
            key: NO_KEY,
            state: ConnectionState::Down { retry_ns: 0 },
            back_off_ns: BACK_OFF_NS_MIN,
            served: false,
            output: Vec::new(),
            written: 0,
            input: Vec::new(),
            parser: ParseState::default(),
            places: VecDeque::with_capacity(backend.in_flight as usize),
            marks: Vec::new(),
            marks_taken: 0,
            behind_since_ns: 0,
            dirty: false,
        };
        Self {
            address: backend.address,
            transport: backend.transport,
            framing: backend.framing,
            timeout_ns: backend.timeout_ms * 1_000_000,
            in_flight_max: backend.in_flight as usize,
            max_message_bytes: backend.max_message_bytes as usize,
            connections: (0..count).map(connection).collect(),
            dirty: Vec::with_capacity(count as usize),
        }
    }

    /// Whether every connection is full. (With one that is down and the others full only [`Self::choose`] can tell.)
    fn is_full(&self) -> bool {
        let full = |c: &BackendConnection| c.places.len() >= self.in_flight_max;
        !self.connections.is_empty() && self.connections.iter().all(full)
    }

    fn patience_ns(&self) -> u64 {
        (10 * self.timeout_ns).max(PATIENCE_NS_MIN)
    }

    /// The connection for the next request: the least busy one that is up or on its way; `Err(true)`
    /// when all are full, `Err(false)` when all are down.
    fn choose<N: Nic>(&mut self, nic: &mut N, now_ns: u64) -> Result<usize, bool> {
        let patience_ns = self.patience_ns();
        for connection in &mut self.connections {
            let ConnectionState::Down { retry_ns } = connection.state else { continue };
            if retry_ns > now_ns {
                continue;
            }
            match nic.connect(self.address, Transport::Tcp, connection.key) {
                Ok(()) => {
                    let deadline_ns = now_ns + patience_ns;
                    connection.state = ConnectionState::Connecting { deadline_ns };
                }
                Err(_) => connection.back_off(now_ns),
            }
        }
        let standing = |c: &&BackendConnection| !matches!(c.state, ConnectionState::Down { .. });
        if !self.connections.iter().any(|c| standing(&c)) {
            return Err(false);
        }
        let open = self.connections.iter().enumerate().filter(|(_, c)| standing(c));
        let free = open.filter(|(_, c)| c.places.len() < self.in_flight_max);
        free.min_by_key(|(_, c)| c.places.len()).map(|(i, _)| i).ok_or(true)
    }
}

impl BackendConnection {
    fn back_off(&mut self, now_ns: u64) {
        self.state = ConnectionState::Down { retry_ns: now_ns + self.back_off_ns };
        self.back_off_ns = (2 * self.back_off_ns).min(BACK_OFF_NS_MAX);
    }

    fn reset_buffers(&mut self) {
        self.output.clear();
        self.written = 0;
        self.input.clear();
        self.parser = ParseState::default();
        self.behind_since_ns = 0;
        self.served = false;
    }

    fn push_place(&mut self, place: Place, mark: &[u8]) {
        self.marks.extend_from_slice(mark);
        self.places.push_back(Place { mark_bytes: mark.len() as u32, ..place });
    }

    fn pop_place(&mut self) -> Option<Place> {
        let place = self.places.pop_front()?;
        self.marks_taken += place.mark_bytes as usize;
        if self.places.is_empty() {
            self.marks.clear();
            self.marks_taken = 0;
        } else {
            forget_written(&mut self.marks, &mut self.marks_taken);
        }
        Some(place)
    }

    /// Whether `answer` can be the one that the first place waits for.
    fn fits(&self, framing: Framing, answer: &[u8]) -> bool {
        let Some(place) = self.places.front() else { return false };
        let mark = &self.marks[self.marks_taken..][..place.mark_bytes as usize];
        mutants::on("ignore_key") || framing.fits(mark, answer)
    }
}

impl Lane {
    /// Takes the requests that a block wrote into a client mqueue's TX ring.
    pub(crate) fn take_backend_requests<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        now_ns: u64,
        scratch: &mut [u8],
    ) {
        loop {
            let entry = &mut self.clients[client as usize];
            if !entry.alive {
                return;
            }
            let header = match entry.tx.peek() {
                Ok(Some(header)) => header,
                Ok(None) => break,
                Err(RingError::BadHeader) => {
                    self.counters.drop_one(DropReason::BadMessage);
                    entry.tx.advance();
                    continue;
                }
                Err(RingError::Corrupt) => return self.corrupt_client(client),
            };
            if header.kind != abi::kind::MESSAGE {
                self.counters.drop_one(DropReason::BadMessage);
                entry.tx.advance();
                continue;
            }
            let Ok(room) = entry.rx.room() else { return self.corrupt_client(client) };
            let pool = &self.backends[entry.backend as usize];
            let overdue = entry.is_overdue(now_ns, pool.timeout_ns);
            // Those who wait for a place look at it every turn: nothing is copied for that.
            let asked = matches!(entry.datagram, DatagramState::Waiting { .. });
            let waits = (asked || pool.is_full()) && !overdue;
            let payload = &mut scratch[..header.len as usize];
            if waits || room <= entry.in_flight || !entry.tx.copy_out(&header, payload) {
                return self.block_client(client, now_ns);
            }
            match self.send_to_backend(nic, client, header.tag, payload, now_ns) {
                Sending::Sent => self.counters.backend_sent.one(),
                Sending::Failed(status) => {
                    self.clients[client as usize].in_flight += 1;
                    self.answer(client, header.tag, status, &[]);
                }
                Sending::Busy => {
                    if !overdue {
                        return self.block_client(client, now_ns);
                    }
                    self.clients[client as usize].in_flight += 1;
                    self.counters.backend_timeouts.one();
                    self.answer(client, header.tag, status::TIMEOUT, &[]);
                }
            }
            let entry = &mut self.clients[client as usize];
            entry.blocked_since_ns = 0;
            entry.tx.advance();
        }
        self.clients[client as usize].tx.release();
    }

    /// The block wrote impossible ring words. Its server mqueue shares its fate: worker housekeeping
    /// ends the requests there.
    fn corrupt_client(&mut self, client: u32) {
        let entry = &mut self.clients[client as usize];
        entry.alive = false;
        self.mqueues[entry.server as usize].tx_corrupt = true;
    }

    fn block_client(&mut self, client: u32, now_ns: u64) {
        let entry = &mut self.clients[client as usize];
        if entry.blocked_since_ns == 0 {
            entry.blocked_since_ns = now_ns.max(1);
        }
        entry.tx.release();
        if !std::mem::replace(&mut entry.is_listed, true) {
            self.blocked_clients.push(client);
        }
    }

    fn send_to_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        tag: u64,
        payload: &[u8],
        now_ns: u64,
    ) -> Sending {
        let entry = &mut self.clients[client as usize];
        let pool = &mut self.backends[entry.backend as usize];
        let deadline_ns = now_ns + pool.timeout_ns;
        if pool.transport == Transport::Udp {
            return send_datagram(nic, entry, pool.address, tag, payload, deadline_ns);
        }
        let number = match pool.choose(nic, now_ns) {
            Ok(number) => number,
            Err(true) => return Sending::Busy,
            Err(false) => return Sending::Failed(status::REFUSED),
        };
        let connection = &mut pool.connections[number];
        match pool.framing.encode_request(payload, &mut connection.output) {
            Ok(()) => {}
            Err(FramingError::TooLong) => return Sending::Failed(status::TOO_LONG),
            Err(_) => return Sending::Failed(status::PROTOCOL),
        }
        let place = Place { client, tag, deadline_ns, given_up: false, mark_bytes: 0 };
        connection.push_place(place, pool.framing.mark(payload));
        entry.in_flight += 1;
        if !connection.dirty {
            connection.dirty = true;
            pool.dirty.push(number as u16);
        }
        Sending::Sent
    }

    /// Puts the answer to a request into its client mqueue's RX ring.
    fn answer(&mut self, client: u32, tag: u64, status: u8, payload: &[u8]) {
        let entry = &mut self.clients[client as usize];
        entry.in_flight -= 1;
        if !entry.alive {
            return;
        }
        let head = Head { token: 0, tag, kind: abi::kind::MESSAGE, status };
        let mut pushed = entry.rx.push(head, payload);
        if pushed == Err(LoanError::TooLong) {
            self.counters.drop_one(DropReason::BackendTooLong);
            // The block is told all the same: it waits for exactly one answer.
            pushed = entry.rx.push(Head { status: status::TOO_LONG, ..head }, &[]);
        }
        // There is room for every answer, unless the block has broken the ring.
        if pushed.is_err() {
            return self.corrupt_client(client);
        }
        self.counters.backend_answered.one();
        self.ring_client(client);
    }

    /// A backend connection can be read.
    pub(crate) fn read_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        pool: usize,
        number: usize,
        now_ns: u64,
        scratch: &mut [u8],
    ) {
        loop {
            let connection = &mut self.backends[pool].connections[number];
            match nic.read(connection.key, scratch) {
                Read::Bytes(count) => {
                    // What ends in this read is parsed where it was read.
                    let mut input = std::mem::take(&mut connection.input);
                    let (read, fresh) = (&scratch[..count], input.is_empty());
                    if !fresh {
                        input.extend_from_slice(read);
                    }
                    let whole = if fresh { read } else { &input };
                    let taken = self.take_backend_answers(pool, number, whole);
                    match taken {
                        Ok(taken) if fresh => input.extend_from_slice(&read[taken..]),
                        Ok(taken) => drop(input.drain(..taken)),
                        Err((status, reason)) => {
                            self.counters.drop_one(reason);
                            return self.fail_backend(nic, pool, number, status, now_ns);
                        }
                    }
                    self.backends[pool].connections[number].input = input;
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

    /// Parses what has been read and answers the blocks; the bytes that this took. `Err`: the connection
    /// cannot go on.
    fn take_backend_answers(
        &mut self,
        pool: usize,
        number: usize,
        input: &[u8],
    ) -> Result<usize, (u8, DropReason)> {
        let mut taken = 0;
        loop {
            let (framing, max) =
                (self.backends[pool].framing, self.backends[pool].max_message_bytes);
            let connection = &mut self.backends[pool].connections[number];
            let rest = &input[taken..];
            if rest.is_empty() {
                return Ok(taken);
            }
            let (consumed, payload) =
                match framing.parse_response(&mut connection.parser, rest, max) {
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
            let fits = connection.fits(framing, payload);
            if !connection.places.is_empty() && !fits {
                return Err((status::PROTOCOL, DropReason::BackendMismatch));
            }
            let Some(place) = connection.pop_place() else {
                return Err((status::PROTOCOL, DropReason::BackendUnasked));
            };
            if connection.places.is_empty() || !place.given_up {
                connection.behind_since_ns = 0;
            }
            if place.given_up && !mutants::on("answer_backend_twice") {
                self.counters.drop_one(DropReason::BackendLate);
            } else {
                self.answer(place.client, place.tag, status::OK, payload);
            }
            let connection = &mut self.backends[pool].connections[number];
            (connection.served, connection.back_off_ns) = (true, BACK_OFF_NS_MIN);
        }
    }

    /// A backend connection ended: everybody who waits on it is told. The first request in line gets
    /// `first`, those behind it `CLOSED`; all of them `PROTOCOL` if that is `first`, and `REFUSED` if the
    /// connection never was up.
    pub(crate) fn fail_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        pool: usize,
        number: usize,
        first: u8,
        now_ns: u64,
    ) {
        let connection = &mut self.backends[pool].connections[number];
        if let ConnectionState::Down { .. } = connection.state {
            return;
        }
        let was_up = connection.state == ConnectionState::Up;
        // Whoever serves may end a connection that idles, or that nobody can read on: the next request opens another.
        let serves = was_up && (connection.served || first == status::TOO_LONG);
        nic.close(connection.key, Close::Reset);
        connection.reset_buffers();
        match serves {
            true => connection.state = ConnectionState::Down { retry_ns: now_ns },
            false => connection.back_off(now_ns),
        }
        self.counters.backend_failures.one();
        let (mut status, others) = match (was_up, first) {
            (false, _) => (status::REFUSED, status::REFUSED),
            (true, status::PROTOCOL) => (status::PROTOCOL, status::PROTOCOL),
            (true, first) => (first, status::CLOSED),
        };
        while let Some(place) = self.backends[pool].connections[number].pop_place() {
            if !place.given_up {
                self.answer(place.client, place.tag, status, &[]);
            }
            status = others;
        }
    }

    /// A backend connection can be written: an attempt succeeded, or there is room again.
    pub(crate) fn backend_writable(&mut self, pool: usize, number: usize) {
        let entry = &mut self.backends[pool];
        let connection = &mut entry.connections[number];
        if matches!(connection.state, ConnectionState::Connecting { .. }) {
            connection.state = ConnectionState::Up;
        }
        if !connection.dirty && connection.written < connection.output.len() {
            connection.dirty = true;
            entry.dirty.push(number as u16);
        }
    }

    /// Writes what requests left in the output of each connection: one write each.
    pub(crate) fn flush_backends<N: Nic>(&mut self, nic: &mut N, now_ns: u64) {
        for pool in 0..self.backends.len() {
            while let Some(number) = self.backends[pool].dirty.pop() {
                let connection = &mut self.backends[pool].connections[number as usize];
                connection.dirty = false;
                if connection.state != ConnectionState::Up {
                    // Written when the attempt succeeds; dropped with its requests when it fails.
                    continue;
                }
                match nic.write(connection.key, &connection.output[connection.written..]) {
                    Written::Bytes(count) => {
                        connection.written += count;
                        if connection.written == connection.output.len() {
                            connection.output.clear();
                            connection.written = 0;
                        } else {
                            forget_written(&mut connection.output, &mut connection.written);
                        }
                    }
                    Written::Full => {}
                    Written::Broken => {
                        self.fail_backend(nic, pool, number.into(), status::CLOSED, now_ns);
                    }
                }
            }
        }
    }

    /// A client mqueue's own datagram socket can be read, or failed.
    pub(crate) fn read_datagram_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        scratch: &mut [u8],
    ) {
        for _ in 0..DATAGRAMS_MAX {
            let entry = &mut self.clients[client as usize];
            match nic.read(entry.key, scratch) {
                Read::Bytes(count) => match entry.datagram {
                    DatagramState::Waiting { tag, .. } => {
                        entry.datagram = DatagramState::Idle;
                        self.answer(client, tag, status::OK, &scratch[..count]);
                    }
                    _ => self.counters.drop_one(DropReason::BackendUnasked),
                },
                Read::Empty => return,
                Read::Closed | Read::Broken => return self.fail_datagram_backend(nic, client),
            }
        }
        // It says more than it was asked, without end: what else it says finds nobody.
        self.fail_datagram_backend(nic, client);
    }

    /// A client mqueue's own datagram socket failed (the backend's host says: refused).
    pub(crate) fn fail_datagram_backend<N: Nic>(&mut self, nic: &mut N, client: u32) {
        let entry = &mut self.clients[client as usize];
        nic.close(entry.key, Close::Reset);
        let state = std::mem::replace(&mut entry.datagram, DatagramState::Closed);
        self.counters.backend_failures.one();
        if let DatagramState::Waiting { tag, .. } = state {
            self.answer(client, tag, status::REFUSED, &[]);
        }
    }

    /// Gives up what takes too long.
    pub(crate) fn expire_backends<N: Nic>(&mut self, nic: &mut N, now_ns: u64) {
        for pool in 0..self.backends.len() {
            let patience_ns = self.backends[pool].patience_ns();
            for number in 0..self.backends[pool].connections.len() {
                let connection = &self.backends[pool].connections[number];
                let overdue = match connection.state {
                    ConnectionState::Down { .. } => continue,
                    ConnectionState::Connecting { deadline_ns } => deadline_ns <= now_ns,
                    ConnectionState::Up => {
                        let since_ns = connection.behind_since_ns;
                        since_ns != 0 && since_ns + patience_ns <= now_ns
                    }
                };
                if overdue {
                    self.fail_backend(nic, pool, number, status::CLOSED, now_ns);
                    continue;
                }
                // Deadlines grow along the line, so the first one in time ends the search.
                for index in 0..self.backends[pool].connections[number].places.len() {
                    let connection = &mut self.backends[pool].connections[number];
                    let place = &mut connection.places[index];
                    if place.deadline_ns > now_ns {
                        break;
                    }
                    if connection.behind_since_ns == 0 {
                        connection.behind_since_ns = now_ns.max(1);
                    }
                    if mutants::on("forget_late_answer") {
                        let place = connection.places.remove(index).expect("seen");
                        self.answer(place.client, place.tag, status::TIMEOUT, &[]);
                        break;
                    }
                    if !std::mem::replace(&mut place.given_up, true) {
                        let (client, tag) = (place.client, place.tag);
                        self.counters.backend_timeouts.one();
                        self.answer(client, tag, status::TIMEOUT, &[]);
                    }
                }
            }
        }
        for client in 0..self.clients.len() {
            let entry = &mut self.clients[client];
            let DatagramState::Waiting { tag, deadline_ns } = entry.datagram else { continue };
            if deadline_ns <= now_ns {
                nic.close(entry.key, Close::Reset);
                entry.datagram = DatagramState::Closed;
                self.counters.backend_timeouts.one();
                self.answer(client as u32, tag, status::TIMEOUT, &[]);
            }
        }
    }

    /// The blocks behind these client mqueues are gone: answers to what they asked keep their places
    /// and find nobody.
    pub(crate) fn abandon_clients<N: Nic>(&mut self, nic: &mut N, clients: Range<u32>) {
        for entry in &mut self.clients[clients.start as usize..clients.end as usize] {
            entry.alive = false;
            entry.in_flight = 0;
            if !matches!(entry.datagram, DatagramState::Closed) {
                nic.close(entry.key, Close::Reset);
                entry.datagram = DatagramState::Closed;
            }
        }
        let connections = self.backends.iter_mut().flat_map(|pool| &mut pool.connections);
        for place in connections.flat_map(|connection| &mut connection.places) {
            place.given_up |= clients.contains(&place.client);
        }
    }

    /// Whether something that blocks asked of backends is not answered, or not even taken. For blocks that are gone nobody
    /// waits.
    pub(crate) fn waits_for_backends(&self) -> bool {
        let waits = |c: &ClientMqueue| c.in_flight > 0 || c.is_listed;
        self.clients.iter().any(|c| waits(c) && self.loads[c.server as usize].alive)
    }

    /// Requests to backends without an answer.
    pub(crate) fn backend_in_flight(&self) -> bool {
        self.clients.iter().any(|c| c.in_flight > 0)
    }
}

/// What became of a request to a backend.
enum Sending {
    Sent,
    /// Answer with this status.
    Failed(u8),
    /// Later: everything is full.
    Busy,
}

fn send_datagram<N: Nic>(
    nic: &mut N,
    entry: &mut ClientMqueue,
    address: SocketAddr,
    tag: u64,
    payload: &[u8],
    deadline_ns: u64,
) -> Sending {
    match entry.datagram {
        DatagramState::Waiting { .. } => return Sending::Busy,
        DatagramState::Idle => {}
        DatagramState::Closed => {
            if nic.connect(address, Transport::Udp, entry.key).is_err() {
                return Sending::Failed(status::REFUSED);
            }
            entry.datagram = DatagramState::Idle;
        }
    }
    match nic.write(entry.key, payload) {
        Written::Bytes(_) => {
            entry.datagram = DatagramState::Waiting { tag, deadline_ns };
            entry.in_flight += 1;
            Sending::Sent
        }
        Written::Full => Sending::Busy,
        Written::Broken => {
            nic.close(entry.key, Close::Reset);
            entry.datagram = DatagramState::Closed;
            Sending::Failed(status::REFUSED)
        }
    }
}
