//! Backends that misbehave, seen through the `relay` kernel: each request gets exactly one answer with
//! the right status, no answer goes to another request, and the service recovers with its backend.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::change::change;
use common::*;
use engine::topology::{Backend, Listen, Replies, Service, Sockets, Topology};
use mqueue::abi::status;
use server::Server;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

fn relay(backend: Backend) -> Service {
    let library = build_kernel("crates/server/tests/kernels/relay.cpp");
    Service {
        max_message_bytes: 2048,
        max_reply_bytes: 2049,
        request_timeout_ms: 15_000,
        backends: vec![backend],
        ..Service::new("relay", vec![udp()], &format!("{library}:relay"))
    }
}

/// A relay to `backend` (listener 0) next to a service that has nothing to do with it (listener 1).
fn with_bystander(backend: Backend) -> Topology {
    topology(vec![relay(backend), Service::new("echo", vec![udp()], "echo")])
}

/// Status and answer of one request through the relay.
fn through(client: &UdpSocket, request: &[u8]) -> (u8, Vec<u8>) {
    let mut reply = ask(client, request);
    (reply.remove(0), reply)
}

/// Asks until the backend answers again.
fn until_answered(client: &UdpSocket, request: &[u8]) -> Vec<u8> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (status, answer) = through(client, request);
        if status == status::OK {
            return answer;
        }
        assert!(Instant::now() < deadline, "the backend stays lost: status {status}");
    }
}

fn finish(server: Server) {
    assert_eq!(ask(&udp_client(address(&server, 1)), b"bystander"), b"bystander");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

// --- TCP ---

/// What the fake memcached does with a request, in the order of the discriminants.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
enum Mood {
    Honest,
    Silent,
    Garbage,
    HalfAnAnswer,
    TwoAnswers,
    LongValue,
    Drips,
    Late,
    /// Waits for [`BATCH`] requests, answers the first of them twice, and is honest from then on.
    Duplicates,
    /// Waits for [`BATCH`] requests, gives the first two each other's answers, and is honest from then on.
    Swaps,
}

const BATCH: usize = 4;

/// A memcached that answers `get KEY` with a value made from the key, in the configured mood.
#[derive(Clone)]
struct FakeMemcached {
    address: SocketAddr,
    mood: Arc<AtomicU32>,
    accepted: Arc<AtomicU32>,
    answered: Arc<AtomicU32>,
    /// Most connections at a time without an answer.
    most_open: Arc<AtomicU32>,
}

/// How late [`Mood::Late`] is; more than the time-out of the tests that use it.
const LATE: Duration = Duration::from_millis(600);

fn value_of(key: &str) -> Vec<u8> {
    format!("VALUE {key} 0 {}\r\n{key}\r\nEND\r\n", key.len()).into_bytes()
}

impl FakeMemcached {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake = Self {
            address: listener.local_addr().unwrap(),
            mood: Arc::default(),
            accepted: Arc::default(),
            answered: Arc::default(),
            most_open: Arc::default(),
        };
        let shared = fake.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let accepted = shared.accepted.fetch_add(1, Ordering::Relaxed) + 1;
                let open = accepted - shared.answered.load(Ordering::Relaxed).min(accepted);
                shared.most_open.fetch_max(open, Ordering::Relaxed);
                let shared = shared.clone();
                std::thread::spawn(move || shared.serve(stream.unwrap()));
            }
        });
        fake
    }

    fn set(&self, mood: Mood) {
        self.mood.store(mood as u32, Ordering::Relaxed);
    }

    /// One connection, to its end. Errors are the engine's good right: it closes when it is lied to.
    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        stream.set_nodelay(true).ok()?;
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let mut line = String::new();
        let mut batch = Vec::new();
        while reader.read_line(&mut line).ok()? > 0 {
            let key = line.strip_prefix("get ").and_then(|l| l.strip_suffix("\r\n"));
            let answer = value_of(key.unwrap_or_else(|| panic!("not a get: {line:?}")));
            let mood = self.mood.load(Ordering::Relaxed);
            if mood != Mood::Silent as u32 {
                self.answered.fetch_add(1, Ordering::Relaxed);
            }
            if mood == Mood::Honest as u32 {
                stream.write_all(&answer).ok()?;
            } else if mood == Mood::Garbage as u32 {
                stream.write_all(b"\x80\x01 this is no memcached \r\n").ok()?;
            } else if mood == Mood::HalfAnAnswer as u32 {
                return stream.write_all(&answer[..answer.len() / 2]).ok();
            } else if mood == Mood::TwoAnswers as u32 {
                stream.write_all(&[answer, value_of("unasked")].concat()).ok()?;
            } else if mood == Mood::LongValue as u32 {
                stream.write_all(&value_of(&"long".repeat(1000))).ok()?;
            } else if mood == Mood::Drips as u32 {
                for byte in answer {
                    stream.write_all(&[byte]).ok()?;
                }
            } else if mood == Mood::Late as u32 {
                std::thread::sleep(LATE);
                stream.write_all(&answer).ok()?;
            } else if mood == Mood::Duplicates as u32 || mood == Mood::Swaps as u32 {
                batch.push(answer);
                if batch.len() == BATCH {
                    match mood == Mood::Swaps as u32 {
                        true => batch.swap(0, 1),
                        false => batch.insert(1, batch[0].clone()),
                    }
                    self.set(Mood::Honest);
                    stream.write_all(&batch.concat()).ok()?;
                }
            }
            line.clear();
        }
        Some(())
    }

    fn backend(&self, timeout_ms: u64) -> Backend {
        let backend = Backend::new("fake", Transport::Tcp, self.address, Framing::Memcached);
        Backend { timeout_ms, ..backend }
    }
}

