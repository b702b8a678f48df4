//! Drop reasons and the tests that provoke them: `cargo xtask drop-reasons`.
//!
//! A test that makes a reason happen and checks its counter says so in a comment of its own line,
//! `// provokes: reason_name[, reason_name...]`. Every reason needs one.

use wire::DropReason;

use crate::Findings;
use crate::files;

/// What is missing; `list` prints where each reason is provoked.
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
