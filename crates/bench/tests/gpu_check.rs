//! `tools/gpu/check` on a machine without a GPU: its verdicts on loads, with a fake `serval` that only prints
//! results.
// xtask: ci

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use bench::Void;

/// The output of `serval bench --json` for a run.
macro_rules! run {
    ($replied:expr, $lost:expr, $wrong:expr, $twice:expr, $trust:expr) => {
        concat!(
            "{\"target\":\"udp://127.0.0.1:9378\",\"sent\":700,\"replied\":",
            $replied,
            ",\"wrong\":",
            $wrong,
            ",\"lost\":",
            $lost,
            ",\"duplicated\":",
            $twice,
            ",\"late\":0,",
            $trust,
            "}"
        )
    };
}

/// A run with this reason not to trust it.
macro_rules! because {
    ($reason:expr) => {
        concat!("\"trusted\":false,\"reasons\":[{\"reason\":\"", $reason, "\"}]")
    };
}

const RIGHT: &str = run!(700, 0, 0, 0, "\"trusted\":true,\"reasons\":[]");
const LOST: &str = run!(500, 200, 0, 0, "\"trusted\":true,\"reasons\":[]");
const WRONG: &str = run!(700, 0, 1, 0, "\"trusted\":true,\"reasons\":[]");
const TWICE: &str = run!(700, 0, 0, 1, "\"trusted\":true,\"reasons\":[]");
const SILENT: &str = run!(0, 0, 0, 0, "\"trusted\":true,\"reasons\":[]");
const UNSENT: &str = run!(700, 0, 0, 0, because!("9 % of the requests could not be sent"));
const STOLEN: &str = run!(700, 0, 0, 0, because!("STOLEN"));
const STOLEN_AND_LOST: &str = run!(500, 200, 0, 0, because!("STOLEN"));
const STOLEN_AND_WRONG: &str = run!(700, 0, 1, 0, because!("STOLEN"));
const DEAD: &str = "error: nothing answers at udp://127.0.0.1:9378";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn report(runs: &[&str]) -> String {
    let runs = runs.join(",").replace("STOLEN", &Void::Stolen(0.09).to_string());
    format!("{{\"version\":\"0\",\"runs\":[{runs}]}}")
}

fn write_program(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/bash\n{text}")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A folder like that of `make gpu-carry`. The loads of its `serval` print `answers`, one after the other; the last
/// one repeatedly.
fn carry(name: &str, answers: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("bin")).unwrap();
    let answers: Vec<String> = answers.iter().map(|answer| report(&[answer])).collect();
    fs::write(folder.join("answers"), answers.join("\n") + "\n").unwrap();
    let serval = "cd \"$(dirname \"$0\")\"\n\
        case $1 in\n\
        serve) trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done ;;\n\
        bench) echo x >>asked; { head -n \"$(wc -l <asked)\" | tail -n 1; } <answers; exit 1 ;;\n\
        esac\n";
    write_program(&folder.join("serval"), serval);
    write_program(&folder.join("gpu"), "");
    fs::write(folder.join("echo.sm_90.cubin"), "").unwrap();
    let smi = "case \"$*\" in *compute_cap*) echo 9.0 ;; *memory.used*) echo 1 ;; *compute-apps*) ;; *) echo none ;; esac\n";
    write_program(&folder.join("bin/nvidia-smi"), smi);
    folder
}

