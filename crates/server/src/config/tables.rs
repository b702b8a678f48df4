//! Tables of the document: lists of named ones, and keys that exclude each other.

use super::diagnostic::Problem;
use super::reader::{Report, Section, wrong_type};
use super::tree::{Entry, Table, Value};

/// The tables of `[[key]]`.
pub(super) fn tables<'t>(
    report: &mut Report<'_>,
    entry: Option<&'t Entry>,
    header: &str,
) -> Vec<&'t Table> {
    let Some(entry) = entry else { return Vec::new() };
    let mut found = Vec::new();
    match &entry.node.value {
        Value::Array(items) => {
            for item in items {
                match &item.value {
                    Value::Table(table) => found.push(table),
                    _ => wrong_type(report, &entry.key, item, &format!("a table: write {header}")),
                }
            }
        }
        _ => {
            let wanted = format!("a list of tables: write {header} with two brackets");
            wrong_type(report, &entry.key, &entry.node, &wanted);
        }
    }
    found
}

/// The table of `[key]`.
pub(super) fn sub_table<'t>(
    report: &mut Report<'_>,
    entry: Option<&'t Entry>,
    header: &str,
) -> Option<&'t Table> {
    let entry = entry?;
    match &entry.node.value {
        Value::Table(table) => Some(table),
        _ => {
            wrong_type(report, &entry.key, &entry.node, &format!("a table: write {header}"));
            None
        }
    }
}

/// Starts reading one table of a list of named ones. Names are unique and short, since they become labels of metrics
/// and parts of paths.
pub(super) fn named_section<'t>(
    report: &mut Report<'_>,
    table: &'t Table,
    list: &str,
    path: &str,
    index: usize,
    taken: &mut Vec<String>,
) -> (Section<'t>, String) {
    let unnamed = format!("{list} number {}", index + 1);
    let mut section = Section::new(&unnamed, &format!("{path}.{index}"), Some(table), table.span);
    if table.entry("name").is_none() {
        section.missing(report, "name", &format!("\"{list}{index}\""));
    }
    let Some((name, span)) = section.text(report, "name", &format!("\"{list}{index}\"")) else {
        return (section, format!("{list}{index}"));
    };
    section.title = format!("{list} \"{name}\"");
    section.path = format!("{path}.{name}");
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > 64 || !name.chars().all(letter) {
        let what = format!("\"{name}\" cannot be a name");
        let right = "1 to 64 letters, digits, `_` and `-`";
        report.problem(Problem::new(span, what, right));
    } else if taken.contains(&name) {
        let what = format!("two {list}s are called \"{name}\"");
        report.problem(Problem::new(span, what, "give each its own name"));
    }
    taken.push(name.clone());
    (section, name)
}

/// Reports keys that are invalid with another key's value.
pub(super) fn without(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    keys: &[&'static str],
    with: &str,
    instead: &str,
) {
    for key in keys {
        // Reading makes the key known, so that it is not reported twice.
        if section.entry(key).is_some() {
            let what = format!("`{key}` is not valid with {with}");
            let right = format!("remove it, or {instead}");
            report.problem(Problem::new(section.place(key), what, right));
        }
    }
}

/// Reads the tables `[[service.KEY]]`, of which there may be `most`. `read` reads one of them; what is no entry is left out.
pub(super) fn list_of_service<T>(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    key: &'static str,
    most: usize,
    mut read: impl FnMut(&mut Report<'_>, &mut Section<'_>) -> Option<T>,
) -> Vec<T> {
    let found = tables(report, section.entry(key), &format!("[[service.{key}]]"));
    if found.len() > most {
        let what = format!("{} has {} {key}s", section.title, found.len());
        report.problem(Problem::new(section.place(key), what, format!("at most {most}")));
    }
    let path = format!("{}.{key}", section.path);
    let mut taken = Vec::new();
    let read = |(index, table): (usize, &Table)| {
        let (mut section, _) = named_section(report, table, key, &path, index, &mut taken);
        let entry = read(report, &mut section);
        section.finish(report);
        entry
    };
    found.into_iter().enumerate().take(most).filter_map(read).collect()
}

/// Which one of two keys a table has. Both or neither is a problem.
pub(super) fn one_of(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    [one, other]: [&'static str; 2],
    right: &str,
) -> Option<&'static str> {
    let what = match (section.entry(one).is_some(), section.entry(other).is_some()) {
        (true, false) => return Some(one),
        (false, true) => return Some(other),
        (true, true) => format!("{} has both `{one}` and `{other}`", section.title),
        (false, false) => format!("{} has neither `{one}` nor `{other}`", section.title),
    };
    report.problem(Problem::new(section.place(one), what, right));
    None
}
