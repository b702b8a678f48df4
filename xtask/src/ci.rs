//! Continuous integration: `cargo xtask ci STEP...`.
//!
//! Quiet about what passes: one line a step. A step that fails shows everything it printed. What could
//! not run on this machine says why. The last lines count steps and tests, name what was skipped (steps, tests
//! that say SKIPPED, and ignored ones) and say whether all of it stayed within its time.

mod clock;
mod miri;

use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use self::clock::Clock;
pub(crate) use self::miri::every_test as every_test_under_miri;
use crate::files::root;
use crate::side_by_side::cores;
use crate::{Findings, abi, benchmarks, drop_reasons, edges, fuzz, mutants, proof, tidy, wasm};

/// How a step ended well.
enum Done {
    Passed,
    /// Having run these tests.
    Tested(Tally),
    /// The machine lacks something; says what.
    NotRun(String),
}

/// How a step ended badly.
struct Failed {
    findings: Findings,
    /// The tests that it ran.
    tests: Tally,
}

impl From<Findings> for Failed {
    fn from(findings: Findings) -> Self {
        Self { findings, tests: Tally::default() }
    }
}

type Outcome = Result<Done, Failed>;

/// Tests of a step.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    /// Names of those that said SKIPPED or are ignored.
    skipped: Vec<String>,
}

impl Tally {
    /// Reads what `cargo test` printed.
    fn of(output: &str) -> Self {
        let mut tally = Self::default();
        let (mut speaker, mut silent) = ("", 0);
        for line in output.lines() {
            if let Some(test) =
                line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----"))
            {
                speaker = test;
            } else if line.starts_with("SKIPPED") {
                silent += u64::from(tally.skip(speaker));
            } else if let Some((test, _)) =
                line.strip_prefix("test ").and_then(|l| l.split_once(" ... ignored"))
            {
                tally.skip(test);
            } else if let Some(counts) = line.strip_prefix("test result: ") {
                tally.passed += count_before(counts, " passed;");
                tally.failed += count_before(counts, " failed;");
            }
        }
        // Who says so ran, but did not test.
        tally.passed = tally.passed.saturating_sub(silent);
        tally
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped.extend(other.skipped);
    }

    /// Whether it is news.
    fn skip(&mut self, test: &str) -> bool {
        let news = self.skipped.iter().all(|name| name != test);
        if news {
            self.skipped.push(test.to_owned());
        }
        news
    }
}

