//! Host calls: a service whose messages go in batches to a function on a host thread, in any language.
//!
//! [`host_call`] returns two ends. The [`HostCallDevice`] belongs to the thread that runs [`crate::attach`]. The [`Caller`] belongs to the
//! thread that calls the function: [`Caller::wait`] waits for a batch, [`Caller::take`] copies its messages out of the rings,
//! [`Caller::reply`] and [`Caller::end_message`] answer them, and the next [`Caller::wait`] publishes the answers. A function that failed may
//! be called again for parts of the batch ([`Caller::call_again`]).
//!
//! A function cannot be ended from outside. A call that exceeds [`Limits::call`] ends the generation, so the engine drops its
//! requests with a reason; the device does not start again before the call has returned.

use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mqueue::abi::{kind, reason, status, stop};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, Region, RingError, Words};
use sys::readiness::{WakeFd, wait_readable};

use crate::{Device, Failure, Job, ParamValue};

pub use mqueue::abi::reason::HUNG;

/// An idle thread polls without pauses for this time, ...
const SPIN: Duration = Duration::from_micros(8);
/// ... then yields its core between two polls until this time has passed, then sleeps ...
const AWAKE: Duration = Duration::from_micros(50);
/// ... for at most this time, after which it looks for a stop by itself.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// When a batch closes, and how long a call may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Messages of a batch, at least 1.
    pub batch: usize,
    /// A batch closes this long after its first message was found.
    pub delay: Duration,
    /// A batch closes when no message has arrived for this long.
    pub idle: Duration,
    /// A call that takes longer ends the generation.
    pub call: Duration,
}

/// Why a batch closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// It has [`Limits::batch`] messages.
    Full,
    /// [`Limits::delay`] has passed.
    Delay,
    /// No message arrived for [`Limits::idle`], or the service drains.
    Idle,
}

/// Why a message gets no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoReply {
    /// No reply is wanted: the request counts as consumed.
    Consumed,
    /// The function failed.
    Rejected,
    /// The message has a length that the function does not accept.
    BadLength,
    /// The reply is longer than the service allows.
    TooLong,
}

impl NoReply {
    fn status(self) -> u8 {
        match self {
            Self::Consumed => status::OK,
            Self::Rejected => status::REJECTED,
            Self::BadLength => status::BAD_LENGTH,
            Self::TooLong => status::TOO_LONG,
        }
    }
}

/// The counters of a caller, readable from any thread.
#[derive(Debug, Default)]
pub struct Counters {
    /// Calls, by why their batch closed.
    pub full: AtomicU64,
    /// As `full`.
    pub delay: AtomicU64,
    /// As `full`.
    pub idle: AtomicU64,
    /// Messages copied out of the rings.
    pub messages: AtomicU64,
    /// Replies.
    pub replies: AtomicU64,
    /// Messages that got no reply, by [`NoReply`].
    pub consumed: AtomicU64,
    /// As `consumed`.
    pub rejected: AtomicU64,
    /// As `consumed`.
    pub bad_length: AtomicU64,
    /// As `consumed`.
    pub too_long: AtomicU64,
    /// Generations that have started.
    pub generations: AtomicU64,
    /// Calls that exceeded [`Limits::call`].
    pub overdue: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// The region of one generation, as the caller uses it.
struct Generation {
    words: Words<MappedMemory>,
    /// Signalled by the engine.
    wake_fd: Arc<WakeFd>,
    mqueues: Vec<Mqueue>,
}

struct Mqueue {
    rx: Consumer<MappedMemory>,
    tx: Producer<MappedMemory>,
    reply_bytes_max: usize,
}

impl Generation {
    fn join(job: &Job) -> Result<Self, Failure> {
        let refused = |text: String| Failure { reason: reason::REFUSED, text };
        let region = Region::join(MappedMemory::new(job.memory.clone()));
        let mut region = region.map_err(|error| refused(error.to_string()))?;
        let mut mqueues = Vec::new();
        for block in 0..job.blocks {
            let &[mqueue] = region.mqueues_of(block) else {
                return Err(refused("a host call asks no backends".to_owned()));
            };
            let [_, tx] = region.rings_of(mqueue);
            let reply_bytes_max = tx.message_bytes_max as usize;
            let (rx, tx) = region.accelerator_ends(mqueue);
            mqueues.push(Mqueue { rx, tx, reply_bytes_max });
        }
        Ok(Self { words: job.words.clone(), wake_fd: job.wake_fd.clone(), mqueues })
    }

