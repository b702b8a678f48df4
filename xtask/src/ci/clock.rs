//! How long everything took, and whether it may take so long.
//!
//! `make test` is to stay under [`MINUTES_MAX`] on [`CORES`] cores that have nothing else to do. Where others
//! took a part of the processors, a long run shows nothing about it and is only told.

use std::time::{Duration, Instant};

/// The longest that everything may take, in minutes.
const MINUTES_MAX: u64 = 25;
/// What it may take so long on; with fewer cores it may take longer.
const CORES: usize = 2;
/// Others took too much to judge by, in hundredths of the time of the processors.
const OTHERS_PERCENT_MAX: u64 = 10;

/// Runs since the first step.
pub(super) struct Clock {
    start: Instant,
    /// Nothing had been built before.
    cold: bool,
    used: Option<Used>,
}

/// Processor time, in ticks.
#[derive(Clone, Copy)]
struct Used {
    /// Of the whole machine, idle or not.
    all: u64,
    /// Of it, not idle.
    busy: u64,
    /// Of it, what this program's children used, once they have ended.
    own: u64,
}

/// What the time says.
pub(super) struct Verdict {
    pub(super) text: String,
    /// And nothing but what was run is the cause.
    pub(super) too_long: bool,
}

impl Clock {
    pub(super) fn start() -> Self {
        // The last of all steps that build for themselves fills it.
        let cold = !crate::files::root().join("target/asan").exists();
        Self { start: Instant::now(), cold, used: Used::now() }
    }

    /// Nothing where the machine has fewer cores than the promise is for.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        let cores = crate::side_by_side::cores();
        let others = self.used.zip(Used::now()).and_then(|(from, to)| others_percent(from, to));
        let verdict = || judge(self.start.elapsed(), others);
        let verdict = || match verdict() {
            Verdict { text, too_long: true } if self.cold => {
                let text = text.replace(": TOO LONG", ": not judged, all of it was built first");
                Verdict { text, too_long: false }
            }
            verdict => verdict,
        };
        (cores >= CORES).then(verdict)
    }
}

fn judge(time: Duration, others_percent: Option<u64>) -> Verdict {
    let minutes = time.as_secs_f64() / 60.0;
    let text = format!("time: {minutes:.1} of at most {MINUTES_MAX} minutes");
    if time <= Duration::from_secs(MINUTES_MAX * 60) {
        return Verdict { text, too_long: false };
    }
    match others_percent {
        Some(others) if others <= OTHERS_PERCENT_MAX => {
            Verdict { text: text + ": TOO LONG", too_long: true }
        }
        Some(others) => {
            let why = format!(": not judged, others used {others} % of the processors");
            Verdict { text: text + &why, too_long: false }
        }
        None => {
            let why = ": not judged, the machine does not say what others used";
            Verdict { text: text + why, too_long: false }
        }
    }
}

/// What others used of the processors between two moments.
fn others_percent(from: Used, to: Used) -> Option<u64> {
    let own = to.own.checked_sub(from.own)?;
    let others = to.busy.checked_sub(from.busy)?.saturating_sub(own);
    (100 * others).checked_div(to.all.checked_sub(from.all)?)
}

impl Used {
    fn now() -> Option<Self> {
        let machine = std::fs::read_to_string("/proc/stat").ok()?;
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        Self::read(&machine, &own)
    }

    /// From the texts of /proc/stat and /proc/self/stat, see proc(5).
    fn read(machine: &str, own: &str) -> Option<Self> {
        let numbers = |text: &str| -> Vec<u64> {
            text.split_whitespace().map_while(|word| word.parse().ok()).collect()
        };
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are counted as users.
        let times = numbers(machine.strip_prefix("cpu ")?);
        let [user, nice, system, idle, waiting, irq, soft, stolen, ..] = times[..] else {
            return None;
        };
        let busy = user + nice + system + irq + soft + stolen;
        // After the name in brackets: state, then numbers from the fourth field on; cutime is the 16th.
        let after = own.rsplit_once(')')?.1.split_whitespace().skip(13);
        let children: Vec<u64> = after.take(2).filter_map(|word| word.parse().ok()).collect();
        let [user, system] = children[..] else { return None };
        Some(Self { all: busy + idle + waiting, busy, own: user + system })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_fails_only_where_nobody_else_is_to_blame() {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        assert!(!judge(minutes(24), Some(0)).too_long);
        assert!(judge(minutes(26), Some(3)).too_long);
        assert!(judge(minutes(26), Some(3)).text.ends_with("TOO LONG"));
        assert!(!judge(minutes(26), Some(40)).too_long);
        assert!(!judge(minutes(26), None).too_long);
    }

    #[test]
    fn what_others_used_is_what_children_did_not() {
        let own = |ticks| format!("17 (a) b) R 1 1 1 0 -1 0 1 2 3 4 50 60 {ticks} 30 20 0 1 0 9 9");
        let machine = |user| format!("cpu  {user} 10 20 1000 5 1 2 3 0 0\ncpu0 1 2 3\n");
        let from = Used::read(&machine(100), &own(70)).unwrap();
        assert_eq!((from.all, from.busy, from.own), (1141, 136, 100));
        let to = Used::read(&machine(300), &own(170)).unwrap();
        assert_eq!(others_percent(from, to), Some(50));
        assert!(Used::read("cpu 1 2\n", &own(0)).is_none());
        assert!(Used::now().is_some_and(|used| used.busy <= used.all));
    }
}
