//! Charts as SVG files: lines over two axes, readable on light and on dark pages and without colours.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

/// Says in the file that it may be overwritten by the next plot.
const MARK: &str = "<!-- made by serval -->";
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
/// Room around the axes: left, right, top, bottom.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 72.0;
const BOTTOM: f64 = 96.0;
/// Ticks an axis has, about.
const TICKS: f64 = 6.0;

/// Colours that differ for colour-blind readers too (M. Okabe and K. Ito, "Color Universal Design",
/// 2008), on light and on dark ground, and a dash pattern for each line.
const LINES: [(&str, &str, &str); 4] = [
    ("#0072b2", "#56b4e9", ""),
    ("#d55e00", "#ff9d5c", "7 4"),
    ("#008060", "#3fd0a4", "2 3"),
    ("#a0477d", "#e59ac6", "9 3 2 3"),
];

/// How values are placed on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly, from 0.
    Linear,
    /// By their logarithm; values are positive.
    Log,
    /// Shares in [0, 1), such that 90 %, 99 %, 99.9 % are equally far apart.
    Percentile,
}

/// The axis of a distribution of latencies.
pub fn shares() -> Axis {
    let label = "share of the requests answered within this time".to_owned();
    Axis { label, scale: Scale::Percentile }
}

/// The axis of latencies in microseconds.
pub fn latencies() -> Axis {
    Axis { label: "latency, us".to_owned(), scale: Scale::Log }
}

/// The axis of rates.
pub fn rates() -> Axis {
    Axis { label: "replies a second".to_owned(), scale: Scale::Linear }
}

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it shows, with its unit.
    pub label: String,
    /// How values are placed.
    pub scale: Scale,
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
    /// What it shows.
    pub title: String,
    /// How it was measured.
    pub caption: String,
    /// Why its numbers cannot be trusted.
    pub warning: Option<String>,
    /// From left to right.
    pub x: Axis,
    /// From bottom to top.
    pub y: Axis,
    /// At most four can be told apart.
    pub lines: Vec<Line>,
}

/// Writes a chart. A file that is there and was not made by this function is left alone.
pub fn save(chart: &Chart, path: &Path) -> io::Result<()> {
    match File::open(path) {
        Ok(file) => {
            let mut head = Vec::new();
            file.take(512).read_to_end(&mut head)?;
            if !String::from_utf8_lossy(&head).contains(MARK) {
                let what = "it is there and no plot of serval: move it away or choose another name";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    fs::write(path, chart.svg())
}

impl Scale {
    /// A value's place before it is stretched to the axis; `None` for values that have none.
    fn place(self, value: f64) -> Option<f64> {
        let place = match self {
            Self::Linear => value,
            Self::Log => value.log10(),
            Self::Percentile => -(1.0 - value).log10(),
        };
        place.is_finite().then_some(place)
    }

    /// Ticks for places in `range`: their places and labels.
    fn ticks(self, range: (f64, f64)) -> Vec<(f64, String)> {
        let (low, high) = range;
        match self {
            Self::Linear => {
                let step = nice((high - low) / TICKS);
                let count = ((high - low) / step + 1e-9) as usize;
                (0..=count).map(|i| low + i as f64 * step).map(|v| (v, si(v))).collect()
            }
            Self::Log => {
                // A few decades have ticks between them, many have not.
                let steps: &[f64] = if high - low < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let decades = low.floor() as i32..=high.ceil() as i32;
                let values = decades.flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)));
                let inside = values.filter(|v| (low - 1e-9..=high + 1e-9).contains(&v.log10()));
                inside.map(|v| (v.log10(), si(v))).collect()
            }
            Self::Percentile => {
                let marks = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999];
                let placed = marks.into_iter().map(|q| (-(1.0f64 - q).log10(), q));
                let label = |q: f64| format!("{} %", trim(format!("{:.3}", 100.0 * q)));
                placed.filter(|(p, _)| *p <= high + 1e-9).map(|(p, q)| (p, label(q))).collect()
            }
        }
    }

    /// The range of places that holds all of these.
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
            // At least a factor of two, with some room.
            Self::Log => (low - 0.05, high.max(low + 0.3) + 0.05),
            Self::Percentile => (0.0, high.max(1.0)),
        }
    }
}

/// The largest of 1, 2 and 5 times a power of ten that is not over `value`.
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

/// Without zeros at the end.
fn trim(number: String) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

impl Chart {
    /// The whole file.
    pub fn svg(&self) -> String {
        let (x_range, y_range) = {
            let points = || self.lines.iter().flat_map(|line| line.points.iter());
            (self.x.scale.range(points().map(|p| p.0)), self.y.scale.range(points().map(|p| p.1)))
        };
        let stretch = |place: f64, range: (f64, f64)| (place - range.0) / (range.1 - range.0);
        let x_of = |place: f64| LEFT + stretch(place, x_range) * (WIDTH - LEFT - RIGHT);
        let y_of = |place: f64| HEIGHT - BOTTOM - stretch(place, y_range) * (HEIGHT - TOP - BOTTOM);
        let mut out = self.head();
        self.axes(&mut out, &x_of, &y_of, x_range, y_range);
        for (index, line) in self.lines.iter().enumerate() {
            let place = |(x, y): &(f64, f64)| {
                Some((x_of(self.x.scale.place(*x)?), y_of(self.y.scale.place(*y)?)))
            };
            let points: Vec<(f64, f64)> = line.points.iter().filter_map(place).collect();
            draw(&mut out, index, &line.name, &points);
        }
        out.push_str("</svg>\n");
        out
    }

