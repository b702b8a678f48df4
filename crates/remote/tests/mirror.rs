//! Two mirrors on one connection: whatever the rings, the lengths and the order of steps, every message arrives once, in order and whole,
//! in both directions, and all slots are free in the end.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use mqueue::abi::kind;
use mqueue::{
    Consumer, Head, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingError, RingPlan,
};
use proptest::prelude::*;
use remote::{Channel, Ends, Greeted, Greeter, Mirror, Secret, Side, connect};
use sys::{RegionOptions, SharedMemory};
use wire::link::{Frame, MessageHead};

const PATIENCE: Duration = Duration::from_secs(30);

/// The ends of a region's mqueues on one side.
type Installed = Vec<Ends>;
/// The ends of the party that uses the region: where it writes and where it reads.
type User = Vec<(Producer<MappedMemory>, Consumer<MappedMemory>)>;

fn link() -> [Channel; 2] {
    let secret = || Secret::of(b"a secret of the tests, of at least 32 bytes");
    let mut greeter = Greeter::bind("tcp://127.0.0.1:0", secret()).unwrap();
    let address = format!("tcp://{}", greeter.local_address().unwrap());
    let near = thread::spawn(move || connect(&address, &secret(), PATIENCE).unwrap());
    let far = loop {
        if let Some(Greeted::Link(channel, _)) = greeter.advance(PATIENCE).pop() {
            break channel;
        }
    };
    [near.join().unwrap(), far]
}

fn region(mqueue: MqueuePlan) -> Region<MappedMemory> {
    let plan = RegionPlan::of_blocks(2, &[mqueue], 1);
    let bytes = plan.bytes().unwrap() as usize;
    let memory = SharedMemory::create("mirror-test", bytes, &RegionOptions::default()).unwrap();
    Region::format(MappedMemory::new(Arc::new(memory)), &plan).unwrap()
}

/// One direction of one mqueue: what is still to be written, and what has to be read next.
#[derive(Default)]
struct Flow {
    written: u64,
    read: u64,
}

fn payload(seed: u64, number: u64, longest: u32) -> Vec<u8> {
    let mixed =
        (seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let len = (mixed >> 32) % u64::from(longest + 1);
    (0..len).map(|at| (mixed as u8).wrapping_add(at as u8)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_message_arrives_once_in_order_and_whole(
        protocol in 1u8..=2,
        depth_bits in 0u32..5,
        long in any::<bool>(),
        seed in any::<u64>(),
        steps in prop::collection::vec((0u8..6, 0usize..2, 1usize..12), 40..200),
    ) {
        let depth = 1 << depth_bits;
        let longest = if long && protocol == 1 { 5000 } else { 700 };
        let arena = if longest > 1536 { 4 * 5056 } else { 0 };
        let ring = RingPlan { protocol, message_bytes_max: longest, arena_bytes: arena };
        // As the accelerator's side makes it: the arena of its RX ring is longer.
        let wider = RingPlan { arena_bytes: if arena > 0 { arena + 5056 } else { 0 }, ..ring };
        let mut near = region(MqueuePlan { depth, rx: ring, tx: ring });
        let mut far = region(MqueuePlan { depth, rx: wider, tx: ring });
        let (mut engine, mut blocks): (User, User) = Default::default();
        let (mut near_ends, mut far_ends): (Installed, Installed) = Default::default();
        for mqueue in 0..2 {
            engine.push(near.engine_ends(mqueue));
            let (rx, tx) = joined(&near, mqueue);
            near_ends.push(Ends { source: rx, sink: tx, depth, arena_bytes: arena });
            let (rx, tx) = far.engine_ends(mqueue);
            far_ends.push(Ends { source: tx, sink: rx, depth, arena_bytes: wider.arena_bytes });
            let (rx, tx) = joined(&far, mqueue);
            blocks.push((tx, rx));
        }
        let [near_channel, far_channel] = link();
        let mut mirrors =
            [Mirror::new(near_channel, Side::Engine), Mirror::new(far_channel, Side::Accelerator)];
        mirrors[0].install(near_ends);
        mirrors[1].install(far_ends);
        let mut users = [engine, blocks];
        let mut flows: [[Flow; 2]; 2] = Default::default();
        let write = |users: &mut [User; 2], flows: &mut [[Flow; 2]; 2], from: usize, at: usize| {
            let flow = &mut flows[from][at];
            let bytes = payload(seed + from as u64, flow.written, longest);
            let head = Head { token: flow.written, tag: at as u64, kind: kind::MESSAGE, status: 0 };
            let writer = &mut users[from][at].0;
            if writer.push(head, &bytes).is_ok() {
                flow.written += 1;
                writer.publish();
            }
        };
        let read = |users: &mut [User; 2], flows: &mut [[Flow; 2]; 2], from: usize, at: usize| {
            let flow = &mut flows[from][at];
            let reader = &mut users[1 - from][at].1;
            let Some(header) = reader.peek().unwrap() else { return };
            let mut bytes = vec![0; header.len as usize];
            if !reader.copy_out(&header, &mut bytes) {
                return;
            }
            assert_eq!((header.token, header.tag), (flow.read, at as u64));
            assert!(bytes == payload(seed + from as u64, flow.read, longest), "message {}", flow.read);
            reader.advance();
            reader.release();
            flow.read += 1;
        };
        for (step, at, times) in steps {
            for _ in 0..times {
                match step {
                    0 | 1 => write(&mut users, &mut flows, step.into(), at),
                    2 | 3 => read(&mut users, &mut flows, usize::from(step) - 2, at),
                    _ => {
                        let mirror = &mut mirrors[usize::from(step) - 4];
                        mirror.turn(Instant::now(), &mut |_| Ok(())).unwrap();
                    }
                }
            }
        }
        // Everything that was written arrives, and all slots are free again.
        let deadline = Instant::now() + PATIENCE;
        loop {
            for mirror in &mut mirrors {
                mirror.turn(Instant::now(), &mut |_| Ok(())).unwrap();
            }
            for (from, at) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                read(&mut users, &mut flows, from, at);
            }
            let all_read = flows.iter().flatten().all(|flow| flow.read == flow.written);
            let mut writers = users.iter_mut().flatten();
            if all_read && writers.all(|(writer, _)| writer.credit() == Ok(depth)) {
                break;
            }
            prop_assert!(Instant::now() < deadline, "something is stuck");
        }
    }
}

/// The accelerator's ends of a region, as another process would take them.
fn joined(
    region: &Region<MappedMemory>,
    mqueue: u32,
) -> (Consumer<MappedMemory>, Producer<MappedMemory>) {
    Region::join(region.memory().clone()).unwrap().accelerator_ends(mqueue)
}

/// The mirror of an engine's region, a peer that sends any frames, and the engine's ends.
fn beside(mqueue: MqueuePlan) -> (Mirror, Mirror, User) {
    let mut own = region(mqueue);
    let (mut ends, mut users): (Installed, User) = Default::default();
    for number in 0..2 {
        let (depth, arena_bytes) = (mqueue.depth, mqueue.tx.arena_bytes);
        users.push(own.engine_ends(number));
        let (source, sink) = joined(&own, number);
        ends.push(Ends { source, sink, depth, arena_bytes });
    }
    let [near, far] = link();
    let mut mirror = Mirror::new(near, Side::Engine);
    mirror.install(ends);
    (mirror, Mirror::new(far, Side::Accelerator), users)
}

fn turn(mirror: &mut Mirror) -> Result<(), String> {
    let moved = mirror.turn(Instant::now(), &mut |_| Ok(()));
    moved.map(|_| ()).map_err(|error| error.to_string())
}

fn message(mqueue: u32, token: u64, payload: &[u8]) -> Frame<'_> {
    let head = MessageHead { mqueue, token, tag: 0, kind: kind::MESSAGE, status: 0 };
    Frame::Message(head, payload)
}

