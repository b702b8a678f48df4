//! `serval demo cache`: an unmodified memcached, alone and with a cache in front of it.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bench::client::workload::Memcached as Values;
use bench::client::{self, Load, Outcome, Stream, Workload};
use bench::memcached::Memcached;
use bench::plot::{self, Chart, Line};
use bench::units::per_second;
use engine::topology::Service;
use onpath::Spec;
use serde_json::json;
use server::{FunctionError, Server};
use wire::framing::Framing;

use super::{DemoError, Report, Stage, accounts};
use crate::screen::{Table, Tone};

const VALUE_BYTES: usize = 64;
const WINDOW: usize = 64;
const CONNECTIONS: usize = 4;
/// Gets of 100 requests of the last part; the others are sets.
const GETS_PERCENT: u8 = 90;
/// A server that is this late has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gets and sets whose values are compared; the first value is spoiled if that is asked for.
struct Spoiled {
    values: Values<'static>,
    spoil: bool,
}

impl Workload for Spoiled {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.values.request(index, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        // "VALUE KEY FLAGS BYTES", the value, "END".
        let spoilt = reply.len().checked_sub(b"\r\nEND\r\n".len() + 1);
        match spoilt.filter(|_| reply.starts_with(b"VALUE ") && std::mem::take(&mut self.spoil)) {
            Some(at) => {
                let mut spoiled = reply.to_vec();
                spoiled[at] ^= 1;
                self.values.accepts(index, &spoiled)
            }
            None => self.values.accepts(index, reply),
        }
    }
}

/// What a server did.
struct Measured {
    name: &'static str,
    many: Outcome,
    one: Outcome,
    /// Percent of the reads that the cache answered.
    hits: Option<f64>,
}

fn failed(error: FunctionError) -> DemoError {
    DemoError::Wrong(error.to_string())
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let memcached = start_memcached(stage)?;
    let mut service = Service::proxy("cache", Vec::new(), memcached.address());
    service.framing = Framing::Memcached;
    let mut spec = Spec::new("hot", "memcached-cache");
    // The client, and other programs, may interrupt the worker.
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    service.functions = vec![spec];
    let (server, _, cached) = stage.serve(service)?;
    let bar = stage.progress("reading and writing values", 4);
    let demo = Demo { stage, server: &server, cached };
    let (mut checked, mut wrong) = (0, 0);
    let mut add = |outcome: &Outcome| {
        checked += outcome.replied + outcome.wrong + outcome.lost;
        wrong += outcome.wrong + outcome.lost + outcome.duplicated;
    };
    add(&demo.store()?);
    bar.inc(1);
    let alone = demo.measure("memcached alone", memcached.address(), 100, false)?;
    bar.inc(1);
    demo.wait_for_hits()?;
    let hits = demo.measure("with the cache", cached, 100, stage.options.corrupt)?;
    bar.inc(1);
    let name = "with the cache, 10 % sets";
    let mixed = demo.measure(name, cached, GETS_PERCENT, false)?;
    bar.finish_and_clear();
    let all = [alone, hits, mixed];
    for measured in &all {
        add(&measured.many);
        add(&measured.one);
    }
    let registers = server.functions.read(&server.engine, "cache", "hot").map_err(failed)?;
    let accounts = accounts(&server);
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    Ok(report(stage, &all, &registers, (checked, wrong), &accounts))
}

/// On the core of the server that is compared with it.
fn start_memcached(stage: &Stage<'_>) -> Result<Memcached, DemoError> {
    let start = || {
        if let Some(cores) = stage.cores {
            // Without pinning the numbers are worse, but not wrong.
            let _ = sys::affinity::pin_current_thread(cores.server);
        }
        Memcached::start()
    };
    let started = std::thread::scope(|scope| scope.spawn(start).join());
    Ok(started.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
}

struct Demo<'a> {
    stage: &'a Stage<'a>,
    server: &'a Server,
    cached: SocketAddr,
}

