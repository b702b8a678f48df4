//! Regions: formatting, joining and taking the rings of one.
//!
//! The engine plans a region ([`RegionPlan`]), creates memory of [`RegionPlan::bytes`] bytes and
//! [formats](Region::format) it; everyone else [joins](Region::join) it and believes nothing: magic,
//! version, sizes, every offset and every ring's arithmetic are checked before the first ring is
//! built. The layout is in [`crate::abi`].

use crate::abi::*;
use crate::bell::{set_sleeping, sleeping};
use crate::memory::{Memory, Ordering};
use crate::ring::{Consumer, Counts, Producer, format_slots, slot_bytes};

/// One mqueue as planned: an RX ring (toward the accelerator) and a TX ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MqueuePlan {
    /// Slots of each ring; a power of two in [1, DEPTH_MAX].
    pub depth: u32,
    /// The RX ring.
    pub rx: RingPlan,
    /// The TX ring.
    pub tx: RingPlan,
}

/// One ring as planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlan {
    /// One of [`crate::abi::protocol`].
    pub protocol: u8,
    /// Longest payload, in [1, MESSAGE_BYTES_MAX].
    pub message_bytes_max: u32,
    /// Size of the arena for payloads above [`Self::inline_bytes`], at least one longest message and
    /// at most ARENA_BYTES_MAX; 0 for none.
    pub arena_bytes: u64,
}

impl RingPlan {
    /// A `doorbell` ring for payloads of up to `message_bytes_max` bytes; above the inline limit it has
    /// an arena of `arena_bytes`, or of four longest messages when that is 0.
    pub fn doorbell(message_bytes_max: u32, arena_bytes: u64) -> Self {
        let arena_bytes = if message_bytes_max <= INLINE_BYTES_MAX {
            0
        } else {
            // One that overflows is refused with the plan.
            let bytes = arena_bytes.max(4 * u64::from(message_bytes_max));
            bytes.checked_next_multiple_of(LINE_BYTES).unwrap_or(bytes)
        };
        Self { protocol: protocol::DOORBELL, message_bytes_max, arena_bytes }
    }

    /// Payload bytes of a slot.
    pub fn inline_bytes(&self) -> u32 {
        self.message_bytes_max.min(INLINE_BYTES_MAX).next_multiple_of(8)
    }

    fn slot_stride(&self) -> Option<u64> {
        Some(slot_bytes(self.protocol, self.inline_bytes().into())?.next_multiple_of(64))
    }
}

/// A region as planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionPlan {
    /// Blocks, in [1, BLOCKS_MAX].
    pub block_count: u32,
    /// The mqueues of each block: the server mqueue, then its client mqueues.
    pub mqueues: Vec<MqueuePlan>,
    /// The accelerator's life, from 1.
    pub generation: u64,
    /// Initial value of every head and tail, in [0, START_MAX]: 0, but for tests of sequence wrap.
    pub start: u64,
}

/// Why a plan cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A number is outside its range.
    #[error("{what} is {value}, must be in [{min}, {max}]")]
    Range {
        /// Which number.
        what: &'static str,
        /// What it is.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// The depth is not a power of two.
    #[error("ring depth is {0}, must be a power of two")]
    Depth(u32),
    /// A ring whose messages do not fit inline has no arena, or one too small, or uses `granule`.
    #[error("messages of {0} bytes need an arena and the doorbell protocol")]
    Arena(u32),
    /// A `granule16` ring in memory without 16-byte atomic accesses.
    #[error("{UNIT16_MISSING}: use granule8 or doorbell")]
    Unit16,
    /// The memory given is smaller than the plan.
    #[error("the region needs {need} bytes, the memory has {have}")]
    Memory {
        /// Bytes the plan needs.
        need: u64,
        /// Bytes there are.
        have: u64,
    },
}

