//! Charts as SVG files: lines over two axes, readable on light and dark pages and without colours.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

/// Marks a file that may be overwritten by the next plot.
const MARK: &str = "<!-- made by serval -->";
const WIDTH: f64 = 760.0;
/// Height of the area between the axes; titles, legends and captions make the page higher.
const AREA: f64 = 272.0;
/// Room left and right of the axes.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 36.0;
/// Width of text between the left axis and the page's right edge.
const TEXT_WIDTH: f64 = WIDTH - LEFT - 12.0;
/// Sizes of text, and the distance of its lines.
const TITLE_SIZE: f64 = 16.0;
const TEXT_SIZE: f64 = 13.0;
const CAPTION_SIZE: f64 = 11.0;
const TITLE_LINE: f64 = 20.0;
const LEGEND_LINE: f64 = 20.0;
const CAPTION_LINE: f64 = 15.0;
/// Approximate number of ticks of an axis.
const TICKS: f64 = 6.0;

/// Colours that can be distinguished by colour-blind readers (M. Okabe and K. Ito, "Color Universal Design", 2008),
/// on light and dark backgrounds, and a dash pattern for each line.
const LINES: [(&str, &str, &str); 4] = [
    ("#0072b2", "#56b4e9", ""),
    ("#d55e00", "#ff9d5c", "7 4"),
    ("#008060", "#3fd0a4", "2 3"),
    ("#a0477d", "#e59ac6", "9 3 2 3"),
];

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear, from 0.
    Linear,
    /// Logarithmic; values are positive.
    Log,
    /// Shares in [0, 1), such that 90 %, 99 %, 99.9 % have equal distances.
    Percentile,
}

/// The unit of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Replies per second; shares, which have their own scale.
    Plain,
    /// Microseconds.
    Microseconds,
}

/// The axis of a distribution of latencies.
pub fn shares() -> Axis {
    let label = "share of the requests answered within this time".to_owned();
    Axis { label, scale: Scale::Percentile, unit: Unit::Plain }
}

/// The axis of latencies in microseconds.
pub fn latencies() -> Axis {
    Axis { label: "latency".to_owned(), scale: Scale::Log, unit: Unit::Microseconds }
}

/// The axis of rates.
pub fn rates() -> Axis {
    Axis { label: "replies a second".to_owned(), scale: Scale::Linear, unit: Unit::Plain }
}

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Its title, with the unit.
    pub label: String,
    /// The scale.
    pub scale: Scale,
    /// The unit.
    pub unit: Unit,
}

impl Axis {
    /// The label of a tick.
    fn name(&self, value: f64) -> String {
        match self.unit {
            _ if self.scale == Scale::Percentile => {
                format!("{} %", trim(format!("{:.3}", 100.0 * value)))
            }
            Unit::Plain => si(value),
            Unit::Microseconds => match value {
                v if v >= 0.9995e6 => format!("{} s", trim(format!("{:.3}", v / 1e6))),
                v if v >= 0.9995e3 => format!("{} ms", trim(format!("{:.3}", v / 1e3))),
                v if v >= 0.9995 => format!("{} us", trim(format!("{v:.3}"))),
                v => format!("{} ns", trim(format!("{:.3}", v * 1e3))),
            },
        }
    }
}

/// A line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Its points, in the order in which they are connected.
    pub points: Vec<(f64, f64)>,
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The title.
    pub title: String,
    /// The conditions of the measurement.
    pub caption: String,
    /// Why its numbers cannot be trusted.
    pub warning: Option<String>,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// At most four can be distinguished.
    pub lines: Vec<Line>,
}

