//! Sleeping and waking: PARK wherever it is used, with the DOORBELL that accelerator threads poll.
//!
//! A sleep is loom's `Notify`: one token, like an eventfd or a parked thread. A missed wake-up is a
//! deadlock, which loom reports.

use std::rc::Rc;

use loom::sync::Notify;
use loom::thread;
use mqueue::abi::{protocol, stop};
use mqueue::{Doorbells, Listener, ParkWord, Region, Words};

use super::*;

/// The sleeping side: the engine's worker, or the accelerator's side (a shared-memory client).
#[derive(Clone, Copy, PartialEq)]
enum Sleeper {
    Worker,
    Client,
}

/// The words that these models access concurrently; no model shares slots.
fn kinds_of(places: &Places, _: Weak) -> Kinds {
    let raced = [places.rx_head, places.rx_tail, places.tx_head, places.tx_tail];
    let parked = [ENGINE_PARKED, CLIENT_PARKED, STOP_OFFSET];
    Kinds {
        atomic: raced.into_iter().chain(parked).map(word).collect(),
        owned: vec![places.slots.clone(), places.tx_slots.clone()],
    }
}

/// Takes `count` messages from `ring`; when it is empty, calls `sleep` with a function that checks
/// the ring once more.
fn take(ring: &mut In, count: u64, mut sleep: impl FnMut(&mut In)) {
    let mut taken = 0;
    while taken < count {
        if read(ring, taken, 8) {
            ring.release();
            taken += 1;
        } else {
            sleep(ring);
        }
    }
}

fn is_empty(ring: &mut In) -> bool {
    ring.peek().unwrap().is_none()
}

/// A region's own PARK words: a worker waits for a client's requests, or a client for its replies.
fn park(who: Sleeper, weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let kinds = kinds_of(&places(&plan), weak);
    move || {
        let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
        let mut engine = Region::format(memory.clone(), &plan).unwrap();
        let mut client = Region::join(memory).unwrap();
        let (rx, requests) = engine.engine_ends(0);
        let (replies, tx) = client.accelerator_ends(0);
        let (mut producer, mut consumer) = match who {
            Sleeper::Worker => (tx, requests),
            Sleeper::Client => (rx, replies),
        };
        let (waker, sleeper) = (client.words(), engine.words());
        let bell = Rc::new(Notify::new());
        let pull = bell.clone();
        let publisher = thread::spawn(move || {
            for n in 0..2 {
                push(&mut producer, n, 8);
                producer.publish();
                let sleeps = match who {
                    Sleeper::Worker => waker.parked(),
                    Sleeper::Client => waker.accelerator_parked(),
                };
                if sleeps {
                    pull.notify();
                }
            }
        });
        let set = |sleeps| match who {
            Sleeper::Worker => sleeper.set_parked(sleeps),
            Sleeper::Client => sleeper.set_accelerator_parked(sleeps),
        };
        take(&mut consumer, 2, |ring| {
            set(true);
            if is_empty(ring) {
                bell.wait();
            }
            set(false);
        });
        publisher.join().unwrap();
    }
}

/// A worker that sets the parked word in every client's region before it sleeps, and then checks all their rings.
fn park_for_two(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let kinds = kinds_of(&places(&plan), weak);
    move || {
        let bell = Rc::new(Notify::new());
        let mut clients = Vec::new();
        let mut seats: Vec<(Words<LoomMemory>, In)> = Vec::new();
        for _ in 0..2 {
            let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
            let mut engine = Region::format(memory.clone(), &plan).unwrap();
            let mut client = Region::join(memory).unwrap();
            seats.push((engine.words(), engine.engine_ends(0).1));
            let pull = bell.clone();
            clients.push(thread::spawn(move || {
                let (_, mut requests) = client.accelerator_ends(0);
                push(&mut requests, 0, 8);
                requests.publish();
                if client.words().parked() {
                    pull.notify();
                }
            }));
        }
        let mut open: Vec<usize> = vec![0, 1];
        while !open.is_empty() {
            let before = open.len();
            open.retain(|&i| !read(&mut seats[i].1, 0, 8));
            if open.len() < before || open.is_empty() {
                continue;
            }
            seats.iter().for_each(|(words, _)| words.set_parked(true));
            if open.iter().all(|&i| is_empty(&mut seats[i].1)) {
                bell.wait();
            }
            seats.iter().for_each(|(words, _)| words.set_parked(false));
        }
        clients.into_iter().for_each(|client| client.join().unwrap());
    }
}

