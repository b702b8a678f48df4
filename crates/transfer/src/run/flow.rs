//! The steps of one transfer. A step reads or receives a chunk at the source, or writes or sends one at the sink. Stages run in
//! the step that has the chunk in its core's cache: after a file was read, or before a received chunk goes on.
//!
//! A transfer holds at most [`CHUNKS_MAX`] chunks, or [`SMALL_CHUNKS_MAX`] small ones, and one for each stage that transforms: while the sink takes nothing, the next
//! chunk is prepared. All I/O goes through [`Devices`], so tests run transfers on devices that fail in every way.

use std::collections::VecDeque;
use std::io::{self};
use std::sync::Arc;

use crate::command::device::{Blocked, Device, Devices, End, SocketSender};
use crate::command::error::TransferError;
use crate::command::limits::{
    CHUNK_BYTES, CHUNKS_MAX, HEADER_BYTES, MOVED_MAX, PAYLOAD_BYTES, RECORD_BYTES,
    SENT_CHUNK_BYTES, SMALL_CHUNK_BYTES, SMALL_CHUNKS_MAX,
};
use crate::command::pipeline::WhenBlocked;
use crate::command::report::{Report, StageReport};
use crate::command::stage::{Cipher, StageKind, StageSpec};
use crate::run::apart::{Apart, Fresh, SendApart, StagesApart, seal_in_place};
use crate::run::plan::{Cut, Plan};
use crate::run::progress::Progress;
use crate::stages::Stage;
use crate::stages::buffer::{Buffers, Layout};
use crate::stages::chain::{Chain, Chunk};
use crate::stages::seal::Sealer;
use crate::stages::search::Searcher;

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes read from the source and written to the sink.
    pub moved: u64,
    /// The socket of this end takes or has nothing: no step there until it is ready.
    pub blocked: bool,
    /// The transfer has ended.
    pub ended: Option<Result<(), TransferError>>,
}

/// One transfer.
pub struct Flow<D> {
    devices: D,
    source: Device,
    sink: Device,
    when_blocked: WhenBlocked,
    from: u64,
    to: u64,
    /// Bytes of the range.
    range: Option<u64>,
    read: u64,
    written: u64,
    /// Observers that see chunks apart from the transfer, before the chain. Empty while they are away, and if there are none.
    observers: Vec<Stage>,
    /// Whether chunks go to them.
    batches: bool,
    /// Whether chunks are sealed in the buffer that they were read to.
    seals: bool,
    /// Whether the last of them has the last record of the stream.
    ends_stream: bool,
    /// Chunks for them.
    fresh: VecDeque<Fresh>,
    /// Chunks that are away: in stages, and in the socket of the sink.
    in_stages: usize,
    in_socket: bool,
    sender: Option<Arc<SocketSender>>,
    /// Why it ends when nothing is away.
    failed: Option<TransferError>,
    chain: Chain,
    /// The seal of what a file has, in the buffer that the file was read to; with the bytes that went in and came out. Before it,
    /// the chain has only stages that observe.
    direct: Option<(Sealer, u64, u64)>,
    /// Chunks for the sink.
    ready: VecDeque<Chunk>,
    /// Without stages, between devices with positions, and of known length.
    is_plain: bool,
    /// The sink is still to be synced.
    sync: bool,
    /// Nothing more comes from the source, and with what result.
    source_end: Option<Result<(), TransferError>>,
    progress: Arc<Progress>,
}

impl<D: Devices> Flow<D> {
    /// A transfer that has moved nothing.
    pub fn new(plan: &Plan, devices: D) -> Result<Self, TransferError> {
        Self::for_part(plan, devices, None)
    }

