//! Several functions in order, what happens when one of them fails, and what each of them costs.
//!
//! When a call fails or panics, the function is restarted and sees the messages of the batch again, one by one: only those with which it fails
//! alone are treated as [`OnFailure`] says. So a client whose message makes a function fail does not stop the service for the others.
//!
//! *This has a limit*, so that such messages cannot use up a worker. A failed call costs its own time and [`FAILURE_NS`]. The failures of a
//! function may cost three deadlines (at least 10 ms), and a sixteenth of the time that passes; of failures that took a whole deadline there may be four at once, and one a
//! second. When they have cost more, the function is not
//! called until that is made up for, and for at least 10 ms. Meanwhile its messages are treated as [`OnFailure`] says, as they are while a
//! restart is not ready. If the restart itself fails, it is tried again after 10 ms, then after twice as long each time, up to 10 s.
//!
//! A function that does not fail and takes more of the worker than it may is suspended (`chain/share.rs`).

mod share;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use mqueue::count::Counter;
use wire::DropReason;

use crate::function::{
    Command, CommandError, Direction, Failure, Function, Merge, Notice, Reading,
};
use crate::messages::{Messages, RequestId, Tally};
use crate::spec::OnFailure;
use crate::state::{Owner, StateKind};
use crate::trace::Trace;
use share::Share;

/// The shortest and the longest time for which a failing function is not called.
const PAUSE_NS_MIN: u64 = 10_000_000;
const PAUSE_NS_MAX: u64 = 10_000_000_000;
/// What a failed call costs besides its own time: its restart, and the calls for single messages.
const FAILURE_NS: i64 = 250_000;
/// Failures may cost this part of the time that passes.
const FAILING_PART: i64 = 16;
/// What they may cost at once: deadlines, and at least this long.
const FAILING_DEADLINES: i64 = 3;
const FAILING_NS_MIN: i64 = 10_000_000;

/// Failures that took a whole deadline: how many there may be at once, and the time for one more. A message with which a function does not end costs two of them, that of
/// its batch and its own; so one such message in two seconds keeps nothing else from the function.
const LATE_AT_ONCE: i64 = 4;
const LATE_NS: i64 = 1_000_000_000;

const PANICKED: &str = "it panicked";

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
    /// Requests that it put into the ring of its application.
    delivered,
    /// Requests that were dropped because that ring had no room, or it has none.
    ring_full,
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
    /// Times that it was suspended, because it took more of a worker than a user's function may.
    suspensions,
    /// Time in calls, in nanoseconds.
    time_ns,
}

