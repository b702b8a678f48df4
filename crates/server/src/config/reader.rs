//! Typed reading of tables: every accessor checks type and range, records the effective value, and adds a [`Problem`]
//! instead of stopping, so that one run reports everything.

use std::any::Any;
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::Value as Json;

use super::Inspect;
use super::diagnostic::{Origin, Problem, Source, Span};
use super::keys::{place_of, section_with};
use super::tree::{Entry, Node, Table, Value};
use super::words::{nearest, suggestion};

/// The effective value of one key.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The key's table: `engine`, `service.digits`, `service.digits.backend.db`.
    pub section: String,
    /// The key.
    pub key: String,
    /// Its value, with the type of the configuration file.
    pub value: Json,
    /// Its origin.
    pub origin: Origin,
}

/// The results of reading.
pub(super) struct Report<'s> {
    pub(super) sources: &'s [Source],
    pub(super) problems: Vec<Problem>,
    pub(super) settings: Vec<Setting>,
    /// Opens kernel files, if requested.
    pub(super) inspect: Option<Inspect>,
    /// The kernel files that were opened.
    pub(super) opened: Vec<Arc<dyn Any>>,
}

impl Report<'_> {
    pub(super) fn problem(&mut self, problem: Problem) {
        self.problems.push(problem);
    }
}

/// The places of a table and its keys, for errors that are found after reading.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// The table's header.
    pub(super) header: Span,
    /// The values that were given.
    pub(super) values: HashMap<&'static str, Span>,
}

/// One table being read.
pub(super) struct Section<'t> {
    /// As shown: `[engine]`, `service "digits"`.
    pub(super) title: String,
    /// For [`Setting::section`].
    pub(super) path: String,
    table: Option<&'t Table>,
    known: Vec<&'static str>,
    places: Places,
}

impl<'t> Section<'t> {
    /// A table, which may be absent; then problems point at `header`.
    pub(super) fn new(title: &str, path: &str, table: Option<&'t Table>, header: Span) -> Self {
        let header = table.map_or(header, |table| table.span);
        Self {
            title: title.to_owned(),
            path: path.to_owned(),
            table,
            known: Vec::new(),
            places: Places { header, values: HashMap::new() },
        }
    }

    /// The place of the whole table.
    pub(super) fn header(&self) -> Span {
        self.places.header
    }

    /// The value's place, or the table's if there is no value.
    pub(super) fn place(&self, key: &str) -> Span {
        self.places.values.get(key).copied().unwrap_or(self.places.header)
    }

    /// The key's entry; marks the key as known.
    pub(super) fn entry(&mut self, key: &'static str) -> Option<&'t Entry> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let entry = self.table?.entry(key)?;
        self.places.values.insert(key, entry.node.span);
        Some(entry)
    }

