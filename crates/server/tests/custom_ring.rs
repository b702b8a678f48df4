//! The ring of an application: what its function delivers, in order and without a loss, or counted.

mod common;

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::change::{change, service};
use common::*;
use mqueue::{MappedMemory, Memory as _, Region};
use onpath::Spec;
use runtime::custom_ring::{CustomRing, Delivered};
use server::{Caller, Place, Server, Target};
use sys::SharedMemory;
use wire::DropReason;

/// As [`service`] frames messages.
const LEN: usize = 32;
const LONG: Duration = Duration::from_secs(60);

fn one(workers: usize) -> Server {
    let mut topology = topology(vec![service("a", vec![udp(), tcp()], "echo")]);
    topology.engine.workers = workers;
    start(topology)
}

/// A function that delivers everything, with a ring. It is not attached.
fn deliver(server: &mut Server, entries: u32) -> (u64, CustomRing) {
    let mut spec = Spec::new("deliver", "deliver");
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    let id = server.functions.create(&server.engine, Caller::engine(), &spec, None, false).unwrap();
    let (files, workers) = server
        .functions
        .make_ring(&server.engine, Caller::engine(), id, entries, LEN as u32)
        .unwrap();
    assert_eq!(workers, server.topology().engine.workers);
    (id, CustomRing::open(files).unwrap())
}

fn attach(server: &mut Server, id: u64) {
    server
        .functions
        .attach_created(&server.engine, Caller::engine(), id, "a", &Place::Default)
        .unwrap();
}

fn message(client: u64, sequence: u64) -> [u8; LEN] {
    let mut message = [0x5a; LEN];
    message[..8].copy_from_slice(&client.to_be_bytes());
    message[8..16].copy_from_slice(&sequence.to_be_bytes());
    message
}

fn sent_by(message: &[u8]) -> (u64, u64) {
    let number = |at: usize| u64::from_be_bytes(*message[at..].first_chunk().unwrap());
    assert_eq!((message.len(), &message[16..]), (LEN, &[0x5a; 16][..]));
    (number(0), number(8))
}

/// The next request; fails the test if there is none in time.
fn read(ring: &mut CustomRing, message: &mut Vec<u8>) -> Delivered {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(delivered) = ring.read(message).unwrap() {
            return delivered;
        }
        assert!(Instant::now() < deadline, "nothing is delivered");
        ring.wait(Duration::from_secs(1));
    }
}

#[test]
fn a_million_requests_arrive_in_order_and_none_is_lost() {
    const CLIENTS: u64 = 4;
    const EACH: u64 = 250_000;
    /// Requests of a client that were sent and not read, at most. All of them fit.
    const AHEAD: u64 = 1024;
    const BURST: u64 = 64;
    let _alone = alone();
    let mut server = one(2);
    let (id, mut ring) = deliver(&mut server, 4096);
    attach(&mut server, id);
    let at = address(&server, 1);
    let counts: Arc<Vec<AtomicU64>> = Arc::new((0..CLIENTS).map(|_| AtomicU64::new(0)).collect());
    let senders: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let counts = counts.clone();
            std::thread::spawn(move || -> TcpStream {
                let mut stream = tcp_client(at);
                let deadline = Instant::now() + 2 * LONG;
                for first in (0..EACH).step_by(BURST as usize) {
                    while first + BURST > counts[client as usize].load(Ordering::Relaxed) + AHEAD {
                        assert!(Instant::now() < deadline, "client {client} waits at {first}");
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    let burst = (first..EACH.min(first + BURST)).map(|at| message(client, at));
                    stream.write_all(&burst.collect::<Vec<_>>().concat()).unwrap();
                }
                stream
            })
        })
        .collect();
    let (mut found, mut numbers) = (Vec::new(), [0; 2]);
    for _ in 0..CLIENTS * EACH {
        let Delivered { worker, number, client } = read(&mut ring, &mut found);
        let next = &mut numbers[worker as usize];
        assert_eq!((number, client), (*next, None), "of worker {worker}");
        *next += 1;
        let (client, sequence) = sent_by(&found);
        assert_eq!(counts[client as usize].fetch_add(1, Ordering::Relaxed), sequence, "{client}");
    }
    assert_eq!(ring.read(&mut found), Ok(None));
    let streams: Vec<_> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
    eventually("the last ones are counted", || {
        let counted = server.functions.list(&server.engine, Caller::engine()).remove(0).counted;
        server.metrics().service(0).consumed + counted.delivered == 2 * CLIENTS * EACH
    });
    assert_accounts(&server);
    let a = server.metrics().service(0);
    assert_eq!((a.received, a.consumed, a.replied), (CLIENTS * EACH, CLIENTS * EACH, 0));
    let counted = server.functions.list(&server.engine, Caller::engine()).remove(0).counted;
    assert_eq!((counted.delivered, counted.ring_full), (CLIENTS * EACH, 0));
    drop(streams);
    assert!(server.shutdown().is_clean());
}

