//! A chain of functions on the path of a service's messages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::scene::{Scene, request, script};
use builtins::{Deliver, Threshold};
use engine::metrics::ServiceMetrics;
use engine::topology::{Dispatch, Replies, Tenant};
use engine::{ChainReply, ChainRequest, ShmClient, ShmPeer};
use mqueue::abi::kind;
use mqueue::memory::Ordering as Order;
use mqueue::{Head, HeapMapping, MappedMemory, Memory, Region};
use onpath::{
    Arranged, Command, Counters, Direction, Failure, Function, Link, Messages, OnFailure, Policy,
    Reading, RequestId, SharedSink, Sink,
};
use sim::behaviour::Behaviour;
use sim::message::{Body, Flavor, decode_request, reply_payload, request_payload};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

const FRAMING: Framing = Framing::LengthU16;

/// Decides by the request's sequence number; counts what it sees.
#[derive(Clone, Default)]
struct Decides {
    /// Requests up to this one pass...
    passes: u32,
    /// ... the next ones up to this are dropped; others are answered.
    drops: u32,
    steers: Option<u32>,
    /// Replies are dropped.
    drops_replies: bool,
    batches: Arc<AtomicU64>,
    requests: Arc<AtomicU64>,
    replies: Arc<AtomicU64>,
}

impl Function for Decides {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        self.batches.fetch_add(1, Ordering::Relaxed);
        for index in 0..messages.len() {
            if messages.is_open(index) {
                match direction {
                    Direction::Requests => self.request(messages, index),
                    Direction::Replies => self.reply(messages, index),
                }
            }
        }
        Ok(())
    }
}

impl Decides {
    fn request(&self, messages: &mut Messages, index: usize) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let decoded = decode_request(FRAMING, messages.bytes(index));
        let (body, flavor) = decoded.expect("clients are sound");
        if let Some(mqueue) = self.steers {
            return messages.steer(index, mqueue);
        }
        match body.sequence {
            sequence if sequence < self.passes => {}
            sequence if sequence < self.drops => messages.drop(index, DropReason::BadLength),
            _ => messages.reply(index, &reply_payload(FRAMING, &body.reply(), flavor)),
        }
    }

    fn reply(&self, messages: &mut Messages, index: usize) {
        self.replies.fetch_add(1, Ordering::Relaxed);
        if self.drops_replies {
            // No reason why a request ends.
            return messages.drop(index, DropReason::BadMessage);
        }
        // The same bytes, as if they were others.
        let bytes = messages.bytes(index).to_vec();
        messages.rewrite(index, &bytes);
    }

    fn seen(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.replies.load(Ordering::Relaxed))
    }

    fn attach(&self, scene: &mut Scene) {
        for worker in 0..scene.world.workers.len() {
            let function = Box::new(self.clone());
            scene.world.set_functions(worker, 0, vec![(function, OnFailure::Closed)]);
        }
        scene.run(1);
    }
}

fn ask(scene: &mut Scene, body: Body) {
    scene.ask(body);
    let caller = scene.connect();
    scene.call(caller, body);
    scene.run(20);
}

#[test]
fn a_request_passes_is_dropped_or_is_answered() {
    let mut scene = script(FRAMING).play();
    ask(&mut scene, request(0));
    assert_eq!(scene.replied(), 2, "without a chain");
    let chain = Decides { passes: 1, drops: 2, ..Decides::default() };
    chain.attach(&mut scene);
    ask(&mut scene, request(0));
    assert_eq!((scene.replied(), chain.seen()), (4, (2, 2)));
    ask(&mut scene, request(1));
    assert_eq!((scene.replied(), scene.dropped(DropReason::BadLength)), (4, 2));
    let accepted = scene.world.metrics.service(0).accepted;
    ask(&mut scene, request(2));
    assert_eq!((scene.replied(), chain.seen()), (6, (6, 2)));
    assert_eq!(scene.world.metrics.service(0).accepted, accepted, "no block saw them");
    scene.world.set_functions(0, 0, Vec::new());
    scene.run(1);
    ask(&mut scene, request(1));
    assert_eq!((scene.replied(), chain.seen()), (8, (6, 2)), "it was detached while it ran");
    scene.world.check().unwrap();
}

