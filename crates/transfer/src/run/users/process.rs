//! The process of a user as the engine has it.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sys::isolation::Identity;
use sys::local::{LocalSocket, wait_readable};
use sys::slot::Slot;

use super::wire::{Call, MESSAGE_BYTES, Operation, Order, Reply, SLOT_BYTES};
use super::{CallError, LOOK_INTERVAL, UserProgram};

/// Lanes that stay for the next call. Each has memory of its own.
const IDLE_LANES_MAX: usize = 4;

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
    pub(super) fn start(program: &UserProgram, identity: &Identity) -> io::Result<(Self, Child)> {
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
    pub(super) fn give_up(&self) {
        self.is_broken.store(true, Ordering::Relaxed);
    }

    /// Whether no further call can succeed.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Whether no transfer uses it.
    pub(super) fn is_idle(&self) -> bool {
        self.remotes.load(Ordering::Relaxed) == 0 && self.unanswered.load(Ordering::Relaxed) == 0
    }

    /// Whether all that it does are calls that hang, of transfers that have been given up.
    pub(super) fn only_hangs(&self) -> bool {
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
        let sent = self.control.send(&Order::Lane.encode(), &[theirs.as_fd(), slot.fd()]);
        sent.map_err(|_| self.ended())?;
        Ok(Lane { socket, slot })
    }

    fn close(&self, transfer: u64) {
        // A process that does not read what is sent to it has stopped.
        if self.control.send(&Order::Close(transfer).encode(), &[]).is_err() {
            self.is_broken.store(true, Ordering::Relaxed);
        }
    }
}

/// What a transfer, or a part of one, has in the process of its user.
pub(crate) struct Remote {
    process: std::sync::Arc<UserProcess>,
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
    pub(crate) fn new(process: &std::sync::Arc<UserProcess>) -> Self {
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
