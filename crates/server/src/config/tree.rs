//! A TOML document whose values know their origins, and the values that override it.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostic::{Origin, Problem, Source, Span};
use super::words::nearest;

/// A value with its place.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) span: Span,
    /// The text of an override without quotes: used as a string if one is required.
    pub(super) bare: Option<String>,
}

/// A TOML value.
#[derive(Clone, Debug)]
pub(super) enum Value {
    String(String),
    /// `None`: does not fit 128 bits.
    Integer(Option<i128>),
    Float(f64),
    Boolean(bool),
    Datetime,
    Array(Vec<Node>),
    Table(Table),
}

impl Value {
    /// The name of its type, with the article.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::String(_) => "a string",
            Self::Integer(_) => "an integer",
            Self::Float(value) if !value.is_finite() => "not a finite number",
            Self::Float(_) => "a number with a fraction",
            Self::Boolean(_) => "a boolean",
            Self::Datetime => "a date",
            Self::Array(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

/// A table in the order of the text.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) entries: Vec<Entry>,
    /// The table's header, or its braces.
    pub(super) span: Span,
}

/// One key of a table.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_span: Span,
    pub(super) node: Node,
}

impl Table {
    pub(super) fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    fn put(&mut self, entry: Entry) {
        match self.entries.iter_mut().find(|old| old.key == entry.key) {
            Some(old) => *old = entry,
            None => self.entries.push(entry),
        }
    }

    fn sub_table(&mut self, key: &str) -> Option<&mut Self> {
        let entry = self.entries.iter_mut().find(|entry| entry.key == key)?;
        match &mut entry.node.value {
            Value::Table(table) => Some(table),
            _ => None,
        }
    }
}

/// Parses a whole document. Every syntax error is reported, with the place.
pub(super) fn parse(sources: &[Source], source: usize) -> Result<Table, Vec<Problem>> {
    let text = &sources[source].text;
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        return Err(errors.iter().map(|error| syntax(source, text, error)).collect());
    }
    let whole = Span { source, start: 0, end: 0 };
    Ok(table_of(source, 0, whole, table.into_inner()))
}

fn syntax(source: usize, text: &str, error: &toml::de::Error) -> Problem {
    let range = error.span().unwrap_or(text.len()..text.len());
    // An error at the very end is reported at the last line with content.
    let at_end = range.start >= text.trim_end().len();
    let (start, end) = if at_end && !text.trim_end().is_empty() {
        (text.trim_end().len(), text.trim_end().len())
    } else {
        (range.start, range.end)
    };
    let message = error.message();
    let (what, right) = message.split_once(", expected ").unwrap_or((message, ""));
    let label = match (what, right) {
        ("duplicate key", _) => "give it once".to_owned(),
        ("string values must be quoted", _) if start == end => "write a value here".to_owned(),
        ("string values must be quoted", _) => format!("write \"{}\"", text[start..end].trim()),
        (_, "") => "not TOML".to_owned(),
        (_, right) => format!("expected {right}"),
    };
    Problem::new(Span { source, start, end }, format!("syntax: {what}"), label)
}

fn table_of(source: usize, offset: usize, span: Span, table: DeTable<'_>) -> Table {
    let mut entries: Vec<Entry> = table
        .into_iter()
        .map(|(key, value)| Entry {
            key_span: span_of(source, offset, &key),
            key: key.into_inner().into_owned(),
            node: node_of(source, offset, value),
        })
        .collect();
    entries.sort_by_key(|entry| entry.key_span.start);
    Table { entries, span }
}

fn span_of<T>(source: usize, offset: usize, spanned: &Spanned<T>) -> Span {
    let range = spanned.span();
    Span { source, start: offset + range.start, end: offset + range.end }
}