#[test]
fn a_reply_may_be_dropped() {
    let mut scene = script(FRAMING).play();
    let chain = Decides { passes: 9, drops_replies: true, ..Decides::default() };
    chain.attach(&mut scene);
    ask(&mut scene, request(0));
    assert_eq!((scene.replied(), scene.dropped(DropReason::FunctionDrop)), (0, 2));
    assert_eq!((scene.world.in_flight(0), chain.seen()), (0, (2, 2)));
}

#[test]
fn what_another_worker_takes_over_is_seen_once() {
    let mut script = script(FRAMING);
    script.setup.topology.engine.workers = 2;
    script.service().mqueues = 2;
    script.service().dispatch = Dispatch::RoundRobin;
    let mut scene = script.play();
    // The second mqueue is the second worker's.
    let chain = Decides { steers: Some(1), ..Decides::default() };
    chain.attach(&mut scene);
    scene.ask_from(0, request(0));
    let caller = scene.connect_to(0);
    scene.call(caller, request(0));
    scene.run(50);
    assert_eq!((scene.replied(), chain.seen()), (2, (2, 2)));
    assert_eq!(scene.world.metrics.service(0).handed_in, 2);
    // There is no such mqueue.
    let lost = Decides { steers: Some(2), ..Decides::default() };
    lost.attach(&mut scene);
    scene.ask_from(0, request(1));
    scene.run(20);
    assert_eq!(scene.dropped(DropReason::MqueueDead), 1);
}

#[test]
fn a_request_that_waits_for_credit_is_seen_once() {
    let mut script = script(FRAMING);
    let late = (2 * crate::scene::MS, 2 * crate::scene::MS);
    *script.behaviour() = Behaviour { remote: true, delay_ns: late, ..Behaviour::default() };
    let mut scene = script.play();
    let chain = Decides { passes: 100, ..Decides::default() };
    chain.attach(&mut scene);
    let caller = scene.connect();
    // There are four slots.
    for sequence in 0..12 {
        scene.call(caller, request(sequence));
    }
    scene.wait_ms(60);
    assert_eq!((scene.replied(), chain.seen()), (12, (12, 12)));
}

/// Gives every request this many bytes of filler, and steers it to an mqueue.
struct Resizes(u32, Option<u32>);

impl Function for Resizes {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        for index in 0..messages.len() {
            if direction == Direction::Requests {
                let (body, flavor) = decode_request(FRAMING, messages.bytes(index)).unwrap();
                let body = Body { filler: self.0, ..body };
                messages.rewrite(index, &request_payload(FRAMING, &body, flavor));
                self.1.into_iter().for_each(|mqueue| messages.steer(index, mqueue));
            }
        }
        Ok(())
    }
}

#[test]
fn a_function_does_not_change_how_long_a_reply_may_be() {
    // Requests and replies have 28 bytes before the filler.
    const FILLER: u32 = 72;
    for (of_function, of_client) in [(FILLER, 0), (0, FILLER)] {
        for is_proxy in [false, true] {
            let mut script = script(FRAMING);
            script.limits().udp_reply_ratio = Some(3);
            // Kernels get other requests than clients have sent.
            script.behaviour().scribble_after = Some(u64::MAX);
            script.setup.topology.engine.workers = 2;
            script.service().mqueues = 2;
            script.service().dispatch = Dispatch::RoundRobin;
            if is_proxy {
                script.upstream(Transport::Udp);
            }
            let mut scene = script.play();
            let (mut replied, mut dropped) = (0, 0);
            // By the worker that received it, and by another one.
            for steers in if is_proxy { vec![None] } else { vec![None, Some(0), Some(1)] } {
                let resizes = Box::new(Resizes(of_function, steers));
                scene.world.set_functions(0, 0, vec![(resizes, OnFailure::Closed)]);
                scene.run(1);
                let longest = 3 * (28 + of_client) - 28;
                for want in [longest, longest + 1] {
                    scene.ask(Body { want, filler: of_client, ..request(0) });
                    scene.run(100);
                }
                (replied, dropped) = (replied + 1, dropped + 1);
                assert_eq!(
                    (scene.replied(), scene.dropped(DropReason::ReplyRatio)),
                    (replied, dropped)
                );
            }
        }
    }
}

