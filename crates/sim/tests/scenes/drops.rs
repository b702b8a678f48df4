//! Every reason for which a message can be lost, provoked one at a time.
//!
//! The scenes run the real engine; the simulator checks every turn, so each of these tests
//! also checks the accounting while the reason occurs.

use crate::scene::{MS, Scene, Script, UDP, request, script};
use engine::topology::{Dispatch, Replies};
use sim::backend::BackendBehaviour;
use sim::behaviour::Behaviour;
use sim::message::{Ask, Body, Flavor, match_id, reply_payload, request_payload, request_wire};
use sim::net::{Faults, PeerRead};
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Close, Transport};

/// A service whose blocks read one message and never answer.
fn stuck(framing: Framing) -> Script {
    let mut script = script(framing);
    script.behaviour().stall_after = Some(0);
    script
}

/// A service that asks its backend for everything.
fn asking(transport: Transport, backend_behaviour: BackendBehaviour) -> Scene {
    let mut script = script(Framing::LengthU16);
    script.backend(transport);
    script.setup.honest_backends = vec![backend_behaviour.is_honest()];
    script.backend_behaviour = backend_behaviour;
    script.play()
}

fn question(sequence: u32) -> Body {
    Body { ask: Ask::Backend, ..request(sequence) }
}

#[test]
fn a_long_datagram_is_refused() {
    let mut script = script(Framing::LengthU16);
    script.service().max_message_bytes = 100;
    let mut scene = script.play();
    scene.ask(Body { filler: 73, ..request(0) });
    scene.ask(Body { filler: 72, ..request(0) });
    scene.run(5);
    // provokes: too_long
    assert_eq!((scene.dropped(DropReason::TooLong), scene.replied()), (1, 1));
}

#[test]
fn a_message_without_its_key_is_refused() {
    let mut script = script(Framing::LengthU16);
    script.service().dispatch = Dispatch::KeyHash("16:4".parse().unwrap());
    let mut scene = script.play();
    scene.datagram(&[7; 19]);
    scene.ask(request(0));
    scene.run(5);
    // provokes: too_short
    assert_eq!((scene.dropped(DropReason::TooShort), scene.replied()), (1, 1));
}

#[test]
fn a_datagram_without_credit_is_shed() {
    let mut scene = stuck(Framing::LengthU16).play();
    scene.ask_times(6, request(0));
    scene.run(5);
    // provokes: no_credit
    assert_eq!(scene.dropped(DropReason::NoCredit), 2);
    assert_eq!(scene.world.in_flight(0), 4);
}

#[test]
fn a_dead_block_loses_its_requests_and_leaves_no_accelerator() {
    let mut script = script(Framing::LengthU16);
    script.behaviour().die_after = Some(0);
    let mut scene = script.play();
    scene.ask_times(3, request(0));
    scene.wait_ms(3);
    // provokes: mqueue_dead
    assert_eq!(scene.dropped(DropReason::MqueueDead), 3);
    scene.ask(request(0));
    scene.run(5);
    // provokes: no_accelerator
    assert_eq!(scene.dropped(DropReason::NoAccelerator), 1);
}

#[test]
fn impossible_ring_words_end_an_mqueue() {
    let mut script = script(Framing::LengthU16);
    script.behaviour().scribble_after = Some(0);
    // Overwrites may or may not hit a relevant word.
    script.service().request_timeout_ms = 3_600_000;
    let mut scene = script.play();
    scene.ask(request(0));
    scene.ask(request(0));
    scene.wait_ms(100);
    // provokes: mqueue_dead
    assert_eq!(scene.dropped(DropReason::MqueueDead), 2);
}

