//! How a worker learns of datagrams at its UDP ports.
//!
//! A worker with one or two ports *asks* each of them in every poll: receiving is the readiness check. An empty receive call costs a
//! system call, so with more ports they are in the epoll set, which is one call for all of them. But an event of the set costs more than a
//! receive call, and the host kernel informs the set of each datagram, which its sender pays for (50 ns, and a lock that all senders
//! to the worker share). So some ports are asked all the same: those that have had datagrams in [`DENSE_POLLS`] polls in a row, and
//! [`ALWAYS_ASKED`] others that have had some every few polls, as one does whose client waits for each answer. They return to the set when
//! receives find nothing.
//!
//! Entries in the set are level-triggered: a port is reported in each poll until it is empty, whether it was read, in part, or not at all.
//! A port that arrives in the set while it has datagrams is reported as well. Errors of a socket are reported as datagrams are, and a
//! receive clears them.

use std::os::fd::{AsFd, BorrowedFd};

use wire::nic::{Event, PortIndex};

use super::Port;
use super::poller::{Poller, Source};

/// A worker with at most this many ports asks each of them in every poll, and one with more asks as many that have datagrams now and then.
const ALWAYS_ASKED: usize = 2;
/// A port in the epoll set is asked if it had datagrams in this many polls in a row …
const DENSE_POLLS: u8 = 16;
/// … while four of five receives find something: an empty one outweighs this many others.
const DENSE_EMPTY: u8 = 4;
/// A port has datagrams *now and then* if there are this many polls from one with some to the next at most …
const NEAR_POLLS: u32 = 16;
/// … this many times in a row. It does until twice as many receives in a row find nothing.
const NEAR_TIMES: u8 = 4;
const NEAR_EMPTY: u8 = 2 * NEAR_POLLS as u8;
/// After this many polls one of the ports in the set is reported without a cause, each in turn: an empty receive looks at the number of
/// datagrams that the host kernel dropped.
const VISIT_POLLS: u32 = 1024;
/// A port in the set that is empty after this many datagrams is asked for that number at once.
const DATAGRAMS_PER_DROP_CHECK: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// It is not watched: it is stopped or paused.
    #[default]
    None,
    InSet,
    /// It is asked, and one of the few that need not have datagrams each time.
    Near,
    /// It is asked as long as it has datagrams nearly each time.
    Dense,
}

/// How one port is watched.
#[derive(Debug, Default)]
pub(super) struct Watch {
    place: Place,
    /// In the set: polls in a row that found something. Asked: it returns to the set at 0.
    credit: u8,
    /// In the set: polls in a row that found something a few polls after the one before.
    near: u8,
    /// The poll of the last one.
    found_in: u32,
    /// Datagrams since the last look at the number of dropped ones.
    unchecked: usize,
}

impl Watch {
    /// A port in the set, after a receive that found something in poll `number`: where it should be.
    fn gain(&mut self, number: u32) -> Place {
        let polls = number.wrapping_sub(self.found_in);
        self.credit = if polls <= 1 { self.credit + 1 } else { 1 };
        self.near = if polls <= NEAR_POLLS { NEAR_TIMES.min(self.near + 1) } else { 0 };
        self.found_in = number;
        match () {
            () if self.credit >= DENSE_POLLS => Place::Dense,
            () if self.near >= NEAR_TIMES => Place::Near,
            () => Place::InSet,
        }
    }

    /// A port that is asked, after a receive: whether it should return to the set.
    fn spend(&mut self, found: bool) -> bool {
        self.credit = match (self.place, found) {
            (Place::Dense, true) => DENSE_POLLS.min(self.credit + 1),
            (Place::Dense, false) => self.credit.saturating_sub(DENSE_EMPTY),
            (_, true) => NEAR_EMPTY,
            (_, false) => self.credit.saturating_sub(1),
        };
        self.credit == 0
    }
}

