//! The layout of a region: the contract between the engine, every accelerator runtime and every kernel.
//!
//! This file and `abi/` are the single source. The C header `device/include/serval/abi.h` is generated from it
//! (`cargo xtask gen-abi`), both sides assert sizes and offsets at compile time, and
//! `tests/layout.rs` compares the generated header and a table of the layout with the committed ones,
//! so that a change always shows as a diff together with a new [`ABI_VERSION`].
//!
//! # Region
//!
//! ```text
//! 0      RegionHeader        written once by format(), constant afterwards
//! 128    EngineWords         written by the engine only; `stop` also by a runtime whose generation has ended
//! 256    AcceleratorWords    written by the accelerator runtime only
//! 384    (zero)
//! 512    BlockWords × block_count        each written by its block only: the status page
//!        DirectoryEntry × ring_count     the directory, constant
//!        rx_heads, tx_tails              u64 × mqueue_count each, written by the engine
//!        rx_tails, tx_heads              u64 × mqueue_count each, written by the accelerator
//!        the rings' memory, each aligned to 128, wherever the directory says
//! ```
//!
//! # Directory
//!
//! An entry describes one ring: its kind, the version of that kind's description, the block it belongs to (or
//! [`NO_BLOCK`]), a number among the rings of that kind and block, its memory, and a part of fixed size that the
//! kind defines. The position of an entry has only one meaning: the entries of one block are contiguous. The memory
//! of two entries never overlaps.
//!
//! A reader skips an entry of an unknown kind or version. If the entry has
//! [`ring_flags::REQUIRED`], it refuses the region instead. So a new kind needs no new [`ABI_VERSION`].
//!
//! Kinds today ([`ring_kind`]): the rings of mqueues and command rings, described by a [`RingEntry`], stream rings, described
//! by a [`StreamEntry`], and pools, which hold the messages of bundles, described by a [`PoolEntry`].
//!
//! *Mqueues.* Every block has one server mqueue and up
//! to [`BACKENDS_MAX`] client mqueues (backends), whose index is that of the configuration; with sockets also one socket
//! mqueue. An mqueue is an RX and a TX ring
//! of the same block and index. It has a number in [0, mqueue_count), its index in the arrays of heads and tails.
//!
//! *Socket mqueues and stream rings.* A block with sockets has a number of *slots* for connections, at most [`SOCKETS_MAX`].
//! Each slot has a pair of stream rings: STREAM_RX takes bytes to the block, STREAM_TX from it. The block accepts, connects and closes
//! connections, and reports bytes, through its socket mqueue: every payload there is a [`SocketMessage`].
//!
//! | ring | `op` | `slot`, `generation` | `value` |
//! |---|---|---|---|
//! | TX | ACCEPT | 0 | number of the listener among the service's sockets |
//! | TX | CONNECT | 0 | number of the peer among the service's sockets |
//! | TX | CLOSE | the connection | 0: send the bytes in STREAM_TX, then the end; 1: reset |
//! | TX | NOTIFY | the connection | 0 |
//! | RX | DONE | the new connection if `value` is OK | a [`status`] |
//! | RX | EVENT | the connection | 0 |
//!
//! ACCEPT and CONNECT are completed by one DONE with the same `token`, which the block chooses; at most one ACCEPT per listener and block is
//! outstanding. The block sends NOTIFY after it wrote bytes to STREAM_TX, stored its end, or released at least half of STREAM_RX since
//! its last NOTIFY. The engine sends EVENT after it wrote bytes to STREAM_RX or stored its end, or released at least half of STREAM_TX, or stored that
//! ring's end; at most one unread EVENT per slot. CLOSE ends the lease: after it the block does not access the slot's rings. A connection
//! is a *lease* of its slot, which the engine numbers with `generation`, from 1 in each slot. Commands of an earlier lease have no effect.
//!
//! Stream rings hold bytes without frames, in the format of a ring of bytes: [`stream_word`] has the offsets of its words, and
//! [`stream_word::DATA`] that of `capacity` bytes of data. Byte `n` of a lease is at `n % capacity`. The head is the number of bytes
//! written, the tail the number of bytes read; any numbers, not only multiples of 8. Memory is accessed in words of 8 bytes: the writer
//! keeps an incomplete last word and writes it again when more bytes follow, and the reader ignores bytes from the head on. A word is
//! overwritten with later bytes only after all of its bytes were read, so there is room for `capacity - (head - (tail & !7))` bytes. Next to each
//! position its side has an *end*: 0 while the stream is open, else the [`status`] with which it ended, CLOSED or RESET. After the writer's end no
//! byte follows; after the reader's end no byte is taken. The writer stores its end after its last head, so a reader that finds the ring empty
//! loads the end, and then the head once more. Before a lease the engine stores 0 in all four words of both rings.
//!
//! *Command rings* belong to no block. The engine writes commands to the accelerator runtime into COMMANDS; the runtime writes a completion
//! into COMPLETIONS of the same index. Head and tail are at the beginning of each ring's memory, on separate lines.
//! A command's slot has the command in `kind` ([`command`]) and a number chosen by the engine in `token`; its completion has the same
//! token, kind DONE and one of [`command_status`]. The payload of COPY is a [`CopyCommand`]. In the region it names memory of
//! the *staging*, which belongs to the COMMANDS ring and has no other use. DESCRIBE asks for the address of a buffer: its payload is a
//! [`DescribeCommand`], and that of its completion with status OK is a [`BufferRange`]. Other completions have no payload.
//!
//! Heads and tails are *counts*: of messages published and of slots released since the region was
//! formatted. They never wrap (2⁶⁴ messages). Message `n` is in slot `n % depth`; `depth` is a
//! power of two. They are densely packed, eight to a cache line, so that one read shows which of many
//! mqueues have work: a head word is its ring's doorbell. Every word has one writer, but words of
//! different *blocks* share lines intentionally (measured: a dense array halves the cost of polling
//! 240 mqueues compared with one line each).
//!
//! # Slot
//!
//! `doorbell` protocol: a [`SlotHeader`], then the inline payload. The producer writes both, then
//! stores the head with release order.
//!
//! `granule` protocol: header and payload form one byte string that is divided into units, each with its
//! own sequence number in its last four bytes: 12 + 4 bytes, or 4 + 4 if 16-byte accesses are not
//! single-copy atomic. A unit of message `n` has the sequence `(n + 1) mod 2³²`. The units of one
//! message are mutually unordered: the consumer checks each. The head word is a hint only.
//! Sequences cannot alias on wrap: in every lap divisible by [`RESTAMP_LAPS`] the producer rewrites all
//! units of a slot, so no unit is older than 2³¹ messages.
//!
//! # Arena
//!
//! A payload longer than the ring's inline capacity is contiguous in the ring's byte arena; the
//! header has [`flags::ARENA`] and contains its offset. The arena is a FIFO: the producer places
//! payloads one after the other (8-byte aligned), skips the end when a payload does not fit
//! before it, and reclaims space as slots are released. Rings with an arena use `doorbell`.
//!
//! # Pools and bundles
//!
//! A *bundle* is a run of 1 to [`BUNDLE_MAX`] requests for one block that travel as one slot of kind [`kind::BUNDLE`] in the RX ring
//! of a server mqueue, in order with single messages. Its messages lie in a *pool*: memory of the region that belongs
//! to no block. Each worker of the engine has one pool, whose `index` is the worker's number. Offset and size of its memory are multiples of
//! [`POOL_ALIGN`]. The engine divides a pool into buffers by tables of its own. Both sides may write all of it at any time.
//!
//! The slot's payload is a [`Bundle`]; all its offsets count from the beginning of the region. Message `i` has the token `token + i`,
//! and its bytes are at `offset + i * stride`: `len` of them, or `last_len` if it is the last. `tag`, `status` and `flags` of the slot
//! are 0. The block writes replies into the area [`reply_offset`, `reply_offset + reply_bytes`), which belongs to it until all messages of
//! the bundle are ended. Both the messages and the area lie in the memory of one pool; the reader checks that.
//! A message is not longer than the ring's `message_bytes_max`.
//!
//! The block ends each message once, in any order: by a completion with a reply, or by a slot of kind [`kind::DROP`] with
//! the message's token. A *completion* is a slot of kind BUNDLE in the TX ring. `token` is that of message 0, and the payload is a
//! [`BundleReply`]: bit `i` of `answered` is set if this completion answers message `i`. The reply to the message of the `k`-th set bit,
//! in ascending order, is at `offset + k * stride` and has `len` bytes. Replies of other lengths, or in another order, need
//! another completion. All replies lie in the area of that bundle, and none overlaps one that was published
//! before. A slot of kind MESSAGE with the token of a bundle's message ends nothing.
//!
//! The engine uses a buffer and its area of replies again after every message of the bundle was ended by the block, or after the generation
//! has ended. A ring carries bundles if a slot's inline payload holds the descriptor: 40 bytes in RX, 24 in TX.

