//! A hostile peer that writes anything anywhere affects only itself.
//!
//! Each end of a ring runs while the other side overwrites the region. The end may report errors,
//! but it must not panic and must access only its own part: a consumer reads its slots, arena and
//! head word and writes its tail; a producer writes its slots, arena and head and reads its tail. The
//! memory under test checks that on every access. (Debug builds also panic on every overflow.)

use std::mem::offset_of;

use crate::support::victims::{Seen, use_words, victims};
use crate::support::{Choose, Numbers, Ring, Shape, head, payload, ring, shapes};
use mqueue::abi::{
    ABI_VERSION, INLINE_BYTES_MAX, RINGS_MAX, RegionHeader, RingEntry, kind, protocol,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    HeapMapping, JoinError, MappedMemory, MqueuePlan, Region, RegionPlan, RingError, RingPlan,
};

#[test]
fn random_words_anywhere_at_any_time() {
    // Under Miri each round takes seconds.
    let rounds = if cfg!(miri) { 12 } else { 900 };
    for shape in shapes() {
        let mut seen = Seen::default();
        for round in 0..rounds {
            let start = [0, (1 << 32) - 5, 1 << 60][round % 3];
            let ring = ring(shape, 1 << (round % 4), start);
            let mut numbers = Numbers(round as u64 * 977 + 1);
            let mut victims = victims(&ring.memory).unwrap();
            for step in 0..100 {
                if numbers.below(3) == 0 {
                    victims.scribble(&mut numbers);
                }
                if step % 16 == 0 {
                    victims.restore();
                }
                victims.step(&mut numbers, &mut seen);
            }
        }
        assert!(seen.pushed > 0 && seen.read > 0 && seen.corrupt > 0, "{}: {seen:?}", shape.name);
        assert!(seen.handed_on > 0, "{}: {seen:?}", shape.name);
        // Seldom enough to be missing in few rounds.
        assert!(seen.bad > 0 || cfg!(miri), "{}: {seen:?}", shape.name);
    }
}

/// A hostile client's message goes directly into an mqueue's slot, here by the specialised moves of mapped memory:
/// only that slot changes, and it holds a message of the length that was checked.
#[test]
fn random_words_go_no_further_than_the_slot_they_are_copied_to() {
    let rounds = if cfg!(miri) { 2 } else { 200 };
    let words = |memory: &MappedMemory| -> Vec<u64> {
        (0..memory.len_bytes()).step_by(8).map(|at| memory.load(at, Ordering::Relaxed)).collect()
    };
    for (from, to) in shapes().into_iter().flat_map(|a| shapes().into_iter().map(move |b| (a, b))) {
        let (mut copied, mut refused) = (0, 0);
        for round in 0..rounds {
            let mut numbers = Numbers(round * 977 + 1);
            let (mut source, mut target) = (ring(from, 4, 0), ring(to, 4, 0));
            let attacker = victims(&source.memory).unwrap();
            for n in 0..12 {
                let len = numbers.below(u64::from(from.message_bytes_max.min(100)) + 1) as usize;
                let sent = source.producer.push(head(n), &payload(n, len));
                source.producer.publish();
                if numbers.below(3) == 0 {
                    attacker.scribble(&mut numbers);
                }
                let Ok(Some(header)) = source.consumer.peek() else { break };
                attacker.scribble(&mut numbers);
                let entry = &target.engine.entries()[0];
                let slot = entry.slots_offset + n % 4 * u64::from(entry.slot_stride);
                let before = words(&target.memory);
                let whole = target.producer.push_from(head(!n), &source.consumer, &header);
                for (at, (old, new)) in before.iter().zip(words(&target.memory)).enumerate() {
                    let inside =
                        (slot..slot + u64::from(entry.slot_stride)).contains(&(8 * at as u64));
                    assert!(inside || *old == new, "{} to {}: word {at}", from.name, to.name);
                }
                if !whole {
                    refused += 1;
                    break;
                }
                copied += 1;
                target.producer.publish();
                let arrived = target.consumer.peek().unwrap().expect("published");
                assert_eq!((arrived.token, arrived.len), (head(!n).token, header.len));
                let mut received = vec![0; header.len as usize];
                assert!(target.consumer.copy_out(&arrived, &mut received));
                target.consumer.advance();
                target.consumer.release();
                target.producer.credit().unwrap();
                source.consumer.advance();
                source.consumer.release();
                if sent.is_err() || source.producer.credit().is_err() {
                    break;
                }
            }
        }
        // Two granule rings have no direct copy.
        let can = ![from, to].iter().all(|ring| ring.name.starts_with("granule"));
        assert_eq!(copied > 0, can, "{} to {}: {copied}", from.name, to.name);
        assert!(copied + refused > 0, "{} to {}", from.name, to.name);
    }
}