/// The UDP ports that are watched: those that are neither stopped nor paused.
#[derive(Default)]
pub(super) struct WatchedPorts {
    /// Those that are asked, in the order of the poller's sleepers.
    asked: Vec<PortIndex>,
    in_set: usize,
    /// Number of those that are [`Place::Near`].
    near: usize,
    /// Number of the current poll.
    poll: u32,
    /// The poll of the last visit, and the index behind that of the visited port.
    visited_in: u32,
    visited: usize,
}

impl WatchedPorts {
    fn len(&self) -> usize {
        self.asked.len() + self.in_set
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ports that are asked, in the order of the poller's sleepers.
    pub(super) fn asked(&self) -> &[PortIndex] {
        &self.asked
    }

    /// Whether there is a port in the epoll set.
    #[inline]
    pub(super) fn has_set(&self) -> bool {
        self.in_set > 0
    }

    /// Begins to watch a port, unless it is watched.
    pub(super) fn add(&mut self, index: PortIndex, ports: &mut [Port], poller: &mut Poller) {
        if let Some(Port::Udp(udp)) = ports.get_mut(usize::from(index))
            && udp.watch.place == Place::None
        {
            udp.watch = Watch::default();
            self.put(index, &mut udp.watch, Place::Near, udp.socket.as_fd(), poller);
            self.arrange(ports, poller);
        }
    }

    /// Watches a port no longer.
    pub(super) fn remove(&mut self, index: PortIndex, ports: &mut [Port], poller: &mut Poller) {
        if let Some(Port::Udp(udp)) = ports.get_mut(usize::from(index)) {
            self.put(index, &mut udp.watch, Place::None, udp.socket.as_fd(), poller);
            self.arrange(ports, poller);
        }
    }

    /// After a change: few ports are all asked, and of many only those with credit are.
    fn arrange(&mut self, ports: &mut [Port], poller: &mut Poller) {
        // For all of them, so that a poll allocates nothing.
        self.asked.reserve(self.in_set);
        poller.reserve_sleepers(self.len());
        let few = self.len() <= ALWAYS_ASKED;
        for (index, port) in (0..).zip(ports) {
            let Port::Udp(udp) = port else { continue };
            let (watch, socket) = (&mut udp.watch, udp.socket.as_fd());
            match watch.place {
                Place::InSet if few && !mutants::on("keep_few_ports_in_the_set") => {
                    self.put(index, watch, Place::Near, socket, poller);
                }
                Place::Near | Place::Dense if !few && watch.credit == 0 => {
                    self.put(index, watch, Place::InSet, socket, poller);
                }
                _ => {}
            }
        }
    }

    /// Moves a port.
    fn put(
        &mut self,
        index: PortIndex,
        watch: &mut Watch,
        to: Place,
        socket: BorrowedFd<'_>,
        poller: &mut Poller,
    ) {
        let is_watched =
            to == Place::InSet && poller.watch(socket, Source::Datagrams(index)).is_ok();
        if to == Place::InSet && !is_watched {
            // The host kernel takes no more entries: the port is asked as before, and this is tried again later.
            watch.credit = NEAR_EMPTY;
            return;
        }
        match watch.place {
            Place::None => {}
            Place::InSet => {
                poller.forget(socket);
                self.in_set -= 1;
            }
            Place::Near | Place::Dense => {
                self.near -= usize::from(watch.place == Place::Near);
                if let Some(position) = self.asked.iter().position(|asked| *asked == index) {
                    self.asked.swap_remove(position);
                    poller.forget_sleeping(position);
                }
            }
        }
        watch.place = to;
        match to {
            Place::None => {}
            Place::InSet => {
                self.in_set += 1;
                (watch.credit, watch.near) = (0, 0);
            }
            Place::Near | Place::Dense => {
                self.near += usize::from(to == Place::Near);
                self.asked.push(index);
                poller.watch_sleeping(socket);
            }
        }
    }

    /// After a receive call that used `used` buffers of `most` for `datagrams`. Returns whether it is time to look at how many datagrams
    /// the host kernel has dropped.
    #[inline]
    pub(super) fn note_received(
        &mut self,
        (index, watch, socket): (PortIndex, &mut Watch, BorrowedFd<'_>),
        poller: &mut Poller,
        (used, most, datagrams): (usize, usize, usize),
    ) -> bool {
        let found = used > 0;
        match watch.place {
            Place::None => false,
            Place::Near | Place::Dense => {
                let is_spent = self.len() > ALWAYS_ASKED && watch.spend(found);
                if is_spent {
                    self.put(index, watch, Place::InSet, socket, poller);
                }
                is_spent
            }
            Place::InSet => {
                watch.unchecked += datagrams;
                let is_due = !found || used < most && watch.unchecked >= DATAGRAMS_PER_DROP_CHECK;
                if is_due {
                    watch.unchecked = 0;
                }
                let to = if found { watch.gain(self.poll) } else { Place::InSet };
                if to == Place::Dense || to == Place::Near && self.near < ALWAYS_ASKED {
                    watch.credit = if to == Place::Dense { DENSE_POLLS } else { NEAR_EMPTY };
                    self.put(index, watch, to, socket, poller);
                }
                is_due
            }
        }
    }

    /// A poll begins that does not sleep: reports a port if one is to be visited.
    #[inline]
    pub(super) fn begin_poll(&mut self, ports: &[Port], events: &mut Vec<Event>) {
        self.poll = self.poll.wrapping_add(1);
        if self.poll.wrapping_sub(self.visited_in) >= VISIT_POLLS && self.has_set() {
            self.visit(ports, events);
        }
    }

    /// A poll begins that may sleep. It ends a row: a worker that sleeps gains nothing by asking ports.
    pub(super) fn begin_sleep(&mut self) {
        self.poll = self.poll.wrapping_add(NEAR_POLLS + 1);
    }

    #[cold]
    fn visit(&mut self, ports: &[Port], events: &mut Vec<Event>) {
        self.visited_in = self.poll;
        let is_in_set =
            |port: &Port| matches!(port, Port::Udp(udp) if udp.watch.place == Place::InSet);
        let next = |from: usize| (from..ports.len()).find(|at| is_in_set(&ports[*at]));
        if let Some(at) = next(self.visited).or_else(|| next(0)) {
            self.visited = at + 1;
            events.push(Event::Datagrams(at as PortIndex));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a port in the set is after `times` receives that found something, `gap` polls apart.
    fn after(times: u32, gap: u32) -> Place {
        let mut watch = Watch { place: Place::InSet, found_in: u32::MAX - 100, ..Watch::default() };
        (0..times).fold(Place::InSet, |_, time| watch.gain((time * gap).wrapping_sub(50)))
    }

    #[test]
    fn a_port_is_asked_if_its_datagrams_are_few_polls_apart() {
        assert_eq!([4, 5, 15, 16].map(|times| after(times, 1)), {
            use Place::*;
            [InSet, Near, Near, Dense]
        });
        assert_eq!(
            [4, 5, 100].map(|times| after(times, 2)),
            [Place::InSet, Place::Near, Place::Near]
        );
        assert_eq!([4, 5, 100].map(|times| after(times, NEAR_POLLS))[1..], [Place::Near; 2]);
        assert_eq!(after(1000, NEAR_POLLS + 1), Place::InSet);
    }

    #[test]
    fn a_port_returns_to_the_set_when_receives_find_nothing() {
        let kept = |place, credit, found: &[bool]| {
            let mut watch = Watch { place, credit, ..Watch::default() };
            found.iter().cycle().take(1000).position(|found| watch.spend(*found))
        };
        let near = |found: &[bool]| kept(Place::Near, NEAR_EMPTY, found);
        let dense = |found: &[bool]| kept(Place::Dense, DENSE_POLLS, found);
        let every = |polls: usize| {
            let mut found = vec![false; polls];
            found[0] = true;
            found
        };
        assert_eq!((near(&[false]), dense(&[false])), (Some(31), Some(3)));
        assert_eq!((near(&every(32)), near(&every(33))), (None, Some(32)));
        assert_eq!(dense(&[true, true, true, true, false]), None);
        assert!(dense(&[true, true, true, false]).is_some());
    }
}
