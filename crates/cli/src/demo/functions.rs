//! `serval demo functions`: functions on the path of messages, attached and replaced while clients are served.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine::topology::Service;
use onpath::Spec;
use serde_json::json;
use server::{Caller, FunctionError, Server};
use std::fmt::Write as _;
use wire::DropReason;
use wire::framing::Framing;

use super::{DemoError, Report, Stage, accounts};
use crate::screen::{Table, Tone};
use bench::client::{self, Echo, Load, Outcome, Stream, Workload};
use bench::plot::{self, Chart, Line};
use bench::units::per_second;

/// `functions/threshold.c`, compiled.
const MODULE: &[u8] = include_bytes!("../../functions/threshold.wasm");

const LEN_BYTES: usize = 64;
const WINDOW: usize = 64;
/// Numbers up to this one pass in the second part.
const HIGH: u64 = 999;
const NUMBERS: u64 = 2000;

/// Messages that come back unchanged, of which the first reply is spoiled if that is asked for.
struct Spoiled {
    echo: Echo,
    spoil: bool,
}

impl Workload for Spoiled {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.echo.request(index, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        if std::mem::take(&mut self.spoil) {
            let mut spoiled = reply.to_vec();
            spoiled.iter_mut().last().into_iter().for_each(|byte| *byte ^= 1);
            return self.echo.accepts(index, &spoiled);
        }
        self.echo.accepts(index, reply)
    }

    fn has_identity(&self) -> bool {
        self.echo.has_identity()
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        self.echo.identify(reply)
    }
}

/// What was checked, and what was wrong.
#[derive(Default)]
struct Checks {
    checked: u64,
    wrong: u64,
}

impl Checks {
    fn add(&mut self, outcome: &Outcome) {
        self.checked += outcome.replied + outcome.wrong + outcome.lost;
        self.wrong += outcome.wrong + outcome.lost + outcome.duplicated;
    }

    fn check(&mut self, right: bool) {
        self.checked += 1;
        self.wrong += u64::from(!right);
    }
}

/// The module in a file, as the compiler writes it.
struct ModuleFile(PathBuf);

impl ModuleFile {
    fn write() -> Result<Self, DemoError> {
        let path = std::env::temp_dir().join(format!("serval-demo-{}.wasm", std::process::id()));
        std::fs::write(&path, MODULE).map_err(|error| {
            let what = format!("write the module {}", path.display());
            DemoError::Io { what, error }
        })?;
        Ok(Self(path))
    }
}

