//! Promises that random runs found broken, or could only find broken by luck.

use crate::scene::{MS, Scene, Script, request, script};
use engine::topology::{Dispatch, Polling};
use sim::behaviour::Behaviour;
use sim::fault::Fault;
use sim::message::{Ask, Body, Flavor, request_payload, request_wire};
use sim::net::{Faults, PeerRead};
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Close, Transport};

/// A service of two workers whose only mqueue is the first one's.
fn far_away(framing: Framing) -> Script {
    let mut script = script(framing);
    script.setup.topology.engine.workers = 2;
    script.service().dispatch = Dispatch::KeyHash("16:4".parse().unwrap());
    script
}

#[test]
fn a_stuck_block_does_not_take_its_service_with_it() {
    for dispatch in [Dispatch::RoundRobin, Dispatch::LeastLoaded] {
        let mut script = script(Framing::LengthU16);
        script.service().mqueues = 2;
        script.service().dispatch = dispatch;
        script.service().request_timeout_ms = 5;
        *script.behaviour() =
            Behaviour { stall_after: Some(0), only_block: Some(0), ..Behaviour::default() };
        let mut scene = script.play();
        // Until the stuck block's ring is full and its requests have timed out.
        for _ in 0..60 {
            scene.ask(request(0));
            scene.wait_ms(1);
        }
        scene.wait_ms(10);
        assert_eq!(scene.world.in_flight(0), 0, "{dispatch:?}");
        let before = scene.replied();
        for _ in 0..20 {
            scene.ask(request(0));
            scene.wait_ms(1);
        }
        // The stuck block looks idle, but it has no room.
        assert_eq!(scene.replied() - before, 20, "{dispatch:?}");
    }
}

/// Turns until each of consecutive bursts of 64 is answered; every answer takes 1 ms.
fn bursts(mqueues: u32, count: usize) -> Vec<u32> {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = mqueues;
    script.service().slots = 64;
    *script.behaviour() = Behaviour { remote: true, delay_ns: (MS, MS), ..Behaviour::default() };
    let mut scene = script.play();
    let burst = |number| {
        let before = scene.replied();
        scene.ask_times(64, request(number as u32));
        let mut turns = 0;
        while scene.replied() - before < 64 {
            scene.run(1);
            turns += 1;
            assert!(turns < 100_000, "{} of 64 answered", scene.replied() - before);
        }
        turns
    };
    (0..count).map(burst).collect()
}

#[test]
fn a_burst_for_a_slow_kernel_does_not_wait_in_runs() {
    let took = bursts(16, 6);
    // Nothing is known about the first one: it is dispatched in runs, and some mqueues get nothing.
    let even = bursts(1, 1)[0] / 16;
    assert!(took[0] > even + even / 2, "{took:?}, {even}");
    // From then on: four for each of them.
    assert!(took[1..].iter().all(|turns| *turns <= even + even / 8), "{took:?}, {even}");
}

/// The number of requests, arriving faster than four blocks can answer, that are answered in 5 ms if none may wait
/// for longer than this.
fn answered_under_overload(queue_us_max: u64) -> u64 {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = 4;
    script.service().slots = 64;
    script.service().queue_us_max = queue_us_max;
    *script.behaviour() =
        Behaviour { remote: true, delay_ns: (2000, 2000), ..Behaviour::default() };
    let mut scene = script.play();
    for _ in 0..500 {
        scene.ask_times(40, request(0));
        scene.run(1);
    }
    scene.replied()
}

#[test]
fn a_limit_of_the_wait_costs_no_goodput() {
    let without = answered_under_overload(0);
    for queue_us_max in [50, 100, 500, 5000] {
        let with = answered_under_overload(queue_us_max);
        assert!(100 * with >= 95 * without, "{with} of {without} with {queue_us_max} us");
    }
}