mod header;
mod structs;

pub use header::{c_header, layout_table};
pub use structs::*;

/// First eight bytes of a region: "SERVALRG", little endian.
pub const REGION_MAGIC: u64 = u64::from_le_bytes(*b"SERVALRG");
/// Version of this layout. A runtime or kernel library of another version is refused.
pub const ABI_VERSION: u32 = 8;
/// Alignment that separates words of different writers (two x86 lines: adjacent-line prefetch).
pub const LINE_BYTES: u64 = 128;
/// Largest inline payload of a slot in bytes: the payload of an Ethernet frame fits.
pub const INLINE_BYTES_MAX: u32 = 1536;
/// Largest ring depth in slots.
pub const DEPTH_MAX: u32 = 16_384;
/// Granule rings rewrite every unit of a slot in each lap divisible by this.
pub const RESTAMP_LAPS: u64 = 65_536;
/// Largest message over any transport in bytes.
pub const MESSAGE_BYTES_MAX: u32 = 8 << 20;
/// Largest arena of one ring in bytes.
pub const ARENA_BYTES_MAX: u64 = 1 << 40;
/// Largest initial count of a ring: the rest up to 2⁶⁴ is never used up.
pub const START_MAX: u64 = 1 << 62;
/// Maximum number of blocks in a region.
pub const BLOCKS_MAX: u32 = 4_096;
/// Maximum number of backends (client mqueues) of a block.
pub const BACKENDS_MAX: u32 = 15;
/// Maximum number of connections of a block at a time.
pub const SOCKETS_MAX: u32 = 64;
/// Smallest capacity of a stream ring in bytes.
pub const STREAM_BYTES_MIN: u64 = 4 << 10;
/// Largest capacity of a stream ring in bytes.
pub const STREAM_BYTES_MAX: u64 = 16 << 20;
/// Maximum number of mqueues in a region: of each block its server mqueue, client mqueues and socket mqueue.
pub const MQUEUES_MAX: u32 = BLOCKS_MAX * (2 + BACKENDS_MAX);
/// Maximum number of entries of a directory: twice the number of rings of that many mqueues and connections.
pub const RINGS_MAX: u32 = 4 * (MQUEUES_MAX + BLOCKS_MAX * SOCKETS_MAX);
/// [`DirectoryEntry::block`] of a ring that belongs to no block.
pub const NO_BLOCK: u32 = u32::MAX;
/// Maximum number of pairs of command rings in one region.
pub const COMMAND_RINGS_MAX: u32 = 16;
/// Maximum number of messages of a bundle.
pub const BUNDLE_MAX: u32 = 64;
/// Offset and size of a pool's memory are multiples of this.
pub const POOL_ALIGN: u64 = 4_096;
/// [`Bundle::offset`] and [`Bundle::reply_offset`] are multiples of this.
pub const BUNDLE_ALIGN: u64 = 64;
/// Maximum number of pools in a region.
pub const POOLS_MAX: u32 = 64;
/// Maximum number of parameters of a kernel.
pub const PARAMS_MAX: u32 = 32;
/// Upper 16 bits of [`Param::value`] of a text: no finite number has them.
pub const PARAM_TEXT: u64 = 0xfffc << 48;
/// Longest text of a parameter in bytes.
pub const PARAM_TEXT_BYTES_MAX: u32 = 255;

