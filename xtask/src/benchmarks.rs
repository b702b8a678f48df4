//! `docs/benchmarks.md`, generated from the records in `docs/benchmarks/` that `serval compare --suite` writes, and the
//! figures that other documents take from them.
//!
//! There is a table per machine with one line per record, in the order of the suites. A folder in `docs/benchmarks/` is
//! another machine; its `note.md` describes that machine. A figure in a document is a median with
//! its interval and names its record: `43.67 (42.56 to 45.96)<!-- record: h200/gpu-rings-1 -->`.
//!
//! A record whose sources are not in the history ([`crate::origin`]) is refused: it is no line of a table and no figure of
//! a document. Such records are in the folder `void/`, or deleted. Lines of old records say how old these are.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use serde_json::Value as Json;

use crate::Findings;
use crate::files::root;
use crate::origin::{self, Checkout, History};

const PAGE: &str = "docs/benchmarks.md";
const RECORDS: &str = "docs/benchmarks";
/// The suites, in the order of the page.
const SUITES: [&str; 4] =
    ["benches/speed.toml", "benches/functions.toml", "benches/tenants.toml", "benches/gpu.toml"];
/// Documents with figures that are taken from records.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/gpu.md"];
/// The folder of records that prove nothing.
const VOID: &str = "void";
/// A record is old if more commits than this are newer.
const OLD: usize = 300;
/// The age of an old record in the page.
const AGE: [&str; 2] = ["| old: ", " commits |"];
const BEGIN: &str = "<!-- record: ";
const END: &str = " -->";
/// Units of documents, as multiples of the records' unit.
const UNITS: [f64; 4] = [1.0, 1e3, 1e6, 1e9];

const HEAD: &str = "\
# Benchmarks

<!-- Made by `cargo xtask benchmarks` from docs/benchmarks/. Do not edit: change benches/speed.toml and run `make bench`. -->

Each row links to its record: every pair, both sides' figures, commands, commit, machine, date and the earlier results of the row. `make bench` measures the rows of benches/speed.toml
(about half an hour on an idle machine) and writes this page. Client and server run on one machine, over loopback or shared
memory; no network card is part of any figure.

Two sides run in interleaved pairs on the same core, with the same client on another core. Every reply is checked. A value is the
median over the pairs with an interval of at least 95 % confidence. A ratio above 1 means that Serval is better. Absolute figures
vary by a fifth with the load on the machine. *must* is the release target, *aim* a stretch target; *undecided* means that *must* lies inside
the interval. *old* means that more than 300 commits are newer than the record, and how many were when this page was written. E, H and the other programs that Serval is
compared with are described in [benches/baselines](../benches/baselines/README.md).
";

/// Writes the page, and reports the records that it refuses.
pub(crate) fn generate() -> Findings {
    let checkout = match Checkout::open() {
        Ok(checkout) => checkout,
        Err(why) => {
            return vec![format!("{PAGE} is not written, since commits are unknown: {why}")];
        }
    };
    match page(Some(&checkout)) {
        Ok(Page { text, mut findings }) => {
            if let Err(error) = fs::write(root().join(PAGE), text) {
                findings.push(format!("{PAGE}: {error}"));
            }
            findings
        }
        Err(finding) => vec![finding],
    }
}

/// Checks that the page and the figures of other documents match the records, and the records' sources. Without the
/// history of the sources, it prints why and checks the rest.
pub(crate) fn check() -> Findings {
    let checkout = Checkout::open();
    if let Err(why) = &checkout {
        println!("benchmarks: commits of records are not checked: {why}");
    }
    let history = checkout.as_ref().ok().map(|checkout| checkout as &dyn History);
    let mut findings = Findings::new();
    match (page(history), fs::read_to_string(root().join(PAGE))) {
        (Err(finding), _) => findings.push(finding),
        (Ok(page), Ok(text)) => {
            findings.extend(page.findings);
            if without_ages(&page.text, history.is_some()) != without_ages(&text, history.is_some())
            {
                findings.push(format!("{PAGE} is out of date: run `cargo xtask benchmarks`"));
            }
        }
        (_, Err(error)) => findings.push(format!("{PAGE}: {error}")),
    }
    let valid = |name: &str| {
        let record = record(name)?;
        history.map_or(Ok(0), |history| origin::age(&record, history))?;
        Ok(record)
    };
    for path in DOCUMENTS {
        match fs::read_to_string(root().join(path)) {
            Ok(text) => findings.extend(wrong_figures(path, &text, valid)),
            Err(error) => findings.push(format!("{path}: {error}")),
        }
    }
    findings
}

