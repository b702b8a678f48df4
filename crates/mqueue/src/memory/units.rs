//! The strings of the `granule` protocols in mapped memory: the algorithms of [`crate::granule`] with one bounds
//! check per message, and 16-byte units moved as a whole through vector registers of x86-64.
//!
//! Four bytes of a payload share the third 16-byte unit with the header, so a unit's data `[12 * i + 4, 12 * i + 16)`
//! ends at the end of the 16 bytes from `12 * i` on: a vector load that ends there stays inside the payload, and its
//! first four bytes belong to the previous unit. A store starts at the data, and its last four bytes, zeros, belong to the next unit.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_castps_si128, _mm_castsi128_ps, _mm_cvtsi128_si32,
    _mm_cvtsi128_si64, _mm_move_ss, _mm_or_si128, _mm_set_epi32, _mm_set_epi64x, _mm_set1_epi32,
    _mm_setzero_si128, _mm_shuffle_epi32, _mm_slli_si128, _mm_srli_si128, _mm_unpackhi_epi64,
    _mm_xor_si128,
};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{MappedMemory, mask_of, pair, word_of, word_to};

/// Units of 8 bytes that hold the header.
const HEADER8: usize = 8;

/// The 8-byte units of one message.
#[derive(Clone, Copy)]
pub(super) struct Unit8s<'a>(&'a [AtomicU64]);

impl<'a> Unit8s<'a> {
    /// The units from `at` that hold a header and `payload_bytes` of payload.
    #[inline]
    pub(super) fn string(memory: &'a MappedMemory, at: u64, payload_bytes: usize) -> Self {
        Self(memory.words(at, HEADER8 + payload_bytes.div_ceil(4)))
    }

    #[inline]
    pub(super) fn store_string(self, header: [u64; 4], payload: &[u8], sequence: u32) {
        let units = self.store_header(header, sequence);
        let store = |unit: &AtomicU64, data| unit.store(pair(data, sequence), Ordering::Relaxed);
        let (whole, rest) = payload.as_chunks::<4>();
        for (unit, data) in units.iter().zip(whole) {
            store(unit, u32::from_le_bytes(*data));
        }
        if let Some(unit) = units.get(whole.len()) {
            store(unit, word_of(rest) as u32);
        }
    }

    /// Stores the header; returns the units after it.
    #[inline]
    fn store_header(self, header: [u64; 4], sequence: u32) -> &'a [AtomicU64] {
        let (header_units, units) = self.0.split_at(HEADER8);
        let store = |unit: &AtomicU64, data| unit.store(pair(data, sequence), Ordering::Relaxed);
        for (units, word) in header_units.as_chunks::<2>().0.iter().zip(header) {
            store(&units[0], word as u32);
            store(&units[1], (word >> 32) as u32);
        }
        units
    }

    /// As [`super::Memory::copy_string`], from as many words as the payload takes.
    #[inline]
    pub(super) fn copy_string(
        self,
        header: [u64; 4],
        from: &[AtomicU64],
        len: usize,
        sequence: u32,
    ) {
        let units = self.store_header(header, sequence);
        let store = |unit: &AtomicU64, data| unit.store(pair(data, sequence), Ordering::Relaxed);
        for (i, (units, word)) in units.chunks(2).zip(from).enumerate() {
            let word = word.load(Ordering::Relaxed) & mask_of((len - 8 * i) as u64);
            store(&units[0], word as u32);
            if let Some(unit) = units.get(1) {
                store(unit, (word >> 32) as u32);
            }
        }
    }

    #[inline]
    pub(super) fn load_header(self, sequence: u32) -> Option<[u64; 4]> {
        let unit = |i: usize| self.0[i].load(Ordering::Relaxed);
        // If there is no message, only this unit is read.
        let first = unit(0);
        if (first >> 32) as u32 != sequence {
            return None;
        }
        let mut wrong = 0;
        let words = std::array::from_fn(|i| {
            let low = if i == 0 { first } else { unit(2 * i) };
            let high = unit(2 * i + 1);
            wrong |= ((low >> 32) as u32 ^ sequence) | ((high >> 32) as u32 ^ sequence);
            pair(low as u32, high as u32)
        });
        (wrong == 0).then_some(words)
    }

    #[inline]
    pub(super) fn load_payload(self, payload: &mut [u8], sequence: u32) -> bool {
        let units = &self.0[HEADER8..];
        let (whole, rest) = payload.as_chunks_mut::<4>();
        let mut wrong = 0;
        let mut load = |unit: &AtomicU64| {
            let unit = unit.load(Ordering::Relaxed);
            wrong |= (unit >> 32) as u32 ^ sequence;
            unit as u32
        };
        for (data, unit) in whole.iter_mut().zip(units) {
            *data = load(unit).to_le_bytes();
        }
        if let Some(unit) = units.get(whole.len()) {
            word_to(load(unit).into(), rest);
        }
        wrong == 0
    }

    /// As [`super::Memory::copy_payload`].
    #[inline]
    pub(super) fn copy_payload(self, to: &[AtomicU64], len: usize, sequence: u32) -> bool {
        let units = &self.0[HEADER8..];
        let load = |i: usize| {
            let unit = units[i].load(Ordering::Relaxed);
            ((unit >> 32) as u32 == sequence).then_some(unit as u32)
        };
        for (i, word) in to.iter().enumerate() {
            // An odd number of units ends with half a word.
            let high = if 2 * i + 1 < units.len() { load(2 * i + 1) } else { Some(0) };
            let (Some(low), Some(high)) = (load(2 * i), high) else { return false };
            word.store(pair(low, high) & mask_of((len - 8 * i) as u64), Ordering::Relaxed);
        }
        true
    }
}

