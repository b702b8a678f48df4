//! The measuring harness against a real server, and against servers that spoil a measurement.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use engine::topology::{Backend, Service};
use serval::bench::{self, BenchError, Bottleneck, Class, Mode, Plan, Report, Target, Void, Work};
use serval::client::workload::{Custom, Expect};
use serval::server::Server;
use wire::DropReason;
use wire::framing::{Framing, ParseState, Parsed};
use wire::nic::Transport;

use common::faces::Memcached;
use common::{PATIENCE, Served, address, assert_accounts, start, tcp, topology, udp};

/// A path that no other test uses.
fn memory_port(work: &Work) -> PathBuf {
    std::env::temp_dir().join(format!("serval-bench-{}-{}", std::process::id(), kernel(work)))
}

fn kernel(work: &Work) -> String {
    work.to_string().split(':').next().unwrap().to_owned()
}

/// A service of `work` with a UDP and a TCP port.
fn serve(work: Work) -> Server {
    serve_at(&work, &[])
}

/// The same, and in shared memory.
fn serve_at(work: &Work, paths: &[PathBuf]) -> Server {
    let mut service = Service::new("a", vec![udp(), tcp()], &kernel(work));
    service.memory_ports = paths.to_vec();
    service.framing = match work {
        Work::Echo { .. } => Framing::LengthU16,
        Work::Sockperf { .. } => Framing::Sockperf,
        _ => Framing::Fixed(work.request_bytes() as u32),
    };
    start(topology(vec![service]))
}

fn plan(target: &Target, work: Work, window: usize) -> Plan {
    Plan {
        work,
        mode: Mode::Closed { window },
        warmup: Duration::from_millis(50),
        duration: Duration::from_millis(400),
        timeout: Some(PATIENCE),
        // What a busy machine does to a run is no fault of it.
        stolen_max: 1.0,
        ..Plan::new(target.clone())
    }
}

fn sound(report: &Report) {
    // A client that had no core for long, or no time left, sends late, leaves part of its window unused and gets few
    // replies.
    let busy = |share: f64| report.stolen > share;
    let excused = match report.void() {
        None | Some(Void::Few(_)) => true,
        Some(Void::Unsent(share, _)) => busy(0.02_f64.min(share / 2.0)),
        Some(Void::Little(_)) => busy(0.02) || report.bottleneck() == Bottleneck::Client,
        _ => false,
    };
    assert!(excused, "{report:?}");
    assert_eq!((report.wrong, report.duplicated, report.lost), (0, 0, 0), "{report:?}");
    assert!(report.replied > 0 && report.sent == report.replied, "{report:?}");
    let l = &report.latency;
    assert!(l.p50_ns <= l.p90_ns && l.p90_ns <= l.p99_ns && l.p999_ns <= l.max_ns, "{report:?}");
    if report.void().is_none() {
        assert!((0.9..=1.1).contains(&report.little), "{report:?}");
        assert!(report.client_busy > 0.0 && report.client_busy <= 1.0, "{report:?}");
    }
}

#[test]
fn every_class_and_mode_measures_a_real_server() {
    for work in [
        Work::Echo { bytes: 64 },
        Work::Sockperf { bytes: 100 },
        Work::Scale { numbers: 16 },
        Work::Lenet,
    ] {
        let path = memory_port(&work);
        let server = serve_at(&work, std::slice::from_ref(&path));
        let (udp, tcp) = (Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1)));
        let shm = Target::Shm(path);
        for target in [&udp, &tcp, &shm] {
            for window in [1, 16] {
                sound(&bench::run(&plan(target, work.clone(), window)).unwrap());
            }
            let open = Plan { mode: Mode::Open { rate: 2000.0 }, ..plan(target, work.clone(), 1) };
            sound(&bench::run(&open).unwrap());
        }
        let burst = Plan { class: Some(Class::T2), ..plan(&udp, work.clone(), 64) };
        if work.has_identity() {
            sound(&bench::run(&burst).unwrap());
            let shared = Plan { connections: Some(3), ..plan(&udp, work, 64) };
            sound(&bench::run(&shared).unwrap());
        }
    }
}

