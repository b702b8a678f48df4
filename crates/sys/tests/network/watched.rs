//! Workers with several UDP ports: which of them a poll reports, and that none is forgotten.

use std::collections::VecDeque;
use std::net::UdpSocket;

use proptest::prelude::*;
use sys::{OpenPort, SocketNic, SocketOptions};
use wire::nic::{Event, Nic, RxBatch, TxBatch};

use crate::support::{PATIENCE, open, rx, tcp, udp, udp_client, until};

/// A sleep so long that a missed wake-up would be noticed.
const LONG_NS: u64 = PATIENCE.as_nanos() as u64;
/// Polls in a row with datagrams after which a port is asked, however many others are.
const BUSY: u32 = 16;
/// More empty receives than it takes until a port is not asked any more.
const IDLE: u32 = 40;

fn reported(events: &[Event]) -> Vec<u16> {
    let port = |event: &Event| match event {
        Event::Datagrams(port) => *port,
        other => panic!("{other:?}"),
    };
    events.iter().map(port).collect()
}

/// Polls and receives as a worker does, `turns` times; the ports of the datagrams.
fn spin(nic: &mut SocketNic, turns: u32) -> Vec<u16> {
    let (mut events, mut rx) = (Vec::new(), rx());
    let mut got = Vec::new();
    for _ in 0..turns {
        nic.poll(0, &mut events);
        for port in reported(&events) {
            nic.recv(port, &mut rx);
            got.extend(rx.items.iter().map(|_| port));
        }
    }
    got
}

/// The ports that two polls in a row report, without receives: a visit, which has no cause, is only in one of them.
fn reported_twice(nic: &mut SocketNic) -> Vec<u16> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    nic.poll(0, &mut first);
    nic.poll(0, &mut second);
    let mut ports = reported(&first);
    ports.retain(|port| second.contains(&Event::Datagrams(*port)));
    ports.sort_unstable();
    ports
}

/// Gives a port a datagram in each poll, until it is asked.
fn make_busy(nic: &mut SocketNic, port: u16, client: &UdpSocket) {
    until(|| {
        for _ in 0..BUSY {
            client.send(b"x").unwrap();
            // The host kernel may deliver it a little later, which breaks the row.
            until(|| spin(nic, 1).contains(&port).then_some(()));
        }
        (reported_twice(nic) == [port]).then_some(())
    });
}

#[test]
fn of_several_ports_those_are_reported_that_have_datagrams() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"); 4]);
    assert_eq!(reported_twice(&mut nic), []);
    let clients: Vec<_> = addresses.iter().map(|address| udp_client(*address)).collect();
    for _ in 0..3 {
        for (port, client) in (0..).zip(&clients) {
            client.send(b"x").unwrap();
            let found = until(|| Some(spin(&mut nic, 1)).filter(|got| !got.is_empty()));
            assert_eq!(found, [port]);
            assert_eq!(reported_twice(&mut nic), [], "it is empty");
        }
    }
    // A port that is not read is reported until it is, by a sleep as well.
    clients[1].send(b"x").unwrap();
    clients[2].send(b"x").unwrap();
    let (mut events, mut rx) = (Vec::new(), rx());
    let mut seen = Vec::new();
    until(|| {
        nic.poll(0, &mut events);
        seen.extend(reported(&events));
        (seen.contains(&1) && seen.contains(&2)).then_some(())
    });
    assert_eq!(reported_twice(&mut nic), [1, 2]);
    for _ in 0..2 {
        nic.poll(LONG_NS, &mut events);
        let mut ports = reported(&events);
        ports.sort_unstable();
        assert_eq!(ports, [1, 2]);
    }
    nic.recv(1, &mut rx);
    assert_eq!(reported_twice(&mut nic), [2]);
    assert_eq!(spin(&mut nic, 1), [2]);
    assert_eq!(reported_twice(&mut nic), []);
}

