//! Hostile and careless clients: whatever they do, others are answered, the accounts balance, and
//! nothing stays behind: no descriptor, no connection, no memory.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use common::*;
use engine::topology::{Limits, Listen, Replies, Service};
use server::Server;
use wire::DropReason;
use wire::error_reply::ErrorReply;
use wire::framing::Framing;

/// How much more memory the process may have in use after an attack. The attacks would take more if
/// they had their way.
const GROWTH_BYTES_MAX: u64 = 64 << 20;

fn framings() -> impl Iterator<Item = Framing> + Clone {
    Framing::all(32)
}

fn store() -> String {
    format!("{}:store", build_kernel("crates/server/tests/kernels/relay.cpp"))
}

/// A service that answers [`well_framed`].
fn service_of(framing: Framing, listen: Vec<Listen>) -> Service {
    let kernel = if framing == Framing::Memcached { store() } else { "echo".to_owned() };
    Service { framing, ..Service::new(&framing.to_string(), listen, &kernel) }
}

/// The services under attack, and a bystander that must not notice.
struct Scene {
    server: Server,
    listeners: usize,
    before_start: usize,
    descriptors: usize,
    resident_bytes: u64,
    _alone: MutexGuard<'static, ()>,
}

impl Scene {
    fn new(services: Vec<Service>, limits: Limits, workers: usize) -> Self {
        let alone = alone();
        let before_start = sys::process::open_descriptors();
        let listeners = services.iter().map(|s| s.listen.len()).sum();
        let mut settings = topology(services);
        settings.services.push(service_of(Framing::Fixed(32), vec![udp(), tcp()]));
        settings.limits = limits;
        settings.engine.workers = workers;
        let server = start(settings);
        let mut scene = Self {
            server,
            listeners,
            before_start,
            descriptors: 0,
            resident_bytes: 0,
            _alone: alone,
        };
        scene.bystander_is_well(0);
        scene.connections_are_gone();
        scene.descriptors = sys::process::open_descriptors();
        scene.resident_bytes = sys::process::resident_bytes();
        scene
    }

    fn of(service: Service) -> Self {
        Self::new(vec![service], Limits::default(), 1)
    }

    fn at(&self, listener: usize) -> SocketAddr {
        address(&self.server, listener)
    }

    fn dropped(&self, reason: DropReason) -> u64 {
        (0..self.server.topology().services.len())
            .map(|service| dropped(&self.server, service, reason))
            .sum()
    }

    fn counted(&self, reason: DropReason, at_least: u64) {
        eventually(reason.name(), || self.dropped(reason) >= at_least);
    }

    fn bystander_is_well(&self, salt: usize) {
        let (request, reply) = well_framed(Framing::Fixed(32), salt);
        let (udp, tcp) = (self.at(self.listeners), self.at(self.listeners + 1));
        assert_eq!(ask(&udp_client(udp), &request), reply);
        assert_eq!(exchange(&mut tcp_client(tcp), &request, reply.len()), reply);
    }

    /// Every connection that was accepted has been closed.
    fn connections_are_gone(&self) {
        let metrics = self.server.metrics();
        let open = |service| {
            let counted = metrics.service(service);
            counted.connections_accepted != counted.connections_closed
        };
        let services = self.server.topology().services.len();
        eventually("all connections are closed", || !(0..services).any(open));
    }

    /// Every client has left: nothing of them may be left.
    fn finish(self) {
        self.bystander_is_well(1);
        assert_accounts(&self.server);
        self.connections_are_gone();
        eventually("the descriptors of the attack are closed", || {
            sys::process::open_descriptors() <= self.descriptors
        });
        let grown = sys::process::resident_bytes().saturating_sub(self.resident_bytes);
        assert!(grown < GROWTH_BYTES_MAX, "{} MiB more than before", grown >> 20);
        assert!(self.server.shutdown().is_clean());
        eventually("every descriptor is closed", || {
            sys::process::open_descriptors() <= self.before_start
        });
    }
}

