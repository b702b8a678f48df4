//! `serval compare`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use super::bench::{count, list, time};
use super::{Failure, cancel_on_signal};
use crate::screen::{Screen, Table, Tone};
use bench::compare::machine::Machine;
use bench::compare::pairs::WHOLE_MIN;
use bench::compare::record::Record;
use bench::compare::suite::{Load, Row, SideSpec, Suite, Timing, better_of};
use bench::compare::verdict::{Better, Verdict};
use bench::compare::{Cores, Schedule, SideError, measure, measure_suite};

pub(super) const HELP: &str = "\
Measures two servers side by side, in interleaved pairs of alternating order. Each server is pinned
to the same core and restarted for every measurement, with the client on the other core. The result
is the median of the pairs' ratios and its confidence interval (95 % or more, exact). A ratio above
1 means that A is better, for rates and for latencies. Pairs during which the speed of the machine
or the distance of its cores changed are discarded and repeated.

A server prints a line that starts with `ready` and contains its URL, serves until SIGTERM, and ends
with a line of JSON (messages, busy_ns, cpu_ns), as `serval serve --json` does. A program
(--a-program) prints its figures as JSON in its last line. {server_core}, {server_cores},
{client_core} and {client_cores} in a command line are replaced.

Examples:
  serval compare --a 'serval serve --json echo.toml' --b 'target/baselines/echo' --window 64
  serval compare --a ... --b ... --metric p50_ns --window 1 --threshold 2.5
  serval compare --a-program './new --json' --b-program './old --json' --metric rate
  serval compare --suite benches/speed.toml                  every row of the table
  serval compare --suite benches/speed.toml 'udp-*' --quick  a quick run of some rows

Exit codes: 0 when every claim is proven (or none was made), 1 when one failed, is undecided or
void, 2 for an invalid command line or suite.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// Rows of the suite; NAME* for all that start with NAME [default: all]
    #[arg(value_name = "ROW", requires = "suite")]
    rows: Vec<String>,

    /// A file of rows, such as benches/speed.toml
    #[arg(long, value_name = "FILE", conflicts_with_all = ["a", "a_program", "b", "b_program"])]
    suite: Option<PathBuf>,

    /// Folder for a suite's results, one file per row, which keeps earlier results in its history
    /// (--quick writes none)
    #[arg(long, value_name = "FOLDER", default_value = "docs/benchmarks")]
    out: PathBuf,

    /// Run a suite's rows once each, briefly, regardless of the machine's state: proves nothing
    #[arg(long, requires = "suite")]
    quick: bool,

    /// The candidate: command line of a server
    #[arg(long, value_name = "COMMAND", conflicts_with = "a_program")]
    a: Option<String>,

    /// The candidate: command line of a program
    #[arg(long, value_name = "COMMAND")]
    a_program: Option<String>,

    /// The baseline: command line of a server
    #[arg(long, value_name = "COMMAND", conflicts_with = "b_program")]
    b: Option<String>,

    /// The baseline: command line of a program
    #[arg(long, value_name = "COMMAND")]
    b_program: Option<String>,

    /// The figure to compare: rate, p50_ns, p99_ns, slice_p99_ns (the median over slices of the run), mean_ns, busy_ns, server_cpu_ns, client_cpu_ns, or
    /// one that the programs print
    #[arg(long, value_name = "FIGURE", default_value = "rate")]
    metric: String,

    /// Whether higher or lower is better, if the figure's name does not imply it
    #[arg(long, value_name = "WAY")]
    better: Option<Better>,

    /// The ratio that must be exceeded
    #[arg(long, value_name = "RATIO")]
    threshold: Option<f64>,

    /// Pairs that count; a claim needs 7 [default: 9, or that of the suite]
    #[arg(long, value_name = "N")]
    pairs: Option<usize>,

    /// Load before each measurement, such as 0.5s [default: 0.5s, or that of the suite]
    #[arg(long, value_name = "TIME", value_parser = time)]
    warmup: Option<Duration>,

    /// Time of each measurement, such as 2s [default: 2s, or that of the suite]
    #[arg(long, value_name = "TIME", value_parser = time)]
    duration: Option<Duration>,

    /// Cores of the servers; by default rows use the first [default: the first usable core]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    server_core: Vec<usize>,

    /// Cores of the client; by default rows use the first [default: the last usable core]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    client_core: Vec<usize>,

    /// Scheme of the servers' URL to use: udp, tcp or shm
    #[arg(long, value_name = "SCHEME", default_value = "udp")]
    url: String,

    /// The workload: echo:BYTES, sockperf:BYTES, scale:NUMBERS, lenet or faces
    #[arg(long, value_name = "WORK", default_value = "echo:64")]
    workload: String,

    /// Kind of client: T0, T2 or T3
    #[arg(long, value_name = "CLASS", default_value = "T0")]
    class: String,

    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 64)]
    window: usize,

    /// Requests per second that arrive at random times, independent of the server: 50k, 1.5M
    #[arg(long, value_name = "RATE", value_parser = count)]
    rate: Option<f64>,

    /// Framing on TCP [default: depends on the workload]
    #[arg(long, value_name = "FRAMING")]
    framing: Option<String>,

    /// Connections or sockets that the requests in flight share
    #[arg(long, value_name = "N")]
    connections: Option<usize>,
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let cancel = Arc::new(AtomicBool::new(false));
    cancel_on_signal(cancel.clone()).map_err(Failure::run)?;
    if let Err(error) = sys::process::raise_descriptor_limit() {
        tracing::warn!(%error, "the limit of open descriptors could not be raised");
    }
    let cores = cores(options)?;
    options.timing().check("the command line").map_err(Failure::Usage)?;
    match &options.suite {
        Some(path) => {
            let suite = Suite::load(path).map_err(|error| Failure::Usage(error.to_string()))?;
            run_suite(screen, options, &suite, &cores, &cancel)
        }
        None => run_once(screen, options, &cores, &cancel),
    }
}