/// Clients on several cores are one client: what is asked is in flight once, whoever asks it.
#[test]
fn several_clients_share_what_is_asked() {
    let work = Work::Echo { bytes: 64 };
    let path = std::env::temp_dir().join(format!("serval-bench-{}-shared", std::process::id()));
    let server = serve_at(&work, std::slice::from_ref(&path));
    let allowed = sys::affinity::allowed_cores().unwrap();
    let cores = vec![allowed[0], *allowed.last().unwrap(), allowed[0]];
    let (udp, tcp) = (Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1)));
    for target in [udp.clone(), tcp, Target::Shm(path)] {
        let shared = Plan { cores: cores.clone(), ..plan(&target, work.clone(), 8) };
        let report = bench::run(&shared).unwrap();
        sound(&report);
        assert!(report.in_flight <= 8.5, "{report:?}");
    }
    let shared = Plan { cores: cores.clone(), ..plan(&udp, work, 8) };
    let burst = Plan { class: Some(Class::T2), ..shared.clone() };
    sound(&bench::run(&burst).unwrap());
    let open = Plan { mode: Mode::Open { rate: 900.0 }, ..shared.clone() };
    let report = bench::run(&open).unwrap();
    // 360 arrivals are expected; three clients that ask all of it each would be 1080.
    assert!(report.sent < 700, "{report:?}");
}

#[test]
fn bursts_without_identity_need_the_order_kept() {
    let mut service = Service::new("a", vec![udp()], "lenet");
    service.framing = Framing::Fixed(784);
    // One mqueue keeps the order of all flows.
    service.mqueues = 1;
    let server = start(topology(vec![service]));
    let target = Target::Udp(address(&server, 0));
    let burst = Plan { class: Some(Class::T2), ..plan(&target, Work::Lenet, 32) };
    sound(&bench::run(&burst).unwrap());
}

/// Every reply was right, whatever else a busy machine did to the run.
fn right(report: &Report) {
    assert_eq!((report.wrong, report.duplicated, report.lost), (0, 0, 0), "{report:?}");
    assert!(report.replied > 0 && report.sent == report.replied, "{report:?}");
}

fn memcached_work(text: &str) -> Work {
    text.parse().unwrap()
}

#[test]
fn a_memcached_is_measured_and_every_value_compared() {
    let memcached = Memcached::start();
    let target = Target::Tcp(memcached.address());
    for (text, ratio) in
        [("memcached:100:80", 0.99), ("memcached:0:50", 0.99), ("faces-database", 0.6)]
    {
        let closed = |window| plan(&target, memcached_work(text), window);
        let open = Plan { mode: Mode::Open { rate: 2000.0 }, ..closed(1) };
        let several = Plan { connections: Some(8), ..closed(64) };
        for plan in [closed(1), closed(16), several, open] {
            let report = bench::run(&plan).unwrap();
            right(&report);
            assert!(report.hit_ratio.unwrap() > ratio, "{text}: {report:?}");
            // Of the faces one of three is unknown.
            assert!(ratio > 0.9 || report.hit_ratio.unwrap() < 0.74, "{text}: {report:?}");
        }
    }
    let sets = bench::run(&plan(&target, memcached_work("memcached:10:0"), 4)).unwrap();
    assert_eq!(sets.hit_ratio, None);
}

/// What is wrong with an answer.
#[derive(Clone, Copy)]
enum Spoil {
    Value,
    /// The block of data does not end where it should.
    Ending,
    /// Something follows that nobody asked for and that is no answer.
    Beyond,
}