#[test]
fn what_finds_no_room_is_counted_and_leaves_a_gap_in_the_numbers() {
    let _alone = alone();
    let mut server = one(1);
    let (id, mut ring) = deliver(&mut server, 16);
    attach(&mut server, id);
    let client = udp_client(address(&server, 0));
    let from = client.local_addr().unwrap();
    let counted = |server: &Server| {
        let counted = server.functions.list(&server.engine, Caller::engine()).remove(0).counted;
        (counted.delivered, counted.ring_full)
    };
    let mut sent = 0;
    let mut send = |server: &Server, count: u64| {
        for _ in 0..count {
            client.send(&message(7, sent)).unwrap();
            sent += 1;
            // Datagrams are not lost on the way if each is awaited.
            eventually("it is delivered or dropped", || {
                let (delivered, full) = counted(server);
                delivered + full == sent
            });
        }
    };
    send(&server, 40);
    assert_eq!(counted(&server), (16, 24));
    assert_eq!(dropped(&server, 0, DropReason::RingFull), 24);
    let mut found = Vec::new();
    let mut expect = |ring: &mut CustomRing, number: u64| {
        let delivered = read(ring, &mut found);
        assert_eq!((delivered.number, sent_by(&found)), (number, (7, number)));
        assert_eq!(delivered.client.map(Into::into), Some(from));
    };
    (0..16).for_each(|number| expect(&mut ring, number));
    assert_eq!(ring.read(&mut Vec::new()), Ok(None), "the places are given back");
    send(&server, 3);
    (40..43).for_each(|number| expect(&mut ring, number));
    // What the ring has survives a detach, other instances, and another version of the service.
    send(&server, 2);
    server.functions.detach(&server.engine, Caller::engine(), &Target::Id(id)).unwrap();
    attach(&mut server, id);
    let mut a = server.topology().services[0].clone();
    a.slots = 32;
    change(&mut server, vec![a]);
    client.send(&message(7, 45)).unwrap();
    (43..46).for_each(|number| expect(&mut ring, number));
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_ring_that_is_refused_leaves_the_one_that_there_is_and_a_user_has_a_share() {
    let _alone = alone();
    let mut server = one(1);
    let (id, mut ring) = deliver(&mut server, 16);
    let engine = Caller::engine();
    assert!(server.functions.make_ring(&server.engine, engine, id, 16_384, 65_536).is_err());
    attach(&mut server, id);
    let client = udp_client(address(&server, 0));
    client.send(&message(0, 3)).unwrap();
    let mut found = Vec::new();
    read(&mut ring, &mut found);
    assert_eq!(sent_by(&found), (0, 3));
    // What a user cannot have is left for the operator, and for another user. One of theirs is replaced, so it does not count.
    let users = [1, 2].map(|more| Caller { user: engine.user + more, connection: None });
    let mut made = |caller, name: &str, entries| {
        let spec = Spec::new(name, "deliver");
        let id = server.functions.create(&server.engine, caller, &spec, None, false).unwrap();
        let made =
            server.functions.make_ring(&server.engine, caller, id, entries, 16_384).map(drop);
        (id, made.map_err(|error| error.to_string()))
    };
    let (first, small) = made(users[0], "a", 2048);
    assert_eq!(small, Ok(()));
    let (_, large) = made(users[0], "b", 2048);
    let large = large.unwrap_err();
    assert!(large.contains("those of a user 64: give it fewer entries"), "{large}");
    assert_eq!(made(users[1], "a", 2048).1, Ok(()));
    assert_eq!(made(engine, "c", 4096).1, Ok(()));
    assert!(
        server.functions.make_ring(&server.engine, users[0], first, 2048, 16_384).is_ok(),
        "in place of its first one"
    );
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_ring_that_cannot_be_is_refused_in_one_sentence() {
    let _alone = alone();
    let mut server = one(1);
    let (id, _ring) = deliver(&mut server, 16);
    let other = Caller { user: Caller::engine().user + 1, connection: None };
    let mut refused = |caller, id, entries, bytes| {
        server
            .functions
            .make_ring(&server.engine, caller, id, entries, bytes)
            .expect_err("it is refused")
            .to_string()
    };
    let engine = Caller::engine();
    assert!(refused(engine, id, 3, 32).contains("has 3 entries, and not a power of two"));
    assert!(refused(engine, id, 0, 32).contains("has 0 entries"));
    assert!(refused(engine, id, 32_768, 32).contains("has 32768 entries"));
    assert!(refused(engine, id, 16, 0).contains("up to 0 bytes"));
    let large = refused(engine, id, 16_384, 65_536);
    assert!(large.contains("all rings together have at most 256"), "{large}");
    assert!(refused(engine, 1, 16, 32).contains("there is no function 1"));
    assert!(refused(other, id, 16, 32).contains("there is no function"));
    attach(&mut server, id);
    let attached =
        server.functions.make_ring(&server.engine, engine, id, 16, 32).err().unwrap().to_string();
    assert!(
        attached.contains("is attached to service \"a\" already: detach it first"),
        "{attached}"
    );
    assert!(server.shutdown().is_clean());
}

/// The application may write anything into its ring: only its own requests are lost, and each is counted.
#[test]
fn an_application_that_spoils_its_ring_gets_nothing_more() {
    let _alone = alone();
    for spoiled in [u64::MAX, 1 << 40, 5] {
        let mut server = one(1);
        let mut spec = Spec::new("deliver", "deliver");
        spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
        let id =
            server.functions.create(&server.engine, Caller::engine(), &spec, None, false).unwrap();
        let (files, _) = server
            .functions
            .make_ring(&server.engine, Caller::engine(), id, 4, LEN as u32)
            .unwrap();
        let memory =
            SharedMemory::open(files[0].as_fd().try_clone_to_owned().unwrap(), 1 << 24, false);
        let memory = MappedMemory::new(Arc::new(memory.unwrap()));
        let region = Region::join(memory.clone()).unwrap();
        let tail = region.rings_of(0)[0].tail_offset;
        attach(&mut server, id);
        memory.store(tail, spoiled, mqueue::memory::Ordering::Relaxed);
        let client = udp_client(address(&server, 0));
        for sequence in 0..20 {
            client.send(&message(0, sequence)).unwrap();
            eventually("it ends", || {
                let counted =
                    server.functions.list(&server.engine, Caller::engine()).remove(0).counted;
                counted.delivered + counted.ring_full == sequence + 1
            });
        }
        assert_eq!(dropped(&server, 0, DropReason::RingFull), 16, "the ring is not used any more");
        server.functions.detach(&server.engine, Caller::engine(), &Target::Id(id)).unwrap();
        assert_eq!(ask(&client, &message(0, 0)), message(0, 0));
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}
