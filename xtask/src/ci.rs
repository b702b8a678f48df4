//! Continuous integration: `cargo xtask ci STEP...`.
//!
//! Steps have two tiers. `make test` runs the tier `test` after every change; `make ci` runs the tier `ci` as well.
//! `cargo xtask ci changed` runs the first tier and those steps of the second that the change touches.
//!
//! A step that passes prints one line. A step that fails prints all its output. A step that cannot
//! run on this machine prints why. The last lines count steps and tests, and name what was skipped (steps, tests
//! that print SKIPPED, and ignored tests). Each step shows its processor time; `weight.rs` compares that of a fresh clone with the table
//! in CONTRIBUTING.md.
//!
//! `cargo xtask ci all` leaves out the steps that have passed on the same sources (`passed.rs`), so an interrupted run goes on.

mod arm;
mod c_fmt;
mod miri;
mod passed;
mod test_programs;
mod weight;

use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

use self::passed::Passed;

pub(crate) use self::miri::every_test as every_test_under_miri;
use crate::files::{self, built, changed, root};
use crate::side_by_side::cores;
use crate::{
    Findings, abi, benchmarks, claims, cpu, drop_reasons, edges, fuzz, mutants, recipes, tidy, wasm,
};

/// The result of a step that did not fail.
enum Done {
    Passed,
    /// Passed, with these tests.
    Tested(Tally),
    /// The machine lacks something, named here.
    NotRun(String),
}

/// The result of a step that failed.
struct Failed {
    findings: Findings,
    /// The tests it ran.
    tests: Tally,
}

impl From<Findings> for Failed {
    fn from(findings: Findings) -> Self {
        Self { findings, tests: Tally::default() }
    }
}

type Outcome = Result<Done, Failed>;

/// Test counts of a step.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    /// Names of tests that printed SKIPPED or are ignored.
    skipped: Vec<String>,
}

impl Tally {
    /// Parses the output of `cargo test`.
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
        // A test that printed SKIPPED ran, but checked nothing.
        tally.passed = tally.passed.saturating_sub(silent);
        tally
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped.extend(other.skipped);
    }

    /// Records a skipped test; false if it was known.
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

/// When a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    Test,
    Ci,
}

struct Step {
    name: &'static str,
    what: &'static str,
    tier: Tier,
    /// Changes to these paths trigger a step of tier `ci`.
    touched_by: &'static [&'static str],
    run: fn() -> Outcome,
}

const fn always(name: &'static str, what: &'static str, run: fn() -> Outcome) -> Step {
    Step { name, what, tier: Tier::Test, touched_by: &[], run }
}

const fn after_changes(
    touched_by: &'static [&'static str],
    name: &'static str,
    what: &'static str,
    run: fn() -> Outcome,
) -> Step {
    Step { name, what, tier: Tier::Ci, touched_by, run }
}

const RINGS: &str = "crates/mqueue/";
const CODECS: &str = "crates/wire/";
const ENGINE: &str = "crates/engine/";
const SIM: &str = "crates/sim/";

/// This step runs the mutants of the crates that have changed.
const MUTANTS: &str = "mutants";
/// The paths that have changed, if only what they affect runs.
static CHANGED: OnceLock<Vec<String>> = OnceLock::new();

