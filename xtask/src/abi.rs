//! The generated files of the region's layout: `cargo xtask gen-abi`.

use crate::Findings;
use crate::files::root;

/// The generated files: path and content.
fn files() -> [(&'static str, String); 2] {
    [
        ("device/include/serval/abi.h", mqueue::abi::c_header()),
        ("crates/mqueue/tests/layout.snapshot", mqueue::abi::layout_table()),
    ]
}

/// Writes them.
pub(crate) fn generate() -> Findings {
    let write = |(path, text): (&str, String)| {
        std::fs::write(root().join(path), text).err().map(|error| format!("{path}: {error}"))
    };
    files().into_iter().filter_map(write).collect()
}

/// Which of them are not what would be generated now.
pub(crate) fn differences() -> Findings {
    let differs = |(path, text): (&str, String)| {
        let committed = std::fs::read_to_string(root().join(path)).unwrap_or_default();
        (committed != text).then(|| format!("{path} is not up to date: run `cargo xtask gen-abi`"))
    };
    files().into_iter().filter_map(differs).collect()
}
