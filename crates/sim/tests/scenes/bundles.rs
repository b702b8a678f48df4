//! Bundles of clients over shared memory and over streams.

use crate::scene::{MS, Scene, Script, request, script};
use engine::topology::Bundles;
use engine::{ShmClient, ShmPeer};
use mqueue::abi::kind;
use mqueue::memory::Ordering;
use mqueue::{Consumer, Head, HeapMapping, MappedMemory, Memory, Producer, Region};
use sim::behaviour::Behaviour;
use sim::message::{
    Ask, Body, Flavor, decode_reply, reply_payload, request_filler_max, request_payload,
    request_wire,
};
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;

const FRAMING: Framing = Framing::LengthU16;

/// One block that answers after a while, and gets bundles.
fn bundles(framing: Framing) -> Script {
    let mut script = script(framing);
    script.service().memory_ports.push("/run/memory".into());
    script.service().bundles = Bundles::Always;
    script.service().slots = 64;
    let later = (2 * MS, 2 * MS);
    *script.behaviour() =
        Behaviour { remote: true, delay_ns: later, overlap: 64, ..Behaviour::default() };
    script
}

fn counter(scene: &Scene, name: &str) -> u64 {
    let named = scene.world.metrics.service(0).named();
    named.into_iter().find(|(of, ..)| *of == name).expect("it exists").2
}

/// Every buffer has come back.
fn assert_at_rest(scene: &mut Scene) {
    scene.wait_ms(20);
    scene.world.check_quiet().unwrap();
}

/// The engine's handle to a client that polls.
struct Polls;

impl ShmPeer for Polls {
    fn wake(&self) {}
}

struct Client {
    memory: MappedMemory,
    requests: Producer<MappedMemory>,
    replies: Consumer<MappedMemory>,
}

impl Client {
    fn attach(scene: &mut Scene, depth: u32) -> Self {
        let plan = scene.world.topology().services[0].client_region_plan(depth);
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        let mut near = Region::format(memory.clone(), &plan).unwrap();
        let (replies, requests) = near.engine_ends(0);
        let (words, peer) = (near.words(), Box::new(Polls));
        let depth = plan.rings[0].depth;
        let client = ShmClient { id: 7, service: 0, depth, replies, requests, words, peer };
        scene.world.attach_shm_client(client);
        let (replies, requests) = Region::join(memory.clone()).unwrap().accelerator_ends(0);
        Self { memory, requests, replies }
    }

    fn ask(&mut self, scene: &mut Scene, tag: u64, body: &Body) {
        lock(&scene.world.net).ledger.ask(0, *body, None);
        let head = Head { tag, kind: kind::MESSAGE, ..Head::default() };
        self.requests.push(head, &request_payload(FRAMING, body, Flavor::Plain)).unwrap();
        self.requests.publish();
    }

    /// Tags and replies that have come, or why there is none.
    fn hear(&mut self) -> Vec<(u64, Result<Body, u8>)> {
        let mut heard = Vec::new();
        while let Some(header) = self.replies.peek().unwrap() {
            let mut bytes = vec![0; header.len as usize];
            assert!(self.replies.copy_out(&header, &mut bytes));
            self.replies.advance();
            let reply = decode_reply(FRAMING, &bytes);
            let dropped = header.kind != kind::MESSAGE;
            heard.push((header.tag, if dropped { Err(header.status) } else { Ok(reply.unwrap()) }));
        }
        self.replies.release();
        heard
    }
}

