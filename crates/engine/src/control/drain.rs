//! How a service leaves a worker, and how a worker ends: accepted requests are answered, within a time limit.
//!
//! A service that [leaves](crate::Leave) takes no new requests. When nothing of it is outstanding on a worker, that
//! worker votes; when all have voted ([`DrainBarrier`](crate::DrainBarrier)), the control side posts `Release`.
//! `Expire` ends what is outstanding at the end of the drain time. A worker that shuts down does the same for all its
//! services.

use sockets::End;
use wire::DropReason;
use wire::nic::{Close, Nic};

use crate::base::links::ServiceLinks;
use crate::control::message::Detached;
use crate::service::share::ServiceShare;
use crate::worker::Worker;

impl ServiceShare {
    /// Whether the slot is free.
    pub(crate) fn is_vacant(&self) -> bool {
        self.accelerators.is_empty() && self.upstream.is_none()
    }

    /// Whether it leaves and has not voted. Such shares are checked once a millisecond.
    pub(crate) fn is_leaving_busy(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| !leaving.vote.is_given())
    }

    /// Revokes its votes, because it took over a message from another worker.
    pub(crate) fn revoke_votes(&mut self) {
        let leaving = self.leaving.iter_mut().map(|leaving| &mut leaving.vote);
        for vote in leaving.chain(self.pauses.iter_mut().map(|pause| &mut pause.vote)) {
            vote.set(false);
        }
    }
}

impl<N: Nic> Worker<N> {
    /// Once a millisecond: votes for each leaving service that has nothing outstanding on this worker.
    pub(crate) fn check_leaving(&mut self) {
        for slot in 0..self.turn.services.len() {
            if self.turn.services[slot].leaving.is_none() {
                continue;
            }
            let name = slot as u16;
            // A client may keep its slot occupied for any time, so work is done only for a service that has something
            // outstanding.
            let left = self.outstanding_of(slot) > 0 || self.endpoints.tcp.open_of(name) > 0;
            if left && self.turn.services[slot].is_expired() {
                self.drop_outstanding(slot);
            }
            self.endpoints.shm.close_leaving(&mut self.turn, name);
            // Backend requests not tied to a client request are not counted as outstanding: the worker waits for them
            // until the drain time is over, and no longer.
            let share = &self.turn.services[slot];
            let asks =
                share.waits_for_backends() && !share.is_expired() || share.waits_for_sockets();
            let debts = self.outstanding_of(slot) > 0 && !mutants::on("leave_with_debts");
            let settled = !debts
                && !asks
                && self.endpoints.tcp.open_of(name) == 0
                && self.endpoints.shm.of_service(name) == 0
                && !self.has_handover_in_flight(slot);
            if let Some(leaving) = &mut self.turn.services[slot].leaving {
                leaving.vote.set(settled);
            }
        }
    }

    /// Whether something of a service is in a hand-over ring, to or from another worker.
    pub(crate) fn has_handover_in_flight(&mut self, slot: usize) -> bool {
        let name = slot as u16;
        self.turn.outbound.has_unsent(Some(name)) || self.endpoints.peers.is_hinted_for(name)
    }

    /// The drain time of a leaving service is over: its unanswered requests are dropped as `drain_timeout`, and
    /// connections that do not read their replies are closed.
    pub(crate) fn expire(&mut self, slot: u16) {
        let share = self.turn.services.get_mut(usize::from(slot));
        if let Some(leaving) = share.and_then(|share| share.leaving.as_mut()) {
            leaving.expired = true;
            self.drop_outstanding(slot.into());
        }
    }

    /// Drops everything of a service that is in flight on this worker, as `drain_timeout`.
    pub(crate) fn drop_outstanding(&mut self, slot: usize) {
        let Self { turn, endpoints, .. } = self;
        endpoints.drop_requests(turn, slot, DropReason::DrainTimeout);
        endpoints.drop_upstream_requests(turn, slot, DropReason::DrainTimeout);
        turn.end_sockets(slot as u16, 0..u32::MAX, End::DrainTimeout, false);
        endpoints.flush(turn, false);
        turn.flush_backends();
        endpoints.tcp.close_all(turn, slot as u16, DropReason::DrainTimeout);
        endpoints.udp.drop_waiting(turn, slot as u16, DropReason::DrainTimeout);
    }

