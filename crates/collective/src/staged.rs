//! All-reduce and broadcast over memory that the processor does not reach: an accelerator's.
//!
//! Pieces of the data pass through slots of host memory. While the ranks exchange piece k, piece k + 1 is copied out of the
//! accelerator and piece k - 1 back into it. The copies are asynchronous (a GPU's copy engines), so the calling thread does all of
//! the work that the processor has, and the accelerator runs no code for it.

use std::ops::Range;
use std::time::{Duration, Instant};

pub use mqueue::staging::{CopyFailed, Direction, Staging};

use crate::error::CollectiveError;
use crate::group::{Group, INTERRUPT_PAUSE};
use crate::schedule::{Element, Operation};

/// A usual size of a slot: long enough for the algorithm of long data, short enough that short arrays are several pieces.
pub const PIECE_BYTES: usize = 1 << 20;
/// Slots of a [`Staging`]: of pieces that are copied out, exchanged, and copied in.
pub const SLOTS: usize = 3;
/// A thread that waits for a copy polls without pauses for this time, ...
const SPIN: Duration = Duration::from_micros(200);
/// ... then with pauses of this length.
const PAUSE: Duration = Duration::from_micros(50);

impl Group {
    /// [`Self::all_reduce`] over an array in the memory of an accelerator. All ranks call this function, with arrays and slots of the
    /// same sizes; a rank without an accelerator can stage host memory. The limit holds for the whole array.
    pub fn all_reduce_staged(
        &mut self,
        element: Element,
        staging: &mut dyn Staging,
    ) -> Result<(), CollectiveError> {
        self.check_open()?;
        Self::check_all_reduce(element, staging.bytes())?;
        Staged::run(self, staging, Operation::AllReduce, element)
    }

    /// [`Self::broadcast`] over an array in the memory of an accelerator, under the same conditions.
    pub fn broadcast_staged(
        &mut self,
        root: usize,
        staging: &mut dyn Staging,
    ) -> Result<(), CollectiveError> {
        self.check_open()?;
        self.check_root(root)?;
        Staged::run(self, staging, Operation::Broadcast { root }, Element::Byte)
    }
}

struct Staged<'a> {
    group: &'a mut Group,
    staging: &'a mut dyn Staging,
    started: Instant,
    /// This rank's pieces are copied out of the accelerator; and into it.
    goes_out: bool,
    comes_in: bool,
}

impl<'a> Staged<'a> {
    fn run(
        group: &'a mut Group,
        staging: &'a mut dyn Staging,
        operation: Operation,
        element: Element,
    ) -> Result<(), CollectiveError> {
        let slot_bytes = staging.slot_bytes();
        if slot_bytes == 0 || slot_bytes % 4 != 0 {
            let why = format!("slots of {slot_bytes} bytes: a slot needs a positive multiple of 4");
            return Err(CollectiveError::Argument(why));
        }
        let is_root = operation == Operation::Broadcast { root: group.rank() };
        let goes_out = operation == Operation::AllReduce || is_root;
        let mut call =
            Self { group, staging, started: Instant::now(), goes_out, comes_in: !is_root };
        let done = call.pieces(operation, element, slot_bytes);
        done.inspect_err(|error| call.group.end(error))
    }

    fn pieces(
        &mut self,
        operation: Operation,
        element: Element,
        slot_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let bytes = self.staging.bytes();
        self.agree(bytes, slot_bytes)?;
        // An empty array is a call as well.
        let pieces = bytes.div_ceil(slot_bytes).max(1);
        let range = |piece: usize| piece * slot_bytes..bytes.min((piece + 1) * slot_bytes);
        // An earlier call may have failed while copies were in progress.
        (0..SLOTS).try_for_each(|slot| self.wait(slot))?;
        self.begin(Direction::Out, 0, range(0))?;
        for piece in 0..pieces {
            if piece + 1 < pieces {
                // The copy of an earlier piece out of this slot.
                self.wait((piece + 1) % SLOTS)?;
                self.begin(Direction::Out, (piece + 1) % SLOTS, range(piece + 1))?;
            }
            let slot = piece % SLOTS;
            self.wait(slot)?;
            let data = &mut self.staging.slot(slot)[..range(piece).len()];
            self.group.run(operation, element, data, Some(self.started))?;
            self.begin(Direction::In, slot, range(piece))?;
        }
        (0..SLOTS).try_for_each(|slot| self.wait(slot))
    }

    /// Compares the sizes of the array and of the slots with those of rank 0: a piece shows only its own, and an array of two pieces must
    /// not be taken for two arrays of one. Rank 0 gets the notice of a rank that disagrees. By its type no broadcast of host memory is
    /// taken for this one.
    fn agree(&mut self, bytes: usize, slot_bytes: usize) -> Result<(), CollectiveError> {
        let ours = [bytes, slot_bytes].map(|size| size as u64);
        let mut first: Vec<u8> = ours.iter().flat_map(|size| size.to_le_bytes()).collect();
        let broadcast = Operation::Broadcast { root: 0 };
        self.group.run(broadcast, Element::Int32, &mut first, Some(self.started))?;
        for (at, what) in ["size", "size of slots"].into_iter().enumerate() {
            let word = std::array::from_fn(|byte| first[8 * at + byte]);
            let (ours, theirs) = (ours[at], u64::from_le_bytes(word));
            if ours != theirs {
                let sequence = self.group.sequence();
                let (ours, theirs) = (ours.to_string(), theirs.to_string());
                return Err(CollectiveError::Disagreement {
                    rank: 0,
                    sequence,
                    what,
                    ours,
                    theirs,
                });
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        direction: Direction,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CollectiveError> {
        let is_wanted = match direction {
            Direction::Out => self.goes_out,
            Direction::In => self.comes_in,
        };
        if range.is_empty() || !is_wanted {
            return Ok(());
        }
        let begun = self.staging.begin(direction, slot, range);
        begun.map_err(|failed| self.failed(failed))
    }

    /// Waits for the copy in a slot.
    fn wait(&mut self, slot: usize) -> Result<(), CollectiveError> {
        let (mut spins_until, mut checked) = (None, None);
        loop {
            if self.staging.is_done(slot).map_err(|failed| self.failed(failed))? {
                return Ok(());
            }
            let now = Instant::now();
            self.check_deadline(now)?;
            if now - *checked.get_or_insert(now) >= INTERRUPT_PAUSE {
                checked = Some(now);
                self.group.check_interrupt()?;
            }
            if now < *spins_until.get_or_insert(now + SPIN) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn check_deadline(&self, now: Instant) -> Result<(), CollectiveError> {
        let limit = self.group.limit();
        if now - self.started < limit {
            return Ok(());
        }
        let why = format!("a copy did not end within {} s", limit.as_secs_f64());
        Err(self.failed(CopyFailed(why)))
    }

    fn failed(&self, CopyFailed(why): CopyFailed) -> CollectiveError {
        CollectiveError::Copy { rank: self.group.rank(), why }
    }
}
