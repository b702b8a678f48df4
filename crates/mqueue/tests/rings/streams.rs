//! Stream rings: any sequence of writes and reads moves every byte once and in order, and a hostile other side affects only
//! what it sends.

use std::collections::VecDeque;
use std::mem::offset_of;

use crate::support::victims::Fenced;
use crate::support::{Choose, Numbers};
use mqueue::abi::{RegionHeader, SocketMessage, socket_op, stream_word};
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    ByteReader, ByteWriter, HeapMapping, MappedMemory, MqueuePlan, Region, RegionPlan, RingPlan,
    byte_ring_bytes,
};
use proptest::prelude::*;

const AT: u64 = 256;

fn memory(capacity: u64) -> MappedMemory {
    HeapMapping::memory((AT + byte_ring_bytes(capacity) + 256) as usize)
}

fn byte(n: u64) -> u8 {
    (n ^ (n >> 8) ^ (n >> 16)).wrapping_mul(97) as u8
}

/// What one side does.
#[derive(Clone, Debug)]
enum Step {
    Write { head: usize, body: usize },
    Read(usize),
    End,
    Restart { by_writer: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0..20_usize, 0..300_usize).prop_map(|(head, body)| Step::Write { head, body }),
        4 => (0..9_usize, 0..9_usize).prop_map(|(head, body)| Step::Write { head, body }),
        10 => (0..300_usize).prop_map(Step::Read),
        4 => (0..9_usize).prop_map(Step::Read),
        1 => Just(Step::End),
        1 => any::<bool>().prop_map(|by_writer| Step::Restart { by_writer }),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 400 }))]

    /// Against a queue of bytes; the room is all of the ring but words that hold bytes which were not read.
    #[test]
    fn a_stream_is_a_queue_of_bytes(steps in steps(), power in 3..9_u32) {
        let capacity = 1 << power;
        let memory = memory(capacity);
        let mut writer = ByteWriter::new(memory.clone(), AT, capacity);
        let mut reader = ByteReader::new(memory.clone(), AT, capacity);
        let (mut queue, mut written, mut ended, mut streams) = (VecDeque::new(), 0, false, 0);
        for step in steps {
            match step {
                Step::Write { .. } if ended => {}
                Step::Write { head, body } => {
                    let bytes: Vec<u8> = (written..).take(head + body).map(|n| byte(n + streams)).collect();
                    let tail = written - queue.len() as u64;
                    let room = (capacity - (written - (tail & !7))) as usize;
                    prop_assert_eq!(writer.room(), Ok(room));
                    let count = writer.write(&bytes[..head], &bytes[head..]).unwrap();
                    prop_assert_eq!(count, room.min(bytes.len()));
                    queue.extend(&bytes[..count]);
                    written += count as u64;
                }
                Step::Read(most) => {
                    let mut bytes = vec![0xee; most];
                    let count = reader.read(&mut bytes).unwrap();
                    prop_assert_eq!(count, most.min(queue.len()));
                    prop_assert!(bytes[..count].iter().eq(queue.drain(..count).collect::<Vec<u8>>().iter()));
                    prop_assert!(bytes[count..].iter().all(|byte| *byte == 0xee));
                }
                Step::End => {
                    writer.set_end(3);
                    ended = true;
                }
                Step::Restart { by_writer } => {
                    if by_writer {
                        writer.restart();
                        reader.forget();
                    } else {
                        reader.restart();
                        writer.forget();
                    }
                    queue.clear();
                    (written, ended, streams) = (0, false, streams + 1);
                }
            }
            prop_assert_eq!((writer.position(), reader.available()), (written, Ok(queue.len())));
            prop_assert_eq!(writer.taken(), Ok(written - queue.len() as u64));
            prop_assert_eq!(reader.ended(), Ok((ended && queue.is_empty()).then_some(3)));
        }
        // Nothing but the ring was written.
        for at in (0..AT).chain(AT + byte_ring_bytes(capacity)..memory.len_bytes()).step_by(8) {
            prop_assert_eq!(memory.load(at & !7, Ordering::Relaxed), 0);
        }
    }
}

