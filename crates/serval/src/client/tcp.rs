//! The TCP side: requests pipelined on a few connections.

use std::collections::VecDeque;
use std::net::SocketAddr;

use sys::time::monotonic_ns;
use sys::{SocketNic, SocketOptions};
use wire::framing::{Framing, ParseState, Parsed};
use wire::nic::{Close, Event, Nic, Read, Transport, Written};

use super::{ClientError, Load, Outcome, REST_NS, Stream, Tally, Workload};

/// Free room that a read gets.
const READ_BYTES: usize = 64 << 10;
/// Refused attempts, without one success, before nobody is thought to listen.
const REFUSALS_MAX: u32 = 200;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Open,
    /// Closed, until its time.
    Resting(u64),
}

struct Connection {
    phase: Phase,
    /// Bytes to be written, and how many of them are.
    out: Vec<u8>,
    written: usize,
    /// Bytes read and not understood yet: `input[begin..end]`.
    input: Vec<u8>,
    begin: usize,
    end: usize,
    parse: ParseState,
    /// Requests in flight, oldest first: number and send time.
    waiting: VecDeque<(u64, u64)>,
    /// Its share of the window.
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
}

impl<'w> Run<'w> {
    pub(super) fn new(
        address: SocketAddr,
        stream: &Stream,
        load: &Load,
        workload: &'w mut dyn Workload,
    ) -> Result<Self, ClientError> {
        let tally = Tally::new(load)?;
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
        })
    }

    pub(super) fn run(mut self) -> Result<Outcome, ClientError> {
        let mut events = Vec::new();
        loop {
            self.nic.poll(0, &mut events);
            for event in &events {
                match *event {
                    Event::Readable(key) => self.receive(key as usize)?,
                    Event::Writable(key) => self.writable(key as usize)?,
                    Event::Failed(key) => self.failed(key as usize)?,
                    _ => {}
                }
            }
            let now_ns = monotonic_ns();
            if self.tally.search_is_due(now_ns) {
                self.search(now_ns)?;
            }
            if self.tally.is_over(now_ns) {
                return Ok(self.tally.finish());
            }
            self.tally.idle(!events.is_empty());
        }
    }

    fn writable(&mut self, key: usize) -> Result<(), ClientError> {
        if self.connections[key].phase == Phase::Connecting {
            self.connections[key].phase = Phase::Open;
            self.refusals = 0;
        }
        self.fill(key)
    }

    /// Puts requests on a connection up to its share of the window, and writes.
    fn fill(&mut self, key: usize) -> Result<(), ClientError> {
        let connection = &mut self.connections[key];
        if connection.phase != Phase::Open {
            return Ok(());
        }
        while connection.waiting.len() < connection.depth {
            let now_ns = monotonic_ns();
            let Some(index) = self.tally.next(now_ns) else { break };
            self.request.clear();
            self.workload.request(index, &mut self.request);
            let framed = self.framing.encode_request(&self.request, &mut connection.out);
            framed.map_err(|e| ClientError::Unframable(self.framing, self.request.len(), e))?;
            connection.waiting.push_back((index, now_ns));
        }
        while connection.written < connection.out.len() {
            match self.nic.write(key as u32, &connection.out[connection.written..]) {
                Written::Bytes(len) => connection.written += len,
                Written::Full => return Ok(()),
                Written::Broken => return self.replace(key),
            }
        }
        connection.out.clear();
        connection.written = 0;
        Ok(())
    }

    fn receive(&mut self, key: usize) -> Result<(), ClientError> {
        loop {
            let connection = &mut self.connections[key];
            // What is understood makes room; what is not moves to the front.
            connection.input.copy_within(connection.begin..connection.end, 0);
            connection.end -= connection.begin;
            connection.begin = 0;
            if connection.input.len() < connection.end + READ_BYTES {
                connection.input.resize(connection.end + READ_BYTES, 0);
            }
            let room = connection.input.len() - connection.end;
            match self.nic.read(key as u32, &mut connection.input[connection.end..]) {
                Read::Bytes(len) => {
                    connection.end += len;
                    if !self.parse(key) {
                        return self.replace(key);
                    }
                    if len < room {
                        break;
                    }
                }
                Read::Empty => break,
                Read::Closed | Read::Broken => return self.replace(key),
            }
        }
        self.fill(key)
    }

    /// Takes the replies out of what was read. False when the stream makes no sense.
    fn parse(&mut self, key: usize) -> bool {
        let connection = &mut self.connections[key];
        let now_ns = monotonic_ns();
        while connection.begin < connection.end {
            let buffer = &connection.input[connection.begin..connection.end];
            let state = &mut connection.parse;
            match self.reply_framing.parse_response(state, buffer, self.reply_bytes_max) {
                Ok(Parsed::Message { consumed, start, end, .. }) => {
                    let Some((index, sent_ns)) = connection.waiting.pop_front() else {
                        return false;
                    };
                    let right = self.workload.accepts(index, &buffer[start..end]);
                    self.tally.reply(right, sent_ns, now_ns);
                    connection.begin += consumed;
                }
                Ok(Parsed::Incomplete { .. }) => break,
                _ => return false,
            }
        }
        true
    }

    fn failed(&mut self, key: usize) -> Result<(), ClientError> {
        if self.connections[key].phase == Phase::Connecting {
            self.refusals += 1;
            if self.refusals >= REFUSALS_MAX {
                return Err(ClientError::Refused(self.address));
            }
        }
        self.replace(key)
    }

    /// Everything in flight on the connection is lost; another one is opened after a rest.
    fn replace(&mut self, key: usize) -> Result<(), ClientError> {
        let connection = &mut self.connections[key];
        self.tally.outcome.lost += connection.waiting.len() as u64;
        self.tally.outcome.reconnects += 1;
        *connection = Connection::new(connection.depth);
        connection.phase = Phase::Resting(monotonic_ns() + REST_NS);
        self.nic.close(key as u32, Close::Reset);
        Ok(())
    }

    fn search(&mut self, now_ns: u64) -> Result<(), ClientError> {
        for key in 0..self.connections.len() {
            let connection = &mut self.connections[key];
            let oldest = connection.waiting.front();
            if oldest.is_some_and(|(_, sent)| now_ns.saturating_sub(*sent) > self.tally.timeout_ns)
            {
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