/// Writes a chart. An existing file that was not written by this function is not changed.
pub fn save(chart: &Chart, path: &Path) -> io::Result<()> {
    match File::open(path) {
        Ok(file) => {
            let mut head = Vec::new();
            file.take(512).read_to_end(&mut head)?;
            if !String::from_utf8_lossy(&head).contains(MARK) {
                let what =
                    "the file exists and is not a plot of serval: move it or choose another name";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    fs::write(path, chart.svg())
}

impl Scale {
    /// A value's position before scaling; `None` for values without one.
    fn place(self, value: f64) -> Option<f64> {
        let place = match self {
            Self::Linear => value,
            Self::Log => value.log10(),
            Self::Percentile => -(1.0 - value).log10(),
        };
        place.is_finite().then_some(place)
    }

    /// Ticks in a `range` of positions: their positions and values.
    fn ticks(self, range: (f64, f64)) -> Vec<(f64, f64)> {
        let (low, high) = range;
        match self {
            Self::Linear => {
                let step = nice((high - low) / TICKS);
                let count = ((high - low) / step + 1e-9) as usize;
                (0..=count).map(|i| low + i as f64 * step).map(|v| (v, v)).collect()
            }
            Self::Log => {
                // A few decades have ticks between them, many have not.
                let steps: &[f64] = if high - low < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let decades = low.floor() as i32..=high.ceil() as i32;
                let values = decades.flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)));
                let inside = values.filter(|v| (low - 1e-9..=high + 1e-9).contains(&v.log10()));
                inside.map(|v| (v.log10(), v)).collect()
            }
            Self::Percentile => {
                let marks = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999];
                let placed = marks.into_iter().map(|q| (-(1.0f64 - q).log10(), q));
                placed.filter(|(p, _)| *p <= high + 1e-9).collect()
            }
        }
    }

    /// The range of positions that contains all of these.
    fn range(self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let mut places = values.filter_map(|value| self.place(value)).peekable();
        if places.peek().is_none() {
            return (0.0, 1.0);
        }
        let (low, high) = places
            .fold((f64::MAX, f64::MIN), |(low, high), place| (low.min(place), high.max(place)));
        match self {
            Self::Linear => {
                let step = nice(high.max(1e-9) / TICKS);
                (0.0, (high / step).ceil().max(1.0) * step)
            }
            // At least a factor of two, with a margin.
            Self::Log => (low - 0.05, high.max(low + 0.3) + 0.05),
            Self::Percentile => (0.0, high.max(1.0)),
        }
    }
}

/// The largest of 1, 2 and 5 times a power of ten that does not exceed `value`.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [5.0, 2.0, 1.0].map(|step| step * power).into_iter().find(|s| *s <= value).unwrap_or(power)
}

