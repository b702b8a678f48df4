//! Seeded mutants: `cargo xtask mutants [NAME...]`, and the step `mutants` of continuous integration.
//!
//! A mutant is a deliberate bug behind `mutants::on("name")`, see `crates/mutants`. The tests are built
//! once with all of them. With no mutant enabled every test named here must pass; with one enabled, at least one of
//! its tests must fail. A mutant that survives shows that a test is missing. A test that times out
//! has caught it too: without the mutant the same test ended in time.

mod table;
mod table_around;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::Findings;
use crate::claims::TestName;
use crate::files;
use crate::programs::{self, Program};
use crate::side_by_side::{all_sound, cores};

/// A bug, and the tests that detect it, the fastest first.
struct Mutant {
    name: &'static str,
    bug: &'static str,
    tests: &'static [&'static str],
}

const fn mutant(name: &'static str, bug: &'static str, tests: &'static [&'static str]) -> Mutant {
    Mutant { name, bug, tests }
}

/// The mutants of all tables.
fn all() -> impl Iterator<Item = &'static Mutant> {
    table::MUTANTS.iter().chain(table_around::MUTANTS)
}

/// Time limit for one test run; without a mutant a test ends in seconds, on a busy machine in half a minute.
const PATIENCE: Duration = Duration::from_secs(60);
/// The crate with the switch and its feature; nothing else may enable it.
const FEATURE: &str = "serval-mutants/seeded";

/// Tests the mutants with these names, or all; returns one line for each that was caught.
pub(crate) fn run(names: &[&str]) -> Result<Vec<String>, Findings> {
    if let Some(unknown) = names.iter().find(|name| all().all(|m| m.name != **name)) {
        return Err(vec![format!("xtask/src/mutants/ has no mutant {unknown:?}")]);
    }
    let chosen = || all().filter(|m| names.is_empty() || names.contains(&m.name));
    let tests: BTreeSet<&str> = chosen().flat_map(|m| m.tests).copied().collect();
    let binaries = build(&tests)?;
    let sound =
        all_sound(cores(), tests.into_iter().collect(), |test| match binaries.run(test, "") {
            Ended::Passed => Ok(String::new()),
            Ended::Failed(how) => Err(format!("{test} {how} without a mutant")),
        });
    sound?;
    all_sound(cores(), chosen().collect(), |mutant| {
        let start = Instant::now();
        for test in mutant.tests {
            if let Ended::Failed(how) = binaries.run(test, mutant.name) {
                let (name, bug) = (mutant.name, mutant.bug);
                let seconds = start.elapsed().as_secs_f32();
                return Ok(format!("{name:28} {seconds:5.1} s  {how}: {test}\n{:38}{bug}", ""));
            }
        }
        let (name, bug) = (mutant.name, mutant.bug);
        Err(format!("mutant {name} survives ({bug}): none of {} failed", mutant.tests.join(", ")))
    })
}

/// Test programs by package folder and target (`lib` or the test's name).
struct Binaries(BTreeMap<(String, String), Program>);

