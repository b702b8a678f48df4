//! `serval compare` from outside: real servers and fake ones that misbehave.
// xtask: ci

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value as Json;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("serval-compare-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The command line of a server with one echo service.
    fn echo(&self, listen: &str) -> String {
        let config = format!(
            "schema = 1\n[[service]]\nname = \"echo\"\nlisten = \"{listen}\"\nkernel = \"echo\"\n"
        );
        let path = self.write("echo.toml", &config);
        format!("{} serve --json {}", env!("CARGO_BIN_EXE_serval"), path.display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn compare(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_serval"))
        .arg("compare")
        .args(arguments)
        .env("NO_COLOR", "1")
        .env("SERVAL_ENGINE_CONTROL", "off")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn has_two_cores() -> bool {
    let found = sys::affinity::allowed_cores().unwrap().len() >= 2;
    if !found {
        println!("SKIPPED: comparing needs two cores");
    }
    found
}

/// Whatever else the machine does: `--quick` keeps what it gets.
#[test]
fn a_suite_of_servers_programs_and_needs() {
    if !has_two_cores() {
        return;
    }
    let folder = Folder::new();
    let echo = folder.echo("udp://127.0.0.1:0");
    let suite = folder.write(
        "suite.toml",
        &format!(
            r#"
schema = 1
[[row]]
name = "alone"
what = "a program"
metric = "rate"
must = 1e12
a = {{ program = "echo '{{\"rate\":5.0,\"core\":{{server_core}}}}'" }}
[[row]]
name = "pair"
what = "the same twice"
class = "T0"
needs = ["alone"]
must = 0.5
load = {{ class = "T0", workload = "echo:64", window = 8 }}
a = {{ label = "one", server = "{echo}" }}
b = {{ label = "two", server = "{echo}" }}
[[row]]
name = "overload"
what = "more than it can"
class = "T0"
metric = "share_of_peak"
load = {{ class = "T0", workload = "echo:64", window = 8, times_peak = 0.2 }}
a = {{ server = "{echo}" }}
[[row]]
name = "broken"
what = "a server that is none"
class = "T0"
load = {{ class = "T0", workload = "echo:64", window = 8 }}
a = {{ server = "echo I do not serve" }}
[[row]]
name = "after"
what = "needs what is broken"
needs = ["broken"]
a = {{ program = "echo '{{\"rate\":5.0}}'" }}
[[row]]
name = "database"
what = "a memcached alone"
class = "T0"
load = {{ class = "T0", url = "tcp", workload = "memcached:10:50", window = 8, shares_core = true }}
a = {{ memcached = true }}
[[row]]
name = "at-rate-of-b"
what = "both at a share of what the second can"
class = "T0"
metric = "p99_ns"
load = {{ class = "T0", workload = "echo:64", window = 8, times_lower_peak = 0.2 }}
a = {{ label = "one", server = "{echo}" }}
b = {{ label = "two", server = "{echo}" }}
"#
        ),
    );
    let suite = suite.display().to_string();
    let out = folder.0.join("out").display().to_string();
    let quick = compare(&["--suite", &suite, "--out", &out, "--quick", "--json"]);
    assert_eq!(quick.status.code(), Some(1), "{}", text(&quick.stderr));
    assert!(!Path::new(&out).exists(), "a quick look writes nothing");
    let report: Json = serde_json::from_slice(&quick.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let verdicts: Vec<_> = rows.iter().map(|row| row["verdict"].as_str().unwrap()).collect();
    let unproven = "no-verdict";
    let expected = [unproven, unproven, unproven, "void", "void", unproven, unproven];
    assert_eq!(verdicts, expected, "{report:#}");
    assert!(rows[5]["pairs"][0]["a"]["server_cpu_ns"].as_f64().unwrap() > 0.0, "{report:#}");
    assert_eq!(rows[5]["a"]["load"]["workload"], "memcached:10:50");
    assert_eq!(rows[0]["value"]["median"], 5.0);
    let pair = &rows[1]["pairs"][0];
    for side in ["a", "b"] {
        for figure in ["rate", "p50_ns", "p99_ns", "busy_ns", "server_cpu_ns", "client_cpu_ns"] {
            assert!(pair[side][figure].as_f64().unwrap() > 0.0, "{side} {figure}: {pair:#}");
        }
    }
    let ratio = pair["a"]["rate"].as_f64().unwrap() / pair["b"]["rate"].as_f64().unwrap();
    assert!((pair["value"].as_f64().unwrap() - ratio).abs() < 1e-9);
    let share = rows[2]["value"]["median"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{share}");
    assert!(rows[3]["reason"].as_str().unwrap().contains("ended by itself"), "{}", rows[3]);
    assert!(rows[4]["reason"].as_str().unwrap().contains("needs broken"), "{}", rows[4]);
    let below = &rows[6]["pairs"][0];
    let peak = |side: &str| below[side]["peak_rate"].as_f64().unwrap();
    assert!(peak("a") > 0.0 && peak("a") == peak("b"), "{below:#}");
}

/// Programs need no quiet machine but for the calibration; a suite's results are files.
#[test]
fn claims_are_judged_written_down_and_decide_the_exit_code() {
    if !has_two_cores() {
        return;
    }
    let folder = Folder::new();
    let row = |name: &str, must: f64| {
        let program = "program = \"echo '{\\\"rate\\\":5.0}'\"";
        format!("[[row]]\nname = \"{name}\"\nwhat = \"w\"\nmust = {must:?}\na = {{ {program} }}\n")
    };
    let rows = format!("schema = 1\n{}{}", row("low", 4.0), row("high", 6.0));
    let suite = folder.write("suite.toml", &rows).display().to_string();
    let out = folder.0.join("out").display().to_string();
    for (name, judged) in [("low", "pass"), ("high", "fail")] {
        let ran = compare(&["--suite", &suite, "--out", &out, name, "--pairs", "7"]);
        let path = Path::new(&out).join(format!("{name}.json"));
        let written = std::fs::read_to_string(path).unwrap();
        let record: Json = serde_json::from_str(&written).unwrap();
        let verdict = record["verdict"].as_str().unwrap();
        let reason = record["reason"].as_str().unwrap_or_default();
        if verdict == "void" && reason.contains("pairs were discarded") {
            // What the judge does with pairs is tested without a machine in `crates/bench/src/compare/`.
            println!("SKIPPED: this machine never rests: {reason}");
        } else {
            assert_eq!(verdict, judged, "{record:#}");
            assert_eq!(record["value"]["median"], 5.0, "{record:#}");
        }
        let code = if verdict == "pass" { 0 } else { 1 };
        assert_eq!(ran.status.code(), Some(code), "{}", text(&ran.stderr));
        assert_eq!((record["schema"].as_u64(), record["name"].as_str()), (Some(1), Some(name)));
        assert!(text(&ran.stdout).contains(name));
    }
}

#[test]
fn wrong_command_lines_are_refused() {
    for (arguments, part) in [
        (&["--pairs", "3"][..], "--a"),
        (&["--a", "x", "--pairs", "0"], "pairs must be in"),
        (&["--a", "x", "--duration", "soon"], "500ms"),
        (&["--a", "x", "--metric", "beauty"], "better"),
        (&["--a", "x", "--workload", "juggling"], "not a workload"),
        (&["--a", "x", "--class", "T9"], "no client of class"),
        (&["--a", "x", "--framing", "round"], "round"),
        (&["--a", "x", "--a-program", "y"], "cannot be used with"),
        (&["--a", "x", "--server-core", "1023"], "core 1023 is not usable"),
        (&["--a", "x", "--server-core", "0", "--client-core", "0"], "a core each"),
        (&["--suite", "/no/such/suite.toml"], "/no/such/suite.toml"),
        (&["row-without-suite"], "--suite"),
    ] {
        let ran = compare(arguments);
        // Where there is one core, that is said first.
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}");
        let said = text(&ran.stderr);
        assert!(said.contains(part) || said.contains("a core each"), "{arguments:?}: {said}");
    }
}

#[test]
fn a_server_of_another_kind_is_reported() {
    if !has_two_cores() {
        return;
    }
    let folder = Folder::new();
    let echo = folder.echo("udp://127.0.0.1:0");
    for (arguments, part) in [
        (&["--url", "tcp"][..], "names no tcp:// URL"),
        (&["--workload", "scale:64"], "does not answer"),
    ] {
        let mut all = vec!["--json", "--a", &echo, "--pairs", "1"];
        all.extend(arguments);
        let ran = compare(&all);
        assert_eq!(ran.status.code(), Some(1), "{arguments:?}");
        let record: Json = serde_json::from_str(text(&ran.stdout).lines().next().unwrap()).unwrap();
        let reason = record["reason"].as_str().unwrap_or_default();
        assert!(reason.contains(part), "{arguments:?}: {reason}");
        assert_eq!(record["verdict"], "void");
    }
}
