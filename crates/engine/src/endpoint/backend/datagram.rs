//! Backends over UDP: a socket for each client mqueue.
//!
//! Datagrams have no order to match by. Where requests carry an id (`match`), several are in flight and an answer
//! belongs to the one with its id. Requests to memcached get their ids from the engine, in the frame header of the
//! protocol over UDP; one is in flight, and its answer is assembled from its datagrams, of which memcached 1.6 numbers those of
//! each value by themselves. Without ids one request is in
//! flight, and a time-out closes the socket, so that late answers are not received. However, a duplicate of an answer
//! may arrive while the next request waits, and cannot be distinguished from the right answer. With one socket per
//! request it arrives at a closed or different port.
//!
//! Datagrams that answer no request in flight are dropped and counted: `backend_unasked` if none is in flight, else
//! `backend_mismatch`.

use std::collections::VecDeque;

use mqueue::abi::status;
use wire::DropReason;
use wire::framing::memcached::bytes_left;
use wire::framing::{Assembly, Framing, ParseState, Parsed, Piece, UDP_HEADER_BYTES, UdpHeader};
use wire::nic::{Close, Nic, Read, Transport, UDP_PAYLOAD_MAX, Written};

use super::{BackendPool, Backends, ClientMqueue, Sending, refusal};

/// Maximum number of unmatched datagrams read from one socket at a time. Where late answers are recognized, all that
/// timed out together may arrive together.
const UNMATCHED_MAX: usize = 32;
const LATE_MAX: usize = 1024;

/// The socket of a client mqueue, and the requests sent through it.
#[derive(Debug, Default)]
pub(super) struct DatagramSocket {
    open: bool,
    /// In the order in which they were sent.
    asked: VecDeque<InFlight>,
    /// The id of memcached's next request.
    next_id: u16,
    /// Matching data of the requests.
    mark: Vec<u8>,
    assembly: Assembly,
    /// The values of an answer to several keys that have come.
    values: Vec<u8>,
    /// How many, with those of keys that have none.
    value_count: usize,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    tag: u64,
    /// Its number among the requests that functions have seen.
    number: u64,
    deadline_ns: u64,
    id: u64,
}

/// The result of parsing a datagram.
enum Answer {
    /// The answer, from this offset on, to the request at this index.
    Whole(usize, usize),
    /// The last part of the answer to the first request; the answer is in the assembly.
    Assembled,
    /// A part of the answer to the first request.
    Part,
    /// A part of an answer that is too long for the assembly.
    TooLong,
    /// No request waits for it.
    Useless(DropReason),
}

impl BackendPool {
    /// Whether requests have the frame header of memcached.
    fn is_framed(&self) -> bool {
        self.framing == Framing::Memcached
    }

    /// Whether a late answer is recognised, so that a socket outlives a time-out.
    fn recognizes_late_answers(&self) -> bool {
        self.is_framed() || self.matching.is_some()
    }

    /// Whether the socket takes no more requests at present.
    pub(super) fn is_full_for(&self, socket: &DatagramSocket) -> bool {
        let many = self.matching.is_some() && !self.per_request && !self.is_framed();
        let asked_max = if many { self.in_flight_max } else { 1 };
        let no_socket = self.per_request && !socket.open && self.sockets >= self.in_flight_max;
        self.transport == Transport::Udp && (socket.asked.len() >= asked_max || no_socket)
    }

    /// Sends a request with this tag, number and id, or returns why not.
    pub(super) fn send_datagram<N: Nic>(
        &mut self,
        nic: &mut N,
        entry: &mut ClientMqueue,
        (tag, number, mut id): (u64, u64, u64),
        payload: &[u8],
        now_ns: u64,
    ) -> Sending {
        if self.is_full_for(&entry.datagram) {
            return Sending::Busy;
        }
        let socket = &mut entry.datagram;
        let mut datagram = payload;
        if self.is_framed() {
            id = socket.next_id.into();
            self.datagram.clear();
            self.datagram.extend_from_slice(&UdpHeader::request(socket.next_id).bytes());
            if let Err(error) = self.framing.encode_request(payload, &mut self.datagram) {
                return refusal(error);
            }
            datagram = &self.datagram;
        }
        if datagram.len() > UDP_PAYLOAD_MAX {
            return Sending::Failed(status::TOO_LONG);
        }
        if !socket.open {
            if nic.connect(self.address, Transport::Udp, entry.key).is_err() {
                return Sending::Failed(status::REFUSED);
            }
            socket.open = true;
            self.sockets += 1;
        }
        match nic.write(entry.key, datagram) {
            Written::Bytes(_) => {
                let deadline_ns = now_ns + self.timeout_ns;
                socket.asked.push_back(InFlight { tag, number, deadline_ns, id });
                if self.is_framed() {
                    socket.next_id = socket.next_id.wrapping_add(1);
                    socket.assembly.clear();
                    socket.values.clear();
                    socket.value_count = 0;
                    socket.mark.clear();
                    socket.mark.extend_from_slice(self.framing.mark(payload));
                }
                Sending::Sent
            }
            Written::Full => Sending::Busy,
            Written::Broken if socket.asked.is_empty() => {
                self.close_datagrams(nic, entry);
                Sending::Failed(status::REFUSED)
            }
            // Other requests use this socket: its failure is reported, and ends them too.
            Written::Broken => Sending::Failed(status::REFUSED),
        }
    }

