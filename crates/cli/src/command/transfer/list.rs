//! `serval transfer ls`: the scoreboard of the engine of a server.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use server::config::bytes_for_people;
use transfer::message::{Answer, Listed};
use transfer::{Activity, Client};

use super::ENGINE_SILENCE_MAX;
use crate::command::Failure;
use crate::screen::{Screen, Table};

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The engine's socket (transfer.socket of a running server)
    #[arg(long, value_name = "SOCKET")]
    engine: PathBuf,
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let mut client = Client::connect(&options.engine).map_err(Failure::run)?;
    client.ask_list().map_err(Failure::run)?;
    let deadline = Instant::now() + ENGINE_SILENCE_MAX;
    let (total, entries) = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match client.next(left).map_err(Failure::run)? {
            Some(Answer::List { total, entries }) => break (total, entries),
            Some(_) => {}
            None => {
                let engine = options.engine.display();
                let why = format!("the transfer engine at {engine} does not answer");
                return Err(Failure::Run(why));
            }
        }
    };
    screen.show(|| text(screen, total, &entries), || shown(total, &entries));
    Ok(())
}

fn text(screen: &Screen, total: u64, entries: &[Listed]) -> String {
    if entries.is_empty() {
        return "no transfers are in flight\n".to_owned();
    }
    let columns = [">process", ">id", "way", "state", ">read", ">written", ">age"];
    let mut table = Table::new(&columns);
    for entry in entries {
        table.row([
            entry.process.to_string(),
            entry.id.to_string(),
            way(entry),
            state(entry.activity).to_owned(),
            bytes_for_people(entry.read),
            bytes_for_people(entry.written),
            format!("{:.1} s", Duration::from_millis(entry.age_ms).as_secs_f64()),
        ]);
    }
    let mut text = table.render(screen);
    let left = total - entries.len() as u64;
    if left > 0 {
        text.push_str(&format!("  and {left} younger ones\n"));
    }
    text
}

fn shown(total: u64, entries: &[Listed]) -> serde_json::Value {
    let entry = |entry: &Listed| {
        let stages = entry.stages.iter().map(|stage| stage.name());
        json!({
            "process": entry.process, "id": entry.id, "source": entry.source.name(),
            "stages": stages.collect::<Vec<_>>(), "sink": entry.sink.name(),
            "state": state(entry.activity), "read_bytes": entry.read,
            "written_bytes": entry.written, "age_ms": entry.age_ms,
        })
    };
    json!({ "in_flight": total, "transfers": entries.iter().map(entry).collect::<Vec<_>>() })
}

/// Its source, stages and sink.
fn way(entry: &Listed) -> String {
    let stages = entry.stages.iter().map(|stage| stage.name());
    let parts = [entry.source.name()].into_iter().chain(stages).chain([entry.sink.name()]);
    parts.collect::<Vec<_>>().join(" -> ")
}

fn state(activity: Activity) -> &'static str {
    match activity {
        Activity::Queued => "queued",
        Activity::Running => "running",
        Activity::Waiting => "waits for a socket",
    }
}
