//! A message of the `granule` protocols as one string of header and payload in units, unit by unit: the
//! moves of a memory that has no faster ones.

use super::{Memory, Ordering, bytes_from, mask_of, pair, unit_bytes, words_from};
use crate::abi::SlotHeader;

/// Bytes of a message's header.
pub(crate) const HEADER_BYTES: u64 = size_of::<SlotHeader>() as u64;
const HEADER_WORDS: usize = HEADER_BYTES as usize / 4;

/// Units of the header.
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
    let mut at = at + header_units(WORDS) as u64 * unit_bytes(WORDS);
    for chunk in rest.chunks(4 * WORDS) {
        memory.store_unit::<WORDS>(at, words_from(chunk), sequence);
        at += unit_bytes(WORDS);
    }
}

/// [`Memory::copy_string`] unit by unit.
#[inline]
pub(crate) fn copy_string<M: Memory, const WORDS: usize>(
    to: &M,
    at: u64,
    header: [u64; 4],
    (from, from_at): (&M, u64),
    len_bytes: u64,
    sequence: u32,
) {
    let word = |i: u64| {
        let word = match i.checked_sub(HEADER_BYTES / 8) {
            None => header[i as usize],
            Some(i) if 8 * i < len_bytes => {
                from.load(from_at + 8 * i, Ordering::Relaxed) & mask_of(len_bytes - 8 * i)
            }
            Some(_) => 0,
        };
        [word as u32, (word >> 32) as u32]
    };
    for i in 0..slot_bytes(WORDS, len_bytes) / unit_bytes(WORDS) {
        let first = i as usize * WORDS;
        let data = std::array::from_fn(|k| word((first + k) as u64 / 2)[(first + k) % 2]);
        to.store_unit::<WORDS>(at + i * unit_bytes(WORDS), data, sequence);
    }
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
    let (mut at, mut wrong) = (rest_at, 0);
    for chunk in rest.chunks_mut(4 * WORDS) {
        let (data, found) = memory.load_unit::<WORDS>(at);
        bytes_from(data, chunk);
        wrong |= found ^ sequence;
        at += unit_bytes(WORDS);
    }
    wrong == 0
}

/// [`Memory::copy_payload`] unit by unit.
#[inline]
pub(crate) fn copy_units<M: Memory, const WORDS: usize>(
    to: &M,
    at: u64,
    (from, from_at): (&M, u64),
    len_bytes: u64,
    sequence: u32,
) -> bool {
    let word = |i: u64| {
        let i = HEADER_WORDS as u64 + i;
        let unit = from_at + i / WORDS as u64 * unit_bytes(WORDS);
        let (data, found) = from.load_unit::<WORDS>(unit);
        (found == sequence).then_some(data[i as usize % WORDS])
    };
    for i in 0..len_bytes.div_ceil(8) {
        let left = len_bytes - 8 * i;
        let high = if left > 4 { word(2 * i + 1) } else { Some(0) };
        let (Some(low), Some(high)) = (word(2 * i), high) else { return false };
        to.store(at + 8 * i, pair(low, high) & mask_of(left), Ordering::Relaxed);
    }
    true
}

const _: () = assert!(shared_words(1) == 0 && shared_words(3) == 1);

#[cfg(test)]
mod tests {
    use super::{copy_string, copy_units, header_units, load_header, load_payload, store_string};
    use crate::memory::{HeapMapping, MappedMemory, Memory, unit_bytes};

    const SEQUENCE: u32 = 0xfedc_ba98;
    const HEADER: [u64; 4] =
        [0x0123_4567_89ab_cdef, !7, 0x1111_2222_3333_4444, 0x5566_7788_99aa_bbcc];
    const SLOT: u64 = 128;
    /// A byte that no payload here has: marks memory that was not written.
    const BACKGROUND: u8 = 0xee;

    /// Whether a memory supports these units.
    fn has<const WORDS: usize>(memory: &MappedMemory) -> bool {
        let has = WORDS == 1 || memory.has_unit16();
        if !has {
            println!("SKIPPED: 16-byte accesses are not atomic on this machine");
        }
        has
    }

    fn lengths() -> impl Iterator<Item = usize> {
        (0..=200).step_by(if cfg!(miri) { 67 } else { 1 })
    }

