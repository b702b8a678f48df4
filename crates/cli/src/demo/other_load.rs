//! Whether other programs used the machine's cores during a measurement, so that its figures say nothing.
//!
//! The time of all cores from `/proc/stat`, without that of this process and its children.

use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

/// Cores that a demo needs for itself: one for the servers and one for the client.
const NEEDED: f64 = 2.0;
/// What an idle machine uses all the same, in cores.
const ALLOWED: f64 = 0.2;
/// Ticks of `/proc` in a second.
const TICKS_PER_SECOND: f64 = 100.0;

/// A measurement that has begun.
pub(super) struct OtherLoad {
    begin: Option<Ticks>,
    since: Instant,
}

/// Ticks of processor time until now.
#[derive(Clone, Copy, Debug)]
struct Ticks {
    /// Of the cores that this process may use: everything but idle time.
    busy: u64,
    /// Of this process, its children and theirs.
    own: u64,
}

impl OtherLoad {
    pub(super) fn begin() -> Self {
        Self { begin: Ticks::now(), since: Instant::now() }
    }

    /// Why the figures since the beginning mean nothing, in one sentence; `None`: the machine was free, or `/proc` does not say.
    pub(super) fn disturbance(&self) -> Option<String> {
        let (begin, now) = (self.begin?, Ticks::now()?);
        let seconds = self.since.elapsed().as_secs_f64();
        // A container's limit of processor time is not known here: it has the cores that it may run on.
        let cores = sys::affinity::allowed_cores().map_or(1, |cores| cores.len()) as f64;
        let used = used_by_others(begin, now, seconds);
        (used > room(cores)).then(|| {
            format!("other programs used {used:.1} of {cores} cores meanwhile, run it again on an idle machine")
        })
    }
}

/// Cores that others may use without being in the way.
fn room(cores: f64) -> f64 {
    (cores - NEEDED).max(0.0) + ALLOWED
}

/// In cores.
fn used_by_others(begin: Ticks, now: Ticks, seconds: f64) -> f64 {
    let busy = now.busy.saturating_sub(begin.busy);
    let others = busy.saturating_sub(now.own.saturating_sub(begin.own));
    others as f64 / TICKS_PER_SECOND / seconds.max(0.001)
}

impl Ticks {
    fn now() -> Option<Self> {
        let allowed = sys::affinity::allowed_cores().ok()?;
        let busy = busy(&fs::read_to_string("/proc/stat").ok()?, &allowed)?;
        // Of each process: its parent and its time.
        let mut processes = BTreeMap::new();
        for entry in fs::read_dir("/proc").ok()?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            processes.extend(of_process(&stat).map(|of| (pid, of)));
        }
        Some(Self { busy, own: own(&processes, std::process::id()) })
    }
}

/// The lines of these cores: user, nice, system, idle, iowait, irq, softirq, steal. Guests are in user.
fn busy(stat: &str, cores: &[usize]) -> Option<u64> {
    let of_core = |core: &usize| {
        let name = format!("cpu{core} ");
        let words = stat.lines().find_map(|line| line.strip_prefix(&name))?;
        let ticks = words.split_ascii_whitespace().map(|word| word.parse().ok());
        let ticks: Vec<u64> = ticks.collect::<Option<_>>()?;
        Some(ticks.iter().take(8).sum::<u64>() - ticks.get(3)? - ticks.get(4)?)
    };
    cores.iter().map(of_core).sum()
}

/// The parent of a process, and its ticks with those of children that have ended.
fn of_process(stat: &str) -> Option<(u32, u64)> {
    let words: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let ticks = words.get(11..15)?.iter().map(|word| word.parse::<u64>().ok());
    Some((words.get(1)?.parse().ok()?, ticks.sum::<Option<u64>>()?))
}

/// Ticks of a process and of everything below it.
fn own(processes: &BTreeMap<u32, (u32, u64)>, this: u32) -> u64 {
    let is_below = |mut pid: u32| {
        // A chain of parents is shorter than the list of processes.
        for _ in 0..processes.len() {
            match processes.get(&pid) {
                _ if pid == this => return true,
                Some((parent, _)) => pid = *parent,
                None => return false,
            }
        }
        false
    };
    processes.iter().filter(|(pid, _)| is_below(**pid)).map(|(_, (_, ticks))| ticks).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_machine_and_of_processes_are_read() {
        let stat = "cpu  9 9 9\ncpu0 10 2 30 1000 50 1 2 3 9 0\ncpu1 1 0 0 5 5 0 0 0\ncpu10 7 0 0 0 0 0 0 0\n";
        assert_eq!(busy(stat, &[0]), Some(48));
        assert_eq!(busy(stat, &[0, 1]), Some(49));
        assert_eq!(busy(stat, &[2]), None);
        let stat = "7 (a) b) S 3 7 7 0 -1 0 0 0 0 0 11 22 5 6 20 0 1 0";
        assert_eq!(of_process(stat), Some((3, 44)));
        assert_eq!(of_process("7 (a) S"), None);
    }

    #[test]
    fn children_count_as_this_process() {
        let processes =
            BTreeMap::from([(1, (0, 5)), (7, (1, 10)), (8, (7, 20)), (9, (8, 40)), (10, (1, 80))]);
        assert_eq!(own(&processes, 7), 70);
        let ticks = |busy, own| Ticks { busy, own };
        assert_eq!(used_by_others(ticks(100, 50), ticks(400, 150), 2.0), 1.0);
        // Two cores have no room for others, sixteen have.
        assert!(room(2.0) < 0.5 && room(16.0) > 10.0);
    }

    #[test]
    fn a_measurement_on_this_machine_ends() {
        // Busy or not: that is not for a test to say.
        let _ = OtherLoad::begin().disturbance();
    }
}
