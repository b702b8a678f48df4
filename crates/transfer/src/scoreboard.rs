//! The scoreboard: an entry for every transfer, and a queue of steps for each kind of device.
//!
//! An entry is in one state at a time: queued for a file step, queued for a socket step, running (one thread has
//! it), or waiting for its socket. Queues are first in, first out, and a step is one chunk, so transfers take turns by chunk. A
//! chunk that has just been made by one device goes on to the other at once, while it is in the cache of the thread's
//! core ([`Scoreboard::take`]). At most one file step runs at a time: a file that hangs (a dead network file
//! system) leaves the other thread to the sockets.
//!
//! Pure: time is an argument (nanoseconds), and `T` is whatever the steps need.

use std::collections::VecDeque;

use crate::error::TransferError;
use crate::flow::Device;

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

    fn slot(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }
}

/// How long an entry may take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Without progress.
    pub stall_ns: u64,
    /// In all.
    pub deadline_ns: Option<u64>,
}

/// What the scoreboard asks the work of an entry.
pub trait Work {
    /// The device of the next step; `None`: the socket has to become ready first. `blocked`: it is not ready now.
    fn next(&self, blocked: bool) -> Option<Device>;
    /// The device that makes chunks.
    fn source(&self) -> Device;
}

/// What became of an entry that was given back.
#[derive(Debug)]
pub enum GivenBack<T> {
    /// It goes on.
    Kept,
    /// It was cancelled while it ran.
    Ended(T, TransferError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queued(Device),
    Running(Device),
    Waiting,
}

struct Entry<T> {
    id: EntryId,
    state: State,
    /// Not while it runs.
    work: Option<T>,
    cancelled: bool,
    /// Its socket is not ready.
    blocked: bool,
    /// The socket became ready during the step.
    ready: bool,
    patience: Patience,
    started_ns: u64,
    moved_ns: u64,
}

/// The entries and queues.
pub struct Scoreboard<T> {
    slots: Vec<Option<Entry<T>>>,
    free: Vec<usize>,
    generation: u32,
    files: VecDeque<EntryId>,
    sockets: VecDeque<EntryId>,
    file_step_runs: bool,
    entries_max: usize,
}

impl<T: Work> Scoreboard<T> {
    /// Room for `entries_max` transfers.
    pub fn new(entries_max: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
            files: VecDeque::new(),
            sockets: VecDeque::new(),
            file_step_runs: false,
            entries_max,
        }
    }

