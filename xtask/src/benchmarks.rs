//! `docs/benchmarks.md`, generated from the records in `docs/benchmarks/` that `serval compare --suite` writes, and the
//! figures that other documents take from them.
//!
//! There is a table per machine with one line per record, in the order of the suites. A folder in `docs/benchmarks/` is
//! another machine; its `note.md` describes that machine. A figure in a document is a median with
//! its interval and names its record: `43.67 (42.56 to 45.96)<!-- record: h200/gpu-rings-1 -->`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use serde_json::Value as Json;

use crate::Findings;
use crate::files::root;

const PAGE: &str = "docs/benchmarks.md";
const RECORDS: &str = "docs/benchmarks";
/// The suites, in the order of the page.
const SUITES: [&str; 4] =
    ["benches/speed.toml", "benches/functions.toml", "benches/tenants.toml", "benches/gpu.toml"];
/// Documents with figures that are taken from records.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/gpu.md"];
const BEGIN: &str = "<!-- record: ";
const END: &str = " -->";
/// Units of documents, as multiples of the records' unit.
const UNITS: [f64; 4] = [1.0, 1e3, 1e6, 1e9];

const HEAD: &str = "\
# Benchmarks

<!-- Made by `cargo xtask benchmarks` from docs/benchmarks/. Do not edit: change benches/speed.toml and run `make bench`. -->

Each row links to its record: every pair, both sides' figures, commands, commit, machine and date. `make bench` measures all rows
(about half an hour on an idle machine) and writes this page. Client and server run on one machine, over loopback or shared
memory; no network card is part of any figure.

Two sides run in interleaved pairs on the same core, with the same client on another core. Every reply is checked. A value is the
median over the pairs with an interval of at least 95 % confidence. A ratio above 1 means that Serval is better. Absolute figures
vary by a fifth with the load on the machine. *must* is the release target; *undecided* means that it lies inside the interval. E, H and
the other programs that Serval is compared with are described in [benches/baselines](../benches/baselines/README.md).
";

/// Writes the page.
pub(crate) fn generate() -> Findings {
    match page() {
        Ok(page) => fs::write(root().join(PAGE), page)
            .err()
            .map(|error| format!("{PAGE}: {error}"))
            .into_iter()
            .collect(),
        Err(finding) => vec![finding],
    }
}

/// Checks that the page and the figures of other documents match the records.
pub(crate) fn check() -> Findings {
    let mut findings = Findings::new();
    match (page(), fs::read_to_string(root().join(PAGE))) {
        (Err(finding), _) => findings.push(finding),
        (Ok(page), Ok(text)) if page == text => {}
        _ => findings.push(format!("{PAGE} is out of date: run `cargo xtask benchmarks`")),
    }
    for path in DOCUMENTS {
        match fs::read_to_string(root().join(path)) {
            Ok(text) => findings.extend(wrong_figures(path, &text, record)),
            Err(error) => findings.push(format!("{path}: {error}")),
        }
    }
    findings
}

/// A row of a suite.
struct Row {
    name: String,
    what: String,
}

fn page() -> Result<String, String> {
    let mut rows = Vec::new();
    for suite in SUITES {
        let text = fs::read_to_string(root().join(suite)).map_err(|e| format!("{suite}: {e}"))?;
        rows.extend(rows_of(&text).map_err(|what| format!("{suite}: {what}"))?);
    }
    let mut page = HEAD.to_owned();
    let mut folders = vec![String::new()];
    folders.extend(entries(RECORDS)?.into_iter().filter(|name| !name.contains('.')));
    for folder in folders {
        machine(&mut page, &folder, &rows)?;
    }
    Ok(page)
}

/// The table of one machine.
fn machine(page: &mut String, folder: &str, rows: &[Row]) -> Result<(), String> {
    let within = |name: &str| {
        if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
    };
    let mut records = BTreeMap::new();
    let path = format!("{RECORDS}/{folder}");
    for name in entries(&path)? {
        if let Some(name) = name.strip_suffix(".json") {
            records.insert(name.to_owned(), record(&within(name))?);
        }
    }
    let Some(first) = records.values().next() else { return Ok(()) };
    let host = &first["machine"];
    let cpu = host["cpu"].as_str().unwrap_or_default();
    let title = if folder.is_empty() { String::new() } else { format!("{folder}: ") };
    let _ = write!(page, "\n## {title}{cpu}, {} cores\n\n", host["cores"]);
    if let Ok(note) = fs::read_to_string(root().join(&path).join("note.md")) {
        let _ = write!(page, "{}\n\n", note.trim());
    }
    page.push_str("| row | what | value | must | verdict |\n|---|---|---|---|---|\n");
    for row in rows {
        if let Some(record) = records.remove(&row.name) {
            line(page, &within(&row.name), row, &record);
        }
    }
    if let Some(stray) = records.keys().next() {
        return Err(format!(
            "{path}/{stray}.json: no suite has a row of this name; remove the record"
        ));
    }
    // Drawn by tools/gpu/map.
    if root().join(&path).join("map.svg").exists() {
        let what = "requests a second by number of mqueues and processing time, and the ratio to A";
        let _ = write!(page, "\n![{folder}: {what}](benchmarks/{folder}/map.svg)\n");
    }
    Ok(())
}

