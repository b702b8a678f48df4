//! Ends of transfers for a program with a loop of its own: an eventfd counts them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use sys::readiness::WakeFd;

use crate::command::error::TransferError;
use crate::command::pipeline::Command;
use crate::command::report::Outcome;
use crate::engine::{Engine, TransferHandle};

/// Outcomes of transfers that have ended, of one engine of this process or of several. Each adds 1 to an eventfd of the program when it
/// is here; others may add to it as well ([`crate::Client::signal`]).
///
/// ```
/// # use std::os::fd::{FromRawFd as _, OwnedFd};
/// # use transfer::{DigestKind, Engine, Limits, Outcomes, Source};
/// # fn digest(engine: &Engine, eventfd: OwnedFd, file: std::fs::File, sink: std::fs::File) -> Result<(), transfer::TransferError> {
/// let outcomes = Outcomes::new(eventfd).expect("it has EFD_NONBLOCK");
/// outcomes.submit(engine, 7, Source::file(file, 0, None).digest(DigestKind::Sha256).file(sink, 0))?;
/// // When the eventfd is readable:
/// while let Some((number, outcome)) = outcomes.next() {
///     println!("{number}: {:?}", outcome.report.digest());
/// }
/// # Ok(())
/// # }
/// ```
pub struct Outcomes {
    counter: WakeFd,
    here: Mutex<VecDeque<(u64, Outcome)>>,
}

impl Outcomes {
    /// With an eventfd that was made with `EFD_NONBLOCK`, or a copy of one; another descriptor comes back.
    pub fn new(eventfd: OwnedFd) -> Result<Arc<Self>, OwnedFd> {
        let counter = WakeFd::counting(eventfd)?;
        Ok(Arc::new(Self { counter, here: Mutex::default() }))
    }

    /// Starts a transfer whose outcome comes here with this number. One that is refused does not come.
    pub fn submit(
        self: &Arc<Self>,
        engine: &Engine,
        number: u64,
        command: Command,
    ) -> Result<TransferHandle, TransferError> {
        let outcomes = self.clone();
        engine.submit_with(command, move |outcome| {
            let mut here = outcomes.here.lock().unwrap_or_else(PoisonError::into_inner);
            here.push_back((number, outcome));
            drop(here);
            outcomes.counter.wake();
        })
    }

    /// The next one, in the order in which transfers end.
    pub fn next(&self) -> Option<(u64, Outcome)> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}
