//! Services that are added, changed and removed while another one is asked all the time.

mod common;

use std::io::{Read as _, Write as _};
use std::process::Command;

use common::change::{Askers, at, change, change_under_load, message, never, service, threads};
use common::running::{Running, table};
use common::{
    address, alone, ask, assert_accounts, dropped, eventually, exchange, free_port, page, tcp,
    tcp_client, topology, topology_on, udp, udp_client,
};
use engine::topology::{CpuPlacement, Service, Topology};
use server::{ChangeError, Server, ServiceAction};
use sys::local::LocalSocket;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

#[test]
fn other_services_lose_nothing_while_one_is_added_changed_and_removed() {
    let _alone = alone();
    let server = common::start(topology(vec![service("a", vec![udp(), tcp()], "echo")]));
    change_under_load(server, 48, &[0]);
}

#[test]
fn other_services_lose_nothing_with_several_workers_and_accelerator_threads() {
    let _alone = alone();
    let placement = CpuPlacement::Threads { threads: 1, cores: Vec::new() };
    let mut two = topology_on(placement, vec![service("a", vec![udp(), tcp()], "echo")]);
    two.engine.workers = 2;
    change_under_load(common::start(two), 16, &[0]);
}

#[test]
fn ports_stay_open_and_connections_move_to_the_new_version() {
    let _alone = alone();
    let mut server = common::start(topology(vec![service("a", vec![udp(), tcp()], "echo")]));
    let askers = Askers::start(address(&server, 0), address(&server, 1));
    let before = server.addresses();
    for round in 0..12 {
        let mut a = server.topology().services[0].clone();
        a.mqueues = 1 + round % 5;
        a.slots = 32 << (round % 3);
        change(&mut server, vec![a]);
        askers.go_on();
    }
    assert_eq!(server.addresses(), before);
    let answered = askers.finish();
    assert_accounts(&server);
    assert_eq!(server.metrics().service(0).replied, answered, "the counters go on");
    assert_eq!(server.metrics().service(0).connections_accepted, 1);
    assert!(server.shutdown().is_clean());
}

#[test]
fn another_framing_closes_connections_after_their_replies() {
    let _alone = alone();
    let mut a = service("a", vec![tcp()], "delay");
    a.params = vec![("microseconds".into(), 100_000.0.into())];
    let mut server = common::start(topology(vec![a.clone()]));
    let mut stream = tcp_client(address(&server, 0));
    stream.write_all(&message(9)).unwrap();
    eventually("the request is received", || server.metrics().service(0).received == 1);
    let changed = Service { framing: Framing::LengthU16, kernel: "echo".into(), ..a };
    let actions = change(&mut server, vec![changed]);
    assert_eq!(
        actions[0].1,
        ServiceAction::Changed { keeps_connections: false, keeps_memory_clients: true }
    );
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, message(9), "the reply, then the end");
    let (request, reply) = common::well_framed(Framing::LengthU16, 1);
    let mut stream = tcp_client(address(&server, 0));
    assert_eq!(exchange(&mut stream, &request, reply.len()), reply);
}

// provokes: drain_timeout
#[test]
fn unanswered_requests_have_a_reason() {
    let _alone = alone();
    let mut a = service("a", vec![udp(), tcp()], "delay");
    a.params = vec![("microseconds".into(), 30_000_000.0.into())];
    a.request_timeout_ms = 60_000;
    let b = service("b", vec![udp()], "echo");
    let mut topology = topology(vec![a, b.clone()]);
    topology.engine.drain_ms = 50;
    let mut server = common::start(topology);
    let metrics = server.metrics().services()[0].clone();
    udp_client(address(&server, 0)).send(&message(1)).unwrap();
    let mut stream = tcp_client(address(&server, 1));
    stream.write_all(&message(2)).unwrap();
    eventually("both are received", || metrics.snapshot().received == 2);
    let wanted = Topology { services: vec![b], ..server.topology().clone() };
    let report = server.change(wanted, &never).unwrap();
    assert_eq!(report.services[1].action, ServiceAction::Removed);
    assert_eq!((report.services[1].unanswered, report.services[1].left_behind), (2, false));
    assert_eq!(metrics.snapshot().dropped(DropReason::DrainTimeout), 2);
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).unwrap();
    assert!(heard.is_empty(), "the connection ends without a reply");
    assert_eq!(server.metrics().services().len(), 1, "a service that left is not shown");
    assert_eq!(ask(&udp_client(address(&server, 0)), &message(3)), message(3));
}

#[test]
fn a_leaving_service_keeps_its_port_when_the_next_one_is_added() {
    let _alone = alone();
    let a = service("a", vec![udp()], "echo");
    let mut slow = service("slow", vec![udp()], "delay");
    slow.params = vec![("microseconds".into(), 3_000_000.0.into())];
    let mut server = common::start(topology(vec![a.clone(), slow]));
    let metrics = server.metrics().services()[1].clone();
    let client = udp_client(address(&server, 1));
    client.send(&message(1)).unwrap();
    eventually("it is received", || metrics.snapshot().received == 1);
    let wanted = Topology { services: vec![a.clone()], ..server.topology().clone() };
    let report = server.change(wanted, &|| true).unwrap();
    assert!(report.services[1].left_behind, "it was not waited for: {report:?}");
    change(&mut server, vec![a, service("c", vec![udp()], "echo")]);
    let mut reply = [0; 64];
    let len = client.recv(&mut reply).expect("the reply leaves from the port that was asked");
    assert_eq!(reply[..len], message(1));
    assert_eq!(ask(&udp_client(address(&server, 1)), &message(2)), message(2));
}