/// A TCP server on a thread of its own that cuts what it reads into messages: `answer` is given each.
struct FakeTcp {
    target: Target,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeTcp {
    fn start(framing: Framing, mut answer: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let target = Target::Tcp(listener.local_addr().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut streams = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true).unwrap();
                    streams.push((stream, Vec::new(), ParseState::default()));
                }
                for (stream, read, state) in &mut streams {
                    let mut bytes = [0; 65_536];
                    let count = stream.read(&mut bytes).unwrap_or(0);
                    read.extend_from_slice(&bytes[..count]);
                    while let Ok(Parsed::Message { consumed, .. }) =
                        framing.parse_request(state, read, 1 << 20)
                    {
                        let reply = answer(&read[..consumed]);
                        read.drain(..consumed);
                        // The client may have closed; what does not fit at once is lost, as it may be.
                        let _ = stream.write(&reply);
                    }
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self { target, stop, thread: Some(thread) }
    }

    fn memcached(answer: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static) -> Self {
        Self::start(Framing::Memcached, answer)
    }

    /// A memcached that is right until it has been asked `gets` times.
    fn liar(gets: u64) -> Self {
        Self::spoiling(gets, Spoil::Value)
    }

    fn spoiling(gets: u64, spoil: Spoil) -> Self {
        let mut store = std::collections::HashMap::new();
        let mut asked = 0;
        Self::memcached(move |request| {
            let line = request.split(|byte| *byte == b'\r').next().unwrap();
            let key = line.split(|byte| *byte == b' ').nth(1).unwrap().to_vec();
            let data = &request[line.len() + 2..];
            if line.starts_with(b"set ") {
                store.insert(key, data.to_vec());
                return b"STORED\r\n".to_vec();
            }
            asked += 1;
            let mut value: Vec<u8> = store[&key].clone();
            let (len, mut end) = (value.len() - 2, &b"END\r\n"[..]);
            match spoil {
                _ if asked <= gets => {}
                Spoil::Value => value[5] ^= 1,
                Spoil::Ending => value[len] = b'x',
                Spoil::Beyond => end = b"END\r\nVALUE of nothing\r\n",
            }
            let head = format!("VALUE {} 0 {len}\r\n", String::from_utf8_lossy(&key));
            [head.as_bytes(), &value, end].concat()
        })
    }

    fn run(&self) -> Result<Report, BenchError> {
        bench::run(&plan(&self.target, memcached_work("memcached:100:100"), 4))
    }
}

impl Drop for FakeTcp {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
fn who_is_no_memcached_is_refused_and_who_lies_later_is_caught() {
    type Answer = fn(&[u8]) -> Vec<u8>;
    let answers: [Answer; 5] = [
        |_| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        |_| Vec::new(),
        |_| b"ERROR\r\n".to_vec(),
        |request| request.to_vec(),
        // It forgets everything.
        |request| if request[0] == b's' { b"STORED\r\n".to_vec() } else { b"END\r\n".to_vec() },
    ];
    let strangers = answers.map(FakeTcp::memcached).into_iter().chain([FakeTcp::liar(0)]);
    for (number, stranger) in strangers.enumerate() {
        let error = stranger.run().expect_err("it is no memcached");
        assert!(matches!(error, BenchError::NotMemcached { .. }), "{number}: {error}");
        assert!(error.to_string().contains("is it a memcached"), "{error}");
    }
    for spoil in [Spoil::Value, Spoil::Ending, Spoil::Beyond] {
        let report = FakeTcp::spoiling(20, spoil).run().unwrap();
        assert!(matches!(report.void(), Some(Void::Wrong(1.., _))), "{report:?}");
    }
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = bench::run(&plan(&Target::Tcp(nobody), memcached_work("memcached"), 4));
    assert!(matches!(nobody, Err(BenchError::Unreachable(_))), "{nobody:?}");
}

#[test]
fn a_memcached_that_stores_slowly_is_not_called_something_else() {
    let mut sets = 0;
    // The fifth set is never answered.
    let slow = FakeTcp::memcached(move |_| {
        sets += 1;
        if sets == 5 { Vec::new() } else { b"STORED\r\n".to_vec() }
    });
    let error = slow.run().expect_err("not all is stored");
    assert!(matches!(error, BenchError::Unstored { .. }), "{error}");
    let plan = plan(&slow.target, memcached_work("memcached:100:100"), 4);
    plan.cancel.store(true, Ordering::Relaxed);
    assert_eq!(bench::run(&plan).unwrap().void(), Some(&Void::Interrupted));
}

/// Longer than what lies in a slot.
const LONG_BYTES: usize = 2000;
const _: () = assert!(LONG_BYTES > mqueue::abi::INLINE_BYTES_MAX as usize);

/// A service of faces, its memcached, which knows them, and how many requests have room.
fn faces() -> (Memcached, Server, usize) {
    let memcached = Memcached::start();
    let database = Target::Tcp(memcached.address());
    right(&bench::run(&plan(&database, Work::FacesDatabase, 16)).unwrap());
    let backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    let service = Service {
        mqueues: 4,
        slots: 8,
        max_message_bytes: 1036,
        request_timeout_ms: 15_000,
        backends: vec![Backend { timeout_ms: 10_000, ..backend }],
        ..Service::new("faces", vec![udp()], "faces")
    };
    let server = start(topology(vec![service]));
    (memcached, server, 4 * 8)
}

/// A service whose messages are longer than a slot, and how many requests have room if the arena does not say otherwise.
fn long_messages(arena_bytes: u64) -> (Server, usize) {
    let service = Service {
        mqueues: 4,
        slots: 8,
        arena_bytes,
        max_message_bytes: LONG_BYTES as u32,
        max_reply_bytes: LONG_BYTES as u32,
        params: vec![("microseconds".into(), 1000.0)],
        request_timeout_ms: 15_000,
        ..Service::new("long", vec![udp()], "delay")
    };
    (start(topology(vec![service])), 4 * 8)
}

/// All that a service lost, but for one reason.
fn lost_otherwise(server: &Server, reason: DropReason) -> u64 {
    let counted = server.metrics().service(0);
    counted.drops.iter().sum::<u64>() - counted.dropped(reason)
}

#[test]
fn a_window_that_fits_the_slots_loses_nothing_although_messages_are_longer_than_a_slot() {
    let (_memcached, faces, room) = faces();
    let (long, long_room) = long_messages(0);
    let echo = Work::Echo { bytes: LONG_BYTES };
    for (server, work, window) in [(faces, Work::Faces, room), (long, echo, long_room)] {
        let target = Target::Udp(address(&server, 0));
        let report = bench::run(&plan(&target, work, window)).unwrap();
        right(&report);
        assert_accounts(&server);
        assert_eq!(server.metrics().service(0).drops.iter().sum::<u64>(), 0);
    }
}

#[test]
fn what_has_no_room_is_lost_where_it_arrives_and_nowhere_else() {
    // Slots for half of them; then slots for all, but an arena for half of them.
    let (_memcached, faces, room) = faces();
    let (long, long_room) = long_messages(1);
    let echo = Work::Echo { bytes: LONG_BYTES };
    for (server, work, window) in [(faces, Work::Faces, 2 * room), (long, echo, long_room)] {
        let target = Target::Udp(address(&server, 0));
        let timeout = Some(Duration::from_millis(300));
        let crowded = Plan { timeout, ..plan(&target, work, window) };
        let report = bench::run(&crowded).unwrap();
        // No verdict says that the database was not there.
        assert_eq!((report.wrong, report.duplicated), (0, 0), "{report:?}");
        assert_accounts(&server);
        assert!(server.metrics().service(0).dropped(DropReason::NoCredit) > 0, "{report:?}");
        assert_eq!(
            lost_otherwise(&server, DropReason::NoCredit),
            0,
            "{:?}",
            server.metrics().service(0)
        );
    }
}

/// A UDP server on a thread of its own: `answer` is given each request and its number.
struct Fake {
    target: Target,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Fake {
    fn start(mut answer: impl FnMut(u64, &[u8]) -> Vec<Vec<u8>> + Send + 'static) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let target = Target::Udp(socket.local_addr().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut buffer, mut n) = ([0; 4096], 0);
            while !stopped.load(Ordering::Relaxed) {
                let Ok((len, peer)) = socket.recv_from(&mut buffer) else { continue };
                for reply in answer(n, &buffer[..len]) {
                    // The client may have closed the socket it asked from.
                    let _ = socket.send_to(&reply, peer);
                }
                n += 1;
            }
        });
        Self { target, stop, thread: Some(thread) }
    }

