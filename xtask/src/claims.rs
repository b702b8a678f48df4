//! Tests that documents refer to: every `FILE::TEST` and fuzz target named in a
//! document must exist.

use crate::Findings;
use crate::files::{self, File};

/// A test, as documents name it: `crates/sim/tests/scenes/drops.rs::replies_with_wrong_tokens_are_dropped`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TestName<'a> {
    /// The file, from the root.
    pub(crate) path: &'a str,
    /// The function, without its modules.
    pub(crate) test: &'a str,
}

impl<'a> TestName<'a> {
    /// `None` if `text` has another form.
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        let (path, test) = text.split_once("::")?;
        let is_name = test.chars().all(|c| c.is_alphanumeric() || c == '_') && !path.contains(' ');
        (path.contains('/') && is_name).then_some(Self { path, test })
    }

    /// Whether its file has a test of this name: a function, or an entry in a macro's table of
    /// tests.
    pub(crate) fn exists(&self) -> bool {
        let source = std::fs::read_to_string(files::root().join(self.path)).unwrap_or_default();
        let (function, row) = (format!("fn {}(", self.test), format!("{}: ", self.test));
        source.contains(&function)
            || self.path.ends_with(".py") && source.contains(&format!("def {}(", self.test))
            || source.contains(&format!("TEST({})", self.test))
            || source.lines().any(|line| line.ends_with("! {"))
                && source.lines().any(|line| line.trim_start().starts_with(&row))
    }
}

/// The parts of a line between backquotes.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The fuzz targets that a line names after the words "fuzz target(s)".
fn fuzz_targets(line: &str) -> impl Iterator<Item = &str> {
    let is_target = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    line.split("fuzz target").skip(1).flat_map(move |rest| quoted(rest).take_while(is_target))
}

/// Reports the tests and fuzz targets of a line that do not exist; returns how many it names.
fn check_line(document: &File, line: usize, text: &str, findings: &mut Findings) -> usize {
    let mut named = 0;
    for name in quoted(text).filter_map(TestName::parse) {
        named += 1;
        if !name.exists() {
            let TestName { path, test } = name;
            findings.push(format!("{}: test {path}::{test} does not exist", document.at(line)));
        }
    }
    for target in fuzz_targets(text) {
        named += 1;
        let path = format!("fuzz/fuzz_targets/{target}.rs");
        if !files::root().join(&path).exists() {
            findings.push(format!("{}: {path} does not exist", document.at(line)));
        }
    }
    named
}

/// The document that lists every guarantee, with the promises of SECURITY.md.
const GUARANTEES: &str = "docs/proof.md";

/// Checks every document: the only check of tests that documents name.
pub(crate) fn check() -> Findings {
    let mut findings = Findings::new();
    let mut named = 0;
    for document in files::all().iter().filter(|file| file.extension() == "md") {
        let lines = document.text.lines().enumerate();
        let here: usize =
            lines.map(|(line, text)| check_line(document, line, text, &mut findings)).sum();
        named += if document.path == GUARANTEES { here } else { 0 };
    }
    if named == 0 {
        findings.push(format!("{GUARANTEES}: names no test"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_and_missing_ones_are_told() {
        let document = File { path: "a.md".to_owned(), text: String::new() };
        let mut findings = Findings::new();
        let here = "`xtask/src/claims.rs::tests_are_found_and_missing_ones_are_told`";
        let line = format!("{here}, `xtask/src/claims.rs::no`, fuzz targets `ring` and `nothing`");
        // A test that does not exist is reported; a macro's name is not a file.
        assert_eq!(check_line(&document, 0, &line, &mut findings), 4);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert_eq!(TestName::parse("std::process"), None);
        assert_eq!(TestName::parse("--set 'listen=[\"tcp://[::1]:1\"]'"), None);
    }
}