/// The page with all ages replaced, since each commit changes them. With `marked`, old records remain marked.
fn without_ages(page: &str, marked: bool) -> String {
    let mark = if marked { "| old |" } else { "|  |" };
    let line = |line: &str| match line.rsplit_once(AGE[0]) {
        Some((row, age)) if age.ends_with(AGE[1]) => format!("{row}{mark}\n"),
        _ => format!("{line}\n"),
    };
    page.lines().map(line).collect()
}

/// The page, and the records that it lacks because they are refused.
struct Page {
    text: String,
    findings: Findings,
}

/// A row of a suite.
struct Row {
    name: String,
    what: String,
    metric: String,
    must: Option<f64>,
    aim: Option<f64>,
}

/// Without a history no record is refused, and none is old.
fn page(history: Option<&dyn History>) -> Result<Page, String> {
    let mut rows = Vec::new();
    for suite in SUITES {
        let text = fs::read_to_string(root().join(suite)).map_err(|e| format!("{suite}: {e}"))?;
        rows.extend(rows_of(&text).map_err(|what| format!("{suite}: {what}"))?);
    }
    let mut page = Page { text: HEAD.to_owned(), findings: Findings::new() };
    let mut folders = vec![String::new()];
    folders
        .extend(entries(RECORDS)?.into_iter().filter(|name| !name.contains('.') && name != VOID));
    for folder in folders {
        machine(&mut page, &folder, &rows, history)?;
    }
    Ok(page)
}

