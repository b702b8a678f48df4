//! Services that are added, changed and removed at any step, while clients use them and others.

use crate::scene::{MS, request, script};
use engine::PAUSE_NS;
use engine::topology::{Listen, Replies, Service, Topology};
use sim::ConnId;
use sim::behaviour::Behaviour;
use sim::client_address;
use sim::message::{Body, Flavor, request_payload, request_wire};
use sim::net::PeerRead;
use sim::nic::SimNic;
use sim::rng::Rng;
use sim::shared::lock;
use sim::world::change::Keeps;
use sim::world::{Setup, World};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

const FRAMING: Framing = Framing::LengthU16;
/// The service that does not change, and the one that does.
const STAYS: usize = 0;
const CHANGES: usize = 1;

fn topology(workers: usize) -> Topology {
    let mut topology = script(FRAMING).setup.topology;
    topology.engine.workers = workers;
    // Every worker has an mqueue: none depends on the others' credit reports, which take a while.
    topology.services[STAYS].mqueues = 4;
    let mut other = Service { name: "other".into(), ..topology.services[0].clone() };
    let listen = |transport| Listen { transport, address: ([127, 0, 0, 1], 9001).into() };
    other.listen = vec![listen(Transport::Udp), listen(Transport::Tcp)];
    topology.services.push(other);
    topology
}

struct Stage {
    world: World<SimNic>,
    rng: Rng,
    clients: u32,
    /// Open connections to the two services.
    callers: [Vec<(ConnId, u32)>; 2],
    asked: [u64; 2],
    /// Of the blocks of all.
    behaviour: Behaviour,
}

impl Stage {
    fn new(workers: usize, seed: u64, far: bool) -> Self {
        let mut setup = Setup::sound(topology(workers));
        setup.seed = seed;
        for behaviour in &mut setup.behaviours {
            behaviour.remote = far;
            // Longer than the interval of checks whether everything has settled.
            behaviour.delay_ns = (0, if far { 3 * MS } else { MS / 5 });
        }
        let behaviour = setup.behaviours[STAYS];
        let world = World::build(&setup, |nic| nic);
        let callers = [Vec::new(), Vec::new()];
        Self { world, rng: Rng::new(seed), clients: 0, callers, asked: [0; 2], behaviour }
    }

    fn next_client(&mut self) -> u32 {
        self.clients += 1;
        self.clients
    }

    /// A new client sends a request over UDP.
    fn ask(&mut self, service: usize) {
        let client = self.next_client();
        let (peer, local) = (client_address(client), [127, 0, 0, 1].into());
        let port = 2 * service as u16;
        let body = Body { client, ..request(0) };
        let mut net = lock(&self.world.net);
        let route = net.route(peer, port, local);
        net.ledger.ask(service, body, Some(route));
        net.send_datagram(peer, port, local, &request_payload(FRAMING, &body, Flavor::Plain));
        self.asked[service] += 1;
    }

    /// A client connects, and sends a request.
    fn call(&mut self, service: usize) {
        let client = self.next_client();
        let conn = lock(&self.world.net).connect(client_address(client), 2 * service as u16 + 1);
        self.callers[service].push((conn, client));
        self.say(service, self.callers[service].len() - 1, 0);
    }

    fn say(&mut self, service: usize, caller: usize, sequence: u32) {
        let (conn, client) = self.callers[service][caller];
        let body = Body { client, ..request(sequence) };
        let wire = request_wire(FRAMING, &request_payload(FRAMING, &body, Flavor::Plain));
        let mut net = lock(&self.world.net);
        net.ledger.ask(service, body, None);
        net.peer_write(conn, &wire);
        self.asked[service] += 1;
    }

    /// Whether the engine has closed or reset a connection.
    fn is_gone(&self, conn: ConnId) -> bool {
        let mut net = lock(&self.world.net);
        loop {
            match net.peer_read(conn, usize::MAX) {
                PeerRead::Bytes(_) => {}
                PeerRead::Empty => return false,
                PeerRead::Closed | PeerRead::Broken => return true,
            }
        }
    }

    fn step(&mut self) {
        self.world.run(1, 1 + self.rng.below(50_000));
    }