/// The number before these words, or 0.
fn count_before(text: &str, words: &str) -> u64 {
    let number = text.split(words).next().and_then(|before| before.rsplit(' ').next());
    number.filter(|_| text.contains(words)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn() -> Outcome,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", what: "cargo fmt", run: fmt },
    Step { name: "clippy", what: "clippy, warnings refused", run: clippy },
    Step { name: "tidy", what: "house rules", run: || found(tidy::check()) },
    Step { name: "edges", what: "ordering edges", run: || found(edges::check()) },
    Step {
        name: "abi-diff",
        what: "generated files are up to date",
        run: || found(abi::differences()),
    },
    Step {
        name: "benchmarks",
        what: "tables and figures are what was measured",
        run: || found(benchmarks::check()),
    },
    Step {
        name: "drop-reasons",
        what: "a test for each",
        run: || found(drop_reasons::check(false)),
    },
    Step {
        name: "proof",
        what: "every promise names what checks it",
        run: || Ok(proof::check().map(|_| Done::Passed)?),
    },
    // Before the tests, which build with the compiler that this fetches.
    Step {
        name: "nvcc",
        what: "every kernel compiles for sm_80, sm_90 and sm_100, and the GPU baselines do",
        run: nvcc,
    },
    Step { name: "test", what: "cargo test", run: test },
    Step {
        name: "mutants",
        what: "the tests catch every seeded bug",
        run: || Ok(mutants::run(&[]).map(|_| Done::Passed)?),
    },
    Step { name: "microbench", what: "every microbenchmark once, checked", run: microbench },
    Step { name: "device", what: "the device library and the kernels on the host", run: device },
    Step { name: "models", what: "LeNet and faces against their references", run: models },
    Step { name: "tsan", what: "the device library under ThreadSanitizer", run: tsan },
    Step { name: "wasm", what: "the sans-IO crates build for wasm32, without imports", run: wasm },
    Step { name: "arm", what: "builds for aarch64; rings and parsers under qemu", run: arm },
    Step { name: "loom", what: "the rings under loom", run: loom },
    Step { name: "miri", what: "rings, edges and codecs under Miri (nightly)", run: miri::step },
    Step { name: "asan", what: "the rings under AddressSanitizer (nightly)", run: asan },
    Step {
        name: "fuzz",
        what: "every fuzz target over its corpus and for a while",
        run: || Ok(fuzz::run(fuzz_seconds()).map(|()| Done::Passed)?),
    },
    Step { name: "docs", what: "rustdoc, warnings refused", run: docs },
];

/// How long each target is fuzzed: 30 s, or what FUZZ_SECONDS says (`make test` says 10).
fn fuzz_seconds() -> u32 {
    let asked = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(30).max(1)
}

/// Runs the named steps (`all` for every one), or lists them.
pub(crate) fn run(names: &[&str]) -> ExitCode {
    if names.is_empty() {
        println!("usage: cargo xtask ci STEP...   (all: every step)\n");
        for step in STEPS {
            println!("  {:13} {}", step.name, step.what);
        }
        return ExitCode::SUCCESS;
    }
    let everything = names == ["all"];
    let known = |name: &&&str| !STEPS.iter().any(|step| step.name == **name);
    if let Some(unknown) = names.iter().find(known).filter(|_| !everything) {
        eprintln!("ci: no step {unknown:?}; `cargo xtask ci` lists them");
        return ExitCode::from(2);
    }
    let clock = Clock::start();
    let mut summary = Summary::default();
    for step in STEPS.iter().filter(|step| everything || names.contains(&step.name)) {
        summary.take(step);
    }
    let in_time = if everything { clock.verdict() } else { None };
    println!("\n{}", summary.steps());
    if let Some(verdict) = &in_time {
        println!("{}", verdict.text);
    }
    println!("{}", summary.tests());
    let too_long = in_time.is_some_and(|verdict| verdict.too_long);
    if summary.failed > 0 || too_long { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// What the steps came to.
#[derive(Default)]
struct Summary {
    passed: u64,
    failed: u64,
    skipped: Vec<&'static str>,
    tests: Tally,
}

impl Summary {
    /// Runs a step and tells how it ended.
    fn take(&mut self, step: &Step) {
        print!("{:13} {:50} ", step.name, step.what);
        // A terminal shows what is running.
        let _ = std::io::stdout().flush();
        let start = Instant::now();
        let outcome = (step.run)();
        let seconds = start.elapsed().as_secs();
        match outcome {
            Ok(done @ (Done::Passed | Done::Tested(_))) => {
                self.passed += 1;
                println!("passed {seconds:5} s");
                if let Done::Tested(tally) = done {
                    self.tests.add(tally);
                }
            }
            Ok(Done::NotRun(why)) => {
                self.skipped.push(step.name);
                println!("SKIPPED: {why}");
            }
            Err(Failed { findings, tests }) => {
                self.failed += 1;
                self.tests.add(tests);
                println!("FAILED {seconds:5} s");
                for finding in &findings {
                    println!("{}: {finding}", step.name);
                }
            }
        }
    }

    fn steps(&self) -> String {
        let named = |list: &[&str]| match list {
            [] => "0 SKIPPED".to_owned(),
            some => format!("{} SKIPPED ({})", some.len(), some.join(", ")),
        };
        let tests_skipped: Vec<&str> = self.tests.skipped.iter().map(String::as_str).collect();
        format!(
            "steps: {} passed, {} failed, {}; tests: {} passed, {}",
            self.passed,
            self.failed,
            named(&self.skipped),
            self.tests.passed,
            named(&tests_skipped)
        )
    }

    /// The last line, for programs to read.
    fn tests(&self) -> String {
        let Tally { passed, failed, skipped } = &self.tests;
        format!("Tests: {passed} passed, {failed} failed, {} skipped", skipped.len())
    }
}

/// Whether there is a step of this name.
pub(crate) fn has_step(name: &str) -> bool {
    name == "all" || STEPS.iter().any(|step| step.name == name)
}

fn found(findings: Findings) -> Outcome {
    if findings.is_empty() { Ok(Done::Passed) } else { Err(findings.into()) }
}

/// Runs a command in the root with environment variables added.
fn command(line: &str, environment: &[(&str, &str)]) -> Outcome {
    let mut words = line.split(' ');
    let program = words.next().expect("a program");
    let output = Command::new(program)
        .args(words)
        .envs(environment.iter().copied())
        .current_dir(root())
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => {
            Ok(Done::Tested(Tally::of(&String::from_utf8_lossy(&output.stdout))))
        }
        Ok(output) => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (out, err) = (text(&output.stdout), text(&output.stderr));
            let shown = without_successes(&out);
            let findings = vec![format!("`{line}`: {}\n{shown}{err}", output.status)];
            Err(Failed { findings, tests: Tally::of(&out) })
        }
        Err(error) => Err(vec![format!("`{line}`: {error}")].into()),
    }
}

/// What tests printed, without the parts of those that passed.
fn without_successes(output: &str) -> String {
    let mut passed = false;
    let mut kept = String::new();
    for line in output.lines() {
        passed = line == "successes:"
            || passed && line != "failures:" && !line.starts_with("test result");
        if !passed {
            kept += line;
            kept.push('\n');
        }
    }
    kept
}

fn fmt() -> Outcome {
    command("cargo fmt --all --check", &[])
}

fn clippy() -> Outcome {
    command("cargo clippy --workspace --all-targets -- -D warnings", &[])
}

fn test() -> Outcome {
    // What passing tests print tells which of them were skipped.
    command("cargo test --workspace --no-fail-fast -- --show-output", &[])
}

/// The tables of docs/configuration.md come from the code that reads a configuration: a test of it compares them
/// (with every other one in `cargo test`) or, to `write`, makes them.
pub(crate) fn configuration(write: bool) -> Findings {
    let line =
        "cargo test --quiet --package serval --test config the_page_of_all_keys_is_what_is_read";
    let environment: &[_] = if write { &[("UPDATE_GOLDEN", "1")] } else { &[] };
    match command(line, environment) {
        Ok(_) => Findings::new(),
        Err(failed) => failed.findings,
    }
}

fn microbench() -> Outcome {
    command("cargo bench --quiet --package serval-benches -- --test", &[])
}

/// Makes targets of a folder, on every processor.
fn make(folder_and_targets: &str, environment: &[(&str, &str)]) -> Outcome {
    let jobs = cores();
    let line = format!("make --no-print-directory --output-sync -j{jobs} -C {folder_and_targets}");
    command(&line, environment)
}

fn device() -> Outcome {
    make("device test", &[])
}

fn models() -> Outcome {
    make("device/models test", &[])
}

fn tsan() -> Outcome {
    make("device tsan", &[])
}

/// The compiler comes from PyPI (`device/Makefile` installs it); no GPU and no driver is needed.
fn nvcc() -> Outcome {
    make("device nvcc-check nvrtc", &[])?;
    make("benches/ingest", &[])?;
    make("benches/baselines gpu", &[])
}

fn wasm() -> Outcome {
    let target = "wasm32-unknown-unknown";
    if let Some(lacking) = lacks_target(target) {
        return Ok(lacking);
    }
    // The simulator is a program around the three others: what it links is not thrown away.
    let crates = "-p serval-mqueue -p serval-wire -p serval-engine -p serval-sim";
    command(&format!("cargo build {crates} --target {target}"), &[])?;
    let module = root().join(format!("target/{target}/debug/serval-sim.wasm"));
    let bytes = std::fs::read(&module).map_err(|e| vec![format!("{}: {e}", module.display())])?;
    found(wasm::imports(&bytes))
}

/// What to say when the compiler has no standard library for `target`.
fn lacks_target(target: &str) -> Option<Done> {
    let installed = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .is_ok_and(|o| Path::new(String::from_utf8_lossy(&o.stdout).trim()).exists());
    (!installed).then(|| Done::NotRun(format!("`rustup target add {target}` installs the target")))
}

/// Where memory is ordered more weakly and pages may be larger. qemu interprets the rings' tests; it
/// keeps the order of the machine it runs on, so this shows that the code is portable, not that no edge
/// is missing: loom and `serval doctor --litmus` on the real thing do.
fn arm() -> Outcome {
    let target = "aarch64-unknown-linux-gnu";
    if let Some(lacking) = lacks_target(target) {
        return Ok(lacking);
    }
    for program in ["aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64"] {
        if !works(&format!("{program} --version")) {
            return Ok(Done::NotRun(format!("no {program} here; `make setup-test` installs it")));
        }
    }
    let environment = [
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc"),
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", ARM_RUNNER),
        ("RUSTFLAGS", "-D warnings"),
        ("CARGO_TARGET_DIR", "target/arm"),
    ];
    let crates = "-p serval-mqueue -p serval-wire -p serval-engine -p serval-sys";
    command(&format!("cargo build {crates} --target {target}"), &environment)?;
    let test = format!("cargo test -p serval-mqueue -p serval-wire --tests --target {target}");
    let few_cases = [&environment[..], &[("PROPTEST_CASES", "16")]].concat();
    let tested = command(&test, &few_cases)?;
    make("device arm-test", &[("QEMU", ARM_RUNNER)])?;
    Ok(tested)
}

const ARM_RUNNER: &str = "qemu-aarch64 -L /usr/aarch64-linux-gnu";

fn docs() -> Outcome {
    command("cargo doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")])
}

