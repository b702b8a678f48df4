//! The model backend: a server that answers kernels, correctly or not.

use std::collections::VecDeque;

use wire::framing::{Framing, ParseState, Parsed};
use wire::nic::{Close, Transport};

use crate::conn::ConnId;
use crate::fault::Fault;
use crate::message::{answer_payload, decode_request, request_wire};
use crate::net::{Network, PeerRead, Reachability};
use crate::rng::Rng;

/// Behaviour of a backend. Rates are per mille of the requests, except for `change_reachability`.
#[derive(Clone, Copy, Debug)]
pub struct BackendBehaviour {
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
    pub change_reachability: u32,
}

impl BackendBehaviour {
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
        change_reachability: 0,
    };

    /// Whether all its answers are correct.
    pub fn is_honest(&self) -> bool {
        self.garbage == 0 && self.unasked == 0 && self.swap == 0 && self.too_long == 0
    }
}

#[derive(Debug)]
struct Connection {
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
    pub behaviour: BackendBehaviour,
    /// Its kernels may also overwrite their requests.
    tolerates_garbage: bool,
    rng: Rng,
    connections: Vec<Connection>,
    reachability: Reachability,
}

impl Backend {
    /// A backend at address number `site` of the network.
    pub fn new(
        site: usize,
        spec: &engine::topology::Backend,
        behaviour: BackendBehaviour,
        rng: Rng,
    ) -> Self {
        Self {
            site,
            transport: spec.transport,
            framing: spec.framing,
            max_message_bytes: spec.max_message_bytes as usize,
            behaviour,
            tolerates_garbage: false,
            rng,
            connections: Vec::new(),
            reachability: Reachability::Open { after_ns: 0 },
        }
    }

    /// From now on requests may be invalid; they are not answered.
    pub fn tolerate_garbage(&mut self) {
        self.tolerates_garbage = true;
    }

    /// Closes its connections.
    pub fn hang_up(&mut self, net: &mut Network) {
        for connection in self.connections.drain(..) {
            net.peer_close(connection.conn, Close::Graceful);
        }
    }

    /// When the next answer is due.
    pub fn due_ns(&self) -> u64 {
        let first = |connection: &Connection| match connection.answers.front() {
            _ if !connection.output.is_empty() => Some(0),
            Some((due_ns, _)) if !connection.hung => Some(*due_ns),
            _ => None,
        };
        self.connections.iter().filter_map(first).min().unwrap_or(u64::MAX)
    }