#[test]
fn ports_with_datagrams_every_few_polls_are_asked_until_they_have_none() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"); 3]);
    let clients: Vec<_> = addresses.iter().map(|address| udp_client(*address)).collect();
    for _ in 0..3 {
        make_busy(&mut nic, 1, &clients[1]);
        // It is not in the epoll set, and ends a sleep all the same, as one in the set does.
        let (mut events, mut rx) = (Vec::new(), rx());
        for port in [1, 0] {
            clients[usize::from(port)].send(b"x").unwrap();
            nic.poll(LONG_NS, &mut events);
            assert_eq!(reported(&events), [port]);
            nic.recv(port, &mut rx);
            assert_eq!(rx.items.len(), 1);
        }
        assert_eq!(spin(&mut nic, IDLE), []);
        assert_eq!(reported_twice(&mut nic), [], "it is in the set again");
    }
    // Of those that have something every few polls two are asked, whose clients may wait for each answer.
    until(|| {
        for _ in 0..8 {
            clients.iter().for_each(|client| _ = client.send(b"x").unwrap());
            let mut left = 3;
            until(|| {
                left -= spin(&mut nic, 4).len();
                (left == 0).then_some(())
            });
        }
        let asked = reported_twice(&mut nic).len();
        assert!(asked <= 2, "{asked} are asked");
        (asked == 2).then_some(())
    });
    assert_eq!(spin(&mut nic, IDLE), []);
    assert_eq!(reported_twice(&mut nic), []);
    // All of them: then the set is not looked at.
    until(|| {
        for (port, client) in (0..).zip(&clients) {
            client.send(b"x").unwrap();
            let before = nic.counters().epoll_calls;
            until(|| spin(&mut nic, 1).contains(&port).then_some(()));
            if nic.counters().epoll_calls == before {
                return Some(());
            }
        }
        // One poll for the three of them keeps the row.
        for _ in 0..2 * BUSY {
            clients.iter().for_each(|client| _ = client.send(b"x").unwrap());
            let mut left = vec![0, 1, 2];
            until(|| {
                let got = spin(&mut nic, 1);
                left.retain(|port| !got.contains(port));
                left.is_empty().then_some(())
            });
        }
        None
    });
}

#[test]
fn an_idle_port_is_visited_now_and_then() {
    let (mut nic, _) = open(&[udp("127.0.0.1:0"), tcp("127.0.0.1:0"), udp("127.0.0.1:0")]);
    // Few UDP ports are asked always.
    assert_eq!(reported_twice(&mut nic), [0, 2]);
    let (mut nic, _) = open(&[udp("127.0.0.1:0"), udp("127.0.0.1:0"), udp("127.0.0.1:0")]);
    let mut visits = [0; 3];
    let mut events = Vec::new();
    for _ in 0..1024 * 30 {
        nic.poll(0, &mut events);
        reported(&events).iter().for_each(|port| visits[usize::from(*port)] += 1);
    }
    assert_eq!(visits, [10; 3]);
}

