//! Polling: the cost of a spinning poll, and the events that end a sleep.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use sys::SocketNic;
use wire::nic::{Event, Nic, Read, TxBatch};

use crate::support::{
    PATIENCE, accept_as, echo_once, open, poll_for, rx, tcp, udp, udp_client, until,
};

/// A sleep so long that a missed wake-up would be noticed.
const LONG_NS: u64 = PATIENCE.as_nanos() as u64;

#[test]
fn spinning_reports_every_udp_port_and_sleeping_only_ready_ones() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"), udp("127.0.0.1:0")]);
    let mut events = Vec::new();
    nic.poll(0, &mut events);
    assert_eq!(events, [Event::Datagrams(0), Event::Datagrams(1)]);
    assert_eq!(nic.counters().epoll_calls, 0, "no epoll call without streams");
    udp_client(addresses[1]).send(b"x").unwrap();
    nic.poll(LONG_NS, &mut events);
    assert_eq!(events, [Event::Datagrams(1)]);
    // Not received yet: a further sleep must end at once as well.
    nic.poll(LONG_NS, &mut events);
    assert_eq!(events, [Event::Datagrams(1)]);
}

#[test]
fn a_paused_port_ends_no_sleep_until_it_is_resumed() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"), udp("127.0.0.1:0")]);
    let mut events = Vec::new();
    let (held, other) = (udp_client(addresses[0]), udp_client(addresses[1]));
    nic.pause_port(0, true);
    nic.pause_port(0, true);
    nic.poll(0, &mut events);
    assert_eq!(events, [Event::Datagrams(1)]);
    held.send(b"waits").unwrap();
    nic.poll(1_000_000, &mut events);
    assert_eq!(events, [], "a pending datagram of a paused port ends no sleep");
    other.send(b"x").unwrap();
    nic.poll(LONG_NS, &mut events);
    assert_eq!(events, [Event::Datagrams(1)]);
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    assert_eq!(echo_once(&mut nic, 1, &mut rx, &mut tx), 1);
    nic.pause_port(0, false);
    nic.pause_port(0, false);
    nic.poll(LONG_NS, &mut events);
    assert_eq!(events, [Event::Datagrams(0)]);
    assert_eq!(echo_once(&mut nic, 0, &mut rx, &mut tx), 1, "nothing was lost");
    nic.stop_port(0);
    nic.pause_port(0, false);
    nic.poll(0, &mut events);
    assert_eq!(events, [Event::Datagrams(1)], "a stopped port stays stopped");
}

#[test]
fn a_paused_listener_reports_a_connection_once() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut events = Vec::new();
    nic.pause_port(0, true);
    let mut clients = Vec::new();
    for _ in 0..2 {
        clients.push(TcpStream::connect(addresses[0]).unwrap());
        sleep_for_events(&mut nic, &mut events);
        assert_eq!(events, [Event::Connections(0)]);
        nic.poll(1_000_000, &mut events);
        assert_eq!(events, [], "the pending connection ends no further sleep");
    }
    nic.pause_port(0, false);
    accept_as(&mut nic, 0, 0);
    accept_as(&mut nic, 0, 1);
}

#[test]
fn a_quiet_listener_costs_a_spinning_udp_server_next_to_nothing() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"), tcp("127.0.0.1:0")]);
    let mut events = Vec::new();
    for _ in 0..1000 {
        nic.poll(0, &mut events);
    }
    let before = nic.counters().epoll_calls;
    for _ in 0..6400 {
        nic.poll(0, &mut events);
        assert_eq!(events, [Event::Datagrams(0)]);
    }
    let quiet = nic.counters().epoll_calls - before;
    assert!((90..=110).contains(&quiet), "{quiet} looks in 6400 polls");

    // Datagrams count as work, so that a busy UDP port does not starve the listener.
    let socket = udp_client(addresses[0]);
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    let before = nic.counters().epoll_calls;
    for _ in 0..100 {
        socket.send(b"x").unwrap();
        until(|| (echo_once(&mut nic, 0, &mut rx, &mut tx) > 0).then_some(()));
        nic.poll(0, &mut events);
    }
    assert!(nic.counters().epoll_calls - before >= 10);

    // A new connection makes every poll check the epoll set.
    let mut client = TcpStream::connect(addresses[1]).unwrap();
    until(|| {
        nic.poll(0, &mut events);
        events.contains(&Event::Connections(1)).then_some(())
    });
    accept_as(&mut nic, 1, 0);
    let before = nic.counters().epoll_calls;
    for _ in 0..100 {
        nic.poll(0, &mut events);
    }
    assert_eq!(nic.counters().epoll_calls - before, 100);
    client.write_all(b"x").unwrap();
    until(|| {
        nic.poll(0, &mut events);
        events.contains(&Event::Readable(0)).then_some(())
    });
}

#[test]
fn a_server_of_streams_alone_checks_epoll_on_every_poll() {
    let (mut nic, _) = open(&[tcp("127.0.0.1:0")]);
    let mut events = Vec::new();
    for _ in 0..1000 {
        nic.poll(0, &mut events);
        assert!(events.is_empty());
    }
    assert_eq!(nic.counters().epoll_calls, 1000);
}

