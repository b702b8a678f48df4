//! Model clients over TCP: they pipeline, read slowly, stop in the middle, send invalid data, and know
//! exactly which replies they are owed, in which order.
//!
//! A client opens one connection after the other; each has a client number of its own. The promises to a
//! connection are checked as its bytes arrive:
//!
//! * every reply is the one correct reply to a request that is still owed one;
//! * with ordered replies, none is skipped: a lost request is reported by the protocol or
//!   ends the connection, it never leaves a gap;
//! * an orderly end never truncates a reply;
//! * a `raw` stream returns the sent bytes, as far as it goes.

use std::collections::VecDeque;
use std::net::SocketAddr;

use wire::error_reply::ErrorReply;
use wire::framing::Framing;
use wire::nic::{Close, PortIndex};

use crate::client::RequestMix;
use crate::conn::ConnId;
use crate::conn::client_address;
use crate::fault::Fault;
use crate::message::{
    Ask, Body, Flavor, FromStream, ReplyStream, decode_reply, request_payload, request_wire,
};
use crate::net::{Network, PeerRead};
use crate::rng::Rng;

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The client closes its side after the last request and reads the rest.
    Polite,
    /// It stays until the engine closes.
    Stay,
    /// It resets the connection while requests are in flight.
    Reset,
    /// It closes everything while requests are in flight.
    Vanish,
    /// It breaks the framing after the last request.
    Nonsense,
    /// It sends `quit` (memcached; else as `Polite`).
    Quit,
    /// It closes its sending side in the middle of a request.
    Cut,
}

const ENDINGS: [Ending; 7] = [
    Ending::Polite,
    Ending::Stay,
    Ending::Reset,
    Ending::Vanish,
    Ending::Nonsense,
    Ending::Quit,
    Ending::Cut,
];

impl Ending {
    /// The corresponding kind of fault, if any.
    fn fault(self) -> Option<Fault> {
        match self {
            Self::Stay | Self::Quit => None,
            Self::Polite => Some(Fault::HalfClose),
            Self::Reset => Some(Fault::Reset),
            Self::Vanish => Some(Fault::Vanish),
            Self::Nonsense => Some(Fault::Nonsense),
            Self::Cut => Some(Fault::Cut),
        }
    }
}

/// The set of endings a client may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endings(u8);

impl Endings {
    /// All of them.
    pub const ALL: Self = Self(0x7f);
    /// Those without losses.
    pub const GENTLE: Self = Self(0b11);

    /// All of these but one, which becomes [`Ending::Stay`].
    pub fn without(self, fault: Fault) -> Self {
        let spared = ENDINGS.iter().filter(|ending| ending.fault() == Some(fault));
        Self(spared.fold(self.0, |left, ending| left & !(1 << *ending as u8)))
    }

    /// Whether it contains endings with losses.
    pub fn are_rough(self) -> bool {
        self.0 & !Self::GENTLE.0 != 0
    }

    fn draw(self, rng: &mut Rng) -> Ending {
        let drawn = rng.pick(&ENDINGS[..if self.are_rough() { ENDINGS.len() } else { 2 }]);
        if self.0 & 1 << drawn as u8 == 0 { Ending::Stay } else { drawn }
    }
}

/// What a client expects at one position in the order of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// A reply, or an error report.
    Reply(Body),
    /// The same, or nothing.
    Maybe(Body),
    /// An error report.
    Error,
}

/// Behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub struct StreamBehaviour {
    /// Maximum number of requests without a reply.
    pub pipeline: usize,
    /// Most bytes of one write.
    pub write_max: usize,
    /// Most bytes of one read; 0: it never reads.
    pub read_max: usize,
    /// Shortest and longest time between two steps.
    pub pause_ns: (u64, u64),
    /// Rate per mille of commands that the protocol refuses (memcached).
    pub bogus: u32,
    /// How its connections may end.
    pub endings: Endings,
}

/// A client's connection.
#[derive(Debug)]
struct Connection {
    conn: ConnId,
    id: u32,
    ending: Ending,
    left: u32,
    sequence: u32,
    expected: VecDeque<Expected>,
    /// Error reports not yet matched to a position.
    errors: usize,
    output: Vec<u8>,
    input: ReplyStream,
    /// `raw`: what was sent, and how much of it was returned.
    sent: Vec<u8>,
    returned: usize,
    ended_own_side: bool,
    replies: u64,
}

