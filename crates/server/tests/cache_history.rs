//! The function `memcached-cache` in front of a real memcached that is killed now and then: clients over TCP and UDP read what others
//! write, and none reads a value that was overwritten once one knew.

mod common;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::faces::Memcached;
use common::*;
use engine::topology::{Service, Topology};
use onpath::{Param, Spec};
use wire::framing::{Framing, UDP_HEADER_BYTES, UdpHeader};

const KEYS: usize = 3;
/// Writes of each key.
const WRITES: u64 = 200;
/// Reads of a key between two writes, about.
const READS: u64 = 8;
const READERS: usize = 5;
const KILLS: u64 = 2;
/// How long a datagram is waited for. One that is lost costs only this.
const LOST: Duration = Duration::from_millis(300);

/// What is known of a key: the number of the last change that a client knows. Values are the numbers of the changes that made them.
#[derive(Default)]
struct Known {
    /// Changes with the key's present name. A change that is not answered may be done later: then the key gets another name.
    name: AtomicU64,
    state: AtomicU64,
    written: AtomicU64,
    reads: AtomicU64,
}

impl Known {
    fn learn(&self, name: u64, change: u64) {
        if self.name.load(Ordering::SeqCst) == name {
            self.state.fetch_max(change, Ordering::SeqCst);
        }
    }
}

fn key(key: usize, name: u64) -> String {
    format!("key:{key}:{name}")
}

/// A client that may lose its connection, or datagrams.
enum Client {
    Tcp(SocketAddr, Option<BufReader<TcpStream>>),
    Udp(UdpSocket, u16),
}

impl Client {
    fn new([tcp, udp]: [SocketAddr; 2], is_udp: bool) -> Self {
        match is_udp {
            false => Self::Tcp(tcp, None),
            true => {
                let socket = udp_client(udp);
                socket.set_read_timeout(Some(LOST)).unwrap();
                Self::Udp(socket, 0)
            }
        }
    }

    /// The first line of the answer and, for values, the data; `None`: it is not known what became of the request.
    fn ask(&mut self, command: &str) -> Option<String> {
        match self {
            Self::Tcp(to, stream) => {
                let answer = Self::ask_tcp(*to, stream, command);
                if answer.is_err() {
                    *stream = None;
                }
                answer.ok()
            }
            Self::Udp(socket, id) => {
                *id = id.wrapping_add(1);
                let header = UdpHeader::request(*id);
                socket.send(&[&header.bytes(), command.as_bytes()].concat()).ok()?;
                let mut buffer = [0; 2048];
                loop {
                    let len = socket.recv(&mut buffer).ok()?;
                    let answer = std::str::from_utf8(&buffer[UDP_HEADER_BYTES..len]).unwrap();
                    if buffer[..2] == header.bytes()[..2] {
                        return Some(answer.to_owned()).filter(|a| !a.starts_with("SERVER_ERROR"));
                    }
                }
            }
        }
    }

    fn ask_tcp(
        to: SocketAddr,
        stream: &mut Option<BufReader<TcpStream>>,
        command: &str,
    ) -> io::Result<String> {
        let stream = stream.get_or_insert_with(|| BufReader::new(tcp_client(to)));
        stream.get_mut().write_all(command.as_bytes())?;
        let mut answer = String::new();
        stream.read_line(&mut answer)?;
        if let Some(head) = answer.strip_prefix("VALUE ") {
            let len: usize = head.split(' ').nth(2).unwrap().trim_end().parse().unwrap();
            let mut rest = vec![0; len + b"\r\nEND\r\n".len()];
            stream.read_exact(&mut rest)?;
            answer += std::str::from_utf8(&rest).unwrap();
        }
        let known = answer.starts_with("SERVER_ERROR object too large") || !answer.is_empty();
        match known && (!answer.starts_with("SERVER_ERROR") || answer.contains("too large")) {
            true => Ok(answer),
            false => Err(io::Error::other(answer)),
        }
    }
}

/// Changes a key, one change after the other, over several clients.
fn write(server: [SocketAddr; 2], index: usize, known: &Known, kills: &AtomicU64) {
    let mut random = Random::new(index as u64 + 77);
    let mut clients = [false, false, true].map(|udp| Client::new(server, udp));
    let large = "x".repeat(1 << 20);
    for change in 1..=WRITES {
        // Each writer still writes when memcached has been killed for the last time.
        while change > WRITES - 30 && kills.load(Ordering::SeqCst) < KILLS
            || known.reads.load(Ordering::SeqCst) < READS * change
        {
            std::thread::sleep(Duration::from_micros(100));
        }
        let name = known.name.load(Ordering::SeqCst);
        let key = key(index, name);
        let at = random.below(clients.len());
        let is_tcp = matches!(clients[at], Client::Tcp(..));
        let value = change.to_string();
        let len = value.len();
        let command = match random.below(12) {
            0 => format!("delete {key}\r\n"),
            1 => format!("touch {key} -1\r\n"),
            // It fails, and removes the value.
            2 if is_tcp => format!("set {key} 0 0 {}\r\n{large}\r\n", large.len()),
            // Done when the next command is answered.
            3 if is_tcp => format!("set {key} 0 0 {len} noreply\r\n{value}\r\nmn\r\n"),
            4 if is_tcp => format!("ms {key} {len} q\r\n{value}\r\nmn\r\n"),
            5 => format!("ms {key} {len}\r\n{value}\r\n"),
            _ => format!("set {key} 0 0 {len}\r\n{value}\r\n"),
        };
        match clients[at].ask(&command) {
            Some(_) => known.learn(name, change),
            None => {
                known.state.store(0, Ordering::SeqCst);
                known.name.fetch_add(1, Ordering::SeqCst);
            }
        }
        known.written.store(change, Ordering::SeqCst);
    }
}

