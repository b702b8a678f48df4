//! How a worker learns of datagrams at its UDP ports.
//!
//! A worker with one or two ports *asks* each of them in every poll: receiving is the readiness check. An empty receive call costs a
//! system call, so with more ports they are in the epoll set, which is one call for all of them. The host kernel then informs the set of
//! each datagram, which its sender pays for (50 ns, and a lock that all senders to the worker share). So a port that has had datagrams in
//! [`CREDIT_MAX`] polls in a row leaves the set and is asked, until too many receives find nothing.
//!
//! Entries in the set are level-triggered: a port is reported in each poll until it is empty, whether it was read, in part, or not at all.
//! A port that arrives in the set while it has datagrams is reported as well. Errors of a socket are reported as datagrams are, and a
//! receive clears them.

use std::os::fd::{AsFd, BorrowedFd};

use wire::nic::{Event, PortIndex};

use super::Port;
use super::poller::{Poller, Source};

/// A worker with at most this many ports asks each of them in every poll.
const ALWAYS_ASKED: usize = 2;
/// A port in the epoll set is asked after receives that found something in this many polls in a row.
const CREDIT_MAX: u8 = 16;
/// Finds that outweigh one empty receive of a port that is asked: it stays so while four of five find something.
const EMPTY_COSTS: u8 = 4;
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
    Asked,
    InSet,
}

/// How one port is watched.
#[derive(Debug, Default)]
pub(super) struct Watch {
    place: Place,
    /// In the set: polls in a row with a receive that found something. Asked: what is left of them.
    credit: u8,
    /// The poll of the last one.
    found_in: u32,
    /// Datagrams since the last look at the number of dropped ones.
    unchecked: usize,
}

impl Watch {
    /// A port in the set: after a receive that found something, in poll `number`, whether it should be asked.
    fn gain(&mut self, number: u32) -> bool {
        let in_row = number.wrapping_sub(self.found_in) <= 1;
        self.credit = if in_row { self.credit + 1 } else { 1 };
        self.found_in = number;
        self.credit >= CREDIT_MAX
    }

    /// A port that is asked: after a receive, whether it should be in the set.
    fn spend(&mut self, found: bool) -> bool {
        self.credit = match found {
            true => CREDIT_MAX.min(self.credit + 1),
            false => self.credit.saturating_sub(EMPTY_COSTS),
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
            self.ask(index, &mut udp.watch, udp.socket.as_fd(), poller);
            self.arrange(ports, poller);
        }
    }

    /// Watches a port no longer.
    pub(super) fn remove(&mut self, index: PortIndex, ports: &mut [Port], poller: &mut Poller) {
        if let Some(Port::Udp(udp)) = ports.get_mut(usize::from(index)) {
            self.take_out(index, &mut udp.watch, udp.socket.as_fd(), poller);
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
            let socket = udp.socket.as_fd();
            match udp.watch.place {
                Place::InSet if few && !mutants::on("keep_few_ports_in_the_set") => {
                    self.ask(index, &mut udp.watch, socket, poller)
                }
                Place::Asked if !few && udp.watch.credit == 0 => {
                    self.put_in_set(index, &mut udp.watch, socket, poller);
                }
                _ => {}
            }
        }
    }

    fn ask(
        &mut self,
        index: PortIndex,
        watch: &mut Watch,
        socket: BorrowedFd<'_>,
        poller: &mut Poller,
    ) {
        self.take_out(index, watch, socket, poller);
        watch.place = Place::Asked;
        poller.watch_sleeping(socket);
        self.asked.push(index);
    }

    fn put_in_set(
        &mut self,
        index: PortIndex,
        watch: &mut Watch,
        socket: BorrowedFd<'_>,
        poller: &mut Poller,
    ) {
        if poller.watch(socket, Source::Datagrams(index)).is_err() {
            // The host kernel takes no more entries: the port is asked as before, and this is tried again later.
            watch.credit = CREDIT_MAX;
            return;
        }
        self.take_out_of_asked(index, poller);
        (watch.place, watch.credit) = (Place::InSet, 0);
        self.in_set += 1;
    }

    fn take_out(
        &mut self,
        index: PortIndex,
        watch: &mut Watch,
        socket: BorrowedFd<'_>,
        poller: &mut Poller,
    ) {
        match std::mem::take(&mut watch.place) {
            Place::None => {}
            Place::Asked => self.take_out_of_asked(index, poller),
            Place::InSet => {
                poller.forget(socket);
                self.in_set -= 1;
            }
        }
    }

    fn take_out_of_asked(&mut self, index: PortIndex, poller: &mut Poller) {
        if let Some(position) = self.asked.iter().position(|asked| *asked == index) {
            self.asked.swap_remove(position);
            poller.forget_sleeping(position);
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
            Place::Asked => {
                let is_spent = self.len() > ALWAYS_ASKED && watch.spend(found);
                if is_spent {
                    self.put_in_set(index, watch, socket, poller);
                }
                is_spent
            }
            Place::InSet => {
                watch.unchecked += datagrams;
                let is_due = !found || used < most && watch.unchecked >= DATAGRAMS_PER_DROP_CHECK;
                if is_due {
                    watch.unchecked = 0;
                }
                if found && watch.gain(self.poll) {
                    self.ask(index, watch, socket, poller);
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

    /// A poll begins that may sleep: a worker that sleeps needs no ports that are asked.
    pub(super) fn begin_sleep(&mut self) {
        self.poll = self.poll.wrapping_add(2);
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
