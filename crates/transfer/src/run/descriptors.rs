//! The descriptors of a transfer, as the devices of its steps, and the checks of a command before it starts.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use mqueue::staging::CopyFailed;
use sys::descriptors::{self, describe, receive_now, send_now};

use crate::command::accelerator::Lease;
use crate::command::device::{Devices, End, SocketSender};
use crate::command::error::TransferError;
use crate::command::pipeline::{Command, Place};
use crate::run::plan::Plan;
use crate::run::reaper::Reaper;
use crate::run::user_process::{Operation, Remote, UserProcess};

/// A socket in one direction: as source or as sink.
pub(crate) type SocketUse = ((u64, u64), End);

/// The socket of a transfer. Closing it can block, so the reaper does it.
pub(crate) struct Socket {
    held: Mutex<Option<OwnedFd>>,
    reaper: Reaper,
}

impl Socket {
    /// Fails with `NotConnected` if it has been closed.
    pub(crate) fn with<R>(
        &self,
        with: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>,
    ) -> io::Result<R> {
        match &*self.held.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(socket) => with(socket.as_fd()),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    pub(crate) fn close(&self) {
        let socket = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(socket) = socket {
            self.reaper.discard(socket);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.close();
    }
}

/// The descriptor of a source or of a sink.
enum Held {
    /// `None` only while it is dropped.
    File(Option<Arc<OwnedFd>>),
    Files(Vec<Part>),
    Socket(Arc<Socket>),
    /// `None` only while it is dropped.
    Accelerator(Option<Lease>),
}

impl Held {
    /// What each part uses of a place.
    fn of_parts(place: Place, parts: &[Plan], reaper: &Reaper) -> Result<Vec<Self>, TransferError> {
        Ok(match place {
            Place::File(file, _) => {
                let file = Arc::new(file);
                parts.iter().map(|_| Self::File(Some(file.clone()))).collect()
            }
            Place::Socket(socket) => {
                let held = Mutex::new(Some(socket));
                vec![Self::Socket(Arc::new(Socket { held, reaper: reaper.clone() }))]
            }
            Place::Accelerator(memory, _) => {
                let used = memory.take().ok_or(TransferError::Busy)?;
                let lease = |(lane, part): (usize, &Plan)| {
                    let end = part.from + part.bytes.unwrap_or(0);
                    Self::Accelerator(Some(Lease::new(used.clone(), lane, end)))
                };
                parts.iter().enumerate().map(lease).collect()
            }
        })
    }
}

/// A range of one file of several.
struct Part {
    file: OwnedFd,
    range: PartRange,
}

#[derive(Clone, Copy)]
pub(crate) struct PartRange {
    /// Where it begins in the source.
    pub(crate) start: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// The descriptors of a transfer.
pub(crate) struct Descriptors {
    source: Held,
    sink: Held,
    /// The device numbers of the file systems of source and sink.
    blocks: [Option<u64>; 2],
    /// Where the calls on them are made, if not here.
    remote: Option<Remote>,
    reaper: Reaper,
}

/// The device number of the file system of a place that is a file.
fn block_of(place: &Place) -> Option<u64> {
    let Place::File(file, _) = place else { return None };
    describe(file.as_fd()).ok().map(|file| file.identity.0)
}

impl Descriptors {
    /// One for each part of a transfer. `files`: the ranges of a source of several files. `process`: where the calls on them are made, if not here. Fails with [`TransferError::Busy`] if another
    /// transfer uses the memory of an accelerator.
    pub(crate) fn for_parts(
        command: Command,
        files: Vec<PartRange>,
        parts: &[Plan],
        process: Option<&Arc<UserProcess>>,
        reaper: &Reaper,
    ) -> Result<Vec<Self>, TransferError> {
        let Command { source, more, sink, .. } = command;
        let blocks = [block_of(&source), block_of(&sink)];
        let sink_later = || Held::Files(Vec::new());
        let of = |source| {
            let (sink, remote) = (sink_later(), process.map(Remote::new));
            Self { source, sink, blocks, remote, reaper: reaper.clone() }
        };
        let mut taken: Vec<Self> = match source {
            Place::File(file, _) if !more.is_empty() => {
                let all = [file].into_iter().chain(more.into_iter().map(|range| range.file));
                let all = all.zip(files).map(|(file, range)| Part { file, range });
                vec![of(Held::Files(all.collect()))]
            }
            source => match Held::of_parts(source, parts, reaper) {
                Ok(held) => held.into_iter().map(of).collect(),
                Err(error) => {
                    reaper.discard(sink);
                    return Err(error);
                }
            },
        };
        for (part, sink) in taken.iter_mut().zip(Held::of_parts(sink, parts, reaper)?) {
            part.sink = sink;
        }
        Ok(taken)
    }

    /// The source's, then the sink's.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = Arc<Socket>> {
        let ends = [&self.source, &self.sink].into_iter();
        ends.filter_map(|held| match held {
            Held::Socket(socket) => Some(socket.clone()),
            Held::File(_) | Held::Files(_) | Held::Accelerator(_) => None,
        })
    }

    /// The device numbers of the file systems of source and sink, if they are files.
    pub(crate) fn blocks(&self) -> [Option<u64>; 2] {
        self.blocks
    }

    pub(crate) fn socket(&self, end: End) -> &Socket {
        match self.held(end) {
            Held::Socket(socket) => socket,
            Held::File(_) | Held::Files(_) | Held::Accelerator(_) => {
                unreachable!("it has no socket step")
            }
        }
    }

    /// Whether calls on them are made by another process, which may not reply.
    pub(crate) fn are_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// A call that another process makes. `None`: this one makes it.
    fn call_there(
        &mut self,
        operation: Operation,
        bytes: Bytes<'_, '_>,
    ) -> Option<io::Result<usize>> {
        let remote = self.remote.as_mut()?;
        let mut kept = Vec::new();
        let mut descriptors = Vec::new();
        if remote.is_new() {
            // Copies of sockets: the call may take its time, and closing one must not wait for it.
            for held in [&self.source, &self.sink] {
                if let Held::Socket(socket) = held {
                    match socket.with(|socket| socket.try_clone_to_owned()) {
                        Ok(copy) => kept.push(copy),
                        Err(error) => return Some(Err(error)),
                    }
                }
            }
            let mut copies = kept.iter();
            for held in [&self.source, &self.sink] {
                match held {
                    Held::File(file) => descriptors.push(open(file)),
                    Held::Files(files) => {
                        descriptors.extend(files.iter().map(|part| part.file.as_fd()));
                    }
                    Held::Socket(_) => descriptors.extend(copies.next().map(AsFd::as_fd)),
                    Held::Accelerator(_) => unreachable!("no message names one"),
                }
            }
        }
        Some(match bytes {
            Bytes::Put(bytes) => remote.give(operation, &descriptors, bytes),
            Bytes::Take(parts) => remote.take(operation, &descriptors, parts),
        })
    }

    fn held(&self, end: End) -> &Held {
        match end {
            End::Source => &self.source,
            End::Sink => &self.sink,
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let (mut files, mut taken, mut leases) = (Vec::new(), Vec::new(), Vec::new());
        for held in [&mut self.source, &mut self.sink] {
            match held {
                Held::File(file) => files.extend(file.take()),
                Held::Accelerator(lease) => leases.extend(lease.take()),
                Held::Files(parts) => taken.extend(parts.drain(..).map(|part| part.file)),
                Held::Socket(socket) => {
                    taken.extend(socket.held.lock().unwrap_or_else(PoisonError::into_inner).take());
                }
            }
        }
        // One value for one thread of the reaper.
        self.reaper.discard((files, taken));
        // At the end of a transfer that succeeded, its copies have ended: then the memory is free when the caller gets the answer.
        leases.retain(|lease| !lease.is_settled());
        if !leases.is_empty() {
            self.reaper.discard(leases);
        }
    }
}

/// What a call takes or makes.
enum Bytes<'b, 'p> {
    Put(&'b [u8]),
    Take(&'b mut [IoSliceMut<'p>]),
}

impl Devices for Descriptors {
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let files = match &mut self.source {
            Held::Files(files) => files,
            Held::File(file) => {
                let there = Operation::Read { file: 0, offset };
                if self.remote.is_some() {
                    return self.call_there(there, Bytes::Take(parts)).expect("it is remote");
                }
                return descriptors::read_at(open(file), parts, offset);
            }
            Held::Accelerator(lease) => return used(lease).read_at(parts, offset),
            Held::Socket(_) => unreachable!("a socket has no positions"),
        };
        // The last part that begins there: those before it may be empty.
        let after = files.partition_point(|part| part.range.start <= offset);
        let Part { file, range } = &files[after - 1];
        let mut room = range.start + range.bytes - offset;
        if mutants::on("read_past_range") {
            room = u64::MAX;
        }
        let mut within = Vec::with_capacity(parts.len());
        for part in parts {
            let len = room.min(part.len() as u64) as usize;
            room -= len as u64;
            within.push(IoSliceMut::new(&mut part[..len]));
        }
        let offset = range.offset + (offset - range.start);
        if self.remote.is_some() {
            let there = Operation::Read { file: after - 1, offset };
            return self.call_there(there, Bytes::Take(&mut within)).expect("it is remote");
        }
        descriptors::read_at(file.as_fd(), &mut within, offset)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        if let Some(done) = self.call_there(Operation::Write { offset }, Bytes::Put(bytes)) {
            return done;
        }
        match &mut self.sink {
            Held::File(file) => descriptors::write_at(open(file), bytes, offset),
            Held::Accelerator(lease) => used(lease).write_at(bytes, offset),
            Held::Files(_) | Held::Socket(_) => {
                unreachable!("a sink with positions is one file or memory")
            }
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        if let Some(done) = self.call_there(Operation::Sync, Bytes::Put(&[])) {
            return done.map(drop);
        }
        match &mut self.sink {
            Held::File(file) => descriptors::sync(open(file)),
            Held::Accelerator(lease) => used(lease).settle(),
            Held::Files(_) | Held::Socket(_) => unreachable!("nothing else is synced"),
        }
    }

    fn move_at(&mut self, from: u64, to: u64, most: usize) -> Option<Result<usize, TransferError>> {
        let (what, moved) = match (&mut self.source, &mut self.sink) {
            (Held::File(file), Held::Accelerator(lease)) => {
                let moved = used(lease).fill_at(to, most, |slot| {
                    descriptors::read_at(open(file), &mut [IoSliceMut::new(slot)], from)
                });
                ("reading the file", moved)
            }
            (Held::Accelerator(lease), Held::File(file)) => {
                let put = |bytes: &[u8]| match descriptors::write_at(open(file), bytes, to) {
                    // A file system that writes nothing and says nothing has no room.
                    Ok(0) => Err(io::ErrorKind::StorageFull.into()),
                    written => written,
                };
                ("writing the file", used(lease).put_at(from, most, put))
            }
            _ => return None,
        };
        Some(match moved {
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {
                return self.move_at(from, to, most);
            }
            Ok(moved) => moved.map_err(|error| TransferError::of_host(what, &error)),
            Err(CopyFailed(why)) => Err(TransferError::CopyFailed(why)),
        })
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(done) = self.call_there(Operation::Send, Bytes::Put(bytes)) {
            return done;
        }
        self.socket(End::Sink).with(|socket| send_now(socket, bytes))
    }

    fn sender(&self) -> Option<Arc<SocketSender>> {
        // Another process may not reply, and what sends apart is waited for.
        let Held::Socket(socket) = &self.sink else { return None };
        if self.are_remote() {
            return None;
        }
        let socket = socket.clone();
        Some(Arc::new(move |bytes| socket.with(|socket| send_now(socket, bytes))))
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut parts = [IoSliceMut::new(into)];
        if let Some(done) = self.call_there(Operation::Receive, Bytes::Take(&mut parts)) {
            return done;
        }
        let [into] = &mut parts;
        self.socket(End::Source).with(|socket| receive_now(socket, into))
    }
}

fn open(file: &Option<Arc<OwnedFd>>) -> BorrowedFd<'_> {
    file.as_ref().expect("only drop takes it").as_fd()
}

fn used(lease: &mut Option<Lease>) -> &mut Lease {
    lease.as_mut().expect("only drop takes it")
}
