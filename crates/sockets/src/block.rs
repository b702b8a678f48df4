//! The engine's side of the sockets of one block.

use mqueue::abi::{SocketMessage, socket_event, status};
use mqueue::{
    BrokenRing, ByteReader, ByteWriter, Consumer, Head, Memory, Producer, RingError, abi,
};

use crate::command::{Command, decode};
use crate::slot::{Slot, State};

const MESSAGE_BYTES: usize = size_of::<SocketMessage>();

/// See the crate's documentation.
pub struct BlockSockets<M: Memory> {
    /// Completions and events to the block.
    events: Producer<M>,
    /// Commands of the block.
    commands: Consumer<M>,
    slots: Vec<Slot<M>>,
    /// By socket of the service: the number of the accept command that waits for a connection.
    accepts: Vec<Option<u64>>,
    /// Slots that are leased; a bit each.
    leased: u64,
    /// Slots that are owed an event; a bit each.
    owed: u64,
    /// Commands with an old generation or of an unknown kind.
    bad: u64,
    /// A command waits until the block has read what it was sent.
    is_behind: bool,
    /// The block has written impossible words into the rings of its socket mqueue.
    corrupt: bool,
    /// Messages were written since [`Self::take_written`].
    written: bool,
}

impl<M: Memory> BlockSockets<M> {
    /// With the engine's ends of the socket mqueue and of the stream rings of each slot, at most 64, for a service with this many
    /// sockets.
    pub fn new(
        events: Producer<M>,
        commands: Consumer<M>,
        streams: Vec<(ByteWriter<M>, ByteReader<M>)>,
        sockets: usize,
    ) -> Self {
        assert!(streams.len() <= abi::SOCKETS_MAX as usize, "{} slots", streams.len());
        let slots = streams.into_iter().map(|(rx, tx)| Slot::new(rx, tx)).collect();
        let accepts = vec![None; sockets];
        Self {
            events,
            commands,
            slots,
            accepts,
            leased: 0,
            owed: 0,
            bad: 0,
            is_behind: false,
            corrupt: false,
            written: false,
        }
    }

    /// The next command, if there is one. One that is answered with a completion is taken only while there is room for that
    /// beside everything else that the block may get; until then the block [is behind](Self::is_behind).
    pub fn next_command(&mut self) -> Option<Command> {
        self.is_behind = false;
        if self.corrupt {
            return None;
        }
        let mut bytes = [0; MESSAGE_BYTES];
        let found = match self.commands.peek() {
            Ok(Some(header)) => {
                let whole = header.kind == abi::kind::MESSAGE
                    && header.len as usize == MESSAGE_BYTES
                    && self.commands.copy_out(&header, &mut bytes);
                decode(header.token, &SocketMessage::from_bytes(bytes)).filter(|_| whole)
            }
            Ok(None) => return None,
            Err(RingError::BadHeader) => None,
            Err(RingError::Corrupt) => {
                self.corrupt = true;
                return None;
            }
        };
        let is_answered =
            matches!(found, Some((Command::Accept { .. } | Command::Connect { .. }, _)));
        if is_answered && !self.has_room() {
            self.is_behind = true;
            return None;
        }
        self.commands.advance();
        self.commands.release();
        let Some(found) = found else {
            self.bad += 1;
            return Some(Command::NoEffect);
        };
        Some(self.check(found).unwrap_or(Command::NoEffect))
    }

    /// Whether a completion has room beside those of the commands in flight and an event of each slot.
    fn has_room(&mut self) -> bool {
        let Ok(credit) = self.events.credit() else {
            self.corrupt = true;
            return false;
        };
        let released = self.events.released();
        let is_unread = |event: Option<u64>| event.is_some_and(|number| number >= released);
        let reserved = self.slots.iter().map(|slot| {
            usize::from(!is_unread(slot.event))
                + usize::from(matches!(slot.state, State::Connecting { .. }))
        });
        let accepts = self.accepts.iter().flatten().count();
        let accepts = if mutants::on("forget_waiting_accepts") { 0 } else { accepts };
        credit as usize > reserved.sum::<usize>() + accepts
    }

    /// Whether a command waits until the block has read what it was sent.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// A command whose slot, socket and lease exist. Others are answered or counted.
    fn check(&mut self, (command, generation): (Command, Option<u32>)) -> Option<Command> {
        match command {
            // One that is complete meanwhile, or never was.
            Command::NoEffect | Command::Cancel { .. } => {}
            Command::Accept { token, socket } => match self.accepts.get_mut(socket as usize) {
                Some(accept) if accept.is_none() => *accept = Some(token),
                // A second one while the first waits, or no such socket.
                _ => {
                    self.refuse(token, status::NOT_ALLOWED);
                    return None;
                }
            },
            Command::Connect { token, socket } => {
                if socket as usize >= self.accepts.len() {
                    self.refuse(token, status::NOT_ALLOWED);
                    return None;
                }
            }
            Command::Close { slot, .. } | Command::Notify { slot } => {
                let leased = self.slots.get(slot as usize).is_some_and(|slot| {
                    matches!(slot.state, State::Open | State::Dead)
                        && (Some(slot.generation) == generation || mutants::on("obey_old_lease"))
                });
                if !leased {
                    self.bad += 1;
                    return None;
                }
            }
        }
        Some(command)
    }

