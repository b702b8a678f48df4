/* Generated from crates/mqueue/src/abi.rs by `cargo xtask gen-abi`. Do not edit.
 * The concepts are explained there. */
#ifndef SERVAL_ABI_H
#define SERVAL_ABI_H

#include <stddef.h>
#include <stdint.h>

#define SERVAL_REGION_MAGIC 5139253968287974739ull
#define SERVAL_ABI_VERSION 8u
#define SERVAL_LINE_BYTES 128u
#define SERVAL_INLINE_BYTES_MAX 1536u
#define SERVAL_DEPTH_MAX 16384u
#define SERVAL_RESTAMP_LAPS 65536u
#define SERVAL_MESSAGE_BYTES_MAX 8388608u
#define SERVAL_BLOCKS_MAX 4096u
#define SERVAL_BACKENDS_MAX 15u
#define SERVAL_MQUEUES_MAX 69632u
#define SERVAL_RINGS_MAX 1327104u
#define SERVAL_SOCKETS_MAX 64u
#define SERVAL_STREAM_BYTES_MIN 4096u
#define SERVAL_STREAM_BYTES_MAX 16777216u
#define SERVAL_COMMAND_RINGS_MAX 16u
#define SERVAL_COMMAND_COPY 1u
#define SERVAL_COMMAND_DONE 2u
#define SERVAL_COMMAND_OK 0u
#define SERVAL_COMMAND_RANGE 1u
#define SERVAL_COMMAND_UNKNOWN 2u
#define SERVAL_COMMAND_FAILED 3u
#define SERVAL_COMMAND_TIMEOUT 4u
#define SERVAL_DIRECTION_TO_BUFFER 1u
#define SERVAL_DIRECTION_FROM_BUFFER 2u
#define SERVAL_BUNDLE_MAX 64u
#define SERVAL_BUNDLE_ALIGN 64u
#define SERVAL_POOL_ALIGN 4096u
#define SERVAL_POOLS_MAX 64u
#define SERVAL_NO_BLOCK 4294967295ull
#define SERVAL_PARAMS_MAX 32u
#define SERVAL_PARAM_TEXT 18445618173802708992ull
#define SERVAL_PARAM_TEXT_BYTES_MAX 255u
#define SERVAL_ENGINE_WORDS_OFFSET 128u
#define SERVAL_ACCELERATOR_WORDS_OFFSET 256u
#define SERVAL_BLOCKS_OFFSET 512u
#define SERVAL_NO_DEADLINE 18446744073709551615ull
#define SERVAL_KIND_MESSAGE 1u
#define SERVAL_KIND_DROP 2u
#define SERVAL_KIND_BUNDLE 3u
#define SERVAL_FLAG_ARENA 1u
#define SERVAL_STATUS_OK 0u
#define SERVAL_STATUS_TIMEOUT 1u
#define SERVAL_STATUS_REFUSED 2u
#define SERVAL_STATUS_CLOSED 3u
#define SERVAL_STATUS_PROTOCOL 4u
#define SERVAL_STATUS_TOO_LONG 5u
#define SERVAL_STATUS_RESET 6u
#define SERVAL_STATUS_NOT_ALLOWED 7u
#define SERVAL_STATUS_EXHAUSTED 8u
#define SERVAL_STATUS_AGAIN 9u
#define SERVAL_STATUS_DRAINING 10u
#define SERVAL_STATUS_BAD_LENGTH 16u
#define SERVAL_STATUS_REJECTED 17u
#define SERVAL_STOP_RUN 0u
#define SERVAL_STOP_DRAIN 1u
#define SERVAL_STOP_NOW 2u
#define SERVAL_STATE_ABSENT 0u
#define SERVAL_STATE_READY 1u
#define SERVAL_STATE_ENDED 2u
#define SERVAL_REASON_NONE 0u
#define SERVAL_REASON_STOPPED 1u
#define SERVAL_REASON_ENGINE_LOST 2u
#define SERVAL_REASON_RING_CORRUPT 3u
#define SERVAL_REASON_RETURNED 4u
#define SERVAL_REASON_CONTRACT 5u
#define SERVAL_REASON_HUNG 6u
#define SERVAL_REASON_REFUSED 7u
#define SERVAL_REASON_DEVICE_FAILED 8u
#define SERVAL_REASON_LINK_LOST 9u
#define SERVAL_FEATURE_BUNDLES 1u
#define SERVAL_RING_SERVER_RX 1u
#define SERVAL_RING_SERVER_TX 2u
#define SERVAL_RING_CLIENT_RX 3u
#define SERVAL_RING_CLIENT_TX 4u
#define SERVAL_RING_COMMANDS 5u
#define SERVAL_RING_COMPLETIONS 6u
#define SERVAL_RING_SOCKET_RX 7u
#define SERVAL_RING_SOCKET_TX 8u
#define SERVAL_RING_STREAM_RX 9u
#define SERVAL_RING_STREAM_TX 10u
#define SERVAL_RING_POOL 11u
#define SERVAL_RING_VERSION_MQUEUE 1u
#define SERVAL_RING_VERSION_COMMAND 1u
#define SERVAL_RING_VERSION_STREAM 1u
#define SERVAL_RING_VERSION_POOL 1u
#define SERVAL_SOCKET_ACCEPT 1u
#define SERVAL_SOCKET_CONNECT 2u
#define SERVAL_SOCKET_CLOSE 3u
#define SERVAL_SOCKET_NOTIFY 4u
#define SERVAL_SOCKET_CANCEL 5u
#define SERVAL_SOCKET_DONE 1u
#define SERVAL_SOCKET_EVENT 2u
#define SERVAL_SOCKET_CLOSE_ORDERLY 0u
#define SERVAL_SOCKET_CLOSE_RESET 1u
#define SERVAL_TRANSFER_MD5 1u
#define SERVAL_TRANSFER_SHA256 2u
#define SERVAL_TRANSFER_CRC32C 3u
#define SERVAL_TRANSFER_SHA1 4u
#define SERVAL_TRANSFER_FILE 1u
#define SERVAL_TRANSFER_MEMORY 2u
#define SERVAL_TRANSFER_CONNECTION 3u
#define SERVAL_TRANSFER_SOCKET 4u
#define SERVAL_TRANSFER_NO_DIGEST 0u
#define SERVAL_TRANSFER_OPEN 1u
#define SERVAL_TRANSFER_EXPAND_GZIP 2u
#define SERVAL_TRANSFER_EXPAND_ZSTD 4u
#define SERVAL_TRANSFER_COMPRESS_GZIP 8u
#define SERVAL_TRANSFER_COMPRESS_ZSTD 16u
#define SERVAL_TRANSFER_SEAL 32u
#define SERVAL_TRANSFER_OK 0u
#define SERVAL_TRANSFER_BAD_COMMAND 1u
#define SERVAL_TRANSFER_NOT_ALLOWED 2u
#define SERVAL_TRANSFER_RANGE 3u
#define SERVAL_TRANSFER_EXHAUSTED 4u
#define SERVAL_TRANSFER_FILE_ENDED 5u
#define SERVAL_TRANSFER_REFUSED 6u
#define SERVAL_TRANSFER_CLOSED 7u
#define SERVAL_TRANSFER_TIMEOUT 8u
#define SERVAL_TRANSFER_CORRUPT 9u
#define SERVAL_TRANSFER_DISK_FULL 10u
#define SERVAL_TRANSFER_FAILED 11u
#define SERVAL_STREAM_HEAD 0u
#define SERVAL_STREAM_HEAD_END 8u
#define SERVAL_STREAM_TAIL 128u
#define SERVAL_STREAM_TAIL_END 136u
#define SERVAL_STREAM_DATA 512u
#define SERVAL_RING_REQUIRED 1u
#define SERVAL_PROTOCOL_DOORBELL 1u
#define SERVAL_PROTOCOL_GRANULE8 2u
#define SERVAL_PROTOCOL_GRANULE16 3u
#define SERVAL_PLACEMENT_HOST 1u
#define SERVAL_WAIT_RX 0u
#define SERVAL_WAIT_TX 1u
#define SERVAL_WAIT_BACKEND 2u
#define SERVAL_WAIT_TIME 3u
#define SERVAL_WAIT_BUDGET 4u
#define SERVAL_ABI_NUMBER 8 /* ABI_VERSION as a part of symbol names */

