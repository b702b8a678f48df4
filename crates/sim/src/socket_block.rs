//! The sockets of a model block: it accepts connections and echoes their bytes, or passes them on to a connection of its own.
//!
//! A block serves only slots for which it got an event, and those that it has not finished with: a missing event leaves bytes in a ring
//! and is detected. A hostile block also sends commands that name anything, and overwrites the words of its rings.

use std::collections::{BTreeMap, VecDeque};

use mqueue::abi::stream_word::{HEAD, HEAD_END, TAIL, TAIL_END};
use mqueue::abi::{
    SocketMessage, StreamEntry, kind, socket_close, socket_event, socket_op, status,
};
use mqueue::memory::Ordering;
use mqueue::{ByteReader, ByteWriter, Consumer, Head, MappedMemory, Memory, Producer};

use crate::fault::Fault;
use crate::net::Network;
use crate::rng::Rng;
use crate::transfers::Piece;

/// Behaviour of a block's sockets. Rates are per mille.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketBehaviour {
    /// It leaves a slot alone for now, though there is something to do.
    pub idle: u32,
    /// It resets a connection instead of passing bytes on.
    pub reset: u32,
    /// It closes a connection, though its peer has not ended.
    pub close: u32,
    /// It gives up an accept or a connect that is in flight, or is complete meanwhile.
    pub cancel: u32,
    /// It sends a piece by a transfer instead of its ring.
    pub transfer: u32,
    /// It writes a few bytes behind its own end before it closes a connection.
    pub afterthought: u32,
    /// It also sends a command with a random slot, lease, index or operation.
    pub forge: u32,
    /// It also overwrites a word of a stream ring.
    pub scribble: u32,
}

/// The accelerator's ends of one block's sockets.
pub struct SocketShare {
    /// That of the region.
    pub memory: MappedMemory,
    /// The socket mqueue.
    pub mqueue: (Consumer<MappedMemory>, Producer<MappedMemory>),
    /// By slot: to the block, and from it.
    pub streams: Vec<(ByteReader<MappedMemory>, ByteWriter<MappedMemory>)>,
    /// Their entries, for hostile blocks.
    pub entries: Vec<[StreamEntry; 2]>,
}

/// What a block asked with a command.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Accept(u32),
    /// For the connection in this slot, with this lease.
    Connect(usize, u32),
}

struct Slot {
    recv: ByteReader<MappedMemory>,
    send: ByteWriter<MappedMemory>,
    /// 0: not leased.
    generation: u32,
    last_generation: u32,
    /// The slot where its bytes go: itself, or the other connection.
    partner: Option<usize>,
    /// The peer has ended, and all its bytes were passed on.
    finished: bool,
    /// An event arrived, or there was more to do.
    signalled: bool,
    read_since_notify: u64,
    /// A transfer to it has no result.
    is_lent: bool,
    /// Steps until it writes behind its end and closes.
    lingers: u32,
}

/// See the module's text.
pub(crate) struct SocketBlock {
    service: usize,
    memory: MappedMemory,
    events: Consumer<MappedMemory>,
    commands: Producer<MappedMemory>,
    entries: Vec<[StreamEntry; 2]>,
    slots: Vec<Slot>,
    /// Numbers of listeners, and whether each has an ACCEPT outstanding.
    listeners: Vec<(u32, bool)>,
    /// Numbers of the peers; with one, connections are passed on to it.
    peers: Vec<u32>,
    asked: BTreeMap<u64, Asked>,
    next_token: u64,
    /// Commands for which there was no room.
    unsent: VecDeque<(u64, SocketMessage)>,
    /// Transfers that are to be asked for, and connections of those without a result, by tag.
    pieces: VecDeque<Piece>,
    lent: BTreeMap<u64, (usize, u32)>,
    /// It has lied to the engine: its connections may be gone.
    is_hostile: bool,
}

/// The longest piece that a block moves at once.
const PIECE_BYTES: u64 = 3000;
/// What a block writes behind its own end.
pub const AFTERTHOUGHT_BYTES: usize = 10;
/// A bit of the tokens of forged commands.
const FORGED: u64 = 1 << 63;

