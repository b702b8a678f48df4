//! Repository chores: `cargo xtask <chore>`. Every check of the house rules is one of them, and
//! `cargo xtask ci` is the only entry to continuous integration.

mod abi;
mod benchmarks;
mod ci;
mod claims;
mod drop_reasons;
mod edges;
mod files;
mod fuzz;
mod mutants;
mod programs;
mod side_by_side;
mod tidy;
mod wasm;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask CHORE

  gen-abi       writes the C headers, the table of the region's layout and the drop reasons of docs/operations.md
  benchmarks    writes docs/benchmarks.md from the records; with --check says whether it is up to date, and
                whether the figures in README.md and docs/gpu.md are those of their records
  configuration writes the tables of docs/configuration.md; with --check says whether they are up to date
  edges         every ordering edge has both halves, where ORDERING.md says
  tidy          file sizes, where unsafety lives, names, left-overs
  drop-reasons  every drop reason is provoked by a test
  mutants [NAME...]
                every seeded mutant, or these, must be caught by a test
  fuzz SECONDS [--jobs N] [--binaries FOLDER]
                runs every fuzz target for that long
  fuzz --planted         plants a bug for each fuzz target, which must find it
  fuzz --build FOLDER    leaves the fuzz targets and this program where --binaries finds them
  miri          every test of mqueue and wire under Miri, which takes most of an hour
  ci [STEP...]  runs steps of continuous integration; without a step lists them
";

/// What a check found; empty is good.
type Findings = Vec<String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["gen-abi"] => report("gen-abi", &abi::generate()),
        ["benchmarks"] => report("benchmarks", &benchmarks::generate()),
        ["benchmarks", "--check"] => report("benchmarks", &benchmarks::check()),
        ["configuration"] => report("configuration", &ci::configuration(true)),
        ["configuration", "--check"] => report("configuration", &ci::configuration(false)),
        ["edges"] => report("edges", &edges::check()),
        ["tidy"] => report("tidy", &tidy::check()),
        ["drop-reasons"] => report("drop-reasons", &drop_reasons::check(true)),
        ["fuzz", arguments @ ..] => report_lines("fuzz", fuzz::command(arguments)),
        ["mutants", names @ ..] => report_lines("mutants", mutants::run(names)),
        ["miri"] => report("miri", &ci::every_test_under_miri()),
        ["ci", steps @ ..] => ci::run(steps),
        _ => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Prints what was done, or what was found.
fn report_lines(what: &str, result: Result<Vec<String>, Findings>) -> ExitCode {
    for line in result.iter().flatten() {
        println!("{line}");
    }
    report(what, &result.err().unwrap_or_default())
}

/// Prints what a check found and turns it into an exit code.
fn report(what: &str, findings: &Findings) -> ExitCode {
    for finding in findings {
        eprintln!("{what}: {finding}");
    }
    match findings.len() {
        0 => ExitCode::SUCCESS,
        count => {
            eprintln!("{what}: {count} to mend");
            ExitCode::FAILURE
        }
    }
}
