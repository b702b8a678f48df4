//! The directory: validation of entries, and the information they contain together.
//!
//! Each entry is a copy. Checks common to all kinds come first (owner, memory), then whether the kind is known, then the
//! kind's own part. At the end the rings must form complete mqueues and complete connections, and no two parts of the region may overlap. The
//! formatter's own plan passes the same checks.

use std::ops::Range;

use crate::abi::*;
use crate::byte_ring::byte_ring_bytes;
use crate::ring::slot_bytes;

const SERVERLESS: &str = "a block without a server mqueue";

/// An invalid entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    /// Index in the directory.
    pub(super) ring: u32,
    pub(super) what: &'static str,
}

/// Why a directory is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// An invalid entry.
    Ring(Problem),
    /// The header's counts do not match the entries.
    Header(&'static str),
    /// An entry of a required kind or version that is unknown.
    Required { ring: u32, kind: u16, version: u16 },
}

/// The role of an mqueue in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Requests of clients and their replies.
    Server,
    /// Requests to this backend, by its index in the configuration, and its answers.
    Client(u32),
    /// Commands for the block's connections, their completions, and events.
    Sockets,
}

impl Role {
    fn of(entry: &RingEntry) -> Option<Self> {
        match (mqueue_kind(entry.kind)?.0, entry.index) {
            (MqueueKind::Server, 0) => Some(Self::Server),
            (MqueueKind::Client, index) if index < BACKENDS_MAX => Some(Self::Client(index)),
            (MqueueKind::Sockets, 0) => Some(Self::Sockets),
            _ => None,
        }
    }
}

/// What the kind of a ring says about its mqueue's [`Role`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MqueueKind {
    Server,
    Client,
    Sockets,
}

/// For the kinds of mqueue rings: that of the mqueue, and whether it is the RX ring.
pub(super) fn mqueue_kind(kind: u16) -> Option<(MqueueKind, bool)> {
    match kind {
        ring_kind::SERVER_RX => Some((MqueueKind::Server, true)),
        ring_kind::SERVER_TX => Some((MqueueKind::Server, false)),
        ring_kind::CLIENT_RX => Some((MqueueKind::Client, true)),
        ring_kind::CLIENT_TX => Some((MqueueKind::Client, false)),
        ring_kind::SOCKET_RX => Some((MqueueKind::Sockets, true)),
        ring_kind::SOCKET_TX => Some((MqueueKind::Sockets, false)),
        _ => None,
    }
}

/// Whether it is a kind of ring that commands go through.
pub(super) fn is_command_kind(kind: u16) -> bool {
    matches!(kind, ring_kind::COMMANDS | ring_kind::COMPLETIONS)
}

fn is_stream_kind(kind: u16) -> bool {
    matches!(kind, ring_kind::STREAM_RX | ring_kind::STREAM_TX)
}

/// Offsets of the arrays of heads and of tails for rings of this kind of an mqueue.
pub(super) fn words_of_mqueues(kind: u16, header: &RegionHeader) -> (u64, u64) {
    match mqueue_kind(kind) {
        Some((_, true)) => (header.rx_heads_offset, header.rx_tails_offset),
        _ => (header.tx_heads_offset, header.tx_tails_offset),
    }
}

/// Whether [offset, offset + bytes) is aligned and inside the described part of the region.
pub(super) fn is_inside(offset: u64, bytes: u64, header: &RegionHeader) -> bool {
    offset % LINE_BYTES == 0
        && offset >= BLOCKS_OFFSET
        && offset.checked_add(bytes).is_some_and(|end| end <= header.region_bytes)
}

