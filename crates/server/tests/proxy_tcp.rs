//! Proxies over TCP: order, limits, and what upstream servers do wrong.

mod common;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use common::faces::Memcached;
use common::*;
use engine::topology::{Service, Topology};
use server::Server;
use wire::DropReason;
use wire::framing::Framing;

fn proxy(upstream: SocketAddr, framing: Framing) -> Service {
    Service { framing, ..Service::proxy("proxy", vec![tcp()], upstream) }
}

fn serve(service: Service, workers: usize) -> Server {
    let mut topology = Topology { accelerators: Vec::new(), ..topology(vec![service]) };
    topology.engine.workers = workers;
    start(topology)
}

/// A listener of the test's own, and the connections that the proxy opens to it.
fn listener() -> (SocketAddr, Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nodelay(true).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            if sender.send(stream).is_err() {
                return;
            }
        }
    });
    (address, receiver)
}

fn accepted(connections: &Receiver<TcpStream>) -> TcpStream {
    connections.recv_timeout(PATIENCE).expect("the proxy connects in time")
}

fn line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).expect("a line in time");
    line
}

/// The rest of what comes before the connection is closed, in order or not.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it ends in time");
    }
    bytes
}

fn memcached() -> (Memcached, SocketAddr) {
    let memcached = Memcached::start();
    let address = ([127, 0, 0, 1], memcached.port).into();
    (memcached, address)
}

