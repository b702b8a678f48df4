//! Functions on the path between kernels and backends, seen through the `relay` kernel.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use common::change::{at, change};
use common::faces::{LABELS, MATCH, Memcached, NO_MATCH, UNKNOWN, UNKNOWN_LABEL, ask_faces};
use common::*;
use engine::topology::{Backend, Service, Topology};
use mqueue::abi::status;
use onpath::{Direction, Spec};
use server::{Caller, Origin, RegisterAction, Server, Target};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

fn cache(params: &[(&str, u64)]) -> Spec {
    let mut spec = Spec::new("hot", "memcached-cache");
    // The machine is busy.
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    let params = [("grace_ms", 20), ("sample", 0)].iter().chain(params);
    spec.params = params.map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    spec
}

/// Drops requests and answers whose first four bytes, as a number, are less than those of `low`.
fn from(low: &[u8; 4]) -> Spec {
    let mut spec = Spec::new("limits", "threshold");
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    let low = u64::from(u32::from_be_bytes(*low));
    spec.params = vec![("offset".into(), 0.into()), ("low".into(), low.into())];
    spec
}

fn relay(transport: Transport, to: SocketAddr, functions: Vec<Spec>) -> Topology {
    let library = build_kernel("crates/server/tests/kernels/relay.cpp");
    let mut backend = Backend::new("db", transport, to, Framing::Memcached);
    backend.timeout_ms = 20_000;
    backend.functions = functions;
    topology(vec![Service {
        max_message_bytes: 2048,
        max_reply_bytes: 2049,
        request_timeout_ms: 60_000,
        backends: vec![backend],
        ..Service::new("relay", vec![udp()], &format!("{library}:relay"))
    }])
}

/// Status and answer of one request through the relay.
fn through(client: &UdpSocket, request: &str) -> (u8, String) {
    let mut reply = ask(client, request.as_bytes());
    (reply.remove(0), String::from_utf8(reply).unwrap())
}

fn answered(client: &UdpSocket, request: &str) -> String {
    let (status, answer) = through(client, request);
    assert_eq!(status, status::OK, "{request}");
    answer
}

fn counted(server: &Server, register: &str) -> u64 {
    let read = server.functions.read(&server.engine, "relay/db", "hot").unwrap();
    read.iter().find(|(name, _)| name == register).expect("it has this register").1
}