fn well_served(server: SocketAddr, framing: Framing, salt: usize) {
    let (request, reply) = well_framed(framing, salt);
    assert_eq!(exchange(&mut tcp_client(server), &request, reply.len()), reply, "{framing}");
}

/// Reads until the server closes; what it sent until then.
fn read_to_end(mut stream: &TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    match stream.read_to_end(&mut received) {
        Ok(_) => received,
        Err(error) => match error.kind() {
            // A close with unread bytes is a reset.
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => received,
            _ => panic!("the server neither closes nor answers: {error}"),
        },
    }
}

/// Closes by RST: the host kernel sends one when unread bytes are thrown away.
fn reset(stream: TcpStream) {
    assert!(stream.peek(&mut [0]).expect("something to leave unread") > 0);
    drop(stream);
}

// --- nonsense ---

#[test]
fn garbage_on_every_framing_over_tcp() {
    let services: Vec<_> = framings().map(|framing| service_of(framing, vec![tcp()])).collect();
    let scene = Scene::new(services.to_vec(), Limits::default(), 2);
    let mut random = Random::new(1);
    for round in 0..40 {
        for (listener, framing) in framings().enumerate() {
            let mut stream = tcp_client(scene.at(listener));
            let garbage_bytes = 1 + random.below(20_000);
            let mut garbage = random.bytes(garbage_bytes);
            if round % 2 == 0 {
                // After something sound, so that it meets a parser in the middle of its work.
                garbage = [well_framed(framing, round).0, garbage].concat();
            }
            let mut rest = &garbage[..];
            while !rest.is_empty() {
                let (part, later) = rest.split_at(rest.len().min(1 + random.below(3000)));
                // The server may have closed in the middle.
                let Ok(()) = stream.write_all(part) else { break };
                rest = later;
            }
            match round % 3 {
                0 => {}
                1 => {
                    let _ = stream.shutdown(Shutdown::Write);
                    read_to_end(&stream);
                }
                _ => {
                    let _ = stream.read(&mut [0; 100]);
                }
            }
            drop(stream);
            if round % 8 == 0 {
                well_served(scene.at(listener), framing, round);
            }
        }
    }
    // provokes: bad_framing
    assert!(scene.dropped(DropReason::BadFraming) > 0);
    // provokes: too_long
    assert!(scene.dropped(DropReason::TooLong) > 0);
    for (listener, framing) in framings().enumerate() {
        well_served(scene.at(listener), framing, 100);
    }
    scene.finish();
}

#[test]
fn twenty_thousand_datagrams_of_garbage() {
    let kernels = ["echo", "sockperf", "scale", "lenet", "faces"];
    let services = kernels.map(|kernel| Service::new(kernel, vec![udp()], kernel));
    let scene = Scene::new(services.to_vec(), Limits::default(), 2);
    let clients: Vec<UdpSocket> = (0..5).map(|n| udp_client(scene.at(n))).collect();
    let mut random = Random::new(2);
    let noise = random.bytes(65_507);
    for n in 0..20_000 {
        let len = match random.below(100) {
            0 => random.below(noise.len() + 1),
            1..10 => random.below(1500),
            _ => random.below(200),
        };
        let from = random.below(noise.len() - len + 1);
        // A refusal would be a reply port that is not there: the server's always is.
        clients[n % 5].send(&noise[from..from + len]).unwrap();
        if n % 100 == 0 {
            // Also keeps the flood from overrunning the sockets.
            well_served_by_datagram(&scene, 0, n);
            scene.bystander_is_well(n);
        }
    }
    // provokes: bad_length
    assert!(scene.dropped(DropReason::BadLength) > 0);
    // provokes: too_long
    assert!(scene.dropped(DropReason::TooLong) > 0);
    well_served_by_datagram(&scene, 0, 1);
    drop(clients);
    scene.finish();
}

