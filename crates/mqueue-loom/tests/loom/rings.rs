//! Messages and credit through rings: the PUBLISH and RELEASE edges, HANDOVER, granule units, heads.

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::thread;
use mqueue::Region;
use mqueue::abi::{RingEntry, protocol};
use mqueue::memory::{Memory, Ordering};

use super::*;

/// Three messages through a ring of two slots: one slot is reused.
fn doorbell(batch: bool, weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    with_ends(plan, doorbell_words, weak, move |_, mut producer, mut consumer| {
        let writer = thread::spawn(move || {
            for n in 0..3 {
                if n == 2 && batch {
                    producer.publish();
                }
                push(&mut producer, n, 8);
                if !batch {
                    producer.publish();
                }
            }
            producer.publish();
        });
        for n in 0..3 {
            while !read(&mut consumer, n, 8) {
                thread::yield_now();
            }
            consumer.release();
        }
        writer.join().unwrap();
    })
}

/// Payloads in an arena that has room for one: its bytes are reused.
fn arena(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    // Formatted for payloads beyond the inline limit, then reduced to a size that loom can handle.
    let ring =
        RingPlan { protocol: protocol::DOORBELL, message_bytes_max: 1544, arena_bytes: 1664 };
    let mqueues = vec![MqueuePlan { depth: DEPTH, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(1, &mqueues, 1);
    let places = places(&plan);
    let heap = mqueue::HeapMapping::memory(places.len_bytes as usize);
    let arena_offset = Region::format(heap, &plan).unwrap().entries()[0].arena_offset;
    let weak = weak(&places);
    let mut kinds = doorbell_words(&places, weak);
    kinds.owned.push(arena_offset..arena_offset + 16);
    move || {
        let memory = LoomMemory::new(places.len_bytes, &kinds, weak);
        Region::format(memory.clone(), &plan).unwrap();
        let (inline, longest) = (8, 16);
        let field = |offset: usize| places.directory + offset as u64;
        let lengths = field(offset_of!(RingEntry, inline_bytes));
        memory.store(lengths, inline | longest << 32, Ordering::Relaxed);
        memory.store(field(offset_of!(RingEntry, arena_bytes)), longest, Ordering::Relaxed);
        let mut engine = Region::join(memory.clone()).unwrap();
        let mut accelerator = Region::join(memory).unwrap();
        let (mut producer, _) = engine.engine_ends(0);
        let (mut consumer, _) = accelerator.accelerator_ends(0);
        let writer = thread::spawn(move || {
            for n in 0..2 {
                push(&mut producer, n, 16);
                producer.publish();
            }
        });
        for n in 0..2 {
            while !read(&mut consumer, n, 16) {
                thread::yield_now();
            }
            consumer.release();
        }
        writer.join().unwrap();
    }
}

/// Two messages through one slot of self-validating units, starting just before the sequence wraps.
/// The units are not ordered, so stale ones of the previous message are seen in every combination.
/// A cell checks the release edge: the consumer has finished with a message before
/// the producer overwrites it.
fn granule(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::GRANULE8, 1, 8, (1 << 32) - 2);
    let kinds = |places: &Places, weak| {
        let mut atomic = vec![places.slots.clone()];
        if weak != Weak::TornUnits {
            atomic.extend([word(places.rx_head), word(places.rx_tail)]);
        }
        Kinds { atomic, owned: vec![] }
    };
    with_ends(plan, kinds, weak, |_, mut producer, mut consumer| {
        let done = Rc::new(UnsafeCell::new(0));
        let guarded = done.clone();
        let writer = thread::spawn(move || {
            push(&mut producer, 0, 4);
            producer.publish();
            if producer.credit() == Ok(1) {
                // SAFETY: loom checks that the consumer's access is over.
                guarded.with(|done| unsafe { assert_eq!(*done, 1) });
                push(&mut producer, 1, 4);
                producer.publish();
                return true;
            }
            false
        });
        let mut next = 0;
        for _ in 0..3 {
            if next < 2 && read(&mut consumer, next, 4) {
                if next == 0 {
                    // SAFETY: loom checks that the producer's access has not begun.
                    done.with_mut(|done| unsafe { *done = 1 });
                }
                consumer.release();
                next += 1;
            } else {
                thread::yield_now();
            }
        }
        let sent = 1 + u64::from(writer.join().unwrap());
        while next < sent {
            assert!(read(&mut consumer, next, 4), "all units are visible by now");
            consumer.release();
            next += 1;
        }
        assert_eq!(consumer.peek(), Ok(None));
    })
}

/// A consumer that reads the head of a granule ring, and does not poll again until the head changes, finds every
/// message below it.
fn listener(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::GRANULE8, DEPTH, 8, 0);
    let kinds = |places: &Places, _| Kinds {
        atomic: vec![word(places.rx_head), places.slots.clone()],
        ..Kinds::default()
    };
    with_ends(plan, kinds, weak, |region, mut producer, mut consumer| {
        let words = region.words();
        let writer = thread::spawn(move || {
            for n in 0..2 {
                push(&mut producer, n, 8);
                producer.publish();
            }
        });
        for n in 0..words.rx_head(0) {
            assert!(read(&mut consumer, n, 8), "a head without its message");
        }
        writer.join().unwrap();
    })
}