    /// One part of a transfer. `first`: its first part, whose compiled expressions the others use.
    pub(crate) fn for_part(
        plan: &Plan,
        devices: D,
        first: Option<&Self>,
    ) -> Result<Self, TransferError> {
        let first = first.map(|flow| &flow.chain);
        let observes =
            |stage: &StageSpec| matches!(stage, StageSpec::Digest(_) | StageSpec::Search(_));
        let (mut chain, direct) = match plan.stages.split_last() {
            Some((StageSpec::Seal(Cipher::Aes256Gcm, key), before))
                if plan.source.has_positions() && before.iter().all(observes) =>
            {
                let sealer = match &plan.part {
                    Some(part) => Sealer::at(key, part.header, part.record),
                    None => Sealer::new(key)?,
                };
                (Chain::new(before, first)?, Some((sealer, 0, 0)))
            }
            _ => (Chain::new(&plan.stages, first)?, None),
        };
        if let Cut::Range { start, is_last } = plan.cut {
            chain.begin_range(start, is_last);
        }
        let (observers, chain) = match chain.batches() {
            true => chain.split_observers(),
            false => (Vec::new(), chain),
        };
        // A transfer that reports what it did when a socket is full has nothing away then.
        let sender = (plan.when_blocked == WhenBlocked::Wait).then(|| devices.sender()).flatten();
        let is_empty = plan.bytes == Some(0) && direct.is_none();
        let mut flow = Self {
            devices,
            source: plan.source,
            sink: plan.sink,
            when_blocked: plan.when_blocked,
            from: plan.from,
            to: plan.to,
            range: plan.bytes,
            read: 0,
            written: 0,
            batches: !observers.is_empty(),
            seals: direct.is_some(),
            ends_stream: plan.part.as_ref().is_none_or(|part| part.ends),
            observers,
            fresh: VecDeque::new(),
            in_stages: 0,
            in_socket: false,
            sender,
            failed: None,
            chain,
            direct,
            ready: VecDeque::with_capacity(CHUNKS_MAX),
            is_plain: plan.is_plain(),
            sync: plan.sync,
            source_end: None,
            progress: Arc::default(),
        };
        if !plan.head.is_empty() {
            flow.begin_with(&plan.head);
        }
        if is_empty {
            flow.end_source(Ok(()));
        }
        Ok(flow)
    }

    /// A chunk of what was received from the source, a socket, before.
    fn begin_with(&mut self, head: &[u8]) {
        let mut buffer = self.take_buffer(&mut Buffers::default());
        buffer[..head.len()].copy_from_slice(head);
        self.take_received(buffer, head.len());
    }

    /// Of each stage before a seal, if it searches, another search for the same.
    pub(crate) fn searchers(&self) -> Vec<Option<Searcher>> {
        self.chain.searchers()
    }

    /// Its devices.
    pub fn devices(&self) -> &D {
        &self.devices
    }

    /// The kind of the device at an end.
    pub fn device(&self, end: End) -> Device {
        match end {
            End::Source => self.source,
            End::Sink => self.sink,
        }
    }

    /// Its bytes count there as they move.
    pub(crate) fn set_progress(&mut self, progress: Progress) {
        self.progress = Arc::new(progress);
    }

    /// How far it is.
    pub fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    /// How it ended, if everything has been done.
    pub fn ended(&self) -> Option<Result<(), TransferError>> {
        if self.in_stages > 0 || self.in_socket {
            return None;
        }
        if let Some(error) = &self.failed {
            return Some(Err(error.clone()));
        }
        let is_done = !self.has_output() && self.fresh.is_empty();
        self.source_end.clone().filter(|_| is_done)
    }

    /// Ends it when nothing is away, so that its counts are the last ones.
    pub fn fail(&mut self, error: TransferError) {
        self.failed = self.failed.take().or(Some(error));
    }

    /// Whether its chunks go through stages apart.
    pub fn batches(&self) -> bool {
        self.batches
    }

    /// Whether a chunk waits for them.
    pub fn has_fresh(&self) -> bool {
        !self.fresh.is_empty() && self.in_stages == 0 && self.failed.is_none()
    }