/// Every invalid header is a `BadHeader`, and costs exactly one message.
#[test]
fn a_bad_header_is_skipped() {
    // Word of the header, and the value to write; `len` is in the low half of word 3.
    let message = u64::from(kind::MESSAGE) << 32;
    let arena = 1 << 48;
    for shape in shapes() {
        let inline = shape.arena_bytes == 0;
        let max = u64::from(shape.message_bytes_max);
        let mut bad = vec![
            (3, message | (max + 1)),
            (3, message | u64::from(u32::MAX)),
            (3, 8),                               // no kind
            (3, message | 2 << 48),               // unknown flag
            (3, message | 0xffff_0000_0000_0008), // every flag
        ];
        if inline {
            // Empty or not: there is no arena for it.
            bad.extend([(3, message | arena | 8), (3, message | arena)]);
        } else {
            let place = shape.arena_bytes;
            bad.extend([
                (3, message | u64::from(INLINE_BYTES_MAX + 1)),
                (2, place),
                (2, place - 8),
                (2, 4),
                (2, !7),
                (2, !0),
            ]);
        }
        for (word, value) in bad {
            let mut ring = ring(shape, 8, 100);
            let len = if inline { 40 } else { 1900 };
            for n in 100..103 {
                ring.producer.push(head(n), &payload(n, if n == 101 { len } else { 9 })).unwrap();
            }
            ring.producer.publish();
            let entry = ring.engine.entries()[0];
            let slot = entry.slots_offset + 101 % 8 * u64::from(entry.slot_stride);
            overwrite_header(&ring.memory, shape, slot, word, value);

            let mut outcomes = Vec::new();
            loop {
                match ring.consumer.peek() {
                    Ok(None) => break,
                    Ok(Some(header)) => {
                        let mut received = vec![0; header.len as usize];
                        assert!(ring.consumer.copy_out(&header, &mut received));
                        outcomes.push(Ok(header.tag));
                    }
                    Err(error) => outcomes.push(Err(error)),
                }
                ring.consumer.advance();
            }
            let expected = [Ok(!100), Err(RingError::BadHeader), Ok(!102)];
            assert_eq!(outcomes, expected, "{}: word {word} = {value:#x}", shape.name);
            ring.consumer.release();
            assert_eq!(ring.producer.credit(), Ok(8));
        }
    }
}

/// A producer that ignores credit does not keep its consumer busy forever: between two
/// releases a consumer reads at most as many messages as there are slots.
#[test]
fn a_flood_without_credit_ends() {
    for shape in shapes() {
        for depth in [1, 4] {
            let Ring { memory, engine, mut consumer, .. } = ring(shape, depth, 0);
            let entry = engine.entries()[0];
            let mut read = 0;
            for n in 0..10 * u64::from(depth) {
                // One more message, although nothing was released.
                let slot = entry.slots_offset + n % u64::from(depth) * u64::from(entry.slot_stride);
                let units =
                    entry.slot_stride / if shape.protocol == protocol::GRANULE16 { 16 } else { 8 };
                for i in 0..u64::from(units) {
                    match shape.protocol {
                        protocol::DOORBELL => {}
                        protocol::GRANULE8 => memory.store_unit(slot + 8 * i, [0], n as u32 + 1),
                        _ => memory.store_unit(slot + 16 * i, [0; 3], n as u32 + 1),
                    }
                }
                overwrite_header(&memory, shape, slot, 3, u64::from(kind::MESSAGE) << 32 | 8);
                memory.store(entry.head_offset, n + 1, Ordering::Relaxed);
                match consumer.peek() {
                    Ok(Some(_)) => {
                        consumer.advance();
                        read += 1;
                    }
                    Ok(None) => {}
                    Err(error) => panic!("{}: {error}", shape.name),
                }
            }
            assert_eq!(read, depth, "{}", shape.name);
            consumer.release();
            // A `doorbell` consumer detects it; a `granule` ring contains words of a later lap.
            let doorbell = shape.protocol == protocol::DOORBELL;
            let found = if doorbell { Err(RingError::Corrupt) } else { Ok(None) };
            assert_eq!(consumer.peek(), found, "{}", shape.name);
        }
    }
}