/// The tag of a request: in no order.
fn tag(sequence: u32) -> u64 {
    u64::from(sequence).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[test]
fn requests_of_a_shared_memory_client_go_as_bundles_and_each_gets_its_own_reply() {
    let mut scene = bundles(FRAMING).play();
    let mut client = Client::attach(&mut scene, 64);
    // The first of all messages is sampled, so it is a single one. The sixth has another length, the third is dropped.
    let body = |sequence| Body {
        filler: if sequence == 5 { 20 } else { 8 },
        ask: if sequence == 2 { Ask::Reject } else { Ask::Answer },
        ..request(sequence)
    };
    (0..40).for_each(|sequence| client.ask(&mut scene, tag(sequence), &body(sequence)));
    scene.run(3);
    assert_eq!(scene.world.in_flight(0), 40);
    assert!(counter(&scene, "bundles") >= 2);
    assert!(counter(&scene, "bundled") >= 30);
    scene.wait_ms(10);
    let mut heard = client.hear();
    heard.sort_by_key(|(tag, _)| *tag);
    let mut expected: Vec<_> = (0..40)
        .map(|sequence| {
            let rejected = DropReason::KernelDrop.code();
            let reply = if sequence == 2 { Err(rejected) } else { Ok(body(sequence).reply()) };
            (tag(sequence), reply)
        })
        .collect();
    expected.sort_by_key(|(tag, _)| *tag);
    assert_eq!(heard, expected);
    assert_eq!((scene.replied(), scene.dropped(DropReason::KernelDrop)), (39, 1));
    assert_at_rest(&mut scene);
}

#[test]
fn a_client_that_leaves_a_bundle_in_flight_takes_no_buffer_along() {
    for corrupt in [false, true] {
        let mut scene = bundles(FRAMING).play();
        let mut client = Client::attach(&mut scene, 64);
        (0..40).for_each(|sequence| client.ask(&mut scene, tag(sequence), &request(sequence)));
        scene.run(3);
        assert_eq!(scene.world.in_flight(0), 40);
        assert!(counter(&scene, "bundles") > 0);
        match corrupt {
            false => scene.world.detach_shm_client(7),
            // Its ring looks full, and more than that: replies find an impossible tail.
            true => {
                let words = (0..client.memory.len_bytes()).step_by(8);
                words.for_each(|at| client.memory.store(at, u64::MAX, Ordering::Relaxed));
            }
        }
        scene.wait_ms(10);
        assert_eq!(scene.replied() + scene.dropped(DropReason::ClientGone), 40);
        assert!(corrupt || scene.replied() == 0);
        // The next client has its place in the table.
        let mut next = Client::attach(&mut scene, 64);
        (40..60).for_each(|sequence| next.ask(&mut scene, tag(sequence), &request(sequence)));
        scene.wait_ms(10);
        assert_eq!(next.hear().len(), 20);
        assert_at_rest(&mut scene);
    }
}

#[test]
fn a_bundle_that_a_block_never_answers_times_out_message_by_message() {
    let mut script = bundles(FRAMING);
    script.service().request_timeout_ms = 5;
    script.behaviour().stall_after = Some(4);
    let mut scene = script.play();
    let mut client = Client::attach(&mut scene, 64);
    (0..40).for_each(|sequence| client.ask(&mut scene, tag(sequence), &request(sequence)));
    scene.wait_ms(20);
    let mut heard = client.hear();
    heard.sort_by_key(|(tag, _)| *tag);
    let mut tags: Vec<u64> = (0..40).map(tag).collect();
    tags.sort_unstable();
    assert_eq!(heard.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), tags);
    let lost = heard.iter().filter(|(_, outcome)| outcome.is_err()).count() as u64;
    assert!(lost >= 30 && lost == scene.dropped(DropReason::RequestTimeout), "{lost}");
    scene.world.check().unwrap();
    assert_eq!(scene.world.in_flight(0), 0);
}

