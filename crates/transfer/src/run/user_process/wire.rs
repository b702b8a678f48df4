//! What an engine and the process of a user send one another: on the connection of the process, and on that of each lane.
//!
//! Numbers are u64, little-endian. Each message arrives whole.

use std::io;

use crate::command::error::CallError;

/// Bytes of the memory of a lane: more than a chunk of a transfer has with its header and tags.
pub(super) const SLOT_BYTES: usize = 1 << 20;
/// Bytes of a message of either side.
pub(super) const MESSAGE_BYTES: usize = 40;

/// A system call on a file or a socket of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Read from this file of the source, at an offset.
    Read { file: usize, offset: u64 },
    /// Write to the sink, a file, at an offset.
    Write { offset: u64 },
    /// Wait until the sink, a file, is on its disk.
    Sync,
    /// Send to the sink.
    Send,
    /// Receive from the source.
    Receive,
}

/// A call as it travels on a lane. Its bytes are in the memory of the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) operation: Operation,
    /// The transfer, or the part of one. Its first call brings its descriptors: the source's, then the sink's.
    pub(super) transfer: u64,
    pub(super) bytes: usize,
}

/// What a call returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// As many bytes.
    Done(usize),
    /// An error of the host kernel.
    Failed(i32),
    /// A file of the source, or else the sink, is an interface of the host kernel.
    OfKernel { is_sink: bool },
}

/// What the engine sends on the connection of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// A further lane: its connection and its memory come with it.
    Lane,
    /// The descriptors of a transfer are not needed any more.
    Close(u64),
}

fn encode(words: [u64; 5]) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn decode(bytes: &[u8]) -> Option<[u64; 5]> {
    let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
    let mut words = [0; 5];
    for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(from.try_into().expect("chunks of 8"));
    }
    Some(words)
}

impl Call {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (code, file, offset) = match self.operation {
            Operation::Read { file, offset } => (1, file as u64, offset),
            Operation::Write { offset } => (2, 0, offset),
            Operation::Sync => (3, 0, 0),
            Operation::Send => (4, 0, 0),
            Operation::Receive => (5, 0, 0),
        };
        encode([code, self.transfer, file, offset, self.bytes as u64])
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let [code, transfer, file, offset, bytes] = decode(bytes)?;
        let operation = match (code, file, offset) {
            (1, file, offset) => Operation::Read { file: usize::try_from(file).ok()?, offset },
            (2, 0, offset) => Operation::Write { offset },
            (3, 0, 0) => Operation::Sync,
            (4, 0, 0) => Operation::Send,
            (5, 0, 0) => Operation::Receive,
            _ => return None,
        };
        Some(Self { operation, transfer, bytes: usize::try_from(bytes).ok()? })
    }
}

impl Reply {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (code, value) = match self {
            Self::Done(bytes) => (0, bytes as u64),
            Self::Failed(errno) => (1, u64::from(errno.unsigned_abs())),
            Self::OfKernel { is_sink } => (2, u64::from(is_sink)),
        };
        encode([code, value, 0, 0, 0])
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match decode(bytes)? {
            [0, bytes, 0, 0, 0] => Some(Self::Done(usize::try_from(bytes).ok()?)),
            [1, errno @ 1..4096, 0, 0, 0] => Some(Self::Failed(errno as i32)),
            [2, is_sink @ 0..2, 0, 0, 0] => Some(Self::OfKernel { is_sink: is_sink == 1 }),
            _ => None,
        }
    }

    /// What the call returned. `most`: as many bytes as were asked for. `None`: no process that does what it should replies that.
    pub(super) fn result(self, most: usize) -> Option<io::Result<usize>> {
        Some(match self {
            Self::Done(bytes) if bytes > most => return None,
            Self::Done(bytes) => Ok(bytes),
            Self::Failed(errno) => Err(io::Error::from_raw_os_error(errno)),
            Self::OfKernel { is_sink } => Err(io::Error::other(CallError::OfKernel { is_sink })),
        })
    }
}

impl Control {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Lane => encode([1, 0, 0, 0, 0]),
            Self::Close(transfer) => encode([2, transfer, 0, 0, 0]),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match decode(bytes)? {
            [1, 0, 0, 0, 0] => Some(Self::Lane),
            [2, transfer, 0, 0, 0] => Some(Self::Close(transfer)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_as_encoded_and_others_are_refused() {
        let operations = [
            Operation::Read { file: 7, offset: u64::MAX },
            Operation::Write { offset: 9 },
            Operation::Sync,
            Operation::Send,
            Operation::Receive,
        ];
        for operation in operations {
            let call = Call { operation, transfer: 3, bytes: 5 };
            assert_eq!(Call::decode(&call.encode()), Some(call));
        }
        for reply in [
            Reply::Done(0),
            Reply::Failed(28),
            Reply::OfKernel { is_sink: false },
            Reply::OfKernel { is_sink: true },
        ] {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
        for control in [Control::Lane, Control::Close(u64::MAX)] {
            assert_eq!(Control::decode(&control.encode()), Some(control));
        }
        for wrong in [[6, 0, 0, 0, 0], [2, 0, 1, 0, 0], [0; 5], [3, 0, 0, 1, 0]] {
            assert_eq!(Call::decode(&encode(wrong)), None);
        }
        for wrong in [[3, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 4096, 0, 0, 0], [0, 1, 1, 0, 0]] {
            assert_eq!(Reply::decode(&encode(wrong)), None);
        }
        assert_eq!(Control::decode(&encode([3, 0, 0, 0, 0])), None);
        assert_eq!(Call::decode(&[1; 39]), None);
        // More than was asked for was not done.
        assert!(Reply::Done(6).result(5).is_none());
        assert_eq!(Reply::Done(5).result(5).unwrap().unwrap(), 5);
    }
}
