//! The memory of a pool, as the network uses it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use mqueue::memory::Memory;
use mqueue::{MappedMemory, Pool};
use wire::nic::SharedBytes;

/// The region that a pool is in.
struct PoolMemory(MappedMemory);

/// The memory of a pool's buffers.
pub(in crate::service) fn memory_of(
    pool: Option<&Pool<MappedMemory>>,
) -> Option<Arc<dyn SharedBytes>> {
    pool.map(|pool| -> Arc<dyn SharedBytes> { Arc::new(PoolMemory(pool.memory().clone())) })
}

impl fmt::Debug for PoolMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PoolMemory").field(&self.0.len_bytes()).finish()
    }
}

impl SharedBytes for PoolMemory {
    #[inline]
    fn cells(&self, at: u64, len: usize) -> &[AtomicU8] {
        self.0.cells(at, len)
    }

    fn copy_out(&self, at: u64, into: &mut [u8]) {
        self.0.copy_out_unaligned(at, into);
    }

    fn copy_in(&self, at: u64, from: &[u8]) {
        self.0.copy_in(at, from);
    }
}
