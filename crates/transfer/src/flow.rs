//! The steps of one transfer. There are two kinds: a *file step* reads or writes a chunk of the file, a *socket step* sends or
//! receives one. Stages run in the file step, while the chunk is in the core's cache.
//!
//! A transfer holds at most [`CHUNKS_MAX`] chunks: while the socket takes nothing, the next chunk is prepared. All I/O
//! goes through [`Devices`], so tests run transfers on devices that fail in every way.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::TransferError;
use crate::pipeline::{Command, Direction, WhenBlocked};
use crate::seal::{HEADER_BYTES, PAYLOAD_BYTES, RECORD_BYTES, Sealer, TAG_BYTES};
use crate::stage::{DigestKind, DigestValue, Digester, Key};

/// Bytes of a chunk on the wire, but for the header of a sealed stream. 512 KiB stay in a core's second-level cache
/// between the stages, and amortise two system calls and the choice of the next step.
pub const CHUNK_BYTES: usize = 512 << 10;
/// Chunks of a transfer at a time.
pub const CHUNKS_MAX: usize = 2;
/// Bytes of a buffer.
const BUFFER_BYTES: usize = CHUNK_BYTES + HEADER_BYTES;
/// Free buffers that are kept.
const SPARE_BUFFERS: usize = 8;

/// The file and the socket of a transfer. No call waits for the socket: it fails with `WouldBlock` instead.
pub trait Devices {
    /// Reads from the file at `offset` into the parts, one after the other; 0 is the end of the file.
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize>;
    /// Writes to the file at `offset`.
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Sends what the socket takes now.
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Receives what has arrived; 0 is the end of the stream.
    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize>;
}

/// Which device a step uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The file.
    File,
    /// The socket.
    Socket,
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes read from the source and written to the sink.
    pub moved: u64,
    /// The socket takes or has nothing: no socket step until it is ready.
    pub blocked: bool,
    /// The transfer has ended.
    pub ended: Option<Result<(), TransferError>>,
}

/// Buffers that are reused.
#[derive(Default)]
pub struct Buffers {
    spare: Vec<Vec<u8>>,
}

impl Buffers {
    fn take(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| vec![0; BUFFER_BYTES])
    }

    fn put(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }
}

/// What one stage of a transfer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageReport {
    /// `md5`, `sha256`, `crc32c` or `aes-256-gcm`.
    pub name: &'static str,
    /// Plain bytes that went through it.
    pub bytes: u64,
}

/// What a transfer did until its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes taken from the source.
    pub read: u64,
    /// Bytes that the sink has: those that the socket accepted (of a sealed stream with header and tags), or that were written to
    /// the file. Exact, also after an error.
    pub written: u64,
    /// The digest, if one was asked for and the transfer succeeded.
    pub digest: Option<DigestValue>,
    /// The stages in their order.
    pub stages: Vec<StageReport>,
}

/// How far a transfer is; other threads read it.
#[derive(Debug, Default)]
pub struct Progress {
    read: AtomicU64,
    written: AtomicU64,
}

impl Progress {
    /// Bytes taken from the source so far.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that the sink has so far.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

/// A part of the stream in memory.
struct Chunk {
    buffer: Vec<u8>,
    len: usize,
    /// Bytes of it that the sink has.
    done: usize,
}

/// The part of a [`Command`] that says what to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where the bytes go.
    pub direction: Direction,
    /// The first byte of the range in the file.
    pub offset: u64,
    /// Length of the range. `None`: all that the socket receives, or to the end of a file whose length is not known.
    pub bytes: Option<u64>,
    /// The digest.
    pub digest: Option<DigestKind>,
    /// The key of the seal.
    pub seal: Option<Key>,
    /// Whether it waits for the socket.
    pub when_blocked: WhenBlocked,
}

impl Plan {
    /// Of a command, whose length has been made definite.
    pub(crate) fn of(command: &Command, bytes: Option<u64>) -> Self {
        Self {
            direction: command.direction,
            offset: command.offset,
            bytes,
            digest: command.digest,
            seal: command.seal.clone(),
            when_blocked: command.when_blocked,
        }
    }
}