/// Worker to worker: the message refers to an object in private memory that the first worker wrote.
fn handover(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, 1, 8, 0);
    with_ends(plan, doorbell_words, weak, |_, mut producer, mut consumer| {
        let object = Rc::new(UnsafeCell::new(0));
        let theirs = object.clone();
        let first = thread::spawn(move || {
            // SAFETY: loom checks that the access is exclusive.
            theirs.with_mut(|object| unsafe { *object = 42 });
            push(&mut producer, 0, 8);
            producer.publish();
            while producer.credit() != Ok(1) {
                thread::yield_now();
            }
            // SAFETY: as above; the slot was released, so the second worker has finished with the object.
            theirs.with_mut(|object| unsafe { *object = 43 });
        });
        while !read(&mut consumer, 0, 8) {
            thread::yield_now();
        }
        // SAFETY: as above; the message transfers the object to this worker.
        object.with(|object| unsafe { assert_eq!(*object, 42) });
        consumer.release();
        first.join().unwrap();
    })
}

holds! {
    doorbell_published_one_by_one: doorbell(false, strong);
    doorbell_published_in_batches: doorbell(true, strong);
    arena_payloads: arena(strong);
    granule_units: granule(strong);
    heads_have_messages: listener(strong);
    handover_of_an_object: handover(strong);
}

fails! {
    without_publish_release: doorbell(false, |p| Weak::Release(p.rx_head)), "Causality violation";
    without_publish_acquire: doorbell(false, |p| Weak::Acquire(p.rx_head)), "Causality violation";
    without_release_release: doorbell(false, |p| Weak::Release(p.rx_tail)), "Causality violation";
    without_release_acquire: doorbell(false, |p| Weak::Acquire(p.rx_tail)), "Causality violation";
    batches_without_publish_release: doorbell(true, |p| Weak::Release(p.rx_head)), "Causality violation";
    batches_without_release_acquire: doorbell(true, |p| Weak::Acquire(p.rx_tail)), "Causality violation";
    arena_without_publish_release: arena(|p| Weak::Release(p.rx_head)), "Causality violation";
    arena_without_release_release: arena(|p| Weak::Release(p.rx_tail)), "Causality violation";
    arena_without_release_acquire: arena(|p| Weak::Acquire(p.rx_tail)), "Causality violation";
    granule_with_torn_units: granule(|_| Weak::TornUnits), "the payload";
    granule_without_release_release: granule(|p| Weak::Release(p.rx_tail)), "Causality violation";
    granule_without_release_acquire: granule(|p| Weak::Acquire(p.rx_tail)), "Causality violation";
    heads_without_release: listener(|p| Weak::Release(p.rx_head)), "a head without its message";
    heads_without_acquire: listener(|p| Weak::Acquire(p.rx_head)), "a head without its message";
    handover_without_publish_release: handover(|p| Weak::Release(p.rx_head)), "Causality violation";
    handover_without_publish_acquire: handover(|p| Weak::Acquire(p.rx_head)), "Causality violation";
    handover_without_release_release: handover(|p| Weak::Release(p.rx_tail)), "Causality violation";
    handover_without_release_acquire: handover(|p| Weak::Acquire(p.rx_tail)), "Causality violation";
}
