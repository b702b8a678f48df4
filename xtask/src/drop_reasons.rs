//! Drop reasons and the tests that provoke them: `cargo xtask drop-reasons`.
//!
//! A test that makes a reason happen and checks its counter says so in a comment of its own line,
//! `// provokes: reason_name[, reason_name...]`. Every reason needs one, and a row in the table of docs/operations.md
//! that says its meaning as the code does and what to do.

use wire::{DropReason, DropScope};

use crate::Findings;
use crate::files;

/// Where operators find what to do about each reason.
const PAGE: &str = "docs/operations.md";

/// What is missing; `list` prints where each reason is provoked.
pub(crate) fn check(list: bool) -> Findings {
    let mut findings = Vec::new();
    let mut provoked: Vec<(&str, Vec<String>)> =
        DropReason::ALL.iter().map(|reason| (reason.name(), Vec::new())).collect();
    let files = files::all();
    let page = files.iter().find(|file| file.path == PAGE).map_or("", |file| file.text.as_str());
    findings.extend(troubles(page));
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

/// The rows of the page's table that are missing, and those that say something else than the code.
fn troubles(page: &str) -> Findings {
    let rows: Vec<[&str; 4]> = page.lines().filter_map(row).collect();
    let mut findings = Findings::new();
    for reason in DropReason::ALL {
        let scope = match reason.scope() {
            DropScope::Intake => "intake",
            DropScope::Request => "request",
            DropScope::Reply => "reply",
            DropScope::Backend => "backend",
        };
        let name = format!("`{}`", reason.name());
        match rows.iter().filter(|row| row[0] == name).collect::<Vec<_>>().as_slice() {
            [[_, shown, meaning, advice]] => {
                if *shown != scope || *meaning != reason.describe() {
                    let what = reason.describe();
                    findings.push(format!("{PAGE}: {name} has scope {scope} and means: {what}"));
                }
                if advice.is_empty() {
                    findings.push(format!("{PAGE}: {name}: what is to be done?"));
                }
            }
            rows => findings.push(format!("{PAGE}: {} rows for {name}, not 1", rows.len())),
        }
    }
    let known =
        |row: &&[&str; 4]| DropReason::ALL.iter().any(|r| row[0] == format!("`{}`", r.name()));
    let strangers = rows.iter().filter(|row| !known(row));
    findings.extend(strangers.map(|row| format!("{PAGE}: there is no drop reason {}", row[0])));
    findings
}

/// The cells of a row whose first is a word of code and whose second is a scope.
fn row(line: &str) -> Option<[&str; 4]> {
    let cells: Vec<&str> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
    let row: [&str; 4] = cells.try_into().ok()?;
    let is_scope = ["intake", "request", "reply", "backend"].contains(&row[1]);
    (is_scope && row[0].starts_with('`')).then_some(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_row() {
        let line = |reason: &DropReason, scope: &str| {
            format!("| `{}` | {scope} | {} | wait |\n", reason.name(), reason.describe())
        };
        let page: String = DropReason::ALL
            .iter()
            .map(|reason| match reason.scope() {
                DropScope::Intake => line(reason, "intake"),
                DropScope::Request => line(reason, "request"),
                DropScope::Reply => line(reason, "reply"),
                DropScope::Backend => line(reason, "backend"),
            })
            .collect();
        assert_eq!(troubles(&page), Findings::new());
        let (first, rest) = page.split_once('\n').unwrap();
        assert_eq!(troubles(rest).len(), 1, "one has none");
        assert_eq!(troubles(&format!("{page}{first}\n")).len(), 1, "one has two");
        assert_eq!(troubles(&page.replacen("intake", "reply", 1)).len(), 1, "another scope");
        assert_eq!(
            troubles(&page.replacen("host kernel", "kernel", 1)).len(),
            1,
            "another meaning"
        );
        assert_eq!(troubles(&page.replacen("| wait |", "|  |", 1)).len(), 1, "no advice");
        assert_eq!(troubles(&format!("{page}| `nothing` | reply | x | y |\n")).len(), 1);
    }
}
