//! The scoreboard: an entry for every transfer, and a queue of steps for each kind of device.
//!
//! An entry is in one state at a time: queued for a step on a file, on a socket or on an accelerator's memory, running (one thread has
//! it), or waiting for a socket. Queues of the transfers of one tenant are first in, first out, and a step is one chunk, so they take turns by chunk; tenants take
//! turns by their weights (`scoreboard/turns.rs`). A
//! chunk that has just been made by one device goes on to the other at once, while it is in the cache of the thread's
//! core ([`Scoreboard::take`]).
//!
//! As many steps run at a time as there are threads. A step on a file or an accelerator that takes longer than [`SLOW_NS`] is
//! *slow*: its file may hang (FUSE, a network file system without its server), or the accelerator, so another step runs beside it, up to
//! [`SLOW_MAX`] slow ones, which callers and tenants share (`scoreboard/slow.rs`). When the time of its transfer is over, the transfer is *abandoned*: its caller gets the
//! answer, and what the step returns later is dropped. Steps on sockets do not block and are never abandoned, so
//! counts stay exact.
//!
//! Pure: time is an argument (nanoseconds), and `T` is whatever the steps need.

mod by_device;
mod slow;
mod turns;

use std::collections::VecDeque;

use crate::command::device::{Blocked, Device, End};
use crate::command::error::TransferError;
use crate::command::limits::SMALL_CHUNKS_MAX;
use crate::command::pipeline::TimeLimits;
use crate::run::apart::{Apart, TOGETHER_MAX};
use crate::run::stall::StallTimer;
use crate::stages::buffer::Buffers;
pub use by_device::AtWork;

pub use slow::{GONE_MAX, OF_CALLER_MAX, OF_TENANT_MAX, SLOW_MAX};
use slow::{Limits, Step, Who};
pub use turns::Share;
use turns::Turns;

/// A file step that takes longer than this is slow.
pub const SLOW_NS: u64 = 100_000_000;
/// A transfer whose file step is younger than this is not abandoned: the step may be about to return.
pub const ABANDON_NS: u64 = 500_000_000;
/// Steps on devices that go before a chunk for stages apart.
const PASSED_MAX: usize = 2 * TOGETHER_MAX;

/// The kinds of devices in the order in which their queues are asked: steps on sockets are short.
const ORDER: [Device; Device::ALL.len()] = [Device::Socket, Device::File, Device::Accelerator];

/// No slot is as large: the bit is free in numbers of entries.
const SINK_BIT: u64 = 1 << 31;

/// Identifies an entry. Numbers of ended entries are not used again for 2^32 entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryId(u64);

impl EntryId {
    /// As a number.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// From its number.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// A number of one end of it.
    pub fn key(self, end: End) -> u64 {
        match end {
            End::Source => self.0,
            End::Sink => self.0 | SINK_BIT,
        }
    }

    /// The entry and the end with this number.
    pub fn from_key(key: u64) -> (Self, End) {
        let end = if key & SINK_BIT == 0 { End::Source } else { End::Sink };
        (Self(key & !SINK_BIT), end)
    }

    fn slot(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }
}

