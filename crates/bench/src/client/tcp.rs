//! The TCP client: requests pipelined on a few connections.
//!
//! Connections with requests in flight are polled by reading. States that only an event reports (a connection opens
//! or has room again) are polled while there are any, and at intervals.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use sys::time::monotonic_ns;
use sys::{SocketNic, SocketOptions};
use wire::framing::{Framing, ParseState, Parsed};
use wire::nic::{Close, Event, Nic, Read, Transport, Written};

use super::{ClientError, Load, Outcome, RETRY_DELAY_NS, Stream, Tally, WINDOW_MAX, Workload};

/// Minimum free room for a read.
const READ_BYTES: usize = 64 << 10;
/// Refused attempts, without a success, after which no server is assumed to listen.
const REFUSALS_MAX: u32 = 200;
/// More connections than this are not polled one by one.
const DIRECT_MAX: usize = 32;
/// Turns of the loop between two readiness calls while only replies are awaited.
const QUIET_TURNS: u32 = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Open,
    /// Closed until this time.
    Resting(u64),
}

/// A request in flight.
#[derive(Clone, Copy)]
struct Waiting {
    index: u64,
    due_ns: u64,
    sent_ns: u64,
}

struct Connection {
    phase: Phase,
    /// Output bytes, and the number of written ones.
    out: Vec<u8>,
    written: usize,
    /// Bytes that were read and not parsed yet: `input[begin..end]`.
    input: Vec<u8>,
    begin: usize,
    end: usize,
    parse: ParseState,
    /// Requests in flight, oldest first.
    waiting: VecDeque<Waiting>,
    /// The last request that was answered, to recognize a duplicate of its answer.
    answered: Option<u64>,
    /// Its part of the window.
    depth: usize,
}

impl Connection {
    fn new(depth: usize) -> Self {
        Self {
            phase: Phase::Connecting,
            out: Vec::new(),
            written: 0,
            input: Vec::new(),
            begin: 0,
            end: 0,
            parse: ParseState::default(),
            waiting: VecDeque::with_capacity(depth),
            answered: None,
            depth,
        }
    }
}

pub(super) struct Run<'w> {
    nic: SocketNic,
    address: SocketAddr,
    framing: Framing,
    reply_framing: Framing,
    reply_bytes_max: usize,
    connections: Vec<Connection>,
    tally: Tally,
    workload: &'w mut dyn Workload,
    request: Vec<u8>,
    refusals: u32,
    /// The connection that is tried first for the next arrival of an open loop.
    turn: usize,
    /// Turns until the next readiness call.
    quiet: u32,
}

impl<'w> Run<'w> {
    pub(super) fn new(
        address: SocketAddr,
        stream: &Stream,
        load: &Load,
        workload: &'w mut dyn Workload,
    ) -> Result<Self, ClientError> {
        let mut tally = Tally::new(load, WINDOW_MAX)?;
        let count = stream.connections;
        if count == 0 || count > load.window {
            return Err(ClientError::Connections(count, load.window));
        }
        let failed = |error: String| ClientError::Socket(address, error);
        let mut nic =
            SocketNic::open(&[], SocketOptions::default()).map_err(|e| failed(e.to_string()))?;
        for key in 0..count as u32 {
            nic.connect(address, Transport::Tcp, key).map_err(|e| failed(e.to_string()))?;
        }
        tally.begin(load);
        let share = |i: usize| load.window / count + usize::from(i < load.window % count);
        Ok(Self {
            nic,
            address,
            framing: stream.framing,
            reply_framing: stream.reply_framing,
            reply_bytes_max: load.reply_bytes_max.max(1),
            connections: (0..count).map(|i| Connection::new(share(i))).collect(),
            tally,
            workload,
            request: Vec::new(),
            refusals: 0,
            turn: 0,
            quiet: 0,
        })
    }

    pub(super) fn run(mut self) -> Result<Outcome, ClientError> {
        let mut events = Vec::new();
        loop {
            let mut found = self.ask()?;
            if self.quiet == 0 || self.connections.len() > DIRECT_MAX {
                self.quiet = QUIET_TURNS;
                self.nic.poll(0, &mut events);
                found |= !events.is_empty();
                for event in &events {
                    match *event {
                        Event::Readable(key) => self.receive(key as usize)?,
                        Event::Writable(key) => self.writable(key as usize)?,
                        Event::Failed(key) => self.failed(key as usize)?,
                        _ => false,
                    };
                }
            } else {
                self.quiet -= 1;
                for key in 0..self.connections.len() {
                    if !self.connections[key].waiting.is_empty() {
                        found |= self.receive(key)?;
                    }
                }
            }
            let now_ns = monotonic_ns();
            if self.tally.search_is_due(now_ns) {
                self.search(now_ns)?;
            }
            if self.tally.turn(found, now_ns) {
                if !self.workload.replies_differ() {
                    // A duplicate of a reply may follow the last one, or still be in flight.
                    std::thread::sleep(Duration::from_nanos(RETRY_DELAY_NS));
                    for key in 0..self.connections.len() {
                        if self.connections[key].waiting.is_empty() {
                            self.receive(key)?;
                        }
                    }
                }
                return Ok(self.tally.finish());
            }
            self.tally.idle(found);
        }
    }

    /// Adds the requests that may be sent now to connections with room, and writes. Returns whether there were any.
    fn ask(&mut self) -> Result<bool, ClientError> {
        let count = self.connections.len();
        let mut asked = false;
        for key in (self.turn..self.turn + count).map(|key| key % count) {
            asked |= self.fill(key)?;
        }
        // In a closed loop every connection fills up; in an open one this distributes the arrivals.
        if asked {
            self.turn = (self.turn + 1) % count;
        }
        Ok(asked)
    }

