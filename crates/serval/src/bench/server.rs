//! What the server spends, read from outside while it is measured.

use std::fs;
use std::time::Duration;

use super::{BenchError, Plan, ServerCost};

/// Between two looks whether the client has ended.
const PAUSE: Duration = Duration::from_millis(50);

/// What a process has used until a moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Duration,
    cpu_ns: u64,
}

/// Takes two samples inside the measured part: what is between them belongs to the load alone.
pub(super) struct Observer {
    pid: Option<u32>,
    /// When the samples are to be taken.
    first_at: Duration,
    last_at: Duration,
    first: Option<Sample>,
    last: Option<Sample>,
}

impl Observer {
    pub(super) fn new(plan: &Plan) -> Result<Self, BenchError> {
        if let Some(pid) = plan.server_pid {
            cpu_ns(pid)?;
        }
        let margin = plan.duration / 10;
        Ok(Self {
            pid: plan.server_pid,
            first_at: plan.warmup + margin,
            last_at: plan.warmup + plan.duration - margin,
            first: None,
            last: None,
        })
    }

    /// Takes a sample if it is time.
    pub(super) fn look(&mut self, now: Duration) {
        let Some(pid) = self.pid else { return };
        let is_first = self.first.is_none();
        let due = if is_first { self.first_at } else { self.last_at };
        if now < due || self.last.is_some() {
            return;
        }
        // A process that is gone leaves no sample; its silence makes the run void.
        let sample = cpu_ns(pid).ok().map(|cpu_ns| Sample { at: now, cpu_ns });
        if is_first { self.first = sample } else { self.last = sample }
    }

    /// How long to sleep before the next look.
    pub(super) fn pause(&self, now: Duration) -> Duration {
        let due = if self.first.is_none() { self.first_at } else { self.last_at };
        match due.checked_sub(now) {
            Some(left) if !left.is_zero() => left.min(PAUSE),
            _ => PAUSE,
        }
    }

    /// What came out, if anybody asked.
    pub(super) fn cost(&self) -> Result<Option<ServerCost>, BenchError> {
        let (Some(first), Some(last)) = (self.first, self.last) else { return Ok(None) };
        let wall = (last.at - first.at).as_nanos().max(1) as f64;
        let cpu = last.cpu_ns.saturating_sub(first.cpu_ns) as f64;
        Ok(Some(ServerCost { cores: cpu / wall }))
    }
}

/// CPU time of all threads of a process in nanoseconds: from the scheduler's own statistics, or where
/// the host kernel has none, in its ticks of 10 ms (proc(5)).
fn cpu_ns(pid: u32) -> Result<u64, BenchError> {
    let gone = || {
        let what = format!("no process {pid} whose CPU time can be read");
        BenchError::Observe(format!("{what}: give the server's process id with --server-pid"))
    };
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| gone())?;
    let mut sum = 0;
    for thread in threads.flatten() {
        let statistics = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        let on_cpu = statistics.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        sum += on_cpu.unwrap_or(0);
    }
    if sum > 0 {
        return Ok(sum);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|_| gone())?;
    // The name, in parentheses, may hold anything; utime and stime are the 12th and 13th word after it.
    let words: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
    let (Some(user), Some(system)) = (ticks(11), ticks(12)) else { return Err(gone()) };
    Ok((user + system) * 10_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_process_grows_with_its_work() {
        let pid = std::process::id();
        let before = cpu_ns(pid).unwrap();
        let start = sys::time::thread_cpu_ns();
        while sys::time::thread_cpu_ns() - start < 50_000_000 {}
        // A running thread's statistics are as of its last tick.
        assert!(cpu_ns(pid).unwrap() >= before + 20_000_000);
    }

    #[test]
    fn a_process_that_is_none_is_told() {
        let error = cpu_ns(u32::MAX).unwrap_err().to_string();
        assert!(
            error.contains("no process 4294967295") && error.contains("--server-pid"),
            "{error}"
        );
    }
}
