//! How a service leaves a worker, and how a worker ends: what was accepted is answered, within a time.
//!
//! A service that [leaves](crate::Leave) takes nothing new. When nothing of it is outstanding on a worker, that worker votes; when
//! all have voted ([`DrainBarrier`]), the control side [releases](Worker::release) it. What is still outstanding when its
//! time is over [expires](Worker::expire). A worker that shuts down does the same for all its services.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wire::DropReason;
use wire::nic::{Close, Nic, PortIndex, StreamKey};

use crate::endpoint::peer::{Link, ServiceLinks};
use crate::endpoint::ports::Port;
use crate::service::share::ServiceShare;
use crate::topology::Replies;
use crate::worker::{StreamOwner, Worker};

/// How many workers have nothing left of a service that leaves or is paused.
#[derive(Clone, Debug, Default)]
pub struct DrainBarrier(Arc<AtomicUsize>);

impl DrainBarrier {
    /// Whether all of `workers` have nothing left. A worker that takes something over takes its word
    /// back first, so this stays true once it is.
    pub fn is_complete(&self, workers: usize) -> bool {
        self.0.load(Ordering::Acquire) == workers
    }
}

/// A worker's word that it has nothing left, which it may take back.
pub(crate) struct DrainVote {
    barrier: DrainBarrier,
    given: bool,
}

impl DrainVote {
    /// Not given yet.
    pub(crate) fn new(barrier: DrainBarrier) -> Self {
        Self { barrier, given: false }
    }

    pub(crate) fn set(&mut self, given: bool) {
        if std::mem::replace(&mut self.given, given) != given {
            match given {
                true => self.barrier.0.fetch_add(1, Ordering::Release),
                false => self.barrier.0.fetch_sub(1, Ordering::Release),
            };
        }
    }
}

/// A service share on its way out.
pub(crate) struct Leaving {
    pub(crate) vote: DrainVote,
    /// Its time is over.
    pub(crate) expired: bool,
}

impl ServiceShare {
    /// Whether this is the place of a service that is not there.
    pub(crate) fn is_vacant(&self) -> bool {
        self.accelerators.is_empty()
    }

    /// Whether it leaves and has something left that is looked after.
    pub(crate) fn is_leaving_busy(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| !leaving.vote.given)
    }

    /// Something was taken over for it from another worker.
    pub(crate) fn revoke_votes(&mut self) {
        let leaving = self.leaving.iter_mut().map(|leaving| &mut leaving.vote);
        for vote in leaving.chain(self.pauses.iter_mut().map(|pause| &mut pause.vote)) {
            vote.set(false);
        }
    }
}

/// What a worker let go of: memory that somebody else should give back, since that takes long.
pub struct Detached {
    _lane: ServiceShare,
    _links: ServiceLinks,
    _ports: Vec<Port>,
}

impl<N: Nic> Worker<N> {
    /// Once a millisecond: whether what leaves has nothing left here.
    pub(crate) fn check_leaving(&mut self) {
        for slot in 0..self.services.len() {
            if self.services[slot].leaving.is_none() {
                continue;
            }
            let name = slot as u16;
            // Who keeps it may do so for ever: nothing is done for what has nothing left.
            let left = self.outstanding_of(slot) > 0 || self.connections.open_of(name) > 0;
            if left && self.services[slot].is_expired() {
                self.drop_outstanding(slot);
            }
            self.close_leaving_shm_clients(name);
            // What kernels ask for nobody's sake counts on no account, so it is waited for no longer than the service's time.
            let share = &self.services[slot];
            let asks = share.waits_for_backends() && !share.is_expired();
            let debts = self.outstanding_of(slot) > 0 && !mutants::on("leave_with_debts");
            let settled = !debts
                && !asks
                && self.connections.open_of(name) == 0
                && self.memory.of_service(name) == 0
                && !self.owes_other_workers(slot);
            if let Some(leaving) = &mut self.services[slot].leaving {
                leaving.vote.set(settled);
            }
        }
    }

    /// Whether something of a service is on its way to another worker, or from one.
    pub(crate) fn owes_other_workers(&mut self, slot: usize) -> bool {
        let taken = |link: &mut Option<Link>| link.as_mut().is_none_or(Link::is_empty);
        self.pending_losses.iter().any(|(_, envelope, _)| usize::from(envelope.service) == slot)
            || !self.links.iter_mut().all(|links| links.get_mut(slot).is_none_or(taken))
    }

    /// The time of a service that leaves is over: whatever it has not answered is dropped as
    /// `drain_timeout`, connections that do not take their replies are closed.
    pub(crate) fn expire(&mut self, slot: u16) {
        let share = self.services.get_mut(usize::from(slot));
        if let Some(leaving) = share.and_then(|share| share.leaving.as_mut()) {
            leaving.expired = true;
            self.drop_outstanding(slot.into());
        }
    }

