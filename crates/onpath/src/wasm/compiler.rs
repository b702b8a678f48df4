//! Runs the module compiler, the program `serval-compile`, in a process of its own: the compiler is larger than everything else together, and a
//! module that makes it fail ends that process alone.
//!
//! The program is the one that the environment variable `SERVAL_COMPILE` names, or else the one beside the running program. The
//! module goes to its standard input; the compiled code, or one sentence about the error, comes back.

use std::env;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

/// The name of the program.
pub const PROGRAM: &str = "serval-compile";
/// The environment variable that names another one.
pub(super) const VARIABLE: &str = "SERVAL_COMPILE";
/// Longest output that is read. The code of a module of the largest size has a tenth of this.
const COMPILED_BYTES_MAX: u64 = 512 << 20;
/// Longest text of an error.
const ERROR_BYTES_MAX: u64 = 4096;

/// The code of a module, as the program has made it. Only [`compile`] makes one.
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

/// Compiles a module, which takes milliseconds to seconds. The error says what is wrong with the module, or why the program did not run.
pub(super) fn compile(module: &[u8]) -> Result<Compiled, String> {
    let program = program();
    let mut command = Command::new(&program);
    // Its standard streams are its only connection with this process.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_clear();
    // A Ctrl-C is for this process: it decides what becomes of the module.
    command.process_group(0);
    let mut child = command.spawn().map_err(|error| {
        format!(
            "the compiler of modules {} does not start ({error}): install it beside this program, or name it with {VARIABLE}",
            program.display()
        )
    })?;
    let exchanged = exchange(&mut child, module);
    if exchanged.is_err() {
        // It has ended already, or nobody reads what it makes.
        let _ = child.kill();
    }
    let status = child.wait();
    let failed = |why: String| format!("the compiler of modules {} {why}", program.display());
    let (bytes, why, received) = match exchanged {
        Ok((bytes, why)) => (bytes, why, Ok(())),
        Err(error) => (Vec::new(), Vec::new(), Err(error)),
    };
    match (received, status) {
        (Ok(()), Ok(status)) if status.success() => Ok(Compiled { bytes, program }),
        (Ok(()), Ok(status)) if status.code() == Some(1) && !why.is_empty() => {
            Err(super::printable(String::from_utf8_lossy(&why).trim_end()))
        }
        (Ok(()), Ok(status)) => Err(failed(format!("failed: {status}"))),
        (Err(error), _) | (_, Err(error)) => Err(failed(format!("cannot be read: {error}"))),
    }
}

/// Writes the module to the program, and reads the code and the text of an error.
fn exchange(child: &mut Child, module: &[u8]) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut input), Some(output), Some(errors)) = (input, output, errors) else {
        unreachable!("the three streams are pipes")
    };
    let (mut bytes, mut why) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        let thread = || thread::Builder::new().name("serval-compile".to_owned());
        // A program that ends early closes its input: its error says why.
        thread().spawn_scoped(scope, move || drop(input.write_all(module)))?;
        thread().spawn_scoped(scope, || errors.take(ERROR_BYTES_MAX).read_to_end(&mut why))?;
        output.take(COMPILED_BYTES_MAX).read_to_end(&mut bytes)
    })?;
    Ok((bytes, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_beside_this_one() {
        let program = beside_this_program();
        assert_eq!(program.file_name().unwrap(), PROGRAM);
        assert_eq!(program.parent(), env::current_exe().unwrap().parent());
    }
}