    /// Transfers in flight.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a transfer, or returns it if there is no room. `patience` counts from `now_ns`.
    pub fn insert(&mut self, work: T, patience: Patience, now_ns: u64) -> Result<EntryId, T> {
        if self.len() >= self.entries_max {
            return Err(work);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.generation = self.generation.wrapping_add(1);
        let id = EntryId(u64::from(self.generation) << 32 | slot as u64);
        let first = work.source();
        self.slots[slot] = Some(Entry {
            id,
            state: State::Queued(first),
            work: Some(work),
            cancelled: false,
            blocked: false,
            ready: false,
            patience,
            started_ns: now_ns,
            moved_ns: now_ns,
        });
        self.queue(first).push_back(id);
        Ok(id)
    }

    /// The next step: the second half of a chunk that the thread has just made (`last`), else a step on a socket,
    /// else one on a file. [`Self::give_back`] ends it.
    pub fn take(&mut self, last: Option<EntryId>) -> Option<(EntryId, Device, T)> {
        let fresh = |queue: &VecDeque<EntryId>| last.is_some() && queue.front() == last.as_ref();
        let files_free = !self.file_step_runs && !self.files.is_empty();
        let device = if files_free && (fresh(&self.files) || self.sockets.is_empty()) {
            Device::File
        } else if !self.sockets.is_empty() {
            Device::Socket
        } else {
            return None;
        };
        let id = self.queue(device).pop_front().expect("it is not empty");
        self.file_step_runs |= device == Device::File;
        let entry = self.entry(id).expect("queues have live entries");
        entry.state = State::Running(device);
        let work = entry.work.take().expect("only running entries have none");
        Some((id, device, work))
    }

    /// Whether [`Self::take`] would return something.
    pub fn has_work(&self) -> bool {
        !self.sockets.is_empty() || (!self.file_step_runs && !self.files.is_empty())
    }

    /// Ends a step whose transfer goes on. `blocked`: the socket is not ready, and the caller has asked for its readiness before.
    pub fn give_back(
        &mut self,
        id: EntryId,
        work: T,
        blocked: bool,
        moved: bool,
        now_ns: u64,
    ) -> GivenBack<T> {
        let entry = self.entry(id).expect("a running entry stays");
        let State::Running(device) = entry.state else { unreachable!("it runs") };
        if entry.cancelled {
            self.end_step(device);
            self.remove(id);
            return GivenBack::Ended(work, TransferError::Cancelled);
        }
        if moved {
            entry.moved_ns = now_ns;
        }
        let ready = std::mem::take(&mut entry.ready);
        entry.blocked |= blocked && !ready;
        let next = work.next(entry.blocked);
        let has_made_chunk = device == work.source() && next != Some(device);
        entry.work = Some(work);
        entry.state = next.map_or(State::Waiting, State::Queued);
        self.end_step(device);
        match next {
            Some(next) if has_made_chunk => self.queue(next).push_front(id),
            Some(next) => self.queue(next).push_back(id),
            None => {}
        }
        GivenBack::Kept
    }

    /// Ends a step that was the last one of its transfer.
    pub fn finish(&mut self, id: EntryId) {
        let entry = self.entry(id).expect("a running entry stays");
        let State::Running(device) = entry.state else { unreachable!("it runs") };
        self.end_step(device);
        self.remove(id);
    }

    /// The socket of this entry is ready. Ignored for an entry that has ended.
    pub fn ready(&mut self, id: EntryId) {
        let Some(entry) = self.entry(id) else { return };
        entry.blocked = false;
        match entry.state {
            State::Waiting => {
                let next = entry.work.as_ref().and_then(|work| work.next(false));
                let next = next.unwrap_or(Device::Socket);
                entry.state = State::Queued(next);
                self.queue(next).push_back(id);
            }
            State::Running(_) => entry.ready = true,
            State::Queued(_) => {}
        }
    }

    /// Cancels a transfer. Returns its work, unless it is running (then [`Self::give_back`] returns it) or has ended.
    pub fn cancel(&mut self, id: EntryId) -> Option<T> {
        let entry = self.entry(id)?;
        if let State::Running(_) = entry.state {
            entry.cancelled = true;
            return None;
        }
        self.remove(id)
    }

    /// Removes the entries whose time is over. Running ones are asked again when they have been given back.
    pub fn expire(&mut self, now_ns: u64) -> Vec<(T, TransferError)> {
        let mut expired = Vec::new();
        for slot in 0..self.slots.len() {
            let Some(entry) = &self.slots[slot] else { continue };
            if entry.work.is_none() {
                continue;
            }
            let ms = |ns: u64| ns / 1_000_000;
            let (stall, total) = (entry.patience.stall_ns, entry.patience.deadline_ns);
            let error = match total {
                Some(total) if now_ns.saturating_sub(entry.started_ns) >= total => {
                    TransferError::Deadline(ms(total))
                }
                _ if now_ns.saturating_sub(entry.moved_ns) >= stall => {
                    TransferError::Stalled(ms(stall))
                }
                _ => continue,
            };
            let id = entry.id;
            expired.extend(self.remove(id).map(|work| (work, error)));
        }
        expired
    }

    /// When [`Self::expire`] has something to do at the earliest.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        let of = |entry: &Entry<T>| {
            let stall = entry.moved_ns.saturating_add(entry.patience.stall_ns);
            let total = entry.patience.deadline_ns.map(|ns| entry.started_ns.saturating_add(ns));
            total.map_or(stall, |total| total.min(stall))
        };
        self.slots.iter().flatten().filter(|entry| entry.work.is_some()).map(of).min()
    }

    /// Removes all entries that do not run, and marks the others as cancelled.
    pub fn clear(&mut self) -> Vec<T> {
        let ids: Vec<EntryId> = self.slots.iter().flatten().map(|entry| entry.id).collect();
        ids.into_iter().filter_map(|id| self.cancel(id)).collect()
    }

    fn end_step(&mut self, device: Device) {
        if device == Device::File {
            self.file_step_runs = false;
        }
    }

    fn queue(&mut self, device: Device) -> &mut VecDeque<EntryId> {
        match device {
            Device::File => &mut self.files,
            Device::Socket => &mut self.sockets,
        }
    }

    fn entry(&mut self, id: EntryId) -> Option<&mut Entry<T>> {
        self.slots.get_mut(id.slot())?.as_mut().filter(|entry| entry.id == id)
    }

    fn remove(&mut self, id: EntryId) -> Option<T> {
        let entry = self.slots.get_mut(id.slot())?.take_if(|entry| entry.id == id)?;
        self.free.push(id.slot());
        if let State::Queued(device) = entry.state {
            self.queue(device).retain(|queued| *queued != id);
        }
        entry.work
    }
}