/// A client sends 120 requests; one of two blocks has just answered its part in one go, the other one never does.
fn half_answered() -> Scene {
    let mut script = script(Framing::LengthU16);
    script.another_service(Transport::Udp);
    script.service().mqueues = 2;
    script.service().slots = 64;
    let delay_ns = (5 * MS, 5 * MS);
    *script.behaviour() = Behaviour {
        remote: true,
        delay_ns,
        overlap: 100,
        stall_after: Some(0),
        only_block: Some(0),
        ..Behaviour::default()
    };
    let mut scene = script.play();
    scene.ask_often(120, request(0));
    scene.run(100);
    assert_eq!((scene.world.in_flight(0), scene.replied()), (120, 0));
    scene.world.run(1, 10 * MS);
    scene
}

#[test]
fn replies_wait_for_more_to_their_client_only_behind_other_work() {
    let mut scene = half_answered();
    assert_eq!(scene.replied(), 0, "more replies to their client are in flight");
    scene.run(1);
    let answered = scene.replied();
    assert!(answered >= 56, "the worker was idle, and {answered} left");
    // With work in every turn, 10 us apart.
    let mut scene = half_answered();
    let mut turns = 0;
    while scene.replied() < answered {
        scene.ask(request(0));
        scene.run(1);
        turns += 1;
        assert!(turns <= 21, "they waited for more than 200 us");
    }
    assert!(turns > 10, "they waited for {turns} turns");
    // Nothing waits in a drain.
    let mut scene = half_answered();
    scene.ask(request(0));
    scene.world.begin_drain();
    scene.run(1);
    assert_eq!(scene.replied(), answered);
    // A waiting reply is not lost when its service is removed; its other requests are, with a reason.
    let mut scene = half_answered();
    scene.world.remove(0, 0);
    scene.world.follow(0);
    ask_another_service(&mut scene);
    scene.run(1);
    assert_eq!((scene.replied(), scene.world.metrics.service(1).replied), (0, 1));
    scene.world.follow(0);
    scene.world.turn(0);
    assert_eq!(scene.replied(), answered);
    assert_eq!(scene.dropped(DropReason::DrainTimeout), 120 - answered);
}

fn ask_another_service(scene: &mut Scene) {
    let (peer, port, local) = (scene.client_of(0, 2), 2, [127, 0, 0, 1].into());
    let body = Body { client: 1_000_000, ..request(0) };
    let mut net = lock(&scene.world.net);
    let route = net.route(peer, port, local);
    net.ledger.ask(1, body, Some(route));
    let payload = request_payload(Framing::LengthU16, &body, Flavor::Plain);
    net.send_datagram(peer, port, local, &payload);
}

#[test]
fn a_stuck_service_does_not_hold_up_what_another_one_hands_over() {
    let mut script = far_away(Framing::LengthU16);
    script.service().request_timeout_ms = 1000;
    script.behaviour().stall_after = Some(0);
    script.another_service(Transport::Tcp);
    let mut scene = script.play();
    let caller = scene.connect_to(1);
    for sequence in 0..10 {
        scene.call(caller, request(sequence));
    }
    scene.run(10);
    // Four have credit, one waits at the head of the hand-over ring.
    assert_eq!(scene.world.in_flight(0), 10);
    // Connections go to the worker that has fewer: one more for the other keeps the next one here.
    scene.connect_to(0);
    scene.run(3);
    let peer = scene.client_of(1, 2);
    let conn = lock(&scene.world.net).connect(peer, 2);
    let body = Body { client: 1_000_000, ..request(0) };
    let wire = request_payload(Framing::LengthU16, &body, Flavor::Plain);
    let mut net = lock(&scene.world.net);
    net.ledger.ask(1, body, None);
    net.peer_write(conn, &request_wire(Framing::LengthU16, &wire));
    drop(net);
    scene.run(10);
    let sound = scene.world.metrics.service(1);
    assert_eq!((sound.handed_out, sound.replied), (1, 1));
}