    /// All clients send requests, but none more than the service that must lose nothing can take.
    fn load(&mut self) {
        let unanswered = self.asked[STAYS] - self.world.metrics.service(STAYS).replied;
        if unanswered < 3 && self.rng.chance(400) {
            self.ask(STAYS);
        }
        if unanswered < 3 && self.rng.chance(100) {
            self.call(STAYS);
        }
        if self.rng.chance(300) {
            self.ask(CHANGES);
        }
        self.step();
    }

    fn load_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..20_000 {
            if done(self) {
                return;
            }
            self.load();
        }
        panic!("never: {what}");
    }

    /// The workers follow a change in any order and at any time.
    fn change_in_steps(&mut self, mut meanwhile: impl FnMut(&mut Self)) {
        for _ in 0..20_000 {
            let worker = self.rng.below(self.world.workers.len() as u64) as usize;
            if self.rng.chance(300) {
                self.world.follow(worker);
            }
            if self.world.is_changed() {
                return;
            }
            meanwhile(self);
            self.step();
        }
        panic!("the change never ends");
    }
}

/// Whatever happens to the other service, at any step: this one loses nothing, and the accounts of both
/// balance at all times (which `run` checks).
#[test]
fn a_service_is_added_changed_and_removed_at_any_step() {
    for seed in 0..24 {
        let workers = 1 + seed as usize % 3;
        let mut stage = Stage::new(workers, seed, seed % 2 == 0);
        let original = stage.world.topology().services[CHANGES].clone();
        let mut runs = true;
        for round in 0..12 {
            let drain_ns = if stage.rng.chance(200) { 0 } else { 50 * MS };
            match stage.rng.below(3) {
                0 if runs => {
                    stage.world.remove(CHANGES, drain_ns);
                    runs = false;
                }
                _ => {
                    let mut spec = original.clone();
                    spec.mqueues = 1 + stage.rng.below(4) as u32;
                    spec.slots = 1 << stage.rng.below(4);
                    let keeps = Keeps::all(stage.rng.chance(500));
                    stage.world.put(spec, CHANGES, keeps, drain_ns);
                    runs = true;
                }
            }
            stage.change_in_steps(|stage| {
                // Never more than the unchanged service takes, so that none of its requests may be lost.
                let idle = stage.world.in_flight(STAYS) == 0;
                if idle && stage.rng.chance(500) {
                    stage.ask(STAYS);
                }
                if idle && stage.rng.chance(50) {
                    stage.call(STAYS);
                }
                if stage.rng.chance(300) {
                    stage.ask(CHANGES);
                }
                if stage.rng.chance(50) {
                    stage.call(CHANGES);
                }
            });
            stage.world.run(600, 100_000);
            assert_eq!(stage.world.in_flight(CHANGES), 0, "seed {seed}, round {round}");
            let before = stage.world.metrics.service(CHANGES);
            stage.ask(CHANGES);
            stage.world.run(60, 100_000);
            let after = stage.world.metrics.service(CHANGES);
            let answered = after.replied - before.replied;
            assert_eq!(answered, u64::from(runs), "seed {seed}, round {round}: {after:?}");
        }
        let stays = stage.world.metrics.service(STAYS);
        assert_eq!(stays.dropped_requests(), 0, "seed {seed}: {stays:?}");
        assert_eq!(stays.replied, stage.asked[STAYS], "seed {seed}");
        for (conn, _) in stage.callers[STAYS].clone() {
            assert!(!stage.is_gone(conn), "seed {seed}");
        }
        stage.world.check_quiet().unwrap();
    }
}

/// Control messages about what has left or never was there, between the steps of changes and among requests: they are
/// ignored.
#[test]
fn late_messages_change_nothing() {
    for seed in 0..12 {
        let workers = 1 + seed as usize % 3;
        let mut stage = Stage::new(workers, seed, seed % 2 == 0);
        let spec = stage.world.topology().services[CHANGES].clone();
        for round in 0..6 {
            match round % 2 {
                0 => stage.world.remove(CHANGES, 50 * MS),
                _ => stage.world.put(spec.clone(), CHANGES, Keeps::all(true), 50 * MS),
            }
            stage.change_in_steps(|stage| {
                for worker in 0..workers {
                    let mut rng = stage.rng.fork();
                    stage.world.post_late_message(worker, &mut rng);
                }
                stage.load();
            });
        }
        stage.world.run(600, 100_000);
        let stays = stage.world.metrics.service(STAYS);
        assert_eq!(stays.dropped_requests(), 0, "seed {seed}: {stays:?}");
        assert_eq!(stays.replied, stage.asked[STAYS], "seed {seed}");
        stage.world.check_quiet().unwrap();
    }
}

