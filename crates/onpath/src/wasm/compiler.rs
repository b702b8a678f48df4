//! Runs the module compiler, the program `serval-compile`, in a process of its own: the compiler is larger than everything else together, and a
//! module that makes it fail ends that process alone.
//!
//! The program is the one that the environment variable `SERVAL_COMPILE` names, or else the one beside the running program. It is not started if another user could
//! have written it. The module is its standard input, a sealed file in memory; the compiled code, or one sentence about the error, comes back over pipes that this
//! process has made. No path is involved, so no other user can put code there.
//!
//! *Limits.* What a module consists of is checked first (`module_limits.rs`). The process may use processor time, address space and wall time up to [`Limits`], and
//! can write no file; its answer has a limit as well. It ends with the thread that waits for it, so also with this process, and when the caller has no more use for the
//! code ([`compile`]). All processes of its group are killed then.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use sys::PrivateFile;
use sys::process::{child_has_ended, confine, confine_memory, kill_group, signal_name, tie};
use sys::readiness::wait_readable;

use crate::module_limits;
use crate::spec::MODULE_BYTES_MAX;

/// The name of the program.
pub const PROGRAM: &str = "serval-compile";
/// The environment variable that names another one.
pub(super) const VARIABLE: &str = "SERVAL_COMPILE";
/// Longest text of an error.
const ERROR_BYTES_MAX: usize = 4096;
/// How often to look whether the code is still wanted.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// The same for its end, after it has written everything.
const END_INTERVAL: Duration = Duration::from_micros(200);
/// Bytes read at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// What compiling a module may cost.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Processor time, in seconds.
    cpu_s: u32,
    /// Wall time: more, because the machine may be busy.
    wall: Duration,
    /// Address space of the process.
    memory_bytes: u64,
    /// Length of the code.
    code_bytes: usize,
}

/// Those of every module. The largest ones that are sensible need a tenth of the time and of the memory.
const LIMITS: Limits = Limits {
    cpu_s: 20,
    wall: Duration::from_secs(60),
    memory_bytes: 1 << 30,
    code_bytes: 64 << 20,
};

/// The code of a module, as the program has made it. Only [`compile`] makes one.
#[derive(Debug)]
pub(super) struct Compiled {
    bytes: Vec<u8>,
    program: PathBuf,
}

impl Compiled {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn program(&self) -> &Path {
        &self.program
    }
}

/// The program that compiles modules.
pub fn program() -> PathBuf {
    let named = env::var_os(VARIABLE).filter(|name| !name.is_empty());
    named.map_or_else(beside_this_program, PathBuf::from)
}

fn beside_this_program() -> PathBuf {
    let this = env::current_exe().unwrap_or_default();
    this.parent().unwrap_or(Path::new("")).join(PROGRAM)
}

/// Compiles a module, which takes milliseconds to seconds, and gives up when `stop` says that it is no longer wanted. The error says what is wrong with the
/// module, or why the program did not run.
pub(super) fn compile(module: &[u8], stop: &dyn Fn() -> bool) -> Result<Compiled, String> {
    module_limits::check(module, MODULE_BYTES_MAX)?;
    run(program(), module, &LIMITS, stop)
}

fn run(
    program: PathBuf,
    module: &[u8],
    limits: &Limits,
    stop: &dyn Fn() -> bool,
) -> Result<Compiled, String> {
    let failed = |why: &str| format!("the compiler of modules {} {why}", program.display());
    let not_started = |why: String| {
        failed(&format!(
            "does not start ({why}): install it beside this program, or name it with {VARIABLE}"
        ))
    };
    is_ours(&program).map_err(not_started)?;
    let input = PrivateFile::of(PROGRAM, module);
    let input = input.map_err(|error| format!("there is no memory for the module: {error}"))?;
    let input = open_again(&input);
    let input = input.map_err(|error| failed(&format!("gets no module: {error}")))?;
    let mut command = Command::new(&program);
    // Its standard streams are its only connection with this process.
    command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).env_clear();
    // A Ctrl-C is for this process: it decides what becomes of the module.
    command.process_group(0);
    tie(&mut command, &[]);
    confine(&mut command, limits.cpu_s);
    confine_memory(&mut command, limits.memory_bytes);
    let mut child = command.spawn().map_err(|error| not_started(error.to_string()))?;
    let received = receive(&mut child, limits, stop);
    // Also if it has ended: processes that it started may run on. It is not reaped yet, so its number is still its own.
    let _ = kill_group(child.id());
    let status = child.wait().map_err(|error| failed(&format!("cannot be waited for: {error}")))?;
    match received {
        Received::All(bytes, _) if status.success() => Ok(Compiled { bytes, program }),
        Received::All(_, why) if status.code() == Some(1) && !why.is_empty() => {
            Err(super::printable(String::from_utf8_lossy(&why).trim_end()))
        }
        Received::All(..) => Err(failed(&ended(status, limits))),
        Received::Unwanted => Err("who asked for the module has gone".to_owned()),
        Received::Late => Err(format!(
            "it compiles for more than {} s: make it smaller",
            limits.wall.as_secs_f32()
        )),
        Received::TooLong => {
            let most = limits.code_bytes;
            Err(format!("its code has more than {most} bytes: make the module smaller"))
        }
        Received::Failed(error) => Err(failed(&format!("cannot be read: {error}"))),
    }
}