fn get(key: &str) -> Vec<u8> {
    format!("get {key}\r\n").into_bytes()
}

/// One request in this mood; then the backend is honest again and so is the service.
fn one_in_mood(fake: &FakeMemcached, server: &Server, mood: Mood, expected: u8) {
    let client = udp_client(address(server, 0));
    fake.set(Mood::Honest);
    assert_eq!(until_answered(&client, &get("before")), value_of("before"), "{mood:?}");
    fake.set(mood);
    assert_eq!(through(&client, &get("during")), (expected, Vec::new()), "{mood:?}");
    fake.set(Mood::Honest);
    for i in 0..20 {
        let key = format!("after{i}");
        assert_eq!(until_answered(&client, &get(&key)), value_of(&key), "{mood:?}");
    }
}

#[test]
fn garbage_ends_the_connection_and_nothing_else() {
    let fake = FakeMemcached::start();
    let server = start(with_bystander(fake.backend(5000)));
    for round in 1..=3 {
        one_in_mood(&fake, &server, Mood::Garbage, status::PROTOCOL);
        // provokes: backend_protocol
        assert_eq!(dropped(&server, 0, DropReason::BackendProtocol), round);
    }
    finish(server);
}

#[test]
fn a_truncated_answer_is_a_protocol_error() {
    let fake = FakeMemcached::start();
    let server = start(with_bystander(fake.backend(5000)));
    for _ in 0..3 {
        one_in_mood(&fake, &server, Mood::HalfAnAnswer, status::CLOSED);
    }
    assert!(server.metrics().service(0).backend_failures >= 3);
    finish(server);
}

#[test]
fn an_answer_longer_than_the_mqueue_is_refused() {
    let fake = FakeMemcached::start();
    let server = start(with_bystander(fake.backend(5000)));
    for round in 1..=3 {
        one_in_mood(&fake, &server, Mood::LongValue, status::TOO_LONG);
        // provokes: backend_too_long
        assert_eq!(dropped(&server, 0, DropReason::BackendTooLong), round);
    }
    finish(server);
}

