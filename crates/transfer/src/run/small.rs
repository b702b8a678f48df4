//! Small transfers that the calling thread does itself, with the code of the engine.
//!
//! A hop to another process and back costs more than a few KiB do. So [`crate::Client::run`] and [`crate::Client::send`] read, seal and send
//! a small file in the caller's thread, and wake no other. The steps, limits of time and counts are those of an engine.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use sys::descriptors::{self, Mount, is_stream, length_and_mount, reads_locally, send_now};
use sys::readiness::{Interest, Readiness};

use crate::command::device::{Blocked, Device, Devices};
use crate::command::error::TransferError;
use crate::command::pipeline::{Command, Place, TimeLimits, WhenBlocked};
use crate::command::report::Outcome;
use crate::command::stage::{StageSpec, check_order};
use crate::run::apart::{Apart, run_together};
use crate::run::flow::Flow;
use crate::run::plan::{Cut, Plan};
use crate::run::stall::StallTimer;
use crate::stages::buffer::Buffers;

/// Bytes of the longest range that the calling thread moves itself.
pub const SMALL_BYTES_MAX: u64 = 64 << 10;

/// How often a thread that waits for a socket asks whether it was interrupted.
const LOOK: Duration = Duration::from_secs(1);

/// Does small transfers in the calling thread, and keeps buffers from one to the next.
#[derive(Default)]
pub struct Small {
    buffers: Buffers,
    /// The mount of the last file that was read, if its file system is local.
    local: Option<Mount>,
}

/// A range of a file that goes to a socket.
pub(crate) struct Piece<'p> {
    pub(crate) file: BorrowedFd<'p>,
    pub(crate) from: u64,
    /// `None`: to the end of the file.
    pub(crate) bytes: Option<u64>,
    pub(crate) stages: &'p [StageSpec],
    pub(crate) socket: BorrowedFd<'p>,
    pub(crate) time_limits: TimeLimits,
    /// Whether the caller gives up; asked after a signal, and from time to time.
    pub(crate) interrupted: &'p dyn Fn() -> bool,
}

impl<'p> Piece<'p> {
    /// Of a command that sends a range of one file.
    pub(crate) fn of(command: &'p Command, interrupted: &'p dyn Fn() -> bool) -> Option<Self> {
        let (Place::File(file, from), Place::Socket(socket)) = (&command.source, &command.sink)
        else {
            return None;
        };
        let is_simple = command.more.is_empty()
            && command.head.is_empty()
            && command.when_blocked == WhenBlocked::Wait;
        is_simple.then(|| Self {
            file: file.as_fd(),
            from: *from,
            bytes: command.bytes,
            stages: &command.stages,
            socket: socket.as_fd(),
            time_limits: command.time_limits(),
            interrupted,
        })
    }
}

impl Small {
    /// Does a small transfer; `None`: it is not small, or not usual, and an engine does it or says what is wrong. No other transfer to the
    /// socket may be in flight. `interrupted`: whether the caller gives up, asked while the socket takes nothing; then it ends as
    /// [`TransferError::Cancelled`].
    pub fn run(&mut self, command: &Command, interrupted: &dyn Fn() -> bool) -> Option<Outcome> {
        self.run_piece(&Piece::of(command, interrupted)?)
    }

    pub(crate) fn run_piece(&mut self, piece: &Piece<'_>) -> Option<Outcome> {
        let bytes = self.length_of_small(piece)?;
        let outcome = self.run_small(piece, bytes).ok()?;
        match (&outcome.result, outcome.report.written) {
            // Nothing has left. What is wrong with a descriptor, an engine finds out by more looks than a short transfer can afford.
            (Err(TransferError::Host { .. } | TransferError::Closed), 0) => None,
            _ => Some(outcome),
        }
    }