/// One transfer.
pub struct Flow<D> {
    devices: D,
    direction: Direction,
    when_blocked: WhenBlocked,
    offset: u64,
    /// Bytes of the range.
    range: Option<u64>,
    read: u64,
    written: u64,
    digest: Option<(Digester, u64)>,
    sealer: Option<(Sealer, u64)>,
    chunks: VecDeque<Chunk>,
    /// Nothing more comes from the source, and with what result.
    source_end: Option<Result<(), TransferError>>,
    progress: Arc<Progress>,
}

impl<D: Devices> Flow<D> {
    /// A transfer that has moved nothing.
    pub fn new(plan: &Plan, devices: D) -> Result<Self, TransferError> {
        let seal = plan.seal.as_ref().map(Sealer::new).transpose()?;
        let is_empty = plan.bytes == Some(0) && seal.is_none();
        Ok(Self {
            devices,
            direction: plan.direction,
            when_blocked: plan.when_blocked,
            offset: plan.offset,
            range: plan.bytes,
            read: 0,
            written: 0,
            digest: plan.digest.map(|kind| (Digester::new(kind), 0)),
            sealer: seal.map(|sealer| (sealer, 0)),
            chunks: VecDeque::with_capacity(CHUNKS_MAX),
            source_end: is_empty.then_some(Ok(())),
            progress: Arc::default(),
        })
    }

    /// Its devices.
    pub fn devices(&self) -> &D {
        &self.devices
    }

    /// Where the bytes go.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// How far it is.
    pub fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    /// How it ended, if everything has been done.
    pub fn ended(&self) -> Option<Result<(), TransferError>> {
        self.source_end.clone().filter(|_| self.chunks.is_empty())
    }

    /// The device of the step that comes next: the sink first, and the source while the sink waits and there is room.
    /// `None`: nothing can be done until the socket is ready.
    pub fn next(&self, socket_blocked: bool) -> Option<Device> {
        let (sink, source) = match self.direction {
            Direction::Send => (Device::Socket, Device::File),
            Direction::Receive => (Device::File, Device::Socket),
        };
        let is_free = |device| device == Device::File || !socket_blocked;
        if !self.chunks.is_empty() && is_free(sink) {
            return Some(sink);
        }
        let has_room = self.source_end.is_none() && self.chunks.len() < CHUNKS_MAX;
        (has_room && is_free(source)).then_some(source)
    }

    /// Does one step.
    pub fn step(&mut self, device: Device, buffers: &mut Buffers) -> Step {
        let before = self.read + self.written;
        let result = match (self.direction, device) {
            (Direction::Send, Device::File) => self.read_chunk(buffers).map(|()| false),
            (Direction::Send, Device::Socket) => self.send_chunk(buffers),
            (Direction::Receive, Device::Socket) => Ok(self.receive_chunk(buffers)),
            (Direction::Receive, Device::File) => self.write_chunk(buffers).map(|()| false),
        };
        self.progress.read.store(self.read, Ordering::Relaxed);
        self.progress.written.store(self.written, Ordering::Relaxed);
        let (blocked, ended) = match result {
            Err(error) => (false, Some(Err(error))),
            Ok(true) if self.when_blocked == WhenBlocked::Return && self.chunks_wait() => {
                (false, Some(Ok(())))
            }
            Ok(blocked) => (blocked, self.ended()),
        };
        Step { moved: self.read + self.written - before, blocked, ended }
    }

    /// Whether the socket is what the transfer waits for: a chunk to send, or one to receive.
    fn chunks_wait(&self) -> bool {
        self.direction == Direction::Send || self.chunks.is_empty()
    }

