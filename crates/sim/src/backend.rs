//! The model backend: a server that answers kernels, correctly or not.

use std::collections::VecDeque;

use wire::framing::{Framing, ParseState, Parsed};
use wire::nic::{Close, Transport};

use crate::conn::ConnId;
use crate::fault::Fault;
use crate::message::{answer_payload, decode_request, request_wire};
use crate::net::{Door, Network, PeerRead};
use crate::rng::Rng;

/// Behaviour of a backend. Rates are per mille of the requests, except for `change_door`.
#[derive(Clone, Copy, Debug)]
pub struct BackendHabits {
    /// Shortest and longest time an answer takes.
    pub delay_ns: (u64, u64),
    /// An answer takes this much longer.
    pub late: u32,
    /// See `late`.
    pub late_ns: u64,
    /// TCP: never answers on this connection again. UDP: does not answer.
    pub hang: u32,
    /// Closes the connection instead of answering.
    pub close: u32,
    /// Closes the connection inside the answer.
    pub cut: u32,
    /// Answers with data that is not an answer.
    pub garbage: u32,
    /// Sends its answer twice.
    pub unasked: u32,
    /// Answers with its previous answer.
    pub swap: u32,
    /// Answers with more than fits.
    pub too_long: u32,
    /// At each step, the address may refuse or ignore new connections for a while.
    pub change_door: u32,
}

impl BackendHabits {
    /// Answers immediately and correctly.
    pub const SOUND: Self = Self {
        delay_ns: (0, 0),
        late: 0,
        late_ns: 0,
        hang: 0,
        close: 0,
        cut: 0,
        garbage: 0,
        unasked: 0,
        swap: 0,
        too_long: 0,
        change_door: 0,
    };

    /// Whether all its answers are correct.
    pub fn is_honest(&self) -> bool {
        self.garbage == 0 && self.unasked == 0 && self.swap == 0 && self.too_long == 0
    }
}

#[derive(Debug)]
struct Guest {
    conn: ConnId,
    input: Vec<u8>,
    parser: ParseState,
    answers: VecDeque<(u64, Vec<u8>)>,
    /// Its previous answer.
    last: Option<Vec<u8>>,
    output: Vec<u8>,
    /// Closes after this many more bytes.
    cut_after: Option<usize>,
    hung: bool,
    over: bool,
}

/// One backend. See the module's text.
#[derive(Debug)]
pub struct Backend {
    /// Its index in the network.
    pub site: usize,
    transport: Transport,
    framing: Framing,
    max_message_bytes: usize,
    /// What it does.
    pub habits: BackendHabits,
    /// Its kernels may also overwrite their requests.
    tolerates_garbage: bool,
    rng: Rng,
    guests: Vec<Guest>,
    door: Door,
}

impl Backend {
    /// A backend at address number `site` of the network.
    pub fn new(
        site: usize,
        spec: &engine::topology::Backend,
        habits: BackendHabits,
        rng: Rng,
    ) -> Self {
        Self {
            site,
            transport: spec.transport,
            framing: spec.framing,
            max_message_bytes: spec.max_message_bytes as usize,
            habits,
            tolerates_garbage: false,
            rng,
            guests: Vec::new(),
            door: Door::Open { after_ns: 0 },
        }
    }

    /// From now on requests may be invalid; they are not answered.
    pub fn tolerate_garbage(&mut self) {
        self.tolerates_garbage = true;
    }

    /// Closes its connections.
    pub fn hang_up(&mut self, net: &mut Network) {
        for guest in self.guests.drain(..) {
            net.peer_close(guest.conn, Close::Graceful);
        }
    }

    /// When the next answer is due.
    pub fn due_ns(&self) -> u64 {
        let first = |guest: &Guest| match guest.answers.front() {
            _ if !guest.output.is_empty() => Some(0),
            Some((due_ns, _)) if !guest.hung => Some(*due_ns),
            _ => None,
        };
        self.guests.iter().filter_map(first).min().unwrap_or(u64::MAX)
    }

