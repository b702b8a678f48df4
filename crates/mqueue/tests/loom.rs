//! The ring code itself, run by loom over every interleaving and every stale read that the memory
//! model allows (within a bound on preemptions): `cargo xtask ci loom`.
//!
//! Two kinds of check. Slots, arenas and the directory are memory that nobody may touch while another
//! writes it, so here they are loom cells: an access that no edge orders after the other side's is a
//! failure, whatever value it sees. Words that are meant to be raced for (heads, tails, status words,
//! granule units) are loom atomics, and what they vouch for is compared.
//!
//! Every edge has its negative control: the same model with that edge made relaxed must fail, each
//! half of it alone. A check that cannot fail proves nothing.
#![cfg(loom)]

use std::mem::offset_of;
use std::ops::Range;
use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;
use mqueue::abi::{
    ACCELERATOR_WORDS_OFFSET, AcceleratorWords, BLOCKS_OFFSET, BlockWords, ENGINE_WORDS_OFFSET,
    EngineWords, RegionHeader, RingEntry, kind, protocol, reason, state, stop,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    Consumer, Head, JoinError, LoanError, MqueuePlan, Producer, Region, RegionPlan, RingPlan,
};

/// An edge, or half of one, made relaxed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weak {
    Nothing,
    /// Stores to this word.
    Release(u64),
    /// Loads from this word.
    Acquire(u64),
    /// The full fence.
    Fence,
    /// Granule units are accessed in two halves.
    TornUnits,
}

enum Word {
    /// Outside the model: written before the threads start, constant afterwards.
    Constant(std::sync::atomic::AtomicU64),
    /// Raced for.
    Atomic(AtomicU64),
    /// Raced for, in two halves: the negative control of the granule protocol.
    Halves([AtomicU64; 2]),
    /// Owned by one side at a time.
    Owned(UnsafeCell<u64>),
}

/// Which words are what; the rest is constant.
#[derive(Clone, Default)]
struct Kinds {
    atomic: Vec<Range<u64>>,
    owned: Vec<Range<u64>>,
}

/// (`Rc`, because loom runs its threads as coroutines of one.)
#[derive(Clone)]
struct LoomMemory {
    words: Rc<Vec<Word>>,
    weak: Weak,
}

impl LoomMemory {
    fn new(len_bytes: u64, kinds: &Kinds, weak: Weak) -> Self {
        let within = |ranges: &[Range<u64>], at| ranges.iter().any(|range| range.contains(&at));
        let word = |at| {
            if within(&kinds.owned, at) {
                Word::Owned(UnsafeCell::new(0))
            } else if !within(&kinds.atomic, at) {
                Word::Constant(std::sync::atomic::AtomicU64::new(0))
            } else if weak == Weak::TornUnits {
                Word::Halves([AtomicU64::new(0), AtomicU64::new(0)])
            } else {
                Word::Atomic(AtomicU64::new(0))
            }
        };
        Self { words: Rc::new((0..len_bytes).step_by(8).map(word).collect()), weak }
    }
}

impl Memory for LoomMemory {
    fn len_bytes(&self) -> u64 {
        8 * self.words.len() as u64
    }

    fn load(&self, at: u64, order: Ordering) -> u64 {
        let order = if self.weak == Weak::Acquire(at) { Ordering::Relaxed } else { order };
        match &self.words[at as usize / 8] {
            Word::Constant(word) => word.load(order),
            Word::Atomic(word) => word.load(order),
            Word::Halves([low, high]) => low.load(order) | high.load(order) << 32,
            // SAFETY: loom checks that no write is concurrent, and fails the test otherwise.
            Word::Owned(word) => word.with(|word| unsafe { *word }),
        }
    }

    fn store(&self, at: u64, value: u64, order: Ordering) {
        let order = if self.weak == Weak::Release(at) { Ordering::Relaxed } else { order };
        match &self.words[at as usize / 8] {
            Word::Constant(word) => word.store(value, order),
            Word::Atomic(word) => word.store(value, order),
            Word::Halves([low, high]) => {
                low.store(value & 0xffff_ffff, order);
                high.store(value >> 32, order);
            }
            // SAFETY: loom checks that no access is concurrent, and fails the test otherwise.
            Word::Owned(word) => word.with_mut(|word| unsafe { *word = value }),
        }
    }