#[test]
fn a_silent_backend_times_out_and_is_reconnected() {
    let fake = FakeMemcached::start();
    let server = start(with_bystander(fake.backend(100)));
    let client = udp_client(address(&server, 0));
    until_answered(&client, &get("before"));
    fake.set(Mood::Silent);
    for _ in 0..3 {
        assert_eq!(through(&client, &get("during")), (status::TIMEOUT, Vec::new()));
    }
    assert!(server.metrics().service(0).backend_timeouts >= 3);
    // The connection still owes those answers. As they never come, the engine gives it up.
    let before = fake.accepted.load(Ordering::Relaxed);
    fake.set(Mood::Honest);
    assert_eq!(until_answered(&client, &get("after")), value_of("after"));
    assert!(fake.accepted.load(Ordering::Relaxed) > before, "on a new connection");
    finish(server);
}

#[test]
fn a_backend_that_never_accepts_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = listener.local_addr().unwrap();
    let backend = Backend::new("deaf", Transport::Tcp, there, Framing::Memcached);
    let server = start(with_bystander(backend));
    let client = udp_client(address(&server, 0));
    for _ in 0..5 {
        assert_eq!(through(&client, &get("a")), (status::TIMEOUT, Vec::new()));
    }
    // The listener is closed: connections that were not accepted are reset, and so are new attempts.
    drop(listener);
    let refused = |(status, _)| status == status::REFUSED;
    eventually("refused", || refused(through(&client, &get("a"))));
    assert!(server.metrics().service(0).backend_failures > 0);
    finish(server);
}

#[test]
fn an_unrequested_answer_is_dropped() {
    let fake = FakeMemcached::start();
    let server = start(with_bystander(fake.backend(5000)));
    let client = udp_client(address(&server, 0));
    until_answered(&client, &get("before"));
    fake.set(Mood::TwoAnswers);
    for round in 1..=3 {
        assert_eq!(until_answered(&client, &get("during")), value_of("during"));
        // provokes: backend_unasked
        eventually("counted", || dropped(&server, 0, DropReason::BackendUnasked) == round);
    }
    fake.set(Mood::Honest);
    for i in 0..20 {
        let key = format!("after{i}");
        assert_eq!(until_answered(&client, &get(&key)), value_of(&key));
    }
    finish(server);
}

/// On a busy connection, one extra answer would shift all later ones to the wrong requests.
#[test]
fn an_answer_with_another_key_is_dropped() {
    for mood in [Mood::Duplicates, Mood::Swaps] {
        let fake = FakeMemcached::start();
        let mut settings = with_bystander(fake.backend(15_000));
        settings.services[0].mqueues = 16;
        let server = start(settings);
        let clients: Vec<UdpSocket> = (0..16).map(|_| udp_client(address(&server, 0))).collect();
        let round = |number: usize| {
            let key = |client: usize| format!("key-{number}-{client}");
            for (n, client) in clients.iter().enumerate() {
                client.send(&get(&key(n))).unwrap();
            }
            let mut refused = 0;
            for (n, client) in clients.iter().enumerate() {
                let mut reply = [0; 4096];
                let len = receive(client, &mut reply).expect("an answer in time");
                match reply[0] {
                    status::PROTOCOL => refused += 1,
                    _ => assert_eq!(&reply[..len], [&[status::OK], &*value_of(&key(n))].concat()),
                }
            }
            refused
        };
        assert_eq!(round(0), 0);
        fake.set(mood);
        assert!(round(1) > 0, "other requests in flight get their status");
        // provokes: backend_mismatch
        assert_eq!(dropped(&server, 0, DropReason::BackendMismatch), 1, "{mood:?}");
        assert_eq!((2..20).map(round).sum::<u32>(), 0, "{mood:?}");
        assert_eq!(fake.accepted.load(Ordering::Relaxed), 2, "on one new connection");
        finish(server);
    }
}

