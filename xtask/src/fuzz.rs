//! The fuzz targets: `cargo xtask fuzz SECONDS`, and the step `fuzz` of continuous integration.
//!
//! libFuzzer needs coverage counters in the code under test. Every toolchain has the compiler pass that adds
//! them, so the targets are built with the product's toolchain; only the address sanitizer would
//! need another one, and the code under test checks its own bounds. New corpus inputs are kept in `.cache/fuzz`
//! for the next run; inputs that fail are kept in `fuzz/artifacts` and fail the run.
//!
//! `--build FOLDER` writes the fuzz programs and this program to a folder, from which `--binaries FOLDER` runs them on a
//! machine without a compiler.
//!
//! [`planted`] checks that each target finds a bug that was planted in its sources.

mod planted;

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use wire::framing::Framing;

use crate::Findings;
use crate::files::root;
use crate::side_by_side::{all_sound, cores};

/// The compiler flags of `cargo fuzz`, without a sanitizer.
const FLAGS: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Time limit per input in seconds, for a busy machine.
const INPUT_SECONDS_MAX: u32 = 30;

/// Clock ticks per second in /proc; the same on all architectures supported here.
const TICKS_PER_SECOND: u64 = 100;

/// How the targets are run.
#[derive(Default)]
struct Options {
    seconds: u32,
    /// Programs at a time; 0: one per core. With at least twice as many as targets, each target
    /// runs in several programs that share a corpus.
    jobs: usize,
    /// The folder of the programs; if absent they are built.
    binaries: Option<PathBuf>,
}

/// The result of a target.
struct Run {
    target: String,
    /// CPU time: on a busy machine, less than the elapsed time.
    seconds: u64,
    inputs: u64,
    edges: u64,
}

/// `cargo xtask fuzz ARGUMENTS`: one line per target, or the findings.
pub(crate) fn command(arguments: &[&str]) -> Result<Vec<String>, Findings> {
    match arguments {
        ["--planted"] => return planted::find_all(),
        ["--build", folder] => return keep(Path::new(folder)),
        _ => {}
    }
    let options = options(arguments).map_err(|finding| vec![finding])?;
    let runs = run_with(&options)?;
    let line = |Run { target, seconds, inputs, edges }: &Run| {
        format!("{target:18} {seconds:5} s {inputs:10} inputs, {edges:5} edges of code reached")
    };
    Ok(runs.iter().map(line).collect())
}

fn options(arguments: &[&str]) -> Result<Options, String> {
    let mut options = Options::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match *argument {
            "--jobs" => {
                let jobs = rest.next().and_then(|jobs| jobs.parse().ok());
                options.jobs = jobs.ok_or("--jobs needs a number")?;
            }
            "--binaries" => {
                let folder = rest.next().ok_or("--binaries needs a folder")?;
                options.binaries = Some(PathBuf::from(folder));
            }
            seconds => {
                let wrong = |_| format!("{seconds:?} is not a number of seconds or an option");
                options.seconds = seconds.parse().map_err(wrong)?;
            }
        }
    }
    if options.seconds == 0 { Err("give the number of seconds".to_owned()) } else { Ok(options) }
}

/// Builds every target, runs it over its corpus, then fuzzes it for `seconds`.
pub(crate) fn run(seconds: u32) -> Result<(), Findings> {
    run_with(&Options { seconds, ..Options::default() }).map(|_| ())
}

fn run_with(options: &Options) -> Result<Vec<Run>, Findings> {
    let binaries = match &options.binaries {
        Some(folder) => folder.clone(),
        None => build(root(), "target/fuzz")?,
    };
    let run = |target: String| fuzz(root(), &binaries, &target, options.seconds);
    let targets = targets()?;
    let at_a_time = programs_at_a_time(options.jobs);
    let each = (at_a_time / targets.len()).max(1);
    let queue = targets.into_iter().flat_map(|target| vec![target; each]).collect();
    Ok(merged(all_sound(at_a_time, queue, run)?))
}

/// The number requested; 0: one per core.
fn programs_at_a_time(jobs: usize) -> usize {
    if jobs == 0 { cores() } else { jobs }
}

