//! Where a record comes from: a measurement counts if its sources can be built again, so its record names a commit of this
//! history, or has the hash of the sources of one (`tools/source-tree`), and was not made from changed files.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value as Json;

use crate::files::{git, root};

/// The commits that the current one contains.
pub(crate) trait History {
    /// How many commits the current one is ahead of `commit`; `None` if it does not contain that one.
    fn age(&self, commit: &str) -> Option<usize>;
    /// The newest commit whose sources have this hash.
    fn commit_of(&self, tree: &str) -> Option<String>;
}

/// How many commits are newer than the sources of a record; or why the record is refused.
pub(crate) fn age(record: &Json, history: &dyn History) -> Result<usize, String> {
    let machine = &record["machine"];
    let text = |key: &str| machine[key].as_str().unwrap_or_default();
    if machine["dirty"].as_bool() == Some(true) {
        return Err("it was measured from files that differed from their commit".to_owned());
    }
    let (commit, tree) = (text("commit"), text("tree"));
    if commit.is_empty() && tree.is_empty() {
        return Err("it names no commit".to_owned());
    }
    history
        .age(commit)
        .or_else(|| history.age(&history.commit_of(tree)?))
        .ok_or_else(|| format!("its commit {commit:?} is not in this history, nor are its sources"))
}

/// The history of the checkout.
pub(crate) struct Checkout {
    ages: RefCell<HashMap<String, Option<usize>>>,
    trees: RefCell<HashMap<String, Option<String>>>,
}

impl Checkout {
    /// The error says why the commits of records cannot be checked here.
    pub(crate) fn open() -> Result<Self, String> {
        has_history(root())?;
        Ok(Self { ages: RefCell::default(), trees: RefCell::default() })
    }
}

/// Whether a folder is the root of a checkout with the whole history; the error says why not.
fn has_history(folder: &Path) -> Result<(), String> {
    let git = |argument: &str| {
        let output = Command::new("git").current_dir(folder).args(["rev-parse", argument]).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    };
    // The checkout of another project may contain the unpacked sources of this one.
    let is_root =
        |top: String| folder.canonicalize().is_ok_and(|here| here.as_os_str() == &top[..]);
    if !git("--show-toplevel").is_some_and(is_root) {
        return Err("this is not a git checkout".to_owned());
    }
    match git("--is-shallow-repository").as_deref() {
        Some("false") => Ok(()),
        _ => Err("this is a shallow clone; `git fetch --unshallow` gets the rest".to_owned()),
    }
}

/// A commit or the hash of sources, as git writes them: no text of a record becomes an option of git.
fn is_hash(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

impl History for Checkout {
    fn age(&self, commit: &str) -> Option<usize> {
        let find = || {
            git(&["merge-base", "--is-ancestor", commit, "HEAD"]).ok()?;
            git(&["rev-list", "--count", &format!("{commit}..HEAD")]).ok()?.trim().parse().ok()
        };
        is_hash(commit)
            .then(|| *self.ages.borrow_mut().entry(commit.to_owned()).or_insert_with(find))?
    }

    fn commit_of(&self, tree: &str) -> Option<String> {
        let find = || {
            let mut find = Command::new(root().join("tools/source-tree"));
            let output = find.args(["find", tree]).output().ok()?;
            let found = output.status.success();
            found.then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        is_hash(tree)
            .then(|| self.trees.borrow_mut().entry(tree.to_owned()).or_insert_with(find).clone())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A history of one commit, 301 commits ago.
    struct One;

    impl History for One {
        fn age(&self, commit: &str) -> Option<usize> {
            (commit == "46c35512").then_some(301)
        }

        fn commit_of(&self, tree: &str) -> Option<String> {
            (tree == "a3eec13b").then(|| "46c35512".to_owned())
        }
    }

    #[test]
    fn a_record_needs_a_commit_or_sources_of_this_history() {
        let of = |commit: &str, tree: Option<&str>, dirty: bool| {
            let machine = json!({ "commit": commit, "tree": tree, "dirty": dirty });
            age(&json!({ "machine": machine }), &One)
        };
        assert_eq!(of("46c35512", None, false), Ok(301));
        assert_eq!(of("deadbeef", Some("a3eec13b"), false), Ok(301));
        for (refused, why) in [
            (of("46c35512", Some("a3eec13b"), true), "differed"),
            (of("", None, false), "names no commit"),
            (of("deadbeef", None, false), "not in this history"),
            (of("deadbeef", Some("deadbeef"), false), "not in this history"),
            (age(&json!({}), &One), "names no commit"),
        ] {
            assert!(refused.as_ref().is_err_and(|found| found.contains(why)), "{refused:?}");
        }
    }

    #[test]
    fn a_shallow_clone_and_unpacked_sources_have_no_history() {
        let folder = std::env::temp_dir().join(format!("xtask-origin-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (whole, shallow) = (folder.join("whole"), folder.join("shallow"));
        let git = |arguments: &[&str]| {
            let mut git = Command::new("git");
            git.args(["-c", "user.name=a", "-c", "user.email=a@b"]).args(arguments);
            assert!(git.output().unwrap().status.success(), "{arguments:?}");
        };
        let [whole_path, shallow_path] = [&whole, &shallow].map(|path| path.to_str().unwrap());
        git(&["init", "-q", whole_path]);
        for message in ["one", "two"] {
            git(&["-C", whole_path, "commit", "-q", "--allow-empty", "-m", message]);
        }
        git(&["clone", "-q", "--depth=1", &format!("file://{whole_path}"), shallow_path]);
        let inner = whole.join("unpacked");
        std::fs::create_dir(&inner).unwrap();
        assert_eq!(has_history(&whole), Ok(()));
        assert!(has_history(&shallow).unwrap_err().contains("shallow clone"));
        for other in [&inner, &folder] {
            assert!(has_history(other).unwrap_err().contains("not a git checkout"), "{other:?}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_sources_of_this_checkout_are_found_in_its_history() {
        let Ok(checkout) = Checkout::open() else {
            println!("SKIPPED: this is no complete checkout");
            return;
        };
        let head = git(&["rev-parse", "HEAD"]).unwrap();
        assert_eq!(checkout.age(head.trim()), Some(0));
        assert_eq!(checkout.age("0000000000000000000000000000000000000000"), None);
        assert_eq!(checkout.age("--help"), None);
        let output = Command::new(root().join("tools/source-tree")).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let mut parts = printed.split_whitespace();
        let commit = parts.next().unwrap();
        let age = checkout.age(commit.trim_end_matches("-dirty"));
        assert!(age.is_some(), "{printed}");
        // Where the files are those of the commit, which editing them changes.
        if let Some(tree) = parts.next() {
            let found = checkout.commit_of(tree).unwrap();
            assert!(checkout.age(&found) <= age, "{found} {printed}");
        }
    }
}
