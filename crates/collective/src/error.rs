//! Why a call or a group ended.

use std::io;
use std::time::Duration;

/// Why another rank can no longer be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// Its process has ended, or its connection was cut.
    #[error("rank {0} was lost: its connection ended")]
    Ended(usize),
    /// It left the group in order, and does not take part in this call.
    #[error("rank {0} has left the group")]
    Left(usize),
    /// It ended the group because of something that it noticed.
    #[error("rank {by} ended the group: {why}")]
    Told {
        /// Who.
        by: usize,
        /// Why.
        why: Reason,
    },
    /// What it sent is not the protocol.
    #[error("rank {0} sent something that is not the protocol of collectives")]
    Garbage(usize),
    /// The host kernel reports an error.
    #[error("the connection to rank {0} failed: {1}")]
    Host(usize, io::ErrorKind),
}

/// Why a rank ended its group, as the other ranks read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Another rank was lost.
    #[error("rank {0} was lost")]
    Lost(usize),
    /// Two ranks disagree about the call.
    #[error("rank {0} and another rank disagree about the call")]
    Disagreement(usize),
    /// A call did not end before its deadline.
    #[error("a call waited for rank {0} until its deadline")]
    Deadline(usize),
    /// Another rank sent garbage.
    #[error("rank {0} sent something that is not the protocol of collectives")]
    Garbage(usize),
    /// A copy from or to the memory of a rank's accelerator failed.
    #[error("rank {0} cannot copy its accelerator's memory")]
    Copy(usize),
}

/// Why a call failed. After any of them but [`Self::Argument`] the group cannot be used any more: create another one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// The caller's arguments are wrong; no other rank noticed.
    #[error("{0}")]
    Argument(String),
    /// Another rank can no longer be reached.
    #[error(transparent)]
    Lost(#[from] Loss),
    /// The ranks do not make the same call.
    #[error(
        "rank {rank} disagrees about the {what} of call {sequence}: {theirs} there, {ours} here; all ranks have to make the same calls in the same order"
    )]
    Disagreement {
        /// With whom.
        rank: usize,
        /// The call, from 1.
        sequence: u64,
        /// About what: operation, type, root, count, number, or the size of a staged array or of its slots.
        what: &'static str,
        /// What this rank says.
        ours: String,
        /// What the other says.
        theirs: String,
    },
    /// The call did not end in time.
    #[error("call {sequence} waited for rank {rank} until its deadline of {} s", .limit.as_secs_f64())]
    Deadline {
        /// For whom it waited.
        rank: usize,
        /// The call, from 1.
        sequence: u64,
        /// How long.
        limit: Duration,
    },
    /// A copy from or to the memory of this rank's accelerator failed.
    #[error("rank {rank} cannot copy its accelerator's memory: {why}")]
    Copy {
        /// This rank.
        rank: usize,
        /// Why.
        why: String,
    },
    /// The caller ended the call ([`crate::Group::set_interrupt`]).
    #[error("rank {0} was interrupted in its call")]
    Interrupted(usize),
    /// An earlier call failed.
    #[error("the group ended in an earlier call: {0}; create a new group")]
    Over(Box<Self>),
    /// The group was not formed.
    #[error("the group {name:?} was not formed: {why}")]
    Forming {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
}

impl CollectiveError {
    /// A word for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Argument(_) => "argument",
            Self::Lost(Loss::Ended(_) | Loss::Host(..)) => "rank_lost",
            Self::Lost(Loss::Left(_)) => "rank_left",
            Self::Lost(Loss::Told { .. }) => "group_ended",
            Self::Lost(Loss::Garbage(_)) => "protocol",
            Self::Disagreement { .. } => "disagreement",
            Self::Deadline { .. } => "deadline",
            Self::Copy { .. } => "copy",
            Self::Interrupted(_) => "interrupted",
            Self::Over(_) => "over",
            Self::Forming { .. } => "forming",
        }
    }

    /// What to tell the other ranks; `None`: nothing, the group has not changed or has told them before.
    pub(crate) fn reason(&self) -> Option<Reason> {
        match self {
            Self::Lost(Loss::Ended(rank) | Loss::Left(rank) | Loss::Host(rank, _)) => {
                Some(Reason::Lost(*rank))
            }
            Self::Lost(Loss::Told { why, .. }) => Some(*why),
            Self::Lost(Loss::Garbage(rank)) => Some(Reason::Garbage(*rank)),
            Self::Disagreement { rank, .. } => Some(Reason::Disagreement(*rank)),
            Self::Deadline { rank, .. } => Some(Reason::Deadline(*rank)),
            Self::Copy { rank, .. } => Some(Reason::Copy(*rank)),
            Self::Interrupted(rank) => Some(Reason::Lost(*rank)),
            Self::Argument(_) | Self::Over(_) | Self::Forming { .. } => None,
        }
    }
}
