//! More load than a service can bear: what is too much is shed early, with a reason; what is answered is
//! answered right; and draining still works.

mod common;

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::change::change;
use common::*;
use engine::topology::{CpuPlacement, Dispatch, Service, Topology};
use server::Server;
use server::exporter::page::Page;
use server::exporter::{Exporter, Health};
use wire::framing::Framing;
use wire::nic::UDP_PAYLOAD_MAX;
use wire::{DropReason, DropScope};

fn slow(kernel: &str, microseconds: f64) -> Service {
    Service {
        params: vec![("microseconds".into(), microseconds.into())],
        framing: Framing::Fixed(32),
        mqueues: 2,
        slots: 16,
        request_timeout_ms: 20_000,
        ..Service::new(kernel, vec![udp(), tcp()], kernel)
    }
}

/// The slow service (listeners 0 and 1) on accelerator threads, so that a computing kernel does not keep
/// the worker from the network; the bystander (listener 2) has a thread of its own.
fn with_bystander(service: Service) -> Topology {
    let bystander = Service::new("echo", vec![udp()], "echo");
    topology_on(CpuPlacement::Threads { threads: 1, cores: Vec::new() }, vec![service, bystander])
}

/// Clients that send far more than is answered, each checking what comes back.
struct Flood {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Flooded>>,
}

/// What became of a flood.
#[derive(Default)]
struct Flooded {
    sent: u64,
    answered: u64,
    /// Replies for which the sockets of the clients had no room.
    overflowed: u64,
}

/// Datagrams for which the socket at this port of the loopback had no room.
fn overflowed(port: u16) -> u64 {
    let table = std::fs::read_to_string("/proc/net/udp").unwrap();
    let local = format!("0100007F:{port:04X}");
    let is_own = |line: &&str| line.split_whitespace().nth(1) == Some(local.as_str());
    let line = table.lines().find(is_own).expect("an open socket");
    line.split_whitespace().last().unwrap().parse().unwrap()
}

impl Flood {
    /// `ordered`: replies come in the order of their requests.
    fn start(server: SocketAddr, clients: u64, ordered: bool) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let client = |client: u64| {
            let stop = stop.clone();
            thread::spawn(move || {
                let socket = udp_client(server);
                socket.set_nonblocking(true).unwrap();
                let (mut sent, mut next) = (0, 0);
                let mut answered = HashSet::new();
                let mut reply = [0; 100];
                loop {
                    // What has arrived before the end is read.
                    let over = stop.load(Ordering::Relaxed);
                    for _ in 0..if over { 0 } else { 32 } {
                        // An error is a full socket buffer, or the refusal of a server that is gone.
                        let _ = socket.send(&numbered(client, sent));
                        sent += 1;
                    }
                    loop {
                        let len = match socket.recv(&mut reply) {
                            Ok(len) => len,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                            // The refusal of a server that is gone; replies may lie behind it.
                            Err(_) => continue,
                        };
                        let number = u64::from_le_bytes(reply[8..16].try_into().unwrap());
                        assert_eq!(reply[..len], numbered(client, number), "not this client's");
                        assert!(number < sent, "the reply to a request that was not sent");
                        assert!(answered.insert(number), "request {number} was answered twice");
                        assert!(!ordered || number >= next, "{number} after {next}");
                        next = number;
                    }
                    if over {
                        break;
                    }
                    thread::sleep(Duration::from_micros(50));
                }
                let overflowed = overflowed(socket.local_addr().unwrap().port());
                Flooded { sent, answered: answered.len() as u64, overflowed }
            })
        };
        let clients = (0..clients).map(client).collect();
        Self { stop, clients }
    }

    fn stop(self) -> Flooded {
        self.stop.store(true, Ordering::Relaxed);
        let each = self.clients.into_iter().map(|client| client.join().unwrap());
        each.fold(Flooded::default(), |sum, flooded| Flooded {
            sent: sum.sent + flooded.sent,
            answered: sum.answered + flooded.answered,
            overflowed: sum.overflowed + flooded.overflowed,
        })
    }
}

fn numbered(client: u64, number: u64) -> Vec<u8> {
    let mut message = pattern(32, (client * 7919 + number) as usize);
    message[..8].copy_from_slice(&client.to_le_bytes());
    message[8..16].copy_from_slice(&number.to_le_bytes());
    message
}

fn bystander_is_well(server: &Server) {
    for salt in 0..5 {
        let message = pattern(100, salt);
        assert_eq!(ask(&udp_client(address(server, 2)), &message), message);
    }
}