    fn fence(&self) {
        if self.weak != Weak::Fence {
            fence(Ordering::SeqCst);
        }
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    if builder.preemption_bound.is_none() {
        builder.preemption_bound = Some(5); // LOOM_MAX_PREEMPTIONS asks for more
    }
    builder.check(model);
}

const DEPTH: u32 = 2;

fn plan(protocol: u8, depth: u32, message_bytes_max: u32, start: u64) -> RegionPlan {
    let ring = RingPlan { protocol, message_bytes_max, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth, rx: ring, tx: ring }];
    RegionPlan { block_count: 1, mqueues, generation: 1, start }
}

/// Where things are in a region of `plan`, found on ordinary memory.
struct Places {
    len_bytes: u64,
    rx_head: u64,
    rx_tail: u64,
    slots: Range<u64>,
    directory: u64,
}

fn places(plan: &RegionPlan) -> Places {
    let len_bytes = plan.bytes().unwrap();
    let region = Region::format(mqueue::HeapMapping::memory(len_bytes as usize), plan).unwrap();
    let rx = region.entries()[0];
    let slot_bytes = u64::from(rx.depth) * u64::from(rx.slot_stride);
    Places {
        len_bytes,
        rx_head: rx.head_offset,
        rx_tail: rx.tail_offset,
        slots: rx.slots_offset..rx.slots_offset + slot_bytes,
        directory: region.memory().load(DIRECTORY_OFFSET, Ordering::Relaxed),
    }
}

fn word(at: u64) -> Range<u64> {
    at..at + 8
}

/// Both ends of the RX ring of a fresh region, over loom's memory.
fn ends(plan: &RegionPlan, kinds: &Kinds, weak: Weak) -> (Region<LoomMemory>, Out, In) {
    let memory = LoomMemory::new(plan.bytes().unwrap(), kinds, weak);
    let mut engine = Region::format(memory.clone(), plan).unwrap();
    let mut accelerator = Region::join(memory).unwrap();
    let (producer, _) = engine.engine_ends(0);
    let (consumer, _) = accelerator.accelerator_ends(0);
    (engine, producer, consumer)
}

type Out = Producer<LoomMemory>;
type In = Consumer<LoomMemory>;

fn head(n: u64) -> Head {
    Head { token: n, tag: !n, kind: kind::MESSAGE, status: n as u8 }
}

fn payload(n: u64, len: usize) -> Vec<u8> {
    vec![n as u8 + 1; len]
}

/// Pushes message `n`, waiting for credit.
fn push(producer: &mut Out, n: u64, len: usize) {
    while let Err(error) = producer.push(head(n), &payload(n, len)) {
        assert_eq!(error, LoanError::Full);
        thread::yield_now();
    }
}

/// Reads message `n` if it is there.
fn read(consumer: &mut In, n: u64, len: usize) -> bool {
    let Some(header) = consumer.peek().unwrap() else { return false };
    let expected = head(n);
    assert_eq!((header.token, header.tag, header.status), (n, !n, expected.status), "the header");
    let mut received = vec![0; header.len as usize];
    if !consumer.copy_out(&header, &mut received) {
        return false;
    }
    assert_eq!(received, payload(n, len), "the payload");
    consumer.advance();
    true
}

/// Three messages through a ring of two slots: one slot is written again.
fn doorbell(batch: bool, weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let places = places(&plan);
    let kinds = Kinds {
        atomic: vec![word(places.rx_head), word(places.rx_tail)],
        owned: vec![places.slots.clone()],
    };
    let weak = weak(&places);
    move || {
        let (_, mut producer, mut consumer) = ends(&plan, &kinds, weak);
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
    }
}

/// Payloads in the arena, which has room for one of them: its bytes are written again.
fn arena(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    // Formatted for payloads beyond the inline limit, then cut down to a size that loom can bear.
    let ring =
        RingPlan { protocol: protocol::DOORBELL, message_bytes_max: 1032, arena_bytes: 1152 };
    let mqueues = vec![MqueuePlan { depth: DEPTH, rx: ring, tx: ring }];
    let plan = RegionPlan { block_count: 1, mqueues, generation: 1, start: 0 };
    let places = places(&plan);
    let heap = mqueue::HeapMapping::memory(places.len_bytes as usize);
    let arena_offset = Region::format(heap, &plan).unwrap().entries()[0].arena_offset;
    let kinds = Kinds {
        atomic: vec![word(places.rx_head), word(places.rx_tail)],
        owned: vec![places.slots.clone(), arena_offset..arena_offset + 16],
    };
    let weak = weak(&places);
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
/// Nothing orders the units, so stale ones of the message before are seen in every combination.
/// What the release edge guards is compared through a cell: the consumer has done with a message before
/// the producer overwrites it.
fn granule(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let start = (1 << 32) - 2;
    let plan = plan(protocol::GRANULE8, 1, 8, start);
    let places = places(&plan);
    let mut kinds = Kinds { atomic: vec![places.slots.clone()], owned: vec![] };
    let weak = weak(&places);
    if weak != Weak::TornUnits {
        kinds.atomic.extend([word(places.rx_head), word(places.rx_tail)]);
    }
    move || {
        let (_, mut producer, mut consumer) = ends(&plan, &kinds, weak);
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
            assert!(read(&mut consumer, next, 4), "everything has arrived by now");
            consumer.release();
            next += 1;
        }
        assert_eq!(consumer.peek(), Ok(None));
    }
}

