//! Compares two servers side by side: the ratio of a figure, and its confidence interval.
//!
//! Absolute figures of a shared machine vary by a fifth and more with its load; ratios that are measured side by side
//! do not. So a *row* measures its two sides in interleaved pairs ([`pairs`]), on the same cores with the same
//! client, with the machine's own speed measured before and after each ([`calibration`]). The value of a row is the
//! median of the pairs' ratios, with its exact confidence interval ([`statistics`]); a claim holds if it holds for
//! the whole interval ([`verdict`]). A ratio above 1 means that A, the candidate, is better, for rates and for
//! latencies.
//!
//! A side is a process: a server under measurement ([`server`]) or a program that prints its figures. The rows of the
//! published table are a [`suite`]; a [`record`] is the stored result of one.

pub mod calibration;
pub mod machine;
pub mod pairs;
pub mod record;
pub mod server;
pub mod show;
pub mod statistics;
pub mod suite;
pub mod verdict;

mod load;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use serde::Serialize;

use crate::client::workload::Pictures;
use crate::memcached::{Memcached, MemcachedError};
use crate::{BenchError, PlanError};
use calibration::Calibration;
use pairs::{Bench, Pairs, PairsError, Plan, Run, Side};
use record::Record;
use server::ServerError;
use statistics::Summary;
use suite::{Load, Row, SideSpec, Timing};
use verdict::{PAIRS_MIN, Verdict};

/// Minimum duration of a valid load.
const DURATION_MIN_S: f64 = 2.0;
/// Minimum warm-up: shorter ones leave cold caches and first turns in the measurement.
const WARMUP_MIN_S: f64 = 0.5;
/// Longest time of a program.
const PROGRAM_MAX: Duration = Duration::from_secs(120);

/// The cores of a comparison: at least one for each side of the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cores {
    /// Cores of both sides' servers, in turn, and of programs.
    pub server: Vec<usize>,
    /// The client, which is this process.
    pub client: Vec<usize>,
    /// The server's cores that a row leaves to databases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other: Vec<usize>,
}

impl Cores {
    /// The first of these cores, as many as a row uses; the error names what is missing.
    fn for_row(&self, row: &Row) -> Result<Self, String> {
        let sides = || std::iter::once(&row.a).chain(&row.b);
        let loads = sides().filter_map(|side| row.load_on(side));
        let clients = loads.filter_map(|load| load.cores).max().unwrap_or(1);
        let servers = row.server_cores.unwrap_or(1);
        let is_apart = |side: &SideSpec| {
            let shares = row.load_on(side).is_some_and(|load| load.shares_core);
            side.memcached && !shares
        };
        let apart = sides().any(is_apart);
        for (whose, wanted, there) in [
            ("server", servers + usize::from(apart), self.server.len()),
            ("client", clients, self.client.len()),
        ] {
            if wanted > there {
                return Err(format!(
                    "it needs {wanted} {whose} cores: give --{whose}-core that many"
                ));
            }
        }
        let (server, other) = self.server.split_at(servers);
        let other = if apart { other.to_vec() } else { Vec::new() };
        Ok(Self { server: server.to_vec(), client: self.client[..clients].to_vec(), other })
    }

    /// The cores of a side's process; empty: any.
    fn of(&self, side: &SideSpec) -> &[usize] {
        if side.on == suite::On::ServerCore { &self.server } else { &[] }
    }
}

/// As in `0,1,2`.
fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Number of pairs and durations, with all defaults applied.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Schedule {
    /// Pairs that count.
    pub pairs: usize,
    /// Seconds of load before each measurement.
    pub warmup_s: f64,
    /// Seconds of each measurement.
    pub duration_s: f64,
    /// Whether pairs that the machine disturbed are discarded; otherwise there is no verdict.
    pub guard: bool,
}

impl Schedule {
    /// For a quick run without verdicts: one pair of short measurements.
    pub const QUICK: Self = Self { pairs: 1, warmup_s: 0.1, duration_s: 0.3, guard: false };
}

impl From<Timing> for Schedule {
    fn from(timing: Timing) -> Self {
        Self {
            pairs: timing.pairs.unwrap_or(9),
            warmup_s: timing.warmup_s.unwrap_or(0.5),
            duration_s: timing.duration_s.unwrap_or(2.0),
            guard: true,
        }
    }
}