/// A worker without an mqueue of the service hands over from the first request on.
#[test]
fn the_credit_of_a_new_version_is_known_at_the_switch() {
    for seed in 0..24 {
        let mut stage = Stage::new(2, seed, false);
        // The worker that has the only mqueue returns the credit in every turn.
        let mut spec = stage.world.topology().services[CHANGES].clone();
        spec.mqueues = 1;
        let mut slots = 64;
        for _ in 0..4 {
            // Without requests nothing can be lost meanwhile; by now every worker knows this version.
            stage.world.run(40, 100_000);
            slots ^= 64 ^ 128;
            spec.slots = slots;
            stage.world.put(spec.clone(), CHANGES, Keeps::all(true), 50 * MS);
            while !stage.world.is_switched() {
                let worker = stage.rng.below(2) as usize;
                stage.world.follow(worker);
                if stage.rng.chance(500) {
                    stage.step();
                }
            }
            for _ in 0..20 {
                stage.ask(CHANGES);
                stage.step();
            }
            stage.change_in_steps(|_| {});
        }
        let counted = stage.world.metrics.service(CHANGES);
        assert!(counted.handed_out > 0, "seed {seed}");
        assert_eq!(counted.dropped(DropReason::NoCredit), 0, "seed {seed}: {counted:?}");
    }
}

/// Connections move over to a service with the same framing, with their outstanding replies; or they
/// are closed after their replies.
#[test]
fn connections_stay_or_are_closed_after_their_replies() {
    for keeps in [true, false] {
        let mut stage = Stage::new(2, 7, true);
        let spec = stage.world.topology().services[CHANGES].clone();
        for _ in 0..4 {
            stage.call(CHANGES);
        }
        stage.world.run(10, 1000);
        assert!(stage.world.in_flight(CHANGES) > 0, "requests are in flight");
        stage.world.put(spec, CHANGES, Keeps::all(keeps), 50 * MS);
        stage.change_in_steps(|_| {});
        stage.world.run(60, 100_000);
        assert_eq!(stage.world.metrics.service(CHANGES).replied, 4);
        for caller in 0..4 {
            assert_eq!(stage.is_gone(stage.callers[CHANGES][caller].0), !keeps);
            if keeps {
                stage.say(CHANGES, caller, 1);
            }
        }
        stage.world.run(60, 100_000);
        let counted = stage.world.metrics.service(CHANGES);
        assert_eq!(counted.replied, if keeps { 8 } else { 4 });
        assert_eq!(counted.dropped_requests(), 0);
    }
}

/// Requests that a service does not answer in time are dropped with a reason, and the change completes all the same.
#[test]
fn a_stuck_service_is_let_go_after_its_time() {
    let mut stage = Stage::new(2, 3, true);
    let mut setup = Setup::sound(topology(2));
    setup.behaviours[CHANGES].remote = true;
    setup.behaviours[CHANGES].stall_after = Some(0);
    stage.world = World::build(&setup, |nic| nic);
    for _ in 0..6 {
        stage.ask(CHANGES);
        stage.call(CHANGES);
    }
    stage.world.run(20, 10_000);
    stage.world.remove(CHANGES, 5 * MS);
    stage.change_in_steps(|_| {});
    let counted = stage.world.metrics.service(CHANGES);
    assert_eq!((counted.replied, stage.world.in_flight(CHANGES)), (0, 0));
    assert!(counted.dropped(DropReason::DrainTimeout) > 0);
}

