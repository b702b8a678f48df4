//! Commands of memcached through proxies: what would be smuggled, what is refused, and what stock clients send.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Command, Stdio};

use common::faces::Memcached;
use common::*;
use engine::topology::{Service, Topology};
use onpath::Spec;
use server::Server;
use wire::DropReason;
use wire::framing::{Framing, UDP_HEADER_BYTES, UdpHeader};

/// The grace period of a cache that serves soon; and of one that waits for the answer to a datagram for as long as a test does.
const SOON_MS: u64 = 1;
const PATIENT_MS: u64 = 60_000;

/// A proxy, with the cache or without; a TCP port and a UDP port.
fn proxy(upstream: SocketAddr, with_cache: bool, grace_ms: u64) -> Server {
    let mut cache = Spec::new("hot", "memcached-cache");
    cache.deadline_us = onpath::spec::DEADLINE_US_MAX;
    cache.params =
        [("grace_ms", grace_ms), ("sample", 0)].map(|(k, v)| (k.into(), v.into())).to_vec();
    let service = Service {
        framing: Framing::Memcached,
        functions: if with_cache { vec![cache] } else { Vec::new() },
        request_timeout_ms: 60_000,
        ..Service::proxy("proxy", vec![tcp(), udp()], upstream)
    };
    start(Topology { accelerators: Vec::new(), ..topology(vec![service]) })
}

/// Everything that comes back; the commands end with one that ends the connection.
fn say(to: SocketAddr, commands: &str) -> String {
    let mut stream = tcp_client(to);
    let mut writer = stream.try_clone().unwrap();
    let commands = format!("{commands}quit\r\n").into_bytes();
    let writer = std::thread::spawn(move || writer.write_all(&commands));
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("it ends in time");
    writer.join().unwrap().expect("all of it is read");
    said
}

/// Command lines that memcached refuses: what looks like their data are commands.
const SMUGGLERS: &[&str] = &[
    "set foo x 0 26",
    "set foo 0 x 26",
    "add foo 0 0x 26",
    "replace foo -1 0 26",
    "append foo 99999999999999999999 0 26",
    "set foo 0 0 26 1 2",
    "set foo 0 0 -1",
    "cas foo 0 0 26 x",
    "cas foo 0 0 26",
    "set foo x 0 26 noreply",
    "cas foo 0 0 26 x noreply",
    "ms foo S26",
];

#[test]
fn data_of_a_refused_line_are_commands_for_the_proxy_as_for_memcached() {
    for with_cache in [false, true] {
        let (direct, behind) = (Memcached::start(), Memcached::start());
        let server = proxy(behind.address(), with_cache, SOON_MS);
        for line in SMUGGLERS {
            // The cache knows the key before.
            let before = "set victim 0 0 4\r\ngood\r\nget victim\r\nget victim\r\n";
            let stream = format!("{line}\r\nset victim 0 0 4\r\nEVIL\r\n\r\nget victim\r\n");
            let talk =
                |to: SocketAddr| (say(to, before), say(to, &stream), say(to, "get victim\r\n"));
            let expected = talk(direct.address());
            assert!(
                expected.1.contains("STORED\r\nERROR\r\nVALUE victim 0 4\r\nEVIL\r\n"),
                "{expected:?}"
            );
            assert_eq!(talk(address(&server, 0)), expected, "{line}, cache: {with_cache}");
        }
        assert_accounts(&server);
    }
}

/// The same in one datagram: it does not reach memcached, which would take it for two commands, nor does a part of a command, for the
/// rest of which memcached would take the next datagram of any client.
#[test]
fn a_datagram_that_is_not_one_command_does_not_reach_memcached() {
    for with_cache in [false, true] {
        let memcached = Memcached::start();
        let server = proxy(memcached.address(), with_cache, PATIENT_MS);
        let client = udp_client(address(&server, 1));
        let send = |id: u16, body: &str| {
            client.send(&[&UdpHeader::request(id).bytes()[..], body.as_bytes()].concat()).unwrap();
        };
        assert_eq!(ask_udp(&client, 1, "set victim 0 0 4\r\ngood\r\n"), ["STORED\r\n"]);
        let mut refused = 0;
        for line in SMUGGLERS {
            send(2, &format!("{line}\r\nset victim 0 0 4\r\nEVIL\r\n\r\n"));
            refused += 1;
        }
        for part in [
            "set victim 0 0 100\r\nEVIL",
            "set victim 0 0 4",
            "get victim\r\nflush_all\r\n",
            "quit\r\n",
        ] {
            send(3, part);
            refused += 1;
        }
        client.send(&[&[0, 4, 0, 0, 0, 2, 0, 0][..], b"get victim\r\n"].concat()).unwrap();
        client.send(b"get victim\r\n").unwrap();
        refused += 2;
        let other = udp_client(address(&server, 1));
        assert_eq!(ask_udp(&other, 5, "get victim\r\n"), ["VALUE victim 0 4\r\ngood\r\nEND\r\n"]);
        assert_eq!(ask_udp(&client, 6, "get victim\r\n"), ["VALUE victim 0 4\r\ngood\r\nEND\r\n"]);
        // provokes: bad_framing
        eventually("all of them are counted", || {
            dropped(&server, 0, DropReason::BadFraming) == refused
        });
        assert_accounts(&server);
    }
}

