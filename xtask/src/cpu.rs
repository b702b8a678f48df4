//! Processor time of the commands that this program has run.

use std::fs;

/// Ticks of `/proc/PID/stat` in a second, on every Linux that Rust runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// User and system time of all processes that this one has waited for, and of those that they have waited for, in seconds.
/// 0 where there is no `/proc`.
pub(crate) fn of_children() -> f64 {
    fs::read_to_string("/proc/self/stat").ok().and_then(|stat| read(&stat)).unwrap_or(0.0)
}

/// `cutime` and `cstime`, fields 16 and 17. The second field is a name in parentheses, which may contain spaces.
fn read(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(13);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some((next()? + next()?) as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_children_are_read() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 2000 0 0 11 22 350 150 20 0 1 0 100 1 1";
        assert_eq!(read(stat), Some(5.0));
        assert_eq!(read("7 (a) S 1"), None);
    }
}
