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

use wire::framing::{ErrorReply, Framing};
use wire::nic::{Close, PortIndex};

use crate::client::Taste;
use crate::conn::ConnId;
use crate::fault::Fault;
use crate::message::{
    Ask, Body, Flavor, FromStream, ReplyStream, decode_reply, request_payload, request_wire,
};
use crate::net::{Network, PeerRead};
use crate::rng::Rng;
use crate::world::client_address;

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
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

const FATES: [Fate; 7] =
    [Fate::Polite, Fate::Stay, Fate::Reset, Fate::Vanish, Fate::Nonsense, Fate::Quit, Fate::Cut];

impl Fate {
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
pub struct Fates(u8);

impl Fates {
    /// All of them.
    pub const ALL: Self = Self(0x7f);
    /// Those without losses.
    pub const GENTLE: Self = Self(0b11);

    /// All of these but one, which becomes [`Fate::Stay`].
    pub fn without(self, fault: Fault) -> Self {
        let spared = FATES.iter().filter(|fate| fate.fault() == Some(fault));
        Self(spared.fold(self.0, |left, fate| left & !(1 << *fate as u8)))
    }

    /// Whether it contains endings with losses.
    pub fn are_rough(self) -> bool {
        self.0 & !Self::GENTLE.0 != 0
    }

