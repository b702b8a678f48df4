//! `[[service.function]]` and `[[service.backend.function]]`: functions on the path of messages.

use std::path::Path;

use builtins::{BUILTINS, Builtin, builtin, file_of, read_module};
use builtins::{Code, LibraryError};
use engine::topology::EngineSettings;
use onpath::spec::{FUNCTIONS_MAX, Pin, is_name};
use onpath::{OnFailure, Param, Sizes, Spec};
use sys::private_file::open_regular;

use super::diagnostic::Problem;
use super::fields::read_fields;
use super::reader::{Report, Section, integer_of, text_of, wrong_type};
use super::show::param_json;
use super::tables::{named_section, tables};
use super::tree::{Table, Value};
use super::words::nearest;
use crate::directory::{Directory, PublicKey};

/// Users that may attach functions to a service, at most.
const FUNCTION_USERS_MAX: usize = 64;
/// Keys that may sign modules, at most.
const FUNCTION_KEYS_MAX: usize = 64;

/// Reads the functions of a service or a backend, whose messages have these sizes. With the engine comes whether messages there reach the
/// worker that has their state. Paths are relative to `base`, the configuration file's folder.
pub(super) fn read_functions(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    base: &Path,
    sizes: Sizes,
    engine: (&EngineSettings, bool),
) -> Vec<Spec> {
    let of_backend = section.path.contains(".backend");
    let header = if of_backend { "[[service.backend.function]]" } else { "[[service.function]]" };
    let found = tables(report, section.entry("function"), header);
    if found.len() > FUNCTIONS_MAX {
        let what = format!("{} has {} functions", section.title, found.len());
        let right = format!("at most {FUNCTIONS_MAX}");
        report.problem(Problem::new(section.place("function"), what, right));
    }
    let path = format!("{}.function", section.path);
    let mut taken = Vec::new();
    let read = |(index, table): (usize, &Table)| {
        read_function(report, table, index, &path, &mut taken, (base, engine), sizes)
    };
    found.into_iter().enumerate().take(FUNCTIONS_MAX).map(read).collect()
}

/// Reads a list of users, by number.
pub(super) fn read_users(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    key: &'static str,
) -> Vec<u32> {
    let mut users = Vec::new();
    let Some(entry) = section.entry(key) else {
        section.record(report, key, Vec::<u32>::new());
        return users;
    };
    let Value::Array(items) = &entry.node.value else {
        wrong_type(report, key, &entry.node, "a list of user numbers such as [1001]");
        return users;
    };
    if items.len() > FUNCTION_USERS_MAX {
        let what = format!("{} has {} `{key}`", section.title, items.len());
        let right = format!("at most {FUNCTION_USERS_MAX}");
        report.problem(Problem::new(section.place(key), what, right));
    }
    for item in items.iter().take(FUNCTION_USERS_MAX) {
        // The greatest number stands for no user.
        let range = 0..=u64::from(u32::MAX) - 1;
        users.extend(integer_of(report, key, item, &range).map(|user| user as u32));
    }
    users.sort_unstable();
    users.dedup();
    section.record(report, key, users.clone());
    users
}

/// Reads the directory of functions, and who may sign.
pub(super) fn read_directory(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    base: &Path,
    settings: &mut EngineSettings,
) {
    if let Some((text, _)) = section.text(report, "functions", "\"/var/lib/serval/functions\"") {
        let path = base.join(text);
        settings.functions = std::path::absolute(&path).unwrap_or(path);
    }
    section.record(report, "functions", settings.functions.to_string_lossy().into_owned());
    if let Some(entry) = section.entry("function_keys") {
        let example = "a list of keys such as [\"ed25519:…\"]";
        let Value::Array(items) = &entry.node.value else {
            return wrong_type(report, "function_keys", &entry.node, example);
        };
        if items.len() > FUNCTION_KEYS_MAX {
            let what = format!("{} has {} function keys", section.title, items.len());
            let right = format!("at most {FUNCTION_KEYS_MAX}");
            report.problem(Problem::new(section.place("function_keys"), what, right));
        }
        for item in items.iter().take(FUNCTION_KEYS_MAX) {
            let Some((text, span)) = text_of(report, "function_keys", item, "\"ed25519:…\"")
            else {
                continue;
            };
            match text.parse::<PublicKey>() {
                Ok(key) => settings.function_keys.push(key.0),
                Err(_) => {
                    let what = format!("\"{text}\" is no public key");
                    let right =
                        "`ed25519:` and 64 hexadecimal digits, as `serval fn keygen` prints it";
                    report.problem(Problem::new(span, what, right));
                }
            }
        }
    }
    let keys = settings.function_keys.iter().map(|key| PublicKey(*key).to_string());
    section.record(report, "function_keys", keys.collect::<Vec<_>>());
}

