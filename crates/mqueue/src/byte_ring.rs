//! A stream of bytes in shared memory, from one writer to one reader.
//!
//! ```text
//! 0     head       bytes written                   stored by the writer
//! 8     head end   0, or how the writer ended      stored by the writer
//! 128   tail       bytes read                      stored by the reader
//! 136   tail end   0, or how the reader ended      stored by the reader
//! 256   reader     1: it sleeps                    stored by the reader
//! 384   writer     1: it sleeps                    stored by the writer
//! 512   data       `capacity` bytes, a power of two
//! ```
//!
//! Any number of bytes can be written and read, and none are between those of two writes. Memory is accessed in whole words: the
//! writer remembers the bytes of an incomplete last word, and stores the word again with the bytes that follow; the reader ignores
//! bytes from the head on. So a word is written by one side only, and bulk is copied as it is elsewhere. Neither side believes the
//! other: a head or tail that is impossible is an error, and all accesses stay inside the ring.

use crate::abi::stream_word::{DATA, HEAD, HEAD_END, TAIL, TAIL_END};
use crate::memory::{Memory, Ordering, word_of};

const READER_SLEEPS: u64 = 256;
const WRITER_SLEEPS: u64 = 384;

/// Bytes that a ring of this capacity takes.
pub const fn byte_ring_bytes(capacity: u64) -> u64 {
    DATA + capacity
}

/// The other side has stored an impossible head or tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other side of a ring of bytes has stored an impossible position")]
pub struct BrokenRing;

/// A ring's place.
#[derive(Clone)]
struct Ring<M> {
    memory: M,
    at: u64,
    capacity: u64,
}

impl<M: Memory> Ring<M> {
    fn new(memory: M, at: u64, capacity: u64) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= 8, "a ring of {capacity} bytes");
        assert!(at % 128 == 0, "a ring must be aligned to 128 bytes");
        let end = at.saturating_add(byte_ring_bytes(capacity));
        assert!(end <= memory.len_bytes(), "a ring ends at {end}");
        Self { memory, at, capacity }
    }

    fn store(&self, word: u64, value: u64, order: Ordering) {
        self.memory.store(self.at + word, value, order);
    }

    fn load(&self, word: u64, order: Ordering) -> u64 {
        self.memory.load(self.at + word, order)
    }

    /// Offset of the word that holds the byte at `position`.
    fn word(&self, position: u64) -> u64 {
        self.at + DATA + (position & (self.capacity - 1) & !7)
    }

    /// The two parts of the ring that hold the `len` bytes from `position`, a multiple of 8.
    fn parts(&self, position: u64, len: usize) -> (u64, u64, usize) {
        let start = position & (self.capacity - 1);
        let first = len.min((self.capacity - start) as usize);
        (self.at + DATA + start, self.at + DATA, first)
    }

    /// Zeroes the words of both sides but those of sleepers.
    fn restart(&self) {
        for word in [HEAD, HEAD_END, TAIL, TAIL_END] {
            self.store(word, 0, Ordering::Relaxed);
        }
    }

    fn copy_in(&self, position: u64, bytes: &[u8]) {
        let (first, second, split) = self.parts(position, bytes.len());
        self.memory.copy_in(first, &bytes[..split]);
        self.memory.copy_in(second, &bytes[split..]);
    }

    fn copy_out(&self, position: u64, bytes: &mut [u8]) {
        let (first, second, split) = self.parts(position, bytes.len());
        self.memory.copy_out(first, &mut bytes[..split]);
        self.memory.copy_out(second, &mut bytes[split..]);
    }

    /// Sets a word of a side that is about to sleep. It has to look at the ring once more afterwards.
    fn set_sleeping(&self, word: u64, sleeps: bool) {
        self.store(word, sleeps.into(), Ordering::Relaxed);
        if sleeps {
            // EDGE PARK (sleeper half)
            self.memory.fence();
        }
    }

    /// Whether the other side has to be woken, after a store of head or tail.
    fn sleeps(&self, word: u64) -> bool {
        // EDGE PARK (waker half)
        self.memory.fence();
        self.load(word, Ordering::Relaxed) != 0
    }
}

/// The writing end.
pub struct ByteWriter<M> {
    ring: Ring<M>,
    head: u64,
    /// The word that contains the head: its bytes below the head, the others are zero.
    last_word: u64,
    /// The tail as it was last seen.
    tail: u64,
}

impl<M: Memory> ByteWriter<M> {
    /// The writing end of the ring at `at` (a multiple of 128) in zeroed memory. There must be only one.
    pub fn new(memory: M, at: u64, capacity: u64) -> Self {
        Self { ring: Ring::new(memory, at, capacity), head: 0, last_word: 0, tail: 0 }
    }

