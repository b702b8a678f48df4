//! The tests of the rings and the codecs under Miri. The CI step runs a selection that takes a minute or two;
//! `cargo xtask miri` runs all of them, and `make miri` records the result.
//!
//! "All" means the code for a processor without vector registers: 16-byte granules use assembly, which Miri cannot run.
//! The loom models need a build of their own and are a separate step.

use std::time::Instant;

use super::{Done, Failed, Findings, Outcome, Tally, command, works};
use crate::files;
use crate::side_by_side::{cores, side_by_side};

/// Crates whose tests all run under Miri.
const CRATES: [&str; 2] = ["mqueue", "wire"];
/// Files of multi-threaded tests: each seed is another schedule, with other stale values for loads.
const THREADED: [&str; 2] = ["edges", "stress"];
/// Seeds for those in a full run.
const SEEDS: u32 = 8;
/// The slowest files.
const LONG: [&str; 3] = ["stress", "hostile", "property"];

/// The selection for the CI step.
pub(super) fn step() -> Outcome {
    if let Some(lacking) = lacking() {
        return Ok(Done::NotRun(lacking));
    }
    under_miri("", "-p serval-mqueue -p serval-wire --no-run")?;
    // The slowest first.
    let parts = [
        ("", "-p serval-mqueue --test rings -- stress::"),
        ("", "-p serval-mqueue --lib"),
        ("", "-p serval-mqueue --test rings -- ring::"),
        ("", "-p serval-mqueue --test rings -- a_bad_header a_flood a_random_region a_truncated"),
        ("-Zmiri-many-seeds=0..4", "-p serval-mqueue --test rings -- edges::"),
        ("", "-p serval-wire --lib -- handshake session"),
    ];
    let ran = side_by_side(cores(), parts.to_vec(), |(flags, tests)| under_miri(flags, tests));
    let (mut tests, mut findings) = (Tally::default(), Findings::new());
    for ((flags, _), outcome) in parts.iter().zip(ran) {
        match outcome {
            // With several seeds Miri interleaves their output, so the tests are not counted.
            Ok(Done::Tested(tested)) if flags.is_empty() => tests.add(tested),
            Ok(_) => {}
            Err(failed) => {
                tests.add(failed.tests);
                findings.extend(failed.findings);
            }
        }
    }
    if findings.is_empty() { Ok(Done::Tested(tests)) } else { Err(Failed { findings, tests }) }
}

fn lacking() -> Option<String> {
    let install = "rustup toolchain install nightly --component miri,rust-src";
    (!works("cargo +nightly miri --version"))
        .then(|| format!("no Miri here; `{install}` installs it"))
}

fn under_miri(flags: &str, tests: &str) -> Outcome {
    // The layout tests read files, the others the clock.
    let environment = [
        ("MIRIFLAGS", &*format!("-Zmiri-disable-isolation {flags}")),
        ("CARGO_TARGET_DIR", "target/miri"),
        ("RUST_BACKTRACE", "0"),
    ];
    command(&format!("cargo +nightly miri test {tests}"), &environment)
}

/// The tests of a file, or the unit tests of a crate.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Program {
    krate: String,
    /// None for the unit tests.
    test: Option<String>,
    /// The program whose module the file is.
    of: Option<String>,
}

impl Program {
    fn seeds(&self) -> u32 {
        let threaded = self.test.as_deref().is_some_and(|test| THREADED.contains(&test));
        if threaded { SEEDS } else { 1 }
    }

    fn run(&self) -> Result<Tally, Failed> {
        let (target, module) = match (&self.test, &self.of) {
            (None, _) => ("--lib".to_owned(), String::new()),
            (Some(test), None) => (format!("--test {test}"), String::new()),
            (Some(test), Some(of)) => (format!("--test {of}"), format!(" {test}::")),
        };
        let tests =
            format!("-p serval-{} {target} --no-fail-fast -- --show-output{module}", self.krate);
        let mut tally = Tally::default();
        // With several seeds in one run Miri interleaves their output.
        for seed in 0..self.seeds() {
            match under_miri(&format!("-Zmiri-seed={seed}"), &tests) {
                Ok(Done::Tested(tested)) => tally.add(tested),
                Ok(Done::Passed | Done::NotRun(_)) => {}
                Err(Failed { findings, tests }) => {
                    tally.add(tests);
                    return Err(Failed { findings, tests: tally });
                }
            }
        }
        Ok(tally)
    }

