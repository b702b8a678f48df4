//! The directory of a region: rings are found by the content of their entries, in any order, and unknown entries
//! are skipped or refused.

use crate::support::{head, payload};
use mqueue::abi::{
    BACKENDS_MAX, DirectoryEntry, NO_BLOCK, POOL_ALIGN, POOLS_MAX, PoolEntry, RegionHeader,
    RingEntry, SOCKETS_MAX, STREAM_BYTES_MAX, STREAM_BYTES_MIN, StreamEntry, ring_flags, ring_kind,
    ring_version,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    HeapMapping, JoinError, MappedMemory, MqueuePlan, PlanError, Region, RegionPlan, RingPlan, Role,
};
use proptest::prelude::*;
use std::mem::offset_of;

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
        Region::format(planned.clone(), plan).unwrap();
        // The directory is moved after the rings, where there is room for more of it.
        let directory = bytes as u64 + SPARE_BYTES;
        let memory = HeapMapping::memory(directory as usize + 64 * 1024);
        for at in (0..bytes as u64).step_by(8) {
            memory.store(at, planned.load(at, Ordering::Relaxed), Ordering::Relaxed);
        }
        // SAFETY: a plain structure of integers without padding, of exactly 16 words.
        let mut header: RegionHeader = unsafe { std::mem::transmute(memory.load_words::<16>(0)) };
        let at = (header.directory_offset..).step_by(ENTRY_BYTES as usize);
        // SAFETY: as above.
        let entry = |at| unsafe { std::mem::transmute(memory.load_words::<16>(at)) };
        let entries = at.take(header.ring_count as usize).map(entry).collect();
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
    for kind in [0, 12, 1000, u16::MAX] {
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

const STREAM_BYTES: u64 = STREAM_BYTES_MIN;

/// Two blocks with a backend and two connections each: entries 0 to 9 and 10 to 19.
fn with_sockets() -> RegionPlan {
    plan(2, 1).with_commands(2, 0).with_sockets(2, STREAM_BYTES, 8)
}

#[test]
fn a_block_with_sockets_has_a_socket_mqueue_and_streams() {
    let plan = with_sockets();
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut engine = Region::format(memory.clone(), &plan).unwrap();
    let mut accelerator = Region::join(memory.clone()).unwrap();
    for region in [&engine, &accelerator] {
        assert_eq!((region.mqueue_count(), region.mqueues_per_block_max()), (6, 3));
        assert_eq!((region.command_rings(), region.entries().len()), (1, 14));
        assert_eq!((region.mqueues_of(1), region.role(5)), (&[3, 4, 5][..], (1, Role::Sockets)));
        assert_eq!((region.directory_of(0), region.directory_of(1)), (0..10, 10..20));
        let kinds = region.rings_of(5).map(|ring| (ring.kind, ring.message_bytes_max, ring.depth));
        assert_eq!(kinds, [(ring_kind::SOCKET_RX, 16, 8), (ring_kind::SOCKET_TX, 16, 8)]);
        for (slot, rings) in (0..).zip(region.streams_of(1)) {
            let said = rings.map(|ring| (ring.kind, ring.block, ring.index, ring.capacity));
            let of = |kind| (kind, 1, slot, STREAM_BYTES);
            assert_eq!(said, [ring_kind::STREAM_RX, ring_kind::STREAM_TX].map(of));
        }
    }
    every_ring_works(&memory);
    for block in 0..2 {
        let near = engine.engine_streams(block);
        let far = accelerator.block_streams(block);
        assert_eq!((near.len(), far.len()), (2, 2));
        for (slot, ((mut to, mut from), (mut recv, mut send))) in
            (0..).zip(near.into_iter().zip(far))
        {
            let n = 10 * u64::from(block) + slot;
            to.write(&payload(n, 13), &[]).unwrap();
            send.write(&payload(!n, 1001), &[]).unwrap();
            let (mut request, mut reply) = ([0; 20], [0; 1100]);
            assert_eq!((recv.read(&mut request), from.read(&mut reply)), (Ok(13), Ok(1001)));
            assert!(request[..13] == payload(n, 13) && reply[..1001] == payload(!n, 1001));
        }
    }
    // Without sockets there are none.
    let memory = HeapMapping::memory(65536);
    let mut region = Region::format(memory, &self::plan(1, 1)).unwrap();
    assert!(region.streams_of(0).is_empty() && region.engine_streams(0).is_empty());
}

#[test]
#[should_panic(expected = "the streams of block 1 were already taken")]
fn streams_are_taken_once() {
    let plan = with_sockets();
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut region = Region::format(memory, &plan).unwrap();
    region.engine_streams(1);
    region.engine_streams(1);
}

#[test]
fn plans_of_sockets_are_checked() {
    let error = |slots, capacity, depth| {
        plan(2, 1).with_sockets(slots, capacity, depth).bytes().unwrap_err().to_string()
    };
    assert_eq!(error(0, STREAM_BYTES, 8), "sockets is 0, must be in [1, 64]");
    assert_eq!(error(SOCKETS_MAX + 1, STREAM_BYTES, 8), "sockets is 65, must be in [1, 64]");
    assert_eq!(
        error(1, 5000, 8),
        "the capacity of stream rings is 5000 bytes, must be a power of two"
    );
    for capacity in [0, STREAM_BYTES_MIN / 2, 2 * STREAM_BYTES_MAX, u64::MAX] {
        let range = format!("stream capacity is {capacity}, must be in [4096, 16777216]");
        assert_eq!(error(1, capacity, 8), range);
    }
    assert_eq!(error(1, STREAM_BYTES, 5), "ring depth is 5, must be a power of two");
    let mut one_without = with_sockets();
    one_without.rings.truncate(one_without.rings.len() - 2);
    one_without.rings.truncate(10);
    assert!(
        one_without.bytes().unwrap_err().to_string().ends_with("a block without a socket mqueue")
    );
    let no_streams = RegionPlan { streams: None, ..with_sockets() };
    let what = "socket mqueue of a block without streams";
    assert_eq!(no_streams.bytes(), Err(PlanError::Ring { ring: 4, what }));
}

#[test]
fn streams_are_checked() {
    let refused = |change: &dyn Fn(&mut Bench)| {
        let mut bench = Bench::new(&with_sockets());
        change(&mut bench);
        match bench.error() {
            JoinError::Ring { ring, what } => (Some(ring), what),
            JoinError::Header(what) => (None, what),
            other => panic!("{other}"),
        }
    };
    // The entries of the second slot of block 0 are 8 and 9.
    let with = |change: &dyn Fn(&mut StreamEntry)| {
        refused(&|bench| {
            let mut stream = StreamEntry::from(bench.entries[8]);
            change(&mut stream);
            bench.entries[8] = stream.into();
        })
    };
    for capacity in [0, 1, 2048, STREAM_BYTES + 8, 2 * STREAM_BYTES_MAX, 1 << 63, u64::MAX] {
        assert_eq!(with(&|stream| stream.capacity = capacity), (Some(8), "capacity"));
    }
    assert_eq!(with(&|stream| stream.capacity *= 2), (Some(8), "memory"));
    assert_eq!(with(&|stream| stream.bytes -= 1), (Some(8), "memory"));
    assert_eq!(with(&|stream| (stream.offset, stream.bytes) = (0, 0)), (Some(8), "memory"));
    assert_eq!(with(&|stream| stream.offset += 8), (Some(8), "memory"));
    assert_eq!(with(&|stream| stream.flags = 2), (Some(8), "flags"));
    assert_eq!(with(&|stream| stream.index = SOCKETS_MAX), (Some(8), "index"));
    assert_eq!(with(&|stream| stream.index = u32::MAX), (Some(8), "index"));
    assert_eq!(with(&|stream| stream.index = 0), (Some(8), "stream ring described twice"));
    assert_eq!(with(&|stream| stream.index = 2), (Some(9), "stream ring without its other ring"));
    assert_eq!(with(&|stream| stream.block = 2), (Some(8), "owner block"));
    let apart = "apart from the others of its block";
    assert_eq!(with(&|stream| stream.block = NO_BLOCK), (Some(8), "owner block"));
    assert_eq!(with(&|stream| stream.block = 1), (Some(9), apart));
    assert_eq!(
        with(&|stream| stream.kind = ring_kind::STREAM_TX),
        (Some(9), "stream ring described twice")
    );
    let gap = refused(&|bench| {
        for entry in &mut bench.entries[8..10] {
            entry.index = 5;
        }
    });
    assert_eq!(gap, (None, "a gap between stream rings"));
    let memory = refused(&|bench| bench.entries[8].offset = bench.entries[7].offset);
    assert_eq!(memory.1, "memory that is another's");
}

#[test]
fn socket_mqueues_are_checked() {
    let with = |change: &dyn Fn(&mut RingEntry)| {
        let mut bench = Bench::new(&with_sockets());
        let mut ring = RingEntry::from(bench.entries[4]);
        change(&mut ring);
        bench.entries[4] = ring.into();
        match bench.error() {
            JoinError::Ring { ring, what } => (ring, what),
            other => panic!("{other}"),
        }
    };
    assert_eq!(with(&|ring| ring.index = 1), (4, "index"));
    assert_eq!(with(&|ring| ring.message_bytes_max = 8), (4, "inline bytes"));
    assert_eq!(with(&|ring| ring.message_bytes_max = 15), (4, "longest message"));
    assert_eq!(with(&|ring| ring.inline_bytes = 8), (4, "arena size"));
    let granule = mqueue::abi::protocol::GRANULE8;
    assert_eq!(
        with(&|ring| (ring.protocol, ring.slot_stride, ring.depth) = (granule, 128, 4)),
        (4, "protocol")
    );
    // Of another mqueue, or a second one.
    assert_eq!(
        with(&|ring| ring.kind = ring_kind::CLIENT_RX),
        (5, "mqueue of another block or index")
    );
    let two = with_sockets().with_sockets(2, STREAM_BYTES, 8).bytes();
    assert!(two.unwrap_err().to_string().ends_with("mqueue described twice"));
}

/// Two blocks with a backend each, and pools of three workers: entries 8 to 10.
fn with_pools() -> RegionPlan {
    let ring = RingPlan { message_bytes_max: 40, ..RING };
    let mqueue = MqueuePlan { depth: 2, rx: ring, tx: ring };
    RegionPlan::of_blocks(2, &[mqueue; 2], 1).with_pools(3, 2 * POOL_ALIGN)
}

#[test]
fn each_worker_has_a_pool_of_its_own() {
    let memory = HeapMapping::memory(with_pools().bytes().unwrap() as usize);
    let mut engine = Region::format(memory.clone(), &with_pools()).unwrap();
    let accelerator = Region::join(memory.clone()).unwrap();
    for region in [&engine, &accelerator] {
        for (worker, pool) in (0..).zip(region.pools()) {
            let said = (pool.kind, pool.flags, pool.block, pool.index, pool.bytes);
            assert_eq!(said, (ring_kind::POOL, 0, NO_BLOCK, worker, 2 * POOL_ALIGN));
            assert_eq!(pool.offset % POOL_ALIGN, 0);
        }
        assert_eq!((region.pools().len(), region.entries().len()), (3, 8));
        // Only server mqueues carry bundles.
        let carries: Vec<bool> = (0..4).map(|mqueue| region.carries_bundles(mqueue)).collect();
        assert_eq!(carries, [true, false, true, false]);
    }
    every_ring_works(&memory);
    let [first, second] = [0, 1].map(|worker| engine.pools()[worker].offset);
    let buffer = engine.engine_pool(1).take(1).unwrap();
    assert_eq!(buffer.offset(), second);
    assert!(first + 2 * POOL_ALIGN <= second);

    let without = plan(1, 0);
    let memory = HeapMapping::memory(without.bytes().unwrap() as usize);
    let region = Region::format(memory, &without).unwrap();
    assert!(region.pools().is_empty() && !region.carries_bundles(0));
}

#[test]
fn rings_whose_slots_are_too_small_carry_no_bundles() {
    let carries = |rx, tx| {
        let [rx, tx] = [rx, tx].map(|bytes| RingPlan { message_bytes_max: bytes, ..RING });
        let plan = RegionPlan::of_blocks(1, &[MqueuePlan { depth: 2, rx, tx }], 1)
            .with_pools(1, POOL_ALIGN);
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        Region::format(memory, &plan).unwrap().carries_bundles(0)
    };
    assert!(carries(40, 24));
    assert!(!carries(39, 24));
    assert!(!carries(40, 23));
}

#[test]
#[should_panic(expected = "the pool of worker 2 was already taken")]
fn a_pool_is_taken_once() {
    let memory = HeapMapping::memory(with_pools().bytes().unwrap() as usize);
    let mut region = Region::format(memory, &with_pools()).unwrap();
    let _first = region.engine_pool(2);
    let _again = region.engine_pool(2);
}

#[test]
fn plans_of_pools_are_checked() {
    let error =
        |workers, bytes| plan(1, 0).with_pools(workers, bytes).bytes().unwrap_err().to_string();
    assert_eq!(error(0, POOL_ALIGN), "pools is 0, must be in [1, 64]");
    assert_eq!(error(POOLS_MAX + 1, POOL_ALIGN), "pools is 65, must be in [1, 64]");
    assert_eq!(error(1, 0), "pool bytes is 0, must be in [4096, 1099511627776]");
    assert_eq!(error(1, 5000), "the size of pools is 5000 bytes, must be a multiple of 4096");
}

#[test]
fn pools_are_checked() {
    let refused = |change: &dyn Fn(&mut PoolEntry)| {
        let mut bench = Bench::new(&with_pools());
        let mut pool = PoolEntry::from(bench.entries[9]);
        change(&mut pool);
        bench.entries[9] = pool.into();
        match bench.error() {
            JoinError::Ring { ring, what } => (Some(ring), what),
            JoinError::Header(what) => (None, what),
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(&|pool| pool.flags = 2), (Some(9), "flags"));
    // Of no block, whose entries must be contiguous.
    let apart = "apart from the others of its block";
    assert_eq!(refused(&|pool| pool.block = 0), (Some(9), apart));
    assert_eq!(refused(&|pool| pool.block = 7), (Some(9), "owner block"));
    assert_eq!(refused(&|pool| pool.index = POOLS_MAX), (Some(9), "index"));
    assert_eq!(refused(&|pool| pool.index = u32::MAX), (Some(9), "index"));
    assert_eq!(refused(&|pool| pool.index = 0), (Some(9), "pool described twice"));
    assert_eq!(refused(&|pool| pool.index = 3), (None, "a gap between pools"));
    assert_eq!(refused(&|pool| (pool.offset, pool.bytes) = (0, 0)), (Some(9), "memory"));
    assert_eq!(refused(&|pool| pool.bytes -= 128), (Some(9), "memory"));
    assert_eq!(refused(&|pool| pool.bytes = POOL_ALIGN << 40), (Some(9), "memory"));
    assert_eq!(refused(&|pool| pool.offset += 128), (Some(9), "memory"));
    assert_eq!(refused(&|pool| pool.offset = !(POOL_ALIGN - 1)), (Some(9), "memory"));
    let overlaps = refused(&|pool| pool.bytes += POOL_ALIGN);
    assert_eq!(overlaps, (Some(10), "memory that is another's"));
    // Of a block of its own after all others.
    let mut bench = Bench::new(&with_pools());
    bench.entries[10].block = 1;
    assert!(matches!(bench.error(), JoinError::Ring { ring: 10, .. }));
    // A region that requires them can be joined, and another version of them is skipped.
    let mut bench = Bench::new(&with_pools());
    bench.entries[10].flags = ring_flags::REQUIRED;
    assert_eq!(bench.join().unwrap().pools().len(), 3);
    bench.entries[10].flags = 0;
    bench.entries[10].version = ring_version::POOL + 1;
    assert_eq!(bench.join().unwrap().pools().len(), 2);
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
        use crate::support::{Choose, Numbers};
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
            bench.entries.insert(at, unknown(12 + numbers.below(60_000) as u16, 0));
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
    fn any_entry_is_refused_or_safe(own in any::<[u64; 12]>(), common in any::<[u64; 4]>(), at in 0..9_usize, near: bool, any_sockets: bool, pools: bool) {
        let sockets = any_sockets && near;
        let plan = if sockets { with_sockets() } else { plan(2, 1) };
        let mut bench = Bench::new(&if pools { plan.with_pools(2, POOL_ALIGN) } else { plan });
        let words: Vec<u64> = common.into_iter().chain(own).collect();
        let words: [u64; 16] = words.try_into().unwrap();
        // SAFETY: a plain structure of integers without padding, of exactly 16 words.
        let mut entry: DirectoryEntry = unsafe { std::mem::transmute(words) };
        if near {
            (entry.kind, entry.version) = (entry.kind % 13, entry.version % 2);
            (entry.block, entry.index) = (entry.block % 3, entry.index % 3);
            (entry.offset, entry.bytes) = (bench.spare(), entry.bytes % 8192);
        }
        bench.entries.insert(at.min(bench.entries.len()), entry);
        if bench.join().is_ok() {
            every_ring_works(&bench.memory);
        }
    }
}

/// Two blocks with a backend each, to which they have memory of 4096 bytes: entry 3 is the ring of the first block that has it.
fn with_memory() -> RegionPlan {
    RegionPlan::of_blocks(2, &[MQUEUE; 2], 1).with_memory(0, 4096)
}

#[test]
fn memory_of_a_backend_is_in_the_ring_of_its_requests_and_shares_nothing() {
    let memory = HeapMapping::memory(with_memory().bytes().unwrap() as usize);
    let region = Region::format(memory.clone(), &with_memory()).unwrap();
    let staging = (0..4).map(|mqueue| {
        let [rx, tx] = region.rings_of(mqueue);
        assert_eq!((rx.staging_offset, rx.staging_bytes), (0, 0));
        (tx.staging_offset, tx.staging_bytes)
    });
    let staging: Vec<_> = staging.collect();
    assert_eq!((staging[0], staging[2]), ((0, 0), (0, 0)), "server mqueues have none");
    let [(first, 4096), (second, 4096)] = [staging[1], staging[3]] else { panic!("{staging:?}") };
    assert!(first.abs_diff(second) >= 4096);
    every_ring_works(&memory);

    let with = |entry: usize, change: &dyn Fn(&mut RingEntry)| {
        let mut bench = Bench::new(&with_memory());
        let mut ring = RingEntry::from(bench.entries[entry]);
        change(&mut ring);
        bench.entries[entry] = ring.into();
        match bench.error() {
            JoinError::Ring { ring, what } => (ring, what),
            other => panic!("{other}"),
        }
    };
    assert_eq!(with(3, &|ring| ring.staging_offset = 0), (3, "staging"));
    assert_eq!(with(3, &|ring| ring.staging_offset = u64::MAX - 127), (3, "staging"));
    assert_eq!(with(3, &|ring| ring.staging_offset += 8), (3, "staging"));
    assert_eq!(with(3, &|ring| ring.staging_bytes = 0), (3, "staging"));
    assert_eq!(with(3, &|ring| ring.staging_bytes = u64::MAX), (3, "staging"));
    assert_eq!(with(3, &|ring| ring.staging_bytes += 128), (3, "staging"));
    // The slots of its own ring, and memory of another one.
    assert_eq!(with(3, &|ring| ring.staging_offset = ring.slots_offset), (3, "staging"));
    assert_eq!(with(3, &|ring| ring.staging_offset = second), (3, "staging"));
    // A ring of another kind.
    let of_answers = |ring: &mut RingEntry| {
        (ring.staging_offset, ring.staging_bytes) = (ring.slots_offset, 8);
    };
    assert_eq!(with(2, &of_answers), (2, "staging"));
    assert_eq!(with(1, &of_answers), (1, "staging"));
}