/// Passes one request in 16, drops one in four, and answers the others.
struct Mixes;

impl Function for Mixes {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        for index in 0..messages.len() {
            if direction == Direction::Requests {
                let (body, flavor) = decode_request(FRAMING, messages.bytes(index)).unwrap();
                match body.sequence % 16 {
                    2 => {}
                    1 | 5 | 9 | 13 => messages.drop(index, DropReason::BadLength),
                    _ => messages.reply(index, &reply_payload(FRAMING, &body.reply(), flavor)),
                }
            }
        }
        Ok(())
    }
}

#[test]
fn datagrams_of_one_batch_have_every_outcome() {
    let mut script = script(FRAMING);
    script.limits().udp_reply_ratio = Some(3);
    let mut scene = script.play();
    scene.world.set_functions(0, 0, vec![(Box::new(Mixes), OnFailure::Closed)]);
    scene.run(1);
    for sequence in 0..48 {
        // Answers of several lengths; one in four is longer than three requests.
        let want = if sequence % 4 == 3 { 3 * 28 - 28 + 1 } else { sequence / 6 % 3 };
        scene.ask(Body { want, ..request(sequence) });
    }
    scene.run(100);
    let dropped = [DropReason::BadLength, DropReason::ReplyRatio].map(|why| scene.dropped(why));
    assert_eq!((scene.replied(), dropped), (24, [12, 12]));
    assert_eq!(scene.world.in_flight(0), 0);
    scene.world.check().unwrap();
}

/// Answers every request, and compares the counters when it sees one.
struct Audits {
    metrics: Arc<ServiceMetrics>,
    seen: Arc<AtomicU64>,
    /// Times that more requests had ended than were received.
    wrong: Arc<AtomicU64>,
}

impl Function for Audits {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        let counted = self.metrics.snapshot();
        let ended = counted.replied + counted.consumed + counted.dropped_requests();
        self.wrong.fetch_add(u64::from(ended > counted.received), Ordering::Relaxed);
        for index in 0..messages.len() {
            if direction == Direction::Requests {
                self.seen.fetch_add(1, Ordering::Relaxed);
                messages.reply(index, b"");
            }
        }
        Ok(())
    }
}

#[test]
fn what_a_chain_answers_is_received_before_it_ends() {
    let mut script = script(FRAMING);
    script.service().replies = Replies::None;
    let mut scene = script.play();
    let (seen, wrong) = (Arc::default(), Arc::default());
    let metrics = scene.world.metrics.services()[0].clone();
    let audits = Audits { metrics, seen: Arc::clone(&seen), wrong: Arc::clone(&wrong) };
    scene.world.set_functions(0, 0, vec![(Box::new(audits), OnFailure::Closed)]);
    scene.run(1);
    scene.ask_often(16, request(0));
    let caller = scene.connect();
    for sequence in 0..16 {
        scene.call(caller, request(sequence));
    }
    scene.run(50);
    assert_eq!(seen.load(Ordering::Relaxed), 32);
    assert_eq!(wrong.load(Ordering::Relaxed), 0, "ended before they were received");
}

/// The engine's handle to a client that polls.
struct Polls;