const STEPS: &[Step] = &[
    always("fmt", "cargo fmt", fmt),
    always("c-fmt", "clang-format on the libraries in C and C++", c_fmt::check),
    always("tidy", "house rules", || found(tidy::check())),
    always("edges", "ordering edges", || found(edges::check())),
    always("abi-diff", "generated files are up to date", || found(abi::differences())),
    always("drop-reasons", "a test for each", || found(drop_reasons::check(false))),
    always("recipes", "examples of CONTRIBUTING.md's recipes apply", || found(recipes::check())),
    always("compiler", "the compiler of modules, for the tests", || {
        command("cargo build --quiet --release --package serval-compile", &[])
    }),
    always("clippy", "clippy, warnings refused", clippy),
    always("tests", "every test program, loom's models among them", || {
        test_programs::run(Tier::Test)
    }),
    always("device", "the device library and the kernels on the host", device),
    always("python", "the Python package: wheel, types, tests", python),
    after_changes(
        &["python/", "crates/collective/"],
        "torch",
        "serval.distributed gives the results of Gloo (downloads torch the first time)",
        || command("make --no-print-directory -C python test-torch", &[]),
    ),
    after_changes(
        &["docs/", "README.md", "benches/"],
        "benchmarks",
        "tables and figures are what was measured",
        || found(benchmarks::check()),
    ),
    after_changes(
        &["docs/", "README.md", "SECURITY.md", "ORDERING.md", "crates/"],
        "proof",
        "tests named in documents exist",
        || found(claims::check()),
    ),
    // Before the tests that build with the compiler that this fetches.
    after_changes(
        &["device/", "benches/baselines/", "benches/ingest/", "crates/mqueue/src/abi"],
        "nvcc",
        "every kernel compiles for sm_80, sm_90 and sm_100, and the GPU baselines do",
        nvcc,
    ),
    after_changes(
        &[
            "tools/",
            "benches/",
            "crates/server/",
            "crates/bench/",
            "crates/cli/",
            "crates/accel/",
            "device/",
            "Makefile",
        ],
        "tool-tests",
        "tests of the bench, the demos and the GPU scripts",
        || test_programs::run(Tier::Ci),
    ),
    after_changes(
        &[
            "crates/wire/src/framing/memcached",
            "crates/engine/src/endpoint/",
            "crates/builtins/src/memcached_cache",
            "crates/server/tests/memcached_fuzz",
        ],
        "memcached",
        "generated commands with and without the proxy",
        || {
            let seeds = [("SERVAL_MEMCACHED_SEEDS", "1500"), ("SERVAL_MEMCACHED_SECONDS", "150")];
            command("cargo test --quiet --package serval-server --test memcached_fuzz", &seeds)
        },
    ),
    after_changes(
        &[
            "tools/remote-netns",
            "crates/remote/",
            "crates/runtime/",
            "crates/server/",
            "crates/wire/src/link",
        ],
        "remote-netns",
        "a remote accelerator in another network namespace",
        remote_netns,
    ),
    after_changes(&[ENGINE, SIM, RINGS, CODECS], "seeds", "the simulator over 2 000 seeds", || {
        seeds("2000")
    }),
    after_changes(
        &[ENGINE, "tools/check-endpoints"],
        "endpoints",
        "each endpoint of the engine can be deleted",
        || command("tools/check-endpoints", &[]),
    ),
    after_changes(
        &["crates/", "xtask/src/mutants"],
        MUTANTS,
        "the tests catch every seeded bug",
        || {
            let touched = CHANGED.get().map(|paths| mutants::touched(paths)).unwrap_or_default();
            Ok(mutants::run(&touched).map(|_| Done::Passed)?)
        },
    ),
    after_changes(&["benches/"], "microbench", "every microbenchmark once, checked", microbench),
    after_changes(&["device/"], "models", "LeNet and faces against their references", models),
    after_changes(&["device/"], "tsan", "the device library under ThreadSanitizer", tsan),
    after_changes(
        &[RINGS, CODECS, ENGINE, SIM],
        "wasm",
        "the sans-IO crates build for wasm32, without imports",
        wasm,
    ),
    after_changes(
        &["crates/", "device/"],
        "arm",
        "the command builds for aarch64; messages, rings and parsers under qemu",
        arm::step,
    ),
    after_changes(
        &[RINGS, CODECS],
        "miri",
        "rings, edges and codecs under Miri (nightly)",
        miri::step,
    ),
    after_changes(&[RINGS], "asan", "the rings under AddressSanitizer (nightly)", asan),
    after_changes(
        &[
            RINGS,
            CODECS,
            "fuzz/",
            "crates/engine/src/endpoint/shm",
            "crates/server/src/config",
            "crates/server/src/control",
            "crates/server/src/exporter/http.rs",
            "crates/collective/src/",
            "crates/transfer/src/stages/compress.rs",
            "crates/transfer/src/service/message.rs",
            "crates/transfer/src/stages/seal.rs",
        ],
        "fuzz",
        "every fuzz target over its corpus and for a while",
        || Ok(fuzz::run(FUZZ_SECONDS).map(|()| Done::Passed)?),
    ),
    after_changes(
        &["integrations/", "benches/transfer/compare.py", "python/serval/transfer.py"],
        "integrations",
        "the module for Swift, types and tests (downloads Swift the first time)",
        || command("make --no-print-directory -C integrations test", &[]),
    ),
    after_changes(
        &["Makefile", "tools/deb", "tools/try-packages", "python/", "crates/cli/Cargo.toml"],
        "packages",
        "wheel and Debian package in a root without Rust: installed, first reply, a module",
        || {
            command("make --no-print-directory wheel deb", &[])?;
            or_not_run(Command::new("tools/try-packages"))
        },
    ),
    after_changes(
        &["Cargo.toml", "Cargo.lock", "crates/", "python/", "Makefile"],
        "weight",
        "processor time of `make demo` and `make test` in a fresh clone",
        weight::step,
    ),
    after_changes(&["crates/"], "docs", "rustdoc, warnings refused, and its examples", docs),
];