/// The content of each datagram of an answer, up to one with the last value or another line that ends it.
fn ask_udp(client: &UdpSocket, id: u16, command: &str) -> Vec<String> {
    let header = UdpHeader::request(id).bytes();
    client.send(&[&header[..], command.as_bytes()].concat()).unwrap();
    let mut all: Vec<String> = Vec::new();
    let mut buffer = vec![0; 65_536];
    while !all.last().is_some_and(|last| {
        last.ends_with("END\r\n") || !last.is_empty() && !last.starts_with("VALUE ")
    }) {
        let len = receive(client, &mut buffer).expect("a datagram in time");
        assert_eq!(buffer[..2], header[..2], "{command}");
        all.push(String::from_utf8(buffer[UDP_HEADER_BYTES..len].to_vec()).unwrap());
    }
    all
}

/// memcached 1.6 numbers the datagrams of each value by themselves: 0 of 1, 0 of 1, ...
#[test]
fn all_values_of_a_datagram_with_several_keys_arrive() {
    let memcached = Memcached::start();
    let direct = udp_client(memcached.address());
    for with_cache in [false, true] {
        let server = proxy(memcached.address(), with_cache, PATIENT_MS);
        let client = udp_client(address(&server, 1));
        for key in ["a", "b", "c"] {
            let set = format!("set {key} 0 0 3\r\n{key}{key}{key}\r\n");
            assert_eq!(ask_udp(&client, 1, &set), ["STORED\r\n"]);
        }
        let mut id = 10;
        for keys in ["a b c", "a none b", "none a", "a none", "none none", "c b a none a b c"] {
            for name in ["get", "gets"] {
                id += 1;
                let command = format!("{name} {keys}\r\n");
                let expected = ask_udp(&direct, id, &command);
                assert_eq!(ask_udp(&client, id, &command), expected, "{command}");
                assert_eq!(ask_udp(&client, id, "version\r\n").len(), 1, "nothing else comes");
            }
        }
        assert_eq!(dropped(&server, 0, DropReason::BackendUnasked), 0);
        assert_accounts(&server);
    }
}

#[test]
fn a_value_over_the_limit_is_swallowed_and_answered() {
    let memcached = Memcached::start();
    for with_cache in [false, true] {
        let server = proxy(memcached.address(), with_cache, SOON_MS);
        // Over the limit of memcached, and of the proxy as well.
        for bytes in [1_100_000, 1_200_000, 5_000_000] {
            let value = "x".repeat(bytes);
            let text = format!(
                "set a 0 0 1\r\nx\r\nset big 0 0 {bytes}\r\n{value}\r\nadd big 0 0 {bytes} noreply\r\n{value}\r\nms big {bytes} q\r\n{value}\r\nget a big\r\n"
            );
            let too_large = "SERVER_ERROR object too large for cache\r\n";
            let expected = format!("STORED\r\n{too_large}{too_large}VALUE a 0 1\r\nx\r\nEND\r\n");
            assert_eq!(say(address(&server, 0), &text), expected, "{bytes}");
            assert_eq!(say(memcached.address(), &text), expected, "{bytes}");
        }
        // provokes: too_long
        assert_eq!(dropped(&server, 0, DropReason::TooLong), 6);
        assert_accounts(&server);
    }
}