#[test]
fn a_runtime_whose_library_takes_no_bundles_gets_single_messages() {
    let mut script = bundles(FRAMING);
    // Blocks that answer at once: slow ones get no bundles.
    *script.behaviour() = Behaviour::default();
    let mut scene = script.play();
    let mut client = Client::attach(&mut scene, 64);
    let mut bundled = Vec::new();
    for (generation, single_messages) in (0..).zip([false, true, false]) {
        if generation > 0 {
            scene.world.lose_runtime(0, 0, DropReason::AcceleratorLost);
            scene.run(2);
            let next = Behaviour { single_messages, ..Behaviour::default() };
            scene.world.replace_rings(0, 0, next);
            scene.world.resume_blocks(0, 0);
            scene.run(2);
        }
        let before = counter(&scene, "bundled");
        for sequence in 20 * generation..20 * (generation + 1) {
            client.ask(&mut scene, tag(sequence), &request(sequence));
        }
        // Short turns: blocks that seem to be slow get no bundles.
        scene.world.run(100, 100);
        assert_eq!(client.hear().len(), 20);
        bundled.push(counter(&scene, "bundled") - before);
    }
    assert_eq!(bundled[1], 0);
    assert!(bundled[0] > 0 && bundled[2] > 0, "{bundled:?}");
    assert_eq!(scene.replied(), 60);
    assert_at_rest(&mut scene);
}

#[test]
fn bundles_are_tried_before_they_are_chosen() {
    let mut script = bundles(FRAMING);
    script.service().bundles = Bundles::Auto;
    script.service().mqueues = 8;
    // A bundle takes no longer than a message.
    let delay_ns = (50_000, 50_000);
    *script.behaviour() = Behaviour { remote: true, delay_ns, overlap: 64, ..Behaviour::default() };
    let mut scene = script.play();
    let mut client = Client::attach(&mut scene, 64);
    let mut bundled = Vec::new();
    for burst in 0..20 {
        let before = counter(&scene, "bundled");
        for sequence in burst * 64..(burst + 1) * 64 {
            client.ask(&mut scene, tag(sequence), &request(sequence));
        }
        scene.wait_ms(10);
        assert_eq!(client.hear().len(), 64);
        bundled.push(counter(&scene, "bundled") - before);
    }
    assert_eq!(scene.replied(), 20 * 64);
    assert_eq!(bundled[..3], [16; 3], "one bundle until enough is known");
    assert!(bundled[3..].iter().all(|messages| *messages >= 48), "{bundled:?}");
    assert_at_rest(&mut scene);
}

#[test]
fn requests_go_one_by_one_while_the_pool_is_dry() {
    let mut script = bundles(FRAMING);
    script.service().request_timeout_ms = 5;
    script.service().max_reply_bytes = 3000;
    script.behaviour().swallow = 1000;
    let mut scene = script.play();
    let mut client = Client::attach(&mut scene, 64);
    // A block that answers nothing keeps the buffers of its bundles when their requests have timed out.
    let mut sequence = 0;
    for _ in 0..40 {
        for _ in 0..30 {
            client.ask(&mut scene, tag(sequence), &request(sequence));
            sequence += 1;
        }
        scene.wait_ms(10);
        assert_eq!(client.hear().len(), 30, "each has an outcome");
    }
    let dry = counter(&scene, "pool_dry");
    assert!(dry > 0 && counter(&scene, "bundled") < 40 * 30, "{dry}");
    assert_eq!(scene.dropped(DropReason::RequestTimeout), 40 * 30);
    scene.world.check().unwrap();
}

#[test]
fn requests_of_a_stream_go_as_bundles_and_their_replies_in_order() {
    for framing in [Framing::Fixed(64), Framing::LengthU16, Framing::LengthU32] {
        let mut scene = bundles(framing).play();
        let caller = scene.connect();
        scene.run(3);
        // As with shared memory. The last is incomplete.
        let filler = request_filler_max(framing, 64).unwrap() as u32;
        let body = |sequence| Body { client: caller.id, filler, ..request(sequence) };
        let mut bytes = Vec::new();
        for sequence in 0..30 {
            lock(&scene.world.net).ledger.ask(0, body(sequence), None);
            let payload = request_payload(framing, &body(sequence), Flavor::Plain);
            bytes.extend(request_wire(framing, &payload));
        }
        let (most, rest) = bytes.split_at(bytes.len() - 20);
        scene.say(caller, most);
        scene.run(3);
        assert_eq!(scene.world.in_flight(0), 29, "{framing}");
        assert!(counter(&scene, "bundled") >= 24, "{framing}");
        scene.say(caller, rest);
        scene.wait_ms(10);
        let mut expected = Vec::new();
        for sequence in 0..30 {
            let reply = reply_payload(framing, &body(sequence).reply(), Flavor::Plain);
            framing.encode_reply(&reply, &mut expected).unwrap();
        }
        assert_eq!(scene.hear(caller), expected, "{framing}");
        assert_eq!(scene.replied(), 30);
        assert_at_rest(&mut scene);
    }
}

