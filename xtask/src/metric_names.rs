//! Metrics that documents name: part of `cargo xtask tidy`. The table of docs/operations.md has every metric (a test of the exporter
//! compares them); each name of this form in a document is one of them, or something else that a source file has.

use std::collections::HashSet;

use crate::Findings;
use crate::files::File;

/// The document with the table, and the line before it.
const TABLE: (&str, &str) = ("docs/operations.md", "<!-- metrics -->");
/// What exported names begin with, as do names in C headers and files.
const PREFIX: &str = "serval_";
/// Ends of names of series of a histogram.
const SERIES: [&str; 3] = ["_bucket", "_sum", "_count"];
/// Ends of names that nothing but a metric has.
const UNITS: [&str; 3] = ["_total", "_seconds", "_bytes"];

/// Reports the metrics that documents name and that do not exist.
pub(crate) fn check(all: &[File], findings: &mut Findings) {
    let metrics = metrics(all);
    if metrics.is_empty() {
        findings.push(format!("{}: no metrics behind {}", TABLE.0, TABLE.1));
    }
    let (documents, sources): (Vec<&File>, Vec<&File>) = all
        .iter()
        .filter(|file| !file.path.starts_with("docs/benchmarks/"))
        .partition(|file| is_document(file));
    let others: HashSet<&str> = sources.iter().flat_map(|file| names(&file.text)).collect();
    for document in documents {
        for (line, text) in document.text.lines().enumerate() {
            for name in names(text).filter(|name| !is_known(name, &metrics, &others)) {
                findings.push(format!("{}: there is no metric {name}", document.at(line)));
            }
        }
    }
}

/// Documents, and the sources of texts about metrics that users read.
fn is_document(file: &File) -> bool {
    file.extension() == "md"
        || ["docs/grafana.json", "crates/wire/src/drop_reason.rs"].contains(&file.path.as_str())
}

/// The names in the table.
fn metrics(all: &[File]) -> HashSet<&str> {
    let page = all.iter().find(|file| file.path == TABLE.0);
    let table = page.and_then(|page| page.text.split_once(TABLE.1)).map_or("", |(_, table)| table);
    let table = table.split("<!-- end -->").next().unwrap_or("");
    table.lines().filter_map(|row| row.strip_prefix("| `")?.split('`').next()).collect()
}

/// The words that begin as metrics do. One before `*`, which stands for several, ends with `_` and is left out.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with(PREFIX) && !word.ends_with('_'))
}

fn is_known(name: &str, metrics: &HashSet<&str>, others: &HashSet<&str>) -> bool {
    let series = SERIES.iter().filter_map(|end| name.strip_suffix(end));
    let is_a_metrics = UNITS.iter().any(|unit| name.ends_with(unit));
    metrics.contains(name)
        || series.into_iter().any(|family| metrics.contains(family))
        || !is_a_metrics && others.contains(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_that_do_not_exist_are_reported() {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let table = "<!-- metrics -->\n| `serval_a_total` | | |\n| `serval_b_seconds` | | |\n";
        let found = |text: &str| {
            let all = [
                file("docs/operations.md", table),
                file("docs/a.md", text),
                file("lib/a.h", "void serval_send(void); /* serval_gone_total */"),
            ];
            let mut findings = Findings::new();
            check(&all, &mut findings);
            findings.len()
        };
        assert_eq!(found("`serval_a_total{x=\"y\"}`, `serval_b_seconds_bucket`, `serval_send`"), 0);
        assert_eq!(found("`serval_a_*`, `libserval_x`, `serval_`"), 0);
        // The name of a metric that is left in a source does not count.
        assert_eq!(found("`serval_gone_total`, `serval_a`, `serval_b_total`"), 3);
    }
}
