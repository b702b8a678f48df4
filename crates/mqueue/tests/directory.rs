//! The directory of a region: rings are found by the content of their entries, in any order, and unknown entries
//! are skipped or refused.

mod support;

use mqueue::abi::{
    BACKENDS_MAX, DirectoryEntry, NO_BLOCK, RegionHeader, RingEntry, ring_flags, ring_kind,
    ring_version,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    HeapMapping, JoinError, MappedMemory, MqueuePlan, PlanError, Region, RegionPlan, RingPlan, Role,
};
use proptest::prelude::*;
use std::mem::offset_of;
use support::{head, payload};

const RING: RingPlan =
    RingPlan { protocol: mqueue::abi::protocol::DOORBELL, message_bytes_max: 32, arena_bytes: 0 };
const MQUEUE: MqueuePlan = MqueuePlan { depth: 2, rx: RING, tx: RING };
const ENTRY_BYTES: u64 = size_of::<DirectoryEntry>() as u64;

fn plan(blocks: u32, clients: u32) -> RegionPlan {
    RegionPlan::of_blocks(blocks, &vec![MQUEUE; 1 + clients as usize], 1)
}

/// A region with room for entries after those of the plan, and unused memory at its end.
struct Bench {
    memory: MappedMemory,
    header: RegionHeader,
    entries: Vec<DirectoryEntry>,
}

/// Bytes after the rings that entries of tests may claim.
const SPARE_BYTES: u64 = 4096;

impl Bench {
    fn new(plan: &RegionPlan) -> Self {
        let bytes = plan.bytes().unwrap() as usize;
        let planned = HeapMapping::memory(bytes);
        let region = Region::format(planned.clone(), plan).unwrap();
        let entries = region.entries().iter().map(|entry| DirectoryEntry::from(*entry)).collect();
        // The directory is moved after the rings, where there is room for more of it.
        let directory = bytes as u64 + SPARE_BYTES;
        let memory = HeapMapping::memory(directory as usize + 64 * 1024);
        for at in (0..bytes as u64).step_by(8) {
            memory.store(at, planned.load(at, Ordering::Relaxed), Ordering::Relaxed);
        }
        // SAFETY: a plain structure of integers without padding, of exactly 16 words.
        let mut header: RegionHeader = unsafe { std::mem::transmute(memory.load_words::<16>(0)) };
        header.directory_offset = directory;
        header.region_bytes = memory.len_bytes();
        Self { memory, header, entries }
    }

    fn spare(&self) -> u64 {
        self.header.directory_offset - SPARE_BYTES
    }

    fn join(&self) -> Result<Region<MappedMemory>, JoinError> {
        let header = RegionHeader { ring_count: self.entries.len() as u32, ..self.header };
        // SAFETY: as above.
        let words: [u64; 16] = unsafe { std::mem::transmute(header) };
        self.memory.store_words(0, words);
        for (at, entry) in
            (header.directory_offset..).step_by(ENTRY_BYTES as usize).zip(&self.entries)
        {
            // SAFETY: as above.
            let words: [u64; 16] = unsafe { std::mem::transmute(*entry) };
            self.memory.store_words(at, words);
        }
        Region::join(self.memory.clone())
    }

    fn error(&self) -> JoinError {
        self.join().err().expect("an invalid directory")
    }
}

fn unknown(kind: u16, flags: u32) -> DirectoryEntry {
    DirectoryEntry {
        kind,
        version: 1,
        flags,
        block: NO_BLOCK,
        index: 0,
        offset: 0,
        bytes: 0,
        own: [u64::MAX; 12],
    }
}