impl Demo<'_> {
    fn ask(
        &self,
        to: SocketAddr,
        load: Load,
        workload: &mut dyn Workload,
    ) -> Result<Outcome, DemoError> {
        let connections = CONNECTIONS.min(load.window);
        let stream = Stream { connections, ..Stream::new(Framing::Memcached) };
        let load = Load { timeout: PATIENCE, cancel: self.stage.options.cancel.clone(), ..load };
        let outcome = client::tcp(to, &stream, &load, workload)?;
        self.stage.check_interrupted()?;
        Ok(outcome)
    }

    /// Stores every value, through the cache.
    fn store(&self) -> Result<Outcome, DemoError> {
        let mut stores = Values::new(VALUE_BYTES, 0).stores();
        let load = Load { window: WINDOW, requests: stores.keys(), ..Load::default() };
        self.ask(self.cached, load, &mut stores)
    }

    /// Reads values until the cache answers nearly all.
    fn wait_for_hits(&self) -> Result<(), DemoError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let before = self.reads()?;
            let mut values = Values::new(VALUE_BYTES, 100);
            let load = Load { window: WINDOW, requests: 4 * values.keys(), ..Load::default() };
            self.ask(self.cached, load, &mut values)?;
            if hit_rate(before, self.reads()?) > 90.0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(DemoError::Wrong("the cache does not fill".to_owned()));
            }
        }
    }

    /// Reads that the cache answered, and all.
    fn reads(&self) -> Result<(u64, u64), DemoError> {
        let registers =
            self.server.functions.read(&self.server.engine, "cache", "hot").map_err(failed)?;
        let value = |name: &str| registers.iter().find(|(r, _)| r == name).map_or(0, |(_, v)| *v);
        let forwarded: u64 =
            ["misses", "invalid", "sampled", "ordered", "unasked"].map(value).iter().sum();
        Ok((value("hits"), value("hits") + forwarded))
    }

    fn measure(
        &self,
        name: &'static str,
        to: SocketAddr,
        gets_percent: u8,
        spoil: bool,
    ) -> Result<Measured, DemoError> {
        let duration = Duration::from_millis(if self.stage.options.quick { 200 } else { 2000 });
        let mut workload = Spoiled { values: Values::new(VALUE_BYTES, gets_percent), spoil };
        let before = self.reads()?;
        let load = Load { window: WINDOW, duration, ..Load::default() };
        let many = self.ask(to, load.clone(), &mut workload)?;
        let one = self.ask(to, Load { window: 1, ..load }, &mut workload)?;
        let hits = (to == self.cached).then_some(hit_rate(before, self.reads()?));
        Ok(Measured { name, many, one, hits })
    }
}

fn hit_rate(before: (u64, u64), after: (u64, u64)) -> f64 {
    100.0 * (after.0 - before.0) as f64 / (after.1 - before.1).max(1) as f64
}

fn report(
    stage: &Stage<'_>,
    all: &[Measured],
    registers: &[(String, u64)],
    (checked, wrong): (u64, u64),
    accounts: &str,
) -> Report {
    let screen = &stage.options.screen;
    let mut table = Table::new(&["server", ">hits", ">rate", ">p50, 1 in flight"]);
    let mut rows = Vec::new();
    let mut lines = Vec::new();
    for Measured { name, many, one, hits } in all {
        let (rate, p50) = (many.rate(), one.quantile_us(0.5));
        let shown = hits.map_or("-".to_owned(), |hits| format!("{hits:.1} %"));
        table.row([(*name).to_owned(), shown, per_second(rate), format!("{p50:.1} us")]);
        rows.push(json!({ "server": name, "hits_percent": hits, "rate": rate, "p50_us": p50 }));
        let points = client::distribution_us(&one.latency);
        lines.push(Line { name: (*name).to_owned(), points });
    }
    let title = format!("memcached: values of {VALUE_BYTES} bytes over TCP");
    let mut text = format!("{}\n\n{}\n", screen.paint(Tone::Bold, &title), table.render(screen));
    let _ = writeln!(
        text,
        "  {checked} answers were checked, {wrong} were wrong. Clients: ordinary kernel sockets on loopback \
         (class T0), {CONNECTIONS} connections, {WINDOW} in flight; {}.\n\n  {accounts}",
        stage.cores()
    );
    let registers: serde_json::Map<_, _> =
        registers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let json = json!({
        "demo": "cache", "checked": checked, "wrong": wrong, "rows": rows, "registers": registers,
    });
    let chart = Chart {
        title: format!("{title}: latency, 1 in flight"),
        caption: format!("Client class T0, loopback; {}.", stage.cores()),
        warning: None,
        x: plot::shares(),
        y: plot::latencies(),
        lines,
    };
    let failure = (wrong > 0)
        .then(|| format!("{wrong} of the {checked} answers that were checked are wrong"));
    Report { text, json, chart: Some(chart), failure }
}