    /// What it did. `ended` is its result.
    pub fn report(self, ended: &Result<(), TransferError>, buffers: &mut Buffers) -> Report {
        let mut report = Report { read: self.read, written: self.written, ..Report::default() };
        if let Some((digester, bytes)) = self.digest {
            report.stages.push(StageReport { name: digester.kind().name(), bytes });
            report.digest = ended.is_ok().then(|| digester.finish());
        }
        if let Some((_, bytes)) = self.sealer {
            report.stages.push(StageReport { name: "aes-256-gcm", bytes });
        }
        self.chunks.into_iter().for_each(|chunk| buffers.put(chunk.buffer));
        report
    }

    /// Reads the next chunk of the file and runs the stages on it. A file that is too short or cannot be read ends the source: what
    /// was read is sent first.
    fn read_chunk(&mut self, buffers: &mut Buffers) -> Result<(), TransferError> {
        let mut buffer = buffers.take();
        let layout = match &self.sealer {
            Some((sealer, _)) if self.read == 0 => {
                buffer[..HEADER_BYTES].copy_from_slice(sealer.header());
                Layout { start: HEADER_BYTES, payload: PAYLOAD_BYTES, record: RECORD_BYTES }
            }
            Some(_) => Layout { start: 0, payload: PAYLOAD_BYTES, record: RECORD_BYTES },
            None => Layout { start: 0, payload: CHUNK_BYTES, record: CHUNK_BYTES },
        };
        let left = self.range.map_or(u64::MAX, |range| range - self.read);
        let want = left.min(layout.capacity() as u64) as usize;
        let (got, mut ended) = self.fill(&mut buffer, &layout, want);
        // Where a file of unknown length ends, it ends well.
        let at_end = self.range.is_none() && matches!(ended, Some(TransferError::FileEnded { .. }));
        if at_end {
            ended = None;
        }
        // A record that is not the last one is always full.
        let kept =
            if ended.is_some() && self.sealer.is_some() { got - got % PAYLOAD_BYTES } else { got };
        self.read += kept as u64;
        let last = ended.is_none() && (at_end || self.range == Some(self.read));
        if let Some(error) = ended {
            self.source_end = Some(Err(error));
        } else if last {
            self.source_end = Some(Ok(()));
        }
        let len = self.run_stages(&mut buffer, &layout, kept, last)?;
        if len == 0 {
            buffers.put(buffer);
        } else {
            self.chunks.push_back(Chunk { buffer, len, done: 0 });
        }
        Ok(())
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
            match self.devices.read_at(&mut parts, self.offset + self.read + got as u64) {
                Ok(0) => {
                    let at = self.offset + self.read + got as u64;
                    let end = self.offset + self.range.unwrap_or(0);
                    return (got, Some(TransferError::FileEnded { at, end }));
                }
                Ok(read) => got += read.min(want - got),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return (got, Some(TransferError::of_host("reading the file", &error)));
                }
            }
        }
        (got, None)
    }

    /// Returns the bytes of the chunk on the wire.
    fn run_stages(
        &mut self,
        buffer: &mut [u8],
        layout: &Layout,
        plain: usize,
        last: bool,
    ) -> Result<usize, TransferError> {
        let Some((sealer, sealed)) = &mut self.sealer else {
            if let Some((digester, bytes)) = &mut self.digest {
                digester.update(&buffer[..plain]);
                *bytes += plain as u64;
            }
            return Ok(plain);
        };
        let mut at = layout.start;
        let mut left = plain;
        // An empty stream has one record, and so has one whose last chunk is empty.
        while left > 0 || (last && at == layout.start) {
            let payload = left.min(layout.payload);
            left -= payload;
            if let Some((digester, bytes)) = &mut self.digest {
                digester.update(&buffer[at..at + payload]);
                *bytes += payload as u64;
            }
            let end = at + payload + TAG_BYTES;
            sealer.seal(&mut buffer[at..end], last && left == 0)?;
            *sealed += payload as u64;
            at = end;
        }
        Ok(if at == layout.start { 0 } else { at })
    }

    /// Returns whether the socket is full.
    fn send_chunk(&mut self, buffers: &mut Buffers) -> Result<bool, TransferError> {
        // Without MSG_MORE: chunks are long, and a receiver that waits for the end of each costs a wake-up more (measured: 1.6 times the CPU time on one machine).
        let Some(chunk) = self.chunks.front_mut() else { return Ok(false) };
        while chunk.done < chunk.len {
            match self.devices.send(&chunk.buffer[chunk.done..chunk.len]) {
                Ok(sent) => {
                    let sent = sent.min(chunk.len - chunk.done);
                    chunk.done += sent;
                    self.written += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(TransferError::of_host("sending", &error)),
            }
        }
        self.drop_chunk(buffers);
        Ok(false)
    }

    /// Returns whether nothing more has arrived. An error ends the source: what was received is written first.
    fn receive_chunk(&mut self, buffers: &mut Buffers) -> bool {
        let left = self.range.map_or(u64::MAX, |range| range - self.read);
        let room = left.min(CHUNK_BYTES as u64) as usize;
        let mut buffer = buffers.take();
        let (mut len, mut blocked) = (0, false);
        while len < room && self.source_end.is_none() && !blocked {
            match self.devices.receive(&mut buffer[len..room]) {
                Ok(0) if self.range.is_none() => self.source_end = Some(Ok(())),
                Ok(0) => self.source_end = Some(Err(TransferError::Closed)),
                Ok(received) => len += received.min(room - len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => blocked = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.source_end = Some(Err(TransferError::of_host("receiving", &error)));
                }
            }
        }
        self.read += len as u64;
        let returns = blocked && self.when_blocked == WhenBlocked::Return && len > 0;
        if self.range == Some(self.read) || returns {
            self.source_end = Some(Ok(()));
        }
        if len == 0 {
            buffers.put(buffer);
        } else {
            self.chunks.push_back(Chunk { buffer, len, done: 0 });
        }
        blocked
    }

    fn write_chunk(&mut self, buffers: &mut Buffers) -> Result<(), TransferError> {
        let Some(chunk) = self.chunks.front_mut() else { return Ok(()) };
        if let Some((digester, bytes)) = &mut self.digest {
            digester.update(&chunk.buffer[..chunk.len]);
            *bytes += chunk.len as u64;
        }
        while chunk.done < chunk.len {
            let at = self.offset + self.written;
            match self.devices.write_at(&chunk.buffer[chunk.done..chunk.len], at) {
                // ENOSPC: a file system that writes nothing and says nothing has no room.
                Ok(0) => return Err(TransferError::DiskFull),
                Ok(written) => {
                    let written = written.min(chunk.len - chunk.done);
                    chunk.done += written;
                    self.written += written as u64;
                    // The next write may not return.
                    self.progress.written.store(self.written, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(TransferError::of_host("writing the file", &error)),
            }
        }
        self.drop_chunk(buffers);
        Ok(())
    }

    fn drop_chunk(&mut self, buffers: &mut Buffers) {
        if let Some(chunk) = self.chunks.pop_front() {
            buffers.put(chunk.buffer);
        }
    }
}

/// Where the plain bytes of a chunk are in its buffer: records one after the other, each with its tag.
struct Layout {
    start: usize,
    /// Plain bytes of a record.
    payload: usize,
    /// Bytes of a record.
    record: usize,
}

impl Layout {
    fn capacity(&self) -> usize {
        CHUNK_BYTES / self.record * self.payload
    }

    /// The places of plain bytes `from` to `to`.
    fn parts<'b>(&self, buffer: &'b mut [u8], from: usize, to: usize) -> Vec<IoSliceMut<'b>> {
        let mut parts = Vec::with_capacity(CHUNK_BYTES / RECORD_BYTES);
        let (mut rest, mut at) = (&mut buffer[self.start..], 0);
        while at < to {
            let (record, later) = rest.split_at_mut(self.record.min(rest.len()));
            rest = later;
            let len = self.payload.min(to - at);
            let skipped = from.saturating_sub(at).min(len);
            if skipped < len {
                parts.push(IoSliceMut::new(&mut record[skipped..len]));
            }
            at += len;
        }
        parts
    }
}