/// Overwrites a word of the header in a slot, keeping the sequences of granule units.
fn overwrite_header(memory: &MappedMemory, shape: Shape, slot: u64, word: u64, value: u64) {
    let halves = [2 * word, 2 * word + 1].into_iter().zip([value as u32, (value >> 32) as u32]);
    match shape.protocol {
        protocol::DOORBELL => memory.store(slot + 8 * word, value, Ordering::Relaxed),
        protocol::GRANULE8 => {
            for (i, half) in halves {
                let ([_], sequence) = memory.load_unit::<1>(slot + 8 * i);
                memory.store_unit(slot + 8 * i, [half], sequence);
            }
        }
        _ => {
            for (i, half) in halves {
                let at = slot + i / 3 * 16;
                let (mut data, sequence) = memory.load_unit::<3>(at);
                data[(i % 3) as usize] = half;
                memory.store_unit(at, data, sequence);
            }
        }
    }
}

/// A region of two blocks with a client mqueue each, of every shape in turn.
fn larger(shape: Shape) -> (RegionPlan, MappedMemory) {
    let Shape { protocol, message_bytes_max, arena_bytes, .. } = shape;
    let ring = RingPlan { protocol, message_bytes_max, arena_bytes };
    let small = RingPlan::doorbell(16, 0);
    let mqueues = vec![
        MqueuePlan { depth: 4, rx: ring, tx: small },
        MqueuePlan { depth: 2, rx: small, tx: ring },
    ];
    let plan = RegionPlan::of_blocks(2, &mqueues, 3);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    Region::format(memory.clone(), &plan).unwrap();
    (plan, memory)
}

/// Joins the attacker's version of a region. If that succeeds the rings must be safe to use: every
/// access inside the bounds of their (checked) directory entries.
fn join_and_use(memory: &MappedMemory, numbers: &mut Numbers, seen: &mut Seen) -> bool {
    let Ok(mut victims) = victims(memory) else { return false };
    for _ in 0..if cfg!(miri) { 8 } else { 40 } {
        victims.step(numbers, seen);
    }
    use_words(&Region::join(memory.clone()).map(|region| region.words()), numbers);
    true
}

/// Every byte of the header and the directory, changed in every bit and to hostile values.
#[test]
fn a_mutated_directory_is_refused_or_safe() {
    let (mut joined, mut refused, mut seen) = (0, 0, Seen::default());
    // Under Miri only small regions, some of the words and some of their bits: every access is interpreted.
    for shape in shapes().into_iter().filter(|shape| !cfg!(miri) || shape.arena_bytes == 0) {
        let (_, memory) = larger(shape);
        let pristine: Vec<u64> =
            (0..memory.len_bytes() / 8).map(|i| memory.load(8 * i, Ordering::Relaxed)).collect();
        let restore = || {
            for (i, word) in pristine.iter().enumerate() {
                memory.store(8 * i as u64, *word, Ordering::Relaxed);
            }
        };
        let region = Region::join(memory.clone()).unwrap();
        let directory = pristine[offset_of!(RegionHeader, directory_offset) / 8];
        let constant =
            (0..128_u64).chain(directory..directory + 128 * region.entries().len() as u64);
        let mut numbers = Numbers(0x5eed);
        for at in constant.step_by(8).step_by(if cfg!(miri) { 7 } else { 1 }) {
            let word = pristine[at as usize / 8];
            let flips =
                (0..64).step_by(if cfg!(miri) { 17 } else { 1 }).map(|bit| word ^ (1 << bit));
            let hostile: Vec<u64> = (0..12).map(|_| numbers.hostile(word)).collect();
            // Each half of a word alone: most fields are 32 bits wide.
            let halves = hostile.clone().into_iter().flat_map(|h| {
                [word & !0xffff_ffff | h & 0xffff_ffff, word & 0xffff_ffff | h << 32]
            });
            let hostile = hostile.clone().into_iter().chain(halves);
            for value in flips.chain(hostile.step_by(if cfg!(miri) { 7 } else { 1 })) {
                memory.store(at, value, Ordering::Relaxed);
                if join_and_use(&memory, &mut numbers, &mut seen) {
                    joined += 1;
                } else {
                    refused += 1;
                }
                restore();
            }
        }
    }
    assert!(joined > 10 && refused > 10, "{joined} joined, {refused} refused");
    assert!(seen.pushed > 0, "{seen:?}");
}