#[test]
fn a_connection_per_request_gets_only_its_own_answer() {
    let fake = FakeMemcached::start();
    fake.set(Mood::TwoAnswers);
    let backend = Backend { in_flight: 4, sockets: Sockets::PerRequest, ..fake.backend(15_000) };
    let mut settings = with_bystander(backend);
    settings.services[0].mqueues = 16;
    let server = start(settings);
    let clients: Vec<UdpSocket> = (0..16).map(|_| udp_client(address(&server, 0))).collect();
    for round in 0..20 {
        for (n, client) in clients.iter().enumerate() {
            client.send(&get(&format!("key-{round}-{n}"))).unwrap();
        }
        for (n, client) in clients.iter().enumerate() {
            let mut reply = [0; 4096];
            let len = receive(client, &mut reply).expect("an answer in time");
            let expected = value_of(&format!("key-{round}-{n}"));
            assert_eq!((reply[0], &reply[1..len]), (status::OK, &expected[..]));
        }
    }
    assert_eq!(fake.accepted.load(Ordering::Relaxed), 16 * 20);
    let most = fake.most_open.load(Ordering::Relaxed);
    assert!(most <= 4, "{most} connections for 4 requests in flight");
    finish(server);
}

#[test]
fn a_connection_for_a_request_ends_with_its_time_out() {
    let fake = FakeMemcached::start();
    let backend = Backend { in_flight: 1, sockets: Sockets::PerRequest, ..fake.backend(200) };
    let server = start(with_bystander(backend));
    let client = udp_client(address(&server, 0));
    for round in 1..=3 {
        fake.set(Mood::Silent);
        assert_eq!(through(&client, &get("lost")), (status::TIMEOUT, Vec::new()));
        // Its only connection is free at once.
        fake.set(Mood::Honest);
        assert_eq!(through(&client, &get("key")), (status::OK, value_of("key")));
        assert_eq!(fake.accepted.load(Ordering::Relaxed), 2 * round);
    }
    finish(server);
}

#[test]
fn an_answer_may_arrive_in_pieces() {
    let fake = FakeMemcached::start();
    fake.set(Mood::Drips);
    let server = start(with_bystander(fake.backend(15_000)));
    let client = udp_client(address(&server, 0));
    for i in 0..20 {
        let key = format!("{}{i}", "key".repeat(i));
        assert_eq!(through(&client, &get(&key)), (status::OK, value_of(&key)));
    }
    finish(server);
}

#[test]
fn late_answers_are_consumed_and_the_order_holds() {
    let fake = FakeMemcached::start();
    // Shorter than the fake is late; the connection's patience is ten times that, so it is kept.
    let server = start(with_bystander(fake.backend(300)));
    let client = udp_client(address(&server, 0));
    until_answered(&client, &get("before"));
    for round in 1..=2 {
        fake.set(Mood::Late);
        assert_eq!(through(&client, &get("late")), (status::TIMEOUT, Vec::new()));
        fake.set(Mood::Honest);
        for i in 0..100 {
            let key = format!("key{round}-{i}");
            // The first of these wait behind the late answer on the same connection.
            assert_eq!(until_answered(&client, &get(&key)), value_of(&key));
        }
        // provokes: backend_late
        assert!(dropped(&server, 0, DropReason::BackendLate) >= round);
    }
    assert_eq!(fake.accepted.load(Ordering::Relaxed), 1, "one connection served it all");
    finish(server);
}

