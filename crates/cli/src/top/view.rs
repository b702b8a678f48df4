//! The sample as tables: as text ([`Grid::table`]) and on a terminal ([`draw`]).

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Row, Table as Widget};

use super::{Sample, Sort};
use crate::screen::Table;

/// A table before it is drawn. Column names that start with `>` are right-aligned; the others may be truncated on a
/// narrow terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    /// The columns that are hidden on a narrow terminal, the least important first.
    spare: &'static [usize],
}

/// Space between two columns.
const GAP: usize = 2;
/// Minimum width to which a text column is truncated.
const CUT: usize = 10;

impl Grid {
    /// The tables of services, stages and workers, and of kernels' sockets, tenants, transfers and functions if there are any.
    pub fn of(sample: &Sample) -> Vec<Self> {
        let mut grids = vec![services(sample), stages(sample), workers(sample)];
        if !sample.sockets.is_empty() {
            grids.push(sockets(sample));
        }
        if !sample.tenants.is_empty() {
            grids.push(tenants(sample));
        }
        if !sample.transfers.is_empty() {
            grids.push(transfers(sample));
        }
        if !sample.functions.is_empty() {
            grids.push(functions(sample));
        }
        grids
    }

    /// For text output.
    pub fn table(self) -> Table {
        let mut table = Table::new(&self.columns);
        for row in self.rows {
            table.row(row);
        }
        table
    }

    fn height(&self) -> usize {
        // Names, rows, an empty line.
        self.rows.len() + 2
    }

    /// The columns that fit into `room`, and their widths.
    fn fit(&self, room: usize) -> Vec<(usize, usize)> {
        let width = |column: usize| {
            let name = self.columns[column].trim_start_matches('>');
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([name.chars().count()]).max().unwrap_or(0)
        };
        let is_text = |column: usize| !self.columns[column].starts_with('>');
        let mut shown: Vec<_> = (0..self.columns.len()).map(|at| (at, width(at))).collect();
        let total = |shown: &[(usize, usize)], of: &dyn Fn(&(usize, usize)) -> usize| {
            shown.iter().map(of).sum::<usize>() + GAP * shown.len().saturating_sub(1)
        };
        let least =
            |&(at, width): &(usize, usize)| if is_text(at) { width.min(CUT) } else { width };
        for spare in self.spare {
            if total(&shown, &least) <= room {
                break;
            }
            shown.retain(|(at, _)| at != spare);
        }
        // Text columns are narrowed from right to left: names come first.
        let mut excess = total(&shown, &|column| column.1).saturating_sub(room);
        for (at, width) in shown.iter_mut().rev().filter(|(at, _)| is_text(*at)) {
            let given = excess.min(*width - least(&(*at, *width)));
            *width -= given;
            excess -= given;
        }
        shown
    }

    /// As much of the table as fits.
    fn widget(&self, room: Rect) -> Widget<'static> {
        let shown = self.fit(usize::from(room.width));
        let align = |column: usize, text: String| {
            let line = Line::from(text);
            if self.columns[column].starts_with('>') { line.right_aligned() } else { line }
        };
        let names = shown
            .iter()
            .map(|&(at, width)| align(at, cut(self.columns[at].trim_start_matches('>'), width)));
        let header = Row::new(names).style(Style::new().add_modifier(Modifier::BOLD));
        let cell = |at: usize, text: &str, width: usize| {
            if at == 0 { abbreviated(text, width) } else { cut(text, width) }
        };
        // The last line stays empty.
        let lines = usize::from(room.height).saturating_sub(2);
        let whole = self.rows.len() <= lines;
        let count = if whole { self.rows.len() } else { lines.saturating_sub(1) };
        let rows = self.rows[..count].iter().map(|row| {
            Row::new(shown.iter().map(|&(at, width)| align(at, cell(at, &row[at], width))))
        });
        let more =
            (!whole && lines > 0).then(|| Row::new([format!("+{} more", self.rows.len() - count)]));
        let widths = shown.iter().map(|&(_, width)| Constraint::Length(width as u16));
        Widget::new(rows.chain(more), widths).header(header).column_spacing(GAP as u16)
    }
}