/// Several words at once, and regions of random words after a valid magic number.
#[test]
fn a_random_region_is_refused_or_safe() {
    let mut seen = Seen::default();
    let (mut joined, mut refused) = (0, 0);
    for round in 0..if cfg!(miri) { 10 } else { 3000 } {
        let shape = if cfg!(miri) { 3 * (round % 2) } else { round % shapes().len() };
        let (_, memory) = larger(shapes()[shape]);
        let mut numbers = Numbers(round as u64 + 1);
        let constant = memory.len_bytes().min(4096) / 8;
        for _ in 0..1 + numbers.below(4) {
            let at = 8 * numbers.below(constant);
            let near = memory.load(at, Ordering::Relaxed);
            memory.store(at, numbers.hostile(near), Ordering::Relaxed);
        }
        if round % 5 == 0 {
            for at in 2..constant {
                memory.store(8 * at, numbers.next(), Ordering::Relaxed);
            }
        }
        if join_and_use(&memory, &mut numbers, &mut seen) {
            joined += 1;
        } else {
            refused += 1;
        }
    }
    assert!(refused > 0 && (joined > 0 || cfg!(miri)), "{joined} joined, {refused} refused");
}

#[test]
fn a_truncated_region_is_refused() {
    let (plan, whole) = larger(shapes()[if cfg!(miri) { 0 } else { 1 }]);
    let need = plan.bytes().unwrap();
    for len in (0..need).step_by(128).step_by(if cfg!(miri) { 7 } else { 1 }) {
        let memory = HeapMapping::memory(len as usize);
        for at in (0..memory.len_bytes().min(need)).step_by(8) {
            memory.store(at, whole.load(at, Ordering::Relaxed), Ordering::Relaxed);
        }
        if memory.len_bytes() < need {
            let error = Region::join(memory).err().expect("a part of a region");
            assert!(matches!(error, JoinError::Header(_)), "{len} of {need} bytes: {error}");
        }
    }
}

#[test]
fn what_is_wrong_is_said() {
    let (_, memory) = larger(shapes()[0]);
    let join = |at: u64, value: u64| {
        let before = memory.load(at, Ordering::Relaxed);
        memory.store(at, value, Ordering::Relaxed);
        let error = Region::join(memory.clone()).err().expect("a broken region");
        memory.store(at, before, Ordering::Relaxed);
        error
    };
    assert_eq!(join(0, 0), JoinError::Magic(0));
    let (own, later) = (u64::from(ABI_VERSION), ABI_VERSION + 1);
    assert_eq!(join(8, u64::from(later) | 128 << 32), JoinError::Version { found: later });
    assert_eq!(join(8, own | 127 << 32), JoinError::Header("header size"));
    assert_eq!(join(16, 1 << 40), JoinError::Header("larger than the memory"));
    assert_eq!(join(32, 0), JoinError::Header("block count"));
    assert_eq!(join(32, u64::MAX), JoinError::Header("block count"));
    assert_eq!(join(32, 2), JoinError::Header("mqueue count"));
    assert_eq!(join(32, 2 | 5 << 32), JoinError::Header("mqueue count"));
    assert_eq!(join(32, 2 | u64::MAX << 32), JoinError::Header("mqueue count"));
    assert_eq!(join(88, 0), JoinError::Header("ring count"));
    assert_eq!(join(88, u64::from(u32::MAX)), JoinError::Header("ring count"));
    assert_eq!(join(88, u64::from(RINGS_MAX)), JoinError::Header("directory"));
    assert_eq!(join(40, !127), JoinError::Header("status page"));
    assert_eq!(join(48, 64), JoinError::Header("directory"));
    for (at, what) in [(56, "RX heads"), (64, "TX tails"), (72, "RX tails"), (80, "TX heads")] {
        for value in [0, 504, 520, memory.len_bytes(), !127] {
            assert_eq!(join(at, value), JoinError::Header(what), "{value}");
        }
    }
}