impl SocketBlock {
    /// Of a block of a service whose sockets listen (`true`) or connect.
    /// `is_hostile`: it may also overwrite its rings in other ways.
    pub(crate) fn new(
        service: usize,
        share: SocketShare,
        sockets: &[bool],
        is_hostile: bool,
    ) -> Self {
        let SocketShare { memory, mqueue: (events, commands), streams, entries } = share;
        let slot = |(recv, send)| Slot {
            recv,
            send,
            generation: 0,
            last_generation: 0,
            partner: None,
            finished: false,
            signalled: false,
            read_since_notify: 0,
            is_lent: false,
            lingers: 0,
        };
        let numbers = |listen| (0..).zip(sockets).filter(move |(_, is)| **is == listen);
        Self {
            service,
            memory,
            events,
            commands,
            entries,
            slots: streams.into_iter().map(slot).collect(),
            listeners: numbers(true).map(|(socket, _)| (socket, false)).collect(),
            peers: numbers(false).map(|(socket, _)| socket).collect(),
            asked: BTreeMap::new(),
            next_token: 1,
            unsent: VecDeque::new(),
            pieces: VecDeque::new(),
            lent: BTreeMap::new(),
            is_hostile,
        }
    }

    /// Whether there is nothing to do before the next event.
    pub(crate) fn is_idle(&mut self) -> bool {
        !self.events.hinted()
            && self.unsent.is_empty()
            && self.pieces.is_empty()
            && self.listeners.iter().all(|(_, waits)| *waits)
            && !self.slots.iter().any(|slot| slot.signalled)
    }

    /// Connections that it has.
    pub(crate) fn leases(&self) -> usize {
        self.slots.iter().filter(|slot| slot.generation != 0).count()
    }

    /// The next transfer that it asks for.
    pub(crate) fn piece(&self) -> Option<&Piece> {
        self.pieces.front()
    }

    /// It was asked for, with this tag.
    pub(crate) fn asked(&mut self, tag: u64) {
        let piece = self.pieces.pop_front().expect("there is one");
        self.lent.insert(tag, (piece.slot as usize, piece.lease));
    }

    /// Whether the answer with this tag is one to such a transfer. A connection without all of its bytes is reset.
    pub(crate) fn take_result(&mut self, tag: u64, is_sent: impl FnOnce() -> bool) -> bool {
        let Some((slot, lease)) = self.lent.remove(&tag) else { return false };
        let is_sent = is_sent();
        if self.slots[slot].generation == lease {
            self.slots[slot].is_lent = false;
            self.slots[slot].signalled = true;
            if let Some(partner) = self.slots[slot].partner {
                self.slots[partner].signalled = true;
            }
            if !is_sent {
                self.close_both(slot, socket_close::RESET);
            }
        }
        true
    }

    /// Publishes its commands; returns whether there are any.
    pub(crate) fn publish(&mut self) -> bool {
        self.commands.publish()
    }

    /// Does what can be done now.
    pub(crate) fn step(&mut self, net: &mut Network, rng: &mut Rng, behaviour: &SocketBehaviour) {
        while let Some((token, message)) = self.unsent.pop_front() {
            if !self.push(token, message) {
                self.unsent.push_front((token, message));
                break;
            }
        }
        self.read_events(net);
        for at in 0..self.listeners.len() {
            let (socket, waits) = self.listeners[at];
            if !waits {
                self.listeners[at].1 = true;
                self.ask(Asked::Accept(socket), socket_op::ACCEPT, socket);
            }
        }
        if net.fault_counts.occurs(rng, Fault::SocketCancel, behaviour.cancel) {
            let asked: Vec<u64> = self.asked.keys().copied().collect();
            if !asked.is_empty() {
                let message =
                    SocketMessage { op: socket_op::CANCEL, slot: 0, generation: 0, value: 0 };
                self.command(rng.pick(&asked), message);
            }
        }
        for slot in 0..self.slots.len() {
            let leased = self.slots[slot].generation != 0;
            if leased && self.slots[slot].signalled && !rng.chance(behaviour.idle) {
                self.serve(slot, net, rng, behaviour);
            }
        }
        if net.fault_counts.occurs(rng, Fault::SocketForge, behaviour.forge) {
            self.is_hostile = true;
            self.forge(rng);
        }
        if net.fault_counts.occurs(rng, Fault::SocketScribble, behaviour.scribble) {
            self.is_hostile = true;
            self.scribble(rng);
        }
    }
}

