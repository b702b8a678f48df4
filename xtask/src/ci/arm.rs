//! aarch64, the processor of a DPU: the whole `serval` command is cross-compiled, and qemu runs the tests of the rings, the
//! framings and the engine, those of the server over UDP, TCP and shared memory, and the command itself.
//!
//! qemu keeps the memory ordering of the host. So this shows that the code is portable, not that no ordering edge is
//! missing: loom shows that, and `serval doctor --litmus` on real hardware.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Done, Failed, Findings, Outcome, Tally, command, lacks_target, make, works};
use crate::files::built;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const RUNNER: &str = "qemu-aarch64 -L /usr/aarch64-linux-gnu";
/// Any of the command's processes ends after this.
const SECONDS_MAX: &str = "120";

/// Tests that start their own program, which an emulated process cannot: the host kernel does not run its file.
const STARTS_ITSELF: &str = "--skip a_killed_client --skip a_path_is_claimed";
/// Tests of 16-byte units, which do not exist here, and one that compares the memory of the process, the emulator's too.
const OF_THIS_PROCESSOR: &str = "--skip echo_over_every_protocol --skip sequences_wrap_inside_granule_rings \
    --skip replies_that_are_too_long_take_little_memory";

pub(super) fn step() -> Outcome {
    if let Some(lacking) = lacks_target(TARGET) {
        return Ok(lacking);
    }
    for program in ["aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64"] {
        if !works(&format!("{program} --version")) {
            return Ok(Done::NotRun(format!("no {program} here; `make setup-ci` installs it")));
        }
    }
    let environment = [
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc"),
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", RUNNER),
        // Of kernel files that tests build.
        ("CXX", "aarch64-linux-gnu-g++"),
        ("RUSTFLAGS", "-D warnings"),
        ("PROPTEST_CASES", "16"),
    ];
    let cargo = |line: &str, arguments: &str| {
        command(format!("cargo {line} --target {TARGET} {arguments}").trim_end(), &environment)
    };
    cargo("build -p serval-cli", "")?;
    let mut tests = Tally::default();
    for (line, arguments) in [
        ("test -p serval-mqueue -p serval-wire -p serval-engine --tests", String::new()),
        ("test -p serval-accel --test worker", format!("-- {OF_THIS_PROCESSOR}")),
        ("test -p serval-server --test network", String::new()),
        ("test -p serval-bench --test shm", format!("-- {STARTS_ITSELF}")),
    ] {
        add(&mut tests, cargo(line, &arguments)?);
    }
    make("device arm-test", &[("QEMU", RUNNER)])?;
    let answered = is_answered(&built().join(format!("{TARGET}/debug/serval")));
    answered.map_err(|finding| Failed { findings: vec![finding], tests: Tally::default() })?;
    Ok(Done::Tested(tests))
}

fn add(sum: &mut Tally, done: Done) {
    if let Done::Tested(Tally { passed, failed, skipped }) = done {
        sum.passed += passed;
        sum.failed += failed;
        sum.skipped.extend(skipped);
    }
}

/// A run of the command under the emulator, which ends in any case.
fn emulated(serval: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", SECONDS_MAX]).args(RUNNER.split(' ')).arg(serval);
    command.stdin(Stdio::null());
    command
}

/// Serves `echo`, asks it over UDP, TCP and shared memory, and ends the server.
fn is_answered(serval: &Path) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("serval-arm-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let result = ask_everywhere(serval, &folder);
    // A failure to remove it leaves a few bytes in the folder of temporary files.
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn ask_everywhere(serval: &Path, folder: &Path) -> Result<(), String> {
    let config = folder.join("echo.toml");
    let text = format!(
        "schema = 1\n[engine]\ncontrol = \"off\"\n[[service]]\nname = \"echo\"\nframing = \"length:u16\"\n\
         listen = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\", \"shm://{}/echo.sock\"]\n\
         accelerator = \"acc0\"\nkernel = \"echo\"\n",
        folder.display()
    );
    std::fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
    let mut serve = emulated(serval);
    serve.arg("serve").arg(&config).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = serve.spawn().map_err(|error| format!("timeout: {error}"))?;
    let mut output = BufReader::new(server.stdout.take().expect("it is piped"));
    let mut line = String::new();
    let read = output.read_line(&mut line);
    let ports: Vec<String> = match line.strip_prefix("ready: echo ") {
        Some(ports) => ports.split_whitespace().map(str::to_owned).collect(),
        None => Vec::new(),
    };
    let mut findings = Findings::new();
    if read.is_err() || ports.len() != 3 {
        findings.push(format!("serve is not ready but says {line:?}"));
    }
    let messages = ["x".to_owned(), "from aarch64 ".repeat(20), "0123456789".repeat(100)];
    for (port, message) in ports.iter().flat_map(|port| messages.iter().map(move |m| (port, m))) {
        let mut ask = emulated(serval);
        ask.args(["ask", port, message]);
        if port.starts_with("tcp:") {
            ask.args(["--framing", "length:u16"]);
        }
        match ask.output() {
            Ok(said)
                if said.status.success()
                    && said.stdout.trim_ascii() == message.trim().as_bytes() => {}
            said => findings.push(format!("{port} answers {} bytes with {said:?}", message.len())),
        }
    }
    let pid = server.id().to_string();
    let stopped = Command::new("kill").args(["-TERM", &pid]).status();
    let ended = server.wait().map_err(|error| format!("serve: {error}"))?;
    let mut log = String::new();
    let told = server.stderr.take().expect("it is piped").read_to_string(&mut log);
    let all = format!("received={0} replied={0} ", 3 * messages.len());
    if stopped.is_err() || told.is_err() || !ended.success() || !log.contains(&all) {
        findings.push(format!("serve ends with {ended} and not with {all:?}:\n{log}"));
    }
    if findings.is_empty() { Ok(()) } else { Err(findings.join("\n")) }
}
