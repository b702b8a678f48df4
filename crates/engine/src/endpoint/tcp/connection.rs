//! TCP connections of one worker: their bytes, and the order of their replies.
//!
//! A connection owns memory only while it needs some: bytes of an incomplete message, replies that the host kernel
//! has not taken, and lists of those and of outcomes that are out of order. All memory comes from a [`Pool`] of the
//! worker and is returned when it is empty.
//!
//! Requests of a connection are numbered from 0. With `ordered` replies, an outcome that is out of order waits in a
//! window of `pipelined` places; the engine copies it there, so that its ring slot is free at once. Reading stops
//! while `pipelined` requests are open or unsent, so a client that sends and never reads costs at most that many
//! replies.

use std::collections::VecDeque;

use wire::framing::{Expects, ParseState};
use wire::nic::StreamKey;
use wire::session::{EndpointKind, Origin, ReplyTo};

use super::terms::ErrorBytes;
use crate::base::arrival::Arrival;

/// The outcome of one request, in the place of its reply.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Bytes as they are sent, and how many of them are payload; counted as replied when sent.
    Reply { encoded: Vec<u8>, payload: u32 },
    /// Bytes that report an error; the drop of the request has been counted.
    Error(ErrorBytes),
    /// No bytes.
    Nothing,
    /// The connection ends here, after these bytes (possibly none), which are the last message the framing can send
    /// to the client. This is a single outcome, so that the end never needs a place the window does not have.
    Close(ErrorBytes),
}

/// Whether a connection's bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Yes.
    Open,
    /// A complete message waits for credit or for a place in the window; of a relayed stream: a function's reply waits for the client.
    Stalled,
    /// Not any more: the peer closed its side, asked to quit, broke the framing, or the engine drains.
    Ended,
}

/// A reply in the output that the host kernel has not taken entirely.
#[derive(Clone, Copy, Debug)]
struct Owed {
    /// Position in the connection's output, counted from its first byte, where the reply ends.
    end: u64,
    /// Payload bytes; `None` for bytes that are not a reply.
    payload: Option<u32>,
}

/// One TCP connection. See the module documentation.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Generation of this table entry; odd while the connection is open.
    pub(crate) generation: u32,
    pub(crate) service: u16,
    /// Hash of the flow (client address and port).
    pub(crate) flow: u64,
    pub(crate) parser: ParseState,
    /// Its last line ended in CR LF (framing `line`).
    pub(crate) crlf: bool,
    /// Bytes read that do not belong to a taken message.
    pub(crate) input: Vec<u8>,
    pub(crate) reading: Reading,
    /// The host kernel may have bytes for this connection.
    pub(crate) readable: bool,
    /// In the worker's list of connections to read.
    pub(crate) listed: bool,
    /// In the worker's list of connections to write.
    pub(crate) dirty: bool,
    /// Close once the output is flushed.
    pub(crate) closing: bool,
    /// Time of the last complete message in either direction, or of the accept: what `idle_s` counts from.
    pub(crate) last_message_ns: u64,
    /// Time since which the host kernel refuses bytes; 0 when it does not.
    pub(crate) blocked_since_ns: u64,
    output: Vec<u8>,
    written: usize,
    /// Output bytes ever written to the host kernel.
    written_total: u64,
    owed: VecDeque<Owed>,
    ordered: bool,
    window: u32,
    /// Number of the next request.
    next: u64,
    /// Number of the request whose outcome is sent next (ordered).
    turn: u64,
    /// Requests without an outcome.
    open: u32,
    early: VecDeque<Option<Outcome>>,
    early_bytes: usize,
    early_replies: usize,
    owed_replies: usize,
    lost: u64,
}

/// Replies that were sent, as counted by [`Connection::sent`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) replies: u64,
    pub(crate) payload: u64,
}

impl Connection {
    fn closed() -> Self {
        Self {
            generation: 0,
            service: 0,
            flow: 0,
            parser: ParseState::default(),
            crlf: false,
            input: Vec::new(),
            reading: Reading::Ended,
            readable: false,
            listed: false,
            dirty: false,
            closing: false,
            last_message_ns: 0,
            blocked_since_ns: 0,
            output: Vec::new(),
            written: 0,
            written_total: 0,
            owed: VecDeque::new(),
            ordered: true,
            window: 1,
            next: 0,
            turn: 0,
            open: 0,
            early: VecDeque::new(),
            early_bytes: 0,
            early_replies: 0,
            owed_replies: 0,
            lost: 0,
        }
    }

