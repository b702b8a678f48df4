//! Proxies: upstream servers that lose, delay, repeat, end and reset, chains on the path, and the books at every step.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use crate::scene::{MS, Scene, Script, request, script};
use builtins::{Passthrough, Threshold};
use engine::{ChainReply, ChainRequest};
use onpath::{Command, Direction, Failure, Function, Messages, Notice, OnFailure, RequestId};
use sim::backend::BackendBehaviour;
use sim::net::{Faults, Reachability};
use sim::rng::Rng;
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Close, Transport};
use wire::session::Origin;

const FRAMING: Framing = Framing::LengthU16;

fn proxy(transport: Transport) -> Script {
    let mut script = script(FRAMING);
    script.upstream(transport);
    script
}

#[test]
fn a_sound_server_answers_everybody() {
    let mut scene = proxy(Transport::Udp).play();
    scene.ask_times(50, request(0));
    scene.ask_often(20, request(0));
    scene.run(100);
    assert_eq!((scene.replied(), scene.world.in_flight(0)), (70, 0));
    let mut scene = proxy(Transport::Tcp).play();
    for _ in 0..10 {
        let caller = scene.connect();
        for sequence in 0..20 {
            scene.call(caller, request(sequence));
        }
    }
    scene.run(200);
    assert_eq!((scene.replied(), scene.world.in_flight(0)), (200, 0));
}

/// Everything goes wrong for a while, then nothing does: the books hold at every step, no answer reaches a wrong client, and nothing
/// stays in flight.
fn storm(seed: u64, transport: Transport) -> Scene {
    let mut rng = Rng::new(seed);
    let mut script = proxy(transport);
    script.setup.seed = seed;
    script.setup.topology.engine.workers = 1 + seed as usize % 2;
    script.service().request_timeout_ms = 5;
    script.service().upstream_flows = 6;
    script.limits().idle_ms = 20;
    script.backend_behaviour = BackendBehaviour {
        delay_ns: (0, 2 * MS),
        late: 100,
        // Connections are looked at for time-outs every 32 ms.
        late_ns: if transport == Transport::Udp { 8 * MS } else { 60 * MS },
        hang: 30,
        close: 20,
        cut: 20,
        // A datagram more finds nothing in flight; on a stream nothing would tell it from the next answer.
        unasked: if transport == Transport::Udp { 100 } else { 0 },
        too_long: 20,
        change_reachability: 10,
        ..BackendBehaviour::SOUND
    };
    let mut scene = script.play();
    scene.faults(Faults {
        lose: 50,
        refuse_send: 20,
        full_send: 20,
        short_read: 200,
        short_write: 200,
        spurious: 20,
        late_event: 200,
        exhausted: 20,
        reset_destroys: 500,
        delay_ns: (1000, MS / 2),
        pipe_bytes: 2000,
        ..Faults::default()
    });
    for _ in 0..60 {
        match transport {
            Transport::Udp => {
                for worker in 0..scene.world.workers.len() {
                    (0..rng.below(6)).for_each(|_| _ = scene.ask_from(worker, request(0)));
                }
            }
            Transport::Tcp => {
                let caller = scene.connect_to(seed as usize % scene.world.workers.len());
                for sequence in 0..1 + rng.below(5) as u32 {
                    scene.call(caller, request(sequence));
                }
            }
        }
        scene.run(1 + rng.below(60) as usize);
    }
    scene.faults(Faults::default());
    scene.wait_ms(300);
    assert_eq!(scene.world.in_flight(0), 0, "seed {seed}");
    scene.world.check().unwrap();
    scene
}

#[test]
fn datagrams_survive_a_storm() {
    let scenes: Vec<_> = (0..40).map(|seed| storm(seed, Transport::Udp)).collect();
    let total = |reason| scenes.iter().map(|scene| scene.dropped(reason)).sum::<u64>();
    let reasons = [
        DropReason::RequestTimeout,
        DropReason::UpstreamRefused,
        DropReason::UpstreamFlows,
        DropReason::BackendLate,
        DropReason::BackendUnasked,
        DropReason::ReplyTooLong,
    ];
    for reason in reasons {
        assert!(total(reason) > 0, "{reason:?} was met");
    }
    assert!(scenes.iter().all(|scene| scene.replied() > 0));
}

#[test]
fn streams_survive_a_storm() {
    let scenes: Vec<_> = (0..40).map(|seed| storm(seed, Transport::Tcp)).collect();
    let total = |reason| scenes.iter().map(|scene| scene.dropped(reason)).sum::<u64>();
    // With this framing a time-out ends the connection, so no late answer comes.
    for reason in [DropReason::RequestTimeout, DropReason::UpstreamRefused] {
        assert!(total(reason) > 0, "{reason:?} was met");
    }
    assert!(scenes.iter().all(|scene| scene.replied() > 0));
}