/// The exit code and output of a command of the scripts, with the parts that need a GPU replaced.
fn run_functions(carry: &Path, command: &str) -> (i32, String) {
    let script = format!(
        "set -uo pipefail\nsource tools/gpu/loads\nsource tools/gpu/hazards\ncarry={} arch=sm_90\n\
         serve_on_gpu() {{ dir=$(mktemp -d -p \"$carry\"); : >\"$dir/log\"; \"$carry/serval\" serve >\"$dir/said\" & server=$!; for i in {{1..1000}}; do grep -qs ready \"$dir/said\" && return; sleep 0.02; done; exit 9; }}\n\
         service() {{ :; }}; shower() {{ :; }}; gpu_is_free() {{ :; }}\n\
         settled() {{ others=${{NOTICED:-1}} lives=0; }}\n{command}\n",
        carry.display()
    );
    let done = Command::new("bash").args(["-c", &script]).current_dir(root()).output().unwrap();
    let said = [done.stdout, done.stderr].concat();
    (done.status.code().unwrap_or(-1), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn a_load_passes_only_if_every_run_passes() {
    let folder = carry("judged", &[]);
    let file = folder.join("load");
    let judge = |text: &str, arguments: &str| {
        fs::write(&file, text).unwrap();
        run_functions(&folder, &format!("judged {} {arguments}", file.display())).0
    };
    for (run, verdict) in [
        (RIGHT, 0),
        (LOST, 1),
        (WRONG, 1),
        (TWICE, 1),
        (SILENT, 1),
        (UNSENT, 1),
        (STOLEN, 2),
        (STOLEN_AND_LOST, 3),
        (STOLEN_AND_WRONG, 1),
    ] {
        assert_eq!(judge(&report(&[run]), "1"), verdict, "{run}");
        assert_eq!(judge(&report(&[RIGHT, run]), "2"), verdict, "{run} after one that is right");
        assert_eq!(judge(&report(&[run, LOST]), "2"), 1, "{run} before one that loses");
        assert_eq!(judge(&report(&[run]), "2"), 1, "{run} without the second run");
        // For callers that accept void runs.
        let counted = i32::from(verdict != 0 && run != UNSENT && run != STOLEN);
        assert_eq!(judge(&report(&[run]), "1 any"), counted, "{run}, void or not");
    }
    assert_eq!(judge(&report(&[STOLEN, STOLEN_AND_LOST]), "2"), 3);
    assert_eq!(judge(&report(&[STOLEN_AND_LOST, STOLEN]), "2"), 3);
    for nothing in ["", DEAD, "{}", "{\"runs\":[]}"] {
        assert_eq!(judge(nothing, "1"), 1, "{nothing:?}");
    }
    fs::remove_file(&file).unwrap();
    assert_eq!(run_functions(&folder, "judged nowhere").0, 1);
}

#[test]
fn a_hazard_passes_only_beside_a_bystander_that_loses_nothing() {
    let cases: &[(&str, &[&str], i32, usize)] = &[
        ("right", &[RIGHT], 0, 1),
        ("lost", &[LOST, RIGHT], 1, 1),
        ("wrong", &[WRONG, RIGHT], 1, 1),
        ("silent", &[SILENT, RIGHT], 1, 1),
        ("dead", &[DEAD, RIGHT], 1, 1),
        ("stolen-once", &[STOLEN, RIGHT], 0, 2),
        ("stolen-then-lost", &[STOLEN, LOST], 1, 2),
        ("lost-for-want-of-a-core", &[STOLEN_AND_LOST, RIGHT], 0, 2),
        ("always-stolen-and-lost", &[STOLEN_AND_LOST], 1, 3),
    ];
    for (name, answers, status, loads) in cases {
        let folder = carry(name, answers);
        let (ended, said) = run_functions(&folder, "beside_a_bystander kernel '' 0");
        assert_eq!(ended, *status, "{name}: {said}");
        assert!(!said.contains("SKIPPED"), "{name}: {said}");
        let asked = fs::read_to_string(folder.join("asked")).unwrap();
        assert_eq!(asked.lines().count(), *loads, "{name}");
    }
    let folder = carry("always-stolen", &[STOLEN]);
    let (ended, said) = run_functions(&folder, "beside_a_bystander kernel '' 0");
    assert!(ended == 0 && said.lines().any(|line| line.starts_with("SKIPPED")), "{said}");
    let folder = carry("unnoticed", &[RIGHT]);
    let (ended, said) = run_functions(&folder, "NOTICED=0 beside_a_bystander kernel '' 0");
    assert!(ended == 1 && said.contains("no visible effect"), "{said}");
    // One mode of several.
    let folder = carry("modes", &[RIGHT, LOST, RIGHT]);
    let modes = "MODES='1 2' DOORBELL_MODES=5 misbehaves";
    let (ended, said) = run_functions(&folder, modes);
    assert!(ended == 1 && said.contains("mode 2 FAILED"), "{said}");
}

/// The whole program, with one step that does not need a GPU.
#[test]
fn a_step_that_showed_nothing_is_counted_as_skipped() {
    for (name, answers, status, line, counts) in [
        ("passed", &[RIGHT][..], 0, "lazy-loading: passed", "1 steps passed, 0 failed, 0 SKIPPED"),
        (
            "failed",
            &[RIGHT, LOST],
            1,
            "lazy-loading: FAILED",
            "0 steps passed, 1 failed, 0 SKIPPED",
        ),
        (
            "skipped",
            &[RIGHT, STOLEN],
            1,
            "lazy-loading: SKIPPED",
            "0 steps passed, 0 failed, 1 SKIPPED",
        ),
    ] {
        let folder = carry(&format!("step-{name}"), answers);
        let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
        let mut check = Command::new(root().join("tools/gpu/check"));
        check.arg("test").arg(&folder).arg(folder.join("logs"));
        check.env("PATH", path).env("STEPS", "lazy-loading").env("GPU_SHARED", "1");
        let done = check.output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert_eq!(done.status.code(), Some(status), "{name}: {said}");
        assert!(said.contains(line) && said.contains(counts), "{name}: {said}");
    }
}

#[test]
fn the_scripts_can_be_read_and_are_carried_along() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    for file in fs::read_dir(root().join("tools/gpu")).unwrap() {
        let file = file.unwrap();
        let text = fs::read_to_string(file.path()).unwrap();
        let read = match text.lines().next().unwrap_or_default() {
            first if first.contains("python") => Command::new("python3")
                .args(["-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())"])
                .arg(file.path())
                .output(),
            _ => Command::new("bash").arg("-n").arg(file.path()).output(),
        };
        let read = read.unwrap();
        assert!(read.status.success(), "{read:?}");
        let name = format!("tools/gpu/{} ", file.file_name().to_str().unwrap());
        assert!(makefile.contains(&name), "{name}");
    }
}

/// A `serval` whose comparisons have as many pairs as their suite asks for, with these values in turn; it accepts every
/// configuration, or none.
fn build_with(name: &str, values: &str, accepts: bool) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compare-builds-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let serval = format!(
        "case $1 in\n\
        check-config) exit {} ;;\n\
        version) echo '{{\"commit\":\"0123456789abcdef\",\"dirty\":true,\"tree\":\"\"}}' ;;\n\
        compare) echo x >>\"$(dirname \"$0\")/asked\"\n\
            count=$(sed -n 's/^pairs = //p' \"$4\") values=({values}) pairs=\n\
            for ((i = 0; i < count && ${{#values[@]}}; i++)); do pairs+=${{pairs:+,}}{{\\\"value\\\":${{values[i % ${{#values[@]}}]}}}}; done\n\
            reason=null; [ -n \"$pairs\" ] || reason='\"11 pairs were discarded and 0 kept\"'\n\
            verdict=no-verdict; [ -n \"$pairs\" ] || verdict=void\n\
            echo \"{{\\\"rows\\\":[{{\\\"name\\\":\\\"udp-echo-28\\\",\\\"pairs\\\":[$pairs],\\\"verdict\\\":\\\"$verdict\\\",\\\"reason\\\":$reason}}]}}\" ;;\n\
        esac\n",
        if accepts { 0 } else { 1 },
    );
    let program = folder.join("serval.sh");
    write_program(&program, &serval);
    program
}

