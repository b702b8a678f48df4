//! A worker's pool: memory for the messages of bundles and their replies, in buffers of three sizes.
//!
//! Which buffer is free is known only to the engine, in its own memory: the accelerator can write all of the pool at any time,
//! and nothing in it is believed. A [`Buffer`] has one owner, because it cannot be copied. The buffer that was given back last is
//! used first: its lines are in the cache. Nothing is allocated after the start.

use crate::abi::PoolEntry;
use crate::memory::Memory;
use crate::ring::{Consumer, Head, LoanError, Producer};

/// The sizes of buffers in bytes.
pub const BUFFER_BYTES: [u32; 3] = [4 << 10, 16 << 10, 64 << 10];
const CLASSES: usize = BUFFER_BYTES.len();

/// Memory of a pool that has one owner. It must be given back to its pool, unless the generation has ended.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a buffer that is dropped is lost to its pool"]
pub struct Buffer {
    offset: u64,
    number: u32,
    class: u8,
}

impl Buffer {
    /// Its offset in the region, a multiple of the smallest buffer's size.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its size in bytes: one of [`BUFFER_BYTES`].
    pub fn bytes(&self) -> u32 {
        BUFFER_BYTES[usize::from(self.class)]
    }
}

/// The engine's view of a worker's pool. See the module's text.
pub struct Pool<M: Memory> {
    memory: M,
    classes: [Class; CLASSES],
}

/// The buffers of one size, which are contiguous.
struct Class {
    /// Offset in the region.
    offset: u64,
    /// Numbers of free buffers; the last is used first. Its capacity is the number of buffers.
    free: Vec<u32>,
    /// Of each buffer: whether it has an owner.
    taken: Box<[bool]>,
}

impl Class {
    fn new(offset: u64, buffers: u64) -> Self {
        // The plan limits the memory to less than 2³² of the smallest buffers.
        let buffers = buffers as u32;
        let taken = vec![false; buffers as usize].into_boxed_slice();
        Self { offset, free: (0..buffers).rev().collect(), taken }
    }
}

/// How many buffers of each size a pool of `bytes` has: half of it in the largest, a quarter in each of the others.
fn division(bytes: u64) -> [u64; CLASSES] {
    let [small, middle, large] = BUFFER_BYTES.map(u64::from);
    let larges = bytes / 2 / large;
    let rest = bytes - larges * large;
    let middles = rest / 2 / middle;
    [(rest - middles * middle) / small, middles, larges]
}

impl<M: Memory> Pool<M> {
    /// `entry` was checked by [`crate::region`].
    pub(crate) fn new(memory: M, entry: &PoolEntry) -> Self {
        let counts = division(entry.bytes);
        // The largest first: their alignment is that of the pool.
        let mut offset = entry.offset;
        let mut classes = [0, 1, 2].map(|_| Class::new(0, 0));
        for class in (0..CLASSES).rev() {
            classes[class] = Class::new(offset, counts[class]);
            offset += counts[class] * u64::from(BUFFER_BYTES[class]);
        }
        Self { memory, classes }
    }

    /// The region's memory, in which the buffers are.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Takes a buffer of at least `bytes`: the smallest that is free. `None` if there is none, or none is that large.
    #[inline]
    pub fn take(&mut self, bytes: u32) -> Option<Buffer> {
        for (at, class) in self.classes.iter_mut().enumerate() {
            if bytes > BUFFER_BYTES[at] {
                continue;
            }
            if let Some(number) = class.free.pop() {
                class.taken[number as usize] = true;
                if mutants::on("lend_twice") {
                    class.free.push(number);
                }
                let offset = class.offset + u64::from(number) * u64::from(BUFFER_BYTES[at]);
                return Some(Buffer { offset, number, class: at as u8 });
            }
        }
        None
    }

    /// Gives a buffer back. Every message in it was ended by its block, in slots that were read before this call. Panics if the
    /// buffer is of another pool.
    #[inline]
    pub fn give_back(&mut self, buffer: Buffer) {
        // EDGE BUNDLE_RETURN (acquire half): after the slots that ended its messages, before it is written again.
        self.memory.acquire_fence();
        let Buffer { offset, number, class } = buffer;
        let bytes = u64::from(BUFFER_BYTES[usize::from(class)]);
        let class = &mut self.classes[usize::from(class)];
        let taken = class.taken.get_mut(number as usize);
        let of_pool = offset == class.offset + u64::from(number) * bytes;
        assert!(of_pool && taken.is_some_and(std::mem::take), "a buffer of another pool");
        class.free.push(number);
    }