    /// Removes a service that was never switched on, or that has left; its slot and its ports are free afterwards.
    /// Blocks on this worker's core are stopped.
    pub(crate) fn release(&mut self, slot: u16) -> Detached {
        let number = usize::from(slot);
        if number >= self.turn.services.len() {
            // The change failed on another worker before this one got its share.
            return Detached::default();
        }
        self.drop_outstanding(number);
        self.turn.release_sockets(slot);
        let Self { turn, endpoints, schedule, .. } = self;
        turn.shared.publish_credit(turn.index, slot, 0);
        schedule.remove(number);
        let workers = turn.shared.workers();
        endpoints.udp.forget_pools(turn);
        let vacant = ServiceShare::vacant(workers);
        let mut share = std::mem::replace(&mut turn.services[number], vacant);
        turn.count_hung_blocks();
        for key in share.backends.keys() {
            turn.nic.close(key, Close::Reset);
            turn.stream_keys.free(key);
        }
        turn.close_upstream(&mut share);
        for (.., key) in share.sockets.iter_mut().flat_map(|sockets| sockets.keys_mut()) {
            turn.nic.close(*key, Close::Reset);
            turn.stream_keys.free(*key);
        }
        let ports = endpoints.close_ports(turn, slot);
        // Blocks cannot move to another thread, so they end here.
        share.accelerators.clear();
        let links = (0..workers).map(|worker| {
            let link_in = endpoints.peers.replace(worker, number, None);
            let link_out = turn.outbound.replace(worker, number, None);
            link_in.zip(link_out)
        });
        let links = ServiceLinks(links.collect());
        Detached { _share: Some(share), _links: Some(links), _ports: ports }
    }

    /// Accepts no new requests; accepted ones are answered.
    pub(crate) fn begin_drain(&mut self) {
        if std::mem::replace(&mut self.turn.draining, true) {
            return;
        }
        if mutants::on("serve_after_drain") {
            return;
        }
        (0..self.turn.services.len()).for_each(|slot| self.end_pauses(slot, None));
        self.turn.nic.stop_listening();
        self.endpoints.leave(&mut self.turn, None);
    }

    /// Reports whether everything that this worker accepted has been answered.
    pub(crate) fn report_settled(&mut self) {
        let settled = self.outstanding() == 0
            && !self.turn.services.iter().any(ServiceShare::waits_for_backends)
            && !self.turn.services.iter().any(ServiceShare::waits_for_sockets)
            && !self.has_relays()
            && !self.turn.outbound.has_unsent(None)
            && !self.endpoints.peers.is_hinted();
        self.turn.set_settled(settled);
    }

    /// Whether connections are open whose bytes are passed on as they come.
    fn has_relays(&self) -> bool {
        let relays = |slot: &usize| self.turn.services[*slot].relays_streams();
        let mut slots = (0..self.turn.services.len()).filter(relays);
        slots.any(|slot| self.endpoints.tcp.open_of(slot as u16) > 0)
    }

    /// Ends the worker: unanswered requests are dropped as `drain_timeout`, blocks are stopped and connections
    /// closed. Returns whether a block of this worker hangs.
    pub fn shutdown(&mut self) -> bool {
        self.begin_drain();
        self.endpoints.peers.discard(&mut self.turn);
        for slot in 0..self.turn.services.len() {
            self.drop_outstanding(slot);
            self.turn.release_sockets(slot as u16);
        }
        self.endpoints.shm.close_all(&mut self.turn);
        self.turn.counters.outstanding.set(self.outstanding());
        self.hung()
    }

    /// Whether it was asked to stop: it runs no further turn.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }
}