/// A service without replies is replaced while its kernel has unread messages: they are dropped, and not counted again
/// when the kernel reads them before it stops.
#[test]
fn what_is_dropped_unread_is_counted_once() {
    for seed in 0..20 {
        let mut stage = Stage::new(1, seed, true);
        let mut topology = topology(1);
        topology.services[CHANGES].replies = Replies::None;
        topology.services[CHANGES].mqueues = 1;
        let mut setup = Setup::sound(topology);
        setup.behaviours[CHANGES] =
            Behaviour { remote: true, delay_ns: (MS / 5, MS / 5), ..Behaviour::default() };
        stage.world = World::build(&setup, |nic| nic);
        (0..4).for_each(|_| stage.ask(CHANGES));
        stage.world.run(10, 10_000);
        let unread = stage.world.in_flight(CHANGES);
        assert!(unread > 0, "the kernel has read everything before the change");
        let spec = stage.world.topology().services[CHANGES].clone();
        stage.world.put(spec, CHANGES, Keeps::all(true), 0);
        stage.change_in_steps(|_| {});
        let counted = stage.world.metrics.service(CHANGES);
        assert!(counted.dropped(DropReason::DrainTimeout) > 0, "{counted:?}");
        assert_eq!(counted.consumed + counted.dropped_requests(), 4, "{counted:?}");
    }
}

/// Resources that are not released (because another worker is not run) do not affect workers that have released theirs.
#[test]
fn workers_sleep_beside_a_service_that_is_expired_and_kept() {
    let mut stage = Stage::new(2, 3, false);
    stage.call(CHANGES);
    stage.world.run(50, 100_000);
    stage.world.remove(CHANGES, 0);
    while !stage.world.is_switched() {
        stage.world.follow(0);
        stage.world.follow(1);
        stage.world.run(1, 1000);
    }
    stage.world.follow(0);
    assert!(!stage.world.is_changed(), "it is expired, not released");
    stage.world.run(50, 100_000);
    let now_ns = stage.world.now_ns();
    for worker in &stage.world.workers {
        assert!(worker.sleep_ns(now_ns) > 2 * MS, "{}", worker.sleep_ns(now_ns));
    }
    stage.change_in_steps(|_| {});
}

/// A datagram or a connection that arrives at a port between its install and the switch wakes no worker; it is served after
/// the switch.
#[test]
fn arrivals_before_the_switch_end_no_sleep() {
    let mut stage = Stage::new(1, 4, false);
    stage.world.remove(CHANGES, 0);
    stage.change_in_steps(|_| {});
    let spec = stage.world.topology().services[CHANGES].clone();
    stage.world.put(spec, CHANGES, Keeps::all(true), 0);
    stage.world.follow(0);
    stage.world.run(50, 100_000);
    assert!(!stage.world.is_switched(), "it is installed");
    stage.ask(CHANGES);
    stage.call(CHANGES);
    for _ in 0..20 {
        stage.world.advance(50_000);
        assert!(!lock(&stage.world.net).has_events(0));
    }
    stage.change_in_steps(|_| {});
    stage.world.run(60, 100_000);
    assert_eq!(stage.world.metrics.service(CHANGES).replied, 2);
    stage.world.check_quiet().unwrap();
}

/// An accelerator generation ends as planned, at any step: requests that arrive meanwhile are answered, by this generation or
/// by the next one, and the workers sleep while they wait.
#[test]
fn a_held_service_loses_nothing_at_any_step() {
    for seed in 0..24 {
        let workers = 1 + seed as usize % 3;
        let mut stage = Stage::new(workers, seed, seed % 2 == 0);
        let sound = stage.behaviour;
        for round in 0..8 {
            for _ in 0..stage.rng.below(40) {
                stage.load();
            }
            let told = stage.world.hold(STAYS, 0, 1000 * MS);
            if stage.rng.chance(200) {
                // The hold is cancelled, however far it was.
                for _ in 0..stage.rng.below(60) {
                    stage.load();
                }
                stage.world.cancel_hold(STAYS, 0);
            } else {
                stage.load_until("all is answered", |_| told.is_complete(workers));
                assert_eq!(stage.world.in_flight(STAYS), 0, "seed {seed}, round {round}");
                stage.world.lose_runtime(STAYS, 0, DropReason::Reconfiguring);
                let before = stage.world.metrics.service(STAYS);
                for _ in 0..stage.rng.below(60) {
                    stage.load();
                }
                stage.world.replace_rings(STAYS, 0, sound);
                stage.world.run(600, 100_000);
                let after = stage.world.metrics.service(STAYS);
                assert_eq!(before.received, after.received, "seed {seed}: it took something in");
                let now_ns = stage.world.now_ns();
                let asleep = stage.world.workers.iter().all(|w| w.sleep_ns(now_ns) > 0);
                assert!(asleep, "seed {seed}, round {round}: a worker spins");
                assert_eq!(stage.world.metrics.services()[STAYS].observed().paused, workers as u64);
                stage.world.resume_blocks(STAYS, 0);
            }
            stage.world.run(600, 100_000);
            assert_eq!(stage.world.metrics.services()[STAYS].observed().paused, 0);
            let stays = stage.world.metrics.service(STAYS);
            assert_eq!(stays.dropped_requests(), 0, "seed {seed}, round {round}: {stays:?}");
            assert_eq!(stays.replied, stage.asked[STAYS], "seed {seed}, round {round}");
        }
        stage.world.check_quiet().unwrap();
    }
}

