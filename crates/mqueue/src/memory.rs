//! Shared memory as words: with `memory/`, the only file that names core atomics or touches raw pointers.
//!
//! Memory that another process, an accelerator or a hostile tenant can write at any time must never
//! become a Rust `&[u8]`. Here it is an array of 64-bit words accessed through atomic loads and
//! stores; payload is copied through relaxed ones, and the few words that
//! [`crate::ring`] and [`crate::region`] mark as edges provide the ordering. The ring code is generic over [`Memory`], so
//! that loom and Miri run the production code, except for the use of vector registers of x86-64 by [`MappedMemory`]:
//! native tests compare that with the generic code, length by length.

/// A vector instruction in the form that the build uses: an SSE form costs hundreds of
/// cycles in a program built for AVX while the upper halves of the registers are in use.
#[cfg(all(target_arch = "x86_64", not(miri), target_feature = "avx"))]
macro_rules! vector {
    ($instruction:literal) => {
        concat!("v", $instruction)
    };
}
#[cfg(all(target_arch = "x86_64", not(miri), not(target_feature = "avx")))]
macro_rules! vector {
    ($instruction:literal) => {
        $instruction
    };
}

mod moves;
pub(crate) mod strings;
mod units;

use std::sync::Arc;
pub use std::sync::atomic::Ordering;
use std::sync::atomic::{AtomicU8, AtomicU64};

use moves::{copy_in, copy_out, whole_pieces};
#[cfg(all(target_arch = "x86_64", not(miri)))]
use moves::{move_bytes, move_pieces, move_rows};
use units::{Unit8s, Unit16s};

/// A range of mapped memory that stays mapped for as long as the value lives.
///
/// # Safety
///
/// For the whole lifetime of the value, `base()` is the same non-null address, aligned to 128 bytes, and
/// `len_bytes()` bytes from there stay mapped readable and writable (a shrinking file behind a
/// mapping would turn an access into SIGBUS: implementations seal it). All other code, in this process
/// or another, may access the range only through atomics.
pub unsafe trait Mapping: Send + Sync + 'static {
    /// First byte.
    fn base(&self) -> *mut u8;
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
}

/// Strings in memory at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Where the first begins.
    pub at: u64,
    /// Distance in bytes.
    pub stride: u64,
    /// How many there are.
    pub count: u64,
}

impl Rows {
    /// Where one of them begins.
    #[inline]
    fn row(&self, row: u64) -> u64 {
        self.at + row * self.stride
    }

    /// The bytes from the first to the end of the last, of `len_bytes` each; `u64::MAX` if that is too many.
    #[inline]
    fn bytes(&self, len_bytes: u64) -> u64 {
        let others = self.count.saturating_sub(1);
        others.saturating_mul(self.stride).saturating_add(len_bytes)
    }
}

/// Word access to a region's memory. Offsets are in bytes and multiples of 8 (16 for units of 16);
/// an offset outside the memory panics.
pub trait Memory: Clone {
    /// Length in bytes.
    fn len_bytes(&self) -> u64;
    /// Loads the word at `at`.
    fn load(&self, at: u64, order: Ordering) -> u64;
    /// Stores the word at `at`.
    fn store(&self, at: u64, value: u64, order: Ordering);