    fn payload(len: usize) -> Vec<u8> {
        (0..len).map(|i| ((i * 7 + len) % 0xdd) as u8).collect()
    }

    fn paint(memory: &MappedMemory) {
        memory.copy_in(0, &[BACKGROUND; 1024]);
    }

    fn words(memory: &MappedMemory) -> [u64; 128] {
        memory.load_words(0)
    }

    /// The specialised moves of a memory have, word for word, the result of the generic code.
    fn own_moves_are_the_generic_code<const WORDS: usize>() {
        let [generic, own] = [(); 2].map(|()| HeapMapping::memory(1024));
        if !has::<WORDS>(&own) {
            return;
        }
        for len in lengths() {
            let payload = payload(len);
            [&generic, &own].into_iter().for_each(paint);
            store_string::<_, WORDS>(&generic, SLOT, HEADER, &payload, SEQUENCE);
            own.store_string::<WORDS>(SLOT, HEADER, &payload, SEQUENCE);
            assert_eq!(words(&generic), words(&own), "{len} bytes stored");

            assert_eq!(own.load_header::<WORDS>(SLOT, SEQUENCE), Some(HEADER));
            assert_eq!(load_header::<_, WORDS>(&own, SLOT, SEQUENCE), Some(HEADER));
            let mut read = [[BACKGROUND; 256]; 2];
            assert!(own.load_payload::<WORDS>(SLOT, &mut read[0][..len], SEQUENCE));
            assert!(load_payload::<_, WORDS>(&own, SLOT, &mut read[1][..len], SEQUENCE));
            for read in read {
                assert_eq!(read[..len], payload, "{len} bytes loaded");
                assert_eq!(read[len..], [BACKGROUND; 256][len..], "behind {len} bytes");
            }

            // A unit of another message is detected by both, wherever it is.
            for unit in 0..(32 + len).div_ceil(4 * WORDS) {
                let at = SLOT + unit as u64 * unit_bytes(WORDS);
                let (data, _) = own.load_unit::<WORDS>(at);
                own.store_unit(at, data, SEQUENCE ^ 1);
                let in_header = unit < header_units(WORDS);
                for header in [
                    own.load_header::<WORDS>(SLOT, SEQUENCE),
                    load_header::<_, WORDS>(&own, SLOT, SEQUENCE),
                ] {
                    assert_eq!(header.is_none(), in_header, "{unit}");
                }
                let mut buffer = vec![0; len];
                let whole = own.load_payload::<WORDS>(SLOT, &mut buffer, SEQUENCE);
                assert_eq!(load_payload::<_, WORDS>(&own, SLOT, &mut buffer, SEQUENCE), whole);
                assert_eq!(whole, unit < 32 / (4 * WORDS), "unit {unit} of {len} bytes");
                own.store_unit(at, data, SEQUENCE);
            }
        }
    }

    #[test]
    fn eight_byte_moves_are_the_generic_code() {
        own_moves_are_the_generic_code::<1>();
    }

    #[test]
    fn vector_moves_are_the_generic_code() {
        own_moves_are_the_generic_code::<3>();
    }

    /// As words, padded with zeros even if the producer did not pad; and nothing of a unit that has not arrived.
    fn payloads_are_copied_between_memories<const WORDS: usize>() {
        let [from, generic, own] = [(); 3].map(|()| HeapMapping::memory(1024));
        if !has::<WORDS>(&from) {
            return;
        }
        let old = 0xdddd_dddd;
        for len in lengths() {
            // One byte more, which must not be copied.
            store_string::<_, WORDS>(
                &from,
                SLOT,
                HEADER,
                &[&payload(len)[..], &[0xff]].concat(),
                SEQUENCE,
            );
            let both = || {
                [&generic, &own].into_iter().for_each(paint);
                let len = len as u64;
                let whole = copy_units::<_, WORDS>(&generic, SLOT, (&from, SLOT), len, SEQUENCE);
                assert_eq!(own.copy_payload::<WORDS>(SLOT, &from, SLOT, len, SEQUENCE), whole);
                whole
            };
            assert!(both(), "{len}");
            paint(&from);
            from.copy_in(SLOT, &payload(len));
            assert_eq!(words(&generic), words(&from), "{len}");
            assert_eq!(words(&own), words(&from), "{len}");

            store_string::<_, WORDS>(&from, SLOT, HEADER, &payload(len), SEQUENCE);
            for unit in 32 / (4 * WORDS)..(32 + len).div_ceil(4 * WORDS) {
                let at = SLOT + unit as u64 * unit_bytes(WORDS);
                let (data, _) = from.load_unit::<WORDS>(at);
                from.store_unit(at, [old; WORDS], SEQUENCE - 1);
                if len > 0 {
                    assert!(!both(), "unit {unit} of {len} bytes");
                }
                for word in words(&generic).into_iter().chain(words(&own)) {
                    assert!(
                        !word.to_le_bytes().contains(&(old as u8)),
                        "unit {unit} of {len} bytes"
                    );
                }
                from.store_unit(at, data, SEQUENCE);
            }
        }
    }

