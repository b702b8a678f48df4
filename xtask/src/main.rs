//! Repository tasks: `cargo xtask TASK`. Every check of the house rules is one of them, and
//! `cargo xtask ci` is the only entry point of continuous integration.

#![forbid(unsafe_code)]

mod abi;
mod benchmarks;
mod ci;
mod claims;
mod codes;
mod cpu;
mod cycles;
mod drop_reasons;
mod edges;
mod files;
mod fuzz;
mod links;
mod metric_names;
mod mutants;
mod origin;
mod programs;
mod recipes;
mod side_by_side;
mod tidy;
mod wasm;
mod words;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask CHORE

  gen-abi       writes the C headers, the codes for Python, the table of the region's layout and the drop
                reasons of docs/operations.md
  benchmarks    writes docs/benchmarks.md from the records; with --check says whether it is up to date, and
                whether the figures in README.md and docs/gpu.md are those of their records. Refuses records of
                sources that are not in this history
  configuration writes the tables of docs/configuration.md; with --check says whether they are up to date
  edges         checks that every ordering edge has both halves in the places that ORDERING.md lists
  tidy          checks file sizes, unsafety outside its crates, names, words, links, metrics that documents name, and left-overs
  drop-reasons  checks that a test provokes every drop reason
  mutants [NAME...]
                checks that a test catches every seeded mutant, or the named ones
  fuzz SECONDS [--jobs N] [--binaries FOLDER]
                runs every fuzz target for that time
  fuzz --planted         plants a bug for each fuzz target and checks that the target finds it
  fuzz --build FOLDER    writes the fuzz targets and this program to a folder for --binaries
  miri          runs every test of mqueue and wire under Miri, for most of an hour
  ci [STEP...]  runs steps of continuous integration; without a step lists them
";

/// The problems that a check found.
type Findings = Vec<String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["gen-abi"] => report_lines("gen-abi", abi::generate()),
        ["benchmarks"] => report("benchmarks", &benchmarks::generate()),
        ["benchmarks", "--check"] => report("benchmarks", &benchmarks::check()),
        ["configuration"] => report_lines("configuration", ci::configuration(true)),
        ["configuration", "--check"] => report_lines("configuration", ci::configuration(false)),
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

/// Prints the result of a task or its findings.
fn report_lines(what: &str, result: Result<Vec<String>, Findings>) -> ExitCode {
    for line in result.iter().flatten() {
        println!("{line}");
    }
    report(what, &result.err().unwrap_or_default())
}

/// Prints the findings of a check and returns the exit code.
fn report(what: &str, findings: &Findings) -> ExitCode {
    for finding in findings {
        eprintln!("{what}: {finding}");
    }
    match findings.len() {
        0 => ExitCode::SUCCESS,
        count => {
            eprintln!("{what}: {count} findings");
            ExitCode::FAILURE
        }
    }
}
