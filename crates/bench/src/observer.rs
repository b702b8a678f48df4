//! The server's resource use, read from outside during the measurement.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use super::{BenchError, Plan, ServerCost};

/// Interval of checks whether the client has ended.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum size of a page of metrics, and the time limit for reading it.
const PAGE_BYTES_MAX: u64 = 16 << 20;
const PAGE_TIME: Duration = Duration::from_secs(5);
/// The counter of the workers' time.
const WORKER_TIME: &str = "serval_worker_time_seconds_total";

/// Resources used until a point in time.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Duration,
    cpu_s: Option<f64>,
    busy_s: Option<f64>,
}

/// Takes two samples inside the measured part: the difference belongs to the load alone.
pub(super) struct Observer {
    pid: Option<u32>,
    metrics: Option<String>,
    /// Times of the samples.
    first_at: Duration,
    last_at: Duration,
    first: Option<Sample>,
    last: Option<Sample>,
}

impl Observer {
    /// Fails if the requested values cannot be read.
    pub(super) fn new(plan: &Plan) -> Result<Self, BenchError> {
        let margin = plan.duration / 10;
        let observer = Self {
            pid: plan.server_pid,
            metrics: plan.metrics.clone(),
            first_at: plan.warmup + margin,
            last_at: plan.warmup + plan.duration - margin,
            first: None,
            last: None,
        };
        observer.pid.map(cpu_seconds).transpose()?;
        observer.metrics.as_deref().map(busy_seconds).transpose()?;
        Ok(observer)
    }

    /// Takes a sample if it is time.
    pub(super) fn look(&mut self, now: Duration) {
        let is_first = self.first.is_none();
        let due = if is_first { self.first_at } else { self.last_at };
        if now < due || self.last.is_some() {
            return;
        }
        // A process that has ended leaves no sample; its silence makes the run void.
        let sample = Sample {
            at: now,
            cpu_s: self.pid.and_then(|pid| cpu_seconds(pid).ok()),
            busy_s: self.metrics.as_deref().and_then(|url| busy_seconds(url).ok()),
        };
        *(if is_first { &mut self.first } else { &mut self.last }) = Some(sample);
    }

    /// Time until the next check.
    pub(super) fn pause(&self, now: Duration) -> Duration {
        let due = if self.first.is_none() { self.first_at } else { self.last_at };
        match due.checked_sub(now) {
            Some(left) if !left.is_zero() => left.min(PAUSE),
            _ => PAUSE,
        }
    }

    /// The results, as far as requested.
    pub(super) fn cost(&self) -> ServerCost {
        let (Some(first), Some(last)) = (self.first, self.last) else {
            return ServerCost::default();
        };
        let wall_s = (last.at - first.at).as_secs_f64().max(1e-9);
        let used =
            |of: fn(&Sample) -> Option<f64>| Some(((of(&last)? - of(&first)?) / wall_s).max(0.0));
        ServerCost { cores: used(|s| s.cpu_s), busy: used(|s| s.busy_s) }
    }
}

/// CPU time of all threads of a process in seconds: from the scheduler's statistics, or if the host kernel has none,
/// in its ticks of 10 ms (proc(5)).
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64, BenchError> {
    let gone = || {
        let what = format!("no process {pid} whose CPU time can be read");
        BenchError::Observe(format!("{what}: give the server's process id with --server-pid"))
    };
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| gone())?;
    let mut sum_ns = 0;
    for thread in threads.flatten() {
        let statistics = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        let on_cpu = statistics.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        sum_ns += on_cpu.unwrap_or(0);
    }
    if sum_ns > 0 {
        return Ok(sum_ns as f64 / 1e9);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|_| gone())?;
    // The name, in parentheses, may contain anything; utime and stime are the 12th and 13th word after it.
    let words: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
    let (Some(user), Some(system)) = (ticks(11), ticks(12)) else { return Err(gone()) };
    Ok((user + system) as f64 / 100.0)
}

/// Busy time of a Serval engine's workers in seconds, from its metrics.
fn busy_seconds(url: &str) -> Result<f64, BenchError> {
    let failed = |why: String| {
        let fix = "start it with engine.metrics and give the URL that it prints";
        BenchError::Observe(format!("cannot read the server's metrics at {url}: {why}; {fix}"))
    };
    let page = fetch(url).map_err(|error| failed(error.to_string()))?;
    busy_in(&page).ok_or_else(|| failed(format!("there is no {WORKER_TIME} in them")))
}

/// The sum over workers.
fn busy_in(page: &str) -> Option<f64> {
    let lines = page.lines().filter_map(|line| line.strip_prefix(WORKER_TIME));
    let busy = lines.filter(|line| line.contains("state=\"busy\""));
    let seconds = busy.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    seconds.fold(None, |sum, seconds| Some(sum.unwrap_or(0.0) + seconds))
}

/// The body of a page over plain HTTP/1.0 (RFC 1945), delimited by the end of the connection.
fn fetch(url: &str) -> io::Result<String> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let rest = url.strip_prefix("http://").ok_or_else(|| wrong("it is not an http:// URL"))?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, "metrics"));
    let address = host.to_socket_addrs()?.next().ok_or_else(|| wrong("the host has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, PAGE_TIME)?;
    stream.set_read_timeout(Some(PAGE_TIME))?;
    stream.set_write_timeout(Some(PAGE_TIME))?;
    write!(stream, "GET /{path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut page = Vec::new();
    stream.take(PAGE_BYTES_MAX).read_to_end(&mut page)?;
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut headers);
    match response.parse(&page) {
        Ok(httparse::Status::Complete(body)) if response.code == Some(200) => {
            Ok(String::from_utf8_lossy(&page[body..]).into_owned())
        }
        Ok(httparse::Status::Complete(_)) => {
            Err(wrong(&format!("HTTP status {}", response.code.unwrap_or(0))))
        }
        _ => Err(wrong("the answer is not HTTP")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_process_grows_with_its_work() {
        // Not of this process: threads of other tests end meanwhile, and their time is then no longer in the sum.
        let mut busy =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let before = cpu_seconds(busy.id()).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let mut grown = false;
        while !grown && std::time::Instant::now() < deadline {
            grown = cpu_seconds(busy.id()).unwrap() >= before + 0.02;
            std::thread::yield_now();
        }
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert!(grown);
    }

    #[test]
    fn an_unknown_process_is_reported() {
        let error = cpu_seconds(u32::MAX).unwrap_err().to_string();
        assert!(
            error.contains("no process 4294967295") && error.contains("--server-pid"),
            "{error}"
        );
    }

    #[test]
    fn busy_time_is_summed_over_workers() {
        let page = "# TYPE serval_worker_time_seconds counter\n\
            serval_worker_time_seconds_total{worker=\"0\",state=\"busy\"} 1.5\n\
            serval_worker_time_seconds_total{worker=\"0\",state=\"idle\"} 100\n\
            serval_worker_time_seconds_total{worker=\"1\",state=\"busy\"} 2e-1\n";
        assert_eq!(busy_in(page), Some(1.7));
        assert_eq!(busy_in("serval_worker_time_seconds_total{} x"), None);
        assert_eq!(busy_in(""), None);
    }

    #[test]
    fn unreadable_metrics_are_reported_with_the_fix() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for url in [format!("http://{free}/metrics"), "https://127.0.0.1/".into(), "".into()] {
            let error = busy_seconds(&url).unwrap_err().to_string();
            assert!(error.contains("engine.metrics") && error.contains(&url), "{error}");
        }
    }
}
