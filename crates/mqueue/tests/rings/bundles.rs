//! Bundles through rings of every protocol, the pool's buffers, and hostile values in descriptors.

use crate::support::{Choose, Numbers, Shape, payload, shapes};
use mqueue::abi::{
    BUNDLE_MAX, Bundle, BundleReply, POOL_ALIGN, PoolEntry, SlotHeader, kind, status,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::pool::BUFFER_BYTES;
use mqueue::{
    Buffer, BundleReplies, CheckedBundle, Consumer, Head, HeapMapping, LoanError, MappedMemory,
    MqueuePlan, Pool, Producer, Region, RegionPlan, ReplyArea, RingError, RingPlan,
};
use proptest::prelude::*;

const CASES: u32 = if cfg!(miri) { 3 } else { 200 };
const POOL_BYTES: u64 = 256 << 10;
const LONGEST: u32 = 61;

/// Both sides of an mqueue with a pool.
struct Bench<M: Memory> {
    memory: M,
    pools: Vec<PoolEntry>,
    pool: Pool<M>,
    rx: (Producer<M>, Consumer<M>),
    tx: (Producer<M>, Consumer<M>),
}

fn plan(protocol: u8, depth: u32) -> RegionPlan {
    let ring = RingPlan { protocol, message_bytes_max: LONGEST, arena_bytes: 0 };
    let mqueue = MqueuePlan { depth, rx: ring, tx: ring };
    RegionPlan::of_blocks(1, &[mqueue], 1).with_pools(2, POOL_BYTES)
}

fn bench(shape: Shape, depth: u32) -> Bench<MappedMemory> {
    let plan = plan(shape.protocol, depth);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut engine = Region::format(memory.clone(), &plan).unwrap();
    let mut accelerator = Region::join(memory.clone()).unwrap();
    assert!(engine.carries_bundles(0) && accelerator.carries_bundles(0));
    let pool = engine.engine_pool(1);
    let ((request, reply), (taken, answer)) =
        (engine.engine_ends(0), accelerator.accelerator_ends(0));
    let pools = accelerator.pools().to_vec();
    Bench { memory, pools, pool, rx: (request, taken), tx: (answer, reply) }
}

/// Shapes without an arena.
fn plain() -> impl Iterator<Item = Shape> {
    shapes().into_iter().filter(|shape| shape.arena_bytes == 0)
}

/// The next slot's header, once it has arrived.
fn header<M: Memory>(ring: &mut Consumer<M>) -> SlotHeader {
    ring.peek().unwrap().expect("published")
}

/// A bundle that was sent, as the engine knows it.
struct Sent {
    token: u64,
    messages: Vec<Vec<u8>>,
    buffer: Buffer,
    area: ReplyArea,
}

/// Sends a bundle of `count` messages of `len` bytes, the last of `last_len`, at this distance.
fn send(bench: &mut Bench<MappedMemory>, token: u64, shape: (u32, u32, u32, u32)) -> Sent {
    let (count, len, last_len, stride) = shape;
    let bytes = (count * stride).next_multiple_of(64);
    let reply_bytes = count * LONGEST.next_multiple_of(16);
    let buffer = bench.pool.take(bytes + reply_bytes).expect("the pool is not dry");
    let messages: Vec<Vec<u8>> = (0..count)
        .map(|i| {
            payload(
                token.wrapping_add(i.into()),
                if i + 1 == count { last_len } else { len } as usize,
            )
        })
        .collect();
    if stride == len {
        bench.pool.write(&buffer, 0, &messages.concat());
    } else {
        for (at, message) in (0..).step_by(stride as usize).zip(&messages) {
            bench.pool.write(&buffer, at, message);
        }
    }
    let area = ReplyArea { offset: buffer.offset() + u64::from(bytes), bytes: reply_bytes };
    let (offset, reply_offset) = (buffer.offset(), area.offset);
    let bundle = Bundle { offset, reply_offset, stride, count, len, last_len, reply_bytes, pad: 0 };
    bench.rx.0.push_bundle(token, &bundle).unwrap();
    bench.rx.0.publish();
    Sent { token, messages, buffer, area }
}

/// Receives the bundle in the next slot.
fn receive(bench: &mut Bench<MappedMemory>) -> CheckedBundle {
    let rx = &mut bench.rx.1;
    let header = header(rx);
    assert_eq!((header.kind, header.tag, header.status, header.flags), (kind::BUNDLE, 0, 0, 0));
    let bundle = rx.bundle(&header).unwrap().expect("whole");
    rx.advance();
    rx.release();
    bundle.check(header.token, &bench.pools, LONGEST).expect("a good bundle")
}

/// The block answers message `i` with this reply.
fn answer(bench: &mut Bench<MappedMemory>, replies: &mut BundleReplies, i: u32, reply: &[u8]) {
    if !replies.continues(i, reply.len() as u32) {
        replies.publish(&mut bench.tx.0).unwrap();
    }
    assert!(replies.write(&bench.memory, i, reply), "the area has room for every reply");
}

/// The engine reads all completions of a bundle; returns the replies and the dropped ones by message.
fn collect(bench: &mut Bench<MappedMemory>, sent: &Sent) -> Vec<Option<Result<Vec<u8>, u8>>> {
    let mut outcomes = vec![None; sent.messages.len()];
    let tx = &mut bench.tx.1;
    while let Some(header) = tx.peek().unwrap() {
        if header.kind == kind::DROP {
            let i = header.token.wrapping_sub(sent.token) as usize;
            assert!(outcomes[i].replace(Err(header.status)).is_none(), "message {i} ended twice");
        } else {
            assert_eq!((header.kind, header.token), (kind::BUNDLE, sent.token));
            let reply = tx.bundle_reply(&header).unwrap().expect("whole");
            let replies = reply.check(sent.area, LONGEST).expect("good replies");
            let bits = (0..64).filter(|i| replies.answered() >> i & 1 == 1);
            for (k, i) in (0..replies.count()).zip(bits) {
                let mut bytes = vec![0; replies.len() as usize];
                let at = (sent.area.offset - sent.buffer.offset()) as u32 + replies.at(k);
                bench.pool.read(&sent.buffer, at, &mut bytes);
                assert!(outcomes[i].replace(Ok(bytes)).is_none(), "message {i} ended twice");
            }
        }
        tx.advance();
        tx.release();
    }
    outcomes
}

/// Count, length, length of the last message, and distance.
fn segments() -> impl Strategy<Value = (u32, u32, u32, u32)> {
    (1..=BUNDLE_MAX, 0..=LONGEST).prop_flat_map(|(count, len)| {
        let strides = prop_oneof![
            Just(len),
            Just(len.next_multiple_of(16)),
            Just(len.next_multiple_of(8) + 8)
        ];
        (Just(count), Just(len), 0..=len, strides)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    /// Every message arrives, and its reply comes back, in whatever order the block answers; the pool is whole afterwards.
    #[test]
    fn bundles_arrive_and_are_answered_in_any_order(train in segments(), seed: u64, token: u64) {
        for shape in plain() {
            let mut numbers = Numbers(seed | 1);
            let mut bench = bench(shape, 64);
            let sent = send(&mut bench, token, train);
            let bundle = receive(&mut bench);
            prop_assert_eq!(bundle.count(), train.0);
            let mut replies = BundleReplies::new(&bundle);
            let mut order: Vec<u32> = (0..bundle.count()).collect();
            if numbers.below(2) == 0 {
                for at in (1..order.len()).rev() {
                    order.swap(at, numbers.below(at as u64 + 1) as usize);
                }
            }
            let varies = numbers.below(2) == 0;
            let mut expected = vec![None; order.len()];
            for i in order {
                let mut message = vec![0; bundle.len(i) as usize];
                bundle.copy_out(&bench.memory, i, &mut message);
                prop_assert_eq!(&message, &sent.messages[i as usize]);
                prop_assert_eq!(bundle.token(i), token.wrapping_add(i.into()));
                let outcome = if numbers.below(8) == 0 {
                    replies.publish(&mut bench.tx.0).unwrap();
                    bench.tx.0.push_bundle_drop(bundle.token(i), status::REJECTED).unwrap();
                    Err(status::REJECTED)
                } else {
                    let len = if varies { numbers.below(u64::from(LONGEST) + 1) } else { 48 };
                    let reply = payload(!bundle.token(i), len as usize);
                    answer(&mut bench, &mut replies, i, &reply);
                    Ok(reply)
                };
                expected[i as usize] = Some(outcome);
            }
            replies.publish(&mut bench.tx.0).unwrap();
            prop_assert!(!replies.any());
            bench.tx.0.publish();
            prop_assert_eq!(collect(&mut bench, &sent), expected);
            prop_assert!(!bench.pool.is_whole());
            bench.pool.give_back(sent.buffer);
            prop_assert!(bench.pool.is_whole());
        }
    }

    /// A buffer has one owner, and the pool is whole again when all are given back, in any order.
    #[test]
    fn a_buffer_has_one_owner(pages in 1..64_u64, steps in prop::collection::vec((any::<u32>(), any::<bool>()), 1..400)) {
        let mut pool = pool(pages * POOL_ALIGN);
        let whole = pool.buffers();
        let mut taken: Vec<Buffer> = Vec::new();
        for (choice, take) in steps {
            if take {
                let bytes = choice % (BUFFER_BYTES[2] + 2);
                let largest = pool.largest_free();
                match pool.take(bytes) {
                    Some(buffer) => {
                        prop_assert!(bytes <= buffer.bytes() && buffer.bytes() <= largest);
                        taken.push(buffer);
                    }
                    None => prop_assert!(bytes > largest, "{bytes} of {largest}"),
                }
            } else if !taken.is_empty() {
                let buffer = taken.swap_remove(choice as usize % taken.len());
                let offset = buffer.offset();
                let bytes = buffer.bytes();
                pool.give_back(buffer);
                // The last one freed is the first one used.
                let again = pool.take(bytes).expect("it is free");
                prop_assert_eq!((again.offset(), again.bytes()), (offset, bytes));
                pool.give_back(again);
            }
            let mut parts: Vec<_> = taken.iter().map(|b| (b.offset(), u64::from(b.bytes()))).collect();
            parts.sort_unstable();
            prop_assert!(parts.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{parts:?}");
            prop_assert!(parts.iter().all(|(at, bytes)| at % POOL_ALIGN == 0 && pool_range(pages).contains(&(at + bytes - 1))));
        }
        for buffer in taken {
            pool.give_back(buffer);
        }
        prop_assert!(pool.is_whole());
        prop_assert_eq!(pool.buffers(), whole);
    }

    /// A descriptor of any numbers is refused, or everything that it names lies in one pool.
    #[test]
    fn any_bundle_is_refused_or_lies_in_a_pool(seed: u64) {
        let pools = [pool_entry(0, 8192, 8192), pool_entry(1, 20_480, 65_536), pool_entry(2, 1 << 62, 4096)];
        let mut numbers = Numbers(seed | 1);
        let mut accepted = 0;
        for _ in 0..if cfg!(miri) { 20 } else { 400 } {
            let mut bundle = Bundle {
                offset: 20_480 + 64 * numbers.below(64),
                reply_offset: 40_960 + 64 * numbers.below(64),
                stride: numbers.below(128) as u32,
                count: 1 + numbers.below(64) as u32,
                len: numbers.below(64) as u32,
                last_len: numbers.below(8) as u32,
                reply_bytes: numbers.below(8192) as u32,
                pad: 0,
            };
            for _ in 0..numbers.below(3) {
                let mut near = |value: u32| numbers.hostile(value.into()) as u32;
                match near(3) % 7 {
                    0 => bundle.offset = numbers.hostile(bundle.offset) & !63,
                    1 => bundle.reply_offset = numbers.hostile(bundle.reply_offset) & !63,
                    2 => bundle.stride = near(bundle.stride),
                    3 => bundle.count = near(bundle.count),
                    4 => bundle.len = near(bundle.len),
                    5 => bundle.last_len = near(bundle.last_len),
                    _ => bundle.reply_bytes = near(bundle.reply_bytes),
                }
            }
            let Some(checked) = bundle.check(7, &pools, LONGEST) else { continue };
            accepted += 1;
            prop_assert!((1..=BUNDLE_MAX).contains(&checked.count()), "{bundle:?}");
            let inside = |at: u128, bytes: u128| {
                pools.iter().position(|p| u128::from(p.offset) <= at && at + bytes <= u128::from(p.offset + p.bytes))
            };
            let area = inside(bundle.reply_offset.into(), bundle.reply_bytes.into());
            prop_assert!(area.is_some(), "{bundle:?}");
            for i in 0..checked.count() {
                prop_assert!(checked.len(i) <= LONGEST);
                let at = u128::from(bundle.offset) + u128::from(i) * u128::from(bundle.stride);
                prop_assert_eq!(inside(at, checked.len(i).into()), area, "{:?}", bundle);
            }
        }
        prop_assert!(accepted > 0);
    }

    /// A completion of any numbers is refused, or its replies lie in the area of its bundle.
    #[test]
    fn any_completion_is_refused_or_lies_in_its_area(seed: u64) {
        let mut numbers = Numbers(seed | 1);
        let mut accepted = 0;
        for round in 0..if cfg!(miri) { 20 } else { 400 } {
            let area = ReplyArea { offset: [4096, 1 << 40, u64::MAX - 8192][round % 3] & !63, bytes: 4096 };
            let mut reply = BundleReply {
                answered: numbers.next() >> numbers.below(64),
                offset: area.offset + numbers.below(512),
                len: numbers.below(64) as u32,
                stride: 64,
            };
            for _ in 0..numbers.below(3) {
                match numbers.below(4) {
                    0 => reply.answered = numbers.hostile(reply.answered),
                    1 => reply.offset = numbers.hostile(reply.offset),
                    2 => reply.len = numbers.hostile(reply.len.into()) as u32,
                    _ => reply.stride = numbers.hostile(reply.stride.into()) as u32,
                }
            }
            let Some(replies) = reply.check(area, LONGEST) else { continue };
            accepted += 1;
            prop_assert!(replies.answered() != 0 && replies.count() == reply.answered.count_ones());
            prop_assert!(replies.len() <= LONGEST && replies.len() <= replies.stride());
            for k in 0..replies.count() {
                prop_assert!(replies.at(k) + replies.len() <= area.bytes, "{reply:?}");
                let at = u128::from(reply.offset) + u128::from(k) * u128::from(reply.stride);
                prop_assert_eq!(at, u128::from(area.offset) + u128::from(replies.at(k)));
            }
        }
        prop_assert!(accepted > 0);
    }

    /// Bytes at any offset, by the specialised copy of mapped memory and by the generic one.
    #[test]
    fn bytes_are_copied_from_any_offset(at in 0..64_u64, len in 0..200_usize) {
        let memory = HeapMapping::memory(384);
        let content = payload(at, 384);
        memory.copy_in(0, &content);
        for memory in [Ok(memory.clone()), Err(Generic(memory))] {
            let mut bytes = vec![0xee; len + 1];
            match memory {
                Ok(mapped) => mapped.copy_out_unaligned(at, &mut bytes[..len]),
                Err(generic) => generic.copy_out_unaligned(at, &mut bytes[..len]),
            }
            let at = at as usize;
            prop_assert_eq!(&bytes[..len], &content[at..at + len]);
            prop_assert_eq!(bytes[len], 0xee);
        }
    }
}

/// Memory that uses the generic code of [`Memory`].
#[derive(Clone)]
struct Generic(MappedMemory);

impl Memory for Generic {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
    fn load(&self, at: u64, order: Ordering) -> u64 {
        self.0.load(at, order)
    }
    fn store(&self, at: u64, value: u64, order: Ordering) {
        self.0.store(at, value, order);
    }
}

fn pool_entry(index: u32, offset: u64, bytes: u64) -> PoolEntry {
    let (kind, version) = (mqueue::abi::ring_kind::POOL, mqueue::abi::ring_version::POOL);
    let block = mqueue::abi::NO_BLOCK;
    PoolEntry { kind, version, flags: 0, block, index, offset, bytes, reserved: [0; 12] }
}

fn pool_region(bytes: u64) -> Region<MappedMemory> {
    let ring = RingPlan {
        protocol: mqueue::abi::protocol::DOORBELL,
        message_bytes_max: LONGEST,
        arena_bytes: 0,
    };
    let plan = RegionPlan::of_blocks(1, &[MqueuePlan { depth: 1, rx: ring, tx: ring }], 1)
        .with_pools(1, bytes);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    Region::format(memory, &plan).unwrap()
}

fn pool(bytes: u64) -> Pool<MappedMemory> {
    pool_region(bytes).engine_pool(0)
}

fn pool_range(pages: u64) -> std::ops::Range<u64> {
    let entry = pool_region(pages * POOL_ALIGN).pools()[0];
    entry.offset..entry.offset + entry.bytes
}

#[test]
fn a_pool_gives_the_smallest_buffer_and_larger_ones_if_those_are_used_up() {
    let mut pool = pool(POOL_BYTES);
    let [(smalls, _), (middles, _), (larges, _)] = pool.buffers();
    assert_eq!(pool.free_of(1), smalls + middles + larges);
    assert_eq!((pool.free_of(4097), pool.free_of(16_385)), (middles + larges, larges));
    assert_eq!((smalls, middles, larges), (16, 4, 2));
    let mut taken: Vec<Buffer> = std::iter::from_fn(|| pool.take(1)).collect();
    let sizes: Vec<u32> = taken.iter().map(Buffer::bytes).collect();
    let expected =
        [vec![BUFFER_BYTES[0]; 16], vec![BUFFER_BYTES[1]; 4], vec![BUFFER_BYTES[2]; 2]].concat();
    assert_eq!(sizes, expected);
    assert_eq!((pool.largest_free(), pool.take(0)), (0, None));
    pool.give_back(taken.remove(3));
    assert_eq!((pool.largest_free(), pool.take(BUFFER_BYTES[0] + 1)), (BUFFER_BYTES[0], None));
    taken.push(pool.take(BUFFER_BYTES[0]).unwrap());
    for buffer in taken {
        pool.give_back(buffer);
    }
    assert!(pool.is_whole());
    assert_eq!(pool.take(BUFFER_BYTES[2]).unwrap().bytes(), BUFFER_BYTES[2]);
    assert_eq!(pool.take(BUFFER_BYTES[2] + 1), None);
}

#[test]
#[should_panic(expected = "a buffer of another pool")]
fn a_buffer_goes_back_to_its_own_pool() {
    let [mut one, mut other] = [pool(POOL_BYTES), pool(POOL_BYTES)];
    let _first = other.take(1);
    other.give_back(one.take(1).unwrap());
    other.give_back(one.take(1).unwrap());
}

#[test]
fn nothing_is_copied_beyond_a_buffer() {
    let mut pool = pool(POOL_BYTES);
    let buffer = pool.take(4096).unwrap();
    let refused =
        |access: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_err();
    pool.write(&buffer, 4088, &[1; 8]);
    assert!(refused(&|| pool.write(&buffer, 4088, &[1; 9])));
    assert!(refused(&|| pool.write(&buffer, 4104, &[])));
    assert!(refused(&|| pool.read(&buffer, u32::MAX, &mut [0])));
    assert!(refused(&|| pool.read(&buffer, 4096, &mut [0])));
    let memory = pool.memory();
    let end = memory.len_bytes();
    assert!(refused(&|| _ = memory.cells(end - 8, 9)));
    assert!(refused(&|| _ = memory.cells(u64::MAX, 2)));
    let cells = memory.cells(buffer.offset() + 8, 8);
    assert_eq!(cells.as_ptr().addr(), memory.base().addr() + buffer.offset() as usize + 8);
    assert_eq!(memory.cells(end, 0).len(), 0);
    let mut bytes = [0; 3];
    pool.read(&buffer, 4093, &mut bytes);
    assert_eq!(bytes, [1; 3]);
}

#[test]
fn singles_and_bundles_keep_their_order() {
    for shape in plain() {
        let mut bench = bench(shape, 8);
        let single = |n| Head { token: n, kind: kind::MESSAGE, ..Head::default() };
        bench.rx.0.push(single(1), &payload(1, 5)).unwrap();
        let sent = send(&mut bench, 100, (3, 16, 16, 16));
        bench.rx.0.push(single(2), &payload(2, 61)).unwrap();
        bench.rx.0.publish();
        let mut tokens = Vec::new();
        for _ in 0..3 {
            let rx = &mut bench.rx.1;
            let header = header(rx);
            tokens.push((header.kind, header.token));
            rx.advance();
        }
        assert_eq!(tokens, [(kind::MESSAGE, 1), (kind::BUNDLE, 100), (kind::MESSAGE, 2)]);
        bench.pool.give_back(sent.buffer);
    }
}

#[test]
fn a_full_ring_keeps_what_was_not_published() {
    for shape in plain() {
        let mut bench = bench(shape, 1);
        let sent = send(&mut bench, 100, (2, 16, 16, 16));
        let mut replies = BundleReplies::new(&receive(&mut bench));
        answer(&mut bench, &mut replies, 0, &[1; 16]);
        answer(&mut bench, &mut replies, 1, &[2; 16]);
        bench.tx.0.push_bundle_drop(7, status::OK).unwrap();
        bench.tx.0.publish();
        assert_eq!(replies.publish(&mut bench.tx.0), Err(LoanError::Full));
        assert!(replies.any());
        assert_eq!(header(&mut bench.tx.1).token, 7);
        bench.tx.1.advance();
        bench.tx.1.release();
        replies.publish(&mut bench.tx.0).unwrap();
        bench.tx.0.publish();
        let outcomes = collect(&mut bench, &sent);
        assert_eq!(outcomes, [Some(Ok(vec![1; 16])), Some(Ok(vec![2; 16]))]);
        bench.pool.give_back(sent.buffer);
    }
}

#[test]
fn an_area_without_room_takes_no_reply() {
    let mut bench = bench(shapes()[0], 4);
    let buffer = bench.pool.take(4096).unwrap();
    let offset = buffer.offset();
    let bundle = Bundle {
        offset,
        reply_offset: offset + 64,
        stride: 8,
        count: 3,
        len: 8,
        last_len: 8,
        reply_bytes: 40,
        pad: 0,
    };
    let checked = bundle.check(1, &bench.pools, LONGEST).unwrap();
    let mut replies = BundleReplies::new(&checked);
    assert!(!replies.write(&bench.memory, 0, &[1; 41]));
    assert!(replies.write(&bench.memory, 0, &[1; 24]));
    assert!(!replies.continues(1, 23) && replies.continues(1, 24));
    assert!(!replies.write(&bench.memory, 1, &[1; 24]));
    replies.publish(&mut bench.tx.0).unwrap();
    assert!(!replies.write(&bench.memory, 1, &[2; 9]) && !replies.any());
    bench.pool.give_back(buffer);
}

#[test]
fn slots_of_another_length_are_no_bundles() {
    for shape in plain() {
        let mut bench = bench(shape, 4);
        for len in [0, 24, 39, 41, 61] {
            bench
                .rx
                .0
                .push(Head { token: 1, kind: kind::BUNDLE, ..Head::default() }, &vec![0; len])
                .unwrap();
            bench.rx.0.publish();
            let rx = &mut bench.rx.1;
            let header = header(rx);
            assert_eq!(rx.bundle(&header), Err(RingError::BadHeader));
            assert_eq!(rx.bundle_reply(&header).is_ok(), len == 24);
            rx.advance();
            rx.release();
        }
        // In the arena of a ring that has one.
        let flags = mqueue::abi::flags::ARENA;
        let header = SlotHeader {
            token: 0,
            tag: 0,
            arena_offset: 0,
            len: 40,
            kind: kind::BUNDLE,
            status: 0,
            flags,
        };
        assert_eq!(bench.rx.1.bundle(&header), Err(RingError::BadHeader));
    }
}

#[test]
fn what_a_bundle_must_not_be() {
    let pools = [pool_entry(0, 4096, 8192), pool_entry(1, 16_384, 4096)];
    let good = Bundle {
        offset: 4096,
        reply_offset: 8192,
        stride: 64,
        count: 64,
        len: 60,
        last_len: 60,
        reply_bytes: 4096,
        pad: 0,
    };
    let check = |change: &dyn Fn(&mut Bundle)| {
        let mut bundle = good;
        change(&mut bundle);
        bundle.check(0, &pools, LONGEST).is_some()
    };
    assert!(check(&|_| ()));
    assert!(check(&|b| (b.stride, b.last_len) = (60, 0)));
    assert!(!check(&|b| b.count = 0));
    assert!(!check(&|b| b.count = 65));
    assert!(!check(&|b| b.stride = 59));
    assert!(!check(&|b| b.last_len = 61));
    assert!(!check(&|b| (b.len, b.last_len) = (62, 62)));
    assert!(!check(&|b| b.offset += 8));
    assert!(!check(&|b| b.reply_offset += 8));
    assert!(!check(&|b| b.offset -= 64));
    assert!(!check(&|b| b.reply_bytes += 1));
    assert!(!check(&|b| b.reply_offset = 16_384), "the area is in another pool");
    assert!(!check(&|b| b.offset = 12_288), "between pools");
    assert!(!check(&|b| b.offset = !63));
    assert!(!check(&|b| (b.stride, b.count) = (u32::MAX, 64)));
}

#[test]
fn what_a_completion_must_not_be() {
    let area = ReplyArea { offset: 4096, bytes: 256 };
    let check = |answered, offset, len, stride| {
        BundleReply { answered, offset, len, stride }.check(area, LONGEST).is_some()
    };
    assert!(check(0b1011, 4096, 61, 64));
    assert!(check(1 << 63, 4096 + 195, 61, u32::MAX), "the distance of one reply has no meaning");
    assert!(!check(0, 4096, 61, 64));
    assert!(!check(1, 4095, 61, 64));
    assert!(!check(1, 4096 + 196, 61, 64));
    assert!(!check(1, 4096, 62, 64));
    assert!(!check(1, 4096, 61, 60));
    assert!(!check(0b11111, 4096, 61, 64));
    assert!(!check(u64::MAX, 4096, 0, u32::MAX));
    assert!(!check(1, u64::MAX, 61, 64));
    assert!(!check(1, 0, 61, 64));
}
