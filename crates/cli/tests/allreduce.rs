//! `serval allreduce`: ranks are processes of their own; one that is killed ends the call on all others.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

fn serval(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str]) -> (Option<i32>, Json) {
    let output = serval(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let last = text.lines().last().unwrap_or_default();
    (output.status.code(), serde_json::from_str(last).unwrap_or_default())
}

#[test]
fn processes_sum_and_agree() {
    let few = ["allreduce", "--json", "--rounds", "3"];
    for more in [
        &["--bytes", "64"][..],
        &["--ranks", "3", "--bytes", "100KiB", "--type", "int32"],
        &["--bytes", "0"],
        &["--bytes", "64", "--transport", "shm"],
        &["--ranks", "3", "--bytes", "100KiB", "--type", "int32", "--transport", "shm"],
    ] {
        let (code, report) = run(&[&few, more].concat());
        assert_eq!(code, Some(0), "{report}");
        assert_eq!(report["wrong"], 0);
        assert_eq!(report["identical"], true);
    }
    // The order of additions is the same in every run.
    let digest =
        || run(&[&few[..], &["--ranks", "4", "--bytes", "40KiB"]].concat()).1["sha256"].clone();
    assert_eq!(digest(), digest());
}

#[test]
fn a_demo_checks_and_finds_a_spoiled_byte() {
    let (code, report) = run(&["demo", "allreduce", "--quick", "--json"]);
    assert_eq!((code, &report["wrong"]), (Some(0), &Json::from(0)));
    assert!(report["checked"].as_u64().unwrap() > 1_000_000);
    let (code, report) = run(&["demo", "allreduce", "--quick", "--json", "--corrupt"]);
    assert_eq!(code, Some(1));
    assert!(report["wrong"].as_u64().unwrap() > 0);
}

#[test]
fn mistakes_get_one_sentence() {
    for (arguments, said) in [
        (&["--bytes", "3"][..], "a multiple of 4"),
        (&["--ranks", "9"], "must be in [2, 8]"),
        (&["--gpu", "0"], "--gpu needs --memory cuda"),
        (&["--rank", "0", "--group", "nonsense,1"], "is no address"),
        (&["--rank", "2", "--group", "127.0.0.1:1,127.0.0.1:2"], "has no rank 2"),
    ] {
        let output = serval(&[&["allreduce"], arguments].concat()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(said), "{text}");
    }
}

/// A rank that calls until it is stopped.
fn start(rank: usize, listener: TcpListener, group: &str) -> Child {
    let rank = rank.to_string();
    let mut command =
        serval(&["allreduce", "--json", "--inherited", "--rank", &rank, "--group", group]);
    command.args(["--bytes", "40KiB", "--rounds", "10000000", "--limit", "600"]);
    command.stdin(OwnedFd::from(listener)).spawn().unwrap()
}

#[test]
fn a_killed_rank_ends_the_call_on_all_others() {
    const RANKS: usize = 3;
    let listeners: Vec<_> = (0..RANKS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> =
        listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    let group = addresses.join(",");
    let ranks = listeners.into_iter().enumerate();
    let mut ranks: Vec<Child> = ranks.map(|(rank, at)| start(rank, at, &group)).collect();
    // They are in the middle of calls soon; when exactly does not matter.
    std::thread::sleep(Duration::from_millis(300));
    ranks[1].kill().unwrap();
    let killed = Instant::now();
    for rank in [0, 2] {
        let mut line = String::new();
        BufReader::new(ranks[rank].stdout.take().unwrap()).read_line(&mut line).unwrap();
        let status = ranks[rank].wait().unwrap();
        let report: Json = serde_json::from_str(&line).unwrap();
        let error = report["error"].as_str().unwrap().to_owned();
        assert!(error.contains("rank 1 was lost") || error.contains("group"), "{error}");
        assert_eq!(status.code(), Some(1));
        let mut said = String::new();
        ranks[rank].stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains(&error), "{said}");
    }
    // Far below the limit of a call, which is ten minutes.
    assert!(killed.elapsed() < Duration::from_secs(60));
    ranks[1].wait().unwrap();
}