#[test]
fn a_port_of_several_is_paused_resumed_stopped_and_added() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"); 3]);
    let mut events = Vec::new();
    let clients: Vec<_> = addresses.iter().map(|address| udp_client(*address)).collect();
    let held = &clients[0];
    // Also while it is asked.
    for is_busy in [false, true] {
        if is_busy {
            make_busy(&mut nic, 0, held);
        }
        nic.pause_port(0, true);
        held.send(b"waits").unwrap();
        nic.poll(1_000_000, &mut events);
        assert_eq!(events, [], "a pending datagram of a paused port ends no sleep");
        assert_eq!(reported_twice(&mut nic), [1, 2], "the other two are asked always");
        nic.pause_port(0, false);
        until(|| Some(spin(&mut nic, 1)).filter(|got| got == &[0]));
        assert_eq!(reported_twice(&mut nic), [], "all are in the epoll set");
    }
    // One that has something when it is resumed ends the next sleep.
    nic.pause_port(0, true);
    held.send(b"waits").unwrap();
    nic.pause_port(0, false);
    nic.poll(LONG_NS, &mut events);
    assert_eq!(reported(&events), [0]);
    nic.stop_port(0);
    nic.poll(1_000_000, &mut events);
    assert_eq!(events, [], "a stopped port ends no sleep");
    // With two ports left both are asked always, and keep what they have.
    clients[2].send(b"x").unwrap();
    assert_eq!(reported_twice(&mut nic), [1, 2]);
    until(|| Some(spin(&mut nic, 1)).filter(|got| got == &[2]));
    // Another one in the place of the stopped one.
    nic.close_port(0);
    let options = SocketOptions::default();
    let port = OpenPort::open_all(udp("127.0.0.1:0"), 1, &options).unwrap().remove(0);
    let client = udp_client(port.address());
    client.send(b"first").unwrap();
    nic.add_port(0, port).unwrap();
    for client in [&client, &clients[1], &clients[2]] {
        client.send(b"x").unwrap();
    }
    let mut got = Vec::new();
    until(|| {
        got.extend(spin(&mut nic, 1));
        (got.len() == 4).then_some(())
    });
    got.sort_unstable();
    assert_eq!(got, [0, 0, 1, 2]);
    assert_eq!(reported_twice(&mut nic), []);
    nic.stop_listening();
    client.send(b"is not read").unwrap();
    nic.poll(1_000_000, &mut events);
    assert_eq!(events, []);
}

#[test]
fn a_refused_reply_keeps_no_port_reported() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"); 3]);
    let client = udp_client(addresses[0]);
    let gone = udp_client(addresses[0]).local_addr().unwrap();
    for _ in 0..3 {
        // The host kernel hears that nothing listens there.
        let mut tx = TxBatch::new(64, 1 << 20);
        tx.push(gone, None, 8, |bytes| bytes.fill(1));
        assert_eq!(nic.send(0, &mut tx).sent, 1);
        assert_eq!(spin(&mut nic, IDLE), []);
        assert_eq!(reported_twice(&mut nic), []);
        client.send(b"x").unwrap();
        until(|| Some(spin(&mut nic, 1)).filter(|got| got == &[0]));
    }
}

/// A receive call that fills as many buffers as it may says that there may be more.
#[test]
fn a_short_window_says_whether_more_may_wait() {
    for ports in [1, 3] {
        let (mut nic, addresses) = open(&vec![udp("127.0.0.1:0"); ports]);
        let client = udp_client(addresses[0]);
        (0..5).for_each(|_| _ = client.send(b"x").unwrap());
        let mut rx = rx();
        rx.most_buffers = 2;
        let mut got = 0;
        until(|| {
            let more = nic.recv(0, &mut rx);
            got += rx.items.len();
            assert_eq!(more, rx.items.len() == 2, "of two buffers");
            (got == 5).then_some(())
        });
    }
}

/// What is done to one of the ports.
#[derive(Clone, Debug)]
enum Step {
    Send {
        port: usize,
        count: usize,
    },
    /// A turn that reads what is reported, at most this many buffers of each port; with `skip`, that port is not read.
    Turn {
        most: u32,
        skip: Option<usize>,
    },
    /// A sleep, if something waits.
    Sleep,
    Pause(usize),
    Resume(usize),
    Replace(usize),
}

fn steps(ports: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..ports, 1..40usize).prop_map(|(port, count)| Step::Send { port, count }),
        9 => (1..20u32, prop::option::of(0..ports)).prop_map(|(most, skip)| Step::Turn { most, skip }),
        3 => Just(Step::Sleep),
        1 => (0..ports).prop_map(Step::Pause),
        2 => (0..ports).prop_map(Step::Resume),
        1 => (0..ports).prop_map(Step::Replace),
    ];
    prop::collection::vec(step, 1..120)
}

