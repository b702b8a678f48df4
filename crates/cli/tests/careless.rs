//! Kernels with mistakes that people make: what a server does about each.

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use common::*;
use wire::DropReason;

/// A service on the worker's own core.
fn service(name: &str, kernel: &str, more: &str) -> String {
    let library = build_kernel("crates/server/tests/kernels/careless.cpp");
    format!(
        "[[service]]\nname = \"{name}\"\nlisten = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\"]\naccelerator = \"host\"\n\
         kernel = \"{library}:{kernel}\"\nmqueues = 2\n{more}\n"
    )
}

const HOST: &str = "[[accelerator]]\nname = \"host\"\nkind = \"cpu\"\n";

// provokes: reply_too_long
#[test]
fn a_datagram_that_makes_a_reply_too_long_costs_only_its_own_reply() {
    let sizes = "max_message_bytes = 8192\nmax_reply_bytes = 1024";
    let config =
        HOST.to_owned() + &service("twice", "twice", "") + &service("thrice", "thrice", sizes);
    let served = Served::start("careless_lengths", "", &config);
    for (at, longest) in [(0, 512), (1, 1024)] {
        let client = udp_client(served.services[at][0]);
        assert_eq!(ask(&client, &[0; 8]).len(), if at == 0 { 16 } else { 8 });
        for len in [longest + 4, 8192.min(2 * longest)] {
            client.send(&vec![1; len]).unwrap();
        }
        // What follows is answered: the server is there, and the block serves on.
        for _ in 0..20 {
            assert_eq!(ask(&client, &vec![0; longest]).len(), if at == 0 { 1024 } else { longest });
        }
    }
    for name in ["twice", "thrice"] {
        eventually("both are counted", || served.dropped(name, DropReason::ReplyTooLong) == 2);
    }
    assert_eq!(served.drain(), 0);
}

/// A kernel file that names no accelerator has a process of its own.
#[test]
fn a_crash_in_a_kernel_file_ends_no_other_service() {
    let library = build_kernel("crates/server/tests/kernels/careless.cpp");
    let config = format!(
        "[[service]]\nname = \"other\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n\
         [[service]]\nname = \"crashes\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"{library}:crashes\"\n"
    );
    let served = Served::start("careless_crash", "", &config);
    let [other, crashes] = [0, 1].map(|at| served.services[at][0]);
    assert_eq!(ask(&udp_client(crashes), b"hello"), b"hello");
    let runtime = children(served.process.0.id());
    assert_eq!(runtime.len(), 1, "one process, for the kernel file");
    udp_client(crashes).send(b"!").unwrap();
    eventually("it is lost with its process", || {
        served.dropped("crashes", DropReason::AcceleratorLost) == 1
    });
    assert_eq!(ask(&udp_client(other), b"there"), b"there");
    eventually("the log says why", || served.log().contains("ended by signal 11 (SIGSEGV)"));
    answers_again(crashes, 1);
    assert_eq!(served.drain(), 0);
}

/// On the worker's core: the process ends with the signal's own status, and says first where it was.
#[test]
fn a_crash_in_a_kernel_names_service_block_kernel_and_signal() {
    let cases = [
        ("address", b"a", 11, "crash in block", "SIGSEGV"),
        ("instruction", b"i", 4, "crash in block", "SIGILL"),
        ("stack", b"s", 11, "stack overflow in block", "64 KiB of stack: raise stack_kib"),
    ];
    for (name, request, signal, what, word) in cases {
        let config = HOST.to_owned() + &service("crashing", "crashes_variously", "");
        let mut served = Served::start(&format!("careless_{name}"), "", &config);
        let client = udp_client(served.services[0][0]);
        assert_eq!(ask(&client, b"hello"), b"hello");
        client.send(request).unwrap();
        let mut ended = None;
        eventually("it ends", || {
            ended = served.process.0.try_wait().unwrap();
            ended.is_some()
        });
        assert_eq!(ended.unwrap().signal(), Some(signal), "{name}: {}", served.log());
        let log = served.log();
        let line = log.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("{log}"));
        for part in ["service \"crashing\"", "crashes_variously", word] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
}

