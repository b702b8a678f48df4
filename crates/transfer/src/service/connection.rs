//! A connection of a program, and its transfers in flight.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sys::isolation::Identity;
use sys::local::LocalSocket;
use sys::readiness::WakeFd;

use super::{Acceptor, NO_TENANT, answer};
use crate::command::error::TransferError;
use crate::command::report::Report;
use crate::engine::{Caller, Engine, TransferHandle};
use crate::run::reaper::Reaper;
use crate::run::user_process::UserProcess;
use crate::service::message::{Answer, StartRequest};

/// An answer for a program.
struct Message {
    bytes: Vec<u8>,
    /// It is the end of a transfer, which an eventfd counts.
    is_end: bool,
}

/// A connection and its transfers in flight.
pub(super) struct Connection {
    /// `None` only while it is dropped.
    socket: Option<LocalSocket>,
    /// The process that connected; 0: of another container, which cannot be told.
    pub(super) process: u32,
    pub(super) user: Option<u32>,
    /// It is the engine's user, or root.
    pub(super) is_own: bool,
    /// With whose rights the system calls of its transfers are made, if it is another user. `None`: not known, or the engine's own.
    identity: Option<Identity>,
    /// The same for its other connections: of its process, or of its user if that is not the engine's, which can make processes as it likes.
    pub(super) number: u64,
    reaper: Reaper,
    /// Answers that the socket had no room for, the oldest first.
    answers: Mutex<VecDeque<Message>>,
    /// Lets the acceptor know that there are some.
    wake_fd: Arc<WakeFd>,
    /// Counts ends.
    counter: Mutex<Option<WakeFd>>,
    /// By the caller's number; `None` while it is being submitted.
    transfers: Mutex<HashMap<u64, Option<TransferHandle>>>,
}

/// Messages that were not read may hold descriptors, which close with the socket.
impl Drop for Connection {
    fn drop(&mut self) {
        self.reaper.discard(self.socket.take());
    }
}

impl Connection {
    /// `identity`: with whose rights the calls of its transfers are made; `None`: with those of this process.
    pub(super) fn new(
        socket: LocalSocket,
        process: u32,
        user: Option<u32>,
        identity: Option<Identity>,
        engine: &Engine,
        wake_fd: Arc<WakeFd>,
    ) -> Self {
        let own = sys::process::user();
        let is_own = user.is_some_and(|user| user == own || user == 0);
        let number = match (is_own, user) {
            (false, Some(user)) => 2 << 32 | u64::from(user),
            _ => 1 << 32 | u64::from(process),
        };
        Self {
            socket: Some(socket),
            process,
            user,
            is_own,
            identity,
            number,
            reaper: engine.reaper().clone(),
            answers: Mutex::default(),
            wake_fd,
            counter: Mutex::default(),
            transfers: Mutex::default(),
        }
    }

    pub(super) fn socket(&self) -> &LocalSocket {
        self.socket.as_ref().expect("only drop takes it")
    }

    pub(super) fn transfers(&self) -> MutexGuard<'_, HashMap<u64, Option<TransferHandle>>> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answers(&self) -> MutexGuard<'_, VecDeque<Message>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Transfers of which it has not taken the answer.
    fn unanswered(&self) -> usize {
        let waiting = self.answers().len();
        self.transfers().len() + waiting
    }