    /// Whether the block waits for a connection to this socket, and has a slot for it.
    pub fn accepts(&self, socket: u32) -> bool {
        let waits = self.accepts.get(socket as usize).is_some_and(Option::is_some);
        waits && !self.corrupt && self.slots.iter().any(|slot| slot.state == State::Free)
    }

    /// The accept command for this socket that waits, which does so no longer.
    pub fn take_accept(&mut self, socket: u32) -> Option<u64> {
        self.accepts.get_mut(socket as usize)?.take()
    }

    /// Whether the accept command with this number waits, which does so no longer.
    pub fn cancel_accept(&mut self, token: u64) -> bool {
        let waiting = self.accepts.iter_mut().find(|accept| **accept == Some(token));
        waiting.and_then(Option::take).is_some()
    }

    /// The slot of the connection attempt with this number.
    pub fn connecting(&self, token: u64) -> Option<u32> {
        let is_it = |slot: &u32| self.slots[*slot as usize].state == State::Connecting { token };
        self.leased().find(is_it)
    }

    /// Leases a free slot; `None` if there is none.
    pub fn lease(&mut self, state: State) -> Option<u32> {
        let at = self.leased.trailing_ones();
        self.slots.get_mut(at as usize)?.begin(state);
        self.leased |= 1 << at;
        Some(at)
    }

    /// The slot's connection exists: the block gets it as the completion of its command.
    pub fn opened(&mut self, slot: u32, token: u64) {
        self.slots[slot as usize].state = State::Open;
        let generation = self.slots[slot as usize].generation;
        let value = status::OK.into();
        self.push(token, SocketMessage { op: socket_event::DONE, slot, generation, value });
    }

    /// A command of the block failed with this [`status`].
    pub fn refuse(&mut self, token: u64, status: u8) {
        let value = status.into();
        self.push(token, SocketMessage { op: socket_event::DONE, slot: 0, generation: 0, value });
    }

    /// Sets the state of a leased slot.
    pub fn set_state(&mut self, slot: u32, state: State) {
        self.slots[slot as usize].state = state;
    }

    /// The lease of a slot ends: what is in its rings is dropped, and another one may follow.
    pub fn free(&mut self, slot: u32) {
        self.slots[slot as usize].finish();
        self.leased &= !(1 << slot);
        if !mutants::on("keep_owed_event") {
            self.owed &= !(1 << slot);
        }
    }

    /// The connection ended with this [`status`]: nothing more can be received or sent. The block finds out when it has read what
    /// was received before.
    pub fn end(&mut self, slot: u32, status: u8) {
        let entry = &mut self.slots[slot as usize];
        entry.state = State::Dead;
        entry.finish_receiving(status);
        entry.tx.set_end(status.into());
        self.event(slot);
    }

    /// Bytes for which the slot has room. They may be [written](Self::receive).
    pub fn room(&mut self, slot: u32) -> Result<usize, BrokenRing> {
        let entry = &mut self.slots[slot as usize];
        entry.note_received()?;
        entry.rx.room()
    }

    /// Bytes that the peer sent, at most as many as there is [room](Self::room) for.
    pub fn receive(&mut self, slot: u32, bytes: &[u8]) -> Result<(), BrokenRing> {
        let entry = &mut self.slots[slot as usize];
        let written = entry.rx.write(&[], bytes)?;
        debug_assert_eq!(written, bytes.len(), "there is room");
        entry.received.taken += bytes.len() as u64;
        entry.received.dropped += (bytes.len() - written) as u64;
        self.event(slot);
        Ok(())
    }

    /// Bytes that the peer sent and that the block, which has closed the slot, does not get.
    pub fn drop_received(&mut self, slot: u32, bytes: usize) {
        let books = &mut self.slots[slot as usize].received;
        books.taken += bytes as u64;
        books.dropped += bytes as u64;
    }

    /// The peer sends nothing more.
    pub fn finish_receiving(&mut self, slot: u32) {
        self.slots[slot as usize].finish_receiving(status::CLOSED);
        self.event(slot);
    }

    /// The block gets no more bytes of a slot, because the service drains. It may still send.
    pub fn dismiss(&mut self, slot: u32) {
        self.slots[slot as usize].finish_receiving(status::DRAINING);
        self.event(slot);
    }

