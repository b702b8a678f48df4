//! `serval bench URL`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value as Json, json};
use wire::framing::Framing;

use super::{Failure, bytes, cancel_on_signal};
use crate::screen::{Screen, Table, Tone};
use bench::client::workload::{Custom, Expect, KeySpace};
use bench::compare::machine::Machine;
use bench::plot::{self, Chart, Line};
use bench::units::{per_second, span};
use bench::{self, BenchError, Bottleneck, Class, Mode, Plan, Report, Target, Void, Work};

pub(super) const HELP: &str = "\
Sends requests to a server, checks every reply, and shows the rate and the latency.

Closed loop (--window): a fixed number of requests is in flight, and each reply is followed by the
next request. One in flight shows the shortest latency, many show the highest rate. Open loop
(--rate): requests arrive at random times (a Poisson process), independent of the server, like those
of many clients. Their latency counts from the arrival, so that a stall is visible in all requests
that it delayed.

There are three classes of clients; compare only results of the same class.
  T0  ordinary kernel sockets, one for every request in flight on UDP. Each request takes about 3 us
      of the client's core, so that one client reaches at most about 300 k/s.
  T2  batches of datagrams through few sockets (GSO, GRO): for servers that are faster than that.
      Replies are matched by a number in the payload; those of lenet and faces have none, so the
      service must keep the order of each flow (dispatch = \"flow-hash\").
  T3  a shm:// port: no network at all.

Numbers that cannot be trusted are marked, with the reason: wrong or repeated replies, a server
that stopped answering, a client that shared its core, a rate that could not be sent, or numbers
that contradict Little's law (requests in flight = rate x mean latency). Then the exit code is 1.
--stolen-max accepts a busier machine; wrong or repeated replies are never accepted.

--payload or --payload-hex sends your own message, to measure your own kernel. --expect gives the
correct replies: a file or --expect-hex (these bytes), echo (the payload itself), any (every reply;
they are counted, not compared), any:BYTES (every reply of this length).

memcached is measured with its text protocol over TCP or, as memcached-udp, in UDP frames. The
values are stored first: 10,000 keys, or fewer for long values, under serval:..., and for
faces-database the pictures under the keys of a faces service, face: and 24 hex digits. With --keys
the most popular of that many are stored (--store says how many); nothing is kept for a key, since
its value is derived from it. Existing
values of these keys are overwritten, so use a server without valuable data. A get without a value
is a correct answer and lowers the hit ratio.

Examples:
  serval bench udp://127.0.0.1:9000                        echo of 64 bytes, 1 to 256 in flight
  serval bench tcp://127.0.0.1:9000 --workload lenet       digits, answers compared
  serval bench tcp://127.0.0.1:11211 --workload memcached:100:95   gets and sets, values compared
  serval bench memcached --keys 32M --zipf 0.9 --store 2M          popular keys
  serval bench udp://127.0.0.1:9000 --payload question.bin --expect answer.bin
  serval bench tcp://127.0.0.1:9000 --payload-hex 0102 --expect any --framing length:u32
  serval bench udp://127.0.0.1:9000 --rate 50k,100k,200k --plot load.svg
  serval bench udp://127.0.0.1:9000 --class T2 --window 1024 --core 1
  serval bench udp://127.0.0.1:9000 --metrics http://127.0.0.1:9464/metrics
  serval bench udp://127.0.0.1:9000 --server-pid $(pidof serval)";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The server: udp://HOST:PORT, tcp://HOST:PORT, shm:///PATH, or memcached for tcp://127.0.0.1:11211
    #[arg(value_name = "URL", value_parser = target)]
    target: Target,

    /// Requests in flight, one run for each number
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = count, conflicts_with = "rate", default_value = "1,4,16,64,256")]
    window: Vec<f64>,

    /// Requests per second that arrive at random times, one run for each rate: 50k, 1.5M
    #[arg(long, value_name = "RATE,...", value_delimiter = ',', value_parser = count)]
    rate: Vec<f64>,

    /// With --rate and class T2: requests that arrive at the same time. The times of these batches are random
    #[arg(long, value_name = "N", requires = "rate", default_value_t = 1)]
    batch: usize,

    /// The workload: echo:BYTES, sockperf:BYTES, scale:NUMBERS, lenet, lenet-numbered, faces, faces-known (without
    /// unknown labels), memcached:BYTES:GETS (values of BYTES bytes, GETS gets per 100 requests, default 90), memcached-udp:BYTES:GETS (the
    /// same in UDP frames), faces-database (the requests of a faces service to its memcached), secure-multiply (examples/10_secure_multiply
    /// with the key of measurements), coap or coap-forged (a server behind coap-auth that answers "done") [default: echo:64;
    /// memcached:16:90 for TCP port 11211]
    #[arg(long, value_name = "WORKLOAD")]
    workload: Option<Work>,

    /// memcached: different keys, such as 32M [default: 10000, or fewer for long values]
    #[arg(long, value_name = "N", value_parser = keys)]
    keys: Option<u64>,

    /// memcached: the popularity of keys decreases with this exponent (Zipf), from 0 to 5 [default: 0, all are equally popular]
    #[arg(long, value_name = "EXPONENT", requires = "keys", value_parser = exponent)]
    zipf: Option<u32>,

    /// memcached: store the N most popular keys before the load, such as 2M [default: 10000, or fewer for long values]
    #[arg(long, value_name = "N", requires = "keys", value_parser = keys)]
    store: Option<u64>,

    /// Send the contents of this file as every request
    #[arg(long, value_name = "FILE", group = "own", conflicts_with = "workload")]
    payload: Option<PathBuf>,

    /// Send these bytes as every request: 0a1b
    #[arg(long, value_name = "HEX", group = "own", conflicts_with = "workload", value_parser = hex)]
    payload_hex: Option<Hex>,

    /// The correct replies to the payload: FILE (its contents), echo, any or any:BYTES [default: any]
    #[arg(long, value_name = "FILE|echo|any", requires = "own")]
    expect: Option<String>,

    /// The correct reply to the payload
    #[arg(long, value_name = "HEX", requires = "own", conflicts_with = "expect", value_parser = hex)]
    expect_hex: Option<Hex>,

    /// The kind of client [default: T0; T3 for shm://]
    #[arg(long, value_enum, ignore_case = true)]
    class: Option<Class>,

    /// TCP: how requests are delimited, as in the service's configuration [default: depends on the workload:
    /// length:u16 for echo, sockperf, or fixed:N]
    #[arg(long, value_name = "FRAMING")]
    framing: Option<Framing>,

    /// Connections (TCP) or sockets (UDP) that share the requests in flight [default: 4; UDP of class
    /// T0: one for each request]
    #[arg(long, value_name = "N")]
    connections: Option<usize>,

    /// Warm-up at the start of each run, not measured
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = time)]
    warmup: Duration,

    /// Measured time of each run
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time)]
    duration: Duration,

    /// A request without a reply for this long is lost [default: 1s; 100ms with --rate over UDP]
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,

    /// Run the client on this core; with several, one client on each, which share --window or --rate
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    core: Vec<usize>,

    /// The server's process, for its CPU time
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,

    /// The server's metrics, for the time that its workers were busy
    #[arg(long, value_name = "URL")]
    metrics: Option<String>,

    /// Accept a run even if other processes used up to this percentage of the client's core
    #[arg(long, value_name = "PERCENT", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=100))]
    stolen_max: u8,

    /// Save a chart (SVG): latency over rate, or for a single run the latency distribution
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Bytes in hexadecimal digits.
#[derive(Clone, Debug)]
pub(super) struct Hex(pub(super) Vec<u8>);