/// The keys of `memcaslap` are bytes of any value; memcached only looks at spaces and line ends.
#[test]
fn keys_have_any_bytes_and_are_returned_as_they_were_stored() {
    let (direct, behind) = (Memcached::start(), Memcached::start());
    for with_cache in [false, true] {
        let server = proxy(behind.address(), with_cache, SOON_MS);
        let text = "set a\x01\x7f\tb 0 0 1\r\nx\r\nget a\x01\x7f\tb\r\nget a\x01\x7f\tb\r\nmg a\x01\x7f\tb k v\r\n\
                    set c\rd 0 0 1\r\nx\r\nget c\rd\r\nget c\rd c\rd\r\n\
                    ms Zm9v 1 b k\r\nx\r\nmg Zm9v b k v\r\nmg foo k v\r\nget foo\r\nget foo\r\nmg foo k v\r\n\
                    set bar 0 0 1\r\ny\r\nmg YmFy b k v\r\nmg bar k v O1\r\nmd YmFy b k\r\n\
                    verbosity noreply\r\nverbosity 0 noreply\r\nversion\r\n";
        let expected = say(direct.address(), text);
        assert!(expected.contains("VA 1 kZm9v b\r\n"), "{expected}");
        for _ in 0..3 {
            assert_eq!(say(address(&server, 0), text), expected, "cache: {with_cache}");
        }
        let ask = |to: SocketAddr| {
            let said = say(to, "ms Zm9v 1 b\r\nx\r\nme Zm9v b\r\nme foo\r\nversion\r\n");
            said.split(' ').filter(|word| !word.contains('=')).collect::<String>()
        };
        let expected = ask(direct.address());
        assert!(expected.contains("MEZm9v"), "{expected}");
        assert_eq!(ask(address(&server, 0)), expected);
        // provokes: backend_mismatch
        assert_eq!(dropped(&server, 0, DropReason::BackendMismatch), 0);
        assert_accounts(&server);
    }
}

/// What pymemcache 4.0.0 sends by default: stores without a reply, many in one write.
#[test]
fn what_pymemcache_sends_by_default_has_the_same_effect() {
    let (direct, behind) = (Memcached::start(), Memcached::start());
    // Client(("127.0.0.1", port)): set, set_many, get, get_many, gets, cas, incr, decr, append, touch, delete, delete_many, flush_all.
    let text = "set some_key 0 0 10 noreply\r\nsome_value\r\nget some_key\r\n\
                set a 0 0 1 noreply\r\n1\r\nset b 2 0 1 noreply\r\n2\r\nset c 0 0 0 noreply\r\n\r\nget a b c d\r\n\
                gets a\r\nadd a 0 0 1 noreply\r\n9\r\nreplace a 0 0 2 noreply\r\n10\r\nappend a 0 0 1 noreply\r\n0\r\n\
                prepend a 0 0 1 noreply\r\n1\r\nincr a 5\r\ndecr a 1\r\ntouch a 100 noreply\r\nget a\r\n\
                cas a 0 0 1 1\r\n7\r\ndelete a noreply\r\ndelete b noreply\r\ndelete c noreply\r\nget a b c\r\n\
                flush_all 0 noreply\r\nget some_key\r\nversion\r\n";
    let expected = say(direct.address(), text);
    assert!(
        expected.contains("VALUE b 2 1\r\n2\r\n") && expected.contains("\r\n1105\r\n"),
        "{expected}"
    );
    for with_cache in [false, true] {
        let server = proxy(behind.address(), with_cache, SOON_MS);
        let mut stream = BufReader::new(tcp_client(address(&server, 0)));
        let mut said = String::new();
        // One call after the other, as the client does.
        for part in text.split_inclusive("get ") {
            stream.get_mut().write_all(part.as_bytes()).unwrap();
        }
        stream.get_mut().write_all(b"quit\r\n").unwrap();
        while stream.read_line(&mut said).expect("a line in time") > 0 {}
        // (The numbers for `cas` of the second round differ.)
        let plain = |text: &str| {
            text.replace("VALUE a 0 1 ", "VALUE a 0 1 #")
                .split('#')
                .map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit()))
                .collect::<String>()
        };
        assert_eq!(plain(&said), plain(&expected));
        assert_accounts(&server);
    }
}

/// The load generator of libmemcached, as it is started without options but for its end.
#[test]
fn memcaslap_runs_through_a_proxy_as_it_does_directly() {
    let memcached = Memcached::start();
    let run = |to: SocketAddr| {
        let output = Command::new("memcaslap")
            .args(["-s", &format!("127.0.0.1:{}", to.port()), "-T", "1", "-c", "4", "-x", "4000"])
            .stdin(Stdio::null())
            .output()
            .expect("install libmemcached-tools (make setup-test does)");
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let count = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("{name} in\n{text}")).trim().parse().unwrap()
        };
        (count("cmd_get:"), count("cmd_set:"), count("get_misses:"))
    };
    let (gets, sets, misses) = run(memcached.address());
    assert!(gets > 1000 && sets > 100, "{gets} {sets} {misses}");
    for with_cache in [false, true] {
        let server = proxy(memcached.address(), with_cache, SOON_MS);
        assert_eq!(run(address(&server, 0)), (gets, sets, misses), "cache: {with_cache}");
        let refused =
            [DropReason::BadFraming, DropReason::BackendMismatch, DropReason::FunctionDrop];
        assert_eq!(refused.map(|reason| dropped(&server, 0, reason)), [0; 3]);
        assert_accounts(&server);
    }
}
