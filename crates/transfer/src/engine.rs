//! The threads that execute the steps of transfers.
//!
//! They take steps from the scoreboard, [`Limits::threads`] at a time. A lone transfer stays on one
//! thread, chunk by chunk, and its bytes in one core's cache; with several transfers one thread can read a file while the
//! other sends. A thread without work sleeps until a socket is ready, a transfer is submitted or a time is over. There is one more
//! than steps at a time: it watches the time while all others are busy.
//!
//! A file can hang: FUSE, a network file system without its server, a broken disk. A thread in a slow step is replaced until it
//! returns, and its transfer ends without it when its time is over.

pub(crate) mod counters;
pub(crate) mod fair_share;
mod handle;
mod job;
mod memory;
pub(crate) mod outcomes;
mod parts;
mod queues;
pub mod scoreboard;
pub(crate) mod tenants;

use std::collections::HashSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sys::readiness::{Interest, Readiness};

use crate::command::device::End;
use crate::command::error::TransferError;
use crate::command::pipeline::Command;
use crate::command::report::{Done, Outcome, Report};
use crate::command::stage::StageSpec;
use crate::engine::counters::Counters;
use crate::engine::fair_share::is_within_share;
use crate::engine::memory::{Memory, Reserved};
use crate::engine::parts::{Next, Parts};
use crate::engine::scoreboard::{EntryId, Expired, GivenBack, Scoreboard, Share, Work};
use crate::engine::tenants::{Account, TenantShare};
use crate::run::apart::{Apart, run_together};
use crate::run::check::{DescriptorUse, check, check_rights};
use crate::run::descriptors::{Descriptors, Socket, SocketUse};
use crate::run::flow::Flow;
use crate::run::plan::{Cut, Plan};
use crate::run::progress::Progress;
use crate::run::reaper::Reaper;
use crate::run::user_process::UserProcess;
use crate::stages::buffer::{Buffers, SharedBuffers};
use handle::{OutcomeCell, Status};
pub use handle::{Transfer, TransferHandle};
use job::{Ending, Job};
pub use queues::DeviceQueue;
pub(crate) use queues::InFlight;

/// How often transfers whose time is over are looked for at least, also while all threads are busy.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long dropping an engine waits for its threads and for descriptors to close. Either can hang in the host kernel.
const END_LIMIT: Duration = Duration::from_secs(1);