impl Counters {
    /// Why the last call failed that did; empty before that.
    pub fn last_failure(&self) -> String {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Where an application reads the requests that a function delivers to it, on one worker.
pub trait Sink: Send {
    /// Puts a request there. False: there is no room.
    fn put(&mut self, message: &[u8], request: &RequestId) -> bool;

    /// Makes visible what was put, and wakes up the reader.
    fn publish(&mut self);
}

/// A [`Sink`] that stays when the function gets other instances. Two of them on one worker never run at the same time.
pub type SharedSink = Arc<Mutex<dyn Sink>>;

/// A function in a chain.
pub struct Link {
    id: u64,
    function: Box<dyn Function>,
    policy: Policy,
    counters: Arc<Counters>,
    sink: Option<SharedSink>,
    state: StateKind,
    /// Until when it is not called, and then not before it is restarted; `None` if it works.
    failing_until_ns: Option<u64>,
    /// The pause after the next restart that fails.
    back_off_ns: u64,
    /// What failures may still cost; negative if they cost more. See the module's text.
    allowance_ns: i64,
    /// How long ago the last late failures would have been, one after the other; see [`LATE_NS`].
    late_ns: i64,
    /// When these were calculated.
    allowed_ns: u64,
    /// When its last call for a batch ended.
    now_ns: u64,
    /// Time in calls, see [`Chain::take_spent_ns`].
    spent_ns: u64,
    /// What it may take of the worker, if that is limited.
    share: Option<Share>,
}

impl Link {
    /// `id` is unique for as long as the process runs.
    pub fn new(
        id: u64,
        function: Box<dyn Function>,
        policy: Policy,
        counters: Arc<Counters>,
    ) -> Self {
        let allowance_ns = failing_ns_max(&policy);
        Self {
            id,
            function,
            policy,
            counters,
            sink: None,
            state: StateKind::Mergeable,
            failing_until_ns: None,
            back_off_ns: PAUSE_NS_MIN,
            allowance_ns,
            late_ns: LATE_AT_ONCE * LATE_NS,
            allowed_ns: 0,
            now_ns: 0,
            spent_ns: 0,
            share: None,
        }
    }

    /// The same with a limit: it and the others of the chain with one may take this part of the worker's time together, in percent.
    pub fn with_share(self, percent: Option<u32>) -> Self {
        Self { share: percent.map(Share::new), ..self }
    }

    /// The same with a ring of an application.
    pub fn with_sink(self, sink: Option<SharedSink>) -> Self {
        Self { sink, ..self }
    }

    /// The same with a state of another kind.
    pub fn with_state(self, state: StateKind) -> Self {
        Self { state, ..self }
    }

    fn decide(&mut self, direction: Direction, messages: &mut Messages, clock: &dyn Fn() -> u64) {
        self.counters.messages.add(messages.open() as u64);
        self.counters.bytes.add(messages.open_bytes());
        let is_out = self.failing_until_ns.is_some() && !self.works(clock())
            || self.share.as_ref().is_some_and(Share::was_suspended) && self.waits(clock());
        if is_out {
            self.fall_back(messages);
        } else if !self.call(direction, messages, clock) {
            self.isolate(direction, messages, clock);
        }
    }

    /// One call for the open messages. False: it failed, and nothing has changed.
    fn call(
        &mut self,
        direction: Direction,
        messages: &mut Messages,
        clock: &dyn Fn() -> u64,
    ) -> bool {
        let begin_ns = clock();
        messages.begin_call(begin_ns);
        let before = messages.tally();
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
        self.counters.batches.one();
        self.counters.time_ns.add(took_ns);
        self.spent_ns += took_ns;
        if let Some(share) = &mut self.share {
            share.charge(took_ns);
        }
        self.counters.overruns.add(u64::from(took_ns > self.policy.deadline_ns));
        self.now_ns = end_ns;
        if let Some(failure) = failure {
            messages.undo();
            self.fail(end_ns, took_ns, failure);
            return false;
        }
        if direction == Direction::Requests && messages.tally().delivered != before.delivered {
            self.deliver(messages);
        }
        self.count_decisions(direction, before, messages.tally());
        self.counters.passed.add(messages.open() as u64);
        true
    }

    /// What the call delivers goes into the ring. The lock is free: only instances of one worker have it.
    fn deliver(&mut self, messages: &mut Messages) {
        let (mut put, mut refused) = (0, 0);
        let mut sink = self.sink.as_ref().and_then(|sink| sink.try_lock().ok());
        messages.put_delivered(|message, request| {
            let taken = sink.as_mut().is_some_and(|sink| sink.put(message, request));
            put += u64::from(taken);
            refused += u64::from(!taken);
            taken
        });
        if let Some(sink) = &mut sink {
            sink.publish();
        }
        self.counters.delivered.add(put);
        self.counters.ring_full.add(refused);
    }

    /// After a failed call: the function sees the open messages one by one, as long as it may fail.
    #[cold]
    fn isolate(&mut self, direction: Direction, messages: &mut Messages, clock: &dyn Fn() -> u64) {
        if messages.open() == 1 {
            return self.fall_back(messages);
        }
        for index in 0..messages.len() {
            messages.set_aside(index);
        }
        for index in 0..messages.len() {
            if messages.bring_back(index) {
                if !self.works(self.now_ns) || !self.call(direction, messages, clock) {
                    self.fall_back(messages);
                }
                messages.set_aside(index);
            }
        }
        for index in 0..messages.len() {
            messages.bring_back(index);
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
        match restarted.unwrap_or_else(|_| Err(Failure(PANICKED.to_owned()))) {
            Ok(false) => return false,
            Ok(true) => {}
            Err(failure) => {
                self.fail(now_ns, 0, failure);
                let until_ns = now_ns + self.back_off_ns;
                self.failing_until_ns = self.failing_until_ns.max(Some(until_ns));
                self.back_off_ns = (2 * self.back_off_ns).min(PAUSE_NS_MAX);
                return false;
            }
        }
        self.back_off_ns = PAUSE_NS_MIN;
        self.failing_until_ns = None;
        self.counters.restarts.one();
        true
    }

    /// It is called again after a restart: at once, or after a pause if failures have taken too much time.
    #[cold]
    fn fail(&mut self, now_ns: u64, took_ns: u64, failure: Failure) {
        self.counters.failures.one();
        self.note(failure.0);
        let passed_ns = now_ns.saturating_sub(self.allowed_ns) as i64;
        self.allowed_ns = now_ns;
        let most_ns = failing_ns_max(&self.policy);
        let allowance_ns = self.allowance_ns.saturating_add(passed_ns / FAILING_PART).min(most_ns);
        self.allowance_ns = allowance_ns - took_ns as i64 - FAILURE_NS;
        let pause_ns = match self.allowance_ns {
            1.. => 0,
            spent_ns => PAUSE_NS_MIN.max(FAILING_PART as u64 * spent_ns.unsigned_abs()),
        };
        self.late_ns = self.late_ns.saturating_add(passed_ns).min(LATE_AT_ONCE * LATE_NS);
        let is_late = took_ns >= self.policy.deadline_ns && !mutants::on("late_without_end");
        self.late_ns -= if is_late { LATE_NS } else { 0 };
        // There must be room for one more.
        let late_pause_ns = (LATE_NS - self.late_ns).max(0) as u64;
        self.failing_until_ns = Some(now_ns + pause_ns.max(late_pause_ns));
    }

    /// Why it failed, or does not run.
    fn note(&self, why: String) {
        // Not waited for: a reader only copies it.
        match self.counters.last_failure.try_lock() {
            Ok(mut last) => *last = why,
            Err(TryLockError::Poisoned(last)) => *last.into_inner() = why,
            Err(TryLockError::WouldBlock) => {}
        }
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

    fn notify(&mut self, notice: &Notice) {
        if self.failing_until_ns.is_some() || !self.function.wants_notices() {
            return;
        }
        let told = catch_unwind(AssertUnwindSafe(|| self.function.notice(notice)));
        if told.is_err() {
            self.fail(self.now_ns, 0, Failure(PANICKED.to_owned()));
        }
    }

    /// Writes settings, between two batches, and changes what becomes of messages while the function does not work. A function that has failed,
    /// or fails with a value, gets it at its restart.
    fn configure(&mut self, settings: &[(usize, u64)], on_failure: OnFailure) {
        self.policy.on_failure = on_failure;
        for (register, value) in settings {
            let write = Command::Write { register: *register, value: *value };
            match self.command(write) {
                Err(CommandError::Refused(why)) => self.fail(self.now_ns, 0, why),
                Err(CommandError::Failed(_)) => {}
                _ => continue,
            }
            // It has failed: the value waits for the restart.
            let _ = self.command(write);
        }
    }

    fn command(&mut self, command: Command) -> Result<Reading, CommandError> {
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
                Command::Read | Command::Sample => {}
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
            let values = function.read()?;
            // A copy of the state takes the worker's time.
            let (state, state_bytes) = match command {
                Command::Read => {
                    let state = function.state()?;
                    let state_bytes = state.len() as u64;
                    (state, state_bytes)
                }
                Command::Sample => (Vec::new(), function.state_bytes()?),
                Command::Reset | Command::Write { .. } => (Vec::new(), 0),
            };
            Ok(Reading { values, state, state_bytes })
        }));
        let done = done.unwrap_or_else(|_| Err(Failure(PANICKED.to_owned()).into()));
        if let Err(CommandError::Failed(failure)) = &done {
            self.fail(self.now_ns, 0, failure.clone());
        }
        done
    }
}

fn failing_ns_max(policy: &Policy) -> i64 {
    (FAILING_DEADLINES * policy.deadline_ns as i64).max(FAILING_NS_MIN)
}

fn is_setting(function: &dyn Function, register: usize) -> bool {
    let register = function.registers().get(register);
    register.is_some_and(|register| register.merge == Merge::Setting)
}

/// A place in a new order of a chain.
pub enum Arranged {
    /// The function with this id, which is in the chain; it keeps its state.
    Kept(u64),
    /// The same with other settings, by register, and another policy for its failures.
    Configured(u64, Vec<(usize, u64)>, OnFailure),
    /// Another one.
    New(Link),
}

/// See the [crate's text](crate).
#[derive(Default)]
pub struct Chain {
    links: Vec<Link>,
    /// One of them wants notices.
    wants_notices: bool,
    /// One of them has a limit of its time.
    has_shares: bool,
    /// Since when the time of those is counted.
    counted_since_ns: u64,
    trace: Option<Box<Trace>>,
}

impl Chain {
    /// A chain of these functions.
    pub fn new(links: Vec<Link>) -> Self {
        let mut chain = Self::default();
        chain.arrange(links.into_iter().map(Arranged::New).collect());
        chain
    }