/// Why a side cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum SideError {
    /// An error of its process.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// An error of the client.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The load is invalid.
    #[error("{0}")]
    Load(String),
    /// An error of its database.
    #[error(transparent)]
    Database(#[from] MemcachedError),
    /// The client's core.
    #[error("the client cannot run on core {0}: {1}")]
    Pin(usize, std::io::Error),
    /// A folder for sockets and other files.
    #[error("cannot make the folder {0}: {1}")]
    Scratch(PathBuf, std::io::Error),
    /// The calibration failed.
    #[error("cannot calibrate cores {0:?} and {1}: {2}")]
    Calibrate(Vec<usize>, usize, std::io::Error),
    /// A signal was received.
    #[error("interrupted")]
    Interrupted,
}

impl From<PlanError> for SideError {
    fn from(error: PlanError) -> Self {
        BenchError::from(error).into()
    }
}

/// A memcached with the built-in pictures, on a core of its own or on one that the client shares with it.
struct Database(Memcached);

impl Database {
    fn start(core: usize) -> Result<Self, MemcachedError> {
        let start = || {
            // A process inherits the core of the thread that starts it; unpinned is slower, but not wrong.
            let _ = sys::affinity::pin_current_thread(core);
            Memcached::start()
        };
        let memcached = std::thread::scope(|scope| scope.spawn(start).join()).expect("no panic")?;
        let pictures = Pictures::built_in();
        let entry = |person: &crate::client::workload::Person<'static>| {
            (person.database_key(), person.stored)
        };
        memcached.store(pictures.people.iter().map(entry))?;
        Ok(Self(memcached))
    }

    /// CPU time so far, if the host provides it.
    fn cpu_ns(&self) -> Option<f64> {
        Some(1e9 * crate::cpu_seconds(self.0.id()).ok()?)
    }
}

/// Resources of a measurement besides its processes, which end with it.
struct Surroundings {
    database: Option<Database>,
    scratch: PathBuf,
}

impl Surroundings {
    fn new(side: &SideSpec, cores: &Cores) -> Result<Self, SideError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("serval-compare-{}-{number}", std::process::id());
        let scratch = std::env::temp_dir().join(name);
        std::fs::create_dir(&scratch)
            .map_err(|error| SideError::Scratch(scratch.clone(), error))?;
        let mut surroundings = Self { database: None, scratch };
        if side.memcached {
            surroundings.database =
                Some(Database::start(*cores.other.first().unwrap_or(&cores.client[0]))?);
        }
        Ok(surroundings)
    }

    /// Replaces the placeholders for cores, folder and database in a command line.
    fn fill_in(&self, command: &str, cores: &Cores) -> String {
        let database = self.database.as_ref().map(|database| database.0.address().to_string());
        command
            .replace("{server_core}", &cores.server[0].to_string())
            .replace("{server_cores}", &list(&cores.server))
            .replace("{client_core}", &cores.client[0].to_string())
            .replace("{client_cores}", &list(&cores.client))
            .replace("{scratch}", &self.scratch.display().to_string())
            .replace("{memcached}", &database.unwrap_or_default())
    }
}

impl Drop for Surroundings {
    fn drop(&mut self) {
        // Errors are ignored: the folder is for temporary files.
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

/// The equipment for a row: processes, a client, and the machine.
struct Rig<'r> {
    row: &'r Row,
    schedule: Schedule,
    cores: Cores,
    /// The lower of the peaks of both sides, once they have been measured.
    lower_peak: Option<f64>,
    /// Whether a measurement of the current pair was noisy.
    is_disturbed: bool,
    cancel: Arc<AtomicBool>,
    watch: &'r mut dyn FnMut(usize, usize),
}

impl Rig<'_> {
    /// The lower of the peaks of both sides under this load, or why there is none. Measured once, and again after a pair
    /// with noise.
    fn lower_peak(&mut self, load: &Load) -> Result<Result<f64, String>, SideError> {
        if let Some(peak) = self.lower_peak {
            return Ok(Ok(peak));
        }
        let mut lower = f64::INFINITY;
        for side in std::iter::once(&self.row.a).chain(&self.row.b) {
            let command = side.server.as_deref().expect("rows are checked when they are read");
            let (schedule, cores) = (&self.schedule, &self.cores);
            match load::peak_of(command, side, load, schedule, cores, &self.cancel)? {
                Ok(peak) => lower = lower.min(peak),
                Err(why) => return Ok(Err(format!("{}: {why}", side.label))),
            }
        }
        self.lower_peak = Some(lower);
        Ok(Ok(lower))
    }
}