pub(super) fn hex(text: &str) -> Result<Hex, String> {
    bytes::from_hex(text).map(Hex)
}

/// `echo`, `any`, `any:BYTES`, or a file.
fn expected(text: &str) -> Result<Expect, String> {
    match (text, text.strip_prefix("any:")) {
        ("echo", _) => Ok(Expect::Echo),
        ("any", _) => Ok(Expect::Any(None)),
        (_, Some(count)) => match count.parse() {
            Ok(count) if count <= bench::MESSAGE_BYTES_MAX => Ok(Expect::Any(Some(count))),
            _ => Err(format!("`any:{count}` is not a length: write any:BYTES, such as any:44")),
        },
        _ => Ok(Expect::Bytes(bytes::from_file(Path::new(text))?)),
    }
}

/// `50`, `50k`, `1.5M`.
pub(super) fn count(text: &str) -> Result<f64, String> {
    let (number, factor) = match text.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1e3),
        None => text.strip_suffix('M').map_or((text, 1.0), |number| (number, 1e6)),
    };
    let parsed = number.parse::<f64>().ok().map(|number| number * factor);
    let sound = parsed.filter(|n| n.is_finite() && *n >= 1.0);
    sound.ok_or_else(|| "must be a number from 1, such as 64, 50k or 1.5M".to_owned())
}

