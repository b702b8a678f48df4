//! The weight of a fresh clone: processor time of `make demo`, then of `make test`, where nothing is built.
//!
//! CONTRIBUTING.md has the table of processor seconds by step. Machines differ, so every figure is divided by that of a fixed compile in the same run and
//! multiplied by that of the table. A row above its budget by more than a tenth is reported, by more than a quarter is a failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Done, Outcome};
use crate::cpu;
use crate::files::root;

const PAGE: &str = "CONTRIBUTING.md";
/// The line before the table.
const MARK: &str = "<!-- weight: processor seconds -->";
/// The row that the others are compared with.
const FIXED: &str = "a fixed compile";
const DEMO: &str = "`make demo`";
const TEST: &str = "`make test` after it";
/// Shares of a budget.
const WARNS_ABOVE: f64 = 1.10;
const FAILS_ABOVE: f64 = 1.25;
/// Structs of the fixed compile.
const STRUCTS: usize = 20;

/// Clones HEAD into `target/weight`, builds and tests it there, and compares the figures with the table.
pub(super) fn step() -> Outcome {
    let page = fs::read_to_string(root().join(PAGE)).map_err(|e| vec![format!("{PAGE}: {e}")])?;
    let budgets = budgets(&page).map_err(|what| vec![what])?;
    let measured = measure().map_err(|what| vec![what])?;
    for (name, seconds) in &measured {
        println!("\n  {name}: {seconds:.0} s CPU");
    }
    let (warnings, failures) = compare(&budgets, &measured).map_err(|what| vec![what])?;
    warnings.iter().for_each(|warning| println!("  warning: {warning}"));
    if failures.is_empty() { Ok(Done::Passed) } else { Err(failures.into()) }
}

/// Rows of the table: name and processor seconds.
fn budgets(page: &str) -> Result<Vec<(String, f64)>, String> {
    let table = page.split_once(MARK).ok_or_else(|| format!("{PAGE} has no line {MARK}"))?.1;
    let rows = table.lines().skip_while(|line| line.trim().is_empty()).skip(2);
    rows.take_while(|line| line.starts_with('|'))
        .map(|line| {
            let mut cells = line.trim_matches('|').split('|').map(str::trim);
            let row = cells.next().zip(cells.next().and_then(|cell| cell.parse().ok()));
            let (name, seconds) =
                row.ok_or_else(|| format!("{PAGE}: {line:?} has no name and seconds"))?;
            Ok((name.to_owned(), seconds))
        })
        .collect()
}

fn measure() -> Result<Vec<(String, f64)>, String> {
    let folder = root().join("target/weight");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let fixed = fixed_compile(&folder)?;
    let clone = folder.join("clone");
    let source = root().to_string_lossy().into_owned();
    run("git", &["clone", "--quiet", &source, &clone.to_string_lossy()], &folder)?;
    let (demo, _) = timed(|| run("make", &["--no-print-directory", "demo"], &clone))?;
    let (test, output) = timed(|| run("make", &["--no-print-directory", "test"], &clone))?;
    let mut rows =
        vec![(FIXED.to_owned(), fixed), (DEMO.to_owned(), demo), (TEST.to_owned(), test)];
    rows.extend(output.lines().filter_map(of_step));
    // Gigabytes; after a failure they stay for a look.
    let _ = fs::remove_dir_all(&folder);
    Ok(rows)
}

/// Name and processor seconds of a step, from the line that it prints.
fn of_step(line: &str) -> Option<(String, f64)> {
    let cpu = line.strip_suffix(" s CPU")?.rsplit(' ').next()?.parse().ok()?;
    Some((line.split(' ').next()?.to_owned(), cpu))
}

fn timed<T>(work: impl FnOnce() -> Result<T, String>) -> Result<(f64, T), String> {
    let before = cpu::of_children();
    let done = work()?;
    Ok((cpu::of_children() - before, done))
}

/// The output of a command that has to succeed, in an environment without the variables of this build.
fn run(program: &str, arguments: &[&str], folder: &Path) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    let of_cargo = |name: &str| name.starts_with("CARGO") && name != "CARGO_HOME";
    std::env::vars().map(|(name, _)| name).filter(|name| of_cargo(name)).for_each(|name| {
        command.env_remove(name);
    });
    command.env_remove("SERVAL_COMPILE").env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {}: {}\n{text}{errors}", arguments.join(" "), output.status))
}