#[test]
fn a_quiet_command_stays_quiet_across_workers() {
    let mut script = far_away(Framing::Memcached);
    script.service().dispatch = Dispatch::KeyHash("36:8".parse().unwrap());
    let mut scene = script.play();
    let caller = scene.connect_to(1);
    let dropped = Body { ask: Ask::Reject, ..request(0) };
    scene.call_as(caller, dropped, Flavor::Quiet);
    scene.run(10);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.handed_out, scene.dropped(DropReason::KernelDrop)), (1, 1));
    assert_eq!(scene.read(caller), PeerRead::Empty);
    // The next one is answered in the slot that is free now.
    scene.call(caller, request(1));
    scene.run(10);
    assert!(scene.hear(caller).starts_with(b"VALUE "));
}

#[test]
fn a_hand_over_wakes_a_sleeper() {
    let mut scene = far_away(Framing::LengthU16).play();
    let caller = scene.connect_to(1);
    scene.wait_ms(3);
    assert!(!scene.world.is_awake(0), "it has no work");
    scene.call(caller, request(0));
    scene.world.advance(10_000);
    scene.world.turn(1);
    assert_eq!(scene.world.metrics.service(0).handed_out, 1);
    assert!(scene.world.is_awake(0), "a request waits for it");
    scene.wait_ms(1);
    assert_eq!(scene.replied(), 1);
}

#[test]
fn a_late_reply_does_not_reach_the_next_connection() {
    let mut script = script(Framing::LengthU16);
    script.behaviour().delay_ns = (5 * MS, 5 * MS);
    let mut scene = script.play();
    let first = scene.connect();
    scene.call(first, request(0));
    scene.run(5);
    lock(&scene.world.net).peer_close(first.conn, Close::Reset);
    scene.run(5);
    // It reuses the slot of the previous one.
    let second = scene.connect();
    scene.wait_ms(10);
    assert_eq!(scene.read(second), PeerRead::Empty);
    assert_eq!((scene.replied(), scene.dropped(DropReason::ClientGone)), (0, 1));
}

#[test]
fn requests_at_an_accelerator_end_with_its_generation() {
    let mut script = script(Framing::LengthU16);
    script.behaviour().delay_ns = (5 * MS, 5 * MS);
    let mut scene = script.play();
    for sequence in 0..3 {
        scene.ask(request(sequence));
    }
    scene.run(5);
    assert_eq!(scene.world.in_flight(0), 3);
    scene.world.lose_runtime(0, 0, DropReason::AcceleratorLost);
    scene.run(2);
    assert_eq!((scene.world.in_flight(0), scene.dropped(DropReason::AcceleratorLost)), (0, 3));
    scene.world.replace_rings(0, 0, Behaviour::default());
    scene.world.resume_blocks(0, 0);
    scene.run(2);
    scene.ask(request(3));
    scene.wait_ms(10);
    assert_eq!((scene.replied(), scene.world.in_flight(0)), (1, 0), "only of the new generation");
}

#[test]
fn a_dead_accelerator_loses_only_its_own_requests() {
    for (workers, dispatch) in
        [(1, Dispatch::RoundRobin), (1, Dispatch::LeastLoaded), (2, Dispatch::RoundRobin)]
    {
        let mut script = script(Framing::LengthU16);
        script.setup.topology.engine.workers = workers;
        let second = script.setup.topology.accelerators[0].clone();
        script.setup.topology.accelerators.push(second);
        let service = script.service();
        (service.accelerators, service.dispatch) = (vec![0, 1], dispatch);
        service.share_out();
        (service.shares[0].mqueues, service.shares[1].mqueues) = (2, 4);
        script.behaviour().delay_ns = (5 * MS, 5 * MS);
        let mut scene = script.play();
        for n in 0..12 {
            scene.ask_from(n % workers, request(0));
        }
        scene.run(5);
        assert_eq!(scene.world.in_flight(0), 12);
        scene.world.lose_runtime(0, 1, DropReason::AcceleratorLost);
        scene.run(2);
        // One request per mqueue at a time: four in six were at the second accelerator.
        assert_eq!(scene.dropped(DropReason::AcceleratorLost), 8, "{workers} {dispatch:?}");
        scene.wait_ms(20);
        assert_eq!(scene.replied(), 4, "{workers} {dispatch:?}");
        for _ in 0..20 {
            scene.ask(request(0));
            scene.wait_ms(10);
        }
        assert_eq!(scene.replied(), 24, "{workers} {dispatch:?}");
        scene.world.replace_rings(
            0,
            1,
            Behaviour { delay_ns: (5 * MS, 5 * MS), ..Behaviour::default() },
        );
        scene.world.resume_blocks(0, 1);
        scene.run(5);
        // More than the slots of the first accelerator alone.
        for n in 0..16 {
            scene.ask_from(n % workers, request(0));
        }
        scene.wait_ms(40);
        assert_eq!((scene.replied(), scene.dropped(DropReason::NoCredit)), (40, 0));
    }
}

