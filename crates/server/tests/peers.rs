//! Stock programs as peers: sockperf as the client, memcached as the backend.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Command, Stdio};

use common::faces::*;
use common::*;
use engine::topology::{Backend, Dispatch, Service};
use server::Server;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

// --- sockperf ---

const GET_SOCKPERF: &str = "install sockperf (make setup-test does)";

/// What `sockperf` reports at the end of a run.
#[derive(Debug)]
struct Report {
    sent: u64,
    received: u64,
    dropped: u64,
    duplicated: u64,
    out_of_order: u64,
    latency_us: f64,
}

/// The number after the first `name` in the last line that has one.
fn number<T: std::str::FromStr>(text: &str, name: &str) -> T {
    let line = text.lines().rev().find(|line| line.contains(name));
    let line = line.unwrap_or_else(|| panic!("no {name:?} in the report:\n{text}"));
    let after = line[line.find(name).unwrap() + name.len()..].trim_start();
    let end = after.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(after.len());
    let digits = after[..end].trim_end_matches('.');
    digits.parse().unwrap_or_else(|_| panic!("{name:?} without a number:\n{text}"))
}

fn sockperf(mode: &str, server: SocketAddr, options: &[&str]) -> String {
    let port = server.port().to_string();
    let output = Command::new("sockperf")
        .arg(mode)
        .args(["-i", "127.0.0.1", "-p", &port, "-t", "1"])
        .args(options)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|_| panic!("{GET_SOCKPERF}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "sockperf {mode}: {}\n{text}{errors}", output.status);
    text
}

fn report(text: &str) -> Report {
    Report {
        sent: number(text, "SentMessages="),
        received: number(text, "ReceivedMessages="),
        dropped: number(text, "# dropped messages ="),
        duplicated: number(text, "# duplicated messages ="),
        out_of_order: number(text, "# out-of-order messages ="),
        latency_us: number(text, "Summary: Latency is"),
    }
}

/// Datagrams of one client keep their order on one mqueue only, and sockperf counts what does not:
/// hence the flow hash. (Replies on one TCP connection are in order whatever the dispatch.)
fn sockperf_service() -> Server {
    let service = Service {
        dispatch: Dispatch::FlowHash,
        framing: Framing::Sockperf,
        slots: 1024,
        max_message_bytes: 2048,
        max_reply_bytes: 2048,
        ..Service::new("sockperf", vec![udp(), tcp()], "sockperf")
    };
    start(topology(vec![service]))
}

/// Runs one mode that wants every message answered, and believes the report of the client.
fn all_answered(mode: &str, listener: usize, options: &[&str]) {
    let (missing, said) = missing(mode, listener, options);
    assert_eq!(missing, 0, "{said}");
}

/// The same for a client that sends whether it is answered or not. It waits for no reply for long: where it or the
/// server had no core at the end, some are missing, which does not happen again and again.
fn all_answered_under_load(listener: usize, options: &[&str]) {
    let mut runs = (0..5).map(|_| missing("under-load", listener, options));
    let mut last = String::new();
    let found = runs.any(|(missing, said)| {
        last = said;
        missing == 0
    });
    assert!(found, "{last}");
}

/// Runs one mode; how many answers are missing, and what the client said. Those that came are right.
fn missing(mode: &str, listener: usize, options: &[&str]) -> (u64, String) {
    let server = sockperf_service();
    let text = sockperf(mode, address(&server, listener), options);
    let found = report(&text);
    assert_eq!((found.duplicated, found.out_of_order), (0, 0), "{text}");
    assert!(found.received > 0, "{found:?}\n{text}");
    assert!(found.latency_us > 0.0, "{text}");
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert!(counted.replied >= found.received, "{counted:?}\n{text}");
    let ended = server.shutdown();
    assert!(ended.is_clean(), "{ended:?}\n{counted:?}\n{text}");
    // The last one may be in flight when it stops.
    let missing = found.dropped.max(found.sent.saturating_sub(found.received + 1));
    (missing, format!("{found:?}\n{text}"))
}

#[test]
fn sockperf_udp_ping_pong() {
    all_answered("ping-pong", 0, &[]);
    all_answered("ping-pong", 0, &["-m", "1400"]);
}

#[test]
fn sockperf_udp_under_load() {
    // No faster, because on a busy machine the client's own socket buffer would overflow.
    all_answered_under_load(0, &["--reply-every", "1", "--mps", "1000"]);
}

#[test]
fn sockperf_tcp_ping_pong() {
    all_answered("ping-pong", 1, &["--tcp"]);
}

#[test]
fn sockperf_tcp_under_load_with_messages_of_many_sizes() {
    let options = ["--tcp", "--reply-every", "1", "--mps", "5000", "-m", "700", "-r", "600"];
    all_answered_under_load(1, &options);
}

#[test]
fn sockperf_throughput_wants_no_answers() {
    for (listener, options) in [(0, &["--mps", "20000"][..]), (1, &["--tcp", "--mps", "20000"])] {
        let server = sockperf_service();
        let text = sockperf("throughput", address(&server, listener), options);
        let sent: u64 = number(&text, "Total of");
        assert_accounts(&server);
        let counted = server.metrics().service(0);
        assert!(counted.consumed > 0 && counted.dropped_requests() == 0, "{counted:?}");
        assert!(sent > 0 && counted.replied < sent / 10, "{counted:?}\n{text}");
        assert!(server.shutdown().is_clean());
    }
}

/// Bit 4 of the flags is a warm-up, to which sockperf's server says nothing although bit 2 asks for an answer.
#[test]
fn a_message_that_gets_no_reply_counts_as_consumed_and_keeps_no_place() {
    let message =
        |sequence: u8, flags: u8| [&[0; 7][..], &[sequence, 0, flags, 0, 0, 0, 14]].concat();
    let mut settings = topology(vec![Service {
        framing: Framing::Sockperf,
        ..Service::new("sockperf", vec![udp(), tcp()], "sockperf")
    }]);
    settings.engine.workers = 2;
    let server = start(settings);
    let mut stream = tcp_client(address(&server, 1));
    let client = udp_client(address(&server, 0));
    for round in 0..20 {
        let requests =
            [message(round, 3), message(90, 7), message(91, 1), message(round, 3)].concat();
        let replies = [message(round, 2), message(round, 2)].concat();
        assert_eq!(exchange(&mut stream, &requests, replies.len()), replies);
        client.send(&message(92, 7)).unwrap();
        assert_eq!(ask(&client, &message(round, 3)), message(round, 2));
    }
    eventually("all are counted", || {
        let counted = server.metrics().service(0);
        (counted.consumed, counted.replied) == (3 * 20, 3 * 20)
    });
    assert_eq!(server.metrics().service(0).dropped_requests(), 0);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

// --- memcached behind the faces kernel ---

fn faces(memcached: &Memcached, timeout_ms: u64) -> Server {
    faces_over(Transport::Tcp, memcached, timeout_ms)
}

fn faces_over(transport: Transport, memcached: &Memcached, timeout_ms: u64) -> Server {
    let backend = Backend::new("db", transport, memcached.address(), Framing::Memcached);
    let service = Service {
        framing: Framing::Fixed(1036),
        max_message_bytes: 2048,
        request_timeout_ms: 15_000,
        backends: vec![Backend { timeout_ms, ..backend }],
        ..Service::new("faces", vec![udp(), tcp()], "faces")
    };
    let bystander = Service::new("echo", vec![udp()], "echo");
    start(topology(vec![service, bystander]))
}

fn bystander_is_well(server: &Server) {
    assert_eq!(ask(&udp_client(address(server, 2)), b"still here?"), b"still here?");
}

#[test]
fn faces_finds_stored_pictures() {
    let memcached = Memcached::start();
    memcached.fill();
    let server = faces(&memcached, 5000);
    let client = udp_client(address(&server, 0));
    let mut stream = tcp_client(address(&server, 1));
    for n in 0..LABELS {
        let (found, distance) = verdict(&ask(&client, &request(n, n)));
        assert_eq!((found, distance), (MATCH, 0.0));
        let other = (n + 1) % LABELS;
        let (found, distance) = verdict(&ask(&client, &request(n, other)));
        assert_eq!(found, NO_MATCH);
        assert!(distance > 0.0);
        assert_eq!(verdict(&exchange(&mut stream, &request(n, n), 8)), (MATCH, 0.0));
        let reply = exchange(&mut stream, &request(UNKNOWN_LABEL + n, n), 8);
        assert_eq!(verdict(&reply), (UNKNOWN, 0.0));
    }
    // Pipelined: the answers of memcached and the replies to the client both keep their order.
    let mut requests = Vec::new();
    let expected = |n: usize| if n % 3 == 0 { UNKNOWN } else { MATCH };
    for n in 0..200 {
        let unknown = if n % 3 == 0 { UNKNOWN_LABEL } else { 0 };
        requests.extend(request(n % LABELS + unknown, n % LABELS));
    }
    let mut writer = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || writer.write_all(&requests).unwrap());
    for n in 0..200 {
        let mut reply = [0; 8];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(verdict(&reply).0, expected(n), "request {n}");
    }
    sender.join().unwrap();
    // provokes: bad_length
    client.send(&[0; 1035]).unwrap();
    eventually("counted", || dropped(&server, 0, DropReason::BadLength) == 1);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// The kernel is the same: the engine writes and reads the frame headers of memcached over UDP.
#[test]
fn faces_finds_stored_pictures_over_udp() {
    let memcached = Memcached::start();
    memcached.fill();
    let server = faces_over(Transport::Udp, &memcached, 5000);
    let client = udp_client(address(&server, 0));
    for n in 0..LABELS {
        assert_eq!(verdict(&ask(&client, &request(n, n))), (MATCH, 0.0));
        assert_eq!(verdict(&ask(&client, &request(UNKNOWN_LABEL + n, n))).0, UNKNOWN);
    }
    bystander_is_well(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn faces_reports_a_missing_memcached_and_reconnects() {
    let mut memcached = Memcached::start();
    memcached.fill();
    let server = faces(&memcached, 5000);
    let client = udp_client(address(&server, 0));
    for _ in 0..2 {
        assert_eq!(ask_until_available(&client, 1, 1), MATCH);
        memcached.process.stop();
        for n in 0..20 {
            assert_eq!(ask_faces(&client, n % LABELS, n % LABELS), UNAVAILABLE);
            bystander_is_well(&server);
        }
        memcached = Memcached::start_on(memcached.port).expect("the port is still free");
        // It has forgotten everything, which is another answer than none.
        assert_eq!(ask_until_available(&client, 1, 1), UNKNOWN);
        memcached.fill();
        for n in 0..LABELS {
            assert_eq!(ask_faces(&client, n, n), MATCH);
            assert_eq!(ask_faces(&client, n, (n + 7) % LABELS), NO_MATCH);
        }
    }
    let counted = server.metrics().service(0);
    assert!(counted.backend_failures > 0, "{counted:?}");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn late_answers_of_a_stopped_memcached_are_dropped() {
    let memcached = Memcached::start();
    memcached.fill();
    let server = faces(&memcached, 400);
    let client = udp_client(address(&server, 0));
    for round in 0..3 {
        assert_eq!(ask_until_available(&client, 0, 0), MATCH);
        memcached.process.suspend();
        let clients: Vec<UdpSocket> = (0..8).map(|_| udp_client(address(&server, 0))).collect();
        for (n, client) in clients.iter().enumerate() {
            client.send(&request(n, n)).unwrap();
        }
        bystander_is_well(&server);
        let mut reply = [0; 9];
        for client in &clients {
            let len =
                receive(client, &mut reply).expect("a verdict although the database is silent");
            assert_eq!(verdict(&reply[..len]).0, UNAVAILABLE);
        }
        let timeouts = server.metrics().service(0).backend_timeouts;
        assert!(timeouts >= 8 * (round + 1), "{timeouts}");
        memcached.process.signal("CONT");
        for n in 0..100 {
            let (asked, expected) = match n % 4 {
                0 => ((n % LABELS, (n + 3) % LABELS), NO_MATCH),
                1 => ((UNKNOWN_LABEL + n, n % LABELS), UNKNOWN),
                _ => ((n % LABELS, n % LABELS), MATCH),
            };
            assert_eq!(ask_until_available(&client, asked.0, asked.1), expected, "{n}");
        }
    }
    // provokes: backend_late
    assert!(dropped(&server, 0, DropReason::BackendLate) > 0);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