/// Every check of a directory entry, on rings that are valid except for one field.
#[test]
fn what_is_wrong_with_a_ring_is_said() {
    let granule = shapes().into_iter().find(|shape| shape.protocol == protocol::GRANULE8).unwrap();
    for (shape, index) in [(shapes()[1], 0), (granule, 0)] {
        let (_, memory) = larger(shape);
        let region = Region::join(memory.clone()).unwrap();
        let entry = region.entries()[index];
        let directory =
            memory.load(offset_of!(RegionHeader, directory_offset) as u64, Ordering::Relaxed);
        let refused = |change: &dyn Fn(&mut RingEntry)| {
            let mut changed = entry;
            change(&mut changed);
            let store = |entry: RingEntry| {
                // SAFETY: a plain structure of integers without padding, of exactly 16 words.
                let words: [u64; 16] = unsafe { std::mem::transmute(entry) };
                memory.store_words(directory + 128 * index as u64, words);
            };
            store(changed);
            let error = Region::join(memory.clone()).err();
            store(entry);
            match error {
                Some(JoinError::Ring { ring, what }) if ring == index as u32 => what,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(refused(&|e| e.kind = 2), "head word");
        assert_eq!(refused(&|e| e.protocol = 0), "protocol");
        assert_eq!(refused(&|e| e.protocol = 4), "protocol");
        assert_eq!(refused(&|e| e.placement = 2), "placement");
        assert_eq!(refused(&|e| e.mqueue += 1), "head word");
        assert_eq!(refused(&|e| e.mqueue += 4), "mqueue index");
        assert_eq!(refused(&|e| e.depth = 0), "depth");
        assert_eq!(refused(&|e| e.depth = 3), "depth");
        assert_eq!(refused(&|e| e.depth = 32_768), "depth");
        assert_eq!(refused(&|e| e.inline_bytes = 0), "inline bytes");
        assert_eq!(refused(&|e| e.inline_bytes -= 4), "inline bytes");
        assert_eq!(refused(&|e| e.inline_bytes = INLINE_BYTES_MAX + 8), "inline bytes");
        assert_eq!(refused(&|e| e.message_bytes_max = e.inline_bytes - 8), "inline bytes");
        assert_eq!(refused(&|e| e.message_bytes_max = 0), "longest message");
        assert_eq!(refused(&|e| e.message_bytes_max = u32::MAX), "longest message");
        assert_eq!(refused(&|e| e.slot_stride -= 64), "slot stride");
        assert_eq!(refused(&|e| e.slot_stride += 8), "slot stride");
        assert_eq!(refused(&|e| e.slots_offset += 64), "slots");
        assert_eq!(refused(&|e| e.slots_offset = memory.len_bytes() - 128), "slots");
        assert_eq!(refused(&|e| e.slots_offset = !127), "slots");
        assert_eq!(refused(&|e| e.slots_offset = 384), "slots");
        assert_eq!(refused(&|e| e.head_offset += 8), "head word");
        assert_eq!(refused(&|e| e.tail_offset = e.head_offset), "tail word");
        if shape.protocol == protocol::GRANULE8 {
            let what = "arena of a granule ring";
            assert_eq!(refused(&|e| e.arena_bytes = 128), what);
            assert_eq!(refused(&|e| e.message_bytes_max = e.inline_bytes + 1), what);
        } else {
            assert_eq!(refused(&|e| e.arena_bytes = 2008), "arena size");
            assert_eq!(refused(&|e| e.arena_bytes -= 1), "arena size");
            assert_eq!(refused(&|e| e.arena_bytes = !7), "arena");
            assert_eq!(refused(&|e| e.arena_offset += 8), "arena");
            assert_eq!(refused(&|e| e.arena_offset = memory.len_bytes()), "arena");
        }
    }
}

/// Counts that contradict each other, and ones that would soon overflow.
#[test]
fn impossible_counts_are_refused_by_a_join() {
    for (head, tail) in [(5, 0), (0, 1), (u64::MAX, u64::MAX), (1 << 63 | 1, 1 << 63), (!0, 0)] {
        let (_, memory) = larger(shapes()[0]);
        let entry = Region::join(memory.clone()).unwrap().entries()[2];
        memory.store(entry.head_offset, head, Ordering::Relaxed);
        memory.store(entry.tail_offset, tail, Ordering::Relaxed);
        let error = Region::join(memory).err();
        let expected = JoinError::Ring { ring: 2, what: "head and tail" };
        assert_eq!(error, Some(expected), "head {head} tail {tail}");
    }
}

/// The last line of defence: an access outside the memory panics, whatever its caller.
#[test]
fn memory_refuses_what_lies_outside() {
    let memory = HeapMapping::memory(256);
    let end = memory.len_bytes();
    type Access = fn(&MappedMemory, u64);
    let accesses: &[(&str, u64, Access)] = &[
        ("load", 8, |m, at| _ = m.load(at, Ordering::Relaxed)),
        ("store", 8, |m, at| m.store(at, 1, Ordering::Relaxed)),
        ("load_words", 32, |m, at| _ = m.load_words::<4>(at)),
        ("store_words", 32, |m, at| m.store_words(at, [1; 4])),
        ("copy_in", 24, |m, at| m.copy_in(at, &[1; 17])),
        ("copy_out", 24, |m, at| m.copy_out(at, &mut [0; 17])),
        ("load_unit", 8, |m, at| _ = m.load_unit::<1>(at)),
        ("store_unit", 8, |m, at| m.store_unit(at, [1], 1)),
        ("load_header", 64, |m, at| _ = m.load_header::<1>(at, 1)),
        ("load_payload", 80, |m, at| _ = m.load_payload::<1>(at, &mut [0; 5], 1)),
        ("store_string", 80, |m, at| m.store_string::<1>(at, [1; 4], &[1; 5], 1)),
        ("copy_payload from", 80, |m, at| _ = m.copy_payload::<1>(0, m, at, 5, 1)),
        ("copy_payload to", 8, |m, at| _ = m.copy_payload::<1>(at, m, 0, 5, 1)),
        ("copy_string from", 8, |m, at| m.copy_string::<1>(0, [1; 4], m, at, 5, 1)),
        ("copy_string to", 80, |m, at| m.copy_string::<1>(at, [1; 4], m, 0, 5, 1)),
        ("load_unit, 16 bytes", 16, |m, at| _ = m.load_unit::<3>(at)),
        ("store_unit, 16 bytes", 16, |m, at| m.store_unit(at, [1; 3], 1)),
        ("load_header, 16 bytes", 48, |m, at| _ = m.load_header::<3>(at, 1)),
        ("load_payload, 16 bytes", 64, |m, at| _ = m.load_payload::<3>(at, &mut [0; 5], 1)),
        ("store_string, 16 bytes", 64, |m, at| m.store_string::<3>(at, [1; 4], &[1; 5], 1)),
        ("copy_payload from, 16 bytes", 64, |m, at| _ = m.copy_payload::<3>(0, m, at, 5, 1)),
        ("copy_payload to, of 16 bytes", 8, |m, at| _ = m.copy_payload::<3>(at, m, 0, 5, 1)),
        ("copy_string from, to 16 bytes", 8, |m, at| m.copy_string::<3>(0, [1; 4], m, at, 5, 1)),
        ("copy_string to, 16 bytes", 64, |m, at| m.copy_string::<3>(at, [1; 4], m, 0, 5, 1)),
    ];
    for (name, bytes, access) in accesses {
        let refused = |at: u64| {
            let memory = memory.clone();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| access(&memory, at))).is_err()
        };
        let sixteen = name.contains("16");
        if !sixteen || memory.has_unit16() {
            assert!(!refused(0) && !refused(end - bytes), "{name} inside");
        }
        let step = if sixteen { 16 } else { 8 };
        let near = [end - bytes + step, u64::MAX, 4, end, end + 128, 1 << 40, !15, 1];
        // Offsets that a check with shifts or additions may mistake for valid ones.
        let far = [1 << 60, 1 << 61, 1 << 63, (1 << 63) + 8, !7, (15 << 60) + 8, u64::MAX - end];
        // A panic is slow where every access is interpreted.
        for at in near.into_iter().chain(far).take(if cfg!(miri) { 3 } else { 15 }) {
            assert!(refused(at), "{name} at {at}");
        }
    }
}
