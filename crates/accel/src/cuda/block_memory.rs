//! The private memory of a block: buffers for one request and one reply of each of its mqueues, and, if the region has pools, an area into
//! which it fetches messages of bundles, many at once.
//!
//! A block's memory is in the shared memory of its multiprocessor if it is small, and otherwise in the GPU's memory. The area never decides
//! that by itself: it takes what is left, as long as the longest message fits.

/// A block's memory is in shared memory up to this size.
const SHARED_MAX: u64 = 16 << 10;
/// Shared memory of a CUDA block that a launch may have without an opt-in.
const SHARED_BYTES_MAX: u64 = 48 << 10;
/// The area takes no more than this, because it saves no further trip over the bus.
const AREA_MAX: u64 = 8 << 10;
/// What the blocks of a multiprocessor may have together for the area to be larger than it must be: they all have to be resident.
const MULTIPROCESSOR_BYTES: u64 = 64 << 10;
/// The kernel library reads whole units, so a message may begin and end inside one.
const AREA_MARGIN: u64 = 32;

/// What decides about the memory of a service's blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Longest payload of any ring.
    pub longest: u32,
    /// Mqueues of the block that has most.
    pub mqueues: u32,
    /// Does the region have pools?
    pub bundles: bool,
    /// Blocks in a CUDA block.
    pub rows: u32,
    /// Blocks for each multiprocessor.
    pub spread: u32,
    /// Shared memory of the CUDA block besides.
    pub static_bytes: u64,
}

/// The memory of each block of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockMemory {
    /// Bytes of one buffer.
    pub stride: u32,
    /// Bytes of a block: two buffers for each mqueue, then the area.
    pub bytes: u64,
    /// Is it in shared memory?
    pub shared: bool,
}

impl BlockMemory {
    pub(super) fn of(needs: Needs) -> Self {
        // With room for the guard word after a reply, which detects a write past it.
        let stride = (needs.longest.next_multiple_of(8) + 8).next_multiple_of(64);
        let buffers = 2 * u64::from(needs.mqueues) * u64::from(stride);
        let rows = u64::from(needs.rows.max(1));
        let room = SHARED_MAX.min(SHARED_BYTES_MAX.saturating_sub(needs.static_bytes) / rows);
        if !needs.bundles {
            return Self { stride, bytes: buffers, shared: buffers <= room };
        }
        let least = u64::from(needs.longest).next_multiple_of(16) + AREA_MARGIN;
        let shared = buffers + least <= room;
        let fair = room.min(MULTIPROCESSOR_BYTES / u64::from(needs.spread.max(1)));
        let area = match shared {
            true => fair.saturating_sub(buffers).min(AREA_MAX).max(least) / 16 * 16,
            false => AREA_MAX.max(least),
        };
        Self { stride, bytes: buffers + area, shared }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        longest: 1500,
        mqueues: 1,
        bundles: true,
        rows: 1,
        spread: 2,
        static_bytes: 10_736,
    };

    #[test]
    fn the_area_takes_what_is_left_of_shared_memory() {
        let without = BlockMemory::of(Needs { bundles: false, ..NEEDS });
        assert_eq!(without, BlockMemory { stride: 1536, bytes: 3072, shared: true });
        let with = BlockMemory::of(NEEDS);
        assert_eq!(with, BlockMemory { stride: 1536, bytes: 3072 + AREA_MAX, shared: true });
        // Many blocks on a multiprocessor, or in a CUDA block: at least what the longest message needs.
        let least = 1504 + AREA_MARGIN;
        let dense = BlockMemory::of(Needs { spread: 16, ..NEEDS });
        assert_eq!(dense, BlockMemory { bytes: 3072 + least, ..with });
        let rows = BlockMemory::of(Needs { rows: 8, ..NEEDS });
        assert_eq!(rows, BlockMemory { bytes: 3072 + 1728, ..with });
    }

    #[test]
    fn without_room_in_shared_memory_all_of_it_is_elsewhere() {
        let long = BlockMemory::of(Needs { longest: 20_000, ..NEEDS });
        assert!(!long.shared);
        assert_eq!(long.bytes, 2 * u64::from(long.stride) + 20_000 + AREA_MARGIN);
        // The buffers alone would fit.
        let close = Needs { longest: 7_000, ..NEEDS };
        assert!(BlockMemory::of(Needs { bundles: false, ..close }).shared);
        assert!(!BlockMemory::of(close).shared);
    }

    #[test]
    fn every_message_fits_wherever_it_begins() {
        for longest in [1, 7, 40, 64, 784, 1500, 1536, 6_000, 65_507, 8 << 20] {
            for (rows, spread, mqueues) in [(1, 1, 1), (8, 40, 1), (4, 4, 3), (1, 32, 16)] {
                let needs = Needs { longest, mqueues, rows, spread, ..NEEDS };
                let memory = BlockMemory::of(needs);
                let area = memory.bytes - 2 * u64::from(mqueues) * u64::from(memory.stride);
                assert!(area >= u64::from(longest).next_multiple_of(16) + AREA_MARGIN, "{needs:?}");
                assert_eq!(area % 16, 0, "{needs:?}");
                let launch = u64::from(rows) * memory.bytes + needs.static_bytes;
                assert!(!memory.shared || launch <= SHARED_BYTES_MAX, "{needs:?}");
            }
        }
    }
}
