//! The `granule` protocol: header and payload as one byte string in self-validating units.
//!
//! A unit is `WORDS` 32-bit words of the string and the low half of the message's number plus one, in
//! one single-copy atomic access: 1 + 1 words, or 3 + 1. Whoever reads a unit with the sequence it
//! expects has that unit's data of that message; nothing orders the units of a message among
//! themselves, so each is checked. The rule that keeps sequences from aliasing is in [`crate::abi`].

use crate::abi::RESTAMP_LAPS;
use crate::memory::{Memory, bytes_from, pair, unit_bytes, words_from};
use crate::ring::{HEADER_BYTES, Layout};

const HEADER_WORDS: usize = HEADER_BYTES as usize / 4;

/// Units that hold the header.
const fn header_units(words: usize) -> usize {
    HEADER_WORDS.div_ceil(words)
}

/// Payload words that share the header's last unit.
const fn shared_words(words: usize) -> usize {
    header_units(words) * words - HEADER_WORDS
}

/// Bytes of a slot that holds `inline_bytes` of payload.
pub(crate) const fn slot_bytes(words: usize, inline_bytes: u64) -> u64 {
    (HEADER_BYTES + inline_bytes).div_ceil(4 * words as u64) * unit_bytes(words)
}

/// Sequence carried by the units of message `n`.
#[inline]
fn sequence(n: u64) -> u32 {
    if mutants::on("wrap_sequence") {
        return n.wrapping_add(1) as u16 as u32;
    }
    n.wrapping_add(1) as u32
}

/// Writes message `n`: the header's words, then the payload (at most the inline capacity).
#[inline]
pub(crate) fn write<M: Memory, const WORDS: usize>(
    memory: &M,
    layout: &Layout,
    n: u64,
    header: [u64; 4],
    payload: &[u8],
) {
    let slot = layout.slot(n);
    // EDGE RX_PUBLISH TX_PUBLISH (release half): each unit carries its own proof.
    memory.store_string::<WORDS>(slot, header, payload, sequence(n));
    if layout.lap(n) % RESTAMP_LAPS == 0 && !mutants::on("forget_restamp") {
        let end = slot + slot_bytes(WORDS, layout.inline_bytes);
        let written = slot_bytes(WORDS, payload.len() as u64);
        stamp::<M, WORDS>(memory, slot + written, end, sequence(n));
    }
}

/// [`Memory::store_string`] unit by unit.
#[inline]
pub(crate) fn store_string<M: Memory, const WORDS: usize>(
    memory: &M,
    at: u64,
    header: [u64; 4],
    payload: &[u8],
    sequence: u32,
) {
    let (with_header, rest) = payload.split_at(payload.len().min(4 * shared_words(WORDS)));
    let [shared] = words_from(with_header);
    let word = |i: usize| match i {
        0..HEADER_WORDS => (header[i / 2] >> (32 * (i % 2))) as u32,
        _ => shared,
    };
    for i in 0..header_units(WORDS) {
        let data: [u32; WORDS] = std::array::from_fn(|k| word(i * WORDS + k));
        memory.store_unit(at + i as u64 * unit_bytes(WORDS), data, sequence);
    }
    let rest_at = at + header_units(WORDS) as u64 * unit_bytes(WORDS);
    memory.store_units::<WORDS>(rest_at, rest, sequence);
}

/// Stamps the units in `[at, end)` without data.
#[cold]
fn stamp<M: Memory, const WORDS: usize>(memory: &M, at: u64, end: u64, sequence: u32) {
    for at in (at..end).step_by(unit_bytes(WORDS) as usize) {
        memory.store_unit(at, [0; WORDS], sequence);
    }
}

/// Makes every slot look as if its last message were number `start - 1`, so that no unit of a ring
/// that starts there passes for one of its messages. For `start` 0 that is zeroed memory.
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
#[inline]
pub(crate) fn read_header<M: Memory, const WORDS: usize>(
    memory: &M,
    layout: &Layout,
    n: u64,
) -> Option<[u64; 4]> {
    // EDGE RX_PUBLISH TX_PUBLISH (acquire half): each unit carries its own proof.
    memory.load_header::<WORDS>(layout.slot(n), sequence(n))
}