/// A client over TCP. See the module's text.
#[derive(Debug)]
pub struct StreamClient {
    /// The service it talks to.
    pub service: usize,
    /// The port of that service.
    pub port: PortIndex,
    /// Its request mix.
    pub request_mix: RequestMix,
    /// Its behaviour.
    pub behaviour: StreamBehaviour,
    /// Whether replies keep the order of requests.
    pub ordered: bool,
    /// Whether the service replies.
    pub replies: bool,
    /// Whether the content of replies is checked.
    pub judged: bool,
    /// Connections still to open.
    pub connections: u32,
    /// Requests of each connection.
    pub requests: u32,
    /// Time of its next action.
    pub next_ns: u64,
    /// Its randomness.
    pub rng: Rng,
    /// Replies received.
    pub received: u64,
    /// Connections that the engine ended while replies were owed.
    pub unanswered: u64,
    connection: Option<Connection>,
}

impl StreamClient {
    /// A client that has not connected yet.
    pub fn new(
        service: usize,
        port: PortIndex,
        request_mix: RequestMix,
        behaviour: StreamBehaviour,
        rng: Rng,
    ) -> Self {
        Self {
            service,
            port,
            request_mix,
            behaviour,
            ordered: true,
            replies: true,
            judged: true,
            connections: 1,
            requests: 10,
            next_ns: 0,
            rng,
            received: 0,
            unanswered: 0,
            connection: None,
        }
    }

    /// Time of the client's next action.
    pub fn due_ns(&self) -> u64 {
        if self.connection.is_some() || self.connections > 0 { self.next_ns } else { u64::MAX }
    }

    /// Whether it has requests to send.
    pub fn has_more(&self) -> bool {
        self.connections > 0
            || self.connection.as_ref().is_some_and(|l| l.left > 0 || !l.output.is_empty())
    }

    /// Stops new requests; started ones are finished.
    pub fn stop_requests(&mut self) {
        self.connections = 0;
        if let Some(connection) = &mut self.connection {
            connection.left = 0;
        }
    }

    /// Resets its connection and opens no other.
    pub fn leave(&mut self, net: &mut Network) {
        self.connections = 0;
        if let Some(connection) = self.connection.take() {
            net.peer_close(connection.conn, Close::Reset);
        }
    }

    /// Whether it sent everything and got every answer.
    pub fn is_answered(&self) -> bool {
        let answered = |l: &Connection| {
            l.expected.is_empty() && l.returned == l.sent.len() && l.output.is_empty()
        };
        self.unanswered == 0 && !self.has_more() && self.connection.as_ref().is_none_or(answered)
    }

    /// Positions in the order of replies that are still open.
    pub fn owed(&self) -> usize {
        let owed = |e: &&Expected| !matches!(e, Expected::Maybe(_));
        self.connection.as_ref().map_or(0, |l| l.expected.iter().filter(owed).count())
    }

    /// Acts on the connection if it is time.
    pub fn step(&mut self, net: &mut Network, next_id: &mut u32) {
        if self.next_ns > net.now_ns() || self.due_ns() == u64::MAX {
            return;
        }
        self.next_ns =
            net.now_ns() + self.rng.between(self.behaviour.pause_ns.0, self.behaviour.pause_ns.1);
        let Some(mut connection) = self.connection.take() else {
            return self.connect(net, next_id);
        };
        self.compose(net, &mut connection);
        self.write(net, &mut connection);
        let goes_on = self.read(net, &mut connection) && self.apply_ending(net, &mut connection);
        if goes_on {
            self.connection = Some(connection);
        }
    }

    fn connect(&mut self, net: &mut Network, next_id: &mut u32) {
        self.connections -= 1;
        let id = *next_id;
        *next_id += 1;
        let peer: SocketAddr = client_address(id);
        let ending = self.behaviour.endings.draw(&mut self.rng);
        self.count_behaviour(net);
        self.connection = Some(Connection {
            conn: net.connect(peer, self.port),
            id,
            ending,
            left: self.requests,
            sequence: 0,
            expected: VecDeque::new(),
            errors: 0,
            output: Vec::new(),
            input: ReplyStream::default(),
            sent: Vec::new(),
            returned: 0,
            ended_own_side: false,
            replies: 0,
        });
    }

    /// Counts the client's continuous faults.
    fn count_behaviour(&self, net: &mut Network) {
        if self.behaviour.write_max == 1 || self.behaviour.read_max == 1 {
            net.fault_counts.one(Fault::Bytewise);
        }
        if self.behaviour.read_max == 0 {
            net.fault_counts.one(Fault::Deaf);
        }
    }

