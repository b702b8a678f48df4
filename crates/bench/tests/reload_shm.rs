//! Services with shared-memory ports are added, changed and removed while their clients and others send requests
//! continuously.

mod common;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bench::client::shm::{Client, Options, ShmError};
use common::change::{Askers, change, service, threads};
use common::talk::{Talk, connect};
use common::*;
use engine::topology::{Service, Topology};
use server::{Server, ServiceAction};
use wire::DropReason;

/// A path that no other test uses.
fn port(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-reload-{}-{name}", std::process::id()))
}

fn shared(name: &str, paths: &[&Path]) -> Service {
    let mut service = service(name, vec![udp(), tcp()], "echo");
    service.memory_ports = paths.iter().map(|path| path.to_path_buf()).collect();
    service
}

/// Received requests were answered, or refused because the port was removed, and nothing else was sent.
fn assert_all_answered(server: &Server, service: usize, answered: u64) {
    assert_accounts(server);
    let counted = server.metrics().service(service);
    let refused = counted.dropped(DropReason::Draining);
    assert_eq!((counted.received - refused, counted.replied), (answered, answered), "{counted:?}");
}

fn clients_stay(workers: usize) {
    let (own, other) = (port(&format!("stays{workers}")), port(&format!("other{workers}")));
    let services = vec![shared("other", &[&other]), shared("b", &[&own])];
    let mut topology = topology(services);
    topology.engine.workers = workers;
    let mut server = start(topology);
    let askers = Askers::start(address(&server, 2), address(&server, 3));
    let (stop, talks) =
        (AtomicBool::new(false), [Talk::default(), Talk::default(), Talk::default()]);
    thread::scope(|scope| {
        let paths = [&other, &own, &own];
        let talking: Vec<_> = talks
            .iter()
            .zip(paths)
            .map(|(talk, path)| {
                let stop = &stop;
                scope.spawn(move || talk.run(path, stop))
            })
            .collect();
        let _stop = Stop(&stop);
        for round in 0..12 {
            talks.iter().for_each(Talk::keeps_getting_answers);
            let mut services = server.topology().services.clone();
            // Every worker has one: published credit is delayed.
            services[1].mqueues = 2 + round % 4;
            services[1].slots = 64 << (round % 3);
            let actions = change(&mut server, services);
            assert_eq!(actions[0].1, ServiceAction::Unchanged);
            assert!(matches!(
                actions[1].1,
                ServiceAction::Changed { keeps_memory_clients: true, .. }
            ));
        }
        talks.iter().for_each(Talk::keeps_getting_answers);
        stop.store(true, Ordering::Relaxed);
        for talk in talking {
            assert_eq!(talk.join().unwrap(), None, "no client was disconnected");
        }
    });
    // The server has requests in flight until these have ended.
    let asked = askers.finish();
    let counts = talks.map(|talk| talk.count());
    assert_all_answered(&server, 0, counts[0]);
    assert_all_answered(&server, 1, counts[1] + counts[2] + asked);
    assert!(server.shutdown().is_clean());
    assert!(!own.exists() && !other.exists());
}

#[test]
fn clients_in_shared_memory_move_to_the_new_version_and_lose_nothing() {
    let _alone = alone();
    clients_stay(1);
    clients_stay(2);
}

#[test]
fn clients_whose_regions_do_not_fit_get_the_reason_and_reconnect() {
    let _alone = alone();
    let path = port("shape");
    let mut server = start(topology(vec![shared("b", &[&path])]));
    let (stop, talk) = (AtomicBool::new(false), Talk::default());
    for round in 0..6 {
        thread::scope(|scope| {
            let talking = scope.spawn(|| talk.run(&path, &stop));
            let _stop = Stop(&stop);
            talk.keeps_getting_answers();
            let mut services = server.topology().services.clone();
            services[0].max_message_bytes = 100 + round;
            let actions = change(&mut server, services);
            assert!(matches!(
                actions[0].1,
                ServiceAction::Changed { keeps_memory_clients: false, .. }
            ));
            let why = talking.join().unwrap().expect("it is sent away");
            assert!(why.contains("now has another message format"), "{why}");
            assert_eq!(connect(&path).request_bytes_max(), 100 + round as usize);
        });
        stop.store(false, Ordering::Relaxed);
    }
    assert_all_answered(&server, 0, talk.count());
    assert!(server.shutdown().is_clean());
}

