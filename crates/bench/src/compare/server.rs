//! A server under measurement, as a separate process.
//!
//! The contract, for Serval and baselines alike: it prints one line that starts with `ready` and names
//! the URLs it serves (or, with `--json`, the same as an object with `"event":"ready"`), serves until
//! SIGTERM, prints as its last line a JSON object with `messages` (replies sent), `busy_ns` (time in
//! turns that found work) and `cpu_ns` (CPU time of the process), and exits with code 0.
//!
//! Every measurement has its own server. An idle server may spin and take the core from the other side, and the
//! resources that a process happens to get from the host (its pages, its ports) are different for every measurement
//! instead of the same for all.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json};

use crate::report::LOST_MAX;

/// Longest time until the `ready` line.
pub const START_MAX: Duration = Duration::from_secs(20);
/// Longest time from SIGTERM to the end.
pub const STOP_MAX: Duration = Duration::from_secs(10);
/// Number of lines of standard error that are kept to explain a failure.
const STDERR_LINES: usize = 8;
/// Maximum length of an output line.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Why a side could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// It cannot be started.
    #[error("cannot start `{command}`: {error}")]
    Start {
        /// The command line.
        command: String,
        /// The host kernel's error.
        error: std::io::Error,
    },
    /// It ended before it was asked to.
    #[error("`{command}` ended by itself ({status}){said}")]
    Ended {
        /// The command line.
        command: String,
        /// Exit status.
        status: ExitStatus,
        /// The end of its standard error.
        said: String,
    },
    /// No `ready` line came.
    #[error("`{command}` printed no line that starts with `ready` within {seconds} s{said}")]
    NotReady {
        /// The command line.
        command: String,
        /// The time waited.
        seconds: f64,
        /// The end of its standard error.
        said: String,
    },
    /// The `ready` line has no such URL.
    #[error("`{command}` is ready but names no {scheme}:// URL: {line:?}")]
    NoUrl {
        /// The command line.
        command: String,
        /// The requested scheme.
        scheme: String,
        /// The `ready` line.
        line: String,
    },
    /// It did not end, and was killed.
    #[error("`{command}` did not end within {seconds} s of {why} and was killed")]
    Hung {
        /// The command line.
        command: String,
        /// The time waited.
        seconds: f64,
        /// The event that should have ended it.
        why: &'static str,
    },
    /// It ended with a non-zero exit code.
    #[error("`{command}` failed ({status}){said}")]
    Failed {
        /// The command line.
        command: String,
        /// Exit status.
        status: ExitStatus,
        /// The end of its standard error.
        said: String,
    },
    /// Its last line is invalid.
    #[error("the last line of `{command}` must be a JSON object{wanted}: {line:?}")]
    Garbage {
        /// The command line.
        command: String,
        /// The required content.
        wanted: &'static str,
        /// The line.
        line: String,
    },
}

/// A process whose output is read continuously. Killed when dropped.
struct Process {
    command: String,
    child: Child,
    lines: Receiver<String>,
    stderr: Option<JoinHandle<VecDeque<String>>>,
}

impl Process {
    /// Starts a command line on some cores; none: on any.
    fn start(command: &str, cores: &[usize]) -> Result<Self, ServerError> {
        let failed = |error| ServerError::Start { command: command.to_owned(), error };
        // The shell parses the line and is replaced by the program.
        let mut started = Command::new("sh");
        started
            .args(["-c", &format!("exec {command}")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is handled by this process, which ends the others in order; processes that they start can be
            // killed with them.
            .process_group(0);
        // A spinning server must end if this process is killed.
        sys::process::tie(&mut started, cores);
        let mut child = started.spawn().map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (sender, lines) = channel();
        let stdout = BufReader::new(stdout.expect("it is piped"));
        // Ends with the pipe.
        std::thread::spawn(move || each_line(stdout, |line| sender.send(line).is_ok()));
        let stderr = BufReader::new(stderr.expect("it is piped"));
        let stderr = std::thread::spawn(move || {
            let mut last = VecDeque::new();
            each_line(stderr, |line| {
                if last.len() == STDERR_LINES {
                    last.pop_front();
                }
                last.push_back(line);
                true
            });
            last
        });
        Ok(Self { command: command.to_owned(), child, lines, stderr: Some(stderr) })
    }

    /// Reads the output up to its end; returns the last line that is not empty.
    fn last_line(&mut self, deadline: Instant) -> Option<String> {
        let mut last = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.trim().is_empty() => {}
                Ok(line) => last = Some(line),
                Err(RecvTimeoutError::Disconnected) => return last,
                Err(RecvTimeoutError::Timeout) => return None,
            }
        }
    }

