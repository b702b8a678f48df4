//! The plan of a region: the list of its rings, and the placement of everything in it.

use super::directory::{self, Directory, Problem, Refusal};
use crate::abi::*;
use crate::byte_ring::byte_ring_bytes;
use crate::ring::slot_bytes;

/// The plan of one mqueue: an RX ring (toward the accelerator) and a TX ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MqueuePlan {
    /// Slots of each ring; a power of two in [1, DEPTH_MAX].
    pub depth: u32,
    /// The RX ring.
    pub rx: RingPlan,
    /// The TX ring.
    pub tx: RingPlan,
}

/// The message format of one ring.
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
    /// an arena of `arena_bytes`, or of four longest messages if that is 0.
    pub fn doorbell(message_bytes_max: u32, arena_bytes: u64) -> Self {
        let arena_bytes = if message_bytes_max <= INLINE_BYTES_MAX {
            0
        } else {
            // An overflow is refused together with the plan.
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

    fn check(&self) -> Result<(), PlanError> {
        let max = self.message_bytes_max;
        in_range("message_bytes_max", max.into(), 1, MESSAGE_BYTES_MAX.into())?;
        in_range("protocol", self.protocol.into(), 1, 3)?;
        in_range("arena_bytes", self.arena_bytes, 0, ARENA_BYTES_MAX)?;
        let needs_arena = max > self.inline_bytes();
        let granule = self.protocol != protocol::DOORBELL;
        if needs_arena && (granule || self.arena_bytes < u64::from(max).next_multiple_of(8))
            || (granule && self.arena_bytes > 0)
            || self.arena_bytes % 8 != 0
        {
            return Err(PlanError::Arena(max));
        }
        Ok(())
    }
}

/// One ring of messages of a region, as described by its entry in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSpec {
    /// One of [`crate::abi::ring_kind`].
    pub kind: u16,
    /// The block it belongs to; [`NO_BLOCK`] for command rings.
    pub block: u32,
    /// Its number among the rings of this kind and block: for a client mqueue, the backend; for command rings, the pair.
    pub index: u32,
    /// One of [`crate::abi::placement`].
    pub placement: u8,
    /// Slots; a power of two in [1, DEPTH_MAX].
    pub depth: u32,
    /// The message format of its slots.
    pub messages: RingPlan,
    /// Of COMMANDS, and of CLIENT_TX to a backend that does transfers: bytes of the staging, or of the memory for transfers, at most ARENA_BYTES_MAX; else 0.
    pub staging_bytes: u64,
}

/// The connections that each block can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPlan {
    /// Connections at a time, in [1, SOCKETS_MAX].
    pub slots: u32,
    /// Capacity of each of a connection's two rings: a power of two in [STREAM_BYTES_MIN, STREAM_BYTES_MAX].
    pub capacity: u64,
}

/// The memory for bundles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolPlan {
    /// Workers of the engine, in [1, POOLS_MAX]: each has a pool.
    pub workers: u32,
    /// Bytes of each pool: a multiple of POOL_ALIGN, at most ARENA_BYTES_MAX.
    pub bytes: u64,
}

/// The plan of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionPlan {
    /// Blocks, in [1, BLOCKS_MAX].
    pub block_count: u32,
    /// The rings of messages, in the order of their entries. Those of one block are contiguous.
    pub rings: Vec<RingSpec>,
    /// The stream rings of each block, whose entries follow those of its other rings. A block has them if it has a socket mqueue.
    pub streams: Option<StreamPlan>,
    /// The pools, whose entries come last.
    pub pools: Option<PoolPlan>,
    /// The accelerator generation, from 1.
    pub generation: u64,
    /// Initial value of every head and tail, in [0, START_MAX]: 0, except in tests of sequence wrap.
    pub start: u64,
}

/// Why a plan is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A number is outside its range.
    #[error("{what} is {value}, must be in [{min}, {max}]")]
    Range {
        /// The number's name.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// The depth is not a power of two.
    #[error("ring depth is {0}, must be a power of two")]
    Depth(u32),
    /// The capacity of stream rings is not a power of two.
    #[error("the capacity of stream rings is {0} bytes, must be a power of two")]
    Capacity(u64),
    /// The size of pools is not a multiple of [`POOL_ALIGN`].
    #[error("the size of pools is {0} bytes, must be a multiple of {POOL_ALIGN}")]
    Pool(u64),
    /// A ring whose messages do not fit inline has no arena, or one too small, or uses `granule`.
    #[error("messages of {0} bytes need an arena and the doorbell protocol")]
    Arena(u32),
    /// A `granule16` ring in memory without 16-byte atomic accesses.
    #[error("{}: use granule8 or doorbell", super::UNIT16_MISSING)]
    Unit16,
    /// The rings do not form complete mqueues, one server mqueue for each block.
    #[error("ring {ring} of the plan is invalid: {what}")]
    Ring {
        /// Index in the plan.
        ring: u32,
        /// The problem.
        what: &'static str,
    },
    /// The memory given is smaller than the plan.
    #[error("the region needs {need} bytes, the memory has {have}")]
    Memory {
        /// Bytes the plan needs.
        need: u64,
        /// Bytes available.
        have: u64,
    },
}

