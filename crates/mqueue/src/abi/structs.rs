//! The structures of a region, and their description for the C header and the layout snapshot.

/// One field of a shared structure, for the C header and the layout snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name in C and Rust.
    pub name: &'static str,
    /// The Rust type.
    pub ty: &'static str,
    /// Offset in bytes.
    pub offset: usize,
    /// The field's documentation.
    pub doc: &'static str,
}

/// One shared structure, for the C header and the layout snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Struct {
    /// Name in C.
    pub c_name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// The structure's documentation.
    pub doc: &'static str,
    /// Its fields in order.
    pub fields: &'static [Field],
}

macro_rules! shared_structs {
    ($( $(#[doc = $doc:literal])+ struct $name:ident as $c_name:literal, size $size:literal {
        $( $(#[doc = $fdoc:literal])+ $field:ident : $ty:ty, )+
    } )+) => {
        $(
            $(#[doc = $doc])+
            #[repr(C)]
            #[derive(Clone, Copy, Debug, PartialEq)]
            pub struct $name { $( $(#[doc = $fdoc])+ pub $field: $ty, )+ }
            const _: () = assert!(core::mem::size_of::<$name>() == $size);
        )+
        /// Every shared structure, in order.
        pub const STRUCTS: &[Struct] = &[ $( Struct {
            c_name: $c_name,
            size: $size,
            doc: concat!($($doc),+),
            fields: &[ $( Field {
                name: stringify!($field),
                ty: stringify!($ty),
                offset: core::mem::offset_of!($name, $field),
                doc: concat!($($fdoc),+),
            }, )+ ],
        }, )+ ];
    };
}

shared_structs! {
    /// First bytes of a region. Written by format() before the region is shared; magic last.
    struct RegionHeader as "serval_region_header", size 128 {
        /// REGION_MAGIC.
        magic: u64,
        /// ABI_VERSION.
        abi_version: u32,
        /// Size of this structure in bytes.
        header_bytes: u32,
        /// Size of the whole region in bytes.
        region_bytes: u64,
        /// The accelerator generation of this region, from 1.
        generation: u64,
        /// Blocks, in [1, BLOCKS_MAX].
        block_count: u32,
        /// Mqueues, in [1, MQUEUES_MAX].
        mqueue_count: u32,
        /// Offset of the first BlockWords.
        blocks_offset: u64,
        /// Offset of the first DirectoryEntry.
        directory_offset: u64,
        /// Offset of the array of RX heads (written by the engine).
        rx_heads_offset: u64,
        /// Offset of the array of TX tails (written by the engine).
        tx_tails_offset: u64,
        /// Offset of the array of RX tails (written by the accelerator).
        rx_tails_offset: u64,
        /// Offset of the array of TX heads (written by the accelerator).
        tx_heads_offset: u64,
        /// Entries of the directory, in [1, RINGS_MAX].
        ring_count: u32,
        /// Zero.
        pad: u32,
        /// Zero.
        reserved: [u64; 4],
    }

    /// Words written by the engine.
    struct EngineWords as "serval_engine_words", size 128 {
        /// RUN, DRAIN or NOW.
        stop: u64,
        /// Advances at least once a second while the engine lives.
        heartbeat: u64,
        /// 1 while a worker sleeps and must be woken when a message is published.
        parked: u64,
        /// Zero.
        reserved: [u64; 13],
    }

    /// Words written by the accelerator runtime.
    struct AcceleratorWords as "serval_accelerator_words", size 128 {
        /// ABSENT, READY or ENDED.
        state: u64,
        /// Why it ended.
        reason: u64,
        /// Advances at least once a second while the runtime lives.
        heartbeat: u64,
        /// 1 while the accelerator's side sleeps and must be woken when a message is published.
        parked: u64,
        /// Last measured round trip to the machine with the blocks, in nanoseconds; 0: they are on this machine.
        round_trip_ns: u64,
        /// What the library of its blocks can do, before it is READY: FEATURE_BUNDLES or 0.
        features: u64,
        /// Zero.
        reserved: [u64; 10],
    }

    /// A block's line of the status page, written by the block only.
    struct BlockWords as "serval_block_words", size 128 {
        /// ABSENT, READY or ENDED.
        state: u64,
        /// Why it ended.
        reason: u64,
        /// Messages received from the server mqueue.
        received: u64,
        /// Replies sent.
        sent: u64,
        /// Messages dropped by the kernel.
        dropped: u64,
        /// Zero.
        reserved: [u64; 11],
    }

    /// The part of a directory entry that is common to all kinds. Constant once formatted.
    struct DirectoryEntry as "serval_directory_entry", size 128 {
        /// The kind of ring, which determines the kind's own part: SERVER_RX ...
        kind: u16,
        /// Version of the kind's description.
        version: u16,
        /// REQUIRED or 0.
        flags: u32,
        /// The block it belongs to, or NO_BLOCK.
        block: u32,
        /// Its number among the rings of this kind and block, from 0.
        index: u32,
        /// Offset of its memory; 0 for none.
        offset: u64,
        /// Bytes of that memory.
        bytes: u64,
        /// The kind's own part.
        own: [u64; 12],
    }

    /// The entry of a ring of messages: SERVER_RX, SERVER_TX, CLIENT_RX, CLIENT_TX, COMMANDS, COMPLETIONS, SOCKET_RX or SOCKET_TX,
    /// each of version 1. Constant once formatted.
    struct RingEntry as "serval_ring_entry", size 128 {
        /// As in every entry.
        kind: u16,
        /// As in every entry.
        version: u16,
        /// As in every entry.
        flags: u32,
        /// The block it belongs to; NO_BLOCK for command rings.
        block: u32,
        /// Server and socket mqueues: 0. Client mqueues: the backend, in the order of the configuration. Command rings: the pair, from 0.
        index: u32,
        /// Offset of the memory of slots, arena and staging, and of head and tail of command rings.
        offset: u64,
        /// Bytes of that memory.
        bytes: u64,
        /// DOORBELL, GRANULE8 or GRANULE16.
        protocol: u8,
        /// HOST.
        placement: u8,
        /// Zero.
        pad: u16,
        /// Number of the mqueue; 0 for command rings.
        mqueue: u32,
        /// Slots; a power of two in [1, DEPTH_MAX].
        depth: u32,
        /// Distance between slots in bytes; a multiple of 64.
        slot_stride: u32,
        /// Payload bytes that fit into a slot; a multiple of 8 in [8, INLINE_BYTES_MAX].
        inline_bytes: u32,
        /// Longest payload of this ring, in [1, MESSAGE_BYTES_MAX].
        message_bytes_max: u32,
        /// Offset of the slots.
        slots_offset: u64,
        /// Offset of the head word: messages published.
        head_offset: u64,
        /// Offset of the tail word: slots released.
        tail_offset: u64,
        /// Offset of the arena; 0 without one.
        arena_offset: u64,
        /// Size of the arena; 0 without one, else a multiple of 8.
        arena_bytes: u64,
        /// COMMANDS, and CLIENT_TX to a backend that does transfers: offset of the staging; 0 without one.
        staging_offset: u64,
        /// The same: size of the staging; 0 without one.
        staging_bytes: u64,
        /// Zero.
        reserved: [u64; 2],
    }

    /// The entry of a stream ring: STREAM_RX or STREAM_TX, of version 1. Constant once formatted.
    struct StreamEntry as "serval_stream_entry", size 128 {
        /// As in every entry.
        kind: u16,
        /// As in every entry.
        version: u16,
        /// As in every entry.
        flags: u32,
        /// The block it belongs to.
        block: u32,
        /// The slot of the connection, from 0 without a gap.
        index: u32,
        /// Offset of the memory of words and data.
        offset: u64,
        /// Bytes of that memory.
        bytes: u64,
        /// Bytes of data; a power of two in [STREAM_BYTES_MIN, STREAM_BYTES_MAX].
        capacity: u64,
        /// Zero.
        reserved: [u64; 11],
    }

    /// The entry of a pool: POOL, of version 1. Constant once formatted.
    struct PoolEntry as "serval_pool_entry", size 128 {
        /// As in every entry.
        kind: u16,
        /// As in every entry.
        version: u16,
        /// 0: a reader that does not know pools can still serve single messages.
        flags: u32,
        /// NO_BLOCK.
        block: u32,
        /// Number of the worker that owns it, in [0, POOLS_MAX).
        index: u32,
        /// Offset of its memory; a multiple of POOL_ALIGN.
        offset: u64,
        /// Bytes of that memory; a multiple of POOL_ALIGN, not 0.
        bytes: u64,
        /// Zero.
        reserved: [u64; 12],
    }

    /// Payload of a slot of kind BUNDLE in the RX ring of a server mqueue. Every number is checked by the block.
    struct Bundle as "serval_bundle", size 40 {
        /// Offset of message 0 in the region; a multiple of BUNDLE_ALIGN.
        offset: u64,
        /// Offset in the region of the area for replies; a multiple of BUNDLE_ALIGN.
        reply_offset: u64,
        /// Distance between messages in bytes; at least len.
        stride: u32,
        /// Messages, in [1, BUNDLE_MAX].
        count: u32,
        /// Bytes of each message but the last.
        len: u32,
        /// Bytes of the last message; at most len.
        last_len: u32,
        /// Bytes of the area for replies.
        reply_bytes: u32,
        /// Zero.
        pad: u32,
    }

    /// Payload of a slot of kind BUNDLE in the TX ring of a server mqueue. Every number is checked by the engine.
    struct BundleReply as "serval_bundle_reply", size 24 {
        /// Bit i: this completion answers message i. Not 0.
        answered: u64,
        /// Offset in the region of the first reply.
        offset: u64,
        /// Bytes of each reply.
        len: u32,
        /// Distance between replies in bytes; at least len.
        stride: u32,
    }

    /// Payload of every message in a socket mqueue. Numbers of the block are checked by the engine.
    struct SocketMessage as "serval_socket_message", size 16 {
        /// TX: ACCEPT, CONNECT, CLOSE or NOTIFY. RX: DONE or EVENT.
        op: u32,
        /// Slot of the connection.
        slot: u32,
        /// Lease of the slot, from 1.
        generation: u32,
        /// Depends on op.
        value: u32,
    }

    /// A request to a backend that does transfers. Every number is checked by the engine.
    struct TransferCommand as "serval_transfer_command", size 64 {
        /// FILE, MEMORY or CONNECTION.
        source: u8,
        /// FILE, MEMORY, CONNECTION or SOCKET.
        sink: u8,
        /// Digest of the plain bytes: NONE, or a number of `codes::digest`.
        digest: u8,
        /// Bits of transfer_stage.
        stages: u8,
        /// FILE and CONNECTION: its number among the files of the service. MEMORY: 0.
        source_file: u16,
        /// The same of the sink. SOCKET: its slot.
        sink_file: u16,
        /// The first byte at the source; 0 of a connection.
        source_offset: u64,
        /// The first byte at the sink; 0 of a connection. SOCKET: bytes that the block had written to its STREAM_TX before.
        sink_offset: u64,
        /// Bytes to take from the source; u64::MAX: to the end of the file or of the stream.
        bytes: u64,
        /// SOCKET: the lease of the slot. Others: 0.
        lease: u64,
        /// Zero.
        reserved: [u64; 3],
    }

    /// The answer to a TransferCommand: how it ended.
    struct TransferDone as "serval_transfer_done", size 64 {
        /// A transfer_status.
        status: u32,
        /// Bytes of the digest; 0 without one, or if the transfer did not succeed.
        digest_bytes: u32,
        /// Bytes that the source has given.
        read: u64,
        /// Bytes that the sink has got.
        written: u64,
        /// The digest.
        digest: [u8; 32],
        /// Zero.
        reserved: u64,
    }

    /// Payload of a COPY command. Every number is checked by the runtime. Offsets and bytes are multiples of 8.
    struct CopyCommand as "serval_copy_command", size 32 {
        /// Offset in the staging.
        staging_offset: u64,
        /// Offset in the buffer.
        buffer_offset: u64,
        /// How many bytes, at least 8.
        bytes: u64,
        /// Number of the buffer among those that the runtime has registered.
        buffer: u32,
        /// TO_BUFFER or FROM_BUFFER.
        direction: u32,
    }

    /// Payload of a DESCRIBE command.
    struct DescribeCommand as "serval_describe_command", size 8 {
        /// Number of the buffer among those that the runtime has registered.
        buffer: u32,
        /// Zero.
        pad: u32,
    }

    /// Payload of the completion of a DESCRIBE command: where a buffer is in the accelerator's address space.
    struct BufferRange as "serval_buffer_range", size 16 {
        /// Its first address, a multiple of 8. A runtime without an address space of its own chooses one.
        address: u64,
        /// Its size, a multiple of 8.
        bytes: u64,
    }

    /// Header of every message in a ring.
    struct SlotHeader as "serval_slot_header", size 32 {
        /// The engine's identifier of the request; a reply returns it unchanged. Socket mqueues: the block's number of a command,
        /// which its completion returns.
        token: u64,
        /// Client mqueues: chosen by the kernel, returned with the answer. Server and socket mqueues: 0.
        tag: u64,
        /// Offset of the payload in the ring's arena if flags has ARENA, else 0.
        arena_offset: u64,
        /// Payload bytes.
        len: u32,
        /// MESSAGE, DROP or BUNDLE.
        kind: u8,
        /// OK or the reason of a failure or drop.
        status: u8,
        /// ARENA or 0.
        flags: u16,
    }

    /// One parameter of a kernel (`params` in the configuration).
    struct Param as "serval_param", size 32 {
        /// Name, zero padded and zero terminated.
        name: [u8; 24],
        /// A finite number. Of a text the bits PARAM_TEXT | bytes << 32 | offset, counted from the first parameter; a zero byte
        /// follows these bytes.
        value: f64,
    }

    /// The start arguments of a block.
    struct BlockArgs as "serval_block_args", size 112 {
        /// ABI_VERSION of the program that starts the block.
        abi_version: u32,
        /// This block, in [0, block_count).
        block: u32,
        /// Parameters, in [0, PARAMS_MAX].
        param_count: u32,
        /// Staging bytes of one message buffer; a multiple of 64. A block has two for each of its mqueues.
        staging_stride: u32,
        /// The block's entries in the directory: index of the first.
        ring_first: u32,
        /// Number of these entries.
        ring_count: u32,
        /// Address of the region as the block sees it.
        region: u64,
        /// Bytes of the region that are mapped there.
        region_bytes: u64,
        /// Address of the parameters.
        params: u64,
        /// Address of the block's private staging memory.
        staging: u64,
        /// Bytes of staging memory.
        staging_bytes: u64,
        /// Host only: address of a function void(void* wait_self, u32 why, u64 deadline_ns) that suspends the block.
        wait: u64,
        /// Host only: first argument of wait.
        wait_self: u64,
        /// Host only: address of a function u64(void* wait_self) that returns monotonic nanoseconds; 0 to use the clock.
        now: u64,
        /// Messages a block may handle before it must call wait with BUDGET; 0 for no limit.
        budget: u64,
        /// Address of memory for replies that are too long to send; its content is never sent. 0 on the host: the
        /// kernel library creates its own.
        sink: u64,
        /// Bytes of that memory. On the host more than any length. On CUDA a reply that does not fit ends its block.
        sink_bytes: u64,
    }

    /// One kernel of a kernel library (host).
    struct KernelEntry as "serval_kernel_entry", size 32 {
        /// Address of the zero terminated name.
        name: u64,
        /// Address of the function void(serval_block_args const*).
        entry: u64,
        /// Address of the next entry; 0 ends the list.
        next: u64,
        /// Zero.
        reserved: u64,
    }
}
