//! A connection's rings are used again for the next one: CLOSE gives them to the engine, which starts them again, and DONE gives
//! them back to the block.
//!
//! The slots of the socket mqueue are plain memory here, because the models of rings cover them. Its heads are loom's, and so are the words of the stream
//! rings; their data are cells.

use mqueue::abi::stream_word::{DATA, HEAD, TAIL};
use mqueue::abi::{SocketMessage, socket_event, socket_op};
use mqueue::{ByteReader, ByteWriter};

use super::*;

const CAPACITY: u64 = mqueue::abi::STREAM_BYTES_MIN;

/// The kinds of words, and the heads of the socket mqueue: of its TX ring, which has CLOSE, and of its RX ring, which has DONE.
fn kinds(region: &Region<mqueue::MappedMemory>) -> (Kinds, [u64; 2]) {
    let [done, close] = region.rings_of(region.mqueues_of(0)[1]).map(|ring| ring.head_offset);
    let rings = region.streams_of(0)[0];
    let words = rings.iter().flat_map(|ring| [HEAD, TAIL].map(|at| word(ring.offset + at)));
    let kinds = Kinds {
        atomic: words.chain([word(done), word(close)]).collect(),
        owned: rings.iter().map(|ring| word(ring.offset + DATA)).collect(),
    };
    (kinds, [close, done])
}

fn send(producer: &mut Out, op: u32) {
    let message = SocketMessage { op, slot: 0, generation: 1, value: 0 };
    producer.push(head(0), &message.to_bytes()).unwrap();
    producer.publish();
}

fn wait_for(consumer: &mut In) {
    while consumer.peek().unwrap().is_none() {
        thread::yield_now();
    }
    consumer.advance();
    consumer.release();
}

fn write(writer: &mut ByteWriter<LoomMemory>, n: u8) {
    assert_eq!(writer.write(&[], &[n; 8]), Ok(8), "the ring is empty");
}

fn read(reader: &mut ByteReader<LoomMemory>, n: u8) {
    let mut got = [0; 8];
    while reader.read(&mut got).unwrap() == 0 {
        thread::yield_now();
    }
    assert_eq!(got, [n; 8], "the bytes");
}

fn again(weak: impl Fn([u64; 2]) -> Weak) -> impl Fn() + Sync + Send {
    let ring = RingPlan::doorbell(8, 0);
    let mqueue = MqueuePlan { depth: 1, rx: ring, tx: ring };
    let plan = RegionPlan::of_blocks(1, &[mqueue], 1).with_sockets(1, CAPACITY, 1);
    let heap = mqueue::HeapMapping::memory(plan.bytes().unwrap() as usize);
    let (kinds, heads) = kinds(&Region::format(heap, &plan).unwrap());
    let weak = weak(heads);
    move || {
        let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
        let mut engine = Region::format(memory.clone(), &plan).unwrap();
        let mut accelerator = Region::join(memory).unwrap();
        let (mut events, mut commands) = engine.engine_ends(1);
        let (mut completions, mut closes) = accelerator.accelerator_ends(1);
        let (mut to_block, mut from_block) = engine.engine_streams(0).remove(0);
        let (mut recv, mut send_to) = accelerator.block_streams(0).remove(0);
        write(&mut to_block, 1);
        let block = thread::spawn(move || {
            read(&mut recv, 1);
            write(&mut send_to, 2);
            send(&mut closes, socket_op::CLOSE);
            wait_for(&mut completions);
            recv.forget();
            send_to.forget();
            read(&mut recv, 3);
            write(&mut send_to, 4);
        });
        wait_for(&mut commands);
        assert_eq!(from_block.available(), Ok(8), "the bytes before CLOSE");
        read(&mut from_block, 2);
        to_block.restart();
        from_block.restart();
        send(&mut events, socket_event::DONE);
        write(&mut to_block, 3);
        read(&mut from_block, 4);
        block.join().unwrap();
    }
}

holds! {
    a_slot_is_used_again: again(|_| Weak::Nothing);
}

fails! {
    close_without_release: again(|[close, _]| Weak::Release(close)), "the bytes before CLOSE";
    close_without_acquire: again(|[close, _]| Weak::Acquire(close)), "the bytes before CLOSE";
    done_without_release: again(|[_, done]| Weak::Release(done)), "Causality violation";
    done_without_acquire: again(|[_, done]| Weak::Acquire(done)), "Causality violation";
}