    /// The table entry's next generation, which is closed.
    fn next_generation(&self) -> Self {
        Self { generation: self.generation.wrapping_add(1), ..Self::closed() }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.generation % 2 == 1
    }

    /// Whether another request may be taken from the input.
    pub(crate) fn may_take(&self) -> bool {
        self.occupied() < u64::from(self.window)
    }

    /// How many more may be taken from the input.
    pub(crate) fn places(&self) -> u64 {
        u64::from(self.window).saturating_sub(self.occupied())
    }

    #[inline(always)]
    fn occupied(&self) -> u64 {
        let open = if self.ordered { self.next - self.turn } else { u64::from(self.open) };
        open + self.owed.len() as u64
    }

    /// The next request of this connection, which `worker` knows by `key`. Its client waits for a reply.
    #[inline(always)]
    pub(crate) fn arrival(&self, worker: u16, key: StreamKey, received_ns: u64) -> Arrival {
        let generation = self.generation;
        let to = ReplyTo { endpoint: EndpointKind::Tcp, worker, key, generation };
        Arrival {
            origin: Origin::Client(to),
            number: self.next,
            expects: Expects::Reply,
            received_ns,
            flow: self.flow,
            target: None,
        }
    }

    /// Assigns the next number to a request that was just accepted.
    pub(crate) fn take(&mut self) -> u64 {
        self.open += 1;
        self.next += 1;
        self.next - 1
    }

    /// Assigns the next number to a chunk of bytes that go on as they come.
    pub(crate) fn take_chunk(&mut self) -> u64 {
        (self.next, self.turn) = (self.next + 1, self.next + 1);
        self.next - 1
    }

    /// Appends the rest of such a chunk for the client, which counts as a reply of this many bytes.
    pub(crate) fn relay(&mut self, rest: &[u8], payload: u32, pool: &mut Pool) {
        self.append(rest, pool);
        self.owe(Some(payload), pool);
    }

    /// The same for as many requests that were accepted as one.
    pub(crate) fn take_many(&mut self, requests: u32) {
        self.open += requests;
        self.next += u64::from(requests);
    }

    /// Requests without an outcome, outcomes not yet in the output, replies not yet sent.
    pub(crate) fn unsettled(&self) -> usize {
        self.open as usize + self.early_replies() + self.owed_replies()
    }

    /// Replies that are out of order.
    pub(crate) fn early_replies(&self) -> usize {
        self.early_replies
    }

    /// Replies in the output that the host kernel has not taken.
    pub(crate) fn owed_replies(&self) -> usize {
        self.owed_replies
    }

    /// Replies that are ready and not sent.
    fn waiting(&self) -> u64 {
        (self.early_replies + self.owed_replies) as u64
    }

    /// Whether the outcome of request `sequence` can be appended to the output at once.
    pub(crate) fn is_due(&self, sequence: u64) -> bool {
        !self.ordered || sequence == self.turn || mutants::on("reorder_reply")
    }

    /// Appends one due reply: `encode` writes its bytes and returns whether it could.
    pub(crate) fn reply_now<E>(
        &mut self,
        payload: u32,
        pool: &mut Pool,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.output.capacity() == 0 {
            self.output = pool.take();
        }
        encode(&mut self.output)?;
        if mutants::on("allocate_for_reply") {
            drop(std::hint::black_box(self.output.clone()));
        }
        self.owe(Some(payload), pool);
        self.open -= 1;
        if self.ordered {
            self.turn += 1;
            self.early.pop_front();
            self.advance(pool);
        }
        Ok(())
    }