impl ShmPeer for Polls {
    fn wake(&self) {}
}

/// Replaces bytes wherever they stand in a region.
fn rewrite(memory: &MappedMemory, old: &[u8], new: &[u8]) {
    let words = (0..memory.len_bytes()).step_by(8);
    let load = |at| memory.load(at, Order::Relaxed).to_le_bytes();
    let mut bytes: Vec<u8> = words.clone().flat_map(load).collect();
    let found = bytes.windows(old.len()).position(|window| window == old);
    let at = found.expect("the request is in the region");
    bytes[at..at + new.len()].copy_from_slice(new);
    for (at, word) in words.zip(bytes.chunks(8)) {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        if memory.load(at, Order::Relaxed) != word {
            memory.store(at, word, Order::Relaxed);
        }
    }
}

#[test]
fn a_shared_memory_client_cannot_rewrite_what_the_chain_has_passed() {
    let mut script = script(FRAMING);
    script.service().memory_ports.push("/run/memory".into());
    let late = (2 * crate::scene::MS, 2 * crate::scene::MS);
    *script.behaviour() = Behaviour { remote: true, delay_ns: late, ..Behaviour::default() };
    let mut scene = script.play();
    let chain = Decides { passes: 100, drops: 200, ..Decides::default() };
    chain.attach(&mut scene);
    let plan = scene.world.topology().services[0].client_region_plan(4);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut near = Region::format(memory.clone(), &plan).unwrap();
    let (replies, requests) = near.engine_ends(0);
    let (_, mut ring) = Region::join(memory.clone()).unwrap().accelerator_ends(0);
    let (words, peer) = (near.words(), Box::new(Polls));
    scene.world.attach_shm_client(ShmClient {
        id: 7,
        service: 0,
        depth: 4,
        replies,
        requests,
        words,
        peer,
    });
    // These take the four slots.
    scene.ask_times(4, request(0));
    scene.run(3);
    assert_eq!(scene.world.in_flight(0), 4);
    let payload = |sequence| request_payload(FRAMING, &request(sequence), Flavor::Plain);
    let head = Head { tag: 1, kind: kind::MESSAGE, ..Head::default() };
    ring.push(head, &payload(1)).unwrap();
    ring.publish();
    scene.run(3);
    assert_eq!((scene.world.in_flight(0), chain.seen().0 > 4), (4, true), "it passed, and waits");
    rewrite(&memory, &payload(1), &payload(150));
    scene.wait_ms(10);
    assert_eq!((scene.replied(), scene.dropped(DropReason::BadLength)), (4, 1));
}

#[test]
fn what_one_call_brings_is_one_batch() {
    let mut scene = script(FRAMING).play();
    let chain = Decides::default();
    chain.attach(&mut scene);
    scene.ask_times(4, request(0));
    scene.run(20);
    assert_eq!((scene.replied(), chain.seen()), (4, (4, 0)));
    assert_eq!(chain.batches.load(Ordering::Relaxed), 1, "of datagrams");
    let caller = scene.connect();
    for sequence in 0..4 {
        scene.call(caller, request(sequence));
    }
    scene.run(20);
    assert_eq!((scene.replied(), chain.seen()), (8, (8, 0)));
    let batches = chain.batches.load(Ordering::Relaxed);
    assert!(batches < 5, "{batches} of messages of a stream");
}

/// Its first calls fail.
struct Fails {
    times: u32,
    panics: bool,
}

impl Function for Fails {
    fn decide(&mut self, _: Direction, _: &mut Messages) -> Result<(), Failure> {
        if self.times == 0 {
            return Ok(());
        }
        self.times -= 1;
        assert!(!self.panics, "as the test wants");
        Err(Failure("as the test wants".into()))
    }
}