    fn writable(&mut self, key: usize) -> Result<bool, ClientError> {
        if self.connections[key].phase == Phase::Connecting {
            self.connections[key].phase = Phase::Open;
            self.refusals = 0;
        }
        self.fill(key)
    }

    /// Adds requests to a connection up to its part of the window, and writes. Returns whether there was anything to
    /// write.
    fn fill(&mut self, key: usize) -> Result<bool, ClientError> {
        let connection = &mut self.connections[key];
        if connection.phase != Phase::Open {
            self.quiet = 0;
            return Ok(false);
        }
        while connection.waiting.len() < connection.depth {
            let sent_ns = monotonic_ns();
            let Some((index, due_ns)) = self.tally.next(sent_ns) else { break };
            self.request.clear();
            self.workload.request(index, &mut self.request);
            let framed = self.framing.encode_request(&self.request, &mut connection.out);
            framed.map_err(|e| ClientError::Unframable(self.framing, self.request.len(), e))?;
            connection.waiting.push_back(Waiting { index, due_ns, sent_ns });
        }
        if connection.out.is_empty() {
            return Ok(false);
        }
        while connection.written < connection.out.len() {
            match self.nic.write(key as u32, &connection.out[connection.written..]) {
                Written::Bytes(len) => connection.written += len,
                Written::Full => {
                    self.quiet = 0;
                    return Ok(false);
                }
                Written::Broken => {
                    self.replace(key)?;
                    return Ok(true);
                }
            }
        }
        connection.out.clear();
        connection.written = 0;
        Ok(true)
    }

    /// Reads available bytes. Returns whether there were any.
    fn receive(&mut self, key: usize) -> Result<bool, ClientError> {
        let mut found = false;
        loop {
            let connection = &mut self.connections[key];
            // Parsed bytes make room; the others move to the front.
            connection.input.copy_within(connection.begin..connection.end, 0);
            connection.end -= connection.begin;
            connection.begin = 0;
            if connection.input.len() < connection.end + READ_BYTES {
                connection.input.resize(connection.end + READ_BYTES, 0);
            }
            let room = connection.input.len() - connection.end;
            match self.nic.read(key as u32, &mut connection.input[connection.end..]) {
                Read::Bytes(len) => {
                    found = true;
                    connection.end += len;
                    if !self.parse(key) {
                        self.replace(key)?;
                        break;
                    }
                    if len < room {
                        break;
                    }
                }
                Read::Empty => break,
                Read::Closed | Read::Broken => {
                    self.replace(key)?;
                    break;
                }
            }
        }
        if found {
            // At once: room in the window must not wait for the turns of other connections.
            self.fill(key)?;
        }
        Ok(found)
    }

    /// Parses the replies that were read. Returns false if the stream is invalid.
    fn parse(&mut self, key: usize) -> bool {
        let connection = &mut self.connections[key];
        let now_ns = monotonic_ns();
        while connection.begin < connection.end {
            let buffer = &connection.input[connection.begin..connection.end];
            let state = &mut connection.parse;
            match self.reply_framing.parse_response(state, buffer, self.reply_bytes_max) {
                Ok(Parsed::Message { consumed, start, end, .. }) => {
                    let Some(request) = connection.waiting.pop_front() else {
                        // No request is in flight: a duplicate answer.
                        self.tally.outcome.duplicated += 1;
                        return false;
                    };
                    let reply = &buffer[start..end];
                    let right = self.workload.accepts(request.index, reply);
                    let last = connection.answered;
                    if !right && last.is_some_and(|last| self.workload.accepts(last, reply)) {
                        // The place in the order is kept for the proper answer.
                        connection.waiting.push_front(request);
                        self.tally.outcome.duplicated += 1;
                    } else {
                        connection.answered = Some(request.index);
                        self.tally.reply(right, request.due_ns, now_ns);
                    }
                    connection.begin += consumed;
                }
                Ok(Parsed::Incomplete { .. }) => break,
                _ => {
                    // It arrived instead of the next answer, or without a request.
                    match connection.waiting.pop_front() {
                        Some(request) => self.tally.reply(false, request.due_ns, now_ns),
                        None => self.tally.outcome.wrong += 1,
                    }
                    return false;
                }
            }
        }
        true
    }

    fn failed(&mut self, key: usize) -> Result<bool, ClientError> {
        if self.connections[key].phase == Phase::Connecting {
            self.refusals += 1;
            if self.refusals >= REFUSALS_MAX {
                return Err(ClientError::Refused(self.address));
            }
        }
        self.replace(key)?;
        Ok(true)
    }

    /// Everything in flight on the connection is lost; another one is opened after a delay.
    fn replace(&mut self, key: usize) -> Result<(), ClientError> {
        let now_ns = monotonic_ns();
        let connection = &mut self.connections[key];
        connection.waiting.iter().for_each(|request| self.tally.lose(request.due_ns, now_ns));
        self.tally.outcome.reconnects += 1;
        *connection = Connection::new(connection.depth);
        connection.phase = Phase::Resting(now_ns + RETRY_DELAY_NS);
        self.nic.close(key as u32, Close::Reset);
        Ok(())
    }

    fn search(&mut self, now_ns: u64) -> Result<(), ClientError> {
        for key in 0..self.connections.len() {
            let connection = &mut self.connections[key];
            let oldest = connection.waiting.front();
            if oldest.is_some_and(|request| self.tally.is_late(request.sent_ns, now_ns)) {
                self.replace(key)?;
            } else if matches!(connection.phase, Phase::Resting(until) if now_ns >= until) {
                connection.phase = Phase::Connecting;
                let started = self.nic.connect(self.address, Transport::Tcp, key as u32);
                started.map_err(|e| ClientError::Socket(self.address, e.to_string()))?;
            }
        }
        Ok(())
    }
}
