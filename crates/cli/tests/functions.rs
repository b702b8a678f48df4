//! `serval fn`, NICA's calls in C, and the page for newcomers, against a running server.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use common::running::{Running, table};
use common::*;
use onpath::Spec;
use server::control::client::FunctionClient;
use server::control::protocol::{ANSWER_BYTES_MAX, Request};
use server::{Place, RegisterAction, Target};
use sys::local::LocalSocket;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn said(output: &Output) -> (i32, String) {
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn serval_fn(server: &Running, arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("fn").args(arguments).arg("--server").arg(&server.socket);
    said(&command.output().unwrap())
}

fn done(server: &Running, arguments: &[&str], expected: &str) {
    let (code, text) = serval_fn(server, arguments);
    assert!(code == 0 && text.contains(expected), "{arguments:?}: {code} {text}");
}

fn refused(server: &Running, arguments: &[&str], expected: &str) {
    let (code, text) = serval_fn(server, arguments);
    assert!(code != 0 && text.contains(expected), "{arguments:?}: {code} {text}");
}

/// The value in the line of a table that begins with these words.
fn value(server: &Running, arguments: &[&str], words: &[&str]) -> u64 {
    let (code, text) = serval_fn(server, arguments);
    assert_eq!(code, 0, "{text}");
    let line = text.lines().find(|line| {
        let found: Vec<_> = line.split_whitespace().collect();
        found.starts_with(words)
    });
    let line = line.unwrap_or_else(|| panic!("no {words:?} in {text}"));
    line.split_whitespace().last().unwrap().parse().unwrap()
}

#[test]
fn the_state_of_a_function_is_written_to_a_file() {
    let port = free_port();
    let server = Running::start("fn-state", &table("echo", port, "echo", ""));
    let client = udp_client(([127, 0, 0, 1], port).into());
    done(
        &server,
        &["attach", "echo", "visitors", "hyperloglog", "--param", "precision=18"],
        "attached",
    );
    assert_eq!(ask(&client, b"one"), b"one");
    let file = std::env::temp_dir().join(format!("serval-{}.hll", std::process::id()));
    let path = file.to_str().unwrap();
    done(&server, &["state", "echo", "visitors", path], "262156 bytes written");
    let state = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(state.starts_with(b"SHLL\x01\x12\x40\0") && state.len() == 262_156);
    assert_eq!(state[12..].iter().filter(|rank| **rank > 0).count(), 1, "one item");
    refused(&server, &["state", "echo", "nothing", path], "has no function");
    done(&server, &["attach", "echo", "all", "passthrough"], "attached");
    refused(&server, &["state", "echo", "all", path], "has no state");
    refused(&server, &["state", "echo", "visitors", "/nowhere/x"], "cannot be written");
}

/// A trace asks many times a second whether messages came, which is no news.
#[test]
fn a_trace_has_an_audit_line_for_its_begin_and_its_end() {
    let port = free_port();
    let server = Running::start("fn-audit", &table("echo", port, "echo", ""));
    done(&server, &["attach", "echo", "all", "passthrough"], "attached");
    done(&server, &["trace", "echo", "3", "--seconds", "1"], "no message came");
    for _ in 0..3 {
        done(&server, &["command", "echo", "all"], "no registers");
    }
    let log = server.log();
    let audited: Vec<_> = log.lines().filter_map(|line| line.split("audit: ").nth(1)).collect();
    let of = |request: &str| audited.iter().filter(|line| line.starts_with(request)).count();
    assert_eq!((of("fn trace was done"), of("fn trace (end) was done")), (1, 1), "{log}");
    assert_eq!((audited.len(), of("fn attach")), (3, 1), "{log}");
    // What is refused is a line each time.
    refused(&server, &["command", "echo", "nothing"], "has no function");
    assert!(server.log().contains("audit: fn command was refused"));
}

/// What a function counts itself is on the page of metrics, a second or two later.
#[test]
fn registers_are_on_the_page_of_metrics() {
    let port = free_port();
    let server = Running::start("fn-page-registers", &table("echo", port, "echo", ""));
    let client = udp_client(([127, 0, 0, 1], port).into());
    let wasm = repository().join("functions/hyperloglog.wasm");
    for (name, function) in [("native", "hyperloglog"), ("module", wasm.to_str().unwrap())] {
        let params = ["--param", "precision=10", "--deadline-us", "1000000"];
        done(&server, &[&["attach", "echo", name, function], &params[..]].concat(), "attached");
    }
    assert_eq!(ask(&client, b"one"), b"one");
    for name in ["native", "module"] {
        let labels = format!("service=\"echo\",function=\"{name}\"");
        server.wait_for_line(&format!("serval_function_register{{{labels},register=\"items\"}} 1"));
        server.wait_for_line(&format!(
            "serval_function_register{{{labels},register=\"precision\"}} 10"
        ));
        server.wait_for_line(&format!("serval_function_state_bytes{{{labels}}} 1036"));
    }
    let page = page(server.metrics);
    assert!(!page.contains("register=\"estimate\""), "it follows from all states together");
    assert_eq!(server.end(), 0);
}

#[test]
fn a_state_that_several_workers_would_split_is_refused() {
    let text = |state: &str| format!("name = \"mine\"\nversion = \"1\"\nstate = {state}\n");
    let module = std::fs::read(repository().join("functions/threshold.wasm")).unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("functions-state");
    std::fs::create_dir_all(&folder).unwrap();
    let by_key = "\"by-key\"\nkey = { offset = 0, length = 4 }";
    let kinds = [("mergeable", "\"mergeable\""), ("single", "\"single\""), ("by-key", by_key)];
    let file = |kind: &str| folder.join(format!("{kind}.wasm"));
    for (kind, state) in kinds {
        let manifest = onpath::wasm::Manifest::parse(&text(state)).unwrap();
        std::fs::write(file(kind), manifest.put(&module).unwrap()).unwrap();
    }
    for workers in [1, 2] {
        let (port, other) = (free_port(), free_port());
        let engine = format!("workers = {workers}\n");
        let proxy = format!(
            "[[service]]\nname = \"web\"\nlisten = \"tcp://127.0.0.1:{other}\"\nupstream = \"127.0.0.1:9\"\n"
        );
        let services = table("echo", port, "echo", "") + &proxy;
        let server = Running::start(&format!("fn-state-{workers}"), &(engine.clone() + &services));
        for (kind, _) in kinds {
            let path = file(kind);
            let attach = |service| ["attach", service, kind, path.to_str().unwrap()];
            // Requests are handed over to the worker that has their state.
            done(&server, &attach("echo"), "attached");
            if workers == 1 || kind == "mergeable" {
                done(&server, &attach("web"), "attached");
                continue;
            }
            let expected = format!(
                "is `{kind}`, as its manifest says, and each of 2 workers would have a part of it on the path to a backend or through a proxy over TCP: set engine.workers = 1"
            );
            refused(&server, &attach("web"), &expected);
            // A configuration is refused before anything changes.
            let function = format!("[[service.function]]\nname = \"f\"\nfunction = {path:?}\n");
            server.write(&engine, &(services.clone() + &function));
            let (code, _, why) = server.reload();
            assert!(code != 0 && why.contains("engine.workers = 1"), "{code} {why}");
        }
        // Sockets of different flows, some for each worker.
        for _ in 0..16 {
            let client = udp_client(([127, 0, 0, 1], port).into());
            assert_eq!(ask(&client, &[7; 20]), [7; 20]);
        }
        let read = ["command", "echo", "single", "read"];
        assert_eq!(value(&server, &read, &["count"]), 16, "{workers} workers");
        assert_eq!(server.end(), 0);
    }
}

#[test]
fn functions_of_a_running_server_are_managed_from_a_shell() {
    let port = free_port();
    let server = Running::start("fn", &table("echo", port, "echo", ""));
    let client = udp_client(([127, 0, 0, 1], port).into());
    done(&server, &["list"], "no function is attached");
    let wasm = repository().join("functions/threshold.wasm");
    let wasm = wasm.to_str().unwrap();
    for (function, result) in [("threshold", "attached"), (wasm, "replaced")] {
        let attach = [
            "attach",
            "echo",
            "limits",
            function,
            "--param",
            "offset=0",
            "--deadline-us",
            "1000000",
            "--dictionary",
            "known",
            "--dictionary-kib",
            "32",
        ];
        done(&server, &attach, result);
        done(&server, &["list"], function);
        assert_eq!(ask(&client, &[0, 0, 0, 9, 1]), [0, 0, 0, 9, 1]);
        let read = ["command", "echo", "limits"];
        assert_eq!(value(&server, &read, &["sum"]), 9);
        done(&server, &["command", "echo", "limits", "set", "high=8"], "high");
        let sent = value(&server, &read, &["count"]);
        client.send(&[0, 0, 0, 9, 1]).unwrap();
        eventually("it is dropped", || value(&server, &read, &["count"]) > sent);
        assert_eq!(value(&server, &read, &["dropped"]), 1);
        assert_eq!(value(&server, &["counters"], &["echo", "limits", "dropped"]), 1);
        done(&server, &["command", "echo", "limits", "reset"], "min");
        assert_eq!(value(&server, &read, &["sum"]), 0);
    }
    let line = "serval_function_dropped_total{service=\"echo\",function=\"limits\"} 1";
    server.wait_for_line(line);
    let line = "serval_function_dictionary_entries{service=\"echo\",function=\"limits\"} 0";
    server.wait_for_line(line);
    refused(
        &server,
        &["attach", "echo", "f", "threshold", "--dictionary", "a b"],
        "\"dictionary\" is no name",
    );
    refused(
        &server,
        &["attach", "echo", "f", "nothing"],
        "there is no built-in function \"nothing\"",
    );
    refused(&server, &["attach", "missing", "f", "threshold"], "there is no service \"missing\"");
    refused(&server, &["detach", "echo", "f"], "has no function \"f\": it has limits");
    refused(&server, &["command", "echo", "limits", "set", "hihg=1"], "it has offset, low, high");
    refused(
        &server,
        &["command", "echo", "limits", "read", "high=1"],
        "a setting goes with `set` only",
    );
    refused(&server, &["attach", "echo", "f", "threshold", "--param", "low"], "must be NAME=VALUE");
    done(&server, &["detach", "echo", "limits"], "detached");
    done(&server, &["counters"], "no function is attached");
    assert_eq!(server.end(), 0);
}

/// The process closes its connection with each command; a function stays until it is destroyed.
#[test]
fn functions_are_created_and_destroyed_from_a_shell() {
    let port = free_port();
    let of_file = "[[service.function]]\nname = \"file\"\nfunction = \"passthrough\"\n";
    let server = Running::start("fn-create", &(table("echo", port, "echo", "") + of_file));
    let client = udp_client(([127, 0, 0, 1], port).into());
    let wasm = repository().join("functions/threshold.wasm");
    let wasm = wasm.to_str().unwrap();
    refused(&server, &["destroy", "limits"], "no function \"limits\" was created");
    refused(&server, &["attach", "echo", "limits"], "no function \"limits\" was created");
    let create = ["create", "limits", wasm, "--param", "offset=0", "--deadline-us", "1000000"];
    done(&server, &create, "limits: created, id ");
    refused(&server, &create, "has created a function \"limits\" already");
    done(&server, &["list"], "(none)");
    refused(&server, &["attach", "echo", "limits", "--param", "low=1"], "go with FUNCTION");
    done(&server, &["attach", "echo", "limits", "--before", "file"], "attached");
    refused(&server, &["attach", "echo", "limits"], "is attached to service \"echo\" already");
    refused(&server, &["destroy", "limits"], "detach it first");
    assert_eq!(ask(&client, &[0, 0, 0, 9, 1]), [0, 0, 0, 9, 1]);
    let read = ["command", "echo", "limits"];
    assert_eq!(value(&server, &read, &["sum"]), 9);
    refused(&server, &["replace", "echo", "limits"], "nothing is replaced");
    let replace = ["replace", "echo", "limits", "--param", "high=1000", "--param", "offset=0"];
    done(&server, &replace, "replaced");
    assert_eq!(value(&server, &read, &["high"]), 1000);
    assert_eq!(value(&server, &read, &["sum"]), 9, "the registers stay");
    done(&server, &["replace", "echo", "limits", "threshold"], "replaced");
    assert_eq!(value(&server, &read, &["sum"]), 0);
    // One of the file comes back with a reload, and the other one keeps its place.
    done(&server, &["detach", "echo", "file"], "the next reload attaches it again");
    assert_eq!(serval_fn(&server, &["list"]).1.lines().count(), 2);
    let mut reload = Command::new(env!("CARGO_BIN_EXE_serval"));
    let reloaded = reload.arg("reload").arg(&server.socket).output().unwrap();
    assert_eq!(reloaded.status.code(), Some(0), "{reloaded:?}");
    let list = serval_fn(&server, &["list"]).1;
    let names: Vec<_> = list.lines().skip(1).filter_map(|l| l.split_whitespace().nth(1)).collect();
    assert_eq!(names, ["limits", "file"], "{list}");
    done(&server, &["detach", "echo", "limits"], "detached");
    let shown = serval_fn(&server, &["list", "--json"]).1;
    let id = shown.split("\"id\":").nth(2).and_then(|rest| rest.split([',', '}']).next());
    let id: u64 = id.unwrap().parse().unwrap();
    refused(&server, &["destroy", "--id", &(id + 1000).to_string()], "there is no function");
    server.wait_for_line("serval_function_requests_refused_total{reason=\"function\"} 1");
    done(&server, &["destroy", "--id", &id.to_string()], "destroyed");
    done(&server, &["create", "limits", "threshold"], "created");
    done(&server, &["destroy", "limits"], "destroyed");
    assert_eq!(server.end(), 0);
}

#[test]
fn a_trace_shows_what_messages_meet() {
    let port = free_port();
    let of_file = "[[service.function]]\nname = \"file\"\nfunction = \"passthrough\"\n";
    let server = Running::start("fn-trace", &(table("echo", port, "echo", "") + of_file));
    let attach = ["attach", "echo", "limits", "threshold", "--param", "offset=0"];
    done(
        &server,
        &[&attach[..], &["--param", "high=8", "--deadline-us", "1000000"]].concat(),
        "attached",
    );
    // Clients ask until the trace is complete, in which are requests and replies.
    let stop = AtomicBool::new(false);
    let traced = std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = udp_client(([127, 0, 0, 1], port).into());
            while !stop.load(Ordering::Relaxed) {
                client.send(&[0, 0, 0, 9, 1]).unwrap();
                ask(&client, &[0, 0, 0, 7, 1, 2]);
            }
        });
        let traced = serval_fn(&server, &["trace", "echo", "30", "--seconds", "60"]);
        stop.store(true, Ordering::Relaxed);
        traced
    });
    assert_eq!(traced.0, 0, "{}", traced.1);
    for expected in ["request", "reply", "file", "limits", "drop function_drop", " ns"] {
        assert!(traced.1.contains(expected), "{expected}: {}", traced.1);
    }
    assert!(traced.1.lines().count() > 30, "{}", traced.1);
    done(&server, &["trace", "echo", "5", "--seconds", "0"], "no message came");
    refused(&server, &["trace", "none"], "there is no service \"none\"");
    refused(&server, &["trace", "echo", "101"], "101");
    done(&server, &["detach", "echo", "limits"], "detached");
    done(&server, &["detach", "echo", "file"], "detached");
    refused(&server, &["trace", "echo"], "has no functions");
    assert_eq!(server.end(), 0);
}