/// The ports of a NIC, and what was sent to them.
struct Model {
    nic: SocketNic,
    clients: Vec<UdpSocket>,
    waiting: Vec<VecDeque<u32>>,
    paused: Vec<bool>,
    sent: u32,
    rx: RxBatch,
    events: Vec<Event>,
}

impl Model {
    fn new(ports: usize) -> Self {
        let (nic, addresses) = open(&vec![udp("127.0.0.1:0"); ports]);
        Self {
            nic,
            clients: addresses.iter().map(|address| udp_client(*address)).collect(),
            waiting: vec![VecDeque::new(); ports],
            paused: vec![false; ports],
            sent: 0,
            rx: rx(),
            events: Vec::new(),
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Send { port, count } => {
                for _ in 0..count {
                    self.clients[port].send(&self.sent.to_le_bytes()).unwrap();
                    self.waiting[port].push_back(self.sent);
                    self.sent += 1;
                }
            }
            Step::Turn { most, skip } => {
                self.nic.poll(0, &mut self.events);
                self.read(most, skip);
            }
            Step::Sleep if self.readable().next().is_some() => {
                self.nic.poll(LONG_NS, &mut self.events);
                assert!(!self.events.is_empty(), "something waits");
                self.read(u32::MAX, None);
            }
            Step::Sleep => {}
            Step::Pause(port) => self.pause(port, true),
            Step::Resume(port) => self.pause(port, false),
            Step::Replace(port) => {
                self.nic.close_port(port as u16);
                let options = SocketOptions::default();
                let new = OpenPort::open_all(udp("127.0.0.1:0"), 1, &options).unwrap().remove(0);
                self.clients[port] = udp_client(new.address());
                self.waiting[port].clear();
                self.paused[port] = false;
                self.nic.add_port(port as u16, new).unwrap();
            }
        }
    }

    fn pause(&mut self, port: usize, paused: bool) {
        self.nic.pause_port(port as u16, paused);
        self.paused[port] = paused;
    }

    /// The ports with something that can be read.
    fn readable(&self) -> impl Iterator<Item = usize> {
        let ports = 0..self.clients.len();
        ports.filter(|port| !self.paused[*port] && !self.waiting[*port].is_empty())
    }

    fn read(&mut self, most: u32, skip: Option<usize>) {
        let mut ports = reported(&self.events);
        ports.sort_unstable();
        ports.dedup();
        for port in ports {
            assert!(!self.paused[usize::from(port)], "{port} is paused");
            if skip == Some(usize::from(port)) {
                continue;
            }
            self.rx.most_buffers = most;
            self.nic.recv(port, &mut self.rx);
            assert_eq!(self.rx.overflowed, 0);
            for datagram in &self.rx.items {
                let got = self.rx.payload(datagram);
                let next = self.waiting[usize::from(port)].pop_front();
                assert_eq!(Some(got), next.map(u32::to_le_bytes).as_ref().map(|word| &word[..]));
            }
        }
    }

    /// Everything that was sent arrives, and then nothing is reported.
    fn settle(&mut self) {
        (0..self.clients.len()).for_each(|port| self.pause(port, false));
        until(|| {
            self.run(&Step::Turn { most: u32::MAX, skip: None });
            self.readable().next().is_none().then_some(())
        });
        if self.clients.len() > 2 {
            (0..IDLE).for_each(|_| self.run(&Step::Turn { most: 1, skip: None }));
            assert_eq!(reported_twice(&mut self.nic), []);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Whatever is read, in part or not, paused, resumed and replaced: no datagram waits unnoticed, in polls and in sleeps.
    #[test]
    fn no_port_is_forgotten((ports, steps) in (1..7usize).prop_flat_map(|ports| (Just(ports), steps(ports)))) {
        let mut model = Model::new(ports);
        steps.iter().for_each(|step| model.run(step));
        model.settle();
    }
}
