//! One call: a schedule, executed step by step over a [`Transport`]. It never waits and has no clock.

use std::sync::Arc;

use crate::error::{CollectiveError, Loss};
use crate::frame::{HEADER_BYTES, Header, is_long};
use crate::schedule::{Effect, Element, Memory, Operation, RANKS_MAX, Receive, Schedule};
use crate::transport::{Transport, Wants};

/// Bytes that are received at a time before they are added: less than a core's cache.
const STAGE_BYTES: usize = 128 << 10;
/// Bytes that are sent at a time, so that receiving does not wait for long.
const SEND_BYTES_MAX: usize = 1 << 20;
/// Looks at the transfers of a step before the caller looks at its clock.
const ROUNDS_MAX: usize = 64;
/// What every NaN becomes, because processors disagree about the bits of a sum of NaNs.
const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is complete.
    Done,
    /// Something has moved, and more may move at once.
    Moved,
    /// Nothing more can be moved.
    Stuck {
        /// What it waits for.
        wants: Wants,
        /// Something has moved before.
        moved: bool,
    },
}

/// A transfer of the current step to another rank.
struct Sending {
    head: [u8; HEADER_BYTES],
    /// Bytes of head and data that the transport has taken.
    sent: usize,
}

/// A transfer of the current step from another rank.
#[derive(Default)]
struct Receiving {
    head: [u8; HEADER_BYTES],
    /// Bytes of head and data that have arrived.
    got: usize,
    /// Bytes of an element that has arrived in part.
    part: [u8; 4],
    part_bytes: usize,
}

/// The header of a transfer that was received before its step ([`Call::look_around`]).
#[derive(Clone, Copy, Default)]
struct Early {
    head: [u8; HEADER_BYTES],
    got: usize,
}

impl Early {
    /// Takes these bytes first, then what the transport has.
    fn receive(
        &mut self,
        transport: &mut dyn Transport,
        peer: usize,
        into: &mut [u8],
        is_bulk: bool,
    ) -> Result<usize, Loss> {
        if self.got == 0 {
            return transport.receive(peer, into, is_bulk);
        }
        let count = self.got.min(into.len());
        into[..count].copy_from_slice(&self.head[..count]);
        self.head.copy_within(count.., 0);
        self.got -= count;
        Ok(count)
    }
}

/// The state of a call; used again for the next one.
pub struct Call {
    operation: Operation,
    element: Element,
    sequence: u64,
    count: u64,
    schedule: Arc<Schedule>,
    step: usize,
    sends: Vec<Sending>,
    receives: Vec<Receiving>,
    /// Transfers with each rank in this call.
    parts_sent: [u32; RANKS_MAX],
    parts_received: [u32; RANKS_MAX],
    early: [Early; RANKS_MAX],
    scratch: Vec<u8>,
    stage: Vec<u8>,
}

impl Default for Call {
    fn default() -> Self {
        let schedule = Schedule::new(Operation::Barrier, Element::Byte, 1, 0, 0);
        Self {
            operation: Operation::Barrier,
            element: Element::Byte,
            sequence: 0,
            count: 0,
            schedule: Arc::new(schedule),
            step: 0,
            sends: Vec::new(),
            receives: Vec::new(),
            parts_sent: [0; RANKS_MAX],
            parts_received: [0; RANKS_MAX],
            early: [Early::default(); RANKS_MAX],
            scratch: Vec::new(),
            stage: vec![0; STAGE_BYTES],
        }
    }
}

impl Call {
    /// Starts the next call of a group. `bytes`: of the data that every [`Self::advance`] gets.
    pub fn start(
        &mut self,
        operation: Operation,
        element: Element,
        bytes: usize,
        schedule: Arc<Schedule>,
    ) {
        (self.operation, self.element) = (operation, element);
        self.sequence += 1;
        self.count = (bytes / element.bytes()) as u64;
        if self.scratch.len() < schedule.scratch_bytes {
            self.scratch.resize(schedule.scratch_bytes, 0);
        }
        self.schedule = schedule;
        self.parts_sent = [0; RANKS_MAX];
        self.parts_received = [0; RANKS_MAX];
        self.begin_step(0);
    }

