//! The layout as text: the generated C header, and the table that tests compare.

use super::*;

const TRANSFER_VALUES: [(&str, u32); 23] = [
    ("FILE", transfer_place::FILE as u32),
    ("MEMORY", transfer_place::MEMORY as u32),
    ("CONNECTION", transfer_place::CONNECTION as u32),
    ("SOCKET", transfer_place::SOCKET as u32),
    ("NO_DIGEST", transfer_digest::NONE as u32),
    ("OPEN", transfer_stage::OPEN as u32),
    ("EXPAND_GZIP", transfer_stage::EXPAND_GZIP as u32),
    ("EXPAND_ZSTD", transfer_stage::EXPAND_ZSTD as u32),
    ("COMPRESS_GZIP", transfer_stage::COMPRESS_GZIP as u32),
    ("COMPRESS_ZSTD", transfer_stage::COMPRESS_ZSTD as u32),
    ("SEAL", transfer_stage::SEAL as u32),
    ("OK", transfer_status::OK),
    ("BAD_COMMAND", transfer_status::BAD_COMMAND),
    ("NOT_ALLOWED", transfer_status::NOT_ALLOWED),
    ("RANGE", transfer_status::RANGE),
    ("EXHAUSTED", transfer_status::EXHAUSTED),
    ("FILE_ENDED", transfer_status::FILE_ENDED),
    ("REFUSED", transfer_status::REFUSED),
    ("CLOSED", transfer_status::CLOSED),
    ("TIMEOUT", transfer_status::TIMEOUT),
    ("CORRUPT", transfer_status::CORRUPT),
    ("DISK_FULL", transfer_status::DISK_FULL),
    ("FAILED", transfer_status::FAILED),
];