/// The text, truncated to `width`.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// The text, or its beginning and its end, where names differ, with an ellipsis between them.
fn abbreviated(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width || width < 4 {
        return cut(text, width);
    }
    let end = (width - 1) / 2;
    let begin = text.chars().take(width - 1 - end);
    begin.chain(['…']).chain(text.chars().skip(count - end)).collect()
}

/// Lines for each table: all, or fewer if they do not fit.
fn share(mut wanted: Vec<usize>, room: usize) -> Vec<usize> {
    while wanted.iter().sum::<usize>() > room {
        let largest = wanted.iter_mut().max().filter(|lines| **lines > 0);
        let Some(largest) = largest else { break };
        *largest -= 1;
    }
    wanted
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
            if s.paused { format!("(paused) {}", s.name) } else { s.name.clone() },
            number(s.received),
            number(s.replied),
            number(s.dropped()),
            number(s.outstanding),
            format!("{:.1}/{}", s.depth.0, number(s.depth.1)),
            drops.join(", "),
        ]
    });
    let columns =
        vec!["service", ">in/s", ">replied/s", ">dropped/s", ">in flight", ">depth", "drops/s"];
    Grid { columns, rows: rows.collect(), spare: &[5, 6, 4, 1] }
}

fn stages(sample: &Sample) -> Grid {
    let columns =
        vec!["p50 / p99", ">receive", ">queue", ">accelerator", ">send", ">total", ">followed"];
    let names = ["receive", "queue", "accelerator", "send", "total"];
    let rows = sample.services.iter().map(|s| {
        let of = |name: &str| s.stages.iter().find(|stage| stage.stage == name);
        let cell = |name| match of(name).and_then(|stage| Some((stage.p50?, stage.p99?))) {
            Some((p50, p99)) => times(p50, p99),
            None => "-".to_owned(),
        };
        let followed = of("total").map_or(0, |stage| stage.count);
        let cells = [s.name.clone()].into_iter().chain(names.map(cell));
        cells.chain([followed.to_string()]).collect()
    });
    Grid { columns, rows: rows.collect(), spare: &[6, 1, 4, 2, 3] }
}

fn functions(sample: &Sample) -> Grid {
    let columns =
        vec!["function", "of service", ">messages/s", ">dropped/s", ">failures/s", ">time each"];
    let rows = sample.functions.iter().map(|f| {
        let each = f.time.map_or_else(
            || "-".to_owned(),
            |seconds| {
                let (value, unit) = time(seconds);
                format!("{value} {unit}")
            },
        );
        vec![
            f.function.clone(),
            f.service.clone(),
            number(f.messages),
            number(f.dropped),
            number(f.failures),
            each,
        ]
    });
    Grid { columns, rows: rows.collect(), spare: &[1, 4, 5] }
}

/// The connections of kernels.
fn sockets(sample: &Sample) -> Grid {
    let columns =
        vec!["sockets of", ">open", ">opened/s", ">closed/s", ">received B/s", ">sent B/s"];
    let rows = sample.sockets.iter().map(|s| {
        vec![
            s.service.clone(),
            number(s.open),
            number(s.opened),
            number(s.closed),
            number(s.received),
            number(s.sent),
        ]
    });
    Grid { columns, rows: rows.collect(), spare: &[3, 2] }
}

fn tenants(sample: &Sample) -> Grid {
    let columns = vec![
        "tenant",
        ">received/s",
        ">replied/s",
        ">dropped/s",
        ">over limit/s",
        ">in flight",
        ">waited/s",
    ];
    let rows = sample.tenants.iter().map(|t| {
        vec![
            t.tenant.clone(),
            number(t.received),
            number(t.replied),
            number(t.dropped),
            number(t.shed),
            number(t.outstanding),
            number(t.waited),
        ]
    });
    Grid { columns, rows: rows.collect(), spare: &[6, 5, 1] }
}

