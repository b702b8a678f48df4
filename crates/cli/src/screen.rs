//! Output for humans: tables, colours on terminals; JSON for programs.

use std::io::{self, IsTerminal as _, Write as _};

use serde_json::Value as Json;

/// The format of standard output.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// One JSON value instead of text.
    pub json: bool,
    /// ANSI colours in text.
    pub colour: bool,
}

/// Emphasis of a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Normal text.
    Plain,
    /// Headings.
    Bold,
    /// Less important text.
    Dim,
    /// Good.
    Green,
    /// Degraded.
    Yellow,
    /// Bad.
    Red,
}

impl Screen {
    /// For standard output: colours on a terminal, unless NO_COLOR is set or the terminal is dumb.
    pub fn new(json: bool) -> Self {
        Self { json, colour: io::stdout().is_terminal() && colours_wanted() }
    }

    /// The text in its tone.
    pub fn paint(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Bold => "1",
            Tone::Dim => "2",
            Tone::Green => "32",
            Tone::Yellow => "33",
            Tone::Red => "31",
        };
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Writes the text, or the JSON instead. A reader that has closed the pipe is not an error.
    pub fn show(&self, text: impl FnOnce() -> String, json: impl FnOnce() -> Json) {
        print(&self.render(text, json));
    }

    /// What [`Screen::show`] writes.
    pub fn render(&self, text: impl FnOnce() -> String, json: impl FnOnce() -> Json) -> String {
        if self.json { format!("{}\n", json()) } else { text() }
    }
}

/// Whether the environment allows colours (no-color.org).
pub fn colours_wanted() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !is_set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Writes to standard output. A closed pipe (`serval drop-reasons | head`) is ignored.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// A table of left- or right-aligned columns.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<(Tone, String)>>,
}

#[derive(Clone, Debug)]
struct Column {
    name: String,
    right: bool,
}

impl Table {
    /// A table with these columns; a name that starts with `>` is a right-aligned column.
    pub fn new(names: &[&str]) -> Self {
        let column = |name: &&str| match name.strip_prefix('>') {
            Some(name) => Column { name: name.to_owned(), right: true },
            None => Column { name: (*name).to_owned(), right: false },
        };
        Self { columns: names.iter().map(column).collect(), rows: Vec::new() }
    }

    /// Adds a row of plain cells.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.toned(cells.into_iter().map(|cell| (Tone::Plain, cell.into())));
    }

    /// Adds a row of cells with tones.
    pub fn toned(&mut self, cells: impl IntoIterator<Item = (Tone, String)>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table as text; every line starts with two spaces.
    pub fn render(&self, screen: &Screen) -> String {
        let width = |index: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(index));
            let widest = cells.map(|(_, cell)| cell.chars().count()).max().unwrap_or(0);
            widest.max(self.columns[index].name.chars().count())
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut out = String::new();
        if self.columns.iter().any(|column| !column.name.is_empty()) {
            let names: Vec<_> = self.columns.iter().map(|c| (Tone::Bold, c.name.clone())).collect();
            self.line(&mut out, screen, &widths, &names);
        }
        for row in &self.rows {
            self.line(&mut out, screen, &widths, row);
        }
        out
    }

    fn line(&self, out: &mut String, screen: &Screen, widths: &[usize], row: &[(Tone, String)]) {
        let mut line = String::new();
        let mut waiting = 0;
        for (index, (tone, cell)) in row.iter().enumerate() {
            let pad = widths[index].saturating_sub(cell.chars().count());
            let (before, after) = if self.columns[index].right { (pad, 0) } else { (0, pad) };
            line.push_str(&" ".repeat(2 + waiting + before));
            line.push_str(&screen.paint(*tone, cell));
            waiting = after;
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_are_not_padded() {
        let mut table = Table::new(&["name", ">count", "note"]);
        table.row(["a", "1", "first"]);
        table.row(["longer", "1000", ""]);
        let screen = Screen { json: false, colour: false };
        let expected = "  name    count  note\n  a           1  first\n  longer   1000\n";
        assert_eq!(table.render(&screen), expected);
    }

    #[test]
    fn colours_do_not_change_the_alignment() {
        let mut table = Table::new(&["", ""]);
        table.toned([(Tone::Red, "off".to_owned()), (Tone::Plain, "x".to_owned())]);
        let screen = Screen { json: false, colour: true };
        assert_eq!(table.render(&screen), "  \x1b[31moff\x1b[0m  x\n");
    }
}
