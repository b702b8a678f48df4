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
        if lane.entries.is_empty() {
            lane.at = lane.at.max(now);
        }
        lane.entries.push_back((id, share));
    }

    /// The next one.
    pub(super) fn pop_front(&mut self) -> Option<EntryId> {
        if let Some(id) = self.fresh.pop_front() {
            return Some(id);
        }
        let waiting = self.lanes.iter_mut().filter(|lane| !lane.entries.is_empty());
        let lane = waiting.min_by_key(|lane| lane.at)?;
        let (id, share) = lane.entries.pop_front()?;
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
        let order: Vec<_> = std::iter::from_fn(|| turns.pop_front()).collect();
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
            let next = turns.pop_front().unwrap().to_bits();
            served[next as usize] += 1;
            turns.push_back(id(next), share(next));
        }
        assert!((2990..=3010).contains(&served[0]), "{served:?}");
        assert!(served[1..].iter().all(|count| (120..=130).contains(count)), "{served:?}");
    }

    #[test]
    fn who_waited_for_nothing_has_saved_no_turns() {
        let mut turns = Turns::default();
        let [one, two] = [1, 2].map(|tenant| Share { tenant, weight: 1 });
        for _ in 0..1000 {
            turns.push_back(id(1), one);
            assert_eq!(turns.pop_front(), Some(id(1)));
        }
        for number in 0..10 {
            turns.push_back(id(10 + number), two);
            turns.push_back(id(30 + number), one);
        }
        let first: Vec<_> = (0..10).filter_map(|_| turns.pop_front()).collect();
        let of_two = first.iter().filter(|id| id.to_bits() < 30).count();
        assert_eq!(of_two, 5, "{first:?}");
    }
}