fn well_served_by_datagram(scene: &Scene, listener: usize, salt: usize) {
    let message = pattern(salt % 1000, salt);
    assert_eq!(ask(&udp_client(scene.at(listener)), &message), message);
}

#[test]
fn every_prefix_of_a_request_and_then_the_end() {
    let services: Vec<_> = framings().map(|framing| service_of(framing, vec![tcp()])).collect();
    let scene = Scene::new(services.to_vec(), Limits::default(), 1);
    for (listener, framing) in framings().enumerate() {
        let (request, reply) = well_framed(framing, 11);
        for len in 0..request.len() {
            let mut stream = tcp_client(scene.at(listener));
            // Alone, or behind a request that is answered before the end.
            let whole = if len % 2 == 0 { &request[..] } else { &[] };
            stream.write_all(&[whole, &request[..len]].concat()).unwrap();
            if len % 3 == 0 && !whole.is_empty() {
                reset(stream);
                continue;
            }
            stream.shutdown(Shutdown::Write).unwrap();
            let received = read_to_end(&stream);
            let expected = if whole.is_empty() { &[] } else { &reply[..] };
            if framing == Framing::Raw {
                // Any bytes are a message.
                assert_eq!(received.len(), whole.len() + len);
            } else {
                assert_eq!(received, expected, "{framing}, {len} bytes");
            }
        }
        well_served(scene.at(listener), framing, 7);
    }
    scene.finish();
}

// --- time ---

#[test]
fn frames_that_never_end_are_cut_off() {
    let framings = [Framing::LengthU32, Framing::Line, Framing::Memcached];
    let services = framings.map(|framing| service_of(framing, vec![tcp()]));
    let limits = Limits { idle_ms: 4000, ..Limits::default() };
    let scene = Scene::new(services.to_vec(), limits, 1);
    // A line that grows and grows is refused at its maximum, long before anybody waits for its end.
    let mut endless = tcp_client(scene.at(1));
    let refused = (0..100).any(|_| endless.write_all(&[b'x'; 64]).is_err()) || {
        let rest = read_to_end(&endless);
        rest.is_empty()
    };
    assert!(refused);
    // provokes: too_long
    scene.counted(DropReason::TooLong, 1);
    // Byte by byte within the maximum: the clock decides.
    let beginnings: [&[u8]; 3] = [&1000_u32.to_be_bytes(), b"a line ", b"set key 0 0 900\r\n"];
    let mut drips: Vec<TcpStream> =
        (0..framings.len()).map(|listener| tcp_client(scene.at(listener))).collect();
    for (stream, beginning) in drips.iter_mut().zip(beginnings) {
        stream.write_all(beginning).unwrap();
    }
    let deadline = Instant::now() + PATIENCE;
    let mut open = drips;
    while !open.is_empty() {
        assert!(Instant::now() < deadline, "{} connections drip on", open.len());
        std::thread::sleep(Duration::from_millis(20));
        open.retain_mut(|stream| stream.write_all(b"x").is_ok());
        for (listener, framing) in framings.into_iter().enumerate() {
            well_served(scene.at(listener), framing, 3);
        }
    }
    // provokes: idle_timeout
    assert_eq!(scene.dropped(DropReason::IdleTimeout), 3);
    drop(endless);
    scene.finish();
}

#[test]
fn silent_connections_are_closed_and_busy_ones_are_not() {
    let service = service_of(Framing::Fixed(32), vec![tcp()]);
    let scene = Scene::new(vec![service], Limits { idle_ms: 4000, ..Limits::default() }, 2);
    let mut busy = tcp_client(scene.at(0));
    let silent: Vec<TcpStream> = (0..100).map(|_| tcp_client(scene.at(0))).collect();
    let (request, reply) = well_framed(Framing::Fixed(32), 5);
    let started = Instant::now();
    while scene.dropped(DropReason::IdleTimeout) < 100 {
        assert!(started.elapsed() < PATIENCE, "silent connections stay open");
        assert_eq!(exchange(&mut busy, &request, reply.len()), reply);
        std::thread::sleep(Duration::from_millis(5));
    }
    for stream in &silent {
        assert!(read_to_end(stream).is_empty());
    }
    // provokes: idle_timeout
    assert_eq!(scene.dropped(DropReason::IdleTimeout), 100);
    drop((busy, silent));
    scene.finish();
}

