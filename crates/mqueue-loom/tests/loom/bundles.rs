//! Bundles: their messages and replies lie in a pool, whose words are loom's cells. The slots that name them have units, which order nothing,
//! so fences do; or a `doorbell` ring's head does.
//!
//! Of a slot's units the first and the last are loom's: any of them may be seen late.

use mqueue::abi::{BUNDLE_ALIGN, Bundle, POOL_ALIGN, protocol, status};
use mqueue::{Buffer, BundleReplies, CheckedBundle, Pool, ReplyArea};

use super::*;

const HEADER_BYTES: u64 = 32;
const BUNDLE_BYTES: u64 = size_of::<Bundle>() as u64;

/// The engine's side, or the block's.
struct Side {
    memory: LoomMemory,
    out: Out,
    into: In,
}

/// Both sides, the pool, and the same for the block.
struct Bench {
    engine: Side,
    block: Side,
    pool: Pool<LoomMemory>,
    pools: Vec<mqueue::abi::PoolEntry>,
}

fn bundle_plan(protocol: u8) -> RegionPlan {
    plan(protocol, 1, BUNDLE_BYTES as u32, 0).with_pools(1, POOL_ALIGN)
}

/// Words of the slots that are accessed concurrently or owned, and the pool's message and reply.
fn kinds(plan: &RegionPlan) -> Kinds {
    let heap = mqueue::HeapMapping::memory(plan.bytes().unwrap() as usize);
    let region = Region::format(heap, plan).unwrap();
    let pool = region.pools()[0].offset;
    let mut kinds = Kinds { atomic: vec![], owned: vec![word(pool), word(pool + BUNDLE_ALIGN)] };
    for ring in region.rings_of(0) {
        let slot = ring.slots_offset;
        if ring.protocol == protocol::DOORBELL {
            kinds.atomic.push(word(ring.head_offset));
            kinds.owned.push(slot..slot + HEADER_BYTES + BUNDLE_BYTES);
        } else {
            // A unit has four bytes of the header and the payload. A completion is shorter than a bundle.
            let last = |bytes: u64| slot + 2 * (HEADER_BYTES + bytes) - 8;
            let longest =
                if ring.kind == mqueue::abi::ring_kind::SERVER_RX { BUNDLE_BYTES } else { 24 };
            kinds.atomic.extend([word(slot), word(last(longest))]);
        }
    }
    kinds
}

/// Runs a model with the engine's and the block's fences weakened.
fn with_pool(
    protocol: u8,
    [engine, block]: [Weak; 2],
    model: impl Fn(Bench) + Sync + Send,
) -> impl Fn() + Sync + Send {
    let plan = bundle_plan(protocol);
    let kinds = kinds(&plan);
    move || {
        let near = LoomMemory::new(plan.bytes().unwrap(), &kinds, engine);
        let far = LoomMemory { words: near.words.clone(), weak: block };
        let mut engine = Region::format(near.clone(), &plan).unwrap();
        let mut accelerator = Region::join(far.clone()).unwrap();
        let pool = engine.engine_pool(0);
        let pools = accelerator.pools().to_vec();
        let (out, into) = engine.engine_ends(0);
        let engine = Side { memory: near, out, into };
        let (into, out) = accelerator.accelerator_ends(0);
        model(Bench { engine, block: Side { memory: far, out, into }, pool, pools });
    }
}

/// Sends a bundle of one message.
fn send(engine: &mut Side, pool: &Pool<LoomMemory>, buffer: &Buffer, n: u8) {
    pool.write(buffer, 0, &[n; 8]);
    let offset = buffer.offset();
    let bundle = Bundle {
        offset,
        reply_offset: offset + BUNDLE_ALIGN,
        stride: 8,
        count: 1,
        len: 8,
        last_len: 8,
        reply_bytes: 16,
        pad: 0,
    };
    engine.out.push_bundle(5, &bundle).unwrap();
    engine.out.publish();
}

/// Waits for the bundle and reads its message.
fn receive(block: &mut Side, pools: &[mqueue::abi::PoolEntry], n: u8) -> CheckedBundle {
    let (token, bundle) = loop {
        if let Some(header) = block.into.peek().unwrap()
            && let Some(bundle) = block.into.bundle(&header).unwrap()
        {
            break (header.token, bundle);
        }
        thread::yield_now();
    };
    let bundle = bundle.check(token, pools, 8).expect("a good bundle");
    let mut message = [0; 8];
    bundle.copy_out(&block.memory, 0, &mut message);
    assert_eq!(message, [n; 8], "the message");
    bundle
}

