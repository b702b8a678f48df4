//! Ordering edges: `cargo xtask edges`.
//!
//! Code that implements half of an edge is marked by a comment of this form:
//!
//! ```text
//! // EDGE NAME [NAME...] (release half|acquire half|sleeper half|waker half)[: why]
//! ```
//!
//! This file lists which halves must exist in Rust, in the device library, in the client library and in the attach
//! library. Malformed markers, unknown edges, edges without a section in ORDERING.md and missing halves are findings.
//! Doc comments may mention edges in any form.
//!
//! ORDERING.md also has a table of the checks of each edge. Every test it names must exist, and every edge
//! needs a loom model that passes and one that fails when half of the edge is removed.

use crate::Findings;
use crate::files::{self, File};

/// Where a half of an edge must be marked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Rust,
    Device,
    /// The C client library, which uses the device library's rings.
    Client,
    /// The C++ attach library, the runtime's side of a region.
    Attach,
}
use Side::{Attach, Client, Device, Rust};

const RELEASE: &str = "release half";
const ACQUIRE: &str = "acquire half";
const SLEEPER: &str = "sleeper half";
const WAKER: &str = "waker half";

/// An edge: its name and the halves that must be marked.
struct Edge {
    name: &'static str,
    halves: &'static [(&'static str, Side)],
}

/// Both sides of a connection have a stream to write and one to read.
const STREAM_HALVES: &[(&str, Side)] =
    &[(RELEASE, Rust), (ACQUIRE, Rust), (RELEASE, Device), (ACQUIRE, Device)];

const EDGES: &[Edge] = &[
    Edge { name: "RX_PUBLISH", halves: &[(RELEASE, Rust), (ACQUIRE, Rust), (ACQUIRE, Device)] },
    Edge { name: "RX_RELEASE", halves: &[(RELEASE, Rust), (RELEASE, Device), (ACQUIRE, Rust)] },
    Edge { name: "TX_PUBLISH", halves: &[(RELEASE, Rust), (RELEASE, Device), (ACQUIRE, Rust)] },
    Edge { name: "TX_RELEASE", halves: &[(RELEASE, Rust), (ACQUIRE, Rust), (ACQUIRE, Device)] },
    Edge { name: "HANDOVER", halves: &[(RELEASE, Rust), (ACQUIRE, Rust)] },
    Edge {
        name: "STOP",
        halves: &[(RELEASE, Rust), (RELEASE, Attach), (ACQUIRE, Rust), (ACQUIRE, Device)],
    },
    Edge {
        name: "HEARTBEAT",
        halves: &[
            (RELEASE, Rust),
            (RELEASE, Attach),
            (ACQUIRE, Rust),
            (ACQUIRE, Device),
            (ACQUIRE, Attach),
        ],
    },
    Edge {
        name: "STATE",
        halves: &[
            (RELEASE, Rust),
            (RELEASE, Device),
            (RELEASE, Attach),
            (ACQUIRE, Rust),
            (ACQUIRE, Attach),
        ],
    },
    Edge { name: "FORMAT", halves: &[(RELEASE, Rust), (ACQUIRE, Rust)] },
    Edge {
        name: "PARK",
        halves: &[(SLEEPER, Rust), (WAKER, Rust), (SLEEPER, Client), (WAKER, Client)],
    },
    Edge { name: "DOORBELL", halves: &[(RELEASE, Rust), (ACQUIRE, Rust)] },
    Edge { name: "RX_BUNDLE", halves: &[(RELEASE, Rust), (ACQUIRE, Rust), (ACQUIRE, Device)] },
    Edge { name: "TX_BUNDLE", halves: &[(RELEASE, Rust), (RELEASE, Device), (ACQUIRE, Rust)] },
    Edge { name: "BUNDLE_RETURN", halves: &[(RELEASE, Rust), (RELEASE, Device), (ACQUIRE, Rust)] },
    Edge { name: "BYTES_PUBLISH", halves: STREAM_HALVES },
    Edge { name: "BYTES_END", halves: STREAM_HALVES },
    Edge { name: "BYTES_RELEASE", halves: STREAM_HALVES },
    Edge { name: "BOOKS", halves: &[(RELEASE, Rust), (ACQUIRE, Rust)] },
    Edge { name: "EPOCHS", halves: &[(RELEASE, Rust), (ACQUIRE, Rust)] },
    Edge { name: "DICTIONARY", halves: &[(RELEASE, Rust), (ACQUIRE, Rust)] },
];

/// One name in a marker.
#[derive(Debug, PartialEq, Eq)]
struct Marker<'a> {
    name: &'a str,
    half: &'a str,
}

pub(crate) fn check() -> Findings {
    let files = files::all();
    let mut findings = Vec::new();
    let mut found: Vec<(String, String, Side)> = Vec::new();
    for file in &files {
        let Some(side) = side_of(file) else { continue };
        for (line, text) in file.text.lines().enumerate() {
            match parse(text) {
                None => {}
                Some(Err(problem)) => findings.push(format!("{}: {problem}", file.at(line))),
                Some(Ok(markers)) => {
                    for Marker { name, half } in markers {
                        if EDGES.iter().all(|edge| edge.name != name) {
                            findings.push(format!(
                                "{}: edge {name} is not known: describe it in ORDERING.md and \
                                 add it to xtask/src/edges.rs",
                                file.at(line)
                            ));
                        }
                        found.push((name.to_owned(), half.to_owned(), side));
                    }
                }
            }
        }
    }
    for edge in EDGES {
        for (half, side) in edge.halves {
            let marked =
                |(name, h, s): &(String, String, Side)| name == edge.name && h == half && s == side;
            if !found.iter().any(marked) {
                findings.push(format!("edge {} has no {half} marked in {side:?} code", edge.name));
            }
        }
    }
    findings.extend(undocumented(&files));
    findings.extend(unchecked(&files));
    findings
}