/// A checked range of 16-byte units.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(all(target_arch = "x86_64", not(miri))),
    allow(dead_code, reason = "no range is created if 16-byte accesses are not atomic")
)]
pub(super) struct Unit16s<'a> {
    base: *mut u8,
    count: usize,
    _memory: &'a MappedMemory,
}

/// Maximum number of units moved together.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const RUN: usize = 8;

/// `$move!(0 1 2 ...)` with as many numbers as there are units, at most [`RUN`]. They are constants, so each unit is addressed by a
/// displacement instead of an extra instruction, and all of them are loaded before the first is stored.
#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! run {
    ($units:expr, $move:ident) => {
        match $units {
            0 => {}
            1 => $move!(0),
            2 => $move!(0 1),
            3 => $move!(0 1 2),
            4 => $move!(0 1 2 3),
            5 => $move!(0 1 2 3 4),
            6 => $move!(0 1 2 3 4 5),
            7 => $move!(0 1 2 3 4 5 6),
            8 => $move!(0 1 2 3 4 5 6 7),
            _ => unreachable!("a longer run"),
        }
    };
}

/// Number of 16-byte units before those with payload only.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const HEADER16: usize = 3;

impl<'a> Unit16s<'a> {
    /// The `count` units from `at`: one check for all of them.
    #[inline]
    pub(super) fn of(memory: &'a MappedMemory, at: u64, count: usize) -> Self {
        // An offset that is not a multiple of 16 becomes a huge end.
        let end = (at >> 4).saturating_add(count as u64) | at << 60;
        assert!(end <= memory.len_units16, "offset outside the region, or no granule16 here");
        Self { base: memory.base.wrapping_add(at as usize), count, _memory: memory }
    }

    /// The units from `at` that hold a header and `payload_bytes` of payload.
    #[inline]
    pub(super) fn string(memory: &'a MappedMemory, at: u64, payload_bytes: usize) -> Self {
        // A payload in memory or in a slot is too short to overflow.
        Self::of(memory, at, Self::units_of(payload_bytes))
    }

