//! The suite: the rows of `benches/speed.toml`.
//!
//! A row compares two sides (`a`, the candidate, and `b`, the baseline), or measures one alone. A side is a `server`
//! under a load, a `program` that prints its figures, or a memcached under a load. Claims (`must`, `aim`) and limits
//! (`bound`, `next`) are in the same file, so that the published table contains nothing else.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use wire::framing::Framing;

use super::calibration::State;
use super::verdict::{Better, Claim, Combine};
use crate::{Class, Work};

/// Most pairs of a row.
pub const PAIRS_MAX: usize = 1000;

/// All rows, checked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    /// Version of the format; 1.
    pub schema: u32,
    /// Defaults of the rows.
    #[serde(default)]
    pub defaults: Timing,
    /// The rows in the order of the table.
    #[serde(rename = "row")]
    pub rows: Vec<Row>,
}

/// Durations and number of pairs.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Pairs that count, in [1, [`PAIRS_MAX`]]; default 9.
    pub pairs: Option<usize>,
    /// Seconds of load before each measurement; default 0.5.
    pub warmup_s: Option<f64>,
    /// Seconds of each measurement; default 2.
    pub duration_s: Option<f64>,
}

/// One line of the table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Short, in lower case with dashes: also the name of its result file.
    pub name: String,
    /// A description of the measurement.
    pub what: String,
    /// Class of the client (T0, T2, T3), if there is one.
    #[serde(default)]
    pub class: String,
    /// The compared figure: `rate`, `p50_ns`, `busy_ns`, or one of a program.
    #[serde(default = "rate")]
    pub metric: String,
    /// Which direction of the figure is better; required for unknown figures of programs.
    pub better: Option<Better>,
    /// How the two sides are combined to a value; default: `ratio` with a `b`, else `alone`.
    pub combine: Option<Combine>,
    /// The required value.
    pub must: Option<f64>,
    /// The target value.
    pub aim: Option<f64>,
    /// The value that must not be exceeded, for a row that compares a server with itself to prove the instrument; with
    /// `must`.
    pub most: Option<f64>,
    /// Rows that must pass for this one to be valid.
    #[serde(default)]
    pub needs: Vec<String>,
    /// The state of the machine in which pairs count; default: any. For figures that mainly consist of the round trip
    /// between two cores, which differs between states.
    pub state: Option<State>,
    /// Whether pairs count only if no other program shares the server's cores, as far as that can be detected: for
    /// goals per core.
    #[serde(default)]
    pub whole: bool,
    /// Durations and number of pairs.
    #[serde(default)]
    pub timing: Timing,
    /// Cores of the servers, in [1, 64]; default 1. `{server_cores}` in a command line.
    pub server_cores: Option<usize>,
    /// The load on sides without their own.
    pub load: Option<Load>,
    /// The candidate.
    pub a: SideSpec,
    /// The baseline.
    pub b: Option<SideSpec>,
    /// What bounds the value.
    #[serde(default)]
    pub bound: String,
    /// What the next step would be.
    #[serde(default)]
    pub next: String,
}

/// One side of a row.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SideSpec {
    /// Its name in tables.
    #[serde(default)]
    pub label: String,
    /// Command line of a server under measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Command line of a program that prints its figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The figure, if its name differs from the row's `metric`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub figure: Option<String>,
    /// The load, if it differs from the row's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// Its cores.
    #[serde(default)]
    pub on: On,
    /// Starts a memcached with the pictures of the faces workload, on the client's core if the load shares it, else
    /// on one of the server's that the row does not use; its address replaces `{memcached}` in the command line.
    /// Without a command line the memcached itself is the server of the load, over TCP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memcached: bool,
}

/// The cores of a side's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum On {
    /// On the server's cores only.
    #[default]
    ServerCore,
    /// On any core.
    Anywhere,
}

