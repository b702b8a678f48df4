//! Links of the documents: part of `cargo xtask tidy`. A relative link names a file or folder of the repository, and its
//! fragment a heading of that file. `make install` copies documents; a link of one of them leads to a file that is installed as
//! well, or to a folder with such files.

use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::Findings;
use crate::files::{File, root};

/// The documents that `make install` copies, as paths from the root. They keep these paths below the installed folder.
pub(crate) fn installed_pages() -> Result<Vec<String>, String> {
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "--silent", "installed-pages"]).current_dir(root());
    for inherited in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL"] {
        make.env_remove(inherited);
    }
    let output = make.output().map_err(|error| format!("make: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

/// Findings about the links of an installed document to what is not installed.
pub(crate) fn check_installed(document: &File, installed: &[String], findings: &mut Findings) {
    if !installed.contains(&document.path) {
        return;
    }
    let leads_to_one =
        |target: &Path| installed.iter().any(|page| Path::new(page).starts_with(target));
    for (number, line) in outside_of_code(&document.text) {
        for link in links(line).filter(|link| !link.contains("://")) {
            let path = link.split_once('#').map_or(link, |(path, _)| path);
            if !path.is_empty() && !leads_to_one(&target_of(&document.path, path)) {
                findings.push(format!(
                    "{}: link to {link}: it is not installed: add it to PAGES in the Makefile",
                    document.at(number)
                ));
            }
        }
    }
}

/// Findings about the relative links of a document.
pub(crate) fn check(document: &File, findings: &mut Findings) {
    for (number, line) in outside_of_code(&document.text) {
        for link in links(line) {
            if let Err(what) = follow(&document.path, &document.text, link) {
                findings.push(format!("{}: link to {link}: {what}", document.at(number)));
            }
        }
    }
}

/// Pages that link every example.
const PAGES_OF_EXAMPLES: &[&str] = &["README.md", "docs/getting-started.md"];

/// Findings about examples that no newcomer finds.
pub(crate) fn check_examples(all: &[File], findings: &mut Findings) {
    let examples: Vec<&str> = all
        .iter()
        .filter_map(|file| file.path.strip_prefix("examples/")?.strip_suffix("/README.md"))
        .collect();
    for page in all.iter().filter(|file| PAGES_OF_EXAMPLES.contains(&file.path.as_str())) {
        let linked = |example: &&&str| page.text.contains(&format!("examples/{example}/)"));
        for example in examples.iter().filter(|example| !linked(example)) {
            findings.push(format!("{}: no link to examples/{example}/", page.path));
        }
    }
}

/// Lines outside of fenced blocks.
fn outside_of_code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// Targets of the links and pictures of a line: `[text](target)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

fn follow(from: &str, text: &str, link: &str) -> Result<(), String> {
    if link.contains("://") {
        return Ok(());
    }
    let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
    let path = if path.is_empty() { PathBuf::from(from) } else { target_of(from, path) };
    if !root().join(&path).exists() && path != Path::new(from) {
        return Err("there is no such file".to_owned());
    }
    if fragment.is_empty() {
        return Ok(());
    }
    let target = match path == Path::new(from) {
        true => text.to_owned(),
        false => std::fs::read_to_string(root().join(path)).unwrap_or_default(),
    };
    let known = outside_of_code(&target).any(|(_, line)| anchor(line).as_deref() == Some(fragment));
    if known { Ok(()) } else { Err("there is no such heading".to_owned()) }
}

/// The path from the root to which a link with this path, in the document at `from`, leads.
fn target_of(from: &str, path: &str) -> PathBuf {
    normal(&Path::new(from).parent().unwrap_or(Path::new("")).join(path))
}

/// A path without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            part => normal.push(part),
        }
    }
    normal
}

/// The fragment of a heading: lower case, without punctuation, with hyphens for spaces.
fn anchor(line: &str) -> Option<String> {
    let heading =
        line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))?;
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    Some(kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_files_and_headings() {
        let found = |text: &str| {
            let file = File { path: "docs/made_up.md".to_owned(), text: text.to_owned() };
            let mut findings = Findings::new();
            check(&file, &mut findings);
            findings.len()
        };
        assert_eq!(found("[a](https://example.org/x#y) [b](../README.md) ![c](serval.svg)"), 0);
        assert_eq!(found("# It's `a` heading\n[a](#its-a-heading) [b](../examples/01_echo/)"), 0);
        assert_eq!(found("[a](operations.md#limits)"), 0);
        assert_eq!(found("[a](nothing.md) and [b](operations.md#nothing) and [c](#nothing)"), 3);
        assert_eq!(found("```\n[a](nothing.md)\n```"), 0);
    }

    #[test]
    fn links_of_installed_pages_lead_to_installed_files() {
        let installed = ["docs/a.md", "README.md", "examples/01_echo/service.toml"];
        let installed = installed.map(str::to_owned);
        let found = |path: &str, text: &str| {
            let file = File { path: path.to_owned(), text: text.to_owned() };
            let mut findings = Findings::new();
            check_installed(&file, &installed, &mut findings);
            findings.len()
        };
        assert_eq!(found("docs/a.md", "[a](../README.md#x) [b](../examples/01_echo/) [c](#x)"), 0);
        assert_eq!(found("docs/a.md", "[a](https://example.org) [b](../examples)"), 0);
        assert_eq!(found("docs/a.md", "[a](b.md) [b](../examples/02_c_client/) [c](../crates)"), 3);
        assert_eq!(found("docs/other.md", "[a](b.md)"), 0);
    }

    #[test]
    fn every_example_is_linked() {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let found = |page: &str| {
            let all = ["README.md", "examples/01_a/README.md", "examples/02_b/README.md"];
            let all = all.map(|path| file(path, if path == "README.md" { page } else { "" }));
            let mut findings = Findings::new();
            check_examples(&all, &mut findings);
            findings.len()
        };
        assert_eq!(found("[a](examples/01_a/), [b](examples/02_b/)"), 0);
        assert_eq!(found("[a](examples/01_a/)"), 1);
    }

    #[test]
    fn the_makefile_lists_files_that_are_tracked() {
        let installed = installed_pages().unwrap();
        for page in ["README.md", "SECURITY.md", "docs/systems.md", "examples/01_echo/service.toml"]
        {
            assert!(installed.iter().any(|path| path == page), "{page}");
        }
        let tracked: Vec<String> = crate::files::all().into_iter().map(|file| file.path).collect();
        let others: Vec<_> = installed.iter().filter(|page| !tracked.contains(page)).collect();
        assert!(others.is_empty(), "{others:?}");
    }
}
