//! Two mirrors on one connection: whatever the rings, the lengths and the order of steps, every message arrives once, in order and whole,
//! in both directions, and all slots are free in the end.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mqueue::abi::kind;
use mqueue::{Consumer, Head, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan};
use proptest::prelude::*;
use remote::{Channel, Ends, Greeted, Greeter, Mirror, Secret, Side, connect};
use sys::{RegionOptions, SharedMemory};

const PATIENCE: Duration = Duration::from_secs(30);

/// The ends of a region's mqueues on one side, and their slots.
type Installed = Vec<(Ends, u32)>;
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
            near_ends.push((Ends { source: rx, sink: tx }, depth));
            let (rx, tx) = far.engine_ends(mqueue);
            far_ends.push((Ends { source: tx, sink: rx }, depth));
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