    /// The number of this call among those of the group, from 1.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    fn begin_step(&mut self, step: usize) {
        self.step = step;
        self.sends.clear();
        self.receives.clear();
        let schedule = self.schedule.clone();
        let Some(step) = schedule.steps.get(step) else { return };
        for send in &step.sends {
            let part = self.parts_sent[send.peer];
            self.parts_sent[send.peer] += 1;
            let header = self.header(part, send.range.len());
            self.sends.push(Sending { head: header.encode(), sent: 0 });
        }
        self.receives.extend(step.receives.iter().map(|_| Receiving::default()));
    }

    fn header(&self, part: u32, bytes: usize) -> Header {
        Header {
            operation: self.operation,
            element: self.element,
            part,
            sequence: self.sequence,
            count: self.count,
            bytes: bytes as u64,
        }
    }

    /// Moves what can be moved now.
    pub fn advance(
        &mut self,
        transport: &mut dyn Transport,
        data: &mut [u8],
    ) -> Result<Progress, CollectiveError> {
        let schedule = self.schedule.clone();
        for round in 0..ROUNDS_MAX {
            let Some(step) = schedule.steps.get(self.step) else { return Ok(Progress::Done) };
            let (mut wants, mut moved) = (Wants::default(), false);
            for (send, state) in step.sends.iter().zip(&mut self.sends) {
                let total = HEADER_BYTES + send.range.len();
                if state.sent < total {
                    let head = &state.head[state.sent.min(HEADER_BYTES)..];
                    let body = &data[send.range.clone()][state.sent.saturating_sub(HEADER_BYTES)..];
                    let body = &body[..body.len().min(SEND_BYTES_MAX)];
                    let sent = transport.send(send.peer, head, body, is_long(send.range.len()))?;
                    state.sent += sent;
                    moved |= sent > 0;
                    if state.sent < total {
                        wants.send |= 1 << send.peer;
                    }
                }
            }
            for (index, receive) in step.receives.iter().enumerate() {
                let total = HEADER_BYTES + receive.range.len();
                if self.receives[index].got < total {
                    moved |= self.receive(transport, data, receive, index)?;
                    if self.receives[index].got < total {
                        wants.receive |= 1 << receive.peer;
                    }
                }
            }
            if wants == Wants::default() {
                for local in &step.locals {
                    self.apply_local(data, local);
                }
                self.begin_step(self.step + 1);
            } else if !moved {
                // Something has moved if there were rounds before this one.
                return Ok(Progress::Stuck { wants, moved: round > 0 });
            }
        }
        Ok(Progress::Moved)
    }

    /// Returns whether something has arrived.
    fn receive(
        &mut self,
        transport: &mut dyn Transport,
        data: &mut [u8],
        receive: &Receive,
        index: usize,
    ) -> Result<bool, CollectiveError> {
        let total = HEADER_BYTES + receive.range.len();
        let allowed = match self.sends.first().filter(|_| receive.behind_send) {
            Some(send) if send.sent < total && !mutants::on("add_before_sending") => {
                send.sent.max(HEADER_BYTES) & !7
            }
            _ => total,
        };
        let state = &mut self.receives[index];
        let is_long = is_long(receive.range.len());
        let is_bulk = is_long && state.got >= HEADER_BYTES;
        let wanted = match is_long && !is_bulk {
            true => HEADER_BYTES - state.got,
            false => allowed.saturating_sub(state.got),
        };
        if wanted == 0 {
            return Ok(false);
        }
        if state.got >= HEADER_BYTES && receive.effect == Effect::Copy {
            let memory = match receive.memory {
                Memory::Data => data,
                Memory::Scratch => &mut self.scratch,
            };
            let at = receive.range.start + state.got - HEADER_BYTES;
            let got = transport.receive(receive.peer, &mut memory[at..][..wanted], is_bulk)?;
            state.got += got;
            return Ok(got > 0);
        }
        let (before, old) = (state.part_bytes, state.got);
        self.stage[..before].copy_from_slice(&state.part[..before]);
        let room = wanted.min(STAGE_BYTES - 8);
        let into = &mut self.stage[before..][..room];
        let early = &mut self.early[receive.peer];
        let got = early.receive(transport, receive.peer, into, is_bulk)?;
        if got == 0 {
            return Ok(false);
        }
        state.got += got;
        let mut bytes = &self.stage[..before + got];
        if old < HEADER_BYTES {
            let (head, rest) = bytes.split_at(got.min(HEADER_BYTES - old));
            state.head[old..][..head.len()].copy_from_slice(head);
            bytes = rest;
            if state.got < HEADER_BYTES {
                return Ok(true);
            }
            let head = state.head;
            let part = self.parts_received[receive.peer];
            self.parts_received[receive.peer] += 1;
            self.check(&head, receive, part)?;
        }
        // `before` bytes of an element arrived earlier; they are the first ones of `bytes`.
        let state = &mut self.receives[index];
        let at = receive.range.start + old.saturating_sub(HEADER_BYTES) - before;
        let (whole, rest) = match receive.effect {
            Effect::Copy => (bytes, &[][..]),
            Effect::Add => bytes.split_at(bytes.len() / 4 * 4),
        };
        state.part[..rest.len()].copy_from_slice(rest);
        state.part_bytes = if mutants::on("lose_part_of_element") { 0 } else { rest.len() };
        let memory = match receive.memory {
            Memory::Data => data,
            Memory::Scratch => &mut self.scratch,
        };
        apply(self.element, receive.effect, &mut memory[at..][..whole.len()], whole);
        Ok(true)
    }

    /// Compares the calls of all ranks that have sent something with this one. A rank that makes another call may have sent its
    /// header to a rank that waits for a third one, and all would wait until their deadlines. `peers`: those whose bytes are not
    /// waited for, a bit each.
    pub fn look_around(
        &mut self,
        transport: &mut dyn Transport,
        peers: u8,
    ) -> Result<(), CollectiveError> {
        for peer in (0..RANKS_MAX).filter(|peer| peers & 1 << peer != 0) {
            let early = &mut self.early[peer];
            if early.got < HEADER_BYTES {
                match transport.receive(peer, &mut early.head[early.got..], false) {
                    Ok(got) => early.got += got,
                    // This call may not need it; the transport decides that when it waits.
                    Err(Loss::Left(_) | Loss::Ended(_)) => continue,
                    Err(loss) => return Err(loss.into()),
                }
            }
            if early.got < HEADER_BYTES {
                continue;
            }
            let theirs = Header::decode(&early.head).ok_or(Loss::Garbage(peer))?;
            // A rank that is ahead has made this call, or it is compared when it is made here.
            if theirs.sequence == self.sequence
                && let Some(difference) = self.difference(&theirs, peer)
            {
                return Err(difference);
            }
        }
        Ok(())
    }

    /// Compares a header with what this rank expects.
    fn check(
        &self,
        head: &[u8; HEADER_BYTES],
        receive: &Receive,
        part: u32,
    ) -> Result<(), CollectiveError> {
        let garbage = CollectiveError::Lost(Loss::Garbage(receive.peer));
        let Some(theirs) = Header::decode(head) else { return Err(garbage) };
        let ours = self.header(part, receive.range.len());
        if theirs == ours || mutants::on("believe_calls") {
            return Ok(());
        }
        match self.difference(&theirs, receive.peer) {
            Some(difference) => Err(difference),
            None => Err(garbage),
        }
    }

    /// About what another rank's call differs from this one.
    fn difference(&self, theirs: &Header, rank: usize) -> Option<CollectiveError> {
        let ours = self.header(0, 0);
        let pairs = [
            ("number", theirs.sequence.to_string(), ours.sequence.to_string()),
            ("operation", name(theirs.operation).to_owned(), name(ours.operation).to_owned()),
            ("type", theirs.element.name().to_owned(), ours.element.name().to_owned()),
            ("root", root(theirs.operation), root(ours.operation)),
            ("count", theirs.count.to_string(), ours.count.to_string()),
        ];
        for (what, theirs, ours) in pairs {
            if theirs != ours {
                return Some(CollectiveError::Disagreement {
                    rank,
                    sequence: self.sequence,
                    what,
                    ours,
                    theirs,
                });
            }
        }
        None
    }

    fn apply_local(&mut self, data: &mut [u8], local: &crate::schedule::Local) {
        let (from, to) = (local.from.1.clone(), local.to.1.clone());
        match (local.from.0, local.to.0) {
            (Memory::Data, Memory::Scratch) => {
                apply(self.element, local.effect, &mut self.scratch[to], &data[from]);
            }
            (Memory::Scratch, Memory::Data) => {
                apply(self.element, local.effect, &mut data[to], &self.scratch[from]);
            }
            (Memory::Scratch, Memory::Scratch) => {
                let (low, high) = self.scratch.split_at_mut(from.start.max(to.start));
                let (from, to) = match from.start < to.start {
                    true => (&low[from], &mut high[..to.len()]),
                    false => (&high[..from.len()], &mut low[to]),
                };
                apply(self.element, local.effect, to, from);
            }
            (Memory::Data, Memory::Data) => unreachable!("no schedule has it"),
        }
    }
}