#[test]
// provokes: function_failed
fn the_message_with_which_a_function_fails_passes_or_is_dropped() {
    for (panics, on_failure) in [(false, OnFailure::Open), (true, OnFailure::Closed)] {
        let open = on_failure == OnFailure::Open;
        let mut scene = script(FRAMING).play();
        let fails = Box::new(Fails { times: 1, panics });
        let counters = scene.world.set_functions(0, 0, vec![(fails, on_failure)]);
        scene.run(1);
        for _ in 0..3 {
            scene.ask(request(0));
            scene.wait_ms(1);
        }
        let dropped = scene.dropped(DropReason::FunctionFailed);
        assert_eq!((scene.replied(), dropped), if open { (3, 0) } else { (2, 1) });
        assert_eq!((counters[0].failures.value(), counters[0].restarts.value()), (1, 1));
        scene.world.check().unwrap();
    }
}

#[test]
// provokes: function_drop
fn the_threshold_drops_what_is_beyond_its_limits() {
    let mut scene = script(FRAMING).play();
    let mut threshold = Box::new(Threshold::default());
    for (register, value) in [(6, 0), (7, u32::MAX)] {
        threshold.write(register, value.into()).unwrap();
    }
    scene.world.set_functions(0, 0, vec![(threshold, OnFailure::Closed)]);
    scene.run(1);
    ask(&mut scene, request(0));
    assert_eq!((scene.replied(), scene.dropped(DropReason::FunctionDrop)), (0, 2));
    let read = scene.world.ask_chain(0, (0, None), ChainRequest::Command(0, Command::Read));
    scene.run(1);
    let Ok(ChainReply::Command(Ok(Reading { values, .. }))) = read.try_recv() else {
        panic!("no values")
    };
    assert_eq!((values[2], values[4]), (2, 2), "count and dropped");
}

#[test]
// provokes: ring_full
fn what_a_function_delivers_without_a_ring_is_dropped() {
    let mut scene = script(FRAMING).play();
    let counters = scene.world.set_functions(0, 0, vec![(Box::new(Deliver), OnFailure::Closed)]);
    scene.run(1);
    ask(&mut scene, request(0));
    assert_eq!((scene.replied(), scene.dropped(DropReason::RingFull)), (0, 2));
    assert_eq!((counters[0].ring_full.value(), counters[0].delivered.value()), (2, 0));
    scene.world.check().unwrap();
}

/// Takes everything.
#[derive(Default)]
struct Takes(Vec<Vec<u8>>);

impl Sink for Takes {
    fn put(&mut self, message: &[u8], _: &RequestId) -> bool {
        self.0.push(message.to_vec());
        true
    }

    fn publish(&mut self) {}
}

