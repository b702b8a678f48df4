//! The function `memcached-cache` in front of a real memcached.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use common::faces::Memcached;
use common::*;
use engine::topology::{Service, Topology};
use onpath::{Param, Spec};
use server::Server;
use wire::DropReason;
use wire::framing::{Framing, UDP_HEADER_BYTES, UdpHeader};

/// The ports of the proxy.
const AT_TCP: usize = 0;
const AT_UDP: usize = 1;

fn number((name, value): (&str, u64)) -> (String, Param) {
    (name.to_owned(), Param::Integer(value))
}

fn cache(upstream: SocketAddr, workers: usize, params: &[(&str, u64)]) -> Server {
    let mut spec = Spec::new("hot", "memcached-cache");
    // The machine is busy.
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    spec.params = [("grace_ms", 20), ("sample", 0)].map(number).to_vec();
    for (name, value) in params {
        spec.params.retain(|(param, _)| param != name);
        spec.params.push(number((*name, *value)));
    }
    let service = Service {
        framing: Framing::Memcached,
        functions: vec![spec],
        request_timeout_ms: 20_000,
        ..Service::proxy("cache", vec![tcp(), udp()], upstream)
    };
    let mut topology = Topology { accelerators: Vec::new(), ..topology(vec![service]) };
    topology.engine.workers = workers;
    start(topology)
}

fn counted(server: &Server, register: &str) -> u64 {
    let read = server.functions.read(&server.engine, "cache", "hot").unwrap();
    read.iter().find(|(name, _)| name == register).expect("it has this register").1
}

/// A connection that asks and reads one answer.
struct Client(BufReader<TcpStream>);

impl Client {
    fn new(to: SocketAddr) -> Self {
        Self(BufReader::new(tcp_client(to)))
    }

    fn say(&mut self, command: &str) {
        self.0.get_mut().write_all(command.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).expect("a line in time") > 0, "the connection is open");
        line
    }

    /// The lines up to this one.
    fn hear(&mut self, last: &str) -> String {
        let mut heard = String::new();
        while !heard.ends_with(last) {
            heard += &self.line();
        }
        heard
    }

    fn ask(&mut self, command: &str) -> String {
        self.say(command);
        match command.split(' ').next() {
            Some("get" | "gets" | "stats\r\n") => self.hear("END\r\n"),
            _ => self.line(),
        }
    }
}

fn ask_udp(client: &UdpSocket, id: u16, command: &str) -> String {
    let header = UdpHeader::request(id).bytes();
    let answer = ask(client, &[&header, command.as_bytes()].concat());
    assert_eq!(answer[..UDP_HEADER_BYTES], header, "{command}");
    String::from_utf8(answer[UDP_HEADER_BYTES..].to_vec()).unwrap()
}

