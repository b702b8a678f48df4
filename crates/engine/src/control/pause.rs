//! Holding a service: its clients wait while one of its accelerators begins a new generation as planned.
//!
//! A generation that ends takes what was with it along (see [`crate::RuntimeEvent`]). One that ends for a change that somebody
//! planned need not: before it ends its service is *held*. Nothing new is taken in any more, and what was taken in is
//! answered; when every worker has told so ([`DrainBarrier`]), the control side ends the generation, and nothing was with it.
//! The pause ends when the next generation begins. Meanwhile requests wait where nobody has accepted them:
//!
//! | port | what waits, and where |
//! |---|---|
//! | UDP | datagrams, in the socket's buffer; what finds no room there counts as `socket_overflow` |
//! | TCP | connections in the backlog, bytes in their sockets; clients feel back-pressure |
//! | shared memory | requests, in the client's own ring |
//!
//! What other workers handed over was accepted, and is served: every worker is paused on its own, and none has settled
//! before what it handed over was taken.
//!
//! *Nothing waits for ever.* Each worker ends its hold by itself [`PAUSE_NS`] after the old generation, which the control side
//! ends no later than the drain time; then requests get the reason why nobody is there. A drain and the service's own
//! leave end it at once. A worker without anything else to do sleeps meanwhile.

use wire::nic::Nic;

use crate::control::drain::{DrainBarrier, DrainVote};
use crate::service::share::ServiceShare;
use crate::worker::Worker;

/// How long clients of a paused service wait for the next generation, from the end of the last one.
pub const PAUSE_NS: u64 = 10_000_000_000;

/// Why a service share takes nothing in.
pub(crate) struct Pause {
    accelerator: u16,
    /// How long what was accepted may take.
    drain_ns: u64,
    /// It ends by then; `None` before its service is switched on, for nobody can tell how long the others of its change
    /// take.
    until_ns: Option<u64>,
    pub(crate) vote: DrainVote,
}

impl Pause {
    fn has_begun(&self) -> bool {
        self.until_ns.is_some()
    }
}

impl ServiceShare {
    /// Whether nothing is taken in.
    #[inline]
    pub(crate) fn is_paused(&self) -> bool {
        !self.pauses.is_empty()
    }

    /// The generation of an accelerator has ended: from now on the next one is waited for.
    pub(crate) fn await_next_generation(&mut self, accelerator: u16, now_ns: u64) {
        let of_life = |pause: &&mut Pause| pause.accelerator == accelerator && pause.has_begun();
        for pause in self.pauses.iter_mut().filter(of_life) {
            pause.until_ns = Some(now_ns + PAUSE_NS);
        }
    }
}

impl<N: Nic> Worker<N> {
    /// Holds a service for one of its accelerators.
    pub(crate) fn pause(
        &mut self,
        slot: usize,
        accelerator: u16,
        drain_ns: u64,
        barrier: DrainBarrier,
    ) {
        let share = &mut self.turn.services[slot];
        if self.turn.draining || share.leaving.is_some() {
            return;
        }
        let until_ns = Some(self.turn.now_ns.saturating_add(drain_ns).saturating_add(PAUSE_NS));
        share.pauses.push(Pause { accelerator, drain_ns, until_ns, vote: DrainVote::new(barrier) });
        self.apply_pause(slot);
    }

    /// A service that comes is paused once it is [switched on](Self::switch): until then the ports and the gauge are those
    /// of its former version.
    pub(crate) fn pause_from_switch(&mut self, slot: usize, accelerator: u16, drain_ns: u64) {
        if !self.turn.draining {
            let vote = DrainVote::new(DrainBarrier::default());
            let pause = Pause { accelerator, drain_ns, until_ns: None, vote };
            self.turn.services[slot].pauses.push(pause);
        }
    }

    /// Ends the holds of a service for one of its accelerators, or for all.
    pub(crate) fn end_pauses(&mut self, slot: usize, accelerator: Option<u16>) {
        self.end_pauses_if(slot, |pause| accelerator.is_none_or(|of| pause.accelerator == of));
    }

    fn end_pauses_if(&mut self, slot: usize, ends: impl Fn(&Pause) -> bool) {
        let mut ended = false;
        for mut pause in self.turn.services[slot].pauses.extract_if(.., |pause| ends(pause)) {
            pause.vote.set(false);
            ended |= pause.has_begun();
        }
        if !ended || self.turn.services[slot].is_paused() {
            return;
        }
        self.apply_pause(slot);
        self.turn.busy();
    }

    /// Reads the ports of a service or lets them be, as its holds say.
    fn apply_pause(&mut self, slot: usize) {
        let share = &self.turn.services[slot];
        let paused = share.is_paused();
        share.observe_pause();
        self.endpoints.pause(&mut self.turn, slot as u16, paused);
    }

    /// A service that came held is switched on: its time counts from now.
    pub(crate) fn begin_pauses(&mut self, slot: usize) {
        let now_ns = self.turn.now_ns;
        let mut begun = false;
        for pause in self.turn.services[slot].pauses.iter_mut().filter(|pause| !pause.has_begun()) {
            pause.until_ns = Some(now_ns.saturating_add(pause.drain_ns).saturating_add(PAUSE_NS));
            begun = true;
        }
        if begun {
            self.apply_pause(slot);
        }
    }

    /// Once a millisecond: whether a paused service has nothing left here, and whether its time is over.
    pub(crate) fn check_paused(&mut self, slot: usize) {
        if !self.turn.services[slot].is_paused() {
            return;
        }
        let now_ns = self.turn.now_ns;
        let overdue = |pause: &Pause| pause.until_ns.is_some_and(|until_ns| until_ns <= now_ns);
        if self.turn.services[slot].pauses.iter().any(overdue) {
            tracing::warn!(
                service = &*self.turn.services[slot].name,
                "the next runtime did not come in time; requests are no longer paused"
            );
            self.end_pauses_if(slot, overdue);
        }
        let quiet = self.turn.services[slot].under_way() == 0 || mutants::on("hold_with_debts");
        let asks = self.turn.services[slot].waits_for_backends();
        let settled = quiet && !asks && !self.owes_other_workers(slot);
        for pause in &mut self.turn.services[slot].pauses {
            pause.vote.set(settled);
        }
    }
}
