//! Memory of an accelerator as a source or a sink of transfers.
//!
//! Bytes pass through two slots of host memory, which the copy engines of the accelerator access. While one slot is copied into the
//! accelerator, the next chunk is read from the source. Out of the accelerator, the copy of the next part begins before the
//! part that has arrived goes on. No code runs on the accelerator for it.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mqueue::staging::{CopyFailed, Direction, Staging};

use crate::flow::CHUNK_BYTES;

/// Slots that a transfer uses.
pub const SLOTS: usize = 2;
/// A good size of a slot. Slots may be smaller or larger.
pub const SLOT_BYTES: usize = CHUNK_BYTES;
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
    staging: Mutex<Box<dyn Staging + Send>>,
    bytes: u64,
    slot_bytes: usize,
    /// A transfer uses it.
    leased: AtomicBool,
}

impl AcceleratorMemory {
    /// With [`SLOTS`] slots at least.
    pub fn new(staging: impl Staging + Send + 'static) -> Self {
        let (bytes, slot_bytes) = (staging.bytes() as u64, staging.slot_bytes());
        assert!(slot_bytes > 0, "slots hold something");
        let staging: Mutex<Box<dyn Staging + Send>> = Mutex::new(Box::new(staging));
        Self(Arc::new(Shared { staging, bytes, slot_bytes, leased: AtomicBool::new(false) }))
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Whether a transfer uses it. False from the end of a transfer that succeeded; after another end, when its copies have ended.
    pub fn is_busy(&self) -> bool {
        self.0.leased.load(Ordering::Acquire)
    }

    /// For one transfer, which reads up to `end` if it is a source; `None`: another one uses it.
    pub(crate) fn lease(&self, end: u64) -> Option<Lease> {
        let free = !self.0.leased.swap(true, Ordering::Acquire);
        let end = end.min(self.0.bytes);
        free.then(|| Lease {
            memory: self.0.clone(),
            end,
            copies: [Copy::None, Copy::None],
            next: 0,
        })
    }
}

impl fmt::Debug for AcceleratorMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcceleratorMemory").field("bytes", &self.0.bytes).finish_non_exhaustive()
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

/// The use of an accelerator's memory by a transfer. Dropping it waits for its copies, so it is dropped where that
/// delays no other transfer.
pub(crate) struct Lease {
    memory: Arc<Shared>,
    /// The end of what a source is read for.
    end: u64,
    copies: [Copy; SLOTS],
    /// The slot of the next copy.
    next: usize,
}

impl Lease {
    /// Reads into the parts what the memory has at `offset`. Returns how much; 0 is the end.
    pub(crate) fn read_at(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> io::Result<usize> {
        let Some(slot) = self.load(offset)? else { return Ok(0) };
        let Copy::Here(range) = self.copies[slot].clone() else { unreachable!("it was loaded") };
        let mut staging = self.memory.staging();
        let (from, to) = ((offset - range.start) as usize, (range.end - range.start) as usize);
        let mut rest = &staging.slot(slot)[from..to];
        let mut read = 0;
        for part in parts {
            let len = part.len().min(rest.len());
            let (first, later) = rest.split_at(len);
            part[..len].copy_from_slice(first);
            (rest, read) = (later, read + len);
        }
        Ok(read)
    }

    /// Writes bytes to the memory at `offset`. Returns how many were taken; they have arrived after [`Self::settle`].
    pub(crate) fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let room = self.memory.bytes.saturating_sub(offset);
        let len = room.min(bytes.len().min(self.memory.slot_bytes) as u64) as usize;
        if len == 0 {
            // Checked before the start for a transfer whose length is known.
            return Err(io::ErrorKind::StorageFull.into());
        }
        let slot = self.next;
        self.wait(slot)?;
        let mut staging = self.memory.staging();
        staging.slot(slot)[..len].copy_from_slice(&bytes[..len]);
        drop(staging);
        self.begin(Direction::In, offset..offset + len as u64)?;
        Ok(len)
    }

    /// Waits until the accelerator has everything that was written.
    pub(crate) fn settle(&mut self) -> io::Result<()> {
        (0..SLOTS).try_for_each(|slot| self.wait(slot))
    }

    /// Whether no copy is in progress, as far as is known without waiting.
    pub(crate) fn is_settled(&self) -> bool {
        self.copies.iter().all(|copy| !matches!(copy, Copy::Started(..)))
    }

    /// The slot that has what is at `offset`; the copy of what comes after it has begun. `None`: nothing is there.
    fn load(&mut self, offset: u64) -> io::Result<Option<usize>> {
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
        let ahead = match &self.copies[slot] {
            Copy::Here(range) => range.end,
            Copy::None | Copy::Started(..) => unreachable!("it was waited for"),
        };
        let other = 1 - slot;
        let is_ahead = match &self.copies[other] {
            Copy::None => false,
            Copy::Started(_, range) | Copy::Here(range) => range.start == ahead,
        };
        if ahead < self.end && !is_ahead {
            self.next = other;
            self.begin(Direction::Out, self.part_at(ahead))?;
        }
        Ok(Some(slot))
    }

    /// What one copy brings from `offset` on.
    fn part_at(&self, offset: u64) -> Range<u64> {
        offset..self.end.min(offset + self.memory.slot_bytes as u64)
    }

    /// Starts a copy in the next slot, and returns the slot.
    fn begin(&mut self, direction: Direction, range: Range<u64>) -> io::Result<usize> {
        let slot = self.next;
        self.wait(slot)?;
        let of_memory = range.start as usize..range.end as usize;
        self.memory.staging().begin(direction, slot, of_memory).map_err(failed)?;
        self.copies[slot] = Copy::Started(direction, range);
        self.next = 1 - slot;
        Ok(slot)
    }

    /// Waits until no copy of a slot is in progress.
    fn wait(&mut self, slot: usize) -> io::Result<()> {
        let started = Instant::now();
        while !self.memory.staging().is_done(slot).map_err(failed)? {
            let waited = started.elapsed();
            if waited > COPY_LIMIT {
                let why = format!("a copy has not ended within {} s", COPY_LIMIT.as_secs());
                return Err(failed(CopyFailed(why)));
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
}

impl Drop for Lease {
    fn drop(&mut self) {
        // After a failure the accelerator may still use the slots: the memory stays in use.
        if self.settle().is_ok() {
            self.memory.leased.store(false, Ordering::Release);
        }
    }
}

impl Shared {
    /// A panic of a runtime leaves nothing half-done here.
    fn staging(&self) -> MutexGuard<'_, Box<dyn Staging + Send>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(CopyFailed(why): CopyFailed) -> io::Error {
    io::Error::other(why)
}
