//! Links of the documents: part of `cargo xtask tidy`. A relative link names a file or folder of the repository, and its
//! fragment a heading of that file.

use std::path::{Component, Path, PathBuf};

use crate::Findings;
use crate::files::{File, root};

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
    let folder = Path::new(from).parent().unwrap_or(Path::new(""));
    let path = if path.is_empty() { PathBuf::from(from) } else { normal(&folder.join(path)) };
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
}
