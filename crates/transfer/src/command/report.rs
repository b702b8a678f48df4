//! What a transfer did, and how it ended.

use super::error::TransferError;
use super::stage::{DigestValue, Found, StageKind};

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

/// How a transfer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Why it ended early, if it did.
    pub result: Result<(), TransferError>,
    /// What it did.
    pub report: Report,
}

/// Called once at the end of a transfer.
pub(crate) type Done = Box<dyn FnOnce(Outcome) + Send>;