/// Each costs system calls, and its source may be forged.
#[test]
// provokes: upstream_flows
fn only_so_many_flows_are_opened_at_once() {
    let mut script = proxy(Transport::Udp);
    script.service().upstream_flows = 8;
    let mut scene = script.play();
    scene.ask(request(0));
    scene.run(20);
    scene.ask_times(2000, request(0));
    // Less than a millisecond.
    scene.run(90);
    let opened = |scene: &Scene| scene.world.metrics.service(0).upstream_flows_opened;
    assert!((512..560).contains(&opened(&scene)), "{} were opened", opened(&scene));
    scene.wait_ms(20);
    assert_eq!(scene.dropped(DropReason::UpstreamFlows) + scene.replied(), 2001);
    // Later there are flows again.
    let before = (opened(&scene), scene.replied());
    scene.ask_times(5, request(0));
    scene.run(100);
    assert_eq!((opened(&scene), scene.replied()), (before.0 + 5, before.1 + 5));
    assert_eq!(scene.world.in_flight(0), 0);
    scene.world.check().unwrap();
}

#[test]
fn a_chain_sees_what_passes_a_proxy() {
    for transport in [Transport::Udp, Transport::Tcp] {
        let mut scene = proxy(transport).play();
        // The sequence number of a request, whose least byte is the first: 0 and 1 pass.
        let mut threshold = Box::new(Threshold::default());
        for (register, value) in [(6, 12), (8, 0x01ff_ffff)] {
            threshold.write(register, value).unwrap();
        }
        let chain: Vec<(Box<dyn Function>, _)> =
            vec![(Box::new(Passthrough), OnFailure::Open), (threshold, OnFailure::Closed)];
        scene.world.set_functions(0, 0, chain);
        scene.run(1);
        for sequence in 0..4 {
            match transport {
                Transport::Udp => _ = scene.ask(request(sequence)),
                Transport::Tcp => {
                    let caller = scene.connect();
                    scene.call(caller, request(sequence));
                }
            }
        }
        scene.run(100);
        let dropped = scene.dropped(DropReason::FunctionDrop);
        assert_eq!((scene.replied(), dropped, scene.world.in_flight(0)), (2, 2, 0));
        let read = scene.world.ask_chain(0, (0, None), ChainRequest::Command(1, Command::Read));
        scene.run(1);
        let Ok(ChainReply::Command(Ok(onpath::Reading { values, .. }))) = read.try_recv() else {
            panic!("no values")
        };
        assert_eq!((values[2], values[4]), (4, 2), "count and dropped");
        // Detached while it runs.
        scene.world.set_functions(0, 0, Vec::new());
        scene.run(1);
        match transport {
            Transport::Udp => _ = scene.ask(request(7)),
            Transport::Tcp => {
                let caller = scene.connect();
                scene.call(caller, request(7));
            }
        }
        scene.run(100);
        assert_eq!(scene.replied(), 3);
        scene.world.check().unwrap();
    }
}

/// Decides about every request.
struct Requests(fn(&mut Messages, usize));

impl Function for Requests {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Requests {
            (0..messages.len()).for_each(|index| (self.0)(messages, index));
        }
        Ok(())
    }
}

fn attach(scene: &mut Scene, function: fn(&mut Messages, usize)) {
    scene.world.set_functions(0, 0, vec![(Box::new(Requests(function)), OnFailure::Closed)]);
    scene.run(1);
}

#[test]
// provokes: mqueue_dead
fn a_proxy_has_no_mqueue_that_a_function_could_steer_to() {
    for transport in [Transport::Udp, Transport::Tcp] {
        let mut scene = proxy(transport).play();
        attach(&mut scene, |messages, index| messages.steer(index, 0));
        match transport {
            Transport::Udp => _ = scene.ask(request(0)),
            Transport::Tcp => {
                let caller = scene.connect();
                scene.call(caller, request(0));
            }
        }
        scene.run(100);
        assert_eq!((scene.replied(), scene.dropped(DropReason::MqueueDead)), (0, 1));
        assert_eq!(scene.world.in_flight(0), 0);
        scene.world.check().unwrap();
    }
}

/// Otherwise the answers to all later requests would be taken for those of the ones before.
#[test]
// provokes: function_failed
fn a_function_cannot_change_whether_a_command_is_answered() {
    let mut script = script(Framing::Memcached);
    script.upstream(Transport::Tcp);
    let mut scene = script.play();
    let caller = scene.connect();
    scene.call(caller, request(0));
    scene.run(100);
    assert_eq!(scene.replied(), 1);
    attach(&mut scene, |messages, index| messages.rewrite(index, b"delete key noreply\r\n"));
    scene.call(caller, request(1));
    scene.run(100);
    assert_eq!((scene.replied(), scene.dropped(DropReason::FunctionFailed)), (1, 1));
    scene.world.set_functions(0, 0, Vec::new());
    scene.run(1);
    scene.call(caller, request(2));
    scene.run(100);
    assert_eq!((scene.replied(), scene.world.in_flight(0)), (2, 0));
    scene.world.check().unwrap();
}

