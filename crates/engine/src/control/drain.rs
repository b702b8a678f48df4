//! How a service leaves a worker, and how a worker ends: accepted requests are answered, within a time limit.
//!
//! A service that [leaves](crate::Leave) takes no new requests. When nothing of it is outstanding on a worker, that
//! worker votes; when all have voted ([`DrainBarrier`](crate::DrainBarrier)), the control side posts `Release`.
//! `Expire` ends what is outstanding at the end of the drain time. A worker that shuts down does the same for all its
//! services.

use std::ops::Range;

use wire::DropReason;
use wire::nic::Nic;

use crate::base::links::ServiceLinks;
use crate::control::message::Detached;
use crate::service::share::ServiceShare;
use crate::state::State;

/// All blocks of a service.
const ALL: Range<u32> = 0..u32::MAX;

impl<N: Nic> State<N> {
    /// Once a millisecond: votes for each leaving service that has nothing outstanding on this worker.
    pub(crate) fn check_leaving(&mut self) {
        for slot in 0..self.services.len() {
            if self.services[slot].leaving.is_none() {
                continue;
            }
            let name = slot as u16;
            // A client may keep its slot occupied for any time, so work is done only for a service that has something
            // outstanding.
            let left =
                self.outstanding_of(slot) > 0 || self.endpoints.clients.tcp.open_of(name) > 0;
            if left && self.services[slot].is_expired() {
                self.drop_outstanding(slot);
            }
            self.endpoints.clients.close_leaving(&mut self.turn, &mut self.services, name);
            // Backend requests not tied to a client request are not counted as outstanding: the worker waits for them
            // until the drain time is over, and no longer.
            let share = &self.services[slot];
            let servers = &self.endpoints.servers;
            let asks = servers.asks::<N>(share, slot) && !share.is_expired()
                || servers.is_connected::<N>(name, &ALL);
            let debts = self.outstanding_of(slot) > 0 && !mutants::on("leave_with_debts");
            let settled = !debts
                && !asks
                && self.endpoints.clients.tcp.open_of(name) == 0
                && self.endpoints.clients.processes_of::<N>(name) == 0
                && !self.has_handover_in_flight(slot);
            if let Some(leaving) = &mut self.services[slot].leaving {
                leaving.vote.set(settled);
            }
        }
    }

    /// Whether something of a service is in a hand-over ring, to or from another worker.
    pub(crate) fn has_handover_in_flight(&mut self, slot: usize) -> bool {
        let name = slot as u16;
        self.turn.outbound.has_unsent(Some(name)) || self.endpoints.clients.is_hinted_for::<N>(name)
    }

    /// The drain time of a leaving service is over: its unanswered requests are dropped as `drain_timeout`, and
    /// connections that do not read their replies are closed.
    pub(crate) fn expire(&mut self, slot: u16) {
        let share = self.services.get_mut(usize::from(slot));
        if let Some(leaving) = share.and_then(|share| share.leaving.as_mut()) {
            leaving.expired = true;
            self.drop_outstanding(slot.into());
        }
    }

    /// Drops everything of a service that is in flight on this worker, as `drain_timeout`.
    pub(crate) fn drop_outstanding(&mut self, slot: usize) {
        let Self { turn, services, endpoints, .. } = self;
        endpoints.drop_outstanding(turn, services, slot, DropReason::DrainTimeout);
    }

    /// Removes a service that was never switched on, or that has left; its slot and its ports are free afterwards.
    /// Blocks on this worker's core are stopped.
    pub(crate) fn release(&mut self, slot: u16) -> Detached {
        let number = usize::from(slot);
        if number >= self.services.len() {
            // The change failed on another worker before this one got its share.
            return Detached::default();
        }
        self.drop_outstanding(number);
        let Self { turn, services, endpoints, schedule, .. } = self;
        turn.shared.publish_credit(turn.index, slot, 0);
        schedule.remove(number);
        let workers = turn.shared.workers();
        endpoints.clients.udp.forget_pools(services);
        let parts = endpoints.remove(turn, slot);
        let vacant = ServiceShare::vacant(workers);
        let mut share = std::mem::replace(&mut services[number], vacant);
        services.count_hung_blocks(turn);
        let ports = endpoints.clients.close_ports(turn, slot);
        // Blocks cannot move to another thread, so they end here.
        share.accelerators.clear();
        let links = (0..workers).map(|worker| {
            let link_in = endpoints.clients.set_link::<N>(worker, number, None);
            let link_out = turn.outbound.replace(worker, number, None);
            link_in.zip(link_out)
        });
        let links = ServiceLinks(links.collect());
        Detached { _share: Some(share), _parts: Some(parts), _links: Some(links), _ports: ports }
    }

    /// Accepts no new requests; accepted ones are answered.
    pub(crate) fn begin_drain(&mut self) {
        if std::mem::replace(&mut self.turn.draining, true) {
            return;
        }
        if mutants::on("serve_after_drain") {
            return;
        }
        (0..self.services.len()).for_each(|slot| self.end_pauses(slot, None));
        self.turn.nic.stop_listening();
        self.endpoints.leave(&mut self.turn, &mut self.services, None);
    }

    /// Reports whether everything that this worker accepted has been answered.
    pub(crate) fn report_settled(&mut self) {
        let settled = self.outstanding() == 0
            && !self.services.iter().enumerate().any(|(slot, share)| {
                let servers = &self.endpoints.servers;
                servers.asks::<N>(share, slot) || servers.is_connected::<N>(slot as u16, &ALL)
            })
            && !self.has_relays()
            && !self.turn.outbound.has_unsent(None)
            && !(0..self.services.len() as u16)
                .any(|slot| self.endpoints.clients.is_hinted_for::<N>(slot));
        self.turn.set_settled(settled);
    }

    /// Whether connections are open whose bytes are passed on as they come.
    fn has_relays(&self) -> bool {
        let relays = |slot: &usize| self.services[*slot].relays_streams();
        let mut slots = (0..self.services.len()).filter(relays);
        slots.any(|slot| self.endpoints.clients.tcp.open_of(slot as u16) > 0)
    }

    /// Ends the worker: unanswered requests are dropped as `drain_timeout`, blocks are stopped and connections
    /// closed.
    pub(crate) fn shutdown(&mut self) {
        self.begin_drain();
        self.endpoints.clients.discard(&mut self.turn, &mut self.services);
        for slot in 0..self.services.len() {
            self.drop_outstanding(slot);
            self.endpoints.release(&mut self.turn, slot as u16);
        }
        self.endpoints.clients.close_all(&mut self.turn, &mut self.services);
        self.turn.counters.outstanding.set(self.outstanding());
    }
}