fn in_range(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), PlanError> {
    if value < min || value > max {
        Err(PlanError::Range { what, value, min, max })
    } else {
        Ok(())
    }
}

/// Offsets of everything in a region.
pub(super) struct Arrangement {
    pub(super) header: RegionHeader,
    /// As they lie in the directory.
    pub(super) entries: Vec<DirectoryEntry>,
    pub(super) directory: Directory,
}

/// Allocates parts of a region one after the other.
struct Cursor(u64);

impl Cursor {
    /// Skips to a multiple of `to`.
    fn align(&mut self, to: u64) {
        self.0 = self.0.next_multiple_of(to);
    }

    fn place(&mut self, bytes: u64) -> u64 {
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(LINE_BYTES);
        at
    }
}

impl RegionPlan {
    /// A region of `block_count` blocks with the same mqueues: the server mqueue, then the client mqueues in the
    /// order of the backends.
    pub fn of_blocks(block_count: u32, mqueues: &[MqueuePlan], generation: u64) -> Self {
        let rings_of = |block: u32| {
            mqueues.iter().enumerate().flat_map(move |(at, mqueue)| {
                let (rx, tx) = match at {
                    0 => (ring_kind::SERVER_RX, ring_kind::SERVER_TX),
                    _ => (ring_kind::CLIENT_RX, ring_kind::CLIENT_TX),
                };
                [(rx, mqueue.rx), (tx, mqueue.tx)].map(|(kind, messages)| RingSpec {
                    kind,
                    block,
                    index: at.saturating_sub(1) as u32,
                    placement: placement::HOST,
                    depth: mqueue.depth,
                    messages,
                    staging_bytes: 0,
                })
            })
        };
        // Too many blocks are refused together with the plan, which needs no rings for that.
        let listed = block_count.min(BLOCKS_MAX);
        let rings = (0..listed).flat_map(rings_of).collect();
        Self { block_count, rings, streams: None, pools: None, generation, start: 0 }
    }

    /// The same with a socket mqueue of this depth for each block, and `slots` connections with rings of `capacity` bytes.
    pub fn with_sockets(mut self, slots: u32, capacity: u64, depth: u32) -> Self {
        let messages = RingPlan::doorbell(size_of::<SocketMessage>() as u32, 0);
        let of_block = |rings: &[RingSpec]| {
            let block = rings[0].block;
            let ring = |kind| RingSpec {
                kind,
                block,
                index: 0,
                placement: placement::HOST,
                depth,
                messages,
                staging_bytes: 0,
            };
            let sockets = [ring_kind::SOCKET_RX, ring_kind::SOCKET_TX].map(ring);
            let any = if block == NO_BLOCK { 0 } else { sockets.len() };
            [rings, &sockets[..any]].concat()
        };
        self.rings = self.by_owner().flat_map(of_block).collect();
        self.streams = Some(StreamPlan { slots, capacity });
        self
    }

    /// The same with one more pair of command rings, for `depth` commands in flight, and staging of `staging_bytes`.
    pub fn with_commands(mut self, depth: u32, staging_bytes: u64) -> Self {
        let pairs = self.rings.iter().filter(|ring| ring.kind == ring_kind::COMMANDS).count();
        let commands = RingSpec {
            kind: ring_kind::COMMANDS,
            block: NO_BLOCK,
            index: pairs as u32,
            placement: placement::HOST,
            depth,
            messages: RingPlan::doorbell(size_of::<CopyCommand>() as u32, 0),
            staging_bytes,
        };
        let completions = RingSpec { kind: ring_kind::COMPLETIONS, staging_bytes: 0, ..commands };
        self.rings.extend([commands, completions]);
        self
    }

    /// The same with memory of `bytes` for each block, which transfers that it asks this backend for may name; the entry of its CLIENT_TX ring has it.
    pub fn with_memory(mut self, backend: u32, bytes: u64) -> Self {
        let is_meant =
            |ring: &&mut RingSpec| ring.kind == ring_kind::CLIENT_TX && ring.index == backend;
        self.rings.iter_mut().filter(is_meant).for_each(|ring| ring.staging_bytes = bytes);
        self
    }