    /// Drops everything that a service has under way on this worker, as `drain_timeout`.
    pub(crate) fn drop_outstanding(&mut self, slot: usize) {
        // All of them, however young.
        while let Some(request) = self.services[slot].sessions.expire(u64::MAX) {
            let (origin, number, expects) = (&request.origin, request.number, request.expects);
            self.services[slot].ended(request.mqueue);
            self.drop_request(slot, origin, number, expects, DropReason::DrainTimeout);
        }
        if self.services[slot].replies == Replies::None {
            for mqueue in 0..self.services[slot].mqueues.len() as u32 {
                let unread = self.services[slot].drop_unread(mqueue);
                self.services[slot].counters.drop_many(DropReason::DrainTimeout, unread);
            }
        }
        self.flush(false);
        for key in 0..self.connections.len() as StreamKey {
            if self.connections.at(key).is_some_and(|c| usize::from(c.service) == slot) {
                self.end_connection(key, Close::Graceful, DropReason::DrainTimeout);
            }
        }
        for port in self.ports.iter_mut().filter(|p| usize::from(p.service) == slot) {
            let waiting = port.tx.waiting().len();
            let counters = &self.services[slot].counters;
            counters.drop_many(DropReason::DrainTimeout, waiting as u64);
            port.tx.advance(waiting);
            port.kept = 0;
        }
    }

    /// Lets go of a service that was never switched on, or that has left; its slot and its ports are free
    /// afterwards. Blocks on this worker's core are stopped.
    pub(crate) fn release(&mut self, slot: u16) -> Detached {
        let number = usize::from(slot);
        if number >= self.services.len() {
            // Another share of the change failed before this worker got its own.
            return Detached {
                _lane: ServiceShare::vacant(1),
                _links: ServiceLinks(Vec::new()),
                _ports: Vec::new(),
            };
        }
        self.drop_outstanding(number);
        self.fabric.publish_credit(self.index, slot, 0);
        let mut share = std::mem::replace(
            &mut self.services[number],
            ServiceShare::vacant(self.fabric.workers()),
        );
        self.count_hung_blocks();
        let backends = share.backends.iter().flat_map(|b| &b.connections).map(|c| c.key);
        let keys: Vec<StreamKey> = share.clients.iter().map(|c| c.key).chain(backends).collect();
        for key in keys {
            self.nic.close(key, Close::Reset);
            let place = key - self.connections_max;
            self.owners[place as usize] = StreamOwner::Connection;
            self.free_keys.push(place);
        }
        let mut ports = Vec::new();
        for index in 0..self.ports.len() {
            if self.ports[index].service == slot {
                self.nic.close_port(index as PortIndex);
                ports.push(std::mem::replace(&mut self.ports[index], Port::vacant()));
            }
        }
        self.refresh_own_ports();
        // Blocks never change threads, so they end here.
        share.accelerators.clear();
        let links = self.links.iter_mut().map(|links| links.get_mut(number).and_then(Option::take));
        Detached { _lane: share, _links: ServiceLinks(links.collect()), _ports: ports }
    }

    /// From now on nothing new is accepted; what was accepted is answered.
    pub(crate) fn begin_drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        if mutants::on("serve_after_drain") {
            return;
        }
        (0..self.services.len()).for_each(|slot| self.end_pauses(slot, None));
        self.nic.stop_listening();
        self.stop_reading(None);
        self.memory.stop_reading(None);
    }

    /// Tells the others when everything this worker accepted is answered, or no longer.
    pub(crate) fn report_settled(&mut self) {
        let settled = self.outstanding() == 0
            && !self.services.iter().any(ServiceShare::waits_for_backends)
            && self.pending_losses.is_empty()
            && self.links.iter_mut().flatten().flatten().all(Link::is_empty);
        self.set_settled(settled);
    }

    /// A worker that takes something over unsettles before it returns the ring's slot, and a worker
    /// settles only when its slots have been returned: so whatever crosses between two workers, one of
    /// them is unsettled at any time.
    pub(crate) fn set_settled(&mut self, settled: bool) {
        if std::mem::replace(&mut self.settled, settled) != settled {
            self.fabric.settle(settled);
        }
    }

    /// Ends everything: what was not answered is dropped as `drain_timeout`. The blocks are stopped
    /// and the connections closed. Returns whether a block of this worker hangs.
    pub fn shutdown(&mut self) -> bool {
        self.begin_drain();
        self.discard_handed_over();
        for share in 0..self.services.len() {
            self.drop_outstanding(share);
        }
        self.close_memory_clients();
        self.counters.outstanding.set(self.outstanding());
        self.hung
    }

    /// Whether it was asked to stop: it takes no further turn.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether a block of this worker hangs or has hung.
    pub fn hung(&self) -> bool {
        self.hung
    }
}