/// Nothing waits forever: without a next generation the ports are read again, and requests are dropped with the reason.
#[test]
fn a_pause_ends_when_no_next_generation_starts() {
    for workers in 1..=3 {
        let mut stage = Stage::new(workers, 11, true);
        let sound = stage.behaviour;
        let told = stage.world.hold(STAYS, 0, 100 * MS);
        stage.load_until("all is answered", |_| told.is_complete(workers));
        stage.world.lose_runtime(STAYS, 0, DropReason::Reconfiguring);
        stage.world.run(1, 0);
        let answered = stage.world.metrics.service(STAYS).replied;
        for _ in 0..5 {
            stage.ask(STAYS);
            stage.call(STAYS);
        }
        stage.world.run(90, PAUSE_NS / 100);
        assert_eq!(stage.world.metrics.service(STAYS).dropped_requests(), 0, "it is held");
        stage.world.run(30, PAUSE_NS / 100);
        let stays = stage.world.metrics.service(STAYS);
        assert_eq!(stays.dropped(DropReason::Reconfiguring), stage.asked[STAYS] - answered);
        assert_eq!(stage.world.metrics.services()[STAYS].observed().paused, 0);
        stage.world.replace_rings(STAYS, 0, sound);
        stage.world.resume_blocks(STAYS, 0);
        stage.world.run(60, 100_000);
        stage.ask(STAYS);
        stage.world.run(60, 100_000);
        assert_eq!(stage.world.metrics.service(STAYS).replied, answered + 1);
    }
}

/// A drain, and the service's own change, end a hold immediately, and lose nothing that was accepted.
#[test]
fn a_drain_and_a_change_end_a_hold() {
    for seed in 0..24 {
        let workers = 1 + seed as usize % 3;
        let mut stage = Stage::new(workers, seed, true);
        for _ in 0..stage.rng.below(40) {
            stage.load();
        }
        let told = stage.world.hold(STAYS, 0, 1000 * MS);
        for _ in 0..stage.rng.below(40) {
            stage.load();
        }
        let lost = seed % 4 == 3;
        if lost {
            stage.load_until("all is answered", |_| told.is_complete(workers));
            stage.world.lose_runtime(STAYS, 0, DropReason::Reconfiguring);
        }
        if seed % 2 == 0 {
            stage.world.begin_drain();
        } else {
            let spec = stage.world.topology().services[STAYS].clone();
            stage.world.put(spec, STAYS, Keeps::all(true), 1000 * MS);
            stage.change_in_steps(|_| {});
        }
        stage.world.run(60, 100_000);
        let stays = stage.world.metrics.service(STAYS);
        assert_eq!(stage.world.in_flight(STAYS), 0, "seed {seed}");
        assert_eq!(
            stays.dropped_requests(),
            stays.dropped(DropReason::Draining),
            "seed {seed}: {stays:?}"
        );
        assert_eq!(stage.world.metrics.services()[STAYS].observed().paused, 0, "seed {seed}");
        if seed % 2 == 1 {
            assert_eq!(stays.replied, stage.asked[STAYS], "seed {seed}: {stays:?}");
        }
    }
}