fn cores(options: &Options) -> Result<Cores, Failure> {
    let allowed = sys::affinity::allowed_cores().map_err(Failure::run)?;
    let usable = |asked: &[usize], default: Option<&usize>| {
        let cores =
            if asked.is_empty() { vec![default.copied().unwrap_or(0)] } else { asked.to_vec() };
        match cores.iter().find(|core| !allowed.contains(core)) {
            None => Ok(cores),
            Some(core) => {
                let what = format!("core {core} is not usable here; usable cores: {allowed:?}");
                Err(Failure::Usage(what))
            }
        }
    };
    let cores = Cores {
        server: usable(&options.server_core, allowed.first())?,
        client: usable(&options.client_core, allowed.last())?,
        other: Vec::new(),
    };
    let mut all = [&cores.server[..], &cores.client].concat();
    all.sort_unstable();
    if all.windows(2).any(|pair| pair[0] == pair[1]) {
        let what =
            "server and client need a core each: give two with --server-core and --client-core";
        return Err(Failure::Usage(what.to_owned()));
    }
    Ok(cores)
}

impl Options {
    /// The time options of the command line.
    fn timing(&self) -> Timing {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Timing {
            pairs: self.pairs,
            warmup_s: seconds(self.warmup),
            duration_s: seconds(self.duration),
        }
    }

