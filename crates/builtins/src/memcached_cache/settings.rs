//! What an instance counts, and its settings: the registers of the cache.

/// Default of `memory_mib`.
pub(super) const CACHE_MEMORY_MIB: u64 = 16;

macro_rules! registers {
    ($( $name:ident, )+) => {
        /// What one instance has counted.
        #[derive(Clone, Copy, Default)]
        pub(super) struct Counts { $( pub(super) $name: u64, )+ }

        pub(super) const COUNTS: &[&str] = &[$( stringify!($name), )+];

        impl Counts {
            pub(super) fn values(&self) -> Vec<u64> {
                vec![$( self.$name, )+]
            }
        }
    };
}

registers! {
    // Requests that it answered with a value.
    hits,
    // ... with the answer that the key is not there.
    absences,
    // Reads of one key that were forwarded, because the key was not there.
    misses,
    // ... because their entry was written, or too old, or its key is being written.
    invalid,
    // ... so that the server knows that the key is in use.
    sampled,
    // ... because a write of the same connection is in progress.
    ordered,
    // ... as they are, because there was no room or the server has stale keys: their answers are not kept.
    unasked,
    // Values that were kept, and keys of which it is known that they are not there.
    fills,
    // ... and not, because they expire soon, are stale, or too long.
    unkept,
    // Values that made room for others.
    evictions,
    // Commands that may change keys.
    writes,
    // Messages that were dropped: no command, or no room to follow it.
    refused,
}

/// Settings with their first values and what they may be.
pub(super) const SETTINGS: [(&str, u64, u64, u64); 6] = [
    ("memory_mib", CACHE_MEMORY_MIB, 1, 4096),
    ("age_ms", 60_000, 0, 86_400_000),
    ("sample", 64, 0, 1_000_000),
    ("grace_ms", 2_000, 1, 600_000),
    ("udp_writes", 1, 0, 1),
    ("absent_ms", 0, 0, 86_400_000),
];
pub(super) const AT_MEMORY: usize = 0;
pub(super) const AT_AGE: usize = 1;
pub(super) const AT_SAMPLE: usize = 2;
pub(super) const AT_GRACE: usize = 3;
pub(super) const AT_UDP_WRITES: usize = 4;
pub(super) const AT_ABSENT: usize = 5;