    #[inline]
    fn units_of(payload_bytes: usize) -> usize {
        (32 + 11 + payload_bytes) / 12
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    /// Loads the N-th unit from the i-th on, in one access. All callers in this file have asserted that there are as
    /// many. N costs no instruction.
    #[inline]
    fn load_nth<const N: usize>(self, i: usize) -> __m128i {
        debug_assert!(i + N < self.count);
        let value: __m128i;
        // SAFETY: in bounds by the callers' asserts, and aligned to 16. Assembly, because the compiler must neither split nor
        // repeat the access: aligned 16-byte accesses, of SSE and of AVX, are single-copy atomic on processors that
        // enumerate AVX (Intel SDM vol. 3A §9.1.1, AMD APM vol. 2 §7.3.2), which len_units16 implies.
        unsafe {
            core::arch::asm!(vector!("movdqa {v}, [{p} + {n}]"), v = out(xmm_reg) value, p = in(reg) self.base.add(16 * i),
                n = const 16 * N, options(nostack, preserves_flags, readonly));
        }
        value
    }

    /// Stores the N-th unit from the i-th on, in one access.
    #[inline]
    fn store_nth<const N: usize>(self, i: usize, value: __m128i) {
        debug_assert!(i + N < self.count);
        // SAFETY: as in load_nth().
        unsafe {
            core::arch::asm!(vector!("movdqa [{p} + {n}], {v}"), v = in(xmm_reg) value, p = in(reg) self.base.add(16 * i),
                n = const 16 * N, options(nostack, preserves_flags));
        }
    }
}

/// The lower and upper eight bytes of a unit.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn halves(unit: __m128i) -> (u64, u64) {
    // SAFETY: every x86-64 has SSE2.
    unsafe {
        let high = _mm_cvtsi128_si64(_mm_unpackhi_epi64(unit, unit)) as u64;
        (_mm_cvtsi128_si64(unit) as u64, high)
    }
}

/// Have all of them this sequence?
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn all_have<const N: usize>(units: [__m128i; N], sequence: u32) -> bool {
    // SAFETY: every x86-64 has SSE2.
    unsafe {
        let expected = _mm_set1_epi32(sequence as i32);
        let mut difference = _mm_setzero_si128();
        for unit in units {
            difference = _mm_or_si128(difference, _mm_xor_si128(unit, expected));
        }
        _mm_cvtsi128_si32(_mm_shuffle_epi32::<0xff>(difference)) == 0
    }
}

/// Loads 16 bytes at offset AT from `p`, without a need for atomicity.
///
/// # Safety
///
/// They are readable; if they are shared, others access them through atomics.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn load<const AT: usize>(p: *const u8) -> __m128i {
    let value: __m128i;
    // SAFETY: the caller's promise. Assembly for the same reason as in move_pieces().
    unsafe {
        core::arch::asm!(vector!("movups {v}, [{p} + {at}]"), v = out(xmm_reg) value, p = in(reg) p, at = const AT,
            options(nostack, preserves_flags, readonly));
    }
    value
}

/// Stores 16 bytes where [`load`] would load them.
///
/// # Safety
///
/// As for [`load`]; writable.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn store<const AT: usize>(p: *mut u8, value: __m128i) {
    // SAFETY: the caller's promise. Assembly for the same reason as in move_pieces().
    unsafe {
        core::arch::asm!(vector!("movups [{p} + {at}], {v}"), v = in(xmm_reg) value, p = in(reg) p, at = const AT,
            options(nostack, preserves_flags));
    }
}

/// Like [`store`], for a unit's data: twelve bytes.
///
/// # Safety
///
/// As for [`store`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn store_data<const AT: usize>(p: *mut u8, unit: __m128i) {
    // SAFETY: the caller's promise, and every x86-64 has SSE2. Assembly for the same reason as in move_pieces().
    unsafe {
        let high = _mm_unpackhi_epi64(unit, unit);
        core::arch::asm!(vector!("movq [{p} + {at}], {v}"), vector!("movd [{p} + {at} + 8], {w}"), v = in(xmm_reg) unit,
            w = in(xmm_reg) high, p = in(reg) p, at = const AT, options(nostack, preserves_flags));
    }
}

