//! Accelerators that break their contract (`device/tests/misbehave.cpp`): their effect on rings is limited to
//! themselves. Every payload contains its client and its number, so that a reply to the wrong client would be
//! detected.

mod common;

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use common::*;
use engine::topology::{Backend, CpuPlacement, Replies, Rings, Service};
use server::Server;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

/// The behaviour of the kernel, with its own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    AnswersTwice = 1,
    ForgesTokens = 2,
    LengthTooLong = 3,
    RandomHeader = 4,
    RandomSlots = 5,
    RandomHead = 6,
    RandomTail = 7,
    Returns = 8,
    Hangs = 9,
    Silent = 10,
    PayloadOutside = 11,
    Overruns = 12,
    StatusWords = 13,
    AsksForEver = 14,
    WaitsForNothing = 15,
}

/// Requests that each block answers before it breaks its contract.
const AFTER: usize = 4;
const MQUEUES: u32 = 3;
const MESSAGE_BYTES: usize = 32;

fn misbehaving(mode: Mode, rings: Rings) -> Service {
    let library = build_kernel("device/tests/misbehave.cpp");
    Service {
        params: vec![
            ("mode".into(), f64::from(mode as u32).into()),
            ("after".into(), (AFTER as f64).into()),
        ],
        mqueues: MQUEUES,
        // A wrong tail is detected when the engine needs slots: soon, if there are few.
        slots: if mode == Mode::RandomTail { 4 } else { 64 },
        request_timeout_ms: 150,
        hang_ms: vec![2000],
        framing: Framing::Fixed(MESSAGE_BYTES as u32),
        rings,
        ..Service::new("victim", vec![udp(), tcp()], &format!("{library}:misbehave"))
    }
}

fn message(client: usize, number: usize) -> Vec<u8> {
    let mut message = pattern(MESSAGE_BYTES, client * 1000 + number);
    message[..8].copy_from_slice(&(client as u64).to_le_bytes());
    message[8..16].copy_from_slice(&(number as u64).to_le_bytes());
    message
}

/// A UDP client: sends a few at a time, and checks everything.
struct Datagrams {
    socket: UdpSocket,
    client: usize,
    sent: usize,
    answered: HashSet<usize>,
}

impl Datagrams {
    fn new(server: SocketAddr, client: usize) -> Self {
        let socket = udp_client(server);
        socket.set_nonblocking(true).unwrap();
        Self { socket, client, sent: 0, answered: HashSet::new() }
    }

    fn send(&mut self, count: usize) {
        for _ in 0..count {
            self.socket.send(&message(self.client, self.sent)).unwrap();
            self.sent += 1;
        }
    }

    /// Every available reply must answer one request of this client, once.
    fn collect(&mut self) {
        let mut reply = [0; 2048];
        while let Ok(len) = self.socket.recv(&mut reply) {
            if len == 0 {
                // Some modes reply with an empty message and the right token, which is valid.
                continue;
            }
            let number = u64::from_le_bytes(reply[8..16].try_into().unwrap()) as usize;
            assert_eq!(reply[..len], message(self.client, number), "another client's reply");
            assert!(number < self.sent, "a reply to what was never asked");
            assert!(self.answered.insert(number), "request {number} was answered twice");
        }
    }
}

/// A client on a connection: replies are a prefix of what it asked, in order.
fn on_a_connection(server: SocketAddr, client: usize, count: usize) -> usize {
    let mut stream = tcp_client(server);
    stream.set_read_timeout(Some(Duration::from_millis(250))).unwrap();
    let mut answered = 0;
    for number in 0..count {
        if stream.write_all(&message(client, number)).is_err() {
            break;
        }
        let mut reply = [0; MESSAGE_BYTES];
        match stream.read_exact(&mut reply) {
            Ok(()) => assert_eq!(reply[..], message(client, number), "{client}: {number}"),
            Err(_) => break,
        }
        answered += 1;
    }
    answered
}

fn bystander_is_well(server: &Server) {
    for salt in 0..3 {
        let message = pattern(60, salt);
        assert_eq!(ask(&udp_client(address(server, 2)), &message), message);
    }
}

