//! A transfer that is done in parts, each of which is an entry of the scoreboard.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::command::error::TransferError;
use crate::command::report::{Done, Outcome, Report, StageReport};
use crate::command::stage::{DigestValue, StageKind};
use crate::engine::scoreboard::EntryId;
use crate::stages::search::{Searcher, join};

/// The parts of one transfer, and what they have in common.
pub(crate) struct Parts(Mutex<State>);

struct State {
    entries: Vec<EntryId>,
    outcomes: Vec<Option<Outcome>>,
    /// Of each stage of the parts, if it searches, a search for the same.
    searchers: Vec<Option<Searcher>>,
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

impl Parts {
    /// Of this many parts.
    pub(crate) fn new(parts: usize, searchers: Vec<Option<Searcher>>, done: Done) -> Self {
        let outcomes = (0..parts).map(|_| None).collect();
        let (entries, done, failed) = (Vec::new(), Some(done), parts);
        Self(Mutex::new(State { entries, outcomes, searchers, done, failed }))
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
            if !mutants::on("go_on_behind_a_failed_part") {
                behind.extend(state.entries.iter().take(state.failed).skip(part + 1));
            }
            state.failed = part;
        }
        state.outcomes[part] = Some(outcome);
        if state.outcomes.iter().all(Option::is_some)
            && let Some(done) = state.done.take()
        {
            let outcomes: Vec<Outcome> = state.outcomes.drain(..).flatten().collect();
            return Next::Answer(done, joined(outcomes, &state.searchers));
        }
        if behind.is_empty() { Next::Nothing } else { Next::Cancel(behind) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The outcome of the whole: it failed as its first part did that failed by itself. Its counts are those of the
/// bytes up to the first one that was not moved.
fn joined(mut outcomes: Vec<Outcome>, searchers: &[Option<Searcher>]) -> Outcome {
    let errors = || outcomes.iter().filter_map(|outcome| outcome.result.as_ref().err());
    let error = errors().find(|error| **error != TransferError::Cancelled).or(errors().next());
    let result = error.map_or(Ok(()), |error| Err(error.clone()));
    let whole = outcomes.iter().take_while(|outcome| outcome.result.is_ok()).count();
    let counted = &outcomes[..outcomes.len().min(whole + 1)];
    let mut report = Report {
        read: counted.iter().map(|outcome| outcome.report.read).sum(),
        written: counted.iter().map(|outcome| outcome.report.written).sum(),
        stages: sums(counted),
    };
    let result = result.and_then(|()| join_stages(&mut outcomes, searchers, &mut report.stages));
    if result.is_err() {
        // Not all parts have stages to report: one that is given up has none.
        for stage in &mut report.stages {
            (stage.finished, stage.digest, stage.found) = (false, None, None);
        }
    }
    Outcome { result, report }
}

/// What the digests and searches of all parts have, if all have ended well.
fn join_stages(
    outcomes: &mut [Outcome],
    searchers: &[Option<Searcher>],
    reports: &mut [StageReport],
) -> Result<(), TransferError> {
    for (index, report) in reports.iter_mut().enumerate() {
        let parts = outcomes.iter_mut().filter_map(|part| part.report.stages.get_mut(index));
        match (report.kind, searchers.get(index)) {
            (StageKind::Search(_), Some(Some(search))) => {
                let found = parts.filter_map(|part| part.found.take()).collect();
                report.found = Some(join(search, found)?);
            }
            (StageKind::Digest(_), _) => {
                // Of all parts, or none.
                let digests = parts.map(|part| Some((part.digest?, part.bytes)));
                let digests = digests.collect::<Option<Vec<_>>>().unwrap_or_default();
                let joined = digests.into_iter().reduce(|(first, bytes), (next, more)| {
                    (DigestValue::joined(&first, &next, more), bytes + more)
                });
                report.digest = joined.map(|(digest, _)| digest);
            }
            _ => {}
        }
    }
    Ok(())
}

/// What the stages of all parts did.
fn sums(outcomes: &[Outcome]) -> Vec<StageReport> {
    let mut sums: Vec<StageReport> = Vec::new();
    for Outcome { report, .. } in outcomes {
        if sums.is_empty() {
            let all = report.stages.iter();
            sums = all.map(StageReport::counts).collect();
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
    use crate::command::pipeline::{Command, Place};
    use crate::command::stage::{DigestKind, SearchKind, SearchSpec, StageSpec};
    use crate::engine::{Engine, Limits};
    use crate::stages::search::COMPILED;

    fn outcome(result: Result<(), TransferError>, bytes: u64) -> Outcome {
        Outcome { result, report: Report { read: bytes + 1, written: bytes, ..Report::default() } }
    }

    #[test]
    fn parts_behind_a_failed_one_are_cancelled_and_those_before_it_go_on() {
        let entries: Vec<EntryId> = (0..5).map(EntryId::from_bits).collect();
        let parts = Parts::new(5, Vec::new(), Box::new(|_| {}));
        parts.begin(&entries);
        let cancelled = |next| match next {
            Next::Cancel(entries) => entries.iter().map(|id| id.to_bits()).collect(),
            Next::Nothing => Vec::new(),
            Next::Answer(..) => panic!("others are in flight"),
        };
        assert_eq!(cancelled(parts.end(3, outcome(Err(TransferError::DiskFull), 5))), [4]);
        assert_eq!(cancelled(parts.end(4, outcome(Err(TransferError::Cancelled), 1))), [0; 0]);
        assert_eq!(cancelled(parts.end(1, outcome(Err(TransferError::Reset), 2))), [2]);
        assert_eq!(cancelled(parts.end(2, outcome(Err(TransferError::Cancelled), 9))), [0; 0]);
        let Next::Answer(_, all) = parts.end(0, outcome(Ok(()), 10)) else {
            panic!("it is the last")
        };
        assert_eq!((all.result, all.report.written), (Err(TransferError::Reset), 12));
    }

    #[test]
    fn counts_end_at_the_first_byte_that_was_not_moved() {
        let whole = joined(vec![outcome(Ok(()), 10), outcome(Ok(()), 20)], &[]);
        assert_eq!((whole.result, whole.report.read, whole.report.written), (Ok(()), 32, 30));
        let failed = vec![
            outcome(Ok(()), 10),
            outcome(Err(TransferError::Cancelled), 3),
            outcome(Ok(()), 30),
            outcome(Err(TransferError::DiskFull), 5),
        ];
        let whole = joined(failed, &[]);
        assert_eq!((whole.result, whole.report.written), (Err(TransferError::DiskFull), 13));
        let cancelled = || outcome(Err(TransferError::Cancelled), 7);
        let cancelled = joined(vec![cancelled(), cancelled()], &[]);
        assert_eq!(
            (cancelled.result, cancelled.report.written),
            (Err(TransferError::Cancelled), 7)
        );
    }

    #[test]
    fn no_stage_has_finished_if_a_part_failed() {
        let kind = StageKind::Seal(crate::Cipher::Aes256Gcm);
        let with_seal = |finished| {
            let stage =
                StageReport { kind, bytes: 5, made: 6, finished, digest: None, found: None };
            let mut outcome = outcome(Ok(()), 6);
            outcome.report.stages = vec![stage];
            outcome
        };
        let whole = joined(vec![with_seal(true), with_seal(true)], &[]);
        assert_eq!((whole.result, whole.report.stages[0].finished), (Ok(()), true));
        // The second part is given up, so it reports no stage.
        let stalled = TransferError::FileStalled(1000);
        let failed = joined(vec![with_seal(true), outcome(Err(stalled.clone()), 3)], &[]);
        assert_eq!(failed.result, Err(stalled));
        let [stage] = &failed.report.stages[..] else { panic!("{:?}", failed.report) };
        assert_eq!((stage.bytes, stage.made, stage.finished), (5, 6, false));
    }

    #[test]
    fn crc32c_and_a_seal_take_a_part_for_each_thread_and_other_digests_do_not() {
        let path = std::env::temp_dir().join(format!("serval-parts-{}", std::process::id()));
        std::fs::write(&path, vec![7; 24 << 20]).unwrap();
        let engine = Engine::start(Limits { threads: 3, ..Limits::default() }).unwrap();
        let [crc, md5] = [DigestKind::Crc32c, DigestKind::Md5].map(StageSpec::Digest);
        let seal = StageSpec::Seal(crate::Cipher::Aes256Gcm, crate::Key::new([1; 32]));
        for (stages, parts) in [
            (vec![crc.clone(), seal.clone()], 3),
            (vec![crc.clone()], 3),
            (vec![seal.clone()], 3),
            (vec![crc, md5.clone(), seal], 1),
            (vec![md5], 1),
            (vec![], 1),
        ] {
            let file = std::fs::File::open(&path).unwrap();
            let sink = std::fs::File::create(path.with_extension("sink")).unwrap();
            let (source, sink) = (Place::File(file.into(), 0), Place::File(sink.into(), 0));
            let transfer = engine.submit(Command::new(source, None, stages, sink)).unwrap();
            assert_eq!(transfer.handle.entries.len(), parts);
            assert_eq!(transfer.wait().result, Ok(()));
        }
        std::fs::remove_file(path.with_extension("sink")).unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_search_takes_all_threads_or_as_much_memory_as_there_is() {
        let lines = SearchSpec { kind: SearchKind::Lines, pattern: b"b$".to_vec(), offsets: 3 };
        let path = std::env::temp_dir().join(format!("serval-search-{}", std::process::id()));
        let text = b"a line\nand one with b\n".repeat(1 << 20);
        std::fs::write(&path, &text).unwrap();
        for (threads, searches, parts) in [(1, 1, 1), (3, 1, 3), (64, 4, 1)] {
            let limits = Limits { threads, memory_mib: 64, ..Limits::default() };
            let engine = Engine::start(limits).unwrap();
            let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
            let file = std::fs::File::open(&path).unwrap();
            let stages = vec![StageSpec::Search(lines.clone()); searches];
            let (source, sink) = (Place::File(file.into(), 7), Place::File(null.into(), 0));
            let compiled = COMPILED.get();
            let transfer = engine.submit(Command::new(source, None, stages, sink)).unwrap();
            assert_eq!(COMPILED.get() - compiled, searches, "once for all parts");
            // The last search finds no memory for the five parts of 4 MiB that there could be.
            assert_eq!(transfer.handle.entries.len(), parts);
            let outcome = transfer.wait();
            assert_eq!(outcome.result, Ok(()));
            assert_eq!(outcome.report.stages.len(), searches);
            for stage in &outcome.report.stages {
                let found = stage.found.as_ref().unwrap();
                assert_eq!((found.count, &found.offsets[..]), (1 << 20, &[0, 22, 44][..]));
                assert_eq!(
                    (stage.bytes, outcome.report.written),
                    (text.len() as u64 - 7, stage.made)
                );
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}