/// Processor seconds of a compile that no change of Serval affects: the smallest of three.
fn fixed_compile(folder: &Path) -> Result<f64, String> {
    let source: PathBuf = folder.join("fixed.rs");
    fs::write(&source, fixed_source()).map_err(|error| format!("{}: {error}", source.display()))?;
    let arguments =
        ["-O", "--edition=2021", "--crate-type=lib", "--emit=obj", "-Ccodegen-units=1", "fixed.rs"];
    let mut smallest = f64::INFINITY;
    for _ in 0..3 {
        smallest = smallest.min(timed(|| run("rustc", &arguments, folder))?.0);
    }
    Ok(smallest)
}

/// Structs with derived traits, sorted, kept in maps and shown.
fn fixed_source() -> String {
    let mut text = String::from("use std::collections::*;\n");
    for n in 0..STRUCTS {
        text += &format!(
            "#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]\npub struct S{n} {{ a: [u64; {}], b: String, c: Option<u32> }}\n\
             pub fn f{n}(mut all: Vec<S{n}>) -> String {{ all.sort(); all.dedup(); let map: BTreeMap<S{n}, usize> = all.iter().cloned().zip(0..).collect(); \
             let set: HashSet<S{n}> = all.into_iter().collect(); format!(\"{{map:?}} {{set:?}}\") }}\n",
            n + 1
        );
    }
    text
}

/// Warnings and failures.
fn compare(
    budgets: &[(String, f64)],
    measured: &[(String, f64)],
) -> Result<(Vec<String>, Vec<String>), String> {
    let of = |rows: &[(String, f64)], name: &str| {
        let row = rows.iter().find(|(row, _)| row == name).map(|(_, seconds)| *seconds);
        row.ok_or_else(|| format!("there is no figure for {name}"))
    };
    let slower = of(measured, FIXED)? / of(budgets, FIXED)?;
    let (mut warnings, mut failures) = (Vec::new(), Vec::new());
    for (name, budget) in budgets.iter().filter(|(name, _)| name != FIXED) {
        let seconds = of(measured, name)? / slower;
        let line = || {
            format!(
                "{name} takes {seconds:.0} s CPU on the machine of the table, which allows {budget:.0}"
            )
        };
        match seconds / budget {
            share if share > FAILS_ABOVE => failures.push(line()),
            share if share > WARNS_ABOVE => warnings.push(line()),
            _ => {}
        }
    }
    Ok((warnings, failures))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_page() {
        let page = fs::read_to_string(root().join(PAGE)).unwrap();
        let budgets = budgets(&page).unwrap();
        for name in [FIXED, DEMO, TEST, "clippy", "tests", "python"] {
            assert!(budgets.iter().any(|(row, seconds)| row == name && *seconds > 0.0), "{name}");
        }
    }

    #[test]
    fn figures_are_normalised_and_compared() {
        let row = |name: &str, seconds: f64| (name.to_owned(), seconds);
        let budgets = [row(FIXED, 10.0), row("clippy", 100.0), row("tests", 100.0)];
        let run = |clippy, tests| {
            // This machine is half as fast as that of the table.
            compare(&budgets, &[row(FIXED, 20.0), row("clippy", clippy), row("tests", tests)])
        };
        assert_eq!(run(200.0, 219.0).unwrap(), (vec![], vec![]));
        let (warnings, failures) = run(221.0, 251.0).unwrap();
        assert!(warnings.len() == 1 && warnings[0].starts_with("clippy takes 11"), "{warnings:?}");
        assert!(failures.len() == 1 && failures[0].starts_with("tests takes "), "{failures:?}");
        assert!(compare(&budgets, &[row(FIXED, 20.0)]).is_err());
    }

    #[test]
    fn steps_are_read_from_their_lines() {
        let line = "clippy        clippy, warnings refused    passed    45 s     88 s CPU";
        assert_eq!(of_step(line), Some(("clippy".to_owned(), 88.0)));
        assert_eq!(of_step("steps: 9 passed, 0 failed; 7.1 minutes, 12.0 of CPU"), None);
    }
}