#[test]
fn no_datagram_is_slept_through() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"), tcp("127.0.0.1:0")]);
    let socket = udp_client(addresses[0]);
    let client = thread::spawn(move || {
        let mut bytes = [0; 8];
        for round in 0..1000u64 {
            socket.send(&round.to_le_bytes()).unwrap();
            socket.recv(&mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), round);
        }
    });
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    let mut events = Vec::new();
    let mut echoed = 0;
    while echoed < 1000 {
        nic.poll(LONG_NS, &mut events);
        assert_eq!(events, [Event::Datagrams(0)], "missed the datagram of round {echoed}");
        echoed += echo_once(&mut nic, 0, &mut rx, &mut tx);
    }
    client.join().unwrap();
}

#[test]
fn streams_and_connections_end_a_sleep() {
    for ports in [vec![tcp("127.0.0.1:0")], vec![tcp("127.0.0.1:0"), udp("127.0.0.1:0")]] {
        let (mut nic, addresses) = open(&ports);
        let mut events = Vec::new();
        let (go, wait) = mpsc::channel();
        let client = thread::spawn(move || {
            let mut client = TcpStream::connect(addresses[0]).unwrap();
            for () in wait {
                client.write_all(b"x").unwrap();
            }
        });
        nic.poll(LONG_NS, &mut events);
        assert_eq!(events, [Event::Connections(0)]);
        accept_as(&mut nic, 0, 4);
        for _ in 0..200 {
            go.send(()).unwrap();
            sleep_for_events(&mut nic, &mut events);
            assert_eq!(events, [Event::Readable(4)]);
            assert_eq!(nic.read(4, &mut [0; 8]), Read::Bytes(1));
            assert_eq!(nic.read(4, &mut [0; 8]), Read::Empty);
        }
        drop(go);
        client.join().unwrap();
        sleep_for_events(&mut nic, &mut events);
        assert_eq!(events, [Event::Readable(4)]);
        assert_eq!(nic.read(4, &mut [0; 8]), Read::Closed);
    }
}

/// Sleeps until there are events; a sleep may end early without any, but not late.
fn sleep_for_events(nic: &mut SocketNic, events: &mut Vec<Event>) {
    until(|| {
        nic.poll(LONG_NS, events);
        (!events.is_empty()).then_some(())
    });
}

#[test]
fn no_wake_is_slept_through() {
    for ports in [vec![udp("127.0.0.1:0")], vec![]] {
        let (mut nic, _) = open(&ports);
        let waker = nic.waker();
        let asked = Arc::new(AtomicU32::new(0));
        let answered = Arc::new(AtomicU32::new(0));
        let (theirs, answers) = (Arc::clone(&asked), Arc::clone(&answered));
        let thread = thread::spawn(move || {
            for round in 1..=2000 {
                theirs.store(round, Ordering::Relaxed);
                waker.wake();
                if round % 3 == 0 {
                    waker.wake();
                }
                while answers.load(Ordering::Acquire) != round {
                    thread::yield_now();
                }
            }
        });
        let mut events = Vec::new();
        let mut seen = 0;
        while seen < 2000 {
            // Relaxed: the wake itself must make the word visible.
            let now = asked.load(Ordering::Relaxed);
            if now == seen {
                nic.poll(LONG_NS, &mut events);
                assert!(events.is_empty());
                continue;
            }
            seen = now;
            answered.store(seen, Ordering::Release);
        }
        thread.join().unwrap();
    }
}

#[test]
fn a_wake_before_the_sleep_ends_it_and_is_then_spent() {
    let (mut nic, _) = open(&[udp("127.0.0.1:0")]);
    let mut events = Vec::new();
    nic.waker().wake();
    nic.waker().clone().wake();
    nic.poll(0, &mut events);
    nic.poll(LONG_NS, &mut events);
    assert!(events.is_empty());
    let before = sys::time::monotonic_ns();
    nic.poll(2_000_000, &mut events);
    assert!(sys::time::monotonic_ns() - before >= 2_000_000, "a consumed wake ended this sleep");
}

#[test]
fn a_sleep_without_events_lasts_its_time() {
    for ports in [vec![udp("127.0.0.1:0")], vec![tcp("127.0.0.1:0")], vec![]] {
        let (mut nic, _) = open(&ports);
        let mut events = Vec::new();
        let before = sys::time::monotonic_ns();
        nic.poll(3_000_000, &mut events);
        assert!(sys::time::monotonic_ns() - before >= 3_000_000);
        assert!(events.is_empty());
    }
}

#[test]
fn a_nic_may_be_moved_to_its_worker() {
    let (nic, addresses) = open(&[udp("127.0.0.1:0"), tcp("127.0.0.1:0")]);
    let worker = thread::spawn(move || {
        let mut nic = nic;
        poll_for(&mut nic, Event::Datagrams(0));
        let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
        until(|| (echo_once(&mut nic, 0, &mut rx, &mut tx) > 0).then_some(()));
    });
    let socket = udp_client(addresses[0]);
    socket.send(b"x").unwrap();
    socket.recv(&mut [0; 8]).unwrap();
    worker.join().unwrap();
}
