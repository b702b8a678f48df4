//! A stream of bytes in shared memory, from one writer to one reader, for frames whose length both know.
//!
//! ```text
//! 0     head     bytes written     stored by the writer
//! 128   tail     bytes read        stored by the reader
//! 256   reader   1: it sleeps      stored by the reader
//! 384   writer   1: it sleeps      stored by the writer
//! 512   data     `capacity` bytes, a power of two
//! ```
//!
//! Words are copied whole, so every piece of a frame but its last one has a multiple of 8 bytes, and a frame takes a multiple of 8
//! bytes in the ring. Neither side believes the other: a head or tail that is impossible is an error, and all accesses stay inside
//! the ring.

use crate::memory::{Memory, Ordering};

const HEAD: u64 = 0;
const TAIL: u64 = 128;
const READER_SLEEPS: u64 = 256;
const WRITER_SLEEPS: u64 = 384;
const DATA: u64 = 512;

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

    /// The two parts of the ring that hold the `len` bytes from `position`.
    fn parts(&self, position: u64, len: usize) -> (u64, u64, usize) {
        let start = position & (self.capacity - 1);
        let first = len.min((self.capacity - start) as usize);
        (self.at + DATA + start, self.at + DATA, first)
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
    /// The tail as it was last seen.
    tail: u64,
}

impl<M: Memory> ByteWriter<M> {
    /// The writing end of the ring at `at` (a multiple of 128) in zeroed memory. There must be only one.
    pub fn new(memory: M, at: u64, capacity: u64) -> Self {
        Self { ring: Ring::new(memory, at, capacity), head: 0, tail: 0 }
    }

    /// Bytes for which there is room now.
    pub fn room(&mut self) -> Result<usize, BrokenRing> {
        // EDGE BYTES_RELEASE (acquire half): what the reader has released may be overwritten.
        let tail = self.ring.load(TAIL, Ordering::Acquire);
        let used = self.head.wrapping_sub(tail);
        if used > self.head.wrapping_sub(self.tail) || tail % 8 != 0 {
            return Err(BrokenRing);
        }
        self.tail = tail;
        Ok((self.ring.capacity - used) as usize)
    }

    /// Writes as much of `head` followed by `body` as there is room for; returns how much. The length of `head`, and what is
    /// returned, is a multiple of 8, or ends a frame.
    pub fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, BrokenRing> {
        let total = head.len() + body.len();
        let known = self.ring.capacity - self.head.wrapping_sub(self.tail);
        let room = if known >= total as u64 + 8 { known as usize } else { self.room()? };
        // Room is a multiple of 8.
        let count = total.min(room);
        if count == 0 {
            return Ok(0);
        }
        let from_head = count.min(head.len());
        self.ring.copy_in(self.head, &head[..from_head]);
        self.ring.copy_in(self.head + from_head as u64, &body[..count - from_head]);
        self.head += (count as u64).next_multiple_of(8);
        // EDGE BYTES_PUBLISH (release half): a reader that sees the head sees the bytes below it.
        self.ring.store(HEAD, self.head, Ordering::Release);
        Ok(count)
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
        let is_sane = available <= self.ring.capacity
            && available >= self.head.wrapping_sub(self.tail)
            && head % 8 == 0;
        if !is_sane {
            return Err(BrokenRing);
        }
        self.head = head;
        Ok(available as usize)
    }

    /// Reads as much as there is and fits; returns how much. The length of `into` is a multiple of 8, or ends a frame.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, BrokenRing> {
        let known = self.head.wrapping_sub(self.tail) as usize;
        let available = if known >= into.len() { known } else { self.available()? };
        let count = available.min(into.len());
        if count == 0 {
            return Ok(0);
        }
        self.ring.copy_out(self.tail, &mut into[..count]);
        self.tail += (count as u64).next_multiple_of(8);
        // EDGE BYTES_RELEASE (release half): the copy is complete.
        self.ring.store(TAIL, self.tail, Ordering::Release);
        Ok(count)
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

    #[test]
    fn frames_of_any_length_arrive_whole_in_pieces_of_any_length() {
        let (mut writer, mut reader) = ends();
        for len in 0..200usize {
            let frame: Vec<u8> = (0..8 + len).map(|at| (at * 7 + len) as u8).collect();
            let (mut sent, mut got, mut received) = (0, 0, vec![0; frame.len()]);
            while got < frame.len() {
                let head = &frame[sent.min(8)..8];
                sent += writer.write(head, &frame[sent.max(8)..]).unwrap();
                let most = (got + 8 * (1 + len % 9)).min(frame.len());
                got += reader.read(&mut received[got..most]).unwrap();
            }
            assert!(received == frame, "{len}");
            assert_eq!(reader.available(), Ok(0));
            assert_eq!(writer.room(), Ok(CAPACITY as usize));
        }
    }

    #[test]
    fn impossible_positions_are_errors() {
        for head in [4, 72, u64::MAX - 7, 1 << 40] {
            let (_, mut reader) = ends();
            reader.ring.store(HEAD, head, Ordering::Relaxed);
            assert_eq!(reader.read(&mut [0; 8]), Err(BrokenRing), "{head}");
        }
        for tail in [4, 16, u64::MAX - 7] {
            let (mut writer, _) = ends();
            writer.write(&[], &[1; 8]).unwrap();
            writer.ring.store(TAIL, tail, Ordering::Relaxed);
            assert_eq!(writer.write(&[], &[0; 64]), Err(BrokenRing), "{tail}");
        }
        // Positions never go back.
        let (mut writer, mut reader) = ends();
        writer.write(&[], &[1; 64]).unwrap();
        reader.read(&mut [0; 8]).unwrap();
        reader.ring.store(HEAD, 56, Ordering::Relaxed);
        assert_eq!(reader.read(&mut [0; 64]), Err(BrokenRing));
    }
}