    /// Up to `most` chunks for stages apart from the transfer; [`Self::join`] takes them back.
    pub fn part_for_stages(&mut self, most: usize) -> Option<Apart> {
        if !self.has_fresh() {
            return None;
        }
        let fresh: Vec<Fresh> = self.fresh.drain(..most.min(self.fresh.len())).collect();
        self.in_stages = fresh.len();
        let (observers, direct) = (std::mem::take(&mut self.observers), self.direct.take());
        let made = Vec::with_capacity(fresh.len());
        Some(Apart::Stages(StagesApart { fresh, observers, direct, made, error: None }))
    }

    /// A chunk to be sent apart from the transfer, if the source can be read meanwhile.
    pub fn part_for_socket(&mut self) -> Option<Apart> {
        let send = self.sender.clone()?;
        if self.in_socket || self.source_end.is_some() || self.ready.is_empty() {
            return None;
        }
        let chunk = self.ready.pop_front()?;
        self.in_socket = true;
        let (progress, before) = (self.progress.clone(), self.written);
        let (sent, error) = (0, None);
        Some(Apart::Send(SendApart { chunk, send, progress, before, sent, error }))
    }

    /// Takes back what was away. Returns the bytes that moved.
    pub fn join(&mut self, apart: Apart, buffers: &mut Buffers) -> u64 {
        match apart {
            Apart::Stages(StagesApart { fresh, observers, direct, made, error }) => {
                self.in_stages = 0;
                self.observers = observers;
                self.direct = direct;
                let mut made = made.into_iter();
                for Fresh { buffer, .. } in fresh {
                    match made.next() {
                        Some(len @ 1..) => self.push(Chunk { buffer, len, done: 0 }),
                        _ => buffers.put(buffer),
                    }
                }
                if let Some(error) = error {
                    self.fresh.drain(..).for_each(|fresh| buffers.put(fresh.buffer));
                    self.chain.clear(buffers);
                    self.source_end = Some(Err(error));
                }
                self.settle_source();
                0
            }
            Apart::Send(part) => {
                self.in_socket = false;
                self.written += part.sent;
                if part.chunk.done < part.chunk.len && !mutants::on("lose_rest_of_chunk") {
                    self.ready.push_front(part.chunk);
                } else {
                    buffers.put(part.chunk.buffer);
                }
                self.failed = self.failed.take().or(part.error);
                part.sent
            }
        }
    }

    /// A chunk that the observers have seen: for the sink if it is sealed, else for the chain.
    fn push(&mut self, chunk: Chunk) {
        match self.seals {
            true => self.ready.push_back(chunk),
            false => self.chain.push(chunk),
        }
    }

    /// Whether the source has ended well, and the chain has got all of it.
    fn is_all_made(&self) -> bool {
        self.source_end == Some(Ok(())) && self.in_stages == 0 && self.fresh.is_empty()
    }

    /// Whether there is something for the sink, or for the stages.
    fn has_output(&self) -> bool {
        !self.ready.is_empty() || self.chain.has_work() || (self.sync && self.is_all_made())
    }

    /// The end of the step that comes next: the sink first, and the source while the sink waits and there is room.
    /// `None`: nothing can be done until a socket is ready.
    pub fn next(&self, blocked: Blocked) -> Option<End> {
        if self.failed.is_some() {
            return None;
        }
        let away = self.in_stages + usize::from(self.in_socket);
        let held = self.fresh.len() + self.ready.len() + self.chain.held() + away;
        let most = if self.batches { SMALL_CHUNKS_MAX } else { CHUNKS_MAX };
        let has_room = self.source_end.is_none() && held < most;
        // While a kernel works, there is time for the source.
        let waits = self.ready.is_empty() && self.chain.waits() && has_room && !blocked.source;
        if self.has_output() && !blocked.sink && !self.in_socket && !waits {
            return Some(End::Sink);
        }
        (has_room && !blocked.source).then_some(End::Source)
    }