/// Runs clients against a service whose kernel misbehaves; returns the server once nothing is in flight.
fn endure(mode: Mode, rings: Rings, placement: CpuPlacement, workers: usize) -> Server {
    let bystander = Service::new("echo", vec![udp()], "echo");
    let mut settings = topology_on(placement, vec![misbehaving(mode, rings), bystander]);
    settings.engine.workers = workers;
    let server = start(settings);
    // At first it behaves correctly: one message for each block.
    let client = udp_client(address(&server, 0));
    client.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    for number in 0..MQUEUES as usize {
        let message = message(99, number);
        // Repeated if the kernel's thread was not scheduled before the request timed out.
        eventually("it answers", || {
            client.send(&message).unwrap();
            let mut reply = [0; 1024];
            client.recv(&mut reply).is_ok_and(|len| reply[..len] == message)
        });
    }
    let mut clients: Vec<Datagrams> =
        (0..4).map(|client| Datagrams::new(address(&server, 0), client)).collect();
    // Requests at the time of the misbehaviour, and after it.
    for round in 0..8 {
        for client in &mut clients {
            client.send(2 + round % 3);
        }
        std::thread::sleep(Duration::from_millis(3));
        for client in &mut clients {
            client.collect();
        }
        bystander_is_well(&server);
    }
    for client in 10..12 {
        on_a_connection(address(&server, 1), client, 12);
    }
    bystander_is_well(&server);
    assert_accounts(&server);
    for client in &mut clients {
        client.collect();
    }
    let answered: usize = clients.iter().map(|c| c.answered.len()).sum();
    let counted = server.metrics().service(0);
    assert!(counted.replied >= answered as u64, "{counted:?}");
    server
}

fn on_threads() -> CpuPlacement {
    CpuPlacement::Threads { threads: 1, cores: Vec::new() }
}

/// One mode in every ring protocol and placement; `reason` must be counted in each.
fn contained(mode: Mode, reason: DropReason) {
    contained_in(mode, &[Rings::Doorbell, Rings::Granule, Rings::Granule8], reason);
}

fn contained_in(mode: Mode, protocols: &[Rings], reason: DropReason) {
    let places = |rings: &Rings| {
        let on_worker = (*rings, CpuPlacement::Worker, 1);
        [on_worker, (*rings, on_threads(), 2)]
    };
    for (rings, placement, workers) in protocols.iter().flat_map(places) {
        let case = format!("{mode:?} {rings:?} {placement:?}");
        let server = endure(mode, rings, placement, workers);
        // If the kernel was not scheduled, it has not misbehaved yet.
        let client = udp_client(address(&server, 0));
        eventually(&format!("{case}: {}", reason.name()), || {
            dropped(&server, 0, reason) > 0 || {
                client.send(&message(0, 1000)).unwrap();
                false
            }
        });
        assert_accounts(&server);
        assert!(server.shutdown().is_clean(), "{case}");
    }
}

#[test]
fn a_second_answer_is_dropped() {
    // provokes: stale_token
    contained(Mode::AnswersTwice, DropReason::StaleToken);
}

#[test]
fn a_forged_token_is_dropped() {
    // provokes: stale_token
    contained(Mode::ForgesTokens, DropReason::StaleToken);
}

#[test]
fn an_impossible_length_is_a_bad_message() {
    // provokes: bad_message
    contained(Mode::LengthTooLong, DropReason::BadMessage);
}

#[test]
fn a_random_header_is_a_bad_message() {
    // provokes: bad_message
    contained(Mode::RandomHeader, DropReason::BadMessage);
}

#[test]
fn a_payload_outside_the_arena_is_a_bad_message() {
    // provokes: bad_message
    contained(Mode::PayloadOutside, DropReason::BadMessage);
}

#[test]
fn random_slots_are_bad_messages_or_none() {
    // provokes: bad_message
    contained_in(Mode::RandomSlots, &[Rings::Doorbell], DropReason::BadMessage);
    // A granule with the wrong sequence has not arrived: its request waits until it times out.
    // provokes: request_timeout
    let granules = [Rings::Granule, Rings::Granule8];
    contained_in(Mode::RandomSlots, &granules, DropReason::RequestTimeout);
}

#[test]
fn a_random_head_kills_the_mqueue() {
    // provokes: mqueue_dead
    contained_in(Mode::RandomHead, &[Rings::Doorbell], DropReason::MqueueDead);
    // To a granule ring the head is a hint.
    // provokes: request_timeout
    let granules = [Rings::Granule, Rings::Granule8];
    contained_in(Mode::RandomHead, &granules, DropReason::RequestTimeout);
}

#[test]
fn a_random_tail_kills_the_mqueue() {
    // provokes: mqueue_dead
    contained(Mode::RandomTail, DropReason::MqueueDead);
}