/// The load of the clients. The client is this process, on the client's cores.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// `udp`, `tcp` or `shm`: the first such URL of the ready line.
    #[serde(default = "udp")]
    pub url: String,
    /// Class of the client: T0, T2, T3.
    pub class: String,
    /// The workload, as for `serval bench --workload`.
    pub workload: String,
    /// Requests in flight; in an open loop the maximum.
    pub window: usize,
    /// Requests per second of an open loop; closed when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Open loop at this multiple of the peak, which is measured just before: the best of closed loops with half the
    /// window, the window and twice as much. Adds the figures `peak_rate` and `share_of_peak`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times_peak: Option<f64>,
    /// Open loop of both sides at this multiple of the lower of their two peaks, so that neither is overloaded. They are
    /// measured before the pairs, and again after a pair in which a side could not keep up. Adds the figures `peak_rate`
    /// and `share_of_peak`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times_lower_peak: Option<f64>,
    /// Open loop of class T2: requests that arrive at the same time; default 1. As many are sent together while a peak is
    /// measured, since a server can do more of larger batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Seconds after which a request is lost; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// The client's core is shared with other processes, so the client yields it while it has nothing to do;
    /// otherwise it spins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares_core: bool,
    /// Framing on TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub framing: Option<String>,
    /// TCP connections, or sockets of class T2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<usize>,
    /// Cores of the client, in [1, 64], one thread on each; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
}

/// Most cores of a side or a client.
const CORES_MAX: usize = 64;

/// A number of cores, 1 by default.
fn check_cores(name: &str, cores: Option<usize>) -> Result<(), String> {
    match cores {
        Some(cores) if !(1..=CORES_MAX).contains(&cores) => {
            Err(format!("{name} must be in [1, {CORES_MAX}]"))
        }
        _ => Ok(()),
    }
}

/// Why a suite cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// It is invalid.
    #[error("{0}: {1}")]
    Form(PathBuf, String),
    /// There is no such row.
    #[error("there is no row {0:?} in the suite; it has {1}")]
    NoRow(String, String),
}

fn rate() -> String {
    "rate".to_owned()
}

fn udp() -> String {
    "udp".to_owned()
}

/// Which direction of a figure is better, if its name implies it.
pub fn better_of(figure: &str) -> Option<Better> {
    match figure {
        "rate" | "peak_rate" | "share_of_peak" => Some(Better::Higher),
        _ if figure.ends_with("_ns") => Some(Better::Lower),
        _ => None,
    }
}

impl Suite {
    /// Reads and checks a suite.
    pub fn load(path: &Path) -> Result<Self, SuiteError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| SuiteError::Read(path.to_owned(), error))?;
        Self::parse(&text).map_err(|what| SuiteError::Form(path.to_owned(), what))
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let suite: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        if suite.schema != 1 {
            return Err(format!("schema is {}, this program reads schema 1", suite.schema));
        }
        suite.defaults.check("[defaults]")?;
        for (index, row) in suite.rows.iter().enumerate() {
            row.check().map_err(|what| format!("row {:?}: {what}", row.name))?;
            let earlier = &suite.rows[..index];
            if earlier.iter().any(|other| other.name == row.name) {
                return Err(format!("there are two rows {:?}", row.name));
            }
            for need in &row.needs {
                if !earlier.iter().any(|other| other.name == *need) {
                    return Err(format!(
                        "row {:?} needs {need:?}, which must be a row above it",
                        row.name
                    ));
                }
            }
        }
        Ok(suite)
    }

    /// The named rows and their prerequisites, in the suite's order; all rows if none is named. A name that ends with
    /// `*` selects all rows with that prefix.
    pub fn select(&self, names: &[String]) -> Result<Vec<&Row>, SuiteError> {
        if names.is_empty() {
            return Ok(self.rows.iter().collect());
        }
        let matches = |name: &str, row: &Row| match name.strip_suffix('*') {
            Some(start) => row.name.starts_with(start),
            None => row.name == name,
        };
        if let Some(unknown) = names.iter().find(|n| !self.rows.iter().any(|r| matches(n, r))) {
            let all: Vec<&str> = self.rows.iter().map(|row| row.name.as_str()).collect();
            return Err(SuiteError::NoRow(unknown.clone(), all.join(", ")));
        }
        let mut wanted: Vec<bool> =
            self.rows.iter().map(|row| names.iter().any(|name| matches(name, row))).collect();
        // Prerequisites come before their rows, so one backward pass also finds prerequisites of prerequisites.
        for index in (0..self.rows.len()).rev() {
            if wanted[index] {
                for need in &self.rows[index].needs {
                    let at = self.rows.iter().position(|row| row.name == *need);
                    wanted[at.expect("checked when it was read")] = true;
                }
            }
        }
        Ok(self.rows.iter().zip(wanted).filter_map(|(row, wanted)| wanted.then_some(row)).collect())
    }
}