/// With its own target folder, because the flag would rebuild everything twice.
fn loom() -> Outcome {
    let environment = [("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")];
    command("cargo test --release -p serval-mqueue --test loom", &environment)
}

/// Whether a command of the nightly toolchain works here.
fn works(line: &str) -> bool {
    let mut words = line.split(' ');
    let program = words.next().expect("a program");
    let quiet =
        Command::new(program).args(words).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

fn asan() -> Outcome {
    if !works("cargo +nightly --version") {
        return Ok(Done::NotRun("no nightly here; `make setup-test` installs it".to_owned()));
    }
    let environment = [("RUSTFLAGS", "-Zsanitizer=address"), ("CARGO_TARGET_DIR", "target/asan")];
    // The target is named, so that build scripts and macros are built without the sanitizer.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command(&format!("cargo +nightly test -p serval-mqueue --target {target}"), &environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_tests_of_every_step() {
        let mut summary = Summary::default();
        for output in [
            "test result: ok. 30 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n\
             ---- a stdout ----\nSKIPPED: no such file\n",
        ] {
            summary.tests.add(Tally::of(output));
        }
        assert_eq!(summary.tests(), "Tests: 32 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn tests_are_counted_and_those_that_tested_nothing_are_named() {
        let output = "\
running 3 tests
test a ... ok
test b::c ... ok
test d ... ignored, takes an hour

successes:

---- b::c stdout ----
SKIPPED: no such file
SKIPPED: nor that one

successes:
    a
    b::c

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s
test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s
";
        let tally = Tally::of(output);
        assert_eq!((tally.passed, tally.skipped), (41, vec!["d".to_owned(), "b::c".to_owned()]));
        let kept = without_successes(output);
        assert!(kept.contains("ignored, takes") && !kept.contains("nor that one"), "{kept}");
        assert_eq!(kept.matches("test result").count(), 2);
    }
}
