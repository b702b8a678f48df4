//! What a transfer did, and how far it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::command::stage::{DigestValue, StageKind};
use crate::engine::counters::{BlockCounters, Counters};
use crate::run::flow::Device;
use crate::stages::search::Found;

/// What one stage of a transfer did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageReport {
    /// Which stage it is.
    pub kind: StageKind,
    /// Bytes that went into it.
    pub bytes: u64,
    /// Bytes that came out of it.
    pub made: u64,
    /// All bytes of the transfer went through it.
    pub finished: bool,
    /// The digest, of a stage that computes one and has finished.
    pub digest: Option<DigestValue>,
    /// What a search has found that has finished.
    pub found: Option<Found>,
}

impl StageReport {
    /// Its counts, without a digest and what it has found.
    pub(crate) fn counts(&self) -> Self {
        let Self { kind, bytes, made, finished, .. } = *self;
        Self { kind, bytes, made, finished, digest: None, found: None }
    }
}

/// What a transfer did until its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes taken from the source.
    pub read: u64,
    /// Bytes that the sink has: those that the socket accepted (of a sealed stream with header and tags), or that were written to
    /// the file. Exact, also after an error.
    pub written: u64,
    /// The stages in their order.
    pub stages: Vec<StageReport>,
}

impl Report {
    /// The first digest, if one was asked for and the transfer succeeded.
    pub fn digest(&self) -> Option<DigestValue> {
        self.stages.iter().find_map(|stage| stage.digest)
    }
}

/// How far a transfer is; other threads read it.
#[derive(Debug, Default)]
pub struct Progress {
    read: AtomicU64,
    written: AtomicU64,
    /// That of the transfer of which this is a part.
    whole: Option<Arc<Self>>,
    /// Where the bytes are counted as they move.
    counted: Option<Counted>,
}

#[derive(Debug)]
struct Counted {
    counters: Arc<Counters>,
    /// The devices of source and sink, and what has moved from and to the file systems of files.
    ends: [Device; 2],
    blocks: [Option<Arc<BlockCounters>>; 2],
}

impl Progress {
    /// Of a transfer between these devices, or of a part of one.
    pub(crate) fn counted(
        counters: Arc<Counters>,
        ends: [Device; 2],
        blocks: [Option<u64>; 2],
        whole: Option<Arc<Self>>,
    ) -> Self {
        let blocks = blocks.map(|block| counters.block(block?));
        Self { whole, counted: Some(Counted { counters, ends, blocks }), ..Self::default() }
    }

    /// Called by the thread that has the source.
    pub(crate) fn set_read(&self, read: u64) {
        let before = self.read.swap(read, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.read.fetch_add(read - before, Ordering::Relaxed);
        }
        if let Some(Counted { counters, ends: [source, _], blocks: [block, _] }) = &self.counted {
            counters.count_taken(*source, read - before);
            block.iter().for_each(|block| block.count_taken(read - before));
        }
    }

    /// Called by the thread that has the sink.
    pub(crate) fn set_written(&self, written: u64) {
        let before = self.written.swap(written, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.written.fetch_add(written - before, Ordering::Relaxed);
        }
        if let Some(Counted { counters, ends: [_, sink], blocks: [_, block] }) = &self.counted {
            counters.count_given(*sink, written - before);
            block.iter().for_each(|block| block.count_given(written - before));
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