    /// The bytes of the range, if it is a short one of a file that no server can make the thread wait for.
    fn length_of_small(&mut self, piece: &Piece<'_>) -> Option<u64> {
        // Their work depends on nothing but the length.
        let is_simple =
            |stage: &StageSpec| matches!(stage, StageSpec::Digest(_) | StageSpec::Seal(..));
        let is_short = |bytes: &u64| *bytes <= SMALL_BYTES_MAX;
        if !piece.bytes.as_ref().is_none_or(is_short)
            || !piece.stages.iter().all(is_simple)
            || check_order(piece.stages).is_err()
        {
            return None;
        }
        // Files of /proc have content and no length.
        let (length @ 1.., mount) = length_and_mount(piece.file)? else { return None };
        let bytes = piece.bytes.unwrap_or_else(|| length.saturating_sub(piece.from));
        let ends = piece.from.checked_add(bytes).is_some_and(|end| i64::try_from(end).is_ok());
        if !is_short(&bytes) || !ends || !is_stream(piece.socket) {
            return None;
        }
        if self.local != Some(mount) {
            self.local = reads_locally(piece.file).then_some(mount);
        }
        self.local.map(|_| bytes)
    }

    fn run_small(&mut self, piece: &Piece<'_>, bytes: u64) -> Result<Outcome, TransferError> {
        let began = Instant::now();
        let plan = Plan {
            source: Device::File,
            sink: Device::Socket,
            from: piece.from,
            bytes: Some(bytes),
            to: 0,
            head: Vec::new(),
            stages: piece.stages.to_vec(),
            when_blocked: WhenBlocked::Wait,
            sync: false,
            part: None,
            cut: Cut::No,
            parts_max: 1,
        };
        let mut flow = Flow::new(&plan, Ends { file: piece.file, socket: piece.socket })?;
        let result = self.finish(&mut flow, piece, began);
        let report = flow.report(&result, &mut self.buffers);
        Ok(Outcome { result, report })
    }

    fn finish(
        &mut self,
        flow: &mut Flow<Ends<'_>>,
        piece: &Piece<'_>,
        began: Instant,
    ) -> Result<(), TransferError> {
        let time_limits = piece.time_limits;
        let (mut blocked, mut stall) = (Blocked::default(), StallTimer::default());
        loop {
            if let Some(result) = flow.ended() {
                return result;
            }
            if let Some(mut apart) = flow.part_for_stages(usize::MAX) {
                if let Apart::Stages(part) = &mut apart {
                    run_together(&mut [part]);
                }
                flow.join(apart, &mut self.buffers);
                continue;
            }
            let now_ns = began.elapsed().as_nanos() as u64;
            if let Some(end) = flow.next(blocked) {
                let step = flow.step(end, &mut self.buffers);
                if let Some(result) = step.ended {
                    return result;
                }
                stall.moved(step.moved, now_ns, time_limits.stall_ns);
                *blocked.of(end) |= step.blocked;
                continue;
            }
            let left = stall.left(now_ns, 0, time_limits)?.min(LOOK);
            let waited = wait_for_room(flow.devices().socket, left);
            waited.map_err(|error| TransferError::of_host("waiting for the socket", &error))?;
            if (piece.interrupted)() {
                return Err(TransferError::Cancelled);
            }
            blocked = Blocked::default();
        }
    }
}

/// Waits at most this long until the socket takes something.
fn wait_for_room(socket: BorrowedFd<'_>, left: Duration) -> io::Result<()> {
    let readiness = Readiness::new()?;
    readiness.arm(socket, 0, Interest::Send)?;
    readiness.wait(&mut Vec::new(), Some(left));
    Ok(())
}

/// The devices.
struct Ends<'e> {
    file: BorrowedFd<'e>,
    socket: BorrowedFd<'e>,
}

impl Devices for Ends<'_> {
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        descriptors::read_at(self.file, parts, offset)
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send_now(self.socket, bytes)
    }

    fn write_at(&mut self, _: &[u8], _: u64) -> io::Result<usize> {
        unreachable!("the sink is a socket")
    }

    fn sync(&mut self) -> io::Result<()> {
        unreachable!("the sink is a socket")
    }

    fn receive(&mut self, _: &mut [u8]) -> io::Result<usize> {
        unreachable!("the source is a file")
    }
}
