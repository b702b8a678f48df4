//! The state of a worker, which a turn uses and control changes.

use wire::nic::Nic;

use crate::base::idle::Idle;
use crate::base::turn::Turn;
use crate::endpoint::set::Endpoints;
use crate::schedule::Schedule;
use crate::service::services::Services;

/// See the module documentation.
pub(crate) struct State<N: Nic> {
    pub(crate) turn: Turn<N>,
    pub(crate) services: Services,
    pub(crate) endpoints: Endpoints,
    pub(crate) schedule: Schedule,
    pub(crate) idle: Idle,
    /// It runs no further turn.
    pub(crate) stopped: bool,
}

impl<N: Nic> State<N> {
    /// Requests in flight of the service in a slot on this worker: counted from the tables and queues
    /// that hold them, not from the counters. Messages inside hand-over rings are counted on neither
    /// worker; see [`crate::base::metrics::ServiceCounters::handed_out`].
    pub(crate) fn outstanding_of(&self, service: usize) -> u64 {
        let Some(share) = self.services.get(service) else { return 0 };
        share.in_flight() + self.endpoints.outstanding::<N>(service as u16)
    }

    /// Requests in flight on this worker, and replies that have not been sent.
    pub(crate) fn outstanding(&self) -> u64 {
        (0..self.services.len()).map(|service| self.outstanding_of(service)).sum()
    }
}