#[test]
fn a_queue_that_is_too_slow_is_not_joined() {
    let mut script = stuck(Framing::LengthU16);
    script.service().queue_us_max = 500;
    let mut scene = script.play();
    // The first is read, the second waits.
    scene.ask(request(0));
    scene.ask(request(0));
    scene.wait_ms(3);
    assert_eq!(scene.world.in_flight(0), 2);
    scene.ask(request(0));
    scene.run(5);
    // provokes: queue_time
    assert_eq!(scene.dropped(DropReason::QueueTime), 1);
    assert_eq!(scene.dropped(DropReason::NoCredit), 0);
}

#[test]
fn an_unanswered_request_times_out() {
    let mut script = stuck(Framing::LengthU16);
    script.service().request_timeout_ms = 20;
    let mut scene = script.play();
    scene.ask(request(0));
    scene.wait_ms(19);
    assert_eq!(scene.dropped(DropReason::RequestTimeout), 0);
    scene.wait_ms(5);
    // provokes: request_timeout
    assert_eq!(scene.dropped(DropReason::RequestTimeout), 1);
    assert_eq!(scene.world.in_flight(0), 0);
}

#[test]
fn kernels_drop_with_a_reason() {
    let mut scene = script(Framing::LengthU16).play();
    scene.ask(Body { ask: Ask::BadLength, ..request(0) });
    scene.ask(Body { ask: Ask::Reject, ..request(0) });
    scene.run(5);
    // provokes: bad_length, kernel_drop
    assert_eq!(scene.dropped(DropReason::BadLength), 1);
    assert_eq!(scene.dropped(DropReason::KernelDrop), 1);
    lock(&scene.world.models[0])
        .set_behaviour(Behaviour { too_long: 1000, ..Behaviour::default() });
    scene.ask(request(0));
    scene.run(5);
    // provokes: reply_too_long
    assert_eq!(scene.dropped(DropReason::ReplyTooLong), 1);
}

#[test]
fn a_dropped_request_ends_its_connection_in_its_turn() {
    let mut scene = script(Framing::LengthU16).play();
    let caller = scene.connect();
    let first = scene.call(caller, request(0));
    scene.call(caller, Body { ask: Ask::Reject, ..request(1) });
    scene.call(caller, request(2));
    scene.run(10);
    let mut expected = Vec::new();
    Framing::LengthU16.encode_reply(&first.reply().reply_bytes(), &mut expected).unwrap();
    assert_eq!(scene.hear(caller), expected);
    assert_eq!(scene.read(caller), PeerRead::Closed);
    // provokes: kernel_drop, client_gone
    assert_eq!(scene.dropped(DropReason::KernelDrop), 1);
    assert_eq!(scene.dropped(DropReason::ClientGone), 1, "the third reply has no client");
}

#[test]
fn a_large_reply_to_an_unverified_source_is_kept_back() {
    let mut script = script(Framing::LengthU16);
    script.limits().udp_reply_ratio = Some(3);
    let mut scene = script.play();
    // Requests and replies have 28 bytes before the filler.
    scene.ask(Body { want: 3 * 28 - 28, ..request(0) });
    scene.ask(Body { want: 3 * 28 - 27, ..request(0) });
    scene.run(5);
    // provokes: reply_ratio
    assert_eq!((scene.dropped(DropReason::ReplyRatio), scene.replied()), (1, 1));
}

#[test]
fn a_reply_that_breaks_the_framing_is_not_sent() {
    let mut scene = script(Framing::Line).play();
    let caller = scene.connect();
    scene.call(caller, Body { ask: Ask::Unframable, ..request(0) });
    scene.run(5);
    assert_eq!(scene.read(caller), PeerRead::Closed);
    // provokes: reply_unframable
    assert_eq!(scene.dropped(DropReason::ReplyUnframable), 1);
}

#[test]
fn a_client_that_left_loses_its_reply() {
    let mut script = script(Framing::LengthU16);
    script.behaviour().delay_ns = (MS, MS);
    let mut scene = script.play();
    let caller = scene.connect();
    scene.call(caller, request(0));
    scene.run(5);
    assert_eq!(scene.world.in_flight(0), 1);
    lock(&scene.world.net).peer_close(caller.conn, Close::Reset);
    scene.wait_ms(3);
    // provokes: client_gone
    assert_eq!(scene.dropped(DropReason::ClientGone), 1);
}

