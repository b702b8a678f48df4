//! `serval man` and `serval completions`: generated from the definition of the command line.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;
use serde_json::json;

use super::{Arguments, Failure};
use crate::screen::{Screen, print};

pub(super) const MAN_HELP: &str = "\
One page for each command: serval.1, serval-bench.1, serval-kernel-build.1 and so on. `make install`
puts them into PREFIX/share/man/man1.

Examples:
  serval man | man -l -                      the page serval(1)
  serval man ~/.local/share/man/man1         writes every page there";

pub(super) const COMPLETIONS_HELP: &str = "\
Prints a script that completes commands and options. `make install` puts those of bash, zsh and fish
where the shells look, below PREFIX/share.

Examples:
  serval completions bash >~/.local/share/bash-completion/completions/serval
  serval completions zsh >~/.zfunc/_serval      with fpath+=~/.zfunc before compinit in ~/.zshrc
  serval completions fish >~/.config/fish/completions/serval.fish";

#[derive(Args, Debug)]
pub(super) struct ManOptions {
    /// Write every page into this folder, instead of serval(1) to standard output
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(super) struct CompletionsOptions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// A page of the manual.
struct Page {
    file: String,
    text: String,
}

pub(super) fn man(screen: &Screen, options: &ManOptions) -> Result<(), Failure> {
    let pages = pages();
    let Some(folder) = &options.folder else {
        let text = &pages[0].text;
        screen.show(|| text.clone(), || json!({ "page": text }));
        return Ok(());
    };
    let files: Vec<_> = pages.iter().map(|page| page.file.clone()).collect();
    write(folder, &pages)
        .map_err(|error| Failure::Run(format!("cannot write to {}: {error}", folder.display())))?;
    let written = format!("{} pages in {}\n", files.len(), folder.display());
    screen.show(|| written, || json!({ "folder": folder, "files": files }));
    Ok(())
}

fn write(folder: &Path, pages: &[Page]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    pages.iter().try_for_each(|page| fs::write(folder.join(&page.file), &page.text))
}

pub(super) fn completions(options: &CompletionsOptions) {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Arguments::command(), "serval", &mut script);
    print(&String::from_utf8_lossy(&script));
}

/// The page of the command itself, then those of its subcommands.
fn pages() -> Vec<Page> {
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add(&command, &mut pages);
    pages
}

fn add(command: &Command, pages: &mut Vec<Page>) {
    pages.push(page(command));
    visible(command).for_each(|below| add(below, pages));
}

/// The visible subcommands of a command.
fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|below| !below.is_hide_set())
}

fn page(command: &Command) -> Page {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let man = Man::new(command.clone());
    // Without a date: the same build generates the same page.
    let version = env!("CARGO_PKG_VERSION");
    let mut roff = format!(".TH \"{name}\" 1 \"\" \"serval {version}\" \"Serval\"\n").into_bytes();
    let sections = [
        Man::render_name_section,
        Man::render_synopsis_section,
        Man::render_description_section,
        Man::render_options_section,
    ];
    let below = visible(command).next().map(|_| Man::render_subcommands_section as _);
    for section in sections.into_iter().chain(below) {
        section(&man, &mut roff).expect("writing to a Vec cannot fail");
    }
    let mut text = String::from_utf8_lossy(&roff).into_owned();
    if let Some(notes) = command.get_after_help() {
        text += &verbatim(&notes.to_string());
    }
    if name != "serval" {
        text += ".SH \"SEE ALSO\"\n.BR serval (1)\n";
    }
    Page { file: format!("{name}.1"), text }
}

/// A section with the lines of a help text, whose columns and line ends matter.
fn verbatim(notes: &str) -> String {
    let mut text = String::from(".SH NOTES\n.nf\n");
    for line in notes.lines() {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // A control line begins with one of these.
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        let _ = writeln!(text, "{guard}{line}");
    }
    text + ".fi\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_help_text_are_not_roff_requests() {
        let text = verbatim("a \\n -x\n.TH evil\n'br");
        assert_eq!(text, ".SH NOTES\n.nf\na \\en \\-x\n\\&.TH evil\n\\&'br\n.fi\n");
    }

    #[test]
    fn every_command_has_a_page_with_its_options_and_examples() {
        fn check(command: &Command, pages: &[Page]) {
            let name = command.get_display_name().unwrap_or(command.get_name());
            let page = pages.iter().find(|page| page.file == format!("{name}.1"));
            let text = &page.unwrap_or_else(|| panic!("{name} has no page")).text;
            let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
            for option in shown.filter_map(|argument| argument.get_long()) {
                let escaped = format!("\\-\\-{}", option.replace('-', "\\-"));
                assert!(text.contains(&escaped), "{name} does not explain --{option}: {text}");
            }
            assert!(text.contains("\nExamples:\n  serval "), "{text}");
            visible(command).for_each(|below| check(below, pages));
        }
        let mut command = Arguments::command().disable_help_subcommand(true);
        command.build();
        check(&command, &pages());
    }
}
