//! The ring code itself under loom, which explores every interleaving and every stale read that the memory
//! model allows (within a bound on preemptions): `cargo xtask ci loom`.
//!
//! There are two kinds of checks. Slots, arenas and the directory must not be accessed while the other side
//! writes them, so here they are loom cells: an access that no edge orders after the other side's is a
//! failure, whatever value it reads. Words that both sides access concurrently (heads, tails, status words,
//! granule units) are loom atomics, and the models compare the data that they publish.
//!
//! Every edge has negative controls: the same model must fail with each half of that edge made
//! relaxed. A check that cannot fail proves nothing.

use std::mem::offset_of;
use std::ops::Range;
use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;
use mqueue::abi::{
    ACCELERATOR_WORDS_OFFSET, AcceleratorWords, BLOCKS_OFFSET, BlockWords, ENGINE_WORDS_OFFSET,
    EngineWords, RegionHeader, RingEntry, kind,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{Consumer, Head, LoanError, MqueuePlan, Producer, Region, RegionPlan, RingPlan};

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

mod books;
mod bundles;
mod bytes;
mod dictionary;
mod epochs;
mod orders;
mod rings;
mod sleep;
mod sockets;
mod words;

/// An edge, or half of one, that is made relaxed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weak {
    Nothing,
    /// Stores to this word.
    Release(u64),
    /// Loads from this word.
    Acquire(u64),
    /// The full fence.
    Fence,
    /// The fences of bundles.
    ReleaseFence,
    AcquireFence,
    /// Granule units are accessed in two halves.
    TornUnits,
}

enum Word {
    /// Constant: written before the threads start.
    Constant(std::sync::atomic::AtomicU64),
    /// Accessed concurrently.
    Atomic(AtomicU64),
    /// Accessed concurrently, in two halves: the negative control of the granule protocol.
    Halves([AtomicU64; 2]),
    /// Owned by one side at a time.
    Owned(UnsafeCell<u64>),
}

/// The kinds of words; unlisted ones are constant.
#[derive(Clone, Default)]
struct Kinds {
    atomic: Vec<Range<u64>>,
    owned: Vec<Range<u64>>,
}

/// (`Rc`, because loom runs its threads as coroutines of one thread.)
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

    fn release_fence(&self) {
        if self.weak != Weak::ReleaseFence {
            fence(Ordering::Release);
        }
    }

    fn acquire_fence(&self) {
        if self.weak != Weak::AcquireFence {
            fence(Ordering::Acquire);
        }
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_within(5, model);
}

/// `LOOM_MAX_PREEMPTIONS` raises the bound.
fn check_within(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.check(model);
}

const DEPTH: u32 = 2;

fn plan(protocol: u8, depth: u32, message_bytes_max: u32, start: u64) -> RegionPlan {
    let ring = RingPlan { protocol, message_bytes_max, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth, rx: ring, tx: ring }];
    RegionPlan::of_blocks(1, &mqueues, 1).starting_at(start)
}

/// Offsets in a region of `plan`, determined in ordinary memory.
struct Places {
    len_bytes: u64,
    rx_head: u64,
    rx_tail: u64,
    slots: Range<u64>,
    tx_head: u64,
    tx_tail: u64,
    tx_slots: Range<u64>,
    directory: u64,
}

fn places(plan: &RegionPlan) -> Places {
    let len_bytes = plan.bytes().unwrap();
    let region = Region::format(mqueue::HeapMapping::memory(len_bytes as usize), plan).unwrap();
    let [rx, tx] = [0, 1].map(|i| region.entries()[i]);
    let slots = |ring: RingEntry| {
        let bytes = u64::from(ring.depth) * u64::from(ring.slot_stride);
        ring.slots_offset..ring.slots_offset + bytes
    };
    Places {
        len_bytes,
        rx_head: rx.head_offset,
        rx_tail: rx.tail_offset,
        slots: slots(rx),
        tx_head: tx.head_offset,
        tx_tail: tx.tail_offset,
        tx_slots: slots(tx),
        directory: region.memory().load(DIRECTORY_OFFSET, Ordering::Relaxed),
    }
}

fn word(at: u64) -> Range<u64> {
    at..at + 8
}

/// Both ends of the RX ring of a new region, in loom's memory.
fn ends(plan: &RegionPlan, kinds: &Kinds, weak: Weak) -> (Region<LoomMemory>, Out, In) {
    let memory = LoomMemory::new(plan.bytes().unwrap(), kinds, weak);
    let mut engine = Region::format(memory.clone(), plan).unwrap();
    let mut accelerator = Region::join(memory).unwrap();
    let (producer, _) = engine.engine_ends(0);
    let (consumer, _) = accelerator.accelerator_ends(0);
    (engine, producer, consumer)
}

/// A model that uses both ends of the RX ring of a new region of `plan`. The kinds of words, and the relaxed edge, may
/// depend on the offsets.
fn with_ends(
    plan: RegionPlan,
    kinds: impl Fn(&Places, Weak) -> Kinds,
    weak: impl Fn(&Places) -> Weak,
    model: impl Fn(Region<LoomMemory>, Out, In) + Sync + Send,
) -> impl Fn() + Sync + Send {
    let places = places(&plan);
    let weak = weak(&places);
    let kinds = kinds(&places, weak);
    move || {
        let (region, producer, consumer) = ends(&plan, &kinds, weak);
        model(region, producer, consumer);
    }
}

/// A doorbell ring: head and tail are accessed concurrently, and a slot has one owner at a time.
fn doorbell_words(places: &Places, _: Weak) -> Kinds {
    Kinds {
        atomic: vec![word(places.rx_head), word(places.rx_tail)],
        owned: vec![places.slots.clone()],
    }
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

/// Reads message `n` if it has been published.
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

fn strong(_: &Places) -> Weak {
    Weak::Nothing
}

const DIRECTORY_OFFSET: u64 = offset_of!(RegionHeader, directory_offset) as u64;
const STOP_OFFSET: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, stop) as u64;
const ENGINE_PARKED: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, parked) as u64;
const ACCELERATOR_STATE: u64 =
    ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, state) as u64;
const ACCELERATOR_HEARTBEAT: u64 =
    ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, heartbeat) as u64;
const ENGINE_HEARTBEAT: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, heartbeat) as u64;
const CLIENT_PARKED: u64 = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, parked) as u64;
const BLOCK_SENT: u64 = BLOCKS_OFFSET + offset_of!(BlockWords, sent) as u64;
const BLOCK_STATE: u64 = BLOCKS_OFFSET + offset_of!(BlockWords, state) as u64;