/// A service changes, and the next version's accelerator starts after the last one's has ended: requests that arrive meanwhile are answered.
#[test]
fn a_version_that_waits_for_its_accelerator_loses_nothing() {
    for seed in 0..24 {
        let workers = 1 + seed as usize % 3;
        let mut stage = Stage::new(workers, seed, seed % 2 == 0);
        for round in 0..6 {
            let spec = stage.world.topology().services[STAYS].clone();
            stage.world.put(spec, STAYS, Keeps::all(true), 1000 * MS);
            stage.world.hold_new_version(1000 * MS);
            stage.change_in_steps(Stage::load);
            let before = stage.world.metrics.service(STAYS);
            assert_eq!(stage.world.in_flight(STAYS), 0, "seed {seed}, round {round}");
            for _ in 0..stage.rng.below(60) {
                stage.load();
            }
            let after = stage.world.metrics.service(STAYS);
            assert_eq!(before.received, after.received, "seed {seed}: it took something in");
            stage.world.resume_blocks(STAYS, 0);
            stage.world.run(600, 100_000);
            let stays = stage.world.metrics.service(STAYS);
            assert_eq!(stays.dropped_requests(), 0, "seed {seed}, round {round}: {stays:?}");
            assert_eq!(stays.replied, stage.asked[STAYS], "seed {seed}, round {round}");
        }
        stage.world.check_quiet().unwrap();
    }
}

/// However long the other services of a change take: a new version that starts paused has its full time from the switch, and
/// has no effect before, so that a change that is undone leaves nothing behind.
#[test]
fn the_pause_of_a_new_version_counts_from_the_switch() {
    const WORKERS: usize = 2;
    for replaces in [true, false] {
        let mut stage = Stage::new(WORKERS, 5, true);
        let spec = stage.world.topology().services[CHANGES].clone();
        if !replaces {
            stage.world.remove(CHANGES, 50 * MS);
            stage.change_in_steps(|_| {});
        }
        let held = |stage: &Stage| stage.world.metrics.services()[CHANGES].observed().paused;
        stage.world.put(spec, CHANGES, Keeps::all(true), 100_000 * MS);
        stage.world.hold_new_version(1000 * MS);
        (0..WORKERS).for_each(|worker| stage.world.follow(worker));
        stage.world.run(150, PAUSE_NS / 100);
        assert!(!stage.world.is_switched());
        stage.ask(CHANGES);
        stage.world.run(60, 100_000);
        let service = stage.world.metrics.service(CHANGES);
        assert_eq!((service.received, held(&stage)), (u64::from(replaces), 0));
        stage.change_in_steps(|_| {});
        stage.ask(CHANGES);
        stage.world.run(90, PAUSE_NS / 100);
        let service = stage.world.metrics.service(CHANGES);
        assert_eq!((service.received, held(&stage)), (u64::from(replaces), WORKERS as u64));
        stage.world.resume_blocks(CHANGES, 0);
        stage.world.run(60, 100_000);
        let service = stage.world.metrics.service(CHANGES);
        assert_eq!((service.replied, service.dropped_requests(), held(&stage)), (2, 0, 0));
    }
}

/// A hold that ends by its time limit finds connections whose requests arrived long ago, and reads them.
#[test]
fn unread_connections_do_not_count_as_idle() {
    let mut stage = Stage::new(1, 11, true);
    let mut setup = Setup::sound(topology(1));
    setup.topology.limits.idle_ms = 1000;
    stage.world = World::build(&setup, |nic| nic);
    (0..4).for_each(|_| stage.call(STAYS));
    stage.world.run(60, 100_000);
    assert_eq!(stage.world.metrics.service(STAYS).replied, 4);
    stage.world.hold(STAYS, 0, 100 * MS);
    stage.world.run(10, MS);
    stage.world.lose_runtime(STAYS, 0, DropReason::Reconfiguring);
    stage.world.run(1, 0);
    (0..4).for_each(|caller| stage.say(STAYS, caller, 1));
    stage.world.run(105, PAUSE_NS / 100);
    let stays = stage.world.metrics.service(STAYS);
    assert_eq!(stays.dropped(DropReason::IdleTimeout), 0);
    assert_eq!(stays.dropped(DropReason::Reconfiguring), 4);
}