    /// Messages that wait, counted up to `most`. The rings' words are checked when messages are taken.
    fn waiting(&self, most: usize) -> usize {
        let hints = self.mqueues.iter().map(|mqueue| mqueue.rx.hint().min(most as u64) as usize);
        hints.sum::<usize>().min(most)
    }
}

/// State shared by both ends.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the caller.
    wake: WakeFd,
    /// Tells an observer that a counter of [`Counters`] changed that it waits for.
    event: WakeFd,
    closed: AtomicBool,
    /// The rings of the generation contain impossible words.
    corrupt: AtomicBool,
    /// When the call in progress began, in nanoseconds since `start`; 0: there is none.
    calling_since_ns: AtomicU64,
    start: Instant,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct State {
    /// A generation that the caller has not taken yet.
    offered: Option<Generation>,
    /// The caller has a generation.
    held: bool,
    /// The parameters of the service, since a generation has started.
    params: Vec<(String, ParamValue)>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no further batch may be taken, given the stop word.
    fn is_over(&self, asked: u64) -> bool {
        asked == stop::NOW
            || self.closed.load(Ordering::Acquire)
            || self.corrupt.load(Ordering::Relaxed)
    }

    fn now_ns(&self) -> u64 {
        // 0 has a meaning of its own.
        (self.start.elapsed().as_nanos() as u64).max(1)
    }
}

/// Both ends of a host call.
pub fn host_call(kind: &str, limits: Limits) -> std::io::Result<(HostCallDevice, Caller)> {
    let shared = Arc::new(Shared {
        state: Mutex::default(),
        changed: Condvar::new(),
        wake: WakeFd::new()?,
        event: WakeFd::new()?,
        closed: AtomicBool::new(false),
        corrupt: AtomicBool::new(false),
        calling_since_ns: AtomicU64::new(0),
        start: Instant::now(),
        counters: Arc::default(),
    });
    let device = HostCallDevice {
        kind: kind.to_owned(),
        call: limits.call,
        reported_ns: 0,
        shared: shared.clone(),
    };
    let caller = Caller {
        shared,
        limits: Limits { batch: limits.batch.max(1), ..limits },
        generation: None,
        due: 0,
        origins: Vec::new(),
        first: 0,
        message: Vec::new(),
    };
    Ok((device, caller))
}

/// The end that attaches to an engine.
pub struct HostCallDevice {
    kind: String,
    call: Duration,
    /// The call that was last reported as overdue.
    reported_ns: u64,
    shared: Arc<Shared>,
}

impl HostCallDevice {
    /// Waits until the caller has no generation, for at most `limit`. Returns whether it has none.
    pub fn wait_until_free(&self, limit: Duration) -> bool {
        let state = self.shared.lock();
        let waited = self.shared.changed.wait_timeout_while(state, limit, |state| state.held);
        !waited.unwrap_or_else(PoisonError::into_inner).0.held
    }
}

impl Device for HostCallDevice {
    fn kind(&self) -> &str {
        &self.kind
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let refused = |text: &str| Failure { reason: reason::REFUSED, text: text.to_owned() };
        let [job] = jobs else { return Err(refused("a host call serves one service")) };
        let generation = Generation::join(job)?;
        let mut state = self.shared.lock();
        if state.held {
            return Err(Failure { reason: reason::HUNG, text: "the last call runs".to_owned() });
        }
        self.shared.corrupt.store(false, Ordering::Relaxed);
        state.offered = Some(generation);
        state.params.clone_from(&job.params);
        drop(state);
        add(&self.shared.counters.generations, 1);
        self.shared.changed.notify_all();
        self.shared.event.wake();
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        if self.shared.corrupt.load(Ordering::Relaxed) {
            let text = "its rings contain impossible words".to_owned();
            return Err(Failure { reason: reason::RING_CORRUPT, text });
        }
        let since_ns = self.shared.calling_since_ns.load(Ordering::Relaxed);
        let limit_ns = self.call.as_nanos() as u64;
        if since_ns == 0 || self.shared.now_ns().saturating_sub(since_ns) < limit_ns {
            return Ok(());
        }
        if std::mem::replace(&mut self.reported_ns, since_ns) != since_ns {
            add(&self.shared.counters.overdue, 1);
            self.shared.event.wake();
        }
        let text = format!("a call of the function takes longer than {:?}", self.call);
        Err(Failure { reason: reason::HUNG, text })
    }