    /// Reads questions and sends the answers that are due.
    pub fn step(&mut self, net: &mut Network) {
        if self.rng.chance(self.behaviour.change_reachability) {
            self.reachability = match self.rng.below(6) {
                0 => Reachability::Refused { after_ns: self.rng.between(1_000, 2_000_000) },
                1 => Reachability::Silent,
                2 => Reachability::Unreachable,
                _ => Reachability::Open { after_ns: self.rng.between(1_000, 2_000_000) },
            };
            if !matches!(self.reachability, Reachability::Open { .. }) {
                net.fault_counts.one(Fault::BackendDoor);
            }
            net.set_reachability(self.site, self.reachability);
        }
        while let Some(conn) = net.take_arrived(self.site) {
            self.connections.push(Connection {
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
        for number in 0..self.connections.len() {
            if !self.connections[number].over {
                self.read(net, number);
                self.write(net, number);
            }
        }
        self.connections.retain(|connection| !connection.over);
    }

    fn read(&mut self, net: &mut Network, number: usize) {
        loop {
            let connection = &mut self.connections[number];
            match net.peer_read(connection.conn, 4096) {
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
                    connection.input.extend(bytes);
                    self.parse(net, number);
                }
                PeerRead::Empty => return,
                PeerRead::Closed | PeerRead::Broken => {
                    net.peer_close(connection.conn, Close::Graceful);
                    connection.over = true;
                    return;
                }
            }
        }
    }

    fn parse(&mut self, net: &mut Network, number: usize) {
        loop {
            let (framing, max) = (self.framing, self.max_message_bytes);
            let connection = &mut self.connections[number];
            if connection.over {
                return;
            }
            match framing.parse_request(&mut connection.parser, &connection.input, max) {
                Ok(Parsed::Message { consumed, start, end, .. }) => {
                    let question = connection.input[start..end].to_vec();
                    connection.input.drain(..consumed);
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
        let behaviour = self.behaviour;
        let udp = self.transport == Transport::Udp;
        let connection = &mut self.connections[number];
        if net.fault_counts.occurs(&mut self.rng, Fault::BackendHang, behaviour.hang) {
            connection.hung |= !udp;
            return;
        }
        if !udp && net.fault_counts.occurs(&mut self.rng, Fault::BackendClose, behaviour.close) {
            let how = self.rng.pick(&[Close::Graceful, Close::Reset]);
            net.peer_close(connection.conn, how);
            connection.over = true;
            return;
        }
        let mut due_ns =
            net.now_ns() + self.rng.between(behaviour.delay_ns.0, behaviour.delay_ns.1);
        if net.fault_counts.occurs(&mut self.rng, Fault::BackendLate, behaviour.late) {
            due_ns += behaviour.late_ns;
        }
        let mut payload = answer_payload(self.framing, question, &body);
        let before = connection.last.replace(payload.clone());
        if let Some(before) = before
            && net.fault_counts.occurs(&mut self.rng, Fault::BackendSwap, behaviour.swap)
        {
            payload = before;
        }
        let in_line = connection.answers.back().map_or(0, |(due_ns, _)| *due_ns);
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
            connection.answers.extend(messages.into_iter().map(|bytes| (due_ns, bytes)));
        };
        if net.fault_counts.occurs(&mut self.rng, Fault::BackendUnasked, behaviour.unasked) {
            say(&payload);
        }
        match () {
            () if net.fault_counts.occurs(
                &mut self.rng,
                Fault::BackendGarbage,
                behaviour.garbage,
            ) =>
            {
                let garbage =
                    [self.rng.draw().to_le_bytes(), *b"\xff\xff\xff\xff\xff\xff\r\n"].concat();
                connection.answers.push_back((due_ns, garbage));
            }
            () if net.fault_counts.occurs(
                &mut self.rng,
                Fault::BackendLong,
                behaviour.too_long,
            ) =>
            {
                say(&vec![b'0'; self.max_message_bytes + 40])
            }
            () => say(&payload),
        }
    }

    fn write(&mut self, net: &mut Network, number: usize) {
        let connection = &mut self.connections[number];
        while let Some((due_ns, bytes)) = connection.answers.pop_front() {
            if due_ns > net.now_ns() || connection.hung {
                connection.answers.push_front((due_ns, bytes));
                break;
            }
            if self.transport == Transport::Udp {
                net.peer_write(connection.conn, &bytes);
            } else {
                let cut =
                    net.fault_counts.occurs(&mut self.rng, Fault::BackendCut, self.behaviour.cut);
                if cut && connection.cut_after.is_none() {
                    let part = self.rng.between(1, bytes.len().max(2) as u64 - 1) as usize;
                    connection.cut_after = Some(connection.output.len() + part);
                }
                connection.output.extend(bytes);
            }
        }
        if !connection.output.is_empty() {
            let most = self.rng.between(1, connection.output.len() as u64) as usize;
            let most = most.min(connection.cut_after.unwrap_or(most));
            let count = net.peer_write(connection.conn, &connection.output[..most]);
            connection.output.drain(..count);
            if let Some(left) = &mut connection.cut_after {
                *left -= count;
                if *left == 0 {
                    let how = self.rng.pick(&[Close::Graceful, Close::Reset]);
                    net.peer_close(connection.conn, how);
                    connection.over = true;
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