/// A listener that sees a head of a granule ring, and will not come back until it moves, finds every
/// message below it.
fn listener(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::GRANULE8, DEPTH, 8, 0);
    let places = places(&plan);
    let kinds =
        Kinds { atomic: vec![word(places.rx_head), places.slots.clone()], ..Kinds::default() };
    let weak = weak(&places);
    move || {
        let (region, mut producer, mut consumer) = ends(&plan, &kinds, weak);
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
    }
}

const DIRECTORY_OFFSET: u64 = offset_of!(RegionHeader, directory_offset) as u64;
const STOP_OFFSET: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, stop) as u64;
const ENGINE_PARKED: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, parked) as u64;
const ACCELERATOR_STATE: u64 =
    ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, state) as u64;
const ACCELERATOR_HEARTBEAT: u64 =
    ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, heartbeat) as u64;
const BLOCK_STATE: u64 = BLOCKS_OFFSET + offset_of!(BlockWords, state) as u64;

/// A block that sees DRAIN and then an empty ring has seen every message.
fn drain(protocol: u8, weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol, DEPTH, 8, 0);
    let places = places(&plan);
    let ends_of = [word(places.rx_head), word(places.rx_tail), word(STOP_OFFSET)];
    let mut kinds = Kinds { atomic: ends_of.to_vec(), owned: vec![] };
    let slots = if protocol == protocol::DOORBELL { &mut kinds.owned } else { &mut kinds.atomic };
    slots.push(places.slots);
    move || {
        let (engine, mut producer, mut consumer) = ends(&plan, &kinds, weak);
        let words = engine.words();
        let writer = thread::spawn(move || {
            push(&mut producer, 0, 8);
            producer.publish();
            engine.words().set_stop(stop::DRAIN);
        });
        let mut received = 0;
        for _ in 0..3 {
            let draining = words.stop() == stop::DRAIN;
            if read(&mut consumer, received, 8) {
                received += 1;
            } else if draining {
                assert_eq!(received, 1, "a message was left behind");
                break;
            } else {
                thread::yield_now();
            }
        }
        writer.join().unwrap();
    }
}

/// Whoever sees a beat sees what the beating side did before it.
fn heartbeat(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let words = [ACCELERATOR_STATE, ACCELERATOR_HEARTBEAT];
    let kinds = Kinds { atomic: words.map(word).to_vec(), owned: vec![] };
    move || {
        let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
        let region = Region::format(memory, &plan).unwrap();
        let words = region.words();
        let runtime = thread::spawn(move || {
            region.words().set_accelerator_state(state::READY);
            region.words().set_accelerator_heartbeat(1);
        });
        if words.accelerator_heartbeat() == 1 {
            assert_eq!(words.accelerator_state(), state::READY, "beats before it is ready");
        }
        runtime.join().unwrap();
    }
}

/// Whoever sees ENDED sees why.
fn ended(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let both = [ACCELERATOR_STATE, BLOCK_STATE];
    let atomic = both.into_iter().flat_map(|at| [word(at), word(at + 8)]).collect();
    let kinds = Kinds { atomic, owned: vec![] };
    move || {
        let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
        let region = Region::format(memory, &plan).unwrap();
        let words = region.words();
        let block = thread::spawn(move || {
            region.words().set_block(0, state::ENDED, reason::CONTRACT);
            region.words().set_accelerator_reason(reason::RETURNED);
            region.words().set_accelerator_state(state::ENDED);
        });
        if words.accelerator_state() == state::ENDED {
            assert_eq!(words.accelerator_reason(), reason::RETURNED, "ended without a reason");
        }
        let line = words.block(0);
        if line.state == state::ENDED {
            assert_eq!(line.reason, reason::CONTRACT, "ended without a reason");
        }
        block.join().unwrap();
    }
}

