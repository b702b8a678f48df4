//! The stages of a transfer at work: chunks of the source go in, chunks for the sink come out.
//!
//! A stage that observes (a digest, a search) leaves a chunk as it is. One that transforms takes from a chunk and makes another, at its
//! own pace: it keeps what it cannot use yet (the begin of a record), and leaves in its input what finds no room. So each
//! stage that transforms holds at most one chunk beside its own state.

use std::collections::VecDeque;

use crate::command::error::TransferError;
use crate::command::report::StageReport;
use crate::command::stage::StageSpec;
use crate::stages::buffer::Buffers;
use crate::stages::search::Searcher;
use crate::stages::{Stage, Work};

/// A part of the stream in memory.
pub(crate) struct Chunk {
    pub(crate) buffer: Vec<u8>,
    pub(crate) len: usize,
    /// Bytes of it that have gone on.
    pub(crate) done: usize,
}

impl Chunk {
    pub(crate) fn rest(&self) -> &[u8] {
        &self.buffer[self.done..self.len]
    }
}

/// See the module's text.
pub(crate) struct Chain {
    stages: Vec<Stage>,
    /// Chunks that have come from the source.
    raw: VecDeque<Chunk>,
    /// The source has ended well.
    source_ended: bool,
}

impl Chain {
    /// `first`: the chain of the first range of the stream, if this is another range.
    pub(crate) fn new(specs: &[StageSpec], first: Option<&Self>) -> Result<Self, TransferError> {
        let stage = |(at, spec)| Stage::new(spec, first.and_then(|chain| chain.stages.get(at)));
        let stages = specs.iter().enumerate().map(stage).collect::<Result<_, _>>()?;
        Ok(Self { stages, raw: VecDeque::new(), source_ended: false })
    }

    /// Of each stage, if it searches, another search for the same.
    pub(crate) fn searchers(&self) -> Vec<Option<Searcher>> {
        self.stages.iter().map(Stage::searcher).collect()
    }

    /// Searches one range of the stream, which begins at `start`; other chains search the others.
    pub(crate) fn begin_range(&mut self, start: u64, is_last: bool) {
        for stage in &mut self.stages {
            if let Work::Search(searcher) = &mut stage.work {
                searcher.begin_range(start, is_last);
            }
        }
    }

    /// Whether a stage before the first that transforms is a digest that several streams take together.
    pub(crate) fn batches(&self) -> bool {
        let observers = self.stages.iter().take_while(|stage| !stage.transforms());
        observers.into_iter().any(Stage::takes_blocks)
    }

    /// The stages before the first that transforms, and the others.
    pub(crate) fn split_observers(mut self) -> (Vec<Stage>, Self) {
        let transforms = self.stages.iter().position(Stage::transforms);
        let others = self.stages.split_off(transforms.unwrap_or(self.stages.len()));
        (std::mem::replace(&mut self.stages, others), self)
    }

    /// Gives it a chunk of the source.
    pub(crate) fn push(&mut self, chunk: Chunk) {
        self.raw.push_back(chunk);
    }

    /// The source has ended well: what stages keep comes out.
    pub(crate) fn end_source(&mut self) {
        self.source_ended = true;
    }

    /// Shows bytes to all stages, which transform nothing.
    pub(crate) fn observe(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        self.stages.iter_mut().try_for_each(|stage| stage.observe(bytes))
    }

    /// Chunks that it holds.
    pub(crate) fn held(&self) -> usize {
        self.raw.len() + self.stages.iter().filter(|stage| stage.input.is_some()).count()
    }

    /// Whether a kernel has pieces that have not come out.
    fn has_pieces(&self) -> bool {
        self.stages.iter().any(Stage::has_pieces)
    }

    /// Whether there is nothing to do but to wait for a kernel.
    pub(crate) fn waits(&self) -> bool {
        self.held() == 0 && self.has_pieces()
    }

    /// Whether [`Self::pull`] may return a chunk, or finish a stage.
    pub(crate) fn has_work(&self) -> bool {
        self.held() > 0
            || self.has_pieces()
            || (self.source_ended && !self.is_done(self.stages.len()))
    }

    /// Forgets what it holds.
    pub(crate) fn clear(&mut self, buffers: &mut Buffers) {
        let inputs = self.stages.iter_mut().filter_map(|stage| stage.input.take());
        let held = self.raw.drain(..).chain(inputs);
        held.for_each(|chunk| buffers.put(chunk.buffer));
        self.source_ended = false;
    }

    /// The next chunk for the sink; `None`: none can be made of what has come so far, or not in one step (then it still has work).
    pub(crate) fn pull(&mut self, buffers: &mut Buffers) -> Result<Option<Chunk>, TransferError> {
        self.pull_of(self.stages.len(), buffers)
    }

    /// Whether the first `count` stages have given out their last byte.
    fn is_done(&self, count: usize) -> bool {
        match self.stages[..count].iter().rfind(|stage| stage.transforms()) {
            Some(last) => last.done,
            None => self.source_ended && self.raw.is_empty(),
        }
    }

    /// What comes out of the first `count` stages.
    fn pull_of(
        &mut self,
        count: usize,
        buffers: &mut Buffers,
    ) -> Result<Option<Chunk>, TransferError> {
        let Some(at) = count.checked_sub(1) else { return Ok(self.raw.pop_front()) };
        if !self.stages[at].transforms() {
            let chunk = self.pull_of(at, buffers)?;
            if let Some(chunk) = &chunk {
                self.stages[at].observe(chunk.rest())?;
            }
            return Ok(chunk);
        }
        loop {
            if self.stages[at].done {
                return Ok(None);
            }
            if self.stages[at].input.is_none() {
                self.stages[at].input = self.pull_of(at, buffers)?;
            }
            let last = self.is_done(at);
            let stage = &mut self.stages[at];
            if stage.input.is_none() && !last && !stage.has_pieces() {
                return Ok(None);
            }
            let mut buffer = buffers.take();
            let ran = match stage.run(last, &mut buffer) {
                Ok(ran) => ran,
                Err(error) => {
                    buffers.put(buffer);
                    return Err(error);
                }
            };
            let drops = mutants::on("drop_rest_of_input");
            if let Some(empty) = stage.input.take_if(|chunk| drops || chunk.done == chunk.len) {
                buffers.put(empty.buffer);
            }
            if ran.made > 0 {
                return Ok(Some(Chunk { buffer, len: ran.made, done: 0 }));
            }
            buffers.put(buffer);
            if stage.input.is_some() || (ran.taken == 0 && !ran.done) {
                // It has made nothing of what it took, and leaves the rest for the next step; or it waits.
                return Ok(None);
            }
        }
    }

    /// What each stage did.
    pub(crate) fn reports(self, succeeded: bool) -> Vec<StageReport> {
        self.stages.into_iter().map(|stage| stage.report(succeeded)).collect()
    }
}