impl Bench for Rig<'_> {
    type Error = SideError;

    fn calibrate(&mut self) -> Result<Calibration, SideError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(SideError::Interrupted);
        }
        let (server, client) = (&self.cores.server, self.cores.client[0]);
        Calibration::measure(server, client)
            .map_err(|error| SideError::Calibrate(server.clone(), client, error))
    }

    fn measure(&mut self, side: Side) -> Result<Run, SideError> {
        let row = self.row;
        let side = match side {
            Side::A => &row.a,
            Side::B => row.b.as_ref().expect("a row with a B"),
        };
        match (&side.server, &side.program, row.load_on(side)) {
            (command, None, Some(load)) => {
                let peak = load.times_lower_peak.map(|_| self.lower_peak(load)).transpose()?;
                let peak = match peak {
                    Some(Err(why)) => return Ok(Run::Void(format!("peak of {why}"))),
                    Some(Ok(peak)) => Some(peak),
                    None => None,
                };
                let figure = side.figure.as_ref().unwrap_or(&row.metric);
                let offer =
                    load::Offer { load, lower_peak: peak, is_latency: load::is_latency(figure) };
                let (schedule, cores) = (&self.schedule, &self.cores);
                let command = command.as_deref();
                let run =
                    load::measure_server(command, side, &offer, schedule, cores, &self.cancel)?;
                self.is_disturbed |= matches!(run, Run::Noisy(..));
                Ok(run)
            }
            (None, Some(command), _) => {
                let surroundings = Surroundings::new(side, &self.cores)?;
                let command = surroundings.fill_in(command, &self.cores);
                let figures = server::run_program(&command, self.cores.of(side), PROGRAM_MAX)?;
                Ok(Run::Figures(figures.into_iter().collect()))
            }
            _ => unreachable!("rows are checked when they are read"),
        }
    }

    fn progress(&mut self, kept: usize, discarded: usize) {
        if std::mem::take(&mut self.is_disturbed) {
            // The peaks may be those of another state of the machine. Both sides of a pair have the same load.
            self.lower_peak = None;
        }
        (self.watch)(kept, discarded);
    }
}

/// Measures one row. A failure of a side makes the row void and is reported in its record; only an interruption is
/// returned as an error.
///
/// `watch` is called with the numbers of pairs kept and discarded so far.
pub fn measure(
    row: &Row,
    schedule: Schedule,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
    watch: &mut dyn FnMut(usize, usize),
) -> Result<Record, SideError> {
    let cores = match cores.for_row(row) {
        Ok(cores) => cores,
        Err(reason) => return Ok(unmeasured(row, schedule, cores, reason)),
    };
    let figure = |side: Option<&SideSpec>| {
        side.and_then(|side| side.figure.clone()).unwrap_or_else(|| row.metric.clone())
    };
    let plan = Plan {
        pairs: schedule.pairs,
        // As many as are kept, and at least a few; a state of the machine may be temporary.
        discards_max: match row.state.is_some() || row.whole {
            true => 4 * schedule.pairs,
            false => schedule.pairs + 2,
        },
        guard: schedule.guard,
        state: row.state,
        whole: row.whole,
        metric: row.metric.clone(),
        combine: row.combine(),
        better: row.better(),
        figure: [figure(Some(&row.a)), figure(row.b.as_ref())],
    };
    let (rig_cores, cancel_rig) = (cores.clone(), cancel.clone());
    let mut rig = Rig {
        row,
        schedule,
        cores: rig_cores,
        lower_peak: None,
        is_disturbed: false,
        cancel: cancel_rig,
        watch,
    };
    let found = pairs::measure(&mut rig, &plan);
    if cancel.load(Ordering::Relaxed) {
        return Err(SideError::Interrupted);
    }
    let (pairs, trouble) = match found {
        Ok(pairs) => (pairs, None),
        Err(PairsError::Side(error)) => (Pairs::default(), Some(error.to_string())),
        Err(PairsError::Void { side, why }) => (Pairs::default(), Some(format!("{side:?}: {why}"))),
        Err(PairsError::NoFigure { side, figure, known }) => {
            let what = format!("{side:?} has no figure {figure:?}; it has {known}");
            (Pairs::default(), Some(what))
        }
    };
    let (verdict, reason) = judge(row, schedule, &pairs, trouble);
    Ok(Record::new(row, schedule, cores, pairs, verdict, reason))
}

/// The record of a row that could not be measured.
fn unmeasured(row: &Row, schedule: Schedule, cores: &Cores, reason: String) -> Record {
    Record::new(row, schedule, cores.clone(), Pairs::default(), Verdict::Void, Some(reason))
}