/// The C header that describes this layout (`device/include/serval/abi.h`).
pub fn c_header() -> String {
    use std::fmt::Write;
    let mut h = String::from(
        "/* Generated from crates/mqueue/src/abi.rs by `cargo xtask gen-abi`. Do not edit.\n \
         * The concepts are explained there. */\n#ifndef SERVAL_ABI_H\n#define SERVAL_ABI_H\n\n\
         #include <stddef.h>\n#include <stdint.h>\n\n",
    );
    let mut define = |name: &str, value: u64| {
        let suffix = if value > i32::MAX as u64 { "ull" } else { "u" };
        let _ = writeln!(h, "#define SERVAL_{name} {value}{suffix}");
    };
    define("REGION_MAGIC", REGION_MAGIC);
    define("ABI_VERSION", ABI_VERSION.into());
    define("LINE_BYTES", LINE_BYTES);
    define("INLINE_BYTES_MAX", INLINE_BYTES_MAX.into());
    define("DEPTH_MAX", DEPTH_MAX.into());
    define("RESTAMP_LAPS", RESTAMP_LAPS);
    define("MESSAGE_BYTES_MAX", MESSAGE_BYTES_MAX.into());
    define("BLOCKS_MAX", BLOCKS_MAX.into());
    define("BACKENDS_MAX", BACKENDS_MAX.into());
    define("MQUEUES_MAX", MQUEUES_MAX.into());
    define("RINGS_MAX", RINGS_MAX.into());
    define("SOCKETS_MAX", SOCKETS_MAX.into());
    define("STREAM_BYTES_MIN", STREAM_BYTES_MIN);
    define("STREAM_BYTES_MAX", STREAM_BYTES_MAX);
    define("COMMAND_RINGS_MAX", COMMAND_RINGS_MAX.into());
    define("COMMAND_COPY", command::COPY.into());
    define("COMMAND_DONE", command::DONE.into());
    define("COMMAND_OK", command_status::OK.into());
    define("COMMAND_RANGE", command_status::RANGE.into());
    define("COMMAND_UNKNOWN", command_status::UNKNOWN.into());
    define("COMMAND_FAILED", command_status::FAILED.into());
    define("COMMAND_TIMEOUT", command_status::TIMEOUT.into());
    define("DIRECTION_TO_BUFFER", direction::TO_BUFFER.into());
    define("DIRECTION_FROM_BUFFER", direction::FROM_BUFFER.into());
    define("BUNDLE_MAX", BUNDLE_MAX.into());
    define("BUNDLE_ALIGN", BUNDLE_ALIGN);
    define("POOL_ALIGN", POOL_ALIGN);
    define("POOLS_MAX", POOLS_MAX.into());
    define("NO_BLOCK", NO_BLOCK.into());
    define("PARAMS_MAX", PARAMS_MAX.into());
    define("PARAM_TEXT", PARAM_TEXT);
    define("PARAM_TEXT_BYTES_MAX", PARAM_TEXT_BYTES_MAX.into());
    define("ENGINE_WORDS_OFFSET", ENGINE_WORDS_OFFSET);
    define("ACCELERATOR_WORDS_OFFSET", ACCELERATOR_WORDS_OFFSET);
    define("BLOCKS_OFFSET", BLOCKS_OFFSET);
    define("NO_DEADLINE", NO_DEADLINE);
    define("KIND_MESSAGE", kind::MESSAGE.into());
    define("KIND_DROP", kind::DROP.into());
    define("KIND_BUNDLE", kind::BUNDLE.into());
    define("FLAG_ARENA", flags::ARENA.into());
    define("STATUS_OK", status::OK.into());
    define("STATUS_TIMEOUT", status::TIMEOUT.into());
    define("STATUS_REFUSED", status::REFUSED.into());
    define("STATUS_CLOSED", status::CLOSED.into());
    define("STATUS_PROTOCOL", status::PROTOCOL.into());
    define("STATUS_TOO_LONG", status::TOO_LONG.into());
    define("STATUS_RESET", status::RESET.into());
    define("STATUS_NOT_ALLOWED", status::NOT_ALLOWED.into());
    define("STATUS_EXHAUSTED", status::EXHAUSTED.into());
    define("STATUS_AGAIN", status::AGAIN.into());
    define("STATUS_DRAINING", status::DRAINING.into());
    define("STATUS_BAD_LENGTH", status::BAD_LENGTH.into());
    define("STATUS_REJECTED", status::REJECTED.into());
    define("STOP_RUN", stop::RUN);
    define("STOP_DRAIN", stop::DRAIN);
    define("STOP_NOW", stop::NOW);
    define("STATE_ABSENT", state::ABSENT);
    define("STATE_READY", state::READY);
    define("STATE_ENDED", state::ENDED);
    define("REASON_NONE", reason::NONE);
    define("REASON_STOPPED", reason::STOPPED);
    define("REASON_ENGINE_LOST", reason::ENGINE_LOST);
    define("REASON_RING_CORRUPT", reason::RING_CORRUPT);
    define("REASON_RETURNED", reason::RETURNED);
    define("REASON_CONTRACT", reason::CONTRACT);
    define("REASON_HUNG", reason::HUNG);
    define("REASON_REFUSED", reason::REFUSED);
    define("REASON_DEVICE_FAILED", reason::DEVICE_FAILED);
    define("REASON_LINK_LOST", reason::LINK_LOST);
    define("FEATURE_BUNDLES", feature::BUNDLES);
    define("RING_SERVER_RX", ring_kind::SERVER_RX.into());
    define("RING_SERVER_TX", ring_kind::SERVER_TX.into());
    define("RING_CLIENT_RX", ring_kind::CLIENT_RX.into());
    define("RING_CLIENT_TX", ring_kind::CLIENT_TX.into());
    define("RING_COMMANDS", ring_kind::COMMANDS.into());
    define("RING_COMPLETIONS", ring_kind::COMPLETIONS.into());
    define("RING_SOCKET_RX", ring_kind::SOCKET_RX.into());
    define("RING_SOCKET_TX", ring_kind::SOCKET_TX.into());
    define("RING_STREAM_RX", ring_kind::STREAM_RX.into());
    define("RING_STREAM_TX", ring_kind::STREAM_TX.into());
    define("RING_POOL", ring_kind::POOL.into());
    define("RING_VERSION_MQUEUE", ring_version::MQUEUE.into());
    define("RING_VERSION_COMMAND", ring_version::COMMAND.into());
    define("RING_VERSION_STREAM", ring_version::STREAM.into());
    define("RING_VERSION_POOL", ring_version::POOL.into());
    define("SOCKET_ACCEPT", socket_op::ACCEPT.into());
    define("SOCKET_CONNECT", socket_op::CONNECT.into());
    define("SOCKET_CLOSE", socket_op::CLOSE.into());
    define("SOCKET_NOTIFY", socket_op::NOTIFY.into());
    define("SOCKET_CANCEL", socket_op::CANCEL.into());
    define("SOCKET_DONE", socket_event::DONE.into());
    define("SOCKET_EVENT", socket_event::EVENT.into());
    define("SOCKET_CLOSE_ORDERLY", socket_close::ORDERLY.into());
    define("SOCKET_CLOSE_RESET", socket_close::RESET.into());
    for code in transfer_digest::TABLE.codes {
        define(&format!("TRANSFER_{}", code.constant), code.number.into());
    }
    for (name, value) in TRANSFER_VALUES {
        define(&format!("TRANSFER_{name}"), value.into());
    }
    define("STREAM_HEAD", stream_word::HEAD);
    define("STREAM_HEAD_END", stream_word::HEAD_END);
    define("STREAM_TAIL", stream_word::TAIL);
    define("STREAM_TAIL_END", stream_word::TAIL_END);
    define("STREAM_DATA", stream_word::DATA);
    define("RING_REQUIRED", ring_flags::REQUIRED.into());
    define("PROTOCOL_DOORBELL", protocol::DOORBELL.into());
    define("PROTOCOL_GRANULE8", protocol::GRANULE8.into());
    define("PROTOCOL_GRANULE16", protocol::GRANULE16.into());
    define("PLACEMENT_HOST", placement::HOST.into());
    define("WAIT_RX", wait::RX.into());
    define("WAIT_TX", wait::TX.into());
    define("WAIT_BACKEND", wait::BACKEND.into());
    define("WAIT_TIME", wait::TIME.into());
    define("WAIT_BUDGET", wait::BUDGET.into());
    let _ = writeln!(
        h,
        "#define SERVAL_ABI_NUMBER {ABI_VERSION} /* ABI_VERSION as a part of symbol names */"
    );
    for s in STRUCTS {
        let _ = writeln!(h, "\n/*{} */\nstruct {} {{", s.doc, s.c_name);
        for f in s.fields {
            let (ty, array) = c_type(f.ty);
            let _ = writeln!(h, "  {ty} {}{array}; /* {}:{} */", f.name, f.offset, f.doc);
        }
        let _ = writeln!(h, "}};");
    }
    h.push_str(
        "\n#if defined(__cplusplus)\n#define SERVAL_ASSERT_LAYOUT(what) static_assert(what, #what)\n\
         #else\n#define SERVAL_ASSERT_LAYOUT(what) _Static_assert(what, #what)\n#endif\n",
    );
    for s in STRUCTS {
        let _ = writeln!(h, "SERVAL_ASSERT_LAYOUT(sizeof(struct {}) == {});", s.c_name, s.size);
        for f in s.fields {
            let _ = writeln!(
                h,
                "SERVAL_ASSERT_LAYOUT(offsetof(struct {}, {}) == {});",
                s.c_name, f.name, f.offset
            );
        }
    }
    h.push_str("\n#endif\n");
    h
}

