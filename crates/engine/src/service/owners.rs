//! Which worker has the state of a request.
//!
//! Functions whose states cannot be merged are seen on one worker by all requests, or by all requests with the same key. A request that another
//! worker receives is handed over before functions see it, in the order of its flow, through the ring of the service between the two workers. There
//! it is dispatched to mqueues of that worker and to no others, so the functions see its reply too.

use onpath::Owner;
use wire::admission::key_hash;

use crate::base::arrival::Arrival;

/// See the module's text. By default all states are where requests are received.
#[derive(Default)]
pub(crate) struct Owners {
    owner: Owner,
    /// The workers that may have states.
    workers: Vec<u16>,
    worker: u16,
}

impl Owners {
    /// Where the states of these functions are, on these workers. This one is `worker`.
    pub(crate) fn new(owner: Owner, workers: Vec<u16>, worker: u16) -> Self {
        Self { owner, workers, worker }
    }

    /// Whether a state is not simply where a request is received.
    pub(crate) fn are_used(&self) -> bool {
        self.owner != Owner::Receiver
    }

    /// The worker that has the state of a request, if that is another one. One that was handed over stays.
    #[inline]
    pub(crate) fn elsewhere(&self, arrival: &Arrival, request: &[u8]) -> Option<u16> {
        let place = match self.owner {
            Owner::Receiver => return None,
            _ if arrival.target.is_some() || mutants::on("split_single_state") => return None,
            Owner::One => 0,
            Owner::OfKey(key) => {
                (key_hash(key.of(request)) % self.workers.len().max(1) as u64) as usize
            }
        };
        self.workers.get(place).copied().filter(|worker| *worker != self.worker)
    }
}