    /// Reads questions and sends the answers that are due.
    pub fn step(&mut self, net: &mut Network) {
        if self.rng.chance(self.habits.change_door) {
            self.door = match self.rng.below(6) {
                0 => Door::Refused { after_ns: self.rng.between(1_000, 2_000_000) },
                1 => Door::Silent,
                2 => Door::Unreachable,
                _ => Door::Open { after_ns: self.rng.between(1_000, 2_000_000) },
            };
            if !matches!(self.door, Door::Open { .. }) {
                net.struck.one(Fault::BackendDoor);
            }
            net.set_door(self.site, self.door);
        }
        while let Some(conn) = net.take_arrived(self.site) {
            self.guests.push(Guest {
                conn,
                input: Vec::new(),
                parser: ParseState::default(),
                answers: VecDeque::new(),
                last: None,
                output: Vec::new(),
                cut_after: None,
                hung: false,
                over: false,
            });
        }
        for number in 0..self.guests.len() {
            if !self.guests[number].over {
                self.read(net, number);
                self.write(net, number);
            }
        }
        self.guests.retain(|guest| !guest.over);
    }

    fn read(&mut self, net: &mut Network, number: usize) {
        loop {
            let guest = &mut self.guests[number];
            match net.peer_read(guest.conn, 4096) {
                PeerRead::Bytes(bytes) if self.transport == Transport::Udp => {
                    if self.framing != Framing::Memcached {
                        self.answer(net, number, &bytes, None);
                        continue;
                    }
                    // The rest after the frame header of one datagram is the whole message.
                    match bytes.split_first_chunk() {
                        Some(([high, low, 0, 0, 0, 1, 0, 0], question)) => {
                            self.answer(net, number, question, Some([*high, *low]));
                        }
                        _ => net.ledger.violate(|| format!("no frame header: {bytes:02x?}")),
                    }
                }
                PeerRead::Bytes(bytes) => {
                    guest.input.extend(bytes);
                    self.parse(net, number);
                }
                PeerRead::Empty => return,
                PeerRead::Closed | PeerRead::Broken => {
                    net.peer_close(guest.conn, Close::Graceful);
                    guest.over = true;
                    return;
                }
            }
        }
    }

    fn parse(&mut self, net: &mut Network, number: usize) {
        loop {
            let (framing, max) = (self.framing, self.max_message_bytes);
            let guest = &mut self.guests[number];
            if guest.over {
                return;
            }
            match framing.parse_request(&mut guest.parser, &guest.input, max) {
                Ok(Parsed::Message { consumed, start, end, .. }) => {
                    let question = guest.input[start..end].to_vec();
                    guest.input.drain(..consumed);
                    self.answer(net, number, &question, None);
                }
                Ok(Parsed::Incomplete { .. }) => return,
                other => {
                    // Whatever a kernel writes, the engine sends only valid messages of the framing.
                    return net.ledger.violate(|| format!("a backend was sent garbage: {other:?}"));
                }
            }
        }
    }