#[test]
fn impossible_changes_change_nothing() {
    let _alone = alone();
    let mut server = common::start(topology(vec![service("a", vec![udp(), tcp()], "echo")]));
    let askers = Askers::start(address(&server, 0), address(&server, 1));
    askers.go_on();
    eventually("both clients are in", || {
        server.metrics().workers().map(|w| w.connections.value()).sum::<u64>() == 1
    });
    let good = server.topology().clone();
    let resources = (sys::process::open_descriptors(), threads());
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let refused = |server: &mut Server, wanted: Topology| {
        let error = server.change(wanted, &never).unwrap_err();
        assert_eq!(server.topology().services, good.services);
        error
    };
    let mut wanted = good.clone();
    wanted.engine.workers = 2;
    let error = refused(&mut server, wanted);
    assert!(matches!(&error, ChangeError::Refused(why) if why[0].what == "engine.workers"));
    // The first of two new services could be had, the second cannot.
    let mut wanted = good.clone();
    wanted.services.push(service("b", vec![udp(), tcp()], "echo"));
    wanted.services.push(service("c", vec![at(Transport::Udp, port)], "echo"));
    let error = refused(&mut server, wanted.clone()).to_string();
    assert!(error.contains("already in use"), "{error}");
    wanted.services[2] = service("c", vec![udp()], "no_such_kernel");
    let error = refused(&mut server, wanted.clone()).to_string();
    assert!(error.contains("no kernel `no_such_kernel`"), "{error}");
    // The first one fails when the worker starts its blocks; the second one never gets there.
    let library = common::build_kernel("crates/accel/tests/kernels/faulty.cpp");
    wanted.services[1].kernel = format!("{library}:early");
    wanted.services[2].kernel = "echo".into();
    let error = refused(&mut server, wanted).to_string();
    assert!(error.contains("before its first receive"), "{error}");
    drop(taken);
    askers.go_on();
    let report = server.change(good.clone(), &never).unwrap();
    assert!(report.is_empty(), "{report:?}");
    eventually("all of it is given back", || {
        (sys::process::open_descriptors(), threads()) == resources
    });
    let answered = askers.finish();
    // A reply is counted when it has left, and its client may be faster.
    assert_accounts(&server);
    assert_eq!(server.metrics().service(0).replied, answered);
    assert_eq!(dropped(&server, 0, DropReason::NoCredit), 0);
}

#[test]
fn a_running_server_reads_its_file_again() {
    let _alone = alone();
    let (first, second) = (free_port(), free_port());
    let a = table("a", first, "echo", "");
    let running = Running::start("file", &a);
    let client = udp_client(([127, 0, 0, 1], first).into());
    assert_eq!(ask(&client, b"before"), b"before");
    running.write("", &format!("{a}{}", table("b", second, "echo", "")));
    let (code, output, log) = running.reload();
    assert_eq!(code, 0, "{output}{log}");
    let outcome: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!((&outcome["result"], &outcome["generation"]), (&"changed".into(), &2.into()));
    assert_eq!(outcome["services"][1]["fate"], "added");
    assert_eq!(ask(&udp_client(([127, 0, 0, 1], second).into()), b"new"), b"new");
    // A file that cannot be used, and one that asks for what cannot be.
    running.write("", "[[service]]\nname = 7\n");
    let (code, output, _) = running.reload();
    assert_eq!(code, 2, "{output}");
    assert!(output.contains("reload-file.toml") && output.contains("\"line\""), "{output}");
    running.write("workers = 2", &a);
    let (code, output, _) = running.reload();
    assert_eq!(code, 2, "{output}");
    assert!(output.contains("engine.workers cannot change while the engine runs"), "{output}");
    assert_eq!(ask(&client, b"still there"), b"still there");
    running.wait_for_line("serval_reloads_total{result=\"refused\"} 2");
    // By signal, with and without a change.
    running.write("", &a);
    running.process.signal("HUP");
    running.wait_for_line("serval_reloads_total{result=\"changed\"} 2");
    assert!(!page(running.metrics).contains("service=\"b\""), "a service that left is not shown");
    running.process.signal("HUP");
    running.wait_for_line("serval_reloads_total{result=\"unchanged\"} 1");
    running.wait_for_line("serval_config_generation 3");
    assert_eq!(ask(&client, b"after"), b"after");
    assert!(running.log().contains("service b: removed"), "{}", running.log());
    assert_eq!(running.end(), 0);
}

