//! `serval-sim`: runs seeds until one fails.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sim::run::{Report, simulate};
use wire::DropReason;

const USAGE: &str =
    "usage: serval-sim [--seed N] [--seeds N] [--minutes M] [--trace] [--keep-going]
  --seed N      first seed (default 1)
  --seeds N     how many seeds, one after the other (default 1 with --seed, else 1000)
  --minutes M   stop after this time, however many seeds were asked for
  --trace       print every event to stderr
  --keep-going  go on after a seed that fails";

struct Options {
    first: u64,
    seeds: u64,
    deadline: Option<Instant>,
    trace: bool,
    keep_going: bool,
}

fn options() -> Result<Options, String> {
    let mut arguments = std::env::args().skip(1);
    let (mut seed, mut seeds, mut minutes) = (None, None, None);
    let (mut trace, mut keep_going) = (false, false);
    while let Some(argument) = arguments.next() {
        let place = match argument.as_str() {
            "--trace" => {
                trace = true;
                continue;
            }
            "--keep-going" => {
                keep_going = true;
                continue;
            }
            "--seed" => &mut seed,
            "--seeds" => &mut seeds,
            "--minutes" => &mut minutes,
            _ => return Err(format!("unknown argument {argument}")),
        };
        let number = arguments.next().and_then(|value| value.parse::<u64>().ok());
        *place = Some(number.ok_or_else(|| format!("{argument} needs a number"))?);
    }
    let unlimited = if minutes.is_some() { u64::MAX } else { 1000 };
    Ok(Options {
        first: seed.unwrap_or(1),
        seeds: seeds.unwrap_or(if seed.is_some() && minutes.is_none() { 1 } else { unlimited }),
        deadline: minutes.map(|m| Instant::now() + Duration::from_secs(60 * m)),
        trace,
        keep_going,
    })
}

/// What all runs did together: a check nobody reaches proves nothing.
struct Totals {
    events: u64,
    virtual_ms: u64,
    counters: BTreeMap<&'static str, u64>,
    lost: [u64; DropReason::COUNT],
}

impl Totals {
    fn new() -> Self {
        let lost = [0; DropReason::COUNT];
        Self { events: 0, virtual_ms: 0, counters: BTreeMap::new(), lost }
    }

    fn add(&mut self, report: &Report) {
        self.events += report.events;
        self.virtual_ms += report.took_ns / 1_000_000;
        for service in &report.services {
            for (name, _, value) in service.named() {
                *self.counters.entry(name).or_default() += value;
            }
            for (sum, lost) in self.lost.iter_mut().zip(service.drops) {
                *sum += lost;
            }
        }
    }

    fn print(&self) {
        println!("{} events in {} virtual ms", self.events, self.virtual_ms);
        for (name, value) in &self.counters {
            println!("  {name:20} {value:>10}");
        }
        for (reason, lost) in DropReason::ALL.iter().zip(self.lost) {
            println!("  lost: {:14} {lost:>10}", reason.name());
        }
    }
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let (mut runs, mut failures) = (0u64, 0u64);
    let mut totals = Totals::new();
    for seed in (0..options.seeds).map(|n| options.first.wrapping_add(n)) {
        if options.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            break;
        }
        runs += 1;
        match simulate(seed, options.trace) {
            Ok(report) => {
                if options.seeds == 1 {
                    println!("seed {seed}: trace {:#018x}", report.trace_hash);
                }
                totals.add(&report);
            }
            Err(violation) => {
                eprintln!("{violation}");
                eprintln!("reproduce: cargo run -p serval-sim -- --seed {seed} --trace");
                failures += 1;
                if !options.keep_going {
                    break;
                }
            }
        }
    }
    if failures > 0 {
        eprintln!("{failures} of {runs} seeds failed");
        return ExitCode::FAILURE;
    }
    totals.print();
    println!("{runs} seeds, no violation");
    ExitCode::SUCCESS
}