    fn draw(self, rng: &mut Rng) -> Fate {
        let drawn = rng.pick(&FATES[..if self.are_rough() { FATES.len() } else { 2 }]);
        if self.0 & 1 << drawn as u8 == 0 { Fate::Stay } else { drawn }
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
pub struct Manner {
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
    pub fates: Fates,
}

/// A client's connection.
#[derive(Debug)]
struct Life {
    conn: ConnId,
    id: u32,
    fate: Fate,
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
    pub taste: Taste,
    /// Its behaviour.
    pub manner: Manner,
    /// Whether replies keep the order of requests.
    pub ordered: bool,
    /// Whether the service replies.
    pub replies: bool,
    /// Whether the content of replies is checked.
    pub judged: bool,
    /// Connections still to open.
    pub lives: u32,
    /// Requests of each connection.
    pub requests: u32,
    /// Time of its next action.
    pub next_ns: u64,
    /// Its randomness.
    pub rng: Rng,
    /// Replies received.
    pub received: u64,
    /// Connections that the engine ended while replies were owed.
    pub forsaken: u64,
    life: Option<Life>,
}

impl StreamClient {
    /// A client that has not connected yet.
    pub fn new(service: usize, port: PortIndex, taste: Taste, manner: Manner, rng: Rng) -> Self {
        Self {
            service,
            port,
            taste,
            manner,
            ordered: true,
            replies: true,
            judged: true,
            lives: 1,
            requests: 10,
            next_ns: 0,
            rng,
            received: 0,
            forsaken: 0,
            life: None,
        }
    }

    /// Time of the client's next action.
    pub fn due_ns(&self) -> u64 {
        if self.life.is_some() || self.lives > 0 { self.next_ns } else { u64::MAX }
    }

    /// Whether it has requests to send.
    pub fn has_more(&self) -> bool {
        self.lives > 0 || self.life.as_ref().is_some_and(|l| l.left > 0 || !l.output.is_empty())
    }

    /// Stops new requests; started ones are finished.
    pub fn hush(&mut self) {
        self.lives = 0;
        if let Some(life) = &mut self.life {
            life.left = 0;
        }
    }

    /// Resets its connection and opens no other.
    pub fn leave(&mut self, net: &mut Network) {
        self.lives = 0;
        if let Some(life) = self.life.take() {
            net.peer_close(life.conn, Close::Reset);
        }
    }

    /// Whether it sent everything and got every answer.
    pub fn is_answered(&self) -> bool {
        let answered =
            |l: &Life| l.expected.is_empty() && l.returned == l.sent.len() && l.output.is_empty();
        self.forsaken == 0 && !self.has_more() && self.life.as_ref().is_none_or(answered)
    }

    /// Positions in the order of replies that are still open.
    pub fn owed(&self) -> usize {
        let owed = |e: &&Expected| !matches!(e, Expected::Maybe(_));
        self.life.as_ref().map_or(0, |l| l.expected.iter().filter(owed).count())
    }

    /// Acts on the connection if it is time.
    pub fn step(&mut self, net: &mut Network, next_id: &mut u32) {
        if self.next_ns > net.now_ns() || self.due_ns() == u64::MAX {
            return;
        }
        self.next_ns =
            net.now_ns() + self.rng.between(self.manner.pause_ns.0, self.manner.pause_ns.1);
        let Some(mut life) = self.life.take() else {
            return self.connect(net, next_id);
        };
        self.compose(net, &mut life);
        self.write(net, &mut life);
        let goes_on = self.read(net, &mut life) && self.meet_fate(net, &mut life);
        if goes_on {
            self.life = Some(life);
        }
    }

    fn connect(&mut self, net: &mut Network, next_id: &mut u32) {
        self.lives -= 1;
        let id = *next_id;
        *next_id += 1;
        let peer: SocketAddr = client_address(id);
        let fate = self.manner.fates.draw(&mut self.rng);
        self.note_manner(net);
        self.life = Some(Life {
            conn: net.connect(peer, self.port),
            id,
            fate,
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
    fn note_manner(&self, net: &mut Network) {
        if self.manner.write_max == 1 || self.manner.read_max == 1 {
            net.struck.one(Fault::Bytewise);
        }
        if self.manner.read_max == 0 {
            net.struck.one(Fault::Deaf);
        }
    }

    fn compose(&mut self, net: &mut Network, life: &mut Life) {
        let framing = self.taste.framing;
        while life.left > 0 && life.output.len() < 4 * self.manner.write_max.max(1024) {
            let raw_open = (life.sent.len() - life.returned) / 64;
            if life.expected.len().max(raw_open) >= self.manner.pipeline {
                return;
            }
            life.left -= 1;
            if framing == Framing::Memcached
                && net.struck.strikes(&mut self.rng, Fault::Bogus, self.manner.bogus)
            {
                life.output.extend(self.rng.pick(&[&b"bogus 1\r\n"[..], b"\r\n", b"get\n"]));
                life.expected.push_back(Expected::Error);
                continue;
            }
            let (body, flavor) = self.taste.request(&mut self.rng, life.id, life.sequence);
            life.sequence += 1;
            if body.ask == Ask::Unframable {
                net.struck.one(Fault::Unframable);
            }
            net.ledger.ask(self.service, body, None);
            let wire = request_wire(framing, &request_payload(framing, &body, flavor));
            life.output.extend(&wire);
            match flavor {
                _ if framing == Framing::Raw => life.sent.extend(&wire),
                _ if !self.replies => {}
                Flavor::Plain => life.expected.push_back(Expected::Reply(body)),
                Flavor::Quiet => life.expected.push_back(Expected::Maybe(body)),
                Flavor::Silent => {}
            }
        }
    }

    fn write(&mut self, net: &mut Network, life: &mut Life) {
        if life.output.is_empty() || self.manner.write_max == 0 {
            return;
        }
        let most = life.output.len().min(self.manner.write_max) as u64;
        let most = self.rng.between(1, most) as usize;
        let count = net.peer_write(life.conn, &life.output[..most]);
        life.output.drain(..count);
    }

    /// Reads once; false if the connection is over.
    fn read(&mut self, net: &mut Network, life: &mut Life) -> bool {
        if self.manner.read_max == 0 {
            // It still notices a reset.
            return !net.is_over(life.conn);
        }
        let most = self.rng.between(1, self.manner.read_max as u64) as usize;
        match net.peer_read(life.conn, most) {
            PeerRead::Bytes(bytes) => {
                self.take(net, life, &bytes);
                true
            }
            PeerRead::Empty => true,
            PeerRead::Closed => {
                let left = life.input.left();
                if left > 0 && self.judged {
                    let id = life.id;
                    net.ledger.violate(|| {
                        format!("client {id}: the connection ends in order inside a reply ({left})")
                    });
                }
                net.peer_close(life.conn, Close::Graceful);
                self.part(life);
                false
            }
            PeerRead::Broken => {
                self.part(life);
                false
            }
        }
    }

    /// The engine ended the connection.
    fn part(&mut self, life: &Life) {
        let owed = |e: &&Expected| !matches!(e, Expected::Maybe(_));
        if life.expected.iter().any(|e| owed(&e)) || life.returned < life.sent.len() {
            self.forsaken += 1;
        }
    }

    fn take(&mut self, net: &mut Network, life: &mut Life, bytes: &[u8]) {
        if !self.judged {
            return;
        }
        if self.taste.framing == Framing::Raw {
            let expected = life.sent.get(life.returned..life.returned + bytes.len());
            if expected != Some(bytes) {
                let id = life.id;
                net.ledger.violate(|| format!("client {id}: the stream returns other bytes"));
            }
            life.returned += bytes.len();
            return;
        }
        life.input.push(bytes);
        while let Some(what) = life.input.next(self.taste.framing) {
            let reply = match what {
                FromStream::Error => None,
                FromStream::Reply(payload) => {
                    let reply = decode_reply(self.taste.framing, payload);
                    Some(reply.ok_or_else(|| format!("a garbled reply {payload:02x?}")))
                }
            };
            if let Err(wrong) = self.accept(life, reply) {
                let (id, service) = (life.id, self.service);
                net.ledger.violate(|| format!("client {id} of service {service}: {wrong}"));
            }
        }
    }

    /// Matches a reply, or an error report (`None`), to its position.
    fn accept(
        &mut self,
        life: &mut Life,
        reply: Option<Result<Body, String>>,
    ) -> Result<(), String> {
        let Some(reply) = reply else {
            life.errors += 1;
            if life.errors > life.expected.len() {
                return Err("an error report for no request".into());
            }
            self.settle_errors(life);
            return Ok(());
        };
        self.received += 1;
        life.replies += 1;
        let reply = reply?;
        let answers = |e: &Expected| match e {
            Expected::Reply(body) | Expected::Maybe(body) => body.reply() == reply,
            Expected::Error => false,
        };
        let place = life.expected.iter().position(answers);
        let place = place.ok_or_else(|| {
            format!("{reply:?} is not owed; expected {:?}", life.expected.front())
        })?;
        if !self.ordered {
            life.expected.remove(place);
            return Ok(());
        }
        // Earlier positions are reported lost, or were optional.
        let before = life.expected.drain(..=place).take(place);
        let (mut owed, mut optional) = (0, 0);
        for expected in before {
            match expected {
                Expected::Maybe(_) => optional += 1,
                _ => owed += 1,
            }
        }
        let errors = std::mem::take(&mut life.errors);
        if errors < owed || errors > owed + optional {
            return Err(format!(
                "{reply:?} passes {owed} that are owed and {optional} optional replies, with {errors} \
                 error reports"
            ));
        }
        Ok(())
    }

    /// Without optional replies an error report has one possible position: the first.
    fn settle_errors(&self, life: &mut Life) {
        while life.errors > 0
            && self.ordered
            && matches!(life.expected.front(), Some(Expected::Reply(_) | Expected::Error))
        {
            life.expected.pop_front();
            life.errors -= 1;
        }
        if !self.ordered && life.errors == life.expected.len() {
            life.expected.clear();
            life.errors = 0;
        }
    }

    /// Applies the planned ending; false if the connection is over for the client.
    fn meet_fate(&mut self, net: &mut Network, life: &mut Life) -> bool {
        let done = life.left == 0 && life.output.is_empty();
        let comes = done && !life.ended_own_side;
        let fault = life.fate.fault();
        match life.fate {
            Fate::Reset | Fate::Vanish if done || self.rng.chance(20) => {
                net.struck.one(fault.expect("it is one"));
                let how = if life.fate == Fate::Reset { Close::Reset } else { Close::Graceful };
                net.peer_close(life.conn, how);
                return false;
            }
            _ if !comes => {}
            Fate::Polite => self.end_own_side(net, life),
            Fate::Quit if self.taste.framing == Framing::Memcached => {
                life.ended_own_side = true;
                life.output.extend(b"quit\r\n");
            }
            Fate::Quit => self.end_own_side(net, life),
            Fate::Nonsense => self.talk_nonsense(net, life),
            Fate::Cut => {
                let (body, flavor) = self.taste.request(&mut self.rng, life.id, life.sequence);
                let framing = self.taste.framing;
                let wire = request_wire(framing, &request_payload(framing, &body, flavor));
                if framing != Framing::Raw {
                    net.peer_write(life.conn, &wire[..wire.len() / 2]);
                }
                self.end_own_side(net, life);
            }
            Fate::Stay | Fate::Reset | Fate::Vanish => {}
        }
        if let Some(fault) = fault.filter(|_| comes) {
            net.struck.one(fault);
        }
        true
    }

    fn end_own_side(&mut self, net: &mut Network, life: &mut Life) {
        life.ended_own_side = true;
        net.peer_shutdown(life.conn);
    }

    fn talk_nonsense(&mut self, net: &mut Network, life: &mut Life) {
        life.ended_own_side = true;
        let framing = self.taste.framing;
        let malformed = framing.malformed(self.taste.max_message_bytes);
        let chosen = match malformed.len() {
            // Any bytes are a valid message.
            0 => return net.peer_shutdown(life.conn),
            1 => 0,
            several => self.rng.below(several as u64) as usize,
        };
        life.output.extend(&malformed[chosen]);
        if framing.error_reply(ErrorReply::BadCommand).is_some() {
            life.expected.push_back(Expected::Error);
        }
    }
}