/// Asks for a key until the cache answers.
fn ask_until_hit(server: &Server, client: &UdpSocket, request: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let before = counted(server, "hits");
        let answer = answered(client, request);
        if counted(server, "hits") > before {
            return answer;
        }
        assert!(Instant::now() < deadline, "the cache answers in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How many gets memcached has answered.
fn gets_of(memcached: &Memcached) -> u64 {
    let mut stream = BufReader::new(tcp_client(memcached.address()));
    stream.get_mut().write_all(b"stats\r\n").unwrap();
    let mut line = String::new();
    loop {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
        if let Some(count) = line.strip_prefix("STAT cmd_get ") {
            return count.trim_end().parse().unwrap();
        }
    }
}

fn finish(server: Server) {
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_cache_answers_kernels_without_the_backend_and_sees_what_they_write() {
    let memcached = Memcached::start();
    for transport in [Transport::Tcp, Transport::Udp] {
        let server = start(relay(transport, memcached.address(), vec![cache(&[])]));
        let client = udp_client(address(&server, 0));
        assert_eq!(answered(&client, "set a 5 0 3\r\none\r\n"), "STORED\r\n");
        let one = "VALUE a 5 3\r\none\r\nEND\r\n";
        assert_eq!(ask_until_hit(&server, &client, "get a\r\n"), one);
        let before = gets_of(&memcached);
        for _ in 0..20 {
            assert_eq!(answered(&client, "get a\r\n"), one);
        }
        assert_eq!(gets_of(&memcached), before, "memcached was not asked");
        assert_eq!(answered(&client, "set a 6 0 5\r\nother\r\n"), "STORED\r\n");
        let other = "VALUE a 6 5\r\nother\r\nEND\r\n";
        assert_eq!(answered(&client, "get a\r\n"), other, "not what was overwritten");
        assert_eq!(ask_until_hit(&server, &client, "get a\r\n"), other);
        assert_eq!(answered(&client, "delete a\r\n"), "DELETED\r\n");
        assert_eq!(answered(&client, "get a\r\n"), "END\r\n");
        finish(server);
    }
}

#[test]
fn meta_gets_are_answered_from_the_cache_as_memcached_answers() {
    let memcached = Memcached::start();
    let server = start(relay(Transport::Tcp, memcached.address(), vec![cache(&[])]));
    let client = udp_client(address(&server, 0));
    assert_eq!(answered(&client, "mg a k v\r\n"), "EN ka\r\n");
    assert_eq!(answered(&client, "mg a v\r\n"), "EN\r\n");
    answered(&client, "set a 5 0 3\r\none\r\n");
    // An answer without the key does not say how it is stored.
    assert_eq!(ask_until_hit(&server, &client, "mg a v\r\n"), "VA 3\r\none\r\n");
    assert_eq!(ask_until_hit(&server, &client, "get a\r\n"), "VALUE a 5 3\r\none\r\nEND\r\n");
    for line in ["mg a k v\r\n", "mg a v k\r\n"] {
        assert_eq!(ask_until_hit(&server, &client, line), "VA 3 ka\r\none\r\n");
    }
    assert_eq!(answered(&client, "ms YQ== 3 b\r\ntwo\r\n"), "HD\r\n");
    for _ in 0..3 {
        assert_eq!(answered(&client, "mg a v\r\n"), "VA 3\r\ntwo\r\n");
    }
    finish(server);
}

#[test]
fn faces_are_verified_with_the_cache_and_the_database_is_asked_once_for_each() {
    let memcached = Memcached::start();
    memcached.fill();
    let mut backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    backend.timeout_ms = 20_000;
    backend.functions = vec![cache(&[("age_ms", 0)])];
    let server = start(topology(vec![Service {
        max_message_bytes: 1036,
        request_timeout_ms: 60_000,
        backends: vec![backend],
        ..Service::new("relay", vec![udp()], "faces")
    }]));
    let client = udp_client(address(&server, 0));
    eventually("the cache answers", || {
        assert_eq!(ask_faces(&client, 0, 0), MATCH);
        counted(&server, "hits") > 0
    });
    let (hits, gets) = (counted(&server, "hits"), gets_of(&memcached));
    for round in 0..4 {
        for n in 0..LABELS {
            assert_eq!(ask_faces(&client, n, n), MATCH, "{round} {n}");
            assert_eq!(ask_faces(&client, n, (n + 1) % LABELS), NO_MATCH, "{round} {n}");
        }
        assert_eq!(ask_faces(&client, UNKNOWN_LABEL, 0), UNKNOWN);
    }
    let (hits, gets) = (counted(&server, "hits") - hits, gets_of(&memcached) - gets);
    // Each label but the first is missed once, and the unknown one each time.
    let misses = LABELS as u64 - 1 + 4;
    assert_eq!((hits, gets), (4 * (2 * LABELS as u64 + 1) - misses, misses));
    finish(server);
}

#[test]
fn values_change_under_many_blocks_and_no_block_gets_an_old_one() {
    let memcached = Memcached::start();
    let mut wanted = relay(Transport::Tcp, memcached.address(), vec![cache(&[])]);
    wanted.engine.workers = 2;
    let server = start(wanted);
    let to = address(&server, 0);
    std::thread::scope(|scope| {
        for key in 0..4 {
            scope.spawn(move || {
                let client = udp_client(to);
                for value in 0..200 {
                    let text = format!("{value:04}");
                    let set = format!("set k{key} 0 0 4\r\n{text}\r\n");
                    assert_eq!(answered(&client, &set), "STORED\r\n");
                    for _ in 0..4 {
                        let expected = format!("VALUE k{key} 0 4\r\n{text}\r\nEND\r\n");
                        assert_eq!(answered(&client, &format!("get k{key}\r\n")), expected);
                    }
                }
            });
        }
    });
    assert!(counted(&server, "hits") > 0 && counted(&server, "writes") == 800);
    finish(server);
}

#[test]
fn functions_see_the_requests_of_several_blocks_at_a_time() {
    let memcached = Memcached::start();
    let mut wanted = relay(Transport::Tcp, memcached.address(), vec![cache(&[])]);
    wanted.engine.workers = 1;
    wanted.services[0].mqueues = 16;
    let mut server = start(wanted);
    let clients: Vec<UdpSocket> = (0..16).map(|_| udp_client(address(&server, 0))).collect();
    for (number, client) in clients.iter().enumerate() {
        let set = format!("set k{number} 0 0 1\r\nv\r\n");
        assert_eq!(answered(client, &set), "STORED\r\n");
    }
    let mut largest = [0; 2];
    eventually("requests and answers come in batches", || {
        server.functions.begin_trace(&server.engine, Caller::engine(), "relay/db", 64).unwrap();
        // Misses, so that there are answers: each key is written before.
        for (number, client) in clients.iter().enumerate() {
            client.send(format!("mg k{number} v t\r\n").as_bytes()).unwrap();
        }
        for client in &clients {
            let mut answer = [0; 64];
            let len = client.recv(&mut answer).unwrap();
            assert_eq!(answer[..len], *b"\0VA 1 t-1\r\nv\r\n", "{:?}", &answer[..len]);
        }
        let traced = server
            .functions
            .end_trace(&server.engine, Caller::engine(), "relay/db", true)
            .unwrap()
            .unwrap();
        for message in traced {
            let largest = &mut largest[usize::from(message.traced.direction == Direction::Replies)];
            *largest = (*largest).max(message.traced.steps[0].batch);
        }
        largest.iter().all(|batch| *batch > 1)
    });
    finish(server);
}

#[test]
// provokes: backend_function
fn what_a_function_drops_is_answered_with_a_status() {
    let memcached = Memcached::start();
    let server = start(relay(Transport::Tcp, memcached.address(), vec![from(b"get ")]));
    let client = udp_client(address(&server, 0));
    assert_eq!(through(&client, "delete a\r\n"), (status::REFUSED, String::new()));
    // "END\r" is less.
    assert_eq!(through(&client, "get a\r\n"), (status::OK, "END\r\n".to_owned()));
    assert_eq!(dropped(&server, 0, DropReason::BackendFunction), 1);
    finish(server);
}

#[test]
fn a_killed_backend_is_reported_and_what_it_may_have_done_is_not_served() {
    let mut memcached = Memcached::start();
    let port = memcached.port;
    let server = start(relay(Transport::Tcp, memcached.address(), vec![cache(&[])]));
    let client = udp_client(address(&server, 0));
    answered(&client, "set a 0 0 3\r\none\r\n");
    ask_until_hit(&server, &client, "get a\r\n");
    // It takes the request, and never does it.
    memcached.process.suspend();
    let to = address(&server, 0);
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || through(&udp_client(to), "set a 0 0 3\r\ntwo\r\n").0);
        eventually("the write is seen", || counted(&server, "writes") == 2);
        memcached.process.0.kill().unwrap();
        memcached.process.0.wait().unwrap();
        let lost = asked.join().unwrap();
        assert!([status::CLOSED, status::REFUSED].contains(&lost), "{lost}");
    });
    let (status, _) = through(&client, "get a\r\n");
    assert_ne!(status, status::OK, "the cache does not serve what may be overwritten");
    let again = Memcached::start_on(port).expect("its port is free again");
    let deadline = Instant::now() + PATIENCE;
    let answer = loop {
        let (status, answer) = through(&client, "get a\r\n");
        if status == status::OK {
            break answer;
        }
        assert!(Instant::now() < deadline, "the backend comes back");
    };
    assert_eq!(answer, "END\r\n");
    answered(&client, "set a 0 0 5\r\nthree\r\n");
    assert!(ask_until_hit(&server, &client, "get a\r\n").contains("three"));
    drop(again);
    finish(server);
}