/// What the scoreboard asks the work of an entry.
pub trait Work {
    /// What is needed to answer the caller of an abandoned transfer.
    type Handle: Clone;
    /// That of this work.
    fn handle(&self) -> Self::Handle;
    /// The end of the next step; `None`: a socket has to become ready first. `blocked`: those that are not ready now.
    fn next(&self, blocked: Blocked) -> Option<End>;
    /// The kind of the device at an end.
    fn device(&self, end: End) -> Device;
    /// The device numbers of the file systems of source and sink, if they are files.
    fn blocks(&self) -> [Option<u64>; 2] {
        [None; 2]
    }
    /// Whether its chunks go through stages apart.
    fn batches(&self) -> bool {
        false
    }
    /// Whose turns it takes.
    fn share(&self) -> Share {
        Share::default()
    }
    /// Who asked for it, among those of its tenant; 0: the engine's own process.
    fn caller(&self) -> u64 {
        0
    }
    /// Whether a step at this end may not return.
    fn may_hang(&self, end: End) -> bool {
        self.device(end).has_positions()
    }
    /// Bytes that a step moves at most.
    fn chunk_bytes(&self) -> usize {
        0
    }
    /// Whether a chunk waits for them.
    fn has_fresh(&self) -> bool {
        false
    }
    /// Up to `most` chunks.
    fn part_for_stages(&mut self, most: usize) -> Option<Apart> {
        let _ = most;
        None
    }
    /// Takes back what was apart. Returns the bytes that moved.
    fn join(&mut self, _: Apart, _: &mut Buffers) -> u64 {
        0
    }
    /// How it ended, if everything has been done.
    fn ended(&self) -> Option<Result<(), TransferError>> {
        None
    }
}

/// What became of an entry that was given back.
#[derive(Debug)]
pub enum GivenBack<T> {
    /// It goes on.
    Kept,
    /// It has ended, or it was cancelled while it ran.
    Ended(T, Result<(), TransferError>),
    /// It was abandoned while it ran: its caller has been answered.
    Abandoned(T),
}

/// A transfer that ends before its work is done.
#[derive(Debug)]
pub enum Expired<T: Work> {
    /// It did not run.
    Ended(T, TransferError),
    /// A thread has its work, and may not return it.
    Abandoned(T::Handle, TransferError),
}

/// What a device has to do at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Bytes of the chunks whose steps wait for a thread or run.
    pub bytes: u64,
    /// Steps that run.
    pub running: u64,
}

/// Transfers whose next step waits for a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queued {
    /// By the device of the step, as in [`Device::ALL`].
    pub devices: [usize; Device::ALL.len()],
    /// For digests that take chunks of several transfers at a time.
    pub digests: usize,
}

/// What an entry does at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Its next step is in the queue of a device.
    Queued,
    /// A thread executes a step.
    Running,
    /// A socket is not ready.
    Waiting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queued(Device, End),
    Running(Device, End),
    Waiting,
}

struct Entry<T: Work> {
    id: EntryId,
    /// Of a transfer that has an entry already.
    is_part: bool,
    handle: T::Handle,
    share: Share,
    who: Who,
    /// Whether a step at source and sink may not return.
    may_hang: [bool; 2],
    chunk_bytes: usize,
    /// Of the files of source and sink.
    blocks: [Option<u64>; 2],
    state: State,
    /// Not while it runs.
    work: Option<T>,
    cancelled: bool,
    /// It is in the queue for stages.
    in_stages_queue: bool,
    batches: bool,
    /// Parts that are apart, and those that came back while it ran, each with whether the socket of the sink was full.
    apart: usize,
    back: Vec<(Apart, bool)>,
    /// Sockets that are not ready.
    blocked: Blocked,
    /// Sockets that became ready during the step.
    ready: Blocked,
    time_limits: TimeLimits,
    started_ns: u64,
    stall: StallTimer,
    /// When the step began that runs.
    step_ns: u64,
}

impl<T: Work> Entry<T> {
    fn moved(&mut self, bytes: u64, now_ns: u64) {
        self.stall.moved(bytes, now_ns, self.time_limits.stall_ns);
    }

    /// Whether its step at this end may not return.
    fn may_hang(&self, end: End) -> bool {
        self.may_hang[usize::from(end == End::Sink)]
    }

    /// Why its time is over, if it is.
    fn expired(&self, now_ns: u64, limits: &Limits) -> Option<TransferError> {
        let runs = self.work.is_none();
        // Parts come back soon, and with them the last counts.
        if self.apart > self.back.len() {
            return None;
        }
        if runs
            && (!matches!(self.state, State::Running(_, end) if self.may_hang(end))
                || now_ns.saturating_sub(self.step_ns) < ABANDON_NS)
        {
            return None;
        }
        if runs && self.cancelled {
            return Some(TransferError::Cancelled);
        }
        let over = self.stall.left(now_ns, self.started_ns, self.time_limits).err()?;
        Some(match (over, self.state) {
            (TransferError::Stalled(ms), State::Running(device, _)) if runs => device.stalled(ms),
            (TransferError::Stalled(ms), State::Queued(device, end))
                if self.may_hang(end) && limits.hold(self.who) =>
            {
                device.stalled(ms)
            }
            (over, _) => over,
        })
    }
}