#[test]
fn a_random_tail_kills_the_mqueue_of_a_service_without_replies() {
    for placement in [CpuPlacement::Worker, on_threads()] {
        let victim =
            Service { replies: Replies::None, ..misbehaving(Mode::RandomTail, Rings::Doorbell) };
        let bystander = Service::new("echo", vec![udp()], "echo");
        let server = start(topology_on(placement, vec![victim, bystander]));
        let client = udp_client(address(&server, 0));
        // Each of the three blocks misbehaves after this many.
        for number in 0..(AFTER + 1) * MQUEUES as usize * 2 {
            client.send(&message(0, number)).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        // provokes: mqueue_dead
        eventually("dead", || {
            client.send(&message(0, 1000)).unwrap();
            dropped(&server, 0, DropReason::MqueueDead) > 0
        });
        bystander_is_well(&server);
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn overrunning_the_ring_hurts_only_its_mqueue() {
    // provokes: mqueue_dead
    contained_in(Mode::Overruns, &[Rings::Doorbell], DropReason::MqueueDead);
    // provokes: request_timeout
    let granules = [Rings::Granule, Rings::Granule8];
    contained_in(Mode::Overruns, &granules, DropReason::RequestTimeout);
}

#[test]
fn garbage_in_the_status_page_has_no_effect() {
    // provokes: request_timeout
    contained(Mode::StatusWords, DropReason::RequestTimeout);
}

#[test]
fn a_silent_kernel_times_out() {
    // provokes: request_timeout
    contained(Mode::Silent, DropReason::RequestTimeout);
}

/// Waits that no backend could end.
#[test]
fn a_kernel_that_waits_for_itself_or_for_nothing_loses_its_mqueue() {
    let answers = Service {
        framing: Framing::Fixed(MESSAGE_BYTES as u32),
        ..Service::new("database", vec![tcp()], "echo")
    };
    let database = start(topology(vec![answers]));
    let cases = [Mode::AsksForEver, Mode::WaitsForNothing]
        .map(|mode| [CpuPlacement::Worker, on_threads()].map(|placement| (mode, placement)));
    for (mode, placement) in cases.into_iter().flatten() {
        let framing = Framing::Fixed(MESSAGE_BYTES as u32);
        let backend = Backend::new("database", Transport::Tcp, address(&database, 0), framing);
        let victim = Service { backends: vec![backend], ..misbehaving(mode, Rings::Doorbell) };
        let bystander = Service::new("echo", vec![udp()], "echo");
        let server = start(topology_on(placement, vec![victim, bystander]));
        let client = udp_client(address(&server, 0));
        // provokes: mqueue_dead
        eventually("dead", || {
            client.send(&message(0, 1000)).unwrap();
            dropped(&server, 0, DropReason::MqueueDead) > 0
        });
        bystander_is_well(&server);
        assert_accounts(&server);
        // Open backend requests of the block must not keep the worker awake.
        let slept = || server.metrics().workers().map(|w| w.sleep_ns.value()).sum::<u64>();
        let before = slept();
        eventually("its worker sleeps again", || slept() > before);
        assert!(server.shutdown().is_clean(), "{mode:?}");
    }
    assert!(database.shutdown().is_clean());
}

#[test]
fn a_kernel_that_returns_leaves_no_accelerator() {
    // provokes: mqueue_dead
    contained_in(Mode::Returns, &[Rings::Doorbell], DropReason::MqueueDead);
    // All blocks have ended: further requests are dropped at once.
    for workers in [1, 2] {
        let server = endure(Mode::Returns, Rings::Auto, CpuPlacement::Worker, workers);
        let client = udp_client(address(&server, 0));
        client.send(&message(20, 0)).unwrap();
        // provokes: no_accelerator
        eventually("counted", || dropped(&server, 0, DropReason::NoAccelerator) > 0);
        let mut stream = tcp_client(address(&server, 1));
        stream.write_all(&message(21, 0)).unwrap();
        assert_closed(&mut stream);
        bystander_is_well(&server);
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

fn assert_closed(stream: &mut TcpStream) {
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("the connection stays open: {other:?}"),
    }
}

/// In a separate process, because the thread that never returns keeps a core busy until the end.
#[test]
fn a_kernel_that_never_returns_is_reported_and_left_running() {
    let library = build_kernel("device/tests/misbehave.cpp");
    let service = |name: &str, accelerator: &str, kernel: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nlisten = \"udp://127.0.0.1:0\"\n\
             accelerator = \"{accelerator}\"\nkernel = \"{kernel}\"\n"
        )
    };
    let config = [
        "[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\nplacement = \"threads\"\nthreads = 1\nhang_ms = 2000\n",
        "[[accelerator]]\nname = \"acc1\"\nkind = \"cpu\"\nplacement = \"threads\"\nthreads = 1\n",
        &service("victim", "acc0", &format!("{library}:misbehave")),
        &format!("params = {{ mode = {}, after = {AFTER} }}\n", Mode::Hangs as u32),
        "mqueues = 2\nslots = 256\nrequest_timeout_ms = 2000\n",
        &service("echo", "acc1", "echo"),
    ];
    let served = Served::start("hang", "drain_ms = 1000", &config.concat());
    let client = udp_client(served.services[0][0]);
    for number in 0..AFTER {
        assert_eq!(ask(&client, &message(0, number)), message(0, number));
    }
    // Those that are sent shortly before it is found have not timed out yet.
    // provokes: mqueue_dead
    eventually("the hanging block is found", || {
        client.send(&message(0, 0)).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        served.dropped("victim", DropReason::MqueueDead) > 0
    });
    let bystander = udp_client(served.services[1][0]);
    for salt in 0..100 {
        let message = pattern(50, salt);
        assert_eq!(ask(&bystander, &message), message);
    }
    assert_eq!(served.drain(), 3, "a kernel hung");
}