    /// Whether it has no functions.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// How many functions it has.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    /// Whether a function wants [notices](Notice).
    #[inline]
    pub fn wants_notices(&self) -> bool {
        self.wants_notices
    }

    /// Which worker's functions see a request.
    pub fn owner(&self) -> Owner {
        Owner::of(self.links.iter().map(|link| link.state))
    }

    /// Time in calls of its functions since the last time that this was asked.
    pub fn take_spent_ns(&mut self) -> u64 {
        self.links.iter_mut().map(|link| std::mem::take(&mut link.spent_ns)).sum()
    }

    /// Tells the functions that want to know.
    pub fn notify(&mut self, notice: &Notice) {
        self.links.iter_mut().for_each(|link| link.notify(notice));
    }

    /// Lets the functions decide about a batch.
    pub fn decide(
        &mut self,
        direction: Direction,
        messages: &mut Messages,
        clock: &dyn Fn() -> u64,
    ) {
        if self.trace.as_ref().is_some_and(|trace| trace.wants_more()) {
            return self.decide_traced(direction, messages, clock);
        }
        let mut decide = |link: &mut Link| {
            if messages.open() > 0 {
                link.decide(direction, messages, clock);
            }
        };
        match direction {
            Direction::Requests => self.links.iter_mut().for_each(&mut decide),
            Direction::Replies => self.links.iter_mut().rev().for_each(&mut decide),
        }
        if self.has_shares {
            self.settle_shares();
        }
    }