    /// Appends the replies to `count` consecutive requests, the first of which is due, of `payload` bytes each. `encode` writes all of them, which
    /// have the same length on the wire.
    pub(crate) fn reply_many<E>(
        &mut self,
        (count, payload): (u32, u32),
        pool: &mut Pool,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.output.capacity() == 0 {
            self.output = pool.take();
        }
        let from = self.output.len();
        encode(&mut self.output)?;
        if self.owed.capacity() == 0 {
            self.owed = pool.owed.take();
        }
        let bytes = ((self.output.len() - from) / count as usize) as u64;
        let mut end = self.written_total + (from - self.written) as u64;
        for _ in 0..count {
            end += bytes;
            self.owed.push_back(Owed { end, payload: Some(payload) });
        }
        self.owed_replies += count as usize;
        self.open -= count;
        if self.ordered {
            self.turn += u64::from(count);
            self.early.drain(..self.early.len().min(count as usize));
            self.advance(pool);
        }
        Ok(())
    }

    /// Records the outcome of a request; those that are due move to the output.
    pub(crate) fn settle(&mut self, sequence: u64, outcome: Outcome, pool: &mut Pool) {
        self.open -= 1;
        if !self.ordered {
            return self.emit(outcome, pool);
        }
        let ahead = (sequence - self.turn) as usize;
        debug_assert!(ahead < self.window as usize);
        if ahead == 0 {
            self.emit(outcome, pool);
            self.turn += 1;
            self.early.pop_front();
            return self.advance(pool);
        }
        if let Outcome::Reply { encoded, .. } = &outcome {
            self.early_bytes += encoded.len();
            self.early_replies += 1;
        }
        if self.early.capacity() == 0 {
            self.early = pool.early.take();
        }
        while self.early.len() <= ahead {
            self.early.push_back(None);
        }
        let place = if mutants::on("misplace_reply") { self.early.len() - 1 } else { ahead };
        self.early[place] = Some(outcome);
    }

    /// Moves early outcomes that are due to the output.
    fn advance(&mut self, pool: &mut Pool) {
        while let Some(Some(_)) = self.early.front() {
            let outcome = self.early.pop_front().flatten().expect("just seen");
            if let Outcome::Reply { encoded, .. } = &outcome {
                self.early_bytes -= encoded.len();
                self.early_replies -= 1;
            }
            self.emit(outcome, pool);
            self.turn += 1;
        }
        if self.early.is_empty() {
            pool.early.give(&mut self.early);
        }
    }

    fn emit(&mut self, outcome: Outcome, pool: &mut Pool) {
        if self.closing {
            if let Outcome::Reply { encoded, .. } = outcome {
                self.lost += 1;
                pool.give(encoded);
            }
            return;
        }
        match outcome {
            Outcome::Reply { encoded, payload } => {
                self.append(&encoded, pool);
                self.owe(Some(payload), pool);
                pool.give(encoded);
            }
            Outcome::Error(bytes) => {
                self.append(&bytes, pool);
                self.owe(None, pool);
            }
            Outcome::Nothing => {}
            Outcome::Close(bytes) => {
                if !bytes.is_empty() {
                    self.append(&bytes, pool);
                    self.owe(None, pool);
                }
                self.closing = true;
                self.reading = Reading::Ended;
            }
        }
    }

    fn append(&mut self, bytes: &[u8], pool: &mut Pool) {
        if self.output.capacity() == 0 {
            self.output = pool.take();
        }
        self.output.extend_from_slice(bytes);
    }

    fn owe(&mut self, payload: Option<u32>, pool: &mut Pool) {
        if self.owed.capacity() == 0 {
            self.owed = pool.owed.take();
        }
        let end = self.written_total + (self.output.len() - self.written) as u64;
        self.owed.push_back(Owed { end, payload });
        self.owed_replies += usize::from(payload.is_some());
    }

    /// Early replies that were lost since the last call, because an earlier [`Outcome::Close`] ended the connection.
    pub(crate) fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    /// Whether the outcome of request `sequence` and all earlier ones have been sent.
    pub(crate) fn has_sent(&self, sequence: u64) -> bool {
        self.owed.is_empty() && (!self.ordered || sequence < self.turn)
    }