    /// Whether bytes are in the rings of a slot, which the block has not read, or which were not sent.
    pub fn has_bytes(&mut self, slot: u32) -> Result<bool, BrokenRing> {
        let entry = &mut self.slots[slot as usize];
        entry.note_received()?;
        Ok(entry.note_sent()? > 0 || entry.in_ring(crate::Direction::Receive) > 0)
    }

    /// Copies the next bytes that the block has written into `into`; returns how many. They stay in the ring until they were
    /// [`sent`](Self::sent).
    pub fn peek(&mut self, slot: u32, into: &mut [u8]) -> Result<usize, BrokenRing> {
        let entry = &mut self.slots[slot as usize];
        entry.note_sent()?;
        entry.tx.peek(into)
    }

    /// The host kernel has accepted this many of the bytes that [`Self::peek`] showed.
    pub fn sent(&mut self, slot: u32, bytes: usize) {
        let entry = &mut self.slots[slot as usize];
        entry.tx.advance(bytes);
        entry.sent.delivered += bytes as u64;
        entry.taken_since_event += bytes as u64;
        if entry.taken_since_event >= entry.tx.capacity() / 2 && !mutants::on("hide_room") {
            entry.taken_since_event = 0;
            self.event(slot);
        }
    }

    /// Whether a slot has this lease, with a connection that is open, or that is closing.
    pub fn is_leased_as(&self, slot: u32, lease: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(|slot| {
            matches!(slot.state, State::Open | State::Closing)
                && (slot.generation == lease || mutants::on("lend_to_old_lease"))
        })
    }

    /// Positions in the bytes that the block writes to a slot: up to the first one they were [sent](Self::sent), up to the second one written.
    pub fn send_positions(&mut self, slot: u32) -> Result<(u64, u64), BrokenRing> {
        let entry = &mut self.slots[slot as usize];
        entry.note_sent()?;
        let sent = entry.tx.position();
        Ok((sent, sent + entry.in_ring(crate::Direction::Send)))
    }

    /// Whether the block writes nothing more than what is in the ring.
    pub fn is_shut(&self, slot: u32) -> bool {
        self.slots[slot as usize].tx.writer_end() != 0
    }

    /// Tells the block that something happened to a slot; later, if it has not read the last event of that slot.
    fn event(&mut self, slot: u32) {
        if self.events.credit().is_err() {
            self.corrupt = true;
        }
        let released = self.events.released();
        let entry = &mut self.slots[slot as usize];
        if entry.event.is_some_and(|number| number >= released) {
            self.owed |= 1 << slot;
            return;
        }
        entry.event = Some(self.events.committed());
        let generation = entry.generation;
        self.push(0, SocketMessage { op: socket_event::EVENT, slot, generation, value: 0 });
    }

    /// Sends the events that are owed, as far as the block has read the last ones.
    pub fn send_owed(&mut self) {
        if self.owed == 0 || self.corrupt {
            return;
        }
        for slot in 0..self.slots.len() as u32 {
            if self.owed & 1 << slot != 0 {
                self.owed &= !(1 << slot);
                self.event(slot);
            }
        }
    }

    /// Whether events are owed.
    pub fn owes(&self) -> bool {
        self.owed != 0
    }

    fn push(&mut self, token: u64, message: SocketMessage) {
        let head = Head { token, tag: 0, kind: abi::kind::MESSAGE, status: abi::status::OK };
        // There is room for every completion and event, unless the block has broken the ring.
        if self.events.push(head, &message.to_bytes()).is_err() {
            self.corrupt = true;
        }
        self.written = true;
    }

    /// Whether messages were written that are not [published](Self::publish) yet.
    pub fn take_written(&mut self) -> bool {
        std::mem::take(&mut self.written)
    }

    /// Makes what was written visible to the block.
    pub fn publish(&mut self) {
        self.events.publish();
    }

    /// Whether the block wrote impossible words into the rings of its socket mqueue.
    pub fn is_corrupt(&self) -> bool {
        self.corrupt
    }

    /// Takes the number of commands that had no effect: of an unknown kind, or of a lease that is over.
    pub fn take_bad(&mut self) -> u64 {
        std::mem::take(&mut self.bad)
    }

    /// Its slots.
    pub fn slots(&self) -> &[Slot<M>] {
        &self.slots
    }

    /// The slots that are leased at present. What it returns does not borrow from these sockets.
    pub fn leased(&self) -> impl Iterator<Item = u32> + use<M> {
        let mut rest = self.leased;
        std::iter::from_fn(move || {
            let slot = rest.trailing_zeros();
            rest &= rest.wrapping_sub(1);
            (slot < u64::BITS).then_some(slot)
        })
    }
}
