//! The transfers of one service on one worker: the rings of its blocks, and the commands in flight.

use std::ops::Range;
use std::sync::Arc;

use mqueue::abi::{TransferDone, status, transfer_status};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, RingError, Role, abi};
use wire::DropReason;
use wire::nic::LentStream;

use crate::base::keys::SlotId;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{FileSpec, Service};
use crate::base::transfers::{TransferOrder, TransferPlace, Transfers, refused};
use crate::endpoint::sockets::Unread;
use crate::service::ends::{MqueueEnds, OtherEnds};

/// How far a command has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its sink is a socket, whose connection was not asked for yet.
    Asked,
    /// The same, but it waited in its ring until its time was over.
    Late,
    /// It waits for the connection.
    Waits,
    Runs,
    /// Its transfer to a socket has ended and is answered; the connection was not given back yet.
    Ended {
        is_done: bool,
    },
}

/// A command that was taken.
pub(super) struct Asked {
    pub(super) number: u64,
    /// Of its command.
    tag: u64,
    order: TransferOrder,
    pub(super) stage: Stage,
}

impl Asked {
    pub(super) fn has_socket(&self) -> bool {
        matches!(self.order.sink, TransferPlace::Socket { .. })
    }

    /// Slot, lease and position of the socket that it writes to, if it is one of the block.
    pub(super) fn socket(&self, service: u16, block: u32) -> Option<(SlotId, u32, u64)> {
        let TransferPlace::Socket { slot, lease, position } = self.order.sink else { return None };
        Some((SlotId { service, slot, block }, lease, position))
    }
}

/// The commands of one block.
pub(super) struct Ring {
    /// Number of the block's server mqueue in the service share.
    pub(super) server: u32,
    /// Its number in the region.
    region_mqueue: u32,
    rx: Producer<MappedMemory>,
    tx: Consumer<MappedMemory>,
    rx_pending: bool,
    alive: bool,
    /// Commands taken whose answer is not in the RX ring yet.
    in_flight: u32,
    /// Time since which the command at the head of the TX ring cannot be taken; 0 when it can.
    blocked_since_ns: u64,
    /// Listed for another try in the next turn.
    is_listed: bool,
    /// `None`: the blocks run where no transfer reaches their memory.
    executor: Option<Box<dyn Transfers>>,
    pub(super) asked: Vec<Asked>,
    last: u64,
    /// Some of what was asked writes to sockets.
    pub(super) uses_sockets: bool,
}

impl Ring {
    fn new(server: u32, ends: MqueueEnds, limits: &Limits) -> Self {
        Self {
            server,
            region_mqueue: ends.mqueue,
            rx: ends.rx,
            tx: ends.tx,
            rx_pending: false,
            alive: true,
            in_flight: 0,
            blocked_since_ns: 0,
            is_listed: false,
            executor: ends.transfers,
            asked: Vec::with_capacity(2 * limits.in_flight_max as usize),
            last: 0,
            uses_sockets: false,
        }
    }

    fn is_overdue(&self, now_ns: u64, timeout_ns: u64) -> bool {
        self.blocked_since_ns != 0 && now_ns.saturating_sub(self.blocked_since_ns) > timeout_ns
    }
}

/// What the service sets for the transfers of a block.
struct Limits {
    backend: u16,
    timeout_ns: u64,
    in_flight_max: u32,
    memory_bytes: u64,
}

/// The transfers of one service on one worker.
pub(crate) struct ServiceTransfers {
    counters: Arc<ServiceCounters>,
    /// What transfers may use.
    files: Box<[FileSpec]>,
    limits: Box<[Limits]>,
    /// By block, and by entry of `limits`.
    pub(super) rings: Vec<Ring>,
    /// Rings with transfers that run.
    running: Vec<u32>,
    /// Rings that could not be emptied this turn, and those of the last turn.
    blocked: Vec<u32>,
    retried: Vec<u32>,
    /// Rings that got answers: their blocks must be rung.
    rung: Vec<u32>,
    /// Server mqueues of blocks that wrote impossible ring words.
    pub(super) corrupt: Vec<u32>,
}

