//! The limits of transfers and of their parts.

use std::time::Duration;

// Chunks: what one step of a transfer moves.

/// Bytes of a chunk, but for the header of a sealed stream. 512 KiB stay in a core's second-level cache
/// between the stages, and amortise two system calls and the choice of the next step.
pub const CHUNK_BYTES: usize = 512 << 10;
/// Bytes of a chunk that is read, sealed and sent: with more of them the copies of the host kernel, out of the page cache and into the socket, displace one
/// another in that cache (measured: a tenth more CPU time with 512 KiB).
pub const SENT_CHUNK_BYTES: usize = 256 << 10;
/// Chunks of a transfer at a time.
pub const CHUNKS_MAX: usize = 2;
/// Bytes of a step that moves them without a buffer of the transfer, if the devices take as many.
pub const MOVED_MAX: usize = 4 << 20;
/// Bytes of a chunk that goes through digests together with those of other transfers: all of them have to stay in the cache.
pub const SMALL_CHUNK_BYTES: usize = 128 << 10;
/// Such chunks of a transfer at a time: no more memory than [`CHUNKS_MAX`] others.
pub const SMALL_CHUNKS_MAX: usize = 7;

// Commands.

/// How long nothing may move, unless the command says otherwise.
pub const STALL_DEFAULT: Duration = Duration::from_secs(30);
/// Files of one transfer.
pub const FILES_MAX: usize = 8;
/// Bytes of a `Command::after` at most.
pub const HEAD_MAX: usize = 16 << 10;
/// Bytes per second that a transfer has to move. Fewer in the whole stall time are no progress, so a peer that takes a
/// byte now and then does not hold an entry indefinitely.
pub const RATE_MIN: u64 = 128;
/// Stages of a transfer.
pub const STAGES_MAX: usize = 8;

// Sealed streams; see [`crate::stages::seal`].

/// Bytes of the header.
pub const HEADER_BYTES: usize = 48;
/// Bytes of a record that is not the last one.
pub const RECORD_BYTES: usize = 64 << 10;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
/// Plain bytes of a record that is not the last one.
pub const PAYLOAD_BYTES: usize = RECORD_BYTES - TAG_BYTES;

// Compression.

/// Largest window of Zstandard: 8 MiB, what every decoder has to support (RFC 8878, section 3.1.1.1.2).
pub const WINDOW_LOG_MAX: u32 = 23;
/// Members or frames in a row that may expand to nothing. Programs write one or two: BGZF ends with one, `pzstd` and the seekable
/// format of Zstandard have one beside each frame or at the end.
pub const EMPTY_MEMBERS_MAX: u32 = 4096;

// Searches.

/// Longest text or expression.
pub const PATTERN_BYTES_MAX: usize = 512;
/// Longest line, without its end.
pub const LINE_BYTES_MAX: usize = 1 << 20;
/// Offsets that one search reports at most.
pub const OFFSETS_MAX: u16 = 1024;
/// Memory of a compiled expression, and of what its engine keeps.
pub(crate) const PROGRAM_BYTES_MAX: usize = 256 << 10;
/// Memory of what its engine keeps.
pub(crate) const CACHE_BYTES_MAX: usize = 2 << 20;

// Kernels.

/// Bytes of a context.
pub const CONTEXT_BYTES: usize = 32;
/// Memory of a stage, at most.
pub(crate) const KERNEL_MEMORY_BYTES: u64 = 9 << 20;