/// The table of one machine.
fn machine(
    page: &mut Page,
    folder: &str,
    rows: &[Row],
    history: Option<&dyn History>,
) -> Result<(), String> {
    let within = |name: &str| {
        if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
    };
    let mut records = BTreeMap::new();
    let path = format!("{RECORDS}/{folder}");
    for name in entries(&path)? {
        if let Some(name) = name.strip_suffix(".json") {
            let record = record(&within(name))?;
            match history.map_or(Ok(0), |history| origin::age(&record, history)) {
                Ok(age) => drop(records.insert(name.to_owned(), (record, age))),
                Err(why) => page.findings.push(format!(
                    "{RECORDS}/{}.json: {why}: measure it again from a commit, or move it to {RECORDS}/{VOID}",
                    within(name)
                )),
            }
        }
    }
    let findings = &mut page.findings;
    let page = &mut page.text;
    let Some((first, _)) = records.values().next() else { return Ok(()) };
    let host = &first["machine"];
    let cpu = host["cpu"].as_str().unwrap_or_default();
    let title = if folder.is_empty() { String::new() } else { format!("{folder}: ") };
    let _ = write!(page, "\n## {title}{cpu}, {} cores\n\n", host["cores"]);
    if let Ok(note) = fs::read_to_string(root().join(&path).join("note.md")) {
        let _ = write!(page, "{}\n\n", note.trim());
    }
    page.push_str(
        "| row | what | value | must | aim | verdict | |\n|---|---|---|---|---|---|---|\n",
    );
    let mut above = None;
    for (index, row) in rows.iter().enumerate() {
        if let Some((record, age)) = records.remove(&row.name) {
            findings.extend(other_targets(&within(&row.name), row, &record));
            let what = explained(&rows[..=index], above == index.checked_sub(1));
            line(page, &within(&row.name), row, &what, &record, age);
            above = Some(index);
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

/// What the last of these rows measures. If it refers to the row before it, and that one is not the line above, then with the
/// description that it refers to.
fn explained(rows: &[Row], is_above: bool) -> String {
    let (row, before) = rows.split_last().expect("a row");
    let refers = |row: &&Row| {
        ["The same", "As ", "The limit of the row before"].iter().any(|by| row.what.starts_with(by))
    };
    let full = before.iter().rev().find(|before| !refers(before));
    match full.filter(|_| refers(&row) && !is_above) {
        Some(full) => format!("{} ({}: {})", row.what, full.name, full.what),
        None => row.what.clone(),
    }
}

fn line(page: &mut String, path: &str, row: &Row, what: &str, record: &Json, age: usize) {
    let shown = |key: &str| cell(record["shown"][key].as_str().unwrap_or_default());
    let what = cell(what);
    let (name, value, must, aim) = (&row.name, shown("value"), shown("must"), shown("aim"));
    let verdict = verdict(record);
    let old = if age > OLD { format!("{}{age}{}", AGE[0], AGE[1]) } else { "|  |".to_owned() };
    let _ = writeln!(
        page,
        "| [{name}](benchmarks/{path}.json) | {what} | {value} | {must} | {aim} | {verdict} {old}"
    );
}

/// The verdict on a record, whether it meets the aim, and the verdicts on earlier measurements that were not good.
fn verdict(record: &Json) -> String {
    let of = |record: &Json| record["verdict"].as_str().unwrap_or_default().to_owned();
    let mut parts = Vec::new();
    match of(record).as_str() {
        "no-verdict" => {}
        other => parts.push(other.to_owned()),
    }
    if record["meets_aim"].as_bool() == Some(true) {
        parts.push("aim met".to_owned());
    }
    let past: Vec<String> = record["history"].as_array().into_iter().flatten().map(of).collect();
    for bad in ["fail", "undecided", "void"] {
        match past.iter().filter(|verdict| *verdict == bad).count() {
            0 => {}
            1 => parts.push(format!("earlier: {bad}")),
            times => parts.push(format!("earlier: {bad} {times} times")),
        }
    }
    parts.join("; ")
}

/// The figure and targets of a record, if they are no longer those of its row: the verdict is about them.
fn other_targets(path: &str, row: &Row, record: &Json) -> Option<String> {
    let (must, aim) = (record["must"].as_f64(), record["aim"].as_f64());
    if record["metric"] != row.metric {
        return Some(format!(
            "{RECORDS}/{path}.json: it compares {}, and the row in the suite {}: measure it again",
            record["metric"], row.metric
        ));
    }
    (must != row.must || aim != row.aim).then(|| {
        format!(
            "{RECORDS}/{path}.json: its targets were {must:?} and {aim:?}, those of the suite are {:?} and {:?}: \
             measure it again",
            row.must, row.aim
        )
    })
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn rows_of(suite: &str) -> Result<Vec<Row>, String> {
    let suite: toml::Table = suite.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let rows = suite.get("row").and_then(toml::Value::as_array).ok_or("it has no rows")?;
    let row = |row: &toml::Value| {
        let text = |key: &str| row.get(key)?.as_str().map(str::to_owned);
        let number = |key: &str| {
            let value = row.get(key)?;
            value.as_float().or_else(|| value.as_integer().map(|value| value as f64))
        };
        Some(Row {
            name: text("name")?,
            what: text("what")?,
            metric: text("metric").unwrap_or_else(|| "rate".to_owned()),
            must: number("must"),
            aim: number("aim"),
        })
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
        let suite = "[[row]]\nname = \"echo\"\nwhat = \"echo | of 64 B\"\nmust = 1\naim = 1.5\n";
        let rows = rows_of(suite).unwrap();
        let mut record = json!({
            "verdict": "no-verdict",
            "shown": { "value": "0.990x [0.985x, 0.995x]", "must": "at least 1.000x", "aim": "at least 1.500x" },
            "metric": "rate", "must": 1.0, "aim": 1.5,
        });
        let shown = |record: &Json, age: usize| {
            let mut page = String::new();
            line(&mut page, "h200/echo", &rows[0], &rows[0].what, record, age);
            page
        };
        let begin = "| [echo](benchmarks/h200/echo.json) | echo \\| of 64 B | 0.990x [0.985x, 0.995x] \
            | at least 1.000x | at least 1.500x |";
        assert_eq!(shown(&record, 300), format!("{begin}  |  |\n"));
        // A good measurement does not hide a bad one.
        record["verdict"] = "pass".into();
        record["meets_aim"] = true.into();
        record["history"] =
            json!([{ "verdict": "fail" }, { "verdict": "pass" }, { "verdict": "fail" }]);
        let old = shown(&record, 301);
        let verdict = "pass; aim met; earlier: fail 2 times";
        assert_eq!(old, format!("{begin} {verdict} | old: 301 commits |\n"));
        // An age is not compared, whether a record is old is.
        assert_eq!(without_ages(&old, true), without_ages(&shown(&record, 400), true));
        assert_ne!(without_ages(&old, true), without_ages(&shown(&record, 300), true));
        assert_eq!(without_ages(&old, false), without_ages(&shown(&record, 300), false));
        assert_eq!(other_targets("echo", &rows[0], &record), None);
        record["aim"] = 1.4.into();
        assert!(other_targets("echo", &rows[0], &record).unwrap().contains("its targets"));
        record["metric"] = "p99_ns".into();
        assert!(other_targets("echo", &rows[0], &record).unwrap().contains("compares"));
        assert!(rows_of("schema = 1").is_err());
        assert!(rows_of("[[row]]\nwhat = \"x\"").is_err());
    }

    #[test]
    fn a_row_that_refers_to_a_missing_one_is_explained() {
        let suite = "[[row]]\nname = \"a\"\nwhat = \"echo\"\n[[row]]\nname = \"b\"\nwhat = \"The same, twice\"\n\
            [[row]]\nname = \"c\"\nwhat = \"The same, thrice\"\n";
        let rows = rows_of(suite).unwrap();
        assert_eq!(explained(&rows, true), "The same, thrice");
        assert_eq!(explained(&rows, false), "The same, thrice (a: echo)");
        assert_eq!(explained(&rows[..1], false), "echo");
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