/// The usual port of memcached, and its URL on this machine.
const MEMCACHED_PORT: u16 = 11211;
const MEMCACHED: &str = "tcp://127.0.0.1:11211";

/// `0, 1, 2`.
pub(super) fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// `2s`, `500ms`, `2`.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let parsed = number.parse::<f64>().ok().map(|number| number * unit);
    let sound = parsed.filter(|seconds| (0.0..=86_400.0).contains(seconds));
    let seconds = sound.ok_or_else(|| "must be a time, such as 2s or 500ms".to_owned())?;
    Ok(Duration::from_secs_f64(seconds))
}

/// A number of keys: 32M.
fn keys(text: &str) -> Result<u64, String> {
    let count = if text == "0" { 0.0 } else { count(text)? };
    match count.fract() == 0.0 && count <= KeySpace::KEYS_MAX as f64 {
        true => Ok(count as u64),
        false => Err(format!("must be a whole number up to {}", KeySpace::KEYS_MAX)),
    }
}

/// An exponent of Zipf's distribution, in thousandths.
fn exponent(text: &str) -> Result<u32, String> {
    let max = f64::from(KeySpace::EXPONENT_MAX) / 1e3;
    let sound = text.parse::<f64>().ok().filter(|exponent| (0.0..=max).contains(exponent));
    let exponent = sound.ok_or_else(|| format!("must be a number from 0 to {max}, such as 0.9"))?;
    Ok((exponent * 1e3).round() as u32)
}

/// A server, or `memcached` for one on its usual port of this machine.
fn target(text: &str) -> Result<Target, String> {
    let url = if text == "memcached" { MEMCACHED } else { text };
    url.parse::<Target>().map_err(|error| error.to_string())
}

impl Options {
    /// The workload without a message of the user.
    fn load(&self) -> Result<Work, String> {
        let is_memcached =
            matches!(self.target, Target::Tcp(address) if address.port() == MEMCACHED_PORT);
        let default = || match is_memcached {
            true => Work::Memcached { value_bytes: 16, gets_percent: 90, udp: false, keys: None },
            false => Work::Echo { bytes: 64 },
        };
        let space = self.keys.map(|keys| KeySpace {
            keys,
            exponent_thousandths: self.zipf.unwrap_or(0),
            stored: self.store,
        });
        match (self.workload.clone().unwrap_or_else(default), space) {
            (Work::Memcached { value_bytes, gets_percent, udp, .. }, keys) => {
                Ok(Work::Memcached { value_bytes, gets_percent, udp, keys })
            }
            (work, None) => Ok(work),
            (work, Some(_)) => Err(format!(
                "the workload `{work}` has no keys: give --workload memcached:BYTES:GETS or memcached-udp:BYTES:GETS"
            )),
        }
    }

    /// The workload, or the user's message.
    fn work(&self) -> Result<Work, String> {
        let payload = match (&self.payload, &self.payload_hex) {
            (Some(path), _) => bytes::from_file(path)?,
            (None, Some(hex)) => hex.0.clone(),
            (None, None) => return self.load(),
        };
        let expect = match (&self.expect, &self.expect_hex) {
            (_, Some(hex)) => Expect::Bytes(hex.0.clone()),
            (Some(text), None) => expected(text)?,
            (None, None) => Expect::Any(None),
        };
        Ok(Work::Custom(Arc::new(Custom { payload, expect })))
    }

