//! The checks of a command before it starts, and the plan that they make.

use std::os::fd::AsFd as _;

use sys::descriptors::{Descriptor, DescriptorKind, describe};

use crate::command::device::{Device, End};
use crate::command::error::TransferError;
use crate::command::limits::FILES_MAX;
use crate::command::pipeline::{Command, Place};
use crate::command::stage::{StageSpec, check_order};
use crate::run::descriptors::{PartRange, SocketUse};
use crate::run::plan::{Cut, Plan};
use crate::stages::search::can_be_ranges;

/// Parts of a file that goes to a file, at most: the memory of all of them fits the smallest limit.
const FILE_PARTS_MAX: usize = 8;

/// How a transfer sockets its descriptors.
pub(crate) struct DescriptorUse {
    /// Its sockets, that of the source first.
    pub(crate) sockets: Vec<SocketUse>,
    /// The ranges of a source of several files.
    pub(crate) files: Vec<PartRange>,
}

/// Checks the stages, the descriptors and the ranges of a command.
pub(crate) fn check(command: &Command) -> Result<(Plan, DescriptorUse), TransferError> {
    check_order(&command.stages).map_err(TransferError::Order)?;
    if command.more.len() >= FILES_MAX {
        return Err(TransferError::Order(format!("a source has at most {FILES_MAX} files")));
    }
    command.check_head().map_err(TransferError::Order)?;
    let found =
        |role, descriptor| describe(descriptor).map_err(|_| TransferError::Invalid { role });
    let [source, sink] = [&command.source, &command.sink];
    let (mut sockets, mut sources, mut length) = (Vec::new(), Vec::new(), None);
    match source {
        Place::Socket(socket) => {
            let socket = found("source", socket.as_fd())?;
            check_socket(&socket, "source")?;
            sockets.push((socket.identity, End::Source));
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
            sockets.push((socket.identity, End::Sink));
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
    plan.parts_max = match plan.cut {
        Cut::Can => usize::MAX,
        _ if parts.is_empty() && (plan.is_plain() || plan.has_places()) => lanes,
        _ => 1,
    };
    Ok((plan, DescriptorUse { sockets, files: parts }))
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