/// Reads keys until all were written; returns how often a value was read.
fn read(server: [SocketAddr; 2], reader: usize, known: &[Known], done: &AtomicBool) -> u64 {
    let mut random = Random::new(reader as u64 + 7);
    let mut client = Client::new(server, reader.is_multiple_of(2));
    let mut values = 0;
    while !done.load(Ordering::SeqCst) {
        let index = random.below(KEYS);
        let known = &known[index];
        let name = known.name.load(Ordering::SeqCst);
        let before = known.state.load(Ordering::SeqCst);
        if known.name.load(Ordering::SeqCst) != name {
            continue;
        }
        let word = if random.below(4) == 0 { "gets" } else { "get" };
        let answer = client.ask(&format!("{word} {}\r\n", key(index, name)));
        known.reads.fetch_add(1, Ordering::SeqCst);
        let Some(answer) = answer else { continue };
        let mut lines = answer.split("\r\n");
        if lines.next().is_some_and(|line| line.starts_with("VALUE ")) {
            let value: u64 = lines.next().unwrap().parse().expect("a number");
            assert!(value >= before, "{value} was read of key {index}, and {before} was known");
            known.learn(name, value);
            values += 1;
        }
    }
    values
}

#[test]
fn no_client_reads_what_was_overwritten() {
    let memcached = Memcached::start();
    let port = memcached.port;
    let mut spec = Spec::new("hot", "memcached-cache");
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    let params = [("grace_ms", 500), ("sample", 5)];
    spec.params = params.map(|(name, value)| (name.to_owned(), Param::Integer(value))).to_vec();
    let service = Service {
        framing: Framing::Memcached,
        functions: vec![spec],
        max_message_bytes: 2 << 20,
        request_timeout_ms: 2000,
        ..Service::proxy("cache", vec![tcp(), udp()], memcached.address())
    };
    let mut topology = Topology { accelerators: Vec::new(), ..topology(vec![service]) };
    topology.engine.workers = 3;
    let server = start(topology);
    let ports = [0, 1].map(|port| address(&server, port));
    // The cache serves nothing at first.
    let read_register = |register: &str| {
        let read = server.functions.read(&server.engine, "cache", "hot").unwrap();
        read.iter().find(|(name, _)| name == register).unwrap().1
    };
    let mut client = Client::new(ports, false);
    client.ask("set warm 0 0 1\r\nx\r\n").expect("it is stored");
    while read_register("hits") == 0 {
        client.ask("get warm\r\n").expect("it is there");
    }
    let known: [Known; KEYS] = Default::default();
    let (done, kills) = (AtomicBool::new(false), AtomicU64::new(0));
    let memcached = Mutex::new(Some(memcached));
    let values: u64 = std::thread::scope(|scope| {
        let (known, done, kills) = (&known, &done, &kills);
        let readers: Vec<_> = (0..READERS)
            .map(|reader| scope.spawn(move || read(ports, reader, known, done)))
            .collect();
        let memcached = &memcached;
        let killer = scope.spawn(move || {
            for kill in 1..=KILLS {
                while known[0].written.load(Ordering::SeqCst) < kill * WRITES / (KILLS + 1) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let mut memcached = memcached.lock().unwrap();
                *memcached = None;
                std::thread::sleep(Duration::from_millis(20));
                *memcached = Memcached::start_on(port);
                assert!(memcached.is_some(), "the port is still free");
                kills.store(kill, Ordering::SeqCst);
            }
        });
        let writers: Vec<_> = (0..KEYS)
            .map(|index| scope.spawn(move || write(ports, index, &known[index], kills)))
            .collect();
        let ended: Vec<bool> = writers.into_iter().map(|writer| writer.join().is_ok()).collect();
        let killed = killer.join();
        done.store(true, Ordering::SeqCst);
        assert!(ended.into_iter().all(|ended| ended) && killed.is_ok());
        readers.into_iter().map(|reader| reader.join().expect("nothing overwritten is read")).sum()
    });
    let (hits, fills) = (read_register("hits"), read_register("fills"));
    assert!(values > 100 && hits > 100 && fills > 20, "{values} {hits} {fills}");
    assert!(known.iter().all(|known| known.name.load(Ordering::SeqCst) > 0), "it was killed");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