/// Fuzzing time per target.
const FUZZ_SECONDS: u32 = 30;

/// Runs the steps that `names` asks for, or lists them.
pub(crate) fn run(names: &[&str]) -> ExitCode {
    if names.is_empty() || names.iter().any(|name| matches!(*name, "--help" | "-h")) {
        print!("{}", usage());
        return ExitCode::SUCCESS;
    }
    let steps = match chosen(names) {
        Ok(steps) => steps,
        Err(wrong) => {
            eprintln!("ci: {wrong}");
            return ExitCode::from(2);
        }
    };
    let start = Instant::now();
    let mut summary = Summary::default();
    let passed = (names == ["all"]).then(Passed::of_sources);
    for step in steps {
        match &passed {
            Some(passed) if passed.contains(step.name) => {
                println!("{:13} {:50} passed before, on these sources", step.name, step.what);
                summary.passed += 1;
            }
            _ => {
                let has_passed = summary.take(step);
                // These depend on the history, which the tree does not show.
                let depends_on_tree = !matches!(step.name, "benchmarks" | "weight");
                if has_passed && depends_on_tree {
                    passed.iter().for_each(|passed| passed.insert(step.name));
                }
            }
        }
    }
    let minutes = start.elapsed().as_secs_f32() / 60.0;
    let cpu_minutes = summary.cpu_seconds / 60.0;
    println!("\n{}; {minutes:.1} minutes, {cpu_minutes:.1} of CPU", summary.steps());
    println!("{}", summary.tests());
    if summary.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn usage() -> String {
    let mut text = "\
usage: cargo xtask ci STEP...
       cargo xtask ci test             the steps of `make test`
       cargo xtask ci all              every step
       cargo xtask ci changed [BASE]   those of `make test`, and those affected by the changes since BASE (default: main)
"
    .to_owned();
    for (tier, title) in [(Tier::Test, "make test"), (Tier::Ci, "make ci, besides")] {
        text += &format!("\n{title}:\n");
        for step in STEPS.iter().filter(|step| step.tier == tier) {
            text += &format!("  {:13} {}\n", step.name, step.what);
        }
    }
    text
}

/// The steps in their order.
fn chosen(names: &[&str]) -> Result<Vec<&'static Step>, String> {
    let steps = |wanted: &dyn Fn(&Step) -> bool| STEPS.iter().filter(|step| wanted(step)).collect();
    match names {
        ["all"] => Ok(steps(&|_| true)),
        ["test"] => Ok(steps(&|step| step.tier == Tier::Test)),
        ["changed", options @ ..]
            if options.len() > 1 || options.iter().any(|o| o.starts_with('-')) =>
        {
            Err(format!("`changed` takes one commit, not {:?}\n{}", options.join(" "), usage()))
        }
        ["changed", ..] => {
            let base = names.get(1).copied();
            let paths = files::changed_since(base.unwrap_or("main"))?;
            let paths = CHANGED.get_or_init(|| paths);
            Ok(steps(&|step| step.tier == Tier::Test || is_touched(step, paths)))
        }
        _ => match names.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
            Some(unknown) => Err(format!("no step {unknown:?}\n{}", usage())),
            None => Ok(steps(&|step| names.contains(&step.name))),
        },
    }
}

fn is_touched(step: &Step, paths: &[String]) -> bool {
    if step.name == MUTANTS {
        return !mutants::touched(paths).is_empty();
    }
    paths.iter().any(|path| step.touched_by.iter().any(|touching| path.starts_with(touching)))
}

/// Results of the steps.
#[derive(Default)]
struct Summary {
    passed: u64,
    failed: u64,
    skipped: Vec<&'static str>,
    tests: Tally,
    cpu_seconds: f64,
}