/// A server that takes no connection: nothing that the client has sent is ever answered.
#[test]
fn a_held_client_is_read_again_when_its_connection_to_the_server_is_given_up() {
    const COMMANDS: u64 = 10_000;
    let command = b"delete key noreply\r\n";
    let mut script = script(Framing::Memcached);
    script.upstream(Transport::Tcp);
    script.service().request_timeout_ms = 50;
    let mut scene = script.play();
    scene.backend = None;
    lock(&scene.world.net).set_reachability(0, Reachability::Silent);
    let caller = scene.connect();
    let received = |scene: &Scene| scene.world.metrics.service(0).received;
    for _ in 0..COMMANDS / 100 {
        scene.say(caller, &command.repeat(100));
        scene.run(1);
    }
    scene.wait_ms(100);
    let held = received(&scene);
    assert!((1..COMMANDS).contains(&held), "the client is held back after {held}");
    // The patience with an attempt is a second.
    scene.wait_ms(1500);
    assert!(received(&scene) > held, "it is read again");
    scene.wait_ms(5000);
    let ended = [DropReason::RequestTimeout, DropReason::UpstreamRefused];
    let ended: u64 = ended.iter().map(|reason| scene.dropped(*reason)).sum();
    assert_eq!((received(&scene), ended, scene.world.in_flight(0)), (COMMANDS, COMMANDS, 0));
}

/// Requests that passed and have not ended, and how many ended in each way.
#[derive(Default)]
struct Books {
    open: HashSet<RequestId>,
    replied: u64,
    told: u64,
    gone: u64,
}

/// Keeps books of the requests that it has let pass.
struct Keeper(Arc<Mutex<Books>>);

impl Function for Keeper {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        let mut books = self.0.lock().unwrap();
        for index in 0..messages.len() {
            let request = *messages.request(index);
            match direction {
                Direction::Requests => assert!(books.open.insert(request), "{request:?} is new"),
                Direction::Replies => {
                    assert!(books.open.remove(&request), "{request:?} is open");
                    books.replied += 1;
                }
            }
        }
        Ok(())
    }

    fn wants_notices(&self) -> bool {
        true
    }

    fn notice(&mut self, notice: &Notice) {
        let mut books = self.0.lock().unwrap();
        match notice {
            // Of a request that was answered and has a fence behind it, this comes as well.
            Notice::Ended { request, .. } => books.told += u64::from(books.open.remove(request)),
            Notice::Gone { client, .. } => {
                let before = books.open.len();
                books.open.retain(|request| request.origin != Origin::Client(*client));
                books.gone += (before - books.open.len()) as u64;
            }
            Notice::Attached | Notice::Detached | Notice::Tick { .. } => {}
        }
    }
}

#[test]
fn a_function_hears_of_every_end_of_a_request_on_a_stream() {
    let (mut replied, mut told, mut gone) = (0, 0, 0);
    for seed in 0..16 {
        let mut rng = Rng::new(seed);
        let mut script = script(Framing::Memcached);
        script.upstream(Transport::Tcp);
        script.setup.seed = seed;
        script.service().request_timeout_ms = 5;
        script.backend_behaviour = BackendBehaviour {
            delay_ns: (0, 2 * MS),
            late: 100,
            late_ns: 60 * MS,
            hang: 20,
            close: 20,
            cut: 20,
            too_long: 20,
            change_reachability: 10,
            ..BackendBehaviour::SOUND
        };
        let mut scene = script.play();
        let books = Arc::new(Mutex::new(Books::default()));
        let keeper = Box::new(Keeper(Arc::clone(&books)));
        scene.world.set_functions(0, 0, vec![(keeper, OnFailure::Closed)]);
        scene.run(1);
        scene.faults(Faults {
            lose: 50,
            short_read: 200,
            short_write: 200,
            late_event: 200,
            exhausted: 20,
            reset_destroys: 500,
            delay_ns: (1000, MS / 2),
            pipe_bytes: 2000,
            ..Faults::default()
        });
        for _ in 0..60 {
            let caller = scene.connect();
            for sequence in 0..1 + rng.below(5) as u32 {
                scene.call(caller, request(sequence));
            }
            scene.run(1 + rng.below(60) as usize);
            if rng.below(4) == 0 {
                lock(&scene.world.net).peer_close(caller.conn, Close::Reset);
            }
        }
        scene.faults(Faults::default());
        scene.wait_ms(1500);
        assert_eq!(scene.world.in_flight(0), 0, "seed {seed}");
        let books = books.lock().unwrap();
        assert!(books.open.is_empty(), "seed {seed}: {:?}", books.open);
        (replied, told, gone) = (replied + books.replied, told + books.told, gone + books.gone);
    }
    assert!(replied > 0 && told > 0 && gone > 0, "{replied} {told} {gone}");
}
