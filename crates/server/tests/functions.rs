//! Functions on the path of a running server's messages: attached, replaced, commanded and detached while clients are served.

mod common;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use common::change::{Askers, change, never, service, threads};
use common::*;
use engine::topology::{Dispatch, Topology};
use onpath::{OnFailure, Spec};
use server::{Caller, Origin, RegisterAction, Server, Target};
use sys::{PortSpec, SocketNic, SocketOptions};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Nic, Transport, TxBatch};

fn wasm() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm");
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

/// The threshold of the first number of a message, as a built-in function or a module. It may take long: the machine is busy.
fn threshold(function: &str, low: u64, high: u64) -> Spec {
    let mut spec = Spec::new("limits", function);
    spec.params =
        vec![("offset".into(), 0.into()), ("low".into(), low.into()), ("high".into(), high.into())];
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    spec
}

fn passthrough(name: &str) -> Spec {
    Spec::new(name, "passthrough")
}

fn one(workers: usize) -> Server {
    let mut topology = topology(vec![service("a", vec![udp(), tcp()], "echo")]);
    topology.engine.workers = workers;
    start(topology)
}

fn limits() -> Target {
    Target::Named { service: "a".into(), name: "limits".into() }
}

fn value(registers: &[(String, u64)], name: &str) -> u64 {
    registers.iter().find(|(of, _)| of == name).unwrap_or_else(|| panic!("no {name}")).1
}

#[test]
fn a_function_is_replaced_again_and_again_under_load_and_no_message_is_lost() {
    let _alone = alone();
    for workers in [1, 2] {
        let mut server = one(workers);
        let askers = Askers::start(address(&server, 0), address(&server, 1));
        let mut resources = Vec::new();
        for round in 0..24 {
            let function = if round % 2 == 0 { wasm() } else { "threshold".to_owned() };
            let replaced = server.functions.attach(
                &server.engine,
                "a",
                &threshold(&function, 0, u32::MAX.into()),
                None,
            );
            assert_eq!(replaced.unwrap(), round > 0);
            if round % 3 == 0 {
                server
                    .functions
                    .attach(&server.engine, "a", &passthrough("beside"), Some(round % 2))
                    .unwrap();
            }
            askers.go_on();
            let read = server.functions.read(&server.engine, "a", "limits").unwrap();
            assert!(value(&read, "count") > 0 && value(&read, "dropped") == 0, "{read:?}");
            if round % 3 == 2 {
                server.functions.detach_named(&server.engine, "a", "beside").unwrap();
            }
            if round >= 6 {
                resources.push((sys::process::open_descriptors(), threads()));
            }
        }
        server.functions.detach_named(&server.engine, "a", "limits").unwrap();
        askers.go_on();
        assert!(server.functions.list(&server.engine, Caller::engine()).is_empty());
        let answered = askers.finish();
        assert_accounts(&server);
        let a = server.metrics().service(0);
        assert_eq!((a.received, a.replied, a.dropped_requests()), (answered, answered, 0));
        // With a module a thread counts time.
        let same = |(at, found): (usize, &(usize, usize))| *found == resources[at % 2];
        assert!(resources.iter().enumerate().all(same), "{resources:?}");
        assert!(server.shutdown().is_clean());
    }
}

/// Sends the number as the beginning of a message; whether it came back.
fn passes(client: &std::net::UdpSocket, server: &Server, number: u32) -> bool {
    let mut message = [7; 32];
    message[..4].copy_from_slice(&number.to_be_bytes());
    let before = dropped(server, 0, DropReason::FunctionDrop);
    client.send(&message).unwrap();
    let mut reply = [0; 64];
    let mut answered = false;
    client.set_nonblocking(true).unwrap();
    eventually("the message ends", || {
        answered = client.recv(&mut reply).is_ok_and(|len| reply[..len] == message);
        answered || dropped(server, 0, DropReason::FunctionDrop) > before
    });
    answered
}

