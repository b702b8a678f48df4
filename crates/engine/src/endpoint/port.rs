//! A listening address of a worker.

use std::net::SocketAddr;

use wire::nic::{Nic, PortIndex, Transport};

use crate::base::turn::Turn;
use crate::service::services::Services;

/// The service of a vacant port.
const NO_SERVICE: u16 = u16::MAX;

/// See the module documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    /// Slot of its service.
    pub(crate) service: u16,
    pub(crate) transport: Transport,
    pub(crate) address: SocketAddr,
    /// Its connections are for blocks: index among the sockets of the service.
    pub(crate) socket: Option<u16>,
    /// Something arrived.
    pub(crate) ready: bool,
    /// Not read: its service is not switched on yet, is paused, or leaves.
    paused: bool,
    /// It will not be read again.
    stopped: bool,
}

impl Port {
    pub(crate) fn new(service: u16, transport: Transport, address: SocketAddr) -> Self {
        Self {
            service,
            transport,
            address,
            socket: None,
            ready: false,
            paused: false,
            stopped: false,
        }
    }

    /// A port that is read once its service is switched on.
    pub(crate) fn new_paused(service: u16, transport: Transport, address: SocketAddr) -> Self {
        Self { paused: true, ..Self::new(service, transport, address) }
    }

    /// A vacant place.
    pub(crate) fn vacant(transport: Transport) -> Self {
        Self::new_paused(NO_SERVICE, transport, SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    pub(crate) fn is_vacant(&self) -> bool {
        self.service == NO_SERVICE
    }

    pub(crate) fn is_of(&self, service: u16) -> bool {
        self.service == service
    }

    pub(crate) fn on_loopback(&self) -> bool {
        self.address.ip().is_loopback()
    }

    /// Whether there is something to read and reading is allowed.
    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.ready && !self.paused
    }

    /// Pauses or resumes reading it.
    pub(crate) fn pause<N: Nic>(&mut self, turn: &mut Turn<N>, index: usize, paused: bool) {
        if self.stopped {
            return;
        }
        self.paused = paused;
        // Arrivals during the pause were not reported.
        self.ready |= !paused;
        turn.nic.pause_port(index as PortIndex, paused);
    }

    /// The port is read from now on, unless its service is paused.
    pub(crate) fn switch_on<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        index: usize,
    ) {
        let share = services.get(usize::from(self.service));
        if self.paused && share.is_some_and(|share| !share.is_paused()) {
            self.pause(turn, index, false);
        }
    }

    /// The port is not read any more.
    pub(crate) fn stop<N: Nic>(&mut self, turn: &mut Turn<N>, index: usize) {
        turn.nic.stop_port(index as PortIndex);
        (self.paused, self.stopped, self.ready) = (true, true, false);
    }
}