#[test]
fn clients_that_send_and_never_read_are_held_back_and_then_cut_off() {
    let max = 60_000;
    let service = Service {
        max_message_bytes: max,
        max_reply_bytes: max,
        ..service_of(Framing::LengthU32, vec![tcp()])
    };
    let limits = Limits { slow_client_ms: 300, ..Limits::default() };
    let scene = Scene::new(vec![service], limits, 1);
    let mut message = max.to_be_bytes().to_vec();
    message.extend(pattern(max as usize, 1));
    for round in 0..3 {
        let greedy: Vec<TcpStream> = (0..4).map(|_| tcp_client(scene.at(0))).collect();
        let senders: Vec<_> = greedy
            .into_iter()
            .map(|mut stream| {
                let message = message.clone();
                std::thread::spawn(move || {
                    let mut sent = 0;
                    // Ends when the server resets the connection.
                    while let Ok(count) = stream.write(&message[sent % message.len()..]) {
                        sent += count;
                        assert!(sent < 1 << 30, "nothing holds this client back");
                    }
                    sent
                })
            })
            .collect();
        well_served(scene.at(0), Framing::LengthU32, round);
        scene.bystander_is_well(round);
        for sender in senders {
            let sent = sender.join().unwrap();
            // Two socket buffers on each side and a window of replies, nothing in proportion to the
            // client's appetite.
            assert!(sent < 64 << 20, "{} MiB were taken", sent >> 20);
        }
    }
    // provokes: slow_client
    assert!(scene.dropped(DropReason::SlowClient) > 0);
    scene.finish();
}

#[test]
fn resets_in_the_middle_lose_only_their_own_replies() {
    let service = Service {
        params: vec![("microseconds".into(), 2000.0.into())],
        // New clients wait for the requests of those that have disconnected.
        request_timeout_ms: 60_000,
        framing: Framing::Fixed(32),
        ..Service::new("delay", vec![tcp()], "delay")
    };
    let scene = Scene::new(vec![service], Limits::default(), 2);
    let (request, _) = well_framed(Framing::Fixed(32), 1);
    let mut random = Random::new(3);
    for round in 0..60 {
        let mut stream = tcp_client(scene.at(0));
        let whole = 2 + random.below(100);
        let more = random.below(31);
        stream.write_all(&[request.repeat(whole), request[..more].to_vec()].concat()).unwrap();
        reset(stream);
        if round % 10 == 0 {
            well_served(scene.at(0), Framing::Fixed(32), round);
        }
    }
    // provokes: client_gone
    scene.counted(DropReason::ClientGone, 1);
    well_served(scene.at(0), Framing::Fixed(32), 2);
    scene.finish();
}

#[test]
fn clients_that_vanish_do_not_disturb_others() {
    let service = Service {
        params: vec![("microseconds".into(), 500.0.into())],
        ..Service::new("delay", vec![udp()], "delay")
    };
    let scene = Scene::of(service);
    let stays = udp_client(scene.at(0));
    for round in 0..100 {
        for _ in 0..5 {
            // The reply finds the port closed, and the host kernel tells the server so.
            udp_client(scene.at(0)).send(b"gone").unwrap();
        }
        let message = pattern(40, round);
        assert_eq!(ask(&stays, &message), message);
    }
    assert_accounts(&scene.server);
    let counted = scene.server.metrics().service(0);
    assert_eq!((counted.received, counted.replied), (600, 600), "{counted:?}");
    drop(stays);
    scene.finish();
}