#[test]
fn a_workers_time_is_busy_idle_or_asleep() {
    let mut scene = script(Framing::Raw).play();
    scene.world.turn(0);
    let began_ns = scene.world.now_ns();
    for _ in 0..5 {
        scene.ask_times(2, request(0));
        scene.wait_ms(2);
    }
    let passed_ns = scene.world.now_ns() - began_ns;
    let worker = scene.world.metrics.workers().next().unwrap();
    let spent = [&worker.busy_ns, &worker.idle_ns, &worker.sleep_ns].map(|c| c.value());
    assert_eq!(spent.iter().sum::<u64>(), passed_ns);
    assert!(spent.iter().all(|ns| *ns > 0) && worker.sleeps.value() > 0, "{spent:?}");
}

#[test]
fn nothing_settles_while_something_crosses() {
    let mut scene = far_away(Framing::LengthU16).play();
    let caller = scene.connect_to(1);
    scene.run(3);
    // The owner of the mqueue drains first and has nothing to do.
    scene.world.drain_worker(0);
    scene.wait_ms(3);
    scene.call(caller, request(0));
    scene.world.advance(0);
    scene.world.turn(1);
    assert_eq!(scene.world.metrics.service(0).handed_out, 1);
    // The other one follows immediately and has handed everything over.
    scene.world.drain_worker(1);
    for _ in 0..3 {
        scene.world.advance(2 * MS);
        scene.world.turn(1);
        assert!(!scene.world.all_settled(), "a request is between the workers");
    }
    scene.world.turn(0);
    assert!(!scene.world.all_settled(), "its reply is between the workers");
    scene.wait_ms(5);
    assert!(scene.world.all_settled());
    scene.world.finish();
    scene.world.check_finished().unwrap();
    assert_eq!((scene.replied(), scene.dropped(DropReason::DrainTimeout)), (1, 0));
}

#[test]
fn nothing_is_taken_once_a_drain_began() {
    let mut scene = script(Framing::LengthU16).play();
    let caller = scene.connect();
    scene.call(caller, request(0));
    scene.ask(request(0));
    scene.run(5);
    let before = scene.world.metrics.service(0);
    assert_eq!((before.received, before.replied), (2, 2));
    // Messages that have arrived and were not read, and later ones.
    scene.call(caller, request(1));
    scene.ask(request(1));
    scene.world.begin_drain();
    scene.connect();
    for sequence in 2..5 {
        scene.ask(request(sequence));
        scene.run(5);
    }
    scene.wait_ms(2);
    let after = scene.world.metrics.service(0);
    assert_eq!((after.received, after.connections_accepted), (2, before.connections_accepted));
    assert!(scene.world.all_settled());
}