/// Why the program ended without an answer.
fn ended(status: ExitStatus, limits: &Limits) -> String {
    let Limits { cpu_s, memory_bytes, .. } = limits;
    match status.signal().map(signal_name) {
        None => format!("failed: {status}"),
        Some(signal) if signal == "SIGXCPU" => {
            format!("used more than {cpu_s} s of processor time: make the module smaller")
        }
        Some(signal) => format!(
            "was ended by {signal}; it may use {} MiB of memory and {cpu_s} s of processor time",
            memory_bytes >> 20
        ),
    }
}

/// Whether a program can have been written only by root, this user, and whose program this one is: then it is believed as this one.
fn is_ours(program: &Path) -> Result<(), String> {
    let found = program.metadata().map_err(|error| error.to_string())?;
    let this = env::current_exe().and_then(|this| this.metadata());
    let owner = this.map_or(0, |this| this.uid());
    if ![0, sys::process::user(), owner].contains(&found.uid()) {
        return Err(format!("it belongs to user {}", found.uid()));
    }
    if found.mode() & 0o002 != 0 {
        return Err("every user may write to it".to_owned());
    }
    // Many systems give each user a group of its own, which may write by default.
    if found.mode() & 0o020 != 0 && ![0, sys::process::group()].contains(&found.gid()) {
        return Err(format!("its group {} may write to it", found.gid()));
    }
    Ok(())
}

/// The file in memory at its first byte: what has written it is at its last.
fn open_again(file: &PrivateFile) -> io::Result<File> {
    use std::io::Seek as _;

    let mut again = File::from(file.as_fd().try_clone_to_owned()?);
    again.rewind()?;
    Ok(again)
}

enum Received {
    /// What the program has written: code, and the text of an error.
    All(Vec<u8>, Vec<u8>),
    /// It is no longer wanted.
    Unwanted,
    /// It took too long.
    Late,
    /// The code is too long.
    TooLong,
    Failed(io::Error),
}

