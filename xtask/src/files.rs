//! The files of the checkout: tracked ones, and new ones that git does not ignore.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root; the working directory if this program was built elsewhere.
pub(crate) fn root() -> &'static Path {
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root");
    if built_in.exists() { built_in } else { Path::new(".") }
}

/// The folder where cargo puts what it builds.
pub(crate) fn built() -> PathBuf {
    built_in(std::env::var_os("CARGO_TARGET_DIR"))
}

/// The same with the value of `CARGO_TARGET_DIR`, which may be relative to the root, where cargo runs.
fn built_in(target: Option<OsString>) -> PathBuf {
    root().join(target.filter(|target| !target.is_empty()).unwrap_or_else(|| "target".into()))
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

/// Every text file of the checkout; files that are not UTF-8 are left out.
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

/// Paths that changed since this branch left `base`, including new files.
pub(crate) fn changed_since(base: &str) -> Result<Vec<String>, String> {
    let from = git(&["merge-base", base, "HEAD"]).map_err(|error| {
        format!("{error}; name a commit to compare with: cargo xtask ci changed BASE")
    })?;
    let changed = git(&["diff", "--name-only", from.trim()])?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(changed.lines().chain(new.lines()).map(str::to_owned).collect())
}

/// The output of git in the root.
pub(crate) fn git(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git").args(arguments).current_dir(root()).output();
    let output = output.map_err(|error| format!("git: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

/// What a task that writes files says about one of them.
pub(crate) fn changed(path: &str, changed: bool) -> String {
    format!("{path}: {}", if changed { "written" } else { "unchanged" })
}

/// Lines before the file's test module.
pub(crate) fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let starts_tests =
        |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod tests");
    lines.windows(2).position(starts_tests).unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_programs_are_where_cargo_puts_them() {
        for (target, folder) in [
            (None, root().join("target")),
            (Some(""), root().join("target")),
            (Some("elsewhere"), root().join("elsewhere")),
            (Some("/srv/built"), PathBuf::from("/srv/built")),
        ] {
            assert_eq!(built_in(target.map(OsString::from)), folder);
        }
    }
}