#[test]
fn a_flood_is_shed_with_a_reason_and_the_rest_is_answered() {
    for kernel in ["delay", "spin"] {
        // The flow hash keeps each client on one mqueue: its replies stay in order, which the flood
        // checks.
        let service = Service { dispatch: Dispatch::FlowHash, ..slow(kernel, 1000.0) };
        let server = start(with_bystander(service));
        let flood = Flood::start(address(&server, 0), 3, true);
        // provokes: no_credit
        eventually("shed", || dropped(&server, 0, DropReason::NoCredit) > 1000);
        bystander_is_well(&server);
        let answered = server.metrics().service(0).replied;
        eventually("others are answered", || server.metrics().service(0).replied > answered + 100);
        let Flooded { sent, answered, .. } = flood.stop();
        assert_accounts(&server);
        assert!(answered > 0 && answered < sent, "{answered} of {sent}");
        // The overload is over: nothing of it lingers.
        let client = udp_client(address(&server, 0));
        for number in 0..20 {
            assert_eq!(ask(&client, &numbered(99, number)), numbered(99, number));
        }
        assert!(server.shutdown().is_clean());
    }
}

/// How a client of [`goodput`] asks.
#[derive(Clone, Copy)]
enum Asking {
    /// With this many requests in flight.
    Window(usize),
    /// So often a second, whatever is answered.
    Rate(f64),
}

/// An answer that comes later than this is worth nothing. Full queues here are 16 ms long.
const LATE: Duration = Duration::from_millis(250);

/// Right answers in time, a second.
fn goodput(client: &UdpSocket, asking: Asking, first: u64) -> f64 {
    let (mut sent, mut good) = (0, 0);
    let mut waiting: HashMap<u64, Instant> = HashMap::new();
    let mut reply = [0; 100];
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(400) {
        waiting.retain(|_, asked| asked.elapsed() < LATE);
        let due = match asking {
            Asking::Window(window) => window.saturating_sub(waiting.len()),
            Asking::Rate(rate) => (start.elapsed().as_secs_f64() * rate) as usize - sent,
        };
        for _ in 0..due.min(64) {
            let number = first + sent as u64;
            // An error means a full socket buffer: then there is no answer.
            let _ = client.send(&numbered(1, number));
            waiting.insert(number, Instant::now());
            sent += 1;
        }
        while let Ok(len) = client.recv(&mut reply) {
            let number = u64::from_le_bytes(reply[8..16].try_into().unwrap());
            assert_eq!(reply[..len], numbered(1, number), "a wrong answer");
            good += u32::from(waiting.remove(&number).is_some_and(|at| at.elapsed() < LATE));
        }
        thread::sleep(Duration::from_micros(200));
    }
    f64::from(good) / start.elapsed().as_secs_f64()
}

/// The peak and twice as much take turns, so that whatever else the machine does touches both alike; the median of all rounds
/// counts.
#[test]
fn goodput_holds_at_twice_the_load() {
    const ROUNDS: u64 = 7;
    // Each of them answers one request a millisecond.
    let service = Service { mqueues: 8, ..slow("delay", 1000.0) };
    let server = start(with_bystander(service));
    let client = udp_client(address(&server, 0));
    client.set_nonblocking(true).unwrap();
    let share = |round: u64| {
        let first = round << 32;
        let peak = goodput(&client, Asking::Window(48), first);
        assert_accounts(&server);
        let overloaded = goodput(&client, Asking::Rate(2.0 * peak), first | 1 << 31);
        assert_accounts(&server);
        // Answers to what was given up.
        while client.recv(&mut [0; 100]).is_ok() {}
        overloaded / peak
    };
    let mut shares: Vec<f64> = (0..ROUNDS).map(share).collect();
    shares.sort_by(f64::total_cmp);
    let median = shares[shares.len() / 2];
    assert!(median >= 0.8, "{median:.3} of the peak at twice its load: {shares:.3?}");
    assert!(dropped(&server, 0, DropReason::NoCredit) > 0, "it was more than it could bear");
    assert!(server.shutdown().is_clean());
}

#[test]
fn requests_that_would_wait_too_long_are_shed_before_the_queue_is_full() {
    // Each mqueue holds a second of work; five milliseconds are allowed.
    let service = Service { slots: 1024, queue_us_max: 5000, ..slow("delay", 1000.0) };
    let server = start(with_bystander(service));
    let flood = Flood::start(address(&server, 0), 2, false);
    // provokes: queue_time
    eventually("shed", || dropped(&server, 0, DropReason::QueueTime) > 1000);
    bystander_is_well(&server);
    flood.stop();
    assert_accounts(&server);
    let client = udp_client(address(&server, 0));
    assert_eq!(ask(&client, &numbered(99, 1)), numbered(99, 1));
    assert!(server.shutdown().is_clean());
}