/// The parts of a region other than rings' memory: offset, bytes and name.
pub(super) fn fixed_parts(header: &RegionHeader) -> [(u64, u64, &'static str); 6] {
    let words = 8 * u64::from(header.mqueue_count);
    let blocks = u64::from(header.block_count) * size_of::<BlockWords>() as u64;
    let directory = u64::from(header.ring_count) * size_of::<DirectoryEntry>() as u64;
    [
        (header.blocks_offset, blocks, "status page"),
        (header.directory_offset, directory, "directory"),
        (header.rx_heads_offset, words, "RX heads"),
        (header.tx_tails_offset, words, "TX tails"),
        (header.rx_tails_offset, words, "RX tails"),
        (header.tx_heads_offset, words, "TX heads"),
    ]
}

/// A checked directory.
pub(super) struct Directory {
    /// The rings of messages of known kinds, in the order of their entries.
    pub(super) entries: Vec<RingEntry>,
    /// Of each of them: its index in the directory.
    pub(super) numbers: Vec<u32>,
    /// By mqueue.
    mqueues: Vec<Mqueue>,
    /// Mqueues by block, server first, then clients by index, then sockets; those of block `b` are in `starts[b]..starts[b + 1]`.
    of_blocks: Vec<u32>,
    starts: Vec<u32>,
    /// By block: its entries in the directory.
    spans: Vec<Range<u32>>,
    /// By pair of command rings: places of COMMANDS and COMPLETIONS in `entries`.
    pub(super) commands: Vec<[u32; 2]>,
    /// By block and slot: STREAM_RX and STREAM_TX.
    pub(super) streams: Vec<Vec<[StreamEntry; 2]>>,
    /// By worker.
    pub(super) pools: Vec<PoolEntry>,
}

/// The stream rings of a slot, each with its index in the directory.
type SlotRings = [Option<(u32, StreamEntry)>; 2];

/// One mqueue of a checked directory.
#[derive(Clone, Copy)]
struct Mqueue {
    block: u32,
    role: Role,
    /// Indices of its RX and its TX ring in [`Directory::entries`].
    rings: [u32; 2],
}

impl Directory {
    /// Checks the entries, as many as the (checked) header says.
    pub(super) fn of(
        entries: impl Iterator<Item = DirectoryEntry>,
        header: &RegionHeader,
    ) -> Result<Self, Refusal> {
        let mut reader = Reader::new(header);
        for (ring, entry) in (0..).zip(entries) {
            reader.read(ring, entry)?;
        }
        reader.finish()
    }

    pub(super) fn mqueue_count(&self) -> u32 {
        self.mqueues.len() as u32
    }

    pub(super) fn role(&self, mqueue: u32) -> (u32, Role) {
        let mqueue = &self.mqueues[mqueue as usize];
        (mqueue.block, mqueue.role)
    }

    /// Indices of an mqueue's rings in [`Self::entries`].
    pub(super) fn rings(&self, mqueue: u32) -> [u32; 2] {
        self.mqueues[mqueue as usize].rings
    }

    pub(super) fn mqueues_of(&self, block: u32) -> &[u32] {
        let [from, to] = [block, block + 1].map(|at| self.starts[at as usize] as usize);
        &self.of_blocks[from..to]
    }

    pub(super) fn span(&self, block: u32) -> Range<u32> {
        self.spans[block as usize].clone()
    }
}

/// Reads a directory entry by entry.
struct Reader<'a> {
    header: &'a RegionHeader,
    entries: Vec<RingEntry>,
    /// See [`Directory::numbers`].
    numbers: Vec<u32>,
    spans: Vec<Range<u32>>,
    /// By mqueue: indices in `entries`.
    rings: Vec<[Option<u32>; 2]>,
    /// By pair of command rings: the same.
    commands: Vec<[Option<u32>; 2]>,
    /// By block and slot.
    streams: Vec<Vec<SlotRings>>,
    /// By worker.
    pools: Vec<Option<PoolEntry>>,
    /// Memory of all entries: offset, end and index in the directory.
    memory: Vec<(u64, u64, u32)>,
}

impl<'a> Reader<'a> {
    /// The header was checked, so allocations here are bounded by the size of the region.
    fn new(header: &'a RegionHeader) -> Self {
        let capacity = header.ring_count as usize;
        Self {
            header,
            entries: Vec::with_capacity(capacity),
            numbers: Vec::with_capacity(capacity),
            spans: vec![0..0; header.block_count as usize],
            rings: vec![[None; 2]; header.mqueue_count as usize],
            commands: Vec::new(),
            streams: vec![Vec::new(); header.block_count as usize],
            pools: Vec::new(),
            memory: Vec::with_capacity(capacity),
        }
    }