/* First bytes of a region. Written by format() before the region is shared; magic last. */
struct serval_region_header {
  uint64_t magic; /* 0: REGION_MAGIC. */
  uint32_t abi_version; /* 8: ABI_VERSION. */
  uint32_t header_bytes; /* 12: Size of this structure in bytes. */
  uint64_t region_bytes; /* 16: Size of the whole region in bytes. */
  uint64_t generation; /* 24: The accelerator generation of this region, from 1. */
  uint32_t block_count; /* 32: Blocks, in [1, BLOCKS_MAX]. */
  uint32_t mqueue_count; /* 36: Mqueues, in [1, MQUEUES_MAX]. */
  uint64_t blocks_offset; /* 40: Offset of the first BlockWords. */
  uint64_t directory_offset; /* 48: Offset of the first DirectoryEntry. */
  uint64_t rx_heads_offset; /* 56: Offset of the array of RX heads (written by the engine). */
  uint64_t tx_tails_offset; /* 64: Offset of the array of TX tails (written by the engine). */
  uint64_t rx_tails_offset; /* 72: Offset of the array of RX tails (written by the accelerator). */
  uint64_t tx_heads_offset; /* 80: Offset of the array of TX heads (written by the accelerator). */
  uint32_t ring_count; /* 88: Entries of the directory, in [1, RINGS_MAX]. */
  uint32_t pad; /* 92: Zero. */
  uint64_t reserved[4]; /* 96: Zero. */
};

