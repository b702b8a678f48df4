//! How long a transfer may take, and whether enough moves.

use std::time::Duration;

use crate::command::error::TransferError;
use crate::command::pipeline::{Command, STALL_DEFAULT};

/// Bytes per second that a transfer has to move. Fewer in the whole stall time are no progress, so a peer that takes a
/// byte now and then does not hold an entry indefinitely.
pub const RATE_MIN: u64 = 128;

/// How long an entry may take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Without progress.
    pub stall_ns: u64,
    /// In all.
    pub deadline_ns: Option<u64>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { stall_ns: STALL_DEFAULT.as_nanos() as u64, deadline_ns: None }
    }
}

impl Patience {
    /// That of a command.
    pub(crate) fn of(command: &Command) -> Self {
        let ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        Self { stall_ns: ns(command.stall), deadline_ns: command.deadline.map(ns) }
    }
}

/// Whether enough moves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// When enough had moved last, and the bytes since.
    pub(super) moved_ns: u64,
    moved_bytes: u64,
}

impl Pace {
    /// Of a transfer that begins.
    pub(super) fn begin(now_ns: u64) -> Self {
        Self { moved_ns: now_ns, moved_bytes: 0 }
    }

    pub(crate) fn moved(&mut self, bytes: u64, now_ns: u64, stall_ns: u64) {
        self.moved_bytes = self.moved_bytes.saturating_add(bytes);
        let enough = u128::from(stall_ns) * u128::from(RATE_MIN) / 1_000_000_000;
        if self.moved_bytes > 0 && u128::from(self.moved_bytes) >= enough {
            self.moved_bytes = 0;
            self.moved_ns = now_ns;
        }
    }

    /// How much time is left of a transfer that began at `started_ns`, or which limit is over.
    pub(crate) fn left(
        &self,
        now_ns: u64,
        started_ns: u64,
        patience: Patience,
    ) -> Result<Duration, TransferError> {
        let ms = |ns: u64| ns / 1_000_000;
        let total = patience.deadline_ns.map(|total| (total, now_ns.saturating_sub(started_ns)));
        if let Some((total, taken)) = total
            && taken >= total
        {
            return Err(TransferError::Deadline(ms(total)));
        }
        let stall = patience.stall_ns;
        let still = now_ns.saturating_sub(self.moved_ns);
        if still >= stall {
            return Err(TransferError::Stalled(ms(stall)));
        }
        let left = total.map_or(u64::MAX, |(total, taken)| total - taken).min(stall - still);
        Ok(Duration::from_nanos(left))
    }
}
