//! The threads that execute the steps of transfers.
//!
//! There are two, because there are two kinds of devices; both take steps from the scoreboard. A lone transfer stays on one
//! thread, chunk by chunk, and its bytes in one core's cache; with several transfers one thread can read a file while the
//! other sends. A thread without work sleeps until a socket is ready, a transfer is submitted or a time is over.
//!
//! A file can hang: FUSE, a network file system without its server, a broken disk. A thread in a slow step is replaced until it
//! returns, and its transfer ends without it when its time is over. So two threads at least serve the other transfers.

use std::collections::HashSet;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sys::descriptors::{
    self, Descriptor, DescriptorKind, Interest, Readiness, describe, receive_now, send_now,
};

use crate::error::TransferError;
use crate::flow::{Blocked, Buffers, Device, Devices, End, Flow, Plan, Progress, Report};
use crate::pipeline::{Command, FILES_MAX, Place};
use crate::reaper::Reaper;
use crate::scoreboard::{EntryId, Expired, GivenBack, Patience, Scoreboard, Work};
use crate::stage::check_order;

/// How often transfers whose time is over are looked for at least, also while all threads are busy.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long dropping an engine waits for its threads and for descriptors to close. Either can hang in the host kernel.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Threads of an engine, and a further one for each slow step.
const THREADS: usize = 2;

/// What an engine may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Transfers in flight; each holds up to two buffers of 512 KiB.
    pub in_flight: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { in_flight: 256 }
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

/// What an engine has counted.
#[derive(Debug, Default)]
pub struct Counters {
    started: AtomicU64,
    succeeded: AtomicU64,
    failed: [AtomicU64; TransferError::NAMES.len()],
    read: AtomicU64,
    written: AtomicU64,
}

impl Counters {
    /// Transfers that were asked for.
    pub fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    /// Transfers that moved their whole range.
    pub fn succeeded(&self) -> u64 {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// Transfers that ended early or were refused, by reason.
    pub fn failed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.failed.iter().map(|count| count.load(Ordering::Relaxed));
        TransferError::NAMES.into_iter().zip(counts)
    }

    /// Bytes taken from sources by transfers that have ended.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that sinks got from transfers that have ended.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Counts a refusal.
    pub(crate) fn refuse(&self, error: &TransferError) {
        self.started.fetch_add(1, Ordering::Relaxed);
        self.count_error(error);
    }

    fn count_error(&self, error: &TransferError) {
        self.failed[usize::from(error.code()) - 1].fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self, outcome: &Outcome) {
        self.read.fetch_add(outcome.report.read, Ordering::Relaxed);
        self.written.fetch_add(outcome.report.written, Ordering::Relaxed);
        match &outcome.result {
            Ok(()) => {
                self.succeeded.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => self.count_error(error),
        }
    }
}

/// Executes transfers. Dropping it cancels those in flight.
pub struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    /// Starts the threads.
    pub fn start(limits: Limits) -> io::Result<Self> {
        let board = Board {
            entries: Scoreboard::new(limits.in_flight as usize),
            sockets: HashSet::new(),
            threads: 0,
            sleepers: 0,
            unlimited: 0,
            expired_ns: 0,
            stops: false,
        };
        let shared = Arc::new(Shared {
            board: Mutex::new(board),
            ended: Condvar::new(),
            readiness: Readiness::new()?,
            counters: Arc::default(),
            reaper: Reaper::default(),
            epoch: Instant::now(),
            in_flight_max: limits.in_flight,
        });
        let engine = Self { shared };
        engine.shared.add_threads(&mut engine.shared.board())?;
        Ok(engine)
    }

    /// Starts a transfer, or says why not.
    pub fn submit(&self, command: Command) -> Result<Transfer, TransferError> {
        let end = Arc::new(Arrival::default());
        let of_callback = end.clone();
        let submitted = self.submit_with(command, move |outcome| of_callback.set(outcome))?;
        Ok(Transfer { end, submitted })
    }

    /// The same; `done` is called once, on a thread of the engine, and must not wait.
    pub fn submit_with(
        &self,
        command: Command,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) -> Result<Submitted, TransferError> {
        let submitted = self.shared.submit(command, Box::new(done));
        submitted.inspect_err(|error| self.shared.counters.refuse(error))
    }