/// Sends a message through every ring of every mqueue.
fn every_ring_works(memory: &MappedMemory) {
    let mut engine = Region::join(memory.clone()).unwrap();
    let mut accelerator = Region::join(memory.clone()).unwrap();
    for mqueue in 0..engine.mqueue_count() {
        let (mut requests, mut replies) = engine.engine_ends(mqueue);
        let (mut taken, mut answers) = accelerator.accelerator_ends(mqueue);
        let n = u64::from(mqueue);
        requests.push(head(n), &payload(n, 9)).unwrap();
        requests.publish();
        answers.push(head(!n), &payload(!n, 7)).unwrap();
        answers.publish();
        assert_eq!(taken.peek().unwrap().expect("published").token, head(n).token);
        assert_eq!(replies.peek().unwrap().expect("published").token, head(!n).token);
        assert_ne!(engine.words().rx_head(mqueue), 0);
        assert!(engine.words().tx_waiting(mqueue));
    }
}

#[test]
fn a_plan_makes_the_mqueues_it_names() {
    let mut region =
        Region::format(HeapMapping::memory(plan(3, 2).bytes().unwrap() as usize), &plan(3, 2))
            .unwrap();
    assert_eq!((region.mqueue_count(), region.mqueues_per_block_max()), (9, 3));
    assert_eq!(region.mqueues_of(1), [3, 4, 5]);
    assert_eq!(region.role(3), (1, Role::Server));
    assert_eq!(region.role(5), (1, Role::Client(1)));
    assert_eq!(region.directory_of(1), 6..12);
    let kinds = region.rings_of(4).map(|entry| entry.kind);
    assert_eq!(kinds, [ring_kind::CLIENT_RX, ring_kind::CLIENT_TX]);
    let _ = region.engine_ends(8);
}

