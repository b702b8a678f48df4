//! Memory that the processor reaches only by copies: an accelerator's, through slots of host memory.
//!
//! Collectives and transfers move bytes between such memory and everything else. The copies are asynchronous (a GPU's copy
//! engines), so the accelerator runs no code for them. Runtimes implement [`Staging`].

use std::ops::Range;

/// A copy failed: why, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyFailed(pub String);

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the accelerator's memory to the slot.
    Out,
    /// From the slot to the accelerator's memory.
    In,
}

/// An array in an accelerator's memory, and slots of host memory through which it passes.
pub trait Staging {
    /// Size of the array.
    fn bytes(&self) -> usize;

    /// Size of a slot.
    fn slot_bytes(&self) -> usize;

    /// Starts a copy between `range` of the array and the beginning of a slot in which no copy is in progress. Must not wait.
    fn begin(
        &mut self,
        direction: Direction,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CopyFailed>;

    /// Whether no copy of the slot is in progress. Must not wait.
    fn is_done(&mut self, slot: usize) -> Result<bool, CopyFailed>;

    /// The bytes of a slot in which no copy is in progress.
    fn slot(&mut self, slot: usize) -> &mut [u8];
}