    /// A full fence: this side's earlier stores come before its later loads (edge `PARK`).
    #[inline]
    fn fence(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Earlier accesses of this side come before its later stores. On x86-64 only the compiler is restricted.
    #[inline]
    fn release_fence(&self) {
        std::sync::atomic::fence(Ordering::Release);
    }

    /// Earlier loads of this side come before its later accesses. On x86-64 only the compiler is restricted.
    #[inline]
    fn acquire_fence(&self) {
        std::sync::atomic::fence(Ordering::Acquire);
    }

    /// Hints that a cache line's worth of bytes at `at` is about to be read (or, `for_write`, written).
    #[inline]
    fn prefetch(&self, _at: u64, _for_write: bool) {}

    /// Whether aligned 16-byte accesses are single-copy atomic (the `granule16` protocol).
    fn has_unit16(&self) -> bool {
        false
    }

    /// Loads a unit of the `granule` protocols, relaxed and in one access: `WORDS` 32-bit words of
    /// data (1, or 3 if [`Self::has_unit16`]) and a sequence.
    #[inline]
    fn load_unit<const WORDS: usize>(&self, at: u64) -> ([u32; WORDS], u32) {
        assert!(WORDS == 1, "granule16 is refused if 16-byte accesses are not atomic");
        let word = self.load(at, Ordering::Relaxed);
        ([word as u32; WORDS], (word >> 32) as u32)
    }

    /// Stores a unit, relaxed and in one access.
    #[inline]
    fn store_unit<const WORDS: usize>(&self, at: u64, data: [u32; WORDS], sequence: u32) {
        assert!(WORDS == 1, "granule16 is refused if 16-byte accesses are not atomic");
        self.store(at, pair(data[0], sequence), Ordering::Relaxed);
    }

    /// Stores a message of the `granule` protocols: its string of header and payload in units with this sequence.
    #[inline]
    fn store_string<const WORDS: usize>(
        &self,
        at: u64,
        header: [u64; 4],
        payload: &[u8],
        sequence: u32,
    ) {
        strings::store_string::<Self, WORDS>(self, at, header, payload, sequence);
    }

    /// Loads a message's header, if all its units have this sequence.
    #[inline]
    fn load_header<const WORDS: usize>(&self, at: u64, sequence: u32) -> Option<[u64; 4]> {
        strings::load_header::<Self, WORDS>(self, at, sequence)
    }

    /// Loads a message's payload; false if one of its units has another sequence.
    #[inline]
    fn load_payload<const WORDS: usize>(&self, at: u64, payload: &mut [u8], sequence: u32) -> bool {
        strings::load_payload::<Self, WORDS>(self, at, payload, sequence)
    }

    /// Copies the payload of the message in the units at `from_at` in other memory to words at `at`; the last word is
    /// padded with zeros. False if a unit has another sequence; the data of such a unit is not stored.
    #[inline]
    fn copy_payload<const WORDS: usize>(
        &self,
        at: u64,
        from: &Self,
        from_at: u64,
        len_bytes: u64,
        sequence: u32,
    ) -> bool {
        strings::copy_units::<Self, WORDS>(self, at, (from, from_at), len_bytes, sequence)
    }

    /// [`Self::store_string`] with the payload in words at `from_at` in other memory. Concurrent writes there
    /// may or may not be included; bytes after `len_bytes` in the last word are not.
    #[inline]
    fn copy_string<const WORDS: usize>(
        &self,
        at: u64,
        header: [u64; 4],
        from: &Self,
        from_at: u64,
        len_bytes: u64,
        sequence: u32,
    ) {
        let from = (from, from_at);
        strings::copy_string::<Self, WORDS>(self, at, header, from, len_bytes, sequence);
    }

    /// Loads consecutive words, relaxed.
    #[inline]
    fn load_words<const N: usize>(&self, at: u64) -> [u64; N] {
        std::array::from_fn(|i| self.load(at + 8 * i as u64, Ordering::Relaxed))
    }

    /// Stores consecutive words, relaxed.
    #[inline]
    fn store_words<const N: usize>(&self, at: u64, words: [u64; N]) {
        for (i, word) in words.into_iter().enumerate() {
            self.store(at + 8 * i as u64, word, Ordering::Relaxed);
        }
    }

    /// Stores words, and bytes directly after them as [`Self::copy_in`] does.
    #[inline]
    fn store_slot<const N: usize>(&self, at: u64, words: [u64; N], bytes: &[u8]) {
        self.store_words(at, words);
        self.copy_in(at + 8 * N as u64, bytes);
    }

    /// Copies bytes in, by relaxed words; the last word is padded with zeros.
    #[inline]
    fn copy_in(&self, at: u64, bytes: &[u8]) {
        let mut at = at;
        for chunk in bytes.chunks(8) {
            self.store(at, word_of(chunk), Ordering::Relaxed);
            at += 8;
        }
    }

    /// Copies bytes from other memory, by relaxed words; the last word is padded with zeros.
    #[inline]
    fn copy_from(&self, at: u64, from: &Self, from_at: u64, len_bytes: u64) {
        for word in 0..len_bytes.div_ceil(8) {
            let value = from.load(from_at + 8 * word, Ordering::Relaxed);
            let value = value & mask_of(len_bytes - 8 * word);
            self.store(at + 8 * word, value, Ordering::Relaxed);
        }
    }

    /// Copies strings of `len_bytes` from any offset in other memory, where they are `from_stride` bytes apart, to rows that are aligned to
    /// words. What follows a string in its last word is undefined: bytes that were there, or zeros.
    #[inline]
    fn copy_rows(&self, to: Rows, from: &Self, (from_at, from_stride): (u64, u64), len_bytes: u64) {
        for row in 0..to.count {
            let at = from_at + row * from_stride;
            for done in (0..len_bytes).step_by(8) {
                let skip = (at + done) % 8;
                let mut value = from.load(at + done - skip, Ordering::Relaxed) >> (8 * skip);
                let left = len_bytes - done;
                if skip > 0 && left + skip > 8 {
                    let next = from.load(at + done - skip + 8, Ordering::Relaxed);
                    value |= next << (64 - 8 * skip);
                }
                self.store(to.row(row) + done, value & mask_of(left), Ordering::Relaxed);
            }
        }
    }

    /// Loads consecutive words from the beginning of each row, relaxed, until `each` returns false.
    #[inline]
    fn load_rows<const N: usize>(&self, rows: Rows, mut each: impl FnMut(u64, [u64; N]) -> bool) {
        for row in 0..rows.count {
            if !each(row, self.load_words(rows.row(row))) {
                return;
            }
        }
    }

    /// Stores consecutive words to the beginning of each row, relaxed.
    #[inline]
    fn store_rows<const N: usize>(&self, rows: Rows, words: impl Fn(u64) -> [u64; N]) {
        for row in 0..rows.count {
            self.store_words(rows.row(row), words(row));
        }
    }

    /// Copies bytes out, by relaxed words.
    #[inline]
    fn copy_out(&self, at: u64, bytes: &mut [u8]) {
        let mut at = at;
        for chunk in bytes.chunks_mut(8) {
            let word = self.load(at, Ordering::Relaxed).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
            at += 8;
        }
    }

    /// [`Self::copy_out`] from any offset.
    #[inline]
    fn copy_out_unaligned(&self, at: u64, bytes: &mut [u8]) {
        let skip = at % 8;
        if skip == 0 || bytes.is_empty() {
            return self.copy_out(at, bytes);
        }
        let mut at = at - skip;
        let mut word = self.load(at, Ordering::Relaxed);
        for chunk in bytes.chunks_mut(8) {
            let mut value = word >> (8 * skip);
            if chunk.len() as u64 + skip > 8 {
                at += 8;
                word = self.load(at, Ordering::Relaxed);
                value |= word << (64 - 8 * skip);
            }
            word_to(value, chunk);
        }
    }
}

/// The bits of a word's first `len_bytes` bytes, from 1; all of them from 8 on.
#[inline]
pub(crate) fn mask_of(len_bytes: u64) -> u64 {
    u64::MAX >> (64 - 8 * len_bytes.min(8))
}

/// Up to eight bytes as a word, zero padded. Without a loop or a call: overlapping pieces have the same content.
#[inline]
pub(crate) fn word_of(bytes: &[u8]) -> u64 {
    let len = bytes.len();
    if let (Some(first), Some(last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        let [first, last] = [*first, *last].map(|half| u64::from(u32::from_le_bytes(half)));
        return first | last << (8 * (len - 4));
    }
    let byte = |i: usize| u64::from(bytes[i]) << (8 * i);
    if len == 0 { 0 } else { byte(0) | byte(len / 2) | byte(len - 1) }
}

/// The first bytes of a word, up to eight, as [`word_of`] takes them.
#[inline]
fn word_to(word: u64, bytes: &mut [u8]) {
    let len = bytes.len();
    if let Some(first) = bytes.first_chunk_mut() {
        *first = (word as u32).to_le_bytes();
        let last = bytes.last_chunk_mut().expect("as long as the first");
        *last = ((word >> (8 * (len - 4))) as u32).to_le_bytes();
    } else if len > 0 {
        for i in [0, len / 2, len - 1] {
            bytes[i] = (word >> (8 * i)) as u8;
        }
    }
}

/// Bytes of a unit with `words` 32-bit words of data.
pub(crate) const fn unit_bytes(words: usize) -> u64 {
    4 * words as u64 + 4
}

/// Two 32-bit words as one, the first in the low half.
#[inline]
pub(crate) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Up to `4 * WORDS` bytes as words, zero padded.
#[inline]
pub(crate) fn words_from<const WORDS: usize>(bytes: &[u8]) -> [u32; WORDS] {
    debug_assert!(bytes.len() <= 4 * WORDS);
    let (whole, rest) = bytes.as_chunks::<4>();
    let mut words = [0; WORDS];
    for (word, chunk) in words.iter_mut().zip(whole) {
        *word = u32::from_le_bytes(*chunk);
    }
    if !rest.is_empty() {
        words[whole.len()] = word_of(rest) as u32;
    }
    words
}

/// The first bytes of `words`, as many as fit.
#[inline]
pub(crate) fn bytes_from<const WORDS: usize>(words: [u32; WORDS], bytes: &mut [u8]) {
    for (chunk, word) in bytes.chunks_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

#[cfg(target_endian = "big")]
compile_error!("the region layout is little endian");

/// [`Memory`] over a [`Mapping`].
#[derive(Clone)]
pub struct MappedMemory {
    base: *mut u8,
    len_words: u64,
    /// Number of 16-byte units; 0 if accesses of 16 bytes are not atomic.
    len_units16: u64,
    _mapping: Arc<dyn Mapping>,
}

// SAFETY: the pointer is only used for atomic accesses inside a mapping that `_mapping` keeps alive.
unsafe impl Send for MappedMemory {}
// SAFETY: as above; atomic accesses may happen from any number of threads.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Wraps a mapping. Panics if it is not aligned to 128 bytes (a broken [`Mapping`]).
    pub fn new(mapping: Arc<dyn Mapping>) -> Self {
        let base = mapping.base();
        assert!(base.addr() % 128 == 0, "a mapping must be aligned to 128 bytes");
        let units = mapping.len_bytes() as u64 / 16;
        let len_units16 = if unit16_is_atomic() { units } else { 0 };
        Self { base, len_words: 2 * units, len_units16, _mapping: mapping }
    }

    /// Address of the first byte, for handing the region to a kernel.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// `len` bytes from `at` on, which anyone may write at any time: for the host kernel, which sends from there and receives there.
    /// Panics if the memory does not have them.
    #[inline]
    pub fn cells(&self, at: u64, len: usize) -> &[AtomicU8] {
        let end = at.saturating_add(len as u64);
        assert!(end <= 8 * self.len_words, "outside the region");
        // SAFETY: in bounds, and alive while `self` holds the mapping. Cells may be written by anyone at any time.
        unsafe { std::slice::from_raw_parts(self.base.add(at as usize).cast(), len) }
    }

    #[inline]
    fn word(&self, at: u64) -> &AtomicU64 {
        // An offset that is not a multiple of 8 becomes a huge one.
        assert!(at.rotate_right(3) < self.len_words, "offset outside the region");
        // SAFETY: in bounds, aligned to 8 because the base is aligned to 128, alive while `self` holds the
        // mapping, and only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.base.add(at as usize).cast()) }
    }

    /// The `count` words from `at`: one check instead of one per word.
    #[inline]
    fn words(&self, at: u64, count: usize) -> &[AtomicU64] {
        // As in word(): the low bits of an unaligned offset become high bits.
        let end = (at >> 3).saturating_add(count as u64) | at << 61;
        assert!(end <= self.len_words, "offset outside the region");
        // SAFETY: as in word(), for every word of the range. A slice of atomics may be written by
        // anyone at any time.
        unsafe { std::slice::from_raw_parts(self.base.add(at as usize).cast(), count) }
    }
}

impl Memory for MappedMemory {
    #[inline]
    fn len_bytes(&self) -> u64 {
        8 * self.len_words
    }

    #[inline]
    fn load(&self, at: u64, order: Ordering) -> u64 {
        self.word(at).load(order)
    }

    #[inline]
    fn store(&self, at: u64, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }

    #[inline]
    fn load_words<const N: usize>(&self, at: u64) -> [u64; N] {
        let words = self.words(at, N);
        std::array::from_fn(|i| words[i].load(Ordering::Relaxed))
    }

    // Always inline, as store_slot() is.
    #[inline(always)]
    fn store_words<const N: usize>(&self, at: u64, values: [u64; N]) {
        for (word, value) in self.words(at, N).iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }

    // Always inline: words passed through memory are stored and loaded once more.
    #[inline(always)]
    fn store_slot<const N: usize>(&self, at: u64, values: [u64; N], bytes: &[u8]) {
        let words = self.words(at, N + bytes.len().div_ceil(8));
        let (head, rest) = words.split_at(N);
        for (word, value) in head.iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
        copy_in(bytes, rest);
    }

    #[inline]
    fn copy_in(&self, at: u64, bytes: &[u8]) {
        copy_in(bytes, self.words(at, bytes.len().div_ceil(8)));
    }

    #[inline]
    fn copy_from(&self, at: u64, from: &Self, from_at: u64, len_bytes: u64) {
        let count = len_bytes.div_ceil(8) as usize;
        let whole = len_bytes as usize / 8;
        let (to, from) = (self.words(at, count), from.words(from_at, count));
        let pieces = whole_pieces(8 * whole, to);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: whole_pieces() has counted, and both are that long.
        unsafe {
            move_pieces(from.as_ptr().cast(), to.as_ptr().cast_mut().cast(), pieces);
        }
        for (to, from) in to[pieces / 8..whole].iter().zip(&from[pieces / 8..whole]) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        if let (Some(to), Some(from)) = (to.get(whole), from.get(whole)) {
            let value = from.load(Ordering::Relaxed) & mask_of(len_bytes % 8);
            to.store(value, Ordering::Relaxed);
        }
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    fn copy_rows(&self, to: Rows, from: &Self, (from_at, from_stride): (u64, u64), len_bytes: u64) {
        if to.count == 0 || len_bytes == 0 {
            return;
        }
        assert!((to.at | to.stride) % 8 == 0, "rows that are not aligned");
        let source = Rows { at: from_at, stride: from_stride, count: to.count };
        for (memory, rows) in [(self, to), (from, source)] {
            let end = rows.at.saturating_add(rows.bytes(len_bytes));
            assert!(end <= 8 * memory.len_words, "offset outside the region");
        }
        // SAFETY: all bytes of both were counted, and both mappings are alive.
        unsafe {
            let (to_at, from_at) = (self.base.add(to.at as usize), from.base.add(from_at as usize));
            let strides = (from_stride as usize, to.stride as usize);
            move_rows(from_at, to_at, strides, to.count as usize, len_bytes as usize);
        }
    }

    #[inline]
    fn load_rows<const N: usize>(&self, rows: Rows, mut each: impl FnMut(u64, [u64; N]) -> bool) {
        if rows.count == 0 {
            return;
        }
        assert!(rows.stride % 8 == 0, "rows that are not aligned");
        let words = self.words(rows.at, (rows.bytes(8 * N as u64) / 8) as usize);
        for row in 0..rows.count {
            // SAFETY: the words of all rows were counted.
            let words = unsafe { row_of::<N>(words, row * rows.stride / 8) };
            if !each(row, words.each_ref().map(|word| word.load(Ordering::Relaxed))) {
                return;
            }
        }
    }

    #[inline]
    fn store_rows<const N: usize>(&self, rows: Rows, words: impl Fn(u64) -> [u64; N]) {
        if rows.count == 0 {
            return;
        }
        assert!(rows.stride % 8 == 0, "rows that are not aligned");
        let memory = self.words(rows.at, (rows.bytes(8 * N as u64) / 8) as usize);
        for row in 0..rows.count {
            // SAFETY: the words of all rows were counted.
            let places = unsafe { row_of::<N>(memory, row * rows.stride / 8) };
            for (place, word) in places.iter().zip(words(row)) {
                place.store(word, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    fn copy_out(&self, at: u64, bytes: &mut [u8]) {
        copy_out(self.words(at, bytes.len().div_ceil(8)), bytes);
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    fn copy_out_unaligned(&self, at: u64, bytes: &mut [u8]) {
        let end = at.checked_add(bytes.len() as u64);
        assert!(end.is_some_and(|end| end <= 8 * self.len_words), "offset outside the region");
        // SAFETY: the bytes were counted, and the mapping is alive.
        unsafe { move_bytes(self.base.add(at as usize), bytes) }
    }

    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    #[inline]
    fn prefetch(&self, at: u64, for_write: bool) {
        use std::arch::asm;
        let address = self.base.addr().wrapping_add(at as usize);
        // The intrinsic for a write is an ordinary prefetch unless the whole program is built for processors with
        // PREFETCHW, and then the first store still waits for the line. Processors without it ignore this one.
        // SAFETY: a prefetch is a hint: it has no visible effect and never faults.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match for_write {
                true => {
                    asm!("prefetchw [{}]", in(reg) address, options(nomem, nostack, preserves_flags))
                }
                false => {
                    asm!("prefetcht0 [{}]", in(reg) address, options(nomem, nostack, preserves_flags))
                }
            }
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            match for_write {
                true => {
                    asm!("prfm pstl1keep, [{}]", in(reg) address, options(nomem, nostack, preserves_flags))
                }
                false => {
                    asm!("prfm pldl1keep, [{}]", in(reg) address, options(nomem, nostack, preserves_flags))
                }
            }
        }
    }

    #[inline]
    fn has_unit16(&self) -> bool {
        self.len_units16 > 0
    }

    #[inline]
    fn load_unit<const WORDS: usize>(&self, at: u64) -> ([u32; WORDS], u32) {
        if WORDS == 1 {
            let word = self.load(at, Ordering::Relaxed);
            return ([word as u32; WORDS], (word >> 32) as u32);
        }
        Unit16s::of(self, at, 1).load(0)
    }

    #[inline]
    fn store_unit<const WORDS: usize>(&self, at: u64, data: [u32; WORDS], sequence: u32) {
        if WORDS == 1 {
            return self.store(at, pair(data[0], sequence), Ordering::Relaxed);
        }
        Unit16s::of(self, at, 1).store(0, data, sequence);
    }

    #[inline(always)]
    fn store_string<const WORDS: usize>(
        &self,
        at: u64,
        header: [u64; 4],
        payload: &[u8],
        sequence: u32,
    ) {
        match WORDS {
            1 => Unit8s::string(self, at, payload.len()).store_string(header, payload, sequence),
            _ => Unit16s::string(self, at, payload.len()).store_string(header, payload, sequence),
        }
    }

    #[inline(always)]
    fn load_header<const WORDS: usize>(&self, at: u64, sequence: u32) -> Option<[u64; 4]> {
        match WORDS {
            1 => Unit8s::string(self, at, 0).load_header(sequence),
            _ => Unit16s::string(self, at, 0).load_header(sequence),
        }
    }

    #[inline(always)]
    fn load_payload<const WORDS: usize>(&self, at: u64, payload: &mut [u8], sequence: u32) -> bool {
        match WORDS {
            1 => Unit8s::string(self, at, payload.len()).load_payload(payload, sequence),
            _ => Unit16s::string(self, at, payload.len()).load_payload(payload, sequence),
        }
    }

    #[inline(always)]
    fn copy_payload<const WORDS: usize>(
        &self,
        at: u64,
        from: &Self,
        from_at: u64,
        len_bytes: u64,
        sequence: u32,
    ) -> bool {
        let len = len_bytes as usize;
        let to = self.words(at, len.div_ceil(8));
        match WORDS {
            1 => Unit8s::string(from, from_at, len).copy_payload(to, len, sequence),
            _ => Unit16s::string(from, from_at, len).copy_payload(to, len, sequence),
        }
    }

    #[inline(always)]
    fn copy_string<const WORDS: usize>(
        &self,
        at: u64,
        header: [u64; 4],
        from: &Self,
        from_at: u64,
        len_bytes: u64,
        sequence: u32,
    ) {
        let len = len_bytes as usize;
        let from = from.words(from_at, len.div_ceil(8));
        match WORDS {
            1 => Unit8s::string(self, at, len).copy_string(header, from, len, sequence),
            _ => Unit16s::string(self, at, len).copy_string(header, from, len, sequence),
        }
    }
}

/// Whether aligned 16-byte accesses are single-copy atomic on this processor: x86-64 with AVX.
/// (Arm guarantees it with LSE2; 16-byte units are not implemented there yet.)
pub fn unit16_is_atomic() -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return std::arch::is_x86_feature_detected!("avx");
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    return false;
}

/// Zeroed memory on the heap: for worker-to-worker rings, the simulator and tests.
pub struct HeapMapping {
    base: *mut u8,
    layout: std::alloc::Layout,
}

impl HeapMapping {
    /// Allocates at least `len_bytes` bytes (rounded up to 128), zeroed.
    pub fn new(len_bytes: usize) -> Self {
        let len_bytes = len_bytes.max(1).next_multiple_of(128);
        let layout = std::alloc::Layout::from_size_align(len_bytes, 128).expect("a sane size");
        // SAFETY: the layout has a size above zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        if base.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Self { base, layout }
    }

    /// The same as a [`MappedMemory`].
    pub fn memory(len_bytes: usize) -> MappedMemory {
        MappedMemory::new(Arc::new(Self::new(len_bytes)))
    }
}

impl Drop for HeapMapping {
    fn drop(&mut self) {
        // SAFETY: allocated in new() with the same layout.
        unsafe { std::alloc::dealloc(self.base, self.layout) }
    }
}

// SAFETY: owned memory without a Rust reference to it; accesses are atomic by the Mapping contract.
unsafe impl Send for HeapMapping {}
// SAFETY: as above.
unsafe impl Sync for HeapMapping {}
// SAFETY: allocated until drop, aligned to 128, never moved.
unsafe impl Mapping for HeapMapping {
    fn base(&self) -> *mut u8 {
        self.base
    }
    fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}
/// The words of a row that begins at word `at`: one check for all rows instead of one for each.
///
/// # Safety
///
/// There are `N` words from `at` on.
#[inline]
unsafe fn row_of<const N: usize>(words: &[AtomicU64], at: u64) -> &[AtomicU64; N] {
    debug_assert!(at as usize + N <= words.len());
    // SAFETY: the caller's promise; an array of atomics may be written by anyone at any time.
    unsafe { &*words.as_ptr().add(at as usize).cast() }
}
