//! The memory that transfers in flight hold at most, and the shares of callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::command::error::TransferError;
use crate::engine::fair_share::is_within_share;

/// The memory of an engine.
pub(crate) struct Memory {
    mib_max: u32,
    /// Bytes that jobs hold at most.
    held: Arc<AtomicU64>,
}

/// The memory of a job, until it is dropped.
pub(crate) struct Reserved {
    held: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Memory {
    pub(crate) fn new(mib_max: u32) -> Self {
        Self { mib_max, held: Arc::default() }
    }

    /// Bytes that are held.
    #[cfg(test)]
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Memory for a job; counted before any of it is taken.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reserved, TransferError> {
        let most = u64::from(self.mib_max) << 20;
        let add = |held: u64| held.checked_add(bytes).filter(|held| *held <= most);
        match self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Reserved { held: self.held.clone(), bytes }),
            Err(_) => Err(self.too_much(bytes)),
        }
    }

    /// Whether a caller whose transfers hold `own` bytes may hold `bytes` more; see [`is_within_share`].
    pub(crate) fn check_share(
        &self,
        bytes: u64,
        own: u64,
        weight: u32,
    ) -> Result<(), TransferError> {
        let most = u64::from(self.mib_max) << 20;
        let held = self.held.load(Ordering::Relaxed);
        match is_within_share(bytes, own, held, most, weight) {
            true => Ok(()),
            false => Err(self.too_much(bytes)),
        }
    }

    fn too_much(&self, bytes: u64) -> TransferError {
        let (needed_kib, most_mib) = (bytes.div_ceil(1 << 10), self.mib_max);
        TransferError::TooMuchMemory { needed_kib, most_mib }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_share_the_memory_and_leave_a_part_for_the_next_one() {
        for callers in 1..=6u64 {
            for bytes in [1 << 20, 10 << 20] {
                let most = 1 << 30;
                let mut held = vec![0; callers as usize];
                // The first takes all that it can before the others come.
                while is_within_share(bytes, held[0], held.iter().sum(), most, 1) {
                    held[0] += bytes;
                }
                assert!(held[0] <= most / 2 && held[0] + bytes > most / 2 - bytes);
                // As its transfers end, all ask in turn.
                for _ in 0..10_000 {
                    for at in 0..held.len() {
                        let all = held.iter().sum();
                        if is_within_share(bytes, held[at], all, most, 1) {
                            held[at] += bytes;
                        } else if held[at] > most / (callers + 1) {
                            held[at] -= bytes;
                        }
                    }
                }
                let fair = most / (callers + 1);
                let least = held.iter().min().unwrap();
                assert!(least + 2 * bytes > fair, "{callers} callers of {bytes}: {held:?}");
                assert!(most - held.iter().sum::<u64>() + 2 * callers * bytes >= fair);
            }
        }
    }

    #[test]
    fn memory_is_divided_by_weights() {
        let (most, bytes) = (1u64 << 30, 1 << 20);
        let weights = [3u32, 1];
        let mut held = [0u64; 2];
        for _ in 0..10_000 {
            for (at, weight) in weights.into_iter().enumerate() {
                let all = held.iter().sum();
                if is_within_share(bytes, held[at], all, most, weight) {
                    held[at] += bytes;
                } else if held[at] > u64::from(weight) * (most - all) {
                    // Its transfers end.
                    held[at] -= bytes;
                }
            }
        }
        // What is free is 1 part, and they have 3 and 1.
        let part = most / 5;
        let near = |have: u64, parts: u64| have.abs_diff(parts * part) <= 8 * bytes;
        assert!(near(held[0], 3) && near(held[1], 1), "{held:?}");
    }
}