/// Like [`store`], for four bytes.
///
/// # Safety
///
/// As for [`store`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn store4(p: *mut u8, value: u32) {
    // SAFETY: the caller's promise. Assembly for the same reason as in move_pieces().
    unsafe {
        core::arch::asm!("mov [{p}], {v:e}", v = in(reg) value, p = in(reg) p, options(nostack, preserves_flags));
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    #[inline]
    fn store_halves<const N: usize>(self, i: usize, low: u64, high: u64) {
        // SAFETY: every x86-64 has SSE2.
        self.store_nth::<N>(i, unsafe { _mm_set_epi64x(high as i64, low as i64) });
    }

    #[inline]
    pub(super) fn load<const WORDS: usize>(self, i: usize) -> ([u32; WORDS], u32) {
        assert!(i < self.count, "too few units");
        let (low, high) = halves(self.load_nth::<0>(i));
        let words = [low as u32, (low >> 32) as u32, high as u32];
        (std::array::from_fn(|k| words[k]), (high >> 32) as u32)
    }

    #[inline]
    pub(super) fn store<const WORDS: usize>(self, i: usize, data: [u32; WORDS], sequence: u32) {
        assert!(i < self.count, "too few units");
        self.store_halves::<0>(i, pair(data[0], data[1]), pair(data[2], sequence));
    }
}