fn node_of(source: usize, offset: usize, value: Spanned<DeValue<'_>>) -> Node {
    let span = span_of(source, offset, &value);
    let value = match value.into_inner() {
        DeValue::String(text) => Value::String(text.into_owned()),
        DeValue::Integer(int) => {
            Value::Integer(i128::from_str_radix(int.as_str(), int.radix()).ok())
        }
        DeValue::Float(float) => Value::Float(float.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(yes) => Value::Boolean(yes),
        DeValue::Datetime(_) => Value::Datetime,
        DeValue::Array(items) => {
            Value::Array(items.into_iter().map(|item| node_of(source, offset, item)).collect())
        }
        DeValue::Table(table) => Value::Table(table_of(source, offset, span, table)),
    };
    Node { value, span, bare: None }
}

/// One value from the environment or the command line: `engine.workers` and `2`.
#[derive(Clone, Debug)]
pub(super) struct Override {
    /// Path of the key, outermost first.
    pub(super) path: Vec<String>,
    /// The source's index, and the places of path and value in its text.
    pub(super) path_span: Span,
    pub(super) value_span: Span,
}

impl Override {
    /// The value as TOML, or else the text itself as a string.
    fn node(&self, sources: &[Source]) -> Node {
        let text =
            &sources[self.value_span.source].text[self.value_span.start..self.value_span.end];
        // A line end would start another key.
        let parsed = if text.contains(['\n', '\r']) { None } else { DeValue::parse(text).ok() };
        let node = match parsed {
            Some(value) => node_of(self.value_span.source, self.value_span.start, value).value,
            None => Value::String(text.to_owned()),
        };
        let quoted = text.trim_start().starts_with(['"', '\'']) && matches!(node, Value::String(_));
        Node { value: node, span: self.value_span, bare: (!quoted).then(|| text.to_owned()) }
    }
}

/// Applies an override to the document. Accelerators, services and backends are found by name.
pub(super) fn apply(root: &mut Table, sources: &[Source], over: &Override) -> Result<(), Problem> {
    let entry = |key: &str| Entry {
        key: key.to_owned(),
        key_span: over.path_span,
        node: over.node(sources),
    };
    let path: Vec<&str> = over.path.iter().map(String::as_str).collect();
    match path.as_slice() {
        ["schema"] => root.put(entry("schema")),
        [section @ ("engine" | "limits" | "transfer"), key] => {
            section_of(root, section, over).put(entry(key));
        }
        [list @ ("tenant" | "accelerator"), name, key] => {
            named(root, list, name, over)?.put(entry(key));
        }
        ["service", name, "params", key] => {
            let service = named(root, "service", name, over)?;
            section_of(service, "params", over).put(entry(key));
        }
        ["service", service, list @ ("backend" | "function" | "socket" | "file"), name, key] => {
            let service = named(root, "service", service, over)?;
            named(service, list, name, over)?.put(entry(key));
        }
        ["service", service, "function", name, "params", key] => {
            let service = named(root, "service", service, over)?;
            let function = named(service, "function", name, over)?;
            section_of(function, "params", over).put(entry(key));
        }
        ["service", name, key] => named(root, "service", name, over)?.put(entry(key)),
        _ => {
            return Err(Problem::new(
                over.path_span,
                format!("no key has the path `{}`", over.path.join(".")),
                "write engine.KEY, limits.KEY, transfer.KEY, tenant.NAME.KEY, accelerator.NAME.KEY or service.NAME.KEY",
            )
            .help("also service.NAME.params.KEY, service.NAME.backend.NAME.KEY, service.NAME.function.NAME.KEY, service.NAME.socket.NAME.KEY and service.NAME.file.NAME.KEY"));
        }
    }
    Ok(())
}

/// A sub-table, which is created if it does not exist.
fn section_of<'t>(table: &'t mut Table, key: &str, over: &Override) -> &'t mut Table {
    if table.sub_table(key).is_none() {
        let span = over.path_span;
        let value = Value::Table(Table { entries: Vec::new(), span });
        let node = Node { value, span, bare: None };
        table.put(Entry { key: key.to_owned(), key_span: span, node });
    }
    table.sub_table(key).expect("it was just inserted")
}

/// The element of the list `key` that has this name.
fn named<'t>(
    table: &'t mut Table,
    key: &str,
    name: &str,
    over: &Override,
) -> Result<&'t mut Table, Problem> {
    let entry = table.entries.iter_mut().find(|entry| entry.key == key);
    let items = match entry.map(|entry| &mut entry.node.value) {
        Some(Value::Array(items)) => items.as_mut_slice(),
        _ => &mut [],
    };
    let mut names = Vec::new();
    for item in items {
        let Value::Table(table) = &mut item.value else { continue };
        let found = match table.entry("name").map(|entry| &entry.node.value) {
            Some(Value::String(found)) => found.clone(),
            _ => continue,
        };
        if found == name {
            return Ok(table);
        }
        names.push(found);
    }
    let label = match nearest(name, names.iter().map(String::as_str)) {
        Some(near) => format!("did you mean `{near}`?"),
        None if names.is_empty() => format!("there is no {key}"),
        None => format!("there is {}", names.join(", ")),
    };
    Err(Problem::new(over.path_span, format!("no {key} is called `{name}`"), label))
}

/// Values from the environment and flags, as sources and overrides; see [`super::Overrides`].
pub(super) fn overrides(
    given: &super::Overrides,
    sources: &mut Vec<Source>,
    problems: &mut Vec<Problem>,
) -> Vec<Override> {
    let mut found = Vec::new();
    for (name, value) in &given.environment {
        let Some((section, key)) = variable_path(name) else { continue };
        let text = format!("{name}={value}");
        let source =
            Source { name: "environment variable".into(), text, origin: Origin::Environment };
        let path = vec![section, key];
        found.push(override_at(sources.len(), &source.text, 0, name.len(), path));
        sources.push(source);
    }
    for set in &given.sets {
        let source =
            Source { name: "flag".into(), text: format!("--set {set}"), origin: Origin::Flag };
        let (index, skip) = (sources.len(), "--set ".len());
        match set.split_once('=') {
            Some((path, _)) if !path.trim().is_empty() => {
                let equals = skip + path.len();
                let keys = path.trim().split('.').map(str::to_owned).collect();
                found.push(override_at(index, &source.text, skip, equals, keys));
            }
            _ => problems.push(Problem::new(
                Span { source: index, start: skip, end: source.text.len() },
                "this sets nothing",
                "write KEY=VALUE, such as engine.workers=2",
            )),
        }
        sources.push(source);
    }
    found
}

fn override_at(
    source: usize,
    text: &str,
    skip: usize,
    equals: usize,
    path: Vec<String>,
) -> Override {
    let trimmed = |start: usize, end: usize| {
        let part = &text[start..end];
        let start = start + part.len() - part.trim_start().len();
        Span { source, start, end: start + part.trim().len() }
    };
    let (path_span, value_span) = (trimmed(skip, equals), trimmed(equals + 1, text.len()));
    Override { path, path_span, value_span }
}

/// `SERVAL_ENGINE_WORKERS` is `engine.workers`; other variables are ignored.
pub(super) fn variable_path(name: &str) -> Option<(String, String)> {
    let rest = name.strip_prefix("SERVAL_")?;
    for (prefix, section) in [("ENGINE_", "engine"), ("LIMITS_", "limits")] {
        if let Some(key) = rest.strip_prefix(prefix)
            && !key.is_empty()
        {
            return Some((section.to_owned(), key.to_ascii_lowercase()));
        }
    }
    None
}