    fn read(&mut self, ring: u32, entry: DirectoryEntry) -> Result<(), Refusal> {
        let wrong = |what| Refusal::Ring(Problem { ring, what });
        self.read_common(ring, &entry).map_err(wrong)?;
        if mqueue_kind(entry.kind).is_some() && entry.version == ring_version::MQUEUE {
            return self.read_mqueue_ring(ring, entry.into()).map_err(wrong);
        }
        if is_command_kind(entry.kind) && entry.version == ring_version::COMMAND {
            return self.read_command_ring(ring, entry.into()).map_err(wrong);
        }
        if is_stream_kind(entry.kind) && entry.version == ring_version::STREAM {
            return self.read_stream_ring(ring, entry.into()).map_err(wrong);
        }
        if entry.kind == ring_kind::POOL && entry.version == ring_version::POOL {
            return self.read_pool(entry.into()).map_err(wrong);
        }
        if entry.flags & ring_flags::REQUIRED != 0 {
            return Err(Refusal::Required { ring, kind: entry.kind, version: entry.version });
        }
        Ok(())
    }

    /// Checks common to entries of every kind.
    fn read_common(&mut self, ring: u32, entry: &DirectoryEntry) -> Result<(), &'static str> {
        if entry.block != NO_BLOCK {
            let span = self.spans.get_mut(entry.block as usize).ok_or("owner block")?;
            if span.end == 0 {
                span.start = ring;
            } else if span.end != ring {
                return Err("apart from the others of its block");
            }
            span.end = ring + 1;
        }
        match entry.bytes {
            0 if entry.offset == 0 => {}
            bytes if bytes > 0 && is_inside(entry.offset, bytes, self.header) => {
                self.memory.push((entry.offset, entry.offset + bytes, ring));
            }
            _ => return Err("memory"),
        }
        Ok(())
    }

    fn read_mqueue_ring(&mut self, ring: u32, entry: RingEntry) -> Result<(), &'static str> {
        check_mqueue_ring(&entry, self.header)?;
        let tx = usize::from(mqueue_kind(entry.kind).is_some_and(|(_, rx)| !rx));
        let rings = &mut self.rings[entry.mqueue as usize];
        if rings[tx].is_some() {
            return Err("mqueue described twice");
        }
        if let Some(other) = rings[1 - tx] {
            let other = &self.entries[other as usize];
            if (other.block, Role::of(other)) != (entry.block, Role::of(&entry)) {
                return Err("mqueue of another block or index");
            }
        }
        rings[tx] = Some(self.entries.len() as u32);
        self.entries.push(entry);
        self.numbers.push(ring);
        Ok(())
    }

    fn read_command_ring(&mut self, ring: u32, entry: RingEntry) -> Result<(), &'static str> {
        check_command_ring(&entry, self.header)?;
        let pair = entry.index as usize;
        self.commands.resize(self.commands.len().max(pair + 1), [None; 2]);
        let completions = usize::from(entry.kind == ring_kind::COMPLETIONS);
        if self.commands[pair][completions].is_some() {
            return Err("command ring described twice");
        }
        self.commands[pair][completions] = Some(self.entries.len() as u32);
        self.entries.push(entry);
        self.numbers.push(ring);
        Ok(())
    }

    fn read_stream_ring(&mut self, ring: u32, entry: StreamEntry) -> Result<(), &'static str> {
        check_stream_ring(&entry, self.header)?;
        let slots = &mut self.streams[entry.block as usize];
        let slot = entry.index as usize;
        slots.resize(slots.len().max(slot + 1), [None; 2]);
        let tx = usize::from(entry.kind == ring_kind::STREAM_TX);
        match &mut slots[slot][tx] {
            Some(_) => Err("stream ring described twice"),
            place => {
                *place = Some((ring, entry));
                Ok(())
            }
        }
    }

    fn read_pool(&mut self, entry: PoolEntry) -> Result<(), &'static str> {
        check_pool(&entry)?;
        let worker = entry.index as usize;
        self.pools.resize(self.pools.len().max(worker + 1), None);
        match &mut self.pools[worker] {
            Some(_) => Err("pool described twice"),
            place => {
                *place = Some(entry);
                Ok(())
            }
        }
    }

    fn finish(mut self) -> Result<Directory, Refusal> {
        self.check_overlaps()?;
        let mqueues = self.whole_mqueues()?;
        let (of_blocks, starts) = self.by_block(&mqueues)?;
        let commands = self.whole_command_rings()?;
        let streams = self.whole_streams(&mqueues)?;
        let pools: Option<Vec<_>> = self.pools.iter().copied().collect();
        let pools = pools.ok_or(Refusal::Header("a gap between pools"))?;
        let Self { entries, numbers, spans, .. } = self;
        Ok(Directory {
            entries,
            numbers,
            mqueues,
            of_blocks,
            starts,
            spans,
            commands,
            streams,
            pools,
        })
    }

    /// No two parts of a region share memory.
    fn check_overlaps(&mut self) -> Result<(), Refusal> {
        let fixed = fixed_parts(self.header).map(|(at, bytes, what)| (at, at + bytes, Err(what)));
        let rings = self.memory.drain(..).map(|(at, end, ring)| (at, end, Ok(ring)));
        let mut parts: Vec<_> = fixed.into_iter().chain(rings).collect();
        parts.sort_unstable_by_key(|(at, ..)| *at);
        for pair in parts.windows(2) {
            let [(_, end, first), (at, _, second)] = pair else { unreachable!("windows of two") };
            if end <= at {
                continue;
            }
            return Err(match second.or(*first) {
                Ok(ring) => Refusal::Ring(Problem { ring, what: "memory that is another's" }),
                Err(what) => Refusal::Header(what),
            });
        }
        Ok(())
    }

    /// Checks that every mqueue has both rings.
    fn whole_mqueues(&self) -> Result<Vec<Mqueue>, Refusal> {
        let whole = |rings: &[Option<u32>; 2]| match *rings {
            [Some(rx), Some(tx)] => {
                let entry = &self.entries[rx as usize];
                let role = Role::of(entry).expect("it was checked");
                Ok(Mqueue { block: entry.block, role, rings: [rx, tx] })
            }
            [None, None] => Err(Refusal::Header("mqueue count")),
            [one, other] => {
                let place = one.or(other).expect("one of them is there");
                let ring = self.numbers[place as usize];
                Err(Refusal::Ring(Problem { ring, what: "mqueue without its other ring" }))
            }
        };
        self.rings.iter().map(whole).collect()
    }

    /// Every pair of command rings has both.
    fn whole_command_rings(&self) -> Result<Vec<[u32; 2]>, Refusal> {
        let whole = |rings: &[Option<u32>; 2]| match *rings {
            [Some(commands), Some(completions)] => Ok([commands, completions]),
            [None, None] => Err(Refusal::Header("a gap between command rings")),
            [one, other] => {
                let place = one.or(other).expect("one of them is there");
                let ring = self.numbers[place as usize];
                Err(Refusal::Ring(Problem { ring, what: "command ring without its other ring" }))
            }
        };
        self.commands.iter().map(whole).collect()
    }

    /// Every slot has both stream rings, and a block has slots if it has a socket mqueue.
    fn whole_streams(&self, mqueues: &[Mqueue]) -> Result<Vec<Vec<[StreamEntry; 2]>>, Refusal> {
        let problem = |ring, what| Refusal::Ring(Problem { ring, what });
        let whole = |rings: &SlotRings| match *rings {
            [Some((_, rx)), Some((_, tx))] => Ok([rx, tx]),
            [None, None] => Err(Refusal::Header("a gap between stream rings")),
            [one, other] => {
                let (ring, _) = one.or(other).expect("one of them is there");
                Err(problem(ring, "stream ring without its other ring"))
            }
        };
        // By block: the socket mqueue's RX ring.
        let mut sockets = vec![None; self.streams.len()];
        for mqueue in mqueues.iter().filter(|mqueue| mqueue.role == Role::Sockets) {
            sockets[mqueue.block as usize] = Some(self.numbers[mqueue.rings[0] as usize]);
        }
        let of_block = |(slots, sockets): (&Vec<SlotRings>, Option<u32>)| {
            let first = slots.iter().flatten().flatten().next();
            match (sockets, first) {
                (Some(ring), None) => {
                    Err(problem(ring, "socket mqueue of a block without streams"))
                }
                (None, Some(&(ring, _))) => {
                    Err(problem(ring, "stream of a block without a socket mqueue"))
                }
                _ => slots.iter().map(whole).collect(),
            }
        };
        self.streams.iter().zip(sockets).map(of_block).collect()
    }

    /// Every block has one server mqueue, client mqueues without a gap, and at most one socket mqueue.
    fn by_block(&self, mqueues: &[Mqueue]) -> Result<(Vec<u32>, Vec<u32>), Refusal> {
        let mut order: Vec<u32> = (0..mqueues.len() as u32).collect();
        let place = |mqueue: &u32| {
            let mqueue = &mqueues[*mqueue as usize];
            (mqueue.block, mqueue.role)
        };
        order.sort_unstable_by_key(place);
        let mut starts = vec![0; self.header.block_count as usize + 1];
        let (mut block, mut before) = (0, None);
        for (at, mqueue) in (0..).zip(&order) {
            let (of, role) = place(mqueue);
            if of != block {
                if before.is_none() || of != block + 1 {
                    return Err(Refusal::Header(SERVERLESS));
                }
                (block, before) = (of, None);
                starts[of as usize] = at;
            }
            let fits = match role {
                Role::Server => before.is_none(),
                Role::Client(0) => before == Some(Role::Server),
                Role::Client(index) => before == Some(Role::Client(index - 1)),
                Role::Sockets => matches!(before, Some(Role::Server | Role::Client(_))),
            };
            if !fits {
                let ring = self.numbers[mqueues[*mqueue as usize].rings[0] as usize];
                let what = if before.is_none() { SERVERLESS } else { "index" };
                return Err(Refusal::Ring(Problem { ring, what }));
            }
            before = Some(role);
        }
        if before.is_none() || block + 1 != self.header.block_count {
            return Err(Refusal::Header(SERVERLESS));
        }
        *starts.last_mut().expect("one more than blocks") = order.len() as u32;
        Ok((order, starts))
    }
}