/// Every field of every shared structure with its offset and size: the table that `tests/layout.rs`
/// compares with the committed one, `tests/layout.snapshot`.
pub fn layout_table() -> String {
    use std::fmt::Write;
    let mut table = String::from(
        "# Generated by `cargo xtask gen-abi`. Every shared structure: field, type, offset, bytes.\n\
         # A change here needs a new ABI_VERSION.\n",
    );
    for s in STRUCTS {
        let _ = writeln!(table, "\n{} ({} bytes)", s.c_name, s.size);
        let ends = s.fields.iter().skip(1).map(|f| f.offset).chain([s.size]);
        for (field, end) in s.fields.iter().zip(ends) {
            let (name, ty, at) = (field.name, field.ty, field.offset);
            let _ = writeln!(table, "  {name:18} {ty:9} {at:4} {:4}", end - at);
        }
    }
    table
}

fn c_type(rust: &str) -> (String, String) {
    let scalar = |t: &str| match t {
        "f64" => "double".to_owned(),
        t => format!("uint{}_t", &t[1..]),
    };
    match rust.strip_prefix('[').and_then(|t| t.strip_suffix(']')).and_then(|t| t.split_once("; "))
    {
        Some((element, count)) => (scalar(element), format!("[{count}]")),
        None => (scalar(rust), String::new()),
    }
}
