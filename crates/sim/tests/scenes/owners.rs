//! Functions whose state is on one worker: each request meets the state that is its own, once and in the order of its client, whichever worker receives
//! it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use crate::scene::{Caller, MS, Scene, Script, request, script};
use onpath::{Direction, Failure, Function, Key, Messages, OnFailure, RequestId, StateKind};
use sim::message::{decode_request, reply_payload};
use sim::net::Faults;
use sim::rng::Rng;
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Close, Transport};
use wire::session::Origin;

const FRAMING: Framing = Framing::LengthU16;
/// The least byte of the sequence number of a request.
const SEQUENCE: Key = Key { offset: 12, length: 1 };

fn several(workers: usize, mqueues: u32) -> Script {
    let mut script = script(FRAMING);
    script.setup.topology.engine.workers = workers;
    script.service().mqueues = mqueues;
    script
}

/// What instances have seen: the worker, the direction, the request, and its key.
type Seen = Arc<Mutex<Vec<(usize, Direction, RequestId, u8)>>>;

/// Notes what it sees, and decides by the last bits of the sequence number if it is to.
struct Seer {
    worker: usize,
    seen: Seen,
    decides: bool,
}

impl Function for Seer {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        let mut seen = self.seen.lock().unwrap();
        for index in 0..messages.len() {
            if !messages.is_open(index) {
                continue;
            }
            let key = SEQUENCE.of(messages.bytes(index)).first().copied().unwrap_or(0);
            seen.push((self.worker, direction, *messages.request(index), key));
            if self.decides && direction == Direction::Requests {
                match key % 4 {
                    1 => messages.drop(index, DropReason::FunctionDrop),
                    2 => messages.steer(index, u32::from(key)),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

fn attach(scene: &Scene, state: StateKind, decides: bool) -> Seen {
    let seen = Seen::default();
    for worker in 0..scene.world.workers.len() {
        let seer = Box::new(Seer { worker, seen: Arc::clone(&seen), decides });
        let chain: Vec<(Box<dyn Function>, _)> = vec![(seer, OnFailure::Closed)];
        scene.world.set_functions_with(worker, (0, None), state, chain);
    }
    seen
}

/// Requests that were seen, each once; those of a client with a connection are in order, of each key if `by_key`.
fn check_order(seen: &Seen, by_key: bool) -> usize {
    let seen = seen.lock().unwrap();
    let mut last = HashMap::new();
    let mut count = 0;
    for (_, direction, request, key) in &*seen {
        if *direction == Direction::Replies {
            continue;
        }
        count += 1;
        if let Origin::Client(to) = request.origin {
            let before = last.insert((to, by_key.then_some(*key)), request.number);
            assert!(before.is_none_or(|before| before < request.number), "{request:?}");
        }
    }
    count
}

fn callers(scene: &mut Scene, each: usize) -> Vec<Caller> {
    let workers = scene.world.workers.len();
    (0..each * workers).map(|at| scene.connect_to(at % workers)).collect()
}

#[test]
fn one_worker_sees_all_requests_and_their_replies() {
    for mqueues in [1, 3, 7] {
        let mut scene = several(3, mqueues).play();
        let seen = attach(&scene, StateKind::Single, false);
        scene.run(2);
        let callers = callers(&mut scene, 2);
        for sequence in 0..40 {
            for caller in &callers {
                scene.call(*caller, request(sequence));
            }
            scene.run(20);
        }
        scene.run(400);
        assert_eq!((scene.replied(), scene.world.in_flight(0)), (240, 0), "{mqueues} mqueues");
        assert_eq!(check_order(&seen, false), 240);
        let seen = seen.lock().unwrap();
        assert!(seen.iter().all(|(worker, ..)| *worker == 0), "the worker of the first mqueue");
        assert_eq!(seen.len(), 480, "each reply too");
        scene.world.check_quiet().unwrap();
    }
}

#[test]
fn requests_with_the_same_key_meet_the_same_state() {
    for mqueues in [2, 6] {
        let mut scene = several(3, mqueues).play();
        let seen = attach(&scene, StateKind::ByKey(SEQUENCE), false);
        scene.run(2);
        let callers = callers(&mut scene, 2);
        for sequence in 0..64 {
            for caller in &callers {
                scene.call(*caller, request(sequence));
            }
            scene.run(20);
        }
        for worker in 0..3 {
            scene.ask_from(worker, request(7));
            scene.run(50);
        }
        scene.run(400);
        assert_eq!((scene.replied(), scene.world.in_flight(0)), (6 * 64 + 3, 0));
        assert_eq!(check_order(&seen, true), 6 * 64 + 3);
        let mut owners = HashMap::new();
        for (worker, direction, _, key) in &*seen.lock().unwrap() {
            if *direction == Direction::Requests {
                assert_eq!(*owners.entry(*key).or_insert(*worker), *worker, "key {key}");
            }
        }
        let used: HashSet<_> = owners.values().collect();
        assert_eq!(used.len(), 3.min(mqueues as usize), "all workers with mqueues have some keys");
        scene.world.check_quiet().unwrap();
    }
}

/// The rings between workers are bounded: datagrams that find them full are dropped, streams wait.
#[test]
fn a_flood_is_dropped_or_waits_and_is_counted() {
    let mut script = several(3, 3);
    script.behaviour().delay_ns = (MS, MS);
    let mut scene = script.play();
    let seen = attach(&scene, StateKind::Single, false);
    scene.run(2);
    for _ in 0..700 {
        scene.ask_from(1, request(0));
        scene.ask_from(2, request(0));
    }
    let callers = callers(&mut scene, 1);
    for sequence in 0..20 {
        for caller in &callers {
            scene.call(*caller, request(sequence));
        }
    }
    scene.wait_ms(300);
    let counted = scene.world.metrics.service(0);
    assert_eq!(counted.received, 1460);
    assert_eq!(counted.replied + counted.dropped_requests(), 1460);
    assert!(counted.dropped(DropReason::HandoverFull) > 0, "{counted:?}");
    let over_tcp = |(_, direction, request, _): &&(usize, Direction, RequestId, u8)| {
        *direction == Direction::Replies && matches!(request.origin, Origin::Client(_))
    };
    let over_tcp = seen.lock().unwrap().iter().filter(over_tcp).count();
    assert_eq!(over_tcp, 60, "nothing of a stream is lost");
    check_order(&seen, false);
    scene.world.check_quiet().unwrap();
}

/// Functions answer, drop, steer and rewrite what another worker has received.
#[test]
fn decisions_hold_for_requests_of_other_workers() {
    struct Decides;

    impl Function for Decides {
        fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
            for index in 0..messages.len() {
                let key = SEQUENCE.of(messages.bytes(index)).first().copied().unwrap_or(0);
                match (direction, key) {
                    (Direction::Requests, 1) => {
                        let (body, flavor) =
                            decode_request(FRAMING, messages.bytes(index)).unwrap();
                        messages.reply(index, &reply_payload(FRAMING, &body.reply(), flavor));
                    }
                    (Direction::Requests, 2) => messages.drop(index, DropReason::FunctionDrop),
                    // The worker of the state has mqueue 0, and another one mqueue 1.
                    (Direction::Requests, 3) => messages.steer(index, 0),
                    (Direction::Requests, 4) => messages.steer(index, 1),
                    (Direction::Requests, 5) => messages.deliver(index),
                    _ => {}
                }
            }
            Ok(())
        }
    }
    let mut scene = several(2, 2).play();
    for worker in 0..2 {
        let chain: Vec<(Box<dyn Function>, _)> = vec![(Box::new(Decides), OnFailure::Closed)];
        scene.world.set_functions_with(worker, (0, None), StateKind::Single, chain);
    }
    scene.run(2);
    for sequence in 0..6 {
        for worker in 0..2 {
            let before = scene.world.metrics.service(0);
            let caller = scene.connect_to(worker);
            scene.call(caller, request(sequence));
            scene.ask_from(worker, request(sequence));
            scene.run(60);
            let after = scene.world.metrics.service(0);
            let replied = after.replied - before.replied;
            let lost = |reason| after.dropped(reason) - before.dropped(reason);
            let what = format!("sequence {sequence}, worker {worker}");
            match sequence {
                2 => assert_eq!((replied, lost(DropReason::FunctionDrop)), (0, 2), "{what}"),
                4 => assert_eq!((replied, lost(DropReason::MqueueDead)), (0, 2), "{what}"),
                // It has no ring.
                5 => assert_eq!((replied, lost(DropReason::RingFull)), (0, 2), "{what}"),
                _ => assert_eq!(replied, 2, "{what}"),
            }
            assert_eq!(scene.world.in_flight(0), 0, "{what}");
        }
    }
    scene.world.check().unwrap();
}

/// Clients come and go, workers are slow, functions are attached and detached: nothing is lost without a reason or seen twice.
#[test]
fn nothing_is_lost_or_seen_twice_in_a_storm() {
    let mut of_kinds = [0; 3];
    for seed in 0..12 {
        let mut rng = Rng::new(seed);
        let state = match seed % 3 {
            0 => StateKind::Single,
            1 => StateKind::ByKey(SEQUENCE),
            _ => StateKind::ByKey(Key { offset: 0, length: 0 }),
        };
        let mut script = several(2 + seed as usize % 3, 1 + rng.below(5) as u32);
        script.setup.seed = seed;
        script.behaviour().delay_ns = (0, MS / 10);
        if seed % 4 == 3 {
            script.upstream(Transport::Udp);
        }
        let datagrams_only = seed % 4 == 3;
        let mut scene = script.play();
        let workers = scene.world.workers.len();
        let seen = attach(&scene, state, rng.chance(500));
        scene.run(2);
        scene.faults(Faults {
            lose: 50,
            short_read: 200,
            short_write: 200,
            late_event: 200,
            refuse_send: 20,
            full_send: 20,
            delay_ns: (1000, MS / 2),
            pipe_bytes: 2000,
            ..Faults::default()
        });
        for _ in 0..60 {
            for worker in 0..workers {
                (0..rng.below(6))
                    .for_each(|_| _ = scene.ask_from(worker, request(rng.below(256) as u32)));
                if !datagrams_only && rng.chance(600) {
                    let caller = scene.connect_to(worker);
                    for sequence in 0..1 + rng.below(5) as u32 {
                        scene.call(caller, request(sequence));
                    }
                    if rng.chance(100) {
                        lock(&scene.world.net).peer_close(caller.conn, Close::Reset);
                    }
                }
            }
            scene.run(1 + rng.below(60) as usize);
        }
        scene.faults(Faults::default());
        scene.wait_ms(2000);
        let mut once = HashSet::new();
        for (_, direction, request, _) in &*seen.lock().unwrap() {
            if matches!(request.origin, Origin::Client(_)) {
                assert!(once.insert((*direction as u8, *request)), "seed {seed}: {request:?}");
            }
        }
        of_kinds[seed as usize % 3] += check_order(&seen, state != StateKind::Single);
        assert_eq!(scene.world.in_flight(0), 0, "seed {seed}");
        // Detached while clients ask.
        for worker in 0..workers {
            scene.ask_from(worker, request(0));
            scene.world.set_functions(worker, 0, Vec::new());
            scene.run(1);
        }
        scene.wait_ms(100);
        assert_eq!(scene.world.in_flight(0), 0, "seed {seed}");
        scene.world.check().unwrap();
    }
    assert!(of_kinds.iter().all(|seen| *seen > 300), "{of_kinds:?}");
}
