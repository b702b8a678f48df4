//! The layout of sources in C and C++: that of `.clang-format`.

use std::process::Command;

use super::{Done, Outcome};
use crate::files::{self, root};

/// The version whose output the sources have: that of Debian 12. Other versions differ.
const VERSION: &str = "14";
const FOLDERS: [&str; 3] = ["lib/", "functions/", "examples/02_c_client/"];
const ENDINGS: [&str; 3] = ["c", "cpp", "h"];

pub(super) fn check() -> Outcome {
    let Some(program) = program() else {
        return Ok(Done::NotRun(format!(
            "no clang-format {VERSION}; `make setup-test` installs Debian's"
        )));
    };
    let sources = files::all().into_iter().filter(|file| {
        let is_source = FOLDERS.iter().any(|folder| file.path.starts_with(folder))
            && ENDINGS.contains(&file.extension());
        is_source && !file.text.starts_with("/* Generated")
    });
    let mut command = Command::new(program);
    command.current_dir(root()).args(["--dry-run", "--Werror", "--style=file"]);
    let output = command.args(sources.map(|file| file.path)).output();
    let output = output.map_err(|error| vec![format!("{command:?}: {error}")])?;
    if output.status.success() {
        return Ok(Done::Passed);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let mut findings: Vec<String> =
        said.lines().filter(|line| line.contains("error:")).map(str::to_owned).collect();
    findings.push(format!("{program} -i FILE lays a file out"));
    Err(findings.into())
}

/// The program of the version, by the names that Debian gives it.
fn program() -> Option<&'static str> {
    ["clang-format-14", "clang-format"].into_iter().find(|program| {
        let output = Command::new(program).arg("--version").output();
        let version = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        version.is_ok_and(|text| text.contains(&format!("version {VERSION}.")))
    })
}