/// Why a region cannot be joined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The memory does not start with the magic number: not a region, or not formatted yet.
    #[error("this memory is not a Serval region (magic {0:#018x})")]
    Magic(u64),
    /// Another ABI version.
    #[error(
        "the region has ABI version {found}, this program speaks {ABI_VERSION}: use matching builds"
    )]
    Version {
        /// The region's version.
        found: u32,
    },
    /// The header contradicts itself or the memory.
    #[error("the region's header is impossible: {0}")]
    Header(&'static str),
    /// A directory entry contradicts itself or the memory.
    #[error("ring {ring} of the region's directory is impossible: {what}")]
    Ring {
        /// Index in the directory.
        ring: u32,
        /// What is wrong.
        what: &'static str,
    },
}

const UNIT16_MISSING: &str = "granule16 needs 16-byte atomic accesses (x86-64 with AVX)";

/// Offsets of everything in a region.
struct Arrangement {
    header: RegionHeader,
    entries: Vec<RingEntry>,
}

fn in_range(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), PlanError> {
    if value < min || value > max {
        Err(PlanError::Range { what, value, min, max })
    } else {
        Ok(())
    }
}

impl RegionPlan {
    /// Bytes of memory this region needs.
    pub fn bytes(&self) -> Result<u64, PlanError> {
        Ok(self.arrange()?.header.region_bytes)
    }

    fn check(&self) -> Result<(), PlanError> {
        in_range("block_count", self.block_count.into(), 1, BLOCKS_MAX.into())?;
        in_range("mqueues per block", self.mqueues.len() as u64, 1, 1 + u64::from(BACKENDS_MAX))?;
        in_range("generation", self.generation, 1, u64::MAX)?;
        in_range("start", self.start, 0, START_MAX)?;
        for mqueue in &self.mqueues {
            in_range("ring depth", mqueue.depth.into(), 1, DEPTH_MAX.into())?;
            if !mqueue.depth.is_power_of_two() {
                return Err(PlanError::Depth(mqueue.depth));
            }
            for ring in [&mqueue.rx, &mqueue.tx] {
                let max = ring.message_bytes_max;
                in_range("message_bytes_max", max.into(), 1, MESSAGE_BYTES_MAX.into())?;
                in_range("protocol", ring.protocol.into(), 1, 3)?;
                in_range("arena_bytes", ring.arena_bytes, 0, ARENA_BYTES_MAX)?;
                let needs_arena = max > ring.inline_bytes();
                let granule = ring.protocol != protocol::DOORBELL;
                if needs_arena && (granule || ring.arena_bytes < u64::from(max).next_multiple_of(8))
                    || (granule && ring.arena_bytes > 0)
                    || ring.arena_bytes % 8 != 0
                {
                    return Err(PlanError::Arena(max));
                }
            }
        }
        Ok(())
    }

    fn arrange(&self) -> Result<Arrangement, PlanError> {
        self.check()?;
        let per_block = self.mqueues.len() as u64;
        let mqueue_count = u64::from(self.block_count) * per_block;
        let mut end = BLOCKS_OFFSET;
        let mut place = |bytes: u64| {
            let at = end;
            end = (end + bytes).next_multiple_of(LINE_BYTES);
            at
        };
        let blocks_offset = place(u64::from(self.block_count) * size_of::<BlockWords>() as u64);
        let directory_offset = place(2 * mqueue_count * size_of::<RingEntry>() as u64);
        let [rx_heads, tx_tails, rx_tails, tx_heads] = [(); 4].map(|()| place(8 * mqueue_count));
        let mut entries = Vec::with_capacity(2 * mqueue_count as usize);
        for mqueue in 0..mqueue_count {
            let position = (mqueue % per_block) as usize;
            let plan = &self.mqueues[position];
            for (rx, ring) in [(true, &plan.rx), (false, &plan.tx)] {
                let slot_stride = ring.slot_stride().expect("protocol was checked");
                let (heads, tails) = if rx { (rx_heads, rx_tails) } else { (tx_heads, tx_tails) };
                let slots_bytes = u64::from(plan.depth) * slot_stride;
                entries.push(RingEntry {
                    kind: ring_kind_of(position, rx),
                    protocol: ring.protocol,
                    placement: placement::HOST,
                    pad: 0,
                    mqueue: mqueue as u32,
                    depth: plan.depth,
                    slot_stride: slot_stride as u32,
                    inline_bytes: ring.inline_bytes(),
                    message_bytes_max: ring.message_bytes_max,
                    slots_offset: place(slots_bytes),
                    head_offset: heads + 8 * mqueue,
                    tail_offset: tails + 8 * mqueue,
                    arena_offset: if ring.arena_bytes > 0 { place(ring.arena_bytes) } else { 0 },
                    arena_bytes: ring.arena_bytes,
                    reserved: [0; 8],
                });
            }
        }
        Ok(Arrangement {
            header: RegionHeader {
                magic: REGION_MAGIC,
                abi_version: ABI_VERSION,
                header_bytes: size_of::<RegionHeader>() as u32,
                region_bytes: place(0),
                generation: self.generation,
                block_count: self.block_count,
                mqueues_per_block: per_block as u32,
                blocks_offset,
                directory_offset,
                rx_heads_offset: rx_heads,
                tx_tails_offset: tx_tails,
                rx_tails_offset: rx_tails,
                tx_heads_offset: tx_heads,
                reserved: [0; 5],
            },
            entries,
        })
    }
}