/// Commands and events.
impl SocketBlock {
    fn push(&mut self, token: u64, message: SocketMessage) -> bool {
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: status::OK };
        self.commands.push(head, &message.to_bytes()).is_ok()
    }

    /// Sends a command, now or when there is room.
    fn command(&mut self, token: u64, message: SocketMessage) {
        if !self.unsent.is_empty() || !self.push(token, message) {
            self.unsent.push_back((token, message));
        }
    }

    fn ask(&mut self, asked: Asked, op: u32, value: u32) {
        let token = self.next_token;
        self.next_token += 1;
        self.asked.insert(token, asked);
        self.command(token, SocketMessage { op, slot: 0, generation: 0, value });
    }

    fn about(&mut self, slot: usize, op: u32, value: u32) {
        let generation = self.slots[slot].generation;
        self.command(0, SocketMessage { op, slot: slot as u32, generation, value });
    }

    fn read_events(&mut self, net: &mut Network) {
        loop {
            let header = match self.events.peek() {
                Ok(Some(header)) => header,
                Ok(None) => return,
                Err(error) => {
                    let text = || format!("the engine broke the RX ring of sockets: {error}");
                    return net.ledger.must(self.is_hostile, text);
                }
            };
            let mut bytes = [0; size_of::<SocketMessage>()];
            if header.len as usize != bytes.len() || !self.events.copy_out(&header, &mut bytes) {
                let text = || format!("a socket message of {} bytes", header.len);
                return net.ledger.must(self.is_hostile, text);
            }
            self.events.advance();
            self.events.release();
            let message = SocketMessage::from_bytes(bytes);
            match message.op {
                socket_event::DONE => self.take_done(net, header.token, message),
                socket_event::EVENT => self.take_event(net, message),
                op => net.ledger.must(self.is_hostile, || format!("a socket event of kind {op}")),
            }
        }
    }

    fn take_event(&mut self, net: &mut Network, message: SocketMessage) {
        let Some(slot) = self.slots.get_mut(message.slot as usize) else {
            let text = || format!("an event for slot {}", message.slot);
            return net.ledger.must(self.is_hostile, text);
        };
        let known = slot.last_generation;
        let later = || format!("an event for lease {}, the last is {known}", message.generation);
        net.ledger.must(message.generation <= known || self.is_hostile, later);
        if slot.generation == message.generation {
            slot.signalled = true;
            // Its partner may have waited for room.
            if let Some(partner) = slot.partner {
                self.slots[partner].signalled = true;
            }
        }
    }

    fn take_done(&mut self, net: &mut Network, token: u64, message: SocketMessage) {
        let asked = self.asked.remove(&token);
        if asked.is_none() && token & FORGED == 0 {
            let text = || format!("a completion of command {token}");
            return net.ledger.must(self.is_hostile, text);
        }
        if let Some(Asked::Accept(socket)) = asked {
            let listener = self.listeners.iter_mut().find(|(number, _)| *number == socket);
            listener.expect("it asked").1 = false;
        }
        if message.value != u32::from(status::OK) {
            if let Some(Asked::Connect(from, lease)) = asked
                && self.slots[from].generation == lease
            {
                self.close(from, socket_close::RESET);
            }
            return;
        }
        let number = message.slot as usize;
        let Some(slot) = self.slots.get_mut(number) else {
            let text = || format!("a lease of slot {number}");
            return net.ledger.must(self.is_hostile, text);
        };
        let fresh = slot.generation == 0 && message.generation > slot.last_generation;
        let (old, last) = (slot.generation, slot.last_generation);
        net.ledger.must(fresh || self.is_hostile, || {
            format!("slot {number} is leased as {}, was {old}, last {last}", message.generation)
        });
        slot.recv.forget();
        slot.send.forget();
        slot.generation = message.generation;
        slot.last_generation = message.generation;
        (slot.partner, slot.finished, slot.signalled) = (None, false, true);
        slot.read_since_notify = 0;
        (slot.is_lent, slot.lingers) = (false, 0);
        match asked {
            None => self.close(number, socket_close::RESET),
            Some(Asked::Accept(_)) => match self.peers.first().copied() {
                None => slot.partner = Some(number),
                Some(peer) => {
                    let asked = Asked::Connect(number, message.generation);
                    self.ask(asked, socket_op::CONNECT, peer);
                }
            },
            Some(Asked::Connect(from, lease)) if self.slots[from].generation == lease => {
                self.slots[number].partner = Some(from);
                self.slots[from].partner = Some(number);
                self.slots[from].signalled = true;
            }
            Some(Asked::Connect(..)) => self.close(number, socket_close::RESET),
        }
    }

    fn close(&mut self, slot: usize, how: u32) {
        self.about(slot, socket_op::CLOSE, how);
        let slot = &mut self.slots[slot];
        (slot.generation, slot.signalled) = (0, false);
    }

    /// Closes a slot and the one that its bytes go to.
    fn close_both(&mut self, slot: usize, how: u32) {
        let partner = self.slots[slot].partner;
        self.close(slot, how);
        if let Some(partner) = partner.filter(|partner| *partner != slot) {
            self.close(partner, how);
        }
    }
}