#[test]
fn what_is_delivered_is_consumed_whatever_it_came_over_and_connections_go_on() {
    let mut script = script(FRAMING);
    script.service().memory_ports.push("/run/memory".into());
    let mut scene = script.play();
    let taken = Arc::new(Mutex::new(Takes::default()));
    let attach = |scene: &Scene, sink: Option<SharedSink>| {
        let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: 1_000_000_000 };
        let link = Link::new(0, Box::new(Deliver), policy, Arc::<Counters>::default());
        let order = vec![Arranged::New(link.with_sink(sink))];
        scene.world.ask_chain(0, (0, None), ChainRequest::Arrange(order));
    };
    attach(&scene, Some(taken.clone()));
    scene.run(1);
    let caller = scene.connect();
    for sequence in 0..3 {
        scene.call(caller, request(sequence));
        scene.ask(request(10 + sequence));
    }
    scene.run(20);
    let plan = scene.world.topology().services[0].client_region_plan(4);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut near = Region::format(memory.clone(), &plan).unwrap();
    let (replies, requests) = near.engine_ends(0);
    let (mut outcomes, mut ring) = Region::join(memory).unwrap().accelerator_ends(0);
    let (words, peer) = (near.words(), Box::new(Polls));
    let (id, service, depth) = (7, 0, 4);
    let client = ShmClient { id, service, depth, replies, requests, words, peer };
    scene.world.attach_shm_client(client);
    for tag in 0..12 {
        let payload = request_payload(FRAMING, &request(20 + tag as u32), Flavor::Plain);
        ring.push(Head { tag, kind: kind::MESSAGE, ..Head::default() }, &payload).unwrap();
        ring.publish();
        scene.run(3);
        let outcome = outcomes.peek().unwrap().expect("each request has an outcome");
        let reason = DropReason::FunctionDrop.code();
        assert_eq!((outcome.tag, outcome.kind, outcome.status), (tag, kind::DROP, reason));
        outcomes.advance();
        outcomes.release();
    }
    let of = |from: u32, count: u32| -> Vec<u32> {
        let sequence = |bytes: &Vec<u8>| decode_request(FRAMING, bytes).unwrap().0.sequence;
        let all = taken.lock().unwrap().0.iter().map(sequence).collect::<Vec<_>>();
        all.into_iter().filter(|s| (from..from + count).contains(s)).collect()
    };
    assert_eq!(of(0, 3), [0, 1, 2]);
    assert_eq!(of(10, 3), [10, 11, 12]);
    assert_eq!(of(20, 12), (20..32).collect::<Vec<_>>());
    assert_eq!(scene.replied(), 0);
    scene.world.check().unwrap();
    // Without the function the same connection gets a reply: it has gone on.
    scene.world.ask_chain(0, (0, None), ChainRequest::Arrange(Vec::new()));
    scene.run(1);
    scene.call(caller, request(50));
    scene.run(50);
    assert_eq!(scene.replied(), 1);
    scene.world.check().unwrap();
}

/// A limit holds before a function sees the messages: what is dropped or waits for it is not in the application's ring.
#[test]
fn what_is_over_a_limit_is_not_delivered() {
    let mut script = script(FRAMING);
    script.service().memory_ports.push("/run/memory".into());
    script.service().tenant = "slow".into();
    let tenant = Tenant { messages_per_s: 1000, burst_ms: 1, ..Tenant::new("slow") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    let taken = Arc::new(Mutex::new(Takes::default()));
    let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: 1_000_000_000 };
    let link = Link::new(0, Box::new(Deliver), policy, Arc::<Counters>::default());
    let order = vec![Arranged::New(link.with_sink(Some(taken.clone())))];
    scene.world.ask_chain(0, (0, None), ChainRequest::Arrange(order));
    let plan = scene.world.topology().services[0].client_region_plan(4);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut near = Region::format(memory.clone(), &plan).unwrap();
    let (replies, requests) = near.engine_ends(0);
    let (_outcomes, mut ring) = Region::join(memory).unwrap().accelerator_ends(0);
    let (words, peer) = (near.words(), Box::new(Polls));
    let (id, service, depth) = (7, 0, 4);
    let client = ShmClient { id, service, depth, replies, requests, words, peer };
    scene.world.attach_shm_client(client);
    let caller = scene.connect();
    scene.run(5);
    let delivered = || taken.lock().unwrap().0.len();
    // These come in one turn, and use up 20 ms.
    scene.ask_often(20, request(0));
    scene.run(2);
    assert_eq!(delivered(), 20);
    scene.ask_often(5, request(0));
    for sequence in 0..3 {
        scene.call(caller, request(sequence));
        let payload = request_payload(FRAMING, &request(sequence), Flavor::Plain);
        let head = Head { tag: sequence.into(), kind: kind::MESSAGE, ..Head::default() };
        ring.push(head, &payload).unwrap();
    }
    ring.publish();
    scene.run(100);
    assert_eq!((delivered(), scene.dropped(DropReason::TenantRate)), (20, 5));
    scene.wait_ms(60);
    assert_eq!((delivered(), scene.dropped(DropReason::TenantRate)), (26, 5));
    scene.world.check().unwrap();
}
