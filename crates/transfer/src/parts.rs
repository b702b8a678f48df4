//! A transfer that is done in parts, each of which is an entry of the scoreboard.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::engine::{Done, Outcome};
use crate::error::TransferError;
use crate::flow::{Report, StageReport};
use crate::scoreboard::EntryId;

/// The parts of one transfer.
pub(crate) struct Whole(Mutex<State>);

struct State {
    entries: Vec<EntryId>,
    outcomes: Vec<Option<Outcome>>,
    /// Taken by the last part.
    done: Option<Done>,
    /// The first part that has failed; without one, how many there are.
    failed: usize,
}

/// What follows the end of a part.
pub(crate) enum Next {
    /// Others are in flight.
    Nothing,
    /// It has failed: those behind it are cancelled. Those before it go on, so that all bytes before the failure are moved.
    Cancel(Vec<EntryId>),
    /// It was the last one: the caller gets this.
    Answer(Done, Outcome),
}

impl Whole {
    /// Of this many parts.
    pub(crate) fn new(parts: usize, done: Done) -> Self {
        let outcomes = (0..parts).map(|_| None).collect();
        let state = State { entries: Vec::new(), outcomes, done: Some(done), failed: parts };
        Self(Mutex::new(state))
    }

    /// Names the entries, before any of them runs.
    pub(crate) fn begin(&self, entries: &[EntryId]) {
        self.state().entries = entries.to_vec();
    }

    /// A part has ended.
    pub(crate) fn end(&self, part: usize, outcome: Outcome) -> Next {
        let mut state = self.state();
        let mut behind = Vec::new();
        if outcome.result.is_err() && part < state.failed {
            // Empty if a part ends before the others have been named: they see their own failures.
            behind.extend(state.entries.iter().take(state.failed).skip(part + 1));
            state.failed = part;
        }
        state.outcomes[part] = Some(outcome);
        if state.outcomes.iter().all(Option::is_some)
            && let Some(done) = state.done.take()
        {
            let outcomes: Vec<Outcome> = state.outcomes.drain(..).flatten().collect();
            return Next::Answer(done, joined(&outcomes));
        }
        if behind.is_empty() { Next::Nothing } else { Next::Cancel(behind) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The outcome of the whole: it failed as its first part did that failed by itself. Its counts are those of the
/// bytes up to the first one that was not moved.
fn joined(outcomes: &[Outcome]) -> Outcome {
    let errors = || outcomes.iter().filter_map(|outcome| outcome.result.as_ref().err());
    let error = errors().find(|error| **error != TransferError::Cancelled).or(errors().next());
    let whole = outcomes.iter().take_while(|outcome| outcome.result.is_ok()).count();
    let counted = &outcomes[..outcomes.len().min(whole + 1)];
    let report = Report {
        read: counted.iter().map(|outcome| outcome.report.read).sum(),
        written: counted.iter().map(|outcome| outcome.report.written).sum(),
        stages: stages(counted),
    };
    Outcome { result: error.map_or(Ok(()), |error| Err(error.clone())), report }
}

/// What the stages of all parts did.
fn stages(outcomes: &[Outcome]) -> Vec<StageReport> {
    let mut sums: Vec<StageReport> = Vec::new();
    for Outcome { report, .. } in outcomes {
        if sums.is_empty() {
            sums.clone_from(&report.stages);
            continue;
        }
        for (sum, part) in sums.iter_mut().zip(&report.stages) {
            (sum.bytes, sum.made) = (sum.bytes + part.bytes, sum.made + part.made);
            sum.finished &= part.finished;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(result: Result<(), TransferError>, bytes: u64) -> Outcome {
        Outcome { result, report: Report { read: bytes + 1, written: bytes, ..Report::default() } }
    }

    #[test]
    fn counts_end_at_the_first_byte_that_was_not_moved() {
        let whole = joined(&[outcome(Ok(()), 10), outcome(Ok(()), 20)]);
        assert_eq!((whole.result, whole.report.read, whole.report.written), (Ok(()), 32, 30));
        let failed = [
            outcome(Ok(()), 10),
            outcome(Err(TransferError::Cancelled), 3),
            outcome(Ok(()), 30),
            outcome(Err(TransferError::DiskFull), 5),
        ];
        let whole = joined(&failed);
        assert_eq!((whole.result, whole.report.written), (Err(TransferError::DiskFull), 13));
        let cancelled = || outcome(Err(TransferError::Cancelled), 7);
        let cancelled = joined(&[cancelled(), cancelled()]);
        assert_eq!(
            (cancelled.result, cancelled.report.written),
            (Err(TransferError::Cancelled), 7)
        );
    }
}