/// Slots for eight messages, an arena for two of the longest.
fn narrow() -> MqueuePlan {
    let ring = RingPlan { protocol: 1, message_bytes_max: 4096, arena_bytes: 2 * 4096 };
    MqueuePlan { depth: 8, rx: ring, tx: ring }
}

/// Installs the rings of a region whose blocks send more than [`narrow`] has room for; the blocks' ends.
fn install_blocks(peer: &mut Mirror) -> User {
    let narrow = narrow();
    let tx = RingPlan { arena_bytes: 4 * 4096, ..narrow.tx };
    let mut own = region(MqueuePlan { tx, ..narrow });
    let (mut ends, mut blocks): (Installed, User) = Default::default();
    for number in 0..2 {
        let (sink, source) = own.engine_ends(number);
        ends.push(Ends { source, sink, depth: narrow.depth, arena_bytes: narrow.rx.arena_bytes });
        let (rx, tx) = joined(&own, number);
        blocks.push((tx, rx));
    }
    peer.install(ends);
    blocks
}

#[test]
fn an_mqueue_without_room_in_its_arena_waits_and_the_other_goes_on() {
    let (mut mirror, mut peer, mut users) = beside(narrow());
    let mut blocks = install_blocks(&mut peer);
    let long = vec![7; 4096];
    let push = |blocks: &mut User, mqueue: usize, token, payload: &[u8]| {
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: 0 };
        let pushed = blocks[mqueue].0.push(head, payload).is_ok();
        blocks[mqueue].0.publish();
        pushed
    };
    for token in 0..4 {
        let payload: &[u8] = if token < 3 { &long } else { b"behind them" };
        assert!(push(&mut blocks, 0, token, payload));
    }
    let deadline = Instant::now() + PATIENCE;
    // Far more than its ring has slots, while the first one is not read.
    for token in 0..100 {
        let mut pushed = false;
        loop {
            assert!(Instant::now() < deadline, "message {token} waits behind another mqueue");
            pushed = pushed || push(&mut blocks, 1, token, b"short");
            turn(&mut peer).unwrap();
            turn(&mut mirror).unwrap();
            let reader = &mut users[1].1;
            if let Some(header) = reader.peek().unwrap() {
                assert_eq!(header.token, token);
                reader.advance();
                reader.release();
                break;
            }
        }
    }
    assert!(mirror.is_pending());
    // Then everything arrives in order.
    for token in 0..4 {
        let reader = &mut users[0].1;
        let header = loop {
            assert!(Instant::now() < deadline, "message {token} does not arrive");
            turn(&mut mirror).unwrap();
            if let Some(header) = reader.peek().unwrap() {
                break header;
            }
        };
        let mut bytes = vec![0; header.len as usize];
        assert!(reader.copy_out(&header, &mut bytes));
        assert_eq!(header.token, token);
        assert!(if token < 3 { bytes == long } else { bytes == b"behind them" });
        reader.advance();
        reader.release();
    }
}

