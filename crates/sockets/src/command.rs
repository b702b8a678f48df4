//! What a block asks for, and how a socket ends.

use mqueue::abi::{SocketMessage, socket_op};

/// A command of a block, as far as it can be checked without its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Lease a slot for the next connection to this listener.
    Accept {
        /// The number that the completion repeats.
        token: u64,
        /// Index among the sockets of the service.
        socket: u32,
    },
    /// Lease a slot and connect it to this peer.
    Connect {
        /// The number that the completion repeats.
        token: u64,
        /// Index among the sockets of the service.
        socket: u32,
    },
    /// The block gives up an accept or a connect.
    Cancel {
        /// The number of that command.
        token: u64,
    },
    /// The block does not use the slot any more.
    Close {
        /// The slot.
        slot: u32,
        /// Do not send what is left.
        reset: bool,
    },
    /// It was answered or counted, and has no other effect.
    NoEffect,
    /// There is something to send, or room again.
    Notify {
        /// The slot.
        slot: u32,
    },
}

/// How the connection of a socket ended: the label `reason` of `serval_socket_ends_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum End {
    /// The block closed it, and its bytes were sent.
    Closed,
    /// The block reset it.
    ResetByBlock,
    /// The peer reset it, or its host is gone.
    ResetByPeer,
    /// A connection attempt was refused.
    Refused,
    /// A connection attempt took too long, or the block gave it up.
    ConnectTimeout,
    /// After a close the peer took no byte for `limits.slow_client_ms`.
    SlowPeer,
    /// The service or the engine stopped, and `engine.drain_ms` was over.
    DrainTimeout,
    /// The accelerator's generation ended.
    AcceleratorLost,
    /// The block ended, or wrote impossible positions into a ring.
    BlockEnded,
    /// The host kernel has no descriptor for it.
    NoDescriptor,
    /// No byte came or went for the `idle_ms` of its address.
    Idle,
    /// After a close the peer went on sending for `limits.slow_client_ms`.
    UnreadInput,
    /// A transfer to it failed.
    TransferFailed,
}

impl End {
    /// How many there are.
    pub const COUNT: usize = 13;
    /// All of them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Closed,
        Self::ResetByBlock,
        Self::ResetByPeer,
        Self::Refused,
        Self::ConnectTimeout,
        Self::SlowPeer,
        Self::DrainTimeout,
        Self::AcceleratorLost,
        Self::BlockEnded,
        Self::NoDescriptor,
        Self::Idle,
        Self::UnreadInput,
        Self::TransferFailed,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::ResetByBlock => "reset_by_block",
            Self::ResetByPeer => "reset_by_peer",
            Self::Refused => "refused",
            Self::ConnectTimeout => "connect_timeout",
            Self::SlowPeer => "slow_peer",
            Self::DrainTimeout => "drain_timeout",
            Self::AcceleratorLost => "accelerator_lost",
            Self::BlockEnded => "block_ended",
            Self::NoDescriptor => "no_descriptor",
            Self::Idle => "idle",
            Self::UnreadInput => "unread_input",
            Self::TransferFailed => "transfer_failed",
        }
    }
}

/// A message of a block: what it asks for, with the slot and generation it names; `None` if there is no such command.
pub(crate) fn decode(token: u64, message: &SocketMessage) -> Option<(Command, Option<u32>)> {
    let SocketMessage { op, slot, generation, value } = *message;
    Some(match op {
        socket_op::ACCEPT => (Command::Accept { token, socket: value }, None),
        socket_op::CONNECT => (Command::Connect { token, socket: value }, None),
        socket_op::CLOSE if value <= 1 => {
            (Command::Close { slot, reset: value == 1 }, Some(generation))
        }
        socket_op::NOTIFY => (Command::Notify { slot }, Some(generation)),
        socket_op::CANCEL => (Command::Cancel { token }, None),
        _ => return None,
    })
}