impl Timing {
    /// These values, with defaults from `other`.
    pub fn or(self, other: Self) -> Self {
        Self {
            pairs: self.pairs.or(other.pairs),
            warmup_s: self.warmup_s.or(other.warmup_s),
            duration_s: self.duration_s.or(other.duration_s),
        }
    }

    /// Checks the ranges; `what` names their owner.
    pub fn check(&self, what: &str) -> Result<(), String> {
        if self.pairs.is_some_and(|pairs| !(1..=PAIRS_MAX).contains(&pairs)) {
            return Err(format!("{what}: pairs must be in [1, {PAIRS_MAX}]"));
        }
        let seconds =
            |value: Option<f64>, min: f64| value.is_none_or(|value| (min..=600.0).contains(&value));
        if !seconds(self.warmup_s, 0.0) {
            return Err(format!("{what}: warmup_s must be in [0, 600]"));
        }
        if !seconds(self.duration_s, 0.05) {
            return Err(format!("{what}: duration_s must be in [0.05, 600]"));
        }
        Ok(())
    }
}

impl Row {
    /// How the two sides are combined to a value.
    pub fn combine(&self) -> Combine {
        self.combine.unwrap_or(if self.b.is_some() { Combine::Ratio } else { Combine::Alone })
    }

    /// Which direction of the figure is better.
    pub fn better(&self) -> Better {
        self.better.or_else(|| better_of(&self.metric)).expect("checked when it was read")
    }

    /// The claim about the value.
    pub fn claim(&self) -> Claim {
        let better = self.combine().better(self.better());
        Claim { better, must: self.must, aim: self.aim, most: self.most }
    }

    /// The load on a side.
    pub fn load_on<'r>(&'r self, side: &'r SideSpec) -> Option<&'r Load> {
        side.load.as_ref().or(self.load.as_ref())
    }

    /// Checks that the format alone does not cover.
    pub fn check(&self) -> Result<(), String> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.name.is_empty() || !self.name.chars().all(plain) {
            return Err("a name has lower-case letters, digits and dashes".to_owned());
        }
        if self.better.is_none() && better_of(&self.metric).is_none() {
            return Err(format!(
                "say whether {:?} is better = \"higher\" or \"lower\"",
                self.metric
            ));
        }
        match (self.combine(), &self.b) {
            (Combine::Alone, Some(_)) => {
                return Err("combine is alone, but there is a b".to_owned());
            }
            (Combine::Ratio | Combine::Difference, None) => return Err("has no b".to_owned()),
            _ => {}
        }
        self.timing.check("timing")?;
        check_cores("server_cores", self.server_cores)?;
        if [self.must, self.aim, self.most].into_iter().flatten().any(|value| !value.is_finite()) {
            return Err("must, aim and most are numbers".to_owned());
        }
        let is_range = |most| self.must.is_some_and(|must| must < most);
        let higher = self.combine().better(self.better()) == Better::Higher;
        if self.most.is_some_and(|most| !is_range(most) || !higher) {
            return Err("most needs a lower must, and a value of which more is better".to_owned());
        }
        self.check_side("a", &self.a)?;
        self.b.as_ref().map_or(Ok(()), |b| self.check_side("b", b))?;
        let of_both = |side| self.load_on(side).is_some_and(|load| load.times_lower_peak.is_some());
        let both_serve =
            self.a.server.is_some() && self.b.as_ref().is_some_and(|b| b.server.is_some());
        if [Some(&self.a), self.b.as_ref()].into_iter().flatten().any(of_both) && !both_serve {
            return Err("times_lower_peak needs an a and a b that are servers".to_owned());
        }
        Ok(())
    }

    fn check_side(&self, name: &str, side: &SideSpec) -> Result<(), String> {
        match (&side.server, &side.program, self.load_on(side)) {
            (Some(_), None, None) => Err(format!("{name} is a server and has no load")),
            (Some(_), None, Some(load)) => load.check().map_err(|what| format!("{name}: {what}")),
            (None, Some(_), _) => Ok(()),
            (None, None, Some(load)) if side.memcached && load.url == "tcp" => {
                load.check().map_err(|what| format!("{name}: {what}"))
            }
            _ => Err(format!("{name} is either a server or a program")),
        }
    }
}