// --- numbers ---

#[test]
fn two_thousand_connections_come_and_go() {
    let service = service_of(Framing::Fixed(32), vec![tcp()]);
    let scene = Scene::new(vec![service], Limits::default(), 2);
    let mut kept = Vec::new();
    for n in 0..2000 {
        let mut stream = tcp_client(scene.at(0));
        let (request, reply) = well_framed(Framing::Fixed(32), n);
        match n % 4 {
            0 => {}
            1 => stream.write_all(&request[..n % 32]).unwrap(),
            _ => assert_eq!(exchange(&mut stream, &request, reply.len()), reply),
        }
        if n % 10 == 0 {
            kept.push(stream);
        }
        if kept.len() > 100 {
            kept.clear();
        }
    }
    drop(kept);
    let metrics = scene.server.metrics();
    eventually("every connection was seen to its end", || {
        let counted = metrics.service(0);
        counted.connections_accepted == 2000 && counted.connections_closed == 2000
    });
    scene.finish();
}

#[test]
fn connections_over_the_limit_are_refused_until_there_is_room() {
    let service = service_of(Framing::Fixed(32), vec![tcp()]);
    let limits = Limits { connections: 8, ..Limits::default() };
    let scene = Scene::new(vec![service], limits, 2);
    let (request, reply) = well_framed(Framing::Fixed(32), 9);
    for round in 1..=3 {
        let mut inside: Vec<TcpStream> = (0..8).map(|_| tcp_client(scene.at(0))).collect();
        for stream in &mut inside {
            assert_eq!(exchange(stream, &request, reply.len()), reply);
        }
        for _ in 0..20 {
            let outside = tcp_client(scene.at(0));
            assert!(read_to_end(&outside).is_empty(), "a ninth connection was served");
        }
        // provokes: connection_limit
        assert_eq!(scene.dropped(DropReason::ConnectionLimit), 20 * round);
        for stream in &mut inside {
            assert_eq!(exchange(stream, &request, reply.len()), reply);
        }
        drop(inside);
        scene.connections_are_gone();
    }
    scene.finish();
}

#[test]
fn pipelining_far_over_the_window_is_served_in_order() {
    let service = service_of(Framing::Fixed(32), vec![tcp()]);
    let limits = Limits { pipelined: 4, ..Limits::default() };
    let scene = Scene::new(vec![service], limits, 2);
    let count = 20_000;
    let numbered = |n: usize| pattern(32, n);
    let mut stream = tcp_client(scene.at(0));
    let mut writer = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let all: Vec<u8> = (0..count).flat_map(numbered).collect();
        writer.write_all(&all).unwrap();
    });
    scene.bystander_is_well(4);
    for n in 0..count {
        let mut reply = [0; 32];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..], numbered(n), "reply {n}");
    }
    sender.join().unwrap();
    drop(stream);
    scene.finish();
}

// --- kernels that do not answer ---