    fn report(&self, change: impl FnOnce(&mut Plan)) -> Report {
        let mut plan = plan(&self.target, Work::Echo { bytes: 32 }, 4);
        plan.timeout = Some(Duration::from_millis(50));
        change(&mut plan);
        bench::run(&plan).unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn burst(plan: &mut Plan) {
    plan.class = Some(Class::T2);
}

#[test]
fn one_wrong_reply_spoils_a_run() {
    for change in [|_: &mut Plan| (), burst] {
        let fake = Fake::start(|n, request| {
            let mut reply = request.to_vec();
            reply[20] ^= u8::from(n == 50);
            vec![reply]
        });
        let report = fake.report(change);
        assert_eq!(report.void(), Some(&Void::Wrong(1, "")), "{report:?}");
        assert_eq!(report.to_json()["trusted"], false);
    }
}

#[test]
fn repeated_replies_are_noticed_and_are_not_taken_for_others() {
    for change in [|_: &mut Plan| (), burst] {
        let fake =
            Fake::start(|n, request| vec![request.to_vec(); if n % 10 == 9 { 2 } else { 1 }]);
        let report = fake.report(change);
        assert!(matches!(report.void(), Some(Void::Duplicated(1..))), "{report:?}");
        assert_eq!(report.wrong, 0, "{report:?}");
    }
}

#[test]
fn a_server_that_dies_makes_the_run_void() {
    for change in [|_: &mut Plan| (), burst] {
        let fake = Fake::start(|n, request| if n < 40 { vec![request.to_vec()] } else { vec![] });
        let report = fake.report(change);
        assert!(matches!(report.void(), Some(Void::Silent(..))), "{report:?}");
    }
}

#[test]
fn losses_make_a_closed_loop_void_and_are_counted_in_an_open_one() {
    let open = |plan: &mut Plan| plan.mode = Mode::Open { rate: 2000.0 };
    for (closed, change) in [(true, (|_| ()) as fn(&mut Plan)), (true, burst), (false, open)] {
        let fake =
            Fake::start(|n, request| if n % 50 == 7 { vec![] } else { vec![request.to_vec()] });
        let report = fake.report(change);
        assert!(report.lost > 0 && report.wrong == 0 && report.duplicated == 0, "{report:?}");
        // (Where the machine gives the server no turn at the end, it looks as if it had ended.)
        let told = match report.void() {
            Some(Void::Lost(lost)) => Some(*lost),
            Some(Void::Silent(_, _, lost)) if closed => Some(*lost),
            _ => None,
        };
        assert_eq!(told, closed.then_some(report.lost), "{report:?}");
    }
}

#[test]
fn late_replies_are_neither_wrong_nor_repeated() {
    // Every tenth answer comes two time-outs later.
    let held = Arc::new(AtomicU64::new(0));
    let count = held.clone();
    let mut waiting = Vec::new();
    let fake = Fake::start(move |n, request| {
        if n % 10 == 9 {
            waiting.push((std::time::Instant::now(), request.to_vec()));
            count.fetch_add(1, Ordering::Relaxed);
            return vec![];
        }
        let (ripe, rest) = std::mem::take(&mut waiting)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _)| at.elapsed() > Duration::from_millis(100));
        waiting = rest;
        ripe.into_iter().map(|(_, reply)| reply).chain([request.to_vec()]).collect()
    });
    let report = fake.report(|plan| {
        burst(plan);
        plan.connections = Some(1);
    });
    assert!(held.load(Ordering::Relaxed) > 0 && report.late > 0, "{report:?}");
    assert_eq!((report.wrong, report.duplicated), (0, 0), "{report:?}");
}

#[test]
fn nobody_there_is_said_in_one_sentence() {
    let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for target in [Target::Udp(free), Target::Tcp(free)] {
        let error = bench::run(&plan(&target, Work::Echo { bytes: 64 }, 4)).unwrap_err();
        assert!(matches!(error, BenchError::Unreachable(_)), "{error}");
        assert!(error.to_string().contains(&format!("{target}: is the server running")), "{error}");
    }
}

#[test]
fn another_kernel_is_noticed_before_the_run() {
    let server = serve(Work::Scale { numbers: 16 });
    for at in [Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1))] {
        let echo =
            Plan { framing: Some(Framing::Fixed(64)), ..plan(&at, Work::Echo { bytes: 64 }, 1) };
        let error = bench::run(&echo).unwrap_err();
        assert!(matches!(error, BenchError::Stranger { .. }), "{error}");
        let says = error.to_string().contains("framing = \"fixed:64\" (what was tried; give");
        assert_eq!(says, matches!(at, Target::Tcp(_)), "{error}");
    }
}

