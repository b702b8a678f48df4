//! Pausing a service: its clients wait while one of its accelerators restarts as planned.
//!
//! The requests in flight of a generation end with it (see [`crate::RuntimeEvent`]). For a planned change this is
//! avoided: the service is *paused* first. It takes no new requests, and accepted ones are answered; when every
//! worker has voted ([`DrainBarrier`]), the control side ends the generation, which has no request in flight. The
//! pause ends when the next generation starts. Meanwhile requests wait without being accepted:
//!
//! | port | what waits, and where |
//! |---|---|
//! | UDP | datagrams, in the socket's buffer; those that do not fit count as `socket_overflow` |
//! | TCP | connections in the backlog, bytes in their sockets; clients feel back-pressure |
//! | shared memory | requests, in the client's own ring |
//! | sockets of kernels | connections, in the backlog; those that are open go on, and the vote waits for their end |
//!
//! Requests that other workers handed over were accepted, and are served. Every worker pauses on its own, and votes
//! only after the requests that it handed over have been taken.
//!
//! *Every pause ends.* Each worker ends a pause on its own [`PAUSE_NS`] after the end of the old generation, which is
//! no later than the drain time; then requests are dropped with the accelerator's reason. A drain, or the removal of
//! the service, ends the pause at once. An idle worker sleeps during a pause.

use wire::nic::Nic;

use crate::service::vote::{DrainBarrier, DrainVote, PAUSE_NS, Pause};
use crate::state::State;

impl<N: Nic> State<N> {
    /// Pauses a service for one of its accelerators.
    pub(crate) fn pause(
        &mut self,
        slot: usize,
        accelerator: u16,
        drain_ns: u64,
        barrier: DrainBarrier,
    ) {
        let share = &mut self.services[slot];
        if self.turn.draining || share.leaving.is_some() {
            return;
        }
        let until_ns = Some(self.turn.now_ns.saturating_add(drain_ns).saturating_add(PAUSE_NS));
        share.pauses.push(Pause { accelerator, drain_ns, until_ns, vote: DrainVote::new(barrier) });
        self.apply_pause(slot);
    }

    /// Pauses a new service from its [switch](Self::switch) on: until then the ports and the gauge belong to its
    /// previous version.
    pub(crate) fn pause_from_switch(&mut self, slot: usize, accelerator: u16, drain_ns: u64) {
        if !self.turn.draining {
            let vote = DrainVote::new(DrainBarrier::default());
            let pause = Pause { accelerator, drain_ns, until_ns: None, vote };
            self.services[slot].pauses.push(pause);
        }
    }

    /// Ends the pauses of a service for one of its accelerators, or for all.
    pub(crate) fn end_pauses(&mut self, slot: usize, accelerator: Option<u16>) {
        self.end_pauses_if(slot, |pause| accelerator.is_none_or(|of| pause.accelerator == of));
    }

    fn end_pauses_if(&mut self, slot: usize, ends: impl Fn(&Pause) -> bool) {
        let mut ended = false;
        for mut pause in self.services[slot].pauses.extract_if(.., |pause| ends(pause)) {
            pause.vote.set(false);
            ended |= pause.has_begun();
        }
        if !ended || self.services[slot].is_paused() {
            return;
        }
        self.apply_pause(slot);
        self.turn.busy();
    }

    /// Stops or resumes reading the ports of a service, depending on its pauses.
    fn apply_pause(&mut self, slot: usize) {
        let share = &self.services[slot];
        let paused = share.is_paused();
        share.observe_pause();
        self.endpoints.clients.pause(&mut self.turn, slot as u16, paused);
    }

    /// A service that was installed paused is switched on: its time limit starts.
    pub(crate) fn begin_pauses(&mut self, slot: usize) {
        let now_ns = self.turn.now_ns;
        let mut begun = false;
        for pause in self.services[slot].pauses.iter_mut().filter(|pause| !pause.has_begun()) {
            pause.until_ns = Some(now_ns.saturating_add(pause.drain_ns).saturating_add(PAUSE_NS));
            begun = true;
        }
        if begun {
            self.apply_pause(slot);
        }
    }

    /// Once a millisecond: votes for a paused service that has nothing outstanding here, and ends a pause whose time
    /// is over.
    pub(crate) fn check_paused(&mut self, slot: usize) {
        if !self.services[slot].is_paused() {
            return;
        }
        let now_ns = self.turn.now_ns;
        let overdue = |pause: &Pause| pause.until_ns.is_some_and(|until_ns| until_ns <= now_ns);
        if self.services[slot].pauses.iter().any(overdue) {
            tracing::warn!(
                service = &*self.services[slot].name,
                "the next runtime did not start in time; the pause has ended and requests are dropped"
            );
            self.end_pauses_if(slot, overdue);
        }
        let quiet = self.services[slot].in_flight() == 0 || mutants::on("hold_with_debts");
        let asks = self.endpoints.servers.asks::<N>(&self.services[slot], slot);
        let settled = quiet && !asks && !self.has_handover_in_flight(slot);
        for at in 0..self.services[slot].pauses.len() {
            let share = &mut self.services[slot];
            let accelerator = share.pauses[at].accelerator.into();
            let blocks = share.mqueues_of(accelerator);
            let connected = self.endpoints.servers.is_connected::<N>(slot as u16, &blocks)
                && !mutants::on("hold_connected");
            share.pauses[at].vote.set(settled && !connected);
        }
    }
}
