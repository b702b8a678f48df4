//! Memory of an accelerator as a source or a sink of transfers.
//!
//! Bytes pass through two slots of host memory, which the copy engines of the accelerator access. While one slot is copied into the
//! accelerator, the next chunk is read from the source. Out of the accelerator, the copy of the next part begins before the
//! part that has arrived goes on. No code runs on the accelerator for it. A *lane* is a pair of slots: a long transfer without stages uses
//! several at a time, each for a part of its range.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mqueue::staging::{CopyFailed, Direction, Staging};

use crate::command::limits::{CHUNK_BYTES, MOVED_MAX};

/// Slots of a lane.
pub const SLOTS: usize = 2;
/// A good size of a slot, which stays in a core's cache. Slots may be smaller or larger.
pub const SLOT_BYTES: usize = CHUNK_BYTES;

/// A good size of the slots for a memory with as many lanes. More than two threads do not get more bytes out of their caches than the bus takes, and each copy costs a
/// call of the driver, which they do one at a time: a few copies are cheaper than many.
pub fn good_slot_bytes(bytes: usize, lanes: usize) -> usize {
    match lanes {
        0..=2 => SLOT_BYTES,
        // A lane with fewer than eight copies would wait for its first and its last one.
        _ => (bytes / lanes / 8).next_power_of_two().clamp(SLOT_BYTES, MOVED_MAX),
    }
}
/// A copy that takes longer than this has failed: the accelerator or its driver hangs.
const COPY_LIMIT: Duration = Duration::from_secs(10);
/// A thread that waits for a copy polls without pauses for this time, ...
const SPIN: Duration = Duration::from_micros(100);
/// ... then with pauses of this length.
const PAUSE: Duration = Duration::from_micros(50);

/// Memory of an accelerator that transfers use, one at a time. A clone is the same memory.
#[derive(Clone)]
pub struct AcceleratorMemory(Arc<Shared>);

struct Shared {
    lanes: Vec<Mutex<Box<dyn Staging + Send>>>,
    bytes: u64,
    slot_bytes: usize,
    /// A transfer uses it.
    is_used: AtomicBool,
}

impl AcceleratorMemory {
    /// With one lane, of [`SLOTS`] slots at least.
    pub fn new(staging: impl Staging + Send + 'static) -> Self {
        Self::with_lanes(vec![staging])
    }

    /// With a lane for each of these, which are slots for one memory. They have the same sizes.
    pub fn with_lanes<S: Staging + Send + 'static>(lanes: Vec<S>) -> Self {
        let first = lanes.first().expect("there is a lane");
        let (bytes, slot_bytes) = (first.bytes(), first.slot_bytes());
        assert!(slot_bytes > 0, "slots hold something");
        let is_same = |lane: &S| (lane.bytes(), lane.slot_bytes()) == (bytes, slot_bytes);
        assert!(lanes.iter().all(is_same), "they are slots for one memory");
        let boxed = |lane| Mutex::new(Box::new(lane) as Box<dyn Staging + Send>);
        let lanes = lanes.into_iter().map(boxed).collect();
        let is_used = AtomicBool::new(false);
        Self(Arc::new(Shared { lanes, bytes: bytes as u64, slot_bytes, is_used }))
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// How many lanes it has.
    pub fn lanes(&self) -> usize {
        self.0.lanes.len()
    }

    /// Whether a transfer uses it. False from the end of a transfer that succeeded; after another end, when its copies have ended.
    pub fn is_busy(&self) -> bool {
        self.0.is_used.load(Ordering::Acquire)
    }

    /// For one transfer; `None`: another one uses it.
    pub(crate) fn take(&self) -> Option<Arc<Use>> {
        let is_free = !self.0.is_used.swap(true, Ordering::Acquire);
        is_free.then(|| Arc::new(Use(self.0.clone())))
    }
}

impl fmt::Debug for AcceleratorMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcceleratorMemory").field("bytes", &self.0.bytes).finish_non_exhaustive()
    }
}

/// The use of a memory by one transfer.
pub(crate) struct Use(Arc<Shared>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.is_used.store(false, Ordering::Release);
    }
}

/// What a slot has.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Copy {
    None,
    /// A copy of this part of the memory has been started.
    Started(Direction, Range<u64>),
    /// The slot has this part.
    Here(Range<u64>),
}

/// The use of a lane by a transfer, or by a part of one. Dropping it waits for its copies, so it is dropped where that
/// delays no other transfer.
pub(crate) struct Lease {
    /// Taken only if it is never given back.
    used: Option<Arc<Use>>,
    memory: Arc<Shared>,
    lane: usize,
    /// The end of what a source is read for.
    end: u64,
    copies: [Copy; SLOTS],
    /// The slot of the next copy.
    next: usize,
}

impl Lease {
    /// Of a lane that nothing else uses; a source is read up to `end`.
    pub(crate) fn new(used: Arc<Use>, lane: usize, end: u64) -> Self {
        let memory = used.0.clone();
        assert!(lane < memory.lanes.len(), "the lane exists");
        let end = end.min(memory.bytes);
        let copies = [Copy::None, Copy::None];
        Self { used: Some(used), memory, lane, end, copies, next: 0 }
    }

