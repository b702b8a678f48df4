//! Connections whose tenant has spent its part of a round, or is over a limit: those of clients, and those of proxies to their servers. A turn
//! looks at a few of them, however many there are.

use std::collections::VecDeque;

use wire::nic::StreamKey;

/// Connections of a service that may have their turn in one turn of the worker.
const RELEASED_MAX: usize = 64;

/// The key of a client's connection and its generation: another client may get the key.
pub(super) type Waiter = (StreamKey, u32);

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// By service, in the order in which they came, with their generations.
    by_service: Vec<VecDeque<Waiter>>,
    /// Services with some.
    waiting: Vec<u16>,
    /// Connections that were released in this turn and have to wait again, of one service after the other.
    returned: Vec<(u16, Waiter)>,
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

    /// Takes connections out, in the order in which they came: a few of each service whose tenant need not wait.
    pub(super) fn release(
        &mut self,
        mut allows: impl FnMut(u16) -> bool,
        mut take: impl FnMut(u16, Waiter),
    ) {
        let Self { by_service, waiting, .. } = self;
        waiting.retain(|service| {
            let held = &mut by_service[usize::from(*service)];
            if allows(*service) {
                let count = held.len().min(RELEASED_MAX);
                held.drain(..count).for_each(|waiter| take(*service, waiter));
            }
            !held.is_empty()
        });
    }

    /// A connection waits: in front of the others if it was released in this turn. `is_open` says whether one that waits is still there.
    pub(super) fn hold(
        &mut self,
        service: u16,
        waiter: Waiter,
        was_released: bool,
        mut is_open: impl FnMut(Waiter) -> bool,
    ) {
        if was_released {
            return self.returned.push((service, waiter));
        }
        let held = &mut self.by_service[usize::from(service)];
        if held.is_empty() && !self.waiting.contains(&service) {
            self.waiting.push(service);
        }
        if held.len() == held.capacity() {
            // Connections that were closed meanwhile.
            held.retain(|waiter| is_open(*waiter));
        }
        held.push_back(waiter);
    }

    /// Puts back what was released. `is_shed`: the tenant of a service is over a limit, and the schedule knows until when.
    pub(super) fn end_turn(&mut self, is_shed: impl Fn(u16) -> bool) {
        while let Some((service, waiter)) = self.returned.pop() {
            let held = &mut self.by_service[usize::from(service)];
            if !self.waiting.contains(&service) {
                self.waiting.push(service);
            }
            held.push_front(waiter);
        }
        self.is_due = self.waiting.iter().any(|service| !is_shed(*service));
    }

    /// Takes all of a service.
    pub(super) fn take_all(&mut self, service: u16) -> impl Iterator<Item = Waiter> + '_ {
        self.waiting.retain(|other| *other != service);
        self.by_service.get_mut(usize::from(service)).into_iter().flat_map(|held| held.drain(..))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Releases what may have its turn, and lists it.
    fn released(held: &mut Held, allows: impl FnMut(u16) -> bool) -> Vec<StreamKey> {
        let mut listed = Vec::new();
        held.release(allows, |_, (key, _)| listed.push(key));
        listed
    }

    #[test]
    fn a_turn_releases_a_few_and_keeps_their_order() {
        let mut held = Held::default();
        held.make_room_for(1);
        for key in 0..200 {
            held.hold(1, (key, 0), false, |_| true);
        }
        held.end_turn(|_| false);
        assert!(held.is_due() && !held.is_empty());
        assert!(released(&mut held, |_| false).is_empty(), "the tenant waits");
        let listed = released(&mut held, |service| service == 1);
        assert_eq!((listed[0], listed.len()), (0, RELEASED_MAX));
        // Ten have their turn; the others come first in the next one.
        listed[10..].iter().for_each(|key| held.hold(1, (*key, 0), true, |_| true));
        held.end_turn(|_| true);
        assert!(!held.is_due(), "it waits for its limit");
        let listed = released(&mut held, |_| true);
        assert_eq!((listed[0], listed[RELEASED_MAX - 1]), (10, 73));
        let rest: Vec<_> = held.take_all(1).map(|(key, _)| key).collect();
        assert_eq!(rest, (74..200).collect::<Vec<_>>());
        assert!(held.is_empty() && released(&mut held, |_| true).is_empty());
    }

    #[test]
    fn connections_that_are_gone_make_room() {
        let mut held = Held::default();
        held.make_room_for(0);
        for key in 0..10_000 {
            held.hold(0, (key % 8, key), false, |(_, generation)| generation + 8 > key);
        }
        assert!(held.take_all(0).count() < 100, "closed ones are forgotten");
    }
}