/* Words written by the engine. */
struct serval_engine_words {
  uint64_t stop; /* 0: RUN, DRAIN or NOW. */
  uint64_t heartbeat; /* 8: Advances at least once a second while the engine lives. */
  uint64_t parked; /* 16: 1 while a worker sleeps and must be woken when a message is published. */
  uint64_t reserved[13]; /* 24: Zero. */
};

/* Words written by the accelerator runtime. */
struct serval_accelerator_words {
  uint64_t state; /* 0: ABSENT, READY or ENDED. */
  uint64_t reason; /* 8: Why it ended. */
  uint64_t heartbeat; /* 16: Advances at least once a second while the runtime lives. */
  uint64_t parked; /* 24: 1 while the accelerator's side sleeps and must be woken when a message is published. */
  uint64_t round_trip_ns; /* 32: Last measured round trip to the machine with the blocks, in nanoseconds; 0: they are on this machine. */
  uint64_t features; /* 40: What the library of its blocks can do, before it is READY: FEATURE_BUNDLES or 0. */
  uint64_t reserved[10]; /* 48: Zero. */
};

/* A block's line of the status page, written by the block only. */
struct serval_block_words {
  uint64_t state; /* 0: ABSENT, READY or ENDED. */
  uint64_t reason; /* 8: Why it ended. */
  uint64_t received; /* 16: Messages received from the server mqueue. */
  uint64_t sent; /* 24: Replies sent. */
  uint64_t dropped; /* 32: Messages dropped by the kernel. */
  uint64_t reserved[11]; /* 40: Zero. */
};

/* The part of a directory entry that is common to all kinds. Constant once formatted. */
struct serval_directory_entry {
  uint16_t kind; /* 0: The kind of ring, which determines the kind's own part: SERVER_RX ... */
  uint16_t version; /* 2: Version of the kind's description. */
  uint32_t flags; /* 4: REQUIRED or 0. */
  uint32_t block; /* 8: The block it belongs to, or NO_BLOCK. */
  uint32_t index; /* 12: Its number among the rings of this kind and block, from 0. */
  uint64_t offset; /* 16: Offset of its memory; 0 for none. */
  uint64_t bytes; /* 24: Bytes of that memory. */
  uint64_t own[12]; /* 32: The kind's own part. */
};