    /// Closes the socket of a client mqueue, without an answer to the requests in flight on it.
    pub(super) fn close_datagrams<N: Nic>(&mut self, nic: &mut N, entry: &mut ClientMqueue) {
        if std::mem::replace(&mut entry.datagram.open, false) {
            let how = match entry.datagram.asked.is_empty() {
                true => Close::Reset,
                // The next socket with its port could be that of another block.
                false => Close::ReservePort { ns: 2 * self.timeout_ns },
            };
            nic.close(entry.key, how);
            self.sockets -= 1;
        }
        entry.datagram.asked.clear();
    }

    /// Parses a datagram and finds its request.
    fn classify(&self, socket: &mut DatagramSocket, datagram: &[u8]) -> Answer {
        let waited_for = !socket.asked.is_empty();
        let useless = Answer::Useless(match waited_for {
            true => DropReason::BackendMismatch,
            false => DropReason::BackendUnasked,
        });
        let blind = mutants::on("ignore_key") && waited_for;
        if !self.is_framed() {
            let id = self.matching.map_or(Some(0), |id| id.of(datagram));
            let place = socket.asked.iter().position(|asked| Some(asked.id) == id || blind);
            return place.map_or(useless, |place| Answer::Whole(place, 0));
        }
        let Some((header, part)) = UdpHeader::split_answer(datagram) else { return useless };
        let id = socket.asked.front().map(|asked| asked.id);
        if id != Some(header.id.into()) && !blind {
            return useless;
        }
        if header.total <= 1 {
            return Answer::Whole(0, UDP_HEADER_BYTES);
        }
        match socket.assembly.take(header, part, self.max_message_bytes) {
            Piece::Last => Answer::Assembled,
            Piece::Taken => Answer::Part,
            Piece::Useless => useless,
            Piece::TooLong => Answer::TooLong,
        }
    }

    /// Checks a complete response of memcached over UDP.
    fn check_response(&self, mark: &[u8], response: &[u8]) -> Result<(), DropReason> {
        let max = self.max_message_bytes;
        if !self.is_framed() || response.len() > max {
            // A response that is too long is reported when it is copied into the ring.
            return Ok(());
        }
        match self.framing.parse_response(&mut ParseState::default(), response, max) {
            Ok(Parsed::Message { consumed, .. }) if consumed == response.len() => {
                let fits = mutants::on("ignore_key") || self.framing.fits(mark, response);
                if fits { Ok(()) } else { Err(DropReason::BackendMismatch) }
            }
            _ => Err(DropReason::BackendProtocol),
        }
    }
}

