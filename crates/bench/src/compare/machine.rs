//! The machine and the source of a measurement.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// The commit that this program was built from, with the suffix `-dirty` if the sources differed; set by `make
/// build`. It is independent of the folder in which the program runs.
pub(crate) const BUILT_FROM: Option<&str> = option_env!("SERVAL_BUILT_FROM");

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
    /// The commit that the programs were built from: `SERVAL_COMMIT`, for programs that were copied to this machine;
    /// otherwise the commit recorded by the build (`BUILT_FROM`).
    pub commit: String,
    /// Whether the sources differed from it.
    pub dirty: bool,
    /// The time, in UTC.
    pub date: String,
}

impl Machine {
    /// This machine, now.
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
        let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
        let given = std::env::var("SERVAL_COMMIT").ok().filter(|commit| !commit.is_empty());
        let built_from = given.or_else(|| BUILT_FROM.map(str::to_owned)).unwrap_or_default();
        let commit = built_from.trim_end_matches("-dirty").to_owned();
        Self {
            cpu: model.unwrap_or_default().trim_start_matches([' ', '\t', ':']).to_owned(),
            cores: sys::affinity::allowed_cores().map_or(1, |cores| cores.len()),
            host_kernel: sys::probe::host_kernel_release(),
            governor: fs::read_to_string(governor).unwrap_or_default().trim().to_owned(),
            dirty: commit != built_from,
            commit,
            date: date(),
        }
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
    fn this_machine_has_cores_and_a_host_kernel() {
        let here = Machine::here();
        assert!(here.cores > 0 && !here.host_kernel.is_empty());
        assert!(here.date.ends_with('Z') && here.date.len() == 20);
    }
}
