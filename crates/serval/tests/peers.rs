//! Stock programs as peers: sockperf as the client, memcached as the backend.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::Instant;

use common::*;
use engine::topology::{Backend, Dispatch, Service};
use serval::server::Server;
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
    let server = sockperf_service();
    let text = sockperf(mode, address(&server, listener), options);
    let found = report(&text);
    let faults = (found.dropped, found.duplicated, found.out_of_order);
    assert_eq!(faults, (0, 0, 0), "{text}");
    assert!(found.received > 0 && found.sent <= found.received + 1, "{found:?}\n{text}");
    assert!(found.latency_us > 0.0, "{text}");
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert!(counted.replied >= found.received, "{counted:?}\n{text}");
    assert!(server.shutdown().is_clean());
}

#[test]
fn sockperf_udp_ping_pong() {
    all_answered("ping-pong", 0, &[]);
    all_answered("ping-pong", 0, &["-m", "1400"]);
}

#[test]
fn sockperf_udp_under_load() {
    // No faster, because on a busy machine the client's own socket buffer would overflow.
    all_answered("under-load", 0, &["--reply-every", "1", "--mps", "1000"]);
}

#[test]
fn sockperf_tcp_ping_pong() {
    all_answered("ping-pong", 1, &["--tcp"]);
}

#[test]
fn sockperf_tcp_under_load_with_messages_of_many_sizes() {
    let options = ["--tcp", "--reply-every", "1", "--mps", "5000", "-m", "700", "-r", "600"];
    all_answered("under-load", 1, &options);
}

#[test]
fn sockperf_throughput_wants_no_answers() {
    for (listener, options) in [(0, &["--mps", "20000"][..]), (1, &["--tcp", "--mps", "20000"])] {
        let server = sockperf_service();
        let text = sockperf("throughput", address(&server, listener), options);
        let sent: u64 = number(&text, "Total of");
        assert_accounts(&server);
        let counted = server.metrics().service(0);
        // provokes: kernel_drop
        assert!(counted.dropped(DropReason::KernelDrop) > 0, "{counted:?}");
        assert!(sent > 0 && counted.replied < sent / 10, "{counted:?}\n{text}");
        assert!(server.shutdown().is_clean());
    }
}

// --- memcached behind the faces kernel ---

const GET_MEMCACHED: &str = "install memcached (make setup-test does)";

/// A memcached of this test's own; ends with it.
struct Memcached {
    port: u16,
    process: Peer,
}

impl Memcached {
    fn start() -> Self {
        // The port was free a moment ago: whoever took it meanwhile costs another try.
        for _ in 0..10 {
            if let Some(memcached) = Self::start_on(free_port()) {
                return memcached;
            }
        }
        panic!("memcached does not start on any port");
    }

    fn start_on(port: u16) -> Option<Self> {
        let mut command = Command::new("memcached");
        command.args(["-l", "127.0.0.1", "-p", &port.to_string(), "-U", "0", "-u", "nobody"]);
        command.args(["-m", "16", "-t", "1"]).stderr(Stdio::null());
        let mut memcached = Self { port, process: Peer::start(&mut command, GET_MEMCACHED) };
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if memcached.process.0.try_wait().unwrap().is_some() {
                return None;
            }
            if TcpStream::connect(memcached.address()).is_ok() {
                return Some(memcached);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        None
    }

    fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Stores the picture of every label.
    fn fill(&self) {
        let mut stream = tcp_client(self.address());
        for n in 0..LABELS {
            let digits: String = label(n).iter().map(|byte| format!("{byte:02x}")).collect();
            let mut command = format!("set face:{digits} 0 0 1024\r\n").into_bytes();
            command.extend(picture(n));
            command.extend(b"\r\n");
            stream.write_all(&command).unwrap();
            let mut line = [0; 8];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"STORED\r\n");
        }
    }
}

const LABELS: usize = 20;
/// A label that was never stored.
const NOBODY: usize = 1000;

fn label(n: usize) -> [u8; 12] {
    let mut label = [0xfa; 12];
    label[..8].copy_from_slice(&(n as u64 * 0x0101_0101_0101).to_le_bytes());
    label
}

/// Noise, other for every label: such pictures have next to no local patterns in common.
fn picture(n: usize) -> Vec<u8> {
    Random::new(n as u64 + 1).bytes(1024)
}

fn request(label_of: usize, picture_of: usize) -> Vec<u8> {
    [&label(label_of)[..], &picture(picture_of)].concat()
}

const NO_MATCH: u32 = 0;
const MATCH: u32 = 1;
const UNKNOWN: u32 = 2;
const UNAVAILABLE: u32 = 3;

fn verdict(reply: &[u8]) -> (u32, f32) {
    assert_eq!(reply.len(), 8);
    let word = |at: usize| <[u8; 4]>::try_from(&reply[at..at + 4]).unwrap();
    (u32::from_le_bytes(word(0)), f32::from_le_bytes(word(4)))
}

fn faces(memcached: &Memcached, timeout_ms: u64) -> Server {
    let backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
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

fn ask_faces(client: &UdpSocket, label_of: usize, picture_of: usize) -> u32 {
    verdict(&ask(client, &request(label_of, picture_of))).0
}

/// Asks until the database is reached again; any other verdict on the way is a wrong one.
fn ask_until_available(client: &UdpSocket, label_of: usize, picture_of: usize) -> u32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let verdict = ask_faces(client, label_of, picture_of);
        if verdict != UNAVAILABLE {
            return verdict;
        }
        assert!(Instant::now() < deadline, "the database stays unavailable");
    }
}

fn bystander_is_well(server: &Server) {
    assert_eq!(ask(&udp_client(address(server, 2)), b"still here?"), b"still here?");
}

#[test]
fn faces_finds_what_memcached_knows() {
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
        let reply = exchange(&mut stream, &request(NOBODY + n, n), 8);
        assert_eq!(verdict(&reply), (UNKNOWN, 0.0));
    }
    // Pipelined: the answers of memcached and the replies to the client both keep their order.
    let mut requests = Vec::new();
    let expected = |n: usize| if n % 3 == 0 { UNKNOWN } else { MATCH };
    for n in 0..200 {
        let unknown = if n % 3 == 0 { NOBODY } else { 0 };
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

#[test]
fn faces_says_when_memcached_is_gone_and_finds_it_again() {
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
fn late_answers_of_a_stopped_memcached_are_nobody_elses() {
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
            let len = client.recv(&mut reply).expect("a verdict although the database is silent");
            assert_eq!(verdict(&reply[..len]).0, UNAVAILABLE);
        }
        let timeouts = server.metrics().service(0).backend_timeouts;
        assert!(timeouts >= 8 * (round + 1), "{timeouts}");
        memcached.process.signal("CONT");
        for n in 0..100 {
            let (asked, expected) = match n % 4 {
                0 => ((n % LABELS, (n + 3) % LABELS), NO_MATCH),
                1 => ((NOBODY + n, n % LABELS), UNKNOWN),
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