/// The entries and queues.
pub struct Scoreboard<T: Work> {
    slots: Vec<Option<Entry<T>>>,
    free: Vec<usize>,
    generation: u32,
    /// Of each kind of device.
    queues: [Turns; Device::ALL.len()],
    /// Those with chunks for stages apart.
    stages: VecDeque<EntryId>,
    /// Steps that went before them.
    passed: usize,
    /// Transfers whose chunks go there.
    batching: usize,
    /// Threads that have some.
    stage_groups: usize,
    /// Steps that run and are not slow.
    steps: Vec<Step>,
    /// Threads that do something apart.
    groups: usize,
    /// Slow steps, also those of abandoned transfers.
    slow: Vec<Step>,
    /// Whose steps do not start for them.
    limits: Limits,
    entries_max: usize,
    steps_max: usize,
    /// Entries that are further parts of transfers.
    parts: usize,
}

impl<T: Work> Scoreboard<T> {
    /// Room for `entries_max` transfers, and `steps_max` steps at a time.
    pub fn new(entries_max: usize, steps_max: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
            queues: Default::default(),
            stages: VecDeque::new(),
            passed: 0,
            batching: 0,
            stage_groups: 0,
            steps: Vec::new(),
            groups: 0,
            slow: Vec::new(),
            limits: Limits::default(),
            entries_max,
            steps_max,
            parts: 0,
        }
    }

    /// What an entry does; `None`: it has ended.
    pub fn activity(&self, id: EntryId) -> Option<Activity> {
        let entry = self.slots.get(id.slot())?.as_ref().filter(|entry| entry.id == id)?;
        Some(match entry.state {
            _ if entry.apart > 0 => Activity::Running,
            State::Queued(..) => Activity::Queued,
            State::Running(..) => Activity::Running,
            State::Waiting => Activity::Waiting,
        })
    }

    /// Entries whose next step waits for a thread.
    pub fn queued(&self) -> Queued {
        Queued { devices: self.queues.each_ref().map(Turns::len), digests: self.stages.len() }
    }

    /// Bytes of the chunks whose steps are queued or run, by the device of the step, and how many run.
    pub fn in_flight(&self) -> [InFlight; Device::ALL.len()] {
        let mut all = [InFlight::default(); Device::ALL.len()];
        for entry in self.slots.iter().flatten() {
            let (device, running) = match entry.state {
                State::Queued(device, _) => (device, 0),
                State::Running(device, _) => (device, 1),
                State::Waiting => continue,
            };
            let of = &mut all[device as usize];
            of.bytes += entry.chunk_bytes as u64;
            of.running += running;
        }
        all
    }

    /// Transfers in flight. Further parts of one do not count.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len() - self.parts
    }

    /// Whether there are no entries: neither transfers nor parts whose first one has ended.
    pub fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// Adds a transfer, or returns it if there is no room. `time_limits` counts from `now_ns`.
    pub fn insert(&mut self, work: T, time_limits: TimeLimits, now_ns: u64) -> Result<EntryId, T> {
        if self.len() >= self.entries_max {
            return Err(work);
        }
        Ok(self.add(work, time_limits, now_ns, false))
    }

    /// Adds a further part of a transfer.
    pub fn insert_part(&mut self, work: T, time_limits: TimeLimits, now_ns: u64) -> EntryId {
        self.parts += 1;
        self.add(work, time_limits, now_ns, true)
    }

    fn add(&mut self, work: T, time_limits: TimeLimits, now_ns: u64, is_part: bool) -> EntryId {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.generation = self.generation.wrapping_add(1);
        let id = EntryId(u64::from(self.generation) << 32 | slot as u64);
        let end = work.next(Blocked::default()).unwrap_or(End::Source);
        let (first, handle, batches) = (work.device(end), work.handle(), work.batches());
        let (share, chunk_bytes) = (work.share(), work.chunk_bytes());
        let who = Who::new(share, work.caller());
        let may_hang = [End::Source, End::Sink].map(|end| work.may_hang(end));
        let blocks = work.blocks();
        self.batching += usize::from(batches);
        self.slots[slot] = Some(Entry {
            id,
            is_part,
            handle,
            share,
            who,
            may_hang,
            chunk_bytes,
            blocks,
            state: State::Queued(first, end),
            work: Some(work),
            cancelled: false,
            in_stages_queue: false,
            batches,
            apart: 0,
            back: Vec::new(),
            blocked: Blocked::default(),
            ready: Blocked::default(),
            time_limits,
            started_ns: now_ns,
            stall: StallTimer::begin(now_ns),
            step_ns: now_ns,
        });
        self.queue(first).push_back(id, share);
        id
    }

    /// The next step: the second half of a chunk that the thread has just made (`last`), else a step on a socket,
    /// else one on another device. [`Self::give_back`] ends it.
    pub fn take(&mut self, last: Option<EntryId>, now_ns: u64) -> Option<(EntryId, End, T)> {
        let is_fresh = |device: &Device| {
            last.is_some() && self.queues[*device as usize].fresh() == last.as_ref()
        };
        let device = ORDER.into_iter().filter(|device| self.may_start(*device));
        let device = device.clone().find(is_fresh).or_else(|| device.clone().next())?;
        let (slots, limits) = (&self.slots, &self.limits);
        let id = self.queues[device as usize].pop_front(|id| may_start(slots, limits, id))?;
        let who = self.entry(id).expect("queues have live entries").who;
        self.steps.push(Step { id, who, gone: false });
        let entry = self.entry(id).expect("queues have live entries");
        let State::Queued(_, end) = entry.state else { unreachable!("it is in a queue") };
        entry.state = State::Running(device, end);
        entry.step_ns = now_ns;
        let work = entry.work.take().expect("only running entries have none");
        Some((id, end, work))
    }

    /// Whether [`Self::take`] would return something.
    pub fn has_work(&self) -> bool {
        self.may_start_any() || (!self.is_busy() && self.is_gathered())
    }

    /// Whether chunks wait for stages apart, and no thread looks for more of them.
    pub fn has_parts(&self) -> bool {
        !self.is_busy() && !self.stages.is_empty() && self.stage_groups == 0
    }

    /// Whether as many chunks wait for stages apart as can be expected to come together.
    fn is_gathered(&self) -> bool {
        self.stages.len() >= self.batching.div_ceil(2).clamp(1, TOGETHER_MAX)
    }

    fn may_start_any(&self) -> bool {
        ORDER.into_iter().any(|device| self.may_start(device))
    }

    /// Chunks of transfers for stages apart; empty: there are none, or steps on devices come first, so that more chunks come together.
    /// `looked`: the caller has just seen which sockets are ready. [`Self::give_parts_back`] ends it.
    pub fn take_parts(&mut self, looked: bool) -> Vec<(EntryId, Apart)> {
        let mut parts = Vec::new();
        // The chunks of one transfer follow one another, and no other chunks come: nothing is gained by waiting.
        let is_alone = self.batching == 1;
        let most = if is_alone { SMALL_CHUNKS_MAX } else { 1 };
        let may_wait = !is_alone
            && self.stages.len() < TOGETHER_MAX
            && self.passed < PASSED_MAX
            && (self.may_start_any() || (!self.is_gathered() && !looked));
        // The thread that has others takes these afterwards.
        let others_come_first = self.stage_groups > 0 && !self.is_gathered();
        if self.stages.is_empty() || self.is_busy() || may_wait || others_come_first {
            self.passed += usize::from(!self.stages.is_empty());
            return parts;
        }
        self.passed = 0;
        while parts.len() < TOGETHER_MAX
            && let Some(id) = self.stages.pop_front()
        {
            let Some(entry) = self.entry(id) else { continue };
            entry.in_stages_queue = false;
            // One that runs is queued again when it is given back.
            let part = entry.work.as_mut().and_then(|work| work.part_for_stages(most));
            if let Some(part) = part {
                entry.apart += 1;
                parts.push((id, part));
            }
        }
        self.groups += usize::from(!parts.is_empty());
        self.stage_groups += usize::from(!parts.is_empty());
        parts
    }

    /// Notes that a part of a transfer that a step has taken is apart.
    pub fn begin_part(&mut self, id: EntryId) {
        let entry = self.entry(id).expect("it runs");
        entry.apart += 1;
        self.groups += 1;
    }

    /// Ends what a thread did apart; with whether the socket of the sink is full, as of [`Self::give_back`]. Returns the
    /// transfers that have ended, and what was apart of abandoned ones.
    pub fn give_parts_back(
        &mut self,
        parts: Vec<(EntryId, Apart, bool)>,
        buffers: &mut Buffers,
        now_ns: u64,
    ) -> Vec<(T, Result<(), TransferError>)> {
        self.groups -= 1;
        self.stage_groups -=
            usize::from(parts.iter().any(|(_, part, _)| matches!(part, Apart::Stages(_))));
        let mut ended = Vec::new();
        for (id, part, blocked) in parts {
            let Some(entry) = self.entry(id) else { continue };
            entry.back.push((part, blocked));
            if entry.work.is_some()
                && let GivenBack::Ended(work, result) = self.settle(id, None, buffers, now_ns)
            {
                ended.push((work, result));
            }
        }
        ended
    }

    /// Whether as many steps run as may.
    pub fn is_busy(&self) -> bool {
        self.steps.len() + self.groups >= self.steps_max
    }

    /// Steps that are slow; each has a thread.
    pub fn slow_steps(&self) -> usize {
        self.slow.len()
    }

    /// Whether a step is queued for this kind of device that can start.
    fn may_start(&self, device: Device) -> bool {
        let queue = &self.queues[device as usize];
        let has_one = match self.limits.are_none() {
            true => !queue.is_empty(),
            false => queue.any(|id| may_start(&self.slots, &self.limits, id)),
        };
        has_one && !self.is_busy()
    }

    /// A caller has gone: its steps that hang take no places.
    pub fn forget_caller(&mut self, caller: u64) {
        for step in self.steps.iter_mut().chain(&mut self.slow) {
            step.gone |= step.who.is_of(caller);
        }
        self.limits = Limits::of(&self.slow);
    }

    /// Ends a step whose transfer goes on. `blocked`: the socket of its end is not ready, and the caller has asked for its readiness before.
    /// `moved`: the bytes that it read and wrote.
    pub fn give_back(
        &mut self,
        id: EntryId,
        work: T,
        blocked: bool,
        moved: u64,
        buffers: &mut Buffers,
        now_ns: u64,
    ) -> GivenBack<T> {
        self.end_step(id);
        let Some(entry) = self.entry(id) else { return GivenBack::Abandoned(work) };
        let State::Running(_, end) = entry.state else { unreachable!("it runs") };
        entry.moved(moved, now_ns);
        *entry.blocked.of(end) |= blocked;
        entry.work = Some(work);
        entry.state = State::Waiting;
        self.settle(id, Some(end), buffers, now_ns)
    }

    /// Joins what came back, and queues the next step of an entry that does not run. `step`: the end at which it has just done a step.
    fn settle(
        &mut self,
        id: EntryId,
        step: Option<End>,
        buffers: &mut Buffers,
        now_ns: u64,
    ) -> GivenBack<T> {
        let entry = self.entry(id).expect("the caller has looked");
        let mut work = entry.work.take().expect("it does not run");
        // The end that has just been tried: an event that came before is used up.
        let mut tried =
            Blocked { source: step == Some(End::Source), sink: step == Some(End::Sink) };
        for (part, blocked) in std::mem::take(&mut entry.back) {
            entry.apart -= 1;
            tried.sink |= matches!(part, Apart::Send(_));
            let moved = work.join(part, buffers);
            entry.moved(moved, now_ns);
            entry.blocked.sink |= blocked;
        }
        // An event may have come before the step or the part that asked for it was given back.
        let ready = entry.ready;
        entry.blocked.source &= !ready.source;
        entry.blocked.sink &= !ready.sink;
        entry.ready.source &= !tried.source;
        entry.ready.sink &= !tried.sink;
        if entry.apart == 0 || mutants::on("end_before_chunks_come_back") {
            entry.ready = Blocked::default();
            let cancelled = entry.cancelled.then_some(Err(TransferError::Cancelled));
            if let Some(result) = cancelled.or_else(|| work.ended()) {
                self.remove(id);
                return GivenBack::Ended(work, result);
            }
        }
        let cancelled = entry.cancelled;
        let next = match entry.state {
            State::Waiting if !cancelled => {
                work.next(entry.blocked).map(|end| (work.device(end), end))
            }
            _ => None,
        };
        let share = entry.share;
        let is_fresh = work.has_fresh() && !cancelled && !entry.in_stages_queue;
        entry.in_stages_queue |= is_fresh;
        entry.work = Some(work);
        if let Some((device, end)) = next {
            entry.state = State::Queued(device, end);
            match (step, end) {
                (Some(End::Source), End::Sink) => self.queue(device).push_front(id),
                _ => self.queue(device).push_back(id, share),
            }
        }
        if is_fresh {
            self.stages.push_back(id);
        }
        GivenBack::Kept
    }

    /// Ends a step that was the last one of its transfer. Returns whether the transfer had not been abandoned.
    pub fn finish(&mut self, id: EntryId) -> bool {
        self.end_step(id);
        let stayed = self.entry(id).is_some();
        self.remove(id);
        stayed
    }

    /// The socket of this end of an entry is ready. Ignored for an entry that has ended.
    pub fn ready(&mut self, id: EntryId, end: End) {
        let Some(entry) = self.entry(id) else { return };
        *entry.blocked.of(end) = false;
        *entry.ready.of(end) |= entry.apart > 0;
        if entry.cancelled {
            return;
        }
        match entry.state {
            State::Waiting => {
                let Some(work) = &entry.work else { return };
                // Otherwise the socket of the other end is what it waits for.
                let Some(end) = work.next(entry.blocked) else { return };
                let device = work.device(end);
                entry.state = State::Queued(device, end);
                let share = entry.share;
                self.queue(device).push_back(id, share);
            }
            State::Running(..) => *entry.ready.of(end) = true,
            State::Queued(..) => {}
        }
    }

    /// Cancels a transfer. Returns its work, unless it is running (then [`Self::give_back`] returns it, or
    /// [`Self::expire`] abandons it) or has ended.
    pub fn cancel(&mut self, id: EntryId) -> Option<T> {
        let entry = self.entry(id)?;
        match entry.state {
            State::Running(..) => {}
            _ if entry.apart == 0 || mutants::on("cancel_while_chunks_are_away") => {
                return self.remove(id);
            }
            State::Queued(device, _) => {
                entry.state = State::Waiting;
                self.queue(device).remove(id);
            }
            State::Waiting => {}
        }
        self.entry(id)?.cancelled = true;
        None
    }

    /// Removes the entries whose time is over, and notes which steps are slow. An entry that runs is removed if its file or accelerator
    /// does not answer; others that run are asked again when they have been given back.
    pub fn expire(&mut self, now_ns: u64) -> Vec<Expired<T>> {
        let slots = &self.slots;
        let is_slow = |step: &Step| match &slots[step.id.slot()] {
            Some(entry) if entry.id == step.id => {
                matches!(entry.state, State::Running(_, end) if entry.may_hang(end))
                    && now_ns.saturating_sub(entry.step_ns) >= SLOW_NS
            }
            // It has been abandoned.
            _ => true,
        };
        let (slow, others): (Vec<Step>, Vec<Step>) = self.steps.iter().copied().partition(is_slow);
        self.steps = others;
        if !slow.is_empty() {
            self.slow.extend(slow);
            self.limits = Limits::of(&self.slow);
        }
        let limits = &self.limits;
        let over = |entry: &Entry<T>| Some((entry.id, entry.expired(now_ns, limits)?));
        let over: Vec<_> = self.slots.iter().flatten().filter_map(over).collect();
        let end = |(id, error)| {
            let handle = self.entry(id)?.handle.clone();
            Some(match self.remove(id) {
                Some(work) => Expired::Ended(work, error),
                None => Expired::Abandoned(handle, error),
            })
        };
        over.into_iter().filter_map(end).collect()
    }

    /// When [`Self::expire`] has something to do at the earliest.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        let of = |entry: &Entry<T>| {
            let stall = entry.stall.moved_ns.saturating_add(entry.time_limits.stall_ns);
            let total = entry.time_limits.deadline_ns.map(|ns| entry.started_ns.saturating_add(ns));
            total.map_or(stall, |total| total.min(stall))
        };
        self.slots.iter().flatten().filter(|entry| entry.work.is_some()).map(of).min()
    }

    /// Removes all entries that do not run, and marks the others as cancelled.
    pub fn clear(&mut self) -> Vec<T> {
        let ids: Vec<EntryId> = self.slots.iter().flatten().map(|entry| entry.id).collect();
        ids.into_iter().filter_map(|id| self.cancel(id)).collect()
    }

    /// Removes the entries that run, whose work does not come back in time.
    pub fn abandon(&mut self) -> Vec<T::Handle> {
        let running = self.slots.iter().flatten().filter(|entry| entry.work.is_none());
        let running: Vec<_> = running.map(|entry| (entry.id, entry.handle.clone())).collect();
        let abandoned = running.into_iter().map(|(id, handle)| {
            self.remove(id);
            handle
        });
        abandoned.collect()
    }

    fn end_step(&mut self, id: EntryId) {
        self.steps.retain(|step| step.id != id);
        let before = self.slow.len();
        self.slow.retain(|slow| slow.id != id);
        if self.slow.len() < before {
            self.limits = Limits::of(&self.slow);
        }
    }

    fn queue(&mut self, device: Device) -> &mut Turns {
        &mut self.queues[device as usize]
    }

    fn entry(&mut self, id: EntryId) -> Option<&mut Entry<T>> {
        self.slots.get_mut(id.slot())?.as_mut().filter(|entry| entry.id == id)
    }

    fn remove(&mut self, id: EntryId) -> Option<T> {
        let entry = self.slots.get_mut(id.slot())?.take_if(|entry| entry.id == id)?;
        self.free.push(id.slot());
        self.parts -= usize::from(entry.is_part);
        self.batching -= usize::from(entry.batches);
        if entry.in_stages_queue {
            self.stages.retain(|queued| *queued != id);
        }
        if let State::Queued(device, _) = entry.state {
            self.queue(device).remove(id);
        }
        entry.work
    }
}

/// Whether the step for which an entry is queued may start while others hang.
fn may_start<T: Work>(slots: &[Option<Entry<T>>], limits: &Limits, id: EntryId) -> bool {
    if limits.are_none() {
        return true;
    }
    let entry = slots[id.slot()].as_ref().expect("queues have live entries");
    let State::Queued(_, end) = entry.state else { unreachable!("it is in a queue") };
    !entry.may_hang(end) || !limits.hold(entry.who)
}

#[cfg(test)]
mod tests;