fn line(page: &mut String, path: &str, row: &Row, record: &Json) {
    let shown = |key: &str| cell(record["shown"][key].as_str().unwrap_or_default());
    let verdict = record["verdict"].as_str().unwrap_or_default().replace('-', " ");
    let verdict = if verdict == "no verdict" { String::new() } else { verdict };
    let Row { name, what } = row;
    let (value, must) = (shown("value"), shown("must"));
    let what = cell(what);
    let _ = writeln!(
        page,
        "| [{name}](benchmarks/{path}.json) | {what} | {value} | {must} | {verdict} |"
    );
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn rows_of(suite: &str) -> Result<Vec<Row>, String> {
    let suite: toml::Table = suite.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let rows = suite.get("row").and_then(toml::Value::as_array).ok_or("it has no rows")?;
    let row = |row: &toml::Value| {
        let text = |key: &str| row.get(key)?.as_str().map(str::to_owned);
        Some(Row { name: text("name")?, what: text("what")? })
    };
    rows.iter().map(|value| row(value).ok_or("a row lacks `name` or `what`".to_owned())).collect()
}

/// Names in a folder, sorted.
fn entries(folder: &str) -> Result<Vec<String>, String> {
    let found = fs::read_dir(root().join(folder)).map_err(|error| format!("{folder}: {error}"))?;
    let mut names: Vec<String> =
        found.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn record(name: &str) -> Result<Json, String> {
    let path = format!("{RECORDS}/{name}.json");
    let text = fs::read_to_string(root().join(&path)).map_err(|e| format!("{path}: {e}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))
}

/// The figures of a document that differ from the records they name.
fn wrong_figures(
    path: &str,
    text: &str,
    record: impl Fn(&str) -> Result<Json, String>,
) -> Findings {
    let mut findings = Findings::new();
    for (number, line) in text.lines().enumerate() {
        let mut parts = line.split(BEGIN);
        let mut shown = parts.next().unwrap_or_default();
        for part in parts {
            let (name, rest) = part.split_once(END).unwrap_or((part, ""));
            if let Err(what) = record(name).and_then(|record| compare(shown, &record)) {
                findings.push(format!("{path}:{}: {name}: {what}", number + 1));
            }
            shown = rest;
        }
    }
    findings
}

/// Checks that the last three numbers of a text are the rounded median and interval of a record.
fn compare(shown: &str, record: &Json) -> Result<(), String> {
    let numbers = numbers(shown);
    let Some(shown) = numbers.last_chunk::<3>() else {
        return Err("it does not follow a median and an interval".to_owned());
    };
    let value = &record["value"];
    let known = [&value["median"], &value["interval"]["low"], &value["interval"]["high"]];
    let fits = |unit: &f64| {
        shown.iter().zip(known).all(|(shown, known)| {
            let decimals = shown.split_once('.').map_or(0, |(_, decimals)| decimals.len());
            known.as_f64().is_some_and(|known| format!("{:.decimals$}", known / unit) == *shown)
        })
    };
    match UNITS.iter().any(fits) {
        true => Ok(()),
        false => Err(format!("the document has {shown:?}, the record {known:?}")),
    }
}

/// The numbers in a text; a digit after a letter is part of a name.
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

    #[test]
    fn a_record_is_a_line_of_the_page() {
        let suite = "[[row]]\nname = \"echo\"\nwhat = \"echo | of 64 B\"\n";
        let rows = rows_of(suite).unwrap();
        let record = json!({
            "verdict": "no-verdict", "shown": { "value": "0.990x [0.985x, 0.995x]", "must": "" },
        });
        let mut page = String::new();
        line(&mut page, "h200/echo", &rows[0], &record);
        assert_eq!(
            page,
            "| [echo](benchmarks/h200/echo.json) | echo \\| of 64 B | 0.990x [0.985x, 0.995x] |  |  |\n"
        );
        assert!(rows_of("schema = 1").is_err());
        assert!(rows_of("[[row]]\nwhat = \"x\"").is_err());
    }

    #[test]
    fn figures_are_those_of_their_records() {
        let record = |name: &str| match name {
            "h200/rings" => Ok(json!({ "value": {
                "median": 43_673_131.0, "interval": { "low": 42_560_422.0, "high": 45_958_526.0 },
            } })),
            "short" => Ok(json!({ "value": { "median": 1.0, "interval": null } })),
            _ => Err("there is none".to_owned()),
        };
        let found = |text: &str| wrong_figures("a.md", text, record);
        for good in [
            "granule16, 64 B: 43.67 (42.56 to 45.96<!-- record: h200/rings -->) M/s",
            "| 44 M/s [43, 46]<!-- record: h200/rings --> |",
            "43673131x [42560422x, 45958526x]<!-- record: h200/rings -->, 43.7 [42.6 to 46.0]<!-- record: h200/rings -->",
        ] {
            assert_eq!(found(good), Findings::new(), "{good}");
        }
        for wrong in [
            "34.5 (26.8 to 45.0)<!-- record: h200/rings -->",
            "43.67 (42.56 to 45.97)<!-- record: h200/rings -->",
            "43.67 M/s (42560 to 45959)<!-- record: h200/rings -->",
            "43.67<!-- record: h200/rings -->",
            "1 (1 to 1)<!-- record: short -->",
            "1 (1 to 1)<!-- record: other -->",
        ] {
            assert_eq!(found(wrong).len(), 1, "{wrong}");
        }
    }
}