/* The entry of a ring of messages: SERVER_RX, SERVER_TX, CLIENT_RX, CLIENT_TX, COMMANDS, COMPLETIONS, SOCKET_RX or SOCKET_TX, each of version 1. Constant once formatted. */
struct serval_ring_entry {
  uint16_t kind; /* 0: As in every entry. */
  uint16_t version; /* 2: As in every entry. */
  uint32_t flags; /* 4: As in every entry. */
  uint32_t block; /* 8: The block it belongs to; NO_BLOCK for command rings. */
  uint32_t index; /* 12: Server and socket mqueues: 0. Client mqueues: the backend, in the order of the configuration. Command rings: the pair, from 0. */
  uint64_t offset; /* 16: Offset of the memory of slots, arena and staging, and of head and tail of command rings. */
  uint64_t bytes; /* 24: Bytes of that memory. */
  uint8_t protocol; /* 32: DOORBELL, GRANULE8 or GRANULE16. */
  uint8_t placement; /* 33: HOST. */
  uint16_t pad; /* 34: Zero. */
  uint32_t mqueue; /* 36: Number of the mqueue; 0 for command rings. */
  uint32_t depth; /* 40: Slots; a power of two in [1, DEPTH_MAX]. */
  uint32_t slot_stride; /* 44: Distance between slots in bytes; a multiple of 64. */
  uint32_t inline_bytes; /* 48: Payload bytes that fit into a slot; a multiple of 8 in [8, INLINE_BYTES_MAX]. */
  uint32_t message_bytes_max; /* 52: Longest payload of this ring, in [1, MESSAGE_BYTES_MAX]. */
  uint64_t slots_offset; /* 56: Offset of the slots. */
  uint64_t head_offset; /* 64: Offset of the head word: messages published. */
  uint64_t tail_offset; /* 72: Offset of the tail word: slots released. */
  uint64_t arena_offset; /* 80: Offset of the arena; 0 without one. */
  uint64_t arena_bytes; /* 88: Size of the arena; 0 without one, else a multiple of 8. */
  uint64_t staging_offset; /* 96: COMMANDS, and CLIENT_TX to a backend that does transfers: offset of the staging; 0 without one. */
  uint64_t staging_bytes; /* 104: The same: size of the staging; 0 without one. */
  uint64_t reserved[2]; /* 112: Zero. */
};

/* The entry of a stream ring: STREAM_RX or STREAM_TX, of version 1. Constant once formatted. */
struct serval_stream_entry {
  uint16_t kind; /* 0: As in every entry. */
  uint16_t version; /* 2: As in every entry. */
  uint32_t flags; /* 4: As in every entry. */
  uint32_t block; /* 8: The block it belongs to. */
  uint32_t index; /* 12: The slot of the connection, from 0 without a gap. */
  uint64_t offset; /* 16: Offset of the memory of words and data. */
  uint64_t bytes; /* 24: Bytes of that memory. */
  uint64_t capacity; /* 32: Bytes of data; a power of two in [STREAM_BYTES_MIN, STREAM_BYTES_MAX]. */
  uint64_t reserved[11]; /* 40: Zero. */
};

/* The entry of a pool: POOL, of version 1. Constant once formatted. */
struct serval_pool_entry {
  uint16_t kind; /* 0: As in every entry. */
  uint16_t version; /* 2: As in every entry. */
  uint32_t flags; /* 4: 0: a reader that does not know pools can still serve single messages. */
  uint32_t block; /* 8: NO_BLOCK. */
  uint32_t index; /* 12: Number of the worker that owns it, in [0, POOLS_MAX). */
  uint64_t offset; /* 16: Offset of its memory; a multiple of POOL_ALIGN. */
  uint64_t bytes; /* 24: Bytes of that memory; a multiple of POOL_ALIGN, not 0. */
  uint64_t reserved[12]; /* 32: Zero. */
};

