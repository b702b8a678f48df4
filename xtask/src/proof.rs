//! What Serval promises and what checks it: `cargo xtask proof` holds docs/proof.md to the repository.
//!
//! Each row of its tables is a sentence, what checks it, and a state: `proven`, `half` or `open`, the
//! last two with what is missing. Every test, fuzz target, file, Makefile target, step and record that a row
//! names must exist; a proven or half-proven sentence names at least one; every record is named by a row
//! and is of a run that passed.
//!
//! A record is of the build that ran, and ages with every commit to what it covers ([`COVERED`]). Behind more than
//! [`COMMITS_MAX`] of them the sentence that names it is `proven by an older build`; every age is printed. No check
//! fails because a record has grown old: that would fail with commits that change nothing here.

use std::collections::BTreeSet;

use crate::claims::{self, quoted};
use crate::files::{self, File, root};
use crate::{Findings, ci, record};

const DOCUMENT: &str = "docs/proof.md";
/// Commits to what a record covers until it counts as of an older build.
const COMMITS_MAX: u64 = 20;
/// What the programs of a record are made of, by its name.
const COVERED: &[(&str, &[&str])] = &[
    (
        "fuzz",
        &[
            "crates/mqueue/src",
            "crates/wire/src",
            "crates/engine/src",
            "crates/serval/src/config",
            "crates/serval/src/command/control",
            "crates/serval/src/exporter",
            "fuzz",
        ],
    ),
    (
        "gpu",
        &[
            "crates/accel/src",
            "crates/mqueue/src",
            "crates/engine/src",
            "crates/serval/src/runtime",
            "device",
        ],
    ),
    ("limits", WHOLE_SERVER),
    ("litmus", &["crates/mqueue/src", "crates/serval/src/litmus", "crates/serval/src/litmus.rs"]),
    ("miri", &["crates/mqueue", "crates/wire"]),
    ("seeds", &["crates/engine/src", "crates/mqueue/src", "crates/wire/src", "crates/sim/src"]),
    ("soak", WHOLE_SERVER),
];
const WHOLE_SERVER: &[&str] = &[
    "crates/accel/src",
    "crates/engine/src",
    "crates/mqueue/src",
    "crates/serval/src",
    "crates/sys/src",
    "crates/wire/src",
];
/// How a state begins that rests on a record which has grown old.
const OLDER: &str = "proven by an older build";

/// Sentences by state.
#[derive(Debug, Default)]
struct Count {
    proven: usize,
    /// Of these, by records that have grown old.
    older: usize,
    half: usize,
    open: Vec<String>,
}

/// Checks the document; a line about what is proven and one for every sentence that is not.
pub(crate) fn check() -> Result<Vec<String>, Findings> {
    let files = files::all();
    let Some(document) = files.iter().find(|file| file.path == DOCUMENT) else {
        return Err(vec![format!("there is no {DOCUMENT}")]);
    };
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap_or_default();
    let mut findings = Findings::new();
    let mut count = Count::default();
    let mut records = BTreeSet::new();
    let ages = ages(&files, &mut findings);
    let mut lines = Vec::new();
    for (line, text) in document.text.lines().enumerate() {
        if let Some((sentence, evidence, state)) = row(text) {
            let known =
                evidence_of(document, line, evidence, &makefile, &mut records, &mut findings);
            let old = quoted(evidence).any(|name| ages.iter().any(|age| age.is_old_of(name)));
            let named = quoted(evidence).any(|name| ages.iter().any(|age| age.path == name));
            match (state.starts_with(OLDER), old) {
                (true, false) if named => findings.push(format!(
                    "{}: no record that it names is of an older build any more",
                    document.at(line)
                )),
                (true, false) => {
                    findings.push(format!("{}: it names no record", document.at(line)));
                }
                (true, true) => count.older += 1,
                (false, true) if state.starts_with("proven") => {
                    count.older += 1;
                    lines.push(format!("{OLDER}: {sentence}"));
                }
                (false, _) => {}
            }
            match state.split([' ', ':', ';']).next() {
                Some("proven" | "half") if known == 0 => {
                    findings.push(format!("{}: {state} by nothing", document.at(line)));
                }
                Some("proven") => count.proven += 1,
                Some("half") if state.len() > "half: ".len() => count.half += 1,
                Some("open") => count.open.push(sentence.to_owned()),
                _ => findings.push(format!(
                    "{}: a state is `proven`, `half: WHAT IS MISSING` or `open: WHY`",
                    document.at(line)
                )),
            }
        }
    }
    findings.extend(unnamed_records(&files, &records));
    if count.proven == 0 {
        findings.push(format!("{DOCUMENT} proves nothing"));
    }
    if !findings.is_empty() {
        return Err(findings);
    }
    let Count { proven, older, half, open } = count;
    let summary = format!(
        "{proven} sentences proven, {older} of them by an older build, {half} half, {} open",
        open.len()
    );
    let mut lines: Vec<String> = std::iter::once(summary).chain(lines).collect();
    lines.extend(ages.iter().map(Age::line));
    lines.extend(open.into_iter().map(|sentence| format!("open: {sentence}")));
    Ok(lines)
}

/// Sentence, evidence and state of a row; `None` for anything else, heads of tables among it.
fn row(line: &str) -> Option<(&str, &str, &str)> {
    let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').collect();
    let [sentence, evidence, state] = cells[..] else { return None };
    let head = sentence.trim().chars().all(|c| c == '-') || state.trim() == "state";
    (!head).then(|| (sentence.trim(), evidence.trim(), state.trim()))
}