impl Summary {
    /// Runs a step and prints its result. Returns whether it passed, with no test skipped.
    fn take(&mut self, step: &Step) -> bool {
        print!("{:13} {:50} ", step.name, step.what);
        // Show which step is running.
        let _ = std::io::stdout().flush();
        let (start, cpu_before) = (Instant::now(), cpu::of_children());
        let outcome = (step.run)();
        let (wall, cpu) = (start.elapsed().as_secs(), cpu::of_children() - cpu_before);
        let spent = format!("{wall:5} s {cpu:6.0} s CPU");
        let has_passed = match &outcome {
            Ok(Done::Passed) => true,
            Ok(Done::Tested(tally)) => tally.skipped.is_empty(),
            _ => false,
        };
        self.cpu_seconds += cpu;
        match outcome {
            Ok(done @ (Done::Passed | Done::Tested(_))) => {
                self.passed += 1;
                println!("passed {spent}");
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
                println!("FAILED {spent}");
                for finding in &findings {
                    println!("{}: {finding}", step.name);
                }
            }
        }
        has_passed
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

    /// The last line, in machine-readable form.
    fn tests(&self) -> String {
        let Tally { passed, failed, skipped } = &self.tests;
        format!("Tests: {passed} passed, {failed} failed, {} skipped", skipped.len())
    }
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

/// The output of tests, without the parts about passed tests.
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
    command("cargo clippy --workspace --exclude serval-compile --all-targets -- -D warnings", &[])
}

/// Runs a tool in the root, which may end with [`UNAVAILABLE`].
fn or_not_run(mut tool: Command) -> Outcome {
    let done = tool.current_dir(root()).stdin(Stdio::null()).output();
    let done = done.map_err(|error| vec![format!("{tool:?}: {error}")])?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match done.status.code() {
        Some(0) => Ok(Done::Passed),
        Some(UNAVAILABLE) => Ok(Done::NotRun(text(&done.stderr))),
        _ => {
            Err(vec![format!("{}\n{}{}", done.status, text(&done.stdout), text(&done.stderr))]
                .into())
        }
    }
}

/// The exit code of a tool that this machine does not allow to run; it prints why.
const UNAVAILABLE: i32 = 77;

/// Finds a spoiled answer, then none.
fn remote_netns() -> Outcome {
    command("cargo build --package serval-cli", &[])?;
    let run = |more: &[&str]| {
        let mut tool = Command::new("tools/remote-netns");
        tool.arg("--serval").arg(built().join("debug/serval"));
        tool.args(["--rounds", "2", "--json"]).args(more);
        let done = tool.current_dir(root()).stdin(Stdio::null()).output();
        done.map_err(|error| vec![format!("tools/remote-netns: {error}")])
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let spoiled = run(&["--corrupt"])?;
    if spoiled.status.code() == Some(UNAVAILABLE) {
        return Ok(Done::NotRun(text(&spoiled.stderr)));
    }
    if spoiled.status.code() != Some(1) || !text(&spoiled.stderr).contains("remote-netns: 1 of ") {
        let found = format!("a spoiled answer: {}\n{}", spoiled.status, text(&spoiled.stderr));
        return Err(vec![found].into());
    }
    let done = run(&[])?;
    if done.status.success() {
        Ok(Done::Passed)
    } else {
        Err(vec![format!("{}\n{}{}", done.status, text(&done.stdout), text(&done.stderr))].into())
    }
}

/// The simulator's test with this number of seeds.
fn seeds(count: &str) -> Outcome {
    let test = "cargo test --package serval-sim --test seeds seeds_hold_and_reach_everything";
    command(test, &[("SERVAL_SEEDS", count)])
}

/// The tables of docs/configuration.md are generated from the code that reads the configuration: a test compares them
/// (as part of `cargo test`) or, with `write`, writes them.
pub(crate) fn configuration(write: bool) -> Result<Vec<String>, Findings> {
    const PAGE: &str = "docs/configuration.md";
    let read = || std::fs::read(root().join(PAGE)).unwrap_or_default();
    let before = read();
    let line = "cargo test --quiet --package serval-server --test config the_page_of_all_keys_matches_the_reader";
    let environment: &[_] = if write { &[("UPDATE_GOLDEN", "1")] } else { &[] };
    command(line, environment).map_err(|failed| failed.findings)?;
    Ok(vec![changed(PAGE, read() != before)])
}

fn microbench() -> Outcome {
    command("cargo bench --quiet --package serval-benches -- --test", &[])
}

/// Runs targets of a Makefile with one job per core.
fn make(folder_and_targets: &str, environment: &[(&str, &str)]) -> Outcome {
    let jobs = cores();
    let line = format!("make --no-print-directory --output-sync -j{jobs} -C {folder_and_targets}");
    command(&line, environment)
}

fn device() -> Outcome {
    make("device test", &[])
}

/// The Makefile creates the environment with pytest and builds the wheel.
fn python() -> Outcome {
    command("make --no-print-directory -C python test", &[])
}

fn models() -> Outcome {
    make("device/models test", &[])
}

fn tsan() -> Outcome {
    make("device tsan", &[])
}

/// The compiler comes from PyPI (`device/Makefile` installs it); neither a GPU nor a driver is needed.
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
    // The simulator uses the three libraries, so the linker keeps their code.
    let crates = "-p serval-mqueue -p serval-wire -p serval-engine -p serval-sim";
    command(&format!("cargo build {crates} --target {target}"), &[])?;
    let module = built().join(format!("{target}/debug/serval-sim.wasm"));
    let bytes = std::fs::read(&module).map_err(|e| vec![format!("{}: {e}", module.display())])?;
    found(wasm::imports(&bytes))
}

/// The reason to skip if the standard library for `target` is not installed.
fn lacks_target(target: &str) -> Option<Done> {
    let installed = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .is_ok_and(|o| Path::new(String::from_utf8_lossy(&o.stdout).trim()).exists());
    (!installed).then(|| Done::NotRun(format!("`rustup target add {target}` installs the target")))
}

fn docs() -> Outcome {
    command("cargo doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")])?;
    command("cargo test --workspace --doc", &[])
}