/* Payload of a slot of kind BUNDLE in the RX ring of a server mqueue. Every number is checked by the block. */
struct serval_bundle {
  uint64_t offset; /* 0: Offset of message 0 in the region; a multiple of BUNDLE_ALIGN. */
  uint64_t reply_offset; /* 8: Offset in the region of the area for replies; a multiple of BUNDLE_ALIGN. */
  uint32_t stride; /* 16: Distance between messages in bytes; at least len. */
  uint32_t count; /* 20: Messages, in [1, BUNDLE_MAX]. */
  uint32_t len; /* 24: Bytes of each message but the last. */
  uint32_t last_len; /* 28: Bytes of the last message; at most len. */
  uint32_t reply_bytes; /* 32: Bytes of the area for replies. */
  uint32_t pad; /* 36: Zero. */
};

/* Payload of a slot of kind BUNDLE in the TX ring of a server mqueue. Every number is checked by the engine. */
struct serval_bundle_reply {
  uint64_t answered; /* 0: Bit i: this completion answers message i. Not 0. */
  uint64_t offset; /* 8: Offset in the region of the first reply. */
  uint32_t len; /* 16: Bytes of each reply. */
  uint32_t stride; /* 20: Distance between replies in bytes; at least len. */
};

/* Payload of every message in a socket mqueue. Numbers of the block are checked by the engine. */
struct serval_socket_message {
  uint32_t op; /* 0: TX: ACCEPT, CONNECT, CLOSE or NOTIFY. RX: DONE or EVENT. */
  uint32_t slot; /* 4: Slot of the connection. */
  uint32_t generation; /* 8: Lease of the slot, from 1. */
  uint32_t value; /* 12: Depends on op. */
};

/* A request to a backend that does transfers. Every number is checked by the engine. */
struct serval_transfer_command {
  uint8_t source; /* 0: FILE, MEMORY or CONNECTION. */
  uint8_t sink; /* 1: FILE, MEMORY, CONNECTION or SOCKET. */
  uint8_t digest; /* 2: Digest of the plain bytes: NONE, or a number of `codes::digest`. */
  uint8_t stages; /* 3: Bits of transfer_stage. */
  uint16_t source_file; /* 4: FILE and CONNECTION: its number among the files of the service. MEMORY: 0. */
  uint16_t sink_file; /* 6: The same of the sink. SOCKET: its slot. */
  uint64_t source_offset; /* 8: The first byte at the source; 0 of a connection. */
  uint64_t sink_offset; /* 16: The first byte at the sink; 0 of a connection. SOCKET: bytes that the block had written to its STREAM_TX before. */
  uint64_t bytes; /* 24: Bytes to take from the source; u64::MAX: to the end of the file or of the stream. */
  uint64_t lease; /* 32: SOCKET: the lease of the slot. Others: 0. */
  uint64_t reserved[3]; /* 40: Zero. */
};

/* The answer to a TransferCommand: how it ended. */
struct serval_transfer_done {
  uint32_t status; /* 0: A transfer_status. */
  uint32_t digest_bytes; /* 4: Bytes of the digest; 0 without one, or if the transfer did not succeed. */
  uint64_t read; /* 8: Bytes that the source has given. */
  uint64_t written; /* 16: Bytes that the sink has got. */
  uint8_t digest[32]; /* 24: The digest. */
  uint64_t reserved; /* 56: Zero. */
};

/* Payload of a COPY command. Every number is checked by the runtime. Offsets and bytes are multiples of 8. */
struct serval_copy_command {
  uint64_t staging_offset; /* 0: Offset in the staging. */
  uint64_t buffer_offset; /* 8: Offset in the buffer. */
  uint64_t bytes; /* 16: How many bytes, at least 8. */
  uint32_t buffer; /* 24: Number of the buffer among those that the runtime has registered. */
  uint32_t direction; /* 28: TO_BUFFER or FROM_BUFFER. */
};