    /// Bytes the host kernel has not taken.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.output[self.written..]
    }

    /// The host kernel took `count` bytes: returns the replies that are complete.
    pub(crate) fn sent(&mut self, count: usize, pool: &mut Pool) -> Sent {
        let partial = self.written + count < self.output.len();
        self.written += count + usize::from(partial && mutants::on("resume_write_late"));
        self.written_total += count as u64;
        let mut sent = Sent::default();
        while let Some(owed) = self.owed.front().filter(|o| o.end <= self.written_total) {
            if let Some(payload) = owed.payload {
                sent.replies += 1;
                sent.payload += u64::from(payload);
                self.owed_replies -= 1;
            }
            self.owed.pop_front();
        }
        if self.owed.is_empty() {
            pool.owed.give(&mut self.owed);
        }
        if self.written == self.output.len() {
            pool.give(std::mem::take(&mut self.output));
            self.written = 0;
        } else {
            discard_written(&mut self.output, &mut self.written);
        }
        sent
    }

    /// Returns the input's memory if it is empty.
    pub(crate) fn trim_input(&mut self, pool: &mut Pool) {
        if self.input.is_empty() && self.input.capacity() > 0 {
            pool.give(std::mem::take(&mut self.input));
        }
    }
}

/// The worker's table of connections; the index is the stream key.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    entries: Vec<Connection>,
    free: Vec<StreamKey>,
    open: usize,
    /// Sums by service.
    sums: Vec<Sums>,
    /// Bytes of early replies of all connections.
    pub(crate) early_bytes: usize,
}

/// Sums over the connections of one service.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    open: u32,
    /// Replies that are ready and not sent.
    waiting: u64,
}

impl Connections {
    /// An empty table with room for this many connections; more make it grow.
    pub(crate) fn with_room(connections: usize) -> Self {
        let entries = Vec::with_capacity(connections);
        Self { entries, free: Vec::with_capacity(connections), ..Self::default() }
    }

    /// Makes room for a service with this number.
    pub(crate) fn make_room_for(&mut self, service: usize) {
        let count = self.sums.len().max(service + 1);
        self.sums.resize(count, Sums::default());
    }

    /// Moves the connections of one service to another with the same protocol.
    pub(crate) fn move_to(&mut self, from: u16, to: u16) {
        for entry in self.entries.iter_mut().filter(|c| c.is_open() && c.service == from) {
            entry.service = to;
        }
        let moved = std::mem::take(&mut self.sums[from as usize]);
        let sums = &mut self.sums[to as usize];
        sums.open += moved.open;
        sums.waiting += moved.waiting;
    }

    /// Open connections of one service.
    pub(crate) fn open_of(&self, service: u16) -> u32 {
        self.sums[service as usize].open
    }

    /// Applies `change` to an open connection and updates the sums over all of them.
    #[inline]
    pub(crate) fn change<R>(
        &mut self,
        key: StreamKey,
        change: impl FnOnce(&mut Connection) -> R,
    ) -> Option<R> {
        let connection = self.entries.get_mut(key as usize).filter(|c| c.is_open())?;
        let before = (connection.waiting(), connection.early_bytes);
        let result = change(connection);
        let waiting = &mut self.sums[connection.service as usize].waiting;
        *waiting = *waiting + connection.waiting() - before.0;
        self.early_bytes = self.early_bytes + connection.early_bytes - before.1;
        Some(result)
    }

    pub(crate) fn open_count(&self) -> usize {
        self.open
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Opens an entry.
    pub(crate) fn open(
        &mut self,
        service: u16,
        ordered: bool,
        window: u32,
        now_ns: u64,
    ) -> StreamKey {
        let key = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Connection::closed());
            // There is room for every key: closing allocates nothing.
            self.free.reserve(self.entries.len().saturating_sub(self.free.len()));
            self.entries.len() as StreamKey - 1
        });
        let entry = &mut self.entries[key as usize];
        *entry = Connection {
            service,
            reading: Reading::Open,
            last_message_ns: now_ns,
            ordered,
            window,
            ..entry.next_generation()
        };
        if mutants::on("hoard_memory") {
            std::mem::forget(vec![1_u8; 4096]);
        }
        self.open += 1;
        self.sums[service as usize].open += 1;
        key
    }

    /// Closes an entry, returns its memory and the number of replies that are lost with it.
    pub(crate) fn close(&mut self, key: StreamKey, pool: &mut Pool) -> u64 {
        let entry = &mut self.entries[key as usize];
        assert!(entry.is_open());
        let lost = entry.waiting();
        let sums = &mut self.sums[entry.service as usize];
        sums.waiting -= lost;
        sums.open -= 1;
        self.early_bytes -= entry.early_bytes;
        pool.give(std::mem::take(&mut entry.input));
        pool.give(std::mem::take(&mut entry.output));
        for outcome in entry.early.drain(..).flatten() {
            if let Outcome::Reply { encoded, .. } = outcome {
                pool.give(encoded);
            }
        }
        pool.owed.give(&mut entry.owed);
        pool.early.give(&mut entry.early);
        *entry = entry.next_generation();
        self.free.push(key);
        self.open -= 1;
        lost
    }

    /// The open connection with this key.
    #[inline]
    pub(crate) fn at(&mut self, key: StreamKey) -> Option<&mut Connection> {
        self.entries.get_mut(key as usize).filter(|c| c.is_open())
    }

    /// The open connection with this key, if it is still of that generation.
    #[inline]
    pub(crate) fn in_generation(
        &mut self,
        key: StreamKey,
        generation: u32,
    ) -> Option<&mut Connection> {
        let any = mutants::on("forget_generation");
        self.at(key).filter(|c| c.generation == generation || any)
    }

    /// Replies that are ready and not sent, for the accounting identity.
    pub(crate) fn replies_waiting(&self, service: u16) -> u64 {
        self.sums[service as usize].waiting
    }
}

