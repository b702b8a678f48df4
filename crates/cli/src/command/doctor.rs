//! `serval doctor [FILE]`, `serval doctor --gpus`, `serval doctor --litmus`.

use std::fmt::Write as _;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use accel::cuda::{self, FoundGpu};
use clap::Args;
use serde_json::{Value as Json, json};
use sys::probe::{Capability, State};

use super::{Failure, Sets};
use crate::doctor::{ServicePath, capabilities, gpus, service_paths};
use crate::screen::{Screen, Table, Tone};
use bench::litmus::{self, Expect, Row};
use server::control::ConfigSource;

pub(super) const HELP: &str = "\
Available: full function. Degraded: works with less speed or capacity. Off: not used.
With a configuration file, also shows the path of every service's messages.

--gpus queries the NVIDIA driver, in this process, and fails if there is none.

--litmus starts a second process and looks for outcomes that the ordering of the message queues
forbids: at most 3 seconds for each of its tests, on two cores. Deliberately wrong control tests
must show their forbidden outcome.

Examples:
  serval doctor
  serval doctor service.toml
  serval doctor --json
  serval doctor --gpus
  serval doctor --litmus --rounds 10000000

Exit code 0, even if something is missing: nothing in the list is required. With --litmus, 1 if a
forbidden outcome was seen or a control test saw none.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// A configuration file, to show the paths of its messages
    #[arg(value_name = "FILE")]
    path: Option<PathBuf>,

    #[command(flatten)]
    overrides: Sets,

    /// List the GPUs that the driver shows to this process
    #[arg(long, conflicts_with_all = ["path", "sets", "litmus"])]
    gpus: bool,

    /// Test the ordering of shared memory between two processes
    #[arg(long, conflicts_with_all = ["path", "sets"])]
    litmus: bool,

    /// Rounds of each litmus test
    #[arg(long, value_name = "N", requires = "litmus", default_value_t = litmus::ROUNDS_DEFAULT,
        value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,

    /// The second process of the litmus tests; the shared memory is its standard input
    #[arg(long, hide = true)]
    litmus_peer: bool,
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    if options.litmus_peer {
        let region = std::io::stdin().as_fd().try_clone_to_owned().map_err(Failure::run)?;
        return litmus::peer(region).map_err(Failure::run);
    }
    if options.gpus {
        let gpus = cuda::survey(None).map_err(Failure::run)?;
        screen.show(|| gpus_text(screen, &gpus), || gpus_json(&gpus));
        return Ok(());
    }
    if options.litmus {
        return run_litmus(screen, options.rounds);
    }
    let paths = match &options.path {
        Some(path) => {
            let sets = options.overrides.sets.clone();
            service_paths(&ConfigSource { path: path.clone(), sets }.load()?)
        }
        None => Vec::new(),
    };
    let mut found = capabilities();
    gpus::examine(&mut found);
    screen.show(|| text(screen, &found, &paths), || as_json(&found, &paths));
    Ok(())
}

fn text(screen: &Screen, found: &[Capability], paths: &[ServicePath]) -> String {
    let mut table = Table::new(&["capability", "state", "what was found"]);
    for capability in found {
        let tone = match capability.state {
            State::Available => Tone::Green,
            State::Degraded => Tone::Yellow,
            State::Off => Tone::Dim,
        };
        table.toned([
            (Tone::Plain, capability.name.to_owned()),
            (tone, capability.state.to_string()),
            (Tone::Plain, capability.why.clone()),
        ]);
        if !capability.remedy.is_empty() {
            let remedy = format!("-> {}", capability.remedy);
            table.toned([
                (Tone::Plain, String::new()),
                (Tone::Plain, String::new()),
                (Tone::Dim, remedy),
            ]);
        }
    }
    let mut out = table.render(screen);
    let count = |state| found.iter().filter(|c| c.state == state).count();
    let (available, degraded, off) =
        (count(State::Available), count(State::Degraded), count(State::Off));
    let _ = writeln!(
        out,
        "\n  {available} available, {degraded} degraded, {off} off. Serval uses what is available."
    );
    for path in paths {
        let _ = writeln!(out, "\n{}\n  {}", screen.paint(Tone::Bold, &path.service), path.line());
        for (_, obstacle) in &path.ports {
            if let Some(obstacle) = obstacle {
                let _ = writeln!(out, "  {} {obstacle}", screen.paint(Tone::Yellow, "not now:"));
            }
        }
    }
    out
}

