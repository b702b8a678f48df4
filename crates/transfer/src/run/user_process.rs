//! Transfers of other users than the engine's. The engine reads, writes, sends and receives for them through a process that has the
//! user's rights, so that the host kernel treats each call as the user's: quotas and limits of file lengths, the credentials that a receiver sees
//! (`SO_PASSCRED`), what a write clears (set-user-ID) and what a read of a file shows are those of the user, whatever the engine may do.
//!
//! Everything else of a transfer is the engine's: its checks, turns, stages, memory, counts and times. A thread of the engine that has a step of
//! such a transfer makes one call of the process and waits for its reply, as it would wait for the host kernel. So turns and limits are one
//! engine's over all users, and a process that does not reply, because a file hangs or its user has stopped it, is a file that hangs.
//!
//! * `wire`: the messages. `child`: the side of the process. The rest is the engine's side.

mod child;
mod wire;

use std::ffi::OsString;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use std::time::Duration;

use sys::isolation::Identity;
use sys::local::LocalSocket;
use sys::readiness::wait_readable;
use sys::slot::Slot;

use crate::command::error::CallError;
pub(crate) use wire::Operation;
use wire::{Call, Control, MESSAGE_BYTES, Reply, SLOT_BYTES};

/// How often processes are looked at while there are any.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Lanes that stay for the next call. Each has memory of its own.
const IDLE_LANES_MAX: usize = 4;

/// The program whose processes make the system calls of other users' transfers: it calls [`serve_user`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserProgram {
    /// Where it is. Every user has to be able to execute it.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Its whole environment.
    pub environment: Vec<(OsString, OsString)>,
}

/// What a process of [`UserProgram`] does until its engine ends. Standard input is the connection to the engine. An error: the engine, or the host kernel, refuses what it needs.
pub fn serve_user() -> io::Result<()> {
    child::run()
}

/// A connection to a thread of the process, and the memory for the bytes of its calls. One call at a time.
struct Lane {
    socket: LocalSocket,
    slot: Slot,
}

/// A process that makes the system calls of a user's transfers.
pub(crate) struct UserProcess {
    user: u32,
    control: LocalSocket,
    idle: Mutex<Vec<Lane>>,
    last_transfer: AtomicU64,
    /// It has ended, or broke the protocol.
    is_broken: AtomicBool,
    /// Transfers whose caller waits for the answer.
    unanswered: AtomicUsize,
    /// [`Remote`]s: parts of transfers that have not returned.
    remotes: AtomicUsize,
}

impl UserProcess {
    /// Starts one.
    pub(crate) fn start(program: &UserProgram, identity: &Identity) -> io::Result<(Self, Child)> {
        let (control, theirs) = LocalSocket::pair()?;
        let mut command = Command::new(&program.path);
        command.args(&program.arguments).env_clear().envs(program.environment.iter().cloned());
        // Signals of a terminal are the engine's.
        command.current_dir("/").process_group(0);
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        sys::isolation::start_for(&mut command, identity);
        sys::process::tie(&mut command, &[]);
        let child = command.spawn()?;
        let process = Self {
            user: identity.user,
            control,
            idle: Mutex::default(),
            last_transfer: AtomicU64::default(),
            is_broken: AtomicBool::default(),
            unanswered: AtomicUsize::default(),
            remotes: AtomicUsize::default(),
        };
        Ok((process, child))
    }

    /// It is being killed: calls that wait for it return, also if the host kernel does not let it end.
    pub(crate) fn give_up(&self) {
        self.is_broken.store(true, Ordering::Relaxed);
    }

    /// Whether no further call can succeed.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Whether no transfer uses it.
    pub(crate) fn is_idle(&self) -> bool {
        self.remotes.load(Ordering::Relaxed) == 0 && self.unanswered.load(Ordering::Relaxed) == 0
    }

    /// Whether all that it does are calls that hang, of transfers that have been given up.
    pub(crate) fn only_hangs(&self) -> bool {
        self.remotes.load(Ordering::Relaxed) > 0 && self.unanswered.load(Ordering::Relaxed) == 0
    }