enum Ended {
    Passed,
    /// The reason.
    Failed(&'static str),
}

/// Package folder, target and test of `crates/sim/tests/scenes/drops.rs::name`.
fn place(test: &str) -> (String, String, String) {
    let TestName { path, test } = TestName::parse(test).expect("FILE::TEST");
    let parts: Vec<&str> = path.split('/').collect();
    let target = if parts[2] == "tests" { parts[3].trim_end_matches(".rs") } else { "lib" };
    (parts[..2].join("/"), target.to_owned(), test.to_owned())
}

/// Builds the programs of these tests with all mutants.
fn build(tests: &BTreeSet<&str>) -> Result<Binaries, Findings> {
    let places: Vec<_> = tests.iter().map(|test| place(test)).collect();
    let packages: BTreeSet<&str> = places.iter().map(|(package, ..)| package.as_str()).collect();
    let targets: BTreeSet<&str> = places.iter().map(|(_, target, _)| target.as_str()).collect();
    let mut arguments = vec!["--package", "serval-mutants", "--features", FEATURE];
    let named = |package: &&str| format!("serval-{}", package.trim_start_matches("crates/"));
    let names: Vec<String> = packages.iter().map(named).collect();
    arguments.extend(names.iter().flat_map(|name| ["--package", name]));
    for target in targets {
        match target {
            "lib" => arguments.push("--lib"),
            name => arguments.extend(["--test", name]),
        }
    }
    let built = programs::build(&arguments)?;
    let key = |program: &Program| (program.package.clone(), program.target.clone());
    Ok(Binaries(built.into_iter().map(|program| (key(&program), program)).collect()))
}

impl Binaries {
    /// Runs one test with a mutant enabled; with none if its name is empty.
    fn run(&self, test: &str, mutant: &str) -> Ended {
        let (package, target, name) = place(test);
        let Some(program) = self.0.get(&(package, target)) else {
            return Ended::Failed("was not built");
        };
        let environment = [
            ("SERVAL_MUTANT", mutant),
            ("RUST_BACKTRACE", "0"),
            // Failures caused by a mutant must not become regression cases.
            ("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1"),
        ];
        let Ok(ran) = program.run(&[&name], &environment, PATIENCE) else {
            return Ended::Failed("cannot be started");
        };
        let Some(status) = ran.status else { return Ended::Failed("timed out") };
        let failed = |line: &str| line.ends_with("FAILED") && line.contains(&name);
        match (status.success(), ran.stdout.lines().any(failed)) {
            (true, _) if ran.stdout.contains("test result: ok. 0 passed") => {
                Ended::Failed("does not exist")
            }
            (true, _) => Ended::Passed,
            (false, true) => Ended::Failed("failed"),
            (false, false) => Ended::Failed("crashed"),
        }
    }
}

/// The mutants of every crate that a change to these paths touches: those whose bug or whose tests are in it. All of them if the
/// table or the switch has changed.
pub(crate) fn touched(paths: &[String]) -> Vec<&'static str> {
    let is_all = |path: &String| {
        path.starts_with("crates/mutants/") || path.starts_with("xtask/src/mutants")
    };
    if paths.iter().any(is_all) {
        return all().map(|mutant| mutant.name).collect();
    }
    let crates: BTreeSet<&str> = paths.iter().filter_map(|path| crate_of(path)).collect();
    let sites = sites();
    let is_touched = |mutant: &&Mutant| {
        let places = sites.get(mutant.name).map(String::as_str).into_iter();
        places
            .chain(mutant.tests.iter().copied())
            .any(|place| crate_of(place).is_some_and(|of| crates.contains(of)))
    };
    all().filter(is_touched).map(|mutant| mutant.name).collect()
}

/// `crates/NAME` of a path in it.
fn crate_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("crates/")?;
    Some(&path[.."crates/".len() + rest.find('/')?])
}

/// Where each mutant is in the sources, by its name.
fn sites() -> BTreeMap<String, String> {
    let mut sites = BTreeMap::new();
    let is_source = |path: &str| path.starts_with("crates/") && path.contains("/src/");
    for file in files::all().into_iter().filter(|file| is_source(&file.path)) {
        for (line, text) in file.text.lines().enumerate() {
            for rest in text.split("mutants::on(\"").skip(1) {
                let name = rest.split('"').next().unwrap_or_default();
                sites.insert(name.to_owned(), file.at(line));
            }
        }
    }
    sites
}

/// The table and the sources name the same mutants, the table's tests exist, and only this program
/// builds with mutants.
pub(crate) fn check() -> Findings {
    let mut findings = Findings::new();
    let mut sites = sites();
    for file in files::all() {
        let manifest =
            file.path.ends_with("Cargo.toml") && file.path != "crates/mutants/Cargo.toml";
        for (line, text) in file.text.lines().enumerate().filter(|_| manifest) {
            if text.contains("mutants") && text.contains("features") {
                findings
                    .push(format!("{}: only `cargo xtask mutants` builds mutants", file.at(line)));
            }
        }
    }
    for mutant in all() {
        if sites.remove(mutant.name).is_none() {
            findings.push(format!("mutant {} does not occur in the sources", mutant.name));
        }
        for test in mutant.tests {
            if !TestName::parse(test).is_some_and(|name| name.exists()) {
                findings.push(format!("mutant {}: test {test} does not exist", mutant.name));
            }
        }
    }
    let unlisted = |(name, at): (&String, &String)| {
        format!("{at}: mutant {name} is not in xtask/src/mutants/")
    };
    findings.extend(sites.iter().map(unlisted));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_touches_the_mutants_of_its_crate() {
        let of = |paths: &[&str]| {
            touched(&paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>())
        };
        let remote = of(&["crates/remote/src/region.rs"]);
        assert!(remote.contains(&"seal_with_one_nonce") && !remote.contains(&"add_before_sending"));
        // Where its test is.
        assert!(of(&["crates/sim/src/link.rs"]).contains(&"release_unread"));
        let both =
            of(&["crates/collective/src/call.rs", "crates/transfer/Cargo.toml", "README.md"]);
        assert!(both.contains(&"add_before_sending") && both.contains(&"read_past_range"));
        assert_eq!(of(&["crates/mutants/src/lib.rs"]).len(), all().count());
        assert_eq!(of(&["xtask/src/mutants/table.rs"]).len(), all().count());
        assert!(of(&["docs/remote.md", "crates/README.md"]).is_empty());
    }
}
