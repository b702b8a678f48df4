//! Test programs: built by `cargo test --no-run`, run here as cargo would run them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::Findings;
use crate::files::root;

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// The package's folder, from the root.
    pub(crate) package: String,
    /// `lib`, `bin`, or the name of the test.
    pub(crate) target: String,
    pub(crate) executable: PathBuf,
    /// Its main source file, from the root.
    pub(crate) source: String,
}

/// The result of a program.
pub(crate) struct Ran {
    /// None: it timed out or did not start.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) took: Duration,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Program {
    /// Package and target, as `serval/attach`.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.package.trim_start_matches("crates/"), self.target)
    }

    /// Runs it in its package's folder. A program that takes longer than `limit` is killed.
    pub(crate) fn run(
        &self,
        arguments: &[&str],
        environment: &[(&str, &str)],
        limit: Duration,
    ) -> std::io::Result<Ran> {
        // Files instead of pipes: a process that outlives the program would keep a pipe open.
        let folder = root().join("target/test-output");
        fs::create_dir_all(&folder)?;
        let unique = format!("{:?}-{}", std::thread::current().id(), self.name().replace('/', "-"));
        let paths = ["out", "err"].map(|kind| folder.join(format!("{unique}.{kind}")));
        let [stdout, stderr] = &paths;
        let start = Instant::now();
        let mut child = Command::new(&self.executable)
            .args(arguments)
            .envs(environment.iter().copied())
            .env("CARGO_MANIFEST_DIR", root().join(&self.package))
            .current_dir(root().join(&self.package))
            .stdin(Stdio::null())
            .stdout(File::create(stdout)?)
            .stderr(File::create(stderr)?)
            .spawn()?;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break Some(status),
                None if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(10)),
                None => {
                    child.kill()?;
                    child.wait()?;
                    break None;
                }
            }
        };
        let took = start.elapsed();
        let [stdout, stderr] = paths.map(|path| {
            let bytes = fs::read(&path).unwrap_or_default();
            let _ = fs::remove_file(path);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Ok(Ran { status, took, stdout, stderr })
    }
}

/// Builds the test programs that `cargo test` would run with these arguments.
pub(crate) fn build(arguments: &[&str]) -> Result<Vec<Program>, Findings> {
    let output = Command::new("cargo")
        .args(["test", "--no-run", "--message-format=json-render-diagnostics"])
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| vec![format!("cargo: {error}")])?;
    if !output.status.success() {
        return Err(vec![String::from_utf8_lossy(&output.stderr).into_owned()]);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let root = fs::canonicalize(root()).map_err(|error| vec![error.to_string()])?;
    Ok(text.lines().filter_map(|line| program(line, &root)).collect())
}

/// The program that a message of cargo describes, if any.
fn program(message: &str, root: &Path) -> Option<Program> {
    let message: Json = serde_json::from_str(message).ok()?;
    let executable = message["executable"].as_str()?;
    // Programs that tests start are built as well.
    if message["profile"]["test"] != true {
        return None;
    }
    let in_root = |path: &Path| Some(path.strip_prefix(root).ok()?.to_str()?.to_owned());
    let kind = message["target"]["kind"][0].as_str()?;
    Some(Program {
        package: in_root(Path::new(message["manifest_path"].as_str()?).parent()?)?,
        target: if kind == "test" { message["target"]["name"].as_str()? } else { kind }.to_owned(),
        executable: PathBuf::from(executable),
        source: in_root(Path::new(message["target"]["src_path"].as_str()?))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_read_from_cargos_messages() {
        let message = |profile: bool, kind: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/r/crates/a/Cargo.toml","target":{{"kind":["{kind}"],
                "name":"t","src_path":"/r/crates/a/tests/t.rs"}},"profile":{{"test":{profile}}},"executable":"/r/x"}}"#
            )
            .replace('\n', "")
        };
        let found = |text: &str| program(text, Path::new("/r"));
        let test = found(&message(true, "test")).unwrap();
        assert_eq!((test.name(), test.source.as_str()), ("a/t".to_owned(), "crates/a/tests/t.rs"));
        assert_eq!(found(&message(true, "lib")).unwrap().name(), "a/lib");
        assert_eq!(found(&message(false, "bin")), None);
        assert_eq!(found("{}"), None);
    }
}