    /// Transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.shared.board().entries.len()
    }

    /// What has been counted.
    pub fn counters(&self) -> Arc<Counters> {
        self.shared.counters.clone()
    }

    /// Drops descriptors of callers.
    pub(crate) fn reaper(&self) -> &Reaper {
        &self.shared.reaper
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let works = {
            let mut board = self.shared.board();
            board.stops = true;
            board.entries.clear()
        };
        for work in works {
            self.shared.end(work, Err(TransferError::Stopping), &mut Buffers::default());
        }
        self.shared.readiness.wake();
        let deadline = Instant::now() + END_LIMIT;
        let run = |board: &mut Board| board.threads > 0;
        let waited = self.shared.ended.wait_timeout_while(self.shared.board(), END_LIMIT, run);
        // A thread whose file does not answer is left behind: it ends when the host kernel returns.
        let abandoned = waited.unwrap_or_else(PoisonError::into_inner).0.entries.abandon();
        for ending in abandoned {
            self.shared.abandon(&ending, TransferError::Stopping);
        }
        self.shared.reaper.settle(deadline.saturating_duration_since(Instant::now()));
    }
}

/// A transfer in flight, or one that has ended.
#[derive(Clone)]
pub struct Submitted {
    shared: Arc<Shared>,
    id: EntryId,
    progress: Arc<Progress>,
}

impl Submitted {
    /// Ends the transfer, with what it has done so far.
    pub fn cancel(&self) {
        let cancelled = self.shared.board().entries.cancel(self.id);
        if let Some(work) = cancelled {
            self.shared.end(work, Err(TransferError::Cancelled), &mut Buffers::default());
        }
    }

    /// How far it is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}

/// A transfer whose end its owner waits for. Dropping it does not cancel.
pub struct Transfer {
    end: Arc<Arrival>,
    submitted: Submitted,
}

impl Transfer {
    /// Waits for the end. [`Command::stall`] limits how long almost nothing may move.
    pub fn wait(self) -> Outcome {
        loop {
            if let Some(outcome) = self.wait_for(Duration::from_secs(3600)) {
                return outcome;
            }
        }
    }