/* Payload of a DESCRIBE command. */
struct serval_describe_command {
  uint32_t buffer; /* 0: Number of the buffer among those that the runtime has registered. */
  uint32_t pad; /* 4: Zero. */
};

/* Payload of the completion of a DESCRIBE command: where a buffer is in the accelerator's address space. */
struct serval_buffer_range {
  uint64_t address; /* 0: Its first address, a multiple of 8. A runtime without an address space of its own chooses one. */
  uint64_t bytes; /* 8: Its size, a multiple of 8. */
};

/* Header of every message in a ring. */
struct serval_slot_header {
  uint64_t token; /* 0: The engine's identifier of the request; a reply returns it unchanged. Socket mqueues: the block's number of a command, which its completion returns. */
  uint64_t tag; /* 8: Client mqueues: chosen by the kernel, returned with the answer. Server and socket mqueues: 0. */
  uint64_t arena_offset; /* 16: Offset of the payload in the ring's arena if flags has ARENA, else 0. */
  uint32_t len; /* 24: Payload bytes. */
  uint8_t kind; /* 28: MESSAGE, DROP or BUNDLE. */
  uint8_t status; /* 29: OK or the reason of a failure or drop. */
  uint16_t flags; /* 30: ARENA or 0. */
};

/* One parameter of a kernel (`params` in the configuration). */
struct serval_param {
  uint8_t name[24]; /* 0: Name, zero padded and zero terminated. */
  double value; /* 24: A finite number. Of a text the bits PARAM_TEXT | bytes << 32 | offset, counted from the first parameter; a zero byte follows these bytes. */
};

/* The start arguments of a block. */
struct serval_block_args {
  uint32_t abi_version; /* 0: ABI_VERSION of the program that starts the block. */
  uint32_t block; /* 4: This block, in [0, block_count). */
  uint32_t param_count; /* 8: Parameters, in [0, PARAMS_MAX]. */
  uint32_t staging_stride; /* 12: Staging bytes of one message buffer; a multiple of 64. A block has two for each of its mqueues. */
  uint32_t ring_first; /* 16: The block's entries in the directory: index of the first. */
  uint32_t ring_count; /* 20: Number of these entries. */
  uint64_t region; /* 24: Address of the region as the block sees it. */
  uint64_t region_bytes; /* 32: Bytes of the region that are mapped there. */
  uint64_t params; /* 40: Address of the parameters. */
  uint64_t staging; /* 48: Address of the block's private staging memory. */
  uint64_t staging_bytes; /* 56: Bytes of staging memory. */
  uint64_t wait; /* 64: Host only: address of a function void(void* wait_self, u32 why, u64 deadline_ns) that suspends the block. */
  uint64_t wait_self; /* 72: Host only: first argument of wait. */
  uint64_t now; /* 80: Host only: address of a function u64(void* wait_self) that returns monotonic nanoseconds; 0 to use the clock. */
  uint64_t budget; /* 88: Messages a block may handle before it must call wait with BUDGET; 0 for no limit. */
  uint64_t sink; /* 96: Address of memory for replies that are too long to send; its content is never sent. 0 on the host: the kernel library creates its own. */
  uint64_t sink_bytes; /* 104: Bytes of that memory. On the host more than any length. On CUDA a reply that does not fit ends its block. */
};

/* One kernel of a kernel library (host). */
struct serval_kernel_entry {
  uint64_t name; /* 0: Address of the zero terminated name. */
  uint64_t entry; /* 8: Address of the function void(serval_block_args const*). */
  uint64_t next; /* 16: Address of the next entry; 0 ends the list. */
  uint64_t reserved; /* 24: Zero. */
};