    /// One plan for each run.
    fn plans(&self, cancel: &Arc<AtomicBool>) -> Result<Vec<Plan>, String> {
        let base = Plan {
            class: self.class,
            batch: self.batch,
            work: self.work()?,
            framing: self.framing,
            connections: self.connections,
            warmup: self.warmup,
            duration: self.duration,
            timeout: self.timeout,
            cores: self.core.clone(),
            server_pid: self.server_pid,
            metrics: self.metrics.clone(),
            stolen_max: f64::from(self.stolen_max) / 100.0,
            cancel: cancel.clone(),
            ..Plan::new(self.target.clone())
        };
        let modes: Vec<Mode> = if self.rate.is_empty() {
            self.window.iter().map(|window| Mode::Closed { window: *window as usize }).collect()
        } else {
            self.rate.iter().map(|rate| Mode::Open { rate: *rate }).collect()
        };
        Ok(modes.into_iter().map(|mode| Plan { mode, ..base.clone() }).collect())
    }
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let cancel = Arc::new(AtomicBool::new(false));
    let plans = options.plans(&cancel).map_err(Failure::Usage)?;
    // Invalid combinations are reported before anything is measured.
    for plan in &plans {
        plan.check().map_err(|error| Failure::Usage(error.to_string()))?;
    }
    cancel_on_signal(cancel).map_err(Failure::run)?;
    if let Err(error) = sys::process::raise_descriptor_limit() {
        tracing::warn!(%error, "the limit of open descriptors could not be raised");
    }
    let bar = progress(screen, &plans);
    let mut reports: Vec<Report> = Vec::new();
    for (index, plan) in plans.iter().enumerate() {
        bar.set_message(asked(plan.mode));
        let watch = &mut |share: f64| bar.set_position(((index as f64 + share) * 100.0) as u64);
        let report = bench::run_watched(plan, watch).map_err(|error| match error {
            BenchError::Plan(error) => Failure::Usage(error.to_string()),
            error => Failure::run(error),
        })?;
        let stop = matches!(report.void(), Some(Void::Interrupted | Void::NotPinned { .. }));
        reports.push(report);
        if stop {
            break;
        }
    }
    bar.finish_and_clear();
    let saved = match &options.plot {
        Some(path) if reports.iter().any(Report::has_numbers) => {
            let failed = |error| format!("cannot save the plot {}: {error}", path.display());
            plot::save(&chart(&plans[0], &reports), path)
                .map_err(|error| Failure::Run(failed(error)))?;
            Some(path)
        }
        _ => None,
    };
    screen.show(|| text(screen, &plans[0], &reports, saved), || as_json(&plans[0], &reports));
    match reports.iter().filter_map(|report| Some((report, report.void()?))).next() {
        None => Ok(()),
        Some((report, void)) => Err(Failure::Unproven(format!(
            "the run with {} is not trusted: {}",
            asked(report.mode),
            reason(void)
        ))),
    }
}

/// A reason, and the option that accepts it.
fn reason(void: &Void) -> String {
    match void.accepted_by() {
        None => void.to_string(),
        Some(option) => format!("{void}; pass {option} to accept this"),
    }
}

fn progress(screen: &Screen, plans: &[Plan]) -> ProgressBar {
    let target =
        if screen.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(100 * plans.len() as u64), target);
    let style = ProgressStyle::with_template("  {msg:<34} [{bar:30}] {percent} %");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar
}

fn asked(mode: Mode) -> String {
    match mode {
        Mode::Closed { window } => format!("{window} in flight"),
        Mode::Open { rate } => format!("{} arriving", per_second(rate)),
    }
}