/// A number with a prefix: 1500 is `1.5k`.
fn si(value: f64) -> String {
    let (scaled, prefix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    trim(format!("{scaled:.3}")) + prefix
}

/// Removes trailing zeros after the decimal point.
fn trim(number: String) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Maximum width of a text: for a wide font (DejaVu Sans).
fn text_width(text: &str, size: f64) -> f64 {
    let em = |c: char| match c {
        'i' | 'j' | 'l' | 't' | 'f' | 'r' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' '
        | '(' | ')' => 0.42,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 1.0,
        c if c.is_ascii_uppercase() => 0.77,
        c if c.is_ascii() => 0.65,
        _ => 1.0,
    };
    size * text.chars().map(em).sum::<f64>()
}

/// The text in lines up to this width; wider words are split.
fn wrap(text: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is one");
        let gap = if line.is_empty() { "" } else { " " };
        if text_width(&format!("{line}{gap}{word}"), size) <= width {
            *line += gap;
            *line += word;
            continue;
        }
        if !line.is_empty() {
            lines.push(String::new());
        }
        for c in word.chars() {
            let line = lines.last_mut().expect("there is one");
            if !line.is_empty() && text_width(&format!("{line}{c}"), size) > width {
                lines.push(String::new());
            }
            lines.last_mut().expect("there is one").push(c);
        }
    }
    lines
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The layout of the page, from top to bottom.
struct Layout {
    title: Vec<String>,
    /// Position of each line of the chart in the legend.
    legend: Vec<(f64, f64)>,
    top: f64,
    bottom: f64,
    /// Lines below the axes, warnings first, and whether each is a warning.
    notes: Vec<(String, bool)>,
    height: f64,
}

/// Length of the line sample in front of a name in the legend, with its distance.
const LEGEND_MARK: f64 = 34.0;

impl Layout {
    fn new(chart: &Chart) -> Self {
        // Bold text is wider.
        let title = wrap(&chart.title, 1.1 * TITLE_SIZE, TEXT_WIDTH);
        let (mut x, mut y) = (LEFT, 50.0 + TITLE_LINE * (title.len() - 1) as f64);
        let mut legend = Vec::new();
        for line in &chart.lines {
            let width = LEGEND_MARK + text_width(&line.name, TEXT_SIZE);
            if x > LEFT && x + width > LEFT + TEXT_WIDTH {
                (x, y) = (LEFT, y + LEGEND_LINE);
            }
            legend.push((x, y));
            x += width + 24.0;
        }
        let top = y + 22.0;
        let bottom = top + AREA;
        let warning = chart.warning.iter();
        let warning = warning.flat_map(|text| wrap(text, 1.1 * CAPTION_SIZE, TEXT_WIDTH));
        let caption = wrap(&chart.caption, CAPTION_SIZE, TEXT_WIDTH);
        let mut notes: Vec<_> = warning.map(|line| (line, true)).collect();
        notes.extend(caption.into_iter().map(|line| (line, false)));
        let height = bottom + 69.0 + CAPTION_LINE * notes.len() as f64 + 12.0;
        Self { title, legend, top, bottom, notes, height }
    }
}

impl Chart {
    /// The whole file.
    pub fn svg(&self) -> String {
        let (x_range, y_range) = {
            let points = || self.lines.iter().flat_map(|line| line.points.iter());
            (self.x.scale.range(points().map(|p| p.0)), self.y.scale.range(points().map(|p| p.1)))
        };
        let layout = Layout::new(self);
        let stretch = |place: f64, range: (f64, f64)| (place - range.0) / (range.1 - range.0);
        let x_of = |place: f64| LEFT + stretch(place, x_range) * (WIDTH - LEFT - RIGHT);
        let y_of = |place: f64| layout.bottom - stretch(place, y_range) * AREA;
        let mut out = self.head(&layout);
        self.axes(&mut out, &layout, &x_of, &y_of, x_range, y_range);
        for (index, line) in self.lines.iter().enumerate() {
            let place = |(x, y): &(f64, f64)| {
                Some((x_of(self.x.scale.place(*x)?), y_of(self.y.scale.place(*y)?)))
            };
            let points: Vec<(f64, f64)> = line.points.iter().filter_map(place).collect();
            draw(&mut out, index, &line.name, layout.legend[index], &points);
        }
        out.push_str("</svg>\n");
        out
    }

    fn head(&self, layout: &Layout) -> String {
        let mut style = format!(
            "svg{{font-family:system-ui,sans-serif;font-size:{TEXT_SIZE}px}}.ground{{fill:#fff}}text{{fill:#222}}\
             .dim{{fill:#555}}.warning{{fill:#b00020;font-weight:600}}.grid{{stroke:#ddd}}.axis{{stroke:#555}}",
        );
        let mut dark = String::from(
            ".ground{fill:#16181d}text{fill:#eee}.dim{fill:#aaa}.warning{fill:#ff8a80}.grid{stroke:#333}.axis{stroke:#999}",
        );
        for (index, (light, night, dash)) in LINES.iter().enumerate() {
            let _ = write!(style, ".l{index}{{stroke:{light};stroke-dasharray:{dash}}}");
            let _ = write!(style, ".m{index}{{fill:{light}}}");
            let _ = write!(dark, ".l{index}{{stroke:{night}}}.m{index}{{fill:{night}}}");
        }
        let height = layout.height;
        let mut head = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
             {MARK}\n<title>{}</title>\n\
             <style>{style}@media(prefers-color-scheme:dark){{{dark}}}</style>\n\
             <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
            escape(&self.title)
        );
        for (at, line) in layout.title.iter().enumerate() {
            let _ = writeln!(
                head,
                "<text x=\"{LEFT}\" y=\"{}\" font-size=\"{TITLE_SIZE}\" font-weight=\"600\">{}</text>",
                26.0 + TITLE_LINE * at as f64,
                escape(line)
            );
        }
        for (at, (line, is_warning)) in layout.notes.iter().enumerate() {
            let class = if *is_warning { "warning" } else { "dim" };
            let y = layout.bottom + 69.0 + CAPTION_LINE * (at + 1) as f64;
            let _ = writeln!(
                head,
                "<text x=\"{LEFT}\" y=\"{y}\" class=\"{class}\" font-size=\"{CAPTION_SIZE}\">{}</text>",
                escape(line)
            );
        }
        head
    }

    fn axes(
        &self,
        out: &mut String,
        layout: &Layout,
        x_of: &dyn Fn(f64) -> f64,
        y_of: &dyn Fn(f64) -> f64,
        x_range: (f64, f64),
        y_range: (f64, f64),
    ) {
        let Layout { top, bottom, .. } = *layout;
        let right = WIDTH - RIGHT;
        for (place, value) in self.x.scale.ticks(x_range) {
            let (x, label) = (x_of(place), self.x.name(value));
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {top}V{bottom}\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                bottom + 20.0
            );
        }
        for (place, value) in self.y.scale.ticks(y_range) {
            let (y, label) = (y_of(place), self.y.name(value));
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        let (x_middle, y_middle) = ((LEFT + right) / 2.0, (top + bottom) / 2.0);
        let _ = write!(
            out,
            "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {top}V{bottom}H{right}\"/>\n\
             <text x=\"{x_middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(22 {y_middle}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
            bottom + 44.0,
            escape(&self.x.label),
            escape(&self.y.label)
        );
    }
}

