//! The tests of the workspace, several programs at a time.
//!
//! `cargo test` runs one program after another, and most of them spend their time waiting. Here one more than the number of
//! cores run side by side, the slowest of the previous run first. Programs are found from cargo's build output. Lines in
//! their sources control how they run:
//!
//! | line | meaning |
//! |---|---|
//! | `// xtask: alone` | the program runs with no other program beside it |
//! | `// xtask: ci` | the program runs in `make ci` only: it tests tools and scripts, or needs what only `make ci` installs |
//! | the same directly above `#[test]` | this test runs in `make ci` only |

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use super::{Done, Failed, Findings, Outcome, Tally, Tier, without_successes};
use crate::files::{self, File, root};
use crate::programs::{self, Program, Ran};
use crate::side_by_side::{cores, side_by_side};

const MARK: &str = "// xtask: ";
/// Seconds per program in the previous run, by name.
const TIMES: &str = "target/test-times.json";
/// Time limit per program, more than ten times the slowest one; it ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(900);

/// Everything but examples, which nothing runs here, and the compiler of modules, which the step before has built.
const WORKSPACE: &[&str] =
    &["--workspace", "--exclude", "serval-compile", "--lib", "--bins", "--tests"];

/// How a program is run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Marks {
    alone: bool,
    /// The whole program is of tier `ci`.
    ci: bool,
    /// Tests that are of tier `ci`.
    ci_tests: Vec<String>,
}

impl Marks {
    fn read(&mut self, source: &str) -> Result<(), String> {
        let mut lines = source.lines().map(str::trim_start).peekable();
        while let Some(line) = lines.next() {
            let Some(mark) = line.strip_prefix(MARK) else { continue };
            match mark {
                "alone" => self.alone = true,
                "ci" if lines.peek() == Some(&"#[test]") => {
                    let name = lines.find_map(|line| line.strip_prefix("fn ")?.split('(').next());
                    self.ci_tests.extend(name.map(str::to_owned));
                }
                "ci" => self.ci = true,
                other => return Err(format!("`{MARK}{other}`: the marks are `alone` and `ci`")),
            }
        }
        Ok(())
    }

    fn of(program: &Program, files: &[File]) -> Result<Self, String> {
        let folder = program.source.strip_suffix("main.rs");
        let folder = folder.or(program.source.strip_suffix("lib.rs"));
        let is_of = |path: &str| match folder {
            Some(folder) => path.starts_with(folder) && path.ends_with(".rs"),
            None => path == program.source,
        };
        let mut marks = Self::default();
        for file in files.iter().filter(|file| is_of(&file.path)) {
            marks.read(&file.text).map_err(|what| format!("{}: {what}", file.path))?;
        }
        Ok(marks)
    }

    /// The program's arguments in this tier; none if no test of it runs.
    fn arguments(&self, tier: Tier) -> Option<Vec<String>> {
        // The output of passing tests shows which were skipped.
        let show = "--show-output".to_owned();
        match (tier, self.ci) {
            (Tier::Test, true) => None,
            (Tier::Ci, true) => Some(vec![show]),
            (Tier::Test, false) => {
                let skipped =
                    self.ci_tests.iter().flat_map(|test| ["--skip".to_owned(), test.clone()]);
                Some(skipped.chain([show]).collect())
            }
            (Tier::Ci, false) if self.ci_tests.is_empty() => None,
            (Tier::Ci, false) => Some(self.ci_tests.iter().cloned().chain([show]).collect()),
        }
    }
}

/// Runs every test program of a tier.
pub(super) fn run(tier: Tier) -> Outcome {
    let files = files::all();
    let (mut beside, mut alone) = (Vec::new(), Vec::new());
    for program in programs::build(WORKSPACE)? {
        let marks = Marks::of(&program, &files).map_err(|what| vec![what])?;
        if let Some(arguments) = marks.arguments(tier) {
            if marks.alone { &mut alone } else { &mut beside }.push((program, arguments));
        }
    }
    let mut times = Times::read();
    beside.sort_by_key(|(program, _)| std::cmp::Reverse(times.of(program)));
    let mut ran = side_by_side(cores() + 1, beside, run_program);
    ran.extend(side_by_side(1, alone, run_program));
    let (mut tests, mut findings) = (Tally::default(), Findings::new());
    for (program, outcome) in ran {
        match outcome {
            Err(error) => findings.push(format!("{}: {error}", program.name())),
            Ok(ran) => {
                times.0.insert(program.name(), ran.took.as_secs_f32());
                tests.add(Tally::of(&ran.stdout));
                findings.extend(failure(&program, &ran));
            }
        }
    }
    times.write();
    if findings.is_empty() { Ok(Done::Tested(tests)) } else { Err(Failed { findings, tests }) }
}

fn run_program((program, arguments): (Program, Vec<String>)) -> (Program, std::io::Result<Ran>) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ran = program.run(&arguments, &[], LIMIT);
    (program, ran)
}

/// The report of a failed program.
fn failure(program: &Program, ran: &Ran) -> Option<String> {
    let how = match ran.status {
        Some(status) if status.success() => return None,
        Some(status) => status.to_string(),
        None => format!("timed out after {} s", LIMIT.as_secs()),
    };
    let (name, said) = (program.name(), without_successes(&ran.stdout));
    Some(format!("{name}: {how}\n{said}{}", ran.stderr))
}

/// Durations of programs.
struct Times(BTreeMap<String, f32>);

impl Times {
    fn read() -> Self {
        let text = fs::read_to_string(root().join(TIMES)).unwrap_or_default();
        Self(serde_json::from_str(&text).unwrap_or_default())
    }

    /// Milliseconds; an unknown program counts as slow.
    fn of(&self, program: &Program) -> u64 {
        self.0.get(&program.name()).map_or(u64::MAX, |seconds| (seconds * 1000.0) as u64)
    }

    /// Best effort: without the file the order of the next run is arbitrary.
    fn write(&self) {
        let text = serde_json::to_string_pretty(&self.0).expect("JSON can be written");
        let _ = fs::write(root().join(TIMES), text + "\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(source: &str) -> Result<Marks, String> {
        let mut marks = Marks::default();
        marks.read(source).map(|()| marks)
    }

    #[test]
    fn marks_say_where_a_program_and_a_test_run() {
        let show = || Some(vec!["--show-output".to_owned()]);
        let plain = read("//! Text.\nmod common;\n").unwrap();
        assert_eq!(plain, Marks::default());
        assert_eq!((plain.arguments(Tier::Test), plain.arguments(Tier::Ci)), (show(), None));
        assert!(read("//! Text.\n// xtask: alone\n").unwrap().alone);
        let tool = read("// xtask: ci\nmod common;\n").unwrap();
        assert_eq!((tool.arguments(Tier::Test), tool.arguments(Tier::Ci)), (None, show()));
        let test = read("    // xtask: ci\n    #[test]\n    fn slow() {\n").unwrap();
        assert_eq!(test.arguments(Tier::Test).unwrap(), ["--skip", "slow", "--show-output"]);
        assert_eq!(test.arguments(Tier::Ci).unwrap(), ["slow", "--show-output"]);
        assert!(read("// xtask: lonely\n").is_err());
    }
}