impl Backends {
    /// A client mqueue's own datagram socket can be read, or failed.
    pub(crate) fn read_datagram_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        clock: &dyn Fn() -> u64,
        scratch: &mut [u8],
    ) {
        let mut useless = 0;
        loop {
            let entry = &mut self.clients[client as usize];
            let pool = &self.pools[entry.backend as usize];
            let late =
                if pool.recognizes_late_answers() { pool.in_flight_max.min(LATE_MAX) } else { 0 };
            if !entry.datagram.open {
                return;
            }
            if useless > UNMATCHED_MAX + late {
                // The peer sends more than it was asked for, without end: the rest is discarded.
                return self.fail_datagram_backend(nic, client);
            }
            match nic.read(entry.key, scratch) {
                Read::Bytes(count) => {
                    let dropped = self.take_datagram(nic, client, clock, (scratch, count));
                    if let Some(reason) = dropped {
                        self.counters.drop_one(reason);
                        useless += 1;
                    }
                }
                Read::Empty => return,
                Read::Closed | Read::Broken => return self.fail_datagram_backend(nic, client),
            }
        }
    }

    /// Takes a datagram of `count` bytes that was read into `scratch`. Returns why it is dropped, if it is.
    fn take_datagram<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        clock: &dyn Fn() -> u64,
        (scratch, count): (&mut [u8], usize),
    ) -> Option<DropReason> {
        let entry = &mut self.clients[client as usize];
        let pool = &mut self.pools[entry.backend as usize];
        let mut assembly = Assembly::default();
        let (place, payload) = match pool.classify(&mut entry.datagram, &scratch[..count]) {
            Answer::Useless(reason) => return Some(reason),
            Answer::Part => return None,
            Answer::Whole(place, from) => (place, Some(&scratch[from..count])),
            Answer::Assembled => {
                std::mem::swap(&mut assembly, &mut entry.datagram.assembly);
                (0, Some(assembly.whole(scratch)))
            }
            Answer::TooLong => (0, None),
        };
        let mut values = std::mem::take(&mut entry.datagram.values);
        let is_value = pool.is_framed()
            && payload.is_some_and(|part| bytes_left(part) == Some(0))
            && !mutants::on("first_value_of_backend");
        let payload = match payload {
            Some(part) if is_value || !values.is_empty() => {
                let fits = part.len() <= pool.max_message_bytes.saturating_sub(values.len());
                values.extend_from_slice(if fits { part } else { b"" });
                fits.then_some(&values[..])
            }
            payload => payload,
        };
        if is_value && payload.is_some() {
            // Another one follows, or the end.
            assembly.clear();
            (entry.datagram.values, entry.datagram.assembly) = (values, assembly);
            entry.datagram.value_count += 1;
            // A server that sends more of them than the request has words sends them without end.
            let words = entry.datagram.mark.split(|byte| *byte == b' ').count();
            let is_useless = entry.datagram.value_count > words;
            return is_useless.then_some(DropReason::BackendMismatch);
        }
        let judged = match payload {
            None => Err(DropReason::BackendTooLong),
            Some(payload) => pool.check_response(&entry.datagram.mark, payload),
        };
        if judged == Err(DropReason::BackendMismatch) {
            return judged.err();
        }
        let asked = entry.datagram.asked.remove(place).expect("understood");
        if pool.per_request {
            pool.close_datagrams(nic, entry);
        }
        let request = (client, asked.number, asked.tag);
        match judged {
            Ok(()) => {
                self.gather_answer(request, payload.unwrap_or_default(), clock);
                self.show_answers(usize::from(self.clients[client as usize].backend), clock);
            }
            Err(reason) => {
                self.counters.drop_one(reason);
                let too_long = reason == DropReason::BackendTooLong;
                self.fail_sent(request, if too_long { status::TOO_LONG } else { status::PROTOCOL });
            }
        }
        let socket = &mut self.clients[client as usize].datagram;
        (socket.assembly, socket.values) = (assembly, values);
        socket.assembly.clear();
        socket.values.clear();
        None
    }

    /// A client mqueue's datagram socket failed (the backend's host reported: connection refused).
    pub(crate) fn fail_datagram_backend<N: Nic>(&mut self, nic: &mut N, client: u32) {
        let entry = &mut self.clients[client as usize];
        if !entry.datagram.open {
            return;
        }
        let asked = std::mem::take(&mut entry.datagram.asked);
        self.pools[entry.backend as usize].close_datagrams(nic, entry);
        self.counters.backend_failures.one();
        for asked in &asked {
            self.fail_sent((client, asked.number, asked.tag), status::REFUSED);
        }
        // Its memory is reused.
        self.clients[client as usize].datagram.asked = asked;
        self.clients[client as usize].datagram.asked.clear();
    }

    /// Times out requests.
    pub(super) fn expire_datagrams<N: Nic>(&mut self, nic: &mut N, now_ns: u64) {
        for client in 0..self.clients.len() {
            // Deadlines are in order.
            loop {
                let entry = &mut self.clients[client];
                let due = |asked: &&InFlight| asked.deadline_ns <= now_ns;
                let Some(asked) = entry.datagram.asked.front().filter(due).copied() else { break };
                let pool = &mut self.pools[entry.backend as usize];
                if pool.per_request || !pool.recognizes_late_answers() {
                    pool.close_datagrams(nic, entry);
                }
                entry.datagram.asked.pop_front();
                self.counters.backend_timeouts.one();
                self.fail_sent((client as u32, asked.number, asked.tag), status::TIMEOUT);
            }
        }
    }
}