/// Asks for a key until the cache answers.
fn ask_until_hit(server: &Server, mut ask: impl FnMut() -> String) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let before = counted(server, "hits");
        let answer = ask();
        if counted(server, "hits") > before {
            return answer;
        }
        assert!(Instant::now() < deadline, "the cache answers in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn hits_are_answered_as_memcached_answers_and_writes_are_seen_at_once() {
    let memcached = Memcached::start();
    for workers in [1, 2] {
        let server = cache(memcached.address(), workers, &[]);
        let mut direct = Client::new(memcached.address());
        let mut one = Client::new(address(&server, AT_TCP));
        let mut other = Client::new(address(&server, AT_TCP));
        let udp = udp_client(address(&server, AT_UDP));
        assert_eq!(one.ask("set a 7 0 5\r\nhello\r\n"), "STORED\r\n");
        let get = "get a\r\n";
        let answer = ask_until_hit(&server, || one.ask(get));
        assert_eq!(answer, "VALUE a 7 5\r\nhello\r\nEND\r\n");
        let answer = ask_until_hit(&server, || one.ask("gets a\r\n"));
        assert_eq!(answer, direct.ask("gets a\r\n"));
        let answer = ask_until_hit(&server, || ask_udp(&udp, 77, get));
        assert_eq!(answer, "VALUE a 7 5\r\nhello\r\nEND\r\n");
        for (round, value) in ["x", "y", "", "four"].into_iter().enumerate() {
            let set = format!("set a {round} 0 {}\r\n{value}\r\n", value.len());
            assert_eq!(other.ask(&set), "STORED\r\n");
            let expected = format!("VALUE a {round} {}\r\n{value}\r\nEND\r\n", value.len());
            assert_eq!(one.ask(get), expected);
            assert_eq!(ask_udp(&udp, round as u16, get), expected);
            assert_eq!(ask_until_hit(&server, || one.ask(get)), expected);
        }
        // Each of these changes what is cached.
        let changes = [
            ("append a 0 0 1\r\n!\r\n", "STORED\r\n"),
            ("prepend a 0 0 1\r\n-\r\n", "STORED\r\n"),
            ("replace a 5 0 2\r\n41\r\n", "STORED\r\n"),
            ("incr a 1\r\n", "42\r\n"),
            ("decr a 33\r\n", "9 \r\n"),
            ("ms a 3 F9\r\nabc\r\n", "HD\r\n"),
            ("ms YQ== 3 b\r\nb64\r\n", "HD\r\n"),
            ("ma a N0 J5\r\n", "CLIENT_ERROR cannot increment or decrement non-numeric value\r\n"),
            ("md a\r\n", "HD\r\n"),
            ("add a 1 0 3\r\nnew\r\n", "STORED\r\n"),
            ("delete a\r\n", "DELETED\r\n"),
            ("set a 1 0 3\r\nnew\r\n", "STORED\r\n"),
            ("flush_all\r\n", "OK\r\n"),
        ];
        for (change, expected) in changes {
            one.ask(get);
            let changed = other.ask(change);
            assert!(changed == expected || change.starts_with("decr"), "{change:?}: {changed:?}");
            let expected = direct.ask(get);
            assert_eq!(one.ask(get), expected, "after {change:?}");
            assert_eq!(ask_udp(&udp, 9, get), expected, "after {change:?}");
        }
        let hits = |client: &mut Client| -> u64 {
            let stats = client.ask("stats\r\n");
            let line = stats.lines().find_map(|line| line.strip_prefix("STAT get_hits "));
            line.expect("it counts hits").trim_end().parse().unwrap()
        };
        assert_eq!(hits(&mut one), hits(&mut direct) + counted(&server, "hits"));
        assert_accounts(&server);
        assert!(counted(&server, "fills") > 0 && counted(&server, "refused") == 0);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn commands_in_any_order_are_answered_as_memcached_answers_them() {
    let memcached = Memcached::start();
    let server = cache(memcached.address(), 2, &[]);
    let script = |key: &str| {
        let long = "x".repeat(3000);
        [
            format!("set {key} 5 0 5\r\nhello\r\nget {key}\r\nget {key}\r\nget {key} no {key}\r\n"),
            format!("set {key} 0 0 1 noreply\r\n7\r\nget {key}\r\nincr {key} 35\r\nget {key}\r\n"),
            format!(
                "incr {key} x noreply\r\nincr no 1 noreply\r\nget {key}\r\ntouch {key} 100\r\n"
            ),
            format!("mg {key} v k q\r\nmg no v q\r\nmg {key} t f v\r\nget {key}\r\nget no\r\n"),
            format!(
                "ms {key} 2 q\r\nab\r\nget {key}\r\nmd no q\r\nmg {key} v\r\nmn\r\ngat 0 {key}\r\n"
            ),
            format!("set {key} 0 0 {}\r\n{long}\r\nget {key}\r\nget {key}\r\n", long.len()),
            format!("set {key} 0 -1 1\r\nx\r\nget {key}\r\nset {key} 0 1 1\r\nx\r\nget {key}\r\n"),
            format!("delete {key}\r\ndelete {key}\r\nnonsense\r\nget {key}\r\nversion\r\n"),
            "quit\r\n".to_owned(),
        ]
        .concat()
    };
    let talk = |to: SocketAddr| {
        let mut stream = tcp_client(to);
        let mut writer = stream.try_clone().unwrap();
        let script = script("key");
        let writer = std::thread::spawn(move || writer.write_all(script.as_bytes()).unwrap());
        let mut said = Vec::new();
        stream.read_to_end(&mut said).unwrap();
        writer.join().unwrap();
        String::from_utf8(said).unwrap()
    };
    let direct = talk(memcached.address());
    assert!(direct.contains("VALUE key 5 5\r\nhello\r\n"), "{direct}");
    for _ in 0..20 {
        assert_eq!(talk(address(&server, AT_TCP)), direct);
    }
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn datagrams_are_answered_as_memcached_answers_them() {
    let memcached = Memcached::start();
    let server = cache(memcached.address(), 2, &[]);
    let direct = udp_client(memcached.address());
    let client = udp_client(address(&server, AT_UDP));
    let commands = [
        "set a 1 0 1\r\nx\r\n",
        "get a\r\n",
        "gets a\r\n",
        "get none\r\n",
        "mg a v f\r\n",
        "delete a\r\n",
        "get a\r\n",
        "version\r\n",
        "incr a 1\r\n",
        "set n 0 0 1\r\n1\r\n",
        "incr n 1\r\n",
        "get n\r\n",
    ];
    for round in 0..10 {
        for (id, command) in (round * 100..).zip(commands) {
            if command.starts_with("gets") {
                assert!(ask_udp(&client, id, command).starts_with("VALUE a 1 1 "));
                continue;
            }
            let answers = [&client, &direct].map(|to| ask_udp(to, id, command));
            // Done twice, by the one and the other.
            if !command.starts_with("delete") && !command.starts_with("incr n") {
                assert_eq!(answers[0], answers[1], "{command}");
            }
        }
    }
    assert!(counted(&server, "refused") == 0);
    // memcached takes the next datagram for the rest of an incomplete one.
    for wrong in ["set a 0 0 5\r\nab\r\n", "get a\r\nget a\r\n", "get a", "nonsense\r\n", ""] {
        client.send(&[&UdpHeader::request(7).bytes(), wrong.as_bytes()].concat()).unwrap();
    }
    client
        .send(&[&UdpHeader { id: 7, sequence: 0, total: 2 }.bytes(), &b"get a\r\n"[..]].concat())
        .unwrap();
    client.send(b"short").unwrap();
    assert_eq!(ask_udp(&client, 8, "version\r\n"), ask_udp(&direct, 8, "version\r\n"));
    // provokes: bad_framing
    assert_eq!(dropped(&server, 0, DropReason::BadFraming), 7);
    assert_eq!(counted(&server, "refused"), 0);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