/// The messages of a bundle are in the pool before the block reads them.
fn arrives(protocol: u8, weak: [Weak; 2]) -> impl Fn() + Sync + Send {
    with_pool(protocol, weak, |bench| {
        let Bench { mut engine, mut block, mut pool, pools } = bench;
        let receiver = thread::spawn(move || _ = receive(&mut block, &pools, 7));
        let buffer = pool.take(1).unwrap();
        send(&mut engine, &pool, &buffer, 7);
        receiver.join().unwrap();
        pool.give_back(buffer);
    })
}

/// The replies are in the pool before the engine reads them, and then the engine uses the buffer again.
fn is_answered(protocol: u8, weak: [Weak; 2]) -> impl Fn() + Sync + Send {
    with_pool(protocol, weak, |bench| {
        let Bench { mut engine, mut block, mut pool, pools } = bench;
        let buffer = pool.take(1).unwrap();
        send(&mut engine, &pool, &buffer, 7);
        let answerer = thread::spawn(move || {
            let mut replies = BundleReplies::new(&receive(&mut block, &pools, 7));
            assert!(replies.write(&block.memory, 0, &[8; 8]));
            replies.publish(&mut block.out).unwrap();
            block.out.publish();
        });
        let reply = loop {
            if let Some(header) = engine.into.peek().unwrap()
                && let Some(reply) = engine.into.bundle_reply(&header).unwrap()
            {
                break reply;
            }
            thread::yield_now();
        };
        let area = ReplyArea { offset: buffer.offset() + BUNDLE_ALIGN, bytes: 16 };
        let replies = reply.check(area, 8).expect("good replies");
        let mut bytes = [0; 8];
        pool.read(&buffer, BUNDLE_ALIGN as u32 + replies.at(0), &mut bytes);
        assert_eq!(bytes, [8; 8], "the reply");
        pool.give_back(buffer);
        let again = pool.take(1).unwrap();
        pool.write(&again, 0, &[9; 8]);
        pool.give_back(again);
        answerer.join().unwrap();
    })
}

/// The block has read a message that it drops before the engine uses the buffer again.
fn is_dropped(protocol: u8, weak: [Weak; 2]) -> impl Fn() + Sync + Send {
    with_pool(protocol, weak, |bench| {
        let Bench { mut engine, mut block, mut pool, pools } = bench;
        let buffer = pool.take(1).unwrap();
        send(&mut engine, &pool, &buffer, 7);
        let dropper = thread::spawn(move || {
            let bundle = receive(&mut block, &pools, 7);
            block.out.push_bundle_drop(bundle.token(0), status::REJECTED).unwrap();
            block.out.publish();
        });
        while engine.into.peek().unwrap().is_none() {
            thread::yield_now();
        }
        pool.give_back(buffer);
        let again = pool.take(1).unwrap();
        pool.write(&again, 0, &[9; 8]);
        pool.give_back(again);
        dropper.join().unwrap();
    })
}

const UNITS: u8 = protocol::GRANULE8;
const HEADS: u8 = protocol::DOORBELL;
const STRONG: [Weak; 2] = [Weak::Nothing; 2];
/// The engine's fence, or the block's.
const ENGINE_RELEASE: [Weak; 2] = [Weak::ReleaseFence, Weak::Nothing];
const ENGINE_ACQUIRE: [Weak; 2] = [Weak::AcquireFence, Weak::Nothing];
const BLOCK_RELEASE: [Weak; 2] = [Weak::Nothing, Weak::ReleaseFence];
const BLOCK_ACQUIRE: [Weak; 2] = [Weak::Nothing, Weak::AcquireFence];

holds! {
    a_bundle_arrives: arrives(UNITS, STRONG);
    a_bundle_is_answered: is_answered(UNITS, STRONG);
    a_bundle_is_dropped: is_dropped(UNITS, STRONG);
    a_bundle_arrives_after_its_head: arrives(HEADS, STRONG);
    a_bundle_is_answered_before_its_head: is_answered(HEADS, STRONG);
    a_bundle_is_dropped_before_its_head: is_dropped(HEADS, STRONG);
    heads_need_no_release_fence: is_answered(HEADS, [Weak::ReleaseFence; 2]);
    heads_need_no_acquire_fence: is_answered(HEADS, [Weak::AcquireFence; 2]);
}

fails! {
    bundle_without_release: arrives(UNITS, ENGINE_RELEASE), "Causality violation";
    bundle_without_acquire: arrives(UNITS, BLOCK_ACQUIRE), "Causality violation";
    replies_without_release: is_answered(UNITS, BLOCK_RELEASE), "Causality violation";
    replies_without_acquire: is_answered(UNITS, ENGINE_ACQUIRE), "Causality violation";
    return_without_release: is_dropped(UNITS, BLOCK_RELEASE), "Causality violation";
    return_without_acquire: is_dropped(UNITS, ENGINE_ACQUIRE), "Causality violation";
}