const _: () = assert!(DEPTH_MAX as u64 * RESTAMP_LAPS <= 1 << 31, "sequences would alias on wrap");
const _: () = assert!(INLINE_BYTES_MAX % 8 == 0);

/// The kind of a slot's message: [`SlotHeader::kind`]. Zeroed memory is not a message.
pub mod kind {
    /// A request, a reply, a backend request or a backend answer, depending on the ring.
    pub const MESSAGE: u8 = 1;
    /// TX of a server mqueue only: the kernel ends this request without a reply; `status` is the reason.
    pub const DROP: u8 = 2;
    /// RX of a server mqueue: requests in a pool, as one slot. TX of a server mqueue: replies to messages of one bundle.
    pub const BUNDLE: u8 = 3;
}

/// Bits of [`SlotHeader::flags`].
pub mod flags {
    /// The payload is in the arena at `arena_offset`, not in the slot.
    pub const ARENA: u16 = 1;
}

/// Values of [`SlotHeader::status`], of [`SocketMessage::value`] in DONE, and of the ends of stream rings.
pub mod status {
    /// Success. TX with kind DROP: no reply is wanted, and the request counts as consumed.
    pub const OK: u8 = 0;
    /// RX of a client mqueue: no answer within `timeout_ms`. DONE: the peer did not answer in time.
    pub const TIMEOUT: u8 = 1;
    /// RX of a client mqueue: the backend could not be reached. DONE: the peer could not be reached.
    pub const REFUSED: u8 = 2;
    /// RX of a client mqueue: the connection ended before the answer. Ends of stream rings: in order, after the last byte.
    pub const CLOSED: u8 = 3;
    /// RX of a client mqueue: the answer breaks the backend's framing.
    pub const PROTOCOL: u8 = 4;
    /// RX of a client mqueue: the answer, or the request, exceeds the mqueue's maximum. TX with kind DROP: the kernel's
    /// reply would exceed it; the engine counts `reply_too_long`.
    pub const TOO_LONG: u8 = 5;
    /// Ends of stream rings: the peer or the engine reset the connection; bytes may be lost.
    pub const RESET: u8 = 6;
    /// DONE: the service has no such listener or peer.
    pub const NOT_ALLOWED: u8 = 7;
    /// DONE: all of the block's slots are in use.
    pub const EXHAUSTED: u8 = 8;
    /// In no ring: the device library's calls that do not wait return it when they would have to.
    pub const AGAIN: u8 = 9;
    /// DONE: the service stops.
    pub const DRAINING: u8 = 10;
    /// TX with kind DROP: the kernel does not accept the length.
    pub const BAD_LENGTH: u8 = 16;
    /// TX with kind DROP: any other reason of the kernel.
    pub const REJECTED: u8 = 17;
}

