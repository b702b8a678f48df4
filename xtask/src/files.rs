//! The files of the checkout: tracked ones and new ones that git does not ignore.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root; where this program was not built, the folder it is run in.
pub(crate) fn root() -> &'static Path {
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root");
    if built_in.exists() { built_in } else { Path::new(".") }
}

/// A text file.
pub(crate) struct File {
    /// Relative to the root, with forward slashes.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// The part of the path after the last dot.
    pub(crate) fn extension(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    /// `path:line`, counting from zero.
    pub(crate) fn at(&self, line: usize) -> String {
        format!("{}:{}", self.path, line + 1)
    }
}

/// Every text file of the checkout; what is not UTF-8 is not text.
pub(crate) fn all() -> Vec<File> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git must be installed");
    assert!(output.status.success(), "git ls-files failed: this is not a checkout");
    let list = String::from_utf8(output.stdout).expect("paths are UTF-8");
    let read = |path: &str| {
        let text = std::fs::read_to_string(root().join(PathBuf::from(path))).ok()?;
        Some(File { path: path.to_owned(), text })
    };
    list.lines().filter_map(read).collect()
}
