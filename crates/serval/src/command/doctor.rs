//! `serval doctor [FILE]`.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value as Json, json};
use sys::probe::{Capability, State};

use super::{Failure, File, Sets};
use crate::doctor::{ServicePath, capabilities, service_paths};
use crate::screen::{Screen, Table, Tone};

pub(super) const HELP: &str = "\
Available: all of it. Degraded: it works, with less speed or capacity. Off: Serval does without. With
a configuration file, also the way every service's messages would go.

Examples:
  serval doctor
  serval doctor service.toml
  serval doctor --json

Exit code 0, whatever is missing: nothing in the list is required.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// A configuration file, to show the way its messages go
    #[arg(value_name = "FILE")]
    path: Option<PathBuf>,

    #[command(flatten)]
    overrides: Sets,
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let paths = match &options.path {
        Some(path) => {
            let overrides = Sets { sets: options.overrides.sets.clone() };
            service_paths(&File { path: path.clone(), overrides }.load()?)
        }
        None => Vec::new(),
    };
    let found = capabilities();
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
        "\n  {available} available, {degraded} degraded, {off} off. Serval runs with what there is."
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
