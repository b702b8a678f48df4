//! Drop reasons and the tests that provoke them: `cargo xtask drop-reasons`.
//!
//! A test that provokes a reason and checks its counter is marked by a comment on a line of its own,
//! `// provokes: reason_name[, reason_name...]`. Every reason needs one. The table of docs/operations.md is
//! generated from the code (`cargo xtask gen-abi`).

use wire::DropReason;

use crate::Findings;
use crate::files;

/// The operators' table of reasons and remedies.
const PAGE: &str = "docs/operations.md";
/// What stands above the rows of its table.
const HEADING: &str = "| reason | scope | what it means | what to do |\n|---|---|---|---|\n";

/// Returns what is missing; `list` prints where each reason is provoked.
pub(crate) fn check(list: bool) -> Findings {
    let mut findings = Vec::new();
    let mut provoked: Vec<(&str, Vec<String>)> =
        DropReason::ALL.iter().map(|reason| (reason.name(), Vec::new())).collect();
    let files = files::all();
    let tests =
        files.iter().filter(|file| file.extension() == "rs" && file.path.starts_with("crates/"));
    for file in tests {
        for (line, text) in file.text.lines().enumerate() {
            let Some(names) = text.trim_start().strip_prefix("// provokes: ") else { continue };
            for name in names.split(',').map(str::trim) {
                match provoked.iter_mut().find(|(reason, _)| *reason == name) {
                    Some((_, places)) => places.push(file.at(line)),
                    None => findings.push(format!("{}: no drop reason {name:?}", file.at(line))),
                }
            }
        }
    }
    for (reason, places) in &provoked {
        match places.as_slice() {
            [] => findings.push(format!("no test provokes {reason}")),
            _ if !list => {}
            [only] => println!("{reason:18} {only}"),
            [first, rest @ ..] => println!("{reason:18} {first} and {} more", rest.len()),
        }
    }
    findings
}

/// The page of the operator with the table of the reasons as the code has it.
pub(crate) fn page() -> (&'static str, Result<String, String>) {
    page_with_rows(PAGE, HEADING, &rows())
}

fn rows() -> String {
    let row = |reason: &DropReason| {
        let (name, scope) = (reason.name(), reason.scope().name());
        format!("| `{name}` | {scope} | {} | {} |\n", reason.describe(), reason.advice())
    };
    DropReason::ALL.iter().map(row).collect()
}

/// A page with these rows below a heading, instead of those that are there.
pub(crate) fn page_with_rows(
    path: &'static str,
    heading: &str,
    rows: &str,
) -> (&'static str, Result<String, String>) {
    let page = std::fs::read_to_string(files::root().join(path)).unwrap_or_default();
    let missing = || format!("{path} has no line {heading:?}");
    (path, with_rows(&page, heading, rows).ok_or_else(missing))
}

fn with_rows(page: &str, heading: &str, rows: &str) -> Option<String> {
    let (before, after) = page.split_once(heading)?;
    let old: usize =
        after.split_inclusive('\n').take_while(|l| l.starts_with('|')).map(str::len).sum();
    Some([before, heading, rows, &after[old..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_are_replaced_and_nothing_else() {
        let empty = format!("text\n\n{HEADING}\nmore\n| a | b |\n");
        let written = with_rows(&empty, HEADING, &rows()).unwrap();
        assert_eq!(written.lines().count(), empty.lines().count() + DropReason::COUNT);
        assert!(written.starts_with("text\n") && written.ends_with(" |\n\nmore\n| a | b |\n"));
        let old = written.replacen("`truncated`", "`former_name`", 1);
        assert_eq!(
            with_rows(&old, HEADING, &rows()).as_ref(),
            Some(&written),
            "and written again it stays"
        );
        assert_eq!(with_rows("no table", HEADING, &rows()), None);
    }

    #[test]
    fn every_reason_says_what_to_do_in_one_cell() {
        for reason in DropReason::ALL {
            for text in [reason.describe(), reason.advice()] {
                assert!(!text.is_empty() && !text.contains(['|', '\n']), "{}", reason.name());
            }
        }
    }
}
