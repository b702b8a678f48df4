//! Running out of descriptors. A separate test program, because the limit applies to the process.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use sys::{PortSpec, SocketNic, SocketOptions};
use wire::nic::{Event, Nic, NicError, Transport};

const CLIENTS: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn set_descriptor_limit(limit: u64) {
    // SAFETY: the structure outlives both calls.
    unsafe {
        let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits), 0);
        limits.rlim_cur = limit.min(limits.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits), 0);
    }
}

/// The lowest free descriptor.
fn next_descriptor() -> u64 {
    std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64
}

fn connect(to: SocketAddr) -> TcpStream {
    let client = TcpStream::connect(to).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

fn poll_for_connections(nic: &mut SocketNic, sleep_ns: u64) {
    let mut events = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while !events.contains(&Event::Connections(0)) {
        nic.poll(sleep_ns, &mut events);
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn connections_are_shed_while_no_descriptor_is_free() {
    let address = "127.0.0.1:0".parse().unwrap();
    let port = PortSpec { transport: Transport::Tcp, address };
    let mut nic = SocketNic::open(&[port], SocketOptions::default()).unwrap();
    let address = nic.local_addresses()[0];

    // With the reserve, every waiting client is reset at once.
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| connect(address)).collect();
    set_descriptor_limit(next_descriptor());
    poll_for_connections(&mut nic, 0);
    assert!(nic.accept(0).is_none());
    assert_eq!(nic.counters().shed_connections, CLIENTS as u64);
    assert_eq!(nic.connect(address, Transport::Tcp, 1), Err(NicError::Exhausted));
    for client in &mut clients {
        assert!(client.read(&mut [0; 8]).is_err(), "shed connections are reset");
    }

    // Without it (the limit fell below the number of open descriptors) nothing can be shed, and the
    // listener is retried later without spinning.
    set_descriptor_limit(1 << 16);
    let mut client = connect(address);
    poll_for_connections(&mut nic, 1_000_000);
    set_descriptor_limit(3);
    assert!(nic.accept(0).is_none());
    let mut events = Vec::new();
    nic.poll(0, &mut events);
    assert!(events.is_empty(), "a stalled listener does not spin");
    poll_for_connections(&mut nic, 0);
    assert!(nic.accept(0).is_none());
    let before = Instant::now();
    nic.poll(1_000_000, &mut events);
    assert_eq!(events, [Event::Connections(0)]);
    assert!(before.elapsed() >= Duration::from_millis(1), "a sleep does not turn into a spin");
    assert!(nic.accept(0).is_none());

    // Descriptors are free again: the waiting client is served, and the reserve is refilled.
    set_descriptor_limit(1 << 16);
    poll_for_connections(&mut nic, 1_000_000);
    let (socket, peer) = nic.accept(0).expect("a connection waits");
    assert_eq!(peer, client.local_addr().unwrap());
    nic.adopt(socket, 1).unwrap();
    assert_eq!(nic.write(1, b"welcome"), wire::nic::Written::Bytes(7));
    let mut answer = [0; 7];
    client.read_exact(&mut answer).unwrap();
    let _late = connect(address);
    poll_for_connections(&mut nic, 1_000_000);
    set_descriptor_limit(next_descriptor());
    assert!(nic.accept(0).is_none());
    assert_eq!(nic.counters().shed_connections, CLIENTS as u64 + 1);
    set_descriptor_limit(1 << 16);
}