/// In the engine and in a process of its own: 64 KiB by default, and what `stack_kib` says.
#[test]
fn a_kernel_with_deep_calls_needs_a_larger_stack_kib() {
    let accelerators = [("worker", "cpu"), ("process", "process")];
    for (name, kind) in accelerators {
        let host = format!("[[accelerator]]\nname = \"host\"\nkind = \"{kind}\"\n");
        let deep = service("deep", "crashes_variously", "");

        let config = format!("{host}stack_kib = 1024\n{deep}");
        let served = Served::start(&format!("careless_deep_{name}"), "", &config);
        let client = udp_client(served.services[0][0]);
        assert_eq!(ask(&client, b"deep"), b"deep", "{name}");
        assert_eq!(served.drain(), 0);

        let config = host + &deep;
        let served = Served::start(&format!("careless_shallow_{name}"), "", &config);
        let client = udp_client(served.services[0][0]);
        assert_eq!(ask(&client, b"hello"), b"hello");
        client.send(b"deep").unwrap();
        let found =
            || served.log().lines().find(|l| l.contains("stack overflow")).map(str::to_owned);
        eventually("the overflow is reported", || found().is_some());
        if kind == "process" {
            // What the engine logs next does not overwrite the line.
            eventually("the end is logged", || served.log().contains("ended by signal 11"));
        }
        let line = found().expect("the line stays");
        for part in [
            "in block ",
            "service \"deep\"",
            "crashes_variously",
            "64 KiB of stack: raise stack_kib of its accelerator",
        ] {
            assert!(line.contains(part), "{name}: {part}: {line}");
        }
    }
}

/// A server whose standard error is a pipe crashes: after the shell commands `before` its start, and after `meanwhile` while it
/// serves. Returns the unread content of the pipe at its end.
fn crash_beside_a_pipe(name: &str, before: &str, meanwhile: impl FnOnce(u32)) -> String {
    let config = HOST.to_owned() + &service("crashing", "crashes_variously", "");
    let file =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("careless_{name}.toml"));
    let engine = "[engine]\nmetrics = \"\"\ncontrol = \"off\"";
    std::fs::write(&file, format!("schema = 1\n{engine}\n{config}")).unwrap();
    let script = format!("{before}; exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_serval"), "serve", "--json"]).arg(&file);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Peer::start(&mut command, "cargo builds it");
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).expect("it becomes ready");
    let url = ready["services"][0]["listen"][0].as_str().unwrap();
    let client = udp_client(url.split_once("://").unwrap().1.parse().unwrap());
    assert_eq!(ask(&client, b"hello"), b"hello");
    meanwhile(process.0.id());
    client.send(b"a").unwrap();
    let mut ended = None;
    eventually("it ends", || {
        ended = process.0.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().signal(), Some(11));
    let mut left = Vec::new();
    process.0.stderr.take().unwrap().read_to_end(&mut left).unwrap();
    String::from_utf8_lossy(&left).into_owned()
}

/// An unread log does not keep a crashed process from ending.
#[test]
fn a_crash_beside_a_full_pipe_ends_the_process() {
    let fill = "dd if=/dev/zero bs=4096 count=1000 oflag=nonblock >&2 2>/dev/null";
    crash_beside_a_pipe("full", fill, |_| ());
}

/// A pipe that cannot be opened again, here because no descriptor is left, still takes the line.
#[test]
fn a_crash_is_named_in_a_pipe_that_cannot_be_opened_again() {
    let said = crash_beside_a_pipe("unopened", ":", |process| {
        let mut limit = Command::new("prlimit");
        let done = limit.args(["--pid", &process.to_string(), "--nofile=3:"]).status();
        assert!(done.expect("util-linux has it").success());
    });
    assert!(said.contains("serval: crash in block ") && said.contains("SIGSEGV"), "{said}");
}
