//! Regions: formatting, joining and taking the rings of one.
//!
//! The engine plans a region ([`RegionPlan`]), creates memory of [`RegionPlan::bytes`] bytes and
//! [formats](Region::format) it; all other parties [join](Region::join) it and trust nothing: magic,
//! version, sizes, every offset and every ring's numbers are checked before the first ring is
//! built. The layout is in [`crate::abi`].
//!
//! The directory defines a region (`directory.rs`): the owner and purpose of each ring. The position of a ring has no
//! meaning.

mod directory;
mod plan;
mod words;

use std::ops::Range;

pub use directory::Role;
pub use plan::{MqueuePlan, PlanError, PoolPlan, RegionPlan, RingPlan, RingSpec, StreamPlan};
pub use words::Words;

use crate::abi::*;
use crate::byte_ring::{ByteReader, ByteWriter};
use crate::command::{CommandReceiver, CommandSender};
use crate::memory::{Memory, Ordering};
use crate::pool::Pool;
use crate::ring::{Consumer, Counts, Producer, format_slots};
use directory::{Directory, Problem, Refusal, fixed_parts, is_inside};
use plan::Arrangement;

/// Why a region cannot be joined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The memory does not start with the magic number: not a region, or not formatted yet.
    #[error("this memory is not a Serval region (magic {0:#018x})")]
    Magic(u64),
    /// Another ABI version.
    #[error(
        "the region has ABI version {found}, this program uses {ABI_VERSION}: use matching builds"
    )]
    Version {
        /// The region's version.
        found: u32,
    },
    /// The header is inconsistent in itself or with the memory.
    #[error("the region's header is invalid: {0}")]
    Header(&'static str),
    /// A directory entry is inconsistent in itself or with the memory.
    #[error("ring {ring} of the region's directory is invalid: {what}")]
    Ring {
        /// Index in the directory.
        ring: u32,
        /// The problem.
        what: &'static str,
    },
    /// A required directory entry is unknown.
    #[error(
        "ring {ring} of the region's directory is of kind {kind}, version {version}, which the region requires and \
         this program does not support: use matching builds"
    )]
    Required {
        /// Index in the directory.
        ring: u32,
        /// Its kind.
        kind: u16,
        /// The version of that kind.
        version: u16,
    },
}

impl From<Refusal> for JoinError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Ring(Problem { ring, what }) => Self::Ring { ring, what },
            Refusal::Header(what) => Self::Header(what),
            Refusal::Required { ring, kind, version } => Self::Required { ring, kind, version },
        }
    }
}

const UNIT16_MISSING: &str = "granule16 needs 16-byte atomic accesses (x86-64 with AVX)";

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

/// A structure that is the payload of a slot: little endian words.
macro_rules! payloads {
    ($($name:ident)+) => { $(
        impl $name {
            /// As it lies in a slot.
            pub fn to_bytes(self) -> [u8; size_of::<Self>()] {
                let words = words_of::<_, { size_of::<Self>() / 8 }>(&self);
                let mut bytes = [0; size_of::<Self>()];
                for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
                    to.copy_from_slice(&word.to_le_bytes());
                }
                bytes
            }

            /// The same the other way round. Any bytes are a message, with numbers that were not checked.
            pub fn from_bytes(bytes: [u8; size_of::<Self>()]) -> Self {
                let (words, _) = bytes.as_chunks::<8>();
                from_words::<_, { size_of::<Self>() / 8 }>(std::array::from_fn(|at| {
                    u64::from_le_bytes(words[at])
                }))
            }
        }
    )+ };
}

payloads!(CopyCommand DescribeCommand BufferRange SocketMessage Bundle BundleReply TransferCommand TransferDone);

const ENTRY_WORDS: usize = size_of::<DirectoryEntry>() / 8;
const HEADER_WORDS: usize = size_of::<RegionHeader>() / 8;

macro_rules! entries {
    ($($name:ident)+) => { $(
        impl From<DirectoryEntry> for $name {
            fn from(entry: DirectoryEntry) -> Self {
                from_words::<_, ENTRY_WORDS>(words_of(&entry))
            }
        }

        impl From<$name> for DirectoryEntry {
            fn from(entry: $name) -> Self {
                from_words::<_, ENTRY_WORDS>(words_of(&entry))
            }
        }
    )+ };
}