    /// Bytes for which there is room now.
    pub fn room(&mut self) -> Result<usize, BrokenRing> {
        self.taken()?;
        Ok(self.known_room())
    }

    /// How many bytes the reader has read.
    pub fn taken(&mut self) -> Result<u64, BrokenRing> {
        // EDGE BYTES_RELEASE (acquire half): what the reader has released may be overwritten.
        let tail = self.ring.load(TAIL, Ordering::Acquire);
        // It never goes back, and never passes the head.
        if self.head.wrapping_sub(tail) > self.head.wrapping_sub(self.tail) {
            return Err(BrokenRing);
        }
        self.tail = tail;
        Ok(tail)
    }

    /// Room according to the tail as it was last seen. The word that contains the tail may have bytes which are not read.
    fn known_room(&self) -> usize {
        if mutants::on("reuse_word") {
            return (self.ring.capacity - (self.head - self.tail)) as usize;
        }
        (self.ring.capacity - (self.head - (self.tail & !7))) as usize
    }

    /// Writes as much of `head` followed by `body` as there is room for; returns how much.
    pub fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, BrokenRing> {
        let total = head.len() + body.len();
        let known = self.known_room();
        let room = if known >= total { known } else { self.room()? };
        let count = total.min(room);
        if count == 0 {
            return Ok(0);
        }
        let from_head = count.min(head.len());
        self.put(&head[..from_head]);
        self.put(&body[..count - from_head]);
        // EDGE BYTES_PUBLISH (release half): a reader that sees the head sees the bytes below it.
        self.ring.store(HEAD, self.head, Ordering::Release);
        Ok(count)
    }

    /// Puts bytes, for which there is room, after the head.
    fn put(&mut self, bytes: &[u8]) {
        let shift = self.head % 8;
        let (completing, rest) = match shift {
            0 => (&[][..], bytes),
            _ => bytes.split_at(bytes.len().min(8 - shift as usize)),
        };
        if !completing.is_empty() {
            self.last_word |= word_of(completing) << (8 * shift);
            self.ring.memory.store(self.ring.word(self.head), self.last_word, Ordering::Relaxed);
            self.head += completing.len() as u64;
        }
        if !rest.is_empty() {
            self.ring.copy_in(self.head, rest);
            self.head += rest.len() as u64;
            self.last_word = word_of(&rest[rest.len() & !7..]);
        } else if self.head % 8 == 0 {
            self.last_word = 0;
        }
    }

    /// How many bytes were written.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// Bytes that the ring holds at most.
    pub fn capacity(&self) -> u64 {
        self.ring.capacity
    }

    /// Says that no byte follows, with a status other than 0.
    pub fn set_end(&self, status: u64) {
        // EDGE BYTES_END (release half): a reader that sees the end sees the last head.
        self.ring.store(HEAD_END, status, Ordering::Release);
    }

    /// The status with which the reader takes no more bytes; 0 while it does.
    pub fn reader_end(&self) -> u64 {
        // EDGE BYTES_END (acquire half)
        self.ring.load(TAIL_END, Ordering::Acquire)
    }

    /// Starts another stream in the same ring, which the other side does not access at present: zeroes the words of both.
    pub fn restart(&mut self) {
        self.ring.restart();
        self.forget();
    }

    /// Starts another stream after the other side has called `restart`, and has passed that on with an edge.
    pub fn forget(&mut self) {
        (self.head, self.last_word, self.tail) = (0, 0, 0);
    }

    /// Whether the reader has to be woken after a write.
    pub fn reader_sleeps(&self) -> bool {
        self.ring.sleeps(READER_SLEEPS)
    }

    /// Says that this end sleeps until there is room, or no longer. Before it sleeps it has to look for room once more.
    pub fn set_sleeping(&self, sleeps: bool) {
        self.ring.set_sleeping(WRITER_SLEEPS, sleeps);
    }
}

/// The reading end.
pub struct ByteReader<M> {
    ring: Ring<M>,
    tail: u64,
    /// The head as it was last seen.
    head: u64,
}

impl<M: Memory> ByteReader<M> {
    /// The reading end of the ring at `at` (a multiple of 128) in zeroed memory. There must be only one.
    pub fn new(memory: M, at: u64, capacity: u64) -> Self {
        Self { ring: Ring::new(memory, at, capacity), tail: 0, head: 0 }
    }

    /// Bytes that can be read now.
    pub fn available(&mut self) -> Result<usize, BrokenRing> {
        // EDGE BYTES_PUBLISH (acquire half)
        let head = self.ring.load(HEAD, Ordering::Acquire);
        let available = head.wrapping_sub(self.tail);
        // It never goes back, and never leaves the ring.
        if !(self.head.wrapping_sub(self.tail)..=self.ring.capacity).contains(&available) {
            return Err(BrokenRing);
        }
        self.head = head;
        Ok(available as usize)
    }

