//! No module imports itself, however far round: `cargo xtask tidy`.
//!
//! At every level of a crate's module tree the siblings import each other in no circle. A module is its file and its folder. What a file
//! imports is what it names after `crate::`, `super::` and `self::`; a name that a module re-exports leads to where it comes from.
//! A module that names its parent or something inside itself imports no sibling. Tests do not count.
//!
//! `xtask/cycles.txt` lists the imports that are parts of circles today. One that is not listed is a finding, and so is a line that is no part of a
//! circle any more: the list only shrinks.

mod paths;

use std::collections::{BTreeMap, BTreeSet};

use self::paths::{Path, named, reexports};
use crate::Findings;
use crate::files::{File, lines_without_tests};

/// The imports in circles that are known.
const KNOWN: &str = "xtask/cycles.txt";
/// Re-exports that are followed before a name is taken for what it is.
const DEPTH_MAX: usize = 8;

/// The modules of a crate by path, without `crate`; the root is the empty path.
struct Crate {
    /// Code without tests and comments.
    modules: BTreeMap<Path, String>,
    reexports: BTreeMap<Path, Vec<(String, Path)>>,
}

/// An import among siblings: their parent, who imports, and what.
type Import = (Path, String, String);

pub(crate) fn check(files: &[File], findings: &mut Findings) {
    let known = files.iter().find(|file| file.path == KNOWN).map_or("", |file| file.text.as_str());
    let mut known: BTreeSet<&str> =
        known.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    for line in circles(files) {
        if !known.remove(line.as_str()) {
            findings.push(format!("{line}: part of a circle of imports; {KNOWN} does not have it"));
        }
    }
    for line in known {
        findings
            .push(format!("{KNOWN}: {line:?} is no part of a circle any more: remove the line"));
    }
}

/// The imports that are parts of circles, as lines `SOURCES PARENT: MODULE -> MODULE`.
fn circles(files: &[File]) -> Vec<String> {
    let sources: BTreeSet<&str> = files.iter().filter_map(|file| root_of(&file.path)).collect();
    let mut lines = Vec::new();
    for source in sources {
        let krate = Crate::read(source, files);
        let mut levels: BTreeMap<Path, BTreeSet<(String, String)>> = BTreeMap::new();
        for (parent, from, to) in krate.imports() {
            levels.entry(parent).or_default().insert((from, to));
        }
        for (parent, mut imports) in levels {
            prune(&mut imports);
            let place = if parent.is_empty() { "crate".to_owned() } else { parent.join("::") };
            lines.extend(
                imports.iter().map(|(from, to)| format!("{source} {place}: {from} -> {to}")),
            );
        }
    }
    lines
}

/// The folder of a crate's sources, for a file of one.
fn root_of(path: &str) -> Option<&str> {
    let end = path.find("/src/")? + "/src".len();
    (path.ends_with(".rs") && !path[end..].starts_with("/bin/")).then_some(&path[..end])
}

impl Crate {
    fn read(source: &str, files: &[File]) -> Self {
        let mut modules = BTreeMap::new();
        for file in files.iter().filter(|file| root_of(&file.path) == Some(source)) {
            let name = file.path[source.len() + 1..].trim_end_matches(".rs");
            let mut path: Path = name.split('/').map(str::to_owned).collect();
            let last = path.last().map(String::as_str);
            if path.len() == 1 && matches!(last, Some("lib" | "main")) || last == Some("mod") {
                path.pop();
            }
            let code = file.text.lines().take(lines_without_tests(&file.text));
            let code: Vec<&str> =
                code.filter(|line| !line.trim_start().starts_with("//")).collect();
            // A crate's library comes before its program, which only calls it.
            modules.entry(path).or_insert_with(|| code.join("\n"));
        }
        let tests: Vec<Path> =
            modules.iter().flat_map(|(path, code)| tests_of(path, code)).collect();
        modules.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
        let reexports = modules.iter().map(|(path, code)| (path.clone(), reexports(path, code)));
        Self { reexports: reexports.collect(), modules }
    }

    fn imports(&self) -> BTreeSet<Import> {
        let mut imports = BTreeSet::new();
        for (module, code) in &self.modules {
            for path in named(module, code) {
                let Some(target) = self.module_of(&path, 0) else { continue };
                let common = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
                if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                    imports.insert((module[..common].to_vec(), from.clone(), to.clone()));
                }
            }
        }
        imports
    }

    /// The module in which what a path names is declared.
    fn module_of(&self, path: &[String], depth: usize) -> Option<Path> {
        let length = (0..=path.len()).rev().find(|&n| self.modules.contains_key(&path[..n]))?;
        let (module, rest) = path.split_at(length);
        let Some((name, rest)) = rest.split_first() else { return Some(module.to_vec()) };
        let exported = self.reexports[module].iter().filter(|_| depth < DEPTH_MAX);
        for (exported, target) in exported {
            if exported == name {
                let path: Path = target.iter().chain(rest).cloned().collect();
                return self.module_of(&path, depth + 1);
            }
            if exported == "*"
                && let Some(module) = self.module_of(target, depth + 1)
                && declares(&self.modules[&module], name)
            {
                return Some(module);
            }
        }
        Some(module.to_vec())
    }
}