impl ServiceTransfers {
    /// Of a service that has some.
    pub(crate) fn new(
        service: &Service,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Option<Box<Self>> {
        let of = |(backend, of): (usize, &crate::base::topology::Backend)| Limits {
            backend: backend as u16,
            timeout_ns: of.timeout_ms * 1_000_000,
            in_flight_max: of.in_flight,
            memory_bytes: of.memory_bytes,
        };
        let backends = service.backends.iter().enumerate();
        let limits: Box<[Limits]> =
            backends.filter(|(_, backend)| backend.does_transfers()).map(of).collect();
        if limits.is_empty() {
            return None;
        }
        let mut rings = Vec::new();
        let numbers: Box<[u16]> = limits.iter().map(|limits| limits.backend).collect();
        for of in ends {
            for (ends, limits) in of.take_clients(&numbers).into_iter().zip(&limits) {
                rings.push(Ring::new(of.server, ends, limits));
            }
        }
        Some(Box::new(Self {
            counters: counters.clone(),
            files: service.files.clone().into(),
            limits,
            running: Vec::with_capacity(rings.len()),
            blocked: Vec::with_capacity(rings.len()),
            retried: Vec::with_capacity(rings.len()),
            rung: Vec::with_capacity(rings.len()),
            corrupt: Vec::new(),
            rings,
        }))
    }

    fn limits(&self, ring: usize) -> &Limits {
        &self.limits[ring % self.limits.len()]
    }

    /// The time limit of a ring's transfers.
    pub(super) fn timeout_ns(&self, ring: usize) -> u64 {
        self.limits(ring).timeout_ns
    }

    /// The ring that has a role of a block.
    pub(super) fn ring_of(&self, role: Role, block: u32) -> Option<usize> {
        let Role::Client(backend) = role else { return None };
        let at = self.limits.iter().position(|limits| u32::from(limits.backend) == backend)?;
        Some(block as usize * self.limits.len() + at)
    }

    /// Installs the rings of the accelerator's next generation.
    pub(super) fn replace_rings(&mut self, ends: &mut [OtherEnds]) {
        let numbers: Box<[u16]> = self.limits.iter().map(|limits| limits.backend).collect();
        for of in ends {
            let first = of.server as usize * self.limits.len();
            for (at, ends) in of.take_clients(&numbers).into_iter().enumerate() {
                self.rings[first + at] = Ring::new(of.server, ends, &self.limits[at]);
            }
        }
    }

    /// Takes the commands of a block.
    pub(super) fn take_of_block(&mut self, block: u32, now_ns: u64) {
        let count = self.limits.len();
        for at in 0..count {
            self.take_commands(block as usize * count + at, now_ns);
        }
    }

    /// Tries the rings again that could not be emptied in the last turn.
    pub(super) fn take_again(&mut self, now_ns: u64) {
        std::mem::swap(&mut self.blocked, &mut self.retried);
        self.blocked.clear();
        for at in 0..self.retried.len() {
            let ring = self.retried[at] as usize;
            self.rings[ring].is_listed = false;
            self.take_commands(ring, now_ns);
        }
    }

    /// Takes the commands that a block has written.
    pub(super) fn take_commands(&mut self, ring: usize, now_ns: u64) {
        let (timeout_ns, most) = (self.limits(ring).timeout_ns, self.limits(ring).in_flight_max);
        loop {
            let entry = &mut self.rings[ring];
            if !entry.alive {
                return;
            }
            let header = match entry.tx.peek() {
                Ok(Some(header)) => header,
                Ok(None) => break,
                Err(RingError::BadHeader) => {
                    self.counters.drop_one(DropReason::BadMessage);
                    entry.tx.advance();
                    continue;
                }
                Err(RingError::Corrupt) => return self.set_corrupt(ring),
            };
            if header.kind != abi::kind::MESSAGE {
                self.counters.drop_one(DropReason::BadMessage);
                entry.tx.advance();
                continue;
            }
            let Ok(room) = entry.rx.room() else { return self.set_corrupt(ring) };
            let is_late = entry.is_overdue(now_ns, timeout_ns);
            let is_full = entry.in_flight >= most;
            let mut command = [0; COMMAND_BYTES];
            let len = header.len as usize;
            let is_whole = len <= COMMAND_BYTES;
            if is_full && !is_late
                || room <= entry.in_flight
                || is_whole && !entry.tx.copy_out(&header, &mut command[..len])
            {
                return self.block(ring, now_ns);
            }
            entry.blocked_since_ns = 0;
            entry.tx.advance();
            let command = if is_whole { &command[..len] } else { &[] };
            self.take_command(ring, header.tag, command, is_full);
        }
        self.rings[ring].tx.release();
    }

    fn block(&mut self, ring: usize, now_ns: u64) {
        let entry = &mut self.rings[ring];
        if entry.blocked_since_ns == 0 {
            entry.blocked_since_ns = now_ns.max(1);
        }
        entry.tx.release();
        if !std::mem::replace(&mut entry.is_listed, true) {
            self.blocked.push(ring as u32);
        }
    }

    /// Starts the transfer that a command asks for, or answers why not. `is_late`: it waited in its
    /// ring until its time was over.
    fn take_command(&mut self, ring: usize, tag: u64, command: &[u8], is_late: bool) {
        let order = TransferOrder::decode(command, &self.files, self.limits(ring).memory_bytes);
        let entry = &mut self.rings[ring];
        entry.in_flight += 1;
        match is_late {
            true => self.counters.backend_timeouts.one(),
            false => self.counters.backend_sent.one(),
        }
        let order = match order {
            Ok(order) if entry.executor.is_some() => order,
            // The blocks run where no transfer reaches their memory.
            Ok(_) => return self.answer(ring, tag, &refused(transfer_status::NOT_ALLOWED)),
            Err(_) if is_late => return self.answer_late(ring, tag),
            Err(status) => return self.answer(ring, tag, &refused(status)),
        };
        entry.last += 1;
        let stage = if is_late { Stage::Late } else { Stage::Asked };
        let asked = Asked { number: entry.last, tag, order, stage };
        if asked.has_socket() {
            entry.uses_sockets = true;
            return entry.asked.push(asked);
        }
        if is_late {
            return self.answer_late(ring, tag);
        }
        entry.asked.push(asked);
        let at = entry.asked.len() - 1;
        if !self.start(ring, at, None) {
            self.refuse(ring, at, transfer_status::EXHAUSTED);
        }
    }

    /// Starts the transfer of a command; false: the executor takes no more now.
    pub(super) fn start(&mut self, ring: usize, at: usize, socket: Option<LentStream>) -> bool {
        let entry = &mut self.rings[ring];
        let Some(executor) = entry.executor.as_mut().filter(|_| entry.alive) else { return false };
        let asked = &mut entry.asked[at];
        if !executor.start(asked.number, &asked.order, socket) {
            return false;
        }
        asked.stage = Stage::Runs;
        if !self.running.contains(&(ring as u32)) {
            self.running.push(ring as u32);
        }
        true
    }

    /// Answers a command whose transfer has not started.
    pub(super) fn refuse(&mut self, ring: usize, at: usize, status: u32) {
        let Asked { tag, .. } = self.rings[ring].asked.remove(at);
        self.answer(ring, tag, &refused(status));
    }

    fn answer(&mut self, ring: usize, tag: u64, done: &TransferDone) {
        self.answer_with(ring, tag, status::OK, &done.to_bytes());
    }

    /// Answers a command that was not looked at.
    fn answer_late(&mut self, ring: usize, tag: u64) {
        self.answer_with(ring, tag, status::TIMEOUT, &[]);
    }

    fn answer_with(&mut self, ring: usize, tag: u64, status: u8, payload: &[u8]) {
        let entry = &mut self.rings[ring];
        entry.in_flight -= 1;
        if !entry.alive {
            return;
        }
        let head = Head { token: 0, tag, kind: abi::kind::MESSAGE, status };
        // There is room for every answer, unless the block has broken the ring.
        match entry.rx.push(head, payload) {
            Ok(_) => {}
            Err(LoanError::TooLong | LoanError::Full | LoanError::Corrupt) => {
                return self.set_corrupt(ring);
            }
        }
        self.counters.backend_answered.one();
        if !std::mem::replace(&mut entry.rx_pending, true) {
            self.rung.push(ring as u32);
        }
    }

    /// The block wrote impossible ring words. Its server mqueue is closed too: the worker's
    /// housekeeping ends the requests there.
    fn set_corrupt(&mut self, ring: usize) {
        self.rings[ring].alive = false;
        self.corrupt.push(self.rings[ring].server);
    }

    /// Answers the commands whose transfers have ended.
    pub(super) fn end_transfers(&mut self) {
        for at in (0..self.running.len()).rev() {
            let ring = self.running[at] as usize;
            while let Some((tag, done)) = self.next_done(ring) {
                self.answer(ring, tag, &done);
            }
            if !self.rings[ring].asked.iter().any(|asked| asked.stage == Stage::Runs) {
                self.running.swap_remove(at);
            }
        }
    }

    fn next_done(&mut self, ring: usize) -> Option<(u64, TransferDone)> {
        let Ring { executor, asked, .. } = &mut self.rings[ring];
        let executor = executor.as_mut()?;
        loop {
            let (number, done) = executor.next()?;
            let is_it = |asked: &Asked| {
                let is_meant = asked.number == number || mutants::on("answer_another_transfer");
                is_meant && asked.stage == Stage::Runs
            };
            // An executor that repeats itself changes nothing.
            let Some(found) = asked.iter().position(is_it) else { continue };
            let tag = asked[found].tag;
            if asked[found].has_socket() {
                let is_done = done.status == transfer_status::OK;
                asked[found].stage = Stage::Ended { is_done };
            } else {
                asked.remove(found);
            }
            return Some((tag, done));
        }
    }

    /// Publishes answers: calls `ring` with the server mqueue and the mqueue of each block that got
    /// some.
    pub(super) fn publish(&mut self, mut ring: impl FnMut(u32, u32)) {
        for rung in self.rung.drain(..) {
            let entry = &mut self.rings[rung as usize];
            entry.rx.publish();
            entry.rx_pending = false;
            ring(entry.server, entry.region_mqueue);
        }
    }

    /// These blocks have ended: what they had asked for is cancelled.
    pub(super) fn end_blocks(&mut self, blocks: &Range<u32>) {
        let Self { rings, running, rung, corrupt, .. } = self;
        let is_gone = |ring: &u32| blocks.contains(&rings[*ring as usize].server);
        running.retain(|ring| !is_gone(ring));
        rung.retain(|ring| !is_gone(ring));
        corrupt.retain(|server| !blocks.contains(server));
        for entry in rings.iter_mut().filter(|entry| blocks.contains(&entry.server)) {
            (entry.alive, entry.rx_pending, entry.in_flight) = (false, false, 0);
            entry.uses_sockets = false;
            entry.asked.clear();
            // The next generation gets another one.
            if !mutants::on("keep_transfers_of_ended_blocks") {
                entry.executor = None;
            }
        }
    }

    /// Commands of a ring that are to be taken before anything is sent on sockets of its block.
    pub(super) fn unread(&self, ring: usize, now_ns: u64) -> Unread {
        let entry = &self.rings[ring];
        let has_unread_answers = entry.rx.released() < entry.rx.committed();
        match entry.is_listed {
            false => Unread::None,
            true if entry.is_overdue(now_ns, self.timeout_ns(ring)) && has_unread_answers => {
                Unread::Stuck
            }
            true => Unread::Waiting,
        }
    }

    /// Whether a ring could not be emptied, or a block must be rung.
    pub(super) fn has_work(&self) -> bool {
        !self.blocked.is_empty()
            || !self.rung.is_empty()
            || self.rings.iter().any(|ring| {
                let waits = |asked: &Asked| !matches!(asked.stage, Stage::Runs | Stage::Waits);
                ring.asked.iter().any(waits)
            })
    }

    /// Whether commands are not answered.
    pub(super) fn is_busy(&self) -> bool {
        self.rings.iter().any(|ring| ring.in_flight > 0)
    }

    /// The same of blocks that run, and commands that are not taken.
    pub(super) fn asks(&self, is_alive: impl Fn(u32) -> bool) -> bool {
        let waits = |ring: &Ring| ring.in_flight > 0 || ring.is_listed;
        self.rings.iter().any(|ring| waits(ring) && is_alive(ring.server))
    }
}

/// Bytes of a command.
const COMMAND_BYTES: usize = size_of::<abi::TransferCommand>();