    /// One line with the result.
    fn line(&self, tally: &Tally, seconds: u64) -> String {
        let test = self.test.as_deref().unwrap_or("unit tests");
        let Tally { passed, failed, skipped } = tally;
        let seeds = match self.seeds() {
            1 => String::new(),
            seeds => format!(", with {seeds} seeds"),
        };
        let skipped = match skipped.as_slice() {
            [] => String::new(),
            names => format!(", SKIPPED {}", names.join(", ")),
        };
        format!(
            "{:6} {test:10} {passed:4} passed, {failed} failed, {seconds:5} s{seeds}{skipped}",
            self.krate
        )
    }
}

/// Runs every test of [`CRATES`], one program per core at a time; prints each result as it finishes.
pub(crate) fn every_test() -> Findings {
    if let Some(lacking) = lacking() {
        return vec![lacking];
    }
    if let Err(Failed { findings, .. }) = under_miri("", "-p serval-mqueue -p serval-wire --no-run")
    {
        return findings;
    }
    let paths: Vec<String> = files::all().into_iter().map(|file| file.path).collect();
    let ran = side_by_side(cores(), programs(&paths), |program| {
        let start = Instant::now();
        let (tally, findings) = match program.run() {
            Ok(tally) => (tally, Findings::new()),
            Err(Failed { findings, tests }) => (tests, findings),
        };
        println!("{}", program.line(&tally, start.elapsed().as_secs()));
        (tally, findings)
    });
    let (mut tally, mut findings) = (Tally::default(), Findings::new());
    for (tested, found) in ran {
        tally.add(tested);
        findings.extend(found);
    }
    let Tally { passed, failed, skipped } = tally;
    println!("Tests: {passed} passed, {failed} failed, {} skipped", skipped.len());
    findings
}

/// The test programs among these files, the slowest first.
fn programs(paths: &[String]) -> Vec<Program> {
    let mut programs = Vec::new();
    for krate in CRATES {
        let krate = krate.to_owned();
        programs.push(Program { krate: krate.clone(), test: None, of: None });
        let folder = format!("crates/{krate}/tests/");
        let tests = paths.iter().filter_map(|path| path.strip_prefix(&folder)?.strip_suffix(".rs"));
        for test in tests {
            // A file beside a main.rs is a module of that program; other folders have no tests.
            let (of, test) =
                test.split_once('/').map_or((None, test), |(of, test)| (Some(of), test));
            let is_module = |of: &str| paths.contains(&format!("{folder}{of}/main.rs"));
            if of.is_none_or(|of| is_module(of) && test != "main") {
                let (test, of) = (Some(test.to_owned()), of.map(str::to_owned));
                programs.push(Program { krate: krate.clone(), test, of });
            }
        }
    }
    let place = |program: &Program| {
        let long = |test| LONG.iter().position(|long| *long == test);
        program.test.as_deref().and_then(long).unwrap_or(LONG.len())
    };
    programs.sort_by_key(place);
    programs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_of_tests_is_found() {
        let paths = [
            "crates/mqueue/src/lib.rs",
            "crates/mqueue/tests/rings/edges.rs",
            "crates/mqueue/tests/rings/hostile.rs",
            "crates/mqueue/tests/layout.snapshot",
            "crates/mqueue/tests/rings/main.rs",
            "crates/mqueue/tests/support/mod.rs",
            "crates/sys/tests/memory.rs",
            "crates/wire/tests/formats/framing.rs",
            "crates/wire/tests/formats/main.rs",
        ];
        let found = programs(&paths.map(str::to_owned));
        let names: Vec<_> =
            found.iter().map(|program| (program.krate.as_str(), program.test.as_deref())).collect();
        let expected = [
            ("mqueue", Some("hostile")),
            ("mqueue", None),
            ("mqueue", Some("edges")),
            ("wire", None),
            ("wire", Some("framing")),
        ];
        assert_eq!(names, expected);
        assert_eq!(found.iter().map(Program::seeds).collect::<Vec<_>>(), [1, 1, SEEDS, 1, 1]);
    }

    #[test]
    fn a_line_names_what_was_skipped() {
        let program = Program { krate: "mqueue".to_owned(), test: None, of: None };
        let tally = Tally { passed: 1, failed: 0, skipped: vec!["granule::wide".to_owned()] };
        let line = program.line(&tally, 3);
        assert!(line.contains("unit tests") && line.ends_with("SKIPPED granule::wide"), "{line}");
    }
}