fn read_function(
    report: &mut Report<'_>,
    table: &Table,
    index: usize,
    path: &str,
    taken: &mut Vec<String>,
    (base, engine): (&Path, (&EngineSettings, bool)),
    sizes: Sizes,
) -> Spec {
    let (mut section, name) = named_section(report, table, "function", path, index, taken);
    let at = &mut section;
    let before = report.problems.len();
    let mut spec = Spec::new(&name, "");
    spec.function = read_name(report, at, base);
    spec.params = read_params(report, at, base, builtin(&spec.function));
    read_fields(report, at, &mut spec);
    spec.dictionary = read_dictionary(report, at);
    if !spec.is_module() && at.entry("memory_mib").is_some() {
        let what = "`memory_mib` has no meaning for a built-in function";
        report.problem(Problem::new(at.place("memory_mib"), what, "remove it"));
    }
    if report.problems.len() == before {
        check(report, at, &spec, sizes, engine);
    }
    section.finish(report);
    spec
}

fn read_name(report: &mut Report<'_>, section: &mut Section<'_>, base: &Path) -> String {
    let example = "\"threshold\"";
    let Some(entry) = section.entry("function") else {
        section.missing(report, "function", example);
        return String::new();
    };
    let Some((text, span)) = text_of(report, "function", &entry.node, example) else {
        return String::new();
    };
    section.record(report, "function", text.clone());
    if builtin(&text).is_some() {
        return text;
    }
    if Pin::is_meant(&text) {
        if let Err(why) = text.parse::<Pin>() {
            let (what, right) = why.split_once(": ").unwrap_or((&why, "correct it"));
            report.problem(Problem::new(span, what.to_owned(), right.to_owned()));
        }
        return text;
    }
    if !Spec::new("", &text).is_module() {
        let names: Vec<&str> = BUILTINS.iter().map(|builtin| builtin.name).collect();
        let right = match nearest(&text, names.iter().copied()) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!(
                "one of {}, or the path of a WebAssembly module: FILE.wasm",
                names.join(", ")
            ),
        };
        let what = format!("no built-in function is called \"{text}\"");
        report.problem(Problem::new(span, what, right));
        return text;
    }
    let path = base.join(&text);
    let path = std::path::absolute(&path).unwrap_or(path);
    match std::fs::metadata(&path) {
        Ok(found) if found.is_file() => {}
        Ok(_) => {
            let what = format!("\"{text}\" is not a file");
            report.problem(Problem::new(span, what, "name a WebAssembly module"));
        }
        Err(error) => {
            let what = format!("the module \"{text}\" cannot be read: {error}");
            let right = "compile one as docs/functions.md shows";
            report.problem(Problem::new(span, what, right));
        }
    }
    path.to_string_lossy().into_owned()
}

/// Reads the name of the dictionary.
fn read_dictionary(report: &mut Report<'_>, section: &mut Section<'_>) -> Option<String> {
    let found = section.text(report, "dictionary", "\"sessions\"");
    let name = found.and_then(|(name, span)| {
        if !is_name(&name) {
            let what = format!("`dictionary` is {name:?}");
            let right = "1 to 64 letters, digits, `_` and `-`, and no `-` at the beginning";
            report.problem(Problem::new(span, what, right));
            return None;
        }
        Some(name.to_string())
    });
    section.record(report, "dictionary", name.clone());
    name
}