/// Whether a command of the nightly toolchain works on this machine.
fn works(line: &str) -> bool {
    let mut words = line.split(' ');
    let program = words.next().expect("a program");
    let quiet =
        Command::new(program).args(words).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

fn asan() -> Outcome {
    if !works("cargo +nightly --version") {
        return Ok(Done::NotRun("no nightly toolchain; `make setup-ci` installs it".to_owned()));
    }
    let environment = [("RUSTFLAGS", "-Zsanitizer=address")];
    // With an explicit target, build scripts and macros are built without the sanitizer.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command(&format!("cargo +nightly test -p serval-mqueue --target {target}"), &environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_chosen_by_tier_and_by_what_changed() {
        let names = |wanted: &[&str]| -> Vec<&str> {
            chosen(wanted).unwrap().into_iter().map(|step| step.name).collect()
        };
        assert_eq!(names(&["all"]).len(), STEPS.len());
        assert!(names(&["test"]).contains(&"tests") && !names(&["test"]).contains(&"miri"));
        assert_eq!(names(&["miri", "fmt"]), ["fmt", "miri"]);
        for wrong in
            [&["nothing"][..], &["--quick"], &["changed", "--quick"], &["changed", "a", "b"]]
        {
            let refused = chosen(wrong).err().expect("it is not a step");
            assert!(refused.contains("usage: "), "{refused}");
        }
        let touched = |path: &str| -> Vec<&str> {
            let paths = [path.to_owned()];
            STEPS.iter().filter(|step| is_touched(step, &paths)).map(|step| step.name).collect()
        };
        for (path, step) in [
            ("crates/mqueue/src/ring.rs", "miri"),
            ("crates/mqueue/src/ring.rs", "asan"),
            ("device/kernels/echo.cpp", "nvcc"),
            ("device/include/serval/kernel.h", "tsan"),
            ("crates/wire/src/framing.rs", "fuzz"),
            ("crates/wire/src/framing/memcached/command.rs", "memcached"),
            ("crates/engine/src/worker.rs", "mutants"),
            ("crates/transfer/src/run/flow.rs", "mutants"),
            ("crates/engine/src/worker.rs", "seeds"),
            ("docs/benchmarks/udp-echo-1.json", "benchmarks"),
            ("crates/remote/src/mirror.rs", "remote-netns"),
        ] {
            assert!(touched(path).contains(&step), "{path}");
        }
        assert!(touched("LICENSE").is_empty());
    }

    #[test]
    fn the_paths_that_steps_name_exist() {
        for path in STEPS.iter().flat_map(|step| step.touched_by) {
            let (folder, begin) = path.rsplit_once('/').unwrap_or((".", path));
            let mut entries = std::fs::read_dir(root().join(folder)).unwrap().flatten();
            let begins = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(begin);
            assert!(entries.any(|entry| begins(&entry.file_name())), "{path}");
        }
    }

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
