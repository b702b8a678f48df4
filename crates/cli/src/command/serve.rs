//! `serval serve FILE`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use engine::metrics::{Metrics, ServiceSnapshot, WorkerCounters};
use serde_json::{Value as Json, json};
use sys::local::LocalListener;
use sys::signal::{Signal, Signals};
use sys::tap::{SNAP_BYTES_MAX, TapFile, TapOptions, TapReport};
use wire::DropReason;

use super::{Failure, File, LOG_TIMEOUT};
use crate::screen::Screen;
use server::config::{Config, memory_url, unix_url, url};
use server::control::Control;
use server::exporter::{Exporter, Health};
use server::log::{self, Lines};
use server::machine::{fit_connections, missing_folders, use_cores};
use server::{Server, ShutdownReport};

pub(super) const HELP: &str = "\
Prints one line that starts with `ready` once every port is open and every kernel runs, and logs
to standard error, where kernels print, too. Kernels on accelerators of other machines, and in
runtimes that attach by themselves (launch = \"external\"), are not waited for: until they run,
requests are dropped as no_accelerator, or go to the service's other accelerators.

SIGTERM or Ctrl-C drains: no new requests are accepted, and accepted ones are answered for up to
engine.drain_ms. A second signal ends the drain: requests without an answer are dropped, and if
there are none the exit code is 0. A third one ends the process at once, as does one before `ready`.
SIGHUP, or `serval reload`, reads the file again: services are added, removed and changed without
losing messages of the others. A change that is impossible while the engine runs is refused with the
reason, and then nothing changes.

With --json the last line is an object: messages (replies sent), busy_ns (time of turns that found
work), cpu_ns (processor time of the process), and more by service and worker, with the connections
and bytes of kernels' sockets.

Examples:
  serval serve service.toml
  serval serve service.toml --set engine.workers=2 --set engine.metrics=127.0.0.1:9464
  SERVAL_LIMITS_CONNECTIONS=1000 serval serve service.toml --log debug
  serval serve service.toml --tap traffic.pcap --tap-snap 128

Exit codes: 0 drained, 1 the start failed or was cancelled, 2 invalid configuration, 3 requests were
left unanswered or a kernel hung.";

/// Time after `drain_ms` at which the process ends even if something hangs; less than five seconds including the last
/// lines of the log.
const END_TIMEOUT: Duration = Duration::from_millis(4800).saturating_sub(LOG_TIMEOUT);
/// Interval of checks whether the server has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(10);

#[derive(Args, Debug)]
pub(super) struct Options {
    #[command(flatten)]
    file: File,

    /// Record network traffic as a pcap file (nanoseconds, raw IP)
    #[arg(long, value_name = "FILE")]
    tap: Option<PathBuf>,

    /// Maximum number of bytes recorded per packet
    #[arg(long, value_name = "BYTES", default_value_t = SNAP_BYTES_MAX, requires = "tap",
          value_parser = clap::value_parser!(u32).range(64..=i64::from(SNAP_BYTES_MAX)))]
    tap_snap: u32,

    /// Maximum size of the file; later packets are only counted
    #[arg(long, value_name = "MIB", default_value_t = 1024, requires = "tap",
          value_parser = clap::value_parser!(u32).range(1..))]
    tap_limit: u32,

    /// Drain and exit when standard input ends: for a program that starts the engine and must not leave it behind
    #[arg(long)]
    stop_on_eof: bool,
}