#[test]
fn shared_memory_ports_are_added_and_removed_with_their_clients() {
    let _alone = alone();
    let (first, second) = (port("first"), port("second"));
    // It does not exist at the start.
    let mut server = start(topology(vec![service("a", vec![udp(), tcp()], "echo")]));
    let askers = Askers::start(address(&server, 0), address(&server, 1));
    askers.go_on();
    let a = server.topology().services[0].clone();
    let talks = [Talk::default(), Talk::default()];
    let stops = [AtomicBool::new(false), AtomicBool::new(false)];
    let mut resources = Vec::new();
    for _ in 0..3 {
        let b = shared("b", &[&first, &second]);
        change(&mut server, vec![a.clone(), b.clone()]);
        thread::scope(|scope| {
            let leaves = scope.spawn(|| talks[0].run(&first, &stops[0]));
            let stays = scope.spawn(|| talks[1].run(&second, &stops[1]));
            let _stops = (Stop(&stops[0]), Stop(&stops[1]));
            talks.iter().for_each(Talk::keeps_getting_answers);
            // One of two ports.
            let fewer = Service { memory_ports: vec![second.clone()], ..b };
            change(&mut server, vec![a.clone(), fewer]);
            let why = leaves.join().unwrap().expect("its port goes");
            assert!(why.contains("is not a port of service \"b\" any more"), "{why}");
            eventually("the file goes", || !first.exists());
            talks[1].keeps_getting_answers();
            assert!(second.exists());
            // The service.
            change(&mut server, vec![a.clone()]);
            let why = stays.join().unwrap().expect("its service goes");
            assert!(why.contains("service \"b\" has been removed"), "{why}");
            eventually("the file goes", || !second.exists());
        });
        stops.iter().for_each(|stop| stop.store(false, Ordering::Relaxed));
        askers.go_on();
        // Regions are unmapped by another thread than the workers'.
        eventually("nothing of it is mapped", || common::change::maps("serval:b:") == 0);
        resources.push((sys::process::open_descriptors(), threads()));
    }
    assert_eq!(resources[0], resources[2], "descriptors and threads: {resources:?}");
    let answered = askers.finish();
    assert_all_answered(&server, 0, answered);
    assert!(server.shutdown().is_clean());
}

/// Every request that was published has one outcome, and the engine's counters agree.
#[test]
fn requests_in_the_ring_of_a_removed_port_have_outcomes() {
    let _alone = alone();
    let (goes, stays) = (port("goes"), port("remains"));
    for service_goes in [false, true] {
        let mut slow = shared("b", &[&goes, &stays]);
        slow.kernel = "delay".into();
        slow.params = vec![("microseconds".into(), 100_000.0.into())];
        (slow.mqueues, slow.slots) = (1, 1);
        let mut server = start(topology(vec![service("a", vec![udp()], "echo"), slow]));
        let metrics = server.metrics().services()[1].clone();
        let mut client =
            Client::connect(&goes, &Options { depth: 128, timeout: PATIENCE }).unwrap();
        for tag in 0..100 {
            client.try_send(tag, &[tag as u8; 32]).unwrap();
        }
        client.publish();
        eventually("one is taken", || metrics.snapshot().received > 0);
        let mut services = server.topology().services.clone();
        match service_goes {
            true => _ = services.pop(),
            false => services[1].memory_ports = vec![stays.clone()],
        }
        change(&mut server, services);
        // These are not taken any more.
        for tag in 100..110 {
            client.try_send(tag, &[tag as u8; 32]).unwrap();
        }
        let mut outcomes = vec![None; 110];
        let mut reply = vec![0; client.reply_bytes_max()];
        loop {
            match client.receive(&mut reply, PATIENCE) {
                Ok(Some(outcome)) => {
                    let answered = outcome.lost.is_none();
                    let before = outcomes[outcome.tag as usize].replace(answered);
                    assert_eq!(before, None, "a second outcome of {}", outcome.tag);
                    assert!(
                        answered || outcome.lost == Some(DropReason::Draining.into()),
                        "{outcome:?}"
                    );
                }
                Ok(None) => panic!("no outcome of {} requests", client.in_flight()),
                Err(ShmError::Ended(why)) => break assert!(why.contains("\"b\""), "{why}"),
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(client.in_flight(), 0);
        assert!(matches!(client.try_send(0, b"late"), Err(ShmError::Closed)));
        let answered = outcomes.iter().filter(|outcome| **outcome == Some(true)).count() as u64;
        assert!(outcomes.iter().all(Option::is_some), "{outcomes:?}");
        let counted = metrics.snapshot();
        assert_eq!((counted.received, counted.replied), (100, answered), "{counted:?}");
        // provokes: draining
        assert_eq!(counted.dropped(DropReason::Draining), 100 - answered, "{counted:?}");
        assert!(answered < 100, "none waited");
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn a_port_in_use_changes_nothing() {
    let _alone = alone();
    let (own, taken) = (port("own"), port("taken"));
    let mut server = start(topology(vec![shared("b", &[&own])]));
    let _holder = sys::local::LocalListener::bind(&taken).unwrap();
    let mut client = connect(&own);
    let mut wanted: Topology = server.topology().clone();
    wanted.services[0].slots = 128;
    wanted.services.push(shared("c", &[&taken]));
    let error = server.change(wanted.clone(), &|| false).unwrap_err().to_string();
    assert!(error.contains("taken"), "{error}");
    // From one service to another in two steps.
    wanted.services[0].memory_ports.clear();
    wanted.services[1].memory_ports = vec![own.clone()];
    let error = server.change(wanted, &|| false).unwrap_err().to_string();
    assert!(error.contains("in the same step in which service \"b\" gives it up"), "{error}");
    client.send(7, b"still there", PATIENCE).unwrap();
    let mut reply = vec![0; client.reply_bytes_max()];
    let answer = client.receive(&mut reply, PATIENCE).unwrap().expect("an answer");
    assert_eq!(&reply[..answer.len], b"still there");
    drop(client);
    assert!(server.shutdown().is_clean());
}
