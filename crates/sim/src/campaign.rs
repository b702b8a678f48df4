//! Runs many seeds on several threads and sums up the results.
//!
//! Threads take seeds from one counter, so the assignment of seeds to threads is random; the run of a seed
//! is not, and the sums do not depend on the order. [`Totals::unreached`] names what no run
//! did: a fault that never occurred, and a drop reason with a cause that never occurred, test nothing.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use wire::DropReason;

use crate::case::Case;
use crate::causes::is_ever_caused;
use crate::fault::{Fault, FaultCounts};
use crate::rng::mix;
use crate::run::{Report, Violation, simulate};
use crate::shared::lock;

/// What to run.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The first seed, and the reductions that apply to every case of the campaign.
    pub first: Case,
    /// Number of consecutive seeds.
    pub seeds: u64,
    /// No seed is started after this time.
    pub deadline: Option<Instant>,
    /// Threads.
    pub jobs: usize,
    /// Prints every event to stderr.
    pub trace: bool,
    /// Continues after a seed that fails.
    pub keep_going: bool,
}

/// Progress of a campaign.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Seeds run.
    pub runs: u64,
    /// Seeds that failed.
    pub failures: u64,
}

/// Sums over all runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Totals {
    /// Seeds run.
    pub runs: u64,
    /// A hash of all events of all runs.
    pub trace_hash: u64,
    /// Events.
    pub events: u64,
    /// Virtual time, in milliseconds.
    pub virtual_ms: u64,
    /// The engine's counters by name.
    pub counters: BTreeMap<&'static str, u64>,
    /// The engine's losses by reason.
    pub lost: [u64; DropReason::COUNT],
    /// The faults.
    pub fault_counts: FaultCounts,
    /// Failures by seed.
    pub violations: BTreeMap<u64, Violation>,
}

impl Totals {
    fn new() -> Self {
        Self {
            runs: 0,
            trace_hash: 0,
            events: 0,
            virtual_ms: 0,
            counters: BTreeMap::new(),
            lost: [0; DropReason::COUNT],
            fault_counts: FaultCounts::default(),
            violations: BTreeMap::new(),
        }
    }

    fn add(&mut self, seed: u64, outcome: Result<Report, Violation>) {
        self.runs += 1;
        let report = match outcome {
            Ok(report) => report,
            Err(violation) => {
                self.violations.insert(seed, violation);
                return;
            }
        };
        self.trace_hash = self.trace_hash.wrapping_add(mix(report.trace_hash ^ mix(seed)));
        self.events += report.events;
        self.virtual_ms += report.took_ns / 1_000_000;
        self.fault_counts.add(&report.fault_counts);
        for service in &report.services {
            for (name, _, value) in service.named() {
                *self.counters.entry(name).or_default() += value;
            }
            for (sum, lost) in self.lost.iter_mut().zip(service.drops) {
                *sum += lost;
            }
        }
    }

    /// Faults and drop reasons that never occurred, by name.
    pub fn unreached(&self) -> Vec<String> {
        let quiet = Fault::ALL.iter().filter(|fault| self.fault_counts.count(**fault) == 0);
        let faults = quiet.map(|fault| format!("the fault {} never occurred", fault.name()));
        let caused = DropReason::ALL.iter().filter(|reason| is_ever_caused(**reason));
        let lost = caused.filter(|reason| self.lost[**reason as usize] == 0);
        let lost = lost.map(|reason| format!("nothing was lost for {}", reason.name()));
        let unused =
            ["bundles", "in_place"].into_iter().filter(|name| self.counters.get(name) == Some(&0));
        faults.chain(lost).chain(unused.map(|name| format!("{name} is 0"))).collect()
    }
}

impl Display for Totals {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let hours = self.virtual_ms as f64 / 3_600_000.0;
        writeln!(
            f,
            "{} events in {hours:.2} virtual hours, trace {:#018x}",
            self.events, self.trace_hash
        )?;
        let messages = self.counters.iter().map(|(name, value)| (*name, *value));
        let faults = Fault::ALL.iter().map(|fault| (fault.name(), self.fault_counts.count(*fault)));
        let losses = DropReason::ALL.iter().zip(self.lost).map(|(r, lost)| (r.name(), lost));
        table(f, "messages", messages)?;
        table(f, "faults", faults)?;
        table(f, "losses", losses)?;
        write!(f, "{} seeds, {} violations", self.runs, self.violations.len())
    }
}

/// Counts by name, several per line.
fn table(
    f: &mut Formatter<'_>,
    title: &str,
    counts: impl Iterator<Item = (&'static str, u64)>,
) -> std::fmt::Result {
    const COLUMNS: usize = 4;
    write!(f, "{title}")?;
    for (number, (name, count)) in counts.enumerate() {
        write!(f, "{}  {name:20} {count:>12}", if number % COLUMNS == 0 { "\n" } else { "" })?;
    }
    writeln!(f)
}

impl Campaign {
    /// A campaign of `seeds` seeds from `first` on one thread, which ends at the first failure.
    pub fn new(first: impl Into<Case>, seeds: u64) -> Self {
        let first = first.into();
        Self { first, seeds, deadline: None, jobs: 1, trace: false, keep_going: false }
    }

    fn case(&self, number: u64) -> Case {
        Case { seed: self.first.seed.wrapping_add(number), ..self.first.clone() }
    }

    /// Runs the seeds; `tell` is called with the progress at intervals.
    pub fn run(&self, mut tell: impl FnMut(Progress)) -> Totals {
        let totals = Mutex::new(Totals::new());
        let next = AtomicU64::new(0);
        let stop = AtomicBool::new(false);
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
                if number >= self.seeds || late {
                    return;
                }
                let case = self.case(number);
                let outcome = simulate(&case, self.trace);
                if outcome.is_err() && !self.keep_going {
                    stop.store(true, Ordering::Relaxed);
                }
                lock(&totals).add(case.seed, outcome);
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.jobs.max(1)).map(|_| scope.spawn(work)).collect();
            while !threads.iter().all(ScopedJoinHandle::is_finished) {
                std::thread::sleep(Duration::from_millis(20));
                let totals = lock(&totals);
                let failures = totals.violations.len() as u64;
                tell(Progress { runs: totals.runs, failures });
            }
        });
        totals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