#[test]
fn connections_at_the_start_of_a_drain_meet_no_limit() {
    let mut script = script(Framing::LengthU16);
    script.setup.topology.engine.workers = 2;
    let mut scene = script.play();
    scene.run(3);
    let callers: Vec<_> = (0..8).map(|n| scene.connect_to(n % 2)).collect();
    scene.world.advance(0);
    // It keeps half of all and passes half on, to one that has not polled when it drains.
    scene.world.turn(0);
    scene.world.begin_drain();
    scene.wait_ms(3);
    assert_eq!(scene.dropped(DropReason::ConnectionLimit), 0);
    for caller in callers {
        assert_ne!(scene.read(caller), PeerRead::Empty, "no client is left waiting");
    }
    assert!(scene.world.all_settled());
}

#[test]
fn a_client_that_leaves_during_a_drain_is_no_drain_timeout() {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = 2;
    *script.behaviour() =
        Behaviour { late: 1000, late_ns: 5 * MS, only_block: Some(0), ..Behaviour::default() };
    let mut scene = script.play();
    let caller = scene.connect();
    // The second overtakes the first and waits for it.
    for sequence in 0..2 {
        scene.call(caller, request(sequence));
        scene.run(3);
    }
    scene.world.begin_drain();
    scene.run(3);
    lock(&scene.world.net).peer_close(caller.conn, Close::Reset);
    scene.wait_ms(10);
    assert!(scene.world.all_settled());
    assert_eq!(scene.dropped(DropReason::DrainTimeout), 0);
    assert_eq!(scene.dropped(DropReason::ClientGone), 2);
}

#[test]
fn a_full_socket_is_asked_once_a_turn() {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = 16;
    script.service().slots = 128;
    *script.behaviour() = Behaviour { remote: true, overlap: 100, ..Behaviour::default() };
    let mut scene = script.play();
    scene.faults(Faults { full_send: 1000, ..Faults::default() });
    scene.ask_times(2000, request(0));
    scene.run(100);
    assert_eq!((scene.replied(), scene.world.in_flight(0)), (0, 2000), "a port holds 1024");
    let asked = |scene: &Scene| lock(&scene.world.net).fault_counts.count(Fault::FullSend);
    let before = asked(&scene);
    scene.run(20);
    assert_eq!(asked(&scene) - before, 20, "however many mqueues have replies for it");
    scene.faults(Faults::default());
    scene.run(100);
    assert_eq!(scene.replied(), 2000);
}

#[test]
fn a_full_window_has_room_for_the_end() {
    let mut script = script(Framing::Memcached);
    script.limits().pipelined = 2;
    script.behaviour().delay_ns = (MS, MS);
    let mut scene = script.play();
    let caller = scene.connect();
    let body = scene.call(caller, request(0));
    // The binary protocol: nothing after it can be parsed.
    scene.say(caller, b"\x80\r\n");
    scene.wait_ms(3);
    let reply = sim::message::reply_payload(Framing::Memcached, &body.reply(), Flavor::Plain);
    let expected = [&reply[..], b"CLIENT_ERROR bad command line format\r\n"].concat();
    assert_eq!(scene.hear(caller), expected);
    assert_eq!(scene.read(caller), PeerRead::Closed);
}

#[test]
fn a_read_that_fills_the_buffer_is_followed_by_another() {
    let mut script = script(Framing::LengthU32);
    script.limits().pipelined = 1000;
    script.service().slots = 1024;
    script.behaviour().overlap = 1000;
    let mut scene = script.play();
    let caller = scene.connect();
    scene.run(2);
    // All of it arrives at once, and no event follows.
    for sequence in 0..100 {
        scene.call(caller, Body { filler: 800, ..request(sequence) });
    }
    scene.run(20);
    assert_eq!(scene.replied(), 100);
}

