//! Proxies over UDP: flows, their limits, what upstream servers do wrong, and drains.

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use common::*;
use engine::topology::{Service, Topology};
use wire::DropReason;
use wire::framing::{Framing, UdpHeader};

/// A server on a free port that does what `answer` says with each datagram: it gets the socket, the sender and the message.
struct Upstream {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    fn start(answer: impl Fn(&UdpSocket, SocketAddr, &[u8]) + Send + 'static) -> Self {
        Self::at(([127, 0, 0, 1], 0).into(), answer)
    }

    fn at(
        address: SocketAddr,
        answer: impl Fn(&UdpSocket, SocketAddr, &[u8]) + Send + 'static,
    ) -> Self {
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let address = socket.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let serve = move || {
            let mut message = vec![0; 65_536];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, peer)) = socket.recv_from(&mut message) {
                    answer(&socket, peer, &message[..len]);
                }
            }
        };
        Self { address, stop, thread: Some(thread::spawn(serve)) }
    }

    /// Answers with the message and who sent it.
    fn echo() -> Self {
        Self::start(|socket, peer, message| {
            let answer = [message, b" from ", peer.to_string().as_bytes()].concat();
            socket.send_to(&answer, peer).unwrap();
        })
    }

    /// Answers with the message.
    fn plain(socket: &UdpSocket, peer: SocketAddr, message: &[u8]) {
        socket.send_to(message, peer).unwrap();
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(thread::panicking() || ended.is_ok(), "the upstream server panicked");
    }
}

fn proxy(upstream: SocketAddr) -> Service {
    Service::proxy("proxy", vec![udp()], upstream)
}

fn one(service: Service) -> Topology {
    Topology { accelerators: Vec::new(), ..topology(vec![service]) }
}

#[test]
fn every_client_has_a_flow_of_its_own_and_gets_its_own_answers() {
    let upstream = Upstream::echo();
    let server = start(one(proxy(upstream.address)));
    let clients: Vec<_> = (0..50).map(|_| udp_client(address(&server, 0))).collect();
    let mut sources = Vec::new();
    for round in 0..3 {
        for (number, client) in clients.iter().enumerate() {
            client.send(format!("{number} {round}").as_bytes()).unwrap();
        }
        for (number, client) in clients.iter().enumerate() {
            let mut answer = [0; 200];
            let len = receive(client, &mut answer).expect("an answer in time");
            let text = std::str::from_utf8(&answer[..len]).unwrap();
            let (message, source) = text.split_once(" from ").unwrap();
            assert_eq!(message, format!("{number} {round}"));
            match round {
                0 => sources.push(source.to_owned()),
                _ => assert_eq!(sources[number], source, "a client keeps its socket"),
            }
        }
    }
    let mut different = sources.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), clients.len(), "each client has a socket of its own");
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert_eq!((counted.received, counted.replied), (150, 150));
    assert_eq!(counted.upstream_flows_opened, 50);
    assert!(server.shutdown().is_clean());
}

#[test]
fn an_answer_of_several_datagrams_is_delivered_whole() {
    // As many datagrams as the request says; one more with a number that nothing announced.
    let upstream = Upstream::start(|socket, peer, message| {
        let (header, body) = UdpHeader::split(message).unwrap();
        let command = std::str::from_utf8(body).unwrap();
        let total = command.strip_prefix("mg k").and_then(|rest| rest.strip_suffix("\r\n"));
        let total: u16 = total.unwrap().parse().unwrap();
        // The last one may come before the others.
        let (last, first) = (total - 1..total, 0..total - 1);
        let order = if total == 2 { last.chain(first) } else { first.chain(last) };
        for sequence in order {
            let part = UdpHeader { sequence, total, ..header }.bytes();
            socket.send_to(&[&part[..], &[sequence as u8; 1392]].concat(), peer).unwrap();
        }
        let more = UdpHeader { sequence: total, total: total + 1, ..header }.bytes();
        socket.send_to(&more, peer).unwrap();
    });
    let server = start(one(Service { framing: Framing::Memcached, ..proxy(upstream.address) }));
    let clients = [(); 2].map(|()| udp_client(address(&server, 0)));
    let mut delivered = 0;
    for (id, total) in [(1, 1u16), (2, 40), (3, 2), (4, 1)] {
        for client in &clients {
            let header = UdpHeader::request(id).bytes();
            let command = format!("mg k{total}\r\n");
            client.send(&[&header[..], command.as_bytes()].concat()).unwrap();
            for number in 0..total {
                let sequence = if total == 2 { 1 - number } else { number };
                let mut answer = [0; 2000];
                let len = receive(client, &mut answer).expect("a datagram in time");
                let (header, body) = UdpHeader::split(&answer[..len]).unwrap();
                assert_eq!(header, UdpHeader { id, sequence, total });
                assert!(body.len() == 1392 && body.iter().all(|b| *b == sequence as u8));
                delivered += 1;
            }
        }
    }
    let unasked = || server.metrics().service(0).dropped(DropReason::BackendUnasked);
    eventually("all that nothing announced is dropped", || unasked() == 8);
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert_eq!((counted.received, counted.replied), (delivered, delivered));
    assert!(server.shutdown().is_clean());
}