/// Worker to worker, or a ring whose consumer sleeps on a separate word.
fn handover_wakes(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    with_ends(plan, kinds_of, strong, move |_, mut producer, mut consumer| {
        let (parked, seat) = park_words(weak);
        let bell = Rc::new(Notify::new());
        let pull = bell.clone();
        let first = thread::spawn(move || {
            for n in 0..2 {
                push(&mut producer, n, 8);
                producer.publish();
                if seat.sleeps() {
                    pull.notify();
                }
            }
        });
        take(&mut consumer, 2, |ring| {
            parked.set(true);
            if is_empty(ring) {
                bell.wait();
            }
            parked.set(false);
        });
        first.join().unwrap();
    })
}

/// The same word for both sides.
fn park_words(weak: Weak) -> (ParkWord<LoomMemory>, ParkWord<LoomMemory>) {
    let memory = LoomMemory::new(8, &Kinds { atomic: vec![word(0)], owned: vec![] }, weak);
    (ParkWord::over(memory.clone()), ParkWord::over(memory))
}

/// A worker rings the doorbells of the groups of mqueues it published to; the thread reads no head whose doorbell count
/// is unchanged, and sleeps if none changed.
fn doorbells(bells_weak: Weak, park_weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    with_ends(plan, kinds_of, strong, move |engine, mut producer, mut consumer| {
        let (parked, seat) = park_words(park_weak);
        let words = engine.words();
        let count = Kinds { atomic: vec![word(0)], owned: vec![] };
        let memory = LoomMemory::new(8, &count, bells_weak);
        let (bells, rung) = (Doorbells::over(memory.clone()), Doorbells::over(memory));
        let bell = Rc::new(Notify::new());
        let pull = bell.clone();
        let worker = thread::spawn(move || {
            for n in 0..2 {
                push(&mut producer, n, 8);
                producer.publish();
                bells.ring(0);
                if seat.sleeps() {
                    pull.notify();
                }
            }
        });
        let mut listener = Listener::new(&[0], |_| 0);
        let (mut taken, mut moved) = (0, Vec::new());
        while taken < 2 {
            listener.collect(&rung, |mqueue| words.rx_head(mqueue), &mut moved);
            if moved.pop().is_some() {
                while read(&mut consumer, taken, 8) {
                    taken += 1;
                }
                consumer.release();
                continue;
            }
            parked.set(true);
            if !listener.rung(&rung) {
                bell.wait();
            }
            parked.set(false);
        }
        worker.join().unwrap();
    })
}

/// A stop request ends a sleep as a message does.
fn stop_wakes(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    with_ends(plan, kinds_of, strong, move |engine, _, _| {
        let words = engine.words();
        let (parked, seat) = park_words(weak);
        let bell = Rc::new(Notify::new());
        let pull = bell.clone();
        let worker = thread::spawn(move || {
            engine.words().set_stop(stop::DRAIN);
            if seat.sleeps() {
                pull.notify();
            }
        });
        while words.stop() != stop::DRAIN {
            parked.set(true);
            if words.stop() != stop::DRAIN {
                bell.wait();
            }
            parked.set(false);
        }
        worker.join().unwrap();
    })
}

/// Three threads: fewer preemptions, or it takes minutes.
#[test]
fn worker_parks_for_two_clients() {
    check_within(3, park_for_two(Weak::Nothing));
}

holds! {
    worker_parks_for_a_client: park(Sleeper::Worker, Weak::Nothing);
    client_parks_for_its_worker: park(Sleeper::Client, Weak::Nothing);
    handover_wakes_a_worker: handover_wakes(Weak::Nothing);
    doorbells_and_sleep: doorbells(Weak::Nothing, Weak::Nothing);
    stop_wakes_a_thread: stop_wakes(Weak::Nothing);
}

fails! {
    worker_park_without_fence: park(Sleeper::Worker, Weak::Fence), "deadlock";
    client_park_without_fence: park(Sleeper::Client, Weak::Fence), "deadlock";
    park_for_two_without_fence: park_for_two(Weak::Fence), "deadlock";
    handover_wake_without_fence: handover_wakes(Weak::Fence), "deadlock";
    doorbells_without_release: doorbells(Weak::Release(0), Weak::Nothing), "deadlock";
    doorbells_without_acquire: doorbells(Weak::Acquire(0), Weak::Nothing), "deadlock";
    doorbells_without_fence: doorbells(Weak::Nothing, Weak::Fence), "deadlock";
    stop_wake_without_fence: stop_wakes(Weak::Fence), "deadlock";
}