#[test]
fn many_blocks_share_few_places_and_every_answer_finds_its_own() {
    let fake = FakeMemcached::start();
    for (workers, connections, in_flight) in [(1, 1, 1), (1, 1, 64), (1, 4, 2), (2, 2, 4)] {
        let backend = Backend { connections, in_flight, ..fake.backend(15_000) };
        let mut settings = with_bystander(backend);
        settings.services[0].mqueues = 16;
        settings.engine.workers = workers;
        let server = start(settings);
        let clients: Vec<UdpSocket> = (0..24).map(|_| udp_client(address(&server, 0))).collect();
        for round in 0..25 {
            for (i, client) in clients.iter().enumerate() {
                client.send(&get(&format!("key-{round}-{i}"))).unwrap();
            }
            for (i, client) in clients.iter().enumerate() {
                let mut reply = [0; 4096];
                let len = receive(client, &mut reply).expect("an answer in time");
                let expected = value_of(&format!("key-{round}-{i}"));
                assert_eq!((reply[0], &reply[1..len]), (status::OK, &expected[..]));
            }
        }
        finish(server);
    }
}

#[test]
fn a_request_the_framing_cannot_carry_is_not_sent() {
    let fake = FakeMemcached::start();
    let server = start(with_bystander(fake.backend(5000)));
    let client = udp_client(address(&server, 0));
    for wrong in [&b"set a 0 0 1 noreply\r\nx\r\n"[..], b"get a\r\nget b\r\n", b"nonsense", b""] {
        assert_eq!(through(&client, wrong), (status::PROTOCOL, Vec::new()), "{wrong:?}");
    }
    assert_eq!(until_answered(&client, &get("a")), value_of("a"));
    finish(server);
}

/// A service whose kernel sends a request to its late backend after the client's reply; `end` ends the service.
fn requests_without_client(replies: Replies, end: impl Fn(Server)) {
    let fake = FakeMemcached::start();
    fake.set(Mood::Late);
    let library = build_kernel("crates/server/tests/kernels/relay.cpp");
    let kernel = format!("{library}:tell");
    let server = start(topology(vec![Service { replies, kernel, ..relay(fake.backend(5000)) }]));
    let metrics = server.metrics().services()[0].clone();
    let client = udp_client(address(&server, 0));
    match replies {
        Replies::One => drop(ask(&client, &get("key"))),
        Replies::None => drop(client.send(&get("key")).unwrap()),
    }
    eventually("it is sent", || metrics.snapshot().backend_sent == 1);
    end(server);
    let counted = metrics.snapshot();
    assert_eq!((counted.backend_answered, counted.backend_failures), (1, 0), "{replies:?}");
}

#[test]
fn backend_requests_without_a_client_are_answered_before_the_end() {
    for replies in [Replies::One, Replies::None] {
        requests_without_client(replies, |server| assert!(server.shutdown().is_clean()));
    }
}

#[test]
fn backend_requests_without_a_client_are_answered_before_a_change() {
    for replies in [Replies::One, Replies::None] {
        requests_without_client(replies, |mut server| {
            let mut service = server.topology().services[0].clone();
            service.slots *= 2;
            change(&mut server, vec![service]);
            assert!(server.shutdown().is_clean());
        });
    }
}

#[test]
fn a_service_can_be_the_backend_of_another() {
    for (framing, transport) in [
        (Framing::Fixed(32), Transport::Tcp),
        (Framing::LengthU16, Transport::Tcp),
        (Framing::LengthU32, Transport::Tcp),
        (Framing::Line, Transport::Tcp),
        (Framing::Raw, Transport::Udp),
    ] {
        let there: SocketAddr = ([127, 0, 0, 1], free_port()).into();
        let backend = Backend::new("next", transport, there, framing);
        let backend = Backend { timeout_ms: 15_000, ..backend };
        let listen = Listen { transport, address: there };
        let server = start(topology(vec![
            relay(backend),
            Service::new("echo", vec![udp()], "echo"),
            Service { framing, ..Service::new("next", vec![listen], "echo") },
        ]));
        let clients: Vec<UdpSocket> = (0..8).map(|_| udp_client(address(&server, 0))).collect();
        for round in 0..20 {
            let message = |i: usize| match framing {
                Framing::Line => format!("line {round} of client {i}").into_bytes(),
                _ => pattern(32, round * 8 + i),
            };
            for (i, client) in clients.iter().enumerate() {
                client.send(&message(i)).unwrap();
            }
            for (i, client) in clients.iter().enumerate() {
                let mut reply = [0; 100];
                let len = receive(client, &mut reply).expect("an answer in time");
                assert_eq!((reply[0], &reply[1..len]), (status::OK, &message(i)[..]), "{framing}");
            }
        }
        finish(server);
    }
}

