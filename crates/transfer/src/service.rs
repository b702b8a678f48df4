//! The transfer engine as a service for other processes: a Unix socket that accepts commands with descriptors.
//!
//! The socket has mode 0600 and admits processes of the engine's user and of root. The host kernel checks a caller's access when
//! the caller opens a file, and the engine uses the descriptor that it gets, so no caller reaches a file that it could not
//! open. Limits: connections, transfers in flight in all and their memory, and transfers in flight of each process.
//!
//! An engine of root also admits the users of tenants, if the socket's mode lets them connect. A process with their rights makes the system calls of their transfers (`users`).

pub(crate) mod client;
mod connection;
pub mod message;
pub(crate) mod users;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sys::isolation::Identity;
use sys::local::{LocalListener, LocalSocket};
use sys::readiness::Interest;
use sys::readiness::{WakeFd, wait_ready};
use zeroize::Zeroizing;

use crate::command::error::TransferError;
use crate::command::report::Report;
use crate::engine::counters::Counters;
use crate::engine::fair_share::is_within_share;
use crate::engine::{Engine, InFlight, Limits};
use crate::run::user_process::UserProgram;
use crate::service::message::{
    Answer, LISTED_MAX, Listed, QUEUES_MAX, REQUEST_BYTES_MAX, RemoteError, Request,
};
use crate::service::users::Users;
use connection::Connection;

/// Connections that are accepted between two looks at requests.
const ACCEPTS_MAX: usize = 16;
/// How long to wait before accepting again when the process has no free descriptor.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);
/// Why a user without a tenant is refused.
const NO_TENANT: TransferError = TransferError::NotAdmitted(
    "the transfer engine serves processes of its own user, of root and of tenants' users",
);

/// What the callers of a service may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceLimits {
    /// Transfers in flight.
    pub in_flight: u32,
    /// Threads that move bytes at a time.
    pub threads: u32,
    /// Memory of all transfers in flight.
    pub memory_mib: u32,
    /// Transfers in flight of one process.
    pub per_client: u32,
    /// Connections.
    pub clients: u32,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        let Limits { in_flight, threads, memory_mib } = Limits::default();
        Self { in_flight, threads, memory_mib, per_client: 64, clients: 256 }
    }
}

impl ServiceLimits {
    /// Those of the engine.
    pub fn of_engine(&self) -> Limits {
        let Self { in_flight, threads, memory_mib, .. } = *self;
        Limits { in_flight, threads, memory_mib }
    }
}

/// A running service; ends when dropped, and cancels what is in flight.
pub struct Service {
    engine: Arc<Engine>,
    wake_fd: Arc<WakeFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Serves the callers of `listener`.
    pub fn start(listener: LocalListener, limits: ServiceLimits) -> io::Result<Self> {
        let engine = Arc::new(Engine::start(limits.of_engine())?);
        Self::with_engine(listener, limits, engine)
    }

    /// The same with an engine that others use as well.
    pub fn with_engine(
        listener: LocalListener,
        limits: ServiceLimits,
        engine: Arc<Engine>,
    ) -> io::Result<Self> {
        Self::with_users(listener, limits, engine, None)
    }

    /// The same for the users of tenants, too, if this process is root's: processes of `program` make the system calls of their transfers.
    pub fn with_users(
        listener: LocalListener,
        limits: ServiceLimits,
        engine: Arc<Engine>,
        program: Option<UserProgram>,
    ) -> io::Result<Self> {
        let wake_fd = Arc::new(WakeFd::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut acceptor = Acceptor {
            listener,
            limits,
            engine: engine.clone(),
            wake_fd: wake_fd.clone(),
            stop: stop.clone(),
            connections: Vec::new(),
            users: RefCell::new(Users::new(program)),
        };
        let builder = std::thread::Builder::new().name("serval-transfers".into());
        let thread = Some(builder.spawn(move || acceptor.run())?);
        Ok(Self { engine, wake_fd, stop, thread })
    }

    /// What has been counted.
    pub fn counters(&self) -> Arc<Counters> {
        self.engine.counters()
    }

    /// Transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake_fd.wake();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

/// The thread's state.
struct Acceptor {
    listener: LocalListener,
    limits: ServiceLimits,
    engine: Arc<Engine>,
    wake_fd: Arc<WakeFd>,
    stop: Arc<AtomicBool>,
    connections: Vec<Arc<Connection>>,
    /// The processes for other users than the engine's.
    users: RefCell<Users>,
}

impl Acceptor {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            self.wait_and_dispatch();
        }
        self.connections.drain(..).for_each(|connection| connection.leave());
    }