#if defined(__cplusplus)
#define SERVAL_ASSERT_LAYOUT(what) static_assert(what, #what)
#else
#define SERVAL_ASSERT_LAYOUT(what) _Static_assert(what, #what)
#endif
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_region_header) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, magic) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, abi_version) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, header_bytes) == 12);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, region_bytes) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, generation) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, block_count) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, mqueue_count) == 36);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, blocks_offset) == 40);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, directory_offset) == 48);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, rx_heads_offset) == 56);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, tx_tails_offset) == 64);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, rx_tails_offset) == 72);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, tx_heads_offset) == 80);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, ring_count) == 88);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, pad) == 92);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_region_header, reserved) == 96);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_engine_words) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_engine_words, stop) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_engine_words, heartbeat) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_engine_words, parked) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_engine_words, reserved) == 24);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_accelerator_words) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, state) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, reason) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, heartbeat) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, parked) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, round_trip_ns) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, features) == 40);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_accelerator_words, reserved) == 48);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_block_words) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_words, state) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_words, reason) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_words, received) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_words, sent) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_words, dropped) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_words, reserved) == 40);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_directory_entry) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, kind) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, version) == 2);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, flags) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, block) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, index) == 12);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, offset) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, bytes) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_directory_entry, own) == 32);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_ring_entry) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, kind) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, version) == 2);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, flags) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, block) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, index) == 12);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, offset) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, bytes) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, protocol) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, placement) == 33);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, pad) == 34);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, mqueue) == 36);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, depth) == 40);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, slot_stride) == 44);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, inline_bytes) == 48);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, message_bytes_max) == 52);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, slots_offset) == 56);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, head_offset) == 64);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, tail_offset) == 72);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, arena_offset) == 80);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, arena_bytes) == 88);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, staging_offset) == 96);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, staging_bytes) == 104);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_ring_entry, reserved) == 112);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_stream_entry) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, kind) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, version) == 2);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, flags) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, block) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, index) == 12);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, offset) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, bytes) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, capacity) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_stream_entry, reserved) == 40);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_pool_entry) == 128);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, kind) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, version) == 2);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, flags) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, block) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, index) == 12);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, offset) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, bytes) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_pool_entry, reserved) == 32);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_bundle) == 40);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, offset) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, reply_offset) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, stride) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, count) == 20);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, len) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, last_len) == 28);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, reply_bytes) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle, pad) == 36);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_bundle_reply) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle_reply, answered) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle_reply, offset) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle_reply, len) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_bundle_reply, stride) == 20);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_socket_message) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_socket_message, op) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_socket_message, slot) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_socket_message, generation) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_socket_message, value) == 12);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_transfer_command) == 64);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, source) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, sink) == 1);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, digest) == 2);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, stages) == 3);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, source_file) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, sink_file) == 6);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, source_offset) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, sink_offset) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, bytes) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, lease) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_command, reserved) == 40);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_transfer_done) == 64);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_done, status) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_done, digest_bytes) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_done, read) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_done, written) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_done, digest) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_transfer_done, reserved) == 56);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_copy_command) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_copy_command, staging_offset) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_copy_command, buffer_offset) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_copy_command, bytes) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_copy_command, buffer) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_copy_command, direction) == 28);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_describe_command) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_describe_command, buffer) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_describe_command, pad) == 4);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_buffer_range) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_buffer_range, address) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_buffer_range, bytes) == 8);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_slot_header) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, token) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, tag) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, arena_offset) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, len) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, kind) == 28);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, status) == 29);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_slot_header, flags) == 30);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_param) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_param, name) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_param, value) == 24);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_block_args) == 112);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, abi_version) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, block) == 4);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, param_count) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, staging_stride) == 12);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, ring_first) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, ring_count) == 20);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, region) == 24);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, region_bytes) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, params) == 40);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, staging) == 48);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, staging_bytes) == 56);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, wait) == 64);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, wait_self) == 72);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, now) == 80);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, budget) == 88);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, sink) == 96);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_block_args, sink_bytes) == 104);
SERVAL_ASSERT_LAYOUT(sizeof(struct serval_kernel_entry) == 32);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_kernel_entry, name) == 0);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_kernel_entry, entry) == 8);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_kernel_entry, next) == 16);
SERVAL_ASSERT_LAYOUT(offsetof(struct serval_kernel_entry, reserved) == 24);

#endif