#[test]
fn requests_that_are_never_answered_end() {
    let silent = format!("{}:misbehave", build_kernel("device/tests/misbehave.cpp"));
    let service = |framing: Framing| Service {
        params: vec![("mode".into(), 10.0.into())],
        request_timeout_ms: 200,
        framing,
        ..Service::new(&framing.to_string(), vec![udp(), tcp()], &silent)
    };
    let speechless: Vec<Framing> =
        framings().filter(|framing| framing.error_reply(ErrorReply::Timeout).is_none()).collect();
    let mut services: Vec<Service> = speechless.iter().map(|framing| service(*framing)).collect();
    services.push(Service {
        request_timeout_ms: 200,
        ..service_of(Framing::Memcached, vec![udp(), tcp()])
    });
    let scene = Scene::new(services, Limits::default(), 2);
    for (n, framing) in speechless.iter().enumerate() {
        // UDP: nothing comes.
        let client = udp_client(scene.at(2 * n));
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        client.send(b"anyone?").unwrap();
        assert!(client.recv(&mut [0; 100]).is_err());
        // TCP: the connection ends, also for the requests behind.
        let mut stream = tcp_client(scene.at(2 * n + 1));
        stream.write_all(&well_framed(*framing, 1).0.repeat(3)).unwrap();
        assert!(read_to_end(&stream).is_empty(), "{framing}");
    }
    // memcached has words for it, and goes on.
    let mut stream = tcp_client(scene.at(2 * speechless.len() + 1));
    let expected = b"END\r\nSERVER_ERROR timed out\r\nEND\r\nSERVER_ERROR timed out\r\n";
    let requests = b"get a\r\nincr a 1\r\nget b\r\nincr b 1\r\n";
    assert_eq!(exchange(&mut stream, requests, expected.len()), expected);
    assert_eq!(exchange(&mut stream, b"get c\r\n", 5), b"END\r\n");
    // provokes: request_timeout
    scene.counted(DropReason::RequestTimeout, speechless.len() as u64 * 2 + 2);
    drop(stream);
    scene.finish();
}

#[test]
fn requests_that_the_kernel_rejects_end() {
    let framings = [Framing::Raw, Framing::Fixed(3), Framing::LengthU16, Framing::LengthU32];
    let framings = [&framings[..], &[Framing::Line]].concat();
    let scale = |framing: &Framing| Service {
        framing: *framing,
        ..Service::new(&framing.to_string(), vec![tcp()], "scale")
    };
    let mut services: Vec<Service> = framings.iter().map(scale).collect();
    services.push(Service {
        framing: Framing::Sockperf,
        ..Service::new("sockperf", vec![tcp()], "sockperf")
    });
    let scene = Scene::new(services, Limits::default(), 1);
    for (listener, framing) in framings.iter().enumerate() {
        let mut request = Vec::new();
        framing.encode_request(b"abc", &mut request).unwrap();
        let mut stream = tcp_client(scene.at(listener));
        stream.write_all(&request).unwrap();
        assert!(read_to_end(&stream).is_empty(), "{framing}");
        // provokes: bad_length
        assert_eq!(dropped(&scene.server, listener, DropReason::BadLength), 1, "{framing}");
    }
    // A message that is the server's own kind: sockperf rejects it.
    let mut message = well_framed(Framing::Sockperf, 0).0;
    message[9] = 2;
    let mut stream = tcp_client(scene.at(framings.len()));
    stream.write_all(&message).unwrap();
    assert!(read_to_end(&stream).is_empty());
    // provokes: kernel_drop
    assert_eq!(dropped(&scene.server, framings.len(), DropReason::KernelDrop), 1);
    drop(stream);
    scene.finish();
}

#[test]
fn services_without_replies_consume_in_silence() {
    let none = |kernel: &str| Service {
        framing: Framing::Sockperf,
        replies: Replies::None,
        ..Service::new(kernel, vec![udp(), tcp()], kernel)
    };
    let scene = Scene::new(vec![none("echo"), none("sockperf")], Limits::default(), 2);
    let mut rejected = well_framed(Framing::Sockperf, 0).0;
    rejected[9] = 2;
    for (listener, message) in [(0, well_framed(Framing::Sockperf, 3).0), (2, rejected)] {
        let client = udp_client(scene.at(listener));
        let mut stream = tcp_client(scene.at(listener + 1));
        for _ in 0..300 {
            client.send(&message).unwrap();
            stream.write_all(&message).unwrap();
        }
        stream.shutdown(Shutdown::Write).unwrap();
        assert!(read_to_end(&stream).is_empty());
        client.set_nonblocking(true).unwrap();
        assert!(client.recv(&mut [0; 100]).is_err());
    }
    for service in 0..2 {
        // The end of a connection says nothing of datagrams.
        eventually("every message is received", || {
            scene.server.metrics().service(service).received == 600
        });
    }
    assert_accounts(&scene.server);
    for service in 0..2 {
        let counted = scene.server.metrics().service(service);
        assert!(counted.consumed >= 300, "{counted:?}");
        assert_eq!(counted.consumed + counted.dropped_requests(), 600, "{counted:?}");
    }
    // provokes: unwanted_reply
    assert!(dropped(&scene.server, 0, DropReason::UnwantedReply) > 0);
    // provokes: consumed_drop
    assert!(dropped(&scene.server, 1, DropReason::ConsumedDrop) > 0);
    scene.finish();
}

