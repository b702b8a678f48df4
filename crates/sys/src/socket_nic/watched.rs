//! Which UDP ports a spinning poll reports.
//!
//! Receiving is the readiness check, and costs a system call of a quarter of a microsecond for each port. So where a worker has several ports,
//! those that had nothing for a while are *quiet*: they are in the epoll set, which is one call for all of them, until a datagram
//! arrives. Senders to a quiet port pay for that once, since its entry in the set reports one event and then none before it is armed again.

use wire::nic::PortIndex;

/// A worker with at most this many ports asks each of them in every poll.
const ALWAYS_ASKED: usize = 2;
/// A port is quiet after this many receives in a row that found nothing: some tens of microseconds, so that one whose client waits for an answer
/// before it asks again stays among those that are asked.
pub(super) const QUIET_AFTER: u32 = 32;

/// The UDP ports that are watched: those that are neither stopped nor paused.
#[derive(Default)]
pub(super) struct WatchedPorts {
    /// In the order of the poller's sleep set.
    all: Vec<PortIndex>,
    /// Those that are not quiet.
    asked: Vec<PortIndex>,
}

impl WatchedPorts {
    pub(super) fn add(&mut self, port: PortIndex) {
        self.all.push(port);
        // For all of them, so that a turn that wakes a quiet one up allocates nothing.
        self.asked.reserve(self.all.len() - self.asked.len());
        self.asked.push(port);
    }

    /// Returns where it was in the sleep set; later ones move up. If no port may be quiet any more, all are asked again.
    pub(super) fn remove(&mut self, port: PortIndex) -> Option<usize> {
        self.asked.retain(|asked| *asked != port);
        let position = self.all.iter().position(|watched| *watched == port)?;
        self.all.remove(position);
        if !self.may_be_quiet() {
            self.asked.clear();
            self.asked.extend_from_slice(&self.all);
        }
        Some(position)
    }

    pub(super) fn contains(&self, port: PortIndex) -> bool {
        self.all.contains(&port)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The ports, in the order of the sleep set.
    pub(super) fn all(&self) -> &[PortIndex] {
        &self.all
    }

    /// The ports that are not quiet.
    pub(super) fn asked(&self) -> &[PortIndex] {
        &self.asked
    }

    /// Whether a port may become quiet.
    #[inline]
    pub(super) fn may_be_quiet(&self) -> bool {
        self.all.len() > ALWAYS_ASKED
    }

    /// Whether there is a quiet port.
    #[inline]
    pub(super) fn has_quiet(&self) -> bool {
        self.all.len() > self.asked.len()
    }

    pub(super) fn set_quiet(&mut self, port: PortIndex) {
        self.asked.retain(|asked| *asked != port);
    }

    /// It is not quiet any more, if it is watched.
    pub(super) fn set_asked(&mut self, port: PortIndex) {
        if self.contains(port) && !self.asked.contains(&port) {
            self.asked.push(port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ports_are_never_quiet_and_waking_up_allocates_nothing() {
        let mut watched = WatchedPorts::default();
        (0..5).for_each(|port| watched.add(port));
        let room = watched.asked.capacity();
        for _ in 0..2 {
            (0..5).for_each(|port| watched.set_quiet(port));
            assert!(watched.has_quiet() && watched.asked().is_empty());
            (0..5).for_each(|port| watched.set_asked(port));
        }
        assert_eq!((watched.asked(), watched.asked.capacity()), (&[0, 1, 2, 3, 4][..], room));
        (0..5).for_each(|port| watched.set_quiet(port));
        (0..2).for_each(|port| assert_eq!(watched.remove(port), Some(0)));
        assert!(watched.has_quiet(), "three are left");
        assert_eq!(watched.remove(3), Some(1));
        assert_eq!((watched.asked(), watched.has_quiet()), (&[2, 4][..], false));
        // Its entry in the epoll set may still report it.
        watched.set_asked(4);
        assert_eq!((watched.asked(), watched.asked.capacity()), (&[2, 4][..], room));
    }
}