    fn ended(&mut self) -> bool {
        let state = self.shared.lock();
        state.offered.is_none() && !state.held
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        self.shared.lock().offered = None;
        self.shared.wake.wake();
        if self.wait_until_free(timeout) {
            return Ok(());
        }
        let text = "a call of the function has not returned".to_owned();
        Err(Failure { reason: reason::HUNG, text })
    }
}

/// Closes a [`Caller`] from another thread.
#[derive(Clone)]
pub struct CallerHandle(Arc<Shared>);

impl CallerHandle {
    /// Makes [`Caller::wait`] return `None`, now and later.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::Release);
        self.0.wake.wake();
        self.0.changed.notify_all();
        self.0.event.wake();
    }

    /// The parameters that the configuration gives the service (`params`); none before the first generation.
    pub fn params(&self) -> Vec<(String, ParamValue)> {
        self.0.lock().params.clone()
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Readable after a generation has started, a call became overdue, or [`Self::signal`].
    pub fn event_fd(&self) -> RawFd {
        self.0.event.as_fd().as_raw_fd()
    }

    /// Makes the event readable.
    pub fn signal(&self) {
        self.0.event.wake();
    }

    /// Makes the event unreadable again.
    pub fn clear_event(&self) {
        self.0.event.clear();
    }
}

/// Where a message came from.
struct Origin {
    mqueue: usize,
    token: u64,
    answered: bool,
}

/// The end that calls the function.
pub struct Caller {
    shared: Arc<Shared>,
    limits: Limits,
    generation: Option<Generation>,
    /// Messages to take, from the last [`Self::wait`].
    due: usize,
    /// The messages of the batch.
    origins: Vec<Origin>,
    /// The mqueue from which the next batch takes messages first.
    first: usize,
    message: Vec<u8>,
}

impl Caller {
    /// A handle to close it from another thread.
    pub fn handle(&self) -> CallerHandle {
        CallerHandle(self.shared.clone())
    }

    /// Longest reply of the message `index` of the batch.
    pub fn reply_bytes_max(&self, index: usize) -> usize {
        let generation = self.generation.as_ref();
        let mqueue = generation.zip(self.origins.get(index));
        mqueue.map_or(0, |(generation, origin)| generation.mqueues[origin.mqueue].reply_bytes_max)
    }

    /// As [`Self::wait`], but never waits: `None` if there is no full batch, and also if the generation has ended.
    pub fn take_full(&mut self) -> Option<Closed> {
        self.finish();
        let generation = self.generation.as_ref()?;
        let over = self.shared.is_over(generation.words.stop());
        if over || generation.waiting(self.limits.batch) < self.limits.batch {
            return None;
        }
        self.due = self.limits.batch;
        add(&self.shared.counters.full, 1);
        Some(Closed::Full)
    }