#[test]
fn a_function_ends_with_the_connection_that_created_it() {
    let port = free_port();
    let server = Running::start("fn-bound", &table("echo", port, "echo", ""));
    let client = udp_client(([127, 0, 0, 1], port).into());
    let connect = || FunctionClient::connect(&server.socket).unwrap();
    let (first, second) = (connect(), connect());
    let spec = |name| Spec::new(name, "passthrough");
    let bound = first.create(&spec("a"), true).unwrap();
    first.attach(bound, "echo", &Place::Default).unwrap();
    let stays = second.create(&spec("b"), false).unwrap();
    second.attach(stays, "echo", &Place::After("a".into())).unwrap();
    // A connection without such a function is closed after a while, and that one stays.
    let silent = LocalSocket::connect(&server.socket).unwrap();
    silent.send(Request::Status.line().as_bytes(), &[]).unwrap();
    eventually("a silent connection is closed", || {
        silent.receive(&mut [0; ANSWER_BYTES_MAX]).is_ok_and(|got| got == Some(0))
    });
    assert_eq!(first.list().unwrap()["functions"].as_array().unwrap().len(), 2);
    assert_eq!(ask(&client, b"both"), b"both");
    drop(first);
    let names = || {
        let list = connect().list().unwrap();
        let functions = list["functions"].as_array().unwrap().iter();
        functions.map(|f| f["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    eventually("it ends", || names() == ["b"]);
    assert_eq!(ask(&client, b"one"), b"one");
    let third = connect();
    let gone = third.command(&Target::Id(bound), &RegisterAction::Read).unwrap_err().to_string();
    assert!(gone.starts_with(&format!("there is no function {bound} of user")), "{gone}");
    assert_eq!(server.end(), 0);
}

#[test]
fn nicas_calls_do_the_same_from_c() {
    let library = repository().join("lib");
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("functions-c");
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "--silent", "-C"]).arg(&library);
    let made = make
        .arg(format!("BUILD={}", build.display()))
        .args(["functions", "functions-tests"])
        .output();
    assert_eq!(said(&made.unwrap()), (0, String::new()));
    let late = Command::new(build.join("late_test")).arg(&build).output().unwrap();
    assert_eq!(said(&late), (0, String::new()), "an answer that comes after its time");
    let of_file = "[[service.function]]\nname = \"file\"\nfunction = \"passthrough\"\n";
    let port = free_port();
    let server = Running::start("ik", &(table("echo", port, "echo", "") + of_file));
    let module = repository().join("functions/threshold.wasm");
    for (program, function) in [("ik_test", "threshold"), ("ik_test.san", module.to_str().unwrap())]
    {
        let mut test = Command::new(build.join(program));
        let arguments = ["echo", function, &port.to_string()];
        let output = test.arg(&server.socket).args(arguments).output().unwrap();
        assert_eq!(said(&output), (0, String::new()), "{program} {function}");
        done(&server, &["detach", "echo", "kept"], "detached");
        done(&server, &["destroy", "kept"], "destroyed");
    }
    let list = serval_fn(&server, &["list"]).1;
    assert_eq!(list.lines().count(), 2, "{list}");
    assert_eq!(server.end(), 0);
}

#[test]
fn the_function_of_the_page_for_newcomers_does_what_the_page_says() {
    let page = std::fs::read_to_string(repository().join("docs/functions.md")).unwrap();
    let (_, source) = page.split_once("```c\n").unwrap();
    let (source, _) = source.split_once("```").unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("functions-page");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("mine.c"), source).unwrap();
    let command = page.lines().find(|line| line.starts_with("clang ")).unwrap();
    let include = format!("-I {}", repository().join("functions/include").display());
    let command = command.replace("-I functions/include", &include);
    let compiled = Command::new("sh").args(["-c", &command]).current_dir(&folder).output().unwrap();
    assert_eq!(said(&compiled), (0, String::new()));
    let port = free_port();
    let server = Running::start("fn-page", &table("echo", port, "echo", ""));
    let module = folder.join("mine.wasm");
    done(
        &server,
        &["attach", "echo", "mine", module.to_str().unwrap(), "--deadline-us", "1000000"],
        "attached",
    );
    let client = udp_client(([127, 0, 0, 1], port).into());
    assert_eq!(ask(&client, b"ping"), b"pong");
    assert_eq!(ask(&client, b"hello"), b"hello");
    client.send(b"hello?").unwrap();
    let counters = ["counters"];
    eventually("it is dropped", || value(&server, &counters, &["echo", "mine", "dropped"]) == 1);
    assert_eq!(value(&server, &counters, &["echo", "mine", "replied"]), 1);
    assert_eq!(server.end(), 0);
}