    /// Waits at most this long; `None`: it is still in flight.
    pub fn wait_for(&self, timeout: Duration) -> Option<Outcome> {
        let outcome = self.end.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.end.changed.wait_timeout_while(outcome, timeout, |end| end.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Ends it, with what it has done so far.
    pub fn cancel(&self) {
        self.submitted.cancel();
    }

    /// How far it is.
    pub fn progress(&self) -> &Progress {
        self.submitted.progress()
    }
}

/// Where the outcome of a [`Transfer`] arrives.
#[derive(Default)]
struct Arrival {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl Arrival {
    fn set(&self, outcome: Outcome) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.changed.notify_all();
    }
}

type Done = Box<dyn FnOnce(Outcome) + Send>;
/// A socket in one direction: as source or as sink.
type SocketUse = ((u64, u64), End);

/// The work of an entry.
struct Job {
    flow: Flow<Descriptors>,
    ending: Arc<Ending>,
}

/// What the end of a transfer needs, also while a thread has its job.
struct Ending {
    /// The sockets, with the direction in which they are used.
    sockets: Vec<(SocketUse, Arc<Socket>)>,
    progress: Arc<Progress>,
    /// Taken by the thread that answers the caller.
    done: Mutex<Option<Done>>,
}

impl Work for Job {
    type Handle = Arc<Ending>;

    fn handle(&self) -> Arc<Ending> {
        self.ending.clone()
    }

    fn next(&self, blocked: Blocked) -> Option<End> {
        self.flow.next(blocked)
    }

    fn device(&self, end: End) -> Device {
        self.flow.device(end)
    }
}

/// What the threads share under a lock, which is held for no system call but a wake-up.
struct Board {
    entries: Scoreboard<Job>,
    /// Those in use: chunks of two transfers would mix.
    sockets: HashSet<SocketUse>,
    /// Threads that run.
    threads: usize,
    /// Threads that wait.
    sleepers: usize,
    /// Those of them that wait without a limit.
    unlimited: usize,
    /// When transfers whose time is over were looked for last.
    expired_ns: u64,
    stops: bool,
}

struct Shared {
    board: Mutex<Board>,
    /// A thread has ended.
    ended: Condvar,
    readiness: Readiness,
    counters: Arc<Counters>,
    reaper: Reaper,
    epoch: Instant,
    in_flight_max: u32,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn submit(self: &Arc<Self>, command: Command, done: Done) -> Result<Submitted, TransferError> {
        let Checked { plan, uses, parts } = match check(&command) {
            Ok(checked) => checked,
            Err(error) => {
                self.reaper.discard(command);
                return Err(error);
            }
        };
        let ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let stall_ns = ns(command.stall);
        let patience = Patience { stall_ns, deadline_ns: command.deadline.map(ns) };
        let descriptors = Descriptors::new(command, parts, &self.reaper);
        let sockets = descriptors.sockets();
        let sockets: Vec<_> = uses.into_iter().zip(sockets).collect();
        let flow = Flow::new(&plan, descriptors)?;
        let progress = flow.progress();
        let nothing_to_do = flow.ended();
        let done = Mutex::new(Some(done));
        let ending = Arc::new(Ending { sockets, progress: progress.clone(), done });
        let uses: Vec<SocketUse> = ending.sockets.iter().map(|(used, _)| *used).collect();
        let job = Job { flow, ending };
        let mut board = self.board();
        if board.stops {
            return Err(TransferError::Stopping);
        }
        if uses.iter().any(|used| board.sockets.contains(used)) {
            return Err(TransferError::Busy);
        }
        board.sockets.extend(&uses);
        let id = match nothing_to_do {
            None => board.entries.insert(job, patience, self.now_ns()),
            Some(result) => {
                drop(board);
                self.counters.started.fetch_add(1, Ordering::Relaxed);
                self.end(job, result, &mut Buffers::default());
                let id = EntryId::from_bits(0);
                return Ok(Submitted { shared: self.clone(), id, progress });
            }
        };
        let Ok(id) = id else {
            uses.iter().for_each(|used| _ = board.sockets.remove(used));
            return Err(TransferError::TooMany(self.in_flight_max));
        };
        self.counters.started.fetch_add(1, Ordering::Relaxed);
        self.wake_one(&board);
        Ok(Submitted { shared: self.clone(), id, progress })
    }

    /// A sleeping thread takes what is queued.
    fn wake_one(&self, board: &Board) {
        if board.sleepers > 0 && board.entries.has_work() {
            self.readiness.wake();
        }
    }

    /// Starts threads that are missing. An error if none runs.
    fn add_threads(self: &Arc<Self>, board: &mut Board) -> io::Result<()> {
        while board.threads < THREADS + board.entries.slow_steps() {
            let shared = self.clone();
            let builder = std::thread::Builder::new().name("serval-transfer".into());
            match builder.spawn(move || shared.run()) {
                Ok(_) => board.threads += 1,
                // The next look tries again.
                Err(_) if board.threads > board.entries.slow_steps() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The loop of a thread.
    fn run(self: &Arc<Self>) {
        let mut buffers = Buffers::default();
        let mut last = None;
        let mut board = self.board();
        loop {
            if board.stops || board.threads > THREADS + board.entries.slow_steps() {
                board.threads -= 1;
                // The next thread.
                self.readiness.wake();
                self.ended.notify_all();
                return;
            }
            if self.now_ns() >= board.expired_ns + EXPIRY_INTERVAL.as_nanos() as u64 {
                board = self.expire(board, &mut buffers);
            }
            let Some((id, end, job)) = board.entries.take(last.take(), self.now_ns()) else {
                board = self.sleep(board);
                continue;
            };
            if job.device(end) == Device::File
                && board.sleepers > 0
                && board.sleepers == board.unlimited
            {
                // The file may hang: another thread watches the time.
                self.readiness.wake();
            } else {
                self.wake_one(&board);
            }
            drop(board);
            board = self.step(id, end, job, &mut buffers);
            last = Some(id);
        }
    }

    fn step(
        &self,
        id: EntryId,
        end: End,
        mut job: Job,
        buffers: &mut Buffers,
    ) -> MutexGuard<'_, Board> {
        let step = job.flow.step(end, buffers);
        let mut ended = step.ended;
        if step.blocked && ended.is_none() {
            let interest = match end {
                End::Sink => Interest::Send,
                End::Source => Interest::Receive,
            };
            // The event may come before the entry is given back.
            let arm = |socket: BorrowedFd<'_>| self.readiness.arm(socket, id.key(end), interest);
            if let Err(error) = job.flow.devices().socket(end).with(arm) {
                ended = Some(Err(TransferError::of_host("waiting for the socket", &error)));
            }
        }
        let now_ns = self.now_ns();
        let mut board = self.board();
        let (job, result) = match ended {
            None => match board.entries.give_back(id, job, step.blocked, step.moved, now_ns) {
                GivenBack::Kept => return board,
                GivenBack::Ended(job, error) => (job, Some(Err(error))),
                GivenBack::Abandoned(job) => (job, None),
            },
            Some(result) => {
                let stayed = board.entries.finish(id);
                (job, stayed.then_some(result))
            }
        };
        drop(board);
        match result {
            Some(result) => self.end(job, result, buffers),
            // Its caller has been answered.
            None => drop(job.flow.report(&Ok(()), buffers)),
        }
        self.board()
    }

    /// Waits for something to do, and queues what has become ready.
    fn sleep<'s>(&'s self, mut board: MutexGuard<'s, Board>) -> MutexGuard<'s, Board> {
        // Deadlines change while a thread sleeps, so it wakes up from time to time as long as there are transfers.
        let timeout = board.entries.next_deadline_ns().map(|at| {
            let left = Duration::from_nanos(at.saturating_sub(self.now_ns()));
            left.min(EXPIRY_INTERVAL)
        });
        let timeout = timeout.or((!board.entries.is_empty()).then_some(EXPIRY_INTERVAL));
        let unlimited = usize::from(timeout.is_none());
        board.sleepers += 1;
        board.unlimited += unlimited;
        drop(board);
        let mut ready = Vec::new();
        self.readiness.wait(&mut ready, timeout);
        let mut board = self.board();
        board.sleepers -= 1;
        board.unlimited -= unlimited;
        for key in ready {
            let (id, end) = EntryId::of_key(key);
            board.entries.ready(id, end);
        }
        if timeout.is_some() {
            // The loop looks for transfers whose time is over.
            board.expired_ns = 0;
        }
        board
    }

    /// Ends transfers whose time is over.
    fn expire<'s>(
        self: &'s Arc<Self>,
        mut board: MutexGuard<'s, Board>,
        buffers: &mut Buffers,
    ) -> MutexGuard<'s, Board> {
        let now_ns = self.now_ns();
        board.expired_ns = now_ns;
        let expired = board.entries.expire(now_ns);
        // Fails only if all threads but this one are in slow steps, and the next look tries again.
        let _ = self.add_threads(&mut board);
        if expired.is_empty() {
            return board;
        }
        drop(board);
        for expired in expired {
            match expired {
                Expired::Ended(job, error) => self.end(job, Err(error), buffers),
                Expired::Abandoned(ending, error) => self.abandon(&ending, error),
            }
        }
        self.board()
    }

    /// Hands over the descriptors to be closed, then answers the caller.
    fn end(&self, job: Job, result: Result<(), TransferError>, buffers: &mut Buffers) {
        let Job { flow, ending } = job;
        self.forget(&ending);
        let report = flow.report(&result, buffers);
        self.answer(&ending, Outcome { result, report });
    }

    /// Answers the caller of a transfer whose file does not. The counts are exact but for a write to the file that may still
    /// happen. Its sockets are not used any more.
    fn abandon(&self, ending: &Ending, error: TransferError) {
        self.forget(ending);
        ending.sockets.iter().for_each(|(_, socket)| socket.close());
        let (read, written) = (ending.progress.read(), ending.progress.written());
        let report = Report { read, written, ..Report::default() };
        self.answer(ending, Outcome { result: Err(error), report });
    }

    fn forget(&self, ending: &Ending) {
        let forget = |socket: BorrowedFd<'_>| {
            self.readiness.forget(socket);
            Ok(())
        };
        // Fails only if it has been closed, which removes it from the set, too.
        ending.sockets.iter().for_each(|(_, socket)| _ = socket.with(forget));
    }

    fn answer(&self, ending: &Ending, outcome: Outcome) {
        let mut board = self.board();
        ending.sockets.iter().for_each(|(used, _)| _ = board.sockets.remove(used));
        drop(board);
        self.counters.end(&outcome);
        let done = ending.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            done(outcome);
        }
    }
}

/// The socket of a transfer. Closing it can block, so the reaper does it.
struct Socket {
    held: Mutex<Option<OwnedFd>>,
    reaper: Reaper,
}

impl Socket {
    /// Fails with `NotConnected` if it has been closed.
    fn with<R>(&self, with: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>) -> io::Result<R> {
        match &*self.held.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(socket) => with(socket.as_fd()),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn close(&self) {
        let socket = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(socket) = socket {
            self.reaper.discard(socket);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.close();
    }
}

/// The descriptor of a source or of a sink.
enum Held {
    /// `None` only while it is dropped.
    File(Option<OwnedFd>),
    Files(Vec<Part>),
    Socket(Arc<Socket>),
}

/// A range of one file of several.
struct Part {
    file: OwnedFd,
    range: PartRange,
}

#[derive(Clone, Copy)]
struct PartRange {
    /// Where it begins in the source.
    start: u64,
    offset: u64,
    bytes: u64,
}

/// The descriptors of a transfer.
struct Descriptors {
    source: Held,
    sink: Held,
    reaper: Reaper,
}

impl Descriptors {
    /// `parts`: the ranges of a source of several files.
    fn new(command: Command, parts: Vec<PartRange>, reaper: &Reaper) -> Self {
        let held = |place: Place| match place.device() {
            Device::File => Held::File(Some(place.into_descriptor())),
            Device::Socket => {
                let held = Mutex::new(Some(place.into_descriptor()));
                Held::Socket(Arc::new(Socket { held, reaper: reaper.clone() }))
            }
        };
        let sink = held(command.sink);
        let source = if command.more.is_empty() {
            held(command.source)
        } else {
            let more = command.more.into_iter().map(|range| range.file);
            let files = [command.source.into_descriptor()].into_iter().chain(more);
            Held::Files(files.zip(parts).map(|(file, range)| Part { file, range }).collect())
        };
        Self { source, sink, reaper: reaper.clone() }
    }

    /// The source's, then the sink's.
    fn sockets(&self) -> impl Iterator<Item = Arc<Socket>> {
        let ends = [&self.source, &self.sink].into_iter();
        ends.filter_map(|held| match held {
            Held::Socket(socket) => Some(socket.clone()),
            Held::File(_) | Held::Files(_) => None,
        })
    }

    fn socket(&self, end: End) -> &Socket {
        match self.held(end) {
            Held::Socket(socket) => socket,
            Held::File(_) | Held::Files(_) => unreachable!("a file has no socket step"),
        }
    }

    fn file(&self, end: End) -> BorrowedFd<'_> {
        match self.held(end) {
            Held::File(file) => file.as_ref().expect("only drop takes it").as_fd(),
            Held::Socket(_) => unreachable!("a socket has no file step"),
            Held::Files(_) => unreachable!("they are read part by part"),
        }
    }

    fn held(&self, end: End) -> &Held {
        match end {
            End::Source => &self.source,
            End::Sink => &self.sink,
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let mut taken = Vec::new();
        for held in [&mut self.source, &mut self.sink] {
            match held {
                Held::File(file) => taken.extend(file.take()),
                Held::Files(parts) => taken.extend(parts.drain(..).map(|part| part.file)),
                Held::Socket(socket) => {
                    taken.extend(socket.held.lock().unwrap_or_else(PoisonError::into_inner).take());
                }
            }
        }
        // One value for one thread of the reaper.
        self.reaper.discard(taken);
    }
}

impl Devices for Descriptors {
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let Held::Files(files) = &self.source else {
            return descriptors::read_at(self.file(End::Source), parts, offset);
        };
        // The last part that begins there: those before it may be empty.
        let after = files.partition_point(|part| part.range.start <= offset);
        let Part { file, range } = &files[after - 1];
        let mut room = range.start + range.bytes - offset;
        let mut within = Vec::with_capacity(parts.len());
        for part in parts {
            let len = room.min(part.len() as u64) as usize;
            room -= len as u64;
            within.push(IoSliceMut::new(&mut part[..len]));
        }
        descriptors::read_at(file.as_fd(), &mut within, range.offset + (offset - range.start))
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        descriptors::write_at(self.file(End::Sink), bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        descriptors::sync(self.file(End::Sink))
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket(End::Sink).with(|socket| send_now(socket, bytes))
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.socket(End::Source).with(|socket| receive_now(socket, into))
    }
}

/// A command that can be executed.
struct Checked {
    plan: Plan,
    /// The uses of its sockets, that of the source first.
    uses: Vec<SocketUse>,
    /// The ranges of a source of several files.
    parts: Vec<PartRange>,
}

/// Checks the stages, the descriptors and the ranges of a command.
fn check(command: &Command) -> Result<Checked, TransferError> {
    check_order(&command.stages).map_err(TransferError::Order)?;
    if command.more.len() >= FILES_MAX {
        return Err(TransferError::Order(format!("a source has at most {FILES_MAX} files")));
    }
    let found =
        |role, descriptor| describe(descriptor).map_err(|_| TransferError::Invalid { role });
    let [source, sink] = [&command.source, &command.sink];
    let (mut uses, mut sources, mut length) = (Vec::new(), Vec::new(), None);
    let at_source = found("source", source.descriptor())?;
    match source.device() {
        Device::Socket => {
            check_socket(&at_source, "source")?;
            uses.push((at_source.identity, End::Source));
        }
        Device::File => {
            length = Some(check_file(&at_source, "source", End::Source)?);
            sources.push(at_source.identity);
        }
    }
    let mut parts = Vec::new();
    if !command.more.is_empty() {
        let first = (source.offset(), command.bytes, length.unwrap_or(0));
        let mut ranges = vec![first];
        for range in &command.more {
            let file = found("source", range.file.as_fd())?;
            let length = check_file(&file, "source", End::Source)?;
            sources.push(file.identity);
            ranges.push((range.offset, range.bytes, length));
        }
        parts = part_ranges(&ranges)?;
    }
    let at_sink = found("sink", sink.descriptor())?;
    match sink.device() {
        Device::Socket => {
            check_socket(&at_sink, "sink")?;
            uses.push((at_sink.identity, End::Sink));
        }
        Device::File => {
            check_file(&at_sink, "sink", End::Sink)?;
            if sources.contains(&at_sink.identity) {
                return Err(TransferError::SameFile);
            }
        }
    }
    let bytes = match (parts.last(), length) {
        (Some(last), _) => Some(last.start + last.bytes),
        // Files of /proc have content and no length.
        (None, Some(0) | None) => command.bytes,
        (None, Some(length)) => {
            Some(command.bytes.unwrap_or_else(|| length.saturating_sub(source.offset())))
        }
    };
    let plan = Plan::of(command, bytes);
    for from in [plan.from, plan.to] {
        check_end(from, bytes.unwrap_or(0))?;
    }
    Ok(Checked { plan, uses, parts })
}

/// The places of ranges that follow one another; of each its offset, the length that is asked for, and that of its file.
fn part_ranges(ranges: &[(u64, Option<u64>, u64)]) -> Result<Vec<PartRange>, TransferError> {
    let (mut start, mut parts) = (0, Vec::new());
    for &(offset, bytes, length) in ranges {
        let bytes = bytes.unwrap_or_else(|| length.saturating_sub(offset));
        check_end(offset, bytes)?;
        check_end(start, bytes)?;
        parts.push(PartRange { start, offset, bytes });
        start += bytes;
    }
    Ok(parts)
}

fn check_end(from: u64, bytes: u64) -> Result<(), TransferError> {
    let end = from.checked_add(bytes).filter(|end| i64::try_from(*end).is_ok());
    end.map(drop).ok_or(TransferError::Range)
}

fn check_socket(found: &Descriptor, role: &'static str) -> Result<(), TransferError> {
    let needed = "a connected stream socket (TCP or Unix)";
    let wrong = |found| Err(TransferError::WrongKind { role, found, needed });
    match found.kind {
        DescriptorKind::Stream => Ok(()),
        DescriptorKind::Unconnected => wrong("a socket without a peer"),
        DescriptorKind::File { .. } => wrong("a file"),
        DescriptorKind::Other(found) => wrong(found),
    }
}

/// Returns the file's length.
fn check_file(found: &Descriptor, role: &'static str, end: End) -> Result<u64, TransferError> {
    let needed = "a file";
    let (bytes, appends) = match found.kind {
        DescriptorKind::File { direct: true, .. } => return Err(TransferError::Direct { role }),
        DescriptorKind::File { bytes, appends, .. } => (bytes, appends),
        DescriptorKind::Stream | DescriptorKind::Unconnected => {
            return Err(TransferError::WrongKind { role, found: "a socket", needed });
        }
        DescriptorKind::Other(found) => {
            return Err(TransferError::WrongKind { role, found, needed });
        }
    };
    match end {
        End::Source if !found.readable => Err(TransferError::Access { role, access: "reading" }),
        End::Sink if !found.writable => Err(TransferError::Access { role, access: "writing" }),
        End::Sink if appends => Err(TransferError::Appends),
        _ => Ok(bytes),
    }
}