impl Load {
    fn check(&self) -> Result<(), String> {
        if !["udp", "tcp", "shm"].contains(&self.url.as_str()) {
            return Err(format!("url is \"udp\", \"tcp\" or \"shm\", not {:?}", self.url));
        }
        let rates = [self.rate, self.times_peak, self.times_lower_peak];
        if rates.into_iter().flatten().count() > 1 {
            return Err("rate, times_peak and times_lower_peak exclude each other".to_owned());
        }
        let given = rates.into_iter().chain([self.timeout_s]);
        if given.flatten().any(|value| !(value > 0.0 && value.is_finite())) {
            return Err(
                "rate, times_peak, times_lower_peak and timeout_s must be above 0".to_owned()
            );
        }
        if self.batch.is_some() && (rates.into_iter().flatten().count() == 0 || self.class != "T2")
        {
            return Err("batch needs rate, times_peak or times_lower_peak, and class T2".to_owned());
        }
        check_cores("cores", self.cores)?;
        if self.shares_core && self.cores.is_some_and(|cores| cores > 1) {
            return Err("a client that shares its core has one".to_owned());
        }
        self.class().ok_or_else(|| format!("there is no client of class {:?}", self.class))?;
        self.workload.parse::<Work>().map_err(|error| error.to_string())?;
        self.framing().map(drop)
    }

    /// The kind of client.
    pub(super) fn class(&self) -> Option<Class> {
        <Class as clap::ValueEnum>::from_str(&self.class, true).ok()
    }

    /// Framing on TCP, if it is given.
    pub(super) fn framing(&self) -> Result<Option<Framing>, String> {
        let parsed = self.framing.as_ref().map(|text| text.parse::<Framing>());
        parsed.transpose().map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        schema = 1
        [defaults]
        pairs = 9
        [[row]]
        name = "health"
        what = "the baseline alone"
        must = 280e3
        load = { class = "T0", workload = "echo:64", window = 64 }
        a = { server = "echo" }
        [[row]]
        name = "echo-1"
        what = "echo"
        metric = "p50_ns"
        must = 0.95
        needs = ["health"]
        timing = { pairs = 7 }
        load = { class = "T0", workload = "echo:64", window = 1, rate = 20.0 }
        a = { server = "serval serve --json x.toml", label = "Serval" }
        b = { program = "bare", figure = "ns_per_call", on = "anywhere" }
        [[row]]
        name = "echo-28"
        what = "echo"
        needs = ["echo-1"]
        load = { class = "T0", workload = "echo:64", window = 1 }
        a = { server = "a" }
        b = { server = "b", load = { class = "T0", url = "tcp", workload = "echo:9", window = 2 } }
    "#;

    #[test]
    fn a_suite_is_read() {
        let suite = Suite::parse(GOOD).unwrap();
        let [health, one, many] = suite.rows.as_slice() else { panic!("three rows") };
        assert_eq!((health.combine(), health.better()), (Combine::Alone, Better::Higher));
        assert_eq!((one.combine(), one.better()), (Combine::Ratio, Better::Lower));
        assert_eq!(one.claim().better, Better::Higher, "a ratio improves upwards");
        let timing = one.timing.or(suite.defaults);
        assert_eq!((timing.pairs, timing.duration_s), (Some(7), None));
        let b = many.b.as_ref().unwrap();
        assert_eq!(many.load_on(b).unwrap().url, "tcp");
        assert_eq!(many.load_on(&many.a).unwrap().url, "udp");
        assert_eq!(one.b.as_ref().unwrap().on, On::Anywhere);
        Suite::parse(&GOOD.replace("server = \"b\", load", "memcached = true, load")).unwrap();
        let udp = "b = { memcached = true }";
        let udp = Suite::parse(&GOOD.replace("b = { server = \"b\", load = { class = \"T0\", url = \"tcp\", workload = \"echo:9\", window = 2 } }", udp));
        assert!(udp.unwrap_err().contains("either"), "memcached has no UDP port");
    }

    /// The suites of this repository, and the configurations they name.
    #[test]
    fn the_suites_of_this_repository_are_sound() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        Suite::load(&root.join("benches/gpu.toml")).unwrap();
        let suites = ["benches/speed.toml", "benches/functions.toml", "benches/tenants.toml"]
            .map(|suite| Suite::load(&root.join(suite)).unwrap());
        for row in suites.iter().flat_map(|suite| &suite.rows) {
            for side in std::iter::once(&row.a).chain(&row.b) {
                let command = side.server.iter().chain(&side.program).next().unwrap();
                let mut words = command.split(' ');
                let is_config =
                    |word: &&str| word.starts_with("benches/") && word.ends_with(".toml");
                if let Some(path) = words.find(is_config) {
                    let overrides = server::config::Overrides::default();
                    server::config::Config::load(&root.join(path), &overrides)
                        .unwrap_or_else(|error| panic!("{}: {}", row.name, error.render(false)));
                }
            }
        }
    }

