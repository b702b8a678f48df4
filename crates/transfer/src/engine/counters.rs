//! What an engine counts, over all of its transfers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mqueue::codes::reason;

use crate::command::device::Device;
use crate::command::error::TransferError;
use crate::command::report::Outcome;
use crate::engine::scoreboard::{InFlight, Queued};
use crate::engine::tenants::{TenantCounters, Tenants};
use crate::run::progress::{CountedIn, MovedBytes};

/// What an engine has counted.
#[derive(Debug)]
pub struct Counters {
    started: AtomicU64,
    succeeded: AtomicU64,
    failed: [AtomicU64; reason::TABLE.codes.len()],
    read: AtomicU64,
    written: AtomicU64,
    queued: [AtomicU64; Device::ALL.len()],
    queued_for_digests: AtomicU64,
    digest_passes: AtomicU64,
    digest_chunks: AtomicU64,
    /// As in [`Device::ALL`].
    devices: [DeviceCounters; Device::ALL.len()],
    /// Of the files of a file system, by its device number.
    blocks: Mutex<BTreeMap<u64, Arc<MovedBytes>>>,
    pub(crate) tenants: Tenants,
}

/// File systems that are counted apart.
const BLOCKS_MAX: usize = 64;

/// What is counted of one kind of device.
#[derive(Debug, Default)]
struct DeviceCounters {
    running: AtomicU64,
    in_flight: AtomicU64,
    moved: Arc<MovedBytes>,
}

/// What one kind of device does and has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLoad {
    /// Which.
    pub device: Device,
    /// Transfers whose next step there waits for a thread.
    pub queued: u64,
    /// Steps there that run.
    pub running: u64,
    /// Bytes of the chunks of both.
    pub bytes_in_flight: u64,
    /// Bytes taken from such sources so far.
    pub taken: u64,
    /// Bytes that such sinks got so far.
    pub given: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            started: AtomicU64::default(),
            succeeded: AtomicU64::default(),
            failed: [const { AtomicU64::new(0) }; reason::TABLE.codes.len()],
            read: AtomicU64::default(),
            written: AtomicU64::default(),
            queued: Default::default(),
            queued_for_digests: AtomicU64::default(),
            digest_passes: AtomicU64::default(),
            digest_chunks: AtomicU64::default(),
            devices: Default::default(),
            blocks: Mutex::default(),
            tenants: Tenants::default(),
        }
    }
}

impl Counters {
    /// Transfers that were asked for.
    pub fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    /// Transfers that moved their whole range.
    pub fn succeeded(&self) -> u64 {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// Transfers that ended early or were refused, by reason.
    pub fn failed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.failed.iter().map(|count| count.load(Ordering::Relaxed));
        reason::TABLE.codes.iter().map(|code| code.name).zip(counts)
    }

    /// Bytes taken from sources by transfers that have ended.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that sinks got from transfers that have ended.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Transfers whose next step waits for a thread, by the device of the step.
    pub fn queued(&self) -> impl Iterator<Item = (Device, u64)> {
        let counts = self.queued.iter().map(|count| count.load(Ordering::Relaxed));
        Device::ALL.into_iter().zip(counts)
    }

    /// Transfers with a chunk that waits for digests.
    pub fn queued_for_digests(&self) -> u64 {
        self.queued_for_digests.load(Ordering::Relaxed)
    }

    /// Passes over chunks of one or several transfers for MD5 and SHA-256.
    pub fn digest_passes(&self) -> u64 {
        self.digest_passes.load(Ordering::Relaxed)
    }

    /// Chunks that these passes took. Divided by the passes: how many went together.
    pub fn digest_chunks(&self) -> u64 {
        self.digest_chunks.load(Ordering::Relaxed)
    }

    /// What each kind of device does.
    pub fn devices(&self) -> [DeviceLoad; Device::ALL.len()] {
        let load = |of: &AtomicU64| of.load(Ordering::Relaxed);
        Device::ALL.map(|device| {
            let of = &self.devices[device as usize];
            DeviceLoad {
                device,
                queued: load(&self.queued[device as usize]),
                running: load(&of.running),
                bytes_in_flight: load(&of.in_flight),
                taken: of.moved.taken(),
                given: of.moved.given(),
            }
        })
    }

    /// Bytes taken from the files of each file system, and given to them, by its device number.
    pub(crate) fn blocks(&self) -> BTreeMap<u64, (u64, u64)> {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.iter().map(|(block, of)| (*block, (of.taken(), of.given()))).collect()
    }

    /// The counters of a file system; `None`: there are too many.
    pub(crate) fn block(&self, block: u64) -> Option<Arc<MovedBytes>> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.len() >= BLOCKS_MAX && !blocks.contains_key(&block) {
            // Numbers of file systems that are mounted now and then would take all places.
            blocks.retain(|_, of| Arc::strong_count(of) > 1);
            if blocks.len() >= BLOCKS_MAX {
                return None;
            }
        }
        Some(blocks.entry(block).or_default().clone())
    }

    /// Every tenant that has asked for a transfer, with what it has had.
    pub fn tenants(&self) -> Vec<(String, Arc<TenantCounters>)> {
        self.tenants.counters()
    }

    /// Where the bytes of a transfer between these devices are counted. `blocks`: those of the
    /// files of source and sink.
    pub(crate) fn of_transfer(&self, ends: [Device; 2], blocks: [Option<u64>; 2]) -> CountedIn {
        let of = |end: usize| {
            let device = self.devices[ends[end] as usize].moved.clone();
            [Some(device), blocks[end].and_then(|block| self.block(block))]
        };
        CountedIn { source: of(0), sink: of(1) }
    }

    pub(crate) fn note_in_flight(&self, all: [InFlight; Device::ALL.len()]) {
        for (of, now) in self.devices.iter().zip(all) {
            of.running.store(now.running, Ordering::Relaxed);
            of.in_flight.store(now.bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn note_queued(&self, queued: Queued) {
        for (count, now) in self.queued.iter().zip(queued.devices) {
            count.store(now as u64, Ordering::Relaxed);
        }
        self.queued_for_digests.store(queued.digests as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_pass(&self, chunks: usize) {
        self.digest_passes.fetch_add(1, Ordering::Relaxed);
        self.digest_chunks.fetch_add(chunks as u64, Ordering::Relaxed);
    }

    /// Counts a transfer that was asked for.
    pub(crate) fn start(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a refusal.
    pub(crate) fn refuse(&self, error: &TransferError) {
        self.started.fetch_add(1, Ordering::Relaxed);
        self.count_error(error);
    }

    fn count_error(&self, error: &TransferError) {
        self.failed[usize::from(error.code()) - 1].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end(&self, outcome: &Outcome) {
        self.read.fetch_add(outcome.report.read, Ordering::Relaxed);
        self.written.fetch_add(outcome.report.written, Ordering::Relaxed);
        match &outcome.result {
            Ok(()) => {
                self.succeeded.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => self.count_error(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_nothing_uses_gives_its_place_to_another_one() {
        let counters = Counters::default();
        let used: Vec<_> =
            (1..BLOCKS_MAX as u64).filter_map(|block| counters.block(block)).collect();
        drop(counters.block(0));
        assert_eq!(counters.blocks().len(), BLOCKS_MAX);
        let other = counters.block(1000).expect("the first one is not used");
        assert!(!counters.blocks().contains_key(&0));
        assert!(counters.block(1001).is_none(), "all are used");
        drop((used, other));
        assert!(counters.block(1001).is_some());
    }
}