    fn head(&self) -> String {
        let mut style = String::from(
            "svg{font-family:system-ui,sans-serif;font-size:13px}.ground{fill:#fff}text{fill:#222}\
             .dim{fill:#555}.warning{fill:#b00020;font-weight:600}.grid{stroke:#ddd}.axis{stroke:#555}",
        );
        let mut dark = String::from(
            ".ground{fill:#16181d}text{fill:#eee}.dim{fill:#aaa}.warning{fill:#ff8a80}.grid{stroke:#333}.axis{stroke:#999}",
        );
        for (index, (light, night, dash)) in LINES.iter().enumerate() {
            let _ = write!(style, ".l{index}{{stroke:{light};stroke-dasharray:{dash}}}");
            let _ = write!(style, ".m{index}{{fill:{light}}}");
            let _ = write!(dark, ".l{index}{{stroke:{night}}}.m{index}{{fill:{night}}}");
        }
        let title = escape(&self.title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n\
             {MARK}\n<title>{title}</title>\n\
             <style>{style}@media(prefers-color-scheme:dark){{{dark}}}</style>\n\
             <rect class=\"ground\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n\
             <text x=\"{LEFT}\" y=\"26\" font-size=\"16\" font-weight=\"600\">{title}</text>\n\
             {}<text x=\"{LEFT}\" y=\"{}\" class=\"dim\" font-size=\"11\">{}</text>\n",
            self.warning.as_ref().map_or(String::new(), |warning| format!(
                "<text x=\"{LEFT}\" y=\"{}\" class=\"warning\" font-size=\"11\">{}</text>\n",
                HEIGHT - 28.0,
                escape(warning)
            )),
            HEIGHT - 12.0,
            escape(&self.caption)
        )
    }

    fn axes(
        &self,
        out: &mut String,
        x_of: &dyn Fn(f64) -> f64,
        y_of: &dyn Fn(f64) -> f64,
        x_range: (f64, f64),
        y_range: (f64, f64),
    ) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (place, label) in self.x.scale.ticks(x_range) {
            let x = x_of(place);
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                bottom + 20.0
            );
        }
        for (place, label) in self.y.scale.ticks(y_range) {
            let y = y_of(place);
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        let (x_middle, y_middle) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
        let _ = write!(
            out,
            "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>\n\
             <text x=\"{x_middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(22 {y_middle}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
            bottom + 44.0,
            escape(&self.x.label),
            escape(&self.y.label)
        );
    }
}

/// A line, its markers, and its place in the legend above the axes.
fn draw(out: &mut String, index: usize, name: &str, points: &[(f64, f64)]) {
    let style = index % LINES.len();
    let mut path = String::new();
    for (at, (x, y)) in points.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if at == 0 { 'M' } else { 'L' });
    }
    let _ = write!(out, "<path class=\"l{style}\" fill=\"none\" stroke-width=\"2\" d=\"{path}\"/>");
    for (x, y) in points {
        marker(out, style, *x, *y);
    }
    let (x, y) = (LEFT + 164.0 * index as f64, 50.0);
    let _ = write!(out, "<path class=\"l{style}\" stroke-width=\"2\" d=\"M{x} {y}h26\"/>");
    marker(out, style, x + 13.0, y);
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\">{}</text>", x + 34.0, y + 4.0, escape(name));
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

    /// Numbers in the attributes that place things.
    fn numbers(svg: &str) -> Vec<f64> {
        let body = svg.split("</style>").nth(1).unwrap();
        let words = body.split(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-'));
        words.filter_map(|word| word.parse().ok()).collect()
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
                    prop_assert!((0.0..=WIDTH).contains(&x) && (0.0..=HEIGHT).contains(&y));
                }
            }
        }

        #[test]
        fn axes_have_a_readable_number_of_ticks(high in 1e-3..1e12f64, low in 1e-3..1e12f64) {
            for scale in [Scale::Linear, Scale::Log] {
                let ticks = scale.ticks(scale.range([low, high].into_iter()));
                prop_assert!((1..=17).contains(&ticks.len()), "{ticks:?}");
                prop_assert!(ticks.windows(2).all(|t| t[0].0 < t[1].0 && t[0].1 != t[1].1), "{ticks:?}");
            }
        }
    }

    #[test]
    fn text_is_escaped_and_percentiles_have_their_names() {
        let svg = chart(Scale::Percentile, vec![(0.5, 1.0), (0.999, 20.0), (1.0, 30.0)]).svg();
        assert!(svg.contains("a &lt; b &amp; c") && svg.contains(">99.9 %</text>"));
        assert!(svg.contains("prefers-color-scheme:dark") && svg.contains(">p99</text>"));
        assert!(numbers(&svg).iter().all(|n| n.abs() < 1000.0), "the maximum has no place");
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