#[test]
fn a_client_that_does_not_read_is_closed() {
    let mut script = script(Framing::LengthU16);
    script.limits().slow_client_ms = 20;
    let mut scene = script.play();
    let faults = Faults { pipe_bytes: 200, ..Faults::default() };
    scene.faults(faults);
    let caller = scene.connect();
    for sequence in 0..5 {
        scene.call(caller, Body { want: 100, ..request(sequence) });
        scene.run(5);
    }
    // 130 bytes each: the first reply is taken, the second in part.
    assert_eq!((scene.replied(), scene.world.in_flight(0)), (1, 4));
    scene.wait_ms(25);
    // provokes: slow_client
    assert_eq!(scene.dropped(DropReason::SlowClient), 4);
    assert!(lock(&scene.world.net).is_over(caller.conn));
}

#[test]
fn early_replies_have_bounded_memory() {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = 2;
    script.limits().early_reply_bytes = 50;
    *script.behaviour() =
        Behaviour { late: 1000, late_ns: 5 * MS, only_block: Some(0), ..Behaviour::default() };
    let mut scene = script.play();
    let caller = scene.connect();
    // In turn: the first goes to the slow block, the second overtakes it, the third waits behind.
    for sequence in 0..4 {
        scene.call(caller, request(sequence));
        scene.run(3);
    }
    // provokes: reply_memory
    assert_eq!(scene.dropped(DropReason::ReplyMemory), 1);
    scene.wait_ms(15);
    assert_eq!(scene.replied(), 3, "earlier requests are answered, then the connection ends");
    assert!(lock(&scene.world.net).is_over(caller.conn));
}

#[test]
fn a_refused_send_is_counted() {
    let mut scene = script(Framing::LengthU16).play();
    scene.faults(Faults { refuse_send: 1000, ..Faults::default() });
    scene.ask(request(0));
    scene.run(5);
    // provokes: send_failed
    assert_eq!(scene.dropped(DropReason::SendFailed), 1);
    // A socket that stays full eventually loses the waiting replies.
    scene.faults(Faults { full_send: 1000, ..Faults::default() });
    scene.ask(request(0));
    scene.wait_ms(99);
    assert_eq!((scene.dropped(DropReason::SendFailed), scene.world.in_flight(0)), (1, 1));
    scene.wait_ms(5);
    assert_eq!((scene.dropped(DropReason::SendFailed), scene.world.in_flight(0)), (2, 0));
}

/// A service of two workers whose only mqueue is the first one's.
fn far_away(framing: Framing) -> Script {
    let mut script = script(framing);
    script.setup.topology.engine.workers = 2;
    script.service().dispatch = Dispatch::KeyHash("16:4".parse().unwrap());
    script
}

#[test]
fn a_full_hand_over_ring_sheds_datagrams() {
    let mut scene = far_away(Framing::LengthU16).play();
    for _ in 0..260 {
        scene.ask_from(1, request(0));
    }
    // The worker that owns the mqueue does not turn.
    for _ in 0..10 {
        scene.world.advance(10_000);
        scene.world.turn(1);
        scene.world.check().unwrap();
    }
    // provokes: handover_full
    assert_eq!(scene.dropped(DropReason::HandoverFull), 4);
    scene.run(20);
    let shed = scene.dropped(DropReason::NoCredit);
    assert_eq!(scene.replied() + shed, 256);
    assert!(scene.replied() >= 4, "four slots");
}