/// One side in fenced memory, while the other one stores anything anywhere in the ring. Its calls may fail, but count only bytes that
/// were there, and access only what is theirs.
#[test]
fn a_hostile_side_cannot_lead_the_other_out_of_the_ring() {
    let (mut moved, mut broken) = (0, 0);
    for round in 0..if cfg!(miri) { 6 } else { 3000 } {
        let mut numbers = Numbers(round * 7919 + 1);
        let capacity = 8 << numbers.below(6);
        let plain = memory(capacity);
        let (near, far) = (Fenced::new(plain.clone()), Fenced::new(plain.clone()));
        let word = |word: u64| AT + word..AT + word + 8;
        let data = AT + stream_word::DATA..AT + stream_word::DATA + capacity;
        let mine = [stream_word::HEAD, stream_word::HEAD_END].map(word);
        let theirs = [stream_word::TAIL, stream_word::TAIL_END].map(word);
        let with_data = |words: &[_; 2]| words.iter().cloned().chain([data.clone()]).collect();
        let mut writer = ByteWriter::new(near.clone(), AT, capacity);
        let mut reader = ByteReader::new(far.clone(), AT, capacity);
        near.allow(theirs.to_vec(), with_data(&mine));
        far.allow(with_data(&mine), theirs.to_vec());
        for _ in 0..60 {
            if numbers.below(4) == 0 {
                let at = [
                    stream_word::HEAD,
                    stream_word::TAIL,
                    stream_word::HEAD_END,
                    stream_word::TAIL_END,
                ];
                let at = AT + at[numbers.below(4) as usize];
                plain.store(
                    at,
                    numbers.hostile(plain.load(at, Ordering::Relaxed)),
                    Ordering::Relaxed,
                );
            }
            let len = numbers.below(2 * capacity) as usize;
            let bytes = vec![7; len];
            let split = numbers.below(len as u64 + 1) as usize;
            let result = match numbers.below(2) {
                0 => writer.write(&bytes[..split], &bytes[split..]),
                _ => reader.read(&mut vec![0; len]),
            };
            match result {
                Ok(count) => {
                    assert!(count <= len && count as u64 <= capacity);
                    moved += count;
                }
                Err(_) => broken += 1,
            }
            let _ = (writer.reader_end(), reader.ended());
            assert!(
                writer.room().is_ok_and(|room| room as u64 <= capacity) || writer.taken().is_err()
            );
        }
    }
    assert!(moved > 1000 && broken > 10, "{moved} bytes, {broken} errors");
}

fn with_sockets() -> RegionPlan {
    let ring = RingPlan::doorbell(16, 0);
    RegionPlan::of_blocks(1, &[MqueuePlan { depth: 2, rx: ring, tx: ring }], 1)
        .with_sockets(2, 4096, 2)
}

/// Every word of the entries of stream rings, changed to hostile values: the region is refused, or its streams are safe to use.
#[test]
fn a_changed_entry_of_a_stream_is_refused_or_safe() {
    let memory = HeapMapping::memory(with_sockets().bytes().unwrap() as usize);
    let region = Region::format(memory.clone(), &with_sockets()).unwrap();
    let directory =
        memory.load(offset_of!(RegionHeader, directory_offset) as u64, Ordering::Relaxed);
    let entries = directory + 128 * region.entries().len() as u64;
    let (mut numbers, mut joined, mut refused) = (Numbers(5), 0, 0);
    for at in (entries..entries + 4 * 128).step_by(if cfg!(miri) { 56 } else { 8 }) {
        let word = memory.load(at, Ordering::Relaxed);
        for round in 0..if cfg!(miri) { 2 } else { 200 } {
            let hostile = numbers.hostile(word);
            let value = match round % 3 {
                0 => hostile,
                1 => word & !0xffff_ffff | hostile & 0xffff_ffff,
                _ => word & 0xffff_ffff | hostile << 32,
            };
            memory.store(at, value, Ordering::Relaxed);
            match Region::join(memory.clone()) {
                Ok(mut region) => {
                    for (mut writer, mut reader) in region.engine_streams(0) {
                        writer.restart();
                        reader.restart();
                        assert_eq!(writer.write(&[], &[1; 5000]), Ok(4096));
                        assert_eq!(reader.read(&mut [0; 8]), Ok(0));
                    }
                    joined += 1;
                }
                Err(_) => refused += 1,
            }
        }
        memory.store(at, word, Ordering::Relaxed);
    }
    assert!(joined > 10 && refused > 10 || cfg!(miri), "{joined} joined, {refused} refused");
}

#[test]
fn a_socket_message_survives_its_bytes() {
    let message = SocketMessage { op: socket_op::CLOSE, slot: 63, generation: u32::MAX, value: 1 };
    let bytes = message.to_bytes();
    assert_eq!(bytes, [3, 0, 0, 0, 63, 0, 0, 0, 255, 255, 255, 255, 1, 0, 0, 0]);
    assert_eq!(SocketMessage::from_bytes(bytes), message);
}