/// Values of [`EngineWords::stop`].
pub mod stop {
    /// Serve.
    pub const RUN: u64 = 0;
    /// Answer the messages in the RX ring, then end: `recv` returns false once the ring is empty.
    pub const DRAIN: u64 = 1;
    /// End now: `recv` returns false immediately.
    pub const NOW: u64 = 2;
}

/// Values of [`AcceleratorWords::state`] and [`BlockWords::state`].
pub mod state {
    /// Not started yet.
    pub const ABSENT: u64 = 0;
    /// Running.
    pub const READY: u64 = 1;
    /// Ended; `reason` gives the reason.
    pub const ENDED: u64 = 2;
}

/// Why a block or an accelerator ended: `reason` in the status words.
pub mod reason {
    /// Not ended.
    pub const NONE: u64 = 0;
    /// The stop word requested it.
    pub const STOPPED: u64 = 1;
    /// The engine's heartbeat stopped for 5 s.
    pub const ENGINE_LOST: u64 = 2;
    /// A ring word is invalid (a head beyond the depth, a length beyond the ring's maximum).
    pub const RING_CORRUPT: u64 = 3;
    /// The kernel returned without a stop request.
    pub const RETURNED: u64 = 4;
    /// The kernel broke its contract (wrote past its staging, sent twice, wrong block).
    pub const CONTRACT: u64 = 5;
    /// The block did not yield within its time limit.
    pub const HUNG: u64 = 6;
    /// The region or the parameters do not match the kernel.
    pub const REFUSED: u64 = 7;
    /// The accelerator or its driver failed, independent of the kernel.
    pub const DEVICE_FAILED: u64 = 8;
    /// The link to the accelerator's machine broke.
    pub const LINK_LOST: u64 = 9;