#[test]
fn messages_waiting_for_credit_are_dropped_by_a_drain() {
    let mut scene = stuck(Framing::LengthU16).play();
    let caller = scene.connect();
    for sequence in 0..5 {
        scene.call(caller, request(sequence));
    }
    scene.run(5);
    assert_eq!(scene.world.in_flight(0), 4);
    scene.world.begin_drain();
    scene.run(5);
    // provokes: draining
    assert_eq!(scene.dropped(DropReason::Draining), 1);
    assert!(!scene.world.all_settled());
    scene.world.finish();
    scene.world.check_finished().unwrap();
    // provokes: drain_timeout
    assert_eq!(scene.dropped(DropReason::DrainTimeout), 4);
}

#[test]
fn replies_with_wrong_tokens_are_dropped() {
    let mut script = script(Framing::LengthU16);
    script.service().mqueues = 2;
    *script.behaviour() =
        Behaviour { twice: 1000, forge: 1000, steal: 1000, ..Behaviour::default() };
    let mut scene = script.play();
    for _ in 0..4 {
        scene.ask(request(0));
        scene.run(5);
    }
    // provokes: stale_token
    // A second reply and a forged one each; from the second on, one to another mqueue's token.
    assert_eq!((scene.dropped(DropReason::StaleToken), scene.replied()), (4 + 4 + 3, 4));
}

#[test]
fn a_reply_after_its_time_is_stale() {
    let mut script = script(Framing::LengthU16);
    script.service().request_timeout_ms = 5;
    *script.behaviour() = Behaviour { late: 1000, late_ns: 10 * MS, ..Behaviour::default() };
    let mut scene = script.play();
    scene.ask(request(0));
    scene.wait_ms(12);
    // provokes: request_timeout, stale_token
    assert_eq!(scene.dropped(DropReason::RequestTimeout), 1);
    assert_eq!(scene.dropped(DropReason::StaleToken), 1);
}

#[test]
fn impossible_messages_of_a_kernel_are_skipped() {
    for rings in [engine::topology::Rings::Doorbell, engine::topology::Rings::Granule8] {
        let mut script = script(Framing::LengthU16);
        script.service().rings = rings;
        *script.behaviour() =
            Behaviour { bad_kind: 1000, bad_header: 1000, ..Behaviour::default() };
        let mut scene = script.play();
        for _ in 0..20 {
            scene.ask(request(0));
            scene.run(3);
        }
        // provokes: bad_message
        assert_eq!((scene.dropped(DropReason::BadMessage), scene.replied()), (40, 20), "{rings:?}");
    }
}

#[test]
fn a_service_without_replies_has_none() {
    let mut script = script(Framing::LengthU16);
    script.service().replies = Replies::None;
    script.behaviour().unwanted = 1000;
    let mut scene = script.play();
    scene.ask(request(0));
    scene.ask(Body { ask: Ask::Reject, ..request(0) });
    scene.run(5);
    // provokes: unwanted_reply, consumed_drop
    assert_eq!(scene.dropped(DropReason::UnwantedReply), 1);
    assert_eq!(scene.dropped(DropReason::ConsumedDrop), 1);
    assert_eq!(scene.world.metrics.service(0).consumed, 2);
}

#[test]
fn a_late_answer_of_a_backend_is_passed_over() {
    let backend_behaviour =
        BackendBehaviour { late: 1000, late_ns: 150 * MS, ..BackendBehaviour::SOUND };
    let mut scene = asking(Transport::Tcp, backend_behaviour);
    scene.ask(question(0));
    scene.wait_ms(140);
    assert_eq!(scene.world.metrics.service(0).backend_timeouts, 1);
    assert_eq!(scene.replied(), 1, "the kernel replies without it");
    scene.wait_ms(20);
    // provokes: backend_late
    assert_eq!(scene.dropped(DropReason::BackendLate), 1);
    // The stream is in sync again.
    scene.backend.as_mut().unwrap().behaviour = BackendBehaviour::SOUND;
    scene.ask(question(0));
    scene.wait_ms(5);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.backend_answered, counted.backend_timeouts), (2, 1));
}

