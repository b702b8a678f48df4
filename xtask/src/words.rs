//! Words and phrases that do not belong into technical prose, each with what to write instead: part of `cargo xtask tidy`.
//!
//! [`FOLDERS`] lists where they are refused: in comments, error texts, help and scripts alike. Parts of identifiers are not
//! checked.

use crate::Findings;
use crate::files::File;

/// Folders and files in which the words are refused.
const FOLDERS: &[&str] = &[
    ".github/",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Containerfile",
    "Makefile",
    "ORDERING.md",
    "README.md",
    "SECURITY.md",
    "benches/",
    "crates/accel/",
    "crates/bench/",
    "crates/cli/",
    "crates/collective/",
    "crates/sockets/",
    "crates/engine/",
    "crates/mqueue-loom/",
    "crates/mqueue/",
    "crates/mutants/",
    "crates/remote/",
    "crates/server/",
    "crates/sim/",
    "crates/sys/",
    "crates/transfer/",
    "crates/wire/",
    "device/",
    "docs/",
    "examples/",
    "fuzz/",
    "integrations/",
    "lib/",
    "tools/",
    "xtask/",
];
/// Except for this table, and records, which are not rewritten.
const EXCEPT: &[&str] = &["docs/benchmarks/", "xtask/src/words.rs"];
/// Proper uses: a user's name, machine learning.
const ALLOWED: &[&str] = &["-u nobody", "\"nobody\"", "trains the lenet", "trains on it"];

/// What is refused, in lower case, and what to write instead.
const WORDS: &[(&str, &str)] = &[
    ("anew", "again; \"restarts\""),
    ("at hand", "available, given"),
    ("begins anew", "restarts"),
    ("comes to", "is, sums to, results in"),
    ("for ever", "indefinitely, without a limit"),
    ("farewell", "drain vote"),
    ("goes home", "is returned"),
    ("has its way", "say what happens"),
    ("is told", "is notified, gets, reads"),
    ("are told", "are notified, get, read"),
    ("let be", "left alone"),
    ("lives on", "survives, continues"),
    ("mend", "fix, repair"),
    ("nobody", "no process, no thread, nothing"),
    ("on its way", "in flight"),
    ("on their way", "in flight"),
    ("says so", "reports it, prints that"),
    ("so many", "the number"),
    ("somebody", "another process, another thread"),
    ("somebody's", "another process's"),
    ("nobody's", "unowned"),
    ("a train", "a GSO batch, a segment batch"),
    ("trains", "GSO batches, segment batches"),
    ("under way", "in flight, in progress"),
    ("what there is", "what is available, what exists"),
    ("slip of the pen", "typo"),
    ("shown out", "rejected, disconnected"),
    ("by turns", "in turn"),
    ("without more words", "by default"),
    ("is none of", "is not a"),
    ("hold still", "pause"),
    ("holds still", "pauses"),
    ("serve on", "keep serving"),
    ("whoever", "the process that, a caller that"),
    ("whose business", "responsibility"),
];

pub(crate) fn check(file: &File, findings: &mut Findings) {
    let listed = |paths: &[&str]| paths.iter().any(|path| file.path.starts_with(path));
    if !listed(FOLDERS) || listed(EXCEPT) {
        return;
    }
    for (line, text) in file.text.lines().enumerate() {
        for (word, instead) in found(text) {
            findings.push(format!("{}: {word:?}: write {instead}", file.at(line)));
        }
    }
}

/// The refused words of a line.
fn found(line: &str) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    let mut line = line.to_lowercase();
    for allowed in ALLOWED {
        line = line.replace(allowed, "");
    }
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    WORDS.iter().filter(move |(word, _)| {
        line.match_indices(word).any(|(at, _)| {
            let (before, after) = (&line[..at], &line[at + word.len()..]);
            !before.ends_with(is_part) && !after.starts_with(is_part)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_whole_and_in_any_case() {
        let words = |line: &str| found(line).map(|(word, _)| *word).collect::<Vec<_>>();
        assert_eq!(words("// Nobody waits."), ["nobody"]);
        assert_eq!(words("fn wrong_tokens_reach_nobody() {"), [""; 0]);
        assert_eq!(words("memcached -u nobody"), [""; 0]);
        assert_eq!(words("a recommendation, renewed"), [""; 0]);
        assert_eq!(words("\"a request under way\""), ["under way"]);
    }

    #[test]
    fn only_listed_folders_are_checked() {
        let count = |path: &str| {
            let mut findings = Findings::new();
            let file = File { path: path.to_owned(), text: "// nobody\n".to_owned() };
            check(&file, &mut findings);
            findings.len()
        };
        assert_eq!(count("crates/sys/src/x.rs"), 1);
        assert_eq!(count("docs/x.md"), 1);
        assert_eq!(count("docs/benchmarks/x.json"), 0);
        assert_eq!(count("LICENSE"), 0);
    }
}
