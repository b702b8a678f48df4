//! Rings and plans, one rule at a time.

use std::mem::offset_of;

use crate::support::{payload, plan, ring, shapes};
use mqueue::abi::{
    ARENA_BYTES_MAX, RINGS_MAX, RegionHeader, RingEntry, SlotHeader, kind, protocol,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    Head, HeapMapping, JoinError, LoanError, MappedMemory, MqueuePlan, PlanError, Region,
    RegionPlan, RingError, RingPlan,
};

#[test]
fn every_protocol_carries_every_size() {
    for shape in shapes() {
        let mut ring = ring(shape, 8, (1 << 32) - 20);
        let mut received = vec![0; shape.message_bytes_max as usize];
        for len in (0..=received.len()).step_by(if cfg!(miri) { received.len() / 5 } else { 1 }) {
            let sent = payload(len as u64, len);
            let head = Head { token: len as u64, tag: !0, kind: kind::MESSAGE, status: 3 };
            ring.producer.push(head, &sent).unwrap();
            ring.producer.publish();
            let header = ring.consumer.peek().unwrap().expect("published");
            assert_eq!((header.token, header.tag, header.status), (head.token, !0, 3));
            assert_eq!(header.len as usize, len);
            assert!(ring.consumer.copy_out(&header, &mut received[..len]));
            assert_eq!(&received[..len], sent, "{} len {len}", shape.name);
            ring.consumer.advance();
            ring.consumer.release();
            assert_eq!(ring.consumer.peek(), Ok(None));
        }
        let head = Head { kind: kind::MESSAGE, ..Head::default() };
        for _ in 0..8 {
            ring.producer.push(head, &[1]).unwrap();
        }
        assert_eq!(ring.producer.push(head, &[1]), Err(LoanError::Full));
        assert_eq!(ring.producer.push(head, &received), Err(LoanError::Full));
        received.push(0);
        assert_eq!(ring.producer.push(head, &received), Err(LoanError::TooLong));
    }
}

#[test]
fn memory_that_was_never_written_is_no_message() {
    for shape in shapes() {
        let mut ring = ring(shape, 2, 0);
        ring.producer.push(Head::default(), &[]).unwrap();
        ring.producer.publish();
        assert_eq!(ring.consumer.peek(), Err(RingError::BadHeader), "{}", shape.name);
        ring.consumer.advance();
        ring.consumer.release();
        assert_eq!(ring.consumer.peek(), Ok(None), "{}", shape.name);
    }
}

/// A granule message can be read before it is committed, so writing it uses up its slot.
#[test]
fn a_loan_that_is_written_and_dropped() {
    for shape in shapes() {
        let mut ring = ring(shape, 4, 0);
        ring.producer.loan(3).unwrap().write(crate::support::head(1), b"one");
        ring.producer.push(crate::support::head(2), b"two").unwrap();
        ring.producer.publish();
        let mut messages = Vec::new();
        while let Some(header) = ring.consumer.peek().unwrap() {
            let mut received = [0; 3];
            assert!(ring.consumer.copy_out(&header, &mut received));
            messages.push(received);
            ring.consumer.advance();
        }
        let granule = shape.protocol != protocol::DOORBELL;
        let expected: &[[u8; 3]] = if granule { &[*b"one", *b"two"] } else { &[*b"two"] };
        assert_eq!(messages, expected, "{}", shape.name);
    }
}

#[test]
#[should_panic(expected = "never written")]
fn a_slot_that_was_not_written_cannot_be_committed() {
    ring(shapes()[0], 4, 0).producer.loan(3).unwrap().commit();
}

#[test]
#[should_panic(expected = "written once")]
fn a_loan_is_written_once() {
    let mut ring = ring(shapes()[0], 4, 0);
    let mut loan = ring.producer.loan(1).unwrap();
    loan.write(crate::support::head(0), &[1]);
    loan.write(crate::support::head(0), &[2]);
}