/// The modules of a file that are compiled for tests only and have files of their own.
fn tests_of(path: &[String], code: &str) -> Vec<Path> {
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let of_tests = lines.windows(2).filter(|pair| pair[0] == "#[cfg(test)]");
    let names = of_tests.filter_map(|pair| pair[1].split_once("mod ")?.1.strip_suffix(';'));
    let mut tests: Vec<Path> = names.map(|name| [path, &[name.to_owned()]].concat()).collect();
    // The test module at the end of a file may be a file.
    tests.push([path, &["tests".to_owned()]].concat());
    tests
}

/// Whether code declares an item of this name.
fn declares(code: &str, name: &str) -> bool {
    ["struct", "enum", "union", "trait", "fn", "type", "const", "static", "mod"].iter().any(
        |kind| {
            code.match_indices(&format!("{kind} {name}")).any(|(at, found)| {
                let after = code[at + found.len()..].chars().next();
                after.is_none_or(|after| !after.is_alphanumeric() && after != '_')
            })
        },
    )
}

/// Leaves only the imports between modules that import each other in a circle.
fn prune(imports: &mut BTreeSet<(String, String)>) {
    let mut reached: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in imports.iter() {
        reached.entry(from).or_default().insert(to);
    }
    loop {
        let before: usize = reached.values().map(BTreeSet::len).sum();
        let direct = reached.clone();
        for of in reached.values_mut() {
            let further: Vec<&str> =
                of.iter().filter_map(|to| direct.get(to)).flatten().copied().collect();
            of.extend(further);
        }
        if reached.values().map(BTreeSet::len).sum::<usize>() == before {
            break;
        }
    }
    let closed: BTreeSet<(String, String)> = imports
        .iter()
        .filter(|(from, to)| reached.get(to.as_str()).is_some_and(|of| of.contains(from.as_str())))
        .cloned()
        .collect();
    *imports = closed;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: format!("crates/x/src/{path}"), text: text.into() }
    }

    fn lines(files: &[File]) -> Vec<String> {
        let lines = circles(files);
        lines.iter().map(|line| line.replace("crates/x/src ", "")).collect()
    }

    #[test]
    fn a_tree_is_no_circle() {
        let tree = [
            file("lib.rs", "mod a;\nmod b;\npub use crate::b::c::One;\n"),
            file("a.rs", "use crate::b::{self, c::{One, Two}};\n// crate::a\n"),
            file("b.rs", "mod c;\nuse self::c::One;\npub(in crate::a) fn f() {}\n"),
            file(
                "b/c.rs",
                "use super::Parent;\n#[cfg(test)]\nmod tests {\n    use crate::a::One;\n}\n",
            ),
            file("b/tests.rs", "use crate::a::One;"),
        ];
        assert_eq!(lines(&tree), Vec::<String>::new());
    }

    #[test]
    fn circles_are_found_through_every_kind_of_path() {
        let absolute = [
            file("lib.rs", ""),
            file("a.rs", "use crate::b::c::{\n    One,\n};"),
            file("b.rs", "fn f() -> crate::a::Other {}"),
            file("b/c.rs", ""),
            file("d.rs", "use crate::a::One;"),
        ];
        assert_eq!(lines(&absolute), ["crate: a -> b", "crate: b -> a"]);
        // A folder and its file are one.
        let folder = [
            file("a.rs", "mod inner;"),
            file("a/inner.rs", "use super::super::b::One;"),
            file("b.rs", "use super::a::Two;"),
        ];
        assert_eq!(lines(&folder), ["crate: a -> b", "crate: b -> a"]);
        let inside = [
            file("a.rs", ""),
            file("a/b.rs", "use super::{c::One, Parent};"),
            file("a/c.rs", "use crate::a::b;"),
        ];
        assert_eq!(lines(&inside), ["a: b -> c", "a: c -> b"]);
        let exported = [
            file("lib.rs", "pub use self::a::One as Other;\npub use b::*;"),
            file("a.rs", "use crate::Two;"),
            file("b.rs", "use crate::Other;\npub struct Two;\n"),
        ];
        assert_eq!(lines(&exported), ["crate: a -> b", "crate: b -> a"]);
    }

    #[test]
    fn the_list_only_shrinks() {
        let circle = [
            file("a.rs", "use crate::b::One;"),
            file("b.rs", "use crate::a::Other;"),
            File { path: KNOWN.into(), text: "# Known.\ncrates/x/src crate: a -> b\nold\n".into() },
        ];
        let mut findings = Findings::new();
        check(&circle, &mut findings);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings[0].starts_with("crates/x/src crate: b -> a: "), "{findings:?}");
        assert!(findings[1].contains("\"old\" is no part of a circle"), "{findings:?}");
    }
}