    fn compose(&mut self, net: &mut Network, connection: &mut Connection) {
        let framing = self.request_mix.framing;
        // Requests of one length can go as bundles.
        let is_alike = self.rng.chance(500);
        let mut alike = None;
        while connection.left > 0
            && connection.output.len() < 4 * self.behaviour.write_max.max(1024)
        {
            let raw_open = (connection.sent.len() - connection.returned) / 64;
            if connection.expected.len().max(raw_open) >= self.behaviour.pipeline {
                return;
            }
            connection.left -= 1;
            if framing == Framing::Memcached
                && net.fault_counts.occurs(&mut self.rng, Fault::Bogus, self.behaviour.bogus)
            {
                connection.output.extend(self.rng.pick(&[&b"bogus 1\r\n"[..], b"\r\n", b"get\n"]));
                connection.expected.push_back(Expected::Error);
                continue;
            }
            let (mut body, flavor) =
                self.request_mix.request(&mut self.rng, connection.id, connection.sequence);
            if is_alike && flavor == Flavor::Plain {
                (body.filler, body.want) = *alike.get_or_insert((body.filler, body.want));
            }
            connection.sequence += 1;
            if body.ask == Ask::Unframable {
                net.fault_counts.one(Fault::Unframable);
            }
            net.ledger.ask(self.service, body, None);
            let wire = request_wire(framing, &request_payload(framing, &body, flavor));
            connection.output.extend(&wire);
            match flavor {
                _ if framing == Framing::Raw => connection.sent.extend(&wire),
                _ if !self.replies => {}
                Flavor::Plain => connection.expected.push_back(Expected::Reply(body)),
                Flavor::Quiet => connection.expected.push_back(Expected::Maybe(body)),
                Flavor::Silent => {}
            }
        }
    }

    fn write(&mut self, net: &mut Network, connection: &mut Connection) {
        if connection.output.is_empty() || self.behaviour.write_max == 0 {
            return;
        }
        let most = connection.output.len().min(self.behaviour.write_max) as u64;
        let most = self.rng.between(1, most) as usize;
        let count = net.peer_write(connection.conn, &connection.output[..most]);
        connection.output.drain(..count);
    }

    /// Reads once; false if the connection is over.
    fn read(&mut self, net: &mut Network, connection: &mut Connection) -> bool {
        if self.behaviour.read_max == 0 {
            // It still notices a reset.
            return !net.is_over(connection.conn);
        }
        let most = self.rng.between(1, self.behaviour.read_max as u64) as usize;
        match net.peer_read(connection.conn, most) {
            PeerRead::Bytes(bytes) => {
                self.take(net, connection, &bytes);
                true
            }
            PeerRead::Empty => true,
            PeerRead::Closed => {
                let left = connection.input.left();
                if left > 0 && self.judged {
                    let id = connection.id;
                    net.ledger.violate(|| {
                        format!("client {id}: the connection ends in order inside a reply ({left})")
                    });
                }
                net.peer_close(connection.conn, Close::Graceful);
                self.part(connection);
                false
            }
            PeerRead::Broken => {
                self.part(connection);
                false
            }
        }
    }

    /// The engine ended the connection.
    fn part(&mut self, connection: &Connection) {
        let owed = |e: &&Expected| !matches!(e, Expected::Maybe(_));
        if connection.expected.iter().any(|e| owed(&e))
            || connection.returned < connection.sent.len()
        {
            self.unanswered += 1;
        }
    }

    fn take(&mut self, net: &mut Network, connection: &mut Connection, bytes: &[u8]) {
        if !self.judged {
            return;
        }
        if self.request_mix.framing == Framing::Raw {
            let expected =
                connection.sent.get(connection.returned..connection.returned + bytes.len());
            if expected != Some(bytes) {
                let id = connection.id;
                net.ledger.violate(|| format!("client {id}: the stream returns other bytes"));
            }
            connection.returned += bytes.len();
            return;
        }
        connection.input.push(bytes);
        while let Some(what) = connection.input.next(self.request_mix.framing) {
            let reply = match what {
                FromStream::Error => None,
                FromStream::Reply(payload) => {
                    let reply = decode_reply(self.request_mix.framing, payload);
                    Some(reply.ok_or_else(|| format!("a garbled reply {payload:02x?}")))
                }
            };
            if let Err(wrong) = self.accept(connection, reply) {
                let (id, service) = (connection.id, self.service);
                net.ledger.violate(|| format!("client {id} of service {service}: {wrong}"));
            }
        }
    }