    #[test]
    fn needs_come_with_the_rows_that_are_named() {
        let suite = Suite::parse(GOOD).unwrap();
        let names = |wanted: &[&str]| {
            let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
            let rows = suite.select(&wanted).unwrap();
            rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&[]), "health echo-1 echo-28");
        assert_eq!(names(&["echo-28"]), "health echo-1 echo-28");
        assert_eq!(names(&["echo-1"]), "health echo-1");
        assert_eq!(names(&["echo*"]), "health echo-1 echo-28");
        let error = suite.select(&["echo-2".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("\"echo-2\"") && error.contains("echo-28"), "{error}");
    }

    #[test]
    fn mistakes_are_refused_with_what_is_wrong() {
        for (from, to, expected) in [
            ("schema = 1", "schema = 2", "schema 1"),
            ("pairs = 9", "pairs = 0", "pairs must be in"),
            ("pairs = 9", "pears = 9", "pears"),
            ("\"health\"", "\"Health\"", "lower-case"),
            ("\"echo-28\"", "\"echo-1\"", "two rows"),
            ("needs = [\"health\"]", "needs = [\"echo-28\"]", "above it"),
            ("\"p50_ns\"", "\"ratte\"", "better"),
            ("rate = 20.0", "rate = -1.0", "above 0"),
            ("rate = 20.0", "rate = 1.0, times_peak = 2.0", "exclude"),
            ("rate = 20.0", "rate = 20.0, batch = 64", "class T2"),
            ("rate = 20.0", "rate = 1.0, times_lower_peak = 2.0", "exclude"),
            ("window = 64 }", "window = 64, times_lower_peak = 0.7 }", "needs an a and a b"),
            ("url = \"tcp\"", "url = \"http\"", "\"shm\""),
            ("a = { server = \"a\" }", "a = { label = \"a\" }", "either"),
            ("server = \"b\", load", "load", "either"),
            ("program = \"bare\"", "program = \"bare\", server = \"x\"", "either"),
            ("b = { program", "combine = \"alone\"\nb = { program", "alone"),
            ("must = 280e3", "combine = \"difference\"", "has no b"),
            ("must = 280e3", "must = nan", "numbers"),
            ("window = 64 }", "window = 64, speed = 9 }", "speed"),
            ("window = 64 }", "window = 64, framing = \"round\" }", "round"),
            ("\"T0\"", "\"T9\"", "T9"),
            ("\"echo:64\"", "\"juggling\"", "not a workload"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let error = Suite::parse(&GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(expected), "{to}: {error}");
        }
        let without_load =
            GOOD.replace("load = { class = \"T0\", workload = \"echo:64\", window = 64 }", "");
        assert!(Suite::parse(&without_load).unwrap_err().contains("no load"));
    }
}
