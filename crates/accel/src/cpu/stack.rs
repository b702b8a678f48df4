//! Stacks of coroutines: one mapping, a guard page below each stack.
//!
//! Kernels are built with `-fstack-clash-protection`, so one guard page suffices: no frame skips
//! it. All blocks of a kernel wait at the same depth; with equally aligned stacks, their lines
//! would compete for the same few sets of the L1 cache, so each stack starts a few lines
//! lower than the previous one (measured on echo with 28 blocks: 22 against 18 ns per hop).

use std::io;
use std::num::NonZeroUsize;
use std::ptr;

use corosensei::stack::{Stack, StackPointer};

const PAGE: usize = 4096;
/// Offset of successive stacks in lines, and the number of offsets: odd and a power of
/// two, so that all are used equally. The upper quarter of the page is left to the frames.
const STEP: usize = 13;
const STEPS: usize = 32;
const LINE: usize = 64;

/// The stacks of a scheduler.
pub(super) struct Stacks {
    base: *mut libc::c_void,
    mapped: usize,
    /// From one stack's guard page to the next.
    stride: usize,
    count: usize,
}

impl Stacks {
    /// Maps `count` stacks of at least `bytes` bytes each.
    pub(super) fn new(count: usize, bytes: usize) -> io::Result<Self> {
        // SAFETY: queries a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        // A page for the different offsets.
        let stride = page + (bytes + PAGE).next_multiple_of(page);
        let mapped = stride
            .checked_mul(count.max(1))
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new anonymous mapping.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stacks = Self { base, mapped, stride, count };
        for i in 0..count {
            // SAFETY: the first page of stack `i`, inside the mapping.
            let guarded =
                unsafe { libc::mprotect(base.byte_add(i * stride), page, libc::PROT_NONE) };
            if guarded != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(stacks)
    }

    /// Address of the first guard page, distance to the next, and bytes of each.
    pub(super) fn guards(&self) -> (usize, usize, usize) {
        // SAFETY: queries a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        (self.base.addr(), self.stride, page)
    }

    /// Stack `i`, for one coroutine at a time.
    ///
    /// # Safety
    ///
    /// It may be used while `self` lives, and only by one coroutine.
    pub(super) unsafe fn get(&self, i: usize) -> BlockStack {
        assert!(i < self.count);
        let limit = self.base.addr() + i * self.stride;
        let top = limit + self.stride - i * STEP % STEPS * LINE;
        let pointer = |address| NonZeroUsize::new(address).expect("mappings are not at zero");
        BlockStack { top: pointer(top), limit: pointer(limit) }
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: mapped in new(); users of the stacks have promised to be finished.
        unsafe { libc::munmap(self.base, self.mapped) };
    }
}

/// One stack for corosensei. Owned by [`Stacks`].
pub(super) struct BlockStack {
    top: StackPointer,
    limit: StackPointer,
}

// SAFETY: above the guard page at `limit` the stack has more than MIN_STACK_SIZE bytes; `top` is
// aligned to a line.
unsafe impl Stack for BlockStack {
    #[inline]
    fn base(&self) -> StackPointer {
        self.top
    }
    #[inline]
    fn limit(&self) -> StackPointer {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_do_not_overlap_and_keep_their_size() {
        let bytes = 16 << 10;
        let stacks = Stacks::new(70, bytes).unwrap();
        let mut sets = std::collections::HashSet::new();
        for i in 0..70 {
            // SAFETY: not used, only measured.
            let (stack, next) = unsafe { (stacks.get(i), (i < 69).then(|| stacks.get(i + 1))) };
            assert_eq!(stack.base().get() % LINE, 0);
            assert!(stack.base().get() - (stack.limit().get() + PAGE) >= bytes);
            assert!(next.is_none_or(|next| stack.base() <= next.limit()));
            sets.insert(stack.base().get() % PAGE);
        }
        assert_eq!(sets.len(), STEPS);
    }
}
