//! No file of the engine imports itself, however far round: `cargo xtask tidy`.
//!
//! What a file imports is what it names after `crate::`. Tests do not count, nor what a file and those in its folder name through
//! `super::` and `self::`: they are one unit.

use std::collections::{BTreeMap, BTreeSet};

use crate::Findings;
use crate::files::File;
use crate::tidy::lines_without_tests;

/// The sources that are checked.
const SOURCES: &str = "crates/engine/src/";

/// Modules by name, each with those that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

pub(crate) fn check(files: &[File], findings: &mut Findings) {
    let texts: BTreeMap<String, &str> = files
        .iter()
        .filter_map(|file| {
            let name = file.path.strip_prefix(SOURCES)?.strip_suffix(".rs")?;
            Some((name.replace('/', "::"), file.text.as_str()))
        })
        .collect();
    let of_file = |text: &str| -> BTreeSet<String> {
        named(text).iter().filter_map(|path| module_of(path, &texts)).collect()
    };
    let mut imports: Imports =
        texts.iter().map(|(name, text)| (name.clone(), of_file(text))).collect();
    prune(&mut imports);
    for (name, imported) in imports {
        let imported: Vec<_> = imported.into_iter().collect();
        let imported = imported.join(", ");
        findings.push(format!("{SOURCES}: {name} imports {imported}, which imports it in turn"));
    }
}

/// Leaves only modules that import each other in a circle, or lie between two such circles.
fn prune(imports: &mut Imports) {
    loop {
        let before: usize = imports.values().map(BTreeSet::len).sum();
        let imported: BTreeSet<String> = imports.values().flatten().cloned().collect();
        imports.retain(|name, of| !of.is_empty() && imported.contains(name));
        let left: BTreeSet<String> = imports.keys().cloned().collect();
        imports.iter_mut().for_each(|(name, of)| of.retain(|to| to != name && left.contains(to)));
        imports.retain(|_, of| !of.is_empty());
        if imports.values().map(BTreeSet::len).sum::<usize>() == before {
            return;
        }
    }
}

/// The module that a path leads into.
fn module_of(path: &str, modules: &BTreeMap<String, &str>) -> Option<String> {
    let mut path = path;
    loop {
        if modules.contains_key(path) {
            return Some(path.to_owned());
        }
        path = path.rsplit_once("::")?.0;
    }
}

/// Every path that stands after `crate::`.
fn named(text: &str) -> Vec<String> {
    let code = text.lines().take(lines_without_tests(text));
    let code: Vec<&str> = code.filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        list(&code[at + "crate::".len()..], "", &mut paths);
    }
    paths
}

/// Adds the paths that `rest` begins with, behind `prefix`; returns what follows them.
fn list<'a>(rest: &'a str, prefix: &str, paths: &mut Vec<String>) -> &'a str {
    let end =
        rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(rest.len());
    let path = format!("{prefix}{}", rest[..end].trim_end_matches(':'));
    let Some(mut inside) = rest[end..].strip_prefix('{').filter(|_| rest[..end].ends_with("::"))
    else {
        paths.push(path);
        return &rest[end..];
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

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: format!("{SOURCES}{path}"), text: text.into() }
    }

    #[test]
    fn a_circle_is_found_and_a_tree_is_none() {
        let tree = [
            file("a.rs", "use crate::b::{self, c::{One, Two}};\n// crate::a\n"),
            file("b.rs", "mod c;\n"),
            file("b/c.rs", "#[cfg(test)]\nmod tests {\n    use crate::a::One;\n}\n"),
        ];
        let mut findings = Findings::new();
        check(&tree, &mut findings);
        assert_eq!(findings, Vec::<String>::new());
        let circle = [
            file("a.rs", "use crate::b::c::{\n    One,\n};"),
            file("b.rs", "fn f() -> crate::a::Other {}"),
            file("b/c.rs", "use crate::b::Third;"),
            file("d.rs", "use crate::a::One;"),
        ];
        check(&circle, &mut findings);
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert!(findings[0].contains("a imports b::c"), "{findings:?}");
    }
}