/// A proxy whose time-out is short enough to wait for.
fn impatient(upstream: SocketAddr) -> Service {
    Service { request_timeout_ms: 100, ..proxy(upstream) }
}

#[test]
// provokes: request_timeout, backend_late, backend_unasked
fn requests_time_out_and_what_comes_later_goes_to_nobody() {
    let late_peer = Mutex::new(None);
    let upstream = Upstream::start(move |socket, peer, message| match message {
        b"nothing" => {}
        b"late" => *late_peer.lock().unwrap() = Some(peer),
        b"answer it" => {
            let late = late_peer.lock().unwrap().expect("it has asked");
            socket.send_to(b"too late", late).unwrap();
            socket.send_to(message, peer).unwrap();
        }
        b"twice" => {
            socket.send_to(b"first", peer).unwrap();
            socket.send_to(b"second", peer).unwrap();
        }
        _ => Upstream::plain(socket, peer, message),
    });
    let server = start(one(impatient(upstream.address)));
    let client = udp_client(address(&server, 0));
    for _ in 0..5 {
        client.send(b"nothing").unwrap();
    }
    eventually("five time out", || dropped(&server, 0, DropReason::RequestTimeout) == 5);
    let late = udp_client(address(&server, 0));
    late.send(b"late").unwrap();
    eventually("one more times out", || dropped(&server, 0, DropReason::RequestTimeout) == 6);
    assert_eq!(ask(&udp_client(address(&server, 0)), b"answer it"), b"answer it");
    eventually("its answer comes", || dropped(&server, 0, DropReason::BackendLate) == 1);
    let twice = udp_client(address(&server, 0));
    assert_eq!(ask(&twice, b"twice"), b"first");
    eventually("the second answer comes", || dropped(&server, 0, DropReason::BackendUnasked) == 1);
    // Nothing of that stays.
    for client in [&client, &late, &twice] {
        assert_eq!(ask(client, b"and now?"), b"and now?");
    }
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
// provokes: upstream_refused
fn a_server_that_is_not_there_is_tried_again_with_each_request() {
    let address_of_nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = start(one(proxy(address_of_nobody)));
    let client = udp_client(address(&server, 0));
    for number in 1..=3 {
        client.send(b"anybody?").unwrap();
        eventually("the request is refused", || {
            dropped(&server, 0, DropReason::UpstreamRefused) == number
        });
    }
    let _upstream = Upstream::at(address_of_nobody, Upstream::plain);
    assert_eq!(ask(&client, b"anybody?"), b"anybody?");
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// A client with an address of its own.
fn client_from(host: u8, server: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(SocketAddr::from(([127, 0, 0, host], 0))).unwrap();
    socket.connect(server).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

#[test]
// provokes: upstream_flows
fn a_full_table_closes_idle_flows_first_and_active_ones_never() {
    let upstream = Upstream::start(|socket, peer, message| {
        if message != b"wait" {
            Upstream::plain(socket, peer, message);
        }
    });
    let mut topology = one(Service { upstream_flows: 4, ..proxy(upstream.address) });
    topology.engine.drain_ms = 0;
    let server = start(topology);
    let to = address(&server, 0);
    let client = || udp_client(to);
    let counted = || server.metrics().service(0);
    // Two are being served, and wait for an answer that does not come.
    let active = [client_from(2, to), client_from(3, to)];
    for client in &active {
        assert_eq!(ask(client, b"hello"), b"hello");
        client.send(b"wait").unwrap();
    }
    eventually("both wait", || counted().accepted == 4);
    // Ten come and go: they share the two places that are left.
    for number in 0..10 {
        let passing = client();
        assert_eq!(ask(&passing, format!("{number}").as_bytes()), format!("{number}").as_bytes());
    }
    assert_eq!((counted().upstream_flows_opened, counted().upstream_flows_evicted), (12, 8));
    assert_eq!(counted().dropped(DropReason::UpstreamFlows), 0);
    // Those that never get an answer give way, with what they asked.
    let silent: Vec<_> = (0..6).map(|_| client()).collect();
    for client in &silent {
        client.send(b"wait").unwrap();
    }
    eventually("four gave way", || counted().dropped(DropReason::UpstreamFlows) == 4);
    // The two that were served before have kept their places.
    for client in &active {
        assert_eq!(ask(client, b"still there?"), b"still there?");
        client.send(b"wait").unwrap();
    }
    let opened = counted().upstream_flows_opened;
    assert_eq!(opened, 12 + 6, "no flow was opened again");
    // With every place taken by an active one a new client gets none.
    let late = [client_from(4, to), client_from(5, to)];
    let before = counted();
    for client in &late {
        assert_eq!(ask(client, b"hello"), b"hello");
        client.send(b"wait").unwrap();
    }
    eventually("all four wait", || counted().accepted == before.accepted + 4);
    let before = counted();
    client().send(b"hello").unwrap();
    eventually("it is refused", || {
        counted().dropped(DropReason::UpstreamFlows) > before.dropped(DropReason::UpstreamFlows)
    });
    // What waits is given up.
    assert!(!server.shutdown().is_clean());
}

#[test]
fn one_host_cannot_keep_others_out() {
    let upstream = Upstream::start(|socket, peer, message| {
        if message != b"wait" {
            Upstream::plain(socket, peer, message);
        }
    });
    let mut topology = one(Service { upstream_flows: 16, ..proxy(upstream.address) });
    topology.engine.drain_ms = 0;
    let server = start(topology);
    let to = address(&server, 0);
    // It is answered on every flow, and has a request in flight on each.
    let hog: Vec<_> = (0..16).map(|_| client_from(2, to)).collect();
    for client in &hog {
        assert_eq!(ask(client, b"hello"), b"hello");
        client.send(b"wait").unwrap();
    }
    eventually("all wait", || server.metrics().service(0).accepted == 32);
    for number in 0..12 {
        let other = client_from(3 + number / 4, to);
        assert_eq!(ask(&other, b"hello"), b"hello");
        other.send(b"wait").unwrap();
    }
    let counted = server.metrics().service(0);
    assert_eq!(counted.dropped(DropReason::UpstreamFlows), 12);
    // Its share is still there.
    for client in &hog[..4] {
        assert_eq!(ask(client, b"still there?"), b"still there?");
    }
    assert_eq!(server.metrics().service(0).upstream_flows_opened, 16 + 12);
    assert!(!server.shutdown().is_clean());
}

#[test]
fn an_answer_that_comes_after_its_flow_was_closed_reaches_nobody() {
    let peers = Arc::new(Mutex::new(Vec::new()));
    let seen = peers.clone();
    let upstream = Upstream::start(move |socket, peer, message| {
        let mut peers = seen.lock().unwrap();
        peers.push(peer);
        if message != b"wait" {
            // The first client's answer, before that of this one.
            socket.send_to(b"secret", peers[0]).unwrap();
            Upstream::plain(socket, peer, message);
        }
    });
    let service = proxy(upstream.address);
    let service = Service { upstream_flows: 2, request_timeout_ms: 60_000, ..service };
    let mut topology = one(service);
    topology.engine.drain_ms = 0;
    let server = start(topology);
    let to = address(&server, 0);
    let waiting = [client_from(2, to), client_from(3, to)];
    for (number, client) in (1..).zip(&waiting) {
        client.send(b"wait").unwrap();
        eventually("it waits", || server.metrics().service(0).accepted == number);
    }
    // Each takes the place of another one, the first of them that of the first client.
    for number in 0..200 {
        assert_eq!(ask(&client_from(4, to), b"hello"), b"hello", "client {number}");
    }
    assert_eq!(dropped(&server, 0, DropReason::UpstreamFlows), 1);
    let peers = peers.lock().unwrap();
    assert!(!peers[1..].contains(&peers[0]), "its port is not used again");
    waiting[0].set_nonblocking(true).unwrap();
    assert!(waiting[0].recv(&mut [0; 64]).is_err(), "its flow is gone");
    // The other one waits still.
    drop(peers);
    assert!(!server.shutdown().is_clean());
}

#[test]
fn idle_flows_are_closed() {
    flows_are_closed(|topology| topology.limits.idle_ms = 50);
    flows_are_closed(|topology| topology.services[0].idle_ms = Some(50));
}

fn flows_are_closed(after_50_ms: impl Fn(&mut Topology)) {
    let upstream = Upstream::start(Upstream::plain);
    let mut topology = one(proxy(upstream.address));
    after_50_ms(&mut topology);
    let server = start(topology);
    let client = udp_client(address(&server, 0));
    for number in 1..=3 {
        assert_eq!(ask(&client, b"hello"), b"hello");
        eventually("the flow is closed", || {
            server.metrics().service(0).upstream_flows_closed == number
        });
    }
    let counted = server.metrics().service(0);
    assert_eq!((counted.upstream_flows_opened, counted.upstream_flows_evicted), (3, 0));
    assert!(server.shutdown().is_clean());
}

#[test]
fn several_workers_and_services_share_nothing() {
    let upstreams = [Upstream::echo(), Upstream::start(Upstream::plain)];
    let mut topology = one(proxy(upstreams[0].address));
    topology.services.push(Service {
        name: "other".into(),
        listen: vec![udp(), udp()],
        ..proxy(upstreams[1].address)
    });
    topology.engine.workers = 3;
    let server = start(topology);
    let clients: Vec<_> = (0..60).map(|n| udp_client(address(&server, n % 3))).collect();
    for round in 0..3 {
        for (number, client) in clients.iter().enumerate() {
            let message = pattern(1 + 20 * number, round);
            let answer = ask(client, &message);
            assert!(answer.starts_with(&message));
            assert_eq!(answer.len() > message.len(), number % 3 == 0, "of the right server");
        }
    }
    assert_accounts(&server);
    assert_eq!(server.metrics().service(0).replied, 60);
    assert_eq!(server.metrics().service(1).replied, 120);
    assert!(server.shutdown().is_clean());
}

#[test]
fn long_and_empty_datagrams_pass() {
    let upstream = Upstream::start(Upstream::plain);
    let server = start(one(proxy(upstream.address)));
    let client = udp_client(address(&server, 0));
    for len in [0, 1, 1472, 1473, 9000, 65_507] {
        assert_eq!(ask(&client, &pattern(len, 1)), pattern(len, 1), "{len} bytes");
    }
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_drain_waits_for_the_server_and_no_longer_than_it_may() {
    let upstream = Upstream::start(|socket, peer, message| {
        if message == b"soon" {
            let socket = socket.try_clone().unwrap();
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(200));
                socket.send_to(b"soon", peer).unwrap();
            });
        }
    });
    for (message, answered) in [(b"soon", true), (b"none", false)] {
        let mut topology = one(proxy(upstream.address));
        topology.engine.drain_ms = if answered { 60_000 } else { 300 };
        let server = start(topology);
        let client = udp_client(address(&server, 0));
        client.send(message).unwrap();
        eventually("it is in flight", || server.metrics().service(0).accepted == 1);
        let metrics = server.metrics().clone();
        assert_eq!(server.shutdown().is_clean(), answered);
        let counted = metrics.service(0);
        assert_eq!(counted.replied, u64::from(answered), "{counted:?}");
        assert_eq!(counted.dropped(DropReason::DrainTimeout), u64::from(!answered));
        if answered {
            assert_eq!(receive(&client, &mut [0; 64]).unwrap(), 4);
        }
    }
}

#[test]
fn a_reload_changes_the_server_behind_a_proxy_and_loses_nothing() {
    let upstreams = [Upstream::start(Upstream::plain), Upstream::echo()];
    let of = |upstream: usize| Service {
        request_timeout_ms: 60_000,
        ..proxy(upstreams[upstream].address)
    };
    let mut server = start(one(of(0)));
    let to = address(&server, 0);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let asker = thread::spawn(move || {
        let (client, mut asked) = (udp_client(to), 0u64);
        while !stopped.load(Ordering::Relaxed) {
            asked += 1;
            let message = asked.to_string();
            assert!(ask(&client, message.as_bytes()).starts_with(message.as_bytes()));
        }
        asked
    });
    let mut other = of(1);
    other.name = "other".into();
    for round in 1..7 {
        let mut services = vec![of(round % 2)];
        // Another proxy comes and goes.
        services.extend((round % 3 != 0).then(|| other.clone()));
        change::change(&mut server, services);
        assert_eq!(address(&server, 0), to);
        if round % 3 != 0 {
            let client = udp_client(address(&server, 1));
            assert!(ask(&client, b"hello").starts_with(b"hello from "));
        }
        let client = udp_client(to);
        assert_eq!(ask(&client, b"hello").len() > 5, round % 2 == 1, "of the new server");
    }
    stop.store(true, Ordering::Relaxed);
    let asked = asker.join().unwrap();
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert_eq!((counted.replied, counted.dropped_requests()), (asked + 6, 0));
    assert_eq!(counted.upstream_flows_opened, counted.upstream_flows_closed + 2);
    assert!(server.shutdown().is_clean());
}