/// Bytes.
impl SocketBlock {
    /// Passes bytes of a slot on, until nothing can be moved.
    fn serve(
        &mut self,
        slot: usize,
        net: &mut Network,
        rng: &mut Rng,
        behaviour: &SocketBehaviour,
    ) {
        self.slots[slot].signalled = false;
        let Some(partner) = self.slots[slot].partner else { return };
        if self.slots[slot].lingers > 0 {
            return self.add_afterthought(slot, partner, net);
        }
        let waits = |piece: &Piece| piece.slot as usize == partner;
        if self.pieces.iter().any(waits) {
            // Nothing is sent behind a command that was not given yet.
            self.slots[slot].signalled = true;
            return;
        }
        let mut moved = 0;
        loop {
            if net.fault_counts.occurs(rng, Fault::SocketReset, behaviour.reset) {
                return self.close_both(slot, socket_close::RESET);
            }
            if net.fault_counts.occurs(rng, Fault::SocketClose, behaviour.close) {
                return self.close_both(slot, socket_close::ORDERLY);
            }
            if self.slots[partner].send.reader_end() != 0 {
                // Nothing reaches that peer any more.
                return self.close_both(slot, socket_close::RESET);
            }
            let Ok(room) = self.slots[partner].send.room() else {
                return self.broken(net, slot);
            };
            let most = (room as u64).min(rng.between(1, PIECE_BYTES)) as usize;
            let mut bytes = vec![0; most];
            let Ok(count) = self.slots[slot].recv.read(&mut bytes) else {
                return self.broken(net, slot);
            };
            if count == 0 {
                break;
            }
            let service = self.service;
            if !self.slots[partner].is_lent && rng.chance(behaviour.transfer) {
                self.lend(partner, bytes[..count].to_vec());
                net.ledger.socket_moved(service, count as u64);
                self.note_read(slot, count as u64);
                break;
            }
            let written = self.slots[partner].send.write(&[], &bytes[..count]);
            net.ledger.must(written == Ok(count) || self.is_hostile, || {
                format!("a ring of service {service} with room for {room} takes {written:?} bytes")
            });
            net.ledger.socket_moved(service, count as u64);
            moved += count as u64;
        }
        if moved > 0 {
            self.note_read(slot, moved);
            self.about(partner, socket_op::NOTIFY, 0);
        }
        if self.pieces.iter().any(waits) {
            self.slots[slot].signalled = true;
            return;
        }
        self.look_for_end(
            slot,
            net,
            behaviour.afterthought > 0 && rng.chance(behaviour.afterthought),
        );
    }