#[test]
fn a_lowered_connection_limit_does_not_block_a_new_service() {
    let _alone = alone();
    let (first, second) = (free_port(), free_port());
    let a = table("a", first, "echo", "");
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 400; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_serval")]);
    let running = Running::start_with("few", &a, limited);
    assert!(running.log().contains("limits.connections is lower"), "{}", running.log());
    let both = format!("{a}{}", table("b", second, "echo", ""));
    running.write("", &both);
    let (code, output, log) = running.reload();
    assert_eq!(code, 0, "{output}{log}");
    assert_eq!(ask(&udp_client(([127, 0, 0, 1], second).into()), b"new"), b"new");
    // A configured number is applied or refused.
    running.write("", &format!("[limits]\nconnections = 50\n{both}"));
    let (code, output, _) = running.reload();
    assert_eq!(code, 2, "{output}");
    assert!(output.contains("limits.connections cannot change"), "{output}");
    assert_eq!(running.end(), 0);
}

#[test]
fn a_kernel_that_hangs_is_reported_when_its_service_leaves() {
    let _alone = alone();
    let (first, second) = (free_port(), free_port());
    let library = common::build_kernel("device/tests/misbehave.cpp");
    let accelerators = "[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n\
                        placement = \"threads\"\nthreads = 1\n\
                        [[accelerator]]\nname = \"acc1\"\nkind = \"cpu\"\n";
    let a = format!("{accelerators}{}", table("a", first, "echo", "accelerator = \"acc1\""));
    let hangs = "accelerator = \"acc0\"\nparams = { mode = 9, after = 0 }";
    let hanging = table("hanging", second, &format!("{library}:misbehave"), hangs);
    let running = Running::start("hanging", &format!("{a}{hanging}"));
    udp_client(([127, 0, 0, 1], second).into()).send(b"never").unwrap();
    running.wait_for_line("serval_requests_received_total{service=\"hanging\"} 1");
    running.write("drain_ms = 100", &a);
    let (_, output, log) = running.reload();
    let outcome: serde_json::Value = serde_json::from_str(&output).expect(&log);
    assert_eq!(outcome["services"][1]["fate"], "removed", "{output}");
    assert_eq!(outcome["services"][1]["left_behind"], true, "{output}");
    running.wait_for_line("serval_service_left_behind{service=\"hanging\"} 1");
    assert_eq!(ask(&udp_client(([127, 0, 0, 1], first).into()), b"others"), b"others");
    assert_eq!(running.end(), 0, "what was left behind was told then");
}

#[test]
fn the_control_socket_answers_valid_requests_and_stays_open() {
    let _alone = alone();
    let port = free_port();
    let running = Running::start("socket", &table("a", port, "echo", ""));
    let mode = std::fs::metadata(&running.socket).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
    let answer = |socket: &LocalSocket, request: &[u8]| {
        socket.send(request, &[]).unwrap();
        let mut bytes = vec![0; 1 << 16];
        let mut len = None;
        eventually("an answer", || {
            len = socket.receive(&mut bytes).unwrap();
            len.is_some()
        });
        String::from_utf8(bytes[..len.unwrap()].to_vec()).unwrap()
    };
    let socket = LocalSocket::connect(&running.socket).unwrap();
    for nonsense in [&b"x"[..], b"{}", b"{\"command\": \"fly\"}", &[b'['; 1000], &[0; 9000]] {
        assert!(answer(&socket, nonsense).contains("\"error\""));
    }
    ask(&udp_client(([127, 0, 0, 1], port).into()), b"one");
    let status = answer(&socket, b"{\"command\": \"status\"}");
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["services"][0]["name"], "a");
    assert_eq!(status["generation"], 1);
    // Silent peers do not block others for longer than their time-out; those over the limit get the
    // reason.
    let silent: Vec<_> = (0..20).map(|_| LocalSocket::connect(&running.socket).unwrap()).collect();
    assert!(answer(&socket, b"{\"command\": \"status\"}").contains("\"ready\""));
    drop(silent);
    assert!(answer(&socket, b"{\"command\": \"reload\"}").contains("\"unchanged\""));
    assert_eq!(running.end(), 0);
}

#[test]
fn the_server_ends_while_a_reload_waits_for_a_drain() {
    let _alone = alone();
    let (first, second) = (free_port(), free_port());
    let a = table("a", first, "echo", "");
    let slow = "params = { microseconds = 60000000 }\nrequest_timeout_ms = 100000";
    let both = format!("{a}{}", table("slow", second, "delay", slow));
    let running = Running::start("end", &both);
    udp_client(([127, 0, 0, 1], second).into()).send(b"never").unwrap();
    running.wait_for_line("serval_requests_received_total{service=\"slow\"} 1");
    running.write("drain_ms = 4000", &a);
    for _ in 0..5 {
        running.process.signal("HUP");
    }
    eventually("the service leaves", || !page(running.metrics).contains("service=\"slow\""));
    assert_eq!(ask(&udp_client(([127, 0, 0, 1], first).into()), b"meanwhile"), b"meanwhile");
    assert_eq!(running.end(), 3, "a request was left unanswered");
}