/// The verdict on a row's pairs, and the reason if there is none.
fn judge(
    row: &Row,
    schedule: Schedule,
    pairs: &Pairs,
    trouble: Option<String>,
) -> (Verdict, Option<String>) {
    if trouble.is_some() {
        return (Verdict::Void, trouble);
    }
    let (kept, discarded) = (pairs.kept.len(), pairs.discarded.len());
    if kept < schedule.pairs {
        let last = pairs.discarded.last().map(String::as_str).unwrap_or_default();
        let what =
            format!("{discarded} pairs were discarded and {kept} kept, the last since {last}");
        return (Verdict::Void, Some(what));
    }
    let Some(summary) = Summary::of(&pairs.values()) else {
        return (Verdict::Void, Some("nothing was measured".to_owned()));
    };
    if !schedule.guard {
        let what = "not guarded against noise: this proves nothing".to_owned();
        return (Verdict::NoVerdict, Some(what));
    }
    let loaded = std::iter::once(&row.a).chain(&row.b).any(|side| side.program.is_none());
    if loaded && (schedule.duration_s < DURATION_MIN_S || schedule.warmup_s < WARMUP_MIN_S) {
        let what = format!(
            "loads of less than {DURATION_MIN_S} s after {WARMUP_MIN_S} s of warm-up prove nothing"
        );
        return (Verdict::NoVerdict, Some(what));
    }
    let verdict = row.claim().judge(&summary);
    let reason = (verdict == Verdict::NoVerdict && kept < PAIRS_MIN)
        .then(|| format!("{kept} pairs prove nothing, {PAIRS_MIN} would"));
    (verdict, reason)
}

/// Whether a prerequisite of a row is met: its median is good enough. A state of the machine lasts for minutes, so
/// that the whole interval would rarely be.
fn is_met(record: &Record) -> bool {
    let Some(value) = &record.value else { return false };
    record.verdict.is_good()
        || record.must.is_some_and(|must| match record.better {
            verdict::Better::Higher => value.median >= must,
            verdict::Better::Lower => value.median <= must,
        })
}

/// Measures rows of a suite in order. A row whose prerequisites are not met is void and not measured.
///
/// `each` gets every record as it is made; `watch` gets a row's name and the numbers of pairs kept and discarded.
pub fn measure_suite(
    rows: &[&Row],
    schedule: impl Fn(&Row) -> Schedule,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
    watch: &mut dyn FnMut(&Row, usize, usize),
    each: &mut dyn FnMut(&Record) -> Result<(), SideError>,
) -> Result<Vec<Record>, SideError> {
    let mut met: HashMap<&str, bool> = HashMap::new();
    let mut records = Vec::new();
    for &row in rows {
        let schedule = schedule(row);
        let unmet = row.needs.iter().find(|need| !met.get(need.as_str()).is_some_and(|met| *met));
        let record = match unmet {
            Some(need) => {
                let reason = format!("it needs {need}, which did not pass");
                unmeasured(row, schedule, cores, reason)
            }
            None => measure(row, schedule, cores, cancel, &mut |kept, discarded| {
                watch(row, kept, discarded);
            })?,
        };
        met.insert(&row.name, is_met(&record));
        each(&record)?;
        records.push(record);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use suite::Suite;

    #[test]
    fn a_row_gets_the_first_cores_and_its_database_the_next_ones() {
        let cores = Cores { server: vec![4, 5, 6], client: vec![7, 8], other: Vec::new() };
        let row = |more: &str, load: &str, beside: &str| {
            let text = format!(
                "schema = 1\n[[row]]\nname = \"r\"\nwhat = \"w\"\n{more}\n\
                 load = {{ class = \"T0\", workload = \"echo:64\", window = 8{load} }}\n\
                 a = {{ server = \"x\"{beside} }}\nb = {{ server = \"y\" }}\n"
            );
            let path =
                std::env::temp_dir().join(format!("serval-rows-{}.toml", std::process::id()));
            std::fs::write(&path, text).unwrap();
            let row = Suite::load(&path).unwrap().rows.remove(0);
            std::fs::remove_file(&path).unwrap();
            row
        };
        let others = |row: Row| cores.for_row(&row).unwrap().other;
        assert_eq!(others(row("", "", ", memcached = true")), [5, 6]);
        assert!(others(row("", ", shares_core = true", ", memcached = true")).is_empty());
        let given = |more, load, beside| {
            let found = cores.for_row(&row(more, load, beside))?;
            Ok::<_, String>((found.server, found.client, found.other))
        };
        assert_eq!(given("", "", ""), Ok((vec![4], vec![7], vec![])));
        assert_eq!(
            given("server_cores = 2", ", cores = 2", ", memcached = true"),
            Ok((vec![4, 5], vec![7, 8], vec![6]))
        );
        let refused = |more, load, beside| given(more, load, beside).unwrap_err();
        assert!(refused("server_cores = 4", "", "").contains("needs 4 server cores"));
        assert!(refused("server_cores = 3", "", ", memcached = true").contains("4 server cores"));
        assert!(refused("", ", cores = 3", "").contains("3 client cores"));
    }
}
