//! Command rings: what a region with them looks like, and what either end makes of nonsense from the other.

use crate::support::{Choose, Numbers};
use mqueue::abi::{CopyCommand, RingEntry, command, command_status, ring_kind};
use mqueue::command::{BufferRange, Copy, Direction, Done, Request};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    HeapMapping, JoinError, MappedMemory, MqueuePlan, PlanError, Region, RegionPlan, RingPlan,
};
use proptest::prelude::*;
use std::mem::offset_of;

const DEPTH: u32 = 4;
const STAGING_BYTES: u64 = 1024;

fn plan() -> RegionPlan {
    let ring = RingPlan::doorbell(32, 0);
    RegionPlan::of_blocks(2, &[MqueuePlan { depth: 2, rx: ring, tx: ring }], 1)
        .with_commands(DEPTH, STAGING_BYTES)
        .with_commands(DEPTH, 0)
}

fn region() -> (MappedMemory, Region<MappedMemory>, Region<MappedMemory>) {
    let memory = HeapMapping::memory(plan().bytes().unwrap() as usize);
    let near = Region::format(memory.clone(), &plan()).unwrap();
    let far = Region::join(memory.clone()).unwrap();
    (memory, near, far)
}

fn copy(n: u64) -> Copy {
    let direction = if n % 2 == 0 { Direction::ToBuffer } else { Direction::FromBuffer };
    let staging_offset = n.wrapping_mul(8);
    Copy { direction, staging_offset, buffer: n as u32, buffer_offset: n << 40, bytes: !n }
}

/// The entry of the first ring of this kind.
fn entry(region: &Region<MappedMemory>, kind: u16) -> RingEntry {
    *region.entries().iter().find(|entry| entry.kind == kind).expect("it was planned")
}

#[test]
fn commands_go_out_and_completions_come_back() {
    let (_, mut near, mut far) = region();
    assert_eq!((near.command_rings(), near.mqueue_count()), (2, 2));
    assert_eq!((near.staging(0).1, near.staging(1)), (STAGING_BYTES, (0, 0)));
    for pair in 0..2 {
        let (mut sender, mut receiver) = (near.command_sender(pair), far.command_receiver(pair));
        for n in 0..50 {
            assert_eq!(receiver.command(), Ok(None));
            let requests = [Request::Copy(copy(n)), Request::Describe(!n as u32)];
            let range = Some(BufferRange { address: n << 40, bytes: !n });
            sender.send(n, &requests[0]).unwrap();
            sender.send(!n, &requests[1]).unwrap();
            assert_eq!(receiver.command(), Ok(Some((n, Ok(requests[0])))));
            assert_eq!(receiver.command(), Ok(Some((!n, Ok(requests[1])))));
            let answers = [
                Done { number: !n, status: command_status::OK, range },
                Done::of(n, command_status::RANGE),
            ];
            for answer in &answers {
                receiver.complete(answer).unwrap();
            }
            for answer in answers {
                assert_eq!(sender.completion(), Ok(Some(answer)));
            }
            assert_eq!(sender.completion(), Ok(None));
        }
    }
}

#[test]
fn a_copy_fits_or_does_not() {
    let fits = |staging_offset, buffer_offset, bytes| {
        let copy = Copy { staging_offset, buffer_offset, bytes, ..copy(0) };
        copy.fits(1024, 64)
    };
    for (staging, buffer, bytes) in [(0, 0, 64), (960, 0, 64), (1016, 56, 8)] {
        assert!(fits(staging, buffer, bytes), "{staging} {buffer} {bytes}");
    }
    for (staging, buffer, bytes) in [
        (0, 0, 0),
        (0, 0, 72),
        (0, 8, 64),
        (968, 0, 64),
        (1024, 0, 8),
        (0, 64, 8),
        (4, 0, 8),
        (0, 4, 8),
        (0, 0, 12),
        (!7, 0, 8),
        (0, !7, 8),
        (8, 8, !7),
        (u64::MAX, u64::MAX, u64::MAX),
    ] {
        assert!(!fits(staging, buffer, bytes), "{staging} {buffer} {bytes}");
    }
}

/// What is malformed gets a status, and the command behind it is read.
#[test]
fn malformed_commands_are_unknown() {
    let (memory, mut near, mut far) = region();
    let commands = entry(&near, ring_kind::COMMANDS);
    let (mut sender, mut receiver) = (near.command_sender(0), far.command_receiver(0));
    let slot =
        |n: u64| commands.slots_offset + n % u64::from(DEPTH) * u64::from(commands.slot_stride);
    let direction = 32 + offset_of!(CopyCommand, direction) as u64 / 8 * 8;
    let known = u64::from(command::COPY) << 32 | size_of::<CopyCommand>() as u64;
    let bad = [
        (24, known & !0xffff_ffff),
        (24, known - 8),
        (24, u64::from(command::DONE) << 32 | 32),
        (24, u64::from(command::DESCRIBE) << 32 | 32),
        (24, u64::from(command::DESCRIBE) << 32),
        (24, 200 << 32 | 32),
        (direction, 0),
        (direction, 3 << 32),
        (direction, !0),
    ];
    for (n, (at, value)) in (0..).zip(bad) {
        sender.send(n, &Request::Copy(copy(0))).unwrap();
        memory.store(slot(n) + at, value, Ordering::Relaxed);
        let unknown = Err(command_status::UNKNOWN);
        assert_eq!(receiver.command(), Ok(Some((n, unknown))), "{at} {value:#x}");
    }
    sender.send(100, &Request::Copy(copy(0))).unwrap();
    assert_eq!(receiver.command(), Ok(Some((100, Ok(Request::Copy(copy(0)))))));
    memory.store(commands.head_offset, u64::MAX, Ordering::Relaxed);
    assert!(receiver.command().is_err());
}