fn text(screen: &Screen, plan: &Plan, reports: &[Report], saved: Option<&PathBuf>) -> String {
    let closed = plan.window().is_some();
    let mut table = Table::new(&[
        if closed { ">in flight" } else { ">arriving" },
        ">rate",
        ">p50",
        ">p99",
        ">p99.9",
        ">max",
        ">lost",
        ">client ns",
        ">server ns",
        "",
    ]);
    for report in reports {
        table.toned(row(report));
    }
    let at = match plan.cores.as_slice() {
        [] => String::new(),
        [core] => format!(", client on core {core}"),
        cores => format!(", a client on each of the cores {}", list(cores)),
    };
    let title = format!("{} at {}, client class {}{at}", plan.work, plan.target, plan.class());
    let mut text = format!("{}\n\n{}\n", screen.paint(Tone::Bold, &title), table.render(screen));
    text.push_str(
        "  ns: time for each reply that the client's loop was at work, and that the server",
    );
    text.push_str(match (plan.server_pid, &plan.metrics) {
        (_, Some(_)) => "'s workers were.\n",
        (Some(_), None) => "'s process\n  used (a server that polls uses all of its core).\n",
        (None, None) => " was\n  (which needs --metrics or --server-pid).\n",
    });
    if let Work::Custom(custom) = &plan.work
        && !custom.compares()
    {
        text.push_str("  Replies were counted, not compared (--expect says which are right).\n");
    }
    let ratios = reports.iter().filter_map(|report| report.hit_ratio);
    let ratios: Vec<String> = ratios.map(|ratio| format!("{:.2} %", 100.0 * ratio)).collect();
    if !ratios.is_empty() {
        text.push_str(&format!("  Gets that found their value: {}.\n", ratios.join(", ")));
    }
    if reports.iter().any(|r| r.is_trusted() && r.bottleneck() == Bottleneck::Client) {
        text.push_str(
            "  Where the client is the bottleneck the server may be faster than the rate says.\n",
        );
    }
    for report in reports.iter().filter(|report| !report.is_trusted()) {
        let reasons: Vec<_> = report.reasons.iter().map(reason).collect();
        let told =
            format!("  NOT TRUSTED, {}: {}.\n", asked(report.mode), reasons.join("; also: "));
        text.push_str(&screen.paint(Tone::Red, &told));
    }
    if let Some(path) = saved {
        text.push_str(&format!("\n  Plot: {}\n", path.display()));
    }
    text
}

fn row(report: &Report) -> Vec<(Tone, String)> {
    let asked = match report.mode {
        Mode::Closed { window } => window.to_string(),
        Mode::Open { rate } => per_second(rate),
    };
    let mut cells = vec![(Tone::Plain, asked)];
    if !report.has_numbers() {
        cells.extend((0..8).map(|_| (Tone::Dim, "-".to_owned())));
        cells.push((Tone::Red, UNTRUSTED.to_owned()));
        return cells;
    }
    let ns = |ns: u64| (Tone::Plain, span(ns as f64));
    let l = &report.latency;
    cells.push((Tone::Bold, per_second(report.rate)));
    cells.extend([ns(l.p50_ns), ns(l.p99_ns), ns(l.p999_ns), ns(l.max_ns)]);
    cells.push(match report.lost {
        0 => (Tone::Dim, "0".to_owned()),
        lost => (Tone::Yellow, lost_text(lost, report.sent)),
    });
    cells.push((Tone::Plain, format!("{:.0}", report.client_busy_ns_per_message)));
    let server = report.server_busy_ns_per_message().or(report.server_cpu_ns_per_message());
    cells.push((Tone::Plain, server.map_or("-".to_owned(), |ns| format!("{ns:.0}"))));
    cells.push(match report.bottleneck() {
        _ if !report.is_trusted() => (Tone::Red, UNTRUSTED.to_owned()),
        Bottleneck::Client => (Tone::Yellow, "the client is the bottleneck".to_owned()),
        Bottleneck::Elsewhere => (Tone::Plain, String::new()),
    });
    cells
}

/// Marks a run whose numbers cannot be trusted.
const UNTRUSTED: &str = "NOT TRUSTED";

/// A share of the sent requests, or the number if the share would be displayed as zero.
fn lost_text(lost: u64, sent: u64) -> String {
    let share = format!("{:.2} %", 100.0 * lost as f64 / sent.max(1) as f64);
    if share == "0.00 %" { lost.to_string() } else { share }
}