#[test]
fn a_message_that_a_block_drops_ends_the_stream_behind_the_replies_before_it() {
    let mut scene = bundles(Framing::LengthU16).play();
    let caller = scene.connect();
    for sequence in 0..20 {
        let ask = if sequence == 11 { Ask::Reject } else { Ask::Answer };
        scene.call(caller, Body { ask, ..request(sequence) });
    }
    scene.wait_ms(10);
    assert!(counter(&scene, "bundled") >= 10);
    assert_eq!((scene.replied(), scene.dropped(DropReason::KernelDrop)), (11, 1));
    assert_eq!(scene.dropped(DropReason::ClientGone), 8);
    assert_at_rest(&mut scene);
}

#[test]
fn a_connection_that_ends_with_a_bundle_in_flight_gives_its_buffer_back() {
    let mut scene = bundles(Framing::LengthU16).play();
    let caller = scene.connect();
    for sequence in 0..20 {
        scene.call(caller, request(sequence));
    }
    scene.run(3);
    assert!(counter(&scene, "bundles") > 0);
    lock(&scene.world.net).peer_close(caller.conn, wire::nic::Close::Reset);
    scene.wait_ms(10);
    assert_eq!((scene.replied(), scene.dropped(DropReason::ClientGone)), (0, 20));
    assert_at_rest(&mut scene);
}

/// Bursts of datagrams some of which the host kernel merges, and blocks that answer later.
fn in_place() -> Script {
    let mut script = bundles(Framing::Raw);
    script.limits().in_place_bytes = 256;
    script
}

/// Rounds of a burst each; a burst is received in place if the one before was a long GRO batch. Returns the number of requests.
fn bursts(scene: &mut Scene) -> u64 {
    let filler = (0..).find(|filler| {
        let body = Body { filler: *filler, ..request(0) };
        request_payload(Framing::Raw, &body, Flavor::Plain).len() == 128
    });
    for _ in 0..20 {
        scene.ask_often(48, Body { filler: filler.unwrap(), ..request(0) });
        scene.run(3);
        assert!(scene.world.in_flight(0) > 0);
        scene.wait_ms(10);
    }
    assert!(counter(scene, "in_place") > 0);
    20 * 48
}

#[test]
fn datagrams_that_were_received_in_the_pool_are_answered_and_leave_it_whole() {
    let mut scene = in_place().play();
    let asked = bursts(&mut scene);
    assert_eq!(scene.replied(), asked);
    assert_at_rest(&mut scene);
}

#[test]
fn what_a_block_never_answers_leaves_the_buffers_of_its_generation_with_it() {
    let mut script = in_place();
    script.service().request_timeout_ms = 5;
    script.behaviour().swallow = 30;
    let mut scene = script.play();
    let asked = bursts(&mut scene);
    assert_eq!(scene.replied() + scene.dropped(DropReason::RequestTimeout), asked);
    assert!(scene.dropped(DropReason::RequestTimeout) > 0);
    scene.world.check().unwrap();
    // The next generation has a whole pool.
    scene.world.lose_runtime(0, 0, DropReason::AcceleratorLost);
    scene.run(2);
    scene.world.replace_rings(0, 0, Behaviour::default());
    scene.world.resume_blocks(0, 0);
    scene.run(2);
    let replied = scene.replied();
    scene.ask_often(48, request(0));
    scene.wait_ms(10);
    assert_eq!(scene.replied() - replied, 48);
    assert_at_rest(&mut scene);
}