#[test]
fn memcached_answers_through_a_proxy_as_it_does_directly() {
    let (_memcached, upstream) = memcached();
    let server = serve(proxy(upstream, Framing::Memcached), 2);
    let value = String::from_utf8(vec![b'x'; 300_000]).unwrap();
    let script = |key: &str| {
        [
            format!("set {key} 5 0 5\r\nhello\r\n"),
            format!("get {key} nothing {key}\r\n"),
            format!("set {key} 0 0 1 noreply\r\n7\r\nincr {key} 35\r\n"),
            // Errors that memcached reports in spite of `noreply` would shift every later answer.
            format!("incr {key} x noreply\r\nincr nothing 1 noreply\r\nget {key}\r\n"),
            format!("mg {key} v k q\r\nmg nothing v q\r\nmg {key} t f v\r\n"),
            format!("ms {key} 2 q\r\nab\r\nmd nothing q\r\nmg {key} v\r\nmn\r\n"),
            format!("set {key} 0 0 {}\r\n{value}\r\nget {key}\r\n", value.len()),
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
        let said = rest(&mut stream);
        writer.join().unwrap();
        String::from_utf8(said).unwrap()
    };
    let direct = talk(upstream);
    assert!(
        direct.contains("VALUE key 5 5\r\nhello\r\n") && direct.contains("\r\n42\r\n"),
        "{direct}"
    );
    for _ in 0..5 {
        // The framing answers what is no command by itself, as memcached does.
        assert_eq!(talk(address(&server, 0)), direct);
    }
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert!(counted.replied > 0 && counted.dropped_requests() == 0, "{counted:?}");
    assert!(server.shutdown().is_clean());
}

/// libmemcached's own test of servers.
#[test]
fn a_stock_client_finds_a_proxy_capable() {
    let (_memcached, upstream) = memcached();
    let server = serve(proxy(upstream, Framing::Memcached), 1);
    let run = |to: SocketAddr| {
        let run = Command::new("memccapable")
            .args(["-h", "127.0.0.1", "-p", &to.port().to_string(), "-a", "-t", "20"])
            .stdin(Stdio::null())
            .output()
            .expect("install libmemcached-tools (make setup-test does)");
        let text = [run.stdout, run.stderr].concat();
        String::from_utf8_lossy(&text).into_owned()
    };
    let passed = |line: &&str| line.ends_with("[pass]");
    let (direct, proxied) = (run(upstream), run(address(&server, 0)));
    let direct: Vec<&str> = direct.lines().filter(passed).collect();
    assert!(direct.len() > 20, "{direct:?}");
    for line in direct {
        assert!(proxied.contains(line), "{line} is not in\n{proxied}");
    }
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn requests_of_many_connections_are_pipelined_and_answered_in_order() {
    let (upstream, connections) = listener();
    std::thread::spawn(move || {
        for mut stream in connections {
            std::thread::spawn(move || {
                let mut lines = BufReader::new(stream.try_clone().unwrap());
                let mut text = String::new();
                while lines.read_line(&mut text).is_ok_and(|len| len > 0) {
                    // In pieces, so that answers end anywhere.
                    let answer = format!("re {text}");
                    let (first, last) = answer.split_at(answer.len() / 2);
                    if stream.write_all(first.as_bytes()).is_err()
                        || stream.write_all(last.as_bytes()).is_err()
                    {
                        return;
                    }
                    text.clear();
                }
            });
        }
    });
    let server = serve(proxy(upstream, Framing::Line), 3);
    let clients: Vec<_> = (0..20)
        .map(|client| {
            let mut stream = tcp_client(address(&server, 0));
            std::thread::spawn(move || {
                let mut lines = BufReader::new(stream.try_clone().unwrap());
                let script: String = (0..500).map(|n| format!("{client} {n}\n")).collect();
                let writer = std::thread::spawn(move || {
                    stream.write_all(script.as_bytes()).unwrap();
                    // It will say no more, and still hears everything.
                    stream.shutdown(Shutdown::Write).unwrap();
                });
                for n in 0..500 {
                    assert_eq!(line(&mut lines), format!("re {client} {n}\n"));
                }
                assert_eq!(line(&mut lines), "", "then the connection ends");
                writer.join().unwrap();
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert_eq!((counted.received, counted.replied), (10_000, 10_000));
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_server_that_is_not_there_is_tried_again_and_clients_are_told() {
    let port = free_port();
    let upstream: SocketAddr = ([127, 0, 0, 1], port).into();
    let server = serve(proxy(upstream, Framing::Memcached), 1);
    let mut client = tcp_client(address(&server, 0));
    let failed = b"SERVER_ERROR request failed\r\n";
    for _ in 0..20 {
        assert_eq!(exchange(&mut client, b"get a\r\n", failed.len()), failed);
    }
    let refused = dropped(&server, 0, DropReason::UpstreamRefused);
    assert_eq!(refused, 20);
    // The same connection works once the server is there.
    let memcached = (0..10).find_map(|_| Memcached::start_on(port)).expect("memcached starts");
    eventually("the proxy connects", || {
        let mut answer = [0; 5];
        client.write_all(b"get a\r\n").unwrap();
        client.read_exact(&mut answer).unwrap();
        if &answer == b"END\r\n" {
            return true;
        }
        client.read_exact(&mut [0; 24]).unwrap();
        false
    });
    // When it ends, so do the connections that it had.
    drop(memcached);
    assert_eq!(rest(&mut client), b"");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_server_that_ends_a_connection_ends_what_is_in_flight_there() {
    for (framing, told) in [
        (Framing::Memcached, &b"END\r\nSERVER_ERROR request failed\r\n"[..]),
        (Framing::Line, b"END\r\n"),
    ] {
        let (upstream, connections) = listener();
        let server = serve(proxy(upstream, framing), 1);
        let mut client = tcp_client(address(&server, 0));
        client.write_all(b"get a\r\nget b\r\n").unwrap();
        let mut stream = accepted(&connections);
        let mut asked = [0; 14];
        let expected = framing == Framing::Memcached;
        stream.read_exact(&mut asked[..if expected { 14 } else { 12 }]).unwrap();
        stream.write_all(b"END\r\n").unwrap();
        drop(stream);
        assert_eq!(rest(&mut client), told, "{framing:?}");
        assert_eq!(dropped(&server, 0, DropReason::UpstreamRefused), 1);
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn answers_that_no_request_waits_for_end_the_connection() {
    let cases: [(&[u8], DropReason); 3] = [
        (b"END\r\nEND\r\n", DropReason::BackendUnasked),
        (b"VALUE other 0 1\r\nx\r\nEND\r\n", DropReason::BackendMismatch),
        (b"what?\r\n", DropReason::BackendProtocol),
    ];
    for (answer, reason) in cases {
        let (upstream, connections) = listener();
        let server = serve(proxy(upstream, Framing::Memcached), 1);
        let mut client = tcp_client(address(&server, 0));
        client.write_all(b"get a\r\n").unwrap();
        let mut stream = accepted(&connections);
        stream.read_exact(&mut [0; 7]).unwrap();
        stream.write_all(answer).unwrap();
        let told = rest(&mut client);
        assert!(told == b"END\r\n" || told == b"SERVER_ERROR request failed\r\n", "{told:?}");
        assert_eq!(dropped(&server, 0, reason), 1, "{reason:?}");
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn a_request_times_out_and_its_late_answer_reaches_nobody() {
    let (upstream, connections) = listener();
    let service = Service { request_timeout_ms: 100, ..proxy(upstream, Framing::Memcached) };
    let server = serve(service, 1);
    let mut client = tcp_client(address(&server, 0));
    let told = b"SERVER_ERROR timed out\r\n";
    assert_eq!(exchange(&mut client, b"get a\r\n", told.len()), told);
    let mut stream = accepted(&connections);
    stream.write_all(b"END\r\n").unwrap();
    eventually("the late answer comes", || dropped(&server, 0, DropReason::BackendLate) == 1);
    client.write_all(b"version\r\n").unwrap();
    stream.read_exact(&mut [0; 16]).unwrap();
    stream.write_all(b"VERSION 1\r\n").unwrap();
    let mut answer = [0; 11];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"VERSION 1\r\n");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// Writes `chunk` again and again until the peer takes no more for a while; how many bytes it took.
fn fill(stream: &mut TcpStream, chunk: &[u8], most: usize) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (mut written, mut idle) = (0, 0);
    while idle < 100 && written < most {
        match stream.write(&chunk[written % chunk.len()..]) {
            Ok(count) => (written, idle) = (written + count, 0),
            Err(_) => {
                idle += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

#[test]
fn a_server_that_does_not_read_holds_its_clients_back_and_nobody_else() {
    const MOST: usize = 256 << 20;
    let (upstream, connections) = listener();
    let mut topology = topology(vec![Service {
        max_message_bytes: 100_000,
        ..proxy(upstream, Framing::LengthU32)
    }]);
    topology.accelerators.clear();
    topology.limits.pipelined = 10_000;
    let server = start(topology);
    let mut slow = tcp_client(address(&server, 0));
    let mut request = 90_000u32.to_be_bytes().to_vec();
    request.extend(pattern(90_000, 1));
    let written = fill(&mut slow, &request, MOST);
    assert!(written < MOST, "the client is held back");
    let mut stuck = accepted(&connections);
    // Another one is served meanwhile, though its server's answer comes in the same way.
    let mut other = tcp_client(address(&server, 0));
    other.write_all(&[0, 0, 0, 2, b'h', b'i']).unwrap();
    let mut stream = accepted(&connections);
    stream.read_exact(&mut [0; 6]).unwrap();
    stream.write_all(&[0, 0, 0, 2, b'y', b'o']).unwrap();
    let mut answer = [0; 6];
    other.read_exact(&mut answer).unwrap();
    assert_eq!(&answer[4..], b"yo");
    // Everything comes through once the server reads.
    let whole = written / request.len();
    let mut bytes = vec![0; request.len()];
    for _ in 0..whole {
        stuck.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, request);
        stuck.write_all(&[0, 0, 0, 1, 7]).unwrap();
    }
    let mut answers = vec![0; 5 * whole];
    slow.read_exact(&mut answers).unwrap();
    assert!(answers.chunks(5).all(|answer| answer == [0, 0, 0, 1, 7]));
    drop((slow, other, stuck));
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_client_that_does_not_read_holds_its_server_back() {
    const ANSWER: usize = 1 << 20;
    const REQUESTS: usize = 60;
    let (upstream, connections) = listener();
    let mut topology = topology(vec![proxy(upstream, Framing::LengthU32)]);
    topology.accelerators.clear();
    topology.limits.slow_client_ms = 600_000;
    let server = start(topology);
    let mut client = tcp_client(address(&server, 0));
    for _ in 0..REQUESTS {
        client.write_all(&[0, 0, 0, 1, 1]).unwrap();
    }
    let mut stream = accepted(&connections);
    stream.read_exact(&mut [0; 5 * REQUESTS]).unwrap();
    let mut answer = (ANSWER as u32).to_be_bytes().to_vec();
    answer.extend(pattern(ANSWER, 3));
    let written = fill(&mut stream, &answer, answer.len() * REQUESTS);
    assert!(written < answer.len() * REQUESTS, "the server is held back");
    // Once the client reads, the rest follows.
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; answer.len()];
        for _ in 0..REQUESTS {
            client.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, answer);
        }
        (client, answer)
    });
    let again = {
        let mut whole = (ANSWER as u32).to_be_bytes().to_vec();
        whole.extend(pattern(ANSWER, 3));
        whole.repeat(REQUESTS)
    };
    stream.write_all(&again[written..]).unwrap();
    let client = reader.join().unwrap();
    drop(client);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn clients_that_go_away_take_their_connection_to_the_server_along() {
    let (upstream, connections) = listener();
    let server = serve(proxy(upstream, Framing::Line), 1);
    for number in 1..=20 {
        let mut client = tcp_client(address(&server, 0));
        client.write_all(b"hello\n").unwrap();
        let mut stream = accepted(&connections);
        stream.read_exact(&mut [0; 6]).unwrap();
        stream.write_all(b"hello\n").unwrap();
        eventually("the client has an answer", || server.metrics().service(0).replied == number);
        client.write_all(b"again\n").unwrap();
        stream.read_exact(&mut [0; 6]).unwrap();
        // With an answer unread this is a reset.
        drop(client);
        assert_eq!(rest(&mut stream), b"");
    }
    eventually("they are counted", || dropped(&server, 0, DropReason::ClientGone) == 20);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// Also those that were sent before the connection to the server was up.
#[test]
fn what_a_client_sent_before_it_left_reaches_the_server() {
    let (_memcached, upstream) = memcached();
    let server = serve(proxy(upstream, Framing::Memcached), 1);
    let malformed = "CLIENT_ERROR bad command line format\r\n";
    let cases = [("quit\r\n", ""), ("", ""), ("set a 0 0 x\r\n", malformed)];
    for (number, (last, told)) in cases.into_iter().enumerate() {
        let mut client = tcp_client(address(&server, 0));
        let script = format!("set left{number} 0 0 1 noreply\r\nx\r\n{last}");
        client.write_all(script.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(rest(&mut client), told.as_bytes(), "the connection ends");
        let mut direct = tcp_client(upstream);
        direct.write_all(format!("get left{number}\r\nquit\r\n").as_bytes()).unwrap();
        let expected = format!("VALUE left{number} 0 1\r\nx\r\nEND\r\n");
        assert_eq!(rest(&mut direct), expected.as_bytes());
    }
    let counted = server.metrics().service(0);
    assert_eq!((counted.consumed, counted.dropped_requests()), (3, 0));
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// With a framing whose servers never answer a request that expects nothing.
#[test]
fn requests_without_an_answer_are_consumed_when_they_are_written() {
    let flood = |sequence: u64| {
        [&sequence.to_be_bytes()[..], &[0, 1], &16u32.to_be_bytes(), b"hi"].concat()
    };
    let port = free_port();
    let service = proxy(([127, 0, 0, 1], port).into(), Framing::Sockperf);
    let server = serve(service, 1);
    let mut client = tcp_client(address(&server, 0));
    for number in 1..=3 {
        client.write_all(&flood(number)).unwrap();
        eventually("it is refused", || dropped(&server, 0, DropReason::UpstreamRefused) == number);
    }
    assert_eq!(server.metrics().service(0).consumed, 0, "nothing was written");
    let listener = (0..10).find_map(|_| TcpListener::bind(("127.0.0.1", port)).ok());
    let listener = listener.expect("the port is free");
    let taken = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut message = [0; 16];
        stream.read_exact(&mut message).unwrap();
        (stream, message)
    });
    let mut sequence = 4;
    eventually("one is written", || {
        client.write_all(&flood(sequence)).unwrap();
        sequence += 1;
        std::thread::sleep(Duration::from_millis(5));
        server.metrics().service(0).consumed > 0
    });
    let (_stream, message) = taken.join().unwrap();
    assert_eq!(&message[14..], b"hi");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