// --- UDP ---

/// A UDP backend that echoes, or does what the first byte of a request says.
fn fake_datagrams() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let there = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut request = [0; 4096];
        while let Ok((len, peer)) = socket.recv_from(&mut request) {
            let request = &request[..len];
            // An error is the refusal of an earlier datagram: the engine has closed that socket.
            let answer = |answer: &[u8]| drop(socket.send_to(answer, peer));
            match request.first() {
                Some(b'S') => {}
                Some(b'D') => (0..2).for_each(|_| answer(request)),
                Some(b'L') => {
                    std::thread::sleep(LATE);
                    answer(request);
                }
                Some(b'X') => answer(&[7; 3000]),
                Some(b'O') => {
                    // From another port: a connected socket never hears of it.
                    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
                    other.send_to(b"forged", peer).unwrap();
                    answer(request);
                }
                _ => answer(request),
            }
        }
    });
    there
}

fn datagram_backend(there: SocketAddr, timeout_ms: u64) -> Backend {
    Backend { timeout_ms, ..Backend::new("fake", Transport::Udp, there, Framing::Raw) }
}

#[test]
fn a_datagram_backend_answers() {
    let server = start(with_bystander(datagram_backend(fake_datagrams(), 15_000)));
    let client = udp_client(address(&server, 0));
    for i in 0..100 {
        let message = [&b"a"[..], &pattern(i * 20, i)].concat();
        assert_eq!(through(&client, &message), (status::OK, message));
    }
    assert_eq!(through(&client, b"Other port too"), (status::OK, b"Other port too".to_vec()));
    assert_eq!(through(&client, b""), (status::OK, b"".to_vec()));
    finish(server);
}

#[test]
fn silent_late_and_duplicate_datagrams_of_a_backend_are_handled() {
    let server = start(with_bystander(datagram_backend(fake_datagrams(), 200)));
    let client = udp_client(address(&server, 0));
    let honest = |n: usize| {
        for i in 0..20 {
            let message = format!("honest {n} {i}").into_bytes();
            assert_eq!(until_answered(&client, &message), message);
        }
    };
    for n in 0..3 {
        honest(3 * n);
        assert_eq!(through(&client, b"S"), (status::TIMEOUT, Vec::new()));
        honest(3 * n + 1);
        assert_eq!(through(&client, b"L"), (status::TIMEOUT, Vec::new()));
        honest(3 * n + 2);
        assert_eq!(until_answered(&client, b"D"), b"D");
        // provokes: backend_unasked
        eventually("the second answer is counted", || {
            dropped(&server, 0, DropReason::BackendUnasked) > n as u64
        });
    }
    assert!(server.metrics().service(0).backend_timeouts >= 6);
    finish(server);
}

#[test]
fn a_long_datagram_from_a_backend_is_refused() {
    let server = start(with_bystander(datagram_backend(fake_datagrams(), 5000)));
    let client = udp_client(address(&server, 0));
    for round in 1..=3 {
        assert_eq!(through(&client, b"X"), (status::TOO_LONG, Vec::new()));
        // provokes: backend_too_long
        assert_eq!(dropped(&server, 0, DropReason::BackendTooLong), round);
        assert_eq!(through(&client, b"short"), (status::OK, b"short".to_vec()));
    }
    finish(server);
}