#[test]
fn replies_before_the_end_are_written_before_the_end() {
    let mut scene = script(Framing::LengthU16).play();
    scene.faults(Faults { pipe_bytes: 100, ..Faults::default() });
    let caller = scene.connect();
    let first = scene.call(caller, Body { want: 500, ..request(0) });
    scene.run(3);
    scene.call(caller, Body { ask: Ask::Reject, ..request(1) });
    scene.run(3);
    let mut expected = Vec::new();
    Framing::LengthU16.encode_reply(&first.reply().reply_bytes(), &mut expected).unwrap();
    let mut heard = Vec::new();
    for _ in 0..10 {
        heard.extend(scene.hear(caller));
        scene.run(2);
    }
    assert_eq!(heard, expected);
    assert_eq!(scene.read(caller), PeerRead::Closed);
    assert_eq!((scene.replied(), scene.dropped(DropReason::ClientGone)), (1, 0));
}

#[test]
fn early_replies_of_a_closed_connection_give_their_memory_back() {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = 2;
    script.limits().early_reply_bytes = 100;
    *script.behaviour() =
        Behaviour { late: 1000, late_ns: MS, only_block: Some(0), ..Behaviour::default() };
    let mut scene = script.play();
    for _ in 0..10 {
        let caller = scene.connect();
        // The second reply waits for the first when the client leaves.
        for sequence in 0..2 {
            scene.call(caller, request(sequence));
            scene.run(3);
        }
        lock(&scene.world.net).peer_close(caller.conn, Close::Reset);
        scene.wait_ms(3);
    }
    assert_eq!(scene.dropped(DropReason::ClientGone), 20);
    assert_eq!(scene.dropped(DropReason::ReplyMemory), 0);
}

/// Time passes; only workers that have a reason to run do so.
fn live(scene: &mut crate::scene::Scene, ms: u64) {
    for _ in 0..100 * ms {
        scene.world.advance(MS / 100);
        for worker in 0..scene.world.workers.len() {
            if scene.world.is_awake(worker) {
                scene.world.turn(worker);
            }
        }
    }
    scene.world.check().unwrap();
}

#[test]
fn a_sleeping_worker_has_published_its_credit() {
    let mut script = script(Framing::LengthU16);
    script.setup.topology.engine.workers = 2;
    script.setup.topology.engine.polling = Polling::Block;
    script.service().slots = 1;
    *script.behaviour() =
        Behaviour { remote: true, delay_ns: (3 * MS, 3 * MS), ..Behaviour::default() };
    let mut scene = script.play();
    scene.ask_from(0, request(0));
    live(&mut scene, 2);
    // The other worker checks while the only mqueue is busy.
    scene.ask_from(1, request(1));
    live(&mut scene, 8);
    assert_eq!((scene.replied(), scene.dropped(DropReason::NoCredit)), (1, 1));
    assert!(!scene.world.is_awake(0) && !scene.world.is_awake(1), "both sleep");
    scene.ask_from(1, request(2));
    live(&mut scene, 8);
    assert_eq!((scene.replied(), scene.dropped(DropReason::NoCredit)), (2, 1));
}

/// As after a panic of its thread: the others take what it would have got.
#[test]
fn a_worker_that_ended_attracts_no_work() {
    let mut script = script(Framing::LengthU16);
    script.setup.topology.engine.workers = 2;
    script.service().mqueues = 2;
    let never = (3_600_000 * MS, 3_600_000 * MS);
    *script.behaviour() = Behaviour { remote: true, delay_ns: never, ..Behaviour::default() };
    let mut scene = script.play();
    live(&mut scene, 3);
    let left = scene.connect_to(0);
    scene.call(left, request(0));
    live(&mut scene, 3);
    drop(scene.world.workers.pop());
    live(&mut scene, 3);
    // The connections are not given to it, though it had fewest.
    for _ in 0..2 {
        let caller = scene.connect_to(0);
        scene.call(caller, request(0));
    }
    live(&mut scene, 3);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.received, counted.accepted, counted.handed_out), (3, 3, 0));
    // Nor is what finds no credit.
    scene.ask_times(4, request(0));
    live(&mut scene, 3);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.accepted, counted.handed_out), (4, 0));
    assert_eq!(scene.dropped(DropReason::NoCredit), 3);
}
