//! The sample as tables: on paper ([`Grid::table`]) and on a terminal ([`draw`]).

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Row, Table as Widget};

use super::{Sample, Sort};
use crate::screen::Table;

/// A table before it is drawn. Column names that start with `>` are right-aligned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Grid {
    /// What services do, how long their requests take, what workers do.
    pub fn of(sample: &Sample) -> [Self; 3] {
        [services(sample), stages(sample), workers(sample)]
    }

    /// For text output.
    pub fn table(self) -> Table {
        let mut table = Table::new(&self.columns);
        for row in self.rows {
            table.row(row);
        }
        table
    }

    fn height(&self) -> u16 {
        // Names, rows, an empty line.
        self.rows.len() as u16 + 2
    }

    fn widget(&self) -> Widget<'_> {
        let width = |column: usize| {
            let name = self.columns[column].trim_start_matches('>');
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([name.chars().count()]).max().unwrap_or(0) as u16
        };
        let align = |column: usize, text: String| {
            let line = Line::from(text);
            if self.columns[column].starts_with('>') { line.right_aligned() } else { line }
        };
        let widths: Vec<_> =
            (0..self.columns.len()).map(|column| Constraint::Length(width(column))).collect();
        let names = self.columns.iter().enumerate();
        let names = names.map(|(at, name)| align(at, name.trim_start_matches('>').to_owned()));
        let rows = self
            .rows
            .iter()
            .map(|row| Row::new(row.iter().enumerate().map(|(at, cell)| align(at, cell.clone()))));
        let header = Row::new(names).style(Style::new().add_modifier(Modifier::BOLD));
        Widget::new(rows, widths).header(header).column_spacing(2)
    }
}

fn services(sample: &Sample) -> Grid {
    let rows = sample.services.iter().map(|s| {
        let mut drops = s.drops.clone();
        drops.sort_by(|a, b| b.1.total_cmp(&a.1));
        let drops: Vec<String> = drops
            .iter()
            .take(3)
            .map(|(reason, rate)| format!("{reason} {}", number(*rate)))
            .collect();
        vec![
            if s.held { format!("{} (held)", s.name) } else { s.name.clone() },
            number(s.received),
            number(s.replied),
            number(s.dropped()),
            number(s.outstanding),
            format!("{:.1}", s.depth.0),
            number(s.depth.1),
            drops.join(", "),
        ]
    });
    let columns = vec![
        "service",
        ">in/s",
        ">replied/s",
        ">dropped/s",
        ">under way",
        ">depth mean",
        ">depth max",
        "drops/s",
    ];
    Grid { columns, rows: rows.collect() }
}

fn stages(sample: &Sample) -> Grid {
    let columns =
        vec!["p50 / p99", ">receive", ">queue", ">accelerator", ">send", ">total", ">followed"];
    let names = ["receive", "queue", "accelerator", "send", "total"];
    let rows = sample.services.iter().map(|s| {
        let of = |name: &str| s.stages.iter().find(|stage| stage.stage == name);
        let cell = |name| match of(name).and_then(|stage| Some((stage.p50?, stage.p99?))) {
            Some((p50, p99)) => format!("{} / {}", time(p50), time(p99)),
            None => "-".to_owned(),
        };
        let followed = of("total").map_or(0, |stage| stage.count);
        let cells = [s.name.clone()].into_iter().chain(names.map(cell));
        cells.chain([followed.to_string()]).collect()
    });
    Grid { columns, rows: rows.collect() }
}

fn workers(sample: &Sample) -> Grid {
    let columns = vec![">worker", ">busy", ">idle", ">asleep", ">turns/s", ">connections"];
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let rows = sample.workers.iter().map(|w| {
        vec![
            w.worker.clone(),
            percent(w.busy),
            percent(w.idle),
            percent(w.asleep),
            number(w.turns),
            number(w.connections),
        ]
    });
    Grid { columns, rows: rows.collect() }
}

