//! The stages of a transfer at work.

pub mod buffer;
pub(crate) mod chain;
pub mod compress;
pub(crate) mod digest;
pub mod kernel;
pub mod seal;
pub mod search;

use self::chain::Chunk;
use self::compress::{Compressor, Expander};
use self::digest::Digester;
use self::kernel::Processor;
use self::seal::{Opener, StreamSealer, begin_ctr};
use self::search::Searcher;
use crate::command::error::TransferError;
use crate::command::report::StageReport;
use crate::command::stage::{StageKind, StageSpec};

/// What a stage did with its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Bytes that it took from its input.
    pub taken: usize,
    /// Bytes that it made.
    pub made: usize,
    /// The last byte has come out.
    pub done: bool,
}

/// What does the work of a stage.
enum Work {
    Digest(Digester),
    Search(Box<Searcher>),
    Open(Opener),
    Expand(Box<Expander>),
    Compress(Box<Compressor>),
    Kernel(Box<Processor>),
    Seal(StreamSealer),
}

/// A stage at work.
pub(crate) struct Stage {
    kind: StageKind,
    work: Work,
    taken: u64,
    made: u64,
    /// What a stage that transforms has not taken yet.
    input: Option<Chunk>,
    /// Its last byte has come out.
    done: bool,
}

impl Stage {
    /// `first`: the same stage of the first range of a stream, whose compiled expression it uses.
    fn new(spec: &StageSpec, first: Option<&Self>) -> Result<Self, TransferError> {
        let work = match spec {
            StageSpec::Digest(kind) => Work::Digest(Digester::new(*kind)),
            StageSpec::Search(search) => {
                let other = first.and_then(Self::searcher);
                Work::Search(Box::new(other.map_or_else(|| Searcher::new(search), Ok)?))
            }
            StageSpec::Open(cipher, key) => Work::Open(Opener::new(*cipher, key)),
            StageSpec::Expand(format, limits) => {
                Work::Expand(Box::new(Expander::new(*format, *limits)?))
            }
            StageSpec::Kernel(source, context) => {
                Work::Kernel(Box::new(Processor::new(source, context, None)?))
            }
            StageSpec::SealOn(source, key) => {
                let (header, key) = begin_ctr(key)?;
                Work::Kernel(Box::new(Processor::new(source, &key, Some(header))?))
            }
            StageSpec::Compress(how) => Work::Compress(Box::new(Compressor::new(*how)?)),
            StageSpec::Seal(cipher, key) => Work::Seal(StreamSealer::new(*cipher, key)?),
        };
        Ok(Self { kind: spec.kind(), work, taken: 0, made: 0, input: None, done: false })
    }

    /// If it searches: another search for the same.
    fn searcher(&self) -> Option<Searcher> {
        match &self.work {
            Work::Search(searcher) => Some(searcher.another()),
            _ => None,
        }
    }

    fn transforms(&self) -> bool {
        !matches!(self.work, Work::Digest(_) | Work::Search(_))
    }

    /// Whether it is a kernel that has pieces which have not come out.
    fn has_pieces(&self) -> bool {
        matches!(&self.work, Work::Kernel(processor) if processor.has_pieces())
    }

    /// Shows bytes to a stage that observes.
    pub(crate) fn observe(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        match &mut self.work {
            Work::Digest(digester) => digester.update(bytes),
            Work::Search(searcher) => searcher.update(bytes)?,
            _ => unreachable!("it transforms"),
        }
        self.taken += bytes.len() as u64;
        self.made = self.taken;
        Ok(())
    }

    /// As [`Self::observe`], but for a digest that the caller shows the bytes, together with those of other streams.
    pub(crate) fn observe_together(
        &mut self,
        bytes: &[u8],
    ) -> Result<Option<&mut Digester>, TransferError> {
        if !self.takes_blocks() {
            return self.observe(bytes).map(|()| None);
        }
        self.taken += bytes.len() as u64;
        self.made = self.taken;
        let Work::Digest(digester) = &mut self.work else { unreachable!("it takes blocks") };
        Ok(Some(digester))
    }

    fn takes_blocks(&self) -> bool {
        matches!(&self.work, Work::Digest(digester) if digester.takes_blocks())
    }

    /// Transforms a part of the input; `last`: nothing comes after it.
    fn run(&mut self, last: bool, out: &mut [u8]) -> Result<Ran, TransferError> {
        let input = self.input.as_ref().map_or(&[][..], Chunk::rest);
        let ran = match &mut self.work {
            Work::Open(opener) => opener.run(input, last, out)?,
            Work::Expand(expander) => expander.run(input, last, out)?,
            Work::Compress(compressor) => compressor.run(input, last, out)?,
            Work::Kernel(processor) => processor.run(input, last, out)?,
            Work::Seal(sealer) => sealer.run(input, last, out)?,
            Work::Digest(_) | Work::Search(_) => unreachable!("it observes"),
        };
        self.taken += ran.taken as u64;
        self.made += ran.made as u64;
        self.done = ran.done;
        if let Some(chunk) = &mut self.input {
            chunk.done += ran.taken;
        }
        Ok(ran)
    }

    pub(crate) fn report(self, succeeded: bool) -> StageReport {
        let mut report = StageReport {
            kind: self.kind,
            bytes: self.taken,
            made: self.made,
            finished: succeeded,
            digest: None,
            found: None,
        };
        match self.work {
            Work::Digest(digester) if succeeded => report.digest = Some(digester.finish()),
            Work::Search(searcher) if succeeded => report.found = Some(searcher.finish()),
            _ => {}
        }
        report
    }
}
