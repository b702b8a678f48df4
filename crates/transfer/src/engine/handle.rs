//! A transfer whose owner waits for it: on a thread, or as a future.

use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::Shared;
use crate::command::device::Device;
use crate::command::report::Outcome;
use crate::command::stage::StageKind;
use crate::engine::scoreboard::{Activity, EntryId};
use crate::run::progress::Progress;

/// A transfer in flight, or one that has ended.
#[derive(Clone)]
pub struct TransferHandle {
    pub(super) shared: Arc<Shared>,
    /// One for each of its parts; none if there was nothing to do.
    pub(crate) entries: Arc<[EntryId]>,
    pub(super) status: Arc<Status>,
}

/// A transfer in flight as others see it.
#[derive(Debug)]
pub(crate) struct Status {
    pub(crate) source: Device,
    pub(crate) sink: Device,
    pub(crate) stages: Vec<StageKind>,
    /// Bytes that it holds at most.
    pub(crate) memory: u64,
    pub(crate) started: Instant,
    /// How far it is, with all of its parts.
    pub(crate) progress: Arc<Progress>,
}

impl TransferHandle {
    /// What it does; `None`: it has ended.
    pub fn activity(&self) -> Option<Activity> {
        let board = self.shared.board();
        let found = self.entries.iter().filter_map(|id| board.entries.activity(*id));
        found.max_by_key(|activity| *activity == Activity::Running)
    }

    pub(crate) fn status(&self) -> &Arc<Status> {
        &self.status
    }

    /// Ends the transfer, with what it has done so far.
    pub fn cancel(&self) {
        self.entries.iter().for_each(|id| self.shared.cancel(*id));
    }

    /// How far it is.
    pub fn progress(&self) -> &Progress {
        &self.status.progress
    }
}

/// A transfer whose end its owner waits for: with [`Self::wait`], or with `.await` in any executor, which is woken by the engine. Dropping it
/// does not cancel.
///
/// ```
/// # use transfer::{DigestKind, Engine, Limits, Source};
/// # async fn digest(engine: &Engine, file: std::fs::File, sink: std::fs::File) -> Result<(), transfer::TransferError> {
/// let outcome = engine.submit(Source::file(file, 0, None).digest(DigestKind::Sha256).file(sink, 0))?.await;
/// println!("{:?}", outcome.report.digest());
/// # Ok(())
/// # }
/// ```
pub struct Transfer {
    end: Arc<OutcomeCell>,
    pub(crate) handle: TransferHandle,
}

impl Future for Transfer {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.end.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.outcome {
            Some(outcome) => Poll::Ready(outcome.clone()),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Transfer {
    pub(super) fn new(end: Arc<OutcomeCell>, handle: TransferHandle) -> Self {
        Self { end, handle }
    }

    /// Waits for the end. [`Command::stall`](crate::Command::stall) limits how long almost nothing may move.
    pub fn wait(self) -> Outcome {
        loop {
            if let Some(outcome) = self.wait_for(Duration::from_secs(3600)) {
                return outcome;
            }
        }
    }

    /// Waits at most this long; `None`: it is still in flight.
    pub fn wait_for(&self, timeout: Duration) -> Option<Outcome> {
        let state = self.end.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_in_flight = |state: &mut State| state.outcome.is_none();
        let waited = self.end.changed.wait_timeout_while(state, timeout, is_in_flight);
        waited.unwrap_or_else(PoisonError::into_inner).0.outcome.clone()
    }

    /// Ends it, with what it has done so far.
    pub fn cancel(&self) {
        self.handle.cancel();
    }

    /// How far it is.
    pub fn progress(&self) -> &Progress {
        self.handle.progress()
    }
}

/// Where the outcome of a [`Transfer`] arrives.
#[derive(Default)]
pub(super) struct OutcomeCell {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    /// Of the task that awaits it.
    waker: Option<Waker>,
}

impl OutcomeCell {
    pub(super) fn set(&self, outcome: Outcome) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.outcome = Some(outcome);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