    /// The transfers in flight, the oldest first. Those that no program has asked for are this process's, as of its kernels.
    /// A user of a tenant sees its own only, and no devices: what others do is not shown.
    fn list(&self, asker: &Connection) -> Answer {
        let mut callers = HashMap::new();
        let sees_all = asker.is_own || mutants::on("list_transfers_of_others");
        for connection in self.connections.iter().filter(|of| sees_all || of.user == asker.user) {
            for (id, handle) in connection.transfers().iter() {
                let status = handle.as_ref().map(|handle| Arc::as_ptr(handle.status()));
                callers.extend(status.map(|status| (status, (*id, connection.process))));
            }
        }
        let own = sees_all.then_some((0, std::process::id()));
        let listed = |InFlight { status, activity }: InFlight| {
            let (id, process) = callers.get(&Arc::as_ptr(&status)).copied().or(own)?;
            Some(Listed {
                id,
                process,
                source: status.source,
                sink: status.sink,
                activity,
                read: status.progress.read(),
                written: status.progress.written(),
                age_ms: status.started.elapsed().as_millis() as u64,
                stages: status.stages.clone(),
            })
        };
        let transfers = self.engine.transfers().into_iter();
        let mut entries: Vec<Listed> = transfers.filter_map(listed).collect();
        let total = entries.len() as u64;
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.age_ms));
        entries.truncate(LISTED_MAX);
        let mut queues = if sees_all { self.engine.queues() } else { Vec::new() };
        queues.truncate(QUEUES_MAX);
        Answer::List { total, entries, queues }
    }

    fn wait_and_dispatch(&mut self) {
        let own = [self.wake_fd.as_fd(), self.listener.as_fd()];
        let mut files: Vec<(BorrowedFd<'_>, Interest)> =
            own.into_iter().map(|file| (file, Interest::Receive)).collect();
        // A client that does not take its answers is not asked for further requests.
        files.extend(self.connections.iter().map(|connection| match connection.has_answers() {
            true => (connection.socket().as_fd(), Interest::Send),
            false => (connection.socket().as_fd(), Interest::Receive),
        }));
        let next_look = self.users.borrow().next_look();
        let ready = wait_ready(&files, next_look);
        if next_look.is_some() {
            self.users.borrow_mut().look(Instant::now());
        }
        if ready[0] {
            self.wake_fd.clear();
        }
        // Backwards, so that a removal does not move entries that are still to be checked.
        for index in (0..self.connections.len()).rev().filter(|index| ready[2 + index]) {
            if !self.serve(index) {
                let connection = self.connections.swap_remove(index);
                connection.leave();
                if self.connections.iter().all(|other| other.number != connection.number) {
                    self.engine.forget_caller(connection.number);
                }
            }
        }
        if ready[1] {
            self.accept_some();
        }
    }

    /// Accepts those that wait, a bounded number at a time.
    fn accept_some(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            match self.listener.accept() {
                Ok(Some(socket)) => self.accept(socket),
                Ok(None) => return,
                Err(_) => {
                    // The peer stays in the backlog, and the listener stays ready.
                    std::thread::sleep(EXHAUSTED_PAUSE);
                    return;
                }
            }
        }
    }

    fn accept(&mut self, socket: LocalSocket) {
        let own = sys::process::user();
        let peer = socket.peer().ok();
        let user = peer.map(|peer| peer.user);
        let is_own = user.is_some_and(|user| user == own || user == 0);
        let has_tenant = user.is_some_and(|user| self.engine.tenant_of(user).is_some());
        let other_user = if is_own { None } else { self.users.borrow().refusal() };
        let refusal = if !is_own && !has_tenant && !mutants::on("admit_every_user") {
            NO_TENANT
        } else if let Some(refusal) = other_user {
            TransferError::NotAdmitted(refusal)
        } else if !self.has_room(is_own, user) {
            TransferError::TooManyClients(self.limits.clients)
        } else {
            let identity = if is_own { None } else { identity_of(&socket) };
            let process = peer.map_or(0, |peer| peer.process);
            let (engine, wake_fd) = (&self.engine, self.wake_fd.clone());
            let connection = Connection::new(socket, process, user, identity, engine, wake_fd);
            self.connections.push(Arc::new(connection));
            return;
        };
        self.engine.counters().refuse(&refusal);
        // If it does not read the answer it has gone already.
        let _ = socket.send(&answer(0, &Err(refusal), Report::default()), &[]);
        self.engine.reaper().discard(socket);
    }

    /// Whether one more connection is accepted. Other users leave a part for the next one, and the last place for the engine's.
    fn has_room(&self, is_own: bool, user: Option<u32>) -> bool {
        let (all, most) = (self.connections.len() as u64, u64::from(self.limits.clients));
        let own =
            self.connections.iter().filter(|connection| connection.user == user).count() as u64;
        all < most && (is_own || all + 1 < most && is_within_share(1, own, all, most, 1))
    }

    /// Reads one message of a client; returns whether the client stays.
    fn serve(&self, index: usize) -> bool {
        let connection = &self.connections[index];
        if connection.has_answers() {
            return connection.send_answers();
        }
        // It may hold a key.
        let mut bytes = Zeroizing::new([0; REQUEST_BYTES_MAX + 1]);
        let (len, descriptors) = match connection.socket().receive_descriptors(&mut *bytes) {
            Ok(None) => return true,
            Ok(Some((0, _))) | Err(_) => return false,
            Ok(Some(received)) => received,
        };
        let request = match Request::decode(&bytes[..len]) {
            Ok(Request::Start { id, start }) => {
                return connection.start(self, id, start, descriptors);
            }
            Ok(Request::Signal) => return connection.count_in(self, descriptors),
            other => {
                // Those that came with another message.
                self.engine.reaper().discard(descriptors);
                other
            }
        };
        match request {
            Ok(Request::Start { .. } | Request::Signal) => unreachable!("they have returned above"),
            Ok(Request::Cancel(id)) => {
                connection.cancel(id);
                true
            }
            Ok(Request::Progress(id)) => connection.show_progress(id),
            Ok(Request::List) => connection.send(self.list(connection).encode()),
            Err(error) => {
                let refusal = TransferError::BadRequest(error.to_string());
                self.engine.counters().refuse(&refusal);
                connection.answer(0, &Err(refusal), Report::default());
                false
            }
        }
    }
}

/// With whose rights the process at the other end acts. Its limit is the one that it has when the engine accepts it. `None`: it
/// has ended, it is of another container, or the host kernel does not know all.
fn identity_of(socket: &LocalSocket) -> Option<Identity> {
    let peer = socket.peer().ok()?;
    let (soft, hard) = sys::process::file_limit(peer.process).ok()?;
    // Not more than this process may give.
    let most = sys::process::file_limit(0).ok()?.1;
    let file_bytes = (soft.min(most), hard.min(most));
    let groups = socket.peer_groups().ok()?;
    Some(Identity { user: peer.user, group: peer.group, groups, file_bytes })
}

fn answer(id: u64, result: &Result<(), TransferError>, report: Report) -> Vec<u8> {
    let result = result.as_ref().copied().map_err(RemoteError::from);
    Answer::Ended { id, result, report }.encode()
}
