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
        self.asked.push(port);
    }

    /// Returns where it was in the sleep set; later ones move up.
    pub(super) fn remove(&mut self, port: PortIndex) -> Option<usize> {
        self.asked.retain(|asked| *asked != port);
        let position = self.all.iter().position(|watched| *watched == port)?;
        self.all.remove(position);
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