/// More than a chain is shown at a time, and than one item for the host kernel has; datagrams of several lengths.
#[test]
fn a_burst_of_datagrams_is_answered_by_a_function_in_order() {
    let _alone = alone();
    let mut server = one(1);
    server.functions.attach(&server.engine, "a", &Spec::new("answers", "echo"), None).unwrap();
    let any = PortSpec { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    let mut client = SocketNic::open(&[any], SocketOptions::default()).unwrap();
    let (mut tx, mut rx) = (TxBatch::new(1024, 1 << 20), client.rx_batch());
    let mut asked = 0;
    for _ in 0..5 {
        let from = asked;
        while asked < from + 700 {
            let len = 4 + (asked / 90 % 3) as usize;
            tx.push(address(&server, 0), None, len, |bytes| {
                bytes.fill(1);
                bytes[..4].copy_from_slice(&u32::to_be_bytes(asked));
            });
            asked += 1;
        }
        let mut next = from;
        eventually("all are answered", || {
            client.send(0, &mut tx);
            client.recv(0, &mut rx);
            for answer in &rx.items {
                let payload = rx.payload(answer);
                assert_eq!(payload[..4], next.to_be_bytes());
                assert_eq!(payload[4..], [1, 1][..(next / 90 % 3) as usize]);
                next += 1;
            }
            next == asked
        });
    }
    let a = server.metrics().service(0);
    assert_eq!((a.received, a.replied, a.accepted), (asked.into(), asked.into(), 0));
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn commands_go_to_all_workers_and_their_values_are_merged() {
    let _alone = alone();
    for function in ["threshold".to_owned(), wasm()] {
        let mut server = one(2);
        server
            .functions
            .attach(&server.engine, "a", &threshold(&function, 10, 1000), None)
            .unwrap();
        // Clients of several ports, so that both workers receive some.
        for number in 0..20 {
            let client = udp_client(address(&server, 0));
            assert_eq!(passes(&client, &server, number), number >= 10, "{number}");
        }
        let read = server.functions.read(&server.engine, "a", "limits").unwrap();
        let values = ["min", "max", "count", "sum", "dropped"].map(|name| value(&read, name));
        assert_eq!(values, [0, 19, 20, 190, 10]);
        let write = RegisterAction::Write("low".into(), 19);
        let written = server
            .functions
            .registers(&server.engine, Caller::engine(), &limits(), &write)
            .unwrap();
        assert_eq!((value(&written, "low"), value(&written, "high")), (19, 1000));
        let client = udp_client(address(&server, 0));
        assert!(!passes(&client, &server, 18) && passes(&client, &server, 19));
        let reset = server
            .functions
            .registers(&server.engine, Caller::engine(), &limits(), &RegisterAction::Reset)
            .unwrap();
        let values = ["min", "max", "count", "low"].map(|name| value(&reset, name));
        assert_eq!(values, [u32::MAX.into(), 0, 0, 19]);
        let shown = server.functions.list(&server.engine, Caller::engine()).remove(0);
        assert_eq!((shown.counted.messages, shown.counted.dropped), (33, 11), "11 replies passed");
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn a_mistake_is_one_sentence_and_changes_nothing() {
    let _alone = alone();
    let mut server = one(1);
    server.functions.attach(&server.engine, "a", &passthrough("first"), None).unwrap();
    let mut refused = |service: &str, spec: Spec| {
        server.functions.attach(&server.engine, service, &spec, None).unwrap_err().to_string()
    };
    let garbage = Path::new(env!("CARGO_TARGET_TMPDIR")).join("garbage.wasm");
    std::fs::write(&garbage, b"garbage").unwrap();
    let wrong_param = Spec { params: vec![("lo".into(), 1.into())], ..Spec::new("f", "threshold") };
    let large =
        Spec { params: vec![("low".into(), (1 << 32).into())], ..Spec::new("f", "threshold") };
    let text = Spec { params: vec![("low".into(), "1".into())], ..Spec::new("f", "threshold") };
    for (found, expected) in [
        (
            refused("a", text),
            "the function \"threshold\" does not take low = \"1\": it is an integer".into(),
        ),
        (refused("b", passthrough("f")), "there is no service \"b\": this server has a".to_owned()),
        (
            refused("a", passthrough("f f")),
            "\"f f\" cannot be a function's name: use 1 to 64 letters, digits, `_` and `-`, and no `-` at the beginning".into(),
        ),
        (
            refused("a", Spec::new("f", "nothing")),
            "there is no built-in function \"nothing\": use ".into(),
        ),
        (
            refused("a", wrong_param),
            "the function \"threshold\" has no parameter \"lo\": it has offset, low, high".into(),
        ),
        (
            refused("a", large),
            "the function \"threshold\" does not take low = 4294967296: low is at most 4294967295"
                .into(),
        ),
        (
            refused("a", Spec::new("f", "/nowhere/f.wasm")),
            "the file /nowhere/f.wasm cannot be read: No such file or directory (os error 2)"
                .into(),
        ),
    ] {
        assert!(found.starts_with(&expected), "{found}");
    }
    let found = refused("a", Spec::new("f", garbage.to_str().unwrap()));
    assert!(found.contains("cannot be used: it is no WebAssembly module"), "{found}");
    let read = server.functions.read(&server.engine, "a", "second").err().unwrap().to_string();
    assert_eq!(read, "service \"a\" has no function \"second\": it has first");
    let first = Target::Named { service: "a".into(), name: "first".into() };
    let write = RegisterAction::Write("low".into(), 1);
    let written =
        server.functions.registers(&server.engine, Caller::engine(), &first, &write).err().unwrap();
    assert_eq!(written.to_string(), "the function \"first\" has no setting \"low\": it has none");
    assert!(server.functions.detach_named(&server.engine, "a", "second").is_err());
    for number in 1..onpath::spec::FUNCTIONS_MAX {
        server
            .functions
            .attach(&server.engine, "a", &passthrough(&number.to_string()), None)
            .unwrap();
    }
    let full = server
        .functions
        .attach(&server.engine, "a", &passthrough("more"), None)
        .unwrap_err()
        .to_string();
    assert_eq!(full, "service \"a\" has 16 functions, and a chain has no more: detach one first");
    assert!(
        server.functions.attach(&server.engine, "a", &passthrough("first"), None).unwrap(),
        "it is replaced"
    );
    assert_eq!(ask(&udp_client(address(&server, 0)), b"still there"), b"still there");
}

/// A module in a file of its own.
fn module(name: &str, text: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.wasm"));
    std::fs::write(&path, wat::parse_str(text).unwrap()).unwrap();
    path
}

#[test]
fn a_module_that_traps_or_never_returns_harms_nobody() {
    let _alone = alone();
    let body = |body: &str| {
        format!(
            r#"(module (memory (export "memory") 1) (func (export "serval_abi") (result i32) (i32.const 1))
               (func (export "serval_requests") (param i32 i32 i32 i32) (result i32) {body}))"#
        )
    };
    let loops = body("(loop $l (br $l)) (i32.const 0)");
    for (name, text) in [("traps", body("unreachable")), ("loops", loops)] {
        let mut topology =
            topology(vec![service("a", vec![udp()], "echo"), service("b", vec![udp()], "echo")]);
        topology.engine.workers = 1;
        let mut server = start(topology);
        let file = module(name, &text);
        for on_failure in [OnFailure::Closed, OnFailure::Open] {
            let mut spec = Spec::new("wrong", file.to_str().unwrap());
            (spec.on_failure, spec.deadline_us) = (on_failure, 2000);
            server.functions.attach(&server.engine, "a", &spec, None).unwrap();
            let (a, b) = (udp_client(address(&server, 0)), udp_client(address(&server, 1)));
            for round in 0..20u8 {
                let failed = dropped(&server, 0, DropReason::FunctionFailed);
                if on_failure == OnFailure::Open {
                    assert_eq!(ask(&a, &[round; 8]), [round; 8]);
                } else {
                    a.send(&[round; 8]).unwrap();
                    eventually("it is dropped", || {
                        dropped(&server, 0, DropReason::FunctionFailed) == failed + 1
                    });
                }
                assert_eq!(ask(&b, &[round; 8]), [round; 8], "{name}: another service");
            }
            let shown = server.functions.list(&server.engine, Caller::engine()).remove(0);
            assert!(shown.counted.failures > 0 && !shown.last_failure.is_empty());
            // With `open` the reply of the last request may have met a restarted one.
            let read = server.functions.read(&server.engine, "a", "wrong");
            assert!(on_failure == OnFailure::Open || read.is_err(), "it is failing");
        }
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

/// A module that puts 28 bytes before each request and before each reply: its client's address, port and family, and the time.
fn tells_clients() -> PathBuf {
    let each = |export: &str| {
        format!(
            r#"(func (export "{export}") (param $m i32) (param $n i32) (param $s i32) (param i32) (result i32)
                (local $len i32)
                (loop $next
                    (if (local.get $n) (then
                        (local.set $len (i32.load offset=4 (local.get $m)))
                        (drop (call $peer (local.get $m) (local.get $s)))
                        (i64.store offset=20 (local.get $s) (call $now))
                        (memory.copy (i32.add (local.get $s) (i32.const 28)) (i32.load (local.get $m)) (local.get $len))
                        (i32.store offset=8 (local.get $m) (i32.const 3))
                        (i32.store offset=16 (local.get $m) (local.get $s))
                        (i32.store offset=20 (local.get $m) (i32.add (local.get $len) (i32.const 28)))
                        (local.set $s (i32.add (local.get $s) (i32.add (local.get $len) (i32.const 28))))
                        (local.set $m (i32.add (local.get $m) (i32.const 24)))
                        (local.set $n (i32.sub (local.get $n) (i32.const 1)))
                        (br $next))))
                (i32.const 0))"#
        )
    };
    let text = format!(
        r#"(module (import "serval" "peer" (func $peer (param i32 i32) (result i32)))
            (import "serval" "now" (func $now (result i64)))
            (memory (export "memory") 1)
            (func (export "serval_abi") (result i32) (i32.const 131073)) {} {})"#,
        each("serval_requests"),
        each("serval_replies")
    );
    module("tells-clients", &text)
}

/// Functions see the same client in a request and in its reply, whichever worker has the connection and whichever the mqueue.
#[test]
fn functions_see_their_clients_and_the_time() {
    let mut both = service("a", vec![udp(), tcp()], "echo");
    // Connections on each worker have requests on each.
    (both.mqueues, both.dispatch, both.framing) = (4, Dispatch::RoundRobin, Framing::Raw);
    let mut topology = topology(vec![both]);
    topology.engine.workers = 2;
    let mut server = start(topology);
    let mut spec = Spec::new("tells", tells_clients().to_str().unwrap());
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    server.functions.attach(&server.engine, "a", &spec, None).unwrap();
    let mut last_ns = 0;
    let mut check = |reply: &[u8], own: SocketAddr, payload: &[u8]| {
        assert_eq!(reply.len(), 56 + payload.len(), "{own}");
        let mut expected = [0; 20];
        expected[..4].copy_from_slice(&[127, 0, 0, 1]);
        expected[16..18].copy_from_slice(&own.port().to_le_bytes());
        expected[18] = 4;
        let (of_reply, rest) = reply.split_at(28);
        let (of_request, rest) = rest.split_at(28);
        assert_eq!((&of_reply[..20], &of_request[..20]), (&expected[..], &expected[..]), "{own}");
        let ns = |of: &[u8]| u64::from_le_bytes(of[20..].try_into().unwrap());
        assert!(last_ns <= ns(of_request) && ns(of_request) <= ns(of_reply));
        (last_ns, _) = (ns(of_request), assert_eq!(rest, payload));
    };
    for round in 0..8_u8 {
        let client = udp_client(address(&server, 0));
        check(&ask(&client, &[round; 9]), client.local_addr().unwrap(), &[round; 9]);
        let mut stream = tcp_client(address(&server, 1));
        let own = stream.local_addr().unwrap();
        for more in 0..4 {
            check(&exchange(&mut stream, &[more; 7], 56 + 7), own, &[more; 7]);
        }
    }
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_reload_gives_each_chain_the_functions_of_the_file_and_keeps_those_of_the_run_time() {
    let _alone = alone();
    let mut a = service("a", vec![udp(), tcp()], "echo");
    a.functions = vec![threshold("threshold", 0, 100), threshold(&wasm(), 0, 50)];
    a.functions[1].name = "module".into();
    let mut server = start(topology(vec![a.clone()]));
    let client = udp_client(address(&server, 0));
    assert!(passes(&client, &server, 50) && !passes(&client, &server, 51));
    let names = |server: &Server| -> Vec<String> {
        server
            .functions
            .list(&server.engine, Caller::engine())
            .into_iter()
            .map(|function| function.spec.name)
            .collect()
    };
    let count = |server: &Server, name: &str| {
        value(&server.functions.read(&server.engine, "a", name).unwrap(), "count")
    };
    // What the file has stays as it is, and what it does not have keeps its place.
    server.functions.attach(&server.engine, "a", &passthrough("more"), Some(1)).unwrap();
    assert_eq!(names(&server), ["limits", "more", "module"]);
    assert_eq!(change(&mut server, vec![a.clone()]).len(), 1);
    assert_eq!(names(&server), ["limits", "more", "module"]);
    assert_eq!((count(&server, "limits"), count(&server, "module")), (2, 2));
    // Another order, and other parameters of one, which keeps its registers.
    a.functions.reverse();
    a.functions[0].params[2].1 = 60.into();
    let wanted = Topology { services: vec![a.clone()], ..server.topology().clone() };
    let report = server.change(wanted, &never).unwrap();
    assert_eq!(report.settings, ["service.function"]);
    assert_eq!(names(&server), ["module", "limits", "more"]);
    assert_eq!((count(&server, "limits"), count(&server, "module")), (2, 2));
    assert!(passes(&client, &server, 60) && !passes(&client, &server, 61));
    assert_eq!((count(&server, "limits"), count(&server, "module")), (3, 4));
    // A parameter that the file does not have any more has its default again.
    a.functions[1].params.pop();
    change(&mut server, vec![a.clone()]);
    let read = server.functions.read(&server.engine, "a", "limits").unwrap();
    assert_eq!((value(&read, "high"), value(&read, "count")), (u32::MAX.into(), 3));
    // What was tried at run time and is in the file then stays as it is.
    a.functions.push(passthrough("more"));
    let messages = |server: &Server| {
        let found = server
            .functions
            .list(&server.engine, Caller::engine())
            .into_iter()
            .find(|f| f.spec.name == "more")
            .unwrap();
        (found.origin, found.counted.messages)
    };
    let before = messages(&server);
    change(&mut server, vec![a.clone()]);
    assert!(before.1 > 0 && messages(&server) == (Origin::File, before.1), "{before:?}");
    // The service changes too.
    server.functions.attach(&server.engine, "a", &passthrough("last"), None).unwrap();
    a.slots = 32;
    a.functions.truncate(1);
    change(&mut server, vec![a.clone()]);
    assert_eq!(names(&server), ["module", "last"]);
    assert!(passes(&client, &server, 60) && !passes(&client, &server, 61));
    // A function that cannot be used changes nothing.
    a.functions.push(Spec::new("wrong", "nothing"));
    let wanted = Topology { services: vec![a], ..server.topology().clone() };
    let refused = server.change(wanted, &never).unwrap_err().to_string();
    assert!(refused.starts_with("service \"a\": there is no built-in function"), "{refused}");
    assert_eq!(names(&server), ["module", "last"]);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn sketches_of_all_workers_are_one() {
    let _alone = alone();
    let mut server = one(2);
    let mut spec = Spec::new("sketch", "hyperloglog");
    spec.params = vec![("precision".into(), 12.into()), ("length".into(), 4.into())];
    server.functions.attach(&server.engine, "a", &spec, None).unwrap();
    // Of several ports, so that both workers receive some; each number from two of them.
    for number in 0..300u32 {
        let client = udp_client(address(&server, 0));
        let message = [&(number % 150).to_be_bytes()[..], b" and more"].concat();
        assert_eq!(ask(&client, &message), message);
    }
    assert_eq!(ask(&udp_client(address(&server, 0)), b"abc"), b"abc", "everything passes");
    let read = server.functions.read(&server.engine, "a", "sketch").unwrap();
    let values = ["items", "short", "precision", "length"].map(|name| value(&read, name));
    assert_eq!(values, [300, 1, 12, 4]);
    assert!((145..=155).contains(&value(&read, "estimate")), "{read:?}");
    // The state is the sketch of all messages.
    let settings = builtins::sketch::hyperloglog::Settings {
        precision: 12,
        wide: true,
        item_bytes: 0,
        seed: value(&read, "seed") as u32,
    };
    let best = builtins::sketch::Instructions::best();
    let target = || Target::Named { service: "a".into(), name: "sketch".into() };
    let state = |server: &mut Server| {
        server.functions.state(&server.engine, Caller::engine(), &target()).unwrap()
    };
    let mut expected = builtins::sketch::hyperloglog::HyperLogLog::new(settings, best);
    (0..150u32).for_each(|number| expected.add(&number.to_be_bytes()));
    assert_eq!(state(&mut server), expected.state());
    assert_eq!(state(&mut server).len(), 12 + (1 << 12));
    // Settings that a command has written hold for the merge as well.
    let written = server
        .functions
        .registers(
            &server.engine,
            Caller::engine(),
            &target(),
            &RegisterAction::Write("precision".into(), 13),
        )
        .unwrap();
    let values = ["items", "precision", "length"].map(|name| value(&written, name));
    assert_eq!(values, [0, 13, 4]);
    // What follows from the state is shown by a read only.
    let has_estimate = |values: &[(String, u64)]| values.iter().any(|(name, _)| name == "estimate");
    assert!(
        !has_estimate(&written)
            && has_estimate(&server.functions.read(&server.engine, "a", "sketch").unwrap())
    );
    assert_eq!(ask(&udp_client(address(&server, 0)), b"abcde"), b"abcde");
    let read = server.functions.read(&server.engine, "a", "sketch").unwrap();
    assert_eq!((value(&read, "estimate"), value(&read, "items")), (1, 1));
    let reset = server
        .functions
        .registers(&server.engine, Caller::engine(), &target(), &RegisterAction::Reset)
        .unwrap();
    assert_eq!((has_estimate(&reset), value(&reset, "items")), (false, 0));
    assert_eq!(
        value(&server.functions.read(&server.engine, "a", "sketch").unwrap(), "estimate"),
        0
    );
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