#[test]
fn functions_of_a_backend_change_while_the_service_runs() {
    let memcached = Memcached::start();
    let port = free_port();
    let wanted = |functions: Vec<Spec>| {
        let mut topology = relay(Transport::Tcp, memcached.address(), functions);
        topology.services[0].listen = vec![at(Transport::Udp, port)];
        topology
    };
    let mut server = start(wanted(Vec::new()));
    let client = udp_client(address(&server, 0));
    answered(&client, "set a 0 0 3\r\none\r\n");
    // At run time, under the name of the backend.
    assert!(server.functions.attach(&server.engine, "relay/none", &cache(&[]), None).is_err());
    assert!(!server.functions.attach(&server.engine, "relay/db", &cache(&[]), None).unwrap());
    ask_until_hit(&server, &client, "get a\r\n");
    assert!(
        server.functions.read(&server.engine, "relay", "hot").is_err(),
        "it is not on the path of clients"
    );
    let all = server.functions.list(&server.engine, Caller::engine());
    let shown: Vec<_> = all.iter().map(|f| (f.service.as_deref(), &*f.spec.name)).collect();
    assert_eq!(shown, [(Some("relay/db"), "hot")]);
    let target = Target::Named { service: "relay/db".into(), name: "hot".into() };
    let write = RegisterAction::Write("age_ms".into(), 100);
    server.functions.registers(&server.engine, Caller::engine(), &target, &write).unwrap();
    // One on the path of clients has a chain of its own.
    server
        .functions
        .attach(&server.engine, "relay", &Spec::new("hot", "passthrough"), None)
        .unwrap();
    assert_eq!(server.functions.list(&server.engine, Caller::engine()).len(), 2);
    // A reload with other functions does not touch the service.
    change(&mut server, wanted(vec![from(b"get ")]).services);
    let names: Vec<_> = server
        .functions
        .list(&server.engine, Caller::engine())
        .iter()
        .map(|f| f.spec.name.clone())
        .collect();
    assert_eq!(names, ["hot", "hot", "limits"], "what was attached stays, where it was: first");
    assert_eq!(through(&client, "delete a\r\n").0, status::REFUSED);
    ask_until_hit(&server, &client, "get a\r\n");
    assert_eq!(
        server.functions.detach(&server.engine, Caller::engine(), &target).unwrap(),
        Origin::Attached(Caller::engine().user)
    );
    server.functions.detach_named(&server.engine, "relay/db", "limits").unwrap();
    assert_eq!(answered(&client, "delete a\r\n"), "DELETED\r\n");
    finish(server);
}
