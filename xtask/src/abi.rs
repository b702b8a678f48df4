//! The generated files of what crosses between programs: `cargo xtask gen-abi`. The region's layout comes
//! from `mqueue::abi`, the handshake of shared-memory ports, the attach protocol and the drop reasons (for the C client
//! and for operators) from `wire`.

use crate::files::{changed, root};
use crate::{Findings, codes, drop_reasons};

/// The generated files: path and content, or why there is none.
fn files() -> [(&'static str, Result<String, String>); 8] {
    let [abi, layout, handshake, attach, c_codes, python] = [
        ("device/include/serval/abi.h", mqueue::abi::c_header()),
        ("crates/mqueue/tests/layout.snapshot", mqueue::abi::layout_table()),
        ("lib/src/shm/handshake.h", handshake_header()),
        ("lib/src/attach/protocol.h", attach_header()),
        ("lib/include/serval/transfer_codes.h", codes::c_header()),
        ("python/serval/_codes.py", codes::python_module()),
    ]
    .map(|(path, text)| (path, Ok(text)));
    [abi, layout, handshake, attach, c_codes, python, codes::page(), drop_reasons::page()]
}

/// The attach protocol, for the C++ attach library.
fn attach_header() -> String {
    use wire::attach::*;
    let numbers = [
        ("MESSAGE_BYTES_MAX", MESSAGE_BYTES_MAX),
        ("DESCRIPTORS", DESCRIPTORS),
        ("NAME_BYTES_MAX", NAME_BYTES_MAX),
        ("KERNEL_BYTES_MAX", KERNEL_BYTES_MAX),
        ("PARAM_NAME_BYTES_MAX", PARAM_NAME_BYTES_MAX),
        ("TEXT_BYTES_MAX", TEXT_BYTES_MAX),
    ];
    let codes = [
        ("VERSION", VERSION),
        ("HELLO", HELLO),
        ("OFFER", OFFER),
        ("REFUSE", REFUSE),
        ("READY", READY),
        ("STOP", STOP),
        ("BYE", BYE),
    ];
    let codes = codes.map(|(name, code)| (name, code as usize));
    let define =
        |(name, number): &(&str, usize)| format!("#define SERVAL_ATTACH_{name} {number}u\n");
    let defines: String = codes.iter().chain(&numbers).map(define).collect();
    format!(
        "/* Generated from crates/wire by `cargo xtask gen-abi`. Do not edit.\n \
         * The concepts are explained in attach.rs there. */\n\
         #ifndef SERVAL_ATTACH_PROTOCOL_H\n#define SERVAL_ATTACH_PROTOCOL_H\n\n\
         #define SERVAL_ATTACH_MAGIC {MAGIC}ull\n{defines}\n#endif\n"
    )
}

/// The handshake of shared-memory ports and the names of the drop reasons, for the C client library.
fn handshake_header() -> String {
    use wire::handshake::{ANSWER_BYTES_MAX, Answer, DESCRIPTORS, HELLO_BYTES, MAGIC, VERSION};
    let text_at = Answer::Refused(String::new()).encode().len();
    let mut names = String::new();
    for reason in wire::DropReason::ALL {
        names += &format!("    X({}, {}) \\\n", reason.code(), reason.name());
    }
    format!(
        "/* Generated from crates/wire by `cargo xtask gen-abi`. Do not edit.\n \
         * The concepts are explained in handshake.rs and drop_reason.rs there. */\n\
         #ifndef SERVAL_CLIENT_HANDSHAKE_H\n#define SERVAL_CLIENT_HANDSHAKE_H\n\n\
         #include <stdint.h>\n\n\
         #define SERVAL_HANDSHAKE_MAGIC {MAGIC}ull\n\
         #define SERVAL_HANDSHAKE_VERSION {VERSION}u\n\
         #define SERVAL_HANDSHAKE_HELLO_BYTES {HELLO_BYTES}u\n\
         #define SERVAL_HANDSHAKE_ANSWER_BYTES {text_at}u\n\
         #define SERVAL_HANDSHAKE_ANSWER_BYTES_MAX {ANSWER_BYTES_MAX}u\n\
         #define SERVAL_HANDSHAKE_DESCRIPTORS {DESCRIPTORS}u\n\n\
         #define SERVAL_DROP_REASONS(X) \\\n{names}\n\
         #endif\n"
    )
}

/// Writes those that change: what is built from the others stays up to date. Returns a line for each.
pub(crate) fn generate() -> Result<Vec<String>, Findings> {
    let mut lines = Vec::new();
    for (path, text) in files() {
        let text = text.map_err(|why| vec![why])?;
        let same = std::fs::read_to_string(root().join(path)).is_ok_and(|found| found == text);
        if !same {
            std::fs::write(root().join(path), text).map_err(|e| vec![format!("{path}: {e}")])?;
        }
        lines.push(changed(path, !same));
    }
    Ok(lines)
}

/// Which of them are not what would be generated now.
pub(crate) fn differences() -> Findings {
    let differs = |(path, text): (&str, Result<String, String>)| {
        let committed = std::fs::read_to_string(root().join(path)).unwrap_or_default();
        match text {
            Ok(text) if text == committed => None,
            Ok(_) => Some(format!("{path} is not up to date: run `cargo xtask gen-abi`")),
            Err(why) => Some(why),
        }
    };
    files().into_iter().filter_map(differs).collect()
}