    /// Waits for the end; kills the process if it does not end in time.
    fn wait(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                _ => {
                    self.kill();
                    return None;
                }
            }
        }
    }

    fn kill(&mut self) {
        // Both fail only if it has ended already.
        let _ = sys::process::kill_group(self.child.id());
        let _ = self.child.wait();
    }

    /// The end of standard error as a part of a sentence. The process has ended.
    fn said(&mut self) -> String {
        let lines = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let lines = lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty());
        match lines.collect::<Vec<_>>().join(" / ") {
            said if said.is_empty() => said,
            said => format!("; it said: {said}"),
        }
    }

    /// The JSON object of the last line, if the process succeeded.
    fn finish(
        mut self,
        time: Duration,
        why: &'static str,
        wanted: &'static str,
    ) -> Result<Map<String, Json>, ServerError> {
        let command = self.command.clone();
        let deadline = Instant::now() + time;
        let line = self.last_line(deadline);
        let Some(status) = self.wait(deadline) else {
            return Err(ServerError::Hung { command, seconds: time.as_secs_f64(), why });
        };
        let line = line.unwrap_or_default();
        if !status.success() && !has_lost_few(&line) {
            return Err(ServerError::Failed { command, status, said: self.said() });
        }
        match serde_json::from_str(&line) {
            Ok(Json::Object(object)) => Ok(object),
            _ => Err(ServerError::Garbage { command, wanted, line: shortened(&line) }),
        }
    }
}

/// Whether the last line of a server that failed says that all it did wrong is that a few requests were not answered: no more than a client may
/// lose. A proxy over UDP cannot answer those whose datagrams the upstream server's host has dropped.
fn has_lost_few(line: &str) -> bool {
    let Ok(account) = serde_json::from_str::<Json>(line) else { return false };
    let number = |key: &str| account.get(key).and_then(Json::as_u64);
    let (Some(messages), Some(lost)) = (number("messages"), number("unanswered")) else {
        return false;
    };
    let hung = account.get("hung").and_then(Json::as_bool) != Some(false);
    !hung && lost > 0 && lost as f64 <= LOST_MAX * messages as f64
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.kill();
        }
    }
}

/// A server under measurement. Killed when dropped without [`Server::stop`].
pub struct Server {
    process: Process,
    ready: String,
}

/// The last line of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// Replies sent.
    pub messages: u64,
    /// Time in turns that found work.
    pub busy_ns: u64,
    /// CPU time of the process.
    pub cpu_ns: u64,
}

impl Server {
    /// Starts a server on some cores (none: on any) and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It cannot be started, ends at once, or is not ready within `timeout`.
    pub fn start(command: &str, cores: &[usize], timeout: Duration) -> Result<Self, ServerError> {
        let mut process = Process::start(command, cores)?;
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match process.lines.recv_timeout(left) {
                Ok(line) if is_ready(&line) => return Ok(Self { process, ready: line }),
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) if process.wait(deadline).is_some() => {
                    let status = process.child.wait().expect("it has ended");
                    let (command, said) = (command.to_owned(), process.said());
                    return Err(ServerError::Ended { command, status, said });
                }
                Err(_) => {
                    process.kill();
                    let (command, said) = (command.to_owned(), process.said());
                    let seconds = timeout.as_secs_f64();
                    return Err(ServerError::NotReady { command, seconds, said });
                }
            }
        }
    }

    /// The first URL of a scheme (`udp`, `tcp`, `shm`) that it serves.
    pub fn url(&self, scheme: &str) -> Result<String, ServerError> {
        url_in(&self.ready, scheme).ok_or_else(|| ServerError::NoUrl {
            command: self.process.command.clone(),
            scheme: scheme.to_owned(),
            line: shortened(&self.ready),
        })
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.process.child.id()
    }

    /// Ends the server and returns its account.
    ///
    /// # Errors
    ///
    /// It had ended already, does not end, fails, or its last line is invalid.
    pub fn stop(mut self) -> Result<Account, ServerError> {
        if let Ok(Some(status)) = self.process.child.try_wait() {
            let (command, said) = (self.process.command.clone(), self.process.said());
            return Err(ServerError::Ended { command, status, said });
        }
        // Fails only if it has just ended; its last line is checked in any case.
        let _ = sys::process::terminate(self.id());
        let command = self.process.command.clone();
        let wanted = " with messages, busy_ns and cpu_ns";
        let account = self.process.finish(STOP_MAX, "SIGTERM", wanted)?;
        let number = |key: &str| account.get(key).and_then(Json::as_u64);
        match (number("messages"), number("busy_ns"), number("cpu_ns")) {
            (Some(messages), Some(busy_ns), Some(cpu_ns)) => {
                Ok(Account { messages, busy_ns, cpu_ns })
            }
            _ => {
                let line = shortened(&Json::Object(account).to_string());
                Err(ServerError::Garbage { command, wanted, line })
            }
        }
    }
}