    /// The comparison of the command line as a row.
    fn row(&self) -> Result<Row, String> {
        let side = |server: &Option<String>, program: &Option<String>| {
            (server.is_some() || program.is_some()).then(|| SideSpec {
                server: server.clone(),
                program: program.clone(),
                ..SideSpec::default()
            })
        };
        let a = side(&self.a, &self.a_program);
        let a = a.ok_or("give --a (and --b) the command line of a server, or name a --suite")?;
        let better = self.better.or_else(|| better_of(&self.metric));
        let row = Row {
            name: "comparison".to_owned(),
            what: format!("{}, {} in flight", self.workload, self.window),
            class: self.class.clone(),
            metric: self.metric.clone(),
            better,
            combine: None,
            must: self.threshold,
            aim: None,
            most: None,
            needs: Vec::new(),
            state: None,
            whole: false,
            timing: self.timing(),
            server_cores: Some(self.server_core.len().max(1)),
            load: Some(Load {
                batch: None,
                url: self.url.clone(),
                class: self.class.clone(),
                workload: self.workload.clone(),
                window: self.window,
                rate: self.rate,
                times_peak: None,
                times_lower_peak: None,
                timeout_s: None,
                shares_core: false,
                framing: self.framing.clone(),
                connections: self.connections,
                cores: Some(self.client_core.len().max(1)),
            }),
            a,
            b: side(&self.b, &self.b_program),
            bound: String::new(),
            next: String::new(),
        };
        row.check()?;
        Ok(row)
    }
}

/// A progress bar on standard error; hidden if that is not a terminal, or with --json.
fn bar(screen: &Screen, pairs: usize) -> ProgressBar {
    let target =
        if screen.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(pairs as u64), target);
    let style = ProgressStyle::with_template("  {prefix:<24} [{bar:30}] {pos}/{len} pairs {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.tick();
    bar
}

fn show_progress(bar: &ProgressBar, kept: usize, discarded: usize) {
    bar.set_position(kept as u64);
    if discarded > 0 {
        bar.set_message(format!("({discarded} discarded)"));
    }
}

fn failure(error: SideError) -> Failure {
    Failure::Run(error.to_string())
}

fn run_once(
    screen: &Screen,
    options: &Options,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
) -> Result<(), Failure> {
    let row = options.row().map_err(Failure::Usage)?;
    let schedule = Schedule::from(options.timing());
    let bar = bar(screen, schedule.pairs);
    let record = measure(&row, schedule, cores, cancel, &mut |kept, discarded| {
        show_progress(&bar, kept, discarded);
    });
    bar.finish_and_clear();
    let record = record.map_err(failure)?;
    screen.show(|| details(screen, &record), || record.json());
    conclude(std::slice::from_ref(&record))
}

fn run_suite(
    screen: &Screen,
    options: &Options,
    suite: &Suite,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
) -> Result<(), Failure> {
    let rows = suite.select(&options.rows).map_err(|error| Failure::Usage(error.to_string()))?;
    let schedule = |row: &Row| match options.quick {
        true => Schedule { pairs: options.pairs.unwrap_or(1), ..Schedule::QUICK },
        false => Schedule::from(options.timing().or(row.timing).or(suite.defaults)),
    };
    let pairs = rows.iter().map(|row| schedule(row).pairs).sum();
    let bar = bar(screen, pairs);
    if let Some(why) = Machine::here().unknown_sources().filter(|_| !options.quick) {
        tracing::warn!("{why}; `cargo xtask benchmarks` refuses such records");
    }
    let mut before = 0;
    let mut now = 0;
    let mut current = String::new();
    let mut watch = |row: &Row, kept: usize, discarded: usize| {
        if current != row.name {
            before += now;
            current.clone_from(&row.name);
            bar.set_prefix(row.name.clone());
            bar.set_message("");
        }
        now = kept;
        show_progress(&bar, before + kept, discarded);
    };
    let mut each = |record: &Record| {
        if options.quick {
            return Ok(());
        }
        let written = record.write(&options.out);
        written.map(drop).map_err(|error| {
            SideError::Load(format!("cannot write {}: {error}", options.out.display()))
        })
    };
    let records = measure_suite(&rows, schedule, cores, cancel, &mut watch, &mut each);
    bar.finish_and_clear();
    let records = records.map_err(failure)?;
    screen.show(
        || table(screen, options, &records),
        || json!({ "rows": records.iter().map(Record::json).collect::<Vec<_>>() }),
    );
    conclude(&records)
}