    /// The name of a reason in messages.
    pub fn name(reason: u64) -> &'static str {
        match reason {
            NONE => "none",
            STOPPED => "stopped",
            ENGINE_LOST => "engine lost",
            RING_CORRUPT => "ring corrupt",
            RETURNED => "returned",
            CONTRACT => "contract broken",
            HUNG => "hung",
            REFUSED => "refused",
            DEVICE_FAILED => "device failed",
            LINK_LOST => "link lost",
            _ => "unknown",
        }
    }

    /// How a block ended, in one sentence for operators.
    pub fn of_block(block: u32, reason: u64) -> String {
        match reason {
            RETURNED => format!(
                "the kernel of block {block} returned: a kernel serves until recv has no message because the service stops"
            ),
            _ => format!("block {block} ended: {}", name(reason)),
        }
    }
}

/// Values of [`DirectoryEntry::kind`].
pub mod ring_kind {
    /// Requests to a block.
    pub const SERVER_RX: u16 = 1;
    /// Replies of a block.
    pub const SERVER_TX: u16 = 2;
    /// Answers of a backend to a block.
    pub const CLIENT_RX: u16 = 3;
    /// Requests of a block to a backend.
    pub const CLIENT_TX: u16 = 4;
    /// Commands of the engine to the accelerator runtime.
    pub const COMMANDS: u16 = 5;
    /// Their completions.
    pub const COMPLETIONS: u16 = 6;
    /// Completions and events of a block's connections.
    pub const SOCKET_RX: u16 = 7;
    /// Socket commands of a block.
    pub const SOCKET_TX: u16 = 8;
    /// Bytes of a connection to the block.
    pub const STREAM_RX: u16 = 9;
    /// Bytes of the block to a connection.
    pub const STREAM_TX: u16 = 10;
    /// Memory for the messages of bundles, of one worker of the engine.
    pub const POOL: u16 = 11;
}

/// Bits of [`AcceleratorWords::features`].
pub mod feature {
    /// The blocks take bundles.
    pub const BUNDLES: u64 = 1;
}

/// Values of [`DirectoryEntry::version`].
pub mod ring_version {
    /// Of the six kinds that an mqueue's rings have: see [`RingEntry`](super::RingEntry).
    pub const MQUEUE: u16 = 1;
    /// Of the two kinds of command rings: see [`RingEntry`](super::RingEntry).
    pub const COMMAND: u16 = 1;
    /// Of the two kinds of stream rings: see [`StreamEntry`](super::StreamEntry).
    pub const STREAM: u16 = 1;
    /// Of pools: see [`PoolEntry`](super::PoolEntry).
    pub const POOL: u16 = 1;
}

