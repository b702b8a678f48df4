//! Problems of a configuration, shown at their places.
//!
//! Every value remembers the [`Source`] it came from (the file, an environment variable, a flag) and its place there.
//! A [`Problem`] points at such a place and states the error (its headline), the fix (the label under the text) and,
//! if useful, additional help.

use std::fmt::{self, Write as _};

use serde_json::{Value as Json, json};

/// A text that contains values of the configuration.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// File name, or the kind of text.
    pub(super) name: String,
    /// The text itself.
    pub(super) text: String,
    /// The layer of the precedence.
    pub(super) origin: Origin,
}

/// The origin of a value; later ones override earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The default.
    Default,
    /// The configuration file.
    File,
    /// An environment variable.
    Environment,
    /// `--set` on the command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Flag => "flag",
        })
    }
}

/// A piece of a [`Source`], in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Index of the source.
    pub(super) source: usize,
    /// First byte.
    pub(super) start: usize,
    /// End, exclusive.
    pub(super) end: usize,
}

/// One problem.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    /// The place; `None` for a file that cannot be read.
    pub(super) span: Option<Span>,
    /// The error.
    pub(super) what: String,
    /// The fix; shown under the text.
    pub(super) label: String,
    /// Additional help.
    pub(super) help: Option<String>,
}

impl Problem {
    pub(super) fn new(span: Span, what: impl Into<String>, label: impl Into<String>) -> Self {
        Self { span: Some(span), what: what.into(), label: label.into(), help: None }
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// An invalid configuration: every problem with its place. `Display` is the complete multi-line text, without a
/// trailing line end.
#[derive(Clone, Debug)]
pub struct ConfigError {
    pub(super) sources: Vec<Source>,
    pub(super) problems: Vec<Problem>,
}

/// One problem as values, for programs. See [`ConfigError::entries`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemEntry {
    /// File name, environment variable or flag; empty when there is no place.
    pub source: String,
    /// Line from 1; 0 when there is no place.
    pub line: usize,
    /// Column in characters from 1; 0 when there is no place.
    pub column: usize,
    /// The error.
    pub what: String,
    /// The fix.
    pub right: String,
}

impl ConfigError {
    /// The problems in the order of their places.
    pub fn entries(&self) -> Vec<ProblemEntry> {
        let entry = |problem: &Problem| {
            let spot = problem.span.map(|span| Location::of(&self.sources[span.source], span));
            ProblemEntry {
                source: problem
                    .span
                    .map(|s| self.sources[s.source].name.clone())
                    .unwrap_or_default(),
                line: spot.as_ref().map_or(0, |s| s.line),
                column: spot.as_ref().map_or(0, |s| s.column),
                what: problem.what.clone(),
                right: problem.label.clone(),
            }
        };
        self.problems.iter().map(entry).collect()
    }

    /// The problems, for programs.
    pub fn json(&self) -> Json {
        let problem = |p: ProblemEntry| {
            json!({
                "source": p.source, "line": p.line, "column": p.column, "what": p.what, "right": p.right,
            })
        };
        json!({ "problems": self.entries().into_iter().map(problem).collect::<Vec<_>>() })
    }