#[test]
fn a_backend_that_talks_nonsense_is_cut_off() {
    let mut script = script(Framing::LengthU16);
    script.backend(Transport::Tcp).framing = Framing::Memcached;
    script.setup.honest_backends = vec![false];
    script.backend_behaviour = BackendBehaviour { garbage: 1000, ..BackendBehaviour::SOUND };
    let mut scene = script.play();
    scene.ask(question(0));
    scene.wait_ms(5);
    // provokes: backend_protocol
    assert_eq!((scene.dropped(DropReason::BackendProtocol), scene.replied()), (1, 1));
}

#[test]
fn an_unsolicited_answer_ends_the_connection() {
    let backend_behaviour = BackendBehaviour { unasked: 1000, ..BackendBehaviour::SOUND };
    let mut scene = asking(Transport::Tcp, backend_behaviour);
    scene.ask(question(0));
    scene.wait_ms(5);
    // provokes: backend_unasked
    assert_eq!(scene.dropped(DropReason::BackendUnasked), 1);
    assert_eq!(scene.replied(), 1);
}

/// Several requests on one connection of a backend that answers twice, or sends earlier answers.
#[test]
fn an_answer_to_another_key_ends_the_connection() {
    let twice = BackendBehaviour { unasked: 1000, ..BackendBehaviour::SOUND };
    let swap = BackendBehaviour { swap: 1000, ..BackendBehaviour::SOUND };
    for (framing, backend_behaviour) in [
        (Framing::Memcached, twice),
        (Framing::Memcached, swap),
        (Framing::LengthU16, twice),
        (Framing::LengthU16, swap),
    ] {
        let mut script = script(Framing::LengthU16);
        script.service().mqueues = 4;
        let backend = script.backend(Transport::Tcp);
        (backend.framing, backend.matching) = (framing, match_id(framing));
        script.setup.honest_backends = vec![false];
        script.backend_behaviour = BackendBehaviour { delay_ns: (MS, MS), ..backend_behaviour };
        let mut scene = script.play();
        scene.ask_times(4, question(0));
        scene.wait_ms(5);
        // provokes: backend_mismatch
        assert_eq!(scene.dropped(DropReason::BackendMismatch), 1, "{backend_behaviour:?}");
        let counted = scene.world.metrics.service(0);
        assert_eq!((counted.replied, counted.backend_failures), (4, 1), "{backend_behaviour:?}");
        // On a new connection everything is right again.
        scene.backend.as_mut().unwrap().behaviour = BackendBehaviour::SOUND;
        scene.ask_times(4, question(1));
        scene.wait_ms(5);
        let counted = scene.world.metrics.service(0);
        assert_eq!((counted.replied, counted.backend_failures), (8, 1), "{backend_behaviour:?}");
    }
}

/// Several requests of one block are in flight on one socket, and some of their answers arrive after the next requests.
#[test]
fn datagrams_find_their_questions_by_the_id() {
    let mut script = script(Framing::LengthU16);
    let backend = script.backend(Transport::Udp);
    (backend.matching, backend.timeout_ms) = (match_id(backend.framing), 20);
    script.setup.honest_backends = vec![false];
    script.behaviour().overlap = 100;
    let late =
        BackendBehaviour { late: 1000, late_ns: 25 * MS, unasked: 1000, ..BackendBehaviour::SOUND };
    script.backend_behaviour = late;
    let mut scene = script.play();
    scene.ask_times(4, question(0));
    scene.wait_ms(22);
    assert_eq!(scene.world.metrics.service(0).backend_timeouts, 4, "all were in flight together");
    scene.backend.as_mut().unwrap().behaviour = BackendBehaviour { late_ns: 10 * MS, ..late };
    scene.ask_times(4, question(1));
    scene.wait_ms(15);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.replied, counted.backend_answered, counted.backend_timeouts), (8, 8, 4));
    // Eight late ones while four were waited for, and the second of each of those four.
    let useless = scene.dropped(DropReason::BackendMismatch);
    assert_eq!(useless + scene.dropped(DropReason::BackendUnasked), 12);
    assert!(useless >= 8, "{useless}");
}

