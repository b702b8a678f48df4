//! Holding a service: its clients wait while one of its accelerators begins a new life as planned.
//!
//! A life that ends takes what was with it along (see [`crate::LifeNews`]). One that ends for a change that somebody
//! planned need not: before it ends its service is *held*. Nothing new is taken in any more, and what was taken in is
//! answered; when every worker has told so ([`Farewell`]), the control side ends the life, and nothing was with it.
//! The hold ends when the next life begins. Meanwhile requests wait where nobody has accepted them:
//!
//! | port | what waits, and where |
//! |---|---|
//! | UDP | datagrams, in the socket's buffer; what finds no room there counts as `socket_overflow` |
//! | TCP | connections in the backlog, bytes in their sockets; clients feel back-pressure |
//! | shared memory | requests, in the client's own ring |
//!
//! What other workers handed over was accepted, and is served: every worker is held on its own, and none has settled
//! before what it handed over was taken.
//!
//! *Nothing waits for ever.* Each worker ends its hold by itself [`HOLD_NS`] after the old life, which the control side
//! ends no later than the drain time; then requests get the reason why nobody is there. A drain and the service's own
//! leave end it at once. A worker without anything else to do sleeps meanwhile.

use wire::nic::{Nic, PortIndex, StreamKey};

use crate::control::install::{Farewell, Word};
use crate::service::share::Lane;
use crate::worker::Worker;

/// How long clients of a held service wait for the next life, from the end of the last one.
pub const HOLD_NS: u64 = 10_000_000_000;

/// Why a lane takes nothing in.
pub(crate) struct Hold {
    accelerator: u16,
    /// How long what was accepted may take.
    drain_ns: u64,
    /// It ends by then; `None` before its service is switched on, for nobody can tell how long the others of its change
    /// take.
    until_ns: Option<u64>,
    pub(crate) word: Word,
}

impl Hold {
    fn has_begun(&self) -> bool {
        self.until_ns.is_some()
    }
}

impl Lane {
    /// Whether nothing is taken in.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        !self.holds.is_empty()
    }

    /// The life of an accelerator has ended: from now on the next one is waited for.
    pub(crate) fn await_next_life(&mut self, accelerator: u16, now_ns: u64) {
        let of_life = |hold: &&mut Hold| hold.accelerator == accelerator && hold.has_begun();
        for hold in self.holds.iter_mut().filter(of_life) {
            hold.until_ns = Some(now_ns + HOLD_NS);
        }
    }
}

impl<N: Nic> Worker<N> {
    /// Holds a service for one of its accelerators.
    pub(crate) fn hold(
        &mut self,
        slot: usize,
        accelerator: u16,
        drain_ns: u64,
        farewell: Farewell,
    ) {
        let lane = &mut self.lanes[slot];
        if self.draining || lane.leaving.is_some() {
            return;
        }
        let until_ns = Some(self.now_ns.saturating_add(drain_ns).saturating_add(HOLD_NS));
        lane.holds.push(Hold { accelerator, drain_ns, until_ns, word: Word::new(farewell) });
        self.heed_hold(slot);
    }

    /// A service that comes is held once it is [switched on](Self::switch): until then the ports and the gauge are those
    /// of its former version.
    pub(crate) fn hold_from_switch(&mut self, slot: usize, accelerator: u16, drain_ns: u64) {
        if !self.draining {
            let word = Word::new(Farewell::default());
            let hold = Hold { accelerator, drain_ns, until_ns: None, word };
            self.lanes[slot].holds.push(hold);
        }
    }

    /// Ends the holds of a service for one of its accelerators, or for all.
    pub(crate) fn end_holds(&mut self, slot: usize, accelerator: Option<u16>) {
        self.end_holds_if(slot, |hold| accelerator.is_none_or(|of| hold.accelerator == of));
    }

    fn end_holds_if(&mut self, slot: usize, ends: impl Fn(&Hold) -> bool) {
        let mut ended = false;
        for mut hold in self.lanes[slot].holds.extract_if(.., |hold| ends(hold)) {
            hold.word.set(false);
            ended |= hold.has_begun();
        }
        if !ended || self.lanes[slot].is_held() {
            return;
        }
        self.heed_hold(slot);
        let now_ns = self.now_ns;
        for key in 0..self.connections.len() as StreamKey {
            if self.connections.at(key).is_some_and(|c| usize::from(c.service) == slot) {
                // Who could not be heard was not idle.
                self.connections.change(key, |c| c.last_message_ns = now_ns);
                self.list_to_read(key);
            }
        }
        self.busy();
    }

    /// Reads the ports of a service or lets them be, as its holds say.
    fn heed_hold(&mut self, slot: usize) {
        let held = self.lanes[slot].is_held();
        self.lanes[slot].observe_hold();
        for (index, port) in self.ports.iter_mut().enumerate() {
            if usize::from(port.service) == slot {
                port.held = held;
                // What came meanwhile was not reported.
                port.ready |= !held;
                self.nic.hold_port(index as PortIndex, held);
            }
        }
    }

    /// A service that came held is switched on: its time counts from now.
    pub(crate) fn begin_holds(&mut self, slot: usize) {
        let now_ns = self.now_ns;
        let mut begun = false;
        for hold in self.lanes[slot].holds.iter_mut().filter(|hold| !hold.has_begun()) {
            hold.until_ns = Some(now_ns.saturating_add(hold.drain_ns).saturating_add(HOLD_NS));
            begun = true;
        }
        if begun {
            self.heed_hold(slot);
        }
    }

    /// Once a millisecond: whether a held service has nothing left here, and whether its time is over.
    pub(crate) fn look_after_held(&mut self, slot: usize) {
        if !self.lanes[slot].is_held() {
            return;
        }
        let now_ns = self.now_ns;
        let overdue = |hold: &Hold| hold.until_ns.is_some_and(|until_ns| until_ns <= now_ns);
        if self.lanes[slot].holds.iter().any(overdue) {
            tracing::warn!(
                service = &*self.lanes[slot].name,
                "the next runtime did not come in time; requests are no longer held"
            );
            self.end_holds_if(slot, overdue);
        }
        let quiet = self.lanes[slot].under_way() == 0 || mutants::on("hold_with_debts");
        let asks = self.lanes[slot].waits_for_backends();
        let settled = quiet && !asks && !self.owes_other_workers(slot);
        for hold in &mut self.lanes[slot].holds {
            hold.word.set(settled);
        }
    }
}