    /// The units equal those of the same payload from a buffer, even if other bytes follow it.
    fn payloads_are_copied_into_units<const WORDS: usize>() {
        let [from, expected, generic, own] = [(); 4].map(|()| HeapMapping::memory(1024));
        if !has::<WORDS>(&from) {
            return;
        }
        // Aligned for words, but not for units of 16 bytes.
        let at = SLOT + 8;
        for len in lengths() {
            from.copy_in(at, &[&payload(len)[..], &[0xff; 32]].concat());
            [&expected, &generic, &own].into_iter().for_each(paint);
            store_string::<_, WORDS>(&expected, SLOT, HEADER, &payload(len), SEQUENCE);
            let bytes = len as u64;
            copy_string::<_, WORDS>(&generic, SLOT, HEADER, (&from, at), bytes, SEQUENCE);
            own.copy_string::<WORDS>(SLOT, HEADER, &from, at, bytes, SEQUENCE);
            assert_eq!(words(&generic), words(&expected), "{len}");
            assert_eq!(words(&own), words(&expected), "{len}");
        }
    }

    /// The destination is another process's memory, which must not see the sequence of a ring that is not its own.
    #[cfg(not(miri))]
    #[test]
    fn no_sequence_shows_where_a_payload_is_copied_to() {
        use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
        use std::time::{Duration, Instant};
        /// Passes over the destination during which it was written. On one core a pass has to be interrupted for that.
        const PASSES: u64 = 100;
        const LIMIT: Duration = Duration::from_secs(60);
        let [from, to] = [(); 2].map(|()| HeapMapping::memory(1024));
        if !has::<3>(&from) {
            return;
        }
        let (len, over) = (100, AtomicBool::new(false));
        let (copies, passes) = (AtomicU64::new(0), AtomicU64::new(0));
        store_string::<_, 3>(&from, SLOT, HEADER, &payload(len), SEQUENCE);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !over.load(Relaxed) {
                    let before = copies.load(Relaxed);
                    for at in (0..len as u64).step_by(8) {
                        let word = to.load(SLOT + at, Relaxed);
                        let halves = [word as u32, (word >> 32) as u32];
                        assert!(!halves.contains(&SEQUENCE), "at {at}: {word:#x}");
                    }
                    passes.fetch_add(u64::from(copies.load(Relaxed) != before), Relaxed);
                }
            });
            let start = Instant::now();
            while copies.load(Relaxed) < 300_000 || passes.load(Relaxed) < PASSES {
                assert!(to.copy_payload::<3>(SLOT, &from, SLOT, len as u64, SEQUENCE));
                let copied = copies.fetch_add(1, Relaxed);
                // Its failure is the result of the scope.
                if reader.is_finished() || (copied % 4096 == 0 && start.elapsed() > LIMIT) {
                    break;
                }
            }
            over.store(true, Relaxed);
        });
        let passes = passes.into_inner();
        assert!(passes >= PASSES, "the destination was read {passes} times while it was written");
    }

    #[test]
    fn payloads_are_copied_into_eight_byte_units() {
        payloads_are_copied_into_units::<1>();
    }

    #[test]
    fn payloads_are_copied_into_sixteen_byte_units() {
        payloads_are_copied_into_units::<3>();
    }

    #[test]
    fn payloads_are_copied_out_of_eight_byte_units() {
        payloads_are_copied_between_memories::<1>();
    }

    #[test]
    fn payloads_are_copied_out_of_sixteen_byte_units() {
        payloads_are_copied_between_memories::<3>();
    }
}