/// Maximum number of written bytes in front of unwritten ones.
const WRITTEN_KEPT_MAX: usize = 64 << 10;

/// Removes written bytes from the front of an output that still contains others, once they are many: otherwise a peer
/// that reads steadily but never catches up would keep all sent bytes in memory. Moves no more bytes than were
/// written since the last time.
pub(crate) fn discard_written(output: &mut Vec<u8>, written: &mut usize) {
    if *written >= WRITTEN_KEPT_MAX && *written >= output.len() - *written {
        output.drain(..*written);
        *written = 0;
    }
}

/// Buffers and lists for connections. Large ones are not kept.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<Vec<u8>>,
    kept_bytes: usize,
    owed: Lists<Owed>,
    early: Lists<Option<Outcome>>,
}

/// Capacity of a new buffer.
const BUFFER_BYTES: usize = 4096;
/// Buffers that are allocated at the start. Buffers beyond this number are allocated on demand.
const READY: usize = 256;
/// Buffers of more capacity are returned to the allocator.
const KEEP_CAPACITY_MAX: usize = 64 << 10;
/// Maximum number of buffers that are kept, and of their bytes.
const KEEP_MAX: usize = 16_384;
const KEEP_BYTES_MAX: usize = 64 << 20;
/// Capacity of a new list: the default of `limits.pipelined`.
const LIST_CAPACITY: usize = 64;
/// Lists of each kind that are allocated at the start, and the maximum number that is kept.
const LISTS_READY: usize = 64;
const LISTS_KEEP_MAX: usize = 4096;
/// Lists of more capacity are returned to the allocator.
const LIST_KEEP_CAPACITY_MAX: usize = 1024;

/// Empty lists of one kind.
#[derive(Debug)]
struct Lists<T> {
    free: Vec<VecDeque<T>>,
}

impl<T> Lists<T> {
    fn new() -> Self {
        let mut free = Vec::with_capacity(LISTS_KEEP_MAX);
        free.extend((0..LISTS_READY).map(|_| VecDeque::with_capacity(LIST_CAPACITY)));
        Self { free }
    }

    fn take(&mut self) -> VecDeque<T> {
        self.free.pop().unwrap_or_else(|| VecDeque::with_capacity(LIST_CAPACITY))
    }

    /// Returns the memory of a list that is no longer needed, if it has any.
    fn give(&mut self, list: &mut VecDeque<T>) {
        if list.capacity() == 0 {
            return;
        }
        let mut list = std::mem::take(list);
        if list.capacity() <= LIST_KEEP_CAPACITY_MAX && self.free.len() < LISTS_KEEP_MAX {
            list.clear();
            self.free.push(list);
        }
    }
}

impl Pool {
    pub(crate) fn new() -> Self {
        let mut free = Vec::with_capacity(KEEP_MAX);
        free.extend((0..READY).map(|_| Vec::with_capacity(BUFFER_BYTES)));
        let (owed, early) = (Lists::new(), Lists::new());
        Self { free, kept_bytes: READY * BUFFER_BYTES, owed, early }
    }