#[test]
fn plans_that_make_no_whole_mqueues_are_refused() {
    let refused = |change: &dyn Fn(&mut RegionPlan)| {
        let mut plan = plan(2, 1);
        change(&mut plan);
        match plan.bytes() {
            Err(PlanError::Ring { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&|p| p.rings[0].kind = 99), "kind");
    assert_eq!(refused(&|p| _ = p.rings.remove(1)), "mqueue without its other ring");
    assert_eq!(refused(&|p| _ = p.rings.drain(4..6)), "a block without a server mqueue");
    assert_eq!(refused(&|p| p.rings[3] = p.rings[2]), "mqueue described twice");
    assert_eq!(refused(&|p| p.rings[0].block = 2), "owner block");
    assert_eq!(refused(&|p| p.rings.swap(0, 7)), "apart from the others of its block");
    assert_eq!(refused(&|p| p.rings[2..4].iter_mut().for_each(|r| r.index = 1)), "index");
    let many = BACKENDS_MAX;
    assert_eq!(refused(&|p| p.rings[2..4].iter_mut().for_each(|r| r.index = many)), "index");
}

#[test]
fn an_unknown_kind_is_skipped_unless_it_is_required() {
    for kind in [0, 7, 1000, u16::MAX] {
        let mut bench = Bench::new(&plan(2, 1));
        // Before, between and after known entries.
        for at in [0, 5, 10] {
            bench.entries.insert(at, unknown(kind, 0));
        }
        let offset = bench.spare();
        bench.entries[5] = DirectoryEntry { block: 0, offset, bytes: 128, ..bench.entries[5] };
        let region = bench.join().unwrap();
        assert_eq!((region.entries().len(), region.mqueue_count()), (8, 4));
        assert_eq!(region.directory_of(0), 1..6);
        every_ring_works(&bench.memory);

        // Bits other than REQUIRED are defined by the kind.
        bench.entries[5].flags = !ring_flags::REQUIRED;
        assert!(bench.join().is_ok());
        bench.entries[5].flags = ring_flags::REQUIRED;
        let error = bench.error();
        assert_eq!(error, JoinError::Required { ring: 5, kind, version: 1 });
        let text = format!(
            "ring 5 of the region's directory is of kind {kind}, version 1, which the region requires and this program \
             does not support: use matching builds"
        );
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn another_version_of_a_known_kind_is_an_unknown_kind() {
    let mut bench = Bench::new(&plan(1, 1));
    let later = ring_version::MQUEUE + 1;
    bench.entries[2].version = later;
    let kind = ring_kind::CLIENT_RX;
    assert_eq!(bench.error(), JoinError::Required { ring: 2, kind, version: later });
    // It is skipped, and therefore missing.
    bench.entries[2].flags = 0;
    let what = "mqueue without its other ring";
    assert_eq!(bench.error(), JoinError::Ring { ring: 3, what });
}

#[test]
fn what_holds_for_entries_of_every_kind_is_checked() {
    let bench = || Bench::new(&plan(2, 0));
    let refused = |change: &dyn Fn(&mut DirectoryEntry, u64)| {
        let mut bench = bench();
        let mut entry = unknown(77, 0);
        change(&mut entry, bench.spare());
        bench.entries.insert(2, entry);
        match bench.join() {
            Err(JoinError::Ring { ring: 2, what }) => what,
            other => panic!("{:?}", other.err()),
        }
    };
    assert_eq!(refused(&|e, _| e.block = 2), "owner block");
    assert_eq!(refused(&|e, _| e.block = NO_BLOCK - 1), "owner block");
    for (offset, bytes) in [
        (0, 1),
        (0, u64::MAX),
        (1 << 12, 0),
        (64, 128),
        (384, 128),
        (!127, 128),
        (!127, 256),
        (u64::MAX, u64::MAX),
        (1 << 63, 1 << 63),
        (512, !0),
    ] {
        assert_eq!(
            refused(&|e, _| (e.offset, e.bytes) = (offset, bytes)),
            "memory",
            "{offset} {bytes}"
        );
    }
    assert_eq!(refused(&|e, spare| (e.offset, e.bytes) = (spare + 64, 64)), "memory");
    let taken = "memory that is another's";
    // The status page, the directory and a ring's slots.
    assert_eq!(refused(&|e, _| (e.offset, e.bytes) = (512, 1)), taken);
    assert_eq!(refused(&|e, spare| (e.offset, e.bytes) = (spare, SPARE_BYTES + 1)), taken);
    let mut apart = bench();
    apart.entries.push(DirectoryEntry { block: 0, ..unknown(77, 0) });
    let what = "apart from the others of its block";
    assert_eq!(apart.error(), JoinError::Ring { ring: 4, what });
}

#[test]
fn rings_that_share_memory_are_refused() {
    let mut bench = Bench::new(&plan(2, 1));
    let slots = offset_of!(RingEntry, slots_offset) / 8 - 4;
    let first = bench.entries[1];
    bench.entries[6] = DirectoryEntry { offset: first.offset, ..bench.entries[6] };
    bench.entries[6].own[slots] = first.offset;
    match bench.error() {
        JoinError::Ring { ring: 1 | 6, what } => assert_eq!(what, "memory that is another's"),
        other => panic!("{other}"),
    }
    // By one line of the last slot.
    let mut bench = Bench::new(&plan(2, 1));
    bench.entries[1].bytes += 1;
    let what = "memory that is another's";
    assert_eq!(bench.error(), JoinError::Ring { ring: 2, what });
    // Two parts other than rings.
    let mut bench = Bench::new(&plan(2, 1));
    bench.header.blocks_offset = bench.header.rx_heads_offset;
    assert!(matches!(bench.error(), JoinError::Header("RX heads" | "status page")));
}

#[test]
fn counts_that_do_not_fit_the_rings_are_refused() {
    let mut bench = Bench::new(&plan(2, 1));
    bench.header.mqueue_count = 5;
    assert_eq!(bench.error(), JoinError::Header("mqueue count"));
    bench.header.mqueue_count = 3;
    assert_eq!(bench.error(), JoinError::Ring { ring: 6, what: "mqueue index" });
    let mut bench = Bench::new(&plan(2, 1));
    bench.header.block_count = 3;
    // The status page of three blocks is longer.
    assert!(matches!(bench.error(), JoinError::Header("a block without a server mqueue")));
    bench.header.block_count = 1;
    assert_eq!(bench.error(), JoinError::Ring { ring: 4, what: "owner block" });
    bench.entries.clear();
    assert_eq!(bench.error(), JoinError::Header("ring count"));
}

/// Blocks, their clients, and the order of entries and numbers.
fn layouts() -> impl Strategy<Value = (Vec<u32>, u64)> {
    (prop::collection::vec(0..4_u32, 1..6), any::<u64>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]

    /// The position of an entry has no meaning: blocks in any order, the rings of a block in any order, mqueues with any
    /// numbers, and entries of unknown kinds between them.
    #[test]
    fn rings_are_found_by_what_their_entries_say((clients, seed) in layouts()) {
        use support::{Choose, Numbers};
        let mut numbers = Numbers(seed | 1);
        let mut blocks: Vec<(u32, Vec<_>)> = (0..).zip(&clients).map(|(block, &clients)| {
            let rings = RegionPlan::of_blocks(1, &vec![MQUEUE; 1 + clients as usize], 1).rings;
            (block, rings)
        }).collect();
        for at in (1..blocks.len()).rev() {
            blocks.swap(at, numbers.below(at as u64 + 1) as usize);
        }
        let mut plan = plan(clients.len() as u32, 0);
        plan.rings.clear();
        for (block, rings) in &mut blocks {
            for at in (1..rings.len()).rev() {
                rings.swap(at, numbers.below(at as u64 + 1) as usize);
            }
            plan.rings.extend(rings.iter().map(|ring| mqueue::RingSpec { block: *block, ..*ring }));
        }
        let mut bench = Bench::new(&plan);
        // A skipped entry may be anywhere if it belongs to no block.
        for _ in 0..numbers.below(4) {
            let at = numbers.below(bench.entries.len() as u64 + 1) as usize;
            bench.entries.insert(at, unknown(7 + numbers.below(60_000) as u16, 0));
        }
        let apart = bench.join();
        // One in the middle of a block's entries separates them.
        if let Err(error) = apart {
            let parted = matches!(error, JoinError::Ring { what: "apart from the others of its block", .. });
            prop_assert!(parted, "{error}");
            return Ok(());
        }
        let region = bench.join().unwrap();
        for (block, &clients) in (0..).zip(&clients) {
            let mqueues = region.mqueues_of(block);
            prop_assert_eq!(mqueues.len() as u32, 1 + clients);
            for (at, &mqueue) in (0..).zip(mqueues) {
                let role = if at == 0 { Role::Server } else { Role::Client(at - 1) };
                prop_assert_eq!(region.role(mqueue), (block, role));
                for entry in region.rings_of(mqueue) {
                    prop_assert_eq!((entry.mqueue, entry.block), (mqueue, block));
                }
            }
        }
        every_ring_works(&bench.memory);
    }

    /// Any entry among valid ones is skipped, refused or safe to use.
    #[test]
    fn any_entry_is_refused_or_safe(own in any::<[u64; 12]>(), common in any::<[u64; 4]>(), at in 0..9_usize, near: bool) {
        let mut bench = Bench::new(&plan(2, 1));
        let words: Vec<u64> = common.into_iter().chain(own).collect();
        let words: [u64; 16] = words.try_into().unwrap();
        // SAFETY: a plain structure of integers without padding, of exactly 16 words.
        let mut entry: DirectoryEntry = unsafe { std::mem::transmute(words) };
        if near {
            (entry.kind, entry.version) = (entry.kind % 8, entry.version % 2);
            (entry.block, entry.index) = (entry.block % 3, entry.index % 3);
            (entry.offset, entry.bytes) = (bench.spare(), entry.bytes % 8192);
        }
        bench.entries.insert(at.min(bench.entries.len()), entry);
        if bench.join().is_ok() {
            every_ring_works(&bench.memory);
        }
    }
}