/// Reads the parameters: integers, unless the function says that one is a text or the path of a file.
fn read_params(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    base: &Path,
    builtin: Option<&Builtin>,
) -> Vec<(String, Param)> {
    let is = |found: Option<&(&str, &str)>, key: &str| found.is_some_and(|(name, _)| *name == key);
    let file = builtin.and_then(|builtin| builtin.file.as_ref());
    let texts = builtin.map_or(&[][..], |builtin| builtin.texts);
    let mut params = Vec::new();
    let mut shown = serde_json::Map::new();
    if let Some(entry) = section.entry("params") {
        let Value::Table(table) = &entry.node.value else {
            wrong_type(report, "params", &entry.node, "a table such as { low = 20 }");
            return params;
        };
        for param in &table.entries {
            let value = match &param.node.value {
                Value::String(text) if is(file, &param.key) => {
                    let path = base.join(text);
                    let path = std::path::absolute(&path).unwrap_or(path);
                    Param::Text(path.to_string_lossy().into_owned())
                }
                Value::String(text) if texts.iter().any(|text| is(Some(text), &param.key)) => {
                    Param::Text(text.clone())
                }
                _ => {
                    let range = 0..=i64::MAX as u64;
                    let value = integer_of(report, &param.key, &param.node, &range);
                    let Some(value) = value else { continue };
                    Param::Integer(value)
                }
            };
            shown.insert(param.key.clone(), param_json(&value));
            params.push((param.key.clone(), value));
        }
    }
    section.record(report, "params", shown);
    params
}

/// Makes an instance, if files are to be opened or it needs none: it says what is wrong with parameters.
fn check(
    report: &mut Report<'_>,
    section: &Section<'_>,
    spec: &Spec,
    sizes: Sizes,
    (engine, hands_over): (&EngineSettings, bool),
) {
    let file = file_of(spec);
    if (file.is_some() || spec.pin().is_some()) && report.inspect.is_none() {
        return;
    }
    let read = |file: &str| -> Result<Vec<u8>, String> {
        let (opened, _) = open_regular(file.as_ref()).map_err(|error| error.to_string())?;
        read_module(opened).map_err(|error| error.to_string())
    };
    let content = match file.as_deref().map(read) {
        Some(Ok(content)) => content,
        Some(Err(why)) if !spec.is_module() => {
            let what = format!("the file {:?} cannot be read: {why}", file.unwrap_or_default());
            let right = "name a file that the server may read";
            return report.problem(Problem::new(section.place("params"), what, right));
        }
        // A module that cannot be read has been reported.
        _ => match spec.pin().map(|pin| Directory::of(engine).open(&pin)) {
            Some(Ok(content)) => content,
            Some(Err(error)) => {
                let text = error.to_string();
                let (what, right) = text.split_once(": ").unwrap_or((&text, "install it again"));
                let place = section.place("function");
                return report.problem(Problem::new(place, what.to_owned(), right.to_owned()));
            }
            None => Vec::new(),
        },
    };
    let made = Code::open(spec, &content).and_then(|code| {
        code.check_workers(spec, engine.workers, hands_over)?;
        code.instance(spec, sizes).map(drop)
    });
    let Err(error) = made else { return };
    let place = match error {
        LibraryError::NoParam { .. }
        | LibraryError::WrongParam { .. }
        | LibraryError::File { .. } => "params",
        _ => "function",
    };
    let text = error.to_string();
    let (what, right) = text.split_once(": ").unwrap_or((&text, "use another function"));
    report.problem(Problem::new(section.place(place), what.to_owned(), right.to_owned()));
}

impl super::keys::Words for OnFailure {
    const WORDS: &'static [(&'static str, Self)] =
        &[("open", Self::Open), ("closed", Self::Closed)];
}