impl Options {
    fn open_tap(&self) -> Result<Option<TapFile>, Failure> {
        let Some(path) = self.tap.clone() else { return Ok(None) };
        let limit_bytes = u64::from(self.tap_limit) << 20;
        let options = TapOptions { path, snap_bytes: self.tap_snap, limit_bytes };
        let opened = TapFile::create(&options);
        let sentence = |error| {
            Failure::Run(format!("the tap {} cannot be written: {error}", options.path.display()))
        };
        opened.map(Some).map_err(sentence)
    }
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let mut config = options.file.source().load()?;
    use_cores(&mut config)?;
    let missing = missing_folders(&config);
    if !missing.is_empty() {
        return Err(Failure::Run(missing.join("\n")));
    }
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    // Before the first thread starts: an early signal must not be lost.
    let mut signals = Signals::install().map_err(Failure::run)?;
    if options.stop_on_eof {
        stop_on_eof().map_err(Failure::run)?;
    }
    fit_connections(&mut config, None)?;
    let tap = options.open_tap()?;
    // As for the log: a pipe without a reader must not block the thread that handles signals.
    // What kernels print must not get between the lines that scripts read.
    let output = sys::process::divert_output().map_err(Failure::run)?;
    let output = Lines::start("serval-output", output).map_err(Failure::run)?;
    let output = Arc::new(output);
    let topology = config.topology.clone();
    let mut reload = false;
    let mut ended = || loop {
        match signals.wait(Some(Duration::ZERO)) {
            Ok(Some(Signal::Terminate | Signal::Interrupt)) => return true,
            Ok(Some(Signal::Reload)) => reload = true,
            Ok(None) | Err(_) => return false,
        }
    };
    let engine = transfer_engine(&config)?;
    let started = Server::start_unless(topology, tap.as_ref(), engine.as_ref(), &mut ended);
    let server = started.map_err(Failure::run)?;
    let health = Arc::new(Health::default());
    let exporter = match config.metrics {
        Some(address) => {
            let started = Exporter::start(address, server.metrics(), health.clone());
            Some(started.map_err(Failure::run)?)
        }
        None => None,
    };
    let transfers = start_transfers(&config, engine)?;
    // Those of kernels are counted there as well.
    if let Some(counters) = server.transfer_counters() {
        health.watch_transfers(counters);
    }
    health.watch(server.stalls());
    health.set_ready();
    let drain_ms = config.topology.engine.drain_ms;
    let metrics = exporter.as_ref().map(|e| format!("http://{}/metrics", e.address()));
    let listens = listens(&config, &server);
    let socket = config.transfer.as_ref().map(|of| of.socket.clone());
    let hasten = Arc::new(AtomicBool::new(false));
    let of_finish = (*screen, output.clone(), hasten.clone());
    let finish = Box::new(move |server: Server| {
        let (screen, output, hasten) = of_finish;
        let metrics = server.metrics();
        let report = server.shutdown_until(&|| hasten.load(Ordering::Relaxed));
        finish(&screen, &metrics, report, tap, &output)
    });
    let control = Control::start(server, config, options.file.source(), health.clone(), finish)?;
    let ready = announcement(screen, &listens, socket.as_deref(), metrics.as_deref());
    output.push(ready.as_bytes());
    if reload {
        control.reload();
    }
    loop {
        match signals.wait(None).map_err(Failure::run)? {
            Some(Signal::Terminate | Signal::Interrupt) => break,
            Some(Signal::Reload) => control.reload(),
            None => {}
        }
    }
    health.set_draining();
    tracing::info!(drain_ms, "draining; a second signal ends the drain");
    let limit = Duration::from_millis(drain_ms) + END_TIMEOUT;
    control.begin_end();
    // Transfers are not part of the drain: their callers are notified of how far they came. Not on this thread, which has to see signals.
    let ending = std::thread::Builder::new().name("serval-end".into());
    // Without a thread they are dropped here.
    let ending = ending.spawn(move || drop(transfers)).ok();
    let has_ended =
        || control.has_ended() && ending.as_ref().is_none_or(std::thread::JoinHandle::is_finished);
    wait_for_end(has_ended, &mut signals, limit, &hasten);
    let report = control.end();
    output.flush(LOG_TIMEOUT);
    if report?.is_clean() { Ok(()) } else { Err(Failure::Unfinished) }
}

/// Ends the process as SIGTERM does once standard input ends: its other end is closed however the process that holds it ends.
fn stop_on_eof() -> std::io::Result<()> {
    let wait = || {
        // What comes before the end has no meaning.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = sys::process::terminate(std::process::id());
    };
    std::thread::Builder::new().name("serval-stdin".into()).spawn(wait).map(drop)
}

/// The transfer engine, if the configuration has one.
fn transfer_engine(config: &Config) -> Result<Option<Arc<transfer::Engine>>, Failure> {
    let Some(settings) = &config.transfer else { return Ok(None) };
    let started = transfer::Engine::start(settings.limits.of_engine());
    let failed =
        |error| Failure::Run(format!("transfer.threads: a thread cannot be started: {error}"));
    started.map(|engine| Some(Arc::new(engine))).map_err(failed)
}

