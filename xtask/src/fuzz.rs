//! The fuzz targets: `cargo xtask fuzz SECONDS`, and the step `fuzz` of continuous integration.
//!
//! libFuzzer needs coverage counters in the code under test. The compiler pass that adds them is part of
//! every toolchain, so this runs on the one that builds the product; only the address sanitizer would
//! need another, and the code under test checks its own bounds. What a run learns stays in `.cache/fuzz`
//! for the next one; what it finds is kept in `fuzz/artifacts` and fails the run.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::Findings;
use crate::files::root;

/// What `cargo fuzz` asks the compiler for, without a sanitizer.
const FLAGS: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// One input may take this long, in seconds, on a machine that does much else.
const INPUT_SECONDS_MAX: u32 = 30;

/// Builds every target and runs it over its corpus and then for `seconds`. Returns a line about each, or
/// what was found.
pub(crate) fn run(seconds: u32) -> Result<Vec<String>, Findings> {
    let targets = targets();
    if targets.is_empty() {
        return Err(vec!["there are no targets in fuzz/fuzz_targets".to_owned()]);
    }
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    build(&triple)?;
    let binaries = root().join("target/fuzz").join(triple).join("release");
    let queue = Mutex::new(VecDeque::from(targets));
    let results = Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(target) = queue.lock().expect("no panic").pop_front() else { break };
                    let result = fuzz(&binaries.join(&target), &target, seconds);
                    results.lock().expect("no panic").push(result);
                }
            });
        }
    });
    let (mut lines, mut findings) = (Vec::new(), Findings::new());
    for result in results.into_inner().expect("no panic") {
        match result {
            Ok(line) => lines.push(line),
            Err(finding) => findings.push(finding),
        }
    }
    lines.sort();
    if findings.is_empty() { Ok(lines) } else { Err(findings) }
}

fn targets() -> Vec<String> {
    let folder = fs::read_dir(root().join("fuzz/fuzz_targets"));
    let mut names: Vec<String> = folder
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".rs").map(str::to_owned))
        .collect();
    names.sort();
    names
}

fn build(triple: &str) -> Result<(), Findings> {
    let arguments = ["build", "--quiet", "--release", "--manifest-path"];
    let output = Command::new("cargo")
        .args(arguments)
        .args(["fuzz/Cargo.toml", "--target-dir", "target/fuzz"])
        // The target is named, so that build scripts and macros are built without counters.
        .args(["--target", triple])
        .env("RUSTFLAGS", FLAGS.join(" "))
        .current_dir(root())
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(vec![String::from_utf8_lossy(&output.stderr).into_owned()]),
        Err(error) => Err(vec![format!("cargo: {error}")]),
    }
}

/// Runs one target.
fn fuzz(binary: &Path, target: &str, seconds: u32) -> Result<String, String> {
    let (learnt, found) = (format!(".cache/fuzz/{target}"), format!("fuzz/artifacts/{target}/"));
    let corpus = format!("fuzz/corpus/{target}");
    for folder in [&learnt, &found] {
        fs::create_dir_all(root().join(folder)).map_err(|e| format!("{folder}: {e}"))?;
    }
    if fs::read_dir(root().join(&corpus)).map_or(0, Iterator::count) == 0 {
        return Err(format!("{corpus} is empty: give {target} something to start from"));
    }
    let mut command = Command::new(binary);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-artifact_prefix={found}"))
        .arg("-print_final_stats=1");
    // One for all targets of a kind: `framing.dict` for `framing_request` and `framing_response`.
    let dictionary = format!("fuzz/{}.dict", target.split('_').next().unwrap_or(target));
    if root().join(&dictionary).exists() {
        command.arg(format!("-dict={dictionary}"));
    }
    command.args([&learnt, &corpus]).current_dir(root()).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("{target}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last: Vec<&str> = text.lines().rev().take(40).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        return Err(format!("{target}: {}\n{}", output.status, last.join("\n")));
    }
    let after = |mark: &str| {
        let at = text.rfind(mark)? + mark.len();
        text[at..].split_whitespace().next()?.parse::<u64>().ok()
    };
    match (after("stat::number_of_executed_units:"), after("cov:")) {
        (Some(inputs @ 1..), Some(edges)) => {
            Ok(format!("{target:18} {inputs:9} inputs, {edges:5} edges of code reached"))
        }
        _ => Err(format!("{target}: ran no input\n{text}")),
    }
}
