//! The message path allocates and frees nothing: a trap monitors the workers of real servers, their turns, their
//! sockets and the kernels on them.
//!
//! The workers are warm: a larger load of the same kind ran before. Memory that grows with the behaviour of clients
//! (a connection that pipelines deeper than any before it) is bounded and kept. Connections that come
//! and go allocate nothing either, up to the number for which a worker has room at the start.

mod common;

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use bench::client::shm::{Client, Options};
use common::crowd::{Crowd, FRAMING};
use common::*;
use engine::topology::{Backend, CpuPlacement, Dispatch, Listen, Service, Topology};
use mqueue::abi;
use server::Server;
use sys::allocation::{self, Trap};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

#[global_allocator]
static TRAP: Trap = Trap;

/// Duration of a load.
const LOAD: Duration = Duration::from_millis(250);
/// The names of threads that run turns, and of threads that run kernels.
const WORKER: &str = "serval-worker";
const ACCELERATOR: &str = "cpu-";

/// Runs `load` while workers and accelerators are monitored; returns the violations by messages as text.
fn offences(load: impl FnOnce()) -> Vec<String> {
    let mut watched = allocation::threads_named(WORKER);
    watched.extend(allocation::threads_named(ACCELERATOR));
    allocation::set(&watched);
    load();
    let (count, offences) = allocation::lift();
    let mut found = Vec::new();
    for offence in &offences {
        let stack = offence.stack.to_string();
        found.push(format!("of {count}: {} {} bytes\n{stack}", offence.what, offence.bytes));
    }
    if count > offences.len() as u64 {
        found.push(format!("of {count} only {} can be judged", offences.len()));
    }
    found
}

/// Warms up with `load(0)`, then monitors `load(1)`, which must be less: messages that wait in a queue in one run
/// need not wait in the next.
fn nothing_is_allocated(what: &str, mut load: impl FnMut(usize)) {
    load(0);
    load(0);
    let found = offences(|| load(1));
    assert!(found.is_empty(), "{what}: {} offences, the first\n{}", found.len(), found[0]);
}

fn echo(listen: Vec<Listen>) -> Service {
    Service { framing: FRAMING, ..Service::new("echo", listen, "echo") }
}

fn with_workers(workers: usize, services: Vec<Service>) -> Topology {
    let mut settings = topology(services);
    settings.engine.workers = workers;
    settings
}

/// Datagrams to the first listener, streams to the second.
fn crowds(server: &Server) -> [Crowd; 2] {
    [
        Crowd::connect(address(server, 0), Transport::Udp, 30, 8),
        Crowd::connect(address(server, 1), Transport::Tcp, 30, 16),
    ]
}

/// The maximum that clients may have in flight, or less. A connection's queues first grow to four places, so that of
/// those that waited at all in the warm-up none grows when four are in flight.
fn exchange_crowds(crowds: &mut [Crowd; 2], half: usize) {
    crowds[0].widen(8 >> half);
    crowds[1].widen(64 >> (4 * half));
    crowds.iter_mut().for_each(Crowd::ask);
    let until = Instant::now() + LOAD;
    while Instant::now() < until {
        crowds.iter_mut().for_each(Crowd::turn);
    }
    crowds.iter_mut().for_each(Crowd::stop_asking);
    eventually("every request is answered or given up", || {
        crowds.iter_mut().for_each(Crowd::turn);
        crowds.iter().all(Crowd::is_settled)
    });
}