/// A line, its markers, and its place in the legend above the axes.
fn draw(out: &mut String, index: usize, name: &str, (x, y): (f64, f64), points: &[(f64, f64)]) {
    let style = index % LINES.len();
    let mut path = String::new();
    for (at, (x, y)) in points.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if at == 0 { 'M' } else { 'L' });
    }
    let _ = write!(out, "<path class=\"l{style}\" fill=\"none\" stroke-width=\"2\" d=\"{path}\"/>");
    for (x, y) in points {
        marker(out, style, *x, *y);
    }
    let _ = write!(out, "<path class=\"l{style}\" stroke-width=\"2\" d=\"M{x} {y}h26\"/>");
    marker(out, style, x + 13.0, y);
    let _ =
        writeln!(out, "<text x=\"{}\" y=\"{}\">{}</text>", x + LEGEND_MARK, y + 4.0, escape(name));
}

fn marker(out: &mut String, style: usize, x: f64, y: f64) {
    let shape = match style {
        0 => "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
        1 => "m-3 -3h6v6h-6z",
        2 => "m0 -4l4 7h-8z",
        _ => "m0 -4l4 4l-4 4l-4 -4z",
    };
    let _ = write!(out, "<path class=\"m{style}\" d=\"M{x:.1} {y:.1}{shape}\"/>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chart(x: Scale, points: Vec<(f64, f64)>) -> Chart {
        let line = |name: &str| Line { name: name.to_owned(), points: points.clone() };
        Chart {
            title: "a < b & c".to_owned(),
            caption: String::new(),
            warning: None,
            x: Axis { scale: x, ..rates() },
            y: latencies(),
            lines: vec![line("p50"), line("p99")],
        }
    }

    /// Height of the page.
    fn height(svg: &str) -> f64 {
        let size = svg.split("viewBox=\"0 0 760 ").nth(1).unwrap();
        size.split('"').next().unwrap().parse().unwrap()
    }

    /// Start and end of each text, and its line.
    fn extents(svg: &str) -> Vec<(f64, f64, f64, String)> {
        let texts = svg.split("<text ").skip(1).map(|text| text.split("</text>").next().unwrap());
        texts
            .map(|text| {
                let (attributes, text) = text.split_once('>').unwrap();
                let of = |name: &str| {
                    let value = attributes.split(&format!("{name}=\"")).nth(1)?;
                    value.split('"').next().map(str::to_owned)
                };
                let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
                let size = of("font-size").map_or(TEXT_SIZE, |size| size.parse().unwrap());
                let width = text_width(&text, size);
                if attributes.starts_with("transform") {
                    // The label of the left axis runs upwards from its middle.
                    let middle =
                        attributes.split([' ', ')']).nth(1).unwrap().parse::<f64>().unwrap();
                    return (middle - width / 2.0, middle + width / 2.0, 22.0, text);
                }
                let (x, y) = (of("x").unwrap().parse::<f64>().unwrap(), of("y").unwrap());
                let from = match of("text-anchor").as_deref() {
                    Some("middle") => x - width / 2.0,
                    Some("end") => x - width,
                    _ => x,
                };
                (from, from + width, y.parse().unwrap(), text)
            })
            .collect()
    }

    fn all_text_is_on_the_page(chart: &Chart) {
        let svg = chart.svg();
        let bottom = height(&svg);
        for (from, to, y, text) in extents(&svg) {
            assert!(from >= 0.0 && to <= WIDTH, "{text} from {from} to {to}");
            assert!(y >= TEXT_SIZE && y + 4.0 <= bottom, "{text} at {y} of {bottom}");
        }
    }

    /// Numbers in the attributes of positions.
    fn numbers(svg: &str) -> Vec<f64> {
        let body = svg.split("</style>").nth(1).unwrap();
        let words = body.split(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-'));
        words.filter_map(|word| word.parse().ok()).collect()
    }

    #[test]
    fn long_texts_are_wrapped_and_nothing_is_clipped() {
        let points = vec![(0.5, 2.0), (0.99999, 3e8)];
        let long = |words: usize| "The requests in flight were 4096, 1024. ".repeat(words);
        for scale in [Scale::Percentile, Scale::Linear, Scale::Log] {
            let mut chart = chart(scale, points.clone());
            all_text_is_on_the_page(&chart);
            chart.title = format!("{} {}", long(4), "x".repeat(200));
            chart.caption = long(12);
            chart.warning = Some(format!("NOT TRUSTED, {}", long(6)));
            let names = ["1.50 M/s arriving at this server", "p99.9", "WWWWWWWWWWWWWWWWWWWW"];
            let line = |name: &str| Line { name: name.to_owned(), points: points.clone() };
            chart.lines = names.map(line).into();
            all_text_is_on_the_page(&chart);
            let svg = chart.svg();
            // Every word is present.
            let shown: String = extents(&svg).into_iter().map(|(.., text)| text).collect();
            let count = |text: &str| text.matches("4096,").count();
            assert_eq!(count(&shown), 4 + 12 + 6, "{shown}");
            for at in [svg.find("NOT TRUSTED").unwrap(), svg.find("p99.9").unwrap()] {
                assert!(at > svg.find("<rect").unwrap());
            }
        }
    }

    #[test]
    fn latencies_have_a_suitable_unit() {
        let name = |us| latencies().name(us);
        let names = [0.005, 0.5, 1.0, 50.0, 1000.0, 2e5, 1e6, 2e7].map(name);
        assert_eq!(names, ["5 ns", "500 ns", "1 us", "50 us", "1 ms", "200 ms", "1 s", "20 s"]);
        assert_eq!(rates().name(1500.0), "1.5k");
        assert_eq!(shares().name(0.999), "99.9 %");
    }

    proptest! {
        #[test]
        fn everything_stays_on_the_page(points in prop::collection::vec((0.0..1e9f64, 1e-3..1e12f64), 0..20)) {
            for x in [Scale::Linear, Scale::Log] {
                let svg = chart(x, points.clone()).svg();
                prop_assert!(!svg.contains("NaN") && !svg.contains("inf"));
                let paths = svg.split("class=\"m").skip(1).filter_map(|m| m.split("d=\"M").nth(1));
                for place in paths {
                    let mut place = place.split(|c: char| c != '.' && !c.is_ascii_digit());
                    let mut next = || place.next().unwrap().parse::<f64>().unwrap();
                    let (x, y) = (next(), next());
                    prop_assert!((0.0..=WIDTH).contains(&x) && (0.0..=height(&svg)).contains(&y));
                }
            }
        }

        #[test]
        fn axes_have_a_readable_number_of_ticks(high in 1e-3..1e12f64, low in 1e-3..1e12f64) {
            for scale in [Scale::Linear, Scale::Log] {
                let ticks = scale.ticks(scale.range([low, high].into_iter()));
                prop_assert!((1..=17).contains(&ticks.len()), "{ticks:?}");
                prop_assert!(ticks.windows(2).all(|t| t[0].0 < t[1].0 && t[0].1 != t[1].1), "{ticks:?}");
                for axis in [rates(), latencies()] {
                    let axis = Axis { scale, ..axis };
                    let names: Vec<_> = ticks.iter().map(|tick| axis.name(tick.1)).collect();
                    prop_assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
                }
            }
        }
    }

    #[test]
    fn text_is_escaped_and_percentiles_have_their_names() {
        let svg = chart(Scale::Percentile, vec![(0.5, 1.0), (0.999, 20.0), (1.0, 30.0)]).svg();
        assert!(svg.contains("a &lt; b &amp; c") && svg.contains(">99.9 %</text>"));
        assert!(svg.contains("prefers-color-scheme:dark") && svg.contains(">p99</text>"));
        assert!(numbers(&svg).iter().all(|n| n.abs() < 1000.0), "the maximum has no position");
        for (value, text) in [(0.0, "0"), (1500.0, "1.5k"), (2e6, "2M"), (0.25, "0.25")] {
            assert_eq!(si(value), text);
        }
    }

    #[test]
    fn only_its_own_files_are_overwritten() {
        let folder = std::env::temp_dir().join(format!("serval-plot-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (own, other) = (folder.join("own.svg"), folder.join("other.svg"));
        let chart = chart(Scale::Linear, vec![(1.0, 1.0)]);
        save(&chart, &own).unwrap();
        save(&chart, &own).unwrap();
        fs::write(&other, "<svg>a picture</svg>").unwrap();
        assert_eq!(save(&chart, &other).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&other).unwrap(), "<svg>a picture</svg>");
        assert!(save(&chart, &folder).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