    /// The same for a batch whose first messages are traced.
    #[cold]
    fn decide_traced(
        &mut self,
        direction: Direction,
        messages: &mut Messages,
        clock: &dyn Fn() -> u64,
    ) {
        let Some(trace) = &mut self.trace else { return };
        trace.begin(direction, messages, clock());
        let mut decide = |link: &mut Link| {
            let open = messages.open();
            if open > 0 {
                let begin_ns = clock();
                link.decide(direction, messages, clock);
                let took_ns = clock().saturating_sub(begin_ns);
                trace.step(link.id, open, took_ns, messages);
            }
        };
        match direction {
            Direction::Requests => self.links.iter_mut().for_each(&mut decide),
            Direction::Replies => self.links.iter_mut().rev().for_each(&mut decide),
        }
        trace.end();
        if self.has_shares {
            self.settle_shares();
        }
    }

    /// Traces the next messages, or none. Returns the trace before.
    pub fn set_trace(&mut self, trace: Option<Box<Trace>>) -> Option<Box<Trace>> {
        std::mem::replace(&mut self.trace, trace)
    }

    /// Gives the chain these functions in this order. Returns those that it no longer has, which the caller drops where that may take
    /// long. An id that it does not have is skipped.
    pub fn arrange(&mut self, order: Vec<Arranged>) -> Vec<Link> {
        let mut former = std::mem::take(&mut self.links);
        let mut keep = |id: u64| {
            let kept = former.iter().position(|link| link.id == id);
            kept.map(|kept| former.remove(kept))
        };
        for place in order {
            match place {
                Arranged::New(mut link) => {
                    link.notify(&Notice::Attached);
                    self.links.push(link);
                }
                Arranged::Kept(id) => self.links.extend(keep(id)),
                Arranged::Configured(id, settings, on_failure) => {
                    let Some(mut link) = keep(id) else { continue };
                    link.configure(&settings, on_failure);
                    self.links.push(link);
                }
            }
        }
        former.iter_mut().for_each(|link| link.notify(&Notice::Detached));
        self.wants_notices = self.links.iter().any(|link| link.function.wants_notices());
        self.has_shares = self.links.iter().any(|link| link.share.is_some());
        former
    }

    /// Does a command for the function with this id. Returns the values of its registers afterwards.
    pub fn command(&mut self, id: u64, command: Command) -> Result<Reading, CommandError> {
        let link = self.links.iter_mut().find(|link| link.id == id);
        link.ok_or(CommandError::Gone)?.command(command)
    }
}