fn ring_kind_of(position: usize, rx: bool) -> u8 {
    match (position, rx) {
        (0, true) => ring_kind::SERVER_RX,
        (0, false) => ring_kind::SERVER_TX,
        (_, true) => ring_kind::CLIENT_RX,
        (_, false) => ring_kind::CLIENT_TX,
    }
}

/// Views a shared structure as words, to copy it into or out of a region.
fn words_of<T: Copy, const N: usize>(value: &T) -> [u64; N] {
    assert_eq!(size_of::<T>(), 8 * N);
    // SAFETY: T is one of the plain integer structures of `abi`, without padding (their sizes and
    // offsets are asserted there), of exactly N words.
    unsafe { core::mem::transmute_copy(value) }
}

fn from_words<T: Copy, const N: usize>(words: [u64; N]) -> T {
    assert_eq!(size_of::<T>(), 8 * N);
    // SAFETY: as above; every bit pattern is a value of such a structure.
    unsafe { core::mem::transmute_copy(&words) }
}

fn load_struct<T: Copy, const N: usize>(memory: &impl Memory, at: u64) -> T {
    from_words::<T, N>(memory.load_words(at))
}

const RING_ENTRY_WORDS: usize = size_of::<RingEntry>() / 8;
const HEADER_WORDS: usize = size_of::<RegionHeader>() / 8;

/// A formatted region, checked.
pub struct Region<M: Memory> {
    memory: M,
    header: RegionHeader,
    entries: Vec<RingEntry>,
    /// Of each ring, until an end of it is taken.
    counts: Vec<Option<Counts>>,
}

impl<M: Memory> Region<M> {
    /// Lays out `plan` in zeroed `memory`; the magic number comes last.
    pub fn format(memory: M, plan: &RegionPlan) -> Result<Self, PlanError> {
        let Arrangement { header, entries } = plan.arrange()?;
        if memory.len_bytes() < header.region_bytes {
            return Err(PlanError::Memory { need: header.region_bytes, have: memory.len_bytes() });
        }
        let unit16 = entries.iter().any(|entry| entry.protocol == protocol::GRANULE16);
        if unit16 && !memory.has_unit16() {
            return Err(PlanError::Unit16);
        }
        for (i, entry) in entries.iter().enumerate() {
            let at = header.directory_offset + (i * size_of::<RingEntry>()) as u64;
            memory.store_words(at, words_of::<_, RING_ENTRY_WORDS>(entry));
            memory.store(entry.head_offset, plan.start, Ordering::Relaxed);
            memory.store(entry.tail_offset, plan.start, Ordering::Relaxed);
            format_slots(&memory, entry, plan.start);
        }
        let [magic, rest @ ..] = words_of::<_, HEADER_WORDS>(&header);
        memory.store_words::<{ HEADER_WORDS - 1 }>(8, rest);
        // EDGE FORMAT (release half)
        memory.store(0, magic, Ordering::Release);
        let counts = vec![Some(Counts { head: plan.start, tail: plan.start }); entries.len()];
        Ok(Self { memory, header, entries, counts })
    }