/// Whoever sees the magic number sees the whole directory.
fn format(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let places = places(&plan);
    let directory = places.directory..places.directory + 2 * 128;
    let kinds = Kinds { atomic: vec![word(0)], owned: vec![8..128, directory] };
    move || {
        let memory = LoomMemory::new(places.len_bytes, &kinds, weak);
        let joiner = memory.clone();
        let joining = thread::spawn(move || match Region::join(joiner) {
            Ok(region) => assert_eq!(region.entries()[0].depth, DEPTH),
            Err(error) => assert_eq!(error, JoinError::Magic(0)),
        });
        Region::format(memory, &plan).unwrap();
        joining.join().unwrap();
    }
}

/// A worker that goes to sleep and a publisher that looks whether it sleeps: not both miss.
fn park(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let places = places(&plan);
    let kinds = Kinds {
        atomic: vec![word(places.rx_head), word(places.rx_tail), word(ENGINE_PARKED)],
        owned: vec![places.slots],
    };
    move || {
        let (engine, mut producer, mut consumer) = ends(&plan, &kinds, weak);
        let words = engine.words();
        let publisher = thread::spawn(move || {
            push(&mut producer, 0, 8);
            producer.publish();
            engine.words().parked()
        });
        words.set_parked(true);
        let sleeps = consumer.peek().unwrap().is_none();
        let wakes = publisher.join().unwrap();
        assert!(!sleeps || wakes, "asleep with a message waiting");
    }
}

/// Worker to worker: the message names an object in private memory that the first worker wrote.
fn handover(weak: impl Fn(&Places) -> Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, 1, 8, 0);
    let places = places(&plan);
    let kinds = Kinds {
        atomic: vec![word(places.rx_head), word(places.rx_tail)],
        owned: vec![places.slots.clone()],
    };
    let weak = weak(&places);
    move || {
        let (_, mut producer, mut consumer) = ends(&plan, &kinds, weak);
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
            // SAFETY: as above; the slot came back, so the second worker has done with the object.
            theirs.with_mut(|object| unsafe { *object = 43 });
        });
        while !read(&mut consumer, 0, 8) {
            thread::yield_now();
        }
        // SAFETY: as above; the message says that the object is ours now.
        object.with(|object| unsafe { assert_eq!(*object, 42) });
        consumer.release();
        first.join().unwrap();
    }
}

fn strong(_: &Places) -> Weak {
    Weak::Nothing
}

macro_rules! holds {
    ($($name:ident: $model:expr;)+) => { $(
        #[test]
        fn $name() {
            check($model);
        }
    )+ };
}

macro_rules! fails {
    ($($name:ident: $model:expr, $why:literal;)+) => { $(
        #[test]
        #[should_panic(expected = $why)]
        fn $name() {
            check($model);
        }
    )+ };
}

holds! {
    doorbell_published_one_by_one: doorbell(false, strong);
    doorbell_published_in_batches: doorbell(true, strong);
    arena_payloads: arena(strong);
    granule_units: granule(strong);
    heads_have_messages: listener(strong);
    stop_drains: drain(protocol::DOORBELL, Weak::Nothing);
    stop_drains_granule: drain(protocol::GRANULE8, Weak::Nothing);
    heartbeat_vouches: heartbeat(Weak::Nothing);
    ended_has_a_reason: ended(Weak::Nothing);
    join_after_format: format(Weak::Nothing);
    park_never_misses: park(Weak::Nothing);
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
    stop_without_release: drain(protocol::DOORBELL, Weak::Release(STOP_OFFSET)), "left behind";
    stop_without_acquire: drain(protocol::DOORBELL, Weak::Acquire(STOP_OFFSET)), "left behind";
    stop_without_release_granule: drain(protocol::GRANULE8, Weak::Release(STOP_OFFSET)), "left behind";
    heartbeat_without_release: heartbeat(Weak::Release(ACCELERATOR_HEARTBEAT)), "before it is ready";
    heartbeat_without_acquire: heartbeat(Weak::Acquire(ACCELERATOR_HEARTBEAT)), "before it is ready";
    state_without_release: ended(Weak::Release(ACCELERATOR_STATE)), "without a reason";
    state_without_acquire: ended(Weak::Acquire(ACCELERATOR_STATE)), "without a reason";
    block_state_without_release: ended(Weak::Release(BLOCK_STATE)), "without a reason";
    block_state_without_acquire: ended(Weak::Acquire(BLOCK_STATE)), "without a reason";
    format_without_release: format(Weak::Release(0)), "Causality violation";
    format_without_acquire: format(Weak::Acquire(0)), "Causality violation";
    park_without_fence: park(Weak::Fence), "asleep with a message";
    handover_without_publish_release: handover(|p| Weak::Release(p.rx_head)), "Causality violation";
    handover_without_release_acquire: handover(|p| Weak::Acquire(p.rx_tail)), "Causality violation";
}