/// Values of [`SocketMessage::op`] in the TX ring of a socket mqueue.
pub mod socket_op {
    /// Wait for a connection of a client.
    pub const ACCEPT: u32 = 1;
    /// Connect to a peer.
    pub const CONNECT: u32 = 2;
    /// End a connection.
    pub const CLOSE: u32 = 3;
    /// Bytes were put into STREAM_TX or taken from STREAM_RX.
    pub const NOTIFY: u32 = 4;
    /// The ACCEPT or CONNECT with this token is given up. If it is not complete yet, it is completed with the status TIMEOUT.
    pub const CANCEL: u32 = 5;
}

/// Values of [`SocketMessage::op`] in the RX ring of a socket mqueue.
pub mod socket_event {
    /// An ACCEPT or CONNECT is complete.
    pub const DONE: u32 = 1;
    /// Bytes were put into STREAM_RX or taken from STREAM_TX.
    pub const EVENT: u32 = 2;
}

/// Values of [`SocketMessage::value`] in CLOSE.
pub mod socket_close {
    /// The bytes in STREAM_TX are sent first.
    pub const ORDERLY: u32 = 0;
    /// The peer sees a reset; bytes in STREAM_TX are lost.
    pub const RESET: u32 = 1;
}

/// Offsets in the memory of a stream ring, each on a line of its own, or next to the other word of the same writer.
pub mod stream_word {
    /// Bytes written, stored by the writer.
    pub const HEAD: u64 = 0;
    /// The writer's end.
    pub const HEAD_END: u64 = 8;
    /// Bytes read, stored by the reader.
    pub const TAIL: u64 = 128;
    /// The reader's end.
    pub const TAIL_END: u64 = 136;
    /// The data.
    pub const DATA: u64 = 512;
}

/// Values of [`TransferCommand::source`] and [`TransferCommand::sink`].
pub mod transfer_place {
    /// A file of the service.
    pub const FILE: u8 = 1;
    /// The staging of the mqueue.
    pub const MEMORY: u8 = 2;
    /// A new connection to a peer among the files of the service.
    pub const CONNECTION: u8 = 3;
    /// A socket of the block, as a sink: the slot is [`TransferCommand::sink_file`](super::TransferCommand::sink_file), its lease
    /// [`TransferCommand::lease`](super::TransferCommand::lease). The offset is the position of the slot's STREAM_TX when the command was made:
    /// the bytes before it are sent before the transfer, those behind it after it.
    pub const SOCKET: u8 = 4;
}

/// Values of [`TransferCommand::digest`].
pub mod transfer_digest {
    pub use crate::codes::digest::*;

    /// None.
    pub const NONE: u8 = 0;
}

/// Bits of [`TransferCommand::stages`], in the order of the stages. The digest comes before the compression.
pub mod transfer_stage {
    /// Open a sealed stream of AES-256-GCM, with the key of the source.
    pub const OPEN: u8 = 1;
    /// Expand gzip.
    pub const EXPAND_GZIP: u8 = 2;
    /// Expand Zstandard.
    pub const EXPAND_ZSTD: u8 = 4;
    /// Compress with gzip.
    pub const COMPRESS_GZIP: u8 = 8;
    /// Compress with Zstandard.
    pub const COMPRESS_ZSTD: u8 = 16;
    /// Seal with AES-256-GCM and the key of the sink.
    pub const SEAL: u8 = 32;
}

