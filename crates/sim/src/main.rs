//! `serval-sim`: runs seeds until one fails, and reduces that one.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use sim::campaign::{Campaign, Progress, Totals};
use sim::case::Case;
use sim::fault::{Fault, FaultSet};

const USAGE: &str = "usage: serval-sim [--seed N] [--seeds N] [--minutes M] [--jobs J] [OPTION...]
  --seed N         first seed (default 1)
  --seeds N        number of consecutive seeds (default 1 with --seed, else 1000)
  --minutes M      start no seed after this time
  --jobs J         threads (default: one per core)
  --keep-going     continue after a seed that fails
  --no-shrink      do not reduce the case of a seed that fails
  --coverage       fail also if a fault or a drop reason never occurred
  --trace          print the plan and every event to stderr
  --faults         list the kinds of faults
reduced cases of a seed:
  --without A,B    leave these faults out        --only A,B       leave all others out (or none)
  --clients I,J    only these clients            --requests N     at most N requests per client
  --turns N        at most N turns under load    --workers N      at most N workers";

struct Options {
    campaign: Campaign,
    shrink: bool,
    coverage: bool,
}

fn parse<T: FromStr>(name: &str, value: Option<String>) -> Result<T, String> {
    let value = value.ok_or_else(|| format!("{name} needs a value"))?;
    value.parse().map_err(|_| format!("{name}: {value:?} is not a number"))
}

fn faults(name: &str, value: Option<String>) -> Result<FaultSet, String> {
    match value.ok_or_else(|| format!("{name} needs names of faults"))?.as_str() {
        "none" => Ok(FaultSet::default()),
        names => names.parse(),
    }
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut case = Case::from(1);
    let (mut seed, mut seeds, mut minutes, mut jobs) = (None, None, None, None);
    let (mut trace, mut keep_going, mut shrink, mut coverage) = (false, false, true, false);
    while let Some(argument) = arguments.next() {
        let name = argument.as_str();
        match name {
            "--trace" => trace = true,
            "--keep-going" => keep_going = true,
            "--no-shrink" => shrink = false,
            "--coverage" => coverage = true,
            "--seed" => seed = Some(parse(name, arguments.next())?),
            "--seeds" => seeds = Some(parse(name, arguments.next())?),
            "--minutes" => minutes = Some(parse::<u64>(name, arguments.next())?),
            "--jobs" => jobs = Some(parse::<usize>(name, arguments.next())?),
            "--without" => case.without = faults(name, arguments.next())?,
            "--only" => case.without = faults(name, arguments.next())?.others(),
            "--clients" => {
                let list = arguments.next().unwrap_or_default();
                let list = list.split(',').filter(|place| !place.is_empty());
                let places = list.map(|place| parse(name, Some(place.to_owned())));
                case.clients = Some(places.collect::<Result<_, _>>()?);
            }
            "--requests" => case.requests = Some(parse(name, arguments.next())?),
            "--turns" => case.turns = Some(parse(name, arguments.next())?),
            "--workers" => case.workers = Some(parse::<usize>(name, arguments.next())?.max(1)),
            _ => return Err(format!("unknown argument {name}")),
        }
    }
    let unlimited = if minutes.is_some() { u64::MAX } else { 1000 };
    let one = seed.is_some() && minutes.is_none();
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    case.seed = seed.unwrap_or(1);
    let campaign = Campaign {
        first: case,
        seeds: seeds.unwrap_or(if one { 1 } else { unlimited }),
        deadline: minutes.map(|m| Instant::now() + Duration::from_secs(60 * m)),
        jobs: if trace { 1 } else { jobs.unwrap_or_else(cores) },
        trace,
        keep_going,
    };
    Ok(Options { campaign, shrink, coverage })
}

/// A progress line that is overwritten, if standard error is a terminal.
struct Bar {
    start: Instant,
    last: Instant,
    shown: bool,
}

impl Bar {
    const WIDTH: u64 = 30;

    fn new() -> Self {
        let now = Instant::now();
        Self { start: now, last: now, shown: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, campaign: &Campaign, progress: Progress) {
        if !self.shown || self.last.elapsed() < Duration::from_millis(500) {
            return;
        }
        self.last = Instant::now();
        let Progress { runs, failures } = progress;
        let rate = runs as f64 / self.start.elapsed().as_secs_f64();
        let by_seeds = runs as f64 / campaign.seeds as f64;
        let by_time = campaign.deadline.map_or(0.0, |deadline| {
            let left = deadline.saturating_duration_since(self.last).as_secs_f64();
            let passed = self.start.elapsed().as_secs_f64();
            passed / (passed + left)
        });
        let full = ((by_seeds.max(by_time) * Self::WIDTH as f64) as u64).min(Self::WIDTH);
        let bar = "=".repeat(full as usize) + &" ".repeat((Self::WIDTH - full) as usize);
        eprint!("\r[{bar}] {runs} seeds, {rate:.0} a second, {failures} failed ");
        // Failing to print progress is not an error.
        let _ = std::io::stderr().flush();
    }

    fn end(&self) {
        if self.shown {
            eprint!("\r{:80}\r", "");
        }
    }
}

/// Prints the failures, the first one reduced as far as possible.
fn explain(totals: &Totals, shrink: bool) {
    for violation in totals.violations.values() {
        eprintln!("{violation}\nreproduce: serval-sim {}", violation.case);
    }
    if let Some(first) = totals.violations.values().next().filter(|_| shrink) {
        let small = first.shrink();
        eprintln!("smallest: {small}\nreproduce: serval-sim {} --trace", small.case);
    }
}

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--faults") {
        Fault::ALL.iter().for_each(|fault| println!("{}", fault.name()));
        return ExitCode::SUCCESS;
    }
    let Options { campaign, shrink, coverage } = match options(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    // A panic is reported as a violation; reducing a case repeats it hundreds of times.
    std::panic::set_hook(Box::new(|_| {}));
    let mut bar = Bar::new();
    let start = Instant::now();
    let totals = campaign.run(|progress| bar.show(&campaign, progress));
    bar.end();
    let seconds = start.elapsed().as_secs_f64();
    println!("{totals}");
    let unreached = totals.unreached();
    println!(
        "{{\"event\":\"seeds\",\"first\":{},\"seeds\":{},\"violations\":{},\"events\":{},\"never_happened\":{},\
         \"threads\":{},\"seconds\":{seconds:.0},\"seeds_per_second\":{:.0}}}",
        campaign.first.seed,
        totals.runs,
        totals.violations.len(),
        totals.events,
        unreached.len(),
        campaign.jobs,
        totals.runs as f64 / seconds
    );
    explain(&totals, shrink);
    let unreached = if coverage { unreached } else { Vec::new() };
    unreached.iter().for_each(|what| eprintln!("{what}"));
    match totals.violations.is_empty() && unreached.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
