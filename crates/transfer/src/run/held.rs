//! The descriptors of a transfer, as the devices of its steps, and the checks of a command before it starts.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use mqueue::staging::CopyFailed;
use sys::descriptors::{self, Descriptor, DescriptorKind, describe, receive_now, send_now};

use crate::command::accelerator::Lease;
use crate::command::error::TransferError;
use crate::command::pipeline::{Command, FILES_MAX, HEAD_MAX, Place, WhenBlocked};
use crate::command::stage::{StageSpec, check_order};
use crate::run::apart;
use crate::run::flow::{Cut, Device, Devices, End, Plan};
use crate::run::reaper::Reaper;
use crate::run::users::{Operation, Remote, UserProcess};
use crate::stages::search::can_be_ranges;

/// Parts of a file that goes to a file, at most: the memory of all of them fits the smallest limit.
const FILE_PARTS_MAX: usize = 8;

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
    start: u64,
    offset: u64,
    bytes: u64,
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
    pub(crate) fn of_parts(
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

    fn sender(&self) -> Option<Arc<apart::Send>> {
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

/// A command that can be executed.
pub(crate) struct Checked {
    pub(crate) plan: Plan,
    /// The uses of its sockets, that of the source first.
    pub(crate) uses: Vec<SocketUse>,
    /// The ranges of a source of several files.
    pub(crate) files: Vec<PartRange>,
    /// Parts in which it can be done at a time.
    pub(crate) lanes: usize,
}

/// Checks the stages, the descriptors and the ranges of a command.
pub(crate) fn check(command: &Command) -> Result<Checked, TransferError> {
    check_order(&command.stages).map_err(TransferError::Order)?;
    if command.more.len() >= FILES_MAX {
        return Err(TransferError::Order(format!("a source has at most {FILES_MAX} files")));
    }
    check_head(command).map_err(TransferError::Order)?;
    let found =
        |role, descriptor| describe(descriptor).map_err(|_| TransferError::Invalid { role });
    let [source, sink] = [&command.source, &command.sink];
    let (mut uses, mut sources, mut length) = (Vec::new(), Vec::new(), None);
    match source {
        Place::Socket(socket) => {
            let socket = found("source", socket.as_fd())?;
            check_socket(&socket, "source")?;
            uses.push((socket.identity, End::Source));
        }
        Place::File(file, _) => {
            let file = found("source", file.as_fd())?;
            length = Some(check_file(&file, "source", End::Source)?);
            sources.push(file.identity);
        }
        Place::Accelerator(memory, _) => length = Some(memory.bytes()),
    }
    let (mut sync, mut drops) = (command.sync, false);
    let mut parts = Vec::new();
    if !command.more.is_empty() {
        let first = (source.offset(), command.bytes, length.unwrap_or(0));
        let mut ranges = vec![first];
        for range in &command.more {
            let file = found("source", range.file.as_fd())?;
            let length = check_file(&file, "source", End::Source)?;
            sources.push(file.identity);
            ranges.push((range.offset, range.bytes, length));
        }
        parts = part_ranges(&ranges)?;
    }
    match sink {
        Place::Socket(socket) => {
            let socket = found("sink", socket.as_fd())?;
            check_socket(&socket, "sink")?;
            uses.push((socket.identity, End::Sink));
        }
        Place::File(file, _) => {
            let file = found("sink", file.as_fd())?;
            check_file(&file, "sink", End::Sink)?;
            // There is nothing to be synced, and the host kernel would say so.
            drops = file.kind == DescriptorKind::Null;
            sync &= !drops;
            if sources.contains(&file.identity) && !mutants::on("overwrite_source") {
                return Err(TransferError::SameFile);
            }
        }
        // A range in it is checked below.
        Place::Accelerator(..) => {}
    }
    let bytes = match (parts.last(), length) {
        (Some(last), _) => Some(last.start + last.bytes),
        // Files of /proc have content and no length.
        (None, Some(0)) if source.device() == Device::File => command.bytes,
        (None, None) => command.bytes,
        (None, Some(length)) => {
            Some(command.bytes.unwrap_or_else(|| length.saturating_sub(source.offset())))
        }
    };
    let mut plan = Plan::of(command, bytes);
    plan.sync &= sync || plan.sink == Device::Accelerator;
    for from in [plan.from, plan.to] {
        check_end(from, bytes.unwrap_or(0))?;
    }
    check_memory(source, bytes.unwrap_or(0))?;
    // What stages make of the bytes may still be too long; then writing fails.
    check_memory(
        sink,
        bytes.filter(|_| !plan.stages.iter().any(StageSpec::transforms)).unwrap_or(0),
    )?;
    // Of others one thread does a transfer, so that transfers share the threads evenly.
    let lanes = match (source, sink) {
        (Place::Accelerator(from, _), Place::Accelerator(to, _)) => from.lanes().min(to.lanes()),
        (Place::Accelerator(memory, _), Place::File(..))
        | (Place::File(..), Place::Accelerator(memory, _)) => memory.lanes(),
        (Place::File(..), Place::File(..)) if plan.has_places() => FILE_PARTS_MAX,
        _ => 1,
    };
    let joins = |stage: &StageSpec| match stage {
        StageSpec::Search(search) => can_be_ranges(search),
        StageSpec::Digest(kind) => kind.can_be_joined(),
        _ => false,
    };
    if drops && source.device() == Device::File && plan.stages.iter().all(joins) {
        plan.cut = if parts.is_empty() { Cut::Can } else { Cut::No };
    }
    let lanes = match plan.cut {
        Cut::Can => usize::MAX,
        _ if parts.is_empty() && (plan.is_plain() || plan.has_places()) => lanes,
        _ => 1,
    };
    Ok(Checked { plan, uses, files: parts, lanes })
}

/// Whether another user's command names only files that it may pass on: a write to a file that runs with the rights of its owner could change what these do.
pub(crate) fn check_rights(command: &Command) -> Result<(), TransferError> {
    let source = command.source.descriptor().map(|source| ("source", source));
    let more = command.more.iter().map(|range| ("source", range.file.as_fd()));
    let sink = command.sink.descriptor().map(|sink| ("sink", sink));
    for (role, descriptor) in source.into_iter().chain(more).chain(sink) {
        if describe(descriptor).is_ok_and(|found| found.lends_rights) {
            let found = "a file that lends rights (set-user-ID or set-group-ID)";
            return Err(TransferError::WrongKind { role, found, needed: "another file" });
        }
    }
    Ok(())
}

/// Whether the source can have been read from before.
pub(crate) fn check_head(command: &Command) -> Result<(), String> {
    match command.head.len() {
        0 => Ok(()),
        _ if command.source.device() != Device::Socket => {
            Err("only a socket can have bytes that were received before".to_owned())
        }
        _ if command.when_blocked == WhenBlocked::Return => {
            Err("after bytes that were received before, a transfer waits for its sockets"
                .to_owned())
        }
        len if len > HEAD_MAX => {
            Err(format!("{len} bytes were received before, and {HEAD_MAX} is the limit"))
        }
        _ => Ok(()),
    }
}

/// The places of ranges that follow one another; of each its offset, the length that is asked for, and that of its file.
fn part_ranges(ranges: &[(u64, Option<u64>, u64)]) -> Result<Vec<PartRange>, TransferError> {
    let (mut start, mut parts) = (0, Vec::new());
    for &(offset, bytes, length) in ranges {
        let bytes = bytes.unwrap_or_else(|| length.saturating_sub(offset));
        check_end(offset, bytes)?;
        check_end(start, bytes)?;
        parts.push(PartRange { start, offset, bytes });
        start += bytes;
    }
    Ok(parts)
}

fn check_end(from: u64, bytes: u64) -> Result<(), TransferError> {
    let end = from.checked_add(bytes).filter(|end| i64::try_from(*end).is_ok());
    end.map(drop).ok_or(TransferError::Range)
}

/// Whether the memory of an accelerator has this many bytes from the place on.
fn check_memory(place: &Place, bytes: u64) -> Result<(), TransferError> {
    match place {
        Place::Accelerator(memory, from)
            if bytes > memory.bytes().saturating_sub(*from) || *from > memory.bytes() =>
        {
            Err(TransferError::OutsideMemory(memory.bytes()))
        }
        _ => Ok(()),
    }
}

fn check_socket(found: &Descriptor, role: &'static str) -> Result<(), TransferError> {
    let needed = "a connected stream socket (TCP or Unix)";
    let wrong = |found| Err(TransferError::WrongKind { role, found, needed });
    match found.kind {
        DescriptorKind::Stream => Ok(()),
        DescriptorKind::Unconnected => wrong("a socket without a peer"),
        DescriptorKind::File { .. } => wrong("a file"),
        DescriptorKind::Null => wrong("a device"),
        DescriptorKind::Other(found) => wrong(found),
    }
}

/// Returns the file's length.
fn check_file(found: &Descriptor, role: &'static str, end: End) -> Result<u64, TransferError> {
    let needed = "a file";
    let (bytes, appends) = match found.kind {
        DescriptorKind::File { direct: true, .. } => return Err(TransferError::Direct { role }),
        DescriptorKind::File { bytes, appends, .. } => (bytes, appends),
        DescriptorKind::Null if end == End::Sink => (0, false),
        DescriptorKind::Null => {
            return Err(TransferError::WrongKind { role, found: "a device", needed });
        }
        DescriptorKind::Stream | DescriptorKind::Unconnected => {
            return Err(TransferError::WrongKind { role, found: "a socket", needed });
        }
        DescriptorKind::Other(found) => {
            return Err(TransferError::WrongKind { role, found, needed });
        }
    };
    match end {
        End::Source if !found.readable => Err(TransferError::Access { role, access: "reading" }),
        End::Sink if !found.writable => Err(TransferError::Access { role, access: "writing" }),
        End::Sink if appends => Err(TransferError::Appends),
        _ => Ok(bytes),
    }
}