#[test]
fn a_runtime_that_answers_nonsense_is_noticed() {
    let completion = |value: u64| {
        let (memory, mut near, mut far) = region();
        let entry = entry(&near, ring_kind::COMPLETIONS);
        let (mut sender, mut receiver) = (near.command_sender(0), far.command_receiver(0));
        receiver.complete(&Done::of(1, command_status::OK)).unwrap();
        memory.store(entry.slots_offset + 24, value, Ordering::Relaxed);
        sender.completion()
    };
    let done = u64::from(command::DONE) << 32;
    assert_eq!(completion(done), Ok(Some(Done::of(1, command_status::OK))));
    assert_eq!(completion(done | 77 << 40), Ok(Some(Done::of(1, 77))));
    let range = Some(BufferRange { address: 0, bytes: 0 });
    assert_eq!(completion(done | 16), Ok(Some(Done { range, ..Done::of(1, 0) })));
    for value in [0, 8, u64::from(command::COPY) << 32, done | 8, done | 17, done | 32, u64::MAX] {
        assert!(completion(value).is_err(), "{value:#x}");
    }
}

#[test]
fn impossible_command_rings_are_refused() {
    let (memory, near, _) = region();
    let directory = memory.load(48, Ordering::Relaxed);
    let index = near.entries().iter().position(|e| e.kind == ring_kind::COMMANDS).unwrap();
    let refused = |change: &dyn Fn(&mut RingEntry)| {
        let entry = near.entries()[index];
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
            Some(JoinError::Ring { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&|e| e.block = 0), "apart from the others of its block");
    assert_eq!(refused(&|e| e.index = 16), "index");
    assert_eq!(refused(&|e| e.index = u32::MAX), "index");
    assert_eq!(refused(&|e| e.index = 1), "command ring described twice");
    assert_eq!(refused(&|e| e.mqueue = 1), "mqueue index");
    assert_eq!(refused(&|e| e.protocol = 2), "protocol");
    assert_eq!(refused(&|e| e.depth = 3), "depth");
    assert_eq!(refused(&|e| e.head_offset = 128), "head word");
    assert_eq!(refused(&|e| e.head_offset += 8), "head word");
    assert_eq!(refused(&|e| e.tail_offset = !127), "tail word");
    assert_eq!(refused(&|e| e.tail_offset = e.head_offset), "parts that share memory");
    assert_eq!(refused(&|e| e.slots_offset = e.head_offset), "parts that share memory");
    assert_eq!(refused(&|e| e.staging_offset = e.slots_offset), "parts that share memory");
    assert_eq!(refused(&|e| e.staging_bytes = !7), "staging");
    assert_eq!(refused(&|e| e.staging_bytes += 128), "staging");
    assert_eq!(refused(&|e| e.staging_bytes = 0), "staging");
    assert_eq!(refused(&|e| e.kind = ring_kind::COMPLETIONS), "staging");
    // A ring of an unknown version is skipped; its other ring is then alone.
    assert_eq!(refused(&|e| e.version += 1), "command ring without its other ring");
    let mut alone = plan();
    alone.rings.pop();
    let lone = "command ring without its other ring";
    assert!(matches!(alone.bytes(), Err(PlanError::Ring { what, .. }) if what == lone));
    let mut gap = plan();
    gap.rings.iter_mut().skip(6).for_each(|ring| ring.index = 3);
    assert!(gap.bytes().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 300 }))]

    /// Random words anywhere in the command rings: an error, a status or a command, and never a wait or a panic.
    #[test]
    fn random_words_are_an_error_or_a_status(seed in any::<u64>()) {
        let (memory, mut near, mut far) = region();
        let entries = [ring_kind::COMMANDS, ring_kind::COMPLETIONS].map(|kind| entry(&near, kind));
        let (mut sender, mut receiver) = (near.command_sender(0), far.command_receiver(0));
        let mut numbers = Numbers(seed | 1);
        for n in 0..40 {
            let entry = entries[numbers.below(2) as usize];
            let at = entry.offset + 8 * numbers.below(entry.bytes / 8);
            let old = memory.load(at, Ordering::Relaxed);
            memory.store(at, numbers.hostile(old), Ordering::Relaxed);
            let _ = sender.send(n, &Request::Copy(copy(n)));
            for _ in 0..8 {
                if let Ok(Some((number, _))) = receiver.command() {
                    let _ = receiver.complete(&Done::of(number, command_status::OK));
                }
                let _ = sender.completion();
            }
        }
    }
}