/// How much evidence a row names; what of it does not exist is a finding.
fn evidence_of(
    document: &File,
    line: usize,
    text: &str,
    makefile: &str,
    records: &mut BTreeSet<String>,
    findings: &mut Findings,
) -> usize {
    let mut known = claims::check_line(document, line, text, findings);
    for name in quoted(text).filter(|name| !name.contains("::")) {
        let exists = if let Some(target) = name.strip_prefix("make ") {
            let target = target.split(' ').next().unwrap_or_default();
            makefile.lines().any(|line| line.starts_with(&format!("{target}:")))
        } else if let Some(step) = name.strip_prefix("cargo xtask ci ") {
            ci::has_step(step)
        } else if let Some(chore) = name.strip_prefix("cargo xtask ") {
            let chore = chore.split(' ').next().unwrap_or_default();
            crate::USAGE.lines().any(|line| line.split_whitespace().next() == Some(chore))
        } else if name.starts_with(record::FOLDER) {
            records.insert(name.to_owned());
            record::read(name).is_ok()
        } else if name.contains('/') {
            root().join(name).exists()
        } else {
            continue;
        };
        known += 1;
        if !exists {
            findings.push(format!("{}: there is no {name}", document.at(line)));
        }
    }
    known
}

/// How old a record is.
struct Age {
    path: String,
    commit: String,
    /// Commits to what it covers since; `None` where the commit is not in the history at hand.
    commits: Option<u64>,
}

impl Age {
    fn is_old(&self) -> bool {
        self.commits.is_some_and(|commits| commits > COMMITS_MAX)
    }

    fn is_old_of(&self, path: &str) -> bool {
        self.path == path && self.is_old()
    }

    fn line(&self) -> String {
        let Self { path, commit, commits } = self;
        match commits {
            None => format!("{path}: of {commit}, which is not in the history here"),
            Some(commits) => {
                let old = if self.is_old() { ": an older build" } else { "" };
                format!("{path}: of {commit}, {commits} commits ago in what it covers{old}")
            }
        }
    }
}

/// The ages of all records. A record of whose programs nothing is known is a finding.
fn ages(files: &[File], findings: &mut Findings) -> Vec<Age> {
    let mut ages = Vec::new();
    for file in files {
        let name = file.path.strip_prefix(record::FOLDER).and_then(|rest| rest.strip_prefix('/'));
        let Some(name) = name.and_then(|name| name.strip_suffix(".json")) else { continue };
        let Some((_, covered)) = COVERED.iter().find(|(known, _)| *known == name) else {
            findings.push(format!(
                "{}: say in COVERED of xtask/src/proof.rs what it covers",
                file.path
            ));
            continue;
        };
        let Ok(record) = record::read(&file.path) else { continue };
        let commit = record::commit_of(&record);
        let commits = record::commits_since(&commit, covered);
        ages.push(Age { path: file.path.clone(), commit, commits });
    }
    ages
}

/// Records that no row names, and those that show nothing.
fn unnamed_records(files: &[File], named: &BTreeSet<String>) -> Findings {
    let mut findings = Findings::new();
    let is_record =
        |file: &&File| file.path.starts_with(record::FOLDER) && file.extension() == "json";
    for file in files.iter().filter(is_record) {
        if !named.contains(&file.path) {
            findings.push(format!("{} is not named in {DOCUMENT}", file.path));
        }
        match record::read(&file.path) {
            Ok(record) => findings
                .extend(record::fault(&record).map(|fault| format!("{}: {fault}", file.path))),
            Err(error) => findings.push(error),
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_told_from_heads_and_prose() {
        assert_eq!(
            row("| A holds | `make test` | proven |"),
            Some(("A holds", "`make test`", "proven"))
        );
        for other in
            ["| sentence | checked by | state |", "|---|---|---|", "text | text", "| a | b |"]
        {
            assert_eq!(row(other), None, "{other}");
        }
    }

    #[test]
    fn a_record_grows_old_with_what_it_covers() {
        let age = |commits| Age { path: "r.json".to_owned(), commit: "abc".to_owned(), commits };
        assert!(!age(Some(COMMITS_MAX)).is_old() && age(Some(COMMITS_MAX + 1)).is_old());
        assert!(!age(None).is_old() && age(None).line().contains("not in the history"));
        assert!(age(Some(99)).is_old_of("r.json") && !age(Some(99)).is_old_of("s.json"));
        assert!(age(Some(99)).line().ends_with("99 commits ago in what it covers: an older build"));
        let mut findings = Findings::new();
        let unknown =
            File { path: format!("{}/of-nothing.json", record::FOLDER), text: String::new() };
        assert!(ages(&[unknown], &mut findings).is_empty());
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn what_records_cover_exists() {
        for path in COVERED.iter().flat_map(|(_, paths)| paths.iter()) {
            assert!(root().join(path).exists(), "{path}");
        }
    }

    #[test]
    fn evidence_must_exist() {
        let document = File { path: "a.md".to_owned(), text: String::new() };
        let evidence = |text: &str| {
            let (mut records, mut findings) = (BTreeSet::new(), Findings::new());
            let makefile = "test: setup\n";
            let known = evidence_of(&document, 0, text, makefile, &mut records, &mut findings);
            (known, findings.len())
        };
        assert_eq!(evidence("`make test`, `cargo xtask ci miri`, `cargo xtask edges`"), (3, 0));
        assert_eq!(
            evidence("`make nothing`, `cargo xtask ci nothing`, `cargo xtask nothing`"),
            (3, 3)
        );
        assert_eq!(evidence("`xtask/src/proof.rs`, `docs/proof/nothing.json`"), (2, 1));
        assert_eq!(evidence("the word `serval`"), (0, 0));
    }
}
