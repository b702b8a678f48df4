//! The work of an entry of the scoreboard, and what its end needs.

use std::sync::{Arc, Mutex};

use super::handle::Status;
use crate::command::device::{Blocked, Device, End};
use crate::command::error::TransferError;
use crate::command::report::Done;
use crate::engine::memory::Reserved;
use crate::engine::scoreboard::{Share, Work};
use crate::run::apart::Apart;
use crate::run::descriptors::{Descriptors, Socket, SocketUse};
use crate::run::flow::Flow;
use crate::run::progress::Progress;
use crate::stages::buffer::Buffers;

/// The work of an entry.
pub(super) struct Job {
    pub(super) flow: Flow<Descriptors>,
    pub(super) ending: Arc<Ending>,
    pub(super) reserved: Arc<[Reserved]>,
    pub(super) share: Share,
    /// As of [`super::Caller::number`].
    pub(super) caller: u64,
}

/// What the end of a transfer needs, also while a thread has its job.
pub(super) struct Ending {
    /// The sockets, with the direction in which they are used.
    pub(super) sockets: Vec<(SocketUse, Arc<Socket>)>,
    pub(super) progress: Arc<Progress>,
    /// That of the transfer of which this may be a part.
    pub(super) status: Arc<Status>,
    /// Taken by the thread that answers the caller.
    pub(super) done: Mutex<Option<Done>>,
}

impl Job {
    pub(super) fn uses(&self) -> impl Iterator<Item = SocketUse> {
        self.ending.sockets.iter().map(|(used, _)| *used)
    }
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

    fn blocks(&self) -> [Option<u64>; 2] {
        self.flow.devices().blocks()
    }

    fn batches(&self) -> bool {
        self.flow.batches()
    }

    fn share(&self) -> Share {
        self.share
    }

    fn caller(&self) -> u64 {
        self.caller
    }

    fn may_hang(&self, end: End) -> bool {
        self.device(end).has_positions() || self.flow.devices().are_remote()
    }

    fn chunk_bytes(&self) -> usize {
        self.flow.chunk_bytes()
    }

    fn has_fresh(&self) -> bool {
        self.flow.has_fresh()
    }

    fn part_for_stages(&mut self, most: usize) -> Option<Apart> {
        self.flow.part_for_stages(most)
    }

    fn join(&mut self, apart: Apart, buffers: &mut Buffers) -> u64 {
        self.flow.join(apart, buffers)
    }

    fn ended(&self) -> Option<Result<(), TransferError>> {
        self.flow.ended()
    }
}