#[test]
fn a_refused_datagram_port_is_reported_at_once_and_reused() {
    // Not an ephemeral one, which another test might get meanwhile.
    let there: SocketAddr = ([127, 0, 0, 1], free_port()).into();
    let server = start(with_bystander(datagram_backend(there, 15_000)));
    let client = udp_client(address(&server, 0));
    for _ in 0..10 {
        assert_eq!(through(&client, b"anyone?"), (status::REFUSED, Vec::new()));
    }
    let found = UdpSocket::bind(there).unwrap();
    std::thread::spawn(move || {
        let mut request = [0; 100];
        while let Ok((len, peer)) = found.recv_from(&mut request) {
            found.send_to(&request[..len], peer).unwrap();
        }
    });
    assert_eq!(until_answered(&client, b"now?"), b"now?");
    finish(server);
}

/// A UDP backend that says again what it answered last, to whom it answered it, before it answers. What it
/// answers to a request is up to `answer`.
fn repeats_itself(answer: fn(&[u8]) -> Vec<Vec<u8>>) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let there = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut request = [0; 4096];
        let mut last = (Vec::new(), there);
        while let Ok((len, peer)) = socket.recv_from(&mut request) {
            // An error is from a closed socket and can be ignored.
            last.0.iter().for_each(|datagram: &Vec<u8>| drop(socket.send_to(datagram, last.1)));
            last = (answer(&request[..len]), peer);
            last.0.iter().for_each(|datagram| drop(socket.send_to(datagram, peer)));
        }
    });
    there
}

/// A relay with one block, so that duplicates arrive at the socket on which the next answer is awaited.
fn one_block(backend: Backend) -> Server {
    let mut settings = with_bystander(backend);
    settings.services[0].mqueues = 1;
    start(settings)
}

/// Sends `count` requests, from several clients in turn; all must be answered correctly.
fn all_are_right(server: &Server, count: usize, request: impl Fn(usize) -> (Vec<u8>, Vec<u8>)) {
    let clients: Vec<UdpSocket> = (0..8).map(|_| udp_client(address(server, 0))).collect();
    for n in 0..count {
        let (question, answer) = request(n);
        let got = through(&clients[n % clients.len()], &question);
        assert_eq!(got, (status::OK, answer), "request {n}");
    }
}

#[test]
fn a_duplicate_datagram_is_recognized_by_its_id() {
    let backend = datagram_backend(repeats_itself(|request| vec![request.to_vec()]), 15_000);
    let matching = Some("id:4:8".parse().unwrap());
    let server = one_block(Backend { matching, ..backend });
    all_are_right(&server, 200, |n| {
        let message = [b"echo", &n.to_be_bytes()[..], b"rest"].concat();
        (message.clone(), message)
    });
    // provokes: backend_mismatch
    assert_eq!(dropped(&server, 0, DropReason::BackendMismatch), 199);
    let client = udp_client(address(&server, 0));
    assert_eq!(through(&client, b"no id"), (status::PROTOCOL, Vec::new()));
    finish(server);
}

#[test]
fn a_duplicate_datagram_arrives_at_a_closed_socket() {
    let backend = datagram_backend(repeats_itself(|request| vec![request.to_vec()]), 15_000);
    let server = one_block(Backend { sockets: Sockets::PerRequest, ..backend });
    all_are_right(&server, 200, |n| {
        let message = format!("request {n}").into_bytes();
        (message.clone(), message)
    });
    finish(server);
}

/// `get KEY` behind a frame header: the value in three datagrams, in a wrong order, one of them twice.
fn memcached_over_udp(request: &[u8]) -> Vec<Vec<u8>> {
    let (header, command) = request.split_at(8);
    assert_eq!(header[2..], [0, 0, 0, 1, 0, 0], "one datagram");
    let command = std::str::from_utf8(command).unwrap();
    let key = command.strip_prefix("get ").and_then(|line| line.strip_suffix("\r\n")).unwrap();
    let answer = value_of(key);
    let datagrams = answer.chunks(answer.len().div_ceil(3)).enumerate();
    let datagrams =
        datagrams.map(|(n, chunk)| [&header[..2], &[0, n as u8, 0, 3, 0, 0], chunk].concat());
    let datagrams: Vec<Vec<u8>> = datagrams.collect();
    [2, 0, 2, 1].map(|n: usize| datagrams[n].clone()).into()
}

