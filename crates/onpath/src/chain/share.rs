//! The part of a worker's time that functions with a limit may take: those of users who are not the operator.
//!
//! Their calls are added up over a second, for all of them on a chain together, so that a user gains nothing by attaching several there. A user of several services has its part on the chain of each. As soon as they have taken more
//! than their part of it, the one that took most is *suspended*: it is not called, and its messages are treated as [`OnFailure`](super::OnFailure) says. It
//! goes on after a second; if it takes too much again, after twice as long each time, up to a minute. A second within the limit forgets that.
//!
//! Tenants that share a worker get their parts of it by deficits (the engine's `schedule.rs`), whatever this limit is. This one holds within a tenant as well, and for a tenant that is
//! alone.

use super::{Chain, Link};

/// Over how long calls are added up.
const WINDOW_NS: u64 = 1_000_000_000;
/// For how long a function is suspended, at first and at most.
const SUSPENDED_NS_MIN: u64 = 1_000_000_000;
const SUSPENDED_NS_MAX: u64 = 60_000_000_000;

/// What one function may take, and has taken.
pub(super) struct Share {
    /// The part of the time, in percent.
    percent: u32,
    /// Time in calls since the chain began to count.
    spent_ns: u64,
    /// Until when it is suspended, or was until it was noticed; 0: it is not.
    until_ns: u64,
    /// For how long it was suspended last; 0: it was not, or a second within the limit has passed since.
    pause_ns: u64,
    /// It was suspended until now: what was counted meanwhile says nothing about it.
    resumed: bool,
}

impl Share {
    pub(super) fn new(percent: u32) -> Self {
        Self { percent, spent_ns: 0, until_ns: 0, pause_ns: 0, resumed: false }
    }

    pub(super) fn charge(&mut self, took_ns: u64) {
        self.spent_ns += took_ns;
    }

    /// Whether [`Link::waits`] has to be asked.
    pub(super) fn was_suspended(&self) -> bool {
        self.until_ns > 0
    }
}

impl Link {
    /// Whether it is suspended.
    #[cold]
    pub(super) fn waits(&mut self, now_ns: u64) -> bool {
        let Some(share) = &mut self.share else { return false };
        if now_ns < share.until_ns {
            return true;
        }
        (share.until_ns, share.resumed) = (0, true);
        false
    }

    #[cold]
    fn suspend(&mut self, now_ns: u64, percent: u64) {
        let Some(share) = &mut self.share else { return };
        let least = SUSPENDED_NS_MIN;
        share.pause_ns = (2 * share.pause_ns).clamp(least, SUSPENDED_NS_MAX);
        share.until_ns = now_ns + share.pause_ns;
        let why = format!(
            "suspended for {} s: users' functions of its chain took {percent} % of a worker, and may take {} % (engine.user_function_percent)",
            share.pause_ns / 1_000_000_000,
            share.percent
        );
        self.counters.suspensions.one();
        self.note(why);
    }
}

impl Chain {
    /// After a batch: suspends a function if those with a limit have taken too much.
    pub(super) fn settle_shares(&mut self) {
        let (mut now_ns, mut spent_ns, mut percent, mut resumed) = (0, 0, 100, false);
        for link in &mut self.links {
            if let Some(share) = &mut link.share {
                now_ns = now_ns.max(link.now_ns);
                spent_ns += share.spent_ns;
                percent = percent.min(share.percent);
                resumed |= std::mem::take(&mut share.resumed);
            }
        }
        let counted_ns = now_ns.saturating_sub(self.counted_since_ns);
        let window_ns = counted_ns.max(WINDOW_NS);
        let most_ns = window_ns / 100 * u64::from(percent);
        let is_over = spent_ns > most_ns && !resumed && !mutants::on("share_without_limit");
        if !is_over && counted_ns < WINDOW_NS && !resumed {
            return;
        }
        let of_share = |link: &Link| link.share.as_ref().map(|share| share.spent_ns);
        if is_over && let Some(most) = self.links.iter_mut().max_by_key(|link| of_share(link)) {
            most.suspend(now_ns, spent_ns / (window_ns / 100));
        }
        for share in self.links.iter_mut().filter_map(|link| link.share.as_mut()) {
            if !is_over && !resumed && share.until_ns == 0 && share.spent_ns > 0 {
                share.pause_ns = 0;
            }
            share.spent_ns = 0;
        }
        self.counted_since_ns = now_ns;
    }
}