fn as_json(found: &[Capability], paths: &[ServicePath]) -> Json {
    let capability = |c: &Capability| json!({ "name": c.name, "state": c.state.to_string(), "why": c.why, "remedy": c.remedy });
    let path = |p: &ServicePath| {
        let ports: Vec<Json> =
            p.ports.iter().map(|(url, why)| json!({ "url": url, "obstacle": why })).collect();
        json!({
            "service": p.service, "ports": ports, "workers": p.workers, "rings": p.rings,
            "accelerators": p.accelerators, "backends": p.backends,
        })
    };
    json!({
        "capabilities": found.iter().map(capability).collect::<Vec<_>>(),
        "services": paths.iter().map(path).collect::<Vec<_>>(),
    })
}

fn gpu_line(gpu: &FoundGpu) -> String {
    let unfit = gpu.unfit.as_ref().map_or_else(String::new, |what| format!(", which {what}"));
    format!(
        "GPU {}: {}, {} multiprocessors, {} GiB, sm_{}{}, driver of CUDA {}.{}{unfit}",
        gpu.index,
        gpu.name,
        gpu.multiprocessors,
        gpu.memory_bytes >> 30,
        gpu.capability.0,
        gpu.capability.1,
        gpu.driver.0,
        gpu.driver.1,
    )
}

fn gpus_text(screen: &Screen, gpus: &[FoundGpu]) -> String {
    let mut lines: Vec<String> = gpus.iter().map(gpu_line).collect();
    if lines.is_empty() {
        lines.push("The driver shows no GPU.".to_owned());
    }
    if !cuda::built_in() {
        let note = "No kernels for GPUs are built into this program: `make cuda-kernels`.";
        lines.push(screen.paint(Tone::Yellow, note));
    }
    lines.join("\n") + "\n"
}

fn gpus_json(gpus: &[FoundGpu]) -> Json {
    let gpu = |gpu: &FoundGpu| {
        json!({
            "index": gpu.index, "name": gpu.name, "bus_id": gpu.bus_id, "memory_bytes": gpu.memory_bytes,
            "multiprocessors": gpu.multiprocessors, "capability": [gpu.capability.0, gpu.capability.1],
            "driver": [gpu.driver.0, gpu.driver.1], "unfit": gpu.unfit, "exclusive": gpu.exclusive,
            "lazy": gpu.lazy, "code": cuda::built_in_for(gpu.capability), "line": gpu_line(gpu),
        })
    };
    json!({ "gpus": gpus.iter().map(gpu).collect::<Vec<_>>(), "kernels_built_in": cuda::built_in() })
}

fn run_litmus(screen: &Screen, rounds: u64) -> Result<(), Failure> {
    let program = std::env::current_exe().map_err(Failure::run)?;
    let mut peer = std::process::Command::new(program);
    peer.args(["doctor", "--litmus-peer"]);
    let rows = litmus::run(rounds, peer).map_err(Failure::run)?;
    screen.show(|| litmus_text(screen, &rows), || litmus_json(&rows));
    let bad = |expect| rows.iter().any(|row| row.expect == expect && !row.is_good());
    if bad(Expect::Never) {
        let what = "a forbidden outcome was seen: this machine or this build breaks the queues";
        return Err(Failure::Run(format!("{what}; please report it")));
    }
    if bad(Expect::Seen) {
        let what = "a control showed nothing, so the other results mean nothing";
        return Err(Failure::Run(format!("{what}: use two idle cores, or more --rounds")));
    }
    Ok(())
}

fn litmus_text(screen: &Screen, rows: &[Row]) -> String {
    let mut table = Table::new(&["edge", "looked for", "rounds", "seen", "verdict"]);
    for row in rows {
        let tone = if row.is_good() { Tone::Green } else { Tone::Red };
        table.toned([
            (Tone::Plain, row.name.to_owned()),
            (Tone::Plain, row.what.to_owned()),
            (Tone::Plain, row.rounds.to_string()),
            (Tone::Plain, row.seen.to_string()),
            (tone, row.verdict().to_owned()),
        ]);
    }
    table.render(screen)
}

fn litmus_json(rows: &[Row]) -> Json {
    let row = |row: &Row| {
        let (violations, weak) = match row.expect {
            Expect::Never => (Some(row.seen), None),
            Expect::Allowed | Expect::Seen => (None, Some(row.seen)),
        };
        json!({
            "edge": row.name, "outcome": row.what, "rounds": row.rounds, "violations": violations,
            "weak": weak, "control": row.expect == Expect::Seen, "verdict": row.verdict(),
        })
    };
    json!({ "litmus": rows.iter().map(row).collect::<Vec<_>>() })
}