    /// Some steps after both ends: writes behind its own one, and closes the connection.
    fn add_afterthought(&mut self, slot: usize, partner: usize, net: &mut Network) {
        self.slots[slot].lingers -= 1;
        self.slots[slot].signalled = true;
        if self.slots[slot].lingers == 0 {
            let written = self.slots[partner].send.write(&[], &[0; AFTERTHOUGHT_BYTES]);
            net.ledger.socket_moved(self.service, written.unwrap_or(0) as u64);
            self.close_both(slot, socket_close::ORDERLY);
        }
    }

    fn lend(&mut self, slot: usize, bytes: Vec<u8>) {
        let entry = &mut self.slots[slot];
        entry.is_lent = true;
        let (lease, position) = (entry.generation, entry.send.position());
        self.pieces.push_back(Piece { slot: slot as u32, lease, position, bytes });
    }

    fn note_read(&mut self, slot: usize, count: u64) {
        let entry = &mut self.slots[slot];
        entry.read_since_notify += count;
        if entry.read_since_notify >= entry.recv.capacity() / 2 {
            entry.read_since_notify = 0;
            self.about(slot, socket_op::NOTIFY, 0);
        }
    }

    fn look_for_end(&mut self, slot: usize, net: &mut Network, has_afterthought: bool) {
        let partner = self.slots[slot].partner.expect("it passes bytes on");
        match self.slots[slot].recv.ended() {
            Ok(None) => {}
            // As kernels do, it ends in order what it gets no more bytes of.
            Ok(Some(end)) if [status::CLOSED, status::DRAINING].map(u64::from).contains(&end) => {
                if !std::mem::replace(&mut self.slots[slot].finished, true) {
                    self.slots[partner].send.set_end(u64::from(status::CLOSED));
                    self.about(partner, socket_op::NOTIFY, 0);
                }
                if self.slots[partner].finished && has_afterthought {
                    (self.slots[slot].lingers, self.slots[slot].signalled) = (20, true);
                } else if self.slots[partner].finished {
                    self.close_both(slot, socket_close::ORDERLY);
                }
            }
            Ok(Some(_)) => self.close_both(slot, socket_close::RESET),
            Err(_) => self.broken(net, slot),
        }
    }

    fn broken(&mut self, net: &mut Network, slot: usize) {
        net.ledger.must(self.is_hostile, || format!("the engine broke a ring of slot {slot}"));
        self.close_both(slot, socket_close::RESET);
    }

    /// A command that names anything, or many of them.
    fn forge(&mut self, rng: &mut Rng) {
        let times = if rng.chance(100) { 200 } else { 1 };
        for _ in 0..times {
            let slot = rng.below(self.slots.len() as u64 + 2) as u32;
            let lease = self.slots.get(slot as usize).map_or(1, |slot| slot.last_generation);
            let message = SocketMessage {
                op: rng.below(7) as u32,
                slot: rng.pick(&[slot, slot, slot, u32::MAX, 64]),
                generation: rng.pick(&[
                    lease,
                    lease,
                    lease.wrapping_sub(1),
                    lease + 1,
                    0,
                    u32::MAX,
                ]),
                value: rng.pick(&[0, 1, 2, 3, u32::MAX]),
            };
            let token = FORGED | rng.draw();
            let head = Head { token, tag: 0, kind: rng.pick(&[1, 1, 1, 2, 0]), status: 0 };
            let len = rng.pick(&[16, 16, 16, 15, 0]);
            if self.commands.push(head, &message.to_bytes()[..len]).is_err() {
                return;
            }
        }
    }

    /// Overwrites a word of a stream ring: a position or an end, of either side.
    fn scribble(&mut self, rng: &mut Rng) {
        let rings = self.entries[rng.below(self.entries.len() as u64) as usize];
        let ring = rings[rng.below(2) as usize];
        let at = ring.offset + rng.pick(&[HEAD, HEAD_END, TAIL, TAIL_END]);
        let old = self.memory.load(at, Ordering::Relaxed);
        let new = match rng.below(4) {
            0 => rng.draw(),
            1 => old.wrapping_add(rng.between(1, 5000)),
            2 => old.wrapping_sub(1),
            _ => rng.below(16),
        };
        self.memory.store(at, new, Ordering::Relaxed);
    }
}
