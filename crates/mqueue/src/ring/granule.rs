//! The `granule` protocol: header and payload as one byte string in self-validating units.
//!
//! A unit is `WORDS` 32-bit words of the string and the low half of the message's number plus one, in
//! one single-copy atomic access: 1 + 1 words, or 3 + 1. A reader of a unit with the expected sequence
//! has that unit's data of that message; the units of a message are not ordered,
//! so each is checked. [`crate::abi`] describes how sequences are kept from aliasing.

use super::Layout;
use crate::memory::strings::slot_bytes;
use crate::memory::{Memory, unit_bytes};

/// Sequence of the units of message `n`.
#[inline]
fn sequence(n: u64) -> u32 {
    if mutants::on("wrap_sequence") {
        return n.wrapping_add(1) as u16 as u32;
    }
    n.wrapping_add(1) as u32
}

/// Writes message `n`: the header's words, then the payload (at most the inline capacity).
#[inline(always)]
pub(crate) fn write<M: Memory, const WORDS: usize>(
    memory: &M,
    layout: &Layout,
    n: u64,
    header: [u64; 4],
    payload: &[u8],
) {
    let slot = layout.slot(n);
    // EDGE RX_PUBLISH TX_PUBLISH (release half): each unit validates itself.
    memory.store_string::<WORDS>(slot, header, payload, sequence(n));
    restamp::<M, WORDS>(memory, layout, n, payload.len() as u64);
}

/// [`write`] with a payload of `len_bytes` in the words at `from_at` in other memory.
#[inline(always)]
pub(crate) fn write_from<M: Memory, const WORDS: usize>(
    (memory, layout, n): (&M, &Layout, u64),
    header: [u64; 4],
    (from, from_at): (&M, u64),
    len_bytes: u64,
) {
    let slot = layout.slot(n);
    // EDGE RX_PUBLISH TX_PUBLISH (release half): each unit validates itself.
    memory.copy_string::<WORDS>(slot, header, from, from_at, len_bytes, sequence(n));
    restamp::<M, WORDS>(memory, layout, n, len_bytes);
}

/// Rewrites the units of its slot that message `n` did not use, in the laps that need it.
#[inline(always)]
fn restamp<M: Memory, const WORDS: usize>(memory: &M, layout: &Layout, n: u64, len_bytes: u64) {
    if layout.restamps(n) && !mutants::on("forget_restamp") {
        let slot = layout.slot(n);
        let end = slot + slot_bytes(WORDS, layout.inline_bytes);
        let written = slot_bytes(WORDS, len_bytes);
        stamp::<M, WORDS>(memory, slot + written, end, sequence(n));
    }
}

/// Writes the sequence of the units in `[at, end)` without data.
#[cold]
fn stamp<M: Memory, const WORDS: usize>(memory: &M, at: u64, end: u64, sequence: u32) {
    for at in (at..end).step_by(unit_bytes(WORDS) as usize) {
        memory.store_unit(at, [0; WORDS], sequence);
    }
}

/// Makes every slot look as if its last message were number `start - 1`, so that no unit of a ring
/// that starts there can be taken for one of its messages. For `start` 0 that is zeroed memory.
pub(crate) fn format<M: Memory, const WORDS: usize>(memory: &M, layout: &Layout, start: u64) {
    for n in 0..layout.depth {
        let slot = layout.slot(n);
        stamp::<M, WORDS>(
            memory,
            slot,
            slot + slot_bytes(WORDS, layout.inline_bytes),
            start as u32,
        );
    }
}

/// The header's words of message `n`, once all its units have arrived.
#[inline(always)]
pub(crate) fn read_header<M: Memory, const WORDS: usize>(
    memory: &M,
    layout: &Layout,
    n: u64,
) -> Option<[u64; 4]> {
    // EDGE RX_PUBLISH TX_PUBLISH (acquire half): each unit validates itself.
    memory.load_header::<WORDS>(layout.slot(n), sequence(n))
}

/// Copies the payload of message `n` out; false if part of it has not arrived.
#[inline(always)]
pub(crate) fn read_payload<M: Memory, const WORDS: usize>(
    memory: &M,
    layout: &Layout,
    n: u64,
    payload: &mut [u8],
) -> bool {
    // EDGE RX_PUBLISH TX_PUBLISH (acquire half): each unit validates itself.
    memory.load_payload::<WORDS>(layout.slot(n), payload, sequence(n))
}

/// Copies the payload of message `n` to words at `at` in other memory; false if part of it has not arrived. A unit
/// that has not arrived holds data of an older message, possibly of another client: it is not stored, although
/// slots that are not committed are not read.
#[inline(always)]
pub(crate) fn copy_payload<M: Memory, const WORDS: usize>(
    (from, layout, n): (&M, &Layout, u64),
    to: &M,
    at: u64,
    len_bytes: u64,
) -> bool {
    // EDGE RX_PUBLISH TX_PUBLISH (acquire half): each unit validates itself.
    to.copy_payload::<WORDS>(at, from, layout.slot(n), len_bytes, sequence(n))
}