    /// Size of the largest buffer that is free; 0 if the pool is dry.
    #[inline]
    pub fn largest_free(&self) -> u32 {
        let free = |class: &usize| !self.classes[*class].free.is_empty();
        (0..CLASSES).rev().find(free).map_or(0, |class| BUFFER_BYTES[class])
    }

    /// How many buffers of each size there are, and how many of them are free.
    pub fn buffers(&self) -> [(u32, u32); CLASSES] {
        self.classes.each_ref().map(|class| (class.taken.len() as u32, class.free.len() as u32))
    }

    /// How many buffers of at least that many bytes are free.
    pub fn free_of(&self, bytes: u32) -> u32 {
        let fitting = self.classes.iter().zip(BUFFER_BYTES).filter(|(_, size)| *size >= bytes);
        fitting.map(|(class, _)| class.free.len() as u32).sum()
    }

    /// Whether every buffer is free.
    pub fn is_whole(&self) -> bool {
        self.buffers().iter().all(|(all, free)| all == free)
    }

    /// Copies messages into a buffer from byte `at`, a multiple of 8, on: one message, or several without gaps. The rest of the last
    /// word is overwritten. Panics if they do not fit.
    #[inline]
    pub fn write(&self, buffer: &Buffer, at: u32, messages: &[u8]) {
        self.memory.copy_in(self.place(buffer, at, messages.len()), messages);
    }

    /// Copies the payloads of the next `count` messages of a ring to the beginning of a buffer, `stride` bytes apart, a multiple of 8:
    /// what [`Consumer::peek_alike`] found, of `len` bytes each. Panics if they do not fit.
    #[inline]
    pub fn write_from(
        &self,
        buffer: &Buffer,
        stride: u32,
        ring: &Consumer<M>,
        (count, len): (u32, u32),
    ) {
        let bytes = u64::from(count - 1) * u64::from(stride) + u64::from(len);
        let at = self.place(buffer, 0, bytes.next_multiple_of(8) as usize);
        ring.copy_alike(count, len, (&self.memory, at, stride.into()));
    }

    /// Puts messages with these tags into a ring, whose payloads of `len` bytes lie in a buffer from byte `at` on, `stride` bytes apart. They
    /// may change at any time. Returns how many; see [`Producer`]: fewer if there are fewer free slots, none if the ring's slots are too small or
    /// it is not `doorbell`. Panics if the buffer does not have that many bytes.
    #[inline]
    pub fn push_to(
        &self,
        ring: &mut Producer<M>,
        (head, tags): (Head, &[u64]),
        buffer: &Buffer,
        (at, stride, len): (u32, u32, u32),
    ) -> Result<u32, LoanError> {
        let Some(others) = (tags.len() as u64).checked_sub(1) else { return Ok(0) };
        let bytes = others * u64::from(stride) + u64::from(len);
        let at = self.place(buffer, at, bytes as usize);
        ring.push_alike(head, tags, (&self.memory, at, stride.into()), len)
    }

    /// Copies bytes out of a buffer from byte `at` on. They may change at any time: the copy is what counts. Panics if the buffer
    /// does not have that many.
    #[inline]
    pub fn read(&self, buffer: &Buffer, at: u32, bytes: &mut [u8]) {
        self.memory.copy_out_unaligned(self.place(buffer, at, bytes.len()), bytes);
    }

    /// Hints that the bytes of a buffer from `at` on are about to be read, or written.
    #[inline]
    pub fn prefetch(&self, buffer: &Buffer, at: u32, for_write: bool) {
        self.memory.prefetch(buffer.offset + u64::from(at), for_write);
    }

    /// The offset in the region of byte `at` of a buffer, from which on it has `len` bytes.
    #[inline]
    fn place(&self, buffer: &Buffer, at: u32, len: usize) -> u64 {
        let fits =
            (buffer.bytes() as usize).checked_sub(at as usize).is_some_and(|left| len <= left);
        assert!(fits, "beyond the buffer");
        buffer.offset + u64::from(at)
    }
}

#[cfg(test)]
mod tests {
    use super::{BUFFER_BYTES, division};

    #[test]
    fn a_pool_is_divided_without_a_rest() {
        for bytes in (4096..4 << 20).step_by(4096) {
            let counts = division(bytes);
            let sum: u64 =
                counts.iter().zip(BUFFER_BYTES).map(|(n, size)| n * u64::from(size)).sum();
            assert_eq!(sum, bytes, "{counts:?}");
        }
        assert_eq!(division(4096), [1, 0, 0]);
        assert_eq!(division(1 << 20), [64, 16, 8]);
    }
}