#[test]
fn builds_pass_by_the_median_or_after_many_pairs_by_the_interval() {
    if sys::affinity::allowed_cores().unwrap().len() < 2 {
        println!("SKIPPED: comparing needs two cores");
        return;
    }
    let compared = |name: &str, values: &str, accepts: bool| {
        let new = build_with(name, values, accepts);
        let old = build_with(&format!("{name}-old"), "", accepts);
        let mut compare = Command::new(root().join("tools/compare-builds"));
        compare.arg("--new").arg(&new).arg("--base").arg(&old);
        let output = compare.args(["--before", "none", "udp-echo-28"]).output().unwrap();
        let asked = fs::read_to_string(new.with_file_name("asked")).unwrap_or_default();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), asked.len() / 2, String::from_utf8(said).unwrap())
    };
    for (name, values, status, rounds, verdict) in [
        ("same", "1.0 1.01", 0, 1, "pass"),
        ("worse", "0.95 0.96", 1, 1, "fail"),
        // Undecided at first.
        ("wide", "0.96 1.08", 0, 4, "pass"),
        ("wider", "0.9 1.1", 1, 4, "fail"),
        ("noisy", "", 1, 4, "not measured: 11 pairs were discarded"),
    ] {
        let (code, asked, said) = compared(name, values, true);
        assert_eq!((code, asked), (Some(status), rounds), "{name}: {said}");
        assert!(said.lines().any(|line| line.contains(verdict)), "{name}: {said}");
    }
    let (code, asked, said) = compared("refused", "1.0", false);
    assert_eq!((code, asked), (Some(1), 0), "{said}");
    assert!(said.contains("accepts no configuration echo"), "{said}");
    let told = "built from 0123456789ab with changes that are in no commit";
    assert!(said.contains(told), "{said}");
}

/// The build that is compared by default is that of the sources as they are.
#[test]
fn a_build_of_other_sources_is_not_compared_by_mistake() {
    let sources = Command::new(root().join("tools/source-tree")).output().unwrap();
    if sources.stdout.is_empty() {
        println!("SKIPPED: this is no git checkout");
        return;
    }
    let program = build_with("forgotten", "1.0", true);
    let folder = program.with_file_name("release");
    fs::create_dir_all(&folder).unwrap();
    fs::copy(&program, folder.join("serval")).unwrap();
    let mut compare = Command::new(root().join("tools/compare-builds"));
    compare.env("CARGO_TARGET_DIR", folder.parent().unwrap());
    let output =
        compare.args(["--before", "none", "--base", "none", "udp-echo-28"]).output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("is not of the sources here") && said.contains("make build"), "{said}");
}