    /// Joins a region that somebody else formatted, checking everything.
    pub fn join(memory: M) -> Result<Self, JoinError> {
        if memory.len_bytes() < BLOCKS_OFFSET {
            return Err(JoinError::Header("shorter than a header"));
        }
        // EDGE FORMAT (acquire half)
        let magic = memory.load(0, Ordering::Acquire);
        if magic != REGION_MAGIC {
            return Err(JoinError::Magic(magic));
        }
        let header: RegionHeader = load_struct::<_, HEADER_WORDS>(&memory, 0);
        check_header(&header, memory.len_bytes())?;
        let mqueue_count = u64::from(header.block_count) * u64::from(header.mqueues_per_block);
        let mut entries = Vec::with_capacity(2 * mqueue_count as usize);
        let mut counts = Vec::with_capacity(2 * mqueue_count as usize);
        for ring in 0..2 * mqueue_count as u32 {
            let at = header.directory_offset + u64::from(ring) * size_of::<RingEntry>() as u64;
            let entry: RingEntry = load_struct::<_, RING_ENTRY_WORDS>(&memory, at);
            let refuse = |what| JoinError::Ring { ring, what };
            check_entry(&entry, ring, &header).map_err(refuse)?;
            if entry.protocol == protocol::GRANULE16 && !memory.has_unit16() {
                return Err(refuse(UNIT16_MISSING));
            }
            counts.push(Some(load_counts(&memory, &entry).map_err(refuse)?));
            entries.push(entry);
        }
        Ok(Self { memory, header, entries, counts })
    }

    /// The memory underneath.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The accelerator's life this region belongs to.
    pub fn generation(&self) -> u64 {
        self.header.generation
    }

    /// Number of blocks.
    pub fn block_count(&self) -> u32 {
        self.header.block_count
    }

    /// Mqueues of each block.
    pub fn mqueues_per_block(&self) -> u32 {
        self.header.mqueues_per_block
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.header.region_bytes
    }

    /// The directory: entry `2q` is the RX ring of mqueue `q`, entry `2q + 1` its TX ring.
    pub fn entries(&self) -> &[RingEntry] {
        &self.entries
    }

    fn take(&mut self, ring: u32) -> (M, &RingEntry, Counts) {
        let counts = self.counts[ring as usize].take();
        let counts = counts.unwrap_or_else(|| panic!("an end of ring {ring} was taken before"));
        (self.memory.clone(), &self.entries[ring as usize], counts)
    }

    fn producer(&mut self, ring: u32) -> Producer<M> {
        let (memory, entry, counts) = self.take(ring);
        Producer::new(memory, entry, counts)
    }

    fn consumer(&mut self, ring: u32) -> Consumer<M> {
        let (memory, entry, counts) = self.take(ring);
        Consumer::new(memory, entry, counts)
    }

    /// The engine's ends of an mqueue: it produces RX and consumes TX. Panics when taken before.
    pub fn engine_ends(&mut self, mqueue: u32) -> (Producer<M>, Consumer<M>) {
        (self.producer(2 * mqueue), self.consumer(2 * mqueue + 1))
    }

    /// The accelerator's ends of an mqueue: it consumes RX and produces TX. Panics when taken before.
    pub fn accelerator_ends(&mut self, mqueue: u32) -> (Consumer<M>, Producer<M>) {
        (self.consumer(2 * mqueue), self.producer(2 * mqueue + 1))
    }

    /// The region's control and status words.
    pub fn words(&self) -> Words<M> {
        Words {
            memory: self.memory.clone(),
            blocks_offset: self.header.blocks_offset,
            block_count: self.header.block_count,
            mqueue_count: self.entries.len() as u32 / 2,
            tx_heads_offset: self.header.tx_heads_offset,
            tx_tails_offset: self.header.tx_tails_offset,
            rx_heads_offset: self.header.rx_heads_offset,
        }
    }
}