/// Exit code 1 unless every claim is proven.
fn conclude(records: &[Record]) -> Result<(), Failure> {
    let bad: Vec<String> = records
        .iter()
        .filter(|record| !record.verdict.is_good())
        .map(|record| format!("{} {}", record.name, record.verdict))
        .collect();
    if bad.is_empty() {
        return Ok(());
    }
    Err(Failure::Unproven(format!("not proven: {}", bad.join(", "))))
}

fn tone(verdict: Verdict) -> Tone {
    match verdict {
        Verdict::Pass => Tone::Green,
        Verdict::Fail | Verdict::Void => Tone::Red,
        Verdict::Undecided => Tone::Yellow,
        Verdict::NoVerdict => Tone::Plain,
    }
}

/// One comparison, as text.
fn details(screen: &Screen, record: &Record) -> String {
    let mut table = Table::new(&["", ""]);
    let shown = &record.shown;
    let mut line = |name: &str, text: &str, tone: Tone| {
        if !text.is_empty() {
            table.toned([(Tone::Plain, name.to_owned()), (tone, text.to_owned())]);
        }
    };
    line("A", &shown.a, Tone::Plain);
    line("B", &shown.b, Tone::Plain);
    let named = format!("{} of {}", combined(record), record.metric);
    line(&named, &shown.value, Tone::Bold);
    line("all pairs", &shown.range, Tone::Plain);
    line("must be", &shown.must, Tone::Plain);
    let counted = format!("{} counted, {} discarded", record.pairs.len(), record.discarded.len());
    line("pairs", &counted, Tone::Plain);
    line("cores", &state(record), Tone::Plain);
    let verdict = match &record.reason {
        Some(reason) => format!("{}: {reason}", record.verdict),
        None => record.verdict.to_string(),
    };
    line("verdict", &verdict, tone(record.verdict));
    table.render(screen)
}

fn combined(record: &Record) -> &'static str {
    use bench::compare::verdict::Combine;
    match record.combine {
        Combine::Ratio => "ratio (A better above 1)",
        Combine::Difference => "difference (A - B)",
        Combine::Alone => "value",
    }
}

fn state(record: &Record) -> String {
    let (server, client) = (list(&record.cores.server), list(&record.cores.client));
    let way = record
        .ping_pong_ns
        .map_or_else(String::new, |ns| format!(", {} ({ns:.0} ns there and back)", record.state));
    let slowed = match record.slowed_pairs {
        0 => String::new(),
        pairs => format!(
            "; the server's did less than {:.0} % of their best around {pairs} pairs",
            100.0 * WHOLE_MIN
        ),
    };
    format!("server {server}, client {client}{way}{slowed}")
}

/// The rows of a suite, as text.
fn table(screen: &Screen, options: &Options, records: &[Record]) -> String {
    let mut table = Table::new(&["row", "class", "must", "aim", ">measured", ">pairs", "verdict"]);
    let mut notes = String::new();
    for record in records {
        let shown = &record.shown;
        let pairs = format!("{} (-{})", record.pairs.len(), record.discarded.len());
        let aim = match record.meets_aim {
            Some(true) => " (aim met)",
            _ => "",
        };
        let plain = [&record.name, &record.class, &shown.must, &shown.aim, &shown.value, &pairs];
        let cells = plain.map(|cell| (Tone::Plain, cell.clone())).into_iter();
        table.toned(cells.chain([(tone(record.verdict), format!("{}{aim}", record.verdict))]));
        if let Some(reason) = record.reason.as_ref().filter(|_| record.verdict == Verdict::Void) {
            notes.push_str(&format!("  {}: {reason}\n", record.name));
        }
    }
    let written = if options.quick {
        "  A quick run proves nothing and is not written to a file.\n".to_owned()
    } else {
        format!(
            "  Written to {}; `cargo xtask benchmarks` makes the table.\n",
            options.out.display()
        )
    };
    format!("{}\n{notes}{written}", table.render(screen))
}