    /// The text for a terminal; with ANSI colours if `colour`.
    pub fn render(&self, colour: bool) -> String {
        let mut out = String::new();
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                out.push('\n');
            }
            self.render_problem(&mut out, problem, Paint { colour });
        }
        out.truncate(out.trim_end().len());
        out
    }

    fn render_problem(&self, out: &mut String, problem: &Problem, paint: Paint) {
        let headline = printable(&problem.what);
        let _ = writeln!(out, "{}: {}", paint.red("error"), paint.bold(&headline));
        let Some(span) = problem.span else {
            if !problem.label.is_empty() {
                let _ = writeln!(out, "  = {}", printable(&problem.label));
            }
            return;
        };
        let source = &self.sources[span.source];
        let spot = Location::of(source, span);
        // Only places in a file have a line number.
        let number = if source.origin == Origin::File { spot.line.to_string() } else { " ".into() };
        let margin = " ".repeat(number.len());
        let bar = paint.blue("|");
        let arrow = paint.blue("-->");
        if source.origin == Origin::File {
            let _ = writeln!(out, "{margin}{arrow} {}:{}:{}", source.name, spot.line, spot.column);
        } else {
            let _ = writeln!(out, "{margin}{arrow} {}", source.name);
        }
        let _ = writeln!(out, "{margin} {bar}");
        let _ = writeln!(out, "{} {bar} {}", paint.blue(&number), spot.text);
        let pad = " ".repeat(spot.text_before);
        let carets = paint.red(&"^".repeat(spot.carets));
        let label = paint.red(&printable(&problem.label));
        let _ = writeln!(out, "{margin} {bar} {pad}{carets} {label}");
        if let Some(help) = &problem.help {
            let _ = writeln!(out, "{margin} {} {}", paint.blue("="), printable(help));
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for ConfigError {}

#[derive(Clone, Copy)]
struct Paint {
    colour: bool,
}

impl Paint {
    fn with(self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn red(self, text: &str) -> String {
        self.with("1;31", text)
    }

    fn blue(self, text: &str) -> String {
        self.with("1;34", text)
    }

    fn bold(self, text: &str) -> String {
        self.with("1", text)
    }
}

/// Longest line shown, in characters; longer ones are cut around the place.
const LINE_CHARS_MAX: usize = 120;

/// A span as it is shown: line, column, the line's text and the position of the carets.
struct Location {
    line: usize,
    column: usize,
    text: String,
    text_before: usize,
    carets: usize,
}

impl Location {
    fn of(source: &Source, span: Span) -> Self {
        let text = source.text.as_str();
        let start = floor_char_boundary(text, span.start);
        let end = floor_char_boundary(text, span.end.max(start));
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let before = &text[line_start..start];
        let marked = &text[start..end.min(line_end).max(start)];
        let column = before.chars().count() + 1;
        // A window of the line, so that a long list does not fill the screen.
        let skip = before.chars().count().saturating_sub(LINE_CHARS_MAX / 2);
        let shown: String =
            text[line_start..line_end].chars().skip(skip).take(LINE_CHARS_MAX).collect();
        let before: String = before.chars().skip(skip).collect();
        let room = LINE_CHARS_MAX - printable(&before).chars().count().min(LINE_CHARS_MAX - 1);
        Self {
            line: text[..start].matches('\n').count() + 1,
            column,
            text: printable(&shown).trim_end().to_owned(),
            text_before: printable(&before).chars().count(),
            carets: printable(marked.trim_end()).chars().count().clamp(1, room),
        }
    }
}

fn floor_char_boundary(text: &str, at: usize) -> usize {
    let at = at.min(text.len());
    (0..=at).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0)
}

/// The content of a file must not control the terminal: control characters are shown as `?`, tabs as four spaces.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => out.push_str("    "),
            '\r' => {}
            c if c.is_control() => out.push('?'),
            // Bidirectional overrides reorder the text around them.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str, start: usize, end: usize) -> ConfigError {
        let source = Source { name: "a.toml".into(), text: text.into(), origin: Origin::File };
        let span = Span { source: 0, start, end };
        ConfigError { sources: vec![source], problems: vec![Problem::new(span, "wrong", "right")] }
    }

    #[test]
    fn the_line_and_a_caret_are_shown() {
        let text = error("a = 1\n\tb = \"two\" # c\n", 11, 16).to_string();
        let expected =
            "error: wrong\n --> a.toml:2:6\n  |\n2 |     b = \"two\" # c\n  |         ^^^^^ right";
        assert_eq!(text, expected);
    }

    #[test]
    fn any_place_in_any_text_can_be_shown() {
        let texts = [
            "",
            "\n",
            "\r\n",
            "é\u{202e}\u{7}\u{1b}[2J",
            "a\nb",
            &"x".repeat(1000),
            &"é".repeat(300),
        ];
        for text in texts {
            for start in 0..=text.len() + 1 {
                for end in [start, start + 1, start + 500, 0] {
                    let shown = error(text, start, end).to_string();
                    assert!(!shown.contains(['\u{1b}', '\u{7}', '\u{202e}']));
                    assert!(
                        shown.lines().all(|l| l.chars().count() < 2 * LINE_CHARS_MAX),
                        "{shown}"
                    );
                }
            }
        }
    }

    #[test]
    fn colours_only_when_asked() {
        let error = error("a = 1", 0, 1);
        assert!(!error.to_string().contains('\u{1b}'));
        assert!(error.render(true).contains("\u{1b}[1;31merror\u{1b}[0m"));
    }
}