#[test]
fn a_core_that_cannot_be_had_makes_the_run_void() {
    let fake = Fake::start(|_, request| vec![request.to_vec()]);
    let report = fake.report(|plan| plan.cores = vec![1023]);
    assert!(matches!(report.void(), Some(Void::NotPinned { core: 1023, .. })), "{report:?}");
    assert_eq!((report.sent, report.rate), (0, 0.0));
}

#[test]
fn an_interrupted_run_is_void() {
    let fake = Fake::start(|_, request| vec![request.to_vec()]);
    let report = fake.report(|plan| {
        plan.duration = Duration::from_secs(3600);
        let cancel = plan.cancel.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            cancel.store(true, Ordering::Relaxed);
        });
    });
    assert_eq!(report.void(), Some(&Void::Interrupted));
}

#[test]
fn a_rate_that_cannot_be_sent_is_not_called_measured() {
    // One answer a millisecond, in turn: at most a thousand a second, and arrivals pile up.
    let fake = Fake::start(|_, request| {
        std::thread::sleep(Duration::from_millis(1));
        vec![request.to_vec()]
    });
    let report = fake.report(|plan| {
        plan.mode = Mode::Open { rate: 1e6 };
        // What the host kernel had no room for is lost, and waited for as long as this.
        plan.timeout = Some(Duration::from_secs(2));
        plan.duration = Duration::from_millis(300);
    });
    let told = matches!(report.void(), Some(Void::Unsent(..) | Void::Few(_)));
    assert!(told, "{report:?}");
}

