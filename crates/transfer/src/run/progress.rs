//! How far a transfer is, and where its bytes are counted as they move.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that have moved from and to a kind of device, or the files of one file system.
#[derive(Debug, Default)]
pub(crate) struct MovedBytes {
    taken: AtomicU64,
    given: AtomicU64,
}

impl MovedBytes {
    /// Bytes taken from it, as a source.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Bytes given to it, as a sink.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }
}

/// Where the bytes of source and sink are counted: of each, its kind of device and its file
/// system, as far as they are counted.
#[derive(Debug, Default)]
pub(crate) struct CountedIn {
    pub(crate) source: [Option<Arc<MovedBytes>>; 2],
    pub(crate) sink: [Option<Arc<MovedBytes>>; 2],
}

/// How far a transfer is; other threads read it.
#[derive(Debug, Default)]
pub struct Progress {
    read: AtomicU64,
    written: AtomicU64,
    /// That of the transfer of which this is a part.
    whole: Option<Arc<Self>>,
    counted_in: CountedIn,
}

impl Progress {
    /// The progress of a transfer whose bytes are counted there; `whole`: of a part of that one.
    pub(crate) fn new(counted_in: CountedIn, whole: Option<Arc<Self>>) -> Self {
        Self { whole, counted_in, ..Self::default() }
    }

    /// Called by the thread that has the source.
    pub(crate) fn set_read(&self, read: u64) {
        let before = self.read.swap(read, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.read.fetch_add(read - before, Ordering::Relaxed);
        }
        for of in self.counted_in.source.iter().flatten() {
            of.taken.fetch_add(read - before, Ordering::Relaxed);
        }
    }

    /// Called by the thread that has the sink.
    pub(crate) fn set_written(&self, written: u64) {
        let before = self.written.swap(written, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.written.fetch_add(written - before, Ordering::Relaxed);
        }
        for of in self.counted_in.sink.iter().flatten() {
            of.given.fetch_add(written - before, Ordering::Relaxed);
        }
    }

    /// Bytes taken from the source so far.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that the sink has so far.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}