#[test]
fn an_answer_that_is_too_long_is_reported() {
    let backend_behaviour = BackendBehaviour { too_long: 1000, ..BackendBehaviour::SOUND };
    for transport in [Transport::Tcp, Transport::Udp] {
        let mut scene = asking(transport, backend_behaviour);
        scene.ask(question(0));
        scene.wait_ms(5);
        // provokes: backend_too_long
        assert_eq!(scene.dropped(DropReason::BackendTooLong), 1, "{transport:?}");
        assert_eq!(scene.replied(), 1);
    }
}

#[test]
fn a_backend_that_answered_is_reconnected_at_once() {
    let backend_behaviour = BackendBehaviour { too_long: 1000, ..BackendBehaviour::SOUND };
    let mut scene = asking(Transport::Tcp, backend_behaviour);
    let ask = |scene: &mut Scene| {
        scene.ask(question(0));
        // Less than the shortest back-off.
        scene.wait_ms(5);
        let counted = scene.world.metrics.service(0);
        (counted.backend_sent, counted.backend_failures, counted.replied)
    };
    assert_eq!(ask(&mut scene), (1, 1, 1));
    assert_eq!(ask(&mut scene), (2, 2, 2), "it was reachable, and its answer too long again");
    scene.backend.as_mut().unwrap().behaviour = BackendBehaviour::SOUND;
    assert_eq!(ask(&mut scene), (3, 2, 3));
    // While no request waits for it.
    scene.backend.as_mut().unwrap().hang_up(&mut lock(&scene.world.net));
    scene.run(3);
    assert_eq!(ask(&mut scene), (4, 3, 4));
}

#[test]
fn a_backend_that_accepts_and_hangs_up_is_retried_with_back_off() {
    let backend_behaviour = BackendBehaviour { close: 1000, ..BackendBehaviour::SOUND };
    let mut scene = asking(Transport::Tcp, backend_behaviour);
    for _ in 0..200 {
        scene.ask(question(0));
        scene.wait_ms(1);
    }
    let counted = scene.world.metrics.service(0);
    assert_eq!(counted.replied, 200);
    // After 10, 20, 40 and 80 ms.
    assert!((2..=6).contains(&counted.backend_sent), "{}", counted.backend_sent);
}

#[test]
fn requests_to_a_backend_wait_until_their_answers_have_room() {
    // One read would bring eight answers of nearly 2048 bytes; the arena holds four of 2048.
    let mut script = script(Framing::LengthU16);
    script.service().slots = 8;
    script.service().arena_bytes = 1;
    script.behaviour().overlap = 8;
    script.backend(Transport::Tcp);
    script.behaviour().long_questions = true;
    let mut scene = script.play();
    scene.ask_times(8, question(0));
    scene.run(60);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.backend_sent, counted.backend_answered, counted.replied), (8, 8, 8));
    assert_eq!(counted.drops.iter().sum::<u64>(), 0, "{counted:?}");
}

#[test]
fn the_host_kernels_losses_are_counted() {
    let mut scene = script(Framing::LengthU16).play();
    scene.faults(Faults { socket_datagrams: 3, ..Faults::default() });
    scene.ask_times(5, request(0));
    scene.run(5);
    // provokes: socket_overflow
    assert_eq!((scene.dropped(DropReason::SocketOverflow), scene.replied()), (2, 3));
    scene.faults(Faults { truncate: 1000, ..Faults::default() });
    scene.ask(request(0));
    scene.run(5);
    // provokes: truncated
    assert_eq!((scene.dropped(DropReason::Truncated), scene.replied()), (1, 3));
}