/// One result per target: time and inputs of its programs are added, coverage is the maximum. Sorted by target.
fn merged(runs: Vec<Run>) -> Vec<Run> {
    let mut merged: Vec<Run> = Vec::new();
    for run in runs {
        match merged.last_mut().filter(|last| last.target == run.target) {
            Some(last) => {
                last.seconds += run.seconds;
                last.inputs += run.inputs;
                last.edges = last.edges.max(run.edges);
            }
            None => merged.push(run),
        }
    }
    merged
}

fn targets() -> Result<Vec<String>, Findings> {
    let folder = fs::read_dir(root().join("fuzz/fuzz_targets"));
    let mut names: Vec<String> = folder
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".rs").map(str::to_owned))
        .collect();
    names.sort();
    if names.is_empty() {
        return Err(vec!["fuzz/fuzz_targets has no targets".to_owned()]);
    }
    Ok(names)
}

/// Builds every target from `sources`; returns the folder of the programs.
fn build(sources: &Path, target_dir: &str) -> Result<PathBuf, Findings> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let target_dir = root().join(target_dir);
    let output = Command::new("cargo")
        .args(["build", "--quiet", "--release", "--manifest-path", "fuzz/Cargo.toml"])
        // With an explicit target, build scripts and macros are built without counters.
        .args(["--target", &triple, "--target-dir"])
        .arg(&target_dir)
        .env("RUSTFLAGS", FLAGS.join(" "))
        .current_dir(sources)
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => Ok(target_dir.join(triple).join("release")),
        Ok(output) => Err(vec![String::from_utf8_lossy(&output.stderr).into_owned()]),
        Err(error) => Err(vec![format!("cargo: {error}")]),
    }
}

/// Writes the programs, stripped, and this program to a folder.
fn keep(folder: &Path) -> Result<Vec<String>, Findings> {
    let binaries = build(root(), "target/fuzz")?;
    let targets = targets()?;
    copy(&targets, &binaries, folder)?;
    let failed = |what: &str, error: &dyn std::fmt::Display| vec![format!("{what}: {error}")];
    let own = std::env::current_exe().map_err(|e| failed("xtask", &e))?;
    fs::copy(own, folder.join("xtask")).map_err(|e| failed("xtask", &e))?;
    // Best effort: a program that is not stripped is only larger.
    let _ = Command::new("strip").args(&targets).arg("xtask").current_dir(folder).status();
    Ok(vec![format!("{}: {} targets", folder.display(), targets.len())])
}

/// Copies the targets' programs.
fn copy(targets: &[String], from: &Path, to: &Path) -> Result<(), Findings> {
    let failed = |error: std::io::Error| vec![format!("{}: {error}", to.display())];
    fs::create_dir_all(to).map_err(failed)?;
    for target in targets {
        fs::copy(from.join(target), to.join(target)).map_err(failed)?;
    }
    Ok(())
}

/// libFuzzer's command line for a target over its corpus in `sources`.
fn libfuzzer(sources: &Path, binaries: &Path, target: &str, found: &str) -> Command {
    let mut command = Command::new(binaries.join(target));
    command
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-artifact_prefix={found}"))
        .arg("-print_final_stats=1");
    // One dictionary per group of targets: that of `framing` for `framing_request` and `framing_response`.
    let kind = target.split('_').next().unwrap_or(target);
    let words = dictionary(sources, kind);
    let path = format!(".cache/fuzz/{kind}.dict");
    let written = || {
        fs::create_dir_all(sources.join(".cache/fuzz"))?;
        fs::write(sources.join(&path), words.as_bytes())
    };
    // Without it the target finds less.
    if !words.is_empty() && written().is_ok() {
        command.arg(format!("-dict={path}"));
    }
    command.current_dir(sources).stdin(Stdio::null());
    command
}

/// The dictionary of a kind of targets: the committed one, and what the code knows.
fn dictionary(sources: &Path, kind: &str) -> String {
    let mut text =
        fs::read_to_string(sources.join(format!("fuzz/{kind}.dict"))).unwrap_or_default();
    let all = Framing::ALL.iter();
    let page = fs::read_to_string(root().join("docs/configuration.md")).unwrap_or_default();
    // Its tables are made from the code.
    let keys = page.lines().filter_map(|row| row.strip_prefix("| `")?.split('`').next());
    let words: Vec<&str> = match kind {
        "framing" => all.flat_map(|framing| framing.words()).copied().collect(),
        "config" => all.map(|framing| framing.form().trim_end_matches('N')).chain(keys).collect(),
        _ => Vec::new(),
    };
    for word in words {
        let quoted = |byte: u8| match byte {
            b'"' | b'\\' | 0..b' ' | 0x7f.. => format!("\\x{byte:02x}"),
            _ => char::from(byte).to_string(),
        };
        text += &format!("\"{}\"\n", word.bytes().map(quoted).collect::<String>());
    }
    text
}

