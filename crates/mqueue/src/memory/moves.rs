//! Copies between shared words and other memory.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{word_of, word_to};

/// Bytes that one step of a copy moves if the processor has wider accesses than words. Their
/// order and atomicity do not matter: the edges order a payload as a whole.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const PIECE_BYTES: usize = 32;

/// Copies bytes into shared words; the last one is padded with zeros. Panics if there are too few.
#[inline]
pub(super) fn copy_in(bytes: &[u8], words: &[AtomicU64]) {
    let pieces = whole_pieces(bytes.len(), words);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: whole_pieces() has counted.
    unsafe {
        move_pieces(bytes.as_ptr(), words.as_ptr().cast_mut().cast(), pieces);
    }
    if pieces != bytes.len() {
        copy_in_words(&bytes[pieces..], &words[pieces / 8..]);
    }
}

#[inline]
fn copy_in_words(bytes: &[u8], words: &[AtomicU64]) {
    let (whole, rest) = bytes.as_chunks::<8>();
    for (word, chunk) in words.iter().zip(whole) {
        word.store(u64::from_le_bytes(*chunk), Ordering::Relaxed);
    }
    if !rest.is_empty() {
        words[whole.len()].store(word_of(rest), Ordering::Relaxed);
    }
}

/// Copies shared words to bytes; of the last one only the bytes that fit. Panics if there are too few.
#[inline]
pub(super) fn copy_out(words: &[AtomicU64], bytes: &mut [u8]) {
    let pieces = whole_pieces(bytes.len(), words);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: whole_pieces() has counted.
    unsafe {
        move_pieces(words.as_ptr().cast(), bytes.as_mut_ptr(), pieces);
    }
    if pieces != bytes.len() {
        copy_out_words(&words[pieces / 8..], &mut bytes[pieces..]);
    }
}

#[inline]
fn copy_out_words(words: &[AtomicU64], bytes: &mut [u8]) {
    let (whole, rest) = bytes.as_chunks_mut::<8>();
    for (word, chunk) in words.iter().zip(&mut *whole) {
        *chunk = word.load(Ordering::Relaxed).to_le_bytes();
    }
    if !rest.is_empty() {
        word_to(words[whole.len()].load(Ordering::Relaxed), rest);
    }
}

/// Bytes of the whole pieces in `bytes` bytes, which `words` has.
#[inline]
pub(super) fn whole_pieces(bytes: usize, words: &[AtomicU64]) -> usize {
    assert!(bytes.div_ceil(8) <= words.len(), "too few words");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return bytes & !(PIECE_BYTES - 1);
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    return 0;
}

/// Copies whole pieces, two at a time: several loads are in flight before the first of them is stored.
///
/// # Safety
///
/// `from` is readable, `to` writable for `bytes` bytes, a multiple of a piece; other code accesses shared memory among them
/// through atomics.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn move_pieces(from: *const u8, to: *mut u8, bytes: usize) {
    let pairs = bytes & !(2 * PIECE_BYTES - 1);
    // SAFETY: the caller's promise. Assembly, because concurrent writes by others would violate the
    // compiler's assumptions about plain accesses.
    unsafe {
        for at in (0..pairs).step_by(2 * PIECE_BYTES) {
            core::arch::asm!(
                vector!("movups {a}, [{from}]"),
                vector!("movups {b}, [{from} + 16]"),
                vector!("movups {c}, [{from} + 32]"),
                vector!("movups {d}, [{from} + 48]"),
                vector!("movups [{to}], {a}"),
                vector!("movups [{to} + 16], {b}"),
                vector!("movups [{to} + 32], {c}"),
                vector!("movups [{to} + 48], {d}"),
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                from = in(reg) from.add(at),
                to = in(reg) to.add(at),
                options(nostack, preserves_flags),
            );
        }
        if pairs != bytes {
            core::arch::asm!(
                vector!("movups {a}, [{from}]"),
                vector!("movups {b}, [{from} + 16]"),
                vector!("movups [{to}], {a}"),
                vector!("movups [{to} + 16], {b}"),
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                from = in(reg) from.add(pairs),
                to = in(reg) to.add(pairs),
                options(nostack, preserves_flags),
            );
        }
    }
}

/// Copies shared bytes from any address. The bytes of the last piece may be loaded twice: what the later load returned counts.
///
/// # Safety
///
/// As many bytes as `to` has are readable at `from`; other code accesses shared memory among them through atomics.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn move_bytes(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { move_string(from, to.as_mut_ptr(), to.len()) }
}

/// [`move_bytes`] to any memory.
///
/// # Safety
///
/// `bytes` bytes are readable at `from` and writable at `to`; other code accesses shared memory among them through atomics.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn move_string(from: *const u8, to: *mut u8, bytes: usize) {
    let pieces = bytes & !(PIECE_BYTES - 1);
    // SAFETY: the caller's promise; every access ends at or before `bytes`.
    unsafe {
        move_pieces(from, to, pieces);
        if pieces == bytes {
            return;
        }
        if pieces > 0 {
            let last = bytes - PIECE_BYTES;
            return move_pieces(from.add(last), to.add(last), PIECE_BYTES);
        }
        move_short(from, to, bytes);
    }
}

/// Copies `count` strings of `bytes` bytes each, from and to places at these distances.
///
/// # Safety
///
/// As for [`move_string`], for each of them.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn move_rows(
    from: *const u8,
    to: *mut u8,
    (from_stride, to_stride): (usize, usize),
    count: usize,
    bytes: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..count {
            let (from, to) = (from.add(row * from_stride), to.add(row * to_stride));
            match bytes {
                // Without a loop.
                64 => move_string(from, to, 64),
                _ => move_string(from, to, bytes),
            }
        }
    }
}

/// [`move_bytes`] of fewer bytes than a piece.
///
/// # Safety
///
/// As for [`move_bytes`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn move_short(from: *const u8, to: *mut u8, bytes: usize) {
    macro_rules! move_one {
        ($at:expr, $register:ident, $load:expr, $store:expr) => {
            core::arch::asm!($load, $store, from = in(reg) from.add($at), to = in(reg) to.add($at), v = out($register) _,
                options(nostack, preserves_flags))
        };
    }
    macro_rules! move_both_ends {
        ($size:literal, $register:ident, $load:expr, $store:expr) => {{
            move_one!(0, $register, $load, $store);
            move_one!(bytes - $size, $register, $load, $store);
        }};
    }
    // SAFETY: the caller's promise; every access ends at or before `bytes`. Assembly for the same reason as in move_pieces().
    unsafe {
        match bytes {
            16.. => {
                move_both_ends!(
                    16,
                    xmm_reg,
                    vector!("movups {v}, [{from}]"),
                    vector!("movups [{to}], {v}")
                )
            }
            8.. => move_both_ends!(8, reg, "mov {v}, [{from}]", "mov [{to}], {v}"),
            4.. => move_both_ends!(4, reg, "mov {v:e}, [{from}]", "mov [{to}], {v:e}"),
            _ => {
                for at in 0..bytes {
                    move_one!(
                        at,
                        reg_byte,
                        "mov {v}, byte ptr [{from}]",
                        "mov byte ptr [{to}], {v}"
                    );
                }
            }
        }
    }
}