    /// Publishes the answers of the last batch, then waits for the next one. `None` after [`CallerHandle::close`]. Messages of the
    /// last batch without an answer are dropped as [`NoReply::Rejected`].
    pub fn wait(&mut self) -> Option<Closed> {
        self.finish();
        loop {
            if self.shared.closed.load(Ordering::Acquire) {
                self.leave();
                return None;
            }
            if self.generation.is_none() {
                self.enter();
                continue;
            }
            match self.gather() {
                Some(closed) => {
                    let counters = &self.shared.counters;
                    let counter = match closed {
                        Closed::Full => &counters.full,
                        Closed::Delay => &counters.delay,
                        Closed::Idle => &counters.idle,
                    };
                    add(counter, 1);
                    return Some(closed);
                }
                None => self.leave(),
            }
        }
    }

    /// Copies the messages of the batch out of the rings, in the order in which mqueues and rings have them. `accept` returns `None` if it
    /// keeps the message, or why the message is dropped. Returns the number of messages kept, which may be 0.
    pub fn take(&mut self, mut accept: impl FnMut(&[u8]) -> Option<NoReply>) -> usize {
        let Some(generation) = self.generation.as_mut() else { return 0 };
        self.shared.calling_since_ns.store(self.shared.now_ns(), Ordering::Relaxed);
        let (count, mut left) = (generation.mqueues.len(), std::mem::take(&mut self.due));
        for nth in 0..count {
            let mqueue = (self.first + nth) % count;
            let Mqueue { rx, tx, .. } = &mut generation.mqueues[mqueue];
            while left > 0 {
                let header = match rx.peek() {
                    Ok(Some(header)) => header,
                    Ok(None) => break,
                    Err(RingError::BadHeader | RingError::Corrupt) => {
                        self.shared.corrupt.store(true, Ordering::Relaxed);
                        break;
                    }
                };
                self.message.resize(header.len as usize, 0);
                // False: a part of it has not arrived; the next batch takes it.
                if !rx.copy_out(&header, &mut self.message) {
                    break;
                }
                rx.advance();
                left -= 1;
                add(&self.shared.counters.messages, 1);
                match accept(&self.message) {
                    None => {
                        let token = header.token;
                        self.origins.push(Origin { mqueue, token, answered: false });
                    }
                    Some(why) => end(&self.shared, tx, header.token, why),
                }
            }
            rx.release();
        }
        self.first = (self.first + 1) % count.max(1);
        self.origins.len()
    }

    /// Replies to the message `index` of the batch, once. The reply must not be longer than [`Self::reply_bytes_max`].
    pub fn reply(&mut self, index: usize, reply: &[u8]) {
        let Some((tx, token)) = self.origin(index) else { return };
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: 0 };
        let pushed = tx.push(head, reply);
        self.shared.check(pushed);
        add(&self.shared.counters.replies, 1);
    }

    /// Ends the message `index` of the batch without a reply.
    pub fn end_message(&mut self, index: usize, why: NoReply) {
        let shared = self.shared.clone();
        if let Some((tx, token)) = self.origin(index) {
            end(&shared, tx, token, why);
        }
    }

    /// Publishes the answers given so far, and begins the time limit of a call again: the function is called once more, for a part of the
    /// batch. Returns whether that is of use: false after the generation has ended or the caller is closed.
    pub fn call_again(&mut self) -> bool {
        let Some(generation) = &mut self.generation else { return false };
        for mqueue in &mut generation.mqueues {
            mqueue.tx.publish();
        }
        self.shared.calling_since_ns.store(self.shared.now_ns(), Ordering::Relaxed);
        !self.shared.is_over(generation.words.stop())
    }

    /// Ends all messages of the batch that have no answer yet.
    pub fn end_batch(&mut self, why: NoReply) {
        (0..self.origins.len()).for_each(|index| self.end_message(index, why));
    }

    fn origin(&mut self, index: usize) -> Option<(&mut Producer<MappedMemory>, u64)> {
        let generation = self.generation.as_mut()?;
        let origin = self.origins.get_mut(index)?;
        let first = !std::mem::replace(&mut origin.answered, true);
        let first = first || mutants::on("answer_call_twice");
        first.then(|| (&mut generation.mqueues[origin.mqueue].tx, origin.token))
    }

