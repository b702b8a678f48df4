//! Staging memory of blocks: private buffers for the messages of a kernel.
//!
//! One allocation for all blocks of a scheduler; a line with a known pattern follows each block's
//! buffers. A kernel that writes past its buffers changes its own line before it reaches the
//! next block's memory.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::{io, ptr};

use crate::AccelError;

const LINE: usize = 64;
type Canary = [u64; LINE / 8];
const PATTERN: u64 = 0x5e57_a1c0_de0f_f1ce;
const CANARY: Canary = [PATTERN; LINE / 8];
/// Up to this size all pages are made resident at the start.
const PREFAULT_MAX: usize = 64 << 20;

unsafe extern "C" {
    /// Of `device/kernels/builtin.cpp`: this process's sink, created by the first call; null with an errno.
    fn serval_sink(bytes: *mut u64) -> *mut c_void;
}

/// Where kernels of this process write replies that are too long to send: address and size of a range that is longer than any length,
/// backed by a few MiB of memory. It is never unmapped.
pub(super) fn sink() -> Result<(u64, u64), AccelError> {
    let mut bytes = 0;
    // SAFETY: writes one number.
    let sink = unsafe { serval_sink(&mut bytes) };
    if sink.is_null() {
        let what = "reserve 4 GiB of address space for replies that are too long to send (`ulimit -v` must allow it)";
        return Err(AccelError::Os { what, error: io::Error::last_os_error() });
    }
    Ok((sink.expose_provenance() as u64, bytes))
}

pub(super) struct Staging {
    base: *mut u8,
    layout: Layout,
    block_bytes: usize,
}

impl Staging {
    /// For `blocks` blocks of `bytes` bytes each, a multiple of a line.
    pub(super) fn new(blocks: usize, bytes: usize) -> Self {
        assert!(bytes % LINE == 0);
        let stride = bytes + LINE;
        let size =
            stride.checked_mul(blocks.max(1)).expect("a region's messages fit an address space");
        let layout = Layout::from_size_align(size, 2 * LINE).expect("a sane size");
        // SAFETY: the size is above zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        let staging = Self { base, layout, block_bytes: bytes };
        if size <= PREFAULT_MAX {
            for at in (0..size).step_by(4096) {
                // SAFETY: inside the allocation; volatile, so that the page is really touched.
                unsafe { base.add(at).write_volatile(0) };
            }
        }
        for block in 0..blocks {
            // SAFETY: the line after the block's buffers, inside the allocation and aligned.
            unsafe { staging.canary(block).write(CANARY) };
        }
        staging
    }

    fn canary(&self, block: usize) -> *mut Canary {
        // The caller's block is one of new(): inside the allocation.
        self.base.wrapping_add(block * (self.block_bytes + LINE) + self.block_bytes).cast()
    }

    /// First byte of a block's buffers.
    pub(super) fn address(&self, block: usize) -> u64 {
        self.base.expose_provenance() as u64 + (block * (self.block_bytes + LINE)) as u64
    }

    /// Bytes of a block's buffers.
    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes as u64
    }

    /// Whether the block's canary is intact.
    #[inline]
    pub(super) fn intact(&self, block: usize) -> bool {
        // SAFETY: inside the allocation and aligned; volatile, because the compiler does not see the kernel's
        // writes.
        let line = unsafe { ptr::read_volatile(self.canary(block)) };
        // Not `==`, which calls memcmp: this runs after every resume.
        line.iter().fold(0, |changed, word| changed | (word ^ PATTERN)) == 0
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: allocated in new() with this layout.
        unsafe { dealloc(self.base, self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_behind_the_buffers_is_seen_for_this_block_only() {
        let staging = Staging::new(3, 128);
        assert!((0..3).all(|block| staging.intact(block)));
        let end = (staging.address(1) + staging.block_bytes()) as *mut u8;
        for at in [0, 63] {
            // SAFETY: inside the canary line of block 1.
            unsafe { end.add(at).write(1) };
            assert_eq!([0, 1, 2].map(|block| staging.intact(block)), [true, false, true]);
            // SAFETY: as above.
            unsafe { staging.canary(1).write(CANARY) };
        }
    }
}