/// Serves other programs with it.
fn start_transfers(
    config: &Config,
    engine: Option<Arc<transfer::Engine>>,
) -> Result<Option<transfer::Service>, Failure> {
    let (Some(settings), Some(engine)) = (&config.transfer, engine) else { return Ok(None) };
    let failed = |why: String| Failure::Run(format!("transfer.socket: {why}"));
    let listener =
        LocalListener::bind(&settings.socket).map_err(|error| failed(error.to_string()))?;
    // This link starts the running program even if its file has been replaced.
    let program = transfer::UserProgram {
        path: "/proc/self/exe".into(),
        arguments: vec!["transfer-calls".into()],
        environment: Vec::new(),
    };
    let started = transfer::Service::with_users(listener, settings.limits, engine, Some(program));
    started.map(Some).map_err(|error| failed(format!("a thread cannot be started: {error}")))
}

/// Every service with its listening addresses.
fn listens(config: &Config, server: &Server) -> Vec<(String, Vec<String>)> {
    let names = config.topology.services.iter().map(|service| service.name.clone());
    let mut listens: Vec<_> = names.map(|name| (name, Vec::new())).collect();
    for (service, listen) in server.addresses() {
        listens[service].1.push(url(listen.transport, listen.address));
    }
    for (service, path) in config.topology.memory_ports() {
        listens[service].1.push(memory_url(path));
    }
    for (service, path) in config.topology.unix_ports() {
        listens[service].1.push(unix_url(path));
    }
    listens
}

/// The line that scripts wait for.
fn announcement(
    screen: &Screen,
    listens: &[(String, Vec<String>)],
    transfers: Option<&Path>,
    metrics: Option<&str>,
) -> String {
    screen.render(
        || {
            let service = |(name, at): &(String, Vec<String>)| format!("{name} {}", at.join(" "));
            let mut parts: Vec<String> = listens.iter().map(service).collect();
            parts.extend(transfers.map(|socket| format!("transfers {}", socket.display())));
            parts.extend(metrics.map(|metrics| format!("metrics {metrics}")));
            format!("ready: {}\n", parts.join("; "))
        },
        || {
            let entry = |(name, at): &(String, Vec<String>)| json!({ "name": name, "listen": at });
            let entries: Vec<_> = listens.iter().map(entry).collect();
            json!({
                "event": "ready", "services": entries, "transfers": transfers, "metrics": metrics,
            })
        },
    )
}

/// Waits until the server has ended. A signal ends the drain (`hasten`); one more, or the end of `limit`, ends the
/// process. This thread does nothing else, so the process ends in time whatever hangs.
fn wait_for_end(
    has_ended: impl Fn() -> bool,
    signals: &mut Signals,
    limit: Duration,
    hasten: &AtomicBool,
) {
    let mut deadline = Instant::now() + limit;
    while !has_ended() {
        match signals.wait(Some(END_POLL_INTERVAL)) {
            Ok(Some(Signal::Terminate | Signal::Interrupt)) => {
                if hasten.swap(true, Ordering::Relaxed) {
                    tracing::warn!("ended by a third signal before everything had stopped");
                    end_now();
                }
                // `timeout` of GNU coreutils sends two signals, so this is no warning.
                tracing::info!("a second signal: the drain ends now; a third one ends the process");
                deadline = deadline.min(Instant::now() + END_TIMEOUT);
            }
            Ok(_) => {}
            Err(_) => std::thread::sleep(END_POLL_INTERVAL),
        }
        if Instant::now() >= deadline {
            tracing::error!("the engine did not stop in time: the process ends anyway");
            end_now();
        }
    }
}

/// Ends the process although its threads run.
fn end_now() -> ! {
    log::flush(LOG_TIMEOUT);
    sys::process::exit_now(3)
}

