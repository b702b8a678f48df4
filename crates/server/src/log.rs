//! Log lines on standard error and standard output of a server, whose threads must never wait for either.
//!
//! A full disk, a closed pipe or a pipe without a reader must not stop a thread. So [`Lines`] has a bounded queue and
//! a thread that writes. If the queue is full, or the descriptor does not accept a line, the line is dropped and
//! counted. The descriptor stays in blocking mode: a terminal shares that mode with the shell.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Maximum number of queued lines, and of their bytes.
const LINES_MAX: usize = 1024;
const BYTES_MAX: u64 = 4 << 20;
/// Interval of checks whether the queue has been written, or a descriptor is ready again.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long a panicking thread waits until its message is written.
const PANIC_FLUSH: Duration = Duration::from_millis(100);

/// A queue of lines with a thread that writes them to a descriptor.
pub struct Lines {
    queue: SyncSender<Vec<u8>>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    queued: AtomicU64,
    /// Of those: written, or dropped by the writing thread.
    settled: AtomicU64,
    dropped: AtomicU64,
    /// Bytes of the queued lines.
    bytes: AtomicU64,
}

impl Counts {
    fn settle(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.settled.fetch_add(1, Ordering::Relaxed);
    }
}

impl Lines {
    /// Starts the thread that writes to (a duplicate of) `to`.
    pub fn start(name: &str, to: impl AsFd) -> io::Result<Self> {
        let file = File::from(to.as_fd().try_clone_to_owned()?);
        let (queue, inbox) = mpsc::sync_channel(LINES_MAX);
        let counts = Arc::<Counts>::default();
        let of_writer = counts.clone();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || write_lines(file, &inbox, &of_writer))?;
        Ok(Self { queue, counts })
    }

    /// Queues one or more complete lines; never waits.
    pub fn push(&self, text: &[u8]) {
        let counts = &self.counts;
        let bytes = text.len() as u64;
        // Counted before the writer can count it as done.
        counts.queued.fetch_add(1, Ordering::Relaxed);
        let fits = counts.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes <= BYTES_MAX;
        if !fits || self.queue.try_send(text.to_vec()).is_err() {
            counts.dropped.fetch_add(1, Ordering::Relaxed);
            counts.settle(bytes);
        }
    }

    /// Number of dropped lines.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Ordering::Relaxed)
    }

    /// Waits until the currently queued lines are written or dropped, at most for `limit`.
    pub fn flush(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let queued = self.counts.queued.load(Ordering::Relaxed);
        while self.counts.settled.load(Ordering::Relaxed) < queued && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

fn write_lines(mut file: File, inbox: &Receiver<Vec<u8>>, counts: &Counts) {
    let mut told = 0;
    while let Ok(line) = inbox.recv() {
        let dropped = counts.dropped.load(Ordering::Relaxed);
        let written = if dropped == told {
            write_all(&mut file, &line)
        } else {
            let lost = dropped - told;
            let notice = format!("{lost} log lines were dropped: they could not be written\n");
            write_all(&mut file, notice.as_bytes()).and_then(|()| {
                told = dropped;
                write_all(&mut file, &line)
            })
        };
        if written.is_err() {
            counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
        counts.settle(line.len() as u64);
    }
}

/// Like [`Write::write_all`], and waits if the descriptor is in non-blocking mode.
fn write_all(file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(POLL_INTERVAL)
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Standard error of this process, once [`start`] has run.
static LOG: OnceLock<Lines> = OnceLock::new();

/// From now on the log, panic messages and [`say`] go through a queue to standard error.
pub fn start() {
    // Without a thread lines are written directly: a server does not start in that case, and other commands may
    // block.
    if let Ok(lines) = Lines::start("serval-log", io::stderr()) {
        let _ = LOG.set(lines);
    }
    std::panic::set_hook(Box::new(report_panic));
}

fn report_panic(info: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    // Empty unless RUST_BACKTRACE is set.
    let trace = std::backtrace::Backtrace::capture();
    match trace.status() {
        std::backtrace::BacktraceStatus::Captured => {
            say(&format!("thread '{name}' {info}\n{trace}"));
        }
        _ => say(&format!("thread '{name}' {info}")),
    }
    flush(PANIC_FLUSH);
}

/// Writes a line to standard error.
pub fn say(text: &str) {
    let _ = writer().write_all(format!("{text}\n").as_bytes());
}

/// Waits until the log lines are written or dropped, at most for `limit`.
pub fn flush(limit: Duration) {
    if let Some(lines) = LOG.get() {
        lines.flush(limit);
    }
}

/// Number of log lines that could not be written to standard error.
pub fn dropped() -> u64 {
    LOG.get().map_or(0, Lines::dropped)
}

/// The writer of the log.
pub fn writer() -> LogWriter {
    LogWriter
}

/// Takes a complete line with each write, and never fails.
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match LOG.get() {
            Some(lines) => lines.push(line),
            None => {
                let _ = io::stderr().write_all(line);
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_unread_pipe_blocks_no_thread_and_later_reports_dropped_lines() {
        for bytes in [100, 16 << 10] {
            an_unread_pipe(bytes);
        }
    }

    fn an_unread_pipe(bytes: usize) {
        let (mut reader, writer) = io::pipe().unwrap();
        let lines = Lines::start("test-log", &writer).unwrap();
        drop(writer);
        // More than the pipe and the queue accept, by number or by size.
        let line = [vec![b'x'; bytes], b"\n".to_vec()].concat();
        let count = 3 * LINES_MAX as u64;
        for _ in 0..count {
            lines.push(&line);
        }
        lines.flush(Duration::from_millis(1));
        let dropped = lines.dropped();
        assert!(dropped > LINES_MAX as u64, "{dropped}");
        assert!(lines.counts.bytes.load(Ordering::Relaxed) <= BYTES_MAX);
        let read = std::thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            text
        });
        lines.flush(LONG);
        lines.push(b"after\n");
        lines.flush(LONG);
        drop(lines);
        let text = read.join().unwrap();
        let whole = text.lines().filter(|line| line.ends_with("xxx")).count() as u64;
        assert_eq!(whole + dropped, count);
        // One or more notices: the writer may have written a line between two drops.
        let notices = text.lines().filter_map(|line| line.split_once(" log lines were dropped: "));
        let told: u64 = notices.map(|(lost, _)| lost.parse::<u64>().unwrap()).sum();
        assert_eq!(told, dropped);
        assert!(text.ends_with("after\n"));
    }

    #[test]
    fn a_closed_pipe_and_a_full_disk_only_lose_lines() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let full = File::options().write(true).open("/dev/full").unwrap();
        for lines in [Lines::start("test-log", writer), Lines::start("test-log", full)] {
            let lines = lines.unwrap();
            for _ in 0..3 {
                lines.push(b"lost\n");
            }
            lines.flush(LONG);
            assert_eq!(lines.dropped(), 3);
        }
    }
}