#[test]
fn what_the_server_spends_is_read_from_outside() {
    let service =
        "[[service]]\nname = \"echo\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";
    let served = Served::start("bench_cost", "", service);
    let plan = Plan {
        server_pid: Some(served.process.0.id()),
        duration: Duration::from_millis(600),
        ..plan(&Target::Udp(served.services[0][0]), Work::Echo { bytes: 64 }, 8)
    };
    let report = bench::run(&plan).unwrap();
    sound(&report);
    let cost = report.server_cpu_ns_per_message().expect("it was asked for");
    assert!(cost > 0.0 && report.client_cpu_ns_per_message > 0.0, "{report:?}");
    let nobody = Plan { server_pid: Some(u32::MAX), ..plan };
    assert!(matches!(bench::run(&nobody), Err(BenchError::Observe(_))));
}

/// `serval bench`, in runs of a fraction of a second that a busy machine does not spoil.
fn command(duration: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command
        .args(["bench", "--warmup", "50ms", "--duration", duration, "--stolen-max", "100"])
        .args(arguments);
    command.stdin(Stdio::null()).output().unwrap()
}

/// The same, again and for longer where the machine gave one of both sides no turn for long.
fn undisturbed(arguments: &[&str]) -> Output {
    let mut output = command("500ms", arguments);
    for duration in ["500ms", "500ms", "1s", "2s", "4s", "8s"] {
        let void = stderr(&output);
        let causes =
            ["could not be sent", "Little's law", "too few for percentiles", "nothing in the last"];
        if !causes.iter().any(|cause| void.contains(cause)) {
            break;
        }
        output = command(duration, arguments);
    }
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_command_shows_a_table_a_document_and_a_plot() {
    let server = serve(Work::Echo { bytes: 64 });
    let target = Target::Udp(address(&server, 0)).to_string();
    let plot = std::env::temp_dir().join(format!("serval-bench-{}.svg", std::process::id()));
    let path = plot.to_str().unwrap();

    let shown = undisturbed(&[&target, "--window", "1,8", "--plot", path]);
    assert!(shown.status.success(), "{}", stderr(&shown));
    let text = String::from_utf8(shown.stdout).unwrap();
    for part in ["echo:64 at udp://", "class T0", "in flight", "p99.9", "/s", path] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let svg = std::fs::read_to_string(&plot).unwrap();
    for part in
        ["<svg", "replies a second", ">latency</text>", ">p99</text>", "1 in flight, 8 in flight"]
    {
        assert!(svg.contains(part), "{part} is not in\n{svg}");
    }
    std::fs::remove_file(&plot).unwrap();

    let told = undisturbed(&[&target, "--rate", "1k", "--timeout", "20s", "--json"]);
    assert!(told.status.success(), "{}", stderr(&told));
    let json: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert!(json["machine"]["cores"].as_u64().unwrap() >= 1 && json["version"].is_string());
    let run = &json["runs"][0];
    assert_eq!((&run["mode"], &run["asked"]["rate"]), (&"open".into(), &1000.0.into()), "{json}");
    assert!(run["rate"].as_f64().unwrap() > 0.0 && run["void"].is_null(), "{json}");
    assert_eq!(run["sent"], run["replied"], "{json}");
}

#[test]
fn an_untrusted_run_shows_its_numbers_marked_and_fails() {
    let fake = Fake::start(|n, request| vec![request.to_vec(); if n > 10 { 2 } else { 1 }]);
    let target = fake.target.to_string();
    let plot = std::env::temp_dir().join(format!("serval-untrusted-{}.svg", std::process::id()));
    let arguments = [&target, "--window", "1", "--plot", plot.to_str().unwrap()];
    let output = command("500ms", &arguments);
    assert_eq!(output.status.code(), Some(1));
    let (out, err) = (String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output));
    assert!(out.contains("/s") && out.contains("NOT TRUSTED, 1 in flight: "), "{out}");
    assert!(err.contains("1 in flight is not trusted") && err.contains("came twice"), "{err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    std::fs::remove_file(&plot).unwrap();
    assert!(svg.contains("class=\"m0\"") && svg.contains("NOT TRUSTED"), "{svg}");

    let output = command("500ms", &[&target, "--window", "1", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let run = &json["runs"][0];
    assert_eq!(run["trusted"], false, "{json}");
    assert!(run["rate"].as_f64().unwrap() > 0.0, "{json}");
    assert!(run["reasons"][0]["reason"].as_str().unwrap().contains("came twice"), "{json}");
    // No option accepts it, not even the one that `command` gives.
    assert!(run["reasons"][0]["accepted_by"].is_null(), "{json}");
}

#[test]
fn the_document_names_no_commit_of_the_current_folder() {
    let server = serve(Work::Echo { bytes: 64 });
    let target = Target::Udp(address(&server, 0)).to_string();
    let folder = std::env::temp_dir().join(format!("serval-bench-commit-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.current_dir(&folder).args(["-c", "user.name=a", "-c", "user.email=a@b"]);
        git.args(arguments).output().unwrap()
    };
    git(&["init", "--quiet"]);
    git(&["commit", "--quiet", "--allow-empty", "-m", "a program of somebody else"]);
    let head = String::from_utf8(git(&["rev-parse", "HEAD"]).stdout).unwrap();
    assert_eq!(head.trim().len(), 40, "{head}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args([
        "bench",
        &target,
        "--window",
        "1",
        "--warmup",
        "0",
        "--duration",
        "50ms",
        "--json",
    ]);
    let output = command.current_dir(&folder).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"machine\"") && !text.contains(head.trim()), "{text}");
}

/// `serval bench` with a message of its own.
fn custom(target: &Target, arguments: &[&str]) -> Output {
    let target = target.to_string();
    undisturbed(&[&[target.as_str(), "--window", "1,4"], arguments].concat())
}

#[test]
fn a_message_of_ones_own_is_sent_and_the_reply_compared() {
    let folder = std::env::temp_dir().join(format!("serval-bench-own-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (payload, other) = (folder.join("payload"), folder.join("other"));
    std::fs::write(&payload, "a message of ones own").unwrap();
    std::fs::write(&other, "something else").unwrap();
    let (payload, other) = (payload.to_str().unwrap(), other.to_str().unwrap());
    let work = Work::Echo { bytes: 64 };
    let path = folder.join("port");
    let server = serve_at(&work, std::slice::from_ref(&path));
    let (udp, tcp) = (Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1)));
    for target in [&udp, &tcp, &Target::Shm(path)] {
        let expects =
            [&["--expect", payload][..], &[], &["--expect", "echo"], &["--expect", "any:21"]];
        for expect in &expects[..if *target == udp { 4 } else { 1 }] {
            let output = custom(target, &[&["--payload", payload], *expect].concat());
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{target} {expect:?}: {}", stderr(&output));
            assert!(text.contains("a payload of 21 bytes at "), "{text}");
            let counted = expect.is_empty() || expect[1] == "any:21";
            assert_eq!(text.contains("not compared"), counted, "{text}");
        }
        let hex = ["--payload-hex", "00ff10", "--expect-hex", "0x00 ff:10"];
        assert!(custom(target, &hex).status.success());
        for wrong in [["--expect", other], ["--expect-hex", "61"], ["--expect", "any:20"]] {
            let output = custom(target, &[&["--payload", payload], &wrong[..]].concat());
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
            assert!(stderr(&output).contains("as --expect says"), "{}", stderr(&output));
        }
    }
    for (arguments, part) in [
        (&["--payload", "/there/is/no/file"][..], "/there/is/no/file"),
        (&["--payload", payload, "--expect", "any:x"], "any:BYTES"),
        (&["--payload-hex", "abc"], "pairs of hexadecimal digits"),
        (&["--expect", "echo"], "--payload"),
        (&["--payload", payload, "--workload", "lenet"], "cannot be used with"),
        (&["--payload", payload, "--framing", "raw"], "--expect any:BYTES"),
    ] {
        let output = custom(&tcp, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Equal replies to equal requests cannot be told apart, but they can be counted.
#[test]
fn replies_to_a_message_of_ones_own_that_come_twice_or_change_are_noticed() {
    let twice = Fake::start(|n, request| vec![request.to_vec(); if n == 30 { 2 } else { 1 }]);
    let changed = Fake::start(|n, request| match n {
        30 => vec![b"wrong".to_vec()],
        _ => vec![request.to_vec()],
    });
    let silent = Fake::start(|_, _| vec![]);
    let own = |fake: &Fake| {
        let target = fake.target.to_string();
        command("500ms", &[&target, "--payload-hex", "616263", "--expect", "echo", "--window", "2"])
    };
    for (fake, told) in [(&twice, "came twice"), (&changed, "replies were wrong")] {
        let output = own(fake);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(told), "{}", stderr(&output));
    }
    assert!(stderr(&own(&silent)).contains("does not answer the payload"));
}

/// The same on a connection, whose requests the second reply shifts.
#[test]
fn a_reply_that_comes_twice_on_a_connection_is_noticed_although_all_are_equal() {
    let mut count = 0;
    let fake = FakeTcp::start(Framing::LengthU16, move |request| {
        count += 1;
        request.repeat(if count == 30 { 2 } else { 1 })
    });
    let custom = Custom { payload: b"abc".to_vec(), expect: Expect::Echo };
    let report = bench::run(&plan(&fake.target, Work::Custom(Arc::new(custom)), 2)).unwrap();
    assert!(matches!(report.void(), Some(Void::Duplicated(1..))), "{report:?}");
}

#[test]
fn wrong_command_lines_are_told_in_one_sentence() {
    for (arguments, part) in [
        (&["udp://127.0.0.1:9", "--window", "5000"][..], "must be in [1, 4096]"),
        (&["tcp://127.0.0.1:9", "--class", "T2"], "udp:// server"),
        (&["http://127.0.0.1:9"], "udp://HOST:PORT"),
        (&["udp://127.0.0.1:9", "--workload", "chess"], "echo:BYTES"),
        (&["udp://127.0.0.1:9", "--rate", "fast"], "1.5M"),
        (&["udp://127.0.0.1:9", "--rate", "1k", "--window", "1"], "cannot be used with"),
        (&["udp://127.0.0.1:9", "--framing", "morse"], "length:u16"),
    ] {
        let output = command("500ms", arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn the_servers_own_metrics_tell_how_busy_it_was() {
    let service =
        "[[service]]\nname = \"echo\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";
    let served = Served::start("bench_metrics", "", service);
    let plan = Plan {
        metrics: Some(format!("http://{}/metrics", served.metrics)),
        server_pid: Some(served.process.0.id()),
        duration: Duration::from_millis(600),
        ..plan(&Target::Udp(served.services[0][0]), Work::Echo { bytes: 64 }, 8)
    };
    let report = bench::run(&plan).unwrap();
    sound(&report);
    let busy = report.server_busy_ns_per_message().expect("it was asked for");
    let used = report.server_cpu_ns_per_message().expect("it was asked for");
    assert!(busy > 0.0 && used > 0.0, "{report:?}");
    let other = Plan { metrics: Some("http://127.0.0.1:1/metrics".to_owned()), ..plan };
    assert!(matches!(bench::run(&other), Err(BenchError::Observe(_))));
}

#[test]
fn a_client_that_others_keep_from_its_core_says_so() {
    // As many busy threads as it takes to have every core, wherever the client goes.
    let stop = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = (0..4 * std::thread::available_parallelism().unwrap().get())
        .map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        })
        .collect();
    let fake = Fake::start(|_, request| vec![request.to_vec()]);
    let report = fake.report(|plan| {
        plan.stolen_max = 0.05;
        plan.timeout = Some(PATIENCE);
        plan.duration = Duration::from_secs(1);
    });
    stop.store(true, Ordering::Relaxed);
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(matches!(report.void(), Some(Void::Stolen(_))), "{report:?}");
    assert!(report.has_numbers() && !report.is_trusted(), "{report:?}");
    let option = report.void().unwrap().accepted_by().unwrap();
    let percent: f64 = option.strip_prefix("--stolen-max ").unwrap().parse().unwrap();
    assert!(percent / 100.0 > report.stolen.min(0.99), "{option}: {report:?}");
}