    /// A transfer begins.
    pub(crate) fn begin(&self) {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller of a transfer has its answer.
    pub(crate) fn answered(&self) {
        self.unanswered.fetch_sub(1, Ordering::Relaxed);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> io::Error {
        self.is_broken.store(true, Ordering::Relaxed);
        let why = format!("the process of user {} that executed the transfer has ended", self.user);
        io::Error::other(CallError::Process(why))
    }

    fn lane(&self) -> io::Result<Lane> {
        if let Some(lane) = self.idle().pop() {
            return Ok(lane);
        }
        let (socket, theirs) = LocalSocket::pair()?;
        let slot = Slot::create("serval:transfer", SLOT_BYTES).map_err(io::Error::other)?;
        let sent = self.control.send(&Control::Lane.encode(), &[theirs.as_fd(), slot.fd()]);
        sent.map_err(|_| self.ended())?;
        Ok(Lane { socket, slot })
    }

    fn close(&self, transfer: u64) {
        // A process that does not read what is sent to it has stopped.
        if self.control.send(&Control::Close(transfer).encode(), &[]).is_err() {
            self.is_broken.store(true, Ordering::Relaxed);
        }
    }
}

/// What a transfer, or a part of one, has in the process of its user.
pub(crate) struct Remote {
    process: Arc<UserProcess>,
    transfer: u64,
    /// It has the descriptors.
    is_open: bool,
}

impl Drop for Remote {
    fn drop(&mut self) {
        if self.is_open {
            self.process.close(self.transfer);
        }
        self.process.remotes.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Remote {
    pub(crate) fn new(process: &Arc<UserProcess>) -> Self {
        process.remotes.fetch_add(1, Ordering::Relaxed);
        let transfer = process.last_transfer.fetch_add(1, Ordering::Relaxed);
        Self { process: process.clone(), transfer, is_open: false }
    }

    /// Whether the process needs its descriptors.
    pub(crate) fn is_new(&self) -> bool {
        !self.is_open
    }

    /// A call that takes the bytes of `put`, or does without. `descriptors`: those of the source, then the sink; only in the first call.
    pub(crate) fn give(
        &mut self,
        operation: Operation,
        descriptors: &[BorrowedFd<'_>],
        put: &[u8],
    ) -> io::Result<usize> {
        let lane = self.process.lane()?;
        let bytes = lane.slot.put(put);
        let done = self.call(&lane, operation, descriptors, bytes)?;
        self.give_back(lane);
        done
    }

    /// A call that makes as many bytes as the parts have room for, or fewer.
    pub(crate) fn take(
        &mut self,
        operation: Operation,
        descriptors: &[BorrowedFd<'_>],
        parts: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let lane = self.process.lane()?;
        let room: usize = parts.iter().map(|part| part.len()).sum();
        let done = self.call(&lane, operation, descriptors, room.min(SLOT_BYTES))?;
        if let Ok(made) = done {
            let mut at = 0;
            for part in parts {
                let len = part.len().min(made - at);
                at += lane.slot.get(at, &mut part[..len]);
            }
        }
        self.give_back(lane);
        done
    }

    /// Waits for the reply, for as long as the call takes. The outer error: the process has ended.
    fn call(
        &mut self,
        lane: &Lane,
        operation: Operation,
        descriptors: &[BorrowedFd<'_>],
        bytes: usize,
    ) -> io::Result<io::Result<usize>> {
        let call = Call { operation, transfer: self.transfer, bytes };
        let ended = || self.process.ended();
        lane.socket.send(&call.encode(), descriptors).map_err(|_| ended())?;
        self.is_open |= !descriptors.is_empty();
        loop {
            wait_readable(&[lane.socket.as_fd()], Some(LOOK_INTERVAL));
            let mut reply = [0; MESSAGE_BYTES + 1];
            match lane.socket.receive(&mut reply) {
                Ok(None) if self.process.is_broken() => return Err(ended()),
                Ok(None) => {}
                Ok(Some(len)) => {
                    let reply = Reply::decode(&reply[..len]);
                    return reply.and_then(|reply| reply.result(bytes)).ok_or_else(ended);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(ended()),
            }
        }
    }

    fn give_back(&self, lane: Lane) {
        let mut idle = self.process.idle();
        if idle.len() < IDLE_LANES_MAX {
            idle.push(lane);
        }
    }
}