entries!(RingEntry StreamEntry PoolEntry);

/// A formatted region, checked.
pub struct Region<M: Memory> {
    memory: M,
    header: RegionHeader,
    directory: Directory,
    /// Of each ring, until one of its ends is taken.
    counts: Vec<Option<Counts>>,
    /// Of each block, whether one half of its streams was taken.
    streams_taken: Vec<bool>,
    /// Of each worker, whether its pool was taken.
    pools_taken: Vec<bool>,
}

impl<M: Memory> Region<M> {
    /// Lays out `plan` in zeroed `memory`; the magic number comes last.
    pub fn format(memory: M, plan: &RegionPlan) -> Result<Self, PlanError> {
        let Arrangement { header, entries, directory } = plan.arrange()?;
        if memory.len_bytes() < header.region_bytes {
            return Err(PlanError::Memory { need: header.region_bytes, have: memory.len_bytes() });
        }
        let rings = &directory.entries;
        let unit16 = rings.iter().any(|entry| entry.protocol == protocol::GRANULE16);
        if unit16 && !memory.has_unit16() {
            return Err(PlanError::Unit16);
        }
        for (at, entry) in (header.directory_offset..).step_by(8 * ENTRY_WORDS).zip(&entries) {
            memory.store_words(at, words_of::<_, ENTRY_WORDS>(entry));
        }
        for entry in rings {
            memory.store(entry.head_offset, plan.start, Ordering::Relaxed);
            memory.store(entry.tail_offset, plan.start, Ordering::Relaxed);
            format_slots(&memory, entry, plan.start);
        }
        let [magic, rest @ ..] = words_of::<_, HEADER_WORDS>(&header);
        memory.store_words::<{ HEADER_WORDS - 1 }>(8, rest);
        // EDGE FORMAT (release half)
        memory.store(0, magic, Ordering::Release);
        let counts = vec![Some(Counts { head: plan.start, tail: plan.start }); rings.len()];
        Ok(Self::new(memory, header, directory, counts))
    }

