//! Several functions in order, what happens when one of them fails, and what each of them costs.
//!
//! A function that fails or panics is not called again until its back-off has passed; then it is restarted. The back-off begins at
//! 10 ms and doubles with each failure up to 10 s; after 10 s without a failure it begins again at 10 ms. The batch of the failed call, and
//! all messages until the restart, are treated as [`OnFailure`] says.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use mqueue::count::Counter;
use wire::DropReason;

use crate::function::{Command, CommandError, Direction, Failure, Function, Merge};
use crate::messages::{Messages, Tally};

const BACK_OFF_MIN_NS: u64 = 10_000_000;
const BACK_OFF_MAX_NS: u64 = 10_000_000_000;

const PANICKED: &str = "it panicked";

/// What becomes of messages about which a failed function does not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// They pass.
    Open,
    /// They are dropped as `function_failed`.
    Closed,
}

/// How a chain treats one of its functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// See [`OnFailure`].
    pub on_failure: OnFailure,
    /// How long a call for one batch may take, in nanoseconds. A longer one is counted as an overrun. The host of a sandboxed
    /// function also ends it.
    pub deadline_ns: u64,
}

macro_rules! counters {
    ($( $(#[doc = $doc:literal])+ $field:ident, )+) => {
        /// What one function of a chain has done on one worker. The worker writes, others read.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Counters {
            $( $(#[doc = $doc])+ pub $field: Counter, )+
            last_failure: Mutex<String>,
        }

        /// Values of the counters of the same names, summed over workers.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Snapshot { $( $(#[doc = $doc])+ pub $field: u64, )+ }

        impl Snapshot {
            /// Adds what one worker has counted.
            pub fn add(&mut self, counters: &Counters) {
                $( self.$field += counters.$field.value(); )+
            }

            /// All values with their names, and what they count.
            pub fn named(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$( (stringify!($field), concat!($($doc),+).trim_ascii(), self.$field), )+]
            }
        }
    };
}

counters! {
    /// Messages that the function decided about, and those that met it while it was failing.
    messages,
    /// Their bytes.
    bytes,
    /// Calls: one for each batch.
    batches,
    /// Messages that went on, rewritten or steered ones among them.
    passed,
    /// Messages that it dropped.
    dropped,
    /// Requests that it answered.
    replied,
    /// Messages that it rewrote.
    rewritten,
    /// Requests that it steered.
    steered,
    /// Calls that failed.
    failures,
    /// Messages that passed because it was failing.
    failed_open,
    /// Messages that were dropped because it was failing.
    failed_closed,
    /// Restarts after a failure.
    restarts,
    /// Calls that took longer than the deadline.
    overruns,
    /// Time in calls, in nanoseconds.
    time_ns,
}

impl Counters {
    /// Why the last call failed that did; empty before that.
    pub fn last_failure(&self) -> String {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A function in a chain.
pub struct Link {
    id: u64,
    function: Box<dyn Function>,
    policy: Policy,
    counters: Arc<Counters>,
    /// Until when it is not called; `None` if it works.
    failing_until_ns: Option<u64>,
    back_off_ns: u64,
    /// When it was restarted last, or that was tried.
    restarted_ns: u64,
    /// When its last call for a batch ended.
    now_ns: u64,
}

impl Link {
    /// `id` is unique for as long as the process runs.
    pub fn new(
        id: u64,
        function: Box<dyn Function>,
        policy: Policy,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            id,
            function,
            policy,
            counters,
            failing_until_ns: None,
            back_off_ns: BACK_OFF_MIN_NS,
            restarted_ns: 0,
            now_ns: 0,
        }
    }

    fn decide(&mut self, direction: Direction, messages: &mut Messages, clock: &dyn Fn() -> u64) {
        let counters = &self.counters;
        let before = messages.tally();
        counters.messages.add(messages.open() as u64);
        counters.bytes.add(messages.open_bytes());
        let begin_ns = clock();
        if !self.works(begin_ns) {
            return self.fall_back(messages);
        }
        let function = AssertUnwindSafe(&mut self.function);
        let call = AssertUnwindSafe(|| {
            let AssertUnwindSafe(function) = { function };
            function.decide(direction, messages)
        });
        let failure = match catch_unwind(call) {
            Ok(result) => result.err(),
            Err(_) => Some(Failure(PANICKED.to_owned())),
        };
        let end_ns = clock();
        let took_ns = end_ns.saturating_sub(begin_ns);
        let counters = &self.counters;
        counters.batches.one();
        counters.time_ns.add(took_ns);
        counters.overruns.add(u64::from(took_ns > self.policy.deadline_ns));
        self.now_ns = end_ns;
        self.count_decisions(direction, before, messages.tally());
        match failure {
            None => self.counters.passed.add(messages.open() as u64),
            Some(failure) => {
                self.fail(end_ns, failure);
                self.fall_back(messages);
            }
        }
    }

    fn count_decisions(&self, direction: Direction, before: Tally, after: Tally) {
        let counters = &self.counters;
        counters.dropped.add(after.dropped - before.dropped);
        counters.replied.add(after.replied - before.replied);
        counters.rewritten.add(after.rewritten - before.rewritten);
        // A reply passes.
        if direction == Direction::Requests {
            counters.steered.add(after.steered - before.steered);
        }
    }

    /// Whether it can be called, after a restart if it is time for one.
    fn works(&mut self, now_ns: u64) -> bool {
        match self.failing_until_ns {
            None => true,
            Some(until_ns) if now_ns < until_ns => false,
            Some(_) => self.restart(now_ns),
        }
    }

    #[cold]
    fn restart(&mut self, now_ns: u64) -> bool {
        let function = AssertUnwindSafe(&mut self.function);
        let restarted = catch_unwind(move || {
            let AssertUnwindSafe(function) = { function };
            function.restart()
        });
        self.restarted_ns = now_ns;
        let failed = restarted.unwrap_or_else(|_| Err(Failure(PANICKED.to_owned()))).err();
        if let Some(failure) = failed {
            self.fail(now_ns, failure);
            return false;
        }
        self.failing_until_ns = None;
        self.counters.restarts.one();
        true
    }

    #[cold]
    fn fail(&mut self, now_ns: u64, failure: Failure) {
        self.counters.failures.one();
        // Not waited for: a reader only copies it.
        match self.counters.last_failure.try_lock() {
            Ok(mut last) => *last = failure.0,
            Err(TryLockError::Poisoned(last)) => *last.into_inner() = failure.0,
            Err(TryLockError::WouldBlock) => {}
        }
        if now_ns.saturating_sub(self.restarted_ns) >= BACK_OFF_MAX_NS {
            self.back_off_ns = BACK_OFF_MIN_NS;
        }
        self.failing_until_ns = Some(now_ns + self.back_off_ns);
        self.back_off_ns = (2 * self.back_off_ns).min(BACK_OFF_MAX_NS);
    }

    /// What becomes of the open messages of a function that failed.
    #[cold]
    fn fall_back(&self, messages: &mut Messages) {
        let open = messages.open() as u64;
        if self.policy.on_failure == OnFailure::Open {
            return self.counters.failed_open.add(open);
        }
        self.counters.failed_closed.add(open);
        for index in 0..messages.len() {
            messages.drop(index, DropReason::FunctionFailed);
        }
    }

    fn command(&mut self, command: Command) -> Result<Vec<u64>, CommandError> {
        let function = &mut self.function;
        if self.failing_until_ns.is_some() {
            let Command::Write { register, value } = command else {
                return Err(CommandError::Failing);
            };
            // The other workers write it now.
            if !is_setting(&**function, register) {
                return Err(CommandError::NoSetting);
            }
            function.write_at_restart(register, value)?;
            return Err(CommandError::Deferred);
        }
        let done = catch_unwind(AssertUnwindSafe(|| {
            match command {
                Command::Read => {}
                Command::Reset => function.reset()?,
                Command::Write { register, value } => {
                    if !is_setting(&**function, register) {
                        return Err(CommandError::NoSetting);
                    }
                    if let Err(refused) = function.write(register, value) {
                        // A function that can still be read has only refused the value.
                        function.read().map_err(|_| refused.clone())?;
                        return Err(CommandError::Refused(refused));
                    }
                }
            }
            Ok(function.read()?)
        }));
        let done = done.unwrap_or_else(|_| Err(Failure(PANICKED.to_owned()).into()));
        if let Err(CommandError::Failed(failure)) = &done {
            self.fail(self.now_ns, failure.clone());
        }
        done
    }
}

fn is_setting(function: &dyn Function, register: usize) -> bool {
    let register = function.registers().get(register);
    register.is_some_and(|register| register.merge == Merge::Setting)
}

/// A place in a new order of a chain.
pub enum Arranged {
    /// The function with this id, which is in the chain; it keeps its state.
    Kept(u64),
    /// Another one.
    New(Link),
}

/// See the [crate's text](crate).
#[derive(Default)]
pub struct Chain {
    links: Vec<Link>,
}

impl Chain {
    /// A chain of these functions.
    pub fn new(links: Vec<Link>) -> Self {
        Self { links }
    }

    /// Whether it has no functions.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Lets the functions decide about a batch.
    pub fn decide(
        &mut self,
        direction: Direction,
        messages: &mut Messages,
        clock: &dyn Fn() -> u64,
    ) {
        let mut decide = |link: &mut Link| {
            if messages.open() > 0 {
                link.decide(direction, messages, clock);
            }
        };
        match direction {
            Direction::Requests => self.links.iter_mut().for_each(&mut decide),
            Direction::Replies => self.links.iter_mut().rev().for_each(&mut decide),
        }
    }

    /// Gives the chain these functions in this order. Returns those that it no longer has, which the caller drops where that may take
    /// long. An id that it does not have is skipped.
    pub fn arrange(&mut self, order: Vec<Arranged>) -> Vec<Link> {
        let mut former = std::mem::take(&mut self.links);
        for place in order {
            match place {
                Arranged::New(link) => self.links.push(link),
                Arranged::Kept(id) => {
                    let kept = former.iter().position(|link| link.id == id);
                    self.links.extend(kept.map(|kept| former.remove(kept)));
                }
            }
        }
        former
    }

    /// Does a command for the function with this id. Returns the values of its registers afterwards.
    pub fn command(&mut self, id: u64, command: Command) -> Result<Vec<u64>, CommandError> {
        let link = self.links.iter_mut().find(|link| link.id == id);
        link.ok_or(CommandError::Gone)?.command(command)
    }
}
