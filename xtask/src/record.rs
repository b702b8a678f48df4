//! Long runs on record: `cargo xtask record NAME -- COMMAND...` runs a command and keeps in
//! `docs/proof/NAME.json` what it was, of which commit, when, for how long, on what class of machine, how
//! it ended, and its last lines. `cargo xtask proof` reads them.
//!
//! On a machine without a checkout, run this program in the folder that the command's programs were carried to.
//!
//! A longer run of the same name is worth more: a shorter one does not replace it, unless the longer one
//! failed or the shorter one does, or it is the same command, which did the same in less time.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, IsTerminal};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value as Json, json};

use crate::Findings;
use crate::files::root;

/// The folder of the records.
pub(crate) const FOLDER: &str = "docs/proof";
/// Last lines of the command that are kept.
const LINES_MAX: usize = 40;
/// Characters of a line that are kept.
const LINE_CHARS_MAX: usize = 400;

/// A record's path from the root.
pub(crate) fn path_of(name: &str) -> String {
    format!("{FOLDER}/{name}.json")
}

/// Runs `words` and records it. A command that fails is a finding, and on record.
pub(crate) fn run(name: &str, words: &[&str]) -> Findings {
    match try_run(name, words) {
        Ok(()) => Findings::new(),
        Err(finding) => vec![finding],
    }
}

fn try_run(name: &str, words: &[&str]) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || !name.chars().all(plain) {
        return Err(format!("{name:?} is no name: lower-case letters, digits and dashes"));
    }
    let [program, arguments @ ..] = words else {
        return Err("say what to run: cargo xtask record NAME -- COMMAND...".to_owned());
    };
    let commit = commit()?;
    let date = said("date", &["-u", "+%Y-%m-%d"])?;
    let start = Instant::now();
    let child = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| format!("{program}: {error}"))?;
    let mut last = VecDeque::new();
    for line in BufReader::new(child.stdout.take().expect("it is piped")).lines() {
        let line = line.map_err(|error| format!("{program}: {error}"))?;
        println!("{line}");
        if last.len() == LINES_MAX {
            last.pop_front();
        }
        last.push_back(line.chars().take(LINE_CHARS_MAX).collect::<String>());
    }
    let status = child.wait().map_err(|error| format!("{program}: {error}"))?;
    let seconds = start.elapsed().as_secs();
    let passed = status.success();
    let record = json!({
        "name": name,
        "date": date,
        "commit": commit,
        "command": words.join(" "),
        "machine": machine(),
        "seconds": seconds,
        "outcome": if passed { "passed".to_owned() } else { format!("failed: {status}") },
        "last_lines": last,
    });
    let path = path_of(name);
    if passed && read(&path).is_ok_and(|old| is_worth_more(&old, &words.join(" "), seconds)) {
        if std::io::stdout().is_terminal() {
            println!("{path} keeps a longer run");
        }
        return Ok(());
    }
    let text = serde_json::to_string_pretty(&record).expect("JSON can be written") + "\n";
    std::fs::create_dir_all(root().join(FOLDER)).map_err(|error| format!("{FOLDER}: {error}"))?;
    std::fs::write(root().join(&path), text).map_err(|error| format!("{path}: {error}"))?;
    if passed { Ok(()) } else { Err(format!("`{}`: {status}", words.join(" "))) }
}

fn is_worth_more(record: &Json, command: &str, seconds: u64) -> bool {
    let longer = record["seconds"].as_u64().is_some_and(|old| old > seconds);
    record["outcome"] == "passed" && longer && record["command"] != command
}

/// Reads a record.
pub(crate) fn read(path: &str) -> Result<Json, String> {
    let text = std::fs::read_to_string(root().join(path)).map_err(|e| format!("{path}: {e}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))
}

/// What is wrong with a record, if anything: it must tell its command and commit, when it ran, and that
/// it passed.
pub(crate) fn fault(record: &Json) -> Option<String> {
    for field in ["command", "commit"] {
        if record[field].as_str().is_none_or(str::is_empty) {
            return Some(format!("has no {field}"));
        }
    }
    if !record["date"].is_string() && !record["ended_unix_s"].is_u64() {
        return Some("does not say when it ran".to_owned());
    }
    match record["outcome"].as_str() {
        // Records of fuzz targets exist only of runs that found nothing.
        Some("passed") => None,
        None if record["targets"].is_array() => None,
        other => Some(other.unwrap_or("has no outcome").to_owned()),
    }
}

/// The commit of the checkout; with a `+` if something is changed in it, records left out. Where programs were
/// carried to and there is no checkout, a file COMMIT beside them says it.
pub(crate) fn commit() -> Result<String, String> {
    if let Ok(carried) = std::fs::read_to_string(root().join("COMMIT")) {
        return Ok(carried.trim().to_owned());
    }
    let changes = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/proof"];
    let changed = !said("git", &changes)?.is_empty();
    Ok(said("git", &["rev-parse", "--short=12", "HEAD"])? + if changed { "+" } else { "" })
}

/// The commit that a record is of; one that came in pieces: that of the longest.
pub(crate) fn commit_of(record: &Json) -> String {
    let pieces = record["seconds_by_commit"].as_object().into_iter().flatten();
    let longest = pieces.max_by_key(|(_, seconds)| seconds.as_u64());
    longest
        .map(|(commit, _)| commit.as_str())
        .or(record["commit"].as_str())
        .unwrap_or_default()
        .to_owned()
}

/// How many commits since this one changed something under `paths`; `None` if the history here does not have it.
pub(crate) fn commits_since(commit: &str, paths: &[&str]) -> Option<u64> {
    let range = format!("{}..HEAD", commit.trim_end_matches('+'));
    let arguments = [&["rev-list", "--count", &range, "--"], paths].concat();
    let output = Command::new("git").args(arguments).current_dir(root()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().parse().ok())?
}

/// The class of this machine, without its name.
fn machine() -> String {
    let cores = crate::side_by_side::cores();
    format!("{cores} cores, {}", std::env::consts::ARCH)
}

/// What a command prints.
fn said(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).current_dir(root()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("`{program} {}`: {}", arguments.join(" "), output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_in_pieces_is_of_the_commit_that_ran_for_longest() {
        let pieces = json!({ "commit": "c", "seconds_by_commit": { "a": 5, "b": 9, "c": 1 } });
        assert_eq!(commit_of(&pieces), "b");
        assert_eq!(commit_of(&json!({ "commit": "c+" })), "c+");
        assert_eq!(commits_since("0000000000000000", &["."]), None);
    }

    #[test]
    fn a_record_must_say_what_it_shows() {
        let whole = json!({
            "command": "make soak", "commit": "abc", "date": "2026-01-01", "seconds": 60,
            "outcome": "passed",
        });
        assert_eq!(fault(&whole), None);
        for field in ["command", "commit", "date", "outcome"] {
            let mut lacking = whole.clone();
            lacking.as_object_mut().unwrap().remove(field);
            assert!(fault(&lacking).is_some(), "{field}");
        }
        let mut failed = whole.clone();
        failed["outcome"] = "failed: exit status: 1".into();
        assert_eq!(fault(&failed).unwrap(), "failed: exit status: 1");
        assert!(
            is_worth_more(&whole, "make short", 59) && !is_worth_more(&whole, "make short", 60)
        );
        assert!(!is_worth_more(&whole, "make soak", 59), "a later run of the same");
        assert!(!is_worth_more(&failed, "make short", 1), "a run that failed is replaced by any");
    }
}
