//! Steps that may hang: which of them are slow, and whose no more may start.
//!
//! A slow step holds a thread and one of [`SLOW_MAX`] places. A caller whose files hang must not take the places of others: a caller has at
//! most [`OF_CALLER_MAX`], the callers of a tenant have at most [`OF_TENANT_MAX`] together, and the last place is for a caller and a tenant that have none.
//! Steps of one caller that become slow at the same time count as no more than these. What the engine's own process asks for without a tenant is not limited.

use super::{EntryId, Share};

/// Slow steps at a time; while there are as many, no further step that may hang starts.
pub const SLOW_MAX: usize = 16;
/// Those of one caller.
pub const OF_CALLER_MAX: usize = 6;
/// Those of the callers of one tenant, and of the callers without a tenant.
pub const OF_TENANT_MAX: usize = 14;
/// Slow steps of callers that have gone, which take no place; further ones do. Each holds a thread until the host kernel returns.
pub const GONE_MAX: usize = 64;

/// Who has asked for a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Who {
    tenant: u32,
    /// 0: the engine's own process.
    caller: u64,
}

impl Who {
    pub(super) fn new(share: Share, caller: u64) -> Self {
        Self { tenant: share.tenant, caller }
    }

    /// Whether it is this caller, which is not the engine's own process.
    pub(super) fn is_of(self, caller: u64) -> bool {
        self.caller == caller && caller != 0
    }

    /// Whether it counts as one that the operator trusts with all places.
    fn is_trusted(self) -> bool {
        self == Self::default()
    }
}

/// A step that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) id: EntryId,
    pub(super) who: Who,
    /// Its caller has gone.
    pub(super) gone: bool,
}

/// Whose steps that may hang do not start at a moment.
#[derive(Debug, Default)]
pub(super) struct Limits {
    all: bool,
    /// Those with a place already, if one is left.
    has_one_left: bool,
    /// Each with its slow steps.
    callers: Vec<(Who, usize)>,
    tenants: Vec<(u32, usize)>,
}

impl Limits {
    /// Of these slow steps.
    pub(super) fn of(slow: &[Step]) -> Self {
        let mut limits = Self::default();
        if slow.is_empty() {
            return limits;
        }
        let (mut trusted, mut gone) = (0, 0);
        for step in slow {
            if step.gone && gone < GONE_MAX {
                gone += 1;
            } else if step.who.is_trusted() {
                trusted += 1;
            } else {
                match limits.callers.iter_mut().find(|(who, _)| *who == step.who) {
                    Some((_, count)) => *count += 1,
                    None => limits.callers.push((step.who, 1)),
                }
            }
        }
        for (who, count) in &limits.callers {
            let count = if who.caller == 0 { *count } else { (*count).min(OF_CALLER_MAX) };
            match limits.tenants.iter_mut().find(|(tenant, _)| *tenant == who.tenant) {
                Some((_, all)) => *all += count,
                None => limits.tenants.push((who.tenant, count)),
            }
        }
        let taken = limits.tenants.iter().map(|(_, count)| (*count).min(OF_TENANT_MAX));
        let taken = trusted + taken.sum::<usize>();
        limits.all = taken >= SLOW_MAX;
        limits.has_one_left = taken + 1 >= SLOW_MAX;
        limits
    }

    /// Whether a step of this one that may hang does not start now.
    pub(super) fn hold(&self, who: Who) -> bool {
        if self.all || who.is_trusted() {
            return self.all;
        }
        let of = |known: Option<usize>| known.unwrap_or(0);
        let own = of(self.callers.iter().find(|(of, _)| *of == who).map(|(_, count)| *count));
        let tenant = self.tenants.iter().find(|(tenant, _)| *tenant == who.tenant);
        let tenant = of(tenant.map(|(_, count)| *count));
        let most = if who.caller == 0 { OF_TENANT_MAX } else { OF_CALLER_MAX };
        if mutants::on("one_caller_takes_all_places") {
            return false;
        }
        own >= most || tenant >= OF_TENANT_MAX || (self.has_one_left && own + tenant > 0)
    }

    /// Whether there is nothing to look at.
    pub(super) fn are_none(&self) -> bool {
        !self.all && self.callers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(of: &[(u32, u64, usize)]) -> Vec<Step> {
        let all = of.iter().flat_map(|&(tenant, caller, count)| {
            let who = Who { tenant, caller };
            std::iter::repeat_n(Step { id: EntryId::from_bits(0), who, gone: false }, count)
        });
        all.collect()
    }

    fn held(slow: &[Step], tenant: u32, caller: u64) -> bool {
        Limits::of(slow).hold(Who { tenant, caller })
    }

    #[test]
    fn places_are_divided_among_callers_and_tenants() {
        let slow = steps(&[(0, 1, OF_CALLER_MAX - 1)]);
        assert!(!held(&slow, 0, 1));
        let slow = steps(&[(0, 1, OF_CALLER_MAX)]);
        assert!(held(&slow, 0, 1) && !held(&slow, 0, 2) && !held(&slow, 0, 0));
        // Those that became slow together count as the most that one may have.
        let slow = steps(&[(0, 1, 100)]);
        assert!(held(&slow, 0, 1) && !held(&slow, 0, 2) && !held(&slow, 1, 3));
        // A tenant, with as many callers as it likes.
        let slow = steps(&[(1, 1, 6), (1, 2, 6), (1, 3, 1)]);
        assert!(!held(&slow, 1, 4));
        let slow = steps(&[(1, 1, 6), (1, 2, 6), (1, 3, 2)]);
        assert!(held(&slow, 1, 4) && !held(&slow, 2, 5) && !held(&slow, 0, 6));
        // The last place is for one that has none.
        let slow = steps(&[(1, 1, 6), (1, 2, 6), (1, 3, 2), (2, 5, 1)]);
        assert!(held(&slow, 2, 5) && held(&slow, 2, 6) && !held(&slow, 3, 7) && !held(&slow, 0, 0));
        let slow = steps(&[(1, 1, 6), (1, 2, 6), (1, 3, 2), (2, 5, 1), (3, 7, 1)]);
        assert!(held(&slow, 3, 8) && held(&slow, 4, 9) && held(&slow, 0, 0));
        // The engine's own process.
        let slow = steps(&[(0, 0, SLOW_MAX - 1)]);
        assert!(!held(&slow, 0, 0) && !held(&slow, 0, 1));
        assert!(held(&steps(&[(0, 0, SLOW_MAX)]), 0, 0));
        assert!(Limits::of(&[]).are_none());
    }

    #[test]
    fn steps_of_callers_that_have_gone_take_no_place() {
        let mut slow = steps(&[(0, 1, 40)]);
        slow.iter_mut().for_each(|step| step.gone = true);
        assert!(!held(&slow, 0, 1) && !held(&slow, 0, 2));
        // But for a number of threads that never come back.
        let mut slow: Vec<Step> = (0..100).flat_map(|caller| steps(&[(0, caller, 1)])).collect();
        slow.iter_mut().for_each(|step| step.gone = true);
        assert!(held(&slow, 0, 1000));
    }
}