/// Reads the code and the text of an error until the program has closed both and has ended.
fn receive(child: &mut Child, limits: &Limits, stop: &dyn Fn() -> bool) -> Received {
    let (Some(mut output), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
        unreachable!("both are pipes")
    };
    let until = Instant::now() + limits.wall;
    let (mut code, mut why) = (Vec::new(), Vec::new());
    let (mut has_code, mut has_why) = (false, false);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        if stop() {
            return Received::Unwanted;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Received::Late;
        }
        if has_code && has_why {
            match child_has_ended(child.id()) {
                Ok(true) => return Received::All(code, why),
                Ok(false) => std::thread::sleep(END_INTERVAL),
                Err(error) => return Received::Failed(error),
            }
            continue;
        }
        let mut files = Vec::with_capacity(2);
        files.extend((!has_code).then(|| output.as_fd()));
        files.extend((!has_why).then(|| errors.as_fd()));
        let ready = wait_readable(&files, Some(left.min(LOOK_INTERVAL)));
        let (of_code, of_why) = match (has_code, has_why) {
            (false, false) => (ready[0], ready[1]),
            (false, true) => (ready[0], false),
            (true, _) => (false, ready[0]),
        };
        let read = |from: &mut dyn Read, chunk: &mut [u8]| match from.read(chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            read => read.map(Some),
        };
        if of_code {
            match read(&mut output, &mut chunk) {
                Ok(Some(0)) => has_code = true,
                Ok(Some(len)) if code.len() + len > limits.code_bytes => return Received::TooLong,
                Ok(Some(len)) => code.extend_from_slice(&chunk[..len]),
                Ok(None) => {}
                Err(error) => return Received::Failed(error),
            }
        }
        if of_why {
            match read(&mut errors, &mut chunk) {
                Ok(Some(0)) => has_why = true,
                Ok(Some(len)) => {
                    let kept = len.min(ERROR_BYTES_MAX - why.len());
                    why.extend_from_slice(&chunk[..kept]);
                }
                Ok(None) => {}
                Err(error) => return Received::Failed(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const QUICK: Limits = Limits {
        cpu_s: 1,
        wall: Duration::from_secs(600),
        memory_bytes: 1 << 30,
        code_bytes: 1000,
    };

    /// A program in place of the compiler.
    fn script(name: &str, text: &str) -> PathBuf {
        let path = env::temp_dir().join(format!("serval-{}-{name}", std::process::id()));
        // Written by another process: none of this one's forks, of other tests, has it open for writing when it is started.
        let mut writer = Command::new("/bin/sh");
        writer.args(["-c", "printf '%s' \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", text]);
        assert!(writer.arg(&path).status().unwrap().success());
        path
    }

    fn never() -> bool {
        false
    }

    fn refused(program: PathBuf, limits: &Limits, stop: &dyn Fn() -> bool) -> String {
        run(program, b"module", limits, stop).expect_err("it is refused")
    }

    #[test]
    fn the_program_is_beside_this_one() {
        let program = beside_this_program();
        assert_eq!(program.file_name().unwrap(), PROGRAM);
        assert_eq!(program.parent(), env::current_exe().unwrap().parent());
    }

    #[test]
    fn the_program_gets_the_module_and_its_answer_has_a_limit() {
        let echo = script("echo", "#!/bin/sh\nexec /bin/cat\n");
        assert_eq!(run(echo.clone(), b"module", &QUICK, &never).unwrap().bytes, b"module");
        let long = vec![7; 1001];
        let why = run(echo, &long, &QUICK, &never).unwrap_err();
        assert!(why.contains("its code has more than 1000 bytes"), "{why}");
        let complains = script("complains", "#!/bin/sh\necho it is wrong >&2\nexit 1\n");
        assert_eq!(refused(complains, &QUICK, &never), "it is wrong");
    }

    #[test]
    fn the_program_ends_at_each_limit() {
        let spins = script("spins", "#!/bin/sh\nwhile :; do :; done\n");
        let why = refused(spins, &QUICK, &never);
        assert!(why.contains("used more than 1 s of processor time"), "{why}");
        let sleeps = script("sleeps", "#!/bin/sh\nexec /bin/sleep 1000\n");
        let wall = Duration::from_millis(50);
        let why = refused(sleeps, &Limits { wall, ..QUICK }, &never);
        assert!(why.contains("it compiles for more than 0.05 s"), "{why}");
        // A shell holds what it reads.
        let grows = script("grows", "#!/bin/sh\nx=$(/bin/cat /dev/zero | /usr/bin/tr '\\0' x)\n");
        let memory_bytes = 64 << 20;
        let why = refused(grows, &Limits { memory_bytes, cpu_s: 600, ..QUICK }, &never);
        assert!(why.contains("the compiler of modules"), "{why}");
        let writes = script("writes", "#!/bin/sh\necho x >\"$0.out\" || exit 7\n");
        let why = refused(writes, &QUICK, &never);
        assert!(why.contains("SIGXFSZ") || why.contains("exit status: 7"), "{why}");
    }

    #[test]
    fn the_program_ends_when_it_is_no_longer_wanted() {
        let path = env::temp_dir().join(format!("serval-{}-started", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let text = format!("#!/bin/sh\n: >{}\nexec /bin/sleep 1000\n", path.display());
        let why = refused(script("waits", &text), &QUICK, &|| path.exists());
        assert!(why.contains("who asked for the module has gone"), "{why}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_program_that_others_may_write_is_not_started() {
        let echo = script("open", "#!/bin/sh\nexec /bin/cat\n");
        std::fs::set_permissions(&echo, std::fs::Permissions::from_mode(0o757)).unwrap();
        let why = refused(echo, &QUICK, &never);
        assert!(why.contains("every user may write to it"), "{why}");
        let why = refused(PathBuf::from("/nonexistent"), &QUICK, &never);
        assert!(why.contains("install it beside this program"), "{why}");
    }

    /// What the compiler of another build would make: this one's with another number. Only the major version of wasmtime would be the same.
    #[test]
    fn code_of_another_build_is_refused() {
        use crate::module_settings::BUILD;

        let module = wat::parse_str("(module (memory (export \"memory\") 1))").unwrap();
        let host = super::super::host::Host::get().unwrap();
        let own = run(program(), &module, &LIMITS, &never).expect("make build-compiler");
        super::super::load::load(&host.engine, &own).unwrap();
        let (digit, others) = BUILD.split_at(BUILD.len() - 1);
        let other = if others == "0" { "1" } else { "0" };
        let compiler = std::path::absolute(program()).unwrap();
        let text =
            format!("#!/bin/sh\n{} | /bin/sed 's/{BUILD}/{digit}{other}/'\n", compiler.display());
        let made = run(script("other", &text), &module, &LIMITS, &never).unwrap();
        assert_eq!(made.bytes.len(), own.bytes.len());
        let why = super::super::load::load(&host.engine, &made).expect_err("it is refused");
        assert!(why.contains("is of another build than this one, install both together"), "{why}");
    }
}