/// The last lines of the log and of the output, after the server has stopped.
fn finish(
    screen: &Screen,
    metrics: &Metrics,
    report: ShutdownReport,
    tap: Option<TapFile>,
    output: &Lines,
) -> ShutdownReport {
    let tapped = tap.map(TapFile::finish);
    if let Some(TapReport { packets, dropped, bytes, error }) = &tapped {
        tracing::info!(packets, dropped, bytes, "the tap");
        if let Some(error) = error {
            tracing::error!("the tap's file is incomplete: {error}");
        } else if *dropped > 0 {
            tracing::warn!(
                dropped,
                "packets are missing from the tap's file: it is full, or writing was too slow"
            );
        }
    }
    for service in metrics.services().iter() {
        let s = service.snapshot();
        let dropped = s.dropped_requests();
        let (reasons, sockets) = (drop_reasons(&s), sockets(&s));
        tracing::info!(
            received = s.received,
            replied = s.replied,
            consumed = s.consumed,
            dropped,
            "{}{reasons}{sockets}",
            service.name()
        );
    }
    if screen.json {
        let words = summary(metrics, &report, tapped.as_ref());
        output.push(format!("{words}\n").as_bytes());
    }
    if report.hung {
        tracing::error!("a kernel did not return when it was asked to stop");
    }
    if report.unanswered > 0 {
        tracing::error!(
            unanswered = report.unanswered,
            "requests were not answered within engine.drain_ms or request_timeout_ms, or before a second signal"
        );
    }
    report
}

/// `; dropped during the run: no_credit 12, request_timeout 3`, or nothing. Includes drops that ended no request.
fn drop_reasons(snapshot: &ServiceSnapshot) -> String {
    let reasons = DropReason::ALL.iter().map(|reason| (reason.name(), snapshot.dropped(*reason)));
    let lost = reasons.filter(|(_, count)| *count > 0);
    let lost: Vec<_> = lost.map(|(name, count)| format!("{name} {count}")).collect();
    if lost.is_empty() {
        String::new()
    } else {
        format!("; dropped during the run: {}", lost.join(", "))
    }
}

/// `; sockets: 3 connections, 4096 bytes from peers, 512 to peers`, or nothing if kernels had no connections.
fn sockets(snapshot: &ServiceSnapshot) -> String {
    if snapshot.sockets_opened == 0 {
        return String::new();
    }
    let ServiceSnapshot { sockets_opened, socket_received_bytes, socket_sent_bytes, .. } = snapshot;
    format!(
        "; sockets: {sockets_opened} connections, {socket_received_bytes} bytes from peers, {socket_sent_bytes} to peers"
    )
}

/// Totals of the run, for programs that measure: `messages` is replies sent, `busy_ns` the time of turns that found
/// work, `cpu_ns` the processor time of the process.
fn summary(metrics: &Metrics, report: &ShutdownReport, tapped: Option<&TapReport>) -> Json {
    let (mut messages, mut services) = (0, Vec::new());
    for service in metrics.services().iter() {
        let s = service.snapshot();
        messages += s.replied;
        let lost = DropReason::ALL.iter().filter(|r| s.dropped(**r) > 0);
        let drops: serde_json::Map<_, _> =
            lost.map(|r| (r.name().to_owned(), s.dropped(*r).into())).collect();
        let mut of_service = json!({
            "name": service.name(), "received": s.received, "replied": s.replied,
            "consumed": s.consumed, "dropped": s.dropped_requests(), "drops": drops,
        });
        if s.sockets_opened > 0 {
            of_service["sockets"] = json!({
                "opened": s.sockets_opened, "received_bytes": s.socket_received_bytes,
                "read_bytes": s.socket_read_bytes, "written_bytes": s.socket_written_bytes,
                "sent_bytes": s.socket_sent_bytes,
            });
        }
        services.push(of_service);
    }
    let worker = |w: &WorkerCounters| {
        json!({
            "turns": w.turns.value(), "busy_turns": w.busy_turns.value(),
            "sleeps": w.sleeps.value(), "busy_ns": w.busy_ns.value(),
            "idle_ns": w.idle_ns.value(), "sleep_ns": w.sleep_ns.value(),
        })
    };
    json!({
        "event": "stopped",
        "messages": messages,
        "busy_ns": metrics.workers().map(|w| w.busy_ns.value()).sum::<u64>(),
        "cpu_ns": sys::time::process_cpu_ns(),
        "log_lines_dropped": log::dropped(),
        "clean": report.is_clean(), "unanswered": report.unanswered, "hung": report.hung,
        "services": services,
        "workers": metrics.workers().map(worker).collect::<Vec<_>>(),
        "tap": tapped.map(|t| json!({ "packets": t.packets, "dropped": t.dropped, "error": t.error })),
    })
}