#[test]
fn what_the_host_kernel_drops_is_counted_too() {
    let max = UDP_PAYLOAD_MAX as u32;
    let service = Service {
        max_message_bytes: max,
        max_reply_bytes: max,
        framing: Framing::Raw,
        mqueues: 1,
        slots: 1,
        // On the worker: while it computes, the socket is not read.
        ..slow("spin", 100_000.0)
    };
    let server = start(topology(vec![service]));
    let client = udp_client(address(&server, 0));
    let mut reply = vec![0; UDP_PAYLOAD_MAX];
    for round in 0..3 {
        let message = pattern(60_000, round);
        // 60 MB: more than any socket buffer takes.
        for _ in 0..1000 {
            client.send(&message).unwrap();
        }
        // provokes: socket_overflow
        eventually("counted", || {
            client.send(b"wakes the counter").unwrap();
            dropped(&server, 0, DropReason::SocketOverflow) > 0
        });
        assert!(receive(&client, &mut reply).unwrap() > 0, "the first of them is answered");
    }
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn connections_wait_instead_of_losing_anything() {
    // Also while datagrams ask for every place that becomes free.
    let server = start(with_bystander(slow("delay", 500.0)));
    let flood = Flood::start(address(&server, 0), 6, false);
    let clients: Vec<JoinHandle<()>> = (0..4)
        .map(|client| {
            let server = address(&server, 1);
            thread::spawn(move || {
                let mut stream = tcp_client(server);
                let requests: Vec<u8> = (0..300).flat_map(|n| numbered(client, n)).collect();
                stream.write_all(&requests).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut replies = Vec::new();
                stream.read_to_end(&mut replies).unwrap();
                assert!(replies == requests, "{} of {} bytes", replies.len(), requests.len());
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    bystander_is_well(&server);
    flood.stop();
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn draining_under_load_answers_what_was_accepted() {
    for workers in [1, 2] {
        let mut settings = with_bystander(slow("delay", 1000.0));
        settings.engine.workers = workers;
        settings.engine.drain_ms = 15_000;
        let server = start(settings);
        let metrics = server.metrics();
        let flood = Flood::start(address(&server, 0), 2, false);
        let mut stream = tcp_client(address(&server, 1));
        // More than the window: some wait outside when the drain begins.
        let requests: Vec<u8> = (0..400).flat_map(|n| numbered(50, n)).collect();
        stream.write_all(&requests).unwrap();
        let mut first = [0; 32];
        stream.read_exact(&mut first).unwrap();
        eventually("the flood is on", || {
            metrics.service(0).replied > 50 && metrics.service(0).outstanding() > 20
        });
        let report = server.shutdown();
        assert!(report.is_clean(), "{report:?}");
        let counted = metrics.service(0);
        assert_eq!(counted.outstanding(), 0, "{counted:?}");
        // provokes: draining
        assert!(counted.dropped(DropReason::Draining) > 0, "{counted:?}");
        let mut replies = first.to_vec();
        stream.read_to_end(&mut replies).unwrap();
        assert!(requests.starts_with(&replies), "{} bytes", replies.len());
        assert_eq!(replies.len() % 32, 0, "a reply is cut");
        let Flooded { sent, answered, overflowed } = flood.stop();
        assert!(answered > 0 && answered < sent);
        // What was neither refused for its number nor because of the drain was accepted: each of these was answered, and every
        // answer arrived.
        let refused = counted.dropped(DropReason::NoCredit) + counted.dropped(DropReason::Draining);
        assert_eq!(counted.received, counted.replied + refused, "{counted:?}");
        let on_the_stream = replies.len() as u64 / 32;
        let arrived = on_the_stream + answered + overflowed;
        assert_eq!(
            counted.replied, arrived,
            "{on_the_stream} on the stream, {overflowed} without room"
        );
    }
}

/// Whether a page shows at least as many requests received as ended, for a service.
fn books_hold(page: &Page, service: &str) -> Result<(), String> {
    let of = |labels: &[(&'static str, &'static str)]| [&[("service", service)], labels].concat();
    let value = |name: &str| page.value(name, &of(&[])).unwrap();
    let reasons = DropReason::ALL.iter().filter(|r| r.scope() == DropScope::Request);
    let dropped: f64 = reasons
        .map(|r| page.value("serval_dropped_total", &of(&[("reason", r.name())])).unwrap())
        .sum();
    let received = value("serval_requests_received_total");
    let ended = value("serval_replies_total") + value("serval_consumed_total") + dropped;
    let outstanding = value("serval_outstanding_requests");
    match received == ended + outstanding {
        true => Ok(()),
        false => Err(format!("{received} received, {ended} ended, {outstanding} outstanding")),
    }
}

#[test]
fn the_accounting_identity_holds_at_every_scrape() {
    let mut settings = with_bystander(slow("delay", 500.0));
    settings.engine.workers = 2;
    let mut server = start(settings);
    let metrics = server.metrics();
    let health = Arc::new(Health::default());
    let exporter = Exporter::start(([127, 0, 0, 1], 0).into(), metrics.clone(), health).unwrap();
    let scrape = || Page::parse(page(exporter.address()).split_once("\r\n\r\n").unwrap().1);
    let flood = Flood::start(address(&server, 0), 3, false);
    eventually("shed", || dropped(&server, 0, DropReason::NoCredit) > 1000);
    let (scrapes, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let shown = scrape();
                    for service in ["delay", "echo"] {
                        books_hold(&shown, service).unwrap();
                    }
                    scrapes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let s = metrics.service(0);
                let ended = s.replied + s.consumed + s.dropped_requests();
                assert!(s.received >= ended, "{ended} ended of {s:?}");
            }
        });
        let _stop = Stop(&stop);
        for slots in [8, 32] {
            let from = scrapes.load(Ordering::Relaxed);
            eventually("scrapes", || scrapes.load(Ordering::Relaxed) > from + 100);
            let mut services = server.topology().services.clone();
            services[0].slots = slots;
            change(&mut server, services);
        }
        let from = scrapes.load(Ordering::Relaxed);
        eventually("scrapes", || scrapes.load(Ordering::Relaxed) > from + 100);
    });
    flood.stop();
    assert_accounts(&server);
    let shown = scrape();
    assert_eq!(shown.value("serval_outstanding_requests", &[("service", "delay")]), Some(0.0));
    books_hold(&shown, "delay").unwrap();
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_drain_does_not_wait_for_ever() {
    let service = Service { request_timeout_ms: 60_000, ..slow("delay", 9_000_000.0) };
    let mut settings = with_bystander(service);
    settings.engine.drain_ms = 200;
    let server = start(settings);
    let metrics = server.metrics();
    let client = udp_client(address(&server, 0));
    for number in 0..5 {
        client.send(&numbered(0, number)).unwrap();
    }
    eventually("accepted", || metrics.service(0).accepted == 5);
    let report = server.shutdown();
    // provokes: drain_timeout
    assert_eq!(metrics.service(0).dropped(DropReason::DrainTimeout), 5);
    assert_eq!((report.unanswered, report.hung), (5, false));
}

#[test]
fn a_long_message_without_room_does_not_keep_short_ones_out() {
    let long = 8000;
    let service = Service {
        params: vec![("microseconds".into(), 20_000.0.into())],
        framing: Framing::Fixed(long),
        mqueues: 1,
        max_message_bytes: long,
        max_reply_bytes: long,
        request_timeout_ms: 20_000,
        ..Service::new("delay", vec![udp(), tcp()], "delay")
    };
    let server = start(topology(vec![service]));
    // More than the arena has room for: the rest is held, and tried again every turn.
    let mut stream = tcp_client(address(&server, 1));
    let requests: Vec<u8> = (0..12).flat_map(|n| pattern(long as usize, n)).collect();
    stream.write_all(&requests).unwrap();
    eventually("the arena is full", || server.metrics().service(0).accepted >= 4);
    let clients: Vec<_> = (0..20)
        .map(|n| {
            let client = udp_client(address(&server, 0));
            client.send(&pattern(32, n)).unwrap();
            thread::sleep(Duration::from_micros(300));
            client
        })
        .collect();
    for (n, client) in clients.iter().enumerate() {
        let mut reply = [0; 64];
        let len = receive(client, &mut reply).expect("short ones are answered");
        assert_eq!(reply[..len], pattern(32, n));
    }
    let mut replies = vec![0; requests.len()];
    stream.read_exact(&mut replies).unwrap();
    assert_eq!(replies, requests);
    assert_eq!(dropped(&server, 0, DropReason::NoCredit), 0);
    assert_accounts(&server);
}