/// The first check that fails.
fn all(checks: &[(bool, &'static str)]) -> Result<(), &'static str> {
    match checks.iter().find(|(good, _)| !good) {
        Some((_, what)) => Err(what),
        None => Ok(()),
    }
}

/// Whether [offset, offset + bytes) is aligned and lies in the memory of an entry, which was checked.
fn is_within(offset: u64, bytes: u64, entry: &RingEntry, header: &RegionHeader) -> bool {
    is_inside(offset, bytes, header)
        && entry.offset <= offset
        && offset + bytes <= entry.offset + entry.bytes
}

/// Checks the geometry of slots and arena, which is common to all kinds.
fn check_messages(entry: &RingEntry, header: &RegionHeader) -> Result<(), &'static str> {
    let slot = slot_bytes(entry.protocol, entry.inline_bytes.into()).ok_or("protocol")?;
    let needs_arena = entry.message_bytes_max > entry.inline_bytes;
    let granule = entry.protocol != protocol::DOORBELL;
    let arena_need = u64::from(entry.message_bytes_max).next_multiple_of(8);
    let inside = |offset, bytes| is_within(offset, bytes, entry, header);
    all(&[
        (entry.flags & !ring_flags::REQUIRED == 0, "flags"),
        (entry.placement == placement::HOST, "placement"),
        (entry.depth.is_power_of_two() && entry.depth <= DEPTH_MAX, "depth"),
        (entry.inline_bytes % 8 == 0, "inline bytes"),
        ((8..=INLINE_BYTES_MAX).contains(&entry.inline_bytes), "inline bytes"),
        ((1..=MESSAGE_BYTES_MAX).contains(&entry.message_bytes_max), "longest message"),
        // Block code fetches inline payloads before it checks their length.
        (u64::from(entry.inline_bytes) <= arena_need, "inline bytes"),
        (u64::from(entry.slot_stride) >= slot && entry.slot_stride % 64 == 0, "slot stride"),
        (inside(entry.slots_offset, slots_bytes(entry)), "slots"),
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
    ])
}

fn slots_bytes(entry: &RingEntry) -> u64 {
    u64::from(entry.depth) * u64::from(entry.slot_stride)
}

/// Checks the entry of a ring of an mqueue. Its memory was checked.
fn check_mqueue_ring(entry: &RingEntry, header: &RegionHeader) -> Result<(), &'static str> {
    let (heads, tails) = words_of_mqueues(entry.kind, header);
    let mqueue = u64::from(entry.mqueue);
    all(&[
        (entry.block < header.block_count, "owner block"),
        (Role::of(entry).is_some(), "index"),
        (entry.mqueue < header.mqueue_count, "mqueue index"),
    ])?;
    check_messages(entry, header)?;
    if let Some((MqueueKind::Sockets, _)) = mqueue_kind(entry.kind) {
        let bytes = size_of::<SocketMessage>() as u32;
        all(&[
            (entry.protocol == protocol::DOORBELL, "protocol"),
            (entry.message_bytes_max == bytes, "longest message"),
            (entry.inline_bytes == bytes, "inline bytes"),
            (entry.arena_bytes == 0, "arena"),
        ])?;
    }
    all(&[
        (entry.head_offset == heads + 8 * mqueue, "head word"),
        (entry.tail_offset == tails + 8 * mqueue, "tail word"),
        (staging_fits(entry, header), "staging"),
    ])
}

/// Only the CLIENT_TX ring of an mqueue can have staging, which shares no memory with its slots and its arena.
fn staging_fits(entry: &RingEntry, header: &RegionHeader) -> bool {
    let (offset, bytes) = (entry.staging_offset, entry.staging_bytes);
    if bytes == 0 {
        return offset == 0;
    }
    let is_apart = |at: u64, count: u64| at + count <= offset || offset + bytes <= at;
    entry.kind == ring_kind::CLIENT_TX
        && bytes <= ARENA_BYTES_MAX
        && is_within(offset, bytes, entry, header)
        && is_apart(entry.slots_offset, slots_bytes(entry))
        && (entry.arena_bytes == 0 || is_apart(entry.arena_offset, entry.arena_bytes))
}

/// Checks the entry of a command ring, whose memory was checked. Words, slots and staging must not overlap, because
/// commands write into the staging.
fn check_command_ring(entry: &RingEntry, header: &RegionHeader) -> Result<(), &'static str> {
    let commands = entry.kind == ring_kind::COMMANDS;
    all(&[
        (entry.block == NO_BLOCK, "owner block"),
        (entry.index < COMMAND_RINGS_MAX, "index"),
        (entry.mqueue == 0, "mqueue index"),
        (entry.protocol == protocol::DOORBELL, "protocol"),
    ])?;
    check_messages(entry, header)?;
    let inside = |offset, bytes| is_within(offset, bytes, entry, header);
    all(&[
        (entry.arena_bytes == 0, "arena"),
        (inside(entry.head_offset, LINE_BYTES), "head word"),
        (inside(entry.tail_offset, LINE_BYTES), "tail word"),
        (
            match entry.staging_bytes {
                0 => entry.staging_offset == 0,
                bytes => commands && inside(entry.staging_offset, bytes),
            },
            "staging",
        ),
    ])?;
    let mut parts = [
        (entry.head_offset, LINE_BYTES),
        (entry.tail_offset, LINE_BYTES),
        (entry.slots_offset, slots_bytes(entry)),
        (entry.staging_offset, entry.staging_bytes),
    ];
    parts.sort_unstable();
    let apart = parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
    all(&[(apart, "parts that share memory")])
}

/// Checks the entry of a stream ring, whose memory was checked.
fn check_stream_ring(entry: &StreamEntry, header: &RegionHeader) -> Result<(), &'static str> {
    all(&[
        (entry.flags & !ring_flags::REQUIRED == 0, "flags"),
        (entry.block < header.block_count, "owner block"),
        (entry.index < SOCKETS_MAX, "index"),
        (entry.capacity.is_power_of_two(), "capacity"),
        ((STREAM_BYTES_MIN..=STREAM_BYTES_MAX).contains(&entry.capacity), "capacity"),
    ])?;
    all(&[(entry.bytes >= byte_ring_bytes(entry.capacity), "memory")])
}

/// Checks the entry of a pool, whose memory was checked.
fn check_pool(entry: &PoolEntry) -> Result<(), &'static str> {
    all(&[
        (entry.flags & !ring_flags::REQUIRED == 0, "flags"),
        (entry.block == NO_BLOCK, "owner block"),
        (entry.index < POOLS_MAX, "index"),
        (entry.offset % POOL_ALIGN == 0, "memory"),
        (entry.bytes > 0 && entry.bytes % POOL_ALIGN == 0, "memory"),
    ])
}