#[test]
#[should_panic(expected = "another length")]
fn a_loan_is_for_one_length() {
    let mut ring = ring(shapes()[0], 4, 0);
    ring.producer.loan(1).unwrap().write(crate::support::head(0), &[1, 2]);
}

#[test]
#[should_panic(expected = "already taken")]
fn an_end_is_taken_once() {
    let mut ring = ring(shapes()[0], 4, 0);
    let _ = ring.engine.accelerator_ends(0);
}

#[test]
fn a_plan_outside_its_ranges_is_refused() {
    let good = plan(shapes()[0], 8, 0);
    assert!(good.bytes().is_ok());
    let refused = |change: &dyn Fn(&mut RegionPlan)| {
        let mut plan = good.clone();
        change(&mut plan);
        plan.bytes().expect_err("an impossible plan")
    };
    type Change = dyn Fn(&mut RegionPlan);
    let ranges: &[(&str, &Change)] = &[
        ("block_count", &|p| p.block_count = 0),
        ("block_count", &|p| p.block_count = 4097),
        ("block_count", &|p| p.block_count = u32::MAX),
        ("rings", &|p| p.rings.clear()),
        ("placement", &|p| p.rings[1].placement = 2),
        ("generation", &|p| p.generation = 0),
        ("start", &|p| p.start = u64::MAX),
        ("ring depth", &|p| p.rings[0].depth = 0),
        ("ring depth", &|p| p.rings[0].depth = 32_768),
        ("message_bytes_max", &|p| p.rings[0].messages.message_bytes_max = 0),
        ("message_bytes_max", &|p| p.rings[1].messages.message_bytes_max = u32::MAX),
        ("protocol", &|p| p.rings[0].messages.protocol = 0),
        ("protocol", &|p| p.rings[0].messages.protocol = 4),
        ("arena_bytes", &|p| p.rings[1].messages.arena_bytes = u64::MAX - 7),
        ("arena_bytes", &|p| p.rings[1].messages = RingPlan::doorbell(2048, u64::MAX)),
        ("arena_bytes", &|p| p.rings[0].messages.arena_bytes = ARENA_BYTES_MAX + 8),
    ];
    for (expected, change) in ranges {
        match refused(change) {
            PlanError::Range { what, .. } => assert_eq!(what, *expected),
            other => panic!("{expected}: {other}"),
        }
    }
    assert_eq!(refused(&|p| p.rings[0].depth = 12), PlanError::Depth(12));
    let long = |protocol, arena_bytes| {
        refused(&|p| {
            p.rings[0].messages = RingPlan { protocol, message_bytes_max: 2048, arena_bytes };
        })
    };
    assert_eq!(long(protocol::DOORBELL, 0), PlanError::Arena(2048));
    assert_eq!(long(protocol::DOORBELL, 2040), PlanError::Arena(2048));
    assert_eq!(long(protocol::DOORBELL, 4097), PlanError::Arena(2048));
    assert_eq!(long(protocol::GRANULE8, 8192), PlanError::Arena(2048));
}

#[test]
#[cfg_attr(miri, ignore = "Miri needs tens of gigabytes for that many plans of rings")]
fn a_plan_of_too_many_rings_is_refused() {
    let mut plan = plan(shapes()[0], 8, 0);
    plan.rings = vec![plan.rings[0]; RINGS_MAX as usize + 1];
    let refused = plan.bytes().expect_err("an impossible plan");
    assert!(matches!(refused, PlanError::Range { what: "rings", .. }), "{refused}");
}

#[test]
fn a_region_needs_all_of_its_memory() {
    let plan = plan(shapes()[0], 8, 0);
    let need = plan.bytes().unwrap();
    let memory = HeapMapping::memory(need as usize - 128);
    let have = need - 128;
    assert_eq!(Region::format(memory, &plan).err(), Some(PlanError::Memory { need, have }));
}

