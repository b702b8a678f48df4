//! The paths that a file names.

/// Segments, counted from the crate's root.
pub(super) type Path = Vec<String>;

const STARTS: [&str; 3] = ["crate::", "super::", "self::"];

/// Every path in a module's code that begins with `crate::`, `super::` or `self::`.
pub(super) fn named(module: &[String], code: &str) -> Vec<Path> {
    let mut paths = Vec::new();
    for start in STARTS {
        for (at, _) in code.match_indices(start) {
            let before = &code[..at];
            let is_inside = before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            // `pub(in crate::a)` imports nothing.
            if !is_inside && !before.ends_with("(in ") {
                list(&code[at..], "", &mut paths);
            }
        }
    }
    let without_alias = |path: &String| path.split(" as ").next().map(str::to_owned);
    let paths = paths.iter().filter_map(without_alias);
    paths.filter_map(|path| absolute(module, &path)).collect()
}

/// Names that a module exports though others declare them, with what they are; `*` for all names of a module.
pub(super) fn reexports(module: &[String], code: &str) -> Vec<(String, Path)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let line = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        if !line.starts_with("pub") {
            continue;
        }
        let end = code[at..].find(';').map_or(code.len(), |end| at + end);
        let mut paths = Vec::new();
        list(&code[at + "use ".len()..end], "", &mut paths);
        for path in paths {
            let (path, alias) = path.split_once(" as ").unwrap_or((&path, ""));
            // A path without one of the usual starts leads into a module below this one, or into another crate, which has no such module.
            let is_relative = !STARTS.iter().any(|start| path.starts_with(start));
            let path = if is_relative { format!("self::{path}") } else { path.to_owned() };
            let Some(mut target) = absolute(module, &path) else { continue };
            let Some(last) = target.last().cloned() else { continue };
            let name = if alias.is_empty() { last.clone() } else { alias.to_owned() };
            if last == "*" {
                target.pop();
            }
            found.push((name, target));
        }
    }
    found
}

/// A path counted from the root; `None` if it leads out of the crate.
fn absolute(module: &[String], path: &str) -> Option<Path> {
    let mut absolute = module.to_vec();
    for (at, segment) in path.split("::").enumerate() {
        match segment {
            "crate" if at == 0 => absolute.clear(),
            "super" => drop(absolute.pop()?),
            "self" | "" => {}
            name => absolute.push(name.to_owned()),
        }
    }
    Some(absolute)
}

/// Adds the paths that `rest` begins with, behind `prefix`; returns what follows them.
fn list<'a>(rest: &'a str, prefix: &str, paths: &mut Vec<String>) -> &'a str {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | ':' | '*');
    let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
    let path = format!("{prefix}{}", rest[..end].trim_end_matches(':'));
    let Some(mut inside) = rest[end..].strip_prefix('{').filter(|_| rest[..end].ends_with("::"))
    else {
        let alias = rest[end..].strip_prefix(" as ");
        let Some(alias) = alias else {
            paths.push(path);
            return &rest[end..];
        };
        let length = alias.find(|c| !is_part(c)).unwrap_or(alias.len());
        paths.push(format!("{path} as {}", &alias[..length]));
        return &alias[length..];
    };
    loop {
        inside = inside.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        if let Some(after) = inside.strip_prefix('}') {
            return after;
        }
        let after = list(inside, &format!("{path}::"), paths);
        if after.len() == inside.len() {
            return after;
        }
        inside = after;
    }
}