/// The engine, which ends the request with a reason, learns of it.
#[test]
fn a_message_with_an_invalid_header_has_one_on_the_other_side_too() {
    let (mut mirror, mut peer, mut users) = beside(narrow());
    let mut blocks = install_blocks(&mut peer);
    for (token, kind) in [(1, 0), (2, kind::MESSAGE)] {
        blocks[0].0.push(Head { token, tag: 0, kind, status: 0 }, b"x").unwrap();
    }
    blocks[0].0.publish();
    let deadline = Instant::now() + PATIENCE;
    let (reader, mut seen) = (&mut users[0].1, Vec::new());
    while seen.len() < 2 {
        assert!(Instant::now() < deadline, "a message does not arrive");
        turn(&mut peer).unwrap();
        turn(&mut mirror).unwrap();
        match reader.peek() {
            Ok(None) => continue,
            Ok(Some(header)) => seen.push(Ok(header.token)),
            Err(error) => seen.push(Err(error)),
        }
        reader.advance();
        reader.release();
    }
    assert_eq!(seen, [Err(RingError::BadHeader), Ok(2)]);
}

/// Turns both sides until one ends; the sentence.
fn until_broken(mirror: &mut Mirror, peer: &mut Mirror) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < deadline, "it goes on");
        let _ = turn(peer);
        if let Err(text) = turn(mirror) {
            return text;
        }
    }
}

#[test]
fn what_waits_for_an_arena_is_bounded() {
    let long = vec![7; 4096];
    // More bytes than any ring of this size can hold.
    let (mut mirror, mut peer, _users) = beside(narrow());
    (0..8).for_each(|token| peer.send(&message(0, token, &long)));
    assert!(until_broken(&mut mirror, &mut peer).contains("more than fits in its ring"));
    // More messages.
    let (mut mirror, mut peer, _users) = beside(narrow());
    (0..3).for_each(|token| peer.send(&message(0, token, &long)));
    (3..9).for_each(|token| peer.send(&message(0, token, b"")));
    assert!(until_broken(&mut mirror, &mut peer).contains("without a free slot"));
}

#[test]
fn a_peer_that_writes_and_does_not_read_costs_bounded_memory_and_then_the_link() {
    let mut arrived = 0;
    let secret = Secret::of(b"a secret of the tests, of at least 32 bytes");
    let (to_mirror, to_peer) = (Pipe { most: 1 << 20, ..Pipe::default() }, Pipe::default());
    let streams = [
        Half { read: to_peer.clone(), write: to_mirror.clone() },
        Half { read: to_mirror, write: to_peer },
    ];
    let [near, far] = Channel::pair(streams, &secret).unwrap();
    let mut peer = Mirror::new(near, Side::Engine);
    let mut mirror = Mirror::new(far, Side::Accelerator);
    let start = Instant::now();
    let (mut now, limit) = (start, Duration::from_secs(2));
    let mut sent_back = 0;
    loop {
        assert!(now - start < 10 * limit, "the link goes on");
        now += Duration::from_millis(1);
        (0..2000).for_each(|_| peer.send(&Frame::Beat(1)));
        peer.turn(now, &mut |_| Ok(())).unwrap();
        let mut beats = 0;
        let turned = mirror.turn(now, &mut |_| {
            beats += 1;
            Ok(())
        });
        turned.unwrap();
        // Far more than a runtime does, which sends back one in a turn.
        sent_back += (0..beats).filter(|_| mirror.send_beat(1)).count();
        arrived += beats;
        if let Err(broken) = mirror.check(now, limit) {
            assert!(broken.to_string().contains("has read nothing for 2000 ms"), "{broken}");
            break;
        }
    }
    // 16 bytes each; the rest was not kept.
    assert!(arrived > 100_000 && sent_back * 16 < 512 << 10, "{sent_back} of {arrived}");
}

/// One direction of a connection in memory.
#[derive(Clone, Default)]
struct Pipe {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    /// Bytes that it takes; 0: none.
    most: usize,
}

struct Half {
    read: Pipe,
    write: Pipe,
}

impl Read for Half {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.read.bytes.lock().unwrap().read(into)? {
            0 => Err(ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }
}

impl Write for Half {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let mut bytes = self.write.bytes.lock().unwrap();
        let count = from.len().min(self.write.most - bytes.len());
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        bytes.extend(&from[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
