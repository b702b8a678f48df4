//! What Serval promises and what checks it: `cargo xtask proof` holds docs/proof.md to the repository.
//!
//! Each row of its tables is a sentence, what checks it, and a state: `proven`, `half` or `open`, the
//! last two with what is missing. Every test, fuzz target, file, Makefile target, step and record that a row
//! names must exist; a proven or half-proven sentence names at least one; every record is named by a row
//! and is of a run that passed.

use std::collections::BTreeSet;

use crate::claims::{self, quoted};
use crate::files::{self, File, root};
use crate::{Findings, ci, record};

const DOCUMENT: &str = "docs/proof.md";

/// Sentences by state.
#[derive(Debug, Default)]
struct Count {
    proven: usize,
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
    for (line, text) in document.text.lines().enumerate() {
        if let Some((sentence, evidence, state)) = row(text) {
            let known =
                evidence_of(document, line, evidence, &makefile, &mut records, &mut findings);
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
    let Count { proven, half, open } = count;
    let mut lines = vec![format!("{proven} sentences proven, {half} half, {} open", open.len())];
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
    fn evidence_must_exist() {
        let document = File { path: "a.md".to_owned(), text: String::new() };
        let evidence = |text: &str| {
            let (mut records, mut findings) = (BTreeSet::new(), Findings::new());
            let makefile = "test: setup\n";
            let known = evidence_of(&document, 0, text, makefile, &mut records, &mut findings);
            (known, findings.len())
        };
        assert_eq!(evidence("`make test`, `cargo xtask ci loom`, `cargo xtask edges`"), (3, 0));
        assert_eq!(
            evidence("`make nothing`, `cargo xtask ci nothing`, `cargo xtask nothing`"),
            (3, 3)
        );
        assert_eq!(evidence("`xtask/src/proof.rs`, `docs/proof/nothing.json`"), (2, 1));
        assert_eq!(evidence("the word `serval`"), (0, 0));
    }
}