/// Values of [`TransferDone::status`].
pub mod transfer_status {
    /// All bytes were moved.
    pub const OK: u32 = 0;
    /// The command is malformed: another length, an unknown value, or an order of stages that makes no sense.
    pub const BAD_COMMAND: u32 = 1;
    /// No such file of the service, or it does not allow this direction, or it has no key.
    pub const NOT_ALLOWED: u32 = 2;
    /// A range is outside the memory, or ends after 2^63 - 1.
    pub const RANGE: u32 = 3;
    /// The engine has too many transfers in flight, or too little memory for one more.
    pub const EXHAUSTED: u32 = 4;
    /// The file ends before the range does.
    pub const FILE_ENDED: u32 = 5;
    /// The peer of a connection could not be reached.
    pub const REFUSED: u32 = 6;
    /// The peer of a connection reset or closed it before the end.
    pub const CLOSED: u32 = 7;
    /// It took too long, or almost nothing moved for too long.
    pub const TIMEOUT: u32 = 8;
    /// What was to be opened or expanded is not what it has to be.
    pub const CORRUPT: u32 = 9;
    /// No space, or a limit of the file system.
    pub const DISK_FULL: u32 = 10;
    /// Another error, which the log of the server names.
    pub const FAILED: u32 = 11;
}

/// What a slot of a command ring holds: [`SlotHeader::kind`].
pub mod command {
    /// COMMANDS: copy bytes between the staging and a buffer of the accelerator.
    pub const COPY: u8 = 1;
    /// COMPLETIONS: the command with this token is done; `status` says how.
    pub const DONE: u8 = 2;
    /// COMMANDS: answer with the address and the size of a buffer of the accelerator.
    pub const DESCRIBE: u8 = 3;
}

/// Values of [`SlotHeader::status`] in COMPLETIONS.
pub mod command_status {
    /// Done: what it wrote is visible to the reader of this completion.
    pub const OK: u8 = 0;
    /// It names memory outside the staging or the buffer, or an unknown buffer. Nothing was copied.
    pub const RANGE: u8 = 1;
    /// The runtime does not know this command, or it is malformed.
    pub const UNKNOWN: u8 = 2;
    /// The accelerator or its driver failed.
    pub const FAILED: u8 = 3;
    /// The accelerator did not finish it in time; its buffer may still be in use.
    pub const TIMEOUT: u8 = 4;
}

/// Values of [`CopyCommand::direction`].
pub mod direction {
    /// From the staging to the buffer.
    pub const TO_BUFFER: u32 = 1;
    /// From the buffer to the staging.
    pub const FROM_BUFFER: u32 = 2;
}

/// Bits of [`DirectoryEntry::flags`].
pub mod ring_flags {
    /// A reader that does not know this kind, or this version of it, must refuse the region.
    pub const REQUIRED: u32 = 1;
}

/// Values of [`RingEntry::protocol`].
pub mod protocol {
    /// Payload, then a release store of the head.
    pub const DOORBELL: u8 = 1;
    /// Self-validating units of 4 data bytes and a u32 sequence.
    pub const GRANULE8: u8 = 2;
    /// Self-validating units of 12 data bytes and a u32 sequence.
    pub const GRANULE16: u8 = 3;
}

/// Values of [`RingEntry::placement`].
pub mod placement {
    /// Host memory (shared, possibly registered with the accelerator).
    pub const HOST: u8 = 1;
}

/// Why a host block suspends itself: second argument of [`BlockArgs::wait`].
pub mod wait {
    /// Until a message arrives in the server mqueue's RX ring, or the deadline.
    pub const RX: u32 = 0;
    /// Until a TX ring has credit, or the deadline.
    pub const TX: u32 = 1;
    /// Until a message arrives in the RX ring of a client mqueue or of the socket mqueue, or the deadline.
    pub const BACKEND: u32 = 2;
    /// Until the deadline.
    pub const TIME: u32 = 3;
    /// The budget of this resume is used up; there is more to do.
    pub const BUDGET: u32 = 4;
}

/// No deadline.
pub const NO_DEADLINE: u64 = u64::MAX;

/// Offset of [`EngineWords`].
pub const ENGINE_WORDS_OFFSET: u64 = 128;
/// Offset of [`AcceleratorWords`].
pub const ACCELERATOR_WORDS_OFFSET: u64 = 256;
/// Offset of the first [`BlockWords`].
pub const BLOCKS_OFFSET: u64 = 512;
