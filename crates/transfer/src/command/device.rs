//! The source and the sink of a transfer: the kinds of devices, and the calls on them.

use std::io::{self, IoSliceMut};
use std::sync::Arc;

use super::error::TransferError;

/// The kind of a device. Each has a queue of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// A file, or shared memory.
    File,
    /// A stream socket.
    Socket,
    /// Memory of an accelerator.
    Accelerator,
}

impl Device {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::File, Self::Socket, Self::Accelerator];

    /// Its name in metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Socket => "socket",
            Self::Accelerator => "accelerator",
        }
    }

    /// Whether it has positions, so that a step reads and writes all that it wants. Such a step may take its time; one on a socket
    /// does not wait.
    pub fn has_positions(self) -> bool {
        match self {
            Self::File | Self::Accelerator => true,
            Self::Socket => false,
        }
    }

    /// The error of a step that does not return for `ms`.
    pub(crate) fn stalled(self, ms: u64) -> TransferError {
        match self {
            Self::File => TransferError::FileStalled(ms),
            Self::Socket => TransferError::Stalled(ms),
            Self::Accelerator => {
                TransferError::CopyFailed(format!("it did not answer for {ms} ms"))
            }
        }
    }

    /// The error of a step; `what` names the operation if it is not a copy of an accelerator.
    pub(crate) fn error(self, what: &'static str, error: &io::Error) -> TransferError {
        match self {
            Self::File | Self::Socket => TransferError::of_host(what, error),
            Self::Accelerator => TransferError::CopyFailed(error.to_string()),
        }
    }
}

/// One of the two ends of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Where the bytes come from.
    Source,
    /// Where they go.
    Sink,
}

/// Which ends cannot do anything until their socket is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocked {
    /// Nothing has arrived.
    pub source: bool,
    /// There is no room.
    pub sink: bool,
}

impl Blocked {
    /// The flag of an end.
    pub fn of(&mut self, end: End) -> &mut bool {
        match end {
            End::Source => &mut self.source,
            End::Sink => &mut self.sink,
        }
    }
}

/// Sends what a socket takes now; `WouldBlock` if that is nothing.
pub type SocketSender = dyn Fn(&[u8]) -> io::Result<usize> + Send + Sync;

/// The source and the sink of a transfer. No call waits for a socket: it fails with `WouldBlock` instead.
pub trait Devices {
    /// Reads from the source, a file or memory, at `offset` into the parts, one after the other; 0 is its end.
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize>;
    /// Writes to the sink, a file or memory, at `offset`.
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Waits until what was written to the sink is on the file's disk, or in the accelerator's memory.
    fn sync(&mut self) -> io::Result<()>;
    /// Moves up to `most` bytes from the source at `from` to the sink at `to`, neither of which is a socket, without a buffer of the
    /// transfer. Returns how many; 0 is the end of the source. `None`: these devices cannot do that.
    fn move_at(&mut self, from: u64, to: u64, most: usize) -> Option<Result<usize, TransferError>> {
        let _ = (from, to, most);
        None
    }
    /// Sends what the sink, a socket, takes now.
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Sends as [`Self::send`], apart from the other devices. `None`: they cannot be apart.
    fn sender(&self) -> Option<Arc<SocketSender>> {
        None
    }
    /// Receives what has arrived at the source, a socket; 0 is the end of the stream.
    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize>;
}
