//! Shared by the socket tests: opening, echoing and waiting without absolute times.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use sys::{OpenError, PortSpec, SocketNic, SocketOptions};
use wire::nic::{Event, Nic, RxBatch, StreamKey, Transport, TxBatch};

/// Far longer than any step takes; reaching it is a failure, not a measurement.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn udp(address: &str) -> PortSpec {
    PortSpec { transport: Transport::Udp, address: address.parse().unwrap() }
}

pub(crate) fn tcp(address: &str) -> PortSpec {
    PortSpec { transport: Transport::Tcp, address: address.parse().unwrap() }
}

pub(crate) fn open(ports: &[PortSpec]) -> (SocketNic, Vec<SocketAddr>) {
    let nic = SocketNic::open(ports, SocketOptions::default()).unwrap();
    let addresses = nic.local_addresses();
    (nic, addresses)
}

/// Repeats a test whose fixed port another program may have taken. A real refusal recurs every
/// time.
pub(crate) fn retry(mut test: impl FnMut() -> Result<(), OpenError>) {
    for _ in 0..20 {
        if test().is_ok() {
            return;
        }
    }
    test().unwrap();
}

pub(crate) fn rx() -> RxBatch {
    RxBatch::new(64, 65_536)
}

/// A connected UDP socket that gives up waiting after [`PATIENCE`].
pub(crate) fn udp_client(to: SocketAddr) -> UdpSocket {
    let any = if to.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Bytes that depend on their position and on `seed`.
pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 7 + at / 256) as u8).collect()
}

/// Receives once from a UDP port and sends everything back; returns the number of datagrams.
pub(crate) fn echo_once(
    nic: &mut SocketNic,
    port: u16,
    rx: &mut RxBatch,
    tx: &mut TxBatch,
) -> usize {
    nic.recv(port, rx);
    for datagram in &rx.items {
        assert!(tx.room_for(datagram.len as usize));
        let payload = rx.payload(datagram);
        tx.push(datagram.peer, datagram.local, payload.len(), |to| to.copy_from_slice(payload));
    }
    nic.send(port, tx);
    rx.items.len()
}

/// Repeats `step` until it returns something.
pub(crate) fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = step() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out");
    }
}

/// Polls until `wanted` accepts an event.
pub(crate) fn poll_until<T>(nic: &mut SocketNic, mut wanted: impl FnMut(Event) -> Option<T>) -> T {
    let mut events = Vec::new();
    until(|| {
        nic.poll(1_000_000, &mut events);
        events.iter().find_map(|&event| wanted(event))
    })
}

/// Polls until exactly this event is reported.
pub(crate) fn poll_for(nic: &mut SocketNic, wanted: Event) {
    poll_until(nic, |event| (event == wanted).then_some(()));
}

/// Accepts one connection on a port and adopts it under `key`.
pub(crate) fn accept_as(nic: &mut SocketNic, port: u16, key: StreamKey) -> SocketAddr {
    let (socket, peer) = until(|| nic.accept(port));
    nic.adopt(socket, key).unwrap();
    peer
}
