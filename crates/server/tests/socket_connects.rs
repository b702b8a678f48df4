//! Ten thousand connections to a kernel: each is answered, or refused with a counted reason, and nothing is left. And a kernel that returns when
//! its service drains.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use accel::compile::{BuildOptions, build_kernel};
use common::{Usage, address, eventually, start, tcp_client, topology_on};
use engine::topology::{CpuPlacement, Service, SocketSpec};
use server::Server;
use sockets::End;

/// Connections one after the other, and in bursts of these sizes: more than there are slots, fewer than a listener's backlog.
const ONE_BY_ONE: usize = 4_000;
const BURSTS: usize = 12;
const BURST: usize = 500;

/// Tests count the descriptors of this process: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes of one connection.
fn message(number: usize) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(b"echo");
    bytes
}

fn come(server: SocketAddr, number: usize) -> TcpStream {
    let mut stream = tcp_client(server);
    stream.write_all(&message(number)).unwrap();
    stream
}

/// Ends a connection whose answer has arrived: in order, after reading it, or with a reset, because it was not read.
fn leave(mut stream: TcpStream, number: usize) {
    let mut got = [0; 12];
    match number % 3 {
        0 => {
            stream.shutdown(Shutdown::Write).unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).unwrap();
            assert_eq!(rest, message(number), "connection {number}");
        }
        1 => {
            stream.read_exact(&mut got).unwrap();
            assert_eq!(got, message(number), "connection {number}");
        }
        // Bytes that were not read make the close a reset.
        _ => assert!(stream.peek(&mut got).unwrap() > 0, "connection {number}"),
    }
}

fn one_by_one(server: SocketAddr) {
    for number in 0..ONE_BY_ONE {
        leave(come(server, number), number);
    }
}

fn in_bursts(server: SocketAddr) {
    for _ in 0..BURSTS {
        let burst: Vec<TcpStream> = (0..BURST).map(|number| come(server, number)).collect();
        burst.into_iter().enumerate().for_each(|(number, stream)| leave(stream, number));
    }
}

/// Every connection has ended and was counted once, and all its bytes.
fn assert_over(server: &Server, connections: usize) {
    eventually("all connections are over", || {
        let counted = server.metrics().service(0);
        let ends: u64 = counted.socket_ends.iter().sum();
        (counted.sockets_opened, counted.sockets_closed, ends) == (connections as u64, ends, ends)
            && ends == connections as u64
    });
    eventually("all bytes are counted", || {
        let counted = server.metrics().service(0);
        let [taken, read, unread] =
            [counted.socket_received_bytes, counted.socket_read_bytes, counted.socket_unread_bytes];
        let [written, sent, unsent] =
            [counted.socket_written_bytes, counted.socket_sent_bytes, counted.socket_unsent_bytes];
        (taken, written) == (read + unread, sent + unsent) && taken == 12 * connections as u64
    });
    let counted = server.metrics().service(0);
    assert_eq!(counted.socket_bad_commands, 0);
    let by = |end: End| counted.socket_ends[end as usize];
    let expected = by(End::Closed) + by(End::ResetByPeer);
    assert_eq!(expected, connections as u64, "{:?}", counted.socket_ends);
}

#[test]
fn ten_thousand_connections_leave_nothing() {
    let _alone = alone();
    let threads = CpuPlacement::Threads { threads: 1, cores: Vec::new() };
    for placement in [CpuPlacement::Worker, threads] {
        let mut service = Service::new("streams", Vec::new(), "stream_echo");
        service.sockets = vec![SocketSpec::listen(SocketAddr::from(([127, 0, 0, 1], 0)))];
        (service.mqueues, service.sockets_per_block) = (4, 8);
        let server = start(topology_on(placement, vec![service]));
        let listener = address(&server, 0);
        let descriptors = || Usage::of(std::process::id()).descriptors;
        let before = descriptors();
        one_by_one(listener);
        in_bursts(listener);
        assert_over(&server, ONE_BY_ONE + BURSTS * BURST);
        // Every slot can be leased again.
        let slots = 4 * 8;
        let all: Vec<TcpStream> = (0..slots).map(|_| tcp_client(listener)).collect();
        let open = || {
            let counted = server.metrics().service(0);
            counted.sockets_opened - counted.sockets_closed
        };
        eventually("all slots are in use", || open() == slots);
        drop(all);
        eventually("all slots are free", || open() == 0);
        eventually("no descriptor is left", || descriptors() == before);
    }
}

/// The kernel returns when a receive says that the service drains. That is no failure: its connection ends in order, and so does the service.
#[test]
fn a_kernel_that_returns_on_a_drain_has_not_failed() {
    let _alone = alone();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/leaves.cpp");
    let kernel = Path::new(env!("CARGO_TARGET_TMPDIR")).join("leaves.so");
    build_kernel(&source, &kernel, &BuildOptions::default()).unwrap();
    let threads = CpuPlacement::Threads { threads: 1, cores: Vec::new() };
    for placement in [CpuPlacement::Worker, threads] {
        let mut service = Service::new("streams", Vec::new(), kernel.to_str().unwrap());
        service.sockets = vec![SocketSpec::listen(SocketAddr::from(([127, 0, 0, 1], 0)))];
        service.mqueues = 1;
        let mut topology = topology_on(placement, vec![service]);
        topology.engine.drain_ms = 600_000;
        let server = start(topology);
        let mut stream = tcp_client(address(&server, 0));
        stream.write_all(b"hello").unwrap();
        stream.read_exact(&mut [0; 5]).unwrap();
        let stopping = std::thread::spawn(move || server.shutdown().is_clean());
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it ends in order");
        eventually("the server stops long before its drain time is over", || {
            stopping.is_finished()
        });
        assert!(stopping.join().unwrap());
    }
}