    /// Answers a request; `frame` is the id in its frame header, if it has one.
    fn answer(
        &mut self,
        net: &mut Network,
        number: usize,
        question: &[u8],
        frame: Option<[u8; 2]>,
    ) {
        let Some((body, _)) = decode_request(self.framing, question) else {
            if !self.tolerates_garbage {
                net.ledger.violate(|| format!("a backend was asked garbage: {question:02x?}"));
            }
            return;
        };
        let habits = self.habits;
        let udp = self.transport == Transport::Udp;
        let guest = &mut self.guests[number];
        if net.struck.strikes(&mut self.rng, Fault::BackendHang, habits.hang) {
            guest.hung |= !udp;
            return;
        }
        if !udp && net.struck.strikes(&mut self.rng, Fault::BackendClose, habits.close) {
            let how = self.rng.pick(&[Close::Graceful, Close::Reset]);
            net.peer_close(guest.conn, how);
            guest.over = true;
            return;
        }
        let mut due_ns = net.now_ns() + self.rng.between(habits.delay_ns.0, habits.delay_ns.1);
        if net.struck.strikes(&mut self.rng, Fault::BackendLate, habits.late) {
            due_ns += habits.late_ns;
        }
        let mut payload = answer_payload(self.framing, question, &body);
        let before = guest.last.replace(payload.clone());
        if let Some(before) = before
            && net.struck.strikes(&mut self.rng, Fault::BackendSwap, habits.swap)
        {
            payload = before;
        }
        let in_line = guest.answers.back().map_or(0, |(due_ns, _)| *due_ns);
        let due_ns = if udp { due_ns } else { due_ns.max(in_line) };
        let pieces = if frame.is_some() { self.rng.between(1, 3) as usize } else { 1 };
        let reversed = self.rng.chance(if pieces > 1 { 200 } else { 0 });
        let mut say = |payload: &[u8]| {
            let mut messages = match frame {
                None if udp => vec![payload.to_vec()],
                None => vec![respond(self.framing, payload)],
                Some(id) => frames(id, payload, pieces),
            };
            if reversed {
                messages.reverse();
            }
            guest.answers.extend(messages.into_iter().map(|bytes| (due_ns, bytes)));
        };
        if net.struck.strikes(&mut self.rng, Fault::BackendUnasked, habits.unasked) {
            say(&payload);
        }
        match () {
            () if net.struck.strikes(&mut self.rng, Fault::BackendGarbage, habits.garbage) => {
                let garbage =
                    [self.rng.draw().to_le_bytes(), *b"\xff\xff\xff\xff\xff\xff\r\n"].concat();
                guest.answers.push_back((due_ns, garbage));
            }
            () if net.struck.strikes(&mut self.rng, Fault::BackendLong, habits.too_long) => {
                say(&vec![b'0'; self.max_message_bytes + 40])
            }
            () => say(&payload),
        }
    }

    fn write(&mut self, net: &mut Network, number: usize) {
        let guest = &mut self.guests[number];
        while let Some((due_ns, bytes)) = guest.answers.pop_front() {
            if due_ns > net.now_ns() || guest.hung {
                guest.answers.push_front((due_ns, bytes));
                break;
            }
            if self.transport == Transport::Udp {
                net.peer_write(guest.conn, &bytes);
            } else {
                let cut = net.struck.strikes(&mut self.rng, Fault::BackendCut, self.habits.cut);
                if cut && guest.cut_after.is_none() {
                    let part = self.rng.between(1, bytes.len().max(2) as u64 - 1) as usize;
                    guest.cut_after = Some(guest.output.len() + part);
                }
                guest.output.extend(bytes);
            }
        }
        if !guest.output.is_empty() {
            let most = self.rng.between(1, guest.output.len() as u64) as usize;
            let most = most.min(guest.cut_after.unwrap_or(most));
            let count = net.peer_write(guest.conn, &guest.output[..most]);
            guest.output.drain(..count);
            if let Some(left) = &mut guest.cut_after {
                *left -= count;
                if *left == 0 {
                    let how = self.rng.pick(&[Close::Graceful, Close::Reset]);
                    net.peer_close(guest.conn, how);
                    guest.over = true;
                }
            }
        }
    }
}

/// A response in several datagrams, each with a frame header.
fn frames(id: [u8; 2], payload: &[u8], pieces: usize) -> Vec<Vec<u8>> {
    let each = payload.len().div_ceil(pieces).max(1);
    let total = payload.len().div_ceil(each) as u16;
    let header =
        |sequence: u16| [&id[..], &sequence.to_be_bytes(), &total.to_be_bytes(), &[0, 0]].concat();
    let chunks = payload.chunks(each).zip(0..);
    chunks.map(|(chunk, sequence)| [&header(sequence), chunk].concat()).collect()
}

/// A response on the wire of a stream.
fn respond(framing: Framing, payload: &[u8]) -> Vec<u8> {
    match framing {
        Framing::Line | Framing::LineCrLf => [payload, b"\r\n"].concat(),
        // Length prefixes are the same in both directions, and so is no framing.
        _ => request_wire(framing, payload),
    }
}
