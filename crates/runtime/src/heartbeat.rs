//! Whether the process at the other end of a region is alive.

use std::time::{Duration, Instant};

/// Notices that another process's heartbeat stands still. Silence is added up in steps of limited length, so that a process
/// that was itself suspended does not take its own pause for the other's.
pub struct HeartbeatMonitor {
    limit: Duration,
    last: u64,
    silent: Duration,
    looked: Instant,
}

impl HeartbeatMonitor {
    /// The other process is lost after `limit` without a heartbeat; call [`Self::lost`] at least four times in that time.
    pub fn new(limit: Duration, heartbeat: u64) -> Self {
        Self { limit, last: heartbeat, silent: Duration::ZERO, looked: Instant::now() }
    }

    /// Takes the current heartbeat; returns whether the other process is lost.
    pub fn lost(&mut self, heartbeat: u64) -> bool {
        let now = Instant::now();
        let step = (now - std::mem::replace(&mut self.looked, now)).min(self.limit / 2);
        if std::mem::replace(&mut self.last, heartbeat) == heartbeat {
            self.silent += step;
        } else {
            self.silent = Duration::ZERO;
        }
        self.silent >= self.limit
    }
}