/// Runs a program to its end; the numbers of the JSON object in its last line.
///
/// # Errors
///
/// It cannot be started, takes longer than `time`, fails, or prints something else.
pub fn run_program(
    command: &str,
    cores: &[usize],
    time: Duration,
) -> Result<Vec<(String, f64)>, ServerError> {
    let process = Process::start(command, cores)?;
    let wanted = " with the figures";
    let object = process.finish(time, "its start", wanted)?;
    let figure = |(key, value): (&String, &Json)| Some((key.clone(), value.as_f64()?));
    let figures: Vec<_> = object.iter().filter_map(figure).collect();
    if figures.is_empty() {
        let line = shortened(&Json::Object(object).to_string());
        return Err(ServerError::Garbage { command: command.to_owned(), wanted, line });
    }
    Ok(figures)
}

/// Calls `take` with every line, until it returns false. Invalid UTF-8 is replaced.
fn each_line(mut from: impl std::io::BufRead, mut take: impl FnMut(String) -> bool) {
    let mut line = Vec::new();
    while let Ok(1..) = from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
        let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
        if !take(text) {
            return;
        }
        line.clear();
    }
}

fn is_ready(line: &str) -> bool {
    line.starts_with("ready")
        || serde_json::from_str::<Json>(line).is_ok_and(|line| line["event"] == "ready")
}

/// The first URL of the scheme in a line: up to white space, quote, or a mark that separates URLs.
fn url_in(line: &str, scheme: &str) -> Option<String> {
    let start = line.find(&format!("{scheme}://"))?;
    let rest = &line[start..];
    let end = rest.find(|c: char| c.is_whitespace() || "\"';,<>".contains(c));
    Some(rest[..end.unwrap_or(rest.len())].to_owned())
}