#[test]
fn datagrams_from_ports_of_the_server_get_no_answer() {
    for (ip, own, others) in [
        ([127, 0, 0, 1], ["127.0.0.1:9000", "127.0.0.1:9001"], ["127.0.0.2:9000", "10.0.0.1:9000"]),
        ([0, 0, 0, 0], ["127.0.0.1:9000", "10.0.0.2:9001"], ["10.0.0.4:9000", "10.0.0.2:9002"]),
    ] {
        let mut script = script(Framing::Raw);
        script.another_service(Transport::Udp);
        for service in &mut script.setup.topology.services {
            service.listen.iter_mut().for_each(|listen| listen.address.set_ip(ip.into()));
        }
        let mut scene = script.play();
        for peer in own.iter().chain(&others) {
            let local = [127, 0, 0, 1].into();
            lock(&scene.world.net).send_datagram(peer.parse().unwrap(), UDP, local, b"forged");
        }
        scene.run(5);
        // provokes: looped_source
        assert_eq!(scene.dropped(DropReason::LoopedSource), 2, "{ip:?}");
        let counted = scene.world.metrics.service(0);
        assert_eq!(counted.received, 2, "{ip:?}: datagrams from other ports are requests");
    }
}

#[test]
fn source_ports_below_1024_are_served_on_loopback_or_where_the_limits_say_so() {
    for (ip, asked, served) in [
        ([127, 0, 0, 1], None, 1),
        ([192, 0, 2, 1], None, 0),
        ([192, 0, 2, 1], Some(true), 1),
        ([127, 0, 0, 1], Some(false), 0),
    ] {
        let mut script = script(Framing::Raw);
        script.limits().udp_privileged_sources = asked;
        script.service().listen.iter_mut().for_each(|listen| listen.address.set_ip(ip.into()));
        let mut scene = script.play();
        let peer = "198.51.100.1:53".parse().unwrap();
        lock(&scene.world.net).send_datagram(peer, UDP, ip.into(), b"question");
        scene.run(5);
        // provokes: privileged_source
        assert_eq!(scene.dropped(DropReason::PrivilegedSource), 1 - served, "{ip:?} {asked:?}");
        assert_eq!(scene.world.metrics.service(0).received, served, "{ip:?} {asked:?}");
    }
}

#[test]
fn a_stream_that_breaks_the_framing_is_closed() {
    let mut scene = script(Framing::Sockperf).play();
    let caller = scene.connect();
    scene.say(caller, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 3, 0, 0, 0, 5]);
    scene.run(5);
    assert_eq!(scene.read(caller), PeerRead::Closed);
    // provokes: bad_framing
    assert_eq!(scene.dropped(DropReason::BadFraming), 1);
}

#[test]
fn a_refused_command_leaves_the_stream_open() {
    let mut scene = script(Framing::Memcached).play();
    let caller = scene.connect();
    scene.say(caller, b"bogus\r\n");
    scene.run(5);
    assert_eq!(scene.read(caller), PeerRead::Bytes(b"ERROR\r\n".to_vec()));
    assert_eq!(scene.read(caller), PeerRead::Empty);
    // provokes: bad_framing
    assert_eq!(scene.dropped(DropReason::BadFraming), 1);
}

#[test]
fn connections_are_limited() {
    let mut script = script(Framing::LengthU16);
    script.limits().connections = 2;
    let mut scene = script.play();
    let callers = [scene.connect(), scene.connect(), scene.connect()];
    scene.run(5);
    // provokes: connection_limit
    assert_eq!(scene.dropped(DropReason::ConnectionLimit), 1);
    assert_eq!(scene.read(callers[2]), PeerRead::Broken);
    // A free place is given to the next connection.
    lock(&scene.world.net).peer_close(callers[0].conn, Close::Graceful);
    scene.run(5);
    let late = scene.connect();
    scene.call(late, request(0));
    scene.run(5);
    assert_eq!((scene.dropped(DropReason::ConnectionLimit), scene.replied()), (1, 1));
}

