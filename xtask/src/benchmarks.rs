//! `docs/benchmarks.md`, made from the results in `docs/benchmarks/*.json` that `serval compare --suite`
//! writes. Rows stand in the order of `benches/speed.toml`; a row without a result says so. A folder in there
//! holds results of another machine, also of `benches/gpu.toml`, of which the page shows the values and what
//! bounds them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use crate::files::root;
use crate::{Findings, figures};

const TABLE: &str = "docs/benchmarks.md";
const RESULTS: &str = "docs/benchmarks";
const SUITE: &str = "benches/speed.toml";
/// Rows that need a GPU, which only other machines have.
const GPU_SUITE: &str = "benches/gpu.toml";

const HEAD: &str = "\
# Benchmarks

<!-- Made by `cargo xtask benchmarks` from docs/benchmarks/*.json; change benches/speed.toml and measure instead. -->

`make bench` measures every row (about half an hour, on a machine that does nothing else) and writes this page. Two sides are measured in
interleaved pairs, on the same core, with the same client on the other core; every reply is checked. A *value* is the median of the
pairs' ratios with the exact interval in which it lies (95 % or more); a ratio above 1 means that A, the candidate, is better, for rates and
for latencies alike. Pairs during which the machine itself changed speed are discarded and repeated. Absolute figures are of one machine and
move by a fifth with whatever else runs on it.

**Everything is measured on loopback**: client and server are programs of one machine, and no network card and no wire is part of any figure.

*must* is what a release needs, *aim* what is striven for. The verdict compares the whole interval with them:

| verdict | meaning |
|---|---|
| pass | the interval lies on the good side of *must* |
| fail | it lies on the bad side of *must* |
| undecided | *must* lies within it |
| aim met, aim not met, aim undecided | the same of *aim*; alone where a row has no *must* |
| no verdict | the row has neither, or too few pairs to prove anything; the reason stands there |
| void | the measurements are not to be believed; the reason stands there |
| not measured | there is no record |

Client classes, never mixed in one ratio: **T0** ordinary kernel sockets; **T2** trains of datagrams through kernel sockets (GSO, GRO);
**T3** shared memory.

Of which builds the records are, with the days on which they were measured (UTC):

";

/// One row: as the suite has it, and its result if there is one.
struct Row {
    name: String,
    what: String,
    /// What the suite says today; what was known when it was measured is in the result.
    bound: Option<String>,
    result: Option<Json>,
    /// What the result was measured for that the suite does not say any more.
    stale: Option<&'static str>,
}

/// Writes the page.
pub(crate) fn generate() -> Findings {
    match page() {
        Ok(page) => match fs::write(root().join(TABLE), page) {
            Ok(()) => Findings::new(),
            Err(error) => vec![format!("{TABLE}: {error}")],
        },
        Err(findings) => findings,
    }
}

/// Whether the page is what the results give, and other documents say what they do.
pub(crate) fn check() -> Findings {
    let mut findings = differences();
    findings.extend(figures::check());
    findings
}

fn differences() -> Findings {
    let page = match page() {
        Ok(page) => page,
        Err(findings) => return findings,
    };
    match fs::read_to_string(root().join(TABLE)) {
        Ok(text) if text == page => Findings::new(),
        Ok(_) => vec![format!("{TABLE} is not what {RESULTS} gives: run `cargo xtask benchmarks`")],
        Err(error) => vec![format!("{TABLE}: {error}")],
    }
}

fn page() -> Result<String, Findings> {
    let read = |suite: &str| {
        fs::read_to_string(root().join(suite)).map_err(|error| vec![format!("{suite}: {error}")])
    };
    let (speed, gpu) = (read(SUITE)?, read(GPU_SUITE)?);
    let here = measured_in(RESULTS, &[(SUITE, &speed)])?;
    let mut others = Vec::new();
    for name in other_machines() {
        let folder = format!("{RESULTS}/{name}");
        let rows = measured_in(&folder, &[(SUITE, &speed), (GPU_SUITE, &gpu)])?;
        let beside = beside(&folder, &rows)?;
        others.push((name, rows, beside));
    }
    let mut page = HEAD.to_owned();
    page.push_str("| machine | commit | measured | rows |\n|---|---|---|---|\n");
    let own = here.iter().find_map(|row| row.result.as_ref()).map_or(String::new(), |result| {
        let machine = &result["machine"];
        format!("the table: {}, {} cores", text(&machine["cpu"]), plain(&machine["cores"]))
    });
    builds(&mut page, &own, &here);
    for (name, rows, _) in &others {
        builds(&mut page, name, rows);
    }
    render(&mut page, &here);
    for (name, rows, beside) in &others {
        let folder = format!("{RESULTS}/{name}");
        let note = fs::read_to_string(root().join(&folder).join("note.md")).unwrap_or_default();
        elsewhere(&mut page, (name, &note), rows, &here, beside);
        // What tools/gpu/map draws.
        if root().join(&folder).join("map.svg").exists() {
            let what =
                "requests a second over mqueues and processing time, and how many times those of A";
            let _ = writeln!(page, "\n![{name}: {what}](benchmarks/{name}/map.svg)");
        }
    }
    Ok(page)
}

/// Names of the folders with results of other machines.
fn other_machines() -> Vec<String> {
    let entries = fs::read_dir(root().join(RESULTS)).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> =
        folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The rows of suites, given with their names, with the results of a folder.
fn measured_in(folder: &str, suites: &[(&str, &str)]) -> Result<Vec<Row>, Findings> {
    let mut results = results(folder)?;
    let mut all = Vec::new();
    for (name, suite) in suites {
        all.extend(rows(suite, &mut results).map_err(|what| vec![format!("{name}: {what}")])?);
    }
    let rows = all;
    if !results.is_empty() {
        let names: Vec<&str> = suites.iter().map(|(name, _)| *name).collect();
        let names = names.join(" and ");
        let stray = |name: &String| format!("{folder}/{name}.json: {names} has no such row");
        return Err(results.keys().map(stray).collect());
    }
    let stale = |row: &Row| {
        let what = row.stale?;
        let name = &row.name;
        Some(format!("{folder}/{name}.json: measured for another row ({what}): measure again"))
    };
    let stale: Findings = rows.iter().filter_map(stale).collect();
    if stale.is_empty() { Ok(rows) } else { Err(stale) }
}

/// The results of a folder by name.
fn results(folder: &str) -> Result<HashMap<String, Json>, Findings> {
    let mut results = HashMap::new();
    let Ok(entries) = fs::read_dir(root().join(Path::new(folder))) else { return Ok(results) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"))
        else {
            continue;
        };
        let text = fs::read_to_string(&path).map_err(|error| error.to_string());
        let json = text.and_then(|text| {
            serde_json::from_str::<Json>(&text).map_err(|error| error.to_string())
        });
        let json = json.map_err(|what| vec![format!("{folder}/{name}.json: {what}")])?;
        if json["schema"] != 1 || json["name"] != name {
            return Err(vec![format!(
                "{folder}/{name}.json: not a result of schema 1 by that name"
            )]);
        }
        results.insert(name.to_owned(), json);
    }
    Ok(results)
}

/// The suite's rows in order; takes their results out of `results`.
fn rows(suite: &str, results: &mut HashMap<String, Json>) -> Result<Vec<Row>, String> {
    let suite: toml::Table = suite.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let rows = suite.get("row").and_then(toml::Value::as_array).ok_or("it has no rows")?;
    rows.iter()
        .map(|row| {
            let text = |key: &str| row.get(key).and_then(toml::Value::as_str).map(str::to_owned);
            let name = text("name").ok_or("a row has no name")?;
            let what = text("what").ok_or_else(|| format!("row {name} does not say what it is"))?;
            let result = results.remove(&name);
            let stale = result.as_ref().and_then(|result| stale(row, result));
            Ok(Row { result, name, what, bound: text("bound"), stale })
        })
        .collect()
}

/// In what a result differs from the suite's row, if it was measured for another one.
fn stale(row: &toml::Value, result: &Json) -> Option<&'static str> {
    let number = |key: &str| {
        let value = row.get(key)?;
        value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64))
    };
    let command = |side: &str, key: &str| row.get(side)?.get(key)?.as_str();
    let sides = [("a", "A's command"), ("b", "B's command")];
    let mut commands = sides.into_iter().filter(|(side, _)| {
        ["server", "program"]
            .into_iter()
            .any(|key| command(side, key) != result[side][key].as_str())
    });
    ["must", "aim"]
        .into_iter()
        .find(|key| number(key) != result[*key].as_f64())
        .or_else(|| commands.next().map(|(_, what)| what))
}

/// What ran beside rows, by their names: `beside.toml` of a folder. Each name must be a row with a result.
fn beside(folder: &str, rows: &[Row]) -> Result<HashMap<String, String>, Findings> {
    let path = format!("{folder}/beside.toml");
    let Ok(text) = fs::read_to_string(root().join(&path)) else { return Ok(HashMap::new()) };
    let table: toml::Table =
        text.parse().map_err(|error: toml::de::Error| vec![format!("{path}: {error}")])?;
    let mut beside = HashMap::new();
    for (what, names) in &table {
        for name in names.as_array().into_iter().flatten().filter_map(toml::Value::as_str) {
            if !rows.iter().any(|row| row.name == name && row.result.is_some()) {
                return Err(vec![format!("{path}: there is no result of {name:?}")]);
            }
            if beside.insert(name.to_owned(), what.clone()).is_some() {
                return Err(vec![format!("{path}: {name:?} stands there twice")]);
            }
        }
    }
    Ok(beside)
}

/// The commits of a machine's results, oldest result first.
fn builds(page: &mut String, machine: &str, rows: &[Row]) {
    let mut commits: Vec<(String, Vec<&str>)> = Vec::new();
    let mut results: Vec<&Json> = rows.iter().filter_map(|row| row.result.as_ref()).collect();
    results.sort_by_key(|result| text(&result["machine"]["date"]));
    for result in results {
        let (commit, day) = (commit_of(result), day_of(result));
        match commits.iter_mut().find(|(known, _)| *known == commit) {
            Some((_, days)) => days.push(day),
            None => commits.push((commit, vec![day])),
        }
    }
    for (commit, days) in commits {
        let (count, first) = (days.len(), days[0]);
        let last = days[count - 1];
        let days = if first == last { first.to_owned() } else { format!("{first} to {last}") };
        let _ = writeln!(page, "| {machine} | {commit} | {days} | {count} |");
    }
}

/// The commit that a result is of.
fn commit_of(result: &Json) -> String {
    let machine = &result["machine"];
    let commit: String = text(&machine["commit"]).chars().take(12).collect();
    format!("{commit}{}", if machine["dirty"] == true { " with changes" } else { "" })
}

/// The day of a result.
fn day_of(result: &Json) -> &str {
    text(&result["machine"]["date"]).split('T').next().unwrap_or_default()
}

fn render(page: &mut String, rows: &[Row]) {
    page.push_str("\n## The table\n\n");
    page.push_str("| row | what | class | must | aim | value | pairs (discarded) | verdict |\n");
    page.push_str("|---|---|---|---|---|---|---|---|\n");
    for row in rows {
        let _ = match &row.result {
            None => {
                writeln!(page, "| {} | {} | | | | | | not measured |", row.name, cell(&row.what))
            }
            Some(result) => table_line(page, row, result),
        };
    }
    let measured = || rows.iter().filter_map(|row| Some((row, row.result.as_ref()?)));
    page.push_str(
        "\n## Both sides\n\nMedians over the pairs; CPU and busy times are per message.\n\n",
    );
    page.push_str("| row | A | B |\n|---|---|---|\n");
    for (row, result) in measured() {
        let side = |key: &str| match result[key].as_object() {
            None => String::new(),
            Some(_) => {
                let label = text(&result[key]["label"]);
                let colon = if label.is_empty() { "" } else { ": " };
                format!("{label}{colon}{}", text(&result["shown"][key]))
            }
        };
        let _ = writeln!(page, "| {} | {} | {} |", row.name, cell(&side("a")), cell(&side("b")));
    }
    page.push_str("\n## What bounds it, and the next step\n\n");
    for (row, result) in measured() {
        let (bound, next) = (text(&result["bound"]), text(&result["next"]));
        if !bound.is_empty() || !next.is_empty() {
            let _ = writeln!(page, "- **{}**: {bound} *Next:* {next}", row.name);
        }
    }
    page.push_str("\n## How each was measured\n");
    for (row, result) in measured() {
        how(page, row, result);
    }
}

/// What another machine came to: values without their details, which its results have. Rows that are not `known`
/// from above say what they are, and which of them have no result. `note` is what else there is to say of the machine.
fn elsewhere(
    page: &mut String,
    (name, note): (&str, &str),
    rows: &[Row],
    known: &[Row],
    beside: &HashMap<String, String>,
) {
    let measured: Vec<(&Row, &Json)> =
        rows.iter().filter_map(|row| Some((row, row.result.as_ref()?))).collect();
    let Some((_, first)) = measured.first() else { return };
    let _ = writeln!(
        page,
        "\n## Elsewhere: {name}\n\n{}. Details: `{RESULTS}/{name}/`.\n",
        host_of(first)
    );
    if !note.trim().is_empty() {
        let _ = writeln!(page, "{}\n", note.trim());
    }
    provenance(page, &measured, beside);
    page.push_str("| row | must | aim | value | A | B | pairs (discarded) | verdict |\n|---|---|---|---|---|---|---|---|\n");
    for (row, result) in &measured {
        let shown = |key: &str| cell(text(&result["shown"][key]));
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            row.name,
            shown("must"),
            shown("aim"),
            shown("value"),
            shown("a"),
            shown("b"),
            counts(result),
            verdict_of(result),
        );
    }
    let is_known = |row: &Row| known.iter().any(|other| other.name == row.name);
    let new: Vec<_> = measured.iter().filter(|(row, _)| !is_known(row)).collect();
    for (index, (row, result)) in new.into_iter().enumerate() {
        let first = if index == 0 { "\n" } else { "" };
        let bound = row.bound.as_deref().unwrap_or(text(&result["bound"]));
        let _ = writeln!(page, "{first}- **{}**: {}. *Bound:* {bound}", row.name, row.what);
    }
    let missing = rows.iter().filter(|row| row.result.is_none() && !is_known(row));
    let missing: Vec<&str> = missing.map(|row| row.name.as_str()).collect();
    // A machine without a GPU has none of those rows.
    let any = measured.iter().any(|(row, _)| !is_known(row));
    if any && !missing.is_empty() {
        let _ = writeln!(page, "\nNot measured there: {}.", missing.join(", "));
    }
}

/// Of which commit and day each row is, of how many pairs, and what ran beside it.
fn provenance(page: &mut String, measured: &[(&Row, &Json)], beside: &HashMap<String, String>) {
    type Group<'a> = (String, &'a str, usize, &'a str);
    let mut groups: Vec<(Group<'_>, Vec<&str>)> = Vec::new();
    let mut measured = measured.to_vec();
    measured.sort_by_key(|(_, result)| std::cmp::Reverse(text(&result["machine"]["date"])));
    for (row, result) in measured {
        let pairs = result["pairs"].as_array().map_or(0, Vec::len);
        let beside = beside.get(&row.name).map_or("not recorded", String::as_str);
        let group = (commit_of(result), day_of(result), pairs, beside);
        match groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, rows)) => rows.push(&row.name),
            None => groups.push((group, vec![&row.name])),
        }
    }
    page.push_str("| rows | commit | measured | pairs | beside them |\n|---|---|---|---|---|\n");
    for ((commit, day, pairs, beside), rows) in groups {
        let _ = writeln!(page, "| {} | {commit} | {day} | {pairs} | {beside} |", rows.join(", "));
    }
    page.push('\n');
}

fn table_line(page: &mut String, row: &Row, result: &Json) -> std::fmt::Result {
    let shown = |key: &str| cell(text(&result["shown"][key]));
    writeln!(
        page,
        "| {} | {} | {} | {} | {} | {} | {} | {} |",
        row.name,
        cell(&row.what),
        text(&result["class"]),
        shown("must"),
        shown("aim"),
        shown("value"),
        counts(result),
        verdict_of(result),
    )
}

/// Pairs that count, and those that do not.
fn counts(result: &Json) -> String {
    let count = |key: &str| result[key].as_array().map_or(0, Vec::len);
    format!("{} ({})", count("pairs"), count("discarded"))
}

/// The verdict, with its reason where there is none.
fn verdict_of(result: &Json) -> String {
    let verdict = text(&result["verdict"]).replace('-', " ");
    let verdict = match (verdict.as_str(), aim_of(result)) {
        (_, None) => verdict,
        // Without a must the aim alone is judged.
        ("no verdict", Some(aim)) if result["must"].is_null() => aim.to_owned(),
        (_, Some(aim)) => format!("{verdict}, {aim}"),
    };
    match text(&result["reason"]) {
        "" => verdict,
        reason => format!("{verdict}: {}", cell(reason)),
    }
}

/// What the interval says of the aim; `None` where there is none, or too few pairs.
fn aim_of(result: &Json) -> Option<&'static str> {
    if result["meets_aim"].as_bool()? {
        return Some("aim met");
    }
    // A ratio above 1 is good whichever way the figure improves.
    let higher = result["combine"] == "ratio" || result["better"] == "higher";
    let end = &result["value"]["interval"][if higher { "high" } else { "low" }];
    let (end, aim) = (end.as_f64()?, result["aim"].as_f64()?);
    let beyond = if higher { end >= aim } else { end <= aim };
    Some(if beyond { "aim undecided" } else { "aim not met" })
}

/// Where, when, with which commands.
fn how(page: &mut String, row: &Row, result: &Json) {
    let cores = &result["cores"];
    let _ = writeln!(page, "\n### {}\n", row.name);
    for (name, key) in [("A", "a"), ("B", "b")] {
        let side = &result[key];
        let alone = if side["memcached"] == true { "memcached" } else { "" };
        let commands = [text(&side["server"]), text(&side["program"]), alone];
        let Some(command) = commands.into_iter().find(|command| !command.is_empty()) else {
            continue;
        };
        let _ = write!(page, "- {name}: `{command}`");
        if let Some(load) = side["load"].as_object() {
            let parts = load.iter().filter(|(key, _)| *key != "class");
            let parts =
                parts.map(|(key, value)| format!("{} {}", key.replace('_', " "), plain(value)));
            let _ = write!(page, "; load: {}", parts.collect::<Vec<_>>().join(", "));
        }
        page.push('\n');
    }
    let schedule = &result["schedule"];
    let range = match text(&result["shown"]["range"]) {
        "" => String::new(),
        range => format!("; all pairs: {range}"),
    };
    let _ = writeln!(
        page,
        "- {} of {} s after {} s{range}; server on core {}, client on core {}{}{}",
        result["pairs"].as_array().map_or(0, Vec::len),
        plain(&schedule["duration_s"]),
        plain(&schedule["warmup_s"]),
        plain(&cores["server"]),
        plain(&cores["client"]),
        match (result["ping_pong_ns"].as_f64(), text(&result["state"])) {
            (Some(ns), state) => format!(", {state} ({ns:.0} ns there and back)"),
            _ => String::new(),
        },
        match result["slowed_pairs"].as_u64() {
            None | Some(0) => String::new(),
            Some(pairs) => format!("; the server's did less than their best around {pairs} pairs"),
        }
    );
    let _ = writeln!(page, "- {}", machine_of(result));
}

/// The machine, the source, the date.
fn machine_of(result: &Json) -> String {
    let date = text(&result["machine"]["date"]);
    format!("{}; commit {}; {date}", host_of(result), commit_of(result))
}

/// The machine.
fn host_of(result: &Json) -> String {
    let machine = &result["machine"];
    let governor = match text(&machine["governor"]) {
        "" => String::new(),
        governor => format!(", governor {governor}"),
    };
    format!(
        "{}, {} cores, Linux {}{governor}",
        text(&machine["cpu"]),
        plain(&machine["cores"]),
        text(&machine["host_kernel"]),
    )
}

fn text(value: &Json) -> &str {
    value.as_str().unwrap_or_default()
}

/// A value without the quotes of texts and the brackets of lists.
fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// Text inside a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const SUITE: &str = r#"
        schema = 1
        [[row]]
        name = "echo"
        what = "echo | of 64 B"
        [[row]]
        name = "idle"
        what = "nothing to do"
        [[row]]
        name = "later"
        what = "not built"
    "#;

    fn results() -> HashMap<String, Json> {
        let machine = json!({
            "cpu": "A Processor", "cores": 2, "host_kernel": "6.1", "governor": "", "dirty": true,
            "commit": "0123456789abcdef", "date": "2026-03-01T12:00:00Z",
        });
        let common = |name: &str| {
            json!({
                "schema": 1, "name": name, "machine": machine, "cores": { "server": 0, "client": [1] },
                "schedule": { "pairs": 2, "warmup_s": 0.5, "duration_s": 2.0 }, "state": "near",
                "ping_pong_ns": 110.4, "pairs": [{}, {}], "discarded": ["the core moved"],
                "bound": "", "next": "", "reason": null, "meets_aim": null, "class": "",
            })
        };
        let with = |mut base: Json, more: Json| {
            let more = more.as_object().unwrap().clone();
            base.as_object_mut().unwrap().extend(more);
            base
        };
        let load = json!({ "url": "udp", "class": "T0", "workload": "echo:64", "window": 64 });
        let echo = json!({
            "class": "T0", "verdict": "pass", "meets_aim": true, "bound": "The host kernel.",
            "next": "Fewer calls.",
            "a": { "label": "Serval", "server": "serval serve x", "load": load },
            "b": { "label": "", "program": "target/baselines/echo" },
            "shown": {
                "must": "at least 0.950x", "aim": "at least 0.980x", "value": "0.990x [0.985x, 0.995x]",
                "range": "0.980x to 1.000x", "a": "310.0 k/s", "b": "313.0 k/s",
            },
        });
        let idle = json!({
            "verdict": "void", "reason": "it burns", "a": { "program": "measure idle" }, "b": null,
            "shown": { "must": "", "aim": "", "value": "", "range": "", "a": "", "b": "" },
        });
        let entry = |name: &str, more| (name.to_owned(), with(common(name), more));
        HashMap::from([entry("echo", echo), entry("idle", idle)])
    }

    #[test]
    fn other_machines_show_their_values() {
        let mut page = String::new();
        let mut measured = rows(SUITE, &mut results()).unwrap();
        let what = "what there was no time for".to_owned();
        let name = "never".to_owned();
        measured.push(Row { name, what, bound: None, result: None, stale: None });
        let known = &measured[1..measured.len() - 1];
        let beside = HashMap::from([("echo".to_owned(), "nothing".to_owned())]);
        elsewhere(&mut page, ("a-processor", "In a hurry.\n"), &measured, known, &beside);
        assert_eq!(
            page,
            "
## Elsewhere: a-processor

A Processor, 2 cores, Linux 6.1. Details: `docs/benchmarks/a-processor/`.

In a hurry.

| rows | commit | measured | pairs | beside them |
|---|---|---|---|---|
| echo | 0123456789ab with changes | 2026-03-01 | 2 | nothing |
| idle | 0123456789ab with changes | 2026-03-01 | 2 | not recorded |

| row | must | aim | value | A | B | pairs (discarded) | verdict |
|---|---|---|---|---|---|---|---|
| echo | at least 0.950x | at least 0.980x | 0.990x [0.985x, 0.995x] | 310.0 k/s | 313.0 k/s | 2 (1) | pass, aim met |
| idle |  |  |  |  |  | 2 (1) | void: it burns |

- **echo**: echo | of 64 B. *Bound:* The host kernel.

Not measured there: never.
"
        );
    }

    #[test]
    fn the_page_says_what_the_results_say() {
        let mut results = results();
        let rows = rows(SUITE, &mut results).unwrap();
        assert!(results.is_empty());
        let mut body = String::new();
        render(&mut body, &rows);
        let expected = "
## The table

| row | what | class | must | aim | value | pairs (discarded) | verdict |
|---|---|---|---|---|---|---|---|
| echo | echo \\| of 64 B | T0 | at least 0.950x | at least 0.980x | 0.990x [0.985x, 0.995x] | 2 (1) | pass, aim met |
| idle | nothing to do |  |  |  |  | 2 (1) | void: it burns |
| later | not built | | | | | | not measured |

## Both sides

Medians over the pairs; CPU and busy times are per message.

| row | A | B |
|---|---|---|
| echo | Serval: 310.0 k/s | 313.0 k/s |
| idle |  |  |

## What bounds it, and the next step

- **echo**: The host kernel. *Next:* Fewer calls.

## How each was measured

### echo

- A: `serval serve x`; load: url udp, workload echo:64, window 64
- B: `target/baselines/echo`
- 2 of 2.0 s after 0.5 s; all pairs: 0.980x to 1.000x; server on core 0, client on core 1, near (110 ns there and back)
- A Processor, 2 cores, Linux 6.1; commit 0123456789ab with changes; 2026-03-01T12:00:00Z

### idle

- A: `measure idle`
- 2 of 2.0 s after 0.5 s; server on core 0, client on core 1, near (110 ns there and back)
- A Processor, 2 cores, Linux 6.1; commit 0123456789ab with changes; 2026-03-01T12:00:00Z
";
        assert_eq!(body, expected);
    }

    #[test]
    fn verdicts_say_what_became_of_the_aim() {
        let mut result = json!({
            "verdict": "pass", "meets_aim": false, "must": 1.0, "aim": 4.0, "combine": "ratio",
            "better": "lower", "reason": null, "value": { "interval": { "low": 2.0, "high": 3.0 } },
        });
        assert_eq!(verdict_of(&result), "pass, aim not met");
        result["value"]["interval"]["high"] = json!(5.0);
        assert_eq!(verdict_of(&result), "pass, aim undecided");
        result["verdict"] = json!("no-verdict");
        result["must"] = Json::Null;
        assert_eq!(verdict_of(&result), "aim undecided");
        result["meets_aim"] = json!(true);
        assert_eq!(verdict_of(&result), "aim met");
        result["combine"] = json!("alone");
        result["meets_aim"] = json!(false);
        assert_eq!(verdict_of(&result), "aim undecided", "3 of at most 4");
        result["aim"] = json!(1.0);
        assert_eq!(verdict_of(&result), "aim not met", "2 of at most 1");
        result["meets_aim"] = Json::Null;
        result["reason"] = json!("3 pairs");
        assert_eq!(verdict_of(&result), "no verdict: 3 pairs");
    }

    #[test]
    fn the_head_says_of_which_builds_the_records_are() {
        let mut page = String::new();
        builds(&mut page, "here", &rows(SUITE, &mut results()).unwrap());
        assert_eq!(page, "| here | 0123456789ab with changes | 2026-03-01 | 2 |\n");
    }

    #[test]
    fn results_of_another_row_are_found() {
        let suite = r#"
            [[row]]
            name = "echo"
            what = "w"
            must = 1
            a = { server = "serval serve x" }
            b = { program = "echo" }
        "#;
        let good = json!({
            "must": 1.0, "aim": null, "a": { "server": "serval serve x" },
            "b": { "program": "echo" },
        });
        let stale = |key: &str, value: Json| {
            let mut result = good.clone();
            result[key] = value;
            rows(suite, &mut HashMap::from([("echo".to_owned(), result)])).unwrap()[0].stale
        };
        assert_eq!(stale("must", json!(1.0)), None);
        assert_eq!(stale("must", json!(0.9)), Some("must"));
        assert_eq!(stale("must", json!(null)), Some("must"));
        assert_eq!(stale("aim", json!(2.0)), Some("aim"));
        assert_eq!(stale("a", json!({ "server": "serval serve y" })), Some("A's command"));
        assert_eq!(stale("b", json!(null)), Some("B's command"));
    }

    #[test]
    fn rows_need_names_and_results_need_rows() {
        let mut stray = HashMap::from([("other".to_owned(), json!({}))]);
        assert_eq!(rows(SUITE, &mut stray).unwrap().len(), 3);
        assert_eq!(stray.len(), 1, "what no row took is left");
        assert!(rows("schema = 1", &mut stray).is_err());
        assert!(rows("[[row]]\nwhat = \"x\"", &mut stray).is_err());
    }
}