/// The scoreboard of transfers.
fn transfers(sample: &Sample) -> Grid {
    let columns =
        vec!["transfers", ">queued", ">running", ">bytes in flight", ">source B/s", ">sink B/s"];
    let rows = sample.transfers.iter().map(|t| {
        vec![
            t.device.clone(),
            number(t.queued),
            number(t.running),
            number(t.bytes_in_flight),
            number(t.taken),
            number(t.given),
        ]
    });
    Grid { columns, rows: rows.collect(), spare: &[3, 2] }
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
    Grid { columns, rows: rows.collect(), spare: &[4, 5, 3, 2] }
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

/// Seconds in a suitable unit: three digits, and the unit.
fn time(seconds: f64) -> (String, &'static str) {
    let (value, unit) = match seconds {
        s if s >= 0.9995 => (s, "s"),
        s if s >= 0.9995e-3 => (s * 1e3, "ms"),
        s if s >= 0.9995e-6 => (s * 1e6, "us"),
        s => return (format!("{:.0}", s * 1e9), "ns"),
    };
    let decimals = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    (format!("{value:.decimals$}"), unit)
}

/// Two times, with one unit if it is the same.
fn times(first: f64, second: f64) -> String {
    match (time(first), time(second)) {
        ((a, one), (b, unit)) if one == unit => format!("{a}/{b} {unit}"),
        ((a, one), (b, unit)) => format!("{a} {one}/{b} {unit}"),
    }
}

/// The whole screen: title and state, tables, keys.
pub fn draw(frame: &mut Frame<'_>, url: &str, sample: &Sample, sort: Sort, news: &str) {
    let grids = Grid::of(sample);
    let wanted = grids.iter().map(Grid::height).collect();
    let room = usize::from(frame.area().height).saturating_sub(4);
    let mut heights = vec![Constraint::Length(3)];
    let shares = share(wanted, room).into_iter();
    heights.extend(shares.map(|lines| Constraint::Length(lines as u16)));
    heights.extend([Constraint::Fill(1), Constraint::Length(1)]);
    let areas = Layout::vertical(heights).split(frame.area());
    let width = usize::from(frame.area().width);
    let state = if sample.ready { "ready" } else { "NOT READY" };
    let left = match sample.left_behind.is_empty() {
        true => String::new(),
        false => format!("  left behind: {}", sample.left_behind.join(", ")),
    };
    let stalled = match sample.stalled.is_empty() {
        true => String::new(),
        false => format!("  kernel does not return: {}", sample.stalled.join(", ")),
    };
    // The most important part comes first: a narrow terminal truncates the end.
    let title = format!("serval top  {state}{stalled}{left}  every {:.1} s  {url}", sample.seconds);
    let head = [title.as_str(), news].map(|line| Line::from(cut(line, width)));
    frame.render_widget(Text::from(head.to_vec()), areas[0]);
    for (grid, area) in grids.iter().zip(&areas[1..]) {
        frame.render_widget(grid.widget(*area), *area);
    }
    let keys = format!("q quit  p pause  s sort by: {}", sort.name());
    frame.render_widget(Line::from(cut(&keys, width)), areas[areas.len() - 1]);
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
        let pairs = [(25e-9, 90e-9), (1.5e-6, 999.6e-6), (2.25e-3, 0.1), (10.0, 123.0)];
        let pairs = pairs.map(|(first, second)| times(first, second));
        assert_eq!(pairs, ["25/90 ns", "1.50 us/1.00 ms", "2.25/100 ms", "10.0/123 s"]);
    }

    #[test]
    fn text_and_terminal_show_the_same_cells() {
        let sample = Sample::between(&page(10), &page(14), Duration::from_secs(4));
        let screen = Screen { json: false, colour: false };
        let paper: String =
            Grid::of(&sample).into_iter().map(|grid| grid.table().render(&screen)).collect();
        let mut terminal = Terminal::new(TestBackend::new(120, 30)).unwrap();
        let url = "http://127.0.0.1:9464/metrics";
        terminal.draw(|frame| draw(frame, url, &sample, Sort::Replied, "paused")).unwrap();
        let drawn = terminal.backend().to_string();
        for part in [
            "(paused) digits",
            "no_credit 10",
            "2.00/2.00 ms",
            "50 %",
            "1.00k",
            "depth",
            "limits",
            "5.00 us",
            "sockets of",
            "7.00k",
        ] {
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
    }

    /// The lines of a terminal of this size.
    fn drawn(sample: &Sample, width: u16, height: u16) -> Vec<String> {
        let url = "http://a-host-with-a-rather-long-name.example.org:9464/metrics";
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, url, sample, Sort::Replied, "paused")).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    /// Many services with long names, large numbers and several reasons for drops.
    fn crowded() -> Sample {
        let mut sample = Sample::between(&page(10), &page(14), Duration::from_secs(4));
        (sample.sockets, sample.tenants) = (Vec::new(), Vec::new());
        let service = sample.services[0].clone();
        sample.services = (0..9)
            .map(|number| super::super::ServiceSample {
                name: format!("recommendations-of-the-day-{number}"),
                received: 1_234_567.0,
                replied: 1_234_000.0,
                drops: ["no_credit", "request_timeout", "accelerator_lost"]
                    .map(|reason| (reason.to_owned(), 123.4))
                    .into(),
                depth: (12.5, 64.0),
                ..service.clone()
            })
            .collect();
        sample
    }

    #[test]
    fn eighty_columns_show_what_matters_of_many_services_with_long_names() {
        let lines = drawn(&crowded(), 80, 24);
        let text = lines.join("\n");
        assert!(lines[0].starts_with("serval top  ready  left behind: gone"), "{text}");
        for part in ["in/s", "replied/s", "dropped/s", "in flight", "1.23M", "370", "no_credi"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        // Each table has its header and its own rows, and reports how many are hidden.
        for part in ["service", "p50 / p99", "worker", "50 %", "more"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        for stage in ["accelerator", "total"] {
            assert!(text.contains(stage), "{stage} is not in\n{text}");
        }
        let names = lines.iter().filter(|line| line.contains("-day-") && line.contains("…"));
        assert!(names.count() >= 6, "{text}");
        assert!(lines[23].starts_with("q quit  p pause  s sort by: replied"), "{text}");
        // Numbers are never truncated, so no column lost its right edge.
        let columns = lines.iter().find(|line| line.contains("replied/s")).unwrap();
        assert!(columns.ends_with("drops/s"), "{text}");
    }

    #[test]
    fn one_service_of_a_usual_name_fits_eighty_columns_whole() {
        let mut sample = Sample::between(&page(10), &page(14), Duration::from_secs(4));
        sample.services[0].name = "digits-gpu".into();
        let text = drawn(&sample, 80, 24).join("\n");
        for part in ["(paused) digits-gpu", "depth", "1.5/3", "no_credit 10", "queue"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn a_terminal_of_any_size_shows_something_and_does_not_panic() {
        let sample = crowded();
        for (width, height) in [(7, 3), (1, 1), (20, 10), (40, 12), (60, 24), (250, 60)] {
            let lines = drawn(&sample, width, height);
            assert!(!lines.concat().is_empty(), "{width} x {height}");
        }
        let narrow = drawn(&sample, 40, 24).join("\n");
        for part in ["(paus", "replied/s", "1.23M"] {
            assert!(narrow.contains(part), "{part} is not in\n{narrow}");
        }
    }
}