fn check_header(header: &RegionHeader, memory_bytes: u64) -> Result<(), JoinError> {
    if header.abi_version != ABI_VERSION {
        return Err(JoinError::Version { found: header.abi_version });
    }
    // First, because the arithmetic below relies on it.
    if !(1..=BLOCKS_MAX).contains(&header.block_count) {
        return Err(JoinError::Header("block count"));
    }
    if !(1..=1 + BACKENDS_MAX).contains(&header.mqueues_per_block) {
        return Err(JoinError::Header("mqueues per block"));
    }
    let blocks = u64::from(header.block_count);
    let mqueues = blocks * u64::from(header.mqueues_per_block);
    let inside = |offset: u64, bytes: u64| {
        offset % LINE_BYTES == 0
            && offset >= BLOCKS_OFFSET
            && offset.checked_add(bytes).is_some_and(|end| end <= header.region_bytes)
    };
    let checks = [
        (header.header_bytes as usize == size_of::<RegionHeader>(), "header size"),
        (header.region_bytes <= memory_bytes, "larger than the memory"),
        (inside(header.blocks_offset, blocks * size_of::<BlockWords>() as u64), "status page"),
        (inside(header.directory_offset, 2 * mqueues * size_of::<RingEntry>() as u64), "directory"),
        (inside(header.rx_heads_offset, 8 * mqueues), "RX heads"),
        (inside(header.tx_tails_offset, 8 * mqueues), "TX tails"),
        (inside(header.rx_tails_offset, 8 * mqueues), "RX tails"),
        (inside(header.tx_heads_offset, 8 * mqueues), "TX heads"),
    ];
    match checks.iter().find(|(good, _)| !good) {
        Some((_, what)) => Err(JoinError::Header(what)),
        None => Ok(()),
    }
}

fn check_entry(entry: &RingEntry, ring: u32, header: &RegionHeader) -> Result<(), &'static str> {
    let mqueue = u64::from(ring / 2);
    let rx = ring % 2 == 0;
    let position = (ring / 2) % header.mqueues_per_block;
    let (heads, tails) = if rx {
        (header.rx_heads_offset, header.rx_tails_offset)
    } else {
        (header.tx_heads_offset, header.tx_tails_offset)
    };
    let inside = |offset: u64, bytes: u64| {
        offset % LINE_BYTES == 0
            && offset >= BLOCKS_OFFSET
            && offset.checked_add(bytes).is_some_and(|end| end <= header.region_bytes)
    };
    let slot = slot_bytes(entry.protocol, entry.inline_bytes.into()).ok_or("protocol")?;
    let needs_arena = entry.message_bytes_max > entry.inline_bytes;
    let granule = entry.protocol != protocol::DOORBELL;
    let arena_need = u64::from(entry.message_bytes_max).next_multiple_of(8);
    let checks = [
        (entry.kind == ring_kind_of(position as usize, rx), "kind"),
        (u64::from(entry.mqueue) == mqueue, "mqueue index"),
        (entry.placement == placement::HOST, "placement"),
        (entry.depth.is_power_of_two() && entry.depth <= DEPTH_MAX, "depth"),
        (entry.inline_bytes % 8 == 0, "inline bytes"),
        ((8..=INLINE_BYTES_MAX).contains(&entry.inline_bytes), "inline bytes"),
        ((1..=MESSAGE_BYTES_MAX).contains(&entry.message_bytes_max), "longest message"),
        // Block code fetches inline payloads before it checks their length.
        (u64::from(entry.inline_bytes) <= arena_need, "inline bytes"),
        (u64::from(entry.slot_stride) >= slot && entry.slot_stride % 64 == 0, "slot stride"),
        (
            inside(entry.slots_offset, u64::from(entry.depth) * u64::from(entry.slot_stride)),
            "slots",
        ),
        (entry.head_offset == heads + 8 * mqueue, "head word"),
        (entry.tail_offset == tails + 8 * mqueue, "tail word"),
        (!(granule && (needs_arena || entry.arena_bytes > 0)), "arena of a granule ring"),
        (!needs_arena || entry.arena_bytes >= arena_need, "arena size"),
        (
            match entry.arena_bytes {
                0 => entry.arena_offset == 0,
                bytes => inside(entry.arena_offset, bytes),
            },
            "arena",
        ),
        (entry.arena_bytes % 8 == 0, "arena size"),
    ];
    match checks.iter().find(|(good, _)| !good) {
        Some((_, what)) => Err(what),
        None => Ok(()),
    }
}