/// Edges without a section of their name in ORDERING.md.
fn undocumented(files: &[File]) -> Findings {
    let text = files.iter().find(|file| file.path == "ORDERING.md").map_or("", |file| &file.text);
    let has_section = |name: &str| {
        let words = |line: &str| {
            line.split(|c: char| !c.is_ascii_uppercase() && c != '_').any(|w| w == name)
        };
        text.lines().any(|line| line.starts_with('#') && words(line))
    };
    let missing = EDGES.iter().filter(|edge| !has_section(edge.name));
    missing.map(|edge| format!("ORDERING.md has no section on edge {}", edge.name)).collect()
}

/// A column of the table of checks: its heading, the folder of its tests, and how the table writes a test's name.
type Column = (&'static str, &'static str, fn(&str) -> Vec<String>);

/// The columns after the edge's name.
const COLUMNS: &[Column] = &[
    ("loom", "crates/mqueue-loom/tests/loom/", rust_test),
    ("weakened", "crates/mqueue-loom/tests/loom/", |name| vec![format!("{name}: ")]),
    ("litmus", "crates/bench/src/litmus/", |name| vec![format!("\"{name}"), format!(" {name}\"")]),
    ("ThreadSanitizer", "device/tests/", |name| vec![format!("TEST({name})")]),
    ("threads", "crates/", rust_test),
];

/// A test function, or a macro line that creates one.
fn rust_test(name: &str) -> Vec<String> {
    vec![format!("fn {name}("), format!("    {name}: ")]
}

/// Edges without a row in the table of checks, rows without a loom model, and tests that do not exist.
fn unchecked(files: &[File]) -> Findings {
    let text = files.iter().find(|file| file.path == "ORDERING.md").map_or("", |file| &file.text);
    let Some((_, table)) = text.split_once("| edge | loom |") else {
        return vec!["ORDERING.md has no table `| edge | loom | ...`".to_owned()];
    };
    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let mut findings = Vec::new();
    for edge in EDGES {
        let name = format!("`{}`", edge.name);
        let Some(row) = rows.iter().find(|row| row[0] == name) else {
            findings
                .push(format!("edge {} has no row in ORDERING.md's table of checks", edge.name));
            continue;
        };
        for (at, (column, folder, forms)) in COLUMNS.iter().enumerate() {
            let cell = row.get(at + 1).copied().unwrap_or_default();
            let tests: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
            if tests.is_empty() && (at < 2 || cell.len() < 3) {
                findings.push(format!("edge {}: no test or reason under {column}", edge.name));
            }
            for test in tests {
                let has = |file: &&File| forms(test).iter().any(|form| file.text.contains(form));
                if !files.iter().filter(|file| file.path.starts_with(folder)).any(|f| has(&f)) {
                    findings
                        .push(format!("edge {}: {folder} has no {column} test {test}", edge.name));
                }
            }
        }
    }
    findings
}

/// The side of a file whose code may carry an edge. Tests may mention edges freely.
fn side_of(file: &File) -> Option<Side> {
    let source = file.path.starts_with("crates/") && file.path.contains("/src/");
    if source && file.extension() == "rs" {
        Some(Rust)
    } else if file.path.starts_with("device/include/") {
        Some(Device)
    } else if file.path.starts_with("lib/src/shm/") {
        Some(Client)
    } else if file.path.starts_with("lib/src/attach/") {
        Some(Attach)
    } else {
        None
    }
}

/// The marker on a line: none, a malformed one, or its names with their half.
fn parse(line: &str) -> Option<Result<Vec<Marker<'_>>, &'static str>> {
    let marker = line.split_once("// EDGE ")?.1;
    let Some((names, rest)) = marker.split_once(" (") else {
        return Some(Err("a marker reads `// EDGE NAME [NAME...] (HALF)[: why]`"));
    };
    let Some((half, rest)) = rest.split_once(')') else {
        return Some(Err("the closing parenthesis after the half is missing"));
    };
    if ![RELEASE, ACQUIRE, SLEEPER, WAKER].contains(&half) {
        return Some(Err("the half must be a release, acquire, sleeper or waker half"));
    }
    if !(rest.is_empty() || rest.starts_with(": ")) {
        return Some(Err("only `: ` and the reason may follow the half"));
    }
    let upper = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    if names.is_empty() || !names.split(' ').all(upper) {
        return Some(Err("edge names are upper case, separated by one space"));
    }
    Some(Ok(names.split(' ').map(|name| Marker { name, half }).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_have_one_form() {
        let good =
            parse("    // EDGE RX_PUBLISH HANDOVER (release half): because").unwrap().unwrap();
        let expected = ["RX_PUBLISH", "HANDOVER"].map(|name| Marker { name, half: RELEASE });
        assert_eq!(good, expected);
        assert!(parse("// EDGE STOP (acquire half)").unwrap().is_ok());
        assert!(parse("//! EDGE STOP: prose in documentation").is_none());
        assert!(parse("let edge = 1; // an edge").is_none());
        for bad in ["STOP", "STOP: why", "STOP (both)", "stop (release half)", "A (release half) x"]
        {
            assert!(parse(&format!("// EDGE {bad}")).unwrap().is_err(), "{bad}");
        }
    }
}
