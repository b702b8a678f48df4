//! The order in which entries that wait for one device get it: tenants by their weights, those of one tenant as they came.
//!
//! Each tenant has a *lane* with the time at which it is served next, which a step moves on by one chunk divided by the tenant's weight
//! (start-time fair queueing: Goyal, Vin and Cheng, 1996). A lane that was empty begins at the time of the others, so no tenant saves up turns.

use std::collections::VecDeque;

use super::EntryId;

/// What a chunk of weight 1 costs.
const UNIT: u64 = 1 << 20;

/// Whose turn a transfer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Number of the tenant.
    pub tenant: u32,
    /// Its weight; not 0.
    pub weight: u32,
}

impl Default for Share {
    fn default() -> Self {
        Self { tenant: 0, weight: 1 }
    }
}

#[derive(Debug)]
struct Lane {
    tenant: u32,
    /// When it is served next.
    at: u64,
    entries: VecDeque<(EntryId, Share)>,
}

/// Entries that wait for a device.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Chunks that go on at once.
    fresh: VecDeque<EntryId>,
    lanes: Vec<Lane>,
    /// When the last lane was served.
    now: u64,
}

impl Turns {
    pub(super) fn len(&self) -> usize {
        self.fresh.len() + self.lanes.iter().map(|lane| lane.entries.len()).sum::<usize>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.lanes.iter().all(|lane| lane.entries.is_empty())
    }

    /// The entry whose chunk goes on at once, if there is one.
    pub(super) fn fresh(&self) -> Option<&EntryId> {
        self.fresh.front()
    }

    /// Its chunk goes on before all others.
    pub(super) fn push_front(&mut self, id: EntryId) {
        self.fresh.push_front(id);
    }

    /// It waits for its turn.
    pub(super) fn push_back(&mut self, id: EntryId, share: Share) {
        let now = self.now;
        let place = self.lanes.iter().position(|lane| lane.tenant == share.tenant);
        let place = place.unwrap_or_else(|| {
            self.lanes.push(Lane { tenant: share.tenant, at: now, entries: VecDeque::new() });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[place];
        if lane.entries.is_empty() && !mutants::on("idle_tenants_save_turns") {
            lane.at = lane.at.max(now);
        }
        lane.entries.push_back((id, share));
    }

    /// Whether one of those that wait is as asked.
    pub(super) fn any(&self, is: impl Fn(EntryId) -> bool) -> bool {
        let waiting = self.lanes.iter().flat_map(|lane| lane.entries.iter().map(|(id, _)| *id));
        self.fresh.iter().copied().chain(waiting).any(is)
    }

    /// The next one that may go on.
    pub(super) fn pop_front(&mut self, may: impl Fn(EntryId) -> bool) -> Option<EntryId> {
        if let Some(place) = self.fresh.iter().position(|id| may(*id)) {
            return self.fresh.remove(place);
        }
        let first = |lane: &Lane| lane.entries.iter().position(|(id, _)| may(*id));
        let waiting = self.lanes.iter_mut().filter_map(|lane| Some((first(lane)?, lane)));
        let (place, lane) = waiting.min_by_key(|(_, lane)| lane.at)?;
        let (id, share) = lane.entries.remove(place)?;
        self.now = lane.at;
        lane.at += UNIT / u64::from(share.weight.clamp(1, UNIT as u32));
        Some(id)
    }

    /// It waits no more.
    pub(super) fn remove(&mut self, id: EntryId) {
        self.fresh.retain(|queued| *queued != id);
        for lane in &mut self.lanes {
            lane.entries.retain(|(queued, _)| *queued != id);
        }
        // Tenants come and go; those that wait for nothing and owe nothing are forgotten.
        let now = self.now;
        self.lanes.retain(|lane| !lane.entries.is_empty() || lane.at > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> EntryId {
        EntryId::from_bits(number)
    }

    #[test]
    fn one_tenant_is_served_in_order_and_fresh_chunks_go_first() {
        let mut turns = Turns::default();
        for number in 0..5 {
            turns.push_back(id(number), Share::default());
        }
        turns.push_front(id(9));
        assert_eq!((turns.len(), turns.fresh()), (6, Some(&id(9))));
        turns.remove(id(2));
        let order: Vec<_> = std::iter::from_fn(|| turns.pop_front(|_| true)).collect();
        assert_eq!(order, [9, 0, 1, 3, 4].map(id));
        assert!(turns.is_empty());
    }

    #[test]
    fn tenants_get_turns_by_their_weights_however_many_transfers_they_have() {
        // Tenant 1 has one transfer and weight 3, tenant 2 has eight of weight 1.
        let mut turns = Turns::default();
        let share = |number: u64| match number {
            0 => Share { tenant: 1, weight: 3 },
            _ => Share { tenant: 2, weight: 1 },
        };
        (0..9).for_each(|number| turns.push_back(id(number), share(number)));
        let mut served = [0u32; 9];
        for _ in 0..4000 {
            let next = turns.pop_front(|_| true).unwrap().to_bits();
            served[next as usize] += 1;
            turns.push_back(id(next), share(next));
        }
        assert!((2990..=3010).contains(&served[0]), "{served:?}");
        assert!(served[1..].iter().all(|count| (120..=130).contains(count)), "{served:?}");
    }

    /// The turns of an engine that has run for long, of tenants that have waited before.
    #[test]
    fn who_was_idle_has_saved_no_turns() {
        let mut turns = Turns::default();
        let share = |tenant| Share { tenant, weight: 1 };
        let serve = |turns: &mut Turns, tenants: &[u32], times: usize| {
            let mut served = [0; 4];
            for tenant in tenants {
                turns.push_back(id(u64::from(*tenant)), share(*tenant));
            }
            for _ in 0..times {
                let next = turns.pop_front(|_| true).unwrap();
                let tenant = next.to_bits() as u32;
                served[tenant as usize] += 1;
                turns.push_back(next, share(tenant));
            }
            while turns.pop_front(|_| true).is_some() {}
            served
        };
        assert_eq!(serve(&mut turns, &[1, 2], 10), [0, 5, 5, 0]);
        // The second one waits for nothing meanwhile, and the third one has never waited.
        serve(&mut turns, &[1], 100_000);
        let served = serve(&mut turns, &[1, 2, 3], 30);
        assert!(served[1..].iter().all(|count| (9..=11).contains(count)), "{served:?}");
        // Nor do transfers that were cancelled while they waited.
        turns.push_back(id(2), share(2));
        turns.remove(id(2));
        serve(&mut turns, &[1, 3], 100_000);
        let served = serve(&mut turns, &[3, 2, 1], 30);
        assert!(served[1..].iter().all(|count| (9..=11).contains(count)), "{served:?}");
    }

    #[test]
    fn who_waited_for_nothing_has_saved_no_turns() {
        let mut turns = Turns::default();
        let [one, two] = [1, 2].map(|tenant| Share { tenant, weight: 1 });
        for _ in 0..1000 {
            turns.push_back(id(1), one);
            assert_eq!(turns.pop_front(|_| true), Some(id(1)));
        }
        for number in 0..10 {
            turns.push_back(id(10 + number), two);
            turns.push_back(id(30 + number), one);
        }
        let first: Vec<_> = (0..10).filter_map(|_| turns.pop_front(|_| true)).collect();
        let of_two = first.iter().filter(|id| id.to_bits() < 30).count();
        assert_eq!(of_two, 5, "{first:?}");
    }
}
