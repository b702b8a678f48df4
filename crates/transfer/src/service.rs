//! The transfer engine as a service for other processes: a Unix socket that accepts commands with descriptors.
//!
//! The socket has mode 0600 and admits processes of the engine's user and of root. The host kernel checks a caller's access when
//! the caller opens a file, and the engine uses the descriptor that it gets, so no caller reaches a file that it could not
//! open. Limits: connections, transfers in flight in all and their memory, and transfers in flight of each process.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use sys::local::{LocalListener, LocalSocket, WakeFd, wait_readable};
use zeroize::Zeroizing;

use crate::counters::Counters;
use crate::engine::{Caller, Engine, InFlight, Limits, Submitted};
use crate::error::TransferError;
use crate::flow::Report;
use crate::message::{
    Answer, LISTED_MAX, Listed, Order, QUEUES_MAX, REQUEST_BYTES_MAX, RemoteError, Request,
};
use crate::reaper::Reaper;

/// Connections that are accepted between two looks at requests.
const ACCEPTS_MAX: usize = 16;
/// How long to wait before accepting again when the process has no free descriptor.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

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
        Self::over(listener, limits, engine)
    }

    /// The same with an engine that others use as well.
    pub fn over(
        listener: LocalListener,
        limits: ServiceLimits,
        engine: Arc<Engine>,
    ) -> io::Result<Self> {
        let wake_fd = Arc::new(WakeFd::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut acceptor = Acceptor {
            listener,
            limits,
            engine: engine.clone(),
            wake_fd: wake_fd.clone(),
            stop: stop.clone(),
            clients: Vec::new(),
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
    clients: Vec<Arc<Client>>,
}

impl Acceptor {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            self.wait_and_dispatch();
        }
        self.clients.drain(..).for_each(|client| client.leave());
    }

    /// The transfers in flight, the oldest first. Those that no program has asked for are this process's, as of its kernels.
    fn list(&self) -> Answer {
        let mut callers = HashMap::new();
        for client in &self.clients {
            for (id, submitted) in client.transfers().iter() {
                let shape = submitted.as_ref().map(|submitted| Arc::as_ptr(submitted.shape()));
                callers.extend(shape.map(|shape| (shape, (*id, client.process))));
            }
        }
        let own = (0, std::process::id());
        let listed = |InFlight { shape, progress, activity }: InFlight| {
            let (id, process) = callers.get(&Arc::as_ptr(&shape)).copied().unwrap_or(own);
            Listed {
                id,
                process,
                source: shape.source,
                sink: shape.sink,
                activity,
                read: progress.read(),
                written: progress.written(),
                age_ms: shape.started.elapsed().as_millis() as u64,
                stages: shape.stages.clone(),
            }
        };
        let mut entries: Vec<Listed> = self.engine.transfers().into_iter().map(listed).collect();
        let total = entries.len() as u64;
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.age_ms));
        entries.truncate(LISTED_MAX);
        let mut queues = self.engine.queues();
        queues.truncate(QUEUES_MAX);
        Answer::List { total, entries, queues }
    }

    fn wait_and_dispatch(&mut self) {
        let mut files: Vec<BorrowedFd<'_>> = vec![self.wake_fd.as_fd(), self.listener.as_fd()];
        files.extend(self.clients.iter().map(|client| client.socket().as_fd()));
        let ready = wait_readable(&files, None);
        if ready[0] {
            self.wake_fd.clear();
        }
        // Backwards, so that a removal does not move entries that are still to be checked.
        for index in (0..self.clients.len()).rev().filter(|index| ready[2 + index]) {
            if !self.serve(index) {
                self.clients.swap_remove(index).leave();
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
        let refusal = if !is_own && !has_tenant {
            TransferError::NotAdmitted
        } else if self.clients.len() >= self.limits.clients as usize {
            TransferError::TooManyClients(self.limits.clients)
        } else {
            let (transfers, counter) = (Mutex::default(), Mutex::default());
            let reaper = self.engine.reaper().clone();
            let process = peer.map_or(0, |peer| peer.process);
            self.clients.push(Arc::new(Client {
                socket: Some(socket),
                process,
                user,
                is_own,
                transfers,
                counter,
                reaper,
            }));
            return;
        };
        self.engine.counters().refuse(&refusal);
        // If it does not read the answer it has gone already.
        let _ = socket.send(&answer(0, &Err(refusal), Report::default()), &[]);
        self.engine.reaper().discard(socket);
    }

    /// Reads one message of a client; returns whether the client stays.
    fn serve(&self, index: usize) -> bool {
        let client = &self.clients[index];
        // It may hold a key.
        let mut bytes = Zeroizing::new([0; REQUEST_BYTES_MAX + 1]);
        let (len, descriptors) = match client.socket().receive_descriptors(&mut *bytes) {
            Ok(None) => return true,
            Ok(Some((0, _))) | Err(_) => return false,
            Ok(Some(received)) => received,
        };
        let request = match Request::decode(&bytes[..len]) {
            Ok(Request::Start { id, order }) => return client.start(self, id, order, descriptors),
            Ok(Request::Signal) => return client.count_in(self, descriptors),
            other => {
                // Those that came with another message.
                self.engine.reaper().discard(descriptors);
                other
            }
        };
        match request {
            Ok(Request::Start { .. } | Request::Signal) => unreachable!("they have returned above"),
            Ok(Request::Cancel(id)) => {
                client.cancel(id);
                true
            }
            Ok(Request::Progress(id)) => client.show_progress(id),
            Ok(Request::List) => client.send(&self.list().encode()),
            Err(error) => {
                let refusal = TransferError::BadRequest(error.to_string());
                self.engine.counters().refuse(&refusal);
                client.answer(0, &Err(refusal), Report::default());
                false
            }
        }
    }
}

fn answer(id: u64, result: &Result<(), TransferError>, report: Report) -> Vec<u8> {
    let result = result.as_ref().copied().map_err(RemoteError::from);
    Answer::Ended { id, result, report }.encode()
}

/// A connection and its transfers in flight.
struct Client {
    /// `None` only while it is dropped.
    socket: Option<LocalSocket>,
    /// The process that connected; 0: of another container, which cannot be told.
    process: u32,
    user: Option<u32>,
    /// It is the engine's user, or root.
    is_own: bool,
    reaper: Reaper,
    /// Counts ends.
    counter: Mutex<Option<WakeFd>>,
    /// By the caller's number; `None` while it is being submitted.
    transfers: Mutex<HashMap<u64, Option<Submitted>>>,
}

/// Messages that were not read may hold descriptors, which close with the socket.
impl Drop for Client {
    fn drop(&mut self) {
        self.reaper.discard(self.socket.take());
    }
}

impl Client {
    fn socket(&self) -> &LocalSocket {
        self.socket.as_ref().expect("only drop takes it")
    }

    fn transfers(&self) -> MutexGuard<'_, HashMap<u64, Option<Submitted>>> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the client stays.
    fn start(
        self: &Arc<Self>,
        acceptor: &Acceptor,
        id: u64,
        order: Order,
        descriptors: Vec<OwnedFd>,
    ) -> bool {
        let most = acceptor.limits.per_client;
        // Transfers of the process on other connections.
        let is_other = |client: &&Arc<Self>| {
            client.process == self.process && client.process != 0 && !Arc::ptr_eq(client, self)
        };
        let others: Vec<&Arc<Self>> = acceptor.clients.iter().filter(is_other).collect();
        let own = self.memory() + others.iter().map(|client| client.memory()).sum::<u64>();
        let others: usize = others.iter().map(|client| client.transfers().len()).sum();
        let refuse = |error: TransferError| {
            acceptor.engine.counters().refuse(&error);
            self.answer(id, &Err(error), Report::default())
        };
        // It may have lost its tenant since it connected.
        let tenant = self.user.and_then(|user| acceptor.engine.tenant_of(user));
        if !self.is_own && tenant.is_none() {
            acceptor.engine.reaper().discard(descriptors);
            return refuse(TransferError::NotAdmitted);
        }
        let command = match order.command(descriptors) {
            Ok(command) => command,
            Err(others) => {
                acceptor.engine.reaper().discard(others);
                let why = "a transfer needs a descriptor for each file of its source and one for its sink; fewer arrive if the engine is out of descriptors";
                return refuse(TransferError::BadRequest(why.to_owned()));
            }
        };
        {
            let mut transfers = self.transfers();
            if transfers.contains_key(&id) {
                drop(transfers);
                acceptor.engine.reaper().discard(command);
                let why = format!("the transfer {id} is in flight: choose another id");
                return refuse(TransferError::BadRequest(why));
            }
            if others + transfers.len() >= most as usize {
                drop(transfers);
                acceptor.engine.reaper().discard(command);
                return refuse(TransferError::TooMany(most));
            }
            transfers.insert(id, None);
        }
        let client = self.clone();
        let caller = Caller { tenant, own: Some(own) };
        let submitted = acceptor.engine.submit_within(command, caller, move |outcome| {
            client.transfers().remove(&id);
            client.answer(id, &outcome.result, outcome.report);
        });
        match submitted {
            Ok(submitted) => {
                // It may have ended already.
                if let Some(entry) = self.transfers().get_mut(&id) {
                    *entry = Some(submitted);
                }
                true
            }
            Err(error) => {
                self.transfers().remove(&id);
                self.answer(id, &Err(error), Report::default())
            }
        }
    }

    /// Memory that its transfers hold at most.
    fn memory(&self) -> u64 {
        self.transfers().values().flatten().map(|submitted| submitted.shape().memory).sum()
    }

    /// Counts ends in an eventfd from now on. Returns whether the client stays.
    fn count_in(&self, acceptor: &Acceptor, descriptors: Vec<OwnedFd>) -> bool {
        match counter_of(self.is_own, descriptors) {
            Ok(counter) => {
                *self.counter() = Some(counter);
                true
            }
            Err((why, descriptors)) => {
                self.reaper.discard(descriptors);
                let refusal = TransferError::BadRequest(why.to_owned());
                acceptor.engine.counters().refuse(&refusal);
                self.answer(0, &Err(refusal), Report::default());
                false
            }
        }
    }

    fn counter(&self) -> MutexGuard<'_, Option<WakeFd>> {
        self.counter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cancel(&self, id: u64) {
        let submitted = self.transfers().get(&id).cloned().flatten();
        if let Some(submitted) = submitted {
            submitted.cancel();
        }
    }

    fn show_progress(&self, id: u64) -> bool {
        let submitted = self.transfers().get(&id).cloned().flatten();
        let Some(submitted) = submitted else { return true };
        let (read, written) = (submitted.progress().read(), submitted.progress().written());
        self.send(&Answer::Progress { id, read, written }.encode())
    }

    /// Returns whether the client stays.
    fn answer(&self, id: u64, result: &Result<(), TransferError>, report: Report) -> bool {
        let sent = self.send(&answer(id, result, report));
        if let (true, Some(counter)) = (sent, &*self.counter()) {
            counter.wake();
        }
        sent
    }

    /// A client that does not read its answers is disconnected.
    fn send(&self, message: &[u8]) -> bool {
        let sent = self.socket().send(message, &[]);
        if sent.is_err() {
            self.socket().shut_down();
        }
        sent.is_ok()
    }

    /// Cancels its transfers.
    fn leave(&self) {
        self.socket().shut_down();
        let submitted: Vec<Submitted> = self.transfers().values().flatten().cloned().collect();
        submitted.iter().for_each(Submitted::cancel);
    }
}

/// The eventfd in which ends are counted. Another user could let the engine wait: its programs can change the flags of an eventfd.
fn counter_of(
    is_own: bool,
    mut descriptors: Vec<OwnedFd>,
) -> Result<WakeFd, (&'static str, Vec<OwnedFd>)> {
    if !is_own {
        let why = "ends are counted in an eventfd for programs of the engine's user and of root";
        return Err((why, descriptors));
    }
    if descriptors.len() != 1 {
        return Err(("ends are counted in one eventfd, which comes with the request", descriptors));
    }
    WakeFd::counting(descriptors.remove(0)).map_err(|other| {
        ("ends are counted in an eventfd that was made with EFD_NONBLOCK", vec![other])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_counted_in_one_eventfd_of_the_engine_s_own_user() {
        let eventfd = || WakeFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(counter_of(true, vec![eventfd()]).is_ok());
        let refused = |is_own, descriptors: Vec<OwnedFd>| {
            let given = descriptors.len();
            let Err((why, kept)) = counter_of(is_own, descriptors) else { panic!("it is taken") };
            assert_eq!(kept.len(), given, "all are closed by the reaper");
            why
        };
        assert!(refused(false, vec![eventfd()]).contains("the engine's user"));
        assert!(refused(false, vec![]).contains("the engine's user"));
        assert!(refused(true, vec![]).contains("one eventfd"));
        assert!(refused(true, vec![eventfd(), eventfd()]).contains("one eventfd"));
        assert!(refused(true, vec![file()]).contains("EFD_NONBLOCK"));
    }
}