    /// Lets `fill` read up to `most` bytes into a slot, and starts to copy them to `offset`. Returns how many they are; they
    /// have arrived after [`Self::settle`]. The inner error is that of `fill`.
    pub(crate) fn fill_at(
        &mut self,
        offset: u64,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, CopyFailed> {
        let slot = self.next;
        self.wait(slot)?;
        let len = most.min(self.memory.slot_bytes);
        let filled = fill(&mut self.staging().slot(slot)[..len]);
        let filled = filled.map(|filled| filled.min(len));
        if let Ok(filled @ 1..) = filled {
            self.begin(Direction::In, offset..offset + filled as u64)?;
        }
        Ok(filled)
    }

    /// Gives up to `most` bytes that the memory has at `offset` to `put`, which says how many it took. The inner error is that
    /// of `put`.
    pub(crate) fn put_at(
        &mut self,
        offset: u64,
        most: usize,
        put: impl FnOnce(&[u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, CopyFailed> {
        let Some((slot, range)) = self.load(offset)? else { return Ok(Ok(0)) };
        let mut staging = self.staging();
        let there = &staging.slot(slot)[range];
        let len = most.min(there.len());
        Ok(put(&there[..len]).map(|taken| taken.min(len)))
    }

    /// Reads into the parts what the memory has at `offset`. Returns how much; 0 is the end.
    pub(crate) fn read_at(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> io::Result<usize> {
        let read = self.put_at(offset, usize::MAX, |mut rest| {
            let mut read = 0;
            for part in parts {
                let len = part.len().min(rest.len());
                let (first, later) = rest.split_at(len);
                part[..len].copy_from_slice(first);
                (rest, read) = (later, read + len);
            }
            Ok(read)
        });
        read.map_err(failed)?
    }

    /// Writes bytes to the memory at `offset`. Returns how many were taken; they have arrived after [`Self::settle`].
    pub(crate) fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let room = self.memory.bytes.saturating_sub(offset);
        let most = room.min(bytes.len() as u64) as usize;
        if most == 0 {
            // Checked before the start for a transfer whose length is known.
            return Err(io::ErrorKind::StorageFull.into());
        }
        let written = self.fill_at(offset, most, |slot| {
            slot.copy_from_slice(&bytes[..slot.len()]);
            Ok(slot.len())
        });
        written.map_err(failed)?
    }

    /// Waits until the accelerator has everything that was written.
    pub(crate) fn settle(&mut self) -> io::Result<()> {
        (0..SLOTS).try_for_each(|slot| self.wait(slot)).map_err(failed)
    }

    /// Whether no copy is in progress, as far as is known without waiting.
    pub(crate) fn is_settled(&self) -> bool {
        self.copies.iter().all(|copy| !matches!(copy, Copy::Started(..)))
    }

    /// The slot that has what is at `offset`, and its part from there on; the copy of what follows has begun. `None`: nothing is there.
    fn load(&mut self, offset: u64) -> Result<Option<(usize, Range<usize>)>, CopyFailed> {
        if offset >= self.end {
            return Ok(None);
        }
        let has = |copy: &Copy| match copy {
            Copy::None => false,
            Copy::Started(_, range) | Copy::Here(range) => range.contains(&offset),
        };
        let slot = match self.copies.iter().position(has) {
            Some(slot) => slot,
            None => self.begin(Direction::Out, self.part_at(offset))?,
        };
        self.wait(slot)?;
        let Copy::Here(range) = self.copies[slot].clone() else {
            unreachable!("it was waited for")
        };
        let other = 1 - slot;
        let is_ahead = match &self.copies[other] {
            Copy::None => false,
            Copy::Started(_, ahead) | Copy::Here(ahead) => ahead.start == range.end,
        };
        if range.end < self.end && !is_ahead {
            self.next = other;
            self.begin(Direction::Out, self.part_at(range.end))?;
        }
        let (from, to) = (offset - range.start, range.end - range.start);
        Ok(Some((slot, from as usize..to as usize)))
    }

    /// What one copy brings from `offset` on.
    fn part_at(&self, offset: u64) -> Range<u64> {
        offset..self.end.min(offset + self.memory.slot_bytes as u64)
    }

    /// Starts a copy in the next slot, and returns the slot.
    fn begin(&mut self, direction: Direction, range: Range<u64>) -> Result<usize, CopyFailed> {
        let slot = self.next;
        self.wait(slot)?;
        let of_memory = range.start as usize..range.end as usize;
        self.staging().begin(direction, slot, of_memory)?;
        self.copies[slot] = Copy::Started(direction, range);
        self.next = 1 - slot;
        Ok(slot)
    }

    /// Waits until no copy of a slot is in progress, also one of an earlier transfer.
    fn wait(&mut self, slot: usize) -> Result<(), CopyFailed> {
        let started = Instant::now();
        while !self.staging().is_done(slot)? {
            let waited = started.elapsed();
            if waited > COPY_LIMIT {
                let why = format!("a copy has not ended within {} s", COPY_LIMIT.as_secs());
                return Err(CopyFailed(why));
            }
            if waited > SPIN {
                std::thread::sleep(PAUSE);
            } else {
                std::hint::spin_loop();
            }
        }
        self.copies[slot] = match std::mem::replace(&mut self.copies[slot], Copy::None) {
            Copy::Started(Direction::Out, range) | Copy::Here(range) => Copy::Here(range),
            Copy::Started(Direction::In, _) | Copy::None => Copy::None,
        };
        Ok(())
    }

    /// A panic of a runtime leaves nothing half-done here.
    fn staging(&self) -> MutexGuard<'_, Box<dyn Staging + Send>> {
        self.memory.lanes[self.lane].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // After a failure the accelerator may still use the slots: the memory stays in use.
        if self.settle().is_err() {
            std::mem::forget(self.used.take());
        }
    }
}

fn failed(CopyFailed(why): CopyFailed) -> io::Error {
    io::Error::other(why)
}