    /// Publishes the answers of the batch: its call is over.
    fn finish(&mut self) {
        if !mutants::on("leave_unanswered") {
            self.end_batch(NoReply::Rejected);
        }
        self.origins.clear();
        if let Some(generation) = &mut self.generation {
            for mqueue in &mut generation.mqueues {
                mqueue.tx.publish();
            }
        }
        self.shared.calling_since_ns.store(0, Ordering::Relaxed);
    }

    /// Takes the generation that the device offers, if it does so soon.
    fn enter(&mut self) {
        let (state, closed) = (self.shared.lock(), &self.shared.closed);
        let absent = |state: &mut State| state.offered.is_none() && !closed.load(Ordering::Relaxed);
        let waited = self.shared.changed.wait_timeout_while(state, SLEEP_MAX, absent);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        self.generation = state.offered.take();
        state.held = self.generation.is_some();
    }

    fn leave(&mut self) {
        self.generation = None;
        self.shared.lock().held = false;
        self.shared.changed.notify_all();
    }

    /// Waits until a batch closes. `None`: the generation has ended, or the caller is to close.
    fn gather(&mut self) -> Option<Closed> {
        let Self { generation, limits, shared, .. } = self;
        let generation = generation.as_ref()?;
        let (mut found, mut idle_since) = (0, Instant::now());
        let mut first_at = None;
        loop {
            // Read before the rings: messages that arrived before a drain are then found.
            let asked = generation.words.stop();
            if shared.is_over(asked) {
                return None;
            }
            let waiting = generation.waiting(limits.batch);
            let now = Instant::now();
            if waiting > found {
                (found, idle_since) = (waiting, now);
            }
            let closed = if waiting == limits.batch {
                Some(Closed::Full)
            } else if waiting == 0 {
                if asked == stop::DRAIN {
                    return None;
                }
                None
            } else if now - *first_at.get_or_insert(now) >= limits.delay {
                Some(Closed::Delay)
            } else if now - idle_since >= limits.idle || asked == stop::DRAIN {
                Some(Closed::Idle)
            } else {
                None
            };
            if closed.is_some() {
                self.due = waiting;
                return closed;
            }
            let idle = now - idle_since;
            if idle < SPIN {
                std::hint::spin_loop();
            } else if idle < AWAKE || waiting > 0 {
                std::thread::yield_now();
            } else {
                sleep(generation, shared, asked);
                idle_since = Instant::now();
            }
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.finish();
        self.leave();
    }
}

impl Shared {
    /// There is always room for an answer of a length that the service allows, unless the engine's words are wrong.
    fn check(&self, pushed: Result<(), LoanError>) {
        if pushed.is_err() {
            self.corrupt.store(true, Ordering::Relaxed);
        }
    }
}

fn end(shared: &Shared, tx: &mut Producer<MappedMemory>, token: u64, why: NoReply) {
    let head = Head { token, tag: 0, kind: kind::DROP, status: why.status() };
    shared.check(tx.push(head, &[]));
    let counter = match why {
        NoReply::Consumed => &shared.counters.consumed,
        NoReply::Rejected => &shared.counters.rejected,
        NoReply::BadLength => &shared.counters.bad_length,
        NoReply::TooLong => &shared.counters.too_long,
    };
    add(counter, 1);
}

/// Sleeps until the engine or the device wakes the caller, unless a last look finds work.
fn sleep(generation: &Generation, shared: &Shared, asked: u64) {
    let Generation { words, wake_fd, .. } = generation;
    // EDGE PARK (sleeper half)
    words.set_accelerator_parked(true);
    if generation.waiting(1) == 0 && words.stop() == asked {
        wait_readable(&[wake_fd.as_fd(), shared.wake.as_fd()], Some(SLEEP_MAX));
        wake_fd.clear();
        shared.wake.clear();
    }
    words.set_accelerator_parked(false);
}
