//! Transfers that kernels ask for: what a command names, checked, and who executes it.
//!
//! A block sends a [`TransferCommand`] through the client mqueue of a backend that does transfers, and gets a [`TransferDone`] as its
//! answer. Files and peers are those that the configuration of the service names, by index; memory is the window of the mqueue, which belongs to
//! this block alone. A sink may also be a connection of the block's own: `endpoint/sockets/lend.rs`. Everything in a command is a claim of the kernel: [`TransferOrder::decode`] makes an order of a copy of it, or a status, and
//! nothing is touched before. The engine's threads move no bytes: a [`Transfers`] does, on threads of its own.

use mqueue::abi::transfer_status as status;
use mqueue::abi::{TransferCommand, TransferDone, transfer_digest, transfer_place, transfer_stage};
use wire::nic::LentStream;

use crate::base::topology::{FileAt, FileSpec};

/// Where bytes come from or go to. The offset counts from the beginning of the file, or of the block's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferPlace {
    /// A file of the service.
    File {
        /// Its index in [`crate::base::topology::Service::files`].
        file: u16,
        /// The first byte.
        offset: u64,
    },
    /// The block's memory.
    Memory {
        /// The first byte.
        offset: u64,
    },
    /// A new connection to a peer of the service.
    Connection {
        /// Its index in [`crate::base::topology::Service::files`].
        file: u16,
    },
    /// A connection of the block's own, as a sink. The worker checks slot, lease and position before it lends the connection.
    Socket {
        /// The slot.
        slot: u16,
        /// Its lease.
        lease: u32,
        /// Bytes of its ring that are sent before.
        position: u64,
    },
}

/// A command that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferOrder {
    /// Where the bytes come from.
    pub source: TransferPlace,
    /// Where they go.
    pub sink: TransferPlace,
    /// Bytes to take from the source; `None`: to the end of the file or of the stream.
    pub bytes: Option<u64>,
    /// Most bytes that the sink takes: what is left of the block's memory.
    pub most: u64,
    /// A [`transfer_digest`].
    pub digest: u8,
    /// Bits of [`transfer_stage`].
    pub stages: u8,
}

/// Executes the transfers of one block, without ever making its caller wait. Dropping it cancels those in flight.
pub trait Transfers: Send {
    /// Starts a transfer; `socket` is the connection of one whose sink is a [`TransferPlace::Socket`]. False: it takes no more now.
    fn start(&mut self, number: u64, order: &TransferOrder, socket: Option<LentStream>) -> bool;

    /// A transfer that has ended: its number, and how. What it has written is visible to the caller.
    fn next(&mut self) -> Option<(u64, TransferDone)>;
}

/// An answer without anything moved.
pub fn refused(status: u32) -> TransferDone {
    TransferDone { status, digest_bytes: 0, read: 0, written: 0, digest: [0; 32], reserved: 0 }
}

const EXPANSIONS: u8 = transfer_stage::EXPAND_GZIP | transfer_stage::EXPAND_ZSTD;
const COMPRESSIONS: u8 = transfer_stage::COMPRESS_GZIP | transfer_stage::COMPRESS_ZSTD;
const ALL_STAGES: u8 = transfer_stage::OPEN | EXPANSIONS | COMPRESSIONS | transfer_stage::SEAL;