#[test]
fn memcached_over_udp_is_matched_by_its_frame_header() {
    let there = repeats_itself(memcached_over_udp);
    for sockets in [Sockets::Persistent, Sockets::PerRequest] {
        let backend = Backend::new("fake", Transport::Udp, there, Framing::Memcached);
        let server = one_block(Backend { timeout_ms: 15_000, sockets, ..backend });
        all_are_right(&server, 200, |n| (get(&format!("key{n}")), value_of(&format!("key{n}"))));
        let client = udp_client(address(&server, 0));
        assert_eq!(through(&client, b"no command"), (status::PROTOCOL, Vec::new()));
        finish(server);
    }
}

/// memcached 1.6 numbers the datagrams of each value by themselves, and has one without content for a key that it does not have.
fn values_over_udp(request: &[u8]) -> Vec<Vec<u8>> {
    let (header, command) = request.split_at(8);
    let command = std::str::from_utf8(command).unwrap();
    let keys = command.strip_prefix("get ").and_then(|line| line.strip_suffix("\r\n")).unwrap();
    let mut datagrams = Vec::new();
    for key in keys.split(' ') {
        let value = value_of(key);
        let value = if key == "none" { &[][..] } else { value.strip_suffix(b"END\r\n").unwrap() };
        let total = if key == "none" {
            0
        } else if key == "long" {
            3
        } else {
            1
        };
        let part = value.len().div_ceil(usize::from(total).max(1)).max(1);
        let parts = value.chunks(part).enumerate();
        datagrams.extend(
            parts.map(|(n, part)| [&header[..2], &[0, n as u8, 0, total, 0, 0], part].concat()),
        );
        if total == 0 {
            datagrams.push([&header[..2], &[0; 6]].concat());
        }
    }
    datagrams.last_mut().unwrap().extend_from_slice(b"END\r\n");
    if keys.ends_with("none") {
        let last = datagrams.last_mut().unwrap();
        last[5] = 1;
    }
    datagrams
}

/// A key without a value has an empty datagram. A server that sends more of them than a request has words is not listened to, and costs a turn no more than
/// a few reads.
#[test]
fn more_values_than_were_asked_for_are_dropped() {
    const EMPTY: usize = 12;
    let there = repeats_itself(|request| {
        let id = &request[..2];
        let empty = [id, &[0; 6]].concat();
        let end = [id, &[0, 0, 0, 1, 0, 0], b"END\r\n"].concat();
        [vec![empty; EMPTY], vec![end]].concat()
    });
    let backend = Backend::new("fake", Transport::Udp, there, Framing::Memcached);
    let server = one_block(Backend { timeout_ms: 15_000, ..backend });
    all_are_right(&server, 1, |_| (get("a"), b"END\r\n".to_vec()));
    // `get a` has two words.
    assert_eq!(dropped(&server, 0, DropReason::BackendMismatch), EMPTY as u64 - 2);
    finish(server);
}

#[test]
fn several_values_of_memcached_over_udp_are_one_answer() {
    let there = repeats_itself(values_over_udp);
    let backend = Backend::new("fake", Transport::Udp, there, Framing::Memcached);
    let server = one_block(Backend { timeout_ms: 15_000, ..backend });
    all_are_right(&server, 100, |n| {
        let keys = [
            ["a", "b", "c"],
            ["a", "none", "long"],
            ["none", "none", "none"],
            ["long", "long", "none"],
        ][n % 4];
        let values = keys
            .iter()
            .filter(|key| **key != "none")
            .map(|key| value_of(key).strip_suffix(b"END\r\n").unwrap().to_vec());
        (get(&keys.join(" ")), [values.flatten().collect(), b"END\r\n".to_vec()].concat())
    });
    finish(server);
}