fn as_json(plan: &Plan, reports: &[Report]) -> Json {
    json!({
        "version": env!("CARGO_PKG_VERSION"), "machine": Machine::here(),
        "warmup_s": plan.warmup.as_secs_f64(), "duration_s": plan.duration.as_secs_f64(),
        "timeout_s": plan.timeout().as_secs_f64(), "cores": plan.cores,
        "runs": reports.iter().map(Report::to_json).collect::<Vec<_>>(),
    })
}

/// Latency over rate, or for a single run the distribution of the latency.
fn chart(plan: &Plan, reports: &[Report]) -> Chart {
    let measured: Vec<&Report> = reports.iter().filter(|report| report.has_numbers()).collect();
    let us = |ns: u64| (ns as f64 / 1e3).max(1e-3);
    let (x, lines) = match measured.as_slice() {
        [one] => {
            let line = Line { name: asked(one.mode), points: one.distribution_us.clone() };
            (plot::shares(), vec![line])
        }
        _ => {
            let line = |name: &str, of: fn(&Report) -> u64| Line {
                name: name.to_owned(),
                points: measured.iter().map(|r| (r.rate, us(of(r)))).collect(),
            };
            let lines = vec![
                line("p50", |r| r.latency.p50_ns),
                line("p99", |r| r.latency.p99_ns),
                line("p99.9", |r| r.latency.p999_ns),
            ];
            (plot::rates(), lines)
        }
    };
    let mode = if plan.window().is_some() { "closed loop" } else { "open loop (Poisson)" };
    let points = measured.iter().map(|r| asked(r.mode)).collect::<Vec<_>>().join(", ");
    // The remedy is printed where the command runs.
    let short = |void: &Void| void.to_string().split(": ").next().map(str::to_owned);
    let untrusted = |r: &&&Report| Some(format!("{}: {}", asked(r.mode), short(r.void()?)?));
    let untrusted: Vec<_> = measured.iter().filter_map(|r| untrusted(&r)).collect();
    let checked = match &plan.work {
        Work::Custom(custom) if !custom.compares() => "Replies were counted, not compared.",
        _ => "Every reply was checked.",
    };
    Chart {
        title: format!("{} over {}", plan.work, plan.target),
        caption: format!(
            "Client class {}, {mode}, {} s each: {points}. {checked}",
            plan.class(),
            plan.duration.as_secs_f64()
        ),
        warning: (!untrusted.is_empty()).then(|| format!("NOT TRUSTED, {}", untrusted.join("; "))),
        x,
        y: plot::latencies(),
        lines,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_never_shown_as_zero() {
        assert_eq!(lost_text(1, 1_000_000), "1");
        assert_eq!(lost_text(49, 1_000_000), "49");
        assert_eq!(lost_text(51, 1_000_000), "0.01 %");
        assert_eq!(lost_text(5, 10), "50.00 %");
    }

    #[test]
    fn counts_and_times_have_units() {
        assert_eq!(count("64"), Ok(64.0));
        assert_eq!(count("50k"), Ok(50_000.0));
        assert_eq!(count("1.5M"), Ok(1_500_000.0));
        for text in ["", "k", "0", "-3", "inf", "nan", "5g"] {
            assert!(count(text).is_err(), "{text}");
        }
        assert_eq!((keys("32M"), keys("0"), keys("5")), (Ok(32_000_000), Ok(0), Ok(5)));
        assert!(keys("1.5").is_err() && keys("1000M").is_err() && keys("x").is_err());
        assert_eq!((exponent("0.9"), exponent("0"), exponent("5")), (Ok(900), Ok(0), Ok(5000)));
        assert!(exponent("-0.1").is_err() && exponent("5.1").is_err() && exponent("nan").is_err());
        assert_eq!(target("memcached").unwrap().to_string(), MEMCACHED);
        assert!(target("redis").is_err());
        assert_eq!(time("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("0.25"), Ok(Duration::from_millis(250)));
        for text in ["", "s", "-1s", "2h", "inf", "1e9"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
