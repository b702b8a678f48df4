//! Hostile shared memory: regions that are joined, and rings whose peer misbehaves.

#[allow(dead_code, reason = "shared with the tests of mqueue, which use more of it")]
#[path = "../../crates/mqueue/tests/support/mod.rs"]
mod support;

use mqueue::command::{BufferRange, Copy, Direction, Done, Request};
use mqueue::memory::{Memory, Ordering};
use mqueue::{HeapMapping, MappedMemory, Region};
use support::victims::{Seen, use_words, victims};
use support::{ring as formatted, shapes};

pub(crate) use support::Choose;

/// Largest memory that is joined, in bytes.
const REGION_BYTES_MAX: usize = 64 << 10;
/// Number of operations that both ends of a ring perform on a region that can be joined.
const OPERATIONS: usize = 64;

/// Decisions from the input: small ones use a byte. Zeros once it is used up.
pub(crate) struct Tape<'a> {
    rest: &'a [u8],
}

impl<'a> Tape<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn byte(&mut self) -> u64 {
        let Some((first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        u64::from(*first)
    }
}

impl Choose for Tape<'_> {
    fn next(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte() as u8))
    }

    fn below(&mut self, end: u64) -> u64 {
        match end {
            0..=256 => self.byte() % end,
            257..=65_536 => (self.byte() | self.byte() << 8) % end,
            _ => self.next() % end,
        }
    }
}

/// Untrusted memory: the input is its content.
pub fn region(input: &[u8]) {
    let input = &input[..input.len().min(REGION_BYTES_MAX)];
    let memory = memory_of(input);
    let Ok(mut region) = Region::join(memory.clone()) else { return };
    let (mut tape, mut seen) = (Tape::new(input), Seen::default());
    // Every ring, both ends; an access outside the memory panics.
    for mqueue in 0..region.mqueue_count().min(8) {
        // The directory's information about it is consistent.
        let (block, _) = region.role(mqueue);
        assert!(region.mqueues_of(block).contains(&mqueue));
        let entries = region.directory_of(block);
        assert!(entries.len() >= 2 * region.mqueues_of(block).len());
        let (mut producer, mut consumer) = region.engine_ends(mqueue);
        let len = producer.credit().unwrap_or(0) as usize;
        let _ = producer.push(support::head(1), &support::payload(1, len));
        producer.publish();
        for _ in 0..OPERATIONS {
            match consumer.peek() {
                Ok(Some(header)) => {
                    let mut received = vec![0; header.len as usize];
                    let _ = consumer.copy_out(&header, &mut received);
                    consumer.advance();
                }
                Ok(None) | Err(mqueue::RingError::Corrupt) => break,
                Err(mqueue::RingError::BadHeader) => consumer.advance(),
            }
        }
        consumer.release();
    }
    // Both ends of every pair of command rings.
    if let Ok(mut far) = Region::join(memory.clone()) {
        for pair in 0..region.command_rings().min(far.command_rings()) {
            let mut sender = region.command_sender(pair);
            let mut receiver = far.command_receiver(pair);
            let (offset, bytes) = region.staging(pair);
            assert!(offset.checked_add(bytes).is_some_and(|end| end <= region.bytes()));
            for number in 0..OPERATIONS as u64 {
                if let Ok(Some((number, command))) = receiver.command() {
                    let status = command.err().unwrap_or(0);
                    let range = (number % 2 == 0)
                        .then_some(BufferRange { address: !number, bytes: number });
                    let _ = receiver.complete(&Done { number, status, range });
                }
                let _ = sender.completion();
                let request = match number % 3 {
                    0 => Request::Describe(number as u32),
                    _ => Request::Copy(copy(number)),
                };
                let _ = sender.send(number, &request);
            }
        }
    }
    // Both ends of every stream.
    if let Ok(mut far) = Region::join(memory.clone()) {
        for block in 0..region.block_count().min(far.block_count()).min(8) {
            let ends = region.engine_streams(block).into_iter().zip(far.block_streams(block));
            for ((mut to, mut from), (mut recv, mut send)) in ends {
                for len in 0..OPERATIONS {
                    let bytes = vec![len as u8; len];
                    let _ = (to.write(&bytes, &bytes), send.write(&[], &bytes));
                    let mut received = vec![0; len];
                    let _ = (recv.read(&mut received), from.read(&mut received));
                    let _ = (recv.ended(), to.taken(), send.reader_end());
                }
                to.restart();
                from.restart();
                assert_eq!((to.room(), from.available()), (Ok(to.capacity() as usize), Ok(0)));
            }
        }
    }
    // The first ring once more, with access limited to its directory entry.
    if let Ok(mut ends) = victims(&memory_of(input)) {
        for _ in 0..OPERATIONS {
            ends.step(&mut tape, &mut seen);
        }
    }
    use_words(&Region::join(memory).map(|region| region.words()), &mut tape);
}

fn copy(number: u64) -> Copy {
    let direction = if number % 2 == 0 { Direction::ToBuffer } else { Direction::FromBuffer };
    Copy { direction, staging_offset: 8 * number, buffer: 0, buffer_offset: 0, bytes: 8 }
}

fn memory_of(bytes: &[u8]) -> MappedMemory {
    let memory = HeapMapping::memory(bytes.len());
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    for (at, word) in (0..).step_by(8).zip(words) {
        memory.store(at, word, Ordering::Relaxed);
    }
    memory
}

/// A valid ring whose words and slots the other side overwrites while both ends work. The first bytes
/// select the ring, the others the operations.
pub fn ring(input: &[u8]) {
    let mut tape = Tape::new(input);
    let shapes = shapes();
    let shape = shapes[tape.below(shapes.len() as u64) as usize];
    let depth = 1 << tape.below(5);
    let start = [0, (1 << 31) - 3, (1 << 32) - 5, 1 << 60][tape.below(4) as usize];
    let ring = formatted(shape, depth, start);
    let mut ends = victims(&ring.memory).expect("a region that was just formatted");
    let mut seen = Seen::default();
    while !tape.is_empty() {
        match tape.below(8) {
            0..3 => ends.scribble(&mut tape),
            3 => ends.restore(),
            _ => ends.step(&mut tape, &mut seen),
        }
    }
    // Whatever the ring contains now, reading it to its end terminates.
    let mut read = 0;
    while matches!(ends.consumer.peek(), Ok(Some(_)) | Err(mqueue::RingError::BadHeader)) {
        ends.consumer.advance();
        read += 1;
        assert!(read <= depth, "more messages than slots");
    }
}