/// The beginning of a line, for a message.
fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    const READY: &str = "echo starting; echo ready: udp://127.0.0.1:9 tcp://[::1]:7";

    /// A shell script in its own file, which is removed with it.
    struct Script(std::path::PathBuf);

    impl Script {
        fn new(text: &str) -> Self {
            use std::sync::atomic::{AtomicU32, Ordering};
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("serval-compare-{}-{number}.sh", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, text).unwrap();
            Self(path)
        }

        /// A server; `body` runs after the ready line.
        fn server(body: &str) -> Self {
            Self::new(&format!("{READY}\n{body}\n"))
        }

        /// A server that serves until SIGTERM, then does `end`.
        fn until_term(end: &str) -> Self {
            let traps = format!("end() {{\n{end}\n}}\ntrap end TERM\n");
            Self::new(&format!("{traps}{READY}\nwhile :; do sleep 0.01; done"))
        }

        fn command(&self) -> String {
            format!("sh {}", self.0.display())
        }

        fn start(&self) -> Result<Server, ServerError> {
            start(&self.command())
        }

        fn run(&self) -> Result<Vec<(String, f64)>, ServerError> {
            run_program(&self.command(), &[], TIMEOUT)
        }
    }

    impl Drop for Script {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn start(command: &str) -> Result<Server, ServerError> {
        Server::start(command, &[], TIMEOUT)
    }

    fn start_error(command: &str, timeout: Duration) -> ServerError {
        Server::start(command, &[], timeout).err().expect("it must not start")
    }

    #[test]
    fn a_server_is_started_and_ended() {
        let script = Script::until_term(
            r#"echo '{"messages":3,"busy_ns":20,"cpu_ns":1000,"drops":{}}'; exit 0"#,
        );
        let server = script.start().unwrap();
        assert_eq!(server.url("udp").unwrap(), "udp://127.0.0.1:9");
        assert_eq!(server.url("tcp").unwrap(), "tcp://[::1]:7");
        let error = server.url("shm").unwrap_err().to_string();
        assert!(error.contains("names no shm:// URL"), "{error}");
        assert!(server.id() > 0);
        let expected = Account { messages: 3, busy_ns: 20, cpu_ns: 1000 };
        assert_eq!(server.stop().unwrap(), expected);
    }

    #[test]
    fn a_server_may_leave_as_few_requests_unanswered_as_a_client_may_lose() {
        let ends = |messages: u64, lost: u64, hung: bool| {
            let line = format!(
                r#"{{"messages":{messages},"busy_ns":1,"cpu_ns":1,"clean":false,"unanswered":{lost},"hung":{hung}}}"#
            );
            Script::until_term(&format!("echo '{line}'; exit 1")).start().unwrap().stop()
        };
        assert_eq!(ends(10_000, 10, false).unwrap().messages, 10_000);
        for (lost, hung) in [(11, false), (10, true), (0, false)] {
            let error = ends(10_000, lost, hung).unwrap_err();
            assert!(matches!(error, ServerError::Failed { .. }), "{lost} {hung}: {error}");
        }
    }

    #[test]
    fn servers_run_on_the_core_they_are_given() {
        let core = *sys::affinity::allowed_cores().unwrap().last().unwrap();
        let script = Script::new(
            "cores=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/$$/status)\n\
             echo \"{\\\"core\\\":$cores}\"",
        );
        let figures = run_program(&script.command(), &[core], TIMEOUT).unwrap();
        assert_eq!(figures, [("core".to_owned(), core as f64)]);
        let error = run_program(&script.command(), &[1023], TIMEOUT).unwrap_err();
        assert!(matches!(error, ServerError::Start { .. }), "{error}");
    }

    #[test]
    fn a_server_that_never_gets_ready_is_killed() {
        let error = start_error("sleep 60", Duration::from_millis(100));
        assert!(matches!(error, ServerError::NotReady { .. }), "{error}");
        let script = Script::new("echo no port left >&2; exit 4");
        let gone = start_error(&script.command(), TIMEOUT).to_string();
        assert!(gone.contains("ended by itself") && gone.contains("no port left"), "{gone}");
        let missing = start_error("/no/such/program", TIMEOUT).to_string();
        assert!(missing.contains("/no/such/program") && missing.contains("not found"), "{missing}");
    }

    #[test]
    fn a_server_that_dies_while_it_is_measured_is_noticed() {
        let script = Script::server("echo out of memory >&2; exit 9");
        let mut server = script.start().unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while !matches!(server.process.child.try_wait(), Ok(Some(_))) {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = server.stop().unwrap_err();
        assert!(matches!(error, ServerError::Ended { .. }), "{error}");
        assert!(error.to_string().contains("out of memory"), "{error}");
    }

    #[test]
    fn a_server_that_ends_badly_has_no_account() {
        let script = Script::until_term("echo lost >&2; exit 3");
        let failed = script.start().unwrap().stop().unwrap_err();
        assert!(matches!(failed, ServerError::Failed { .. }), "{failed}");
        assert!(failed.to_string().contains("lost"), "{failed}");
        for garbage in ["exit 0", "echo 7; exit 0", "echo bye; exit 0", "echo {}; exit 0"] {
            let script = Script::until_term(garbage);
            let error = script.start().unwrap().stop().unwrap_err();
            assert!(matches!(error, ServerError::Garbage { .. }), "{garbage}: {error}");
        }
    }

    #[test]
    fn programs_print_figures_or_fail() {
        let run = |text: &str| Script::new(text).run();
        let figures = run(r#"echo hello; echo '{"rate":5e7,"name":"x"}'"#).unwrap();
        assert_eq!(figures, [("rate".to_owned(), 5e7)]);
        assert!(matches!(run("echo '{}'"), Err(ServerError::Garbage { .. })));
        assert!(matches!(run("echo 5"), Err(ServerError::Garbage { .. })));
        assert!(matches!(run("exit 1"), Err(ServerError::Failed { .. })));
    }

    #[test]
    fn a_hanging_process_is_killed_with_its_children() {
        let script = Script::new("sleep 61 &\necho $! >\"$0.child\"\nwait");
        let child = script.0.with_extension("sh.child");
        // Until its child exists.
        let slow = run_program(&script.command(), &[], Duration::from_secs(5));
        assert!(matches!(slow, Err(ServerError::Hung { .. })));
        let id = std::fs::read_to_string(&child).unwrap();
        std::fs::remove_file(&child).unwrap();
        let command = format!("/proc/{}/cmdline", id.trim());
        let deadline = Instant::now() + TIMEOUT;
        // A reused process id does not belong to a process of this test.
        while std::fs::read(&command).is_ok_and(|line| line.starts_with(b"sleep\x0061")) {
            assert!(Instant::now() < deadline, "{id} still sleeps");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn urls_are_found_in_text_and_in_json() {
        let text = "ready: echo udp://127.0.0.1:40123 tcp://127.0.0.1:40124; metrics http://x";
        assert!(is_ready(text));
        assert_eq!(url_in(text, "tcp").unwrap(), "tcp://127.0.0.1:40124");
        let json = r#"{"event":"ready","services":[{"listen":["shm:///run/a","udp://[::1]:5"]}]}"#;
        assert!(is_ready(json) && !is_ready(r#"{"event":"stopped"}"#) && !is_ready("{"));
        assert_eq!(url_in(json, "shm").unwrap(), "shm:///run/a");
        assert_eq!(url_in(json, "udp").unwrap(), "udp://[::1]:5");
        assert_eq!(url_in(json, "tcp"), None);
    }

    #[test]
    fn long_lines_are_cut_in_messages() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"é".repeat(300)).chars().count(), 203);
    }
}
