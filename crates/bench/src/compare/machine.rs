//! The machine and the source of a measurement.

use std::fs;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

static BUILT_FROM: OnceLock<&'static str> = OnceLock::new();

/// Sets the sources that this program was built from, as `tools/source-tree` prints them; independent of the folder in
/// which the program runs. The first call counts. The program sets it instead of a constant here, so that a new commit
/// does not compile this crate again.
pub fn set_built_from(built_from: &'static str) {
    let _ = BUILT_FROM.set(built_from);
}

/// What this program was built from: the commit, whether the sources differed from it, and their hash. Empty where the build did not set it.
pub fn built_from() -> (String, bool, String) {
    sources(BUILT_FROM.get().copied().unwrap_or_default())
}

/// The machine and the source that was measured. Fields that the host does not provide are empty.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Release of the host kernel.
    pub host_kernel: String,
    /// Frequency governor of the first core.
    pub governor: String,
    /// The commit that this program was built from: the last one that changed the sources. Empty if the build did not
    /// set it.
    pub commit: String,
    /// The hash of the sources without documentation; empty if they differed from the commit.
    pub tree: String,
    /// Whether the sources differed from the commit.
    pub dirty: bool,
    /// The time, in UTC.
    pub date: String,
}

impl Machine {
    /// Why a record of this build proves nothing, if it does not: these sources cannot be built again.
    pub fn unknown_sources(&self) -> Option<&'static str> {
        match (self.commit.is_empty(), self.dirty) {
            (true, _) => Some(
                "this program does not know its commit: `make build` in a git checkout sets it",
            ),
            (_, true) => Some("this program was built from sources that are in no commit"),
            _ => None,
        }
    }

    /// This machine, now.
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
        let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
        let (commit, dirty, tree) = built_from();
        Self {
            cpu: model.unwrap_or_default().trim_start_matches([' ', '\t', ':']).to_owned(),
            cores: sys::affinity::allowed_cores().map_or(1, |cores| cores.len()),
            host_kernel: sys::probe::host_kernel_release(),
            governor: fs::read_to_string(governor).unwrap_or_default().trim().to_owned(),
            commit,
            tree,
            dirty,
            date: date(),
        }
    }
}

/// Commit, whether the sources differed from it, and their hash.
fn sources(built_from: &str) -> (String, bool, String) {
    let (commit, tree) = built_from.trim().split_once(' ').unwrap_or((built_from.trim(), ""));
    match commit.strip_suffix("-dirty") {
        Some(commit) => (commit.to_owned(), true, String::new()),
        None => (commit.to_owned(), false, tree.to_owned()),
    }
}

/// Now, as in `2026-03-01T12:00:00Z`.
fn date() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date_of(now.as_secs())
}

/// Days of the civil calendar are counted in eras of 400 years that begin in March (H. Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", civil_from_days).
fn date_of(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + later;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_772_366_400, "2026-03-01T12:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date_of(seconds), date);
        }
    }

    #[test]
    fn the_sources_of_a_build_are_its_commit_and_their_hash() {
        let of = |text: &str| {
            let (commit, dirty, tree) = sources(text);
            let machine = Machine { commit, dirty, tree, ..Machine::here() };
            (machine.clone(), machine.unknown_sources().is_some())
        };
        let (clean, unknown) = of("46c35512 a3eec13b\n");
        assert_eq!((&clean.commit[..], &clean.tree[..]), ("46c35512", "a3eec13b"));
        assert!(!clean.dirty && !unknown);
        let (dirty, unknown) = of("46c35512-dirty");
        assert_eq!((&dirty.commit[..], &dirty.tree[..]), ("46c35512", ""));
        assert!(dirty.dirty && unknown);
        assert!(of("").1);
    }

    #[test]
    fn this_machine_has_cores_and_a_host_kernel() {
        let here = Machine::here();
        assert!(here.cores > 0 && !here.host_kernel.is_empty());
        assert!(here.date.ends_with('Z') && here.date.len() == 20);
    }
}
