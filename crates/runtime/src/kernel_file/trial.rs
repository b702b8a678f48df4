//! Loading a kernel library in a process that may crash.
//!
//! The process gets the copy as its standard input. It writes lines that begin with [`MARK`] to its standard output:
//! `loaded` and the names of the kernels, `unloaded`, or `refused` and a sentence. The library's constructors may write
//! other lines. What was the last word before the process ended tells where it crashed.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use accel::KernelError;
use accel::kernel::KernelLibrary;
use sys::PrivateFile;
use sys::process::{child_has_ended, confine, kill_group, signal_name, tie};
use sys::readiness::wait_readable;

/// How a line of the process begins.
const MARK: &str = "serval-kernel: ";
/// Most bytes of either output that are kept.
const OUTPUT_BYTES_MAX: usize = 256 << 10;
/// Most reads between two looks at the clock.
const READS_MAX: usize = 64;
/// Longest time between two looks at the process.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Longest line of a crashed process that is repeated, in characters.
const LINE_CHARS_MAX: usize = 200;

/// The program of trials.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Names the `serval` executable that tries kernel libraries, for a program that is not `serval` itself. The first call
/// counts.
pub fn set_trial_program(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// What a library may take while it is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Processor time, in whole seconds.
    pub cpu_seconds: u32,
    /// Time.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cpu_seconds: 5, time: Duration::from_secs(20) }
    }
}

/// Loads and unloads the library in a process of its own; returns the names of its kernels. `None`: no program is known.
/// `cancelled` is asked many times a second whether to give up.
pub(super) fn run(
    path: &Path,
    copy: &PrivateFile,
    limits: &Limits,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Option<Vec<String>>, KernelError> {
    let Some(program) = PROGRAM.get() else { return Ok(None) };
    let cannot = |error: io::Error| {
        KernelError::Trial(format!(
            "kernel library {} cannot be tried in a process of its own: {error}; raise `ulimit -u` and the control \
             group's `pids.max` if processes are short",
            path.display()
        ))
    };
    let mut command = Command::new(program);
    command.args(["kernel", "try", "--"]).arg(path);
    let input = copy.as_fd().try_clone_to_owned().map_err(cannot)?;
    command.stdin(Stdio::from(input)).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Processes that it starts are in its group unless they leave it, and are killed with the group.
    command.process_group(0);
    tie(&mut command, &[]);
    confine(&mut command, limits.cpu_seconds);
    let mut child = command.spawn().map_err(cannot)?;
    let watched = watch(&mut child, limits.time, cancelled);
    // Also if it has ended: processes that it started may run on. Its number is its own until it has been waited for.
    let _ = kill_group(child.id());
    let status = child.wait();
    match watched.map_err(cannot)? {
        Watched::Cancelled => Err(KernelError::Abandoned),
        Watched::Seen(seen) => judge(path, limits, &seen).map(Some),
        Watched::Ended(seen) => {
            let status = Some(status.map_err(cannot)?);
            judge(path, limits, &Seen { status, ..seen }).map(Some)
        }
    }
}

/// What was seen of the process.
struct Seen {
    output: Vec<u8>,
    errors: Vec<u8>,
    /// `None`: it has not ended.
    status: Option<ExitStatus>,
}

/// How watching a process ended.
enum Watched {
    /// The process has ended and is still to be waited for.
    Ended(Seen),
    /// It has written its last word, or the time is over.
    Seen(Seen),
    Cancelled,
}

/// Reads both outputs until the process has said its last word, has ended, or the time is over, or `cancelled`.
fn watch(
    child: &mut Child,
    time: Duration,
    cancelled: &mut dyn FnMut() -> bool,
) -> io::Result<Watched> {
    let deadline = Instant::now() + time;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let mut seen = Seen { output: Vec::new(), errors: Vec::new(), status: None };
    loop {
        // What it wrote before it ended can be read afterwards.
        let ended = child_has_ended(child.id())?;
        // The number of reads is limited, so a process that writes without end cannot delay the check of the deadline.
        for _ in 0..READS_MAX {
            if !(read_some(&mut out, &mut seen.output)? | read_some(&mut err, &mut seen.errors)?) {
                break;
            }
        }
        if ended {
            return Ok(Watched::Ended(seen));
        }
        let done = last_word(&seen.output).is_some_and(|word| word.is_last());
        if done || Instant::now() >= deadline {
            return Ok(Watched::Seen(seen));
        }
        if cancelled() {
            return Ok(Watched::Cancelled);
        }
        let files: Vec<BorrowedFd<'_>> =
            out.iter().map(|o| o.as_fd()).chain(err.iter().map(|e| e.as_fd())).collect();
        if files.is_empty() {
            std::thread::sleep(CHECK_INTERVAL);
        } else {
            wait_readable(&files, Some(CHECK_INTERVAL));
        }
    }
}

/// Reads once, if there is something; whether there was.
fn read_some<F: io::Read + std::os::fd::AsFd>(
    file: &mut Option<F>,
    into: &mut Vec<u8>,
) -> io::Result<bool> {
    let Some(open) = file else { return Ok(false) };
    if !wait_readable(&[open.as_fd()], Some(Duration::ZERO))[0] {
        return Ok(false);
    }
    let mut bytes = [0; 4096];
    let read = open.read(&mut bytes)?;
    if read == 0 {
        *file = None;
        return Ok(false);
    }
    // What comes last says more.
    into.extend_from_slice(&bytes[..read]);
    if into.len() > OUTPUT_BYTES_MAX {
        into.drain(..into.len() - OUTPUT_BYTES_MAX / 2);
    }
    Ok(true)
}

/// What the process said.
enum Word {
    Loaded,
    Unloaded(Vec<String>),
    Refused(String),
}

impl Word {
    fn is_last(&self) -> bool {
        !matches!(self, Self::Loaded)
    }
}

fn last_word(output: &[u8]) -> Option<Word> {
    let text = String::from_utf8_lossy(output);
    // A line that is not complete may be cut.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let line = whole.lines().rev().find_map(|line| line.strip_prefix(MARK))?;
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    match word {
        "loaded" => Some(Word::Loaded),
        "unloaded" => Some(Word::Unloaded(rest.split_whitespace().map(str::to_owned).collect())),
        "refused" => Some(Word::Refused(rest.to_owned())),
        _ => None,
    }
}

fn judge(path: &Path, limits: &Limits, seen: &Seen) -> Result<Vec<String>, KernelError> {
    let word = last_word(&seen.output);
    let doing = match word {
        Some(Word::Unloaded(names)) => return Ok(names),
        Some(Word::Refused(why)) => return Err(KernelError::Trial(why)),
        Some(Word::Loaded) => "unloaded",
        None => "loaded",
    };
    let path = path.display();
    let Some(status) = seen.status else {
        return Err(KernelError::Trial(format!(
            "the kernel file {path} takes more than {} s while it is {doing}: a constructor or destructor waits or does \
             not end",
            limits.time.as_secs_f32()
        )));
    };
    let said = last_line(&seen.errors);
    let said = if said.is_empty() { said } else { format!(" ({said})") };
    let how = match (status.signal().map(signal_name), status.code()) {
        (Some(signal), _) if signal == "SIGXCPU" => format!(
            "computes for more than {} s while it is {doing}: a constructor or destructor does not end",
            limits.cpu_seconds
        ),
        (Some(signal), _) => format!("crashes while it is {doing}: {signal}{said}"),
        (None, code) => {
            format!("ends its process with code {} while it is {doing}{said}", code.unwrap_or(0))
        }
    };
    Err(KernelError::Trial(format!("the kernel file {path} {how}")))
}

/// The last line with a text, for a sentence.
fn last_line(errors: &[u8]) -> String {
    let text = String::from_utf8_lossy(errors);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).take(LINE_CHARS_MAX).collect()
}