    /// Joins a region formatted by another process, with all checks. Rings of unknown kinds
    /// are ignored, unless the region marks them as required.
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
        let at = (header.directory_offset..).step_by(8 * ENTRY_WORDS);
        let entries = at
            .take(header.ring_count as usize)
            .map(|at| load_struct::<DirectoryEntry, ENTRY_WORDS>(&memory, at));
        let directory = Directory::of(entries, &header)?;
        let count = |(ring, entry): (u32, &RingEntry)| {
            let refuse = |what| JoinError::Ring { ring, what };
            if entry.protocol == protocol::GRANULE16 && !memory.has_unit16() {
                return Err(refuse(UNIT16_MISSING));
            }
            load_counts(&memory, entry).map(Some).map_err(refuse)
        };
        let known = directory.numbers.iter().copied().zip(&directory.entries);
        let counts = known.map(count).collect::<Result<_, _>>()?;
        Ok(Self::new(memory, header, directory, counts))
    }

    fn new(
        memory: M,
        header: RegionHeader,
        directory: Directory,
        counts: Vec<Option<Counts>>,
    ) -> Self {
        let streams_taken = vec![false; header.block_count as usize];
        let pools_taken = vec![false; directory.pools.len()];
        Self { memory, header, directory, counts, streams_taken, pools_taken }
    }

    /// The region's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The accelerator generation of this region.
    pub fn generation(&self) -> u64 {
        self.header.generation
    }

    /// Number of blocks.
    pub fn block_count(&self) -> u32 {
        self.header.block_count
    }

    /// Number of mqueues; their numbers are below it.
    pub fn mqueue_count(&self) -> u32 {
        self.directory.mqueue_count()
    }

    /// The mqueues of a block: its server mqueue, its client mqueues in the order of the backends, and its socket mqueue if it has
    /// sockets.
    pub fn mqueues_of(&self, block: u32) -> &[u32] {
        self.directory.mqueues_of(block)
    }

    /// The maximum number of mqueues of a block.
    pub fn mqueues_per_block_max(&self) -> u32 {
        let counts = (0..self.block_count()).map(|block| self.mqueues_of(block).len() as u32);
        counts.max().unwrap_or(0)
    }

    /// The block of an mqueue, and the mqueue's role.
    pub fn role(&self, mqueue: u32) -> (u32, Role) {
        self.directory.role(mqueue)
    }

    /// Range of a block's entries in the directory, as in its [`BlockArgs`].
    pub fn directory_of(&self, block: u32) -> Range<u32> {
        self.directory.span(block)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.header.region_bytes
    }

    /// The rings of messages of known kinds, in the order of the directory.
    pub fn entries(&self) -> &[RingEntry] {
        &self.directory.entries
    }

    /// The RX and the TX ring of an mqueue.
    pub fn rings_of(&self, mqueue: u32) -> [&RingEntry; 2] {
        self.directory.rings(mqueue).map(|place| &self.directory.entries[place as usize])
    }

    fn take(&mut self, place: u32) -> (M, &RingEntry, Counts) {
        let counts = self.counts[place as usize].take();
        let counts = counts.unwrap_or_else(|| panic!("an end of ring {place} was already taken"));
        (self.memory.clone(), &self.directory.entries[place as usize], counts)
    }

    fn producer(&mut self, place: u32) -> Producer<M> {
        let (memory, entry, counts) = self.take(place);
        Producer::new(memory, entry, counts)
    }

    fn consumer(&mut self, place: u32) -> Consumer<M> {
        let (memory, entry, counts) = self.take(place);
        Consumer::new(memory, entry, counts)
    }

    /// The engine's ends of an mqueue: it produces RX and consumes TX. Panics if already taken.
    pub fn engine_ends(&mut self, mqueue: u32) -> (Producer<M>, Consumer<M>) {
        let [rx, tx] = self.directory.rings(mqueue);
        (self.producer(rx), self.consumer(tx))
    }

    /// The accelerator's ends of an mqueue: it consumes RX and produces TX. Panics if already taken.
    pub fn accelerator_ends(&mut self, mqueue: u32) -> (Consumer<M>, Producer<M>) {
        let [rx, tx] = self.directory.rings(mqueue);
        (self.consumer(rx), self.producer(tx))
    }

    /// The stream rings of a block by slot: STREAM_RX and STREAM_TX.
    pub fn streams_of(&self, block: u32) -> &[[StreamEntry; 2]] {
        &self.directory.streams[block as usize]
    }

    fn take_streams(&mut self, block: u32) -> impl Iterator<Item = [(M, u64, u64); 2]> {
        let taken = std::mem::replace(&mut self.streams_taken[block as usize], true);
        assert!(!taken, "the streams of block {block} were already taken");
        let place = |ring: &StreamEntry| (self.memory.clone(), ring.offset, ring.capacity);
        self.streams_of(block).iter().map(move |rings| rings.each_ref().map(place))
    }

    /// The engine's ends of a block's stream rings, by slot: it writes STREAM_RX and reads STREAM_TX. The rings have to be
    /// restarted before each connection. Panics if they were already taken.
    pub fn engine_streams(&mut self, block: u32) -> Vec<(ByteWriter<M>, ByteReader<M>)> {
        let ends = |[(rx, rx_at, rx_bytes), (tx, tx_at, tx_bytes)]: [_; 2]| {
            (ByteWriter::new(rx, rx_at, rx_bytes), ByteReader::new(tx, tx_at, tx_bytes))
        };
        self.take_streams(block).map(ends).collect()
    }

    /// The block's ends of its stream rings, by slot: it reads STREAM_RX and writes STREAM_TX. Panics if they were already taken.
    pub fn block_streams(&mut self, block: u32) -> Vec<(ByteReader<M>, ByteWriter<M>)> {
        let ends = |[(rx, rx_at, rx_bytes), (tx, tx_at, tx_bytes)]: [_; 2]| {
            (ByteReader::new(rx, rx_at, rx_bytes), ByteWriter::new(tx, tx_at, tx_bytes))
        };
        self.take_streams(block).map(ends).collect()
    }

    /// The pools by worker. Empty if the region carries no bundles.
    pub fn pools(&self) -> &[PoolEntry] {
        &self.directory.pools
    }

    /// Whether bundles can go through an mqueue: it is a server mqueue, there are pools, and a slot has room for the descriptors.
    pub fn carries_bundles(&self, mqueue: u32) -> bool {
        let [rx, tx] = self.rings_of(mqueue);
        let has_room = |ring: &RingEntry, bytes| {
            ring.inline_bytes.min(ring.message_bytes_max) as usize >= bytes
        };
        rx.kind == ring_kind::SERVER_RX
            && !self.pools().is_empty()
            && has_room(rx, size_of::<Bundle>())
            && has_room(tx, size_of::<BundleReply>())
    }

    /// The engine's view of a worker's pool: all of its buffers are free. Panics if it was already taken.
    pub fn engine_pool(&mut self, worker: u32) -> Pool<M> {
        let taken = std::mem::replace(&mut self.pools_taken[worker as usize], true);
        assert!(!taken, "the pool of worker {worker} was already taken");
        Pool::new(self.memory.clone(), &self.directory.pools[worker as usize])
    }

    /// Pairs of command rings.
    pub fn command_rings(&self) -> u32 {
        self.directory.commands.len() as u32
    }

    /// What copy commands of this pair may name in the region: its offset and size in bytes.
    pub fn staging(&self, pair: u32) -> (u64, u64) {
        let [commands, _] = self.directory.commands[pair as usize];
        let entry = &self.directory.entries[commands as usize];
        (entry.staging_offset, entry.staging_bytes)
    }

    /// The engine's end of a pair of command rings. Panics when taken before.
    pub fn command_sender(&mut self, pair: u32) -> CommandSender<M> {
        let [commands, completions] = self.directory.commands[pair as usize];
        CommandSender::new(self.producer(commands), self.consumer(completions))
    }

    /// The runtime's end of a pair of command rings. Panics when taken before.
    pub fn command_receiver(&mut self, pair: u32) -> CommandReceiver<M> {
        let [commands, completions] = self.directory.commands[pair as usize];
        CommandReceiver::new(self.consumer(commands), self.producer(completions))
    }

    /// The region's control and status words.
    pub fn words(&self) -> Words<M> {
        Words {
            memory: self.memory.clone(),
            blocks_offset: self.header.blocks_offset,
            block_count: self.header.block_count,
            mqueue_count: self.header.mqueue_count,
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
    // The counts first, because the offsets are computed from them.
    let counts = [
        (header.header_bytes as usize == size_of::<RegionHeader>(), "header size"),
        (header.region_bytes <= memory_bytes, "larger than the memory"),
        ((1..=BLOCKS_MAX).contains(&header.block_count), "block count"),
        ((1..=MQUEUES_MAX).contains(&header.mqueue_count), "mqueue count"),
        ((1..=RINGS_MAX).contains(&header.ring_count), "ring count"),
    ];
    if let Some((_, what)) = counts.iter().find(|(good, _)| !good) {
        return Err(JoinError::Header(what));
    }
    let parts = fixed_parts(header);
    match parts.iter().find(|(offset, bytes, _)| !is_inside(*offset, *bytes, header)) {
        Some((_, _, what)) => Err(JoinError::Header(what)),
        None => Ok(()),
    }
}

/// Reads a ring's head and tail. The other side may already be working, and for an observer both
/// sides may: the tail is read before the head and again after it, so that counts of a valid ring
/// never look invalid.
fn load_counts(memory: &impl Memory, entry: &RingEntry) -> Result<Counts, &'static str> {
    let tail = memory.load(entry.tail_offset, Ordering::Acquire);
    let head = memory.load(entry.head_offset, Ordering::Acquire);
    let later = memory.load(entry.tail_offset, Ordering::Acquire);
    let sound = tail <= head
        && head.saturating_sub(later) <= u64::from(entry.depth)
        && head.max(later) <= COUNT_MAX;
    if sound { Ok(Counts { head, tail }) } else { Err("head and tail") }
}

/// Far above any real count, far below overflow.
const COUNT_MAX: u64 = 2 * START_MAX;