#[test]
fn granule16_needs_its_atomic_access() {
    let ring = RingPlan { protocol: protocol::GRANULE16, message_bytes_max: 64, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth: 4, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(1, &mqueues, 1);
    let formatted = Region::format(HeapMapping::memory(plan.bytes().unwrap() as usize), &plan);
    let expected = (!mqueue::memory::unit16_is_atomic()).then_some(PlanError::Unit16);
    assert_eq!(formatted.err(), expected);
}

/// A short message after a long one in the arena neither releases nor holds any arena space, whatever its source.
#[test]
fn short_messages_leave_the_arena_to_long_ones() {
    let plain = shapes()[0];
    for shape in shapes().into_iter().filter(|shape| shape.arena_bytes > 0) {
        for from_ring in [false, true] {
            let (mut source, mut target) = (ring(plain, 4, 0), ring(shape, 4, 0));
            let head = Head { kind: kind::MESSAGE, ..Head::default() };
            let long = payload(1, shape.message_bytes_max as usize);
            let room = target.producer.room().unwrap();
            for lap in 0..20 {
                target.producer.push(head, &long).unwrap();
                if from_ring {
                    source.producer.push(head, &[7; 5]).unwrap();
                    source.producer.publish();
                    let header = source.consumer.peek().unwrap().expect("published");
                    assert!(target.producer.push_from(head, &source.consumer, &header));
                    source.consumer.advance();
                    source.consumer.release();
                    source.producer.credit().unwrap();
                } else {
                    target.producer.push(head, &[7; 5]).unwrap();
                }
                target.producer.publish();
                for sent in [&long[..], &[7; 5]] {
                    let header = target.consumer.peek().unwrap().expect("published");
                    let mut received = vec![0; header.len as usize];
                    assert!(target.consumer.copy_out(&header, &mut received));
                    assert_eq!(received, sent, "{}, lap {lap}", shape.name);
                    target.consumer.advance();
                }
                target.consumer.release();
                assert_eq!(target.producer.room(), Ok(room), "{}, lap {lap}", shape.name);
            }
        }
    }
}

/// Directly from ring to ring: into slots that hold whole plain messages, without copying anything after the
/// payload.
#[test]
fn a_message_is_copied_from_ring_to_ring() {
    for from in shapes() {
        for to in shapes() {
            let (mut source, mut target) = (ring(from, 4, 0), ring(to, 4, 0));
            for len in 0..=from.message_bytes_max.min(to.message_bytes_max).min(40) as usize {
                let sent = payload(len as u64, len);
                let head = Head { tag: 1, kind: kind::MESSAGE, ..Head::default() };
                source.producer.push(head, &sent).unwrap();
                source.producer.publish();
                let header = source.consumer.peek().unwrap().expect("published");
                // A producer that does not pad with zeros.
                let slot = |ring: &crate::support::Ring, n: u64| {
                    let entry = ring.engine.entries()[0];
                    entry.slots_offset
                        + n % 4 * u64::from(entry.slot_stride)
                        + 32
                        + len as u64 / 8 * 8
                };
                let behind = if len % 8 == 0 { 0 } else { u64::MAX << (8 * (len % 8)) };
                if from.name == "doorbell" {
                    let at = slot(&source, source.consumer.consumed());
                    let word = source.memory.load(at, Ordering::Relaxed);
                    source.memory.store(at, word | behind, Ordering::Relaxed);
                }
                let other = Head { tag: 2, ..head };
                target.producer.credit().unwrap();
                if !target.producer.push_from(other, &source.consumer, &header) {
                    let granules = [from, to].iter().all(|ring| ring.name.starts_with("granule"));
                    assert!(granules, "{} to {}", from.name, to.name);
                    break;
                }
                source.consumer.advance();
                source.consumer.release();
                if to.name == "doorbell" {
                    let word = target.memory.load(slot(&target, len as u64), Ordering::Relaxed);
                    assert_eq!(word & behind, 0, "{len}");
                }
                target.producer.publish();
                let copied = target.consumer.peek().unwrap().expect("published");
                assert_eq!((copied.tag, copied.len as usize), (2, len));
                let mut received = vec![0; len];
                assert!(target.consumer.copy_out(&copied, &mut received));
                assert_eq!(received, sent);
                target.consumer.advance();
                target.consumer.release();
            }
        }
    }
}

/// Every length of payload up to 100 bytes, through a ring of each protocol and from there into one of each other:
/// each byte is the one that was sent, and no byte after a payload is modified.
#[test]
fn every_length_arrives_byte_by_byte() {
    const LONGEST: usize = 100;
    let kinds = || {
        let plain = shapes().into_iter().filter(|shape| shape.arena_bytes == 0);
        plain.map(|shape| crate::support::Shape { message_bytes_max: LONGEST as u32, ..shape })
    };
    let receive = |consumer: &mqueue::Consumer<_>, header: &SlotHeader| {
        let mut buffer = [0xa5; LONGEST + 32];
        let len = header.len as usize;
        assert!(consumer.copy_out(header, &mut buffer[..len]));
        assert!(buffer[len..].iter().all(|byte| *byte == 0xa5), "behind {len} bytes");
        buffer[..len].to_vec()
    };
    for (from, to) in kinds().flat_map(|from| kinds().map(move |to| (from, to))) {
        let (mut source, mut target) = (ring(from, 4, 0), ring(to, 4, 0));
        for len in (0..=LONGEST).step_by(if cfg!(miri) { 23 } else { 1 }) {
            let head = Head { kind: kind::MESSAGE, ..crate::support::head(len as u64) };
            let sent = payload(len as u64, len);
            source.producer.push(head, &sent).unwrap();
            source.producer.publish();
            let header = source.consumer.peek().unwrap().expect("published");
            assert_eq!(
                (header.token, header.tag, header.status),
                (head.token, head.tag, head.status)
            );
            assert_eq!(receive(&source.consumer, &header), sent, "{}", from.name);

            target.producer.credit().unwrap();
            let other = Head { tag: !head.tag, ..head };
            let copied = target.producer.push_from(other, &source.consumer, &header);
            let plain = from.name == "doorbell" || to.name == "doorbell";
            assert_eq!(copied, plain, "{} to {}", from.name, to.name);
            if !copied {
                target.producer.push(other, &sent).unwrap();
            }
            target.producer.publish();
            let header = target.consumer.peek().unwrap().expect("published");
            assert_eq!(
                (header.token, header.tag, header.status),
                (other.token, other.tag, other.status)
            );
            assert_eq!(receive(&target.consumer, &header), sent, "{} to {}", from.name, to.name);
            for ring in [&mut source, &mut target] {
                ring.consumer.advance();
                ring.consumer.release();
                ring.producer.credit().unwrap();
            }
        }
    }
}

#[test]
fn a_granule_message_is_not_copied_before_all_of_it_has_arrived() {
    for from in shapes().into_iter().filter(|shape| shape.name.starts_with("granule")) {
        let to = shapes().into_iter().find(|shape| shape.name == "doorbell").unwrap();
        let (mut source, mut target) = (ring(from, 4, 0), ring(to, 4, 0));
        let head = Head { kind: kind::MESSAGE, ..Head::default() };
        source.producer.push(head, &payload(1, 40)).unwrap();
        source.producer.publish();
        let header = source.consumer.peek().unwrap().expect("published");
        let data_bytes = if from.protocol == protocol::GRANULE8 { 4 } else { 12 };
        let last_unit = (32 + 40_u64).div_ceil(data_bytes) * (data_bytes + 4) - 8;
        let at = source.engine.entries()[0].slots_offset + last_unit;
        let word = source.memory.load(at, Ordering::Relaxed);
        source.memory.store(at, word ^ 1 << 32, Ordering::Relaxed);
        assert!(!target.producer.push_from(head, &source.consumer, &header), "{}", from.name);
        assert_eq!(target.producer.committed(), 0);
        assert!(!target.producer.publish(), "nothing was put in");
        source.memory.store(at, word, Ordering::Relaxed);
        assert!(target.producer.push_from(head, &source.consumer, &header), "{}", from.name);
    }
}

/// A region with 16-byte units from a machine that supports them, on one that does not.
#[test]
fn granule16_is_not_joined_without_its_atomic_access() {
    #[derive(Clone)]
    struct Narrow(MappedMemory);
    impl Memory for Narrow {
        fn len_bytes(&self) -> u64 {
            self.0.len_bytes()
        }
        fn load(&self, at: u64, order: Ordering) -> u64 {
            self.0.load(at, order)
        }
        fn store(&self, at: u64, value: u64, order: Ordering) {
            self.0.store(at, value, order);
        }
    }
    // Formatted with 8-byte units, which every machine supports, and then marked as wider ones. They need less
    // room for the same payload, so the entry is valid.
    let ring = RingPlan { protocol: protocol::GRANULE8, message_bytes_max: 64, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth: 4, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(1, &mqueues, 1);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    Region::format(memory.clone(), &plan).unwrap();
    let first = memory.load(offset_of!(RegionHeader, directory_offset) as u64, Ordering::Relaxed);
    let at = first + offset_of!(RingEntry, protocol) as u64 / 8 * 8;
    let shift = 8 * (offset_of!(RingEntry, protocol) % 8);
    let word = memory.load(at, Ordering::Relaxed) & !(0xff << shift);
    let wide = word | u64::from(protocol::GRANULE16) << shift;
    memory.store(at, wide, Ordering::Relaxed);
    let refused = |error| matches!(error, Some(JoinError::Ring { ring: 0, what }) if what.contains("16-byte"));
    assert!(refused(Region::join(Narrow(memory.clone())).err()));
    let here = Region::join(memory).err();
    assert_eq!(refused(here.clone()), !mqueue::memory::unit16_is_atomic(), "{here:?}");
}

/// The engine's query in every turn: those mqueues, in order, that hold messages, after the ones found before.
#[test]
fn those_with_waiting_messages_are_found_among_many() {
    let ring = RingPlan::doorbell(64, 0);
    let mqueues = vec![MqueuePlan { depth: 4, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(100, &mqueues, 1).starting_at(7);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut engine = Region::format(memory.clone(), &plan).unwrap();
    let mut accelerator = Region::join(memory).unwrap();
    let mut ends: Vec<_> =
        (0..100).map(|n| (engine.engine_ends(n).1, accelerator.accelerator_ends(n).1)).collect();
    let (words, asked) = (engine.words(), (0..99).rev().collect::<Vec<u32>>());
    let found = || {
        let mut found = vec![1000, 1001];
        words.tx_waiting_among(&asked, &mut found);
        assert_eq!(found.drain(..2).collect::<Vec<_>>(), [1000, 1001]);
        found
    };
    assert_eq!(found(), []);
    for (n, (_, producer)) in ends.iter_mut().enumerate().filter(|(n, _)| n % 3 == 0) {
        producer.push(crate::support::head(n as u64), &[]).unwrap();
        producer.publish();
    }
    let every_third = || (0..99).rev().filter(|n| n % 3 == 0);
    assert_eq!(found(), every_third().collect::<Vec<u32>>());
    for (consumer, _) in ends.iter_mut().take(50).step_by(3) {
        assert!(consumer.peek().unwrap().is_some());
        consumer.advance();
        consumer.release();
    }
    assert_eq!(found(), every_third().filter(|n| *n >= 50).collect::<Vec<u32>>());
    let mut all = Vec::new();
    words.tx_waiting_among(&[], &mut all);
    assert_eq!(all, []);
}