impl Drop for ModuleFile {
    fn drop(&mut self) {
        // A file that is left in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn failed(error: FunctionError) -> DemoError {
    DemoError::Wrong(error.to_string())
}

/// A threshold for the number at the beginning of a message.
fn threshold(function: &str, high: u64) -> Spec {
    let mut spec = Spec::new("limits", function);
    spec.params = vec![("offset".into(), 0.into()), ("high".into(), high.into())];
    // The client, and other programs, may interrupt the worker.
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    spec
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let mut service = Service::new("echo", Vec::new(), "echo");
    service.framing = Framing::LengthU16;
    service.mqueues = stage.options.mqueues.unwrap_or(4);
    let (mut server, udp, tcp) = stage.serve(service)?;
    let module = ModuleFile::write()?;
    let wasm = module.0.to_string_lossy().into_owned();
    let mut checks = Checks::default();
    let everything = u64::from(u32::MAX);
    let chains = [
        ("none", None),
        ("passthrough", Some(Spec::new("limits", "passthrough"))),
        ("threshold, built in", Some(threshold("threshold", everything))),
        ("threshold, WebAssembly", Some(threshold(&wasm, everything))),
    ];
    let bar = stage.progress("sending messages", chains.len() + 3);
    let mut table =
        Table::new(&["function", ">rate", ">p50", ">time of a message in the function"]);
    let mut rows = Vec::new();
    let mut lines = Vec::new();
    for (name, spec) in chains {
        if let Some(spec) = &spec {
            server.functions.attach(&server.engine, "echo", spec, None).map_err(failed)?;
        }
        let spoil = stage.options.corrupt && spec.is_none();
        let outcome = measure(stage, udp, spoil)?;
        checks.add(&outcome);
        let counted = server
            .functions
            .list(&server.engine, Caller::engine())
            .first()
            .map(|function| function.counted);
        let ns = counted.map(|c| c.time_ns as f64 / c.messages.max(1) as f64);
        let (rate, p50) = (outcome.rate(), outcome.quantile_us(0.5));
        let shown = ns.map_or("-".to_owned(), |ns| format!("{ns:.0} ns"));
        table.row([name.to_owned(), per_second(rate), format!("{p50:.1} us"), shown]);
        rows.push(json!({ "function": name, "rate": rate, "p50_us": p50, "function_ns": ns }));
        lines.push(Line { name: name.to_owned(), points: vec![(rate, p50)] });
        bar.inc(1);
    }
    let mut exact = Vec::new();
    for function in ["threshold", &wasm] {
        server
            .functions
            .attach(&server.engine, "echo", &threshold(function, HIGH), None)
            .map_err(failed)?;
        exact.push(numbers(&server, udp, &mut checks)?);
        bar.inc(1);
    }
    let replaced = replace_under_load(stage, &mut server, tcp, &wasm, &mut checks)?;
    bar.inc(1);
    bar.finish_and_clear();

    let screen = &stage.options.screen;
    let title = format!("{LEN_BYTES}-byte echo with a function on the path");
    let mut text = format!("{}\n\n{}\n", screen.paint(Tone::Bold, &title), table.render(screen));
    let _ = writeln!(
        text,
        "  Of the numbers 0 to {} the threshold of {HIGH} dropped {} and passed {}, built in and as a module.",
        NUMBERS - 1,
        exact[0]["dropped"],
        exact[0]["count"] - exact[0]["dropped"],
    );
    let _ = writeln!(
        text,
        "  The function was replaced {replaced} times while a client asked over TCP; no message was lost.",
    );
    let Checks { checked, wrong } = checks;
    let _ = writeln!(
        text,
        "  {checked} messages were checked, {wrong} were wrong.\n  Client: ordinary kernel sockets on loopback \
         (class T0); {}.\n\n  {}",
        stage.cores(),
        accounts(&server)
    );
    let report = server.shutdown();
    if !report.is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let json = json!({
        "demo": "functions", "checked": checked, "wrong": wrong, "replaced": replaced,
        "registers": exact, "rows": rows,
    });
    let chart = Chart {
        title: format!("{title}: latency over rate"),
        caption: format!(
            "{WINDOW} in flight over UDP, client class T0, loopback; {}.",
            stage.cores()
        ),
        warning: None,
        x: plot::rates(),
        y: plot::latencies(),
        lines,
    };
    let failure = (wrong > 0)
        .then(|| format!("{wrong} of the {checked} messages that were checked are wrong"));
    Ok(Report { text, json, chart: Some(chart), failure })
}

/// As many messages as there is time for.
fn measure(stage: &Stage<'_>, udp: SocketAddr, spoil: bool) -> Result<Outcome, DemoError> {
    let duration = Duration::from_millis(if stage.options.quick { 200 } else { 1500 });
    let load = load(stage, duration);
    let mut workload = Spoiled { echo: Echo::new(LEN_BYTES), spoil };
    let outcome = client::udp(udp, &load, &mut workload)?;
    stage.check_interrupted()?;
    Ok(outcome)
}

fn load(stage: &Stage<'_>, duration: Duration) -> Load {
    Load {
        window: WINDOW,
        duration,
        timeout: Duration::from_secs(5),
        cancel: stage.options.cancel.clone(),
        ..Load::default()
    }
}

/// Sends the numbers from 0 on, in bursts, and checks which come back, and what the function counted.
fn numbers(
    server: &Server,
    udp: SocketAddr,
    checks: &mut Checks,
) -> Result<BTreeMap<String, u64>, DemoError> {
    let io = |error| DemoError::Io { what: "ask over UDP".to_owned(), error };
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").map_err(io)?;
    socket.connect(udp).map_err(io)?;
    socket.set_read_timeout(Some(Duration::from_secs(5))).map_err(io)?;
    let dropped = || server.metrics().service(0).dropped(DropReason::FunctionDrop);
    let message = |number: u64| [&(number as u32).to_be_bytes()[..], &[7; LEN_BYTES - 4]].concat();
    for first in (0..NUMBERS).step_by(WINDOW) {
        let burst = first..(first + WINDOW as u64).min(NUMBERS);
        let before = dropped();
        for number in burst.clone() {
            socket.send(&message(number)).map_err(io)?;
        }
        let passing: Vec<u64> = burst.clone().filter(|number| *number <= HIGH).collect();
        let mut left: Vec<Vec<u8>> = passing.iter().map(|number| message(*number)).collect();
        let mut reply = [0; 2 * LEN_BYTES];
        for _ in &passing {
            let found = socket.recv(&mut reply).ok();
            let found = found.and_then(|len| left.iter().position(|m| *m == reply[..len]));
            checks.check(found.map(|at| left.swap_remove(at)).is_some());
        }
        let gone = burst.count() as u64 - passing.len() as u64;
        let deadline = Instant::now() + Duration::from_secs(5);
        while dropped() - before < gone && Instant::now() < deadline {
            std::thread::yield_now();
        }
        checks.checked += gone;
        checks.wrong += gone.abs_diff(dropped() - before);
    }
    let read = server.functions.read(&server.engine, "echo", "limits").map_err(failed)?;
    let registers: BTreeMap<String, u64> = read.into_iter().collect();
    let sum = NUMBERS * (NUMBERS - 1) / 2;
    let expected = [
        ("min", 0),
        ("max", NUMBERS - 1),
        ("count", NUMBERS),
        ("sum", sum),
        ("dropped", NUMBERS - 1 - HIGH),
    ];
    for (name, value) in expected {
        checks.check(registers.get(name) == Some(&value));
    }
    Ok(registers)
}

/// Replacements that show one of each kind, and how often the load is repeated for them at most.
const REPLACED_MIN: u64 = 2;
const LOADS_MAX: usize = 50;

/// Replaces the function again and again while a client asks over TCP. Returns how often.
fn replace_under_load(
    stage: &Stage<'_>,
    server: &mut Server,
    tcp: SocketAddr,
    wasm: &str,
    checks: &mut Checks,
) -> Result<u64, DemoError> {
    // What the last part left would drop some of the messages.
    let everything = threshold("threshold", u32::MAX.into());
    server.functions.attach(&server.engine, "echo", &everything, None).map_err(failed)?;
    let (done, replaced) = (AtomicBool::new(false), AtomicU64::new(0));
    let load = load(stage, Duration::from_millis(if stage.options.quick { 400 } else { 3000 }));
    let outcomes = std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            let stream = Stream { connections: 4, ..Stream::new(Framing::LengthU16) };
            let mut outcomes = Vec::new();
            // On a busy machine a module takes long to compile: the load is repeated.
            while outcomes.is_empty()
                || replaced.load(Ordering::Relaxed) < REPLACED_MIN && outcomes.len() < LOADS_MAX
            {
                outcomes.push(client::tcp(tcp, &stream, &load, &mut Echo::new(LEN_BYTES)));
            }
            done.store(true, Ordering::Relaxed);
            outcomes
        });
        let mut result = Ok(false);
        while !done.load(Ordering::Relaxed) && result.is_ok() {
            let is_even = replaced.load(Ordering::Relaxed).is_multiple_of(2);
            let function = if is_even { wasm } else { "threshold" };
            let spec = threshold(function, u32::MAX.into());
            result = server.functions.attach(&server.engine, "echo", &spec, None).map_err(failed);
            replaced.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
        }
        let outcomes = asks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result.map(|_| outcomes)
    })?;
    stage.check_interrupted()?;
    for outcome in outcomes {
        checks.add(&outcome?);
    }
    Ok(replaced.into_inner())
}