// --- memcached's grammar ---

#[test]
fn memcached_clients_get_exactly_the_expected_replies() {
    let scene = Scene::new(
        vec![service_of(Framing::Memcached, vec![tcp()])],
        Limits { pipelined: 4, ..Limits::default() },
        2,
    );
    let mut stream = tcp_client(scene.at(0));
    let conversation: [(&[u8], &[u8]); 8] = [
        // Without a reply, whatever the kernel does with it: answer, reject.
        (b"set a 0 0 1 noreply\r\nx\r\nget a\r\n", b"END\r\n"),
        (b"delete a noreply\r\nget a\r\n", b"END\r\n"),
        // Quiet: an empty reply and a rejection are both the silence that was asked for.
        (b"mg a q\r\nmd a q\r\nmn\r\n", b"MN\r\n"),
        // Not quiet: the client waits for an answer.
        (b"delete a\r\nget a\r\n", b"SERVER_ERROR request failed\r\nEND\r\n"),
        // The kernel says something that is no response of the protocol.
        (b"touch a 1\r\nget a\r\n", b"SERVER_ERROR request failed\r\nEND\r\n"),
        // Refused by the framing, and the connection goes on.
        (b"bogus\r\nget a\r\n", b"ERROR\r\nEND\r\n"),
        (b"get\r\nget a\r\n", b"ERROR\r\nEND\r\n"),
        // The order holds although the first takes long.
        (
            b"get slow\r\nversion\r\nbogus\r\nget a\r\nget slow\r\nmn\r\n",
            b"END\r\nVERSION of the kernel's\r\nERROR\r\nEND\r\nEND\r\nMN\r\n",
        ),
    ];
    for _ in 0..3 {
        for (requests, replies) in conversation {
            let received = exchange(&mut stream, requests, replies.len());
            let text = String::from_utf8_lossy;
            assert_eq!(text(&received), text(replies), "{}", text(requests));
        }
    }
    // provokes: reply_unframable
    assert_eq!(scene.dropped(DropReason::ReplyUnframable), 3);
    // provokes: kernel_drop
    assert!(scene.dropped(DropReason::KernelDrop) > 0);
    stream.write_all(b"get slow\r\nquit\r\nget a\r\n").unwrap();
    assert_eq!(read_to_end(&stream), b"END\r\n");
    drop(stream);
    scene.finish();
}