/// [`Memory::load_header`] unit by unit.
#[inline]
pub(crate) fn load_header<M: Memory, const WORDS: usize>(
    memory: &M,
    at: u64,
    sequence: u32,
) -> Option<[u64; 4]> {
    let mut words = [0; HEADER_WORDS];
    for (i, part) in words.chunks_mut(WORDS).enumerate() {
        let (data, found) = memory.load_unit::<WORDS>(at + i as u64 * unit_bytes(WORDS));
        if found != sequence {
            return None;
        }
        part.copy_from_slice(&data[..part.len()]);
    }
    Some(std::array::from_fn(|i| pair(words[2 * i], words[2 * i + 1])))
}

/// Copies the payload of message `n` out; false when part of it has not arrived.
#[inline]
pub(crate) fn read_payload<M: Memory, const WORDS: usize>(
    memory: &M,
    layout: &Layout,
    n: u64,
    payload: &mut [u8],
) -> bool {
    // EDGE RX_PUBLISH TX_PUBLISH (acquire half): each unit carries its own proof.
    memory.load_payload::<WORDS>(layout.slot(n), payload, sequence(n))
}

/// [`Memory::load_payload`] unit by unit.
#[inline]
pub(crate) fn load_payload<M: Memory, const WORDS: usize>(
    memory: &M,
    at: u64,
    payload: &mut [u8],
    sequence: u32,
) -> bool {
    let rest_at = at + header_units(WORDS) as u64 * unit_bytes(WORDS);
    let shared = shared_words(WORDS);
    let (with_header, rest) = payload.split_at_mut(payload.len().min(4 * shared));
    if shared > 0 {
        let (data, found) = memory.load_unit::<WORDS>(rest_at - unit_bytes(WORDS));
        if found != sequence {
            return false;
        }
        bytes_from([data[WORDS - 1]], with_header);
    }
    memory.load_units::<WORDS>(rest_at, rest, sequence)
}

const _: () = assert!(shared_words(1) == 0 && shared_words(3) == 1);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{load_header, load_payload, store_string};
    use crate::memory::{HeapMapping, Memory};

    const SEQUENCE: u32 = 0xfedc_ba98;
    const HEADER: [u64; 4] =
        [0x0123_4567_89ab_cdef, !7, 0x1111_2222_3333_4444, 0x5566_7788_99aa_bbcc];

    /// What a memory does in its own way with vector registers is, word for word, what the code here does.
    #[test]
    fn vector_moves_are_the_generic_code() {
        let [generic, own] = [(); 2].map(|()| HeapMapping::memory(1024));
        if !own.has_unit16() {
            return println!("SKIPPED: 16-byte accesses are not atomic here");
        }
        for len in 0..=200_usize {
            let payload: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
            for at in (0..1024).step_by(8) {
                for memory in [&generic, &own] {
                    memory.store(at, 0x5a5a_5a5a_5a5a_5a5a, crate::memory::Ordering::Relaxed);
                }
            }
            store_string::<_, 3>(&generic, 128, HEADER, &payload, SEQUENCE);
            own.store_string::<3>(128, HEADER, &payload, SEQUENCE);
            let words = |memory: &crate::MappedMemory| memory.load_words::<128>(0);
            assert_eq!(words(&generic), words(&own), "{len} bytes stored");

            assert_eq!(own.load_header::<3>(128, SEQUENCE), Some(HEADER));
            assert_eq!(load_header::<_, 3>(&own, 128, SEQUENCE), Some(HEADER));
            let mut read = [vec![0; len], vec![0; len]];
            assert!(own.load_payload::<3>(128, &mut read[0], SEQUENCE));
            assert!(load_payload::<_, 3>(&own, 128, &mut read[1], SEQUENCE));
            assert_eq!(read, [payload.clone(), payload], "{len} bytes loaded");

            // A unit of another message, wherever it is, is seen by both.
            for unit in 0..(32 + len).div_ceil(12) as u64 {
                let at = 128 + 16 * unit;
                let ([a, b, c], _) = own.load_unit::<3>(at);
                own.store_unit::<3>(at, [a, b, c], SEQUENCE ^ 1);
                let mut buffer = vec![0; len];
                assert_eq!(own.load_header::<3>(128, SEQUENCE).is_none(), unit < 3, "{unit}");
                let whole = own.load_payload::<3>(128, &mut buffer, SEQUENCE);
                assert_eq!(load_payload::<_, 3>(&own, 128, &mut buffer, SEQUENCE), whole);
                assert_eq!(whole, unit < 2, "unit {unit} of {len} bytes");
                own.store_unit::<3>(at, [a, b, c], SEQUENCE);
            }
        }
    }
}
