//! Messages of one length, taken from a ring into a pool and put from a pool into a ring several at a time.

use crate::support::{Choose, Numbers, Shape, payload, shapes};
use mqueue::abi::{PoolEntry, kind, protocol};
use mqueue::memory::{Memory, Ordering, Rows};
use mqueue::{
    Consumer, Head, HeapMapping, LoanError, MappedMemory, MqueuePlan, Pool, Producer, Region,
    RegionPlan, RingError, RingPlan,
};
use proptest::prelude::*;

const CASES: u32 = if cfg!(miri) { 3 } else { 200 };
const POOL_BYTES: u64 = 64 << 10;

/// A client's rings, and a pool in other memory.
struct Bench {
    memory: MappedMemory,
    /// From the client, and to it.
    requests: (Producer<MappedMemory>, Consumer<MappedMemory>),
    replies: (Producer<MappedMemory>, Consumer<MappedMemory>),
    pool: Pool<MappedMemory>,
}

fn pool() -> Pool<MappedMemory> {
    let ring = RingPlan::doorbell(64, 0);
    let plan = RegionPlan::of_blocks(1, &[MqueuePlan { depth: 1, rx: ring, tx: ring }], 1)
        .with_pools(1, POOL_BYTES);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut region = Region::format(memory, &plan).unwrap();
    let pools: &[PoolEntry] = region.pools();
    assert_eq!(pools.len(), 1);
    region.engine_pool(0)
}

fn bench(shape: Shape, depth: u32, start: u64) -> Bench {
    let plan = crate::support::plan(shape, depth, start);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut near = Region::format(memory.clone(), &plan).unwrap();
    let mut far = Region::join(memory.clone()).unwrap();
    let (reply, request) = near.engine_ends(0);
    let (heard, ask) = far.accelerator_ends(0);
    Bench { memory, requests: (ask, request), replies: (reply, heard), pool: pool() }
}

fn message(tag: u64) -> Head {
    Head { token: !tag, tag, kind: kind::MESSAGE, status: tag as u8 }
}