impl TransferOrder {
    /// The order that a message of a block is, or the [`transfer_status`](mqueue::abi::transfer_status) with which it is answered.
    pub fn decode(message: &[u8], files: &[FileSpec], memory_bytes: u64) -> Result<Self, u32> {
        let bytes = message.try_into().map_err(|_| status::BAD_COMMAND)?;
        let command = TransferCommand::from_bytes(bytes);
        let TransferCommand { digest, stages, .. } = command;
        let is_one_at_most = |of: u8| (stages & of).count_ones() <= 1;
        if command.reserved != [0; 3]
            || (command.lease != 0) != (command.sink == transfer_place::SOCKET)
            || (digest != transfer_digest::NONE
                && transfer_digest::TABLE.numbered(digest).is_none())
            || stages & !ALL_STAGES != 0
            || !is_one_at_most(EXPANSIONS)
            || !is_one_at_most(COMPRESSIONS)
        {
            return Err(status::BAD_COMMAND);
        }
        let all = command.bytes == u64::MAX;
        let source = (command.source, command.source_file, command.source_offset);
        let source = place(source, files)?;
        let sink = match command.sink {
            transfer_place::SOCKET => TransferPlace::Socket {
                slot: command.sink_file,
                lease: command.lease.try_into().map_err(|_| status::NOT_ALLOWED)?,
                position: command.sink_offset,
            },
            kind => place((kind, command.sink_file, command.sink_offset), files)?,
        };
        let opens = stages & transfer_stage::OPEN != 0;
        let seals = stages & transfer_stage::SEAL != 0;
        if !may(files, source, opens, |_| true) || !may(files, sink, seals, FileSpec::is_writable) {
            return Err(status::NOT_ALLOWED);
        }
        let wanted = if all { 0 } else { command.bytes };
        if command.source_offset.checked_add(wanted).is_none_or(|end| end > i64::MAX as u64)
            || command.sink_offset > i64::MAX as u64
        {
            return Err(status::RANGE);
        }
        if let TransferPlace::Memory { offset } = source
            && (all || !is_inside(offset, wanted, memory_bytes))
        {
            return Err(status::RANGE);
        }
        let most = match (source, sink) {
            (TransferPlace::Memory { .. }, TransferPlace::Memory { .. }) => {
                return Err(status::BAD_COMMAND);
            }
            (_, TransferPlace::Memory { offset }) => {
                room(offset, (!all).then_some(wanted), stages, memory_bytes)?
            }
            _ => u64::MAX,
        };
        Ok(Self { source, sink, bytes: (!all).then_some(wanted), most, digest, stages })
    }
}

/// The place that a command names.
fn place((kind, file, offset): (u8, u16, u64), files: &[FileSpec]) -> Result<TransferPlace, u32> {
    let of = |is_file: bool| {
        let spec = files.get(usize::from(file)).ok_or(status::NOT_ALLOWED)?;
        let is_meant = matches!(spec.at, FileAt::File { .. }) == is_file;
        is_meant.then_some(file).ok_or(status::NOT_ALLOWED)
    };
    Ok(match kind {
        transfer_place::FILE => TransferPlace::File { file: of(true)?, offset },
        transfer_place::MEMORY if file == 0 => TransferPlace::Memory { offset },
        transfer_place::CONNECTION if offset == 0 => TransferPlace::Connection { file: of(false)? },
        _ => return Err(status::BAD_COMMAND),
    })
}

/// Whether a place allows a direction, and has a key if one is needed. The block's memory and its sockets have none.
fn may(files: &[FileSpec], at: TransferPlace, keyed: bool, allows: fn(&FileSpec) -> bool) -> bool {
    match at {
        TransferPlace::Memory { .. } | TransferPlace::Socket { .. } => !keyed,
        TransferPlace::File { file, .. } | TransferPlace::Connection { file } => {
            let spec = &files[usize::from(file)];
            allows(spec) && (!keyed || spec.key.is_some())
        }
    }
}

/// How much of the block's memory a transfer may write. It must be known before that it fits, unless the bytes are expanded, which has a limit of
/// its own. What lengthens a stream by an unknown number of bytes cannot go to memory.
fn room(offset: u64, wanted: Option<u64>, stages: u8, memory_bytes: u64) -> Result<u64, u32> {
    if stages & (COMPRESSIONS | transfer_stage::SEAL) != 0 {
        return Err(status::BAD_COMMAND);
    }
    let left = memory_bytes.checked_sub(offset).ok_or(status::RANGE)?;
    let fits = stages & EXPANSIONS != 0 || wanted.is_some_and(|wanted| wanted <= left);
    fits.then_some(left).ok_or(status::RANGE)
}

fn is_inside(offset: u64, bytes: u64, memory_bytes: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= memory_bytes)
}

#[cfg(test)]
mod tests;