    /// Does one step.
    pub fn step(&mut self, end: End, buffers: &mut Buffers) -> Step {
        if end == End::Source && (self.source_end.is_some() || self.failed.is_some()) {
            // It has ended since the step was queued.
            return Step { moved: 0, blocked: false, ended: self.ended() };
        }
        let before = self.read + self.written;
        let result = match (end, self.device(end)) {
            (End::Source, Device::Socket) => Ok(self.receive_chunk(buffers)),
            (End::Source, Device::File | Device::Accelerator) => {
                self.read_chunk(buffers).map(|()| false)
            }
            (End::Sink, device) => self.put_chunk(device, buffers),
        };
        self.progress.set_read(self.read);
        if !self.in_socket {
            self.progress.set_written(self.written);
        }
        let (blocked, ended) = match result {
            Err(error) => {
                self.fail(error);
                (false, self.ended())
            }
            Ok(true) if self.when_blocked == WhenBlocked::Return && self.waits_for(end) => {
                (false, Some(Ok(())))
            }
            Ok(blocked) => (blocked, self.ended()),
        };
        Step { moved: self.read + self.written - before, blocked, ended }
    }

    /// Whether the socket of this end is what the transfer waits for: a chunk to send, or one to receive.
    fn waits_for(&self, end: End) -> bool {
        end == End::Sink || !self.has_output()
    }

    /// What it did. `ended` is its result.
    pub fn report(mut self, ended: &Result<(), TransferError>, buffers: &mut Buffers) -> Report {
        self.chain.clear(buffers);
        self.ready.drain(..).for_each(|chunk| buffers.put(chunk.buffer));
        self.fresh.drain(..).for_each(|fresh| buffers.put(fresh.buffer));
        let observed = self.observers.into_iter().map(|stage| stage.report(ended.is_ok()));
        let mut stages: Vec<StageReport> = observed.collect();
        stages.extend(self.chain.reports(ended.is_ok()));
        if let Some((_, bytes, made)) = self.direct {
            let kind = StageKind::Seal(Cipher::Aes256Gcm);
            let finished = ended.is_ok();
            stages.push(StageReport { kind, bytes, made, finished, digest: None, found: None });
        }
        Report { read: self.read, written: self.written, stages }
    }

    fn end_source(&mut self, result: Result<(), TransferError>) {
        self.source_end = Some(result);
        self.settle_source();
    }

    /// The chain ends when it has got the last chunk.
    fn settle_source(&mut self) {
        if self.is_all_made() {
            self.chain.end_source();
        }
    }

    /// Reads the next chunk of the file and runs the stages on it. A file that is too short or cannot be read ends the source: what
    /// was read goes on first.
    fn read_chunk(&mut self, buffers: &mut Buffers) -> Result<(), TransferError> {
        if self.is_plain && self.move_chunk()? {
            return Ok(());
        }
        let mut buffer = self.take_buffer(buffers);
        let room = self.chunk_bytes();
        let layout = match &self.direct {
            Some((sealer, ..)) if self.read == 0 && sealer.begins() => {
                buffer[..HEADER_BYTES].copy_from_slice(sealer.header());
                Layout { start: HEADER_BYTES, payload: PAYLOAD_BYTES, record: RECORD_BYTES }
            }
            _ if self.seals => Layout { start: 0, payload: PAYLOAD_BYTES, record: RECORD_BYTES },
            _ => Layout { start: 0, payload: room, record: room },
        };
        let left = self.range.map_or(u64::MAX, |range| range - self.read);
        let want = left.min((room / layout.record * layout.payload) as u64) as usize;
        let (got, mut ended) = self.fill(&mut buffer, &layout, want);
        // Where a file of unknown length ends, it ends well.
        let any_length = self.range.is_none() || mutants::on("believe_short_file");
        let at_end = any_length && matches!(ended, Some(TransferError::FileEnded { .. }));
        if at_end {
            ended = None;
        }
        // A record that is not the last one is always full.
        let kept = if ended.is_some() && self.seals { got - got % PAYLOAD_BYTES } else { got };
        self.read += kept as u64;
        let last = ended.is_none() && (at_end || self.range == Some(self.read));
        if self.batches {
            if kept > 0 || last {
                self.fresh.push_back(Fresh { buffer, layout, plain: kept, last });
            } else {
                buffers.put(buffer);
            }
        } else {
            let chain = &mut self.chain;
            let ends = last && self.ends_stream;
            let len = match &mut self.direct {
                Some(direct) => seal_in_place(direct, &mut buffer, &layout, kept, ends, |plain| {
                    chain.observe(plain)
                })?,
                None => kept,
            };
            if len == 0 {
                buffers.put(buffer);
            } else {
                self.push(Chunk { buffer, len, done: 0 });
            }
        }
        if let Some(error) = ended {
            self.end_source(Err(error));
        } else if last {
            self.end_source(Ok(()));
        }
        self.run_stages(CHUNKS_MAX, buffers);
        Ok(())
    }