    /// The same with a pool of `bytes` for each of `workers` workers.
    pub fn with_pools(self, workers: u32, bytes: u64) -> Self {
        Self { pools: Some(PoolPlan { workers, bytes }), ..self }
    }

    /// The same with this initial value of every head and tail.
    pub fn starting_at(self, start: u64) -> Self {
        Self { start, ..self }
    }

    /// Bytes of memory this region needs.
    pub fn bytes(&self) -> Result<u64, PlanError> {
        Ok(self.arrange()?.header.region_bytes)
    }

    fn check(&self) -> Result<(), PlanError> {
        in_range("block_count", self.block_count.into(), 1, BLOCKS_MAX.into())?;
        in_range("generation", self.generation, 1, u64::MAX)?;
        in_range("start", self.start, 0, START_MAX)?;
        if let Some(StreamPlan { slots, capacity }) = self.streams {
            in_range("sockets", slots.into(), 1, SOCKETS_MAX.into())?;
            in_range("stream capacity", capacity, STREAM_BYTES_MIN, STREAM_BYTES_MAX)?;
            if !capacity.is_power_of_two() {
                return Err(PlanError::Capacity(capacity));
            }
        }
        if let Some(PoolPlan { workers, bytes }) = self.pools {
            in_range("pools", workers.into(), 1, POOLS_MAX.into())?;
            in_range("pool bytes", bytes, POOL_ALIGN, ARENA_BYTES_MAX)?;
            if bytes % POOL_ALIGN != 0 {
                return Err(PlanError::Pool(bytes));
            }
        }
        in_range("rings", self.entry_count(), 1, RINGS_MAX.into())?;
        for ring in &self.rings {
            in_range("ring depth", ring.depth.into(), 1, DEPTH_MAX.into())?;
            if !ring.depth.is_power_of_two() {
                return Err(PlanError::Depth(ring.depth));
            }
            in_range(
                "placement",
                ring.placement.into(),
                placement::HOST.into(),
                placement::HOST.into(),
            )?;
            in_range("staging_bytes", ring.staging_bytes, 0, ARENA_BYTES_MAX)?;
            ring.messages.check()?;
        }
        Ok(())
    }

    /// The rings of messages, in parts whose owner is the same.
    fn by_owner(&self) -> impl Iterator<Item = &[RingSpec]> {
        self.rings.chunk_by(|a, b| a.block == b.block)
    }

    /// How many entries the directory has.
    fn entry_count(&self) -> u64 {
        let blocks = self.by_owner().filter(|rings| rings[0].block != NO_BLOCK).count() as u64;
        let streams = self.streams.map_or(0, |streams| 2 * u64::from(streams.slots));
        let pools = self.pools.map_or(0, |pools| pools.workers.into());
        self.rings.len() as u64 + blocks * streams + pools
    }

    pub(super) fn arrange(&self) -> Result<Arrangement, PlanError> {
        self.check()?;
        let numbers = self.number_mqueues()?;
        let mqueue_count = numbers.iter().flatten().max().map_or(0, |last| last + 1);
        let words_bytes = 8 * u64::from(mqueue_count);
        let mut cursor = Cursor(BLOCKS_OFFSET);
        let blocks_offset =
            cursor.place(u64::from(self.block_count) * size_of::<BlockWords>() as u64);
        let ring_count = self.entry_count();
        let directory_offset = cursor.place(ring_count * size_of::<DirectoryEntry>() as u64);
        let [rx_heads, tx_tails, rx_tails, tx_heads] = [(); 4].map(|()| cursor.place(words_bytes));
        let mut header = RegionHeader {
            magic: REGION_MAGIC,
            abi_version: ABI_VERSION,
            header_bytes: size_of::<RegionHeader>() as u32,
            region_bytes: 0,
            generation: self.generation,
            block_count: self.block_count,
            mqueue_count,
            blocks_offset,
            directory_offset,
            rx_heads_offset: rx_heads,
            tx_tails_offset: tx_tails,
            rx_tails_offset: rx_tails,
            tx_heads_offset: tx_heads,
            ring_count: ring_count as u32,
            pad: 0,
            reserved: [0; 4],
        };
        let mut entries = Vec::with_capacity(ring_count as usize);
        let mut numbers = numbers.into_iter();
        for rings in self.by_owner() {
            for (spec, mqueue) in rings.iter().zip(&mut numbers) {
                entries.push(spec.entry(mqueue, &header, &mut cursor).into());
            }
            if let (Some(streams), true) = (self.streams, rings[0].block != NO_BLOCK) {
                let stream = streams.entries(rings[0].block, &mut cursor);
                entries.extend(stream.map(DirectoryEntry::from));
            }
        }
        if let Some(pools) = self.pools {
            entries.extend(pools.entries(&mut cursor).map(DirectoryEntry::from));
        }
        header.region_bytes = cursor.place(0);
        let directory = Directory::of(entries.iter().copied(), &header).map_err(|refusal| {
            let (ring, what) = match refusal {
                Refusal::Ring(Problem { ring, what }) => (ring, what),
                Refusal::Header(what) => (0, what),
                Refusal::Required { ring, .. } => (ring, "kind"),
            };
            PlanError::Ring { ring, what }
        })?;
        Ok(Arrangement { header, entries, directory })
    }