/// Where the framing has no error replies, a service may have one: the connection goes on, and the replies keep their order.
#[test]
fn a_lost_request_gets_the_error_reply_of_its_service() {
    for framing in [Framing::LengthU16, Framing::LengthU32, Framing::Line, Framing::LineCrLf] {
        // Of two clients, the first ends its lines in LF alone, which the simulator sees at the same place of each line.
        for error in [b"no answer, sorry 1", b"no answer, sorry 2"] {
            let mut script = script(framing);
            script.service().error_reply = error.to_vec();
            let mut scene = script.play();
            let (first, second) = (scene.connect(), scene.connect());
            let caller = if error.ends_with(b"1") { first } else { second };
            let asks = [Ask::Answer, Ask::Reject, Ask::Answer];
            let mut expected = Vec::new();
            for (sequence, ask) in (0..).zip(asks) {
                let body = scene.call(caller, Body { ask, ..request(sequence) });
                let wire = request_wire(framing, &request_payload(framing, &body, Flavor::Plain));
                let reply = match ask {
                    Ask::Reject => error.to_vec(),
                    _ => reply_payload(framing, &body.reply(), Flavor::Plain),
                };
                let written = framing.as_client_writes(wire.ends_with(b"\r\n"));
                written.encode_reply(&reply, &mut expected).unwrap();
            }
            scene.run(10);
            assert_eq!(scene.hear(caller), expected, "{framing}");
            assert_eq!(scene.read(caller), PeerRead::Empty, "the connection goes on");
            assert_eq!(scene.dropped(DropReason::KernelDrop), 1, "{framing}");
            assert_eq!(scene.dropped(DropReason::ClientGone), 0, "{framing}");
        }
    }
    // A stream that cannot be understood any further ends behind it.
    let mut script = script(Framing::LengthU16);
    script.service().error_reply = vec![7];
    let mut scene = script.play();
    let caller = scene.connect();
    scene.say(caller, &[0xff, 0xff]);
    scene.run(5);
    assert_eq!(scene.hear(caller), [0, 1, 7]);
    assert_eq!(scene.read(caller), PeerRead::Closed);
    assert_eq!(scene.dropped(DropReason::TooLong), 1);
}

/// A service may have a time-out of its own, longer or shorter than that of the engine.
#[test]
fn a_silent_connection_is_closed_after_the_time_of_its_service() {
    for (own_ms, closes) in [(20, true), (500, false)] {
        let mut script = script(Framing::LengthU16);
        script.limits().idle_ms = if closes { 60_000 } else { 20 };
        script.another_service(Transport::Tcp);
        script.service().idle_ms = Some(own_ms);
        let mut scene = script.play();
        let caller = scene.connect();
        let peer = scene.client_of(0, 2);
        lock(&scene.world.net).connect(peer, 2);
        scene.call(caller, request(0));
        scene.wait_ms(100);
        scene.hear(caller);
        assert_eq!(scene.dropped(DropReason::IdleTimeout), u64::from(closes), "{own_ms}");
        let others = scene.world.dropped(1, DropReason::IdleTimeout);
        assert_eq!(others, u64::from(!closes), "{own_ms}");
        let expected = if closes { PeerRead::Closed } else { PeerRead::Empty };
        assert_eq!(scene.read(caller), expected, "{own_ms}");
    }
}

#[test]
fn a_silent_connection_is_closed() {
    let mut script = script(Framing::LengthU16);
    script.limits().idle_ms = 20;
    let mut scene = script.play();
    let caller = scene.connect();
    scene.call(caller, request(0));
    scene.wait_ms(15);
    scene.hear(caller);
    assert_eq!(scene.dropped(DropReason::IdleTimeout), 0);
    scene.wait_ms(10);
    // provokes: idle_timeout
    assert_eq!(scene.dropped(DropReason::IdleTimeout), 1);
    assert_eq!(scene.read(caller), PeerRead::Closed);
}
