//! Connections whose tenant has spent its part of a round, or is over a limit. A turn looks at a few of them, however many there are.

use std::collections::VecDeque;

use wire::nic::StreamKey;

/// Connections of a service that may have their turn in one turn of the worker.
const RELEASED_MAX: usize = 64;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// By service, in the order in which they came, with their generations.
    by_service: Vec<VecDeque<(StreamKey, u32)>>,
    /// Services with some.
    waiting: Vec<u16>,
    /// Connections that were released in this turn and have to wait again, of one service after the other.
    returned: Vec<(u16, (StreamKey, u32))>,
    /// Some wait for nothing but another turn.
    is_due: bool,
}

impl Held {
    pub(super) fn make_room_for(&mut self, service: usize) {
        let count = self.by_service.len().max(service + 1);
        self.by_service.resize_with(count, VecDeque::new);
        self.waiting.reserve(count - self.waiting.len());
        self.returned.reserve(count * RELEASED_MAX - self.returned.len());
    }

    pub(super) fn services(&self) -> u16 {
        self.by_service.len() as u16
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether another turn may release some, without an event.
    pub(super) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Moves connections behind `listed`: a few of each service whose tenant need not wait.
    pub(super) fn release(
        &mut self,
        listed: &mut Vec<StreamKey>,
        mut allows: impl FnMut(u16) -> bool,
    ) {
        let Self { by_service, waiting, .. } = self;
        waiting.retain(|service| {
            let held = &mut by_service[usize::from(*service)];
            if allows(*service) {
                listed.extend(held.drain(..held.len().min(RELEASED_MAX)).map(|(key, _)| key));
            }
            !held.is_empty()
        });
    }

    /// A connection waits: in front of the others if it was released in this turn. `is_open` says whether one that waits is still there.
    pub(super) fn hold(
        &mut self,
        service: u16,
        key: (StreamKey, u32),
        was_released: bool,
        mut is_open: impl FnMut(StreamKey, u32) -> bool,
    ) {
        if was_released {
            return self.returned.push((service, key));
        }
        let held = &mut self.by_service[usize::from(service)];
        if held.is_empty() && !self.waiting.contains(&service) {
            self.waiting.push(service);
        }
        if held.len() == held.capacity() {
            // Connections that were closed meanwhile.
            held.retain(|(key, generation)| is_open(*key, *generation));
        }
        held.push_back(key);
    }

    /// Puts back what was released. `is_shed`: the tenant of a service is over a limit, and the schedule knows until when.
    pub(super) fn end_turn(&mut self, is_shed: impl Fn(u16) -> bool) {
        while let Some((service, key)) = self.returned.pop() {
            let held = &mut self.by_service[usize::from(service)];
            if !self.waiting.contains(&service) {
                self.waiting.push(service);
            }
            held.push_front(key);
        }
        self.is_due = self.waiting.iter().any(|service| !is_shed(*service));
    }

    /// Takes all of a service.
    pub(super) fn take_all(&mut self, service: u16) -> impl Iterator<Item = StreamKey> + '_ {
        self.waiting.retain(|other| *other != service);
        self.by_service
            .get_mut(usize::from(service))
            .into_iter()
            .flat_map(|held| held.drain(..))
            .map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_releases_a_few_and_keeps_their_order() {
        let mut held = Held::default();
        held.make_room_for(1);
        for key in 0..200 {
            held.hold(1, (key, 0), false, |_, _| true);
        }
        held.end_turn(|_| false);
        assert!(held.is_due() && !held.is_empty());
        let mut listed = vec![1000];
        held.release(&mut listed, |_| false);
        assert_eq!(listed, [1000], "the tenant waits");
        held.release(&mut listed, |service| service == 1);
        assert_eq!((listed[1], listed.len()), (0, 1 + RELEASED_MAX));
        // Ten have their turn; the others come first in the next one.
        listed[11..].iter().for_each(|key| held.hold(1, (*key, 0), true, |_, _| true));
        held.end_turn(|_| true);
        assert!(!held.is_due(), "it waits for its limit");
        listed.clear();
        held.release(&mut listed, |_| true);
        assert_eq!((listed[0], listed[RELEASED_MAX - 1]), (10, 73));
        assert_eq!(held.take_all(1).collect::<Vec<_>>(), (74..200).collect::<Vec<_>>());
        assert!(held.is_empty());
        held.release(&mut listed, |_| true);
        assert_eq!(listed.len(), RELEASED_MAX);
    }

    #[test]
    fn connections_that_are_gone_make_room() {
        let mut held = Held::default();
        held.make_room_for(0);
        for key in 0..10_000 {
            held.hold(0, (key % 8, key), false, |_, generation| generation + 8 > key);
        }
        assert!(held.take_all(0).count() < 100, "closed ones are forgotten");
    }
}