    /// The value of a key that is read later.
    pub(super) fn peek(&self, key: &str) -> Option<&'t Value> {
        self.table?.entry(key).map(|entry| &entry.node.value)
    }

    /// Records the effective value of a key.
    pub(super) fn record(&self, report: &mut Report<'_>, key: &str, value: impl Into<Json>) {
        let given = self.places.values.get(key);
        let origin = given.map_or(Origin::Default, |span| report.sources[span.source].origin);
        let (section, key, value) = (self.path.clone(), key.to_owned(), value.into());
        report.settings.push(Setting { section, key, value, origin });
    }

    /// Reports a missing value.
    pub(super) fn missing(&self, report: &mut Report<'_>, key: &str, example: &str) {
        report.problem(Problem::new(
            self.header(),
            format!("{} has no `{key}`", self.title),
            format!("add {key} = {example}"),
        ));
    }

    /// An integer in a range.
    pub(super) fn integer(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        range: RangeInclusive<u64>,
        default: u64,
    ) -> u64 {
        let given = self.entry(key).and_then(|entry| integer_of(report, key, &entry.node, &range));
        let value = given.unwrap_or(default);
        self.record(report, key, value);
        value
    }

    /// `true` or `false`.
    pub(super) fn boolean(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        default: bool,
    ) -> bool {
        let given = self.entry(key).and_then(|entry| boolean_of(report, key, &entry.node));
        let value = given.unwrap_or(default);
        self.record(report, key, value);
        value
    }

    /// A text value, if there is one. Not recorded: the caller interprets it.
    pub(super) fn text(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        example: &str,
    ) -> Option<(String, Span)> {
        let entry = self.entry(key)?;
        text_of(report, key, &entry.node, example)
    }

    /// One of several words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        choices: &[(&'static str, T)],
        default: &'static str,
    ) -> T {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let listed = words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        let given = self.text(report, key, &listed).and_then(|(text, span)| {
            let found = choices.iter().find(|(word, _)| *word == text);
            if found.is_none() {
                let what = format!("`{key}` cannot be \"{text}\"");
                let near =
                    suggestion(&text, &words).or_else(|| nearest(&text, words.iter().copied()));
                report.problem(match near {
                    Some(near) => Problem::new(span, what, format!("did you mean \"{near}\"?"))
                        .help(format!("it is one of {listed}")),
                    None => Problem::new(span, what, format!("must be one of {listed}")),
                });
            }
            found.copied()
        });
        let default = || choices.iter().find(|(word, _)| *word == default).copied();
        let (word, value) = given.or_else(default).expect("the default is a choice");
        self.record(report, key, word);
        value
    }

    /// Reports every key that was not read. Returns the places of the others.
    pub(super) fn finish(self, report: &mut Report<'_>) -> Places {
        let entries = self.table.map_or(&[][..], |table| &table.entries);
        for entry in entries.iter().filter(|entry| !self.known.contains(&entry.key.as_str())) {
            let what = format!("unknown key `{}` in {}", entry.key, self.title);
            let elsewhere = section_with(&entry.key);
            let label = match nearest(&entry.key, self.known.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => match elsewhere {
                    Some(section) => format!("`{}` is a key of {section}", entry.key),
                    None => "no such key".to_owned(),
                },
            };
            let mut known = self.known.clone();
            known.sort_by_key(|key| place_of(&self.path, key));
            let help = format!("{} has {}", self.title, known.join(", "));
            report.problem(Problem::new(entry.key_span, what, label).help(help));
        }
        self.places
    }
}

/// A node as text.
pub(super) fn text_of(
    report: &mut Report<'_>,
    key: &str,
    node: &Node,
    example: &str,
) -> Option<(String, Span)> {
    match (&node.value, &node.bare) {
        (_, Some(bare)) => Some((bare.clone(), node.span)),
        (Value::String(text), None) => Some((text.clone(), node.span)),
        _ => {
            wrong_type(report, key, node, &format!("a string: {example}"));
            None
        }
    }
}

/// `true` or `false`.
pub(super) fn boolean_of(report: &mut Report<'_>, key: &str, node: &Node) -> Option<bool> {
    match node.value {
        Value::Boolean(yes) => Some(yes),
        _ => {
            wrong_type(report, key, node, "true or false");
            None
        }
    }
}

/// A node as an integer in a range.
pub(super) fn integer_of(
    report: &mut Report<'_>,
    key: &str,
    node: &Node,
    range: &RangeInclusive<u64>,
) -> Option<u64> {
    let (min, max) = (range.start(), range.end());
    let value = match &node.value {
        Value::Integer(value) => value,
        Value::String(text) if text.trim().parse::<u64>().is_ok() && node.bare.is_none() => {
            wrong_type(report, key, node, &format!("an integer: remove the quotes around {text}"));
            return None;
        }
        _ => {
            wrong_type(report, key, node, &format!("an integer in [{min}, {max}]"));
            return None;
        }
    };
    let fits =
        value.and_then(|value| u64::try_from(value).ok()).filter(|value| range.contains(value));
    if fits.is_none() {
        let what = format!("`{key}` is out of range");
        report.problem(Problem::new(node.span, what, format!("must be in [{min}, {max}]")));
    }
    fits
}

/// Reports a value of the wrong type.
pub(super) fn wrong_type(report: &mut Report<'_>, key: &str, node: &Node, wanted: &str) {
    let what = format!("`{key}` is {}", node.value.kind());
    report.problem(Problem::new(node.span, what, format!("must be {wanted}")));
}