    /// Returns whether the client stays.
    pub(super) fn start(
        self: &Arc<Self>,
        acceptor: &Acceptor,
        id: u64,
        start: StartRequest,
        descriptors: Vec<OwnedFd>,
    ) -> bool {
        let most = acceptor.limits.per_client;
        // Transfers of the process on other connections.
        let is_other = |connection: &&Arc<Self>| {
            connection.process == self.process
                && connection.process != 0
                && !Arc::ptr_eq(connection, self)
        };
        let others: Vec<&Arc<Self>> = acceptor.connections.iter().filter(is_other).collect();
        let own = self.memory() + others.iter().map(|connection| connection.memory()).sum::<u64>();
        let others: usize = others.iter().map(|connection| connection.unanswered()).sum();
        let refuse = |error: TransferError| {
            acceptor.engine.counters().refuse(&error);
            self.answer(id, &Err(error), Report::default())
        };
        // It may have lost its tenant since it connected.
        let tenant = self.user.and_then(|user| acceptor.engine.tenant_of(user));
        if !self.is_own && tenant.is_none() && !mutants::on("serve_users_without_a_tenant") {
            acceptor.engine.reaper().discard(descriptors);
            return refuse(NO_TENANT);
        }
        let command = match start.command(descriptors) {
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
        let number_of_tenant = tenant.as_ref().map_or(0, |tenant| tenant.share.tenant);
        let process = match self.process_of_user(acceptor, number_of_tenant) {
            Ok(process) => process,
            Err(error) => {
                self.transfers().remove(&id);
                acceptor.engine.reaper().discard(command);
                return refuse(error);
            }
        };
        let (connection, number) = (self.clone(), self.number);
        let caller = Caller { tenant, own: Some(own), number, process: process.clone() };
        process.iter().for_each(|process| process.begin());
        let of_done = process.clone();
        let submitted = acceptor.engine.submit_within(command, caller, move |outcome| {
            connection.transfers().remove(&id);
            of_done.iter().for_each(|process| process.answered());
            connection.answer(id, &outcome.result, outcome.report);
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
                process.iter().for_each(|process| process.answered());
                self.answer(id, &Err(error), Report::default())
            }
        }
    }

    /// The process that makes the system calls of its transfers; `None`: this one does.
    fn process_of_user(
        &self,
        acceptor: &Acceptor,
        tenant: u32,
    ) -> Result<Option<Arc<UserProcess>>, TransferError> {
        if self.is_own || mutants::on("serve_users_with_the_rights_of_the_engine") {
            return Ok(None);
        }
        let unknown = || {
            let why = "it is not known with which rights the program runs: the process that connected has ended, or the host kernel is older than Linux 4.13";
            TransferError::UserProcess(why.to_owned())
        };
        let identity = self.identity.as_ref().ok_or_else(unknown)?;
        Ok(Some(acceptor.users.borrow_mut().process((tenant, identity), Instant::now())?))
    }

    /// Memory that its transfers hold at most.
    fn memory(&self) -> u64 {
        self.transfers().values().flatten().map(|handle| handle.status().memory).sum()
    }

    /// Counts ends in an eventfd from now on. Returns whether the client stays.
    pub(super) fn count_in(&self, acceptor: &Acceptor, descriptors: Vec<OwnedFd>) -> bool {
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

    pub(super) fn cancel(&self, id: u64) {
        let submitted = self.transfers().get(&id).cloned().flatten();
        if let Some(submitted) = submitted {
            submitted.cancel();
        }
    }

    pub(super) fn show_progress(&self, id: u64) -> bool {
        let submitted = self.transfers().get(&id).cloned().flatten();
        let Some(submitted) = submitted else { return true };
        let (read, written) = (submitted.progress().read(), submitted.progress().written());
        self.send(Answer::Progress { id, read, written }.encode())
    }

    /// Returns whether the client stays.
    pub(super) fn answer(
        &self,
        id: u64,
        result: &Result<(), TransferError>,
        report: Report,
    ) -> bool {
        self.put(Message { bytes: answer(id, result, report), is_end: true })
    }

    /// Returns whether the client stays.
    pub(super) fn send(&self, bytes: Vec<u8>) -> bool {
        self.put(Message { bytes, is_end: false })
    }

    /// Sends an answer, or keeps it until the client has taken those before it.
    fn put(&self, message: Message) -> bool {
        let mut answers = self.answers();
        answers.push_back(message);
        if answers.len() > 1 {
            return true;
        }
        let sent = self.send_first(&mut answers);
        if !answers.is_empty() {
            drop(answers);
            self.wake_fd.wake();
        }
        sent
    }

    /// Whether answers wait until the client takes earlier ones.
    pub(super) fn has_answers(&self) -> bool {
        !self.answers().is_empty()
    }

    /// Sends answers that wait, as many as there is room for. Returns whether the client stays.
    pub(super) fn send_answers(&self) -> bool {
        self.send_first(&mut self.answers())
    }

    fn send_first(&self, answers: &mut VecDeque<Message>) -> bool {
        while let Some(Message { bytes, is_end }) = answers.front() {
            match self.socket().send(bytes, &[]) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => {
                    answers.clear();
                    self.socket().shut_down();
                    return false;
                }
            }
            if let (true, Some(counter)) = (is_end, &*self.counter()) {
                counter.wake();
            }
            answers.pop_front();
        }
        true
    }

    /// Cancels its transfers.
    pub(super) fn leave(&self) {
        self.socket().shut_down();
        let submitted: Vec<TransferHandle> = self.transfers().values().flatten().cloned().collect();
        submitted.iter().for_each(TransferHandle::cancel);
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
    use std::os::fd::AsFd as _;

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