/// The process of a trial: the copy is its standard input, `path` is what it is called.
pub fn answer(path: &Path) {
    let say = |text: &str| {
        let mut out = io::stdout();
        // The line of a constructor may not be complete.
        let _ = out.write_all(format!("\n{MARK}{}\n", text.replace('\n', "; ")).as_bytes());
        let _ = out.flush();
    };
    let input = io::stdin().as_fd().try_clone_to_owned();
    let library = input
        .map_err(|error| KernelError::NoFile { path: path.to_owned(), error })
        .and_then(|input| KernelLibrary::load(input, path));
    match library {
        Err(error) => say(&format!("refused {error}")),
        Ok(library) => {
            let names = library.names().join(" ");
            say("loaded");
            drop(library);
            say(&format!("unloaded {names}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(output: &str, errors: &str, status: Option<i32>) -> Seen {
        let status = status.map(ExitStatus::from_raw);
        Seen { output: output.into(), errors: errors.into(), status }
    }

    fn judged(seen: &Seen) -> Result<Vec<String>, String> {
        judge(Path::new("k.so"), &Limits::default(), seen).map_err(|error| error.to_string())
    }

    #[test]
    fn the_last_word_of_a_process_is_what_counts() {
        let names = judged(&seen(
            "hi\nserval-kernel: loaded a b\n\nserval-kernel: unloaded a b\n",
            "",
            None,
        ));
        assert_eq!(names.unwrap(), ["a", "b"]);
        for (output, errors, status, sentence) in [
            ("", "", Some(11), "the kernel file k.so crashes while it is loaded: SIGSEGV"),
            (
                "serval-kernel: loaded a\n",
                "",
                Some(7),
                "the kernel file k.so crashes while it is unloaded: SIGBUS",
            ),
            (
                "x",
                "terminate called\n  what():  no weights\n\n",
                Some(6),
                "the kernel file k.so crashes while it is loaded: SIGABRT (what():  no weights)",
            ),
            (
                "serval-kernel: unlo",
                "",
                Some(3 << 8),
                "the kernel file k.so ends its process with code 3 while it is loaded",
            ),
            ("\nserval-kernel: refused k.so is none\n", "noise", Some(0), "k.so is none"),
        ] {
            assert_eq!(judged(&seen(output, errors, status)).unwrap_err(), sentence);
        }
        let computes = judged(&seen("", "", Some(24))).unwrap_err();
        assert!(computes.contains("computes for more than 5 s while it is loaded"), "{computes}");
        let waits = judged(&seen("", "", None)).unwrap_err();
        assert!(waits.contains("takes more than 20 s while it is loaded"), "{waits}");
    }
}
