//! Which steps have passed on which sources, so that `cargo xtask ci all` goes on where it was interrupted.
//!
//! `target/ci-passed/STEP` has the hash of the tree on which the step passed last: that of all files that git does not ignore,
//! committed or not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::files::root;

/// The steps that have passed on one tree.
pub(super) struct Passed {
    /// The repository.
    root: PathBuf,
    /// None: git does not work here, so nothing is known or stored.
    tree: Option<String>,
}

impl Passed {
    /// Those of the sources as they are now.
    pub(super) fn of_sources() -> Self {
        Self::of(root())
    }

    fn of(root: &Path) -> Self {
        Self { root: root.to_owned(), tree: tree_hash(root) }
    }

    fn folder(&self) -> PathBuf {
        self.root.join("target/ci-passed")
    }

    pub(super) fn contains(&self, step: &str) -> bool {
        let stored = fs::read_to_string(self.folder().join(step)).ok();
        self.tree.is_some() && stored == self.tree
    }

    /// The step has passed. Sources that were changed meanwhile are others: nothing is stored.
    pub(super) fn insert(&self, step: &str) {
        let Some(tree) = &self.tree else { return };
        if tree_hash(&self.root).as_ref() == Some(tree) && fs::create_dir_all(self.folder()).is_ok()
        {
            // Best effort: without the file the step runs again.
            let _ = fs::write(self.folder().join(step), tree);
        }
    }
}

/// The hash of the tree that a commit of all files would have now.
fn tree_hash(root: &Path) -> Option<String> {
    let index = root.join(format!("target/ci-index-{}", std::process::id()));
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(arguments).env("GIT_INDEX_FILE", &index).current_dir(root);
        let output = git.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let tree = git(&["read-tree", "HEAD"])
        .and_then(|_| git(&["add", "--all", "."]))
        .and_then(|_| git(&["write-tree"]));
    let _ = fs::remove_file(&index);
    tree
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_passed_on_the_tree_on_which_it_passed() {
        let folder = std::env::temp_dir().join(format!("serval-ci-passed-{}", std::process::id()));
        fs::create_dir_all(folder.join("target")).unwrap();
        fs::write(folder.join(".gitignore"), "/target\n").unwrap();
        let git = |arguments: &[&str]| {
            let git = Command::new("git").args(arguments).current_dir(&folder).output();
            assert!(git.unwrap().status.success());
        };
        git(&["init", "--quiet"]);
        git(&[
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "commit",
            "--quiet",
            "--allow-empty",
            "-m",
            "first",
        ]);
        let passed = Passed::of(&folder);
        assert!(!passed.contains("fmt"));
        passed.insert("fmt");
        assert!(passed.contains("fmt") && !passed.contains("tidy"));
        fs::write(folder.join("source"), "changed").unwrap();
        let changed = Passed::of(&folder);
        assert!(!changed.contains("fmt"));
        // The sources were changed after the steps began.
        passed.insert("tidy");
        assert!(!passed.contains("tidy") && !changed.contains("tidy"));
        fs::remove_dir_all(folder).ok();
    }
}