    /// The mqueue of each ring that belongs to one: numbered in the order in which the plan lists them.
    fn number_mqueues(&self) -> Result<Vec<Option<u32>>, PlanError> {
        let mut numbers = std::collections::BTreeMap::new();
        let mqueue_of = |(ring, spec): (u32, &RingSpec)| {
            let of_mqueue = match directory::mqueue_kind(spec.kind) {
                Some((kind, _)) => kind,
                None if directory::is_command_kind(spec.kind) => return Ok(None),
                None => return Err(PlanError::Ring { ring, what: "kind" }),
            };
            let next = numbers.len() as u32;
            Ok(Some(*numbers.entry((spec.block, of_mqueue, spec.index)).or_insert(next)))
        };
        (0..).zip(&self.rings).map(mqueue_of).collect()
    }
}

impl RingSpec {
    /// Its entry; its memory is allocated next.
    fn entry(&self, mqueue: Option<u32>, header: &RegionHeader, cursor: &mut Cursor) -> RingEntry {
        let messages = &self.messages;
        let slot_stride = messages.slot_stride().expect("protocol was checked");
        let offset = cursor.0;
        let (head_offset, tail_offset) = match mqueue {
            Some(mqueue) => {
                let (heads, tails) = directory::words_of_mqueues(self.kind, header);
                (heads + 8 * u64::from(mqueue), tails + 8 * u64::from(mqueue))
            }
            None => (cursor.place(8), cursor.place(8)),
        };
        let slots_offset = cursor.place(u64::from(self.depth) * slot_stride);
        let mut place_if_any = |bytes| if bytes == 0 { 0 } else { cursor.place(bytes) };
        let arena_offset = place_if_any(messages.arena_bytes);
        let staging_offset = place_if_any(self.staging_bytes);
        RingEntry {
            kind: self.kind,
            version: if mqueue.is_some() { ring_version::MQUEUE } else { ring_version::COMMAND },
            // A runtime that takes no commands can still serve.
            flags: if mqueue.is_some() { ring_flags::REQUIRED } else { 0 },
            block: self.block,
            index: self.index,
            offset,
            bytes: cursor.0 - offset,
            protocol: messages.protocol,
            placement: self.placement,
            pad: 0,
            mqueue: mqueue.unwrap_or(0),
            depth: self.depth,
            slot_stride: slot_stride as u32,
            inline_bytes: messages.inline_bytes(),
            message_bytes_max: messages.message_bytes_max,
            slots_offset,
            head_offset,
            tail_offset,
            arena_offset,
            arena_bytes: messages.arena_bytes,
            staging_offset,
            staging_bytes: self.staging_bytes,
            reserved: [0; 2],
        }
    }
}

impl StreamPlan {
    /// The entries of a block's stream rings, with their memory.
    fn entries(self, block: u32, cursor: &mut Cursor) -> impl Iterator<Item = StreamEntry> {
        let rings = (0..self.slots)
            .flat_map(|slot| [ring_kind::STREAM_RX, ring_kind::STREAM_TX].map(|kind| (slot, kind)));
        rings.map(move |(slot, kind)| {
            let bytes = byte_ring_bytes(self.capacity);
            StreamEntry {
                kind,
                version: ring_version::STREAM,
                flags: ring_flags::REQUIRED,
                block,
                index: slot,
                offset: cursor.place(bytes),
                bytes,
                capacity: self.capacity,
                reserved: [0; 11],
            }
        })
    }
}

impl PoolPlan {
    /// The entries of the pools, with their memory.
    fn entries(self, cursor: &mut Cursor) -> impl Iterator<Item = PoolEntry> {
        cursor.align(POOL_ALIGN);
        (0..self.workers).map(move |worker| PoolEntry {
            kind: ring_kind::POOL,
            version: ring_version::POOL,
            flags: 0,
            block: NO_BLOCK,
            index: worker,
            offset: cursor.place(self.bytes),
            bytes: self.bytes,
            reserved: [0; 12],
        })
    }
}