#[test]
fn an_invalid_memcached_stream_gets_its_errors_in_order_and_goes_on() {
    let limits = Limits { pipelined: 4, ..Limits::default() };
    let service = service_of(Framing::Memcached, vec![tcp()]);
    let scene = Scene::new(vec![service], limits, 2);
    let long =
        [b"set a 0 0 100000\r\n".to_vec(), vec![b'x'; 100_002], b"quit\r\n".to_vec()].concat();
    let cases: [(&[u8], &[u8]); 6] = [
        // As memcached: what is behind the length of the data are commands.
        (
            b"set a 0 0 1\r\nlonger than that\r\nquit\r\n",
            b"CLIENT_ERROR bad data chunk\r\nERROR\r\n",
        ),
        (b"set a 0 0\r\nx\r\nquit\r\n", b"ERROR\r\nERROR\r\n"),
        (b"set a 0 x 1\r\nx\r\nquit\r\n", b"CLIENT_ERROR bad command line format\r\nERROR\r\n"),
        (b"set a 0 x 1 noreply\r\nx\r\nquit\r\n", b"ERROR\r\n"),
        (&long, b"SERVER_ERROR object too large for cache\r\n"),
        // No protocol of the service: it ends the connection.
        (b"\x80\x00\x00\x01binary", b"CLIENT_ERROR bad command line format\r\n"),
    ];
    for (broken, told) in cases {
        for before in 0..6 {
            // Requests before it are answered first, however full the window is.
            let mut stream = tcp_client(scene.at(0));
            let requests = [&b"get slow\r\n".repeat(before)[..], broken].concat();
            stream.write_all(&requests).unwrap();
            let expected = [&b"END\r\n".repeat(before)[..], told].concat();
            let received = read_to_end(&stream);
            let text = String::from_utf8_lossy;
            assert_eq!(text(&received), text(&expected), "{before} x get, {}", text(broken));
        }
    }
    // provokes: bad_framing
    assert_eq!(scene.dropped(DropReason::BadFraming), 9 * 6);
    // provokes: too_long
    assert_eq!(scene.dropped(DropReason::TooLong), 6);
    scene.finish();
}

// --- the smaller limits ---

#[test]
fn replies_out_of_turn_cost_bounded_memory() {
    let service = Service {
        framing: Framing::Memcached,
        max_message_bytes: 1024,
        ..Service::new("store", vec![tcp()], &store())
    };
    let limits = Limits { early_reply_bytes: 100, ..Limits::default() };
    let scene = Scene::new(vec![service], limits, 1);
    let mut stream = tcp_client(scene.at(0));
    let requests = [&b"get slow\r\n"[..], &b"version\r\n".repeat(40)].concat();
    stream.write_all(&requests).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let replies = String::from_utf8(read_to_end(&stream)).unwrap();
    let lines: Vec<&str> = replies.split_terminator("\r\n").collect();
    // Each request has one answer, in its turn: its own or, for want of memory, the error.
    assert_eq!(lines.len(), 41, "{replies}");
    assert_eq!(lines[0], "END");
    let refused = lines.iter().filter(|line| **line == "SERVER_ERROR out of capacity").count();
    let served = lines.iter().filter(|line| **line == "VERSION of the kernel's").count();
    assert_eq!(refused + served, 40, "{replies}");
    // provokes: reply_memory
    assert_eq!(scene.dropped(DropReason::ReplyMemory), refused as u64);
    assert!(refused > 0);
    drop(stream);
    scene.finish();
}

#[test]
fn a_reply_without_bytes_is_a_reply() {
    let service =
        Service { framing: Framing::Fixed(16), ..Service::new("store", vec![tcp()], &store()) };
    let scene = Scene::new(vec![service], Limits { pipelined: 2, ..Limits::default() }, 1);
    let mut stream = tcp_client(scene.at(0));
    for _ in 0..3 {
        stream.write_all(&b"mg nothing      ".repeat(10)).unwrap();
        assert_eq!(exchange(&mut stream, b"get something   ", 5), b"END\r\n");
    }
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(read_to_end(&stream).is_empty());
    assert_eq!(scene.server.metrics().service(0).replied, 33);
    drop(stream);
    scene.finish();
}

#[test]
fn datagrams_are_not_amplified() {
    let service = Service::new("store", vec![udp()], &store());
    let limits = Limits { udp_reply_ratio: Some(1), ..Limits::default() };
    let scene = Scene::new(vec![service], limits, 1);
    let client = udp_client(scene.at(0));
    for round in 1..=10 {
        // 24 bytes of answer for 9.
        client.send(b"version\r\n").unwrap();
        // provokes: reply_ratio
        scene.counted(DropReason::ReplyRatio, round);
        assert_eq!(ask(&client, b"get somekey\r\n"), b"END\r\n");
    }
    drop(client);
    scene.finish();
}
