//! Figures that documents take from records: `cargo xtask benchmarks --check` holds them to docs/benchmarks.
//!
//! A figure is a median with its interval, and a comment behind it names its record:
//! `43.67 (42.56 to 45.96, *R*<!-- record: h200/gpu-rings-1 -->) M/s`. The three numbers before the comment must be
//! those of the record, rounded as they stand there, in one unit (a thousandfold of the record's). Where a document
//! marks figures with `*R*`, each mark has such a comment.

use serde_json::Value as Json;

use crate::Findings;
use crate::files::{File, root};

/// Where figures are taken over.
const DOCUMENTS: &[&str] = &["README.md", "docs/gpu.md", "docs/gpu-notes.md"];
const RESULTS: &str = "docs/benchmarks";
const BEGIN: &str = "<!-- record: ";
const END: &str = " -->";
/// Units of documents, in those of records.
const UNITS: &[f64] = &[1.0, 1e3, 1e6, 1e9];

pub(crate) fn check() -> Findings {
    let mut findings = Findings::new();
    let mut figures = 0;
    for path in DOCUMENTS {
        match std::fs::read_to_string(root().join(path)) {
            Ok(text) => {
                let document = File { path: (*path).to_owned(), text };
                figures += check_document(&document, record, &mut findings);
            }
            Err(error) => findings.push(format!("{path}: {error}")),
        }
    }
    if figures == 0 {
        findings.push("no document takes a figure from a record".to_owned());
    }
    findings
}

fn record(name: &str) -> Result<Json, String> {
    let path = format!("{RESULTS}/{name}.json");
    let text = std::fs::read_to_string(root().join(&path)).map_err(|e| format!("{path}: {e}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))
}

/// How many figures the document has.
fn check_document(
    document: &File,
    record: impl Fn(&str) -> Result<Json, String>,
    findings: &mut Findings,
) -> usize {
    let mut figures = 0;
    for (line, text) in document.text.lines().enumerate() {
        let at = document.at(line);
        // The legend explains the mark: `*R*: ...`.
        let bare = text.match_indices("*R*").filter(|(at, _)| {
            let behind = &text[at + 3..];
            !behind.starts_with(BEGIN) && !behind.starts_with(':')
        });
        findings.extend(bare.map(|_| format!("{at}: *R* without `{BEGIN}NAME{END}`")));
        let mut from = 0;
        for (place, _) in text.match_indices(BEGIN) {
            figures += 1;
            let behind = &text[place + BEGIN.len()..];
            let Some((name, _)) = behind.split_once(END) else {
                findings.push(format!("{at}: a comment without an end"));
                break;
            };
            let shown = &text[from..place];
            from = place + BEGIN.len() + name.len() + END.len();
            let wrong = record(name).and_then(|record| compare(shown, &record));
            findings.extend(wrong.err().map(|what| format!("{at}: {name}: {what}")));
        }
    }
    figures
}

/// Whether the last three numbers of a text are the median and the interval of a record.
fn compare(shown: &str, record: &Json) -> Result<(), String> {
    let numbers = numbers(shown);
    let Some([median, low, high]) = numbers.last_chunk() else {
        return Err(format!("no median and interval stand before it: {shown:?}"));
    };
    let value = &record["value"];
    let known = [&value["median"], &value["interval"]["low"], &value["interval"]["high"]];
    let [Some(a), Some(b), Some(c)] = known.map(Json::as_f64) else {
        return Err("the record has no interval".to_owned());
    };
    let rounded = |shown: &str, known: f64, unit: f64| {
        let decimals = shown.split_once('.').map_or(0, |(_, decimals)| decimals.len());
        format!("{:.decimals$}", known / unit) == shown
    };
    let fits = |unit: &&f64| {
        [(median, a), (low, b), (high, c)]
            .iter()
            .all(|(shown, known)| rounded(shown, *known, **unit))
    };
    match UNITS.iter().find(fits) {
        Some(_) => Ok(()),
        None => {
            Err(format!("{median} ({low} to {high}) stands there, the record has {a} ({b} to {c})"))
        }
    }
}

/// The numbers of a text; a digit behind a letter is part of a name.
fn numbers(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
    let number = |word: &'_ str| -> Option<usize> {
        let end = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
        let digits = word[..end].trim_end_matches('.');
        digits.starts_with(|c: char| c.is_ascii_digit()).then_some(digits.len())
    };
    words.filter_map(|word| Some(&word[..number(word)?])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(text: &str) -> (usize, Findings) {
        let document = File { path: "a.md".to_owned(), text: text.to_owned() };
        let mut findings = Findings::new();
        let record = |name: &str| match name {
            "h200/rings" => Ok(json!({ "value": {
                "median": 43_673_131.0, "interval": { "low": 42_560_422.0, "high": 45_958_526.0 },
            } })),
            "short" => Ok(json!({ "value": { "median": 1.0, "interval": null } })),
            _ => Err("there is none".to_owned()),
        };
        (check_document(&document, record, &mut findings), findings)
    }

    #[test]
    fn figures_are_those_of_their_records() {
        for good in [
            "64 B: 43.67 (42.56 to 45.96, *R*<!-- record: h200/rings -->) M/s",
            "| 44 M/s [43, 46]<!-- record: h200/rings --> |",
            "43673131x [42560422x, 45958526x]<!-- record: h200/rings -->, 43.7 [42.6 to 46.0]<!-- record: h200/rings -->",
        ] {
            assert_eq!(found(good).1, Findings::new(), "{good}");
        }
        for wrong in [
            "34.5 (26.8 to 45.0, *R*<!-- record: h200/rings -->)",
            "43.67 (42.56 to 45.97)<!-- record: h200/rings -->",
            "43.67 M/s (42560 to 45959)<!-- record: h200/rings -->",
            "43.67<!-- record: h200/rings -->",
            "43.67 (42.56 to 45.96, *R*)",
            "1 (1 to 1)<!-- record: short -->",
            "1 (1 to 1)<!-- record: other -->",
            "1 (1 to 1)<!-- record: short",
        ] {
            assert_eq!(found(wrong).1.len(), 1, "{wrong}");
        }
        assert_eq!(found("*R*: on record"), (0, Findings::new()));
        assert_eq!(found("4.5 (4 to 5)<!-- record: x -->, 1<!-- record: y -->").0, 2);
    }

    #[test]
    fn names_are_no_numbers() {
        assert_eq!(
            numbers("granule16, 28 mqueues: 2.37us (2.36 to 2.38x."),
            ["28", "2.37", "2.36", "2.38"]
        );
    }
}