    /// Reads as much as there is and fits; returns how much.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, BrokenRing> {
        let known = self.head.wrapping_sub(self.tail) as usize;
        let available = if known >= into.len() { known } else { self.available()? };
        let count = available.min(into.len());
        if count == 0 {
            return Ok(0);
        }
        self.get(&mut into[..count]);
        // EDGE BYTES_RELEASE (release half): the copy is complete.
        self.ring.store(TAIL, self.tail, Ordering::Release);
        Ok(count)
    }

    /// Copies as much as there is and fits, and leaves it in the ring; returns how much. [`Self::advance`] takes it.
    pub fn peek(&mut self, into: &mut [u8]) -> Result<usize, BrokenRing> {
        let count = self.available()?.min(into.len());
        let tail = self.tail;
        self.get(&mut into[..count]);
        self.tail = tail;
        Ok(count)
    }

    /// Takes this many of the bytes that [`Self::peek`] copied.
    pub fn advance(&mut self, count: usize) {
        debug_assert!(count as u64 <= self.head.wrapping_sub(self.tail), "they were peeked");
        self.tail += count as u64;
        // EDGE BYTES_RELEASE (release half): the copy is complete.
        self.ring.store(TAIL, self.tail, Ordering::Release);
    }

    /// Copies bytes, which are available, from the tail on.
    fn get(&mut self, into: &mut [u8]) {
        let shift = (self.tail % 8) as usize;
        let started = if shift == 0 { 0 } else { into.len().min(8 - shift) };
        let (started, rest) = into.split_at_mut(started);
        if !started.is_empty() {
            let word = self.ring.memory.load(self.ring.word(self.tail), Ordering::Relaxed);
            started.copy_from_slice(&word.to_le_bytes()[shift..shift + started.len()]);
            self.tail += started.len() as u64;
        }
        if !rest.is_empty() {
            self.ring.copy_out(self.tail, rest);
            self.tail += rest.len() as u64;
        }
    }

    /// How many bytes were read.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Bytes that the ring holds at most.
    pub fn capacity(&self) -> u64 {
        self.ring.capacity
    }

    /// Says that this end takes no more bytes, with a status other than 0.
    pub fn set_end(&self, status: u64) {
        // EDGE BYTES_END (release half)
        self.ring.store(TAIL_END, status, Ordering::Release);
    }

    /// The status with which the writer has ended; 0 while it has not. Bytes may be left, also such that were not available before: see
    /// [`Self::ended`].
    pub fn writer_end(&self) -> u64 {
        // EDGE BYTES_END (acquire half): what comes after this sees the last head.
        self.ring.load(HEAD_END, Ordering::Acquire)
    }

    /// The status with which the stream has ended, once all its bytes were read.
    pub fn ended(&mut self) -> Result<Option<u64>, BrokenRing> {
        if mutants::on("end_before_bytes") {
            let is_empty = self.available()? == 0;
            return Ok(Some(self.writer_end()).filter(|end| *end != 0 && is_empty));
        }
        let end = self.writer_end();
        // The head after the end.
        Ok((end != 0 && self.available()? == 0).then_some(end))
    }

    /// Starts another stream in the same ring, which the other side does not access at present: zeroes the words of both.
    pub fn restart(&mut self) {
        self.ring.restart();
        self.forget();
    }

    /// Starts another stream after the other side has called `restart`, and has passed that on with an edge.
    pub fn forget(&mut self) {
        (self.tail, self.head) = (0, 0);
    }

    /// Whether the writer has to be woken after a read.
    pub fn writer_sleeps(&self) -> bool {
        self.ring.sleeps(WRITER_SLEEPS)
    }

    /// Says that this end sleeps until there are bytes, or no longer. Before it sleeps it has to look for bytes once more.
    pub fn set_sleeping(&self, sleeps: bool) {
        self.ring.set_sleeping(READER_SLEEPS, sleeps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HeapMapping;

    const CAPACITY: u64 = 64;

    fn ends() -> (ByteWriter<crate::MappedMemory>, ByteReader<crate::MappedMemory>) {
        let memory = HeapMapping::memory(1024);
        let writer = ByteWriter::new(memory.clone(), 128, CAPACITY);
        (writer, ByteReader::new(memory, 128, CAPACITY))
    }

    fn bytes(from: u64, len: usize) -> Vec<u8> {
        (from..from + len as u64).map(|n| (n * 7 + (n >> 8) + 1) as u8).collect()
    }

    /// Every length at every place of a word, across the end of the ring and into the same word again.
    #[test]
    fn any_number_of_bytes_is_written_and_read() {
        let (mut writer, mut reader) = ends();
        let (mut written, mut read) = (0, 0);
        let steps = if cfg!(miri) { 300 } else { 30_000 };
        for step in 0..steps {
            let (head, body) = (step % 11, step * 5 % 83);
            let sent = bytes(written, head + body);
            let room = CAPACITY - (written - (read & !7));
            let count = writer.write(&sent[..head], &sent[head..]).unwrap();
            assert_eq!(count as u64, room.min(sent.len() as u64), "step {step}");
            written += count as u64;
            assert_eq!(writer.position(), written);
            let mut got = vec![0; step * 3 % 71];
            let count = reader.read(&mut got).unwrap();
            assert_eq!(count as u64, (written - read).min(got.len() as u64), "step {step}");
            assert!(got[..count] == bytes(read, count), "step {step}");
            read += count as u64;
            assert_eq!((reader.position(), writer.taken()), (read, Ok(read)));
            assert_eq!(reader.available(), Ok((written - read) as usize));
        }
        assert!(read > 5 * steps as u64, "{read}");
    }

    #[test]
    fn a_full_ring_takes_bytes_in_whole_words_again() {
        let (mut writer, mut reader) = ends();
        assert_eq!(writer.write(&[], &bytes(0, 70)), Ok(64));
        assert_eq!(reader.read(&mut [0; 7]), Ok(7));
        // The first word still has a byte that was not read.
        assert_eq!(writer.room(), Ok(0));
        assert_eq!(reader.read(&mut [0; 2]), Ok(2));
        assert_eq!(writer.write(&[], &bytes(64, 70)), Ok(8));
        let mut got = [0; 80];
        assert_eq!(reader.read(&mut got), Ok(63));
        assert!(got[..63] == bytes(9, 63));
    }

    #[test]
    fn a_stream_ends_after_its_last_byte() {
        let (mut writer, mut reader) = ends();
        assert_eq!((reader.ended(), writer.reader_end()), (Ok(None), 0));
        writer.write(&[], &bytes(0, 5)).unwrap();
        writer.set_end(3);
        assert_eq!((reader.writer_end(), reader.ended()), (3, Ok(None)));
        assert_eq!(reader.read(&mut [0; 4]), Ok(4));
        assert_eq!(reader.ended(), Ok(None));
        assert_eq!(reader.read(&mut [0; 4]), Ok(1));
        assert_eq!(reader.ended(), Ok(Some(3)));
        reader.set_end(6);
        assert_eq!(writer.reader_end(), 6);
    }

    /// As the engine starts the next connection in a slot's rings, whichever end it has.
    #[test]
    fn a_ring_is_used_again_from_the_start() {
        for by_writer in [true, false] {
            let (mut writer, mut reader) = ends();
            writer.write(&[], &bytes(0, 61)).unwrap();
            reader.read(&mut [0; 13]).unwrap();
            writer.set_end(3);
            reader.set_end(6);
            if by_writer {
                writer.restart();
                reader.forget();
            } else {
                reader.restart();
                writer.forget();
            }
            assert_eq!((writer.position(), reader.position()), (0, 0));
            assert_eq!((writer.reader_end(), reader.ended()), (0, Ok(None)));
            assert_eq!((writer.room(), reader.available()), (Ok(CAPACITY as usize), Ok(0)));
            assert_eq!(writer.write(&[], &bytes(7, 3)), Ok(3));
            let mut got = [0; 8];
            assert_eq!(reader.read(&mut got), Ok(3));
            assert!(got[..3] == bytes(7, 3));
        }
    }

    #[test]
    fn impossible_positions_are_errors() {
        for head in [65, 72, u64::MAX, u64::MAX - 7, 1 << 40] {
            let (_, mut reader) = ends();
            reader.ring.store(HEAD, head, Ordering::Relaxed);
            assert_eq!(reader.read(&mut [0; 8]), Err(BrokenRing), "{head}");
            reader.set_end(3);
            reader.ring.store(HEAD_END, 3, Ordering::Relaxed);
            assert_eq!(reader.ended(), Err(BrokenRing), "{head}");
        }
        for tail in [9, 16, u64::MAX, u64::MAX - 7] {
            let (mut writer, _) = ends();
            writer.write(&[], &[1; 8]).unwrap();
            writer.ring.store(TAIL, tail, Ordering::Relaxed);
            assert_eq!(writer.write(&[], &[0; 64]), Err(BrokenRing), "{tail}");
            assert_eq!(writer.taken(), Err(BrokenRing), "{tail}");
        }
        // Positions never go back.
        let (mut writer, mut reader) = ends();
        writer.write(&[], &[1; 64]).unwrap();
        reader.read(&mut [0; 9]).unwrap();
        reader.ring.store(HEAD, 56, Ordering::Relaxed);
        assert_eq!(reader.read(&mut [0; 64]), Err(BrokenRing));
        writer.taken().unwrap();
        writer.ring.store(TAIL, 8, Ordering::Relaxed);
        assert_eq!(writer.room(), Err(BrokenRing));
    }
}