    pub(crate) fn take(&mut self) -> Vec<u8> {
        let Some(buffer) = self.free.pop() else { return Vec::with_capacity(BUFFER_BYTES) };
        self.kept_bytes -= buffer.capacity();
        buffer
    }

    pub(crate) fn give(&mut self, mut buffer: Vec<u8>) {
        let bytes = buffer.capacity();
        let room = self.free.len() < KEEP_MAX && self.kept_bytes + bytes <= KEEP_BYTES_MAX;
        if (1..=KEEP_CAPACITY_MAX).contains(&bytes) && room {
            buffer.clear();
            self.kept_bytes += bytes;
            self.free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(ordered: bool, window: u32) -> (Connections, Pool, StreamKey) {
        let mut connections = Connections::default();
        connections.make_room_for(0);
        let key = connections.open(0, ordered, window, 0);
        (connections, Pool::new(), key)
    }

    fn reply(byte: u8) -> Outcome {
        Outcome::Reply { encoded: vec![byte; 3], payload: 3 }
    }

    #[test]
    fn ordered_replies_leave_in_request_order() {
        let (mut connections, mut pool, key) = open(true, 4);
        let c = connections.at(key).unwrap();
        for expected in 0..4 {
            assert!(c.may_take());
            assert_eq!(c.take(), expected);
        }
        assert!(!c.may_take(), "the window is full");
        for (sequence, outcome) in [(2, reply(2)), (1, Outcome::Nothing), (3, reply(3))] {
            c.settle(sequence, outcome, &mut pool);
            assert!(c.unsent().is_empty());
        }
        assert_eq!((c.early_replies(), c.early_bytes, c.unsettled()), (2, 6, 3));
        assert!(c.is_due(0));
        let encode = |out: &mut Vec<u8>| -> Result<(), ()> {
            out.extend([0; 3]);
            Ok(())
        };
        c.reply_now(3, &mut pool, encode).unwrap();
        assert_eq!(c.unsent(), [0, 0, 0, 2, 2, 2, 3, 3, 3]);
        assert_eq!(c.early_bytes, 0);
        assert_eq!(c.sent(5, &mut pool), Sent { replies: 1, payload: 3 });
        assert_eq!(c.owed_replies(), 2);
        assert_eq!(c.sent(4, &mut pool), Sent { replies: 2, payload: 6 });
        assert_eq!(c.unsettled(), 0);
    }

    #[test]
    fn replies_to_several_requests_are_the_same_as_one_by_one() {
        for ordered in [true, false] {
            let (mut connections, mut pool, key) = open(ordered, 16);
            let c = connections.at(key).unwrap();
            assert_eq!(c.take(), 0);
            c.take_many(9);
            assert_eq!((c.take(), c.unsettled(), c.places()), (10, 11, 5));
            // One behind them comes early.
            c.settle(9, reply(9), &mut pool);
            assert!(c.is_due(0));
            c.settle(0, reply(0), &mut pool);
            let encode = |bytes: &[u8]| {
                let bytes = bytes.to_vec();
                move |out: &mut Vec<u8>| -> Result<(), ()> {
                    out.extend(bytes);
                    Ok(())
                }
            };
            c.reply_many((2, 1), &mut pool, encode(b"1122")).unwrap();
            assert_eq!(c.reply_many((2, 1), &mut pool, |_| Err(())), Err(()));
            assert!(c.is_due(3));
            c.reply_many((6, 0), &mut pool, encode(b"")).unwrap();
            let early = [9; 3];
            let expected = match ordered {
                true => [&[0; 3][..], b"1122", &early].concat(),
                false => [&early, &[0; 3][..], b"1122"].concat(),
            };
            assert_eq!(c.unsent(), expected, "{ordered}");
            assert_eq!((c.unsettled(), c.owed_replies()), (11, 10));
            let first = c.sent(if ordered { 6 } else { 9 }, &mut pool);
            let payload = if ordered { 4 } else { 7 };
            assert_eq!(first, Sent { replies: if ordered { 2 } else { 3 }, payload });
            assert_eq!(c.sent(c.unsent().len(), &mut pool).replies, if ordered { 8 } else { 7 });
            assert_eq!((c.unsettled(), c.places()), (1, 15));
        }
    }

    #[test]
    fn a_close_drops_the_replies_behind_it() {
        let (mut connections, mut pool, key) = open(true, 8);
        let c = connections.at(key).unwrap();
        (0..3).for_each(|_| assert!(c.take() < 3));
        c.settle(2, reply(2), &mut pool);
        c.settle(1, Outcome::Close(ErrorBytes::Protocol(b"bye")), &mut pool);
        c.settle(0, reply(0), &mut pool);
        assert_eq!(c.take_lost(), 1);
        assert_eq!(c.unsent(), b"\0\0\0bye");
        assert!(c.closing);
        // Checked without the table, whose count of waiting replies is wrong here.
        connections.sums[0].waiting = 1;
        assert_eq!(connections.close(key, &mut pool), 1, "the unsent reply");
        assert!(connections.at(key).is_none());
        let again = connections.open(0, true, 8, 0);
        assert_eq!((again, connections.at(again).unwrap().generation), (key, 3));
    }

    #[test]
    fn output_that_is_never_empty_stays_bounded() {
        let (mut connections, mut pool, key) = open(true, 8);
        let c = connections.at(key).unwrap();
        let reply = || Outcome::Reply { encoded: vec![7; 4096], payload: 4096 };
        let sequence = c.take();
        c.settle(sequence, reply(), &mut pool);
        let mut replied = 0;
        for _ in 0..4096 {
            let sequence = c.take();
            c.settle(sequence, reply(), &mut pool);
            // The client reads all available bytes but one, so the output never runs empty.
            let most = c.unsent().len() - 1;
            assert!(c.unsent()[..most].iter().all(|byte| *byte == 7));
            replied += c.sent(most, &mut pool).replies;
            assert!(c.output.capacity() <= 256 << 10, "{} bytes are kept", c.output.capacity());
        }
        replied += c.sent(1, &mut pool).replies;
        assert_eq!((replied, c.unsettled(), c.unsent().len()), (4097, 0, 0));
    }

    #[test]
    fn a_connection_returns_its_memory_after_pipelining() {
        let window = LIST_CAPACITY as u32;
        let (mut connections, mut pool, _) = open(true, window);
        let free = |pool: &Pool| (pool.owed.free.len(), pool.early.free.len(), pool.free.len());
        let before = free(&pool);
        let pauses = |c: &Connection| (c.owed.capacity(), c.early.capacity(), c.output.capacity());
        let mut keys = Vec::new();
        for _ in 0..1000 {
            let key = connections.open(0, true, window, 0);
            connections.change(key, |c| {
                (0..window.into()).for_each(|n| assert_eq!(c.take(), n));
                // The newest comes first: all others wait for the oldest.
                for sequence in (0..window.into()).rev() {
                    let mut encoded = pool.take();
                    encoded.push(1);
                    c.settle(sequence, Outcome::Reply { encoded, payload: 1 }, &mut pool);
                }
                assert_eq!((c.owed.len(), c.early.capacity()), (LIST_CAPACITY, 0));
                let all = c.unsent().len();
                assert_eq!(c.sent(all, &mut pool).replies, window.into());
                assert_eq!(pauses(c), (0, 0, 0));
            });
            keys.push(key);
        }
        assert_eq!(free(&pool), before, "sequential requests need one list");
        for key in keys {
            connections.change(key, |c| {
                let first = c.next;
                (first..first + 3).for_each(|n| assert_eq!(c.take(), n));
                c.settle(first, Outcome::Error(ErrorBytes::Protocol(b"late")), &mut pool);
                c.settle(first + 2, Outcome::Nothing, &mut pool);
                assert!(c.owed.capacity() > 0 && c.early.capacity() > 0);
            });
            assert_eq!(connections.close(key, &mut pool), 0);
            assert_eq!(pauses(&connections.entries[key as usize]), (0, 0, 0));
        }
        assert_eq!(free(&pool), before, "closing returns the memory in use");
    }

    #[test]
    fn unordered_replies_are_sent_as_they_arrive() {
        let (mut connections, mut pool, key) = open(false, 2);
        let c = connections.at(key).unwrap();
        c.take();
        c.take();
        assert!(!c.may_take());
        c.settle(1, reply(1), &mut pool);
        assert_eq!(c.unsent(), [1; 3]);
        assert!(!c.may_take(), "an unsent reply occupies its place");
        c.sent(3, &mut pool);
        assert!(c.may_take());
    }
}