    /// Matches a reply, or an error report (`None`), to its position.
    fn accept(
        &mut self,
        connection: &mut Connection,
        reply: Option<Result<Body, String>>,
    ) -> Result<(), String> {
        let Some(reply) = reply else {
            connection.errors += 1;
            if connection.errors > connection.expected.len() {
                return Err("an error report for no request".into());
            }
            self.settle_errors(connection);
            return Ok(());
        };
        self.received += 1;
        connection.replies += 1;
        let reply = reply?;
        let answers = |e: &Expected| match e {
            Expected::Reply(body) | Expected::Maybe(body) => body.reply() == reply,
            Expected::Error => false,
        };
        let place = connection.expected.iter().position(answers);
        let place = place.ok_or_else(|| {
            format!("{reply:?} is not owed; expected {:?}", connection.expected.front())
        })?;
        if !self.ordered {
            connection.expected.remove(place);
            return Ok(());
        }
        // Earlier positions are reported lost, or were optional.
        let before = connection.expected.drain(..=place).take(place);
        let (mut owed, mut optional) = (0, 0);
        for expected in before {
            match expected {
                Expected::Maybe(_) => optional += 1,
                _ => owed += 1,
            }
        }
        let errors = std::mem::take(&mut connection.errors);
        if errors < owed || errors > owed + optional {
            return Err(format!(
                "{reply:?} passes {owed} that are owed and {optional} optional replies, with {errors} \
                 error reports"
            ));
        }
        Ok(())
    }

    /// Without optional replies an error report has one possible position: the first.
    fn settle_errors(&self, connection: &mut Connection) {
        while connection.errors > 0
            && self.ordered
            && matches!(connection.expected.front(), Some(Expected::Reply(_) | Expected::Error))
        {
            connection.expected.pop_front();
            connection.errors -= 1;
        }
        if !self.ordered && connection.errors == connection.expected.len() {
            connection.expected.clear();
            connection.errors = 0;
        }
    }

    /// Applies the planned ending; false if the connection is over for the client.
    fn apply_ending(&mut self, net: &mut Network, connection: &mut Connection) -> bool {
        let done = connection.left == 0 && connection.output.is_empty();
        let comes = done && !connection.ended_own_side;
        let fault = connection.ending.fault();
        match connection.ending {
            Ending::Reset | Ending::Vanish if done || self.rng.chance(20) => {
                net.fault_counts.one(fault.expect("it is one"));
                let how =
                    if connection.ending == Ending::Reset { Close::Reset } else { Close::Graceful };
                net.peer_close(connection.conn, how);
                return false;
            }
            _ if !comes => {}
            Ending::Polite => self.end_own_side(net, connection),
            Ending::Quit if self.request_mix.framing == Framing::Memcached => {
                connection.ended_own_side = true;
                connection.output.extend(b"quit\r\n");
            }
            Ending::Quit => self.end_own_side(net, connection),
            Ending::Nonsense => self.break_framing(net, connection),
            Ending::Cut => {
                let (body, flavor) =
                    self.request_mix.request(&mut self.rng, connection.id, connection.sequence);
                let framing = self.request_mix.framing;
                let wire = request_wire(framing, &request_payload(framing, &body, flavor));
                if framing != Framing::Raw {
                    net.peer_write(connection.conn, &wire[..wire.len() / 2]);
                }
                self.end_own_side(net, connection);
            }
            Ending::Stay | Ending::Reset | Ending::Vanish => {}
        }
        if let Some(fault) = fault.filter(|_| comes) {
            net.fault_counts.one(fault);
        }
        true
    }

    fn end_own_side(&mut self, net: &mut Network, connection: &mut Connection) {
        connection.ended_own_side = true;
        net.peer_shutdown(connection.conn);
    }

    fn break_framing(&mut self, net: &mut Network, connection: &mut Connection) {
        connection.ended_own_side = true;
        let framing = self.request_mix.framing;
        let malformed = framing.malformed(self.request_mix.max_message_bytes);
        let chosen = match malformed.len() {
            // Any bytes are a valid message.
            0 => return net.peer_shutdown(connection.conn),
            1 => 0,
            several => self.rng.below(several as u64) as usize,
        };
        connection.output.extend(&malformed[chosen]);
        if framing.error_reply(ErrorReply::BadCommand).is_some() {
            connection.expected.push_back(Expected::Error);
        }
    }
}