/// Three digits and a prefix: 950, 12.3k, 4.56M.
fn number(value: f64) -> String {
    let (scaled, prefix) = match value {
        v if v >= 999.5e6 => (v / 1e9, "G"),
        v if v >= 999.5e3 => (v / 1e6, "M"),
        v if v >= 999.5 => (v / 1e3, "k"),
        v => (v, ""),
    };
    match (scaled, prefix) {
        (v, "") if v >= 9.95 || v.fract() == 0.0 => format!("{v:.0}"),
        (v, "") => format!("{v:.1}"),
        (v, _) if v >= 99.95 => format!("{v:.0}{prefix}"),
        (v, _) if v >= 9.995 => format!("{v:.1}{prefix}"),
        (v, _) => format!("{v:.2}{prefix}"),
    }
}

/// Seconds in the unit that suits them.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s if s >= 1e-6 => format!("{:.1} us", s * 1e6),
        s => format!("{:.0} ns", s * 1e9),
    }
}

/// The whole screen: what this is and the news, the tables, the keys.
pub fn draw(frame: &mut Frame<'_>, url: &str, sample: &Sample, sort: Sort, news: &str) {
    let grids = Grid::of(sample);
    let mut heights = vec![Constraint::Length(3)];
    heights.extend(grids.iter().map(|grid| Constraint::Length(grid.height())));
    heights.extend([Constraint::Fill(1), Constraint::Length(1)]);
    let areas = Layout::vertical(heights).split(frame.area());
    let state = if sample.ready { "ready" } else { "not ready" };
    let title = format!("serval top  {url}  {state}  every {:.1} s", sample.seconds);
    let left = match sample.left_behind.is_empty() {
        true => String::new(),
        false => format!("  left behind: {}", sample.left_behind.join(", ")),
    };
    let title = title + &left;
    frame.render_widget(Text::from(vec![Line::from(title), Line::from(news)]), areas[0]);
    for (grid, area) in grids.iter().zip(&areas[1..]) {
        frame.render_widget(grid.widget(), *area);
    }
    let keys = format!("q quit  p pause  s sort by: {}", sort.name());
    frame.render_widget(Line::from(keys), areas[areas.len() - 1]);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::tests::page;
    use super::*;
    use crate::screen::Screen;

    #[test]
    fn numbers_and_times_have_their_units() {
        let numbers =
            [0.0, 0.26, 42.0, 999.4, 1000.0, 12_345.0, 123_456.0, 4.56e6, 2e9].map(number);
        assert_eq!(numbers, ["0", "0.3", "42", "999", "1.00k", "12.3k", "123k", "4.56M", "2.00G"]);
        let times = [25e-9, 1.5e-6, 2.25e-3, 10.0].map(time);
        assert_eq!(times, ["25 ns", "1.5 us", "2.25 ms", "10.00 s"]);
    }

    #[test]
    fn paper_and_terminal_show_the_same_cells() {
        let sample = Sample::between(&page(10), &page(14), Duration::from_secs(4));
        let screen = Screen { json: false, colour: false };
        let paper: String = Grid::of(&sample).map(|grid| grid.table().render(&screen)).concat();
        let mut terminal = Terminal::new(TestBackend::new(120, 30)).unwrap();
        let url = "http://127.0.0.1:9464/metrics";
        terminal.draw(|frame| draw(frame, url, &sample, Sort::Replied, "paused")).unwrap();
        let drawn = terminal.backend().to_string();
        for part in
            ["digits (held)", "no_credit 10", "2.00 ms / 2.00 ms", "50 %", "1.00k", "depth max"]
        {
            assert!(paper.contains(part), "{part} is not in\n{paper}");
            assert!(drawn.contains(part), "{part} is not in\n{drawn}");
        }
        assert!(
            drawn.contains("paused")
                && drawn.contains("ready")
                && drawn.contains("left behind: gone")
                && drawn.contains("sort by: replied"),
            "{drawn}"
        );
        // A terminal that is too small cuts; it does not panic.
        let mut small = Terminal::new(TestBackend::new(7, 3)).unwrap();
        small.draw(|frame| draw(frame, url, &sample, Sort::Replied, "")).unwrap();
    }
}
