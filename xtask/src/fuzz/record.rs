//! What fuzzing has shown, on record: `docs/proof/fuzz.json`.

use std::fs;
use std::path::Path;

use serde_json::{Value as Json, json};

use super::{Options, Run};
use crate::record::commit;

/// Where the record is kept.
pub(super) const PATH: &str = "docs/proof/fuzz.json";
/// The file beside carried programs that says which commit they are of.
pub(super) const COMMIT: &str = "COMMIT";

/// The commit of the programs in `binaries`, or of the checkout.
fn commit_of(binaries: Option<&Path>) -> Result<String, String> {
    match binaries.and_then(|folder| fs::read_to_string(folder.join(COMMIT)).ok()) {
        Some(text) => Ok(text.trim().to_owned()),
        None => commit(),
    }
}

/// Adds runs to the record at `path`. To begin it anew, remove it.
pub(super) fn add(path: &Path, options: &Options, runs: &[Run]) -> Result<(), String> {
    let commit = commit_of(options.binaries.as_deref())?;
    let text = fs::read_to_string(path).unwrap_or_default();
    let old: Json = serde_json::from_str(&text).unwrap_or_default();
    let record = added(&old, &commit, options.seconds, runs);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let text = serde_json::to_string_pretty(&record).expect("JSON can be written") + "\n";
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The record with these runs: processor time and inputs add up, coverage is the best, and every commit whose
/// programs ran is named with the share of the time that it had.
fn added(old: &Json, commit: &str, seconds: u32, runs: &[Run]) -> Json {
    let seconds_since_1970 = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let before = |target: &str, field: &str| {
        let targets = old["targets"].as_array().into_iter().flatten();
        let same = targets.into_iter().find(|entry| entry["name"] == target);
        same.and_then(|entry| entry[field].as_u64()).unwrap_or(0)
    };
    let targets: Vec<Json> = runs
        .iter()
        .map(|run| {
            json!({
                "name": run.target,
                "seconds": before(&run.target, "seconds") + run.seconds,
                "inputs": before(&run.target, "inputs") + run.inputs,
                "edges": before(&run.target, "edges").max(run.edges),
                "crashes": 0,
            })
        })
        .collect();
    let mut commits = old["seconds_by_commit"].as_object().cloned().unwrap_or_default();
    let of_commit = commits.get(commit).and_then(Json::as_u64).unwrap_or(0);
    let all: u64 = runs.iter().map(|run| run.seconds).sum();
    commits.insert(commit.to_owned(), json!(of_commit + all));
    json!({
        "what": "every fuzz target over its corpus and what it had learnt, by seconds of one core; a run that finds something is not recorded but mended",
        "command": format!("cargo xtask fuzz {seconds} --record"),
        "commit": commit,
        "ended_unix_s": seconds_since_1970,
        "seconds_by_commit": commits,
        "targets": targets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_add_up_and_name_their_commits() {
        let run = |seconds, inputs, edges| {
            vec![Run { target: "ring".to_owned(), seconds, inputs, edges }]
        };
        let first = added(&Json::Null, "abc", 9, &run(9, 100, 50));
        let both = added(&first, "abc", 5, &run(5, 10, 40));
        let both = added(&both, "def", 2, &run(2, 1, 1));
        let ring = &both["targets"][0];
        assert_eq!((ring["seconds"].as_u64(), ring["inputs"].as_u64()), (Some(16), Some(111)));
        assert_eq!(both["seconds_by_commit"], json!({ "abc": 14, "def": 2 }));
        assert_eq!((ring["edges"].as_u64(), ring["name"].as_str()), (Some(50), Some("ring")));
    }
}