// The code of a message is always inline: a payload whose length the compiler knows is then moved without a branch, and a
// header passed through memory would be stored in parts and loaded as a whole, which the processor cannot forward.
#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    #[inline(always)]
    pub(super) fn store_string(self, header: [u64; 4], payload: &[u8], sequence: u32) {
        assert!(self.count >= Self::units_of(payload.len()), "too few units");
        let shared = match payload.first_chunk() {
            Some(first) => u32::from_le_bytes(*first),
            None => word_of(payload) as u32,
        };
        self.store_header(header, shared, sequence);
        let whole = payload.len().saturating_sub(4) / 12;
        // SAFETY: the last load ends 12 * whole + 4 bytes into the payload.
        unsafe { self.store_whole(payload.as_ptr(), whole, sequence) };
        let Some(rest) = payload.get(12 * whole + 4..).filter(|rest| !rest.is_empty()) else {
            return;
        };
        let (low, high) = match rest.split_first_chunk::<8>() {
            Some((low, high)) => (u64::from_le_bytes(*low), word_of(high)),
            None => (word_of(rest), 0),
        };
        self.store_halves::<0>(HEADER16 + whole, low, pair(high as u32, sequence));
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    /// Stores the `whole` units after the header from the payload at `from`, after its first four bytes, which are in the
    /// header's last unit.
    ///
    /// # Safety
    ///
    /// There are `HEADER16 + whole` units, and `12 * whole + 4` bytes at `from` are readable if `whole` is not 0, shared or not.
    #[inline(always)]
    unsafe fn store_whole(self, from: *const u8, whole: usize, sequence: u32) {
        let (mut i, mut left) = (HEADER16, whole);
        // SAFETY: every x86-64 has SSE2; the loads are the caller's promise.
        unsafe {
            let stamp = _mm_set_epi32(sequence as i32, 0, 0, 0);
            macro_rules! fill {
                ($($n:literal)*) => {{
                    let p = from.add(12 * (i - HEADER16));
                    let fours = [$(load::<{ 12 * $n }>(p)),*];
                    $(self.store_nth::<$n>(i, _mm_or_si128(_mm_srli_si128::<4>(fours[$n]), stamp));)*
                }};
            }
            while left > RUN {
                run!(RUN, fill);
                (i, left) = (i + RUN, left - RUN);
            }
            run!(left, fill);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    /// Stores the header, and `shared` of the payload.
    #[inline(always)]
    fn store_header(self, [token, tag, arena, last]: [u64; 4], shared: u32, sequence: u32) {
        self.store_halves::<0>(0, token, pair(tag as u32, sequence));
        self.store_halves::<1>(0, tag >> 32 | arena << 32, pair((arena >> 32) as u32, sequence));
        self.store_halves::<2>(0, last, pair(shared, sequence));
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    /// As [`super::Memory::copy_string`], from as many words as the payload takes.
    #[inline(always)]
    pub(super) fn copy_string(
        self,
        header: [u64; 4],
        from: &[AtomicU64],
        len: usize,
        sequence: u32,
    ) {
        assert!(len.div_ceil(8) == from.len(), "as many words as the payload takes");
        assert!(self.count >= Self::units_of(len), "too few units");
        let word = |i: usize| from.get(i).map_or(0, |word| word.load(Ordering::Relaxed));
        let shared = match len {
            4.. => word(0),
            0 => 0,
            _ => word(0) & mask_of(len as u64),
        };
        self.store_header(header, shared as u32, sequence);
        let whole = len.saturating_sub(4) / 12;
        // SAFETY: the last load ends 12 * whole + 4 bytes into the words.
        unsafe { self.store_whole(from.as_ptr().cast(), whole, sequence) };
        let at = 12 * whole + 4;
        if len > at {
            // Up to 11 bytes, starting at a word or in the middle of one: two words contain them.
            let two = u128::from(word(at / 8)) | u128::from(word(at / 8 + 1)) << 64;
            let rest = two >> (8 * (at % 8)) & ((1 << (8 * (len - at))) - 1);
            let high = pair((rest >> 64) as u32, sequence);
            self.store_halves::<0>(HEADER16 + whole, rest as u64, high);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    #[inline(always)]
    pub(super) fn load_header(self, sequence: u32) -> Option<[u64; 4]> {
        assert!(self.count >= HEADER16, "too few units");
        let units @ [first, second, third] =
            [self.load_nth::<0>(0), self.load_nth::<1>(0), self.load_nth::<2>(0)];
        if !all_have(units, sequence) {
            return None;
        }
        // SAFETY: every x86-64 has SSE2.
        let middle = unsafe {
            // The third word of the first unit, then the second unit's.
            let low = _mm_castsi128_ps(_mm_unpackhi_epi64(first, first));
            let rest = _mm_castsi128_ps(_mm_slli_si128::<4>(second));
            _mm_castps_si128(_mm_move_ss(rest, low))
        };
        let ((token, _), (tag, arena), (last, _)) = (halves(first), halves(middle), halves(third));
        Some([token, tag, arena, last])
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    #[inline(always)]
    pub(super) fn load_payload(self, payload: &mut [u8], sequence: u32) -> bool {
        assert!(self.count >= Self::units_of(payload.len()), "too few units");
        let (_, shared) = halves(self.load_nth::<{ HEADER16 - 1 }>(0));
        let is_there = (shared >> 32) as u32 == sequence;
        let whole = payload.len().saturating_sub(4) / 12;
        let Some(first) = payload.first_chunk_mut::<4>() else {
            word_to(shared, payload);
            return is_there;
        };
        *first = (shared as u32).to_le_bytes();
        // SAFETY: 12 * whole + 4 bytes of the payload, whose units were asserted.
        if !is_there || !unsafe { self.copy_whole(payload.as_mut_ptr(), whole, sequence) } {
            return false;
        }
        let rest = &mut payload[12 * whole + 4..];
        if rest.is_empty() {
            return true;
        }
        let (low, high) = halves(self.load_nth::<0>(HEADER16 + whole));
        match rest.split_first_chunk_mut::<8>() {
            Some((first, rest)) => {
                *first = low.to_le_bytes();
                word_to(high, rest);
            }
            None => word_to(low, rest),
        }
        (high >> 32) as u32 == sequence
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    /// As [`super::Memory::copy_payload`], to as many words as the payload takes.
    #[inline(always)]
    pub(super) fn copy_payload(self, to: &[AtomicU64], len: usize, sequence: u32) -> bool {
        assert!(self.count >= Self::units_of(len), "too few units");
        assert!(len.div_ceil(8) == to.len(), "as many words as the payload takes");
        let whole = len.saturating_sub(4) / 12;
        let (_, shared) = halves(self.load_nth::<{ HEADER16 - 1 }>(0));
        if (shared >> 32) as u32 != sequence {
            return false;
        }
        if whole > 0 {
            let to = to.as_ptr().cast_mut().cast();
            // SAFETY: 12 * whole + 4 bytes of the payload, whose units were asserted.
            unsafe {
                if !self.copy_whole(to, whole, sequence) {
                    return false;
                }
                store4(to, shared as u32);
            }
        }
        let at = 12 * whole + 4;
        if len == 0 || len == at && at % 8 == 0 {
            return true;
        }
        let mut value = 0;
        if len > at {
            let (low, high) = halves(self.load_nth::<0>(HEADER16 + whole));
            if (high >> 32) as u32 != sequence {
                return false;
            }
            let data = u128::from(low) | u128::from(high) << 64;
            value = data & ((1 << (8 * (len - at))) - 1);
        }
        // Whole words, the first of which may start with the end of the previous unit.
        if at % 8 != 0 {
            // Loaded again, so checked again.
            let (_, before) = halves(self.load_nth::<0>(HEADER16 - 1 + whole));
            if (before >> 32) as u32 != sequence {
                return false;
            }
            let before = before & mask_of(len.min(4) as u64);
            value = value << 32 | u128::from(before);
        }
        for (word, value) in to[at / 8..].iter().zip([value as u64, (value >> 64) as u64]) {
            word.store(value, Ordering::Relaxed);
        }
        true
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Unit16s<'_> {
    /// Copies the payload in the `whole` units after the header to `to`, after the four bytes that are in the header's
    /// last unit. False if a unit has another sequence; its data is not stored.
    ///
    /// # Safety
    ///
    /// There are `HEADER16 + whole` units, and the `12 * whole` bytes four bytes behind `to` are writable, shared or not.
    #[inline(always)]
    unsafe fn copy_whole(self, to: *mut u8, whole: usize, sequence: u32) -> bool {
        let (mut i, mut left) = (HEADER16, whole);
        // A unit's last four bytes are stored as zeros, which the next unit's data overwrites: a concurrent reader of the memory
        // sees no sequence, which counts the messages of another ring. The last unit of a run is stored without them.
        macro_rules! copy {
            ($($n:literal)*) => {{
                let units = [$(self.load_nth::<$n>(i)),*];
                if !all_have(units, sequence) {
                    return false;
                }
                // SAFETY: every x86-64 has SSE2; the bytes at `to` are the caller's promise.
                unsafe {
                    let p = to.add(12 * (i - HEADER16));
                    let data = _mm_set_epi32(0, -1, -1, -1);
                    $(match $n + 1 < units.len() {
                        true => store::<{ 12 * $n + 4 }>(p, _mm_and_si128(units[$n], data)),
                        false => store_data::<{ 12 * $n + 4 }>(p, units[$n]),
                    })*
                }
            }};
        }
        while left > RUN {
            run!(RUN, copy);
            (i, left) = (i + RUN, left - RUN);
        }
        run!(left, copy);
        true
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
impl Unit16s<'_> {
    pub(super) fn load<const WORDS: usize>(self, _i: usize) -> ([u32; WORDS], u32) {
        unreachable!("of() panics first")
    }

    pub(super) fn store<const WORDS: usize>(self, _i: usize, _data: [u32; WORDS], _: u32) {
        unreachable!("of() panics first")
    }

    pub(super) fn store_string(self, _header: [u64; 4], _payload: &[u8], _sequence: u32) {
        unreachable!("of() panics first")
    }

    pub(super) fn copy_string(self, _header: [u64; 4], _: &[AtomicU64], _len: usize, _: u32) {
        unreachable!("of() panics first")
    }

    pub(super) fn load_header(self, _sequence: u32) -> Option<[u64; 4]> {
        unreachable!("of() panics first")
    }

    pub(super) fn load_payload(self, _payload: &mut [u8], _sequence: u32) -> bool {
        unreachable!("of() panics first")
    }

    pub(super) fn copy_payload(self, _to: &[AtomicU64], _len: usize, _sequence: u32) -> bool {
        unreachable!("of() panics first")
    }
}