fn name(operation: Operation) -> &'static str {
    match operation {
        Operation::AllReduce => "all-reduce",
        Operation::Broadcast { .. } => "broadcast",
        Operation::Barrier => "barrier",
    }
}

fn root(operation: Operation) -> String {
    match operation {
        Operation::Broadcast { root } => root.to_string(),
        Operation::AllReduce | Operation::Barrier => "none".to_owned(),
    }
}

/// Copies or adds elements; the lengths are equal.
fn apply(element: Element, effect: Effect, to: &mut [u8], from: &[u8]) {
    match (effect, element) {
        (Effect::Copy, _) => to.copy_from_slice(from),
        (Effect::Add, Element::Float32) => combine(to, from, |to, from| {
            let sum = f32::from_ne_bytes(to) + f32::from_ne_bytes(from);
            let is_nan = sum.is_nan() && !mutants::on("keep_nan_bits");
            if is_nan { NAN } else { sum }.to_ne_bytes()
        }),
        (Effect::Add, Element::Int32) => combine(to, from, |to, from| {
            i32::from_ne_bytes(to).wrapping_add(i32::from_ne_bytes(from)).to_ne_bytes()
        }),
        (Effect::Add, Element::Byte) => unreachable!("bytes are only copied"),
    }
}

fn combine(to: &mut [u8], from: &[u8], add: impl Fn([u8; 4], [u8; 4]) -> [u8; 4]) {
    let (to, from) = (to.as_chunks_mut::<4>().0, from.as_chunks::<4>().0);
    for (to, from) in to.iter_mut().zip(from) {
        *to = add(*to, *from);
    }
}
