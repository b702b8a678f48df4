//! Whether enough moves: the stall time and the deadline of a transfer.

use std::time::Duration;

use crate::command::error::TransferError;
use crate::command::limits::RATE_MIN;
use crate::command::pipeline::TimeLimits;

/// Watches the bytes of a transfer against its time limits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StallTimer {
    /// When enough had moved last, and the bytes since.
    pub(crate) moved_ns: u64,
    moved_bytes: u64,
}

impl StallTimer {
    /// Of a transfer that begins.
    pub(crate) fn begin(now_ns: u64) -> Self {
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
        time_limits: TimeLimits,
    ) -> Result<Duration, TransferError> {
        let ms = |ns: u64| ns / 1_000_000;
        let total = time_limits.deadline_ns.map(|total| (total, now_ns.saturating_sub(started_ns)));
        if let Some((total, taken)) = total
            && taken >= total
        {
            return Err(TransferError::Deadline(ms(total)));
        }
        let stall = time_limits.stall_ns;
        let still = now_ns.saturating_sub(self.moved_ns);
        if still >= stall {
            return Err(TransferError::Stalled(ms(stall)));
        }
        let left = total.map_or(u64::MAX, |(total, taken)| total - taken).min(stall - still);
        Ok(Duration::from_nanos(left))
    }
}