/// What an engine may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Transfers in flight.
    pub in_flight: u32,
    /// Threads that move bytes at a time.
    pub threads: u32,
    /// Memory of all of them, by what each holds at most. Buffers that threads keep for the next step come on top: 6 MiB of each, and 24 MiB of all.
    pub memory_mib: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { in_flight: 256, threads: 2, memory_mib: 1024 }
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
            entries: Scoreboard::new(limits.in_flight as usize, limits.threads.max(1) as usize),
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
            watch: Condvar::new(),
            threads: limits.threads.max(1) as usize + 1,
            readiness: Readiness::new()?,
            counters: Arc::default(),
            reaper: Reaper::default(),
            epoch: Instant::now(),
            in_flight_max: limits.in_flight,
            memory: Memory::new(limits.memory_mib),
            buffers: SharedBuffers::default(),
        });
        let engine = Self { shared };
        engine.shared.add_threads(&mut engine.shared.board())?;
        Ok(engine)
    }

    /// Starts a transfer, or says why not.
    pub fn submit(&self, command: Command) -> Result<Transfer, TransferError> {
        let end = Arc::new(OutcomeCell::default());
        let of_callback = end.clone();
        let submitted = self.submit_with(command, move |outcome| of_callback.set(outcome))?;
        Ok(Transfer::new(end, submitted))
    }

    /// The same; `done` is called once, on a thread of the engine, and must not wait.
    pub fn submit_with(
        &self,
        command: Command,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) -> Result<TransferHandle, TransferError> {
        self.submit_within(command, Caller::default(), done)
    }

    /// The same for a tenant: its transfers get turns and memory by its weight, and are counted as its own.
    pub fn submit_for(
        &self,
        tenant: &Account,
        command: Command,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) -> Result<TransferHandle, TransferError> {
        let caller = Caller { tenant: Some(tenant.clone()), ..Caller::default() };
        self.submit_within(command, caller, done)
    }

    pub(crate) fn submit_within(
        &self,
        command: Command,
        caller: Caller,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) -> Result<TransferHandle, TransferError> {
        let submitted = self.shared.submit(command, caller, Box::new(done));
        submitted.inspect_err(|error| self.shared.counters.refuse(error))
    }

    /// Transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.shared.board().entries.len()
    }

    /// The tenants that there are from now on.
    pub fn set_tenants(&self, tenants: Vec<TenantShare>) {
        self.shared.counters.tenants.set(tenants);
    }

    /// The account of a tenant.
    pub fn tenant(&self, name: &str) -> Account {
        self.shared.counters.tenants.named(name)
    }

    /// That of the tenant to which a user belongs.
    pub(crate) fn tenant_of(&self, user: u32) -> Option<Account> {
        self.shared.counters.tenants.of_user(user)
    }

    /// What has been counted.
    pub fn counters(&self) -> Arc<Counters> {
        self.shared.counters.clone()
    }

    /// A caller has gone: its steps that hang take no places of others.
    pub(crate) fn forget_caller(&self, caller: u64) {
        self.shared.board().entries.forget_caller(caller);
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
        self.shared.watch.notify_all();
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

/// Who asks for a transfer.
#[derive(Clone, Default)]
pub(crate) struct Caller {
    pub(crate) tenant: Option<Account>,
    /// Bytes of memory that the transfers of its process hold: it gets a share, as of [`Memory::check_share`].
    pub(crate) own: Option<u64>,
    /// Whose steps that hang are counted together; 0: those of the engine's own process.
    pub(crate) number: u64,
    /// Where the system calls of its transfers are made, if not in this process.
    pub(crate) process: Option<Arc<UserProcess>>,
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
    /// The engine stops.
    watch: Condvar,
    /// Those that run, without those in slow steps.
    threads: usize,
    readiness: Readiness,
    counters: Arc<Counters>,
    reaper: Reaper,
    epoch: Instant,
    in_flight_max: u32,
    memory: Memory,
    buffers: SharedBuffers,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn submit(
        self: &Arc<Self>,
        command: Command,
        caller: Caller,
        done: Done,
    ) -> Result<TransferHandle, TransferError> {
        let rights = caller.process.as_ref().map_or(Ok(()), |_| check_rights(&command));
        let checked = rights.and_then(|()| check(&command));
        let (plan, DescriptorUse { sockets: uses, files }) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                self.reaper.discard(command);
                return Err(error);
            }
        };
        // Beside other transfers it gets no more threads than they do.
        let takes_all = plan.has_places() || plan.cut == Cut::Can;
        let has_others = takes_all && !self.board().entries.is_empty();
        let parts_max = if has_others { 1 } else { self.threads - 1 };
        let mut parts = match plan.parts(parts_max) {
            Ok(parts) => parts,
            Err(error) => {
                self.reaper.discard(command);
                return Err(error);
            }
        };
        let reserve = |parts: &[Plan]| -> Result<(u64, Vec<Reserved>), TransferError> {
            let memory: u64 = parts.iter().map(Plan::memory_bytes).sum();
            self.check_shares(memory, &caller)?;
            let reserved = parts.iter().map(|part| self.memory.reserve(part.memory_bytes()));
            Ok((memory, reserved.collect::<Result<_, _>>()?))
        };
        let mut reserved = reserve(&parts);
        if reserved.is_err() && parts.len() > 1 {
            // One thread needs less.
            parts = vec![plan.clone()];
            reserved = reserve(&parts);
        }
        let (memory, reserved) = match reserved {
            Ok(reserved) => reserved,
            Err(error) => {
                self.reaper.discard(command);
                return Err(error);
            }
        };
        let time_limits = command.time_limits();
        let stages = plan.stages.iter().map(StageSpec::kind).collect();
        let (source, sink) = (plan.source, plan.sink);
        let started = Instant::now();
        let status =
            |progress| Arc::new(Status { source, sink, stages, memory, started, progress });
        let descriptors = {
            let process = caller.process.as_ref();
            Descriptors::for_parts(command, files, &parts, process, &self.reaper)?
        };
        let mut flows: Vec<Flow<Descriptors>> = Vec::with_capacity(parts.len());
        for (part, descriptors) in parts.iter().zip(descriptors) {
            flows.push(Flow::for_part(part, descriptors, flows.first())?);
        }
        let account = caller.tenant;
        let done = Account::count_end(account.as_ref(), memory, done);
        let share = account.as_ref().map_or(Share::default(), |account| account.share);
        // What searches have at the ends of their ranges is held until all have ended.
        let reserved: Vec<Arc<[Reserved]>> = match plan.cut {
            Cut::Can => vec![reserved.into(); parts.len()],
            _ => reserved.into_iter().map(|part| [part].into()).collect(),
        };
        let who = (share, caller.number);
        let (jobs, in_parts, status) = self.jobs(flows, reserved, (uses, who), status, done);
        let uses: Vec<SocketUse> = jobs.iter().flat_map(Job::uses).collect();
        let submitted = |entries: Vec<EntryId>| {
            let entries = entries.into();
            TransferHandle { shared: self.clone(), entries, status }
        };
        let mut board = self.board();
        if board.stops {
            return Err(TransferError::Stopping);
        }
        if uses.iter().any(|used| board.sockets.contains(used)) {
            return Err(TransferError::Busy);
        }
        board.sockets.extend(&uses);
        let mut jobs = jobs.into_iter();
        let first = jobs.next().expect("a transfer has a part");
        if let Some(result) = first.flow.ended() {
            drop(board);
            self.counters.start();
            Account::count_start(account.as_ref(), memory);
            self.end(first, result, &mut Buffers::default());
            return Ok(submitted(Vec::new()));
        }
        let now_ns = self.now_ns();
        let too_many = |_| TransferError::TooMany(self.in_flight_max);
        let first = self
            .check_entries(&board, account.as_ref())
            .and_then(|()| board.entries.insert(first, time_limits, now_ns).map_err(too_many));
        let first = first.inspect_err(|_| {
            uses.iter().for_each(|used| _ = board.sockets.remove(used));
        })?;
        let mut entries = vec![first];
        entries.extend(jobs.map(|job| board.entries.insert_part(job, time_limits, now_ns)));
        if let Some(parts) = in_parts {
            parts.begin(&entries);
        }
        self.counters.start();
        Account::count_start(account.as_ref(), memory);
        self.release(board);
        Ok(submitted(entries))
    }

    /// Whether the caller's process and its tenant may hold that much more.
    fn check_shares(&self, bytes: u64, caller: &Caller) -> Result<(), TransferError> {
        if let Some(own) = caller.own {
            self.memory.check_share(bytes, own, 1)?;
        }
        let Some(Account { share, counters }) = &caller.tenant else { return Ok(()) };
        self.memory.check_share(bytes, counters.held(), share.weight)
    }

    /// Whether a tenant may have one more transfer in flight.
    fn check_entries(&self, board: &Board, tenant: Option<&Account>) -> Result<(), TransferError> {
        let Some(Account { share, counters }) = tenant else { return Ok(()) };
        let (own, all) = (counters.in_flight(), board.entries.len() as u64);
        let most = u64::from(self.in_flight_max);
        // A full board refuses it with its own number.
        match all >= most || is_within_share(1, own, all, most, share.weight) {
            true => Ok(()),
            false => Err(TransferError::TooMany(own as u32)),
        }
    }

    /// The jobs of a transfer, what its parts have in common if there are several, and how far it is.
    fn jobs(
        self: &Arc<Self>,
        flows: Vec<Flow<Descriptors>>,
        reserved: Vec<Arc<[Reserved]>>,
        (uses, (share, caller)): (Vec<SocketUse>, (Share, u64)),
        status: impl FnOnce(Arc<Progress>) -> Arc<Status>,
        done: Done,
    ) -> (Vec<Job>, Option<Arc<Parts>>, Arc<Status>) {
        let counters = self.counters.clone();
        let done: Done = Box::new(move |outcome| {
            counters.end(&outcome);
            done(outcome);
        });
        let job = |flow: Flow<Descriptors>, reserved, uses: Vec<SocketUse>, status, done: Done| {
            let sockets = uses.into_iter().zip(flow.devices().sockets()).collect();
            let (progress, done) = (flow.progress(), Mutex::new(Some(done)));
            let ending = Arc::new(Ending { sockets, progress, status, done });
            Job { flow, ending, reserved, share, caller }
        };
        let first = flows.first();
        let searchers = if flows.len() > 1 { first.map(Flow::searchers) } else { None };
        let mut parts = flows.into_iter().zip(reserved);
        if parts.len() == 1 {
            let (mut flow, reserved) = parts.next().expect("there is one");
            self.count(&mut flow, None);
            let status = status(flow.progress());
            let job = job(flow, reserved, uses, status.clone(), done);
            return (vec![job], None, status);
        }
        let progress = Arc::<Progress>::default();
        let status = status(progress.clone());
        let in_parts = Arc::new(Parts::new(parts.len(), searchers.unwrap_or_default(), done));
        let jobs = parts.enumerate().map(|(part, (mut flow, reserved))| {
            self.count(&mut flow, Some(progress.clone()));
            let (shared, in_parts) = (self.clone(), in_parts.clone());
            let done = move |outcome| match in_parts.end(part, outcome) {
                Next::Nothing => {}
                Next::Cancel(entries) => entries.into_iter().for_each(|id| shared.cancel(id)),
                Next::Answer(done, outcome) => done(outcome),
            };
            job(flow, reserved, Vec::new(), status.clone(), Box::new(done))
        });
        (jobs.collect(), Some(in_parts), status)
    }

    /// The bytes of a transfer, or of a part of the transfer `whole`, count as they move.
    fn count(&self, flow: &mut Flow<Descriptors>, whole: Option<Arc<Progress>>) {
        let ends = [End::Source, End::Sink].map(|end| flow.device(end));
        let counted_in = self.counters.of_transfer(ends, flow.devices().blocks());
        flow.set_progress(Progress::new(counted_in, whole));
    }

    fn cancel(&self, id: EntryId) {
        let cancelled = self.board().entries.cancel(id);
        if let Some(job) = cancelled {
            self.end(job, Err(TransferError::Cancelled), &mut Buffers::default());
        }
    }

    /// A sleeping thread takes what is queued, when the board is free: a thread that wakes up to a lock that is held sleeps again.
    fn release(&self, board: MutexGuard<'_, Board>) {
        let wakes = board.sleepers > 0 && board.entries.has_work();
        drop(board);
        if wakes {
            self.readiness.wake();
        }
    }

    /// Starts threads that are missing. An error if none runs.
    fn add_threads(self: &Arc<Self>, board: &mut Board) -> io::Result<()> {
        while board.threads < self.threads + board.entries.slow_steps() {
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
        let mut buffers = self.buffers.of_thread();
        // Whether this thread has just looked which sockets are ready.
        let (mut last, mut looked) = (None, false);
        // When this thread has looked for transfers whose time is over. Others that look see what this thread executes as running.
        let mut own_ns = 0;
        let mut board = self.board();
        loop {
            if board.stops || board.threads > self.threads + board.entries.slow_steps() {
                board.threads -= 1;
                // The next thread.
                self.readiness.wake();
                self.ended.notify_all();
                return;
            }
            let now_ns = self.now_ns();
            if now_ns >= own_ns.min(board.expired_ns) + EXPIRY_INTERVAL.as_nanos() as u64 {
                own_ns = now_ns;
                self.counters.note_in_flight(board.entries.in_flight());
                board = self.expire(board, &mut buffers);
            }
            let parts = board.entries.take_parts(looked);
            if !parts.is_empty() {
                self.counters.note_queued(board.entries.queued());
                looked = false;
                self.release(board);
                board = self.run_stages(parts, &mut buffers);
                continue;
            }
            let step = board.entries.take(last.take(), self.now_ns());
            self.counters.note_queued(board.entries.queued());
            let Some((id, end, mut job)) = step else {
                let look = board.entries.has_parts() && !looked;
                looked = look;
                board = match board.entries.is_busy() {
                    false if look => self.look(board, Some(Duration::ZERO)),
                    false => self.sleep(board),
                    true => {
                        let waited = self.watch.wait_timeout(board, EXPIRY_INTERVAL);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                continue;
            };
            looked = false;
            let part = self.part_for_socket(&board, end, &mut job);
            if let Some(part) = part {
                board.entries.begin_part(id);
                let sockets = job.ending.sockets.iter();
                let mut sinks = sockets.filter(|((_, end), _)| *end == End::Sink);
                let socket = sinks.next().expect("it is sent").1.clone();
                let now_ns = self.now_ns();
                // Nothing has come back that could end it.
                board.entries.give_back(id, job, false, 0, &mut buffers, now_ns);
                self.release(board);
                board = self.send_apart(id, part, &socket, &mut buffers);
            } else {
                if job.may_hang(end) && board.sleepers > 0 && board.sleepers == board.unlimited {
                    // The file may hang: another thread watches the time.
                    drop(board);
                    self.readiness.wake();
                } else {
                    self.release(board);
                }
                board = self.step(id, end, job, &mut buffers);
            }
            last = Some(id);
        }
    }

    /// A chunk that this thread sends while another one reads the source: if one may, and has nothing else to do.
    fn part_for_socket(&self, board: &Board, end: End, job: &mut Job) -> Option<Apart> {
        let is_alone = board.sleepers > 0 && !board.entries.is_busy() && !board.entries.has_work();
        if end != End::Sink || !is_alone { None } else { job.flow.part_for_socket() }
    }

    fn send_apart(
        &self,
        id: EntryId,
        mut part: Apart,
        socket: &Socket,
        buffers: &mut Buffers,
    ) -> MutexGuard<'_, Board> {
        let Apart::Send(send) = &mut part else { unreachable!("it is sent") };
        let blocked = send.run();
        if blocked {
            let key = id.key(End::Sink);
            let arm = |socket: BorrowedFd<'_>| self.readiness.arm(socket, key, Interest::Send);
            if let Err(error) = socket.with(arm) {
                send.fail(TransferError::of_host("waiting for the socket", &error));
            }
        }
        self.give_parts_back(vec![(id, part, blocked)], buffers)
    }

    /// Chunks of several transfers go through their stages.
    fn run_stages(
        &self,
        mut parts: Vec<(EntryId, Apart)>,
        buffers: &mut Buffers,
    ) -> MutexGuard<'_, Board> {
        let stages = parts.iter_mut().filter_map(|(_, part)| match part {
            Apart::Stages(stages) => Some(stages),
            Apart::Send(_) => None,
        });
        let mut stages: Vec<_> = stages.collect();
        self.counters.count_pass(stages.len());
        run_together(&mut stages);
        self.give_parts_back(
            parts.into_iter().map(|(id, part)| (id, part, false)).collect(),
            buffers,
        )
    }

    fn give_parts_back(
        &self,
        parts: Vec<(EntryId, Apart, bool)>,
        buffers: &mut Buffers,
    ) -> MutexGuard<'_, Board> {
        let now_ns = self.now_ns();
        let mut board = self.board();
        let ended = board.entries.give_parts_back(parts, buffers, now_ns);
        if ended.is_empty() {
            return board;
        }
        drop(board);
        for (job, result) in ended {
            self.end(job, result, buffers);
        }
        self.board()
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
                job.flow.fail(TransferError::of_host("waiting for the socket", &error));
                ended = job.flow.ended();
            }
        }
        let now_ns = self.now_ns();
        let mut board = self.board();
        let (job, result) = match ended {
            None => {
                let (blocked, moved) = (step.blocked, step.moved);
                match board.entries.give_back(id, job, blocked, moved, buffers, now_ns) {
                    GivenBack::Kept => return board,
                    GivenBack::Ended(job, result) => (job, Some(result)),
                    GivenBack::Abandoned(job) => (job, None),
                }
            }
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
        self.counters.note_in_flight(board.entries.in_flight());
        board.sleepers += 1;
        board.unlimited += unlimited;
        let mut board = self.look(board, timeout);
        board.sleepers -= 1;
        board.unlimited -= unlimited;
        if timeout.is_some() {
            // The loop looks for transfers whose time is over.
            board.expired_ns = 0;
        }
        board
    }

    /// Queues what has become ready, or becomes ready within this time.
    fn look<'s>(
        &'s self,
        board: MutexGuard<'s, Board>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'s, Board> {
        drop(board);
        let mut ready = Vec::new();
        self.readiness.wait(&mut ready, timeout);
        let mut board = self.board();
        for key in ready {
            let (id, end) = EntryId::from_key(key);
            board.entries.ready(id, end);
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

    /// Hands over the descriptors to be closed, gives the memory back, then answers the caller.
    fn end(&self, job: Job, result: Result<(), TransferError>, buffers: &mut Buffers) {
        let Job { flow, ending, reserved, .. } = job;
        self.forget(&ending);
        let report = flow.report(&result, buffers);
        drop(reserved);
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
        let done = ending.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            done(outcome);
        }
    }
}

#[cfg(test)]
mod tests;