/// Reads the next message.
fn read(ring: &mut Consumer<MappedMemory>) -> Option<(u64, Vec<u8>)> {
    let header = ring.peek().unwrap()?;
    let mut bytes = vec![0; header.len as usize];
    assert!(ring.copy_out(&header, &mut bytes));
    ring.advance();
    ring.release();
    Some((header.tag, bytes))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    /// By the specialised copy of mapped memory and by the generic one.
    #[test]
    fn rows_are_strings_at_equal_distances(
        from_at in 0..64_u64,
        count in 0..6_u64,
        len in 0..140_u64,
        gaps in (0..20_u64, 0..4_u64),
    ) {
        let (from_stride, stride) = (len + gaps.0, len.next_multiple_of(8) + 8 * gaps.1);
        let content = payload(from_at, 2048);
        let from = HeapMapping::memory(2048);
        from.copy_in(0, &content);
        for generic in [false, true] {
            let to = HeapMapping::memory(2048);
            to.copy_in(0, &[0xee; 2048]);
            let rows = Rows { at: 16, stride, count };
            match generic {
                false => to.copy_rows(rows, &from, (from_at, from_stride), len),
                true => Generic(to.clone()).copy_rows(rows, &Generic(from.clone()), (from_at, from_stride), len),
            }
            let mut found = vec![0; 2048];
            to.copy_out(0, &mut found);
            let mut expected = 16;
            for row in 0..count {
                let (at, from) = ((16 + row * stride) as usize, (from_at + row * from_stride) as usize);
                prop_assert!(found[expected..at].iter().all(|byte| *byte == 0xee), "row {row}");
                prop_assert_eq!(&found[at..at + len as usize], &content[from..from + len as usize]);
                // The rest of the last word is undefined.
                expected = at + len.next_multiple_of(8) as usize;
            }
            prop_assert!(found[expected..].iter().all(|byte| *byte == 0xee));
        }
    }

    /// Whatever is taken as many, as singles, or put as many or as singles: each message arrives once, in order, with its tag.
    #[test]
    fn messages_go_through_a_pool_several_at_a_time(
        seed in 1..u64::MAX,
        depth in 0..7_u32,
        start in prop_oneof![Just(0_u64), 1..100_u64, Just(u64::from(u32::MAX))],
    ) {
        let mut numbers = Numbers(seed);
        for shape in shapes() {
            let mut bench = bench(shape, 1 << depth, start);
            let (mut sent, mut taken, mut put) = (0_u64, 0, 0);
            let most = shape.message_bytes_max as usize;
            let lens = [most.min(61), most.min(40), most, 0];
            let mut len_of = Vec::new();
            let mut tags = [0; 64];
            for _ in 0..if cfg!(miri) { 10 } else { 60 } {
                let len = lens[numbers.below(4).saturating_sub(numbers.below(4)) as usize];
                for _ in 0..numbers.below(40) {
                    if bench.requests.0.push(message(sent), &payload(sent, len)).is_err() {
                        break;
                    }
                    len_of.push(len);
                    sent += 1;
                }
                bench.requests.0.publish();
                while let Some(header) = bench.requests.1.peek().unwrap() {
                    let few = 1 + numbers.below(64) as usize;
                    let count = bench.requests.1.peek_alike(&header, &mut tags[..few]).unwrap();
                    prop_assert!(count >= 1 && count as usize <= few);
                    let of_these = &len_of[taken as usize..][..count as usize];
                    prop_assert!(of_these.iter().all(|len| *len == header.len as usize));
                    let single = shape.protocol != protocol::DOORBELL || header.flags != 0;
                    if single || numbers.below(4) == 0 {
                        prop_assert!(!single || count == 1);
                        let (tag, bytes) = read(&mut bench.requests.1).unwrap();
                        prop_assert_eq!((tag, &bytes), (taken, &payload(taken, len_of[taken as usize])));
                        // Put as it is, if there is room.
                        put = taken + 1;
                        taken += 1;
                        continue;
                    }
                    prop_assert_eq!(&tags[..count as usize], &(taken..taken + u64::from(count)).collect::<Vec<_>>()[..]);
                    let stride = header.len.next_multiple_of(16);
                    let buffer = bench.pool.take(64 << 6).expect("it comes back");
                    let stride = stride.max(8 * numbers.below(9) as u32);
                    prop_assert!(count * stride <= buffer.bytes());
                    bench.pool.write_from(&buffer, stride, &bench.requests.1, (count, header.len));
                    bench.requests.1.advance_by(count);
                    bench.requests.1.release();
                    taken += u64::from(count);
                    // And back to the client.
                    while put < taken {
                        let place = (put + u64::from(count) - taken) as u32;
                        let left = &tags[place as usize..count as usize];
                        let at = (place * stride, stride, header.len);
                        let head = Head { kind: kind::MESSAGE, ..Head::default() };
                        let n = bench.pool.push_to(&mut bench.replies.0, (head, left), &buffer, at).unwrap();
                        bench.replies.0.publish();
                        let mut heard = 0;
                        while let Some((tag, bytes)) = read(&mut bench.replies.1) {
                            prop_assert_eq!((tag, &bytes), (put, &payload(put, header.len as usize)));
                            put += 1;
                            heard += 1;
                        }
                        prop_assert_eq!(heard, n);
                        prop_assert_eq!(u64::from(n), (left.len() as u64).min(1 << depth));
                    }
                    bench.pool.give_back(buffer);
                }
            }
            prop_assert_eq!(taken, sent);
        }
    }

    /// A client overwrites its ring: nothing is read beyond it, and what is found has the length of the first.
    #[test]
    fn hostile_headers_and_heads_are_contained(seed in 1..u64::MAX) {
        let mut numbers = Numbers(seed);
        let shape = shapes()[0];
        let mut bench = bench(shape, 8, 5);
        let buffer = bench.pool.take(4096).unwrap();
        let mut tags = [0; 64];
        for tag in 0..8 {
            bench.requests.0.push(message(tag), &payload(tag, 40)).unwrap();
        }
        bench.requests.0.publish();
        for _ in 0..20 {
            for _ in 0..numbers.below(4) {
                let at = 8 * numbers.below(bench.memory.len_bytes() / 8);
                let value = numbers.hostile(bench.memory.load(at, Ordering::Relaxed));
                bench.memory.store(at, value, Ordering::Relaxed);
            }
            let Ok(Some(header)) = bench.requests.1.peek() else { continue };
            match bench.requests.1.peek_alike(&header, &mut tags) {
                Err(error) => prop_assert_eq!(error, RingError::Corrupt),
                Ok(count) => {
                    prop_assert!((1..=8).contains(&count));
                    if header.flags == 0 && header.len <= 61 {
                        bench.pool.write_from(&buffer, 64, &bench.requests.1, (count, header.len));
                    }
                    if numbers.below(2) == 0 {
                        bench.requests.1.advance_by(count);
                        bench.requests.1.release();
                    }
                }
            }
            let head = Head { kind: kind::MESSAGE, ..Head::default() };
            let put = bench.pool.push_to(&mut bench.replies.0, (head, &tags), &buffer, (3, 40, 40));
            prop_assert!(matches!(put, Ok(0..=8) | Err(LoanError::Corrupt)));
            bench.replies.0.publish();
        }
        bench.pool.give_back(buffer);
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

#[test]
fn replies_that_need_an_arena_or_units_are_not_put_together() {
    let head = Head { kind: kind::MESSAGE, ..Head::default() };
    for shape in shapes() {
        let mut bench = bench(shape, 8, 0);
        let buffer = bench.pool.take(16384).unwrap();
        let most = shape.message_bytes_max;
        let put =
            bench.pool.push_to(&mut bench.replies.0, (head, &[1, 2]), &buffer, (0, most, most));
        let fits = shape.protocol == protocol::DOORBELL && most <= 61;
        assert_eq!(put, Ok(if fits { 2 } else { 0 }), "{shape:?}");
        let none = bench.pool.push_to(&mut bench.replies.0, (head, &[]), &buffer, (0, 8, 8));
        assert_eq!(none, Ok(0));
        bench.pool.give_back(buffer);
    }
}

#[test]
#[should_panic(expected = "beyond the buffer")]
fn replies_beyond_a_buffer_are_not_put() {
    let mut bench = bench(shapes()[0], 8, 0);
    let buffer = bench.pool.take(4096).unwrap();
    let head = Head { kind: kind::MESSAGE, ..Head::default() };
    let _ = bench.pool.push_to(&mut bench.replies.0, (head, &[1, 2]), &buffer, (4000, 64, 40));
}

#[test]
#[should_panic(expected = "offset outside the region")]
fn rows_beyond_the_memory_are_not_copied() {
    let (from, to) = (HeapMapping::memory(128), HeapMapping::memory(128));
    to.copy_rows(Rows { at: 64, stride: 64, count: 2 }, &from, (0, 8), 8);
}