    /// Moves a chunk without a buffer. Returns whether the devices can do that.
    fn move_chunk(&mut self) -> Result<bool, TransferError> {
        let left = self.range.map_or(u64::MAX, |range| range - self.read);
        let most = left.min(MOVED_MAX as u64) as usize;
        let (from, to) = (self.from + self.read, self.to + self.written);
        let Some(moved) = self.devices.move_at(from, to, most) else { return Ok(false) };
        let moved = moved? as u64;
        (self.read, self.written) = (self.read + moved, self.written + moved);
        if moved == 0 {
            let end = self.from + self.range.unwrap_or(0);
            self.end_source(Err(TransferError::FileEnded { at: from, end }));
        } else if self.range == Some(self.read) {
            self.end_source(Ok(()));
        }
        Ok(true)
    }

    /// Reads `want` bytes to their places; returns how many there were, and why not all.
    fn fill(
        &mut self,
        buffer: &mut [u8],
        layout: &Layout,
        want: usize,
    ) -> (usize, Option<TransferError>) {
        let mut got = 0;
        while got < want {
            let mut parts = layout.parts(buffer, got, want);
            match self.devices.read_at(&mut parts, self.from + self.read + got as u64) {
                Ok(0) => {
                    let at = self.from + self.read + got as u64;
                    let end = self.from + self.range.unwrap_or(0);
                    return (got, Some(TransferError::FileEnded { at, end }));
                }
                Ok(read) => got += read.min(want - got),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return (got, Some(self.source.error("reading the file", &error)));
                }
            }
        }
        (got, None)
    }

    /// Makes chunks for the sink until there are `count`, or none can be made. A stage that fails ends the source: what came out
    /// before goes on first.
    fn run_stages(&mut self, count: usize, buffers: &mut Buffers) {
        while self.ready.len() < count && self.chain.has_work() {
            match self.chain.pull(buffers) {
                Ok(Some(chunk)) => self.ready.push_back(chunk),
                Ok(None) => return,
                Err(error) => {
                    self.chain.clear(buffers);
                    self.source_end = Some(Err(error));
                    return;
                }
            }
        }
    }

    /// Bytes of a chunk of the source.
    pub(crate) fn chunk_bytes(&self) -> usize {
        match (self.source, self.sink) {
            _ if self.batches => SMALL_CHUNK_BYTES,
            (Device::File, Device::Socket) => SENT_CHUNK_BYTES,
            _ => CHUNK_BYTES,
        }
    }

    fn take_buffer(&self, buffers: &mut Buffers) -> Vec<u8> {
        if self.batches { buffers.take_small() } else { buffers.take() }
    }

    /// Returns whether nothing more has arrived. An error ends the source: what was received goes on first.
    fn receive_chunk(&mut self, buffers: &mut Buffers) -> bool {
        let left = self.range.map_or(u64::MAX, |range| range - self.read);
        // What waits for stages has room for more.
        let begun = self.fresh.pop_back_if(|fresh| fresh.plain < SMALL_CHUNK_BYTES / 2);
        let (mut buffer, start) = begun
            .map_or_else(|| (self.take_buffer(buffers), 0), |fresh| (fresh.buffer, fresh.plain));
        let room = start + left.min((self.chunk_bytes() - start) as u64) as usize;
        let (mut len, mut blocked, mut ended) = (start, false, None);
        while len < room && ended.is_none() && !blocked {
            match self.devices.receive(&mut buffer[len..room]) {
                Ok(0) if self.range.is_none() || mutants::on("believe_short_stream") => {
                    ended = Some(Ok(()));
                }
                Ok(0) => ended = Some(Err(TransferError::Closed)),
                Ok(received) => len += received.min(room - len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => blocked = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => ended = Some(Err(TransferError::of_host("receiving", &error))),
            }
        }
        self.read += (len - start) as u64;
        if len == 0 {
            buffers.put(buffer);
        } else {
            self.take_received(buffer, len);
        }
        let returns = blocked && self.when_blocked == WhenBlocked::Return && len > 0;
        if self.range == Some(self.read) || returns {
            ended = Some(Ok(()));
        }
        if let Some(result) = ended {
            self.end_source(result);
        }
        blocked
    }

    /// A chunk of a socket is for the stages.
    fn take_received(&mut self, buffer: Vec<u8>, len: usize) {
        if self.batches {
            let chunk = self.chunk_bytes();
            let layout = Layout { start: 0, payload: chunk, record: chunk };
            self.fresh.push_back(Fresh { buffer, layout, plain: len, last: false });
        } else {
            self.chain.push(Chunk { buffer, len, done: 0 });
        }
    }

    /// Gives a chunk to the sink. Returns whether the socket is full.
    fn put_chunk(&mut self, device: Device, buffers: &mut Buffers) -> Result<bool, TransferError> {
        if self.ready.is_empty() {
            self.run_stages(1, buffers);
        }
        let Some(chunk) = self.ready.front_mut() else {
            if self.sync && self.is_all_made() && !self.chain.has_work() {
                let synced = self.devices.sync();
                synced.map_err(|error| device.error("syncing the file", &error))?;
                self.sync = false;
            }
            return Ok(false);
        };
        while chunk.done < chunk.len {
            // Without MSG_MORE: chunks are long, and a receiver that waits for the end of each costs a wake-up more (measured: 1.6 times the CPU time on one machine).
            let (what, result) = match device {
                Device::Socket => ("sending", self.devices.send(chunk.rest())),
                Device::File | Device::Accelerator => {
                    let written = if mutants::on("write_from_begin") { 0 } else { self.written };
                    let at = self.to + written;
                    ("writing the file", self.devices.write_at(chunk.rest(), at))
                }
            };
            match result {
                // ENOSPC: a file system that writes nothing and says nothing has no room.
                Ok(0) if device == Device::File => return Err(TransferError::DiskFull),
                Ok(put) => {
                    let put = put.min(chunk.len - chunk.done);
                    chunk.done += put;
                    self.written += put as u64;
                    // The next write may not return.
                    self.progress.set_written(self.written);
                }
                Err(error)
                    if device == Device::Socket && error.kind() == io::ErrorKind::WouldBlock =>
                {
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if device == Device::Accelerator
                        && error.kind() == io::ErrorKind::StorageFull =>
                {
                    return Err(TransferError::OutsideMemory(self.to + self.written));
                }
                Err(error) => return Err(device.error(what, &error)),
            }
        }
        if let Some(chunk) = self.ready.pop_front() {
            buffers.put(chunk.buffer);
        }
        Ok(false)
    }
}