/// Reads a ring's head and tail. The other side may be at work already, and for an onlooker both
/// sides may: the tail is read before the head and again after it, so that counts of a sound ring
/// never look impossible.
fn load_counts(memory: &impl Memory, entry: &RingEntry) -> Result<Counts, &'static str> {
    let tail = memory.load(entry.tail_offset, Ordering::Acquire);
    let head = memory.load(entry.head_offset, Ordering::Acquire);
    let later = memory.load(entry.tail_offset, Ordering::Acquire);
    let sound = tail <= head
        && head.saturating_sub(later) <= u64::from(entry.depth)
        && head.max(later) <= COUNT_MAX;
    if sound { Ok(Counts { head, tail }) } else { Err("head and tail") }
}

/// Far above any honest count, far below overflow.
const COUNT_MAX: u64 = 2 * START_MAX;

/// The control and status words of a region. Each has one writer; see [`crate::abi`].
#[derive(Clone)]
pub struct Words<M: Memory> {
    memory: M,
    blocks_offset: u64,
    block_count: u32,
    mqueue_count: u32,
    tx_heads_offset: u64,
    tx_tails_offset: u64,
    rx_heads_offset: u64,
}

macro_rules! words {
    ($( $(#[doc = $doc:literal])+ $get:ident $set:ident = $at:expr; )+) => { $(
        $(#[doc = $doc])+
        #[inline]
        pub fn $get(&self) -> u64 {
            // EDGE STOP HEARTBEAT STATE (acquire half)
            self.memory.load($at as u64, Ordering::Acquire)
        }
        $(#[doc = $doc])+
        #[inline]
        pub fn $set(&self, value: u64) {
            // EDGE STOP HEARTBEAT STATE (release half)
            self.memory.store($at as u64, value, Ordering::Release);
        }
    )+ };
}

use core::mem::offset_of;

impl<M: Memory> Words<M> {
    words! {
        /// The engine's wish, one of [`crate::abi::stop`]. A runtime in another process stores NOW itself when its
        /// life is over; see ORDERING.md.
        stop set_stop = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, stop) as u64;
        /// The engine's heartbeat.
        engine_heartbeat set_engine_heartbeat = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, heartbeat) as u64;
        /// The accelerator runtime's state, one of [`crate::abi::state`]. Set the reason first, so
        /// that whoever sees ENDED sees why.
        accelerator_state set_accelerator_state = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, state) as u64;
        /// Why the accelerator runtime ended, one of [`crate::abi::reason`].
        accelerator_reason set_accelerator_reason = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, reason) as u64;
        /// The accelerator runtime's heartbeat.
        accelerator_heartbeat set_accelerator_heartbeat = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, heartbeat) as u64;
    }

    /// Says that a worker is about to sleep (or no longer does). Having said so it must look at its
    /// rings once more before it sleeps: either it sees the last message, or the publisher sees the flag.
    pub fn set_parked(&self, parked: bool) {
        set_sleeping(&self.memory, ENGINE_PARKED_OFFSET, parked);
    }

    /// Whether a worker sleeps. Ask after publishing, and wake it if so.
    #[inline]
    pub fn parked(&self) -> bool {
        sleeping(&self.memory, ENGINE_PARKED_OFFSET)
    }

    /// The same from the accelerator's side: see [`Self::set_parked`].
    pub fn set_accelerator_parked(&self, parked: bool) {
        set_sleeping(&self.memory, ACCELERATOR_PARKED_OFFSET, parked);
    }

    /// Whether the accelerator's side sleeps. Ask after publishing, and wake it if so.
    #[inline]
    pub fn accelerator_parked(&self) -> bool {
        sleeping(&self.memory, ACCELERATOR_PARKED_OFFSET)
    }

    fn block_offset(&self, block: u32) -> u64 {
        assert!(block < self.block_count, "no block {block}");
        self.blocks_offset + u64::from(block) * size_of::<BlockWords>() as u64
    }

    /// A block's line of the status page. When it says ENDED, reason and counts are final.
    pub fn block(&self, block: u32) -> BlockWords {
        // The state first: it vouches for what its writer stored before it.
        let state = self.block_state(block);
        let words =
            self.memory.load_words::<{ size_of::<BlockWords>() / 8 }>(self.block_offset(block));
        BlockWords { state, ..from_words(words) }
    }

    /// A block reports its state; the reason goes first, so that whoever sees ENDED sees why.
    pub fn set_block(&self, block: u32, state: u64, reason: u64) {
        let at = self.block_offset(block);
        let word = |field: usize| at + field as u64;
        self.memory.store(word(offset_of!(BlockWords, reason)), reason, Ordering::Relaxed);
        // EDGE STATE (release half)
        self.memory.store(word(offset_of!(BlockWords, state)), state, Ordering::Release);
    }

    /// A block's state word alone.
    #[inline]
    pub fn block_state(&self, block: u32) -> u64 {
        let at = self.block_offset(block) + offset_of!(BlockWords, state) as u64;
        // EDGE STATE (acquire half)
        self.memory.load(at, Ordering::Acquire)
    }

    /// The doorbell of an mqueue's TX ring: its head word. Who sees it sees the messages below it.
    #[inline]
    pub fn tx_head(&self, mqueue: u32) -> u64 {
        self.head_word(self.tx_heads_offset, mqueue)
    }

    /// For the engine: whether an mqueue's TX ring holds messages that it has not released. Unlike a head
    /// that is remembered, this finds a message whose head was seen before the message itself.
    #[inline]
    pub fn tx_waiting(&self, mqueue: u32) -> bool {
        // The engine's own word: nobody else's stores hang on it.
        let head = self.tx_head(mqueue);
        head != self.memory.load(self.tx_tails_offset + 8 * u64::from(mqueue), Ordering::Relaxed)
    }

    /// Adds to `found` those of `mqueues` for which [`Self::tx_waiting`] holds.
    // Without a branch that depends on what waits: a worker asks for each mqueue in every turn, and no
    // processor foresees the answers.
    #[inline]
    pub fn tx_waiting_among(&self, mqueues: &[u32], found: &mut Vec<u32>) {
        let before = found.len();
        found.resize(before + mqueues.len(), 0);
        let (room, mut count) = (&mut found[before..], 0);
        for &mqueue in mqueues {
            room[count] = mqueue;
            count += usize::from(self.tx_waiting(mqueue));
        }
        found.truncate(before + count);
    }

    /// The doorbell of an mqueue's RX ring: its head word. Who sees it sees the messages below it.
    #[inline]
    pub fn rx_head(&self, mqueue: u32) -> u64 {
        self.head_word(self.rx_heads_offset, mqueue)
    }

    #[inline]
    fn head_word(&self, heads_offset: u64, mqueue: u32) -> u64 {
        assert!(mqueue < self.mqueue_count, "no mqueue {mqueue}");
        // EDGE RX_PUBLISH TX_PUBLISH DOORBELL (acquire half): a head that is remembered must not be ahead of its messages
        self.memory.load(heads_offset + 8 * u64::from(mqueue), Ordering::Acquire)
    }
}

const ENGINE_PARKED_OFFSET: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, parked) as u64;
const ACCELERATOR_PARKED_OFFSET: u64 =
    ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, parked) as u64;