/// Runs one target.
fn fuzz(sources: &Path, binaries: &Path, target: &str, seconds: u32) -> Result<Run, String> {
    let (learnt, found) = (format!(".cache/fuzz/{target}"), format!("fuzz/artifacts/{target}/"));
    let corpus = format!("fuzz/corpus/{target}");
    for folder in [&learnt, &found] {
        fs::create_dir_all(sources.join(folder)).map_err(|e| format!("{folder}: {e}"))?;
    }
    if fs::read_dir(sources.join(&corpus)).map_or(0, Iterator::count) == 0 {
        return Err(format!("{corpus} is empty: add a seed input for {target}"));
    }
    let mut command = libfuzzer(sources, binaries, target, &found);
    command.arg(format!("-max_total_time={seconds}")).args([&learnt, &corpus]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{target}: {error}"))?;
    let stat = format!("/proc/{}/stat", child.id());
    let mut errors = child.stderr.take().expect("it is piped");
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        errors.read_to_end(&mut text).map(|_| text)
    });
    let mut ticks = 0;
    let status = loop {
        ticks = fs::read_to_string(&stat).ok().and_then(|stat| ticks_of(&stat)).unwrap_or(ticks);
        match child.try_wait().map_err(|error| format!("{target}: {error}"))? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    let text = reader.join().expect("no panic").map_err(|error| format!("{target}: {error}"))?;
    let text = String::from_utf8_lossy(&text);
    if !status.success() {
        let last: Vec<&str> = text.lines().rev().take(40).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        return Err(format!("{target}: {status}\n{}", last.join("\n")));
    }
    let after = |mark: &str| {
        let at = text.rfind(mark)? + mark.len();
        text[at..].split_whitespace().next()?.parse::<u64>().ok()
    };
    match (after("stat::number_of_executed_units:"), after("cov:")) {
        (Some(inputs @ 1..), Some(edges)) => {
            let seconds = ticks / TICKS_PER_SECOND;
            Ok(Run { target: target.to_owned(), seconds, inputs, edges })
        }
        _ => Err(format!("{target}: ran no input\n{text}")),
    }
}

/// The CPU time in a process's `stat`, user and system: proc(5), fields 14 and 15, counted after the name.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(14 - 3).map(str::parse::<u64>);
    Some(fields.next()?.ok()? + fields.next()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dictionaries_hold_the_words_of_every_framing() {
        let framing = dictionary(root(), "framing");
        assert!(
            framing.contains("\"get \"\n") && framing.contains("\"END\\x0d\\x0a\"\n"),
            "{framing}"
        );
        let config = dictionary(root(), "config");
        for framing in Framing::ALL {
            assert!(config.contains(&format!("\"{}\"\n", framing.form().trim_end_matches('N'))));
        }
        assert!(config.contains("\"request_timeout_ms\"\n"), "{config}");
        assert_eq!(dictionary(root(), "handshake"), "");
    }

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let stat = "12 (a) b) S 1 2 3 4 5 6 7 8 9 10 340 25 1 1 20 0";
        assert_eq!(ticks_of(stat), Some(365));
        assert_eq!(ticks_of("12 (a) S 1"), None);
    }

    #[test]
    fn programs_of_one_target_count_together() {
        let run = |target: &str, seconds, inputs, edges| Run {
            target: target.to_owned(),
            seconds,
            inputs,
            edges,
        };
        let runs = merged(vec![run("a", 5, 10, 7), run("a", 6, 20, 6), run("b", 1, 2, 3)]);
        let of = |run: &Run| (run.target.clone(), run.seconds, run.inputs, run.edges);
        let runs: Vec<_> = runs.iter().map(of).collect();
        assert_eq!(runs, [("a".to_owned(), 11, 30, 7), ("b".to_owned(), 1, 2, 3)]);
    }
}