fn finish(server: Server) {
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// The violations of a thread with a worker's name that runs `work`.
fn offences_of(work: impl FnOnce() + Send + 'static) -> Vec<String> {
    let number = std::thread::Builder::new().name(format!("{WORKER}-x"));
    let (say, hear) = std::sync::mpsc::channel();
    let (ready, readiness) = std::sync::mpsc::channel();
    let thread = number.spawn(move || {
        ready.send(()).unwrap();
        hear.recv().unwrap();
        work();
    });
    let thread = thread.unwrap();
    readiness.recv().unwrap();
    offences(|| {
        say.send(()).unwrap();
        thread.join().unwrap();
    })
}

fn allocate(bytes: usize) {
    drop(std::hint::black_box(vec![1_u8; bytes]));
}

#[test]
fn the_trap_catches_allocations_and_frees() {
    let _alone = alone();
    let found = offences_of(|| allocate(77));
    assert!(found.iter().any(|offence| offence.contains("allocates 77 bytes")), "{found:?}");
    assert!(found.iter().any(|offence| offence.contains("frees 77 bytes")), "{found:?}");
}

#[test]
fn more_than_the_trap_can_hold_is_a_violation() {
    let _alone = alone();
    let found = offences_of(|| (0..5000).for_each(|_| allocate(78)));
    assert!(found.iter().any(|offence| offence.contains("can be judged")), "{found:?}");
}

#[test]
fn datagrams_and_streams() {
    let _alone = alone();
    for workers in [1, 2] {
        let server = start(with_workers(workers, vec![echo(vec![udp(), tcp()])]));
        let mut crowds = crowds(&server);
        let what = format!("{workers} workers");
        nothing_is_allocated(&what, |half| exchange_crowds(&mut crowds, half));
        crowds.into_iter().for_each(Crowd::leave);
        finish(server);
    }
}

#[test]
fn requests_for_another_workers_mqueues() {
    let _alone = alone();
    let service = Service { dispatch: Dispatch::FlowHash, ..echo(vec![udp(), tcp()]) };
    let server = start(with_workers(2, vec![service]));
    let mut crowds = crowds(&server);
    nothing_is_allocated("hand-over", |half| exchange_crowds(&mut crowds, half));
    assert!(server.metrics().service(0).replies_handed_in > 0);
    crowds.into_iter().for_each(Crowd::leave);
    finish(server);
}

#[test]
fn accelerator_threads() {
    let _alone = alone();
    let placement = CpuPlacement::Threads { threads: 1, cores: Vec::new() };
    let server = start(topology_on(placement, vec![echo(vec![udp(), tcp()])]));
    let mut crowds = crowds(&server);
    nothing_is_allocated("accelerator threads", |half| exchange_crowds(&mut crowds, half));
    crowds.into_iter().for_each(Crowd::leave);
    finish(server);
}

/// Both servers are monitored: the one with the backend and the backend itself.
#[test]
fn backends() {
    let _alone = alone();
    let behind = start(topology(vec![echo(vec![udp(), tcp()])]));
    let relay = build_kernel("crates/server/tests/kernels/relay.cpp");
    let backend = |transport: Transport, listener: usize| Backend {
        timeout_ms: 15_000,
        ..Backend::new("behind", transport, address(&behind, listener), FRAMING)
    };
    let asking = |transport: Transport, listener: usize| Service {
        mqueues: 8,
        slots: 4,
        request_timeout_ms: 20_000,
        backends: vec![backend(transport, listener)],
        ..Service::new(&format!("{transport:?}"), vec![udp()], &format!("{relay}:relay"))
    };
    let services = vec![asking(Transport::Udp, 0), asking(Transport::Tcp, 1)];
    let server = start(topology(services));
    let clients = [0, 1].map(|listener| udp_client(address(&server, listener)));
    nothing_is_allocated("backends", |half| {
        let window = 16 >> half;
        for round in 0..200 {
            for (client, message) in clients.iter().flat_map(|c| (0..window).map(move |m| (c, m))) {
                client.send(&pattern(100 + message, round)).unwrap();
            }
            let mut reply = [0; 200];
            for client in clients.iter().flat_map(|client| vec![client; window]) {
                let len = client.recv(&mut reply).expect("an answer of the backend");
                assert_eq!(reply[0], abi::status::OK, "round {round}");
                assert_eq!(reply[1..len], pattern(len - 1, round));
            }
        }
    });
    finish(server);
    finish(behind);
}

/// Both servers are monitored: the proxies, with and without a function, and the one behind them.
#[test]
fn proxies() {
    let _alone = alone();
    // With credit for every datagram: a lost one stays in flight until its time-out.
    let server_of = |listen| Service { mqueues: 8, slots: 64, ..echo(vec![listen]) };
    let behind = start(topology(vec![server_of(udp()), server_of(tcp())]));
    let functions = [Vec::new(), vec![onpath::Spec::new("pass", "passthrough")]];
    for functions in functions {
        let what = format!("proxies with {} functions", functions.len());
        let proxy = |name: &str, listen: Listen, listener: usize| Service {
            framing: FRAMING,
            max_message_bytes: 4096,
            max_reply_bytes: 4096,
            request_timeout_ms: 3000,
            functions: functions.clone(),
            ..Service::proxy(name, vec![listen], address(&behind, listener))
        };
        let services = vec![proxy("datagrams", udp(), 0), proxy("streams", tcp(), 1)];
        let server = start(Topology { accelerators: Vec::new(), ..topology(services) });
        let mut crowds = crowds(&server);
        nothing_is_allocated(&what, |half| exchange_crowds(&mut crowds, half));
        let replied = |service| server.metrics().service(service).replied;
        assert!(replied(0) > 0 && replied(1) > 0);
        crowds.into_iter().for_each(Crowd::leave);
        finish(server);
    }
    finish(behind);
}

#[test]
fn shared_memory() {
    let _alone = alone();
    let path = std::env::temp_dir().join(format!("serval-allocation-{}", std::process::id()));
    for workers in [1, 2] {
        let mut service = echo(Vec::new());
        service.memory_ports = vec![path.clone()];
        let server = start(with_workers(workers, vec![service]));
        let options = Options { depth: 64, timeout: PATIENCE };
        let mut clients = [0, 1].map(|_| Client::connect(&path, &options).unwrap());
        nothing_is_allocated(&format!("shared memory, {workers} workers"), |half| {
            let mut reply = vec![0; clients[0].reply_bytes_max()];
            for round in 0..500 {
                for client in &mut clients {
                    let window = (client.depth() >> half) as u64;
                    for tag in 0..window {
                        client.try_send(tag, &pattern(100, tag as usize + round)).unwrap();
                    }
                    client.publish();
                    for _ in 0..window {
                        let answer = client.receive(&mut reply, PATIENCE).unwrap().unwrap();
                        let expected = pattern(100, answer.tag as usize + round);
                        assert_eq!((answer.lost, &reply[..answer.len]), (None, &expected[..]));
                    }
                }
            }
        });
        drop(clients);
        finish(server);
    }
}

/// Sends and receives for the duration of a load.
fn flood(client: &UdpSocket, messages: &[Vec<u8>], times: usize) {
    client.set_nonblocking(true).unwrap();
    let until = Instant::now() + LOAD;
    while Instant::now() < until {
        for message in messages.iter().cycle().take(times * messages.len()) {
            // A full socket buffer is equivalent.
            let _ = client.send(message);
        }
        while client.recv(&mut [0; 2000]).is_ok() {}
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn drops_and_time_outs() {
    let _alone = alone();
    let silent = format!("{}:misbehave", build_kernel("device/tests/misbehave.cpp"));
    let service = |name: &str, kernel: &str, params: (&str, f64)| Service {
        params: vec![(params.0.into(), params.1.into())],
        mqueues: 2,
        slots: 8,
        request_timeout_ms: 20,
        framing: Framing::Fixed(32),
        ..Service::new(name, vec![udp(), tcp()], kernel)
    };
    let services = vec![
        service("silent", &silent, ("mode", 10.0)),
        service("saturated", "delay", ("microseconds", 2000.0)),
        Service { framing: Framing::LengthU16, ..Service::new("scale", vec![udp()], "scale") },
    ];
    for workers in [1, 2] {
        let server = start(with_workers(workers, services.clone()));
        let clients = [0, 2, 4].map(|listener| udp_client(address(&server, listener)));
        let messages = [32, 31, 5000].map(|len| pattern(len, 7)).to_vec();
        nothing_is_allocated(&format!("drops, {workers} workers"), |half| {
            for client in &clients {
                flood(client, &messages, 16 >> half);
            }
        });
        let lost = |reason| (0..3).map(|service| dropped(&server, service, reason)).sum::<u64>();
        use DropReason::{BadLength, NoCredit, RequestTimeout, TooLong};
        for reason in [BadLength, NoCredit, RequestTimeout, TooLong] {
            assert!(lost(reason) > 0, "{reason:?} was not provoked");
        }
        finish(server);
    }
}

#[test]
fn connections_come_and_go() {
    let _alone = alone();
    let server = start(with_workers(2, vec![echo(vec![udp(), tcp()])]));
    nothing_is_allocated("connections", |half| {
        for n in 0..200 >> half {
            let mut request = Vec::new();
            FRAMING.encode_request(&pattern(100, n), &mut request).unwrap();
            let mut stream = tcp_client(address(&server, 1));
            match n % 3 {
                0 => assert_eq!(exchange(&mut stream, &request, request.len()), request),
                1 => std::io::Write::write_all(&mut stream, &request[..n % 100]).unwrap(),
                _ => {}
            }
        }
        eventually("all are closed", || {
            let counted = server.metrics().service(0);
            counted.connections_accepted == counted.connections_closed
        });
    });
    finish(server);
}

/// The worker has never had as many as in the second load.
#[test]
fn more_connections_than_ever_before() {
    let _alone = alone();
    let server = start(with_workers(2, vec![echo(vec![tcp()])]));
    nothing_is_allocated("a new maximum of connections", |half| {
        let count = if half == 0 { 1 } else { 200 };
        let mut request = Vec::new();
        FRAMING.encode_request(&pattern(100, 7), &mut request).unwrap();
        let mut streams: Vec<_> = (0..count).map(|_| tcp_client(address(&server, 0))).collect();
        for stream in &mut streams {
            assert_eq!(exchange(stream, &request, request.len()), request);
        }
        drop(streams);
        eventually("all are closed", || {
            let counted = server.metrics().service(0);
            counted.connections_accepted == counted.connections_closed
        });
    });
    finish(server);
}
